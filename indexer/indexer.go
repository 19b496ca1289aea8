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

// tiers is the number of tiers of memory.
const tiers = int(kvblock.TierExternal) + 1

// Errors of Stored.
var (
	// ErrOrphaned: this worker does not hold the parent, so the prefix of the blocks is not known. They are kept until
	// the parent is stored.
	ErrOrphaned = errors.New("indexer: parent block not found; kept until the parent is stored")
	// ErrParentNotFound: the parent is not known, and the store has too many blocks to be kept. No block was stored.
	ErrParentNotFound = errors.New("indexer: parent block not found")
	// ErrFull: no address is left for another block. The blocks before it were stored.
	ErrFull = errors.New("indexer: no address is left for another block")
	// ErrTier: package kvblock does not define the tier.
	ErrTier = errors.New("indexer: unknown tier")
	// ErrWorker: the worker's number is above the range that package pool allocates.
	ErrWorker = errors.New("indexer: worker number out of range")
)

// Config bounds an Index.
type Config struct {
	// MaxBytes bounds the memory of the index, in bytes of records and tables in use. Memory set aside for reuse comes
	// on top, at most a quarter and 4 MiB. At the bound, blocks are evicted (evict.go). 0 means DefaultMaxBytes.
	MaxBytes int64

	// MaxPredicted bounds the blocks of Predict, over all workers; they are not counted in MaxBytes. Beyond it the
	// oldest go, until PruneTarget times as many are left. 0 means DefaultMaxPredicted and DefaultPruneTarget.
	MaxPredicted int
	PruneTarget  float64
}

// Stats counts what the index holds, and what became of events since it was made.
type Stats struct {
	// engine hashes held, over all workers and tiers: one for each (worker, block), and one more for each twin name
	Entries int
	Blocks  int // distinct blocks with a holder, over all tiers
	Used    int // bytes of records and tables in use: what MaxBytes bounds
	Bytes   int // bytes of all pages and tables, whether full or not

	OrphanBlocks int // blocks of stores that wait for their parents
	Predicted    int // (worker, block) pairs held by prediction
	MaxBytes     int // Config's, or the default

	Orphaned       uint64 // stores kept until their parent is stored
	Joined         uint64 // kept stores whose parent was stored later
	ParentNotFound uint64 // stores dropped because their parent is not known
	Duplicates     uint64 // blocks stored again while held
	Evicted        uint64 // entries evicted at the bound
	Refused        uint64 // blocks refused because no address is left
	UnknownRemoved uint64 // removed hashes that the worker did not hold
	Expired        uint64 // predictions that grew too old
	Pruned         uint64 // predictions dropped because there were too many
}

// Index is the set of blocks held by each worker. Make one with New.
//
// Blocks are shared by those who hold them, tier by tier (tier.go): found by sequence hash, with their holders, and
// with what each worker calls them (names.go). Writers of different workers take turns on a tier; FindMatches takes no
// lock.
type Index struct {
	maxBytes    int64
	tiers       [tiers]tier
	workerBytes atomic.Int64 // bytes that belong to one worker each

	workers   atomic.Pointer[[]*worker] // by number, nil for those without blocks; replaced whole
	workersMu sync.Mutex                // guards replacing it

	predictions predictions

	evicting sync.Mutex // held while blocks are evicted; taken before any worker.mu
	atBound  atomic.Bool

	orphaned, joined, parentNotFound, duplicates, evicted, refused, unknownRemoved atomic.Uint64
}

// worker is what one worker calls its blocks.
type worker struct {
	mu        sync.Mutex // guards the rest; taken before tier.mu
	forgotten bool       // set by Forget: a caller with this pointer must look the worker up again
	held      [tiers]held
	orphans   orphans
	bytes     int // as counted in Index.private
}

// New returns an empty index. It fails if a bound makes no sense.
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
	for i := range x.tiers {
		x.tiers[i].init()
		x.tiers[i].arena.hasNames = true
	}
	x.tiers[kvblock.TierDevice].rootFilter = make(rootFilter, 1<<rootFilterBits)
	for i := range x.tiers {
		// Below the device a prompt is met in its middle, where a worker's part above ends.
		x.tiers[i].allIndexed.Store(i != int(kvblock.TierDevice))
	}
	x.predictions.init(c)
	x.workers.Store(&[]*worker{})
	return x, nil
}

