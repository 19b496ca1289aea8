package prompt

import (
	"encoding/binary"
	"fmt"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// estimatedBytes is how much text counts as a token.
const estimatedBytes = 4

// Estimate returns prompts whose tokens are pieces of text of 4 bytes each, as the approximate prefix cache
// of llm-d's picker has them; nil if the prompt is not text alone. A later turn of a chat begins like the earlier ones.
func Estimate(payload *body.Request) []Prompt {
	if payload.HasMedia || payload.TooLarge != nil {
		return nil
	}
	var texts [][]byte
	for _, p := range payload.Prompts {
		texts = append(texts, []byte(p.Text))
	}
	if payload.Messages.Len() > 0 {
		text := appendTexts(nil, payload.Tools)
		texts = append(texts, appendTexts(text, payload.Messages))
	}
	var prompts []Prompt
	for _, text := range texts {
		ids := make([]kvblock.Token, 0, len(text)/estimatedBytes)
		for ; len(text) >= estimatedBytes; text = text[estimatedBytes:] {
			ids = append(ids, kvblock.Token(binary.LittleEndian.Uint32(text)))
		}
		prompts = append(prompts, Prompt{IDs: ids, Certain: len(ids)})
	}
	return prompts
}

// appendTexts appends the texts in a JSON value, in their order.
func appendTexts(to []byte, value any) []byte {
	switch v := value.(type) {
	case string:
		return append(append(to, v...), 0)
	case *values.List:
		if v != nil {
			for _, item := range v.Items {
				to = appendTexts(to, item)
			}
		}
		return append(to, 1)
	case *values.Dict:
		for key, item := range v.All() {
			to = appendTexts(appendTexts(to, key), item)
		}
		return append(to, 1)
	}
	return append(fmt.Append(to, value), 0)
}
