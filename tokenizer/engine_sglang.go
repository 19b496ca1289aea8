package tokenizer

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// What SGLang's OpenAI server makes of a chat before it renders it. Source: SGLang 0.5.21, entrypoints/openai/protocol
// and serving_chat, parser/jinja_template_utils and template_manager.

// sglangConversations are the model types for which SGLang has conversation templates of its own instead of Jinja.
var sglangConversations = []string{
	"internvl_chat", "deepseek_vl_v2", "multi_modality", "phi4mm", "minicpmv", "minicpmo", "moss_vl", "deepseek-ocr",
	"unlimited-ocr",
	"paddleocr_vl", "whisper",
}

// sglangWantsParts is how SGLang finds out which form of content a template takes.
func sglangWantsParts(t *chatTemplate) bool {
	for _, word := range []string{"image", "audio", "video", "vision"} {
		if strings.Contains(t.source, word) {
			return true
		}
	}
	return t.LoopsOver("message", "content") || t.LoopsOver("msg", "content") || t.LoopsOver("m", "content")
}

// givenSGLang returns the ids in input_ids, nil if the request brings none.
func (m *Model) givenSGLang(request *apibody.Request) ([][]kvblock.Token, error) {
	if v, _ := request.Body.Get("input_ids"); v == nil || request.API != apibody.ChatCompletions {
		return nil, nil
	}
	list, _ := get[*chattemplate.TokenIDs](request.Body, "input_ids")
	ids, ok := tokenList(list)
	if !ok {
		return nil, errRefused("input_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// sglangChat is a chat as SGLang renders it: the template's text, then the final message that is to be continued.
type sglangChat struct{ text, prefix string }

// rereadsSGLang reports whether SGLang reads a chat's text back from its ids and encodes that: if the model is one that
// also takes images or sound.
func (m *Model) rereadsSGLang() bool { return m.multimodal || m.nested || m.media != nil }

// tokenizeSGLang returns a chat as SGLang will see it.
func (m *Model) tokenizeSGLang(ctx context.Context, request *apibody.Request) (Prompt, error) {
	if !m.rereadsSGLang() {
		ids, err := m.chatSGLang(ctx, request)
		return Prompt{IDs: ids, Certain: len(ids)}, err
	}
	if request.ContinueFinalMessage && m.media == nil {
		return Prompt{}, errNotReproduced(
			"continue_final_message with a model of the architecture " + m.architecture + " on SGLang",
		)
	}
	prompt, text, err := m.tokenizeText(ctx, request)
	if err == nil && !m.encoder.IsNormalized(text) {
		return Prompt{}, errNotReproduced(
			"text that the tokenizer normalizes, which SGLang reads back from ids and encodes again,",
		)
	}
	return prompt, err
}

// chatSGLang returns the ids of a chat: the rendered text's, then the prefix's, each encoded for itself.
func (m *Model) chatSGLang(ctx context.Context, request *apibody.Request) ([]kvblock.Token, error) {
	chat, err := m.parseSGLang(ctx, request)
	if err != nil {
		return nil, err
	}
	budget := budgetFor(ctx, request, len(chat.text)+len(chat.prefix))
	ids, err := m.encoder.Encode(&budget, chat.text, false)
	if err != nil || chat.prefix == "" {
		return ids, err
	}
	prefix, err := m.encoder.Encode(&budget, chat.prefix, true)
	if err != nil {
		return nil, err
	}
	if bos, ok := m.encoder.AddedID(m.specialNames["bos_token"]); ok && len(prefix) > 0 &&
		uint32(prefix[0]) == uint32(bos) {
		prefix = prefix[1:]
	}
	return append(ids, prefix...), nil
}

// renderSGLang returns the text that SGLang makes of a chat.
func (m *Model) renderSGLang(ctx context.Context, request *apibody.Request) (string, error) {
	chat, err := m.parseSGLang(ctx, request)
	return chat.text + chat.prefix, err
}

// parseSGLang renders a chat; more than once if it must be found out whether something unknown matters.
func (m *Model) parseSGLang(ctx context.Context, request *apibody.Request) (sglangChat, error) {
	done, source, err := m.parseSGLangWith(ctx, request, nil)
	if err != nil {
		return done, err
	}
	for _, more := range sglangThinking(request, source) {
		if other, _, err := m.parseSGLangWith(ctx, request, more); err != nil || other != done {
			return sglangChat{}, errNotReproduced(
				"thinking that matters to the template, and that SGLang's --reasoning-parser decides,",
			)
		}
	}
	return done, nil
}

// parseSGLangWith renders a chat with further variables and returns the template's source too.
func (m *Model) parseSGLangWith(
	ctx context.Context,
	request *apibody.Request,
	more *chattemplate.Dict,
) (done sglangChat, source string, err error) {
	switch arch := m.architecture; {
	case slices.Contains(sglangConversations, m.modelType),
		strings.Contains(arch, "DeepseekV4"), strings.Contains(arch, "KimiK3"),
		strings.Contains(arch, "InklingForConditionalGeneration"),
		strings.Contains(arch, "DeepseekV3") && m.chat == nil:
		return done, "", errNotReproduced("a chat of " + m.modelType + " " + arch)
	case m.rereadsSGLang() && !m.encoder.RoundTrips():
		return done, "", errNotReproduced(
			"a chat of a model that also takes images or sound, whose text SGLang reads back from ids and encodes " +
				"again,",
		)
	}
	own, _ := request.ChatTemplateKwargs.Get("chat_template") // the request's own field of that name is not SGLang's
	t, err := m.requestTemplate(own, false)
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
	for name, value := range more.All() {
		name, _ := name.(string)
		kwargs.Set(name, value)
	}
	if effort, _ := kwargs.Get("reasoning_effort"); effort == "low" && strings.Contains(t.source, "low_effort") {
		return done, "", errNotReproduced("low reasoning_effort with a template that has low_effort")
	}
	c := &chat{kwargs: kwargs, addGenerationPrompt: true, limits: limits(request)}
	if documents, given := kwargs.Get("documents"); given {
		c.documents, _ = documents.(*chattemplate.List)
	}
	if c.messages, err = convertMessages(request, sglangMessage, t.wantsParts); err != nil {
		return done, "", err
	}
	if c.tools, err = sglangTools(request, c.messages); err != nil {
		return done, "", err
	}
	last, _ := c.messages[len(c.messages)-1].(*chattemplate.Dict)
	if role, _ := last.Get("role"); role == "assistant" {
		if content, ok := get[string](last, "content"); ok && request.ContinueFinalMessage {
			done.prefix = content
			c.messages = c.messages[:len(c.messages)-1]
		} else if ok {
			c.messages[len(c.messages)-1] = dict("role", "user", "content", content)
		}
	}
	if len(c.messages) == 0 {
		return done, "", errRefused("there is nothing before the message to continue")
	}
	done.text, err = m.apply(ctx, t, c)
	if err != nil && c.tools != nil && !errors.Is(err, chattemplate.ErrLimit) && ctx.Err() == nil {
		// SGLang tries again with the functions themselves, for templates that do not know OpenAI's wrapper around
		// them.
		bare := make([]any, len(c.tools.Items))
		for i, item := range c.tools.Items {
			tool, _ := item.(*chattemplate.Dict)
			bare[i], _ = tool.Get("function")
		}
		c.tools = chattemplate.NewList(bare...)
		done.text, err = m.apply(ctx, t, c)
	}
	return done, t.source, err
}

// sglangKwargs returns the template's variables besides messages and tools.
func (m *Model) sglangKwargs(request *apibody.Request) (*chattemplate.Dict, error) {
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return nil, err
	}
	effort, _ := request.Body.Get("reasoning_effort")
	var thinking any
	if reasoning, ok := get[*chattemplate.Dict](request.Body, "reasoning"); ok {
		asked, _ := reasoning.Get("effort")
		if asked == nil {
			asked, _ = reasoning.Get("reasoning_effort")
		}
		if asked != nil {
			effort = asked
		}
		enabled, _ := reasoning.Get("enabled")
		if enabled == nil {
			enabled, _ = reasoning.Get("enable")
		}
		if text, ok := enabled.(string); ok {
			if slices.Contains(
				[]string{"1", "true", "yes", "y", "on"},
				strings.ToLower(strings.TrimFunc(text, isPythonSpace)),
			) {
				thinking = true
			}
		} else if enabled == true {
			thinking = true
		}
	}
	if effort, err = sglangEffort(effort); err != nil {
		return nil, err
	}
	if effort != nil && request.API != apibody.Messages { // where the effort comes too late for that
		thinking = effort != "none"
	}
	// A copy with the request's own values; reasoning_effort leaves it and takes the place of the request's.
	kwargs := chattemplate.NewDict()
	if own, _ := given.Get("reasoning_effort"); own != nil {
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
	if v, _ := given.Get("continue_final_message"); v != nil && v != false {
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
		// A default reasoning_effort wins over the request's, which has left the arguments.
		if _, given := kwargs.Get(name); (!given || name == "reasoning_effort") &&
			!slices.Contains(transformersParameters, name) {
			kwargs.Set(name, v)
		}
	}
	return kwargs, nil
}

// sglangEffort reads a reasoning effort: a tier's name, or a number, which may come as a string.
func sglangEffort(v any) (any, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case string:
		if slices.Contains(reasoningEfforts, v) {
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

// sglangTools returns the tools that the template sees: those that tool_choice leaves.
func sglangTools(request *apibody.Request, messages []any) (*chattemplate.List, error) {
	given, _ := request.Body.Get("tools")
	list, ok := given.(*chattemplate.List)
	if given != nil && !ok {
		return nil, errRefused("tools is not a list")
	}
	tools, err := sglangDumpTools(list)
	if err != nil || len(tools) == 0 {
		return nil, err
	}
	choice, _ := request.Body.Get("tool_choice")
	switch choice := choice.(type) {
	case nil:
	case string:
		if choice == "none" {
			return nil, nil
		}
	case *chattemplate.Dict:
		function, _ := get[*chattemplate.Dict](choice, "function")
		name, _ := function.Get("name")
		tools = slices.DeleteFunc(tools, func(tool any) bool {
			d, _ := tool.(*chattemplate.Dict)
			function, _ := get[*chattemplate.Dict](d, "function")
			own, _ := function.Get("name")
			return own != name
		})
		if len(tools) == 0 {
			return nil, nil
		}
	default:
		return nil, errRefused("tool_choice is neither a string nor an object")
	}
	return chattemplate.NewList(tools...), nil
}

// sglangDumpTools returns tools as pydantic's model_dump prints them.
func sglangDumpTools(list *chattemplate.List) ([]any, error) {
	if list == nil {
		return nil, nil
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](tool, "function")
		if !ok {
			return nil, errRefused("tools[%d] has no function", i)
		}
		kind, given := tool.Get("type")
		if !given {
			kind = "function"
		}
		strict, given := function.Get("strict")
		if !given {
			strict = false
		}
		description, _ := function.Get("description")
		name, _ := function.Get("name")
		parameters, _ := function.Get("parameters")
		deferredTool, _ := tool.Get("defer_loading")
		deferred, _ := function.Get("defer_loading")
		if deferred == nil {
			deferred = deferredTool
		}
		for _, flag := range []any{strict, deferred, deferredTool} {
			if _, ok := flag.(bool); flag != nil && !ok {
				return nil, errNotReproduced("a tool's strict or defer_loading that is no boolean")
			}
		}
		dumped := dict("description", description, "name", name, "parameters", parameters, "strict", strict)
		if deferred != nil {
			dumped.Set("defer_loading", deferred)
		}
		tools[i] = dict("type", kind, "function", dumped, "defer_loading", deferredTool)
	}
	return tools, nil
}

func sglangMessage(given *chattemplate.Dict, wantsParts bool) (*chattemplate.Dict, error) {
	role, ok := get[string](given, "role")
	if !ok {
		return nil, errRefused("a message without a role")
	}
	if role != "user" {
		role = strings.ToLower(role)
		if !slices.Contains([]string{"system", "assistant", "tool", "function", "developer", "latest_reminder"}, role) {
			return nil, errRefused("the role %q", role)
		}
	}
	fields := chattemplate.NewDict()
	if role != "user" {
		for _, name := range []string{"tool_call_id", "name", "phase", "reasoning_content"} {
			if v, _ := given.Get(name); v != nil {
				fields.Set(name, v)
			}
		}
		calls, err := sglangToolCalls(given, role)
		if err != nil {
			return nil, err
		}
		if calls != nil {
			fields.Set("tool_calls", calls)
		}
		if tools, _ := given.Get("tools"); tools != nil {
			list, ok := tools.(*chattemplate.List)
			if !ok {
				return nil, errRefused("a message's tools are not a list")
			}
			dumped, err := sglangDumpTools(list)
			if err != nil {
				return nil, err
			}
			fields.Set("tools", chattemplate.NewList(dumped...))
		}
	}
	content, _ := given.Get("content")
	last := false // content given as parts comes last where the template wants parts
	switch list := content.(type) {
	case nil:
		if role == "user" {
			return nil, errRefused("a user's message without content")
		}
		content = ""
	case string:
	case *chattemplate.List:
		kept, err := sglangParts(list, role)
		if err != nil {
			return nil, err
		}
		texts := chattemplate.NewList(kept...)
		last = wantsParts
		content = texts
		if !wantsParts || role == "tool" {
			var all bool
			if content, all = joinTexts(texts, " "); !all {
				return nil, ErrMedia // left out of the text
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

// sglangParts returns a message's parts of text, images and videos; an assistant's thinking is left out.
func sglangParts(list *chattemplate.List, role string) ([]any, error) {
	var kept []any
	for _, item := range list.Items {
		part, ok := item.(*chattemplate.Dict)
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

// sglangToolCalls returns a message's tool calls, nil without; an assistant's arguments become objects.
func sglangToolCalls(message *chattemplate.Dict, role string) (any, error) {
	value, _ := message.Get("tool_calls")
	if value == nil {
		return nil, nil
	}
	given, ok := value.(*chattemplate.List)
	if !ok {
		return nil, errRefused("tool_calls is not a list")
	}
	calls := make([]any, len(given.Items))
	for i, item := range given.Items {
		call, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](call, "function")
		if kind, given := call.Get("type"); !ok || given && kind != "function" {
			return nil, errRefused("tool_calls[%d] is not of type function", i)
		}
		arguments, _ := function.Get("arguments")
		if text, ok := arguments.(string); ok && role == "assistant" {
			parsed, err := readArguments(text)
			if errors.Is(err, ErrMemory) {
				return nil, err
			}
			object, ok := parsed.(*chattemplate.Dict)
			if err != nil || !ok {
				return nil, errRefused("tool_calls[%d].function.arguments is not a JSON object", i)
			}
			if hasBigInteger(object) {
				return nil, errNotReproduced("tool call arguments with an integer beyond 64 bits")
			}
			arguments = object
		}
		id, _ := call.Get("id")
		index, _ := call.Get("index")
		name, _ := function.Get("name")
		calls[i] = dict(
			"id",
			id,
			"index",
			index,
			"type",
			"function",
			"function",
			dict("name", name, "arguments", arguments),
		)
	}
	return chattemplate.NewList(calls...), nil
}

// hasBigInteger reports whether a value holds an integer that orjson would read as a float.
func hasBigInteger(v any) bool {
	switch v := v.(type) {
	case *big.Int:
		return !v.IsUint64()
	case *chattemplate.List:
		return slices.ContainsFunc(v.Items, hasBigInteger)
	case *chattemplate.Dict:
		for _, value := range v.All() {
			if hasBigInteger(value) {
				return true
			}
		}
	}
	return false
}
