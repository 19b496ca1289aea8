package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"kvepp/internal/tracing"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/prompt/remote"
	"kvepp/router/budget"
	"kvepp/scoring"
)

// Renamed is a model's name before and after a rewrite: as the client gave it, and as the endpoint gets it.
type Renamed struct {
	Requested, Upstream string
	label               string // Requested, as a metric's label
}

// prepared is a request's body as routing sees it.
type prepared struct {
	model   string   // the base model of an adapter; empty if the body was not read
	renamed *Renamed // nil: the endpoint gets the client's name
	lora    string   // the adapter; empty without one
	label   string   // the adapter, if the operator or an engine named it: as a metric's label
	// mustBeNamed restricts the candidates to workers that report the model.
	mustBeNamed bool
	salt        string          // cache namespace
	spaces      []prompt.Space  // of each prompt, if these differ; nil: lora and salt
	unnamed     bool            // KV events do not name the namespace
	writeOnly   bool            // the engine reads none of its cache for the request
	tokens      []prompt.Prompt // nil without a tokenizer
	versions    []versioned     // by version of the engine, if these differ; nil: they do not
	version     *prompt.Model   // whose tokens are used, if versions differ
	isl         int             // tokens of all prompts, or an estimate
	previous    string          // id of the stored response that the request continues; shares the body's memory
	stores      bool            // the endpoint may store its response
	most        int             // tokens that all responses may have; 0: no limit
	forward     []byte          // replaces the body; nil: it stays
	inject      *body.Request   // the body, if it may be changed after the choice; nil: it may not
	tokenData   bool            // by the prompt's token ids
	hints       body.Hints      // of headers and body
	// scoring is the router's configuration with the request's overrides. nil: no overrides.
	scoring     *scoring.Config
	priority    int32     // of its objective; below 0 the request is refused instead of waiting
	pins        body.Pins // none if pinning is not allowed
	api         body.API  // zero: the body was not read
	affinity    affinity  // of the request's session
	stored      target    // the worker that has the stored response which the request names
	constraints scoring.Constraints
	// the response shows nothing before its end: it comes in one piece, or kvepp does not see it
	whole  bool
	held   int           // bytes of tokens, forward and inject, counted until the request is routed
	heldIn *budget.Share // the share that they are counted in
	// ReasonKV, ReasonKVRendered, ReasonMediaPrefix or ReasonApproximate when tokens are there
	reason    Reason
	estimated bool // tokens are not ids, but pieces of the prompt's text
}

// releaseMemory ends the count of the prompt's memory.
func (p *prepared) releaseMemory() {
	if p.held > 0 {
		p.heldIn.Give(p.held)
	}
}

// errNotDirected refuses a request that must name its worker and does not.
var errNotDirected = &body.Error{Code: body.CodeMissingField, Param: "nvext.backend_instance_id",
	Message: "'nvext.backend_instance_id' is missing: in direct routing mode a request must name its worker."}

