package router

import (
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/eject"
)

// ErrCordoned says that an operator cordoned every endpoint for the request.
var ErrCordoned = errors.New(
	"every endpoint that may take this request is cordoned; uncordon one (POST /workers/NAME/uncordon on the admin " +
		"address, or the Pod's annotation)",
)

// health follows what a request tells of its endpoints' health. The zero value reports nothing; without Config.Eject
// there is no other.
type health struct {
	tracker *eject.Tracker
	legs
	streams   bool         // its response comes in pieces
	timer     *time.Timer  // for the first byte; nil: not started
	responded atomic.Bool  // response headers have come, or no longer matter
	counted   atomic.Int32 // notCounted, countedLate or counted
	content   bool         // content of the response was seen
	silent    bool         // the response is not the endpoint's
	waiting   atomic.Bool  // the response broke off, and the access log has not said yet who did it
	router    *Router
	counts    [2]*workerCount // of destination and prefill worker; nil: not counted
}

// legs are the endpoints of a request.
type legs struct {
	// the destination, and the prefill worker if there is one; nil: none
	endpoint, prefill   *eject.Endpoint
	trial, prefillTrial uint64 // numbers of the request's trials; 0: none
}

// How a request's failure was counted.
const (
	notCounted  = iota
	countedLate // no response headers in time; a later response still shows that the endpoint works
	counted
)

// standings says which workers take no requests. The zero value excludes none.
type standings struct {
	view *eject.View
	now  time.Time
}

func (c *Config) standings() standings {
	s := standings{view: c.Eject.View()}
	if s.view != nil {
		s.now = time.Now()
	}
	return s
}

// of returns the standing of a worker.
func (s *standings) of(w *pool.Worker) eject.Standing {
	if w.CordonedBy != "" {
		return eject.Cordoned
	}
	return s.view.Of(w.Worker, s.now)
}

// cordonedSince reports whether an endpoint of the route was cordoned after the candidates were gathered. It is called
// after the booking. So an operator who cordons an endpoint and then sees no booking on it will see none later.
func (c *Config) cordonedSince(g *gathered, route *Route) bool {
	view := c.Eject.View()
	if view == g.standings.view {
		return false
	}
	now := time.Now()
	return view.Of(route.destination, now) == eject.Cordoned ||
		route.Prefill != nil && view.Of(route.computes.Worker, now) == eject.Cordoned
}

// watch begins to follow the request's endpoints. It returns false if the request was to be an endpoint's trial and
// another request took the trial first: then the caller must choose again.
func (r *Router) watch(g *gathered, route *Route, p *prepared) bool {
	t := r.cfg.Eject
	if !t.Ejects() {
		return true
	}
	if r.dry {
		route.Trial = !p.pins.Given() && (g.onTrial(route.destination) ||
			route.Prefill != nil && g.onTrial(route.computes.Worker))
		return true
	}
	h := &route.health
	*h = health{tracker: t, router: r, streams: !p.whole, legs: legs{endpoint: t.Of(route.destination)}}
	claim := func(w kvblock.Worker) (trial uint64, ok bool) {
		if p.pins.Given() || !g.onTrial(w) {
			return 0, true
		}
		return t.Claim(w)
	}
	ok := true
	if h.trial, ok = claim(route.destination); !ok {
		return false
	}
	if route.Prefill != nil {
		h.prefill = t.Of(route.computes.Worker)
		if h.prefillTrial, ok = claim(route.computes.Worker); !ok {
			t.Abandon(h.endpoint, h.trial)
			return false
		}
	}
	route.Trial = h.trial != 0 || h.prefillTrial != 0
	route.Token = strconv.FormatUint(r.tokens.Add(1), 36)
	return true
}

// onTrial reports whether a worker is ejected and its next request is the trial.
func (g *gathered) onTrial(w kvblock.Worker) bool {
	return g.standings.view.Of(w, g.standings.now) == eject.Trial
}

// trialCostMultiplier is the cost multiplier of an endpoint whose trial is due. It makes that endpoint the cheapest,
// even if others have more cached. Otherwise a recovered endpoint would stay ejected for as long as others are cheaper.
const trialCostMultiplier = 1e-6

// trialMultiplier returns a candidate's cost multiplier, given the one that it would have without a trial.
func (g *gathered) trialMultiplier(w *pool.Worker, multiplier float64) float64 {
	if !g.onTrial(w.Worker) {
		return multiplier
	}
	return trialCostMultiplier
}

// abandon ends the request's trials without a result.
func (h *health) abandon() {
	if h.tracker != nil {
		h.tracker.Abandon(h.endpoint, h.trial)
		h.tracker.Abandon(h.prefill, h.prefillTrial)
	}
}

// fail counts a failure of the request, once.
func (h *health) fail(cause eject.Cause) { h.failOf(h.legs, cause) }

// failOf counts a failure of the request at these endpoints, once for the request.
func (h *health) failOf(at legs, cause eject.Cause) {
	how := int32(counted)
	if cause == eject.FirstByte {
		how = countedLate
	}
	if h.tracker == nil || !h.counted.CompareAndSwap(notCounted, how) {
		return
	}
	h.tracker.Failed(at.endpoint, at.trial, cause)
	h.tracker.Failed(at.prefill, at.prefillTrial, cause) // either of the two may have failed
}

// Sent notes that the whole request has been sent on. The time to the first byte counts from now.
func (r *Route) Sent() {
	h := &r.health
	if h.tracker == nil || h.timer != nil || h.responded.Load() {
		return
	}
	wait := h.router.cfg.FirstByte
	if wait <= 0 || !h.streams && !r.Trial {
		return
	}
	at := h.legs // a copy: a retry of the proxy changes them
	h.timer = time.AfterFunc(wait, func() {
		if !h.responded.Load() {
			h.failOf(at, eject.FirstByte)
		}
	})
}

