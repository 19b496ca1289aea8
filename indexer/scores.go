package indexer

import "kvepp/kvblock"

// Overlap says how many leading blocks of a prompt one worker holds, at least one.
type Overlap struct {
	Worker kvblock.Worker
	Blocks int
}

// OverlapScores is the answer of one FindMatches. The zero value is ready to use and answers 0 for everybody. Reuse one
// for many queries: its buffers grow to the largest answer seen, after which a query allocates nothing.
//
// It belongs to one goroutine at a time.
type OverlapScores struct {
	hits  []Overlap
	depth []uint32 // by worker number; 0 for whoever is not in hits
	query query
}

// Blocks returns the number of leading blocks of the prompt that w holds; 0 for a worker that holds none or is unknown.
func (s *OverlapScores) Blocks(w kvblock.Worker) int {
	if int(w) >= len(s.depth) {
		return 0
	}
	return int(s.depth[w])
}

// Overlaps lists every worker that holds the prompt's first block, each once, in no particular order. The slice is valid
// until the next FindMatches into s.
func (s *OverlapScores) Overlaps() []Overlap { return s.hits }

// reset forgets the previous answer, at the cost of that answer's length.
func (s *OverlapScores) reset() {
	for _, h := range s.hits {
		s.depth[h.Worker] = 0
	}
	s.hits = s.hits[:0]
}

// publish makes hits readable by worker number.
func (s *OverlapScores) publish() {
	for _, h := range s.hits {
		if n := int(h.Worker) + 1 - len(s.depth); n > 0 {
			s.depth = append(s.depth, make([]uint32, n)...)
		}
		s.depth[h.Worker] = uint32(h.Blocks)
	}
}
