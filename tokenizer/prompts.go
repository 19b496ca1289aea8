package tokenizer

import (
	"context"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// Prompt is what the engine will see of one prompt.
type Prompt struct {
	// IDs are the prompt's token ids. The first Certain of them are the engine's. Where there are more, the prompt
	// holds media: the engine has other ids from the first image, video or sound on, or from a few tokens before, and
	// more of them; the rest of IDs has one to a few ids for each, beside those of the text between, and serves to
	// estimate a load.
	IDs     []kvblock.Token
	Certain int
	// Text is the text behind the ids; only Prompts sets it. It is empty where the request brought ids, or where no
	// text is in between.
	Text string
}

// Certain returns prompts of ids that are all certain; nil for nil.
func Certain(ids [][]kvblock.Token) []Prompt {
	if ids == nil {
		return nil
	}
	prompts := make([]Prompt, len(ids))
	for i := range ids {
		prompts[i] = Prompt{IDs: ids[i], Certain: len(ids[i])}
	}
	return prompts
}

// Prompts is Tokenize with the texts beside the ids. It does the work twice and is not for the path of a request.
func (m *Model) Prompts(ctx context.Context, request *apibody.Request) ([]Prompt, error) {
	prompts, err := m.Tokenize(ctx, request)
	if err != nil {
		return nil, err
	}
	own, err := m.given(request)
	if err != nil {
		return nil, err
	}
	for i := range prompts {
		switch {
		case own != nil:
		case request.API == apibody.Completions:
			prompts[i].Text = request.Prompts[i].Text
		default:
			chat, err := m.asChat(request)
			if err != nil {
				return nil, err
			}
			if prompts[i].Text, err = m.renderChat(ctx, chat); err != nil {
				return nil, err
			}
		}
	}
	return prompts, nil
}
