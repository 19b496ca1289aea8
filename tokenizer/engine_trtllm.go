package tokenizer

import (
	"context"
	"errors"
	"slices"
	"strings"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// What TensorRT-LLM's OpenAI server (trtllm-serve) makes of a chat before it renders it: pydantic's reading of the
// body, then its own parsing. It was read, not run: its package has no part that can be installed without a GPU's
// libraries. Where its versions differ, the ids are left to it. Source: TensorRT-LLM's repository at the time of
// 1.3.0rc, serve/openai_server (openai_chat, openai_completion), serve/openai_protocol, serve/chat_utils, inputs/utils
// (apply_chat_template) and inputs/registry (DefaultInputProcessor).

// trtllmOwnEncoding begin the model types whose chats TensorRT-LLM may encode without a Jinja template or with
// variables of its own, or whose tokenizer it replaces. Source: TensorRT-LLM, tokenizer, serve/extensions and
// serve/chat_tokenization.
var trtllmOwnEncoding = []string{"gpt_oss", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "kimi"}

// givenTRTLLM returns the ids that a generating worker takes over from the one that prefilled, nil if the request
// brings none. It returns an error for fields whose effect in TensorRT-LLM is not known here.
func givenTRTLLM(request *apibody.Request) ([][]kvblock.Token, error) {
	for _, field := range []string{"truncate_prompt_tokens", "suffix", "prompt_embeds", "prompt_token_ids_b64"} {
		if v, _ := request.Body.Get(field); v != nil {
			return nil, errNotReproduced(field + " on TensorRT-LLM")
		}
	}
	v, _ := request.Body.Get("prompt_token_ids")
	if v == nil || request.API != apibody.ChatCompletions {
		return nil, nil
	}
	list, _ := v.(*chattemplate.TokenIDs)
	ids, ok := tokenList(list)
	if !ok || len(ids) == 0 {
		return nil, errRefused("prompt_token_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// renderTRTLLM returns the text that TensorRT-LLM makes of a chat.
func (m *Model) renderTRTLLM(ctx context.Context, request *apibody.Request) (string, error) {
	if m.multimodal ||
		slices.ContainsFunc(trtllmOwnEncoding, func(own string) bool { return strings.HasPrefix(m.modelType, own) }) {
		return "", errNotReproduced("a chat of " + m.modelType + " on TensorRT-LLM")
	}
	if m.defaultKwargs.Len() > 0 {
		return "", errNotReproduced("default chat template kwargs on TensorRT-LLM")
	}
	if choice, _ := request.Body.Get("tool_choice"); choice != nil {
		// Later versions begin the answer with the call of the function that is named.
		if _, isName := choice.(string); !isName {
			return "", errNotReproduced("tool_choice with a function's name on TensorRT-LLM")
		}
	}
	if v, _ := request.Body.Get("continue_final_message"); v != nil {
		return "", errRefused("continue_final_message is not a field of TensorRT-LLM's")
	}
	c := &chat{addGenerationPrompt: true, limits: limits(request)}
	if request.AddGenerationPrompt != nil {
		c.addGenerationPrompt = *request.AddGenerationPrompt
	}
	var err error
	if err = c.kwargsTRTLLM(request); err != nil {
		return "", err
	}
	if c.tools, err = trtllmTools(request); err != nil {
		return "", err
	}
	if c.documents, err = trtllmDocuments(request); err != nil {
		return "", err
	}
	// The messages are validated as they are read. If one has a field that OpenAI's types do not have, all are read
	// again from the JSON itself.
	typed := true
	for _, item := range request.Messages.Items {
		message, _ := item.(*chattemplate.Dict)
		typed = typed && trtllmReadsTyped(message)
	}
	for _, item := range request.Messages.Items {
		given, _ := item.(*chattemplate.Dict)
		message, err := trtllmMessage(given, typed)
		if err != nil {
			return "", err
		}
		c.messages = append(c.messages, message)
	}
	own, _ := request.Body.Get("chat_template")
	t, err := m.requestTemplate(own, c.tools != nil)
	if err != nil {
		return "", err
	}
	return m.apply(ctx, t, c)
}

// kwargsTRTLLM reads chat_template_kwargs, which TensorRT-LLM hands to Transformers as they are.
func (c *chat) kwargsTRTLLM(request *apibody.Request) error {
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return err
	}
	c.kwargs = chattemplate.NewDict()
	for k, v := range given.All() {
		name, _ := k.(string)
		switch name {
		case "continue_final_message":
			var ok bool
			if c.continueFinalMessage, ok = v.(bool); !ok && v != nil {
				return errNotReproduced(
					"chat_template_kwargs.continue_final_message that is no boolean on TensorRT-LLM",
				)
			}
		case "messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize":
			return errRefused("chat_template_kwargs.%s is said by TensorRT-LLM itself", name)
		case "return_dict", "return_assistant_tokens_mask":
			return errNotReproduced("chat_template_kwargs." + name + " on TensorRT-LLM")
		default:
			if !slices.Contains(transformersParameters, name) {
				c.kwargs.Set(name, v)
			}
		}
	}
	return nil
}

// trtllmTools returns the tools as pydantic's model_dump prints them: the fields of the model alone, with their
// defaults; nil without tools. tool_choice does not change them.
func trtllmTools(request *apibody.Request) (*chattemplate.List, error) {
	given, _ := request.Body.Get("tools")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*chattemplate.List)
	if !ok {
		return nil, errRefused("tools is not a list")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](tool, "function")
		name, named := get[string](function, "name")
		if kind, given := tool.Get("type"); !ok || !named || given && kind != "function" ||
			!onlyFields(tool, "type", "function") ||
			!onlyFields(function, "name", "description", "parameters", "strict") {
			return nil, errRefused("tools[%d] is not a function with a name, a description, parameters and strict", i)
		}
		description, _ := function.Get("description")
		parameters, _ := function.Get("parameters")
		strict, _ := function.Get("strict")
		_, isText := description.(string)
		_, isObject := parameters.(*chattemplate.Dict)
		if description != nil && !isText || parameters != nil && !isObject {
			return nil, errRefused("tools[%d] has a description or parameters of another type", i)
		}
		if _, isBool := strict.(bool); strict != nil && !isBool {
			return nil, errNotReproduced("a tool's strict that is no boolean")
		}
		tools[i] = dict("type", "function", "function",
			dict("name", name, "description", description, "parameters", parameters, "strict", strict))
	}
	return chattemplate.NewList(tools...), nil
}

// onlyFields reports whether an object has no other fields than these.
func onlyFields(d *chattemplate.Dict, names ...string) bool {
	for k := range d.All() {
		if name, _ := k.(string); !slices.Contains(names, name) {
			return false
		}
	}
	return true
}

// trtllmDocuments returns the documents, which are objects of strings; nil without.
func trtllmDocuments(request *apibody.Request) (*chattemplate.List, error) {
	given, _ := request.Body.Get("documents")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*chattemplate.List)
	if !ok {
		return nil, errRefused("documents is not a list")
	}
	for i, item := range list.Items {
		document, ok := item.(*chattemplate.Dict)
		for _, v := range document.All() {
			_, isText := v.(string)
			ok = ok && isText
		}
		if !ok {
			return nil, errRefused("documents[%d] is not an object of strings", i)
		}
	}
	return list, nil
}

