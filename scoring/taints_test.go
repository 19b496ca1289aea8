package scoring

import (
	"math"
	"testing"
)

func TestConstraints(t *testing.T) {
	taints := []string{"a", "dynamo.topology/zone=z1", "gpu"}
	for _, c := range []struct {
		name  string
		c     Constraints
		allow bool
		sum   float64 // NaN: no multiplier
	}{
		{"nothing", Constraints{}, true, math.NaN()},
		{"required and there", Constraints{Required: []string{"gpu", "a"}}, true, math.NaN()},
		{"one of two is not there", Constraints{Required: []string{"gpu", "b"}}, false, math.NaN()},
		{"preferred", Constraints{Preferred: map[string]float32{"a": 1}}, true, 1},
		{"preferred elsewhere", Constraints{Preferred: map[string]float32{"b": 1}}, true, 0},
		// Dynamo's values: weights in single precision, summed in double precision.
		{"several", Constraints{Preferred: map[string]float32{"a": 0.1, "gpu": -0.7, "b": 5}}, true,
			float64(float32(0.1)) + float64(float32(-0.7))},
		{"huge", Constraints{Preferred: map[string]float32{"a": math.MaxFloat32, "gpu": math.MaxFloat32}}, true,
			math.Inf(1)},
	} {
		if got := c.c.Allow(taints); got != c.allow {
			t.Errorf("%s: allowed is %v", c.name, got)
		}
		want := math.Exp(-math.Tanh(c.sum))
		if math.IsNaN(c.sum) {
			want = 0
		}
		if got := c.c.Multiplier(taints); got != want {
			t.Errorf("%s: multiplier %v, want %v", c.name, got, want)
		}
	}
}
