package body

import (
	"errors"
	"testing"

	"kvepp/prompt/values"
)

// asJSON renders a value for comparison.
func asJSON(t *testing.T, v any) string {
	t.Helper()
	switch c := v.(type) {
	case *values.List:
		if c == nil {
			return ""
		}
	case *values.Dict:
		if c == nil {
			return ""
		}
	}
	text, err := values.RustJSON(v)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestMappedChats maps requests of the other APIs to chats. Tests of package e2e show that the frontend does the same.
func TestMappedChats(t *testing.T) {
	for _, c := range []struct{ path, fields, messages, tools string }{
		{"responses", `"input":"hi"`, `[{"role":"user","content":"hi"}]`, ``},
		{"responses", `"instructions":"a","input":[{"role":"developer","content":[{"type":"input_text","text":"b"},` +
			`{"type":"input_text","text":"c"}]},{"type":"message","role":"user","content":[{"type":"input_text",` +
			`"text":"d"}]},{"role":"system","content":"late"}]`,
			`[{"role":"system","content":"a\n\nbc"},{"role":"user","content":"d"},{"role":"system","content":"late"}]`,
			``},
		{"responses", `"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text",` +
			`"text":"b"}]},{"id":"x"},{"type":"item_reference","id":"y"}]`,
			`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`, ``},
		{"responses", `"input":[{"type":"reasoning","summary":[{"text":"s"}],"content":[]},{"type":"function_call",` +
			`"call_id":"1","name":"f","arguments":"{}"},{"type":"reasoning","summary":[],"content":[{"text":"t"}]},` +
			`{"type":"message","role":"assistant","content":[{"type":"output_text","text":"o"},{"type":"refusal",` +
			`"refusal":"r"}]},{"type":"function_call_output","call_id":"1","output":[{"type":"input_text",` +
			`"text":"p"},{"type":"input_text","text":"q"}]},{"type":"message","role":"assistant"},` +
			`{"type":"agent_message","content":[{"type":"input_text","text":"u"},{"type":"encrypted_content",` +
			`"encrypted_content":"v"}]}]`,
			`[{"role":"assistant","content":"or","reasoning_content":["s","t"],"tool_calls":[{"id":"1",` +
				`"type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","content":"pq",` +
				`"tool_call_id":"1"},{"role":"assistant","content":""},{"role":"user","content":"u\nv"}]`, ``},
		{"responses", `"input":[{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}],` +
			`"tools":[{"type":"function","strict":true,"parameters":{"a":1},"description":"d","name":"f"},` +
			`{"type":"function","name":"g","parameters":null}]`,
			`[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f",` +
				`"arguments":"{}"}}]}]`,
			`[{"type":"function","function":{"name":"f","description":"d","parameters":{"a":1},"strict":true}},` +
				`{"type":"function","function":{"name":"g"}}]`},

		{"messages", `"messages":[{"role":"user","content":"hi"}]`, `[{"role":"user","content":"hi"}]`, ``},
		{"messages", `"system":[{"type":"text","text":"a"},{"text":"b"}],"messages":[{"role":"system",` +
			`"content":[{"type":"text","text":"c"},{"type":"text","text":"d"}]},{"role":"user",` +
			`"content":[{"type":"text","text":"e"},{"type":"text","text":"f"},{"type":"tool_result",` +
			`"tool_use_id":"1","content":[{"type":"text","text":"g"},{"text":"h"}]},{"type":"tool_result",` +
			`"tool_use_id":"2"},{"type":"unknown"},{"type":"text","text":"i"}]}]`,
			`[{"role":"system","content":"a\nb"},{"role":"system","content":"c\nd"},{"role":"user","content":"ef"},` +
				`{"role":"tool","content":"gh","tool_call_id":"1"},{"role":"tool","content":"","tool_call_id":"2"},` +
				`{"role":"user","content":"i"}]`, ``},
		{"messages", `"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"a"},` +
			`{"type":"thinking","thinking":"b"},{"type":"redacted_thinking","data":"x"},{"type":"text","text":"c"},` +
			`{"type":"text","text":"d"}]},{"role":"assistant","content":[{"type":"thinking","thinking":"a"},` +
			`{"type":"tool_use","id":"1","name":"f","input":{"x":"é","y":[1.0]}},{"type":"tool_use","id":"2",` +
			`"name":"g"},{"type":"thinking","thinking":"b"}]},{"role":"assistant","content":[]}]`,
			`[{"role":"assistant","content":"cd","reasoning_content":"a\nb"},{"role":"assistant",` +
				`"reasoning_content":["a","","b"],"tool_calls":[{"id":"1","type":"function","function":{"name":"f",` +
				`"arguments":"{\"x\":\"é\",\"y\":[1.0]}"}},{"id":"2","type":"function","function":{"name":"g",` +
				`"arguments":"{}"}}]},{"role":"assistant"}]`, ``},
		{"messages", `"messages":[{"role":"user","content":"x"}],"tools":[{"input_schema":{"type":"object"},` +
			`"description":"d","name":"f"}]`, `[{"role":"user","content":"x"}]`,
			`[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}]`},
	} {
		r, err := ParseRequest("/v1/"+c.path, []byte(`{"model":"m",`+c.fields+`}`))
		if err != nil {
			t.Errorf("%s: %v", c.fields, err)
			continue
		}
		if got := asJSON(t, r.Messages); got != c.messages || r.Unmapped != "" || r.HasMedia {
			t.Errorf("%s\n got %s\nwant %s\nunmapped: %q, media: %v", c.fields, got, c.messages, r.Unmapped, r.HasMedia)
		}
		if got := asJSON(t, r.Tools); got != c.tools {
			t.Errorf("%s\n got tools %s\nwant %s", c.fields, got, c.tools)
		}
	}
}

func TestMappedFields(t *testing.T) {
	r, err := ParseRequest(
		"/v1/responses",
		[]byte(
			`{"model":"m","input":"x","max_output_tokens":7,"reasoning":{"effort":"low"},"tool_choice":"none",`+
				`"chat_template_args":{"k":1},"stream":true,"nvext":{"cache_salt":"s"}}`,
		),
	)
	if err != nil || r.API != Responses || r.MaxTokens != 7 || r.ReasoningEffort != "low" || !r.ToolChoiceNone ||
		!r.Stream ||
		r.CacheSalt != "s" ||
		asJSON(t, r.ChatTemplateKwargs) != `{"k":1}` {
		t.Errorf("got %+v, %v", r, err)
	}
	r, err = ParseRequest(
		"/v1/messages",
		[]byte(
			`{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":7,"thinking":{"type":"enabled"},`+
				`"tool_choice":{"type":"none"},"chat_template_args":{"k":1}}`,
		),
	)
	if err != nil || r.API != Messages || r.MaxTokens != 7 || !r.ToolChoiceNone ||
		asJSON(t, r.ChatTemplateKwargs) != `{"enable_thinking":true}` {
		t.Errorf("got %+v, %v", r, err)
	}
}

func TestUnmapped(t *testing.T) {
	user := `"messages":[{"role":"user","content":"x"}]`
	for _, c := range []struct {
		path, fields, unmapped string
		media                  bool
	}{
		{"responses", `"input":"x","previous_response_id":"r"`, "'previous_response_id'", false},
		{"responses", `"input":"x","prompt":{"id":"p"}`, "'prompt'", false},
		{"responses", `"input":"x","instructions":[]`, "instructions that are not a string", false},
		{"responses", `"input":"x","tools":[{"type":"web_search"}]`, "a tool that is not a function", false},
		{"responses", `"input":"x","tool_choice":{"type":"allowed_tools"}`, "a tool_choice that is not a function",
			false},
		{"responses", `"input":[{"type":"web_search_call","id":"1"}]`, "an input item of type web_search_call", false},
		{"responses", `"input":[{"type":"function_call","namespace":"n","name":"f"}]`, "a function in a namespace",
			false},
		{"responses", `"input":[{"role":"user","content":[{"type":"input_file"}]}]`,
			"a content part of type input_file", false},
		{"responses", `"input":[{"role":"x","content":""}]`, `a message with the role "x"`, false},
		{"responses", `"input":[{"role":"user"}]`, "a message without content", false},
		{"responses", `"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image",` +
			`"image_url":"u"}]}]`, "a content part without text", true},
		{"messages", `"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]`, "", true},
		{"messages", user + `,"tools":[{"type":"web_search_20250305","name":"web_search"}]`,
			"a tool without input_schema", false},
		{"messages", `"messages":[{"role":"user","content":[{"type":"tool_result","content":"x"}]}]`,
			"a tool's result without the id of its call", false},
		{"messages", `"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1",` +
			`"content":[{"type":"document"}]}]}]`, "a tool's result that is neither text nor an image", false},
		{"messages", `"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",` +
			`"input":{"n":123456789012345678901234567890}}]}]`,
			"the arguments of a tool call: values: not reproduced: an integer of more than 64 bits",
			false},
	} {
		r, err := ParseRequest("/v1/"+c.path, []byte(`{"model":"m",`+c.fields+`}`))
		if err != nil || r.Unmapped != c.unmapped || r.HasMedia != c.media {
			t.Errorf("%s: got %+v, %v; want unmapped %q, media %v", c.fields, r, err, c.unmapped, c.media)
		}
	}
}

func TestMappedErrors(t *testing.T) {
	for _, c := range []struct{ path, fields, code, param string }{
		{"responses", `"input":null`, CodeMissingField, "input"},
		{"responses", `"input":7`, CodeInvalidType, "input"},
		{"responses", `"input":["x"]`, CodeInvalidType, "input[0]"},
		{"messages", `"max_tokens":1`, CodeMissingField, "messages"},
		{"messages", `"messages":[]`, CodeInvalidValue, "messages"},
		{"messages", `"messages":["x"]`, CodeInvalidType, "messages[0]"},
		{"messages", `"messages":[{"role":"user"}]`, CodeInvalidType, "messages[0].content"},
		{"messages", `"messages":[{"role":"tool","content":"x"}]`, CodeInvalidValue, "messages[0].role"},
		{"messages", `"system":7,"messages":[{"role":"user","content":"x"}]`, CodeInvalidType, "system"},
		{"messages", `"system":[{}],"messages":[{"role":"user","content":"x"}]`, CodeInvalidType, "system[0]"},
	} {
		r, err := ParseRequest("/v1/"+c.path, []byte(`{"model":"m",`+c.fields+`}`))
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || e.Param != c.param || r != nil {
			t.Errorf("%s: got %v, %v; want %s of %q", c.fields, r, err, c.code, c.param)
		}
	}
}
