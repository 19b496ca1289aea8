// Package indexer knows which worker holds which KV blocks right now, and answers how much of a prompt each one has.
//
// It owns the index: the workers' engine hashes, the blocks they stand for in each tier of memory, and the lookup. It never
// hashes tokens, never reads events from the wire, and never guesses: the answer for a worker is exactly the number of
// leading blocks of the prompt that the events applied so far say it holds, whatever other workers hold and in whatever
// order blocks came and went. Where memory runs out it says less than that, and says so ([Index.AtBound]).
//
// All methods of Index are safe for concurrent use. Events of one worker must be applied in the order in which it sent
// them, so by one goroutine at a time; different workers' events may be applied concurrently, and FindMatches may run
// beside everything.
package indexer

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// DefaultMaxBytes is the bound on memory when Config names none: 2 GiB, some 70 million entries.
const DefaultMaxBytes = 2 << 30

// maxWorkers bounds worker numbers, which index slices and bitsets here.
const maxWorkers = 1 << 16

// tiers is the number of tiers of memory.
const tiers = int(kvblock.TierExternal) + 1

// Errors of Stored.
var (
	// ErrKeptAside: the parent is not a block this worker holds, so nobody can say which prefix the blocks continue; they
	// wait for it.
	ErrKeptAside = errors.New("indexer: parent block not found; kept aside until it comes")
	// ErrParentNotFound is the same where the blocks are more than may wait. Nothing was stored.
	ErrParentNotFound = errors.New("indexer: parent block not found")
	// ErrFull: no address is left for another block; the blocks before it were taken, the others were not.
	ErrFull = errors.New("indexer: full")
	// ErrTier: the tier is none that package kvblock names.
	ErrTier = errors.New("indexer: unknown tier")
	// ErrWorker: the worker's number is beyond any that package pool allocates.
	ErrWorker = errors.New("indexer: worker number out of range")
)

// Config bounds an Index.
type Config struct {
	// MaxBytes bounds the memory of the index, in bytes of records and tables in use. Memory set aside for reuse comes on
	// top, at most a quarter and 4 MiB. At the bound, blocks are evicted (evict.go). 0 means DefaultMaxBytes.
	MaxBytes int64

	// MaxPredicted bounds the blocks of Predict, over all workers; they are not counted in MaxBytes. Beyond it the oldest go,
	// until PruneTarget times as many are left. 0 means DefaultMaxPredicted and DefaultPruneTarget.
	MaxPredicted int
	PruneTarget  float64
}

// Stats counts what the index holds, and what became of events since it was made.
type Stats struct {
	Entries int // engine hashes held, over all workers and tiers: one for each (worker, block), and one more for each twin name
	Blocks  int // distinct blocks held by anybody, over all tiers
	Used    int // bytes of records and tables in use: what MaxBytes bounds
	Bytes   int // bytes of all pages and tables, whether full or not

	Aside     int // blocks that wait for their parents
	Predicted int // (worker, block) pairs held by prediction
	MaxBytes  int // Config's, or the default

	KeptAside      uint64 // stores kept aside for want of their parent
	Joined         uint64 // stores kept aside whose parent came
	ParentNotFound uint64 // stores skipped or given up for want of their parent
	Duplicates     uint64 // blocks stored again while held
	Evicted        uint64 // entries evicted at the bound
	Refused        uint64 // blocks refused because no address is left
	UnknownRemoved uint64 // removed hashes that the worker did not hold
	Expired        uint64 // predictions that grew too old
	Pruned         uint64 // predictions dropped because there were too many
}

// Index is the set of blocks held by each worker. Make one with New.
//
// Blocks are shared by those who hold them, tier by tier (tier.go): found by sequence hash, with their holders, and with what
// each worker calls them (names.go). Writers of different workers take turns on a tier; FindMatches takes no lock.
type Index struct {
	maxBytes int64
	tiers    [tiers]tier
	private  atomic.Int64 // bytes that belong to one worker each

	workers   atomic.Pointer[[]*worker] // by number, nil for those without blocks; replaced whole
	workersMu sync.Mutex                // guards replacing it

	predictions predictions

	evicting sync.Mutex // held while blocks are evicted; taken before any worker.mu
	atBound  atomic.Bool

	keptAside, joined, parentNotFound, duplicates, evicted, refused, unknownRemoved atomic.Uint64
}

