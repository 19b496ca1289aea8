package prompt

import (
	"slices"
	"strings"

	"kvepp/prompt/values"
)

// fit returns the messages in the form that the template takes. It may change the given ones.
func (c *dynamoChat) fit(t *dynamoTemplate, messages []any) ([]any, error) {
	if t.demoteSystem {
		messages = demoteSystem(messages)
	}
	if t.mergeUsers {
		messages = mergeUsers(messages)
	}
	for _, item := range messages {
		message, _ := item.(*values.Dict)
		c.fitContent(message)
		if err := fitArguments(t, message); err != nil {
			return nil, err
		}
		if role, _ := message.Get("role"); role == "assistant" {
			fitReasoning(t, message)
		}
	}
	return messages, nil
}

// demoteSystem joins the leading system messages. Later ones become the user's.
func demoteSystem(messages []any) []any {
	leading := 0
	for leading < len(messages) && role(messages[leading]) == "system" {
		leading++
	}
	if leading > 1 {
		joinContents(messages[:leading])
		messages = slices.Delete(messages, 1, leading)
	}
	for _, message := range messages[min(1, len(messages)):] {
		if d, ok := message.(*values.Dict); ok && role(d) == "system" {
			d.Set("role", "user")
		}
	}
	return messages
}

// mergeUsers joins consecutive messages of the user.
func mergeUsers(messages []any) []any {
	var merged []any
	for i := 0; i < len(messages); {
		end := i + 1
		if role(messages[i]) == "user" {
			for end < len(messages) && role(messages[end]) == "user" {
				end++
			}
		}
		if end > i+1 {
			joinContents(messages[i:end])
		}
		merged = append(merged, messages[i])
		i = end
	}
	return merged
}

// joinContents sets the content of the first message to the joined contents of all, in linear time. The content then is
// the first message's last field.
func joinContents(messages []any) {
	var joined any
	var texts []string // of joined, while it is a string: those that are not empty
	var items []any    // of joined, while it is a list
	text := func() string { return strings.Join(texts, "\n\n") }
	for _, message := range messages {
		of, _ := message.(*values.Dict)
		next, _ := of.Get("content")
		switch joined.(type) {
		case nil:
			joined, texts, items = next, nil, nil
			switch next := next.(type) {
			case string:
				texts = appendText(nil, next)
			case *values.List:
				items = slices.Clone(next.Items)
			}
		case string:
			switch next := next.(type) {
			case string:
				texts = appendText(texts, next)
			case *values.List:
				items = nil
				if before := text(); before != "" {
					items = append(items, textPart(before))
				}
				joined, items = next, append(items, next.Items...)
			default:
				joined = nil
			}
		default:
			switch next := next.(type) {
			case string:
				if next != "" {
					items = append(items, textPart(next))
				}
			case *values.List:
				items = append(items, next.Items...)
			}
		}
	}
	switch joined.(type) {
	case string:
		joined = text()
	case *values.List:
		joined = values.NewList(items...)
	}
	target, _ := messages[0].(*values.Dict)
	swapRemove(target, "content")
	target.Set("content", joined)
}

// appendText appends a text that is not empty.
func appendText(texts []string, text string) []string {
	if text == "" {
		return texts
	}
	return append(texts, text)
}

// swapRemove removes a key and moves the last key to its place, like serde_json's maps.
func swapRemove(d *values.Dict, name string) {
	if _, ok := d.Get(name); !ok {
		return
	}
	var last string
	for key := range d.All() {
		last, _ = key.(string)
	}
	moved, _ := d.Get(last)
	kept := values.NewDict()
	for key, value := range d.All() {
		switch key {
		case name:
			if last != name {
				kept.Set(last, moved)
			}
		case last:
		default:
			if key, ok := key.(string); ok {
				kept.Set(key, value)
			}
		}
	}
	*d = *kept
}

// fitContent turns a string into parts, or text parts into a string joined by newlines, as the template wants. An empty
// list stays a list.
func (c *dynamoChat) fitContent(message *values.Dict) {
	content, _ := message.Get("content")
	switch content := content.(type) {
	case string:
		if c.wantsParts {
			message.Set("content", values.NewList(textPart(content)))
		}
	case *values.List:
		if c.wantsParts || len(content.Items) == 0 {
			return
		}
		if text, ok := joinTexts(content, "\n"); ok {
			message.Set("content", text)
		}
	}
}

// fitArguments parses the arguments of tool calls, unless the template takes strings, and those of a function_call.
// Arguments that are not JSON stay a string.
func fitArguments(t *dynamoTemplate, message *values.Dict) error {
	if calls, ok := get[*values.List](message, "tool_calls"); ok && !t.argumentsString {
		for _, item := range calls.Items {
			call, _ := item.(*values.Dict)
			if err := parseArguments(call, "function"); err != nil {
				return err
			}
		}
	}
	return parseArguments(message, "function_call")
}

// maxRustDepth is the deepest nesting of JSON that serde_json reads.
const maxRustDepth = 127

// parseArguments replaces the arguments of the function in a field by their value. Arguments that are not JSON stay.
func parseArguments(of *values.Dict, key string) error {
	function, _ := get[*values.Dict](of, key)
	text, ok := get[string](function, "arguments")
	if !ok {
		return nil
	}
	parsed, malformed, err := readArguments(text)
	if err != nil || malformed != nil {
		return err
	}
	if err := checkRustJSON(text, parsed); err != nil {
		return err
	}
	function.Set("arguments", parsed)
	return nil
}

// checkRustJSON returns an error for arguments that serde_json does not read, or reads as other numbers. parsed is the
// value of text.
func checkRustJSON(text string, parsed any) error {
	if strings.Count(text, "{")+strings.Count(text, "[") > maxRustDepth && nesting(parsed) > maxRustDepth {
		return errNotReproduced("arguments nested this deep")
	}
	return values.CheckRustNumbers(parsed)
}

// fitReasoning fits an assistant's reasoning to the template. If the template does not read reasoning, it moves into
// the content, between <think> tags. If the template reads one string, its segments are joined.
func fitReasoning(t *dynamoTemplate, message *values.Dict) {
	reasoning, _ := message.Get("reasoning_content")
	var segments []string
	switch r := reasoning.(type) {
	case string:
		segments = []string{r}
	case *values.List:
		for _, item := range r.Items {
			if s, _ := item.(string); s != "" {
				segments = append(segments, s)
			}
		}
		if t.reasoning && t.reasoningString {
			message.Set("reasoning_content", strings.Join(segments, "\n"))
			return
		}
	}
	var thoughts strings.Builder
	for _, s := range segments {
		if s != "" {
			thoughts.WriteString("<think>" + s + "</think>")
		}
	}
	thought := thoughts.String()
	if t.reasoning || thought == "" {
		return
	}
	switch content, _ := message.Get("content"); c := content.(type) {
	case nil:
		message.Set("content", thought)
	case string:
		message.Set("content", thought+c)
	case *values.List:
		message.Set("content", values.NewList(append([]any{textPart(thought)}, c.Items...)...))
	}
	swapRemove(message, "reasoning_content")
}
