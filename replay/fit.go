package replay

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

const (
	minAnswers = 10
	fitRounds  = 30
)

// took has the sums of measured and of replayed milliseconds.
type took struct{ measured, replayed float64 }

func (t *took) add(measured, replayed float64) {
	t.measured, t.replayed = t.measured+measured, t.replayed+replayed
}

// step returns a factor for what the replayed times depend on. It goes half of the way, because times grow faster than
// their causes where requests wait.
func (t *took) step() float64 {
	if t.measured <= 0 || t.replayed <= 0 {
		return 1
	}
	return min(max(math.Sqrt(t.measured/t.replayed), 1.0/3), 3)
}

// replayed compares a replay of the sample with the recording.
type replayed struct {
	timed, used int     // answers with times, and those of them that can be compared
	misses      float64 // sum of the absolute logarithms of replayed by measured times
	compared    int     // how many times
	first       took    // to the first token
	short, long took    // the same of prompts with fewer tokens to compute than the mean, and of others
	gaps        took    // between tokens
	all         took    // whole responses
	workers     []took
}

func (f *replayed) compare(in *took, measured, replayed float64) {
	in.add(measured, replayed)
	f.misses += math.Abs(math.Log(replayed / measured))
	f.compared++
}

// fit is a search for engines that take as long as a recording's.
type fit struct {
	of    *Recording
	best  Config // of all that were tried
	least float64
	found string // what a person reads of best
}

// Fit sets the speeds of c's engines so that with the policy Recorded the recording's first requests take as long as
// they took, and says what it found. If workers differ by more than a fifth, each gets a speed of its own.
func (r *Recording) Fit(ctx context.Context, c *Config) (found string, err error) {
	f := fit{of: r, best: *c, least: math.Inf(1)}
	if err := f.approach(ctx); err != nil {
		return "", err
	}
	if err := f.refine(ctx); err != nil {
		return "", err
	}
	c.Engine, c.Speeds = f.best.Engine, f.best.Speeds
	return f.found, nil
}

// try replays the sample, and keeps c if most times and the mean time to first token are nearer than before.
func (f *fit) try(ctx context.Context, c Config) (replayed, error) {
	x, err := f.of.replaySample(ctx, c)
	if err != nil {
		return x, err
	}
	if x.used < minAnswers {
		return x, fmt.Errorf("%d of the recording's first %d requests have the times ttft_ms and total_time_ms, and "+
			"the replay finds about the reported cached tokens in %d of these: a fit of the engines' speeds needs %d; "+
			"set --blocks as the engines have, or set --prefill-ms and --decode-ms", x.timed, len(f.of.sample), x.used,
			minAnswers)
	}
	miss := x.misses/float64(x.compared) + math.Abs(math.Log(x.first.replayed/x.first.measured))
	if miss < f.least {
		p, d := c.Engine.Prefill, c.Engine.Decode
		f.best, f.least = c, miss
		f.found = fmt.Sprintf("engines: --prefill-ms=%.4g,%.4g,%.4g --decode-ms=%.4g,%.4g,%.4g fit %d of the first %d "+
			"answers\n", p[0], p[1], p[2], d[0], d[1], d[2], x.used, len(f.of.sample))
		if c.Speeds != nil {
			f.found += fmt.Sprintf("engines: relative speeds %.2f\n", c.Speeds)
		}
	}
	return x, nil
}

// approach goes half of the way again and again: the constant part of the prefill by short prompts, the rest by long
// ones, and decoding by the gaps between tokens.
func (f *fit) approach(ctx context.Context) error {
	c, own, speeds := f.best, f.best.Speeds == nil, slices.Repeat([]float64{1}, f.best.Workers)
	for range fitRounds {
		x, err := f.try(ctx, c)
		if err != nil {
			return err
		}
		if x.short.measured == 0 { // all prompts have one length: the shape stays
			x.short = x.long
		}
		c.Engine.Prefill = c.Engine.Prefill.times(x.short.step(), x.long.step())
		c.Engine.Decode = c.Engine.Decode.times(x.gaps.step(), x.gaps.step())
		if !own {
			continue
		}
		for i, w := range x.workers {
			relative := took{w.measured * x.all.replayed, w.replayed * x.all.measured}
			speeds[i] /= relative.step()
		}
		if c.Speeds = nil; slices.Max(speeds) > 1.2*slices.Min(speeds) {
			c.Speeds = slices.Clone(speeds)
		}
	}
	return nil
}

// refine changes one number of the best engines at a time, by ever smaller factors. approach goes by sums, in which a
// few long times outweigh all others.
func (f *fit) refine(ctx context.Context) error {
	for step := 1.2; step > 1.02; step = math.Sqrt(step) {
		for before := math.Inf(1); f.least < 0.98*before; {
			before = f.least
			for _, by := range []float64{step, 1 / step} {
				for number := range 4 {
					c := f.best
					curve := []*Curve{&c.Engine.Prefill, &c.Engine.Decode}[number/2]
					*curve = curve.times(by, []float64{1, by}[number%2])
					if _, err := f.try(ctx, c); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// times returns the curve with its constant part and the rest multiplied.
func (c Curve) times(constant, rest float64) Curve {
	return Curve{c[0] * constant, c[1] * rest, c[2] * rest}
}

// replaySample replays the sample with the policy Recorded.
func (r *Recording) replaySample(ctx context.Context, c Config) (f replayed, err error) {
	computed := 0
	for i := range r.sample {
		computed += r.sample[i].Prompt - max(r.sample[i].Served.Cached, 0)
	}
	f.workers = make([]took, c.Workers)
	c.Policy = Recorded
	c.Decided = func(d *Decision) {
		q, v := d.Request, d.Request.Served
		first, gap := v.Times(q.Output)
		if first <= 0 {
			return
		}
		f.timed++
		near := max(2*r.BlockSize, q.Prompt/50)
		if d.Outcome != Completed || v.Cached >= 0 && max(d.Cached-v.Cached, v.Cached-d.Cached) > near {
			return
		}
		f.used++
		f.compare(&f.first, first, milli(d.TTFT))
		of := &f.long
		if q.Prompt-d.Cached < computed/len(r.sample) {
			of = &f.short
		}
		of.add(first, milli(d.TTFT))
		if gap > 0 && d.ITL > 0 {
			f.compare(&f.gaps, gap, milli(d.ITL))
		}
		f.workers[d.Worker].add(milli(v.Took), milli(d.E2E))
		f.all.add(milli(v.Took), milli(d.E2E))
	}
	read := 0
	_, err = Run(ctx, c, r.Replayed(func() (*Request, error) {
		if read == len(r.sample) {
			return nil, io.EOF
		}
		q := r.sample[read] // it is changed
		q.Locals = slices.Clone(q.Locals)
		read++
		return &q, nil
	}), nil)
	return f, err
}

// Times returns the milliseconds to the first token, and those between tokens; 0: not known. A response that came at
// once does not tell when its first token was there.
func (v *Served) Times(output int) (first, gap float64) {
	rest := v.Took - v.TTFT
	if v.TTFT <= 0 || rest < 0 || output > 1 && rest < v.Took/50 {
		return 0, 0
	}
	return milli(v.TTFT), milli(rest) / max(float64(output-1), 1)
}

func milli(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
