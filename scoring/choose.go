package scoring

import (
	"errors"
	"math"
	"math/rand/v2"
)

// ErrNoFiniteCost says that there are no costs, or that all are infinite or NaN.
var ErrNoFiniteCost = errors.New("scoring: no candidate has a finite cost")

// choose returns the index of the chosen cost. At temperature 0 that is the lowest; ties are drawn uniformly. Above 0,
// index i is drawn with probability proportional to exp(-x/temperature), where x is costs[i] scaled so that the lowest
// cost is 0 and the highest 1. With the policy Time it is not scaled: a worker that costs as many milliseconds more as
// the temperature is drawn 1/e times as often. Infinite and NaN costs are never chosen.
//
// The same costs and the same state of rng give the same index. A nil rng means math/rand/v2's global source. Errors:
// ErrNoFiniteCost.
//
// Source: dynamo-kv-router 1.6.1, the default policy's picker.
func (c *Config) choose(costs []float64, rng *rand.Rand) (int, error) {
	if c.Temperature > 0 {
		return c.draw(costs, rng)
	}
	lowest, chosen, ties := math.MaxFloat64, -1, 0
	for i, cost := range costs {
		switch {
		case !(cost <= lowest && cost >= -math.MaxFloat64): // also NaN
		case cost < lowest || chosen < 0:
			lowest, chosen, ties = cost, i, 1
		default:
			// Reservoir sampling of one: the k-th tie takes over with probability 1/k.
			if ties++; intN(rng, ties) == 0 {
				chosen = i
			}
		}
	}
	if chosen < 0 {
		return 0, ErrNoFiniteCost
	}
	return chosen, nil
}

func finite(cost float64) bool { return math.Abs(cost) <= math.MaxFloat64 }

// draw is choose above temperature 0, in one pass over the weights: a cost replaces the one chosen so far with the
// probability weight/sum, where sum is cumulative and includes it.
func (c *Config) draw(costs []float64, rng *rand.Rand) (int, error) {
	least, greatest := math.Inf(1), math.Inf(-1)
	for _, cost := range costs {
		if finite(cost) {
			least, greatest = min(least, cost), max(greatest, cost)
		}
	}
	if least > greatest {
		return 0, ErrNoFiniteCost
	}
	unit := 1.0
	if math.IsInf(greatest-least, 0) { // the difference of two finite costs can exceed the largest float64
		unit = 0.5
	}
	spread := greatest*unit - least*unit
	if spread == 0 || c.Policy == Time {
		spread = unit
	}
	chosen, sum := -1, 0.0
	for i, cost := range costs {
		if finite(cost) {
			weight := math.Exp(-(cost*unit - least*unit) / spread / c.Temperature)
			if sum += weight; float(rng)*sum < weight {
				chosen = i
			}
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
