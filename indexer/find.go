package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// query is the state of one FindMatches in one tier: who holds every block so far.
type query struct {
	all  bool // everybody may: no block was looked at yet
	many bool // if not all: candidates are in set, else the only one is one
	one  kvblock.Worker
	set  []uint64 // by worker number / 64

	next []uint64 // set after the current run
	drop []uint64 // those of set who hold nothing of the current run
	part []uint64 // those who hold its beginning
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
	x.tiers[kvblock.TierDevice].findMatches(chain, &scores.device)
	x.predictions.findMatches(chain, scores)
	for i := kvblock.TierHostPinned; int(i) < tiers; i++ {
		if x.tiers[i].busy.Load() {
			x.tiers[i].extend(chain, scores, i)
		}
	}
}

// findMatches sets a, which says nothing yet, to what each worker holds in t.
func (t *tier) findMatches(chain []kvblock.SequenceHash, a *answer) {
	if len(chain) == 0 || !t.firsts.may(chain[0], t.table.seed) {
		return
	}
	if !t.find(chain, a, maxRetries) {
		clear(a.met)
		t.mu.Lock()
		t.find(chain, a, 1) // nothing moves now, so nothing needs another try
		t.mu.Unlock()
	}
}

// find walks the prompt run by run, keeping those who hold everything so far. It reports failure after that many tries
// which a writer spoiled.
func (t *tier) find(chain []kvblock.SequenceHash, a *answer, retries int) bool {
	q := &a.query
	q.all, q.many = true, false
	for i := 0; i < len(chain); {
		words := t.starts.findRun(&t.arena, chain[i])
		if words == nil {
			a.recordAll(i)
			return true
		}
		k, more := t.step(words, chain, i, a)
		if k == 0 {
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
	a.recordAll(len(chain))
	return true
}

// step matches a run with the prompt from its block i on, and records everybody who drops out there. It returns how many
// blocks matched and whether anybody is left. If a writer interfered it returns 0, with nothing changed but scratch memory.
func (t *tier) step(words []uint64, chain []kvblock.SequenceHash, i int, a *answer) (k int, more bool) {
	version := atomic.LoadUint64(&words[0])
	n := length(version)
	if version>>32&1 != 0 || runHeader+n > len(words) {
		return 0, false
	}
	rest := chain[i:]
	k = matching(words[runHeader:runHeader+min(n, len(rest))], rest)
	if k == 0 {
		return 0, false
	}

	who := atomic.LoadUint64(&words[1])
	if who&manyHolders == 0 {
		lead := leading(atomic.LoadUint64(&words[2]), k)
		if atomic.LoadUint64(&words[0]) != version {
			return 0, false
		}
		return k, a.meetOne(kvblock.Worker(who), lead, k, i)
	}

	q := &a.query
	record := t.arena.record(ref(who))
	if len(record) == 0 {
		return 0, false
	}
	nbits, nlist, _ := holderCounts(atomic.LoadUint64(&record[0]))
	if 1+nbits+2*nlist > len(record) {
		return 0, false
	}
	all, list := record[1:1+nbits], record[1+nbits:1+nbits+2*nlist]
	if !q.all && !q.many {
		lead := 0
		if j := int(q.one / 64); j < nbits && atomic.LoadUint64(&all[j])>>(q.one%64)&1 != 0 {
			lead = k
		} else {
			for j := 0; j < len(list); j += 2 {
				if atomic.LoadUint64(&list[j]) == uint64(q.one) {
					lead = leading(atomic.LoadUint64(&list[j+1]), k)
					break
				}
			}
		}
		if atomic.LoadUint64(&words[0]) != version {
			return 0, false
		}
		if lead < k {
			a.record(q.one, i+lead)
		}
		return k, lead == k
	}

	if q.all {
		q.next, q.drop = grow(q.next[:0], nbits), q.drop[:0]
		for j := range all {
			q.next[j] = atomic.LoadUint64(&all[j])
		}
	} else {
		var dropped uint64
		for j, set := range q.set {
			if j < len(all) {
				set &^= atomic.LoadUint64(&all[j])
			}
			dropped |= set
		}
		if dropped == 0 {
			if atomic.LoadUint64(&words[0]) != version {
				return 0, false
			}
			return k, true
		}
		q.next, q.drop = grow(q.next[:0], len(q.set)), grow(q.drop[:0], len(q.set))
		for j, set := range q.set {
			have := uint64(0)
			if j < len(all) {
				have = atomic.LoadUint64(&all[j])
			}
			q.next[j], q.drop[j] = set&have, set&^have
		}
	}
	// Most who are in a list are there with their neighbours, so a word of the sets is put together before it is put down.
	q.part = grow(q.part[:0], len(q.drop))
	at, candidates, next, part := -1, ^uint64(0), uint64(0), uint64(0)
	for ; len(list) >= 2; list = list[2:] {
		w, mask := kvblock.Worker(atomic.LoadUint64(&list[0])), atomic.LoadUint64(&list[1])
		if w >= maxWorkers {
			return 0, false
		}
		if j := int(w / 64); j != at {
			if !q.all && j >= len(q.drop) {
				continue
			}
			if at >= 0 {
				q.next[at], q.part[at] = q.next[at]|next, q.part[at]|part
			}
			if q.all {
				q.next, q.part = grow(q.next, j+1), grow(q.part, j+1)
			} else {
				candidates = q.drop[j]
			}
			a.fit(j + 1)
			at, next, part = j, 0, 0
		}
		bit := uint64(1) << (w % 64)
		if candidates&bit == 0 {
			continue
		}
		if lead := leading(mask, k); lead == k {
			next |= bit
		} else if i+lead > 0 {
			a.depth[w] = uint32(i + lead) // means nothing before it is in met
			part |= bit
		}
	}
	if at >= 0 {
		q.next[at], q.part[at] = q.next[at]|next, q.part[at]|part
	}
	if atomic.LoadUint64(&words[0]) != version {
		return 0, false
	}
	for j, part := range q.part {
		if part != 0 {
			a.met[j] |= part
		}
		if j < len(q.drop) {
			q.drop[j] &^= q.next[j] | part
		}
	}
	a.recordSet(q.drop, i)
	q.all = false
	q.set, q.next = q.next, q.set
	return k, q.narrow()
}

// matching returns how many leading hashes of a run are equal to those of a prompt, which has no fewer. Where a hash is
// equal, those before it are, so it looks at one in every line of memory as far as these are equal, then at all. (To look at
// the last one first is slower: the processor does not foresee where that is, and memory that it does not foresee is slow.)
func matching(hashes []uint64, want []kvblock.SequenceHash) (k int) {
	n := len(hashes)
	want = want[:n]
	const line = 8
	for k+line < n && atomic.LoadUint64(&hashes[k+line-1]) == uint64(want[k+line-1]) {
		k += line
	}
	for k < n && atomic.LoadUint64(&hashes[k]) == uint64(want[k]) {
		k++
	}
	return k
}

// leading returns how many of k blocks are in mask without a gap.
func leading(mask uint64, k int) int { return min(k, bits.TrailingZeros64(^mask)) }

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
func (a *answer) meetOne(w kvblock.Worker, lead, k, i int) bool {
	q := &a.query
	switch {
	case q.all:
	case !q.many:
		if q.one != w {
			a.record(q.one, i)
			return false
		}
	default:
		in := int(w/64) < len(q.set) && q.set[w/64]>>(w%64)&1 != 0
		if in {
			q.set[w/64] &^= 1 << (w % 64)
		}
		a.recordSet(q.set, i)
		if !in {
			return false
		}
	}
	q.all, q.many, q.one = false, false, w
	if lead < k {
		if i+lead > 0 {
			a.record(w, i+lead)
		}
		return false
	}
	return true
}

// recordAll records n blocks for everybody left.
func (a *answer) recordAll(n int) {
	switch q := &a.query; {
	case q.all:
	case q.many:
		a.recordSet(q.set, n)
	default:
		a.record(q.one, n)
	}
}
