package indexer

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"kvepp/kvblock"
)

// DefaultMaxBytes is the bound on memory when Config names none: 2 GiB, some 70 million entries.
const DefaultMaxBytes = 2 << 30

// maxWorkers bounds worker numbers, which index slices and bitsets here.
const maxWorkers = 1 << 16

// memoryTiers is the number of tiers of memory. The tiers behind them have the blocks of classes (classes.go).
const (
	memoryTiers = int(kvblock.TierExternal) + 1
	tiers       = memoryTiers + kvblock.MaxClasses
)

// Errors of Stored.
var (
	// ErrOrphaned: this worker does not hold the parent, so the prefix of the blocks is not known. They are kept until
	// the parent is stored.
	ErrOrphaned = errors.New("indexer: parent block not found; kept until the parent is stored")
	// ErrParentNotFound: the parent is not known, and the store has too many blocks to be kept. No block was stored.
	ErrParentNotFound = errors.New("indexer: parent block not found")
	// ErrFull: the arena has no address left for another block. The blocks before it were stored.
	ErrFull = errors.New("indexer: no address is left for another block")
	// ErrTier: package kvblock does not define the tier.
	ErrTier = errors.New("indexer: unknown tier")
	// ErrWorker: the worker's number is above the range that package pool allocates.
	ErrWorker = errors.New("indexer: worker number out of range")
)

// Config bounds an Index.
type Config struct {
	// MaxBytes bounds the memory of the index, in bytes of records and tables in use. Free space in pages is not
	// included; it is at most a quarter of MaxBytes plus 4 MiB. At the bound, blocks are evicted (evict.go). 0 means
	// DefaultMaxBytes.
	MaxBytes int64

	// MaxPredicted bounds the blocks of Predict, over all workers; MaxBytes does not include them. Above it the oldest
	// are dropped until PruneTarget x MaxPredicted are left. 0 means DefaultMaxPredicted and DefaultPruneTarget.
	MaxPredicted int
	PruneTarget  float64
}

// Stats has the counts of what the index holds, and of what happened since New.
type Stats struct {
	// engine hashes held, over all workers and tiers: one for each (worker, block), and one more for each further
	// engine hash of the same block
	Entries int
	Blocks  int // distinct blocks with a holder, over all tiers
	Used    int // bytes of records and tables in use: what MaxBytes bounds
	Bytes   int // bytes of all pages and tables, including free space

	OrphanBlocks int // blocks of stores that wait for their parents
	Predicted    int // predicted (worker, block) pairs
	MaxBytes     int // the bound in use

	Orphaned       uint64 // stores kept until their parent is stored
	Joined         uint64 // orphans whose parent was stored later
	ParentNotFound uint64 // stores dropped without their parent
	Duplicates     uint64 // blocks stored again while held
	Evicted        uint64 // entries evicted at the bound
	Refused        uint64 // blocks refused because no address is left
	UnknownRemoved uint64 // removed hashes that the worker did not hold
	Expired        uint64 // predictions dropped because of their age
	Pruned         uint64 // predictions dropped because there were too many
}

// Index is the set of blocks held by each worker. Make one with New.
//
// Workers that hold the same block in a tier share it (tier.go). Writers of different workers take turns on a tier;
// FindMatches takes no lock.
type Index struct {
	maxBytes    int64
	tiers       [tiers]tier
	usedTiers   atomic.Int32 // tiers from here on have never had a block; at least memoryTiers
	workerBytes atomic.Int64 // sum of worker.bytes

	workers   atomic.Pointer[[]*worker] // by number, nil for workers without blocks; replaced as a whole
	workersMu sync.Mutex                // held while workers or hybrids is replaced

	// lower has a bit for each tier of memory below the device that has blocks. Most indexes have none, and a lookup
	// then reads one word instead of a flag of each tier.
	lower atomic.Uint32

	// hybrids has the classes of workers of hybrid models, replaced as a whole; nil: there are none.
	hybrids atomic.Pointer[hybridTable]

	predictions predictions

	evicting sync.Mutex // held while blocks are evicted; taken before any worker.mu
	atBound  atomic.Bool

	orphaned, joined, parentNotFound, duplicates, evicted, refused, unknownRemoved atomic.Uint64
}

// worker is the state of one worker: its engine hashes and its orphans.
type worker struct {
	mu        sync.Mutex // guards the rest; taken before tier.mu
	forgotten bool       // set by Forget: a caller with this pointer must look the worker up again
	held      [tiers]held
	usedTiers int // as Index.usedTiers, for this worker
	orphans   orphans
	bytes     int // this worker's part of Index.workerBytes
}

