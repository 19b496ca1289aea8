// Package metrics declares every metric that kvepp exports, in one place, so that names and labels can be read
// together.
//
// It owns names, help texts and buckets. It makes no decisions. No label takes a value that only a client chose.
// Concurrency: everything is safe from any goroutine.
package metrics

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	dto "github.com/prometheus/client_model/go"
)

// Metrics is the set of exported metrics. Create it with New.
type Metrics struct {
	Registry *prometheus.Registry
	twins    []Twin

	requests        *prometheus.CounterVec
	decisions       *prometheus.CounterVec
	conditional     *prometheus.CounterVec
	events          *prometheus.CounterVec
	phases          *prometheus.HistogramVec
	tokenizerURL    *prometheus.CounterVec
	tokenizerChecks *prometheus.CounterVec
	hints           *prometheus.CounterVec
	rejected        *prometheus.CounterVec
	servedBy        *prometheus.CounterVec
	rewritten       *prometheus.CounterVec
	shadowed        *prometheus.CounterVec
	shadowTokens    *prometheus.CounterVec
	ejections       *prometheus.CounterVec
	queueWait       prometheus.Histogram
	unusable        *prometheus.CounterVec
	// phaseObservers holds the series of phases, because a lookup in phases is slower. Read-only after New.
	phaseObservers map[string]prometheus.Observer

	// eventCounters caches the series of events. A lookup in events takes a lock, which takes longer than most events
	// take to be applied. The map is never changed, only replaced.
	eventCounters atomic.Pointer[map[event]prometheus.Counter]

	// UpperBound counts decisions whose predicted tokens are an upper bound.
	UpperBound prometheus.Counter
	// Reported counts usage.prompt_tokens_details.cached_tokens of responses.
	Reported prometheus.Counter
	// PredictedOfReported counts the tokens of the leading prompt blocks that the index had for the chosen worker, of
	// requests whose responses reported cached tokens.
	PredictedOfReported prometheus.Counter
	// PromptTokenMismatches counts responses that report another number of prompt tokens than kvepp computed.
	PromptTokenMismatches prometheus.Counter
	// Unread counts responses that kvepp could not read because they are compressed.
	Unread prometheus.Counter
	// ImpossibleUsage counts responses that report a usage which cannot be true.
	ImpossibleUsage prometheus.Counter
	// EndpointFileRefused counts refused reads of the endpoints file.
	EndpointFileRefused prometheus.Counter
	// PolicyFileRefused counts refused reads of the policy file.
	PolicyFileRefused prometheus.Counter
	// IgnoredEndpoints is the number of encode workers, which are never candidates.
	IgnoredEndpoints prometheus.Gauge
	// RefusedEndpoints is the number of endpoints left out because one of their names or addresses is invalid.
	RefusedEndpoints prometheus.Gauge
	// AggregatedSelections, PrefillSelections and DecodeSelections count chosen workers by role.
	AggregatedSelections, PrefillSelections, DecodeSelections prometheus.Counter
	// OnlyCandidate counts those that had no other candidate beside them.
	OnlyCandidate prometheus.Counter
	// Unpaired counts requests that were refused because no prefill worker was ready.
	Unpaired prometheus.Counter
	// FirstTokensNoted counts first tokens that workers noted on Dynamo's event plane and kvepp waited for.
	FirstTokensNoted prometheus.Counter
	// Injected counts requests that were forwarded with their token ids.
	Injected prometheus.Counter
	// ModelFileMismatches is the number of model files that differ between a worker and kvepp.
	ModelFileMismatches prometheus.Gauge
	// UntestedVersions is the number of endpoints whose engine has a version that kvepp was not tested with.
	UntestedVersions prometheus.Gauge

	replicaStaleness prometheus.Histogram // set by CollectReplicas
}

// event identifies a counter of events.
type event struct{ kind, outcome string }

var buildVersion atomic.Pointer[string] // nil before SetVersion

// SetVersion sets the version of the program, as `kvepp version` prints it, for kvepp_build_info. It takes effect in
// metrics that are declared later. Safe for concurrent use.
func SetVersion(version string) { buildVersion.Store(&version) }

func version() string {
	if v := buildVersion.Load(); v != nil {
		return *v
	}
	return "unknown"
}

