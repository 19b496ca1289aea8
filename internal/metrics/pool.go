package metrics

import "github.com/prometheus/client_golang/prometheus"

// InferencePool holds the values of the pool metrics of the Gateway API Inference Extension's endpoint picker.
type InferencePool struct {
	Ready int // workers: each port of a pod is one
	// Averages over the workers whose engines report; 0 while none does.
	KVUsage, Waiting, Running float64
	Pods                      []PodQueue
}

// PodQueue is the queue of one worker's engine.
type PodQueue struct {
	Pod     string // NAME-rank-RANK
	Waiting float64
}

// CollectPool exports the pool that read returns at each scrape, under the extension's names. name is the pool's name.
//
// Source: Gateway API Inference Extension 1.5, pkg/epp/metrics.
func (m *Metrics) CollectPool(name string, read func() InferencePool) {
	s := &scraped{}
	desc := func(metric, help string, labels ...string) *prometheus.Desc {
		return s.desc("inference_pool_"+metric, help, append([]string{"name"}, labels...)...)
	}
	ready := desc("ready_pods", "Workers that are in the pool. Each port of a pod is one.")
	usage := desc("average_kv_cache_utilization",
		"Fraction (0..1) of KV cache in use, as engines report it: the mean over reporting engines, 0 if there "+
			"are none.")
	waiting := desc("average_queue_size",
		"Requests that wait in an engine: the mean over reporting engines, 0 if there are none.")
	running := desc("average_running_requests",
		"Requests that run in an engine: the mean over reporting engines, 0 if there are none.")
	pods := desc("per_pod_queue_size",
		"Requests that wait in a worker's engine, for engines that report it.", "model_server_pod")
	s.collect = func(send sender) {
		now := read()
		send(ready, prometheus.GaugeValue, float64(now.Ready), name)
		send(usage, prometheus.GaugeValue, now.KVUsage, name)
		send(waiting, prometheus.GaugeValue, now.Waiting, name)
		send(running, prometheus.GaugeValue, now.Running, name)
		for _, pod := range now.Pods {
			send(pods, prometheus.GaugeValue, pod.Waiting, name, pod.Pod)
		}
	}
	m.Registry.MustRegister(s)
}

// Names and help of kvepp's metrics about engines' own gauges.
var (
	EngineReadings = Reading{"kvepp_engine_readings_total",
		"Scrapes of engines' metrics, and load messages on Dynamo's event plane, by outcome: ok, without (no " +
			"metric that kvepp knows), refused (a status other than 200), timeout, unreachable, too_large, " +
			"malformed."}
	WorkersWithReadings = Reading{"kvepp_workers_with_gauges",
		"Workers whose engines have reported their load recently (--refresh-metrics-interval)."}
	UnseenLoad = Reading{"kvepp_unseen_load_workers",
		"Workers whose engines have reported more requests for a minute than kvepp sent them (at least 4 more, " +
			"and 1.5 times as many): other load bypasses kvepp. Expected with several replicas of kvepp, and for " +
			"requests with several prompts or several responses."}
)
