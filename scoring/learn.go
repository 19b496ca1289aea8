package scoring

import (
	"math"

	"kvepp/kvblock"
)

// The policy Time prices workers with what the book learns about them, from calls that callers make anyway: when a
// request was booked, when its first token came, how long its response was. Nothing of it is configured.

// Samples beyond these are errors of a clock or of a caller, and are ignored.
const (
	maxSampleTokens  = 1 << 24
	maxSampleSeconds = 3600.0
	leastSampleGap   = 1e-5 // seconds between two tokens of one response
)

// line is a least-squares fit of y = a + b*x that forgets.
type line struct {
	samples      int
	weight       float64
	x, y, xx, xy float64 // weighted sums
	slope        float64 // b; 0 before enough samples
	constant     float64 // a, at least 0
}

// add adds a sample. fit then sets slope and constant.
func (l *line) add(x, y float64) {
	l.samples = min(l.samples+1, enough)
	l.scale(keep)
	l.sum(x, y, 1)
}

// scale lessens the samples to a part of their weight.
func (l *line) scale(part float64) {
	l.weight, l.x, l.y, l.xx, l.xy = part*l.weight, part*l.x, part*l.y, part*l.xx, part*l.xy
}

// sum adds a sample of a weight to the sums.
func (l *line) sum(x, y, weight float64) {
	l.weight += weight
	l.x, l.y, l.xx, l.xy = l.x+weight*x, l.y+weight*y, l.xx+weight*x*x, l.xy+weight*x*y
}

// plus adds the samples of o.
func (l *line) plus(o *line) {
	l.samples = min(l.samples+o.samples, enough)
	l.weight += o.weight
	l.x, l.y, l.xx, l.xy = l.x+o.x, l.y+o.y, l.xx+o.xx, l.xy+o.xy
}

// fade is scale for good: less than one sample is none.
func (l *line) fade(part float64) {
	if l.scale(part); l.weight < 1 {
		*l = line{}
	}
}

// mean is a mean of all samples at first, later of about the last 100.
type mean struct{ samples, value float64 }

func (m *mean) add(x float64) {
	m.samples = min(m.samples+1, 100)
	m.value += (x - m.value) / m.samples
}

// pace is how fast one worker computes, and how long its responses are.
type pace struct {
	prefill line // seconds to the first token by new prompt tokens, of requests that began at once
	gap     line // mean seconds between tokens by tokens held at the end, of responses
	output  mean // tokens
	life    mean // seconds from the first token to the end
	noise   mean // the mean absolute error of the prices of prefills, in seconds

	latest uint64 // fleet.prefills when the latest sample of a prefill came
}

// learned is what the book has learned about workers, from its own requests and those of other replicas.
type learned struct {
	workers []pace   // indexed by worker
	prices  []prices // indexed by worker: what a choice reads, in little memory
	fleets  []*fleet // indexed by worker
	byModel map[string]*fleet
	rest    fleet     // of workers whose model is not known
	known   []pace    // scratch memory of revise
	ratios  []float64 // the same
}

// prices are a worker's learned times, and its load beside Load, as a choice reads them.
type prices struct {
	secondsPerToken, gapPerToken float64 // 0: not learned, or secondsPerToken is that of the average worker
	stepSeconds                  float64 // known if secondsPerToken is
	slowerPerToken               float32 // TimeTerms.SlowerPerToken
	prefilling                   int32   // requests without a first token
}

// fit makes room for workers numbered below n.
func (l *learned) fit(n int) {
	for w := len(l.workers); w < n; w++ {
		l.fleets = append(l.fleets, &l.rest)
		l.rest.workers = append(l.rest.workers, kvblock.Worker(w))
	}
	l.workers = append(l.workers, make([]pace, n-len(l.workers))...)
	l.prices = append(l.prices, make([]prices, n-len(l.prices))...)
}

// forget clears what is known of a worker's speed.
func (l *learned) forget(w kvblock.Worker) {
	if int(w) < len(l.workers) {
		l.workers[w] = pace{}
		p := &l.prices[w]
		p.secondsPerToken, p.stepSeconds, p.gapPerToken, p.slowerPerToken = 0, 0, 0, 0
		l.join(w, "")
	}
}