// worker is what one worker calls its blocks.
type worker struct {
	mu      sync.Mutex // guards the rest; taken before tier.mu
	loading bool       // the store under way is a dump's
	gone    bool       // forgotten: whoever still has the pointer must look the worker up again
	held    [tiers]held
	aside   aside
	bytes   int // as counted in Index.private
}

// New returns an empty index. It fails if a bound makes no sense.
func New(c Config) (*Index, error) {
	if c.MaxBytes < 0 {
		return nil, fmt.Errorf("indexer: MaxBytes is %d, but may not be negative", c.MaxBytes)
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	if c.MaxPredicted < 0 || c.MaxPredicted > 1<<30 {
		return nil, fmt.Errorf("indexer: MaxPredicted is %d, but must be from 0 to %d", c.MaxPredicted, 1<<30)
	}
	if c.MaxPredicted == 0 {
		c.MaxPredicted = DefaultMaxPredicted
	}
	if !(c.PruneTarget >= 0 && c.PruneTarget <= 1) {
		return nil, fmt.Errorf("indexer: PruneTarget is %v, but must be from 0 to 1", c.PruneTarget)
	}
	if c.PruneTarget == 0 {
		c.PruneTarget = DefaultPruneTarget
	}
	x := &Index{maxBytes: c.MaxBytes}
	for i := range x.tiers {
		x.tiers[i].init()
		x.tiers[i].arena.names = true
	}
	x.tiers[kvblock.TierDevice].firsts = make(firsts, 1<<firstsBits)
	for i := range x.tiers {
		// Below the device a prompt is met in its middle, where a worker's part above ends.
		x.tiers[i].every.Store(i != int(kvblock.TierDevice))
	}
	x.predictions.init(c)
	x.workers.Store(&[]*worker{})
	return x, nil
}

// lock returns w's state, locked, made if it is not there and create says so. It may return nil otherwise.
func (x *Index) lock(w kvblock.Worker, create bool) *worker {
	for {
		all := *x.workers.Load()
		if int(w) < len(all) && all[w] != nil {
			wk := all[w]
			wk.mu.Lock()
			if !wk.gone {
				return wk
			}
			wk.mu.Unlock() // Forget came first; its replacing of the list is under way
			x.replaceWorker(w, wk, nil)
			continue
		}
		if !create || w >= maxWorkers {
			return nil
		}
		wk := &worker{}
		for i := range wk.held {
			seed := mix(uint64(w), x.tiers[i].table.seed)
			wk.held[i].private.seed, wk.held[i].aliased.seed = seed, seed
		}
		x.replaceWorker(w, nil, wk)
	}
}

// replaceWorker puts now in the place of old, if old is still there.
func (x *Index) replaceWorker(w kvblock.Worker, old, now *worker) {
	x.workersMu.Lock()
	defer x.workersMu.Unlock()
	all := *x.workers.Load()
	next := make([]*worker, max(len(all), int(w)+1))
	copy(next, all)
	if next[w] == old {
		next[w] = now
		x.workers.Store(&next)
	}
}

// settle counts what wk holds after a change, and unlocks it.
func (x *Index) settle(wk *worker) {
	bytes := wk.aside.bytes()
	for i := range wk.held {
		h := &wk.held[i]
		bytes += h.private.bytes() + h.aliased.bytes() + mapEntry*len(h.copies)
	}
	if bytes != wk.bytes {
		x.private.Add(int64(bytes - wk.bytes))
		wk.bytes = bytes
	}
	wk.mu.Unlock()
}

// entries returns the names that wk has, over all tiers.
func (wk *worker) entries() (n int) {
	for i := range wk.held {
		n += wk.held[i].n
	}
	return n
}

// mapEntry is about what an entry of a Go map of numbers takes, in bytes.
const mapEntry = 40

// Stored records that w now holds e.Blocks in e.Tier.
//
// The parent may be held in any tier. If it is in none, the blocks are kept aside and count once it comes; of these the
// oldest are given up where there are too many.
//
// An engine hash names one block at a time. Stored again for the same block it is held until it was removed as often, as
// engines announce every physical copy; stored for another block it stops naming the old one. Two engine hashes may name
// the same block; w holds it until both are removed.
//
// Errors: ErrKeptAside (counted later, if the parent comes), ErrParentNotFound, ErrTier and ErrWorker (nothing was stored),
// ErrFull (the blocks before the limit were stored).
func (x *Index) Stored(w kvblock.Worker, e kvblock.Stored) error { return x.apply(w, e, false) }

// apply is Stored, or Load.
func (x *Index) apply(w kvblock.Worker, e kvblock.Stored, load bool) error {
	if int(e.Tier) >= tiers {
		return ErrTier
	}
	if w >= maxWorkers {
		return ErrWorker
	}
	if len(e.Blocks) == 0 {
		return nil
	}
	wk := x.lock(w, true)
	wk.loading = load
	err := x.stored(w, wk, &e)
	x.settle(wk)
	x.evictIfFull()
	return err
}

func (x *Index) stored(w kvblock.Worker, wk *worker, e *kvblock.Stored) error {
	t := &x.tiers[e.Tier]
	if device := &x.tiers[kvblock.TierDevice]; t != device && !device.every.Load() {
		device.mu.Lock()
		device.findEvery() // see lockAfter
		device.unlock()
	}
	// What will be looked at first is sent for before the lock is waited for.
	near := [1 + maxNearNames]uintptr{t.names.near(uint64(e.Parent))}
	few := e.Blocks
	if len(few) > maxNearNames {
		few = nil // there is time for theirs later, if they are needed at all
	}
	for i, b := range few {
		near[1+i] = t.names.near(uint64(b.Engine))
	}
	prefetch.Words(&near[0], 1+len(few))
	p, ok := place{}, true
	if !e.HasParent {
		t.mu.Lock()
	} else if p, ok = x.lockAfter(w, wk, e.Tier, e.Parent); !ok {
		return x.setAside(wk, e)
	}
	t.nearNames = len(few)
	n := x.store(w, wk, e.Tier, p, e.Blocks)
	t.nearNames = 0
	t.unlock()
	if wk.aside.stores > 0 {
		x.join(w, wk, e.Blocks[:n])
	}
	if n < len(e.Blocks) {
		x.refused.Add(uint64(len(e.Blocks) - n))
		return ErrFull
	}
	return nil
}

// lockAfter locks a tier and returns the place after the block that w calls parent: in this tier if it is there, else in
// another. If it is in none the tier is not locked.
//
// A block that w has elsewhere may be here too, others': it is found by its sequence hash then. That is why this tier finds
// every block once w has any in another tier.
func (x *Index) lockAfter(w kvblock.Worker, wk *worker, in kvblock.Tier, parent kvblock.EngineHash) (place, bool) {
	t := &x.tiers[in]
	t.mu.Lock()
	if seq, at, ok := t.named(w, &wk.held[in], parent); ok {
		return t.behind(seq, at), true
	}
	t.mu.Unlock()
	for i := range x.tiers {
		other, h := &x.tiers[i], &wk.held[i]
		if i == int(in) || h.n == 0 {
			continue
		}
		other.mu.Lock()
		seq, at, ok := other.named(w, h, parent)
		p := place{}
		if ok {
			p = other.behind(seq, at)
		}
		other.mu.Unlock()
		if ok {
			t.mu.Lock()
			p.at, _ = t.table.find(&t.arena, seq)
			return p, true
		}
	}
	return place{}, false
}

// maxNearNames is how many names a store may have for them to be sent for together with its parent's, before it is known whether
// they are needed.
const maxNearNames = 8

// store stores blocks in a tier, which is locked, from p on, until something is full. It returns how many it did.
func (x *Index) store(w kvblock.Worker, wk *worker, in kvblock.Tier, p place, blocks []kvblock.StoredBlock) int {
	t, h := &x.tiers[in], &wk.held[in]
	h.loading, h.repeats = wk.loading, 0
	n := t.store(w, h, p, blocks)
	if h.repeats > 0 {
		x.duplicates.Add(uint64(h.repeats))
	}
	return n
}

// Removed records that w no longer holds the blocks it knows by e.Hashes in e.Tier, and returns how many of these it did
// not hold. What lies behind a removed block stays held, and counts again once the block is back.
func (x *Index) Removed(w kvblock.Worker, e kvblock.Removed) (unknown int) {
	wk := x.lock(w, false)
	if wk == nil || int(e.Tier) >= tiers {
		if wk != nil {
			wk.mu.Unlock()
		}
		x.unknownRemoved.Add(uint64(len(e.Hashes)))
		return len(e.Hashes)
	}
	t, h := &x.tiers[e.Tier], &wk.held[e.Tier]
	hashes := e.Hashes
	if wk.aside.stores > 0 {
		hashes = nil
		for _, hash := range e.Hashes {
			if !wk.aside.remove(e.Tier, hash) {
				hashes = append(hashes, hash)
			}
		}
	}
	t.mu.Lock()
	unknown = t.unname(w, h, hashes)
	t.unlock()
	if unknown > 0 {
		x.unknownRemoved.Add(uint64(unknown))
	}
	x.settle(wk)
	return unknown
}

// Cleared records that w holds nothing any more, in any tier.
func (x *Index) Cleared(w kvblock.Worker) {
	x.predictions.forget(w)
	if wk := x.lock(w, false); wk != nil {
		x.clear(w, wk)
		x.settle(wk)
	}
}

// Forget drops everything about w, which has left. When it returns, the number may be given to another worker.
func (x *Index) Forget(w kvblock.Worker) {
	x.predictions.forget(w)
	wk := x.lock(w, false)
	if wk == nil {
		return
	}
	x.clear(w, wk)
	wk.gone = true
	x.settle(wk)
	x.replaceWorker(w, wk, nil)
}

// clear makes wk nobody's. Other writers of a tier wait while its runs are looked through, some nanoseconds for each.
func (x *Index) clear(w kvblock.Worker, wk *worker) {
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		if h.n > 0 {
			t.mu.Lock()
			t.arena.eachRun(func(r run) bool {
				if mask := t.maskOf(r, w) & ones(t.runLen(r)); mask != 0 {
					h.blocks -= bits.OnesCount64(mask)
					t.clearMask(r, w, mask)
				}
				return h.blocks > 0
			})
			t.unlock()
		}
		*h = held{private: names{seed: h.private.seed}, aliased: names{seed: h.aliased.seed}}
	}
	wk.aside = aside{}
}

