package tokenizer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// What vLLM's OpenAI server makes of a chat before it renders it: pydantic's reading of the body, then its own parsing.
// Source: vLLM 0.33.0, entrypoints/openai/chat_completion/protocol, renderers/chat_utils/chat_message, renderers/hf.

// The architectures whose chats vLLM encodes without a Jinja template. Source: vLLM 0.33.0, config/model.
var vllmOwnEncoding = []string{
	"Alpamayo2Super", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration", "DeepseekV32ForCausalLM",
	"DeepseekV4ForCausalLM",
	"DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "InklingForCausalLM",
	"InklingForConditionalGeneration",
}

// givenVLLM returns the ids that a decoding vLLM takes over from the one that prefilled, nil if the request brings
// none. It returns an error for fields whose effect in vLLM is not known here.
func (m *Model) givenVLLM(request *apibody.Request) ([][]kvblock.Token, error) {
	if m.mistralCommon {
		return nil, errNotReproduced("a folder with Mistral's own tokenizer")
	}
	for _, field := range []string{"truncate_prompt_tokens", "suffix", "prompt_embeds"} {
		if v, _ := request.Body.Get(field); v != nil {
			return nil, errNotReproduced(field)
		}
	}
	transfer, _ := get[*chattemplate.Dict](request.Body, "kv_transfer_params")
	list, isIDs := get[*chattemplate.TokenIDs](transfer, "prompt_token_ids")
	_, isList := get[*chattemplate.List](transfer, "prompt_token_ids")
	if echo, _ := request.Body.Get("echo"); !isIDs && !isList || request.API != apibody.ChatCompletions ||
		request.HasMedia ||
		echo == true {
		return nil, nil
	}
	ids, ok := tokenList(list)
	if !ok || len(ids) == 0 {
		return nil, errRefused("kv_transfer_params.prompt_token_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// tokenList returns a list as token ids; false if it holds something else.
func tokenList(list *chattemplate.TokenIDs) ([]kvblock.Token, bool) {
	if list == nil || list.Bad >= 0 {
		return nil, false
	}
	return tokens(list.IDs), true
}

// renderVLLM returns the text that vLLM makes of a chat.
func (m *Model) renderVLLM(ctx context.Context, request *apibody.Request) (string, error) {
	if m.ownEncoding(vllmOwnEncoding) {
		return "", errNotReproduced("a chat of " + m.architecture)
	}
	processor, _ := get[*chattemplate.Dict](request.Body, "mm_processor_kwargs")
	if audio, _ := processor.Get("use_audio_in_video"); request.HasMedia && audio != nil && audio != false {
		return "", errNotReproduced("use_audio_in_video")
	}
	kwargs, err := m.vllmKwargs(request)
	if err != nil {
		return "", err
	}
	c := &chat{
		kwargs:               kwargs,
		addGenerationPrompt:  true,
		continueFinalMessage: request.ContinueFinalMessage,
		limits:               limits(request),
	}
	if request.AddGenerationPrompt != nil {
		c.addGenerationPrompt = *request.AddGenerationPrompt
	}
	if c.tools, err = m.vllmTools(request); err != nil {
		return "", err
	}
	if tools, given := kwargs.Get("tools"); given { // chat_template_kwargs win over the request's own
		list, ok := tools.(*chattemplate.List)
		if !ok {
			return "", errRefused("chat_template_kwargs.tools is not a list")
		}
		c.tools = list
	}
	if documents, _ := request.Body.Get("documents"); documents == nil {
		documents, _ := kwargs.Get("documents")
		c.documents, _ = documents.(*chattemplate.List)
	} else {
		c.documents = request.Documents
	}
	own, _ := request.Body.Get("chat_template")
	if v, _ := request.ChatTemplateKwargs.Get("chat_template"); v != nil {
		own = v
	}
	t, err := m.requestTemplate(own, c.tools != nil)
	if err != nil {
		return "", err
	}
	if c.messages, err = convertMessages(request, m.vllmMessage, t.wantsParts); err != nil {
		return "", err
	}
	if request.API == apibody.Responses {
		orderCalls(c.messages)
	}
	if !strings.Contains(t.source, `"developer"`) && !strings.Contains(t.source, `'developer'`) {
		c.messages = developerToSystem(c.messages)
	}
	return m.apply(ctx, t, c)
}

// requestTemplate returns the template for a chat: the request's own if it brings one and that is allowed, else the
// model's.
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
				return nil, fmt.Errorf("tokenizer: the request's chat template: %w", err)
			}
			t.memory = requestTemplateMemory
			return t, nil
		}
	}
	t := m.chat
	if tools && m.chatTools != nil {
		t = m.chatTools
	}
	if t == nil {
		return nil, ErrNoChatTemplate
	}
	return t, nil
}

