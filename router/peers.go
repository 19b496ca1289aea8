package router

import (
	"math/rand/v2"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// Other replicas of kvepp may send requests to the same workers. The book has copies of their bookings (see
// scoring.Copies). These methods are for the package that receives them.

// peersLookWithin bounds the random time until this replica looks at its queue after a release elsewhere.
const peersLookWithin = 4 * time.Millisecond

// PeersReleased notes that other replicas' bookings released load: requests that wait may go soon. It is cheap if none
// waits. All replicas hear of the same release, and each would send a request on at once. So each looks after a random
// time: it then knows most of what those before it have booked.
func (r *Router) PeersReleased() {
	if !r.anyWaits() || r.looking.Swap(true) {
		return
	}
	time.AfterFunc(rand.N(peersLookWithin), func() {
		r.looking.Store(false)
		r.onRelease()
	})
}

func (r *Router) anyWaits() bool {
	return r.room != nil && r.room.Waiting() > 0 || r.admissions != nil && r.admissions.Waiting() > 0
}

// PeersBooked notes changes of other replicas' bookings. If the index is to assume that a worker holds a prompt after a
// request for it was sent there (Config.Predict), that is so for their requests, too.
func (r *Router) PeersBooked(changes []scoring.Change) {
	if r.cfg.Predict == (Predict{}) || !r.cfg.asksIndex() {
		return
	}
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	byNumber := map[kvblock.Worker]*pool.Worker{}
	for i := range snapshot.Workers {
		byNumber[snapshot.Workers[i].Worker] = &snapshot.Workers[i]
	}
	for i := range changes {
		c := &changes[i]
		w := byNumber[c.Worker]
		if c.Kind != scoring.Booked || w == nil || w.BlockSize != c.BlockSize {
			continue
		}
		life := r.cfg.Predict.lifetime(w)
		for _, chain := range c.Chains {
			if len(chain) > 0 && life != (indexer.Lifetime{}) {
				r.index.Predict(w.Worker, chain, life)
			}
		}
	}
}
