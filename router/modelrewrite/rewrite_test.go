package modelrewrite

import (
	"strings"
	"testing"
)

func inForce(t *testing.T, rules ...Rule) *Rules {
	t.Helper()
	r := new(Rules)
	if err := r.Set(rules); err != nil {
		t.Fatal(err)
	}
	return r
}

func to(model string) []Target { return []Target{{Model: model}} }

// An exact name goes before a rule for all, and the first of each kind holds.
func TestWhichRuleHolds(t *testing.T) {
	r := inForce(t, Rule{Name: "a", Targets: to("all")}, Rule{Name: "b", Models: []string{"x"}, Targets: to("first")},
		Rule{Name: "c", Models: []string{"x", "y"}, Targets: to("second")}, Rule{Name: "d", Targets: to("never")})
	for model, want := range map[string]string{"x": "b first x", "y": "c second y", "z": "a all other"} {
		if rule, target := r.Of(model); rule == nil || rule.Name+" "+target+" "+rule.Label(model) != want {
			t.Errorf("%s: %v %s, want %s", model, rule, target, want)
		}
	}
	if rule, _ := new(Rules).Of("x"); rule != nil {
		t.Errorf("without rules: %v", rule)
	}
	before, _ := r.Of("x")
	for _, bad := range []Rule{{Name: "n"}, {Name: "n", Targets: to("")},
		{Name: "n", Models: []string{""}, Targets: to("m")},
		{Name: "n", Targets: []Target{{"m", -1}}}, {Name: "n", Targets: []Target{{"m", maxWeight + 1}}}} {
		if err := r.Set([]Rule{bad}); err == nil || !strings.Contains(err.Error(), `"n"`) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if after, _ := r.Of("x"); after != before {
		t.Error("refused rules took the place of the others")
	}
}

func TestWeights(t *testing.T) {
	for _, c := range []struct {
		weights []int
		want    []float64
	}{{[]int{0, 0, 0, 0}, []float64{.25, .25, .25, .25}}, {[]int{90, 9, 1}, []float64{.9, .09, .01}},
		{[]int{0, 5}, []float64{0, 1}}} {
		rule := Rule{Name: "w", Models: []string{"x"}}
		for i, weight := range c.weights {
			rule.Targets = append(rule.Targets, Target{Model: string(rune('a' + i)), Weight: weight})
		}
		r, drawn := inForce(t, rule), make([]float64, len(c.weights))
		const draws = 20000
		for range draws {
			_, target := r.Of("x")
			drawn[target[0]-'a']++
		}
		for i, want := range c.want { // five standard deviations of the widest are 0.018
			if got := drawn[i] / draws; got < want-.02 || got > want+.02 || want == 0 && got != 0 {
				t.Errorf("weights %v: %v of %s, want %v", c.weights, got, rule.Targets[i].Model, want)
			}
		}
	}
}
