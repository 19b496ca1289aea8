package prompt

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/prompt/body"
)

// TestTemplateFiles: each engine's choice among several templates.
func TestTemplateFiles(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const (
		config = "tokenizer_config.json"
		named  = `{"chat_template":[{"name":"rag","template":"rag"},{"name":"default","template":"plain"},` +
			`{"name":"tool_use","template":"tools"}]}`
		noTemplate = ""
	)
	own := filepath.Join(t.TempDir(), "own.jinja")
	if err := os.WriteFile(own, []byte("\n\nown"+`\n`+"{{ 1 }}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		replaced     map[string]string
		options      Options
		plain, tools string
	}{
		"named": {map[string]string{"chat_template.jinja": "", config: named}, Options{}, "plain",
			"tools"},
		"named, SGLang": {map[string]string{"chat_template.jinja": "", config: named}, Options{Engine: SGLang},
			"rag", "rag"},
		"chosen, SGLang": {map[string]string{"chat_template.jinja": "", config: named},
			Options{Engine: SGLang, HFChatTemplateName: "default"}, "plain", "plain"},
		"one alone, SGLang": {map[string]string{"chat_template.jinja": "one"},
			Options{Engine: SGLang, HFChatTemplateName: "rag"}, "one", "one"},
		"named by an object": {map[string]string{"chat_template.jinja": "",
			config: `{"chat_template":{"tool_use":"tools","default":"plain"}}`}, Options{}, "plain", "tools"},
		"object, SGLang": {map[string]string{"chat_template.jinja": "",
			config: `{"chat_template":{"tool_use":"tools","default":"plain"}}`}, Options{Engine: SGLang}, "tools",
			"tools"},
		"further files": {map[string]string{"chat_template.jinja": "plain",
			"additional_chat_templates/tool_use.jinja": "tools"}, Options{}, "plain", "tools"},
		"images, vLLM": {map[string]string{"chat_template.jinja": "", config: `{"chat_template":"plain"}`,
			"chat_template.json": `{"chat_template":"processor"}`, "config.json": `{"vision_config":{}}`}, Options{},
			"processor", "plain"},
		"no images, vLLM": {map[string]string{"chat_template.jinja": "", config: `{"chat_template":"plain"}`,
			"chat_template.json": `{"chat_template":"processor"}`}, Options{}, "plain", "plain"},
		"images, Dynamo": {map[string]string{"chat_template.jinja": "", config: `{"chat_template":"plain"}`,
			"chat_template.json": `{"chat_template":"processor"}`, "config.json": `{"vision_config":{}}`},
			Options{Engine: Dynamo}, "processor", "processor"},
		"given": {map[string]string{config: named}, Options{ChatTemplate: own}, "\n\nown" + `\n` + "1",
			"\n\nown" + `\n` + "1"},
		"given, SGLang": {map[string]string{config: named}, Options{ChatTemplate: own, Engine: SGLang}, "own\n1",
			"own\n1"},
		"images, SGLang": {map[string]string{"config.json": `{"vision_config":{}}`,
			"chat_template.jinja": "jinja"}, Options{Engine: SGLang}, "jinja", "jinja"},
		"own encoding, vLLM": {map[string]string{"config.json": `{"architectures":["MoonshotKimiaForCausalLM"]}`},
			Options{}, noTemplate, noTemplate},
		"gpt-oss, SGLang": {map[string]string{"config.json": `{"model_type":"gpt_oss"}`,
			"chat_template.jinja": "jinja"}, Options{Engine: SGLang}, "jinja", "jinja"},
		"conversation SGLang": {map[string]string{"config.json": `{"model_type":"internvl_chat"}`},
			Options{Engine: SGLang}, noTemplate, noTemplate},
		"Mistral's, vLLM": {map[string]string{"tokenizer.model.v3": "x"}, Options{}, noTemplate, noTemplate},
		"known for it, vLLM": {map[string]string{"config.json": `{"model_type":"deepseek_v3"}`,
			config: `{"tokenizer_class":"LlamaTokenizerFast"}`, "chat_template.jinja": "hf"}, Options{}, "hf", "hf"},
		"HF's weights, vLLM": {map[string]string{"tekken.json": "{}", "model.safetensors": "x",
			"chat_template.jinja": "hf"}, Options{}, "hf", "hf"},
	} {
		dir := copyModel(t, "tiny-bytelevel", c.replaced)
		m, err := Load(dir, c.options)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for tools, want := range map[string]string{"": c.plain,
			`,"tools":[{"type":"function","function":{"name":"f"}}]`: c.tools} {
			prompts, err := m.Prompts(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}]`+tools))
			switch {
			case want == noTemplate:
				if !IsUnknown(err) {
					t.Errorf("%s: got %v, %v; want that only the engine knows", name, prompts, err)
				}
			case err != nil || prompts[0].Text != want:
				t.Errorf("%s%s: got %v, %v; want %q", name, tools, prompts, err, want)
			}
		}
	}
}

// TestVLLMFlags renders with vLLM's flags. Package parity compares with vLLM.
func TestVLLMFlags(t *testing.T) {
	const template = `{{ tools is none }} {{ reasoning_effort }} {{ enable_thinking }}{% for m in messages %}{% ` +
		`endfor %}`
	const tools = `,"tools":[{"type":"function","function":{"name":"f"}}]`
	for _, c := range []struct {
		efforts      string
		fields, want string
	}{
		{"", tools + `,"tool_choice":"none"`, "True  "},
		{"", tools, "False  "},
		{`{"high":"max","low":"none","medium":"auto"}`, `,"reasoning_effort":"high"`, "True max True"},
		{`{"high":"max","low":"none","medium":"auto"}`, `,"reasoning_effort":"low"`, "True none False"},
		{`{"high":"max","low":"none","medium":"auto"}`, `,"reasoning_effort":"medium"`, "True  True"},
		{`{"high":"max","low":"none","medium":"auto"}`, `,"reasoning_effort":"xhigh"`, "True xhigh True"},
	} {
		m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": template}),
			Options{ExcludeToolsWhenToolChoiceNone: true, ReasoningEffortMap: c.efforts})
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := m.Prompts(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}]`+c.fields))
		if err != nil || prompts[0].Text != c.want {
			t.Errorf("%s: got %+v, %v; want %q", c.fields, prompts, err, c.want)
		}
	}
}

