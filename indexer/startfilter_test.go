package indexer

import (
	"testing"

	"kvepp/kvblock"
)

// A counter of the start filter that was full stays full when blocks are removed. check accepts that, and the filter
// still finds the blocks that are left.
func TestFullStartFilterCounter(t *testing.T) {
	x := newIndex(t)
	device := &x.tiers[kvblock.TierDevice]
	var roots []kvblock.StoredBlock // blocks of one counter, each the first block of a prompt
	for local := kvblock.LocalHash(1); len(roots) < fullCount+45; local++ {
		if device.starts.tag(kvblock.FirstSequenceHash(local))%minCounts == 7 {
			roots = append(roots, kvblock.StoredBlock{Engine: kvblock.EngineHash(local), Local: local})
		}
	}
	for _, b := range roots {
		mustStore(t, x, 1, kvblock.Stored{Blocks: []kvblock.StoredBlock{b}})
	}
	if n := len(device.startFilter.counts); n != minCounts || device.startFilter.counts[7] != fullCount {
		t.Fatalf("%d counters, and number 7 is %d", n, device.startFilter.counts[7])
	}
	for i, b := range roots[:len(roots)-1] {
		if unknown := x.Removed(1, kvblock.Removed{Hashes: []kvblock.EngineHash{b.Engine}}); unknown != 0 {
			t.Fatalf("block %d is unknown", i)
		}
		if err := device.check(); err != nil {
			t.Fatalf("after %d removals: %v", i+1, err)
		}
	}
	last := roots[len(roots)-1]
	mustStore(t, x, 2, kvblock.Stored{Blocks: []kvblock.StoredBlock{last}})
	if device.blocks != 1 {
		t.Errorf("%d blocks, want 1: the second worker shares the last block", device.blocks)
	}
	x.Removed(1, kvblock.Removed{Hashes: []kvblock.EngineHash{last.Engine}})
	x.Removed(2, kvblock.Removed{Hashes: []kvblock.EngineHash{last.Engine}})
	if err := device.check(); err != nil || device.startFilter.n != 0 {
		t.Errorf("the filter counts %d blocks, want none; %v", device.startFilter.n, err)
	}
}
