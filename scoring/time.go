package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"kvepp/kvblock"
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

const (
	// interference is the weight of the time that others lose to this request's prefill. Their clients read slower than
	// engines generate, so a late token costs less than a late first token.
	interference = 0.2
	// decodeInterference is the weight of the time that responses lose to each other's KV blocks.
	decodeInterference = interference / 10
	// slowerOutput is the weight of the time that a response takes longer on a slower worker.
	slowerOutput = interference / 2
	// pauseInterference is the weight of the constant time of this request's prefill step for each request that it
	// delays. It is for responses of up to shortOutput tokens. The longer a response is, the more its reader is behind
	// the engine and does not see the delay.
	pauseInterference = 0.15
	shortOutput       = 100.0
	// leastRest is the least share of the constant time of a running prefill step that is assumed to be left. The step
	// also computes tokens, and kvepp does not see its end before the first token comes.
	leastRest = 0.5
)

// TimeTerms are the terms that only the policy Time reads.
type TimeTerms struct {
	DecodingRequests int     // active requests whose first token has come
	QueuedPrefills   int     // active requests that came after the running prefill step began: the next step has them
	RunningSeconds   float64 // since the running prefill step began; 0 without one
	HeldBlocks       float64 // Terms.DecodeBlocks without this request
	// ActivePromptBlocks is how many blocks of the prompt active requests of the worker hold, computed or not.
	ActivePromptBlocks int
	SecondsPerToken    float64 // of prefill on this worker
	StepSeconds        float64 // of a prefill step on this worker, beside the time for its tokens
	GapPerToken        float64 // seconds by which each held token lengthens the time between two tokens
	SlowerPerToken     float64 // seconds between two tokens more than on the average worker, expected from the prefill
	OutputTokens       float64 // mean length of a response
	LifeSeconds        float64 // mean time from the first token to the end of a response
	Reuse              float64 // chance that a block that this worker evicts is asked for again
}

// timeCost prices a request on one worker by time, in milliseconds; lower is better:
//
//	new    = prompt tokens - credit for cached blocks; while a prefill waits or runs on the worker, at least for those
//	         that its active requests hold
//	steps  = 1; or, if another prefill waits on the worker or runs there, 2 - min(1/2, running / seconds per step)
//	pauses = active requests * min(1, 100 / output), or 0 if a prefill waits for the worker's next step
//	delay  = (steps + pauseInterference * pauses) * seconds per step + seconds per token *
//	         (waiting prefill tokens + new + interference * decoding requests * new)
//	evict  = seconds per token * reuse * (new + output)
//	decode = decodeInterference * output * gap per token * (held tokens + decoding requests * (prompt + output / 2)) +
//	         slowerOutput * output * slower per token
//	memory = blocks above the capacity / held blocks * life
//	cost   = 1000 * (delay + evict + decode + memory)
//
// delay is the prefill that waits before this request's, its own, and what it delays the responses there. All that
// waits is computed in one step, after the step that runs: so the constant part of a step counts at most twice, less
// what has passed of the running one, and the blocks of a prompt that waits there need not be computed again. pauses is
// what the constant part delays the active requests; one more prompt in a step that another waits for delays none of
// them. evict is the time to compute again what the worker evicts for this request and is asked for later. decode is
// what held tokens cost this response, and this one's tokens the others, and what the response takes longer on a slower
// worker. memory is the wait until enough blocks become free, if the worker's number of blocks is known; each active
// request is expected to need half a response more.
func (c *Config) timeCost(t *Terms) float64 {
	return c.sumTime(t, nil)
}

// timePartNames are the names of the parts that sumTime returns.
var timePartNames = [...]string{
	PartPrompt, PartCached, PartWaiting, PartHeld, PartSteps, PartDelays, PartEvicts, PartMemory, PartSlower,
}

