// Package check asks workers, once, whether they are set up as kvepp needs them, and says what to do where they are not.
//
// It owns what is asked (an engine's HTTP answers, its KV events, its replay socket) and which flag of which engine mends what. It
// never routes, keeps nothing, and changes nothing at an engine, but for the blocks of a probe's prompt where one is wanted.
//
// Concurrency: Worker is safe from any goroutine.
package check

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"kvepp/pool"
	"kvepp/tokenizer"
	"kvepp/zmqsub"
)

// State is what became of a question.
type State string

// The states of a Finding.
const (
	OK      State = "ok"
	Wrong   State = "wrong"
	Unknown State = "unknown" // neither can be said
)

// Finding is an answer about a worker.
type Finding struct {
	Worker string `json:"worker"` // endpoint/rank
	About  string `json:"about"`
	State  State  `json:"state"`
	Says   string `json:"says"`
	Fix    string `json:"fix,omitempty"` // what to do if it is Wrong, or to learn more
}

// The questions, in the order of their answers.
const (
	AboutHTTP       = "http"
	AboutModel      = "model"
	AboutInstance   = "instance"
	AboutEvents     = "events"
	AboutReplay     = "replay"
	AboutBlockSize  = "block size"
	AboutPrefix     = "prefix caching"
	AboutTokenizer  = "tokenizer"
	AboutCachedUsed = "cached tokens"
)

// Config says how workers are asked.
type Config struct {
	Hub  *zmqsub.Hub
	HTTP *http.Client
	// Models are kvepp's, by name; nil values could not be loaded.
	Models map[string]*tokenizer.Model
	// Engine is what kvepp takes the engines for.
	Engine tokenizer.Engine
	// WithoutEvents says that kvepp guesses what workers hold, and listens to none.
	WithoutEvents bool
	// Probe sends each worker two short completions, so that it has something to announce.
	Probe bool
	// Wait bounds each answer, and how long events are waited for.
	Wait time.Duration
}

// inquiry is one worker's.
type inquiry struct {
	*Config
	w        *pool.Worker
	findings []Finding

	answers tokenizer.Engine // who answers HTTP; "" when that is not known
	model   string           // that is asked for; empty: none is known
	reads   bool             // HTTP is answered
	prompt  *probe           // nil: none was sent
}

func (q *inquiry) found(about string, state State, fix, says string, args ...any) {
	q.findings = append(q.findings, Finding{Worker: q.w.String(), About: about, State: state, Says: fmt.Sprintf(says, args...), Fix: fix})
}

// Worker asks one worker, and returns what it found in the order of the questions.
func Worker(ctx context.Context, cfg *Config, w *pool.Worker) []Finding {
	q := &inquiry{Config: cfg, w: w}
	q.askHTTP(ctx)
	q.askEvents(ctx)
	q.askSettings(ctx)
	q.askTokenizer(ctx)
	q.askUsage()
	order := []string{AboutHTTP, AboutModel, AboutInstance, AboutEvents, AboutReplay, AboutBlockSize, AboutPrefix, AboutTokenizer, AboutCachedUsed}
	slices.SortStableFunc(q.findings, func(a, b Finding) int { return slices.Index(order, a.About) - slices.Index(order, b.About) })
	return q.findings
}

// bounded is a context for one answer.
func (q *inquiry) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, q.Wait)
}

// brief takes the URL off an error that names it besides.
func brief(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer in time"
	}
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 && strings.HasPrefix(text, "Get ") {
		return text[i+2:]
	}
	return text
}
