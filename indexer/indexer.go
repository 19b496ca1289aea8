// Package indexer knows which worker holds which KV blocks right now, and answers how much of a prompt each one has.
//
// It owns the index: the workers' engine hashes, the blocks they stand for, and the lookup. It never hashes tokens, never
// reads events from the wire, and never guesses: the answer for a worker is exactly the number of leading blocks of the
// prompt that the events applied so far say it holds, whatever other workers hold and in whatever order blocks came and went.
//
// All methods of Index are safe for concurrent use. Events of one worker must be applied in the order in which it sent
// them, so by one goroutine at a time; different workers' events may be applied concurrently, and FindMatches may run
// beside everything.
package indexer

import (
	"errors"
	"sync"

	"kvepp/kvblock"
)

// DefaultMaxEntries is the bound on entries when Config names none. That many take roughly 1 GB.
const DefaultMaxEntries = 1 << 24

// maxWorkers bounds worker numbers, which index slices and bitsets here.
const maxWorkers = 1 << 16

// Errors of Stored.
var (
	// ErrParentNotFound: the parent is not a block this worker holds, so nobody can say which prefix the blocks continue.
	ErrParentNotFound = errors.New("indexer: parent block not found")
	// ErrFull: MaxEntries is reached; blocks up to the limit were taken, the others were not.
	ErrFull = errors.New("indexer: full")
	// ErrTier: the blocks went to a tier below the device, which this index does not keep.
	ErrTier = errors.New("indexer: not a device block")
	// ErrWorker: the worker's number is beyond any that package pool allocates.
	ErrWorker = errors.New("indexer: worker number out of range")
)

// Config bounds an Index.
type Config struct {
	// MaxEntries is the largest number of entries, an entry being one engine hash held by one worker. It bounds the
	// index's memory. At the limit new blocks are refused with ErrFull until others are removed. 0 means DefaultMaxEntries.
	MaxEntries int
}

// Stats counts what the index holds and what it turned away since it was made.
type Stats struct {
	Entries int // engine hashes held, over all workers: one for each (worker, block), and one more for each twin name
	Blocks  int // distinct blocks held by anybody

	ParentNotFound uint64 // stores skipped for want of their parent
	Refused        uint64 // blocks refused at MaxEntries
	UnknownRemoved uint64 // removed hashes that the worker did not hold
	LowerTier      uint64 // stores and removals of tiers below the device, ignored
}

// Index is the set of blocks held by each worker. Make one with New.
type Index struct {
	maxEntries int

	mu      sync.RWMutex
	workers map[kvblock.Worker]map[kvblock.EngineHash]kvblock.SequenceHash
	holders map[kvblock.SequenceHash]map[kvblock.Worker]int
	stats   Stats
}

// New returns an empty index. It fails if a bound is negative.
func New(c Config) (*Index, error) {
	if c.MaxEntries < 0 {
		return nil, errors.New("indexer: MaxEntries is negative")
	}
	if c.MaxEntries == 0 {
		c.MaxEntries = DefaultMaxEntries
	}
	return &Index{
		maxEntries: c.MaxEntries,
		workers:    map[kvblock.Worker]map[kvblock.EngineHash]kvblock.SequenceHash{},
		holders:    map[kvblock.SequenceHash]map[kvblock.Worker]int{},
	}, nil
}

// Stored records that w now holds e.Blocks.
//
// An engine hash names one block at a time: stored again for the same block it changes nothing (a later removal takes it
// away, however often it was stored), stored for another block it stops naming the old one. Two engine hashes may name
// the same block, for instance two physical copies; w holds it until both are removed.
//
// Errors: ErrParentNotFound (nothing was stored), ErrTier (nothing was stored), ErrWorker (nothing was stored), ErrFull
// (the blocks before the limit were stored).
func (x *Index) Stored(w kvblock.Worker, e kvblock.Stored) error {
	if w >= maxWorkers {
		return ErrWorker
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.Tier != kvblock.TierDevice {
		x.stats.LowerTier++
		return ErrTier
	}
	names := x.workers[w]
	parent, ok := names[e.Parent]
	if e.HasParent && !ok {
		x.stats.ParentNotFound++
		return ErrParentNotFound
	}
	if names == nil {
		names = map[kvblock.EngineHash]kvblock.SequenceHash{}
		x.workers[w] = names
	}
	for i, b := range e.Blocks {
		seq := kvblock.NextSequenceHash(parent, b.Local)
		if i == 0 && !e.HasParent {
			seq = kvblock.FirstSequenceHash(b.Local)
		}
		parent = seq
		if old, ok := names[b.Engine]; ok {
			if old == seq {
				continue
			}
			x.drop(w, b.Engine)
		}
		if x.stats.Entries == x.maxEntries {
			x.stats.Refused += uint64(len(e.Blocks) - i)
			return ErrFull
		}
		names[b.Engine] = seq
		x.stats.Entries++
		if x.holders[seq] == nil {
			x.holders[seq] = map[kvblock.Worker]int{}
		}
		x.holders[seq][w]++
	}
	return nil
}

// drop forgets that w knows a block as name.
func (x *Index) drop(w kvblock.Worker, name kvblock.EngineHash) {
	seq := x.workers[w][name]
	delete(x.workers[w], name)
	x.stats.Entries--
	h := x.holders[seq]
	if h[w]--; h[w] == 0 {
		delete(h, w)
	}
	if len(h) == 0 {
		delete(x.holders, seq)
	}
}

// Removed records that w no longer holds the blocks it knows by e.Hashes, and returns how many of these it did not hold.
// What lies behind a removed block stays held, and counts again once the block is back.
func (x *Index) Removed(w kvblock.Worker, e kvblock.Removed) (unknown int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.Tier != kvblock.TierDevice {
		x.stats.LowerTier++
		return 0
	}
	for _, name := range e.Hashes {
		if _, ok := x.workers[w][name]; !ok {
			unknown++
			continue
		}
		x.drop(w, name)
	}
	x.stats.UnknownRemoved += uint64(unknown)
	return unknown
}

// Cleared records that w holds nothing any more.
func (x *Index) Cleared(w kvblock.Worker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for name := range x.workers[w] {
		x.drop(w, name)
	}
}

// Forget drops everything about w, which has left. When it returns, the number may be given to another worker.
func (x *Index) Forget(w kvblock.Worker) {
	x.Cleared(w)
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.workers, w)
}

// FindMatches sets scores to the number of leading blocks of the prompt that each worker holds. chain[i] is the sequence
// hash of the prompt's block i. Beside writers, each worker's number is one that was true at some time during the call.
func (x *Index) FindMatches(chain []kvblock.SequenceHash, scores *OverlapScores) {
	scores.reset()
	x.mu.RLock()
	defer x.mu.RUnlock()
	if len(chain) == 0 {
		return
	}
	for w := range x.holders[chain[0]] {
		n := 1
		for n < len(chain) && x.holders[chain[n]][w] > 0 {
			n++
		}
		scores.hits = append(scores.hits, Overlap{Worker: w, Blocks: n})
	}
	scores.publish()
}

// WorkerEntries returns the number of entries of one worker.
func (x *Index) WorkerEntries(w kvblock.Worker) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.workers[w])
}

// Stats returns the counts at this moment.
func (x *Index) Stats() Stats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.stats
	s.Blocks = len(x.holders)
	return s
}
