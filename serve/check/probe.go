package check

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"kvepp/internal/useragent"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
)

// probe holds prompts with words that no earlier request has: two chats, and a text if the engine does not return token
// ids. The second chat continues the first.
type probe struct {
	events        *eventRecorder
	text          exchange
	first, second exchange
	predicted     prediction // for second
	predictable   bool       // kvepp has token ids for both chats
}

// exchange is a request and its response.
type exchange struct {
	path     string
	body     map[string]any
	response response
	err      error
}

// err returns the errors of the chats.
func (p *probe) err() error { return errors.Join(p.first.err, p.second.err) }

// response is an engine's response.
type response struct {
	promptTokens     int  // 0: not reported
	cached           *int // tokens of the prompt; nil: not reported
	completionTokens int
	text             string
}

// probeWords is how many words a probe has: enough tokens for a few blocks, and few enough for any model.
const probeWords = 150

// uniqueWords returns n words that are very unlikely to repeat.
func uniqueWords(n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = fmt.Sprintf("%05x", rand.N(1<<20))
	}
	return strings.Join(words, " ")
}

// probe sends the prompts, if Config.Probe is set and the worker takes requests.
func (q *workerCheck) probe(ctx context.Context, events *eventRecorder) {
	if !q.Probe || !q.takesRequests() {
		return
	}
	q.Predictor.awaitListening(ctx)
	p := &probe{events: events}
	q.prompt = p
	if q.engine != prompt.VLLM && q.engine != prompt.SGLang {
		p.text = exchange{path: completionsPath, body: map[string]any{
			"model": q.model, "prompt": "kvepp check: " + uniqueWords(probeWords), "max_tokens": 1, "temperature": 0,
		}}
		p.text.sendToWorker(ctx, q)
	}
	c := newChat(q.Models[q.model], q.model, uniqueWords(probeWords))
	p.first = c.open(ctx, q.Config, &q.Result)
	if p.first.err != nil {
		return
	}
	model := q.Models[q.model]
	var ids []kvblock.Token
	if model != nil {
		var err error
		if ids, _, _, err = kveppIDs(model, p.first.path, p.first.body); err == nil {
			q.Config.awaitBlocks(ctx, &q.Result, ids)
		}
	}
	c.add(p.first.response.text, "Is that all? "+uniqueWords(3))
	p.second = c.request(1)
	if ids != nil {
		if ids, _, _, err := kveppIDs(model, p.second.path, p.second.body); err == nil {
			p.predicted = q.Predictor.predict(q.w.Worker, ids)
			p.predicted.upperBound = p.predicted.upperBound || model.OverlapIsUpperBound()
			p.predictable = p.predicted.blockSize > 0 && q.w.Role == pool.Aggregated
		}
	}
	p.second.sendToWorker(ctx, q)
}

// awaitBlocks records a prompt that the worker has served, and waits until its blocks are announced. After one
// timeout it does not wait again.
func (cfg *Config) awaitBlocks(ctx context.Context, result *Result, ids []kvblock.Token) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Wait)
	defer cancel()
	if result.eventsMissing {
		cancel()
	}
	result.eventsMissing = !cfg.Predictor.recordPrompt(ctx, result.Worker.Worker, ids)
}

// isGatewayEndpoint reports whether the gateway sends requests to the worker. Prefill and encode workers get requests
// only from other workers.
func (a *Result) isGatewayEndpoint() bool {
	return a.responds && a.model != "" && a.Worker.Role != pool.Prefill && a.Worker.Role != pool.Encode
}

// takesRequests reports whether the worker takes requests directly. Dynamo's decode workers need a prefill worker
// for each.
func (a *Result) takesRequests() bool {
	return a.isGatewayEndpoint() && (a.Worker.Role != pool.Decode || a.engine != prompt.Dynamo)
}

// header returns the headers that name the worker to the server at its address.
func (a *Result) header() http.Header {
	h := http.Header{"Content-Type": {"application/json"}}
	rank := strconv.FormatUint(uint64(a.Worker.Rank), 10)
	if a.engine == prompt.Dynamo {
		h.Set("x-dynamo-worker-instance-id", strconv.FormatUint(a.Worker.InstanceID, 10))
		h.Set("x-dynamo-dp-rank", rank)
	} else if !a.Worker.RankByAddress && a.Worker.DataParallelSize > 1 {
		h.Set("x-data-parallel-rank", rank)
	}
	return h
}

func (s *exchange) sendToWorker(ctx context.Context, q *workerCheck) {
	s.sendTo(ctx, q.Config, "http://"+q.w.Address, q.header())
}

// sendTo sends the request to the server at root, and returns the header of its response; nil if there is none.
func (s *exchange) sendTo(ctx context.Context, cfg *Config, root string, header http.Header) http.Header {
	ctx, cancel := context.WithTimeout(ctx, cfg.Wait)
	defer cancel()
	var responded http.Header
	responded, s.err = s.post(ctx, cfg.HTTP, root, header)
	return responded
}

