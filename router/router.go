// Package router decides where a request goes, and keeps the books until it ends.
//
// It owns the way from a request's body to a booked worker: parse, tokenize, hash, match, price, choose and book. It never
// speaks HTTP or Envoy's protocol, and it never fails for want of knowledge: without a tokenizer, without events, without a
// block size the request is still routed, by load, and the decision says why.
//
// Concurrency: a Router is safe from any goroutine; a Route belongs to the request it was made for, but its methods may be
// called from any goroutine.
package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/internal/apibody"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
	"kvepp/tokenizer"
	"kvepp/tokenizer/remote"
)

var (
	// ErrNoEndpoints says that no endpoint may take the request: none is in the pool, or none in the proxy's subset.
	ErrNoEndpoints = errors.New("no endpoint is available for this request")
	// ErrUnknownModel says that there are endpoints, but each of them serves another model.
	ErrUnknownModel = errors.New("no endpoint serves this model")
)

// Reason says on what a decision rests. It is a metric's label: few values, none from a client.
type Reason string

// The reasons. Every one but ReasonKV, ReasonMediaPrefix and ReasonApproximate means that only load was priced.
const (
	ReasonKV               Reason = "kv"                    // overlap and load
	ReasonMediaPrefix      Reason = "media_prefix"          // overlap of the prompt up to its first image, audio or video, and load
	ReasonNoBody           Reason = "no_body"               // a request without a body, a GET for example
	ReasonBodyMode         Reason = "body_mode"             // the proxy's body mode does not let the body be waited for
	ReasonBodyTooLarge     Reason = "body_too_large"        // above the size that is parsed
	ReasonUnknownAPI       Reason = "unknown_api"           // a path whose body kvepp does not read
	ReasonNoTokenizer      Reason = "no_tokenizer"          // no --model for the request's model
	ReasonMedia            Reason = "media"                 // an image, audio or video in the prompt, and where it stands is not known
	ReasonUnmapped         Reason = "unmapped"              // of /v1/responses or /v1/messages: something that no chat holds
	ReasonNoChatTemplate   Reason = "no_chat_template"      // a chat, and the model's folder has no template
	ReasonTokenize         Reason = "tokenize_error"        // what only the engine can tokenize, or refuses; the debug log says which
	ReasonRemoteError      Reason = "tokenizer_url_error"   // only the engine at --tokenizer-url knows the tokens, and it failed
	ReasonRemoteTimeout    Reason = "tokenizer_url_timeout" // the same, and it did not answer in time, or had too much to answer
	ReasonRemoteOpen       Reason = "tokenizer_url_open"    // the same, and after many failures it is left alone for a while
	ReasonTokenizerDiffers Reason = "tokenizer_differs"     // kvepp's ids, or the files behind them, were found to be others than the engine's
	ReasonNoBlockSize      Reason = "no_block_size"         // no candidate's block size is known
	ReasonApproximate      Reason = "approximate"           // no events, at all or of the chosen worker: overlap by where requests went before, and load
	ReasonNoCredit         Reason = "no_credit"             // cached blocks have no worth in the cost function
	ReasonNoEvents         Reason = "no_events"             // no candidate announces its blocks
	ReasonPanic            Reason = "panic"                 // a defect of kvepp's, contained; the log has the stack
)

// Request is what is to be routed.
type Request struct {
	ID   string // for logs
	Path string // as the client sent it, query included
	Body []byte // the whole body; nil when Without says why there is none. Not modified while the call runs

	// Without says why Body is not there; empty when it is.
	Without Reason
	// BodyBytes is the size seen of a body that is not given, for an estimate of its load.
	BodyBytes int
	// Allowed says whether an endpoint's address may be chosen; nil allows all.
	Allowed func(address string) bool
}

