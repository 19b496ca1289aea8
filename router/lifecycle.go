package router

import (
	"time"

	"kvepp/scoring"
)

// MarkPrefillCompleted says that the first of the answer was just seen: the prompt is prefilled. Only the first call of
// this and ReleasePrefill counts.
func (r *Route) MarkPrefillCompleted() {
	r.observed.sawFirstToken(r)
	r.booking.MarkPrefillCompleted()
	r.prefill.MarkPrefillCompleted()
	r.ReleasePrefill()
}

// ReleasePrefill says that the prompt has been prefilled, at what time is not known.
func (r *Route) ReleasePrefill() {
	r.endPrefill()
	if r.promptComputed != nil && !r.prefilled.Swap(true) {
		r.promptComputed(r.computes.Worker, r.PromptTokens, r.BlockSize)
	}
}

// endPrefill takes the prompt off the load of who computes it.
func (r *Route) endPrefill() {
	r.booking.ReleasePrefill()
	r.prefill.Free() // the prefill worker has done its part
	if r.released != nil && !r.computed.Swap(true) {
		r.released()
	}
}

// expectPrefill has the prefill load of a request end when the worker should be done with it, as far as its speed is
// known: an answer in one piece shows no earlier than at its end that the prompt was prefilled long ago.
func (r *Route) expectPrefill() {
	computes := r.booking
	if r.Prefill != nil {
		computes = r.prefill
	}
	if d, ok := computes.PrefillEstimate(); ok {
		r.estimate = time.AfterFunc(d, r.endPrefill)
	}
}

// answer follows how many blocks an answer takes.
type answer struct {
	tracked      bool
	prompt, size int // of the prompt and of a block, in tokens
	blocks       int // of prompt and answer, so far
	expected     int // tokens of the answer; 0: not known
}

func newAnswer(prompt, size, expected int) answer {
	return answer{tracked: true, prompt: prompt, size: size, blocks: (prompt + size - 1) / size, expected: expected}
}

// grow returns how many blocks are new when the answer has come to so many tokens, and the part of it that is then
// left.
//
// Source: dynamo-llm 1.6.1, kv_router/routing_host/request_guard.
func (a *answer) grow(tokens int) (blocks int, left float64) {
	now := (a.prompt + tokens + a.size - 1) / a.size
	if blocks = now - a.blocks; blocks <= 0 {
		return 0, scoring.NotKnown
	}
	a.blocks = now
	if a.expected == 0 {
		return blocks, scoring.NotKnown
	}
	return blocks, max(1-float64(tokens)/float64(a.expected), 0)
}

// Generated says that the answer has come to so many tokens. It may not be called from several goroutines at once.
func (r *Route) Generated(tokens int) {
	if !r.answer.tracked {
		return
	}
	if blocks, left := r.answer.grow(tokens); blocks > 0 {
		r.booking.AddOutputBlocks(blocks, left)
	}
}

// TracksAnswer reports whether Generated has any effect.
func (r *Route) TracksAnswer() bool { return r.answer.tracked }

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
	r.lease.Release(r.final)
	if r.released != nil {
		r.released()
	}
}
