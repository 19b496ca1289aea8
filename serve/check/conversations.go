package check

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// AboutConversations is the test by conversations.
const AboutConversations = "conversations"

// Tally is the result of a worker's conversations. Token counts are sums over all requests.
type Tally struct {
	Requests     int  `json:"requests"`
	PromptTokens int  `json:"prompt_tokens"`
	Predicted    int  `json:"predicted_cached_tokens"`
	Reported     int  `json:"reported_cached_tokens"`
	Exact        int  `json:"exact_requests"` // requests whose prediction equals the engine's report
	UpperBound   bool `json:"upper_bound,omitempty"`
}

const (
	// Turns is how many requests a conversation has.
	Turns = 5
	// LeastExact is the share of a worker's predictions that must agree with the engine's reports. It is below 1,
	// because other requests may fill the engine's cache between a prediction and its request.
	LeastExact = 0.95

	maxTokens     = 16 // max_tokens of each request
	systemPrompts = 3  // shared by the conversations
	systemWords   = 60
	leastPatience = 100 * time.Millisecond
)

// phrases are parts of the users' messages, with scripts, digits and marks that tokenizers treat differently.
var phrases = strings.Split(`How far is it from Zürich to Genève by train, and what does it cost?
Please sum 12,345.67 and 0x7fff; don't round.
Что нового в мире?
写一首关于雨的短诗。
def f(x):
    return {"k": [x, None]}
اشرح لي ذلك بجملة واحدة
I'LL TAKE IT!!! ... or not ;-)
東京の天気はどう？
Can you say it again, in other words?
<b>Summarise</b> https://host/path?q=1&r=%20 for me`, "\n")

// conversation is one conversation with a worker.
type conversation struct {
	chat
	outputTokens int  // tokens of the latest response
	over         bool // a request failed
}

// workerConversations holds the results of all conversations with one worker.
type workerConversations struct {
	cfg    *Config
	result *Result
	done   func() // after each request

	patience    time.Duration // for the events of a response's blocks
	tally       Tally
	agreed      int    // requests whose prediction agrees with the report, exactly or within an upper bound
	otherCounts int    // requests whose number of tokens differs from the engine's
	failures    int    // requests without a response
	untokenized int    // prompts that kvepp cannot tokenize
	noReports   bool   // the engine reports no cached tokens
	failure     error  // the first failure
	firstWrong  string // the first prediction that does not agree
}

// Conversations holds n conversations of several turns, spread over the workers, and returns a finding with a Tally for
// each worker. A worker's conversations take turns; different workers run at the same time. Several goroutines call
// progress with the number of requests that have ended, and of all.
func Conversations(ctx context.Context, cfg *Config, results []*Result, n int, progress func(done, all int)) []Finding {
	var usable []*Result
	var findings []Finding
	for _, a := range results {
		if a.Worker.Role == pool.Aggregated && a.takesRequests() && cfg.Models[a.model] != nil {
			usable = append(usable, a)
			continue
		}
		says := "none held: correct the worker's problems above"
		if a.Worker.Role != pool.Aggregated {
			says = fmt.Sprintf("none held: this is a %s worker, whose responses do not show its own cached tokens",
				a.Worker.Role)
		}
		findings = append(findings,
			Finding{Worker: a.Worker.String(), About: AboutConversations, State: Unknown, Says: says})
	}
	if len(usable) == 0 {
		return append(findings,
			Finding{Worker: "all", About: AboutConversations, State: Wrong, Says: "no worker could hold one",
				Fix: "correct the problems above; without aggregated workers leave --conversations out"})
	}
	cfg.Predictor.awaitListening(ctx)
	var prompts [systemPrompts]string
	for i := range prompts {
		prompts[i] = uniqueWords(systemWords)
	}
	var (
		ended   atomic.Int64 // requests
		running sync.WaitGroup
		slots   = make(chan struct{}, maxConcurrent)
		all     = make([]*workerConversations, min(n, len(usable)))
	)
	for i := range all {
		d := &workerConversations{
			patience: time.Second,
			cfg:      cfg,
			result:   usable[i],
			done:     func() { progress(int(ended.Add(1)), n*Turns) },
		}
		all[i] = d
		share := (n - i + len(usable) - 1) / len(usable)
		running.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			d.hold(ctx, share, prompts[:])
		})
	}
	running.Wait()
	for _, d := range all {
		findings = append(findings, d.finding())
	}
	return findings
}

// maxConcurrent is how many workers hold conversations at the same time.
const maxConcurrent = 32

// hold holds n conversations.
func (d *workerConversations) hold(ctx context.Context, n int, prompts []string) {
	model := d.cfg.Models[d.result.model]
	// Do not compare the first request: the worker may have cached the text that a chat template puts in front of
	// every chat.
	opening := newChat(model, d.result.model, uniqueWords(systemWords))
	first := opening.open(ctx, d.cfg, d.result)
	if first.err != nil {
		d.failures, d.failure = 1, first.err
		return
	}
	if ids, _, _, err := kveppIDs(model, first.path, first.body); err == nil {
		d.cfg.awaitBlocks(ctx, d.result, ids)
	}
	running := make([]conversation, n)
	for i := range running {
		running[i].chat = *newChat(model, d.result.model, prompts[i%len(prompts)])
		running[i].asText = opening.asText
		running[i].say()
	}
	for range Turns {
		for i := range running {
			if ctx.Err() == nil && !running[i].over && !d.noReports {
				d.takeTurn(ctx, &running[i])
			}
			d.done()
		}
	}
}

