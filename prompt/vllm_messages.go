package prompt

import (
	"context"
	"fmt"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How vLLM turns a request to Anthropic's /v1/messages into a chat.
// Source: vLLM 0.33.0, entrypoints/anthropic/serving and protocol.

// chatOfMessagesVLLM returns the chat that vLLM makes of a request to Messages.
func (m *Model) chatOfMessagesVLLM(request *body.Request) (*body.Request, error) {
	if field(request.Body, "kv_transfer_params") != nil {
		return nil, errNotReproduced("kv_transfer_params in messages")
	}
	c := &messagesChat{rules: &vllmMessagesRules, jsonArguments: m.usesHarmony()}
	var err error
	if c.mergeSystem, err = m.messages.mergeSystem(); err != nil {
		return nil, err
	}
	if err := c.read(request.Body); err != nil {
		return nil, err
	}
	payload := dict("model", request.Model, "messages", values.NewList(c.messages...))
	copyFields(payload, request.Body, "chat_template_kwargs", "cache_salt")
	config, _ := get[*values.Dict](request.Body, "output_config")
	if effort := field(config, "effort"); effort != nil {
		payload.Set("reasoning_effort", effort)
	}
	thinking, _ := get[*values.Dict](request.Body, "thinking")
	if field(thinking, "type") == "disabled" {
		effort, err := m.messages.disabledEffort()
		if err != nil {
			return nil, err
		}
		payload.Set("reasoning_effort", effort)
	}
	choice, _ := get[*values.Dict](request.Body, "tool_choice")
	if field(choice, "type") == "none" {
		payload.Set("tool_choice", "none")
	}
	tools, err := vllmMessagesTools(request.Body)
	if err != nil {
		return nil, err
	}
	if tools != nil {
		payload.Set("tools", tools)
	}
	chat := chatOf(request, payload)
	chat.HasMedia = c.hasMedia
	return chat, nil
}

// vllmMessagesTools returns the tools in the form of the chat API; nil without tools.
func vllmMessagesTools(body *values.Dict) (*values.List, error) {
	given := field(body, "tools")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*values.List)
	if !ok || len(list.Items) == 0 {
		return nil, errNotReproduced("tools that are not a list, or an empty one,")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		schema, ok := inputSchema(tool)
		if !ok {
			return nil, errRefused("tools[%d] has no input_schema", i)
		}
		function := dict("parameters", schema)
		copyFields(function, tool, "name", "description", "strict", "defer_loading")
		tools[i] = dict("type", "function", "function", function)
	}
	return values.NewList(tools...), nil
}

var vllmMessagesRules = messagesRules{
	systemTexts: func(content any) ([]string, error) {
		switch content := content.(type) {
		case string:
			return []string{content}, nil
		case *values.List:
			return vllmSystemBlocks(content)
		}
		return nil, errBlocks("system")
	},
	lateSystemTexts: func(content any) ([]string, error) {
		switch content := content.(type) {
		case string:
			if strings.HasPrefix(content, billingHeader) {
				return nil, nil
			}
			return []string{content}, nil
		case *values.List:
			return vllmSystemBlocks(content)
		}
		return nil, errBlocks("content")
	},
	lateSystemIsText: true,
	addBlocks:        addBlocksVLLM,
}

// vllmSystemBlocks returns the texts of a system prompt's blocks, without the line that Claude Code adds.
func vllmSystemBlocks(blocks *values.List) ([]string, error) {
	var texts []string
	for _, item := range blocks.Items {
		block, ok := item.(*values.Dict)
		if !ok {
			return nil, errRefused("a block that is not an object")
		}
		kind, _ := block.Get("type")
		part := field(block, "text")
		text, isString := part.(string)
		switch {
		case kind == "tool_addition" || kind == "tool_removal":
			return nil, errNotReproduced("a change of the tools")
		case part != nil && !isString:
			return nil, errRefused("text that is not a string")
		case kind == "text" && !strings.HasPrefix(text, billingHeader):
			texts = append(texts, text)
		}
	}
	return texts, nil
}

