package router

import (
	"crypto/sha256"

	"kvepp/kvblock"
)

// SessionKey stands for a session, however long its id is.
type SessionKey = sessionKey

// SessionKeyOf returns the key of a session among those of a model.
func SessionKeyOf(model, id string) SessionKey { return keyOf("session", model, id) }

func keyOf(kind, model, id string) (key sessionKey) {
	sum := sha256.New()
	for _, part := range []string{kind, "\x00", model, "\x00", id} {
		sum.Write([]byte(part))
	}
	sum.Sum(key[:0])
	return key
}

// Find returns the worker that a session is bound to.
func (s *Sessions) Find(key SessionKey) (kvblock.Worker, bool) { return s.find(key) }

// SessionLease is one request's hold on its session. The zero value holds none.
type SessionLease struct {
	sessions *Sessions
	session  *session
}

// Hold binds a session to a worker until the lease is released, and TTL beyond. The caller has found the session on the
// worker was, or nowhere if !bound; false if that is so no more.
func (s *Sessions) Hold(key SessionKey, was kvblock.Worker, bound bool, to kvblock.Worker) (SessionLease, bool) {
	e, _ := s.hold(key, was, bound, to, 0)
	return SessionLease{s, e}, e != nil
}

// Release ends the hold. It must be called once.
func (l SessionLease) Release() {
	if l.session != nil {
		l.sessions.release(l.session, false)
	}
}

// End forgets a session.
func (s *Sessions) End(key SessionKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byKey[key]; e != nil {
		s.end(e, &s.stats.Final)
	}
}
