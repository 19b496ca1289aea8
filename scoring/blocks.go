package scoring

import (
	"math/bits"
	"slices"

	"kvepp/kvblock"
)

// activeBlocks is the set of blocks that active requests hold, and on which workers: a path-compressed radix tree over
// block hashes.
//
// A request holds the whole chain of its prompt's blocks, so chains with a common prefix form trees. A node is a run:
// consecutive blocks that the same requests hold. A new prompt leaves the tree at some block, and its remaining blocks
// become one new run. Such a prompt costs one entry of the map and 8 bytes a block. If a chain leaves or ends inside
// a run, the run is split.
//
// Nearly all runs are held by one worker, because the end of a prompt is its own; the run then names the worker itself.
// A run held by several workers has a bitset of them. extra has a count only if one of them holds the run for several
// requests.
//
// Its memory stays at its maximum until no request holds a block, see shrink.
type activeBlocks struct {
	byFirst map[kvblock.SequenceHash]uint32 // first hash of a run -> index in runs
	runs    []activeRun
	free    []uint32 // unused indices of runs
	epoch   uint64   // number of the latest pass over runs

	// sets holds the bitsets of shared runs, setWords words each. Set number s begins at s*setWords. Set 0 is unused.
	sets     []uint64
	setWords int
	freeSets []uint32
	extra    map[uint64]uint32 // set<<32 | worker -> requests of the worker that hold the run, less 1

	weights map[runOn]float64 // weight of a block of the run on the worker, less 1, if not 0

	bytes   [2]int // memory of the runs and of the lists of leaves, by origin; see held
	origin  origin // of the runs that walks make now
	keeping int    // bytes that unused runs keep for their hashes
	least   int    // number of runs up to which shrink keeps them
}

// origin says who made a run.
type origin uint8

const (
	byRequest origin = iota // of this book
	byCopy                  // of another book's booking
)

const (
	// runBytes is about the memory of a run beside its hashes: the run and its entry in byFirst, with room to grow.
	// entryBytes is that of an entry of extra or weights.
	runBytes   = 144
	entryBytes = 64
	// maxKept bounds the memory in bytes that unused runs keep for the hashes of the next requests.
	maxKept = 1 << 20
	// leastShrunk is the usual activeBlocks.least.
	leastShrunk = 1 << 12
)

// activeRun is a run of consecutive blocks. runs[0] is unused, so that 0 can mean none.
type activeRun struct {
	hashes   []kvblock.SequenceHash // at least one
	parent   uint32                 // the run that it continues; 0: none
	children uint32                 // number of runs that continue it
	epoch    uint64                 // number of the latest pass that visited it
	listed   bool                   // byFirst has it, see extend
	origin   origin

	// If holders is 0, no worker holds the run. Else if set is 0, worker holds it; otherwise the workers in set do.
	worker  kvblock.Worker
	holders uint32 // set 0: requests of worker; else: workers in the set
	set     uint32
	tokens  uint32 // block size
}

