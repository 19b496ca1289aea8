package prompt

import (
	"context"
	"slices"
	"strings"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// gpt-oss uses the harmony format: messages with an author, a channel and a recipient between special tokens. vLLM
// builds them from a chat without the model's Jinja template; SGLang does so for requests to Responses. It encodes each
// text as ordinary text, so that nothing in a message becomes a special token. Source: vLLM 0.31.0 to 0.33.0,
// renderers/online_renderer and entrypoints/openai/parser/harmony_utils; oss-harmony 0.0.11, encoding.

// harmonyMessage is one message of a conversation.
type harmonyMessage struct {
	author    string   // "system", "user" and so on; a tool's full name
	channel   string   // "analysis", "commentary", "final"; "" for none
	recipient string   // the called tool, or the author that a tool responses; "" for none
	texts     []string // the content; each text is encoded separately
}

// The special tokens that frame messages.
const (
	harmonyStart   = "<|start|>"
	harmonyChannel = "<|channel|>"
	harmonyContent = "<|message|>"
	harmonyEnd     = "<|end|>"
	harmonyCall    = "<|call|>"
)

// harmonyPiece is a special token, or a text that is encoded separately as ordinary text.
type harmonyPiece struct {
	special bool
	text    string
}

// harmonyIDs returns the token ids that the engine makes of a request for gpt-oss. The prompt contains the date of now.
// vLLM ignores the request's template, its variables and add_generation_prompt here.
//
// Errors: ErrMedia, ErrInvalidUTF8, errors for requests that vLLM refuses, and those of IsUnknown.
func (m *Model) harmonyIDs(ctx context.Context, request *body.Request, now time.Time) ([]kvblock.Token, error) {
	messages, err := m.harmonyMessages(ctx, request, now)
	if err != nil {
		return nil, err
	}
	pieces, bytes := harmonyPieces(messages), 0
	for _, piece := range pieces {
		bytes += len(piece.text)
	}
	budget := budgetFor(ctx, request, harmonyPieceBytes*len(pieces))
	out := budget.NewIDs(bytes+len(pieces), bytes/3+len(pieces)) // English has about four bytes a token
	for _, piece := range pieces {
		if !piece.special {
			if out, err = m.encoder.AppendOrdinary(&budget, out, piece.text); err != nil {
				return nil, err
			}
			continue
		}
		id, ok := m.encoder.AddedID(piece.text)
		if !ok {
			return nil, errNotReproduced("a gpt_oss vocabulary without " + piece.text)
		}
		out = append(out, id)
	}
	return out, nil
}

// harmonyPieceBytes is the memory of a piece without its text, in bytes.
const harmonyPieceBytes = 3 * 24

// harmonyMessages returns the messages that the engine makes of a chat or of a request to Responses.
func (m *Model) harmonyMessages(ctx context.Context, request *body.Request, now time.Time) ([]harmonyMessage, error) {
	switch {
	case m.options.Engine == SGLang:
		return m.harmonyOfSGLang(ctx, request, now)
	case request.API == body.Responses:
		return m.harmonyOfResponses(request, now)
	}
	return m.harmonyConversation(request, now)
}

// harmonyPieces renders a conversation and begins the assistant's next message.
func harmonyPieces(messages []harmonyMessage) []harmonyPiece {
	var pieces []harmonyPiece
	special := func(token string) { pieces = append(pieces, harmonyPiece{true, token}) }
	text := func(text string) { pieces = append(pieces, harmonyPiece{false, text}) }
	for _, message := range messages {
		special(harmonyStart)
		call := message.author == "assistant" && message.recipient != ""
		switch {
		case call:
			// vLLM rewrites the header of oss-harmony, which has the recipient behind the channel and a token before
			// "json".
			text("assistant to=" + message.recipient)
			special(harmonyChannel)
			text(message.channel + " json")
		default:
			text(message.author)
			if message.channel != "" {
				special(harmonyChannel)
				text(message.channel)
			}
			if message.recipient != "" {
				text(" to=" + message.recipient)
			}
		}
		special(harmonyContent)
		for _, content := range message.texts {
			text(content)
		}
		if call {
			special(harmonyCall)
		} else {
			special(harmonyEnd)
		}
	}
	special(harmonyStart)
	text("assistant")
	return pieces
}

// harmonyConversation returns the messages that vLLM makes of a chat.
func (m *Model) harmonyConversation(request *body.Request, now time.Time) ([]harmonyMessage, error) {
	if request.HasMedia {
		return nil, ErrMedia
	}
	if request.ContinueFinalMessage && request.AddGenerationPrompt != nil && *request.AddGenerationPrompt {
		return nil, errRefused("continue_final_message and add_generation_prompt exclude each other")
	}
	effort, err := m.harmonyEffort(field(request.Body, "reasoning_effort"))
	if err != nil {
		return nil, err
	}
	tools, err := m.vllmTools(request)
	if err != nil {
		return nil, err
	}
	chat := make([]harmonyInput, len(request.Messages.Items))
	for i, item := range request.Messages.Items {
		given, ok := item.(*values.Dict)
		if !ok {
			return nil, errRefused("messages[%d] is not an object", i)
		}
		if chat[i], err = readHarmonyInput(given); err != nil {
			return nil, err
		}
	}

	// The text of a system or developer message at the front joins the tools in the developer's message.
	var instructions *string
	if len(chat) > 0 && chat[0].isInstructions() {
		instructions = chat[0].joined()
		chat = chat[1:]
	}
	messages, err := harmonyPreambleVLLM(effort, instructions, tools, now)
	if err != nil {
		return nil, err
	}

	names := map[string]string{} // the called functions, by the call's id
	for _, input := range chat {
		for _, call := range input.calls {
			names[call.id] = call.name
		}
	}
	for _, input := range chat {
		messages = input.append(messages, names)
	}
	return dropAnalysis(messages), nil
}

const instructionsTitle = "# Instructions"

// harmonyEffort returns the effort of vLLM's system message; a nil effort is medium.
func (m *Model) harmonyEffort(effort any) (string, error) {
	switch given := effort.(type) {
	case nil:
		return "medium", nil
	case string:
		level := m.mappedEffort(given)
		if !slices.Contains(reasoningEfforts, given) || !slices.Contains([]string{"low", "medium", "high"}, level) {
			return "", errRefused("a reasoning effort that is not low, medium or high")
		}
		return level, nil
	}
	return "", errRefused("the reasoning effort is not a string")
}

// harmonyPreambleVLLM returns the first messages of a conversation on vLLM. Instructions that are empty do not make a
// developer's message.
func harmonyPreambleVLLM(
	effort string, instructions *string, tools *values.List, now time.Time,
) ([]harmonyMessage, error) {
	if tools == nil && instructions != nil && *instructions == "" {
		instructions = nil
	}
	return harmonyPreamble(effort, instructions, tools, now)
}

// harmonyPreamble returns the system's message and, with instructions or tools, the developer's. effort is low, medium
// or high.
func harmonyPreamble(effort string, instructions *string, tools *values.List, now time.Time) ([]harmonyMessage, error) {
	system := "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " +
		now.Format(time.DateOnly) + "\n\nReasoning: " + effort +
		"\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
	if tools != nil {
		system += "\nCalls to these tools must go to the commentary channel: 'functions'."
	}
	messages := []harmonyMessage{{author: "system", texts: []string{system}}}
	if tools == nil && instructions == nil {
		return messages, nil
	}
	var sections []string
	if instructions != nil {
		sections = append(sections, instructionsTitle, *instructions)
	}
	if tools != nil {
		section, err := harmonyTools(tools)
		if err != nil {
			return nil, err
		}
		sections = append(sections, section)
	}
	return append(messages, harmonyMessage{author: "developer", texts: []string{strings.Join(sections, "\n\n")}}), nil
}

// dropAnalysis removes the messages of the channel "analysis" before the last final response.
func dropAnalysis(messages []harmonyMessage) []harmonyMessage {
	last := -1
	for i, message := range messages {
		if message.author == "assistant" && message.channel == "final" {
			last = i
		}
	}
	return dropAnalysisBefore(messages, last)
}

// dropAnalysisBefore removes the messages of the channel "analysis" before this one.
func dropAnalysisBefore(messages []harmonyMessage, before int) []harmonyMessage {
	kept := messages[:0]
	for i, message := range messages {
		if i >= before || message.channel != "analysis" {
			kept = append(kept, message)
		}
	}
	return kept
}

// harmonyInput holds the fields of a request's message that vLLM uses.
type harmonyInput struct {
	role      string
	texts     []string // one for a string, one for each part of a list; nil without content
	reasoning string
	callID    string // the call that a tool's message answers
	calls     []harmonyToolCall
}

// harmonyToolCall is a function call.
type harmonyToolCall struct{ id, name, arguments string }

// check returns an error if vLLM could not write the call's header.
func (c harmonyToolCall) check() error {
	if strings.Contains(c.name, "<|") {
		// vLLM rewrites the header of a call, and fails if a special token's text is in it.
		return errNotReproduced("the name of a special token in that of a function")
	}
	return nil
}

// readHarmonyInput reads one message.
func readHarmonyInput(given *values.Dict) (harmonyInput, error) {
	var input harmonyInput
	role, _ := get[string](given, "role")
	if !slices.Contains([]string{"system", "developer", "user", "assistant", "tool"}, role) {
		return input, errRefused("a message whose role is not system, developer, user, assistant or tool")
	}
	input.role = role
	content, hasContent := given.Get("content")
	switch content := content.(type) {
	case nil:
		if hasContent && role != "assistant" {
			return input, errRefused("a %s message whose content is null", role)
		}
	case string:
		input.texts = []string{content}
	case *values.List:
		input.texts = make([]string, len(content.Items))
		for i, item := range content.Items {
			part, _ := item.(*values.Dict)
			text, ok := get[string](part, "text")
			if kind, _ := part.Get("type"); !ok || kind != "text" {
				return input, errNotReproduced("a content part that is not text")
			}
			input.texts[i] = text
		}
	default:
		return input, errRefused("content is neither a string nor a list of parts")
	}
	reasoning := firstField(given, "reasoning", "reasoning_content")
	var ok bool
	if input.reasoning, ok = reasoning.(string); reasoning != nil && !ok {
		return input, errNotReproduced("reasoning that is not a string")
	}
	id, hasID := given.Get("tool_call_id")
	if input.callID, ok = id.(string); hasID && !ok {
		return input, errNotReproduced("a tool_call_id that is not a string")
	}
	calls, hasCalls := given.Get("tool_calls")
	switch {
	case hasCalls && role != "assistant":
		return input, errNotReproduced("tool_calls of a " + role + " message")
	case calls == nil && hasCalls && hasContent && content == nil:
		return input, errRefused("an assistant message whose content and tool_calls are null")
	case calls == nil:
		return input, nil
	}
	var err error
	input.calls, err = readHarmonyCalls(calls)
	return input, err
}

// readHarmonyCalls reads an assistant's tool calls.
func readHarmonyCalls(value any) ([]harmonyToolCall, error) {
	list, ok := value.(*values.List)
	if !ok {
		return nil, errRefused("tool_calls is not a list")
	}
	calls := make([]harmonyToolCall, len(list.Items))
	for i, item := range list.Items {
		call, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](call, "function")
		kind, _ := call.Get("type")
		id, hasID := get[string](call, "id")
		name, hasName := get[string](function, "name")
		arguments, hasArguments := get[string](function, "arguments")
		if kind != "function" || !hasID || !hasName || !hasArguments {
			return nil, errNotReproduced("a tool call that is not a function's with id, name and arguments")
		}
		calls[i] = harmonyToolCall{id, name, arguments}
		if err := calls[i].check(); err != nil {
			return nil, err
		}
	}
	return calls, nil
}

