package indexer

import (
	"slices"

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
// Source: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator.find_longest_cache_hit, and
// UnitaryKVCacheCoordinator's), vLLM 0.32 and 0.33.

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

// hybridTable has the classes of all workers of hybrid models. It is immutable.
type hybridTable struct {
	workers []*hybrid       // by number; nil: full attention alone
	words   [][]hybridGroup // by number / 64: the workers by their classes
}

// hybridGroup are workers with the same classes, a bit each.
type hybridGroup struct {
	h       *hybrid
	members uint64
}

// SetHybrid sets the classes of w. nil: its model has full attention alone. Clearing a worker keeps
// them; Forget removes them.
func (x *Index) SetHybrid(w kvblock.Worker, h *Hybrid) {
	if w >= maxWorkers {
		return
	}
	x.workersMu.Lock()
	defer x.workersMu.Unlock()
	old := x.hybrids.Load()
	if old == nil {
		old = new(hybridTable)
	}
	if int(w) >= len(old.workers) && h == nil {
		return
	}
	next := hybridTable{workers: make([]*hybrid, max(len(old.workers), int(w)+1))}
	copy(next.workers, old.workers)
	next.workers[w] = nil
	if h != nil {
		at := slices.IndexFunc(old.workers, func(o *hybrid) bool { return o != nil && o.Hybrid == *h })
		if at >= 0 {
			next.workers[w] = old.workers[at] // equal Hybrids are one, so that a lookup takes their workers together
		} else {
			next.workers[w] = newHybrid(h)
		}
	}
	if next.group(old, int(w/64)) {
		x.hybrids.Store(&next)
	} else {
		x.hybrids.Store(nil)
	}
}

// group sets the table's words. Only one, changed, differs from those of old. It reports whether there are hybrids.
func (t *hybridTable) group(old *hybridTable, changed int) bool {
	t.words = make([][]hybridGroup, (len(t.workers)+63)/64)
	copy(t.words, old.words)
	t.words[changed] = nil
	for b, h := range t.workers[64*changed : min(64*changed+64, len(t.workers))] {
		if h == nil {
			continue
		}
		word := t.words[changed]
		at := slices.IndexFunc(word, func(g hybridGroup) bool { return g.h == h })
		if at < 0 {
			at = len(word)
			t.words[changed] = append(word, hybridGroup{h: h})
		}
		t.words[changed][at].members |= 1 << b
	}
	return slices.ContainsFunc(t.words, func(word []hybridGroup) bool { return len(word) > 0 })
}