// prepare reads, rewrites and tokenizes the body, below a span. A panic in it is a defect; the request is then routed
// by load.
func (r *Router) prepare(ctx context.Context, req *Request, span *tracing.Span) (p prepared, err error) {
	given := req.Hints
	defer func() {
		p.hints = r.follow(given)
		p.priority = r.cfg.Objectives.lift(&p.hints)
	}()
	p = prepared{reason: req.BodylessReason, isl: max(len(req.Body), req.BodyBytes) / bytesPerToken}
	if req.BodylessReason != "" {
		return p, nil
	}
	g := reading{router: r}
	defer func() { // runs last, after any failure
		r.keep(&p, &g, len(req.Body))
		g.end()
	}()
	defer func() {
		if c := recover(); c != nil {
			r.panics.Log(r.log, slog.LevelError, "panic while reading a request; it is routed by load",
				"request_id", req.ID, "panic", c, "stack", string(debug.Stack()))
			// what was read before the panic stays valid: the candidates, and the body to forward
			p.tokens, p.reason, err = nil, ReasonPanic, nil
		}
	}()
	var until time.Time // zero: no deadline
	if r.cfg.PickTimeout > 0 {
		until = time.Now().Add(r.cfg.PickTimeout)
	}
	body, at, err := r.readBody(ctx, until, &g, req, span)
	if err != nil {
		return r.unread(p, req, err)
	}
	req.Model = body.Model
	given = req.Hints.WithDefaults(body.Hints)
	if err := r.readRouting(&p, req, body, given.Tenant); err != nil {
		return p, err
	}
	if r.cfg.tokenless() {
		p.reason = ReasonMode
		return p, nil
	}
	p.tokens, p.versions, p.reason, err = r.tokenize(ctx, until, &g, p.model, body, p.seen(req))
	done := r.metrics.Phase("tokenize", at)
	if span != nil {
		span.Phase(spanTokenize, at, done,
			tracing.Int("kvepp.prompts", len(p.tokens)), tracing.Text("kvepp.reason", string(p.reason)))
	}
	if err != nil {
		r.log.Debug("request not tokenized; it is routed by load", "request_id", req.ID, "error", err)
	}
	if p.tokens == nil && r.cfg.EstimateTokens {
		if p.tokens = prompt.Estimate(body); p.tokens != nil {
			p.estimated, p.reason = true, ReasonApproximate
		}
	}
	if p.tokens == nil {
		return p, nil
	}
	p.countTokens()
	p.tokenData = r.cfg.InjectTokens && p.reason == ReasonKV && len(p.tokens) == 1 && body.TakesTokenData()
	if p.tokenData || r.mayNameInBody(&p) {
		p.inject = body
	}
	switch {
	case p.writeOnly:
		p.reason = ReasonCacheNotRead
	case p.unnamed && p.reason.exact():
		p.reason = ReasonApproximate
	}
	return p, nil
}

// tokenless reports whether decisions need no tokens of the prompt.
func (c *Config) tokenless() bool { return c.Scoring.Mode != scoring.KV && !c.CountTokens }

// readBody waits for its turn and parses the body. until is the deadline; zero: none. It also returns when the body was
// parsed. The caller ends g. Errors: begin's and parse's.
func (r *Router) readBody(ctx context.Context, until time.Time, g *reading, req *Request, span *tracing.Span) (
	payload *body.Request, parsed time.Time, err error) {
	began := time.Now()
	size := max(len(req.Body), req.BodyBytes)
	if *g, err = r.begin(ctx, until, size); err != nil {
		return nil, time.Time{}, err
	}
	if size > quickBytes {
		began = r.metrics.Phase("wait", began)
	}
	how := body.Parser{Python: !r.cfg.Frontends, NoTokens: r.cfg.tokenless()}
	payload, err = g.parse(ctx, until, how, req)
	parsed = r.metrics.Phase("parse", began)
	if span != nil {
		span.Phase(spanParse, began, parsed, tracing.Int("kvepp.body_bytes", len(req.Body)))
	}
	return payload, parsed, err
}

// unread returns the prompt of a request whose body could not be read. The request is routed by load, unless it is
// invalid or its client closed the connection: then unread returns the error.
func (r *Router) unread(p prepared, req *Request, err error) (prepared, error) {
	switch {
	case errors.Is(err, body.ErrUnknownAPI):
		p.reason = ReasonUnknownAPI
	case errors.Is(err, body.ErrPythonJSON) && r.cfg.TenantSalt: // it would pass without its tenant's salt
		return p, &body.Error{Code: body.CodeInvalidJSON, Message: "The request body is not JSON in UTF-8 that " +
			"can be given a tenant's cache salt."}
	case errors.Is(err, body.ErrTooManyValues), errors.Is(err, body.ErrPythonJSON),
		errors.Is(err, errPickTimeout), errors.Is(err, errPanic):
		p.reason = reasonOf(err)
		r.log.Debug("request not read; it is routed by load", "request_id", req.ID, "error", err)
	default:
		return p, err
	}
	return p, nil
}

