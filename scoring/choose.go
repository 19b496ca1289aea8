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
	if temperature == 0 {
		l := newLowest()
		for i, cost := range costs {
			if cost <= l.cost {
				l.offer(i, cost, rng)
			}
		}
		return l.choice()
	}
	return draw(costs, temperature, rng)
}

// lowest is the least cost so far, and which of those that have it is chosen. Offer it every cost in turn; those that are
// not <= cost, which are nearly all, need not be offered.
type lowest struct {
	cost  float64
	index int // -1: none yet
	ties  int
}

func newLowest() lowest { return lowest{cost: math.MaxFloat64, index: -1} }

func (l *lowest) offer(i int, cost float64, rng *rand.Rand) {
	switch {
	case !(cost <= l.cost && cost >= -math.MaxFloat64): // also what is not a number
	case cost < l.cost || l.index < 0:
		l.cost, l.index, l.ties = cost, i, 1
	default:
		// Reservoir of one: the k-th tie takes over with probability 1/k.
		if l.ties++; intN(rng, l.ties) == 0 {
			l.index = i
		}
	}
}

func (l *lowest) choice() (int, error) {
	if l.index < 0 {
		return 0, ErrNoFiniteCost
	}
	return l.index, nil
}

// draw is Choose above temperature 0.
func draw(costs []float64, temperature float64, rng *rand.Rand) (int, error) {
	least, greatest := math.Inf(1), math.Inf(-1)
	for _, cost := range costs {
		if !math.IsInf(cost, 0) && !math.IsNaN(cost) {
			least, greatest = min(least, cost), max(greatest, cost)
		}
	}
	if least > greatest {
		return 0, ErrNoFiniteCost
	}
	// Two finite costs can lie further apart than the greatest float64: then compare them scaled down.
	scale := 1.0
	if math.IsInf(greatest-least, 0) {
		scale = max(math.Abs(least), math.Abs(greatest))
	}
	spread := greatest/scale - least/scale
	// Also a reservoir of one, by weight: each candidate takes over with its share of the weight seen so far. That needs
	// one pass and no memory, where a cumulative table would need both.
	chosen, total := -1, 0.0
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
