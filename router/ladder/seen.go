package ladder

import (
	"sort"
	"sync"
	"time"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

const (
	// Lookback is for how long a block counts as requested before.
	Lookback = 24 * time.Hour

	// DefaultSeenBytes is the memory of a Seen unless the operator gives another.
	DefaultSeenBytes = 16 << 20

	// MinSeenBytes is the least memory of a Seen.
	MinSeenBytes = 64 << 10

	slots        = 8 // of a bucket, which is one cache line
	clockBits    = 16
	clockMask    = 1<<clockBits - 1
	tick         = 2 * time.Minute  // 2^16 ticks are 91 days
	maxSampling  = 8                // at most one of 2^8 blocks is kept
	refreshAfter = time.Hour        // the known blocks of a prompt get a new time if one that was looked at is older
	sampledBits  = 63 - maxSampling // where the bits begin that decide it
)

// Seen remembers which blocks were requested within Lookback. It takes a fixed amount of memory.
//
// While it has room it knows every block. If it has to forget blocks that are younger than Lookback, it goes over to
// keeping one of 2, 4 ... 256 blocks, chosen by their hash. The boundary between the known and the new blocks of a
// prompt then lies between two such blocks; Note takes the middle, or 0 if it knows none. So with one of N blocks kept,
// a prompt's number is off by about N/4 blocks on average, either way. A block that was never requested is taken for
// known with a probability below 1e-9 at the default size (36 or more further bits of its hash are compared in 8
// places).
type Seen struct {
	mu       sync.Mutex // guards all below
	buckets  [][slots]uint64
	start    time.Time
	sampling uint        // one of 2^sampling blocks is kept
	early    int         // blocks forgotten within Lookback, since sampling grew
	kept     []keptBlock // scratch of Note
}

type keptBlock struct {
	x  uint64
	at int // its place in the prompt, counted from 1
}

// NewSeen returns a sketch of at most this many bytes, and at least MinSeenBytes.
func NewSeen(bytes int) *Seen {
	n := MinSeenBytes / (8 * slots)
	for n*2*8*slots <= bytes {
		n *= 2
	}
	return &Seen{buckets: make([][slots]uint64, n), start: time.Now()}
}

// Sampling returns N if one of N blocks is kept.
func (s *Seen) Sampling() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return 1 << s.sampling
}

// Note returns how many leading blocks of a prompt were requested within Lookback, and remembers all of them. space
// keeps apart the blocks of models that may have equal hashes. A hash names a block and all before it, so the known
// blocks of a prompt come first, and a binary search finds where they end.
func (s *Seen) Note(space uint64, chain []kvblock.SequenceHash) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := uint64(time.Since(s.start)/tick) & clockMask
	s.kept = s.kept[:0]
	for i, hash := range chain {
		if x := mix(uint64(hash) ^ space); s.keeps(x) {
			s.kept = append(s.kept, keptBlock{x, i + 1})
		}
	}
	stale := false
	n := sort.Search(len(s.kept), func(i int) bool {
		age := s.age(s.kept[i].x, now)
		stale = stale || age > uint64(refreshAfter/tick) && age < uint64(Lookback/tick)
		return age >= uint64(Lookback/tick)
	})
	known, ends := 0, len(chain)+1 // the last known block and the first new one, counted from 1
	if n > 0 {
		known = s.kept[n-1].at
	}
	if n < len(s.kept) {
		ends = s.kept[n].at
	}
	first := n
	if stale {
		first = 0
	}
	for i := first; i < len(s.kept); i++ {
		if ahead := i + 8; ahead < len(s.kept) {
			prefetch.Lines(unsafe.Pointer(s.bucket(s.kept[ahead].x)), 1)
		}
		s.put(s.kept[i].x, now)
	}
	if s.sampling == 0 || known == 0 {
		return known
	}
	return (known + ends - 1) / 2
}

// keeps reports whether a block is one of those that are kept.
func (s *Seen) keeps(x uint64) bool { return x>>sampledBits&(1<<s.sampling-1) == 0 }

func (s *Seen) bucket(x uint64) *[slots]uint64 { return &s.buckets[x&uint64(len(s.buckets)-1)] }

// age returns the ticks since a block's latest request, or Lookback's if it is not known.
func (s *Seen) age(x, now uint64) uint64 {
	name := x &^ clockMask
	for _, slot := range s.bucket(x) {
		if slot&^clockMask == name {
			return min((now-slot)&clockMask, uint64(Lookback/tick))
		}
	}
	return uint64(Lookback / tick)
}

// put makes now the time of a block's latest request. A new block takes the place of one that is not needed, or else of
// the oldest.
func (s *Seen) put(x, now uint64) {
	bucket, name := s.bucket(x), x&^clockMask
	victim, oldest := 0, uint64(0)
	for i, slot := range bucket {
		if slot&^clockMask == name {
			bucket[i] = name | now
			return
		}
		age := (now - slot) & clockMask
		if slot == 0 || age >= uint64(Lookback/tick) || !s.keeps(slot) {
			age = clockMask + 1 // not needed
		}
		if age >= oldest {
			victim, oldest = i, age
		}
	}
	if oldest <= clockMask {
		s.forgotEarly()
	}
	bucket[victim] = name | now
}

// forgotEarly counts a block that had to go within Lookback. After a sixteenth of all slots it makes room by keeping
// half as many blocks.
func (s *Seen) forgotEarly() {
	s.early++
	if s.early > len(s.buckets)*slots/16 && s.sampling < maxSampling {
		s.early = 0
		s.sampling++
	}
}

// mix spreads the bits of a hash (the finalizer of MurmurHash3). The result is never 0 above the bits of the clock.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33 | 1<<63
}
