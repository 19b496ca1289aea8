package tokenizer

import (
	"context"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// Tokenize returns the prompts of a request as the engine will see them; a chat is one. They belong to the caller.
//
// A request that brings ids where its engine looks for them gets those. Otherwise a chat is rendered as the engine does
// and encoded without special tokens, which the template writes itself, and a completion is encoded with them;
// add_special_tokens overrides both. SGLang does not know that field; Dynamo's frontend never adds them, and drops NUL
// bytes. The end of ctx ends all of it soon, with ctx's error. All ids are certain but for chats with images, video or
// sound: see Prompt.
//
// Errors, all meaning that the ids are not known here: ErrMedia, ErrMemory, ErrNoChatTemplate, ErrInvalidUTF8,
// *chattemplate.RaiseError and other template errors, chattemplate.ErrLimit, and errors that name what the engine
// refuses or alone can tokenize.
func (m *Model) Tokenize(ctx context.Context, request *apibody.Request) ([]Prompt, error) {
	switch given, err := m.given(request); {
	case err != nil:
		return nil, err
	case given != nil && request.HasMedia:
		return nil, ErrMedia // the engine puts the media's own ids between
	case given != nil:
		return given, nil
	}
	if request.API != apibody.Completions {
		chat, err := m.reserveConversion(request)
		if err != nil {
			return nil, err
		}
		if request.API != apibody.ChatCompletions {
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

func tokens(ids []uint32) []kvblock.Token {
	out := make([]kvblock.Token, len(ids))
	for i, id := range ids {
		out[i] = kvblock.Token(id)
	}
	return out
}
