package prompt

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"

	"kvepp/internal/boundedfile"
	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/bpe"
	"kvepp/prompt/encoders"
	"kvepp/prompt/values"
)

// Chats that the engine encodes with code of its own instead of a Jinja template. Package encoders has the encoders.

// chooseNative returns the encoder that the engine chooses for the model; nil for a template.
func (m *Model) chooseNative() *encoders.Encoder {
	switch m.options.Engine {
	case VLLM:
		return encoders.VLLM(m.architecture)
	case SGLang:
		model := encoders.Model{
			Architecture: m.architecture, Type: m.modelType, HasTemplate: m.chat != nil, Recipe: m.release.rules.recipe,
		}
		if m.release.rules.replacesTemplates && m.chat != nil && m.options.ChatTemplate == "" {
			model.Template = m.chat.source
		}
		return encoders.SGLang(model)
	}
	return nil
}

// effortsFile is the file of a checkpoint of DeepSeek V4 in which SGLang looks for the wording of reasoning efforts.
const effortsFile = "encoding/encoding_dsv4.py"

// The assignments at the file's top level that SGLang looks at. Source: SGLang 0.5.21, chat_encoding,
// _detect_dsv4_reasoning_effort_profile.
var (
	effortsDefault = regexp.MustCompile(`(?m)^DEFAULT_REASONING_EFFORT\s*(:[^=\n]*)?=\s*["']low["']`)
	effortsPrompts = regexp.MustCompile(`(?ms)^REASONING_EFFORT_PROMPTS\s*(:[^=\n]*)?=\s*\{(.*?)^\}`)
)

// readEfforts reads that file from a folder. A folder without it leaves the wording unknown.
func readEfforts(dir string) (encoders.Efforts, error) {
	raw, err := boundedfile.Read(filepath.Join(dir, effortsFile), maxConfigFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return encoders.EffortsUnknown, nil
	case err != nil:
		return encoders.EffortsUnknown, err
	}
	prompts := effortsPrompts.FindSubmatch(raw)
	if len(raw) <= 1<<20 && effortsDefault.Match(raw) && prompts != nil {
		official := true
		for _, name := range []string{"low", "high", "max"} {
			official = official && regexp.MustCompile(`(?m)^\s*["']`+name+`["']\s*:`).Match(prompts[2])
		}
		if official {
			return encoders.EffortsOfficial, nil
		}
	}
	return encoders.EffortsPreview, nil // what SGLang takes for any other file
}

// ChatEncoder names the code that the engine turns the model's chats into prompts with, if it is not a chat template;
// else it returns "".
func (m *Model) ChatEncoder() string {
	switch {
	case m.usesHarmony():
		return "gpt-oss (harmony)"
	case m.native != nil:
		return m.native.Name
	}
	return ""
}

// nativeChat is a chat that an encoder has encoded: its pieces, then the prefix, which is the final message to be
// continued.
type nativeChat struct {
	pieces []encoders.Piece
	prefix string
}

// text returns the prompt as one text.
func (c nativeChat) text() string {
	texts := make([]string, len(c.pieces), len(c.pieces)+1)
	for i, piece := range c.pieces {
		texts[i] = piece.Text
	}
	return strings.Join(append(texts, c.prefix), "")
}

// encodeNative encodes a chat. Where SGLang's choice of the thinking variables is not known, it encodes every choice,
// and fails if they differ.
func (m *Model) encodeNative(ctx context.Context, request *body.Request) (nativeChat, error) {
	done, err := m.encodeNativeWith(ctx, request, nil)
	if err != nil || m.options.Engine != SGLang || m.native.AlwaysThinks {
		return done, err
	}
	if m.native.CannotEnable && thinkingEnabled(request) {
		return done, nil
	}
	for _, vars := range sglangThinking(request, nativeThinking) {
		if other, err := m.encodeNativeWith(ctx, request, vars); err != nil || other.text() != done.text() {
			return nativeChat{}, errNotReproduced("thinking that SGLang's --reasoning-parser decides,")
		}
	}
	return done, nil
}

// nativeThinking has the names of the variables that sglangThinking looks for in a template.
const nativeThinking = "thinking reasoning_effort"

// encodeNativeWith encodes a chat with further variables.
func (m *Model) encodeNativeWith(
	ctx context.Context, request *body.Request, further *values.Dict,
) (done nativeChat, err error) {
	var c *encoders.Chat
	if m.options.Engine == SGLang {
		c, done.prefix, err = m.nativeSGLang(request, further)
	} else {
		c, err = m.nativeVLLM(request)
	}
	if err != nil {
		return done, err
	}
	if done.pieces, err = m.native.Encode(ctx, bounded(c, request)); err != nil {
		return done, nativeError(err)
	}
	return done, nil
}

// nativeMerges reports whether the engine moves later system messages to the front without a look at a template. vLLM
// looks only at the one of --chat-template. Source: vLLM 0.33.0, entrypoints/anthropic/serving; SGLang 0.5.22,
// serving_chat, _resolve_inline_system_support.
func (m *Model) nativeMerges() bool {
	if m.options.Engine == VLLM {
		return m.options.ChatTemplate == ""
	}
	return m.release.rules.keepsLateSystem
}

