package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Router exports the metrics of Dynamo's own KV router, under its names, labels and buckets, so that its dashboards and
// alerts keep working. Series exist at zero from the start. Exceptions: the series of a worker exist while it is in the
// pool, and those of a model that is not configured from its first request. A nil Router exports nothing.
//
// Dynamo's frontend observes the time between output tokens only if it tracks output blocks. kvepp observes it for
// every streamed response.
//
// Source: what `python -m dynamo.frontend --router-mode kv` 1.6.1 answers to GET /metrics; package e2e compares both.
type Router struct {
	registry *prometheus.Registry
	identity Identity

	started, finished          prometheus.Counter
	ttft, itl, output, hitRate prometheus.Histogram
	input                      *prometheus.HistogramVec
	best, selected, reused     *prometheus.CounterVec
	backpressure               *prometheus.CounterVec

	models sync.Map // modelPhase -> *modelSeries
	labels modelLabels
}

// Identity holds the labels that all series of one router have.
type Identity struct {
	Namespace string // of the workers: label dynamo_namespace
	Component string // of the workers: label dynamo_component
	RouterID  uint64 // Dynamo's id of an instance, for this process
}

type modelPhase struct{ phase, model string }

type modelSeries struct {
	input                  prometheus.Observer
	best, selected, reused prometheus.Counter
}

// Dynamo's buckets. Its logarithmic ones are rounded to two digits.
var (
	ttftBuckets = []float64{
		0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480,
	}
	itlBuckets    = []float64{0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2}
	inputBuckets  = []float64{0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000}
	outputBuckets = []float64{0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000}
	rateBuckets   = prometheus.LinearBuckets(0, 0.05, 21)
)

// routerNames makes the options of Dynamo's router metrics.
type routerNames struct {
	component prometheus.Labels
	routerID  string
}

func (n *routerNames) counter(name, help string) prometheus.CounterOpts {
	return prometheus.CounterOpts{Name: "dynamo_component_router_" + name, Help: help, ConstLabels: n.component}
}

func (n *routerNames) histogram(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name:        "dynamo_component_router_" + name,
		Help:        help,
		ConstLabels: n.component,
		Buckets:     buckets,
	}
}

// NewRouter declares the metrics on m's registry.
func (m *Metrics) NewRouter(id Identity) *Router {
	declare := promauto.With(m.Registry)
	routerID := strconv.FormatUint(id.RouterID, 10)
	names := &routerNames{routerID: routerID, component: prometheus.Labels{
		"dynamo_namespace": id.Namespace,
		"dynamo_component": id.Component,
		"router_id":        routerID,
		"worker_id":        strconv.FormatUint(id.RouterID, 16),
	}}
	counter, histogram := names.counter, names.histogram
	perModel := []string{"phase", "model"}
	r := &Router{
		registry: m.Registry,
		identity: id,
		started:  declare.NewCounter(counter("requests_started_total", "Requests for which a worker was chosen.")),
		finished: declare.NewCounter(
			counter("requests_total", "Requests that ended after a worker was chosen, with or without a response.")),
		ttft: declare.NewHistogram(histogram("time_to_first_token_seconds",
			"Time from the complete request to the first token of a streamed response.", ttftBuckets)),
		itl: declare.NewHistogram(
			histogram("inter_token_latency_seconds", "Mean time between the tokens of a streamed response.",
				itlBuckets)),
		input: declare.NewHistogramVec(histogram("input_sequence_tokens", "Prompt tokens of a request.", inputBuckets),
			perModel),
		output: declare.NewHistogram(histogram("output_sequence_tokens", "Output tokens of a response.",
			outputBuckets)),
		hitRate: declare.NewHistogram(histogram("kv_hit_rate",
			"Fraction (0..1) of the prompt's blocks that the index had for the chosen worker.", rateBuckets)),
		best: declare.NewCounterVec(counter("kv_best_eligible_cached_prefix_tokens_total",
			"Prompt tokens that the index had for the candidate with the most: the rung eligible of "+
				"kvepp_ladder_tokens_total, counted at the choice; 0 for phase decode."), perModel),
		selected: declare.NewCounterVec(counter("kv_selected_cached_prefix_tokens_total",
			"Prompt tokens that the index had for the chosen worker: the rung chosen of "+
				"kvepp_ladder_tokens_total, counted at the choice; 0 for phase decode."), perModel),
		reused: declare.NewCounterVec(
			counter("kv_worker_reused_tokens_total", "Prompt tokens that responses reported as cached: the rung "+
				"delivered of kvepp_ladder_tokens_total."), perModel),
	}
	r.backpressure = declare.NewCounterVec(prometheus.CounterOpts{
		Name: "dynamo_frontend_router_queue_backpressure_total",
		Help: "Requests rejected at a limit of their policy class.",
	}, []string{"model", "worker_type", "policy_class", "reason"})
	return r
}

