// Package extproc speaks Envoy's external processing protocol and nothing else: one gRPC stream is one HTTP request.
//
// It owns the stream's state machine, the wire names of the endpoint-picker protocol, and the mapping of errors to
// HTTP. It never decides where a request goes, nor what replaces its body; package router does both. In a response it
// changes only the model's name, if the router renamed it.
//
// Concurrency: a Server serves any number of streams; each stream is one goroutine. Streams share what is locked in
// Server, and a decision that is repeated, which no one changes any more.
//
// Sources: Gateway API Inference Extension, proposal 004-endpoint-picker-protocol; Envoy's external_processor.proto.
package extproc

import (
	"context"
	"crypto/rand"
	"errors"
	"hash/maphash"
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

	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/prompt/body"
	"kvepp/router"
	"kvepp/router/budget"
)

// Config are the operator's settings.
type Config struct {
	// PrefillerHeader also names a prefill worker by its address, for llm-d's routing sidecar (x-prefiller-host-port).
	PrefillerHeader bool
	// DecisionHeaders adds the decision to the response as x-kvepp-* headers, for people and tests. It tells clients
	// the workers' names and loads.
	DecisionHeaders bool
	// Gateway is the proxy before kvepp as the operator names it; "": kvepp finds out what it takes.
	Gateway string
	// Conformance lets clients restrict the endpoints, and shows them the endpoint that answered, for the conformance
	// tests of the Gateway API Inference Extension: see conformance.go.
	Conformance bool
	// TenantHeader is as in router.Config.
	TenantHeader string
	// IgnoreHints removes Dynamo's hint headers from requests, so that frontends ignore them as the router does.
	IgnoreHints bool
	// Frontends: the endpoints are Dynamo's frontends in direct mode. They get no session headers.
	Frontends bool
	// MaxParseBytes is the size in bytes above which kvepp streams a body through and routes by load only. 0 means 32
	// MiB.
	MaxParseBytes int
	// MaxBodyBytes is the size in bytes above which kvepp refuses a body. 0: no limit.
	MaxBodyBytes int
	// MaxStreams is the most requests that kvepp follows at once; it rejects more with OverloadStatus. 0: no limit.
	MaxStreams int
	// MaxBufferedBytes is the size of Memory; 0: by Go's memory limit. Only Buffers reads it.
	MaxBufferedBytes int
	// Memory bounds what requests take until they are routed; kvepp rejects a request beyond it with OverloadStatus.
	// The router shares it. nil: no limit.
	Memory *budget.Budget
	// OverloadStatus is the HTTP status of requests that kvepp rejects because of load. 0 means 429.
	OverloadStatus int
	// Tracer makes spans of requests; nil: kvepp makes none.
	Tracer *tracing.Tracer
	// AccessLog gets a line for each request that has ended; nil: there is no access log. It must not block.
	AccessLog *slog.Logger
	// Shadow: the proxy's filter is in observability mode, and another picker routes the requests. kvepp answers
	// nothing, and compares that picker's choices with its own, for ShadowShare of the requests, 0..1.
	Shadow      bool
	ShadowShare float64
	Conventions
}

// Server implements envoy.service.ext_proc.v3.ExternalProcessor.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer
	cfg     Config
	router  *router.Router
	metrics *metrics.Metrics
	log     *slog.Logger
	noted   sync.Map // notes that are logged already
	streams atomic.Int64
	// panics and refusals limit log lines that clients can cause.
	panics, refusals loglimit.Limiter
	// tooLargeLogged: a body above MaxParseBytes was logged.
	tooLargeLogged atomic.Bool
	moved          seenSet[move]   // logged responses of other endpoints than the chosen ones
	listTakers     seenSet[string] // hosts of proxies that take several endpoints
	open           openDecisions
}

// Streams returns how many requests kvepp follows.
func (s *Server) Streams() int { return int(s.streams.Load()) }

// RefuseWaiting refuses the requests that wait for a worker, because kvepp ends.
func (s *Server) RefuseWaiting() { s.router.RefuseWaiting() }