// Decision is what was decided and why. It does not change after Route returned it.
type Decision struct {
	Name       string // endpoint
	Address    string // host:port for Envoy
	InstanceID uint64
	Rank       uint32

	Reason                Reason
	PromptTokens          int // exact when Reason is ReasonKV; the text's alone with ReasonMediaPrefix; else an estimate from the body's size
	PredictedCachedTokens int // tokens of the leading blocks that the index holds for the worker, in whatever tier
	BlockSize             int // the worker's; 0: not known
	// UpperBound says that the worker may have less cached than predicted, see kvblock.Traits.
	UpperBound bool
	// IndexAtBound says that the index has evicted blocks for want of memory: overlaps may be more than was counted.
	IndexAtBound bool
	Costs        []Cost
}

// Cost is one candidate's price; lower is better.
type Cost struct {
	Name string
	Rank uint32
	Cost float64
	// CachedBlocks is how many leading blocks of the prompt the candidate holds on its device; HostBlocks and DiskBlocks
	// are how many more it holds behind them in host memory, and on disk or in external storage.
	CachedBlocks, HostBlocks, DiskBlocks int
}

// Route is a decision that is booked. Free it exactly where the request ends.
type Route struct {
	Decision
	booking   scoring.Booking
	worker    kvblock.Worker
	served    func(w kvblock.Worker, tokens, blockSize int) // Config.Served, for a prompt whose tokens are known
	prefilled atomic.Bool
}

// MarkPrefillCompleted says that the first content came: the prompt is prefilled. Only the first call counts.
func (r *Route) MarkPrefillCompleted() {
	r.booking.MarkPrefillCompleted()
	if r.served != nil && !r.prefilled.Swap(true) {
		r.served(r.worker, r.PromptTokens, r.BlockSize)
	}
}

// Free ends the request. Only the first call counts.
func (r *Route) Free() { r.booking.Free() }

// Config is what an operator chooses.
type Config struct {
	// Models maps a model's name, as requests give it, to its tokenizer.
	Models map[string]*tokenizer.Model
	// Adapters maps the name of a LoRA adapter, as requests give it for a model and engines announce it with its blocks, to
	// the model that it adapts, whose tokenizer and workers it has. nil: there are none.
	Adapters map[string]string
	// Remote maps a model's name to the engine that is asked for the token ids of requests that Models cannot tokenize; nil
	// asks nobody.
	Remote map[string]*remote.Client
	// Checks maps a model's name to the comparison of Models' ids with its engine's; nil compares nothing.
	Checks map[string]*remote.Check
	// Served is told of each prompt that a worker has computed: how many tokens it has, and how many a block of the worker's,
	// 0 if that is not known. nil: nobody is.
	Served func(w kvblock.Worker, tokens, blockSize int)
	// Scoring holds the knobs of the cost function. It must have passed Validate. If its OverlapScoreCredit is 0 the index
	// is never asked.
	Scoring scoring.Config
	// Predict says how long a worker is believed to hold the blocks of the requests it is sent, whatever its events say.
	Predict Predict
}

// Predict is how routing decisions count as stores. The zero value: they do not.
type Predict struct {
	// TTL is how long a block counts after the latest request with it. 0: not at all.
	TTL time.Duration
	// LRU lets blocks count until the worker's cache would be full, instead of for a time; TTL still holds for workers of
	// which the number of blocks is not known.
	LRU bool
	// Alone says that there are no events: overlap is predicted or not known.
	Alone bool
	// Silent is the TTL for a worker that should send events and does not. 0: TTL.
	Silent time.Duration
}

// lifetime returns how long w is believed to hold a block it was sent.
func (p *Predict) lifetime(w *pool.Worker) indexer.Lifetime {
	if p.LRU && w.TotalKVBlocks > 0 {
		return indexer.Lifetime{Blocks: w.TotalKVBlocks}
	}
	if w.Silent && p.Silent > 0 {
		return indexer.Lifetime{TTL: p.Silent}
	}
	return indexer.Lifetime{TTL: p.TTL}
}

