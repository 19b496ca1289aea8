package metrics

import (
	"fmt"
	"testing"
)

// However many models there seem to be, their series are bounded, and nothing is left uncounted.
func TestModelLabelsAreBounded(t *testing.T) {
	m := New()
	r := m.NewRouter(Identity{})
	for round := range 2 {
		for i := range maxModels + 500 {
			model := fmt.Sprintf("model-%d", i)
			r.Reused("prefill", model, 1)
			r.Backpressure(model, "default", "requests")
		}
		families, err := m.Registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, f := range families {
			if n := f.GetName(); n != "dynamo_component_router_kv_worker_reused_tokens_total" && n != "dynamo_frontend_router_queue_backpressure_total" {
				continue
			}
			found++
			if n := len(f.GetMetric()); n != maxModels+1 {
				t.Errorf("%s has %d series", f.GetName(), n)
			}
			for _, x := range f.GetMetric() {
				for _, l := range x.GetLabel() {
					want := float64(round + 1)
					if l.GetValue() == otherModels {
						want *= 500
					}
					if l.GetName() == "model" && x.GetCounter().GetValue() != want {
						t.Errorf("%s of %s is %v, want %v", f.GetName(), l.GetValue(), x.GetCounter().GetValue(), want)
					}
				}
			}
		}
		if found != 2 {
			t.Fatalf("%d families", found)
		}
	}
}
