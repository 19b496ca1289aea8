package body

import (
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/values"
)

// readMessages maps Anthropic's messages to a chat's. Dynamo's frontend drops blocks that a chat cannot hold, and so
// does this function, so that the tokens stay known. It reports media, and what only the frontend can judge. Source:
// dynamo-llm 1.6.1, protocols/anthropic.
func (r *Request) readMessages() error {
	b := r.Body
	c := &conversation{request: r}
	switch system, _ := b.Get("system"); s := system.(type) {
	case nil:
	case string:
		c.add("system", s)
	case *values.List:
		texts := make([]string, len(s.Items))
		for i, item := range s.Items {
			block, _ := item.(*values.Dict)
			text, ok := field[string](block, "text")
			if !ok {
				return wrongType(fmt.Sprintf("system[%d]", i), "a block of text")
			}
			texts[i] = text
		}
		c.add("system", strings.Join(texts, "\n"))
	default:
		return wrongType("system", "a string or a list of blocks of text")
	}
	messages, err := wantMessages(b, "messages")
	if err != nil {
		return err
	}
	for i, item := range messages.Items {
		if r.TooLarge != nil {
			return nil
		}
		message, ok := item.(*values.Dict)
		if !ok {
			return wrongType(fmt.Sprintf("messages[%d]", i), "an object with 'role' and 'content'")
		}
		role, _ := field[string](message, "role")
		content, _ := message.Get("content")
		text, isText := content.(string)
		blocks, isList := content.(*values.List)
		switch {
		case !isText && !isList:
			return wrongType(fmt.Sprintf("messages[%d].content", i), "a string or a list of blocks")
		case role != "user" && role != "assistant" && role != "system":
			return &Error{Code: CodeInvalidValue, Param: fmt.Sprintf("messages[%d].role", i),
				Message: fmt.Sprintf("'messages[%d].role' must be user, assistant or system.", i)}
		case isText:
			c.add(role, text)
		case role == "user":
			c.userBlocks(blocks)
		case role == "assistant":
			c.assistantBlocks(blocks)
		default:
			c.add(role, joinTexts(blocks, "\n", "text"))
		}
	}
	r.Messages = values.NewList(c.messages...)
	r.readAnthropicTools()
	if object, ok := field[*values.Dict](b, "thinking"); ok {
		if kind, _ := object.Get("type"); kind == "enabled" {
			r.ChatTemplateKwargs = values.DictOf("enable_thinking", true)
		}
	}
	return nil
}

func (r *Request) readAnthropicTools() {
	if choice, ok := field[*values.Dict](r.Body, "tool_choice"); ok {
		kind, _ := choice.Get("type")
		r.ToolChoiceNone = kind == "none"
	}
	r.readTools(func(tool *values.Dict) any {
		schema, _ := tool.Get("input_schema")
		if schema == nil {
			r.unmapped("a tool without input_schema")
		}
		return schema
	})
}

// readTools sets r.Tools to the chat form of the body's tools. parameters returns a tool's JSON schema; its argument is
// nil if the item of the list is not an object.
func (r *Request) readTools(parameters func(tool *values.Dict) any) {
	list, _ := field[*values.List](r.Body, "tools")
	if list.Len() == 0 {
		return
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		if !r.charge(toolBytes) {
			return
		}
		tool, _ := item.(*values.Dict)
		tools[i] = chatTool(tool, parameters(tool))
	}
	r.Tools = values.NewList(tools...)
}

// The memory of a chat's message, tool, tool call and content part without the values in them, in bytes: objects, and
// their places in lists.
var (
	messageBytes = values.DictBytes(3) + placeBytes
	toolBytes    = values.DictBytes(2) + values.DictBytes(8) + placeBytes
	callBytes    = values.DictBytes(3) + values.DictBytes(2) + 3*placeBytes
	partBytes    = values.DictBytes(2) + placeBytes
)

// placeBytes is the memory of a place in a list, and of the box of a string. The list grows by a quarter, and the old
// and the new one exist at the same time.
const placeBytes = 3*16 + 16

// chatTool returns the chat form of a tool that has name, description and strict outside its schema.
func chatTool(tool *values.Dict, parameters any) *values.Dict {
	function := values.NewDict()
	for _, key := range []string{"name", "description"} {
		if v, _ := tool.Get(key); v != nil {
			function.Set(key, v)
		}
	}
	if parameters != nil {
		function.Set("parameters", parameters)
	}
	if strict, _ := tool.Get("strict"); strict != nil {
		function.Set("strict", strict)
	}
	return values.DictOf("type", "function", "function", function)
}

// unmapped records the first part of a request that has no place in a chat.
func (r *Request) unmapped(what string) {
	if r.Unmapped == "" {
		r.Unmapped = what
	}
}

func wantMessages(b *values.Dict, name string) (*values.List, error) {
	v, _ := b.Get(name)
	list, ok := v.(*values.List)
	switch {
	case v == nil:
		return nil, missing(name, "a list of messages")
	case !ok:
		return nil, wrongType(name, "a list of messages")
	case len(list.Items) == 0:
		return nil, &Error{
			Code:    CodeInvalidValue,
			Param:   name,
			Message: "'" + name + "' must hold at least one message.",
		}
	}
	return list, nil
}

