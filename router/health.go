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

// ErrCordoned says that there are endpoints for the request, and that an operator cordoned each of them.
var ErrCordoned = errors.New(
	"every endpoint that may take this request is cordoned; uncordon one (POST /workers/NAME/uncordon on the admin " +
		"address, or the Pod's annotation)",
)

// health is what a request's fate says of the endpoints that serve it. The zero value says nothing to anybody: without
// Config.Eject there is no other.
type health struct {
	tracker *eject.Tracker
	legs
	streams   bool         // its answer comes in pieces
	timer     *time.Timer  // of the first byte; nil: not started
	responded atomic.Bool  // response headers have come, or are not waited for any more
	counted   atomic.Int32 // which failure was: notCounted, countedLate or counted
	content   bool         // of the answer was seen
	silent    bool         // the response is none of the endpoint's
	waiting   atomic.Bool  // it broke off, and the access log has not told yet who did it
	router    *Router
	counts    [2]*workerCount // of destination and prefill worker; nil: counted nowhere
}

// legs are the endpoints that serve a request.
type legs struct {
	// the destination, and the one that computes the prompt if that is another; nil: none
	endpoint, prefill   *eject.Endpoint
	trial, prefillTrial uint64 // numbers of the trials that the request is; 0: none
}

// What of a request was counted as a failure.
const (
	notCounted  = iota
	countedLate // no response headers in time; what comes later still shows that the endpoint works
	counted
)

// standings says which of a snapshot's workers take no requests. The zero value excludes none.
type standings struct {
	view *eject.View
	now  time.Time
}

