package prompt

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/bpe"
	"kvepp/prompt/encoders"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How SGLang's OpenAI server prepares and renders a chat. Source: SGLang 0.5.21 to 0.5.23,
// entrypoints/openai/protocol and serving_chat, parser/jinja_template_utils and template_manager.

// sglangConversations are the model types for which SGLang has its own conversation templates instead of Jinja.
var sglangConversations = []string{
	"internvl_chat", "deepseek_vl_v2", "multi_modality", "phi4mm", "minicpmv", "minicpmo", "moss_vl", "deepseek-ocr",
	"unlimited-ocr", "paddleocr_vl", "whisper",
}

// sglangGoesPastTemplate reports whether SGLang 0.5.23 renders the model's chats with code beside its template that is
// not known here. Source: SGLang 0.5.23, arg_groups/muse_spark_hook, serving_chat and serving_responses.
func (m *Model) sglangGoesPastTemplate() bool {
	return m.modelType == "beam" || m.architecture == "MuseSparkForConditionalGeneration"
}

// sglangWantsParts reports whether SGLang gives the template content as a list of parts.
func sglangWantsParts(t *chatTemplate) bool {
	for _, word := range []string{"image", "audio", "video", "vision"} {
		if strings.Contains(t.source, word) {
			return true
		}
	}
	return t.LoopsOver("message", "content") || t.LoopsOver("msg", "content") || t.LoopsOver("m", "content")
}

