package indexer

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
)

// DefaultMaxPredicted is the default of Config.MaxPredicted, as in Dynamo: 2^20 blocks, about 100 MB.
const DefaultMaxPredicted = 1 << 20

// DefaultPruneTarget is the default of Config.PruneTarget, 0..1: pruning leaves this part of MaxPredicted.
const DefaultPruneTarget = 0.8

// Lifetime says how long predicted blocks count as held.
//
// Source: dynamo-kv-router 1.6.1, indexer (pruning, approximate_lru).
type Lifetime struct {
	// TTL is how long a block counts as held after the latest request with it, rounded up to sixteenths of a second. It
	// is ignored if Blocks is not 0.
	TTL time.Duration
	// Blocks bounds the worker's predicted blocks; the least recently requested are dropped first. 0 means no bound.
	Blocks int
}

// predictions are the blocks that count as held because a request with them was sent to the worker. They are in two
// lists by age, the time of the latest request: one of all workers, and one for each worker. The first block of a
// request counts as the latest, so a block is never older than the blocks behind it, and leaves are dropped first.
//
// The blocks are in a tier of their own, so lookups take no lock. mu guards everything else.
type predictions struct {
	tier   tier
	target int // blocks left after pruning
	max    int
	begin  time.Time

	n          atomic.Int64  // entries in use
	lastExpiry atomic.Uint32 // the tick of the latest expiry

	mu      sync.Mutex // taken before tier.mu
	workers map[kvblock.Worker]*workerPredictions
	all     ageList
	entries []prediction           // entries[0] is unused; links[0].newer chains the free ones
	free    uint32                 // index of the first free entry, 0: none
	seqs    []kvblock.SequenceHash // scratch

	pruned, expired atomic.Uint64
}

// workerPredictions is one worker's predictions.
type workerPredictions struct {
	life   Lifetime
	own    ageList
	blocks map[kvblock.SequenceHash]uint32 // indexes in entries
}

// prediction is one block of one worker.
type prediction struct {
	seq     kvblock.SequenceHash
	worker  kvblock.Worker
	touched tick
	links   [2]struct{ older, newer uint32 } // in predictions.all, in workerPredictions.own
}

// Indexes of prediction.links.
const (
	amongAll = iota
	amongOwn
)

// ageList is a linked list of predictions by age. It has indexes in entries; 0 means none.
type ageList struct{ oldest, newest uint32 }

// dropBatch is how many blocks are dropped before the tier is unlocked for other writers.
const dropBatch = 256

// tick counts sixteenths of a second; 32 bits last for eight years.
type tick uint32

const tickLength = time.Second / 16

func (p *predictions) init(c Config) {
	p.tier.init()
	p.tier.allIndexed.Store(true) // drop removes blocks anywhere in a prompt
	p.begin = time.Now()
	p.max = c.MaxPredicted
	p.target = int(float64(c.MaxPredicted) * c.PruneTarget)
	p.workers = map[kvblock.Worker]*workerPredictions{}
	p.entries = make([]prediction, 1)
}

func (p *predictions) now() tick { return tick(time.Since(p.begin) / tickLength) }

// Predict records that a prompt with these blocks was sent to w. To lookups they count as blocks on the device of w,
// although no event reported them. They are dropped when they expire according to life, when there are more than
// Config.MaxPredicted, or when w is cleared or forgotten. The latest life of a worker applies to all its predictions.
// Events do not change predictions.
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
	fresh := len(chain) // blocks from here on are new; predicted blocks of a prompt are always its first ones
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

// push appends entry at to l as the newest.
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

// unlink removes entry at from l.
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

// drop drops the oldest predictions of w while more returns true, and returns their number.
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

// expire drops the predictions that are too old, at most once in a tick.
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

// prune drops the oldest predictions of all workers until the target is reached.
func (p *predictions) prune() {
	for int(p.n.Load()) > p.target {
		// Drop the oldest entries that follow each other and belong to one worker, at least one.
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

// findMatches raises the device counts in s to the predicted counts where these are higher.
func (p *predictions) findMatches(chain []kvblock.SequenceHash, s *OverlapScores) {
	if len(s.predicted.known) > 0 {
		clear(s.predicted.known)
	}
	if p.n.Load() == 0 {
		return
	}
	// If another goroutine holds the lock, that one expires predictions.
	if now := p.now(); tick(p.lastExpiry.Load()) != now && p.mu.TryLock() {
		p.expire(now)
		p.mu.Unlock()
	}
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
