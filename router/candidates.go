package router

import (
	"fmt"
	"slices"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/router/eject"
)

// verdict says whether a worker is a candidate for a request, or the first reason why it is not.
type verdict uint8

const (
	candidate  verdict = iota
	irrelevant         // its role takes no requests, or the proxy cannot send there: never the reason of a refusal
	otherModel
	notPinned // the request names another worker
	untainted // it lacks a taint that the request requires
	cordoned
	ejected
	overloaded
	verdicts // how many there are
)

// tally counts workers by verdict.
type tally [verdicts]int

// criteria decide which workers are candidates for one request.
type criteria struct {
	req                               *Request
	p                                 *prepared
	standings                         *standings
	stockPrefill, pinned, constrained bool
}

// criteria returns those for a request. The standings are those in sc.
func (r *Router) criteria(sc *scratch, req *Request, p *prepared) criteria {
	return criteria{
		req:          req,
		p:            p,
		standings:    &sc.standings,
		stockPrefill: r.cfg.StockPrefill,
		pinned:       p.pins.Given(),
		constrained:  len(p.constraints.Required) > 0,
	}
}

// destination judges a worker that the request could be sent to. The proxy's subset binds destinations alone.
func (c *criteria) destination(w *pool.Worker, busy bool) verdict {
	switch {
	case c.req.Allowed != nil && !c.req.Allowed(w.Address):
		return irrelevant
	case !c.hasModel(w):
		return otherModel
	}
	return c.judge(w, &c.p.pins.Worker, busy)
}

// prefill judges a prefill worker.
func (c *criteria) prefill(w *pool.Worker, busy bool) verdict {
	if !c.hasModel(w) || c.stockPrefill && w.Address == "" {
		return irrelevant
	}
	return c.judge(w, &c.p.pins.Prefill, busy)
}

func (c *criteria) hasModel(w *pool.Worker) bool {
	return c.p.model == "" || w.Model == c.p.model || w.Model == "" && !c.p.mustBeNamed
}

// judge applies the criteria of all roles. A pinned request goes to its worker even if that is ejected.
func (c *criteria) judge(w *pool.Worker, pin *body.Pin, busy bool) verdict {
	switch {
	case c.pinned && !pinAllows(pin, w):
		return notPinned
	case c.constrained && !c.p.constraints.Allow(w.Taints):
		return untainted
	case w.Role == pool.Encode:
		return irrelevant
	}
	switch standing := c.standings.of(w); {
	case standing == eject.Cordoned:
		return cordoned
	case standing == eject.Ejected && !c.pinned:
		return ejected
	case busy:
		return overloaded
	}
	return candidate
}

// target is the worker that a request's session is bound to. The zero value: none.
type target struct {
	worker kvblock.Worker
	bound  bool // there is one
	soft   bool // another worker will do while this one is overloaded
}

// gather sorts the snapshot's workers into the legs that they are candidates for. t is the target of the request's
// session. over says which of the snapshot's workers are overloaded; nil: none.
//
// Errors: ErrOverloaded, ErrCordoned, ErrConstraints, ErrNoPrefill, ErrUnknownModel, ErrNoEndpoints, and an
// *apibody.Error for a pin that names no candidate.
func (r *Router) gather(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared, t target, over []bool) error {
	targetOverloaded := r.classify(sc, snapshot, req, p, t, over)
	sc.admitEjected()
	unpaired := sc.pairUp(r.cfg.StockPrefill || p.reason == ReasonNoBody || p.reason == ReasonUnknownAPI)
	if t.bound && !sc.keepOnly(t.worker) && targetOverloaded && !t.soft {
		return ErrOverloaded
	}
	sc.dropUnpairedPrefill()
	if len(sc.aggregated.workers)+len(sc.decode.workers) == 0 {
		return sc.whyNone(p, unpaired)
	}
	return nil
}

