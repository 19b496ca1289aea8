package prompt

import (
	"slices"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How SGLang turns a request to Anthropic's /v1/messages into a chat.
// Source: SGLang 0.5.21 to 0.5.23, entrypoints/anthropic/protocol and serving, parser/template_detection.

// chatOfMessagesSGLang returns the chat that SGLang makes of a request to Messages.
func (m *Model) chatOfMessagesSGLang(request *body.Request) (*body.Request, error) {
	if field(request.Body, "cache_salt") != nil {
		return nil, errNotReproduced("a cache_salt in messages on SGLang, which does not take one there,")
	}
	c := &messagesChat{rules: &sglangMessagesRules, nativeReasoning: m.native != nil && !m.native.LikeTemplate}
	var err error
	if c.mergeSystem, err = m.messages.mergeSystem(); err != nil {
		return nil, err
	}
	if err := c.read(request.Body); err != nil {
		return nil, err
	}
	if len(c.messages) == 0 {
		return nil, errNotReproduced("messages that are all empty")
	}
	payload := dict("model", request.Model, "messages", values.NewList(c.messages...))
	config, _ := get[*values.Dict](request.Body, "output_config")
	if effort := field(config, "effort"); effort == "xhigh" {
		payload.Set("reasoning_effort", "max")
	} else if effort != nil {
		payload.Set("reasoning_effort", effort)
	}
	if thinking, _ := get[*values.Dict](request.Body, "thinking"); thinking != nil {
		payload.Set("thinking", thinking) // see sglangThinking
	}
	tools, names, err := m.release.rules.sglangMessagesTools(request.Body)
	if err != nil {
		return nil, err
	}
	if tools != nil {
		payload.Set("tools", tools)
	}
	if choice, _ := get[*values.Dict](request.Body, "tool_choice"); choice != nil {
		kind, _ := get[string](choice, "type")
		name, _ := get[string](choice, "name")
		switch {
		case kind == "none":
			payload.Set("tool_choice", "none")
		case kind == "auto":
		case tools == nil || kind == "tool" && !slices.Contains(names, name):
			return nil, errRefused("a tool_choice without its tool")
		case kind == "tool":
			payload.Set("tool_choice", dict("type", "function", "function", dict("name", name)))
		}
	}
	chat := chatOf(request, payload)
	chat.API = body.Messages // sglangKwargs derives no thinking from the effort of such a chat
	chat.HasMedia = c.hasMedia
	return chat, nil
}

// serverToolPrefixes begin the types of the tools that Anthropic runs itself. SGLang leaves these out.
var serverToolPrefixes = []string{"web_search_", "computer_", "bash_", "text_editor_"}

// sglangMessagesTools returns the tools in the form of the chat API, and their names; nil without tools.
func (r rules) sglangMessagesTools(body *values.Dict) (*values.List, []string, error) {
	given := field(body, "tools")
	list, ok := given.(*values.List)
	if given != nil && !ok {
		return nil, nil, errRefused("tools is not a list")
	}
	var tools []any
	var names []string
	for i := range list.Len() {
		tool, _ := list.Items[i].(*values.Dict)
		kind, _ := get[string](tool, "type")
		runsAtAnthropic := func(prefix string) bool { return strings.HasPrefix(kind, prefix) }
		if slices.ContainsFunc(serverToolPrefixes, runsAtAnthropic) {
			continue
		}
		schema, ok := inputSchema(tool)
		name, named := get[string](tool, "name")
		if !ok || !named || kind != "" && kind != "custom" {
			return nil, nil, errRefused("tools[%d] is not a tool with a name and an input_schema", i)
		}
		description, _ := get[string](tool, "description")
		function := dict("name", name, "description", description, "parameters", schema)
		if r.toolsAsSent {
			strict, given := tool.Get("strict")
			if given && strict == nil {
				return nil, nil, errRefused("tools[%d].strict is null", i)
			}
			if !given {
				strict = false
			}
			function.Set("strict", strict)
		}
		tools = append(tools,
			dict("type", "function", "defer_loading", field(tool, "defer_loading"), "function", function))
		names = append(names, name)
	}
	if tools == nil {
		return nil, nil, nil
	}
	return values.NewList(tools...), names, nil
}

// thinkingEnabled reports whether a request to Messages that has the field thinking turns it on.
func thinkingEnabled(request *body.Request) bool {
	thinking, _ := get[*values.Dict](request.Body, "thinking")
	return field(thinking, "type") != "disabled"
}

// sglangThinking returns the variables that a request's thinking may give the template. SGLang chooses one of them by
// its --reasoning-parser and by what it detects in the template. The ids are known only if all render the same text.
func sglangThinking(request *body.Request, source string) []*values.Dict {
	thinking, _ := get[*values.Dict](request.Body, "thinking")
	if thinking == nil || request.API != body.Messages {
		return nil
	}
	enabled := thinkingEnabled(request)
	var all []*values.Dict
	if strings.Contains(source, "thinking") {
		all = append(all, dict("enable_thinking", enabled), dict("thinking", enabled),
			dict("enable_thinking", enabled, "thinking", enabled))
	}
	if field(request.Body, "reasoning_effort") == nil && strings.Contains(source, "reasoning_effort") {
		if enabled {
			return append(all, dict("reasoning_effort", "medium"), dict("reasoning_effort", "high"))
		}
		return append(all, dict("reasoning_effort", "none"), dict("reasoning_effort", "no_think"))
	}
	return all
}

var sglangMessagesRules = messagesRules{
	systemTexts: func(content any) ([]string, error) {
		switch content := content.(type) {
		case string:
			if strings.TrimFunc(content, jinja.IsSpace) == "" {
				return nil, nil
			}
			return []string{content}, nil
		case *values.List:
			return sglangSystemBlocks(content)
		}
		return nil, errBlocks("system")
	},
	lateSystemTexts: func(content any) (texts []string, err error) {
		switch content := content.(type) {
		case string:
			texts = []string{content}
		case *values.List:
			texts, err = sglangSystemBlocks(content)
		default:
			err = errBlocks("content")
		}
		for i := range texts {
			texts[i] = strings.TrimFunc(texts[i], jinja.IsSpace)
		}
		return slices.DeleteFunc(texts, func(text string) bool { return text == "" }), err
	},
	separator: "\n",
	addBlocks: addBlocksSGLang,
}

// sglangSystemBlocks returns the texts of a system prompt's blocks that are not empty.
func sglangSystemBlocks(blocks *values.List) ([]string, error) {
	var texts []string
	for _, item := range blocks.Items {
		block, _ := item.(*values.Dict)
		switch kind, _ := get[string](block, "type"); {
		case kind == "text":
			text, err := sglangBlockText(block)
			if err != nil {
				return nil, err
			}
			if text != "" {
				texts = append(texts, text)
			}
		case !slices.Contains(sglangBlockTypes, kind):
			return nil, errRefused("a block of type %q", kind)
		default:
			return nil, errNotReproduced("a system prompt with a block of type " + kind)
		}
	}
	return texts, nil
}

// sglangBlockText returns the text of a text block.
func sglangBlockText(block *values.Dict) (string, error) {
	text, ok := get[string](block, "text")
	if !ok {
		return "", errRefused("a text block without text")
	}
	return text, nil
}

// sglangBlockTypes are the types of content blocks.
var sglangBlockTypes = []string{
	"text", "image", "tool_use", "tool_result", "tool_reference", "search_result", "thinking", "redacted_thinking",
}

// addBlocksSGLang adds the messages that SGLang makes of one message. A user's tool results become messages of their
// own, in their place among the other blocks.
func addBlocksSGLang(c *messagesChat, role string, blocks *values.List) error {
	var parts, calls []any
	var reasoning []string
	for _, item := range blocks.Items {
		block, _ := item.(*values.Dict)
		switch kind, _ := get[string](block, "type"); kind {
		case "text":
			text, err := sglangBlockText(block)
			if err != nil {
				return err
			}
			parts = append(parts, textPart(text))
		case "image":
			if sglangHasImage(block) {
				parts = append(parts, c.imagePart())
			}
		case "thinking":
			text, ok := get[string](block, "thinking")
			if ok && c.nativeReasoning && role == "assistant" {
				if text != "" {
					reasoning = append(reasoning, text)
				}
				continue
			}
			if !ok || text != "" && role == "assistant" {
				return errNotReproduced("thinking in a message on SGLang, which its --reasoning-parser writes,")
			}
		case "redacted_thinking":
			if role == "assistant" {
				return errRefused("redacted_thinking")
			}
		case "tool_use":
			call, err := sglangToolUse(block)
			if err != nil {
				return err
			}
			calls = append(calls, call)
		case "tool_result":
			content, text, err := sglangToolResult(c, block)
			if err != nil {
				return err
			}
			if role != "user" {
				parts = append(parts, textPart("Tool result: "+text))
				continue
			}
			if parts != nil {
				c.messages = append(c.messages, dict("role", "user", "content", contentOf(parts)))
				parts = nil
			}
			id, _ := get[string](block, "tool_use_id")
			if id == "" {
				id, _ = get[string](block, "id")
			}
			c.messages = append(c.messages, dict("role", "tool", "tool_call_id", id, "content", content))
		case "tool_reference":
		case "search_result":
			return errNotReproduced("a search result")
		default:
			return errRefused("a block of type %q", kind)
		}
	}
	converted := dict("role", role)
	if reasoning != nil {
		converted.Set("reasoning_content", strings.Join(reasoning, "\n"))
	}
	if calls != nil {
		converted.Set("tool_calls", values.NewList(calls...))
	}
	switch {
	case parts != nil:
		converted.Set("content", contentOf(parts))
	case calls != nil:
	case role == "user":
		return nil
	default:
		converted.Set("content", "")
	}
	c.messages = append(c.messages, converted)
	return nil
}

// sglangHasImage reports whether an image block holds an image.
func sglangHasImage(block *values.Dict) bool {
	source, _ := get[*values.Dict](block, "source")
	key := "url"
	if field(source, "type") == "base64" {
		key = "data"
	}
	text, _ := get[string](source, key)
	return text != ""
}

// sglangToolUse returns a tool use as a tool call of the chat API.
func sglangToolUse(block *values.Dict) (any, error) {
	id, _ := get[string](block, "id")
	name, named := get[string](block, "name")
	input, given := block.Get("input")
	object, ok := input.(*values.Dict)
	switch {
	case id == "":
		return nil, errNotReproduced("a tool use without id") // SGLang makes a random one
	case !named || given && !ok:
		return nil, errRefused("a tool use without a name and an input that is an object")
	case object == nil:
		object = values.NewDict()
	case hasBigInteger(object):
		return nil, errBigInteger
	}
	return functionCall(id, name, object), nil
}

// sglangToolResult returns a tool result's content, as a tool's message has it, and its text.
func sglangToolResult(c *messagesChat, block *values.Dict) (content any, text string, err error) {
	given := field(block, "content")
	list, isList := given.(*values.List)
	text, isText := given.(string)
	switch {
	case given == nil || isText:
		return text, text, nil
	case !isList:
		return nil, "", errBlocks("a tool result's content")
	}
	var parts []any
	var texts []string
	for _, item := range list.Items {
		part, _ := item.(*values.Dict)
		switch kind, _ := get[string](part, "type"); {
		case kind == "text":
			text, err := sglangBlockText(part)
			if err != nil {
				return nil, "", err
			}
			if text != "" {
				texts = append(texts, text)
				parts = append(parts, textPart(text))
			}
		case kind == "image":
			if sglangHasImage(part) {
				parts = append(parts, c.imagePart())
			}
		case kind == "tool_reference" || kind == "search_result":
			return nil, "", errNotReproduced("a tool result of type " + kind)
		case !slices.Contains(sglangBlockTypes, kind):
			return nil, "", errRefused("a block of type %q", kind)
		}
	}
	text = strings.Join(texts, "\n")
	if parts == nil {
		return "", text, nil
	}
	return contentOf(parts), text, nil
}
