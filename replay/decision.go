package replay

import (
	"cmp"
	"slices"
	"time"

	"kvepp/scoring"
)

// Outcome is what became of a request.
type Outcome string

// The outcomes.
const (
	Completed    Outcome = "completed"
	RefusedQueue Outcome = "refused: queue" // it was full, or the request waited in it for too long
	RefusedBusy  Outcome = "refused: busy"  // every worker that might take it was above a threshold
)

// Decision is one request with what was chosen for it.
type Decision struct {
	// Number counts arrivals from 1. Turns and dependents arrive after others have ended, so their numbers depend on
	// the setting.
	Number  int
	Request *Request
	Outcome Outcome
	// Arrived is virtual time, and Queued the time in kvepp's queue.
	Arrived, Queued time.Duration
	// Possible is how many of the prompt's tokens one cache of infinite size would have had.
	Possible int
	// Worker is the chosen one. With Predicted, Cached, TTFT, ITL and E2E it is zero unless the request completed.
	Worker int
	// Predicted and Cached are prompt tokens: those that the index counted for the worker, and those that its engine
	// had.
	Predicted, Cached int
	// TTFT is from the arrival to the first token, E2E to the last one, and ITL the mean gap between tokens.
	TTFT, ITL, E2E time.Duration
	// Candidates are the chosen worker and the cheapest others, at most MaxCandidates together, by cost.
	Candidates []Candidate
}

// MaxCandidates bounds the candidates of a Decision.
const MaxCandidates = 8

// Candidate is a worker that could have been chosen.
type Candidate struct {
	Worker int
	Chosen bool
	// Cost is as scoring.Config.Cost returns it: blocks, or milliseconds of the policy Time. In a mode without cost it
	// is the active requests.
	Cost  float64
	Terms scoring.Terms
}

// options returns the candidates of a choice that a Decision shows, by s.costs and s.terms.
func (s *Simulation) options(chosen int) []Candidate {
	order := make([]int, len(s.candidates))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(s.costs[a], s.costs[b]) })
	if len(order) > MaxCandidates {
		if at := slices.Index(order, chosen); at >= MaxCandidates {
			order[MaxCandidates-1] = chosen
		}
		order = order[:MaxCandidates]
	}
	list := make([]Candidate, 0, len(order))
	for _, i := range order {
		list = append(list, Candidate{int(s.candidates[i].Worker), i == chosen, s.costs[i], s.terms[i]})
	}
	return list
}

// decided reports a request that has ended.
func (s *Simulation) decided(f *flight, outcome Outcome) {
	if s.cfg.Decided == nil {
		return
	}
	d := Decision{
		Number:     f.number,
		Request:    f.Request,
		Outcome:    outcome,
		Arrived:    f.arrived,
		Queued:     s.now - f.arrived,
		Possible:   f.possible,
		Candidates: f.options,
	}
	if outcome == Completed {
		d.Worker, d.Queued = f.worker, f.sent-f.arrived
		d.Predicted, d.Cached = min(f.overlap*s.cfg.Engine.BlockSize, f.Prompt), f.cached
		d.TTFT, d.E2E = f.firstToken-f.arrived, s.now-f.arrived
		if f.Output > 1 {
			d.ITL = (f.lastToken - f.firstToken) / time.Duration(f.Output-1)
		}
	}
	s.cfg.Decided(&d)
}
