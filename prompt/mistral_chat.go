package prompt

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"unicode/utf8"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// How vLLM and mistral-common read a chat, and what they refuse. Source: vLLM 0.33.0, tokenizers/mistral;
// mistral-common 1.13.1, protocol/instruct/messages, tool_calls and validator (in its mode "test").

// mistralMessage is a message as mistral-common has it.
type mistralMessage struct {
	role    string // "system", "user", "assistant" or "tool"
	content mistralContent
	calls   []mistralCall // the assistant's
	callID  string        // the call that a tool's message answers
	prefix  bool          // the assistant's message is to be continued
}

// mistralContent is a message's content: a text, or chunks if it was a list.
type mistralContent struct {
	text   string
	chunks []mistralChunk
}

// empty reports whether Python takes the content for false.
func (c mistralContent) empty() bool { return c.text == "" && len(c.chunks) == 0 }

// has reports whether one of the chunks is of a kind.
func (c mistralContent) has(kind mistralKind) bool {
	return slices.ContainsFunc(c.chunks, func(chunk mistralChunk) bool { return chunk.kind == kind })
}

// mistralKind is the kind of a chunk.
type mistralKind int

const (
	chunkText mistralKind = iota
	chunkThink
	chunkImage
	chunkAudio
)

// mistralChunk is a part of a content.
type mistralChunk struct {
	kind mistralKind
	text string // of a text or of reasoning
	open bool   // the reasoning goes on
}

// mistralCall is a function call of the assistant's.
type mistralCall struct {
	id, name  string
	arguments *values.Dict
}

