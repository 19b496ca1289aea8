package prompt

import (
	"strings"
	"testing"

	"kvepp/prompt/body"
)

const (
	thinkingTemplate = `{{ thinking }} {{ enable_thinking }} {{ thinking_mode }} {{ truncate_history_thinking }}{% ` +
		`for m in messages %}{% endfor %}`
	toolsTemplate = `{{ tools }}{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% ` +
		`endfor %}{% endfor %}`
)

// TestDynamoSettings renders with the settings of workers' cards. Package e2e compares with the frontend.
func TestDynamoSettings(t *testing.T) {
	const user = `[{"role":"user","content":"x"}]`
	called := func(arguments ...string) string {
		var calls []string
		for _, a := range arguments {
			calls = append(calls, `{"id":"1","type":"function","function":{"name":"f","arguments":`+a+`}}`)
		}
		return `[{"role":"assistant","content":null,"tool_calls":[` + strings.Join(calls, ",") + `]}]`
	}
	for _, c := range []struct{ template, runtimeConfig, api, fields, want string }{
		{thinkingTemplate, `{}`, "chat/completions", user, "   "},
		{thinkingTemplate, `{"reasoning_parser":"qwen3"}`, "chat/completions", user, "   "},
		{thinkingTemplate, `{"reasoning_parser":"kimi_k25"}`, "chat/completions", user, "True True  "},
		{thinkingTemplate, `{"reasoning_parser":"kimi_k25"}`, "chat/completions", user + `,"reasoning_effort":"none"`,
			"False False disabled "},
		{thinkingTemplate, `{"reasoning_parser":"kimi_k25"}`, "chat/completions",
			user + `,"chat_template_kwargs":{"thinking_mode":"adaptive"}`, "True True adaptive "},
		{thinkingTemplate, `{"reasoning_parser":"kimi_k25","runtime_data":{"default_thinking_mode":"disabled"}}`,
			"chat/completions", user, "False False disabled "},
		{thinkingTemplate, `{"runtime_data":{"default_thinking_mode":"enabled"}}`, "chat/completions", user,
			"True True enabled "},
		{thinkingTemplate, `{"runtime_data":{"default_thinking_mode":"enabled"}}`, "chat/completions",
			user + `,"chat_template_kwargs":{"thinking":false}`, "False False disabled "},
		{thinkingTemplate, `{"runtime_data":{"default_thinking_mode":"sometimes"}}`, "chat/completions", user, "   "},
		{thinkingTemplate, `{"tool_call_parser":"kimi_k3"}`, "chat/completions",
			user + `,"tool_choice":{"type":"function","function":{"name":"f"}}`, "False False  "},
		{thinkingTemplate, `{"reasoning_parser":"qwen3"}`, "messages", user, "True True  False"},
		{thinkingTemplate, `{"reasoning_parser":"qwen3"}`, "messages", user + `,"thinking":{"type":"disabled"}`, "   "},
		{thinkingTemplate, `{"reasoning_parser":"qwen3","runtime_data":{"default_thinking_mode":"disabled"}}`,
			"messages", user, "True True  False"},
		{thinkingTemplate, `{"runtime_data":{"default_thinking_mode":"disabled"}}`, "messages", user,
			"False False disabled "},
		{toolsTemplate, `{"exclude_tools_when_tool_choice_none":false}`, "chat/completions",
			user + `,"tool_choice":"none","tools":[{"type":"function","function":{"name":"f"}}]`,
			`[{"type": "function", "function": {"name": "f", "description": ""}}]`},
		{toolsTemplate, `{"exclude_tools_when_tool_choice_none":true}`, "chat/completions",
			user + `,"tool_choice":"none","tools":[{"type":"function","function":{"name":"f"}}]`, "None"},
		{callsTemplate, `{"tool_call_arguments_format":"json_object"}`, "chat/completions",
			called(`"{\"b\":1,\"a\": [1]}"`, `""`, `"[1]"`), `{"b": 1, "a": [1]}{}{}`},
		{callsTemplate, `{"tool_call_parser":"glm47"}`, "chat/completions",
			called(`"{\"b\":1}"`, `"{b"`, `"{\"c\":2}"`), `{"b": 1}{b{"c":2}`},
		{callsTemplate, `{}`, "chat/completions", called(`"{\"b\":1}"`), `{"b":1}`},
	} {
		settings, err := ParseDynamoSettings([]byte(c.runtimeConfig))
		if err != nil {
			t.Fatal(err)
		}
		payload := `{"model":"m","messages":` + c.fields + `}`
		request, err := body.ParseRequest("/v1/"+c.api, []byte(payload))
		if err != nil {
			t.Fatal(err)
		}
		m := dynamoModel(t, c.template)
		m.SetDynamo([]DynamoSettings{settings, settings})
		got, err := m.renderDynamo(t.Context(), request)
		if err != nil || got != c.want {
			t.Errorf("%s: %s\n got %q, %v\nwant %q", c.runtimeConfig, payload, got, err, c.want)
		}
	}
}

func TestDynamoSettingsThatAreNotFollowed(t *testing.T) {
	number := `[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f",` +
		`"arguments":"{\"b\":1.5}"}}]}]`
	for name, workers := range map[string][]DynamoSettings{
		"workers that differ": {{ReasoningParser: "qwen3"}, {}},
		"MiniMax's parser":    {{ToolCallParser: "minimax-m3-nom"}},
		"numbers as objects":  {{ArgumentsAsObjects: true}},
	} {
		m := dynamoModel(t, callsTemplate)
		m.SetDynamo(workers)
		if got, err := m.Tokenize(t.Context(), chatRequest(t, number)); !IsUnknown(err) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
		m.SetDynamo(nil)
		if _, err := m.Tokenize(t.Context(), chatRequest(t, number)); err != nil {
			t.Errorf("%s, gone: %v", name, err)
		}
	}
	for text, want := range map[string]string{
		`{"reasoning_parser":7}`: `reasoning_parser may not be a JSON number; write an object such as ` +
			`{"reasoning_parser": "kimi_k25"}`,
		`[1]`: `a JSON array is in the wrong place; write an object such as {"reasoning_parser": ` +
			`"kimi_k25"}`,
		`{x`: `not JSON: invalid character 'x' looking for beginning of object key string; write ` +
			`an object such as {"reasoning_parser": "kimi_k25"}`,
	} {
		if _, err := ParseDynamoSettings([]byte(text)); err == nil ||
			err.Error() != "prompt: Dynamo's runtime_config: "+want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
