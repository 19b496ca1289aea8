package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// query is the state of one FindMatches: who holds every block so far.
type query struct {
	all  bool // everybody may: no block was looked at yet
	many bool // if not all: candidates are in set, else the only one is one
	one  kvblock.Worker
	set  []uint64 // by worker number / 64

	next []uint64 // set after the current run
	drop []uint64 // those of set who hold a part of the current run, or nothing
}

// maxRetries is how often one FindMatches may meet a change in progress before it locks the writers out.
const maxRetries = 64

// FindMatches sets scores to the number of leading blocks of the prompt that each worker holds. chain[i] is the sequence
// hash of the prompt's block i; chain[0] is its first. A lower tier counts as far as it continues what the tiers above it hold (lower.go).
//
// Beside writers the answer is as exact as a moving thing can be: every block counted for a worker was held by it at some
// time during the call, and a worker's count stops at a block that it did not hold at some time during the call.
//
// It takes no lock, and allocates nothing once scores has grown.
func (x *Index) FindMatches(chain []kvblock.SequenceHash, scores *OverlapScores) {
	scores.reset()
	x.tiers[kvblock.TierDevice].findMatches(chain, scores)
	scores.publish()
	x.predictions.findMatches(chain, scores)
	for i := kvblock.TierHostPinned; int(i) < tiers; i++ {
		if x.tiers[i].busy.Load() {
			x.tiers[i].extend(chain, scores, i)
		}
	}
}

// findMatches appends to s.hits what each worker holds in t.
func (t *tier) findMatches(chain []kvblock.SequenceHash, s *OverlapScores) {
	if len(chain) == 0 || !t.firsts.may(chain[0], t.table.seed) {
		return
	}
	before := len(s.hits)
	if !t.find(chain, s, maxRetries) {
		s.hits = s.hits[:before]
		t.mu.Lock()
		t.find(chain, s, 1) // nothing moves now, so nothing needs another try
		t.mu.Unlock()
	}
}

// find walks the prompt run by run, keeping those who hold everything so far. It reports failure after that many tries
// which a writer spoiled.
func (t *tier) find(chain []kvblock.SequenceHash, s *OverlapScores, retries int) bool {
	q := &s.query
	q.all, q.many = true, false
	for i := 0; i < len(chain); {
		at, ok := t.starts.find(&t.arena, chain[i])
		if !ok {
			s.recordAll(i)
			return true
		}
		hits := len(s.hits)
		k, more := t.step(at, chain, i, s)
		if k == 0 {
			s.hits = s.hits[:hits]
			if retries--; retries == 0 {
				return false
			}
			continue
		}
		if !more {
			return true
		}
		i += k
	}
	s.recordAll(len(chain))
	return true
}

// step matches the run with block i of the prompt, which lies at address at, and records everybody who drops out there.
// It returns how many blocks matched and whether anybody is left. If a writer interfered it returns 0, with q untouched
// and nonsense recorded.
func (t *tier) step(at ref, chain []kvblock.SequenceHash, i int, s *OverlapScores) (k int, more bool) {
	words, first := t.arena.around(at)
	if words == nil {
		return 0, false
	}
	version := atomic.LoadUint64(&words[0])
	n := length(version)
	if version>>32&1 != 0 || first < 0 || first >= n || runHeader+n > len(words) {
		return 0, false
	}
	hashes := words[runHeader+first : runHeader+n]
	rest := chain[i:]
	who := atomic.LoadUint64(&words[1])
	if len(hashes) > len(rest) {
		hashes = hashes[:len(rest)]
	}
	k = matching(hashes, rest[:len(hashes)])
	if k == 0 {
		return 0, false
	}

	q := &s.query
	if who&manyHolders == 0 {
		lead := leading(atomic.LoadUint64(&words[2]), first, k)
		if atomic.LoadUint64(&words[0]) != version {
			return 0, false
		}
		return k, s.meetOne(kvblock.Worker(who), lead, k, i)
	}

	record := t.arena.record(ref(who))
	if len(record) == 0 {
		return 0, false
	}
	nbits, nlist, _ := holderCounts(atomic.LoadUint64(&record[0]))
	if 1+nbits+2*nlist > len(record) {
		return 0, false
	}
	all, list := record[1:1+nbits], record[1+nbits:1+nbits+2*nlist]
	switch {
	case q.all:
		q.next = grow(q.next[:0], nbits)
		for j := range all {
			q.next[j] = atomic.LoadUint64(&all[j])
		}
		for j := 0; j < len(list); j += 2 {
			w, lead := kvblock.Worker(atomic.LoadUint64(&list[j])), leading(atomic.LoadUint64(&list[j+1]), first, k)
			if w >= maxWorkers {
				return 0, false
			}
			if lead == k {
				q.next = grow(q.next, int(w/64)+1)
				q.next[w/64] |= 1 << (w % 64)
			} else if lead > 0 {
				s.hits = append(s.hits, Overlap{w, lead})
			}
		}
	case !q.many:
		lead := 0
		if j := int(q.one / 64); j < nbits && atomic.LoadUint64(&all[j])>>(q.one%64)&1 != 0 {
			lead = k
		} else {
			for j := 0; j < len(list); j += 2 {
				if atomic.LoadUint64(&list[j]) == uint64(q.one) {
					lead = leading(atomic.LoadUint64(&list[j+1]), first, k)
					break
				}
			}
		}
		if atomic.LoadUint64(&words[0]) != version {
			return 0, false
		}
		if lead < k {
			s.hits = append(s.hits, Overlap{q.one, i + lead})
		}
		return k, lead == k
	default:
		var dropped uint64
		q.drop = grow(q.drop[:0], len(q.set))
		q.next = grow(q.next[:0], len(q.set))
		for j, set := range q.set {
			have := uint64(0)
			if j < nbits {
				have = atomic.LoadUint64(&all[j])
			}
			q.next[j], q.drop[j] = set&have, set&^have
			dropped |= set &^ have
		}
		if dropped == 0 {
			if atomic.LoadUint64(&words[0]) != version {
				return 0, false
			}
			return k, true
		}
		for j := 0; j < len(list); j += 2 {
			w := kvblock.Worker(atomic.LoadUint64(&list[j]))
			if int(w/64) >= len(q.drop) || q.drop[w/64]>>(w%64)&1 == 0 {
				continue
			}
			lead := leading(atomic.LoadUint64(&list[j+1]), first, k)
			if lead == k {
				q.next[w/64] |= 1 << (w % 64)
			} else {
				s.hits = append(s.hits, Overlap{w, i + lead})
			}
			q.drop[w/64] &^= 1 << (w % 64)
		}
		s.recordSet(q.drop, i)
	}
	if atomic.LoadUint64(&words[0]) != version {
		return 0, false
	}
	q.all = false
	q.set, q.next = q.next, q.set
	return k, q.narrow()
}

