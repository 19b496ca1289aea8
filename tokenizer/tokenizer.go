// Package tokenizer turns a request's text into the token ids that the inference engine will compute from it.
//
// It owns the reading of a model's Hugging Face folder (tokenizer.json, tokenizer_config.json, the chat template) and
// the encoding itself: byte-level BPE and SentencePiece-style BPE, exact to the id, in pure Go. It never guesses: a
// component that it does not know exactly is refused when the model is loaded, by name, because one wrong id would turn
// every later block hash wrong, silently.
//
// A Model is safe for concurrent use. Its caches are bounded.
package tokenizer

import (
	"errors"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// The reasons for which a request has no token ids here. It is then routed by load.
var (
	// ErrMedia says that the prompt holds something other than text.
	ErrMedia = errors.New("tokenizer: the prompt is not text alone")
	// ErrNoChatTemplate says that the model has no chat template.
	ErrNoChatTemplate = errors.New("tokenizer: the model has no chat template")
	// ErrInvalidUTF8 says that the text is not valid UTF-8.
	ErrInvalidUTF8 = errors.New("tokenizer: text is not valid UTF-8")
)

// Model is a loaded tokenizer with its chat template.
type Model struct{}

// Load reads a model's folder.
func Load(dir string) (*Model, error) {
	return nil, errors.New("tokenizer: not in place yet")
}

// Encode returns the token ids of text.
func (m *Model) Encode(text string, addSpecialTokens bool) ([]kvblock.Token, error) {
	return m.AppendEncode(nil, text, addSpecialTokens)
}

// AppendEncode is Encode that appends to ids.
func (m *Model) AppendEncode(ids []kvblock.Token, text string, addSpecialTokens bool) ([]kvblock.Token, error) {
	return ids, errors.New("tokenizer: not in place yet")
}

// Tokenize returns the token ids of each prompt of a request; a chat has one.
func (m *Model) Tokenize(request *apibody.Request) ([][]kvblock.Token, error) {
	return nil, errors.New("tokenizer: not in place yet")
}
