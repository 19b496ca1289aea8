package prompt

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// How SGLang turns a request to OpenAI's /v1/responses into a chat.
// Source: SGLang 0.5.21 to 0.5.23, entrypoints/openai/protocol, serving_responses and responses_adapters.

// chatOfResponsesSGLang returns the chat that SGLang makes of a request to Responses.
func (m *Model) chatOfResponsesSGLang(request *body.Request) (*body.Request, error) {
	if field(request.Body, "previous_response_id") != nil {
		return nil, errNotReproduced("previous_response_id")
	}
	c := &sglangResponses{rules: m.release.rules}
	items, err := inputItems(request.Body)
	if err != nil {
		return nil, err
	}
	if c.rules.keepsLateSystem && slices.ContainsFunc(items, isSystemItem) {
		merges, err := m.messages.mergeSystem()
		if err != nil {
			return nil, err
		}
		c.inPlace = !merges
	}
	if instructions, _ := get[string](request.Body, "instructions"); instructions != "" {
		c.addSystem(dict("role", "system", "content", instructions))
	}
	for i, item := range items {
		given, _ := item.(*values.Dict)
		if err := c.add(given); err != nil {
			return nil, fmt.Errorf("%w (input item %d)", err, i)
		}
	}
	if c.system != nil {
		system := dict("role", "system", "content", strings.Join(c.system, "\n\n"))
		c.messages = slices.Insert(c.messages, 0, any(system))
	}
	if len(c.messages) == 0 {
		return nil, errNotReproduced("an empty input")
	}
	payload := dict("model", request.Model, "messages", values.NewList(c.messages...))
	copyFields(payload, request.Body, "chat_template_kwargs")
	if reasoning, _ := get[*values.Dict](request.Body, "reasoning"); reasoning != nil {
		if field(reasoning, "reasoning_effort") != nil {
			return nil, errNotReproduced("reasoning.reasoning_effort")
		}
		effort, given := reasoning.Get("effort")
		if !given {
			effort = "medium"
		}
		payload.Set("reasoning_effort", effort)
	}
	if err := sglangResponsesTools(request.Body, payload); err != nil {
		return nil, err
	}
	m.dropOwnEffort(payload)
	chat := chatOf(request, payload)
	chat.API = body.Responses // see sglangKwargs
	return chat, nil
}

// dropOwnEffort removes the reasoning_effort among the template's variables where SGLang does not use it. For other
// APIs it is the request's effort. Here encoders do not see it, unless the server has variables of its own, and the
// request's effort wins over it; the latter holds for MiniMax M3, too.
func (m *Model) dropOwnEffort(body *values.Dict) {
	encodes := m.native != nil && !m.native.LikeTemplate
	given, _ := get[*values.Dict](body, "chat_template_kwargs")
	if _, own := given.Get("reasoning_effort"); !own || !encodes && !m.preparesM3() {
		return
	}
	if field(body, "reasoning_effort") == nil && (!encodes || m.defaultKwargs.Len() > 0) {
		return
	}
	body.Set("chat_template_kwargs", without(given, "reasoning_effort"))
}

// sglangUnusedTools are the types of tools that SGLang leaves out of the chat.
var sglangUnusedTools = []string{
	"web_search", "web_search_preview", "code_interpreter", "file_search", "image_generation", "computer_use_preview",
	"local_shell", "mcp", "namespace", "tool_search",
}

