package tokenizer

import (
	"math/bits"
	"slices"
	"unicode/utf8"

	"kvepp/kvblock"
)

// bpe is the byte-pair-encoding model: a piece of text becomes its smallest symbols, and then the two neighbours whose
// merge was learnt earliest merge, until no neighbours do.
type bpe struct {
	vocabulary *vocabulary
	pairs      pairTable

	byteLevel bool
	byteToken [256]kvblock.Token // byte level: the token of each byte; else: of its fallback, such as <0x0A>
	byteKnown [256]bool          // whether byteToken has one
	fallback  bool

	// SentencePiece style: the smallest symbols are characters.
	runeToken  runeTable
	unknown    kvblock.Token
	hasUnknown bool
	fuse       bool    // a run of unknown characters is one unknown token
	joints     *joints // nil: a piece must not be cut
}

// Pieces repeat, and the tables of a large vocabulary do not fit into a processor's caches. So each scratch remembers what
// pieces became, in direct-mapped tables without pointers: a lookup takes no lock, allocates nothing, and stays near the
// core. Their sizes bound the memory: about a MiB for each encoding that runs at the same time.
const (
	pieceSlots = 1 << 13
	wordSlots  = 1 << 11
	pairSlots  = 1 << 13
	// maxWord is the longest piece that is remembered, in bytes, and maxWordIDs the most ids.
	maxWord    = 60
	maxWordIDs = 15
	// listMerge is the number of symbols up to which scanning a list beats a heap.
	listMerge = 48
	// keepScratch is the number of symbols up to which buffers are kept for the next request.
	keepScratch = 1 << 16
)

// pieceEntry is a piece of up to 16 bytes that is one to three tokens.
type pieceEntry struct {
	low, high uint64
	ids       [3]kvblock.Token
	size      uint8 // in bytes; 0: a free slot
	count     uint8
}

// wordEntry is a longer piece, or one of more tokens.
type wordEntry struct {
	ids   [maxWordIDs]kvblock.Token
	text  [maxWord]byte
	size  uint8 // in bytes; 0: a free slot
	count uint8
}

// scratch holds the caches and buffers of one encoding. It belongs to one model.
type scratch struct {
	pieces [pieceSlots]pieceEntry
	words  [wordSlots]wordEntry
	batch  batch
	merges [pairSlots]uint64 // slots of pairs, those that do not merge included

	symbols  []kvblock.Token
	ranks    []uint32
	previous []int32
	next     []int32
	heap     []mergeCandidate
	text     [2][]byte // normalizer output, alternating

	// of pre-tokenizers that are stages
	rewritten [][]byte // by stage
	spans     []span
	letters   []rune // a text in a pattern's alphabet
	offsets   []int32
}

func newScratch() *scratch {
	sc := &scratch{}
	for i := range sc.merges {
		sc.merges[i] = freeSlot
	}
	return sc
}

// trim lets go of buffers that a long text made large.
func (sc *scratch) trim() {
	if cap(sc.symbols) > keepScratch || cap(sc.heap) > keepScratch {
		sc.symbols, sc.previous, sc.next, sc.heap = nil, nil, nil, nil
	}
	for i := range sc.text {
		if cap(sc.text[i]) > 8*keepScratch {
			sc.text[i] = nil
		}
	}
	for i := range sc.rewritten {
		if cap(sc.rewritten[i]) > 8*keepScratch {
			sc.rewritten[i] = nil
		}
	}
	if cap(sc.spans) > keepScratch {
		sc.spans = nil
	}
	if cap(sc.letters) > 8*keepScratch {
		sc.letters, sc.offsets = nil, nil
	}
}

// appendPiece appends the ids of the piece s[i:j], which is not empty.
func (b *bpe) appendPiece(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	n := j - i
	if n > 16 {
		return b.appendWord(out, s, i, j, sc)
	}
	low, high := load128(s, i, n)
	return b.appendShort(out, s, i, n, low, high, sc)
}