// stopTimer ends the wait for response headers.
func (h *health) stopTimer() {
	if h.responded.Store(true); h.timer != nil {
		h.timer.Stop()
	}
}

// Responding notes that the response headers have come. failure is what they say of the endpoint; empty: no failure so
// far. ofEndpoint is false if the proxy or a frontend answered by itself, which says nothing of the endpoint. Only the
// goroutine that follows the response calls it, Heard and Answered.
func (r *Route) Responding(failure eject.Cause, ofEndpoint bool) {
	h := &r.health
	h.silent = !ofEndpoint
	h.stopTimer()
	if failure != "" {
		h.fail(failure)
	}
}

// Heard notes that a piece of the response's body has come.
func (r *Route) Heard() {
	h := &r.health
	if h.tracker == nil {
		return
	}
	if h.silent || h.counted.Load() == counted {
		return // a frontend may have made it without its worker
	}
	h.endpoint.Heard()
	if !h.content {
		h.content = true
		h.prefill.Heard()
		h.tracker.Works(h.endpoint, h.trial)
		h.tracker.Works(h.prefill, h.prefillTrial)
	}
}

// explainedWithin is how long the proxy's access log may take to say who broke off a response.
const explainedWithin = time.Second

// end evaluates how the request ended.
func (h *health) end(a *Response, token string) {
	if h.tracker == nil {
		return
	}
	h.stopTimer()
	switch {
	case a.Status == "", h.silent: // the client closed it before a response, or the proxy did not ask the endpoint
		h.abandon()
	case h.counted.Load() == counted:
	case a.Complete:
		h.tracker.Succeeded(h.endpoint, h.trial)
		h.tracker.Succeeded(h.prefill, h.prefillTrial)
	default:
		// The client or the endpoint broke the response off. Only the proxy's access log says which.
		cause, known := h.router.broken.ended(token, h)
		switch {
		case known:
			h.explain(cause)
		case !a.Explained:
			h.abandon()
		default:
			h.waiting.Store(true)
			h.tracker.BrokenOff(h.endpoint)
			time.AfterFunc(explainedWithin, func() { h.explain("") })
		}
	}
}

// explain notes who broke the response off. cause is empty for the client, and if the access log has not said it in
// time.
func (h *health) explain(cause eject.Cause) {
	if cause != "" {
		h.fail(cause)
		for _, c := range h.counts {
			c.brokenOff()
		}
	}
	h.abandon()
	if h.waiting.Swap(false) {
		h.tracker.Explained(h.endpoint)
	}
}

// moved counts a failure of each endpoint that the proxy tried before the one that answered, which has this address.
// attempts is how many the proxy says it tried; 0: it does not say.
func (r *Route) moved(s *pool.Snapshot, servedBy string, attempts int) {
	h := &r.health
	// the proxy did not try the chosen one: it does not know it, or considers it unhealthy
	if h.tracker == nil || attempts == 1 {
		h.abandon()
		return
	}
	tried := 0 // of the fallbacks
	for tried < len(r.Fallbacks) && !sameAddress(r.Fallbacks[tried], servedBy) {
		tried++
	}
	switch {
	// the proxy chose another endpoint, and nothing says that it retried
	case tried == len(r.Fallbacks) && attempts == 0:
		h.abandon()
		return
	case attempts > 0:
		tried = min(tried, attempts-2)
	}
	h.tracker.Failed(h.endpoint, h.trial, eject.Retried)
	h.trial = 0
	for _, address := range r.Fallbacks[:tried] {
		if w := workerAt(s, address, r.Rank); w != nil {
			h.tracker.Failed(h.tracker.Of(w.Worker), 0, eject.Retried)
		}
	}
}

// BrokenOff notes what the proxy's access log says of a response that broke off: the endpoint's cause, or an empty
// cause if the client closed it. token is the request's [Route.Token].
func (r *Router) BrokenOff(token string, cause eject.Cause) {
	if h := r.broken.logged(token, cause); h != nil {
		h.explain(cause)
	}
}

// maxBroken bounds the responses that wait for an explanation by the access log.
const maxBroken = 4096

// brokenResponses joins two messages that come in either order: a response ended before it was complete, and the access
// log's line about it. It holds the latest maxBroken of both.
type brokenResponses struct {
	mu      sync.Mutex // guards all below
	byToken map[string]brokenResponse
	ring    [maxBroken]string // tokens in order of arrival
	next    int               // in ring
}

// brokenResponse is one of the two messages.
type brokenResponse struct {
	health *health     // of a response that ended; nil: the access log was first
	cause  eject.Cause // from the access log
}

// ended notes a response that ended before it was complete. known is true if the access log has given the cause
// already.
func (b *brokenResponses) ended(token string, h *health) (cause eject.Cause, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was, there := b.byToken[token]; there {
		delete(b.byToken, token)
		return was.cause, was.health == nil
	}
	b.add(token, brokenResponse{health: h})
	return "", false
}

// logged notes the access log's cause for a response, and returns that response's health if it has ended already.
func (b *brokenResponses) logged(token string, cause eject.Cause) *health {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was, there := b.byToken[token]; there {
		delete(b.byToken, token)
		return was.health
	}
	b.add(token, brokenResponse{cause: cause})
	return nil
}

// add stores a message in place of the oldest. The caller holds b.mu.
func (b *brokenResponses) add(token string, x brokenResponse) {
	if b.byToken == nil {
		b.byToken = map[string]brokenResponse{}
	}
	delete(b.byToken, b.ring[b.next])
	b.byToken[token] = x
	b.ring[b.next] = token
	b.next = (b.next + 1) % maxBroken
}
