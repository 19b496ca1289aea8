// Package budget bounds the memory that requests take from their first byte until they are routed: their bodies, what
// it takes to read these, and what stays of that while a request waits for its turn.
//
// The memory has three shares, so that no kind of request keeps another from being read: bodies, the reading of large
// bodies, and the reading of all others. What does not fit a share is refused (a body), or waits its turn (a reading).
//
// Concurrency: all methods may be called from any goroutine.
package budget

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"kvepp/internal/apibody"
)

// LargeBody is the size in bytes above which a body is large: its reading takes milliseconds to seconds of a processor.
const LargeBody = 1 << 20

// Budget is the memory of all requests that are not routed yet.
type Budget struct {
	// Held counts what is held until a request is routed: its body, what goes on in its place, the token ids of one
	// that is not large.
	Held Share
	// small and large count what reading takes, by the size of the body.
	small, large Share
}

// largePart and smallPart are the parts of limit bytes that reading gets: four sevenths and an eighth. Bodies get the
// rest, about three tenths. One body of [MaxBody] bytes can then always be read, whatever else is held.
func largePart(limit int) int { return limit / 7 * 4 }
func smallPart(limit int) int { return limit / 8 }

// New returns a budget of limit bytes. limit 0: no limit, memory is only counted.
func New(limit int) *Budget {
	b := new(Budget)
	b.large.limit, b.small.limit = int64(largePart(limit)), int64(smallPart(limit))
	b.Held.limit = int64(limit) - b.large.limit - b.small.limit
	return b
}

// perByte is how many bytes reading takes for a byte of a body, but for what it takes for any body.
func perByte() int { return apibody.ReadCostPerByte }

// MaxBody returns the size in bytes of the largest body that a budget of limit bytes lets be read.
func MaxBody(limit int) int { return max(largePart(limit)/perByte(), 1) }

// ForBody returns the least budget in bytes that lets a body of size bytes be read.
func ForBody(size int) int { return (size*perByte() + 3) / 4 * 7 }

// Used returns how many bytes are taken in all.
func (b *Budget) Used() int { return b.Held.Used() + b.small.Used() + b.large.Used() }

// HoldBody counts that a body, of which before bytes were held, takes more bytes, and reports whether it may. If not,
// the bytes count all the same until they are given back. Large bodies leave a quarter of the share to others, so that
// a few of them do not have everybody else's refused.
func (b *Budget) HoldBody(before, more int) bool {
	all := b.Held.used.Add(int64(more))
	limit := b.Held.limit
	if before+more > LargeBody {
		limit -= limit / 4
	}
	return limit == 0 || all <= limit
}

// ReadShare returns the share in which a body of size bytes is read.
func (b *Budget) ReadShare(size int) *Share {
	if size > LargeBody {
		return &b.large
	}
	return &b.small
}

// KeptShare returns the share in which what was read of a body of size bytes counts until its request is routed: with the
// bodies, or where large ones are read, so that these keep nobody else's from being held.
func (b *Budget) KeptShare(size int) *Share {
	if size > LargeBody {
		return &b.large
	}
	return &b.Held
}

// Share is a part of the memory. Whoever waits gets it in the order of coming; one that wants more than the whole share
// gets it alone.
type Share struct {
	limit   int64 // bytes; 0: none
	used    atomic.Int64
	waiting atomic.Int64 // len(line)

	mu   sync.Mutex
	line []*waiter
}

type waiter struct {
	n     int64
	ready chan struct{} // closed when it has n bytes
}

// Used returns how many bytes are taken.
func (s *Share) Used() int { return int(s.used.Load()) }

// Add counts n bytes whether or not there is room for them. They are to be given back.
func (s *Share) Add(n int) { s.used.Add(int64(n)) }

// TryTake takes n bytes if there is room and nobody waits for it.
func (s *Share) TryTake(n int) bool { return s.waiting.Load() == 0 && s.fits(int64(n)) }

// fits takes n bytes if there is room.
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

// Take takes n bytes, and waits for them as long as ctx lasts. It returns ctx's error if they do not come.
func (s *Share) Take(ctx context.Context, n int) error {
	if s.TryTake(n) {
		return nil
	}
	w := &waiter{int64(n), make(chan struct{})}
	s.mu.Lock()
	s.line = append(s.line, w)
	s.waiting.Add(1)
	s.serve() // what was given back before waiting said so
	s.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.line, w)
	if i < 0 { // it came meanwhile
		return nil
	}
	s.line = slices.Delete(s.line, i, i+1)
	s.waiting.Add(-1)
	s.serve() // those behind it may want less
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

// serve gives those who wait what there is. The caller holds mu.
func (s *Share) serve() {
	for len(s.line) > 0 && s.fits(s.line[0].n) {
		close(s.line[0].ready)
		s.line = slices.Delete(s.line, 0, 1)
		s.waiting.Add(-1)
	}
}