// New declares the metrics on a new registry, together with Go's runtime and process metrics.
func New() *Metrics {
	m := &Metrics{Registry: prometheus.NewRegistry()}
	declare := declarer{promauto.With(m.Registry)}
	m.declareRequests(declare)
	m.declareRouting(declare)
	m.declareCachedTokens(declare)
	m.declareTokenization(declare)
	m.declareEndpoints(declare)
	m.declarePhases(declare)
	m.events = declare.counters("kvepp_events_total",
		"KV events by kind (stored, removed, cleared, ignored, unknown; batch and subscription for their "+
			"transport; query for questions to Dynamo's workers) and outcome (applied, or the reason why not).",
		"kind", "outcome")
	declare.NewGauge(prometheus.GaugeOpts{
		Name: "kvepp_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": version()},
	}).Set(1)
	m.Registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// declarer declares metrics by name, help and labels.
type declarer struct{ promauto.Factory }

func (d declarer) counter(name, help string) prometheus.Counter {
	return d.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func (d declarer) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return d.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (d declarer) gauge(name, help string) prometheus.Gauge {
	return d.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

// declareRequests declares what became of requests and responses.
func (m *Metrics) declareRequests(declare declarer) {
	m.requests = declare.counters("kvepp_requests_total",
		"HTTP requests by the status that the client received from the endpoint or from kvepp; \"none\": the "+
			"stream ended before a response.", "code")
	for _, code := range []string{"200", "400", "404", "413", "429", "500", "503", "none"} {
		m.requests.WithLabelValues(code)
	}
	m.shadowed = declare.counters("kvepp_shadow_requests_total",
		"With --shadow, requests by outcome: equal (the endpoint that served the request is as good to kvepp as the "+
			"one that it would have chosen), other, or why kvepp could not judge the choice; a rise of any reason "+
			"means that the comparison misses requests.", "outcome")
	m.shadowTokens = declare.counters("kvepp_shadow_tokens_total",
		"With --shadow, prompt tokens of the requests with outcome equal or other: prompt (all), kvepp (cached at "+
			"the worker that kvepp would have chosen), served (cached at the worker that served the request).", "of")
	m.servedBy = declare.counters("kvepp_served_total",
		"Requests for which the proxy reported the serving endpoint, by outcome: as_chosen; moved (another "+
			"endpoint, after a retry or a fallback; its load is counted there); unknown (an endpoint that kvepp does "+
			"not know; its load is not counted).", "outcome")
	for _, outcome := range []string{"as_chosen", "moved", "unknown"} {
		m.servedBy.WithLabelValues(outcome)
	}
	m.rejected = declare.counters("kvepp_rejections_total",
		"Requests rejected because of load, by cause: overloaded (every candidate is above a busy threshold), "+
			"queue_full, queue_limit (the limit of its policy class), queue_timeout, no_room (--router-admission), "+
			"hold_timeout (--hold-when-empty), deadline (that cannot be met), "+
			"shutting_down (it waited when --drain-timeout ended), "+
			"streams (--max-streams), held_bytes (--max-buffered-bytes).", "cause")
	m.queueWait = declare.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvepp_queue_wait_seconds",
		Help:    "Queue wait, including abandoned and rejected requests.",
		Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18), // 1 ms .. 131 s
	})
	m.Unread = declare.counter("kvepp_unread_answers_total",
		"Responses that kvepp forwarded without reading because they are compressed (content-encoding): no "+
			"metric includes their tokens or their time to first token.")
	m.ImpossibleUsage = declare.counter("kvepp_reported_usage_ignored_total",
		"Responses whose reported usage kvepp ignored, because it cannot be true: more tokens than the request "+
			"allows or the response has room for, or more cached tokens than the prompt has. A rise means a broken "+
			"or hostile engine.")
}

