// Package extproc speaks Envoy's external processing protocol and nothing else: one gRPC stream is one HTTP request.
//
// It owns the stream's state machine, the wire names of the endpoint-picker protocol, and the mapping of errors to
// HTTP. It never decides where a request goes, nor what upstream gets in place of a body (package router does both); of
// an answer it changes the model's name alone, where the router renamed it.
//
// Concurrency: a Server serves any number of streams; each stream is one goroutine and shares nothing with the others.
//
// Sources: Gateway API Inference Extension, proposal 004-endpoint-picker-protocol; Envoy's external_processor.proto.
package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kvepp/internal/apibody"
	"kvepp/internal/budget"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/router"
)

// Config is what an operator chooses.
type Config struct {
	// HeaderAliases also sets the worker headers' older names (x-worker-instance-id, x-dp-rank, x-data-parallel-rank,
	// x-prefill-instance-id, x-prefill-dp-rank).
	HeaderAliases bool
	// PrefillerHeader also names a prefill worker by its address, for llm-d's routing sidecar (x-prefiller-host-port).
	PrefillerHeader bool
	// DecisionHeaders adds the decision to the response as x-kvepp-* headers, for people and tests. It tells clients
	// the workers' names and loads.
	DecisionHeaders bool
	// Conformance lets clients choose among endpoints, and tells them which has served, as the conformance tests of the
	// Gateway API Inference Extension have it: see conformance.go.
	Conformance bool
	// IgnoreSubset heeds no subset of the endpoints that the proxy names.
	IgnoreSubset bool
	// IgnoreHints takes Dynamo's headers with hints off requests, so that frontends follow them as little as the router
	// does.
	IgnoreHints bool
	// Frontends says that the endpoints are Dynamo's frontends in direct mode; they are not told of sessions unless
	// PassSessions.
	Frontends, PassSessions bool
	// MaxParseBytes is the size above which a body is streamed through and routed by load only. 0 means 32 MiB.
	MaxParseBytes int
	// MaxBodyBytes is the size above which a body is refused. 0: none is.
	MaxBodyBytes int
	// MaxStreams is how many requests are followed at once; more are turned away as for load. 0: no limit.
	MaxStreams int
	// Memory is what requests may take until they are routed; a request whose body goes beyond is turned away likewise.
	// It is the router's. nil: without limit.
	Memory *budget.Budget
	// OverloadStatus is the HTTP status of requests that are turned away because of load. 0 means 429.
	OverloadStatus int
	// Tracer makes spans of requests; nil: nobody is told of them.
	Tracer *tracing.Tracer
	// AccessLog gets a line for each request when it has ended; nil: there is no access log. It must not block.
	AccessLog *slog.Logger
	// RetryAfter is in their Retry-After header, in seconds. 0: they have none.
	RetryAfter int
}

// Server implements envoy.service.ext_proc.v3.ExternalProcessor.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer
	cfg     Config
	router  *router.Router
	metrics *metrics.Metrics
	log     *slog.Logger
	noted   sync.Map // notes already logged: each peculiarity of a proxy once
	streams atomic.Int64
	// panics and refusals limit lines that clients can cause.
	panics, refusals loglimit.Limiter
	// tooLargeLogged says that a body above MaxParseBytes is logged.
	tooLargeLogged atomic.Bool
	moved          movedFrom
}

// Streams returns how many requests are followed.
func (s *Server) Streams() int { return int(s.streams.Load()) }

// HeldBytes returns how many bytes of memory requests take that are not routed yet: their bodies, and what it takes to
// read them.
func (s *Server) HeldBytes() int { return s.cfg.Memory.Used() }

// Causes for which requests are turned away, as a metric has them.
const (
	causeStreams   = "streams"
	causeHeldBytes = "held_bytes"
)

