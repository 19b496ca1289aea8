package bpe

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"kvepp/kvblock"
)

var compiledCache sync.Map // of *regexp.Regexp by its text

func compiled(expression string) *regexp.Regexp {
	if r, ok := compiledCache.Load(expression); ok {
		return r.(*regexp.Regexp)
	}
	r := regexp.MustCompile(expression)
	compiledCache.Store(expression, r)
	return r
}

// naiveSplit cuts text with Go's regex engine. That has no lookahead and only ASCII's \s, so naiveSplit computes the
// last two alternatives of the expressions, \s+(?!\S)|\s+, itself.
func naiveSplit(expression, text string) []string {
	head, hasSpace := strings.CutSuffix(expression, `|\s+(?!\S)|\s+`)
	head = strings.ReplaceAll(head, `[^\s`, `[^\t-\r\x{85}\pZ`)
	head = strings.ReplaceAll(head, `\s`, `[\t-\r\x{85}\pZ]`)
	first := compiled(`^(?:` + head + `)`)
	space := compiled(`^[\t-\r\x{85}\pZ]+`)
	var pieces []string
	gap := ""
	for text != "" {
		n := len(first.FindString(text))
		if run := space.FindString(text); n == 0 && run != "" && hasSpace {
			n = len(run)
			if _, last := utf8.DecodeLastRuneInString(run); n < len(text) && n > last {
				n -= last
			}
		}
		if n == 0 {
			_, size := utf8.DecodeRuneInString(text)
			gap += text[:size]
			text = text[size:]
			continue
		}
		if gap != "" {
			pieces = append(pieces, gap)
			gap = ""
		}
		pieces = append(pieces, text[:n])
		text = text[n:]
	}
	if gap != "" {
		pieces = append(pieces, gap)
	}
	return pieces
}

// comparable reports whether Go's Unicode tables and ours agree on every character of a text.
func comparable(text string) bool {
	for _, r := range text {
		c := classOfRune(r)
		for bit, table := range map[class][]*unicode.RangeTable{
			classLetter: {unicode.L}, classNumber: {unicode.N}, classMark: {unicode.M},
			classSymbol: {unicode.P, unicode.S},
			classUpper:  {unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M},
			classLower:  {unicode.Ll, unicode.Lm, unicode.Lo, unicode.M},
		} {
			if (c&bit != 0) != unicode.In(r, table...) {
				return false
			}
		}
	}
	return utf8.ValidString(text)
}

