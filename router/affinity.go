package router

import (
	"container/list"
	"crypto/sha256"
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// MaxSessions is how many sessions are kept unless [SessionConfig] says otherwise. Source: dynamo-kv-router 1.6.1,
// services::selection::affinity.
const MaxSessions = 65536

// MaxSessionTTL is the longest time for which a session is kept without a request. Source: as for MaxSessions.
const MaxSessionTTL = 31_536_000 * time.Second

// SessionConfig is what an operator chooses of session affinity.
type SessionConfig struct {
	// TTL is how long a session is kept after the end of its last request. 0: only sessions that requests open
	// themselves are kept (session_control), each as long as it says.
	TTL time.Duration
	// Soft lets a session move to another worker while its own is overloaded. Otherwise its requests are then refused.
	Soft bool
	// Max is the most sessions kept; beyond it the one that was used longest ago is forgotten. 0: MaxSessions.
	Max int
}

// Sessions knows which worker the requests of each session go to. It holds at most SessionConfig.Max of them, of a
// fixed size each, so that clients cannot exhaust it: who comes new is never refused. It is safe for concurrent use.
//
// Source: dynamo-kv-router 1.6.1, services::selection::affinity, which refuses new sessions when it is full.
type Sessions struct {
	cfg SessionConfig

	mu    sync.Mutex // guards all below
	byKey map[sessionKey]*session
	// idle are the sessions without a running request, and held those with one, each in the order of their last use,
	// the oldest first.
	idle, held list.List
	stats      SessionStats
}

// sessionKey stands for a session's id and its model's name, however long they are.
type sessionKey [sha256.Size]byte

// session is one conversation, bound to a worker.
type session struct {
	key     sessionKey
	worker  kvblock.Worker
	ttl     time.Duration
	running int           // requests
	expires time.Time     // while none is running
	place   *list.Element // in idle or held; nil once it has ended
}

// SessionStats counts what became of sessions.
type SessionStats struct {
	// Requests whose session was not known before, whose session was kept on its worker, and whose session moved to
	// another.
	New, Kept, Moved uint64
	// Sessions that ended: as a request said, idle for too long, the oldest of too many, and those whose worker left.
	Final, Expired, Evicted, WorkerLeft uint64
}

// NewSessions returns an empty table.
func NewSessions(cfg SessionConfig) *Sessions {
	if cfg.Max == 0 {
		cfg.Max = MaxSessions
	}
	return &Sessions{cfg: cfg, byKey: map[sessionKey]*session{}}
}

// find returns the worker of a session.
func (s *Sessions) find(key sessionKey) (kvblock.Worker, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.current(key, time.Now()); e != nil {
		return e.worker, true
	}
	return 0, false
}

// current returns a session that has not expired, nil if there is none. The caller holds s.mu.
func (s *Sessions) current(key sessionKey, now time.Time) *session {
	e := s.byKey[key]
	if e != nil && e.running == 0 && !now.Before(e.expires) {
		s.end(e, &s.stats.Expired)
		return nil
	}
	return e
}

// hold binds a session to a worker, from which it is held by the request until release, and returns it with how that
// changed it. The caller has seen the session on the worker was, or nowhere if !bound: if it is not there any more, and
// not where it is to be either, nothing is changed and nil returned, so that all requests of a session go where the
// first of them went.
//
// ttl is how long the session is kept after its last request; 0: as long as it was to be before.
func (s *Sessions) hold(
	key sessionKey,
	was kvblock.Worker,
	bound bool,
	to kvblock.Worker,
	ttl time.Duration,
) (e *session, outcome string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e = s.current(key, now)
	switch {
	case e != nil && e.worker == to:
		s.stats.Kept++
		outcome = SessionKept
	case (e != nil) != bound || bound && e.worker != was:
		return nil, ""
	case e != nil:
		s.stats.Moved++
		e.worker, outcome = to, SessionMoved
	default:
		s.makeRoom(now)
		e = &session{key: key, worker: to, ttl: s.cfg.TTL}
		s.byKey[key] = e
		s.stats.New++
		outcome = SessionNew
	}
	if ttl > 0 {
		e.ttl = min(ttl, MaxSessionTTL)
	}
	e.running++
	s.put(e, &s.held)
	return e, outcome
}

// How a request changed its session.
const (
	SessionNew   = "new"
	SessionKept  = "kept"
	SessionMoved = "moved"
)

// release ends a request's hold on its session, and the session too if the request was its last.
func (s *Sessions) release(e *session, final bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.running--; e.place == nil {
		return // it has ended before
	}
	if final {
		s.end(e, &s.stats.Final)
		return
	}
	if e.running > 0 {
		s.held.MoveToBack(e.place)
		return
	}
	e.expires = time.Now().Add(e.ttl)
	s.put(e, &s.idle)
}

// put makes e the latest of a list. The caller holds s.mu.
func (s *Sessions) put(e *session, in *list.List) {
	if e.place != nil {
		s.idle.Remove(e.place) // an element of the other list is left alone
		s.held.Remove(e.place)
	}
	e.place = in.PushBack(e)
}

// end takes a session out of the table and counts it. The caller holds s.mu.
func (s *Sessions) end(e *session, count *uint64) {
	s.idle.Remove(e.place)
	s.held.Remove(e.place)
	e.place = nil
	delete(s.byKey, e.key)
	*count++
}

// makeRoom ends sessions so that one more fits: some that have expired, and if the table is full the one that was used
// longest ago, one with running requests only if there is no other. The caller holds s.mu.
func (s *Sessions) makeRoom(now time.Time) {
	for range 2 { // more than one, so that those who say nothing any more are gone in the end
		oldest := s.idle.Front()
		if oldest == nil || now.Before(oldest.Value.(*session).expires) {
			break
		}
		s.end(oldest.Value.(*session), &s.stats.Expired)
	}
	if len(s.byKey) < s.cfg.Max {
		return
	}
	oldest := s.idle.Front()
	if oldest == nil {
		oldest = s.held.Front()
	}
	s.end(oldest.Value.(*session), &s.stats.Evicted)
}

// Forget ends all sessions of a worker, so that its number can be given to another.
func (s *Sessions) Forget(w kvblock.Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Workers leave rarely: a pass over all sessions is cheaper than a list for each worker, kept at every request.
	for _, e := range s.byKey {
		if e.worker == w {
			s.end(e, &s.stats.WorkerLeft)
		}
	}
}

// Stats returns what was counted so far.
func (s *Sessions) Stats() SessionStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// Active returns how many sessions there are, after those that have expired were ended.
func (s *Sessions) Active() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for place := s.idle.Front(); place != nil; {
		e := place.Value.(*session)
		if place = place.Next(); !now.Before(e.expires) {
			s.end(e, &s.stats.Expired)
		}
	}
	return len(s.byKey)
}

