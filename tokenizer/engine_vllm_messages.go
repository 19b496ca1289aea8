package tokenizer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// vLLM turns a request to Anthropic's /v1/messages into a chat. It renders short chats to find out what the template
// takes. Source: vLLM 0.33.0, entrypoints/anthropic/serving and protocol.

// messagesProbe is what vLLM or SGLang found out about a model's templates.
type messagesProbe struct {
	// mergeSystem: system messages in the middle join the one at the front.
	mergeSystem func() (bool, error)
	// disabledEffort is the reasoning_effort that stands for thinking that is disabled, on vLLM.
	disabledEffort func() (string, error)
}

func (m *Model) probeMessages() *messagesProbe {
	merges := m.mergesSystem
	if m.options.Engine == SGLang {
		merges = m.mergesSystemSGLang
	}
	return &messagesProbe{mergeSystem: sync.OnceValues(merges), disabledEffort: sync.OnceValues(m.effortOfDisabled)}
}

// plainNames are the functions that templates have in Transformers and not where vLLM tries them.
var plainNames = strings.NewReplacer("raise_exception", "raise_exception_", "strftime_now", "strftime_now_")

// mergesSystem reports whether a template refuses a system message that is not the first.
func (m *Model) mergesSystem() (bool, error) {
	templates := []*chatTemplate{m.chat}
	if m.chatTools != nil {
		templates = append(templates, m.chatTools)
	}
	turn := func(role string) any { return dict("role", role, "content", "t") }
	for _, t := range templates {
		if t == nil || t.source == "" || strings.Contains(t.source, "endgeneration") {
			return true, nil
		}
		plain, err := chattemplate.Compile("default", plainNames.Replace(t.source))
		if err != nil {
			return false, fmt.Errorf("tokenizer: chat template: %w", err)
		}
		messages := chattemplate.NewList(turn("system"), turn("user"), turn("system"), turn("user"))
		_, failed, err := probe(plain, dict("messages", messages, "add_generation_prompt", false))
		if failed || err != nil {
			return failed, err
		}
	}
	return false, nil
}

// effortOfDisabled is none, or low where the template refuses none or makes the same of another effort.
func (m *Model) effortOfDisabled() (string, error) {
	if given := m.options.AnthropicDisabledThinkingEffort; given != "" && given != "auto" {
		return given, nil
	}
	prompt := func(effort string) (Prompt, error) {
		body := dict(
			"model",
			"m",
			"messages",
			chattemplate.NewList(dict("role", "user", "content", "Hi")),
			"reasoning_effort",
			effort,
		)
		p, err := m.tokenizeChat(context.Background(), chatOf(&apibody.Request{Model: "m"}, body))
		if err != nil &&
			(IsUnknown(err) || errors.Is(err, chattemplate.ErrUnsupported) || errors.Is(err, chattemplate.ErrLimit)) {
			return p, err
		}
		if err != nil {
			return Prompt{}, nil // refused
		}
		return p, nil
	}
	none, err := prompt("none")
	if err != nil || none.IDs == nil {
		return "low", err
	}
	for _, effort := range []string{"low", "medium", "high", "xhigh", "max"} {
		p, err := prompt(effort)
		if err != nil || slices.Equal(p.IDs, none.IDs) {
			return "low", err
		}
	}
	return "none", nil
}

// chatOf returns a chat's request with this body.
func chatOf(request *apibody.Request, body *chattemplate.Dict) *apibody.Request {
	chat := &apibody.Request{
		API:           apibody.ChatCompletions,
		Model:         request.Model,
		CacheSalt:     request.CacheSalt,
		Body:          body,
		RemainingCost: request.RemainingCost,
	}
	chat.Messages, _ = get[*chattemplate.List](body, "messages")
	chat.ChatTemplateKwargs, _ = get[*chattemplate.Dict](body, "chat_template_kwargs")
	return chat
}

// asChat returns the chat that the engine makes of a request; the request itself if it is one, or if its engine reads
// the others' fields too.
func (m *Model) asChat(request *apibody.Request) (*apibody.Request, error) {
	switch {
	case request.API == apibody.ChatCompletions || m.options.Engine == Dynamo:
		return request, nil
	case m.options.Engine == SGLang && request.API == apibody.Responses:
		return m.chatOfResponsesSGLang(request)
	case m.options.Engine == SGLang:
		return m.chatOfMessagesSGLang(request)
	case m.usesHarmony() && request.API == apibody.Responses:
		return request, nil // see harmonyIDs
	case m.options.Engine != VLLM:
		return nil, errNotReproduced(request.API.String())
	case request.API == apibody.Responses:
		return m.chatOfResponses(request)
	}
	return m.chatOfMessages(request)
}

