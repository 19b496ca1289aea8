package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// maxDumpBlocks is the maximum number of blocks in one store of a dump.
const maxDumpBlocks = 256

// Dump calls yield with stores that together describe the blocks of w, with the engine hashes of w, until yield returns
// false. Within a tier, parents come before their children. A store is valid until yield returns.
//
// Dump describes what w held when the call began. It omits blocks behind a block that w does not hold, because no store
// can describe their place, and returns their number. If w holds the parent in another tier only, the store may come
// before its parent's, or although the parent is omitted. Predictions and orphans are not part of a dump.
//
// Writers wait while Dump scans the runs of a tier, but not while yield runs. Dump needs about 150 bytes for each block
// of w while it runs.
func (x *Index) Dump(w kvblock.Worker, yield func(kvblock.Stored) bool) (omitted int) {
	wk := x.lock(w, false)
	if wk == nil {
		return 0
	}
	var all [tiers][]dumpBlock
	for i := range wk.held {
		all[i] = x.tiers[i].listHeld(w, &wk.held[i])
	}
	wk.mu.Unlock()

	var names [tiers]map[kvblock.SequenceHash]kvblock.EngineHash
	for i := range all {
		names[i] = make(map[kvblock.SequenceHash]kvblock.EngineHash, len(all[i]))
		for _, b := range all[i] {
			names[i][b.block] = b.engine
		}
	}
	for i := range all {
		more, omits := dumpTier(all[i], kvblock.Tier(i), &names, yield)
		omitted += omits
		if !more {
			break
		}
	}
	return omitted
}

// dumpBlock is one block of a dump: a node in the tree of its tier's blocks. Links are indexes in a slice.
type dumpBlock struct {
	alias
	local          kvblock.LocalHash
	parent         kvblock.SequenceHash
	hasParent      bool
	child, sibling int32 // the first child, the next child of the same parent; -1 for none
}

// dumpTier yields the stores of one tier. It returns whether yield wants more, and the number of omitted blocks.
func dumpTier(
	blocks []dumpBlock,
	tier kvblock.Tier,
	names *[tiers]map[kvblock.SequenceHash]kvblock.EngineHash,
	yield func(kvblock.Stored) bool,
) (more bool, omitted int) {
	at := make(map[kvblock.SequenceHash]int32, len(blocks)) // the first one with this sequence hash
	for i := range blocks {
		if _, twin := at[blocks[i].block]; !twin {
			at[blocks[i].block] = int32(i)
		}
	}
	var roots []int32
	for i := range blocks {
		b := &blocks[i]
		if p, ok := at[b.parent]; b.hasParent && ok {
			b.sibling, blocks[p].child = blocks[p].child, int32(i)
		} else {
			roots = append(roots, int32(i))
		}
	}
	store := kvblock.Stored{Tier: tier}
	reached := 0
	for len(roots) > 0 {
		i := roots[len(roots)-1]
		roots = roots[:len(roots)-1]
		b := &blocks[i]
		store.HasParent, store.Blocks = b.hasParent, store.Blocks[:0]
		if b.hasParent {
			known := false
			if p, ok := at[b.parent]; ok {
				store.Parent, known = blocks[p].engine, true
			}
			for tier := 0; tier < memoryTiers && !known; tier++ {
				store.Parent, known = names[tier][b.parent]
			}
			if !known {
				continue // omits it and all blocks behind it
			}
		}
		for {
			b = &blocks[i]
			store.Blocks = append(store.Blocks, kvblock.StoredBlock{Engine: b.engine, Local: b.local})
			reached++
			if b.child < 0 {
				break
			}
			i = b.child
			for s := blocks[i].sibling; s >= 0; s = blocks[s].sibling {
				roots = append(roots, s)
			}
			if len(store.Blocks) == maxDumpBlocks {
				roots = append(roots, i)
				break
			}
		}
		if !yield(store) {
			return false, 0
		}
	}
	return true, len(blocks) - reached
}

// listHeld lists the blocks that w holds, once for each of their engine hashes.
func (t *tier) listHeld(w kvblock.Worker, h *held) []dumpBlock {
	blocks := make([]dumpBlock, 0, h.names)
	aliased := map[kvblock.SequenceHash]dumpBlock{}
	t.eachHeld(w, h, func(r run, mask uint64, _ int) {
		words, stored := t.arena.record(r), t.arena.storedOf(r)
		for ; mask != 0; mask &= mask - 1 {
			i := bits.TrailingZeros64(mask)
			at := runHeader + i
			b := dumpBlock{local: stored[at].Local, child: -1, sibling: -1}
			b.alias = alias{stored[at].Engine, kvblock.SequenceHash(words[at])}
			if i > 0 {
				b.parent, b.hasParent = kvblock.SequenceHash(words[at-1]), true
			} else {
				b.parent, b.hasParent = headOf(stored).parent, headOf(stored).hasParent
			}
			if _, ok := h.aliasCounts[b.block]; ok {
				aliased[b.block] = b
			}
			if h.byOwnName(b.block) {
				blocks = append(blocks, b)
			}
		}
	})
	for engine, block := range h.aliases {
		b := aliased[block]
		b.alias = alias{engine, block}
		blocks = append(blocks, b)
	}
	return blocks
}

// Load applies one store of a dump to w. Unlike Stored, it adds no copy of a block that w holds by the same engine hash
// already, so a block in both a dump and an earlier event counts once.
//
// The caller ensures that no removal is lost: load a worker before its own events begin, or while they are held back.
// Errors: those of Stored.
func (x *Index) Load(w kvblock.Worker, e kvblock.Stored) error { return x.apply(w, e, true) }
