package indexer

import (
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// A run is a node of the radix tree: up to maxRun consecutive blocks of a prompt, and their holders. Any division of a
// prompt into runs is valid. Runs are cut where prompts part, where holders differ, and where a block in the middle is
// removed.
//
// The successor of a block is either the next block of the run, or the first block of a run, which tier.starts finds.
// So a lookup walks along the prompt, and no table of sequence hashes needs to have all blocks.
//
// Invariants while tier.mu is free: each block is in one run, the first block of each run is in tier.starts, and each
// block has a holder.
//
// A run is a record of the arena:
//
//	word 0   version << 32 | blocks before it in the prompt << 6 | number of blocks
//	word 1   the holder's number, or manyHolders and the address of the holders' record; and the follower
//	word 2   the one holder's mask
//	word 3.. the sequence hashes
//
// Bit i of a mask says that block i of the run is held. Bits beyond the run's end have no meaning. holders.go describes
// holders' records.
//
// A run's follower is the only run known to continue it, which saves a lookup in tier.starts. The follower may have
// moved or gone, so a user checks that it begins with the wanted block.
//
// In tiers with engine hashes, arena.storedOf has the data that only writers read: the runHead, and the engine hash and
// local hash of each block.
//
// Readers take no lock. The version is odd while a run changes. A reader that reads the same even version before and
// after has read a consistent run. Versions survive the release and reuse of the record. They wrap after 2^31 changes;
// a reader would miss these only if all happened while it read a few cache lines.
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

// runHead has the fields of a run that only writers need. It lies beside the run's header words (arena.storedOf), in
// tiers with engine hashes.
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

// position is the decoded address of a block. It is valid until the block moves.
type position struct {
	at     ref
	run    run
	i      int                   // index of the block in the run
	words  []uint64              // the run; nil for the zero position
	stored []kvblock.StoredBlock // see arena.storedOf
}

// seq returns the block's sequence hash.
func (s *position) seq() kvblock.SequenceHash { return kvblock.SequenceHash(s.words[runHeader+s.i]) }

// hasName reports whether there is a block at s and its own name is e.
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

// beginWrite starts a change of a run. Readers retry until endWrite.
func beginWrite(words []uint64) { publishWordNow(&words[0], words[0]+1<<32) }

// endWrite publishes the run with n blocks.
func endWrite(words []uint64, n int) {
	publishWord(&words[0], (words[0]>>32+1)<<32|words[0]&(maxDepth<<lengthBits)|uint64(n))
}

const (
	lengthBits = 6
	maxDepth   = 1<<(32-lengthBits) - 1
)

// length returns the number of blocks in a run's word 0.
func length(word uint64) int { return int(word & (1<<lengthBits - 1)) }

// depthOf returns the depth in a run's word 0: the number of blocks before the run in its prompt, at most maxDepth. It
// is only as exact as the run's first store knew it. Only eviction uses it.
func depthOf(word uint64) int { return int(word >> lengthBits & maxDepth) }

// follower returns the follower in a run's word 1, 0 if none.
func follower(word uint64) run {
	if word &= followerBits; word != manyFollowers {
		return run(word >> followerShift)
	}
	return 0
}

// setFollower sets the follower in a run's word 1 to by: a run's address << followerShift, manyFollowers, or 0.
func setFollower(words []uint64, by uint64) { publishWord(&words[1], words[1]&^followerBits|by) }

// newRun returns an empty run for n blocks, at most maxRun, behind depth blocks, as after beginWrite. The caller fills
// it and calls endWrite.
func (t *tier) newRun(n, depth int) (run, bool) {
	r, ok := t.arena.alloc(kindRun, classFor(runHeader+n))
	if ok {
		words := t.arena.record(r)
		publishWordNow(&words[0], (words[0]>>32+1)<<32|uint64(min(depth, maxDepth))<<lengthBits)
	}
	return r, ok
}

// copyRun returns a new run with n blocks of r from block i on, with their holders, and room for want blocks in all.
// Afterwards the tables have the new addresses of the blocks; r still has the blocks. It reports failure if the arena
// is exhausted.
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

// moveRun moves r to a record with room for want blocks. It reports failure if the arena is exhausted.
func (t *tier) moveRun(r run, want int) (run, bool) {
	from := t.arena.record(r)
	to, ok := t.newRun(want, depthOf(from[0]))
	if !ok {
		return 0, false
	}
	t.moveBlocks(r, 0, length(from[0]), to, from[1], from[2])
	beginWrite(from) // before the holders' record, which now belongs to the new run, changes
	endWrite(from, 0)
	t.arena.release(r)
	return to, true
}

// moveBlocks copies n blocks of r from block i on into the new run to, sets its words 1 and 2 to who and mask, and
// updates the tables.
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

// moveFollower updates the run that has r as its follower, if there is one, after r moved to the address to.
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

// freeRun releases r. The caller has removed its blocks from the tables.
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

// truncate makes r end after n blocks. The caller has removed the other blocks from the tables.
func (t *tier) truncate(r run, n int) {
	words := t.arena.record(r)
	beginWrite(words)
	setFollower(words, 0)
	endWrite(words, n)
	// Some masks may now be longer than the run, or empty: make new holders. If the arena is exhausted, the old masks
	// remain correct.
	t.setHolders(r, t.collect(r, 0, n, noWorker), n)
}

// split moves the blocks of r from block i on to a new run, so that r ends where prompts part. If the arena is
// exhausted, r does not change.
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
