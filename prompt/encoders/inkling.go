package encoders

import (
	"context"
	"math"
	"math/big"
	"strconv"
	"strings"

	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// Inkling. Its prompts are token ids: texts between special tokens, each encoded by itself. Source: vLLM 0.31.0 to
// 0.33.0, renderers/inkling and inkling_encoding.

const (
	inklingText     = "<|content_text|>"
	inklingThinking = "<|content_thinking|>"
	inklingCall     = "<|content_invoke_tool_json|>"
	inklingXML      = "<|content_xml|>"
	inklingImage    = "<|content_image|>"
	inklingAudio    = "<|content_audio_input|>"
	inklingAudioEnd = "<|audio_end|>"
	inklingEnd      = "<|end_message|>"
	inklingEndTurn  = "<|content_model_end_sampling|>"
	inklingModel    = "<|message_model|>"
	// inklingUnnamed is another name of inklingXML in the vocabulary.
	inklingUnnamed = "<|unused_200024|>"
	// inklingEffort begins the message that says how much to think, and inklingMost is the most.
	inklingEffort = "Thinking effort level: "
	inklingMost   = 0.99
)

// inklingRoles are the tokens that begin a message of each role.
var inklingRoles = map[string]string{
	"user": "<|message_user|>", "assistant": inklingModel, "system": "<|message_system|>",
	"developer": "<|message_system|>", "tool": "<|message_tool|>",
}

// inklingEfforts are the numbers that stand for names of efforts.
var inklingEfforts = map[string]float64{
	"none": 0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99,
}

// inklingPart is a part of a message, which becomes a message of its own.
type inklingPart struct{ kind, text string }

// inklingPrompt collects a prompt's pieces.
type inklingPrompt struct {
	ctx    context.Context
	most   int // bytes
	bytes  int
	pieces []Piece
	names  map[string]string // called functions, by the call's id
	// sglang says that SGLang renders: special tokens have fixed ids, each part of a tool's result becomes a message,
	// and an assistant's parts may be thinking.
	sglang bool
}

// inklingVLLM renders a chat for vLLM.
func inklingVLLM(ctx context.Context, chat *Chat) ([]Piece, error) {
	p := newInkling(ctx, chat)
	if jinja.Truth(field(chat.Variables, "continue_final_message")) {
		return nil, refused("continue_final_message for Inkling")
	}
	effort, err := inklingEffortVLLM(chat.Variables)
	if err != nil {
		return nil, err
	}
	tools := append([]any(nil), items(chat.Tools)...)
	for _, item := range chat.Messages {
		message, _ := item.(*values.Dict)
		if own, _ := get[*values.List](message, "tools"); roleOf(message) == "developer" {
			tools = append(tools, items(own)...)
		}
	}
	if err := p.tools(tools); err != nil {
		return nil, err
	}
	for _, item := range chat.Messages {
		message, _ := item.(*values.Dict)
		role := roleOf(message)
		if role != "system" && role != "developer" && effort != "" {
			p.message("system", "", inklingPart{inklingText, inklingEffort + effort})
			effort = ""
		}
		if err := p.add(message, role); err != nil {
			return nil, err
		}
		if role == "assistant" {
			p.special(inklingEndTurn)
		}
	}
	if effort != "" {
		p.message("system", "", inklingPart{inklingText, inklingEffort + effort})
	}
	if begin, given := chat.Variables.Get("add_generation_prompt"); !given || jinja.Truth(begin) {
		p.special(inklingModel)
	}
	return p.done()
}

// inklingEffortVLLM returns the effort as vLLM shows it; "" for none.
func inklingEffortVLLM(variables *values.Dict) (string, error) {
	value := 0.9
	switch given := field(variables, "reasoning_effort").(type) {
	case nil:
	case string:
		named, known := inklingEfforts[given]
		if !known {
			return "", nil
		}
		value = named
	case int64:
		value = float64(given)
	case float64:
		value = given
	case *big.Int:
		value = math.Inf(given.Sign())
	default:
		return "", nil
	}
	if !(value >= 0 && value <= inklingMost) {
		return "", refused("the effort %v for Inkling, which is not between 0 and 0.99", value)
	}
	text := strings.TrimRight(strings.TrimRight(strconv.FormatFloat(value, 'f', 2, 64), "0"), ".")
	if text == "0" || text == "-0" {
		text = "0.0"
	}
	return text, nil
}

// inklingIDs are the ids of special tokens that SGLang has in its code. Source: SGLang 0.5.21 and 0.5.22,
// parser/inkling_tokenizer.
var inklingIDs = map[string]uint32{
	"<|message_user|>": 200000, inklingModel: 200001, "<|message_system|>": 200002, "<|message_tool|>": 200003,
	inklingText: 200004, inklingImage: 200005, inklingEndTurn: 200006, inklingThinking: 200008, inklingEnd: 200010,
	inklingAudio: 200020, inklingXML: 200024, inklingAudioEnd: 200043, inklingCall: 200049,
}

// inklingSGLang renders a chat for SGLang, where the model itself begins its message.
// Source: SGLang 0.5.21 and 0.5.22, parser/inkling_renderer and serving_chat, _encode_messages.
func inklingSGLang(ctx context.Context, chat *Chat) ([]Piece, error) {
	p := newInkling(ctx, chat)
	p.sglang = true
	effort, err := inklingEffortSGLang(field(chat.Variables, "reasoning_effort"))
	if err != nil {
		return nil, err
	}
	if err := p.tools(items(chat.Tools)); err != nil {
		return nil, err
	}
	messages, prefix, continues := inklingPrefix(chat)
	for _, item := range messages {
		message, _ := item.(*values.Dict)
		role := roleOf(message)
		if role != "system" && role != "developer" && effort != "" {
			p.message("system", "", inklingPart{inklingText, inklingEffort + effort})
			effort = ""
		}
		before := p.bytes
		if err := p.add(message, role); err != nil {
			return nil, err
		}
		if role == "assistant" && p.bytes > before {
			p.special(inklingEndTurn)
		}
	}
	if effort != "" {
		p.message("system", "", inklingPart{inklingText, inklingEffort + effort})
	}
	if continues {
		p.special(inklingModel)
		p.special(inklingText)
		p.text(prefix)
	}
	return p.done()
}

// inklingPrefix returns a chat's messages, without the last one if it is to be continued, and the text of that one.
func inklingPrefix(chat *Chat) (messages []any, prefix string, continues bool) {
	messages = chat.Messages
	if len(messages) == 0 || field(chat.Variables, "continue_final_message") != true {
		return messages, "", false
	}
	last, _ := messages[len(messages)-1].(*values.Dict)
	prefix, isText := get[string](last, "content")
	if roleOf(last) != "assistant" || !isText || jinja.Truth(field(last, "tool_calls")) ||
		jinja.Truth(field(last, "reasoning_content")) {
		return messages, "", false
	}
	return messages[:len(messages)-1], prefix, true
}

// inklingEffortSGLang returns the effort as SGLang shows it.
func inklingEffortSGLang(effort any) (string, error) {
	value := 0.9
	switch given := effort.(type) {
	case nil:
	case string:
		named, known := inklingEfforts[given]
		if !known {
			var err error
			if named, err = strconv.ParseFloat(given, 64); err != nil || strings.Trim(given, "0123456789.") != "" {
				return "", Unknown("such a name of an effort for Inkling")
			}
		}
		value = named
	case int64:
		value = float64(given)
	case float64:
		value = given
	default:
		return "", refused("an effort for Inkling that is neither a name nor a number")
	}
	if !(value >= 0 && value <= inklingMost) {
		return "", refused("the effort %v for Inkling, which is not between 0 and 0.99", value)
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(value, 'f', 2, 64), "0"), "."), nil
}

