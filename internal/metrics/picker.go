package metrics

import (
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Picker is what the Gateway API Inference Extension's endpoint picker exports of requests, under its names, labels and
// buckets, so that dashboards and alerts made for it go on. Series of the models that the configuration names exist
// from the start. A nil Picker exports nothing.
//
// The extension's own series about its plugins, its flow control and predicted latencies are not there: kvepp has none
// of them.
//
// Source: Gateway API Inference Extension 1.5, pkg/epp/metrics, as llm-d-router 0.10 still has it.
type Picker struct {
	requests, errors                                 *prometheus.CounterVec
	running                                          *prometheus.GaugeVec
	duration, ttft, tpot, ntpot                      *prometheus.HistogramVec
	requestBytes, answerBytes, input, output, cached *prometheus.HistogramVec
	scheduling, hitRatio                             prometheus.Histogram
	scheduled, unscheduled                           prometheus.Counter

	models sync.Map // pickerModel -> *pickerSeries
	labels modelLabels
}

// pickerModel is a model as requests name it, and as the endpoint does.
type pickerModel struct{ name, target string }

type pickerSeries struct {
	pickerModel
	requests                                         prometheus.Counter // of priority 0, which nearly all have
	running                                          prometheus.Gauge
	duration, ttft, tpot, ntpot                      prometheus.Observer
	requestBytes, answerBytes, input, output, cached prometheus.Observer
}

// Error codes of the extension that kvepp's answers and the endpoints' have.
const (
	CodeBadRequest         = "BadRequest"
	CodeNotFound           = "NotFound"
	CodeResourceExhausted  = "ResourceExhausted"
	CodeServiceUnavailable = "ServiceUnavailable"
	CodeInternal           = "Internal"
	CodeModelServerError   = "ModelServerError" // an endpoint answered another status than 200
)

var pickerCodes = []string{
	CodeBadRequest,
	CodeNotFound,
	CodeResourceExhausted,
	CodeServiceUnavailable,
	CodeInternal,
	CodeModelServerError,
}

// The extension's buckets. 32778 is its own.
var (
	pickerSeconds = []float64{
		0.005,
		0.025,
		0.05,
		0.1,
		0.2,
		0.4,
		0.6,
		0.8,
		1,
		1.25,
		1.5,
		2,
		3,
		4,
		5,
		6,
		8,
		10,
		15,
		20,
		30,
		45,
		60,
		120,
		180,
		240,
		300,
		360,
		480,
		600,
		900,
		1200,
		1800,
		2700,
		3600,
	}
	pickerPerToken = []float64{
		0.0005,
		0.00205,
		0.005,
		0.01,
		0.02,
		0.04,
		0.06,
		0.08,
		0.1,
		0.125,
		0.15,
		0.2,
		0.3,
		0.4,
		0.5,
		0.6,
		0.8,
		1,
		1.5,
		2,
		3,
		4.5,
		6,
		12,
		18,
		24,
		30,
		36,
		48,
		60,
		90,
		120,
		180,
		270,
		360,
	}
	pickerNormalized  = []float64{0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10}
	pickerAnswerBytes = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536}
	pickerTokens      = []float64{
		1,
		8,
		16,
		32,
		64,
		128,
		256,
		512,
		1024,
		2048,
		4096,
		8192,
		16384,
		32778,
		65536,
		131072,
		262144,
		524288,
		1048576,
	}
	pickerScheduling = []float64{0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1}
)

