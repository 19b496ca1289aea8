package prompt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// vLLM and SGLang turn a request to Anthropic's /v1/messages into a chat. This file holds what both do.

// messagesProbe holds what vLLM or SGLang finds out about a model's templates by rendering short chats. Each response
// is computed once, when a request first needs it.
type messagesProbe struct {
	// mergeSystem reports whether later system messages join the one at the front.
	mergeSystem func() (bool, error)
	// disabledEffort returns the reasoning_effort that stands for disabled thinking on vLLM.
	disabledEffort func() (string, error)
}

func (m *Model) probeMessages() *messagesProbe {
	return &messagesProbe{
		mergeSystem:    sync.OnceValues(m.mergesSystem),
		disabledEffort: sync.OnceValues(m.effortOfDisabled),
	}
}

// templateOnlyNames renames the functions that templates have in Transformers, but not where the engines probe them.
var templateOnlyNames = strings.NewReplacer("raise_exception", "raise_exception_", "strftime_now", "strftime_now_")

// mergesSystem reports whether the engine moves later system messages to the front. vLLM does so if a template fails
// on such a message. SGLang also does so if the template leaves the message out, and does not try the template for
// tools.
func (m *Model) mergesSystem() (bool, error) {
	switch {
	case m.native == nil:
	case m.options.Engine == SGLang && m.native.KeepsLateSystem:
		return false, nil
	case m.nativeMerges():
		return true, nil
	}
	if m.mistralCommon && m.chat == nil {
		return true, nil // vLLM looks at --chat-template alone
	}
	templates := []*chatTemplate{m.chat}
	late, mustShow := "t", ""
	if m.options.Engine == SGLang {
		late = "__late_system_message__"
		mustShow = late
	} else if m.chatTools != nil {
		templates = append(templates, m.chatTools)
	}
	turn := func(role, text string) any { return dict("role", role, "content", text) }
	for _, t := range templates {
		if t == nil || t.source == "" || strings.Contains(t.source, "endgeneration") {
			return true, nil
		}
		plain, err := jinja.Compile("default", templateOnlyNames.Replace(t.source))
		if err != nil {
			return false, fmt.Errorf("prompt: chat template: %w", err)
		}
		messages := values.NewList(
			turn("system", "t"), turn("user", "t"), turn("system", late), turn("user", "t"))
		text, failed, err := probe(plain, dict("messages", messages, "add_generation_prompt", false))
		if err != nil || failed || !strings.Contains(text, mustShow) {
			return err == nil, err
		}
	}
	return false, nil
}

