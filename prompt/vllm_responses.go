package prompt

import (
	"fmt"
	"slices"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// How vLLM turns a request to OpenAI's /v1/responses into a chat. The prompt is encoded with special tokens. An item
// that could be of more than one of OpenAI's types is an error here, because only the engine knows which it chooses.
// Source: vLLM 0.33.0, entrypoints/openai/responses/utils and protocol.

// checkResponses returns an error for a request with fields whose effect in vLLM is not known here.
func checkResponses(request *body.Request) error {
	for _, name := range []string{"previous_response_id", "prompt", "kv_transfer_params", "previous_input_messages"} {
		if field(request.Body, name) != nil {
			return errNotReproduced(name)
		}
	}
	if truncation, given := request.Body.Get("truncation"); given && truncation != "disabled" {
		return errNotReproduced("truncation")
	}
	return nil
}

// inputItems returns the input of a request to Responses as items. An input that is a text is a user's message.
func inputItems(body *values.Dict) ([]any, error) {
	switch input := field(body, "input").(type) {
	case string:
		return []any{dict("role", "user", "content", input)}, nil
	case *values.List:
		return input.Items, nil
	}
	return nil, errRefused("input is neither a string nor a list of items")
}

// chatOfResponsesVLLM returns the chat that vLLM makes of a request to Responses.
func (m *Model) chatOfResponsesVLLM(request *body.Request) (*body.Request, error) {
	if err := checkResponses(request); err != nil {
		return nil, err
	}
	c := &responsesChat{textsOnly: m.mistralCommon}
	if instructions, _ := get[string](request.Body, "instructions"); instructions != "" {
		c.messages = append(c.messages, dict("role", "system", "content", instructions))
	}
	items, err := inputItems(request.Body)
	if err != nil {
		return nil, err
	}
	for i, item := range items {
		if err := c.add(item, i == len(items)-1); err != nil {
			return nil, fmt.Errorf("%w (input item %d)", err, i)
		}
	}
	if len(c.messages) == 0 {
		return nil, errNotReproduced("an empty input")
	}
	payload := dict("model", request.Model, "messages", values.NewList(c.messages...))
	copyFields(payload, request.Body, "chat_template_kwargs", "cache_salt", "tool_choice")
	reasoning, _ := get[*values.Dict](request.Body, "reasoning")
	if effort := field(reasoning, "effort"); effort != nil {
		payload.Set("reasoning_effort", effort)
	}
	tools, err := responsesTools(request.Body)
	if err != nil {
		return nil, err
	}
	if tools != nil {
		payload.Set("tools", tools)
	}
	chat := chatOf(request, payload)
	chat.API = body.Responses // see orderCalls
	special := true
	chat.AddSpecialTokens = &special
	return chat, nil
}

// orderCalls puts the name of each called function before its arguments. vLLM reorders them in the messages of a chat,
// but not in those that it makes of Responses.
func orderCalls(messages []any) {
	for _, item := range messages {
		message, _ := item.(*values.Dict)
		calls, _ := get[*values.List](message, "tool_calls")
		for i := range calls.Len() {
			call, _ := calls.Items[i].(*values.Dict)
			if function, ok := get[*values.Dict](call, "function"); ok {
				call.Set("function", inOrder(function, "name", "arguments"))
			}
		}
	}
}

// responsesTools returns the tools in the form of the chat API; nil without tools.
func responsesTools(body *values.Dict) (*values.List, error) {
	given, _ := body.Get("tools")
	list, ok := given.(*values.List)
	if given != nil && !ok {
		return nil, errRefused("tools is not a list")
	}
	if list.Len() == 0 {
		return nil, nil
	}
	tools := make([]any, len(list.Items))
	for i, item := range list.Items {
		tool, _ := item.(*values.Dict)
		function := values.NewDict()
		for key, value := range tool.All() {
			switch key {
			case "type":
				continue
			case "name", "description", "parameters", "strict":
			default:
				return nil, errNotReproduced("a tool that is more than a function")
			}
			name, _ := key.(string)
			function.Set(name, value)
		}
		if kind, _ := tool.Get("type"); kind != "function" {
			return nil, errNotReproduced("a tool that is not a function")
		}
		tools[i] = dict("type", "function", "function", function)
	}
	return values.NewList(tools...), nil
}

// responsesChat collects the chat's messages.
type responsesChat struct {
	messages []any
	// textsOnly says that the engine refuses messages of the user's and the system's that are lists of parts.
	textsOnly bool
}

// assistant returns the last message if it is the assistant's, else nil.
func (c *responsesChat) assistant() *values.Dict {
	if len(c.messages) == 0 {
		return nil
	}
	last, _ := c.messages[len(c.messages)-1].(*values.Dict)
	if role(last) != "assistant" {
		return nil
	}
	return last
}

// setAssistantField sets a field of an assistant's message: of the last message, if that is the assistant's and does
// not have the field yet, else of a new message.
func (c *responsesChat) setAssistantField(name string, value any) {
	if last := c.assistant(); last != nil && field(last, name) == nil {
		last.Set(name, value)
		return
	}
	c.messages = append(c.messages, dict("role", "assistant", name, value))
}

// add adds an input item. last says that it is the last one.
func (c *responsesChat) add(item any, last bool) error {
	given, ok := item.(*values.Dict)
	if !ok {
		return errRefused("an item that is not an object")
	}
	status, _ := given.Get("status")
	if last && (status == "in_progress" || status == "incomplete") {
		return errNotReproduced("an item to be continued")
	}
	if status != nil && status != "completed" && status != "in_progress" && status != "incomplete" {
		return errNotReproduced("an item of another status")
	}
	kind, _ := given.Get("type")
	switch kind {
	case "function_call":
		return c.call(given)
	case "function_call_output":
		id, isID := get[string](given, "call_id")
		output, isText := get[string](given, "output")
		if !isID || !isText {
			return errNotReproduced("a function's output that is not text")
		}
		c.messages = append(c.messages, dict("role", "tool", "tool_call_id", id, "content", output))
		return nil
	case "reasoning":
		return c.reasoning(given)
	case "message", nil:
		return c.message(given, kind != nil)
	}
	return errNotReproduced(fmt.Sprintf("an item of type %v", kind))
}

// responsesCall reads a function call item.
func responsesCall(item *values.Dict) (call harmonyToolCall, err error) {
	id, isID := get[string](item, "call_id")
	name, isName := get[string](item, "name")
	arguments, isText := get[string](item, "arguments")
	if namespace, _ := item.Get("namespace"); !isID || !isName || !isText || namespace != nil {
		return call, errNotReproduced("such a function call")
	}
	return harmonyToolCall{id, name, arguments}, nil
}

// call adds a function call to the last message, if that is the assistant's, else to a new one.
func (c *responsesChat) call(item *values.Dict) error {
	read, err := responsesCall(item)
	if err != nil {
		return err
	}
	call := functionCall(read.id, read.name, read.arguments)
	last := c.assistant()
	if calls, ok := get[*values.List](last, "tool_calls"); ok {
		last.Set("tool_calls", values.NewList(append(slices.Clip(calls.Items), call)...))
		return nil
	}
	c.setAssistantField("tool_calls", values.NewList(call))
	return nil
}

// responsesReasoning returns the texts of a reasoning item's content and of its summary.
func responsesReasoning(item *values.Dict) (content, summary []string, err error) {
	texts := func(name, kind string) ([]string, error) {
		value := field(item, name)
		list, ok := value.(*values.List)
		if !ok && (name == "summary" || value != nil) {
			return nil, errNotReproduced("such reasoning")
		}
		var texts []string
		for i := range list.Len() {
			part, _ := list.Items[i].(*values.Dict)
			text, ok := get[string](part, "text")
			if of, _ := part.Get("type"); !ok || of != kind {
				return nil, errNotReproduced("such reasoning")
			}
			texts = append(texts, text)
		}
		return texts, nil
	}
	if field(item, "encrypted_content") != nil {
		return nil, nil, errNotReproduced("encrypted reasoning")
	}
	if content, err = texts("content", "reasoning_text"); err != nil {
		return nil, nil, err
	}
	summary, err = texts("summary", "summary_text")
	return content, summary, err
}

// reasoning adds the first text of a reasoning item: of its content, else of its summary.
func (c *responsesChat) reasoning(item *values.Dict) error {
	content, summary, err := responsesReasoning(item)
	if err != nil {
		return err
	}
	for _, texts := range [][]string{content, summary} {
		if texts != nil {
			c.setAssistantField("reasoning", texts[0])
			return nil
		}
	}
	c.setAssistantField("reasoning", "")
	return nil
}

// message adds a message. typed says that the item names its type, "message".
func (c *responsesChat) message(item *values.Dict, typed bool) error {
	role, _ := get[string](item, "role")
	content, _ := item.Get("content")
	text, isText := content.(string)
	list, isList := content.(*values.List)
	switch {
	case role == "assistant" && isText:
		c.setAssistantField("content", text)
		return nil
	case role == "assistant":
		first, ok := "", isList && typed && list.Len() > 0
		for i := 0; ok && i < list.Len(); i++ {
			part, _ := list.Items[i].(*values.Dict)
			kind, _ := part.Get("type")
			text, isText := get[string](part, "text")
			ok = kind == "output_text" && isText
			if i == 0 {
				first = text
			}
		}
		if !ok {
			return errNotReproduced("such a message of the assistant's")
		}
		c.setAssistantField("content", first)
		return nil
	case role != "user" && role != "system" && role != "developer":
		return errNotReproduced("a message of the role " + role)
	case isText:
		c.messages = append(c.messages, dict("role", role, "content", text))
		return nil
	case !isList:
		return errRefused("content is neither a string nor a list of parts")
	case c.textsOnly && list.Len() > 0:
		return errRefused("a part of type input_text with Mistral's own tokenizer")
	}
	parts := make([]any, list.Len())
	for i, item := range list.Items {
		part, _ := item.(*values.Dict)
		kind, _ := part.Get("type")
		text, ok := get[string](part, "text")
		if kind != "input_text" || !ok {
			return errNotReproduced("a part other than text")
		}
		parts[i] = textPart(text)
	}
	c.messages = append(c.messages, dict("role", role, "content", values.NewList(parts...)))
	return nil
}
