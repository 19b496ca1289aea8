package bpe

import (
	"slices"
	"time"
	"unicode/utf8"

	"kvepp/kvblock"
)

// bpeModel is the byte-pair-encoding model. A piece of text becomes its smallest symbols. Then the two neighbours whose
// merge has the lowest rank merge, until no neighbours merge.
type bpeModel struct {
	vocabulary *vocabulary
	merges     mergeTable

	byteLevel  bool
	byteMerges []uint32           // byte level: ranks by first byte << 8 | second byte
	byteToken  [256]kvblock.Token // byte level: the token of each byte; else: of its fallback, such as <0x0A>
	byteKnown  [256]bool          // whether byteToken has a token for the byte
	fallback   bool

	// SentencePiece style: the smallest symbols are characters.
	runeToken  runeTable
	unknown    kvblock.Token
	hasUnknown bool
	fuse       bool       // a run of unknown characters is one unknown token
	joins      *joinTable // nil: a piece must not be cut
}

const (
	// keepScratch is the number of symbols up to which buffers are kept for the next request.
	keepScratch = 1 << 16
)

// scratch holds the caches and buffers of one encoding. It belongs to one model.
type scratch struct {
	cache *pieceCache
	batch batch
	merge smallMerge
	group [maxGroup]smallMerge // pieces of a batch that merge in turn

	budget Budget

	raw      []kvblock.Token // symbols before they merge
	symbols  []kvblock.Token
	previous []int32
	next     []int32
	heap     []mergeCandidate
	text     [2][]byte // normalizer output, alternating

	// for pre-tokenizers that are stages
	rewritten   [][]byte      // by stage
	rewriteRoom int           // bytes that the stages may still write
	searched    time.Duration // time that patterns have taken
	letters     []rune        // texts in a pattern's alphabet
}

func newScratch() *scratch { return &scratch{cache: new(pieceCache)} }

// trim drops buffers that a long text made large.
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
func (b *bpeModel) appendPiece(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	out = b.add(out, s, i, j, sc)
	return b.flush(out, s, sc)
}

// encode appends the ids of s[i:j] by merging.
func (b *bpeModel) encode(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	if !b.begin(&sc.merge, s[i:j], sc) {
		return b.mergeMany(out, s[i:j], mergeWindow, sc)
	}
	sc.merge.run(&b.merges)
	return sc.merge.appendTo(out)
}

// begin puts the symbols of text, which is not empty, into f. It returns false if there are too many.
func (b *bpeModel) begin(f *smallMerge, text string, sc *scratch) bool {
	if len(text) <= smallMergeSymbols && b.byteLevel {
		f.beginBytes(b, text)
		return true
	}
	if len(text) > utf8.UTFMax*smallMergeSymbols {
		return false // it may have no symbol at all; mergeMany handles that too
	}
	source := symbols{model: b, text: text}
	sc.symbols = source.next(sc.symbols[:0], smallMergeSymbols+1)
	if len(sc.symbols) > smallMergeSymbols {
		return false
	}
	f.beginSymbols(&b.merges, sc.symbols)
	return true
}

// symbols produces the smallest symbols of a text, some at a time.
type symbols struct {
	model   *bpeModel
	text    string // the rest of the text
	waiting bool   // the unknown token waits for the next known character
}

// next appends symbols until there are at least n, or no more.
func (y *symbols) next(to []kvblock.Token, n int) []kvblock.Token {
	if b := y.model; b.byteLevel {
		some := y.text[:min(max(n-len(to), 0), len(y.text))]
		y.text = y.text[len(some):]
		for k := range len(some) {
			to = append(to, b.byteToken[some[k]])
		}
		return to
	}
	return y.nextRunes(to, n)
}

