package bpe

import (
	"math/bits"
	"slices"
	"strings"
	"unicode/utf8"

	"kvepp/kvblock"
)

// SentencePiece-style models write a space as ▁ and have no pre-tokenizer, so a whole prompt is one piece of text. Two
// methods make them as fast as other models. Neither changes an id.
//
// First, the encoder cuts text at places that no merge crosses; see joinTable. Such a vocabulary was trained on words.
// It joins neither letters with punctuation nor any character with a following ▁, so most pieces are words.
//
// Second, the encoder does not rewrite text. If a model treats ▁ and a space alike, its tokens are stored with spaces;
// see spacing.

// spaceMarker is U+2581, which SentencePiece writes for a space.
const spaceMarker = "▁"

// spacing describes a model that turns every space into ▁. Its tokens are stored with spaces in place of ▁, and its
// text is encoded unchanged, except for the prefix.
type spacing struct {
	prefix     bool // a space comes before each stretch of text
	unlessOne  bool // except before one that begins with a space
	onlyAtHead bool // only before the first stretch of the text
}

// spacingOf returns the spacing that is equivalent to a normalizer and stages; nil if there is none.
func spacingOf(n normalizer, stages []stage) *spacing {
	var sp spacing
	switch {
	case len(n) == 0:
		if len(stages) == 0 || stages[0].spacing == nil {
			return nil
		}
		sp = *stages[0].spacing
		stages = stages[1:]
	case n[len(n)-1].replacesSpace() && len(n) == 1:
	case n[len(n)-1].replacesSpace() && len(n) == 2 && n[0].prefix == spaceMarker:
		sp.prefix = true
	default:
		return nil
	}
	for i := range stages {
		if !stages[i].onSpace { // else it cuts at spaces, and no space is left
			return nil
		}
	}
	return &sp
}

// replacesSpace reports whether the step makes every space a ▁.
func (step *normalizerStep) replacesSpace() bool { return step.old == " " && step.new == spaceMarker }

// needsPrefix reports whether a space is put before a stretch of text. first is set for the text's first stretch.
func (sp *spacing) needsPrefix(stretch string, first bool) bool {
	return sp.prefix && (first || !sp.onlyAtHead) &&
		!(sp.unlessOne && (stretch[0] == ' ' || strings.HasPrefix(stretch, spaceMarker)))
}

// unmark appends text with spaces for ▁.
func unmark(to []byte, text string) []byte {
	for {
		n := strings.Index(text, spaceMarker)
		if n < 0 {
			return append(to, text...)
		}
		to = append(append(to, text[:n]...), ' ')
		text = text[n+len(spaceMarker):]
	}
}

// appendSpaced appends the ids of text without boundaries, for a model with a spacing.
func (e *Encoder) appendSpaced(out []kvblock.Token, text string, first bool, sc *scratch) []kvblock.Token {
	marked := strings.Contains(text, spaceMarker)
	for cuts := e.addedRaw.cuts(text); ; {
		start, end, token := cuts.next()
		if end > start {
			stretch := text[start:end]
			if prefix := e.spacing.needsPrefix(stretch, first && start == 0); prefix || marked {
				out = e.model.flush(out, text, sc) // a batch refers to one string
				buf := slices.Grow(sc.text[0][:0], len(stretch)+1)
				if prefix {
					buf = append(buf, ' ')
				}
				buf = unmark(buf, stretch)
				sc.text[0] = buf
				out = e.addUncut(out, alias(buf), 0, len(buf), sc)
				out = e.model.flush(out, alias(buf), sc)
			} else {
				out = e.addUncut(out, text, start, end, sc)
			}
		}
		if token == nil {
			return e.model.flush(out, text, sc)
		}
		out = e.model.addToken(out, text, token.id, sc)
	}
}

// appendUncut appends the ids of s[i:end], which no pre-tokenizer cuts further.
func (e *Encoder) appendUncut(out []kvblock.Token, s string, i, end int, sc *scratch) []kvblock.Token {
	if e.model.joins == nil {
		return e.model.appendPiece(out, s, i, end, sc)
	}
	out = e.addUncut(out, s, i, end, sc)
	return e.model.flush(out, s, sc)
}

