package router

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/router/ladder"
	"kvepp/scoring"
)

// What came of a shadowed request, as a metric's label: kvepp would have chosen an equal worker or another one, or why
// kvepp could not judge that. A Reason of [Decision] is a further cause.
const (
	ShadowEqual         = "equal" // the same worker, or one of the same cost
	ShadowOther         = "other"
	ShadowRefused       = "would_refuse"     // kvepp would have refused the request
	ShadowNoAddress     = "no_address"       // the proxy does not say which endpoint serves the request
	ShadowUnknown       = "unknown_endpoint" // the pool has no endpoint at that address
	ShadowSeveral       = "several_workers"  // the endpoint has several workers, and its engine chooses among them
	ShadowDisaggregated = "disaggregated"    // it is not known which worker computes the prompt
	ShadowNoMemory      = "no_memory"        // the memory of requests had no room for the prompt's blocks
	ShadowUnserved      = "no_response"      // the request ended before a response
)

// shadow is what a route keeps of a request until it is known which endpoint serves it.
type shadow struct {
	router   *Router
	unjudged string  // why the two choices cannot be compared; empty: they can
	request  Request // without its body
	decided  time.Time
	prompt   prepared // what Serve reads of it, without the body's memory
	variants []variant
	held     int // bytes of variants, in the memory of bodies
	pricing  scoring.Config
	equals   []kvblock.Worker          // whose cost was not above that of the chosen one
	avoided  map[kvblock.Worker]string // that kvepp would not have used: ejected or overloaded
}

// Shadow decides, as Route would, a request that another picker routes. It books nothing: Serve does, once it is known
// where that picker sent the request. The request does not wait, and sessions have no effect.
//
// Errors: *body.Error for a body that is not a request; ctx's own.
func (r *Router) Shadow(ctx context.Context, req *Request) (*Route, error) {
	s := &shadow{router: r, decided: time.Now(), avoided: map[kvblock.Worker]string{}}
	p, err := r.prepare(ctx, req, nil)
	defer p.releaseMemory()
	if err = errors.Join(err, ctx.Err()); err != nil {
		return nil, err
	}
	s.request = Request{Received: req.Received, BodyBytes: max(len(req.Body), req.BodyBytes)}
	sc := r.takeScratch(nil)
	defer r.putScratch(sc)
	r.chooseVersion(sc, &p)
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	chosen, err := r.rehearsal().choose(sc, snapshot, req, &p)
	route := &Route{shadow: s, elsewhere: true}
	if err != nil {
		s.unjudged = ShadowRefused
	} else {
		r.climb(sc, snapshot, req, &p, chosen)
		route.Decision, route.climb = chosen.Decision, chosen.climb
		l := sc.promptLeg(chosen)
		for i := range l.workers {
			if w := &l.workers[i]; l.costs[i] <= chosen.Cost || w.Worker == chosen.computes.Worker {
				s.equals = append(s.equals, w.Worker)
			}
		}
	}
	for i, over := range sc.over {
		if over {
			s.avoided[snapshot.Workers[i].Worker] = "overloaded"
		}
	}
	for i := range sc.ejected {
		if !sc.ejectedAdmitted {
			s.avoided[sc.ejected[i].Worker] = "ejected"
		}
	}
	if r.cfg.Keep > 0 {
		kept := recordOf(&sc.gathered, req, &p, chosen, 0, err)
		kept.keepChain(&sc.matched, &p, chosen)
		r.records.add(kept)
		r.records.keep(route, kept)
	}
	s.pricing = sc.pricing
	s.keep(sc, p)
	return route, nil
}

// keep copies from a decision what Serve needs: the prompt's blocks, and which worker had how many of them.
func (s *shadow) keep(sc *scratch, p prepared) {
	for i := range sc.variants {
		v := sc.variants[i]
		v.overlap, v.prompts = slices.Clone(v.overlap), slices.Clone(v.prompts)
		s.held += 8*v.blocks() + 20*len(v.overlap)
		for j := range v.prompts {
			v.prompts[j] = indexer.Prompt{Chain: v.prompts[j].Chain}
		}
		s.variants = append(s.variants, v)
	}
	if !s.router.cfg.Memory.Held.TryTake(s.held) {
		s.variants, s.held, s.unjudged = nil, 0, ShadowNoMemory
	}
	s.prompt = prepared{model: strings.Clone(p.model), lora: strings.Clone(p.lora), label: p.label, isl: p.isl,
		version: p.version, most: p.most, priority: p.priority, whole: p.whole, reason: p.reason,
		estimated: p.estimated,
		hints:     body.Hints{ExpectedOutputTokens: p.hints.ExpectedOutputTokens}}
	if p.tokens != nil { // else the prompt is not known
		s.prompt.tokens = make([]prompt.Prompt, len(p.tokens))
	}
}

// release gives back the memory that keep took.
func (s *shadow) release() {
	s.router.cfg.Memory.Held.Give(s.held)
	s.held = 0
}

