package indexer

import "kvepp/kvblock"

// Bounds of one worker's orphans. Beyond them the oldest are dropped.
const (
	maxOrphans      = 1024
	maxOrphanBlocks = 1 << 14
)

// orphans holds a worker's stores whose parent the worker does not hold: the index joined late or evicted the parent,
// or the engine announces the parent after its child. A block that is removed while its store waits is marked as gone;
// the blocks behind it keep their place.
//
// worker.mu guards it. It is empty for almost every worker, so plain maps are enough. The zero value is empty.
type orphans struct {
	count    int                              // waiting stores
	byParent map[kvblock.EngineHash][]*orphan // by missing parent, in order of arrival
	byName   map[orphanName]orphanPlace       // every waiting block
	order    []*orphan                        // in order of arrival; resolved ones are removed later
}

type orphanName struct {
	tier   kvblock.Tier
	engine kvblock.EngineHash
}

type orphanPlace struct {
	store *orphan
	at    int // in store.blocks
}

type orphan struct {
	tier     kvblock.Tier
	parent   kvblock.EngineHash
	blocks   []kvblock.StoredBlock
	gone     []bool // by block: removed since, or waiting in an earlier store
	resolved bool   // applied or dropped
}

// bytes estimates the memory of the orphans.
func (a *orphans) bytes() int { return 160*len(a.order) + (mapEntry+40)*len(a.byName) }

// addOrphan keeps a store until its parent is stored, and drops the oldest orphans beyond the bounds.
func (x *Index) addOrphan(wk *worker, e *kvblock.Stored) error {
	if len(e.Blocks) > maxOrphanBlocks {
		x.parentNotFound.Add(1)
		return ErrParentNotFound
	}
	a := &wk.orphans
	if a.byParent == nil {
		a.byParent, a.byName = map[kvblock.EngineHash][]*orphan{}, map[orphanName]orphanPlace{}
	}
	s := &orphan{
		tier:   e.Tier,
		parent: e.Parent,
		blocks: append([]kvblock.StoredBlock(nil), e.Blocks...),
		gone:   make([]bool, len(e.Blocks)),
	}
	for i, b := range s.blocks {
		key := orphanName{s.tier, b.Engine}
		if _, waits := a.byName[key]; waits {
			s.gone[i] = true
		} else {
			a.byName[key] = orphanPlace{s, i}
		}
	}
	a.byParent[s.parent] = append(a.byParent[s.parent], s)
	a.order = append(a.order, s)
	a.count++
	x.orphaned.Add(1)
	for a.count > maxOrphans || len(a.byName) > maxOrphanBlocks {
		oldest := a.order[0]
		if a.order = a.order[1:]; !oldest.resolved {
			a.resolve(oldest)
			a.byParent[oldest.parent] = a.byParent[oldest.parent][1:] // byParent is in order of arrival too
			if len(a.byParent[oldest.parent]) == 0 {
				delete(a.byParent, oldest.parent)
			}
			x.parentNotFound.Add(1)
		}
	}
	return ErrOrphaned
}

// resolve removes an orphan's blocks from byName.
func (a *orphans) resolve(s *orphan) {
	s.resolved = true
	a.count--
	for i, b := range s.blocks {
		if !s.gone[i] {
			delete(a.byName, orphanName{s.tier, b.Engine})
		}
	}
	// Resolved stores stay in order until they are the oldest. Remove them earlier if an unresolved one blocks many.
	if len(a.order) > 2*a.count+16 {
		kept := make([]*orphan, 0, a.count)
		for _, o := range a.order {
			if !o.resolved {
				kept = append(kept, o)
			}
		}
		a.order = kept
	}
}

// remove marks the waiting block with this engine hash as gone, and reports whether there is one.
func (a *orphans) remove(tier kvblock.Tier, e kvblock.EngineHash) bool {
	key := orphanName{tier, e}
	p, ok := a.byName[key]
	if ok {
		p.store.gone[p.at] = true
		delete(a.byName, key)
	}
	return ok
}

// adoptOrphans applies the orphans whose parents were just stored, and then the orphans whose parents these contain.
func (x *Index) adoptOrphans(w kvblock.Worker, wk *worker, named []kvblock.StoredBlock, load bool) {
	a := &wk.orphans
	var next []kvblock.StoredBlock // stored blocks that may be parents
	for next = append(next, named...); len(next) > 0; next = next[1:] {
		waiting := a.byParent[next[0].Engine]
		if len(waiting) == 0 {
			continue
		}
		delete(a.byParent, next[0].Engine)
		var left []*orphan // the engine hash names no block any more that is a parent in their tier
		for _, s := range waiting {
			t := &x.tiers[s.tier]
			t.mu.Lock()
			var p insertPoint
			if x.findParent(w, wk, s.tier, s.parent, &p) {
				a.resolve(s)
				next = append(next, x.adoptOrphan(w, wk, &p, s, load)...)
				x.joined.Add(1)
			} else {
				left = append(left, s)
			}
			t.unlock()
		}
		if len(left) > 0 {
			a.byParent[next[0].Engine] = left
		}
	}
}

// adoptOrphan stores the blocks of s from p on, in its tier, which is locked. It skips blocks that are gone or whose
// engine hash names another block by now. It returns the blocks that it stored.
func (x *Index) adoptOrphan(w kvblock.Worker, wk *worker, p *insertPoint, s *orphan, load bool) []kvblock.StoredBlock {
	t, h := &x.tiers[s.tier], &wk.held[s.tier]
	var stored []kvblock.StoredBlock
	from := 0                    // the first of the blocks to store next, at p
	flush := func(to int) bool { // stores blocks[from:to] and moves p behind them
		n := x.store(w, wk, s.tier, p, s.blocks[from:to], storeOptions{load: load})
		stored = append(stored, s.blocks[from:from+n]...)
		if from+n < to {
			x.refused.Add(uint64(to - from - n))
			return false
		}
		if n > 0 {
			t.afterLatest(p)
		}
		return true
	}
	var at position
	seq := p.seq
	for i, b := range s.blocks {
		seq = kvblock.NextSequenceHash(seq, b.Local)
		named := t.findNamed(w, h, b.Engine, &at)
		if s.gone[i] || named && at.seq() != seq {
			if !flush(i) {
				return stored
			}
			if !t.findNext(p, seq, &at) {
				at = position{}
			}
			from, *p = i+1, insertPoint{position: at, after: true, seq: seq, depth: p.depth + 1}
		}
	}
	flush(len(s.blocks))
	return stored
}