func (r *Router) standings() standings {
	s := standings{view: r.cfg.Eject.View()}
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

// cordonedSince reports whether an endpoint of the route was cordoned after the candidates were gathered. It is asked
// after the route is booked, so that whoever cordons an endpoint and then sees no booking of it will see none later.
func (r *Router) cordonedSince(sc *scratch, route *Route) bool {
	view := r.cfg.Eject.View()
	if view == sc.standings.view {
		return false
	}
	now := time.Now()
	return view.Of(route.destination, now) == eject.Cordoned ||
		route.Prefill != nil && view.Of(route.computes.Worker, now) == eject.Cordoned
}

// watch begins to follow what the request says of its endpoints' health. It returns false when an endpoint that is
// ejected was chosen for a trial, and another request was quicker: then the choice has to be made again.
func (r *Router) watch(sc *scratch, route *Route, p *prompt) bool {
	t := r.cfg.Eject
	if !t.Ejects() {
		return true
	}
	h := &route.health
	*h = health{tracker: t, router: r, streams: !p.whole, legs: legs{endpoint: t.Of(route.destination)}}
	claim := func(w kvblock.Worker) (trial uint64, ok bool) {
		if p.pins.Given() || !sc.onTrial(w) {
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

// onTrial reports whether a candidate is ejected, and its next request is its trial.
func (sc *scratch) onTrial(w kvblock.Worker) bool {
	return sc.standings.view.Of(w, sc.standings.now) == eject.Trial
}

// trialCostMultiplier is the cost multiplier of an endpoint whose trial is due. It makes that endpoint the cheapest,
// whatever others have cached. Otherwise a recovered endpoint would stay ejected for as long as others are cheaper.
const trialCostMultiplier = 1e-6

// trialMultiplier returns a candidate's cost multiplier, given the one that it would have without a trial.
func (sc *scratch) trialMultiplier(w *pool.Worker, multiplier float64) float64 {
	if !sc.onTrial(w.Worker) {
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

// failOf counts a failure of the request at these endpoints, once.
func (h *health) failOf(at legs, cause eject.Cause) {
	how := int32(counted)
	if cause == eject.FirstByte {
		how = countedLate
	}
	if h.tracker == nil || !h.counted.CompareAndSwap(notCounted, how) {
		return
	}
	h.tracker.Failed(at.endpoint, at.trial, cause)
	h.tracker.Failed(at.prefill, at.prefillTrial, cause) // which of the two it was cannot be told
}

// Sent says that the whole request has been sent on. From now on its endpoint owes an answer.
func (r *Route) Sent() {
	h := &r.health
	if h.tracker == nil || h.timer != nil || h.responded.Load() {
		return
	}
	wait := h.router.cfg.FirstByte
	if wait <= 0 || !h.streams && !r.Trial {
		return
	}
	at := h.legs // as they are now: a retry of the proxy's changes them
	h.timer = time.AfterFunc(wait, func() {
		if !h.responded.Load() {
			h.failOf(at, eject.FirstByte)
		}
	})
}

// stopTimer says that no response headers are waited for any more.
func (h *health) stopTimer() {
	if h.responded.Store(true); h.timer != nil {
		h.timer.Stop()
	}
}

// Responding says that the headers of the response have come. failure is what they say of the endpoint; empty: no
// failure, so far. ofEndpoint is false when the proxy answered by itself, for a reason that says nothing of the
// endpoint. It belongs to the goroutine that follows the answer; so do Heard and Answered.
func (r *Route) Responding(failure eject.Cause, ofEndpoint bool) {
	h := &r.health
	h.silent = !ofEndpoint
	h.stopTimer()
	if failure != "" {
		h.fail(failure)
	}
}

// Heard says that a piece of the answer's body has come.
func (r *Route) Heard() {
	h := &r.health
	if h.tracker == nil {
		return
	}
	if h.silent || h.counted.Load() == counted {
		return // a frontend may have made it up without its worker
	}
	h.endpoint.Heard()
	if !h.content {
		h.content = true
		h.prefill.Heard()
		h.tracker.Works(h.endpoint, h.trial)
		h.tracker.Works(h.prefill, h.prefillTrial)
	}
}

// explainedWithin is how long the proxy's access log may take to say who broke an answer off.
const explainedWithin = time.Second

// end says how the request ended.
func (h *health) end(a *Answer, token string) {
	if h.tracker == nil {
		return
	}
	h.stopTimer()
	switch {
	case a.Status == "", h.silent: // the client went away before a response, or the proxy did not ask the endpoint
		h.abandon()
	case h.counted.Load() == counted:
	case a.Complete:
		h.tracker.Succeeded(h.endpoint, h.trial)
		h.tracker.Succeeded(h.prefill, h.prefillTrial)
	default:
		// The client went away, or the endpoint broke the answer off: only the proxy's access log tells.
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

// explain says who broke the answer off: the client if cause is empty, or if nobody has told in time.
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

// moved counts a failure of each endpoint that the proxy tried before the one that served. attempts is how many it says
// it tried, 0: it does not say.
func (r *Router) moved(s *pool.Snapshot, route *Route, served string, attempts int) {
	h := &route.health
	// the proxy did not try the chosen one: it does not know it, or thinks it unhealthy
	if h.tracker == nil || attempts == 1 {
		h.abandon()
		return
	}
	tried := 0 // of the fallbacks
	for tried < len(route.Fallbacks) && !sameAddress(route.Fallbacks[tried], served) {
		tried++
	}
	switch {
	case tried == len(route.Fallbacks) && attempts == 0: // the proxy went elsewhere, and nothing says that it retried
		h.abandon()
		return
	case attempts > 0:
		tried = min(tried, attempts-2)
	}
	h.tracker.Failed(h.endpoint, h.trial, eject.Retried)
	h.trial = 0
	for _, address := range route.Fallbacks[:tried] {
		if w := workerAt(s, address, route.Rank); w != nil {
			h.tracker.Failed(h.tracker.Of(w.Worker), 0, eject.Retried)
		}
	}
}

// BrokenOff says what the proxy's access log tells of an answer that broke off: why the endpoint did it, or, if cause
// is empty, that the client did. token is the request's [Route.Token].
func (r *Router) BrokenOff(token string, cause eject.Cause) {
	if h := r.broken.logged(token, cause); h != nil {
		h.explain(cause)
	}
}

// maxBroken is how many answers that broke off are remembered until the access log explains them.
const maxBroken = 4096

// brokenAnswers joins two messages that come in either order: that an answer ended before it was complete, and what the
// proxy's access log says of it. It holds the latest maxBroken of both.
type brokenAnswers struct {
	mu      sync.Mutex // guards all below
	byToken map[string]brokenAnswer
	ring    [maxBroken]string // tokens, in the order in which they came
	next    int               // in ring
}

// brokenAnswer is one of the two messages.
type brokenAnswer struct {
	health *health     // of an answer that ended; nil: the log was quicker
	cause  eject.Cause // by the log
}

// ended notes an answer that ended before it was complete. known is true if the access log has told why.
func (b *brokenAnswers) ended(token string, h *health) (cause eject.Cause, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was, there := b.byToken[token]; there {
		delete(b.byToken, token)
		return was.cause, was.health == nil
	}
	b.add(token, brokenAnswer{health: h})
	return "", false
}

// logged notes what the access log says of an answer, and returns that answer's health if it has ended.
func (b *brokenAnswers) logged(token string, cause eject.Cause) *health {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was, there := b.byToken[token]; there {
		delete(b.byToken, token)
		return was.health
	}
	b.add(token, brokenAnswer{cause: cause})
	return nil
}

// add stores a message in place of the oldest. The caller holds b.mu.
func (b *brokenAnswers) add(token string, x brokenAnswer) {
	if b.byToken == nil {
		b.byToken = map[string]brokenAnswer{}
	}
	delete(b.byToken, b.ring[b.next])
	b.byToken[token] = x
	b.ring[b.next] = token
	b.next = (b.next + 1) % maxBroken
}
