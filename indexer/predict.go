package indexer

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
)

// DefaultMaxPredicted is the bound on predicted blocks when Config names none, as in Dynamo: 2^20, about 100 MB.
const DefaultMaxPredicted = 1 << 20

// DefaultPruneTarget is the part of that to which predictions are pruned when Config names none.
const DefaultPruneTarget = 0.8

// Lifetime says how long predicted blocks are believed held.
//
// Source: dynamo-kv-router 1.6.1, indexer (pruning, approximate_lru).
type Lifetime struct {
	// TTL is how long a block is believed held after the latest request with it. It is rounded up to sixteenths of a
	// second. Not read if Blocks is not 0.
	TTL time.Duration
	// Blocks is how many blocks the worker is believed to hold, the least recently requested leaving first. 0: any
	// number.
	Blocks int
}

// predictions are the blocks that workers are believed to hold because they were sent requests with them: those of all
// workers in the order of their latest request, each worker's own as well. Of one request the first block counts as the
// latest, so that a block is never older than those behind it, and leaves are dropped first.
//
// The blocks themselves lie in a tier of their own, so that lookups take no lock; everything else is guarded by mu.
type predictions struct {
	tier   tier
	target int // blocks to keep when pruning
	max    int
	begin  time.Time

	n          atomic.Int64  // entries
	lastExpiry atomic.Uint32 // the tick of the latest expiry

	mu      sync.Mutex // taken before tier.mu
	workers map[kvblock.Worker]*workerPredictions
	all     ageList
	entries []prediction // entries[0] is unused; free ones are chained by links[0].newer
	free    uint32
	seqs    []kvblock.SequenceHash // scratch

	pruned, expired atomic.Uint64
}

// workerPredictions is one worker's predictions.
type workerPredictions struct {
	life   Lifetime
	own    ageList
	blocks map[kvblock.SequenceHash]uint32 // places in entries
}

// prediction is one block of one worker.
type prediction struct {
	seq     kvblock.SequenceHash
	worker  kvblock.Worker
	touched tick
	links   [2]struct{ older, newer uint32 } // among all, among the worker's own
}

// Indexes of prediction.links.
const (
	amongAll = iota
	amongOwn
)

// ageList is a list of predictions by age: places in entries, 0 for none.
type ageList struct{ oldest, newest uint32 }

// dropBatch is how many blocks are dropped at once before other writers are let in.
const dropBatch = 256

// tick counts sixteenths of a second: eight years fit.
type tick uint32

const tickLength = time.Second / 16

func (p *predictions) init(c Config) {
	p.tier.init()
	p.tier.allIndexed.Store(true) // what is forgotten is anywhere in a prompt
	p.begin = time.Now()
	p.max = c.MaxPredicted
	p.target = int(float64(c.MaxPredicted) * c.PruneTarget)
	p.workers = map[kvblock.Worker]*workerPredictions{}
	p.entries = make([]prediction, 1)
}

func (p *predictions) now() tick { return tick(time.Since(p.begin) / tickLength) }

// Predict records that w was sent a prompt with these blocks, so that it may be believed to hold them although no event
// says so: to the lookup they are as blocks on its device, until they expire as life says, are pruned because there are
// more than Config.MaxPredicted, or the worker is cleared or forgotten. A worker's latest life counts for all its
// predictions. Events neither confirm nor refute them.
func (x *Index) Predict(w kvblock.Worker, chain []kvblock.SequenceHash, life Lifetime) {
	if w >= maxWorkers || len(chain) == 0 {
		return
	}
	p := &x.predictions
	chain = chain[:min(len(chain), p.max)]
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	p.expire(now)
	of := p.workers[w]
	if of == nil {
		of = &workerPredictions{blocks: map[kvblock.SequenceHash]uint32{}}
		p.workers[w] = of
	}
	of.life = life
	fresh := len(chain) // blocks from here on are new: what is believed held of a prompt is its beginning
	for fresh > 0 && of.blocks[chain[fresh-1]] == 0 {
		fresh--
	}
	if fresh < len(chain) {
		place := insertPoint{depth: fresh}
		p.tier.mu.Lock()
		if fresh > 0 {
			place.after, place.seq = true, chain[fresh-1]
			p.tier.relocate(&place)
		}
		n := p.tier.storeUnnamed(w, new(held), &place, chain[fresh:])
		p.tier.unlock()
		chain = chain[:fresh+n]
	}
	for i := len(chain) - 1; i >= 0; i-- {
		at := of.blocks[chain[i]]
		if at == 0 {
			at = p.add(chain[i], w)
			of.blocks[chain[i]] = at
		} else {
			p.unlink(&p.all, amongAll, at)
			p.unlink(&of.own, amongOwn, at)
		}
		p.entries[at].touched = now
		p.push(&p.all, amongAll, at)
		p.push(&of.own, amongOwn, at)
	}
	if life.Blocks > 0 {
		p.drop(w, of, func(e *prediction) bool { return len(of.blocks) > life.Blocks })
	}
	if int(p.n.Load()) > p.max {
		p.prune()
	}
}

