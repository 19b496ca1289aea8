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
	noPrefill                         bool
}

// criteria returns those for a request. The standings are those in g.
func (c *Config) criteria(g *gathered, req *Request, p *prepared) criteria {
	return criteria{
		req:          req,
		p:            p,
		standings:    &g.standings,
		stockPrefill: c.StockPrefill,
		noPrefill:    c.NoPrefill,
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
	if !c.hasModel(w) || c.stockPrefill && w.Address == "" || c.noPrefill {
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
// *body.Error for a pin that names no candidate.
func (r *Router) gather(g *gathered, snapshot *pool.Snapshot, req *Request, p *prepared, t target, over []bool) error {
	targetOverloaded := r.classify(g, snapshot, req, p, t, over)
	g.unaidedPrompts = !r.cfg.Disaggregation.WaitsForPrefill()
	g.admitEjected(!r.cfg.fallsBack())
	for _, l := range []*leg{&g.aggregated, &g.prefill, &g.decode} {
		g.keepFittest(l)
	}
	unpaired := g.pairUp(r.cfg.StockPrefill || p.reason == ReasonNoBody || p.reason == ReasonUnknownAPI)
	if t.bound && !g.keepOnly(t.worker) && targetOverloaded && !t.soft {
		return ErrOverloaded
	}
	g.dropUnpairedPrefill()
	if len(g.aggregated.workers)+len(g.decode.workers) == 0 {
		return g.whyNone(p, unpaired)
	}
	return nil
}

func (g *gathered) resetLegs() {
	g.aggregated.reset()
	g.prefill.reset()
	g.decode.reset()
}

// classify judges every worker of the snapshot, makes the candidates those of their legs and counts the others. It
// reports whether the session's target would be a candidate but for its load.
func (r *Router) classify(g *gathered, snapshot *pool.Snapshot, req *Request, p *prepared, t target,
	over []bool) (targetOverloaded bool) {
	g.resetLegs()
	g.destinations, g.prefills, g.pairings = tally{}, tally{}, g.pairings[:0]
	g.ejected, g.ejectedPrefill, g.ejectedAdmitted = g.ejected[:0], g.ejectedPrefill[:0], false
	g.cordoned = g.cordoned[:0]
	g.pricing = r.currentPolicy().Weights
	if p.scoring != nil {
		g.pricing = *p.scoring
	}
	g.standings = r.cfg.standings()
	explains := r.explains()
	c := r.cfg.criteria(g, req, p)
	held, heldByPrefill := false, false // only workers that have the adapter are candidates
	if g.fits = g.fits[:0]; p.label != "" && !c.pinned {
		g.fits, heldByPrefill, held = r.cfg.Adapters.fitsOf(g.fits, p.lora, snapshot, c.hasModel)
	}
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		busy := over != nil && over[i]
		var v verdict
		if w.Role == pool.Prefill {
			if v = c.prefill(w, busy); heldByPrefill && g.fitOf(w) < full {
				v = irrelevant
			}
			g.prefills[v]++
			switch v {
			case candidate:
				g.addPrefill(w)
			case ejected:
				g.ejectedPrefill = append(g.ejectedPrefill, *w)
			}
		} else {
			if v = c.destination(w, busy); held && g.fitOf(w) < full && v != irrelevant {
				v = otherModel
			}
			g.destinations[v]++
			switch v {
			case candidate:
				g.addDestination(w)
			case ejected:
				g.ejected = append(g.ejected, *w)
			case overloaded:
				targetOverloaded = targetOverloaded || w.Worker == t.worker
			}
		}
		if v == cordoned && explains {
			g.noteCordoned(w)
		}
	}
	return targetOverloaded
}

// fitOf returns how well a worker suits the request's adapter.
func (g *gathered) fitOf(w *pool.Worker) fit {
	if int(w.Worker) < len(g.fits) {
		return g.fits[w.Worker]
	}
	return silent
}

// keepFittest leaves those of a leg's workers that suit the request's adapter best.
func (g *gathered) keepFittest(l *leg) {
	if len(g.fits) == 0 {
		return
	}
	best := silent
	for i := range l.workers {
		best = max(best, g.fitOf(&l.workers[i]))
	}
	l.workers = slices.DeleteFunc(l.workers, func(w pool.Worker) bool { return g.fitOf(&w) < best })
}

// whyNone says why no worker may take the request: of several reasons the first below. unpaired counts the decode
// workers that no prefill worker matches.
func (g *gathered) whyNone(p *prepared, unpaired int) error {
	// why reports whether a destination has that verdict, or the only prefill workers for a decode worker.
	why := func(v verdict) bool { return g.destinations[v] > 0 || unpaired > 0 && g.prefills[v] > 0 }
	switch {
	case why(overloaded):
		return ErrOverloaded
	case why(cordoned):
		return ErrCordoned
	case why(untainted):
		return fmt.Errorf("%w: %.200q", ErrConstraints, p.constraints.Required)
	case unpaired > 0 && g.prefills[notPinned] > 0:
		return unknownPin(&p.pins.Prefill)
	case unpaired > 0:
		return ErrNoPrefill
	case g.destinations[notPinned] > 0:
		return unknownPin(&p.pins.Worker)
	case g.destinations[otherModel] > 0:
		return fmt.Errorf("%w: %q", ErrUnknownModel, p.model)
	}
	return ErrNoEndpoints
}

// addPrefill makes a prefill worker a candidate.
func (g *gathered) addPrefill(w *pool.Worker) {
	if p := pairingOf(w); len(g.pairings) == 0 ||
		p != g.pairings[len(g.pairings)-1] && !slices.Contains(g.pairings, p) {
		g.pairings = append(g.pairings, p)
	}
	g.prefill.workers = append(g.prefill.workers, *w)
}

// addDestination makes a worker that the request can be sent to a candidate.
func (g *gathered) addDestination(w *pool.Worker) {
	l := &g.aggregated
	if w.Role == pool.Decode {
		l = &g.decode
	}
	l.workers = append(l.workers, *w)
}

// admitEjected makes the ejected workers of a role candidates if it has no others: a request that may fail is better
// than one that must. Overloaded workers count as others. prefill says whether that holds for prefill workers too.
func (g *gathered) admitEjected(prefill bool) {
	if len(g.ejected) > 0 && g.destinations[candidate]+g.destinations[overloaded] == 0 {
		g.ejectedAdmitted = true
		for i := range g.ejected {
			g.addDestination(&g.ejected[i])
		}
	}
	if prefill && len(g.ejectedPrefill) > 0 && g.prefills[candidate]+g.prefills[overloaded] == 0 {
		g.ejectedAdmitted = true
		for i := range g.ejectedPrefill {
			g.addPrefill(&g.ejectedPrefill[i])
		}
	}
}

// keepOnly leaves one destination, and reports whether it is a candidate. If it is not, all destinations stay.
//
// Source: dynamo-kv-router 1.6.1, scheduling: an eligible target is exclusive in the default policy; dynamo-llm 1.6.1,
// kv_router::routing_host: what hard and soft mean for one that is not eligible.
func (g *gathered) keepOnly(w kvblock.Worker) bool {
	for _, l := range []*leg{&g.aggregated, &g.decode} {
		for i := range l.workers {
			if l.workers[i].Worker == w {
				only := l.workers[i]
				g.aggregated.reset()
				g.decode.reset()
				l.workers = append(l.workers, only)
				return true
			}
		}
	}
	return false
}

// noteCordoned keeps the name of a cordoned endpoint, once for all of its ranks.
func (g *gathered) noteCordoned(w *pool.Worker) {
	if n := len(g.cordoned); n == 0 || g.cordoned[n-1] != w.Name { // ranks of an endpoint follow one another
		g.cordoned = append(g.cordoned, w.Name)
	}
}

// explainExcluded names in a decision the endpoints that were left out.
func (g *gathered) explainExcluded(route *Route) {
	if len(g.cordoned) > 0 {
		route.Cordoned = slices.Clone(g.cordoned)
	}
	if len(g.ejected)+len(g.ejectedPrefill) == 0 {
		return
	}
	route.EjectedAdmitted = g.ejectedAdmitted
	for _, out := range [][]pool.Worker{g.ejected, g.ejectedPrefill} {
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
func (g *gathered) pairUp(alone bool) (unpaired int) {
	kept := g.decode.workers[:0]
	for i := range g.decode.workers {
		w := &g.decode.workers[i]
		switch {
		case slices.ContainsFunc(g.pairings, func(p pairing) bool { return p.matches(w) }):
			kept = append(kept, *w)
		case alone:
			g.aggregated.workers = append(g.aggregated.workers, *w)
		default:
			unpaired++
		}
	}
	g.decode.workers = kept
	return unpaired
}

// dropUnpairedPrefill removes from the prefill leg the workers that match no decode worker.
func (g *gathered) dropUnpairedPrefill() {
	all := len(g.pairings)
	g.pairings = slices.DeleteFunc(g.pairings, func(p pairing) bool {
		for i := range g.decode.workers {
			if p.matches(&g.decode.workers[i]) {
				return false
			}
		}
		return true
	})
	if len(g.pairings) < all {
		g.prefill.workers = slices.DeleteFunc(g.prefill.workers,
			func(w pool.Worker) bool { return !slices.Contains(g.pairings, pairingOf(&w)) })
	}
}
