package router

import (
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/session"
)

// affinity is what a request wants of session affinity. The zero value wants nothing.
type affinity struct {
	key    session.Key
	wanted bool          // the request belongs to a session
	binds  bool          // the session is kept even if it was not before
	ttl    time.Duration // as for session.Table.Hold
	final  bool          // it ends with this request
}

// affinityOf returns what a request wants of session affinity.
//
// Requests of an agent's agents are bound together, apart from those of the agent itself: they share what they were
// told. Source: dynamo-llm 1.6.1, kv_router::routing_host.
func (r *Router) affinityOf(p *prompt) (a affinity) {
	h := &p.hints
	if h.Session == "" || r.cfg.Sessions == nil {
		return a
	}
	a.wanted = true
	if child := h.ParentSession != "" && p.pins.Worker.Key == ""; child {
		a.key = session.ChildrenKeyOf(p.model, h.ParentSession)
	} else {
		a.key, a.final = session.KeyOf(p.model, h.Session), h.SessionFinal
	}
	a.binds = r.cfg.Sessions.TTL() > 0 || h.SessionOpen
	if h.SessionOpen {
		a.ttl = time.Duration(h.SessionTimeoutSecs) * time.Second
	}
	return a
}

// target is the worker that a request's session is bound to.
type target struct {
	worker     kvblock.Worker
	bound      bool // there is one
	overloaded bool // it could serve the request, but for its load
	soft       bool // then another will do
}

// waitsFor returns the target for which a request waits while other workers are ready: that of its session, if the
// session may not move.
func (r *Router) waitsFor(p *prompt) (t target) {
	if p.affinity.wanted && !r.cfg.Sessions.Soft() {
		t.worker, t.bound = r.cfg.Sessions.Find(p.affinity.key)
	}
	return t
}

// holdTo leaves, of the destinations, the one that the session is bound to, if it is among them.
//
// Source: dynamo-kv-router 1.6.1, scheduling: an eligible target is exclusive in the default policy; dynamo-llm 1.6.1,
// kv_router::routing_host: what hard and soft mean for one that is not eligible.
func (d *decision) holdTo(t *target) error {
	if !t.bound {
		return nil
	}
	for _, l := range []*leg{&d.aggregated, &d.decode} {
		for i := range l.workers {
			if l.workers[i].Worker == t.worker {
				only := l.workers[i]
				d.aggregated.reset()
				d.decode.reset()
				l.workers = append(l.workers, only)
				return nil
			}
		}
	}
	if t.overloaded && !t.soft {
		return ErrOverloaded
	}
	return nil
}

// maxTries bounds how often a request is decided anew because others of its session were quicker.
const maxTries = 4

// chooseInSession is choose for a request with a session.
//
// No lock is held meanwhile, so requests of one session may race: A and B both find it unbound, A binds it to the
// worker that it chose, and B, which chose another, cannot: it lets go of its choice and chooses again, now bound.
func (r *Router) chooseInSession(
	d *decision,
	snapshot *pool.Snapshot,
	req *Request,
	p *prompt,
	a *affinity,
) (*Route, error) {
	for try := 1; ; try++ {
		t := target{soft: r.cfg.Sessions.Soft()}
		t.worker, t.bound = r.cfg.Sessions.Find(a.key)
		route, err := r.chooseAt(d, snapshot, req, p, &t)
		if err != nil || !a.binds && !t.bound {
			return route, err
		}
		lease, outcome := r.cfg.Sessions.Hold(a.key, t.worker, t.bound, route.destination, a.ttl)
		if outcome != "" {
			route.Session, route.lease, route.final = outcome, lease, a.final
			return route, nil
		}
		if try == maxTries {
			return route, nil // its session is somewhere else by now; better that than to go round for ever
		}
		route.health.abandon()
		route.Free()
	}
}