func newInkling(ctx context.Context, chat *Chat) *inklingPrompt {
	p := &inklingPrompt{ctx: ctx, most: chat.MaxBytes, names: map[string]string{}}
	if p.most <= 0 {
		p.most = maxBytes
	}
	return p
}

// items returns a list's items; none for nil.
func items(list *values.List) []any {
	if list == nil {
		return nil
	}
	return list.Items
}

func roleOf(message *values.Dict) string {
	role, _ := get[string](message, "role")
	return role
}

// inklingPieceBytes is the memory of a piece without its text.
const inklingPieceBytes = 64

// piece appends a piece, unless the prompt is too long already. The names of special tokens take no memory of their
// own.
func (p *inklingPrompt) piece(piece Piece) {
	if piece.Kind == Text {
		p.bytes += len(piece.Text)
	}
	if p.bytes += inklingPieceBytes; p.bytes <= p.most {
		p.pieces = append(p.pieces, piece)
	}
}

// special appends a special token.
func (p *inklingPrompt) special(name string) {
	if p.sglang {
		p.piece(Piece{Kind: Fixed, Text: name, ID: inklingIDs[name]})
		return
	}
	p.piece(Piece{Kind: Special, Text: name})
}

// text appends a text.
func (p *inklingPrompt) text(text string) {
	if text != "" {
		p.piece(Piece{Kind: Text, Text: text})
	}
}

