package indexer

import (
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// The name table grows to many pages, and has one empty page after the last name is removed, in any order of insertions
// and removals.
func TestNameTableGrowsAndShrinks(t *testing.T) {
	x := newIndex(t)
	device := &x.tiers[kvblock.TierDevice]
	r := rand.New(rand.NewPCG(1, 1))
	const prompts, long = 150, 512
	var held []kvblock.EngineHash
	locals := map[int][]kvblock.LocalHash{}
	for round := range 3 {
		for id := range prompts {
			if locals[id] == nil {
				locals[id], _ = chainOf(uint64(id), long)
			}
			base := kvblock.EngineHash((round*prompts+id)<<20 | 1)
			mustStore(t, x, 0, stores(base, locals[id], 0, long))
			for i := range long {
				held = append(held, base+kvblock.EngineHash(i))
			}
		}
		checkTier(t, device)
		if round == 0 && len(device.names.dir) < 16 {
			t.Errorf("%d names in a directory of %d entries", len(held), len(device.names.dir))
		}
		r.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		for len(held) > 0 {
			n := min(len(held), 1+r.IntN(8))
			if unknown := x.Removed(0, kvblock.Removed{Hashes: held[:n]}); unknown != 0 {
				t.Fatalf("%d of %d removed names were unknown", unknown, n)
			}
			if held = held[n:]; len(held)%(prompts*long/8) < n {
				checkTier(t, device)
			}
		}
		if names := &device.names; len(names.dir) != 1 || names.pages != 1 || names.bits != 0 ||
			len(device.startFilter.counts) != minCounts || device.starts.size > 8*minSlots<<segmentBits {
			t.Errorf("without a block %d pages of names, %d counters of starts and %d bytes of starts are left",
				names.pages, len(device.startFilter.counts), device.starts.size)
		}
	}
}

// Names with equal tag bits do not make the directory grow without bound. The blocks are held nevertheless.
func TestNamesWithEqualTags(t *testing.T) {
	x := newIndex(t)
	device := &x.tiers[kvblock.TierDevice]
	const n = 2 * maxNameSlots
	local, chain := chainOf(1, n)
	e := kvblock.Stored{}
	for name := kvblock.EngineHash(1); len(e.Blocks) < n; name++ {
		if uint32(device.names.mix(name))>>20 == 0 {
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: name, Local: local[len(e.Blocks)]})
		}
	}
	mustStore(t, x, 0, e)
	wantMatches(t, x, chain, map[kvblock.Worker]int{0: n})
	checkTier(t, device)
	if names := &device.names; len(names.dir) == 0 || len(names.dir) >= 2*maxDirPerPage*names.pages {
		t.Errorf("%d names with equal tags: a directory of %d entries for %d pages", n, len(names.dir), names.pages)
	}
	var hashes []kvblock.EngineHash
	for _, b := range e.Blocks {
		hashes = append(hashes, b.Engine)
	}
	if unknown := x.Removed(0, kvblock.Removed{Hashes: hashes}); unknown != 0 {
		t.Errorf("%d of them were unknown", unknown)
	}
	wantMatches(t, x, chain, nil)
	checkTier(t, device)
}