// Router routes the requests of one pool.
type Router struct {
	cfg     Config
	pool    *pool.Pool
	index   *indexer.Index
	book    *scoring.ActiveSequences
	metrics *metrics.Metrics
	log     *slog.Logger
	scratch sync.Pool // *decision
}

// New returns a router over the workers of p, the blocks in index and the loads in book.
func New(cfg Config, p *pool.Pool, index *indexer.Index, book *scoring.ActiveSequences, m *metrics.Metrics, log *slog.Logger) *Router {
	r := &Router{cfg: cfg, pool: p, index: index, book: book, metrics: m, log: log}
	r.scratch.New = func() any { return new(decision) }
	return r
}

// prompt is a request's body as routing sees it.
type prompt struct {
	model  string             // without an adapter's; empty when the body was not read
	lora   string             // the adapter; empty without one
	salt   string             // cache namespace
	tokens []tokenizer.Prompt // nil without a tokenizer
	isl    int                // tokens over all prompts, or an estimate
	reason Reason             // ReasonKV or ReasonMediaPrefix when tokens are there
}

// bytesPerToken turns a body's size into an estimate of its tokens, for the load of a prompt that was not tokenized.
// English text in JSON is near it; nothing depends on it but the balance among such requests.
const bytesPerToken = 4

// Route chooses a worker for a request and books it there, in one step.
//
// Errors: *apibody.Error for a body that is not a request; ErrNoEndpoints; ErrUnknownModel; ctx's own. Every other trouble
// is a decision with a Reason.
func (r *Router) Route(ctx context.Context, req *Request) (*Route, error) {
	start := time.Now()
	p, err := r.prepare(ctx, req)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err // the client has gone: do not book for nobody
	}
	d := r.scratch.Get().(*decision)
	defer r.scratch.Put(d)
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	route, err := r.choose(d, snapshot, req, &p)
	if err != nil {
		return nil, err
	}
	r.metrics.Decision(string(route.Reason))
	r.metrics.Predicted.Add(float64(route.PredictedCachedTokens))
	if route.UpperBound {
		r.metrics.UpperBound.Inc()
	}
	r.metrics.Phase("pick", start)
	if r.log.Enabled(ctx, slog.LevelDebug) {
		r.log.Debug("routed", "request_id", req.ID, "path", req.Path, "model", p.model, "lora", p.lora, "worker", route.Name, "rank", route.Rank,
			"address", route.Address, "reason", route.Reason, "prompt_tokens", route.PromptTokens,
			"predicted_cached_tokens", route.PredictedCachedTokens, "upper_bound", route.UpperBound, "index_at_bound", route.IndexAtBound, "costs", route.Costs)
	}
	return route, nil
}

// prepare reads and tokenizes the body. A panic in there is a defect, but not a reason to refuse a request.
func (r *Router) prepare(ctx context.Context, req *Request) (p prompt, err error) {
	p = prompt{reason: req.Without, isl: max(len(req.Body), req.BodyBytes) / bytesPerToken}
	if req.Without != "" {
		return p, nil
	}
	defer func() {
		if c := recover(); c != nil {
			r.log.Error("panic while reading a request; it is routed by load", "request_id", req.ID, "panic", c, "stack", string(debug.Stack()))
			p, err = prompt{model: p.model, reason: ReasonPanic, isl: p.isl}, nil
		}
	}()
	at := time.Now()
	body, err := apibody.ParseRequest(req.Path, req.Body)
	at = r.metrics.Phase("parse", at)
	if errors.Is(err, apibody.ErrUnknownAPI) {
		p.reason = ReasonUnknownAPI
		return p, nil
	}
	if err != nil {
		return p, err
	}
	p.model, p.salt = body.Model, body.CacheSalt
	if adapted, ok := r.cfg.Adapters[body.Model]; ok {
		p.model, p.lora = adapted, body.Model
	}
	p.tokens, p.reason, err = r.tokenize(ctx, p.model, body, req)
	r.metrics.Phase("tokenize", at)
	if err != nil {
		r.log.Debug("request not tokenized; it is routed by load", "request_id", req.ID, "error", err)
	}
	if p.tokens == nil {
		return p, nil
	}
	p.isl = 0
	for _, t := range p.tokens {
		p.isl += len(t.IDs)
		if t.Certain < len(t.IDs) {
			p.reason = ReasonMediaPrefix
		}
	}
	return p, nil
}