// trtllmAssistant are the fields of OpenAI's assistant message.
var trtllmAssistant = []string{"role", "content", "name", "refusal", "audio", "function_call", "tool_calls"}

// trtllmTyped reports whether pydantic takes a message with tool calls for OpenAI's assistant message. Any other it
// takes for a message of its role with any fields.
func trtllmTyped(message *chattemplate.Dict) bool {
	role, _ := message.Get("role")
	calls, _ := get[*chattemplate.List](message, "tool_calls")
	if role != "assistant" || calls == nil || !onlyFields(message, trtllmAssistant...) {
		return false
	}
	for _, name := range []string{"audio", "function_call"} {
		if v, _ := message.Get(name); v != nil {
			return false
		}
	}
	refusal, _ := message.Get("refusal")
	_, isText := refusal.(string)
	return refusal == nil || isText
}

// trtllmReadsTyped reports whether what pydantic validates of a message only as it is read is valid: an assistant's
// tool calls and content parts, and content parts that are no objects, which only OpenAI's types would take.
func trtllmReadsTyped(message *chattemplate.Dict) bool {
	parts, _ := get[*chattemplate.List](message, "content")
	typed := trtllmTyped(message)
	if parts != nil {
		for _, item := range parts.Items {
			part, _ := item.(*chattemplate.Dict)
			if kind, _ := get[string](part, "type"); kind == "" ||
				typed && !(kind == "text" && onlyFields(part, "type", "text")) {
				return false
			}
		}
	}
	if !typed {
		return true
	}
	calls, _ := get[*chattemplate.List](message, "tool_calls")
	for _, item := range calls.Items {
		call, _ := item.(*chattemplate.Dict)
		function, _ := get[*chattemplate.Dict](call, "function")
		_, identified := get[string](call, "id")
		_, named := get[string](function, "name")
		_, argued := get[string](function, "arguments")
		if kind, _ := call.Get("type"); kind != "function" || !identified || !named || !argued ||
			!onlyFields(call, "id", "type", "function") || !onlyFields(function, "name", "arguments") {
			return false
		}
	}
	return true
}

