package metrics

import "github.com/prometheus/client_golang/prometheus"

// InferencePool is what the Gateway API Inference Extension's endpoint picker exports of its pool.
type InferencePool struct {
	Ready int // workers: each port of a pod is one
	// Averages over the workers whose engines tell; 0 while none does.
	KVUsage, Waiting, Running float64
	Pods                      []PodQueue
}

// PodQueue is what one worker's engine keeps waiting.
type PodQueue struct {
	Pod     string // NAME-rank-RANK
	Waiting float64
}

// CollectPool exports, under the extension's names, what read returns whenever it is asked. name is the pool's.
//
// Source: Gateway API Inference Extension 1.5, pkg/epp/metrics.
func (m *Metrics) CollectPool(name string, read func() InferencePool) {
	desc := func(metric, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("inference_pool_"+metric, help, append([]string{"name"}, labels...), nil)
	}
	m.Registry.MustRegister(&inferencePool{name: name, read: read,
		ready: desc("ready_pods", "Workers that are in the pool. Each port of a pod is one."),
		usage: desc(
			"average_kv_cache_utilization",
			"Part of their KV caches that requests hold (0 to 1), by the engines' own account: the mean of those "+
				"that tell, 0 while none does.",
		),
		waiting: desc(
			"average_queue_size",
			"Requests that wait within an engine: the mean of those that tell, 0 while none does.",
		),
		running: desc(
			"average_running_requests",
			"Requests that an engine computes: the mean of those that tell, 0 while none does.",
		),
		pods: desc(
			"per_pod_queue_size",
			"Requests that wait within the engine of each worker that tells.",
			"model_server_pod",
		),
	})
}

type inferencePool struct {
	name                                 string
	read                                 func() InferencePool
	ready, usage, waiting, running, pods *prometheus.Desc
}

func (p *inferencePool) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.ready, p.usage, p.waiting, p.running, p.pods} {
		to <- d
	}
}

func (p *inferencePool) Collect(to chan<- prometheus.Metric) {
	now := p.read()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{p.name}, labels...)...)
	}
	gauge(p.ready, float64(now.Ready))
	gauge(p.usage, now.KVUsage)
	gauge(p.waiting, now.Waiting)
	gauge(p.running, now.Running)
	for _, pod := range now.Pods {
		gauge(p.pods, pod.Waiting, pod.Pod)
	}
}

// Names and help of what is exported of the engines' own gauges besides.
const (
	EngineReadings     = "kvepp_engine_readings_total"
	EngineReadingsHelp = "Readings of engines' own metrics, and messages of their loads on Dynamo's event plane, by " +
		"outcome: ok; without (no metric that is known here), refused (an answer other than 200), timeout, " +
		"unreachable, too_large, malformed."
	WithGauges     = "kvepp_workers_with_gauges"
	WithGaugesHelp = "Workers whose engines have told of their own load lately (--refresh-metrics-interval)."
	UnseenLoad     = "kvepp_unseen_load_workers"
	UnseenLoadHelp = "Workers whose engines have had more requests for a minute than kvepp has sent them: at " +
		"least 4, and half as many again. Load goes around kvepp; with several replicas of it that is as it must be, " +
		"and requests for several answers or with several prompts are several to an engine."
)
