package router

import (
	"slices"
	"sync"

	"kvepp/pool"
)

// FirstTokens are the requests whose worker notes the first token on Dynamo's event plane. The response shows it later,
// or not at all if it comes in one piece. kvepp waits for the note of each request, streamed or not: times to first
// token that were measured at two places would make equal workers look different. The zero value is ready for use. It
// is safe for concurrent use.
type FirstTokens struct {
	mu     sync.Mutex
	routes map[string]*Route // by Decision.FirstTokenID; guarded by mu
	count  func()            // one that was noted; guarded by mu
	heard  bool              // any note came; guarded by mu
}

// Noted ends the prefill of the request with an id. Unknown ids are those of other requests, or of requests that have
// ended.
func (f *FirstTokens) Noted(id []byte) {
	f.mu.Lock()
	r := f.routes[string(id)]
	delete(f.routes, string(id))
	count := f.count
	f.heard = true
	f.mu.Unlock()
	if r == nil {
		return
	}
	count()
	r.booking.MarkPrefillCompleted()
	r.prefill.MarkPrefillCompleted()
	r.endPrefill()
}

// expectFirstToken gives a route the id by which its worker will note the first token. false: it is not certain that
// the worker notes it.
func (r *Router) expectFirstToken(route *Route, req *Request) bool {
	f := r.cfg.FirstTokens
	if f == nil || !route.notes || req.NamesDynamo || route.RankByAddress {
		return false
	}
	route.FirstTokenID, route.firsts = NewRequestID(), f
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.routes == nil {
		f.routes, f.count = map[string]*Route{}, r.metrics.FirstTokensNoted.Inc
	}
	f.routes[route.FirstTokenID] = route
	return f.heard
}

// AwaitsNote reports whether the worker will still note the first token. The first bytes of a compressed response then
// say nothing: they may be its header. Before any worker has noted one it is not certain. Only the goroutine that
// follows the response calls it.
func (r *Route) AwaitsNote() bool {
	f := r.firsts
	if f == nil || !r.notes {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.heard && f.routes[r.FirstTokenID] != nil
}

// forget ends the wait for the note of an ended request.
func (f *FirstTokens) forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.routes, id)
}

// notesFirstTokens reports whether a worker notes first tokens on Dynamo's event plane.
func notesFirstTokens(w *pool.Worker) bool {
	return slices.ContainsFunc(w.LoadChannels, func(c pool.EventChannel) bool { return c.FirstTokens })
}
