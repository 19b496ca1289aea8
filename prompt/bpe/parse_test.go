package bpe

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"kvepp/kvblock"
)

func TestRefusedComponents(t *testing.T) {
	v := loadVariants(t)
	split := func(pattern string) string {
		return `{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":` + pattern +
			`},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}`
	}
	const byteLevel = `{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`
	for _, c := range []struct{ key, value, want string }{
		{"model", `{"type":"Unigram"}`, `model: type "Unigram" is not supported`},
		{"model", `{"type":"WordPiece"}`, `"WordPiece"`},
		{"model", `{"dropout":0.1}`, `dropout 0.1`},
		{"model", `{"continuing_subword_prefix":"##"}`, `continuing_subword_prefix "##"`},
		{"model", `{"end_of_word_suffix":"</w>"}`, `end_of_word_suffix "</w>"`},
		{"model", `{"unk_token":"<nope>"}`, `unk_token "<nope>" is not in vocab`},
		{"model", `{"vocab":{}}`, `vocab is empty`},
		{"model", `{"vocab":{"a":-1}}`, `out of range`},
		{"model", `{"vocab":{"a":1},"merges":[]}`, `no token for byte`},
		{"model", `{"merges":[["a","nope"]]}`, `"a" and "nope"`},
		{"model", `{"merges":[["a"]]}`, `1 parts`},
		{"model", `{"merges":["abc"]}`, `"abc"`},
		{"model", `{"merges":7}`, `merges`},
		{"model", `{"new_option":true}`, `new_option`},
		{"normalizer", `{"type":"Precompiled","precompiled_charsmap":"AAAA"}`,
			`normalizer: component "Precompiled" is not supported`},
		{"normalizer", `{"type":"BertNormalizer"}`, `"BertNormalizer"`},
		{"normalizer", `{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"ByteLevel"}]}`, `"ByteLevel"`},
		{"normalizer", `{"type":"Replace","pattern":{"Regex":"(a)\\1"},"content":" "}`,
			`component Replace: in a pattern, \1`},
		{"normalizer", `{"type":"Replace","pattern":{"String":""},"content":" "}`, `Replace of`},
		{"normalizer", `{"type":"NFC","mode":2}`, `mode`},
		{"pre_tokenizer", split(`"(?<name>a)\\k<name>"`), `(?<`},
		{"pre_tokenizer", split(`"(?i:[a-z]+)"`), `a class where case is ignored`},
		{"pre_tokenizer", split(`"(?i:ss)"`), `a ligature joins`},
		{"pre_tokenizer", split(`"\\p{Runic}"`), `\p{Runic}`},
		{"pre_tokenizer", split(`"[[:alpha:]]"`), `[:`},
		{"pre_tokenizer", split(`"a{2}?"`), `{n}?`},
		{"pre_tokenizer", split(`"(a"`), `an unclosed (`},
		{"pre_tokenizer", split(`"a)"`), `an unmatched )`},
		{"pre_tokenizer", split(`"[a"`), `an unclosed [`},
		{"pre_tokenizer", split(`"\\"`), `an end in the middle`},
		{"pre_tokenizer", split(`"` + strings.Repeat("(", 100) + `"`), `deep nesting`},
		{"pre_tokenizer", split(`"` + strings.Repeat("[", 100) + `"`), `deep nesting`},
		{"pre_tokenizer", split(`"` + strings.Repeat("a", 1<<15) + `"`), `of 32768 bytes`},
		{"pre_tokenizer", `{"type":"Metaspace"}`, `pre_tokenizer: component Metaspace: replacement ""`},
		{"pre_tokenizer", `{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}`, `prepend_scheme "last"`},
		{"pre_tokenizer", `{"type":"UnicodeScripts"}`, `component "UnicodeScripts" is not supported`},
		{"pre_tokenizer", `{"type":"Whitespace","pattern":"x"}`, `pattern`},
		{"pre_tokenizer", `{"type":"Punctuation","behavior":"Sideways"}`, `behavior "Sideways"`},
		{"pre_tokenizer", `{"type":"CharDelimiterSplit","delimiter":"ab"}`, `"ab"`},
		{"pre_tokenizer", strings.Replace(split(`"\\p{N}{1,3}"`), "Isolated", "Sideways", 1), `behavior "Sideways"`},
		{"post_processor", `{"type":"BertProcessing","sep":["x"],"cls":["y",1]}`, `post_processor: BertProcessing`},
		{"post_processor", `{"type":"Other"}`, `post_processor: component "Other"`},
		{"post_processor", `{"type":"TemplateProcessing","single":[],"special_tokens":{}}`, `0 times`},
		{"post_processor", `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},` +
			`{"Sequence":{"id":"A","type_id":0}}],"special_tokens":{}}`, `"<s>" has no ids`},
		{"added_tokens", `[{"id":7000,"content":"<x>"}]`, `added_tokens: "<x>" has id 7000`},
		{"added_tokens", `{}`, `added_tokens`},
	} {
		overrides := map[string]json.RawMessage{"pre_tokenizer": json.RawMessage(byteLevel)}
		overrides[c.key] = json.RawMessage(c.value)
		if _, err := ParseTokenizerJSON(v.override(t, "bytes", overrides)); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %s\n got %v\nwant ...%s...", c.key, c.value, err, c.want)
		}
	}
}

