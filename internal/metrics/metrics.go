// Package metrics declares every metric that kvepp exports, in one place, so that names and labels can be read
// together.
//
// It owns names, help texts and buckets. It never decides anything, and no label takes a value that a client chooses.
// Concurrency: all of it is safe from any goroutine.
package metrics

import (
	"maps"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Metrics is the set of exported metrics. Create it with New.
type Metrics struct {
	Registry *prometheus.Registry

	requests        *prometheus.CounterVec
	decisions       *prometheus.CounterVec
	events          *prometheus.CounterVec
	phases          *prometheus.HistogramVec
	tokenizerURL    *prometheus.CounterVec
	tokenizerChecks *prometheus.CounterVec
	hints           *prometheus.CounterVec
	rejected        *prometheus.CounterVec
	served          *prometheus.CounterVec
	rewritten       *prometheus.CounterVec
	ejections       *prometheus.CounterVec
	queueWait       prometheus.Histogram
	// those of phases: finding one there is quicker. Read-only after New
	phaseObservers  map[string]prometheus.Observer

	// counters are those of events that were counted before, replaced whole: finding one in events takes a lock, and
	// longer than most events take to be applied.
	eventCounters atomic.Pointer[map[event]prometheus.Counter]

	// Predicted counts tokens of the chosen workers' leading blocks, as the index had them when the choice was made.
	Predicted prometheus.Counter
	// UpperBound counts decisions whose predicted tokens are an upper bound.
	UpperBound prometheus.Counter
	// Reported counts usage.prompt_tokens_details.cached_tokens of the same requests' responses.
	Reported prometheus.Counter
	// PredictedOfReported counts what Predicted does, of these requests alone.
	PredictedOfReported prometheus.Counter
	// PromptTokenMismatches counts answers that report another number of prompt tokens than kvepp computed.
	PromptTokenMismatches prometheus.Counter
	// Unread counts answers that kvepp could not look into, because they are compressed.
	Unread prometheus.Counter
	// EndpointFileRefused counts readings of the endpoints file that were refused.
	EndpointFileRefused prometheus.Counter
	// IgnoredEndpoints is the number of encode workers, which are no candidates.
	IgnoredEndpoints prometheus.Gauge
	// RefusedEndpoints is the number of endpoints that are left out because a name or an address of theirs cannot be
	// used.
	RefusedEndpoints prometheus.Gauge
	// AggregatedSelections, PrefillSelections and DecodeSelections count the workers chosen, by role.
	AggregatedSelections, PrefillSelections, DecodeSelections prometheus.Counter
	// Unpaired counts requests that were refused because no prefill worker was ready.
	Unpaired prometheus.Counter
	// Injected counts requests whose token ids went on with them.
	Injected prometheus.Counter
	// ModelFileMismatches is the number of model files that workers have in another version than kvepp.
	ModelFileMismatches prometheus.Gauge
}

// event is what tells the counters of events apart.
type event struct{ kind, outcome string }

// New declares the metrics on a registry of their own, with Go's runtime and process metrics beside them.
func New() *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_requests_total",
			Help: "HTTP requests by the status that the client was answered, by the endpoint or by kvepp itself; " +
				"\"none\" when the stream ended before a response.",
		}, []string{"code"}),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_decisions_total",
			Help: "Routing decisions by reason: \"kv\" priced overlap and load, \"media_prefix\" overlap up to the " +
				"first image; every other reason names why only load could be priced.",
		}, []string{"reason"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_events_total",
			Help: "KV events by kind (stored, removed, cleared, ignored, unknown; batch and subscription for what " +
				"carries them) and outcome (applied, or why not).",
		}, []string{"kind", "outcome"}),
		phases: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvepp_phase_seconds",
			Help: "Time spent in each phase of a decision: wait (bodies above 16 KiB, for memory and a processor " +
				"to be read), parse, tokenize (of which tokenizer_url, waiting for an engine's ids), hash, match, " +
				"select, predict; and pick, the whole.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12), // 1 us .. 4.2 s
		}, []string{"phase"}),
		tokenizerURL: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_tokenizer_url_requests_total",
			Help: "Requests whose token ids were wanted from the engine at --tokenizer-url, those of " +
				"--tokenizer-check included, by outcome: ok, refused (the engine finds fault with the request), " +
				"unsupported (no endpoint knows its ids), error, timeout, busy, open (the circuit breaker is), " +
				"canceled.",
		}, []string{"model", "outcome"}),
		tokenizerChecks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_tokenizer_check_requests_total",
			Help: "Requests whose token ids --tokenizer-check compared with the engine's, by outcome: equal, differs " +
				"(the model is routed by load only from then on), unknown (one side has none).",
		}, []string{"model", "outcome"}),
		hints: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_hints_ignored_total",
			Help: "Routing hints of clients, in headers or nvext, that were not followed, by hint and cause: " +
				"malformed, disabled (--ignore-client-hints), not_allowed (--allow-client-pinning is not given), " +
				"unheard (a tenant, where endpoints are no frontends of Dynamo).",
		}, []string{"hint", "cause"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_rejections_total",
			Help: "Requests that were turned away because of load, by cause: overloaded (every endpoint that might " +
				"have taken it is above a busy threshold), queue_full, queue_limit (its policy class holds as much " +
				"as it may), queue_timeout, streams (--max-streams), held_bytes (--max-buffered-bytes).",
		}, []string{"cause"}),
		served: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_served_total",
			Help: "Requests of which the proxy said who has served them, by outcome: as_chosen; moved (another " +
				"endpoint, after a retry or a fallback: its load is counted there); unknown (none that kvepp knows: " +
				"its load is counted nowhere).",
		}, []string{"outcome"}),
		rewritten: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "inference_extension_model_rewrite_decisions_total",
			Help: "Requests for a model that went on under the name of another, or might have: by rule, model " +
				"(other: what no rule names) and target.",
		}, []string{"model_rewrite_name", "model_name", "target_model"}),
		ejections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_ejections_total",
			Help: "Ejections of endpoints by cause: the kind of the last failure (refused, reset, status_5xx, " +
				"first_byte, timeout, retried), failure_percent, or what showed that the process is gone or stopped " +
				"(metrics_refused, metrics_silent, process_gone).",
		}, []string{"cause"}),
		queueWait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "kvepp_queue_wait_seconds",
			Help:    "How long requests waited in the queue that did, those included that left it or were turned away.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18), // 1 ms .. 131 s
		}),
		Predicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_predicted_cached_tokens_total",
			Help: "Prompt tokens that the chosen worker's KV cache was believed to hold.",
		}),
		UpperBound: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_upper_bound_decisions_total",
			Help: "Decisions whose predicted cached tokens are an upper bound: the worker's model also has layers " +
				"that keep less (sliding windows, recurrent states).",
		}),
		Reported: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_reported_cached_tokens_total",
			Help: "Prompt tokens that responses reported as cached (usage.prompt_tokens_details.cached_tokens).",
		}),
		PredictedOfReported: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_predicted_of_reported_cached_tokens_total",
			Help: "What was predicted of the requests whose responses reported, to be compared with " +
				"kvepp_reported_cached_tokens_total.",
		}),
		PromptTokenMismatches: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_prompt_token_mismatches_total",
			Help: "Answers to chats and completions that report another number of prompt tokens than kvepp computed: " +
				"its tokenizer or chat template is not the engine's.",
		}),
		Unread: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_unread_answers_total",
			Help: "Answers that were passed on and not looked into, because they are compressed (content-encoding): " +
				"their tokens, and the time to the first of them, are in no metric.",
		}),
		EndpointFileRefused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_endpoints_file_refused_total",
			Help: "Readings of the endpoints file that were refused; the endpoints stayed as they were.",
		}),
		IgnoredEndpoints: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvepp_ignored_endpoints",
			Help: "Endpoints that are no candidates: Dynamo's encode workers.",
		}),
		RefusedEndpoints: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvepp_refused_endpoints",
			Help: "Endpoints of discovery or the cluster that are left out because a name, an address or a text of " +
				"theirs cannot be used.",
		}),
		Unpaired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_unpaired_requests_total",
			Help: "Requests refused because decode workers could take them and no prefill worker that goes with one " +
				"was ready.",
		}),
		Injected: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvepp_injected_token_data_total",
			Help: "Requests whose token ids went on with them, so that Dynamo's frontend need not tokenize " +
				"(--inject-token-data).",
		}),
		ModelFileMismatches: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvepp_model_file_mismatches",
			Help: "Tokenizer and template files of which a worker's model card names another checksum than that of " +
				"kvepp's file. Such workers are routed to by load only.",
		}),
	}
	selections := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kvepp_selections_total",
		Help: "Workers chosen, by the part they were chosen for: aggregated (all of a request), or one for prefill " +
			"and one for decode.",
	}, []string{"role"})
	m.AggregatedSelections, m.PrefillSelections, m.DecodeSelections =
		selections.WithLabelValues(
			"aggregated",
		), selections.WithLabelValues("prefill"), selections.WithLabelValues("decode")
	m.phaseObservers = map[string]prometheus.Observer{}
	for _, phase := range []string{"wait", "parse", "tokenize", "tokenizer_url", "hash", "match", "select", "predict",
		"pick"} {
		m.phaseObservers[phase] = m.phases.WithLabelValues(phase)
	}
	for _, code := range []string{"200", "400", "404", "413", "429", "500", "503", "none"} {
		m.requests.WithLabelValues(code)
	}
	for _, outcome := range []string{"as_chosen", "moved", "unknown"} {
		m.served.WithLabelValues(outcome)
	}
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvepp_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.Registry.MustRegister(
		m.requests,
		m.decisions,
		m.events,
		m.phases,
		m.tokenizerURL,
		m.tokenizerChecks,
		m.hints,
		m.rejected,
		m.rewritten,
		m.served,
		m.ejections,
		m.queueWait,
		selections,
		m.Unpaired,
		m.Injected,
	)
	m.Registry.MustRegister(
		m.Predicted,
		m.UpperBound,
		m.Reported,
		m.PredictedOfReported,
		m.PromptTokenMismatches,
		m.Unread,
		m.EndpointFileRefused,
		m.IgnoredEndpoints,
		m.RefusedEndpoints,
		m.ModelFileMismatches,
		build,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

// Request counts a finished request. Code is an HTTP status in digits, "invalid" for what is none, or "none" without a
// response.
func (m *Metrics) Request(code string) { m.requests.WithLabelValues(code).Inc() }

// InitEjection declares a cause that Ejection counts, at zero.
func (m *Metrics) InitEjection(cause string) { m.ejections.WithLabelValues(cause) }

// Ejection counts one ejection of an endpoint.
func (m *Metrics) Ejection(cause string) { m.ejections.WithLabelValues(cause).Inc() }

// Decision counts one decision.
func (m *Metrics) Decision(reason string) { m.decisions.WithLabelValues(reason).Inc() }

// InitRejections declares the causes that Rejection counts, at zero.
func (m *Metrics) InitRejections(causes ...string) {
	for _, cause := range causes {
		m.rejected.WithLabelValues(cause)
	}
}

// Rejection counts one request that was turned away because of load.
func (m *Metrics) Rejection(cause string) { m.rejected.WithLabelValues(cause).Inc() }

// Served counts one request of which the proxy said who has served it.
func (m *Metrics) Served(outcome string) { m.served.WithLabelValues(outcome).Inc() }

// QueueWait observes for how long one request waited.
func (m *Metrics) QueueWait(d time.Duration) { m.queueWait.Observe(d.Seconds()) }

// InitRemoteTokenize declares the series of an outcome, at zero.
func (m *Metrics) InitRemoteTokenize(model, outcome string) {
	m.tokenizerURL.WithLabelValues(model, outcome)
}

// InitTokenizerCheck declares the series of an outcome, at zero.
func (m *Metrics) InitTokenizerCheck(model, outcome string) {
	m.tokenizerChecks.WithLabelValues(model, outcome)
}

// RemoteTokenize counts one request for a model's token ids to its engine. The model's name is the operator's.
func (m *Metrics) RemoteTokenize(model, outcome string) {
	m.tokenizerURL.WithLabelValues(model, outcome).Inc()
}

// TokenizerCheck counts one comparison of a model's token ids with its engine's. The model's name is the operator's.
func (m *Metrics) TokenizerCheck(model, outcome string) {
	m.tokenizerChecks.WithLabelValues(model, outcome).Inc()
}

// Rewritten counts a request that a rule led to a model. All names are an operator's.
func (m *Metrics) Rewritten(rule, model, target string) {
	m.rewritten.WithLabelValues(rule, model, target).Inc()
}

// HintsIgnored counts n hints that were not followed for one cause; 0 shows the series.
func (m *Metrics) HintsIgnored(hint, cause string, n int) {
	m.hints.WithLabelValues(hint, cause).Add(float64(n))
}

// InitEvent declares the series of a kind of events with one outcome, at zero.
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
	m.eventCounters.CompareAndSwap(known, &grown) // of two that come at once, the other's is remembered the next time
}

