package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Router is what Dynamo's own KV router exports, under its names, labels and buckets, so that dashboards and alerts
// made for it go on. Series exist from the start, at zero; those of a worker from when it joins until it leaves, those
// of a model that the configuration does not name from its first request. A nil Router exports nothing.
//
// Dynamo's frontend counts the time between output tokens only where it counts output blocks; here it is counted for
// every streamed answer. Series of what kvepp does not have (shared caches) stay at zero.
//
// Source: what `python -m dynamo.frontend --router-mode kv` 1.6.1 answers to GET /metrics; held against it in package
// e2e.
type Router struct {
	registry *prometheus.Registry
	identity Identity

	started, finished          prometheus.Counter
	ttft, itl, output, hitRate prometheus.Histogram
	input                      *prometheus.HistogramVec
	best, selected, reused     *prometheus.CounterVec
	nonMax                     prometheus.Counter
	lost                       prometheus.Histogram

	blockHashing, seqHashing, findMatches, scheduling, total prometheus.Histogram

	backpressure *prometheus.CounterVec

	models sync.Map // modelPhase -> *modelSeries
	labels modelLabels
}

// Identity is what the labels of all series of one router say of it.
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
		0,
		0.0022,
		0.0047,
		0.01,
		0.022,
		0.047,
		0.1,
		0.22,
		0.47,
		1,
		2.2,
		4.7,
		10,
		22,
		48,
		100,
		220,
		480,
	}
	itlBuckets    = []float64{0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2}
	inputBuckets  = []float64{0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000}
	outputBuckets = []float64{0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000}
	rateBuckets   = prometheus.LinearBuckets(0, 0.05, 21)
)

// NewRouter declares the metrics among m's.
func (m *Metrics) NewRouter(id Identity) *Router {
	routerID := strconv.FormatUint(id.RouterID, 10)
	component := prometheus.Labels{
		"dynamo_namespace": id.Namespace,
		"dynamo_component": id.Component,
		"router_id":        routerID,
		"worker_id":        strconv.FormatUint(id.RouterID, 16),
	}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "dynamo_component_router_" + name, Help: help, ConstLabels: component}
	}
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{
			Name:        "dynamo_component_router_" + name,
			Help:        help,
			ConstLabels: component,
			Buckets:     buckets,
		}
	}
	overhead := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(
			prometheus.HistogramOpts{Name: "dynamo_router_overhead_" + name + "_ms", Help: help + ", in milliseconds.",
				ConstLabels: prometheus.Labels{"router_id": routerID}, Buckets: buckets},
		)
	}
	compute := prometheus.ExponentialBuckets(0.001, 2, 15)
	waiting := prometheus.ExponentialBuckets(0.01, 3, 17)
	perModel := []string{"phase", "model"}
	prefill := prometheus.Labels{"worker_type": "prefill"}
	r := &Router{
		registry: m.Registry,
		identity: id,
		started:  prometheus.NewCounter(counter("requests_started_total", "Requests for which a worker was chosen.")),
		finished: prometheus.NewCounter(
			counter("requests_total", "Requests that were answered, or given up after a worker was chosen."),
		),
		ttft: prometheus.NewHistogram(
			histogram(
				"time_to_first_token_seconds",
				"Time from the whole request to the first token of a streamed answer.",
				ttftBuckets,
			),
		),
		itl: prometheus.NewHistogram(
			histogram("inter_token_latency_seconds", "Mean time between the tokens of a streamed answer.", itlBuckets),
		),
		input: prometheus.NewHistogramVec(
			histogram("input_sequence_tokens", "Prompt tokens of a request.", inputBuckets),
			perModel,
		),
		output: prometheus.NewHistogram(histogram("output_sequence_tokens", "Tokens of an answer.", outputBuckets)),
		hitRate: prometheus.NewHistogram(
			histogram(
				"kv_hit_rate",
				"Part of the prompt's blocks that the chosen worker was believed to hold (0 to 1).",
				rateBuckets,
			),
		),
		best: prometheus.NewCounterVec(
			counter(
				"kv_best_eligible_cached_prefix_tokens_total",
				"Prompt tokens that the candidate with most of them held.",
			),
			perModel,
		),
		selected: prometheus.NewCounterVec(
			counter("kv_selected_cached_prefix_tokens_total", "Prompt tokens that the chosen worker held."),
			perModel,
		),
		reused: prometheus.NewCounterVec(
			counter("kv_worker_reused_tokens_total", "Prompt tokens that answers reported as cached."),
			perModel,
		),

		blockHashing: overhead("block_hashing", "Time to hash a prompt's blocks", compute),
		seqHashing:   overhead("seq_hashing", "Time to chain their hashes", compute),
		findMatches:  overhead("indexer_find_matches", "Time to find which workers hold them", waiting),
		scheduling:   overhead("scheduling", "Time to choose a worker and to book the request there", waiting),
		total:        overhead("total", "All of these", waiting),
	}
	nonMax := prometheus.NewCounterVec(
		counter(
			"non_max_overlap_selections_total",
			"Prefill workers that were chosen though another one held more of the prompt.",
		),
		[]string{"worker_type"},
	)
	lost := prometheus.NewHistogramVec(
		histogram(
			"overlap_blocks_lost",
			"How many more blocks that other one held.",
			prometheus.ExponentialBuckets(0.25, 2, 16),
		),
		[]string{"worker_type"},
	)
	r.nonMax, r.lost = nonMax.With(prefill), lost.With(prefill).(prometheus.Histogram)
	r.backpressure = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "dynamo_frontend_router_queue_backpressure_total",
		Help: "Requests that were turned away because their policy class holds as much as it may.",
	}, []string{"model", "worker_type", "policy_class", "reason"})
	m.Registry.MustRegister(
		r.backpressure,
		r.started,
		r.finished,
		r.ttft,
		r.itl,
		r.input,
		r.output,
		r.hitRate,
		r.best,
		r.selected,
		r.reused,
		nonMax,
		lost,
		prometheus.NewHistogram(
			histogram(
				"shared_cache_hit_rate",
				"Part of the prompt's blocks in a cache that workers share (0 to 1).",
				rateBuckets,
			),
		),
		prometheus.NewHistogram(
			histogram(
				"shared_cache_beyond_blocks",
				"Blocks in it beyond the chosen worker's own.",
				prometheus.ExponentialBuckets(1, 2, 12),
			),
		),
		r.blockHashing,
		r.seqHashing,
		r.findMatches,
		r.scheduling,
		r.total,
		overhead("shared_cache_query", "Time to ask a cache that workers share", waiting),
	)
	return r
}

