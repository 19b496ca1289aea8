package prompt

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"kvepp/prompt/values"
)

// dynamoMessages returns new messages with the fields that the frontend's types have, in their order and without nulls.
func dynamoMessages(list *values.List) ([]any, error) {
	messages := make([]any, len(list.Items))
	for i, item := range list.Items {
		message, _ := item.(*values.Dict)
		typed, err := dynamoMessage(message)
		if err != nil {
			return nil, fmt.Errorf("%w (message %d)", err, i)
		}
		messages[i] = typed
	}
	return messages, nil
}

// dynamoMessage returns one message of dynamoMessages.
func dynamoMessage(message *values.Dict) (*values.Dict, error) {
	role, _ := get[string](message, "role")
	typed := dict("role", role)
	content := field(message, "content")
	for _, key := range []string{"tools", "partial"} {
		if field(message, key) != nil {
			return nil, refused("'" + key + "' in a message")
		}
	}
	if content != nil || role != "assistant" && role != "function" {
		parts, err := dynamoContent(content, role == "user")
		if err != nil {
			return nil, err
		}
		typed.Set("content", parts)
	}
	switch role {
	case "developer", "system", "user":
		return typed, copyStrings(typed, message, "name")
	case "tool":
		if err := copyStrings(typed, message, "tool_call_id"); err != nil {
			return nil, err
		}
		if _, ok := typed.Get("tool_call_id"); !ok {
			return nil, refused("a tool's message without tool_call_id")
		}
		return typed, nil
	case "assistant":
		return typed, dynamoAssistant(typed, message)
	}
	return nil, errNotReproduced(fmt.Sprintf("a message of the role %q", role))
}

// copyStrings copies the named fields, which must be strings, null or absent. It leaves nulls out.
func copyStrings(to, from *values.Dict, names ...string) error {
	for _, name := range names {
		v, _ := from.Get(name)
		switch v.(type) {
		case nil:
		case string:
			to.Set(name, v)
		default:
			return refused("a '" + name + "' that is not a string")
		}
	}
	return nil
}

// dynamoContent returns a message's content: a text, or a list of parts. media allows parts of images, videos and
// sound.
func dynamoContent(content any, media bool) (any, error) {
	list, ok := content.(*values.List)
	if !ok {
		if text, ok := content.(string); ok {
			return text, nil
		}
		return nil, refused("content that is neither a string nor a list of parts")
	}
	parts := make([]any, len(list.Items))
	for i, item := range list.Items {
		part, _ := item.(*values.Dict)
		kind, _ := get[string](part, "type")
		text, ok := get[string](part, "text")
		if held := mediaKinds[kind]; media && strings.HasSuffix(kind, "_url") && held != "" {
			parts[i] = dict("type", held)
			continue
		}
		if marked, _ := part.Get("prompt_cache_breakpoint"); kind != "text" || !ok || marked != nil {
			return nil, errNotReproduced("a content part other than text")
		}
		parts[i] = textPart(text)
	}
	return values.NewList(parts...), nil
}

// dynamoAssistant adds the further fields of an assistant's message.
func dynamoAssistant(typed, message *values.Dict) error {
	if field(message, "reasoning_content") != nil && field(message, "reasoning") != nil {
		return refused("both reasoning_content and reasoning")
	}
	switch r := firstField(message, "reasoning_content", "reasoning").(type) {
	case nil:
	case string:
		typed.Set("reasoning_content", r)
	case *values.List:
		for _, item := range r.Items {
			if _, ok := item.(string); !ok {
				return refused("reasoning that is not a list of strings")
			}
		}
		typed.Set("reasoning_content", values.NewList(slices.Clone(r.Items)...))
	default:
		return refused("reasoning that is neither a string nor a list of strings")
	}
	if err := copyStrings(typed, message, "refusal", "name"); err != nil {
		return err
	}
	if field(message, "audio") != nil {
		return errNotReproduced("audio")
	}
	if v := field(message, "tool_calls"); v != nil {
		calls, err := dynamoToolCalls(v)
		if err != nil {
			return err
		}
		typed.Set("tool_calls", calls)
	}
	if v := field(message, "function_call"); v != nil {
		function, _ := v.(*values.Dict)
		typedFunction, err := dynamoFunctionCall(function)
		if err != nil {
			return err
		}
		typed.Set("function_call", typedFunction)
	}
	return nil
}

