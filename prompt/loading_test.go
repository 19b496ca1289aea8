package prompt

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
)

// loadingCases are folders and what the engines' own tokenizers make of texts. testdata/loading_gen.py wrote them with
// Transformers 5.17.0, 5.19.0 and 5.20.2 (AutoTokenizer, as vLLM 0.31.0 to 0.33.0) and with get_tokenizer of SGLang
// 0.5.21 (Transformers 5.12.1), 0.5.22 and 0.5.23 (5.19.0).
type loadingCases struct {
	Texts []string
	Bases map[string]map[string]json.RawMessage
	Cases []struct {
		Name, Base string
		Overrides  map[string]json.RawMessage
		Files      map[string]json.RawMessage
		Wants      []struct {
			Versions []string
			IDs      [][]kvblock.Token
			Names    map[string]string
			Error    string // the engine's own, for a folder with which it does not start
		}
	}
}

// folder writes a case's files.
func (l *loadingCases) folder(t *testing.T, i int) string {
	t.Helper()
	c, dir := &l.Cases[i], t.TempDir()
	file, model := maps.Clone(l.Bases[c.Base]), map[string]json.RawMessage{}
	maps.Copy(file, c.Overrides)
	for _, part := range []json.RawMessage{l.Bases[c.Base]["model"], c.Overrides["model"]} {
		if part != nil {
			if err := json.Unmarshal(part, &model); err != nil {
				t.Fatal(err)
			}
		}
	}
	files := map[string]any{"tokenizer.json": file}
	file["model"], _ = json.Marshal(model)
	for name, content := range c.Files {
		files[name] = content
	}
	for name, content := range files {
		raw, err := json.Marshal(content)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), raw, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestLoadingAsEngines compares ids and named tokens with the engines' own tokenizers. Where kvepp does not know them,
// it says so; those of refused are the only such folders.
func TestLoadingAsEngines(t *testing.T) {
	var l loadingCases
	raw, err := os.ReadFile("testdata/loading.json")
	if err == nil {
		err = json.Unmarshal(raw, &l)
	}
	if err != nil || len(l.Cases) < 100 {
		t.Fatalf("%d cases, %v", len(l.Cases), err)
	}
	refused := func(name, base, of string) bool {
		return strings.HasPrefix(of, "vllm") && base == "bytes" && strings.HasPrefix(name, "LlamaTokenizer") &&
			(of == "vllm 0.31.0" || strings.HasSuffix(name, "normalizer")) || // see autoClass
			strings.HasPrefix(of, "sglang") && name == "GemmaTokenizerFast with Metaspace"
	}
	compared := map[string]int{}
	for i, c := range l.Cases {
		dir, byEngine := l.folder(t, i), map[string]*Model{}
		for _, want := range c.Wants {
			for _, of := range want.Versions {
				engine, version, _ := strings.Cut(of, " ")
				m, err := byEngine[engine], error(nil)
				if m == nil {
					m, err = Load(dir, Options{Engine: Engine(engine)})
				}
				if err == nil {
					byEngine[engine] = m
					if m, err = m.At(version); err == nil {
						err = m.unknown
					}
				}
				if err != nil {
					if want.Error == "" && !refused(c.Name, c.Base, of) {
						t.Errorf("%s, %s: %v", c.Name, of, err)
					}
					continue
				}
				if want.Error != "" {
					continue
				}
				compared[of]++
				if !maps.Equal(m.specialNames, want.Names) {
					t.Errorf("%s, %s: names %v, want %v", c.Name, of, m.specialNames, want.Names)
				}
				for k, text := range l.Texts {
					if ids, err := m.Encode(text, true); err != nil || !slices.Equal(ids, want.IDs[k]) {
						t.Errorf("%s, %s: %q\n got %v, %v\nwant %v", c.Name, of, text, ids, err, want.IDs[k])
					}
				}
			}
		}
	}
	for _, engine := range []Engine{VLLM, SGLang} {
		for _, version := range Versions(engine) {
			if of := string(engine) + " " + version; compared[of] < 80 {
				t.Errorf("%s: compared only %d folders", of, compared[of])
			}
		}
	}
}

// TestLoadingSaysWhatItDoesNotKnow loads folders whose ids only the engine knows, by Load or by the version's model.
func TestLoadingSaysWhatItDoesNotKnow(t *testing.T) {
	const config, model = "tokenizer_config.json", "config.json"
	for name, c := range map[string]struct {
		files   map[string]string
		of      string
		refused string // part of the error; "" for none
	}{
		"class of another kind": {map[string]string{config: `{"tokenizer_class":"BertTokenizerFast"}`},
			"vllm 0.33.0", `class "BertTokenizerFast"`},
		"the same on Dynamo": {map[string]string{config: `{"tokenizer_class":"BertTokenizerFast"}`},
			"dynamo 1.6.1", ""},
		"class of a mapped type": {map[string]string{config: `{"tokenizer_class":"T5Tokenizer"}`,
			model: `{"model_type":"phi3"}`}, "vllm 0.33.0", ""},
		"SGLang takes the class": {map[string]string{config: `{"tokenizer_class":"T5Tokenizer"}`,
			model: `{"model_type":"phi3"}`}, "sglang 0.5.23", `class "T5Tokenizer"`},
		"type of a class of another kind": {map[string]string{config: `{}`, model: `{"model_type":"roberta"}`},
			"vllm 0.33.0", `model type "roberta"`},
		"class that only config.json names": {map[string]string{config: `{}`,
			model: `{"model_type":"x","tokenizer_class":"XTokenizer"}`}, "vllm 0.33.0", `"XTokenizer"`},
		"Python of the model's own": {map[string]string{
			config: `{"tokenizer_class":"XTokenizer","auto_map":{"AutoTokenizer":["a.X",null]}}`}, "sglang 0.5.22",
			`"XTokenizer" in Python`},
		"Python for something else": {map[string]string{config: `{"auto_map":{"AutoProcessor":"a.X"}}`},
			"sglang 0.5.22", ""},
		"Python that vLLM leaves out": {map[string]string{config: `{"auto_map":{"AutoTokenizer":["a.X",null]}}`,
			model: `{"model_type":"step3_vl"}`}, "vllm 0.32.0", ""},
		"architecture whose class vLLM leaves out": {map[string]string{config: `{"tokenizer_class":"BertTokenizer"}`,
			model: `{"model_type":"x","architectures":["DeepseekV41ForCausalLM"]}`}, "vllm 0.33.0", ""},
		"Mistral's own, SGLang": {map[string]string{tekkenFile: `{}`, model: `{"model_type":"mistral"}`},
			"sglang 0.5.23", "Mistral's own tokenizer"},
		"byte-level Llama, by name": {map[string]string{config: `{"tokenizer_class":"LlamaTokenizer"}`,
			model: `{"model_type":"llama"}`}, "vllm 0.31.0", "depends on the model's name"},
		"byte-level Llama without config.json": {map[string]string{config: `{"tokenizer_class":"LlamaTokenizer"}`,
			model: ""}, "vllm 0.33.0", "config.json"},
		"byte-level Llama": {map[string]string{config: `{"tokenizer_class":"LlamaTokenizer"}`,
			model: `{"model_type":"llama"}`}, "vllm 0.32.0", ""},
		"file of another path": {map[string]string{config: `{"tokenizer_file":"/x/tokenizer.json"}`}, "sglang 0.5.21",
			"tokenizer_file"},
		"no file of another path": {map[string]string{config: `{"tokenizer_file":"/x/tokenizer.json"}`},
			"sglang 0.5.22", ""},
		"model's name of a wrong class": {map[string]string{model: `{"model_type":"qwen3","model_name":"phi3"}`},
			"vllm 0.33.0", "model_name"},
		"repaired pattern": {map[string]string{config: `{"fix_mistral_regex":true}`}, "vllm 0.33.0", "mistral"},
		"prefix space": {map[string]string{config: `{"tokenizer_class":"GPT2Tokenizer","add_prefix_space":"yes"}`},
			"vllm 0.33.0", "string"},
		"processor of a model with media": {map[string]string{model: `{"model_type":"x","vision_config":{}}`,
			config: `{"tokenizer_class":"LlamaTokenizer"}`}, "sglang 0.5.23", "model with media"},
		"processor that loads the same": {map[string]string{model: `{"model_type":"x","vision_config":{}}`,
			config: `{"tokenizer_class":"Qwen2Tokenizer"}`}, "sglang 0.5.23", ""},
	} {
		engine, version, _ := strings.Cut(c.of, " ")
		for _, of := range []string{version, ""} { // as the version of the folder, and as another than that
			m, err := Load(copyModel(t, "tiny-bytelevel", c.files), Options{Engine: Engine(engine), Version: of})
			if err == nil {
				if m, err = m.At(version); err == nil {
					_, err = m.Tokenize(t.Context(), completionRequest(t, `"prompt":"some text"`))
				}
			}
			if got := fmt.Sprint(err); c.refused == "" && err != nil || !strings.Contains(got, c.refused) {
				t.Errorf("%s, loaded for %q: got %v, want ...%s...", name, of, err, c.refused)
			}
		}
	}
}

// TestLoadingOfVersions loads a folder that Transformers 5.12 loads differently, and one that all load alike.
func TestLoadingOfVersions(t *testing.T) {
	const config, model = "tokenizer_config.json", "config.json"
	dir := copyModel(t, "tiny-bytelevel", map[string]string{config: `{"tokenizer_class":"PreTrainedTokenizerFast"}`,
		model: `{"model_type":"x"}`})
	m, err := Load(dir, Options{Engine: SGLang})
	if err != nil {
		t.Fatal(err)
	}
	if older, err := m.At("0.5.21"); err != nil || older.encoder != m.encoder {
		t.Errorf("loaded alike: an encoder of its own, %v", err)
	}
	dir = copyModel(t, "tiny-bytelevel", map[string]string{config: `{"bos_token":"<|im_start|>"}`,
		model: `{"model_type":"stablelm"}`, "tokenizer.json": withBOS(t)})
	if m, err = Load(dir, Options{Engine: SGLang}); err != nil {
		t.Fatal(err)
	}
	older, err := m.At("0.5.21")
	if err != nil || older.encoder == m.encoder || !older.HasVersions() {
		t.Errorf("loaded differently: the same encoder, %v", err)
	}
	// The older has GPTNeoXTokenizer, with that class's special tokens.
	if got := older.specialNames["pad_token"]; got != "<|padding|>" || m.specialNames["pad_token"] != "" {
		t.Errorf("pad_token: %q and %q", got, m.specialNames["pad_token"])
	}
}

// withBOS returns the tokenizer.json of a tiny model whose post-processor puts a token before texts.
func withBOS(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	file["post_processor"] = map[string]any{"type": "TemplateProcessing",
		"single": []any{map[string]any{"SpecialToken": map[string]any{"id": "b", "type_id": 0}},
			map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}}},
		"special_tokens": map[string]any{"b": map[string]any{"id": "b", "ids": []int{3}, "tokens": []string{"b"}}}}
	if raw, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// TestLoadingCodeLlama: CodeLlamaTokenizer makes two texts of one with <FILL_ME>.