// Overhead is where the time of a decision went, after tokenization.
type Overhead struct{ BlockHashing, SeqHashing, FindMatches, Scheduling time.Duration }

// Overhead observes one decision's.
func (r *Router) Overhead(o *Overhead) {
	if r == nil {
		return
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	r.blockHashing.Observe(ms(o.BlockHashing))
	r.seqHashing.Observe(ms(o.SeqHashing))
	r.findMatches.Observe(ms(o.FindMatches))
	r.scheduling.Observe(ms(o.Scheduling))
	r.total.Observe(ms(o.BlockHashing + o.SeqHashing + o.FindMatches + o.Scheduling))
}

// Chosen is one choice of a worker.
type Chosen struct {
	Phase string // aggregated, prefill or decode
	Model string // never one that only a client names

	PromptTokens   int
	CachedTokens   int     // that the chosen one holds
	BestTokens     int     // that the candidate with most holds
	HitRate        float64 // part of the prompt's blocks that the chosen one holds, weighted by their tiers; 0 to 1
	LostBlocks     float64 // how many more such blocks another candidate holds; for the prefill phase
	WithoutOverlap bool    // overlap was not looked for: nothing but the prompt's tokens is known
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
	if c.Phase == "prefill" && c.LostBlocks > 0 {
		r.nonMax.Inc()
		r.lost.Observe(c.LostBlocks)
	}
}

// FirstToken observes the time to the first token of a streamed answer.
func (r *Router) FirstToken(after time.Duration) {
	if r != nil {
		r.ttft.Observe(after.Seconds())
	}
}

// Finished counts the end of a request, however it came.
func (r *Router) Finished() {
	if r != nil {
		r.finished.Inc()
	}
}

// Output observes how many tokens an answer had, and, if it was streamed, the mean time between them, else 0.
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

// Reused counts prompt tokens that an answer reported as cached.
func (r *Router) Reused(phase, model string, tokens int) {
	if r != nil {
		r.ofModel(phase, model).reused.Add(float64(tokens))
	}
}

// maxModels bounds the series: workers say what they serve, and whoever may start one could grow them.
const maxModels = 1000

// otherModels is the label of all models beyond these.
const otherModels = "other"

// InitModel declares the series of a model in a phase, at zero.
func (r *Router) InitModel(phase, model string) {
	if r != nil {
		r.ofModel(phase, model)
	}
}

// ofModel returns the series of a model in a phase. The router knows few models, so they are found without a lock.
func (r *Router) ofModel(phase, model string) *modelSeries {
	key := modelPhase{phase, model}
	if s, ok := r.models.Load(key); ok {
		return s.(*modelSeries)
	}
	key.model = r.labels.of(model)
	model = key.model
	s, _ := r.models.LoadOrStore(
		key,
		&modelSeries{input: r.input.WithLabelValues(phase, model), best: r.best.WithLabelValues(phase, model),
			selected: r.selected.WithLabelValues(phase, model), reused: r.reused.WithLabelValues(phase, model)},
	)
	return s.(*modelSeries)
}

// backpressureReasons are Dynamo's names for the limits of a policy class.
var backpressureReasons = map[string]string{
	"requests":       "request_limit",
	"raw_isl_tokens": "raw_isl_token_limit",
	"cached_tokens":  "cached_token_limit",
}

// InitBackpressure declares the series of a policy class, at zero.
func (r *Router) InitBackpressure(model, class string) {
	if r == nil {
		return
	}
	for _, reason := range backpressureReasons {
		r.backpressure.WithLabelValues(model, "decode", class, reason)
	}
}

// modelLabels are the models that are labels of metrics. The zero value has none.
type modelLabels struct {
	mu    sync.Mutex
	known map[string]bool // guarded by mu; at most maxModels
}

// of returns the model itself while there are few, then otherModels.
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

// Backpressure counts a request that was turned away at a limit of its policy class: requests, raw_isl_tokens or
// cached_tokens.
func (r *Router) Backpressure(model, class, limit string) {
	if r != nil {
		r.backpressure.WithLabelValues(r.labels.of(model), "decode", class, backpressureReasons[limit]).Inc()
	}
}

// Queue is what waits of one model in one policy class.
type Queue struct {
	Model, Class                   string
	Requests, Tokens, CachedTokens int
}

// CollectQueues exports what read returns whenever it is asked.
func (r *Router) CollectQueues(read func() []Queue) {
	if r == nil {
		return
	}
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(
			"dynamo_frontend_router_queue_pending_"+name,
			help,
			[]string{"model", "worker_type", "policy_class"},
			nil,
		)
	}
	r.registry.MustRegister(&queues{read, desc("requests", "Requests that wait for a worker."),
		desc(
			"isl_tokens",
			"Prompt tokens of the requests that wait.",
		), desc("cached_tokens", "Those of them that a worker holds.")})
}

