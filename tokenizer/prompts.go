package tokenizer

import (
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// Prompt is what the engine will see of one prompt, for people who compare.
type Prompt struct {
	Text    string // the text behind the ids; empty where the request brought ids, or where no text is in between
	IDs     []kvblock.Token
	Certain int // how many leading ids are certain to be the engine's
}

// Prompts is Tokenize with the texts beside the ids. It does the work twice and is not for the path of a request.
func (m *Model) Prompts(request *apibody.Request) ([]Prompt, error) {
	ids, err := m.Tokenize(request)
	if err != nil {
		return nil, err
	}
	own, err := m.given(request)
	if err != nil {
		return nil, err
	}
	prompts := make([]Prompt, len(ids))
	for i := range ids {
		prompts[i] = Prompt{IDs: ids[i], Certain: len(ids[i])}
		switch {
		case own != nil:
		case request.API == apibody.Completions:
			prompts[i].Text = request.Prompts[i].Text
		default:
			if prompts[i].Text, err = m.renderChat(request); err != nil {
				return nil, err
			}
		}
	}
	return prompts, nil
}
