package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// A worker of a hybrid model holds blocks of full attention and blocks of other classes of layers (kvblock.Class). Each
// class has a tier of its own, kvblock.ClassTier. The engine reuses the longest prefix that each class accepts:
//
//	full attention   every block of the prefix is held
//	window           the blocks that overlap the last Window - 1 tokens of the prefix are held
//	chunk            the blocks since the last multiple of the chunk are held
//	state            the prefix's last block is held
//
// A prefix is a multiple of all block sizes, and shorter than the prompt, because the engine computes the last token.
//
// A class may have larger or smaller blocks than full attention. A larger block is indexed as the last block of full
// attention in it. A smaller one that ends where one of full attention's ends is indexed as that block, and one that
// ends inside as a block of its own behind the block before (kvblock.PartHash).
//
// An engine that drafts with EAGLE may drop the last cached block (kvblock.EAGLEDrop). The prefix is then one block
// shorter than what full attention holds, or what windows need ends one block behind the prefix.
//
// Source: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator.find_longest_cache_hit), vLLM 0.32 and 0.33.

// Hybrid describes the classes of a worker.
type Hybrid struct {
	Classes   kvblock.Classes // class i has tier kvblock.ClassTier(i)
	BlockSize int             // of full attention, in tokens; the classes' are multiples of it or whole parts
	Drop      kvblock.EAGLEDrop
	Chunk     int // of classes of kind ClassChunk, in tokens; 0: not known
	// Incomplete says that the index does not have all blocks of the classes. Full attention's blocks then count, which
	// are an upper bound.
	Incomplete bool
}

// hybrid is a Hybrid with what lookups derive from it.
type hybrid struct {
	Hybrid
	classes     int // their number
	align, unit int // LCM and GCD of all block sizes, in tokens
	parts       bool
	chunkKnown  bool // or there are no chunks
}

func newHybrid(h *Hybrid) *hybrid {
	x := &hybrid{Hybrid: *h, classes: h.Classes.Len(), align: h.BlockSize, unit: h.BlockSize, chunkKnown: true}
	for _, c := range h.Classes[:x.classes] {
		size := int(c.BlockSize)
		x.align *= size / gcd(x.align, size)
		x.unit = gcd(x.unit, size)
		x.parts = x.parts || size < h.BlockSize
		if c.Kind == kvblock.ClassChunk && (h.Chunk < 1 || h.Chunk%size != 0) {
			x.chunkKnown = false
		}
	}
	return x
}

