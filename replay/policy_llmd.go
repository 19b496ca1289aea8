package replay

// llmd is the profile of llm-d's guide to precise prefix cache routing: of three scores, each 0..1, the precise prefix
// weighs 3, the queue 2 and the use of the KV cache 2. The highest sum wins.
//
// Source: llm-d, guides/precise-prefix-cache-aware; the queue and KV cache scorers of the Gateway API Inference
// Extension. The prefix score is the cached share of the prompt here.
type llmd struct{ unlearning }

func (llmd) choose(v *view) int {
	shortest, longest := len(v.engines[0].waiting), 0
	for _, e := range v.engines {
		shortest, longest = min(shortest, len(e.waiting)), max(longest, len(e.waiting))
	}
	return v.least(func(w int) float64 {
		e, queue := v.engines[w], 1.0
		if longest > shortest {
			queue = float64(longest-len(e.waiting)) / float64(longest-shortest)
		}
		prefix := float64(v.cached[w]) / float64(max(v.prompt, 1))
		usage := float64(e.private+e.active) / float64(e.cfg.Blocks)
		return -(3*prefix + 2*queue + 2*(1-usage))
	})
}
