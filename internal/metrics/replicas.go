package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Replicas is what kvepp shares with its replicas at one moment.
type Replicas struct {
	Peers                                 map[string]int // by state
	Requests, PrefillTokens, ActiveBlocks int            // of all workers
	Unpriced                              bool           // the copies are too late to be priced
}

func replicaDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	replicaPeers = replicaDesc("kvepp_replica_peers",
		"Other replicas by state: live, joining (their bookings have not come whole), suspect (silent for a second, "+
			"or the connection ended; their bookings still count), absent (an address where no replica answers).",
		"state")
	replicaBookings = replicaDesc("kvepp_replica_bookings",
		"Running requests of other replicas that kvepp's load book counts.")
	replicaLoad = replicaDesc("kvepp_replica_load",
		"The part of all workers' load that other replicas' running requests brought, by kind: requests, "+
			"prefill_tokens, active_blocks.", "kind")
	replicaUnpriced = replicaDesc("kvepp_replica_unpriced",
		"1 while the other replicas' requests are known more than 0.25 s late, so that costs leave them out; else 0.")
)

// ReplicaCounters declares the counters of what package scoring/replica counts. add adds to one: what is counted, and
// its reason or cause.
func (m *Metrics) ReplicaCounters() (add func(what, by string, n int)) {
	declare := func(name, help string, labels ...string) *prometheus.CounterVec {
		counter := promauto.With(m.Registry).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		if len(labels) == 0 {
			counter.WithLabelValues()
		}
		return counter
	}
	all := map[string]*prometheus.CounterVec{
		"copied": declare("kvepp_replica_copied_total",
			"Requests of other replicas that kvepp's load book has counted."),
		"refused": declare("kvepp_replica_refused_total",
			"Replicas that wanted to read from this one and were refused or disconnected, by reason.", "reason"),
		"closed": declare("kvepp_replica_closed_total",
			"Connections to other replicas that ended for a reason of the protocol, by reason.", "reason"),
		"freed": declare("kvepp_replica_freed_total",
			"Running requests of other replicas that were freed together, by cause: peer_dead, goodbye.", "cause"),
		"failed": declare("kvepp_replica_connect_failures_total",
			"Attempts to reach another replica that failed; a rise means that its address, certificate or token is "+
				"wrong."),
		"limited": declare("kvepp_replica_flat_bookings_total",
			"Running requests of other replicas that count without their blocks' hashes, or not at all: they are too "+
				"many."),
	}
	return func(what, by string, n int) {
		switch counter := all[what]; {
		case counter == nil: // it is for tests
		case by == "":
			counter.WithLabelValues().Add(float64(n))
		default:
			counter.WithLabelValues(by).Add(float64(n))
		}
	}
}

// replicaCollector exports Replicas at each scrape.
type replicaCollector struct{ read func() Replicas }

// CollectReplicas exports what read returns at each scrape.
func (m *Metrics) CollectReplicas(read func() Replicas) {
	m.replicaStaleness = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "kvepp_replica_staleness_seconds",
		Help: "How old another replica's changes are when this one applies them, measured several times a second for " +
			"each replica; above 0.02, replicas choose by old loads.",
		Buckets: prometheus.ExponentialBuckets(5e-4, 2, 14), // 0.5 ms .. 4 s
	})
	m.Registry.MustRegister(replicaCollector{read}, m.replicaStaleness)
}

func (replicaCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{replicaPeers, replicaBookings, replicaLoad, replicaUnpriced} {
		out <- d
	}
}

func (c replicaCollector) Collect(out chan<- prometheus.Metric) {
	now := c.read()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	for state, n := range now.Peers {
		gauge(replicaPeers, n, state)
	}
	gauge(replicaBookings, now.Requests)
	gauge(replicaLoad, now.Requests, "requests")
	gauge(replicaLoad, now.PrefillTokens, "prefill_tokens")
	gauge(replicaLoad, now.ActiveBlocks, "active_blocks")
	gauge(replicaUnpriced, int(oneIf(now.Unpriced)))
}

// ReplicaStaleness, after CollectReplicas, observes how old another replica's changes are when this one applies them.
func (m *Metrics) ReplicaStaleness(d time.Duration) { m.replicaStaleness.Observe(d.Seconds()) }
