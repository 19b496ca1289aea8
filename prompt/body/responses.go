package body

import (
	"fmt"
	"strings"

	"kvepp/prompt/values"
)

// readResponses maps the input of /v1/responses to a chat's messages.
// Source: dynamo-llm 1.6.1, protocols/openai/responses.
func (r *Request) readResponses() error {
	b := r.Body
	for _, name := range []string{"previous_response_id", "prompt", "conversation"} {
		if v, _ := b.Get(name); v != nil {
			r.unmapped("'" + name + "'")
		}
	}
	c := &responsesInput{conversation: conversation{request: r}}
	switch instructions, _ := b.Get("instructions"); s := instructions.(type) {
	case nil:
	case string:
		c.add("system", s)
	default:
		r.unmapped("instructions that are not a string")
	}
	switch input, _ := b.Get("input"); in := input.(type) {
	case nil:
		return missing("input", "a string or a list of input items")
	case string:
		c.add("user", in)
	case *values.List:
		for i, item := range in.Items {
			if r.TooLarge != nil {
				return nil
			}
			object, ok := item.(*values.Dict)
			if !ok {
				return wrongType(fmt.Sprintf("input[%d]", i), "an object")
			}
			c.item(object)
		}
		c.flush()
	default:
		return wrongType("input", "a string or a list of input items")
	}
	c.joinLeadingSystem()
	r.Messages = values.NewList(c.messages...)
	r.readResponsesTools()
	r.readKwargs()
	if reasoning, ok := field[*values.Dict](b, "reasoning"); ok {
		r.ReasoningEffort, _ = field[string](reasoning, "effort")
	}
	return nil
}

func (r *Request) readResponsesTools() {
	switch choice, _ := r.Body.Get("tool_choice"); c := choice.(type) {
	case nil:
	case string:
		r.ToolChoiceNone = c == "none"
	case *values.Dict:
		if kind, _ := c.Get("type"); kind != "function" {
			r.unmapped("a tool_choice that is not a function")
		}
	}
	r.readTools(func(tool *values.Dict) any {
		if kind, _ := tool.Get("type"); kind != "function" {
			r.unmapped("a tool that is not a function")
		}
		parameters, _ := tool.Get("parameters")
		return parameters
	})
}

// responsesInput collects messages from input items. Successive items of an assistant become one message.
type responsesInput struct {
	conversation
	turn *turn // the assistant's turn being collected; nil outside its items
}

// assistant returns the turn being collected; it starts one if there is none.
func (c *responsesInput) assistant() *turn {
	if c.turn == nil {
		c.turn = &turn{}
	}
	return c.turn
}

// flush ends an assistant's turn.
func (c *responsesInput) flush() {
	if c.turn != nil && c.request.charge(messageBytes) {
		c.messages = append(c.messages, c.turn.message(true))
		c.turn = nil
	}
}

func (c *responsesInput) item(item *values.Dict) {
	kind, _ := item.Get("type")
	_, hasID := field[string](item, "id")
	if hasID && (kind == nil || kind == "item_reference") {
		return // a reference; the frontend skips it
	}
	switch kind {
	case nil, "message":
		c.message(item, kind != nil)
	case "agent_message":
		c.flush()
		c.add("user", c.agentText(item))
	case "function_call":
		if namespace, _ := item.Get("namespace"); namespace != nil {
			c.request.unmapped("a function in a namespace")
		}
		id, _ := item.Get("call_id")
		name, _ := item.Get("name")
		arguments, _ := item.Get("arguments")
		if !c.request.charge(callBytes) {
			return
		}
		c.assistant().addCall(id, name, arguments)
	case "function_call_output":
		c.flush()
		id, _ := item.Get("call_id")
		output, _ := item.Get("output")
		if parts, ok := output.(*values.List); ok {
			c.wantTexts(parts)
			output = joinTexts(parts, "", "input_text")
		}
		c.addToolResult(id, output)
	case "reasoning":
		text := concatTexts(item, "content")
		if text == "" {
			text = concatTexts(item, "summary")
		}
		c.assistant().addThought(text)
	default:
		c.request.unmapped("an input item of " + typeName(kind))
		c.flush()
	}
}

func concatTexts(item *values.Dict, key string) string {
	parts, _ := field[*values.List](item, key)
	var texts []string
	for i := range parts.Len() {
		part, _ := parts.Items[i].(*values.Dict)
		t, _ := field[string](part, "text")
		texts = append(texts, t)
	}
	return strings.Join(texts, "")
}

