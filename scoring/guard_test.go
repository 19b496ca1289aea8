package scoring

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// late are peers whose bookings this book knows after 20 ms.
func late(rate float64, share ...bool) Peers {
	return Peers{Rate: rate, Staleness: 20 * time.Millisecond, Share: share}
}

// withLoads returns a book whose workers hold these blocks of 16 tokens, and that has seen bookings of 10 such blocks.
func withLoads(t *testing.T, p Peers, blocks ...int) *ActiveSequences {
	t.Helper()
	a := NewActiveSequences()
	for w, n := range blocks {
		c := Candidate{Worker: workers(w+1, nil)[w].Worker, Prompt: prompt(16, chain(100+w, n))}
		mustAdd(t, a, Request{ISLTokens: 16 * n}, c).ReleasePrefill()
	}
	a.SetPeers(p)
	a.guard.prefill.value, a.guard.active.value = 0, 160
	return a
}

// draws returns how often each candidate is chosen.
func draws(t *testing.T, a *ActiveSequences, cfg *Config, candidates []Candidate, n int) []float64 {
	t.Helper()
	rng, counts := rand.New(rand.NewPCG(1, 1)), make([]float64, len(candidates))
	for range n {
		sel, _, err := a.SelectAndAdd(Request{ISLTokens: 16, DryRun: true}, candidates, cfg, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts[sel.Index] += 1 / float64(n)
	}
	return counts
}

// 100 bookings a second known after 20 ms are 2 unknown ones of 10 blocks. They fill workers with 0, 4, 8 and 50 blocks
// up to the level (20+0+4+8)/3, and each is drawn in proportion to what is poured on it.
func TestTheGuardDrawsByWaterFilling(t *testing.T) {
	a := withLoads(t, late(100), 0, 4, 8, 50)
	got := draws(t, a, defaults(), workers(4, prompt(16, chain(1, 1))), 20_000)
	level := 32.0 / 3
	for i, held := range []float64{0, 4, 8} {
		if want := (level - held) / 20; math.Abs(got[i]-want) > 0.02 {
			t.Errorf("candidate %d is drawn in %.3f of the choices, want %.3f", i, got[i], want)
		}
	}
	if got[3] != 0 {
		t.Errorf("the loaded worker is drawn in %.3f of the choices", got[3])
	}
}

// A worker of the own share is chosen if it costs little more than the cheapest, here 2 unknown bookings over 4
// workers: 1 + 2*2/4 bookings of 10 blocks.
func TestTheGuardPrefersTheOwnShare(t *testing.T) {
	for _, c := range []struct {
		held int
		own  bool
	}{{0, true}, {15, true}, {20, true}, {21, false}, {50, false}} {
		a := withLoads(t, late(100, false, true), 0, c.held, 60, 60)
		got := draws(t, a, defaults(), workers(4, prompt(16, chain(1, 1))), 200)
		if (got[1] > 0.999) != c.own {
			t.Errorf("with %d blocks more, the own worker is chosen in %.2f of the choices", c.held, got[1])
		}
	}
}

// However late the others' bookings are known, a worker that has more of the prompt cached is not passed over.
func TestTheGuardGivesNoHitAway(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		cfg := defaults()
		cfg.Policy = policy
		for _, cached := range []int{1, 8} {
			a := withLoads(t, late(10_000, true, true, true, false), 0, 0, 0, 0)
			candidates := workers(4, prompt(16, chain(1, 8)))
			candidates[3].DeviceBlocks = cached
			rng := rand.New(rand.NewPCG(2, 2))
			for range 200 {
				req := Request{ISLTokens: 128, DryRun: true}
				sel, _, err := a.SelectAndAdd(req, candidates, cfg, rng, nil)
				if err != nil || sel.Index != 3 {
					t.Fatalf("policy %v: chose %+v (%v), though worker 3 has %d blocks", policy, sel, err, cached)
				}
			}
		}
	}
}