// add returns a new entry, in no list.
func (p *predictions) add(seq kvblock.SequenceHash, w kvblock.Worker) uint32 {
	at := p.free
	if at != 0 {
		p.free = p.entries[at].links[0].newer
	} else {
		at = uint32(len(p.entries))
		p.entries = append(p.entries, prediction{})
	}
	p.entries[at] = prediction{seq: seq, worker: w}
	p.n.Add(1)
	return at
}

// push makes the entry at the newest of its list.
func (p *predictions) push(l *ageList, among int, at uint32) {
	e := &p.entries[at].links[among]
	e.older, e.newer = l.newest, 0
	if l.newest != 0 {
		p.entries[l.newest].links[among].newer = at
	} else {
		l.oldest = at
	}
	l.newest = at
}

// unlink takes the entry at out of its list.
func (p *predictions) unlink(l *ageList, among int, at uint32) {
	e := p.entries[at].links[among]
	if e.older != 0 {
		p.entries[e.older].links[among].newer = e.newer
	} else {
		l.oldest = e.newer
	}
	if e.newer != 0 {
		p.entries[e.newer].links[among].older = e.older
	} else {
		l.newest = e.older
	}
}

// drop forgets w's oldest predictions for as long as more says so, and returns how many.
func (p *predictions) drop(w kvblock.Worker, of *workerPredictions, more func(*prediction) bool) int {
	p.seqs = p.seqs[:0]
	for at := of.own.oldest; at != 0 && more(&p.entries[at]); at = of.own.oldest {
		seq := p.entries[at].seq
		p.seqs = append(p.seqs, seq)
		delete(of.blocks, seq)
		p.unlink(&p.all, amongAll, at)
		p.unlink(&of.own, amongOwn, at)
		p.entries[at].links[0].newer = p.free
		p.free = at
	}
	dropped := len(p.seqs)
	p.n.Add(-int64(dropped))
	for rest := p.seqs; len(rest) > 0; {
		batch := rest[:min(dropBatch, len(rest))]
		rest = rest[len(batch):]
		p.tier.mu.Lock()
		p.tier.removeSeqs(w, batch)
		p.tier.unlock()
	}
	if len(of.blocks) == 0 {
		delete(p.workers, w)
	}
	return dropped
}

// expire forgets what is too old, at most once a tick.
func (p *predictions) expire(now tick) {
	if tick(p.lastExpiry.Load()) == now {
		return
	}
	p.lastExpiry.Store(uint32(now))
	for w, of := range p.workers {
		if of.life.Blocks > 0 {
			continue
		}
		ttl := tick((of.life.TTL + tickLength - 1) / tickLength)
		p.expired.Add(uint64(p.drop(w, of, func(e *prediction) bool { return now-e.touched > ttl })))
	}
}

// prune forgets the oldest predictions of all, until the target is reached.
func (p *predictions) prune() {
	for int(p.n.Load()) > p.target {
		// The oldest's worker loses what is older than every other oldest, at least that one.
		w := p.entries[p.all.oldest].worker
		at := p.all.oldest
		n := 0
		for excess := int(p.n.Load()) - p.target; at != 0 && n < excess && p.entries[at].worker == w; n++ {
			at = p.entries[at].links[amongAll].newer
		}
		p.pruned.Add(uint64(p.drop(w, p.workers[w], func(*prediction) bool { n--; return n >= 0 })))
	}
}

// forget drops all predictions about w.
func (p *predictions) forget(w kvblock.Worker) {
	if p.n.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if of := p.workers[w]; of != nil {
		p.drop(w, of, func(*prediction) bool { return true })
	}
}

// findMatches raises s to what is predicted, where that is more.
func (p *predictions) findMatches(chain []kvblock.SequenceHash, s *OverlapScores) {
	if p.n.Load() == 0 {
		return
	}
	// the lock's holder expires predictions as well
	if now := p.now(); tick(p.lastExpiry.Load()) != now && p.mu.TryLock() {
		p.expire(now)
		p.mu.Unlock()
	}
	clear(s.predicted.known)
	p.tier.findMatches(chain, &s.predicted)
	for j, word := range s.predicted.known {
		for ; word != 0; word &= word - 1 {
			w := kvblock.Worker(64*j + bits.TrailingZeros64(word))
			if n := s.predicted.blocks(w); n > s.device.blocks(w) {
				s.device.record(w, n)
			}
		}
	}
}
