package scoring

import (
	"math"
	"testing"
	"testing/synctest"
	"time"
)

func wait(d time.Duration) { <-time.After(d) } // of the bubble, which does not wait

// At 100 tokens a second the oldest prompt's load shrinks. When it is done, the next prompt starts in full.
func TestLinearDecay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		a.Prefill = PrefillModel{Linear: true, TokensPerSecond: 100}
		want := func(tokens int) {
			t.Helper()
			if got := a.Load(0).PrefillTokens; got != tokens {
				t.Errorf("%d tokens wait, want %d", got, tokens)
			}
		}
		first := mustAdd(t, a, Request{ISLTokens: 1000}, Candidate{})
		second := mustAdd(t, a, Request{ISLTokens: 500}, Candidate{})
		third := mustAdd(t, a, Request{ISLTokens: 200}, Candidate{})
		want(1700)
		wait(4 * time.Second)
		want(1300)
		wait(5 * time.Millisecond) // half a token is rounded down
		want(1300)
		third.MarkPrefillCompleted() // out of order: of the four seconds, two were for its 200 tokens
		want(1300)
		wait(time.Second)
		want(1200)
		first.MarkPrefillCompleted() // earlier or later than estimated: the next prompt starts now
		want(500)
		wait(20 * time.Second) // longer than it needs
		want(0)
		second.Free()
		want(0)
		first.Free()
		third.Free()
		wantEmpty(t, a)
	})
}

// The cost uses the decayed load.
func TestLinearDecayIsPriced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		a.Prefill = PrefillModel{Linear: true, TokensPerSecond: 160}
		cfg, candidates, costs := defaults(), workers(2, prompt(16)), make([]float64, 2)
		cfg.TrackActiveBlocks = false
		mustAdd(t, a, Request{ISLTokens: 1600}, candidates[0])
		wait(5 * time.Second)
		_, b, err := a.SelectAndAdd(Request{ISLTokens: 16}, candidates, cfg, nil, costs)
		// 800 of 1,600 tokens wait with 16, and 100 blocks are held
		if err != nil || costs[0] != 51+100 || costs[1] != 1 {
			t.Errorf("costs %v, %v", costs, err)
		}
		b.Free()
	})
}

// After five prompts that began at once, the speed of a worker is known (1,000 tokens a second, one prompt after the
// other), with any pause before each. Other workers of the model are taken to be as fast.
func TestLearnedSpeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		play := func(prompts int) {
			for range prompts / 4 {
				var waiting []Booking
				for _, n := range []int{1000, 200, 3000, 50} {
					waiting = append(waiting, mustAdd(t, a, Request{ISLTokens: n}, Candidate{}))
				}
				for i, n := range []int{1000, 200, 3000, 50} {
					wait(time.Duration(n) * time.Millisecond)
					waiting[i].MarkPrefillCompleted()
					waiting[i].Free()
				}
				wait(7 * time.Second) // idle
			}
		}
		estimate := func(c Candidate) (time.Duration, bool) {
			b := mustAdd(t, a, Request{ISLTokens: 500}, c)
			defer b.Free()
			return b.PrefillEstimate()
		}
		play(16)
		if d, ok := estimate(Candidate{}); ok {
			t.Errorf("after 16 prompts: %v", d)
		}
		play(4)
		d, ok := estimate(Candidate{})
		if !ok || math.Abs(d.Seconds()-0.5) > 1e-6 {
			t.Errorf("500 tokens after 20 prompts: %v, %v; want 500 ms", d, ok)
		}
		if known, unknown := a.PrefillSpeed(0), a.PrefillSpeed(9); math.Abs(known-1000) > 1e-3 || unknown != 0 {
			t.Errorf("%v and %v tokens a second; want 1000, and 0 for not known", known, unknown)
		}
		if d, ok := estimate(Candidate{Worker: 1}); !ok || math.Abs(d.Seconds()-0.5) > 1e-6 {
			t.Errorf("of a worker that has prefilled nothing: %v, %v; want 500 ms", d, ok)
		}
		// Behind a prompt that waits and is half a second into its prefill.
		before := mustAdd(t, a, Request{ISLTokens: 2000}, Candidate{})
		wait(500 * time.Millisecond)
		if d, ok := estimate(Candidate{}); !ok || math.Abs(d.Seconds()-2) > 2e-3 {
			t.Errorf("500 tokens behind 1,500: %v, %v; want 2 s", d, ok)
		}
		// ReleasePrefill does not change the estimate of the speed, because the end of the prefill was not seen.
		for range 100 {
			before.ReleasePrefill()
			before.Free()
			before = mustAdd(t, a, Request{ISLTokens: 2000}, Candidate{})
		}
		before.Free()
		if d, ok := estimate(Candidate{}); !ok || math.Abs(d.Seconds()-0.5) > 1e-6 {
			t.Errorf("after releases: %v, %v; want 500 ms", d, ok)
		}
		// The speed of a new worker with the same number is unknown.
		a.Forget(0)
		if d, ok := estimate(Candidate{}); ok {
			t.Errorf("of a new worker: %v", d)
		}
	})
}

func TestPrefillEstimateOfNothing(t *testing.T) {
	a := NewActiveSequences()
	a.Prefill.TokensPerSecond = 1e-300
	b := mustAdd(t, a, Request{ISLTokens: 5}, Candidate{})
	if d, ok := b.PrefillEstimate(); !ok || d < 1000*time.Hour {
		t.Errorf("at no speed at all: %v, %v", d, ok)
	}
	b.ReleasePrefill()
	if d, ok := b.PrefillEstimate(); ok {
		t.Errorf("after its prefill: %v", d)
	}
	for _, speed := range []float64{-1, math.NaN(), math.Inf(1)} {
		if (PrefillModel{TokensPerSecond: speed}).Validate(new(Config)) == nil {
			t.Errorf("%v tokens a second are valid", speed)
		}
	}
}