// typeName describes the type of an item or a part, for error texts.
func typeName(kind any) string {
	switch k := kind.(type) {
	case nil:
		return "no type"
	case string:
		return fmt.Sprintf("type %.64s", k)
	}
	return "a type that is not a string"
}

// agentText returns the text of a message between Codex's agents.
func (c *responsesInput) agentText(item *values.Dict) string {
	content, _ := item.Get("content")
	parts, ok := content.(*values.List)
	if !ok {
		text, _ := content.(string)
		return text
	}
	texts := make([]string, len(parts.Items))
	for i, p := range parts.Items {
		part, _ := p.(*values.Dict)
		switch kind, _ := part.Get("type"); kind {
		case "input_text":
			texts[i], _ = field[string](part, "text")
		case "encrypted_content":
			texts[i], _ = field[string](part, "encrypted_content")
		default:
			c.request.unmapped("a part of an agent's message")
		}
	}
	return strings.Join(texts, "\n")
}

// wantTexts records parts that are not text.
func (c *responsesInput) wantTexts(parts *values.List) {
	for _, p := range parts.Items {
		part, _ := p.(*values.Dict)
		switch kind, _ := part.Get("type"); kind {
		case "input_text":
		case "input_image":
			c.request.HasMedia = true
		default:
			c.request.unmapped("a content part of " + typeName(kind))
		}
	}
}

// message adds a message. typed means that its type is "message"; only then may it hold an assistant's output parts.
func (c *responsesInput) message(item *values.Dict, typed bool) {
	role, _ := field[string](item, "role")
	content, _ := item.Get("content")
	text, isText := content.(string)
	parts, isList := content.(*values.List)
	switch {
	case isText || isList:
	case content == nil && role == "assistant" && typed: // a turn of tool calls without text
		isText = true
	default:
		c.request.unmapped("a message without content")
		return
	}
	switch role {
	case "system", "developer":
		c.flush()
		if isList {
			c.wantTexts(parts)
			text = joinTexts(parts, "", "input_text")
		}
		c.add("system", text)
	case "user":
		c.flush()
		if isList {
			c.add("user", c.userContent(parts))
			return
		}
		c.add("user", text)
	case "assistant":
		if isList {
			text = c.assistantText(parts, typed)
		}
		c.assistant().texts = append(c.assistant().texts, text)
	default:
		c.request.unmapped(fmt.Sprintf("a message with the role %.64q", role))
	}
}

// userContent returns a single text part as a string, and other parts as a list.
func (c *responsesInput) userContent(parts *values.List) any {
	c.wantTexts(parts)
	if !c.request.charge(len(parts.Items) * partBytes) {
		return ""
	}
	out := make([]any, 0, len(parts.Items))
	for _, p := range parts.Items {
		part, _ := p.(*values.Dict)
		text, ok := field[string](part, "text")
		if !ok {
			c.request.unmapped("a content part without text")
		}
		if len(parts.Items) == 1 {
			return text
		}
		out = append(out, values.DictOf("type", "text", "text", text))
	}
	return values.NewList(out...)
}

// assistantText joins an assistant's texts: output texts and refusals, or input texts.
func (c *responsesInput) assistantText(parts *values.List, typed bool) string {
	var texts []string
	var first any
	for i, p := range parts.Items {
		part, _ := p.(*values.Dict)
		kind, _ := part.Get("type")
		key := "text"
		switch {
		case kind == "refusal" && typed:
			key = "refusal"
			kind = "output_text"
		case kind == "output_text" && typed, kind == "input_text":
		default:
			c.request.unmapped("a content part of " + typeName(kind))
		}
		if i == 0 {
			first = kind
		}
		if kind != first {
			c.request.unmapped("output and input parts in one message")
		}
		t, _ := field[string](part, key)
		texts = append(texts, t)
	}
	return strings.Join(texts, "")
}

// joinLeadingSystem merges the leading system messages into one.
func (c *responsesInput) joinLeadingSystem() {
	var texts []string
	for _, m := range c.messages {
		message, _ := m.(*values.Dict)
		if role, _ := message.Get("role"); role != "system" {
			break
		}
		text, _ := field[string](message, "content")
		texts = append(texts, text)
	}
	if len(texts) > 1 {
		joined := values.DictOf("role", "system", "content", strings.Join(texts, "\n\n"))
		c.messages = append([]any{joined}, c.messages[len(texts):]...)
	}
}
