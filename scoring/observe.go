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
	Booked          ChangeKind = iota + 1 // it was made, moved here, or a snapshot says that it exists
	PrefillDone                           // its first content came: MarkPrefillCompleted
	PrefillReleased                       // its prefill ended at an unknown time: ReleasePrefill
	Freed                                 // it ended, by Free, Forget or Expiry, or moved to another worker
	PrefillTimed                          // its prefill took some time, without waiting for others
	ResponseTimed                         // its response took some time: LearnOutput
)

// Change is one change of a booking, or a time that was measured with it, from which all books learn. Every kind has
// Kind, Number and Worker, which is the booking's worker after it.
type Change struct {
	Kind ChangeKind
	// Number is the booking's, unique among all bookings that a book ever makes.
	Number uint64
	Worker kvblock.Worker

	BlockSize     int                      // Booked: in tokens, at least 1
	PrefillTokens int                      // Booked: tokens to prefill; 0: none, or their prefill has ended
	Blocks        int                      // Booked: blocks without hashes, which no other request shares
	Chains        [][]kvblock.SequenceHash // Booked: the blocks with hashes, by prompt
	Age           time.Duration            // Booked: since the booking was made; 0 outside a snapshot

	Tokens int           // PrefillTimed: computed; ResponseTimed: of the response
	Held   int           // ResponseTimed: tokens that the worker held at its end; 0: that does not count
	Took   time.Duration // PrefillTimed: since the booking was made; ResponseTimed: since the first token
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

// tell tells the observer, if there is one, of a change of an own booking. chains are those that it holds, for Booked.
func (a *ActiveSequences) tell(kind ChangeKind, b *booking, chains [][]kvblock.SequenceHash) {
	if a.observer != nil && b.copied == nil {
		a.change = b.change(kind, chains)
		a.observer(&a.change)
		a.change = Change{} // keep no prompt from the garbage collector
	}
}

func (b *booking) change(kind ChangeKind, chains [][]kvblock.SequenceHash) Change {
	return Change{Kind: kind, Number: b.number, Worker: b.worker, BlockSize: b.blockSize,
		PrefillTokens: b.prefillTokens, Blocks: b.ownBlocks, Chains: chains}
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
// changes since its beginning, give the present state, also if some of them are in it.
func (a *ActiveSequences) Snapshot(place int, each func(*Change) bool) (next int, more bool) {
	a.lock()
	defer a.mu.Unlock()
	var m chainMemory
	for looked, told := 0, 0; place < len(a.bookings); place++ {
		if looked++; looked > scannedAtOnce || told == atOnce {
			return place, true
		}
		if b := &a.bookings[place]; b.active() && b.copied == nil {
			told++
			change := b.change(Booked, m.chainsOf(a, b))
			if change.Age = a.clock() - b.since; !each(&change) {
				return place + 1, true
			}
		}
	}
	return place, false
}

// chainMemory is the scratch memory of chainsOf.
type chainMemory struct {
	chains [][]kvblock.SequenceHash
	hashes []kvblock.SequenceHash
	path   []uint32
}

// chainsOf returns the chains that a booking holds.
func (m *chainMemory) chainsOf(a *ActiveSequences, b *booking) [][]kvblock.SequenceHash {
	m.chains, m.hashes = m.chains[:0], m.hashes[:0]
	for _, leaf := range b.leaves {
		m.path = m.path[:0]
		for id := leaf; id != 0; id = a.blocks.runs[id].parent {
			m.path = append(m.path, id)
		}
		from := len(m.hashes)
		for _, id := range slices.Backward(m.path) {
			m.hashes = append(m.hashes, a.blocks.runs[id].hashes...)
		}
		// If the memory grew, earlier chains stay in its former place.
		m.chains = append(m.chains, m.hashes[from:len(m.hashes):len(m.hashes)])
	}
	return m.chains
}