// Phase observes one phase that began at start, and returns now, the start of the next.
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

// InitDecision declares the series of a reason, at zero.
func (m *Metrics) InitDecision(reason string) { m.decisions.WithLabelValues(reason) }

// GaugeFunc declares a gauge that is read when Prometheus asks: a package without metrics of its own has a Stats
// method, and whoever wires it turns that into a gauge here.
func (m *Metrics) GaugeFunc(name, help string, labels prometheus.Labels, read func() float64) {
	m.Registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, read),
	)
}

// CounterFunc declares a counter that is read when Prometheus asks.
func (m *Metrics) CounterFunc(name, help string, labels prometheus.Labels, read func() float64) {
	m.Registry.MustRegister(
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}, read),
	)
}

// Name and help of the gauge of models that lack what they were configured with.
const (
	WithoutTokenizer     = "kvepp_models_without_tokenizer"
	WithoutTokenizerHelp = "Models of --model whose tokenizer could not be loaded: their requests are routed by load " +
		"only."
)

// Names and help of what is exported of the certificates of TLS.
const (
	CertificateExpires      = "kvepp_certificate_expires_seconds"
	CertificateExpiresHelp  = "When the certificate of the external processor's port ends, in seconds since 1970."
	CertificatesRefused     = "kvepp_certificates_refused_total"
	CertificatesRefusedHelp = "Changed files of certificates that could not be used."
	Connections             = "kvepp_connections"
	ConnectionsHelp         = "Open connections, by listener (ext_proc, health, ...)."
	ConnectionsClosed       = "kvepp_connections_closed_total"
	ConnectionsClosedHelp   = "Connections that were closed because a listener has as many as it may, by outcome: " +
		"evicted (it had no request, and made room for a new one), refused (a new one, while all others had requests)."
	ProxyConnections     = "kvepp_proxy_connections_total"
	ProxyConnectionsHelp = "Connections of proxies to the external processor's port, after a successful TLS " +
		"handshake where the port speaks TLS."
	HandshakeFailures     = "kvepp_tls_handshake_failures_total"
	HandshakeFailuresHelp = "Connections to the external processor's port that failed before the first request, by " +
		"cause: plaintext (the peer does not speak TLS), tls_is_off (the peer does, and the port does not), " +
		"client_certificate (missing, or of another authority), certificate_refused (the peer refuses kvepp's), " +
		"version, alpn, closed (by the peer, as TCP health checks do), timeout, other."
)

