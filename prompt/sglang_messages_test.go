package prompt

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	"kvepp/prompt/body"
)

const sglangPrints = `{% for m in messages %}{{ m }}{% endfor %}{% if tools %}{{ tools }}{% endif %}{{ ` +
	`reasoning_effort }}`

// sglangAPI loads a model for SGLang and parses a request to an API.
func sglangAPI(t *testing.T, template, api, fields string) (*Model, *body.Request) {
	t.Helper()
	m, err := Load(
		copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": template}),
		Options{Engine: SGLang, Version: "0.5.21"},
	)
	if err != nil {
		t.Fatal(err)
	}
	request, err := body.ParseRequest("/v1/"+api, []byte(`{"model":"m","max_tokens":9,`+fields+`}`))
	if err != nil {
		t.Fatal(err)
	}
	return m, request
}

// TestSGLangMessages renders requests to Anthropic's Messages and OpenAI's Responses. Package parity compares with
// SGLang.
func TestSGLangMessages(t *testing.T) {
	const (
		strict = `{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') ` +
			`}}{% endif %}{{ m }}{% endfor %}`
		toggles = `{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if enable_thinking is ` +
			`defined and not enable_thinking }}`
	)
	for _, c := range []struct{ api, template, fields, want string }{
		{"messages", sglangPrints, `"system":"s","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]`,
			`{'role': 'system', 'content': 's'}{'role': 'user', 'content': 'x'}`},
		{"messages", sglangPrints, `"messages":[{"role":"assistant","content":[{"type":"text","text":"t"},` +
			`{"type":"tool_use","id":"1","name":"f","input":{"a":1}}]},{"role":"user","content":"u"}]`,
			`{'role': 'assistant', 'content': 't', 'tool_calls': [{'id': '1', 'index': None, 'type': 'function', ` +
				`'function': {'name': 'f', 'arguments': {'a': 1}}}]}{'role': 'user', 'content': 'u'}`},
		{"messages", sglangPrints, `"messages":[{"role":"user","content":[{"type":"text","text":"a"},` +
			`{"type":"tool_result","tool_use_id":"1","content":"r"},{"type":"text","text":"b"}]}]`,
			`{'role': 'user', 'content': 'a'}{'role': 'tool', 'content': 'r', 'tool_call_id': '1'}{'role': 'user', ` +
				`'content': 'b'}`},
		{"messages", sglangPrints, `"system":"s","messages":[{"role":"user","content":"u"},{"role":"system",` +
			`"content":" late "}]`,
			`{'role': 'system', 'content': 's'}{'role': 'user', 'content': 'u'}{'role': 'system', 'content': ' late ` +
				`'}`},
		{"messages", strict, `"system":"s","messages":[{"role":"user","content":"u"},{"role":"system","content":" ` +
			`late "}]`, `{'role': 'system', 'content': 's\nlate'}{'role': 'user', 'content': 'u'}`},
		{"messages", toggles, `"messages":[{"role":"user","content":"u"}],"thinking":{"type":"enabled",` +
			`"budget_tokens":1024}`, `u`},
		{"messages", sglangPrints, `"messages":[{"role":"user","content":"u"}],"output_config":{"effort":"xhigh"}`,
			`{'role': 'user', 'content': 'u'}max`},
		{"responses", sglangPrints, `"input":"x","instructions":"i"`,
			`{'role': 'system', 'content': 'i'}{'role': 'user', 'content': 'x'}`},
		{"responses", sglangPrints, `"input":[{"role":"developer","content":"d"},{"role":"user","content":"u"}],` +
			`"reasoning":{}`,
			`{'role': 'system', 'content': 'Developer instructions:\nd'}{'role': 'user', 'content': 'u'}medium`},
		{"responses", sglangPrints, `"input":[{"type":"reasoning","summary":[{"type":"summary_text","text":"t"}]},` +
			`{"type":"function_call","call_id":"1","name":"f","arguments":"{\"a\":1}"},{"type":"function_call",` +
			`"call_id":"2","name":"g","arguments":"?"},{"type":"function_call_output","call_id":"1","output":"r"}]`,
			`{'role': 'assistant', 'content': '', 'reasoning_content': 't', 'tool_calls': [{'id': '1', 'index': None,` +
				` 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}, ` +
				`{'id': '2', 'index': None, 'type': 'function', 'function': {'name': 'g', 'arguments': ` +
				`{}}}]}{'role': 'tool', 'content': 'r', 'tool_call_id': '1'}`},
		{"responses", sglangPrints, `"input":[{"type":"reasoning","summary":[],` +
			`"encrypted_content":"sglang-reasoning-v1.eJwrSEzOTk1ROLwHABJjBAg="},{"type":"reasoning","summary":[],` +
			`"encrypted_content":"another's"},{"role":"user","content":"u"}]`,
			`{'role': 'assistant', 'content': '', 'reasoning_content': 'packed ü'}{'role': 'user', 'content': 'u'}`},
		{"responses", sglangPrints, `"input":"x","tools":[{"type":"function","name":"f"},{"type":"web_search"}]`,
			`{'role': 'user', 'content': 'x'}[{'type': 'function', 'function': {'description': None, 'name': 'f', ` +
				`'parameters': None, 'strict': False}, 'defer_loading': None}]`},
	} {
		m, request := sglangAPI(t, c.template, c.api, c.fields)
		prompts, err := m.Prompts(t.Context(), request)
		if err != nil || prompts[0].Text != c.want {
			t.Errorf("%s\n got %+v, %v\nwant %q", c.fields, prompts, err, c.want)
		}
	}
}

