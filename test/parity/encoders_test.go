package parity

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

var encoderChats = flag.Int("encoder-chats", 150, "chats that TestEncoders compares for each encoder and version")

// encoderCase is a model that an engine encodes without a Jinja template.
type encoderCase struct {
	engine       prompt.Engine
	architecture string
	modelType    string
	// asked is what engines.py wants for it: vLLM's tokenizer mode; nil for SGLang, which looks at the model.
	asked any
	// template is the folder's chat template; "" for none.
	template string
	// checkpoint is encoding/encoding_dsv4.py, in which SGLang looks for the wording of efforts; "" for no such file.
	checkpoint string
	// since and until are the first and the last of the engine's versions that encode so; "" for all.
	since, until string
}

var encoderCases = []encoderCase{
	{engine: prompt.VLLM, architecture: "DeepseekV32ForCausalLM", modelType: "deepseek_v32", asked: "deepseek_v32"},
	{engine: prompt.SGLang, architecture: "DeepseekV32ForCausalLM", modelType: "deepseek_v32"},
	{engine: prompt.VLLM, architecture: "DeepseekV4ForCausalLM", modelType: "deepseek_v4", asked: "deepseek_v4"},
	{engine: prompt.SGLang, architecture: "DeepseekV4ForCausalLM", modelType: "deepseek_v4", until: "0.5.22",
		checkpoint: "REASONING_EFFORT_MAX = (\n    \"x\"\n)\n"},
	{engine: prompt.SGLang, architecture: "DeepseekV4ForCausalLM", modelType: "deepseek_v4", until: "0.5.22",
		checkpoint: "REASONING_EFFORT_PROMPTS: Dict[str, str] = {\n    \"low\": \"\",\n    \"high\": (\n" +
			"        \"x\"\n    ),\n    'max': \"y\",\n}\nDEFAULT_REASONING_EFFORT = \"low\"\n"},
	{engine: prompt.SGLang, architecture: "GlmMoeDsaForCausalLM", modelType: "glm_moe_dsa", since: "0.5.23",
		template: glm53Words},
	{engine: prompt.SGLang, architecture: "Glm5NextForConditionalGeneration", modelType: "glm5_next",
		since: "0.5.23", template: glm53Words + "<|begin_of_image|>"},
	{engine: prompt.SGLang, architecture: "MiniMaxM3SparseForConditionalGeneration", modelType: "minimax_m3_vl",
		since: "0.5.23", template: m3Template},
}

// m3Template shows all that SGLang prepares for the template of MiniMax M3.
const m3Template = `{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.reasoning_content }}` +
	`{%- for c in m.tool_calls or [] %}<c>{{ c }}{% endfor %}{{ m.tool_call_id }}{% endfor -%}` +
	`{{ tools }}[{{ thinking_mode }}|{{ reasoning_effort }}|{{ thinking }}|{{ enable_thinking }}|{{ custom }}]`

// glm53Words are what SGLang looks for in a template of GLM-5.3, which it then does not use.
const glm53Words = "[gMASK]<sop>Reasoning Effort: <tool_call><arg_key><arg_value>"

// applies reports whether the case is one of a version's.
func (c encoderCase) applies(version string) bool {
	all := prompt.Versions(c.engine)
	at := slices.Index(all, version)
	return (c.since == "" || at >= slices.Index(all, c.since)) && (c.until == "" || at <= slices.Index(all, c.until))
}

// TestEncoders compares chats of models that engines encode with code of their own with that code, over each API. The
// chats are random: tools, tool calls, reasoning, parts, thinking switches, messages to continue.
func TestEncoders(t *testing.T) {
	chats := *encoderChats
	if testing.Short() {
		t.Log("make parity runs the engines' own encoders")
		return
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				compareEncoders(t, engine, version, chats)
			})
		}
	}
}

