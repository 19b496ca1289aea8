package router

import (
	"math/rand/v2"
	"time"

	"kvepp/indexer"
	"kvepp/scoring"
)

// Other replicas of kvepp may send requests to the same workers. The book has copies of their bookings (see
// scoring.Copies).

// peersLookWithin bounds the random time until this replica looks at its queue after a release elsewhere.
const peersLookWithin = 4 * time.Millisecond

// PeersChanged notes changes of other replicas' bookings. They may have released load: requests that wait may go soon.
// If the index is to assume that a worker holds a prompt after a request for it was sent there (Config.Predict), that
// is so for their requests, too. It is cheap if none waits and the index assumes nothing.
func (r *Router) PeersChanged(changes []scoring.Change) {
	r.lookSoon()
	if len(changes) == 0 || r.cfg.Predict == (Predict{}) || !r.cfg.asksIndex() {
		return
	}
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	for i := range changes {
		c := &changes[i]
		if c.Kind != scoring.Booked || len(c.Chains) == 0 {
			continue
		}
		w := snapshot.Worker(c.Worker)
		if w == nil || w.BlockSize != c.BlockSize {
			continue
		}
		life := r.cfg.lifetime(w)
		for _, chain := range c.Chains {
			if len(chain) > 0 && life != (indexer.Lifetime{}) {
				r.index.Predict(w.Worker, chain, life)
			}
		}
	}
}

// lookSoon looks at the queue after a random time. All replicas hear of the same release, and each would send a request
// on at once. So each looks at a time of its own: it then knows most of what those before it have booked.
func (r *Router) lookSoon() {
	waits := r.room != nil && r.room.Waiting() > 0 || r.admissions != nil && r.admissions.Waiting() > 0
	if !waits || r.looking.Swap(true) {
		return
	}
	time.AfterFunc(rand.N(peersLookWithin), func() {
		r.looking.Store(false)
		r.onRelease()
	})
}
