package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Fitted says how an engine's times follow from a recording.
type Fitted struct {
	// Answers is how many of the first Sample answers could be used: the engine had about as much of the prompt cached
	// as the model engine, and the times are known.
	Answers, Sample int
	// Error is by which factor, of at least 1, the times of the median answer differ from those of the replay.
	Error float64
}

const (
	minAnswers = 10
	firm       = 0.5 // holds what the sample cannot tell
	// the steps by which factors are changed, as logarithms
	firstStep, lastStep = 0.4, 0.02
)

// factors are logarithms: of each curve, of all of it, and of its constant part against the rest.
type factors [4]float64

func (f *factors) apply(e *EngineConfig) {
	for i, c := range []*Curve{&e.Prefill, &e.Decode} {
		all, constant := f[2*i], f[2*i+1]
		*c = Curve{c[0] * math.Exp(all+constant), c[1] * math.Exp(all-constant), c[2] * math.Exp(all-constant)}
	}
}

// misses has, for each request of the sample, the logarithms of its replayed by its measured time to first token, and
// of the gaps between tokens. NaN: they cannot be compared.
type misses [][2]float64

func (m misses) cost(f *factors) float64 {
	sum, n := 0.0, 0
	for _, both := range m {
		for _, v := range both {
			if v = math.Abs(v); v == v {
				n++
				sum += v
			}
		}
	}
	return (sum + firm*(f[1]*f[1]+f[3]*f[3])) / float64(n) // NaN or infinite: nothing can be compared
}

// Fit sets the speeds of c's engines so that with the policy Recorded the recording's first requests take as long as
// they took. It keeps the shape of c's curves as far as the answers tell nothing else. Workers that differ by more than
// a tenth get a speed of their own.
func (r *Recording) Fit(ctx context.Context, c *Config) (fitted Fitted, err error) {
	shape := c.Engine
	if shape.Prefill.at(1000) <= 0 || shape.Decode.at(0.2) <= 0 {
		return fitted, errors.New("--prefill-ms and --decode-ms give the shape that a fit of the engines' speeds " +
			"scales: one of them is 0 or less for usual requests. Set both, which fits nothing, or none")
	}
	f, n := r.guess(&shape)
	if n < minAnswers {
		return fitted, fmt.Errorf("%d of the recording's first %d requests have the times ttft_ms and "+
			"total_time_ms: a fit of the engines' speeds needs %d; set --prefill-ms and --decode-ms", n, len(r.sample),
			minAnswers)
	}
	equal := c.Speeds == nil
	var now misses
	least := math.Inf(1)
	try := func(g factors) {
		t := *c
		t.Engine = shape
		g.apply(&t.Engine)
		m, failed := r.misses(ctx, &t)
		if err = failed; err == nil && (now == nil || m.cost(&g) < least) {
			f, now, least = g, m, m.cost(&g)
		}
	}
	try(f)
	for step, rounds := firstStep, 0; step > lastStep && rounds < 40 && err == nil; rounds++ {
		before := least
		for k := range f {
			for _, by := range []float64{step, -step} {
				g := f
				if g[k] += by; err == nil {
					try(g)
				}
			}
		}
		if least < 0.98*before {
			continue
		}
		if step /= 2; equal && r.ownSpeeds(c, now) {
			equal, now = false, nil
			try(f)
		}
	}
	if err != nil {
		return fitted, err
	}
	var all []float64
	measured, replayed := 0.0, 0.0
	for i, both := range now {
		if first := milli(r.sample[i].Served.TTFT); both[0] == both[0] {
			all = append(all, math.Abs(both[0]))
			measured, replayed = measured+first, replayed+first*math.Exp(both[0])
		}
	}
	if len(all) < minAnswers {
		return fitted, fmt.Errorf("the replay finds about the reported cached tokens in %d of the recording's first "+
			"%d requests: a fit of the engines' speeds needs %d; set --blocks as the engines have, or --prefill-ms "+
			"and --decode-ms", len(all), len(r.sample), minAnswers)
	}
	f[0] += math.Log(measured / replayed) // the median miss tells little of long times, which the mean needs
	f.apply(&c.Engine)
	return Fitted{len(all), len(r.sample), math.Exp(quantile(all, 0.5))}, nil
}

// guess returns factors to begin with, and how many requests of the sample have times.
func (r *Recording) guess(e *EngineConfig) (f factors, n int) {
	var prefill, decode []float64
	for _, q := range r.sample {
		first, gap := q.Served.Times(q.Output)
		if first > 0 {
			n++
			prefill = append(prefill, math.Log(first/e.Prefill.at(float64(q.Prompt-max(q.Served.Cached, 0)))))
		}
		if gap > 0 {
			decode = append(decode, math.Log(gap/e.Decode.at(0.2)))
		}
	}
	f[0], f[2] = quantile(prefill, 0.3), quantile(decode, 0.5)
	return f, n
}

// Times returns the milliseconds to the first token, and those between tokens; 0: not known. A response that came at
// once does not tell when its first token was there.
func (v *Served) Times(output int) (first, gap float64) {
	switch rest := v.Took - v.TTFT; {
	case v.TTFT <= 0 || v.Took <= 0 || rest < 0:
		return 0, 0
	case output < 2:
		return milli(v.TTFT), 0
	case rest < v.Took/50:
		return 0, 0
	default:
		return milli(v.TTFT), milli(rest) / float64(output-1)
	}
}

func milli(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile returns a quantile of values, which it sorts; 0: there are none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[int(q*float64(len(values)-1))]
}

// misses replays the sample with the policy Recorded.
func (r *Recording) misses(ctx context.Context, c *Config) (misses, error) {
	m := slices.Repeat(misses{{math.NaN(), math.NaN()}}, len(r.sample))
	c.Policy = Recorded
	c.Decided = func(d *Decision) {
		v := d.Request.Served
		near := max(2*r.BlockSize, d.Request.Prompt/50)
		if d.Outcome != Completed || v.Cached >= 0 && max(d.Cached-v.Cached, v.Cached-d.Cached) > near {
			return
		}
		if first, gap := v.Times(d.Request.Output); first > 0 {
			m[v.sample][0] = math.Log(milli(d.TTFT) / first)
			if gap > 0 {
				m[v.sample][1] = math.Log(milli(d.ITL) / gap)
			}
		}
	}
	read := 0
	_, err := Run(ctx, *c, r.Replayed(func() (*Request, error) {
		if read == len(r.sample) {
			return nil, io.EOF
		}
		q := *r.sample[read] // it is changed
		q.Locals = slices.Clone(q.Locals)
		read++
		return &q, nil
	}), nil)
	return m, err
}

// ownSpeeds gives each worker its speed, relative to all, by the mean of its misses, as far as it has many. false: they
// are equal.
func (r *Recording) ownSpeeds(c *Config, m misses) (own bool) {
	sums, counts := make([]float64, c.Workers+1), make([]float64, c.Workers+1) // the last: of all
	for i, both := range m {
		for _, v := range both {
			for _, w := range []int{r.numbers[r.sample[i].Served.Worker], c.Workers} {
				if v == v {
					sums[w], counts[w] = sums[w]+min(max(v, -1), 1), counts[w]+1
				}
			}
		}
	}
	speeds := make([]float64, c.Workers)
	for w := range speeds {
		by := (sums[w] - counts[w]*sums[c.Workers]/max(counts[c.Workers], 1)) / (counts[w] + 20)
		speeds[w] = math.Exp(by)
		own = own || math.Abs(by) > 0.1
	}
	if own {
		c.Speeds = speeds
	}
	return own
}
