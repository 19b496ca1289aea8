package tokenizer

import (
	"fmt"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// renderDynamo returns the text that Dynamo's frontend makes of a chat.
func (m *Model) renderDynamo(request *apibody.Request) (string, error) {
	template := m.chat
	if request.Tools != nil && m.chatTools != nil {
		template = m.chatTools
	}
	switch {
	case request.ChatTemplate != "":
		return "", errRequestTemplate // engines refuse it by default, and it is code from a client
	case template == nil:
		return "", ErrNoChatTemplate
	}
	generate := !request.ContinueFinalMessage
	if request.AddGenerationPrompt != nil {
		generate = *request.AddGenerationPrompt
	}
	if generate && request.ContinueFinalMessage {
		return "", errContinuePrompt
	}
	messages, final, err := template.messages(request)
	if err != nil {
		return "", err
	}
	vars := m.templateVars(request.ChatTemplateKwargs)
	if request.ReasoningEffort != "" {
		if _, given := request.ChatTemplateKwargs.Get("reasoning_effort"); !given {
			vars.Set("reasoning_effort", request.ReasoningEffort)
		}
	}
	vars.Set("messages", messages)
	vars.Set("tools", listOrNone(request.Tools))
	vars.Set("documents", listOrNone(request.Documents))
	vars.Set("add_generation_prompt", generate)
	text, err := template.Render(vars, chattemplate.Limits{})
	if err != nil {
		return "", fmt.Errorf("tokenizer: chat template: %w", err)
	}
	if request.ContinueFinalMessage {
		return cutContinued(text, final)
	}
	return text, nil
}

// messages returns the messages as the template gets them, and the final message's text if it is to be continued.
// Messages that need no change are the request's own; the others are copies.
func (c *chatTemplate) messages(request *apibody.Request) (list *chattemplate.List, final string, err error) {
	list = &chattemplate.List{Items: make([]any, len(request.Messages.Items))}
	for i, item := range request.Messages.Items {
		message, ok := item.(*chattemplate.Dict)
		if !ok {
			return nil, "", fmt.Errorf("tokenizer: message %d is not an object", i)
		}
		message = c.content(aliasReasoning(dropNone(message)))
		if request.ContinueFinalMessage && i == len(list.Items)-1 {
			if message, final, err = tagFinal(message); err != nil {
				return nil, "", err
			}
		}
		list.Items[i] = message
	}
	return list, final, nil
}

// dropNone removes keys whose value is None, which templates would print.
// Source: transformers 5.23.0, apply_chat_template.
func dropNone(message *chattemplate.Dict) *chattemplate.Dict {
	none := 0
	for _, v := range message.All() {
		if v == nil {
			none++
		}
	}
	if none == 0 {
		return message
	}
	kept := chattemplate.NewDict()
	for k, v := range message.All() {
		if name, ok := k.(string); ok && v != nil {
			kept.Set(name, v)
		}
	}
	return kept
}

// reasoningFields are the names under which a message's reasoning comes, the standard one first.
var reasoningFields = [...]string{"reasoning_content", "thinking", "reasoning"}

// aliasReasoning gives a message's reasoning the names that templates read.
// Source: transformers 5.23.0, utils/chat_template_utils.
func aliasReasoning(message *chattemplate.Dict) *chattemplate.Dict {
	for _, field := range reasoningFields {
		reasoning, ok := message.Get(field)
		if !ok || reasoning == nil {
			continue
		}
		aliased := chattemplate.NewDict()
		aliased.Set("thinking", reasoning)
		for k, v := range message.All() {
			if name, ok := k.(string); ok {
				aliased.Set(name, v)
			}
		}
		aliased.Set("reasoning_content", reasoning)
		return aliased
	}
	return message
}

// content gives a message's content the form that the template takes.
// Source: dynamo-llm 1.6.1, preprocessor/prompt: text parts are joined by newlines for a template that takes strings, and
// a string becomes one part for a template that takes parts.
func (c *chatTemplate) content(message *chattemplate.Dict) *chattemplate.Dict {
	content, _ := message.Get("content")
	switch content := content.(type) {
	case string:
		if !c.wantsParts {
			return message
		}
		message = message.Clone()
		message.Set("content", textParts(content))
	case *chattemplate.List:
		if c.wantsParts {
			return message
		}
		text, ok := joinParts(content)
		if !ok {
			return message
		}
		message = message.Clone()
		message.Set("content", text)
	}
	return message
}

func textParts(text string) *chattemplate.List { return chattemplate.NewList(textPart(text)) }

// joinParts joins a non-empty list of text parts; ok is false for any other list.
func joinParts(parts *chattemplate.List) (text string, ok bool) {
	texts := make([]string, 0, len(parts.Items))
	for _, item := range parts.Items {
		part, isObject := item.(*chattemplate.Dict)
		if !isObject {
			return "", false
		}
		if kind, _ := part.Get("type"); kind != "text" {
			return "", false
		}
		if text, isString := get[string](part, "text"); isString {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n"), len(parts.Items) > 0
}
