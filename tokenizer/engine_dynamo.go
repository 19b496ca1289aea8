package tokenizer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// What Dynamo's frontend makes of a chat. It reads the request into types of its own, which drop what they do not know,
// fits the messages to what it found out about the template when it loaded it, and renders with minijinja.
// Source: dynamo-llm 1.6.1, preprocessor, and dynamo-renderer 8.0.3, template.

// dynamoTemplate is a template and what Dynamo found out by rendering it.
type dynamoTemplate struct {
	*chattemplate.Template
	// argumentsString: a tool call's arguments stay a string, for the template prints that.
	argumentsString bool
	// reasoning: the template reads reasoning_content; reasoningString: only as one string.
	reasoning, reasoningString bool
	// demoteSystem: a system message that is not the first is refused, so it becomes a user's. mergeUsers: so are two
	// user messages in a row, so they become one.
	demoteSystem, mergeUsers bool
}

// dynamoChat is what a model's chats are rendered with.
type dynamoChat struct {
	plain, tools *dynamoTemplate // without and with tools
	wantsParts   bool            // the template shows content only as a list of parts
	flattens     bool            // the frontend makes one string of text and media, with marks of its own
	err          error           // why no chat of the model is reproduced; nil otherwise
}

// dynamoNative are the model types that Dynamo's frontend renders without a template.
var dynamoNative = []string{"kimi_k3", "deepseek_v41", "deepseek_v4", "deepseek_v3_2", "deepseek_v32"}

// dynamoNativeNames are parts of the served names for which it does so when the model has no type.
var dynamoNativeNames = []string{"kimi-k3", "kimi_k3", "kimik3", "deepseek"}

// newDynamoChat prepares the model's template; nil without one.
func (m *Model) newDynamoChat() *dynamoChat {
	if m.chat == nil && m.chatTools == nil {
		return nil
	}
	c := &dynamoChat{}
	plain := ""
	if m.chat != nil {
		plain = m.chat.source
	}
	switch {
	case slices.Contains(dynamoNative, strings.ToLower(m.modelType)):
		c.err = errNotReproduced("a chat of " + m.modelType)
		return c
	case m.chat == nil || m.chatTools != nil:
		c.err = errNotReproduced("a choice of templates by name, which Dynamo's frontend does not find,")
		return c
	case strings.Contains(plain, "<|channel>thought") && strings.Contains(plain, "<|tool_call>call:"),
		strings.Contains(plain, "<minimax:tool_call>"):
		c.err = errNotReproduced("a template that Dynamo's frontend rewrites")
		return c
	}
	if c.plain, c.err = m.probeDynamo(plain, nil); c.err != nil {
		return c
	}
	if c.tools, c.err = m.probeDynamo(plain, dynamoProbeTools()); c.err != nil {
		return c
	}
	if c.wantsParts, c.err = dynamoWantsParts(c.plain.Template); c.err != nil {
		return c
	}
	c.flattens, c.err = dynamoFlattens(c.plain.Template, plain)
	return c
}

// dynamoFlattens reports whether the template is, or may be, one of those for which the frontend writes media into
// text.
func dynamoFlattens(t *chattemplate.Template, source string) (bool, error) {
	if strings.Contains(source, "<|end|>") && strings.Contains(source, "<|assistant|>") ||
		strings.Contains(source, "USER:") && strings.Contains(source, "ASSISTANT:") {
		return true, nil
	}
	const text = "\x01kvepp content probe\x01"
	messages := chattemplate.NewList(dict("role", "user", "content", text))
	out, _, err := probe(t, dict("messages", messages, "add_generation_prompt", false))
	return strings.TrimSpace(out) == text, err
}

func dynamoProbeTools() *chattemplate.List {
	parameters := dict("type", "object", "properties", chattemplate.NewDict())
	function := dict("name", "probe", "description", "", "parameters", parameters)
	return chattemplate.NewList(dict("type", "function", "function", function))
}

// dynamoVars are the variables of a template; a client's own do not replace them.
func (m *Model) dynamoVars(messages, tools *chattemplate.List, generate bool) *chattemplate.Dict {
	vars := dict("messages", messages, "tools", listOrNone(tools))
	for _, name := range []string{"bos_token", "eos_token", "unk_token"} {
		vars.Set(name, nil)
		if token, ok := m.specialNames[name]; ok {
			vars.Set(name, token)
		}
	}
	vars.Set("add_generation_prompt", generate)
	return vars
}

// probe renders a template as Dynamo does when it loads it. failed says that the template refuses the messages; an
// error says that this is not known.
func probe(t *chattemplate.Template, vars *chattemplate.Dict) (text string, failed bool, err error) {
	text, err = t.Render(context.Background(), vars, chattemplate.Limits{})
	if errors.Is(err, chattemplate.ErrUnsupported) || errors.Is(err, chattemplate.ErrLimit) {
		return "", false, fmt.Errorf("tokenizer: chat template: %w", err)
	}
	return text, err != nil, nil
}