// isInstructions reports whether the message is the system's or the developer's.
func (input harmonyInput) isInstructions() bool {
	return input.role == "system" || input.role == "developer"
}

// joined returns the texts as one text; nil without texts.
func (input harmonyInput) joined() *string {
	if len(input.texts) == 0 {
		return nil
	}
	text := strings.Join(input.texts, "")
	return &text
}

// append appends the harmony messages of the message. An assistant's reasoning, its calls and its response become a
// message each. names are the called functions, by the call's id.
func (input harmonyInput) append(messages []harmonyMessage, names map[string]string) []harmonyMessage {
	switch {
	case input.role == "assistant" && len(input.calls) > 0:
		if text := input.joined(); text != nil && *text != "" {
			messages = append(messages,
				harmonyMessage{author: "assistant", channel: "commentary", texts: []string{*text}})
		}
		messages = input.appendReasoning(messages)
		for _, call := range input.calls {
			messages = append(messages, harmonyMessage{
				author: "assistant", channel: "commentary", recipient: "functions." + call.name,
				texts: []string{call.arguments},
			})
		}
	case input.role == "assistant":
		messages = input.appendReasoning(messages)
		if len(input.texts) > 0 && input.texts[0] != "" {
			messages = append(messages, harmonyMessage{author: "assistant", channel: "final", texts: input.texts})
		}
	case input.role == "tool":
		messages = append(messages, harmonyMessage{
			author: "functions." + names[input.callID], channel: "commentary", recipient: "assistant",
			texts: []string{strings.Join(input.texts, "")},
		})
	case input.isInstructions():
		if text := input.joined(); text != nil {
			messages = append(messages,
				harmonyMessage{author: "developer", texts: []string{instructionsTitle + "\n\n" + *text}})
		}
	default:
		messages = append(messages, harmonyMessage{author: input.role, texts: input.texts})
	}
	return messages
}

// appendReasoning appends the message of an assistant's reasoning, if it has any.
func (input harmonyInput) appendReasoning(messages []harmonyMessage) []harmonyMessage {
	if input.reasoning == "" {
		return messages
	}
	return append(messages, harmonyMessage{author: "assistant", channel: "analysis", texts: []string{input.reasoning}})
}
