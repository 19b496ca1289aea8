// Package router decides which worker a request goes to, and keeps the books until the request ends.
//
// It owns the way from a request's body to a booked worker: parse, tokenize, hash, match, price, choose and book. It
// never speaks HTTP or Envoy's protocol. Missing knowledge is no error: without a tokenizer, events or a block size, a
// request is routed by load, and the decision gives the reason.
//
// Concurrency: a Router is safe for concurrent use. A Route belongs to one request; its methods may be called from any
// goroutine unless they say otherwise.
package router

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/router/admission"
	"kvepp/router/budget"
	"kvepp/router/ladder"
	"kvepp/router/queue"
	"kvepp/router/record"
	"kvepp/router/session"
	"kvepp/scoring"
)

var (
	// ErrNoEndpoints says that the pool, or the proxy's subset of it, has no endpoint for the request.
	ErrNoEndpoints = errors.New("no endpoint is available for this request")
	// ErrUnknownModel says that every endpoint has another model.
	ErrUnknownModel = errors.New("no endpoint serves this model")
	// ErrConstraints says that no endpoint has all taints that the request requires.
	ErrConstraints = errors.New("no endpoint has all the taints that this request requires")
	// ErrNoPrefill says that decode workers may take the request, but no prefill worker that matches one of them is
	// ready.
	ErrNoPrefill = errors.New(
		"no prefill worker is ready for the decode workers of this model (of their Dynamo namespace, and of their " +
			"zone where a card requires that)",
	)
)

// Request is a request to route.
type Request struct {
	ID string // for logs
	// Received is when its headers came. Zero: when Route was called.
	Received time.Time
	Path     string // as the client sent it, query included
	// Model is the model that the body names. Route sets it; it shares the body's memory. Empty: the body was not read.
	Model string
	Body  []byte // the whole body; nil if BodylessReason is set. Not modified during the call
	// BodylessReason says why there is no Body. Empty: there is one.
	BodylessReason Reason
	// BodyBytes is the number of body bytes seen if Body is not set. It gives an estimate of the request's load.
	BodyBytes int
	// Hints are those of the headers. They take precedence over the body's.
	Hints body.Hints
	// ResponseUnseen says that kvepp is shown nothing of the response's body, so that its first content cannot end the
	// prefill.
	ResponseUnseen bool
	// NamesDynamo says that the client chose Dynamo's id of the request, so that kvepp cannot.
	NamesDynamo bool
	// Rewrite replaces the model that the body names. Empty: it stays, unless a rule of Config.Rewrites replaces it.
	Rewrite string
	// Endpoint is the name of the endpoint that the request shall go to; with EndpointSoft it goes elsewhere while that
	// endpoint is overloaded. Empty, or not a candidate: any.
	Endpoint     string
	EndpointSoft bool
	// Allowed says whether an endpoint's address may be chosen. nil: every address may.
	Allowed func(address string) bool
	// Trace is the request's span, the parent of the router's spans. nil: no tracing.
	Trace *tracing.Span
}

// Decision is the outcome of a choice and its reasons. It does not change after Route returned it.
type Decision struct {
	Name       string // endpoint
	Address    string // host:port for Envoy
	InstanceID uint64
	Rank       uint32
	// RankByAddress says that only the address may select the rank, see pool.Endpoint.
	RankByAddress bool
	// Fallbacks are the addresses of the next cheapest endpoints, in order; nil unless Config.Fallbacks is set.
	Fallbacks []string
	// Cost is that of the endpoint in its leg, FallbackCosts those of Fallbacks; NaN or infinite: not priced.
	Cost          float64
	FallbackCosts []float64

	Reason Reason
	// exact if Reason is ReasonKV; the text's tokens if ReasonMediaPrefix; else an estimate from the body's size
	PromptTokens int
	// tokens of the leading blocks that the index holds, in any tier, for the worker that computes the prompt
	PredictedCachedTokens int
	BlockSize             int // that worker's; 0: not known
	// EngineVersion is the version by whose rules the prompt was tokenized, if the workers' versions make different
	// token ids of it. Empty: they do not, or it was not tokenized.
	EngineVersion string
	// UpperBound says that the worker may have fewer tokens cached than predicted, see kvblock.Traits and
	// Config.UpperBound.
	UpperBound bool
	// UnusableTokens are tokens of full attention's blocks behind the predicted ones that the worker holds and cannot
	// reuse, because layers of another kind, UnusableBy, did not keep what they need. Only hybrid models have such
	// layers.
	UnusableTokens int
	UnusableBy     kvblock.ClassKind
	// IndexAtBound says that the index has evicted blocks to stay within its memory bound: overlaps may be larger than
	// counted.
	IndexAtBound bool
	// Costs are those of the candidates of the destination's leg, with their terms. Chosen is the index of the chosen
	// one. nil unless Config.Explain or the like asks for them.
	Costs  []Cost
	Chosen int
	// Weights are the configuration behind Costs, with the request's overrides; nil with Costs.
	Weights *scoring.Config
	// Session is what the request did to its session, a session.Outcome. Empty: it has none.
	Session string
	Waited  time.Duration // in the queue
	// Ejected are the endpoints that would have been candidates but for their ejection; nil unless explained, as Costs.
	// If EjectedAdmitted is set they were candidates all the same, because all were ejected.
	Ejected         []string
	EjectedAdmitted bool
	// Cordoned are the endpoints that would have been candidates but for their cordon; nil unless explained, as Costs.
	Cordoned []string
	// Trial says that the request is the trial of an ejected endpoint.
	Trial bool
	// Conditional says whether, and why, the decode worker computes the prompt alone, or why not. Empty without
	// Config.Disaggregation, for aggregated workers, and for requests that name a prefill worker.
	Conditional scoring.BypassOutcome
	// InBody says that the body alone names the worker: to a frontend in KV mode, which then needs no prefill worker.
	InBody bool
	// Prefill is the worker that computes the prompt, if the destination does not.
	Prefill *Prefill
	// FirstTokenID is the id, a UUID, that Dynamo's frontend must give the request, so that its worker notes the first
	// token under it. Empty: no note is expected.
	FirstTokenID string
}