// addUncut puts the pieces of s[i:end] into the batch. The model has joints.
func (e *Encoder) addUncut(out []kvblock.Token, s string, i, end int, sc *scratch) []kvblock.Token {
	for i < end && sc.budget.err == nil {
		starts, size := e.model.joins.starts(s, i, end)
		if i+size < end { // the last piece may continue
			size = bits.Len64(starts) - 1
		}
		if size > 0 {
			out = e.model.addAll(out, s, i, size, starts, sc)
			i += size
			continue
		}
		j := e.model.joins.next(s, i, end)
		out = e.model.add(out, s, i, j, sc)
		i = j
	}
	return out
}

// joinTable has the pairs of neighbouring characters that a merge can join. If no merge has a left part that ends with
// x and a right part that begins with y, then no merge crosses a place between x and y, and a cut there changes no id.
type joinTable struct {
	// apart is for characters below 128: apart[x|y<<8] is 1 if x and a following y do not join.
	apart [utf8.RuneSelf << 8]uint8
	// wide has a bit for each pair of other characters that joins, by the pair's hash. A hash collision makes cuts
	// rarer, never wrong. The length is a power of two.
	wide []uint64
	// complete is set if no character becomes the unknown token.
	complete bool
	known    *runeTable
}

// next returns the first cut in s[i:end] after i, or end. i must be below end.
func (t *joinTable) next(s string, i, end int) int {
	x, n := utf8.DecodeRuneInString(s[i:])
	for i += n; i < end; i += n {
		var y rune
		y, n = utf8.DecodeRuneInString(s[i:])
		if !t.joined(x, y) {
			return i
		}
		x = y
	}
	return end
}

// starts returns a bit for each byte of s[i:i+size] at which a piece starts. The lowest bit stands for s[i] and is
// always set. size is windowSize, or less at the end. i must be below end.
func (t *joinTable) starts(s string, i, end int) (starts uint64, size int) {
	limit := min(end-i, windowSize)
	starts = 1
	x, size := utf8.DecodeRuneInString(s[i:])
	for size < limit {
		if at := i + size; x < utf8.RuneSelf && at+8 <= len(s) {
			if w := load64(s, at, 8); w&highBits == 0 {
				// Eight characters at a time, including those behind end. Each pair is its index in the table.
				var apart uint64
				apart = uint64(t.apart[(uint64(x)|w<<8)&0x7F7F])
				apart |= uint64(t.apart[w&0x7F7F]) << 1
				apart |= uint64(t.apart[w>>8&0x7F7F]) << 2
				apart |= uint64(t.apart[w>>16&0x7F7F]) << 3
				apart |= uint64(t.apart[w>>24&0x7F7F]) << 4
				apart |= uint64(t.apart[w>>32&0x7F7F]) << 5
				apart |= uint64(t.apart[w>>40&0x7F7F]) << 6
				apart |= uint64(t.apart[w>>48&0x7F7F]) << 7
				starts |= apart << uint(size)
				size += 8
				x = rune(w >> 56)
				continue
			}
		}
		y, n := utf8.DecodeRuneInString(s[i+size:])
		if !t.joined(x, y) {
			starts |= 1 << uint(size)
		}
		size += n
		x = y
	}
	return starts & (^uint64(0) >> uint(windowSize-limit)), limit
}

func (t *joinTable) joined(x, y rune) bool {
	if x|y < utf8.RuneSelf {
		return t.apart[(x|y<<8)&0x7F7F] == 0
	}
	return t.joinedWide(x, y)
}

func (t *joinTable) wideBit(x, y rune) (word int, bit uint) {
	h := mix(uint64(x)<<32 | uint64(y))
	return int(h>>6) & (len(t.wide) - 1), uint(h & 63)
}

func (t *joinTable) joinedWide(x, y rune) bool {
	if word, bit := t.wideBit(x, y); t.wide[word]>>bit&1 != 0 {
		return true
	}
	return !t.complete && !t.isKnown(x) && !t.isKnown(y)
}

