package indexer

import (
	"sync/atomic"

	"kvepp/kvblock"
)

// rootFilter is a counting filter of the first blocks of prompts. A zero counter means that no worker holds the block.
// A lookup of an unknown prompt then ends here, in a small table, instead of in the table of starts, which may not be
// in the cache. Lookups read counters without a lock; tier.mu guards writes.
type rootFilter []uint32

const rootFilterBits = 15

func (f rootFilter) counter(first kvblock.SequenceHash, seed uint64) *uint32 {
	// not the bits that choose a segment, nor all of those of a slot
	return &f[mix(uint64(first), seed)>>8&(1<<rootFilterBits-1)]
}

// mayContain reports whether a prompt may begin with the block. A nil filter always says true.
func (f rootFilter) mayContain(first kvblock.SequenceHash, seed uint64) bool {
	return f == nil || atomic.LoadUint32(f.counter(first, seed)) != 0
}

// add adds n to the block's counter; ^uint32(0) subtracts 1.
func (f rootFilter) add(first kvblock.SequenceHash, seed uint64, n uint32) {
	if f != nil {
		atomic.AddUint32(f.counter(first, seed), n)
	}
}
