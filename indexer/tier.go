package indexer

import (
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// tier has the blocks that are held in one tier of memory, with their holders and names: runs (run.go) in an arena
// (arena.go), and the tables that find them (seqtable.go, nametable.go). Writers take turns on mu; lookups (find.go)
// take no lock.
type tier struct {
	mu sync.Mutex // guards the other fields against other writers; run.go and seqtable.go have the readers' protocol
	_  memoryLine
	// Lookups read the next fields first. They share no cache line with fields that each change writes, because a write
	// would remove the line from the caches of the readers' cores.
	rootFilter rootFilter // nil: any prompt may be in the tier
	starts     seqTable   // the first blocks of runs
	arena      arena

	startFilter  startFilter           // of starts
	names        nameTable             // all blocks with an own name (aliases.go)
	blocks       int                   // in all runs
	holderList   []holder              // scratch
	groupScratch [maxGroups]groupCount // scratch of allocHolders, zero between its calls
	latest       ref                   // the block that hold, appendBlocks or storeOne stored last
	latestOf     kvblock.Worker        // a known holder of that block by its own name, or noWorker

	// bySeq finds a block by its sequence hash without a walk along its prompt. It has all blocks if allIndexed is set,
	// which is never unset; else the blocks for which indexBlock was called, such as those with aliases.
	bySeq        seqTable
	allIndexed   atomic.Bool
	lookupFilter *lookupFilter // of bySeq, in classes' tiers; nil elsewhere

	// scratch of lookAhead
	seqs          [maxAhead]kvblock.SequenceHash
	mixed         [maxAhead]uint64
	inStartFilter [maxAhead]bool

	addrs [4 * maxBatchOps]uintptr // scratch, memory to prefetch

	usedBytes  atomic.Int64 // bytes in use after the latest change
	spareBytes atomic.Int64 // free bytes in the arena's pages
	nonEmpty   atomic.Bool  // lookups skip a tier without blocks

	lower    *atomic.Uint32 // Index.lower, in tiers below the device; nil elsewhere
	lowerBit uint32
}

// memoryLine is padding of one cache line.
type memoryLine [64]byte

// init makes t an empty tier.
func (t *tier) init() {
	t.starts.sparse = true
	t.latestOf = noWorker
	t.starts.seed, t.bySeq.seed, t.names.seed = rand.Uint64(), rand.Uint64(), rand.Uint64()
	t.arena.maxPages = 1 << (32 - pageBits)
	t.arena.dir.Store(&[]atomic.Pointer[page]{})
}

// checkChange checks a tier after each change. It is nil but in tests with the build tag invariants (check_test.go).
var checkChange func(*tier)

// unlock ends a change.
func (t *tier) unlock() {
	// most changes leave the sizes as they are
	if size := t.arena.used() + t.tableBytes() - t.spareTables(); size != int(t.usedBytes.Load()) {
		t.usedBytes.Store(int64(size))
	}
	if spare := t.arena.bytes() - t.arena.used(); spare != int(t.spareBytes.Load()) {
		t.spareBytes.Store(int64(spare))
	}
	if busy := t.blocks > 0; busy != t.nonEmpty.Load() {
		t.nonEmpty.Store(busy)
		if t.lower != nil && busy {
			t.lower.Or(t.lowerBit)
		} else if t.lower != nil {
			t.lower.And(^t.lowerBit)
		}
	}
	if checkChange != nil {
		checkChange(t)
	}
	t.mu.Unlock()
}

// tableBytes returns the bytes of all tables.
func (t *tier) tableBytes() int {
	size := t.starts.size + len(t.startFilter.counts) + t.names.bytes() + t.bySeq.size
	if t.lookupFilter != nil {
		size += t.lookupFilter.bytes()
	}
	return size
}

// spareTables returns the bytes of tables without a block. They stay, so that one block more or less does not allocate
// and free them each time.
func (t *tier) spareTables() int {
	size := t.starts.spare + t.bySeq.spare
	if t.blocks > 0 {
		return size
	}
	size += len(t.startFilter.counts) + t.names.bytes()
	if t.lookupFilter != nil {
		size += t.lookupFilter.bytes()
	}
	return size
}

// indexAll adds all blocks to bySeq, and makes writers add all later ones. Other writers wait meanwhile, some tens of
// nanoseconds for each block; lookups do not. The caller holds no tier.mu.
func (t *tier) indexAll() {
	if t.allIndexed.Load() {
		return
	}
	t.mu.Lock()
	defer t.unlock()
	if t.allIndexed.Load() {
		return
	}
	t.arena.eachRun(func(r run) bool {
		words := t.arena.record(r)
		for m := ones(length(words[0])) &^ t.indexedBlocks(r); m != 0; m &= m - 1 {
			at := runHeader + bits.TrailingZeros64(m)
			t.insertBySeq(kvblock.SequenceHash(words[at]), r+ref(at))
		}
		return true
	})
	t.allIndexed.Store(true)
}

// insertBySeq adds the block seq, which is at r, to bySeq.
func (t *tier) insertBySeq(seq kvblock.SequenceHash, r ref) {
	t.bySeq.insert(seq, r)
	if t.lookupFilter != nil {
		t.lookupFilter.add(seq, &t.bySeq, &t.arena)
	}
}

// indexBlock adds the block at r to bySeq, for as long as it has a holder.
func (t *tier) indexBlock(r ref) {
	of, i := t.runOf(r)
	if t.indexedBlocks(of)>>i&1 == 0 {
		headOf(t.arena.storedOf(of)).indexed |= 1 << i
		t.insertBySeq(t.seqAt(r), r)
	}
}

// indexedBlocks returns the mask of the blocks of r that bySeq has.
func (t *tier) indexedBlocks(r run) uint64 {
	if t.allIndexed.Load() {
		return ones(t.runLen(r))
	}
	return headOf(t.arena.storedOf(r)).indexed
}

// insertPoint is the place in a prompt where blocks are stored.
type insertPoint struct {
	// of the block before it; the zero position if there is none, or it is not in the tier
	position
	after bool                 // there is a block before it
	seq   kvblock.SequenceHash // of the block before it; meaningless without after
	depth int                  // number of blocks before it, where position does not tell it
}

// setAfter sets p to the place behind the block at p.position.
func (p *insertPoint) setAfter() {
	p.after, p.seq, p.depth = true, p.position.seq(), depthOf(p.words[0])+p.i+1
}

// afterLatest sets p to the place behind the block stored last.
func (t *tier) afterLatest(p *insertPoint) {
	t.arena.locate(t.latest, &p.position)
	p.setAfter()
}

// relocate sets p.position to that of the block p.seq, or to the zero position if bySeq does not have it.
func (t *tier) relocate(p *insertPoint) {
	if at, ok := t.bySeq.find(&t.arena, p.seq); ok {
		t.arena.locate(at, &p.position)
	} else {
		p.position = position{}
	}
}

// findNext sets s to the position of the block seq, which belongs at p. It reports whether the tier has the block.
func (t *tier) findNext(p *insertPoint, seq kvblock.SequenceHash, s *position) bool {
	if i := p.i + 1; p.words != nil && i < length(p.words[0]) && p.words[runHeader+i] == uint64(seq) {
		p.successor(s)
		return true
	}
	return t.findStartPosition(seq, s)
}

// successor sets s to the position of the block at p, in the same run as the block before it.
func (p *insertPoint) successor(s *position) {
	*s = p.position
	s.at++
	s.i++
}

// findStart returns the address of the block seq, if it begins a run.
func (t *tier) findStart(seq kvblock.SequenceHash) (ref, bool) {
	if !t.startFilter.mayContain(t.starts.tag(seq)) {
		return 0, false
	}
	return t.starts.find(&t.arena, seq)
}

// findStartPosition sets s to the position of the block seq, if it begins a run.
func (t *tier) findStartPosition(seq kvblock.SequenceHash, s *position) bool {
	at, ok := t.findStart(seq)
	if ok {
		t.arena.locate(at, s)
	}
	return ok
}

// insertStart records that the block seq, which is at r, begins a run.
func (t *tier) insertStart(seq kvblock.SequenceHash, r ref) {
	t.starts.insert(seq, r)
	t.startFilter.add(t.starts.tag(seq), &t.starts)
}

// removeStart records that the block seq, which is at r, no longer begins a run.
func (t *tier) removeStart(seq kvblock.SequenceHash, r ref) {
	t.starts.remove(seq, r)
	t.startFilter.remove(t.starts.tag(seq), &t.starts)
}

// findNextLocal is findNext for a tier with names, by the block's local hash. Behind a known block the local hash
// identifies the next block as well as the sequence hash does, and needs no hashing.
func (t *tier) findNextLocal(p *insertPoint, local kvblock.LocalHash, s *position) bool {
	if i := p.i + 1; p.words != nil {
		if n := length(p.words[0]); i < n && p.stored[runHeader+i].Local == local {
			p.successor(s)
			return true
		} else if i == n && t.findFollower(p, s) && s.stored[runHeader].Local == local {
			return true
		}
	}
	found := t.findStartPosition(p.sequenceHash(local), s)
	if found {
		t.linkFollower(p, s.run)
	}
	return found
}

// findFollower sets s to the first block of the follower of the run that ends at p. It reports whether there is one.
func (t *tier) findFollower(p *insertPoint, s *position) bool {
	r := follower(p.words[1])
	if r == 0 {
		return false
	}
	t.arena.locate(r+runHeader, s)
	if s.stored == nil || s.i != 0 || length(s.words[0]) == 0 {
		return false
	}
	head := headOf(s.stored)
	return head.parent == p.seq && head.hasParent
}

// linkFollower makes r the follower of the run that ends at p. If that run has another follower already, both become
// manyFollowers. If no run ends at p, it does nothing.
func (t *tier) linkFollower(p *insertPoint, r run) {
	if p.words == nil || p.i+1 != length(p.words[0]) {
		return
	}
	var s position
	if now := p.words[1] & followerBits; now == manyFollowers ||
		now != 0 && follower(now) != r && t.findFollower(p, &s) {
		setFollower(p.words, manyFollowers)
		return
	}
	setFollower(p.words, uint64(r)<<followerShift)
	headOf(t.arena.storedOf(r)).previous = p.run
}

// sequenceHash returns the sequence hash of a block at p.
func (p *insertPoint) sequenceHash(local kvblock.LocalHash) kvblock.SequenceHash {
	if !p.after {
		return kvblock.FirstSequenceHash(local)
	}
	return kvblock.NextSequenceHash(p.seq, local)
}

// lookahead holds values that are computed for blocks before these are appended. Computing their sequence hashes takes
// about as long as a cache miss, so the tables' memory is prefetched meanwhile.
type lookahead struct {
	seqs          []kvblock.SequenceHash
	mixed         []uint64 // nameTable.mix of the engine hashes; nil if the blocks get no own names
	inStartFilter []bool   // which blocks may begin runs; nil if unknown
}

// maxAhead is the maximum number of blocks of a lookahead.
const maxAhead = 128

// lookAhead sets a to the lookahead of blocks, the first at p. prefetchBatch has prefetched the first prefetched engine
// hashes. a is valid until a block is removed, and until the next call.
func (t *tier) lookAhead(p *insertPoint, blocks []kvblock.StoredBlock, prefetched int, a *lookahead) {
	blocks = blocks[:min(len(blocks), maxAhead)]
	a.seqs, a.mixed, a.inStartFilter = t.seqs[:len(blocks)], t.mixed[:len(blocks)], t.inStartFilter[:len(blocks)]
	near := t.addrs[:0]
	seq := p.sequenceHash(blocks[0].Local)
	for k := range blocks {
		if k > 0 {
			seq = kvblock.NextSequenceHash(seq, blocks[k].Local)
		}
		a.seqs[k], a.inStartFilter[k] = seq, t.startFilter.mayContain(t.starts.tag(seq))
		if a.inStartFilter[k] {
			near = append(near, t.starts.slotAddr(uint64(seq)))
		}
		a.mixed[k] = t.names.mix(blocks[k].Engine)
		if k >= prefetched {
			near = append(near, t.names.slotAddr(a.mixed[k]))
		}
		if len(near) >= 8 || k == len(blocks)-1 {
			prefetch.Words(unsafe.SliceData(near), len(near))
			near = near[:0]
		}
	}
}

// advance drops the first k blocks.
func (a *lookahead) advance(k int) {
	k = min(k, len(a.seqs))
	a.seqs, a.mixed, a.inStartFilter = a.seqs[k:], a.mixed[k:], a.inStartFilter[k:]
}

// seqAt returns the sequence hash of the block at r.
func (t *tier) seqAt(r ref) kvblock.SequenceHash { return kvblock.SequenceHash(t.arena.record(r)[0]) }

// joinNamed makes w a holder of the leading blocks that are in the run from s on under the same own names. It sets s to
// the last of them. It returns their number (0 also if the arena is exhausted), and the number of copies added.
func (t *tier) joinNamed(
	w kvblock.Worker, h *held, s *position, blocks []kvblock.StoredBlock, o storeOptions,
) (k, repeats int) {
	r, i, n := s.run, s.i, length(s.words[0])
	stored := s.stored[runHeader+i : runHeader+n]
	k = min(len(stored), len(blocks))
	if headOf(s.stored).hasUnnamed || !same(stored[:k], blocks[:k]) {
		most := k
		for k = 0; k < most && stored[k] == blocks[k] && blocks[k].Engine != 0; k++ {
		}
	}
	if len(h.aliases) > 0 {
		for j := range k {
			if _, ok := h.aliases[blocks[j].Engine]; ok {
				k = j
				break
			}
		}
	}
	if k == 0 {
		return 0, 0
	}
	had, ok := t.hold(w, h, s, k)
	if !ok {
		return 0, 0
	}
	for ; had != 0; had &= had - 1 {
		j := bits.TrailingZeros64(had) - i
		repeats += h.storeAgain(kvblock.SequenceHash(s.words[runHeader+i+j]), blocks[j].Engine, o)
	}
	// Lookups are faster if the run ends where prompts part: a worker that holds only its beginning then holds the
	// whole run.
	if k < len(blocks) && i+k < n && stored[k].Local != blocks[k].Local && s.words[1]&manyHolders != 0 {
		t.split(r, i+k)
	}
	s.at += ref(k - 1)
	s.i += k - 1
	return k, repeats
}

// same reports whether a and b are equal. It compares memory, which is faster than a loop over blocks.
func same(a, b []kvblock.StoredBlock) bool {
	return unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(a))), uintptr(len(a))*unsafe.Sizeof(a[0])) ==
		unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b))*unsafe.Sizeof(b[0]))
}

