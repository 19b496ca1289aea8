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

// tierScores has the number of leading blocks that workers hold in one tier. Setting the counts of eight workers takes
// about as long as setting one.
type tierScores struct {
	known  []uint64 // by worker number / 64: a bit for each worker with a count
	octets []octet  // by worker number / 8, 8 for each word of known
	exact  []uint32 // by worker number, as far as needed: see octet

	query query // scratch
}

// octet has the counts of eight workers, which are mostly near each other: base plus a byte of extra for each worker.
// If base is notPacked, the counts are in tierScores.exact. The count of a worker that is not in known has no meaning.
type octet struct {
	base  uint32
	extra uint64 // a byte each, the first worker's lowest
}

const (
	notPacked = 1<<32 - 1          // longer than any prompt
	lowBits   = 0x0101010101010101 // a bit in every byte

	maxLead = 1<<lengthBits - 1 // blocks of a run, for all that a reader may see
)

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
func (a *tierScores) depth(w int) int {
	o := &a.octets[w/8]
	if o.base == notPacked {
		return int(a.exact[w])
	}
	return int(o.base) + int(uint8(o.extra>>(w%8*8)))
}

// alike returns the count of worker w, and the workers of w's eight in set that are known to have the same one. set
// has w; it is a word like those of known.
func (a *tierScores) alike(w int, set uint64) (n int, same uint64) {
	if o := &a.octets[w/8]; o.extra == 0 && o.base != notPacked {
		return int(o.base), set & (0xff << (w % 64 &^ 7))
	}
	return a.depth(w), 1 << (w % 64)
}

// fit makes room for this many words of known.
func (a *tierScores) fit(words int) {
	if n := words - len(a.known); n > 0 {
		a.known = append(a.known, make([]uint64, n)...)
		a.octets = append(a.octets, make([]octet, 8*n)...)
	}
}

// record sets the count of w to n.
func (a *tierScores) record(w kvblock.Worker, n int) {
	a.fit(int(w/64) + 1)
	a.put(w, n, a.known[w/64])
	a.known[w/64] |= 1 << (w % 64)
}

// put sets the count of w to n, but does not add w to known. There must be room for it. The counts of workers in
// others, a word like those of known, stay.
func (a *tierScores) put(w kvblock.Worker, n int, others uint64) {
	o := &a.octets[w/8]
	neighbours := uint8(others>>(w%64/8*8)) &^ (1 << (w % 8))
	more := n - int(o.base)
	switch {
	case neighbours == 0:
		*o = octet{base: uint32(n)}
	case o.base == notPacked:
		a.exact[w] = uint32(n)
	case more >= 0 && more < 256:
		o.extra = o.extra&^(0xff<<(w%8*8)) | uint64(more)<<(w%8*8)
	default:
		if len(a.exact) < 8*len(a.octets) {
			a.exact = append(a.exact, make([]uint32, 8*len(a.octets)-len(a.exact))...)
		}
		first := int(w &^ 7)
		for i := range 8 {
			a.exact[first+i] = uint32(a.depth(first + i))
		}
		o.base, a.exact[w] = notPacked, uint32(n)
	}
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
	octets, known := (*[8]octet)(a.octets[8*j:]), a.known[j]
	if known == 0 {
		for c := range octets {
			octets[c] = octet{base: uint32(n)}
		}
	} else {
		for rest := set; rest != 0; {
			c := bits.TrailingZeros64(rest) / 8
			here := uint8(rest >> (8 * c))
			rest &^= 0xff << (8 * c)
			a.putOctet(64*j+8*c, here, uint8(known>>(8*c)), n, 0)
		}
	}
	a.known[j] = known | set
}

// putOctet sets the counts of the workers in here, bits of the eight workers from w on, to n plus their byte of more.
// It does not add them to known. The counts of workers in others stay. No byte may exceed maxLead.
func (a *tierScores) putOctet(w int, here, others uint8, n int, more uint64) {
	o := &a.octets[w/8]
	if others == 0 {
		*o = octet{uint32(n), more}
		return
	}
	if apart := n - int(o.base); apart >= 0 && apart < 256-maxLead && o.base != notPacked {
		theirs := (uint64(here)*lowBits&0x8040201008040201 + 0x7f*lowBits) >> 7 & lowBits * 0xff // 0xff in their bytes
		o.extra = o.extra&^theirs | (more+uint64(apart)*lowBits)&theirs
		return
	}
	for ; here != 0; here &= here - 1 {
		c := bits.TrailingZeros8(here)
		a.put(kvblock.Worker(w+c), n+int(uint8(more>>(8*c))), uint64(others|here)<<(w%64))
	}
}

// recordGroup sets the counts of members, bits of word j of known, to i plus their byte of leads. It leaves out and
// returns the members whose byte is at least k. The counts of workers in others and in known stay. The caller adds the
// members to known.
func (a *tierScores) recordGroup(j int, members, others uint64, leads *[8]uint64, i, k int) (whole uint64) {
	a.fit(j + 1)
	others |= a.known[j]
	octets := (*[8]octet)(a.octets[8*j:])
	for rest := members; rest != 0; {
		c := bits.TrailingZeros64(rest) / 8 % 8
		here := uint8(rest >> (8 * c))
		rest &^= 0xff << (8 * c)
		lead := atomic.LoadUint64(&leads[c]) & (maxLead * lowBits)
		if taken := uint8(others >> (8 * c)); taken == 0 {
			octets[c] = octet{uint32(i), lead}
		} else {
			a.putOctet(64*j+8*c, here, taken, i, lead)
		}
		// The top bit of each byte says whether lead >= k.
		if atLeast := (lead | 0x80*lowBits) - uint64(k)*lowBits; atLeast&(0x80*lowBits) != 0 {
			whole |= atLeast >> 7 & lowBits * 0x0102040810204080 >> 56 << (8 * c) // these bits, in a byte
		}
	}
	return whole & members
}
