package prompt

import (
	"strings"
	"testing"

	"kvepp/prompt/body"
)

// TestVLLMMessages renders requests to Anthropic's Messages. Package parity compares with vLLM.
func TestVLLMMessages(t *testing.T) {
	const (
		prints = `{% for m in messages %}{{ m }}{% endfor %}{% if tools %}{{ tools }}{% endif %}{{ reasoning_effort }}`
		strict = `{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') ` +
			`}}{% endif %}{{ m }}{% endfor %}`
		grades = `{{ {'low': 1, 'high': 2}[reasoning_effort] }}{% for m in messages %}{{ m.content }}{% endfor %}`
	)
	for _, c := range []struct{ template, fields, want string }{
		{prints, `"system":"s","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]`,
			`{'role': 'system', 'content': 's'}{'role': 'user', 'content': 'x'}`},
		{prints, `"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"tool_use",` +
			`"id":"1","name":"f","input":{"a":1}}]}]`,
			`{'role': 'assistant', 'content': '', 'tool_calls': [{'id': '1', 'function': {'arguments': {'a': 1}, ` +
				`'name': 'f'}, 'type': 'function'}], 'reasoning': 't', 'reasoning_content': 't'}`},
		{prints, `"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"r"},` +
			`{"type":"text","text":"x"}]}]`,
			`{'role': 'tool', 'content': 'r', 'tool_call_id': '1'}{'role': 'user', 'content': 'x'}`},
		{prints, `"messages":[{"role":"user","content":"u"},{"role":"system","content":"late"}]`,
			`{'role': 'user', 'content': 'u'}{'role': 'system', 'content': 'late'}`},
		{strict, `"system":"s","messages":[{"role":"user","content":"u"},{"role":"system","content":"late"}]`,
			`{'role': 'system', 'content': 'slate'}{'role': 'user', 'content': 'u'}`},
		{prints, `"messages":[{"role":"user","content":"u"}],"thinking":{"type":"disabled"}`,
			`{'role': 'user', 'content': 'u'}none`},
		{grades, `"messages":[{"role":"user","content":"u"}],"thinking":{"type":"disabled"}`, `1u`},
		{prints, `"messages":[{"role":"user","content":"u"}],"output_config":{"effort":"max"}`,
			`{'role': 'user', 'content': 'u'}max`},
		{prints, `"messages":[{"role":"user","content":"u"}],"tools":[{"name":"f","input_schema":{}}]`,
			`{'role': 'user', 'content': 'u'}[{'type': 'function', 'function': {'name': 'f', 'description': None, ` +
				`'parameters': {'type': 'object'}}}]`},
	} {
		m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": c.template}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		request, err := body.ParseRequest("/v1/messages", []byte(`{"model":"m","max_tokens":9,`+c.fields+`}`))
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := m.Prompts(t.Context(), request)
		if err != nil || prompts[0].Text != c.want {
			t.Errorf("%s\n got %+v, %v\nwant %q", c.fields, prompts, err, c.want)
		}
	}
}

func TestVLLMMessagesThatAreNotKnown(t *testing.T) {
	vllm, err := Load(copyModel(t, "tiny-bytelevel", nil), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for fields, want := range map[string]string{
		`"messages":[{"role":"user","content":"u"}],"tools":[]`: "empty",
		`"messages":[{"role":"user","content":"u"}],"kv_transfer_params":{"prompt_token_ids":[1]}`: "kv_transfer_par" +
			"ams",
		`"messages":[{"role":"system","content":[{"type":"tool_removal","tool":{"type":"tool_reference",` +
			`"name":"f"}}]}]`: "change of the tools",
		`"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"tool_reference",` +
			`"tool_name":"f"}]}]}]`: "reference to a tool",
		`"messages":[{"role":"assistant","content":[{"type":"tool_use",` +
			`"name":"f"}]}]`: "without id",
		`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url",` +
			`"url":"u"}}]}]`: "not text alone",
		`"messages":[{"role":"assistant","content":[{"type":"tool_result","content":[{"type":"text",` +
			`"text":"x"}]}]}]`: "is not text",
	} {
		request, err := body.ParseRequest("/v1/messages", []byte(`{"model":"m","max_tokens":9,`+fields+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := vllm.Tokenize(t.Context(), request); !IsUnknown(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want ...%s...", fields, got, err, want)
		}
	}
}
