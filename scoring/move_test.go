package scoring

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// TestMoveIsAsIfBookedThere: after moves, the loads equal those of a book where the requests were booked on the new
// worker, with shared blocks, prefills and responses. At the end no load is left.
func TestMoveIsAsIfBookedThere(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		moved, straight := NewActiveSequences(), NewActiveSequences()
		type pair struct{ moved, straight Booking }
		var all []pair
		for i := range 1 + rng.IntN(12) {
			var p *Prompt
			if rng.IntN(4) > 0 {
				p = prompt(16, chain(1, rng.IntN(6)), chain(1+rng.IntN(2), rng.IntN(9)), chain(100+i, rng.IntN(3)))
			} else if rng.IntN(2) > 0 {
				p = prompt(16)
			}
			size := 0
			if p != nil {
				size = p.BlockSize
			}
			req := Request{ID: fmt.Sprint(i), ISLTokens: rng.IntN(300)}
			from, to := kvblock.Worker(rng.IntN(3)), kvblock.Worker(rng.IntN(200))
			m := mustAdd(t, moved, req, Candidate{Worker: from, Prompt: p})
			if output := rng.IntN(3); output > 0 {
				m.AddOutputBlocks(output, NotKnown)
				m.MoveTo(to, size)
				s := mustAdd(t, straight, req, Candidate{Worker: to, Prompt: p})
				s.AddOutputBlocks(output, NotKnown)
				all = append(all, pair{m, s})
			} else {
				m.MoveTo(to, size)
				all = append(all, pair{m, mustAdd(t, straight, req, Candidate{Worker: to, Prompt: p})})
			}
			if rng.IntN(3) == 0 {
				x := all[rng.IntN(len(all))]
				x.moved.MarkPrefillCompleted()
				x.straight.MarkPrefillCompleted()
			}
		}
		compare := func(when string) {
			for w := range kvblock.Worker(200) {
				if got, want := moved.Load(w), straight.Load(w); got != want {
					t.Fatalf("seed %d, %s: worker %d carries %+v, want %+v", seed, when, w, got, want)
				}
			}
		}
		compare("moved")
		for len(all) > 0 {
			i := rng.IntN(len(all))
			all[i].moved.Free()
			all[i].straight.Free()
			all[i] = all[len(all)-1]
			all = all[:len(all)-1]
			compare("freed")
		}
		if n := len(moved.blocks.runs) - 1 - len(moved.blocks.free); n != 0 {
			t.Fatalf("seed %d: %d runs of blocks are left", seed, n)
		}
	}
}

// Blocks of another size cannot be shared: their tokens count, rounded up to whole blocks of the new worker.
func TestMoveToAnotherBlockSize(t *testing.T) {
	a := NewActiveSequences()
	b := mustAdd(t, a, Request{ISLTokens: 100}, Candidate{Worker: 0, Prompt: prompt(16, chain(1, 6))})
	b.MoveTo(1, 32)
	wantLoad(t, a, 0, Load{})
	wantLoad(t, a, 1, Load{Requests: 1, PrefillTokens: 100, ActiveBlocks: 3, ActiveTokens: 96})
	b.MoveTo(MaxWorkers, 32) // no such worker
	b.Free()
	b.MoveTo(0, 16)
	wantLoad(t, a, 0, Load{})
	wantLoad(t, a, 1, Load{})
}