// join is joinNamed for a tier without names. seqs has the blocks' sequence hashes.
func (t *tier) join(w kvblock.Worker, h *held, s *position, seqs []kvblock.SequenceHash) int {
	r, i, words := s.run, s.i, s.words
	n := length(words[0])
	k := matchingBlocks(words[runHeader+i:runHeader+min(n, i+len(seqs))], seqs)
	if _, ok := t.hold(w, h, s, k); !ok {
		return 0
	}
	if k < len(seqs) && i+k < n && words[1]&manyHolders != 0 {
		t.split(r, i+k)
	}
	return k
}

// hold makes w a holder of the k blocks from s on in the run of s. It returns the mask of those of them that w held
// already. It reports failure, changing nothing, if the arena is exhausted.
func (t *tier) hold(w kvblock.Worker, h *held, s *position, k int) (had uint64, ok bool) {
	more := ones(k) << s.i
	was, ok := t.setMask(s.run, s.words, w, 0, more)
	if !ok {
		return 0, false
	}
	t.latest, t.latestOf = s.at+ref(k-1), w
	added := bits.OnesCount64(more &^ was)
	h.blocks += added
	h.names += added
	return more & was, true
}

// appendBlocks adds the first blocks of next at p, in one run, held by w alone. No worker may hold the first of them
// yet. It returns how many blocks it added: at most as many as fit into the run, and none from the first one on that
// begins a run already or whose engine hash another block has. It returns 0 if that is the first block, or if the arena
// is full. blocks has the engine hashes and local hashes; it is nil in a tier without names.
func (t *tier) appendBlocks(
	w kvblock.Worker, h *held, p *insertPoint, next *lookahead, blocks []kvblock.StoredBlock,
) int {
	seqs := next.seqs[:min(len(next.seqs), maxRun)]
	r, n, extends, ok := t.runToFill(w, p, len(seqs))
	if !ok {
		return 0
	}
	words, stored := t.arena.record(r), t.arena.storedOf(r)
	from := runHeader + n
	k := t.untilStart(seqs[:min(len(seqs), len(words)-from)], next.inStartFilter)
	for i, seq := range seqs[:k] {
		publishWord(&words[from+i], uint64(seq))
	}
	if stored != nil {
		copy(stored[from:], blocks[:k])
	}
	if next.mixed != nil {
		for i := 0; i < k && len(h.aliases) > 0; i++ {
			if _, ok := h.aliases[blocks[i].Engine]; ok {
				k = i
			}
		}
		k = t.names.insert(&t.arena, stored[from:from+k], next.mixed, r+ref(from))
		if k == 0 {
			if !extends {
				endWrite(words, 0)
				t.arena.release(r)
			}
			t.latestOf = noWorker // its run may have moved
			return 0
		}
	} else if stored != nil {
		headOf(stored).hasUnnamed = true
		for i := range k {
			stored[from+i].Engine = 0
		}
	}
	if !t.publishAppended(w, r, n, k, extends) {
		t.latestOf = noWorker // its run may have moved
		for at := from; at < from+k; at++ {
			if stored != nil && stored[at].Engine != 0 {
				t.names.remove(stored[at].Engine, r+ref(at))
			}
		}
		return 0
	}
	if !extends {
		t.insertStart(seqs[0], r+runHeader)
		switch {
		case stored == nil:
		case !p.after:
			t.rootFilter.add(seqs[0], t.starts.seed, 1)
		default:
			t.linkFollower(p, r)
		}
	}
	if t.allIndexed.Load() {
		for i := range k {
			t.insertBySeq(seqs[i], r+ref(from+i))
		}
	}
	t.latest, t.latestOf = r+ref(from+k-1), w
	t.blocks += k
	h.blocks += k
	h.names += k
	return k
}

