package prompt

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strings"

	"kvepp/prompt/encoders"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// How mistral-common joins the messages of a chat, and in which order it writes their tokens. Source: mistral-common
// 1.13.1, protocol/instruct/normalize and tokens/tokenizers/instruct.

// mistralWriter writes a prompt.
type mistralWriter struct {
	ctx    context.Context
	rules  *mistralTokenizer
	limits jinja.Limits
	pieces []encoders.Piece
}

func (w *mistralWriter) token(token string) {
	w.pieces = append(w.pieces, encoders.Piece{Kind: encoders.Special, Text: token})
}

func (w *mistralWriter) text(text string) {
	if text != "" {
		w.pieces = append(w.pieces, encoders.Piece{Kind: encoders.Ordinary, Text: text})
	}
}

// json writes a value as Python's json.dumps prints it.
func (w *mistralWriter) json(value any) error {
	text, err := dumpJSON(w.ctx, value, w.limits)
	w.text(text)
	return err
}

// chat writes the prompt of a chat that readChat has read. tools are in JSON; "" for none. effort is the request's.
func (w *mistralWriter) chat(given []mistralMessage, tools, effort string) error {
	setting, err := w.rules.setting(effort)
	if err != nil {
		return err
	}
	messages, system, err := w.rules.join(given)
	if err != nil {
		return err
	}
	// Tools and settings stand before a user's message: before the first from version 13 on, so that a prefix stays the
	// same while the chat grows.
	isUser := func(m mistralMessage) bool { return m.role == "user" }
	first, last := slices.IndexFunc(messages, isUser), -1
	for i := range messages {
		if isUser(messages[i]) {
			last = i
		}
	}
	shown := last
	if w.rules.version >= 13 {
		shown = first
	}
	w.token("<s>")
	for i := range messages {
		message := &messages[i]
		switch message.role {
		case "user":
			if i == shown {
				w.preface(tools, setting)
			}
			if i != last {
				w.user(message.content, "")
			} else {
				w.user(message.content, system)
			}
		case "system":
			w.token(mistralSystem)
			w.content(message.content)
			w.token(mistralSystemEnd)
		case "assistant":
			err = w.assistant(message)
		case "tool":
			err = w.result(message)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// preface writes the tools and the model's settings.
func (w *mistralWriter) preface(tools, setting string) {
	if tools != "" {
		w.token(mistralTools)
		w.text(tools)
		w.token(mistralToolsEnd)
	}
	if setting != "" {
		w.token(mistralSettingsBegin)
		w.text(`{"reasoning_effort": "` + setting + `"}`)
		w.token(mistralSettingsEnd)
	}
}

// user writes a user's message. system is the system prompt in it; "" for none.
func (w *mistralWriter) user(content mistralContent, system string) {
	w.token(mistralInst)
	if system != "" {
		system += "\n\n"
	}
	if content.chunks == nil {
		w.text(system + content.text)
	} else {
		w.text(system)
		w.content(imageFirst(content))
	}
	w.token(mistralInstEnd)
}

// imageFirst returns a content with its image at the front, if that is its end and texts are all that is before it.
func imageFirst(content mistralContent) mistralContent {
	last := len(content.chunks) - 1
	isText := func(chunk mistralChunk) bool { return chunk.kind == chunkText }
	if last < 1 || content.chunks[last].kind != chunkImage ||
		slices.ContainsFunc(content.chunks[:last], func(chunk mistralChunk) bool { return !isText(chunk) }) {
		return content
	}
	return mistralContent{chunks: slices.Concat(content.chunks[last:], content.chunks[:last])}
}

// content writes a content. Each chunk is encoded by itself.
func (w *mistralWriter) content(content mistralContent) {
	w.text(content.text)
	for _, chunk := range content.chunks {
		switch chunk.kind {
		case chunkText:
			w.text(chunk.text)
		case chunkThink:
			w.token(mistralThink)
			w.text(chunk.text)
			if !chunk.open {
				w.token(mistralThinkEnd)
			}
		case chunkImage, chunkAudio:
			w.pieces = append(w.pieces, encoders.Piece{Kind: encoders.Media})
			w.token(w.rules.mark)
		}
	}
}

// assistant writes a message of the assistant's.
func (w *mistralWriter) assistant(message *mistralMessage) error {
	if message.content.empty() && len(message.calls) == 0 {
		return errRefused("an assistant's message without content and calls")
	}
	if w.rules.version < 7 && !message.content.empty() && len(message.calls) > 0 {
		return errRefused("content and calls of the assistant's in sequence")
	}
	if content := message.content; content.chunks == nil {
		w.text(strings.TrimRight(content.text, " "))
	} else {
		w.content(content)
	}
	if err := w.calls(message.calls); err != nil {
		return err
	}
	if !message.prefix {
		w.token(mistralEnd)
	}
	return nil
}

// calls writes the assistant's calls: in one list of JSON before version 11, else one after the other.
func (w *mistralWriter) calls(calls []mistralCall) error {
	if len(calls) == 0 {
		return nil
	}
	if w.rules.version < 11 {
		list := make([]any, len(calls))
		for i, call := range calls {
			list[i] = dict("name", call.name, "arguments", call.arguments, "id", call.id)
		}
		w.token(mistralCalls)
		return w.json(values.NewList(list...))
	}
	for _, call := range calls {
		w.token(mistralCalls)
		w.text(call.name)
		if w.rules.version < 13 {
			w.token(mistralCallID)
			w.text(call.id)
		}
		w.token(mistralArgs)
		if err := w.json(call.arguments); err != nil {
			return err
		}
	}
	return nil
}

// result writes a tool's message.
func (w *mistralWriter) result(message *mistralMessage) error {
	w.token(mistralResults)
	switch version := w.rules.version; {
	case version < 7:
		value, err := pythonValue(message.content.text)
		if err != nil {
			return err
		}
		if err := w.json(dict("content", value, "call_id", message.callID)); err != nil {
			return err
		}
	case version < 13:
		w.text(message.callID)
		w.token(mistralToolContent)
		w.text(message.content.text)
	default:
		w.content(message.content)
	}
	w.token(mistralResultsEnd)
	return nil
}

// pythonValue returns the value of a text that Python reads as JSON, else the text. No text stands for an empty object.
func pythonValue(text string) (any, error) {
	if text == "" {
		return values.NewDict(), nil
	}
	value, malformed, err := readArguments(text)
	switch {
	case err != nil:
		return nil, err
	case malformed != nil && pythonMayRead(text, malformed):
		return nil, errNotReproduced("a tool's result that only Python takes for JSON")
	case malformed != nil:
		return text, nil
	}
	return value, nil
}

// join joins messages of one role that follow each other: a user's, and the assistant's. Before version 7 it takes the
// system messages out and returns their text.
func (t *mistralTokenizer) join(given []mistralMessage) (messages []mistralMessage, system string, err error) {
	var systems []string
	var called []string // the ids of calls since the last results
	for len(given) > 0 {
		role := given[0].role
		n := 1
		for n < len(given) && given[n].role == role {
			n++
		}
		run := given[:n]
		given = given[n:]
		switch role {
		case "user":
			messages = append(messages, mistralMessage{role: role, content: t.joinContents(run)})
		case "assistant":
			joined := mistralMessage{role: role, content: t.joinContents(run), prefix: run[n-1].prefix}
			for _, message := range run {
				joined.calls = append(joined.calls, message.calls...)
			}
			for _, call := range joined.calls {
				called = append(called, call.id)
			}
			messages = append(messages, joined)
		case "tool":
			results := slices.Clone(run)
			for i := range results {
				results[i].content = t.joinContents(run[i : i+1])
			}
			if t.version >= 11 {
				sortResults(results, called)
			}
			called = nil
			messages = append(messages, results...)
		case "system":
			for i := range run {
				content := t.joinContents(run[i : i+1])
				if t.version >= 7 {
					messages = append(messages, mistralMessage{role: role, content: content})
				} else if !run[i].content.empty() {
					systems = append(systems, content.text)
				}
			}
		}
	}
	if len(messages) == 0 || t.version < 7 && messages[0].role != "user" {
		messages = slices.Insert(messages, 0, mistralMessage{role: "user"})
	}
	return messages, strings.Join(systems, "\n\n"), nil
}

// sortResults puts the results of tools in the order of their calls. Results of other calls come last.
func sortResults(results []mistralMessage, called []string) {
	place := map[string]int{}
	for i, id := range called {
		place[id] = i
	}
	own := map[string]int{}
	for i, result := range results {
		own[result.callID] = i
	}
	at := func(result mistralMessage) int {
		if i, ok := place[result.callID]; ok {
			return i
		}
		return math.MaxInt
	}
	slices.SortStableFunc(results, func(a, b mistralMessage) int {
		return cmp.Or(cmp.Compare(at(a), at(b)), cmp.Compare(own[a.callID], own[b.callID]))
	})
}

// joinContents joins the contents of messages: neighbouring texts become one, with an empty line between them. Chunks
// of one message have nothing between them in version 15. The result is a text, unless there are other chunks.
func (t *mistralTokenizer) joinContents(messages []mistralMessage) mistralContent {
	const between = "\n\n"
	within := between
	if t.version >= 15 {
		within = ""
	}
	var chunks []mistralChunk
	var texts []string // the texts that wait to be joined
	flush := func() {
		if texts != nil {
			chunks = append(chunks, mistralChunk{text: strings.Join(texts, "")})
			texts = nil
		}
	}
	for _, message := range messages {
		next := len(texts) > 0 // this message's first text follows a text of an earlier one
		add := func(text string) {
			switch {
			case text == "":
				return
			case len(texts) > 0 && next:
				texts = append(texts, between)
			case len(texts) > 0 && within != "":
				texts = append(texts, within)
			}
			texts = append(texts, text)
			next = false
		}
		add(message.content.text)
		for _, chunk := range message.content.chunks {
			if chunk.kind == chunkText {
				add(chunk.text)
				continue
			}
			flush()
			chunks = append(chunks, chunk)
		}
	}
	if chunks == nil {
		return mistralContent{text: strings.Join(texts, "")}
	}
	flush()
	return mistralContent{chunks: chunks}
}

// dumpJSON returns a value as Python's json.dumps prints it with ensure_ascii=False.
func dumpJSON(ctx context.Context, value any, limits jinja.Limits) (string, error) {
	return jinja.PythonJSON(ctx, value, jinja.JSONFormat{}, limits)
}