// say appends the user's next message.
func (c *conversation) say() {
	text := phrases[rand.IntN(len(phrases))] + " " + uniqueWords(2+rand.IntN(30))
	last := c.messages[len(c.messages)-1].(map[string]any)
	if last["role"] == "user" {
		last["content"] = fmt.Sprint(last["content"], "\n", text)
		return
	}
	c.messages = append(c.messages, map[string]any{"role": "user", "content": text})
}

// takeTurn makes a conversation's next request, and compares the prediction with the report.
func (d *workerConversations) takeTurn(ctx context.Context, c *conversation) {
	worker, model := d.result.Worker.Worker, d.cfg.Models[d.result.model]
	request := c.request(maxTokens)
	ids, _, _, err := kveppIDs(model, request.path, request.body)
	if err != nil {
		d.untokenized++
		d.fail(c, err)
		return
	}
	expected := d.cfg.Predictor.predict(worker, ids)
	expected.upperBound = expected.upperBound || model.OverlapIsUpperBound()
	request.sendTo(ctx, d.cfg, "http://"+d.result.Worker.Address, d.result.header())
	if request.err != nil {
		d.failures++
		d.fail(c, request.err)
		return
	}
	a := &request.response
	if d.noReports = a.cached == nil; d.noReports {
		return
	}
	d.compare(ids, &expected, a, c.outputTokens)
	d.cfg.awaitBlocks(ctx, d.result, ids)
	c.outputTokens = a.completionTokens
	c.messages = append(c.messages, map[string]any{"role": "assistant", "content": a.text})
	c.say()
	if request := c.request(maxTokens); !d.result.eventsMissing {
		if next, _, _, err := kveppIDs(model, request.path, request.body); err == nil {
			within, cancel := context.WithTimeout(ctx, d.patience)
			if !d.cfg.Predictor.awaitOutputBlocks(within, worker, next, len(ids)+a.completionTokens-1) {
				d.patience = leastPatience // the engine does not cache responses, or their text has other token ids
			}
			cancel()
		}
	}
}

// fail ends a conversation.
func (d *workerConversations) fail(c *conversation, err error) {
	c.over = true
	if d.failure == nil {
		d.failure = err
	}
}

// compare counts a request. before is how many tokens the conversation's latest response had.
func (d *workerConversations) compare(ids []kvblock.Token, expected *prediction, a *response, before int) {
	t := &d.tally
	t.Requests++
	t.PromptTokens += a.promptTokens
	t.Predicted += expected.tokens
	t.Reported += *a.cached
	t.UpperBound = t.UpperBound || expected.upperBound
	if a.promptTokens != len(ids) {
		d.otherCounts++
	}
	if *a.cached == expected.tokens {
		t.Exact++
	}
	switch {
	case expected.agreesWith(*a.cached, before):
		d.agreed++
	case d.firstWrong == "":
		d.firstWrong = fmt.Sprintf("request %d: predicted %d, reported %d of %d tokens",
			t.Requests, expected.tokens, *a.cached, a.promptTokens)
	}
}

func (d *workerConversations) finding() Finding {
	t := &d.tally
	f := Finding{Worker: d.result.Worker.String(), About: AboutConversations, State: Wrong, Tally: t}
	known, _ := d.cfg.Predictor.worker(d.result.Worker.Worker)
	switch {
	case d.failures > 0:
		f.Says = fmt.Sprintf("%d requests failed; the first: %s", d.failures, briefError(d.failure))
		f.Fix = "send the engine a chat yourself; --wait bounds how long a response may take"
	case d.untokenized > 0:
		f.Says = fmt.Sprintf("kvepp cannot tokenize %d requests; the first: %v", d.untokenized, d.failure)
		f.Fix = "run kvepp tokenize for details"
	case d.noReports:
		f.Says, f.Fix = "the engine does not report cached tokens", usageFix[d.result.engine]
	case d.otherCounts > 0:
		f.Says = fmt.Sprintf("for %d of %d prompts kvepp and the engine count different numbers of tokens",
			d.otherCounts, t.Requests)
		f.Fix = templateFix
	case known.BlockSize == 0:
		f.Says, f.Fix = "kvepp cannot predict: the block size is unknown",
			"set the worker's blockSize, or make its KV events arrive"
	case t.Reported == 0 && t.Predicted == 0:
		f.Says, f.Fix = "nothing was cached", "check that prefix caching is on"
	case float64(d.agreed) < LeastExact*float64(t.Requests):
		f.Says = fmt.Sprintf("%d of %d predictions are wrong; %s", t.Requests-d.agreed, t.Requests, d.firstWrong)
		f.Fix = evictionFix
		if t.Predicted < t.Reported {
			f.Fix = predictionFix
			if d.result.Worker.KVReplay == "" {
				f.Fix += "; without a replay socket (kvReplay) kvepp cannot know blocks that were stored before it " +
					"started"
			}
		}
	default:
		f.State, f.Says = OK, fmt.Sprintf("%d of %d predictions are exact", t.Exact, t.Requests)
		if d.agreed > t.Exact {
			f.Says += fmt.Sprintf(", %d others agree", d.agreed-t.Exact)
		}
	}
	return f
}