func checkScanners(t *testing.T, text string) {
	t.Helper()
	for expression, scan := range scanners {
		var got []string
		for i := 0; i < len(text); {
			j := scan(text, i, len(text))
			if j <= i || j > len(text) {
				t.Fatalf("%.30s...: %q: from %d to %d", expression, text, i, j)
			}
			got = append(got, text[i:j])
			i = j
		}
		if want := naiveSplit(expression, text); !slices.Equal(got, want) {
			t.Fatalf("%.30s...: %q\n got %q\nwant %q", expression, text, got, want)
		}
	}
	var got, want []string
	for i, part := 0, 0; i < len(text); {
		var j int
		j, part = scanDeepSeek(text, i, len(text), part)
		got = append(got, text[i:j])
		i = j
	}
	for _, a := range naiveSplit(regexDeepSeek1, text) {
		for _, b := range naiveSplit(strings.ReplaceAll(regexDeepSeek2, "\u3040", `\x{3040}`), a) {
			want = append(want, naiveSplit(regexDeepSeek3, b)...)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("DeepSeek: %q\n got %q\nwant %q", text, got, want)
	}
}

// checkWindows compares windows with the scanners at every place where a piece can begin.
func checkWindows(t *testing.T, text string) {
	t.Helper()
	check := func(name string, rules *windowRules, scan scanner) {
		for begin := range len(text) {
			if !utf8.RuneStart(text[begin]) {
				continue
			}
			starts, size := rules.starts(text, begin, len(text))
			if size == 0 {
				continue
			}
			cuts := []int{}
			for rest := starts; rest != 0; rest &= rest - 1 {
				cuts = append(cuts, begin+bits.TrailingZeros64(rest))
			}
			if begin+size == len(text) {
				cuts = append(cuts, len(text))
			}
			for i, at := begin, 0; at < len(cuts); at++ {
				if i != cuts[at] {
					t.Fatalf("%s: %q from %d: cut at %d; want %d of %v", name, text, begin, cuts[at], i, cuts)
				}
				if i < len(text) {
					i = scan(text, i, len(text))
				}
			}
		}
	}
	for expression, rules := range windows {
		check(expression[:30], rules, scanners[expression])
	}
	check("DeepSeek", windowDeepSeek, func(s string, i, end int) int {
		j, _ := scanDeepSeek(s, i, end, i)
		return j
	})
}

// randomText returns text of characters that the expressions distinguish.
func randomText(rng *rand.Rand) string {
	parts := []string{
		"'s", "'S", "'ſ", "'re", "'LL", "'x", "a", "Z", "é", "É", "ǅ", "ʰ", "漢", "か", "ー", "한", "1", "23", "²", "Ⅷ",
		"٣", " ", "  ", "\t", "\n", "\r\n", "\r",
		"\u00a0", "\u3000", "\u0085", "\u2028", "\x0b", "\x1c", ".", "/", "//", "-", "_", "$", "<", "…", "«", "😀",
		"\u0301", "\u0903", "\u200d", "\x00", "ab", "AB", "aB", "Ab",
	}
	var b strings.Builder
	for range 1 + rng.IntN(12) {
		b.WriteString(parts[rng.IntN(len(parts))])
	}
	return b.String()
}

func TestScannersAgainstRegexp(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		text := randomText(rng)
		if !comparable(text) {
			t.Fatalf("%q has a character on which Go differs", text)
		}
		checkScanners(t, text)
		checkWindows(t, text)
	}
	// Longer than a window, and mostly ASCII.
	for range 3000 {
		var long strings.Builder
		for range 1 + rng.IntN(40) {
			if rng.IntN(30) == 0 {
				long.WriteString(randomText(rng))
			}
			long.WriteString(asciiParts[rng.IntN(len(asciiParts))])
		}
		checkWindows(t, long.String())
	}
}

// asciiParts are texts that windows distinguish.
var asciiParts = []string{
	"'s", "'S", "'re", "'LL", "'x", "'", "''", "a", "Z", "ab", "AB", "aB", "Ab", "word", "Word", "WORD", "1", "23",
	"4567", " ", " ", " ", "  ", "    ", "\t", "\n", "\n\n",
	"\r\n", "\v", "\f", ".", ",", "/", "//", "-", "_", "(", ")", "};", "don't", "\n/", "\x1c", "\x00", "\x7f",
}

func FuzzScanners(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		f.Add(randomText(rng))
	}
	f.Fuzz(func(t *testing.T, text string) {
		if comparable(text) && len(text) < 1000 {
			checkScanners(t, text)
			checkWindows(t, text)
		}
	})
}

// mergeByDefinition merges the two neighbours with the lowest rank, the leftmost of equals, until none merge: the
// definition of BPE. It overwrites ids.
func mergeByDefinition(t *mergeTable, ids []kvblock.Token) []kvblock.Token {
	for {
		best, at, into := noRank, -1, kvblock.Token(0)
		for i := 0; i+1 < len(ids); i++ {
			if merge := t.get(ids[i], ids[i+1]); merge.rank < best {
				best, at, into = merge.rank, i, merge.into
			}
		}
		if at < 0 {
			return ids
		}
		ids = slices.Replace(ids, at, at+2, into)
	}
}

// naiveEncode merges a whole text as one piece.
func naiveEncode(b *bpeModel, text string) []kvblock.Token {
	source := symbols{model: b, text: text}
	return mergeByDefinition(&b.merges, source.next(nil, len(text)+1))
}

// TestWindowsOfMergesAgainstDefinition: a piece of any length has the same ids for every size of window.
func TestWindowsOfMergesAgainstDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, name := range modelNames {
		b := loadEncoder(t, name).model
		sc := newScratch()
		alphabets := []string{"a", "ab", "the ", "etaoin", "aaaaaaab", "0123456789", "日本語e", "\U000132a4x"}
		for range 300 {
			var text strings.Builder
			alphabet := []rune(alphabets[rng.IntN(len(alphabets))])
			for n := 1 + rng.IntN(400); n > 0; n-- {
				text.WriteRune(alphabet[rng.IntN(len(alphabet))])
				if rng.IntN(50) == 0 {
					alphabet = []rune(alphabets[rng.IntN(len(alphabets))])
				}
			}
			want := naiveEncode(b, text.String())
			for _, size := range []int{4, 8, 32, 100, mergeWindow} {
				if got := b.mergeMany(nil, text.String(), size, sc); !slices.Equal(got, want) {
					t.Fatalf("%s: %q in windows of %d: %v, want %v", name, text.String(), size, got, want)
				}
			}
		}
	}
}