// dynamoToolCalls returns an assistant's tool calls.
func dynamoToolCalls(value any) (*values.List, error) {
	given, ok := value.(*values.List)
	if !ok {
		return nil, refused("tool_calls that are not a list")
	}
	calls := make([]any, len(given.Items))
	for i, item := range given.Items {
		call, _ := item.(*values.Dict)
		id, hasID := get[string](call, "id")
		kind := field(call, "type")
		function, isObject := get[*values.Dict](call, "function")
		if !hasID || !isObject || kind != nil && kind != "function" {
			return nil, refused("a tool call that is not {id, type: function, function}")
		}
		typedFunction, err := dynamoFunctionCall(function)
		if err != nil {
			return nil, err
		}
		calls[i] = dict("id", id, "type", "function", "function", typedFunction)
	}
	return values.NewList(calls...), nil
}

// dynamoFunctionCall returns a function's call with arguments as a string of JSON.
func dynamoFunctionCall(function *values.Dict) (*values.Dict, error) {
	name, ok := get[string](function, "name")
	if !ok {
		return nil, refused("a function call without a name")
	}
	arguments, _ := function.Get("arguments")
	if object, isObject := arguments.(*values.Dict); isObject {
		text, err := values.RustJSON(object)
		if err != nil {
			return nil, err
		}
		arguments = text
	}
	if _, ok := arguments.(string); !ok {
		return nil, refused("arguments that are neither a string nor an object")
	}
	return dict("name", name, "arguments", arguments), nil
}

// dynamoTools returns the tools with the fields that the frontend knows. For templates that expect them, the frontend
// adds a description, and a type and properties in parameters.
func dynamoTools(list *values.List) (*values.List, error) {
	if list == nil {
		return nil, nil
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](tool, "function")
		name, named := get[string](function, "name")
		if kind, _ := tool.Get("type"); kind != "function" || !named {
			return nil, refused("a tool that is not {type: function, function: {name}}")
		}
		typed := dict("name", name)
		if err := copyStrings(typed, function, "description"); err != nil {
			return nil, err
		}
		if v, _ := function.Get("parameters"); v != nil {
			if err := values.CheckRustNumbers(v); err != nil {
				return nil, err
			}
			typed.Set("parameters", dynamoParameters(v))
		}
		switch strict, _ := function.Get("strict"); strict.(type) {
		case nil:
		case bool:
			typed.Set("strict", strict)
		default:
			return nil, refused("a 'strict' that is not a boolean")
		}
		if _, ok := typed.Get("description"); !ok {
			typed.Set("description", "")
		}
		tools[i] = dict("type", "function", "function", typed)
	}
	return values.NewList(tools...), nil
}

// dynamoParameters returns a function's parameters with type and properties.
func dynamoParameters(v any) any {
	parameters, ok := v.(*values.Dict)
	if !ok {
		return v
	}
	_, typed := parameters.Get("type")
	_, listed := parameters.Get("properties")
	if typed && listed {
		return parameters
	}
	parameters = parameters.Clone()
	if !typed {
		parameters.Set("type", "object")
	}
	if !listed {
		parameters.Set("properties", values.NewDict())
	}
	return parameters
}

// dynamoTag puts continueTag at the end of the final message.
func dynamoTag(messages []any) error {
	last, _ := messages[len(messages)-1].(*values.Dict)
	content, _ := last.Get("content")
	switch c := content.(type) {
	case string:
		if c != "" {
			last.Set("content", c+continueTag)
			return nil
		}
	case *values.List:
		for _, item := range slices.Backward(c.Items) {
			part, _ := item.(*values.Dict)
			if text, _ := get[string](part, "text"); text != "" {
				part.Set("text", text+continueTag)
				return nil
			}
		}
	}
	return errNotContinued
}

// dynamoCut returns the text before continueTag. If the template trimmed the message, it also trims the result.
func dynamoCut(text string) (string, error) {
	at := strings.LastIndex(text, strings.TrimRight(continueTag, " "))
	switch {
	case at < 0:
		return "", errNotContinued
	case strings.HasPrefix(text[at:], continueTag):
		return text[:at], nil
	}
	return strings.TrimRightFunc(text[:at], unicode.IsSpace), nil
}
