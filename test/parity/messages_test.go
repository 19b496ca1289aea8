package parity

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// anthropicTurns are messages for Anthropic's API.
var anthropicTurns = []string{
	`{"role":"user","content":"Hello"}`,
	`{"role":"user","content":""}`,
	`{"role":"user","content":[]}`,
	`{"role":"assistant","content":[]}`,
	`{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":""},{"type":"text","text":"two"}]}`,
	`{"role":"user","content":[{"type":"text","text":"alone","cache_control":{"type":"ephemeral"}}]}`,
	`{"role":"assistant","content":"Hi"}`,
	`{"role":"assistant","content":[{"type":"thinking","thinking":"I think","signature":"s"},{"type":"text",` +
		`"text":"so"},{"type":"thinking","thinking":" more"}]}`,
	`{"role":"assistant","content":[{"type":"redacted_thinking","data":"x"},{"type":"tool_use","id":"t1","name":"f",` +
		`"input":{"b":1.0,"a":["é",null,{"c":1e-7}]}}]}`,
	`{"role":"assistant","content":[{"type":"text","text":"Let me see."},{"type":"tool_use","id":"t2","name":"g",` +
		`"input":{}},{"type":"tool_use","id":"t3","name":"h"}]}`,
	`{"role":"assistant","content":[{"type":"tool_result","tool_use_id":"t1","content":"odd"},{"type":"text",` +
		`"text":"x"}]}`,
	`{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"sunny"},{"type":"text",` +
		`"text":"and?"}]}`,
	`{"role":"user","content":[{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":"a"},` +
		`{"type":"text","text":"b"}],"is_error":true},{"type":"tool_result","tool_use_id":"t3"}]}`,
	`{"role":"user","content":[{"type":"text","text":"before"},{"type":"tool_result","content":[]}]}`,
	`{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},` +
		`{"type":"text","text":"what?"}]}`,
	`{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"see"},` +
		`{"type":"image","source":{"type":"url","url":"http://h/i"}}]}]}`,
	`{"role":"system","content":"In the middle."}`,
	`{"role":"system","content":"x-anthropic-billing-header: 1\nlost"}`,
	`{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text",` +
		`"text":"kept"}]}`,
	`{"role":"robot","content":"x"}`,
	`{"role":"user","content":[{"type":"unknown"}]}`,
}

// anthropicFields are further fields.
var anthropicFields = []string{
	`"system":"Be brief."`,
	`"system":"x-anthropic-billing-header: 1\nBe brief."`,
	`"system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"Be brief."},` +
		`{"type":"text","text":"And kind."}]`,
	`"system":""`,
	`"thinking":{"type":"disabled"}`,
	`"thinking":{"type":"enabled","budget_tokens":1024}`,
	`"thinking":{"type":"adaptive"}`,
	`"output_config":{"effort":"high"}`,
	`"tools":[{"name":"f","description":"d","input_schema":{"properties":{"x":{"type":"integer"}}}},{"name":"g",` +
		`"input_schema":{"type":"object"},"strict":true}]`,
	`"tools":[{"name":"f","input_schema":{"type":"object"},"defer_loading":true}]`,
	`"tool_choice":{"type":"none"}`,
	`"tool_choice":{"type":"any"}`,
	`"chat_template_kwargs":{"enable_thinking":false,"custom":[1,"x"]}`,
	`"chat_template_kwargs":{"reasoning_effort":"low"}`,
	`"cache_salt":"s"`,
}

// The templates with which vLLM probes late system messages and efforts.
var messagesTemplates = []string{
	`{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('late') }}{%- endif ` +
		`-%}<|im_start|>{{ m }}{%- endfor -%}{{ tools }} {{ reasoning_effort }} {{ enable_thinking }}`,
	`{%- for m in messages -%}<|im_start|>{{ m }}{%- endfor -%}{{ tools }} {{ reasoning_effort if reasoning_effort ` +
		`in ['low', 'high'] else 'high' }} {% if strftime_now is defined %}now{% endif %}`,
	`{%- if reasoning_effort == 'none' -%}{{ raise_exception('none') }}{%- endif -%}{%- for m in messages ` +
		`-%}<|im_start|>{{ m.role }}{{ m.content }}{{ m.reasoning }}{%- endfor -%}{{ reasoning_effort }}`,
	`{%- for m in messages -%}<|im_start|>{{ m.role }}{{ m.content }}{%- endfor -%}<|im_start|>assistant{% if ` +
		`enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}`,
	`{%- for m in messages -%}<|im_start|>{{ m.role }}{%- if m.content is not string -%}{% for part in m.content ` +
		`%}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}{%- endif -%}{% ` +
		`generation %}{% endgeneration %}{%- endfor -%}`,
}

