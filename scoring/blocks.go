package scoring

import (
	"math/bits"

	"kvepp/kvblock"
)

// activeBlocks is the set of blocks that active requests hold, and on which workers: one entry for each distinct
// sequence hash, whoever holds it, so that one walk along a prompt answers for all workers at once.
//
// Nearly all blocks are held by one worker (the tail of a prompt is its own), which the entry then names itself. A block
// held by several has a bitset of workers, and a count in extra only where one worker holds it for several requests.
//
// Its memory is that of its busiest moment: about 80 bytes a block and, for a shared one, a bit for each worker.
type activeBlocks struct {
	byHash  table         // sequence hash -> index in entries
	entries []activeBlock // entries[0] is unused, so that 0 can mean absent
	free    []uint32      // indices in entries that are unused
	epoch   uint64        // of the last walk

	// sets holds the bitsets of shared blocks, each setWords words; set number s begins at s*setWords. Set 0 is unused.
	sets     []uint64
	setWords int
	freeSets []uint32
	extra    table // set<<32 | worker -> how many requests beyond the first hold the block there
}

// activeBlock is held by nobody if holders is 0, by worker if set is 0, else by the workers in the set.
type activeBlock struct {
	hash    uint64
	epoch   uint64 // of the last walk that met it
	worker  kvblock.Worker
	holders uint32 // set 0: requests of worker; else: workers in the set
	set     uint32
	tokens  uint32 // block size
}

func newActiveBlocks() activeBlocks {
	return activeBlocks{entries: make([]activeBlock, 1), setWords: 1, sets: make([]uint64, 1)}
}

// fit makes room for workers numbered below n.
func (b *activeBlocks) fit(n int) {
	words := (n + 63) / 64
	if words <= b.setWords {
		return
	}
	words = max(words, 2*b.setWords)
	count := len(b.sets) / b.setWords
	sets := make([]uint64, count*words)
	for s := range count {
		copy(sets[s*words:], b.set(uint32(s)))
	}
	b.sets, b.setWords = sets, words
}

func (b *activeBlocks) set(s uint32) []uint64 {
	from := int(s) * b.setWords
	return b.sets[from : from+b.setWords]
}

// intern returns the entry of a hash, and whether it was made now. The caller removes an entry that nobody came to hold.
func (b *activeBlocks) intern(hash kvblock.SequenceHash, blockSize uint32) (id uint32, isNew bool) {
	slot := b.byHash.insert(uint64(hash))
	if *slot != 0 {
		return *slot, false
	}
	if n := len(b.free); n > 0 {
		id = b.free[n-1]
		b.free = b.free[:n-1]
	} else {
		id = uint32(len(b.entries))
		b.entries = append(b.entries, activeBlock{})
	}
	*slot = id
	b.entries[id] = activeBlock{hash: uint64(hash), tokens: blockSize}
	return id, true
}

// removeUnheld takes an entry out if nobody holds it.
func (b *activeBlocks) removeUnheld(id uint32) {
	if e := &b.entries[id]; e.holders == 0 {
		b.byHash.remove(e.hash)
		b.free = append(b.free, id)
	}
}

// hold notes that one more request of the worker has the block, and says whether it is the worker's first.
func (b *activeBlocks) hold(id uint32, w kvblock.Worker) (first bool) {
	e := &b.entries[id]
	if e.set == 0 {
		switch {
		case e.holders == 0:
			e.worker, e.holders = w, 1
			return true
		case e.worker == w:
			e.holders++
			return false
		}
		b.share(e)
	}
	word, bit := &b.set(e.set)[w/64], uint64(1)<<(w%64)
	if *word&bit == 0 {
		*word |= bit
		e.holders++
		return true
	}
	*b.extra.insert(uint64(e.set)<<32 | uint64(w))++
	return false
}

// share turns an entry that names its one worker into one with a set.
func (b *activeBlocks) share(e *activeBlock) {
	if n := len(b.freeSets); n > 0 {
		e.set = b.freeSets[n-1]
		b.freeSets = b.freeSets[:n-1]
	} else {
		e.set = uint32(len(b.sets) / b.setWords)
		b.sets = append(b.sets, make([]uint64, b.setWords)...)
	}
	b.set(e.set)[e.worker/64] |= 1 << (e.worker % 64)
	if e.holders > 1 {
		*b.extra.insert(uint64(e.set)<<32 | uint64(e.worker)) = e.holders - 1
	}
	e.holders = 1
}

