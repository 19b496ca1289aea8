package metrics

import (
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Picker exports the request metrics of the Gateway API Inference Extension's endpoint picker, under its names, labels
// and buckets, so that its dashboards and alerts keep working. The series of configured models exist from the start. A
// nil Picker exports nothing.
//
// The extension's series about plugins, flow control and predicted latencies are absent: kvepp has none of these.
//
// Source: Gateway API Inference Extension 1.5, pkg/epp/metrics, as llm-d-router 0.10 still has it.
type Picker struct {
	requests, errors                                   *prometheus.CounterVec
	running                                            *prometheus.GaugeVec
	duration, ttft, tpot, ntpot                        *prometheus.HistogramVec
	requestBytes, responseBytes, input, output, cached *prometheus.HistogramVec
	scheduling, hitRatio                               prometheus.Histogram
	scheduled, unscheduled                             prometheus.Counter

	models sync.Map // pickerModel -> *pickerSeries
	labels modelLabels
}

// pickerModel is the name of a model in requests, and its name at the endpoint.
type pickerModel struct{ name, target string }

type pickerSeries struct {
	pickerModel
	requests                                           prometheus.Counter // of priority 0, as most are
	running                                            prometheus.Gauge
	duration, ttft, tpot, ntpot                        prometheus.Observer
	requestBytes, responseBytes, input, output, cached prometheus.Observer
}

// Error codes of the extension that kvepp uses.
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

// The extension's buckets; 32778 is not a typing error of ours.
var (
	pickerSeconds = []float64{
		0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120,
		180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600,
	}
	pickerPerToken = []float64{
		0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1,
		1.5, 2, 3, 4.5, 6, 12, 18, 24, 30, 36, 48, 60, 90, 120, 180, 270, 360,
	}
	pickerNormalized    = []float64{0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10}
	pickerResponseBytes = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536}
	pickerTokens        = []float64{
		1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536, 131072, 262144, 524288,
		1048576,
	}
	pickerScheduling = []float64{0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1}
)

// NewPicker declares the metrics on m's registry.
func (m *Metrics) NewPicker() *Picker {
	declare := promauto.With(m.Registry)
	byModel := []string{"model_name", "target_model_name"}
	name := func(s string) string { return "inference_objective_" + s }
	histogram := func(s, help string, buckets []float64) *prometheus.HistogramVec {
		return declare.NewHistogramVec(prometheus.HistogramOpts{Name: name(s), Help: help, Buckets: buckets}, byModel)
	}
	p := &Picker{
		requests: declare.NewCounterVec(
			prometheus.CounterOpts{Name: name("request_total"), Help: "Requests sent to an endpoint."},
			append(slices.Clone(byModel), "priority")),
		errors: declare.NewCounterVec(
			prometheus.CounterOpts{
				Name: name("request_error_total"),
				Help: "Requests that kvepp refused, or that an endpoint answered with another status than 200 " +
					"(ModelServerError).",
			},
			append(slices.Clone(byModel), "error_code"),
		),
		running: declare.NewGaugeVec(
			prometheus.GaugeOpts{
				Name: name("running_requests"),
				Help: "Requests sent to an endpoint that have not ended.",
			},
			byModel[:1],
		),
		duration: histogram("request_duration_seconds",
			"Time from a request's headers to the end of its response.", pickerSeconds),
		ttft: histogram("request_ttft_seconds",
			"Time from a request's headers to the first token of a streamed response.", pickerSeconds),
		tpot: histogram("request_tpot_seconds", "Mean time between the tokens of a streamed response.", pickerPerToken),
		ntpot: histogram("normalized_time_per_output_token_seconds",
			"Duration of a request divided by its output tokens.", pickerNormalized),
		requestBytes: histogram("request_sizes",
			"Bytes of a request's body.", prometheus.ExponentialBuckets(64, 2, 25)),
		responseBytes: histogram("response_sizes",
			"Bytes of a response's body, if the proxy sends it to kvepp.", pickerResponseBytes),
		input:  histogram("input_tokens", "Prompt tokens, as responses report them.", pickerTokens),
		output: histogram("output_tokens", "Output tokens of a response.", pickerTokens[:12]),
		cached: histogram("prompt_cached_tokens", "Cached prompt tokens, as responses report them.", pickerTokens),
		scheduling: declare.NewHistogram(
			prometheus.HistogramOpts{Name: "inference_extension_scheduler_e2e_duration_seconds",
				Help:    "Time from a complete request to the choice of its endpoint, without the queue wait.",
				Buckets: pickerScheduling},
		),
		hitRatio: declare.NewHistogram(prometheus.HistogramOpts{Name: "inference_extension_prefix_indexer_hit_ratio",
			Help:    "Fraction (0..1) of a prompt's tokens that the index had for the chosen endpoint.",
			Buckets: prometheus.LinearBuckets(0, 0.1, 11)}),
	}
	attempts := declare.NewCounterVec(
		prometheus.CounterOpts{
			Name: "inference_extension_scheduler_attempts_total",
			Help: "Attempts to choose an endpoint, by outcome (success, failure).",
		},
		[]string{"status"},
	)
	p.scheduled, p.unscheduled = attempts.WithLabelValues("success"), attempts.WithLabelValues("failure")
	return p
}

