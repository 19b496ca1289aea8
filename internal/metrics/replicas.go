package metrics

import (
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Replicas is what kvepp shares with its replicas at one moment. Keys are values of labels.
type Replicas struct {
	Peers                 map[string]int // by state
	Bookings              int
	Events                map[[2]string]uint64 // by kind and outcome
	Snapshots             map[string]uint64    // by reason
	Refused, Closed       map[string]uint64    // by reason
	Freed                 map[string]uint64    // by cause
	ConnectFailures, Flat uint64
	ByPeer                []ReplicaPeer
	Load                  map[string]int // of all workers, by kind
	Unpriced              bool           // the copies are too late to be priced
}

// ReplicaPeer is what kvepp has of one peer.
type ReplicaPeer struct {
	Name      string // by its own words
	Bookings  int
	Staleness time.Duration
}

// maxPeerName bounds the values of the label peer, in bytes.
const maxPeerName = 128

// byName returns the peers with valid and different names. Two processes with one name, such as a container and its
// successor, are one: with the bookings of both, and the greater staleness.
func byName(peers []ReplicaPeer) (all []ReplicaPeer) {
	for _, p := range peers {
		p.Name = strings.ToValidUTF8(p.Name[:min(len(p.Name), maxPeerName)], "")
		if i := slices.IndexFunc(all, func(x ReplicaPeer) bool { return x.Name == p.Name }); i >= 0 {
			all[i].Bookings += p.Bookings
			all[i].Staleness = max(all[i].Staleness, p.Staleness)
			continue
		}
		all = append(all, p)
	}
	return all
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
	replicaPeerBookings = replicaDesc("kvepp_replica_peer_bookings",
		"Running requests of one other replica that kvepp's load book counts, by its name.", "peer")
	replicaPeerStaleness = replicaDesc("kvepp_replica_peer_staleness_seconds",
		"How old one other replica's latest changes were when this one applied them, by its name; 0: not known yet.",
		"peer")
	replicaLoad = replicaDesc("kvepp_replica_load",
		"The part of all workers' load that other replicas' running requests brought, by kind: requests, "+
			"prefill_tokens, active_blocks.", "kind")
	replicaUnpriced = replicaDesc("kvepp_replica_unpriced",
		"1 while the other replicas' requests are known more than 0.25 s late, so that costs leave them out; else 0.")
	replicaEvents = replicaDesc("kvepp_replica_events_total",
		"Changes that other replicas sent, by kind and outcome: applied, ignored: the request had ended, the worker "+
			"is not known, or the change is beyond a bound.",
		"kind", "outcome")
	replicaSnapshots = replicaDesc("kvepp_replica_snapshots_total",
		"Snapshots sent to other replicas, by reason: joined, fell_behind (it read too slowly), asked (it did not "+
			"know a worker yet).", "reason")
	replicaRefused = replicaDesc("kvepp_replica_refused_total",
		"Replicas that wanted to read from this one and were refused or disconnected, by reason.", "reason")
	replicaClosed = replicaDesc("kvepp_replica_closed_total",
		"Connections to other replicas that ended for a reason of the protocol, by reason.", "reason")
	replicaFreed = replicaDesc("kvepp_replica_freed_total",
		"Running requests of other replicas that were freed together, by cause: peer_dead, goodbye.", "cause")
	replicaFailures = replicaDesc("kvepp_replica_connect_failures_total",
		"Attempts to reach another replica that failed; a rise means that its address, certificate or token is wrong.")
	replicaFlat = replicaDesc("kvepp_replica_flat_bookings_total",
		"Running requests of other replicas that count without their blocks' hashes, or not at all: they are too many.")
)

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
	for _, d := range []*prometheus.Desc{replicaPeers, replicaBookings, replicaEvents,
		replicaSnapshots, replicaRefused, replicaClosed, replicaFreed, replicaFailures, replicaFlat,
		replicaPeerBookings, replicaPeerStaleness, replicaLoad, replicaUnpriced} {
		out <- d
	}
}

func (c replicaCollector) Collect(out chan<- prometheus.Metric) {
	now := c.read()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for state, n := range now.Peers {
		gauge(replicaPeers, n, state)
	}
	gauge(replicaBookings, now.Bookings)
	for _, p := range byName(now.ByPeer) {
		gauge(replicaPeerBookings, p.Bookings, p.Name)
		out <- prometheus.MustNewConstMetric(replicaPeerStaleness, prometheus.GaugeValue, p.Staleness.Seconds(), p.Name)
	}
	for kind, n := range now.Load {
		gauge(replicaLoad, n, kind)
	}
	unpriced := 0
	if now.Unpriced {
		unpriced = 1
	}
	gauge(replicaUnpriced, unpriced)
	for labels, n := range now.Events {
		count(replicaEvents, n, labels[0], labels[1])
	}
	for d, all := range map[*prometheus.Desc]map[string]uint64{replicaSnapshots: now.Snapshots,
		replicaRefused: now.Refused, replicaClosed: now.Closed, replicaFreed: now.Freed} {
		for label, n := range all {
			count(d, n, label)
		}
	}
	count(replicaFailures, now.ConnectFailures)
	count(replicaFlat, now.Flat)
}

// ReplicaStaleness, after CollectReplicas, observes how old another replica's changes are when this one applies them.
func (m *Metrics) ReplicaStaleness(d time.Duration) { m.replicaStaleness.Observe(d.Seconds()) }
