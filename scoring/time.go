package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Policy is how the mode KV prices workers.
type Policy uint8

// The policies.
const (
	// Dynamo prices in blocks, as Dynamo does.
	Dynamo Policy = iota
	// Time prices by the time that a choice costs this request and those on the worker, in milliseconds.
	Time
)

var policyNames = [...]string{"dynamo", "time"}

// PolicyNames returns the names of all policies.
func PolicyNames() []string { return slices.Clone(policyNames[:]) }

// ParsePolicy returns the policy with a name.
func ParsePolicy(name string) (Policy, error) {
	for p, n := range policyNames {
		if n == name {
			return Policy(p), nil
		}
	}
	return 0, fmt.Errorf("%q: must be one of %s", name, strings.Join(policyNames[:], ", "))
}

// String returns the policy's name.
func (p Policy) String() string {
	if int(p) >= len(policyNames) {
		return fmt.Sprintf("policy(%d)", uint8(p))
	}
	return policyNames[p]
}

// TimeTerms are the terms that only the policy Time reads.
type TimeTerms struct {
	DecodingRequests int     // active requests whose first token has come
	HeldBlocks       float64 // Terms.DecodeBlocks without this request
	// ActivePromptBlocks is how many blocks of the prompt active requests of the worker hold, computed or not.
	ActivePromptBlocks int
	SecondsPerToken    float64 // of prefill on this worker
	StepSeconds        float64 // of a prefill step on this worker, beside the time for its tokens
	GapPerToken        float64 // seconds by which each held token lengthens the time between two tokens
	SlowerPerToken     float64 // seconds between two tokens more than on the average worker, expected from the prefill
	OutputTokens       float64 // mean length of a response
	LifeSeconds        float64 // mean time from the first token to the end of a response
}

// timeCost prices a request on one worker by time, in milliseconds; lower is better:
//
//	new    = prompt tokens - credit for cached blocks; while a prefill waits or runs on the worker, at least for those
//	         that its active requests hold
//	steps  = 1; or 2 if another prefill waits on the worker or runs there
//	delay  = steps * seconds per step + seconds per token * (waiting prefill tokens + new) + delays
//	delays = interference * crowd(decoding requests) * (seconds per token * new + seconds per step), the latter only
//	         without another prefill
//	decode = decodeInterference * output * gap per token * (held tokens + decoding requests * (prompt + output / 2)) +
//	         slowerOutput * output * slower per token
//	memory = blocks above the capacity / held blocks * life
//	cost   = 1000 * (delay + decode + memory)
//
// delay is the prefill that waits before this request's, its own, and what it delays the responses there. All that
// waits is computed in one step, after the step that runs: so the constant part of a step counts at most twice, and the
// blocks of a prompt that waits there need not be computed again. delays is the time that the responses there lose; one
// more prompt in a step adds no constant part. decode is what held tokens cost this response, and this one's tokens the
// others, and what the response takes longer on a slower worker. memory is the wait until enough blocks become free, if
// the worker's number of blocks is known; each request there is expected to need a whole response more, because what
// is left of a running one is as long as a new one if their lengths are about exponentially distributed.
func (c *Config) timeCost(t *Terms) float64 {
	return c.sumTime(t, nil)
}

// timePartNames are the names of the parts that sumTime returns.
var timePartNames = [...]string{
	PartPrompt, PartCached, PartWaiting, PartHeld, PartSteps, PartDelays, PartMemory, PartSlower,
}

// sumTime is timeCost. Unless parts is nil, it also sets these to the terms, before the multiplier.
func (c *Config) sumTime(t *Terms, parts *[len(timePartNames)]float64) float64 {
	size, x := float64(t.BlockSize), &t.Time
	waiting, requests, decoding := float64(t.PrefillTokens), float64(t.ActiveRequests), float64(x.DecodingRequests)
	held, decodeBlocks := x.HeldBlocks, t.DecodeBlocks
	if t.LoadUnknown {
		waiting, requests, held, decodeBlocks, decoding = 0, 0, 0, decodeBlocks-held, 0
	}
	var prompt, cached, steps, delays, outputs, slower, memory float64
	if c.TrackPrefillTokens {
		credit := c.Credit(t)
		steps = x.StepSeconds
		pause := steps
		if requests > decoding {
			steps, pause = 2*steps, 0
			credit = max(credit, c.OverlapScoreCredit*float64(x.ActivePromptBlocks))
		}
		prompt = float64(t.ISLTokens)
		cached = -min(credit*size, prompt)
		delays = interference * crowd(decoding) * (x.SecondsPerToken*(prompt+cached) + pause)
	} else {
		waiting = 0
	}
	if c.TrackActiveBlocks {
		outputs = decodeInterference * x.OutputTokens * x.GapPerToken *
			(held*size + decoding*(float64(t.ISLTokens)+x.OutputTokens/2))
		slower = slowerOutput * x.OutputTokens * x.SlowerPerToken
		if t.KVBlocks > 0 {
			expected := decodeBlocks + (requests+1)*x.OutputTokens/size
			memory = max(expected-float64(t.KVBlocks), 0) / max(held, 1) * x.LifeSeconds
		}
	}
	token := 1000 * x.SecondsPerToken
	if parts != nil {
		*parts = [...]float64{token * prompt, token * cached, token * waiting, 1000 * outputs, 1000 * steps,
			1000 * delays, 1000 * memory, 1000 * slower}
	}
	cost := token*(prompt+cached+waiting) + 1000*(outputs+steps+delays+memory+slower)
	if t.CostMultiplier != 0 {
		cost *= t.CostMultiplier
	}
	return cost
}

// crowd returns what a number of delayed responses counts: n^0.75. In proportion to n, they would outweigh the first
// token that a request waits for where many responses run on each worker.
func crowd(n float64) float64 { return math.Sqrt(n * math.Sqrt(n)) }

// timeTerms sets the terms of the policy Time for a candidate that common and terms have not set yet.
// added is how many blocks the request would add there.
func (a *ActiveSequences) timeTerms(t *Terms, c *Candidate, added int) {
	load, p, x := &a.loads[c.Worker], &a.learned.prices[c.Worker], &t.Time
	x.DecodingRequests = load.Requests - int(p.prefilling)
	x.SecondsPerToken, x.StepSeconds, x.GapPerToken = p.or(&a.average)
	x.SlowerPerToken = float64(p.slowerPerToken)
	x.ActivePromptBlocks = 0
	if v := a.variantOf(c.Prompt); v != nil && p.prefilling > 0 {
		x.ActivePromptBlocks = v.distinct - added
	}
}

// choose returns the index of the chosen cost, see Choose. With the policy Time the temperature is in milliseconds: a
// worker that costs that much more than the cheapest one is drawn 1/e times as often.
func (c *Config) choose(costs []float64, rng *rand.Rand) (int, error) {
	temperature := c.Temperature
	if c.Policy == Time && temperature != 0 {
		least, greatest := math.Inf(1), math.Inf(-1)
		for _, cost := range costs {
			if finite(cost) {
				least, greatest = min(least, cost), max(greatest, cost)
			}
		}
		if greatest > least { // Choose scales to 0..1
			temperature = max(temperature/(greatest-least), math.SmallestNonzeroFloat64)
		}
	}
	return Choose(costs, temperature, rng)
}
