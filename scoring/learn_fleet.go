package scoring

import (
	"math"
	"slices"

	"kvepp/kvblock"
)

// fleet is the workers of one model, and what they have in common: the average worker. An engine can report nonsense,
// or response at strange times. So each figure is that of the workers about as far as the median one is. An engine that
// differs more is priced by its own samples and changes nothing for the others, and it never counts for other models.
type fleet struct {
	model             string
	workers           []kvblock.Worker
	samples, prefills uint64 // of all workers; of these, samples of prefills
	unread            uint64 // samples since the latest revise
	usual             pace   // sums over the workers that are not far off
	transfer          transfer
}

// fleetOf returns the fleet of a model. It is empty if no request for the model was booked.
func (l *learned) fleetOf(model string) *fleet {
	if model == "" {
		return &l.rest
	}
	if f := l.byModel[model]; f != nil {
		return f
	}
	return &noFleet
}

var noFleet fleet // never written to

// join moves a worker to the fleet of a model; "": not known. Models without workers are forgotten.
func (l *learned) join(w kvblock.Worker, model string) {
	was, f := l.fleets[w], &l.rest
	was.workers = slices.DeleteFunc(was.workers, func(o kvblock.Worker) bool { return o == w })
	if l.revise(was); len(was.workers) == 0 && was != &l.rest {
		delete(l.byModel, was.model)
	}
	if model != "" {
		if f = l.byModel[model]; f == nil {
			if l.byModel == nil {
				l.byModel = map[string]*fleet{}
			}
			f = &fleet{model: model}
			l.byModel[model] = f
		}
	}
	f.workers = append(f.workers, w)
	l.fleets[w], l.workers[w].latest = f, f.prefills
	l.revise(f)
}

// common returns the times of the average worker, for workers with too few samples and for those that are as fast.
func (f *fleet) common() prices {
	p := prices{secondsPerToken: safeSecondsPerToken, gapPerToken: safeGapPerToken}
	if s := f.usual.prefill.slope; s > 0 {
		p.secondsPerToken, p.stepSeconds = s, f.usual.prefill.constant
	}
	if f.usual.gap.samples >= enough {
		p.gapPerToken = max(f.usual.gap.slope, safeGapPerToken)
	}
	return p
}

func (f *fleet) outputTokens() float64 {
	if f.usual.output.samples < enough {
		return safeOutputTokens
	}
	return f.usual.output.value
}

// revise computes what the workers of a fleet have in common.
func (l *learned) revise(f *fleet) {
	f.unread, l.known = 0, l.known[:0]
	for _, w := range f.workers {
		p := l.workers[w]
		// An engine without requests loses its voice, so that the average becomes that of those that compute.
		p.prefill.scale(min(1, mostVoice/p.prefill.weight) * l.kept(w))
		if p.prefill.weight > 0 || p.output.samples > 0 {
			l.known = append(l.known, p)
		}
	}
	by := f.usual.prefill
	if by.slope == 0 {
		by = line{slope: 1}
	}
	one := line{constant: 1}
	f.usual = pace{
		prefill: l.pool(&by, farOff, func(p *pace) line { return p.prefill }),
		gap:     l.pool(&one, farOff, func(p *pace) line { return p.gap }),
		output:  l.poolMean(farOff, func(p *pace) mean { return p.output }),
		life:    l.poolMean(farOff, func(p *pace) mean { return p.life }),
		noise:   l.poolMean(farOff*farOff, func(p *pace) mean { return p.noise }),
	}
	f.usual.prefill.fit(leastSlope)
	f.usual.gap.fit(0)
}

// pool adds up one line of the workers in l.known that differ from the median one by at most a factor far. The line by
// says what to expect. Of two workers the lower one counts as the median.
func (l *learned) pool(by *line, far float64, of func(*pace) line) (sum line) {
	l.ratios = l.ratios[:0]
	for i := range l.known {
		if o := of(&l.known[i]); o.weight > 0 {
			l.ratios = append(l.ratios, o.over(by))
		}
	}
	if len(l.ratios) == 0 {
		return sum
	}
	slices.Sort(l.ratios)
	median := l.ratios[(len(l.ratios)-1)/2]
	for i := range l.known {
		o := of(&l.known[i])
		if r := o.over(by); o.weight > 0 && r >= median/far && r <= median*far {
			o.scale(min(1, mostVoice/o.weight))
			sum.plus(&o)
		}
	}
	return sum
}

// over returns how many times the sum of y is what another line gives.
func (l *line) over(by *line) float64 { return l.y / (by.constant*l.weight + by.slope*l.x) }

