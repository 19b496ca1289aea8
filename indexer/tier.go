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

// tier is the blocks held in one tier of memory, with their holders: runs (run.go) in an arena (arena.go), found through
// tables (table.go); and how each of them is called (names.go). Writers take turns on it; lookups (find.go) take no lock.
type tier struct {
	mu       sync.Mutex // guards what follows against other writers; readers need the protocols of run.go and table.go
	arena    arena
	starts   table                  // the first blocks of runs
	firsts   firsts                 // filter of prompts' first blocks; nil: all may be there
	mayStart filter                 // of starts
	names    nameTable              // all blocks by their names (names.go)
	blocks   int                    // in all runs
	list     []holder               // scratch
	grouped  [maxGroups]grouped     // scratch of allocHolders, zero between
	seqs     []kvblock.SequenceHash // scratch
	mixed    [maxRun]uint64         // scratch of append
	latest   ref                    // where the block is that hold, append or storeOne did last
	latestOf kvblock.Worker         // who holds that block for sure, by its own name; noWorker: nobody

	// table has blocks by sequence hash, for those who must find one without going along its prompt: all blocks if every says
	// so, which stays so once needed; else those that have, or had, private names.
	table table
	every atomic.Bool

	near      [4 * maxTogether]uintptr // scratch, memory to prefetch
	nearNames int                      // names of the store under way that were sent for before it began

	size  atomic.Int64 // bytes in use after the latest change
	spare atomic.Int64 // bytes of the arena's pages that are not
	busy  atomic.Bool  // whether it has blocks: lookups pass by a tier that has none
}

// init makes t an empty tier.
func (t *tier) init() {
	t.starts.sparse = true
	t.latestOf = noWorker
	t.starts.seed, t.table.seed, t.names.seed = rand.Uint64(), rand.Uint64(), rand.Uint64()
	t.arena.maxPages = 1 << (32 - pageBits)
	t.arena.dir.Store(&[]atomic.Pointer[page]{})
}

// unlock ends a change.
func (t *tier) unlock() {
	if size := t.arena.used() + t.tableBytes(); size != int(t.size.Load()) { // most changes do not change it
		t.size.Store(int64(size))
		if size >= bigTier && !t.arena.bigPages {
			t.arena.bigPages, t.starts.bigPages, t.names.bigPages, t.table.bigPages = true, true, true, true
		}
	}
	if spare := t.arena.bytes() - t.arena.used(); spare != int(t.spare.Load()) {
		t.spare.Store(int64(spare))
	}
	if busy := t.blocks > 0; busy != t.busy.Load() {
		t.busy.Store(busy)
	}
	t.mu.Unlock()
}

// tableBytes returns the bytes of all tables.
func (t *tier) tableBytes() int { return t.starts.size + t.names.size + t.table.size }

// findEvery makes every block be found by its sequence hash alone, from now on. Other writers wait meanwhile, some tens of
// nanoseconds for each block that is there; lookups do not. The caller holds no tier.
func (t *tier) findEvery() {
	if t.every.Load() {
		return
	}
	t.mu.Lock()
	defer t.unlock()
	if t.every.Load() {
		return
	}
	t.arena.eachRun(func(r run) bool {
		words := t.arena.record(r)
		for m := ones(length(words[0])) &^ t.found(r); m != 0; m &= m - 1 {
			at := runHeader + bits.TrailingZeros64(m)
			t.table.insert(kvblock.SequenceHash(words[at]), r+ref(at))
		}
		return true
	})
	t.every.Store(true)
}

// findAlone does the same for the block at r, for as long as anybody holds it.
func (t *tier) findAlone(r ref) {
	of, i := t.runOf(r)
	if t.found(of)>>i&1 == 0 {
		t.arena.storedOf(of)[2].Local |= 1 << i
		t.table.insert(t.seqAt(r), r)
	}
}

