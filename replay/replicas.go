package replay

import (
	"math/rand/v2"
	"time"

	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// maxReplicas bounds Config.Replicas.
const maxReplicas = 64

// replica is one of the routers that send requests to the same engines. Each request arrives at one of them, drawn at
// random. A replica has its own load book, queue and sessions; the index is the same for all, because each replica
// hears the KV events of every engine.
type replica struct {
	number   int
	book     *scoring.ActiveSequences
	queue    *queue.Queue[*flight] // nil: without
	sessions *session.Table        // nil: sessions are not bound
	copies   []*scoring.Copies     // by replica, of its bookings; nil: its own, and if nothing is shared
	told     []news                // what the others have not heard yet, in order
}

// news is one change of a replica's book, or one event of its sessions.
type news struct {
	change scoring.Change
	event  session.Event
}

// newReplicas makes the replicas.
func (s *Simulation) newReplicas() {
	n := max(s.cfg.Replicas, 1)
	s.draws = rand.New(rand.NewPCG(s.cfg.Seed, 0x7265706c6963))
	for i := range n {
		r := &replica{number: i, book: scoring.NewActiveSequences(), copies: make([]*scoring.Copies, n)}
		r.book.Prefill = s.cfg.Prefill
		r.book.Clock = func() time.Duration { return s.now }
		if s.cfg.Queue != nil {
			r.queue = queue.New[*flight](s.cfg.Queue, max(s.cfg.QueueBound, 1))
		}
		if s.cfg.SessionTTL > 0 {
			r.sessions = session.NewTable(session.Config{
				TTL:   s.cfg.SessionTTL,
				Soft:  s.cfg.SessionSoft,
				Clock: func() time.Time { return time.Unix(0, 0).Add(s.now) },
			})
		}
		s.replicas = append(s.replicas, r)
	}
	if n == 1 || s.cfg.Unshared {
		return
	}
	for _, r := range s.replicas {
		r.book.SetPeersStaleness(s.cfg.ReplicaDelay)
		r.book.Observe(func(c *scoring.Change) { s.tell(r, news{change: *c}) }) // chains do not change in a replay
		if r.sessions != nil {
			r.sessions.Observe(func(e session.Event) { s.tell(r, news{event: e}) })
		}
		for i := range s.replicas {
			if i != r.number {
				r.copies[i] = r.book.NewCopies()
			}
		}
	}
}

// via returns the replica that a request arrives at.
func (s *Simulation) via() *replica {
	if len(s.replicas) == 1 {
		return s.replicas[0]
	}
	return s.replicas[s.draws.IntN(len(s.replicas))]
}

// tell plans the time when the other replicas hear news of r.
func (s *Simulation) tell(r *replica, n news) {
	r.told = append(r.told, n)
	s.at(s.now+s.cfg.ReplicaDelay, event{what: heard, worker: r.number})
}

// hear has the other replicas hear the oldest news of one.
func (s *Simulation) hear(of int) {
	teller := s.replicas[of]
	n := teller.told[0]
	teller.told[0] = news{}
	teller.told = teller.told[1:]
	for _, r := range s.replicas {
		switch {
		case r == teller:
		case n.event.Kind != 0:
			r.sessions.Apply(n.event)
		default:
			r.copies[of].Apply([]scoring.Change{n.change})
			if n.change.Kind != scoring.Booked {
				s.serveQueue(r)
			}
		}
	}
}
