package metrics

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// WorkerState holds the values of one worker's metrics that are labelled with its name.
type WorkerState struct {
	Name       string // of the endpoint
	Rank       uint32
	InstanceID uint64 // label worker_id of the series that have Dynamo's names
	Prefill    bool   // label worker_type: prefill, else decode (Dynamo labels aggregated workers so, too)
	Address    string
	Model      string // empty: unknown

	Blocks     int       // entries of the index
	Subscribed bool      // it has a subscription to KV events
	Connected  bool      // the subscription is connected
	LastEvent  time.Time // zero: none came
	Cordoned   bool
	Running    int // requests
	Tokens     int // that the running requests hold
	Requests   WorkerRequests
}

// WorkerRequests counts the ended requests of one worker.
type WorkerRequests struct {
	All    uint64
	Errors uint64 // answered with a status of 500 or above
	// Incomplete counts incomplete responses. It includes those that the client aborted only if the proxy does not
	// report who did.
	Incomplete uint64
}

// CollectWorkers exports the workers that read returns at each scrape. Pairs of name and rank must be unique.
func (m *Metrics) CollectWorkers(read func() []WorkerState) {
	s := &scraped{}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return s.desc("kvepp_worker_"+name, help, append([]string{"worker", "dp_rank"}, labels...)...)
	}
	info := desc("info",
		"Always 1; maps the name of a worker to the labels of its other series (worker_id, dp_rank, worker_type).",
		"worker_id", "worker_type", "address", "model")
	running := desc("active_requests", "Requests that run on a worker.")
	tokens := desc("active_tokens", "Tokens of the distinct KV blocks that a worker's running requests hold.")
	cordoned := desc("cordoned", "1 while a worker gets no new requests because its endpoint is cordoned, else 0.")
	blocks := desc("blocks", "Entries of the index for a worker: one for each block in each tier.")
	connected := desc("events_connected",
		"1 while the subscription to a worker's KV events is connected, else 0; absent for a worker without events.")
	age := desc("last_event_age_seconds",
		"Time since a worker's last KV event was applied; NaN before the first, absent for a worker without events.")
	requests := desc("requests_total",
		"Ended requests of a worker; requests with a prefill and a decode worker count for both.")
	failures := desc("failures_total",
		"Failed requests of a worker, by cause: status (500 or above), incomplete (the response was cut short; if "+
			"the proxy sends kvepp its access log, those that the client aborted are not counted).", "cause")
	s.collect = func(send sender) {
		for _, x := range read() {
			// Names come from outside. A label that is not valid UTF-8 would fail the whole scrape.
			name, rank := strings.ToValidUTF8(x.Name, "?"), strconv.FormatUint(uint64(x.Rank), 10)
			send(info, prometheus.GaugeValue, 1, name, rank, strconv.FormatUint(x.InstanceID, 10),
				workerType(x.Prefill), strings.ToValidUTF8(x.Address, "?"), strings.ToValidUTF8(x.Model, "?"))
			send(cordoned, prometheus.GaugeValue, oneIf(x.Cordoned), name, rank)
			send(running, prometheus.GaugeValue, float64(x.Running), name, rank)
			send(tokens, prometheus.GaugeValue, float64(x.Tokens), name, rank)
			send(blocks, prometheus.GaugeValue, float64(x.Blocks), name, rank)
			if x.Subscribed {
				send(connected, prometheus.GaugeValue, oneIf(x.Connected), name, rank)
				since := math.NaN()
				if !x.LastEvent.IsZero() {
					since = max(time.Since(x.LastEvent).Seconds(), 0)
				}
				send(age, prometheus.GaugeValue, since, name, rank)
			}
			send(requests, prometheus.CounterValue, float64(x.Requests.All), name, rank)
			send(failures, prometheus.CounterValue, float64(x.Requests.Errors), name, rank, "status")
			send(failures, prometheus.CounterValue, float64(x.Requests.Incomplete), name, rank, "incomplete")
		}
	}
	m.Registry.MustRegister(s)
}
