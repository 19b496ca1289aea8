// Package budget bounds the memory that requests take from their first byte until they are routed: their bodies, the
// memory for parsing these, and the part of the parsed result that is kept while a request is queued. What they take
// afterwards, until they end, leaves less room for bodies.
//
// The memory has three shares, so that one kind of request cannot block another: bodies, the parsing of large bodies,
// and the parsing of all others. A body that does not fit its share is refused. A parse that does not fit waits.
//
// All methods are safe for concurrent use.
package budget

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"kvepp/prompt/body"
)

// LargeBody is the size in bytes above which a body is large. Parsing it takes milliseconds to seconds of CPU time.
const LargeBody = 1 << 20

// Budget is the memory of all requests that are not routed yet.
type Budget struct {
	// Held counts the memory that a request holds until it is routed: its body, a replacement body, and the token ids
	// of a body that is not large.
	Held Share
	// small and large count the memory for parsing, by the size of the body.
	small, large Share
	// Booked returns the memory in bytes that requests hold after they were routed. It leaves less room for bodies.
	// nil: it is not counted. Set it before the first call.
	Booked func() int
}

// BookedLimit returns the most bytes that Booked may return: half of the share that bodies have.
func (b *Budget) BookedLimit() int { return int(b.Held.limit / 2) }

// largePart and smallPart are the shares of limit bytes for parsing: four sevenths and an eighth. Bodies get the rest,
// about three tenths. So one body of [MaxBody] bytes can always be parsed, even if the other shares are full.
func largePart(limit int) int { return limit / 7 * 4 }
func smallPart(limit int) int { return limit / 8 }

// New returns a budget of limit bytes. A limit of 0 only counts the memory.
func New(limit int) *Budget {
	b := new(Budget)
	b.large.limit, b.small.limit = int64(largePart(limit)), int64(smallPart(limit))
	b.Held.limit = int64(limit) - b.large.limit - b.small.limit
	return b
}

// MaxBody returns the size in bytes of the largest body that can be parsed within a budget of limit bytes. It leaves
// out the constant part of [body.ReadCost].
func MaxBody(limit int) int { return max(largePart(limit)/body.ReadCostPerByte, 1) }

// ForBody returns the smallest budget in bytes that allows parsing a body of size bytes; it is the inverse of MaxBody.
func ForBody(size int) int { return (size*body.ReadCostPerByte + 3) / 4 * 7 }

// Used returns the number of bytes taken from all shares.
func (b *Budget) Used() int { return b.Held.Used() + b.small.Used() + b.large.Used() }

// HoldBody counts more bytes for a body that held before bytes. It reports whether the share has room for them. If not,
// they still count until they are given back. Large bodies leave a quarter of the share free, so that a few of them do
// not cause the bodies of all other requests to be refused.
func (b *Budget) HoldBody(before, more int) bool {
	all := b.Held.used.Add(int64(more))
	if b.Booked != nil {
		all += int64(b.Booked())
	}
	limit := b.Held.limit
	if before+more > LargeBody {
		limit -= limit / 4
	}
	return limit == 0 || all <= limit
}

// ReadShare returns the share for parsing a body of size bytes.
func (b *Budget) ReadShare(size int) *Share {
	if size > LargeBody {
		return &b.large
	}
	return &b.small
}

// KeptShare returns the share that counts the parsed result of a body of size bytes until its request is routed. A
// small result counts with the bodies. A large one counts in the share for parsing large bodies, so that it cannot
// cause other bodies to be refused.
func (b *Budget) KeptShare(size int) *Share {
	if size > LargeBody {
		return &b.large
	}
	return &b.Held
}

// Share is a part of the memory. Waiters get memory first in, first out. A waiter that wants more than the whole share
// gets it alone.
type Share struct {
	limit   int64 // in bytes; 0: unlimited
	used    atomic.Int64
	waiting atomic.Int64 // len(queue), readable without mu

	mu    sync.Mutex
	queue []*waiter // guarded by mu
}

type waiter struct {
	n     int64
	ready chan struct{} // closed when the waiter has its n bytes
}

// Used returns the number of bytes taken.
func (s *Share) Used() int { return int(s.used.Load()) }

// Add takes n bytes even if there is no room. The caller must give them back.
func (s *Share) Add(n int) { s.used.Add(int64(n)) }

// TryTake takes n bytes if there is room and the queue is empty.
func (s *Share) TryTake(n int) bool { return s.waiting.Load() == 0 && s.fits(int64(n)) }

// fits takes n bytes if there is room, and reports whether it did.
func (s *Share) fits(n int64) bool {
	for {
		used := s.used.Load()
		if s.limit > 0 && used > 0 && used+n > s.limit {
			return false
		}
		if s.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// Take takes n bytes. It waits for them until ctx ends, and then returns ctx's error.
func (s *Share) Take(ctx context.Context, n int) error {
	if s.TryTake(n) {
		return nil
	}
	w := &waiter{int64(n), make(chan struct{})}
	s.mu.Lock()
	s.queue = append(s.queue, w)
	s.waiting.Add(1)
	s.serve() // takes bytes that were given back before waiting was incremented
	s.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.queue, w)
	if i < 0 { // the bytes arrived after ctx ended
		return nil
	}
	s.queue = slices.Delete(s.queue, i, i+1)
	s.waiting.Add(-1)
	s.serve() // the next waiters may want less
	return ctx.Err()
}

// Give gives n bytes back.
func (s *Share) Give(n int) {
	s.used.Add(int64(-n))
	if s.waiting.Load() > 0 {
		s.mu.Lock()
		s.serve()
		s.mu.Unlock()
	}
}

// serve gives free bytes to the first waiters. The caller holds mu.
func (s *Share) serve() {
	for len(s.queue) > 0 && s.fits(s.queue[0].n) {
		close(s.queue[0].ready)
		s.queue = slices.Delete(s.queue, 0, 1)
		s.waiting.Add(-1)
	}
}