// appendShort is appendPiece for n bytes, at most 16, which low and high are.
func (b *bpe) appendShort(out []kvblock.Token, s string, i, n int, low, high uint64, sc *scratch) []kvblock.Token {
	if id, ok := b.vocabulary.findWords(low, high, n); ok {
		return append(out, id)
	}
	e := &sc.pieces[mix2(low, high+uint64(n))%pieceSlots]
	if e.low == low && e.high == high && int(e.size) == n {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.appendWord(out, s, i, i+n, sc)
	if count := len(out) - before; count <= len(e.ids) {
		*e = pieceEntry{low: low, high: high, size: uint8(n), count: uint8(count)}
		copy(e.ids[:], out[before:])
	}
	return out
}

// batch holds pieces that were cut but not looked up yet. A large vocabulary does not fit into the caches, so that nearly
// every new word waits for memory; the slots of a whole batch are touched at once, and the waits overlap.
type batch struct {
	count   int
	pieces  [batchSize + windowSize]batchPiece
	touched uint64 // keeps the compiler from leaving the touching out
}

const batchSize = 32

type batchPiece struct {
	low, high uint64
	start     int
	size      int
}

// add puts the piece s[i:j] into the batch, and appends the ids of all of it when it is full.
func (b *bpe) add(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	p := &sc.batch.pieces[sc.batch.count]
	p.start, p.size = i, j-i
	if p.size <= 16 {
		p.low, p.high = load128(s, i, p.size)
	}
	if sc.batch.count++; sc.batch.count >= batchSize {
		return b.flush(out, s, sc)
	}
	return out
}

// addAll puts the pieces of s[i:i+size] into the batch, which begin at the bits of starts, the lowest being s[i], and appends
// the ids of all of it when it is full.
func (b *bpe) addAll(out []kvblock.Token, s string, i, size int, starts uint64, sc *scratch) []kvblock.Token {
	batch := &sc.batch
	count := batch.count
	starts &= 1<<uint(size) - 1
	for starts != 0 {
		from := bits.TrailingZeros64(starts)
		starts &= starts - 1
		to := min(bits.TrailingZeros64(starts), size)
		p := &batch.pieces[count]
		count++
		p.start, p.size = i+from, to-from
		if p.size <= 16 {
			p.low, p.high = load128(s, p.start, p.size)
		}
	}
	batch.count = count
	if count >= batchSize {
		return b.flush(out, s, sc)
	}
	return out
}

// flush appends the ids of the batch.
func (b *bpe) flush(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	pieces := sc.batch.pieces[:sc.batch.count]
	sc.batch.count = 0
	var touched uint64
	for k := range pieces {
		switch p := &pieces[k]; {
		case p.size <= 8:
			touched += b.vocabulary.short[b.vocabulary.shortSlot(p.low, p.size)].text
		case p.size <= 16:
			touched += b.vocabulary.middle[b.vocabulary.middleSlot(p.low, p.high, p.size)].low
		}
	}
	sc.batch.touched = touched
	for k := range pieces {
		p := &pieces[k]
		if p.size > 16 {
			out = b.appendWord(out, s, p.start, p.start+p.size, sc)
			continue
		}
		out = b.appendShort(out, s, p.start, p.size, p.low, p.high, sc)
	}
	return out
}

// appendWord appends the ids of a piece that is longer than 16 bytes or no token by itself.
func (b *bpe) appendWord(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	n := j - i
	if n > 16 {
		if id, ok := b.vocabulary.long[s[i:j]]; ok && id.direct {
			return append(out, id.id)
		}
		if n > maxWord {
			return b.encode(out, s, i, j, sc)
		}
	}
	e := &sc.words[hashText(s[i:j])%wordSlots]
	if int(e.size) == n && string(e.text[:n]) == s[i:j] {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.encode(out, s, i, j, sc)
	if len(out)-before <= maxWordIDs {
		e.size = uint8(copy(e.text[:], s[i:j]))
		e.count = uint8(copy(e.ids[:], out[before:]))
	}
	return out
}

// rank returns the rank of a pair, through the scratch's cache.
func (b *bpe) rank(left, right kvblock.Token, sc *scratch) uint32 {
	key := pairKey(left, right)
	h := mix(key)
	e := &sc.merges[(h>>32)%pairSlots] // other bits than in the table, where neighbours here would be neighbours
	if (*e^key)>>rankBits != 0 {
		*e = key | uint64(b.pairs.get(key, h))
	}
	return uint32(*e) & noRank
}

// rankBoth is rank of two pairs that share a token; the two waits for memory overlap.
func (b *bpe) rankBoth(left, middle, right kvblock.Token, sc *scratch) (uint32, uint32) {
	key1, key2 := pairKey(left, middle), pairKey(middle, right)
	h1, h2 := mix(key1), mix(key2)
	e1, e2 := &sc.merges[(h1>>32)%pairSlots], &sc.merges[(h2>>32)%pairSlots]
	known1, known2 := (*e1^key1)>>rankBits == 0, (*e2^key2)>>rankBits == 0
	if !known1 && !known2 {
		mask := uint64(len(b.pairs.slots) - 1)
		sc.batch.touched = b.pairs.slots[h1&mask] + b.pairs.slots[h2&mask]
	}
	return b.rank(left, middle, sc), b.rank(middle, right, sc)
}

// encode appends the ids of s[i:j] by merging.
func (b *bpe) encode(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	sc.symbols = sc.symbols[:0]
	if b.byteLevel {
		for k := i; k < j; k++ {
			sc.symbols = append(sc.symbols, b.byteToken[s[k]])
		}
	} else {
		b.runeSymbols(s[i:j], sc)
	}
	if len(sc.symbols) <= listMerge {
		return b.mergeList(out, sc)
	}
	return b.mergeHeap(out, sc)
}

// runeSymbols puts the symbols of a SentencePiece-style piece into the scratch: a token per character, or its bytes, or
// the unknown token, or, without one, nothing.
func (b *bpe) runeSymbols(s string, sc *scratch) {
	// The unknown token waits for the next known character. Bytes do not count as that, so they overtake it, as in Hugging
	// Face tokenizers.
	waiting := false
	for k := 0; k < len(s); {
		r, n := utf8.DecodeRuneInString(s[k:])
		switch id, ok := b.runeToken.get(r); {
		case ok:
			if waiting {
				sc.symbols = append(sc.symbols, b.unknown)
				waiting = false
			}
			sc.symbols = append(sc.symbols, id)
		case b.fallback && b.hasBytes(s[k:k+n]):
			for x := k; x < k+n; x++ {
				sc.symbols = append(sc.symbols, b.byteToken[s[x]])
			}
		case b.hasUnknown:
			if waiting && !b.fuse {
				sc.symbols = append(sc.symbols, b.unknown)
			}
			waiting = true
		}
		k += n
	}
	if waiting {
		sc.symbols = append(sc.symbols, b.unknown)
	}
}

// hasBytes reports whether every byte of a character has a fallback token.
func (b *bpe) hasBytes(character string) bool {
	for i := range len(character) {
		if !b.byteKnown[character[i]] {
			return false
		}
	}
	return true
}

// mergeList merges few symbols: each round scans the ranks for the lowest, the leftmost on ties.
func (b *bpe) mergeList(out []kvblock.Token, sc *scratch) []kvblock.Token {
	symbols := sc.symbols
	ranks := sc.ranks[:0]
	for i := 0; i+1 < len(symbols); i++ {
		ranks = append(ranks, b.rank(symbols[i], symbols[i+1], sc))
	}
	sc.ranks = ranks
	for {
		best, at := noRank, -1
		for i, rank := range ranks {
			if rank < best {
				best, at = rank, i
			}
		}
		if at < 0 {
			return append(out, symbols...)
		}
		symbols[at] = b.pairs.into[best]
		symbols = append(symbols[:at+1], symbols[at+2:]...)
		ranks = append(ranks[:at], ranks[at+1:]...)
		switch {
		case at > 0 && at < len(ranks):
			ranks[at-1], ranks[at] = b.rankBoth(symbols[at-1], symbols[at], symbols[at+1], sc)
		case at > 0:
			ranks[at-1] = b.rank(symbols[at-1], symbols[at], sc)
		case at < len(ranks):
			ranks[at] = b.rank(symbols[at], symbols[at+1], sc)
		}
	}
}

// mergeCandidate is a possible merge of the symbol at a position with its right neighbour.
type mergeCandidate struct {
	rank     uint32
	position int32
}

func (c mergeCandidate) before(d mergeCandidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.position < d.position
}

// pushCandidate, popCandidate and siftDown keep sc.heap a binary heap. (container/heap calls through an interface for
// each comparison, which doubles the time of a long piece.)
func (sc *scratch) pushCandidate(c mergeCandidate) {
	h := append(sc.heap, c)
	for i := len(h) - 1; i > 0; {
		parent := (i - 1) / 2
		if !h[i].before(h[parent]) {
			break
		}
		h[i], h[parent] = h[parent], h[i]
		i = parent
	}
	sc.heap = h
}

func (sc *scratch) popCandidate() mergeCandidate {
	h := sc.heap
	top := h[0]
	h[0] = h[len(h)-1]
	sc.heap = h[:len(h)-1]
	siftDown(sc.heap, 0)
	return top
}

func siftDown(h []mergeCandidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h[child+1].before(h[child]) {
			child++
		}
		if !h[child].before(h[i]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}

// gone marks a symbol that was merged into its left neighbour; ids are below 2^31.
const gone = ^kvblock.Token(0)

// mergeHeap merges many symbols in O(n log n): a linked list of symbols and a heap of candidates, of which those that no
// longer describe the list are skipped when they come up.
func (b *bpe) mergeHeap(out []kvblock.Token, sc *scratch) []kvblock.Token {
	symbols := sc.symbols
	n := len(symbols)
	sc.previous = slices.Grow(sc.previous[:0], n)[:n]
	sc.next = slices.Grow(sc.next[:0], n)[:n]
	previous, next := sc.previous, sc.next
	sc.heap = sc.heap[:0]
	for i := range symbols {
		previous[i], next[i] = int32(i-1), int32(i+1)
		if i+1 < n {
			if rank := b.rank(symbols[i], symbols[i+1], sc); rank != noRank {
				sc.heap = append(sc.heap, mergeCandidate{rank, int32(i)})
			}
		}
	}
	for i := len(sc.heap)/2 - 1; i >= 0; i-- {
		siftDown(sc.heap, i)
	}
	for len(sc.heap) > 0 {
		c := sc.popCandidate()
		left := c.position
		if symbols[left] == gone {
			continue
		}
		right := next[left]
		if int(right) >= n {
			continue
		}
		if b.rank(symbols[left], symbols[right], sc) != c.rank {
			continue
		}
		into := b.pairs.into[c.rank]
		symbols[left], symbols[right] = into, gone
		after := next[right]
		next[left] = after
		if int(after) < n {
			previous[after] = left
			if rank := b.rank(into, symbols[after], sc); rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, left})
			}
		}
		if before := previous[left]; before >= 0 {
			if rank := b.rank(symbols[before], into, sc); rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, before})
			}
		}
	}
	for i := int32(0); int(i) < n; i = next[i] {
		out = append(out, symbols[i])
	}
	return out
}