// poolMean is pool for a mean.
func (l *learned) poolMean(far float64, of func(*pace) mean) mean {
	sum := l.pool(&line{constant: 1}, far, func(p *pace) line {
		m := of(p)
		return line{weight: m.samples, y: m.samples * m.value}
	})
	_, y := sum.means()
	return mean{samples: sum.weight, value: y}
}

// refit sets the prices of a worker after a sample. The average is computed again after so many samples that it costs
// little.
func (l *learned) refit(w kvblock.Worker) {
	f := l.fleets[w]
	f.samples++
	if f.unread++; 2*f.unread >= min(f.samples, 2*uint64(len(f.workers))) {
		l.revise(f)
		for _, other := range f.workers { // the average has changed for them too
			l.pricePrefill(other)
		}
	}
	l.priceGap(w)
	l.pricePrefill(w)
}

// priceGap sets what held tokens cost on a worker.
func (l *learned) priceGap(w kvblock.Worker) {
	usual, own := &l.fleets[w].usual.gap, &l.workers[w].gap
	l.prices[w].gapPerToken = 0
	if own.samples >= enough {
		held, _ := usual.means()
		own.fitLike(usual, held, 1, 0)
		l.prices[w].gapPerToken = max(own.slope, safeGapPerToken)
	}
}

// pricePrefill sets what prefill takes on a worker: as long as on the average worker if the two are about equal for the
// usual number of tokens, or if noise may be all that they differ by. On a slower one responses are taken to be slower
// by the same factor, up to farOff.
func (l *learned) pricePrefill(w kvblock.Worker) {
	usual, own, p := &l.fleets[w].usual, &l.workers[w].prefill, &l.prices[w]
	p.secondsPerToken, p.stepSeconds, p.slowerPerToken = 0, 0, 0
	if own.samples < enough {
		return
	}
	tokens, _ := usual.prefill.means()
	kept := l.kept(w)
	own.fitLike(&usual.prefill, tokens, kept, leastSlope)
	took, average := own.at(tokens), usual.prefill.at(tokens)
	// The standard deviation of normal errors is 1.25 times their mean absolute value.
	standardError := 1.25 * usual.noise.value / math.Sqrt(max(kept*own.weight, 1))
	if math.Abs(took-average) < max(alikeShare*min(took, average), alikeErrors*standardError) {
		return
	}
	p.secondsPerToken, p.stepSeconds = own.slope, own.constant
	if average > 0 && took > average {
		_, gap := usual.gap.means()
		p.slowerPerToken = float32((min(took/average, farOff) - 1) * gap)
	}
}

// at returns y at x.
func (l *line) at(x float64) float64 { return l.constant + l.slope*x }

// means returns the means of x and y; 0 without samples.
func (l *line) means() (x, y float64) {
	if l.weight == 0 {
		return 0, 0
	}
	return l.x / l.weight, l.y / l.weight
}

// fit sets the line's slope and constant by its sums, if these are enough samples. slope is from least times y/x to y/x
// of the sums: the steepest sensible line goes through the origin, and noise must not give one that is nearly flat.
func (l *line) fit(least float64) {
	if l.samples >= enough {
		l.slope, l.constant = l.solve(least * l.y / l.x)
	}
}

// fitLike is fit for one worker. Samples of one size do not tell what another size takes: by chance, a few short
// prompts may give any slope. So the average worker's line, as many times slower as the worker is, counts as two more
// samples of little weight: at 0 and at twice the usual size. That factor, in turn, has one more sample of 1. kept is
// the weight that the worker's samples have kept.
func (l *line) fitLike(average *line, usual, kept, least float64) {
	all := *l
	if expected := average.constant*all.weight + average.slope*all.x; expected > 0 {
		slower := (kept*all.weight*all.y/expected + 1) / (kept*all.weight + 1)
		all.scale(kept)
		for _, x := range [...]float64{0, 2 * usual} {
			all.sum(x, slower*average.at(x), likeness)
		}
	}
	l.slope, l.constant = all.solve(least * average.slope)
}

// solve returns the line that the sums give, which have samples, with at least this slope.
func (l *line) solve(least float64) (slope, constant float64) {
	ratio := l.y / l.x
	slope = ratio
	if d := l.weight*l.xx - l.x*l.x; d > 1e-9*l.weight*l.xx { // else all samples have one x
		slope = min(max((l.weight*l.xy-l.x*l.y)/d, least), ratio)
	}
	constant = max((l.y-slope*l.x)/l.weight, 0)
	if math.IsInf(slope, 0) || math.IsNaN(slope) || math.IsInf(constant, 0) || math.IsNaN(constant) {
		return 0, 0
	}
	return slope, constant
}