// classify judges every worker of the snapshot, makes the candidates those of their legs and counts the others. It
// reports whether the session's target would be a candidate but for its load.
func (r *Router) classify(
	sc *scratch,
	snapshot *pool.Snapshot,
	req *Request,
	p *prepared,
	t target,
	over []bool,
) (targetOverloaded bool) {
	sc.aggregated.reset()
	sc.prefill.reset()
	sc.decode.reset()
	sc.destinations, sc.prefills, sc.pairings = tally{}, tally{}, sc.pairings[:0]
	sc.ejected, sc.ejectedPrefill, sc.ejectedAdmitted = sc.ejected[:0], sc.ejectedPrefill[:0], false
	sc.cordoned = sc.cordoned[:0]
	sc.pricing = r.cfg.Scoring
	if p.scoring != nil {
		sc.pricing = *p.scoring
	}
	sc.standings = r.standings()
	explains := r.explains()
	c := r.criteria(sc, req, p)
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		busy := over != nil && over[i]
		var v verdict
		if w.Role == pool.Prefill {
			v = c.prefill(w, busy)
			sc.prefills[v]++
			switch v {
			case candidate:
				sc.addPrefill(w)
			case ejected:
				sc.ejectedPrefill = append(sc.ejectedPrefill, *w)
			}
		} else {
			v = c.destination(w, busy)
			sc.destinations[v]++
			switch v {
			case candidate:
				sc.addDestination(w)
			case ejected:
				sc.ejected = append(sc.ejected, *w)
			case overloaded:
				targetOverloaded = targetOverloaded || w.Worker == t.worker
			}
		}
		if v == cordoned && explains {
			sc.noteCordoned(w)
		}
	}
	return targetOverloaded
}

// whyNone says why no worker may take the request: of several reasons the first below. unpaired counts the decode
// workers that no prefill worker matches.
func (sc *scratch) whyNone(p *prepared, unpaired int) error {
	// why reports whether a destination has that verdict, or the only prefill workers for a decode worker.
	why := func(v verdict) bool { return sc.destinations[v] > 0 || unpaired > 0 && sc.prefills[v] > 0 }
	switch {
	case why(overloaded):
		return ErrOverloaded
	case why(cordoned):
		return ErrCordoned
	case why(untainted):
		return fmt.Errorf("%w: %.200q", ErrConstraints, p.constraints.Required)
	case unpaired > 0 && sc.prefills[notPinned] > 0:
		return unknownPin(&p.pins.Prefill)
	case unpaired > 0:
		return ErrNoPrefill
	case sc.destinations[notPinned] > 0:
		return unknownPin(&p.pins.Worker)
	case sc.destinations[otherModel] > 0:
		return fmt.Errorf("%w: %q", ErrUnknownModel, p.model)
	}
	return ErrNoEndpoints
}

// addPrefill makes a prefill worker a candidate.
func (sc *scratch) addPrefill(w *pool.Worker) {
	if g := pairingOf(w); len(sc.pairings) == 0 ||
		g != sc.pairings[len(sc.pairings)-1] && !slices.Contains(sc.pairings, g) {
		sc.pairings = append(sc.pairings, g)
	}
	sc.prefill.workers = append(sc.prefill.workers, *w)
}

// addDestination makes a worker that the request can be sent to a candidate.
func (sc *scratch) addDestination(w *pool.Worker) {
	l := &sc.aggregated
	if w.Role == pool.Decode {
		l = &sc.decode
	}
	l.workers = append(l.workers, *w)
}

// admitEjected makes the ejected workers of a role candidates if it has no others: a request that may fail is better
// than one that must. Overloaded workers count as others.
func (sc *scratch) admitEjected() {
	if len(sc.ejected) > 0 && sc.destinations[candidate]+sc.destinations[overloaded] == 0 {
		sc.ejectedAdmitted = true
		for i := range sc.ejected {
			sc.addDestination(&sc.ejected[i])
		}
	}
	if len(sc.ejectedPrefill) > 0 && sc.prefills[candidate]+sc.prefills[overloaded] == 0 {
		sc.ejectedAdmitted = true
		for i := range sc.ejectedPrefill {
			sc.addPrefill(&sc.ejectedPrefill[i])
		}
	}
}

