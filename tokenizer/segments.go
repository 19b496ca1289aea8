package tokenizer

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync"

	"kvepp/kvblock"
)

const (
	// minSegment is the shortest stretch of text that is worth remembering, in bytes.
	minSegment = 64
	// segmentShards spreads the cache's locks.
	segmentShards = 16
	// segmentCacheBytes is how much one model's segment cache may hold: a few thousand long messages.
	segmentCacheBytes = 64 << 20
	// segmentOverhead is what an entry takes beside its text and ids.
	segmentOverhead = 128
)

// segmentCache remembers the ids of stretches of text between added tokens. Such a stretch is encoded without regard to
// what is around it, so the memory is exact; and since each turn of a conversation repeats all turns before it, nearly
// all of a prompt is found here.
//
// Each shard keeps two generations: entries are added to the young one; when that holds half of the shard's bytes, it
// becomes the old one and the old one is dropped. An entry found in the old generation moves to the young.
type segmentCache struct {
	seed   maphash.Seed
	budget int // bytes per generation and shard
	shards [segmentShards]segmentShard
}

type segmentShard struct {
	mu         sync.Mutex
	young, old map[uint64]segment // by the text's hash; guarded by mu
	youngBytes int                // guarded by mu
}

// segment is immutable once stored.
type segment struct {
	text string
	ids  []kvblock.Token
}

func (s segment) size() int { return len(s.text) + 4*len(s.ids) + segmentOverhead }

func newSegmentCache(bytes int) *segmentCache {
	return &segmentCache{seed: maphash.MakeSeed(), budget: bytes / (2 * segmentShards)}
}

// segmentKey is where a text belongs.
type segmentKey struct {
	shard *segmentShard
	hash  uint64
}

// get appends the ids of text, if they are known. The key is for put, if they are not.
func (c *segmentCache) get(out []kvblock.Token, text string) (ids []kvblock.Token, key segmentKey, known bool) {
	h := maphash.String(c.seed, text)
	shard := &c.shards[h%segmentShards]
	key = segmentKey{shard, h}
	shard.mu.Lock()
	found, ok := shard.young[h]
	if !ok {
		if found, ok = shard.old[h]; ok && found.text == text {
			shard.add(h, found, c.budget)
		}
	}
	shard.mu.Unlock()
	if !ok || found.text != text {
		return out, key, false
	}
	return append(out, found.ids...), key, true
}

// put remembers the ids of the text whose key is given. It copies both.
func (c *segmentCache) put(key segmentKey, text string, ids []kvblock.Token) {
	s := segment{text: text, ids: ids}
	if s.size() > c.budget/2 {
		return
	}
	s = segment{text: strings.Clone(text), ids: slices.Clone(ids)}
	key.shard.mu.Lock()
	key.shard.add(key.hash, s, c.budget)
	key.shard.mu.Unlock()
}

// add puts a segment into the young generation. The shard's lock must be held.
func (s *segmentShard) add(h uint64, entry segment, budget int) {
	if before, ok := s.young[h]; ok {
		s.youngBytes -= before.size()
	} else if s.young == nil || s.youngBytes+entry.size() > budget {
		s.old, s.young, s.youngBytes = s.young, map[uint64]segment{}, 0
	}
	s.young[h] = entry
	s.youngBytes += entry.size()
}
