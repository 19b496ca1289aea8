package scoring

import (
	"time"

	"kvepp/kvblock"
)

// Several replicas of kvepp may send requests to the same workers. Each books its own requests in its own book, and
// tells the others what it changed: Observe and Snapshot. The others keep Copies of these bookings, which are priced as
// their own ones.

// ChangeKind is what happened to a booking.
type ChangeKind uint8

// The kinds.
const (
	Booked          ChangeKind = iota + 1 // it was made, or a snapshot says that it exists
	PrefillDone                           // its first content came: MarkPrefillCompleted
	PrefillReleased                       // its prefill ended at an unknown time: ReleasePrefill
	Freed                                 // it ended, by Free, Forget or Expiry
	Moved                                 // it moved to another worker: MoveTo
	Output                                // it generated blocks: AddOutputBlocks
)

// Change is one change of a booking. Every kind has Kind, Number and Worker, which is the booking's worker after it.
type Change struct {
	Kind ChangeKind
	// Number is the booking's, unique among all bookings that a book ever makes.
	Number uint64
	Worker kvblock.Worker

	BlockSize     int                      // Booked: in tokens, at least 1. Moved: as of MoveTo
	PrefillTokens int                      // Booked: tokens to prefill; 0: none, or their prefill has ended
	Blocks        int                      // Booked: blocks without hashes, which no other request shares
	Chains        [][]kvblock.SequenceHash // Booked: the blocks with hashes, by prompt
	Output        int                      // Output, and Booked in a snapshot: all blocks generated so far
	Left          float64                  // Output, and Booked in a snapshot: as of the latest AddOutputBlocks
	Age           time.Duration            // Booked: since the booking was made; 0 outside a snapshot
}

// Observe has f called with each change of the book's own bookings, in the order in which they happen. f runs under
// the book's lock: it must be fast, must not block and must not call the book. The Change and its Chains belong to the
// caller of the book and are valid only during the call. Call Observe once, before the first booking.
func (a *ActiveSequences) Observe(f func(*Change)) {
	a.lock()
	defer a.mu.Unlock()
	a.observer = f
}

// tell tells the observer, which there must be, of a change without further numbers. Copies are not told.
func (a *ActiveSequences) tell(kind ChangeKind, b *booking) {
	if b.from == nil {
		a.change = Change{Kind: kind, Number: b.number, Worker: b.worker}
		a.observer(&a.change)
	}
}

// tellBooked tells the observer, which there must be, of a new booking. v is what it holds; nil: only own blocks.
func (a *ActiveSequences) tellBooked(b *booking, v *variant) {
	a.change = Change{Kind: Booked, Number: b.number, Worker: b.worker, BlockSize: b.blockSize,
		PrefillTokens: b.prefillTokens, Blocks: b.ownBlocks, Left: NotKnown}
	if v != nil {
		a.change.Chains = v.prompt.Chains
	}
	a.observer(&a.change)
	a.change = Change{} // keep no prompt from the garbage collector
}

// atOnce bounds the bookings that one hold of the lock copies, applies or frees, so that choices do not wait for it.
// scannedAtOnce bounds those that it only looks at.
const (
	atOnce        = 32
	scannedAtOnce = 4096
)

// Snapshot calls begin once and then each with every own booking as it is then, as a Booked. All calls run under the
// book's lock, as those of Observe, and the lock is released between every 32 bookings. So each may be given changes
// that the observer gets after begin, too. To apply the snapshot and then all changes since begin gives the
// present state: what is there already is ignored.
func (a *ActiveSequences) Snapshot(begin func(), each func(*Change)) {
	a.lock()
	begin()
	var s snapshotter
	for i, since := 1, 0; i < len(a.bookings); i++ {
		if b := &a.bookings[i]; b.active() && b.from == nil {
			each(s.change(a, b))
			since += scannedAtOnce / atOnce
		}
		if since++; since >= scannedAtOnce {
			a.mu.Unlock()
			a.lock()
			since = 0
		}
	}
	a.mu.Unlock()
}

// snapshotter is the scratch memory of a snapshot.
type snapshotter struct {
	Change
	hashes []kvblock.SequenceHash
	ends   []int // in hashes, of each chain
	path   []uint32
}

// change returns a booking as a Booked.
func (s *snapshotter) change(a *ActiveSequences, b *booking) *Change {
	s.Change = Change{Kind: Booked, Number: b.number, Worker: b.worker, BlockSize: b.blockSize,
		PrefillTokens: b.prefillTokens, Blocks: b.ownBlocks, Chains: s.Chains[:0], Output: b.output.blocks,
		Left: NotKnown, Age: a.clock() - b.since}
	if b.output.own != 0 { // without a weight the blocks count in full, as with all of the answer to come
		s.Left = b.output.own + 1
	}
	s.hashes, s.ends = s.hashes[:0], s.ends[:0]
	for _, leaf := range b.leaves {
		s.path = s.path[:0]
		for id := leaf; id != 0; id = a.blocks.runs[id].parent {
			s.path = append(s.path, id)
		}
		for i := len(s.path) - 1; i >= 0; i-- {
			s.hashes = append(s.hashes, a.blocks.runs[s.path[i]].hashes...)
		}
		s.ends = append(s.ends, len(s.hashes))
	}
	from := 0
	for _, to := range s.ends {
		s.Chains = append(s.Chains, s.hashes[from:to:to])
		from = to
	}
	return &s.Change
}