func compareEncoders(t *testing.T, engine prompt.Engine, version string, chats int) {
	const folder = "../../test/models/tiny-sentencepiece" // its prompts begin with a special token
	type question struct {
		Body      json.RawMessage `json:"body"`
		Messages  bool            `json:"messages"`
		Responses bool            `json:"responses"`
		Encoder   any             `json:"encoder"`
		Template  *string         `json:"template,omitempty"`
		Defaults  json.RawMessage `json:"defaults,omitempty"`
		name      string
		path      string
		model     *prompt.Model
	}
	var questions []any
	for _, c := range encoderCases {
		if c.engine != engine || !c.applies(version) {
			continue
		}
		loaded := encoderFolder(t, folder, c)
		m, err := prompt.Load(loaded, prompt.Options{Engine: engine, Version: version})
		if err != nil {
			t.Fatal(err)
		}
		const defaults = `{"thinking":true,"reasoning_effort":"max"}`
		preset, err := prompt.Load(loaded, prompt.Options{Engine: engine, Version: version,
			DefaultChatTemplateKwargs: defaults})
		if err != nil {
			t.Fatal(err)
		}
		asked := c.asked
		if asked == nil {
			asked = []string{c.architecture, c.modelType, loaded}
		}
		g := &chatGenerator{Rand: rand.New(rand.NewPCG(21, 5)), engine: engine}
		for i := range chats {
			q := question{Encoder: asked, model: m, path: "/v1/chat/completions", name: m.ChatEncoder()}
			if q.name == "" {
				q.name = c.architecture
			}
			if c.template != "" {
				q.Template = &c.template
			}
			if i%4 == 3 {
				q.model, q.Defaults = preset, json.RawMessage(defaults)
			}
			var payload map[string]any
			switch {
			case i%7 == 5:
				q.Messages, q.path, payload = true, "/v1/messages", g.messages()
			case i%7 == 6:
				q.Responses, q.path, payload = true, "/v1/responses", g.responses()
			default:
				payload = g.chat()
			}
			if q.Body, err = json.Marshal(payload); err != nil {
				t.Fatal(err)
			}
			questions = append(questions, q)
		}
	}
	type result struct{ equal, refused, unknown, wrong int }
	results := map[string]*result{}
	for i, response := range engineResults[rendered](t, engine, version, folder, questions) {
		q, _ := questions[i].(question)
		name := q.name + q.path
		r := results[name]
		if r == nil {
			r = &result{}
			results[name] = r
		}
		if response.Error != "" {
			r.refused++
			continue
		}
		request, err := body.ParseRequest(q.path, q.Body)
		if err != nil {
			t.Errorf("%s: %v", q.Body, err)
			continue
		}
		prompts, err := q.model.Prompts(t.Context(), request)
		switch {
		case err != nil && prompt.IsUnknown(err):
			r.unknown++
		case err != nil || engine == prompt.VLLM && prompts[0].Text != response.Text ||
			!slices.Equal(prompts[0].IDs, response.IDs):
			if r.wrong++; r.wrong <= 5 {
				t.Errorf("%s: %s\n got %+v, %v\nwant %q", name, q.Body, prompts, err, response.Text)
			}
		default:
			r.equal++
		}
	}
	for name, r := range results {
		t.Logf("%s %s, %s: %d equal, %d refused by the engine, %d not known here, %d differ",
			engine, version, name, r.equal, r.refused, r.unknown, r.wrong)
		if r.wrong > 0 || r.equal < r.unknown/4 || r.equal < r.refused/4 || r.equal == 0 {
			t.Errorf("%s: differences, or too few results are equal for a conclusion", name)
		}
		count(r.equal+r.wrong, 0, r.wrong)
	}
}

// encoderFolder returns a folder with the tokenizer of another, and with the configuration of a case.
func encoderFolder(t *testing.T, of string, c encoderCase) string {
	t.Helper()
	folder := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		raw, err := os.ReadFile(filepath.Join(of, name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "tokenizer_config.json" {
			var config map[string]any
			if err := json.Unmarshal(raw, &config); err != nil {
				t.Fatal(err)
			}
			delete(config, "chat_template")
			if raw, err = json.Marshal(config); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(folder, name), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if c.template != "" {
		path := filepath.Join(folder, "chat_template.jinja")
		if err := os.WriteFile(path, []byte(c.template), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if c.checkpoint != "" {
		if err := os.Mkdir(filepath.Join(folder, "encoding"), 0o755); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folder, "encoding", "encoding_dsv4.py")
		if err := os.WriteFile(path, []byte(c.checkpoint), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	config := fmt.Sprintf(`{"architectures":[%q],"model_type":%q}`, c.architecture, c.modelType)
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return folder
}