// NewPicker declares the metrics among m's.
func (m *Metrics) NewPicker() *Picker {
	byModel := []string{"model_name", "target_model_name"}
	name := func(s string) string { return "inference_objective_" + s }
	histogram := func(s, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(
			prometheus.HistogramOpts{Name: name(s), Help: help, Buckets: buckets},
			byModel,
		)
	}
	p := &Picker{
		requests: prometheus.NewCounterVec(
			prometheus.CounterOpts{Name: name("request_total"), Help: "Requests that were sent to an endpoint."},
			append(slices.Clone(byModel), "priority"),
		),
		errors: prometheus.NewCounterVec(
			prometheus.CounterOpts{
				Name: name("request_error_total"),
				Help: "Requests that were refused, or that an endpoint answered with another status than 200 " +
					"(ModelServerError).",
			},
			append(slices.Clone(byModel), "error_code"),
		),
		running: prometheus.NewGaugeVec(
			prometheus.GaugeOpts{
				Name: name("running_requests"),
				Help: "Requests that were sent to an endpoint and have not ended.",
			},
			byModel[:1],
		),
		duration: histogram(
			"request_duration_seconds",
			"Time from a request's headers to the end of its answer.",
			pickerSeconds,
		),
		ttft: histogram(
			"request_ttft_seconds",
			"Time from a request's headers to the first token of a streamed answer.",
			pickerSeconds,
		),
		tpot: histogram(
			"request_tpot_seconds",
			"Mean time between the tokens of a streamed answer.",
			pickerPerToken,
		),
		ntpot: histogram(
			"normalized_time_per_output_token_seconds",
			"A request's duration by the number of its answer's tokens.",
			pickerNormalized,
		),
		requestBytes: histogram(
			"request_sizes",
			"Bytes of a request's body.",
			prometheus.ExponentialBuckets(64, 2, 25),
		),
		answerBytes: histogram(
			"response_sizes",
			"Bytes of an answer's body, where the proxy shows it.",
			pickerAnswerBytes,
		),
		input:  histogram("input_tokens", "Prompt tokens, as answers report them.", pickerTokens),
		output: histogram("output_tokens", "Tokens of an answer.", pickerTokens[:12]),
		cached: histogram(
			"prompt_cached_tokens",
			"Prompt tokens that were cached, as answers report them.",
			pickerTokens,
		),
		scheduling: prometheus.NewHistogram(
			prometheus.HistogramOpts{Name: "inference_extension_scheduler_e2e_duration_seconds",
				Help:    "Time from a whole request to the choice of its endpoint, but for waiting in the queue.",
				Buckets: pickerScheduling},
		),
		hitRatio: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "inference_extension_prefix_indexer_hit_ratio",
			Help:    "Part of a prompt's tokens that the chosen endpoint was believed to hold (0 to 1).",
			Buckets: prometheus.LinearBuckets(0, 0.1, 11)}),
	}
	attempts := prometheus.NewCounterVec(
		prometheus.CounterOpts{
			Name: "inference_extension_scheduler_attempts_total",
			Help: "Searches for an endpoint, by whether there was one (success, failure).",
		},
		[]string{"status"},
	)
	p.scheduled, p.unscheduled = attempts.WithLabelValues("success"), attempts.WithLabelValues("failure")
	version, commit := "unknown", "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = s.Value
			}
		}
	}
	info := prometheus.NewGauge(
		prometheus.GaugeOpts{
			Name:        "inference_extension_info",
			Help:        "Always 1.",
			ConstLabels: prometheus.Labels{"commit": commit, "build_ref": version},
		},
	)
	info.Set(1)
	m.Registry.MustRegister(
		p.requests,
		p.errors,
		p.running,
		p.duration,
		p.ttft,
		p.tpot,
		p.ntpot,
		p.requestBytes,
		p.answerBytes,
		p.input,
		p.output,
		p.cached,
		p.scheduling,
		p.hitRatio,
		attempts,
		info,
	)
	return p
}

// InitModel declares the series of a model, at zero.
func (p *Picker) InitModel(model string) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{model, model})
	for _, code := range pickerCodes {
		p.errors.WithLabelValues(s.name, s.target, code)
	}
}