// matching returns how many leading hashes are equal. Want has the length of hashes.
func matching(hashes []uint64, want []kvblock.SequenceHash) (k int) {
	for len(hashes)-k >= 4 && len(want)-k >= 4 { // the processor does these at once
		h, w := (*[4]uint64)(hashes[k:]), (*[4]kvblock.SequenceHash)(want[k:])
		if (atomic.LoadUint64(&h[0])^uint64(w[0]))|(atomic.LoadUint64(&h[1])^uint64(w[1]))|
			(atomic.LoadUint64(&h[2])^uint64(w[2]))|(atomic.LoadUint64(&h[3])^uint64(w[3])) != 0 {
			break
		}
		k += 4
	}
	for k < len(hashes) && k < len(want) && atomic.LoadUint64(&hashes[k]) == uint64(want[k]) {
		k++
	}
	return k
}

// leading returns how many of k blocks from bit first on are in mask without a gap.
func leading(mask uint64, first, k int) int {
	return min(k, bits.TrailingZeros64(^(mask >> first)))
}

// grow returns b with at least n words, new ones zero.
func grow(b []uint64, n int) []uint64 {
	for len(b) < n {
		b = append(b, 0)
	}
	return b
}

// narrow settles what is left in set, and reports whether that is anybody.
func (q *query) narrow() bool {
	n := 0
	for j, word := range q.set {
		if word != 0 {
			n += bits.OnesCount64(word)
			q.one = kvblock.Worker(64*j + bits.TrailingZeros64(word))
		}
	}
	q.many = n > 1
	return n > 0
}

// meetOne narrows the candidates to w, the only holder of the run at block i of the prompt, of which it holds the first
// lead of k matching blocks. It reports whether w is left.
func (s *OverlapScores) meetOne(w kvblock.Worker, lead, k, i int) bool {
	q := &s.query
	switch {
	case q.all:
	case !q.many:
		if q.one != w {
			s.hits = append(s.hits, Overlap{q.one, i})
			return false
		}
	default:
		in := int(w/64) < len(q.set) && q.set[w/64]>>(w%64)&1 != 0
		if in {
			q.set[w/64] &^= 1 << (w % 64)
		}
		s.recordSet(q.set, i)
		if !in {
			return false
		}
	}
	q.all, q.many, q.one = false, false, w
	if lead < k {
		if i+lead > 0 {
			s.hits = append(s.hits, Overlap{w, i + lead})
		}
		return false
	}
	return true
}

// recordSet records n blocks for everybody in set.
func (s *OverlapScores) recordSet(set []uint64, n int) {
	for j, word := range set {
		for ; word != 0; word &= word - 1 {
			s.hits = append(s.hits, Overlap{kvblock.Worker(64*j + bits.TrailingZeros64(word)), n})
		}
	}
}

// recordAll records n blocks for everybody left.
func (s *OverlapScores) recordAll(n int) {
	switch q := &s.query; {
	case q.all:
	case q.many:
		s.recordSet(q.set, n)
	default:
		s.hits = append(s.hits, Overlap{q.one, n})
	}
}
