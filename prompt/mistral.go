package prompt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"kvepp/internal/boundedfile"
	"kvepp/prompt/body"
	"kvepp/prompt/bpe"
)

// vLLM encodes chats for a folder of Mistral's with mistral-common instead of a template: straight to ids, each text by
// itself between special tokens, so that nothing in a message becomes a special token. This file chooses and loads such
// a folder, mistral_chat.go reads and checks a chat, and mistral_ids.go encodes it.
// Source: vLLM 0.33.0, tokenizers/registry, tokenizers/mistral and renderers/mistral; mistral-common 1.13.1.

// The values of Options.TokenizerMode.
const (
	TokenizerAuto    = "auto"    // the engine looks at the folder
	TokenizerHF      = "hf"      // tokenizer.json
	TokenizerMistral = "mistral" // Mistral's own tokenizer
)

const tekkenFile = "tekken.json"

// usesMistralCommon reports whether vLLM takes Mistral's own tokenizer: if told to, or if the folder has it and also
// Mistral's own weights. Without any weights in the folder, kvepp assumes that it does.
func usesMistralCommon(dir string, o *Options) bool {
	if o.Engine != VLLM || o.TokenizerMode == TokenizerHF {
		return false
	}
	has := func(pattern string) bool {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		return err == nil && len(names) > 0
	}
	return o.TokenizerMode == TokenizerMistral || (has(tekkenFile) || has("tokenizer.model.v*")) &&
		(has("consolidated*.safetensors") || !has("*.safetensors"))
}

// mistralTokenizer is what a tekken.json says about chats.
type mistralTokenizer struct {
	version      int    // of the rules: one of mistralVersions
	image, audio bool   // the model takes these
	mark         string // the token that stands for the ids of media, which are not known
	think        bool   // there are tokens around reasoning
	// settings are those of version 15. hasSettings says that the file has some; a chat of version 15 fails without.
	settings    mistralSettings
	hasSettings bool
}

// mistralVersions are the versions that tekken has, and the special tokens that each adds.
var mistralVersions = []struct {
	version int
	tokens  []string
}{
	{3, []string{"<s>", "</s>", mistralInst, mistralInstEnd, mistralTools, mistralToolsEnd, mistralResults,
		mistralResultsEnd, mistralCalls}},
	{7, []string{mistralSystem, mistralSystemEnd, mistralToolContent}},
	{11, []string{mistralArgs, mistralCallID}},
	{13, nil},
	{15, []string{mistralSettingsBegin, mistralSettingsEnd}},
}

// The special tokens that frame the parts of a chat.
const (
	mistralEnd           = "</s>"
	mistralInst          = "[INST]"
	mistralInstEnd       = "[/INST]"
	mistralTools         = "[AVAILABLE_TOOLS]"
	mistralToolsEnd      = "[/AVAILABLE_TOOLS]"
	mistralResults       = "[TOOL_RESULTS]"
	mistralResultsEnd    = "[/TOOL_RESULTS]"
	mistralCalls         = "[TOOL_CALLS]"
	mistralSystem        = "[SYSTEM_PROMPT]"
	mistralSystemEnd     = "[/SYSTEM_PROMPT]"
	mistralToolContent   = "[TOOL_CONTENT]"
	mistralArgs          = "[ARGS]"
	mistralCallID        = "[CALL_ID]"
	mistralThink         = "[THINK]"
	mistralThinkEnd      = "[/THINK]"
	mistralSettingsBegin = "[MODEL_SETTINGS]"
	mistralSettingsEnd   = "[/MODEL_SETTINGS]"
)

// mistralSettings is the model_settings_builder of a tekken.json: the reasoning efforts that the model takes. Its
// response schemas have no effect in vLLM.
type mistralSettings struct {
	Effort *struct {
		Type        string   `json:"type"`
		AcceptsNone *bool    `json:"accepts_none"`
		Default     string   `json:"default"`
		Values      []string `json:"values"`
	} `json:"reasoning_effort"`
	Schema json.RawMessage `json:"json_schema"`
}

