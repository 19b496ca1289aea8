package indexer

import "kvepp/kvblock"

// Bounds of what one worker may have kept aside. Beyond, the oldest are given up.
const (
	maxAsideStores = 1024
	maxAsideBlocks = 1 << 14
)

// aside keeps a worker's stores whose parents it does not hold: a part of its history is missing here, because the
// index joined late, evicted the parent, or the parent is announced after its child. A block that is removed while it
// waits is taken out of its store; its successors are still where they were.
//
// It is guarded by worker.mu, and empty for almost every worker, so that plain maps do. The zero value is empty.
type aside struct {
	stores int                                  // that wait
	parent map[kvblock.EngineHash][]*asideStore // by the block they wait for, in order of arrival
	blocks map[asideBlock]asidePlace            // every block that waits, by its name
	order  []*asideStore                        // in order of arrival, those that wait no more among them
}

type asideBlock struct {
	tier   kvblock.Tier
	engine kvblock.EngineHash
}

type asidePlace struct {
	store *asideStore
	at    int // in store.blocks
}

type asideStore struct {
	tier    kvblock.Tier
	parent  kvblock.EngineHash
	blocks  []kvblock.StoredBlock
	gone    []bool // by block: removed since, or waiting in an earlier store
	settled bool   // joined or given up
}

// bytes is about what is waiting.
func (a *aside) bytes() int { return 160*len(a.order) + (mapEntry+40)*len(a.blocks) }

// setAside keeps a store until its parent comes.
func (x *Index) setAside(wk *worker, e *kvblock.Stored) error {
	if len(e.Blocks) > maxAsideBlocks {
		x.parentNotFound.Add(1)
		return ErrParentNotFound
	}
	a := &wk.aside
	if a.parent == nil {
		a.parent, a.blocks = map[kvblock.EngineHash][]*asideStore{}, map[asideBlock]asidePlace{}
	}
	s := &asideStore{
		tier:   e.Tier,
		parent: e.Parent,
		blocks: append([]kvblock.StoredBlock(nil), e.Blocks...),
		gone:   make([]bool, len(e.Blocks)),
	}
	for i, b := range s.blocks {
		key := asideBlock{s.tier, b.Engine}
		if _, waits := a.blocks[key]; waits {
			s.gone[i] = true
		} else {
			a.blocks[key] = asidePlace{s, i}
		}
	}
	a.parent[s.parent] = append(a.parent[s.parent], s)
	a.order = append(a.order, s)
	a.stores++
	x.keptAside.Add(1)
	for a.stores > maxAsideStores || len(a.blocks) > maxAsideBlocks {
		oldest := a.order[0]
		if a.order = a.order[1:]; !oldest.settled {
			a.settle(oldest)
			a.parent[oldest.parent] = a.parent[oldest.parent][1:] // they are in order of arrival as well
			if len(a.parent[oldest.parent]) == 0 {
				delete(a.parent, oldest.parent)
			}
			x.parentNotFound.Add(1)
		}
	}
	return ErrKeptAside
}

// settle takes a store's blocks off the list of those that wait.
func (a *aside) settle(s *asideStore) {
	s.settled = true
	a.stores--
	for i, b := range s.blocks {
		if !s.gone[i] {
			delete(a.blocks, asideBlock{s.tier, b.Engine})
		}
	}
	// Joined stores stay in order until they are the oldest; they must not pile up behind one that never joins.
	if len(a.order) > 2*a.stores+16 {
		kept := make([]*asideStore, 0, a.stores)
		for _, o := range a.order {
			if !o.settled {
				kept = append(kept, o)
			}
		}
		a.order = kept
	}
}

// remove takes away the block that waits under this name, if one does.
func (a *aside) remove(tier kvblock.Tier, e kvblock.EngineHash) bool {
	key := asideBlock{tier, e}
	p, ok := a.blocks[key]
	if ok {
		p.store.gone[p.at] = true
		delete(a.blocks, key)
	}
	return ok
}

// join stores what waited for the blocks just named, and what waited for that.
func (x *Index) join(w kvblock.Worker, wk *worker, named []kvblock.StoredBlock) {
	a := &wk.aside
	var next []kvblock.StoredBlock // named blocks yet to look at
	for next = append(next, named...); len(next) > 0; next = next[1:] {
		waiting := a.parent[next[0].Engine]
		if len(waiting) == 0 {
			continue
		}
		in := &x.tiers[waiting[0].tier]
		in.mu.Lock()
		var p place
		ok := x.after(w, wk, waiting[0].tier, next[0].Engine, &p)
		in.mu.Unlock()
		if !ok {
			continue // the name was of no use in the end
		}
		delete(a.parent, next[0].Engine)
		for _, s := range waiting {
			a.settle(s)
			t := &x.tiers[s.tier]
			t.mu.Lock()
			var p place
			if x.after(w, wk, s.tier, s.parent, &p) {
				next = append(next, x.joinStore(w, wk, &p, s)...)
				x.joined.Add(1)
			} else { // the one before it gave the name to another block, which is gone again
				x.parentNotFound.Add(1)
			}
			t.unlock()
		}
	}
}

// joinStore stores the blocks of s from p on, in its tier, which is locked, without those that are gone or whose name
// went to another block meanwhile. It returns the blocks that it stored.
func (x *Index) joinStore(w kvblock.Worker, wk *worker, p *place, s *asideStore) []kvblock.StoredBlock {
	t, h := &x.tiers[s.tier], &wk.held[s.tier]
	var stored []kvblock.StoredBlock
	from := 0                    // of a stretch of blocks to store, which goes to p
	flush := func(to int) bool { // moves p to behind that stretch
		n := x.store(w, wk, s.tier, p, s.blocks[from:to])
		stored = append(stored, s.blocks[from:from+n]...)
		if from+n < to {
			x.refused.Add(uint64(to - from - n))
			return false
		}
		if n > 0 {
			t.behindLatest(p)
		}
		return true
	}
	var at spot
	seq := p.seq
	for i, b := range s.blocks {
		seq = kvblock.NextSequenceHash(seq, b.Local)
		named := t.named(w, h, b.Engine, &at)
		if s.gone[i] || named && at.seq() != seq {
			if !flush(i) {
				return stored
			}
			if !t.next(p, seq, &at) {
				at = spot{}
			}
			from, *p = i+1, place{spot: at, after: true, seq: seq, depth: p.depth + 1}
		}
	}
	flush(len(s.blocks))
	return stored
}
