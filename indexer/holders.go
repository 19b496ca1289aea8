package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// A holders' record has the holders of a run that several workers hold:
//
//	word 0   words of the bitset | groups << 12 | entries of the list << 24 | holders in the bitset << 44
//	then     the bitset, by worker number: workers that hold the whole run
//	then     the groups
//	then     the list: pairs of a worker's number and its mask
//
// A group has those of 64 workers (with the same number / 64) that hold a prefix of the run and no other block. There
// is a group if at least minGroup of the 64 do so. It takes less memory than the list then, and makes lookups faster
// (recordGroup in scores.go).
//
//	word 0   the workers' numbers / 64
//	word 1   the members, a bit each
//	word 2.. the number of blocks in each worker's prefix, a byte each
//
// Each holder is in exactly one of the bitset, the groups and the list.
const (
	groupWords = 2 + 64/8
	minGroup   = groupWords / 2 // members from which on a group takes no more memory than entries of the list
	maxGroups  = maxWorkers / 64
)

// holder is one holder of a run.
type holder struct {
	worker kvblock.Worker
	mask   uint64
}

// maskOf returns the mask of the blocks of r that worker w holds.
func (t *tier) maskOf(r run, w kvblock.Worker) uint64 { return t.maskIn(t.arena.record(r), w) }

// maskIn is maskOf for the run with these words.
func (t *tier) maskIn(words []uint64, w kvblock.Worker) uint64 {
	if words[1]&manyHolders == 0 {
		if kvblock.Worker(words[1]) == w {
			return words[2]
		}
		return 0
	}
	var h holders
	h.open(t.arena.record(ref(words[1])))
	all := ones(length(words[0]))
	if h.holdsAll(w) {
		return all
	}
	if g := h.group(w); g.has(w) {
		return ones(g.lead(w)) & all
	}
	if i := h.find(w); i >= 0 {
		return h.list[2*i+1] & all
	}
	return 0
}

// union returns the mask of the blocks of r that have a holder.
func (t *tier) union(r run) uint64 {
	words := t.arena.record(r)
	if words[1]&manyHolders == 0 {
		return words[2]
	}
	var h holders
	h.open(t.arena.record(ref(words[1])))
	all := ones(length(words[0]))
	if h.full > 0 {
		return all
	}
	var m uint64
	h.eachGrouped(func(_ kvblock.Worker, lead int) { m |= ones(lead) })
	for i := 1; i < len(h.list); i += 2 {
		m |= h.list[i]
	}
	return m & all
}

// holders is a decoded holders' record, for writers.
type holders struct {
	words  []uint64
	bits   []uint64 // by worker number / 64
	groups []uint64 // groupWords each
	list   []uint64 // worker, mask, worker, mask, ...
	full   int      // workers in bits
}

// open takes a holders' record apart.
func (h *holders) open(words []uint64) {
	nbits, ngroups, nlist, full := holderCounts(words[0])
	groups := 1 + nbits
	list := groups + groupWords*ngroups
	h.words, h.full = words, full
	h.bits, h.groups, h.list = words[1:groups], words[groups:list], words[list:list+2*nlist:len(words)]
}

// holderCounts decodes word 0 of a holders' record.
func holderCounts(word uint64) (nbits, ngroups, nlist, full int) {
	return int(word & 0xfff), int(word >> 12 & 0xfff), int(word >> 24 & 0xfffff), int(word >> 44)
}

func (h *holders) setCounts(full, nlist int) {
	publishWord(&h.words[0], uint64(len(h.bits))|uint64(len(h.groups)/groupWords)<<12|uint64(nlist)<<24|uint64(
		full)<<44)
}

// count returns how many holders there are.
func (h *holders) count() int {
	n := h.full + len(h.list)/2
	for g := h.groups; len(g) > 0; g = g[groupWords:] {
		n += bits.OnesCount64(g[1])
	}
	return n
}

// group returns the group of w, nil if there is none.
func (h *holders) group(w kvblock.Worker) group {
	for g := h.groups; len(g) > 0; g = g[groupWords:] {
		if g[0] == uint64(w/64) {
			return group(g[:groupWords])
		}
	}
	return nil
}

