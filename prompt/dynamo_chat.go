package prompt

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How Dynamo's frontend renders a chat. It reads the request into types of its own, which drop unknown fields. It fits
// the messages to the template, which it has probed while loading it. It renders with minijinja.
// Source: dynamo-llm 1.6.1, preprocessor, and dynamo-renderer 8.0.3, template.

// dynamoTemplate is a template and the results of Dynamo's probes of it.
type dynamoTemplate struct {
	*jinja.Template
	// argumentsString: the template prints a tool call's arguments as a string, so they stay one.
	argumentsString bool
	// reasoning: the template reads reasoning_content. reasoningString: it reads it only as one string.
	reasoning, reasoningString bool
	// demoteSystem: the template refuses later system messages, so they become the user's.
	demoteSystem bool
	// mergeUsers: the template refuses two user messages in a row, so they become one.
	mergeUsers bool
}

// dynamoChat holds the templates of a model's chats.
type dynamoChat struct {
	plain, tools *dynamoTemplate // without and with tools
	wantsParts   bool            // the template shows content only if it is a list of parts
	flattens     bool            // the frontend joins text and media to one string, with its own marks
	err          error           // why kvepp cannot reproduce the model's chats; nil if it can
}

// dynamoNative are the model types that Dynamo's frontend renders without a template.
var dynamoNative = []string{"kimi_k3", "deepseek_v41", "deepseek_v4", "deepseek_v3_2", "deepseek_v32"}

// dynamoNativeNames are parts of served names. The frontend renders models of such a name, and without a model type,
// without a template.
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

// dynamoFlattens reports whether the frontend may write media into the text for this template.
func dynamoFlattens(t *jinja.Template, source string) (bool, error) {
	if strings.Contains(source, "<|end|>") && strings.Contains(source, "<|assistant|>") ||
		strings.Contains(source, "USER:") && strings.Contains(source, "ASSISTANT:") {
		return true, nil
	}
	const text = "\x01kvepp content probe\x01"
	messages := values.NewList(dict("role", "user", "content", text))
	out, _, err := probe(t, dict("messages", messages, "add_generation_prompt", false))
	return strings.TrimSpace(out) == text, err
}

// dynamoProbeTools returns the tools of the frontend's probes.
func dynamoProbeTools() *values.List {
	parameters := dict("type", "object", "properties", values.NewDict())
	function := dict("name", "probe", "description", "", "parameters", parameters)
	return values.NewList(dict("type", "function", "function", function))
}

// dynamoVars returns the variables of a template that a client's own do not replace, without add_generation_prompt.
func (m *Model) dynamoVars(messages, tools *values.List) *values.Dict {
	vars := dict("messages", messages, "tools", listOrNone(tools))
	for _, name := range []string{"bos_token", "eos_token", "unk_token"} {
		vars.Set(name, nil)
		if token, ok := m.specialNames[name]; ok {
			vars.Set(name, token)
		}
	}
	return vars
}

// probe renders a template to learn what it does. failed says that the template refuses the messages. An error says
// that kvepp cannot tell.
func probe(t *jinja.Template, vars *values.Dict) (text string, failed bool, err error) {
	text, err = t.Render(context.Background(), vars, jinja.Limits{})
	if notOfTemplate(err) {
		return "", false, fmt.Errorf("prompt: chat template: %w", err)
	}
	return text, err != nil, nil
}

// probeDynamo compiles a template and renders Dynamo's probe messages with it.
func (m *Model) probeDynamo(source string, tools *values.List) (*dynamoTemplate, error) {
	compiled, err := jinja.MiniJinja.Compile("default", source)
	if err != nil {
		return nil, fmt.Errorf("prompt: chat template: %w", err)
	}
	t := &dynamoTemplate{Template: compiled, reasoning: strings.Contains(source, "reasoning_content")}
	render := func(generate bool, messages ...any) (string, bool) {
		vars := m.dynamoVars(values.NewList(messages...), tools)
		vars.Set("add_generation_prompt", generate)
		text, failed, unknown := probe(compiled, vars)
		if unknown != nil && err == nil {
			err = unknown
		}
		return text, failed
	}
	message := func(role, content string) any { return dict("role", role, "content", content) }
	called := func(arguments any, reasoning any) []any {
		function := dict("name", "probe", "arguments", arguments)
		call := dict("id", "call_probe", "type", "function", "function", function)
		assistant := dict("role", "assistant", "content", "")
		if reasoning != nil {
			assistant.Set("reasoning_content", reasoning)
		}
		assistant.Set("tool_calls", values.NewList(call))
		response := dict("role", "tool", "tool_call_id", "call_probe", "content", "r")
		return []any{message("user", "u"), assistant, response}
	}

	const arguments = `{"probe": "value"}`
	if strings.Contains(source, "arguments is string") {
		text, failed := render(true, called(arguments, nil)...)
		t.argumentsString = !failed && strings.Contains(text, arguments)
	}
	if _, failed := render(false, message("system", "s"), message("user", "u")); !failed {
		_, late := render(false, message("system", "s0"), message("user", "u"), message("system", "s1"))
		_, later := render(false,
			message("system", "s0"), message("user", "u"), message("assistant", "a"),
			message("system", "s1"), message("user", "u2"))
		t.demoteSystem = late || later
		_, t.mergeUsers = render(false, message("system", "s"), message("user", "u0"), message("user", "u1"))
	}
	if t.reasoning {
		const first, last = "\x01kvepp reasoning probe, first\x01", "\x01kvepp reasoning probe, last\x01"
		var empty any = values.NewDict()
		if t.argumentsString {
			empty = "{}"
		}
		if text, _ := render(true, called(empty, first)...); strings.Contains(text, first) {
			text, _ = render(true, called(empty, values.NewList(first, last))...)
			t.reasoningString = !strings.Contains(text, first) && !strings.Contains(text, last)
		}
	}
	return t, err
}