// sglangResponsesTools sets the tools of a chat's body, to the functions among the request's tools, and its
// tool_choice.
func sglangResponsesTools(given, body *values.Dict) error {
	value, has := given.Get("tools")
	list, ok := value.(*values.List)
	if has && !ok {
		return errRefused("tools is not a list")
	}
	var tools []any
	var names []string
	for i := range list.Len() {
		tool, _ := list.Items[i].(*values.Dict)
		kind, _ := get[string](tool, "type")
		if kind == "custom" {
			return errNotReproduced("a custom tool")
		}
		if slices.Contains(sglangUnusedTools, kind) {
			continue
		}
		name, _ := get[string](tool, "name")
		strict, has := tool.Get("strict")
		if !has {
			strict = false
		}
		if _, isBool := strict.(bool); kind != "function" || name == "" || !isBool {
			return errRefused("tools[%d] is not a function with a name and a boolean strict", i)
		}
		description, _ := tool.Get("description")
		parameters, _ := tool.Get("parameters")
		tools = append(tools, dict("type", "function", "function",
			dict("name", name, "description", description, "parameters", parameters, "strict", strict)))
		names = append(names, name)
	}
	choice, has := given.Get("tool_choice")
	switch choice := choice.(type) {
	case string:
		if choice == "required" && tools == nil {
			return errRefused("tool_choice is required, without functions")
		}
		if choice == "none" {
			return nil
		}
	case *values.Dict:
		name, _ := get[string](choice, "name")
		if function, _ := get[*values.Dict](choice, "function"); name == "" {
			name, _ = get[string](function, "name")
		}
		if kind, _ := choice.Get("type"); (kind == "function" || kind == "custom") && name != "" {
			if !slices.Contains(names, name) {
				return errRefused("tool_choice names a function that is not there")
			}
			body.Set("tool_choice", dict("type", "function", "function", dict("name", name)))
		}
	default:
		if has {
			return errRefused("tool_choice is neither a string nor an object")
		}
	}
	if tools != nil {
		body.Set("tools", values.NewList(tools...))
	}
	return nil
}

// isSystemItem reports whether an input item is a system's or developer's message.
func isSystemItem(item any) bool {
	d, _ := item.(*values.Dict)
	return role(d) == "system" || role(d) == "developer"
}

// sglangResponses collects the chat's messages.
type sglangResponses struct {
	rules    rules
	inPlace  bool     // system messages stay where they are
	system   []string // the texts of the system message; nil with inPlace
	messages []any    // the other messages; with inPlace all
	// open says that the last item ended up in the last message. The next item then joins that message if both are the
	// assistant's.
	open   bool
	packed packedReasoning
}

// maxUnpacked bounds the reasoning that is unpacked for one request, in bytes. Compressed reasoning can expand to a
// thousand times its size.
const maxUnpacked = 16 << 20

// add adds an input item.
func (c *sglangResponses) add(item *values.Dict) error {
	kind, typed := item.Get("type")
	switch kind {
	case "function_call":
		call, err := sglangResponsesCall(item)
		if err != nil {
			return err
		}
		c.appendMessage(dict("role", "assistant", "tool_calls", values.NewList(call)))
		return nil
	case "function_call_output":
		id, ok := get[string](item, "call_id")
		output, err := sglangOutput(item)
		if err != nil || !ok {
			return errNotReproduced("a function's output that is not text")
		}
		c.appendMessage(dict("role", "tool", "tool_call_id", id, "content", output))
		return nil
	case "reasoning":
		text, err := c.reasoning(item)
		if err != nil || text == "" {
			return err
		}
		c.appendMessage(dict("role", "assistant", "reasoning_content", text))
		return nil
	case "message", nil:
		if typed && kind == nil {
			return errNotReproduced("an item whose type is null")
		}
		return c.message(item)
	case "custom_tool_call", "custom_tool_call_output":
		return errNotReproduced("a custom tool")
	}
	return errRefused("an item of type %v", kind)
}