func TestTemplateFileErrors(t *testing.T) {
	dir := copyModel(t, "tiny-bytelevel", nil)
	for name, o := range map[string]Options{
		"no-such-file.jinja":   {ChatTemplate: "no-such-file.jinja"},
		"must end in .jinja":   {ChatTemplate: filepath.Join(dir, "tokenizer_config.json"), Engine: SGLang},
		"kwargs: invalid JSON": {DefaultChatTemplateKwargs: "{"},
		"not a JSON object":    {DefaultChatTemplateKwargs: "[1]"},
		"content format":       {ChatTemplateContentFormat: "parts"},
		"effort map":           {ReasoningEffortMap: "[]"},
		"none of":              {ReasoningEffortMap: `{"extreme":"high"}`},
		"only SGLang":          {HFChatTemplateName: "rag"},
		"only vLLM":            {ExcludeToolsWhenToolChoiceNone: true, Engine: SGLang},
		"is not an engine":     {Engine: "llama"},
		"auto, string, openai": {ChatTemplateContentFormat: "x"},
	} {
		if _, err := Load(dir, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%+v: got %v, want ...%s...", o, err, name)
		}
	}
}

// TestContentFormatOption: on vLLM the flag takes precedence over the format detected in the template.
func TestContentFormatOption(t *testing.T) {
	dir := copyModel(
		t,
		"tiny-bytelevel",
		map[string]string{"chat_template.jinja": `{{ messages[0].content | tojson }}`},
	)
	for _, c := range []struct {
		options Options
		want    string
	}{
		{Options{}, `"a\nb"`},
		{Options{ChatTemplateContentFormat: ContentString}, `"a\nb"`},
		{Options{ChatTemplateContentFormat: ContentOpenAI},
			`[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]`},
		{Options{ChatTemplateContentFormat: ContentOpenAI, Engine: SGLang}, `"a b"`},
	} {
		m, err := Load(dir, c.options)
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.renderChat(
			t.Context(),
			chatRequest(t, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`),
		)
		if err != nil || got != c.want {
			t.Errorf("%+v: got %q, %v; want %q", c.options, got, err, c.want)
		}
	}
}

// TestSpecialTokensOfCompletions: vLLM obeys add_special_tokens, SGLang ignores it.
func TestSpecialTokensOfCompletions(t *testing.T) {
	for _, c := range []struct {
		engine Engine
		fields string
		bos    bool
	}{
		{VLLM, `"prompt":"one"`, true},
		{VLLM, `"prompt":"one","add_special_tokens":false`, false},
		{SGLang, `"prompt":"one","add_special_tokens":false`, true},
		{TRTLLM, `"prompt":"one","add_special_tokens":false`, false},
	} {
		m, err := Load(filepath.Join(modelsDir, "tiny-sentencepiece"), Options{Engine: c.engine})
		if err != nil {
			t.Fatal(err)
		}
		ids, err := m.Tokenize(t.Context(), completionRequest(t, c.fields))
		if err != nil || (ids[0].IDs[0] == 1) != c.bos {
			t.Errorf("%s: %s: got %v, %v", c.engine, c.fields, ids, err)
		}
	}
}

// TestFieldsForTheEngine: requests with fields whose effect kvepp does not know, or that bring their own ids.
func TestFieldsForTheEngine(t *testing.T) {
	const chat, completion = "chat", "completion"
	for _, c := range []struct {
		engine       Engine
		kind, fields string
		want         string // the ids; "" for unknown
	}{
		{VLLM, completion, `"prompt":"x","truncate_prompt_tokens":5`, ""},
		{VLLM, completion, `"prompt":"x","suffix":"y"`, ""},
		{VLLM, completion, `"prompt":"x","prompt_embeds":"AAAA"`, ""},
		{VLLM, completion, `"prompt_embeds":"AAAA"`, ""},
		{VLLM, completion, `"prompt":[5,6],"truncate_prompt_tokens":null`, "[[5 6]]"},
		{VLLM, completion, `"prompt":[5,6],"nvext":{"token_data":[1]}`, "[[5 6]]"},
		{VLLM, chat, `"truncate_prompt_tokens":5`, ""},
		{VLLM, chat, `"kv_transfer_params":{"prompt_token_ids":[7,8]}`, "[[7 8]]"},
		{SGLang, chat, `"input_ids":[7,8]`, "[[7 8]]"},
		{SGLang, completion, `"prompt":[[5],[6]]`, "[[5] [6]]"},
	} {
		m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: c.engine})
		if err != nil {
			t.Fatal(err)
		}
		request := completionRequest
		if c.kind == chat {
			request = func(t testing.TB, fields string) *body.Request {
				return chatRequest(t, `[{"role":"user","content":"x"}],`+fields)
			}
		}
		ids, err := m.Tokenize(t.Context(), request(t, c.fields))
		if c.want == "" && !IsUnknown(err) || c.want != "" && (err != nil || fmt.Sprint(idsOf(ids)) != c.want) {
			t.Errorf("%s %s: %s: got %v, %v; want %q", c.engine, c.kind, c.fields, ids, err, c.want)
		}
	}
	m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ids := range []string{`[]`, `[-1]`, `["a"]`, `[1.5]`} {
		got, err := m.Tokenize(
			t.Context(),
			chatRequest(t, `[{"role":"user","content":"x"}],"kv_transfer_params":{"prompt_token_ids":`+ids+`}`),
		)
		if err == nil || IsUnknown(err) {
			t.Errorf("%s: got %v, %v; vLLM refuses it", ids, got, err)
		}
	}
}
