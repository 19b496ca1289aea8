package tokenizer

import (
	"slices"
	"time"
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

	work work

	raw      []kvblock.Token // symbols before they merge
	symbols  []kvblock.Token
	previous []int32
	next     []int32
	heap     []mergeCandidate
	text     [2][]byte // normalizer output, alternating

	// of pre-tokenizers that are stages
	rewritten   [][]byte      // by stage
	rewriteRoom int           // bytes that may still be rewritten
	searched    time.Duration // by patterns
	letters     []rune        // texts in a pattern's alphabet
}

func newScratch() *scratch { return &scratch{} }

// trim lets go of buffers that a long text made large.
func (sc *scratch) trim() {
	if cap(sc.symbols) > keepScratch || cap(sc.heap) > keepScratch {
		sc.symbols, sc.previous, sc.next, sc.heap, sc.raw = nil, nil, nil, nil, nil
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
	if cap(sc.letters) > 8*keepScratch {
		sc.letters = nil
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
		return b.mergeMany(out, s[i:j], mergeWindow, sc)
	}
	for sc.few.step(&b.pairs) {
	}
	return sc.few.appendTo(out)
}

// begin puts the symbols of text, which is not empty, into f, and reports whether they are few enough.
func (b *bpe) begin(f *few, text string, sc *scratch) bool {
	if len(text) <= fewSymbols && b.byteLevel {
		f.beginBytes(b, text)
		return true
	}
	if len(text) > utf8.UTFMax*fewSymbols {
		return false // there may be no symbol at all in it, but then that is found out later too
	}
	source := symbols{bpe: b, text: text}
	sc.symbols = source.next(sc.symbols[:0], fewSymbols+1)
	if len(sc.symbols) > fewSymbols {
		return false
	}
	f.beginSymbols(&b.pairs, sc.symbols)
	return true
}

// symbols are the smallest symbols of a text, of which some are made at a time.
type symbols struct {
	bpe     *bpe
	text    string // that is left
	waiting bool   // for the next known character: the unknown token
}

// next appends symbols until there are at least n, or no more.
func (y *symbols) next(to []kvblock.Token, n int) []kvblock.Token {
	if b := y.bpe; b.byteLevel {
		some := y.text[:min(max(n-len(to), 0), len(y.text))]
		y.text = y.text[len(some):]
		for k := range len(some) {
			to = append(to, b.byteToken[some[k]])
		}
		return to
	}
	return y.nextRunes(to, n)
}

// nextRunes is next for SentencePiece-style models: a token per character, or its bytes, or the unknown token, or,
// without one, nothing.
func (y *symbols) nextRunes(to []kvblock.Token, n int) []kvblock.Token {
	// The unknown token waits for the next known character. Bytes do not count as that, so they overtake it, as in
	// Hugging Face tokenizers.
	b, s, waiting := y.bpe, y.text, y.waiting
	k := 0
	for k < len(s) && len(to) < n {
		r, size := utf8.DecodeRuneInString(s[k:])
		switch id, ok := b.runeToken.get(r); {
		case ok:
			if waiting {
				to = append(to, b.unknown)
				waiting = false
			}
			to = append(to, id)
		case b.fallback && b.hasBytes(s[k:k+size]):
			for x := k; x < k+size; x++ {
				to = append(to, b.byteToken[s[x]])
			}
		case b.hasUnknown:
			if waiting && !b.fuse {
				to = append(to, b.unknown)
			}
			waiting = true
		}
		k += size
	}
	if waiting && k == len(s) {
		to = append(to, b.unknown)
		waiting = false
	}
	y.text, y.waiting = s[k:], waiting
	return to
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

// mergeWindow is how many symbols of a long piece merge at a time, and mergeWindowMost how many at most; see mergeMany.
const (
	mergeWindow     = 8 << 10
	mergeWindowMost = 1 << 18
)

// mergeMany appends the ids of a text with many symbols. It takes memory and time for a window of size of them at a
// time, which changes no id, because of this: if two neighbouring tokens, merged alone, stay the two that they are,
// then no merge ever reaches across the place between them. Up to the first merge that did, each side would have merged
// as if it were alone, and the two symbols at that place would be the end of the one token and the beginning of the
// other, where the two alone have them at that time too.
//
// So the tokens of a window are those of the whole text up to a place between two of them, if the window that begins
// there begins with a token that stays apart from the one before.
func (b *bpe) mergeMany(out []kvblock.Token, text string, size int, sc *scratch) []kvblock.Token {
	source := symbols{bpe: b, text: text}
	sc.raw = source.next(sc.raw[:0], 2*size)
	b.mergeHeap(sc.raw[:min(size, len(sc.raw))], sc)
	for {
		if sc.work.halted() {
			return out
		}
		raw := sc.raw
		out = sc.work.grow(out, size, len(text)-len(source.text)-len(raw))
		if len(raw) <= size { // the last window
			for i := 0; i < len(raw); i = int(sc.next[i]) {
				out = append(out, sc.symbols[i])
			}
			return out
		}
		// The places where the next window may begin, the best last: with how many tokens before it, and where the last
		// of them begins.
		type place struct{ at, count, before int }
		var places []place
		limits := [...]int{size / 2, size - size/8, size - size/32}
		count, before := 0, 0
		for i := 0; i < size; i = int(sc.next[i]) {
			for len(places) < len(limits) && i > 0 && i >= limits[len(places)] {
				places = append(places, place{i, count, before})
			}
			out = append(out, sc.symbols[i])
			before = i
			count++
		}
		mark := len(out) - count
		found := false
		for k := len(places) - 1; k >= 0 && !found; k-- {
			p := places[k]
			b.mergeHeap(raw[p.at:min(p.at+size, len(raw))], sc)
			if found = b.stayApart(raw[p.before:p.at], raw[p.at:p.at+int(sc.next[0])], sc); !found {
				continue
			}
			out = out[:mark+p.count]
			sc.raw = append(raw[:0], raw[p.at:]...)
			sc.raw = source.next(sc.raw, 2*size)
			b.mergeHeap(sc.raw[:min(size, len(sc.raw))], sc)
		}
		if !found { // what is behind the window changes all of it: a larger one
			if size *= 2; size > mergeWindowMost {
				sc.work.err = ErrMemory
				return out[:mark]
			}
			out = out[:mark]
			sc.raw = source.next(sc.raw, 2*size)
			b.mergeHeap(sc.raw[:min(size, len(sc.raw))], sc)
		}
	}
}

// stayApart reports whether two tokens, given by their symbols, stay apart when they are all that merges. It overwrites
// what mergeHeap made.
func (b *bpe) stayApart(left, right []kvblock.Token, sc *scratch) bool {
	both := append(append(make([]kvblock.Token, 0, len(left)+len(right)), left...), right...)
	if len(both) > fewSymbols {
		b.mergeHeap(both, sc)
		return sc.next[0] == int32(len(left)) && int(sc.next[len(left)]) == len(both)
	}
	f := &sc.few
	f.beginSymbols(&b.pairs, both)
	for f.step(&b.pairs) {
	}
	return f.places == 1|1<<uint(len(left))
}

// mergeHeap merges symbols in O(n log n): a linked list of symbols and a heap of candidates, of which those that no
// longer describe the list are skipped when they come up. What is left of raw is in sc.symbols, at the places that
// sc.next leads to from 0 on; it ends with len(raw).
func (b *bpe) mergeHeap(raw []kvblock.Token, sc *scratch) {
	sc.symbols = append(sc.symbols[:0], raw...)
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
}
