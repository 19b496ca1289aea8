package bpe

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// randomRunes returns a model of characters with random merges. normalizer and preTokenizer are JSON.
func randomRunes(t *testing.T, rng *rand.Rand, unknown, fuse bool, bytes int, normalizer, preTokenizer string) []byte {
	t.Helper()
	vocab := map[string]int{}
	var texts []string
	add := func(text string) {
		if _, ok := vocab[text]; !ok {
			vocab[text] = len(vocab)
			texts = append(texts, text)
		}
	}
	for _, text := range []string{"a", "b", "▁", "é", "漢", ".", "\n"} {
		add(text)
	}
	var merges [][2]string
	for range 5 + rng.IntN(30) {
		left, right := texts[rng.IntN(len(texts))], texts[rng.IntN(len(texts))]
		if len(left)+len(right) > 20 || slices.Contains(merges, [2]string{left, right}) {
			continue
		}
		add(left + right)
		merges = append(merges, [2]string{left, right})
	}
	add(" ")
	add("a b")
	add("<unk>")
	for c := range bytes {
		add(byteTokenText(c))
	}
	model := map[string]any{
		"type":          "BPE",
		"vocab":         vocab,
		"merges":        merges,
		"fuse_unk":      fuse,
		"byte_fallback": bytes > 0,
	}
	if unknown {
		model["unk_token"] = "<unk>"
	}
	raw, err := json.Marshal(
		map[string]any{
			"model":         model,
			"normalizer":    json.RawMessage(normalizer),
			"pre_tokenizer": json.RawMessage(preTokenizer),
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestSpacing: a model whose text is cut and not rewritten gives the ids of the definition, which rewrites the text and
// merges it as one piece. The reference is the same model with an additional step that does nothing, but that spacingOf
// does not know.
func TestSpacing(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const replace = `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`
	const prepend = `{"type":"Prepend","prepend":"▁"},`
	const nothing = `,{"type":"Strip","strip_left":false,"strip_right":false}`
	metaspace := func(scheme, more string) string {
		return fmt.Sprintf(
			`{"type":"Sequence","pretokenizers":[{"type":"Metaspace","replacement":"▁","prepend_scheme":%q,`+
				`"split":false}%s]}`,
			scheme,
			more,
		)
	}
	const noCut = `,{"type":"Split","pattern":{"String":"\u0001"},"behavior":"Isolated","invert":false}`
	const onSpaces = `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`
	forms := []struct{ normalizer, preTokenizer, plainNormalizer, plainPreTokenizer string }{
		{replace, `null`, `{"type":"Sequence","normalizers":[` + replace + nothing + `]}`, `null`},
		{replace, onSpaces, `{"type":"Sequence","normalizers":[` + replace + nothing + `]}`, onSpaces},
		{
			`{"type":"Sequence","normalizers":[` + prepend + replace + `]}`,
			`null`,
			`{"type":"Sequence","normalizers":[` + prepend + replace + nothing + `]}`,
			`null`,
		},
		{`null`, metaspace("always", ""), `null`, metaspace("always", noCut)},
		{`null`, metaspace("first", ""), `null`, metaspace("first", noCut)},
		{`null`, metaspace("never", ""), `null`, metaspace("never", noCut)},
	}
	characters := []rune("aaabbb   ▁▁é漢.x\nü字🙂")
	cut := 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		form := forms[seed%uint64(len(forms))]
		unknown, fuse, bytes := rng.IntN(3) > 0, rng.IntN(2) == 0, []int{0, 150, 256}[rng.IntN(3)]
		model := func(normalizer, preTokenizer string) *Encoder {
			e, err := ParseTokenizerJSON(
				randomRunes(t, rand.New(rand.NewPCG(seed, 2)), unknown, fuse, bytes, normalizer, preTokenizer),
			)
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
		spaced, plain := model(form.normalizer, form.preTokenizer), model(form.plainNormalizer, form.plainPreTokenizer)
		if exact := unknown || bytes == 256; (spaced.spacing != nil) != exact || (spaced.model.joins != nil) != exact ||
			plain.spacing != nil {
			t.Fatalf(
				"%v, unknown %v, %d bytes: spaced %v, joints %v, plain %v",
				form,
				unknown,
				bytes,
				spaced.spacing,
				spaced.model.joins,
				plain.spacing,
			)
		}
		plain.model.joins = nil
		for range 40 {
			var b strings.Builder
			for range 1 + rng.IntN(20) {
				b.WriteRune(characters[rng.IntN(len(characters))])
			}
			text := b.String()
			if spaced.model.joins != nil && spaced.model.joins.next(text, 0, len(text)) < len(text) {
				cut++
			}
			want, err := plain.append(Budget{}, nil, text, false, nil) // see TestMergesAgainstDefinition
			if err != nil {
				t.Fatal(err)
			}
			if got, err := spaced.append(Budget{}, nil, text, false, nil); err != nil || !slices.Equal(got, want) {
				t.Fatalf(
					"seed %d, %v, unknown %v, fused %v, %d bytes: %q\n got %v, %v\nwant %v",
					seed,
					form,
					unknown,
					fuse,
					bytes,
					text,
					got,
					err,
					want,
				)
			}
		}
	}
	if cut < 3000 {
		t.Errorf("only %d texts were cut", cut)
	}
}

// TestStarts compares starts, which finds the pieces of a window at once, with next, which finds one at a time.
func TestStarts(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	b := loadEncoder(t, "tiny-sentencepiece").model
	for range 3000 {
		var text strings.Builder
		ascii := rng.IntN(2) == 0
		for range 1 + rng.IntN(150) {
			if wide := []rune("éß漢字🙂▁"); !ascii && rng.IntN(20) == 0 {
				text.WriteRune(wide[rng.IntN(len(wide))])
			} else {
				text.WriteByte("  abceinorst.,(<0\n\x00~"[rng.IntN(20)])
			}
		}
		s := text.String()
		places := make([]int, 0, len(s)) // of characters
		for i := range s {
			places = append(places, i)
		}
		from := rng.IntN(len(places))
		i, end := places[from], len(s)
		if to := from + 1 + rng.IntN(len(places)-from); to < len(places) {
			end = places[to]
		}
		starts, size := b.joins.starts(s, i, end)
		if size != min(windowSize, end-i) {
			t.Fatalf("%q: %d bytes of %d", s[i:end], size, end-i)
		}
		want := uint64(0)
		for at := i; at < i+size; at = b.joins.next(s, at, end) {
			want |= 1 << uint(at-i)
		}
		if starts != want {
			t.Fatalf("%q: starts %064b, want %064b", s[i:end], starts, want)
		}
	}
}
