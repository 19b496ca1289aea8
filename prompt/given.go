package prompt

import (
	"errors"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// ErrNoIDs says that a request is text, which only its model's tokenizer can encode.
var ErrNoIDs = errors.New("prompt: the request brings text, and no tokenizer for its model is loaded")

// Given returns the token ids that a request brings itself: nvext.token_data for its only prompt, or prompts that are
// lists of ids. It needs no model. The ids belong to the caller.
//
// Errors: ErrNoIDs.
func Given(request *body.Request) ([]Prompt, error) {
	if request.TokenData != nil && len(request.Prompts) <= 1 {
		return Certain([][]kvblock.Token{tokens(request.TokenData)}), nil
	}
	if request.API != body.Completions || len(request.Prompts) == 0 {
		return nil, ErrNoIDs
	}
	all := make([][]kvblock.Token, len(request.Prompts))
	for i, prompt := range request.Prompts {
		if !prompt.HasTokens {
			return nil, ErrNoIDs
		}
		all[i] = tokens(prompt.Tokens)
	}
	return Certain(all), nil
}