// declareRouting declares the counts of routing decisions.
func (m *Metrics) declareRouting(declare declarer) {
	m.decisions = declare.counters("kvepp_decisions_total",
		"Routing decisions by reason: \"kv\" priced overlap and load, \"kv_rendered\" the same with an "+
			"engine's token ids, \"media_prefix\" overlap up to the first image; every other reason says why only "+
			"load was priced.", "reason")
	selections := declare.counters("kvepp_selections_total",
		"Workers chosen, by role: aggregated (the whole request), or one for prefill and one for decode.", "role")
	m.AggregatedSelections = selections.WithLabelValues("aggregated")
	m.PrefillSelections = selections.WithLabelValues("prefill")
	m.DecodeSelections = selections.WithLabelValues("decode")
	m.OnlyCandidate = declare.counter("kvepp_only_candidate_total",
		"Workers chosen because no other one was a candidate; a rise means that sessions, pins, subset hints, "+
			"ejections or overload leave kvepp no choice.")
	m.conditional = declare.counters("kvepp_conditional_total",
		"Requests for decode workers with --router-conditional-disagg, by outcome. A decode worker computed the "+
			"prompt alone: bypassed (by the policy), no_prefill (there is no prefill worker), prefill_lost (all are "+
			"ejected, cordoned or overloaded). A prefill worker computed it: isl, ratio (too much was to compute), "+
			"prefill_calm (it was not busy), cost (it is faster), decode_busy, decode_unknown (the decode worker's "+
			"KV blocks).",
		"outcome")
	m.Unpaired = declare.counter("kvepp_unpaired_requests_total",
		"Requests refused because decode workers were ready but no prefill worker that pairs with one of them.")
	m.hints = declare.counters("kvepp_hints_ignored_total",
		"Routing hints of clients, in headers or nvext, that kvepp ignored, by hint and cause: malformed, "+
			"disabled (--ignore-client-hints), not_allowed (--allow-client-pinning is not given), unheard (a tenant, "+
			"while endpoints are not Dynamo frontends).", "hint", "cause")
	m.rewritten = declare.counters("inference_extension_model_rewrite_decisions_total",
		"Requests to which a model rewrite rule applied, by rule, requested model (other: a model that no rule "+
			"names) and target.", "model_rewrite_name", "model_name", "target_model")
	m.FirstTokensNoted = declare.counter("kvepp_first_tokens_noted_total",
		"Requests whose prefill ended when their worker noted the first token on Dynamo's event plane.")
	m.Injected = declare.counter("kvepp_injected_token_data_total",
		"Requests forwarded with their token ids, so that Dynamo's frontend does not tokenize them "+
			"(--inject-token-data).")
}

// declareCachedTokens declares predicted and reported cached tokens.
func (m *Metrics) declareCachedTokens(declare declarer) {
	m.UpperBound = declare.counter("kvepp_upper_bound_decisions_total",
		"Decisions whose predicted cached tokens are an upper bound, because the model also has layers that "+
			"keep less (sliding windows, recurrent states), and kvepp does not know what these hold.")
	m.unusable = declare.counters("kvepp_unusable_cached_tokens_total",
		"Prompt tokens that full attention of the chosen worker had cached, but that the worker could not "+
			"reuse, because its layers of this kind (window, state or chunk) did not keep, or evicted, what they need.",
		"kind")
	for _, kind := range []string{"window", "state", "chunk"} {
		m.unusable.WithLabelValues(kind)
	}
	m.Reported = declare.counter("kvepp_reported_cached_tokens_total",
		"Prompt tokens that responses reported as cached (usage.prompt_tokens_details.cached_tokens).")
	m.PredictedOfReported = declare.counter("kvepp_predicted_of_reported_cached_tokens_total",
		"Predicted cached tokens of the requests whose responses reported cached tokens; compare with "+
			"kvepp_reported_cached_tokens_total.")
}

// declareTokenization declares what shows whether kvepp's token ids are the engine's.
func (m *Metrics) declareTokenization(declare declarer) {
	m.tokenizerURL = declare.counters("kvepp_tokenizer_url_requests_total",
		"Requests to the engine at --tokenizer-url for token ids, including those of --tokenizer-check, by "+
			"outcome: ok, refused (the engine rejects the request), unsupported (no endpoint returns token ids), "+
			"error, timeout, busy, open (the circuit breaker is open), canceled.", "model", "outcome")
	m.tokenizerChecks = declare.counters("kvepp_tokenizer_check_requests_total",
		"Requests whose token ids --tokenizer-check compared with the engine's, by outcome: equal, differs "+
			"(from then on the model is routed by load only), unknown (kvepp or the engine has no token ids).",
		"model", "outcome")
	m.PromptTokenMismatches = declare.counter("kvepp_prompt_token_mismatches_total",
		"Responses to chats and completions that report another number of prompt tokens than kvepp computed: "+
			"tokenizer or chat template differ from the engine's.")
	m.ModelFileMismatches = declare.gauge("kvepp_model_file_mismatches",
		"Tokenizer and template files whose checksum in a worker's model card differs from kvepp's file; such "+
			"workers are routed to by load only.")
	m.UntestedVersions = declare.gauge("kvepp_untested_engine_versions",
		"Endpoints whose engine has a version that kvepp was not tested with, or several; above 0, predictions "+
			"for these endpoints may be wrong.")
}