// runToFill returns the run that the next want blocks at p go into, and how many blocks it has: the run that ends at p
// if it can be extended, else a new one, which is in the state of beginWrite. It reports failure if the arena is full.
func (t *tier) runToFill(w kvblock.Worker, p *insertPoint, want int) (r run, n int, extends, ok bool) {
	depth := p.depth
	if p.after {
		if r, n, depth, extends = t.extensibleRun(w, p, want); extends {
			return r, n, true, true
		}
	}
	if r, ok = t.newRun(roomFor(want), depth); !ok {
		return 0, 0, false, false
	}
	words := t.arena.record(r)
	publishWord(&words[1], uint64(w))
	publishWord(&words[2], 0)
	if stored := t.arena.storedOf(r); stored != nil {
		*headOf(stored) = runHead{parent: p.seq, hasParent: p.after}
	}
	return r, 0, false, true
}

// untilStart returns how many of seqs come before the first one, other than seqs[0], that begins a run. inStartFilter
// says which of them may; nil if unknown.
func (t *tier) untilStart(seqs []kvblock.SequenceHash, inStartFilter []bool) int {
	for i := 1; i < len(seqs); i++ {
		if inStartFilter != nil && !inStartFilter[i] {
			continue
		}
		if _, ok := t.findStart(seqs[i]); ok {
			return i
		}
	}
	return len(seqs)
}