// found returns which blocks of r table has.
func (t *tier) found(r run) uint64 {
	if t.every.Load() {
		return ones(t.runLen(r))
	}
	return uint64(t.arena.storedOf(r)[2].Local)
}

// place is where in a prompt blocks go.
type place struct {
	spot                       // of the block before them, the zero spot if there is none or it is not in the tier
	after bool                 // whether a block comes before them
	seq   kvblock.SequenceHash // that block; meaningless without after
	depth int                  // how many blocks come before them, if it is not known of that block
}

// comesAfter makes p the place behind the block of its spot.
func (p *place) comesAfter() {
	p.after, p.seq, p.depth = true, p.spot.seq(), depthOf(p.words[0])+p.i+1
}

// behindLatest sets p to the place behind the block that was stored last.
func (t *tier) behindLatest(p *place) {
	t.arena.spot(t.latest, &p.spot)
	p.comesAfter()
}

// findAgain looks up where the block before p is, by its sequence hash alone.
func (t *tier) findAgain(p *place) {
	if at, ok := t.table.find(&t.arena, p.seq); ok {
		t.arena.spot(at, &p.spot)
	} else {
		p.spot = spot{}
	}
}

// next sets s to where the block seq is, which comes at p, if it is there.
func (t *tier) next(p *place, seq kvblock.SequenceHash, s *spot) bool {
	if i := p.i + 1; p.words != nil && i < length(p.words[0]) && p.words[runHeader+i] == uint64(seq) {
		p.following(s)
		return true
	}
	return t.startSpot(seq, s)
}

// following sets s to the place right behind the block before p, in the same run.
func (p *place) following(s *spot) {
	*s = p.spot
	s.at++
	s.i++
}

// start returns where the block seq is, if it begins a run.
func (t *tier) start(seq kvblock.SequenceHash) (ref, bool) {
	if !t.mayStart.may(seq) {
		return 0, false
	}
	return t.starts.find(&t.arena, seq)
}

// startSpot sets s to where the block seq is, if it begins a run.
func (t *tier) startSpot(seq kvblock.SequenceHash, s *spot) bool {
	at, ok := t.start(seq)
	if ok {
		t.arena.spot(at, s)
	}
	return ok
}

// insertStart and removeStart say that the block seq, which is at r, begins a run, and no longer does.
func (t *tier) insertStart(seq kvblock.SequenceHash, r ref) {
	if t.mayStart == nil {
		t.mayStart = make(filter, 1<<filterBits)
	}
	t.mayStart.add(seq)
	t.starts.insert(seq, r)
}

func (t *tier) removeStart(seq kvblock.SequenceHash, r ref) {
	t.starts.remove(seq, r)
	t.mayStart.remove(seq)
}

// nextLocal does the same, in a tier with names, by the block's local hash. That tells it as well as the sequence hash where
// the block before it is known, and needs no hashing.
func (t *tier) nextLocal(p *place, local kvblock.LocalHash, s *spot) bool {
	if i := p.i + 1; p.words != nil && i < length(p.words[0]) && p.stored[runHeader+i].Local == local {
		p.following(s)
		return true
	}
	return t.startSpot(p.hash(local), s)
}

// hash returns the sequence hash of a block at p.
func (p *place) hash(local kvblock.LocalHash) kvblock.SequenceHash {
	if !p.after {
		return kvblock.FirstSequenceHash(local)
	}
	return kvblock.NextSequenceHash(p.seq, local)
}

// chain sets t.seqs to the sequence hashes of blocks at p.
func (t *tier) chain(p *place, blocks []kvblock.StoredBlock) []kvblock.SequenceHash {
	seq := p.hash(blocks[0].Local)
	t.seqs = append(t.seqs[:0], seq)
	for _, b := range blocks[1:] {
		seq = kvblock.NextSequenceHash(seq, b.Local)
		t.seqs = append(t.seqs, seq)
	}
	return t.seqs
}

// seqAt returns the sequence hash of the block at r.
func (t *tier) seqAt(r ref) kvblock.SequenceHash { return kvblock.SequenceHash(t.arena.record(r)[0]) }