// WorkerEntries returns the number of entries of one worker, over all tiers.
func (x *Index) WorkerEntries(w kvblock.Worker) int {
	all := *x.workers.Load()
	if int(w) >= len(all) || all[w] == nil {
		return 0
	}
	all[w].mu.Lock()
	defer all[w].mu.Unlock()
	return all[w].entries()
}

// used returns the bytes in use.
func (x *Index) used() int64 {
	total := x.private.Load()
	for i := range x.tiers {
		total += x.tiers[i].size.Load()
	}
	return total
}

// Stats returns the counts at this moment.
func (x *Index) Stats() Stats {
	s := Stats{
		Used:           int(x.used()),
		Bytes:          int(x.private.Load()),
		MaxBytes:       int(x.maxBytes),
		KeptAside:      x.keptAside.Load(),
		Joined:         x.joined.Load(),
		ParentNotFound: x.parentNotFound.Load(),
		Duplicates:     x.duplicates.Load(),
		Evicted:        x.evicted.Load(),
		Refused:        x.refused.Load(),
		UnknownRemoved: x.unknownRemoved.Load(),
		Predicted:      int(x.predictions.n.Load()),
		Expired:        x.predictions.expired.Load(),
		Pruned:         x.predictions.pruned.Load(),
	}
	for _, wk := range *x.workers.Load() {
		if wk != nil {
			wk.mu.Lock()
			s.Entries += wk.entries()
			s.Aside += len(wk.aside.blocks)
			wk.mu.Unlock()
		}
	}
	for i := range x.tiers {
		t := &x.tiers[i]
		t.mu.Lock()
		s.Blocks += t.blocks
		s.Bytes += t.arena.bytes() + t.tableBytes()
		t.mu.Unlock()
	}
	return s
}
