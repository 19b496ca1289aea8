package scoring

import (
	"slices"
)

const (
	// MaxCopies bounds the bookings that a book copies from others. Each of N origins has one Nth: a booking must not
	// be left out because of another origin's.
	MaxCopies = 1 << 18
	// maxOriginBytes bounds in the same way what copies take as their origins count it: copyBytes, chainBytes and 8
	// for a hash. A booking beyond it, or beyond maxCopiedBytes, is copied without hashes: its blocks count as ones
	// that no other request shares.
	maxOriginBytes        = 1 << 28
	copyBytes, chainBytes = 512, 256
	// maxCopiedBytes bounds the memory of the blocks of all copies: many short runs, each held on several workers,
	// take 30 times 8 bytes a hash.
	maxCopiedBytes = 1 << 29
	// maxCopiedTokens bounds the tokens of the blocks of one booking without hashes, so that sums stay in range.
	maxCopiedTokens = 2 * MaxISLTokens
)

// copied is what a booking has besides if it was copied from another book.
type copied struct {
	of             *Copies
	blocks, tokens int    // of ActiveSequences.copied: those that its worker did not hold before
	bytes          int    // of Copies.bytes
	snapshot       uint32 // the latest of Copies.snapshot that had it
}

// copiedLoad is the part of a worker's load that copies brought.
type copiedLoad struct {
	Load
	prefilling int // requests with PrefillTokens
}

// Copies are one other book's bookings in this book: its origin's Changes, applied. They are priced as own bookings,
// and the busy thresholds and the queue see them. Make one with NewCopies for each origin. Its methods may be called
// concurrently with the book's, but not with one another.
type Copies struct {
	book *ActiveSequences

	// the book's lock guards all below
	byNumber map[uint64]uint32 // number -> index in bookings
	bytes    int
	snapshot uint32 // number of the latest one
}

// NewCopies returns an empty set of copies.
func (a *ActiveSequences) NewCopies() *Copies {
	a.lock()
	defer a.mu.Unlock()
	a.origins++
	return &Copies{book: a, byNumber: map[uint64]uint32{}}
}

// Apply applies changes in order, at most 32 in each hold of the book's lock. A change is ignored if its booking is not
// known, or if a number is out of range or beyond a bound: its Kind becomes 0. It returns how many bookings are new
// here, and how many a bound left out, or left without hashes. Nothing passed in is kept.
func (c *Copies) Apply(changes []Change) (added, limited int) {
	for some := range slices.Chunk(changes, atOnce) {
		c.book.lock()
		for i := range some {
			if !c.applyOne(&some[i], &added, &limited) {
				some[i].Kind = 0
			}
		}
		c.book.mu.Unlock()
	}
	return added, limited
}

func (c *Copies) applyOne(ch *Change, added, limited *int) bool {
	a := c.book
	index := c.byNumber[ch.Number] // 0: none
	switch {
	case ch.Kind == Booked:
		if !c.add(index, ch, limited) {
			return false
		}
		if index == 0 {
			*added++
		}
		return true
	case index == 0:
		return false
	}
	switch ch.Kind {
	case PrefillDone, PrefillReleased:
		a.completePrefill(index, ch.Kind == PrefillDone)
	case Freed:
		a.end(index)
	case PrefillTimed, ResponseTimed:
		sample := *ch
		sample.Worker = a.bookings[index].worker
		return a.learned.take(&sample)
	default:
		return false
	}
	return true
}

// add copies a booking. index is that of the same number, whose state it replaces; 0: there is none.
func (c *Copies) add(index uint32, ch *Change, limited *int) bool {
	a := c.book
	if ch.Worker >= MaxWorkers || ch.BlockSize < 1 || ch.BlockSize > MaxBlockSize || ch.PrefillTokens < 0 ||
		ch.PrefillTokens > MaxISLTokens || ch.Blocks < 0 || ch.Blocks > maxCopiedTokens/ch.BlockSize {
		return false // it comes from another process
	}
	if index != 0 {
		a.end(index)
	}
	if len(c.byNumber) >= MaxCopies/a.origins {
		*limited++
		return false
	}
	a.fit(int(ch.Worker) + 1)
	a.version++
	a.now = a.clock() - min(max(ch.Age, 0), seconds(maxSampleSeconds*24))
	index, b := a.newBooking()
	part, hashes := &copied{of: c, bytes: copyBytes, snapshot: c.snapshot}, ch.Hashes()
	b.worker, b.since, b.blockSize, b.number, b.copied = ch.Worker, a.now, ch.BlockSize, ch.Number, part
	c.byNumber[ch.Number] = index
	a.copies++
	before, holds := a.loads[b.worker], *ch
	held := chainBytes*len(ch.Chains) + 8*hashes
	full := c.bytes+copyBytes+held > maxOriginBytes/a.origins || a.blocks.copied()+held > maxCopiedBytes
	if full && hashes > 0 {
		holds.Chains, holds.Blocks = nil, ch.Blocks+hashes
		*limited++
	} else {
		part.bytes += held
	}
	a.carry(index, &holds)
	c.bytes += part.bytes
	part.blocks = a.loads[b.worker].ActiveBlocks - before.ActiveBlocks
	part.tokens = a.loads[b.worker].ActiveTokens - before.ActiveTokens
	a.count(b, 1)
	return true
}

// count adds a copy to its worker's part of ActiveSequences.copied; with times -1 it takes it off.
func (a *ActiveSequences) count(b *booking, times int) {
	load := &a.copied[b.worker]
	load.Requests += times
	load.ActiveBlocks += times * b.copied.blocks
	load.ActiveTokens += times * b.copied.tokens
}

// endCopy takes an ending copy out of its Copies.
func (a *ActiveSequences) endCopy(b *booking) {
	a.count(b, -1)
	delete(b.copied.of.byNumber, b.number)
	b.copied.of.bytes -= b.copied.bytes
	a.copies--
}

// BeginSnapshot begins a snapshot.
func (c *Copies) BeginSnapshot() { c.snapshot++ }

// EndSnapshot frees the copies that no Booked came for since BeginSnapshot, and returns their number.
func (c *Copies) EndSnapshot() (freed int) {
	a := c.book
	a.lock()
	defer a.mu.Unlock()
	looked := 0
	for _, index := range c.byNumber {
		if a.bookings[index].copied.snapshot != c.snapshot {
			a.end(index)
			freed++
		}
		if looked++; looked%atOnce == 0 {
			a.mu.Unlock()
			a.lock()
		}
	}
	return freed
}

// FreeAll ends the origin: it frees all copies, and returns their number. The caller then lets requests go that wait.
// Nothing may be applied afterwards.
func (c *Copies) FreeAll() (freed int) {
	c.book.lock()
	c.book.origins--
	c.book.mu.Unlock()
	c.BeginSnapshot()
	return c.EndSnapshot()
}

// Len returns how many copies there are.
func (c *Copies) Len() int {
	c.book.lock()
	defer c.book.mu.Unlock()
	return len(c.byNumber)
}

// CopiedLoad returns the part of all loads that copies brought. A block counts for the request that was the first to
// hold it at its worker. Blocks that the requests generated are left out.
func (a *ActiveSequences) CopiedLoad() (all Load) {
	a.lock()
	defer a.mu.Unlock()
	for w := range a.copied {
		part := &a.copied[w]
		all.Requests += part.Requests
		all.PrefillTokens += part.PrefillTokens
		all.ActiveBlocks += part.ActiveBlocks
		all.ActiveTokens += part.ActiveTokens
	}
	return all
}