// lock returns w's state, locked. If there is none it makes one if create is set, else it returns nil.
func (x *Index) lock(w kvblock.Worker, create bool) *worker {
	for {
		all := *x.workers.Load()
		if int(w) < len(all) && all[w] != nil {
			wk := all[w]
			wk.mu.Lock()
			if !wk.forgotten {
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
			seed := mix(uint64(w), x.tiers[i].bySeq.seed)
			wk.held[i].aliases.seed, wk.held[i].aliasCounts.seed = seed, seed
		}
		x.replaceWorker(w, nil, wk)
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
	for i := range wk.held {
		h := &wk.held[i]
		bytes += h.aliases.bytes() + h.aliasCounts.bytes() + mapEntry*len(h.copies)
	}
	if bytes != wk.bytes {
		x.workerBytes.Add(int64(bytes - wk.bytes))
		wk.bytes = bytes
	}
	wk.mu.Unlock()
}

// entries returns the names that wk has, over all tiers.
func (wk *worker) entries() (n int) {
	for i := range wk.held {
		n += wk.held[i].names
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
// An engine hash names one block at a time. Stored again for the same block it is held until it was removed as often,
// as engines announce every physical copy; stored for another block it stops naming the old one. Two engine hashes may
// name the same block; w holds it until both are removed.
//
// Errors: ErrKeptAside (counted later, if the parent comes), ErrParentNotFound, ErrTier and ErrWorker (nothing was
// stored), ErrFull (the blocks before the limit were stored).
func (x *Index) Stored(w kvblock.Worker, e kvblock.Stored) error { return x.apply(w, e, false) }

// apply is Stored, or Load.
func (x *Index) apply(w kvblock.Worker, e kvblock.Stored, load bool) error {
	_, a := x.Apply(w, []kvblock.Operation{{Kind: kvblock.OpStored, Stored: e}}, load)
	if len(a.Failed) > 0 {
		return a.Failed[0]
	}
	return nil
}

// Removed records that w no longer holds the blocks it knows by e.Hashes in e.Tier, and returns how many of these it
// did not hold. What lies behind a removed block stays held, and counts again once the block is back.
func (x *Index) Removed(w kvblock.Worker, e kvblock.Removed) (unknown int) {
	_, a := x.Apply(w, []kvblock.Operation{{Kind: kvblock.OpRemoved, Removed: e}}, false)
	return a.Unknown
}

// Applied is what came of operations. The zero value is that of none.
type Applied struct {
	Stored, Removed int     // operations
	Failed          []error // of each store that is not in Stored, why
	Unknown         int     // removed hashes that the worker did not hold
}

// How many operations, and of how many blocks, are applied together at most: other writers wait meanwhile, and what was
// sent for must still be near when it is used. An operation of more blocks is applied alone.
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
		if stores && in != kvblock.TierDevice {
			x.tiers[kvblock.TierDevice].indexAll() // see after
		}
		t := &x.tiers[in]
		t.mu.Lock()
		t.prefetchBatch(ops)
		for i := range ops {
			x.applyOne(w, wk, &ops[i], load, &a)
		}
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

// applyOne applies one store or removal. The tier is locked.
func (x *Index) applyOne(w kvblock.Worker, wk *worker, op *kvblock.Operation, load bool, a *Applied) {
	if op.Kind == kvblock.OpRemoved {
		a.Removed++
		a.Unknown += x.removed(w, wk, &op.Removed)
	} else if err := x.stored(w, wk, &op.Stored, load); err != nil {
		a.Failed = append(a.Failed, err)
	} else {
		a.Stored++
	}
}

// stored is Stored, in a tier that is locked.
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

// findParent sets p to the place behind the block that w names parent: in this tier, which is locked, or else in
// another one. It reports whether there is such a block.
//
// Another worker may hold the same block in this tier; it is found by its sequence hash. Therefore a tier keeps every
// block in bySeq once a store below the device was seen.
func (x *Index) findParent(w kvblock.Worker, wk *worker, in kvblock.Tier, parent kvblock.EngineHash,
	p *insertPoint) bool {
	t := &x.tiers[in]
	if t.findNamed(w, &wk.held[in], parent, &p.position) {
		p.setAfter()
		return true
	}
	for i := range x.tiers {
		other, h := &x.tiers[i], &wk.held[i]
		if i == int(in) || h.names == 0 {
			continue
		}
		t.mu.Unlock() // no two are locked at once
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

// store stores blocks in a tier, which is locked, from p on, until something is full. It returns how many it did.
func (x *Index) store(
	w kvblock.Worker,
	wk *worker,
	in kvblock.Tier,
	p *insertPoint,
	blocks []kvblock.StoredBlock,
	o storeOptions,
) int {
	n, repeats := x.tiers[in].store(w, &wk.held[in], p, blocks, o)
	if repeats > 0 {
		x.duplicates.Add(uint64(repeats))
	}
	return n
}

// removed is Removed, in a tier that is locked, without counting what was unknown.
func (x *Index) removed(w kvblock.Worker, wk *worker, e *kvblock.Removed) (unknown int) {
	hashes := e.Hashes
	if wk.orphans.count > 0 {
		hashes = nil
		for _, hash := range e.Hashes {
			if !wk.orphans.remove(e.Tier, hash) {
				hashes = append(hashes, hash)
			}
		}
	}
	return x.tiers[e.Tier].removeNames(w, &wk.held[e.Tier], hashes)
}

// Cleared records that w holds no block any more, in any tier.
func (x *Index) Cleared(w kvblock.Worker) {
	x.predictions.forget(w)
	if wk := x.lock(w, false); wk != nil {
		x.clear(w, wk)
		x.unlockWorker(wk)
	}
}

// Forget removes everything about w, which has left the pool. When it returns, the number may be given to another
// worker.
func (x *Index) Forget(w kvblock.Worker) {
	x.predictions.forget(w)
	wk := x.lock(w, false)
	if wk == nil {
		return
	}
	x.clear(w, wk)
	wk.forgotten = true
	x.unlockWorker(wk)
	x.replaceWorker(w, wk, nil)
}

// clear removes wk from the holders of every block. Other writers of a tier wait while its runs are scanned, some
// nanoseconds for each.
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
		*h = held{aliases: aliasMap{seed: h.aliases.seed}, aliasCounts: aliasMap{seed: h.aliasCounts.seed}}
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
	for i := range x.tiers {
		total += x.tiers[i].usedBytes.Load()
	}
	return total
}

// Stats returns the counts at this moment.
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
