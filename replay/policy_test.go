package replay

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"kvepp/kvblock"
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

// TestClairvoyant checks the times to first token that clairvoyant expects against those that the engine then gives:
// with a step that runs, cached blocks, prompts that wait and share blocks, a chunked prompt and a slow engine.
func TestClairvoyant(t *testing.T) {
	chain := func(seed, blocks int) (c []kvblock.SequenceHash) {
		for i := range blocks {
			c = append(c, kvblock.SequenceHash(1000*seed+i+1))
		}
		return c
	}
	sequenceOf := func(c []kvblock.SequenceHash, output int) *sequence {
		return &sequence{prompt: 16 * len(c), output: output, chain: c, locals: make([]kvblock.LocalHash, len(c))}
	}
	for name, c := range map[string]struct {
		speed                   float64
		before, waiting, coming []*sequence // before has a step of its own, which then runs
		chain                   []kvblock.SequenceHash
	}{
		"idle":    {speed: 1, chain: chain(1, 100)},
		"slow":    {speed: 0.5, chain: chain(1, 100)},
		"chunked": {speed: 1, chain: chain(7, 900)},
		"cached":  {speed: 1, before: []*sequence{sequenceOf(chain(1, 60), 5)}, chain: chain(1, 100)},
		"decoding": {speed: 1, before: []*sequence{sequenceOf(chain(1, 60), 5), sequenceOf(chain(2, 60), 5)},
			chain: chain(3, 10)},
		"waiting": {speed: 1, before: []*sequence{sequenceOf(chain(1, 60), 5)},
			waiting: []*sequence{sequenceOf(chain(2, 40), 5), sequenceOf(chain(2, 50), 5)}, chain: chain(2, 45)},
		"coming": {speed: 2, before: []*sequence{sequenceOf(chain(1, 60), 5)},
			coming: []*sequence{sequenceOf(chain(4, 40), 5)}, chain: chain(2, 45)},
	} {
		e := newEngine(DefaultEngineConfig())
		e.cfg.BlockSize, e.cfg.Speed = 16, c.speed
		now := time.Duration(0)
		for _, s := range c.before {
			e.submit(s)
		}
		if e.parts, now = e.begin(); len(e.parts) > 0 {
			e.inStep, e.stepEnds = true, now
		}
		e.waiting = append(e.waiting, c.waiting...)
		e.coming = c.coming
		v := &view{prompt: 16 * len(c.chain), blockSize: 16, chain: c.chain, engines: []*engine{e}}
		want, _ := newClairvoyant(0).timeToFirstToken(v, e)

		for _, s := range c.coming {
			e.submit(s)
		}
		own := sequenceOf(c.chain, 5)
		e.submit(own)
		for own.generated == 0 {
			if e.inStep {
				e.end(e.parts, now)
			}
			took := time.Duration(0)
			e.parts, took = e.begin()
			e.inStep = true
			now += took
			if len(e.parts) == 0 {
				t.Fatalf("%s: the engine is idle", name)
			}
		}
		if got := own.firstToken.Seconds() * 1000; math.Abs(got-want) > 0.01*got {
			t.Errorf("%s: first token after %.2f ms, clairvoyant expects %.2f", name, got, want)
		}
	}
}

// TestFairClairvoyant: of two engines on which the first token comes after nearly the same time, it chooses the one
// with fewer responses to delay, or the one where another prompt waits for the next step anyway.
func TestFairClairvoyant(t *testing.T) {
	busy := func(decoding, held int) *engine {
		e := newEngine(DefaultEngineConfig())
		for range decoding {
			e.running = append(e.running, &sequence{prompt: held, computed: held, generated: 1})
		}
		return e
	}
	waiting := busy(10, 100)
	waiting.waiting = []*sequence{{prompt: 10}}
	for name, other := range map[string]*engine{"fewer answers": busy(1, 2000), "a prompt that waits": waiting} {
		for others, want := range map[float64]int{0: 0, 0.1: 1} {
			v := &view{prompt: 100, engines: []*engine{busy(10, 100), other}, rng: rand.New(rand.NewPCG(1, 1))}
			if got := newClairvoyant(others).choose(v); got != want {
				t.Errorf("%s, weight %v: chose %d, want %d", name, others, got, want)
			}
		}
	}
}
