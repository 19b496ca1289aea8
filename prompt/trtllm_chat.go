package prompt

import (
	"context"
	"slices"
	"strings"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// How TensorRT-LLM's OpenAI server (trtllm-serve) prepares and renders a chat: pydantic reads the body, then the server
// parses the messages. These rules come from its source and were not compared with a running server, because no part of
// its package installs without a GPU's libraries. Where its versions differ, kvepp returns an error. Source:
// TensorRT-LLM's repository at the time of 1.3.0rc, serve/openai_server (openai_chat, openai_completion),
// serve/openai_protocol, serve/chat_utils, inputs/utils (apply_chat_template) and inputs/registry
// (DefaultInputProcessor).

// trtllmOwnEncoding are prefixes of model types. TensorRT-LLM may encode chats of these without a Jinja template or
// with variables of its own, or it replaces their tokenizer. Source: TensorRT-LLM, tokenizer, serve/extensions and
// serve/chat_tokenization. Its source at that time does not have Inkling and GLM-5.3-Flash.
var trtllmOwnEncoding = []string{"gpt_oss", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5", "kimi", "inkling"}

// givenTRTLLM returns the ids that a generating worker takes over from the one that prefilled; nil if the request
// brings none. A field whose effect in TensorRT-LLM is not known here is an error.
func givenTRTLLM(request *body.Request) ([][]kvblock.Token, error) {
	for _, name := range []string{"truncate_prompt_tokens", "suffix", "prompt_embeds", "prompt_token_ids_b64"} {
		if field(request.Body, name) != nil {
			return nil, errNotReproduced(name + " on TensorRT-LLM")
		}
	}
	v := field(request.Body, "prompt_token_ids")
	if v == nil || request.API != body.ChatCompletions {
		return nil, nil
	}
	list, _ := v.(*values.TokenIDs)
	ids, ok := tokenList(list)
	if !ok || len(ids) == 0 {
		return nil, errRefused("prompt_token_ids is not a list of token ids")
	}
	return [][]kvblock.Token{ids}, nil
}

// renderTRTLLM returns the text that TensorRT-LLM makes of a chat.
func (m *Model) renderTRTLLM(ctx context.Context, request *body.Request) (string, error) {
	if m.multimodal ||
		slices.ContainsFunc(trtllmOwnEncoding, func(own string) bool { return strings.HasPrefix(m.modelType, own) }) {
		return "", errNotReproduced("a chat of " + m.modelType + " on TensorRT-LLM")
	}
	if m.defaultKwargs.Len() > 0 {
		return "", errNotReproduced("default chat template kwargs on TensorRT-LLM")
	}
	if choice := field(request.Body, "tool_choice"); choice != nil {
		// Later versions begin the response with a call of the named function.
		if _, isName := choice.(string); !isName {
			return "", errNotReproduced("tool_choice with a function's name on TensorRT-LLM")
		}
	}
	if field(request.Body, "continue_final_message") != nil {
		return "", errRefused("continue_final_message is not a field of TensorRT-LLM's")
	}
	c := newChat(request)
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
	// Pydantic validates the messages while the server reads them. If one message has a field that OpenAI's types do
	// not have, the server reads all of them again from the JSON.
	typed := true
	for _, item := range request.Messages.Items {
		message, _ := item.(*values.Dict)
		typed = typed && trtllmReadsTyped(message)
	}
	for _, item := range request.Messages.Items {
		given, _ := item.(*values.Dict)
		message, err := trtllmMessage(given, typed)
		if err != nil {
			return "", err
		}
		c.messages = append(c.messages, message)
	}
	t, err := m.requestTemplate(field(request.Body, "chat_template"), c.tools != nil)
	if err != nil {
		return "", err
	}
	return m.apply(ctx, t, c)
}

// kwargsTRTLLM reads chat_template_kwargs, which TensorRT-LLM passes to Transformers unchanged.
func (c *chat) kwargsTRTLLM(request *body.Request) error {
	given, err := objectField(request.Body, "chat_template_kwargs")
	if err != nil {
		return err
	}
	c.kwargs = values.NewDict()
	for k, v := range given.All() {
		name, _ := k.(string)
		switch name {
		case "continue_final_message":
			var ok bool
			if c.continueFinalMessage, ok = v.(bool); !ok && v != nil {
				return errNotReproduced(
					"chat_template_kwargs.continue_final_message that is not a boolean on TensorRT-LLM")
			}
		case "messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize":
			return errRefused("chat_template_kwargs.%s, which TensorRT-LLM sets itself", name)
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

// trtllmTools returns the tools as pydantic's model_dump prints them: only known fields, with their defaults; nil
// without tools. tool_choice does not change them.
func trtllmTools(request *body.Request) (*values.List, error) {
	given := field(request.Body, "tools")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*values.List)
	if !ok {
		return nil, errRefused("tools is not a list")
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		function, ok := get[*values.Dict](tool, "function")
		name, named := get[string](function, "name")
		if kind, given := tool.Get("type"); !ok || !named || given && kind != "function" ||
			!onlyFields(tool, "type", "function") ||
			!onlyFields(function, "name", "description", "parameters", "strict") {
			return nil, errRefused("tools[%d] is not a function with a name, a description, parameters and strict", i)
		}
		description, parameters := field(function, "description"), field(function, "parameters")
		strict := field(function, "strict")
		_, isText := description.(string)
		_, isObject := parameters.(*values.Dict)
		if description != nil && !isText || parameters != nil && !isObject {
			return nil, errRefused("tools[%d] has a description or parameters of another type", i)
		}
		if _, isBool := strict.(bool); strict != nil && !isBool {
			return nil, errNotReproduced("a tool's strict that is not a boolean")
		}
		tools[i] = dict("type", "function", "function",
			dict("name", name, "description", description, "parameters", parameters, "strict", strict))
	}
	return values.NewList(tools...), nil
}

// trtllmDocuments returns the documents, which are objects of strings; nil without documents.
func trtllmDocuments(request *body.Request) (*values.List, error) {
	given := field(request.Body, "documents")
	if given == nil {
		return nil, nil
	}
	list, ok := given.(*values.List)
	if !ok {
		return nil, errRefused("documents is not a list")
	}
	for i, item := range list.Items {
		document, ok := item.(*values.Dict)
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

// assistantFields are the fields of OpenAI's assistant message.
var assistantFields = []string{"role", "content", "name", "refusal", "audio", "function_call", "tool_calls"}

// trtllmTyped reports whether pydantic reads a message as OpenAI's assistant message with tool calls. It reads every
// other message as one of any fields.
func trtllmTyped(message *values.Dict) bool {
	calls, _ := get[*values.List](message, "tool_calls")
	if role(message) != "assistant" || calls == nil || !onlyFields(message, assistantFields...) ||
		firstField(message, "audio", "function_call") != nil {
		return false
	}
	refusal := field(message, "refusal")
	_, isText := refusal.(string)
	return refusal == nil || isText
}

// trtllmReadsTyped reports whether the lists in a message are valid for pydantic, which validates them only while the
// server reads them: an assistant's tool calls, and the content parts of any message.
func trtllmReadsTyped(message *values.Dict) bool {
	parts, _ := get[*values.List](message, "content")
	typed := trtllmTyped(message)
	if parts != nil {
		for _, item := range parts.Items {
			part, _ := item.(*values.Dict)
			if kind, _ := get[string](part, "type"); kind == "" ||
				typed && !(kind == "text" && onlyFields(part, "type", "text")) {
				return false
			}
		}
	}
	if !typed {
		return true
	}
	calls, _ := get[*values.List](message, "tool_calls")
	for _, item := range calls.Items {
		call, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](call, "function")
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

// trtllmMessage returns one message: its role, its texts joined by newlines, an empty list of media, and then the
// further fields of its role. typed says that the messages come from pydantic, not from the JSON.
func trtllmMessage(given *values.Dict, typed bool) (*values.Dict, error) {
	role, ok := get[string](given, "role")
	if !ok {
		return nil, errRefused("a message without a role")
	}
	text, err := trtllmText(given)
	if err != nil {
		return nil, err
	}
	message := dict("role", role, "content", text, "media", values.NewList())
	switch role {
	case "assistant":
		if reasoning := firstField(given, "reasoning", "reasoning_content"); reasoning != nil {
			message.Set("reasoning_content", reasoning)
		}
		if calls := field(given, "tool_calls"); calls != nil {
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
		if field(given, "tools") != nil {
			return nil, errNotReproduced("a system message's tools on TensorRT-LLM")
		}
	}
	return message, nil
}

// trtllmText returns a message's texts that are not empty, joined by newlines.
func trtllmText(message *values.Dict) (string, error) {
	switch content := field(message, "content").(type) {
	case nil:
		return "", nil
	case string:
		return content, nil
	case *values.List:
		var texts []string
		for _, item := range content.Items {
			text, isString := item.(string)
			if part, isPart := item.(*values.Dict); isPart {
				if !isText(part) {
					return "", ErrMedia
				}
				value := field(part, "text")
				if text, isString = value.(string); !isString && value != nil {
					return "", errNotReproduced("a text that is not a string on TensorRT-LLM")
				}
			} else if !isString {
				return "", errRefused("a content part is neither an object nor a string")
			}
			if text != "" {
				texts = append(texts, text)
			}
		}
		return strings.Join(texts, "\n"), nil
	case *values.Dict:
		return "", errNotReproduced("content that is an object on TensorRT-LLM") // the server takes its keys for texts
	}
	return "", errRefused("content is neither a string nor a list of parts")
}

// trtllmCallOrder is the order of the fields of TensorRT-LLM's own type of tool calls.
var trtllmCallOrder = callOrder{call: []string{"id", "type", "function"}, function: []string{"name", "arguments"}}

// trtllmToolCalls returns tool calls with arguments as objects. If typed is set, their fields have the order of
// OpenAI's types.
func trtllmToolCalls(value any, typed bool) (*values.List, error) {
	order := trtllmCallOrder
	if typed {
		order = pydanticCallOrder
	}
	return convertToolCalls(value, func(i int, call, function *values.Dict) (*values.Dict, error) {
		for _, v := range []any{field(call, "id"), field(call, "type"), field(function, "name")} {
			if _, isString := v.(string); v != nil && !isString {
				return nil, errRefused("tool_calls[%d] has an id, a type or a name that is not a string", i)
			}
		}
		arguments, err := trtllmArguments(field(function, "arguments"))
		if err != nil {
			return nil, err
		}
		return orderedCall(call, function, arguments, order), nil
	})
}

// trtllmArguments returns a call's arguments as an object.
func trtllmArguments(given any) (*values.Dict, error) {
	switch given := given.(type) {
	case nil:
		return values.NewDict(), nil
	case *values.Dict:
		return given, nil
	case string:
		value, malformed, err := readArguments(given)
		if err != nil {
			return nil, err
		}
		if malformed != nil {
			// Some versions refuse them, and others leave the text as it is.
			return nil, errNotReproduced("tool call arguments that are not JSON on TensorRT-LLM")
		}
		if object, ok := value.(*values.Dict); ok {
			return object, nil
		}
	}
	return nil, errRefused("a tool call's arguments are not an object")
}