// nativeMessageBytes is what an encoder keeps for each message while it works, in bytes.
const nativeMessageBytes = 160

// bounded sets the bound of the prompt. An encoder's own form of the messages is counted against it.
func bounded(c *encoders.Chat, request *body.Request) *encoders.Chat {
	if c.MaxBytes = limits(request).OutputBytes; c.MaxBytes > 0 {
		c.MaxBytes = max(1, c.MaxBytes-nativeMessageBytes*len(c.Messages)/3)
	}
	return c
}

// nativeError returns an encoder's error as one of this package.
func nativeError(err error) error {
	var refused encoders.Refused
	var unknown encoders.Unknown
	switch {
	case errors.As(err, &refused):
		return errRefused("%s", string(refused))
	case errors.As(err, &unknown):
		return errNotReproduced(string(unknown))
	}
	return fmt.Errorf("prompt: %w", err)
}

// renderNative returns the text of a chat's prompt.
func (m *Model) renderNative(ctx context.Context, request *body.Request) (string, error) {
	c, err := m.encodeNative(ctx, request)
	return c.text(), err
}

// tokenizeNativeSGLang is tokenizeNative for SGLang, which decodes the ids of models that take images and encodes them
// again.
func (m *Model) tokenizeNativeSGLang(ctx context.Context, request *body.Request) (Prompt, error) {
	again := m.reencodesSGLang() && !m.native.RendersIDs
	if again && (!m.encoder.RoundTrips() || request.ContinueFinalMessage) {
		return Prompt{}, errNotReproduced(
			"a chat of a model that also takes images, whose text SGLang reads back from ids and encodes again,")
	}
	c, err := m.encodeNative(ctx, request)
	if err != nil {
		return Prompt{}, err
	}
	if again && !m.encoder.IsNormalized(c.text()) {
		return Prompt{}, errNotReproduced(
			"text that the tokenizer normalizes, which SGLang reads back from ids and encodes again,")
	}
	return m.nativeIDs(ctx, request, c)
}

// tokenizeNative returns a chat's prompt. Its ids are certain up to the first image, video or sound.
func (m *Model) tokenizeNative(ctx context.Context, request *body.Request) (Prompt, error) {
	c, err := m.encodeNative(ctx, request)
	if err != nil {
		return Prompt{}, err
	}
	return m.nativeIDs(ctx, request, c)
}

// nativeIDs turns an encoded chat into the prompt's ids.
func (m *Model) nativeIDs(ctx context.Context, request *body.Request, c nativeChat) (Prompt, error) {
	bytes := len(c.prefix)
	for _, piece := range c.pieces {
		bytes += len(piece.Text)
	}
	budget := budgetFor(ctx, request, bytes)
	special := m.native.AddsSpecial ||
		m.options.Engine != SGLang && request.AddSpecialTokens != nil && *request.AddSpecialTokens
	prompt, err := m.piecesIDs(&budget, c.pieces, special)
	if err != nil || c.prefix == "" {
		return prompt, err
	}
	whole := prompt.Certain == len(prompt.IDs)
	if prompt.IDs, err = m.appendPrefixSGLang(&budget, prompt.IDs, c.prefix); err != nil {
		return Prompt{}, err
	}
	if whole {
		prompt.Certain = len(prompt.IDs)
	}
	return prompt, nil
}

// piecesIDs returns the ids of a prompt's pieces. special adds the tokenizer's special tokens around a prompt that is
// one text.
func (m *Model) piecesIDs(budget *bpe.Budget, pieces []encoders.Piece, special bool) (Prompt, error) {
	if len(pieces) == 1 && pieces[0].Kind == encoders.Text {
		ids, err := m.encoder.Encode(budget, pieces[0].Text, special)
		return Prompt{IDs: ids, Certain: len(ids)}, err
	}
	bytes, certain := 0, -1
	for _, piece := range pieces {
		bytes += len(piece.Text)
	}
	out := budget.NewIDs(bytes+len(pieces), bytes/3+len(pieces)) // English has about four bytes a token
	for _, piece := range pieces {
		var err error
		switch piece.Kind {
		case encoders.Text:
			var ids []kvblock.Token
			ids, err = m.encoder.Encode(budget, piece.Text, false)
			out = append(out, ids...)
		case encoders.Ordinary:
			out, err = m.encoder.AppendOrdinary(budget, out, piece.Text)
		case encoders.Special:
			id, ok := m.encoder.AddedID(piece.Text)
			if other := encoders.OtherName(piece.Text); !ok && other != "" {
				id, ok = m.encoder.AddedID(other)
			}
			if !ok {
				return Prompt{}, errNotReproduced("a vocabulary without " + piece.Text)
			}
			out = append(out, id)
		case encoders.Fixed:
			out = append(out, kvblock.Token(piece.ID))
		case encoders.Media:
			if certain < 0 {
				certain = len(out)
			}
		}
		if err != nil {
			return Prompt{}, err
		}
	}
	if certain < 0 {
		certain = len(out)
	}
	return Prompt{IDs: out, Certain: certain}, nil
}