// New returns an empty index. It returns an error if a bound of the config is out of range.
func New(c Config) (*Index, error) {
	if c.MaxBytes < 0 {
		return nil, fmt.Errorf("indexer: MaxBytes is %d; want bytes above 0, or 0 for the default", c.MaxBytes)
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
	x.usedTiers.Store(int32(memoryTiers))
	for i := range x.tiers {
		x.tiers[i].init()
		x.tiers[i].arena.hasNames = true
	}
	x.tiers[kvblock.TierDevice].rootFilter = make(rootFilter, 1<<rootFilterBits)
	for i := range x.tiers {
		// Below the device a lookup enters a prompt in its middle, where the worker's blocks in the tiers above end.
		x.tiers[i].allIndexed.Store(i != int(kvblock.TierDevice))
		if i != int(kvblock.TierDevice) && i < memoryTiers {
			x.tiers[i].lower, x.tiers[i].lowerBit = &x.lower, 1<<i
		}
		if i >= memoryTiers {
			x.tiers[i].lookupFilter = new(lookupFilter)
		}
	}
	x.predictions.init(c)
	x.workers.Store(&[]*worker{})
	return x, nil
}

// lock returns the state of w, locked. If w has none, lock makes it if create is set, else it returns nil.
func (x *Index) lock(w kvblock.Worker, create bool) *worker {
	for {
		all := *x.workers.Load()
		if int(w) < len(all) && all[w] != nil {
			wk := all[w]
			wk.mu.Lock()
			if !wk.forgotten {
				return wk
			}
			wk.mu.Unlock() // Forget has locked it first and will replace it in the list
			x.replaceWorker(w, wk, nil)
			continue
		}
		if !create || w >= maxWorkers {
			return nil
		}
		x.replaceWorker(w, nil, &worker{usedTiers: memoryTiers})
	}
}

// replaceWorker replaces old by now in the list of workers, if old is still there.
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

// unlockWorker updates the count of wk's bytes after a change, and unlocks wk.
func (x *Index) unlockWorker(wk *worker) {
	bytes := wk.orphans.bytes()
	for i := range wk.held[:wk.usedTiers] {
		h := &wk.held[i]
		bytes += aliasEntry*(len(h.aliases)+len(h.aliasCounts)) + mapEntry*len(h.copies)
	}
	if bytes != wk.bytes {
		x.workerBytes.Add(int64(bytes - wk.bytes))
		wk.bytes = bytes
	}
	wk.mu.Unlock()
}

// entries returns the number of engine hashes of wk, over all tiers.
func (wk *worker) entries() (n int) {
	for i := range wk.held[:wk.usedTiers] {
		n += wk.held[i].names
	}
	return n
}

// mapEntry is the approximate size of an entry of a small Go map of numbers, in bytes, and aliasEntry that of a large
// one (measured: 24).
const (
	mapEntry   = 40
	aliasEntry = 26
)

// Stored records that w now holds e.Blocks in e.Tier.
//
// The parent may be held in any tier. If w holds it in no tier, the store becomes an orphan: its blocks count once the
// parent is stored. If w has too many orphans, the oldest are dropped.
//
// An engine hash names one block at a time. If it is stored again for the same block, w holds the block until the
// engine hash was removed as often, because engines announce each physical copy. If it is stored for another block, it
// no longer names the first. Two engine hashes may name the same block; w holds it until both are removed.
//
// Errors: ErrOrphaned (the blocks count once the parent is stored); ErrParentNotFound, ErrTier and ErrWorker (nothing
// was stored); ErrFull (the blocks before the first refused one were stored).
func (x *Index) Stored(w kvblock.Worker, e kvblock.Stored) error { return x.apply(w, e, false) }

// apply is Stored, or Load.
func (x *Index) apply(w kvblock.Worker, e kvblock.Stored, load bool) error {
	_, a := x.Apply(w, []kvblock.Operation{{Kind: kvblock.OpStored, Stored: e}}, load)
	if len(a.Failed) > 0 {
		return a.Failed[0]
	}
	return nil
}

// Removed records that w no longer holds the blocks that e.Hashes name in e.Tier. It returns how many of these w did
// not hold. w still holds the blocks behind a removed block; they count again once it is stored again.
func (x *Index) Removed(w kvblock.Worker, e kvblock.Removed) (unknown int) {
	_, a := x.Apply(w, []kvblock.Operation{{Kind: kvblock.OpRemoved, Removed: e}}, false)
	return a.Unknown
}

// Applied is the outcome of operations. The zero value is the outcome of none.
type Applied struct {
	Stored, Removed int     // operations
	Failed          []error // the reason for each store that is not in Stored
	Unknown         int     // removed hashes that the worker did not hold
}

// Bounds of the operations that are applied together, and of their blocks. Other writers wait meanwhile, and prefetched
// memory must still be in the cache when it is used. An operation of more blocks is applied alone.
const (
	maxBatchOps    = 64
	maxBatchBlocks = 512
)

// Apply applies the first n operations of one message of w: as many leading stores and removals as are in one tier, up
// to a bound. n is 0 if the first operation is of another kind. load says that the stores are part of a dump
// ([Index.Load]). Applying a message in batches is cheaper than one operation at a time, because the memory that all
// operations read is prefetched first.
func (x *Index) Apply(w kvblock.Worker, ops []kvblock.Operation, load bool) (n int, a Applied) {
	in, n, stores := batchOf(ops)
	if n == 0 {
		return 0, a
	}
	ops = ops[:n]
	var wk *worker
	var err error
	switch {
	case int(in) >= tiers:
		err = ErrTier
	case w >= maxWorkers:
		err = ErrWorker
	default:
		wk = x.lock(w, stores)
	}
	if wk == nil {
		a.refuse(ops, err)
	} else {
		if int(in) >= wk.usedTiers {
			x.useTier(wk, int(in))
		}
		if stores && in != kvblock.TierDevice && int(in) < memoryTiers {
			x.tiers[kvblock.TierDevice].indexAll() // findParent may look here
		}
		t := &x.tiers[in]
		t.mu.Lock()
		t.prefetchBatch(ops)
		rm := noRemoval
		for i := range ops {
			if op := &ops[i]; op.Kind == kvblock.OpRemoved {
				a.Removed++
				a.Unknown += x.removed(w, wk, &rm, &op.Removed)
				continue
			}
			t.endRemoval(w, &rm)
			if err := x.stored(w, wk, &ops[i].Stored, load); err != nil {
				a.Failed = append(a.Failed, err)
			} else {
				a.Stored++
			}
		}
		t.endRemoval(w, &rm)
		t.unlock()
		x.unlockWorker(wk)
	}
	if a.Unknown > 0 {
		x.unknownRemoved.Add(uint64(a.Unknown))
	}
	if stores {
		x.evictIfFull()
	}
	return n, a
}

// useTier notes that wk may get blocks in a class's tier.
func (x *Index) useTier(wk *worker, in int) {
	wk.usedTiers = in + 1
	for {
		n := x.usedTiers.Load()
		if int(n) > in || x.usedTiers.CompareAndSwap(n, int32(in+1)) {
			return
		}
	}
}

// batchOf returns how many of ops may be applied together, their tier, and whether any of them is a store.
func batchOf(ops []kvblock.Operation) (in kvblock.Tier, n int, stores bool) {
	for blocks := 0; n < min(len(ops), maxBatchOps); n++ {
		op := &ops[n]
		of, store := op.Removed.Tier, op.Kind == kvblock.OpStored
		if store {
			of = op.Stored.Tier
			blocks += len(op.Stored.Blocks)
		} else if op.Kind != kvblock.OpRemoved {
			break
		}
		blocks += len(op.Removed.Hashes)
		if n > 0 && (of != in || blocks > maxBatchBlocks) {
			break
		}
		in, stores = of, stores || store
	}
	return in, n, stores
}

// refuse counts operations that change nothing. err is the reason for stores.
func (a *Applied) refuse(ops []kvblock.Operation, err error) {
	for i := range ops {
		if ops[i].Kind == kvblock.OpStored {
			a.Failed = append(a.Failed, err)
		} else {
			a.Removed++
			a.Unknown += len(ops[i].Removed.Hashes)
		}
	}
}

// stored applies one store. The tier is locked.
func (x *Index) stored(w kvblock.Worker, wk *worker, e *kvblock.Stored, load bool) error {
	if len(e.Blocks) == 0 {
		return nil
	}
	t := &x.tiers[e.Tier]
	var p insertPoint
	if e.HasParent && !x.findParent(w, wk, e.Tier, e.Parent, &p) {
		return x.addOrphan(wk, e)
	}
	o := storeOptions{load: load}
	if len(e.Blocks) <= maxPrefetchNames {
		o.prefetched = len(e.Blocks)
	}
	n := x.store(w, wk, e.Tier, &p, e.Blocks, o)
	if wk.orphans.count > 0 {
		t.unlock()
		x.adoptOrphans(w, wk, e.Blocks[:n], load)
		t.mu.Lock()
	}
	if n < len(e.Blocks) {
		x.refused.Add(uint64(len(e.Blocks) - n))
		return ErrFull
	}
	return nil
}

// findParent sets p to the place behind the block that parent names for w, in this tier or else in another one. The
// tier is locked; findParent unlocks it while it looks into others. It reports whether there is such a block.
//
// Blocks of classes are no parents for other tiers: full attention holds the blocks before a block that it stores.
//
// If the parent is in another tier, other workers may hold it in this one. It is then found by its sequence hash.
// Therefore each tier has all blocks in bySeq after the first store below the device.
func (x *Index) findParent(w kvblock.Worker, wk *worker, in kvblock.Tier, parent kvblock.EngineHash,
	p *insertPoint) bool {
	t := &x.tiers[in]
	if t.findNamed(w, &wk.held[in], parent, &p.position) {
		p.setAfter()
		return true
	}
	for i := range memoryTiers {
		other, h := &x.tiers[i], &wk.held[i]
		if i == int(in) || h.names == 0 {
			continue
		}
		t.mu.Unlock() // no two tiers are locked at once
		other.mu.Lock()
		ok := other.findNamed(w, h, parent, &p.position)
		if ok {
			p.setAfter()
		}
		other.mu.Unlock()
		t.mu.Lock()
		if ok {
			t.relocate(p)
			return true
		}
	}
	return false
}

// store stores blocks in a tier, the first at p. The tier is locked. It returns how many it stored: less than all if
// the arena is full.
func (x *Index) store(
	w kvblock.Worker, wk *worker, in kvblock.Tier, p *insertPoint, blocks []kvblock.StoredBlock, o storeOptions,
) int {
	n, repeats := x.tiers[in].store(w, &wk.held[in], p, blocks, o)
	if repeats > 0 {
		x.duplicates.Add(uint64(repeats))
	}
	return n
}

// removed applies one removal, whose last blocks may stay in rm. The tier is locked. It does not count the unknown
// hashes in x.unknownRemoved.
func (x *Index) removed(w kvblock.Worker, wk *worker, rm *removal, e *kvblock.Removed) (unknown int) {
	hashes := e.Hashes
	if wk.orphans.count > 0 {
		hashes = nil
		for _, hash := range e.Hashes {
			if !wk.orphans.remove(e.Tier, hash) {
				hashes = append(hashes, hash)
			}
		}
	}
	return x.tiers[e.Tier].removeNames(w, &wk.held[e.Tier], rm, hashes)
}

// Cleared records that w no longer holds a block in any tier.
func (x *Index) Cleared(w kvblock.Worker) {
	x.predictions.forget(w)
	if wk := x.lock(w, false); wk != nil {
		x.clear(w, wk)
		x.unlockWorker(wk)
	}
}

// Forget removes all state of w, which has left the pool. After it returned, another worker may get the number.
func (x *Index) Forget(w kvblock.Worker) {
	x.predictions.forget(w)
	x.SetHybrid(w, nil)
	wk := x.lock(w, false)
	if wk == nil {
		return
	}
	x.clear(w, wk)
	wk.forgotten = true
	x.unlockWorker(wk)
	x.replaceWorker(w, wk, nil)
}

// clear removes w from the holders of every block. Other writers of a tier wait while its runs are scanned, which takes
// some nanoseconds for each run.
func (x *Index) clear(w kvblock.Worker, wk *worker) {
	for i := range wk.held {
		t, h := &x.tiers[i], &wk.held[i]
		if h.names > 0 {
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
		*h = held{}
	}
	wk.orphans = orphans{}
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

// used returns the bytes of records and tables in use.
func (x *Index) used() int64 {
	total := x.workerBytes.Load()
	for i := range x.tiers[:x.usedTiers.Load()] {
		total += x.tiers[i].usedBytes.Load()
	}
	return total
}

// Stats returns the current counts.
func (x *Index) Stats() Stats {
	s := Stats{
		Used:           int(x.used()),
		Bytes:          int(x.workerBytes.Load()),
		MaxBytes:       int(x.maxBytes),
		Orphaned:       x.orphaned.Load(),
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
			s.OrphanBlocks += len(wk.orphans.byName)
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
