// Package remote asks an inference engine for the token ids of a request that kvepp cannot tokenize itself.
//
// It owns the HTTP calls to one engine server (vLLM's render endpoints and /tokenize, SGLang's /tokenize) with their
// deadline, size limits and circuit breaker. It also owns the comparison of kvepp's own ids with the engine's. It never
// guesses: if an endpoint would give other ids than the engine computes for the same request, it returns an error. It
// never retries, and it never holds a request longer than the configured timeout.
//
// Everything is safe for concurrent use.
package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/useragent"
	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// Outcome is how one request to an engine ended. It is a metric's label.
type Outcome string

// The outcomes. Failed and TimedOut count against the server, except failures that the request itself may have caused.
// After several in a row the breaker opens, and further requests end as Open.
const (
	OK Outcome = "ok"
	// the engine rejects the request; it will reject it again when it serves it
	Refused     Outcome = "refused"
	Unsupported Outcome = "unsupported" // no endpoint of the engine returns the ids of such a request
	// no connection, a response that cannot be read, or a status that blames the server
	Failed   Outcome = "error"
	TimedOut Outcome = "timeout"  // no response within Config.Timeout
	Busy     Outcome = "busy"     // Concurrency calls were running, and none ended within Config.Timeout
	Open     Outcome = "open"     // no request was sent: the breaker is open
	Canceled Outcome = "canceled" // the client closed the connection
)

// Error says why an engine's ids are not known.
type Error struct {
	Outcome Outcome
	err     error
	// brief is err without the server's text, which may quote the prompt; empty if err quotes nothing of it.
	brief string
	// blameless is set if the failure does not count against the server. Otherwise a client could open the breaker.
	blameless bool
}

func (e *Error) Error() string { return "prompt/remote: " + e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

func fail(o Outcome, format string, args ...any) error {
	return &Error{Outcome: o, err: fmt.Errorf(format, args...)}
}

// brief returns err for a log: without the engine's text, which may quote the prompt.
func brief(err error) string {
	if e := new(Error); errors.As(err, &e) && e.brief != "" {
		return "prompt/remote: " + e.brief
	}
	return err.Error()
}

// OutcomeOf returns the outcome of a request that ended with err; OK for nil.
func OutcomeOf(err error) Outcome {
	var e *Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e.Outcome
	}
	return Failed
}

// Config names the server to ask and the timeout.
type Config struct {
	// Model is the model's name in logs and metrics.
	Model string
	// URL is the server's root, http or https; a path in it is a prefix of the endpoints' paths.
	URL string
	// Engine is the server's kind: prompt.VLLM or prompt.SGLang. The others have no endpoint that tokenizes.
	Engine prompt.Engine
	// APIKey returns the current value of the server's --api-key. Nil, or a result of "", sends no key.
	APIKey func() string
	// As is the name of the model at the server, in place of the one in the request. Empty: the same.
	As string
	// TLS are the settings of connections to an https server. nil: Go's.
	TLS *tls.Config
	// Timeout is the longest time that a request may take, including the wait for a free slot.
	Timeout time.Duration
}

// Concurrency is the number of calls to a server that run at the same time. Further requests wait for a free slot.
const Concurrency = 32

// Bounds of requests and responses. A response's bound follows from the body's size: a prompt has fewer tokens than its
// body has bytes, an id takes at most 11 bytes, and a render endpoint repeats the tools.
const (
	maxBodyBytes         = 8 << 20 // about two million tokens of English
	responseBytesPerByte = 16
	minResponseBytes     = 1 << 20
	maxResponseBytes     = 32 << 20
	maxErrorBytes        = 4 << 10
)

// idle is how long an unused connection is kept. The engines' servers close theirs after 5 s. A shorter time here makes
// it rare that a request is sent while the server closes the connection.
const idle = 4 * time.Second

