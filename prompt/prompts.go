package prompt

import (
	"context"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// Prompt is one prompt as the engine will see it.
type Prompt struct {
	// IDs are the prompt's token ids. The first Certain of them equal the engine's. Certain is less than len(IDs) only
	// if the prompt holds media. From the first image, video or sound on, or from a few tokens before it, the engine
	// then has other and more ids. The rest of IDs has one to a few ids for each media, and those of the text. It only
	// serves to estimate the load.
	IDs     []kvblock.Token
	Certain int
	// Text is the text of the ids. Only Prompts sets it. It is empty if the request brought ids, and for harmony.
	Text string
}

// Certain returns prompts whose ids are all certain; nil for nil.
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

// Prompts is Tokenize that also sets the texts. It renders every chat twice: do not use it on a request's path.
func (m *Model) Prompts(ctx context.Context, request *body.Request) ([]Prompt, error) {
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
		case request.API == body.Completions:
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
