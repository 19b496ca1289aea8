package scoring

import (
	"math"
	"testing"
	"time"
)

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
		}{{250 * time.Millisecond, false}, {251 * time.Millisecond, true},
			{time.Millisecond, false}, {time.Hour, true}} {
			both.SetPeersStaleness(c.late)
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
