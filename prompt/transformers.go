package prompt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// Transformers' apply_chat_template, which every engine written in Python calls. Source: transformers 5.20.2,
// tokenization_utils_base and utils/chat_template_utils. (Later versions also drop message fields that are None and
// give reasoning several names. vLLM 0.33.0 and SGLang 0.5.21 require earlier versions.)

var (
	errRequestTemplate = errors.New("prompt: the request brings its own chat template, which is not rendered without " +
		"--engine-args \"--trust-request-chat-template\"")
	errContinuePrompt = errors.New("prompt: continue_final_message and add_generation_prompt exclude each other")
	errNotContinued   = errors.New("prompt: continue_final_message, but the template does not show the final message")
)

// continueTag marks the end of a final message that is to be continued. The rendered text is cut there.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// chat holds the inputs of a template.
type chat struct {
	messages []any
	// tools and documents are nil for Python's None.
	tools, documents *values.List
	// kwargs are further variables. They win over the named special tokens.
	kwargs               *values.Dict
	addGenerationPrompt  bool
	continueFinalMessage bool
	limits               jinja.Limits
}

// newChat returns a chat with what the request says about the generation prompt and with its limits.
func newChat(request *body.Request) *chat {
	return &chat{
		addGenerationPrompt: request.AddGenerationPrompt == nil || *request.AddGenerationPrompt,
		limits:              limits(request),
	}
}

// apply renders a chat.
func (m *Model) apply(ctx context.Context, t *chatTemplate, c *chat) (string, error) {
	messages, final := c.messages, ""
	if c.continueFinalMessage {
		if c.addGenerationPrompt {
			return "", errContinuePrompt
		}
		last, _ := messages[len(messages)-1].(*values.Dict)
		tagged, text, err := tagFinal(last)
		if err != nil || !strings.Contains(t.source, "content") {
			return "", errNotContinued
		}
		messages, final = slices.Clone(messages), text
		messages[len(messages)-1] = tagged
	}
	vars := m.templateVars(c.kwargs)
	vars.Set("messages", values.NewList(messages...))
	vars.Set("tools", listOrNone(c.tools))
	vars.Set("documents", listOrNone(c.documents))
	vars.Set("add_generation_prompt", c.addGenerationPrompt)
	limits := c.limits
	limits.Memory = t.memory
	text, err := t.Render(ctx, vars, limits)
	if err != nil {
		return "", fmt.Errorf("prompt: chat template: %w", err)
	}
	if c.continueFinalMessage {
		return cutContinued(text, final)
	}
	return text, nil
}

// templateVars returns the variables of every chat: the named special tokens and kwargs. If both have a name, kwargs
// wins.
func (m *Model) templateVars(kwargs *values.Dict) *values.Dict {
	vars := values.NewDict()
	for name, token := range m.specialNames {
		vars.Set(name, token)
	}
	for key, value := range kwargs.All() {
		if name, ok := key.(string); ok {
			vars.Set(name, value)
		}
	}
	return vars
}

// tagFinal returns the final message with continueTag behind its text, and that text.
func tagFinal(message *values.Dict) (*values.Dict, string, error) {
	content, _ := message.Get("content")
	switch content := content.(type) {
	case string:
		message = message.Clone()
		message.Set("content", content+continueTag)
		return message, content, nil
	case *values.List:
		for i, item := range slices.Backward(content.Items) {
			part, _ := item.(*values.Dict)
			text, ok := get[string](part, "text")
			if !ok {
				continue
			}
			part = part.Clone()
			part.Set("text", text+continueTag)
			parts := slices.Clone(content.Items)
			parts[i] = part
			message = message.Clone()
			message.Set("content", values.NewList(parts...))
			return message, text, nil
		}
	}
	return nil, "", errNotContinued
}

// cutContinued returns the rendered text up to the end of the final message.
func cutContinued(text, final string) (string, error) {
	at := strings.LastIndex(text, strings.TrimFunc(continueTag, jinja.IsSpace))
	if at < 0 || !strings.Contains(text, strings.TrimFunc(final, jinja.IsSpace)) {
		return "", errNotContinued
	}
	if strings.HasPrefix(text[at:], continueTag) {
		return text[:at], nil
	}
	// The template trimmed the message, so its own trailing space is not part of the prompt either.
	return strings.TrimRightFunc(text[:at], jinja.IsSpace), nil
}