// publishAppended makes w the holder of k blocks that were written behind the n blocks of run r, and makes them visible
// to lookups. Without extends the run is new, in the state of beginWrite. It reports failure, changing nothing, if the
// arena is full.
func (t *tier) publishAppended(w kvblock.Worker, r run, n, k int, extends bool) bool {
	words := t.arena.record(r)
	who, mask := words[1]&^followerBits, words[2]&ones(n)|ones(k)<<n // the mask's bits from n on have no meaning
	var shared holders
	isShared, inPlace := who&manyHolders != 0, false
	if isShared {
		shared.open(t.arena.record(ref(who)))
		inPlace = shared.canLengthen(w)
	}
	replace := isShared && !inPlace // the holders' record
	if replace {
		list := t.collect(r, 0, n, noWorker)
		for i := range list {
			if list[i].worker == w {
				list[i].mask |= ones(k) << n
			}
		}
		var ok bool
		if who, mask, ok = t.makeHolders(list, n+k); !ok {
			return false
		}
	}
	old := words[1]
	if extends {
		beginWrite(words)
	}
	publishWord(&words[1], who)
	if inPlace {
		shared.lengthen(w, n, k)
	} else {
		publishWord(&words[2], mask)
	}
	endWrite(words, n+k)
	if replace {
		t.arena.release(ref(old))
	}
	return true
}