// trtllmMessage returns one message: its role, its texts joined by newlines and the media that it has not, then what
// its role allows besides. typed says that the messages come from pydantic, not from the JSON.
func trtllmMessage(given *chattemplate.Dict, typed bool) (*chattemplate.Dict, error) {
	role, ok := get[string](given, "role")
	if !ok {
		return nil, errRefused("a message without a role")
	}
	text, err := trtllmText(given)
	if err != nil {
		return nil, err
	}
	message := dict("role", role, "content", text, "media", chattemplate.NewList())
	switch role {
	case "assistant":
		reasoning, _ := given.Get("reasoning")
		if reasoning == nil {
			reasoning, _ = given.Get("reasoning_content")
		}
		if reasoning != nil {
			message.Set("reasoning_content", reasoning)
		}
		if calls, _ := given.Get("tool_calls"); calls != nil {
			list, err := trtllmToolCalls(calls, typed && trtllmTyped(given))
			if err != nil {
				return nil, err
			}
			message.Set("tool_calls", list)
		}
	case "tool":
		if id, has := given.Get("tool_call_id"); has {
			message.Set("tool_call_id", id)
		}
	case "system":
		if tools, _ := given.Get("tools"); tools != nil {
			return nil, errNotReproduced("a system message's tools on TensorRT-LLM")
		}
	}
	return message, nil
}

// trtllmText returns a message's texts, without the empty ones, joined by newlines.
func trtllmText(message *chattemplate.Dict) (string, error) {
	content, _ := message.Get("content")
	switch content := content.(type) {
	case nil:
		return "", nil
	case string:
		return content, nil
	case *chattemplate.List:
		var texts []string
		for _, item := range content.Items {
			text, isText := item.(string)
			if part, isPart := item.(*chattemplate.Dict); isPart {
				if kind, _ := part.Get("type"); kind != "text" {
					return "", ErrMedia
				}
				value, _ := part.Get("text")
				if text, isText = value.(string); !isText && value != nil {
					return "", errNotReproduced("a text that is no string on TensorRT-LLM")
				}
			} else if !isText {
				return "", errRefused("a content part is neither an object nor a string")
			}
			if text != "" {
				texts = append(texts, text)
			}
		}
		return strings.Join(texts, "\n"), nil
	case *chattemplate.Dict:
		return "", errNotReproduced("content that is an object on TensorRT-LLM") // it takes the keys for texts
	}
	return "", errRefused("content is neither a string nor a list of parts")
}

// trtllmToolCalls returns tool calls with arguments as objects, their fields in the order of OpenAI's types, if typed,
// else in that of TensorRT-LLM's own.
func trtllmToolCalls(value any, typed bool) (*chattemplate.List, error) {
	given, ok := value.(*chattemplate.List)
	if !ok {
		return nil, errRefused("tool_calls is not a list")
	}
	calls := make([]any, len(given.Items))
	for i, item := range given.Items {
		call, _ := item.(*chattemplate.Dict)
		function, ok := get[*chattemplate.Dict](call, "function")
		if !ok {
			return nil, errRefused("tool_calls[%d] has no function", i)
		}
		for _, field := range []struct {
			of   *chattemplate.Dict
			name string
		}{{call, "id"}, {call, "type"}, {function, "name"}} {
			v, _ := field.of.Get(field.name)
			if _, isText := v.(string); v != nil && !isText {
				return nil, errRefused("tool_calls[%d] has a %s that is no string", i, field.name)
			}
		}
		arguments, _ := function.Get("arguments")
		object, err := trtllmArguments(arguments)
		if err != nil {
			return nil, err
		}
		if typed {
			call, function = inOrder(call, "id", "function", "type"), inOrder(function, "arguments", "name")
		} else {
			call, function = inOrder(call, "id", "type", "function"), inOrder(function, "name", "arguments")
		}
		function.Set("arguments", object)
		call.Set("function", function)
		calls[i] = call
	}
	return chattemplate.NewList(calls...), nil
}

// trtllmArguments returns a call's arguments as an object.
func trtllmArguments(given any) (*chattemplate.Dict, error) {
	switch given := given.(type) {
	case nil:
		return chattemplate.NewDict(), nil
	case *chattemplate.Dict:
		return given, nil
	case string:
		value, err := readArguments(given)
		if errors.Is(err, ErrMemory) {
			return nil, err
		}
		if err != nil {
			// An error in some versions; in others the text stays as it is.
			return nil, errNotReproduced("tool call arguments that are no JSON on TensorRT-LLM")
		}
		if object, ok := value.(*chattemplate.Dict); ok {
			return object, nil
		}
	}
	return nil, errRefused("a tool call's arguments are not an object")
}
