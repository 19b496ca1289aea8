package tokenizer

import (
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// Tokenize returns the token ids of each prompt of a request; a chat has one. ids[i] belongs to prompt i and to the
// caller.
//
// A request that brings ids where its engine looks for them gets those. Otherwise a chat is rendered as the engine does
// and encoded without special tokens, which the template writes itself, and a completion is encoded with them;
// add_special_tokens overrides both. SGLang does not know that field; Dynamo's frontend never adds them, and drops NUL bytes.
//
// Errors, all meaning that the ids are not known here: ErrMedia, ErrNoChatTemplate, ErrInvalidUTF8,
// *chattemplate.RaiseError and other template errors, chattemplate.ErrLimit, and errors that name what the engine refuses
// or alone can tokenize.
func (m *Model) Tokenize(request *apibody.Request) ([][]kvblock.Token, error) {
	if ids, err := m.given(request); ids != nil || err != nil {
		return ids, err
	}
	if request.HasMedia {
		return nil, ErrMedia
	}
	if request.API != apibody.Completions {
		if request.API != apibody.ChatCompletions && m.options.Engine != Dynamo {
			return nil, errNotReproduced(request.API.String())
		}
		ids, err := m.chatIDs(request)
		if err != nil {
			return nil, err
		}
		return [][]kvblock.Token{ids}, nil
	}
	special := request.AddSpecialTokens == nil || *request.AddSpecialTokens || m.options.Engine == SGLang
	all := make([][]kvblock.Token, len(request.Prompts))
	for i, prompt := range request.Prompts {
		if prompt.HasTokens {
			all[i] = tokens(prompt.Tokens)
			continue
		}
		text := prompt.Text
		if m.options.Engine == Dynamo {
			text, special = dynamoText(text), false
		}
		ids, err := m.Encode(text, special)
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