// or returns a worker's times: those of the average worker where p has none.
func (p *prices) or(average *prices) (perToken, perStep, gapPerToken float64) {
	perToken, perStep, gapPerToken = p.secondsPerToken, p.stepSeconds, p.gapPerToken
	if perToken == 0 {
		perToken, perStep = average.secondsPerToken, average.stepSeconds
	}
	if gapPerToken == 0 {
		gapPerToken = average.gapPerToken
	}
	return perToken, perStep, gapPerToken
}

// learn learns from a sample of this book, and tells the observer of it.
func (a *ActiveSequences) learn(sample Change) {
	if a.learned.take(&sample) && a.observer != nil {
		a.change = sample
		a.observer(&a.change)
	}
}

// take learns from a PrefillTimed or a ResponseTimed. false: its numbers are those of an error.
func (l *learned) take(sample *Change) bool {
	w, tokens, took := sample.Worker, float64(sample.Tokens), sample.Took.Seconds()
	if !(took > 0) || took > maxSampleSeconds || tokens < 1 || tokens > maxSampleTokens {
		return false
	}
	p, f := &l.workers[w], l.fleets[w]
	if sample.Kind == PrefillTimed {
		f.prefills++
		if f.usual.prefill.slope > 0 {
			average := f.common()
			perToken, perStep, _ := l.prices[w].or(&average)
			p.noise.add(math.Abs(took - perStep - perToken*tokens))
		}
		l.forgetUnused(w)
		p.prefill.add(tokens, took)
	} else {
		if (tokens-1)*leastSampleGap > took || sample.Held < 0 || sample.Held > MaxISLTokens {
			return false
		}
		p.output.add(tokens)
		p.life.add(took)
		if tokens > 1 && sample.Held > 0 {
			p.gap.add(float64(sample.Held), took/(tokens-1))
		}
	}
	l.refit(w)
	return true
}

// kept returns the weight that the samples of a worker's prefills have kept since the latest one.
func (l *learned) kept(w kvblock.Worker) float64 {
	f := l.fleets[w]
	if f.prefills == l.workers[w].latest {
		return 1
	}
	return math.Pow(keepUnused, float64(f.prefills-l.workers[w].latest)/float64(len(f.workers)))
}

// forgetUnused lessens the earlier samples of a worker that has a new one after a time in which it had none.
func (l *learned) forgetUnused(w kvblock.Worker) {
	p := &l.workers[w]
	if kept := l.kept(w); kept < 0.9 {
		p.prefill.fade(kept)
	}
	p.latest = l.fleets[w].prefills
}

// LearnOutput notes that a streamed response is complete, and its number of tokens. Call it before Free. The policy
// Time learns from it; it changes no load.
func (b Booking) LearnOutput(tokens int) {
	b.do(func(a *ActiveSequences) {
		booked := &a.bookings[b.index]
		if booked.first == 0 {
			return
		}
		held := a.loads[booked.worker].ActiveTokens
		if a.learned.prices[booked.worker].prefilling > 0 {
			held = 0 // prefill lengthens the gaps too
		}
		a.learn(Change{Kind: ResponseTimed, Number: booked.number, Worker: booked.worker, Tokens: tokens, Held: held,
			Took: a.clock() - booked.first})
	})
}

// Pace is what the book has learned about a worker's speed, or what it assumes until then.
type Pace struct {
	SecondsPerToken float64 // of prefill
	StepSeconds     float64 // of a prefill step, beside the time for its tokens
	GapPerToken     float64 // seconds by which each held token lengthens the time between two tokens
	Learned         bool    // SecondsPerToken and StepSeconds are
	Noise           float64 // the mean absolute error of the times of prefills, in seconds
}

// Pace returns the pace of a worker.
func (a *ActiveSequences) Pace(w kvblock.Worker) Pace {
	a.lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.learned.workers) {
		return Pace{SecondsPerToken: safeSecondsPerToken, GapPerToken: safeGapPerToken}
	}
	usual := &a.learned.fleets[w].usual
	average := a.learned.fleets[w].common()
	p := &a.learned.prices[w]
	perToken, perStep, gapPerToken := p.or(&average)
	return Pace{perToken, perStep, gapPerToken, usual.prefill.slope > 0, usual.noise.value}
}
