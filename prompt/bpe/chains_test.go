package bpe

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
)

func heapAllocated() int {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return int(sample[0].Value.Uint64())
}

// chainEncoder returns a tokenizer with these normalizers and pre-tokenizers. The error is that of loading it.
func chainEncoder(t *testing.T, normalizers, preTokenizers []string) (*Encoder, error) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]json.RawMessage
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	if normalizers != nil {
		file["normalizer"] = json.RawMessage(
			`{"type":"Sequence","normalizers":[` + strings.Join(normalizers, ",") + `]}`,
		)
	}
	if preTokenizers != nil {
		file["pre_tokenizer"] = json.RawMessage(
			`{"type":"Sequence","pretokenizers":[` + strings.Join(append(preTokenizers, byteLevelPart), ",") + `]}`,
		)
	}
	if raw, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	return ParseTokenizerJSON(raw)
}

const byteLevelPart = `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}`

var (
	someNormalizers = []string{
		`{"type":"NFC"}`, `{"type":"NFD"}`, `{"type":"NFKC"}`, `{"type":"NFKD"}`, `{"type":"Lowercase"}`,
		`{"type":"StripAccents"}`, `{"type":"Nmt"}`, `{"type":"Strip","strip_left":true,"strip_right":true}`,
		`{"type":"Prepend","prepend":"▁"}`, `{"type":"Prepend","prepend":"aaaaaaaaaaaaaaaa"}`,
		`{"type":"Replace","pattern":{"String":" "},"content":"▁"}`,
		`{"type":"Replace","pattern":{"String":"a"},"content":"aa"}`,
		`{"type":"Replace","pattern":{"String":"▁"},"content":" a a a "}`,
		`{"type":"Replace","pattern":{"Regex":"[a-z]"},"content":"ﷺ"}`,
		`{"type":"Replace","pattern":{"Regex":"\\s+"},"content":"  "}`,
		`{"type":"Replace","pattern":{"Regex":"(a|aa)+b"},"content":"x"}`,
	}
	somePreTokenizers = []string{
		byteLevelPart, `{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}`,
		`{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}`,
		`{"type":"Metaspace","replacement":"😀","prepend_scheme":"always","split":true}`,
		`{"type":"Metaspace","replacement":" ","prepend_scheme":"always","split":false}`,
		`{"type":"Digits","individual_digits":true}`,
		`{"type":"Punctuation","behavior":"Isolated"}`, `{"type":"Whitespace"}`, `{"type":"WhitespaceSplit"}`,
		`{"type":"BertPreTokenizer"}`, `{"type":"CharDelimiterSplit","delimiter":"a"}`,
		`{"type":"Split","pattern":{"String":"a"},"behavior":"MergedWithNext","invert":false}`,
		`{"type":"Split","pattern":{"Regex":"(a|aa)+b"},"behavior":"Isolated","invert":false}`,
		`{"type":"Split","pattern":{"Regex":"."},"behavior":"Isolated","invert":false}`,
	}
)

// holdChain encodes hostile texts and checks that memory stays within its bound. Work that grew with the square of the
// text would not end before the tests' timeout.
func holdChain(t *testing.T, normalizers, preTokenizers []string) {
	t.Helper()
	e, err := chainEncoder(t, normalizers, preTokenizers)
	if err != nil {
		return
	}
	const size = 64 << 10
	for _, unit := range []string{"a", " ", "é", "ﷺ", "a ", "1", "̈́", "😀", "ab1. "} {
		text := strings.Repeat(unit, size/len(unit))
		runtime.GC()
		before := heapAllocated()
		_, err := e.append(Budget{ctx: t.Context()}, nil, text, false, nil)
		if used, most := heapAllocated()-before, (len(normalizers)+len(preTokenizers)+4)*200*size; used > most {
			t.Errorf("%s %s: %.4q: allocated %d bytes (%v)", normalizers, preTokenizers, unit, used, err)
		}
	}
}