// gptOSSTemplate is a template of gpt-oss, which SGLang uses for all APIs but Responses.
const gptOSSTemplate = `{%- if messages[0].role == 'system' -%}{%- set text = messages[0].content -%}` +
	`{%- set rest = messages[1:] -%}{%- else -%}{%- set rest = messages -%}{%- endif -%}` +
	`<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|><|start|>developer<|message|>` +
	`{{ text }}{{ tools }}<|end|>{%- for m in rest -%}<|start|>{{ m.role }}{%- if m.thinking -%}<|channel|>analysis` +
	`{{ m.thinking }}{%- endif -%}<|message|>{{ m.content }}{{ m.tool_calls }}<|end|>{%- endfor -%}<|start|>assistant`

// responsesItems are input items for OpenAI's responses.
var responsesItems = []string{
	`{"role":"user","content":"Hello"}`,
	`{"type":"message","role":"user","content":[{"type":"input_text","text":"one"},{"type":"input_text","text":""},` +
		`{"type":"input_text","text":"two"}]}`,
	`{"role":"user","content":[]}`,
	`{"role":"user","content":""}`,
	`{"role":"system","content":"Be brief."}`,
	`{"role":"developer","content":[{"type":"input_text","text":"And kind."}]}`,
	`{"role":"assistant","content":"Hi"}`,
	`{"type":"message","role":"assistant","content":"Hi there"}`,
	`{"type":"message","role":"assistant","content":[{"type":"output_text","text":"a"},{"type":"output_text",` +
		`"text":"b","annotations":[]}]}`,
	`{"type":"message","id":"m1","status":"completed","role":"assistant","content":[{"type":"output_text","text":"c",` +
		`"annotations":[],"logprobs":[]}]}`,
	`{"type":"reasoning","id":"r1","summary":[{"type":"summary_text","text":"in short"}]}`,
	`{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"I think"},{"type":"reasoning_text",` +
		`"text":"more"}]}`,
	`{"type":"reasoning","id":"r2","summary":[],"content":null,"status":"completed"}`,
	`{"type":"function_call","call_id":"c1","name":"f","arguments":"{\"a\": [1, 2.0, null]}"}`,
	`{"type":"function_call","id":"fc_2","call_id":"c2","name":"g","arguments":"","status":"completed"}`,
	`{"type":"function_call_output","call_id":"c1","output":"sunny"}`,
	`{"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"p"}]}`,
	`{"role":"assistant","content":[{"type":"output_text","text":"untyped"}]}`,
	`{"type":"message","role":"assistant","content":[{"type":"refusal","refusal":"no"}]}`,
	`{"type":"message","role":"user","content":[{"type":"input_image","image_url":"http://h/i"}]}`,
	`{"type":"message","role":"assistant","content":"The answer is","status":"in_progress"}`,
	`{"type":"web_search_call","id":"w","status":"completed"}`,
	`{"role":"robot","content":"x"}`,
}

// responsesFields are further fields.
var responsesFields = []string{
	`"instructions":"Be brief."`,
	`"instructions":""`,
	`"reasoning":{"effort":"high"}`,
	`"reasoning":{"effort":"none"}`,
	`"reasoning":{"summary":"auto"}`,
	`"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object","properties":{"x":{}}},` +
		`"strict":true},{"type":"function","name":"g","parameters":null,"strict":null}]`,
	`"tools":[{"type":"function","name":"f","parameters":{}}]`,
	`"tools":[]`,
	`"tools":[{"type":"web_search"}]`,
	`"tool_choice":"none"`,
	`"tool_choice":"auto"`,
	`"chat_template_kwargs":{"enable_thinking":false,"custom":[1,"x"]}`,
	`"truncation":"auto"`,
	`"truncation":"disabled"`,
	`"cache_salt":"s"`,
	`"store":false`,
}