// givenSGLang returns the ids in input_ids; nil if the request brings none.
func (m *Model) givenSGLang(request *body.Request) ([][]kvblock.Token, error) {
	if field(request.Body, "input_ids") == nil || request.API != body.ChatCompletions {
		return nil, nil
	}
	list, _ := get[*values.TokenIDs](request.Body, "input_ids")
	ids, ok := tokenList(list)
	if !ok {
		return nil, errRefused("input_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// sglangChat is a rendered chat: the template's text, then the prefix, which is the final message to be continued.
type sglangChat struct{ text, prefix string }

// reencodesSGLang reports whether SGLang decodes a chat's ids to text and encodes that text again. It does so for
// models that also take images or sound.
func (m *Model) reencodesSGLang() bool { return m.multimodal || m.nested || m.media != nil }

// tokenizeSGLang returns a chat's prompt as SGLang will see it.
func (m *Model) tokenizeSGLang(ctx context.Context, request *body.Request) (Prompt, error) {
	if m.native != nil {
		return m.tokenizeNativeSGLang(ctx, request)
	}
	if !m.reencodesSGLang() {
		ids, err := m.chatSGLang(ctx, request)
		return Prompt{IDs: ids, Certain: len(ids)}, err
	}
	if request.ContinueFinalMessage && m.media == nil {
		return Prompt{}, errNotReproduced(
			"continue_final_message with a model of the architecture " + m.architecture + " on SGLang")
	}
	prompt, text, err := m.tokenizeText(ctx, request)
	if err == nil && !m.encoder.IsNormalized(text) {
		return Prompt{}, errNotReproduced(
			"text that the tokenizer normalizes, which SGLang reads back from ids and encodes again,")
	}
	return prompt, err
}

// chatSGLang returns the ids of a chat. The template's text and the prefix are encoded separately.
func (m *Model) chatSGLang(ctx context.Context, request *body.Request) ([]kvblock.Token, error) {
	chat, err := m.sglangChat(ctx, request)
	if err != nil {
		return nil, err
	}
	budget := budgetFor(ctx, request, len(chat.text)+len(chat.prefix))
	ids, err := m.encoder.Encode(&budget, chat.text, false)
	if err != nil || chat.prefix == "" {
		return ids, err
	}
	return m.appendPrefixSGLang(&budget, ids, chat.prefix)
}

// appendPrefixSGLang appends the ids of a message to be continued. SGLang encodes it by itself, and drops <s>.
func (m *Model) appendPrefixSGLang(budget *bpe.Budget, ids []kvblock.Token, text string) ([]kvblock.Token, error) {
	prefix, err := m.encoder.Encode(budget, text, true)
	if err != nil {
		return nil, err
	}
	if bos, ok := m.encoder.AddedID(m.specialNames["bos_token"]); ok && len(prefix) > 0 && prefix[0] == bos {
		prefix = prefix[1:]
	}
	return append(ids, prefix...), nil
}

// renderSGLang returns the text that SGLang makes of a chat.
func (m *Model) renderSGLang(ctx context.Context, request *body.Request) (string, error) {
	chat, err := m.sglangChat(ctx, request)
	return chat.text + chat.prefix, err
}

// sglangChat renders a chat. Where SGLang's choice of the thinking variables is not known, it renders every choice, and
// fails if they differ.
func (m *Model) sglangChat(ctx context.Context, request *body.Request) (sglangChat, error) {
	done, source, err := m.sglangChatWith(ctx, request, nil)
	if err != nil {
		return done, err
	}
	if m.alwaysThinksSGLang(source) {
		return done, nil
	}
	for _, vars := range sglangThinking(request, source) {
		if other, _, err := m.sglangChatWith(ctx, request, vars); err != nil || other != done {
			return sglangChat{}, errNotReproduced(
				"thinking that matters to the template, and that SGLang's --reasoning-parser decides,")
		}
	}
	return done, nil
}

// alwaysThinksSGLang reports whether a request cannot turn gpt-oss's thinking on or off: SGLang refuses such requests
// or does nothing. Source: SGLang 0.5.21 to 0.5.23, parser/template_detection, REASONING_MODE_RULES, and serving_chat,
// apply_reasoning_enabled.
func (m *Model) alwaysThinksSGLang(source string) bool {
	return m.modelType == "gpt_oss" && strings.Contains(source, "<|channel|>")
}

// sglangChatWith renders a chat with further variables. It also returns the template's source.
func (m *Model) sglangChatWith(
	ctx context.Context, request *body.Request, further *values.Dict,
) (done sglangChat, source string, err error) {
	switch arch := m.architecture; {
	case m.release.rules.toolsAsSent && m.sglangGoesPastTemplate(),
		slices.Contains(sglangConversations, m.modelType),
		m.modelType == "deepseek_v41", strings.Contains(arch, "DeepseekV4"), strings.Contains(arch, "KimiK3"),
		strings.Contains(arch, "InklingForConditionalGeneration"):
		return done, "", errNotReproduced("a chat of " + m.modelType + " " + arch)
	case m.reencodesSGLang() && !m.encoder.RoundTrips():
		return done, "", errNotReproduced(
			"a chat of a model that also takes images or sound, whose text SGLang reads back from ids and encodes " +
				"again,")
	}
	// SGLang does not know the body's own field chat_template.
	t, err := m.requestTemplate(field(request.ChatTemplateKwargs, "chat_template"), false)
	if err != nil {
		return done, "", err
	}
	if strings.Contains(t.source, "reasoning_mode_token") && strings.Contains(t.source, "no_think") {
		return done, "", errNotReproduced("a chat template of Hunyuan's")
	}
	kwargs, err := m.sglangKwargs(request)
	if err != nil {
		return done, "", err
	}
	if m.preparesM3() {
		if kwargs, err = m.m3Kwargs(request, kwargs); err != nil {
			return done, "", err
		}
	}
	for name, value := range further.All() {
		name, _ := name.(string)
		kwargs.Set(name, value)
	}
	if field(kwargs, "reasoning_effort") == "low" && strings.Contains(t.source, "low_effort") {
		return done, "", errNotReproduced("low reasoning_effort with a template that has low_effort")
	}
	c := &chat{kwargs: kwargs, addGenerationPrompt: true, limits: limits(request)}
	c.documents, _ = get[*values.List](kwargs, "documents")
	if c.messages, err = convertMessages(request, m.release.rules.sglangMessage, t.wantsParts); err != nil {
		return done, "", err
	}
	if m.preparesM3() {
		sortToolRuns(c.messages)
	}
	if c.tools, err = m.release.rules.sglangTools(request); err != nil {
		return done, "", err
	}
	if request.ContinueFinalMessage && m.responseTemplate && m.release.rules.toolsAsSent &&
		role(c.messages[len(c.messages)-1]) == "assistant" {
		return done, "", errNotReproduced("a message to continue, with a response_template")
	}
	done.prefix, c.messages = continueSGLang(request, c.messages)
	if len(c.messages) == 0 {
		return done, "", errRefused("there is nothing before the message to continue")
	}
	done.text, err = m.apply(ctx, t, c)
	if err != nil && c.tools != nil && !notOfTemplate(err) && ctx.Err() == nil {
		// SGLang tries again with the bare functions, for templates that do not know OpenAI's wrapper around them.
		bare := make([]any, len(c.tools.Items))
		for i, item := range c.tools.Items {
			tool, _ := item.(*values.Dict)
			bare[i] = field(tool, "function")
		}
		c.tools = values.NewList(bare...)
		done.text, err = m.apply(ctx, t, c)
	}
	return done, t.source, err
}

// nativeSGLang returns what SGLang hands to the model's encoder, and the message to be continued. further are variables
// that win over the request's.
func (m *Model) nativeSGLang(request *body.Request, further *values.Dict) (c *encoders.Chat, prefix string, err error) {
	switch {
	case field(request.ChatTemplateKwargs, "chat_template") == nil:
	case !m.options.RequestChatTemplate:
		return nil, "", errRequestTemplate
	case m.native.LikeTemplate:
		return nil, "", errNotReproduced("a request's own template for " + m.native.Name)
	}
	c = &encoders.Chat{}
	if c.Variables, err = m.sglangKwargs(request); err != nil {
		return nil, "", err
	}
	// A default reasoning_effort does not win over the request's here.
	if effort, err := m.release.rules.sglangRequestEffort(request); err != nil {
		return nil, "", err
	} else if effort != nil && !m.native.LikeTemplate {
		c.Variables.Set("reasoning_effort", effort)
	}
	for name, value := range further.All() {
		name, _ := name.(string)
		c.Variables.Set(name, value)
	}
	if c.Efforts = m.efforts4; request.API == body.ChatCompletions {
		c.Task = field(request.Body, "task")
	}
	convert := m.release.rules.sglangMessage
	if m.native.Raw {
		convert = m.release.rules.sglangRawMessage
	}
	if c.Messages, err = convertMessages(request, convert, m.native.WantsParts); err != nil {
		return nil, "", err
	}
	if c.Tools, err = m.release.rules.sglangTools(request); err != nil {
		return nil, "", err
	}
	if m.native.Raw {
		c.Variables.Set("continue_final_message", request.ContinueFinalMessage)
		return c, "", nil
	}
	// Encoders get all tools, also if tool_choice names one.
	if !m.native.LikeTemplate && (c.Tools != nil || !m.release.rules.hidesTools) {
		given, _ := get[*values.List](request.Body, "tools")
		all, err := m.release.rules.sglangDumpTools(given)
		if err != nil {
			return nil, "", err
		}
		c.Tools = values.NewList(all...)
	}
	prefix, c.Messages = continueSGLang(request, c.Messages)
	if len(c.Messages) == 0 {
		return nil, "", errRefused("there is nothing before the message to continue")
	}
	return c, prefix, nil
}

// continueSGLang returns the text of the last message, if it is to be continued, and the messages before it. Otherwise
// a last message of the assistant becomes the user's.
func continueSGLang(request *body.Request, messages []any) (prefix string, before []any) {
	at := len(messages) - 1
	last, _ := messages[at].(*values.Dict)
	content, ok := get[string](last, "content")
	switch {
	case role(last) != "assistant" || !ok:
	case request.ContinueFinalMessage:
		return content, messages[:at]
	default:
		messages[at] = dict("role", "user", "content", content)
	}
	return "", messages
}

// sglangKwargs returns the template's variables except messages and tools.
func (m *Model) sglangKwargs(request *body.Request) (*values.Dict, error) {
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return nil, err
	}
	reasoning, _ := get[*values.Dict](request.Body, "reasoning")
	var thinking any // true, false, or nil if the request does not say
	switch enabled := firstField(reasoning, "enabled", "enable").(type) {
	case bool:
		if enabled {
			thinking = true
		}
	case string:
		text := strings.ToLower(strings.TrimFunc(enabled, jinja.IsSpace))
		if slices.Contains([]string{"1", "true", "yes", "y", "on"}, text) {
			thinking = true
		}
	}
	effort, err := m.release.rules.sglangEffort(sglangEffortField(request))
	if err != nil {
		return nil, err
	}
	if effort != nil && request.API != body.Messages { // SGLang sets the effort of Messages after this point
		thinking = effort != "none"
	}
	kwargs := values.NewDict()
	if own := field(given, "reasoning_effort"); own != nil {
		effort = own
	}
	if effort != nil {
		kwargs.Set("reasoning_effort", effort)
	}
	for k, v := range given.All() {
		name, _ := k.(string)
		switch {
		case name == "reasoning_effort" || slices.Contains(transformersParameters, name):
		case slices.Contains([]string{"messages", "tools", "add_generation_prompt", "conversation",
			"return_assistant_tokens_mask"}, name):
			return nil, errRefused("chat_template_kwargs.%s", name)
		default:
			kwargs.Set(name, v)
		}
	}
	if v := field(given, "continue_final_message"); v != nil && v != false {
		return nil, errRefused("chat_template_kwargs.continue_final_message")
	}
	if thinking != nil {
		for _, name := range []string{"thinking", "enable_thinking"} {
			if _, given := given.Get(name); !given {
				kwargs.Set(name, thinking)
			}
		}
	}
	for k, v := range m.defaultKwargs.All() {
		name, _ := k.(string)
		// A default reasoning_effort wins over the request's, which SGLang has removed from the arguments by then,
		// but not over one among the variables of a request to Responses.
		_, given := kwargs.Get(name)
		if name == "reasoning_effort" {
			given = request.API == body.Responses && field(request.ChatTemplateKwargs, name) != nil
		}
		if !given && !slices.Contains(transformersParameters, name) {
			kwargs.Set(name, v)
		}
	}
	return kwargs, nil
}

// sglangEffortField returns the reasoning effort that a request names outside its template variables; nil for none.
func sglangEffortField(request *body.Request) any {
	reasoning, _ := get[*values.Dict](request.Body, "reasoning")
	if effort := firstField(reasoning, "effort", "reasoning_effort"); effort != nil {
		return effort
	}
	return field(request.Body, "reasoning_effort")
}

// sglangRequestEffort returns the request's reasoning effort; nil if it names none.
func (r rules) sglangRequestEffort(request *body.Request) (any, error) {
	if own := field(request.ChatTemplateKwargs, "reasoning_effort"); own != nil {
		return own, nil
	}
	return r.sglangEffort(sglangEffortField(request))
}

// sglangEffort reads a reasoning effort: a name, or a number from 0 to 0.99, which may be written as a string.
func (r rules) sglangEffort(v any) (any, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case string:
		if slices.Contains(reasoningEfforts, v) || v == "ultra" && r.toolsAsSent {
			return v, nil
		}
		if f, err := strconv.ParseFloat(v, 64); err == nil && f >= 0 && f <= 0.99 {
			return f, nil
		}
	case float64:
		if v >= 0 && v <= 0.99 {
			return v, nil
		}
	case int64:
		if v == 0 {
			return 0.0, nil
		}
	}
	return nil, errRefused("reasoning_effort %v", v)
}

// sglangTools returns the tools that tool_choice allows; nil if there are none.
func (r rules) sglangTools(request *body.Request) (*values.List, error) {
	given := field(request.Body, "tools")
	list, ok := given.(*values.List)
	if given != nil && !ok {
		return nil, errRefused("tools is not a list")
	}
	tools, err := r.sglangDumpTools(list)
	if err != nil || len(tools) == 0 {
		return nil, err
	}
	switch choice := field(request.Body, "tool_choice").(type) {
	case nil:
	case string:
		if choice == "none" {
			return nil, nil
		}
	case *values.Dict:
		function, _ := get[*values.Dict](choice, "function")
		name := field(function, "name")
		tools = slices.DeleteFunc(tools, func(tool any) bool {
			d, _ := tool.(*values.Dict)
			function, _ := get[*values.Dict](d, "function")
			return field(function, "name") != name
		})
		if len(tools) == 0 {
			return nil, nil
		}
	default:
		return nil, errRefused("tool_choice is neither a string nor an object")
	}
	return values.NewList(tools...), nil
}

// sglangDumpTools returns tools as pydantic's model_dump prints them.
func (r rules) sglangDumpTools(list *values.List) ([]any, error) {
	if list == nil {
		return nil, nil
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		function, ok := get[*values.Dict](tool, "function")
		if !ok {
			return nil, errRefused("tools[%d] has no function", i)
		}
		kind, given := tool.Get("type")
		if !given {
			kind = "function"
		}
		f, err := readToolFields(tool, function)
		if err != nil {
			return nil, err
		}
		dumped := dict("description", f.description, "name", f.name, "parameters", f.parameters)
		if r.toolsAsSent {
			setFlag(dumped, "strict", f.strict)
			setFlag(dumped, "defer_loading", f.deferFunction)
			dumped = inOrderOf(function, dumped)
		} else {
			strict, given := function.Get("strict")
			if !given {
				strict = false
			}
			dumped.Set("strict", strict)
			setFlag(dumped, "defer_loading", f.deferFunction)
		}
		tools[i] = dict("type", kind, "function", dumped, "defer_loading", f.deferTool)
	}
	return tools, nil
}

// inOrderOf returns the fields of d, those that first has in the order of first, then the others in their own.
func inOrderOf(first, d *values.Dict) *values.Dict {
	ordered := values.NewDict()
	for _, from := range []*values.Dict{first, d} {
		for key := range from.All() {
			name, _ := key.(string)
			if value, known := d.Get(name); known {
				ordered.Set(name, value)
			}
		}
	}
	return ordered
}

// sglangRoles are the roles of messages except user's.
func (r rules) sglangRoles() []string {
	roles := []string{"system", "assistant", "tool", "function", "developer", "latest_reminder"}
	if r.toolsAsSent {
		roles = append(roles, "root")
	}
	return roles
}

// sglangFields returns a message's role, and its fields but role and content, as far as SGLang knows them.
func (r rules) sglangFields(given *values.Dict) (role string, fields *values.Dict, err error) {
	role, ok := get[string](given, "role")
	if !ok {
		return "", nil, errRefused("a message without a role")
	}
	fields = values.NewDict()
	if role == "user" {
		return role, fields, nil
	}
	role = strings.ToLower(role)
	if !slices.Contains(r.sglangRoles(), role) {
		return "", nil, errRefused("the role %q", role)
	}
	copyFields(fields, given, "tool_call_id", "name", "phase", "reasoning_content")
	calls, err := sglangToolCalls(given, role)
	if err != nil {
		return "", nil, err
	}
	if calls != nil {
		fields.Set("tool_calls", calls)
	}
	if tools := field(given, "tools"); tools != nil {
		list, ok := tools.(*values.List)
		if !ok {
			return "", nil, errRefused("a message's tools are not a list")
		}
		dumped, err := r.sglangDumpTools(list)
		if err != nil {
			return "", nil, err
		}
		fields.Set("tools", values.NewList(dumped...))
	}
	if prefix := field(given, "prefix"); prefix != nil && r.toolsAsSent {
		if _, isBool := prefix.(bool); !isBool {
			return "", nil, errNotReproduced("a message's prefix that is no boolean")
		}
		fields.Set("prefix", prefix)
	}
	return role, fields, nil
}

// sglangRawMessage returns a message for an encoder that reads the request's own content.
func (r rules) sglangRawMessage(given *values.Dict, _ bool) (*values.Dict, error) {
	role, message, err := r.sglangFields(given)
	if err != nil {
		return nil, err
	}
	content := field(given, "content")
	switch parts := content.(type) {
	case nil:
		if role == "user" {
			return nil, errRefused("a user's message without content")
		}
	case string:
	case *values.List:
		for _, item := range parts.Items {
			part, _ := item.(*values.Dict)
			kind, _ := get[string](part, "type")
			name, isThinking := "text", kind == "thinking" || kind == "reasoning"
			if isThinking && field(part, "thinking") != nil {
				name = "thinking"
			}
			_, isText := get[string](part, name)
			switch {
			case part == nil || kind == "":
				return nil, errRefused("a content part without a type")
			case (kind == "text" || isThinking) && !isText:
				return nil, errRefused("a %s part without text", kind)
			case isThinking && (role == "user" || name == "thinking" && field(part, "text") != nil):
				return nil, errRefused("such a thinking part")
			}
		}
	default:
		return nil, errRefused("content is neither a string nor a list of parts")
	}
	message.Set("role", role)
	message.Set("content", content)
	return message, nil
}

// sglangMessage returns a message with the fields that SGLang knows.
func (r rules) sglangMessage(given *values.Dict, wantsParts bool) (*values.Dict, error) {
	role, fields, err := r.sglangFields(given)
	if err != nil {
		return nil, err
	}
	content := field(given, "content")
	last := false // content given as parts is the last field where the template wants parts
	switch list := content.(type) {
	case nil:
		if role == "user" {
			return nil, errRefused("a user's message without content")
		}
		content = ""
	case string:
	case *values.List:
		kept, err := sglangParts(list, role)
		if err != nil {
			return nil, err
		}
		texts := values.NewList(kept...)
		last = wantsParts
		content = texts
		if !wantsParts || role == "tool" {
			var all bool
			if content, all = joinTexts(texts, " "); !all {
				return nil, ErrMedia // SGLang leaves them out of the text
			}
		}
	default:
		return nil, errRefused("content is neither a string nor a list of parts")
	}
	message := dict("role", role)
	if !last {
		message.Set("content", content)
	}
	for k, v := range fields.All() {
		name, _ := k.(string)
		message.Set(name, v)
	}
	message.Set("content", content)
	return message, nil
}

// sglangParts returns a message's parts of text, images and videos. It leaves an assistant's thinking out.
func sglangParts(list *values.List, role string) ([]any, error) {
	var kept []any
	for _, item := range list.Items {
		part, ok := item.(*values.Dict)
		if !ok {
			return nil, errRefused("a content part is not an object")
		}
		kind, _ := part.Get("type")
		switch {
		case kind == "text":
			text, ok := get[string](part, "text")
			if !ok {
				return nil, errRefused("a text part without text")
			}
			kept = append(kept, textPart(text))
		case (kind == "thinking" || kind == "reasoning") && role == "assistant":
		case (kind == "image_url" || kind == "video_url") && role != "tool":
			kept = append(kept, dict("type", mediaKinds[fmt.Sprint(kind)]))
		default:
			return nil, ErrMedia
		}
	}
	return kept, nil
}

// sglangToolCalls returns a message's tool calls; nil without any. An assistant's arguments become objects.
func sglangToolCalls(message *values.Dict, role string) (any, error) {
	value := field(message, "tool_calls")
	if value == nil {
		return nil, nil
	}
	return convertToolCalls(value, func(i int, call, function *values.Dict) (*values.Dict, error) {
		if kind, given := call.Get("type"); given && kind != "function" {
			return nil, errRefused("tool_calls[%d] is not of type function", i)
		}
		arguments := field(function, "arguments")
		if text, ok := arguments.(string); ok && role == "assistant" {
			value, _, err := readArguments(text)
			if err != nil {
				return nil, err
			}
			object, ok := value.(*values.Dict)
			if !ok {
				return nil, errRefused("tool_calls[%d].function.arguments is not a JSON object", i)
			}
			if hasBigInteger(object) {
				return nil, errBigInteger
			}
			arguments = object
		}
		return dict("id", field(call, "id"), "index", field(call, "index"), "type", "function", "function",
			dict("name", field(function, "name"), "arguments", arguments)), nil
	})
}