// Chosen is one choice of a worker.
type Chosen struct {
	Phase string // aggregated, prefill or decode
	Model string // clients must not be able to choose it freely

	PromptTokens   int
	CachedTokens   int     // of the chosen worker
	BestTokens     int     // of the candidate with the most cached tokens
	HitRate        float64 // fraction (0..1) of the prompt's blocks on the chosen worker, weighted by tier
	WithoutOverlap bool    // overlap was not computed: only PromptTokens is known
}

// Chosen observes a choice.
func (r *Router) Chosen(c *Chosen) {
	if r == nil {
		return
	}
	r.started.Inc()
	s := r.ofModel(c.Phase, c.Model)
	s.input.Observe(float64(c.PromptTokens))
	if c.WithoutOverlap {
		return
	}
	r.hitRate.Observe(c.HitRate)
	s.best.Add(float64(c.BestTokens))
	s.selected.Add(float64(c.CachedTokens))
}

// FirstToken observes the time to the first token of a streamed response.
func (r *Router) FirstToken(after time.Duration) {
	if r != nil {
		r.ttft.Observe(after.Seconds())
	}
}

// Finished counts the end of a request, for any reason.
func (r *Router) Finished() {
	if r != nil {
		r.finished.Inc()
	}
}

// Output observes the tokens of a response, and the mean time between them if it was streamed. Zero is not observed.
func (r *Router) Output(tokens int, interToken time.Duration) {
	if r == nil {
		return
	}
	if tokens > 0 {
		r.output.Observe(float64(tokens))
	}
	if interToken > 0 {
		r.itl.Observe(interToken.Seconds())
	}
}

// Reused counts prompt tokens that a response reported as cached.
func (r *Router) Reused(phase, model string, tokens int) {
	if r != nil {
		r.ofModel(phase, model).reused.Add(float64(tokens))
	}
}

// maxModels bounds the series, because a worker chooses the name of its model.
const maxModels = 1000

// otherModels is the label of all models beyond maxModels.
const otherModels = "other"

// InitModel declares the series of a model in a phase at zero.
func (r *Router) InitModel(phase, model string) {
	if r != nil {
		r.ofModel(phase, model)
	}
}

// ofModel returns the series of a model in a phase, without a lock if they exist.
func (r *Router) ofModel(phase, model string) *modelSeries {
	key := modelPhase{phase, model}
	if s, ok := r.models.Load(key); ok {
		return s.(*modelSeries)
	}
	key.model = r.labels.of(model)
	model = key.model
	s, _ := r.models.LoadOrStore(key,
		&modelSeries{input: r.input.WithLabelValues(phase, model), best: r.best.WithLabelValues(phase, model),
			selected: r.selected.WithLabelValues(phase, model), reused: r.reused.WithLabelValues(phase, model)})
	return s.(*modelSeries)
}

// backpressureReasons are Dynamo's names for the limits of a policy class.
var backpressureReasons = map[string]string{
	"requests":       "request_limit",
	"raw_isl_tokens": "raw_isl_token_limit",
	"cached_tokens":  "cached_token_limit",
}

// InitBackpressure declares the series of a policy class at zero.
func (r *Router) InitBackpressure(model, class string) {
	if r == nil {
		return
	}
	for _, reason := range backpressureReasons {
		r.backpressure.WithLabelValues(model, "decode", class, reason)
	}
}

// modelLabels is the set of models that are label values. The zero value is empty.
type modelLabels struct {
	mu    sync.Mutex
	known map[string]bool // guarded by mu; at most maxModels
}

// of returns model, or otherModels if the set is full and does not have model.
func (l *modelLabels) of(model string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.known[model]:
		return model
	case len(l.known) >= maxModels:
		return otherModels
	case l.known == nil:
		l.known = map[string]bool{}
	}
	l.known[model] = true
	return model
}

// Backpressure counts a request that was rejected at a limit of its policy class: requests, raw_isl_tokens or
// cached_tokens.
func (r *Router) Backpressure(model, class, limit string) {
	if r != nil {
		r.backpressure.WithLabelValues(r.labels.of(model), "decode", class, backpressureReasons[limit]).Inc()
	}
}

// Queue holds the totals of the requests that wait, for one model and policy class.
type Queue struct {
	Model, Class                   string
	Requests, Tokens, CachedTokens int
}

