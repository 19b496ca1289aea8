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
	PartUsage    = "usage"    // KVUsageWeight
	PartSteps    = "steps"    // of a prefill, beside the time for its tokens
	PartDelays   = "delays"   // what this prefill delays answers on the worker
	PartEvicts   = "evicts"   // time to compute again what the worker evicts for this request
	PartMemory   = "memory"   // wait until enough blocks are free
	PartSlower   = "slower"   // what the answer takes longer than on the average worker
)

// Parts splits the cost of a request on one worker, for people: the values add up to Cost but for rounding. Parts that
// are 0 are left out.
func (c *Config) Parts(t *Terms) []Part {
	all := c.blockParts(t)
	if c.Policy == Time {
		all = c.timeParts(t)
	}
	kept := all[:0]
	for _, p := range all {
		if t.CostMultiplier != 0 {
			p.Value *= t.CostMultiplier
		}
		if p.Value != 0 {
			kept = append(kept, p)
		}
	}
	return kept
}

// blockParts are the parts of the policy Dynamo, before the multiplier. See Cost for the formula.
func (c *Config) blockParts(t *Terms) []Part {
	size := float64(t.BlockSize)
	credit, cachedBlocks := c.worth(t)
	var prompt, waiting, cached, decode, requests, usage float64
	if !t.LoadUnknown {
		decode, requests = t.DecodeBlocks, c.DecodeActiveRequestWeight*float64(t.ActiveRequests)
	}
	if c.KVUsageWeight != 0 && t.KVBlocks > 0 {
		usage = c.KVUsageWeight * decode / float64(t.KVBlocks)
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
	return []Part{{PartPrompt, prompt * unit}, {PartCached, cached * unit}, {PartWaiting, waiting * unit},
		{PartHeld, decode * unit}, {PartRequests, requests}, {PartUsage, usage}}
}

// timeParts are the parts of the policy Time, before the multiplier. See timeCost for the formula.
func (c *Config) timeParts(t *Terms) []Part {
	size, x := float64(t.BlockSize), &t.Time
	waiting, requests, decoding := float64(t.PrefillTokens), float64(t.ActiveRequests), float64(x.DecodingRequests)
	held, decodeBlocks := x.HeldBlocks, t.DecodeBlocks
	if t.LoadUnknown {
		waiting, requests, held, decodeBlocks, decoding = 0, 0, 0, decodeBlocks-held, 0
	}
	var prompt, cached, steps, pauses, delays, evicts, answers, slower, memory float64
	if c.TrackPrefillTokens {
		credit, _ := c.worth(t)
		steps = x.StepSeconds
		if x.QueuedPrefills == 0 {
			pauses = steps * pauseWeight(x.AnswerTokens) * requests
		}
		if requests > decoding {
			steps *= prefillSteps(x.RunningSeconds, x.StepSeconds)
			credit = max(credit, c.OverlapScoreCredit*float64(x.ActivePromptBlocks))
		}
		prompt = float64(t.ISLTokens)
		cached = -min(credit*size, prompt)
		fresh := prompt + cached
		delays, evicts = fresh*interference*decoding, x.Reuse*(fresh+x.AnswerTokens)
	} else {
		waiting = 0
	}
	if c.TrackActiveBlocks {
		answers = decodeInterference * x.AnswerTokens * x.GapPerToken *
			(held*size + decoding*(float64(t.ISLTokens)+x.AnswerTokens/2))
		slower = slowerAnswer * x.AnswerTokens * x.SlowerPerToken
		if t.KVBlocks > 0 {
			expected := decodeBlocks + (requests+1)*x.AnswerTokens/(2*size)
			memory = max(expected-float64(t.KVBlocks), 0) / max(held, 1) * x.LifeSeconds
		}
	}
	token := 1000 * x.SecondsPerToken
	return []Part{{PartPrompt, token * prompt}, {PartCached, token * cached}, {PartWaiting, token * waiting},
		{PartHeld, 1000 * answers}, {PartSteps, 1000 * steps}, {PartDelays, token*delays + 1000*pauses},
		{PartEvicts, token * evicts}, {PartMemory, 1000 * memory}, {PartSlower, 1000 * slower}}
}
