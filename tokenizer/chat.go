package tokenizer

import (
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// Tokenize returns the token ids of each prompt of a request; a chat has one. ids[i] belongs to prompt i and to the
// caller.
//
// A request that brings its own ids (nvext.token_data) for its only prompt gets those. Otherwise a chat is rendered
// with the model's template and encoded without special tokens, which the template writes itself, and a completion is
// encoded with them; add_special_tokens overrides both.
//
// Errors, all meaning that the ids are not known here: ErrMedia, ErrNoChatTemplate, ErrInvalidUTF8,
// *chattemplate.RaiseError and other template errors, chattemplate.ErrLimit.
func (m *Model) Tokenize(request *apibody.Request) ([][]kvblock.Token, error) {
	if ids, err := Given(request); err == nil {
		return ids, nil
	}
	if request.HasMedia {
		return nil, ErrMedia
	}
	if request.API == apibody.ChatCompletions {
		text, err := m.renderChat(request)
		if err != nil {
			return nil, err
		}
		ids, err := m.Encode(text, request.AddSpecialTokens != nil && *request.AddSpecialTokens)
		if err != nil {
			return nil, err
		}
		return [][]kvblock.Token{ids}, nil
	}
	special := request.AddSpecialTokens == nil || *request.AddSpecialTokens
	all := make([][]kvblock.Token, len(request.Prompts))
	for i, prompt := range request.Prompts {
		if prompt.HasTokens {
			all[i] = tokens(prompt.Tokens)
			continue
		}
		ids, err := m.Encode(prompt.Text, special)
		if err != nil {
			return nil, err
		}
		all[i] = ids
	}
	return all, nil
}

func tokens(ids []uint32) []kvblock.Token {
	out := make([]kvblock.Token, len(ids))
	for i, id := range ids {
		out[i] = kvblock.Token(id)
	}
	return out
}
