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
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"kvepp/kvblock"
)

// DefaultMaxEntries is the bound on entries when Config names none. That many take less than 1 GB.
const DefaultMaxEntries = 1 << 24

// maxWorkers bounds worker numbers, which index slices and bitsets here.
const maxWorkers = 1 << 16

// Errors of Stored.
var (
	// ErrParentNotFound: the parent is not a block this worker holds, so nobody can say which prefix the blocks continue.
	ErrParentNotFound = errors.New("indexer: parent block not found")
	// ErrFull: a bound is reached; the blocks before it were taken, the others were not.
	ErrFull = errors.New("indexer: full")
	// ErrTier: the blocks went to a tier below the device, which this index does not keep.
	ErrTier = errors.New("indexer: not a device block")
	// ErrWorker: the worker's number is beyond any that package pool allocates.
	ErrWorker = errors.New("indexer: worker number out of range")
)

// Config bounds an Index.
type Config struct {
	// MaxEntries is the largest number of entries, an entry being one engine hash held by one worker. It bounds the
	// index's memory, at about 50 bytes an entry and less where workers share blocks. At the limit new blocks are refused
	// with ErrFull until others are removed. 0 means DefaultMaxEntries; the largest is 2^28.
	MaxEntries int
}

// Stats counts what the index holds and what it turned away since it was made.
type Stats struct {
	Entries int // engine hashes held, over all workers: one for each (worker, block), and one more for each twin name
	Blocks  int // distinct blocks held by anybody
	Bytes   int // memory of the tables behind them, whether full or not

	ParentNotFound uint64 // stores skipped for want of their parent
	Refused        uint64 // blocks refused because the index is full
	UnknownRemoved uint64 // removed hashes that the worker did not hold
	LowerTier      uint64 // stores and removals of tiers below the device, ignored
}

// Index is the set of blocks held by each worker. Make one with New.
//
// Engine hashes mean something for one worker only, so each worker has its own table of them (names.go). What they name is
// shared: blocks by sequence hash, in runs, with their holders (run.go), found through one table (table.go). Writers of
// different workers take turns on the shared part; FindMatches takes no lock.
type Index struct {
	maxEntries int64
	entries    atomic.Int64

	workers   atomic.Pointer[[]*worker] // by number, nil for those without blocks; replaced whole
	workersMu sync.Mutex                // guards replacing it

	mu     sync.Mutex // guards what follows against other writers; readers need the protocols of run.go and table.go
	arena  arena
	table  table
	blocks int      // in the table
	list   []holder // scratch

	parentNotFound, refused, unknownRemoved, lowerTier atomic.Uint64
}

// worker is what one worker calls its blocks.
type worker struct {
	mu    sync.Mutex // guards the rest; taken before Index.mu
	gone  bool       // forgotten: whoever still has the pointer must look the worker up again
	names names
	twins map[kvblock.SequenceHash]int // blocks with more than one name: how many more
	n     atomic.Int64                 // names.n

	// Buffers.
	seqs  []kvblock.SequenceHash
	fresh []bool

	touched kvblock.EngineHash // of no use but to keep names.touch from being optimised away
}