// done returns the pieces.
func (p *inklingPrompt) done() ([]Piece, error) {
	if p.bytes > p.most {
		return nil, jinja.ErrLimit
	}
	return p.pieces, p.ctx.Err()
}

// message appends a part as a message of a role. author is the function that it is about; "" for none.
func (p *inklingPrompt) message(role, author string, part inklingPart) {
	p.special(inklingRoles[role])
	p.text(author)
	switch part.kind {
	case inklingXML:
		p.special(inklingXML)
		p.text(part.text)
	case inklingImage, inklingAudio: // the engine puts the media's own ids behind the token
		p.piece(Piece{Kind: Media})
		p.special(part.kind)
		if part.kind == inklingAudio {
			p.special(inklingAudioEnd)
		}
	default:
		p.special(part.kind)
		p.text(part.text)
	}
	p.special(inklingEnd)
}

// json returns a value as JSON without spaces, with the keys in order.
func (p *inklingPrompt) json(value any) (string, error) {
	return jinja.PythonJSON(p.ctx, value, jinja.JSONFormat{Compact: true, SortKeys: true},
		jinja.Limits{OutputBytes: max(1, p.most-p.bytes)})
}

// tools appends the message that declares tools.
func (p *inklingPrompt) tools(tools []any) error {
	if len(tools) == 0 {
		return nil
	}
	declared := make([]any, len(tools))
	for i, item := range tools {
		tool, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](tool, "function")
		name, given := function.Get("name")
		if !given {
			return refused("a tool without a name")
		}
		spec := values.DictOf("description", any(""), "name", name, "parameters", values.NewDict(),
			"type", "function")
		for _, field := range []string{"description", "parameters"} {
			if value, _ := function.Get(field); jinja.Truth(value) {
				spec.Set(field, value)
			}
		}
		if kind, given := tool.Get("type"); given {
			spec.Set("type", kind)
		}
		declared[i] = spec
	}
	text, err := p.json(values.NewList(declared...))
	if err != nil {
		return err
	}
	p.message("system", "tool_declare", inklingPart{inklingXML, text})
	return nil
}

