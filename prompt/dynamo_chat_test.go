package prompt

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
)

// dynamoModel loads a model with a template for Dynamo's frontend. Package e2e compares with the frontend.
func dynamoModel(t testing.TB, template string) *Model {
	t.Helper()
	m, err := Load(
		copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": template}),
		Options{Engine: Dynamo},
	)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const (
	strictTemplate = `{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'system' and not ` +
		`loop.first %}{{ raise_exception('late') }}{% endif %}{% if m.role == 'user' and ns.last == 'user' %}{{ ` +
		`raise_exception('twice') }}{% endif %}{% set ns.last = m.role %}{{ m }}{% endfor %}`
	callsTemplate = `{% for m in messages %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}{{ ` +
		`c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}`
	thinksTemplate = `{% for m in messages %}{{ m.role }}:{% if m.reasoning_content is string %}<{{ ` +
		`m.reasoning_content }}>{% endif %}{{ m.content }};{% endfor %}`
)

func TestDynamoFitsMessages(t *testing.T) {
	call := `{"role":"assistant","content":null,"tool_calls":[{"type":"function","id":"1","x":1,` +
		`"function":{"arguments":"{\"b\": 1.0, \"a\":[]}","name":"f"}}]}`
	for _, c := range []struct{ template, messages, want string }{
		{`{{ messages }}`, `[{"content":"x","role":"user","name":null,"other":1}]`,
			`[{"role": "user", "content": "x"}]`},
		{`{{ messages }}`, `[{"role":"assistant","content":"x","reasoning":"r","name":"n","tool_calls":[]}]`,
			`[{"role": "assistant", "content": "<think>r</think>x", "tool_calls": [], "name": "n"}]`},
		{`{{ messages }}`, `[{"role":"assistant","content":null,"reasoning_content":["a","","b"]}]`,
			`[{"role": "assistant", "content": "<think>a</think><think>b</think>"}]`},
		{`{{ messages }}`, "[" + call + "]",
			`[{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", ` +
				`"arguments": {"b": 1.0, "a": []}}}]}]`},
		{`{{ messages }}`, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},` +
			`{"role":"user","content":[]}]`,
			`[{"role": "user", "content": "a\nb"}, {"role": "user", "content": []}]`},
		{`{% for m in messages %}{% if m.content is not string %}{{ m.content }}{% endif %}{% endfor %}`,
			`[{"role":"user","content":"a"}]`, `[{"type": "text", "text": "a"}]`},
		{strictTemplate, `[{"role":"system","content":"a"},{"role":"system","content":"b"},{"role":"user",` +
			`"content":"c"},{"role":"system","content":"d"},{"role":"user","content":[{"type":"text","text":"e"}]}]`,
			`{"role": "system", "content": "a\n\nb"}{"role": "user", "content": "c\n\nd\ne"}`},
		{callsTemplate, "[" + call + "]", `{"b": 1.0, "a":[]}`},
		{callsTemplate, `[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":{"b":1.0,` +
			`"a":["é",1e-7]}}}]}]`, `{"b":1.0,"a":["é",1e-7]}`},
		{`{{ messages[0].tool_calls[0].function.arguments | tojson }}`, "[" + call + "]", `{"b": 1.0, "a": []}`},
		{thinksTemplate, `[{"role":"assistant","content":"x","reasoning_content":["a","","b"]}]`, "assistant:<a\nb>x;"},
		{`{{ bos_token }}{{ tools }}{{ add_generation_prompt }}{{ k }}`,
			`[{"role":"user","content":"x"}],"chat_template_args":{"k":[1,null],"bos_token":"b","tools":[]}`,
			"NoneNoneTrue[1, None]"},
		{`{{ tools }}`, `[{"role":"user","content":"x"}],"tools":[{"function":{"x":1,"parameters":{},"name":"f"},` +
			`"type":"function"}],"tool_choice":"auto"`,
			`[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}, ` +
				`"description": ""}}]`},
		{`{{ tools }}`, `[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],` +
			`"tool_choice":"none"`, "None"},
		{`{{ enable_thinking }}{{ thinking }}{{ thinking_mode }}{{ reasoning_effort }}`,
			`[{"role":"user","content":"x"}],"reasoning_effort":"none"`, "FalseFalsedisablednone"},
		{`{{ enable_thinking }}{{ thinking }}{{ thinking_mode }}`,
			`[{"role":"user","content":"x"}],"thinking":{"type":"enabled"},` +
				`"chat_template_kwargs":{"enable_thinking":false}`, "TrueTrueenabled"},
		{`{{ enable_thinking }}{{ thinking_mode }}`,
			`[{"role":"user","content":"x"}],"chat_template_kwargs":{"thinking_mode":"adaptive"},` +
				`"reasoning_effort":"low"`, "adaptive"},
		{`{{ messages[0].content }}`, `[{"role":"user","content":"a\u0000b"}]`, "ab"},
		{`[{{ messages[0].content }}]`, `[{"role":"user","content":"a "}],"add_generation_prompt":false,` +
			`"continue_final_message":true`, "[a "},
		{`[{{ messages[0].content | trim }}]`,
			`[{"role":"user","content":"a "}],"add_generation_prompt":false,"continue_final_message":true`, "[a"},
	} {
		got, err := dynamoModel(t, c.template).renderDynamo(t.Context(), chatRequest(t, c.messages))
		if err != nil || got != c.want {
			t.Errorf("%s\n%s\n got %q, %v\nwant %q", c.template, c.messages, got, err, c.want)
		}
	}
}

