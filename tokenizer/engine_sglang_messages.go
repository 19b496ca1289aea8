package tokenizer

import (
	"fmt"
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// What SGLang makes of a request to Anthropic's /v1/messages: a chat.
// Source: SGLang 0.5.21, entrypoints/anthropic/protocol and serving, parser/template_detection.

// mergesSystemSGLang reports whether system messages in the middle join the one at the front: unless the template shows
// one.
func (m *Model) mergesSystemSGLang() (bool, error) {
	if m.chat == nil || m.chat.source == "" || strings.Contains(m.chat.source, "endgeneration") {
		return true, nil
	}
	plain, err := chattemplate.Compile("default", plainNames.Replace(m.chat.source))
	if err != nil {
		return false, fmt.Errorf("tokenizer: chat template: %w", err)
	}
	const late = "__late_system_message__"
	turn := func(role, text string) any { return dict("role", role, "content", text) }
	messages := chattemplate.NewList(turn("system", "t"), turn("user", "t"), turn("system", late), turn("user", "t"))
	text, failed, err := probe(plain, dict("messages", messages, "add_generation_prompt", false))
	return failed || !strings.Contains(text, late), err
}

// chatOfMessagesSGLang returns the chat of a request to Messages.
func (m *Model) chatOfMessagesSGLang(request *apibody.Request) (*apibody.Request, error) {
	if salt, _ := request.Body.Get("cache_salt"); salt != nil {
		return nil, errNotReproduced("a cache_salt in messages on SGLang, which does not take one there,")
	}
	merge, err := m.messages.mergeSystem()
	if err != nil {
		return nil, err
	}
	c := &sglangAnthropic{merge: merge}
	if err := c.read(request.Body); err != nil {
		return nil, err
	}
	if len(c.messages) == 0 {
		return nil, errNotReproduced("messages that are all empty")
	}
	body := dict("model", request.Model, "messages", chattemplate.NewList(c.messages...))
	if config, _ := get[*chattemplate.Dict](request.Body, "output_config"); config != nil {
		if effort, _ := config.Get("effort"); effort == "xhigh" {
			body.Set("reasoning_effort", "max")
		} else if effort != nil {
			body.Set("reasoning_effort", effort)
		}
	}
	if thinking, _ := get[*chattemplate.Dict](request.Body, "thinking"); thinking != nil {
		body.Set("thinking", thinking) // see sglangThinking
	}
	tools, names, err := sglangAnthropicTools(request.Body)
	if err != nil {
		return nil, err
	}
	if tools != nil {
		body.Set("tools", tools)
	}
	if choice, _ := get[*chattemplate.Dict](request.Body, "tool_choice"); choice != nil {
		kind, _ := get[string](choice, "type")
		name, _ := get[string](choice, "name")
		switch {
		case kind == "none":
			body.Set("tool_choice", "none")
		case kind == "auto":
		case tools == nil || kind == "tool" && !slices.Contains(names, name):
			return nil, errRefused("a tool_choice without its tool")
		case kind == "tool":
			body.Set("tool_choice", dict("type", "function", "function", dict("name", name)))
		}
	}
	chat := chatOf(request, body)
	chat.API = apibody.Messages // whose effort says nothing of thinking: see sglangKwargs
	chat.HasMedia = c.media
	return chat, nil
}

// serverTools begin the types of tools that Anthropic runs itself; SGLang leaves them out.
var serverTools = []string{"web_search_", "computer_", "bash_", "text_editor_"}

// sglangAnthropicTools returns the tools as a chat has them, and their names; nil without.
func sglangAnthropicTools(body *chattemplate.Dict) (*chattemplate.List, []string, error) {
	given, _ := body.Get("tools")
	list, ok := given.(*chattemplate.List)
	if given != nil && !ok {
		return nil, nil, errRefused("tools is not a list")
	}
	var tools []any
	var names []string
	for i := range list.Len() {
		tool, _ := list.Items[i].(*chattemplate.Dict)
		kind, _ := get[string](tool, "type")
		if slices.ContainsFunc(serverTools, func(begin string) bool { return strings.HasPrefix(kind, begin) }) {
			continue
		}
		schema, ok := get[*chattemplate.Dict](tool, "input_schema")
		name, named := get[string](tool, "name")
		if !ok || !named || kind != "" && kind != "custom" {
			return nil, nil, errRefused("tools[%d] is no tool with a name and an input_schema", i)
		}
		if _, typed := schema.Get("type"); !typed {
			schema = schema.Clone()
			schema.Set("type", "object")
		}
		description, _ := get[string](tool, "description")
		deferred, _ := tool.Get("defer_loading")
		tools = append(tools, dict("type", "function", "defer_loading", deferred, "function",
			dict("name", name, "description", description, "parameters", schema)))
		names = append(names, name)
	}
	if tools == nil {
		return nil, nil, nil
	}
	return chattemplate.NewList(tools...), names, nil
}

// sglangThinking returns the variables that thinking may give a template. Which of them SGLang sets depends on its
// --reasoning-parser, and on what it takes the template for; only if none makes a difference are the ids known.
func sglangThinking(request *apibody.Request, source string) []*chattemplate.Dict {
	thinking, _ := get[*chattemplate.Dict](request.Body, "thinking")
	if thinking == nil || request.API != apibody.Messages {
		return nil
	}
	kind, _ := thinking.Get("type")
	enabled := kind != "disabled"
	var all []*chattemplate.Dict
	if strings.Contains(source, "thinking") {
		all = append(
			all,
			dict("enable_thinking", enabled),
			dict("thinking", enabled),
			dict("enable_thinking", enabled, "thinking", enabled),
		)
	}
	if effort, _ := request.Body.Get("reasoning_effort"); effort == nil &&
		strings.Contains(source, "reasoning_effort") {
		if enabled {
			return append(all, dict("reasoning_effort", "medium"), dict("reasoning_effort", "high"))
		}
		return append(all, dict("reasoning_effort", "none"), dict("reasoning_effort", "no_think"))
	}
	return all
}

// sglangAnthropic collects a chat's messages.
type sglangAnthropic struct {
	merge    bool
	messages []any
	media    bool
}

func (c *sglangAnthropic) read(body *chattemplate.Dict) error {
	list, _ := get[*chattemplate.List](body, "messages")
	var system []string
	switch given, _ := body.Get("system"); s := given.(type) {
	case nil:
	case string:
		if strings.TrimFunc(s, isPythonSpace) != "" {
			system = append(system, s)
		}
	case *chattemplate.List:
		texts, err := textBlocks(s)
		if err != nil {
			return err
		}
		system = append(system, texts...)
	default:
		return errRefused("system is neither a string nor a list of blocks")
	}
	for i := 0; c.merge && i < list.Len(); i++ {
		message, _ := list.Items[i].(*chattemplate.Dict)
		if role, _ := message.Get("role"); role != "system" {
			continue
		}
		var texts []string
		switch content, _ := message.Get("content"); content := content.(type) {
		case string:
			texts = []string{content}
		case *chattemplate.List:
			var err error
			if texts, err = textBlocks(content); err != nil {
				return err
			}
		default:
			return errRefused("content is neither a string nor a list of blocks")
		}
		for _, text := range texts {
			if text = strings.TrimFunc(text, isPythonSpace); text != "" {
				system = append(system, text)
			}
		}
	}
	if system != nil {
		c.messages = append(c.messages, dict("role", "system", "content", strings.Join(system, "\n")))
	}
	for i := range list.Len() {
		message, _ := list.Items[i].(*chattemplate.Dict)
		if err := c.add(message); err != nil {
			return fmt.Errorf("%w (message %d)", err, i)
		}
	}
	return nil
}

// textBlocks returns the texts of blocks that are not empty; other blocks are left out.
func textBlocks(blocks *chattemplate.List) ([]string, error) {
	var texts []string
	for _, item := range blocks.Items {
		block, _ := item.(*chattemplate.Dict)
		switch kind, _ := get[string](block, "type"); {
		case kind == "text":
			text, ok := get[string](block, "text")
			if !ok {
				return nil, errRefused("a text block without text")
			}
			if text != "" {
				texts = append(texts, text)
			}
		case !slices.Contains(sglangBlocks, kind):
			return nil, errRefused("a block of type %q", kind)
		default:
			return nil, errNotReproduced("a system prompt with a block of type " + kind)
		}
	}
	return texts, nil
}

// sglangBlocks are the types of content blocks.
var sglangBlocks = []string{
	"text",
	"image",
	"tool_use",
	"tool_result",
	"tool_reference",
	"search_result",
	"thinking",
	"redacted_thinking",
}

// add translates one message. It is one function, so that it can be compared line by line with SGLang's.
func (c *sglangAnthropic) add(message *chattemplate.Dict) error {
	role, _ := get[string](message, "role")
	content, _ := message.Get("content")
	blocks, isList := content.(*chattemplate.List)
	text, isText := content.(string)
	switch {
	case role != "user" && role != "assistant" && role != "system":
		return errRefused("the role %q", role)
	case role == "system" && c.merge:
		return nil
	case isText:
		c.messages = append(c.messages, dict("role", role, "content", text))
		return nil
	case !isList:
		return errRefused("content is neither a string nor a list of blocks")
	}
	var parts, calls []any
	for _, item := range blocks.Items {
		block, _ := item.(*chattemplate.Dict)
		switch kind, _ := get[string](block, "type"); kind {
		case "text":
			text, ok := get[string](block, "text")
			if !ok {
				return errRefused("a text block without text")
			}
			parts = append(parts, textPart(text))
		case "image":
			if c.image(block) {
				parts = append(parts, imagePart())
			}
		case "thinking":
			if text, ok := get[string](block, "thinking"); !ok || text != "" && role == "assistant" {
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
			contents, text, err := c.toolResult(block)
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
			c.messages = append(c.messages, dict("role", "tool", "tool_call_id", id, "content", contents))
		case "tool_reference":
		case "search_result":
			return errNotReproduced("a search result")
		default:
			return errRefused("a block of type %q", kind)
		}
	}
	converted := dict("role", role)
	if calls != nil {
		converted.Set("tool_calls", chattemplate.NewList(calls...))
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

// contentOf returns a message's content: its only text, or its parts.
func contentOf(parts []any) any {
	if part, _ := parts[0].(*chattemplate.Dict); len(parts) == 1 && isText(part) {
		text, _ := part.Get("text")
		return text
	}
	return chattemplate.NewList(parts...)
}

// imagePart is a part of an image, whose address does not matter here.
func imagePart() any { return dict("type", "image_url", "image_url", dict("url", "image")) }

// image reports whether an image block holds an image.
func (c *sglangAnthropic) image(block *chattemplate.Dict) bool {
	source, _ := get[*chattemplate.Dict](block, "source")
	field := "url"
	if kind, _ := source.Get("type"); kind == "base64" {
		field = "data"
	}
	text, _ := get[string](source, field)
	c.media = c.media || text != ""
	return text != ""
}

// sglangToolUse returns a tool use as a chat's call.
func sglangToolUse(block *chattemplate.Dict) (any, error) {
	id, _ := get[string](block, "id")
	name, named := get[string](block, "name")
	input, given := block.Get("input")
	object, ok := input.(*chattemplate.Dict)
	switch {
	case id == "":
		return nil, errNotReproduced("a tool use without id") // which gets a random one
	case !named || given && !ok:
		return nil, errRefused("a tool use without a name and an input that is an object")
	case object == nil:
		object = chattemplate.NewDict()
	case hasBigInteger(object):
		return nil, errNotReproduced("tool call arguments with an integer beyond 64 bits")
	}
	return dict("id", id, "type", "function", "function", dict("name", name, "arguments", object)), nil
}

// toolResult returns a tool result's content as a tool's message has it, and its text.
func (c *sglangAnthropic) toolResult(block *chattemplate.Dict) (content any, text string, err error) {
	given, _ := block.Get("content")
	list, isList := given.(*chattemplate.List)
	text, isText := given.(string)
	switch {
	case given == nil || isText:
		return text, text, nil
	case !isList:
		return nil, "", errRefused("a tool result's content is neither a string nor a list of blocks")
	}
	var parts []any
	var texts []string
	for _, item := range list.Items {
		part, _ := item.(*chattemplate.Dict)
		switch kind, _ := get[string](part, "type"); {
		case kind == "text":
			text, ok := get[string](part, "text")
			if !ok {
				return nil, "", errRefused("a text block without text")
			}
			if text != "" {
				texts = append(texts, text)
				parts = append(parts, textPart(text))
			}
		case kind == "image":
			if c.image(part) {
				parts = append(parts, imagePart())
			}
		case kind == "tool_reference" || kind == "search_result":
			return nil, "", errNotReproduced("a tool result of type " + kind)
		case !slices.Contains(sglangBlocks, kind):
			return nil, "", errRefused("a block of type %q", kind)
		}
	}
	text = strings.Join(texts, "\n")
	if parts == nil {
		return "", text, nil
	}
	return contentOf(parts), text, nil
}