// sglangFields and sglangItems are fields and items that only SGLang reads.
var (
	sglangFields = []string{
		`"tools":[{"type":"web_search_20250305","name":"web_search"},{"type":"custom","name":"f",` +
			`"input_schema":{"b":1},"defer_loading":false}],"tool_choice":{"type":"tool","name":"f"}`,
		`"tools":[{"type":"bash_20250124","name":"bash"}],"tool_choice":{"type":"auto"}`,
		`"system":"  "`,
		`"system":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"b"}]`,
		`"output_config":{"effort":"xhigh"}`,
		`"tools":[{"strict":true,"input_schema":{"b":1,"a":2},"name":"f"},{"name":"g","input_schema":{},` +
			`"strict":false,"description":"d"}]`,
		`"output_config":{"format":{"type":"json_schema","schema":{"type":"object"}}}`,
		`"tool_choice":{"type":"auto","disable_parallel_tool_use":true}`,
	}
	sglangItems = []string{
		`{"role":"user","content":[{"type":"tool_result","id":"t9","content":""},{"type":"text","text":"a"},` +
			`{"type":"text","text":"b"},{"type":"tool_result","tool_use_id":"t1","content":"mid"}]}`,
		`{"role":"assistant","content":[{"type":"thinking","thinking":""},{"type":"text","text":"so"}]}`,
		`{"role":"system","content":[{"type":"text","text":" padded "},{"type":"text","text":" "},{"type":"text",` +
			`"text":"x"}]}`,
	}
	sglangResponses = []string{
		`{"role":"assistant","content":[{"type":"output_text","text":"x"}],"phase":"commentary"}`,
		`{"role":"assistant","content":"y","phase":"final_answer"}`,
		`{"type":"message","role":"developer","content":"Be short."}`,
		`{"type":"message","role":"system","content":[{"type":"input_text","text":"p"},{"type":"input_text",` +
			`"text":"q"}]}`,
		`{"role":"developer","content":[]}`,
		`{"role":"system","content":""}`,
		`{"role":"developer","content":[{"type":"input_text","text":"u"},{"type":"input_text","text":"v"}],` +
			`"phase":"commentary"}`,
		`{"role":"assistant","content":"z","phase":"commentary"}`,
		`{"type":"function_call","call_id":"c6","name":"f","arguments":"{}","namespace":"n"}`,
		`{"type":"function_call","call_id":"c3","name":"f","arguments":"[1]"}`,
		`{"type":"function_call","call_id":"c4","name":"f","arguments":"{\"a\": NaN}"}`,
		`{"type":"function_call","call_id":"c5","name":"f","arguments":"{\"big\": 123456789012345678901234567890}"}`,
		`{"type":"reasoning","id":"r9","summary":[{"type":"summary_text","text":"a"},{"type":"summary_text",` +
			`"text":"b"}],"content":[{"type":"reasoning_text","text":"c"}]}`,
		`{"type":"reasoning","id":"r8","summary":[],` +
			`"encrypted_content":"sglang-reasoning-v1.eJwrSEzOTk1ROLwHABJjBAg="}`,
		`{"type":"reasoning","id":"r7","summary":[],"encrypted_content":"sglang-reasoning-v1.AAAA"}`,
		`{"type":"function_call_output","call_id":"c3","output":[{"type":"input_text","text":"p"},` +
			`{"type":"input_text","text":"q"}]}`,
	}
	sglangMore = []string{
		`"tools":[{"name":"f","strict":true,"type":"function","defer_loading":true},{"type":"web_search"}]`,
		`"tools":[{"type":"function","name":"f"},{"type":"shell"}]`,
		`"tools":[{"type":"function","parameters":{"b":1},"name":"f"},{"type":"namespace","name":"n","tools":[]}]`,
		`"reasoning":{"effort":"ultra"}`,
		`"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":true},` +
			`{"type":"function","name":"g"},{"type":"web_search"}]`,
		`"tools":[{"type":"function","name":"f"},{"type":"function","name":"g"}],"tool_choice":{"type":"function",` +
			`"name":"g"}`,
		`"tools":[{"type":"function","name":"f"}],"tool_choice":"required"`,
		`"chat_template_kwargs":{"reasoning_effort":"low","enable_thinking":true},"reasoning":{"effort":"none"}`,
		`"reasoning":{}`,
	}
)

// TestAnthropicMessages compares kvepp's prompts of Anthropic's messages on vLLM and SGLang with the engines' own code.
func TestAnthropicMessages(t *testing.T) {
	folder := mediaFolder(t, "LlavaForConditionalGeneration", []string{"<image>"})
	compareAPI(t, prompt.VLLM, "messages", "messages", folder, anthropicTurns, anthropicFields)
	compareAPI(
		t,
		prompt.SGLang,
		"messages",
		"messages",
		"../../test/models/tiny-bytelevel",
		slices.Concat(
			anthropicTurns[:1],
			sglangItems,
			anthropicTurns[1:],
		),
		slices.Concat(sglangFields, anthropicFields),
	)
}

// TestResponses compares the prompts of OpenAI's responses.
func TestResponses(t *testing.T) {
	const folder = "../../test/models/tiny-sentencepiece" // its prompts begin with a special token
	compareAPI(t, prompt.VLLM, "responses", "input", folder, responsesItems, responsesFields)
	compareAPI(
		t,
		prompt.SGLang,
		"responses",
		"input",
		folder,
		slices.Concat(
			responsesItems[:1],
			sglangResponses,
			responsesItems[1:],
		),
		slices.Concat(sglangMore, responsesFields),
	)
}

