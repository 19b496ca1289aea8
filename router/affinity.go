package router

import (
	"time"

	"kvepp/pool"
	"kvepp/router/session"
)

// affinity is what a request wants of session affinity. The zero value wants none.
type affinity struct {
	key    session.Key
	wanted bool          // the request belongs to a session
	binds  bool          // a session that is not known is opened
	ttl    time.Duration // of session.Table.Hold
	final  bool          // the session ends with this request
}

// affinityOf returns what a request wants of session affinity.
//
// The requests of an agent's sub-agents share one session, apart from the agent's own: their prompts begin alike.
// Source: dynamo-llm 1.6.1, kv_router::routing_host.
func (c *Config) affinityOf(p *prepared) (a affinity) {
	h := &p.hints
	if h.Session == "" || c.Sessions == nil {
		return a
	}
	a.wanted = true
	if child := h.ParentSession != "" && p.pins.Worker.Key == ""; child {
		a.key = session.ChildrenKeyOf(p.model, h.ParentSession)
	} else {
		a.key, a.final = session.KeyOf(p.model, h.Session), h.SessionFinal
	}
	a.binds = c.Sessions.TTL() > 0 || h.SessionOpen
	if h.SessionOpen {
		a.ttl = time.Duration(h.SessionTimeoutSecs) * time.Second
	}
	return a
}

// exclusiveTarget returns the target that a request waits for although other workers are ready: that of its stored
// response, or of its session, unless the session may move.
func (c *Config) exclusiveTarget(p *prepared) (t target) {
	if p.stored.bound {
		return p.stored
	}
	if p.affinity.wanted && !c.Sessions.Soft() {
		t.worker, t.bound = c.Sessions.Find(p.affinity.key)
	}
	return t
}

// maxTries bounds how often a request is decided again because other requests moved its session meanwhile.
const maxTries = 4

// chooseInSession is choose for a request with a session.
//
// It holds no lock while it chooses, so requests of one session race: A and B both find the session unbound, A binds it
// to the worker that it chose, and B, which chose another, cannot. B then frees its booking and chooses again, with the
// session bound.
func (r *Router) chooseInSession(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared) (*Route, error) {
	sessions, a := r.cfg.Sessions, &p.affinity
	for try := 1; ; try++ {
		t := target{soft: sessions.Soft()}
		t.worker, t.bound = sessions.Find(a.key)
		route, err := r.chooseFor(sc, snapshot, req, p, t)
		if err != nil || !a.binds && !t.bound {
			return route, err
		}
		if r.dry {
			route.Session = wouldBe(t, route)
			return route, nil
		}
		lease, outcome := sessions.Hold(a.key, t.worker, t.bound, route.destination, a.ttl)
		if outcome != "" {
			route.Session, route.lease, route.final = outcome, lease, a.final
			return route, nil
		}
		if try == maxTries {
			return route, nil // without its session: better than to retry without end
		}
		route.health.abandon()
		route.Free()
	}
}
