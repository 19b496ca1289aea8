package router

import (
	"errors"
	"math/rand/v2"

	"kvepp/pool"
	"kvepp/scoring"
)

// choose chooses the worker, or the two workers, for a request and books the request there.
func (r *Router) choose(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared) (route *Route, err error) {
	if p.affinity.wanted && !p.stored.bound {
		route, err = r.chooseInSession(sc, snapshot, req, p)
	} else {
		route, err = r.chooseFor(sc, snapshot, req, p, p.stored)
	}
	if err != nil {
		return nil, err
	}
	sc.route = route
	route.health.counts[0] = r.counts.of(route.destination)
	if route.Prefill != nil {
		route.health.counts[1] = r.counts.of(route.computes.Worker)
	}
	if r.explains() {
		sc.explainExcluded(route)
	}
	if r.dry {
		return route, nil
	}
	r.climb(sc, snapshot, req, p, route)
	if r.predictable(p, &route.computes) {
		r.predict(&sc.matched, p, route)
	}
	route.released = r.onRelease
	if p.whole {
		route.expectPrefill()
	}
	if r.cfg.TrackOutput {
		route.output = newOutputTracker(p.isl, route.unit, p.hints.ExpectedOutputTokens)
	}
	return route, nil
}

// maxLooks bounds how often a request is decided again because others were booked after the loads were read. Usually
// the others were faster; two requests that each book a prefill and a decode worker can also send each other back. Even
// a burst stays far below the bound. A request that reaches it is decided by loads that are a moment old.
const maxLooks = 64

// chooseFor chooses for a request with this session target, and books it. If busy thresholds are set, it books only if
// nothing was booked after the loads were compared with them. Otherwise a burst would pass the thresholds together.
//
// With an error, or in a further round, what was booked before is in sc: see undo.
func (r *Router) chooseFor(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared, t target) (*Route, error) {
	for look := 1; ; look++ {
		over := r.overloaded(&sc.gathered, snapshot, p.model)
		sc.over = over
		if look == maxLooks {
			sc.version = 0
		}
		if err := r.gather(&sc.gathered, snapshot, req, p, t, over); err != nil {
			return nil, err
		}
		route, err := r.bookCandidates(sc, p)
		switch {
		case err == nil && (!r.cordonedSince(&sc.gathered, route) && r.watch(&sc.gathered, route, p) ||
			look >= maxLooks):
			return route, nil
		case err != nil && !errors.Is(err, scoring.ErrChanged):
			return nil, err
		}
		sc.undo()
	}
}

// bookCandidates books the cheapest of the candidates: an aggregated worker, or a prefill and a decode worker.
func (r *Router) bookCandidates(sc *scratch, p *prepared) (*Route, error) {
	if alone, pairs := len(sc.aggregated.workers), len(sc.decode.workers); alone > 0 && pairs > 0 &&
		r.cfg.Scoring.Mode != scoring.KV {
		// The other modes have no cost to compare. Both kinds get requests in proportion to their destinations.
		if rand.IntN(alone+pairs) < alone {
			sc.decode.reset()
		} else {
			sc.aggregated.reset()
		}
	}
	if r.cfg.Disaggregate.NonCached > 0 && len(sc.decode.workers) > 0 && len(sc.aggregated.workers) == 0 {
		return r.bookDisaggregated(sc, p)
	}
	var alone, pair *Route
	var err error
	if len(sc.aggregated.workers) > 0 {
		if alone, err = r.bookAggregated(sc, p); err != nil {
			return nil, err
		}
	}
	if len(sc.decode.workers) > 0 {
		if pair, err = r.bookPair(sc, p); err != nil {
			return nil, err
		}
	}
	return cheaper(alone, pair), nil
}

// bookDisaggregated books the decode worker that is the cheapest for the whole request. If that needs a prefill worker,
// it books a pair instead.
//
// Source: llm-d-router v0.11, prefix-based-pd-decider.
func (r *Router) bookDisaggregated(sc *scratch, p *prepared) (*Route, error) {
	sc.aggregated.workers = append(sc.aggregated.workers, sc.decode.workers...)
	alone, err := r.bookAggregated(sc, p)
	if err != nil {
		return nil, err
	}
	d := &r.cfg.Disaggregate
	if alone.PromptTokens < d.Prompt || alone.PromptTokens-alone.PredictedCachedTokens < d.NonCached {
		return alone, nil
	}
	pair, err := r.bookPair(sc, p)
	if err != nil {
		return nil, err
	}
	alone.Free()
	return pair, nil
}