// affinity is what a request wants of session affinity. The zero value wants nothing.
type affinity struct {
	key    sessionKey
	wanted bool          // the request belongs to a session
	binds  bool          // the session is kept even if it was not before
	ttl    time.Duration // as for hold
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
	kind, id := "session", h.Session
	if h.ParentSession != "" && p.pins.Worker.Key == "" {
		kind, id = "children", h.ParentSession
	}
	a.key, a.wanted = keyOf(kind, p.model, id), true
	a.binds = r.cfg.Sessions.cfg.TTL > 0 || h.SessionOpen
	a.final = h.SessionFinal && kind == "session"
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
	if p.affinity.wanted && !r.cfg.Sessions.cfg.Soft {
		t.worker, t.bound = r.cfg.Sessions.find(p.affinity.key)
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
		t := target{soft: r.cfg.Sessions.cfg.Soft}
		t.worker, t.bound = r.cfg.Sessions.find(a.key)
		route, err := r.chooseAt(d, snapshot, req, p, &t)
		if err != nil || !a.binds && !t.bound {
			return route, err
		}
		e, outcome := r.cfg.Sessions.hold(a.key, t.worker, t.bound, route.destination, a.ttl)
		if e != nil {
			route.Session, route.session, route.final, route.sessions = outcome, e, a.final, r.cfg.Sessions
			return route, nil
		}
		if try == maxTries {
			return route, nil // its session is somewhere else by now; better that than to go round for ever
		}
		route.health.abandon()
		route.Free()
	}
}