// eachGrouped calls f with each worker in a group, and the number of blocks in its prefix.
func (h *holders) eachGrouped(f func(w kvblock.Worker, lead int)) {
	for g := h.groups; len(g) > 0; g = g[groupWords:] {
		for members := g[1]; members != 0; members &= members - 1 {
			w := kvblock.Worker(64*g[0]) + kvblock.Worker(bits.TrailingZeros64(members))
			f(w, group(g).lead(w))
		}
	}
}

// group is the words of one group, nil if there is none.
type group []uint64

func (g group) has(w kvblock.Worker) bool { return g != nil && g[1]>>(w%64)&1 != 0 }

func (g group) lead(w kvblock.Worker) int { return int(uint8(g[2+w%64/8] >> (w % 8 * 8))) }

func (g group) setLead(w kvblock.Worker, lead int) {
	word, shift := &g[2+w%64/8], w%8*8
	publishWord(word, *word&^(0xff<<shift)|uint64(lead)<<shift)
}

// isPrefix reports whether a mask has one or more leading blocks of a run and no others.
func isPrefix(mask uint64) bool { return mask != 0 && mask&(mask+1) == 0 }

func (h *holders) fits(w kvblock.Worker) bool { return int(w/64) < len(h.bits) }

// holdsAll reports whether w is in the bitset.
func (h *holders) holdsAll(w kvblock.Worker) bool { return h.fits(w) && h.bits[w/64]>>(w%64)&1 != 0 }

// find returns the index of w in the list, -1 if w is not in it.
func (h *holders) find(w kvblock.Worker) int {
	for i := 0; i < len(h.list); i += 2 {
		if h.list[i] == uint64(w) {
			return i / 2
		}
	}
	return -1
}

// prefixHolders returns how many of the 64 workers of w's group are in the list and hold a prefix of the run only.
func (h *holders) prefixHolders(w kvblock.Worker) (n int) {
	for i := 0; i < len(h.list); i += 2 {
		n += b2i(h.list[i]/64 == uint64(w/64) && isPrefix(h.list[i+1]))
	}
	return n
}

// setMask makes w a holder of the blocks of r in more, and no holder of those in less. words are the words of r. It
// returns the mask of the blocks that w held before. Blocks may be left without a holder; see clearMask. If the arena
// is exhausted, it changes nothing and reports false.
func (t *tier) setMask(r run, words []uint64, w kvblock.Worker, less, more uint64) (was uint64, ok bool) {
	n := length(words[0])
	if words[1]&manyHolders == 0 && kvblock.Worker(words[1]) == w { // the only holder
		was = words[2] & ones(n)
		if mask := was&^less | more; mask != was {
			beginWrite(words)
			publishWord(&words[2], mask)
			endWrite(words, n)
		}
		return was, true
	}
	if words[1]&manyHolders == 0 {
		if more == 0 {
			return 0, true
		}
		only := holder{kvblock.Worker(words[1]), words[2] & ones(n)}
		t.holderList = append(t.holderList[:0], only, holder{w, more})
		return 0, t.setHolders(r, t.holderList, n)
	}

	var h holders
	h.open(t.arena.record(ref(words[1])))
	g := h.group(w)
	inBits, inGroup, at := h.holdsAll(w), g.has(w), -1
	switch {
	case inBits:
		was = ones(n)
	case inGroup:
		was = ones(g.lead(w)) & ones(n)
	default:
		if at = h.find(w); at >= 0 {
			was = h.list[2*at+1] & ones(n)
		}
	}
	mask := was&^less | more
	if mask == was {
		return was, true
	}
	toBits := mask == ones(n) && h.fits(w)
	toGroup := !toBits && g != nil && isPrefix(mask)
	toList := mask != 0 && !toBits && !toGroup
	full, nlist := h.full, len(h.list)/2
	// The list is full, or enough prefixes for a new group: make another record.
	if toList && at < 0 && (cap(h.list)-len(h.list) < 2 || isPrefix(mask) && h.prefixHolders(w)+1 >= minGroup) {
		t.holderList = append(t.collect(r, 0, n, w), holder{w, mask})
		return was, t.setHolders(r, t.holderList, n)
	}
	beginWrite(words)
	if inBits != toBits {
		publishWord(&h.bits[w/64], h.bits[w/64]^1<<(w%64))
		full += 1 - 2*b2i(inBits)
	}
	if toGroup {
		g.setLead(w, bits.TrailingZeros64(^mask))
	}
	if inGroup != toGroup {
		publishWord(&g[1], g[1]^1<<(w%64))
	}
	list := h.list[:cap(h.list)]
	switch {
	case toList && at >= 0:
		publishWord(&list[2*at+1], mask)
	case toList:
		publishWord(&list[2*nlist], uint64(w))
		publishWord(&list[2*nlist+1], mask)
		nlist++
	case at >= 0: // the last entry takes its place
		nlist--
		publishWord(&list[2*at], list[2*nlist])
		publishWord(&list[2*at+1], list[2*nlist+1])
	}
	h.setCounts(full, nlist)
	endWrite(words, n)
	if h.full, h.list = full, list[:2*nlist]; mask == 0 && h.count() == 1 {
		return was, t.setHolders(r, t.collect(r, 0, n, noWorker), n)
	}
	return was, true
}