// queues collects the series of what waits.
type queues struct {
	read                     func() []Queue
	requests, tokens, cached *prometheus.Desc
}

func (q *queues) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{q.requests, q.tokens, q.cached} {
		to <- d
	}
}

func (q *queues) Collect(to chan<- prometheus.Metric) {
	for _, x := range q.read() {
		to <- prometheus.MustNewConstMetric(q.requests, prometheus.GaugeValue, float64(x.Requests), x.Model, "decode",
			x.Class)
		to <- prometheus.MustNewConstMetric(q.tokens, prometheus.GaugeValue, float64(x.Tokens), x.Model, "decode",
			x.Class)
		to <- prometheus.MustNewConstMetric(q.cached, prometheus.GaugeValue, float64(x.CachedTokens), x.Model, "decode",
			x.Class)
	}
}

// Worker is what is exported of one worker.
type Worker struct {
	InstanceID    uint64
	Rank          uint32
	Prefill       bool // its role: label worker_type is prefill, else decode as Dynamo says of aggregated workers too
	Model         string
	WithoutEvents bool // it does not announce its blocks

	ActiveBlocks, PrefillTokens int // of its running requests
	// Of the latest answer from it that told; 0: none did.
	LastTTFT, LastITL time.Duration
	LastPromptTokens  int
	PrefillSpeed      float64 // tokens a second, as it is believed; 0: not known
}