// compareAPI generates requests to an API, from items for the field list and from further fields, and compares the
// prompts with an engine's.
func compareAPI(t *testing.T, engine prompt.Engine, api, list, folder string, items, more []string) {
	if testing.Short() {
		t.Log("make test-long runs the engine's own code")
		return
	}
	for _, version := range compared(t, engine) {
		t.Run(string(engine)+"/"+version, func(t *testing.T) {
			t.Parallel()
			compareAPIVersion(t, engine, version, api, list, folder, items, more)
		})
	}
}

func compareAPIVersion(
	t *testing.T,
	engine prompt.Engine,
	version, api, list, folder string,
	items, more []string,
) {
	paths, err := filepath.Glob("../../prompt/testdata/templates/*.jinja")
	if err != nil {
		t.Fatal(err)
	}
	sources := slices.Clone(messagesTemplates)
	for _, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		sources = append(sources, string(source))
	}
	sources = append(sources, namespacedTemplate)
	if engine == prompt.SGLang && api == "messages" {
		sources = append(sources, gptOSSTemplate)
	}
	random := rand.New(rand.NewPCG(7, 7))
	pick := func(from []string, n int) []string {
		var chosen []string
		for range n {
			chosen = append(chosen, from[random.IntN(len(from))])
		}
		return chosen
	}
	var bodies []json.RawMessage
	payload := func(turns []string, fields ...string) {
		fields = append(
			[]string{`"model":"m"`, `"max_tokens":4096`, `"` + list + `":[` + strings.Join(turns, ",") + `]`},
			fields...)
		bodies = append(bodies, json.RawMessage("{"+strings.Join(fields, ",")+"}"))
	}
	for _, turn := range items {
		payload([]string{items[0], turn}, more[0])
	}
	for _, field := range more {
		payload(items[:1], field)
	}
	for range atLeast(60, len(sources)) {
		fields := pick(more, random.IntN(4))
		names := map[string]bool{}
		fields = slices.DeleteFunc(fields, func(field string) bool {
			name, _, _ := strings.Cut(field, ":")
			twice := names[name]
			names[name] = true
			return twice
		})
		payload(pick(items[:len(items)-2], 1+random.IntN(5)), fields...)
	}
	type question struct {
		Template  string          `json:"template"`
		Body      json.RawMessage `json:"body"`
		Messages  bool            `json:"messages"`
		Responses bool            `json:"responses"`
		// An architecture that takes images.
		Architecture string `json:"architecture,omitempty"`
		// ReasoningParser is SGLang's flag.
		ReasoningParser string `json:"reasoning_parser,omitempty"`
		GptOSS          bool   `json:"gpt_oss,omitempty"`
		model           *prompt.Model
	}
	var questions []any
	architecture := ""
	if engine == prompt.VLLM {
		architecture = "LlavaForConditionalGeneration"
	}
	for i, source := range sources {
		path := filepath.Join(t.TempDir(), "template.jinja")
		if err := os.WriteFile(path, []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
		folder := folder
		if source == gptOSSTemplate {
			folder = gptOSS(t, folder)
		}
		m, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version, ChatTemplate: path})
		if err != nil {
			t.Fatal(i, err)
		}
		for i, payload := range bodies {
			q := question{
				Template:     source,
				Body:         payload,
				Messages:     api == "messages",
				Responses:    api == "responses",
				Architecture: architecture,
				model:        m,
			}
			q.GptOSS = source == gptOSSTemplate
			if engine == prompt.SGLang && i%3 > 0 { // kvepp does not know it
				q.ReasoningParser = "qwen3"
				if q.GptOSS {
					q.ReasoningParser = "gpt-oss"
				}
			}
			questions = append(questions, q)
		}
	}
	equal, refused, unknown, wrong := 0, 0, 0, 0
	for i, response := range engineResults[rendered](t, engine, version, folder, questions) {
		q, _ := questions[i].(question)
		if response.Error != "" {
			refused++
			continue
		}
		request, err := body.ParseRequest("/v1/"+api, q.Body)
		if err != nil {
			t.Errorf("%s: %v", q.Body, err)
			continue
		}
		prompts, err := q.model.Prompts(t.Context(), request)
		switch {
		case err != nil && prompt.IsUnknown(err):
			unknown++
		case err != nil || engine == prompt.VLLM && prompts[0].Text != response.Text ||
			!slices.Equal(prompts[0].IDs, response.IDs):
			wrong++
			t.Errorf("%s\nwith %.60s\n got %+v, %v\nwant %q", q.Body, q.Template, prompts, err, response.Text)
		default:
			equal++
		}
	}
	if equal < 300 || unknown > equal {
		t.Error("too few results are equal for a conclusion")
	}
	t.Logf(
		"%s %s: %d equal, %d refused by the engine, %d not known here, %d differ",
		engine,
		version,
		equal,
		refused,
		unknown,
		wrong,
	)
	count(equal+wrong, 0, wrong)
}
