package router

import (
	"errors"
	"math/rand/v2"

	"kvepp/pool"
	"kvepp/prompt/body"
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
	if r.cfg.Disaggregation.On {
		route.Conditional = sc.conditional(route)
	}
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
	if len(sc.fits) > 0 {
		r.cfg.Adapters.place(placement{p.lora, false}, route.destination)
		if route.Prefill != nil {
			r.cfg.Adapters.place(placement{p.lora, true}, route.computes.Worker)
		}
	}
	r.climb(sc, snapshot, req, p, route)
	route.released = r.onRelease
	r.expectResponse(sc, p, route, r.expectFirstToken(route, req))
	return route, nil
}

// expectResponse begins what a booked request's response will change: what its worker is assumed to hold, the end of
// its prefill, and its length. noted says that the worker notes the first token.
func (r *Router) expectResponse(sc *scratch, p *prepared, route *Route, noted bool) {
	if r.predictable(p, &route.computes) {
		r.predict(&sc.matched, p, route)
	}
	if p.whole && !noted {
		route.expectPrefill()
	}
	if r.cfg.TrackOutput {
		route.output = newOutputTracker(p.isl, route.unit, p.hints.ExpectedOutputTokens)
	}
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
		if sc.lastLook = look >= maxLooks; sc.lastLook {
			sc.version = 0
		}
		if err := r.gather(&sc.gathered, snapshot, req, p, t, over); err != nil {
			return nil, err
		}
		route, err := r.bookCandidates(sc, p)
		switch {
		case err == nil &&
			(!r.cfg.cordonedSince(&sc.gathered, route) && r.watch(&sc.gathered, route, p) || sc.lastLook):
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
	var alone, pair *Route
	var err error
	if len(sc.aggregated.workers) > 0 {
		if alone, err = r.bookAlone(sc, &sc.aggregated, p); err != nil {
			return nil, err
		}
	}
	if len(sc.decode.workers) > 0 {
		book := r.bookPair
		if d := &r.cfg.Disaggregation; sc.pricing.Mode == scoring.KV && d.On && p.isl > 0 &&
			p.pins.Prefill.Key == "" && (d.Via != scoring.ViaNvext || p.inject != nil && r.mayNameInBody(p)) {
			book = r.bookConditional
		}
		if pair, err = book(sc, p); err != nil {
			return nil, err
		}
	}
	return cheaper(alone, pair), nil
}

// bookConditional books a decode worker alone, the cheapest for the whole request, or a pair: as Config.Disaggregation
// says. It books only what it has decided for: else its own load would count, and replicas would hear of it. A decode
// worker is booked alone only by the loads by which it was judged, as in chooseFor.
func (r *Router) bookConditional(sc *scratch, p *prepared) (*Route, error) {
	d, l := &r.cfg.Disaggregation, &sc.unaided
	l.workers = append(l.workers[:0], sc.decode.workers...)
	l.dry = true
	alone, err := r.bookAlone(sc, l, p)
	l.dry = false
	if err != nil {
		return nil, err
	}
	w, priced := &alone.computes, l.priced
	if !w.Announces() && !r.cfg.Predict.Alone {
		r.unheard.Do(func() {
			r.log.Warn("a decode worker sends no KV events, so nothing counts as cached there; give decode workers "+
				"kvEvents (docs/disaggregation.md)", "worker", w.String())
		})
	}
	would := scoring.Alone{Prompt: p.isl, Cached: alone.weighted, Cost: alone.cost, KVBlocks: w.TotalKVBlocks,
		Blocks: int(l.terms[alone.Chosen].DecodeBlocks)}
	would.PrefillBusy = func(steps float64) (busy bool) {
		busy, err = r.prefillBusy(sc, p, steps)
		return busy
	}
	would.PairCost = func() (cost float64) {
		sc.prefill.dry, sc.decode.dry = true, true
		defer func() { sc.prefill.dry, sc.decode.dry = false, false }()
		var pair *Route
		if pair, err = r.bookPair(sc, p); err == nil {
			cost = pair.cost
		}
		return cost
	}
	outcome := d.Judge(&would)
	if err != nil {
		return nil, err
	}
	route := alone
	if outcome == scoring.Bypassed {
		if !sc.lastLook {
			sc.version = priced
		}
		_, route.booking, err = r.bookAmong(sc, l, alone.Chosen, alone.Chosen+1, nil, p)
	} else {
		sc.decode.workers = append(sc.decode.workers[:0], l.workers...) // as before a dry choice
		route, err = r.bookPair(sc, p)
	}
	if err != nil {
		return nil, err
	}
	route.Conditional = outcome
	route.InBody = outcome == scoring.Bypassed && d.Via == scoring.ViaNvext
	return route, nil
}

// What is known about frontends that are told the decode worker in the body.
const (
	inBodyUntried = iota
	inBodyWorks
	inBodyFails // they are in direct mode
)

// mayNameInBody reports whether the request's body may tell a frontend the decode worker.
func (r *Router) mayNameInBody(p *prepared) bool {
	return r.cfg.Disaggregation.Via == scoring.ViaNvext && !p.pins.Given() &&
		(p.api == body.ChatCompletions || p.api == body.Completions) && r.inBody.Load() != inBodyFails
}

// judgeInBody learns from the response to a request whose body named the decode worker: a frontend in direct mode
// answers 500. Once one was answered well, a 500 has other causes.
func (r *Router) judgeInBody(status string) {
	if status == "200" {
		r.inBody.CompareAndSwap(inBodyUntried, inBodyWorks)
	} else if status == "500" && r.inBody.CompareAndSwap(inBodyUntried, inBodyFails) {
		r.log.Warn("the frontend answered 500 to a request without a prefill worker: it is in direct mode; from now " +
			"on each prompt has a prefill worker. Start frontends with --router-mode kv and " +
			"--router-conditional-disagg, and then kvepp again (docs/disaggregation.md)")
	}
}

// prefillBusy reports whether the prefill worker that would be chosen has more tokens waiting than so many steps take;
// false if it is not known how many it computes in one.
func (r *Router) prefillBusy(sc *scratch, p *prepared, steps float64) (bool, error) {
	l := &sc.prefill
	l.cfg, l.dry = sc.pricing.PrefillLeg(), true
	_, sel, _, err := r.bookPrompt(sc, l, p)
	if l.dry = false; err != nil {
		return false, err
	}
	w := &l.workers[sel.Index]
	waiting, batch := r.book.Load(w.Worker).PrefillTokens, w.MaxNumBatchedTokens
	return batch > 0 && float64(waiting) > steps*float64(batch), nil
}

// fallsBack reports whether decode workers take requests alone where no prefill worker is to be had, and so rather than
// send a prompt to an ejected one.
func (c *Config) fallsBack() bool { return c.StockPrefill && c.Disaggregation.On }

// conditional says why a request has no prefill worker although a decode worker takes it; empty: it has one, or an
// aggregated worker takes it.
func (g *gathered) conditional(route *Route) scoring.BypassOutcome {
	switch {
	case route.Conditional != "" || route.Prefill != nil || route.computes.Role != pool.Decode:
		return route.Conditional
	case g.prefills[ejected]+g.prefills[cordoned]+g.prefills[overloaded] > 0:
		return scoring.PrefillLost
	}
	return scoring.NoPrefill
}