// CollectWorkers exports the workers that read returns whenever it is asked; the call is made at every scrape.
func (r *Router) CollectWorkers(read func() []Worker) {
	if r == nil {
		return
	}
	process := strconv.FormatUint(r.identity.RouterID, 16)
	component := prometheus.Labels{
		"dynamo_namespace": r.identity.Namespace,
		"dynamo_component": r.identity.Component,
		"worker_id":        process,
	}
	frontend := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(
			"dynamo_frontend_worker_"+name,
			help,
			[]string{"worker_id", "dp_rank", "worker_type"},
			nil,
		)
	}
	r.registry.MustRegister(&workers{
		read:   read,
		blocks: frontend("active_decode_blocks", "KV blocks that a worker's running requests hold, each once."),
		tokens: frontend("active_prefill_tokens", "Prompt tokens that a worker has yet to compute."),
		ttft: frontend(
			"last_time_to_first_token_seconds",
			"Time to first token of a worker's latest answer that was streamed.",
		),
		itl: frontend(
			"last_inter_token_latency_seconds",
			"Mean time between tokens of a worker's latest answer that was streamed.",
		),
		isl: frontend("last_input_sequence_tokens", "Prompt tokens of a worker's latest answered request."),
		speed: prometheus.NewDesc(
			"kvepp_worker_prefill_tokens_per_second",
			"Prompt tokens that a worker is believed to prefill in a second: given, or learned from the times to the "+
				"first of its streamed answers. 0: not known yet.",
			[]string{"worker_id", "dp_rank", "worker_type"},
			nil,
		),
		registered: prometheus.NewDesc(
			"dynamo_component_router_worker_registered",
			"1 for every worker that requests can go to.",
			[]string{"router_worker_id", "dp_rank", "worker_type"},
			component,
		),
		mismatch: prometheus.NewDesc(
			"dynamo_component_router_kv_event_source_mismatch_workers",
			"Workers that do not announce their KV blocks.",
			[]string{"model", "worker_type", "target_namespace", "target_component", "target_endpoint"},
			component,
		),
		identity: r.identity,
	})
}

// workers collects the series that have a worker's labels.
type workers struct {
	read                                                        func() []Worker
	blocks, tokens, ttft, itl, isl, speed, registered, mismatch *prometheus.Desc
	identity                                                    Identity
}

func (w *workers) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{w.blocks, w.tokens, w.ttft, w.itl, w.isl, w.speed, w.registered, w.mismatch} {
		to <- d
	}
}

func (w *workers) Collect(to chan<- prometheus.Metric) {
	type name struct{ id, rank, kind string }
	type group struct{ model, kind string }
	seen := map[name]bool{} // an id may be given to several endpoints by mistake; a series can be there once
	without := map[group]int{}
	for _, x := range w.read() {
		kind := "decode"
		if x.Prefill {
			kind = "prefill"
		}
		g := group{x.Model, kind}
		without[g] += 0
		if x.WithoutEvents {
			without[g]++
		}
		n := name{strconv.FormatUint(x.InstanceID, 10), strconv.FormatUint(uint64(x.Rank), 10), kind}
		if seen[n] {
			continue
		}
		seen[n] = true
		for _, gauge := range []struct {
			desc  *prometheus.Desc
			value float64
		}{
			{w.blocks, float64(x.ActiveBlocks)}, {w.tokens, float64(x.PrefillTokens)}, {w.ttft, x.LastTTFT.Seconds()},
			{w.itl, x.LastITL.Seconds()}, {w.isl, float64(x.LastPromptTokens)}, {w.speed, x.PrefillSpeed},
			{w.registered, 1},
		} {
			to <- prometheus.MustNewConstMetric(gauge.desc, prometheus.GaugeValue, gauge.value, n.id, n.rank, n.kind)
		}
	}
	for g, n := range without {
		to <- prometheus.MustNewConstMetric(w.mismatch, prometheus.GaugeValue, float64(n), g.model, g.kind,
			w.identity.Namespace, w.identity.Component, "generate")
	}
}