// chatOfMessages returns the chat of a request to Messages.
func (m *Model) chatOfMessages(request *apibody.Request) (*apibody.Request, error) {
	if transfer, _ := request.Body.Get("kv_transfer_params"); transfer != nil {
		return nil, errNotReproduced("kv_transfer_params in messages")
	}
	c := &anthropicChat{asText: m.usesHarmony()}
	var err error
	if c.merge, err = m.messages.mergeSystem(); err != nil {
		return nil, err
	}
	if err := c.read(request.Body); err != nil {
		return nil, err
	}
	body := dict("model", request.Model, "messages", chattemplate.NewList(c.messages...))
	for _, name := range []string{"chat_template_kwargs", "cache_salt"} {
		if v, _ := request.Body.Get(name); v != nil {
			body.Set(name, v)
		}
	}
	if config, _ := get[*chattemplate.Dict](request.Body, "output_config"); config != nil {
		if effort, _ := config.Get("effort"); effort != nil {
			body.Set("reasoning_effort", effort)
		}
	}
	if thinking, _ := get[*chattemplate.Dict](request.Body, "thinking"); thinking != nil {
		if kind, _ := thinking.Get("type"); kind == "disabled" {
			effort, err := m.messages.disabledEffort()
			if err != nil {
				return nil, err
			}
			body.Set("reasoning_effort", effort)
		}
	}
	if choice, _ := get[*chattemplate.Dict](request.Body, "tool_choice"); choice != nil {
		if kind, _ := choice.Get("type"); kind == "none" {
			body.Set("tool_choice", "none")
		}
	}
	tools, err := anthropicTools(request.Body)
	if err != nil {
		return nil, err
	}
	if tools != nil {
		body.Set("tools", tools)
	}
	chat := chatOf(request, body)
	chat.HasMedia = c.media
	return chat, nil
}

// anthropicTools returns the tools as a chat has them; nil without.
func anthropicTools(body *chattemplate.Dict) (*chattemplate.List, error) {
	given, _ := body.Get("tools")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*chattemplate.List)
	if !ok || len(list.Items) == 0 {
		return nil, errNotReproduced("tools that are no list, or an empty one,")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*chattemplate.Dict)
		schema, ok := get[*chattemplate.Dict](tool, "input_schema")
		if !ok {
			return nil, errRefused("tools[%d] has no input_schema", i)
		}
		if _, typed := schema.Get("type"); !typed {
			schema = schema.Clone()
			schema.Set("type", "object")
		}
		function := dict("parameters", schema)
		for _, name := range []string{"name", "description", "strict", "defer_loading"} {
			if v, _ := tool.Get(name); v != nil {
				function.Set(name, v)
			}
		}
		tools[i] = dict("type", "function", "function", function)
	}
	return chattemplate.NewList(tools...), nil
}

// anthropicChat collects a chat's messages.
type anthropicChat struct {
	merge    bool
	asText   bool // arguments are JSON, as harmony shows them; else objects
	messages []any
	media    bool
}

func (c *anthropicChat) read(body *chattemplate.Dict) error {
	list, _ := get[*chattemplate.List](body, "messages")
	var system []string
	switch given, _ := body.Get("system"); s := given.(type) {
	case nil:
	case string:
		system = append(system, s)
	case *chattemplate.List:
		text, err := systemText(s)
		if err != nil {
			return err
		}
		system = append(system, text)
	default:
		return errRefused("system is neither a string nor a list of blocks")
	}
	for i := 0; c.merge && i < list.Len(); i++ {
		message, _ := list.Items[i].(*chattemplate.Dict)
		if role, _ := message.Get("role"); role != "system" {
			continue
		}
		text, err := inlineSystem(message)
		if err != nil {
			return err
		}
		system = append(system, text)
	}
	if text := strings.Join(system, ""); text != "" {
		c.messages = append(c.messages, dict("role", "system", "content", text))
	}
	for i := range list.Len() {
		message, _ := list.Items[i].(*chattemplate.Dict)
		if err := c.add(message); err != nil {
			return fmt.Errorf("%w (message %d)", err, i)
		}
	}
	return nil
}

// systemText joins the texts of a system prompt's blocks, without Claude Code's line of its own.
func systemText(blocks *chattemplate.List) (string, error) {
	var texts []string
	for _, item := range blocks.Items {
		block, ok := item.(*chattemplate.Dict)
		if !ok {
			return "", errRefused("a block that is not an object")
		}
		kind, _ := block.Get("type")
		part, given := block.Get("text")
		s, ok := part.(string)
		switch {
		case kind == "tool_addition" || kind == "tool_removal":
			return "", errNotReproduced("a change of the tools")
		case given && part != nil && !ok:
			return "", errRefused("text that is no string")
		case kind == "text" && !strings.HasPrefix(s, billingHeader):
			texts = append(texts, s)
		}
	}
	return strings.Join(texts, ""), nil
}

// inlineSystem returns the text of a system message among the others; "" if it is left out.
func inlineSystem(message *chattemplate.Dict) (string, error) {
	switch content, _ := message.Get("content"); c := content.(type) {
	case string:
		if strings.HasPrefix(c, billingHeader) {
			return "", nil
		}
		return c, nil
	case *chattemplate.List:
		return systemText(c)
	}
	return "", errRefused("content is neither a string nor a list of blocks")
}

