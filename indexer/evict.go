package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// Eviction: when the bytes in use exceed the bound, the worker that takes most of them loses the deepest quarter of its
// blocks, those with the most blocks before them in their prompts, until the index is below the bound again.
//
// Deepest first means leaves first, so that no block is kept behind one that was evicted. It also keeps what tells
// workers apart: the beginnings of all prompts rather than all of some. What is evicted is not believed held any more,
// so answers fall short of the truth from then on; they never exceed it. Evicting the least recently used would need a
// place in every block for when that was, written by lookups.
//
// It costs two passes over all runs for a quarter of one worker's blocks.

// evictIfFull brings the index below its bound. The caller holds no lock.
func (x *Index) evictIfFull() {
	if !x.full() {
		if x.atBound.Load() && x.used() < x.maxBytes/2 {
			x.atBound.Store(false)
		}
		return
	}
	x.evicting.Lock() // others that find it full wait here, so that it grows no further
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

// slack is what pages hardly begun may take, for every class of records in every tier.
const slack = 4 << 20

// full reports whether the bytes in use exceed the bound, or the bytes with free space in pages exceed it by a quarter.
func (x *Index) full() bool {
	used := x.used()
	if used > x.maxBytes {
		return true
	}
	spare := int64(0)
	for i := range x.tiers {
		spare += x.tiers[i].spareBytes.Load()
	}
	return used+spare > x.maxBytes+x.maxBytes/4+slack
}

// AtBound reports whether blocks were evicted for want of memory, and the index has not been below half its bound
// since. Overlaps are then lower bounds.
func (x *Index) AtBound() bool { return x.atBound.Load() }

// nameBytes estimates the bytes of an own name of a block that only one worker holds.
const nameBytes = 40

// largest returns the worker that takes most memory by its names and what it has kept aside, nil if none takes any.
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

// evict takes a quarter of its blocks from w, the deepest, and all that it has kept aside. Other writers of a tier wait
// while its runs are looked through.
func (x *Index) evict(w kvblock.Worker, wk *worker) {
	waiting := uint64(wk.orphans.count)
	wk.orphans = orphans{}
	x.parentNotFound.Add(waiting)

	var depths []int // blocks, by how many come before them
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
	spared := -quota // of those at the threshold
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		before := h.names
		t.eachHeld(w, h, func(r run, mask uint64, depth int) {
			switch first := threshold - depth; { // the run's first block that may go
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
	var parts []part // first, because f may make runs
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