// HeldBytes returns the memory in bytes of requests that are not routed yet: their bodies, and what reading them takes.
func (s *Server) HeldBytes() int { return s.cfg.Memory.Used() }

// Causes of rejected requests, as values of a metric's label.
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
	s := &Server{cfg: cfg, router: r, metrics: m, log: log,
		open: openDecisions{seed: maphash.MakeSeed(), byName: map[string]*answered{}}}
	if cfg.Shadow {
		s.initShadow()
	}
	return s
}

// Export exports what is read at each scrape. Call it once.
func (s *Server) Export() {
	metrics.Gauge(s.metrics, metrics.Streams, s.Streams)
	metrics.Gauge(s.metrics, metrics.HeldBytes, s.HeldBytes)
}

// incoming is a message from Envoy, and whether there is room for it.
type incoming struct {
	*extprocv3.ProcessingRequest
	of      *exchange
	refused *httpError // why the message may not be received; nil: it may
}

// Receiving implements connlimit.Receiver.
func (in *incoming) Receiving(bytes int) error {
	if in.refused = in.of.admit(bytes); in.refused != nil {
		return status.Error(codes.ResourceExhausted, in.refused.message)
	}
	return nil
}

// exchange is one stream, and its effects outside the state machine.
type exchange struct {
	*Server
	stream
	in             incoming
	route          *router.Route // set while the request is booked
	usage          *body.UsageReader
	judged         bool   // in shadow: the request is counted as judged or not
	repeating      bool   // the decision is another stream's, which counts the request
	code           string // what kvepp_requests_total counts
	upstreamStatus string // code, if the proxy reported it: the response came from the endpoint or the proxy

	responseID *body.ResponseIDReader // nil: the response's id does not matter, or is known

	// For the access log alone.
	model      string    // as the request names it; "": unknown
	refusal    string    // OpenAI's code, if kvepp refused the request
	firstToken time.Time // of a streamed response; zero: none yet

	span            *tracing.Span // of the request; nil: kvepp does not trace
	prefillReported bool          // the route knows that the prefill has ended
	held            int           // this stream's share of Memory, in bytes
	began           time.Time     // when the stream began
	proxy           string        // its host
	responseBytes   int           // bytes of the response's body
}

// exchange returns that of a new stream.
func (s *Server) exchange(ctx context.Context) *exchange {
	x := &exchange{Server: s, stream: stream{cfg: &s.cfg}, code: "none", began: time.Now(), proxy: proxyOf(ctx)}
	x.in.of = x
	x.takesLists = s.cfg.Gateway == GatewayOwn || s.listTakers.has(x.proxy)
	return x
}