// add translates one message. It is one function, so that it can be compared line by line with vLLM's.
func (c *anthropicChat) add(message *chattemplate.Dict) error {
	role, _ := get[string](message, "role")
	content, _ := message.Get("content")
	blocks, isList := content.(*chattemplate.List)
	text, isText := content.(string)
	switch {
	case role == "system":
		text, err := inlineSystem(message)
		if err != nil || text == "" || c.merge {
			return err
		}
		c.messages = append(c.messages, dict("role", role, "content", text))
		return nil
	case role != "user" && role != "assistant":
		return errRefused("the role %q", role)
	case isText:
		c.messages = append(c.messages, dict("role", role, "content", text))
		return nil
	case !isList:
		return errRefused("content is neither a string nor a list of blocks")
	}
	var parts, calls []any
	var reasoning, texts []string
	say := func(text string) {
		texts = append(texts, text)
		parts = append(parts, textPart(text))
	}
	for _, item := range blocks.Items {
		block, ok := item.(*chattemplate.Dict)
		if !ok {
			return errRefused("a block that is not an object")
		}
		switch kind, _ := block.Get("type"); kind {
		case "text":
			if text, _ := get[string](block, "text"); text != "" {
				say(text)
			}
		case "image":
			if source, _ := get[*chattemplate.Dict](block, "source"); source.Len() > 0 {
				parts = append(parts, c.image())
			}
		case "thinking":
			if text, ok := get[string](block, "thinking"); ok {
				reasoning = append(reasoning, text)
			}
		case "redacted_thinking", "tool_reference":
		case "tool_use":
			id, _ := get[string](block, "id")
			name, _ := get[string](block, "name")
			input, _ := get[*chattemplate.Dict](block, "input")
			if id == "" {
				return errNotReproduced("a tool use without id") // which gets the time for one
			}
			if input == nil {
				input = chattemplate.NewDict()
			}
			arguments := any(input)
			if c.asText {
				var err error
				if arguments, err = pythonJSON(input); err != nil {
					return err
				}
			}
			calls = append(
				calls,
				dict("id", id, "type", "function", "function", dict("name", name, "arguments", arguments)),
			)
		case "tool_result":
			if role == "user" {
				if err := c.toolResult(block); err != nil {
					return err
				}
				continue
			}
			result, _ := block.Get("content")
			text, ok := result.(string)
			if result != nil && !ok {
				return errNotReproduced("an assistant's tool result that is no text")
			}
			say("Tool result: " + text)
		default:
			return errNotReproduced(fmt.Sprintf("a block of type %v", kind))
		}
	}
	converted := dict("role", role)
	if reasoning != nil {
		converted.Set("reasoning", strings.Join(reasoning, ""))
	}
	if calls != nil {
		converted.Set("tool_calls", chattemplate.NewList(calls...))
	}
	switch {
	case len(parts) == 1 && len(texts) == 1:
		converted.Set("content", texts[0])
	case parts != nil:
		converted.Set("content", chattemplate.NewList(parts...))
	case role == "user":
		return nil
	}
	c.messages = append(c.messages, converted)
	return nil
}

// dumping is a template that prints as Python's json.dumps.
var dumping = sync.OnceValues(func() (*chattemplate.Template, error) {
	return chattemplate.Compile("json.dumps", "{{ value | tojson(ensure_ascii=true) }}")
})

// pythonJSON returns a value as Python's json.dumps prints it.
func pythonJSON(value any) (string, error) {
	t, err := dumping()
	if err != nil {
		return "", fmt.Errorf("tokenizer: %w", err)
	}
	text, err := t.Render(context.Background(), dict("value", value), chattemplate.Limits{})
	if err != nil {
		return "", fmt.Errorf("tokenizer: a tool use's input: %w", err)
	}
	return text, nil
}

// image returns a part of an image, whose address does not matter here.
func (c *anthropicChat) image() any {
	c.media = true
	return dict("type", "image_url", "image_url", dict("url", "image"))
}

// toolResult adds a tool's message, and one of a user with the images in it.
func (c *anthropicChat) toolResult(block *chattemplate.Dict) error {
	var texts []string
	var images []any
	switch content, _ := block.Get("content"); given := content.(type) {
	case nil:
	case string:
		texts = append(texts, given)
	case *chattemplate.List:
		for _, item := range given.Items {
			part, ok := item.(*chattemplate.Dict)
			if !ok {
				return errRefused("a tool result's block that is not an object")
			}
			switch kind, _ := part.Get("type"); kind {
			case "text":
				text, given := part.Get("text")
				s, ok := text.(string)
				if given && !ok {
					return errRefused("text that is no string")
				}
				texts = append(texts, s)
			case "image":
				source, _ := get[*chattemplate.Dict](part, "source")
				kind, _ := source.Get("type")
				if url, _ := get[string](source, "url"); kind != "url" || url != "" {
					images = append(images, c.image())
				}
			case "tool_reference":
				return errNotReproduced("a reference to a tool")
			}
		}
	default:
		return errRefused("a tool result's content is neither a string nor a list of blocks")
	}
	id, _ := get[string](block, "tool_use_id")
	c.messages = append(c.messages, dict("role", "tool", "tool_call_id", id, "content", strings.Join(texts, "\n")))
	if images != nil {
		c.messages = append(c.messages, dict("role", "user", "content", chattemplate.NewList(images...)))
	}
	return nil
}