// tokenize returns the prompts of a request to the model of that name and ReasonKV, or nil and why there are none. err is for
// the log.
func (r *Router) tokenize(ctx context.Context, name string, body *apibody.Request, req *Request) (prompts []tokenizer.Prompt, reason Reason, err error) {
	model, engine, check := r.cfg.Models[name], r.cfg.Remote[name], r.cfg.Checks[name]
	switch {
	case check.Differs():
		return nil, ReasonTokenizerDiffers, nil
	case body.HasMedia && model == nil:
		return nil, ReasonMedia, nil
	case body.Unmapped != "":
		reason, err = ReasonUnmapped, fmt.Errorf("router: %s has no place in a chat", body.Unmapped)
	case model != nil:
		if prompts, err = model.Tokenize(body); err == nil {
			check.Offer(req.Path, req.Body)
		}
	default:
		given := *body
		if engine != nil {
			given.TokenData = nil // a field of Dynamo's, which this engine does not read
		}
		prompts, err = tokenizer.Given(&given) // token ids from the client need no tokenizer
	}
	switch {
	case err == nil:
		return prompts, ReasonKV, nil
	case reason == "":
		reason = reasonOf(err)
	}
	if engine == nil || body.HasMedia || !engineMayKnow(err, reason) { // the engine's /tokenize leaves media out
		return nil, reason, err
	}
	at := time.Now()
	ids, remoteErr := engine.Tokenize(ctx, body, req.Body)
	r.metrics.Phase("tokenizer_url", at)
	switch remote.OutcomeOf(remoteErr) {
	case remote.OK:
		return tokenizer.Certain(ids), ReasonKV, nil
	case remote.Failed:
		reason = ReasonRemoteError
	case remote.TimedOut, remote.Busy:
		reason = ReasonRemoteTimeout
	case remote.Open:
		reason = ReasonRemoteOpen
	}
	return nil, reason, errors.Join(err, remoteErr)
}

// engineMayKnow reports whether what kvepp could not tokenize is something that the engine can: not a request that it
// refuses, and not a template that raised an error.
func engineMayKnow(err error, reason Reason) bool {
	return reason == ReasonUnmapped || reason == ReasonNoTokenizer || reason == ReasonNoChatTemplate || tokenizer.IsUnknown(err)
}

// reasonOf names why a request could not be tokenized.
func reasonOf(err error) Reason {
	switch {
	case errors.Is(err, tokenizer.ErrNoIDs):
		return ReasonNoTokenizer
	case errors.Is(err, tokenizer.ErrMedia):
		return ReasonMedia
	case errors.Is(err, tokenizer.ErrNoChatTemplate):
		return ReasonNoChatTemplate
	}
	return ReasonTokenize
}

// decision is the scratch memory of one choice, reused.
type decision struct {
	workers    []pool.Worker // the candidates
	candidates []scoring.Candidate
	costs      []float64
	variants   []variant
	local      []kvblock.LocalHash // of one prompt
	scores     indexer.OverlapScores
}

// variant is a prompt cut for one block size. Workers of one model usually share one.
type variant struct {
	blockSize int
	eagle     bool
	prompt    scoring.Prompt
	certain   []int     // by prompt: how many blocks of its chain are the engine's, and not only the load book's
	overlap   []overlap // indexed by worker number, summed over the prompts; 0 beyond its length
}

// overlap is how many leading blocks a worker holds on its device, and behind them in the tiers that cost the same.
type overlap struct{ device, host, disk int32 }

