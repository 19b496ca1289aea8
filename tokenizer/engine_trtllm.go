package tokenizer

import "kvepp/internal/apibody"

// checkTRTLLM refuses the fields of which TensorRT-LLM makes something that is not known here.
func checkTRTLLM(request *apibody.Request) error {
	for _, field := range []string{"truncate_prompt_tokens", "suffix", "prompt_embeds", "prompt_token_ids"} {
		if v, _ := request.Body.Get(field); v != nil {
			return errNotReproduced(field)
		}
	}
	return nil
}

// renderTRTLLM returns the text that TensorRT-LLM makes of a chat.
func (m *Model) renderTRTLLM(*apibody.Request) (string, error) {
	return "", errNotReproduced("a chat on TensorRT-LLM")
}