func (t *joinTable) isKnown(r rune) bool {
	_, known := t.known.get(r)
	return known
}

// newJoinTable returns the table of the pairs of characters that merges join.
func newJoinTable(pairs map[[2]rune]struct{}, known *runeTable, complete bool) *joinTable {
	t := &joinTable{known: known, complete: complete}
	// With 16 bits a pair, collisions hide one possible cut in twenty.
	t.wide = make([]uint64, 1<<bits.Len(uint(len(pairs)/4)))
	for pair := range pairs {
		if x, y := pair[0], pair[1]; x|y >= utf8.RuneSelf {
			word, bit := t.wideBit(x, y)
			t.wide[word] |= 1 << bit
		}
	}
	for x := range rune(utf8.RuneSelf) {
		for y := range rune(utf8.RuneSelf) {
			if _, joined := pairs[[2]rune{x, y}]; !joined && (complete || t.isKnown(x) || t.isKnown(y)) {
				t.apart[x|y<<8] = 1
			}
		}
	}
	return t
}

// initRunes builds the vocabulary of a model whose smallest symbols are characters. If spaced is set and no id changes,
// it stores the tokens with spaces for ▁. It reports whether it did.
func (b *bpeModel) initRunes(m *modelJSON, spaced bool) bool {
	if b.fallback {
		for c := range b.byteToken {
			b.byteToken[c], b.byteKnown[c] = m.vocab.id(byteTokenText(c))
		}
	}
	exact := !m.IgnoreMerges && b.cutsAreExact(m)
	if _, known := m.vocab.id(spaceMarker); !known || !exact {
		spaced = false
	}
	size := 0
	for _, token := range m.vocab.tokens {
		size += len(token.text)
	}
	tokens := make([]vocabularyToken, 0, len(m.vocab.tokens))
	ends := make([]struct{ first, last rune }, m.vocab.highestID()+1) // by id
	all := make([]byte, 0, size)                                      // the texts of all tokens, concatenated
	for _, token := range m.vocab.tokens {
		text, id := token.text, token.id
		if spaced {
			if strings.IndexByte(text, ' ') >= 0 {
				continue // then no text has a space
			}
			start := len(all)
			all = unmark(all, text)
			text = alias(all[start:])
		}
		first, size := utf8.DecodeRuneInString(text)
		ends[id].first = first
		ends[id].last, _ = utf8.DecodeLastRuneInString(text)
		if size == len(text) && size > 0 {
			b.runeToken.set(first, id)
		}
		tokens = append(tokens, vocabularyToken{text, id, m.IgnoreMerges})
	}
	if exact {
		pairs := map[[2]rune]struct{}{}
		for _, merge := range m.merges {
			pairs[[2]rune{ends[merge.left].last, ends[merge.right].first}] = struct{}{}
		}
		b.joins = newJoinTable(pairs, &b.runeToken, b.completeFallback())
	}
	if !m.IgnoreMerges {
		b.markDirect(tokens)
	}
	b.vocabulary = newVocabulary(tokens)
	return spaced
}

// completeFallback reports whether every character without a token becomes bytes.
func (b *bpeModel) completeFallback() bool {
	for c, has := range b.byteKnown {
		if !has && !neverInUTF8(c) {
			return false
		}
	}
	return true
}

// cutsAreExact reports whether cuts change no id. This holds if only text merges, neither the bytes of an unknown
// character nor the unknown token, and if no character vanishes, which would join its neighbours.
func (b *bpeModel) cutsAreExact(m *modelJSON) bool {
	if !b.hasUnknown && !b.completeFallback() {
		return false
	}
	texts := make([]bool, maxID+1) // by id
	for _, token := range m.vocab.tokens {
		id := token.id
		if texts[id] { // two texts with one id: its first and last characters are ambiguous
			return false
		}
		texts[id] = true
	}
	if b.hasUnknown {
		texts[b.unknown] = false
	}
	for c, has := range b.byteKnown {
		if has {
			texts[b.byteToken[c]] = false
		}
	}
	for _, merge := range m.merges {
		if !texts[merge.left] || !texts[merge.right] {
			return false
		}
	}
	return true
}