// TestSGLangPackedReasoning unpacks at most maxUnpacked bytes.
func TestSGLangPackedReasoning(t *testing.T) {
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	_, err := w.Write(bytes.Repeat([]byte("think "), maxUnpacked/12)) // half of maxUnpacked
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	item := `{"type":"reasoning","summary":[],"encrypted_content":"sglang-reasoning-v1.` +
		base64.URLEncoding.EncodeToString(
			packed.Bytes(),
		) + `"}`
	for count, known := range map[int]bool{2: true, 3: false} {
		m, request := sglangAPI(
			t,
			`{% for m in messages %}{{ m.role }}{% endfor %}`,
			"responses",
			`"input":[`+strings.Repeat(item+",", count)+`{"role":"user","content":"u"}]`,
		)
		if got, err := m.Tokenize(t.Context(), request); (err == nil) != known || !known && !IsUnknown(err) {
			t.Errorf("%d items: got %v, %v", count, got, err)
		}
	}
}

func TestSGLangMessagesThatAreNotKnown(t *testing.T) {
	const toggles = sglangPrints + `{{ enable_thinking }}`
	for _, c := range []struct{ api, fields, want string }{
		{"messages", `"messages":[{"role":"user","content":"u"}],"thinking":{"type":"disabled"}`, "--reasoning-parser"},
		{"messages", `"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"t"}]}]`,
			"--reasoning-parser"},
		{"messages", `"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f"}]}]`, "without id"},
		{"messages", `"messages":[{"role":"user","content":[]}]`, "all empty"},
		{"messages", `"messages":[{"role":"user","content":"u"}],"cache_salt":"s"`, "cache_salt"},
		{"messages", `"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"u"}}]}]`,
			"not text alone"},
		{"responses", `"input":"x","previous_response_id":"r"`, "previous_response_id"},
		{"responses", `"input":"x","tools":[{"type":"custom","name":"c"}]`, "custom tool"},
		{"responses", `"input":[{"type":"reasoning","summary":[],"encrypted_content":"sglang-reasoning-v1.?"}]`,
			"not base64"},
		{"responses", `"input":[]`, "empty input"},
	} {
		m, request := sglangAPI(t, toggles, c.api, c.fields)
		if got, err := m.Tokenize(t.Context(), request); !IsUnknown(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, %v; want ...%s...", c.fields, got, err, c.want)
		}
	}
}