// Client asks one server about one model. Create it with New.
type Client struct {
	cfg     Config
	root    string
	http    *http.Client
	slots   chan struct{}
	breaker *breaker
	metrics *metrics.Metrics
	log     *slog.Logger

	// withoutRender is the time, in Unix nanoseconds, until which the server is taken to have no render endpoints.
	withoutRender atomic.Int64
	saidWithout   atomic.Bool
	modality      atomic.Pointer[modality]
}

// relearn is how long facts about a server are cached. The server may restart with other flags.
const relearn = 5 * time.Minute

// New returns a client. It does not connect, so the server may start later. Errors: a URL or an engine that cannot be
// asked.
func New(cfg Config, m *metrics.Metrics, log *slog.Logger) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("prompt/remote: %w", err)
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, fmt.Errorf("prompt/remote: %q is not a URL such as http://engine:8000", cfg.URL)
	case u.RawQuery != "" || u.Fragment != "" || u.User != nil:
		return nil, fmt.Errorf("prompt/remote: %q: only a scheme, a host and a path are allowed", cfg.URL)
	case cfg.Engine != prompt.VLLM && cfg.Engine != prompt.SGLang:
		return nil, fmt.Errorf("prompt/remote: %s has no endpoint that tokenizes; only vLLM and SGLang have one",
			cfg.Engine)
	case cfg.Timeout <= 0:
		return nil, errors.New("prompt/remote: the timeout must be above 0")
	}
	for _, outcome := range []Outcome{OK, Refused, Unsupported, Failed, TimedOut, Busy, Open, Canceled} {
		m.InitRemoteTokenize(cfg.Model, string(outcome))
	}
	return &Client{
		cfg:  cfg,
		root: strings.TrimRight(u.String(), "/"),
		http: &http.Client{
			Transport: &http.Transport{
				// A request stops waiting at its own deadline. Its connection is still made, and serves the next
				// request.
				DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
				MaxConnsPerHost:     Concurrency,
				MaxIdleConnsPerHost: Concurrency,
				IdleConnTimeout:     idle,
				TLSClientConfig:     cfg.TLS,
				DisableCompression:  true, // so that the bound of a response also bounds memory
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		slots:   make(chan struct{}, Concurrency),
		breaker: newBreaker(),
		metrics: m,
		log:     log.With("model", cfg.Model, "url", cfg.URL),
	}, nil
}

// IsOpen reports whether the breaker is open.
func (c *Client) IsOpen() bool { return c.breaker.isOpen() }

// Tokenize returns the ids that the engine computes for each prompt of a request; a chat has one prompt. The request
// was parsed from body, which Tokenize does not modify. Tokenize returns at the latest when ctx ends or Config.Timeout
// has passed.
//
// Errors: *Error.
func (c *Client) Tokenize(ctx context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	ids, err := c.tokenize(ctx, request, payload)
	c.metrics.RemoteTokenize(c.cfg.Model, string(OutcomeOf(err)))
	return ids, err
}

func (c *Client) tokenize(parent context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	if request.HasMedia {
		return nil, fail(Unsupported, "the prompt is not text alone")
	}
	if len(payload) > maxBodyBytes {
		return nil, fail(Unsupported, "the body is longer than %d bytes", maxBodyBytes)
	}
	if c.cfg.As != "" && c.cfg.As != request.Model {
		payload = request.Forward(payload, body.Changes{Model: c.cfg.As})
		named := *request
		named.Model, request = c.cfg.As, &named
	}
	ctx, cancel := context.WithTimeout(parent, c.cfg.Timeout)
	defer cancel()
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		if parent.Err() != nil {
			return nil, &Error{Outcome: Canceled, err: context.Cause(parent)}
		}
		return nil, fail(Busy, "%d calls are running, and none ended within %v", Concurrency, c.cfg.Timeout)
	}
	probe, ok := c.breaker.allow(time.Now())
	if !ok {
		return nil, fail(Open, "the server failed too often; kvepp asks it again soon")
	}
	var ids [][]kvblock.Token
	var err error
	defer func() { c.report(err, probe) }() // deferred, so that a panic also releases the probe
	if c.cfg.Engine == prompt.SGLang {
		ids, err = c.sglang(ctx, request, payload)
	} else {
		ids, err = c.vllm(ctx, request, payload)
	}
	if err != nil && parent.Err() != nil {
		err = &Error{Outcome: Canceled, err: err}
	}
	return ids, err
}