// CollectQueues exports the queues that read returns at each scrape.
func (r *Router) CollectQueues(read func() []Queue) {
	if r == nil {
		return
	}
	s := &scraped{}
	requests := s.desc("dynamo_frontend_router_queue_pending_requests", "Requests that wait for a worker.",
		"model", "worker_type", "policy_class")
	tokens := s.desc("dynamo_frontend_router_queue_pending_isl_tokens", "Prompt tokens of the requests that wait.",
		"model", "worker_type", "policy_class")
	s.collect = func(send sender) {
		for _, x := range read() {
			send(requests, prometheus.GaugeValue, float64(x.Requests), x.Model, "decode", x.Class)
			send(tokens, prometheus.GaugeValue, float64(x.Tokens), x.Model, "decode", x.Class)
		}
	}
	r.registry.MustRegister(s)
}

// Worker holds the values of one worker's metrics.
type Worker struct {
	InstanceID uint64
	Rank       uint32
	Prefill    bool // label worker_type: prefill, else decode (Dynamo labels aggregated workers so, too)

	ActiveBlocks, PrefillTokens int // of its running requests
	// Of the worker's latest response that reported them; 0: unknown.
	LastTTFT, LastITL time.Duration
	LastPromptTokens  int
	PrefillSpeed      float64 // estimated tokens per second; 0: unknown
	// SecondsPerToken, StepSeconds and GapPerToken are what --router-policy=time prices the worker with.
	SecondsPerToken, StepSeconds, GapPerToken float64
}

// CollectWorkers exports the workers that read returns at each scrape.
func (r *Router) CollectWorkers(read func() []Worker) {
	if r == nil {
		return
	}
	s := &scraped{}
	desc := func(name, help string) *prometheus.Desc {
		return s.desc(name, help, "worker_id", "dp_rank", "worker_type")
	}
	frontend := func(name, help string) *prometheus.Desc { return desc("dynamo_frontend_worker_"+name, help) }
	blocks := frontend("active_decode_blocks", "Distinct KV blocks that a worker's running requests hold.")
	tokens := frontend("active_prefill_tokens", "Prompt tokens that a worker has yet to compute.")
	ttft := frontend("last_time_to_first_token_seconds",
		"Time to first token of a worker's latest streamed response.")
	itl := frontend("last_inter_token_latency_seconds",
		"Mean time between tokens of a worker's latest streamed response.")
	isl := frontend("last_input_sequence_tokens", "Prompt tokens of a worker's latest answered request.")
	speed := desc("kvepp_worker_prefill_tokens_per_second",
		"Prompt tokens that a worker prefills per second: configured, or estimated from times to first token; 0 "+
			"while unknown.")
	perToken := desc("kvepp_worker_prefill_seconds_per_token",
		"Time in which a worker prefills one more prompt token, as --router-policy=time prices it: learned from "+
			"times to first token, 0.0001 until then.")
	perStep := desc("kvepp_worker_prefill_step_seconds",
		"Time that a prefill takes on a worker beside the time for its tokens, as --router-policy=time prices it: "+
			"learned from times to first token, 0 until then.")
	gap := desc("kvepp_worker_gap_seconds_per_held_token",
		"Time by which each token that a worker holds lengthens the gap between two tokens of a response, as "+
			"--router-policy=time prices it: learned from streamed responses, 1e-08 until then.")
	registered := prometheus.NewDesc("dynamo_component_router_worker_registered", "1 for each worker in the pool.",
		[]string{"router_worker_id", "dp_rank", "worker_type"}, prometheus.Labels{
			"dynamo_namespace": r.identity.Namespace,
			"dynamo_component": r.identity.Component,
			"worker_id":        strconv.FormatUint(r.identity.RouterID, 16),
		})
	s.descs = append(s.descs, registered)
	s.collect = func(send sender) {
		type name struct{ id, rank, kind string }
		seen := map[name]bool{} // several endpoints may have one id by mistake, but each series must be unique
		for _, x := range read() {
			id, rank := strconv.FormatUint(x.InstanceID, 10), strconv.FormatUint(uint64(x.Rank), 10)
			n := name{id, rank, workerType(x.Prefill)}
			if seen[n] {
				continue
			}
			seen[n] = true
			for _, gauge := range []struct {
				desc  *prometheus.Desc
				value float64
			}{
				{blocks, float64(x.ActiveBlocks)}, {tokens, float64(x.PrefillTokens)}, {ttft, x.LastTTFT.Seconds()},
				{itl, x.LastITL.Seconds()}, {isl, float64(x.LastPromptTokens)}, {speed, x.PrefillSpeed},
				{perToken, x.SecondsPerToken}, {perStep, x.StepSeconds}, {gap, x.GapPerToken}, {registered, 1},
			} {
				send(gauge.desc, prometheus.GaugeValue, gauge.value, n.id, n.rank, n.kind)
			}
		}
	}
	r.registry.MustRegister(s)
}

// workerType is the value of Dynamo's label worker_type.
func workerType(prefill bool) string {
	if prefill {
		return "prefill"
	}
	return "decode"
}
