package tokenizer

import (
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
	bytePairs []pairMerge        // byte level: by first byte << 8 | second byte
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

const (
	// keepScratch is the number of symbols up to which buffers are kept for the next request.
	keepScratch = 1 << 16
)

// scratch holds the caches and buffers of one encoding. It belongs to one model.
type scratch struct {
	pieces   [pieceSlots]pieceEntry
	words    [wordSlots]wordEntry
	batches  batches
	few      few
	together [maxTogether]few // words of a batch

	symbols  []kvblock.Token
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

func newScratch() *scratch { return &scratch{} }

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
	out = b.add(out, s, i, j, sc)
	return b.flush(out, s, sc)
}

// encode appends the ids of s[i:j] by merging.
func (b *bpe) encode(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	if !b.begin(&sc.few, s[i:j], sc) {
		return b.mergeHeap(out, sc)
	}
	for sc.few.step(&b.pairs) {
	}
	return sc.few.appendTo(out)
}

// begin puts the symbols of text, which is not empty, into f, or, if they are too many, into sc.symbols, and reports which.
func (b *bpe) begin(f *few, text string, sc *scratch) bool {
	if b.byteLevel && len(text) <= fewSymbols {
		f.beginBytes(b, text)
		return true
	}
	sc.symbols = sc.symbols[:0]
	if b.byteLevel {
		for k := range len(text) {
			sc.symbols = append(sc.symbols, b.byteToken[text[k]])
		}
	} else {
		b.runeSymbols(text, sc)
	}
	if len(sc.symbols) > fewSymbols {
		return false
	}
	f.beginSymbols(&b.pairs, sc.symbols)
	return true
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
			if rank := b.pairs.get(symbols[i], symbols[i+1]).rank; rank != noRank {
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
		merge := b.pairs.get(symbols[left], symbols[right])
		if merge.rank != c.rank {
			continue
		}
		into := merge.into
		symbols[left], symbols[right] = into, gone
		after := next[right]
		next[left] = after
		if int(after) < n {
			previous[after] = left
			if rank := b.pairs.get(into, symbols[after]).rank; rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, left})
			}
		}
		if before := previous[left]; before >= 0 {
			if rank := b.pairs.get(symbols[before], into).rank; rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, before})
			}
		}
	}
	for i := int32(0); int(i) < n; i = next[i] {
		out = append(out, symbols[i])
	}
	return out
}
