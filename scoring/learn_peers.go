package scoring

import (
	"math"
	"slices"

	"kvepp/kvblock"
)

// Replicas learn from their own requests alone. They tell each other their sums, which add up: a fit over the sums of
// all replicas is a fit over all requests. Each replica's sums replace what it told before, so that nothing counts
// twice.

// lesson is what one origin has learned: of a worker, and of all.
type lesson struct {
	worker pace
	ofAll
}

// learnedNumbers is the length of a lesson as numbers.
const learnedNumbers = 4*6 + 3*2

// numbers appends the lesson to dst.
func (l *lesson) numbers(dst []float64) []float64 {
	for _, f := range []*line{&l.worker.prefill, &l.worker.gap, &l.all.prefill, &l.all.gap} {
		dst = append(dst, float64(f.samples), f.weight, f.x, f.y, f.xx, f.xy)
	}
	return append(dst, l.answer.samples, l.answer.value, l.life.samples, l.life.value, l.noise.samples, l.noise.value)
}

// lessonOf is the reverse of numbers. false: the numbers are no lesson. They come from another process.
func lessonOf(values []float64) (l lesson, ok bool) {
	if len(values) != learnedNumbers {
		return l, false
	}
	for _, v := range values {
		if !(v >= 0 && v <= 1e24) { // also NaN
			return l, false
		}
	}
	next := func() float64 {
		v := values[0]
		values = values[1:]
		return v
	}
	for _, f := range []*line{&l.worker.prefill, &l.worker.gap, &l.all.prefill, &l.all.gap} {
		*f = line{samples: int(min(next(), enoughGaps)), weight: next(), x: next(), y: next(), xx: next(), xy: next()}
		if f.samples > 0 && !(f.weight >= 1 && f.weight <= 1/(1-keepGap)+1 && f.x > 0 && f.y > 0) {
			return l, false
		}
	}
	l.answer, l.life, l.noise = mean{next(), next()}, mean{next(), next()}, mean{next(), next()}
	return l, max(l.answer.samples, l.life.samples, l.noise.samples) <= 100 &&
		l.answer.value <= maxSampleTokens && max(l.life.value, l.noise.value) <= maxSampleSeconds
}

// plus adds the sums of o to l.
func (l *line) plus(o *line) {
	l.samples = min(l.samples+o.samples, enoughGaps)
	l.weight += o.weight
	l.x, l.y, l.xx, l.xy = l.x+o.x, l.y+o.y, l.xx+o.xx, l.xy+o.xy
}

// with returns the line with the sums of other origins.
func (l *line) with(others *line) line {
	all := *l
	all.plus(others)
	return all
}

// plus adds the samples of o.
func (m *mean) plus(o *mean) {
	if all := m.samples + o.samples; all > 0 {
		m.value = (m.samples*m.value + o.samples*o.value) / all
		m.samples = all
	}
}

// MuchUntold is the value of Untold above which the other replicas should know at once. The first samples of a worker
// change its price most.
const MuchUntold = 0.1

// peerLessons is what other origins have learned.
type peerLessons struct {
	origins []*Copies
	// Sums over all origins, with those of dead ones.
	workers []pace // indexed by worker
	ofAll
	// dead is what origins had learned that have died, by worker. It fades with each further sample of the worker.
	dead map[kvblock.Worker]*lesson
}

// Untold returns how much of what the book has learned of a worker from its own requests came after LearnedNumbers was
// called for it, as a part (0..1) of all. If it is high, the other replicas price the worker by little.
func (a *ActiveSequences) Untold(w kvblock.Worker) float64 {
	a.lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.learned.workers) || a.learned.workers[w].samples == 0 {
		return 0
	}
	p := &a.learned.workers[w]
	return float64(p.samples-p.told) / float64(p.samples)
}

