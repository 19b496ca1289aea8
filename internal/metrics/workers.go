package metrics

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// WorkerState is what is exported of one worker under its name.
type WorkerState struct {
	Name       string // of the endpoint
	Rank       uint32
	InstanceID uint64 // label worker_id of the series that have Dynamo's names
	Prefill    bool   // its role: label worker_type is prefill, else decode as Dynamo says of aggregated workers too
	Address    string
	Model      string // empty: the worker does not say

	Blocks     int       // entries of the index
	Subscribed bool      // it has a subscription to KV events
	Connected  bool      // and that is connected
	LastEvent  time.Time // zero: none came
	Cordoned   bool
	Requests   WorkerRequests
}

// WorkerRequests counts the requests of one worker that ended.
type WorkerRequests struct {
	All    uint64
	Errors uint64 // answered with a status of 500 or above
	// answers that broke off; those that the client broke off only where the proxy does not tell who did it
	Incomplete uint64
}

// CollectWorkers exports the workers that read returns whenever it is asked; the call is made at every scrape. Names
// and ranks must be unique.
func (m *Metrics) CollectWorkers(read func() []WorkerState) {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvepp_worker_"+name, help, append([]string{"worker", "dp_rank"}, labels...), nil)
	}
	m.Registry.MustRegister(&workerStates{
		read: read,
		info: desc(
			"info",
			"Always 1: the name of each worker beside the labels of its other series (worker_id, dp_rank, "+
				"worker_type).",
			"worker_id",
			"worker_type",
			"address",
			"model",
		),
		cordoned: desc("cordoned", "1 while a worker gets no new requests because its endpoint is cordoned, else 0."),
		blocks:   desc("blocks", "Entries of the index for a worker: one for each block in each tier."),
		connected: desc(
			"events_connected",
			"1 while the subscription to a worker's KV events is connected, else 0. Absent for a worker without "+
				"events.",
		),
		age: desc(
			"last_event_age_seconds",
			"Time since a worker's last KV event was applied. NaN until the first; absent for a worker without events.",
		),
		requests: desc(
			"requests_total",
			"Requests of a worker that ended. Those with a prefill and a decode worker count for both.",
		),
		failures: desc(
			"failures_total",
			"Requests of a worker that failed, by cause: status (500 or above), incomplete (the answer broke off; "+
				"where the proxy sends kvepp its access log, answers that the client broke off are not counted).",
			"cause",
		),
	})
}

// workerStates collects the series of workers by name.
type workerStates struct {
	read                                                       func() []WorkerState
	info, cordoned, blocks, connected, age, requests, failures *prometheus.Desc
}

func (w *workerStates) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{w.info, w.cordoned, w.blocks, w.connected, w.age, w.requests, w.failures} {
		to <- d
	}
}

func (w *workerStates) Collect(to chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, x := range w.read() {
		kind := "decode"
		if x.Prefill {
			kind = "prefill"
		}
		// Names come from outside, and a label that is no UTF-8 would be an error of the whole scrape.
		name, rank := strings.ToValidUTF8(x.Name, "?"), strconv.FormatUint(uint64(x.Rank), 10)
		send(
			w.info,
			prometheus.GaugeValue,
			1,
			name,
			rank,
			strconv.FormatUint(x.InstanceID, 10),
			kind,
			strings.ToValidUTF8(x.Address, "?"),
			strings.ToValidUTF8(x.Model, "?"),
		)
		cordoned := 0.0
		if x.Cordoned {
			cordoned = 1
		}
		send(w.cordoned, prometheus.GaugeValue, cordoned, name, rank)
		send(w.blocks, prometheus.GaugeValue, float64(x.Blocks), name, rank)
		if x.Subscribed {
			connected := 0.0
			if x.Connected {
				connected = 1
			}
			send(w.connected, prometheus.GaugeValue, connected, name, rank)
			age := math.NaN()
			if !x.LastEvent.IsZero() {
				age = max(time.Since(x.LastEvent).Seconds(), 0)
			}
			send(w.age, prometheus.GaugeValue, age, name, rank)
		}
		send(w.requests, prometheus.CounterValue, float64(x.Requests.All), name, rank)
		send(w.failures, prometheus.CounterValue, float64(x.Requests.Errors), name, rank, "status")
		send(w.failures, prometheus.CounterValue, float64(x.Requests.Incomplete), name, rank, "incomplete")
	}
}