// Prefill is the prefill leg of a decision.
type Prefill struct {
	Name       string
	Address    string // host:port; empty for a worker that is reached through Dynamo alone
	InstanceID uint64
	Rank       uint32
	Costs      []Cost // this and the next two are as in Decision
	Chosen     int
	Weights    *scoring.Config
}

// Route is a decision that is booked. Call Free exactly where the request ends.
type Route struct {
	Decision
	// Body is sent to the endpoint in place of the request's body. nil: the request's body.
	Body []byte
	// ServedBy is the endpoint that answered the request, after [Router.Reconcile].
	ServedBy ServedBy
	// Token names the request in the metadata that the proxy's access log repeats, see [Router.BrokenOff]. Empty: not
	// needed.
	Token string
	// Renamed says that Body, and so the response, names another model than the client did. nil: it does not.
	Renamed *Renamed

	placed
	responding
	ending

	record   *Record         // nil: none is kept
	kept     int             // its bytes in records.running
	recorded *record.Request // without its end; nil: it is not recorded
	climb    ladder.Climb    // the zero value without Config.Ladder
	shadow   *shadow         // until Serve; nil: the request is not shadowed
	// elsewhere: another worker answers than the one that PredictedCachedTokens is about.
	elsewhere bool
}

// placed is where a request was booked. The choice sets it, and Reconcile if the proxy chose otherwise.
type placed struct {
	booking  scoring.Booking // on the destination
	prefill  scoring.Booking // on the prefill worker; the zero value without one
	computes pool.Worker     // the worker that computes the prompt
	fetches  pool.Worker     // the decode worker, which has the prompt's blocks afterwards; with Config.Disaggregation
	notes    bool            // the destination notes first tokens on Dynamo's event plane
	weighted int             // cached tokens of a worker that takes the request alone, weighted by tier
	// sameTokenizer says that all workers of the route have kvepp's tokenizer and chat template.
	sameTokenizer bool
	cost          float64        // of all legs, in tokens
	unit          int            // a block of the destination, in tokens
	destination   kvblock.Worker // the worker that the request is sent to
	instance      uint64         // of destination
}

// responding is what a route knows of its response while it comes.
type responding struct {
	promptComputed func(w kvblock.Worker, tokens, blockSize int) // Config.PromptComputed; nil: tokens are not known
	prefilled      atomic.Bool
	estimate       *time.Timer  // ends the prefill by estimate; nil without one
	firsts         *FirstTokens // waits for a note of the first token; nil: none comes
	output         outputTracker
	most           int // tokens of the response; 0: no limit
	observed       observed
	health         health
	outputTokens   int            // of a complete response; 0: not known
	responses      *session.Table // learns the response's id; nil: the endpoint does not store it
}

// ending is what a route gives back when it ends.
type ending struct {
	tenant  queue.Tenant    // who is charged; 0: none
	charged int             // tokens of the prompt
	turn    *admission.Turn // of its conversation; nil: admission does not apply
	lease   session.Lease   // on its session
	final   bool            // the session ends with this request
	freed   atomic.Bool

	// released is called after a booking released load; nil: no request ever waits
	released func()
	computed atomic.Bool // released was called for the end of the prefill
}

// NewRequestID returns an id for a request without one: 128 random bits in the form of Envoy's own ids (RFC 9562,
// version 4).
func NewRequestID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// Router routes the requests of one pool.
type Router struct {
	cfg          Config
	pool         *pool.Pool
	index        *indexer.Index
	book         *scoring.ActiveSequences
	metrics      *metrics.Metrics
	log          *slog.Logger
	scratches    sync.Pool // *scratch
	slots        slots
	records      records
	thresholds   *thresholds
	policy       *atomic.Pointer[Policy]     // in place of cfg's, see SetPolicy; nil: none
	room         *queue.Room[waitingRequest] // nil: no request waits for a worker that is not busy
	admissions   *queue.Room[heldRequest]    // nil: no request waits for room in a KV cache
	panics       loglimit.Limiter            // of log lines about panics
	onRelease    func()                      // Released of the rooms; nil without any
	latest       lastResponses
	modelUse     *modelUse
	promptCounts promptCounts
	servedModels servedModels
	running      versionsRunning
	tokens       atomic.Uint64 // the latest Route.Token
	broken       brokenResponses
	counts       workerCounts
	miscounted   atomic.Uint64 // responses whose prompt tokens differ from kvepp's
	inBody       *atomic.Int32 // inBodyUntried and so on
	unheard      sync.Once     // a warning about a decode worker without KV events
	looking      atomic.Bool   // a look at what waits is planned, see lookSoon
	dry          bool          // see Explain: it books and counts nothing
	rehearsal    func() *Router
}