// Serve books a request of Shadow at the endpoint that serves it, and compares that choice with kvepp's. address is
// host:port; empty: the proxy does not say. The booking counts from the time when the request came. Serve returns
// ShadowEqual, ShadowOther, or why they cannot be compared. Only the goroutine that follows the response calls it.
func (r *Router) Serve(route *Route, address string) (outcome string) {
	s := route.shadow
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	at := workersAt(snapshot, address)
	route.ServedBy = ServedBy{Address: address, Outcome: ServedByUnknown}
	if len(at) == 0 {
		if outcome = ShadowUnknown; address == "" {
			outcome = ShadowNoAddress
		}
		r.Unjudged(outcome)
		r.records.setServedBy(route)
		return outcome
	}
	w, chosen := at[0], route.Decision
	r.bookServed(route, snapshot, w)
	route.ServedBy.Worker, route.ServedBy.Outcome = w.String(), ServedByOther
	if chosen.WorkerName() == route.WorkerName() {
		route.ServedBy.Outcome, route.elsewhere = ServedByChosen, false
	}
	r.records.setServedBy(route)
	route.elsewhere = false // the decision is now the one that leads there
	s.release()
	route.shadow = nil
	switch {
	case s.unjudged != "":
		outcome = s.unjudged
	case len(at) > 1:
		outcome = ShadowSeveral
	case w.Role == pool.Decode:
		outcome = ShadowDisaggregated
	case !route.Reason.exact():
		outcome = string(route.Reason)
	case slices.Contains(s.equals, w.Worker):
		outcome, chosen = ShadowEqual, route.Decision
	default:
		outcome = ShadowOther
	}
	switch to := route.recorded; {
	case outcome == ShadowEqual || outcome == ShadowOther:
		r.metrics.ShadowTokens(route.PromptTokens, chosen.PredictedCachedTokens, route.PredictedCachedTokens)
		if to != nil {
			to.Avoided = s.avoided[w.Worker]
		}
	case to != nil:
		to.Unjudged = outcome
	default:
		r.cfg.Recorder.Unjudged(outcome)
	}
	r.metrics.Shadowed(outcome, 1)
	return outcome
}

// Unjudged counts and records, by reason, a request in shadow whose choices kvepp cannot compare.
func (r *Router) Unjudged(reason string) {
	r.metrics.Shadowed(reason, 1)
	r.cfg.Recorder.Unjudged(reason)
}

// bookServed books a shadowed request at a worker, and makes the route's decision the one that leads there.
func (r *Router) bookServed(route *Route, snapshot *pool.Snapshot, w *pool.Worker) {
	s, p := route.shadow, &route.shadow.prompt
	sc := r.takeScratch(nil)
	defer r.putScratch(sc)
	sc.kept = true
	sc.variants = append(sc.variants, s.variants...)
	sc.standings = r.cfg.standings()
	sc.resetLegs()
	l := &sc.aggregated
	l.cfg = s.pricing
	l.workers, l.candidates = append(l.workers, *w), append(l.candidates, scoring.Candidate{})
	sc.candidate(&l.candidates[0], w)
	model := w.Model
	if model != p.model {
		model = ""
	}
	booking, err := r.book.AddRequest(scoring.Request{Model: model, ISLTokens: p.isl, Ago: time.Since(s.decided)},
		l.candidates[0], &l.cfg)
	if err != nil { // a number of the pool's that is out of range
		r.log.Warn("a shadowed request is not booked", "worker", w.String(), "error", err)
	}
	route.placed = placed{booking: booking, destination: w.Worker, instance: w.InstanceID, computes: *w,
		sameTokenizer: w.SameTokenizer, unit: cmp.Or(w.BlockSize, scoring.NominalBlockSize)}
	reason := cmp.Or(route.Reason, p.reason)
	route.Decision = Decision{Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank,
		RankByAddress: w.RankByAddress, BlockSize: w.BlockSize}
	r.explain(sc, route, l, scoring.Selection{UnitTokens: w.BlockSize}, p, reason)
	route.most = p.most
	r.watch(&sc.gathered, route, p)
	route.health.counts[0] = r.counts.of(w.Worker)
	if c := &route.climb; c.Known {
		c.Tokens[ladder.Chosen] = route.PredictedCachedTokens
		if c.Tokens[ladder.Chosen] < c.Tokens[ladder.Eligible] {
			c.NotChosen = ladder.OtherPicker
		}
		c.Fit()
	} else {
		c.Tokens[ladder.Prompt], c.Tokens[ladder.Delivered] = p.isl, -1
	}
	r.expectResponse(sc, p, route, false)
	r.observeChoice(&sc.gathered, route, &s.request, p, time.Now())
	route.observed.began = s.decided
	if r.cfg.Recorder != nil {
		r.beginRecording(sc, route, p)
	}
	r.countDecision(route)
}

// unserved ends a shadowed request that no endpoint of the pool served. The caller counts it.
func (s *shadow) unserved(route *Route, a *Response) {
	s.release()
	if route.record != nil {
		s.router.records.end(route, &Outcome{Status: a.Status, Complete: a.Complete,
			Duration: time.Since(s.request.Received), CachedTokens: a.CachedTokens})
	}
}