// mistralName is what a function's name must match, and mistralShortID what the ids of calls must match before version
// 13. Python's $ also matches before a newline at the end.
var (
	mistralName    = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}\n?$`)
	mistralShortID = regexp.MustCompile(`^[a-zA-Z0-9]{9}\n?$`)
)

const (
	// mistralNullID is the id of a call without one.
	mistralNullID = "null"
	// mistralIDRunes is the number of characters at the end of a call's id that vLLM keeps.
	mistralIDRunes = 9
)

// mistralArguments are arguments of apply_chat_template that a server's or a request's template variables would set.
var mistralArguments = append([]string{
	"tools", "messages", "conversation", "add_generation_prompt", "tokenizer",
}, transformersParameters...)

// mistralEffort returns the reasoning effort; "" for none. Before version 15, it has no effect.
func (m *Model) mistralEffort(request *body.Request) (string, error) {
	if request.API != body.Responses && firstField(request.Body, "chat_template", "chat_template_kwargs") != nil {
		return "", errRefused("chat_template and chat_template_kwargs with Mistral's own tokenizer")
	}
	for _, variables := range []*values.Dict{m.defaultKwargs, request.ChatTemplateKwargs} {
		for k := range variables.All() {
			if name, _ := k.(string); slices.Contains(mistralArguments, name) {
				return "", errNotReproduced("the template variable " + name + " with Mistral's own tokenizer")
			}
		}
	}
	variables, err := m.vllmKwargs(request)
	if err != nil || m.mistral.version < 15 {
		return "", err
	}
	effort, isText := get[string](variables, "reasoning_effort")
	switch given := field(variables, "reasoning_effort"); {
	case given == nil:
	case !isText || !slices.Contains(reasoningEfforts, effort):
		return "", errRefused("the reasoning effort %v", given)
	}
	return effort, nil
}

// setting returns the reasoning effort that the prompt shows for a request's, which may be ""; "" for none.
func (t *mistralTokenizer) setting(effort string) (string, error) {
	switch {
	case t.version < 15:
		return "", nil
	case !t.hasSettings:
		return "", errRefused("a chat for a tekken.json of version v15 without model_settings_builder")
	case t.settings.Effort == nil:
		return "", nil
	case effort == "":
		return t.settings.Effort.Default, nil
	case !slices.Contains(t.settings.Effort.Values, effort):
		return "", errRefused("the reasoning effort %q, which is none of %v", effort, t.settings.Effort.Values)
	}
	return effort, nil
}

// mistralTools returns the tools as the prompt shows them, in JSON; "" without tools. It does not check schemas: a
// request with one that is not a JSON schema gets ids here, and an error from vLLM.
func (m *Model) mistralTools(ctx context.Context, request *body.Request) (string, error) {
	given, err := m.vllmTools(request)
	if err != nil || given == nil {
		return "", err
	}
	tools := make([]any, len(given.Items))
	for i, item := range given.Items {
		tool, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](tool, "function")
		name, _ := get[string](function, "name")
		if !mistralName.MatchString(name) {
			return "", errRefused("the name of tools[%d]", i)
		}
		description, err := optionalString(function, "description")
		if err != nil {
			return "", err
		}
		parameters, err := objectField(function, "parameters")
		if err != nil {
			return "", err
		}
		if parameters == nil {
			parameters = values.NewDict()
		}
		tools[i] = dict("type", "function", "function",
			dict("name", name, "description", description, "parameters", parameters))
	}
	return dumpJSON(ctx, values.NewList(tools...), limits(request))
}

// readChat reads a chat's messages and refuses what vLLM and mistral-common refuse.
func (t *mistralTokenizer) readChat(request *body.Request) ([]mistralMessage, error) {
	messages := make([]mistralMessage, request.Messages.Len())
	for i := range messages {
		given, _ := request.Messages.Items[i].(*values.Dict)
		var err error
		if messages[i], err = readMistral(given, request.API != body.Responses); err != nil {
			return nil, fmt.Errorf("%w (message %d)", err, i)
		}
	}
	if len(messages) == 0 {
		return nil, errRefused("a chat without messages")
	}
	begin := request.AddGenerationPrompt == nil || *request.AddGenerationPrompt
	last := &messages[len(messages)-1]
	last.prefix = request.ContinueFinalMessage
	switch isAssistant := last.role == "assistant"; {
	case begin && request.ContinueFinalMessage:
		return nil, errRefused("continue_final_message and add_generation_prompt exclude each other")
	case isAssistant && !request.ContinueFinalMessage, !isAssistant && request.ContinueFinalMessage:
		return nil, errRefused("a last message of the assistant that is not to be continued, or the reverse")
	case len(messages) == 1 && last.role != "user" && last.role != "system":
		return nil, errRefused("a chat that is one message of the %s", last.role)
	}
	if err := t.checkOrder(messages); err != nil {
		return nil, err
	}
	for i := range messages {
		if err := t.check(&messages[i]); err != nil {
			return nil, fmt.Errorf("%w (message %d)", err, i)
		}
	}
	return messages, nil
}

// readMistral reads one message. shorten says that vLLM cuts the ids of calls.
func readMistral(given *values.Dict, shorten bool) (message mistralMessage, err error) {
	message.role = role(given)
	content, hasContent := given.Get("content")
	if message.role != "assistant" && content == nil {
		return message, errRefused("a message without content")
	}
	if hasContent {
		if message.content, err = readMistralContent(content); err != nil {
			return message, err
		}
	}
	if lost, err := losesParts(given); err != nil {
		return message, err
	} else if lost && message.content.chunks != nil {
		message.content = mistralContent{}
	}
	id := func(of *values.Dict, name string) (string, error) {
		id, ok := get[string](of, name)
		if !ok {
			return "", errRefused("%s is not a string", name)
		}
		if runes := utf8.RuneCountInString(id); shorten && runes > mistralIDRunes {
			id = string([]rune(id)[runes-mistralIDRunes:])
		}
		return id, nil
	}
	switch message.role {
	case "user", "system":
	case "developer":
		message.role = "system"
	case "assistant":
		if err := message.readReasoning(given); err != nil {
			return message, err
		}
		calls := field(given, "tool_calls")
		if calls == nil {
			break
		}
		list, err := vllmToolCalls(calls)
		if err != nil {
			return message, err
		}
		for i, item := range list.Items {
			call, _ := item.(*values.Dict)
			function, _ := get[*values.Dict](call, "function")
			read := mistralCall{}
			var ok bool
			if read.name, ok = get[string](function, "name"); !ok {
				return message, errRefused("tool_calls[%d].function has no name", i)
			}
			if read.id, err = id(call, "id"); err != nil {
				return message, err
			}
			read.arguments, _ = get[*values.Dict](function, "arguments")
			message.calls = append(message.calls, read)
		}
	case "tool":
		if name := field(given, "name"); name != nil {
			if text, ok := name.(string); !ok || !mistralName.MatchString(text) {
				return message, errRefused("the name %v of a tool", name)
			}
		}
		message.callID, err = id(given, "tool_call_id")
	default:
		return message, errRefused("the role %q", message.role)
	}
	return message, err
}

// losesParts reports whether vLLM loses a message's parts. It reads them twice. If the name is null, they are an
// iterator, which is empty the second time.
func losesParts(given *values.Dict) (bool, error) {
	name, hasName := given.Get("name")
	task, hasTask := given.Get("task")
	_, nameIsText := name.(string)
	_, taskIsText := task.(string)
	if name != nil && !nameIsText || hasTask && task != nil && !taskIsText {
		return false, errNotReproduced("a message's name or task that is not a string")
	}
	return hasName && name == nil, nil
}

// readReasoning puts an assistant's reasoning before its content.
func (m *mistralMessage) readReasoning(given *values.Dict) error {
	reasoning := firstField(given, "reasoning", "reasoning_content")
	if reasoning == nil {
		return nil
	}
	text, ok := reasoning.(string)
	if !ok {
		return errNotReproduced("reasoning that is not a string")
	}
	if m.content.has(chunkThink) {
		return errRefused("reasoning both beside the content and in it")
	}
	chunks := m.content.chunks
	if chunks == nil && m.content.text != "" {
		chunks = []mistralChunk{{text: m.content.text}}
	}
	m.content = mistralContent{chunks: append([]mistralChunk{{kind: chunkThink, text: text}}, chunks...)}
	return nil
}

// readMistralContent reads a content that is given, perhaps as null.
func readMistralContent(value any) (mistralContent, error) {
	switch value := value.(type) {
	case nil:
		return mistralContent{}, nil
	case string:
		return mistralContent{text: value}, nil
	case *values.List:
		content := mistralContent{chunks: make([]mistralChunk, value.Len())}
		for i, item := range value.Items {
			part, _ := item.(*values.Dict)
			var err error
			if content.chunks[i], err = readMistralChunk(part); err != nil {
				return content, err
			}
		}
		return content, nil
	}
	return mistralContent{}, errRefused("content is neither a string nor a list of parts")
}

// readMistralChunk reads one part of a content; nil for one that is not an object.
func readMistralChunk(part *values.Dict) (mistralChunk, error) {
	if part == nil || field(part, "uuid") != nil {
		return mistralChunk{}, errNotReproduced("such a content part with Mistral's own tokenizer")
	}
	kind, _ := get[string](part, "type")
	switch kind {
	case "text":
		text, ok := get[string](part, "text")
		if !ok {
			return mistralChunk{}, errRefused("a text that is not a string")
		}
		return mistralChunk{text: text}, nil
	case "thinking":
		text, ok := get[string](part, "thinking")
		closed, given := part.Get("closed")
		isClosed, isBool := closed.(bool)
		if !ok || given && !isBool {
			return mistralChunk{}, errNotReproduced("such a part of reasoning")
		}
		return mistralChunk{kind: chunkThink, text: text, open: given && !isClosed}, nil
	case "image_url":
		image, _ := get[*values.Dict](part, "image_url")
		if _, ok := get[string](image, "url"); !ok || !onlyFields(image, "url") {
			return mistralChunk{}, errNotReproduced("such an image")
		}
		return mistralChunk{kind: chunkImage}, nil
	case "input_audio", "audio_url":
		return mistralChunk{kind: chunkAudio}, nil
	case "":
		return mistralChunk{}, errNotReproduced("a content part without a type")
	}
	return mistralChunk{}, errRefused("a content part of type %q", kind)
}

// mistralFollows are the roles that may follow each.
var mistralFollows = map[string][]string{
	"system":    {"user", "assistant", "system"},
	"user":      {"assistant", "system", "user"},
	"assistant": {"assistant", "user", "tool"},
	"tool":      {"assistant", "tool", "user"},
}

// checkOrder refuses roles in another order, and results that do not match the calls before them. The first message's
// calls do not count.
func (t *mistralTokenizer) checkOrder(messages []mistralMessage) error {
	open := 0                      // calls without a result, before version 11
	calls, results := ids{}, ids{} // from version 11 on, since the assistant's last message
	for i := 1; i < len(messages); i++ {
		message := &messages[i]
		if before := messages[i-1].role; !slices.Contains(mistralFollows[before], message.role) {
			return errRefused("the role %s after %s", message.role, before)
		}
		switch message.role {
		case "tool":
			open--
			if t.version >= 11 && (results[message.callID] || !calls[message.callID]) {
				return errRefused("a tool's result for %q, which no call has, or a second one", message.callID)
			}
			results[message.callID] = true
		case "assistant":
			if t.version < 11 && open != 0 || t.version >= 11 && len(calls) != len(results) {
				return errRefused("more or fewer results of tools than calls")
			}
			open = len(message.calls)
			clear(calls)
			clear(results)
			for _, call := range message.calls {
				if calls[call.id] && t.version >= 11 {
					return errRefused("two calls with the id %q", call.id)
				}
				calls[call.id] = true
			}
		}
	}
	if t.version == 7 {
		isSystem := func(m mistralMessage) bool { return m.role == "system" }
		hasAudio := func(m mistralMessage) bool { return m.role == "user" && m.content.has(chunkAudio) }
		if slices.ContainsFunc(messages, isSystem) && slices.ContainsFunc(messages, hasAudio) {
			return errRefused("a system message beside sound")
		}
	}
	return nil
}

// ids is a set of ids of calls.
type ids map[string]bool

// check refuses what a message of this version may not hold.
func (t *mistralTokenizer) check(message *mistralMessage) error {
	for _, chunk := range message.content.chunks {
		if !t.takes(message.role, chunk.kind) {
			return errRefused("reasoning or media in a message of the %s", message.role)
		}
	}
	if message.role == "tool" {
		return t.checkID(message.callID)
	}
	if message.role != "assistant" {
		return nil
	}
	if t.version < 7 && message.content.empty() == (len(message.calls) == 0) {
		return errRefused("an assistant's message that has both content and calls, or neither")
	}
	for _, call := range message.calls {
		if err := t.checkID(call.id); err != nil {
			return err
		}
		if !mistralName.MatchString(call.name) {
			return errRefused("the name %q of a called function", call.name)
		}
	}
	return nil
}

// takes reports whether a message of a role may hold a kind of chunk, and the tokenizer has tokens for it.
func (t *mistralTokenizer) takes(role string, kind mistralKind) bool {
	switch kind {
	case chunkThink:
		return t.think && (role == "assistant" || role == "system" && t.version < 15)
	case chunkImage:
		return t.image && (role == "user" || role == "tool" && t.version >= 15)
	case chunkAudio:
		return t.audio && t.version >= 7 && role != "assistant" && (role != "tool" || t.version >= 15)
	}
	return true
}

// checkID refuses an id of a call.
func (t *mistralTokenizer) checkID(id string) error {
	if t.version < 13 && mistralShortID.MatchString(id) || t.version >= 13 && id != "" && id != mistralNullID {
		return nil
	}
	return errRefused("the id %q of a call", id)
}
