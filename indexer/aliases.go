package indexer

import (
	"math/bits"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// Engine hashes mean something for one worker only, but most engines derive them from what is in the block, so that
// workers agree. So every block has one name of its own, the engine hash under which it came to be, found through
// tier.names; and a worker that calls it otherwise has private names for it. Nothing is taken for granted: a worker
// holds a block by the block's own name only if it stored it by that name.
//
// Invariants, whenever tier.mu is free: a worker's name is either private or a block's own, never both; an engine hash
// is the own name of one block at most (of two that come under the same one, the second has none); a block's own name
// is never 0.

// held is what one worker holds in one tier. It is guarded by worker.mu and, where the tier's blocks change as well,
// tier.mu.
type held struct {
	names   int      // names
	blocks  int      // blocks
	aliases aliasMap // names that are not the blocks' own
	// blocks with private names, by sequence hash: 2 for each, 1 if the own name is one more
	aliasCounts aliasMap
	copies      map[kvblock.EngineHash]int // names stored more than once: how many times more
	loading     bool                       // the store under way is a dump's, whose copies do not count
	repeats     int                        // blocks stored again in the store under way
}

// storeOptions qualifies one store.
type storeOptions struct {
	load       bool // the store is part of a dump: blocks that are held already get no further copy
	prefetched int  // how many of its first engine hashes prefetchBatch has prefetched
}

// storeAgain counts a block that is held already and was stored by its own name.
func (h *held) storeAgain(seq kvblock.SequenceHash, e kvblock.EngineHash, o storeOptions) (repeats int) {
	if a, ok := h.aliasCounts.get(kvblock.EngineHash(seq)); ok && a&1 == 0 { // but not by that name
		h.aliasCounts.put(kvblock.EngineHash(seq), a|1)
		h.names++
		return 0
	}
	return h.addCopy(e, o)
}

// addCopy counts another physical copy of the block that e names, unless the store is part of a dump. It returns the
// number of copies added.
func (h *held) addCopy(e kvblock.EngineHash, o storeOptions) (repeats int) {
	if o.load {
		return 0
	}
	if h.copies == nil {
		h.copies = map[kvblock.EngineHash]int{}
	}
	h.copies[e]++
	return 1
}

// takeCopy takes away one of several copies of what e names, if there are several.
func (h *held) takeCopy(e kvblock.EngineHash) bool {
	more := h.copies[e]
	switch more {
	case 0:
		return false
	case 1:
		delete(h.copies, e)
	default:
		h.copies[e] = more - 1
	}
	return true
}

// byOwnName reports whether the worker holds the block, which it does hold, by the block's own name.
func (h *held) byOwnName(seq kvblock.SequenceHash) bool {
	a, ok := h.aliasCounts.get(kvblock.EngineHash(seq))
	return !ok || a&1 != 0
}

// findNamed sets s to where the block is that w calls e, if there is one.
func (t *tier) findNamed(w kvblock.Worker, h *held, e kvblock.EngineHash, s *position) bool {
	if h.names == 0 {
		return false
	}
	if seq, ok := h.aliases.get(e); ok {
		at, ok := t.bySeq.find(&t.arena, seq)
		t.arena.locate(at, s)
		return ok
	}
	if t.arena.locate(t.latest, s); !s.hasName(e) {
		at, ok := t.names.find(&t.arena, e)
		if !ok {
			return false
		}
		t.arena.locate(at, s)
	} else if w == t.latestOf {
		return true
	}
	return t.maskIn(s.words, w)>>s.i&1 != 0 && h.byOwnName(s.seq())
}

// store makes w hold blocks, each the successor of the one before it, from p on. It returns how many it did: fewer than
// all if the arena is exhausted.
func (t *tier) store(
	w kvblock.Worker,
	h *held,
	p *insertPoint,
	blocks []kvblock.StoredBlock,
	o storeOptions,
) (n, repeats int) {
	var s position
	var next lookahead // what is known of the blocks from i on
	for i := 0; i < len(blocks); o.prefetched = 0 {
		k, again, joined := 0, 0, t.findNextLocal(p, blocks[i].Local, &s)
		if joined {
			k, again = t.joinNamed(w, h, &s, blocks[i:], o)
		} else {
			if len(next.seqs) == 0 {
				t.lookAhead(p, blocks[i:], o.prefetched, &next)
			}
			k = t.appendBlocks(w, h, p, &next, blocks[i:])
		}
		if next.advance(k); k == 0 {
			var ok bool
			if again, ok = t.storeOne(w, h, p, blocks[i], o); !ok {
				return i, repeats
			}
			k, joined = 1, false
			next = lookahead{} // blocks may be gone
		}
		repeats += again
		if i += k; i == len(blocks) {
			break
		}
		if joined {
			p.position = s
			p.setAfter()
		} else {
			t.afterLatest(p)
		}
	}
	return len(blocks), repeats
}

// storeUnnamed does the same in a tier without names, with blocks whose sequence hashes are seqs.
func (t *tier) storeUnnamed(w kvblock.Worker, h *held, p *insertPoint, seqs []kvblock.SequenceHash) int {
	var s position
	for i := 0; i < len(seqs); {
		if i > 0 {
			t.afterLatest(p)
		}
		k := 0
		if t.findNext(p, seqs[i], &s) {
			k = t.join(w, h, &s, seqs[i:])
		} else {
			k = t.appendBlocks(w, h, p, &lookahead{seqs: seqs[i:]}, nil)
		}
		if k == 0 {
			return i
		}
		i += k
	}
	return len(seqs)
}

// storeOne makes w hold one block at p under a name that is private, or was another block's until now. It reports
// failure if the arena is exhausted.
func (t *tier) storeOne(
	w kvblock.Worker,
	h *held,
	p *insertPoint,
	b kvblock.StoredBlock,
	o storeOptions,
) (repeats int, ok bool) {
	e, seq := b.Engine, p.sequenceHash(b.Local)
	var s position
	if t.findNamed(w, h, e, &s) {
		if s.seq() == seq {
			t.latest, t.latestOf = s.at, noWorker
			return h.addCopy(e, o), true
		}
		delete(h.copies, e)
		if p.at != 0 {
			t.indexBlock(p.at) // it may move now, or go
		}
		t.removeNames(w, h, []kvblock.EngineHash{e})
		if p.at != 0 {
			t.relocate(p)
		}
	}
	blocks := []kvblock.StoredBlock{b}
	if !t.findNextLocal(p, b.Local, &s) {
		one := &lookahead{seqs: []kvblock.SequenceHash{seq}, mixed: []uint64{t.names.mix(e)}}
		if t.appendBlocks(w, h, p, one, blocks) == 1 {
			return 0, true
		}
		one.mixed = nil
		if t.appendBlocks(w, h, p, one, blocks) == 0 {
			return 0, false
		}
		h.aliases.put(e, seq)
		h.aliasCounts.put(kvblock.EngineHash(seq), 2)
		t.latestOf = noWorker
		t.indexBlock(t.latest) // which private names lead to by sequence hash
		return 0, true
	}
	if k, again := t.joinNamed(w, h, &s, blocks, o); k == 1 {
		return again, true
	}
	if s.hasName(e) {
		return 0, false // join failed for want of memory
	}
	if mask := t.maskIn(s.words, w); mask>>s.i&1 != 0 {
		a, ok := h.aliasCounts.get(kvblock.EngineHash(seq))
		if !ok {
			a = 1
		}
		h.aliasCounts.put(kvblock.EngineHash(seq), a+2)
	} else {
		if _, ok := t.setMask(s.run, s.words, w, 0, 1<<s.i); !ok {
			return 0, false
		}
		h.blocks++
		h.aliasCounts.put(kvblock.EngineHash(seq), 2)
	}
	h.aliases.put(e, seq)
	h.names++
	t.indexBlock(s.at)
	t.latest, t.latestOf = s.at, noWorker
	return 0, true
}

// removeNames takes these names from w, and w from the holders of blocks that have no other. It returns how many names
// w did not have.
func (t *tier) removeNames(w kvblock.Worker, h *held, hashes []kvblock.EngineHash) (unknown int) {
	t.latestOf = noWorker
	if len(hashes) > maxPrefetchNames { // else see expect
		near := t.addrs[:0]
		for _, e := range hashes[:min(len(hashes), len(t.addrs))] {
			near = append(near, t.names.slotAddr(t.names.mix(e)))
		}
		prefetch.Words(&near[0], len(near))
	}
	var r run
	var mask uint64                     // of blocks of r to be cleared
	in, i, holds := noRun, 0, uint64(0) // the run and place of the latest name's block, and what w holds of that run
	release := func(in run, i int) {
		if mask != 0 && in != r {
			t.clearMask(r, w, mask) // moves no block of another run
			mask = 0
		}
		r, mask = in, mask|1<<i
		h.blocks--
	}
	for _, e := range hashes {
		if len(h.copies) > 0 && h.takeCopy(e) {
			continue
		}
		if seq, ok := h.aliases.remove(e); ok {
			h.names--
			key := kvblock.EngineHash(seq)
			a, _ := h.aliasCounts.get(key)
			if a -= 2; a > 1 {
				h.aliasCounts.put(key, a)
				continue
			}
			h.aliasCounts.remove(key)
			if at, ok := t.bySeq.find(&t.arena, seq); ok && a == 0 {
				release(t.runOf(at))
				in, i = noRun, 0 // it may be gone
			}
			continue
		}
		if i > 0 && e != 0 && t.arena.nameAt(in+ref(runHeader+i-1)) == e { // blocks go from the last one on
			i--
		} else {
			at, ok := t.names.find(&t.arena, e)
			if !ok {
				unknown++
				continue
			}
			was := in
			if in, i = t.runOf(at); in != was {
				holds = t.maskOf(in, w)
			}
		}
		var key, a = kvblock.EngineHash(0), kvblock.SequenceHash(0)
		aliased := false
		if h.aliasCounts.n > 0 {
			key = kvblock.EngineHash(t.arena.record(in)[runHeader+i])
			a, aliased = h.aliasCounts.get(key)
		}
		switch {
		case holds>>i&1 == 0, in == r && mask>>i&1 != 0, aliased && a&1 == 0:
			unknown++
		case aliased:
			h.aliasCounts.put(key, a&^1)
			h.names--
		default:
			h.names--
			release(in, i)
		}
	}
	if mask != 0 {
		t.clearMask(r, w, mask)
	}
	return unknown
}

// evictBlocks makes w hold none of the blocks of r in mask. purgeAliases removes their aliases afterwards.
func (t *tier) evictBlocks(w kvblock.Worker, h *held, r run, mask uint64) {
	words, stored := t.arena.record(r), t.arena.storedOf(r)
	mask &= t.maskOf(r, w)
	h.blocks -= bits.OnesCount64(mask)
	h.names -= bits.OnesCount64(mask)
	for m := mask; m != 0 && stored != nil && len(h.copies)+h.aliasCounts.n > 0; m &= m - 1 {
		i := runHeader + bits.TrailingZeros64(m)
		if a, ok := h.aliasCounts.remove(kvblock.EngineHash(words[i])); ok && a&1 == 0 {
			h.names++ // it was not held by its own name
			continue
		}
		delete(h.copies, stored[i].Engine)
	}
	t.clearMask(r, w, mask)
}

// purgeAliases removes the aliases of blocks that w no longer holds.
func (t *tier) purgeAliases(h *held) {
	kept := aliasMap{seed: h.aliases.seed}
	h.aliases.each(func(n alias) {
		if _, ok := h.aliasCounts.get(kvblock.EngineHash(n.block)); ok {
			kept.put(n.engine, n.block)
		} else {
			delete(h.copies, n.engine)
			h.names--
		}
	})
	h.aliases = kept
}

// aliasMap maps private engine hashes of one worker to the blocks they name: open addressing with linear probing, free
// of pointers. The zero value is empty.
type aliasMap struct {
	seed  uint64
	slots []alias
	n     int // entries, the zero hash included

	hasZero bool // an engine hash of 0 marks empty slots, so that one, if used, is kept here
	zero    kvblock.SequenceHash
}

type alias struct {
	engine kvblock.EngineHash
	block  kvblock.SequenceHash
}

// The table grows by 2/5 beyond a load of 4/5 and shrinks to half below 1/4: memory per entry matters more here than
// the last nanosecond.
const minNames = 16

// home is where the search for e starts. Not a power of two, so that the table can grow by less than double.
func (t *aliasMap) home(e kvblock.EngineHash) int {
	hi, _ := bits.Mul64(mix(uint64(e), t.seed), uint64(len(t.slots)))
	return int(hi)
}

func (t *aliasMap) next(i int) int {
	if i++; i == len(t.slots) {
		return 0
	}
	return i
}

// get returns the block that e names.
func (t *aliasMap) get(e kvblock.EngineHash) (kvblock.SequenceHash, bool) {
	if t.n == 0 {
		return 0, false
	}
	if e == 0 {
		return t.zero, t.hasZero
	}
	if len(t.slots) == 0 {
		return 0, false
	}
	for i := t.home(e); t.slots[i].engine != 0; i = t.next(i) {
		if t.slots[i].engine == e {
			return t.slots[i].block, true
		}
	}
	return 0, false
}

// has reports whether e names a block.
func (t *aliasMap) has(e kvblock.EngineHash) bool {
	if t.n == 0 {
		return false
	}
	_, ok := t.get(e)
	return ok
}

// put makes e name block, and returns the block it named before.
func (t *aliasMap) put(e kvblock.EngineHash, block kvblock.SequenceHash) (old kvblock.SequenceHash, named bool) {
	if e == 0 {
		old, named = t.zero, t.hasZero
		t.zero, t.hasZero = block, true
		if !named {
			t.n++
		}
		return old, named
	}
	if (t.n+1)*5 > len(t.slots)*4 {
		t.resize(max(minNames, len(t.slots)*7/5))
	}
	i := t.home(e)
	for t.slots[i].engine != 0 {
		if t.slots[i].engine == e {
			old, t.slots[i].block = t.slots[i].block, block
			return old, true
		}
		i = t.next(i)
	}
	t.slots[i] = alias{e, block}
	t.n++
	return 0, false
}

// remove forgets e, and returns the block it named.
func (t *aliasMap) remove(e kvblock.EngineHash) (block kvblock.SequenceHash, named bool) {
	if t.n == 0 {
		return 0, false
	}
	if e == 0 {
		block, named = t.zero, t.hasZero
		t.zero, t.hasZero = 0, false
		if named {
			t.n--
		}
		return block, named
	}
	if len(t.slots) == 0 {
		return 0, false
	}
	i := t.home(e)
	for t.slots[i].engine != e {
		if t.slots[i].engine == 0 {
			return 0, false
		}
		i = t.next(i)
	}
	block = t.slots[i].block
	t.n--
	// Close the gap: an entry behind it moves up unless its home lies behind the gap.
	for j := t.next(i); t.slots[j].engine != 0; j = t.next(j) {
		home := t.home(t.slots[j].engine)
		if i <= j && (home <= i || home > j) || i > j && home <= i && home > j {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = alias{}
	if len(t.slots) > minNames && t.n*4 < len(t.slots) {
		t.resize(max(minNames, len(t.slots)/2))
	}
	return block, true
}

// each calls f with every entry. f must not change t.
func (t *aliasMap) each(f func(alias)) {
	for _, e := range t.slots {
		if e.engine != 0 {
			f(e)
		}
	}
	if t.hasZero {
		f(alias{0, t.zero})
	}
}

func (t *aliasMap) resize(size int) {
	old := t.slots
	t.slots = make([]alias, size)
	for _, e := range old {
		if e.engine == 0 {
			continue
		}
		i := t.home(e.engine)
		for t.slots[i].engine != 0 {
			i = t.next(i)
		}
		t.slots[i] = e
	}
}

// bytes returns the memory of the slots.
func (t *aliasMap) bytes() int { return 16 * len(t.slots) }