// Without peers, and with peers whose bookings are known at once, choices are the same to the last bit.
func TestTheGuardIsOffWithoutPeers(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		synctest.Test(t, func(t *testing.T) {
			cfg := defaults()
			cfg.Policy = policy
			var logs [4][]Selection
			for k, p := range []Peers{{}, {Rate: 1000}, {Rate: math.NaN(), Staleness: time.Millisecond}, {Rate: 0.1,
				Staleness: time.Millisecond, Share: make([]bool, 16)}} {
				a, rng := NewActiveSequences(), rand.New(rand.NewPCG(3, 3))
				a.SetPeers(p)
				for i := range 300 {
					candidates := workers(16, prompt(16, chain(i%7, i%20)))
					sel, b, err := a.SelectAndAdd(Request{ISLTokens: 16 * (i % 20)}, candidates, cfg, rng, nil)
					if err != nil {
						t.Fatal(err)
					}
					if i%3 > 0 {
						b.Free()
					}
					logs[k] = append(logs[k], sel)
				}
				if !slices.Equal(logs[k], logs[0]) {
					t.Errorf("policy %v: peers %+v change choices", policy, p)
				}
			}
		})
	}
}

// Copies that are too late count as load and are not priced: costs are those of a book without them. The terms say so.
func TestStaleCopiesAreNotPriced(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		cfg := defaults()
		cfg.Policy = policy
		own, both := NewActiveSequences(), NewActiveSequences()
		for _, a := range []*ActiveSequences{own, both} {
			mustAdd(t, a, Request{ISLTokens: 100}, Candidate{Worker: 1, Prompt: prompt(16, chain(5, 6))})
		}
		peer := both.NewCopies()
		peer.Apply([]Change{
			{Kind: Booked, Number: 1, Worker: 0, BlockSize: 16, PrefillTokens: 700, Blocks: 50},
			{Kind: Booked, Number: 2, Worker: 0, BlockSize: 16, Blocks: 30},
			{Kind: Booked, Number: 3, Worker: 1, BlockSize: 16, PrefillTokens: 100, Blocks: 3},
		})
		price := func(a *ActiveSequences) ([]float64, []Terms) {
			costs, terms := make([]float64, 3), make([]Terms, 3)
			req := Request{ISLTokens: 64, DryRun: true, Terms: terms}
			if _, _, err := a.SelectAndAdd(req, workers(3, prompt(16, chain(1, 4))), cfg, nil, costs); err != nil {
				t.Fatal(err)
			}
			for i := range terms {
				if cost := cfg.Cost(&terms[i]); cost != costs[i] {
					t.Errorf("policy %v: the terms %+v cost %v, not %v", policy, terms[i], cost, costs[i])
				}
			}
			return costs, terms
		}
		want, _ := price(own)
		fresh, terms := price(both)
		for i := range terms {
			alone := terms[i].WithoutPeers()
			if cost := cfg.Cost(&alone); math.Abs(cost-want[i]) > 1e-9 || terms[i].Peers.Requests != []int{2, 1, 0}[i] {
				t.Errorf("policy %v: candidate %d costs %v without %+v, want %v",
					policy, i, cost, terms[i].Peers, want[i])
			}
		}
		if fresh[0] <= want[0] || fresh[1] <= want[1] || fresh[2] != want[2] {
			t.Errorf("policy %v: costs %v with copies, %v without", policy, fresh, want)
		}
		for _, c := range []struct {
			late  time.Duration
			stale bool
		}{{250 * time.Millisecond, false}, {251 * time.Millisecond, true}, {201 * time.Millisecond, true},
			{200 * time.Millisecond, false}, {time.Hour, true}} {
			both.SetPeers(Peers{Rate: 0.01, Staleness: c.late})
			if both.PeersStale() != c.stale {
				t.Errorf("%v late: stale %v", c.late, both.PeersStale())
			}
		}
		stale, _ := price(both)
		for i := range stale {
			if math.Abs(stale[i]-want[i]) > 1e-9 {
				t.Errorf("policy %v: stale copies change the cost of %d from %v to %v", policy, i, want[i], stale[i])
			}
		}
		if load := both.Load(0); load.Requests != 2 || load.PrefillTokens != 700 {
			t.Errorf("the load is %+v", load)
		}
	}
}