// NewServer returns a server that asks r where requests go.
func NewServer(cfg Config, r *router.Router, m *metrics.Metrics, log *slog.Logger) *Server {
	if cfg.MaxParseBytes == 0 {
		cfg.MaxParseBytes = 32 << 20
	}
	if cfg.OverloadStatus == 0 {
		cfg.OverloadStatus = http.StatusTooManyRequests
	}
	if cfg.Memory == nil {
		cfg.Memory = budget.New(0)
	}
	m.InitRejections(causeStreams, causeHeldBytes)
	return &Server{cfg: cfg, router: r, metrics: m, log: log}
}

// exchange is one stream with what it does to the world outside the state machine.
type exchange struct {
	*Server
	stream
	in    incoming
	route *router.Route // set while the request is booked
	usage *apibody.UsageReader
	code  string // what kvepp_requests_total counts
	said  string // the same, if the proxy said it: whoever the request was sent to has answered

	// For the access log alone.
	model      string    // as the request names it; "": not read
	refusal    string    // OpenAI's code, if kvepp refused the request
	firstToken time.Time // of a streamed answer; zero: not seen

	span      *tracing.Span // of the request; nil: nobody is told
	prefilled bool          // the route knows
	held      int           // of the memory of all, this stream's
	began     time.Time     // with the stream
	answered  int           // bytes of the answer's body
}

// Process serves one HTTP request.
func (s *Server) Process(envoy extprocv3.ExternalProcessor_ProcessServer) (err error) {
	x := &exchange{Server: s, stream: stream{cfg: &s.cfg}, code: "none", began: time.Now()}
	defer func() { // after the end, which may fail too
		if p := recover(); p != nil {
			s.panics.Log(s.log, slog.LevelError, "panic in a stream", "panic", p, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "kvepp: internal error")
		}
	}()
	// The one place where a booking ends, whatever way the stream does: its end, a reset, a cancelled client, a panic.
	defer func() { x.end(envoy.Context()) }()
	defer s.streams.Add(-1)
	streams, most := s.streams.Add(1), int64(s.cfg.MaxStreams)
	full := most > 0 && streams > most
	if full && streams > 2*most { // there are even too many to be told so in HTTP
		s.metrics.Rejection(causeStreams)
		return status.Error(codes.ResourceExhausted, "kvepp: too many requests are followed")
	}
	// Each message is answered before the next is read, so that what is not sent on yet is held back by the flow
	// control of HTTP/2: a slow reader on the one side becomes a slow writer on the other, and a stream holds no more
	// than its request's body.
	for {
		err := envoy.RecvMsg(x.in.next())
		if err != nil {
			// io.EOF: Envoy closed in order. Canceled: the usual end, and a client that went away. Both are an end like
			// any other; only what is neither is worth an error.
			if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled {
				return nil
			}
			if status.Code(err) == codes.ResourceExhausted {
				s.note(
					"a message too large to receive, so that its request fails: in Envoy's BUFFERED modes its buffer " +
						"limit may not be above --max-parse-bytes",
				)
			}
			return err
		}
		e := x.step(x.in.ProcessingRequest)
		x.in.declared = x.head.length
		if x.Server.cfg.Tracer != nil && x.span == nil && x.phase != awaitHeaders {
			x.beginSpan(envoy.Context())
		}
		if e.Note != "" {
			s.note(e.Note)
		}
		switch {
		case full && x.phase == collect:
			// Not a gRPC error: a proxy that fails open would send the request on without a decision.
			e.Refuse = s.turnAway(causeStreams, "too_many_requests", errTooManyStreams)
		case !x.hold():
			e.Refuse = s.turnAway(causeHeldBytes, "too_many_bytes", errTooManyBytes)
		}
		switch {
		case e.Refuse != nil:
			e = x.refuse(e.Refuse)
		case e.Ask:
			e = x.ask(envoy.Context())
		}
		if x.phase != collect {
			x.in.release()
		}
		if e.Served != "" && x.route != nil {
			x.reconcile(&e)
		}
		for _, m := range e.Send {
			if err := envoy.Send(m); err != nil {
				x.observe(&e) // that a response has begun matters all the same
				return err
			}
		}
		x.instead = nil
		x.hold()
		if x.route != nil && x.ended {
			x.route.Sent()
		}
		x.observe(&e)
		if e.Close {
			return nil
		}
	}
}

