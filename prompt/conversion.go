package prompt

import (
	"errors"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// The messages and tools that an engine's rules make take memory too. These are upper bounds of it, computed before the
// conversion and equal for all engines: the objects that a part, a call and a tool become, and their places in lists.
var (
	partBytes = values.DictBytes(2) + listPlaceBytes
	callBytes = values.DictBytes(3) + values.DictBytes(2) + listPlaceBytes
	toolBytes = values.DictBytes(2) + values.DictBytes(5) + listPlaceBytes
)

// listPlaceBytes is the memory of a place in a list that grows by a quarter, with the old list and the new one alive.
const listPlaceBytes = 3 * 16

// argumentBytes returns the most memory that the values of a tool call's arguments may take. n is the size of their
// JSON in bytes.
func argumentBytes(n int) int { return min(512, 12*n) + 6*n }

// readArguments reads a tool call's arguments. malformed says what is wrong with text that is not JSON; the value is
// then nil. Errors: ErrMemory.
func readArguments(text string) (value any, malformed, err error) {
	const readerBytes = 2048 // what the reader needs for itself
	value, _, err = values.JSONReader{Allowance: readerBytes + argumentBytes(len(text))}.Parse([]byte(text))
	if errors.Is(err, values.ErrTooManyValues) {
		return nil, nil, ErrMemory
	}
	if err != nil {
		return nil, err, nil
	}
	return value, nil, nil
}

// reserveConversion returns the request with RemainingCost reduced by the memory that converting its messages and tools
// takes. Errors: ErrMemory.
func (m *Model) reserveConversion(request *body.Request) (*body.Request, error) {
	if request.RemainingCost == 0 { // the request was not parsed
		return request, nil
	}
	left := request.RemainingCost
	if tools, _ := get[*values.List](request.Body, "tools"); tools != nil {
		left -= toolBytes * len(tools.Items)
	}
	lists := []*values.List{request.Messages}
	if request.API != body.ChatCompletions { // its messages become a chat's messages first
		for _, name := range []string{"messages", "input"} {
			if list, _ := get[*values.List](request.Body, name); list != request.Messages {
				lists = append(lists, list)
			}
		}
	}
	for _, list := range lists {
		for i := 0; i < list.Len() && left > 0; i++ {
			message, _ := list.Items[i].(*values.Dict)
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

// conversionBytes returns the memory of what an engine makes of one message, in bytes.
func (m *Model) conversionBytes(message *values.Dict) int {
	content := field(message, "content")
	if m.options.Engine == VLLM && isPlain(message, content) {
		return listPlaceBytes
	}
	bytes := values.DictBytes(max(2, message.Len())) + listPlaceBytes/3
	if parts, ok := content.(*values.List); ok {
		bytes += listPlaceBytes
		for _, part := range parts.Items {
			if of, _ := part.(*values.Dict); m.options.Engine == VLLM && isPlainPart(of) {
				bytes += listPlaceBytes
			} else {
				bytes += partBytes
			}
		}
	}
	if tools, ok := get[*values.List](message, "tools"); ok {
		bytes += toolBytes * len(tools.Items)
	}
	if text, ok := content.(string); ok && m.mistral != nil && role(message) == "tool" {
		bytes += argumentBytes(len(text)) // see pythonValue
	}
	calls, _ := get[*values.List](message, "tool_calls")
	for i := range calls.Len() {
		call, _ := calls.Items[i].(*values.Dict)
		function, _ := get[*values.Dict](call, "function")
		arguments, _ := get[string](function, "arguments")
		bytes += callBytes + argumentBytes(len(arguments))
	}
	return bytes
}

// limits returns the limits for rendering a request's chat.
func limits(request *body.Request) jinja.Limits {
	if request.RemainingCost == 0 {
		return jinja.Limits{}
	}
	// A growing text exists twice for a while, and its parts exist before it.
	return jinja.Limits{OutputBytes: max(1, min(request.RemainingCost/3, maxRenderedBytes))}
}

// maxRenderedBytes is the largest text that a chat may become.
const maxRenderedBytes = 16 << 20
