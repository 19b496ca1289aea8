package router

import (
	"time"

	"kvepp/scoring"
)

// MarkPrefillCompleted notes that the first content of the response has just come, so the prompt is prefilled. Only the
// first call of this and ReleasePrefill counts.
func (r *Route) MarkPrefillCompleted() {
	r.observed.sawFirstToken(r)
	r.booking.MarkPrefillCompleted()
	r.prefill.MarkPrefillCompleted()
	r.ReleasePrefill()
}

// ReleasePrefill notes that the prompt has been prefilled at an unknown time.
func (r *Route) ReleasePrefill() {
	r.endPrefill()
	if r.promptComputed != nil && !r.prefilled.Swap(true) {
		r.promptComputed(r.computes.Worker, r.PromptTokens, r.BlockSize)
	}
}

// endPrefill takes the prompt off the load of the worker that computes it.
func (r *Route) endPrefill() {
	r.booking.ReleasePrefill()
	r.prefill.Free() // the prefill worker has done its part
	if r.released != nil && !r.computed.Swap(true) {
		r.released()
	}
}

// MostTokens returns the most tokens that the request lets all of its responses have together; 0: no limit.
func (r *Route) MostTokens() int { return r.most }

// LearnOutput notes that a streamed response is complete, and its number of tokens. Call it before Free.
func (r *Route) LearnOutput(tokens int) {
	r.outputTokens = tokens
	r.booking.LearnOutput(tokens)
}

// expectPrefill starts a timer that ends the prefill load after the estimated prefill time, if the worker's speed is
// known. It is for responses in one piece, which show only at their end that the prompt was prefilled.
func (r *Route) expectPrefill() {
	computes := r.booking
	if r.Prefill != nil {
		computes = r.prefill
	}
	if d, ok := computes.PrefillEstimate(); ok {
		r.estimate = time.AfterFunc(d, r.endPrefill)
	}
}

// outputTracker counts the blocks that a response takes.
type outputTracker struct {
	tracked      bool
	prompt, size int // tokens of the prompt and of a block
	blocks       int // of prompt and response so far
	expected     int // tokens of the response; 0: not known
}

func newOutputTracker(prompt, size, expected int) outputTracker {
	blocks := (prompt + size - 1) / size
	return outputTracker{tracked: true, prompt: prompt, size: size, blocks: blocks, expected: expected}
}

// grow returns how many blocks the response takes more now that it has this many tokens, and the share of the response
// that is still to come, 0..1 or scoring.NotKnown.
//
// Source: dynamo-llm 1.6.1, kv_router/routing_host/request_guard.
func (o *outputTracker) grow(tokens int) (blocks int, left float64) {
	now := (o.prompt + tokens + o.size - 1) / o.size
	if blocks = now - o.blocks; blocks <= 0 {
		return 0, scoring.NotKnown
	}
	o.blocks = now
	if o.expected == 0 {
		return blocks, scoring.NotKnown
	}
	return blocks, max(1-float64(tokens)/float64(o.expected), 0)
}

// Generated notes how many tokens the response has so far. It must not be called concurrently.
func (r *Route) Generated(tokens int) {
	if !r.output.tracked {
		return
	}
	if blocks, left := r.output.grow(tokens); blocks > 0 {
		r.booking.AddOutputBlocks(blocks, left)
	}
}

// TracksOutput reports whether Generated has any effect.
func (r *Route) TracksOutput() bool { return r.output.tracked }

// Free ends the request. Only the first call counts.
func (r *Route) Free() {
	if r.estimate != nil {
		r.estimate.Stop()
	}
	r.booking.Free()
	r.prefill.Free()
	if r.freed.Swap(true) {
		return
	}
	if r.firsts != nil {
		r.firsts.forget(r.FirstTokenID)
	}
	r.lease.Release(r.final)
	if r.turn != nil {
		r.turn.End(r.outputTokens)
	}
	if r.released != nil {
		r.released()
	}
}