// keepOnly leaves one destination, and reports whether it is a candidate. If it is not, all destinations stay.
//
// Source: dynamo-kv-router 1.6.1, scheduling: an eligible target is exclusive in the default policy; dynamo-llm 1.6.1,
// kv_router::routing_host: what hard and soft mean for one that is not eligible.
func (sc *scratch) keepOnly(w kvblock.Worker) bool {
	for _, l := range []*leg{&sc.aggregated, &sc.decode} {
		for i := range l.workers {
			if l.workers[i].Worker == w {
				only := l.workers[i]
				sc.aggregated.reset()
				sc.decode.reset()
				l.workers = append(l.workers, only)
				return true
			}
		}
	}
	return false
}

// noteCordoned keeps the name of a cordoned endpoint, once for all of its ranks.
func (sc *scratch) noteCordoned(w *pool.Worker) {
	if n := len(sc.cordoned); n == 0 || sc.cordoned[n-1] != w.Name { // ranks of an endpoint follow one another
		sc.cordoned = append(sc.cordoned, w.Name)
	}
}

// explainExcluded names in a decision the endpoints that were left out.
func (sc *scratch) explainExcluded(route *Route) {
	if len(sc.cordoned) > 0 {
		route.Cordoned = slices.Clone(sc.cordoned)
	}
	if len(sc.ejected)+len(sc.ejectedPrefill) == 0 {
		return
	}
	route.EjectedAdmitted = sc.ejectedAdmitted
	for _, out := range [][]pool.Worker{sc.ejected, sc.ejectedPrefill} {
		for i := range out {
			if name := out[i].Name; !slices.Contains(route.Ejected, name) {
				route.Ejected = append(route.Ejected, name)
			}
		}
	}
}

// pairing says which decode workers a prefill worker can work with. A direct frontend sends a prompt only to workers of
// its own namespace and model, and blocks may have to stay within a zone of the cluster. An empty field matches
// everything.
type pairing struct{ model, namespace, taint string }

func pairingOf(prefill *pool.Worker) pairing {
	g := pairing{prefill.Model, prefill.Namespace, ""}
	if prefill.Transfer.Required {
		g.taint = prefill.Transfer.Taint
	}
	return g
}

// matches reports whether a decode worker can work with the prefill worker.
func (g *pairing) matches(decode *pool.Worker) bool {
	if g.taint != "" {
		if _, has := slices.BinarySearch(decode.Taints, g.taint); !has {
			return false
		}
	}
	return (g.model == decode.Model || g.model == "" || decode.Model == "") &&
		(g.namespace == decode.Namespace || g.namespace == "" || decode.Namespace == "")
}

// pairUp removes from the decode leg the workers that no prefill worker matches. If alone is set they become aggregated
// candidates: a stock engine decodes alone unless a request says where its prompt is computed, and a request without a
// prompt needs no prefill. Otherwise pairUp returns how many they are.
func (sc *scratch) pairUp(alone bool) (unpaired int) {
	kept := sc.decode.workers[:0]
	for i := range sc.decode.workers {
		w := &sc.decode.workers[i]
		switch {
		case slices.ContainsFunc(sc.pairings, func(g pairing) bool { return g.matches(w) }):
			kept = append(kept, *w)
		case alone:
			sc.aggregated.workers = append(sc.aggregated.workers, *w)
		default:
			unpaired++
		}
	}
	sc.decode.workers = kept
	return unpaired
}

// dropUnpairedPrefill removes from the prefill leg the workers that match no decode worker.
func (sc *scratch) dropUnpairedPrefill() {
	all := len(sc.pairings)
	sc.pairings = slices.DeleteFunc(sc.pairings, func(g pairing) bool {
		for i := range sc.decode.workers {
			if g.matches(&sc.decode.workers[i]) {
				return false
			}
		}
		return true
	})
	if len(sc.pairings) < all {
		sc.prefill.workers = slices.DeleteFunc(
			sc.prefill.workers,
			func(w pool.Worker) bool { return !slices.Contains(sc.pairings, pairingOf(&w)) },
		)
	}
}
