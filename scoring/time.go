package scoring

import (
	"fmt"
	"math"
	"slices"
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
func ParsePolicy(name string) (Policy, error) { return parse[Policy](policyNames[:], name) }

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

// timeCost prices a request on one worker by time, in milliseconds, without the multiplier. Unless parts is nil, it
// sets these to the terms:
//
//	new    = prompt tokens - credit for cached blocks; while a prefill waits or runs on the worker, at least for those
//	         that its active requests hold
//	steps  = 1; or 2 if another prefill waits on the worker or runs there
//	delay  = steps * seconds per step + seconds per token * (waiting prefill tokens + new) + delays
//	delays = crowd(decoding requests) * (seconds per token * new + seconds per step), the latter only without another
//	         prefill
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
func (c *Config) timeCost(t *Terms, parts *[]Part) float64 {
	size, x := float64(t.BlockSize), &t.Time
	waiting, held, decodeBlocks := float64(t.PrefillTokens), x.HeldBlocks, t.DecodeBlocks
	requests, decoding := t.ActiveRequests, x.DecodingRequests
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
		cached = max(-credit*size, -prompt)
		delays = crowd(decoding) * (x.SecondsPerToken*(prompt+cached) + pause)
	} else {
		waiting = 0
	}
	if c.TrackActiveBlocks {
		outputs = decodeInterference * x.OutputTokens * x.GapPerToken *
			(held*size + float64(decoding)*(float64(t.ISLTokens)+x.OutputTokens/2))
		slower = slowerOutput * x.OutputTokens * x.SlowerPerToken
		if t.KVBlocks > 0 {
			expected := decodeBlocks + float64(requests+1)*x.OutputTokens/size
			memory = max(expected-float64(t.KVBlocks), 0) / max(held, 1) * x.LifeSeconds
		}
	}
	token := 1000 * x.SecondsPerToken
	if parts != nil {
		*parts = []Part{{PartPrompt, token * prompt}, {PartCached, token * cached}, {PartWaiting, token * waiting},
			{PartHeld, 1000 * outputs}, {PartSteps, 1000 * steps}, {PartDelays, 1000 * delays},
			{PartMemory, 1000 * memory}, {PartSlower, 1000 * slower}}
	}
	return token*(prompt+cached+waiting) + 1000*(outputs+steps+delays+memory+slower)
}

// crowd returns the weight of what n responses lose: interference * n^0.75. In proportion to n, they would outweigh the
// first token that a request waits for where many responses run on each worker.
func crowd(n int) float64 {
	if uint(n) < uint(len(crowds)) {
		return crowds[n]
	}
	return crowds[len(crowds)-1]
}

// crowds has the results of crowd: two square roots for each candidate took a fifth of a choice.
var crowds = func() (of [1 << 12]float64) {
	for n := range of {
		of[n] = interference * math.Sqrt(float64(n)*math.Sqrt(float64(n)))
	}
	return of
}()