// canLengthen reports whether lengthen can extend the run for w in place. Each other holder of the whole run must have
// a group, or room in the list where they stay too few for a group.
func (h *holders) canLengthen(w kvblock.Worker) bool {
	others := 0 // new entries of the list
	for j, word := range h.bits {
		first := kvblock.Worker(64 * j)
		if j == int(w/64) {
			word &^= 1 << (w % 64)
		}
		if word == 0 || h.group(first) != nil {
			continue
		}
		n := bits.OnesCount64(word)
		if others += n; h.prefixHolders(first)+n >= minGroup {
			return false
		}
	}
	return 2*others <= cap(h.list)-len(h.list) && (h.holdsAll(w) || h.group(w).has(w))
}

// lengthen makes w, which holds all n blocks of the run, a holder of k more behind them. The caller has called
// beginWrite.
func (h *holders) lengthen(w kvblock.Worker, n, k int) {
	own := uint64(1) << (w % 64)
	for j, word := range h.bits {
		others := word
		if j == int(w/64) {
			others &^= own
		}
		if others == 0 {
			continue
		}
		first := kvblock.Worker(64 * j)
		g := h.group(first)
		for rest := others; rest != 0; rest &= rest - 1 {
			other := first + kvblock.Worker(bits.TrailingZeros64(rest))
			if g != nil {
				g.setLead(other, n)
				continue
			}
			at := len(h.list)
			h.list = h.list[:at+2]
			publishWord(&h.list[at], uint64(other))
			publishWord(&h.list[at+1], ones(n))
		}
		if g != nil {
			publishWord(&g[1], g[1]|others)
		}
		publishWord(&h.bits[j], word&^others)
		h.full -= bits.OnesCount64(others)
	}
	if g := h.group(w); g.has(w) {
		if g.setLead(w, n+k); h.fits(w) {
			publishWord(&g[1], g[1]&^own)
			publishWord(&h.bits[w/64], h.bits[w/64]|own)
			h.full++
		}
	}
	for i := 1; i < len(h.list); i += 2 {
		publishWord(&h.list[i], h.list[i]&ones(n))
	}
	h.setCounts(h.full, len(h.list)/2)
}

// noWorker is the number of no worker.
const noWorker kvblock.Worker = 1<<32 - 1

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// collect returns the holders of n blocks of r from block i on, with their masks of these blocks, without the worker
// except. The result is valid until the next call.
func (t *tier) collect(r run, i, n int, except kvblock.Worker) []holder {
	t.holderList = t.holderList[:0]
	add := func(w kvblock.Worker, mask uint64) {
		if mask = mask >> i & ones(n); mask != 0 && w != except {
			t.holderList = append(t.holderList, holder{w, mask})
		}
	}
	words := t.arena.record(r)
	if words[1]&manyHolders == 0 {
		add(kvblock.Worker(words[1]), words[2])
		return t.holderList
	}
	var h holders
	h.open(t.arena.record(ref(words[1])))
	for j, word := range h.bits {
		for ; word != 0; word &= word - 1 {
			add(kvblock.Worker(64*j+bits.TrailingZeros64(word)), ones(maxRun))
		}
	}
	h.eachGrouped(func(w kvblock.Worker, lead int) { add(w, ones(lead)) })
	for j := 0; j < len(h.list); j += 2 {
		add(kvblock.Worker(h.list[j]), h.list[j+1])
	}
	return t.holderList
}

