package tokenizer

import (
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// What TensorRT-LLM's OpenAI server (trtllm-serve) makes of a chat before it renders it, as far as its published source says
// the same through its versions: chats of plain text. Tools, tool calls and reasoning have changed from version to version,
// and nothing here was held against a running one, so they are left to the engine.
// Source: TensorRT-LLM, serve/openai_server, serve/chat_utils, inputs/utils.

// checkTRTLLM refuses the fields of which TensorRT-LLM makes something that is not known here.
func checkTRTLLM(request *apibody.Request) error {
	fields := []string{"truncate_prompt_tokens", "suffix", "prompt_embeds", "prompt_token_ids"}
	if request.API == apibody.ChatCompletions {
		fields = append(fields, "tools", "reasoning_effort", "continue_final_message")
	}
	for _, field := range fields {
		if v, _ := request.Body.Get(field); v != nil && v != false {
			return errNotReproduced(field + " on TensorRT-LLM")
		}
	}
	return nil
}

// renderTRTLLM returns the text that TensorRT-LLM makes of a chat.
func (m *Model) renderTRTLLM(request *apibody.Request) (string, error) {
	if m.multimodal || m.modelType == "gpt_oss" || strings.HasPrefix(m.modelType, "deepseek_v") || strings.HasPrefix(m.modelType, "kimi") {
		return "", errNotReproduced("a chat of " + m.modelType + " on TensorRT-LLM")
	}
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return "", err
	}
	if m.defaultKwargs.Len() > 0 {
		return "", errNotReproduced("default chat template kwargs on TensorRT-LLM")
	}
	c := &chat{kwargs: chattemplate.NewDict(), documents: request.Documents, addGenerationPrompt: true}
	for k, v := range given.All() {
		name, _ := k.(string)
		if slices.Contains(transformersParameters, name) || slices.Contains([]string{"messages", "conversation", "tools", "documents", "add_generation_prompt"}, name) {
			return "", errNotReproduced("chat_template_kwargs." + name + " on TensorRT-LLM")
		}
		c.kwargs.Set(name, v)
	}
	if request.AddGenerationPrompt != nil {
		c.addGenerationPrompt = *request.AddGenerationPrompt
	}
	for _, item := range request.Messages.Items {
		message, _ := item.(*chattemplate.Dict)
		role, _ := get[string](message, "role")
		if !slices.Contains([]string{"system", "user", "assistant"}, role) {
			return "", errNotReproduced("a message of the role " + role + " on TensorRT-LLM")
		}
		for _, field := range []string{"tool_calls", "reasoning", "reasoning_content", "tools"} {
			if v, _ := message.Get(field); v != nil {
				return "", errNotReproduced("a message's " + field + " on TensorRT-LLM")
			}
		}
		content, _ := message.Get("content")
		text, ok := content.(string)
		if list, isList := content.(*chattemplate.List); isList {
			kept := chattemplate.NewList(slices.DeleteFunc(slices.Clone(list.Items), isEmptyText)...)
			text, ok = joinTexts(kept, "\n")
		}
		if !ok && content != nil {
			return "", errNotReproduced("content that is not text on TensorRT-LLM")
		}
		c.messages = append(c.messages, dict("role", role, "content", text, "media", chattemplate.NewList()))
	}
	own, _ := request.Body.Get("chat_template")
	t, err := m.requestTemplate(own, false)
	if err != nil {
		return "", err
	}
	return m.apply(t, c)
}

// isEmptyText reports whether a content part is text without text.
func isEmptyText(item any) bool {
	part, _ := item.(*chattemplate.Dict)
	text, _ := get[string](part, "text")
	return isText(part) && text == ""
}