// roomFor returns the number of blocks to allocate for a run of n blocks that may grow. A run of more than a few blocks
// often becomes long, and moving a block is expensive, because tables have its address.
func roomFor(n int) int {
	if n > 1<<4-runHeader {
		return maxRun
	}
	return n
}

// maxSharers is the maximum number of holders of a run that is extended for one of them. The other holders then hold a
// part of the run, which takes an entry in a list for each. A run of its own for each length would take a lookup for
// each.
const maxSharers = 64

// extensibleRun returns the run that ends at p, and its length, if it can be extended for w: w holds its last block,
// the run has at most maxSharers holders, prompts do not part there, and the run has room for another block or can be
// moved to a record with room. In any case it returns the number of blocks before p.
func (t *tier) extensibleRun(w kvblock.Worker, p *insertPoint, want int) (r run, n, depth int, ok bool) {
	if p.at == 0 {
		return 0, 0, p.depth, false
	}
	r, i, words := p.run, p.i, p.words
	n, depth = length(words[0]), depthOf(words[0])+i+1
	if i != n-1 && t.endingAt(r, i+1) >= minEnding {
		t.split(r, i+1)
	}
	if i != n-1 || n == maxRun || (p.at != t.latest || w != t.latestOf) && t.maskIn(words, w)>>i&1 == 0 {
		return 0, 0, depth, false
	}
	if words[1]&manyHolders != 0 {
		var h holders
		h.open(t.arena.record(ref(words[1])))
		if h.count() > maxSharers || p.stored == nil || headOf(p.stored).branches {
			return 0, 0, depth, false
		}
	}
	if runHeader+min(n+want, maxRun) > len(words) {
		to, ok := t.moveRun(r, roomFor(min(n+2*want, maxRun))) // a run that has grown often grows again
		if !ok {
			return 0, 0, depth, false
		}
		t.arena.locate(to+ref(runHeader+i), &p.position)
		r = to
	}
	return r, n, depth, true
}

