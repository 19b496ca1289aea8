package replay

// lmetric multiplies the prompt tokens that a worker would have to compute, with those that wait there, by its number
// of requests. The least product wins.
//
// Source: Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
// 2026, arXiv:2603.15202.
type lmetric struct{ unlearning }

func (lmetric) choose(v *view) int {
	return v.least(func(w int) float64 {
		return float64(v.loads[w].PrefillTokens+v.fresh(w)) * float64(v.loads[w].Requests+1)
	})
}
