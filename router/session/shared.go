package session

import (
	"container/list"
	"time"

	"kvepp/kvblock"
)

// Replicas that send requests to the same workers share their sessions: each tells the others what its requests did to
// sessions (Observe), and applies what the others tell (Apply). The binding that is heard last counts. If two replicas
// bind a session at once, each may end with the other's binding until the session's next request.

// EventKind is what a request did to a session.
type EventKind uint8

// The kinds.
const (
	Bound EventKind = iota + 1 // the session was bound to a worker, or used where it is bound
	Used                       // a request of it ended, or runs for long
	Ended                      // a request, or the operator, ended it
)

// Event is one use of a session.
type Event struct {
	Kind   EventKind
	Key    Key
	Worker kvblock.Worker
	TTL    time.Duration // as of Table.Hold
	Age    time.Duration // since the latest use; 0 outside a snapshot
}

// Observe has f called with each event of this table's own requests, in order. f runs under the table's lock: it must
// not block and must not call the table. Call Observe once, before the first request.
func (t *Table) Observe(f func(Event)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.observer = f
}

// tell tells the observer, if there is one. The caller holds t.mu.
func (t *Table) tell(kind EventKind, s *session, now time.Time) {
	if t.observer != nil {
		s.told = now
		t.observer(Event{Kind: kind, Key: s.key, Worker: s.worker, TTL: s.ttl})
	}
}

// Refresh tells the observer of the sessions whose requests run for long, so that they do not expire elsewhere. Call it
// every second.
func (t *Table) Refresh() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.observer == nil {
		return
	}
	now := t.cfg.Clock()
	for place := t.held.Front(); place != nil; place = place.Next() {
		if s := place.Value.(*session); now.Sub(s.told) >= s.ttl/3 {
			t.tell(Used, s, now)
		}
	}
}

// Apply applies an event of another table. A binding counts unless the session was used here since; a use lengthens the
// life of a session that is known.
func (t *Table) Apply(e Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Clock()
	s := t.current(e.Key, now)
	ttl := t.cfg.TTL
	if e.TTL > 0 {
		ttl = min(e.TTL, MaxTTL)
	}
	used := now.Add(-min(max(e.Age, 0), MaxTTL))
	switch {
	case e.Kind == Ended && s != nil:
		t.end(s, &t.stats.Final)
	case e.Kind == Used && s != nil:
		t.refresh(s, used.Add(s.ttl))
	case e.Kind != Bound:
	case s == nil:
		t.adopt(e, ttl, used, now)
	case e.Age <= 0 || s.running == 0 && used.After(s.expires.Add(-s.ttl)):
		if s.worker != e.Worker {
			t.stats.MovedByPeers++
		}
		s.worker, s.ttl = e.Worker, ttl
		t.refresh(s, used.Add(ttl))
	}
}

// adopt binds a session that another table has bound. The caller holds t.mu.
func (t *Table) adopt(e Event, ttl time.Duration, used, now time.Time) {
	if !now.Before(used.Add(ttl)) {
		return
	}
	oldest := t.idle.Front()
	older := false // than all idle ones here: a snapshot begins with the session that was used last
	if oldest != nil {
		o := oldest.Value.(*session)
		older = !o.expires.Add(-o.ttl).Before(used)
		if older && len(t.byKey) >= t.cfg.Max && now.Before(o.expires) {
			return // evict none that was used since
		}
	}
	t.makeRoom(now)
	s := &session{key: e.Key, worker: e.Worker, ttl: ttl, expires: used.Add(ttl)}
	t.byKey[e.Key] = s
	if older {
		s.place = t.idle.PushFront(s)
	} else {
		t.moveToBack(s, &t.idle)
	}
	t.stats.ByPeers++
}

// refresh notes that a session was used elsewhere. The caller holds t.mu.
func (t *Table) refresh(s *session, expires time.Time) {
	if s.running > 0 {
		return
	}
	if expires.After(s.expires) {
		s.expires = expires
		t.moveToBack(s, &t.idle)
	}
}

// Snapshot returns every session as a Bound, those that this table adopted too, the most recently used first.
func (t *Table) Snapshot() []Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Clock()
	events := make([]Event, 0, len(t.byKey))
	for _, sessions := range []*list.List{&t.held, &t.idle} {
		for place := sessions.Back(); place != nil; place = place.Prev() {
			s := place.Value.(*session)
			e := Event{Kind: Bound, Key: s.key, Worker: s.worker, TTL: s.ttl}
			if s.running == 0 {
				if e.Age = now.Sub(s.expires.Add(-s.ttl)); e.Age >= s.ttl {
					continue // expired
				}
			}
			events = append(events, e)
		}
	}
	return events
}