func (v *variant) overlapOf(w kvblock.Worker) overlap {
	if int(w) < len(v.overlap) {
		return v.overlap[w]
	}
	return overlap{}
}

func (r *Router) choose(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt) (*Route, error) {
	d.workers, d.candidates, d.variants = d.workers[:0], d.candidates[:0], d.variants[:0]
	otherModel := 0
	for _, w := range snapshot.Workers {
		switch {
		case w.Role != pool.Aggregated: // prefill and decode workers need a second leg, which is not there yet
		case req.Allowed != nil && !req.Allowed(w.Address):
		case p.model != "" && w.Model != "" && w.Model != p.model:
			otherModel++
		default:
			d.workers = append(d.workers, w)
		}
	}
	switch {
	case len(d.workers) == 0 && otherModel > 0:
		return nil, fmt.Errorf("%w: %q", ErrUnknownModel, p.model)
	case len(d.workers) == 0:
		return nil, ErrNoEndpoints
	}

	reason := p.reason
	if p.tokens != nil {
		reason = r.match(d, p)
	}
	for _, w := range d.workers {
		c := scoring.Candidate{Worker: w.Worker}
		if v := d.variantOf(&w); v != nil {
			c.Prompt = &v.prompt
			o := v.overlapOf(w.Worker)
			c.DeviceBlocks, c.HostBlocks, c.DiskBlocks = int(o.device), int(o.host), int(o.disk)
		} else if w.BlockSize > 0 {
			c.Prompt = &scoring.Prompt{BlockSize: w.BlockSize}
		}
		d.candidates = append(d.candidates, c)
	}
	at := time.Now()
	if cap(d.costs) < len(d.candidates) {
		d.costs = make([]float64, len(d.candidates))
	}
	costs := d.costs[:len(d.candidates)]
	// The book's request ids would be the client's x-request-id, which need not be unique: the booking is named by nobody.
	sel, booking, err := r.book.SelectAndAdd(scoring.Request{ISLTokens: p.isl}, d.candidates, &r.cfg.Scoring, nil, costs)
	r.metrics.Phase("select", at)
	if err != nil {
		return nil, fmt.Errorf("router: %w", err)
	}
	w, chosen := &d.workers[sel.Index], &d.candidates[sel.Index]
	if w.Silent && reason == ReasonKV {
		reason = ReasonApproximate
	}
	r.predict(d, w)
	route := &Route{booking: booking, worker: w.Worker, Decision: Decision{
		Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, BlockSize: w.BlockSize,
		Reason: reason, PromptTokens: p.isl,
		PredictedCachedTokens: (chosen.DeviceBlocks + chosen.HostBlocks + chosen.DiskBlocks) * w.BlockSize,
		UpperBound:            w.UpperBound && chosen.DeviceBlocks+chosen.HostBlocks+chosen.DiskBlocks > 0,
		IndexAtBound:          r.index.AtBound(),
		Costs:                 make([]Cost, len(costs)),
	}}
	if p.tokens != nil {
		route.served = r.cfg.Served
	}
	for i := range costs {
		c := &d.candidates[i]
		route.Costs[i] = Cost{d.workers[i].Name, d.workers[i].Rank, costs[i], c.DeviceBlocks, c.HostBlocks, c.DiskBlocks}
	}
	return route, nil
}

// match hashes the prompt once for every distinct block size among the candidates and looks the hashes up.
func (r *Router) match(d *decision, p *prompt) Reason {
	sized, announcing, differs := false, false, false
	for i := range d.workers {
		w := &d.workers[i]
		if w.OtherTokenizer {
			differs = true
			continue
		}
		if w.BlockSize == 0 || w.Announced != 0 {
			continue
		}
		sized = true
		announcing = announcing || w.Announces()
		if d.variantOf(w) == nil {
			d.variants = append(d.variants, r.cut(d, p, w.BlockSize, w.EAGLE))
		}
	}
	switch {
	case !sized && differs:
		return ReasonTokenizerDiffers
	case !sized:
		return ReasonNoBlockSize
	case r.cfg.Scoring.OverlapScoreCredit == 0:
		return ReasonNoCredit
	case r.cfg.Predict.Alone && p.reason == ReasonKV:
		return ReasonApproximate
	case !announcing && !r.cfg.Predict.Alone:
		return ReasonNoEvents
	}
	return p.reason
}

