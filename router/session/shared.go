package session

import (
	"container/list"
	"time"

	"kvepp/kvblock"
)

// Replicas that send requests to the same workers share their sessions: each tells the others what its requests did to
// sessions (Observe), and applies what the others tell (Apply). Two replicas may bind one session at once. Versions
// order all bindings of a session, so that every replica ends with the same one.

// EventKind is what a request did to a session.
type EventKind uint8

// The kinds.
const (
	Bound EventKind = iota + 1 // the session was bound to a worker, as New or Moved
	Used                       // it was used where it is bound
	Ended                      // a request, or the operator, ended it
)

// Event is one use of a session. Each has all fields, so that a table that does not know the session can bind it.
type Event struct {
	Kind    EventKind
	Key     Key
	Worker  kvblock.Worker
	Version Version       // of the binding
	TTL     time.Duration // as of Table.Hold
	Age     time.Duration // since the latest use; 0 outside a snapshot
}

// Version orders the bindings of a session, over all tables that share it. Lamport is one more than every number that
// the binding table had seen; it has nothing to do with the time of day. Of two tables that bind at once, the one with
// the higher Origin wins.
type Version struct{ Lamport, Origin uint64 }

// After reports whether v replaces o.
func (v Version) After(o Version) bool {
	return v.Lamport > o.Lamport || v.Lamport == o.Lamport && v.Origin > o.Origin
}

// MaxAhead is how far a version may be ahead of the table's own number. Numbers grow by one for each binding, so only a
// defective peer is further ahead. To follow it would leave no numbers for others.
const MaxAhead = 1 << 40

// maxEnded bounds the ended sessions that are remembered, so that a use that was told earlier and comes later does not
// open them again.
const maxEnded = 4096

// Applied is what Apply did.
type Applied uint8

// What Apply did.
const (
	Fresh     Applied = iota + 1 // the session was bound, moved or ended
	Refreshed                    // the binding was known; it was used
	Stale                        // a later binding is known, or the session has expired or ended
	Refused                      // the version is further ahead than MaxAhead, or the kind is not known
)

// endedSessions are the sessions that ended last.
type endedSessions struct {
	versions map[Key]Version
	ring     []Key
	next     int
}

func (e *endedSessions) remember(key Key, v Version) {
	if e.versions == nil {
		e.versions, e.ring = map[Key]Version{}, make([]Key, maxEnded)
	}
	if _, known := e.versions[key]; !known {
		delete(e.versions, e.ring[e.next]) // without effect for the zero key of an unused place
		e.ring[e.next] = key
		e.next = (e.next + 1) % maxEnded
	}
	e.versions[key] = v
}

// Observe has f called with each event of this table's own requests, in order. f runs under the table's lock: it must
// not block and must not call the table. The Event is valid only during the call. origin is unique among the tables
// that share sessions, and not 0. Call Observe once, before the first request.
func (t *Table) Observe(origin uint64, f func(*Event)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.origin, t.observer = origin, f
}

// nextVersion returns the version of a new binding. The caller holds t.mu.
func (t *Table) nextVersion() Version {
	t.lamport++
	return Version{t.lamport, t.origin}
}

// tell tells the observer, if there is one. The caller holds t.mu.
func (t *Table) tell(kind EventKind, s *session, now time.Time) {
	if t.observer == nil {
		return
	}
	s.told = now
	if kind == Ended {
		t.ended.remember(s.key, s.version)
	}
	t.event = Event{Kind: kind, Key: s.key, Worker: s.worker, Version: s.version, TTL: s.ttl}
	t.observer(&t.event)
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

// Apply applies an event of another table. A use counts also if a later binding is known.
func (t *Table) Apply(e *Event) Applied {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.Kind < Bound || e.Kind > Ended || e.Version.Lamport > t.lamport && e.Version.Lamport-t.lamport > MaxAhead {
		return Refused
	}
	t.lamport = max(t.lamport, e.Version.Lamport)
	now := t.cfg.Clock()
	s := t.current(e.Key, now)
	if e.Kind == Ended {
		t.ended.remember(e.Key, e.Version)
		if s == nil || s.version.After(e.Version) {
			return Stale
		}
		t.end(s, &t.stats.Final)
		return Fresh
	}
	ttl := t.cfg.TTL
	if e.TTL > 0 {
		ttl = min(e.TTL, MaxTTL)
	}
	used := now.Add(-min(max(e.Age, 0), MaxTTL))
	expires := used.Add(ttl)
	switch {
	case s == nil:
		return t.adopt(e, ttl, used, now)
	case e.Version.After(s.version):
		if s.worker != e.Worker {
			t.stats.MovedByPeers++
		}
		s.worker, s.version, s.ttl = e.Worker, e.Version, ttl
		t.refresh(s, expires)
		return Fresh
	}
	t.refresh(s, expires)
	if e.Version == s.version {
		return Refreshed
	}
	return Stale
}

// adopt binds a session that another table has bound. The caller holds t.mu.
func (t *Table) adopt(e *Event, ttl time.Duration, used, now time.Time) Applied {
	if ended, known := t.ended.versions[e.Key]; known && !e.Version.After(ended) || !now.Before(used.Add(ttl)) {
		return Stale
	}
	oldest := t.idle.Front()
	older := false // than all idle ones here: a snapshot begins with the session that was used last
	if oldest != nil {
		o := oldest.Value.(*session)
		older = !o.expires.Add(-o.ttl).Before(used)
		if older && len(t.byKey) >= t.cfg.Max && now.Before(o.expires) {
			return Stale // evict none that was used since
		}
	}
	t.makeRoom(now)
	s := &session{key: e.Key, worker: e.Worker, ttl: ttl, version: e.Version, expires: used.Add(ttl)}
	t.byKey[e.Key] = s
	if older {
		s.place = t.idle.PushFront(s)
	} else {
		t.moveToBack(s, &t.idle)
	}
	t.stats.ByPeers++
	return Fresh
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

// Snapshot calls begin and then each with every session as a Bound, those that this table adopted too. begin runs under
// the table's lock, each does not. To apply the snapshot and then all events since begin gives the present state.
func (t *Table) Snapshot(begin func(), each func(*Event)) {
	for _, e := range t.bindings(begin) {
		each(&e)
	}
}

// bindings calls begin and returns all sessions, the most recently used first.
func (t *Table) bindings(begin func()) []Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	begin()
	now := t.cfg.Clock()
	events := make([]Event, 0, len(t.byKey))
	for _, sessions := range []*list.List{&t.held, &t.idle} {
		for place := sessions.Back(); place != nil; place = place.Prev() {
			s := place.Value.(*session)
			e := Event{Kind: Bound, Key: s.key, Worker: s.worker, Version: s.version, TTL: s.ttl}
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
