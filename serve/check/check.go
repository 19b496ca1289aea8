// Package check tests once what routing depends on: each worker's settings, the token ids of texts and chats, predicted
// against reported cached tokens, and the way through the gateway. A finding about a problem includes its fix.
//
// It owns the tests (of an engine's HTTP responses, KV events and replay socket, and of the gateway's responses) and
// the flag or setting that corrects each mistake. It never routes and keeps no state. It changes engines only by the
// blocks of the prompts that it sends for a probe, conversations or a gateway.
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
	"kvepp/prompt"
	"kvepp/zmqsub"
)

// State is the result of a test.
type State string

// The states of a Finding.
const (
	OK      State = "ok"
	Wrong   State = "wrong"
	Unknown State = "unknown" // the test could not decide
)

// Finding is the result of one test.
type Finding struct {
	Worker string `json:"worker"` // endpoint/rank, or ThroughGateway
	About  string `json:"about"`
	State  State  `json:"state"`
	Says   string `json:"says"`
	Fix    string `json:"fix,omitempty"`           // how to correct it if it is Wrong, or how to learn more
	Tally  *Tally `json:"conversations,omitempty"` // of AboutConversations
}

// The tests of a worker.
const (
	AboutAddress    = "address"
	AboutHTTP       = "http"
	AboutModel      = "model"
	AboutInstance   = "instance"
	AboutEvents     = "events"
	AboutReplay     = "replay"
	AboutBlockSize  = "block size"
	AboutBlocks     = "KV blocks"
	AboutPrefix     = "prefix caching"
	AboutTokenizer  = "tokenizer"
	AboutChat       = "chat"
	AboutCachedUsed = "cached tokens"
)

// order is the order of a worker's findings.
var order = []string{
	AboutAddress, AboutHTTP, AboutModel, AboutInstance, AboutEvents, AboutReplay, AboutBlockSize, AboutBlocks,
	AboutPrefix, AboutTokenizer, AboutChat, AboutCachedUsed,
}

// Config is what the tests of all workers share.
type Config struct {
	Hub  *zmqsub.Hub
	HTTP *http.Client
	// Models are kvepp's models by name. The value is nil if the tokenizer could not be loaded.
	Models map[string]*prompt.Model
	// Names holds the addresses that are host names, by the endpoint's name.
	Names map[string]string
	// Engine is the configured engine (--engine).
	Engine prompt.Engine
	// WithoutEvents is true if kvepp is configured not to use KV events.
	WithoutEvents bool
	// Probe sends each worker two short chats with the same beginning.
	Probe bool
	// Conversations is the number of conversations of five turns to hold.
	Conversations int
	Gateway       GatewayFlags
	// Predictor computes how many tokens kvepp expects to be cached. Needed for Probe, Conversations and Gateway only.
	Predictor *Predictor
	// Wait is the time limit of each response and of each wait for events.
	Wait time.Duration
	// Metrics and Log are those of the clients that ask engines for token ids.
	Metrics *metrics.Metrics
	Log     *slog.Logger

	json bool // the findings are printed as JSON
}

// Result holds a worker's findings, and what later tests need to know of it.
type Result struct {
	Worker   *pool.Worker
	Findings []Finding

	engine   prompt.Engine // at the worker's address; "": unknown
	version  string        // of the engine, by its own words; "": unknown
	model    string        // name in requests; "": unknown
	responds bool          // it answers HTTP
	// no events come: kvepp cannot connect to the socket, or the blocks of its prompts are not announced
	eventsMissing bool
}

// workerCheck is the state of the tests of one worker.
type workerCheck struct {
	*Config
	Result
	w      *pool.Worker
	prompt *probe // nil: no probe was sent
}

// ok, wrong and unknown add findings.
func (q *workerCheck) ok(about, says string, args ...any) {
	q.add(Finding{About: about, State: OK, Says: fmt.Sprintf(says, args...)})
}

func (q *workerCheck) wrong(about, fix, says string, args ...any) {
	q.add(Finding{About: about, State: Wrong, Says: fmt.Sprintf(says, args...), Fix: fix})
}

func (q *workerCheck) unknown(about, fix, says string, args ...any) {
	q.add(Finding{About: about, State: Unknown, Says: fmt.Sprintf(says, args...), Fix: fix})
}

func (q *workerCheck) add(f Finding) {
	f.Worker = q.w.String()
	q.Findings = append(q.Findings, f)
}

// Worker tests one worker. The findings are in the order of the constants About....
func Worker(ctx context.Context, cfg *Config, w *pool.Worker) *Result {
	q := &workerCheck{Config: cfg, Result: Result{Worker: w}, w: w}
	q.checkAddress()
	q.askHTTP(ctx)
	q.askEvents(ctx)
	q.askSettings(ctx)
	q.askTokens(ctx)
	q.reportCached()
	slices.SortStableFunc(q.Findings, func(a, b Finding) int {
		return slices.Index(order, a.About) - slices.Index(order, b.About)
	})
	return &q.Result
}

// withTimeout returns a context with the time limit of one response.
func (q *workerCheck) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, q.Wait)
}

// briefError returns an error's text without the URL, because the finding has it.
func briefError(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no response in time"
	}
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 &&
		(strings.HasPrefix(text, "Get ") || strings.HasPrefix(text, "Post ")) {
		return text[i+2:]
	}
	return text
}