// of returns a model's series. There are few models, so they are found without a lock.
func (p *Picker) of(m pickerModel) *pickerSeries {
	if s, ok := p.models.Load(m); ok {
		return s.(*pickerSeries)
	}
	m.name, m.target = p.labels.of(m.name), p.labels.of(m.target)
	with := func(v *prometheus.HistogramVec) prometheus.Observer { return v.WithLabelValues(m.name, m.target) }
	s, _ := p.models.LoadOrStore(
		m,
		&pickerSeries{
			pickerModel: m,
			requests:    p.requests.WithLabelValues(m.name, m.target, "0"),
			running:     p.running.WithLabelValues(m.name),
			duration:    with(p.duration),
			ttft:        with(p.ttft),
			tpot:        with(p.tpot),
			ntpot: with(
				p.ntpot,
			),
			requestBytes: with(p.requestBytes),
			answerBytes:  with(p.answerBytes),
			input:        with(p.input),
			output:       with(p.output),
			cached:       with(p.cached),
		},
	)
	return s.(*pickerSeries)
}

// Scheduled observes how long the search for an endpoint took that there was, and the part of the prompt's tokens that
// it is believed to hold; negative: that is not known.
func (p *Picker) Scheduled(took time.Duration, hit float64) {
	if p == nil {
		return
	}
	p.scheduled.Inc()
	p.scheduling.Observe(took.Seconds())
	if hit >= 0 {
		p.hitRatio.Observe(hit)
	}
}

// Began counts a request that is sent to an endpoint. model is as the request names it, target as the endpoint does;
// neither may be a name that only clients use, nor priority a number.
func (p *Picker) Began(model, target string, priority int, bytes int) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{model, target})
	if priority == 0 {
		s.requests.Inc()
	} else {
		p.requests.WithLabelValues(s.name, s.target, strconv.Itoa(priority)).Inc()
	}
	s.running.Inc()
	s.requestBytes.Observe(float64(bytes))
}

// Refused counts a request that is not sent anywhere.
func (p *Picker) Refused(model, code string) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{model, model})
	p.errors.WithLabelValues(s.name, s.target, code).Inc()
}

// Unscheduled counts a search for an endpoint that found none.
func (p *Picker) Unscheduled() {
	if p != nil {
		p.unscheduled.Inc()
	}
}

// Ended is how a request ended that Began was told of.
type Ended struct {
	Model, Target string // as Began was told

	Failed     bool // the endpoint answered another status than 200
	Duration   time.Duration
	FirstToken time.Duration // after the beginning; 0: not seen
	Bytes      int           // of the answer; 0: not seen
	Input      int           // prompt tokens; 0: not told
	Output     int           // tokens of the answer; 0: not known
	Cached     int           // prompt tokens that were; -1: not told
}

// Ended observes the end of a request.
func (p *Picker) Ended(e *Ended) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{e.Model, e.Target})
	s.running.Dec()
	if e.Failed {
		p.errors.WithLabelValues(s.name, s.target, CodeModelServerError).Inc()
	}
	s.duration.Observe(e.Duration.Seconds())
	if e.FirstToken > 0 {
		s.ttft.Observe(e.FirstToken.Seconds())
		if e.Output > 1 {
			s.tpot.Observe((e.Duration - e.FirstToken).Seconds() / float64(e.Output-1))
		}
	}
	if e.Output > 0 {
		s.output.Observe(float64(e.Output))
		s.ntpot.Observe(e.Duration.Seconds() / float64(e.Output))
	}
	if e.Bytes > 0 {
		s.answerBytes.Observe(float64(e.Bytes))
	}
	if e.Input > 0 {
		s.input.Observe(float64(e.Input))
	}
	if e.Cached >= 0 {
		s.cached.Observe(float64(e.Cached))
	}
}

// Name and help of the size of the index, under the extension's name.
const (
	PrefixIndexer     = "inference_extension_prefix_indexer_size"
	PrefixIndexerHelp = "Entries of the index, as kvepp_index_blocks has them."
)
