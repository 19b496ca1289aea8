// Package session binds conversations to workers, so that the requests of one conversation go to the worker that has
// its blocks cached.
//
// It owns the table of sessions: which worker each is bound to, how many of its requests run, and when it expires. It
// never chooses a worker, never reads a request and starts no goroutine.
//
// Concurrency: a Table and a Leases are safe for concurrent use.
package session

import (
	"container/list"
	"crypto/sha256"
	"sync"
	"time"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
)

// DefaultMax is how many sessions are kept unless [Config.Max] says otherwise. Source: dynamo-kv-router 1.6.1,
// services::selection::affinity.
const DefaultMax = 65536

// MaxTTL is the longest time for which a session is kept without a request. Source: as for DefaultMax.
const MaxTTL = 31_536_000 * time.Second

// Table knows which worker each session is bound to. It holds at most Config.Max sessions of a fixed size each, so that
// clients cannot exhaust memory. It never refuses a new session.
//
// Source: dynamo-kv-router 1.6.1, services::selection::affinity, which refuses new sessions when it is full.
type Table struct {
	cfg Config

	mu    sync.Mutex // guards all below, and the fields of every session
	byKey map[Key]*session
	// idle lists the sessions without a running request, held those with one. Each is in the order of last use, the
	// oldest first.
	idle, held list.List
	stats      Stats

	observer func(Event) // nil: none
}

// Key identifies a session. It has a fixed size, however long the session's id and its model's name are.
type Key [sha256.Size]byte

// KeyOf returns the key of a session among those of a model.
func KeyOf(model, id string) Key { return keyOf("session", model, id) }

// ChildrenKeyOf returns the key that all children of one parent session share. It differs from the parent's own key.
func ChildrenKeyOf(model, parent string) Key { return keyOf("children", model, parent) }

// responsePrefix begins the keys of stored responses. No session's key does, except by a chance of 1 in 2^64.
const responsePrefix = "response"

// ResponseKeyOf returns the key of a response that an engine stores. A table of responses is one of its own; replicas
// tell each other of both tables in one stream.
func ResponseKeyOf(id string) Key {
	key := keyOf("response", "", id)
	copy(key[:], responsePrefix)
	return key
}

// IsResponse reports whether ResponseKeyOf made the key.
func (k *Key) IsResponse() bool { return string(k[:len(responsePrefix)]) == responsePrefix }

func keyOf(kind, model, id string) (key Key) {
	sum := sha256.New()
	for _, part := range []string{kind, "\x00", model, "\x00", id} {
		sum.Write([]byte(part))
	}
	sum.Sum(key[:0])
	return key
}

// session is one conversation, bound to a worker.
type session struct {
	key     Key
	worker  kvblock.Worker
	ttl     time.Duration
	running int           // requests
	expires time.Time     // valid while running is 0
	place   *list.Element // in idle or held; nil after the session has ended
	told    time.Time     // when the observer was told last
}

// Stats counts what became of sessions.
type Stats struct {
	// Requests by Outcome.
	New, Kept, Moved uint64
	// Sessions that ended: by a request's wish, after their TTL, evicted from a full table, and because their worker
	// left.
	Final, Expired, Evicted, WorkerLeft uint64
	// Sessions that another table's event bound here, and those that it moved, see Apply.
	ByPeers, MovedByPeers uint64
}

// Export exports how many sessions there are, and how they began and ended.
func (t *Table) Export(m *metrics.Metrics) {
	metrics.Gauge(m, metrics.Sessions, t.Active)
	metrics.Counters(m, metrics.SessionRequests, "outcome", func() map[string]uint64 {
		s := t.Stats()
		return map[string]uint64{New: s.New, Kept: s.Kept, Moved: s.Moved}
	})
	metrics.Counters(m, metrics.SessionsEnded, "cause", func() map[string]uint64 {
		s := t.Stats()
		return map[string]uint64{"final": s.Final, "expired": s.Expired, "evicted": s.Evicted,
			"worker_left": s.WorkerLeft}
	})
}

// Add adds the counts of another table.
func (s *Stats) Add(o Stats) {
	s.New, s.Kept, s.Moved = s.New+o.New, s.Kept+o.Kept, s.Moved+o.Moved
	s.Final, s.Expired, s.Evicted = s.Final+o.Final, s.Expired+o.Expired, s.Evicted+o.Evicted
	s.WorkerLeft += o.WorkerLeft
	s.ByPeers, s.MovedByPeers = s.ByPeers+o.ByPeers, s.MovedByPeers+o.MovedByPeers
}

// Outcome is what a request did to its session. Empty: it holds none.
type Outcome = string

// The outcomes. They are values of a metric's label.
const (
	New   Outcome = "new"   // the session was not known before
	Kept  Outcome = "kept"  // it stayed on its worker
	Moved Outcome = "moved" // it moved to another worker
)