func FuzzParseTokenizerJSON(f *testing.F) {
	v := loadVariants(f)
	f.Add(
		[]byte(
			`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"▁":3},"merges":[["a","b"]]},`+
				`"normalizer":{"type":"Prepend","prepend":"▁"}}`,
		),
		"abab",
	)
	f.Add(
		[]byte(`{"model":{"type":"BPE","unk_token":"a","fuse_unk":true,"vocab":{"a":0,"x":5},"merges":["a a"]}}`),
		"xyxy",
	)
	f.Add(
		[]byte(
			`{"model":{"type":"BPE","vocab":{"":0},"merges":[]},"added_tokens":[{"id":1,"content":"ab","lstrip":true,`+
				`"rstrip":true,"single_word":true}]}`,
		),
		" ab \xff",
	)
	f.Add(
		v.override(f, "bytes", map[string]json.RawMessage{"pre_tokenizer": json.RawMessage(
			`{"type":"ByteLevel","add_prefix_space":false}`)})[:2000],
		"x",
	)
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		e, err := ParseTokenizerJSON(raw)
		if err != nil {
			return
		}
		ids, err := e.append(Budget{}, []kvblock.Token{7}, text, true, nil)
		if err == nil && (len(ids) == 0 || ids[0] != 7) {
			t.Fatalf("append changed what was there: %v", ids)
		}
	})
}

func FuzzPattern(f *testing.F) {
	for _, seed := range []string{regexCL100K, regexO200K, `[a-z&&[^e]]{2,3}?|(?<!\s)\p{^Lu}++$`, `(?i:'s|k)\b.`,
		`\x41[^\u00e9-\x{fff}]`, `(?>a|b*)+(?=c)`} {
		f.Add(seed, "Abc's dEf\n éK ſ 12")
	}
	f.Fuzz(func(t *testing.T, source, text string) {
		if len(text) > 200 || !utf8.ValidString(text) {
			return
		}
		p, err := compilePattern(source)
		if err != nil {
			return
		}
		p.engine.MatchTimeout = 20 * time.Millisecond
		done := 0
		_ = p.matches(text, newScratch(), func(start, end int) {
			if start < done || end < start || end > len(text) || start == end && !p.nullable {
				t.Fatalf("%q: %q: a match from %d to %d after %d", source, text, start, end, done)
			}
			done = end
		})
	})
}

func TestTiktoken(t *testing.T) {
	var lines strings.Builder
	for b := range 256 {
		fmt.Fprintf(&lines, "%s %d\n", base64.StdEncoding.EncodeToString([]byte{byte(b)}), b)
	}
	model := lines.String() + base64.StdEncoding.EncodeToString([]byte("ab")) + " 256\n"
	const config = `{"tokenizer_class":"TikTokenTokenizer","added_tokens_decoder":{"258":{"content":"[EOS]"}}}`
	e, err := ParseTiktoken([]byte(model), []byte(config))
	if err != nil {
		t.Fatal(err)
	}
	ids, err := e.Encode(&Budget{}, "abab[EOS]<|reserved_token_257|>a", true)
	if want := []kvblock.Token{256, 256, 258, 257, 'a'}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("got %v, %v; want %v", ids, err, want)
	}
	for _, text := range []string{strings.Repeat("a", kimiMaxRun+1), strings.Repeat("a ", kimiMaxText)} {
		if _, err := e.Encode(&Budget{}, text, true); err == nil {
			t.Errorf("%d bytes: no error", len(text))
		}
	}
	for _, c := range []struct{ model, config, want string }{
		{model, `{"tokenizer_class":"Other"}`, `tokenizer_class "Other"`},
		{model, `[]`, "tokenizer_config.json"},
		{"xx\n", config, "line 1"},
		{model + "YWI= 257\n", config, "repeats the token"},
		{model + "YWJj 300\n", config, "rank 300"},
		{"YQ== 0\n", config, "no token for byte"},
		{model, `{"tokenizer_class":"TikTokenTokenizer","added_tokens_decoder":{"1":{"content":"[X]"}}}`,
			"does not follow the vocabulary"},
		{model, `{"tokenizer_class":"TikTokenTokenizer","added_tokens_decoder":{"257":{"content":"[X]"},` +
			`"258":{"content":"[X]]"}}}`, "begins like another"},
	} {
		if _, err := ParseTiktoken([]byte(c.model), []byte(c.config)); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%.20q, %s: got %v, want ...%s...", c.model, c.config, err, c.want)
		}
	}
}

