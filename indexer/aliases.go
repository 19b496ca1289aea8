package indexer

import (
	"math/bits"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// An engine hash has a meaning for one worker only, but most engines derive it from the block's contents, so workers
// agree. Therefore each block has one own name: the engine hash of its first store, which tier.names finds. A worker
// that uses another engine hash for the block has an alias. A worker holds a block by its own name only if the worker
// stored it by that name.
//
// Invariants while tier.mu is free:
//   - An engine hash of a worker is an alias or a block's own name, never both.
//   - An engine hash is the own name of at most one block. If two blocks come with the same engine hash, the second
//     block has no own name.
//   - A block's own name is never 0.

// held is what one worker holds in one tier. It is guarded by worker.mu and, where the tier's blocks change as well,
// tier.mu.
type held struct {
	names   int                                         // engine hashes held: own names and aliases
	blocks  int                                         // blocks held
	aliases map[kvblock.EngineHash]kvblock.SequenceHash // the block of each alias; nil if there is none
	// for blocks with aliases: 2 x the number of aliases, plus 1 if the worker has the own name too; nil if there is
	// none
	aliasCounts map[kvblock.SequenceHash]uint32
	copies      map[kvblock.EngineHash]int // additional physical copies, for engine hashes stored more than once
}

// storeOptions has the options of one store.
type storeOptions struct {
	load       bool // the store is part of a dump: blocks that are held already get no additional copy
	prefetched int  // number of leading engine hashes that prefetchBatch has prefetched
}

// storeAgain records another store, by its own name, of a block that the worker holds. It returns the number of copies
// added.
func (h *held) storeAgain(seq kvblock.SequenceHash, e kvblock.EngineHash, o storeOptions) (repeats int) {
	if a, ok := h.aliasCounts[seq]; ok && a&1 == 0 { // held by aliases only
		h.aliasCounts[seq] = a | 1
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

// takeCopy removes one copy of the block that e names, and reports whether there was more than one.
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

// addAlias notes that e names a block, which has this count from now on.
func (h *held) addAlias(e kvblock.EngineHash, seq kvblock.SequenceHash, count uint32) {
	if h.aliases == nil {
		h.aliases, h.aliasCounts = map[kvblock.EngineHash]kvblock.SequenceHash{}, map[kvblock.SequenceHash]uint32{}
	}
	h.aliases[e], h.aliasCounts[seq] = seq, count
}

// dropCount removes the count of a block whose last alias is gone, and releases the maps if they are empty.
func (h *held) dropCount(seq kvblock.SequenceHash) {
	delete(h.aliasCounts, seq)
	if len(h.aliases)+len(h.aliasCounts) == 0 {
		h.aliases, h.aliasCounts = nil, nil
	}
}

// byOwnName reports whether the worker holds this block by its own name. The worker must hold the block.
func (h *held) byOwnName(seq kvblock.SequenceHash) bool {
	a, ok := h.aliasCounts[seq]
	return !ok || a&1 != 0
}

// findNamed sets s to the position of the block that e names for worker w, and reports whether there is one.
func (t *tier) findNamed(w kvblock.Worker, h *held, e kvblock.EngineHash, s *position) bool {
	if h.names == 0 {
		return false
	}
	if seq, ok := h.aliases[e]; ok {
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

// store makes w a holder of consecutive blocks, the first at p. It returns the number of blocks stored, which is less
// than all if the arena is exhausted, and the number of copies added.
func (t *tier) store(
	w kvblock.Worker, h *held, p *insertPoint, blocks []kvblock.StoredBlock, o storeOptions,
) (n, repeats int) {
	var s position
	var next lookahead // of the blocks from i on
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
			next = lookahead{} // storeOne may have removed blocks
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

// storeUnnamed is store for a tier without engine hashes. seqs has the blocks' sequence hashes.
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

// storeOne makes w a holder of one block at p. The block's engine hash becomes an alias, or named another block until
// now. ok is false if the arena is exhausted.
func (t *tier) storeOne(
	w kvblock.Worker, h *held, p *insertPoint, b kvblock.StoredBlock, o storeOptions,
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
			t.indexBlock(p.at) // removeNames may move or remove it
		}
		rm := noRemoval
		t.removeNames(w, h, &rm, []kvblock.EngineHash{e})
		t.endRemoval(w, &rm)
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
		h.addAlias(e, seq, 2)
		t.latestOf = noWorker
		t.indexBlock(t.latest) // aliases find the block by its sequence hash
		return 0, true
	}
	if k, again := t.joinNamed(w, h, &s, blocks, o); k == 1 {
		return again, true
	}
	if s.hasName(e) {
		return 0, false // joinNamed failed: the arena is exhausted
	}
	count := uint32(2)
	if mask := t.maskIn(s.words, w); mask>>s.i&1 != 0 {
		if a, ok := h.aliasCounts[seq]; ok {
			count += a
		} else {
			count++
		}
	} else {
		if _, ok := t.setMask(s.run, s.words, w, 0, 1<<s.i); !ok {
			return 0, false
		}
		h.blocks++
	}
	h.addAlias(e, seq, count)
	h.names++
	t.indexBlock(s.at)
	t.latest, t.latestOf = s.at, noWorker
	return 0, true
}

// removal collects blocks that a worker loses, while they are in one run. Engines remove a prompt's blocks from the end
// back, often in an event each, and changing a run once for all of them takes less time. Begin with noRemoval.
type removal struct {
	run  run    // of the blocks in mask
	mask uint64 // blocks that are to lose the worker

	in    run // run and place of the latest block found
	i     int
	holds uint64 // the worker's mask of that run
}

var noRemoval = removal{in: noRun}

// release adds block i of run in to the blocks that w loses. w has no name for it any more.
func (t *tier) release(w kvblock.Worker, h *held, rm *removal, in run, i int) {
	if rm.mask != 0 && in != rm.run {
		t.clearMask(rm.run, w, rm.mask) // does not move blocks of other runs
		rm.mask = 0
	}
	rm.run, rm.mask = in, rm.mask|1<<i
	h.blocks--
}

// endRemoval removes w from the holders of the blocks in rm, which is empty afterwards. Until then nothing but
// removeNames may change the tier.
func (t *tier) endRemoval(w kvblock.Worker, rm *removal) {
	if rm.mask != 0 {
		t.clearMask(rm.run, w, rm.mask)
	}
	*rm = noRemoval
}

// removeNames removes these engine hashes from w. A block that w has no other name for loses w as a holder, at the
// latest when endRemoval is called. It returns the number of engine hashes that w did not have.
func (t *tier) removeNames(w kvblock.Worker, h *held, rm *removal, hashes []kvblock.EngineHash) (unknown int) {
	t.latestOf = noWorker
	if len(hashes) > maxPrefetchNames { // otherwise prefetchBatch has prefetched them
		near := t.addrs[:0]
		for _, e := range hashes[:min(len(hashes), len(t.addrs))] {
			near = append(near, t.names.slotAddr(t.names.mix(e)))
		}
		prefetch.Words(&near[0], len(near))
	}
	for _, e := range hashes {
		if len(h.copies) > 0 && h.takeCopy(e) {
			continue
		}
		if seq, ok := h.aliases[e]; ok {
			delete(h.aliases, e)
			h.names--
			a := h.aliasCounts[seq] - 2
			if a > 1 {
				h.aliasCounts[seq] = a
				continue
			}
			h.dropCount(seq)
			if at, ok := t.bySeq.find(&t.arena, seq); ok && a == 0 {
				in, i := t.runOf(at)
				t.release(w, h, rm, in, i)
				rm.in, rm.i = noRun, 0 // the run may be gone
			}
			continue
		}
		// removals often run from the last block back
		if rm.i > 0 && e != 0 && t.arena.nameAt(rm.in+ref(runHeader+rm.i-1)) == e {
			rm.i--
		} else {
			at, ok := t.names.find(&t.arena, e)
			if !ok {
				unknown++
				continue
			}
			was := rm.in
			if rm.in, rm.i = t.runOf(at); rm.in != was {
				rm.holds = t.maskOf(rm.in, w)
			}
		}
		var seq kvblock.SequenceHash
		a, aliased := uint32(0), false
		if len(h.aliasCounts) > 0 {
			seq = kvblock.SequenceHash(t.arena.record(rm.in)[runHeader+rm.i])
			a, aliased = h.aliasCounts[seq]
		}
		switch {
		case rm.holds>>rm.i&1 == 0, rm.in == rm.run && rm.mask>>rm.i&1 != 0, aliased && a&1 == 0:
			unknown++
		case aliased:
			h.aliasCounts[seq] = a &^ 1
			h.names--
		default:
			h.names--
			t.release(w, h, rm, rm.in, rm.i)
		}
	}
	return unknown
}

// evictBlocks removes w from the holders of the blocks of r in mask. The caller calls purgeAliases afterwards, to
// remove their aliases.
func (t *tier) evictBlocks(w kvblock.Worker, h *held, r run, mask uint64) {
	words, stored := t.arena.record(r), t.arena.storedOf(r)
	mask &= t.maskOf(r, w)
	h.blocks -= bits.OnesCount64(mask)
	h.names -= bits.OnesCount64(mask)
	for m := mask; m != 0 && stored != nil && len(h.copies)+len(h.aliasCounts) > 0; m &= m - 1 {
		i := runHeader + bits.TrailingZeros64(m)
		seq := kvblock.SequenceHash(words[i])
		a, ok := h.aliasCounts[seq]
		if h.dropCount(seq); ok && a&1 == 0 {
			h.names++ // w held it by aliases only, which purgeAliases subtracts
			continue
		}
		delete(h.copies, stored[i].Engine)
	}
	t.clearMask(r, w, mask)
}

// purgeAliases removes the aliases of blocks that w no longer holds.
func (t *tier) purgeAliases(h *held) {
	aliases, counts := h.aliases, h.aliasCounts
	h.aliases, h.aliasCounts = nil, nil // Go's maps do not shrink
	for engine, block := range aliases {
		if count, ok := counts[block]; ok {
			h.addAlias(engine, block, count)
		} else {
			delete(h.copies, engine)
			h.names--
		}
	}
}

// alias is an engine hash that a worker has for a block, besides the block's own name.
type alias struct {
	engine kvblock.EngineHash
	block  kvblock.SequenceHash
}