// appendMessage adds a message. An assistant's message joins the last message if open allows it and the phases are
// equal.
func (c *sglangResponses) appendMessage(message *values.Dict) {
	last := c.last()
	if role(message) != "assistant" || role(last) != "assistant" || !c.open {
		c.messages, c.open = append(c.messages, message), true
		return
	}
	if phase, of := field(message, "phase"), field(last, "phase"); phase != of {
		if !c.rules.toolsAsSent || !onlyFields(last, "role", "reasoning_content") {
			c.messages = append(c.messages, message)
			return
		}
		if phase != nil { // reasoning belongs to the phase of what follows it
			last.Set("phase", phase)
		}
	}
	if content := field(message, "content"); content != nil && content != "" {
		before := field(last, "content")
		text, isText := content.(string)
		textBefore, wasText := before.(string)
		switch {
		case before == nil || before == "":
			last.Set("content", content)
		case isText && wasText:
			last.Set("content", textBefore+"\n\n"+text)
		default:
			last.Set("content", values.NewList(slices.Concat(asParts(before), asParts(content))...))
		}
	}
	if calls, _ := get[*values.List](message, "tool_calls"); calls.Len() > 0 {
		before, _ := get[*values.List](last, "tool_calls")
		var all []any
		if before != nil {
			all = append(all, before.Items...)
		}
		last.Set("tool_calls", values.NewList(append(all, calls.Items...)...))
	}
	if reasoning, _ := get[string](message, "reasoning_content"); reasoning != "" {
		if before, _ := get[string](last, "reasoning_content"); before != "" {
			reasoning = before + "\n" + reasoning
		}
		last.Set("reasoning_content", reasoning)
	}
}

// last returns the last message; nil without messages.
func (c *sglangResponses) last() *values.Dict {
	if len(c.messages) == 0 {
		return nil
	}
	last, _ := c.messages[len(c.messages)-1].(*values.Dict)
	return last
}

// asParts returns content as parts.
func asParts(content any) []any {
	switch content := content.(type) {
	case string:
		if content != "" {
			return []any{textPart(content)}
		}
	case *values.List:
		return content.Items
	}
	return nil
}

// developerLabel begins the text of a developer's message, which joins the system message.
const developerLabel = "Developer instructions:\n"

// message adds a message.
func (c *sglangResponses) message(item *values.Dict) error {
	role, _ := get[string](item, "role")
	if !slices.Contains([]string{"user", "assistant", "system", "developer"}, role) ||
		!onlyFields(item, "type", "id", "status", "role", "content", "phase", "summary") {
		return errNotReproduced("such a message of the role " + role)
	}
	content := field(item, "content")
	if list, isList := content.(*values.List); isList {
		parts, err := sglangInputParts(list)
		if err != nil {
			return err
		}
		content = parts
	} else if _, isText := content.(string); !isText {
		return errNotReproduced("a message without content")
	}
	message := dict("role", role)
	if phase := field(item, "phase"); phase != nil {
		if phase != "commentary" && phase != "final_answer" {
			return errNotReproduced("a message of another phase")
		}
		message.Set("phase", phase)
	}
	if role == "developer" {
		message.Set("role", "system")
		content = labelled(content)
	}
	message.Set("content", content)
	if field(message, "role") == "system" {
		c.addSystem(message)
	} else {
		c.appendMessage(message)
	}
	return nil
}

// labelled returns a developer's content, a string or a list of text parts, with its label.
func labelled(content any) any {
	list, isList := content.(*values.List)
	if !isList {
		text, _ := content.(string)
		return developerLabel + text
	}
	if list.Len() == 0 {
		return values.NewList(textPart(strings.TrimSuffix(developerLabel, "\n")))
	}
	first, _ := list.Items[0].(*values.Dict)
	text, _ := get[string](first, "text")
	return values.NewList(append([]any{textPart(developerLabel + text)}, list.Items[1:]...)...)
}

// addSystem adds a system's message, in its place or to the first message.
func (c *sglangResponses) addSystem(message *values.Dict) {
	if c.inPlace {
		c.messages, c.open = append(c.messages, message), true
		return
	}
	c.open = false
	content := field(message, "content")
	if text, isText := content.(string); isText {
		c.system = append(c.system, text)
		return
	}
	for _, part := range asParts(content) {
		part, _ := part.(*values.Dict)
		text, _ := get[string](part, "text")
		c.system = append(c.system, text)
	}
}

