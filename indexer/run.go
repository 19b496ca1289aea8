package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// A run is a stretch of one prompt: up to maxRun blocks, each the successor of the one before it, with who holds which.
// A prompt may be cut into runs in any way. It is cut where prompts part, where holders differ, and where a block in the
// middle goes.
//
// Where a block is follows from where the block before it is: right behind that, or else at the start of a run, and the table
// of starts has these. So it is found by going along its prompt, and no table needs to have all blocks.
//
// Invariants, whenever tier.mu is free: every block is in one run, of which tier.starts has the first block; every block has a
// holder.
//
// A run is a record of the arena:
//
//	word 0   version << 32 | blocks before it in the prompt << 6 | number of blocks
//	word 1   the holder's number, if there is one; manyHolders | address of the holders' record, if there are more
//	word 2   the one holder's mask
//	word 3.. the sequence hashes
//
// A mask has bit i set if block i of the run is held; bits beyond the run's end mean nothing. The holders' record:
//
//	word 0   words of the bitset | entries of the list << 16 | holders in the bitset << 40
//	word 1.. a bitset of workers that hold the whole run
//	then     the list: a worker's number, its mask; for those who hold a part, or are not worth a bitset
//
// Beside it, in tiers whose blocks have names, lies what only writers look at (arena.storedOf): what comes before the run, and
// what its blocks were stored as.
//
// Readers take no lock. The version is odd while a run changes; a reader who sees the same even version before and after
// has seen the run whole. Versions survive the release and reuse of the record. They wrap after 2^31 changes, which would
// have to happen within one read of a few cache lines to go unnoticed.
const (
	runHeader   = 3
	maxRunClass = 6
	maxRun      = 1<<maxRunClass - runHeader // 61: a mask fits a word

	manyHolders = 1 << 63
)

// run is the address of a run's word 0.
type run = ref

// ones returns the lowest n bits, n at most 63.
func ones(n int) uint64 { return 1<<n - 1 }

// runOf returns the run of the block at r, and the block's place in it.
func (t *tier) runOf(r ref) (at run, i int) {
	size := ref(1) << t.arena.page(r).class
	at = r &^ (size - 1)
	return at, int(r-at) - runHeader
}

func (t *tier) runLen(r run) int { return length(t.arena.record(r)[0]) }

// begin starts a change of run r: readers wait until end. (Not by put: the compiler may leave out what end overwrites.)
func begin(words []uint64) { atomic.StoreUint64(&words[0], words[0]+1<<32) }

// end publishes the run with n blocks.
func end(words []uint64, n int) {
	put(&words[0], (words[0]>>32+1)<<32|words[0]&(maxDepth<<lengthBits)|uint64(n))
}

const (
	lengthBits = 6
	maxDepth   = 1<<(32-lengthBits) - 1
)

// length takes the number of blocks out of a run's word 0.
func length(word uint64) int { return int(word & (1<<lengthBits - 1)) }

// depthOf takes out of a run's word 0 how many blocks come before it in its prompt, at most maxDepth. It is known only as
// far as the run's first store knew it, and serves eviction alone.
func depthOf(word uint64) int { return int(word >> lengthBits & maxDepth) }

// holder is one holder of a run.
type holder struct {
	worker kvblock.Worker
	mask   uint64
}

// maskOf returns which blocks of r worker w holds.
func (t *tier) maskOf(r run, w kvblock.Worker) uint64 {
	words := t.arena.record(r)
	if words[1]&manyHolders == 0 {
		if kvblock.Worker(words[1]) == w {
			return words[2]
		}
		return 0
	}
	h := holdersOf(t.arena.record(ref(words[1])))
	all := ones(length(words[0]))
	if h.all(w) {
		return all
	}
	if i := h.find(w); i >= 0 {
		return h.list[2*i+1] & all
	}
	return 0
}

// union returns which blocks of r anybody holds.
func (t *tier) union(r run) uint64 {
	words := t.arena.record(r)
	if words[1]&manyHolders == 0 {
		return words[2]
	}
	h := holdersOf(t.arena.record(ref(words[1])))
	all := ones(length(words[0]))
	if h.full > 0 {
		return all
	}
	var m uint64
	for i := 1; i < len(h.list); i += 2 {
		m |= h.list[i]
	}
	return m & all
}

// holders is a holders' record taken apart, for writers.
type holders struct {
	words []uint64
	bits  []uint64 // by worker number / 64
	list  []uint64 // worker, mask, worker, mask, ...
	full  int      // workers in bits
}

func holdersOf(words []uint64) holders {
	nbits, nlist, full := holderCounts(words[0])
	return holders{words: words, bits: words[1 : 1+nbits], list: words[1+nbits : 1+nbits+2*nlist], full: full}
}

// holderCounts takes word 0 of a holders' record apart.
func holderCounts(word uint64) (nbits, nlist, full int) {
	return int(word & 0xffff), int(word >> 16 & 0xffffff), int(word >> 40)
}