// nextRunes is next for SentencePiece-style models. A character becomes its token, else its bytes, else the unknown
// token, else nothing.
func (y *symbols) nextRunes(to []kvblock.Token, n int) []kvblock.Token {
	// The unknown token waits for the next known character. Fallback bytes do not count as one, so they come before it,
	// as in Hugging Face tokenizers.
	b, s, waiting := y.model, y.text, y.waiting
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
func (b *bpeModel) hasBytes(character string) bool {
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

// pushCandidate, popCandidate and siftDown keep sc.heap a binary heap. container/heap would call through an interface
// for each comparison, which doubles the time of a long piece.
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

// gone marks a symbol that merged into its left neighbour. Ids are below 2^31.
const gone = ^kvblock.Token(0)

// mergeWindow is the number of symbols of a long piece that merge at a time; mergeWindowMost is the most that mergeMany
// raises it to.
const (
	mergeWindow     = 8 << 10
	mergeWindowMost = 1 << 18
)

// mergeMany appends the ids of a text with many symbols. It merges one window of size symbols at a time, which bounds
// memory and time.
//
// Windows change no id, for this reason. Take two neighbouring tokens that stay separate when their symbols merge
// alone. Then no merge crosses the place between them. Proof: up to the first merge that crossed it, each side would
// have merged as if it were alone. The two symbols at that place would then be the end of the first token and the
// beginning of the second, and the two tokens alone have these symbols at that time too.
//
// So a window's tokens equal those of the whole text up to a place between two of them, if the window that begins there
// begins with a token that stays separate from the token before.
func (b *bpeModel) mergeMany(out []kvblock.Token, text string, size int, sc *scratch) []kvblock.Token {
	source := symbols{model: b, text: text}
	sc.raw = source.next(sc.raw[:0], 2*size)
	b.mergeHeap(sc.raw[:min(size, len(sc.raw))], sc)
	for {
		if sc.budget.stopped() {
			return out
		}
		raw := sc.raw
		out = sc.budget.grow(out, size, len(text)-len(source.text)-len(raw))
		if len(raw) <= size { // the last window
			for i := 0; i < len(raw); i = int(sc.next[i]) {
				out = append(out, sc.symbols[i])
			}
			return out
		}
		// Places where the next window may begin, the best one last. count is the number of tokens before the place;
		// before is where the last of them begins.
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
		if !found { // text behind the window can change all of it: use a larger window
			if size *= 2; size > mergeWindowMost {
				sc.budget.err = ErrMemory
				return out[:mark]
			}
			out = out[:mark]
			sc.raw = source.next(sc.raw, 2*size)
			b.mergeHeap(sc.raw[:min(size, len(sc.raw))], sc)
		}
	}
}

// stayApart reports whether two tokens, given by their symbols, stay separate when only they merge. It overwrites the
// results of mergeHeap.
func (b *bpeModel) stayApart(left, right []kvblock.Token, sc *scratch) bool {
	both := append(append(make([]kvblock.Token, 0, len(left)+len(right)), left...), right...)
	if len(both) > smallMergeSymbols {
		b.mergeHeap(both, sc)
		return sc.next[0] == int32(len(left)) && int(sc.next[len(left)]) == len(both)
	}
	f := &sc.merge
	f.beginSymbols(&b.merges, both)
	f.run(&b.merges)
	return f.places == 1|1<<uint(len(left))
}

// mergeHeap merges symbols in O(n log n) with a linked list of symbols and a heap of candidates. It skips candidates
// that no longer describe the list. The result is in sc.symbols: start at place 0 and follow sc.next until len(raw).
func (b *bpeModel) mergeHeap(raw []kvblock.Token, sc *scratch) {
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
			if rank := b.merges.get(symbols[i], symbols[i+1]).rank; rank != noRank {
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
		merge := b.merges.get(symbols[left], symbols[right])
		if merge.rank != c.rank {
			continue
		}
		into := merge.into
		symbols[left], symbols[right] = into, gone
		after := next[right]
		next[left] = after
		if int(after) < n {
			previous[after] = left
			if rank := b.merges.get(into, symbols[after]).rank; rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, left})
			}
		}
		if before := previous[left]; before >= 0 {
			if rank := b.merges.get(symbols[before], into).rank; rank != noRank {
				sc.pushCandidate(mergeCandidate{rank, before})
			}
		}
	}
}
