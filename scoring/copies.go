package scoring

import (
	"slices"

	"kvepp/kvblock"
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
	blocks   int    // of ActiveSequences.copied: those that its worker did not hold before
	tokens   int    // the same
	bytes    int    // of Copies.bytes
	snapshot uint32 // the latest of Copies.snapshot that had it
}

// copiedLoad is the part of a worker's load that copies brought.
type copiedLoad struct {
	Load
	prefilling int // requests with PrefillTokens
}

// prefill adds prompt tokens of requests.
func (l *copiedLoad) prefill(tokens, requests int) {
	l.PrefillTokens += tokens
	l.prefilling += requests
}

// Copies are one other book's bookings in this book: its origin's Changes, applied. They are priced as own bookings,
// and the busy thresholds and the queue see them. Make one with NewCopies for each origin. Its methods may be called
// concurrently with the book's, but not with one another.
type Copies struct {
	book *ActiveSequences

	// the book's lock guards all below
	byNumber map[uint64]uint32 // number -> index in bookings
	bookings int
	bytes    int
	snapshot uint32 // number of the latest one
	open     bool   // the snapshot has not ended
	lessons  map[kvblock.Worker]*pace
}

// NewCopies returns an empty set of copies.
func (a *ActiveSequences) NewCopies() *Copies {
	a.lock()
	defer a.mu.Unlock()
	a.origins++
	return &Copies{book: a, byNumber: map[uint64]uint32{}}
}

// Apply applies changes in order, at most 32 in each hold of the book's lock. A change is ignored if its booking is not
// known, if a Booked one is known already, or if a number is out of range or beyond a bound: its Kind becomes 0. It
// returns how many bookings a bound left out, or left without hashes. Nothing passed in is kept.
func (c *Copies) Apply(changes []Change) (limited int) {
	for some := range slices.Chunk(changes, atOnce) {
		c.book.lock()
		for i := range some {
			if !c.applyOne(&some[i], &limited) {
				some[i].Kind = 0
			}
		}
		c.book.mu.Unlock()
	}
	return limited
}

func (c *Copies) applyOne(ch *Change, limited *int) bool {
	a := c.book
	index := c.byNumber[ch.Number] // 0: none
	if ch.Kind == Booked {
		return c.add(index, ch, limited)
	}
	if index == 0 {
		return false
	}
	b := &a.bookings[index]
	switch ch.Kind {
	case PrefillDone, PrefillReleased:
		a.completePrefill(index, ch.Kind == PrefillDone)
	case Freed:
		a.end(index)
	case Moved:
		if ch.Worker >= MaxWorkers || ch.BlockSize < 0 || ch.BlockSize > MaxBlockSize {
			return false
		}
		if b.worker != ch.Worker {
			a.move(index, ch.Worker, ch.BlockSize)
		}
	default:
		return false
	}
	return true
}

// add copies a booking. index is that of the same number, whose state a snapshot replaces; 0: there is none.
func (c *Copies) add(index uint32, ch *Change, limited *int) bool {
	a := c.book
	if index != 0 && !c.open || !ch.inRange() {
		return false
	}
	if index != 0 {
		a.end(index)
	}
	if c.bookings >= MaxCopies/a.origins {
		*limited++
		return false
	}
	a.fit(int(ch.Worker) + 1)
	a.version++
	a.now = a.clock() - min(max(ch.Age, 0), seconds(maxSampleSeconds*24))
	index, b := a.newBooking()
	b.worker, b.since, b.blockSize, b.number = ch.Worker, a.now, ch.BlockSize, ch.Number
	b.from = c
	if n := len(a.bookings); n > len(a.copiedParts) {
		a.copiedParts = append(a.copiedParts, make([]copied, n-len(a.copiedParts))...)
	}
	part := &a.copiedParts[index]
	*part = copied{snapshot: c.snapshot}
	c.byNumber[ch.Number] = index
	c.bookings++
	a.copies++

	load := &a.loads[b.worker]
	load.Requests++
	if ch.PrefillTokens > 0 {
		a.beginPrefill(index, ch.PrefillTokens)
		a.copied[b.worker].prefill(ch.PrefillTokens, 1)
	}
	hashes := ch.Hashes()
	held := chainBytes*len(ch.Chains) + 8*hashes
	blocks, tokens := load.ActiveBlocks, load.ActiveTokens
	b.ownBlocks = ch.Blocks
	full := c.bytes+copyBytes+held > maxOriginBytes/a.origins || a.blocks.copied()+held > maxCopiedBytes
	if full && hashes > 0 {
		b.ownBlocks += hashes
		*limited++
		held = 0
	} else {
		c.hold(b, ch)
	}
	part.bytes = copyBytes + held
	c.bytes += part.bytes
	load.ActiveBlocks += b.ownBlocks
	load.ActiveTokens += b.ownBlocks * b.blockSize
	a.count(index, load.ActiveBlocks-blocks, load.ActiveTokens-tokens)
	return true
}

