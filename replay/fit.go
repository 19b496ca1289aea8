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
	fitRounds  = 60
)

// ratio is the mean logarithm of measured by replayed times.
type ratio struct{ sum, n float64 }

func (r *ratio) add(measured, replayed float64) {
	r.sum, r.n = r.sum+math.Log(measured/replayed), r.n+1
}

func (r *ratio) mean() float64 { return r.sum / max(r.n, 1) }

// step returns a factor for what the replayed times depend on. It goes half of the way, because times grow faster than
// their causes where requests wait.
func (r *ratio) step() float64 { return math.Exp(min(max(r.mean()/2, -1), 1)) }

// replayed compares a replay of the sample with the recording.
type replayed struct {
	timed, used     int     // answers with times, and those of them that can be compared
	misses          float64 // sum of the absolute logarithms of measured by replayed times to first token
	measured, first float64 // sums of the times to first token, as measured and as replayed
	short, long     ratio   // of prompts with fewer tokens to compute than the mean, and of others
	gaps            ratio   // between tokens
	all             ratio   // whole responses
	workers         []ratio
}

// Fit sets the speeds of c's engines so that with the policy Recorded the recording's first requests take as long as
// they took: the constant part of the prefill by short prompts, the rest by long ones, and decoding by the gaps between
// tokens. If workers differ by more than a fifth, each gets a speed of its own. Of all replays the best one counts. Fit
// sets r.Engines.
func (r *Recording) Fit(ctx context.Context, c *Config) error {
	next, least, speeds := *c, math.Inf(1), slices.Repeat([]float64{1}, c.Workers)
	own := c.Speeds == nil
	for range fitRounds {
		f, err := r.replaySample(ctx, next)
		if err != nil {
			return err
		}
		if f.used < minAnswers {
			return fmt.Errorf("%d of the recording's first %d requests have the times ttft_ms and total_time_ms, "+
				"and the replay finds about the reported cached tokens in %d of these: a fit of the engines' speeds "+
				"needs %d; set --blocks as the engines have, or set --prefill-ms and --decode-ms", f.timed,
				len(r.sample), f.used, minAnswers)
		}
		p, d := &next.Engine.Prefill, &next.Engine.Decode
		if miss := f.misses/float64(f.used) + math.Abs(math.Log(f.first/f.measured)); miss < least {
			least, c.Engine, c.Speeds = miss, next.Engine, next.Speeds
			r.Engines = fmt.Sprintf("engines: --prefill-ms=%.4g,%.4g,%.4g --decode-ms=%.4g,%.4g,%.4g fit %d of the "+
				"first %d responses\n", p[0], p[1], p[2], d[0], d[1], d[2], f.used, len(r.sample))
			if c.Speeds != nil {
				r.Engines += fmt.Sprintf("engines: relative speeds %.2f\n", c.Speeds)
			}
		}
		if f.short.n == 0 { // all prompts have one length: the shape stays
			f.short = f.long
		}
		*p = Curve{p[0] * f.short.step(), p[1] * f.long.step(), p[2] * f.long.step()}
		*d = Curve{d[0] * f.gaps.step(), d[1] * f.gaps.step(), d[2] * f.gaps.step()}
		if !own {
			continue
		}
		for i, w := range f.workers {
			if w.n > 0 {
				speeds[i] *= f.all.step() / w.step()
			}
		}
		if next.Speeds = nil; slices.Max(speeds) > 1.2*slices.Min(speeds) {
			next.Speeds = slices.Clone(speeds)
		}
	}
	return nil
}

// replaySample replays the sample with the policy Recorded.
func (r *Recording) replaySample(ctx context.Context, c Config) (f replayed, err error) {
	computed := 0
	for i := range r.sample {
		computed += r.sample[i].Prompt - max(r.sample[i].Served.Cached, 0)
	}
	f.workers = make([]ratio, c.Workers)
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
		f.measured, f.first = f.measured+first, f.first+milli(d.TTFT)
		f.misses += math.Abs(math.Log(first / milli(d.TTFT)))
		of := &f.long
		if q.Prompt-d.Cached < computed/len(r.sample) {
			of = &f.short
		}
		of.add(first, milli(d.TTFT))
		if gap > 0 && d.ITL > 0 {
			f.gaps.add(gap, milli(d.ITL))
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