// effortOfDisabled returns "none"; or "low" if the template refuses "none", or renders another effort in the same way.
func (m *Model) effortOfDisabled() (string, error) {
	if given := m.options.AnthropicDisabledThinkingEffort; given != "" {
		return given, nil
	}
	prompt := func(effort string) (Prompt, error) {
		messages := values.NewList(dict("role", "user", "content", "Hi"))
		payload := dict("model", "m", "messages", messages, "reasoning_effort", effort)
		p, err := m.tokenizeChat(context.Background(), chatOf(&body.Request{Model: "m"}, payload))
		if err != nil && (IsUnknown(err) || notOfTemplate(err)) {
			return p, err
		}
		if err != nil {
			return Prompt{}, nil // the template refuses the effort
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

// notOfTemplate reports whether a render failed for a reason of kvepp's, so that the engine may render the template.
func notOfTemplate(err error) bool {
	return errors.Is(err, jinja.ErrUnsupported) || errors.Is(err, jinja.ErrLimit)
}

// chatOf returns a chat request with this body, made from another API's request.
func chatOf(request *body.Request, payload *values.Dict) *body.Request {
	chat := &body.Request{
		API:           body.ChatCompletions,
		Model:         request.Model,
		CacheSalt:     request.CacheSalt,
		Body:          payload,
		RemainingCost: request.RemainingCost,
	}
	chat.Messages, _ = get[*values.List](payload, "messages")
	chat.ChatTemplateKwargs, _ = get[*values.Dict](payload, "chat_template_kwargs")
	return chat
}

// asChat returns the chat that the engine makes of a request. It returns the request itself if that is a chat, or if
// the engine reads the other APIs' bodies without making a chat of them.
func (m *Model) asChat(request *body.Request) (*body.Request, error) {
	switch {
	case request.API == body.ChatCompletions || m.options.Engine == Dynamo:
		return request, nil
	case request.API == body.Responses && m.inHarmony(request):
		return request, nil // see harmonyMessages
	case m.options.Engine == SGLang && request.API == body.Responses:
		return m.chatOfResponsesSGLang(request)
	case m.options.Engine == SGLang:
		return m.chatOfMessagesSGLang(request)
	case m.options.Engine != VLLM:
		return nil, errNotReproduced(request.API.String())
	case request.API == body.Responses:
		return m.chatOfResponsesVLLM(request)
	}
	return m.chatOfMessagesVLLM(request)
}

// messagesRules are the rules in which vLLM and SGLang differ when they read Anthropic's messages.
type messagesRules struct {
	// systemTexts returns the texts of the request's system prompt, and lateSystemTexts those of a system message among
	// the other messages. Both leave out what the engine leaves out.
	systemTexts, lateSystemTexts func(content any) ([]string, error)
	// separator stands between those texts.
	separator string
	// lateSystemIsText says that a system message among the others holds only text. Otherwise it is read like the
	// user's messages.
	lateSystemIsText bool
	// addBlocks adds what the engine makes of a message of content blocks.
	addBlocks func(c *messagesChat, role string, blocks *values.List) error
}

// messagesChat collects the chat's messages.
type messagesChat struct {
	rules         *messagesRules
	mergeSystem   bool // see messagesProbe
	jsonArguments bool // a call's arguments are JSON, as harmony shows them; else objects
	// nativeReasoning says that SGLang hands an assistant's thinking to an encoder of its own.
	nativeReasoning bool
	messages        []any
	hasMedia        bool
}

// read reads a request's system prompt and messages.
func (c *messagesChat) read(body *values.Dict) error {
	list, _ := get[*values.List](body, "messages")
	var system []string
	if given := field(body, "system"); given != nil {
		texts, err := c.rules.systemTexts(given)
		if err != nil {
			return err
		}
		system = texts
	}
	for i := 0; c.mergeSystem && i < list.Len(); i++ {
		message, _ := list.Items[i].(*values.Dict)
		if role(message) != "system" {
			continue
		}
		texts, err := c.rules.lateSystemTexts(field(message, "content"))
		if err != nil {
			return err
		}
		system = append(system, texts...)
	}
	if text := strings.Join(system, c.rules.separator); text != "" {
		c.addText("system", text)
	}
	for i := range list.Len() {
		message, _ := list.Items[i].(*values.Dict)
		if err := c.add(message); err != nil {
			return fmt.Errorf("%w (message %d)", err, i)
		}
	}
	return nil
}

// addText adds a message that is one text.
func (c *messagesChat) addText(role, text string) {
	c.messages = append(c.messages, dict("role", role, "content", text))
}

// add adds what the engine makes of one message.
func (c *messagesChat) add(message *values.Dict) error {
	role, content := role(message), field(message, "content")
	if role != "user" && role != "assistant" && role != "system" {
		return errRefused("the role %q", role)
	}
	if role == "system" && c.mergeSystem {
		return nil // read has put it at the front
	}
	if role == "system" && c.rules.lateSystemIsText {
		texts, err := c.rules.lateSystemTexts(content)
		if text := strings.Join(texts, c.rules.separator); text != "" {
			c.addText(role, text)
		}
		return err
	}
	switch content := content.(type) {
	case string:
		c.addText(role, content)
		return nil
	case *values.List:
		return c.rules.addBlocks(c, role, content)
	}
	return errBlocks("content")
}

// errBlocks says that a field does not hold what Anthropic's API has in it.
func errBlocks(what string) error {
	return errRefused("%s is neither a string nor a list of blocks", what)
}

// imagePart returns the part of an image. Its address does not change the prompt.
func (c *messagesChat) imagePart() any {
	c.hasMedia = true
	return dict("type", "image_url", "image_url", dict("url", "image"))
}

// contentOf returns the content of a message with these parts: the text if there is one text alone, else the parts.
func contentOf(parts []any) any {
	if part, _ := parts[0].(*values.Dict); len(parts) == 1 && isText(part) {
		return field(part, "text")
	}
	return values.NewList(parts...)
}

// inputSchema returns a tool's input_schema, which gets the type object if it has none.
func inputSchema(tool *values.Dict) (*values.Dict, bool) {
	schema, ok := get[*values.Dict](tool, "input_schema")
	if _, typed := schema.Get("type"); ok && !typed {
		schema = schema.Clone()
		schema.Set("type", "object")
	}
	return schema, ok
}
