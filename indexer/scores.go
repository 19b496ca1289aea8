package indexer

import (
	"iter"
	"math/bits"

	"kvepp/kvblock"
)

// Overlap says how many leading blocks of a prompt one worker holds.
type Overlap struct {
	Worker kvblock.Worker
	// Blocks is what it holds on the device. It may be 0 where a lower tier holds the first block.
	Blocks int
}

// Extension is how many blocks of a prompt one worker holds behind those on its device, without a gap: in host memory, then
// on disk, then in external storage. Tiers do not overlap: a block counts where it is found first.
//
// Source: dynamo-kv-router 1.6.1, indexer (lower tiers).
type Extension struct{ Host, Disk, External int }

// Total returns the blocks of all tiers.
func (e Extension) Total() int { return e.Host + e.Disk + e.External }

// OverlapScores is the answer of one FindMatches. The zero value is ready to use and answers 0 for everybody. Reuse one
// for many queries: its buffers grow to the largest answer seen, after which a query allocates nothing.
//
// It belongs to one goroutine at a time.
type OverlapScores struct {
	device    answer
	predicted answer // scratch

	lower    [][tiers]uint32 // by worker number: blocks behind those of the tiers above; [0] says that the worker is in device
	lowered  []kvblock.Worker
	found    []found  // scratch
	frontier []uint64 // scratch, by block of the prompt
}

// answer is how many leading blocks workers hold in one tier: many workers at once get the same number as fast as one.
type answer struct {
	met   []uint64 // by worker number / 64: a bit for everybody of whom something is said
	depth []uint32 // by worker number, 64 for each word of met; meaningless for whoever is not in met

	query query // scratch
}

// Blocks returns the number of leading blocks of the prompt that w holds on its device; 0 for a worker that holds none or is
// unknown.
func (s *OverlapScores) Blocks(w kvblock.Worker) int { return s.device.blocks(w) }

// Extension returns what w's lower tiers add to that.
func (s *OverlapScores) Extension(w kvblock.Worker) Extension {
	if len(s.lowered) == 0 || int(w) >= len(s.lower) {
		return Extension{}
	}
	l := &s.lower[w]
	return Extension{Host: int(l[kvblock.TierHostPinned]), Disk: int(l[kvblock.TierDisk]), External: int(l[kvblock.TierExternal])}
}

// HasExtensions reports whether a lower tier adds anything to anybody.
func (s *OverlapScores) HasExtensions() bool { return len(s.lowered) > 0 }

// Overlaps yields every worker that holds the prompt's first block in any tier, each once, by number.
func (s *OverlapScores) Overlaps() iter.Seq[Overlap] {
	return func(yield func(Overlap) bool) {
		for j, word := range s.device.met {
			for ; word != 0; word &= word - 1 {
				w := 64*j + bits.TrailingZeros64(word)
				if !yield(Overlap{kvblock.Worker(w), int(s.device.depth[w])}) {
					return
				}
			}
		}
	}
}

// reset forgets the previous answer.
func (s *OverlapScores) reset() {
	clear(s.device.met)
	for _, w := range s.lowered {
		s.lower[w] = [tiers]uint32{}
	}
	s.lowered = s.lowered[:0]
}

// reach returns how many leading blocks w holds in the tiers looked at so far.
func (s *OverlapScores) reach(w kvblock.Worker) int {
	n := uint32(s.device.blocks(w))
	if int(w) < len(s.lower) {
		for _, more := range s.lower[w][1:] {
			n += more
		}
	}
	return int(n)
}

// add counts n blocks in a lower tier for w.
func (s *OverlapScores) add(w kvblock.Worker, in kvblock.Tier, n int) {
	if more := int(w) + 1 - len(s.lower); more > 0 {
		s.lower = append(s.lower, make([][tiers]uint32, more)...)
	}
	l := &s.lower[w]
	if l[0] == 0 {
		l[0] = 1
		s.lowered = append(s.lowered, w)
		s.device.record(w, s.device.blocks(w))
	}
	l[in] += uint32(n)
}

func (a *answer) has(w kvblock.Worker) bool {
	return int(w/64) < len(a.met) && a.met[w/64]>>(w%64)&1 != 0
}

func (a *answer) blocks(w kvblock.Worker) int {
	if !a.has(w) {
		return 0
	}
	return int(a.depth[w])
}

// fit makes room for so many words of met.
func (a *answer) fit(words int) {
	if n := words - len(a.met); n > 0 {
		a.met = append(a.met, make([]uint64, n)...)
		a.depth = append(a.depth, make([]uint32, 64*n)...)
	}
}

// record says n blocks of w.
func (a *answer) record(w kvblock.Worker, n int) {
	a.fit(int(w/64) + 1)
	a.met[w/64] |= 1 << (w % 64)
	a.depth[w] = uint32(n)
}

// recordSet says n blocks of everybody in set.
func (a *answer) recordSet(set []uint64, n int) {
	a.fit(len(set))
	for j, word := range set {
		if word == 0 {
			continue
		}
		depth := (*[64]uint32)(a.depth[64*j:])
		if a.met[j] == 0 && word&(word-1) != 0 { // nobody's number is overwritten, so there is no need to look for the bits
			for i := range depth {
				depth[i] = uint32(n)
			}
			a.met[j] = word
			continue
		}
		a.met[j] |= word
		for ; word != 0; word &= word - 1 {
			depth[bits.TrailingZeros64(word)] = uint32(n)
		}
	}
}
