package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// extension is the number of blocks that a run of a lower tier adds for one worker.
type extension struct {
	worker kvblock.Worker
	blocks int
}

// extend adds to s, for each worker, the blocks in the lower tier t that continue what the tiers above it hold.
//
// A worker's reach is the number of leading blocks that it holds so far. Its extension may begin there. The frontier is
// the set of these places and the prompt's start, visited in order. A run at one of them extends every worker whose
// reach is within the run. If it extends a worker to its end, that end joins the frontier.
func (t *tier) extend(chain []kvblock.SequenceHash, s *OverlapScores, in kvblock.Tier) {
	if len(chain) == 0 {
		return
	}
	s.frontier = grow(s.frontier[:0], (len(chain)+63)/64)
	clear(s.frontier)
	mark := func(at int) {
		if at < len(chain) {
			s.frontier[at/64] |= 1 << (at % 64)
		}
	}
	mark(0)
	for o := range s.Overlaps() {
		mark(s.reach(o.Worker))
	}
	retries := maxRetries
	locked := false
	for word := 0; word < len(s.frontier); {
		if s.frontier[word] == 0 {
			word++
			continue
		}
		i := 64*word + bits.TrailingZeros64(s.frontier[word])
		at, ok := t.bySeq.find(&t.arena, chain[i])
		if !ok {
			s.frontier[word] &= s.frontier[word] - 1
			continue
		}
		k := t.matchRun(at, chain, i, s)
		if k == 0 {
			if retries--; retries == 0 {
				t.mu.Lock() // excludes writers
				locked = true
			}
			continue
		}
		s.frontier[word] &= s.frontier[word] - 1
		for _, f := range s.extensions {
			s.add(f.worker, in, f.blocks)
			if s.reach(f.worker) == i+k {
				mark(i + k)
			}
		}
	}
	if locked {
		t.mu.Unlock()
	}
}

// matchRun matches the prompt from block i on with the run that has this block at address at. It sets s.extensions to
// the blocks that the run adds for the workers whose reach is within it. It returns the number of matching blocks, 0 if
// a writer interfered.
func (t *tier) matchRun(at ref, chain []kvblock.SequenceHash, i int, s *OverlapScores) (k int) {
	s.extensions = s.extensions[:0]
	words, first := t.arena.runAround(at)
	if words == nil {
		return 0
	}
	version := atomic.LoadUint64(&words[0])
	n := length(version)
	if version>>32&1 != 0 || first < 0 || first >= n || runHeader+n > len(words) {
		return 0
	}
	for k < n-first && i+k < len(chain) && atomic.LoadUint64(&words[runHeader+first+k]) == uint64(chain[i+k]) {
		k++
	}
	if k == 0 {
		return 0
	}
	add := func(w kvblock.Worker, mask uint64) {
		if w >= maxWorkers {
			return // the read is torn; the check of the version below fails
		}
		reach := s.reach(w)
		if reach < i || reach >= i+k {
			return
		}
		if lead := leading(mask>>(first+reach-i), k-(reach-i)); lead > 0 {
			s.extensions = append(s.extensions, extension{w, lead})
		}
	}
	who := atomic.LoadUint64(&words[1])
	if who&manyHolders == 0 {
		add(kvblock.Worker(who), atomic.LoadUint64(&words[2]))
	} else {
		if !eachHolder(t.arena.record(ref(who)), add) {
			return 0
		}
	}
	if atomic.LoadUint64(&words[0]) != version {
		return 0
	}
	return k
}

// eachHolder calls f with each worker of a holders' record and the mask of the run's blocks that it holds. It reports
// false if the record is torn by a writer.
func eachHolder(record []uint64, f func(w kvblock.Worker, mask uint64)) bool {
	bitset, groups, list := holderParts(record)
	if bitset == nil {
		return false
	}
	for j := range bitset {
		for word := atomic.LoadUint64(&bitset[j]); word != 0; word &= word - 1 {
			f(kvblock.Worker(64*j+bits.TrailingZeros64(word)), ones(maxRun))
		}
	}
	for g := 0; g < len(groups); g += groupWords {
		first := kvblock.Worker(64 * atomic.LoadUint64(&groups[g]))
		for members := atomic.LoadUint64(&groups[g+1]); members != 0; members &= members - 1 {
			at := bits.TrailingZeros64(members)
			lead := uint8(atomic.LoadUint64(&groups[g+2+at/8]) >> (at % 8 * 8))
			f(first+kvblock.Worker(at), ones(min(int(lead), maxRun)))
		}
	}
	for j := 0; j < len(list); j += 2 {
		f(kvblock.Worker(atomic.LoadUint64(&list[j])), atomic.LoadUint64(&list[j+1]))
	}
	return true
}
