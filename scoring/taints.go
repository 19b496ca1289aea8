package scoring

import (
	"maps"
	"math"
	"slices"
)

// Constraints are a request's wishes about its worker's taints. The zero value has none.
//
// Source: dynamo-kv-router 1.6.1, protocols (RoutingConstraints).
type Constraints struct {
	// Required are taints that the worker must have.
	Required []string
	// Preferred maps taints to how much the request prefers workers that have them. Below 0 it avoids them.
	Preferred map[string]float32
}

// Allow reports whether a worker with these taints may take the request. taints is sorted.
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

// Multiplier returns the cost multiplier of a worker with these taints, from exp(-1) to exp(1). 0, which stands for 1,
// if no taint is preferred. taints is sorted, without duplicates.
func (c *Constraints) Multiplier(taints []string) float64 {
	if len(c.Preferred) == 0 {
		return 0
	}
	sum := 0.0
	for _, taint := range taints { // in a fixed order, so that the sum is always the same
		sum += float64(c.Preferred[taint])
	}
	return math.Exp(-math.Tanh(sum))
}