// LearnedNumbers appends to dst what the book has learned of a worker from its own requests, for Copies.Learned of the
// other replicas: the policy Time prices by it. It appends nothing before the first sample.
func (a *ActiveSequences) LearnedNumbers(w kvblock.Worker, dst []float64) []float64 {
	a.lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.learned.workers) || a.learned.workers[w].samples == 0 {
		return dst
	}
	p := &a.learned.workers[w]
	p.told = p.samples
	l := lesson{*p, a.learned.ofAll}
	return l.numbers(dst)
}

// Learned notes what the origin has learned of a worker. It replaces what the origin told of that worker before. false:
// the values are not those of LearnedNumbers.
func (c *Copies) Learned(w kvblock.Worker, values []float64) bool {
	l, ok := lessonOf(values)
	if !ok || w >= MaxWorkers {
		return false
	}
	a := c.book
	a.lock()
	defer a.mu.Unlock()
	a.fit(int(w) + 1)
	if a.learned.peers == nil {
		a.learned.peers = &peerLessons{dead: map[kvblock.Worker]*lesson{}}
	}
	p := a.learned.peers
	if c.lessons == nil {
		c.lessons = map[kvblock.Worker]*lesson{}
		p.origins = append(p.origins, c)
	}
	c.lessons[w], c.latest = &l, &l
	a.learned.forgetUnused(w)
	a.learned.sum(w)
	return true
}

// sum adds up what other origins have learned of a worker, and of all, and prices the worker anew.
func (l *learned) sum(w kvblock.Worker) {
	p := l.peers
	if n := len(l.workers); n > len(p.workers) {
		p.workers = append(p.workers, make([]pace, n-len(p.workers))...)
	}
	var worker pace
	var all ofAll
	for _, c := range p.origins {
		if own := c.lessons[w]; own != nil {
			worker.plus(&own.worker)
		}
		if c.latest != nil {
			all.plus(&c.latest.ofAll)
		}
	}
	if dead := p.dead[w]; dead != nil {
		worker.plus(&dead.worker)
		all.plus(&dead.ofAll)
	}
	p.workers[w], p.ofAll = worker, all
	l.refit(w)
}

func (p *pace) plus(o *pace) {
	p.prefill.plus(&o.prefill)
	p.gap.plus(&o.gap)
}

func (l *ofAll) plus(o *ofAll) {
	l.all.plus(&o.all)
	l.answer.plus(&o.answer)
	l.life.plus(&o.life)
	l.noise.plus(&o.noise)
}

// of returns the sums of other origins for a worker.
func (p *peerLessons) of(w kvblock.Worker) pace {
	if p == nil || int(w) >= len(p.workers) {
		return pace{}
	}
	return p.workers[w]
}

// fade lessens what dead origins had learned of a worker, when a sample of it comes. keep is the weight that earlier
// samples keep.
func (l *learned) fade(w kvblock.Worker, keep float64) {
	if l.peers == nil || l.peers.dead[w] == nil {
		return
	}
	d := l.peers.dead[w]
	for _, f := range []*line{&d.worker.prefill, &d.worker.gap, &d.all.prefill, &d.all.gap} {
		f.keep(keep)
	}
	l.sum(w)
}

// bequeath keeps what a dead origin had learned, unless an earlier dead one had learned more.
func (l *learned) bequeath(c *Copies) {
	p := l.peers
	if p == nil || c.lessons == nil {
		return
	}
	p.origins = slices.DeleteFunc(p.origins, func(o *Copies) bool { return o == c })
	for w, own := range c.lessons {
		if before := p.dead[w]; before == nil || before.worker.prefill.weight <= own.worker.prefill.weight {
			p.dead[w] = own
		}
	}
	for w := range c.lessons {
		l.sum(w)
	}
	c.lessons, c.latest = nil, nil
}

// forgetPeers clears what other origins have learned of a worker.
func (l *learned) forgetPeers(w kvblock.Worker) {
	p := l.peers
	if p == nil {
		return
	}
	delete(p.dead, w)
	for _, c := range p.origins {
		delete(c.lessons, w)
	}
	if int(w) < len(p.workers) {
		p.workers[w] = pace{}
	}
}