// readRouting sets what the body says about routing: the model after rewrites, the cache namespace, pins, overrides and
// constraints; and the body for the endpoint. Errors are the client's.
func (r *Router) readRouting(p *prepared, req *Request, payload *body.Request, tenant string) (err error) {
	changes, salt := r.cfg.changes(), r.cfg.namespace(payload, tenant)
	if payload.Model == "" { // as SGLang's /generate
		if all := r.Models(); len(all) == 1 {
			payload.Model = all[0]
		}
	}
	// A header is not always UTF-8. The model is in the JSON of the body, and a label.
	if target := strings.ToValidUTF8(req.Rewrite, "\ufffd"); target != "" && target != payload.Model {
		p.renamed = &Renamed{Requested: strings.Clone(payload.Model), Upstream: target, label: "other"}
		if r.knows(payload.Model) {
			p.renamed.label = p.renamed.Requested
		}
		payload.Model, changes.Model = target, target
	} else if rule, target := r.cfg.Rewrites.Of(payload.Model); rule != nil {
		// Copies: metrics, and the route until its end, keep these names, and the body's text would keep the body.
		requested, label := strings.Clone(payload.Model), strings.Clone(rule.Label(payload.Model))
		r.metrics.Rewritten(rule.Name, label, target)
		if target != payload.Model {
			p.renamed = &Renamed{Requested: requested, Upstream: target, label: label}
			payload.Model, changes.Model = target, target
		}
	}
	if r.cfg.TenantSalt && salt != "" {
		changes.CacheSalt = saltPrefix + salt
	}
	p.forward = payload.Forward(req.Body, changes)
	if p.pins, err = r.followPins(payload.Pins); err != nil {
		return err
	}
	if r.cfg.Scoring.Mode == scoring.Direct && p.pins.Worker.Key == "" {
		return errNotDirected
	}
	p.scoring, p.constraints = r.followOverrides(&payload.Overrides), r.followConstraints(&payload.Constraints)
	p.most, p.previous, p.stores = payload.MostTokens(), payload.PreviousResponse, payload.Stores
	p.model, p.api, p.salt, p.whole = payload.Model, payload.API, salt, !payload.Stream || req.ResponseUnseen
	p.writeOnly = prompt.WritesCacheOnly(r.cfg.Engine, payload)
	r.readSpaces(p, payload)
	if r.modelUse.request(p.model, p.lora) {
		r.modelUse.logUnused(r.workerModels(), r.log)
	}
	p.mustBeNamed = r.cfg.StrictModel && !r.cfg.names(p.model) && (p.lora == "" || r.cfg.Engine == prompt.SGLang)
	return nil
}

// bytesPerID is the memory of one prompt token in bytes: its id, and its share of a block's hashes. bytesPerPrompt is
// that of one prompt beside its tokens: what tokenizer, index and load book have of each, and their allocations.
const (
	bytesPerID     = 5
	bytesPerPrompt = 384
)

// keep counts what the prompt keeps until the request is routed. size is the body's, in bytes. Without room beside the
// bodies' the token ids are dropped: the request is routed by load. Those of a large body take the room of its reading.
func (r *Router) keep(p *prepared, g *reading, size int) {
	p.held, p.heldIn = p.keeps(size), r.cfg.Memory.KeptShare(g.size)
	if g.size <= budget.LargeBody && !r.cfg.Memory.HoldBody(budget.LargeBody, p.held) && p.tokens != nil {
		all := p.held
		p.tokens, p.versions, p.inject, p.reason = nil, nil, nil, ReasonBodyValues
		p.held = p.keeps(size)
		p.heldIn.Give(all - p.held)
	} else if g.size > budget.LargeBody {
		p.heldIn.Add(p.held)
	}
}

// keeps returns how many bytes the prompt keeps until the request is routed. size is the body's, in bytes.
func (p *prepared) keeps(size int) int {
	n := len(p.forward)
	for i := range p.tokens {
		n += (bytesPerID*len(p.tokens[i].IDs) + bytesPerPrompt) * max(len(p.versions), 1)
	}
	if p.inject != nil {
		n += body.ReadCostPerByte * size
	}
	return n
}

// seen returns the request with the body that its endpoint gets: an engine is asked about that body.
func (p *prepared) seen(req *Request) *Request {
	if p.renamed == nil {
		return req
	}
	changed := *req
	changed.Body = p.forward
	return &changed
}

