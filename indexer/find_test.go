package indexer

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
)

// A lookup whose reads a writer spoils waits for the writer, and then starts again without its earlier results.
func TestLookupWaitsForWriter(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 40)
	for w := range kvblock.Worker(3) {
		mustStore(t, x, w, stores(1000, local, 0, 10+10*int(w)))
	}
	wantMatches(t, x, chain, map[kvblock.Worker]int{0: 10, 1: 20, 2: 30})
	tier := &x.tiers[kvblock.TierDevice]
	at, ok := tier.names.find(&tier.arena, 1015)
	if !ok {
		t.Fatal("the block is not there")
	}
	r, _ := tier.runOf(at)

	tier.mu.Lock()
	words := tier.arena.record(r)
	n := length(words[0])
	beginWrite(words)
	found := make(chan OverlapScores)
	go func() {
		var scores OverlapScores
		x.FindMatches(chain, &scores)
		found <- scores
	}()
	stacks := make([]byte, 1<<20)
	waits := func() bool {
		for _, one := range strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(one, "[sync.Mutex.Lock") && strings.Contains(one, "findMatches") {
				return true
			}
		}
		return false
	}
	for deadline := time.Now().Add(time.Minute); !waits(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the lookup does not wait")
		}
	}
	endWrite(words, n)
	tier.unlock()
	scores := <-found
	for w, want := range map[kvblock.Worker]int{0: 10, 1: 20, 2: 30} {
		if got := scores.Blocks(w); got != want {
			t.Errorf("worker %d holds %d blocks, want %d", w, got, want)
		}
	}
	if scores.device.has(3) {
		t.Error("the answer has a worker that holds no block")
	}
}
