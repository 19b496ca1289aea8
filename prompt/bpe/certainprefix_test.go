package bpe

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// certainHolds checks that the certain ids of text[:place] are the first ids before every following text.
func certainHolds(t *testing.T, e *Encoder, c *CertainPrefix, text string, place int, behind string) int {
	t.Helper()
	end := c.End(text, place)
	if end < 0 || end > place {
		t.Fatalf("%q, %d: %d bytes are certain", text, place, end)
	}
	for _, special := range []bool{false, true} {
		want, err := e.append(Budget{}, nil, text[:end], false, nil)
		if special {
			want = slices.Concat(e.prefix, want)
		}
		whole, errWhole := e.append(Budget{}, nil, text[:place]+behind, special, nil)
		if err != nil || errWhole != nil {
			return 0 // no ids, nothing certain
		}
		if len(whole) < len(want) || !slices.Equal(whole[:len(want)], want) {
			t.Fatalf(
				"%q of %q is certain, ids %v; before %q they are %v",
				text[:end],
				text[:place],
				want,
				behind,
				whole,
			)
		}
	}
	return end
}

// snippets are the parts of random texts: words, and text that may join its neighbours.
func snippets(e *Encoder) []string {
	all := []string{
		"a",
		"word",
		" word",
		"The",
		" of ",
		"x y",
		"it's",
		"'",
		"'s",
		"S",
		" ",
		"  ",
		"\n",
		"\n\n",
		"\t",
		"\r\n",
		"▁",
		"▁▁",
		"1",
		"23",
		" 4",
		".",
		"...",
		"/",
		"é",
		"e\u0301",
		"\u0301",
		"\u0300",
		"ﬁ",
		"中文",
		"カ\u3099",
		"🙂",
		"\u200d",
		"Ａ",
		"\u00a0",
		"<",
		"|",
		"<|",
		"|>",
		"<|im_",
		"<s",
		"\x00",
	}
	for _, added := range []*addedTokens{e.boundaries, e.addedRaw, e.addedNormalized} {
		for _, token := range added.all() {
			all = append(
				all,
				token.content,
				token.content[:len(token.content)-len(string([]rune(token.content)[len([]rune(token.content))-1]))],
			)
		}
	}
	return slices.DeleteFunc(all, func(s string) bool { return strings.ContainsRune(s, '\uFFFD') })
}

func textOf(r *rand.Rand, some []string, n int) string {
	var text strings.Builder
	for range r.IntN(n + 1) {
		text.WriteString(some[r.IntN(len(some))])
	}
	return text.String()
}

// TestCertain checks the cut on every configuration of components that the tests have.
func TestCertain(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	encoders := map[string]*Encoder{}
	for _, name := range modelNames {
		encoders[name] = loadEncoder(t, name)
	}
	v := loadVariants(t)
	for _, variant := range v.Variants {
		e, err := ParseTokenizerJSON(v.override(t, variant.Base, variant.Overrides))
		if err != nil {
			t.Fatal(err)
		}
		encoders[variant.Name] = e
	}
	cut, words := 0, 0
	for name, e := range encoders {
		r := rand.New(rand.NewPCG(1, uint64(len(name))))
		c, some := NewCertainPrefix(e), snippets(e)
		if c.letters != "" {
			words++
		}
		for range 300 {
			text := textOf(r, some, 12)
			for range 3 {
				if end := certainHolds(t, e, c, text, len(text), textOf(r, some, 3)); end > 0 && end < len(text) {
					cut++
				}
			}
		}
	}
	t.Logf("%d configurations, %d cut between words; %d texts cut inside", len(encoders), words, cut)
	if words < 30 || cut < 1000 {
		t.Errorf("too few cuts inside texts")
	}
}

func TestCertainCuts(t *testing.T) {
	added := map[string]string{"tiny-bytelevel": "<|im_start|>", "tiny-sentencepiece": "</s>"}
	for name, token := range added {
		c := NewCertainPrefix(loadEncoder(t, name))
		for _, test := range []struct{ text, certain string }{
			{"", ""},
			{"word", ""},
			{"one two three", "one two"},
			{"one two th", "one two"},
			{"one two ", "one"},
			{"one two. Three? 4", "one"},
			{token, token},
			{token + "user\n", token},
			{token + "one two\n", token + "one"},
			{token + token[:len(token)-1], token},
			{token + " one", token},
		} {
			if got := test.text[:c.End(test.text, len(test.text))]; got != test.certain {
				t.Errorf("%s: of %q %q is certain, want %q", name, test.text, got, test.certain)
			}
		}
	}
}

// TestCertainJoins: later text can change the tokens before it.
func TestCertainJoins(t *testing.T) {
	raw := addTokens(t, readModelFile(t, "tiny-bytelevel/tokenizer.json"), "<a>", "<a>b", "z<a>cc", "two words", "<!")
	e, err := ParseTokenizerJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	c := NewCertainPrefix(e)
	if c.letters != "" {
		t.Errorf("a token holds two words, but a cut behind %q would divide them", c.letters)
	}
	for text, want := range map[string]string{
		"<!x<a>":      "<!",     // may become <a>b
		"<!x<a>d":     "<!x<a>", // no longer token begins like this
		"<!z<a>":      "<!",     // z<a>cc may
		"<!z<a>c":     "<!",
		"<!z<a>cd":    "<!z<a>",
		"<!one two w": "<!",
		"<!<a":        "<!",
		"<!":          "<!",
	} {
		for _, behind := range []string{"", "b", "cc", "c", "ords", ">", ">b", "x"} {
			if got := text[:certainHolds(t, e, c, text, len(text), behind)]; got != want {
				t.Errorf("of %q %q is certain, want %q", text, got, want)
			}
		}
	}
	// Without a pre-tokenizer, a merge may join a letter and the space behind it.
	e, err = ParseTokenizerJSON(
		[]byte(
			`{"added_tokens":[],"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},` +
				`"pre_tokenizer":null,
		"model":{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"vocab":{"<unk>":0,"▁":1,"a":2,"b":3,"a▁":4,` +
				`"▁b":5,"bb":6},"merges":[["▁","b"],["a","▁"],["b","b"]]}}`,
		),
	)
	if err != nil {
		t.Fatal(err)
	}
	c = NewCertainPrefix(e)
	for text, want := range map[string]string{"a b": "", "b b": "b", "b a b": "b", "b b a b": "b b"} {
		for _, behind := range []string{"", "b", " ", "a"} {
			if got := text[:certainHolds(t, e, c, text, len(text), behind)]; got != want {
				t.Errorf("of %q %q is certain, want %q", text, got, want)
			}
		}
	}
}

// FuzzCertain appends any text to any other.
func FuzzCertain(f *testing.F) {
	f.Add("one two", " three")
	f.Add("<|im_start|>user\nlook at <|im_", "end|>")
	f.Add("</s>it", "'s\u0301")
	type encoding struct {
		e *Encoder
		c *CertainPrefix
	}
	var all []encoding
	for _, name := range modelNames {
		e := loadEncoder(f, name)
		all = append(all, encoding{e, NewCertainPrefix(e)})
	}
	f.Fuzz(func(t *testing.T, text, behind string) {
		for _, a := range all {
			certainHolds(t, a.e, a.c, text, len(text), behind)
		}
	})
}
