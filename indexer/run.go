package indexer

import (
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// A run is a stretch of one prompt: up to maxRun blocks, each the successor of the one before it, with who holds which.
// A prompt may be cut into runs in any way. It is cut where prompts part, where holders differ, and where a block in
// the middle goes.
//
// Where a block is follows from where the block before it is: right behind that, or else at the start of a run, and the
// table of starts has these. So it is found by going along its prompt, and no table needs to have all blocks.
//
// Invariants, whenever tier.mu is free: every block is in one run, whose first block is in tier.starts; every
// block has a holder.
//
// A run is a record of the arena:
//
//	word 0   version << 32 | blocks before it in the prompt << 6 | number of blocks
//	word 1   the holder's number, or manyHolders and the address of the holders' record; and the follower
//	word 2   the one holder's mask
//	word 3.. the sequence hashes
//
// A mask has bit i set if block i of the run is held; bits beyond the run's end mean nothing. Holders.go says what a
// holders' record is.
//
// A run's follower is the only one that came behind its end, as far as is known: it saves looking into the table of
// starts. It may have moved or gone meanwhile, so a user checks whether it begins with the block that is
// wanted.
//
// Beside it, in tiers whose blocks have names, lies what only writers look at (arena.storedOf): what comes before the
// run, and what its blocks were stored as.
//
// Readers take no lock. The version is odd while a run changes; a reader who sees the same even version before and
// after has seen the run whole. Versions survive the release and reuse of the record. They wrap after 2^31 changes,
// which would have to happen within one read of a few cache lines to go unnoticed.
const (
	runHeader   = 3
	maxRunClass = 6
	maxRun      = 1<<maxRunClass - runHeader // 61: a mask fits a word

	manyHolders = 1 << 63

	// In word 1: a follower's address (records' lowest bits are zero), none if zero, manyFollowers if prompts part
	// there.
	followerShift = 32 - minClass
	followerBits  = (1<<32 - 1<<minClass) << followerShift
	manyFollowers = followerBits
)

// run is the address of a run's word 0.
type run = ref

// noRun is no run's address.
const noRun run = 1<<32 - 1

// runHead is what only writers need of a run as a whole. It lies beside the run's header words (arena.storedOf), in
// tiers whose blocks have names.
type runHead struct {
	parent     kvblock.SequenceHash // of the run's first block; without meaning unless hasParent
	indexed    uint64               // the blocks that tier.bySeq has, a bit each, unless tier.allIndexed
	previous   run                  // the run that had this one as its follower last; it may have moved or gone
	hasParent  bool                 // false: the run begins a prompt
	hasUnnamed bool                 // whether any block may have no own name
	branches   bool                 // whether prompts are known to part at the run's end
}

// A runHead fits beside the header words: this does not compile otherwise.
var _ [runHeader*unsafe.Sizeof(kvblock.StoredBlock{}) - unsafe.Sizeof(runHead{})]byte

// headOf returns the head of the run with these stored blocks, which must not be nil.
func headOf(stored []kvblock.StoredBlock) *runHead {
	return (*runHead)(unsafe.Pointer(unsafe.SliceData(stored[:runHeader])))
}

// ones returns the lowest n bits, n at most 63.
func ones(n int) uint64 { return 1<<n - 1 }

// position is the place of a block, taken apart. It means something until the block moves.
type position struct {
	at     ref
	run    run
	i      int                   // which of the run's blocks it is
	words  []uint64              // the run; nil for the zero spot
	stored []kvblock.StoredBlock // see arena.storedOf
}

// seq returns the block's sequence hash.
func (s *position) seq() kvblock.SequenceHash { return kvblock.SequenceHash(s.words[runHeader+s.i]) }

// hasName reports whether there is a block, whose own name is e.
func (s *position) hasName(e kvblock.EngineHash) bool {
	return s.stored != nil && s.i >= 0 && s.i < length(s.words[0]) && e != 0 && s.stored[runHeader+s.i].Engine == e
}

// runOf returns the run of the block at r, and the block's place in it.
func (t *tier) runOf(r ref) (at run, i int) {
	size := ref(1) << t.arena.page(r).class
	at = r &^ (size - 1)
	return at, int(r-at) - runHeader
}

func (t *tier) runLen(r run) int { return length(t.arena.record(r)[0]) }

// beginWrite starts a change of run r: readers wait until end.
func beginWrite(words []uint64) { publishWordNow(&words[0], words[0]+1<<32) }

// endWrite publishes the run with n blocks.
func endWrite(words []uint64, n int) {
	publishWord(&words[0], (words[0]>>32+1)<<32|words[0]&(maxDepth<<lengthBits)|uint64(n))
}

const (
	lengthBits = 6
	maxDepth   = 1<<(32-lengthBits) - 1
)

// length takes the number of blocks out of a run's word 0.
func length(word uint64) int { return int(word & (1<<lengthBits - 1)) }

// depthOf takes out of a run's word 0 how many blocks come before it in its prompt, at most maxDepth. It is known only
// as far as the run's first store knew it, and serves eviction alone.
func depthOf(word uint64) int { return int(word >> lengthBits & maxDepth) }

// follower returns the follower that a run's word 1 tells, 0 if none.
func follower(word uint64) run {
	if word &= followerBits; word != manyFollowers {
		return run(word >> followerShift)
	}
	return 0
}

// setFollower puts another follower into a run's word 1: a run's address << followerShift, manyFollowers, or 0.
func setFollower(words []uint64, by uint64) { publishWord(&words[1], words[1]&^followerBits|by) }

// newRun returns an empty run for n blocks, at most maxRun, in the state of begin: fill it and call end. Depth blocks
// come before it.
func (t *tier) newRun(n, depth int) (run, bool) {
	r, ok := t.arena.alloc(kindRun, classFor(runHeader+n))
	if ok {
		words := t.arena.record(r)
		publishWordNow(&words[0], (words[0]>>32+1)<<32|uint64(min(depth, maxDepth))<<lengthBits)
	}
	return r, ok
}

// copyRun returns a new run with n blocks of r from block i on, with their holders, and room for want blocks in all.
// The tables say that the blocks are there afterwards; r still has them. It reports failure if the arena is exhausted.
func (t *tier) copyRun(r run, i, n, want int) (run, bool) {
	who, mask, ok := t.makeHolders(t.collect(r, i, n, noWorker), n)
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
	if i+n == t.runLen(r) {
		who |= t.arena.record(r)[1] & followerBits
	}
	t.moveBlocks(r, i, n, to, who, mask)
	return to, true
}

// moveRun moves r to where there is room for want blocks. It reports failure if the arena is exhausted.
func (t *tier) moveRun(r run, want int) (run, bool) {
	from := t.arena.record(r)
	to, ok := t.newRun(want, depthOf(from[0]))
	if !ok {
		return 0, false
	}
	t.moveBlocks(r, 0, length(from[0]), to, from[1], from[2])
	beginWrite(from) // before the holders' record, which is no longer its own, changes
	endWrite(from, 0)
	t.arena.release(r)
	return to, true
}

// moveBlocks puts n blocks of r from block i on into the new run to, which gets these words 1 and 2, and tells the
// tables.
func (t *tier) moveBlocks(r run, i, n int, to run, who, mask uint64) {
	from, words := t.arena.record(r)[runHeader+i:], t.arena.record(to)
	publishWord(&words[1], who)
	publishWord(&words[2], mask)
	for j := range n {
		publishWord(&words[runHeader+j], from[j])
	}
	endWrite(words, n)
	found := t.indexedBlocks(r) >> i & ones(n)
	stored := t.arena.storedOf(to)
	if was := t.arena.storedOf(r); was != nil {
		old, head := headOf(was), headOf(stored)
		*head = *old
		if i > 0 {
			head.parent, head.hasParent = kvblock.SequenceHash(t.arena.record(r)[runHeader+i-1]), true
		}
		head.branches = old.branches && i+n == t.runLen(r)
		head.indexed = old.indexed >> i & ones(n)
		old.indexed &^= head.indexed << i
		copy(stored[runHeader:], was[runHeader+i:runHeader+i+n])
	}
	for ; found != 0; found &= found - 1 {
		j := bits.TrailingZeros64(found)
		t.bySeq.move(kvblock.SequenceHash(from[j]), r+ref(runHeader+i+j), to+ref(runHeader+j))
	}
	if i == 0 {
		t.starts.move(kvblock.SequenceHash(from[0]), r+runHeader, to+runHeader)
		t.moveFollower(r, to)
	} else {
		t.insertStart(kvblock.SequenceHash(from[0]), to+runHeader)
	}
	if stored != nil {
		for j := range n {
			if e := stored[runHeader+j].Engine; e != 0 {
				t.names.move(e, r+ref(runHeader+i+j), to+ref(runHeader+j))
			}
		}
	}
}

// moveFollower tells the run that r is the follower of, if it is any's, that r has moved.
func (t *tier) moveFollower(r, to run) {
	stored := t.arena.storedOf(to)
	if stored == nil || r == 0 {
		return
	}
	before, i := t.arena.runAround(headOf(stored).previous + runHeader)
	if before != nil && i == 0 && length(before[0]) > 0 && follower(before[1]) == r {
		setFollower(before, uint64(to)<<followerShift)
	}
}

// freeRun gives r back. The tables must not say that its blocks are there any more.
func (t *tier) freeRun(r run) {
	words := t.arena.record(r)
	who := words[1]
	beginWrite(words)
	endWrite(words, 0)
	if who&manyHolders != 0 {
		t.arena.release(ref(who))
	}
	t.arena.release(r)
}

// truncate makes r end after n blocks. The tables must not say that the rest is there any more.
func (t *tier) truncate(r run, n int) {
	words := t.arena.record(r)
	beginWrite(words)
	setFollower(words, 0)
	endWrite(words, n)
	// Masks may now say more than the run has, or nothing: tidy up. Should the arena be exhausted, it is right all the
	// same.
	t.setHolders(r, t.collect(r, 0, n, noWorker), n)
}

// split moves the blocks of r from block i on to a run of their own, so that r is what prompts have in common that part
// there. If the arena is exhausted r stays as it is.
func (t *tier) split(r run, i int) {
	n := t.runLen(r) - i
	if _, ok := t.copyRun(r, i, n, n); ok {
		t.truncate(r, i)
		setFollower(t.arena.record(r), manyFollowers)
		if stored := t.arena.storedOf(r); stored != nil {
			headOf(stored).branches = true
		}
	}
}
