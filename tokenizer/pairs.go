package tokenizer

import (
	"math/bits"

	"kvepp/kvblock"
)

// pairTable finds how early the merge of two neighbouring tokens was learnt, and what they become: an open-addressing table.
// It is far larger than a processor's caches, and half of the pairs that are asked for do not merge. So before it stands a
// filter, which is small enough to stay near: a bit for each of many hashes, set for those of pairs that merge.
type pairTable struct {
	slots       []pairSlot
	filter      []uint64
	filterShift uint // what brings a hash to the number of a bit of the filter
}

// pairSlot is a pair and what becomes of it.
type pairSlot struct {
	pair uint64 // see pairKey; freeSlot: none
	pairMerge
}

// pairMerge is what becomes of a pair.
type pairMerge struct {
	rank uint32 // noRank: it does not merge
	into kvblock.Token
}

const (
	// noRank is the rank of a pair that does not merge; those of others are below.
	noRank uint32 = 1<<24 - 1
	// maxID is the highest id that a token may have.
	maxID = 1<<20 - 2
	// freeSlot marks a free slot.
	freeSlot = ^uint64(0)
)

func pairKey(left, right kvblock.Token) uint64 { return uint64(left)<<32 | uint64(right) }

// newPairTable indexes merges. A merge's rank is its place, and of two merges of one pair the later counts, as in Hugging
// Face tokenizers; or, byToken, its rank is the id of what it makes, as in tiktoken.
func newPairTable(merges []merge, byToken bool) pairTable {
	size := tableSize(len(merges) * 3 / 4)
	t := pairTable{
		slots:       make([]pairSlot, size),
		filter:      make([]uint64, max(1, size*4/64)),
		filterShift: uint(64 - bits.Len(uint(size*4-1))),
	}
	for i := range t.slots {
		t.slots[i].pair = freeSlot
	}
	mask := uint64(size - 1)
	for rank, m := range merges {
		if byToken {
			rank = int(m.into)
		}
		key := pairKey(m.left, m.right)
		hash := mix(key)
		bit := hash >> t.filterShift
		t.filter[bit/64] |= 1 << (bit % 64)
		h := hash & mask
		for t.slots[h].pair != freeSlot && t.slots[h].pair != key {
			h = (h + 1) & mask
		}
		t.slots[h] = pairSlot{key, pairMerge{uint32(rank), m.into}}
	}
	return t
}

// maybe reports whether the pair of a hash may merge.
func (t *pairTable) maybe(hash uint64) bool {
	bit := hash >> t.filterShift
	return t.filter[bit/64]>>(bit%64)&1 != 0
}

// get returns what becomes of a pair.
func (t *pairTable) get(left, right kvblock.Token) pairMerge {
	key := pairKey(left, right)
	hash := mix(key)
	if !t.maybe(hash) {
		return pairMerge{rank: noRank}
	}
	return t.search(key, hash)
}

// getBoth is get of two pairs that share a token; the two waits for memory overlap.
func (t *pairTable) getBoth(left, middle, right kvblock.Token) (pairMerge, pairMerge) {
	return t.get(left, middle), t.get(middle, right)
}

// search returns what becomes of a pair with its hash.
func (t *pairTable) search(key, hash uint64) pairMerge {
	mask := uint64(len(t.slots) - 1)
	for h := hash & mask; ; h = (h + 1) & mask {
		slot := &t.slots[h]
		if slot.pair == key {
			return slot.pairMerge
		}
		if slot.pair == freeSlot {
			return pairMerge{rank: noRank}
		}
	}
}

// newBytePairs returns what becomes of pairs of bytes, by first byte << 8 | second byte. Merging begins with these, and text
// has few of them, so this table stays near the core where the whole table of pairs does not.
func newBytePairs(t *pairTable, byteToken *[256]kvblock.Token) []pairMerge {
	all := make([]pairMerge, 1<<16)
	for i := range all {
		all[i] = t.get(byteToken[i>>8], byteToken[i&0xFF])
	}
	return all
}