// sglangInputParts returns a message's parts. Parts other than text are an error.
func sglangInputParts(list *values.List) (*values.List, error) {
	parts := make([]any, list.Len())
	for i, item := range list.Items {
		part, _ := item.(*values.Dict)
		text, ok := get[string](part, "text")
		switch kind, _ := get[string](part, "type"); kind {
		case "input_text", "output_text", "text":
			if !ok {
				return nil, errNotReproduced("a part without text")
			}
		default:
			return nil, errNotReproduced("a part other than text")
		}
		parts[i] = textPart(text)
	}
	return values.NewList(parts...), nil
}

// sglangOutput returns a function's output as one text.
func sglangOutput(item *values.Dict) (string, error) {
	output, _ := item.Get("output")
	list, isList := output.(*values.List)
	if text, ok := output.(string); ok || !isList {
		if !ok {
			return "", errNotReproduced("an output of another type")
		}
		return text, nil
	}
	parts, err := sglangInputParts(list)
	if err != nil {
		return "", err
	}
	text, _ := joinTexts(parts, "")
	return text, nil
}

// sglangResponsesCall returns a function call as a tool call of the chat API. Arguments that are not an object become
// {}.
func sglangResponsesCall(item *values.Dict) (any, error) {
	id, isID := get[string](item, "call_id")
	name, isName := get[string](item, "name")
	if !isID || id == "" || !isName {
		return nil, errNotReproduced("a function call without call_id and name")
	}
	arguments, _ := item.Get("arguments")
	if text, isText := arguments.(string); isText {
		value, malformed, err := readArguments(text)
		if err != nil {
			return nil, err
		}
		if malformed != nil && pythonMayRead(text, malformed) && !hasNonFinite(text) {
			return nil, errNotReproduced("tool call arguments that only orjson may read")
		}
		arguments = value
	}
	object, ok := arguments.(*values.Dict)
	if !ok {
		object = values.NewDict()
	}
	if hasBigInteger(object) {
		return nil, errBigInteger
	}
	return functionCall(id, name, object), nil
}

// reasoning returns the text of a reasoning item: its summary, else its content, else what SGLang itself packed into
// encrypted_content, where it only compresses it; "" if there is none.
func (c *sglangResponses) reasoning(item *values.Dict) (string, error) {
	for _, name := range []string{"summary", "content"} {
		value, _ := item.Get(name)
		list, ok := value.(*values.List)
		if value != nil && !ok {
			return "", errNotReproduced("such reasoning")
		}
		var texts []string
		for i := range list.Len() {
			part, _ := list.Items[i].(*values.Dict)
			text, ok := get[string](part, "text")
			if !ok {
				return "", errNotReproduced("such reasoning")
			}
			if text != "" {
				texts = append(texts, text)
			}
		}
		if texts != nil {
			return strings.Join(texts, "\n"), nil
		}
	}
	return c.packed.unpack(item)
}

// packedReasoning unpacks reasoning that came compressed. bytes counts what it unpacked for a request.
type packedReasoning struct{ bytes int64 }

// unpack returns the reasoning in an item's encrypted_content; "" if SGLang cannot read it either.
func (p *packedReasoning) unpack(item *values.Dict) (string, error) {
	packed, _ := get[string](item, "encrypted_content")
	packed, own := strings.CutPrefix(packed, "sglang-reasoning-v1.")
	if !own {
		return "", nil
	}
	compressed, err := base64.URLEncoding.DecodeString(packed)
	if err != nil {
		return "", errNotReproduced("packed reasoning that is not base64")
	}
	reader, err := zlib.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return "", nil // SGLang cannot read it either
	}
	text, err := io.ReadAll(io.LimitReader(reader, maxUnpacked-p.bytes+1))
	switch p.bytes += int64(len(text)); {
	case p.bytes > maxUnpacked:
		return "", errNotReproduced("packed reasoning of that length")
	case err != nil || !utf8.Valid(text):
		return "", nil
	}
	return string(text), nil
}