// declareEndpoints declares what concerns the list of endpoints.
func (m *Metrics) declareEndpoints(declare declarer) {
	m.EndpointFileRefused = declare.counter("kvepp_endpoints_file_refused_total",
		"Reads of the endpoints file that kvepp refused; it kept the endpoints that it had.")
	m.PolicyFileRefused = declare.counter("kvepp_policy_file_refused_total",
		"Reads of the changed policy file that kvepp refused; it kept the policy that it had.")
	m.IgnoredEndpoints = declare.gauge("kvepp_ignored_endpoints",
		"Endpoints that are never candidates: Dynamo's encode workers.")
	m.RefusedEndpoints = declare.gauge("kvepp_refused_endpoints",
		"Endpoints of discovery or of the cluster that are left out because a name, an address or another "+
			"text of theirs is invalid.")
	m.ejections = declare.counters("kvepp_ejections_total",
		"Ejections of endpoints by cause: the kind of the last failure (refused, reset, status_5xx, "+
			"first_byte, timeout, retried), failure_percent, or the sign that the process ended or stopped "+
			"(metrics_refused, metrics_silent, process_gone).", "cause")
}

// Shadowed counts n shadowed requests by outcome. With 0 the series begins to exist.
func (m *Metrics) Shadowed(outcome string, n int) {
	m.shadowed.WithLabelValues(outcome).Add(float64(n))
}

// ShadowTokens counts the tokens of a shadowed request's prompt, and how many of them were cached at the worker that
// kvepp would have chosen and at the one that served the request.
func (m *Metrics) ShadowTokens(prompt, kvepp, served int) {
	m.shadowTokens.WithLabelValues("prompt").Add(float64(prompt))
	m.shadowTokens.WithLabelValues("kvepp").Add(float64(kvepp))
	m.shadowTokens.WithLabelValues("served").Add(float64(served))
}

// Shadow returns the counts of requests in shadow by outcome, and of their prompt tokens; none without --shadow.
func (m *Metrics) Shadow() (outcomes, tokens map[string]float64) {
	read := func(of *prometheus.CounterVec) map[string]float64 {
		found, all := make(chan prometheus.Metric), map[string]float64{}
		go func() { of.Collect(found); close(found) }()
		for x := range found {
			var v dto.Metric
			if x.Write(&v) == nil {
				all[v.Label[0].GetValue()] = v.Counter.GetValue()
			}
		}
		return all
	}
	return read(m.shadowed), read(m.shadowTokens)
}

// declarePhases declares the durations of a decision's phases.
func (m *Metrics) declarePhases(declare declarer) {
	m.phases = declare.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kvepp_phase_seconds",
		Help: "Time in each phase of a decision: wait (bodies above 16 KiB wait for memory and a processor), parse, " +
			"tokenize (includes tokenizer_url, the wait for an engine's token ids), hash, match, select, predict; " +
			"pick is the whole decision.",
		// 1 us .. 4.2 s; alerts on slow tokenization read the bound 0.1
		Buckets: slices.Insert(prometheus.ExponentialBuckets(1e-6, 4, 12), 9, 0.1),
	}, []string{"phase"})
	m.phaseObservers = map[string]prometheus.Observer{}
	for _, phase := range []string{"wait", "parse", "tokenize", "tokenizer_url", "hash", "match", "select", "predict",
		"pick"} {
		m.phaseObservers[phase] = m.phases.WithLabelValues(phase)
	}
}

// Request counts a finished request. code is an HTTP status in digits, "invalid" for anything else, or "none" without a
// response.
func (m *Metrics) Request(code string) { m.requests.WithLabelValues(code).Inc() }

