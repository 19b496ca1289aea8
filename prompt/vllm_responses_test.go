package prompt

import (
	"strings"
	"testing"

	"kvepp/prompt/body"
)

// responsesModel loads the small model for vLLM, with a template that prints all its variables.
func responsesModel(t *testing.T) *Model {
	t.Helper()
	m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{
		"chat_template.jinja": `{% for m in messages %}{{ m }}{% endfor %}{% if tools %}{{ tools }}{% endif %}{{ ` +
			`reasoning_effort }}`}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func responsesRequest(t *testing.T, fields string) *body.Request {
	t.Helper()
	request, err := body.ParseRequest("/v1/responses", []byte(`{"model":"m",`+fields+`}`))
	if err != nil {
		t.Fatal(err)
	}
	return request
}

// TestVLLMResponses renders requests to OpenAI's Responses. Package parity compares with vLLM.
func TestVLLMResponses(t *testing.T) {
	m := responsesModel(t)
	for fields, want := range map[string]string{
		`"input":"x","instructions":"i"`: `{'role': 'system', 'content': 'i'}{'role': 'user', 'content': 'x'}`,
		`"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]}],` +
			`"reasoning":{"effort":"low"}`: `{'role': 'user', 'content': 'a\nb'}low`,
		`"input":[{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"t"}]},` +
			`{"type":"function_call","call_id":"1","name":"f","arguments":"{\"a\":1}"},{"type":"function_call",` +
			`"call_id":"2","name":"g","arguments":"{}"},{"type":"function_call_output","call_id":"1",` +
			`"output":"r"}]`: `{'role': 'assistant', 'content': '', ` +
			`'tool_calls': [` +
			`{'id': '1', 'function': {'name': 'f', 'arguments': {'a': 1}}, 'type': 'function'}, {'id': '2', ` +
			`'function': {'name': 'g', 'arguments': {}}, 'type': 'function'}], ` +
			`'reasoning': 't', 'reasoning_content': 't'}{'role': 'tool', 'content': 'r', 'tool_call_id': '1'}`,
		`"input":"x","tools":[{"type":"function","name":"f","parameters":{},"strict":true}]`: `{'role': 'user', ` +
			`'content': 'x'}[{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': {}, ` +
			`'strict': True}}]`,
	} {
		prompts, err := m.Prompts(t.Context(), responsesRequest(t, fields))
		if err != nil || prompts[0].Text != want {
			t.Errorf("%s\n got %+v, %v\nwant %q", fields, prompts, err, want)
		}
	}
}

func TestVLLMResponsesThatAreNotKnown(t *testing.T) {
	m := responsesModel(t)
	for _, c := range []struct{ fields, want string }{
		{`"input":"x","previous_response_id":"r"`, "previous_response_id"},
		{`"input":"x","truncation":"auto"`, "truncation"},
		{`"input":"x","tools":[{"type":"web_search"}]`, "not a function"},
		{`"input":[{"type":"web_search_call"}]`, "web_search_call"},
		{`"input":[{"role":"user","content":[{"type":"input_image","image_url":"u"}]}]`, "other than text"},
		{`"input":[{"role":"assistant","content":"a","status":"in_progress"}]`, "continued"},
		{`"input":[{"role":"assistant","content":[{"type":"output_text","text":"a"}]}]`, "the assistant's"},
		{`"input":[{"type":"function_call_output","call_id":"1","output":[{"type":"input_text",` +
			`"text":""}]}]`, "not text"},
		{`"input":[{"type":"reasoning","summary":[],"encrypted_content":"x"}]`, "encrypted"},
	} {
		fields, want := c.fields, c.want
		if got, err := m.Tokenize(t.Context(), responsesRequest(t, fields)); !IsUnknown(err) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want ...%s...", fields, got, err, want)
		}
	}
}