// addBlocksVLLM adds the messages that vLLM makes of one message: those of the tool results in it, then its own.
func addBlocksVLLM(c *messagesChat, role string, blocks *values.List) error {
	var parts, calls []any
	var reasoning []string
	for _, item := range blocks.Items {
		block, ok := item.(*values.Dict)
		if !ok {
			return errRefused("a block that is not an object")
		}
		switch kind := field(block, "type"); kind {
		case "text":
			if text, _ := get[string](block, "text"); text != "" {
				parts = append(parts, textPart(text))
			}
		case "image":
			if source, _ := get[*values.Dict](block, "source"); source.Len() > 0 {
				parts = append(parts, c.imagePart())
			}
		case "thinking":
			if text, ok := get[string](block, "thinking"); ok {
				reasoning = append(reasoning, text)
			}
		case "redacted_thinking", "tool_reference":
		case "tool_use":
			call, err := vllmToolUse(block, c.jsonArguments)
			if err != nil {
				return err
			}
			calls = append(calls, call)
		case "tool_result":
			if role == "user" {
				if err := addToolResultVLLM(c, block); err != nil {
					return err
				}
				continue
			}
			result := field(block, "content")
			text, ok := result.(string)
			if result != nil && !ok {
				return errNotReproduced("an assistant's tool result that is not text")
			}
			parts = append(parts, textPart("Tool result: "+text))
		default:
			return errNotReproduced(fmt.Sprintf("a block of type %v", kind))
		}
	}
	if parts == nil && role == "user" {
		return nil
	}
	converted := dict("role", role)
	if reasoning != nil {
		converted.Set("reasoning", strings.Join(reasoning, ""))
	}
	if calls != nil {
		converted.Set("tool_calls", values.NewList(calls...))
	}
	if parts != nil {
		converted.Set("content", contentOf(parts))
	}
	c.messages = append(c.messages, converted)
	return nil
}

// vllmToolUse returns a tool use as a tool call of the chat API.
func vllmToolUse(block *values.Dict, jsonArguments bool) (any, error) {
	id, _ := get[string](block, "id")
	name, _ := get[string](block, "name")
	input, _ := get[*values.Dict](block, "input")
	if id == "" {
		return nil, errNotReproduced("a tool use without id") // vLLM makes one of the time
	}
	if input == nil {
		input = values.NewDict()
	}
	if !jsonArguments {
		return functionCall(id, name, input), nil
	}
	text, err := jinja.PythonJSON(context.Background(), input, jinja.JSONFormat{ASCII: true}, jinja.Limits{})
	if err != nil {
		return nil, fmt.Errorf("prompt: a tool use's input: %w", err)
	}
	return functionCall(id, name, text), nil
}

// addToolResultVLLM adds a tool's message, and then a user's message with the images of the result.
func addToolResultVLLM(c *messagesChat, block *values.Dict) error {
	var texts []string
	var images []any
	switch content := field(block, "content").(type) {
	case nil:
	case string:
		texts = append(texts, content)
	case *values.List:
		for _, item := range content.Items {
			part, ok := item.(*values.Dict)
			if !ok {
				return errRefused("a tool result's block that is not an object")
			}
			switch field(part, "type") {
			case "text":
				text, given := part.Get("text")
				s, ok := text.(string)
				if given && !ok {
					return errRefused("text that is not a string")
				}
				texts = append(texts, s)
			case "image":
				source, _ := get[*values.Dict](part, "source")
				if url, _ := get[string](source, "url"); field(source, "type") != "url" || url != "" {
					images = append(images, c.imagePart())
				}
			case "tool_reference":
				return errNotReproduced("a reference to a tool")
			}
		}
	default:
		return errBlocks("a tool result's content")
	}
	id, _ := get[string](block, "tool_use_id")
	c.messages = append(c.messages, dict("role", "tool", "tool_call_id", id, "content", strings.Join(texts, "\n")))
	if images != nil {
		c.messages = append(c.messages, dict("role", "user", "content", values.NewList(images...)))
	}
	return nil
}
