package indexer

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"kvepp/kvblock"
)

// Several workers' messages are applied concurrently, beside lookups and dumps. The outcome for each worker equals that
// of its own oracle.
func TestConcurrentMessages(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const workers = 6
	x := newIndex(t)
	var done atomic.Bool
	var writers, others sync.WaitGroup
	oracles := make([]*oracle, workers)
	for w := range kvblock.Worker(workers) {
		o := newOracle()
		oracles[w] = o
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 77))
			for range 120 {
				if t.Failed() {
					return
				}
				var ops []kvblock.Operation
				for range 1 + r.IntN(90) {
					ops = append(ops, randomOp(r, w))
				}
				if ow := o.workers[w]; r.IntN(30) == 0 || ow != nil && len(ow.orphans) > 100 {
					x.Cleared(w)
					o.cleared(w)
				}
				for len(ops) > 0 {
					n, got := x.Apply(w, ops, false)
					if n < 1 {
						t.Error("nothing applied")
						return
					}
					var want Applied
					for _, op := range ops[:n] {
						if op.Kind == kvblock.OpRemoved {
							want.Removed++
							want.Unknown += o.removed(w, op.Removed.Tier, op.Removed.Hashes)
						} else if err := o.stored(w, op.Stored); err != nil {
							want.Failed = append(want.Failed, err)
						} else {
							want.Stored++
						}
					}
					if fmt.Sprint(got) != fmt.Sprint(want) {
						t.Errorf("worker %d: %v, want %v", w, got, want)
						return
					}
					ops = ops[n:]
				}
				entries := 0
				if ow := o.workers[w]; ow != nil {
					for _, names := range ow.names {
						entries += len(names)
					}
				}
				if got := x.WorkerEntries(w); got != entries {
					t.Errorf("worker %d: %d entries, want %d", w, got, entries)
				}
				if r.IntN(20) == 0 {
					n := 0
					omitted := x.Dump(w, func(s kvblock.Stored) bool { n += len(s.Blocks); return true })
					if n+omitted != entries {
						t.Errorf("worker %d: dump of %d and %d, want %d", w, n, omitted, entries)
					}
				}
			}
		})
	}
	for range 2 {
		others.Go(func() {
			var s OverlapScores
			for i := 0; !done.Load(); i++ {
				x.FindMatches(kvblock.AppendSequenceHashes(nil, prompt(i%prompts, promptBlocks)), &s)
				if i%50 == 0 {
					x.Dump(kvblock.Worker(i/50%workers), func(kvblock.Stored) bool { return true })
					x.Stats()
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	others.Wait()
	for i := range x.tiers {
		checkTier(t, &x.tiers[i])
	}
	all := newOracle()
	for w, o := range oracles {
		if ow := o.workers[kvblock.Worker(w)]; ow != nil {
			all.workers[kvblock.Worker(w)] = ow
		}
	}
	var s OverlapScores
	for which := range prompts {
		seqs := kvblock.AppendSequenceHashes(nil, prompt(which, promptBlocks))
		x.FindMatches(seqs, &s)
		if got, want := scoresOf(t, &s), all.find(seqs); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("prompt %d:\n got %v\nwant %v", which, got, want)
		}
	}
}

func randomOp(r *rand.Rand, w kvblock.Worker) kvblock.Operation {
	local := prompt(r.IntN(prompts), promptBlocks)
	seqs := kvblock.AppendSequenceHashes(nil, local)
	from := r.IntN(promptBlocks)
	to := min(promptBlocks, from+1+r.IntN([]int{2, 9, 70}[r.IntN(3)]))
	copyOf := 0
	if r.IntN(8) == 0 {
		copyOf = 1
	}
	tier := kvblock.TierDevice
	if r.IntN(12) == 0 {
		tier = kvblock.Tier(r.IntN(tiers))
	}
	if r.IntN(16) < 10 {
		if r.IntN(2) == 0 {
			to -= from
			from = 0
		}
		e := kvblock.Stored{Tier: tier}
		if from > 0 {
			e.HasParent, e.Parent = true, engineHash(w, seqs[from-1], r.IntN(2)*copyOf)
		}
		again, zero := from+r.IntN(200), from+r.IntN(1000)
		for i := from; i < to; i++ {
			name := engineHash(w, seqs[i], copyOf)
			if i == again {
				name = engineHash(w, seqs[r.IntN(promptBlocks)], 0)
			}
			if i == zero {
				name = 0
			}
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: name, Local: local[i]})
		}
		return kvblock.Operation{Kind: kvblock.OpStored, Stored: e}
	}
	e := kvblock.Removed{Tier: tier}
	for i := from; i < to; i++ {
		e.Hashes = append(e.Hashes, engineHash(w, seqs[i], copyOf))
	}
	return kvblock.Operation{Kind: kvblock.OpRemoved, Removed: e}
}