// InitEjection declares the series of a cause at zero.
func (m *Metrics) InitEjection(cause string) { m.ejections.WithLabelValues(cause) }

// Ejection counts one ejection of an endpoint.
func (m *Metrics) Ejection(cause string) { m.ejections.WithLabelValues(cause).Inc() }

// Decision counts one decision.
func (m *Metrics) Decision(reason string) { m.decisions.WithLabelValues(reason).Inc() }

// InitRejections declares the series of causes at zero.
func (m *Metrics) InitRejections(causes ...string) {
	for _, cause := range causes {
		m.rejected.WithLabelValues(cause)
	}
}

// Rejection counts one request that was rejected because of load.
func (m *Metrics) Rejection(cause string) { m.rejected.WithLabelValues(cause).Inc() }

// ServedBy counts one request for which the proxy reported the endpoint that answered it.
func (m *Metrics) ServedBy(outcome string) { m.servedBy.WithLabelValues(outcome).Inc() }

// QueueWait observes how long one request waited.
func (m *Metrics) QueueWait(d time.Duration) { m.queueWait.Observe(d.Seconds()) }

// InitRemoteTokenize declares the series of an outcome at zero.
func (m *Metrics) InitRemoteTokenize(model, outcome string) {
	m.tokenizerURL.WithLabelValues(model, outcome)
}

// InitTokenizerCheck declares the series of an outcome at zero.
func (m *Metrics) InitTokenizerCheck(model, outcome string) {
	m.tokenizerChecks.WithLabelValues(model, outcome)
}

// RemoteTokenize counts one request to an engine for token ids. The operator chose the model's name.
func (m *Metrics) RemoteTokenize(model, outcome string) {
	m.tokenizerURL.WithLabelValues(model, outcome).Inc()
}

// TokenizerCheck counts one comparison of token ids with the engine's. The operator chose the model's name.
func (m *Metrics) TokenizerCheck(model, outcome string) {
	m.tokenizerChecks.WithLabelValues(model, outcome).Inc()
}

// Rewritten counts a request to which a rewrite rule applied. The operator chose all names.
func (m *Metrics) Rewritten(rule, model, target string) {
	m.rewritten.WithLabelValues(rule, model, target).Inc()
}

// HintsIgnored counts n hints that were ignored for one cause. n = 0 declares the series.
func (m *Metrics) HintsIgnored(hint, cause string, n int) {
	m.hints.WithLabelValues(hint, cause).Add(float64(n))
}

// InitEvent declares the series of a kind and an outcome at zero.
func (m *Metrics) InitEvent(kind, outcome string) { m.events.WithLabelValues(kind, outcome) }

// Event counts n events of a kind with one outcome.
func (m *Metrics) Event(kind, outcome string, n int) {
	if n <= 0 {
		return
	}
	known := m.eventCounters.Load()
	if known != nil {
		if c := (*known)[event{kind, outcome}]; c != nil {
			c.Add(float64(n))
			return
		}
	}
	c := m.events.WithLabelValues(kind, outcome)
	c.Add(float64(n))
	grown := map[event]prometheus.Counter{{kind, outcome}: c}
	if known != nil {
		maps.Copy(grown, *known)
	}
	m.eventCounters.CompareAndSwap(known, &grown) // after a concurrent change, the next call adds it
}

// Phase observes a phase that began at start and ends now. It returns now, the start of the next phase.
func (m *Metrics) Phase(phase string, start time.Time) time.Time {
	now := time.Now()
	m.ObservePhase(phase, now.Sub(start))
	return now
}

// ObservePhase observes how long a phase took.
func (m *Metrics) ObservePhase(phase string, d time.Duration) {
	observer := m.phaseObservers[phase]
	if observer == nil {
		observer = m.phases.WithLabelValues(phase)
	}
	observer.Observe(d.Seconds())
}

// Conditional counts a request by whether its decode worker computes the prompt alone. InitConditional declares the
// series at zero.
func (m *Metrics) Conditional(outcome string)     { m.conditional.WithLabelValues(outcome).Inc() }
func (m *Metrics) InitConditional(outcome string) { m.conditional.WithLabelValues(outcome) }

// InitDecision declares the series of a reason at zero.
func (m *Metrics) InitDecision(reason string) { m.decisions.WithLabelValues(reason) }