// refit sets the prices of a worker and of all by the sums of all origins.
func (l *learned) refit(w kvblock.Worker) {
	all := pace{}
	if l.peers != nil {
		all = l.peers.all
	}
	l.all.prefill.fit(&all.prefill, enoughPrefills, 0.1)
	l.all.gap.fit(&all.gap, enoughGaps, 0)
	usual, _ := l.all.prefill.means(&all.prefill)
	held, gap := l.all.gap.means(&all.gap)
	peers, own := l.peers.of(w), &l.workers[w]
	if own.gap.samples+peers.gap.samples >= enoughGaps {
		own.gap.fitLike(&l.all.gap, &peers.gap, held, 1, 0)
		l.prices[w].gapPerToken = max(own.gap.slope, leastGapPerToken)
	}
	l.pricePrefill(w, usual, gap)
	for range pricedAgain { // the average has changed for the others too
		l.next = (l.next + 1) % len(l.workers)
		l.pricePrefill(kvblock.Worker(l.next), usual, gap)
	}
}

// pricePrefill sets what prefill takes on a worker: as long as on the average worker if the two are about equal for the
// usual number of tokens, or if noise may be all that they differ by. On a slower one answers are taken to be slower by
// the same factor. gap is the mean time between two tokens of all answers, in seconds.
func (l *learned) pricePrefill(w kvblock.Worker, usual, gap float64) {
	peers, own, p := l.peers.of(w), &l.workers[w].prefill, &l.prices[w]
	p.secondsPerToken, p.stepSeconds, p.slowerPerToken = 0, 0, 0
	if own.samples+peers.prefill.samples < enoughPrefills {
		return
	}
	kept := l.kept(w)
	own.fitLike(&l.all.prefill, &peers.prefill, usual, kept, 0.1)
	took, average := own.at(usual), l.all.prefill.at(usual)
	// The standard deviation of normal errors is 1.25 times their mean absolute value.
	standardError := 1.25 * l.noiseSeconds() / math.Sqrt(max(kept*(own.weight+peers.prefill.weight), 1))
	if math.Abs(took-average) < max(alikeShare*min(took, average), alikeSeconds, alikeErrors*standardError) {
		return
	}
	p.secondsPerToken, p.stepSeconds = own.slope, own.constant
	if average > 0 && took > average {
		p.slowerPerToken = float32((took/average - 1) * gap)
	}
}

// at returns y at x.
func (l *line) at(x float64) float64 { return l.constant + l.slope*x }

// means returns the means of x and y of own samples with those of other origins; 0 without samples.
func (l *line) means(others *line) (x, y float64) {
	all := l.with(others)
	if all.weight == 0 {
		return 0, 0
	}
	return all.x / all.weight, all.y / all.weight
}

// meanOf returns a mean of own samples with those of other origins.
func meanOf(own, peers mean) mean {
	if peers.samples > 0 {
		own.plus(&peers)
	}
	return own
}

// fit sets the line's slope and constant by its own sums and those of other origins, if these are enough samples. slope
// is from least times y/x to y/x of the sums: the steepest sensible line goes through the origin, and noise must not
// give one that is nearly flat.
func (l *line) fit(others *line, enough int, least float64) {
	if all := l.with(others); all.samples >= enough {
		l.slope, l.constant = all.solve(least * all.y / all.x)
	}
}

// fitLike is fit for one worker. Samples of one size do not tell what another size takes: by chance, a few short
// prompts may give any slope. So the average worker's line, as many times slower as the worker is, counts as two more
// samples of little weight: at 0 and at twice the usual size. That factor, in turn, has one more sample of 1. keep is
// the weight that the worker's samples have kept.
func (l *line) fitLike(average, others *line, usual, keep, least float64) {
	all := l.with(others)
	if expected := average.constant*all.weight + average.slope*all.x; expected > 0 {
		slower := (keep*all.weight*all.y/expected + 1) / (keep*all.weight + 1)
		all.scale(keep)
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
