package tokenizer

import (
	"errors"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
)

// What an engine makes of a chat's messages and tools before they are rendered takes memory too. It is reckoned up
// beforehand, for all engines alike: so many objects, with their places in lists.
var (
	partBytes = chattemplate.DictBytes(2) + listPlaceBytes
	callBytes = chattemplate.DictBytes(3) + chattemplate.DictBytes(2) + listPlaceBytes
	toolBytes = chattemplate.DictBytes(2) + chattemplate.DictBytes(5) + listPlaceBytes
)

// listPlaceBytes is a place in a list that grows by a quarter, while there are the old one and the new one.
const listPlaceBytes = 3 * 16

// argumentBytes is the most that the values of a tool call's arguments may take, which are JSON of n bytes.
func argumentBytes(n int) int { return min(512, 12*n) + 6*n }

// readArguments reads a tool call's arguments. Errors: ErrMemory, *chattemplate.SyntaxError.
func readArguments(text string) (any, error) {
	const passing = 2048 // bytes that the reader needs for itself
	v, _, err := chattemplate.JSONReader{Allowance: passing + argumentBytes(len(text))}.Parse([]byte(text))
	if errors.Is(err, chattemplate.ErrTooManyValues) {
		return nil, ErrMemory
	}
	return v, err
}

// converted returns the request with what is left when its engine has made what it makes of messages and tools. Errors:
// ErrMemory.
func (m *Model) converted(request *apibody.Request) (*apibody.Request, error) {
	if request.RemainingCost == 0 { // it was not parsed
		return request, nil
	}
	left := request.RemainingCost
	if tools, _ := get[*chattemplate.List](request.Body, "tools"); tools != nil {
		left -= toolBytes * len(tools.Items)
	}
	lists := []*chattemplate.List{request.Messages}
	if request.API != apibody.ChatCompletions { // the engine makes a chat of it first, of its own kind
		for _, field := range []string{"messages", "input"} {
			list, _ := get[*chattemplate.List](request.Body, field)
			lists = append(lists, list)
		}
	}
	for _, list := range lists {
		for i := 0; i < list.Len() && left > 0; i++ {
			message, _ := list.Items[i].(*chattemplate.Dict)
			left -= m.conversionBytes(message)
		}
	}
	if left <= 0 {
		return nil, ErrMemory
	}
	limited := *request
	limited.RemainingCost = left
	return &limited, nil
}

// conversionBytes is what an engine makes of one message.
func (m *Model) conversionBytes(message *chattemplate.Dict) int {
	content, _ := message.Get("content")
	if m.options.Engine == VLLM && isPlain(message, content) {
		return listPlaceBytes
	}
	bytes := chattemplate.DictBytes(max(2, message.Len())) + listPlaceBytes/3
	if parts, ok := content.(*chattemplate.List); ok {
		bytes += listPlaceBytes
		for _, part := range parts.Items {
			if of, _ := part.(*chattemplate.Dict); m.options.Engine == VLLM && isPlainPart(of) {
				bytes += listPlaceBytes
			} else {
				bytes += partBytes
			}
		}
	}
	if tools, ok := get[*chattemplate.List](message, "tools"); ok {
		bytes += toolBytes * len(tools.Items)
	}
	calls, _ := get[*chattemplate.List](message, "tool_calls")
	for i := range calls.Len() {
		call, _ := calls.Items[i].(*chattemplate.Dict)
		function, _ := get[*chattemplate.Dict](call, "function")
		arguments, _ := get[string](function, "arguments")
		bytes += callBytes + argumentBytes(len(arguments))
	}
	return bytes
}

// limits are those of a render of a request's template.
func limits(request *apibody.Request) chattemplate.Limits {
	if request.RemainingCost == 0 {
		return chattemplate.Limits{}
	}
	// A text that grows is there twice for a while, and parts of it are made before it.
	return chattemplate.Limits{OutputBytes: max(1, min(request.RemainingCost/3, mostRendered))}
}

// mostRendered is the most that a chat may become, in bytes.
const mostRendered = 16 << 20
