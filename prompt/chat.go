package prompt

import (
	"context"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// Tokenize returns the prompts of a request as the engine will see them. A chat is one prompt. The prompts belong to
// the caller. All ids are certain except those of chats with images, video or sound: see Prompt.
//
// If the request brings ids in the fields where its engine looks for them, Tokenize returns these. Otherwise it renders
// a chat like the engine and encodes it without special tokens, which the template writes itself. It encodes a
// completion with special tokens. The field add_special_tokens overrides both, except on SGLang, which does not know
// it. Dynamo's frontend never adds special tokens, and drops NUL bytes. If ctx ends, Tokenize returns its error soon.
//
// Every error means that the ids are not known: ErrMedia, ErrMemory, ErrNoChatTemplate, ErrInvalidUTF8,
// *jinja.RaiseError and other template errors, jinja.ErrLimit, errors that say what the engine refuses,
// and those of IsUnknown.
func (m *Model) Tokenize(ctx context.Context, request *body.Request) ([]Prompt, error) {
	switch given, err := m.given(request); {
	case err != nil:
		return nil, err
	case given != nil && request.HasMedia:
		return nil, ErrMedia // the engine inserts the media's own ids
	case given != nil:
		return given, nil
	}
	if request.API != body.Completions {
		chat, err := m.reserveConversion(request)
		if err != nil {
			return nil, err
		}
		if request.API != body.ChatCompletions {
			if chat, err = m.asChat(chat); err != nil {
				return nil, err
			}
			if chat, err = m.reserveConversion(chat); err != nil {
				return nil, err
			}
		}
		prompt, err := m.tokenizeChat(ctx, chat)
		if err != nil {
			return nil, err
		}
		return []Prompt{prompt}, nil
	}
	if request.HasMedia {
		return nil, ErrMedia
	}
	special := request.AddSpecialTokens == nil || *request.AddSpecialTokens || m.options.Engine == SGLang
	all := make([]Prompt, len(request.Prompts))
	budget := budgetFor(ctx, request, 0)
	for i, prompt := range request.Prompts {
		if prompt.HasTokens {
			all[i].IDs, all[i].Certain = tokens(prompt.Tokens), len(prompt.Tokens)
			continue
		}
		text := prompt.Text
		if m.options.Engine == Dynamo {
			text, special = dynamoText(text), false
		}
		ids, err := m.encoder.Encode(&budget, text, special)
		if err != nil {
			return nil, err
		}
		all[i].IDs, all[i].Certain = ids, len(ids)
	}
	return all, nil
}

// tokens copies ids.
func tokens(ids []uint32) []kvblock.Token {
	out := make([]kvblock.Token, len(ids))
	for i, id := range ids {
		out[i] = kvblock.Token(id)
	}
	return out
}
