package bpe

import (
	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// mergeTable maps a pair of neighbouring tokens to the rank and the result of their merge. It is an open-addressing
// hash table whose length is a power of two.
type mergeTable struct {
	slots []pairSlot
}

// pairSlot is a pair and its merge.
type pairSlot struct {
	pair uint64 // see pairKey; freeSlot: none
	mergeResult
}

// mergeResult is the merge of a pair.
type mergeResult struct {
	rank uint32 // noRank: the pair does not merge
	into kvblock.Token
}

const (
	// noRank is the rank of a pair that does not merge. It is above every rank of a merge.
	noRank uint32 = 1<<24 - 1
	// maxID is the highest id that a token may have.
	maxID = 1<<20 - 2
	// freeSlot marks a free slot.
	freeSlot = ^uint64(0)
)

func pairKey(left, right kvblock.Token) uint64 { return uint64(left)<<32 | uint64(right) }

// newMergeTable indexes merges. A merge's rank is its index, and the later of two merges of one pair counts, as in
// Hugging Face tokenizers. If byToken is set, the rank is the id of the resulting token, as in tiktoken.
func newMergeTable(merges []merge, byToken bool) mergeTable {
	t := mergeTable{slots: hugepage.Slice[pairSlot](tableSize(len(merges) * 3 / 4))}
	for i := range t.slots {
		t.slots[i].pair = freeSlot
	}
	for rank, m := range merges {
		if byToken {
			rank = int(m.into)
		}
		key := pairKey(m.left, m.right)
		h := t.slot(key)
		for t.slots[h].pair != freeSlot && t.slots[h].pair != key {
			h = t.next(h)
		}
		t.slots[h] = pairSlot{key, mergeResult{uint32(rank), m.into}}
	}
	return t
}

// slot returns where the search for a pair begins: at the start of a cache line, so that most searches read one line.
func (t *mergeTable) slot(key uint64) uint32 { return uint32(mix(key)&uint64(len(t.slots)-1)) &^ 3 }

func (t *mergeTable) next(slot uint32) uint32 { return (slot + 1) & uint32(len(t.slots)-1) }

// get returns the merge of a pair.
func (t *mergeTable) get(left, right kvblock.Token) mergeResult {
	key := pairKey(left, right)
	return t.search(key, t.slot(key))
}

// search returns the merge of a pair. slot is the result of slot.
func (t *mergeTable) search(key uint64, slot uint32) mergeResult {
	for ; ; slot = t.next(slot) {
		s := &t.slots[slot]
		if s.pair == key {
			return s.mergeResult
		}
		if s.pair == freeSlot {
			return mergeResult{rank: noRank}
		}
	}
}

// newByteMerges returns the merges of pairs of bytes, indexed by first byte << 8 | second byte. Merging begins with
// these, and text has few different ones, so this table stays in the fast caches, which the table of all pairs does not
// fit.
func newByteMerges(t *mergeTable, byteToken *[256]kvblock.Token) []mergeResult {
	all := make([]mergeResult, 1<<16)
	for i := range all {
		all[i] = t.get(byteToken[i>>8], byteToken[i&0xFF])
	}
	return all
}