// InitModel declares the series of a model at zero.
func (p *Picker) InitModel(model string) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{model, model})
	for _, code := range pickerCodes {
		p.errors.WithLabelValues(s.name, s.target, code)
	}
}

// of returns a model's series, without a lock if they exist.
func (p *Picker) of(m pickerModel) *pickerSeries {
	if s, ok := p.models.Load(m); ok {
		return s.(*pickerSeries)
	}
	m.name, m.target = p.labels.of(m.name), p.labels.of(m.target)
	with := func(v *prometheus.HistogramVec) prometheus.Observer { return v.WithLabelValues(m.name, m.target) }
	s, _ := p.models.LoadOrStore(
		m,
		&pickerSeries{
			pickerModel:   m,
			requests:      p.requests.WithLabelValues(m.name, m.target, "0"),
			running:       p.running.WithLabelValues(m.name),
			duration:      with(p.duration),
			ttft:          with(p.ttft),
			tpot:          with(p.tpot),
			ntpot:         with(p.ntpot),
			requestBytes:  with(p.requestBytes),
			responseBytes: with(p.responseBytes),
			input:         with(p.input),
			output:        with(p.output),
			cached:        with(p.cached),
		},
	)
	return s.(*pickerSeries)
}

// Scheduled observes how long the choice of an endpoint took, and the fraction of the prompt's tokens that the index
// had for it. A negative hit is unknown.
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

// Began counts a request that is sent to an endpoint. model is the request's name of the model, target the endpoint's.
// Clients must not be able to choose model, target or priority freely.
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

// Refused counts a request that is not sent to any endpoint.
func (p *Picker) Refused(model, code string) {
	if p == nil {
		return
	}
	s := p.of(pickerModel{model, model})
	p.errors.WithLabelValues(s.name, s.target, code).Inc()
}

// Unscheduled counts a request for which there was no endpoint.
func (p *Picker) Unscheduled() {
	if p != nil {
		p.unscheduled.Inc()
	}
}

// Ended describes how a request ended that Began counted.
type Ended struct {
	Model, Target string // the arguments of Began

	Failed     bool // the endpoint answered another status than 200
	Duration   time.Duration
	FirstToken time.Duration // since the beginning; 0: unknown
	Bytes      int           // of the response; 0: unknown
	Input      int           // prompt tokens; 0: unknown
	Output     int           // output tokens; 0: unknown
	Cached     int           // cached prompt tokens; -1: unknown
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
		s.responseBytes.Observe(float64(e.Bytes))
	}
	if e.Input > 0 {
		s.input.Observe(float64(e.Input))
	}
	if e.Cached >= 0 {
		s.cached.Observe(float64(e.Cached))
	}
}

// Name and help of the size of the index, under the extension's name.
var (
	PrefixIndexer = Reading{"inference_extension_prefix_indexer_size",
		"Entries of the index, equal to kvepp_index_blocks."}
)
