package scoring

import (
	"errors"
	"math"
	"math/rand/v2"
)

// ErrNoFiniteCost says that there was nothing to choose from: no costs at all, or all of them infinite or not a number.
var ErrNoFiniteCost = errors.New("scoring: no candidate has a finite cost")

// Choose returns the index of the cost that is picked. At temperature 0 that is the least, ties drawn uniformly. Above 0
// index i is drawn with probability proportional to exp(-x/temperature), where x is costs[i] scaled so that the least
// cost is 0 and the greatest 1. Costs that are infinite or not a number are never picked.
//
// The same costs and the same state of rng give the same index; a nil rng means math/rand/v2's global source.
// Errors: ErrNoFiniteCost.
//
// Source: dynamo-kv-router 1.6.1, the default policy's picker.
func Choose(costs []float64, temperature float64, rng *rand.Rand) (int, error) {
	least, greatest := math.Inf(1), math.Inf(-1)
	chosen, ties := -1, 0
	for i, cost := range costs {
		switch {
		case math.IsInf(cost, 0) || math.IsNaN(cost):
			continue
		case cost < least:
			least, chosen, ties = cost, i, 1
		case cost == least:
			// Reservoir of one: the k-th tie takes over with probability 1/k.
			if ties++; temperature == 0 && intN(rng, ties) == 0 {
				chosen = i
			}
		}
		greatest = max(greatest, cost)
	}
	if chosen < 0 {
		return 0, ErrNoFiniteCost
	}
	if temperature == 0 {
		return chosen, nil
	}

	// Two finite costs can lie further apart than the greatest float64: then compare them scaled down.
	scale := 1.0
	if math.IsInf(greatest-least, 0) {
		scale = max(math.Abs(least), math.Abs(greatest))
	}
	spread := greatest/scale - least/scale
	// Also a reservoir of one, by weight: each candidate takes over with its share of the weight seen so far. That needs
	// one pass and no memory, where a cumulative table would need both.
	chosen = -1
	total := 0.0
	for i, cost := range costs {
		if math.IsInf(cost, 0) || math.IsNaN(cost) {
			continue
		}
		weight := 1.0
		if spread > 0 {
			weight = math.Exp(-(cost/scale - least/scale) / spread / temperature)
		}
		total += weight
		if weight > 0 && (chosen < 0 || float(rng)*total < weight) {
			chosen = i
		}
	}
	return chosen, nil
}

func intN(rng *rand.Rand, n int) int {
	if rng == nil {
		return rand.IntN(n)
	}
	return rng.IntN(n)
}

func float(rng *rand.Rand) float64 {
	if rng == nil {
		return rand.Float64()
	}
	return rng.Float64()
}