// setHolders makes list the holders of r and n its number of blocks. It reports failure, changing nothing, if the arena
// is full.
func (t *tier) setHolders(r run, list []holder, n int) bool {
	who, mask, ok := t.makeHolders(list, n)
	if !ok {
		return false
	}
	words := t.arena.record(r)
	old := words[1]
	beginWrite(words)
	publishWord(&words[1], who|old&followerBits)
	publishWord(&words[2], mask)
	endWrite(words, n)
	if old&manyHolders != 0 {
		t.arena.release(ref(old))
	}
	return true
}

// makeHolders returns words 1 and 2 of a run of n blocks with these holders. It reports failure if the arena is full.
func (t *tier) makeHolders(list []holder, n int) (who, mask uint64, ok bool) {
	switch len(list) {
	case 0:
		return uint64(noWorker), 0, true
	case 1:
		return uint64(list[0].worker), list[0].mask, true
	}
	at, ok := t.allocHolders(list, n)
	return manyHolders | uint64(at), 0, ok
}

// allocHolders returns a new record for these holders of a run of n blocks.
func (t *tier) allocHolders(list []holder, n int) (ref, bool) {
	full, top := 0, kvblock.Worker(0)
	for _, h := range list {
		if h.mask == ones(n) {
			full++
			top = max(top, h.worker)
		}
	}
	nbits := int(top/64) + 1
	if full == 0 || nbits > 2*full { // a bitset would be larger than the list
		nbits, full = 0, 0
	}
	ngroups, nlist := 0, 0
	for _, e := range list {
		if nbits > 0 && e.mask == ones(n) {
			continue
		}
		nlist++
		if isPrefix(e.mask) {
			of := &t.groupScratch[e.worker/64]
			if of.members++; of.members == minGroup {
				ngroups++
				nlist -= minGroup
			} else if of.members > minGroup {
				nlist--
			}
		}
	}
	at, ok := t.arena.alloc(kindHolders, classFor(1+nbits+groupWords*ngroups+2*nlist+2)) // room for one more entry
	if ok {
		words := t.arena.record(at)
		publishWord(&words[0], uint64(nbits)|uint64(ngroups)<<12|uint64(nlist)<<24|uint64(full)<<44)
		var h holders
		h.open(words)
		t.fillHolders(&h, list, n)
	}
	for _, e := range list {
		t.groupScratch[e.worker/64] = groupCount{}
	}
	return at, ok
}

// groupCount is scratch of allocHolders for one group.
type groupCount struct {
	members uint16 // workers that hold a prefix of the run
	at      uint16 // offset of the group in holders.groups, plus 1; 0 before the group is written
}

// fillHolders writes the holders of a run of n blocks into a record that has room for them.
func (t *tier) fillHolders(h *holders, entries []holder, n int) {
	for i := range h.bits {
		publishWord(&h.bits[i], 0)
	}
	groups, list := 0, h.list
	for _, e := range entries {
		of := &t.groupScratch[e.worker/64]
		switch {
		case h.full > 0 && e.mask == ones(n):
			publishWord(&h.bits[e.worker/64], h.bits[e.worker/64]|1<<(e.worker%64))
		case isPrefix(e.mask) && of.members >= minGroup:
			if of.at == 0 {
				of.at = uint16(groups + 1)
				publishWord(&h.groups[groups], uint64(e.worker/64))
				publishWord(&h.groups[groups+1], 0)
				groups += groupWords
			}
			g := group(h.groups[of.at-1:])
			publishWord(&g[1], g[1]|1<<(e.worker%64))
			g.setLead(e.worker, bits.TrailingZeros64(^e.mask))
		default:
			publishWord(&list[0], uint64(e.worker))
			publishWord(&list[1], e.mask)
			list = list[2:]
		}
	}
}
