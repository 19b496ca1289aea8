package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// Eviction: while the bytes in use exceed the bound, the worker that takes most memory loses the deepest quarter of its
// blocks. The depth of a block is the number of blocks before it in its prompt.
//
// Evicting the deepest blocks first evicts leaves first, so no block stays behind an evicted one. It also keeps the
// beginnings of all prompts, which distinguish workers best. An evicted block does not count as held, so overlaps are
// lower bounds from then on. LRU eviction would need a time in every block, which lookups would have to write.
//
// Evicting a quarter of one worker's blocks takes two passes over all runs.

// evictIfFull evicts until the index is below its bound. The caller holds no lock.
func (x *Index) evictIfFull() {
	if !x.full() {
		if x.atBound.Load() && x.used() < x.maxBytes/2 {
			x.atBound.Store(false)
		}
		return
	}
	x.evicting.Lock() // other writers that find the index full wait here, so that it does not grow further
	defer x.evicting.Unlock()
	for x.full() {
		w, wk := x.largest()
		if wk == nil {
			return // no worker has memory that eviction could free
		}
		x.atBound.Store(true)
		wk.mu.Lock()
		if !wk.forgotten {
			x.evict(w, wk)
		}
		x.unlockWorker(wk)
	}
}

// slack is the number of bytes allowed for nearly empty pages, over all tiers and classes of records.
const slack = 4 << 20

// full reports whether the bytes in use exceed the bound, or whether these and the free space in pages exceed the bound
// by a quarter and slack.
func (x *Index) full() bool {
	used := x.used()
	if used > x.maxBytes {
		return true
	}
	spare := int64(0)
	for i := range x.tiers[:x.usedTiers.Load()] {
		spare += x.tiers[i].spareBytes.Load()
	}
	return used+spare > x.maxBytes+x.maxBytes/4+slack
}

// AtBound reports whether blocks were evicted because of the memory bound, and the index has not been below half its
// bound since. Overlaps are then lower bounds.
func (x *Index) AtBound() bool { return x.atBound.Load() }

// nameBytes estimates the bytes of a block that one worker holds by its own name.
const nameBytes = 40

// largest returns the worker whose entries and orphans take most memory; nil if none takes any.
func (x *Index) largest() (kvblock.Worker, *worker) {
	var of kvblock.Worker
	var most *worker
	size := int64(0)
	for w, wk := range *x.workers.Load() {
		if wk == nil {
			continue
		}
		wk.mu.Lock()
		s := int64(wk.bytes + nameBytes*wk.entries())
		wk.mu.Unlock()
		if s > size {
			of, most, size = kvblock.Worker(w), wk, s
		}
	}
	return of, most
}

// evict removes the deepest quarter of the blocks of w, and all its orphans. Other writers of a tier wait while evict
// scans its runs.
func (x *Index) evict(w kvblock.Worker, wk *worker) {
	waiting := uint64(wk.orphans.count)
	wk.orphans = orphans{}
	x.parentNotFound.Add(waiting)

	var depths []int // number of blocks by depth
	total := 0
	for i := range wk.held {
		x.tiers[i].eachHeld(w, &wk.held[i], func(r run, mask uint64, depth int) {
			for ; mask != 0; mask &= mask - 1 {
				at := depth + bits.TrailingZeros64(mask)
				if at >= len(depths) {
					depths = append(depths, make([]int, at+1-len(depths))...)
				}
				depths[at]++
				total++
			}
		})
	}
	if total == 0 {
		return
	}
	quota := (total + 3) / 4
	threshold := len(depths)
	for quota > 0 {
		threshold--
		quota -= depths[threshold]
	}
	spared := -quota // blocks at the threshold that stay
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		before := h.names
		t.eachHeld(w, h, func(r run, mask uint64, depth int) {
			switch first := threshold - depth; { // the run's first block at the threshold
			case first >= maxRun:
				mask = 0
			case first >= 0:
				mask &^= ones(first)
				if mask>>first&1 != 0 && spared > 0 {
					spared--
					mask &^= 1 << first
				}
			}
			if mask != 0 {
				t.evictBlocks(w, h, r, mask)
			}
		})
		t.purgeAliases(h)
		x.evicted.Add(uint64(before - h.names))
	}
}

// eachHeld calls f with each run that has blocks of w, a mask of these blocks, and the number of blocks before the run.
// f may change the run.
func (t *tier) eachHeld(w kvblock.Worker, h *held, f func(r run, mask uint64, depth int)) {
	if h.names == 0 {
		return
	}
	t.mu.Lock()
	defer t.unlock()
	type part struct {
		run  run
		mask uint64
	}
	var parts []part // collected before the first call of f, because f may make runs
	left := h.blocks
	t.arena.eachRun(func(r run) bool {
		if mask := t.maskOf(r, w) & ones(t.runLen(r)); mask != 0 {
			left -= bits.OnesCount64(mask)
			parts = append(parts, part{r, mask})
		}
		return left > 0
	})
	for _, p := range parts {
		f(p.run, p.mask, depthOf(t.arena.record(p.run)[0]))
	}
}
