package scoring

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
func (c *Config) Parts(t *Terms) []Part {
	names, values := blockPartNames[:], c.blockParts(t)
	all := values[:]
	if c.Policy == Time {
		var times [len(timePartNames)]float64
		c.sumTime(t, &times)
		names, all = timePartNames[:], times[:]
	}
	var parts []Part
	for i, value := range all {
		if t.CostMultiplier != 0 {
			value *= t.CostMultiplier
		}
		if value != 0 {
			parts = append(parts, Part{names[i], value})
		}
	}
	return parts
}

var blockPartNames = [...]string{PartPrompt, PartCached, PartWaiting, PartHeld, PartRequests}

// blockParts are the parts of the policy Dynamo, before the multiplier. See Cost for the formula.
func (c *Config) blockParts(t *Terms) [len(blockPartNames)]float64 {
	size := float64(t.BlockSize)
	credit, cachedBlocks := c.Credit(t), c.cachedBlocks(t)
	var prompt, waiting, cached, decode, requests float64
	if !t.LoadUnknown {
		decode, requests = t.DecodeBlocks, c.DecodeActiveRequestWeight*float64(t.ActiveRequests)
	}
	if c.DecodeRole && !c.TrackPrefillTokens && c.OverlapScoreCredit > 0 {
		cached = -min(credit, decode)
	} else if c.TrackPrefillTokens {
		prompt = float64(t.ISLTokens) / size
		if !t.LoadUnknown {
			prompt = max(prompt, cachedBlocks)
			waiting = float64(t.PrefillTokens) / size
		}
		cached = -min(credit, prompt+waiting)
		prompt, waiting, cached = c.PrefillLoadScale*prompt, c.PrefillLoadScale*waiting, c.PrefillLoadScale*cached
	}
	unit := 1.0
	if t.UnitTokens != 0 {
		unit = size / float64(t.UnitTokens)
	}
	return [...]float64{prompt * unit, cached * unit, waiting * unit, decode * unit, requests}
}