// What is counted for a piece of a body, and for a request's head, beside their bytes.
const (
	pieceBytes = 64
	headBytes  = 4 << 10 // heads up to this size are not counted: what a stream takes anyway is more
)

// hold accounts for the memory that the stream holds of its request's body and headers, and reports whether all streams
// together may.
func (x *exchange) hold() bool {
	now := 0
	if x.size > 0 {
		now = x.size
		if !x.joined {
			now = max(now, x.in.reserved)
		}
		now += len(x.chunks) * pieceBytes
	}
	if x.phase == collect && x.head.bytes > headBytes {
		now += x.head.bytes
	}
	more, before := now-x.held, x.held
	if more == 0 {
		return true
	}
	if x.held = now; more < 0 {
		x.Server.cfg.Memory.Held.Give(-more)
		return true
	}
	return x.Server.cfg.Memory.HoldBody(before, more)
}

// turnAway counts a request that there is no room for, and returns its answer.
func (s *Server) turnAway(cause, code string, err error) *httpError {
	s.metrics.Rejection(cause)
	return s.cfg.shed(code, err)
}

// refuse answers a request that is not to be routed.
func (x *exchange) refuse(e *httpError) effect {
	x.code, x.refusal = strconv.Itoa(e.status), e.code
	x.span.Fail(e.code)
	x.router.Refused(e.status)
	x.log.Debug(
		"request refused",
		"request_id",
		router.Clip(x.head.id),
		"path",
		router.Clip(x.head.path),
		"status",
		e.status,
		"error",
		e.message,
	)
	return x.refused(e)
}

// ask has the request routed and books it.
func (x *exchange) ask(ctx context.Context) effect {
	if x.head.id == "" {
		x.head.id, x.head.idMade = router.NewRequestID(), true
	}
	req := x.request()
	if req.BodylessReason == router.ReasonBodyTooLarge {
		x.tellTooLarge(req)
	}
	req.Trace, req.Received = x.span, x.began
	route, err := x.router.Route(ctx, req)
	if x.Server.cfg.AccessLog != nil {
		x.model = router.Clip(req.Model) // which else would keep the body in memory
	}
	if ctx.Err() != nil { // the client has gone, and there is nobody to answer
		if err == nil {
			x.route = route // so that it is freed
		}
		return effect{Close: true}
	}
	if err != nil {
		e := x.Server.cfg.toHTTP(err)
		if e.status >= 500 && e.kind != overloadedError { // of those there may be thousands a second
			path, _, _ := strings.Cut(x.head.path, "?") // clients put keys into queries
			x.refusals.Log(
				x.log,
				slog.LevelWarn,
				"request refused",
				"request_id",
				router.Clip(x.head.id),
				"path",
				router.Clip(path),
				"status",
				e.status,
				"error",
				err,
			)
		} else {
			x.log.Debug("request refused", "request_id", router.Clip(x.head.id), "path", router.Clip(x.head.path),
				"status", e.status, "error", err)
		}
		x.code, x.refusal = strconv.Itoa(e.status), e.code
		x.span.Fail(e.code)
		return x.refused(e)
	}
	x.route, x.instead, x.renamed, x.token = route, route.Body, route.Renamed, route.Token
	route.Body = nil      // nothing is to hold it any longer than it takes to send it
	if x.instead != nil { // and the body is let go
		x.Server.cfg.Memory.Held.Add(len(x.instead) - x.held)
		x.held = len(x.instead)
	}
	e := x.routed(&route.Decision)
	x.head = x.head.kept()
	return e
}

