package metrics

import (
	"fmt"
	"slices"
	"testing"

	"kvepp/internal/metrics/metricstest"
)

// TestPickerModelsAreBounded checks that the number of series stays bounded and that every call is counted.
func TestPickerModelsAreBounded(t *testing.T) {
	const round, beyond = 2, 300
	m := New()
	p := m.NewPicker()
	for range round {
		for i := range maxModels + beyond {
			name := fmt.Sprintf("model-%d", i)
			p.Began(name, name, 0, 1)
			p.Refused(name, CodeNotFound)
			p.Ended(&Ended{Model: name, Target: name, Cached: -1})
		}
	}
	now := metricstest.Read(t, m.Registry)
	for _, name := range []string{"inference_objective_request_total", "inference_objective_request_error_total",
		"inference_objective_request_duration_seconds",
		"inference_objective_running_requests"} {
		found := now.Of(name)
		if len(found) != maxModels+1 {
			t.Errorf("%s has %d series, want %d", name, len(found), maxModels+1)
		}
		for _, s := range found {
			want := float64(round)
			if slices.Contains(s.Labels, "model_name="+otherModels) {
				want *= beyond
			}
			if name == "inference_objective_running_requests" {
				want = 0
			}
			if s.Count != want {
				t.Errorf("%v is %v, want %v", s, s.Count, want)
			}
		}
	}
	var none *Picker // a nil Picker must ignore all calls
	none.InitModel("m")
	none.Began("m", "m", 0, 1)
	none.Ended(&Ended{})
	none.Scheduled(0, 0)
	none.Unscheduled()
	none.Refused("m", CodeInternal)
}