// vllmUnset reports whether a keyword argument counts as not given. Source: vLLM 0.33.0, renderers/params,
// merge_kwargs.
func vllmUnset(v any) bool { return v == nil || v == "auto" }

// reasoningEfforts are the values of reasoning_effort that vLLM takes.
var reasoningEfforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// transformersParameters are arguments of apply_chat_template that its templates do not see.
var transformersParameters = []string{
	"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
	"tokenizer_kwargs", "tokenize", "chat_template",
}

// vllmKwargs returns the template's variables besides messages, tools and documents.
func (m *Model) vllmKwargs(request *apibody.Request) (*chattemplate.Dict, error) {
	kwargs := chattemplate.NewDict()
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
	switch effort, _ := request.Body.Get("reasoning_effort"); effort := effort.(type) {
	case nil:
	case string:
		if !slices.Contains(reasoningEfforts, effort) {
			return nil, errRefused("reasoning_effort %q", effort)
		}
		effort = m.mapped(effort)
		if !vllmUnset(effort) {
			kwargs.Set("reasoning_effort", effort)
		}
		if _, given := given.Get("enable_thinking"); !given {
			kwargs.Set("enable_thinking", effort != "none")
		}
	default:
		return nil, errRefused("reasoning_effort is not a string")
	}
	if tokenize, _ := given.Get("tokenize"); tokenize != nil && tokenize != false {
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

// mapped returns what --reasoning-effort-map makes of a reasoning effort.
func (m *Model) mapped(effort string) string {
	if to, ok := m.efforts[effort]; ok {
		return to
	}
	return effort
}

// objectField returns an object, nil if absent or null.
func objectField(d *chattemplate.Dict, name string) (*chattemplate.Dict, error) {
	v, _ := d.Get(name)
	object, ok := v.(*chattemplate.Dict)
	if v != nil && !ok {
		return nil, errRefused("%s is not an object", name)
	}
	return object, nil
}

// vllmTools returns the tools as pydantic's model_dump prints them: known fields alone, in the order of the model, with
// their defaults; nil without tools.
func (m *Model) vllmTools(request *apibody.Request) (*chattemplate.List, error) {
	given, _ := request.Body.Get("tools")
	choice, _ := request.Body.Get("tool_choice")
	if given == nil || choice == "none" && m.options.ExcludeToolsWhenToolChoiceNone {
		return nil, nil
	}
	list, ok := given.(*chattemplate.List)
	if !ok || len(list.Items) == 0 {
		return nil, errRefused("tools is not a list of tools")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](tool, "function")
		if !ok {
			return nil, errRefused("tools[%d] has no function", i)
		}
		name, ok := get[string](function, "name")
		if !ok {
			return nil, errRefused("tools[%d].function has no name", i)
		}
		if kind, given := tool.Get("type"); given && kind != "function" {
			return nil, errRefused("tools[%d].type is not \"function\"", i)
		}
		description, _ := function.Get("description")
		parameters, _ := function.Get("parameters")
		dumped := dict("name", name, "description", description, "parameters", parameters)
		strict, _ := function.Get("strict")
		deferredTool, _ := tool.Get("defer_loading")
		deferred, _ := function.Get("defer_loading")
		if deferred == nil {
			deferred = deferredTool
		}
		entry := dict("type", "function", "function", dumped)
		for _, flag := range []struct {
			of    *chattemplate.Dict
			name  string
			value any
		}{{dumped, "strict", strict}, {dumped, "defer_loading", deferred}, {entry, "defer_loading", deferredTool}} {
			switch flag.value.(type) {
			case nil:
			case bool:
				flag.of.Set(flag.name, flag.value)
			default:
				return nil, errNotReproduced("a tool's " + flag.name + " that is no boolean")
			}
		}
		tools[i] = entry
	}
	return chattemplate.NewList(tools...), nil
}

// vllmMessage returns one message. Only the fields that vLLM knows reach the template.
func (m *Model) vllmMessage(given *chattemplate.Dict, parts bool) (*chattemplate.Dict, error) {
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
		if calls, _ := given.Get("tool_calls"); calls != nil {
			list, err := vllmToolCalls(calls)
			if err != nil {
				return nil, err
			}
			if len(list.Items) > 0 {
				message.Set("tool_calls", list)
			}
		}
		reasoning, _ := given.Get("reasoning")
		if reasoning == nil {
			reasoning, _ = given.Get("reasoning_content")
		}
		if d, isObject := reasoning.(*chattemplate.Dict); isObject {
			if kind, _ := d.Get("type"); kind == "prompt_embeds" {
				return nil, ErrMedia
			}
		}
		if reasoning != nil {
			message.Set("reasoning", reasoning)
			message.Set("reasoning_content", reasoning)
		}
	case "tool":
		if id, given := given.Get("tool_call_id"); given {
			message.Set("tool_call_id", id)
		}
		if list, isList := content.(*chattemplate.List); isList {
			if text, ok := joinTexts(list, "\n"); ok {
				message.Set("content", text)
			}
		}
	}
	for _, field := range []string{"name", "task"} {
		if text, ok := get[string](given, field); ok {
			message.Set(field, text)
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

// isPlain reports whether a message is its role and then this text, and nothing else.
func isPlain(message *chattemplate.Dict, content any) bool {
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

// joinTexts joins a list that holds text parts alone.
func joinTexts(list *chattemplate.List, separator string) (string, bool) {
	texts := make([]string, len(list.Items))
	for i, item := range list.Items {
		part, ok := item.(*chattemplate.Dict)
		if kind, _ := part.Get("type"); !ok || kind != "text" {
			return "", false
		}
		texts[i], _ = get[string](part, "text")
	}
	return strings.Join(texts, separator), true
}

// vllmPartFields are the fields of vLLM's content parts; others stay on a text part that is shown as a part.
var vllmPartFields = []string{
	"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
	"name",
	"prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
}

// vllmContent returns a message's content: its texts joined by newlines behind the marks of its media, or its parts.
func (m *Model) vllmContent(given *chattemplate.Dict, role string, wantsParts bool) (any, error) {
	content, _ := given.Get("content")
	var items []any
	switch content := content.(type) {
	case nil:
	case string:
		switch {
		case role == "system" && strings.HasPrefix(content, billingHeader):
			items = []any{textPart(content)}
		case wantsParts:
			return chattemplate.NewList(textPart(content)), nil
		default:
			return content, nil
		}
	case *chattemplate.List:
		items = content.Items
	default:
		return nil, errRefused("content is neither a string nor a list of parts")
	}
	if role == "system" {
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
		return chattemplate.NewList(parts...), nil
	}
	return markFirst(media, strings.Join(texts, "\n"))
}

// vllmPart returns a content part both as a part and as text.
func vllmPart(item any) (part *chattemplate.Dict, text string, skip bool, err error) {
	if text, ok := item.(string); ok {
		return textPart(text), text, false, nil
	}
	given, ok := item.(*chattemplate.Dict)
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
	field := ""
	switch kind {
	case "text", "input_text", "output_text":
		field = "text"
	case "refusal":
		field = "refusal"
	case "thinking":
		field = "thinking"
	default:
		return nil, "", false, ErrMedia
	}
	value, _ := given.Get(field)
	text, ok = value.(string)
	if value == nil && (field == "refusal" || isText(given)) {
		return nil, "", true, nil
	}
	if !ok {
		return nil, "", false, errRefused("a content part without %s", field)
	}
	if isPlainPart(given) {
		return given, text, false, nil
	}
	part = textPart(text)
	addExtra(part, given)
	return part, text, false, nil
}

// isPlainPart reports whether a part is its type and then its text, and nothing else.
func isPlainPart(part *chattemplate.Dict) bool {
	if _, ok := get[string](part, "text"); !ok || part.Len() != 2 || !isText(part) {
		return false
	}
	for first := range part.All() {
		return first == "type"
	}
	return false
}

// addExtra adds the fields that vLLM does not know.
func addExtra(part, given *chattemplate.Dict) {
	for k, v := range given.All() {
		if name, _ := k.(string); !slices.Contains(vllmPartFields, name) {
			part.Set(name, v)
		}
	}
}

// onlyMedia reports whether a part has the field of its type and of no other, by which vLLM goes where a part has a
// uuid.
func onlyMedia(part *chattemplate.Dict, kind string) bool {
	for _, field := range []string{"image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds",
		"prompt_embeds", "audio_url", "input_audio", "video_url"} {
		if _, has := part.Get(field); has != (field == kind) {
			return false
		}
	}
	return true
}

func isText(part *chattemplate.Dict) bool { kind, _ := part.Get("type"); return kind == "text" }

// billingHeader begins a line that Claude Code puts before its system prompt, other in each request.
const billingHeader = "x-anthropic-billing-header"

// dropBillingHeader removes that line from a system message's text parts.
func dropBillingHeader(items []any) []any {
	var kept []any
	for _, item := range items {
		part, isPart := item.(*chattemplate.Dict)
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

// inOrder returns an object with the named fields first, in their order, then the others: what pydantic makes of a
// TypedDict that allows further fields.
func inOrder(d *chattemplate.Dict, names ...string) *chattemplate.Dict {
	ordered := chattemplate.NewDict()
	for _, name := range names {
		if v, ok := d.Get(name); ok {
			ordered.Set(name, v)
		}
	}
	for k, v := range d.All() {
		if name, _ := k.(string); !slices.Contains(names, name) {
			ordered.Set(name, v)
		}
	}
	return ordered
}

// vllmToolCalls returns an assistant's tool calls with arguments as objects.
func vllmToolCalls(value any) (*chattemplate.List, error) {
	given, ok := value.(*chattemplate.List)
	if !ok {
		if object, isObject := value.(*chattemplate.Dict); isObject && object.Len() == 0 {
			return chattemplate.NewList(), nil
		}
		return nil, errRefused("tool_calls is not a list")
	}
	calls := make([]any, len(given.Items))
	for i, item := range given.Items {
		call, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](call, "function")
		if kind, _ := call.Get("type"); !ok || kind != "function" {
			return nil, errRefused("tool_calls[%d] is not of type function", i)
		}
		arguments, ok := get[*chattemplate.Dict](function, "arguments") // of a tool use in messages
		if !ok {
			text, ok := get[string](function, "arguments")
			if !ok {
				return nil, errRefused("tool_calls[%d].function.arguments is not a string", i)
			}
			var err error
			if arguments, err = vllmArguments(text); err != nil {
				return nil, err
			}
		}
		function = inOrder(function, "arguments", "name")
		function.Set("arguments", arguments)
		call = inOrder(call, "id", "function", "type")
		call.Set("function", function)
		calls[i] = call
	}
	return chattemplate.NewList(calls...), nil
}

// vllmArguments reads a tool call's arguments; what is no object counts as {}.
func vllmArguments(text string) (*chattemplate.Dict, error) {
	if text == "" {
		return chattemplate.NewDict(), nil
	}
	value, err := readArguments(text)
	if errors.Is(err, ErrMemory) {
		return nil, err
	}
	if err != nil && pythonReads(text, err) {
		return nil, errNotReproduced("tool call arguments that only Python takes for JSON")
	}
	if object, ok := value.(*chattemplate.Dict); ok {
		return object, nil
	}
	return chattemplate.NewDict(), nil
}

// pythonReads reports whether Python's json might read what ParseJSON does not: NaN and Infinity, lone surrogates,
// floats beyond float64, deep nesting. It is sure only of a no.
func pythonReads(text string, err error) bool {
	var syntax *chattemplate.SyntaxError
	if errors.As(err, &syntax) &&
		(strings.Contains(syntax.Reason, "surrogate") || strings.Contains(syntax.Reason, "nested") ||
			strings.Contains(syntax.Reason, "number")) {
		return true
	}
	return strings.Contains(text, "NaN") || strings.Contains(text, "Infinity")
}

// vllmDeveloperTools returns a developer message's tools, None without.
func vllmDeveloperTools(message *chattemplate.Dict) (any, error) {
	value, _ := message.Get("tools")
	if value == nil {
		return nil, nil
	}
	given, ok := value.(*chattemplate.List)
	if !ok {
		return nil, errRefused("a developer message's tools are not a list")
	}
	tools := make([]any, len(given.Items))
	for i, item := range given.Items {
		tool, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](tool, "function")
		if !ok {
			return nil, errRefused("a developer message's tools[%d] has no function", i)
		}
		tool = inOrder(tool, "function", "type")
		tool.Set("function", inOrder(function, "name", "description", "parameters", "strict"))
		tools[i] = tool
	}
	return chattemplate.NewList(tools...), nil
}

// developerToSystem makes developer messages system messages and, if one is not the first, joins all system messages
// into one at the front; without developer messages nothing changes.
func developerToSystem(messages []any) []any {
	found := false
	converted := make([]any, len(messages))
	for i, item := range messages {
		converted[i] = item
		message, _ := item.(*chattemplate.Dict)
		if role, _ := message.Get("role"); role == "developer" {
			found = true
			system := chattemplate.NewDict()
			for k, v := range message.All() {
				if name, _ := k.(string); name != "tools" {
					system.Set(name, v)
				}
			}
			system.Set("role", "system")
			converted[i] = system
		}
	}
	if !found {
		return messages
	}
	var systems []string
	var rest []any
	join := false
	for i, item := range converted {
		message, _ := item.(*chattemplate.Dict)
		if role, _ := message.Get("role"); role != "system" {
			rest = append(rest, item)
			continue
		}
		join = join || i > 0 || len(systems) > 0
		content, _ := message.Get("content")
		text, _ := content.(string)
		if list, ok := content.(*chattemplate.List); ok {
			var texts []string
			for _, item := range list.Items {
				part, _ := item.(*chattemplate.Dict)
				if text, ok := get[string](part, "text"); ok {
					texts = append(texts, text)
				}
			}
			text = strings.Join(texts, "\n")
		}
		if text != "" {
			systems = append(systems, text)
		}
	}
	if !join {
		return converted
	}
	return append([]any{dict("role", "system", "content", strings.Join(systems, "\n\n"))}, rest...)
}
