package indexer

import (
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// query is the state of one FindMatches in one tier: the candidates, which are the workers that hold every block so
// far.
type query struct {
	candidates candidates
	one        kvblock.Worker
	set        []uint64 // by worker number / 64
	n          int      // workers in set

	next    []uint64 // candidates after the current run
	drop    []uint64 // candidates that are not known to hold the whole current run
	part    []uint64 // candidates that hold a prefix of it only; defined only for the words in touched
	touched []uint16 // indexes of the words where drop may be nonzero
}

// candidates says where a query has its candidates.
type candidates uint8

const (
	everyWorker  candidates = iota // no block was read yet
	oneWorker                      // query.one is the only candidate
	workersInSet                   // query.set has the candidates
)

// maxRetries is the number of reads that writers may spoil before a lookup takes tier.mu.
const maxRetries = 64

// FindMatches sets scores to the number of leading blocks of the prompt that each worker holds. chain[i] is the
// sequence hash of the prompt's block i. A lower tier counts where it continues what the tiers above it hold
// (lower.go).
//
// While writers change the index, each counted block was held by the worker at some time during the call. A worker's
// count stops at a block that it did not hold at some time during the call.
//
// FindMatches takes no lock unless writers spoil maxRetries reads. It allocates nothing once scores has grown.
func (x *Index) FindMatches(chain []kvblock.SequenceHash, scores *OverlapScores) {
	x.findPrompt(chain, nil, scores)
}

// Prompt is a prompt to look up.
type Prompt struct {
	Chain  []kvblock.SequenceHash // of its blocks
	Tokens int                    // its length
	// IDs are token ids from the prompt's beginning, at least those of Chain, and Options those with which Chain was
	// hashed. They are needed for workers with a class of layers whose blocks are smaller than full attention's. If IDs
	// is nil, their count is an upper bound.
	IDs     []kvblock.Token
	Options kvblock.HashOptions
}

// FindPrompt is FindMatches for a prompt of known length. An engine computes a prompt's last token in any case, so a
// worker of a hybrid model counts as many blocks as it can reuse of one token less (classes.go).
func (x *Index) FindPrompt(p *Prompt, scores *OverlapScores) {
	x.findPrompt(p.Chain, p, scores)
}

// findPrompt is FindPrompt for the prompt p with this chain, and FindMatches if p is nil.
func (x *Index) findPrompt(chain []kvblock.SequenceHash, p *Prompt, scores *OverlapScores) {
	scores.reset()
	x.tiers[kvblock.TierDevice].findMatches(chain, &scores.device)
	x.predictions.findMatches(chain, scores)
	if lower := x.lower.Load(); lower != 0 {
		for i := kvblock.TierHostPinned; int(i) < memoryTiers; i++ {
			if lower>>i&1 != 0 {
				x.tiers[i].extend(chain, scores, i)
			}
		}
	}
	if hybrids := x.hybrids.Load(); hybrids != nil {
		if p == nil {
			scores.prompt = Prompt{Chain: chain, Tokens: math.MaxInt} // not on the stack, from where it would escape
			p = &scores.prompt
		}
		x.applyClasses(hybrids, p, scores)
		scores.prompt = Prompt{}
	}
}

// findMatches sets a, which must be empty, to the number of leading blocks that each worker holds in t.
func (t *tier) findMatches(chain []kvblock.SequenceHash, a *tierScores) {
	if len(chain) == 0 || !t.rootFilter.mayContain(chain[0], t.starts.seed) {
		return
	}
	// The lookup reads the prompt's hash at the end of each run. The hardware prefetcher cannot predict these
	// addresses.
	prefetch.Lines(unsafe.Pointer(&chain[0]), min((len(chain)+7)/8, 64))
	if !t.find(chain, a, maxRetries) {
		clear(a.known)
		t.mu.Lock()
		t.find(chain, a, 1) // without writers one try is enough
		t.mu.Unlock()
	}
}

// find walks the prompt run by run and keeps the workers that hold every block so far. It reports false after writers
// spoiled that many reads.
func (t *tier) find(chain []kvblock.SequenceHash, a *tierScores, retries int) bool {
	q := &a.query
	q.candidates, q.n = everyWorker, 0
	i := 0
	words := t.starts.findRun(&t.arena, chain[0])
	for words != nil {
		// The holders and the next run are looked up before the version is read again, so that their cache misses
		// overlap. If the version is unchanged then, and no next run was found, there was none.
		version, who := atomic.LoadUint64(&words[0]), atomic.LoadUint64(&words[1])
		var record []uint64
		if who&manyHolders != 0 {
			record = t.arena.record(ref(who))
		}
		var next []uint64
		k, rest := 0, chain[i:]
		if n := length(version); version>>32&1 == 0 && runHeader+n <= len(words) {
			k = matchingBlocks(words[runHeader:runHeader+min(n, len(rest))], rest)
			if k == n && k < len(rest) {
				next = t.runStartingWith(follower(who), rest[k])
			}
			if next == nil && k < len(rest) {
				next = t.starts.findRun(&t.arena, rest[k])
			}
		}
		ok, more := false, false
		switch {
		case k == 0:
		case who&manyHolders == 0:
			lead := leading(atomic.LoadUint64(&words[2]), k)
			if ok = atomic.LoadUint64(&words[0]) == version; ok {
				more = a.intersectOne(kvblock.Worker(who), lead, k, i)
			}
		default:
			ok, more = a.intersectMany(record, k, i, &words[0], version)
		}
		if !ok {
			if retries--; retries == 0 {
				return false
			}
			words = t.starts.findRun(&t.arena, chain[i])
			continue
		}
		if !more {
			return true
		}
		i += k
		words = next
	}
	a.recordAll(i)
	return true
}

// runStartingWith returns the words of r if r is a run that begins with the block seq, else nil.
func (t *tier) runStartingWith(r run, seq kvblock.SequenceHash) []uint64 {
	if r == 0 {
		return nil
	}
	words, i := t.arena.runAround(r + runHeader)
	if words == nil || i != 0 || atomic.LoadUint64(&words[runHeader]) != uint64(seq) ||
		length(atomic.LoadUint64(&words[0])) == 0 {
		return nil
	}
	return words
}

// intersectMany keeps the candidates that hold all k matching blocks of the run at block i of the prompt, and records
// the others' counts. record is the holders' record of that run. It reports whether the read was consistent (ok) and
// whether any candidate is left (more). If *at, the run's word 0, is no longer version, a writer interfered: ok is
// false, and only scratch memory has changed.
func (a *tierScores) intersectMany(record []uint64, k, i int, at *uint64, version uint64) (ok, more bool) {
	q := &a.query
	bitset, groups, list := holderParts(record)
	if bitset == nil {
		return false, false
	}
	if q.candidates == oneWorker {
		lead := leadOf(bitset, groups, list, q.one, k)
		if atomic.LoadUint64(at) != version {
			return false, false
		}
		if lead < k {
			a.record(q.one, i+lead)
		}
		return true, lead == k
	}
	q.intersectBitset(bitset)
	if q.candidates != everyWorker && len(q.touched) == 0 {
		return atomic.LoadUint64(at) == version, true
	}
	if !a.intersectGroups(groups, k, i) || !a.intersectList(list, k, i) || atomic.LoadUint64(at) != version {
		return false, false
	}
	a.commit(i)
	return true, q.n > 0
}

// holderParts returns the bitset, the groups and the list of a holders' record. bitset is nil if the record is torn by
// a writer.
func holderParts(record []uint64) (bitset, groups, list []uint64) {
	if len(record) == 0 {
		return nil, nil, nil
	}
	nbits, ngroups, nlist, _ := holderCounts(atomic.LoadUint64(&record[0]))
	end := 1 + nbits + groupWords*ngroups // of the groups
	if end+2*nlist > len(record) {
		return nil, nil, nil
	}
	return record[1 : 1+nbits], record[1+nbits : end], record[end : end+2*nlist]
}

// leadOf returns how many of the first k blocks of a run w holds without a gap.
func leadOf(bitset, groups, list []uint64, w kvblock.Worker, k int) int {
	if j := int(w / 64); j < len(bitset) && atomic.LoadUint64(&bitset[j])>>(w%64)&1 != 0 {
		return k
	}
	if in, n := groupLead(groups, w); in {
		return min(n, k)
	}
	for j := 0; j < len(list); j += 2 {
		if atomic.LoadUint64(&list[j]) == uint64(w) {
			return leading(atomic.LoadUint64(&list[j+1]), k)
		}
	}
	return 0
}

// intersectBitset sets next to the candidates in the bitset, which hold the whole run, and drop to the other
// candidates.
func (q *query) intersectBitset(bitset []uint64) {
	q.touched = q.touched[:0]
	if q.candidates == everyWorker {
		q.resize(len(bitset))
		for j := range bitset {
			q.next[j], q.drop[j], q.part[j] = atomic.LoadUint64(&bitset[j]), 0, 0
			q.touched = append(q.touched, uint16(j))
		}
		return
	}
	q.resize(len(q.set))
	next, drop := q.next[:len(q.set)], q.drop[:len(q.set)]
	for j, set := range q.set {
		have := uint64(0)
		if j < len(bitset) {
			have = atomic.LoadUint64(&bitset[j])
		}
		next[j], drop[j] = set&have, set&^have
		if set&^have != 0 {
			q.part[j] = 0
			q.touched = append(q.touched, uint16(j))
		}
	}
}

// intersectGroups moves the candidates whose group entry covers all k blocks to next, and prepares the counts of the
// others. It reports failure if a group is torn by a writer.
func (a *tierScores) intersectGroups(groups []uint64, k, i int) bool {
	q := &a.query
	for ; len(groups) >= groupWords; groups = groups[groupWords:] {
		j, members := int(atomic.LoadUint64(&groups[0])), atomic.LoadUint64(&groups[1])
		switch {
		case uint(j) >= maxGroups:
			return false
		case q.candidates == everyWorker:
			q.fit(j + 1)
		case j >= len(q.drop):
			continue
		default:
			members &= q.drop[j]
		}
		if members != 0 {
			whole := a.recordGroup(j, members, (*[8]uint64)(groups[2:]), i, k)
			q.next[j] |= whole
			q.part[j] |= members &^ whole
		}
	}
	return true
}

// intersectList does for the entries of the list what intersectGroups does for groups.
func (a *tierScores) intersectList(list []uint64, k, i int) bool {
	q := &a.query
	for ; len(list) >= 2; list = list[2:] {
		w, mask := kvblock.Worker(atomic.LoadUint64(&list[0])), atomic.LoadUint64(&list[1])
		j, bit := int(w/64), uint64(1)<<(w%64)
		switch {
		case w >= maxWorkers:
			return false
		case q.candidates == everyWorker:
			q.fit(j + 1)
		case j >= len(q.drop) || q.drop[j]&bit == 0:
			continue
		}
		if lead := leading(mask, k); lead == k {
			q.next[j] |= bit
		} else if i+lead > 0 {
			a.fit(j + 1)
			a.counts[w] = uint32(i + lead)
			q.part[j] |= bit
		}
	}
	return true
}

// commit makes next the candidates. It records i blocks for each dropped candidate that has no count of its own.
func (a *tierScores) commit(i int) {
	q := &a.query
	a.fit(len(q.next))
	for _, j := range q.touched {
		next, part := q.next[j], q.part[j]
		a.known[j] |= part
		if drop := q.drop[j] &^ (next | part); drop != 0 {
			a.recordWord(int(j), drop, i)
		}
		if q.candidates == everyWorker {
			q.n += bits.OnesCount64(next)
		} else {
			q.n -= bits.OnesCount64(q.drop[j] &^ next)
		}
	}
	q.set, q.next = q.next, q.set
	q.candidates = workersInSet
	if q.n <= 1 {
		q.candidates = oneWorker
		for j, word := range q.set {
			if word != 0 {
				q.one = kvblock.Worker(64*j + bits.TrailingZeros64(word))
			}
		}
	}
}

// matchingBlocks returns how many leading hashes of a run equal those of a prompt. len(want) must not be less than
// len(hashes). Equal sequence hashes imply that all hashes before them are equal. So it compares the last one first,
// then one in each cache line, then the rest one by one.
func matchingBlocks(hashes []uint64, want []kvblock.SequenceHash) (k int) {
	n := len(hashes)
	want = want[:n]
	if n > 0 && atomic.LoadUint64(&hashes[n-1]) == uint64(want[n-1]) {
		return n
	}
	const line = 8
	for k+line < n && atomic.LoadUint64(&hashes[k+line-1]) == uint64(want[k+line-1]) {
		k += line
	}
	for k < n && atomic.LoadUint64(&hashes[k]) == uint64(want[k]) {
		k++
	}
	return k
}

// groupLead returns whether w is in one of the groups, and how many blocks it holds then.
func groupLead(groups []uint64, w kvblock.Worker) (in bool, lead int) {
	for ; len(groups) >= groupWords; groups = groups[groupWords:] {
		if atomic.LoadUint64(&groups[0]) == uint64(w/64) {
			if atomic.LoadUint64(&groups[1])>>(w%64)&1 == 0 {
				break
			}
			return true, int(uint8(atomic.LoadUint64(&groups[2+w%64/8]) >> (w % 8 * 8)))
		}
	}
	return false, 0
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

// resize makes next, drop and part n words, with anything in them.
func (q *query) resize(n int) {
	if n > cap(q.next) || n > cap(q.drop) || n > cap(q.part) {
		q.next, q.drop, q.part = make([]uint64, n), make([]uint64, n), make([]uint64, n)
	}
	q.next, q.drop, q.part = q.next[:n], q.drop[:n], q.part[:n]
}

// fit makes them at least n words, new ones zero, and touches these.
func (q *query) fit(n int) {
	for len(q.next) < n {
		q.touched = append(q.touched, uint16(len(q.next)))
		q.next, q.drop, q.part = append(q.next, 0), append(q.drop, 0), append(q.part, 0)
	}
}

// intersectOne keeps w as the only candidate if it was one. w alone holds the run at block i of the prompt, and the
// first lead of k matching blocks. It reports whether a candidate is left.
func (a *tierScores) intersectOne(w kvblock.Worker, lead, k, i int) bool {
	q := &a.query
	switch q.candidates {
	case everyWorker:
	case oneWorker:
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
	q.candidates, q.one = oneWorker, w
	if lead < k {
		if i+lead > 0 {
			a.record(w, i+lead)
		}
		return false
	}
	return true
}

// recordAll records n blocks for each remaining candidate.
func (a *tierScores) recordAll(n int) {
	switch q := &a.query; q.candidates {
	case everyWorker:
	case oneWorker:
		a.record(q.one, n)
	case workersInSet:
		a.recordSet(q.set, n)
	}
}
