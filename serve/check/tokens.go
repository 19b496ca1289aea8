package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/prompt/remote"
)

const (
	completionsPath = "/v1/completions"
	chatPath        = "/v1/chat/completions"
)

// sampleText holds scripts, digits, blanks and marks that tokenizers treat differently.
const sampleText = "The 12,345 crème brûlées cost €7.50;\n\tнаука 温度計 ١٢٣ don't  WON'T <|end|> 👩‍🚀 x²"

const (
	modelFix    = "give --model the engine's own folder and version"
	templateFix = "give kvepp the engine's template: --chat-template FILE if the engine has that flag, else the " +
		"engine's own model folder and version"
	noTemplate  = "kvepp has no chat template for %s, and routes its chats by load"
	addTemplate = "give --chat-template FILE (the engine's template), or a --model folder with chat_template.jinja"
)

// sampleChat is a chat with optional parts, because some templates refuse them.
type sampleChat struct {
	without       string // names the omitted parts; "": none
	tools, system bool
}

var sampleChats = []sampleChat{
	{"", true, true},
	{", without a tool,", false, true},
	{", without a tool and a system prompt,", false, false},
}

func (c sampleChat) body(model string) map[string]any {
	var messages []any
	add := func(role, content string) {
		messages = append(messages, map[string]any{"role": role, "content": content})
	}
	if c.system {
		add("system", "You answer in one sentence, and never guess.")
	}
	add("user", sampleText)
	add("assistant", "That is €7.50 apiece.")
	add("user", "And in London?")
	body := map[string]any{"model": model, "messages": messages}
	if c.tools {
		body["tools"] = []any{map[string]any{"type": "function", "function": map[string]any{
			"name": "weather", "description": "The weather at a place", "parameters": map[string]any{
				"type": "object", "properties": map[string]any{"place": map[string]any{"type": "string",
					"description": "a town's name"}}, "required": []string{"place"}}}}}
	}
	return body
}

// kveppIDs returns kvepp's token ids of a request with one prompt, the parsed request and its body.
func kveppIDs(
	model *prompt.Model, path string, payload map[string]any,
) ([]kvblock.Token, *body.Request, []byte, error) {
	text, err := json.Marshal(payload)
	if err != nil {
		return nil, nil, nil, err
	}
	request, err := body.ParseRequest(path, text)
	if err != nil {
		return nil, nil, nil, err
	}
	prompts, err := model.Tokenize(context.Background(), request)
	if err != nil {
		return nil, request, text, err
	}
	return prompts[0].IDs, request, text, nil
}

// askTokens compares kvepp's token ids with the engine's, or only their number if the engine does not return ids.
func (q *workerCheck) askTokens(ctx context.Context) {
	model := q.Models[q.model]
	if model == nil || !q.responds {
		return
	}
	if q.version != "" {
		at, err := model.At(q.version)
		if err != nil {
			q.unknown(AboutTokenizer, "give the endpoint's engineVersion in the endpoints file",
				"the engine's version is %q: %v", q.version, err)
			return
		}
		model = at
	}
	if q.engine != prompt.VLLM && q.engine != prompt.SGLang {
		q.compareCounts(model)
		return
	}
	engine, err := remote.New(
		remote.Config{Model: q.model, URL: "http://" + q.w.Address, Engine: q.engine, Timeout: q.Wait},
		q.Metrics,
		q.Log,
	)
	if err != nil {
		q.unknown(AboutTokenizer, "", "the engine cannot be asked: %v", err)
		return
	}
	q.compareText(ctx, model, engine)
	q.compareChat(ctx, model, engine)
}

func (q *workerCheck) compareText(ctx context.Context, model *prompt.Model, engine *remote.Client) {
	own, request, body, err := kveppIDs(model, completionsPath, map[string]any{"model": q.model, "prompt": sampleText})
	if err != nil {
		q.wrong(AboutTokenizer, "run kvepp tokenize --text for details", "kvepp cannot tokenize a text: %v", err)
		return
	}
	engineIDs, err := engine.Tokenize(ctx, request, body)
	if err != nil {
		q.unknown(AboutTokenizer, "", "the engine does not return token ids: %s", briefError(err))
		return
	}
	if at := difference(own, engineIDs[0]); at >= 0 {
		q.wrong(AboutTokenizer, modelFix,
			"the ids of a text differ from the engine's at token %d: no block would match", at)
		return
	}
	q.ok(AboutTokenizer, "the %d token ids of a text equal the engine's", len(own))
}

