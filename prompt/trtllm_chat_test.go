package prompt

import (
	"path/filepath"
	"slices"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// trtllmCase is a chat and its rendering according to TensorRT-LLM's source.
type trtllmCase struct {
	rule   string // its file and function
	fields string // from the messages on
	want   string // the text; "" means that only the engine knows
}

// shown renders everything that a template can see of a message, and the variables beside the messages.
const shown = `{# content #}{% for m in messages %}{{ m }}
{% endfor %}{{ tools }} {{ documents }} {{ add_generation_prompt }} {{ reasoning_effort }} {{ enable_thinking }}`

// TestTRTLLM tests single rules, each named after its place in TensorRT-LLM's source. The golden files test
// combinations.
func TestTRTLLM(t *testing.T) {
	m, err := Load(
		copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": shown}),
		Options{Engine: TRTLLM},
	)
	if err != nil {
		t.Fatal(err)
	}
	const user, rest = "{'role': 'user', 'content': 'a', 'media': []}\n", "None None True  "
	for _, c := range []trtllmCase{
		{"chat_utils, parse_chat_message_content_parts: texts that are not empty, joined by newlines; no " +
			"content_parts without media",
			`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text",` +
				`"text":"b"},{"type":"text"}]}]`,
			"{'role': 'user', 'content': 'a\\nb', 'media': []}\n" + rest},
		{"chat_utils, parse_chat_message_content: no content is none",
			`[{"role":"system","content":null},{"role":"user"}]`,
			"{'role': 'system', 'content': '', 'media': []}\n{'role': 'user', 'content': '', 'media': []}\n" + rest},
		{"chat_utils, parse_chat_message_content: a name, a refusal and other keys of a message are not used",
			`[{"role":"user","content":"a","name":"n","x":1}]`, user + rest},
		{"chat_utils, _parse_assistant_message_content: reasoning, else reasoning_content, under the latter's name",
			`[{"role":"assistant","content":"a","reasoning":"r","reasoning_content":"s"},{"role":"assistant",` +
				`"reasoning_content":"s"}]`,
			"{'role': 'assistant', 'content': 'a', 'media': [], 'reasoning_content': 'r'}\n{'role': 'assistant', " +
				"'content': '', 'media': [], 'reasoning_content': 's'}\n" + rest},
		{"chat_utils, parse_chat_message_content: only an assistant has reasoning and tool calls",
			`[{"role":"user","content":"a","reasoning":"r","tool_calls":[]}]`, user + rest},
		{"chat_utils, _normalize_tool_call_arguments: arguments become objects; OpenAI's types give the order of " +
			"fields",
			`[{"role":"assistant","tool_calls":[{"type":"function","id":"i","function":{"name":"f",` +
				`"arguments":"{\"b\":1,\"a\":1.0}"}}]}]`,
			"{'role': 'assistant', 'content': '', 'media': [], 'tool_calls': [{'id': 'i', 'function': {'arguments': " +
				"{'b': 1, 'a': 1.0}, 'name': 'f'}, 'type': 'function'}]}\n" + rest},
		{"chat_utils, _validate_fallback_tool_calls: a field that OpenAI's types do not have, and the order is that " +
			"of _FallbackToolCall",
			`[{"role":"assistant","tool_calls":[{"index":0,"type":"function","id":"i","function":{"arguments":{},` +
				`"name":"f"}}]}]`,
			"{'role': 'assistant', 'content': '', 'media': [], 'tool_calls': [{'id': 'i', 'type': 'function', " +
				"'function': {'name': 'f', 'arguments': {}}, 'index': 0}]}\n" + rest},
		{"openai_server, openai_chat: one such message, and all are read again from the JSON",
			`[{"role":"assistant","tool_calls":[{"type":"function","id":"i","function":{"name":"f",` +
				`"arguments":"{}"}}]},{"role":"user","content":["a"]}]`,
			"{'role': 'assistant', 'content': '', 'media': [], 'tool_calls': [{'id': 'i', 'type': 'function', " +
				"'function': {'name': 'f', 'arguments': {}}}]}\n" + user + rest},
		{"chat_utils, _normalize_tool_call_arguments: no arguments are {}; no tool_calls are an empty list",
			`[{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"f"}}]},{"role":"assistant",` +
				`"tool_calls":[]}]`,
			"{'role': 'assistant', 'content': 'a', 'media': [], 'tool_calls': [{'function': {'name': 'f', " +
				"'arguments': {}}}]}\n{'role': 'assistant', 'content': '', 'media': [], 'tool_calls': []}\n" + rest},
		{"chat_utils, _parse_tool_message_content: the call's id alone",
			`[{"role":"tool","content":"a","tool_call_id":"i","name":"f"}]`,
			"{'role': 'tool', 'content': 'a', 'media': [], 'tool_call_id': 'i'}\n" + rest},
		{"openai_protocol, ChatCompletionToolsParam: model_dump with its defaults; openai_chat: with any tool_choice " +
			"says",
			`[{"role":"user","content":"a"}],"tools":[{"function":{"parameters":{"b":1,"a":2},"name":"f"}}],` +
				`"tool_choice":"none"`,
			user + "[{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': {'b': 1, 'a': " +
				"2}, 'strict': None}}] None True  "},
		{"openai_protocol, ChatCompletionRequest: reasoning_effort is harmony's and Kimi's alone",
			`[{"role":"user","content":"a"}],"reasoning_effort":"high"`, user + rest},
		{"openai_server, openai_chat: documents, add_generation_prompt, chat_template_kwargs",
			`[{"role":"user","content":"a"}],"documents":[{"title":"t"}],"add_generation_prompt":false,` +
				`"chat_template_kwargs":{"enable_thinking":null,"reasoning_effort":"x"}`,
			user + "None [{'title': 't'}] False x None"},
		{"chat_template_kwargs are Transformers' arguments too: continue_final_message",
			`[{"role":"assistant","content":"a"}],"add_generation_prompt":false,` +
				`"chat_template_kwargs":{"continue_final_message":true}`,
			"{'role': 'assistant', 'content': 'a"},
		{"chat_utils, _normalize_tool_call_arguments: text that is not JSON stays, in some versions",
			`[{"role":"assistant","tool_calls":[{"type":"function","id":"i","function":{"name":"f",` +
				`"arguments":"x"}}]}]`, ""},
		{"chat_utils, parse_chat_message_content: a system message's tools are shown by later versions",
			`[{"role":"system","content":"a","tools":[{}]}]`, ""},
		{"serve/render/chat: a named function is put behind the prompt by later versions",
			`[{"role":"user","content":"a"}],"tool_choice":{"type":"function","function":{"name":"f"}},` +
				`"tools":[{"function":{"name":"f"}}]`, ""},
		{"images and other parts than text", `[{"role":"user","content":[{"type":"image_url"}]}]`, ""},
	} {
		request, err := body.ParseRequest("/v1/chat/completions", []byte(`{"model":"m","messages":`+c.fields+`}`))
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := m.Prompts(t.Context(), request)
		switch {
		case c.want == "":
			if !IsUnknown(err) {
				t.Errorf("%s:\n%s: got %v, %v; want that only the engine knows", c.rule, c.fields, prompts, err)
			}
		case err != nil || prompts[0].Text != c.want:
			t.Errorf("%s:\n%s\n got %v, %v\nwant %q", c.rule, c.fields, prompts, err, c.want)
		}
	}
	for _, fields := range []string{ // a response of 400
		`[{"role":"user","content":"a"}],"continue_final_message":true`,
		`[{"role":"user","content":"a"}],"chat_template_kwargs":{"tools":[]}`,
		`[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","x":1}}]`,
		`[{"role":"user","content":"a"}],"documents":[{"n":1}]`,
		`[{"role":"assistant","tool_calls":[{"type":"function","id":"i","function":{"name":"f","arguments":"[]"}}]}]`,
		`[{"role":"assistant","tool_calls":[{"type":"function","id":1,"function":{"name":"f","arguments":"{}"}}]}]`,
	} {
		request, err := body.ParseRequest("/v1/chat/completions", []byte(`{"model":"m","messages":`+fields+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.Tokenize(t.Context(), request); err == nil || IsUnknown(err) {
			t.Errorf("%s: got %v, %v; want what is refused", fields, got, err)
		}
	}
	request, err := body.ParseRequest(
		"/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"a"}],"prompt_token_ids":[5,6]}`),
	)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := m.Tokenize(t.Context(), request); err != nil || !slices.Equal(got[0].IDs, []kvblock.Token{5, 6}) {
		t.Errorf("prompt_token_ids: got %v, %v", got, err)
	}
}

// TestTRTLLMModels: kvepp returns an error for models whose chats TensorRT-LLM encodes in a special way.
func TestTRTLLMModels(t *testing.T) {
	for _, kind := range []string{"gpt_oss", "deepseek_v32", "kimi_k2"} {
		dir := copyModel(
			t,
			"tiny-bytelevel",
			map[string]string{"chat_template.jinja": shown, "config.json": `{"model_type":"` + kind + `"}`},
		)
		m, err := Load(dir, Options{Engine: TRTLLM})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.Tokenize(t.Context(), chatRequest(t, `[{"role":"user","content":"a"}]`)); !IsUnknown(err) {
			t.Errorf("%s in %s: got %v, %v", kind, filepath.Base(dir), got, err)
		}
	}
}