// joinTexts joins the texts of the parts of one type.
func joinTexts(parts *values.List, separator, kind string) string {
	var texts []string
	for _, item := range parts.Items {
		part, _ := item.(*values.Dict)
		if k, _ := part.Get("type"); k != kind {
			continue
		}
		if text, ok := field[string](part, "text"); ok {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, separator)
}

// conversation collects a chat's messages.
type conversation struct {
	request  *Request
	messages []any
}

func (c *conversation) add(role string, content any) {
	if !c.request.charge(messageBytes) {
		return
	}
	c.messages = append(c.messages, values.DictOf("role", role, "content", content))
}

func (c *conversation) addToolResult(id, content any) {
	if _, ok := id.(string); !ok {
		c.request.unmapped("a tool's result without the id of its call")
	}
	if !c.request.charge(messageBytes) {
		return
	}
	c.messages = append(c.messages, values.DictOf("role", "tool", "content", content, "tool_call_id", id))
}

// userBlocks adds a user's blocks: adjacent texts become one message, and each tool result becomes one of its own.
func (c *conversation) userBlocks(blocks *values.List) {
	var texts []string
	pending := false
	flush := func() {
		if pending {
			c.add("user", strings.Join(texts, ""))
		}
		texts, pending = nil, false
	}
	for _, item := range blocks.Items {
		block, _ := item.(*values.Dict)
		switch kind, _ := block.Get("type"); kind {
		case "text":
			t, ok := field[string](block, "text")
			if !ok {
				c.request.unmapped("a text block without text")
			}
			texts, pending = append(texts, t), true
		case "image":
			c.request.HasMedia = true
		case "tool_result":
			flush()
			id, _ := block.Get("tool_use_id")
			content, _ := block.Get("content")
			c.addToolResult(id, c.toolResult(content))
		}
	}
	flush()
}

// toolResult returns the text of a tool's result.
func (c *conversation) toolResult(content any) string {
	switch v := content.(type) {
	case nil:
	case string:
		return v
	case *values.List:
		var texts []string
		for _, item := range v.Items {
			block, _ := item.(*values.Dict)
			kind, _ := block.Get("type")
			t, ok := field[string](block, "text")
			switch {
			case kind == "image":
				c.request.HasMedia = true
			case ok && (kind == "text" || kind == nil):
				texts = append(texts, t)
			default:
				c.request.unmapped("a tool's result that is neither text nor an image")
			}
		}
		return strings.Join(texts, "")
	default:
		c.request.unmapped("a tool's result that is neither a string nor a list of blocks")
	}
	return ""
}

// assistantBlocks adds an assistant's blocks as one message. If there are tool calls, its thinking is kept in segments:
// one before each call and one behind the last.
func (c *conversation) assistantBlocks(blocks *values.List) {
	turn := &turn{separator: "\n"}
	for _, item := range blocks.Items {
		block, _ := item.(*values.Dict)
		switch kind, _ := block.Get("type"); kind {
		case "text":
			text, _ := field[string](block, "text")
			turn.texts = append(turn.texts, text)
		case "thinking":
			text, _ := field[string](block, "thinking")
			turn.addThought(text)
		case "tool_use", "server_tool_use":
			input, ok := block.Get("input")
			if !ok {
				input = values.NewDict()
			}
			if !c.request.charge(callBytes + values.RustJSONSize(input)) {
				return
			}
			arguments, err := values.RustJSON(input)
			if err != nil {
				c.request.unmapped("the arguments of a tool call: " + err.Error())
			}
			id, _ := block.Get("id")
			name, _ := block.Get("name")
			turn.addCall(id, name, arguments)
		}
	}
	if c.request.charge(messageBytes) {
		c.messages = append(c.messages, turn.message(false))
	}
}

// turn is an assistant's turn, collected from pieces.
type turn struct {
	separator string // between pieces of thinking
	texts     []string
	thoughts  []string // since the last call
	segments  []string // the thinking before each call
	calls     []any
}

func (t *turn) addThought(text string) {
	if len(t.thoughts) == 0 && text == "" {
		return // no separator before the first thought
	}
	t.thoughts = append(t.thoughts, text)
}

func (t *turn) addCall(id, name, arguments any) {
	t.segments = append(t.segments, strings.Join(t.thoughts, t.separator))
	t.thoughts = nil
	function := values.DictOf("name", name, "arguments", arguments)
	t.calls = append(t.calls, values.DictOf("id", id, "type", "function", "function", function))
}

// message returns the turn as a message. Empty text is left out, unless keepEmpty is set and there are no calls.
func (t *turn) message(keepEmpty bool) *values.Dict {
	message := values.DictOf("role", "assistant")
	if text := strings.Join(t.texts, ""); text != "" || keepEmpty && len(t.calls) == 0 {
		message.Set("content", text)
	}
	segments := append(t.segments, strings.Join(t.thoughts, t.separator))
	switch {
	case !slices.ContainsFunc(segments, func(s string) bool { return s != "" }):
	case len(t.calls) == 0:
		message.Set("reasoning_content", segments[0])
	default:
		list := make([]any, len(segments))
		for i, s := range segments {
			list[i] = s
		}
		message.Set("reasoning_content", values.NewList(list...))
	}
	if len(t.calls) > 0 {
		message.Set("tool_calls", values.NewList(t.calls...))
	}
	return message
}