// NewTable returns an empty table.
func NewTable(cfg Config) *Table {
	if cfg.Max == 0 {
		cfg.Max = DefaultMax
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	return &Table{cfg: cfg, byKey: map[Key]*session{}}
}

// TTL returns Config.TTL.
func (t *Table) TTL() time.Duration { return t.cfg.TTL }

// Soft returns Config.Soft.
func (t *Table) Soft() bool { return t.cfg.Soft }

// Find returns the worker that a session is bound to; false if there is no such session.
func (t *Table) Find(key Key) (w kvblock.Worker, bound bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.current(key, t.cfg.Clock()); s != nil {
		return s.worker, true
	}
	return 0, false
}

// current returns a session that has not expired; nil if there is none. The caller holds t.mu.
func (t *Table) current(key Key, now time.Time) *session {
	s := t.byKey[key]
	if s != nil && s.running == 0 && !now.Before(s.expires) {
		t.end(s, &t.stats.Expired)
		return nil
	}
	return s
}

// Lease is one request's hold on its session. The zero value holds none.
type Lease struct {
	table   *Table
	session *session
}

// Hold binds a session to the worker to, and holds it there until the lease is released.
//
// The caller has found the session on the worker was, or nowhere if !bound. If another request changed that meanwhile,
// and the session is not on to either, Hold changes nothing and returns the outcome "": the caller must look again. So
// all requests of a session go where the first of them went.
//
// ttl is how long the session is kept after its last request. 0: as long as before.
func (t *Table) Hold(
	key Key, was kvblock.Worker, bound bool, to kvblock.Worker, ttl time.Duration,
) (lease Lease, outcome Outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Clock()
	s := t.current(key, now)
	switch {
	case s != nil && s.worker == to:
		t.stats.Kept++
		outcome = Kept
	case (s != nil) != bound || bound && s.worker != was:
		return Lease{}, ""
	case s != nil:
		t.stats.Moved++
		s.worker, outcome = to, Moved
	default:
		t.makeRoom(now)
		s = &session{key: key, worker: to, ttl: t.cfg.TTL}
		t.byKey[key] = s
		t.stats.New++
		outcome = New
	}
	if ttl > 0 {
		s.ttl = min(ttl, MaxTTL)
	}
	s.running++
	t.moveToBack(s, &t.held)
	t.tell(Bound, s, now)
	return Lease{t, s}, outcome
}

// Put binds a session to a worker, without a request, for Config.TTL. It does not change one that is bound.
func (t *Table) Put(key Key, w kvblock.Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Clock()
	if t.current(key, now) != nil {
		return
	}
	t.makeRoom(now)
	s := &session{key: key, worker: w, ttl: t.cfg.TTL, expires: now.Add(t.cfg.TTL)}
	t.byKey[key] = s
	t.stats.New++
	t.moveToBack(s, &t.idle)
	t.tell(Bound, s, now)
}

// Release ends the request's hold on its session. final ends the session too. Call it once; without a session it has no
// effect.
func (l Lease) Release(final bool) {
	t, s := l.table, l.session
	if s == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.running--; s.place == nil {
		return // the session has ended already
	}
	now := t.cfg.Clock()
	if final {
		t.tell(Ended, s, now)
		t.end(s, &t.stats.Final)
		return
	}
	t.tell(Used, s, now)
	if s.running > 0 {
		t.held.MoveToBack(s.place)
		return
	}
	s.expires = now.Add(s.ttl)
	t.moveToBack(s, &t.idle)
}

// moveToBack makes s the most recently used session of a list. The caller holds t.mu.
func (t *Table) moveToBack(s *session, in *list.List) {
	t.unlink(s)
	s.place = in.PushBack(s)
}

// unlink takes s out of the list that it is in, if any. The caller holds t.mu.
func (t *Table) unlink(s *session) {
	if s.place != nil {
		t.idle.Remove(s.place) // list.Remove ignores an element of another list
		t.held.Remove(s.place)
		s.place = nil
	}
}

// end takes a session out of the table and counts it. The caller holds t.mu.
func (t *Table) end(s *session, count *uint64) {
	t.unlink(s)
	delete(t.byKey, s.key)
	*count++
}

// makeRoom ends up to two expired sessions and then, if the table is full, evicts the least recently used one. It
// evicts a session with running requests only if no idle one is left. The caller holds t.mu.
func (t *Table) makeRoom(now time.Time) {
	for range 2 { // more than one for each new session, so that expired sessions do not accumulate
		oldest := t.idle.Front()
		if oldest == nil || now.Before(oldest.Value.(*session).expires) {
			break
		}
		t.end(oldest.Value.(*session), &t.stats.Expired)
	}
	if len(t.byKey) < t.cfg.Max {
		return
	}
	oldest := t.idle.Front()
	if oldest == nil {
		oldest = t.held.Front()
	}
	t.end(oldest.Value.(*session), &t.stats.Evicted)
}

// End ends a session, also while requests of it run.
func (t *Table) End(key Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.byKey[key]; s != nil {
		t.tell(Ended, s, t.cfg.Clock())
		t.end(s, &t.stats.Final)
	}
}

// Forget ends all sessions of a worker, so that its number can be given to another.
func (t *Table) Forget(w kvblock.Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Workers leave rarely: a pass over all sessions is cheaper than a list for each worker, kept at every request.
	for _, s := range t.byKey {
		if s.worker == w {
			t.end(s, &t.stats.WorkerLeft)
		}
	}
}

// Stats returns the counts so far.
func (t *Table) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stats
}

// Active ends the expired sessions and returns how many are left.
func (t *Table) Active() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Clock()
	for place := t.idle.Front(); place != nil; {
		s := place.Value.(*session)
		if place = place.Next(); !now.Before(s.expires) {
			t.end(s, &t.stats.Expired)
		}
	}
	return len(t.byKey)
}

// CountByWorker counts the sessions of each worker. A nil table has none.
func (t *Table) CountByWorker() map[kvblock.Worker]int {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now, counts := t.cfg.Clock(), map[kvblock.Worker]int{}
	for _, s := range t.byKey {
		if s.running > 0 || now.Before(s.expires) {
			counts[s.worker]++
		}
	}
	return counts
}
