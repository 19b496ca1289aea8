package scoring

import "slices"

// Part is one term of a cost, in the unit of the cost: blocks, or milliseconds with the policy Time.
type Part struct {
	Name  string
	Value float64 // below 0: it makes the worker cheaper
}

// Names of parts. The first four exist with both policies.
const (
	PartPrompt   = "prompt"   // the whole prompt, as if nothing of it were cached
	PartCached   = "cached"   // what cached blocks save
	PartWaiting  = "waiting"  // prompts that the worker computes first
	PartHeld     = "held"     // blocks that active requests hold
	PartRequests = "requests" // DecodeActiveRequestWeight
	PartSteps    = "steps"    // of a prefill, beside the time for its tokens
	PartDelays   = "delays"   // what this prefill delays responses on the worker
	PartMemory   = "memory"   // wait until enough blocks are free
	PartSlower   = "slower"   // what the response takes longer than on the average worker
)

// Parts splits the cost of a request on one worker, for people: the values add up to Cost but for rounding. Parts that
// are 0 are left out.
func (c *Config) Parts(t *Terms) (parts []Part) {
	c.cost(t, &parts)
	if t.CostMultiplier != 0 {
		for i := range parts {
			parts[i].Value *= t.CostMultiplier
		}
	}
	return slices.DeleteFunc(parts, func(p Part) bool { return p.Value == 0 })
}
