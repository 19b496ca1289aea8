package service

import (
	"container/list"
	"net/http"
	"sync"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
)

// maxSessionID is the longest session id, in bytes. Source: dynamo-kv-router 1.6.1, services::selection::affinity.
const maxSessionID = 256

// leases are the sessions that reservations hold. The zero value is ready.
type leases struct {
	mu     sync.Mutex
	byName map[string]*list.Element // of order
	order  list.List                // of *leased, the oldest first
}

// leased is one reservation's.
type leased struct {
	name string
	router.SessionLease
}

// add keeps a reservation's lease.
func (l *leases) add(name string, lease router.SessionLease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byName[name]; e != nil {
		l.remove(e) // of an earlier reservation of that name, which has expired
	}
	if l.byName == nil {
		l.byName = map[string]*list.Element{}
	}
	l.byName[name] = l.order.PushBack(&leased{name, lease})
}

// release ends a reservation's lease, if it has one.
func (l *leases) release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byName[name]; e != nil {
		l.remove(e)
	}
}

// sweep ends the leases of reservations that have expired, which are the oldest.
func (l *leases) sweep(book *scoring.ActiveSequences) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for e := l.order.Front(); e != nil; e = l.order.Front() {
		if _, active := book.Named(e.Value.(*leased).name); active {
			return
		}
		l.remove(e)
	}
}

// remove ends a lease. The caller holds l.mu.
func (l *leases) remove(e *list.Element) {
	n := l.order.Remove(e).(*leased)
	delete(l.byName, n.name)
	n.Release()
}

// bound is where a request's session is. The zero value is that of a request without one.
type bound struct {
	id     string // of the session
	wanted bool
	key    router.SessionKey
	worker kvblock.Worker
	there  bool // it is bound already
}

// sessionOf finds a request's session; who names a worker has none.
func (s *Selector) sessionOf(g group, id *string) (b bound, err error) {
	if s.cfg.Sessions == nil || id == nil {
		return b, nil
	}
	if err := pool.CheckText(*id); err != nil {
		return b, refuse(http.StatusBadRequest, "session affinity ID: %v", err)
	}
	if len(*id) > maxSessionID {
		return b, refuse(http.StatusBadRequest, "session affinity ID must not exceed %d bytes", maxSessionID)
	}
	s.leases.sweep(s.loadBook)
	b = bound{id: *id, wanted: true, key: router.SessionKeyOf(g.name, *id)}
	b.worker, b.there = s.cfg.Sessions.Find(b.key)
	return b, nil
}

// bind holds the session for a reservation on w, among these workers. If it is bound elsewhere, it is forgotten and the
// reservation refused: whoever comes next begins it anew.
func (s *Selector) bind(b bound, name string, w *pool.Worker, workers []pool.Worker) error {
	if !b.wanted {
		return nil
	}
	if b.there && b.worker != w.Worker {
		s.cfg.Sessions.End(b.key)
		for i := range workers {
			switch at := &workers[i]; {
			case at.Worker != b.worker:
			case at.InstanceID != w.InstanceID:
				return refuse(
					http.StatusBadRequest,
					"session %s is bound to worker %d, not %d",
					b.id,
					at.InstanceID,
					w.InstanceID,
				)
			default:
				return refuse(http.StatusBadRequest, "session %s is bound to DP rank %d, not %d", b.id, at.Rank, w.Rank)
			}
		}
		b.there = false // its worker has left
	}
	// Of two that begin a session at once, on two workers, the later one has none.
	if lease, ok := s.cfg.Sessions.Hold(b.key, b.worker, b.there, w.Worker); ok {
		s.leases.add(name, lease)
	}
	return nil
}
