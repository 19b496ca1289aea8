package selector

import (
	"net/http"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/serve/api"
)

// maxSessionID is the longest session id, in bytes. Source: dynamo-kv-router 1.6.1, services::selection::affinity.
const maxSessionID = 256

// sessionBinding is a request's session and its worker. The zero value: the request has no session.
type sessionBinding struct {
	id     string // of the session
	wanted bool
	key    session.Key
	worker kvblock.Worker
	there  bool // it is bound already
}

// sessionOf finds a request's session. A request that names a worker has none.
func (s *Selector) sessionOf(g group, id *string) (b sessionBinding, err error) {
	if s.cfg.Sessions == nil || id == nil {
		return b, nil
	}
	if err := pool.CheckText(*id); err != nil {
		return b, api.Refuse(http.StatusBadRequest, "session affinity ID: %v", err)
	}
	if len(*id) > maxSessionID {
		return b, api.Refuse(http.StatusBadRequest, "session affinity ID must not exceed %d bytes", maxSessionID)
	}
	s.leases.Sweep(func(name string) bool {
		_, active := s.loadBook.Named(name)
		return active
	})
	b = sessionBinding{id: *id, wanted: true, key: session.KeyOf(g.name, *id)}
	b.worker, b.there = s.cfg.Sessions.Find(b.key)
	return b, nil
}

// bind binds the session to w for a reservation; snapshot has the current workers. If the session is bound to another
// worker, bind removes the binding and refuses the reservation. The next request then binds the session again.
func (s *Selector) bind(b sessionBinding, name string, w *pool.Worker, workers []pool.Worker) error {
	if !b.wanted {
		return nil
	}
	if b.there && b.worker != w.Worker {
		s.cfg.Sessions.End(b.key)
		for i := range workers {
			switch at := &workers[i]; {
			case at.Worker != b.worker:
			case at.InstanceID != w.InstanceID:
				return api.Refuse(http.StatusBadRequest,
					"session %s is bound to worker %d, not %d", b.id, at.InstanceID, w.InstanceID)
			default:
				return api.Refuse(http.StatusBadRequest, "session %s is bound to DP rank %d, not %d", b.id, at.Rank,
					w.Rank)
			}
		}
		b.there = false // its worker has left the pool
	}
	// If two requests bind a session to two workers at the same time, the later one goes without session.
	if lease, outcome := s.cfg.Sessions.Hold(b.key, b.worker, b.there, w.Worker, 0); outcome != "" {
		s.leases.Add(name, lease)
	}
	return nil
}
