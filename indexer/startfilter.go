package indexer

// startFilter tells, mostly, that a block is not in a table: it counts those that are by some bits of their tags. It is
// small enough to stay near, where the table of starts is not, and each block that is stored costs a look here. Writers
// alone use it. The zero value is that of an empty table.
//
// A counter that is full says for good that there may be one.
type startFilter struct {
	counts []uint8 // 2^n, 8 or more for each block up to maxCounts
	n      int     // blocks
}

const (
	minCounts = 1 << 12
	maxCounts = 1 << 22
	fullCount = 1<<8 - 1
)

// mayContain reports whether the block with this tag may be there.
func (f *startFilter) mayContain(tag uint32) bool {
	return len(f.counts) > 0 && f.counts[int(tag)&(len(f.counts)-1)] != 0
}

// add counts a block that is in the table now.
func (f *startFilter) add(tag uint32, of *seqTable) {
	if f.n++; 8*f.n > len(f.counts) && len(f.counts) < maxCounts {
		f.rebuild(max(minCounts, 2*len(f.counts)), of)
	} else {
		f.count(tag)
	}
}

// remove counts one that is there no more.
func (f *startFilter) remove(tag uint32, of *seqTable) {
	if f.n--; f.n == 0 {
		f.counts = nil
	} else if 64*f.n < len(f.counts) && len(f.counts) > minCounts {
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

// rebuild counts all blocks of a table, with so many counters.
func (f *startFilter) rebuild(size int, of *seqTable) {
	f.counts = make([]uint8, size)
	of.eachTag(f.count)
}