// observe looks at what has been sent on. Relaying comes first: nothing here may delay a byte of the response.
func (x *exchange) observe(e *effect) {
	if e.Status != "" {
		x.code = "invalid"
		if validStatus(e.Status) {
			x.code = strings.Clone(e.Status) // which else would keep all headers in memory
		}
		x.said = x.code
		if x.route != nil {
			x.route.Responding(e.Failure, e.OfEndpoint)
		}
		switch {
		case x.route == nil:
		case e.ContentEncoding == "" || e.ContentEncoding == "identity":
			x.usage = apibody.NewUsageReader(e.ContentType)
		default:
			x.metrics.Unread.Inc()
		}
	}
	x.answered += len(e.Body)
	if len(e.Body) > 0 && x.usage != nil {
		x.usage.Write(e.Body)
		if x.Server.cfg.AccessLog != nil && x.firstToken.IsZero() && x.usage.Streaming() && x.usage.SawContent() {
			x.firstToken = time.Now()
		}
	}
	if x.route != nil && len(e.Body) > 0 {
		x.route.Heard()
		x.follow()
	}
}

// follow tells the route how far the answer has come.
func (x *exchange) follow() {
	stream := x.usage != nil && x.usage.Streaming()
	switch {
	case x.prefilled:
	case stream && !x.usage.SawContent() && x.route.Prefill == nil: // the worker still prefills
	case stream && x.code == "200":
		x.route.MarkPrefillCompleted()
		x.prefilled = true
	default: // an answer in one piece, one that cannot be read, an error: the prefill is over, and was so before
		x.route.ReleasePrefill()
		x.prefilled = true
	}
	if stream && x.route.TracksAnswer() {
		x.route.Generated(x.usage.Generated())
	}
}

func (x *exchange) end(ctx context.Context) {
	x.Server.cfg.Memory.Held.Give(x.held)
	if x.span != nil {
		defer x.endSpan()
	}
	if x.phase != awaitHeaders {
		x.metrics.Request(x.code)
		if x.Server.cfg.AccessLog != nil {
			defer x.logAccess() // last, whatever fails before
		}
	}
	if x.route == nil {
		return
	}
	x.route.Free()
	answer := router.Answer{
		Status:       x.said,
		Complete:     x.complete || x.responseMode == filterv3.ProcessingMode_NONE,
		Bytes:        x.answered,
		CachedTokens: -1,
	}
	answer.Explained = !answer.Complete && len(metadata.ValueFromIncomingContext(ctx, logsAnswers)) > 0
	defer func() { x.route.Answered(answer) }() // whatever the log does
	if x.usage != nil {
		u, ok := x.usage.Usage()
		if ok {
			answer.PromptTokens = u.PromptTokens
		}
		if answer.Tokens = max(x.usage.Generated(), u.CompletionTokens); ok && u.HasCached {
			answer.CachedTokens = u.CachedTokens
			x.metrics.Reported.Add(float64(u.CachedTokens))
			x.metrics.PredictedOfReported.Add(float64(x.route.PredictedCachedTokens))
			x.log.Debug("request ended", "request_id", x.head.id, "status", x.code, "prompt_tokens", u.PromptTokens,
				"cached_tokens", u.CachedTokens, "predicted_cached_tokens", x.route.PredictedCachedTokens)
		}
	}
}

// tellTooLarge logs once that bodies are above --max-parse-bytes.
func (x *exchange) tellTooLarge(req *router.Request) {
	if !x.Server.tooLargeLogged.Swap(true) {
		path, _, _ := strings.Cut(req.Path, "?") // clients put keys into queries
		x.log.Warn(
			"a request's body is larger than --max-parse-bytes: it is passed on unread, and routed by load only. "+
				"Raise --max-parse-bytes if such requests shall be routed by cache. Logged once",
			"request_id",
			req.ID,
			"path",
			path,
			"body_bytes",
			req.BodyBytes,
			"max_parse_bytes",
			x.Server.cfg.MaxParseBytes,
		)
	}
}

// note logs something unusual that was tolerated, once for each kind.
func (s *Server) note(what string) {
	if _, seen := s.noted.LoadOrStore(what, true); !seen {
		s.log.Warn("the proxy does something unusual; logged once for each kind", "what", what)
	}
}
