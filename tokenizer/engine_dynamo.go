package tokenizer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

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

// dynamoFlattens reports whether the template is, or may be, one of those for which the frontend writes media into text.
func dynamoFlattens(t *chattemplate.Template, source string) (bool, error) {
	if strings.Contains(source, "<|end|>") && strings.Contains(source, "<|assistant|>") || strings.Contains(source, "USER:") && strings.Contains(source, "ASSISTANT:") {
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

// probe renders a template as Dynamo does when it loads it. failed says that the template refuses the messages; an error
// says that this is not known.
func probe(t *chattemplate.Template, vars *chattemplate.Dict) (text string, failed bool, err error) {
	text, err = t.Render(vars, chattemplate.Limits{})
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
		_, later := render(false, say("system", "s0"), say("user", "u"), say("assistant", "a"), say("system", "s1"), say("user", "u2"))
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

// renderDynamo returns the text that Dynamo's frontend makes of a chat.
func (m *Model) renderDynamo(request *apibody.Request) (string, error) {
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
	text, err := t.Render(vars, chattemplate.Limits{})
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

// dynamoMessages returns the messages as the frontend's types hold them: known fields in a fixed order, nothing that is
// null. The messages are new.
func dynamoMessages(list *chattemplate.List) ([]any, error) {
	messages := make([]any, len(list.Items))
	for i, item := range list.Items {
		message, _ := item.(*chattemplate.Dict)
		typed, err := dynamoMessage(message)
		if err != nil {
			return nil, fmt.Errorf("%w (message %d)", err, i)
		}
		messages[i] = typed
	}
	return messages, nil
}

func dynamoMessage(message *chattemplate.Dict) (*chattemplate.Dict, error) {
	role, _ := get[string](message, "role")
	typed := dict("role", role)
	content, _ := message.Get("content")
	for _, key := range []string{"tools", "partial"} {
		if v, _ := message.Get(key); v != nil {
			return nil, refused("'" + key + "' in a message")
		}
	}
	if content != nil || role != "assistant" && role != "function" {
		parts, err := dynamoContent(content, role == "user")
		if err != nil {
			return nil, err
		}
		typed.Set("content", parts)
	}
	switch role {
	case "developer", "system", "user":
		return typed, copyStrings(typed, message, "name")
	case "tool":
		if err := copyStrings(typed, message, "tool_call_id"); err != nil {
			return nil, err
		}
		if _, ok := typed.Get("tool_call_id"); !ok {
			return nil, refused("a tool's message without tool_call_id")
		}
		return typed, nil
	case "assistant":
		return typed, dynamoAssistant(typed, message)
	}
	return nil, errNotReproduced(fmt.Sprintf("a message of the role %q", role))
}

// copyStrings copies fields that are strings, and leaves out those that are null or absent.
func copyStrings(to, from *chattemplate.Dict, names ...string) error {
	for _, name := range names {
		v, _ := from.Get(name)
		switch v.(type) {
		case nil:
		case string:
			to.Set(name, v)
		default:
			return refused("a '" + name + "' that is no string")
		}
	}
	return nil
}

// dynamoContent returns text, or a list of parts: text, and if media may be there, what stands for images, videos and sound.
func dynamoContent(content any, media bool) (any, error) {
	list, ok := content.(*chattemplate.List)
	if !ok {
		if text, ok := content.(string); ok {
			return text, nil
		}
		return nil, refused("content that is neither a string nor a list of parts")
	}
	parts := make([]any, len(list.Items))
	for i, item := range list.Items {
		part, _ := item.(*chattemplate.Dict)
		kind, _ := get[string](part, "type")
		text, ok := get[string](part, "text")
		if held := mediaKinds[kind]; media && strings.HasSuffix(kind, "_url") && held != "" {
			parts[i] = dict("type", held)
			continue
		}
		if marked, _ := part.Get("prompt_cache_breakpoint"); kind != "text" || !ok || marked != nil {
			return nil, errNotReproduced("a content part other than text")
		}
		parts[i] = textPart(text)
	}
	return chattemplate.NewList(parts...), nil
}

// dynamoAssistant adds an assistant's further fields.
func dynamoAssistant(typed, message *chattemplate.Dict) error {
	reasoning, _ := message.Get("reasoning_content")
	other, _ := message.Get("reasoning")
	if reasoning == nil {
		reasoning = other
	} else if other != nil {
		return refused("both reasoning_content and reasoning")
	}
	switch r := reasoning.(type) {
	case nil:
	case string:
		typed.Set("reasoning_content", r)
	case *chattemplate.List:
		for _, item := range r.Items {
			if _, ok := item.(string); !ok {
				return refused("reasoning that is no list of strings")
			}
		}
		typed.Set("reasoning_content", chattemplate.NewList(slices.Clone(r.Items)...))
	default:
		return refused("reasoning that is neither a string nor a list of strings")
	}
	if err := copyStrings(typed, message, "refusal", "name"); err != nil {
		return err
	}
	if audio, _ := message.Get("audio"); audio != nil {
		return errNotReproduced("audio")
	}
	if v, _ := message.Get("tool_calls"); v != nil {
		calls, ok := v.(*chattemplate.List)
		if !ok {
			return refused("tool_calls that are no list")
		}
		out := make([]any, len(calls.Items))
		for i, item := range calls.Items {
			call, _ := item.(*chattemplate.Dict)
			id, hasID := get[string](call, "id")
			kind, _ := call.Get("type")
			function, isObject := get[*chattemplate.Dict](call, "function")
			if !hasID || !isObject || kind != nil && kind != "function" {
				return refused("a tool call that is not {id, type: function, function}")
			}
			typedFunction, err := dynamoFunctionCall(function)
			if err != nil {
				return err
			}
			out[i] = dict("id", id, "type", "function", "function", typedFunction)
		}
		typed.Set("tool_calls", chattemplate.NewList(out...))
	}
	if v, _ := message.Get("function_call"); v != nil {
		function, _ := v.(*chattemplate.Dict)
		typedFunction, err := dynamoFunctionCall(function)
		if err != nil {
			return err
		}
		typed.Set("function_call", typedFunction)
	}
	return nil
}

// dynamoFunctionCall returns a call whose arguments are a string of JSON.
func dynamoFunctionCall(function *chattemplate.Dict) (*chattemplate.Dict, error) {
	name, ok := get[string](function, "name")
	if !ok {
		return nil, refused("a function call without a name")
	}
	arguments, _ := function.Get("arguments")
	if object, isObject := arguments.(*chattemplate.Dict); isObject {
		text, err := chattemplate.RustJSON(object)
		if err != nil {
			return nil, err
		}
		arguments = text
	}
	if _, ok := arguments.(string); !ok {
		return nil, refused("arguments that are neither a string nor an object")
	}
	return dict("name", name, "arguments", arguments), nil
}

// dynamoTools returns the tools with the fields that the frontend knows, and what it adds for templates that expect it:
// a description, and in parameters a type and properties.
func dynamoTools(list *chattemplate.List) (*chattemplate.List, error) {
	if list == nil {
		return nil, nil
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*chattemplate.Dict)
		function, _ := get[*chattemplate.Dict](tool, "function")
		name, named := get[string](function, "name")
		if kind, _ := tool.Get("type"); kind != "function" || !named {
			return nil, refused("a tool that is not {type: function, function: {name}}")
		}
		typed := dict("name", name)
		if err := copyStrings(typed, function, "description"); err != nil {
			return nil, err
		}
		if v, _ := function.Get("parameters"); v != nil {
			if err := chattemplate.CheckRustNumbers(v); err != nil {
				return nil, err
			}
			typed.Set("parameters", dynamoParameters(v))
		}
		switch strict, _ := function.Get("strict"); strict.(type) {
		case nil:
		case bool:
			typed.Set("strict", strict)
		default:
			return nil, refused("a 'strict' that is no boolean")
		}
		if _, ok := typed.Get("description"); !ok {
			typed.Set("description", "")
		}
		tools[i] = dict("type", "function", "function", typed)
	}
	return chattemplate.NewList(tools...), nil
}

func dynamoParameters(v any) any {
	parameters, ok := v.(*chattemplate.Dict)
	if !ok {
		return v
	}
	_, typed := parameters.Get("type")
	_, listed := parameters.Get("properties")
	if typed && listed {
		return parameters
	}
	parameters = parameters.Clone()
	if !typed {
		parameters.Set("type", "object")
	}
	if !listed {
		parameters.Set("properties", chattemplate.NewDict())
	}
	return parameters
}

// dynamoTag marks the end of the final message that is to be continued.
func dynamoTag(messages []any) error {
	last, _ := messages[len(messages)-1].(*chattemplate.Dict)
	content, _ := last.Get("content")
	switch c := content.(type) {
	case string:
		if c != "" {
			last.Set("content", c+continueTag)
			return nil
		}
	case *chattemplate.List:
		for _, item := range slices.Backward(c.Items) {
			part, _ := item.(*chattemplate.Dict)
			if text, _ := get[string](part, "text"); text != "" {
				part.Set("text", text+continueTag)
				return nil
			}
		}
	}
	return errNotContinued
}

// dynamoCut cuts the text at the tag, and white space before it if the template trimmed the message.
func dynamoCut(text string) (string, error) {
	at := strings.LastIndex(text, strings.TrimRight(continueTag, " "))
	switch {
	case at < 0:
		return "", errNotContinued
	case strings.HasPrefix(text[at:], continueTag):
		return text[:at], nil
	}
	return strings.TrimRightFunc(text[:at], unicode.IsSpace), nil
}

// fit gives the messages, which it may change, the form that the template takes.
func (c *dynamoChat) fit(t *dynamoTemplate, messages []any) ([]any, error) {
	if t.demoteSystem {
		messages = demoteSystem(messages)
	}
	if t.mergeUsers {
		messages = mergeUsers(messages)
	}
	for _, item := range messages {
		message, _ := item.(*chattemplate.Dict)
		c.fitContent(message)
		if err := fitArguments(t, message); err != nil {
			return nil, err
		}
		if role, _ := message.Get("role"); role == "assistant" {
			fitReasoning(t, message)
		}
	}
	return messages, nil
}

func role(message any) string {
	d, _ := message.(*chattemplate.Dict)
	role, _ := get[string](d, "role")
	return role
}

// demoteSystem joins the leading system messages, and makes users of those that come later.
func demoteSystem(messages []any) []any {
	leading := 0
	for leading < len(messages) && role(messages[leading]) == "system" {
		leading++
	}
	for _, extra := range messages[min(1, leading):leading] {
		joinContent(messages[0], extra)
	}
	if leading > 1 {
		messages = slices.Delete(messages, 1, leading)
	}
	for _, message := range messages[min(1, len(messages)):] {
		if d, ok := message.(*chattemplate.Dict); ok && role(d) == "system" {
			d.Set("role", "user")
		}
	}
	return messages
}

// mergeUsers joins users' messages that follow one another.
func mergeUsers(messages []any) []any {
	var merged []any
	for _, message := range messages {
		if n := len(merged); n > 0 && role(message) == "user" && role(merged[n-1]) == "user" {
			joinContent(merged[n-1], message)
			continue
		}
		merged = append(merged, message)
	}
	return merged
}

// joinContent adds a message's content to another's, whose content then is its last field.
func joinContent(to, from any) {
	target, _ := to.(*chattemplate.Dict)
	source, _ := from.(*chattemplate.Dict)
	a, _ := target.Get("content")
	b, _ := source.Get("content")
	var joined any
	switch a := a.(type) {
	case nil:
		joined = b
	case string:
		switch b := b.(type) {
		case string:
			if a != "" && b != "" {
				a += "\n\n"
			}
			joined = a + b
		case *chattemplate.List:
			parts := []any{}
			if a != "" {
				parts = append(parts, textPart(a))
			}
			joined = chattemplate.NewList(append(parts, b.Items...)...)
		}
	case *chattemplate.List:
		items := slices.Clone(a.Items)
		switch b := b.(type) {
		case string:
			if b != "" {
				items = append(items, textPart(b))
			}
		case *chattemplate.List:
			items = append(items, b.Items...)
		}
		joined = chattemplate.NewList(items...)
	}
	swapRemove(target, "content")
	target.Set("content", joined)
}

// swapRemove removes a key, whose place the last key takes, as serde_json's maps do.
func swapRemove(d *chattemplate.Dict, name string) {
	if _, ok := d.Get(name); !ok {
		return
	}
	var last string
	for key := range d.All() {
		last, _ = key.(string)
	}
	moved, _ := d.Get(last)
	kept := chattemplate.NewDict()
	for key, value := range d.All() {
		switch key {
		case name:
			if last != name {
				kept.Set(last, moved)
			}
		case last:
		default:
			if key, ok := key.(string); ok {
				kept.Set(key, value)
			}
		}
	}
	*d = *kept
}

// fitContent makes parts of a string, or a string of text parts, joined by newlines. A list without parts stays one.
func (c *dynamoChat) fitContent(message *chattemplate.Dict) {
	content, _ := message.Get("content")
	switch content := content.(type) {
	case string:
		if c.wantsParts {
			message.Set("content", chattemplate.NewList(textPart(content)))
		}
	case *chattemplate.List:
		if c.wantsParts || len(content.Items) == 0 {
			return
		}
		if text, ok := joinTexts(content, "\n"); ok {
			message.Set("content", text)
		}
	}
}

// fitArguments parses the arguments of calls, unless the template takes strings. What is no JSON stays a string.
func fitArguments(t *dynamoTemplate, message *chattemplate.Dict) error {
	if calls, ok := get[*chattemplate.List](message, "tool_calls"); ok && !t.argumentsString {
		for _, item := range calls.Items {
			call, _ := item.(*chattemplate.Dict)
			if err := parseArguments(call, "function"); err != nil {
				return err
			}
		}
	}
	return parseArguments(message, "function_call")
}

// maxRustDepth is how deep JSON nests that serde_json reads.
const maxRustDepth = 127

func parseArguments(of *chattemplate.Dict, key string) error {
	function, _ := get[*chattemplate.Dict](of, key)
	text, ok := get[string](function, "arguments")
	if !ok {
		return nil
	}
	parsed, err := chattemplate.ParseJSON([]byte(text))
	if err != nil {
		return nil
	}
	if err := checkRustJSON(text, parsed); err != nil {
		return err
	}
	function.Set("arguments", parsed)
	return nil
}

// checkRustJSON refuses arguments that serde_json does not read, or reads as other numbers. parsed is what text says.
func checkRustJSON(text string, parsed any) error {
	if strings.Count(text, "{")+strings.Count(text, "[") > maxRustDepth && nesting(parsed) > maxRustDepth {
		return errNotReproduced("arguments nested this deep")
	}
	return chattemplate.CheckRustNumbers(parsed)
}

// fitReasoning puts an assistant's reasoning into its content, between <think> tags, for a template that does not read it,
// and joins its segments for a template that reads one string.
func fitReasoning(t *dynamoTemplate, message *chattemplate.Dict) {
	reasoning, _ := message.Get("reasoning_content")
	var segments []string
	switch r := reasoning.(type) {
	case string:
		segments = []string{r}
	case *chattemplate.List:
		for _, item := range r.Items {
			if s, _ := item.(string); s != "" {
				segments = append(segments, s)
			}
		}
		if t.reasoning && t.reasoningString {
			message.Set("reasoning_content", strings.Join(segments, "\n"))
			return
		}
	}
	thought := ""
	for _, s := range segments {
		if s != "" {
			thought += "<think>" + s + "</think>"
		}
	}
	if t.reasoning || thought == "" {
		return
	}
	switch content, _ := message.Get("content"); c := content.(type) {
	case nil:
		message.Set("content", thought)
	case string:
		message.Set("content", thought+c)
	case *chattemplate.List:
		message.Set("content", chattemplate.NewList(append([]any{textPart(thought)}, c.Items...)...))
	}
	swapRemove(message, "reasoning_content")
}

// The variables by which templates turn thinking on and off.
const (
	thinking       = "thinking"
	enableThinking = "enable_thinking"
	thinkingMode   = "thinking_mode"
)

// dynamoKwargs returns the client's variables, with its wishes about thinking said in every name that templates read.
func dynamoKwargs(request *apibody.Request, settings *DynamoSettings) (*chattemplate.Dict, error) {
	kwargs := chattemplate.NewDict()
	if request.ChatTemplateKwargs != nil {
		kwargs = request.ChatTemplateKwargs.Clone()
	}
	if _, ok := kwargs.Get("chat_template"); ok {
		return nil, refused("a chat_template among the template's arguments")
	}
	if err := chattemplate.CheckRustNumbers(kwargs); err != nil {
		return nil, err
	}
	if request.API != apibody.Messages {
		if err := resolveThinking(request, kwargs); err != nil {
			return nil, err
		}
	}
	settings.defaultThinking(request, kwargs)
	decided, err := sameThinking(kwargs)
	if err == nil {
		settings.lastWord(request, kwargs, decided)
	}
	return kwargs, err
}

// sameThinking says in both names whether the model is to think, and reports whether a variable decides that.
func sameThinking(kwargs *chattemplate.Dict) (decided bool, err error) {
	for _, name := range []string{thinking, enableThinking, thinkingMode} {
		v, _ := kwargs.Get(name)
		switch v := v.(type) {
		case bool:
			if name == enableThinking || name == thinking {
				kwargs.Set(thinking, v)
				kwargs.Set(enableThinking, v)
				return true, nil
			}
		case nil:
			continue
		case string:
			switch mode := strings.ToLower(v); {
			case name != thinkingMode:
			case mode == "enabled" || mode == "disabled":
				kwargs.Set(thinking, mode == "enabled")
				kwargs.Set(enableThinking, mode == "enabled")
				return true, nil
			case mode == "adaptive" || mode == "chat" || mode == "thinking":
				return false, nil
			}
		}
		return false, errNotReproduced(fmt.Sprintf("%s of %v", name, v))
	}
	return false, nil
}

// dynamoEfforts are the values of reasoning_effort that the frontend takes.
var dynamoEfforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// resolveThinking decides whether the model is to think, by the request's thinking, the template's arguments and
// reasoning_effort, in this order.
func resolveThinking(request *apibody.Request, kwargs *chattemplate.Dict) error {
	effort, _ := kwargs.Get("reasoning_effort")
	if request.ReasoningEffort != "" {
		if !slices.Contains(dynamoEfforts, request.ReasoningEffort) {
			return refused("this reasoning_effort")
		}
		effort = request.ReasoningEffort
	}
	set := func(on bool) {
		kwargs.Set(thinking, on)
		kwargs.Set(enableThinking, on)
		mode := "disabled"
		if on {
			mode = "enabled"
		}
		kwargs.Set(thinkingMode, mode)
	}
	controlled := effort != nil || request.Thinking != nil
	for _, name := range []string{thinking, enableThinking, thinkingMode} {
		_, given := kwargs.Get(name)
		controlled = controlled || given
	}
	if !controlled {
		return nil
	}
	wish := request.Thinking
	if object, ok := wish.(*chattemplate.Dict); ok {
		wish, _ = object.Get("type")
	}
	switch wish {
	case nil:
	case true, "enabled":
		set(true)
	case false, "disabled":
		set(false)
	default:
		return errNotReproduced("this 'thinking'")
	}
	decided := false
	for _, name := range []string{thinking, enableThinking} {
		if on, ok := get[bool](kwargs, name); ok && !decided {
			set(on)
			decided = true
		}
	}
	mode, _ := get[string](kwargs, thinkingMode)
	switch mode = strings.ToLower(mode); {
	case decided || mode == "adaptive":
	case mode == "enabled" || mode == "disabled":
		set(mode == "enabled")
	default:
		if grade, ok := effort.(string); ok {
			set(grade != "none")
		}
	}
	if effort != nil {
		kwargs.Set("reasoning_effort", effort)
	}
	return nil
}
