package replay

import (
	"math"
	"math/rand/v2"
	"slices"

	"kvepp/scoring"
)

// Policies for comparison: those of other projects. They are written from their papers and documentation, and see the
// same index and book as kvepp's own. What they read from engines' metrics they get without delay here, which favours
// them.

// view is what a policy sees when a request is to be sent. The slices are indexed by candidate.
type view struct {
	prompt    int // tokens
	blockSize int
	cached    []int // tokens of the prompt
	loads     []scoring.Load
	engines   []*engine
	rng       *rand.Rand
	served    int // the candidate that served the request in a recording; -1: none
}

func (v *view) fresh(w int) int { return v.prompt - v.cached[w] }

// least returns the worker with the least cost; ties are drawn.
func (v *view) least(cost func(w int) float64) int {
	best, chosen, ties := math.Inf(1), 0, 0
	for w := range v.engines {
		switch c := cost(w); {
		case c < best:
			best, chosen, ties = c, w, 1
		case c == best:
			if ties++; v.rng.IntN(ties) == 0 {
				chosen = w
			}
		}
	}
	return chosen
}

func (v *view) leastRequests() int {
	return v.least(func(w int) float64 { return float64(v.loads[w].Requests) })
}

// policy chooses a worker.
type policy interface {
	// choose returns the index of a candidate.
	choose(v *view) int
	// firstToken tells of a request that waited for no other prefill: its new tokens, and the time they took.
	firstToken(w, tokens int, seconds float64)
}

var policies = []struct {
	name string
	make func(workers int) policy
}{
	{"llm-d", func(int) policy { return llmd{} }},
	{"preble-e2", func(workers int) policy { return newPreble(workers) }},
	{"lmetric", func(int) policy { return lmetric{} }},
	{"sglang", func(int) policy { return sglang{} }},
	{Recorded, func(int) policy { return recorded{} }},
}

// PolicyNames returns the names for Config.Policy.
func PolicyNames() (names []string) {
	for _, p := range policies {
		names = append(names, p.name)
	}
	return names
}

// newPolicy returns the policy with a name; nil: there is none.
func newPolicy(name string, workers int) policy {
	for _, p := range policies {
		if p.name == name {
			return p.make(workers)
		}
	}
	return nil
}

// unlearning is a policy that learns nothing.
type unlearning struct{}

func (unlearning) firstToken(int, int, float64) {}

// look returns what a policy sees of a request, after gather.
func (s *Simulation) look(f *flight) *view {
	v := &s.view
	v.prompt, v.blockSize, v.rng = f.Prompt, s.cfg.Engine.BlockSize, s.rng
	s.loads = s.replicas[0].book.Loads(s.loads[:0])
	v.cached, v.loads, v.engines, v.served = v.cached[:0], v.loads[:0], v.engines[:0], -1
	for i := range s.candidates {
		w, load := int(s.candidates[i].Worker), scoring.Load{}
		if w < len(s.loads) {
			load = s.loads[w]
		}
		if f.Served != nil && w < len(s.cfg.Own) && s.cfg.Own[w].ID == f.Served.Worker {
			v.served = i
		}
		v.cached = append(v.cached, min(s.candidates[i].DeviceBlocks*v.blockSize, f.Prompt))
		v.loads, v.engines = append(v.loads, load), append(v.engines, s.engines[w])
	}
	return v
}

// sentByPolicy and startedByPolicy keep what policies see of requests without a first token.
func (s *Simulation) sentByPolicy(f *flight) {
	if s.policy != nil {
		f.alone = s.starting[f.worker] == 0
		s.starting[f.worker]++
	}
}

func (s *Simulation) startedByPolicy(f *flight) {
	if s.policy != nil {
		s.starting[f.worker]--
		if f.alone {
			tokens := f.Prompt - f.overlap*s.cfg.Engine.BlockSize
			s.policy.firstToken(f.worker, tokens, (s.now - f.sent).Seconds())
		}
	}
}

// mostCached returns the most tokens that a worker has cached.
func (v *view) mostCached() int { return slices.Max(v.cached) }