func TestLoadingCodeLlama(t *testing.T) {
	m, err := Load(copyModel(t, "tiny-sentencepiece", map[string]string{
		"tokenizer_config.json": `{"tokenizer_class":"CodeLlamaTokenizer"}`}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err = m.Encode("def f(): FILL_ME", false); err != nil {
		t.Error(err)
	}
	_, err = m.Encode("def f(): <FILL_ME> return", false)
	if err == nil || !strings.Contains(err.Error(), "<FILL_ME>") {
		t.Errorf("got %v", err)
	}
}

// TestNamedTokensInTemplates: a template sees every named token.
func TestNamedTokensInTemplates(t *testing.T) {
	for _, engine := range []Engine{VLLM, SGLang} {
		m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{
			"chat_template.jinja": "{{ image_token }} {{ x_token }} {{ eos_token }} {{ unk_token }}",
			"tokenizer_config.json": `{"tokenizer_class":"GPT2Tokenizer","image_token":"<img>","eos_token":null,
				"extra_special_tokens":{"x_token":{"content":"<x>"}}}`}), Options{Engine: engine})
		if err != nil {
			t.Fatal(err)
		}
		text, err := m.renderChat(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}]`))
		if want := "<img> <x>  <|endoftext|>"; err != nil || text != want {
			t.Errorf("%s: got %q, %v; want %q", engine, text, err, want)
		}
	}
}