// hold has a new copy hold its chains.
func (c *Copies) hold(b *booking, ch *Change) {
	a := c.book
	a.walker.made, b.leaves = a.walker.made[:0], b.leaves[:0]
	a.blocks.origin = byCopy
	for _, chain := range ch.Chains {
		var leaf uint32
		leaf, a.walker.made = a.blocks.descend(chain, uint32(b.blockSize), a.walker.made)
		if leaf != 0 {
			b.leaves = append(b.leaves, leaf)
		}
	}
	a.holdChains(b)
	a.blocks.origin = byRequest
	a.blocks.bytes[byCopy] += 4 * len(b.leaves)
	a.closeWalks()
}

// inRange reports whether a Booked's numbers are valid. They come from another process.
func (ch *Change) inRange() bool {
	return ch.Worker < MaxWorkers && ch.BlockSize >= 1 && ch.BlockSize <= MaxBlockSize &&
		ch.PrefillTokens >= 0 && ch.PrefillTokens <= MaxISLTokens &&
		ch.Blocks >= 0 && ch.Blocks <= maxCopiedTokens/ch.BlockSize
}

// count adds a copy to its worker's part of copied. blocks and tokens are what the worker did not hold before.
func (a *ActiveSequences) count(index uint32, blocks, tokens int) {
	part, load := &a.copiedParts[index], &a.copied[a.bookings[index].worker]
	part.blocks, part.tokens = blocks, tokens
	load.Requests++
	load.ActiveBlocks += blocks
	load.ActiveTokens += tokens
}

// uncount is the reverse of count.
func (a *ActiveSequences) uncount(index uint32) {
	part, load := &a.copiedParts[index], &a.copied[a.bookings[index].worker]
	load.Requests--
	load.ActiveBlocks -= part.blocks
	load.ActiveTokens -= part.tokens
}

// endCopy takes an ending copy out of its Copies.
func (a *ActiveSequences) endCopy(index uint32) {
	a.uncount(index)
	b, part := &a.bookings[index], &a.copiedParts[index]
	c := b.from
	delete(c.byNumber, b.number)
	c.bookings--
	a.copies--
	c.bytes -= part.bytes
}

// BeginSnapshot begins a snapshot: the Booked changes applied until EndSnapshot replace copies of the same number.
func (c *Copies) BeginSnapshot() {
	c.book.lock()
	defer c.book.mu.Unlock()
	c.snapshot++
	c.open = true
}

// EndSnapshot frees the copies that the snapshot did not have, and returns their number.
func (c *Copies) EndSnapshot() (freed int) {
	c.book.lock()
	c.open = false
	c.book.mu.Unlock()
	return c.free(func(part *copied) bool { return part.snapshot != c.snapshot })
}

// FreeAll ends the origin: it frees all copies, forgets what the origin has learned of workers, and returns the number
// of copies. The caller then lets requests go that wait. Nothing may be applied afterwards.
func (c *Copies) FreeAll() (freed int) {
	c.book.lock()
	c.book.learned.unlearn(c)
	c.book.origins--
	c.book.mu.Unlock()
	return c.free(func(*copied) bool { return true })
}

// free frees the copies that which selects.
func (c *Copies) free(which func(*copied) bool) (freed int) {
	a := c.book
	a.lock()
	defer a.mu.Unlock()
	// A peer dies rarely: a pass over all bookings is cheaper than a list for each origin, kept at every booking.
	for i, since := 1, 0; i < len(a.bookings) && c.bookings > 0; i++ {
		if a.bookings[i].from == c && which(&a.copiedParts[i]) {
			a.end(uint32(i))
			freed++
			since += scannedAtOnce / atOnce
		}
		if since++; since >= scannedAtOnce {
			a.mu.Unlock()
			a.lock()
			since = 0
		}
	}
	return freed
}

// Len returns how many copies there are.
func (c *Copies) Len() int {
	c.book.lock()
	defer c.book.mu.Unlock()
	return c.bookings
}

// CopiedLoads appends to dst the part of each load that copies brought, indexed by worker. A block counts for the
// request that was the first to hold it there. Blocks that the requests generated are left out.
func (a *ActiveSequences) CopiedLoads(dst []Load) []Load {
	a.lock()
	defer a.mu.Unlock()
	for w := range a.copied {
		dst = append(dst, a.copied[w].Load)
	}
	return dst
}
