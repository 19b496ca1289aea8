package tokenizer

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// DynamoSettings are the settings of a Dynamo worker, told in the runtime_config of its model card, that change the
// prompts that the frontend makes for it. The zero value is that of a worker started without them.
type DynamoSettings struct {
	ReasoningParser, ToolCallParser string // names; "" for none
	DefaultThinkingMode             string // "enabled", "disabled" or ""
	// ArgumentsAsObjects: arguments of earlier tool calls reach templates as objects, in every template.
	ArgumentsAsObjects bool
	// KeepTools: tools reach the template in spite of a tool_choice of none.
	KeepTools bool
}

// ParseDynamoSettings reads a card's runtime_config, a JSON object; fields that change no prompt are not looked at.
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
				"tokenizer: Dynamo's runtime_config: %w",
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

// SetDynamo tells the settings of the Dynamo workers that serve the model. Without any, those of Options hold; if they
// differ, no chat's ids are known. It may be called while requests are tokenized.
func (m *Model) SetDynamo(workers []DynamoSettings) { m.dynamoWorkers.Store(&workers) }

// dynamoSettings returns the settings by which the frontend renders now.
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

// dynamoThinks are the reasoning parsers with which the model is told to think unless the request says otherwise.
var dynamoThinks = []string{"kimi_k25", "kimi_k3", "kimi-k3"}

// defaultThinking applies the worker's settings to a request's template variables, where the client left them open.
func (s *DynamoSettings) defaultThinking(request *apibody.Request, kwargs *chattemplate.Dict) {
	if request.API == apibody.Messages && s.ReasoningParser != "" {
		asked, _ := get[*chattemplate.Dict](request.Body, "thinking")
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

func setDefault(d *chattemplate.Dict, key string, value any) {
	if _, given := d.Get(key); !given {
		d.Set(key, value)
	}
}

// lastWord is what the parsers make of the variables when the request and the defaults have said what they want;
// decided says that these named whether to think.
func (s *DynamoSettings) lastWord(request *apibody.Request, kwargs *chattemplate.Dict, decided bool) {
	think := func(on bool) {
		kwargs.Set(thinking, on)
		kwargs.Set(enableThinking, on)
	}
	if !decided && slices.Contains(dynamoThinks, s.ReasoningParser) {
		think(true)
	}
	choice, _ := request.Body.Get("tool_choice")
	if _, named := choice.(*chattemplate.Dict); named &&
		(s.ToolCallParser == "kimi_k3" || s.ToolCallParser == "kimi-k3") {
		think(false)
	}
}

// argumentsAsObjects parses the arguments of all tool calls of a chat's messages: what is no object becomes an empty
// one. At arguments that are no JSON the frontend stops, and leaves those behind as they are.
func argumentsAsObjects(messages []any) error {
	for _, item := range messages {
		message, _ := item.(*chattemplate.Dict)
		calls, _ := get[*chattemplate.List](message, "tool_calls")
		if calls == nil {
			continue
		}
		for _, item := range calls.Items {
			call, _ := item.(*chattemplate.Dict)
			function, _ := get[*chattemplate.Dict](call, "function")
			text, ok := get[string](function, "arguments")
			if !ok {
				continue
			}
			object := chattemplate.NewDict()
			if text != "" {
				parsed, malformed, err := readArguments(text)
				if err != nil || malformed != nil {
					return err
				}
				if err := checkArguments(text, parsed); err != nil {
					return err
				}
				if given, ok := parsed.(*chattemplate.Dict); ok {
					object = given
				}
			}
			function.Set("arguments", object)
		}
	}
	return nil
}

// checkArguments refuses what the frontend may print otherwise: numbers that it may keep as text, because it seeks them
// by their key in the arguments' text.
func checkArguments(text string, arguments any) error {
	if err := checkRustJSON(text, arguments); err != nil {
		return err
	}
	object, _ := arguments.(*chattemplate.Dict)
	for key, value := range object.All() {
		name, _ := key.(string)
		quoted, err := chattemplate.RustJSON(name)
		if err != nil {
			return err
		}
		switch value.(type) {
		case bool, nil, string, *chattemplate.List, *chattemplate.Dict:
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