// loadMistral loads the encoder and the rules of a folder's tekken.json.
func (m *Model) loadMistral(dir string) error {
	path := filepath.Join(dir, tekkenFile)
	raw, err := boundedfile.Read(path, maxTokenizerFile)
	if err != nil {
		return err
	}
	encoder, info, err := bpe.ParseTekken(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	t := &mistralTokenizer{version: info.Version, image: info.Image, audio: info.Audio}
	known := false
	for _, v := range mistralVersions {
		for _, token := range v.tokens {
			if _, ok := encoder.AddedID(token); !ok && v.version <= t.version {
				return fmt.Errorf("%s: version v%d needs the special token %s", path, t.version, token)
			}
		}
		known = known || v.version == t.version
	}
	if !known {
		return fmt.Errorf("%s: version v%d is not supported, so ids could differ from the engine's", path, t.version)
	}
	t.mark = "[IMG]"
	if _, ok := encoder.AddedID(t.mark); !ok {
		t.mark = mistralInst // any token that there is
	}
	_, begins := encoder.AddedID(mistralThink)
	_, ends := encoder.AddedID(mistralThinkEnd)
	t.think = begins && ends && t.version >= 13
	if info.Settings != nil {
		if err := t.readSettings(info.Settings); err != nil {
			return fmt.Errorf("%s: model_settings_builder: %w", path, err)
		}
	}
	m.encoder, m.mistral = encoder, t
	return nil
}

// readSettings reads the model_settings_builder, and refuses what mistral-common refuses.
func (t *mistralTokenizer) readSettings(raw json.RawMessage) error {
	if t.version < 15 {
		return fmt.Errorf("version v%d has none", t.version)
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&t.settings); err != nil {
		return err
	}
	t.hasSettings = true
	effort := t.settings.Effort
	if effort == nil {
		return nil
	}
	if effort.Type != "" && effort.Type != "enum" || effort.AcceptsNone != nil && !*effort.AcceptsNone {
		return errors.New("reasoning_effort is not an enum that accepts none")
	}
	for i, value := range effort.Values {
		if !slices.Contains(reasoningEfforts, value) || slices.Contains(effort.Values[:i], value) {
			return fmt.Errorf("reasoning_effort.values: %q is none of %v, or there twice", value, reasoningEfforts)
		}
	}
	if !slices.Contains(effort.Values, effort.Default) {
		return fmt.Errorf("reasoning_effort.default %q is not among its values", effort.Default)
	}
	return nil
}

// tokenizeMistral returns a chat's prompt as vLLM makes it with mistral-common. vLLM ignores the request's template and
// add_special_tokens here, and refuses chat_template_kwargs.
//
// Errors: ErrInvalidUTF8, ErrMemory, errors for requests that vLLM refuses, and those of IsUnknown.
func (m *Model) tokenizeMistral(ctx context.Context, request *body.Request) (Prompt, error) {
	if m.mistral == nil {
		return Prompt{}, errNotReproduced("a folder with Mistral's own SentencePiece tokenizer")
	}
	effort, err := m.mistralEffort(request)
	if err != nil {
		return Prompt{}, err
	}
	tools, err := m.mistralTools(ctx, request)
	if err != nil {
		return Prompt{}, err
	}
	chat, err := m.mistral.readChat(request)
	if err != nil {
		return Prompt{}, err
	}
	w := mistralWriter{ctx: ctx, rules: m.mistral, limits: limits(request)}
	if err := w.chat(chat, tools, effort); err != nil {
		return Prompt{}, err
	}
	bytes := mistralPieceBytes * len(w.pieces)
	for _, piece := range w.pieces {
		bytes += len(piece.Text)
	}
	budget := budgetFor(ctx, request, bytes)
	return m.piecesIDs(&budget, w.pieces, false)
}

// mistralPieceBytes is the memory of a piece without its text, in bytes.
const mistralPieceBytes = 3 * 32
