package bpe

import (
	"hash/maphash"
	"sync"
	"unsafe"

	"kvepp/kvblock"
)

const (
	// minSegment is the shortest stretch of text that the cache keeps, in bytes.
	minSegment = 64
	// segmentShards is the number of shards, each with its own lock.
	segmentShards = 16
	// segmentCacheBytes bounds one model's segment cache, in bytes: a few thousand long messages.
	segmentCacheBytes = 64 << 20
	// segmentOverhead is the memory of an entry without its text and ids, in bytes: its place in a map.
	segmentOverhead = 128
	// packedBlocks is the number of blocks of the usual size in a generation.
	packedBlocks = 32
)

// segmentCache stores the ids of segments, the stretches of text between boundaries. The ids of a segment do not depend
// on the text around it, so the cache is exact. Each turn of a conversation repeats all earlier turns, so most of a
// prompt is a cache hit.
//
// Each shard keeps two generations. New entries go to the young one. When it holds half of the shard's bytes, it
// becomes the old one, and the memory of the former old one is reused. A hit in the old generation copies the entry to
// the young one. The cache copies texts and ids into its blocks, and ids out of them, so that they are no objects of
// their own for the garbage collector.
type segmentCache struct {
	seed   maphash.Seed
	budget int // bytes per generation and shard
	shards [segmentShards]segmentShard
}

type segmentShard struct {
	mu         sync.Mutex
	young, old generation // guarded by mu, with their contents
}

// generation maps the hash of a text to its segment, and owns the segments' memory.
type generation struct {
	segments map[uint64]segment
	texts    packed[byte]
	ids      packed[kvblock.Token]
}

// segment lies in the memory of its generation.
type segment struct {
	text []byte
	ids  []kvblock.Token
}

func newSegmentCache(bytes int) *segmentCache {
	return &segmentCache{seed: maphash.MakeSeed(), budget: bytes / (2 * segmentShards)}
}

// segmentKey is the shard and the hash of a text.
type segmentKey struct {
	shard *segmentShard
	hash  uint64
}

// get appends the ids of text if the cache has them and the budget has room for them. On a miss the caller passes the
// key to put.
func (c *segmentCache) get(
	out []kvblock.Token, text string, w *Budget,
) (ids []kvblock.Token, key segmentKey, known bool) {
	h := maphash.String(c.seed, text)
	shard := &c.shards[h%segmentShards]
	key = segmentKey{shard, h}
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if found, ok := shard.young.segments[h]; ok && string(found.text) == text {
		return w.addAll(out, found.ids), key, true
	}
	if found, ok := shard.old.segments[h]; ok && string(found.text) == text {
		before := len(out)
		if out = w.addAll(out, found.ids); w.err == nil {
			shard.add(h, text, out[before:], c.budget) // add may reuse found's memory
		}
		return out, key, true
	}
	return out, key, false
}

// put stores the ids of the text with this key. It copies both.
func (c *segmentCache) put(key segmentKey, text string, ids []kvblock.Token) {
	if len(text)+4*len(ids)+segmentOverhead > c.budget/2 {
		return
	}
	key.shard.mu.Lock()
	key.shard.add(key.hash, text, ids, c.budget)
	key.shard.mu.Unlock()
}

// add puts a segment into the young generation. The shard's lock must be held.
func (s *segmentShard) add(h uint64, text string, ids []kvblock.Token, budget int) {
	if s.young.add(h, text, ids, budget) {
		return
	}
	s.young, s.old = s.old, s.young
	s.young.reset()
	if !s.young.add(h, text, ids, budget) { // all of its blocks are too small
		s.young = generation{}
		s.young.add(h, text, ids, budget)
	}
}

// add puts a segment into the generation, unless that would take more than budget bytes.
func (g *generation) add(h uint64, text string, ids []kvblock.Token, budget int) bool {
	usual := budget / packedBlocks
	bytes := g.texts.size + g.texts.lacks(len(text), usual) + 4*(g.ids.size+g.ids.lacks(len(ids), usual/4))
	if bytes+segmentOverhead*(len(g.segments)+1) > budget {
		return false
	}
	if g.segments == nil {
		g.segments = map[uint64]segment{}
	}
	g.segments[h] = segment{
		text: g.texts.add(unsafe.Slice(unsafe.StringData(text), len(text)), usual), // the map only reads it
		ids:  g.ids.add(ids, usual/4),
	}
	return true
}

// reset removes all segments and keeps their memory.
func (g *generation) reset() {
	clear(g.segments)
	g.texts.reset()
	g.ids.reset()
}

// packed stores slices contiguously in blocks. A slice does not move until reset.
type packed[T any] struct {
	blocks [][]T
	last   int // index of the block that is being filled; those after it are empty
	size   int // capacity of all blocks
}

// lacks returns the size of the block that add must allocate for a slice of n; 0 if a block has room.
func (p *packed[T]) lacks(n, usual int) int {
	for ; p.last < len(p.blocks); p.last++ {
		if b := p.blocks[p.last]; cap(b)-len(b) >= n {
			return 0
		}
	}
	return max(n, usual)
}

// add copies a slice and returns the copy.
func (p *packed[T]) add(s []T, usual int) []T {
	if size := p.lacks(len(s), usual); size > 0 {
		p.blocks = append(p.blocks, make([]T, 0, size))
		p.size += size
	}
	b := &p.blocks[p.last]
	from := len(*b)
	*b = append(*b, s...)
	return (*b)[from:]
}

// reset empties the blocks.
func (p *packed[T]) reset() {
	for i := range p.blocks {
		p.blocks[i] = p.blocks[i][:0]
	}
	p.last = 0
}