// joinNamed makes w hold the blocks that follow each other in one run from s on, as far as they go by their own names.
// It returns how many these are: 0 if the first does not, or if the arena is exhausted.
func (t *tier) joinNamed(w kvblock.Worker, h *held, s *spot, blocks []kvblock.StoredBlock) int {
	r, i, n := s.run, s.i, length(s.words[0])
	stored := s.stored[runHeader+i : runHeader+n]
	k := 0
	for k < len(stored) && k < len(blocks) && stored[k] == blocks[k] && blocks[k].Engine != 0 {
		k++
	}
	if h.private.n > 0 {
		for j := range k {
			if h.private.has(blocks[j].Engine) {
				k = j
				break
			}
		}
	}
	if k == 0 {
		return 0
	}
	had, ok := t.hold(w, h, r, i, k)
	if !ok {
		return 0
	}
	for ; had != 0; had &= had - 1 {
		j := bits.TrailingZeros64(had) - i
		h.again(kvblock.SequenceHash(s.words[runHeader+i+j]), blocks[j].Engine)
	}
	// Where prompts part, lookups are faster if the run ends there: those who hold only its beginning then hold all of it.
	if k < len(blocks) && i+k < n && stored[k].Local != blocks[k].Local && s.words[1]&manyHolders != 0 {
		t.split(r, i+k)
	}
	return k
}

// join does the same in a tier without names, with blocks whose sequence hashes are seqs.
func (t *tier) join(w kvblock.Worker, h *held, s *spot, seqs []kvblock.SequenceHash) int {
	r, i, words := s.run, s.i, s.words
	n := length(words[0])
	k := matching(words[runHeader+i:runHeader+min(n, i+len(seqs))], seqs)
	if _, ok := t.hold(w, h, r, i, k); !ok {
		return 0
	}
	if k < len(seqs) && i+k < n && words[1]&manyHolders != 0 {
		t.split(r, i+k)
	}
	return k
}

// hold makes w hold k blocks of r from block i on, and returns those of them that it held already. It reports failure,
// changing nothing, if the arena is exhausted.
func (t *tier) hold(w kvblock.Worker, h *held, r run, i, k int) (had uint64, ok bool) {
	more := ones(k) << i
	was, ok := t.setMask(r, w, 0, more)
	if !ok {
		return 0, false
	}
	t.latest, t.latestOf = r+ref(runHeader+i+k-1), w
	added := bits.OnesCount64(more &^ was)
	h.blocks += added
	h.n += added
	return more & was, true
}

