package indexer

import "kvepp/kvblock"

// filter tells, mostly, that a block begins no run: it counts those that do by a few bits of their hashes. It is small enough to
// stay near, where the table of starts is not, and each block that is stored costs a look here. Writers alone use it.
//
// Who finds out which blocks are counted together only makes us look at the table, so their hashes need not be mixed. A counter
// that is full says for good that there may be one. A nil filter is that of no block.
type filter []uint8

const (
	filterBits = 18 // of the hash: 256 KiB, of which the system gives what is touched
	fullCount  = 1<<8 - 1
)

func (f filter) place(h kvblock.SequenceHash) *uint8 { return &f[h&(1<<filterBits-1)] }

// may reports whether the block may begin a run.
func (f filter) may(h kvblock.SequenceHash) bool { return f != nil && *f.place(h) != 0 }

// add counts a block that begins a run.
func (f filter) add(h kvblock.SequenceHash) {
	if n := f.place(h); *n != fullCount {
		*n++
	}
}

// remove counts one that begins none any more.
func (f filter) remove(h kvblock.SequenceHash) {
	if n := f.place(h); *n != fullCount {
		*n--
	}
}
