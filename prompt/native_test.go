package prompt

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"kvepp/prompt/body"
	"kvepp/prompt/encoders"
	"kvepp/prompt/jinja"
)

// nativeFolder returns a folder with a byte-level tokenizer, this architecture and type, and further files.
func nativeFolder(t testing.TB, architecture, modelType string, files map[string]string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", tokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	all := map[string]string{
		tokenizerFile:   string(raw),
		modelConfigFile: fmt.Sprintf(`{"architectures":[%q],"model_type":%q}`, architecture, modelType),
	}
	for name, text := range files {
		all[name] = text
	}
	for name, text := range all {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestChatEncoder checks which encoder each engine and version chooses, and that chats of a model whose encoder is not
// known here are an error of IsUnknown.
func TestChatEncoder(t *testing.T) {
	const unknown = "unknown"
	request, err := body.ParseRequest("/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"u"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	template := map[string]string{chatTemplateFile: "{{ messages }}"}
	for _, c := range []struct {
		engine                           Engine
		version, architecture, modelType string
		files                            map[string]string
		want                             string // "" for a template, unknown for neither
	}{
		{VLLM, "", "DeepseekV32ForCausalLM", "deepseek_v32", nil, "DeepSeek V3.2 (vLLM's deepseek_v32)"},
		{VLLM, "", "DeepseekV32ForCausalLM", "deepseek_v32", template, "DeepSeek V3.2 (vLLM's deepseek_v32)"},
		{VLLM, "", "DeepseekV4ForCausalLM", "deepseek_v4", nil, "DeepSeek V4 (vLLM's deepseek_v4)"},
		{VLLM, "", "DeepseekV3ForCausalLM", "deepseek_v3", template, ""},
		{SGLang, "0.5.23", "DeepseekV32ForCausalLM", "deepseek_v32", nil, "DeepSeek V3.2 (SGLang's dsv32)"},
		{SGLang, "0.5.23", "DeepseekV32ForCausalLM", "deepseek_v32", template, ""},
		{SGLang, "0.5.22", "DeepseekV4ForCausalLM", "deepseek_v4", template, "DeepSeek V4 (SGLang's dsv4)"},
		{SGLang, "0.5.22", "DeepseekV4ForCausalLM", "deepseek_v41", template, unknown},
		{SGLang, "0.5.23", "DeepseekV4ForCausalLM", "deepseek_v4", template, unknown},
		{VLLM, "0.31.0", "DeepseekV32ForCausalLM", "deepseek_v32", nil, "DeepSeek V3.2 (vLLM's deepseek_v32)"},
		{SGLang, "0.5.21", "InklingForConditionalGeneration", "inkling", nil, "Inkling (SGLang's inkling)"},
		{SGLang, "0.5.22", "InklingForConditionalGeneration", "inkling", template, "Inkling (SGLang's inkling)"},
		// What docs/limits.md says goes by load.
		{VLLM, "", "DeepseekV41ForCausalLM", "deepseek_v41", template, unknown},
		{VLLM, "", "KimiK3ForConditionalGeneration", "kimi_k3", template, unknown},
		{VLLM, "", "MistralForCausalLM", "mistral", map[string]string{"tokenizer.model.v3": "x"}, unknown},
		{SGLang, "0.5.21", "KimiK3ForConditionalGeneration", "kimi_k3", template, unknown},
		{SGLang, "0.5.23", "KimiK3ForConditionalGeneration", "kimi_k3", template, unknown},
		{SGLang, "0.5.23", "InklingForConditionalGeneration", "inkling", template, unknown},
		{SGLang, "0.5.23", "DeepseekV41ForCausalLM", "deepseek_v41", template, unknown},
		{SGLang, "0.5.23", "MuseSparkForConditionalGeneration", "muse", template, unknown},
		{SGLang, "0.5.23", "BeamForCausalLM", "beam", template, unknown},
		{SGLang, "0.5.23", "InternVLChatModel", "internvl_chat", template, unknown},
		{TRTLLM, "", "DeepseekV32ForCausalLM", "deepseek_v32", template, unknown},
		{TRTLLM, "", "DeepseekV4ForCausalLM", "deepseek_v4", template, unknown},
		{TRTLLM, "", "KimiK3ForConditionalGeneration", "kimi_k3", template, unknown},
		{TRTLLM, "", "InklingForConditionalGeneration", "inkling", template, unknown},
		{TRTLLM, "", "GptOssForCausalLM", "gpt_oss", template, unknown},
		{TRTLLM, "", "Glm5NextForConditionalGeneration", "glm5_next", template, unknown},
	} {
		name := fmt.Sprintf("%s %s, %s", c.engine, c.version, c.architecture)
		dir := nativeFolder(t, c.architecture, c.modelType, c.files)
		m, err := Load(dir, Options{Engine: c.engine, Version: c.version})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_, err = m.Tokenize(t.Context(), request)
		got := m.ChatEncoder()
		if IsUnknown(err) {
			got = unknown
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestBrokenTemplate: a template that does not compile matters only for chats that the engine renders with it.
func TestBrokenTemplate(t *testing.T) {
	broken := map[string]string{chatTemplateFile: "{% nosuch %}"}
	chat, err := body.ParseRequest("/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"u"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		engine                           Engine
		version, architecture, modelType string
		loads, encodes                   bool
	}{
		{VLLM, "", "DeepseekV32ForCausalLM", "deepseek_v32", true, true},
		{VLLM, "", "DeepseekV4ForCausalLM", "deepseek_v4", true, true},
		{VLLM, "", "DeepseekV41ForCausalLM", "deepseek_v41", true, false},
		{VLLM, "", "GptOssForCausalLM", "gpt_oss", true, false}, // this vocabulary is not gpt-oss's
		{VLLM, "", "DeepseekV3ForCausalLM", "deepseek_v3", false, false},
		{SGLang, "0.5.22", "DeepseekV4ForCausalLM", "deepseek_v4", true, true},
		{SGLang, "0.5.23", "DeepseekV4ForCausalLM", "deepseek_v4", true, false},
		{SGLang, "0.5.22", "DeepseekV32ForCausalLM", "deepseek_v32", false, false},
		{TRTLLM, "", "DeepseekV32ForCausalLM", "deepseek_v32", false, false},
	} {
		name := fmt.Sprintf("%s %s, %s", c.engine, c.version, c.architecture)
		dir := nativeFolder(t, c.architecture, c.modelType, broken)
		m, err := Load(dir, Options{Engine: c.engine, Version: c.version})
		if (err == nil) != c.loads {
			t.Errorf("%s: Load: %v", name, err)
		}
		if err != nil {
			continue
		}
		if _, err := m.Tokenize(t.Context(), chat); (err == nil) != c.encodes {
			t.Errorf("%s: a chat: %v", name, err)
		}
	}
}

// TestRefusedWithTools: SGLang renders tools without their wrapper if the template fails. kvepp does not take its own
// refusal of a template for a failure of the engine.
func TestRefusedWithTools(t *testing.T) {
	for source, want := range map[string]error{
		"{% for t in tools %}{{ t|pprint if t.type else t.name }}{% endfor %}": jinja.ErrUnsupported,
		"{% for t in tools %}{{ t.none.x if t.type else t.name }}{% endfor %}": nil,
	} {
		m, err := Load(nativeFolder(t, "LlamaForCausalLM", "llama", map[string]string{chatTemplateFile: source}),
			Options{Engine: SGLang})
		if err != nil {
			t.Fatal(err)
		}
		request, err := body.ParseRequest("/v1/chat/completions",
			[]byte(`{"model":"m","messages":[{"role":"user","content":"u"}],`+
				`"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]}`))
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.Tokenize(t.Context(), request)
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", source, err, want)
		}
	}
}

// TestEfforts reads the wording of efforts like SGLang, which parses the file as Python.
func TestEfforts(t *testing.T) {
	const prompts = "REASONING_EFFORT_PROMPTS = {\n    \"low\": \"\",\n    \"high\": \"h\",\n    \"max\": \"m\",\n}\n"
	for text, want := range map[string]encoders.Efforts{
		"":                               encoders.EffortsPreview,
		"REASONING_EFFORT_MAX = \"x\"\n": encoders.EffortsPreview,
		prompts:                          encoders.EffortsPreview,
		prompts + "DEFAULT_REASONING_EFFORT = \"high\"\n":                     encoders.EffortsPreview,
		prompts + "DEFAULT_REASONING_EFFORT: str = 'low'\n":                   encoders.EffortsOfficial,
		"    " + prompts + "DEFAULT_REASONING_EFFORT = \"low\"\n":             encoders.EffortsPreview,
		"REASONING_EFFORT_PROMPTS = {}\nDEFAULT_REASONING_EFFORT = \"low\"\n": encoders.EffortsPreview,
	} {
		dir := nativeFolder(t, "DeepseekV4ForCausalLM", "deepseek_v4", map[string]string{effortsFile: text})
		if got, err := readEfforts(dir); got != want || err != nil {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	if got, err := readEfforts(t.TempDir()); got != encoders.EffortsUnknown || err != nil {
		t.Errorf("no file: %v, %v", got, err)
	}
}