// Name and help of the gauge of models without a tokenizer.
var (
	ModelsWithoutTokenizer = Reading{"kvepp_models_without_tokenizer",
		"Models of --model whose tokenizer could not be loaded; their requests are routed by load only."}
)

// Names and help of the metrics of connections, TLS certificates and token files.
var (
	CertificateExpires = Reading{"kvepp_certificate_expires_seconds",
		"Expiry of the certificate of the external processor's port, in seconds since 1970."}
	CertificatesRefused = Reading{"kvepp_certificates_refused_total",
		"Changed certificate files that kvepp could not use; it kept the earlier certificate."}
	Connections       = Reading{"kvepp_connections", "Open connections, by listener (ext_proc, health, ...)."}
	ConnectionsClosed = Reading{"kvepp_connections_closed_total",
		"Connections closed at the limit of a listener, by outcome: evicted (an idle connection made room for a new " +
			"one), refused (a new one, while all others had requests)."}
	HandshakeFailures = Reading{"kvepp_tls_handshake_failures_total",
		"Connections to the external processor's port that failed before the first request, by cause: plaintext " +
			"(only kvepp uses TLS), tls_is_off (only the peer uses TLS), client_certificate (missing, or of another " +
			"authority), certificate_refused (the peer refuses kvepp's certificate), version, alpn, closed (by the " +
			"peer, as TCP health checks do), timeout, other."}
	TokenFilesRefused = Reading{"kvepp_token_files_refused_total",
		"Changed files of bearer tokens that kvepp could not use; it kept the earlier tokens."}
)

// Names and help of the metrics of logs and traces.
var (
	AccessLogLines = Reading{"kvepp_access_log_lines_total",
		"Lines of the access log, by outcome: written, dropped (the log's reader was too slow), failed (could not " +
			"be written)."}
	RecordedRequests = Reading{"kvepp_recorded_requests_total",
		"Requests for the file of --record, by outcome: written, dropped (the file's disk was too slow), failed " +
			"(the file could not be written, and recording has stopped), skipped (no exact token ids, a response of " +
			"unknown length, or another block size than the file's)."}
	LogLines = Reading{"kvepp_log_lines_total",
		"Lines of kvepp's own log on standard error, by outcome: written, dropped (the log's reader was too slow), " +
			"failed (could not be written), suppressed (by the rate limit for lines of one kind)."}
	TraceSpans = Reading{"kvepp_trace_spans_total",
		"Trace spans by outcome: exported (the collector took them), failed (the collector was unreachable or " +
			"refused them)."}
)