// tekkenOf returns a tekken.json whose vocabulary are the bytes and further tokens.
func tekkenOf(version, specials string, more ...string) string {
	var vocab strings.Builder
	for b := range 256 {
		fmt.Fprintf(&vocab, `{"rank":%d,"token_bytes":%q},`, b, base64.StdEncoding.EncodeToString([]byte{byte(b)}))
	}
	for i, token := range more {
		fmt.Fprintf(&vocab, `{"rank":%d,"token_bytes":%q},`, 256+i, base64.StdEncoding.EncodeToString([]byte(token)))
	}
	pattern, _ := json.Marshal(regexTekken)
	return fmt.Sprintf(`{"config":{"pattern":%s,"default_vocab_size":%d,"default_num_special_tokens":30,`+
		`"version":%q},"vocab":[%s]%s}`, pattern, 286+len(more), version, strings.TrimSuffix(vocab.String(), ","),
		specials)
}

func TestTekken(t *testing.T) {
	e, info, err := ParseTekken([]byte(tekkenOf("v3", `,"image":{"a":1},"audio":null`, "he", "ll", "hell", "o w")))
	if err != nil || info.Version != 3 || !info.Image || info.Audio || info.Settings != nil {
		t.Fatalf("got %+v, %v", info, err)
	}
	ids, err := e.AppendEncode(nil, "<s>hello w", true)
	const first = 30
	want := []kvblock.Token{
		1, first + '<', first + 's', first + '>', first + 258, first + 'o', first + ' ', first + 'w',
	}
	if err != nil || !slices.Equal(ids, want) {
		t.Errorf("got %v, %v; want %v", ids, err, want)
	}
	if id, ok := e.AddedID("[TOOL_CONTENT]"); !ok || id != 19 {
		t.Errorf("got %v, %v for a special token", id, ok)
	}
	special := func(text string, rank int) string { return fmt.Sprintf(`{"token_str":%q,"rank":%d}`, text, rank) }
	bos := special("<s>", 1)
	for _, c := range []struct{ file, want string }{
		{`{"config":1}`, "cannot unmarshal"},
		{`{}`, `version ""`},
		{tekkenOf("v13", ""), "v13 has no special_tokens"},
		{tekkenOf("v13", `,"multimodal":{"a":1},"special_tokens":[`+bos+`]`), "no field multimodal"},
		{tekkenOf("v13", `,"special_tokens":[`+special("x", 0)+`]`), `no special token "<s>"`},
		{tekkenOf("v13", `,"special_tokens":[`+bos+","+bos+`]`), `two special tokens are "<s>"`},
		{tekkenOf("v13", `,"special_tokens":[`+special("<s>", 30)+`]`), "rank 30, which is not below 30"},
		{tekkenOf("v3", "", "he", "he"), "vocab[257] repeats an earlier token"},
		{tekkenOf("v3", "", ""), "vocab[256] has 0 bytes"},
		{strings.Replace(tekkenOf("v3", "", "he"), `"rank":256`, `"rank":5`, 1), "vocab[256] has the rank 5"},
		{strings.Replace(tekkenOf("v3", ""), `"AQ=="`, `"Ag=="`, 1), "vocab[1] is not the byte 0x01"},
		{strings.Replace(tekkenOf("v3", ""), `":286`, `":285`, 1), "not a token for each byte"},
		{strings.Replace(tekkenOf("v3", ""), `":286`, `":287`, 1), "default_vocab_size 287"},
		{strings.Replace(tekkenOf("v3", ""), `"pattern":"`, `"pattern":"x`, 1), "pattern"},
	} {
		if _, _, err := ParseTekken([]byte(c.file)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60q: got %v, want ...%s...", c.file, err, c.want)
		}
	}
}

func FuzzTekken(f *testing.F) {
	f.Add([]byte(tekkenOf("v3", "", "he", "ll")), "hello")
	f.Add([]byte(`{"config":{"default_vocab_size":-1,"default_num_special_tokens":-9,"version":"v3"}}`), "")
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		e, _, err := ParseTekken(raw)
		if err != nil {
			return
		}
		if ids, err := e.append(Budget{}, []kvblock.Token{7}, text, true, nil); err == nil &&
			(len(ids) == 0 || ids[0] != 7) {
			t.Fatalf("append changed what was there: %v", ids)
		}
	})
}

func FuzzTiktoken(f *testing.F) {
	var lines strings.Builder
	for b := range 256 {
		fmt.Fprintf(&lines, "%s %d\n", base64.StdEncoding.EncodeToString([]byte{byte(b)}), b)
	}
	f.Add([]byte(lines.String()), []byte(`{"tokenizer_class":"TikTokenTokenizer"}`), "a<|reserved_token_257|>")
	f.Fuzz(func(t *testing.T, model, config []byte, text string) {
		e, err := ParseTiktoken(model, config)
		if err != nil {
			return
		}
		if ids, err := e.append(Budget{}, []kvblock.Token{7}, text, true, nil); err == nil &&
			(len(ids) == 0 || ids[0] != 7) {
			t.Fatalf("append changed what was there: %v", ids)
		}
	})
}

// ParseTokenizerJSON builds an encoder from the content of tokenizer.json by its own description.
func ParseTokenizerJSON(raw []byte) (*Encoder, error) {
	file, err := ReadTokenizerJSON(raw)
	if err != nil {
		return nil, err
	}
	return file.Encoder(&file.Description)
}
