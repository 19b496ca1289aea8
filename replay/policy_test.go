package replay

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"kvepp/scoring"
)

// TestPolicies checks that other projects' policies serve a trace, the same for the same seed, with more cached than in
// turn.
func TestPolicies(t *testing.T) {
	requests := 1000
	if testing.Short() {
		requests = 100
	}
	text := generated(t, "chat", requests, 20)
	c := config()
	c.Scoring.Mode = scoring.RoundRobin
	turn := run(t, c, MooncakeDelta, text)
	for _, name := range PolicyNames() {
		c := config()
		c.Policy = name
		r := run(t, c, MooncakeDelta, text)
		if again := run(t, c, MooncakeDelta, text); !reflect.DeepEqual(r, again) {
			t.Errorf("%s: another report for the same seed", name)
		}
		if r.Completed != turn.Completed || r.CachedShare() < turn.CachedShare() {
			t.Errorf("%s: %d completed with %.3f cached, round-robin %d with %.3f", name, r.Completed, r.CachedShare(),
				turn.Completed, turn.CachedShare())
		}
	}
	c.Policy = "fortune"
	if c.Validate() == nil {
		t.Error("an unknown policy passed")
	}
}

// TestPolicyRules checks choices between three workers that the rules of each policy decide.
func TestPolicyRules(t *testing.T) {
	look := func(cached, requests, waiting [3]int) *view {
		v := &view{prompt: 1000, blockSize: 16, rng: rand.New(rand.NewPCG(1, 2))}
		for w := range 3 {
			v.cached = append(v.cached, cached[w])
			v.loads = append(v.loads, scoring.Load{Requests: requests[w], PrefillTokens: waiting[w]})
			v.engines = append(v.engines, newEngine(DefaultEngineConfig()))
			v.engines[w].waiting = make([]*sequence, waiting[w]/1000)
		}
		return v
	}
	for _, c := range []struct {
		policy string
		v      *view
		want   int
	}{
		{"llm-d", look([3]int{0, 500, 900}, [3]int{}, [3]int{}), 2},
		{"llm-d", look([3]int{0, 800, 900}, [3]int{}, [3]int{0, 0, 4000}), 1}, // the queue weighs 2
		{"lmetric", look([3]int{0, 900, 700}, [3]int{0, 1, 0}, [3]int{}), 1},  // products of 1000, 200 and 300
		{"lmetric", look([3]int{0, 900, 800}, [3]int{0, 9, 0}, [3]int{}), 2},
		{"sglang", look([3]int{0, 310, 0}, [3]int{0, 9, 0}, [3]int{}), 1},
		{"sglang", look([3]int{0, 310, 10}, [3]int{1, 66, 0}, [3]int{}), 2}, // the loads are apart
		{"preble-e2", look([3]int{0, 600, 600}, [3]int{0, 9, 8}, [3]int{}), 2},
		{"preble-e2", look([3]int{0, 600, 0}, [3]int{0, 99, 1}, [3]int{}), 0}, // the loads are apart
	} {
		if got := newPolicy(c.policy, 3).choose(c.v); got != c.want {
			t.Errorf("%s: cached %v, loads %v: chose %d, want %d", c.policy, c.v.cached, c.v.loads, got, c.want)
		}
	}
}
