// Package replica keeps copies of other replicas' load books and sessions, without I/O: one writer for each origin, a
// numbered log, a snapshot where the log does not reach.
//
// A [Sender] owns this process's log: the latest entries, and the live bookings as entries, so that a snapshot never
// locks the book. Each peer that follows the log has a [Cursor]. A [Receiver] owns what this process knows of its
// peers: which origin a connection serves, how far its log was read, and when its copies end. Its step takes an input
// (a connection, a message, a tick, a worker that joined) and returns effects: what to send, and what to change in the
// copies. Neither has a clock, a goroutine or a socket: the caller passes the time, and package link connects them.
// Nothing here merges: each origin changes its own bookings alone, and sessions carry a version that the table of
// sessions compares.
//
// Times are ages. An entry has the time of its owner's monotonic clock, a message has the time at which it was sent on
// that clock, and the difference is the age at the receiver. Wall clocks are never compared.
//
// Concurrency: neither type locks. The caller holds one lock for a Sender with its cursors and one for a Receiver.
package replica

import (
	"time"

	"kvepp/kvblock"
)

// Identity names one start of one process.
type Identity struct {
	Origin uint64 // random, not 0
	Epoch  uint64 // start of the process; the same origin with another epoch is another process
}

// Worker names a worker independently of the dense numbers of a process: by its endpoint and data-parallel rank.
type Worker struct {
	Name string
	Rank uint32
}

// Kind is what an entry says.
type Kind uint8

// The kinds. Their numbers are on the wire.
const (
	Booked          Kind = 1 + iota // a request was booked on a worker
	PrefillDone                     // its first content came
	PrefillReleased                 // its prefill ended at an unknown time
	Freed                           // it ended
	Moved                           // another worker answers it
	Output                          // it generated blocks
	Bound                           // a session was bound to a worker
	Used                            // a request of a session was served
	Ended                           // a session ended
	Learned                         // what the owner has learned of a worker
	Waits                           // how many requests wait in its queue, and since when the oldest
	kinds
	named Kind = 0xff // a stream's number of a worker; not part of the log
)

var kindNames = [kinds]string{"", "booked", "prefill_done", "prefill_released", "freed", "moved", "output",
	"bound", "used", "ended", "learned", "waits"}

// String returns the kind as a label's value.
func (k Kind) String() string {
	if k == 0 || k >= kinds {
		return "unknown"
	}
	return kindNames[k]
}

// Kinds returns the names of all kinds.
func Kinds() []string { return kindNames[1:] }

// Entry is one change at its owner. Which fields count depends on the kind.
type Entry struct {
	Kind   Kind
	Number uint64 // of the booking at its owner: all kinds up to Output
	Worker Worker // Booked, Moved, Bound, Used, Learned

	BlockSize     int // tokens: Booked, Moved
	PrefillTokens int // Booked
	// Blocks are blocks without hashes: of a Booked prompt, or all that were generated so far: Output. Waits: requests.
	Blocks int
	// Left is the share of the answer still to come, 0..1; below 0: not known. Output.
	Left float64
	// Chains are the sequence hashes of the full blocks of a Booked prompt, for each prompt of the request. They are
	// valid while the effect is handled.
	Chains [][]kvblock.SequenceHash

	// At is when the change happened, on the owner's clock; Age is the time since, for a receiver. Booked, Moved,
	// Bound, Used. Waits: of the oldest request.
	At, Age time.Duration

	// A session: Bound, Used, Ended.
	Key     [32]byte
	Version uint64 // Lamport clock of the binding
	Writer  uint64 // origin that bound it
	TTL     time.Duration

	Values []float64 // Learned
	// Classes are the policy classes in which requests wait, at most MaxClasses: Waits. nil: a peer of version 1 told
	// it.
	Classes []ClassWait
}

// ClassWait is what waits in one policy class of a queue.
type ClassWait struct {
	Class         uint64        // identifies model and class
	Quantum, Cost int           // tokens: of the class, and of the work for its oldest request
	At, Age       time.Duration // of its oldest request, as Entry's
}

// hashes returns how many hashes the chains have.
func (e *Entry) hashes() (n int) {
	for _, c := range e.Chains {
		n += len(c)
	}
	return n
}

// Bounds. Messages beyond them are malformed.
const (
	MaxHashes  = 1 << 16 // of one booking; a longer prompt counts as blocks without hashes
	maxChains  = 1 << 12
	maxName    = 512 // bytes of a worker's name
	maxGroup   = 512 // bytes
	maxWorkers = 1 << 16
	maxValues  = 64
	MaxClasses = 64      // of Waits
	maxCount   = 1 << 40 // tokens, blocks
	maxRank    = 1 << 20
	maxEntries = 1 << 16 // of a message
	maxAge     = 30 * 24 * time.Hour

	// MaxMessage is the most bytes of a message. An entry has at most MaxHashes hashes of 8 bytes.
	MaxMessage = 1 << 20
)
