package indexer

import (
	"slices"

	"kvepp/kvblock"
)

// Eviction: when the bytes in use exceed the bound, the worker that takes most of them loses the deepest quarter of its
// blocks, those with the most blocks before them in their prompts, until the index is below the bound again.
//
// Deepest first means leaves first, so that no block is kept behind one that was evicted. It also keeps what tells workers
// apart: the beginnings of all prompts rather than all of some. What is evicted is not believed held any more, so answers
// fall short of the truth from then on; they never exceed it. Evicting the least recently used would need a place in every
// block for when that was, written by lookups.
//
// It costs a pass over one worker's names, with a lookup for each, for a quarter of them: about as much as storing them.

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
			return // what is in use belongs to nobody alone
		}
		x.atBound.Store(true)
		wk.mu.Lock()
		if !wk.gone {
			x.evict(w, wk)
		}
		x.settle(wk)
	}
}

// slack is what pages hardly begun may take, for every class of records in every tier.
const slack = 4 << 20

// full reports whether the index exceeds its bound by what is in use; or, by a quarter, with what is set aside for reuse.
func (x *Index) full() bool {
	used := x.used()
	if used > x.maxBytes {
		return true
	}
	spare := int64(0)
	for i := range x.tiers {
		spare += x.tiers[i].spare.Load()
	}
	return used+spare > x.maxBytes+x.maxBytes/4+slack
}

// AtBound reports whether blocks were evicted for want of memory, and the index has not been below half its bound since.
// Overlaps are then lower bounds.
func (x *Index) AtBound() bool { return x.atBound.Load() }

// largest returns the worker that takes most memory, nil if none takes any.
func (x *Index) largest() (kvblock.Worker, *worker) {
	var of kvblock.Worker
	var most *worker
	for w, wk := range *x.workers.Load() {
		if wk != nil && wk.bytes.Load() > 0 && (most == nil || wk.bytes.Load() > most.bytes.Load()) {
			of, most = kvblock.Worker(w), wk
		}
	}
	return of, most
}

// victim is a name to be evicted.
type victim struct {
	engine kvblock.EngineHash
	block  kvblock.SequenceHash
	at     ref // where the block was when it was chosen
}

// evict takes a quarter of its blocks from w, the deepest, and all that it has kept aside.
func (x *Index) evict(w kvblock.Worker, wk *worker) {
	waiting := uint64(wk.aside.stores)
	wk.aside = aside{}
	x.parentNotFound.Add(waiting)

	depths := x.depths(wk)
	if len(depths) == 0 {
		return
	}
	quota := (len(depths) + 3) / 4
	slices.Sort(depths)
	threshold := depths[len(depths)-quota]
	atThreshold := 0 // of the quota
	for _, d := range depths[len(depths)-quota:] {
		if d == threshold {
			atThreshold++
		}
	}
	var victims []victim
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		victims = victims[:0]
		h.names.each(func(n name) {
			at, _ := t.table.find(&t.arena, n.block)
			d := t.depth(n.block)
			if d < threshold || d == threshold && atThreshold == 0 {
				return
			}
			if d == threshold {
				atThreshold--
			}
			victims = append(victims, victim{n.engine, n.block, at})
		})
		if len(victims) == 0 {
			continue
		}
		for _, v := range victims {
			h.names.remove(v.engine)
			delete(h.copies, v.engine)
		}
		if h.names.n == 0 {
			h.names = names{seed: h.names.seed}
		}
		// By address, so that the blocks of one run go together.
		slices.SortFunc(victims, func(a, b victim) int { return int(int64(b.at) - int64(a.at)) })
		for rest := victims; len(rest) > 0; {
			batch := rest[:min(clearBatch, len(rest))]
			rest = rest[len(batch):]
			wk.seqs = wk.seqs[:0]
			for _, v := range batch {
				wk.seqs = append(wk.seqs, v.block)
			}
			t.mu.Lock()
			t.unhold(w, h, wk.seqs)
			t.unlock()
		}
		x.entries.Add(-int64(len(victims)))
		x.evicted.Add(uint64(len(victims)))
	}
}

// depths lists how many blocks come before each block of wk.
func (x *Index) depths(wk *worker) []int {
	var depths []int
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		h.names.each(func(n name) { depths = append(depths, t.depth(n.block)) })
	}
	return depths
}
