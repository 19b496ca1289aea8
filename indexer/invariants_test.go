//go:build invariants

package indexer

import "sync"

// blocksPerChange bounds the cost of the checks: a tier of n blocks is checked after every n/blocksPerChange changes.
const blocksPerChange = 64

func init() {
	var mu sync.Mutex
	changes := map[*tier]int{} // since the last check of each tier
	checkChange = func(t *tier) {
		mu.Lock()
		changes[t]++
		due := changes[t]*blocksPerChange >= t.blocks
		if due {
			delete(changes, t)
		}
		mu.Unlock()
		if !due {
			return
		}
		if err := t.check(); err != nil {
			panic("indexer: a tier is inconsistent: " + err.Error())
		}
	}
}
