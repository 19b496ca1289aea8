package indexer

import (
	"sync/atomic"

	"kvepp/kvblock"
)

// rootFilter tells, mostly, that a block is no prompt's first block of which anybody holds anything: it counts the
// first blocks by a few bits of their hashes. A prompt that nobody holds costs a look at this small table then, where
// that of all starts might have to be fetched from memory. Counters are read without a lock; writers are guarded by
// tier.mu.
type rootFilter []uint32

const rootFilterBits = 15

func (f rootFilter) counter(first kvblock.SequenceHash, seed uint64) *uint32 {
	// not the bits that choose a segment, nor all of those of a slot
	return &f[mix(uint64(first), seed)>>8&(1<<rootFilterBits-1)]
}

// mayContain reports whether the block may be there. A nil filter knows nothing.
func (f rootFilter) mayContain(first kvblock.SequenceHash, seed uint64) bool {
	return f == nil || atomic.LoadUint32(f.counter(first, seed)) != 0
}

// add counts n more of such blocks; ^uint32(0) is one less.
func (f rootFilter) add(first kvblock.SequenceHash, seed uint64, n uint32) {
	if f != nil {
		atomic.AddUint32(f.counter(first, seed), n)
	}
}