// New returns an empty index. It fails if a bound makes no sense.
func New(c Config) (*Index, error) {
	if c.MaxEntries < 0 || c.MaxEntries > 1<<28 {
		return nil, fmt.Errorf("indexer: MaxEntries is %d, must be from 0 to %d", c.MaxEntries, 1<<28)
	}
	if c.MaxEntries == 0 {
		c.MaxEntries = DefaultMaxEntries
	}
	x := &Index{maxEntries: int64(c.MaxEntries)}
	x.table.seed = rand.Uint64()
	x.arena.maxPages = 1 << (32 - pageBits)
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
		wk.names.seed = mix(uint64(w), x.table.seed)
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

// Stored records that w now holds e.Blocks.
//
// An engine hash names one block at a time: stored again for the same block it changes nothing (a later removal takes it
// away, however often it was stored), stored for another block it stops naming the old one. Two engine hashes may name
// the same block, for instance two physical copies; w holds it until both are removed.
//
// Errors: ErrParentNotFound (nothing was stored), ErrTier (nothing was stored), ErrWorker (nothing was stored), ErrFull
// (the blocks before the limit were stored).
func (x *Index) Stored(w kvblock.Worker, e kvblock.Stored) error {
	if e.Tier != kvblock.TierDevice {
		x.lowerTier.Add(1)
		return ErrTier
	}
	if w >= maxWorkers {
		return ErrWorker
	}
	wk := x.lock(w, !e.HasParent)
	if wk == nil {
		x.parentNotFound.Add(1)
		return ErrParentNotFound
	}
	defer wk.mu.Unlock()
	var parent kvblock.SequenceHash
	if e.HasParent {
		var ok bool
		if parent, ok = wk.names.get(e.Parent); !ok {
			x.parentNotFound.Add(1)
			return ErrParentNotFound
		}
	}
	stored := x.store(w, wk, parent, e)
	wk.n.Store(int64(wk.names.n))
	if stored < len(e.Blocks) {
		x.refused.Add(uint64(len(e.Blocks) - stored))
		return ErrFull
	}
	return nil
}

// store names and stores the blocks of e, whose parent is the block parent, until something is full. It returns how many
// it did.
func (x *Index) store(w kvblock.Worker, wk *worker, parent kvblock.SequenceHash, e kvblock.Stored) int {
	seqs, fresh := wk.seqs[:0], wk.fresh[:0]
	prev := parent
	for i, b := range e.Blocks {
		if i == 0 && !e.HasParent {
			prev = kvblock.FirstSequenceHash(b.Local)
		} else {
			prev = kvblock.NextSequenceHash(prev, b.Local)
		}
		seqs = append(seqs, prev)
		fresh = append(fresh, false)
	}
	wk.seqs, wk.fresh = seqs, fresh
	wk.touched = wk.names.touch(e.Blocks)

	x.mu.Lock()
	defer x.mu.Unlock()
	from, n := 0, len(seqs) // blocks [from, n) are named and wait to be held
	before, known := parent, e.HasParent
	hold := func(to int) bool {
		done := x.hold(w, wk, before, known, seqs[from:to], fresh[from:to])
		for i := from + done; i < to; i++ {
			if fresh[i] {
				wk.names.remove(e.Blocks[i].Engine)
				x.entries.Add(-1)
			}
		}
		from += done
		if from > 0 {
			before, known = seqs[from-1], true
		}
		return from == to
	}
	for i, b := range e.Blocks {
		old, named := wk.names.put(b.Engine, seqs[i])
		if named && old == seqs[i] {
			continue
		}
		if named { // another block's name until now
			if !hold(i) {
				wk.names.remove(b.Engine)
				x.entries.Add(-1)
				x.unhold(w, wk, []kvblock.SequenceHash{old})
				return from
			}
			x.unhold(w, wk, []kvblock.SequenceHash{old})
		} else if x.entries.Add(1) > x.maxEntries {
			x.entries.Add(-1)
			wk.names.remove(b.Engine)
			n = i
			break
		}
		fresh[i] = true
	}
	hold(n)
	return from
}

// hold makes w hold the blocks seqs, each the successor of the one before it and the first of them the successor of before
// if known says so. fresh[i] says whether block i got one more name. It returns how many blocks it did: fewer than all if
// the arena is exhausted.
func (x *Index) hold(w kvblock.Worker, wk *worker, before kvblock.SequenceHash, known bool, seqs []kvblock.SequenceHash, fresh []bool) int {
	for i := 0; i < len(seqs); {
		if at, ok := x.table.find(&x.arena, seqs[i]); ok {
			k := x.join(w, wk, at, seqs[i:], fresh[i:])
			if k == 0 {
				return i
			}
			i += k
		} else {
			if i > 0 {
				before, known = seqs[i-1], true
			}
			k := x.extend(w, before, known, seqs[i:])
			if k == 0 {
				return i
			}
			i += k
		}
	}
	return len(seqs)
}

// join makes w hold the blocks of seqs that follow each other in one run from address at on. It returns how many these
// are, 0 if the arena is exhausted.
func (x *Index) join(w kvblock.Worker, wk *worker, at ref, seqs []kvblock.SequenceHash, fresh []bool) int {
	r, i := x.runOf(at)
	words := x.arena.record(r)
	n := int(uint32(words[0]))
	k := 0
	for k < len(seqs) && i+k < n && words[runHeader+i+k] == uint64(seqs[k]) {
		k++
	}
	mask := x.maskOf(r, w)
	if want := mask | ones(k)<<i; want != mask && !x.setMask(r, w, want) {
		return 0
	}
	for j := range k {
		if fresh[j] && mask>>(i+j)&1 != 0 { // held already, by another name
			if wk.twins == nil {
				wk.twins = map[kvblock.SequenceHash]int{}
			}
			wk.twins[seqs[j]]++
		}
	}
	// Where prompts part, lookups are faster if the run ends there: those who hold only its beginning then hold all of it.
	if k < len(seqs) && i+k < n && words[1]&manyHolders != 0 {
		x.split(r, i+k)
	}
	return k
}

// extend adds the first blocks of seqs, which nobody holds, as held by w, in one run. It returns how many, 0 if the arena
// is exhausted. before and known are hold's.
func (x *Index) extend(w kvblock.Worker, before kvblock.SequenceHash, known bool, seqs []kvblock.SequenceHash) int {
	r, n, ok := run(0), 0, false
	if known {
		r, n, ok = x.extensible(w, before, len(seqs))
	}
	if ok {
		begin(x.arena.record(r))
	} else {
		if r, ok = x.newRun(min(len(seqs), maxRun)); !ok {
			return 0
		}
		n = 0
		words := x.arena.record(r)
		atomic.StoreUint64(&words[1], uint64(w))
		atomic.StoreUint64(&words[2], 0)
	}
	words := x.arena.record(r)
	k := 0
	for k < len(seqs) && runHeader+n+k < len(words) {
		if _, held := x.table.find(&x.arena, seqs[k]); held {
			break
		}
		atomic.StoreUint64(&words[runHeader+n+k], uint64(seqs[k]))
		x.table.insert(seqs[k], r+ref(runHeader+n+k))
		k++
	}
	atomic.StoreUint64(&words[2], words[2]|ones(k)<<n)
	end(words, n+k)
	x.blocks += k
	return k
}

// extensible returns the run that ends with block before, and its length, if w is its only holder and it has room for
// another block, or can be moved to where there is room.
func (x *Index) extensible(w kvblock.Worker, before kvblock.SequenceHash, want int) (run, int, bool) {
	at, ok := x.table.find(&x.arena, before)
	if !ok {
		return 0, 0, false
	}
	r, i := x.runOf(at)
	words := x.arena.record(r)
	n := int(uint32(words[0]))
	if i != n-1 || n == maxRun || words[1] != uint64(w) {
		return 0, 0, false
	}
	if want = min(n+want, maxRun); runHeader+want > len(words) {
		to, ok := x.copyRun(r, 0, n, want)
		if !ok {
			return 0, 0, false
		}
		x.freeRun(r)
		r = to
	}
	return r, n, true
}

// unhold takes one name from each of these blocks of w, and w from the holders of those that have no other.
func (x *Index) unhold(w kvblock.Worker, wk *worker, seqs []kvblock.SequenceHash) {
	var r run
	var mask uint64 // of blocks of r to be cleared
	for _, seq := range seqs {
		if more := wk.twins[seq]; more > 1 {
			wk.twins[seq] = more - 1
			continue
		} else if more == 1 {
			delete(wk.twins, seq)
			continue
		}
		at, ok := x.table.find(&x.arena, seq)
		if !ok {
			continue
		}
		in, i := x.runOf(at)
		if mask != 0 && in != r {
			x.clearMask(r, w, mask) // moves no block of another run
			mask = 0
		}
		r, mask = in, mask|1<<i
	}
	if mask != 0 {
		x.clearMask(r, w, mask)
	}
}

// clearMask makes w hold no block of r that is in mask, and drops the blocks that nobody holds then.
func (x *Index) clearMask(r run, w kvblock.Worker, mask uint64) {
	was := x.maskOf(r, w)
	if was&mask == 0 {
		return
	}
	if !x.setMask(r, w, was&^mask) {
		x.setMask(r, w, 0) // the arena is exhausted: rather forget the whole run than claim what w no longer has
	}
	n := x.runLen(r)
	alive := x.union(r)
	if dead := ones(n) &^ alive; dead != 0 {
		x.drop(r, n, dead)
	}
}

// drop takes the dead blocks out of r, which has n, from the last one on; what lies behind one becomes a run of its own.
// Should the arena be exhausted, blocks stay that nobody holds.
func (x *Index) drop(r run, n int, dead uint64) {
	for dead != 0 {
		end := bits.Len64(dead) // of the last stretch of dead blocks
		if end < n {
			if _, ok := x.copyRun(r, end, n-end, n-end); !ok {
				return
			}
		}
		n = bits.Len64(^dead & ones(end)) // its start
		words := x.arena.record(r)
		for i := n; i < end; i++ {
			x.table.remove(kvblock.SequenceHash(words[runHeader+i]), r+ref(runHeader+i))
		}
		x.blocks -= end - n
		if n == 0 {
			x.freeRun(r)
			return
		}
		x.cut(r, n)
		dead &= ones(n)
	}
}

// Removed records that w no longer holds the blocks it knows by e.Hashes, and returns how many of these it did not hold.
// What lies behind a removed block stays held, and counts again once the block is back.
func (x *Index) Removed(w kvblock.Worker, e kvblock.Removed) (unknown int) {
	if e.Tier != kvblock.TierDevice {
		x.lowerTier.Add(1)
		return 0
	}
	wk := x.lock(w, false)
	if wk == nil {
		x.unknownRemoved.Add(uint64(len(e.Hashes)))
		return len(e.Hashes)
	}
	defer wk.mu.Unlock()
	wk.seqs = wk.seqs[:0]
	for _, h := range e.Hashes {
		if seq, ok := wk.names.remove(h); ok {
			wk.seqs = append(wk.seqs, seq)
		}
	}
	unknown = len(e.Hashes) - len(wk.seqs)
	x.unknownRemoved.Add(uint64(unknown))
	x.mu.Lock()
	x.unhold(w, wk, wk.seqs)
	x.mu.Unlock()
	x.entries.Add(-int64(len(wk.seqs)))
	wk.n.Store(int64(wk.names.n))
	return unknown
}

// Cleared records that w holds nothing any more.
func (x *Index) Cleared(w kvblock.Worker) {
	if wk := x.lock(w, false); wk != nil {
		x.clear(w, wk)
		wk.mu.Unlock()
	}
}

// Forget drops everything about w, which has left. When it returns, the number may be given to another worker.
func (x *Index) Forget(w kvblock.Worker) {
	wk := x.lock(w, false)
	if wk == nil {
		return
	}
	x.clear(w, wk)
	wk.gone = true
	wk.mu.Unlock()
	x.replaceWorker(w, wk, nil)
}

// clearBatch is how many names clear handles before it lets other writers in.
const clearBatch = 256

// clear makes wk nobody's.
func (x *Index) clear(w kvblock.Worker, wk *worker) {
	drop := func(seq kvblock.SequenceHash) {
		if at, ok := x.table.find(&x.arena, seq); ok {
			r, _ := x.runOf(at)
			x.clearMask(r, w, ones(maxRun)) // all of w's blocks there at once: the first of their names does it
		}
	}
	slots := wk.names.slots
	for len(slots) > 0 {
		batch := slots[:min(clearBatch, len(slots))]
		slots = slots[len(batch):]
		x.mu.Lock()
		for _, s := range batch {
			if s.engine != 0 {
				drop(s.block)
			}
		}
		x.mu.Unlock()
	}
	if wk.names.hasZero {
		x.mu.Lock()
		drop(wk.names.zero)
		x.mu.Unlock()
	}
	x.entries.Add(-int64(wk.names.n))
	wk.names = names{seed: wk.names.seed}
	wk.twins = nil
	wk.n.Store(0)
}

// WorkerEntries returns the number of entries of one worker.
func (x *Index) WorkerEntries(w kvblock.Worker) int {
	all := *x.workers.Load()
	if int(w) >= len(all) || all[w] == nil {
		return 0
	}
	return int(all[w].n.Load())
}

// Stats returns the counts at this moment.
func (x *Index) Stats() Stats {
	s := Stats{
		Entries:        int(x.entries.Load()),
		ParentNotFound: x.parentNotFound.Load(),
		Refused:        x.refused.Load(),
		UnknownRemoved: x.unknownRemoved.Load(),
		LowerTier:      x.lowerTier.Load(),
	}
	for _, wk := range *x.workers.Load() {
		if wk != nil {
			wk.mu.Lock()
			s.Bytes += wk.names.bytes()
			wk.mu.Unlock()
		}
	}
	x.mu.Lock()
	s.Blocks = x.blocks
	s.Bytes += x.arena.bytes() + x.table.bytes()
	x.mu.Unlock()
	return s
}