func (h *holders) setCounts(full, nlist int) {
	put(&h.words[0], uint64(len(h.bits))|uint64(nlist)<<16|uint64(full)<<40)
}

func (h *holders) fits(w kvblock.Worker) bool { return int(w/64) < len(h.bits) }

// all reports whether w is in the bitset.
func (h *holders) all(w kvblock.Worker) bool { return h.fits(w) && h.bits[w/64]>>(w%64)&1 != 0 }

// find returns w's place in the list, -1 if it is not there.
func (h *holders) find(w kvblock.Worker) int {
	for i := 0; i < len(h.list); i += 2 {
		if h.list[i] == uint64(w) {
			return i / 2
		}
	}
	return -1
}

// setMask makes mask what w holds of r. It may leave blocks without a holder; see clearMask. It reports failure, changing
// nothing, if the arena is exhausted.
func (t *tier) setMask(r run, w kvblock.Worker, mask uint64) bool {
	words := t.arena.record(r)
	n := length(words[0])
	if words[1]&manyHolders == 0 && kvblock.Worker(words[1]) == w { // the only holder
		begin(words)
		put(&words[2], mask)
		end(words, n)
		return true
	}
	if words[1]&manyHolders == 0 {
		if mask == 0 {
			return true
		}
		t.list = append(t.list[:0], holder{kvblock.Worker(words[1]), words[2]}, holder{w, mask})
		return t.setHolders(r, n)
	}

	h := holdersOf(t.arena.record(ref(words[1])))
	inBits, at := h.all(w), -1
	if !inBits {
		at = h.find(w)
	}
	toBits := mask == ones(n) && h.fits(w)
	toList := mask != 0 && !toBits
	full, nlist := h.full, len(h.list)/2
	if toList && at < 0 && 1+len(h.bits)+2*(nlist+1) > len(h.words) { // no room
		t.collect(r, 0, n, w)
		t.list = append(t.list, holder{w, mask})
		return t.setHolders(r, n)
	}
	begin(words)
	if inBits != toBits {
		put(&h.bits[w/64], h.bits[w/64]^1<<(w%64))
		full += 1 - 2*b2i(inBits)
	}
	list := h.words[1+len(h.bits):]
	switch {
	case toList && at >= 0:
		put(&list[2*at+1], mask)
	case toList:
		put(&list[2*nlist], uint64(w))
		put(&list[2*nlist+1], mask)
		nlist++
	case at >= 0: // the last one takes its place
		nlist--
		put(&list[2*at], list[2*nlist])
		put(&list[2*at+1], list[2*nlist+1])
	}
	h.setCounts(full, nlist)
	end(words, n)
	if full+nlist == 1 {
		t.collect(r, 0, n, noWorker)
		return t.setHolders(r, n)
	}
	return true
}

// noWorker is nobody's number.
const noWorker kvblock.Worker = 1<<32 - 1

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// collect sets t.list to the holders of n blocks of r from block i on, with their masks of these, without worker except.
func (t *tier) collect(r run, i, n int, except kvblock.Worker) {
	t.list = t.list[:0]
	add := func(w kvblock.Worker, mask uint64) {
		if mask = mask >> i & ones(n); mask != 0 && w != except {
			t.list = append(t.list, holder{w, mask})
		}
	}
	words := t.arena.record(r)
	if words[1]&manyHolders == 0 {
		add(kvblock.Worker(words[1]), words[2])
		return
	}
	h := holdersOf(t.arena.record(ref(words[1])))
	for j, word := range h.bits {
		for ; word != 0; word &= word - 1 {
			add(kvblock.Worker(64*j+bits.TrailingZeros64(word)), ones(maxRun))
		}
	}
	for j := 0; j < len(h.list); j += 2 {
		add(kvblock.Worker(h.list[j]), h.list[j+1])
	}
}

// setHolders makes t.list the holders of r and n its number of blocks. It reports failure, changing nothing, if the arena
// is exhausted.
func (t *tier) setHolders(r run, n int) bool {
	who, mask, ok := t.makeHolders(n)
	if !ok {
		return false
	}
	words := t.arena.record(r)
	old := words[1]
	begin(words)
	put(&words[1], who)
	put(&words[2], mask)
	end(words, n)
	if old&manyHolders != 0 {
		t.arena.release(ref(old))
	}
	return true
}

// makeHolders returns words 1 and 2 of a run of n blocks whose holders are t.list.
func (t *tier) makeHolders(n int) (who, mask uint64, ok bool) {
	switch len(t.list) {
	case 0:
		return uint64(noWorker), 0, true
	case 1:
		return uint64(t.list[0].worker), t.list[0].mask, true
	}
	at, ok := t.allocHolders(n)
	return manyHolders | uint64(at), 0, ok
}