// predict tells the index what the chosen worker is about to compute, so that the next request with the same beginning
// knows.
func (r *Router) predict(d *decision, w *pool.Worker) {
	v, life := d.variantOf(w), r.cfg.Predict.lifetime(w)
	if v == nil || life == (indexer.Lifetime{}) || r.cfg.Scoring.OverlapScoreCredit == 0 {
		return
	}
	at := time.Now()
	for i, chain := range v.prompt.Chains {
		r.index.Predict(w.Worker, chain[:v.certain[i]], life)
	}
	r.metrics.Phase("predict", at)
}

func (r *Router) cut(d *decision, p *prompt, blockSize int, eagle bool) variant {
	at := time.Now()
	var before variant // whose memory is used again
	if n := len(d.variants); n < cap(d.variants) {
		before = d.variants[:n+1][n]
	}
	v := variant{blockSize: blockSize, eagle: eagle, certain: before.certain[:0], overlap: before.overlap[:0]}
	v.prompt = scoring.Prompt{BlockSize: blockSize, Chains: make([][]kvblock.SequenceHash, 0, len(p.tokens))}
	options := kvblock.HashOptions{BlockSize: blockSize, EAGLE: eagle, LoRAName: p.lora, CacheNamespace: p.salt}
	for _, t := range p.tokens {
		d.local = kvblock.AppendLocalHashes(d.local[:0], t.IDs[:t.Certain], options)
		v.prompt.Chains = append(v.prompt.Chains, kvblock.AppendSequenceHashes(make([]kvblock.SequenceHash, 0, len(d.local)), d.local))
	}
	at = r.metrics.Phase("hash", at)
	for _, chain := range v.prompt.Chains {
		v.certain = append(v.certain, len(chain))
		if r.cfg.Scoring.OverlapScoreCredit == 0 {
			continue
		}
		r.index.FindMatches(chain, &d.scores)
		for _, o := range d.scores.Overlaps() {
			if n := int(o.Worker) + 1; n > len(v.overlap) {
				v.overlap = append(v.overlap, make([]overlap, n-len(v.overlap))...)
			}
			sum, lower := &v.overlap[o.Worker], d.scores.Extension(o.Worker)
			sum.device += int32(o.Blocks)
			sum.host += int32(lower.Host)
			sum.disk += int32(lower.Disk + lower.External)
		}
	}
	for i, t := range p.tokens {
		if t.Certain < len(t.IDs) {
			v.prompt.Chains[i] = appendOwn(v.prompt.Chains[i], options.Blocks(len(t.IDs)))
		}
	}
	r.metrics.Phase("match", at)
	return v
}

// appendOwn appends what stands, in the load book alone, for the blocks behind a prompt's certain tokens: their hashes are
// not known, so they count as the request's own, shared with nobody.
func appendOwn(chain []kvblock.SequenceHash, blocks int) []kvblock.SequenceHash {
	for len(chain) < blocks {
		chain = append(chain, kvblock.SequenceHash(rand.Uint64()))
	}
	return chain
}

// variantOf returns the prompt as the worker's engine cuts it; nil when it was not hashed for it.
func (d *decision) variantOf(w *pool.Worker) *variant {
	if w.Announced != 0 || w.OtherTokenizer {
		return nil
	}
	for i := range d.variants {
		if v := &d.variants[i]; v.blockSize == w.BlockSize && v.eagle == w.EAGLE {
			return v
		}
	}
	return nil
}