// report tells the breaker how a call ended. It logs when the breaker opens or closes.
func (c *Client) report(err error, probe bool) {
	v := neutral
	switch OutcomeOf(err) {
	case OK, Refused:
		v = good
	case Failed, TimedOut:
		if e := new(Error); !errors.As(err, &e) || !e.blameless {
			v = bad
		}
	}
	switch c.breaker.done(time.Now(), v, probe) {
	case opened:
		c.log.Warn(
			"the breaker of the engine's tokenizer opens: kvepp routes requests that only it can tokenize by load",
			"error", brief(err))
		c.log.Debug("the engine's last response", "error", err)
	case closed:
		c.log.Info("the breaker of the engine's tokenizer closes: it answers again")
	}
}

// response is a server's response.
type response struct {
	status int
	body   []byte
}

// message returns the error text of a response whose status is not 200.
func (a *response) message() string {
	var decoded struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"` // vLLM
		Message string `json:"message"` // SGLang
	}
	text := string(a.body)
	if json.Unmarshal(a.body, &decoded) == nil {
		switch {
		case decoded.Error.Message != "":
			text = decoded.Error.Message
		case decoded.Message != "":
			text = decoded.Message
		}
	}
	return fmt.Sprintf("HTTP %d: %.300q", a.status, text)
}

// err returns nil for status 200, else the error that the status stands for.
func (a *response) err(path string) error {
	switch a.status {
	case http.StatusOK:
		return nil
	}
	e := &Error{
		Outcome: Failed,
		err:     fmt.Errorf("%s: %s", path, a.message()),
		brief:   fmt.Sprintf("%s: HTTP %d", path, a.status),
	}
	switch a.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		e.Outcome = Refused
	case http.StatusInternalServerError, http.StatusNotImplemented: // a defect that only some requests cause
		e.blameless = true
	}
	return e
}

// call posts body to path, or gets path if body is nil, and reads the response.
func (c *Client) call(ctx context.Context, path string, body []byte) (*response, error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	request, err := http.NewRequestWithContext(ctx, method, c.root+path, bytes.NewReader(body))
	if err != nil {
		return nil, &Error{Outcome: Failed, err: err}
	}
	useragent.Add(request)
	request.Header.Set("Content-Type", "application/json")
	if c.cfg.APIKey != nil {
		if key := c.cfg.APIKey(); key != "" {
			request.Header.Set("Authorization", "Bearer "+key)
		}
	}
	// The header is not sent. It tells net/http to repeat the request if the server closed the connection before it
	// read the request.
	request.Header["Idempotency-Key"] = nil
	resp, err := c.http.Do(request)
	if err != nil {
		return nil, c.broken(ctx, path, err)
	}
	defer resp.Body.Close()
	limit := max(minResponseBytes, min(maxResponseBytes, responseBytesPerByte*len(body)))
	if resp.StatusCode != http.StatusOK {
		limit = maxErrorBytes
	}
	a := &response{status: resp.StatusCode}
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, int64(limit)+1)); err != nil {
		return nil, c.broken(ctx, path, err)
	}
	if len(a.body) > limit && a.status == http.StatusOK {
		return nil, fail(Unsupported, "%s: the response is longer than %d bytes", path, limit)
	}
	return a, nil
}

// broken returns the error for an incomplete response.
func (c *Client) broken(ctx context.Context, path string, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fail(TimedOut, "%s: no response within %v", path, c.cfg.Timeout)
	}
	return fail(Failed, "%s: %w", path, err)
}

// read decodes a response with ids.
func read[T any](path string, a *response) (T, error) {
	var v T
	if err := a.err(path); err != nil {
		return v, err
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		return v, fail(Failed, "%s: the response cannot be read: %w", path, err)
	}
	return v, nil
}