// tokenize returns the prompts of a request, and ReasonKV or ReasonKVRendered; or nil and the reason why there are
// none. It returns by until; zero: no deadline. name is the model's. err is for the log. versions is as in
// tokenizeByVersion.
func (r *Router) tokenize(
	ctx context.Context,
	until time.Time,
	g *reading,
	name string,
	payload *body.Request,
	req *Request,
) (prompts []prompt.Prompt, versions []versioned, reason Reason, err error) {
	model, engine, check := r.cfg.Models[name], r.cfg.engineOf(name), r.cfg.Checks[name]
	offer := func() {
		if !r.dry {
			check.Offer(req.Path, req.Body)
		}
	}
	running := r.running.of(r.pool, r.cfg.Models, name)
	switch {
	case payload.TooLarge != nil:
		return nil, nil, reasonOf(payload.TooLarge), payload.TooLarge
	case check.Differs():
		return nil, nil, ReasonTokenizerDiffers, nil
	case payload.HasMedia && model == nil:
		return nil, nil, ReasonMedia, nil
	case payload.Unmapped != "":
		reason, err = ReasonUnmapped, fmt.Errorf("router: %s has no place in a chat", payload.Unmapped)
	case len(running) > 1:
		prompts, versions, err = g.tokenizeByVersion(ctx, until, running, payload)
		if err == nil {
			offer()
		}
	case model != nil:
		if len(running) == 1 {
			model = running[0]
		}
		if prompts, err = g.tokenize(ctx, until, model, payload); err == nil {
			offer()
		}
	default:
		given := *payload
		if engine != nil {
			given.TokenData = nil // a field of Dynamo's, which this engine does not read
		}
		prompts, err = prompt.Given(&given) // token ids from the client need no tokenizer
	}
	switch {
	case err == nil:
		return prompts, versions, ReasonKV, nil
	case reason == "":
		reason = reasonOf(err)
	}
	if engine == nil || payload.HasMedia || !engineMayKnow(err, reason) { // the engine's /tokenize leaves media out
		return nil, nil, reason, err
	}
	g.leaveSlot() // let other bodies be read while the engine is asked
	at := time.Now()
	limited, cancel := by(ctx, until)
	defer cancel()
	ids, remoteErr := engine.Tokenize(limited, payload, req.Body)
	r.metrics.Phase("tokenizer_url", at)
	switch remote.OutcomeOf(remoteErr) {
	case remote.OK:
		return prompt.Certain(ids), nil, ReasonKVRendered, nil
	case remote.Failed:
		reason = ReasonRemoteError
	case remote.TimedOut, remote.Busy:
		reason = ReasonRemoteTimeout
	case remote.Open:
		reason = ReasonRemoteOpen
	}
	return nil, nil, reason, errors.Join(err, remoteErr)
}

// engineOf returns the engine that tokenizes the requests of a model that kvepp cannot; nil: none.
func (c *Config) engineOf(model string) *remote.Client {
	engine := c.Remote[model]
	if engine == nil && c.RemoteOf != nil {
		engine = c.RemoteOf(model)
	}
	return engine
}

// engineMayKnow reports whether the engine may be able to tokenize what kvepp could not. It cannot for a request that
// it refuses, or a template that raised an error.
func engineMayKnow(err error, reason Reason) bool {
	return reason == ReasonUnmapped || reason == ReasonNoTokenizer || reason == ReasonNoChatTemplate ||
		prompt.IsUnknown(err)
}

// reasonOf returns the reason for a tokenization error.
func reasonOf(err error) Reason {
	switch {
	case errors.Is(err, errPickTimeout):
		return ReasonPickTimeout
	case errors.Is(err, errPanic):
		return ReasonPanic
	case errors.Is(err, body.ErrTooManyValues), errors.Is(err, prompt.ErrMemory):
		return ReasonBodyValues
	case errors.Is(err, body.ErrPythonJSON):
		return ReasonBodyEncoding
	case errors.Is(err, prompt.ErrNoIDs):
		return ReasonNoTokenizer
	case errors.Is(err, prompt.ErrMedia):
		return ReasonMedia
	case errors.Is(err, prompt.ErrNoChatTemplate):
		return ReasonNoChatTemplate
	}
	return ReasonTokenize
}