// TestTokensBetweenNewWords puts an added token between any two of many pieces that the caches do not know.
func TestTokensBetweenNewWords(t *testing.T) {
	for _, name := range modelNames {
		b := loadEncoder(t, name).model
		sc, other := newScratch(), newScratch()
		for _, pass := range []string{"cold", "warm"} {
			var text strings.Builder
			for i := range 3000 {
				fmt.Fprintf(&text, "q%05dz%dx", i, i*i%10)
			}
			s := text.String()
			var got, want []kvblock.Token
			for i := 0; i < len(s); i += 9 {
				got = b.add(got, s, i, i+9, sc)
				got = b.addToken(got, s, 7, sc)
				want = append(b.appendPiece(want, s, i, i+9, other), 7)
			}
			if got = b.flush(got, s, sc); !slices.Equal(got, want) {
				t.Errorf("%s, %s: %d ids, want %d", name, pass, len(got), len(want))
			}
		}
	}
}

// TestLongPiecesAfterShortOnes puts pieces that are too long for the cache into batches after others that are not: they
// have the same ids as alone, and the room for them is in proportion to their bytes.
func TestLongPiecesAfterShortOnes(t *testing.T) {
	for _, name := range modelNames {
		b := loadEncoder(t, name).model
		sc, other := newScratch(), newScratch()
		for round := range 3 {
			var text strings.Builder
			size := 9 + 91*(round%2)
			for i := range 1000 {
				fmt.Fprintf(&text, "%0*dx", size-1, 1000*round+i)
			}
			s := text.String()
			var got, want []kvblock.Token
			for i := 0; i < len(s); i += size {
				got = b.add(got, s, i, i+size, sc)
				want = b.appendPiece(want, s, i, i+size, other)
			}
			if got = b.flush(got, s, sc); !slices.Equal(got, want) || cap(got) > 4*len(s) {
				t.Errorf("%s: pieces of %d bytes: %d ids in room for %d, want %d ids", name, size, len(got), cap(got),
					len(want))
			}
		}
	}
}

func TestMergesAgainstDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	words := strings.Fields(
		"the harbour was quiet and nobody expected information internationalization ▁▁ ▁the 漢字 é 😀 aaaaaa tttt ==== " +
			"0000",
	)
	for _, name := range modelNames {
		b := loadEncoder(t, name).model
		sc := newScratch()
		for i := range 2000 {
			var text strings.Builder
			for range 1 + rng.IntN(1+i%40) {
				text.WriteString(words[rng.IntN(len(words))])
				if rng.IntN(3) == 0 {
					text.WriteString([]string{"▁", " ", ".", " (", "\n"}[rng.IntN(5)])
				}
			}
			s := text.String()
			want := naiveEncode(b, s)
			for _, pass := range []string{"cold", "cached"} {
				if got := b.appendPiece(nil, s, 0, len(s), sc); !slices.Equal(got, want) {
					t.Fatalf("%s, %s: %q\n got %v\nwant %v", name, pass, s, got, want)
				}
			}
			if b.joins == nil {
				continue
			}
			// A cut must change no id.
			var got []kvblock.Token
			cuts := 0
			for i := 0; i < len(s); cuts++ {
				j := b.joins.next(s, i, len(s))
				got = b.appendPiece(got, s, i, j, sc)
				i = j
			}
			if !slices.Equal(got, want) {
				t.Fatalf("%s: %q in %d pieces\n got %v\nwant %v", name, s, cuts, got, want)
			}
		}
	}
	if loadEncoder(t, "tiny-sentencepiece").model.joins == nil {
		t.Error("the SentencePiece-style model is not cut at all")
	}
}