// Miscounted returns how many responses reported another number of prompt tokens than kvepp counts.
func (r *Router) Miscounted() uint64 { return r.miscounted.Load() }

// New returns a router over the workers of p, the blocks in index and the loads in book.
func New(
	cfg Config,
	p *pool.Pool,
	index *indexer.Index,
	book *scoring.ActiveSequences,
	m *metrics.Metrics,
	log *slog.Logger,
) *Router {
	if cfg.Memory == nil {
		cfg.Memory = budget.New(0)
	}
	r := &Router{slots: newSlots(), cfg: cfg, pool: p, index: index, book: book, metrics: m, log: log,
		thresholds: new(thresholds), policy: new(atomic.Pointer[Policy]), inBody: new(atomic.Int32)}
	r.rehearsal = sync.OnceValue(r.newRehearsal)
	named := cfg.modelNames()
	if cfg.Adapters != nil {
		for adapter := range cfg.Adapters.named {
			named[adapter] = true
		}
	}
	r.modelUse = newModelUse(named)
	r.promptCounts = newPromptCounts(cfg.Models)
	r.records.ring = make([]*Record, max(cfg.Keep, 0))
	showIgnored(m)
	r.scratches.New = func() any { return new(scratch) }
	r.thresholds.start(cfg.Thresholds)
	r.tokens.Store(mathrand.Uint64()) // an earlier process had other tokens
	if cfg.Queue != nil {
		r.room = r.newRoom()
		r.onRelease = r.room.Released
	}
	if cfg.Admission != nil {
		r.admissions = r.newAdmissionRoom()
		others := r.onRelease
		r.onRelease = func() {
			r.admissions.Released()
			if others != nil {
				others()
			}
		}
	}
	m.InitRejections(rejections...)
	for _, reason := range reasons {
		m.InitDecision(string(reason))
	}
	for _, outcome := range scoring.BypassOutcomes {
		m.InitConditional(string(outcome))
	}
	cfg.Metrics.CollectWorkers(r.Workers)
	cfg.Metrics.CollectQueues(r.Queues)
	for model := range cfg.modelLabels() {
		if cfg.Ladder != nil {
			cfg.Ladder.Sums.Init(model)
		}
		cfg.Picker.InitModel(model)
		for _, phase := range []string{phaseAggregated, phasePrefill, phaseDecode} {
			cfg.Metrics.InitModel(phase, model)
		}
		for _, class := range r.cfg.classesOf(model) {
			cfg.Metrics.InitBackpressure(model, class)
		}
	}
	return r
}

// Route chooses a worker for a request and books it there, in one step.
//
// Errors: *body.Error for a body that is not a request; ErrNoEndpoints; ErrUnknownModel; ErrConstraints;
// ErrNoPrefill; ErrCordoned; ErrOverloaded; ErrNoRoom; ErrQueueFull; ErrQueueTimeout; ErrShed; ErrEnding; *LateError;
// ctx's own. Every other failure is a decision with a Reason.
func (r *Router) Route(ctx context.Context, req *Request) (*Route, error) {
	start := time.Now()
	span := req.Trace.Child(spanRoute, start)
	defer span.End()
	p, err := r.prepare(ctx, req, span) // parse, rewrite, tokenize
	defer p.releaseMemory()
	if err == nil {
		err = ctx.Err() // do not book for a client that has gone
	}
	if err != nil {
		r.observeRefusal(&p, err)
		return nil, err
	}
	p.affinity, p.stored = r.cfg.affinityOf(&p), r.storedTarget(req, &p)
	sc := r.takeScratch(span)
	defer r.putScratch(sc)
	r.chooseVersion(sc, &p)
	route, waited, err := r.admitAndDecide(ctx, sc, req, &p) // wait, match, choose, book
	if err == nil {
		route.Waited, route.most = waited, p.most
		if p.stores {
			route.responses = r.cfg.Responses
		}
	}
	r.record(ctx, sc, req, &p, route, waited, err)
	traceRoute(span, &p, route)
	if err != nil {
		r.countRejection(err)
		r.observeRefusal(&p, err)
		return nil, err
	}
	r.observeChoice(&sc.gathered, route, req, &p, start)
	if r.cfg.Recorder != nil {
		r.beginRecording(sc, route, &p)
	}
	r.setBody(route, &p, req)
	r.countDecision(route)
	r.metrics.Phase("pick", start.Add(waited)) // without the time in the queue
	sc.kept = true
	return route, nil
}
