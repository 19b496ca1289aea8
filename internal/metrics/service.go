package metrics

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// IndexerService exports the HTTP metrics of `kvepp indexer`, under the names of Dynamo's standalone indexer.
//
// Source: what `python -m dynamo.indexer` 1.6.1 answers to GET /metrics.
type IndexerService struct {
	errors   *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// IndexerListeners is what the service's wiring declares.
var IndexerListeners = Reading{"dynamo_kvindexer_listeners",
	"Subscriptions to KV events, by state: active (connected), pending (not yet connected)."}

// NewIndexerService declares the metrics on m's registry.
func (m *Metrics) NewIndexerService() *IndexerService {
	s := &IndexerService{
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dynamo_kvindexer_errors_total", Help: "HTTP requests answered with an error.",
		}, []string{"endpoint", "status_class"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dynamo_kvindexer_request_duration_seconds", Help: "Time to answer an HTTP request.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 2, 20), // 0.1 ms .. 52 s
		}, []string{"endpoint"}),
	}
	m.Registry.MustRegister(s.errors, s.duration)
	return s
}

// Responded counts one request to a known path, which began at start.
func (s *IndexerService) Responded(endpoint, _ string, status int, start time.Time) {
	s.duration.WithLabelValues(endpoint).Observe(time.Since(start).Seconds())
	if status >= 400 {
		s.errors.WithLabelValues(endpoint, strconv.Itoa(status/100)+"xx").Inc()
	}
}

// SelectionService exports the HTTP metrics of `kvepp select`.
type SelectionService struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// The metrics that the service declares of itself.
var (
	SelectionReservations = Reading{"kvepp_selection_reservations", "Reservations that have not ended."}
	SelectionExpired      = Reading{"kvepp_selection_reservations_expired_total",
		"Reservations that no client ended within --active-request-expiry-secs."}
	SelectionWaiting = Reading{"kvepp_selection_waiting", "Selections that wait because every worker is busy."}
)

// NewSelectionService declares the metrics on m's registry.
func (m *Metrics) NewSelectionService() *SelectionService {
	s := &SelectionService{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvepp_selection_requests_total", Help: "HTTP requests to the selection service.",
		}, []string{"endpoint", "method", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvepp_selection_request_duration_seconds", Help: "Time to answer an HTTP request.",
			Buckets: prometheus.ExponentialBuckets(1e-5, 4, 12), // 10 us .. 42 s
		}, []string{"endpoint"}),
	}
	m.Registry.MustRegister(s.requests, s.duration)
	return s
}

// Responded counts one request to a known path, which began at start.
func (s *SelectionService) Responded(endpoint, method string, status int, start time.Time) {
	s.requests.WithLabelValues(endpoint, method, strconv.Itoa(status)).Inc()
	s.duration.WithLabelValues(endpoint).Observe(time.Since(start).Seconds())
}