// TestHostileChains: no combination of a folder's normalizers and pre-tokenizers takes unbounded time or memory.
func TestHostileChains(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(2 << 30))
	repeat := func(part string, n int) []string {
		var parts []string
		for range n {
			parts = append(parts, part)
		}
		return parts
	}
	for _, c := range []struct{ normalizers, preTokenizers []string }{
		{repeat(someNormalizers[11], 13), nil},
		{append(repeat(someNormalizers[11], 4), repeat(someNormalizers[13], 2)...), nil},
		{[]string{someNormalizers[13], `{"type":"NFKD"}`, someNormalizers[11]}, nil},
		{repeat(someNormalizers[8], 30), nil},
		{nil, repeat(byteLevelPart, 12)},
		{nil, []string{somePreTokenizers[13], somePreTokenizers[1], byteLevelPart, byteLevelPart, byteLevelPart,
			byteLevelPart, somePreTokenizers[1]}},
		{nil, []string{somePreTokenizers[12]}},
		{nil, []string{somePreTokenizers[6],
			`{"type":"Split","pattern":{"Regex":"(a|aa)+[bc]"},"behavior":"Isolated","invert":false}`}},
	} {
		holdChain(t, c.normalizers, c.preTokenizers)
	}
	r := rand.New(rand.NewPCG(7, 16))
	for range 12 / min(slowerBuild, 4) {
		holdRandomChain(t, r)
	}
}

func holdRandomChain(t *testing.T, r *rand.Rand) {
	t.Helper()
	var normalizers, preTokenizers []string
	for range r.IntN(8) {
		normalizers = append(normalizers, someNormalizers[r.IntN(len(someNormalizers))])
	}
	for range r.IntN(5) {
		preTokenizers = append(preTokenizers, somePreTokenizers[r.IntN(len(somePreTokenizers))])
	}
	holdChain(t, normalizers, preTokenizers)
}

// FuzzChains is TestHostileChains without an end.
func FuzzChains(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) {
		holdRandomChain(t, rand.New(rand.NewPCG(seed, 16)))
	})
}

// TestHostileFolder: every part of a folder's files has a limit.
func TestHostileFolder(t *testing.T) {
	deep := strings.Repeat(`{"type":"Sequence","normalizers":[`, 2000) + strings.Repeat(`]}`, 2000)
	if _, err := parseNormalizer(json.RawMessage(deep)); err == nil || !strings.Contains(err.Error(), "nested") {
		t.Errorf("deep: %.100v", err)
	}
	many := `{"type":"Sequence","normalizers":[` + strings.TrimSuffix(
		strings.Repeat(`{"type":"NFC"},`, 2000),
		",",
	) + `]}`
	if _, err := parseNormalizer(json.RawMessage(many)); err == nil ||
		!strings.Contains(err.Error(), fmt.Sprint(maxComponents)) {
		t.Errorf("many: %.100v", err)
	}
	long := AddedToken{Content: strings.Repeat("a", maxAddedToken+1)}
	if err := (&Encoder{}).addTokens([]AddedToken{long}, &vocabIndex{}); err == nil {
		t.Error("a long added token is accepted")
	}
}

// TestFormStretches: normalization in stretches equals normalization of the whole text.
func TestFormStretches(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	r := rand.New(rand.NewPCG(7, 16))
	alphabet := []rune("ab é̈́̄̕각각ﷺｶﾞﬁ½カ゛ãồẛ̣Åक़ཱིྀ😀")
	for range 20 {
		var b strings.Builder
		for b.Len() < 3*formStretch {
			for c, n := alphabet[r.IntN(len(alphabet))], 1+r.IntN(40); n > 0; n -= 1 + r.IntN(39) {
				b.WriteRune(c)
			}
		}
		for name, form := range normalForms {
			got, err := newScratch().normalForm(form, b.String(), 1<<30)
			if want := normalForm(form, b.String()); err != nil || got != want {
				t.Fatalf("%s: %d bytes, want %d (%v)", name, len(got), len(want), err)
			}
		}
	}
}