// Names and help of what is exported of spans.
const (
	AccessLogLines     = "kvepp_access_log_lines_total"
	AccessLogLinesHelp = "Lines of the access log: written, dropped (the reader of the log was too slow), or failed " +
		"(they could not be written)."
	LogLines     = "kvepp_log_lines_total"
	LogLinesHelp = "Lines of kvepp's own log on standard error: written, dropped (the log's reader was too " +
		"slow), failed (they could not be written), or suppressed (there were many of their kind)."
	TraceSpans     = "kvepp_trace_spans_total"
	TraceSpansHelp = "Spans by what became of them: exported (the collector took them) or failed (it was not " +
		"there, or refused them)."
)

// Names and help of what is exported of the files of tokens, and of the limit of Go's memory.
const (
	TokenFilesRefused     = "kvepp_token_files_refused_total"
	TokenFilesRefusedHelp = "Changed files of bearer tokens that could not be used."
	MemoryLimit           = "kvepp_memory_limit_bytes"
	MemoryLimitHelp       = "Memory that Go's runtime keeps within, 0 for no limit, by where the limit is from: " +
		"environment (GOMEMLIMIT), container (seven eighths of what its cgroup may have), none."
)

// Names and help of what GaugeFunc and CounterFunc are called with.
const (
	Streams       = "kvepp_streams"
	StreamsHelp   = "Requests that the proxy has told of and whose answers have not ended."
	HeldBytes     = "kvepp_held_body_bytes"
	HeldBytesHelp = "Bytes of memory that requests take until they are routed: their bodies with what holds " +
		"their pieces, the most that reading them may take, and their token ids while they wait for a worker. " +
		"Bounded by --max-buffered-bytes."
	Adapters            = "kvepp_lora_adapters"
	AdaptersHelp        = "LoRA adapters that are known: from --lora, and from KV events."
	Sessions            = "kvepp_sessions"
	SessionsHelp        = "Sessions that session affinity keeps on a worker."
	SessionRequests     = "kvepp_session_requests_total"
	SessionRequestsHelp = "Requests of sessions by what became of the session: new, kept on its worker, or moved " +
		"to another (its own overloaded, or not to be had)."
	SessionsEnded     = "kvepp_sessions_ended_total"
	SessionsEndedHelp = "Sessions that ended, by cause: final (a request said so), expired, evicted (the table " +
		"was full), worker_left."
	GeneralPattern     = "kvepp_general_pattern_runs_total"
	GeneralPatternHelp = "Texts whose pre-tokenizer pattern ran on the general engine, which is exact but slower."
	RemoteOpen         = "kvepp_tokenizer_url_open"
	RemoteOpenHelp     = "1 while the engine at --tokenizer-url is left alone because it failed too often, else 0."
	ActiveRequests     = "kvepp_active_requests"
	ActiveRequestsHelp = "Running bookings: requests that were routed and have not ended."
	IndexBlocks        = "kvepp_index_blocks"
	IndexBlocksHelp    = "Entries of the index: one for each block of each worker in each tier."
	IndexBytes         = "kvepp_index_bytes"
	IndexBytesHelp     = "Memory of the index in use, in bytes."
	IndexMaxBytes      = "kvepp_index_max_bytes"
	IndexMaxBytesHelp  = "Bound on the memory of the index, in bytes."
	IndexPredicted     = "kvepp_index_predicted_blocks"
	IndexPredictedHelp = "Blocks that workers are believed to hold because they were sent requests with them, " +
		"over all workers."
	IndexAtBound     = "kvepp_index_at_bound"
	IndexAtBoundHelp = "1 while overlap may be counted short because blocks were evicted to keep the index " +
		"within its bound."
	IndexOutcomes     = "kvepp_index_outcomes_total"
	IndexOutcomesHelp = "What became of events in the index: blocks stored again while held (duplicate) or " +
		"evicted at the bound, stores whose parent came later (joined) or that were given up waiting for it " +
		"(parent_not_found); predicted blocks that grew too old (expired) or were too many (pruned)."
	Subscriptions     = "kvepp_subscriptions"
	SubscriptionsHelp = "Subscriptions to engines' KV events by state (connected, connecting)."
	SilentWorkers     = "kvepp_silent_workers"
	SilentWorkersHelp = "Workers that have served requests and sent no KV event: wrong address, blocked port, or " +
		"events that are off."
	QueuedRequests        = "kvepp_queued_requests"
	QueuedRequestsHelp    = "Requests that wait for a worker, by policy class."
	OverloadedWorkers     = "kvepp_overloaded_workers"
	OverloadedWorkersHelp = "Workers that are no candidates because their load is above a busy threshold."
	UnresolvedNames       = "kvepp_unresolved_host_names"
	UnresolvedNamesHelp   = "Host names in the endpoints file that have no address: their endpoints are left out."
	EjectedWorkers        = "kvepp_ejected_workers"
	EjectedWorkersHelp    = "Workers that get no requests because their endpoint failed (--eject)."
	CordonedWorkers       = "kvepp_cordoned_workers"
	CordonedWorkersHelp   = "Workers that get no new requests because their endpoint is cordoned, over the admin " +
		"address, by a Pod annotation, or in the endpoints file."
	Workers     = "kvepp_workers"
	WorkersHelp = "Workers (endpoint and rank) in the pool."
)

// Names and help of what is exported of Kubernetes, with --pool-name or --endpoint-selector.
const (
	KubeUpdates     = "kvepp_kube_updates_total"
	KubeUpdatesHelp = "What was taken in from Kubernetes, by what it was of: list (all Pods: at the start, for " +
		"another selector, after a watch that could not be taken up), pool (its ports, which concern every Pod), " +
		"change (one Pod, or what Dynamo says of one); and update, how often the endpoints were made anew of all that."
	KubeErrors       = "kvepp_kube_errors_total"
	KubeErrorsHelp   = "Requests to the API server that failed, by the kind of objects that they were about."
	KubeFollowed     = "kvepp_kube_followed"
	KubeFollowedHelp = "1 while a kind of objects is followed; 0 while its CRD is absent, kvepp may not read it, or " +
		"the API server does not answer."
	Leader     = "kvepp_leader"
	LeaderHelp = "1 while this replica is the leader of --ha-enable-leader-election, else 0."
)
