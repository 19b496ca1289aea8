package prompt

import (
	"bufio"
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// tekkenSpecialsOf returns the special tokens of a version, as test/parity/mistral.py has them; nil for those that a
// file of version 3 or 7 need not list.
func tekkenSpecialsOf(version string) []string {
	specials := []string{
		"<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
		"[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
		"[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
	}
	if version == "v7" {
		return specials
	}
	specials = append(specials, "[ARGS]", "[CALL_ID]")
	if version != "v11" {
		specials = append(specials, "[THINK]", "[/THINK]")
	}
	if version == "v15" {
		specials = append(specials, "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
	}
	return specials
}

// tekkenBytes returns a tekken.json whose vocabulary are the bytes, with further fields.
func tekkenBytes(version string, specials []string, more map[string]any) []byte {
	type token struct {
		Rank  int     `json:"rank"`
		Bytes []byte  `json:"token_bytes"`
		Text  *string `json:"token_str"`
	}
	file := map[string]any{"config": map[string]any{
		"pattern": `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]` +
			`?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+` +
			`|\s+(?!\S)|\s+`,
		"num_vocab_tokens": 256, "default_vocab_size": 356, "default_num_special_tokens": 100, "version": version,
	}}
	var vocab []token
	for b := range 256 {
		vocab = append(vocab, token{Rank: b, Bytes: []byte{byte(b)}})
	}
	file["vocab"] = vocab
	if specials != nil {
		var list []map[string]any
		for i, text := range specials {
			list = append(list, map[string]any{"rank": i, "token_str": text, "is_control": true})
		}
		file["special_tokens"] = list
	}
	maps.Copy(file, more)
	raw, err := json.Marshal(file)
	if err != nil {
		panic(err)
	}
	return raw
}

// mistralFolders are the folders of test/parity/mistral.py with a vocabulary of bytes.
func mistralFolders() map[string][]byte {
	images := map[string]any{"image_patch_size": 16, "max_image_size": 64}
	settings := func(effort any) map[string]any {
		return map[string]any{"model_settings_builder": map[string]any{"reasoning_effort": effort}}
	}
	enum := func(given string, values ...string) any {
		return map[string]any{"type": "enum", "accepts_none": true, "default": given, "values": values}
	}
	v15 := settings(enum("none", "none", "high"))
	v15["image"] = images
	return map[string][]byte{
		"bytes-v3":        tekkenBytes("v3", nil, map[string]any{"image": images}),
		"bytes-v7":        tekkenBytes("v7", nil, map[string]any{"multimodal": images}),
		"bytes-v7-listed": tekkenBytes("v7", tekkenSpecialsOf("v7"), nil),
		"bytes-v11":       tekkenBytes("v11", tekkenSpecialsOf("v11"), map[string]any{"image": images}),
		"bytes-v13":       tekkenBytes("v13", tekkenSpecialsOf("v13"), map[string]any{"image": images}),
		"bytes-v13-plain": tekkenBytes("v13", tekkenSpecialsOf("v11"), nil),
		"bytes-v15":       tekkenBytes("v15", tekkenSpecialsOf("v15"), v15),
		"bytes-v15-open": tekkenBytes("v15", tekkenSpecialsOf("v15"),
			settings(enum("medium", "low", "medium", "high"))),
		"bytes-v15-unset": tekkenBytes("v15", tekkenSpecialsOf("v15"), settings(nil)),
	}
}

// loadTekken loads a folder with a tekken.json and other files.
func loadTekken(t testing.TB, tekken []byte, o Options, others ...string) (*Model, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, tekkenFile), tekken, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range others {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Load(dir, o)
}

// decodeTekken returns the text of ids, with the names of special tokens.
func decodeTekken(m *Model, ids []kvblock.Token) string {
	names := map[kvblock.Token]string{}
	for _, name := range tekkenSpecialsOf("v15") {
		if id, ok := m.encoder.AddedID(name); ok {
			names[id] = name
		}
	}
	var text strings.Builder
	for _, id := range ids {
		if name, ok := names[id]; ok {
			text.WriteString(name)
		} else {
			text.WriteByte(byte(id - 100))
		}
	}
	return text.String()
}

// mistralPath returns the path of the API that a body of testdata/mistral.jsonl is for.
func mistralPath(t testing.TB, body []byte) string {
	t.Helper()
	var named struct {
		Prompt, Input json.RawMessage
		MaxTokens     int `json:"max_tokens"`
	}
	if err := json.Unmarshal(body, &named); err != nil {
		t.Fatal(err)
	}
	switch {
	case named.Prompt != nil:
		return "/v1/completions"
	case named.Input != nil:
		return "/v1/responses"
	case named.MaxTokens > 0:
		return "/v1/messages"
	}
	return "/v1/chat/completions"
}

// mistralCase is a request and its text by vLLM's own code with mistral-common. test/parity writes the cases.
type mistralCase struct {
	Folder string
	Body   json.RawMessage
	Text   string
	Media  bool
	Error  string
}

func mistralCases(t testing.TB) []mistralCase {
	t.Helper()
	raw, err := os.ReadFile("testdata/mistral.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var cases []mistralCase
	lines := bufio.NewScanner(bytes.NewReader(raw))
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var c mistralCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	return cases
}

// TestMistral compares with the prompts that vLLM's own code made with mistral-common.
func TestMistral(t *testing.T) {
	folders := mistralFolders()
	models := map[string]*Model{}
	equal, refused := 0, 0
	for _, c := range mistralCases(t) {
		if models[c.Folder] == nil {
			m, err := loadTekken(t, folders[c.Folder], Options{})
			if err != nil {
				t.Fatalf("%s: %v", c.Folder, err)
			}
			models[c.Folder] = m
		}
		m := models[c.Folder]
		request, err := body.ParseRequest(mistralPath(t, c.Body), c.Body)
		var prompts []Prompt
		if err == nil {
			prompts, err = m.Tokenize(t.Context(), request)
		}
		switch {
		case c.Error != "":
			refused++
			if err == nil {
				t.Errorf("%s: %s\n got a prompt; want an error like %s", c.Folder, c.Body, c.Error)
			}
			continue
		case err != nil:
			t.Errorf("%s: %s\n got %v\nwant %q", c.Folder, c.Body, err, c.Text)
			continue
		}
		prompt := prompts[0]
		if got := decodeTekken(m, prompt.IDs[:prompt.Certain]); got != c.Text ||
			c.Media != (prompt.Certain < len(prompt.IDs)) {
			t.Errorf("%s: %s\n got %q\nwant %q", c.Folder, c.Body, got, c.Text)
		}
		equal++
	}
	if len(models) != len(folders) || equal < 100 || refused < 10 {
		t.Errorf("%d folders, %d equal and %d refused are too few for a conclusion", len(models), equal, refused)
	}
}

// TestMistralFolders says which tokenizer a folder has, by its files and --tokenizer-mode.
func TestMistralFolders(t *testing.T) {
	v13 := mistralFolders()["bytes-v13"]
	chat := chatRequest(t, `[{"role":"user","content":"hi"}]`)
	for name, c := range map[string]struct {
		tekken []byte
		mode   string
		others []string
		want   string // the prompt, or a part of an error
	}{
		"no weights":        {v13, "", nil, "<s>[INST]hi[/INST]"},
		"Mistral's weights": {v13, "", []string{"consolidated.safetensors"}, "<s>[INST]hi[/INST]"},
		"both weights": {v13, "", []string{"consolidated-00001-of-00002.safetensors", "model.safetensors"},
			"<s>[INST]hi[/INST]"},
		"other weights":           {v13, "", []string{"model.safetensors"}, "tokenizer.json: no such file"},
		"other weights, told":     {v13, TokenizerMistral, []string{"model.safetensors"}, "<s>[INST]hi[/INST]"},
		"Mistral's weights, told": {v13, TokenizerHF, []string{"consolidated.safetensors"}, "tokenizer.json: no such"},
		"a mode of no name":       {v13, "slow", nil, `tokenizer mode "slow" is none of`},
		"not JSON":                {[]byte("{"), "", nil, "tekken.json: unexpected end"},
		"another version":         {tekkenBytes("v17", tekkenSpecialsOf("v15"), nil), "", nil, "v17 is not supported"},
		"a version of no number":  {tekkenBytes("13", nil, nil), "", nil, `config.version "13"`},
		"specials missing": {tekkenBytes("v15", tekkenSpecialsOf("v13"), nil), "", nil,
			"v15 needs the special token [MODEL_SETTINGS]"},
		"no specials":          {tekkenBytes("v11", nil, nil), "", nil, "v11 has no special_tokens"},
		"settings too early":   {withSettings("v13", `{}`), "", nil, "model_settings_builder: version v13 has none"},
		"unknown settings":     {withSettings("v15", `{"voice":{}}`), "", nil, "unknown field"},
		"a default not listed": {withSettings("v15", `{"reasoning_effort":{"values":["high"]}}`), "", nil, "default"},
		"an effort of no name": {withSettings("v15", `{"reasoning_effort":{"values":["most"],"default":"most"}}`), "",
			nil, `"most" is none of`},
	} {
		m, err := loadTekken(t, c.tekken, Options{TokenizerMode: c.mode}, c.others...)
		got := ""
		if err == nil {
			var prompts []Prompt
			if prompts, err = m.Prompts(t.Context(), chat); err == nil {
				got = decodeTekken(m, prompts[0].IDs)
			}
		}
		if err != nil {
			got = err.Error()
		}
		if (err == nil) != strings.HasPrefix(c.want, "<s>") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
}

func withSettings(version, settings string) []byte {
	return tekkenBytes(version, tekkenSpecialsOf("v15"), map[string]any{
		"model_settings_builder": json.RawMessage(settings),
	})
}

// TestMistralOptions sets vLLM's flags that a chat for Mistral's own tokenizer obeys.
func TestMistralOptions(t *testing.T) {
	v15 := mistralFolders()["bytes-v15"]
	const high = `[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS]`
	for _, c := range []struct {
		options Options
		fields  string
		want    string
	}{
		{Options{DefaultChatTemplateKwargs: `{"reasoning_effort":"high"}`}, ``, high},
		{Options{DefaultChatTemplateKwargs: `{"reasoning_effort":"high"}`}, `,"reasoning_effort":"none"`,
			strings.ReplaceAll(high, "high", "none")},
		{Options{ReasoningEffortMap: `{"max":"high"}`}, `,"reasoning_effort":"max"`, high},
		{Options{ReasoningEffortMap: `{"high":"most"}`}, `,"reasoning_effort":"high"`, "error: the reasoning effort"},
		{Options{DefaultChatTemplateKwargs: `{"tools":[]}`}, ``, "error: the template variable tools"},
		{Options{ExcludeToolsWhenToolChoiceNone: true},
			`,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"`,
			strings.ReplaceAll(high, "high", "none")},
		{Options{}, `,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"`,
			`[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]` +
				`[/AVAILABLE_TOOLS]` + strings.ReplaceAll(high, "high", "none")},
		{Options{}, `,"chat_template_kwargs":{}`, "error: chat_template_kwargs"},
	} {
		m, err := loadTekken(t, v15, c.options)
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := m.Tokenize(t.Context(), chatRequest(t, `[{"role":"user","content":"hi"}]`+c.fields))
		want, fails := strings.CutPrefix(c.want, "error: ")
		if fails {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, %v; want an error with %q", c.fields, prompts, err, want)
			}
			continue
		}
		if err != nil || decodeTekken(m, prompts[0].IDs) != "<s>"+want+"[INST]hi[/INST]" {
			t.Errorf("%s: got %v, %v; want %q", c.fields, prompts, err, want)
		}
	}
}

// FuzzMistral tokenizes bodies twice by the rules of each version. Both results must be equal.
func FuzzMistral(f *testing.F) {
	var models []*Model
	for _, tekken := range mistralFolders() {
		m, err := loadTekken(f, tekken, Options{})
		if err != nil {
			f.Fatal(err)
		}
		models = append(models, m)
	}
	paths := []string{"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"}
	for _, c := range mistralCases(f) {
		f.Add([]byte(c.Body), byte(slices.Index(paths, mistralPath(f, c.Body))))
	}
	f.Fuzz(func(t *testing.T, payload []byte, api byte) {
		request, err := body.ParseRequest(paths[int(api)%len(paths)], payload)
		if err != nil {
			return
		}
		for _, m := range models {
			first, err := m.Tokenize(t.Context(), request)
			again, errAgain := m.Tokenize(t.Context(), request)
			if (err == nil) != (errAgain == nil) || len(first) != len(again) {
				t.Fatalf("%v, %v, then %v, %v", first, err, again, errAgain)
			}
			for i := range first {
				if !slices.Equal(first[i].IDs, again[i].IDs) || first[i].Certain != again[i].Certain ||
					first[i].Certain > len(first[i].IDs) {
					t.Fatalf("%v, then %v", first[i], again[i])
				}
			}
		}
	})
}
