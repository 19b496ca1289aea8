package prompt

import (
	"fmt"
	"strings"
	"time"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// How vLLM turns a request to OpenAI's /v1/responses for gpt-oss into a harmony conversation. Source: vLLM 0.31.0 to
// 0.33.0, renderers/online_renderer (_render_responses_with_harmony) and entrypoints/openai/responses/harmony.

// harmonyOfResponses returns the messages that vLLM makes of a request to Responses.
func (m *Model) harmonyOfResponses(request *body.Request, now time.Time) ([]harmonyMessage, error) {
	if err := checkResponses(request); err != nil {
		return nil, err
	}
	reasoning, _ := get[*values.Dict](request.Body, "reasoning")
	effort, err := m.harmonyEffort(field(reasoning, "effort"))
	if err != nil {
		return nil, err
	}
	tools, err := responsesTools(request.Body)
	if err != nil {
		return nil, err
	}
	var instructions *string
	if text, given := get[string](request.Body, "instructions"); given {
		instructions = &text
	}
	items, err := inputItems(request.Body)
	if err != nil {
		return nil, err
	}
	if instructions == nil && len(items) > 0 {
		// The text of a system or developer message at the front joins the tools in the developer's message.
		first, _ := items[0].(*values.Dict)
		if role(first) == "system" || role(first) == "developer" {
			texts, err := responsesTexts(first)
			if err != nil {
				return nil, err
			}
			instructions = harmonyInput{texts: texts}.joined()
			items = items[1:]
		}
	}
	messages, err := harmonyPreambleVLLM(effort, instructions, tools, now)
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for i, item := range items {
		given, ok := item.(*values.Dict)
		if !ok {
			return nil, errRefused("input[%d] is not an object", i)
		}
		message, err := harmonyItem(given, names)
		if err != nil {
			return nil, fmt.Errorf("%w (input item %d)", err, i)
		}
		if message != nil {
			messages = append(messages, *message)
		}
	}
	return dropAnalysis(messages), nil
}

// harmonyItem returns the message of an input item; nil if it has none. names are the functions called so far, by the
// call's id.
func harmonyItem(item *values.Dict, names map[string]string) (*harmonyMessage, error) {
	if status := field(item, "status"); status != nil && status != "completed" && status != "in_progress" &&
		status != "incomplete" {
		return nil, errNotReproduced("an item of another status")
	}
	kind, typed := item.Get("type")
	switch kind {
	case "function_call":
		call, err := responsesCall(item)
		if err == nil {
			err = call.check()
		}
		if err != nil {
			return nil, err
		}
		names[call.id] = call.name
		return &harmonyMessage{
			author:    "assistant",
			channel:   "commentary",
			recipient: "functions." + call.name,
			texts:     []string{call.arguments},
		}, nil
	case "function_call_output":
		id, isID := get[string](item, "call_id")
		output, isText := get[string](item, "output")
		if !isID || !isText {
			return nil, errNotReproduced("a function's output that is not text")
		}
		name, called := names[id]
		if !called {
			return nil, errRefused("the output of a call that is not there")
		}
		return &harmonyMessage{
			author:    "functions." + name,
			channel:   "commentary",
			recipient: "assistant",
			texts:     []string{output},
		}, nil
	case "reasoning":
		content, _, err := responsesReasoning(item)
		if err != nil || content == nil {
			return nil, err
		}
		return &harmonyMessage{
			author:  "assistant",
			channel: "analysis",
			texts:   []string{strings.Join(content, "\n")},
		}, nil
	case "message", nil:
	default:
		return nil, errNotReproduced(fmt.Sprintf("an item of type %v", kind))
	}
	texts, err := responsesTexts(item)
	if err != nil {
		return nil, err
	}
	switch role := role(item); role {
	case "user":
		return &harmonyMessage{author: role, texts: texts}, nil
	case "assistant":
		if _, isText := get[string](item, "content"); !typed && !isText {
			return nil, errNotReproduced("such a message of the assistant's")
		}
		return &harmonyMessage{author: role, channel: "final", texts: texts}, nil
	case "system", "developer":
		if text := strings.Join(texts, ""); text != "" {
			return &harmonyMessage{author: "developer", texts: []string{instructionsTitle + "\n\n" + text}}, nil
		}
		return nil, nil
	default:
		return nil, errNotReproduced("a message of the role " + role)
	}
}

// responsesTexts returns a message's texts: one for a string, and one for each part of a list.
func responsesTexts(item *values.Dict) ([]string, error) {
	want := "input_text"
	if role(item) == "assistant" {
		want = "output_text"
	}
	switch content, _ := item.Get("content"); content := content.(type) {
	case string:
		return []string{content}, nil
	case *values.List:
		texts := make([]string, content.Len())
		for i, item := range content.Items {
			part, _ := item.(*values.Dict)
			text, ok := get[string](part, "text")
			if kind, _ := part.Get("type"); kind != want || !ok {
				return nil, errNotReproduced("a part other than text")
			}
			texts[i] = text
		}
		return texts, nil
	}
	return nil, errRefused("content is neither a string nor a list of parts")
}