// probeDynamo finds out what a template does with the messages that Dynamo tries on it.
func (m *Model) probeDynamo(source string, tools *chattemplate.List) (*dynamoTemplate, error) {
	compiled, err := chattemplate.MiniJinja.Compile("default", source)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: chat template: %w", err)
	}
	t := &dynamoTemplate{Template: compiled, reasoning: strings.Contains(source, "reasoning_content")}
	render := func(generate bool, messages ...any) (string, bool) {
		text, failed, unknown := probe(compiled, m.dynamoVars(chattemplate.NewList(messages...), tools, generate))
		if unknown != nil && err == nil {
			err = unknown
		}
		return text, failed
	}
	say := func(role, content string) any { return dict("role", role, "content", content) }
	called := func(arguments any, reasoning any) []any {
		function := dict("name", "probe", "arguments", arguments)
		call := dict("id", "call_probe", "type", "function", "function", function)
		assistant := dict("role", "assistant", "content", "")
		if reasoning != nil {
			assistant.Set("reasoning_content", reasoning)
		}
		assistant.Set("tool_calls", chattemplate.NewList(call))
		answer := dict("role", "tool", "tool_call_id", "call_probe", "content", "r")
		return []any{say("user", "u"), assistant, answer}
	}

	const arguments = `{"probe": "value"}`
	if strings.Contains(source, "arguments is string") {
		text, failed := render(true, called(arguments, nil)...)
		t.argumentsString = !failed && strings.Contains(text, arguments)
	}
	if _, failed := render(false, say("system", "s"), say("user", "u")); !failed {
		_, late := render(false, say("system", "s0"), say("user", "u"), say("system", "s1"))
		_, later := render(
			false,
			say("system", "s0"),
			say("user", "u"),
			say("assistant", "a"),
			say("system", "s1"),
			say("user", "u2"),
		)
		t.demoteSystem = late || later
		_, t.mergeUsers = render(false, say("system", "s"), say("user", "u0"), say("user", "u1"))
	}
	if t.reasoning {
		const first, last = "\x01kvepp reasoning probe, first\x01", "\x01kvepp reasoning probe, last\x01"
		var empty any = chattemplate.NewDict()
		if t.argumentsString {
			empty = "{}"
		}
		if text, _ := render(true, called(empty, first)...); strings.Contains(text, first) {
			text, _ = render(true, called(empty, chattemplate.NewList(first, last))...)
			t.reasoningString = !strings.Contains(text, first) && !strings.Contains(text, last)
		}
	}
	return t, err
}

// dynamoWantsParts renders one message in both forms and looks which shows its text.
func dynamoWantsParts(t *chattemplate.Template) (bool, error) {
	const text = "template_test"
	shows := func(content any) (bool, error) {
		message := dict("role", "user", "content", content)
		vars := dict("messages", chattemplate.NewList(message), "add_generation_prompt", false)
		out, _, err := probe(t, vars)
		return strings.Contains(out, text), err
	}
	parts, err := shows(chattemplate.NewList(textPart(text)))
	if err != nil {
		return false, err
	}
	plain, err := shows(text)
	return parts && !plain, err
}

// renderDynamo returns the text that Dynamo's frontend makes of a chat. It is one function, so that it can be compared
// line by line with the frontend's.
func (m *Model) renderDynamo(ctx context.Context, request *apibody.Request) (string, error) {
	c := m.dynamo
	switch {
	case c == nil:
		return "", ErrNoChatTemplate
	case c.err != nil:
		return "", c.err
	case request.Unmapped != "":
		return "", errNotReproduced(request.Unmapped)
	case request.HasMedia && (request.API != apibody.ChatCompletions || c.flattens && !c.wantsParts):
		return "", ErrMedia
	case request.ChatTemplate != "" || request.Documents != nil:
		return "", refused("chat_template and documents")
	case m.modelType == "" && slices.ContainsFunc(dynamoNativeNames, func(name string) bool {
		return strings.Contains(strings.ToLower(request.Model), name)
	}):
		return "", errNotReproduced("a chat of a model of this name without a model type in config.json")
	}
	settings, err := m.dynamoSettings()
	if err != nil {
		return "", err
	}
	generate := request.AddGenerationPrompt == nil || *request.AddGenerationPrompt
	if request.ContinueFinalMessage && generate {
		return "", errContinuePrompt
	}
	messages, err := dynamoMessages(request.Messages)
	if err != nil {
		return "", err
	}
	tools, err := dynamoTools(request.Tools)
	if err != nil {
		return "", err
	}
	if request.ToolChoiceNone && !settings.KeepTools {
		tools = nil
	}
	t := c.plain
	if tools.Len() > 0 {
		t = c.tools
	}
	if settings.ArgumentsAsObjects {
		if err := argumentsAsObjects(messages); err != nil {
			return "", err
		}
	}
	if request.ContinueFinalMessage {
		if err := dynamoTag(messages); err != nil {
			return "", err
		}
	}
	if messages, err = c.fit(t, messages); err != nil {
		return "", err
	}
	vars := m.dynamoVars(chattemplate.NewList(messages...), tools, generate)
	kwargs, err := dynamoKwargs(request, &settings)
	if err != nil {
		return "", err
	}
	for key, value := range kwargs.All() {
		if name, ok := key.(string); ok {
			if _, taken := vars.Get(name); !taken {
				vars.Set(name, value)
			}
		}
	}
	text, err := t.Render(ctx, vars, limits(request))
	if err != nil {
		return "", fmt.Errorf("tokenizer: chat template: %w", err)
	}
	if request.ContinueFinalMessage {
		if text, err = dynamoCut(text); err != nil {
			return "", err
		}
	}
	return dynamoText(text), nil
}

// dynamoText is the text that Dynamo's frontend encodes: it drops NUL bytes.
func dynamoText(text string) string { return strings.ReplaceAll(text, "\x00", "") }

func refused(what string) error {
	return fmt.Errorf("tokenizer: Dynamo's frontend refuses %s", what)
}
