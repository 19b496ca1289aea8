package indexer

import (
	"iter"
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// Overlap says how many leading blocks of a prompt one worker holds.
type Overlap struct {
	Worker kvblock.Worker
	// Blocks is the number of leading blocks on the device. It may be 0 if a lower tier holds the first block, or if
	// classes cut the prefix (Cut).
	Blocks int
}

// Extension is how many blocks of a prompt one worker holds behind those on its device, without a gap: in host memory,
// then on disk, then in external storage. Tiers do not overlap: a block counts where it is found first.
//
// Source: dynamo-kv-router 1.6.1, indexer (lower tiers).
type Extension struct{ Host, Disk, External int }

// Total returns the blocks of all tiers.
func (e Extension) Total() int { return e.Host + e.Disk + e.External }

// OverlapScores is the response of one FindMatches. The zero value is ready to use and answers 0 for every worker.
// Reuse one for many queries: its buffers grow to the largest response seen, after which a query allocates nothing.
//
// It belongs to one goroutine at a time.
type OverlapScores struct {
	device    tierScores
	predicted tierScores // of predictions alone

	// by worker number: blocks that continue those of the tiers above; [0] is 1 if the worker is in extended
	lower      [][memoryTiers]uint32
	extended   []kvblock.Worker
	extensions []extension // scratch
	frontier   []uint64    // scratch, by block of the prompt

	cuts     []Cut       // by worker number, of workers in cutKnown
	cutKnown []uint64    // by worker number / 64: workers of hybrid models; empty: none
	classes  classScores // scratch
	prompt   Prompt      // of FindMatches, while it runs
}

// tierScores has the number of leading blocks that workers hold in one tier.
type tierScores struct {
	known  []uint64 // by worker number / 64: a bit for each worker with a count
	counts []uint32 // by worker number, 64 for each word of known; without meaning for workers that are not in known

	query query // scratch
}

const maxLead = 1<<lengthBits - 1 // blocks of a run, for all that a reader may see

// Blocks returns the number of leading blocks of the prompt that w holds on its device; 0 for a worker that holds none
// or is unknown.
func (s *OverlapScores) Blocks(w kvblock.Worker) int { return s.device.blocks(w) }

// Extension returns what w's lower tiers add to that.
func (s *OverlapScores) Extension(w kvblock.Worker) Extension {
	if len(s.extended) == 0 || int(w) >= len(s.lower) {
		return Extension{}
	}
	l := &s.lower[w]
	return Extension{
		Host:     int(l[kvblock.TierHostPinned]),
		Disk:     int(l[kvblock.TierDisk]),
		External: int(l[kvblock.TierExternal]),
	}
}

// Cut returns what the classes of a worker of a hybrid model did to its count; the zero value for other workers.
func (s *OverlapScores) Cut(w kvblock.Worker) Cut {
	if int(w/64) >= len(s.cutKnown) || s.cutKnown[w/64]>>(w%64)&1 == 0 {
		return Cut{}
	}
	return s.cuts[w]
}

// Overlaps yields every worker that holds the prompt's first block in any tier, each once, by number.
func (s *OverlapScores) Overlaps() iter.Seq[Overlap] {
	return func(yield func(Overlap) bool) {
		for j, word := range s.device.known {
			for ; word != 0; word &= word - 1 {
				w := 64*j + bits.TrailingZeros64(word)
				if !yield(Overlap{kvblock.Worker(w), s.device.depth(w)}) {
					return
				}
			}
		}
	}
}

// reset forgets the previous response.
func (s *OverlapScores) reset() {
	clear(s.device.known)
	for _, w := range s.extended {
		s.lower[w] = [memoryTiers]uint32{}
	}
	s.extended = s.extended[:0]
	s.cutKnown = s.cutKnown[:0]
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
		s.lower = append(s.lower, make([][memoryTiers]uint32, more)...)
	}
	l := &s.lower[w]
	if l[0] == 0 {
		l[0] = 1
		s.extended = append(s.extended, w)
		s.device.record(w, s.device.blocks(w))
	}
	l[in] += uint32(n)
}

func (a *tierScores) has(w kvblock.Worker) bool {
	return int(w/64) < len(a.known) && a.known[w/64]>>(w%64)&1 != 0
}

func (a *tierScores) blocks(w kvblock.Worker) int {
	if !a.has(w) {
		return 0
	}
	return a.depth(int(w))
}

// depth returns the count of worker w, which must be in known.
func (a *tierScores) depth(w int) int { return int(a.counts[w]) }

// alike returns the count of worker w, and the workers in set that are known to have the same one. set has w; it is a
// word like those of known.
func (a *tierScores) alike(w int, set uint64) (n int, same uint64) {
	counts, n := (*[64]uint32)(a.counts[w&^63:]), a.depth(w)
	for rest := set; rest != 0; rest &= rest - 1 {
		if b := bits.TrailingZeros64(rest); int(counts[b]) == n {
			same |= 1 << b
		}
	}
	return n, same
}

// fit makes room for this many words of known.
func (a *tierScores) fit(words int) {
	if n := words - len(a.known); n > 0 {
		a.known = append(a.known, make([]uint64, n)...)
		a.counts = append(a.counts, make([]uint32, 64*n)...)
	}
}

// record sets the count of w to n.
func (a *tierScores) record(w kvblock.Worker, n int) {
	a.fit(int(w/64) + 1)
	a.counts[w] = uint32(n)
	a.known[w/64] |= 1 << (w % 64)
}

// recordSet sets the count of each worker in set to n.
func (a *tierScores) recordSet(set []uint64, n int) {
	a.fit(len(set))
	for j, word := range set {
		if word != 0 {
			a.recordWord(j, word, n)
		}
	}
}

// recordWord sets the count of each worker in set, word j of known, to n. There must be room for the word.
func (a *tierScores) recordWord(j int, set uint64, n int) {
	counts := (*[64]uint32)(a.counts[64*j:])
	if set == ^uint64(0) {
		for b := range counts { // half the time of the loop below
			counts[b] = uint32(n)
		}
	} else {
		for rest := set; rest != 0; rest &= rest - 1 {
			counts[bits.TrailingZeros64(rest)] = uint32(n)
		}
	}
	a.known[j] |= set
}

// recordGroup sets the counts of members, bits of word j of known, to i plus their byte of leads. It returns the
// members whose byte is at least k. The caller adds the members to known.
func (a *tierScores) recordGroup(j int, members uint64, leads *[8]uint64, i, k int) (whole uint64) {
	a.fit(j + 1)
	counts := (*[64]uint32)(a.counts[64*j:])
	for rest := members; rest != 0; rest &= rest - 1 {
		b := bits.TrailingZeros64(rest)
		lead := int(atomic.LoadUint64(&leads[b/8])>>(b%8*8)) & maxLead
		counts[b] = uint32(i + lead)
		if lead >= k {
			whole |= 1 << b
		}
	}
	return whole
}