// Process serves one HTTP request.
func (s *Server) Process(envoy extprocv3.ExternalProcessor_ProcessServer) (err error) {
	x := s.exchange(envoy.Context())
	defer func() { // runs last: x.end may panic too
		if p := recover(); p != nil {
			s.panics.Log(s.log, slog.LevelError, "panic in a stream", "panic", p, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "kvepp: internal error")
		}
	}()
	streams, most := s.streams.Add(1), int64(s.cfg.MaxStreams)
	defer s.streams.Add(-1) // after end: all requests are counted when no stream is left
	// The one place where a booking ends, for every end of the stream: end of stream, reset, cancel, panic.
	defer func() { x.end(envoy.Context()) }()
	full := most > 0 && streams > most
	if full && streams > 2*most { // too many even for HTTP responses
		s.metrics.Rejection(causeStreams)
		return status.Error(codes.ResourceExhausted, "kvepp: too many requests are running")
	}
	// kvepp answers each message before it reads the next, so that HTTP/2's flow control holds back what is not sent on
	// yet: a slow reader slows the writer down, and a stream holds no more than its request's body.
	for {
		x.in.ProcessingRequest = new(extprocv3.ProcessingRequest)
		err := envoy.RecvMsg(&x.in)
		refused := x.in.refused
		if err != nil && (refused == nil || x.phase > collect) {
			return x.notReceived(err)
		}
		e := effect{Refuse: refused}
		if refused == nil {
			e = x.step(x.in.ProcessingRequest)
		}
		if x.Server.cfg.Tracer != nil && x.span == nil && x.phase != awaitHeaders {
			x.beginSpan(envoy.Context())
		}
		if e.Note != "" {
			s.note(e.Note)
		}
		switch {
		case full && x.phase == collect:
			// Not a gRPC error: a proxy that fails open would forward the request without a decision.
			e.Refuse = s.turnAway(causeStreams, "too_many_requests", errTooManyStreams)
		case refused == nil && !x.hold():
			e.Refuse = s.turnAway(causeHeldBytes, "too_many_bytes", errTooManyBytes)
		}
		e = x.act(envoy.Context(), e)
		if e.ServedBy != "" && x.route != nil {
			x.reconcile(&e)
		}
		x.learnLists(&e)
		for _, m := range e.Send {
			if err := envoy.Send(m); err != nil {
				x.observe(&e) // the response has begun all the same
				return err
			}
		}
		x.replacement = nil
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

// act does what a step asks for before its messages are sent.
func (x *exchange) act(ctx context.Context, e effect) effect {
	switch {
	case e.Unjudged != "":
		x.unjudged(e.Unjudged)
	case x.Server.cfg.Shadow:
		x.actInShadow(ctx, &e)
	case e.Refuse != nil:
		return x.refuse(e.Refuse)
	case e.Ask:
		return x.ask(ctx)
	}
	return e
}

// notReceived returns the stream's error after a message could not be received.
func (x *exchange) notReceived(err error) error {
	switch code := status.Code(err); {
	case errors.Is(err, io.EOF), code == codes.Canceled:
		// Envoy closed the stream in order. Canceled: the usual end, or the client closed its connection.
		return nil
	case code == codes.ResourceExhausted && x.in.refused == nil:
		x.note("a message was too large to receive, so its request fails: in Envoy's BUFFERED modes, set its buffer " +
			"limit to at most --max-parse-bytes")
	}
	return err
}

// Bytes of messages that admit does not count: of the request, and after its decision, when pieces of the response must
// pass although bodies have taken all memory.
const (
	freeMessage = 64 << 10
	freeRelayed = 1<<20 + 64<<10 // Envoy's buffer of a connection (1 MiB by default) in one message
	maxFirst    = 1 << 20        // the most of a message with headers
)

// admit accounts for a large message before it is received. It returns why the message is refused; nil: it is not.
func (x *exchange) admit(bytes int) *httpError {
	switch {
	case x.phase == awaitHeaders && bytes > maxFirst:
		return headersTooLarge
	case bytes <= freeMessage, x.phase > collect && bytes <= freeRelayed:
		return nil
	}
	before := x.held
	if x.held += bytes; x.Server.cfg.Memory.HoldBody(before, bytes) {
		return nil
	}
	return x.turnAway(causeHeldBytes, "too_many_bytes", errTooManyBytes)
}

// headBytes is the size up to which hold does not count a request's headers: a stream itself takes more.
const headBytes = 4 << 10

// hold accounts for the memory of the stream's request body and headers. It returns false if all streams together
// exceed the budget.
func (x *exchange) hold() bool {
	now := cap(x.body)
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

// turnAway counts a request that kvepp rejects because of load, and returns its response.
func (s *Server) turnAway(cause, code string, err error) *httpError {
	s.metrics.Rejection(cause)
	return s.cfg.shed(code, err)
}

// refuse answers a request that kvepp does not route.
func (x *exchange) refuse(e *httpError) effect {
	x.code, x.refusal = strconv.Itoa(e.status), e.code
	x.span.Fail(e.code)
	x.router.Refused(e.status)
	x.log.Debug("request refused",
		"request_id", router.Clip(x.head.id), "path", router.Clip(x.head.path), "status", e.status, "error", e.message)
	return x.refused(e)
}

// ask has the request routed and books it.
func (x *exchange) ask(ctx context.Context) effect {
	if x.head.id == "" {
		x.head.id, x.head.idGenerated = router.NewRequestID(), true
	}
	if first := x.open.repeated(x.head.decisionName, func() uint64 {
		return x.digest(x.open.seed, x.head.endpoint)
	}); first != nil {
		return x.repeat(first)
	}
	req := x.request()
	if req.BodylessReason == router.ReasonBodyTooLarge {
		x.logTooLarge(req)
	}
	req.Trace, req.Received = x.span, x.began
	route, err := x.router.Route(ctx, req)
	if x.Server.cfg.AccessLog != nil {
		x.model = router.Clip(req.Model) // the name would keep the body in memory
	}
	if ctx.Err() != nil { // the client has gone: no one waits for a response
		if err == nil {
			x.route = route // so that end frees it
		}
		return effect{Close: true}
	}
	if err != nil {
		e := x.Server.cfg.toHTTP(err)
		if e.status >= 500 && e.kind != overloadedError { // overload may cause thousands a second
			path, _, _ := strings.Cut(x.head.path, "?") // clients put keys into queries
			x.refusals.Log(x.log, slog.LevelWarn, "request refused", "request_id", router.Clip(x.head.id), "path",
				router.Clip(path), "status", e.status, "error", err)
		} else {
			x.log.Debug("request refused", "request_id", router.Clip(x.head.id), "path", router.Clip(x.head.path),
				"status", e.status, "error", err)
		}
		x.code, x.refusal = strconv.Itoa(e.status), e.code
		x.span.Fail(e.code)
		return x.refused(e)
	}
	x.route, x.replacement, x.renamed, x.token = route, route.Body, route.Renamed, route.Token
	route.Body = nil          // so that only the send holds it
	if x.replacement != nil { // the original body is released
		x.Server.cfg.Memory.Held.Add(len(x.replacement) - x.held)
		x.held = len(x.replacement)
	}
	x.decisionName = rand.Text()
	x.open.add(x.decisionName, &answered{decision: &route.Decision, token: x.token,
		digest: x.digest(x.open.seed, x.endpoints(&route.Decision))})
	e := x.routed(&route.Decision)
	x.head = x.head.kept()
	return e
}

// observe reads what has been sent on. It runs after Send, so that it delays no byte of the response.
func (x *exchange) observe(e *effect) {
	if e.Status != "" {
		x.code = "invalid"
		if validStatus(e.Status) {
			x.code = strings.Clone(e.Status) // the status would keep all headers in memory
		}
		x.upstreamStatus = x.code
		if x.route != nil {
			x.route.Responding(e.Failure, e.OfEndpoint && x.Server.showsWorker(x.code))
		}
		switch {
		case x.route == nil:
		case e.ContentEncoding == "" || e.ContentEncoding == "identity":
			x.usage = body.NewUsageReader(e.ContentType)
			if x.code == "200" && x.route.StoresResponse() {
				x.responseID = body.NewResponseIDReader(e.ContentType)
			}
		default:
			x.metrics.Unread.Inc()
		}
	}
	x.responseBytes += len(e.Body)
	if x.responseID != nil {
		if id, more := x.responseID.Write(e.Body); !more {
			x.route.Responded(id)
			x.responseID = nil
		}
	}
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

// follow tells the route how far the response has come.
func (x *exchange) follow() {
	stream := x.usage != nil && x.usage.Streaming()
	switch {
	case x.prefillReported:
	case x.usage == nil && x.code == "200" && x.route.AwaitsNote(): // a compressed response begins with its header
	case stream && !x.usage.SawContent() && x.route.Prefill == nil: // the worker still prefills
	case stream && x.code == "200":
		x.route.MarkPrefillCompleted()
		x.prefillReported = true
	default: // a response in one piece, an unreadable one, an error: the prefill ended before
		x.route.ReleasePrefill()
		x.prefillReported = true
	}
	if stream && x.route.TracksOutput() {
		x.route.Generated(x.generated())
	}
}

// An engine may have reasoned without sending the text, so a response may have more tokens than bytes: maxUnsent more,
// and unsentPerSecond more for each second, which no engine exceeds in one response.
const (
	maxUnsent       = 4096
	unsentPerSecond = 5000
)

// canHave reports whether the response can have so many tokens by now. Engines report their number, and routing learns
// from it.
func (x *exchange) canHave(tokens int) bool {
	if most := x.route.MostTokens(); most > 0 && tokens > most {
		return false
	}
	unsent := tokens - x.responseBytes - maxUnsent
	return unsent <= 0 || float64(unsent) <= unsentPerSecond*time.Since(x.began).Seconds()
}

// generated returns the number of tokens that a stream has delivered so far; 0 if it reports a number that cannot be
// true.
func (x *exchange) generated() int {
	reported, counted := x.usage.Generated()
	if !x.canHave(reported) {
		return 0
	}
	if most := x.route.MostTokens(); most > 0 {
		counted = min(counted, most)
	}
	return max(reported, counted)
}

// maxPrompt is more than any engine's context, in tokens.
const maxPrompt = 1 << 24

// reported returns the usage that the response reports. impossible: it cannot be true, and does not count.
func (x *exchange) reported() (u body.Usage, ok, impossible bool) {
	if u, ok = x.usage.Usage(); !ok {
		return u, false, false
	}
	if u.CachedTokens > u.PromptTokens || u.PromptTokens > maxPrompt || !x.canHave(u.CompletionTokens) {
		return body.Usage{}, false, true
	}
	return u, true, false
}

func (x *exchange) end(ctx context.Context) {
	x.Server.cfg.Memory.Held.Give(x.held)
	if x.span != nil {
		defer x.endSpan()
	}
	if x.phase != awaitHeaders && !x.repeating {
		x.metrics.Request(x.code)
		if x.Server.cfg.AccessLog != nil {
			defer x.logAccess() // runs last, even if the rest panics
		}
	}
	if x.Server.cfg.Shadow && x.phase != awaitHeaders {
		x.unjudged(router.ShadowUnserved) // unless it is counted
	}
	if x.route == nil {
		return
	}
	if x.Server.cfg.Shadow && x.code == "200" && !x.complete && x.responseBytes == 0 {
		x.router.Unjudged(noResponseBody)
		x.advise(noResponseBody, x.route.Address)
	}
	x.open.remove(x.decisionName)
	if x.complete && x.code == "200" && x.usage != nil && x.usage.Streaming() {
		x.route.LearnOutput(x.generated())
	}
	x.route.Free()
	response := router.Response{
		Status:       x.upstreamStatus,
		Complete:     x.complete || x.responseMode == filterv3.ProcessingMode_NONE,
		Bytes:        x.responseBytes,
		CachedTokens: -1,
	}
	response.Explained = !response.Complete && len(metadata.ValueFromIncomingContext(ctx, logsResponses)) > 0
	defer func() { x.route.Ended(response) }() // even if the log panics
	if x.usage != nil {
		u, ok, impossible := x.reported()
		if ok {
			response.PromptTokens = u.PromptTokens
		}
		if impossible {
			x.metrics.ImpossibleUsage.Inc()
		}
		if response.Tokens = max(x.generated(), u.CompletionTokens); ok && u.HasCached {
			response.CachedTokens = u.CachedTokens
		}
		if ok && u.HasCached && x.route.Compares() {
			x.metrics.Reported.Add(float64(u.CachedTokens))
			x.metrics.PredictedOfReported.Add(float64(x.route.PredictedCachedTokens))
			x.log.Debug("request ended", "request_id", x.head.id, "status", x.code, "prompt_tokens", u.PromptTokens,
				"cached_tokens", u.CachedTokens, "predicted_cached_tokens", x.route.PredictedCachedTokens)
		}
	}
}

// logTooLarge logs once that bodies are above --max-parse-bytes.
func (x *exchange) logTooLarge(req *router.Request) {
	if !x.Server.tooLargeLogged.Swap(true) {
		path, _, _ := strings.Cut(req.Path, "?") // clients put keys into queries
		x.log.Warn(
			"a request's body is larger than --max-parse-bytes: kvepp forwards it unread, and routes it by load "+
				"only. Raise --max-parse-bytes to route such requests by cache. Logged once",
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

// note logs unusual but tolerated behaviour of the proxy, once for each kind.
func (s *Server) note(what string) {
	if _, seen := s.noted.LoadOrStore(what, true); !seen {
		s.log.Warn("the proxy does something unusual; logged once for each kind", "what", what)
	}
}