func newActiveBlocks() activeBlocks {
	return activeBlocks{byFirst: map[kvblock.SequenceHash]uint32{}, extra: map[uint64]uint32{},
		runs: make([]activeRun, 1), setWords: 1, sets: make([]uint64, 1), least: leastShrunk}
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

// descend returns the run that the chain ends with; 0 for an empty chain. It makes new runs where the tree has none,
// and appends them to made. The caller calls removeUnheld for those that no request may hold in the end.
func (b *activeBlocks) descend(
	chain []kvblock.SequenceHash,
	blockSize uint32,
	made []uint32,
) (leaf uint32, _ []uint32) {
	for len(chain) > 0 {
		id, known := b.byFirst[chain[0]]
		if !known || b.runs[id].parent != leaf {
			leaf = b.extend(leaf, chain, blockSize)
			return leaf, append(made, leaf)
		}
		run := b.runs[id].hashes
		n := 1
		for n < len(run) && n < len(chain) && run[n] == chain[n] {
			n++
		}
		chain = chain[n:]
		if n < len(run) {
			id = b.split(id, n)
			made = append(made, id)
		}
		leaf = id
	}
	return leaf, made
}

// extend adds a run of these blocks behind parent. A hash that stands for its prefix occurs once in the set. If the
// first hash occurs elsewhere all the same, the run is not listed: no request will share it, and its blocks count as
// its requests' own.
func (b *activeBlocks) extend(parent uint32, blocks []kvblock.SequenceHash, blockSize uint32) uint32 {
	id := b.newRun()
	r := &b.runs[id]
	r.hashes = append(r.hashes[:0], blocks...)
	r.tokens = blockSize
	r.parent = parent
	r.origin = b.origin
	b.bytes[r.origin] += r.bytes()
	b.runs[parent].children++
	b.list(id)
	return id
}

// held returns about how much memory this book's own requests take, in bytes. Sets count as theirs.
func (b *activeBlocks) held() int {
	sets := len(b.sets)/b.setWords - 1 - len(b.freeSets)
	return b.bytes[byRequest] + 8*b.setWords*sets + entryBytes*(len(b.extra)+len(b.weights))
}

// copied returns about how much memory copies take, in bytes. Sets count as theirs, too.
func (b *activeBlocks) copied() int { return b.held() - b.bytes[byRequest] + b.bytes[byCopy] }

// bytes returns about how much memory the run takes.
func (r *activeRun) bytes() int { return runBytes + 8*cap(r.hashes) }

// newRun returns an unused run, zero except for its epoch and the memory of its hashes.
func (b *activeBlocks) newRun() uint32 {
	if n := len(b.free); n > 0 {
		id := b.free[n-1]
		b.free = b.free[:n-1]
		b.keeping -= 8 * cap(b.runs[id].hashes)
		return id
	}
	b.runs = append(b.runs, activeRun{})
	return uint32(len(b.runs) - 1)
}

func (b *activeBlocks) list(id uint32) {
	r := &b.runs[id]
	_, taken := b.byFirst[r.hashes[0]]
	if r.listed = !taken; r.listed {
		b.byFirst[r.hashes[0]] = id
	}
}

// split divides a run before block n. The run keeps its number and the blocks from n on, so that leaves stay valid. Its
// first n blocks become a new run, which split returns.
func (b *activeBlocks) split(id uint32, n int) uint32 {
	first := b.newRun()
	r, f := &b.runs[id], &b.runs[first]
	hashes := append(f.hashes[:0], r.hashes[:n]...)
	*f = *r
	f.hashes, f.children = hashes, 1
	b.bytes[f.origin] += f.bytes()
	if f.listed {
		b.byFirst[f.hashes[0]] = first
	}
	r.hashes = append(r.hashes[:0], r.hashes[n:]...)
	r.parent = first
	b.list(id)
	if len(b.weights) > 0 {
		b.copyWeights(id, first)
	}
	if r.set != 0 {
		set := b.newSet()
		f.set = set
		copy(b.set(set), b.set(r.set))
		for i, workers := range b.set(set) {
			for ; workers != 0; workers &= workers - 1 {
				w := uint64(64*i + bits.TrailingZeros64(workers))
				if extra := b.extra[uint64(r.set)<<32|w]; extra != 0 {
					b.extra[uint64(set)<<32|w] = extra
				}
			}
		}
	}
	return first
}

// removeUnheld removes a run that no worker holds, and then the runs before it if the same is true of them.
func (b *activeBlocks) removeUnheld(id uint32) {
	for id != 0 {
		r := &b.runs[id]
		if r.holders != 0 || r.children != 0 || len(r.hashes) == 0 {
			return
		}
		if r.listed {
			delete(b.byFirst, r.hashes[0])
		}
		parent := r.parent
		hashes := r.hashes[:0]
		b.bytes[r.origin] -= r.bytes()
		if b.keeping+8*cap(hashes) > maxKept {
			hashes = nil
		}
		b.keeping += 8 * cap(hashes)
		*r = activeRun{hashes: hashes, epoch: r.epoch} // a running pass may visit it again
		b.free = append(b.free, id)
		b.runs[parent].children--
		id = parent
	}
}

// shrink releases the memory of all runs if none is held and there were many, as after a burst.
func (b *activeBlocks) shrink() {
	if len(b.runs) > b.least && len(b.free) == len(b.runs)-1 {
		*b = activeBlocks{byFirst: map[kvblock.SequenceHash]uint32{}, extra: map[uint64]uint32{},
			runs: make([]activeRun, 1), setWords: b.setWords, sets: make([]uint64, b.setWords),
			epoch: b.epoch, bytes: b.bytes, least: b.least}
	}
}

// hold adds one request of the worker to the run, and reports whether it is the worker's first.
func (b *activeBlocks) hold(id uint32, w kvblock.Worker) (first bool) {
	r := &b.runs[id]
	if r.set == 0 {
		switch {
		case r.holders == 0:
			r.worker, r.holders = w, 1
			return true
		case r.worker == w:
			r.holders++
			return false
		}
		b.share(r)
	}
	word, bit := &b.set(r.set)[w/64], uint64(1)<<(w%64)
	if *word&bit == 0 {
		*word |= bit
		r.holders++
		return true
	}
	b.extra[uint64(r.set)<<32|uint64(w)]++
	return false
}

// share replaces a run's single worker by a set.
func (b *activeBlocks) share(r *activeRun) {
	r.set = b.newSet()
	b.set(r.set)[r.worker/64] |= 1 << (r.worker % 64)
	if r.holders > 1 {
		b.extra[uint64(r.set)<<32|uint64(r.worker)] = r.holders - 1
	}
	r.holders = 1
}

// newSet returns the number of an empty set.
func (b *activeBlocks) newSet() uint32 {
	if n := len(b.freeSets); n > 0 {
		set := b.freeSets[n-1]
		b.freeSets = b.freeSets[:n-1]
		return set
	}
	b.sets = append(b.sets, make([]uint64, b.setWords)...)
	return uint32(len(b.sets)/b.setWords - 1)
}

// release is the reverse of hold: it reports whether the request was the worker's last. It removes a run that no worker
// holds any more.
func (b *activeBlocks) release(id uint32, w kvblock.Worker) (last bool) {
	r := &b.runs[id]
	if r.set != 0 {
		key := uint64(r.set)<<32 | uint64(w)
		if extra := b.extra[key]; extra > 0 {
			if extra > 1 {
				b.extra[key] = extra - 1
			} else {
				delete(b.extra, key)
			}
			return false
		}
		b.set(r.set)[w/64] &^= 1 << (w % 64)
		if r.holders--; r.holders == 0 {
			b.freeSets = append(b.freeSets, r.set) // all its bits are clear by now
			r.set = 0
			b.removeUnheld(id)
		}
		return true
	}
	if r.holders--; r.holders == 0 {
		b.removeUnheld(id)
		return true
	}
	return false
}

// pass begins a pass that visits each run once.
func (b *activeBlocks) pass() { b.epoch++ }

// meet marks the run as visited, and reports whether this pass visits it for the first time.
func (b *activeBlocks) meet(id uint32) bool {
	r := &b.runs[id]
	if r.epoch == b.epoch {
		return false
	}
	r.epoch = b.epoch
	return true
}

// walker is the scratch memory of one walk.
type walker struct {
	// leaves are the runs that the prompts' chains end with, in order.
	leaves []uint32
	// made are the runs that a call's walks have made. They are removed again unless a request comes to hold them.
	made []uint32
	// held[w] is how many of the distinct blocks worker w holds already.
	held  []int32
	alive []uint64 // the set of the workers that hold the chain so far
	only  []uint64 // a set of one worker
	path  []uint32
}

// walk appends the leaf of each chain of the prompt to leaves and sets held for workers numbered below len(k.held). It
// returns the number of distinct blocks.
//
// A worker holds a chain up to some block and nothing behind it, because a request holds its whole chain and a sequence
// hash stands for its whole prefix. So the set of workers only shrinks along a chain. Hashes without that property, or
// repeated ones, only overestimate the blocks that a worker would add.
func (b *activeBlocks) walk(k *walker, p *Prompt) (distinct int) {
	from := len(k.leaves)
	for _, chain := range p.Chains {
		var leaf uint32
		leaf, k.made = b.descend(chain, uint32(p.BlockSize), k.made)
		if leaf != 0 {
			k.leaves = append(k.leaves, leaf)
		}
	}
	clear(k.held)
	b.pass()
	for _, leaf := range k.leaves[from:] {
		k.path = k.path[:0]
		for id := leaf; id != 0; id = b.runs[id].parent {
			k.path = append(k.path, id)
		}
		fresh := int32(0) // blocks of this chain that no earlier chain of the request has
		for i, id := range slices.Backward(k.path) {
			r := &b.runs[id]
			if holders := b.holders(k, r); i == len(k.path)-1 {
				k.alive = append(k.alive[:0], holders...)
			} else {
				k.keep(holders, fresh)
			}
			if b.meet(id) {
				fresh += int32(len(r.hashes))
			}
		}
		k.keep(nil, fresh)
		distinct += int(fresh)
	}
	return distinct
}

// holders returns the set of the workers that hold the run. It is valid until the next call.
func (b *activeBlocks) holders(k *walker, r *activeRun) []uint64 {
	if r.set != 0 {
		return b.set(r.set)
	}
	if r.holders == 0 {
		return nil
	}
	k.only = append(k.only[:0], make([]uint64, r.worker/64+1)...)
	k.only[r.worker/64] = 1 << (r.worker % 64)
	return k.only
}

// keep credits the workers that are not in set with the blocks so far, and drops them from alive. What a set lacks at
// its end is 0.
func (k *walker) keep(set []uint64, fresh int32) {
	for i, alive := range k.alive {
		kept := uint64(0)
		if i < len(set) {
			kept = alive & set[i]
		}
		k.alive[i] = kept
		for gone := alive &^ kept; gone != 0; gone &= gone - 1 {
			k.held[64*i+bits.TrailingZeros64(gone)] += fresh
		}
	}
	k.alive = k.alive[:min(len(k.alive), len(set))]
}
