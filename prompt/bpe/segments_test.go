package bpe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/kvblock"
)

// remember stores a text's ids like the encoder: after a miss.
func remember(c *segmentCache, text string, ids []kvblock.Token) {
	_, key, known := c.get(nil, text, new(Budget))
	if !known {
		c.put(key, text, ids)
	}
}

// kept returns the number of entries and the bytes that the cache has taken for them.
func (c *segmentCache) kept() (entries, bytes int) {
	for i := range c.shards {
		for _, g := range []*generation{&c.shards[i].young, &c.shards[i].old} {
			entries += len(g.segments)
			bytes += segmentOverhead * len(g.segments)
			for _, b := range g.texts.blocks {
				bytes += cap(b)
			}
			for _, b := range g.ids.blocks {
				bytes += 4 * cap(b)
			}
		}
	}
	return entries, bytes
}

func TestSegmentCacheBound(t *testing.T) {
	const budget = 1 << 20
	c := newSegmentCache(budget)
	ids := make([]kvblock.Token, 100)
	for i := range 20_000 {
		text := fmt.Sprintf("%0500d", i)
		remember(c, text, ids)
		if got, _, ok := c.get(nil, text, new(Budget)); !ok || len(got) != len(ids) {
			t.Fatalf("%d: %d ids, %v", i, len(got), ok)
		}
	}
	if entries, bytes := c.kept(); bytes > budget || entries < 500 {
		t.Errorf("%d segments, %d bytes; the budget is %d", entries, bytes, budget)
	}
	remember(c, strings.Repeat("x", budget), ids)
	if _, _, ok := c.get(nil, strings.Repeat("x", budget), new(Budget)); ok {
		t.Error("a text of the whole budget was kept")
	}
	if _, _, ok := c.get(nil, "never put", new(Budget)); ok {
		t.Error("found a text that was never put")
	}
}

// TestSegmentCacheKeepsWhatIsUsed looks one text up again and again while many others are added.
func TestSegmentCacheKeepsWhatIsUsed(t *testing.T) {
	c := newSegmentCache(1 << 20)
	remember(c, "wanted", []kvblock.Token{1, 2, 3})
	for i := range 20_000 {
		remember(c, fmt.Sprintf("%0500d", i), nil)
		if got, _, ok := c.get(nil, "wanted", new(Budget)); !ok || !slices.Equal(got, []kvblock.Token{1, 2, 3}) {
			t.Fatalf("%v after %d others", got, i)
		}
	}
}

// TestSegmentCacheHoldsWhatWasPut reuses the memory of a small cache many times, with segments of all sizes and from
// several goroutines. A hit must append exactly the ids that were put, and the bytes must stay within the budget.
func TestSegmentCacheHoldsWhatWasPut(t *testing.T) {
	const budget = 1 << 19
	c := newSegmentCache(budget)
	segment := func(n int) (string, []kvblock.Token) {
		random := rand.New(rand.NewPCG(uint64(n), 1))
		size := []int{100, 100, 100, 1000, 6000}[n%5]
		ids := make([]kvblock.Token, random.IntN(size))
		for i := range ids {
			ids[i] = kvblock.Token(random.Uint32())
		}
		return strings.Repeat(string(rune('a'+n%26)), random.IntN(size)) + fmt.Sprint(n), ids
	}
	var running sync.WaitGroup
	for g := range 4 {
		running.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 2))
			found := 0
			for range 10_000 {
				text, want := segment(int(random.ExpFloat64() * 100))
				got, key, known := c.get([]kvblock.Token{7}, text, new(Budget))
				switch {
				case known && (got[0] != 7 || !slices.Equal(got[1:], want)):
					t.Errorf("%.20q: got %d ids that are not the %d put", text, len(got)-1, len(want))
					return
				case known:
					found++
				default:
					c.put(key, text, want)
				}
			}
			if found < 100 {
				t.Errorf("only %d of 10,000 found", found)
			}
		})
	}
	running.Wait()
	if _, bytes := c.kept(); bytes > budget {
		t.Errorf("%d bytes; the budget is %d", bytes, budget)
	}
}

// TestSegmentCacheComparesTexts puts two texts under one hash.
func TestSegmentCacheComparesTexts(t *testing.T) {
	c := newSegmentCache(1 << 20)
	_, key, _ := c.get(nil, "first", new(Budget))
	c.put(key, "another text of the same hash", []kvblock.Token{1})
	if got, _, known := c.get(nil, "first", new(Budget)); known {
		t.Errorf("found %v, the ids of another text", got)
	}
}

// TestSegmentCacheOfLongTexts fills a cache with short segments, and then with segments larger than any block of the
// short ones.
func TestSegmentCacheOfLongTexts(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const budget = 1 << 20
	c := newSegmentCache(budget)
	for i := range 20_000 {
		size := 100
		if i >= 10_000 {
			size = budget / (2 * segmentShards) / 3
		}
		text := fmt.Sprintf("%0*d", size, i)
		remember(c, text, []kvblock.Token{kvblock.Token(i)})
		if got, _, ok := c.get(nil, text, new(Budget)); !ok || got[0] != kvblock.Token(i) {
			t.Fatalf("%d: %v, %v", i, got, ok)
		}
	}
	if _, bytes := c.kept(); bytes > budget {
		t.Errorf("%d bytes; the budget is %d", bytes, budget)
	}
}
