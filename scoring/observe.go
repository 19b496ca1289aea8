package scoring

import (
	"slices"
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
	Age           time.Duration            // Booked: since the booking was made; 0 outside a snapshot
}

// Hashes returns how many hashes the chains have.
func (ch *Change) Hashes() (n int) {
	for _, chain := range ch.Chains {
		n += len(chain)
	}
	return n
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
		PrefillTokens: b.prefillTokens, Blocks: b.ownBlocks}
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

// Snapshot calls each with own bookings as they are, as Booked, from a place on; the first place is 0. It ends after 32
// bookings, or when each returns false, and returns the place of the next call; more is false at the end. each runs
// under the book's lock, as the observer does, and the lock is free between the calls. So a snapshot, and then all
// changes since its beginning, give the present state: what is there already is ignored.
func (a *ActiveSequences) Snapshot(place int, each func(*Change) bool) (next int, more bool) {
	a.lock()
	defer a.mu.Unlock()
	var s snapshotter
	for looked, told := 0, 0; place < len(a.bookings); place++ {
		if looked++; looked > scannedAtOnce || told == atOnce {
			return place, true
		}
		if b := &a.bookings[place]; b.active() && b.from == nil {
			if told++; !each(s.change(a, b)) {
				return place + 1, true
			}
		}
	}
	return place, false
}

// snapshotter is the scratch memory of a snapshot.
type snapshotter struct {
	Change
	hashes []kvblock.SequenceHash
	path   []uint32
}

// change returns a booking as a Booked.
func (s *snapshotter) change(a *ActiveSequences, b *booking) *Change {
	s.Change = Change{Kind: Booked, Number: b.number, Worker: b.worker, BlockSize: b.blockSize,
		PrefillTokens: b.prefillTokens, Blocks: b.ownBlocks, Chains: s.Chains[:0], Age: a.clock() - b.since}
	s.hashes = s.hashes[:0]
	for _, leaf := range b.leaves {
		s.path = s.path[:0]
		for id := leaf; id != 0; id = a.blocks.runs[id].parent {
			s.path = append(s.path, id)
		}
		from := len(s.hashes)
		for _, id := range slices.Backward(s.path) {
			s.hashes = append(s.hashes, a.blocks.runs[id].hashes...)
		}
		// If the memory grew, earlier chains stay in its former place.
		s.Chains = append(s.Chains, s.hashes[from:len(s.hashes):len(s.hashes)])
	}
	return &s.Change
}