func gcd(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// Cut is what the classes of a worker did to its count of leading blocks.
type Cut struct {
	// Held are the leading blocks that full attention holds on the device. They may be more than the count and Blocks,
	// because a prefix is a multiple of all block sizes and shorter than the prompt.
	Held int
	// Blocks are full attention's leading blocks that the engine cannot reuse, because classes have not kept what they
	// need at the end of this prefix.
	Blocks int
	Kind   kvblock.ClassKind // of the class that cut most; 0 if Blocks is 0
	// UpperBound says that full attention's blocks count, although the engine may reuse fewer. Its classes are not
	// known well enough, or lower tiers, which the classes do not have, extend the prefix.
	UpperBound bool
}

// workerCut is the Cut of one worker.
type workerCut struct {
	worker kvblock.Worker
	count  int // leading blocks that the engine can reuse
	Cut
}

// SetHybrid sets the classes of w. nil: its model has full attention alone. Clearing a worker keeps
// them; Forget removes them.
func (x *Index) SetHybrid(w kvblock.Worker, h *Hybrid) {
	if w >= maxWorkers {
		return
	}
	x.workersMu.Lock()
	defer x.workersMu.Unlock()
	var all []*hybrid
	if old := x.hybrids.Load(); old != nil {
		all = *old
	}
	if int(w) >= len(all) && h == nil {
		return
	}
	next := make([]*hybrid, max(len(all), int(w)+1))
	copy(next, all)
	next[w] = nil
	if h != nil {
		next[w] = newHybrid(h)
	}
	for _, h := range next {
		if h != nil {
			x.hybrids.Store(&next)
			return
		}
	}
	x.hybrids.Store(nil)
}

// applyClasses replaces the counts of workers of hybrid models by what they can reuse.
func (x *Index) applyClasses(hybrids []*hybrid, p *Prompt, s *OverlapScores) {
	for o := range s.Overlaps() {
		if int(o.Worker) >= len(hybrids) || hybrids[o.Worker] == nil || o.Blocks == 0 {
			continue
		}
		c := workerCut{worker: o.Worker, count: o.Blocks}
		q := classQuery{x: x, p: p, scores: s, w: o.Worker, h: hybrids[o.Worker]}
		if !q.known() || s.Extension(o.Worker).Total() > 0 {
			c.UpperBound = true
		} else {
			c.count, c.Cut = q.reusable(o.Blocks)
			// Predictions are of full attention alone, and their blocks count as held.
			c.count = max(c.count, q.longest(min(s.predicted.blocks(o.Worker), o.Blocks)))
		}
		c.Held = o.Blocks
		s.cuts = append(s.cuts, c)
	}
	for _, c := range s.cuts {
		if c.count != s.device.depth(int(c.worker)) {
			s.device.record(c.worker, c.count)
		}
	}
}

// classQuery is the lookup of a prompt for one worker of a hybrid model. Lengths and positions are in tokens.
type classQuery struct {
	x      *Index
	p      *Prompt
	scores *OverlapScores
	w      kvblock.Worker
	h      *hybrid
}

// known reports whether all that the classes need is known.
func (q *classQuery) known() bool {
	return !q.h.Incomplete && q.h.chunkKnown && (!q.h.parts || q.p.IDs != nil)
}

// longest returns the number of blocks of the longest prefix that full attention accepts, if it holds this many.
func (q *classQuery) longest(blocks int) int {
	blocks = min(blocks, len(q.p.Chain))
	if q.h.Drop&kvblock.EAGLEDropFull != 0 {
		blocks = max(min(blocks, q.limit()/q.h.BlockSize)-1, 0)
	}
	blocks = min(blocks, max(q.p.Tokens-1, 0)/q.h.BlockSize)
	if align := q.h.align / q.h.BlockSize; align > 1 {
		blocks -= blocks % align
	}
	return blocks
}

// limit returns where the block that EAGLE drops may end at most.
func (q *classQuery) limit() int {
	if q.h.classes == 0 {
		return max(q.p.Tokens-1, 0)
	}
	return q.p.Tokens / q.h.unit * q.h.unit
}

// reusable returns how many blocks the engine can reuse, and what the classes cut. held is the number of leading blocks
// that full attention holds.
func (q *classQuery) reusable(held int) (blocks int, cut Cut) {
	classes, align := q.h.Classes[:q.h.classes], q.h.align
	whole := q.longest(held)
	n, most := whole*q.h.BlockSize, 0
	for settled := 0; n > 0 && settled < len(classes); {
		for i := range classes {
			fits := q.accept(n, i)
			if fits == n {
				if settled++; settled == len(classes) {
					break
				}
				continue
			}
			if fits = fits / align * align; n-fits > most {
				most, cut.Kind = n-fits, classes[i].Kind
			}
			n, settled = fits, 0
			if n == 0 {
				break
			}
		}
	}
	blocks = n / q.h.BlockSize
	cut.Blocks = whole - blocks
	return blocks, cut
}

// accept returns n if class i accepts a prefix of n tokens, else a bound for the longest prefix that it may accept.
func (q *classQuery) accept(n, i int) int {
	c := &q.h.Classes[i]
	size := int(c.BlockSize)
	first, end := 0, n // the class needs the blocks that end behind first, up to end
	switch c.Kind {
	case kvblock.ClassState:
		first = n - size
	case kvblock.ClassWindow:
		first = max(n-(int(c.Window)-1+size-1)/size*size, 0)
		if q.h.Drop&kvblock.EAGLEDropWindows != 0 {
			if end += size; end > q.limit() {
				return max(q.limit()-size, 0)
			}
		}
	case kvblock.ClassChunk:
		first = n / q.h.Chunk * q.h.Chunk
	}
	missing := q.lastMissing(i, size, first, end)
	if missing == 0 {
		return n
	}
	// A longer prefix needs the missing block as well. The last block that a prefix needs must be held, unless the
	// prefix ends with a chunk and needs none.
	bound := missing - size
	held := q.lastHeld(i, size, bound, end-n)
	if c.Kind == kvblock.ClassChunk {
		held = max(held, bound/q.h.Chunk*q.h.Chunk)
	}
	return min(max(held-(end-n), 0), n-1)
}

// lastHeld returns the end of the last block of class i that ends at most at end, as far behind a block of full
// attention as past, and that the worker holds; 0: none.
func (q *classQuery) lastHeld(i, size, end, past int) int {
	of, scores := q.h.BlockSize, &q.scores.classes
	if size > of {
		for ; end > 0 && q.lastMissing(i, size, end-size, end) > 0; end -= size {
		}
		return max(end, 0)
	}
	part := past % of
	blocks := (end - part) / of
	if part == 0 {
		return scores.layer(q, i, 0).lastHeld(q, blocks) * of
	}
	at := scores.layer(q, i, part).lastHeld(q, blocks+1)
	if at == 0 {
		return 0
	}
	return (at-1)*of + part
}

// lastMissing returns the end of the last block of class i in (first, end] that the worker does not hold; 0: it holds
// all. Both are multiples of size, the class's block size.
func (q *classQuery) lastMissing(i, size, first, end int) int {
	of, scores := q.h.BlockSize, &q.scores.classes
	if size == of {
		missing := scores.layer(q, i, 0).lastMissing(q, first/of, end/of)
		return missing * of
	}
	for ; end > first; end -= size {
		l := scores.layer(q, i, end%of)
		at := (end - 1) / of // the block of full attention
		if l.lastMissing(q, at, at+1) > 0 {
			return end
		}
	}
	return 0
}

// classScores caches which workers hold which blocks of the classes, for one prompt.
type classScores struct {
	words  int              // for the prompt's blocks, and one more
	slots  []int32          // by worker number: 1 + its index in owners; 0: not there
	owners []kvblock.Worker // workers that hold a block
	layers []classLayer
	used   int         // layers of this prompt
	masks  []classMask // scratch
}

// classLayer has the blocks of one class that end this many tokens after the beginning of a block of full attention.
type classLayer struct {
	class  int
	part   int      // 0: at its end
	loaded []uint64 // a bit for each block of full attention: the index was asked
	held   []uint64 // classScores.words for each owner, as far as needed
}

// classMask is which blocks of a run one worker holds.
type classMask struct {
	worker kvblock.Worker
	mask   uint64
}

// reset forgets the previous prompt.
func (c *classScores) reset() {
	for _, w := range c.owners {
		c.slots[w] = 0
	}
	c.owners, c.words, c.used = c.owners[:0], 0, 0
}

// layer returns the layer of a class and part.
func (c *classScores) layer(q *classQuery, class, part int) *classLayer {
	for i := range c.layers[:c.used] {
		if l := &c.layers[i]; l.class == class && l.part == part {
			return l
		}
	}
	c.words = len(q.p.Chain)/64 + 1
	if c.used == len(c.layers) {
		c.layers = append(c.layers, classLayer{})
	}
	l := &c.layers[c.used]
	c.used++
	l.class, l.part = class, part
	l.loaded, l.held = grow(l.loaded[:0], c.words), l.held[:0]
	clear(l.loaded)
	return l
}

// lastMissing returns 1 + the last block in [first, end) that the worker does not hold; 0: it holds all.
func (l *classLayer) lastMissing(q *classQuery, first, end int) int {
	c := &q.scores.classes
	for end > first {
		j := (end - 1) / 64
		from := max(first, 64*j)
		want := ones(end-64*j) &^ ones(from-64*j)
		if want&^l.loaded[j] != 0 {
			l.load(q, j, want)
		}
		if missing := want &^ l.heldBy(c, q.w, j); missing != 0 {
			return 64*j + bits.Len64(missing)
		}
		end = from
	}
	return 0
}

// lastHeld returns 1 + the last block before end that the worker holds; 0: none.
func (l *classLayer) lastHeld(q *classQuery, end int) int {
	c := &q.scores.classes
	for end > 0 {
		j := (end - 1) / 64
		want := ones(end - 64*j)
		if want&^l.loaded[j] != 0 {
			l.load(q, j, want)
		}
		if have := l.heldBy(c, q.w, j) & want; have != 0 {
			return 64*j + bits.Len64(have)
		}
		end = 64 * j
	}
	return 0
}

// heldBy returns which of the 64 blocks from block 64 * j on w holds, as far as they are loaded.
func (l *classLayer) heldBy(c *classScores, w kvblock.Worker, j int) uint64 {
	if int(w) < len(c.slots) && c.slots[w] > 0 {
		if at := int(c.slots[w]-1)*c.words + j; at < len(l.held) {
			return l.held[at]
		}
	}
	return 0
}

// mark records that w holds these blocks of the 64 from block 64 * j on.
func (l *classLayer) mark(c *classScores, w kvblock.Worker, j int, mask uint64) {
	if more := int(w) + 1 - len(c.slots); more > 0 {
		c.slots = append(c.slots, make([]int32, more)...)
	}
	if c.slots[w] == 0 {
		c.owners = append(c.owners, w)
		c.slots[w] = int32(len(c.owners))
	}
	at := int(c.slots[w]-1)*c.words + j
	if from := len(l.held); at >= from {
		l.held = grow(l.held, (at/c.words+1)*c.words)
	}
	l.held[at] |= mask
}

// load asks the index who holds the blocks in want, of the 64 from block 64 * j on. It leaves out workers that do not
// hold the prompt's first block on their device.
func (l *classLayer) load(q *classQuery, j int, want uint64) {
	t := &q.x.tiers[kvblock.ClassTier(l.class)]
	if !t.nonEmpty.Load() {
		l.loaded[j] |= want
		return
	}
	c := &q.scores.classes
	retries, locked := maxRetries, false
	for want &^= l.loaded[j]; want != 0; {
		i := bits.Len64(want) - 1
		seq, known := l.hash(q, 64*j+i)
		at, found := ref(0), false
		if known {
			at, found = t.bySeq.find(&t.arena, seq)
		}
		read := uint64(1) << i // the blocks that this step asks for
		if found {
			before, ok := t.holdersUpTo(at, seq, &c.masks)
			if !ok {
				if retries--; retries == 0 && !locked {
					t.mu.Lock() // excludes writers
					locked = true
				}
				continue
			}
			if l.part == 0 { // the blocks before it in the run are the prompt's
				read = ones(i+1) &^ ones(max(i-before, 0))
			}
			for _, m := range c.masks {
				mask := m.mask // bit before is block i
				if i >= before {
					mask <<= i - before
				} else {
					mask >>= before - i
				}
				if mask &= read; mask != 0 && q.scores.device.has(m.worker) {
					l.mark(c, m.worker, j, mask)
				}
			}
		}
		l.loaded[j] |= read
		want &^= read
	}
	if locked {
		t.mu.Unlock()
	}
}

// hash returns the sequence hash of the layer's block in block i of the prompt; false if it cannot be known.
func (l *classLayer) hash(q *classQuery, i int) (kvblock.SequenceHash, bool) {
	if l.part == 0 {
		if i >= len(q.p.Chain) {
			return 0, false
		}
		return q.p.Chain[i], true
	}
	local, ok := kvblock.PartHash(q.p.IDs, q.p.Options, i, l.part)
	switch {
	case !ok || i > len(q.p.Chain):
		return 0, false
	case i == 0:
		return kvblock.FirstSequenceHash(local), true
	}
	return kvblock.NextSequenceHash(q.p.Chain[i-1], local), true
}

// holdersUpTo sets masks to the blocks that each worker holds in the run with the block seq at address at, up to that
// block. It returns the number of blocks in the run before it. It reports false if a writer interfered.
func (t *tier) holdersUpTo(at ref, seq kvblock.SequenceHash, masks *[]classMask) (before int, ok bool) {
	*masks = (*masks)[:0]
	words, first := t.arena.runAround(at)
	if words == nil {
		return 0, false
	}
	version := atomic.LoadUint64(&words[0])
	n := length(version)
	if version>>32&1 != 0 || first < 0 || first >= n || runHeader+n > len(words) ||
		atomic.LoadUint64(&words[runHeader+first]) != uint64(seq) {
		return 0, false
	}
	part := ones(first + 1)
	who := atomic.LoadUint64(&words[1])
	if who&manyHolders == 0 {
		if w := kvblock.Worker(who); w < maxWorkers {
			*masks = append(*masks, classMask{w, atomic.LoadUint64(&words[2]) & part})
		}
	} else {
		record := t.arena.record(ref(who))
		if !eachHolder(record, func(w kvblock.Worker, mask uint64) {
			if w < maxWorkers { // else the read is torn
				*masks = append(*masks, classMask{w, mask & part})
			}
		}) {
			return 0, false
		}
	}
	return first, atomic.LoadUint64(&words[0]) == version
}

// eachHolder calls f with each worker of a holders' record and the mask of the run's blocks that it holds. It reports
// false if the record is torn by a writer.
func eachHolder(record []uint64, f func(w kvblock.Worker, mask uint64)) bool {
	bitset, groups, list := holderParts(record)
	if bitset == nil {
		return false
	}
	for j := range bitset {
		for word := atomic.LoadUint64(&bitset[j]); word != 0; word &= word - 1 {
			f(kvblock.Worker(64*j+bits.TrailingZeros64(word)), ones(maxRun))
		}
	}
	for g := 0; g < len(groups); g += groupWords {
		first := kvblock.Worker(64 * atomic.LoadUint64(&groups[g]))
		for members := atomic.LoadUint64(&groups[g+1]); members != 0; members &= members - 1 {
			at := bits.TrailingZeros64(members)
			lead := uint8(atomic.LoadUint64(&groups[g+2+at/8]) >> (at % 8 * 8))
			f(first+kvblock.Worker(at), ones(min(int(lead), maxRun)))
		}
	}
	for j := 0; j < len(list); j += 2 {
		f(kvblock.Worker(atomic.LoadUint64(&list[j])), atomic.LoadUint64(&list[j+1]))
	}
	return true
}
