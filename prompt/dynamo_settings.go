package prompt

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// DynamoSettings are the settings of a Dynamo worker that change the prompts that the frontend makes for it. They stand
// in the runtime_config of the worker's model card. The zero value is that of a worker started without them.
type DynamoSettings struct {
	ReasoningParser, ToolCallParser string // names; "" for none
	DefaultThinkingMode             string // "enabled", "disabled" or ""
	// ArgumentsAsObjects: every template gets the arguments of earlier tool calls as objects.
	ArgumentsAsObjects bool
	// KeepTools: the template gets the tools even if tool_choice is none.
	KeepTools bool
}

// ParseDynamoSettings reads a card's runtime_config, a JSON object. It ignores fields that change no prompt.
// Source: dynamo-llm 1.6.1, local_model/runtime_config and preprocessor.
func ParseDynamoSettings(runtimeConfig []byte) (DynamoSettings, error) {
	var c struct {
		ReasoningParser string `json:"reasoning_parser"`
		ToolCallParser  string `json:"tool_call_parser"`
		ArgumentsFormat string `json:"tool_call_arguments_format"`
		ExcludeTools    *bool  `json:"exclude_tools_when_tool_choice_none"`
		RuntimeData     struct {
			DefaultThinkingMode any `json:"default_thinking_mode"`
		} `json:"runtime_data"`
	}
	if len(runtimeConfig) > 0 {
		if err := json.Unmarshal(runtimeConfig, &c); err != nil {
			return DynamoSettings{}, fmt.Errorf(
				"prompt: Dynamo's runtime_config: %w",
				inJSON(err, `{"reasoning_parser": "kimi_k25"}`),
			)
		}
	}
	s := DynamoSettings{
		ReasoningParser: c.ReasoningParser, ToolCallParser: c.ToolCallParser,
		ArgumentsAsObjects: c.ArgumentsFormat == "json_object" || c.ToolCallParser == "glm47",
		KeepTools:          c.ExcludeTools != nil && !*c.ExcludeTools,
	}
	if c.RuntimeData.DefaultThinkingMode == "enabled" || c.RuntimeData.DefaultThinkingMode == "disabled" {
		s.DefaultThinkingMode = fmt.Sprint(c.RuntimeData.DefaultThinkingMode)
	}
	return s, nil
}

// SetDynamo sets the settings of the Dynamo workers that serve the model. Without workers, Options.Dynamo applies. If
// the workers differ, chats have no known ids. It may be called concurrently with Tokenize.
func (m *Model) SetDynamo(workers []DynamoSettings) { m.dynamoWorkers.Store(&workers) }

// dynamoSettings returns the settings that the frontend uses now.
func (m *Model) dynamoSettings() (DynamoSettings, error) {
	s := m.options.Dynamo
	if workers := m.dynamoWorkers.Load(); workers != nil && len(*workers) > 0 {
		s = (*workers)[0]
		if slices.ContainsFunc(*workers, func(other DynamoSettings) bool { return other != s }) {
			return s, errNotReproduced("a chat of workers whose cards differ in settings that change prompts")
		}
	}
	for _, parser := range []string{s.ReasoningParser, s.ToolCallParser} {
		if strings.HasPrefix(strings.ReplaceAll(parser, "-", "_"), "minimax_m3") {
			return s, errNotReproduced("a chat with the parser " + parser)
		}
	}
	return s, nil
}

// dynamoThinkingParsers are the reasoning parsers with which thinking is on unless the request says otherwise.
var dynamoThinkingParsers = []string{"kimi_k25", "kimi_k3", "kimi-k3"}

// defaultThinking sets the variables of thinking by the worker's settings, where the client has not set them.
func (s *DynamoSettings) defaultThinking(request *body.Request, kwargs *values.Dict) {
	if request.API == body.Messages && s.ReasoningParser != "" {
		asked, _ := get[*values.Dict](request.Body, "thinking")
		if kind, _ := asked.Get("type"); kind != "disabled" {
			setDefault(kwargs, enableThinking, true)
			setDefault(kwargs, "truncate_history_thinking", false)
		}
	}
	for _, name := range []string{thinking, enableThinking, thinkingMode, "reasoning_effort"} {
		if _, given := kwargs.Get(name); given {
			return
		}
	}
	if s.DefaultThinkingMode != "" {
		kwargs.Set(thinking, s.DefaultThinkingMode == "enabled")
		kwargs.Set(enableThinking, s.DefaultThinkingMode == "enabled")
		kwargs.Set(thinkingMode, s.DefaultThinkingMode)
	}
}

// setDefault sets a field that the object does not have.
func setDefault(d *values.Dict, key string, value any) {
	if _, given := d.Get(key); !given {
		d.Set(key, value)
	}
}

// applyParsers changes the variables of thinking as the worker's parsers do, after the request and the defaults.
// decided says that these have decided whether to think.
func (s *DynamoSettings) applyParsers(request *body.Request, kwargs *values.Dict, decided bool) {
	think := func(on bool) {
		kwargs.Set(thinking, on)
		kwargs.Set(enableThinking, on)
	}
	if !decided && slices.Contains(dynamoThinkingParsers, s.ReasoningParser) {
		think(true)
	}
	choice, _ := request.Body.Get("tool_choice")
	if _, named := choice.(*values.Dict); named &&
		(s.ToolCallParser == "kimi_k3" || s.ToolCallParser == "kimi-k3") {
		think(false)
	}
}

// argumentsAsObjects parses the arguments of all tool calls of a chat's messages. Arguments other than an object become
// an empty object. Like the frontend, it stops at arguments that are not JSON and leaves the later ones unchanged.
func argumentsAsObjects(messages []any) error {
	for _, item := range messages {
		message, _ := item.(*values.Dict)
		calls, _ := get[*values.List](message, "tool_calls")
		if calls == nil {
			continue
		}
		for _, item := range calls.Items {
			call, _ := item.(*values.Dict)
			function, _ := get[*values.Dict](call, "function")
			text, ok := get[string](function, "arguments")
			if !ok {
				continue
			}
			object := values.NewDict()
			if text != "" {
				parsed, malformed, err := readArguments(text)
				if err != nil || malformed != nil {
					return err
				}
				if err := checkArguments(text, parsed); err != nil {
					return err
				}
				if given, ok := parsed.(*values.Dict); ok {
					object = given
				}
			}
			function.Set("arguments", object)
		}
	}
	return nil
}

// checkArguments returns an error for arguments that the frontend may print otherwise. It keeps some numbers as text,
// which it finds by their key in the arguments' text.
func checkArguments(text string, arguments any) error {
	if err := checkRustJSON(text, arguments); err != nil {
		return err
	}
	object, _ := arguments.(*values.Dict)
	for key, value := range object.All() {
		name, _ := key.(string)
		quoted, err := values.RustJSON(name)
		if err != nil {
			return err
		}
		switch value.(type) {
		case bool, nil, string, *values.List, *values.Dict:
			continue
		case int64:
			if at := quoted + ":"; strings.Count(text, at) <= 1 && !strings.Contains(text, "-0") {
				continue
			}
		}
		return errNotReproduced("a number in a tool call's arguments as an object")
	}
	return nil
}
