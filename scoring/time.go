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
	// decodeInterference is the weight of the time that answers lose to each other's KV blocks.
	decodeInterference = interference / 10
	// slowerAnswer is the weight of the time that an answer takes longer on a slower worker.
	slowerAnswer = interference / 2
	// pauseInterference is the weight of the constant time of this request's prefill step for each request that it
	// delays. It is for answers of up to shortAnswer tokens. The longer an answer is, the more its reader is behind the
	// engine and does not see the delay.
	pauseInterference = 0.15
	shortAnswer       = 100.0
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
	AnswerTokens       float64 // mean length of an answer
	LifeSeconds        float64 // mean time from the first token to the end of an answer
	Reuse              float64 // chance that a block that this worker evicts is asked for again
}

// timeCost prices a request on one worker by time, in milliseconds; lower is better:
//
//	new    = prompt tokens - credit for cached blocks; while a prefill waits or runs on the worker, at least for those
//	         that its active requests hold
//	steps  = 1; or, if another prefill waits on the worker or runs there, 2 - min(1/2, running / seconds per step)
//	pauses = active requests * min(1, 100 / answer), or 0 if a prefill waits for the worker's next step
//	delay  = (steps + pauseInterference * pauses) * seconds per step + seconds per token *
//	         (waiting prefill tokens + new + interference * decoding requests * new)
//	evict  = seconds per token * reuse * (new + answer)
//	decode = decodeInterference * answer * gap per token * (held tokens + decoding requests * (prompt + answer / 2)) +
//	         slowerAnswer * answer * slower per token
//	memory = blocks above the capacity / held blocks * life
//	cost   = 1000 * (delay + evict + decode + memory)
//
// delay is the prefill that waits before this request's, its own, and what it delays the answers there. All that waits
// is computed in one step, after the step that runs: so the constant part of a step counts at most twice, less what has
// passed of the running one, and the blocks of a prompt that waits there need not be computed again. pauses is what the
// constant part delays the active requests; one more prompt in a step that another waits for delays none of them. evict
// is the time to compute again what the worker evicts for this request and is asked for later. decode is what held
// tokens cost this answer, and this one's tokens the others, and what the answer takes longer on a slower worker.
// memory is the wait until enough blocks become free, if the worker's number of blocks is known; each active request is
// expected to need half an answer more.
func (c *Config) timeCost(t *Terms) float64 {
	size := float64(t.BlockSize)
	waiting, requests := float64(t.PrefillTokens), t.ActiveRequests
	held, decodeBlocks := t.Time.HeldBlocks, t.DecodeBlocks
	decoding := float64(t.Time.DecodingRequests)
	if t.LoadUnknown {
		waiting, requests, held, decodeBlocks, decoding = 0, 0, 0, decodeBlocks-held, 0
	}
	cost := 0.0
	if c.TrackPrefillTokens {
		credit, _ := c.worth(t)
		steps := 1.0
		if requests > int(decoding) {
			steps = prefillSteps(t.Time.RunningSeconds, t.Time.StepSeconds)
			credit = max(credit, float64(c.OverlapScoreCredit*float64(t.Time.ActivePromptBlocks)))
		}
		fresh := max(float64(t.ISLTokens)-float64(credit*size), 0)
		tokens := waiting + float64(fresh*(1+float64(interference*decoding))) +
			float64(t.Time.Reuse*(fresh+t.Time.AnswerTokens))
		if t.Time.QueuedPrefills == 0 {
			steps += float64(pauseWeight(t.Time.AnswerTokens) * float64(requests))
		}
		cost = float64(steps*t.Time.StepSeconds) + float64(t.Time.SecondsPerToken*tokens)
	}
	if c.TrackActiveBlocks {
		answer := t.Time.AnswerTokens
		cost += float64(decodeInterference * answer * t.Time.GapPerToken *
			(float64(held*size) + float64(decoding*(float64(t.ISLTokens)+answer/2))))
		cost += float64(slowerAnswer * answer * t.Time.SlowerPerToken)
		if t.KVBlocks > 0 {
			expected := decodeBlocks + float64(float64(requests+1)*(answer/(2*size)))
			if above := expected - float64(t.KVBlocks); above > 0 {
				cost += float64(above / max(held, 1) * t.Time.LifeSeconds)
			}
		}
	}
	cost *= 1000
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
func pauseWeight(answer float64) float64 { return pauseInterference * min(1, shortAnswer/answer) }

// EvictSeconds returns the time to compute again what the worker evicts for this request and is asked for later, if all
// cached blocks are credited in full. It is a term of the policy Time.
func (t *Terms) EvictSeconds() float64 {
	fresh := max(t.ISLTokens-t.BlockSize*(t.DeviceBlocks+t.HostBlocks+t.DiskBlocks+t.SharedBlocks), 0)
	return t.Time.SecondsPerToken * t.Time.Reuse * (float64(fresh) + t.Time.AnswerTokens)
}

// timeTerms sets the terms of the policy Time for a candidate. added is how many blocks the request would add there.
func (a *ActiveSequences) timeTerms(t *Terms, c *Candidate, added int) {
	load, prices := &a.loads[c.Worker], &a.learned.prices[c.Worker]
	t.Time = TimeTerms{
		DecodingRequests: load.Requests - int(prices.prefilling),
		QueuedPrefills:   a.prefills[c.Worker].queued,
		SlowerPerToken:   float64(prices.slowerPerToken),
		HeldBlocks:       float64(load.ActiveTokens) / float64(t.BlockSize),
		GapPerToken:      a.learned.gapPerToken(a.fleet, c.Worker),
		AnswerTokens:     a.fleet.answerTokens(),
		LifeSeconds:      a.fleet.usual.life.value,
		Reuse:            float64(prices.reuse),
	}
	if prices.prefilling > 0 {
		t.Time.RunningSeconds = a.runningSeconds(c.Worker)
	}
	if v := a.variantOf(c.Prompt); v != nil {
		t.Time.ActivePromptBlocks = v.distinct - added
	}
	t.Time.SecondsPerToken, t.Time.StepSeconds = a.learned.prefillTimes(a.fleet, c.Worker)
}

// runningSeconds returns for how many seconds a worker's prefill step has run. The worker must have one.
func (a *ActiveSequences) runningSeconds(w kvblock.Worker) float64 {
	return float64(a.now-a.prefills[w].step) / float64(time.Second)
}

// chooseAlikeByTime sets the costs of candidates that are alike, right after open, and chooses one: what timeCost and
// chooseByTime do, without the terms that are zero, with what all candidates share computed once, and in one pass. The
// costs are equal to the last bit, as in chooseAlike.
func (a *ActiveSequences) chooseAlikeByTime(
	req Request, candidates []Candidate, cfg *Config, blockSize int, rng *rand.Rand, costs []float64,
) (int, error) {
	learned, held, distinct := a.learned.prices, a.walker.held, int64(a.variants[0].distinct)
	costs = costs[:len(candidates)]
	common, answer, life := a.fleet.common(), a.fleet.answerTokens(), a.fleet.usual.life.value
	isl, size := float64(req.ISLTokens), float64(blockSize)
	credit := cfg.OverlapScoreCredit * size
	gapWeight, own, half := decodeInterference*answer, isl+answer/2, answer/(2*size)
	slowerWeight, pause := slowerAnswer*answer, pauseWeight(answer)
	linear, now := a.Prefill.Linear, a.now
	l := newLowest()
	if cfg.Temperature != 0 {
		l.cost = math.Inf(-1) // offer no cost: chooseByTime chooses
	}
	for i := range candidates {
		c := &candidates[i]
		p := &learned[c.Worker]
		perToken, perStep, perHeld := p.secondsPerToken, p.stepSeconds, p.gapPerToken
		if perToken == 0 {
			perToken, perStep = common.secondsPerToken, common.stepSeconds
		}
		if perHeld == 0 {
			perHeld = common.gapPerToken
		}
		waiting := p.waiting
		if linear {
			waiting = float64(a.waiting(c.Worker, now))
		}
		known := c.DeviceBlocks
		steps := 1.0
		if p.prefilling > 0 {
			steps = prefillSteps(a.runningSeconds(c.Worker), perStep)
			known = max(known, int(held[c.Worker]))
		}
		steps += float64(pause * float64(p.paused))
		fresh := isl - float64(credit*float64(known))
		if fresh < 0 { // faster than max
			fresh = 0
		}
		cost := float64(steps*perStep) + float64(perToken*(waiting+float64(fresh*(1+float64(interference*p.decoding)))+
			float64(float64(p.reuse)*(fresh+answer))))
		cost += float64(gapWeight * perHeld * (p.held + float64(p.decoding*own)))
		cost += float64(slowerWeight * float64(p.slowerPerToken))
		if c.KVBlocks > 0 {
			blocks := p.held / size
			requests := p.decoding + float64(p.prefilling)
			expected := blocks + float64(distinct-int64(held[c.Worker])) + float64((requests+1)*half)
			if above := expected - float64(c.KVBlocks); above > 0 {
				cost += float64(above / max(blocks, 1) * life)
			}
		}
		cost *= 1000
		costs[i] = cost
		if cost <= l.cost {
			l.offer(i, cost, rng)
		}
	}
	if cfg.Temperature == 0 {
		return l.choice()
	}
	return chooseByTime(costs, cfg.Temperature, rng)
}

// chooseByTime chooses by costs in milliseconds. So is temperature: a worker that costs that much more than the
// cheapest one is drawn 1/e times as often.
func chooseByTime(costs []float64, temperature float64, rng *rand.Rand) (int, error) {
	if temperature == 0 {
		return Choose(costs, 0, rng)
	}
	least, greatest := math.Inf(1), math.Inf(-1)
	for _, cost := range costs {
		if finite(cost) {
			least, greatest = min(least, cost), max(greatest, cost)
		}
	}
	if !(greatest > least) {
		return Choose(costs, temperature, rng)
	}
	return Choose(costs, max(temperature/(greatest-least), math.SmallestNonzeroFloat64), rng) // Choose scales to 0..1
}
