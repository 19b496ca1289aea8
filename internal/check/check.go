// Package check tests once what routing depends on: each worker's settings, the token ids of texts and chats, cached
// tokens as predicted and as reported, and the way through the gateway. It says what to do where something is wrong.
//
// It owns the questions (an engine's HTTP answers, its KV events, its replay socket, the gateway's answers) and the
// flag or setting that corrects each mistake. It never routes and keeps nothing. It changes nothing at an engine except
// for the blocks of the prompts that it sends when a probe, conversations or a gateway are asked for.
//
// Concurrency: Worker is safe from any goroutine. Conversations and Gateway are called once at a time.
package check

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/tokenizer"
	"kvepp/zmqsub"
)

// State is the result of a question.
type State string

// The states of a Finding.
const (
	OK      State = "ok"
	Wrong   State = "wrong"
	Unknown State = "unknown" // neither can be said
)

// Finding is one answer.
type Finding struct {
	Worker string `json:"worker"` // endpoint/rank, or ThroughGateway
	About  string `json:"about"`
	State  State  `json:"state"`
	Says   string `json:"says"`
	Fix    string `json:"fix,omitempty"`           // what to do if it is Wrong, or to learn more
	Tally  *Tally `json:"conversations,omitempty"` // of AboutConversations
}

// The questions about a worker, in the order of their answers.
const (
	AboutAddress    = "address"
	AboutHTTP       = "http"
	AboutModel      = "model"
	AboutInstance   = "instance"
	AboutEvents     = "events"
	AboutReplay     = "replay"
	AboutBlockSize  = "block size"
	AboutPrefix     = "prefix caching"
	AboutTokenizer  = "tokenizer"
	AboutChat       = "chat"
	AboutCachedUsed = "cached tokens"
)

var order = []string{
	AboutAddress,
	AboutHTTP,
	AboutModel,
	AboutInstance,
	AboutEvents,
	AboutReplay,
	AboutBlockSize,
	AboutPrefix,
	AboutTokenizer,
	AboutChat,
	AboutCachedUsed,
}

// Config says how workers are asked.
type Config struct {
	Hub  *zmqsub.Hub
	HTTP *http.Client
	// Models are kvepp's, by name; nil values could not be loaded.
	Models map[string]*tokenizer.Model
	// Names are the addresses of endpoints that are given by name, by the endpoint's name.
	Names map[string]string
	// Engine is what kvepp takes the engines for.
	Engine tokenizer.Engine
	// WithoutEvents says that kvepp is configured to use no KV events.
	WithoutEvents bool
	// Probe sends each worker two short chats with the same beginning.
	Probe bool
	// Predictor computes how many tokens kvepp expects to be cached. Needed for Probe, Conversations and Gateway only.
	Predictor *Predictor
	// Wait bounds each answer, and how long events are waited for.
	Wait time.Duration
	// Metrics and Log are those of the clients that ask engines for token ids.
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// Result is a worker that has been asked.
type Result struct {
	Worker   *pool.Worker
	Findings []Finding

	engine  tokenizer.Engine // which answers HTTP; "": not known
	model   string           // the name that requests give; "": none is known
	answers bool             // HTTP is answered
	// no events come: it cannot be connected to, or announces other blocks than those of its prompts
	eventsMissing bool
}

// workerCheck is the questions to one worker.
type workerCheck struct {
	*Config
	Result
	w      *pool.Worker
	prompt *probe // nil: none was sent
}

func (q *workerCheck) found(about string, state State, fix, says string, args ...any) {
	q.Findings = append(
		q.Findings,
		Finding{Worker: q.w.String(), About: about, State: state, Says: fmt.Sprintf(says, args...), Fix: fix},
	)
}

// Worker asks one worker. The findings are in the order of the questions.
func Worker(ctx context.Context, cfg *Config, w *pool.Worker) *Result {
	q := &workerCheck{Config: cfg, Result: Result{Worker: w}, w: w}
	q.checkAddress()
	q.askHTTP(ctx)
	q.askEvents(ctx)
	q.askSettings(ctx)
	q.askTokens(ctx)
	q.reportCached()
	slices.SortStableFunc(
		q.Findings,
		func(a, b Finding) int { return slices.Index(order, a.About) - slices.Index(order, b.About) },
	)
	return &q.Result
}

// bounded is a context for one answer.
func (q *workerCheck) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, q.Wait)
}

// brief shortens an error by the URL that the finding names already.
func brief(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer in time"
	}
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 &&
		(strings.HasPrefix(text, "Get ") || strings.HasPrefix(text, "Post ")) {
		return text[i+2:]
	}
	return text
}
