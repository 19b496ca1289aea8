package remote

import (
	"bytes"
	"context"
	"log/slog"
	"runtime/debug"
	"sync/atomic"

	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// Bounds of the requests that wait to be compared: their number, and each body's bytes.
const (
	checkQueue     = 4
	maxCheckedBody = 1 << 20
)

// Check compares kvepp's own ids of a model's first requests with its engine's, in the background. If they differ, the
// caller must not use kvepp's ids of that model any more. A nil Check compares nothing.
type Check struct {
	own     func(context.Context, *body.Request) ([]prompt.Prompt, error)
	engine  *Client
	wanted  atomic.Int64 // comparisons still to be made
	differs atomic.Bool
	queue   chan sample
	panics  loglimit.Limiter // log lines about panics
	silent  bool             // a failed comparison was logged; only Run uses it
	metrics *metrics.Metrics
	log     *slog.Logger
}

// sample is a request to be compared.
type sample struct {
	path string
	body []byte
}

// NewCheck returns a check of the first n requests that both sides can tokenize. own is kvepp's tokenizer for the model
// that engine serves. Run does the work.
func NewCheck(own func(context.Context, *body.Request) ([]prompt.Prompt, error), engine *Client, n int) *Check {
	c := &Check{
		own:     own,
		engine:  engine,
		queue:   make(chan sample, checkQueue),
		metrics: engine.metrics,
		log:     engine.log,
	}
	c.wanted.Store(int64(n))
	for _, outcome := range []string{"equal", "differs", "unknown"} {
		c.metrics.InitTokenizerCheck(engine.cfg.Model, outcome)
	}
	return c
}

// Differs reports whether a comparison found different ids.
func (c *Check) Differs() bool { return c != nil && c.differs.Load() }

// Offer queues a request for comparison. It copies the body and never blocks: if the queue is full or the body is
// larger than maxCheckedBody, it skips the request.
func (c *Check) Offer(path string, body []byte) {
	if c == nil || c.wanted.Load() <= 0 || len(body) > maxCheckedBody || len(c.queue) == cap(c.queue) {
		return
	}
	select {
	case c.queue <- sample{path, bytes.Clone(body)}:
	default:
	}
}

// Run compares the queued requests, one at a time, until ctx ends, n requests were equal, or one differs.
func (c *Check) Run(ctx context.Context) {
	n := c.wanted.Load()
	for c.wanted.Load() > 0 {
		select {
		case <-ctx.Done():
			return
		case s := <-c.queue:
			c.compare(ctx, s)
		}
	}
	if !c.Differs() {
		c.log.Info("kvepp's token ids are the engine's", "requests_compared", n)
	}
}

// compare compares one request. It repeats a comparison that finds a difference, because a template may print the time.
// Only a second difference counts.
func (c *Check) compare(ctx context.Context, s sample) {
	d, known := c.difference(ctx, s)
	if known && d != nil {
		d, known = c.difference(ctx, s)
	}
	outcome := "equal"
	switch {
	case !known:
		outcome = "unknown"
	case d != nil:
		outcome = "differs"
		c.differs.Store(true)
		c.wanted.Store(0)
		c.log.Error(
			"kvepp's token ids differ from the engine's: from now on kvepp routes the model's requests by load only. "+
				"Give kvepp the "+
				"model folder, the --engine and the chat template flags of the engine; \"kvepp tokenize\" shows what "+
				"kvepp makes of a body",
			"prompt",
			d.prompt,
			"position",
			d.position,
			"own_tokens",
			d.ownTokens,
			"engine_tokens",
			d.engineTokens,
		)
		c.log.Debug("the ids from that position", "path", s.path, "own_ids", d.own, "engine_ids", d.engine)
	default:
		c.wanted.Add(-1)
	}
	c.metrics.TokenizerCheck(c.engine.cfg.Model, outcome)
}

// difference is the first place where two tokenizations differ.
type difference struct {
	prompt, position        int
	own, engine             []kvblock.Token // a few ids from that position
	ownTokens, engineTokens int
}

// difference tokenizes a request with kvepp and with the engine, and returns the first difference; nil if there is
// none. known reports whether both have ids.
func (c *Check) difference(ctx context.Context, s sample) (d *difference, known bool) {
	defer func() {
		if r := recover(); r != nil { // a defect; the router recovers from it on a request's path too
			c.panics.Log(c.log, slog.LevelError, "panic while a request is compared with the engine", "panic", r,
				"stack", string(debug.Stack()))
			d, known = nil, false
		}
	}()
	request, err := body.Parser{Python: true}.Parse(s.path, s.body)
	if err != nil {
		return nil, false
	}
	if _, err := prompt.Given(request); err == nil || request.HasMedia {
		return nil, false // the request brings ids, so no text is tokenized; or it has media
	}
	own, err := c.own(ctx, request)
	if err != nil {
		return nil, false
	}
	engine, err := c.engine.Tokenize(ctx, request, s.body)
	if err != nil {
		if !c.silent {
			c.silent = true
			c.log.Warn(
				"--tokenizer-check could not compare a request with the engine; it continues with later requests",
				"error", brief(err))
			c.log.Debug("the engine's response to the comparison", "error", err)
		}
		return nil, false
	}
	return differ(own, engine), true
}

// differ returns the first difference between own and engine; nil if there is none.
func differ(own []prompt.Prompt, engine [][]kvblock.Token) *difference {
	const shown = 8
	for i := range max(len(own), len(engine)) {
		var a, b []kvblock.Token
		if i < len(own) {
			a = own[i].IDs
		}
		if i < len(engine) {
			b = engine[i]
		}
		at := 0
		for at < min(len(a), len(b)) && a[at] == b[at] {
			at++
		}
		if at < max(len(a), len(b)) {
			return &difference{
				prompt:       i,
				position:     at,
				own:          a[at:min(at+shown, len(a))],
				engine:       b[at:min(at+shown, len(b))],
				ownTokens:    len(a),
				engineTokens: len(b),
			}
		}
	}
	if len(own) != len(engine) {
		return &difference{prompt: min(len(own), len(engine))}
	}
	return nil
}
