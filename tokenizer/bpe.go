package tokenizer

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync/atomic"
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
	runeToken  map[rune]kvblock.Token
	unknown    kvblock.Token
	hasUnknown bool
	fuse       bool // a run of unknown characters is one unknown token
	// marker cuts a piece before ▁ wherever no token continues across; nil where that is not known to be exact.
	marker *markerCut

	words []atomic.Pointer[cachedWord]
	seed  maphash.Seed
}

// cachedWord is a piece and its ids; immutable.
type cachedWord struct {
	text string
	ids  []kvblock.Token
}

const (
	// wordSlots is the size of the word cache: a direct-mapped table, so that looking up takes no lock and memory is bounded
	// (about 45 MB if every slot held the longest word; a tenth of that in practice).
	wordSlots = 1 << 16
	// maxCachedWord is the longest piece that is worth a slot, in bytes.
	maxCachedWord = 128
	// listMerge is the number of symbols up to which scanning a list beats a heap.
	listMerge = 48
	// keepScratch is the number of symbols up to which buffers are kept for the next request.
	keepScratch = 1 << 16
)

// scratch holds the buffers of one encoding.
type scratch struct {
	symbols  []kvblock.Token
	ranks    []uint32
	into     []kvblock.Token
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

func (sc *scratch) reusable() bool {
	bytes := cap(sc.text[0]) + cap(sc.text[1])
	for _, buf := range sc.rewritten {
		bytes += cap(buf)
	}
	return cap(sc.symbols) <= keepScratch && cap(sc.heap) <= keepScratch && cap(sc.spans) <= keepScratch && cap(sc.letters) <= 8*keepScratch &&
		bytes <= 8*keepScratch
}

// appendPiece appends the ids of the piece s[i:j].
func (b *bpe) appendPiece(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	if id, ok := b.vocabulary.find(s, i, j); ok {
		return append(out, id)
	}
	if j-i > maxCachedWord {
		return b.encode(out, s, i, j, sc)
	}
	slot := &b.words[hashRange(b.seed, s, i, j)%wordSlots]
	if w := slot.Load(); w != nil && w.text == s[i:j] {
		return append(out, w.ids...)
	}
	before := len(out)
	out = b.encode(out, s, i, j, sc)
	slot.Store(&cachedWord{strings.Clone(s[i:j]), slices.Clone(out[before:])})
	return out
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
		switch id, ok := b.runeToken[r]; {
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
	ranks, into := sc.ranks[:0], sc.into[:0]
	for i := 0; i+1 < len(symbols); i++ {
		rank, id := b.pairs.get(symbols[i], symbols[i+1])
		ranks, into = append(ranks, rank), append(into, id)
	}
	sc.ranks, sc.into = ranks, into
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
		symbols[at] = into[at]
		symbols = append(symbols[:at+1], symbols[at+2:]...)
		ranks = append(ranks[:at], ranks[at+1:]...)
		into = append(into[:at], into[at+1:]...)
		if at > 0 {
			ranks[at-1], into[at-1] = b.pairs.get(symbols[at-1], symbols[at])
		}
		if at < len(ranks) {
			ranks[at], into[at] = b.pairs.get(symbols[at], symbols[at+1])
		}
	}
}

// mergeCandidate is a possible merge of the symbol at a position with its right neighbour.
type mergeCandidate struct {
	rank     uint32
	position int32
	into     kvblock.Token
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
			if rank, id := b.pairs.get(symbols[i], symbols[i+1]); rank != noRank {
				sc.heap = append(sc.heap, mergeCandidate{rank, int32(i), id})
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
		if rank, id := b.pairs.get(symbols[left], symbols[right]); rank != c.rank || id != c.into {
			continue
		}
		symbols[left], symbols[right] = c.into, gone
		after := next[right]
		next[left] = after
		if int(after) < n {
			previous[after] = left
			if rank, id := b.pairs.get(c.into, symbols[after]); rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, left, id})
			}
		}
		if before := previous[left]; before >= 0 {
			if rank, id := b.pairs.get(symbols[before], c.into); rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, before, id})
			}
		}
	}
	for i := int32(0); int(i) < n; i = next[i] {
		out = append(out, symbols[i])
	}
	return out
}

// spaceMarker is U+2581, which SentencePiece writes for a space.
const spaceMarker = "▁"

// markerCut knows where a piece may be cut without changing its ids. SentencePiece-style models have no pre-tokenizer,
// so that a whole prompt is one piece; but merges make tokens, and if no token of the vocabulary contains "x▁" then no
// merge can reach across a cut between x and ▁. Cut so, the pieces are words, and words repeat.
type markerCut struct {
	joined map[rune]struct{} // every x such that some token contains "x▁"
}

// next returns the first cut in s[i:j] after i, or j.
func (m *markerCut) next(s string, i, j int) int {
	for k := i + 1; k+len(spaceMarker) <= j; {
		n := strings.Index(s[k:j], spaceMarker)
		if n < 0 {
			return j
		}
		k += n
		r, _ := utf8.DecodeLastRuneInString(s[i:k])
		if _, ok := m.joined[r]; !ok {
			return k
		}
		k += len(spaceMarker)
	}
	return j
}