func (q *workerCheck) compareChat(ctx context.Context, model *prompt.Model, engine *remote.Client) {
	for i, sample := range sampleChats {
		own, request, body, err := kveppIDs(model, chatPath, sample.body(q.model))
		if request == nil {
			q.wrong(AboutChat, "run kvepp tokenize for details", "kvepp cannot read a chat: %v", err)
			return
		}
		engineIDs, refused := engine.Tokenize(ctx, request, body)
		missing := errors.Is(err, prompt.ErrNoChatTemplate)
		switch {
		case refused != nil && remote.OutcomeOf(refused) != remote.Refused:
			switch {
			case missing:
				q.wrong(AboutChat, addTemplate, noTemplate, q.model)
			case q.prompt != nil:
				q.compareCount(model, &q.prompt.second, AboutChat, templateFix, "chat")
			default:
				q.unknown(AboutChat, "--probe compares the number of a chat's tokens",
					"the engine does not return token ids: %s", briefError(refused))
			}
			return
		case refused != nil && missing:
			q.unknown(AboutChat, addTemplate+", if its chats are to be served",
				"neither kvepp nor the engine has a chat template for %s", q.model)
			return
		case refused != nil && i+1 < len(sampleChats):
			continue // the engine may refuse only a part of the chat
		case refused != nil:
			q.unknown(AboutChat, "send the engine a chat yourself",
				"the engine refuses a chat: %s", briefError(refused))
			return
		case missing:
			q.wrong(AboutChat, addTemplate, noTemplate, q.model)
			return
		case err != nil:
			q.wrong(AboutChat, templateFix,
				"kvepp cannot render a chat%s that the engine takes: %v", sample.without, err)
			return
		}
		if at := difference(own, engineIDs[0]); at >= 0 {
			q.wrong(AboutChat, templateFix,
				"the ids of a chat%s%s differ from the engine's at token %d of %d: no block from there on would match",
				sample.without, encodedLike(model), at, len(engineIDs[0]))
			return
		}
		q.ok(AboutChat,
			"the %d token ids of a chat%s%s equal the engine's", len(own), sample.without, encodedLike(model))
		return
	}
}

// encodedLike names the code that takes the place of a chat template; "" for a template.
func encodedLike(model *prompt.Model) string {
	if name := model.ChatEncoder(); name != "" {
		return ", encoded without a template like " + name + ","
	}
	return ""
}

// difference returns the index of the first token that differs; -1 if all are equal.
func difference(a, b []kvblock.Token) int {
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return -1
}

// compareCounts compares the numbers of tokens of the probe's prompts, for an engine that does not return ids.
func (q *workerCheck) compareCounts(model *prompt.Model) {
	p := q.prompt
	switch {
	case !q.takesRequests():
		q.unknown(AboutTokenizer, "",
			"not compared: the engine does not return token ids, and needs a prefill worker for each request")
		return
	case p == nil:
		q.unknown(AboutTokenizer, "--probe compares the number of a prompt's tokens",
			"the engine does not return token ids")
		return
	}
	q.compareCount(model, &p.text, AboutTokenizer, modelFix, "text")
	q.compareCount(model, &p.second, AboutChat, templateFix, "chat")
}

func (q *workerCheck) compareCount(model *prompt.Model, r *exchange, about, fix, what string) {
	if about == AboutChat && r.path != chatPath {
		return // another finding says that the engine refuses chats
	}
	if r.err != nil || r.response.promptTokens == 0 {
		q.unknown(about, "send the engine a "+what+" yourself",
			"the engine does not say how many tokens a %s has", what)
		return
	}
	own, _, _, err := kveppIDs(model, r.path, r.body)
	switch {
	case errors.Is(err, prompt.ErrNoChatTemplate):
		q.wrong(about, addTemplate, noTemplate, q.model)
	case err != nil:
		q.wrong(about, "run kvepp tokenize for details",
			"kvepp cannot tokenize a %s that the engine takes: %v", what, err)
	case len(own) != r.response.promptTokens:
		q.wrong(about, fix, "for a %s kvepp counts %d tokens, but the engine counts %d: no block would match", what,
			len(own), r.response.promptTokens)
	default:
		q.ok(about, "kvepp and the engine count %d tokens in a %s", len(own), what)
	}
}

// errStatus is a response with another status than 200.
type errStatus struct {
	code int
	text string
}

func (e *errStatus) Error() string {
	return fmt.Sprintf("HTTP %d %s: %.200s", e.code, http.StatusText(e.code), e.text)
}