// minEnding is the number of holders that must hold a run up to the same block, where prompts part, for the run to be
// split there. They then hold all of its first part, and need no entry in a list.
const minEnding = 4

// endingAt returns the number of holders of r that hold its first i blocks and no others; 0 if r has only one holder.
func (t *tier) endingAt(r run, i int) (n int) {
	who := t.arena.record(r)[1]
	if who&manyHolders == 0 {
		return 0
	}
	var h holders
	h.open(t.arena.record(ref(who)))
	h.eachGrouped(func(_ kvblock.Worker, lead int) { n += b2i(lead == i) })
	for j := 1; j < len(h.list); j += 2 {
		n += b2i(h.list[j] == ones(i))
	}
	return n
}

// removeSeqs removes w from the holders of these blocks. The tier has no names, and allIndexed is set.
func (t *tier) removeSeqs(w kvblock.Worker, seqs []kvblock.SequenceHash) {
	var r run
	var mask uint64 // of blocks of r to be cleared
	for _, seq := range seqs {
		at, ok := t.bySeq.find(&t.arena, seq)
		if !ok {
			continue
		}
		in, i := t.runOf(at)
		if mask != 0 && in != r {
			t.clearMask(r, w, mask) // does not move blocks of other runs
			mask = 0
		}
		r, mask = in, mask|1<<i
	}
	if mask != 0 {
		t.clearMask(r, w, mask)
	}
}