// append adds the first blocks of seqs, which nobody holds, as held by w, in one run, as far as their names are free. It
// returns how many, 0 if the first one's is not, or if the arena is exhausted. Blocks says what w calls them; nameless ones
// get no name, whatever it says.
func (t *tier) append(w kvblock.Worker, h *held, p *place, seqs []kvblock.SequenceHash, blocks []kvblock.StoredBlock, nameless bool) int {
	named := t.arena.names && !nameless
	seqs = seqs[:min(len(seqs), maxRun)]
	near := t.near[:0]
	for k, seq := range seqs {
		if t.mayStart.may(seq) {
			near = append(near, t.starts.near(uint64(seq)))
		}
		if named {
			t.mixed[k] = t.names.mix(blocks[k].Engine)
			if k >= t.nearNames {
				near = append(near, t.names.near(t.mixed[k]))
			}
		}
	}
	prefetch.Words(unsafe.SliceData(near), len(near))
	if named {
		e := blocks[0].Engine
		if _, taken := t.names.find(&t.arena, e); taken || e == 0 || h.private.has(e) {
			return 0
		}
	}
	r, n, depth, ok := run(0), 0, p.depth, false
	if p.after {
		r, n, depth, ok = t.extensible(w, p, len(seqs))
	}
	longer := ok // than it was: lookups may be at it, and see the new blocks all at once
	if !longer {
		if r, ok = t.newRun(roomFor(len(seqs)), depth); !ok {
			return 0
		}
		n = 0
		words := t.arena.record(r)
		put(&words[1], uint64(w))
		put(&words[2], 0)
		if stored := t.arena.storedOf(r); stored != nil {
			stored[0].Engine, stored[1].Engine = kvblock.EngineHash(p.seq), kvblock.EngineHash(b2i(p.after))
			stored[2] = kvblock.StoredBlock{}
			if !p.after {
				t.firsts.add(seqs[0], t.table.seed, 1)
			}
		}
	}
	words, stored := t.arena.record(r), t.arena.storedOf(r)
	k := 0
	for k < len(seqs) && runHeader+n+k < len(words) {
		if k > 0 {
			if _, held := t.start(seqs[k]); held {
				break
			}
		}
		at := runHeader + n + k
		if named {
			e := blocks[k].Engine
			if e == 0 || h.private.has(e) || !t.names.insert(&t.arena, e, t.mixed[k], r+ref(at)) {
				break
			}
		}
		put(&words[at], uint64(seqs[k]))
		if stored != nil {
			if stored[at] = blocks[k]; nameless {
				stored[at].Engine = 0
			}
		}
		k++
	}
	who, mask := words[1], words[2]&ones(n)|ones(k)<<n // the mask's bits from n on meant nothing
	var grow holders
	shared, inPlace := who&manyHolders != 0, false
	if shared {
		grow = holdersOf(t.arena.record(ref(who)))
		inPlace = grow.growsFor(w)
	}
	if shared && !inPlace {
		t.collect(r, 0, n, noWorker)
		for i := range t.list {
			if t.list[i].worker == w {
				t.list[i].mask |= ones(k) << n
			}
		}
		if who, mask, ok = t.makeHolders(n + k); !ok {
			t.latestOf = noWorker // its run may have moved
			for at := runHeader + n; at < runHeader+n+k; at++ {
				if stored != nil && stored[at].Engine != 0 {
					t.names.remove(stored[at].Engine, r+ref(at))
				}
			}
			return 0
		}
	}
	old := words[1]
	if longer {
		begin(words)
	}
	if inPlace {
		grow.lengthen(w, n, k)
	} else {
		put(&words[1], who)
		put(&words[2], mask)
	}
	end(words, n+k)
	if shared && !inPlace {
		t.arena.release(ref(old))
	}
	if !longer {
		t.insertStart(seqs[0], r+runHeader)
	}
	if t.every.Load() {
		for i := range k {
			t.table.insert(seqs[i], r+ref(runHeader+n+i))
		}
	}
	t.latest, t.latestOf = r+ref(runHeader+n+k-1), w
	t.blocks += k
	h.blocks += k
	h.n += k
	return k
}

// roomFor returns for how many blocks there should be room in a run of n that may grow: a run that has more than a few will
// often be a long one, and it costs more to move blocks, of each of which a table says where it is.
func roomFor(n int) int {
	if n > 1<<4-runHeader {
		return maxRun
	}
	return n
}

// maxSharers is how many holders a run may have that is made longer for one of them. The others then hold a part of it, which
// takes a place in a list each; a run for every length would take a lookup each.
const maxSharers = 64

// extensible returns the run that ends before p, and its length, if w holds its end, few others do, prompts do not part
// there, and it has room for another block, or can be moved to where there is room. In any case it returns how many blocks
// come before p.
func (t *tier) extensible(w kvblock.Worker, p *place, want int) (r run, n, depth int, ok bool) {
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
		h := holdersOf(t.arena.record(ref(words[1])))
		if h.count() > maxSharers || p.stored == nil || p.stored[2].Engine != 0 {
			return 0, 0, depth, false
		}
	}
	if want = min(n+want, maxRun); runHeader+want > len(words) {
		to, ok := t.copyRun(r, 0, n, roomFor(want))
		if !ok {
			return 0, 0, depth, false
		}
		t.freeRun(r)
		r = to
	}
	return r, n, depth, true
}