// sumTime is timeCost. Unless parts is nil, it also sets these to the terms, before the multiplier.
func (c *Config) sumTime(t *Terms, parts *[len(timePartNames)]float64) float64 {
	size, x := float64(t.BlockSize), &t.Time
	waiting, requests, decoding := float64(t.PrefillTokens), float64(t.ActiveRequests), float64(x.DecodingRequests)
	held, decodeBlocks := x.HeldBlocks, t.DecodeBlocks
	if t.LoadUnknown {
		waiting, requests, held, decodeBlocks, decoding = 0, 0, 0, decodeBlocks-held, 0
	}
	var prompt, cached, steps, pauses, delays, evicts, outputs, slower, memory float64
	if c.TrackPrefillTokens {
		credit := c.Credit(t)
		steps = x.StepSeconds
		if x.QueuedPrefills == 0 {
			pauses = steps * pauseWeight(x.OutputTokens) * requests
		}
		if requests > decoding {
			steps *= prefillSteps(x.RunningSeconds, x.StepSeconds)
			credit = max(credit, c.OverlapScoreCredit*float64(x.ActivePromptBlocks))
		}
		prompt = float64(t.ISLTokens)
		cached = -min(credit*size, prompt)
		fresh := prompt + cached
		delays, evicts = fresh*interference*decoding, x.Reuse*(fresh+x.OutputTokens)
	} else {
		waiting = 0
	}
	if c.TrackActiveBlocks {
		outputs = decodeInterference * x.OutputTokens * x.GapPerToken *
			(held*size + decoding*(float64(t.ISLTokens)+x.OutputTokens/2))
		slower = slowerOutput * x.OutputTokens * x.SlowerPerToken
		if t.KVBlocks > 0 {
			expected := decodeBlocks + (requests+1)*x.OutputTokens/(2*size)
			memory = max(expected-float64(t.KVBlocks), 0) / max(held, 1) * x.LifeSeconds
		}
	}
	token := 1000 * x.SecondsPerToken
	if parts != nil {
		*parts = [...]float64{token * prompt, token * cached, token * waiting, 1000 * outputs, 1000 * steps,
			token*delays + 1000*pauses, token * evicts, 1000 * memory, 1000 * slower}
	}
	cost := token*(prompt+cached+waiting+delays+evicts) + 1000*(outputs+steps+pauses+memory+slower)
	if t.CostMultiplier != 0 {
		cost *= t.CostMultiplier
	}
	return cost
}

// prefillSteps returns for how many prefill steps a prompt's first token waits if another prefill runs: the rest of
// that step, and its own. running is for how many seconds the other has run, and step the constant time of one.
func prefillSteps(running, step float64) float64 {
	if running < leastRest*step {
		return 2 - running/step
	}
	return 2 - leastRest
}

// pauseWeight returns the weight of a prefill step's constant time for each request that it delays.
func pauseWeight(output float64) float64 { return pauseInterference * min(1, shortOutput/output) }

// EvictSeconds returns the time to compute again what the worker evicts for this request and is asked for later, if all
// cached blocks are credited in full. It is a term of the policy Time.
func (t *Terms) EvictSeconds() float64 {
	fresh := max(t.ISLTokens-t.BlockSize*(t.DeviceBlocks+t.HostBlocks+t.DiskBlocks+t.SharedBlocks), 0)
	return t.Time.SecondsPerToken * t.Time.Reuse * (float64(fresh) + t.Time.OutputTokens)
}

// timeTerms sets the terms of the policy Time for a candidate that common and terms have not set yet.
// added is how many blocks the request would add there.
func (a *ActiveSequences) timeTerms(t *Terms, c *Candidate, added int) {
	load, p, x := &a.loads[c.Worker], &a.learned.prices[c.Worker], &t.Time
	x.DecodingRequests = load.Requests - int(p.prefilling)
	x.SecondsPerToken, x.StepSeconds, x.GapPerToken = p.or(&a.average)
	x.SlowerPerToken, x.Reuse = float64(p.slowerPerToken), float64(p.reuse)
	x.RunningSeconds, x.QueuedPrefills, x.ActivePromptBlocks = 0, 0, 0
	if p.prefilling > 0 {
		x.QueuedPrefills = a.prefills[c.Worker].queued
		x.RunningSeconds = a.runningSeconds(c.Worker)
		if v := a.variantOf(c.Prompt); v != nil {
			x.ActivePromptBlocks = v.distinct - added
		}
	}
}

// runningSeconds returns for how many seconds a worker's prefill step has run. The worker must have one.
func (a *ActiveSequences) runningSeconds(w kvblock.Worker) float64 {
	return float64(a.now-a.prefills[w].step) / float64(time.Second)
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
