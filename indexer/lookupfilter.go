package indexer

import (
	"sync/atomic"

	"kvepp/kvblock"
)

// lookupFilter is a counting filter of the blocks of a class's tier. A lookup asks it for each block of a prompt, from
// the end back, and most are in no such tier. Writers change it under tier.mu; lookups take no lock. The zero value is
// the filter of a tier without blocks.
//
// A counter counts to fullLookup, where it stays until rebuild.
type lookupFilter struct {
	// 2^n words of 16 counters: two words or more for each block, up to maxLookupWords; nil until there is a block
	counts atomic.Pointer[[]uint64]
	n      int // blocks
}

const (
	minLookupWords = 1 << 8
	maxLookupWords = 1 << 19 // 4 MiB
	fullLookup     = 1<<4 - 1
)

// mayContain returns which of these blocks may be in the tier, a bit each, the first one's lowest. They are at most 64.
func (f *lookupFilter) mayContain(seqs []kvblock.SequenceHash, seed uint64) (found uint64) {
	counts := f.counts.Load()
	if counts == nil {
		return 0
	}
	words := *counts
	mask := uint64(len(words) - 1)
	for i, seq := range seqs { // without a branch that depends on seq
		at, shift := counterOf(seq, seed, mask)
		if atomic.LoadUint64(&words[at])>>shift&fullLookup != 0 {
			found |= 1 << (uint(i) & 63)
		}
	}
	return found
}

// add counts a block that was added to the table.
func (f *lookupFilter) add(seq kvblock.SequenceHash, of *seqTable, a *arena) {
	f.n++
	counts := f.counts.Load()
	if counts == nil {
		f.rebuild(minLookupWords, of, a)
	} else if size := len(*counts); 2*f.n > size && size < maxLookupWords {
		f.rebuild(2*size, of, a)
	} else {
		countIn(*counts, seq, of.seed)
	}
}

// remove uncounts a block that was removed from the table.
func (f *lookupFilter) remove(seq kvblock.SequenceHash, of *seqTable, a *arena) {
	f.n--
	counts := *f.counts.Load()
	if size := len(counts); 16*f.n < size && size > minLookupWords {
		f.rebuild(size/2, of, a)
	} else if at, shift := counterOf(seq, of.seed, uint64(len(counts)-1)); counts[at]>>shift&fullLookup != fullLookup {
		publishWord(&counts[at], counts[at]-1<<shift)
	}
}

// rebuild counts all blocks of a table again, with this many words.
func (f *lookupFilter) rebuild(words int, of *seqTable, a *arena) {
	counts := make([]uint64, words)
	of.eachBlock(func(r ref) {
		seq, _ := a.load(r)
		countIn(counts, kvblock.SequenceHash(seq), of.seed)
	})
	f.counts.Store(&counts)
}

// bytes returns the memory of the counters.
func (f *lookupFilter) bytes() int {
	if counts := f.counts.Load(); counts != nil {
		return 8 * len(*counts)
	}
	return 0
}

// countIn counts a block in counters.
func countIn(counts []uint64, seq kvblock.SequenceHash, seed uint64) {
	if at, shift := counterOf(seq, seed, uint64(len(counts)-1)); counts[at]>>shift&fullLookup != fullLookup {
		publishWord(&counts[at], counts[at]+1<<shift)
	}
}

// counterOf returns the index of the word with a block's counter, and the counter's lowest bit. mask is the number of
// words - 1. One multiplication is a weaker hash than mix and takes a third of the time. Contents that collide cost
// lookups in the table.
func counterOf(seq kvblock.SequenceHash, seed, mask uint64) (word, shift uint64) {
	h := (uint64(seq) ^ seed) * 0x9e3779b97f4a7c15
	return h >> 32 & mask, h >> 58 & 60
}