// minEnding is how many holders must hold a run up to the same place, where prompts part, for it to be cut there: they hold
// all of its first part then, and need no place in a list.
const minEnding = 4

// endingAt returns how many holders of r hold its first i blocks and no other, not counting a single one.
func (t *tier) endingAt(r run, i int) (n int) {
	who := t.arena.record(r)[1]
	if who&manyHolders == 0 {
		return 0
	}
	h := holdersOf(t.arena.record(ref(who)))
	h.eachGrouped(func(_ kvblock.Worker, lead int) { n += b2i(lead == i) })
	for j := 1; j < len(h.list); j += 2 {
		n += b2i(h.list[j] == ones(i))
	}
	return n
}

// unhold makes w hold none of these blocks, in a tier without names where every block is found.
func (t *tier) unhold(w kvblock.Worker, seqs []kvblock.SequenceHash) {
	var r run
	var mask uint64 // of blocks of r to be cleared
	for _, seq := range seqs {
		at, ok := t.table.find(&t.arena, seq)
		if !ok {
			continue
		}
		in, i := t.runOf(at)
		if mask != 0 && in != r {
			t.clearMask(r, w, mask) // moves no block of another run
			mask = 0
		}
		r, mask = in, mask|1<<i
	}
	if mask != 0 {
		t.clearMask(r, w, mask)
	}
}

// clearMask makes w hold no block of r that is in mask, and drops the blocks that nobody holds then.
func (t *tier) clearMask(r run, w kvblock.Worker, mask uint64) {
	t.latestOf = noWorker
	was, ok := t.setMask(r, w, mask, 0)
	if was&mask == 0 {
		return
	}
	if !ok {
		t.setMask(r, w, was, 0) // the arena is exhausted: rather forget the whole run than claim what w no longer has
	}
	n := t.runLen(r)
	alive := t.union(r)
	if dead := ones(n) &^ alive; dead != 0 {
		t.drop(r, n, dead)
	}
}

// dropNames takes the block in word at of run r out of the tables.
func (t *tier) dropNames(r run, words []uint64, at int) {
	if at == runHeader {
		t.removeStart(kvblock.SequenceHash(words[at]), r+runHeader)
	}
	stored := t.arena.storedOf(r)
	if i := at - runHeader; t.found(r)>>i&1 != 0 {
		t.table.remove(kvblock.SequenceHash(words[at]), r+ref(at))
		if stored != nil {
			stored[2].Local &^= 1 << i
		}
	}
	if stored != nil && stored[at].Engine != 0 {
		t.names.remove(stored[at].Engine, r+ref(at))
	}
	if stored != nil && at == runHeader && stored[1].Engine == 0 {
		t.firsts.add(kvblock.SequenceHash(words[at]), t.table.seed, ^uint32(0))
	}
}

// drop takes the dead blocks out of r, which has n, from the last one on; what lies behind one becomes a run of its own.
// Should the arena be exhausted, blocks stay that nobody holds.
func (t *tier) drop(r run, n int, dead uint64) {
	for dead != 0 {
		end := bits.Len64(dead) // of the last stretch of dead blocks
		if end < n {
			if _, ok := t.copyRun(r, end, n-end, n-end); !ok {
				return
			}
		}
		n = bits.Len64(^dead & ones(end)) // its start
		words := t.arena.record(r)
		for i := n; i < end; i++ {
			t.dropNames(r, words, runHeader+i)
		}
		t.blocks -= end - n
		if n == 0 {
			t.freeRun(r)
			return
		}
		t.cut(r, n)
		if class := classFor(runHeader + n); 4<<class <= len(words) { // most of the record is of no use any more
			if to, ok := t.copyRun(r, 0, n, n); ok {
				t.freeRun(r)
				r = to
			}
		}
		dead &= ones(n)
	}
}