// allocHolders returns a new record for the holders in t.list of a run of n blocks.
func (t *tier) allocHolders(n int) (ref, bool) {
	full, top := 0, kvblock.Worker(0)
	for _, h := range t.list {
		if h.mask == ones(n) {
			full++
			top = max(top, h.worker)
		}
	}
	nbits, nlist := int(top/64)+1, len(t.list)-full
	if full == 0 || nbits > 2*full { // a bitset would be larger than the list
		nbits, nlist, full = 0, len(t.list), 0
	}
	at, ok := t.arena.alloc(sortHolders, classFor(1+nbits+2*nlist+2)) // with room for one more
	if !ok {
		return 0, false
	}
	words := t.arena.record(at)
	for i := range nbits {
		put(&words[1+i], 0)
	}
	h := holders{words: words, bits: words[1 : 1+nbits]}
	list := words[1+nbits:]
	for _, e := range t.list {
		if nbits > 0 && e.mask == ones(n) {
			put(&h.bits[e.worker/64], h.bits[e.worker/64]|1<<(e.worker%64))
			continue
		}
		put(&list[0], uint64(e.worker))
		put(&list[1], e.mask)
		list = list[2:]
	}
	h.setCounts(full, nlist)
	return at, true
}

// newRun returns an empty run for n blocks, at most maxRun, in the state of begin: fill it and call end. Depth blocks come
// before it.
func (t *tier) newRun(n, depth int) (run, bool) {
	r, ok := t.arena.alloc(sortRun, classFor(runHeader+n))
	if ok {
		words := t.arena.record(r)
		atomic.StoreUint64(&words[0], (words[0]>>32+1)<<32|uint64(min(depth, maxDepth))<<lengthBits)
	}
	return r, ok
}

// copyRun returns a new run with n blocks of r from block i on, with their holders, and room for want blocks in all. The
// tables say that the blocks are there afterwards; r still has them. It reports failure if the arena is exhausted.
func (t *tier) copyRun(r run, i, n, want int) (run, bool) {
	t.collect(r, i, n, noWorker)
	who, mask, ok := t.makeHolders(n)
	if !ok {
		return 0, false
	}
	to, ok := t.newRun(want, depthOf(t.arena.record(r)[0])+i)
	if !ok {
		if who&manyHolders != 0 {
			t.arena.release(ref(who))
		}
		return 0, false
	}
	from, words := t.arena.record(r)[runHeader+i:], t.arena.record(to)
	put(&words[1], who)
	put(&words[2], mask)
	for j := range n {
		put(&words[runHeader+j], from[j])
	}
	end(words, n)
	found := t.found(r) >> i & ones(n)
	if from, to := t.arena.storedOf(r), t.arena.storedOf(to); from != nil {
		to[0], to[1] = from[0], from[1]
		if i > 0 {
			to[0].Engine, to[1].Engine = kvblock.EngineHash(t.arena.record(r)[runHeader+i-1]), 1
		}
		if to[2].Engine = 0; i+n == t.runLen(r) {
			to[2].Engine = from[2].Engine
		}
		to[2].Local = from[2].Local >> i & kvblock.LocalHash(ones(n))
		from[2].Local &^= to[2].Local << i
		copy(to[runHeader:], from[runHeader+i:runHeader+i+n])
	}
	for ; found != 0; found &= found - 1 {
		j := bits.TrailingZeros64(found)
		t.table.move(kvblock.SequenceHash(from[j]), r+ref(runHeader+i+j), to+ref(runHeader+j))
	}
	if i == 0 {
		t.starts.move(kvblock.SequenceHash(from[0]), r+runHeader, to+runHeader)
	} else {
		t.starts.insert(kvblock.SequenceHash(from[0]), to+runHeader)
	}
	if stored := t.arena.storedOf(to); stored != nil {
		for j := range n {
			if e := stored[runHeader+j].Engine; e != 0 {
				t.names.move(kvblock.SequenceHash(e), r+ref(runHeader+i+j), to+ref(runHeader+j))
			}
		}
	}
	return to, true
}

// freeRun gives r back. The tables must not say that its blocks are there any more.
func (t *tier) freeRun(r run) {
	words := t.arena.record(r)
	who := words[1]
	begin(words)
	end(words, 0)
	if who&manyHolders != 0 {
		t.arena.release(ref(who))
	}
	t.arena.release(r)
}

// cut makes r end after n blocks. The tables must not say that the rest is there any more.
func (t *tier) cut(r run, n int) {
	words := t.arena.record(r)
	begin(words)
	end(words, n)
	// Masks may now say more than the run has, or nothing: tidy up. Should the arena be exhausted, it is right all the same.
	t.collect(r, 0, n, noWorker)
	t.setHolders(r, n)
}

// split moves the blocks of r from block i on to a run of their own, so that r is what prompts have in common that part
// there. If the arena is exhausted r stays as it is.
func (t *tier) split(r run, i int) {
	n := t.runLen(r) - i
	if _, ok := t.copyRun(r, i, n, n); ok {
		t.cut(r, i)
		if stored := t.arena.storedOf(r); stored != nil {
			stored[2].Engine = 1
		}
	}
}
