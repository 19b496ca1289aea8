package metrics

import (
	"fmt"
	"testing"
)

// However many models there seem to be, their series are bounded, and nothing is left uncounted.
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
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	held := map[string]bool{"inference_objective_request_total": false, "inference_objective_request_error_total": false, "inference_objective_request_duration_seconds": false,
		"inference_objective_running_requests": false}
	for _, f := range families {
		if _, ours := held[f.GetName()]; !ours {
			continue
		}
		held[f.GetName()] = true
		if n := len(f.GetMetric()); n != maxModels+1 {
			t.Errorf("%s has %d series", f.GetName(), n)
		}
		for _, x := range f.GetMetric() {
			want := float64(round)
			for _, l := range x.GetLabel() {
				if l.GetName() == "model_name" && l.GetValue() == otherModels {
					want *= beyond
				}
			}
			if f.GetName() == "inference_objective_running_requests" {
				want = 0
			}
			if got := x.GetCounter().GetValue() + x.GetGauge().GetValue() + float64(x.GetHistogram().GetSampleCount()); got != want {
				t.Errorf("%s%v is %v, want %v", f.GetName(), x.GetLabel(), got, want)
			}
		}
	}
	for name, there := range held {
		if !there {
			t.Errorf("no %s", name)
		}
	}
	var none *Picker // exports nothing, and fails in nothing
	none.Show("m")
	none.Began("m", "m", 0, 1)
	none.Ended(&Ended{})
	none.Scheduled(0, 0)
	none.Unscheduled()
	none.Refused("m", CodeInternal)
}