// clearMask removes w from the holders of the blocks of r in mask, and removes blocks without another holder.
func (t *tier) clearMask(r run, w kvblock.Worker, mask uint64) {
	t.latestOf = noWorker
	words := t.arena.record(r)
	was, ok := t.setMask(r, words, w, mask, 0)
	if was&mask == 0 {
		return
	}
	if !ok {
		// The arena is exhausted. Remove w from the whole run, so that no block counts that w no longer has.
		t.setMask(r, words, w, was, 0)
	}
	n := t.runLen(r)
	alive := t.union(r)
	if dead := ones(n) &^ alive; dead != 0 {
		t.dropBlocks(r, n, dead)
	}
}

// removeFromTables removes the block in word at of run r from the tables.
func (t *tier) removeFromTables(r run, words []uint64, at int) {
	if at == runHeader {
		t.removeStart(kvblock.SequenceHash(words[at]), r+runHeader)
	}
	stored := t.arena.storedOf(r)
	if i := at - runHeader; t.indexedBlocks(r)>>i&1 != 0 {
		t.bySeq.remove(kvblock.SequenceHash(words[at]), r+ref(at))
		if t.lookupFilter != nil {
			t.lookupFilter.remove(kvblock.SequenceHash(words[at]), &t.bySeq, &t.arena)
		}
		if stored != nil {
			headOf(stored).indexed &^= 1 << i
		}
	}
	if stored != nil && stored[at].Engine != 0 {
		t.names.remove(stored[at].Engine, r+ref(at))
	}
	if stored != nil && at == runHeader && !headOf(stored).hasParent {
		t.rootFilter.add(kvblock.SequenceHash(words[at]), t.starts.seed, ^uint32(0))
	}
}

// dropBlocks removes the dead blocks of r, which has n, from the last one on. Blocks behind a removed one become a run
// of their own. If the arena is full, blocks without a holder may stay.
func (t *tier) dropBlocks(r run, n int, dead uint64) {
	for dead != 0 {
		end := bits.Len64(dead) // behind the last consecutive dead blocks
		if end < n {
			if _, ok := t.copyRun(r, end, n-end, n-end); !ok {
				return
			}
		}
		n = bits.Len64(^dead & ones(end)) // the first of them
		words := t.arena.record(r)
		for i := n; i < end; i++ {
			t.removeFromTables(r, words, runHeader+i)
		}
		t.blocks -= end - n
		if n == 0 {
			t.freeRun(r)
			return
		}
		t.truncate(r, n)
		if class := classFor(runHeader + n); 4<<class <= len(words) { // most of the record is unused
			if to, ok := t.moveRun(r, n); ok {
				r = to
			}
		}
		dead &= ones(n)
	}
}
