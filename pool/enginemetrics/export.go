package enginemetrics

import (
	"math"
	"strconv"
	"strings"

	"kvepp/internal/metrics"
	"kvepp/pool"
)

// Export exports what the engines of p say of their load. name is the pool's. g is nil if kvepp does not read their
// pages.
func Export(m *metrics.Metrics, name string, p *pool.Pool, g *Gauges) {
	if g == nil {
		g = new(Gauges)
	}
	m.CollectPool(name, func() metrics.InferencePool { return g.poolNow(p) })
	metrics.Gauge(m, metrics.Workers, func() int {
		s := p.Acquire()
		defer s.Release()
		return len(s.Workers)
	})
	metrics.Gauge(m, metrics.WorkersWithReadings, g.Known)
	metrics.Gauge(m, metrics.UnseenLoad, g.Unseen)
	metrics.Counters(m, metrics.EngineReadings, "outcome", g.readings)
}

// poolNow returns the workers of p and the averages of their latest values.
func (g *Gauges) poolNow(p *pool.Pool) (now metrics.InferencePool) {
	s := p.Acquire()
	defer s.Release()
	var usage, waiting, running mean
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Role == pool.Encode {
			continue
		}
		now.Ready++
		l := g.Of(w.Worker)
		usage.add(l.Usage)
		waiting.add(l.Waiting)
		running.add(l.Running)
		if !math.IsNaN(l.Waiting) {
			now.Pods = append(now.Pods, metrics.PodQueue{Pod: podName(w), Waiting: l.Waiting})
		}
	}
	now.KVUsage, now.Waiting, now.Running = usage.value(), waiting.value(), running.value()
	return now
}

// mean is the mean of the values that are known.
type mean struct{ sum, n float64 }

func (m *mean) add(v float64) {
	if !math.IsNaN(v) {
		m.sum += v
		m.n++
	}
}

func (m *mean) value() float64 { return m.sum / max(m.n, 1) }

// podName returns the name that the Gateway API Inference Extension gives a worker. An endpoint made of a pod's port
// may have it already.
func podName(w *pool.Worker) string {
	suffix := "-rank-" + strconv.FormatUint(uint64(w.Rank), 10)
	return strings.TrimSuffix(w.Name, suffix) + suffix
}
