package indexer

import "kvepp/kvblock"

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
	hits  []Overlap
	depth []uint32 // by worker number; 0 for whoever is not in hits
	query query

	lower    [][tiers]uint32 // by worker number: blocks behind those of the tiers above; [0] says that the worker is in hits
	lowered  []kvblock.Worker
	found    []found  // scratch
	frontier []uint64 // scratch, by block of the prompt
}

// Blocks returns the number of leading blocks of the prompt that w holds on its device; 0 for a worker that holds none or is
// unknown.
func (s *OverlapScores) Blocks(w kvblock.Worker) int {
	if int(w) >= len(s.depth) {
		return 0
	}
	return int(s.depth[w])
}

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

// Overlaps lists every worker that holds the prompt's first block in any tier, each once, in no particular order. The slice
// is valid until the next FindMatches into s.
func (s *OverlapScores) Overlaps() []Overlap { return s.hits }

// reset forgets the previous answer, at the cost of that answer's length.
func (s *OverlapScores) reset() {
	for _, h := range s.hits {
		s.depth[h.Worker] = 0
	}
	s.hits = s.hits[:0]
	for _, w := range s.lowered {
		s.lower[w] = [tiers]uint32{}
	}
	s.lowered = s.lowered[:0]
}

// publish makes hits readable by worker number.
func (s *OverlapScores) publish() {
	for _, h := range s.hits {
		s.fit(h.Worker)
		s.depth[h.Worker] = uint32(h.Blocks)
	}
}

// fit makes room for w in depth.
func (s *OverlapScores) fit(w kvblock.Worker) {
	if n := int(w) + 1 - len(s.depth); n > 0 {
		s.depth = append(s.depth, make([]uint32, n)...)
	}
}

// reach returns how many leading blocks w holds in the tiers looked at so far.
func (s *OverlapScores) reach(w kvblock.Worker) int {
	n := uint32(0)
	if int(w) < len(s.depth) {
		n = s.depth[w]
	}
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
		if s.Blocks(w) == 0 {
			s.fit(w)
			s.hits = append(s.hits, Overlap{Worker: w})
		}
	}
	l[in] += uint32(n)
}
