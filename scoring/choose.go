package scoring

import (
	"errors"
	"math"
	"math/rand/v2"
)

// ErrNoFiniteCost says that there are no costs, or that all are infinite or NaN.
var ErrNoFiniteCost = errors.New("scoring: no candidate has a finite cost")

// Choose returns the index of the chosen cost. At temperature 0 that is the lowest; ties are drawn uniformly. Above 0,
// index i is drawn with probability proportional to exp(-x/temperature), where x is costs[i] scaled so that the lowest
// cost is 0 and the highest 1. Infinite and NaN costs are never chosen.
//
// The same costs and the same state of rng give the same index. A nil rng means math/rand/v2's global source. Errors:
// ErrNoFiniteCost.
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

// lowest is the lowest cost so far, and the index chosen among its ties. Offer it every cost in order. Costs above
// cost, which are nearly all, may be left out.
type lowest struct {
	cost  float64
	index int // -1: none yet
	ties  int
}

func newLowest() lowest { return lowest{cost: math.MaxFloat64, index: -1} }

func (l *lowest) offer(i int, cost float64, rng *rand.Rand) {
	switch {
	case !(cost <= l.cost && cost >= -math.MaxFloat64): // also NaN
	case cost < l.cost || l.index < 0:
		l.cost, l.index, l.ties = cost, i, 1
	default:
		// Reservoir sampling of one: the k-th tie takes over with probability 1/k.
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

// Above temperature 0, a cost that is s steps above the lowest has the weight exp(-s/stepsPerUnit) relative to the
// lowest. Costs in the same whole step have weights within 22 % of each other. Costs from lastStep on, each with a
// weight below 1e-13, share one step.
const (
	stepsPerUnit = 4
	lastStep     = 30 * stepsPerUnit
)

// stepWeights is the weight at the beginning of each step, the highest in it.
var stepWeights = func() (w [lastStep + 1]float64) {
	for i := range w {
		w[i] = math.Exp(-float64(i) / stepsPerUnit)
	}
	return w
}()

// ladder converts a finite cost into steps above the lowest.
type ladder struct {
	unit   float64 // a power of two
	least  float64 // in units
	factor float64 // steps for each unit
}

func newLadder(least, greatest, temperature float64) ladder {
	l := ladder{unit: 1}
	switch spread := greatest - least; {
	case spread == 0:
		return l // all on the first step
	case math.IsInf(spread, 0): // the difference of two finite costs can exceed the largest float64
		l.unit = 0x1p-2
	case spread < 0x1p-900: // too little to divide by; such costs are small enough to be multiplied first
		l.unit = 0x1p600
	}
	l.least = least * l.unit
	// The limit is for temperatures such as 1e-300, where even the next cost has no weight.
	l.factor = min(stepsPerUnit/(greatest*l.unit-l.least)/temperature, math.MaxFloat64)
	return l
}

// steps is 0 for the lowest cost, and may be +Inf.
func (l *ladder) steps(cost float64) float64 { return (cost*l.unit - l.least) * l.factor }

// wholeSteps is steps rounded down, at most lastStep.
func (l *ladder) wholeSteps(cost float64) int {
	if s := l.steps(cost); s < lastStep {
		return int(s)
	}
	return lastStep
}

func finite(cost float64) bool { return math.Abs(cost) <= math.MaxFloat64 }

// draw is Choose above temperature 0, by rejection sampling. It draws a step by the highest weight that its costs can
// have, and one of the step's costs uniformly. It accepts that cost with the ratio of its weight to the highest one,
// else it draws again. So the probabilities are exact, and one or two weights are computed instead of all.
func draw(costs []float64, temperature float64, rng *rand.Rand) (int, error) {
	least, greatest := math.Inf(1), math.Inf(-1)
	for _, cost := range costs {
		if finite(cost) {
			if cost < least {
				least = cost
			}
			if cost > greatest {
				greatest = cost
			}
		}
	}
	if least > greatest {
		return 0, ErrNoFiniteCost
	}
	l := newLadder(least, greatest, temperature)
	var counts [lastStep + 1]int
	for _, cost := range costs {
		if finite(cost) {
			counts[l.wholeSteps(cost)]++
		}
	}
	total := 0.0
	for step, n := range counts {
		total += float64(n) * stepWeights[step]
	}
	for {
		step := 0 // step 0 is never empty; it is also taken if rounding leaves a rest
		rest := float(rng) * total
		for i, n := range counts {
			if rest -= float64(n) * stepWeights[i]; rest < 0 {
				step = i
				break
			}
		}
		nth := intN(rng, counts[step])
		for i, cost := range costs {
			if !finite(cost) || l.wholeSteps(cost) != step {
				continue
			}
			if nth--; nth >= 0 {
				continue
			}
			if float(rng) < math.Exp((float64(step)-l.steps(cost))/stepsPerUnit) {
				return i, nil
			}
			break
		}
	}
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