// release is hold undone, and says whether it was the worker's last. An entry that nobody holds any more is removed.
func (b *activeBlocks) release(id uint32, w kvblock.Worker) (last bool) {
	e := &b.entries[id]
	if e.set != 0 {
		key := uint64(e.set)<<32 | uint64(w)
		if extra := b.extra.find(key); extra != nil {
			if *extra > 1 {
				*extra--
			} else {
				b.extra.remove(key)
			}
			return false
		}
		b.set(e.set)[w/64] &^= 1 << (w % 64)
		if e.holders--; e.holders == 0 {
			b.freeSets = append(b.freeSets, e.set) // all its bits are clear by now
			b.removeUnheld(id)
		}
		return true
	}
	if e.holders--; e.holders == 0 {
		b.removeUnheld(id)
		return true
	}
	return false
}

// walker carries the scratch memory of one walk.
type walker struct {
	// ids are the entries of the prompt's distinct blocks, in order.
	ids []uint32
	// made are the entries that a call's walks made; they go away again unless somebody comes to hold them.
	made []uint32
	// held[w] is how many of the distinct blocks worker w already holds.
	held  []int32
	alive []uint64 // the workers that hold the chain up to here, while there are several
}

// walk appends the prompt's distinct blocks to ids and sets held, for workers numbered below len(k.held).
//
// A worker holds a chain up to some block and nothing behind it, because a request holds its whole chain and a sequence
// hash stands for its whole prefix; so the set of workers only shrinks along a chain. Hashes without that property, or
// repeated ones, give an overestimate of what a worker would have to add, and nothing worse.
func (b *activeBlocks) walk(k *walker, p *Prompt) {
	b.epoch++
	clear(k.held)
	for _, chain := range p.Chains {
		fresh := int32(0) // blocks of this chain that no earlier one of the request had
		several, one := false, -1
		for depth, hash := range chain {
			id, isNew := b.intern(hash, uint32(p.BlockSize))
			if isNew {
				k.made = append(k.made, id)
			}
			e := &b.entries[id]
			switch {
			case depth == 0:
				several, one = e.set != 0, -1
				if several {
					k.alive = append(k.alive[:0], b.set(e.set)...)
				} else if e.holders > 0 {
					one = int(e.worker)
				}
			case several && e.set != 0:
				k.keep(b.set(e.set), fresh)
			case several:
				if e.holders > 0 && k.alive[e.worker/64]&(1<<(e.worker%64)) != 0 {
					one = int(e.worker)
					k.alive[e.worker/64] &^= 1 << (e.worker % 64)
				}
				k.drop(fresh)
				several = false
			case one >= 0 && !b.holds(e, kvblock.Worker(one)):
				k.held[one] += fresh
				one = -1
			}
			if e.epoch != b.epoch {
				e.epoch = b.epoch
				k.ids = append(k.ids, id)
				fresh++
			}
		}
		if several {
			k.drop(fresh)
		} else if one >= 0 {
			k.held[one] += fresh
		}
	}
}

func (b *activeBlocks) holds(e *activeBlock, w kvblock.Worker) bool {
	if e.set != 0 {
		return b.set(e.set)[w/64]&(1<<(w%64)) != 0
	}
	return e.holders > 0 && e.worker == w
}

// keep credits the workers that are not in set with what they held so far, and goes on without them.
func (k *walker) keep(set []uint64, fresh int32) {
	for i, alive := range k.alive {
		k.credit(i, alive&^set[i], fresh)
		k.alive[i] = alive & set[i]
	}
}

// drop credits all workers that are left.
func (k *walker) drop(fresh int32) {
	for i, alive := range k.alive {
		k.credit(i, alive, fresh)
	}
}

func (k *walker) credit(word int, workers uint64, fresh int32) {
	for ; workers != 0; workers &= workers - 1 {
		k.held[64*word+bits.TrailingZeros64(workers)] += fresh
	}
}