// add appends what becomes of one message.
func (p *inklingPrompt) add(message *values.Dict, role string) error {
	if inklingRoles[role] == "" {
		return refused("the role %q for Inkling", role)
	}
	if role == "tool" {
		return p.result(message)
	}
	reasons := false
	if role == "assistant" {
		reasoning := field(message, "reasoning")
		if reasoning == nil {
			reasoning = field(message, "reasoning_content")
		}
		text, isText := reasoning.(string)
		if !isText && jinja.Truth(reasoning) {
			return refused("reasoning that is not text")
		}
		if reasons = text != ""; reasons {
			p.message(role, "", inklingPart{inklingThinking, text})
		}
	}
	parts, err := p.parts(field(message, "content"))
	if err != nil {
		return err
	}
	for _, part := range parts {
		if part.kind == inklingThinking && reasons {
			return refused("reasoning_content beside parts that are thinking")
		}
		p.message(role, "", part)
	}
	if role != "assistant" {
		return nil
	}
	calls, _ := get[*values.List](message, "tool_calls")
	for _, item := range items(calls) {
		call, _ := item.(*values.Dict)
		if err := p.call(call); err != nil {
			return err
		}
	}
	return nil
}

// call appends a call of a function.
func (p *inklingPrompt) call(call *values.Dict) error {
	function, _ := get[*values.Dict](call, "function")
	name, ok := get[string](function, "name")
	if !ok {
		return refused("a tool call without a name")
	}
	arguments, _ := get[*values.Dict](function, "arguments")
	if arguments == nil {
		arguments = values.NewDict()
	}
	if id, _ := get[string](call, "id"); id != "" {
		p.names[id] = name
	}
	quoted, err := p.json(name)
	if err != nil {
		return err
	}
	text, err := p.json(arguments)
	if err != nil {
		return err
	}
	p.message("assistant", name, inklingPart{inklingCall, `{"name":` + quoted + `,"args":` + text + `}`})
	return nil
}

// result appends a tool's result, as one text on vLLM.
func (p *inklingPrompt) result(message *values.Dict) error {
	name, _ := get[string](message, "name")
	if name == "" {
		id, _ := get[string](message, "tool_call_id")
		name = p.names[id]
	}
	parts, err := p.parts(field(message, "content"))
	if err != nil {
		return err
	}
	if p.sglang {
		if len(parts) == 0 {
			parts = []inklingPart{{kind: inklingText}}
		}
		for _, part := range parts {
			if part.kind == inklingThinking {
				return refused("a tool's thinking")
			}
			p.message("tool", name, part)
		}
		return nil
	}
	var text strings.Builder
	for _, part := range parts {
		if part.kind != inklingText {
			return refused("a tool's result that is not text")
		}
		text.WriteString(part.text)
	}
	p.message("tool", name, inklingPart{inklingText, text.String()})
	return nil
}

// parts returns the parts of a content.
func (p *inklingPrompt) parts(content any) ([]inklingPart, error) {
	switch content := content.(type) {
	case nil:
		return nil, nil
	case string:
		if content == "" {
			return nil, nil
		}
		return []inklingPart{{inklingText, content}}, nil
	case *values.List:
		parts := make([]inklingPart, content.Len())
		for i, item := range content.Items {
			var err error
			if parts[i], err = p.part(item); err != nil {
				return nil, err
			}
		}
		return parts, nil
	}
	return nil, refused("content that is neither a text nor a list of parts")
}

// part returns one part.
func (p *inklingPrompt) part(item any) (inklingPart, error) {
	if text, ok := item.(string); ok {
		return inklingPart{inklingText, text}, nil
	}
	part, ok := item.(*values.Dict)
	if !ok {
		return inklingPart{}, refused("a part that is neither a text nor an object")
	}
	text, _ := get[string](part, "text")
	switch kind := field(part, "type"); kind {
	case "text", "input_text":
		return inklingPart{inklingText, text}, nil
	case "thinking", "reasoning":
		if !p.sglang {
			return inklingPart{}, refused("a content part of type %v for Inkling", kind)
		}
		if thinking, ok := get[string](part, "thinking"); ok {
			text = thinking
		}
		return inklingPart{inklingThinking, text}, nil
	case "image", "input_image", "image_url":
		return inklingPart{kind: inklingImage}, nil
	case "audio", "input_audio", "audio_url":
		return inklingPart{kind: inklingAudio}, nil
	case nil:
		return inklingPart{}, Unknown("a content part without a type")
	default:
		return inklingPart{}, refused("a content part of type %v for Inkling", kind)
	}
}
