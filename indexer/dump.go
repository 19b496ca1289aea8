package indexer

import (
	"errors"

	"kvepp/kvblock"
)

// ErrNotKept: the index was made without Config.KeepLocalHashes.
var ErrNotKept = errors.New("indexer: local hashes are not kept, so nothing can be dumped")

// maxDumpBlocks is how many blocks one store of a dump has at most.
const maxDumpBlocks = 256

// Dump calls yield with stores that together say what w holds, by the worker's own engine hashes, parents before their
// children within a tier, until yield returns false. A store is valid until yield returns.
//
// It says what w held when the call began, but for blocks that went meanwhile. Blocks behind one that w does not hold are left
// out (or, if it is in another tier, come as stores whose parent never comes): no store can say where they are. It returns how many these were. Predictions and what is kept aside are no part of it.
//
// Writers wait for the copying of w's names, and for a few hundred lookups at a time. Beside the index it takes about 80
// bytes for each block of w, while it runs. Errors: ErrNotKept.
func (x *Index) Dump(w kvblock.Worker, yield func(kvblock.Stored) bool) (omitted int, err error) {
	if !x.tiers[0].arena.local {
		return 0, ErrNotKept
	}
	var all [tiers][]name
	wk := x.lock(w, false)
	if wk == nil {
		return 0, nil
	}
	for i := range wk.held {
		wk.held[i].names.each(func(n name) { all[i] = append(all[i], n) })
	}
	wk.mu.Unlock()

	var names [tiers]map[kvblock.SequenceHash]kvblock.EngineHash
	for i := range all {
		names[i] = make(map[kvblock.SequenceHash]kvblock.EngineHash, len(all[i]))
		for _, n := range all[i] {
			names[i][n.block] = n.engine
		}
	}
	for i := range all {
		more, omits := x.tiers[i].dump(all[i], kvblock.Tier(i), &names, yield)
		omitted += omits
		if !more {
			break
		}
	}
	return omitted, nil
}

// dumped is one block of a dump: a node in the tree of its tier's blocks, linked by place in a slice.
type dumped struct {
	name
	local          kvblock.LocalHash
	parent         kvblock.SequenceHash
	hasParent      bool
	child, sibling int32 // the first child, the next child of the same parent; -1 for none
}

// dump yields the stores of one tier. It reports whether yield wants more, and how many blocks were left out.
func (t *tier) dump(held []name, tier kvblock.Tier, names *[tiers]map[kvblock.SequenceHash]kvblock.EngineHash, yield func(kvblock.Stored) bool) (more bool, omitted int) {
	blocks := make([]dumped, 0, len(held))
	at := make(map[kvblock.SequenceHash]int32, len(held)) // the first block with this sequence hash
	for len(held) > 0 {
		batch := held[:min(clearBatch, len(held))]
		held = held[len(batch):]
		t.mu.Lock()
		for _, n := range batch {
			if b, ok := t.describe(n); !ok {
				omitted++
			} else {
				if _, twin := at[n.block]; !twin {
					at[n.block] = int32(len(blocks))
				}
				blocks = append(blocks, b)
			}
		}
		t.mu.Unlock()
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
			for tier := 0; tier < tiers && !known; tier++ {
				store.Parent, known = names[tier][b.parent]
			}
			if !known {
				continue // it and all behind it
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
	return true, omitted + len(blocks) - reached
}

// describe says what is kept of a block. The caller holds mu.
func (t *tier) describe(n name) (dumped, bool) {
	at, ok := t.table.find(&t.arena, n.block)
	if !ok {
		return dumped{}, false
	}
	r, i := t.runOf(at)
	local := t.arena.localOf(r)
	b := dumped{name: n, local: kvblock.LocalHash(local[runHeader+i]), child: -1, sibling: -1}
	if i > 0 {
		b.parent, b.hasParent = kvblock.SequenceHash(t.arena.record(r)[runHeader+i-1]), true
	} else {
		b.parent, b.hasParent = kvblock.SequenceHash(local[0]), local[1] != 0
	}
	return b, true
}

// Load applies one store of a dump to w, as Stored does, but for one thing: a block that w holds by the same name already is not
// counted once more. So what a dump says and what w's own events said before it do not add up.
//
// The caller makes sure that no removal is lost: load a worker before its own events begin, or while they are held back.
// Errors: those of Stored.
func (x *Index) Load(w kvblock.Worker, e kvblock.Stored) error { return x.apply(w, e, true) }
