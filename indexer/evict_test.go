package indexer

import (
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// At its bound the index accepts further blocks and stays within the bound. It counts no block that a worker does not
// hold, and keeps no block behind one that it evicted.
func TestEvictionAtTheBound(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Run("stores", func(t *testing.T) { evictAtTheBound(t, false) })
	t.Run("stores and removals", func(t *testing.T) { evictAtTheBound(t, true) })
}

// evictAtTheBound applies random events. Without removals and lower tiers, only eviction could leave a block without
// the blocks before it.
func evictAtTheBound(t *testing.T, removals bool) {
	const bound = 96 << 10
	x, err := New(Config{MaxBytes: bound})
	if err != nil {
		t.Fatal(err)
	}
	all := newOracle()
	const nWorkers = 6
	r := rand.New(rand.NewPCG(8, 9))
	var s OverlapScores
	for step := range 4000 {
		w := kvblock.Worker(r.IntN(nWorkers))
		id := r.IntN(40)
		local := prompt(id, promptBlocks)
		chain := kvblock.AppendSequenceHashes(nil, local)
		name := func(i int) kvblock.EngineHash { return kvblock.EngineHash(chain[i]>>3) + kvblock.EngineHash(w%3/2) }
		switch op := r.IntN(20); {
		case op < 10:
			e := kvblock.Stored{}
			if removals {
				e.Tier = kvblock.Tier(r.IntN(5) / 4)
			}
			from := 0
			if op < 5 {
				from = r.IntN(promptBlocks)
			}
			if from > 0 {
				e.HasParent, e.Parent = true, name(from-1)
			}
			for i := from; i < min(promptBlocks, from+1+r.IntN(60)); i++ {
				e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: name(i), Local: local[i]})
			}
			_ = x.Stored(w, e) // if the parent was evicted, the store is an orphan here but not in the oracle
			_ = all.stored(w, e)
		case op < 13 && removals:
			e := kvblock.Removed{Tier: kvblock.Tier(r.IntN(5) / 4)}
			for i := r.IntN(promptBlocks); i < promptBlocks; i++ {
				e.Hashes = append(e.Hashes, name(i))
			}
			x.Removed(w, e)
			all.removed(w, e.Tier, e.Hashes)
		case op == 13 && step%7 == 0:
			x.Cleared(w)
			all.cleared(w)
		}
		x.FindMatches(chain, &s)
		truth := all.find(chain)
		for w, got := range scoresOf(t, &s) {
			want := truth[w]
			reach, most := 0, 0
			for i := range got {
				reach, most = reach+got[i], most+want[i]
			}
			if got[0] > want[0] || reach > most {
				t.Fatalf("step %d: worker %d has %v, the answer is %v", step, w, want, got)
			}
			for i := reach + 1; i < len(chain) && !removals; i++ {
				if x.tiers[0].holds(w, chain[i]) {
					t.Fatalf("step %d: worker %d: block %d is kept, %d blocks are in reach", step, w, i, reach)
				}
			}
		}
		got := x.Stats()
		if got.Used > bound || got.Bytes > bound+bound/4+slack+8*1024 {
			t.Fatalf("step %d: %d bytes used, %d in all, over %d", step, got.Used, got.Bytes, bound)
		}
	}
	if got := x.Stats(); got.Evicted == 0 || !x.AtBound() || got.MaxBytes != bound {
		t.Errorf("got %+v, at the bound: %v", got, x.AtBound())
	}
	for i := range x.tiers {
		checkTier(t, &x.tiers[i])
	}
	for w := range kvblock.Worker(nWorkers) {
		x.Forget(w)
	}
	local, chain := chainOf(1, 20)
	mustStore(t, x, 1, stores(1, local, 0, 20))
	wantMatches(t, x, chain, matches{1: 20})
	if x.AtBound() {
		t.Error("still at the bound")
	}
	if got := x.Stats(); got.Entries != 20 || got.Blocks != 20 {
		t.Errorf("got %+v", got)
	}
}

// workersOf returns the state of w. No writer may run.
func (x *Index) workersOf(w kvblock.Worker) *worker { return (*x.workers.Load())[w] }

// Evicting the deepest blocks keeps the beginnings of all prompts.
func TestEvictionKeepsBeginnings(t *testing.T) {
	x, err := New(Config{MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	const n = 1000
	for id := range uint64(n) {
		local, _ := chainOf(id, 64)
		mustStore(t, x, kvblock.Worker(id%4), stores(kvblock.EngineHash(id*1000+1), local, 0, 64))
	}
	least, most := 64, 0
	var s OverlapScores
	for id := range uint64(n) {
		_, chain := chainOf(id, 64)
		x.FindMatches(chain, &s)
		held := s.Blocks(kvblock.Worker(id % 4))
		least, most = min(least, held), max(most, held)
	}
	if got := x.Stats(); least < 5 || most == 0 || got.Evicted == 0 || got.Used < 1<<19 {
		t.Errorf("%d to %d blocks of each prompt are kept; %+v", least, most, got)
	}
}

// holds reports whether w holds the block, at any place of a prompt.
func (t *tier) holds(w kvblock.Worker, seq kvblock.SequenceHash) (holds bool) {
	t.arena.eachRun(func(r run) bool {
		words := t.arena.record(r)
		for i := range t.runLen(r) {
			holds = holds || words[runHeader+i] == uint64(seq) && t.maskOf(r, w)>>i&1 != 0
		}
		return !holds
	})
	return holds
}
