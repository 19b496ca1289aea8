package metrics

import (
	"testing"

	"kvepp/internal/metrics/metricstest"
)

// TestTwins: a twin has the values of its metric under other labels; equal series are added up, and a metric without
// series has those of another at zero.
func TestTwins(t *testing.T) {
	m := New()
	p := m.NewPicker()
	p.Began("m", "target", 0, 100)
	p.Began("m", "target", 5, 100)
	m.CollectPool("pool", func() InferencePool { return InferencePool{Ready: 2, Waiting: 3} })
	m.Twins([]Twin{
		{Name: "their_total", Of: "inference_objective_request_total",
			Labels: []string{"model=model_name", `flow="one"`}},
		{Name: "their_zero", Of: "inference_pool_ready_pods", Labels: []string{`model="m"`}},
		{Name: "their_zero", Of: "inference_objective_running_requests", Zero: true,
			Labels: []string{"model=model_name"}},
		{Name: "their_zero", Of: "inference_objective_running_requests", Zero: true, Labels: []string{`model="n"`}},
		{Name: "their_sizes", Of: "inference_objective_request_sizes", Only: []string{"model_name=m"}},
		{Name: "their_split", Of: "inference_objective_request_total", Only: []string{"priority=5"},
			Labels: []string{`a="5"`}},
		{Name: "their_split", Of: "inference_objective_request_total", Only: []string{"model_name=m", "priority=0,1"},
			Labels: []string{`a="0"`}},
		{Name: "their_value", Value: func(of func(string) float64) float64 {
			return of("inference_pool_ready_pods") * of("inference_pool_average_queue_size")
		}},
		{Name: "their_count", Of: "inference_objective_request_sizes", Count: true},
		{Name: "their_blocks", Of: "inference_objective_request_total", Scale: 0.5},
		{Name: "their_nothing", Of: "no_such_metric"},
		{Name: "their_none", Of: "inference_objective_request_total", Only: []string{"model_name=m", "priority=7"}},
	})
	for range 2 { // a scrape does not change the metrics
		all := metricstest.Read(t, m.Gatherer())
		for _, c := range []struct {
			name, label string
			want        float64
		}{
			{"their_total", "model=m", 2},
			{"their_total", "flow=one", 2},
			{"their_zero", "model=m", 2},
			{"their_zero", "model=n", 0},
			{"their_sizes", "", 200},
			{"their_split", "a=5", 1},
			{"their_split", "a=0", 1},
			{"their_value", "", 6},
			{"their_count", "", 2},
			{"their_blocks", "", 1},
			{"inference_objective_running_requests", "model_name=m", 2},
		} {
			var labels []string
			if c.label != "" {
				labels = []string{c.label}
			}
			if got := all.Of(c.name, labels...); len(got) != 1 || got[0].Value != c.want {
				t.Errorf("%s{%s}: %v, want %v", c.name, c.label, got, c.want)
			}
		}
		if len(all.Of("their_nothing"))+len(all.Of("their_none")) != 0 {
			t.Error("a metric without a source")
		}
	}
}
