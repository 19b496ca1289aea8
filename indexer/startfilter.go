package indexer

// startFilter is a counting filter of the blocks that begin runs, by bits of their tags. It is small enough to stay in
// the cache, unlike the table of starts, and each stored block is looked up here. Only writers use it, under tier.mu.
// The zero value is the filter of an empty table.
//
// A counter counts to fullCount, where it stays until rebuild: how many more blocks it has is not known. A counter that
// is too high costs lookups in the table, but no block is missed.
type startFilter struct {
	counts []uint8 // 2^n, 8 or more for each block up to maxCounts
	n      int     // blocks
}

const (
	minCounts = 1 << 12
	maxCounts = 1 << 22
	fullCount = 1<<8 - 1
)

// mayContain reports whether the block with this tag may begin a run.
func (f *startFilter) mayContain(tag uint32) bool {
	return len(f.counts) > 0 && f.counts[int(tag)&(len(f.counts)-1)] != 0
}

// add counts a block that was added to the table.
func (f *startFilter) add(tag uint32, of *seqTable) {
	if f.n++; 8*f.n > len(f.counts) && len(f.counts) < maxCounts {
		f.rebuild(max(minCounts, 2*len(f.counts)), of)
	} else {
		f.count(tag)
	}
}

// remove uncounts a block that was removed from the table.
func (f *startFilter) remove(tag uint32, of *seqTable) {
	if f.n--; 64*f.n < len(f.counts) && len(f.counts) > minCounts {
		f.rebuild(len(f.counts)/2, of)
	} else if n := &f.counts[int(tag)&(len(f.counts)-1)]; *n != fullCount {
		*n--
	}
}

func (f *startFilter) count(tag uint32) {
	if n := &f.counts[int(tag)&(len(f.counts)-1)]; *n != fullCount {
		*n++
	}
}

// rebuild counts all blocks of a table again, with size counters.
func (f *startFilter) rebuild(size int, of *seqTable) {
	f.counts = make([]uint8, size)
	of.eachTag(f.count)
}