func TestDynamoDeclines(t *testing.T) {
	user := `[{"role":"user","content":"x"}]`
	for _, c := range []struct{ template, messages, want string }{
		{"x", `[{"role":"user","content":null}]`, "refuses content"},
		{"x", `[{"role":"robot","content":"x"}]`, `the role "robot"`},
		{"x", `[{"role":"tool","content":"x"}]`, "without tool_call_id"},
		{"x", `[{"role":"system","content":"x","tools":[]}]`, "refuses 'tools'"},
		{"x", `[{"role":"user","content":"x","name":1}]`, "not a string"},
		{"x", `[{"role":"assistant","content":"x","reasoning":1}]`, "refuses reasoning"},
		{"x", `[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":7}}]}]`,
			"refuses arguments"},
		{"x", `[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\"n\": ` +
			`0.12345678901234567}"}}]}]`, "more than 15 digits"},
		{"x", user + `,"tools":[{"type":"function","function":{"name":"f",` +
			`"parameters":{"n":123456789012345678901234567890}}}]`, "more than 64 bits"},
		{"x", user + `,"tools":[{"type":"custom"}]`, "refuses a tool"},
		{"x", user + `,"documents":[{}]`, "refuses chat_template and documents"},
		{"x", user + `,"reasoning_effort":"extreme"`, "refuses this reasoning_effort"},
		{"x", user + `,"thinking":"maybe"`, "this 'thinking'"},
		{"x", user + `,"chat_template_kwargs":{"enable_thinking":"yes"}`, "enable_thinking of yes"},
		{"x", user + `,"chat_template_kwargs":{"chat_template":"x"}`, "refuses a chat_template"},
		{"{{ loop }}{% for m in messages %}{{ loop }}{% endfor %}", user, "not reproduced"},
		{"{% raw %}x{% endraw %}", user, "a raw block"},
		{"<minimax:tool_call>", user, "that Dynamo's frontend rewrites"},
		{"{{ 'a' < 1 }}", user, "not reproduced"},
	} {
		got, err := dynamoModel(t, c.template).renderDynamo(t.Context(), chatRequest(t, c.messages))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s\n%s\n got %q, %v\nwant ...%s...", c.template, c.messages, got, err, c.want)
		}
	}
	request, err := body.ParseRequest("/v1/responses", []byte(`{"model":"m","input":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: TRTLLM})
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := m.Tokenize(t.Context(), request); !IsUnknown(err) {
		t.Errorf("TensorRT-LLM's /v1/responses: got %v, %v", ids, err)
	}
}

// FuzzDynamo renders any request with templates that read every field. It may return an error, but not panic.
func FuzzDynamo(f *testing.F) {
	printing, err := os.ReadFile(filepath.Join("..", "e2e", "testdata", "dynamo", "printing.jinja"))
	if err != nil {
		f.Fatal(err)
	}
	models := []*Model{dynamoModel(f, string(printing)), dynamoModel(f, strictTemplate), dynamoModel(f, thinksTemplate)}
	for _, seed := range []string{
		`{"model":"m","messages":[{"role":"assistant","content":null,"reasoning":["a"],"tool_calls":[{"id":"1",` +
			`"function":{"name":"f","arguments":"{}"}}]}],"tools":[{"type":"function","function":{"name":"f"}}],` +
			`"thinking":true}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":""}]}],` +
			`"continue_final_message":true,"add_generation_prompt":false}`,
		`{"model":"m","input":[{"type":"reasoning"},{"id":"x"}]}`,
		`{"model":"m","messages":[{"role":"user","content":[]}],"system":""}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		for _, path := range []string{"/v1/chat/completions", "/v1/responses", "/v1/messages"} {
			request, err := body.ParseRequest(path, []byte(payload))
			if err != nil {
				continue
			}
			for _, m := range models {
				first, err := m.renderDynamo(t.Context(), request)
				if again, errAgain := m.renderDynamo(t.Context(), request); again != first ||
					(err == nil) != (errAgain == nil) {
					t.Fatalf("%q: %q, %v; then %q, %v", payload, first, err, again, errAgain)
				}
				if errors.Is(err, jinja.ErrLimit) {
					t.Logf("%q: %v", payload, err)
				}
			}
		}
	})
}