// TestVocabularyAgainstMap looks up every token and every near miss.
func TestVocabularyAgainstMap(t *testing.T) {
	type entry struct {
		id     kvblock.Token
		direct bool
	}
	tokens := map[string]entry{}
	rng := rand.New(rand.NewPCG(9, 10))
	for i := range 5000 {
		n := 1 + rng.IntN(20)
		text := make([]byte, n)
		for j := range text {
			text[j] = "abc\x00"[rng.IntN(4)]
		}
		tokens[string(text)] = entry{id: kvblock.Token(i), direct: rng.IntN(2) == 0}
	}
	var list []vocabularyToken
	for text, token := range tokens {
		list = append(list, vocabularyToken{text, token.id, token.direct})
	}
	v := newVocabulary(list)
	for range 50_000 {
		n := 1 + rng.IntN(20)
		text := make([]byte, n)
		for j := range text {
			text[j] = "abc\x00"[rng.IntN(4)]
		}
		s := "xx" + string(text) + "yyy"[:rng.IntN(4)]
		want := tokens[string(text)]
		var found entry
		switch low, high := load128(s, 2, min(n, maxShort)); {
		case n <= 8:
			found.id, found.direct = v.findShort(v.shortSlot(low, uint32(n)), low, uint32(n))
		case n <= maxShort:
			found.id, found.direct = v.findMiddle(v.middleSlot(low, high, uint32(n)), low, high, uint32(n))
		default:
			found.id, found.direct = v.long[string(text)]
		}
		if found.direct != want.direct || want.direct && found.id != want.id {
			t.Fatalf("%q: got %+v; want %+v", text, found, want)
		}
	}
}

// TestNFC holds the older normalization against Hugging Face's; see nfc.
func TestNFC(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "",
		"plain":                          "plain",
		"e\u0301":                        "\u00e9",
		"\u212b":                         "\u00c5",
		"q\u0307\u0323":                  "q\u0323\u0307",
		"\u1100\u1161\u11a8":             "\uac01",
		"\u0344":                         "\u0308\u0301",
		"q\u0307\U00010f49\u0323":        "q\u0307\U00010f49\u0323",
		"\u1039\U0001e4ec\U0001e023":     "\u1039\U0001e4ec\U0001e023",
		"\U00011935\U00011930":           "\U00011935\U00011930",
		"\u08ec\u1abf\u093c\u0898\ufa86": "\u08ec\u1abf\u093c\u0898\u60d8",
	} {
		if got := normalForm(norm.NFC, text); got != want {
			t.Errorf("%+q: got %+q, want %+q", text, got, want)
		}
	}
}

func FuzzEncode(f *testing.F) {
	models := map[string]*Encoder{}
	for _, name := range modelNames {
		models[name] = loadEncoder(f, name)
	}
	for _, golden := range loadGoldens(f, modelNames[0])[:40] {
		f.Add(golden.Text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for name, e := range models {
			ids, err := e.Encode(&Budget{}, text, false)
			if (err == nil) != utf8.ValidString(text) {
				t.Fatalf("%s: %q: %v", name, text, err)
			}
			if err != nil {
				continue
			}
			again, err := e.Encode(&Budget{}, text, false) // from warm caches
			if err != nil || !slices.Equal(ids, again) {
				t.Fatalf("%s: %q: %v, then %v", name, text, ids, again)
			}
			if len(ids) > 4*len(text)+4 {
				t.Fatalf("%s: %q: %d ids", name, text, len(ids))
			}
		}
	})
}

// FuzzMerges compares the encoding of a piece with the definition of BPE, for every way to cut, cache and merge it.
func FuzzMerges(f *testing.F) {
	models, scratches := map[string]*Encoder{}, map[string]*scratch{}
	for _, name := range modelNames {
		models[name], scratches[name] = loadEncoder(f, name), newScratch()
	}
	for _, text := range []string{"▁the▁harbour▁▁", "internationalization", "é漢\U0001f600\x00", strings.Repeat("=", 70),
		"a▁b▁aa▁"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) == 0 || len(text) > 500 || !utf8.ValidString(text) {
			return
		}
		for name, e := range models {
			want := naiveEncode(e.model, text)
			sc := scratches[name]
			for _, pass := range []string{"first", "again"} {
				if got := e.appendUncut(nil, text, 0, len(text), sc); !slices.Equal(got, want) {
					t.Fatalf("%s, %s: %q\n got %v\nwant %v", name, pass, text, got, want)
				}
			}
		}
	})
}