// dynamoWantsParts reports whether a template shows a message's text only if the content is a list of parts.
func dynamoWantsParts(t *jinja.Template) (bool, error) {
	const text = "template_test"
	shows := func(content any) (bool, error) {
		message := dict("role", "user", "content", content)
		vars := dict("messages", values.NewList(message), "add_generation_prompt", false)
		out, _, err := probe(t, vars)
		return strings.Contains(out, text), err
	}
	parts, err := shows(values.NewList(textPart(text)))
	if err != nil {
		return false, err
	}
	plain, err := shows(text)
	return parts && !plain, err
}

// renderDynamo returns the text that Dynamo's frontend makes of a chat.
func (m *Model) renderDynamo(ctx context.Context, request *body.Request) (string, error) {
	if err := m.checkDynamo(request); err != nil {
		return "", err
	}
	settings, err := m.dynamoSettings()
	if err != nil {
		return "", err
	}
	generate := request.AddGenerationPrompt == nil || *request.AddGenerationPrompt
	if request.ContinueFinalMessage && generate {
		return "", errContinuePrompt
	}
	t, vars, err := m.dynamoInputs(request, &settings)
	if err != nil {
		return "", err
	}
	vars.Set("add_generation_prompt", generate)
	kwargs, err := dynamoKwargs(request, &settings)
	if err != nil {
		return "", err
	}
	for key, value := range kwargs.All() {
		if name, ok := key.(string); ok {
			setDefault(vars, name, value)
		}
	}
	text, err := t.Render(ctx, vars, limits(request))
	if err != nil {
		return "", fmt.Errorf("prompt: chat template: %w", err)
	}
	if request.ContinueFinalMessage {
		if text, err = dynamoCut(text); err != nil {
			return "", err
		}
	}
	return dynamoText(text), nil
}

// checkDynamo returns an error for a chat that the frontend refuses, or whose prompt is not known here.
func (m *Model) checkDynamo(request *body.Request) error {
	c := m.dynamo
	switch {
	case c == nil:
		return ErrNoChatTemplate
	case c.err != nil:
		return c.err
	case request.Unmapped != "":
		return errNotReproduced(request.Unmapped)
	case request.HasMedia && (request.API != body.ChatCompletions || c.flattens && !c.wantsParts):
		return ErrMedia
	case request.ChatTemplate != "" || request.Documents != nil:
		return refused("chat_template and documents")
	case m.modelType == "" && slices.ContainsFunc(dynamoNativeNames, func(name string) bool {
		return strings.Contains(strings.ToLower(request.Model), name)
	}):
		return errNotReproduced("a chat of a model of this name without a model type in config.json")
	}
	return nil
}

// dynamoInputs returns the template for a chat, and its variables with the messages and tools that the frontend makes.
func (m *Model) dynamoInputs(request *body.Request, settings *DynamoSettings) (*dynamoTemplate, *values.Dict, error) {
	messages, err := dynamoMessages(request.Messages)
	if err != nil {
		return nil, nil, err
	}
	tools, err := dynamoTools(request.Tools)
	if err != nil {
		return nil, nil, err
	}
	if request.ToolChoiceNone && !settings.KeepTools {
		tools = nil
	}
	t := m.dynamo.plain
	if tools.Len() > 0 {
		t = m.dynamo.tools
	}
	if settings.ArgumentsAsObjects {
		if err := argumentsAsObjects(messages); err != nil {
			return nil, nil, err
		}
	}
	if request.ContinueFinalMessage {
		if err := dynamoTag(messages); err != nil {
			return nil, nil, err
		}
	}
	if messages, err = m.dynamo.fit(t, messages); err != nil {
		return nil, nil, err
	}
	return t, m.dynamoVars(values.NewList(messages...), tools), nil
}

// dynamoText returns the text that Dynamo's frontend encodes: without NUL bytes.
func dynamoText(text string) string { return strings.ReplaceAll(text, "\x00", "") }

// refused is errRefused for Dynamo's frontend.
func refused(what string) error {
	return fmt.Errorf("prompt: Dynamo's frontend refuses %s", what)
}
