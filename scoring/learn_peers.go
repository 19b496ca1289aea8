package scoring

import (
	"slices"
	"time"

	"kvepp/kvblock"
)

// Replicas learn from their own requests alone. They tell each other their sums, which add up: a fit over the sums of
// all replicas is a fit over all requests. Each replica's sums replace what it told before, so that nothing counts
// twice.

// learnedNumbers is the length of what one origin has learned of a worker, as numbers.
const learnedNumbers = 2*6 + 3*2

// numbers appends what was learned to dst.
func (p *pace) numbers(dst []float64) []float64 {
	for _, f := range []*line{&p.prefill, &p.gap} {
		dst = append(dst, float64(f.samples), f.weight, f.x, f.y, f.xx, f.xy)
	}
	return append(dst, p.output.samples, p.output.value, p.life.samples, p.life.value, p.noise.samples, p.noise.value)
}

// paceOf is the reverse of numbers. false: the numbers are none of that. They come from another process.
func paceOf(values []float64) (p pace, ok bool) {
	if len(values) != learnedNumbers {
		return p, false
	}
	for _, v := range values {
		if !(v >= 0 && v <= 1e24) { // also NaN
			return p, false
		}
	}
	next := func() float64 {
		v := values[0]
		values = values[1:]
		return v
	}
	for _, f := range []*line{&p.prefill, &p.gap} {
		*f = line{samples: int(min(next(), enough)), weight: next(), x: next(), y: next(), xx: next(), xy: next()}
		if f.samples > 0 && !(f.weight >= 1 && f.weight <= 1/(1-keep)+1 && f.x > 0 && f.y > 0) {
			return p, false
		}
	}
	p.output, p.life, p.noise = mean{next(), next()}, mean{next(), next()}, mean{next(), next()}
	return p, max(p.output.samples, p.life.samples, p.noise.samples) <= 100 &&
		p.output.value <= maxSampleTokens && max(p.life.value, p.noise.value) <= maxSampleSeconds
}

// plus adds the sums of o to l.
func (l *line) plus(o *line) {
	l.samples = min(l.samples+o.samples, enough)
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

// peerLessons is what other origins have learned. It ends with them.
type peerLessons struct {
	origins []*Copies
	workers []pace // sums over all origins, indexed by worker
}

// What is new of a worker is told every teachEvery. If it is more than muchUntold of all, as of a new worker, it is
// told after lookEvery: the first samples of a worker change its price most.
const (
	teachEvery = time.Second
	lookEvery  = 250 * time.Millisecond
	muchUntold = 0.1
)

// Lessons calls each with what the book has learned of workers from its own requests, for Copies.Learned of other
// replicas: the policy Time prices by it. It leaves out what it has told already, or with all, nothing. Call it often.
// each runs under the book's lock.
func (a *ActiveSequences) Lessons(all bool, each func(w kvblock.Worker, values []float64)) {
	a.lock()
	defer a.mu.Unlock()
	l, now, untold := &a.learned, a.clock(), muchUntold
	switch {
	case all:
	case now-l.looked < lookEvery:
		return
	case now-l.taught >= teachEvery:
		l.taught, untold = now, 0
		fallthrough
	default:
		l.looked = now
	}
	for w := range l.workers {
		p := &l.workers[w]
		if p.samples == 0 || !all && float64(p.samples-p.told) <= untold*float64(p.samples) {
			continue
		}
		if !all {
			p.told = p.samples
		}
		each(kvblock.Worker(w), p.numbers(nil))
	}
}

// Learned notes what the origin has learned of a worker. It replaces what the origin told of that worker before. false:
// the values are not those of Lessons.
func (c *Copies) Learned(w kvblock.Worker, values []float64) bool {
	l, ok := paceOf(values)
	if !ok || w >= MaxWorkers {
		return false
	}
	a := c.book
	a.lock()
	defer a.mu.Unlock()
	a.fit(int(w) + 1)
	if a.learned.peers == nil {
		a.learned.peers = &peerLessons{}
	}
	if c.lessons == nil {
		c.lessons = map[kvblock.Worker]*pace{}
		a.learned.peers.origins = append(a.learned.peers.origins, c)
	}
	c.lessons[w] = &l
	a.learned.forgetUnused(w)
	a.learned.sum(w)
	a.learned.refit(w)
	return true
}

// sum adds up what other origins have learned of a worker.
func (l *learned) sum(w kvblock.Worker) {
	p := l.peers
	if n := len(l.workers); n > len(p.workers) {
		p.workers = append(p.workers, make([]pace, n-len(p.workers))...)
	}
	p.workers[w] = pace{}
	for _, c := range p.origins {
		if own := c.lessons[w]; own != nil {
			p.workers[w].plus(own)
		}
	}
}

func (p *pace) plus(o *pace) {
	p.prefill.plus(&o.prefill)
	p.gap.plus(&o.gap)
	p.output.plus(&o.output)
	p.life.plus(&o.life)
	p.noise.plus(&o.noise)
}

// of returns the sums of other origins for a worker.
func (p *peerLessons) of(w kvblock.Worker) *pace {
	if p == nil || int(w) >= len(p.workers) {
		return &noPace
	}
	return &p.workers[w]
}

var noPace pace // never written to

// unlearn forgets what an origin has learned, and prices all workers without it.
func (l *learned) unlearn(c *Copies) {
	if c.lessons == nil {
		return
	}
	l.peers.origins = slices.DeleteFunc(l.peers.origins, func(o *Copies) bool { return o == c })
	for w := range c.lessons {
		l.sum(w)
	}
	c.lessons = nil
	l.revise(&l.rest)
	for _, f := range l.byModel {
		l.revise(f)
	}
	for w := range l.workers {
		l.priceGap(kvblock.Worker(w))
		l.pricePrefill(kvblock.Worker(w))
	}
}

// forgetPeers clears what other origins have learned of a worker.
func (l *learned) forgetPeers(w kvblock.Worker) {
	p := l.peers
	if p == nil {
		return
	}
	for _, c := range p.origins {
		delete(c.lessons, w)
	}
	if int(w) < len(p.workers) {
		p.workers[w] = pace{}
	}
}
