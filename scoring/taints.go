package scoring

import (
	"maps"
	"math"
	"slices"
)

// Constraints are what a request says of its worker's taints. The zero value says nothing.
//
// Source: dynamo-kv-router 1.6.1, protocols (RoutingConstraints).
type Constraints struct {
	// Required are taints that the worker must have.
	Required []string
	// Preferred are taints by how much the request is drawn to workers that have them; below 0 it is drawn away.
	Preferred map[string]float32
}

// Allow reports whether a worker with these taints may serve the request. Taints are sorted.
func (c *Constraints) Allow(taints []string) bool {
	for _, taint := range c.Required {
		if _, has := slices.BinarySearch(taints, taint); !has {
			return false
		}
	}
	return true
}

// Preferring returns the constraints with one more preferred taint.
func (c *Constraints) Preferring(taint string, weight float32) *Constraints {
	more := &Constraints{Required: c.Required, Preferred: map[string]float32{}}
	maps.Copy(more.Preferred, c.Preferred)
	more.Preferred[taint] = weight
	return more
}

// Multiplier is what the preferred taints make of the cost of a worker with these taints, from exp(-1) to exp(1); 0,
// which stands for 1, if there are none preferred. Taints are sorted, and each is there once.
func (c *Constraints) Multiplier(taints []string) float64 {
	if len(c.Preferred) == 0 {
		return 0
	}
	sum := 0.0
	for _, taint := range taints { // in their order, so that the sum is the same every time
		sum += float64(c.Preferred[taint])
	}
	return math.Exp(-math.Tanh(sum))
}
