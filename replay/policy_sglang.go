package replay

// sglang is the cache-aware rule of SGLang's router. If the loads are apart, the worker with the fewest requests wins.
// Else the worker with the longest match wins if it has more than 0.3 of the prompt; else the one with
// the smallest cache.
//
// Source: SGLang, docs/router: --policy cache_aware, with its thresholds of 64 requests, 1.5 and 0.3. The router's own
// approximate tree of texts is the exact index here.
type sglang struct{ unlearning }

const (
	sglangAbsolute = 64
	sglangRelative = 1.5
	sglangMatch    = 0.3
)

func (sglang) choose(v *view) int {
	fewest, most := v.loads[0].Requests, 0
	for i := range v.engines {
		fewest, most = min(fewest, v.loads[i].Requests), max(most, v.loads[i].Requests)
	}
	switch {
	case most-fewest > sglangAbsolute && float64(most) > sglangRelative*float64(fewest):
		return v.leastRequests()
	case float64(v.mostCached()) > sglangMatch*float64(v.prompt):
		return v.least(func(w int) float64 { return float64(-v.cached[w]) })
	}
	return v.least(func(w int) float64 { return float64(len(v.engines[w].cached)) })
}
