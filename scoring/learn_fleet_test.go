package scoring

import (
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// serveOf has a book serve one request for a model on a worker. It takes first to the first token, and claims answer
// tokens at its end, life later.
func serveOf(t *testing.T, a *ActiveSequences, model string, w kvblock.Worker, tokens int, first time.Duration,
	output int, life time.Duration) {
	t.Helper()
	_, b, err := a.SelectAndAdd(Request{Model: model, ISLTokens: tokens}, []Candidate{{Worker: w}}, byTime(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	wait(first)
	b.MarkPrefillCompleted()
	wait(life)
	b.LearnOutput(output)
	b.Free()
}

// pricesOf returns the costs of a prompt on workers of a model.
func pricesOf(t *testing.T, a *ActiveSequences, model string, workers ...kvblock.Worker) []float64 {
	t.Helper()
	candidates := make([]Candidate, len(workers))
	for i, w := range workers {
		candidates[i] = Candidate{Worker: w, Prompt: prompt(16, chain(1, 64))}
	}
	costs := make([]float64, len(workers))
	req := Request{Model: model, ISLTokens: 1024, DryRun: true}
	if _, _, err := a.SelectAndAdd(req, candidates, byTime(), rand.New(rand.NewPCG(1, 1)), costs); err != nil {
		t.Fatal(err)
	}
	return costs
}

// One engine that answers at strange times, and claims responses of any length, changes no price of other models, and
// hardly one of the other workers of its model: neither while it is there nor after it has left.
func TestOneEngineTeachesNothingAboutOthers(t *testing.T) {
	const liar = kvblock.Worker(0)
	for name, lie := range map[string]struct {
		first, life time.Duration
		output      int
	}{
		"16 million tokens":       {20 * time.Millisecond, 30 * time.Minute, 1 << 24},
		"16 million in a second":  {20 * time.Millisecond, time.Second, 1 << 24},
		"one token in an hour":    {20 * time.Millisecond, time.Hour, 2},
		"first token at once":     {1, time.Second, 100},
		"first token in an hour":  {time.Hour, time.Second, 100},
		"first token in a decade": {10 * 365 * 24 * time.Hour, time.Second, 100},
		"less than nothing":       {20 * time.Millisecond, time.Second, math.MinInt},
		"more than a number":      {20 * time.Millisecond, time.Second, math.MaxInt},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := NewActiveSequences()
				honest := func(n int) {
					for i := range n {
						tokens := 200 + 100*(i%9)
						took := 20*time.Millisecond + time.Duration(tokens)*100*time.Microsecond
						for w := range kvblock.Worker(3) {
							serveOf(t, a, "a", w, tokens, took, 100, time.Second)
							serveOf(t, a, "b", 3+w, tokens, 5*took, 400, time.Second)
						}
					}
				}
				honest(30)
				others, same, pace := pricesOf(t, a, "b", 3, 4, 5, 6), pricesOf(t, a, "a", 1, 2, 7), a.Pace(1)
				near := func(when string) {
					t.Helper()
					for i, cost := range pricesOf(t, a, "b", 3, 4, 5, 6) {
						if cost != others[i] {
							t.Errorf("%s: a worker of another model costs %v, before %v", when, cost, others[i])
						}
					}
					for i, cost := range pricesOf(t, a, "a", 1, 2, 7) {
						if math.Abs(cost-same[i]) > same[i]/10 {
							t.Errorf("%s: another worker of the model costs %v, before %v", when, cost, same[i])
						}
					}
					if p := a.Pace(1); math.Abs(p.SecondsPerToken-pace.SecondsPerToken) > pace.SecondsPerToken/10 {
						t.Errorf("%s: another worker's pace is %+v, before %+v", when, p, pace)
					}
				}
				for range 200 {
					serveOf(t, a, "a", liar, 1000, lie.first, lie.output, lie.life)
				}
				near("while it lies")
				a.Forget(liar)
				near("after it left")
			})
		})
	}
}

// A model is forgotten with its last worker, and a worker that serves another model begins anew there.
func TestFleetsEndWithTheirWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		for range 20 {
			serveOf(t, a, "a", 0, 1000, 500*time.Millisecond, 100, time.Second)
			serveOf(t, a, "b", 1, 1000, 100*time.Millisecond, 100, time.Second)
		}
		if p := a.Pace(0); math.Abs(p.SecondsPerToken*1000+p.StepSeconds-0.5) > 0.01 {
			t.Errorf("%+v, want half a second for 1,000 tokens", p)
		}
		serveOf(t, a, "b", 0, 1000, 100*time.Millisecond, 100, time.Second)
		if n := len(a.learned.byModel); n != 1 || len(a.learned.byModel["b"].workers) != 2 {
			t.Errorf("%d models", n)
		}
		a.Forget(0)
		a.Forget(1)
		if n := len(a.learned.byModel); n != 0 || len(a.learned.rest.workers) != 2 {
			t.Errorf("%d models after their workers left; %d workers of none", n, len(a.learned.rest.workers))
		}
	})
}

func BenchmarkLearn(b *testing.B) {
	for _, n := range []int{8, 1000} {
		b.Run(map[int]string{8: "workers=8", 1000: "workers=1000"}[n], func(b *testing.B) {
			a := NewActiveSequences()
			now := time.Duration(1)
			a.Clock = func() time.Duration { return now }
			cfg, all := byTime(), workers(n, prompt(16, chain(1, 64)))
			rng := rand.New(rand.NewPCG(1, 1))
			spent := cpuTime(b)
			for range b.N {
				_, x, err := a.SelectAndAdd(Request{ISLTokens: 1024}, all, cfg, rng, nil)
				if err != nil {
					b.Fatal(err)
				}
				now += time.Duration(50+rng.IntN(50)) * time.Millisecond
				x.MarkPrefillCompleted()
				now += time.Second
				x.LearnOutput(50 + rng.IntN(100))
				x.Free()
			}
			b.ReportMetric(float64((cpuTime(b)-spent).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

// The fastest of the workers that are known does not keep all requests of an idle fleet: when only it computes, it is
// the average worker, and a worker without samples costs as much.
func TestNewWorkerIsTriedBesideFastOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		for range 30 {
			serveOf(t, a, "a", 0, 1000, 100*time.Millisecond, 100, time.Second)
			serveOf(t, a, "a", 1, 1000, 150*time.Millisecond, 100, time.Second)
		}
		rng := rand.New(rand.NewPCG(1, 1))
		for n := range 200 {
			candidates := workers(3, prompt(16, chain(1+100*n, 62)))
			chosen, b, err := a.SelectAndAdd(Request{Model: "a", ISLTokens: 1000}, candidates, byTime(), rng, nil)
			if err != nil {
				t.Fatal(err)
			}
			if chosen.Worker == 2 {
				t.Logf("request %d", n)
				return
			}
			wait([...]time.Duration{100 * time.Millisecond, 150 * time.Millisecond}[chosen.Worker])
			b.MarkPrefillCompleted()
			wait(time.Second)
			b.LearnOutput(100)
			b.Free()
		}
		t.Error("none of 200 requests was sent to the worker without samples")
	})
}
