package encoders

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// chatOf reads a chat from JSON: {"messages": [...], "tools": [...], "kwargs": {...}}.
func chatOf(t testing.TB, text string) *Chat {
	t.Helper()
	value, err := values.ParseJSON([]byte(text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	body, _ := value.(*values.Dict)
	messages, _ := get[*values.List](body, "messages")
	chat := &Chat{Messages: messages.Items}
	chat.Tools, _ = get[*values.List](body, "tools")
	chat.Variables, _ = get[*values.Dict](body, "kwargs")
	return chat
}

// encoded returns a chat's prompt as one text.
func encoded(t testing.TB, e *Encoder, chat *Chat) (string, error) {
	t.Helper()
	pieces, err := e.Encode(t.Context(), chat)
	var texts []string
	for _, piece := range pieces {
		texts = append(texts, piece.Text)
	}
	return strings.Join(texts, ""), err
}

// TestInkling shows what vLLM makes of a chat. test/parity compares with vLLM's own code.
func TestInkling(t *testing.T) {
	for _, c := range []struct{ chat, want string }{
		{
			`{"messages":[{"role":"user","content":"u"}]}`,
			"<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>" +
				"<|message_user|><|content_text|>u<|end_message|><|message_model|>",
		},
		{
			`{"messages":[{"role":"developer","content":"d","tools":[{"type":"function","function":{"name":"g"}}]},` +
				`{"role":"assistant","reasoning":"r","content":["a",{"type":"text","text":""}],` +
				`"tool_calls":[{"id":"1","function":{"name":"f","arguments":{"b":1,"a":"ü"}}}]},{"role":"tool",` +
				`"tool_call_id":"1",` +
				`"content":[{"type":"text","text":"x"},"y"]}],"tools":[{"function":{"name":"f","description":null}}],` +
				`"kwargs":{"reasoning_effort":0,"add_generation_prompt":false}}`,
			"<|message_system|>tool_declare<|content_xml|>" +
				`[{"description":"","name":"f","parameters":{},"type":"function"},` +
				`{"description":"","name":"g","parameters":{},"type":"function"}]<|end_message|>` +
				"<|message_system|><|content_text|>d<|end_message|>" +
				"<|message_system|><|content_text|>Thinking effort level: 0.0<|end_message|>" +
				"<|message_model|><|content_thinking|>r<|end_message|>" +
				"<|message_model|><|content_text|>a<|end_message|>" +
				"<|message_model|><|content_text|><|end_message|>" +
				`<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":"ü","b":1}}<|end_message|>` +
				"<|content_model_end_sampling|><|message_tool|>f<|content_text|>xy<|end_message|>",
		},
		{
			`{"messages":[{"role":"system","content":""}],"kwargs":{"reasoning_effort":"odd"}}`,
			"<|message_model|>",
		},
		{`{"messages":[{"role":"user","content":"u"}],"kwargs":{"reasoning_effort":1}}`, "refused"},
		{`{"messages":[{"role":"robot","content":"u"}]}`, "refused"},
		{`{"messages":[{"role":"user","content":"u"}],"kwargs":{"continue_final_message":true}}`, "refused"},
		{`{"messages":[{"role":"tool","content":[{"type":"image_url"}]}]}`, "refused"},
		{`{"messages":[{"role":"user","content":[{"type":"video_url"}]}]}`, "refused"},
	} {
		got, err := encoded(t, VLLM("InklingForCausalLM"), chatOf(t, c.chat))
		if isRefused := errors.As(err, new(Refused)); isRefused {
			got = "refused"
		}
		if got != c.want {
			t.Errorf("%s\n got %q, %v\nwant %q", c.chat, got, err, c.want)
		}
	}
}

// TestInklingSGLang is TestInkling for SGLang.
func TestInklingSGLang(t *testing.T) {
	const effort = "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
	const user = `{"role":"user","content":"u"}`
	for _, c := range []struct{ chat, want string }{
		{`{"messages":[` + user + `]}`, effort + "<|message_user|><|content_text|>u<|end_message|>"},
		{
			`{"messages":[{"role":"system","content":"s"},{"role":"assistant","reasoning_content":"r","content":null,` +
				`"tool_calls":[{"id":"1","function":{"name":"f","arguments":{"b":1,"a":"ü"}}}]},` +
				`{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"x"},{"type":"text",` +
				`"text":"y"}]},` +
				`{"role":"tool","name":"g","content":[]}],"tools":[{"function":{"name":"f"}}],` +
				`"kwargs":{"reasoning_effort":0}}`,
			"<|message_system|>tool_declare<|content_xml|>" +
				`[{"description":"","name":"f","parameters":{},"type":"function"}]<|end_message|>` +
				"<|message_system|><|content_text|>s<|end_message|>" +
				"<|message_system|><|content_text|>Thinking effort level: 0<|end_message|>" +
				"<|message_model|><|content_thinking|>r<|end_message|>" +
				`<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":"ü","b":1}}<|end_message|>` +
				"<|content_model_end_sampling|><|message_tool|>f<|content_text|>x<|end_message|>" +
				"<|message_tool|>f<|content_text|>y<|end_message|><|message_tool|>g<|content_text|><|end_message|>",
		},
		{
			`{"messages":[` + user + `,{"role":"assistant","content":[{"type":"reasoning","text":"r"},` +
				`{"type":"thinking","thinking":"t"},{"type":"text","text":"a"}]},{"role":"assistant","content":""}]}`,
			effort + "<|message_user|><|content_text|>u<|end_message|>" +
				"<|message_model|><|content_thinking|>r<|end_message|><|message_model|><|content_thinking|>t" +
				"<|end_message|><|message_model|><|content_text|>a<|end_message|><|content_model_end_sampling|>",
		},
		{
			`{"messages":[` + user + `,{"role":"assistant","content":"so"}],"kwargs":{"continue_final_message":true}}`,
			effort + "<|message_user|><|content_text|>u<|end_message|><|message_model|><|content_text|>so",
		},
		{
			`{"messages":[{"role":"system","content":"s"}],"kwargs":{"reasoning_effort":"0.125"}}`,
			"<|message_system|><|content_text|>s<|end_message|>" +
				"<|message_system|><|content_text|>Thinking effort level: 0.12<|end_message|>",
		},
		{
			`{"messages":[{"role":"assistant","reasoning_content":"r","content":[{"type":"thinking","text":"t"}]}]}`,
			"refused",
		},
		{`{"messages":[{"role":"tool","content":[{"type":"thinking","text":"t"}]}]}`, "refused"},
		{`{"messages":[` + user + `],"kwargs":{"reasoning_effort":1}}`, "refused"},
		{`{"messages":[` + user + `],"kwargs":{"reasoning_effort":true}}`, "refused"},
		{`{"messages":[` + user + `],"kwargs":{"reasoning_effort":"1e-1"}}`, "unknown"},
		{`{"messages":[{"role":"latest_reminder","content":"u"}]}`, "refused"},
		{`{"messages":[{"role":"user","content":[{"type":"video_url"}]}]}`, "refused"},
	} {
		got, err := encoded(t, &sglangInkling, chatOf(t, c.chat))
		switch {
		case errors.As(err, new(Refused)):
			got = "refused"
		case errors.As(err, new(Unknown)):
			got = "unknown"
		}
		if got != c.want {
			t.Errorf("%s\n got %q, %v\nwant %q", c.chat, got, err, c.want)
		}
	}
}

// TestDeepSeekV32 shows what both engines make of a chat. test/parity compares with the engines' own code.
func TestDeepSeekV32(t *testing.T) {
	const call = `{"role":"assistant","content":"","tool_calls":[{"id":"c","type":"function","function":{"name":"f",` +
		`"arguments":{"a":"x","b":[1,2.50,null]}}}]}`
	const called = "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n" +
		"<｜DSML｜parameter name=\"a\" string=\"true\">x</｜DSML｜parameter>\n" +
		"<｜DSML｜parameter name=\"b\" string=\"false\">[1, 2.5, null]</｜DSML｜parameter>\n" +
		"</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>"
	for _, c := range []struct {
		name, chat, vllm, sglang string // the prompts; "refused" if the engine answers an error
	}{
		{
			"plain",
			`{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}`,
			"<｜begin▁of▁sentence｜>s<｜User｜>u<｜Assistant｜></think>",
			"<｜begin▁of▁sentence｜>s<｜User｜>u<｜Assistant｜></think>",
		},
		{
			"thinking by either name",
			`{"messages":[{"role":"user","content":"u"}],"kwargs":{"enable_thinking":true}}`,
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>",
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜></think>",
		},
		{
			"a call and its answer",
			`{"messages":[{"role":"user","content":"u"},` + call + `,{"role":"tool","content":"r"}],` +
				`"kwargs":{"thinking":true}}`,
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think></think>" + called +
				"\n\n<function_results>\n<result>r</result>\n</function_results>\n\n<think>",
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think></think>" + called +
				"\n\n<function_results>\n<result>r</result>\n</function_results>\n\n<think>",
		},
		{
			"an answer without a call",
			`{"messages":[{"role":"user","content":"u"},{"role":"tool","content":"r"}]}`, "refused", "refused",
		},
		{
			"a first message that is a tool's looks at the last one",
			`{"messages":[{"role":"tool","content":"r"},` + call + `]}`,
			"<｜begin▁of▁sentence｜>\n\n<function_results>\n<result>r</result>\n</function_results>\n\n</think>" + called,
			"refused",
		},
		{"another role", `{"messages":[{"role":"root","content":"u"}]}`, "refused", "refused"},
		{
			"a developer's message that thinking would drop",
			`{"messages":[{"role":"developer","content":"d"},{"role":"user","content":"u"}],` +
				`"kwargs":{"thinking":true}}`,
			"refused", "refused",
		},
	} {
		const architecture = "DeepseekV32ForCausalLM"
		for i, e := range []*Encoder{VLLM(architecture), SGLang(Model{Architecture: architecture})} {
			got, err := encoded(t, e, chatOf(t, c.chat))
			var refusal Refused
			if errors.As(err, &refusal) {
				got = "refused"
			} else if err != nil {
				t.Errorf("%s, %s: %v", c.name, e.Name, err)
				continue
			}
			if want := []string{c.vllm, c.sglang}[i]; got != want {
				t.Errorf("%s, %s:\n got %q\nwant %q", c.name, e.Name, got, want)
			}
		}
	}
}

// TestDeepSeekV4 shows what both engines make of a chat. test/parity compares with the engines' own code.
func TestDeepSeekV4(t *testing.T) {
	const called = `{"messages":[{"role":"user","content":"u"},{"role":"assistant","content":"a","tool_calls":[` +
		`{"id":"1","function":{"name":"f","arguments":{}}},{"id":"2","function":{"name":"g","arguments":{"x":1}}}]},` +
		`{"role":"tool","tool_call_id":"2","content":"two"},{"role":"tool","tool_call_id":"1","content":"one"},` +
		`{"role":"user","content":"v"}],"kwargs":{"thinking":false}}`
	const calledPrompt = "<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜></think>a\n\n<｜DSML｜tool_calls>\n" +
		"<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n" +
		"<｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n" +
		"</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>one</tool_result>\n\n" +
		"<tool_result>two</tool_result>\n\nv<｜Assistant｜></think>"
	for _, c := range []struct {
		name, chat, vllm, sglang string // the prompts; "refused" and "unknown" for errors
	}{
		{"results in the order of the calls", called, calledPrompt, calledPrompt},
		{
			"thinking by default on vLLM",
			`{"messages":[{"role":"user","content":"u"}],"kwargs":{"reasoning_effort":"low"}}`,
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>",
			"<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜></think>",
		},
		{
			"an effort of a checkpoint that is not known",
			`{"messages":[{"role":"user","content":"u"}],"kwargs":{"thinking":true,"reasoning_effort":"max"}}`,
			"<｜begin▁of▁sentence｜>" + dsEffortMax + "<｜User｜>u<｜Assistant｜><think>", "unknown",
		},
		{
			"a task",
			`{"messages":[{"role":"user","content":"u","task":"title"}],"kwargs":{"thinking":false}}`,
			"<｜begin▁of▁sentence｜><｜User｜>u<｜title｜>", "<｜begin▁of▁sentence｜><｜User｜>u<｜title｜>",
		},
		{
			"a last system message",
			`{"messages":[{"role":"user","content":"u"},{"role":"system","content":"s"}],"kwargs":{"thinking":false}}`,
			"<｜begin▁of▁sentence｜><｜User｜>us<｜Assistant｜></think>", "<｜begin▁of▁sentence｜><｜User｜>us",
		},
		{"another role", `{"messages":[{"role":"root","content":"u"}]}`, "refused", "refused"},
	} {
		for i, e := range []*Encoder{&vllmDeepSeekV4, &sglangDeepSeekV4} {
			got, err := encoded(t, e, chatOf(t, c.chat))
			var refusal Refused
			var unknown Unknown
			switch {
			case errors.As(err, &refusal):
				got = "refused"
			case errors.As(err, &unknown):
				got = "unknown"
			case err != nil:
				t.Errorf("%s, %s: %v", c.name, e.Name, err)
				continue
			}
			if want := []string{c.vllm, c.sglang}[i]; got != want {
				t.Errorf("%s, %s:\n got %q\nwant %q", c.name, e.Name, got, want)
			}
		}
	}
}

// TestImages cuts the prompt at each image, and refuses to guess where a text has the token of one.
func TestImages(t *testing.T) {
	const images = `{"messages":[{"role":"user","content":[{"type":"text","text":"see"},{"type":"image"},` +
		`{"type":"text","text":"%s"},{"type":"image"}]}]}`
	e := VLLM("DeepseekV4ForConditionalGeneration")
	pieces, err := e.Encode(t.Context(), chatOf(t, strings.ReplaceAll(images, "%s", "and")))
	if err != nil {
		t.Fatal(err)
	}
	want := []Piece{
		{Kind: Text, Text: "<｜begin▁of▁sentence｜>" + dsEffortHigh + "<｜User｜>see\n\n"}, {Kind: Media, Text: dsImage},
		{Kind: Text, Text: "\n\nand\n\n"}, {Kind: Media, Text: dsImage},
		{Kind: Text, Text: "<｜Assistant｜><think>"},
	}
	if !slices.Equal(pieces, want) {
		t.Errorf(" got %+v\nwant %+v", pieces, want)
	}
	var unknown Unknown
	_, err = e.Encode(t.Context(), chatOf(t, strings.ReplaceAll(images, "%s", dsImage)))
	if !errors.As(err, &unknown) {
		t.Errorf("a text with the token of an image: %v", err)
	}
}

// TestGLM53 shows what SGLang makes of a chat. test/parity compares with its own code.
func TestGLM53(t *testing.T) {
	const template = "[gMASK]<sop>Reasoning Effort: <tool_call><arg_key><arg_value>"
	e := SGLang(Model{Architecture: "GlmMoeDsaForCausalLM", HasTemplate: true, Template: template})
	if e != &sglangGLM53 {
		t.Fatalf("SGLang chooses %+v", e)
	}
	for name, model := range map[string]Model{
		"a template with images for a model without": {
			Architecture: "GlmMoeDsaForCausalLM", Template: template + "<|begin_of_image|>",
		},
		"a template without images for one with them": {
			Architecture: "Glm5NextForConditionalGeneration", Template: template,
		},
		"another template of GLM-5": {Architecture: "GlmMoeDsaForCausalLM", Template: template + "enable_thinking"},
	} {
		if e := SGLang(model); e != nil {
			t.Errorf("%s: SGLang chooses %s, want its template", name, e.Name)
		}
	}
	const chat = `{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text",` +
		`"text":"u"}]},` +
		`{"role":"assistant","content":"<think>t</think> a ","tool_calls":[{"id":"1","function":{"name":"f",` +
		`"arguments":{"x":"y","n":[1]}}},{"id":"2","function":{"name":"g","arguments":{}}}]},` +
		`{"role":"tool","tool_call_id":"2","content":"two"},{"role":"tool","tool_call_id":"1","content":"one"}],` +
		`"tools":[{"type":"function","function":{"strict":true,"name":"f"}},{"function":{"name":"g",` +
		`"defer_loading":true}}],"kwargs":{"reasoning_effort":"high"}}`
	want := "[gMASK]<sop><|system|>Reasoning Effort: High<|system|>" + glmToolsBefore + "{\"name\": \"f\"}\n" +
		glmToolsAfter + "<|system|>s<|user|>u<|assistant|><think>t</think>a<tool_call>f<arg_key>x</arg_key>" +
		"<arg_value>y" +
		"</arg_value><arg_key>n</arg_key><arg_value>[1]</arg_value></tool_call><tool_call>g</tool_call>" +
		"<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
	if got, err := encoded(t, e, chatOf(t, chat)); got != want || err != nil {
		t.Errorf(" got %q, %v\nwant %q", got, err, want)
	}
}

// TestBounds stops at the bound of the prompt, and at the end of the context.
func TestBounds(t *testing.T) {
	chat := chatOf(t, `{"messages":[{"role":"user","content":"`+strings.Repeat("x", 5000)+`"}]}`)
	chat.Tools = values.NewList(values.DictOf("function",
		values.DictOf("name", "f", "description", strings.Repeat("y", 5000))))
	for _, e := range all() {
		whole, err := encoded(t, e, chat)
		if err != nil {
			t.Fatalf("%s: %v", e.Name, err)
		}
		for _, most := range []int{1, 100, len(whole) - 1} {
			limited := *chat
			limited.MaxBytes = most
			if _, err := encoded(t, e, &limited); !errors.Is(err, jinja.ErrLimit) {
				t.Errorf("%s with %d of %d bytes: %v, want ErrLimit", e.Name, most, len(whole), err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := e.Encode(ctx, chat); !errors.Is(err, context.Canceled) {
			t.Errorf("%s after the end of its context: %v", e.Name, err)
		}
	}
}

// all returns every encoder.
func all() []*Encoder {
	every := []*Encoder{&sglangDeepSeekV32, &sglangDeepSeekV4, &sglangGLM53, &sglangInkling}
	for _, e := range vllm {
		every = append(every, e)
	}
	return every
}

// FuzzEncoders encodes chats twice with every encoder: the results are equal, and within the bound.
func FuzzEncoders(f *testing.F) {
	for _, seed := range []string{
		`{"messages":[{"role":"user","content":"u"}],"tools":[{"type":"function","function":{"name":"f"}}]}`,
		`{"messages":[{"role":"assistant","reasoning":"r","tool_calls":[{"id":"1","function":{"name":"f","arguments":` +
			`{"a":[1,{}],"b":"s"}}}]},{"role":"tool","tool_call_id":"1","content":"x"}],"kwargs":{"thinking":true}}`,
		`{"messages":[{"role":"developer","content":"d","tools":[{"function":1}]},{"role":"system","task":"title"}]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image"}]},{"role":"tool"}]}`,
		`{"messages":[]}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		value, err := values.ParseJSON([]byte(text))
		body, ok := value.(*values.Dict)
		messages, isList := get[*values.List](body, "messages")
		if err != nil || !ok || !isList {
			return
		}
		chat := &Chat{Messages: messages.Items, MaxBytes: 1 << 20}
		chat.Tools, _ = get[*values.List](body, "tools")
		chat.Variables, _ = get[*values.Dict](body, "kwargs")
		for _, e := range all() {
			first, err := encoded(t, e, chat)
			again, errAgain := encoded(t, e, chat)
			if first != again || (err == nil) != (errAgain == nil) || len(first) > chat.MaxBytes {
				t.Fatalf("%s: %q, %v, then %q, %v", e.Name, first, err, again, errAgain)
			}
		}
	})
}
