package prompt

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How SGLang turns a request to OpenAI's /v1/responses for gpt-oss into a harmony conversation. Its other APIs use the
// model's chat template. Source: SGLang 0.5.21 to 0.5.23, entrypoints/harmony_utils and openai/serving_responses
// (_make_request_with_harmony); oss-harmony 0.0.4, encoding.

// sglangEfforts are the harmony efforts of the request's; others are the default, medium.
var sglangEfforts = map[string]string{
	"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}

// sglangServerTools are the types of tools that a server with --tool-server describes to the model.
var sglangServerTools = []string{"web_search", "web_search_preview", "code_interpreter"}

// harmonyOfSGLang returns the messages that SGLang makes of a request to Responses.
func (m *Model) harmonyOfSGLang(ctx context.Context, request *body.Request, now time.Time) ([]harmonyMessage, error) {
	if field(request.Body, "previous_response_id") != nil {
		return nil, errNotReproduced("previous_response_id")
	}
	choice, given := request.Body.Get("tool_choice")
	switch choice := choice.(type) {
	case *values.Dict:
		kind, _ := choice.Get("type")
		name, _ := get[string](choice, "name")
		if function, _ := get[*values.Dict](choice, "function"); name == "" {
			name, _ = get[string](function, "name")
		}
		if name != "" && (kind == "function" || kind == "custom") {
			return nil, errRefused("a tool_choice other than auto for gpt-oss")
		}
	default:
		if given && choice != "auto" {
			return nil, errRefused("a tool_choice other than auto for gpt-oss")
		}
	}
	level := "medium"
	reasoning, _ := get[*values.Dict](request.Body, "reasoning")
	effort, _ := get[string](reasoning, "effort")
	if known, ok := sglangEfforts[effort]; ok {
		level = known
	}
	var instructions *string
	if text, given := get[string](request.Body, "instructions"); given {
		instructions = &text
	}
	tools, err := sglangHarmonyTools(request.Body)
	if err != nil {
		return nil, err
	}
	items, err := inputItems(request.Body)
	if err != nil {
		return nil, err
	}
	messages, err := harmonyPreamble(level, instructions, tools, now)
	if err != nil {
		return nil, err
	}
	if len(messages) == 1 { // SGLang writes the developer's message in any case
		messages = append(messages, harmonyMessage{author: "developer", texts: []string{""}})
	}
	c := &sglangHarmony{ctx: ctx, limits: limits(request), names: map[string]string{}}
	for i, item := range items {
		given, ok := item.(*values.Dict)
		if !ok {
			return nil, errRefused("input[%d] is not an object", i)
		}
		message, err := c.item(given)
		if err != nil {
			return nil, fmt.Errorf("%w (input item %d)", err, i)
		}
		messages = append(messages, message)
	}
	return dropEarlyAnalysis(messages), nil
}

// sglangHarmonyTools returns the functions among a request's tools in the form of the chat API; nil for none. SGLang
// leaves out tools of most other types.
func sglangHarmonyTools(body *values.Dict) (*values.List, error) {
	value, has := body.Get("tools")
	list, ok := value.(*values.List)
	if has && !ok {
		return nil, errRefused("tools is not a list")
	}
	var tools []any
	for i := range list.Len() {
		tool, _ := list.Items[i].(*values.Dict)
		kind, _ := get[string](tool, "type")
		switch {
		case slices.Contains(sglangServerTools, kind):
			return nil, errNotReproduced("a tool that SGLang's --tool-server describes")
		case kind == "custom" || slices.Contains(sglangUnusedTools, kind):
			continue
		}
		name, _ := get[string](tool, "name")
		if kind != "function" || name == "" {
			return nil, errRefused("tools[%d] is not a function with a name", i)
		}
		if _, isText := get[string](tool, "description"); !isText {
			return nil, errRefused("tools[%d] has no description", i)
		}
		tools = append(tools, dict("type", "function", "function", tool))
	}
	if tools == nil {
		return nil, nil
	}
	return values.NewList(tools...), nil
}

// dropEarlyAnalysis removes the messages of the channel "analysis" before the first final response, if the assistant's
// last message is a final response. Source: oss-harmony 0.0.4, render_conversation_into.
func dropEarlyAnalysis(messages []harmonyMessage) []harmonyMessage {
	first, last := -1, ""
	for i, message := range messages {
		if message.channel == "final" && first < 0 {
			first = i
		}
		if message.author == "assistant" {
			last = message.channel
		}
	}
	if last != "final" {
		return messages
	}
	return dropAnalysisBefore(messages, first)
}

// sglangHarmony reads input items. names are the functions called so far, by the call's id.
type sglangHarmony struct {
	ctx    context.Context
	limits jinja.Limits
	names  map[string]string
	packed packedReasoning
}

// item returns the message of an input item.
func (c *sglangHarmony) item(item *values.Dict) (message harmonyMessage, err error) {
	kind, typed := item.Get("type")
	switch kind {
	case "function_call", "custom_tool_call":
		return c.call(item, kind == "custom_tool_call")
	case "function_call_output", "custom_tool_call_output":
		id, ok := get[string](item, "call_id")
		output, err := sglangOutput(item)
		if err != nil || !ok {
			return message, errNotReproduced("a function's output that is not text")
		}
		name, called := c.names[id]
		if !called {
			return message, errRefused("the output of a call that is not there")
		}
		return harmonyMessage{author: "functions." + name, texts: []string{output}}, nil
	case "reasoning":
		text, err := c.reasoning(item)
		return harmonyMessage{author: "assistant", channel: "analysis", texts: []string{text}}, err
	case "message", nil:
		if typed && kind == nil {
			return message, errNotReproduced("an item whose type is null")
		}
		return sglangHarmonyMessage(item)
	}
	return message, errRefused("an item of type %v", kind)
}

// call returns the message of a call.
func (c *sglangHarmony) call(item *values.Dict, custom bool) (message harmonyMessage, err error) {
	id, isID := get[string](item, "call_id")
	name, isName := get[string](item, "name")
	argument := "arguments"
	if custom {
		argument = "input"
	}
	arguments, isText := get[string](item, argument)
	if !isID || !isName || !isText {
		return message, errNotReproduced("such a call")
	}
	switch {
	case custom:
		if arguments, err = dumpJSON(c.ctx, dict("input", arguments), c.limits); err != nil {
			return message, err
		}
	case arguments == "":
		arguments = "{}"
	}
	c.names[id] = name
	return harmonyMessage{author: "assistant", channel: "commentary", recipient: "functions." + name,
		texts: []string{arguments}}, nil
}

// reasoning returns the text of a reasoning item: its summary, else its content, else what SGLang itself packed into
// encrypted_content.
func (c *sglangHarmony) reasoning(item *values.Dict) (string, error) {
	for _, name := range []string{"summary", "content"} {
		value, _ := item.Get(name)
		list, ok := value.(*values.List)
		if value != nil && !ok {
			return "", errNotReproduced("such reasoning")
		}
		texts := make([]string, list.Len())
		for i := range texts {
			part, _ := list.Items[i].(*values.Dict)
			if texts[i], ok = get[string](part, "text"); !ok {
				return "", errNotReproduced("such reasoning")
			}
		}
		if text := strings.Join(texts, "\n"); text != "" {
			return text, nil
		}
	}
	return c.packed.unpack(item)
}

// sglangHarmonyMessage returns the message of a message item.
func sglangHarmonyMessage(item *values.Dict) (harmonyMessage, error) {
	role, _ := get[string](item, "role")
	if !slices.Contains([]string{"user", "assistant", "system", "developer"}, role) ||
		!onlyFields(item, "type", "id", "status", "role", "content", "phase", "summary") {
		return harmonyMessage{}, errNotReproduced("such a message of the role " + role)
	}
	message := harmonyMessage{author: role}
	switch content := field(item, "content").(type) {
	case string:
		message.texts = []string{content}
	case *values.List:
		parts, err := sglangInputParts(content)
		if err != nil {
			return message, err
		}
		for _, item := range parts.Items {
			part, _ := item.(*values.Dict)
			text, _ := get[string](part, "text")
			message.texts = append(message.texts, text)
		}
	default:
		return message, errNotReproduced("a message without content")
	}
	if role == "system" {
		message.author = "developer"
		if len(message.texts) > 0 {
			message.texts[0] = "Instructions:\n" + message.texts[0]
		}
	}
	if phase := field(item, "phase"); phase != nil && role == "assistant" {
		switch phase {
		case "final_answer":
			message.channel = "final"
		case "commentary":
			message.channel = "commentary"
		default:
			return message, errNotReproduced("a message of another phase")
		}
	}
	return message, nil
}
