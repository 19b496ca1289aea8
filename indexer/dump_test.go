package indexer

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// After a dump is loaded into another index, both give the same responses in every tier, also after more events.
func TestDumpAndLoad(t *testing.T) {
	for seed := range uint64(4) {
		p := newDriver(t, 5, 0, 9, randomScript(seed, 30_000))
		p.plain = true // a dump cannot distinguish two blocks with one name
		p.run(false)
		other, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range p.workers {
			for range 2 { // the second time adds nothing
				omitted := p.x.Dump(w, func(e kvblock.Stored) bool {
					if len(e.Blocks) == 0 || len(e.Blocks) > maxDumpBlocks {
						t.Fatalf("a store of %d blocks", len(e.Blocks))
					}
					if err := other.Load(w, e); err != nil && !errors.Is(err, ErrOrphaned) {
						t.Fatal(err)
					}
					return true
				})
				got := other.WorkerEntries(w)
				if got > 0 {
					got += len(other.workersOf(w).orphans.byName) // behind an omitted block, in another tier
				}
				if want := p.x.WorkerEntries(w) - omitted; got != want || other.Stats().Duplicates != 0 {
					t.Fatalf("worker %d: %d entries loaded, want %d; %+v", w, got, want, other.Stats())
				}
			}
		}
		var s OverlapScores
		for which := range prompts {
			chain := kvblock.AppendSequenceHashes(nil, prompt(which, promptBlocks))
			other.FindMatches(chain, &s)
			if got, want := scoresOf(t, &s), p.o.find(chain); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("prompt %d:\n got %v\nwant %v", which, got, want)
			}
		}
		for i := range other.tiers {
			checkTier(t, &other.tiers[i])
		}
	}
}

// A dump omits blocks behind a hole, splits long chains, and ends when yield returns false.
func TestDump(t *testing.T) {
	x, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	const n = 3 * maxDumpBlocks
	local, _ := chainOf(1, n)
	mustStore(t, x, 1, stores(1, local, 0, n))
	mustStore(t, x, 2, stores(1, local, 0, n))
	x.Removed(1, removes(1, n-10, n-9))
	collect := func(w kvblock.Worker, most int) (events []kvblock.Stored, omitted int) {
		t.Helper()
		omitted = x.Dump(w, func(e kvblock.Stored) bool {
			e.Blocks = slices.Clone(e.Blocks)
			events = append(events, e)
			return len(events) < most
		})
		return events, omitted
	}
	events, omitted := collect(1, 100)
	if omitted != 9 || len(events) != 3 {
		t.Fatalf("%d stores, %d blocks omitted", len(events), omitted)
	}
	at := 0
	for _, e := range events {
		if e.HasParent != (at > 0) || at > 0 && e.Parent != kvblock.EngineHash(at) {
			t.Errorf("at block %d: parent %v %d", at, e.HasParent, e.Parent)
		}
		for _, b := range e.Blocks {
			if b != (kvblock.StoredBlock{Engine: kvblock.EngineHash(at + 1), Local: local[at]}) {
				t.Fatalf("block %d: %+v", at, b)
			}
			at++
		}
	}
	if at != n-10 {
		t.Errorf("%d blocks", at)
	}
	if events, _ := collect(2, 2); len(events) != 2 {
		t.Errorf("%d stores after the end", len(events))
	}
	if events, omitted := collect(7, 1); len(events) != 0 || omitted != 0 {
		t.Errorf("no worker holds the blocks of %d stores", len(events))
	}
}
