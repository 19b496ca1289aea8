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
// Full attention's blocks are the smallest, so a position here is a number of those blocks.
//
// Source: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator.find_longest_cache_hit), vLLM 0.32 and 0.33.

// Hybrid describes the classes of a worker.
type Hybrid struct {
	Classes   kvblock.Classes // class i has tier kvblock.ClassTier(i)
	BlockSize int             // of full attention, in tokens; the classes' are multiples of it
	Chunk     int             // of classes of kind ClassChunk, in tokens; 0: not known
	// Incomplete says that the index does not have all blocks of the classes. Full attention's blocks then count, which
	// are an upper bound.
	Incomplete bool
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

// SetHybrid sets the classes of w. nil: its model has full attention alone. h must not change afterwards. Clearing a
// worker keeps them; Forget removes them.
func (x *Index) SetHybrid(w kvblock.Worker, h *Hybrid) {
	if w >= maxWorkers {
		return
	}
	x.workersMu.Lock()
	defer x.workersMu.Unlock()
	var all []*Hybrid
	if old := x.hybrids.Load(); old != nil {
		all = *old
	}
	if int(w) >= len(all) && h == nil {
		return
	}
	next := make([]*Hybrid, max(len(all), int(w)+1))
	copy(next, all)
	next[w] = h
	for _, h := range next {
		if h != nil {
			x.hybrids.Store(&next)
			return
		}
	}
	x.hybrids.Store(nil)
}

// applyClasses replaces the counts of workers of hybrid models by what they can reuse.
func (x *Index) applyClasses(hybrids []*Hybrid, chain []kvblock.SequenceHash, tokens int, s *OverlapScores) {
	for o := range s.Overlaps() {
		if int(o.Worker) >= len(hybrids) || hybrids[o.Worker] == nil || o.Blocks == 0 {
			continue
		}
		h := hybrids[o.Worker]
		c := workerCut{worker: o.Worker, count: o.Blocks}
		if h.Incomplete || !h.chunkKnown() || s.Extension(o.Worker).Total() > 0 {
			c.UpperBound = true
		} else {
			c.count, c.Cut = x.reusable(chain, s, o, h, tokens)
			// Predictions are of full attention alone, and their blocks count as held.
			c.count = max(c.count, min(s.predicted.blocks(o.Worker), o.Blocks))
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

// chunkKnown reports whether the chunk is known if the model has one.
func (h *Hybrid) chunkKnown() bool {
	for _, c := range h.Classes {
		if c.Kind == kvblock.ClassChunk && (h.Chunk < 1 || h.Chunk%int(c.BlockSize) != 0) {
			return false
		}
	}
	return true
}

// align returns the LCM of the block sizes in blocks of full attention.
func (h *Hybrid) align() int {
	align := 1
	for _, c := range h.Classes[:h.Classes.Len()] {
		n := max(int(c.BlockSize)/h.BlockSize, 1)
		a, b := align, n
		for b > 0 {
			a, b = b, a%b
		}
		align *= n / a
	}
	return align
}

// reusable returns how many of the leading blocks in o the engine can reuse of a prompt with this many tokens, and what
// its classes cut.
func (x *Index) reusable(
	chain []kvblock.SequenceHash,
	scores *OverlapScores,
	o Overlap,
	h *Hybrid,
	tokens int,
) (n int, cut Cut) {
	align, classes := h.align(), h.Classes[:h.Classes.Len()]
	n = min(o.Blocks, len(chain), max(tokens-1, 0)/h.BlockSize) / align * align
	whole, most := n, 0
	for settled := 0; n > 0 && settled < len(classes); {
		for i, c := range classes {
			q := classQuery{x: x, chain: chain, scores: scores, w: o.Worker, class: i,
				step: max(int(c.BlockSize)/h.BlockSize, 1)}
			fits := q.accept(n, c, h.Chunk) / align * align
			if fits == n {
				if settled++; settled == len(classes) {
					break
				}
				continue
			}
			if n-fits > most {
				most, cut.Kind = n-fits, c.Kind
			}
			n, settled = fits, 0
			if n == 0 {
				break
			}
		}
	}
	cut.Blocks = whole - n
	return n, cut
}

// classQuery is the lookup of one worker's blocks in one class.
type classQuery struct {
	x      *Index
	chain  []kvblock.SequenceHash
	scores *OverlapScores
	w      kvblock.Worker
	class  int
	step   int // block size of the class, in blocks of full attention
}

// accept returns n if the class accepts a prefix of n blocks, else the end of the longest prefix that may be
// acceptable. n is a multiple of q.step.
func (q *classQuery) accept(n int, c kvblock.Class, chunk int) int {
	first := 0 // the class needs the blocks from here to n
	switch c.Kind {
	case kvblock.ClassState:
		first = n - q.step
	case kvblock.ClassWindow:
		need := (int(c.Window) - 1 + int(c.BlockSize) - 1) / int(c.BlockSize)
		first = max(n-need*q.step, 0)
	case kvblock.ClassChunk:
		perChunk := chunk / int(c.BlockSize) * q.step
		first = n / perChunk * perChunk
	}
	for end := n; end > first; end -= q.step {
		if !q.held(end) {
			return end - q.step // a longer prefix needs this block as well
		}
	}
	return n
}

// held reports whether the worker holds the block of the class that ends behind end blocks.
func (q *classQuery) held(end int) bool {
	return q.scores.classes.word(q, (end-1)/64)>>((end-1)%64)&1 != 0
}

// classScores caches which workers hold which blocks of the classes, for one prompt. A word of positions is read when
// it is first needed.
type classScores struct {
	words  int              // for each class and worker
	loaded []uint64         // a bit for each word of positions that was read, MaxClasses x words bits
	slots  []int32          // by worker number: 1 + index of its words in held; 0: none
	owners []kvblock.Worker // workers with a slot
	held   []uint64         // MaxClasses x words for each slot
	masks  []classMask      // scratch
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
	c.owners, c.words = c.owners[:0], 0
}

// begin prepares c for a prompt.
func (c *classScores) begin(blocks int) {
	c.words = (blocks + 63) / 64
	n := (kvblock.MaxClasses*c.words + 63) / 64
	c.loaded = grow(c.loaded[:0], n)
	clear(c.loaded)
	c.held = c.held[:0]
}

// of returns the words of w.
func (c *classScores) of(w kvblock.Worker) []uint64 {
	if more := int(w) + 1 - len(c.slots); more > 0 {
		c.slots = append(c.slots, make([]int32, more)...)
	}
	size := kvblock.MaxClasses * c.words
	if c.slots[w] == 0 {
		c.owners = append(c.owners, w)
		c.slots[w] = int32(len(c.owners))
		from := len(c.held)
		c.held = grow(c.held, from+size)
		clear(c.held[from:])
	}
	at := int(c.slots[w]-1) * size
	return c.held[at : at+size]
}

// word returns which of the 64 blocks from block 64 * j on q's worker holds in q's class.
func (c *classScores) word(q *classQuery, j int) uint64 {
	if c.words == 0 {
		c.begin(len(q.chain))
	}
	at := q.class*c.words + j
	if c.loaded[at/64]>>(at%64)&1 == 0 {
		c.loaded[at/64] |= 1 << (at % 64)
		t := &q.x.tiers[kvblock.ClassTier(q.class)]
		if t.nonEmpty.Load() {
			c.load(t, q.chain, at, j, q.scores)
		}
	}
	if int(q.w) >= len(c.slots) || c.slots[q.w] == 0 {
		return 0
	}
	return c.of(q.w)[at]
}

// load reads which workers hold the 64 blocks from block 64 * j on in t, into word at of the workers' words. It leaves
// out workers that do not hold the prompt's first block on their device.
func (c *classScores) load(t *tier, chain []kvblock.SequenceHash, at, j int, s *OverlapScores) {
	retries, locked := maxRetries, false
	for i := min(64*j+63, len(chain)-1); i >= 64*j; {
		block, ok := t.bySeq.find(&t.arena, chain[i])
		if !ok {
			i--
			continue
		}
		before, ok := t.holdersUpTo(block, chain[i], &c.masks)
		if !ok {
			if retries--; retries == 0 && !locked {
				t.mu.Lock() // excludes writers
				locked = true
			}
			continue
		}
		for _, m := range c.masks {
			if !s.device.has(m.worker) {
				continue
			}
			// Bit before of the mask is block i, which is bit i - 64 * j of the word.
			if shift := i - 64*j - before; shift >= 0 {
				c.of(m.worker)[at] |= m.mask << shift
			} else {
				c.of(m.worker)[at] |= m.mask >> -shift
			}
		}
		i -= before + 1
	}
	if locked {
		t.mu.Unlock()
	}
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