func (s *exchange) post(
	ctx context.Context, client *http.Client, root string, header http.Header,
) (http.Header, error) {
	body, err := json.Marshal(s.body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, root+s.path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = header.Clone()
	useragent.Add(req)
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err != nil {
		return resp.Header, err
	}
	if resp.StatusCode != http.StatusOK {
		return resp.Header, &errStatus{resp.StatusCode, strings.TrimSpace(string(text))}
	}
	var read struct {
		Choices []struct {
			Text    string `json:"text"`
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
		Usage struct {
			PromptTokens        int `json:"prompt_tokens"`
			CompletionTokens    int `json:"completion_tokens"`
			PromptTokensDetails *struct {
				CachedTokens *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(text, &read); err != nil {
		return resp.Header, err
	}
	s.response = response{promptTokens: read.Usage.PromptTokens, completionTokens: read.Usage.CompletionTokens}
	if read.Usage.PromptTokensDetails != nil {
		s.response.cached = read.Usage.PromptTokensDetails.CachedTokens
	}
	for _, choice := range read.Choices[:min(len(read.Choices), 1)] {
		s.response.text = choice.Text + choice.Message.Content
	}
	return resp.Header, nil
}

// chat holds the messages of a conversation.
type chat struct {
	model    string
	messages []any
	asText   bool // send the messages as one text, because the model refuses chats
}

// newChat begins a conversation with the given text: as a system prompt, or in the user's message if the model's
// template refuses system prompts. model may be nil.
func newChat(model *prompt.Model, name, text string) *chat {
	message := func(role, content string) any { return map[string]any{"role": role, "content": content} }
	t := &chat{model: name, messages: []any{message("system", text), message("user", "What is this about?")}}
	if model == nil {
		return t
	}
	if _, _, _, err := kveppIDs(model, chatPath, t.request(1).body); err != nil &&
		!errors.Is(err, prompt.ErrNoChatTemplate) {
		t.messages = []any{message("user", text)}
	}
	return t
}

// add appends a turn: the response, and the user's next message.
func (t *chat) add(response, next string) {
	t.messages = append(t.messages,
		map[string]any{"role": "assistant", "content": response}, map[string]any{"role": "user", "content": next})
}

// open makes the first request, for one token. If the model refuses chats, this and all later requests are
// texts.
func (t *chat) open(ctx context.Context, cfg *Config, a *Result) exchange {
	root := "http://" + a.Worker.Address
	request := t.request(1)
	request.sendTo(ctx, cfg, root, a.header())
	if refused := (*errStatus)(nil); errors.As(request.err, &refused) && refused.code < 500 &&
		refused.code != http.StatusTooManyRequests {
		t.asText = true
		request = t.request(1)
		request.sendTo(ctx, cfg, root, a.header())
	}
	return request
}

// request asks for a response of at most so many tokens.
func (t *chat) request(maxTokens int) exchange {
	body := map[string]any{"model": t.model, "max_tokens": maxTokens, "temperature": 0}
	if !t.asText {
		body["messages"] = t.messages
		return exchange{path: chatPath, body: body}
	}
	var text strings.Builder
	for _, m := range t.messages {
		fmt.Fprintln(&text, m.(map[string]any)["content"])
	}
	body["prompt"] = text.String()
	return exchange{path: completionsPath, body: body}
}

const (
	predictionFix = "first correct the other problems: --model, --chat-template and --engine must match the engine, " +
		"and its events must arrive"
	evictionFix = "first correct the other problems; if there are none, repeat the check: other requests may have " +
		"filled the engine's cache. A model with sliding-window or state-space layers may cache less"
)

// reportCached compares what the response to the second of the probe's chats reports as cached with what kvepp
// predicts.
func (q *workerCheck) reportCached() {
	p := q.prompt
	if p == nil {
		return
	}
	if err := p.err(); err != nil {
		q.wrong(AboutCachedUsed, "send the engine a request yourself",
			"a prompt of %d words was answered: %s", probeWords, briefError(err))
		return
	}
	if p.first.path != chatPath && q.Models[q.model] != nil && !q.hasFinding(AboutChat) {
		q.unknown(AboutChat, "", "the engine refuses chats")
	}
	a, x := &p.second.response, &p.predicted
	switch {
	case a.cached == nil:
		q.wrong(AboutCachedUsed, usageFix[q.engine],
			"the engine does not report cached tokens, so kvepp cannot check its predictions")
	case *a.cached == 0 && (!p.predictable || x.tokens == 0):
		q.wrong(AboutCachedUsed, "check that prefix caching is on, and that other requests do not fill the cache",
			"reported: none of a prompt's %d tokens was cached the second time", a.promptTokens)
	case !p.predictable:
		q.ok(AboutCachedUsed, "reported: %d of %d the second time", *a.cached, a.promptTokens)
	case x.agreesWith(*a.cached, p.first.response.completionTokens) && *a.cached > 0:
		says := "as predicted"
		if *a.cached != x.tokens {
			says = fmt.Sprintf("predicted %d", x.tokens)
			if x.upperBound {
				says = fmt.Sprintf("predicted at most %d", x.tokens)
			}
		}
		q.ok(AboutCachedUsed, "reported: %d of %d the second time, %s", *a.cached, a.promptTokens, says)
	case *a.cached > x.tokens:
		q.wrong(AboutCachedUsed, predictionFix,
			"reported: %d of %d the second time, but kvepp predicts only %d", *a.cached, a.promptTokens, x.tokens)
	default:
		q.wrong(AboutCachedUsed, evictionFix,
			"reported: %d of %d the second time, but kvepp predicts %d", *a.cached, a.promptTokens, x.tokens)
	}
}

// hasFinding reports whether there is a finding about a test.
func (q *workerCheck) hasFinding(about string) bool {
	return slices.ContainsFunc(q.Findings, func(f Finding) bool { return f.About == about })
}
