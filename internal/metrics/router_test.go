package metrics

import (
	"fmt"
	"slices"
	"testing"

	"kvepp/internal/metrics/metricstest"
)

// TestModelLabelsAreBounded checks that the number of series stays bounded and that every call is counted.
func TestModelLabelsAreBounded(t *testing.T) {
	m := New()
	r := m.NewRouter(Identity{})
	for round := range 2 {
		for i := range maxModels + 500 {
			model := fmt.Sprintf("model-%d", i)
			r.Reused("prefill", model, 1)
			r.Backpressure(model, "default", "requests")
		}
		now := metricstest.Read(t, m.Registry)
		for _, name := range []string{"dynamo_component_router_kv_worker_reused_tokens_total",
			"dynamo_frontend_router_queue_backpressure_total"} {
			found := now.Of(name)
			if len(found) != maxModels+1 {
				t.Errorf("%s has %d series, want %d", name, len(found), maxModels+1)
			}
			for _, s := range found {
				want := float64(round + 1)
				if slices.Contains(s.Labels, "model="+otherModels) {
					want *= 500
				}
				if s.Value != want {
					t.Errorf("%v is %v, want %v", s, s.Value, want)
				}
			}
		}
	}
}
