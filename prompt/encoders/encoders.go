// Package encoders turns chats into prompts as engines do with code of their own, for models that have no Jinja
// template or whose template the engine does not use.
//
// Each file holds one family of models. An Encoder is a pure function of a Chat: the messages, tools and variables as
// the engine hands them to its encoder, so that this package does not know an API or a version's fields of messages.
// Package tokenizer reads requests, chooses the Encoder by VLLM or SGLang, and turns its pieces into token ids.
//
// All functions may be called concurrently. They never change a Chat or its values.
package encoders

import (
	"context"
	"fmt"
	"strings"
	"unsafe"

	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// Chat is what an engine hands to its encoder.
type Chat struct {
	// Messages are objects, each a *values.Dict, as the engine converts the request's.
	Messages []any
	// Tools are the request's tools, in the form {"type", "function"}; nil for none.
	Tools *values.List
	// Variables are the chat template variables, those of the request and of the engine's flags; nil for none. They
	// include reasoning_effort where the engine puts it there.
	Variables *values.Dict
	// Task is the request's own task, by which SGLang's DeepSeek V4 classifies the chat; nil for none.
	Task any
	// Efforts is the wording of reasoning efforts that SGLang finds in the checkpoint of DeepSeek V4.
	Efforts Efforts
	// MaxBytes bounds the prompt, in bytes; 0 means 16 MiB.
	MaxBytes int
}

// Efforts is a wording of reasoning efforts. Source: SGLang 0.5.21, chat_encoding, which looks for it in the
// checkpoint's encoding/encoding_dsv4.py.
type Efforts uint8

// The wordings that SGLang knows.
const (
	EffortsUnknown Efforts = iota
	EffortsPreview
	EffortsOfficial
)

// Kind says how a Piece becomes token ids.
type Kind uint8

const (
	// Text is text in which the names of special tokens stand for these tokens.
	Text Kind = iota
	// Ordinary is text in which nothing becomes a special token.
	Ordinary
	// Special is the name of one added token.
	Special
	// Fixed is the name of a token whose id the engine knows without a look at the vocabulary.
	Fixed
	// Media stands for an image, a video or sound. The ids from here on are not known.
	Media
)

// Piece is a part of a prompt that is turned into token ids by itself.
type Piece struct {
	Kind Kind
	Text string
	ID   uint32 // of a piece of kind Fixed
}

// OtherName returns another name under which a vocabulary may have a special token; "" if there is none.
func OtherName(special string) string {
	if special == inklingXML {
		return inklingUnnamed
	}
	return ""
}

// Encoder is one encoder of an engine.
type Encoder struct {
	// Name names it for people: the model and the engine's name for the encoder.
	Name string
	// WantsParts says that the engine hands over message content as a list of parts. Otherwise it is one string.
	WantsParts bool
	// Raw says that the engine hands over the request's own messages, and only turns the arguments of tool calls into
	// objects. The variables then include add_generation_prompt and continue_final_message.
	Raw bool
	// AddsSpecial says that the engine encodes the prompt with the tokenizer's special tokens around it, also if the
	// request says otherwise.
	AddsSpecial bool
	// KeepsLateSystem says that SGLang leaves later system messages in /v1/messages and /v1/responses in their place.
	KeepsLateSystem bool
	// LikeTemplate says that the encoder takes the place of the model's Jinja template: SGLang gives it the tools that
	// tool_choice allows and all template variables, and writes an assistant's thinking in /v1/messages itself.
	LikeTemplate bool
	// CannotEnable says that turning thinking on in /v1/messages changes no prompt on SGLang. Turning it off may.
	CannotEnable bool
	// AlwaysThinks says that no choice of SGLang's about thinking in /v1/messages changes the prompt.
	AlwaysThinks bool
	// RendersIDs says that SGLang keeps the encoder's ids, also of models that take images, instead of decoding them to
	// text and encoding that.
	RendersIDs bool
	// Media says that Encode takes images, video and sound in parts of content, and marks the first by a piece of kind
	// Media. Without it, chats with media are not encoded.
	Media bool
	// Encode returns a chat's prompt. Errors: Refused, Unknown, jinja.ErrLimit, ctx's error.
	Encode func(ctx context.Context, chat *Chat) ([]Piece, error)
}

// Refused says why the engine answers a chat with an error.
type Refused string

func (e Refused) Error() string { return string(e) }

// Unknown names a part of a chat whose effect on the engine's prompt is not known here.
type Unknown string

func (e Unknown) Error() string { return string(e) }

func refused(format string, args ...any) error { return Refused(fmt.Sprintf(format, args...)) }

// VLLM returns the encoder of vLLM for a model's architecture, the first of config.json's; nil if there is none here.
// Source: vLLM 0.33.0, config/model, which chooses --tokenizer-mode by the architecture.
func VLLM(architecture string) *Encoder {
	return vllm[architecture]
}

var vllm = map[string]*Encoder{
	"InklingForCausalLM":              &vllmInkling,
	"InklingForConditionalGeneration": &vllmInkling,
	"DeepseekV32ForCausalLM":          {Name: "DeepSeek V3.2 (vLLM's deepseek_v32)", Encode: deepSeekV32VLLM},
	"DeepseekV4ForCausalLM":           &vllmDeepSeekV4,
	"DeepseekV4ForConditionalGeneration": {
		Name: vllmDeepSeekV4.Name, WantsParts: true, Media: true, Encode: deepSeekV4VLLM,
	},
}

var vllmDeepSeekV4 = Encoder{
	Name: "DeepSeek V4 (vLLM's deepseek_v4)", WantsParts: true, Encode: deepSeekV4VLLM,
}

var vllmInkling = Encoder{Name: "Inkling (vLLM's inkling)", Raw: true, Media: true, Encode: inklingVLLM}

// Model is what SGLang looks at when it chooses an encoder.
type Model struct {
	// Architecture is the first of config.json's architectures, and Type its model_type.
	Architecture, Type string
	// HasTemplate says that the tokenizer has a chat template.
	HasTemplate bool
	// Template is the source of the folder's chat template, if SGLang may replace it by code of its own.
	Template string
	// Recipe says that this version encodes DeepSeek V4 and Inkling with compiled packages.
	Recipe bool
}

// SGLang returns the encoder of SGLang for a model; nil if there is none here. Source: SGLang 0.5.21 to 0.5.23,
// entrypoints/openai/chat_encoding, resolve_chat_encoding_spec.
func SGLang(model Model) *Encoder {
	switch arch := model.Architecture; {
	case model.Type == "deepseek_v41" || strings.Contains(arch, "DeepseekV41"):
		return nil
	case strings.Contains(arch, "DeepseekV4"):
		if model.Recipe {
			return nil
		}
		return &sglangDeepSeekV4
	case strings.Contains(arch, "InklingForConditionalGeneration") && !model.Recipe:
		return &sglangInkling
	case strings.Contains(arch, "DeepseekV3") && !model.HasTemplate:
		return &sglangDeepSeekV32
	case isGLM53(arch, model.Template):
		return &sglangGLM53
	}
	return nil
}

var sglangInkling = Encoder{
	Name: "Inkling (SGLang's inkling)", Raw: true, Media: true, RendersIDs: true, CannotEnable: true,
	Encode: inklingSGLang,
}

var sglangDeepSeekV4 = Encoder{
	Name: "DeepSeek V4 (SGLang's dsv4)", AddsSpecial: true, Encode: deepSeekV4SGLang,
}

var sglangDeepSeekV32 = Encoder{
	Name: "DeepSeek V3.2 (SGLang's dsv32)", AddsSpecial: true, Encode: deepSeekV32SGLang,
}

// maxBytes is the default of Chat.MaxBytes.
const maxBytes = 16 << 20

// prompt collects a prompt's text. It remembers the first error, after which it takes nothing more.
type prompt struct {
	ctx    context.Context
	text   []byte
	most   int
	pieces []Piece // those before text[cut:]
	cut    int
	media  bool // see Encoder.Media
	err    error
}

// newPrompt returns a prompt with room for the chat's texts.
func newPrompt(ctx context.Context, chat *Chat) *prompt {
	p := &prompt{ctx: ctx, most: chat.MaxBytes}
	if p.most <= 0 {
		p.most = maxBytes
	}
	size := 1 << 10
	for _, item := range chat.Messages {
		message, _ := item.(*values.Dict)
		text, _ := get[string](message, "content")
		size += len(text) + 64
	}
	p.text = make([]byte, 0, min(size, p.most))
	return p
}

// add appends texts.
func (p *prompt) add(texts ...string) {
	for _, text := range texts {
		if p.err != nil {
			return
		}
		if len(p.text)+len(text) > p.most {
			p.err = jinja.ErrLimit
			return
		}
		p.text = append(p.text, text...)
	}
}

// content appends a message's text. The token of an image in it, which only dsFlatten puts there, cuts the prompt.
func (p *prompt) content(text string) {
	for p.media && p.err == nil {
		before, after, found := strings.Cut(text, dsImage)
		if !found {
			break
		}
		p.add(before)
		p.pieces = append(p.pieces, Piece{Kind: Text, Text: string(p.text[p.cut:])}, Piece{Kind: Media, Text: dsImage})
		p.cut, text = len(p.text), after
	}
	p.add(text)
}

// json appends a value as Python's json.dumps(value, ensure_ascii=False) prints it.
func (p *prompt) json(value any) {
	if p.err != nil {
		return
	}
	if p.err = p.ctx.Err(); p.err != nil {
		return
	}
	limits := jinja.Limits{OutputBytes: max(1, p.most-len(p.text))}
	text, err := jinja.PythonJSON(p.ctx, value, jinja.JSONFormat{}, limits)
	if err != nil {
		p.err = err
		return
	}
	p.add(text)
}

// done returns the prompt: one piece of text, if no piece was cut before.
func (p *prompt) done() ([]Piece, error) {
	if p.err != nil {
		return nil, p.err
	}
	last := p.text[p.cut:]
	return append(p.pieces, Piece{Kind: Text, Text: unsafe.String(unsafe.SliceData(last), len(last))}), nil
}

// get returns a field if the object has it and its value is of type T.
func get[T any](d *values.Dict, key string) (T, bool) {
	v, _ := d.Get(key)
	t, ok := v.(T)
	return t, ok
}

// field returns a field's value; nil if it is absent or null.
func field(d *values.Dict, name string) any { v, _ := d.Get(name); return v }

// textField returns a field that is a text; "" if it is absent or null. Another value is an error.
func textField(d *values.Dict, name string) (string, error) {
	value := field(d, name)
	text, ok := value.(string)
	if value != nil && !ok {
		return "", Unknown("a message's " + name + " that is not text")
	}
	return text, nil
}

// flag reports whether Python takes one of the named variables for true.
func flag(variables *values.Dict, names ...string) bool {
	for _, name := range names {
		if jinja.Truth(field(variables, name)) {
			return true
		}
	}
	return false
}
