package replay

import "math"

// preble is Preble's E2, exploitation and exploration. If a prompt has more cached than new tokens, the worker with the
// least load among those with the longest match wins, unless loads are far apart. Else the worker with the least
// load, with the time for the new tokens, wins.
//
// Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024, arXiv:2407.00023.
// The load is the time for the waiting prompt tokens and one step for each request here, as Preble's regression on its
// engines cannot be repeated; its eviction cost is left out.
type preble struct {
	tokens, seconds float64 // of prefills, forgetting
}

const (
	prebleImbalance = 2    // the heaviest load by the lightest from which on it balances
	prebleSlack     = 0.5  // seconds that loads may differ in any case
	prebleStep      = 0.02 // seconds
	prebleSafe      = 1e-4 // seconds for a token before the first prefill
)

func newPreble(int) *preble { return &preble{} }

func (p *preble) firstToken(_, tokens int, seconds float64) {
	p.tokens = 0.99*p.tokens + float64(tokens)
	p.seconds = 0.99*p.seconds + seconds
}

func (p *preble) choose(v *view) int {
	perToken := prebleSafe
	if p.tokens > 0 {
		perToken = p.seconds / p.tokens
	}
	load := func(w int) float64 {
		return perToken*float64(v.loads[w].PrefillTokens) + prebleStep*float64(v.loads[w].Requests)
	}
	lightest, heaviest := math.Inf(1), 0.0
	for w := range v.engines {
		lightest, heaviest = min(lightest, load(w)), max(heaviest, load(w))
	}
	best := v.mostCached()
	if best > v.prompt-best && heaviest <= prebleImbalance*lightest+prebleSlack {
		return v.least(func(w int) float64 {
			if v.cached[w] < best {
				return math.Inf(1)
			}
			return load(w)
		})
	}
	return v.least(func(w int) float64 { return load(w) + perToken*float64(v.fresh(w)) })
}