// The metrics that are read at each scrape.
var (
	MemoryLimit = Reading{"kvepp_memory_limit_bytes",
		"Soft memory limit of Go's runtime, 0 for no limit, by source: environment (GOMEMLIMIT), container (seven " +
			"eighths of the cgroup's limit), none."}
	Streams   = Reading{"kvepp_streams", "Open ext_proc streams: requests whose responses have not ended."}
	HeldBytes = Reading{"kvepp_held_body_bytes",
		"Memory that requests hold until they are routed, in bytes: bodies with their buffers, the most that " +
			"reading them may take, and token ids while they wait for a worker; bounded by --max-buffered-bytes."}
	Adapters = Reading{"kvepp_lora_adapters", "LoRA adapters that kvepp knows, from --lora, engines' lists of models " +
		"and KV events."}
	AdapterLoads = Reading{"kvepp_lora_adapter_loads_total",
		"How often kvepp gave an adapter that no engine had to a worker, which has to load it."}
	Sessions        = Reading{"kvepp_sessions", "Sessions that session affinity keeps on a worker."}
	SessionRequests = Reading{"kvepp_session_requests_total",
		"Requests of sessions by outcome: new, kept (on the session's worker), moved (that worker was overloaded " +
			"or not available)."}
	SessionsEnded = Reading{"kvepp_sessions_ended_total",
		"Ended sessions, by cause: final (a request ended it), expired, evicted (the table was full), " +
			"worker_left."}
	TokenizerURLOpen = Reading{"kvepp_tokenizer_url_open",
		"1 while the circuit breaker for the engine at --tokenizer-url is open, else 0."}
	ActiveRequests = Reading{"kvepp_active_requests",
		"Bookings in the load book: requests that were routed and have not ended."}
	Flattened = Reading{"kvepp_active_requests_counted_only_total",
		"Requests whose blocks are only counted, because those of running requests take too much memory " +
			"(--max-buffered-bytes): they count as blocks that no other request shares."}
	IndexBlocks = Reading{"kvepp_index_blocks",
		"Entries of the index: one for each block of each worker in each tier."}
	IndexBytes     = Reading{"kvepp_index_bytes", "Memory in use by the index, in bytes."}
	IndexMaxBytes  = Reading{"kvepp_index_max_bytes", "Limit of the index's memory, in bytes."}
	IndexPredicted = Reading{"kvepp_index_predicted_blocks",
		"Blocks of all workers that the index predicts, because requests with these blocks were sent there."}
	IndexAtBound = Reading{"kvepp_index_at_bound",
		"1 while overlap may be underestimated because the index evicted blocks to stay within its limit, else " +
			"0."}
	IndexOutcomes = Reading{"kvepp_index_outcomes_total",
		"Blocks and stores by what the index did with them: stored again while present (duplicate), evicted at " +
			"the limit (evicted), stores whose parent came later (joined) or never (parent_not_found); predicted " +
			"blocks that expired (expired) or exceeded their limit (pruned)."}
	Subscriptions = Reading{"kvepp_subscriptions",
		"Subscriptions to engines' KV events, by state (connected, connecting)."}
	SilentWorkers = Reading{"kvepp_silent_workers",
		"Workers that have served requests but sent no KV event: wrong address, blocked port, or events are " +
			"disabled."}
	HeldRequests = Reading{"kvepp_held_requests",
		"Requests that wait while the pool has no endpoint for them (--hold-when-empty), or until a worker's KV " +
			"cache has room for their conversation (--router-admission)."}
	Conversations = Reading{"kvepp_conversations",
		"Conversations that --router-admission knows, by state: running (a turn runs), idle (admitted, between " +
			"two turns), lapsed (idle for too long; the next turn has to be admitted again)."}
	QueueTenants = Reading{"kvepp_queue_tenants",
		"Tenants that the queue tells apart, over all models and policy classes or bands: at most 4,096 of each, and " +
			"64 places that further ones share."}
	QueuedRequests    = Reading{"kvepp_queued_requests", "Requests that wait for a worker, by policy class."}
	OverloadedWorkers = Reading{"kvepp_overloaded_workers",
		"Workers that are not candidates because their load is above a busy threshold."}
	UnresolvedNames = Reading{"kvepp_unresolved_host_names",
		"Host names in the endpoints file that have no address; their endpoints are left out."}
	EjectedWorkers = Reading{"kvepp_ejected_workers",
		"Workers that get no requests because their endpoint failed (--eject)."}
	CordonedWorkers = Reading{"kvepp_cordoned_workers",
		"Workers that get no new requests because their endpoint is cordoned: over the admin address, by a Pod " +
			"annotation, or in the endpoints file."}
	Workers = Reading{"kvepp_workers", "Workers (endpoint and rank) in the pool."}
)

// Names and help of the metrics of Kubernetes, with --pool-name or --endpoint-selector.
var (
	KubeUpdates = Reading{"kvepp_kube_updates_total",
		"Changes read from Kubernetes, by scope: list (all Pods: at the start, for a new selector, after a watch " +
			"that could not resume), pool (the ports of all Pods), change (one Pod, or Dynamo's metadata of one); " +
			"update counts how often kvepp published new endpoints."}
	KubeErrors   = Reading{"kvepp_kube_errors_total", "Failed requests to the API server, by kind of object."}
	KubeFollowed = Reading{"kvepp_kube_followed",
		"1 while kvepp watches a kind of object; 0 while its CRD is absent, kvepp may not read it, or the API " +
			"server does not answer."}
	Leader = Reading{"kvepp_leader", "1 while this replica is the leader of --ha-enable-leader-election, else 0."}
)

// Unusable counts cached tokens that the chosen worker cannot reuse, see kvepp_unusable_cached_tokens_total.
func (m *Metrics) Unusable(kind string, tokens int) {
	m.unusable.WithLabelValues(kind).Add(float64(tokens))
}
