package prompt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/encoders"
	"kvepp/prompt/values"
)

// How vLLM's OpenAI server prepares and renders a chat: pydantic reads the body, then vLLM parses the messages.
// Source: vLLM 0.33.0, entrypoints/openai/chat_completion/protocol, renderers/chat_utils/chat_message, renderers/hf.

// vllmOwnEncoding are the architectures whose chats vLLM encodes without a Jinja template. Source: vLLM 0.33.0,
// config/model.
var vllmOwnEncoding = []string{
	"Alpamayo2Super", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration", "DeepseekV32ForCausalLM",
	"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "InklingForCausalLM",
	"InklingForConditionalGeneration",
}

// givenVLLM returns the ids that a decoding vLLM takes over from the vLLM that prefilled; nil if the request brings
// none. A field whose effect in vLLM is not known here is an error.
func (m *Model) givenVLLM(request *body.Request) ([][]kvblock.Token, error) {
	if m.mistralCommon && m.mistral == nil {
		return nil, errNotReproduced("a folder with Mistral's own SentencePiece tokenizer")
	}
	for _, name := range []string{"truncate_prompt_tokens", "suffix", "prompt_embeds"} {
		if field(request.Body, name) != nil {
			return nil, errNotReproduced(name)
		}
	}
	transfer, _ := get[*values.Dict](request.Body, "kv_transfer_params")
	list, isIDs := get[*values.TokenIDs](transfer, "prompt_token_ids")
	_, isList := get[*values.List](transfer, "prompt_token_ids")
	if !isIDs && !isList || request.API != body.ChatCompletions || request.HasMedia ||
		field(request.Body, "echo") == true {
		return nil, nil
	}
	ids, ok := tokenList(list)
	if !ok || len(ids) == 0 {
		return nil, errRefused("kv_transfer_params.prompt_token_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// tokenList returns the ids of a list; false if the list holds anything else.
func tokenList(list *values.TokenIDs) ([]kvblock.Token, bool) {
	if list == nil || list.Bad >= 0 {
		return nil, false
	}
	return tokens(list.IDs), true
}

// renderVLLM returns the text that vLLM makes of a chat by its template.
func (m *Model) renderVLLM(ctx context.Context, request *body.Request) (string, error) {
	if slices.Contains(vllmOwnEncoding, m.architecture) {
		return "", errNotReproduced("a chat of " + m.architecture)
	}
	c, own, err := m.vllmChat(request)
	if err != nil {
		return "", err
	}
	t, err := m.requestTemplate(own, c.tools != nil)
	if err != nil {
		return "", err
	}
	if c.messages, err = convertMessages(request, m.vllmMessage, t.wantsParts); err != nil {
		return "", err
	}
	if request.API == body.Responses {
		orderCalls(c.messages)
	}
	if !strings.Contains(t.source, `"developer"`) && !strings.Contains(t.source, `'developer'`) {
		c.messages = developerToSystem(c.messages)
	}
	return m.apply(ctx, t, c)
}

// vllmChat returns a chat without its messages, and the template that the request brings; nil if it brings none.
func (m *Model) vllmChat(request *body.Request) (c *chat, own any, err error) {
	processor, _ := get[*values.Dict](request.Body, "mm_processor_kwargs")
	if audio := field(processor, "use_audio_in_video"); request.HasMedia && audio != nil && audio != false {
		return nil, nil, errNotReproduced("use_audio_in_video")
	}
	kwargs, err := m.vllmKwargs(request)
	if err != nil {
		return nil, nil, err
	}
	c = newChat(request)
	c.kwargs, c.continueFinalMessage = kwargs, request.ContinueFinalMessage
	if c.tools, err = m.vllmTools(request); err != nil {
		return nil, nil, err
	}
	if tools, given := kwargs.Get("tools"); given { // chat_template_kwargs win over the request's own
		list, ok := tools.(*values.List)
		if !ok {
			return nil, nil, errRefused("chat_template_kwargs.tools is not a list")
		}
		c.tools = list
	}
	if field(request.Body, "documents") == nil {
		c.documents, _ = get[*values.List](kwargs, "documents")
	} else {
		c.documents = request.Documents
	}
	own = field(request.ChatTemplateKwargs, "chat_template")
	if own == nil {
		own = field(request.Body, "chat_template")
	}
	return c, own, nil
}

// nativeVLLM returns what vLLM hands to the model's encoder. vLLM ignores the request's own template here.
func (m *Model) nativeVLLM(request *body.Request) (*encoders.Chat, error) {
	c, own, err := m.vllmChat(request)
	switch {
	case err != nil:
		return nil, err
	case own != nil && !m.options.RequestChatTemplate:
		return nil, errRequestTemplate
	case c.continueFinalMessage && c.addGenerationPrompt:
		return nil, errContinuePrompt
	}
	convert := m.vllmMessage
	if m.native.Raw {
		convert = vllmRawMessage
		c.kwargs.Set("add_generation_prompt", c.addGenerationPrompt)
		c.kwargs.Set("continue_final_message", c.continueFinalMessage)
	}
	messages, err := convertMessages(request, convert, m.native.WantsParts)
	if err != nil {
		return nil, err
	}
	return &encoders.Chat{Messages: messages, Tools: c.tools, Variables: c.kwargs}, nil
}

// vllmRawMessage returns a message as vLLM hands it to an encoder that gets the request's own messages.
func vllmRawMessage(given *values.Dict, _ bool) (*values.Dict, error) {
	if name, has := given.Get("name"); has && name == nil {
		if _, isList := get[*values.List](given, "content"); isList {
			return nil, errRefused("parts beside a name that is null") // they are an iterator, not a list
		}
	}
	reasoning := firstField(given, "reasoning", "reasoning_content")
	if _, isText := reasoning.(string); reasoning != nil && !isText {
		return nil, errNotReproduced("reasoning that is not a string")
	}
	content, _ := get[*values.List](given, "content")
	for i := range content.Len() {
		part, isObject := content.Items[i].(*values.Dict)
		text, hasText := part.Get("text")
		if _, isText := text.(string); !isObject || field(part, "uuid") != nil || hasText && !isText {
			return nil, errNotReproduced("such a content part")
		}
	}
	calls := field(given, "tool_calls")
	if calls == nil || role(given) != "assistant" {
		return given, nil
	}
	list, err := vllmToolCalls(calls)
	if err != nil {
		return nil, err
	}
	message := given.Clone()
	message.Set("tool_calls", list)
	return message, nil
}

// requestTemplate returns the template for a chat: the request's own, which must be allowed, else the model's.
func (m *Model) requestTemplate(own any, tools bool) (*chatTemplate, error) {
	if own != nil {
		if !m.options.RequestChatTemplate {
			return nil, errRequestTemplate
		}
		source, ok := own.(string)
		if !ok {
			return nil, errRefused("chat_template is not a string")
		}
		if source != "" {
			t, err := m.compile("request", source)
			if err != nil {
				return nil, fmt.Errorf("prompt: the request's chat template: %w", err)
			}
			t.memory = requestTemplateMemory
			return t, nil
		}
	}
	t := m.chat
	if tools && m.chatTools != nil {
		t = m.chatTools
	}
	switch {
	case t == nil:
		return nil, ErrNoChatTemplate
	case t.broken != nil:
		return nil, fmt.Errorf("prompt: chat template: %w", t.broken)
	}
	return t, nil
}

// vllmUnset reports whether vLLM treats a template variable's value as not given. Source: vLLM 0.33.0,
// renderers/params, merge_kwargs.
func vllmUnset(v any) bool { return v == nil || v == "auto" }

// reasoningEfforts are the values of reasoning_effort that vLLM, SGLang and Dynamo take.
var reasoningEfforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// transformersParameters are arguments of apply_chat_template that its templates do not see.
var transformersParameters = []string{
	"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
	"tokenizer_kwargs", "tokenize", "chat_template",
}

// vllmKwargs returns the template's variables except messages, tools and documents.
func (m *Model) vllmKwargs(request *body.Request) (*values.Dict, error) {
	kwargs := values.NewDict()
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return nil, err
	}
	for k, v := range m.defaultKwargs.All() {
		if name, _ := k.(string); name != "tools" && !slices.Contains(transformersParameters, name) {
			kwargs.Set(name, v)
		}
	}
	for k, v := range given.All() {
		if name, _ := k.(string); !vllmUnset(v) && !slices.Contains(transformersParameters, name) {
			kwargs.Set(name, v)
		}
	}
	switch effort := field(request.Body, "reasoning_effort").(type) {
	case nil:
	case string:
		if !slices.Contains(reasoningEfforts, effort) {
			return nil, errRefused("reasoning_effort %q", effort)
		}
		effort = m.mappedEffort(effort)
		if !vllmUnset(effort) {
			kwargs.Set("reasoning_effort", effort)
		}
		if _, given := given.Get("enable_thinking"); !given {
			kwargs.Set("enable_thinking", effort != "none")
		}
	default:
		return nil, errRefused("reasoning_effort is not a string")
	}
	if tokenize := field(given, "tokenize"); tokenize != nil && tokenize != false {
		return nil, errNotReproduced("chat_template_kwargs.tokenize")
	}
	for _, name := range []string{"messages", "conversation", "model_config", "tokenizer",
		"return_assistant_tokens_mask", "sanitize_control_tokens"} {
		if v, given := kwargs.Get(name); given && v != false {
			return nil, errRefused("chat_template_kwargs.%s", name)
		}
	}
	return kwargs, nil
}

// mappedEffort returns a reasoning effort as --reasoning-effort-map replaces it, if the version has that flag.
func (m *Model) mappedEffort(effort string) string {
	if mapped, ok := m.efforts[effort]; ok && !m.release.rules.noEffortMap {
		return mapped
	}
	return effort
}

// vllmTools returns the tools as pydantic's model_dump prints them: only known fields, in the order of the model, with
// their defaults; nil without tools.
func (m *Model) vllmTools(request *body.Request) (*values.List, error) {
	given := field(request.Body, "tools")
	if given == nil || m.options.ExcludeToolsWhenToolChoiceNone && field(request.Body, "tool_choice") == "none" {
		return nil, nil
	}
	list, ok := given.(*values.List)
	if !ok || len(list.Items) == 0 {
		return nil, errRefused("tools is not a list of tools")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		function, ok := get[*values.Dict](tool, "function")
		if !ok {
			return nil, errRefused("tools[%d] has no function", i)
		}
		if _, ok := get[string](function, "name"); !ok {
			return nil, errRefused("tools[%d].function has no name", i)
		}
		if kind, given := tool.Get("type"); given && kind != "function" {
			return nil, errRefused("tools[%d].type is not \"function\"", i)
		}
		f, err := readToolFields(tool, function)
		if err != nil {
			return nil, err
		}
		dumped := dict("name", f.name, "description", f.description, "parameters", f.parameters)
		setFlag(dumped, "strict", f.strict)
		setFlag(dumped, "defer_loading", f.deferFunction)
		entry := dict("type", "function", "function", dumped)
		setFlag(entry, "defer_loading", f.deferTool)
		tools[i] = entry
	}
	return values.NewList(tools...), nil
}

// vllmMessage returns a message with the fields that vLLM knows. The template sees no others.
func (m *Model) vllmMessage(given *values.Dict, parts bool) (*values.Dict, error) {
	role, ok := get[string](given, "role")
	if !ok {
		return nil, errRefused("a message without a role")
	}
	content, err := m.vllmContent(given, role, parts)
	if err != nil {
		return nil, err
	}
	if role != "developer" && isPlain(given, content) {
		return given, nil
	}
	message := dict("role", role, "content", content)
	switch role {
	case "assistant":
		if calls := field(given, "tool_calls"); calls != nil {
			list, err := vllmToolCalls(calls)
			if err != nil {
				return nil, err
			}
			if len(list.Items) > 0 {
				message.Set("tool_calls", list)
			}
		}
		reasoning := firstField(given, "reasoning", "reasoning_content")
		if d, _ := reasoning.(*values.Dict); field(d, "type") == "prompt_embeds" {
			return nil, ErrMedia
		}
		if reasoning != nil {
			message.Set("reasoning", reasoning)
			message.Set("reasoning_content", reasoning)
		}
	case "tool":
		if id, given := given.Get("tool_call_id"); given {
			message.Set("tool_call_id", id)
		}
		if list, isList := content.(*values.List); isList {
			if text, ok := joinTexts(list, "\n"); ok {
				message.Set("content", text)
			}
		}
	}
	for _, name := range []string{"name", "task"} {
		if text, ok := get[string](given, name); ok {
			message.Set(name, text)
		}
	}
	if role == "developer" {
		tools, err := vllmDeveloperTools(given)
		if err != nil {
			return nil, err
		}
		message.Set("tools", tools)
	}
	return message, nil
}

// isPlain reports whether a message holds only its role and this text, in that order.
func isPlain(message *values.Dict, content any) bool {
	text, isText := content.(string)
	given, ok := get[string](message, "content")
	if message.Len() != 2 || !isText || !ok || given != text {
		return false
	}
	for first := range message.All() {
		return first == "role"
	}
	return false
}

// vllmPartFields are the fields of vLLM's content parts. A part keeps its other fields if the template takes parts.
var vllmPartFields = []string{
	"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
	"name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
}

// vllmContent returns a message's content: its parts if the template takes those, else the marks of its media and then
// its texts, joined by newlines.
func (m *Model) vllmContent(given *values.Dict, role string, wantsParts bool) (any, error) {
	var items []any
	switch content := field(given, "content").(type) {
	case nil:
	case string:
		switch {
		case role == "system" && !m.release.rules.keepsBillingHeader && strings.HasPrefix(content, billingHeader):
			items = []any{textPart(content)}
		case wantsParts:
			return values.NewList(textPart(content)), nil
		default:
			return content, nil
		}
	case *values.List:
		items = content.Items
	default:
		return nil, errRefused("content is neither a string nor a list of parts")
	}
	if role == "system" && !m.release.rules.keepsBillingHeader {
		items = dropBillingHeader(items)
	}
	var parts []any
	var texts, media []string
	for _, item := range items {
		part, text, skip, err := vllmPart(item)
		if err != nil {
			return nil, err
		}
		if skip {
			continue
		}
		if kind, _ := get[string](part, "type"); kind != "text" {
			if m.media == nil {
				return nil, ErrMedia
			}
			if mark := m.media.mark(kind); mark != "" {
				media = append(media, mark)
			}
		}
		if wantsParts {
			parts = append(parts, part)
		} else if text != "" {
			texts = append(texts, text)
		}
	}
	if wantsParts {
		return values.NewList(parts...), nil
	}
	return markFirst(media, strings.Join(texts, "\n"))
}

// vllmPart returns a content part both as a part and as text. skip says that vLLM leaves the part out.
func vllmPart(item any) (part *values.Dict, text string, skip bool, err error) {
	if text, ok := item.(string); ok {
		return textPart(text), text, false, nil
	}
	given, ok := item.(*values.Dict)
	if !ok {
		return nil, "", false, errRefused("a content part is neither an object nor a string")
	}
	kind, _ := get[string](given, "type")
	uuid, _ := given.Get("uuid")
	if held := mediaKinds[kind]; held != "" && (uuid == nil || onlyMedia(given, kind)) {
		part = dict("type", held)
		addExtra(part, given)
		return part, "", false, nil
	}
	if uuid != nil {
		return nil, "", false, ErrMedia
	}
	holder := "" // the field that holds the text
	switch kind {
	case "text", "input_text", "output_text":
		holder = "text"
	case "refusal", "thinking":
		holder = kind
	default:
		return nil, "", false, ErrMedia
	}
	value := field(given, holder)
	text, ok = value.(string)
	if value == nil && (kind == "refusal" || kind == "text") {
		return nil, "", true, nil
	}
	if !ok {
		return nil, "", false, errRefused("a content part without %s", holder)
	}
	if isPlainPart(given) {
		return given, text, false, nil
	}
	part = textPart(text)
	addExtra(part, given)
	return part, text, false, nil
}

// isPlainPart reports whether a part holds only its type and its text, in that order.
func isPlainPart(part *values.Dict) bool {
	if _, ok := get[string](part, "text"); !ok || part.Len() != 2 || !isText(part) {
		return false
	}
	for first := range part.All() {
		return first == "type"
	}
	return false
}

// addExtra copies the fields that vLLM does not know.
func addExtra(part, given *values.Dict) {
	for k, v := range given.All() {
		if name, _ := k.(string); !slices.Contains(vllmPartFields, name) {
			part.Set(name, v)
		}
	}
}

// onlyMedia reports whether, of the fields of media, a part has that of its type and no other. vLLM decides by these
// fields, and not by the type, if the part has a uuid.
func onlyMedia(part *values.Dict, kind string) bool {
	for _, name := range []string{"image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds",
		"prompt_embeds", "audio_url", "input_audio", "video_url"} {
		if _, has := part.Get(name); has != (name == kind) {
			return false
		}
	}
	return true
}

// billingHeader begins a line that Claude Code puts before its system prompt. The line differs in each request.
const billingHeader = "x-anthropic-billing-header"

// dropBillingHeader removes that line from the text parts of a system message.
func dropBillingHeader(items []any) []any {
	var kept []any
	for _, item := range items {
		part, isPart := item.(*values.Dict)
		text, ok := item.(string)
		if isPart && isText(part) {
			text, ok = get[string](part, "text")
		}
		if !ok || !strings.HasPrefix(text, billingHeader) {
			kept = append(kept, item)
			continue
		}
		_, rest, _ := strings.Cut(text, "\n")
		switch {
		case rest == "":
		case isPart:
			part = part.Clone()
			part.Set("text", rest)
			kept = append(kept, part)
		default:
			kept = append(kept, rest)
		}
	}
	return kept
}

// vllmToolCalls returns an assistant's tool calls with arguments as objects. An empty object stands for no calls.
func vllmToolCalls(value any) (*values.List, error) {
	if object, isObject := value.(*values.Dict); isObject && object.Len() == 0 {
		return values.NewList(), nil
	}
	return convertToolCalls(value, func(i int, call, function *values.Dict) (*values.Dict, error) {
		if field(call, "type") != "function" {
			return nil, errRefused("tool_calls[%d] is not of type function", i)
		}
		var arguments *values.Dict
		switch given := field(function, "arguments").(type) {
		case *values.Dict: // the request was one to Messages
			arguments = given
		case string:
			var err error
			if arguments, err = vllmArguments(given); err != nil {
				return nil, err
			}
		default:
			return nil, errRefused("tool_calls[%d].function.arguments is not a string", i)
		}
		return orderedCall(call, function, arguments, pydanticCallOrder), nil
	})
}

// callOrder is the order of the fields of a tool call and of its function.
type callOrder struct{ call, function []string }

// pydanticCallOrder is the order in which pydantic prints OpenAI's types of tool calls.
var pydanticCallOrder = callOrder{call: []string{"id", "function", "type"}, function: []string{"arguments", "name"}}

// orderedCall returns a tool call with other arguments, its fields in this order.
func orderedCall(call, function, arguments *values.Dict, order callOrder) *values.Dict {
	function = inOrder(function, order.function...)
	function.Set("arguments", arguments)
	call = inOrder(call, order.call...)
	call.Set("function", function)
	return call
}

// vllmArguments reads a tool call's arguments. Arguments other than a JSON object become {}.
func vllmArguments(text string) (*values.Dict, error) {
	if text == "" {
		return values.NewDict(), nil
	}
	value, malformed, err := readArguments(text)
	if err != nil {
		return nil, err
	}
	if malformed != nil && pythonMayRead(text, malformed) {
		return nil, errNotReproduced("tool call arguments that only Python takes for JSON")
	}
	if object, ok := value.(*values.Dict); ok {
		return object, nil
	}
	return values.NewDict(), nil
}

// pythonMayRead reports whether Python's json may read a text that jinja found malformed. Python also reads NaN
// and Infinity, lone surrogates, floats beyond float64 and deep nesting.
func pythonMayRead(text string, malformed error) bool {
	var syntax *values.SyntaxError
	if errors.As(malformed, &syntax) &&
		(strings.Contains(syntax.Reason, "surrogate") || strings.Contains(syntax.Reason, "nested") ||
			strings.Contains(syntax.Reason, "number")) {
		return true
	}
	return hasNonFinite(text)
}

// hasNonFinite reports whether a text has one of the names of numbers that are not finite.
func hasNonFinite(text string) bool {
	return strings.Contains(text, "NaN") || strings.Contains(text, "Infinity")
}

// vllmDeveloperTools returns a developer message's tools; nil, Python's None, without tools. If one of them is not of
// OpenAI's type, pydantic takes the message for one that has no tools, and leaves all as they are.
func vllmDeveloperTools(message *values.Dict) (any, error) {
	value := field(message, "tools")
	if value == nil {
		return nil, nil
	}
	given, ok := value.(*values.List)
	if !ok {
		return nil, errRefused("a developer message's tools are not a list")
	}
	tools := make([]any, len(given.Items))
	for i, item := range given.Items {
		tool, _ := item.(*values.Dict)
		function, ok := get[*values.Dict](tool, "function")
		if !ok {
			return nil, errRefused("a developer message's tools[%d] has no function", i)
		}
		if !isFunctionTool(tool, function) {
			return given, nil
		}
		tool = inOrder(tool, "function", "type")
		tool.Set("function", inOrder(function, "name", "description", "parameters", "strict"))
		tools[i] = tool
	}
	return values.NewList(tools...), nil
}

// isFunctionTool reports whether a tool with this function is of OpenAI's type.
func isFunctionTool(tool, function *values.Dict) bool {
	_, named := get[string](function, "name")
	description, described := function.Get("description")
	_, isText := description.(string)
	parameters, given := function.Get("parameters")
	_, isObject := parameters.(*values.Dict)
	strict := field(function, "strict")
	_, isBool := strict.(bool)
	return field(tool, "type") == "function" && named && (isText || !described) && (isObject || !given) &&
		(isBool || strict == nil)
}

// developerToSystem turns developer messages into system messages. If there then is a system message that is not the
// first message, all of them join into one at the front. Without developer messages nothing changes.
func developerToSystem(messages []any) []any {
	isDeveloper := func(message any) bool { return role(message) == "developer" }
	if !slices.ContainsFunc(messages, isDeveloper) {
		return messages
	}
	converted := slices.Clone(messages)
	for i, item := range messages {
		if !isDeveloper(item) {
			continue
		}
		message, _ := item.(*values.Dict)
		system := without(message, "tools")
		system.Set("role", "system")
		converted[i] = system
	}
	isSystem := func(message any) bool { return role(message) == "system" }
	if !slices.ContainsFunc(converted[1:], isSystem) {
		return converted
	}
	var systems []string
	var rest []any
	for _, item := range converted {
		if !isSystem(item) {
			rest = append(rest, item)
			continue
		}
		message, _ := item.(*values.Dict)
		if text := systemText(field(message, "content")); text != "" {
			systems = append(systems, text)
		}
	}
	return append([]any{dict("role", "system", "content", strings.Join(systems, "\n\n"))}, rest...)
}

// systemText returns a system message's content as one text.
func systemText(content any) string {
	list, isList := content.(*values.List)
	if !isList {
		text, _ := content.(string)
		return text
	}
	var texts []string
	for _, item := range list.Items {
		part, _ := item.(*values.Dict)
		if text, ok := get[string](part, "text"); ok {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n")
}
