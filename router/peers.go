package router

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// Other replicas of kvepp may send requests to the same workers. The book has copies of their bookings (see
// scoring.Copies). These methods are for cmd/kvepp, which receives them.

// peers is what the router knows of the other replicas.
type peers struct {
	number, of atomic.Int64  // as of SetPeers
	late       atomic.Int64  // nanoseconds until a booking is known elsewhere
	released   atomic.Uint64 // number of the booking that released load last
	pending    atomic.Bool   // a look at the requests that wait is planned
	waits      atomic.Pointer[[]time.Time]
}

// Between the looks of two replicas lies at least twice the time until a booking is known elsewhere, within limits.
const (
	leastTurn = time.Millisecond
	mostTurn  = 50 * time.Millisecond
)

// PeersReleased notes that other replicas' bookings released load: requests that wait may go soon. It is cheap if none
// waits.
//
// All replicas hear of the same release. If each sent a request on at once, the worker would get as many as there are
// replicas. So they look one after the other, in an order that is the same everywhere: each sees what those before it
// have booked. The replica whose oldest request has waited longest looks first; those where none is known to wait
// follow, in an order that is drawn from the number of the booking. The owner of the booking looks first, at its
// release, unless another one has an older request.
func (r *Router) PeersReleased() {
	if (r.room == nil || r.room.Waiting() == 0) && (r.admissions == nil || r.admissions.Waiting() == 0) {
		return
	}
	place, _ := r.place()
	r.lookAfter(time.Duration(place+1) * r.turn())
}

// turn is the time between the looks of two replicas.
func (r *Router) turn() time.Duration {
	return min(max(2*time.Duration(r.peers.late.Load()), leastTurn), mostTurn)
}

// place returns this replica's place, from 0, in the order in which all look after a release. older: another replica
// has a request that has waited longer than all that wait here.
func (r *Router) place() (place int, older bool) {
	number, of := int(r.peers.number.Load()), int(r.peers.of.Load())
	drawn := turnOf(r.peers.released.Load(), number, of)
	waits := r.peers.waits.Load()
	if waits == nil || len(*waits) != of || number >= of {
		return drawn, false
	}
	own := (*waits)[number]
	for replica, since := range *waits {
		switch {
		case replica == number:
		case since.IsZero() && own.IsZero():
			if turnOf(r.peers.released.Load(), replica, of) < drawn {
				place++
			}
		case own.IsZero() && !since.IsZero(), !since.IsZero() && since.Before(own),
			since.Equal(own) && replica < number:
			place++
			older = true
		}
	}
	return place, older
}

// lookAfter looks at the requests that wait after a time, unless a look is planned already.
func (r *Router) lookAfter(d time.Duration) {
	if r.peers.pending.Swap(true) {
		return
	}
	time.AfterFunc(d, func() {
		r.peers.pending.Store(false)
		r.onRelease()
	})
}

// ownReleased looks at the requests that wait, after a booking of this replica released load. A replica with an older
// request looks first.
func (r *Router) ownReleased() {
	if r.peers.waits.Load() != nil {
		if place, older := r.place(); older {
			r.lookAfter(time.Duration(r.peers.late.Load()) + time.Duration(place+1)*r.turn())
			return
		}
	}
	r.onRelease()
}

// SetPeersWaits says since when the oldest request waits at each replica, by its number as of SetPeers: as all have
// been told it, this one's own part, too. The zero time: none waits there. nil: not known. waits must not change after
// the call.
func (r *Router) SetPeersWaits(waits []time.Time) {
	if waits == nil {
		r.peers.waits.Store(nil)
		return
	}
	r.peers.waits.Store(&waits)
}

// Oldest returns since when the oldest request waits for its turn, and how many wait; 0: none does.
func (r *Router) Oldest() (since time.Time, waiting int) {
	if r.room != nil {
		since, waiting = r.room.Oldest()
	}
	if r.admissions != nil {
		if at, n := r.admissions.Oldest(); n > 0 {
			if waiting += n; since.IsZero() || at.Before(since) {
				since = at
			}
		}
	}
	return since, waiting
}

// turnOf returns the place of a replica, from 0, in the order in which all look after the release of a booking.
func turnOf(booking uint64, number, of int) (place int) {
	draw := func(replica int) uint64 {
		x := (booking+1)*0x9e3779b97f4a7c15 ^ (uint64(replica)+1)*0xd6e8feb86659fd93
		x ^= x >> 32
		return x * 0x9fb21c651e98df25
	}
	own := draw(number)
	for replica := range of {
		if x := draw(replica); x < own || x == own && replica < number {
			place++
		}
	}
	return place
}

// PeersBooked notes changes of other replicas' bookings. If the index is to assume that a worker holds a prompt after a
// request for it was sent there (Config.Predict), that is so for their requests, too.
func (r *Router) PeersBooked(changes []scoring.Change) {
	for i := len(changes) - 1; i >= 0; i-- {
		switch changes[i].Kind {
		case scoring.Freed, scoring.PrefillDone, scoring.PrefillReleased:
			r.peers.released.Store(changes[i].Number)
			i = 0
		}
	}
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

// SetPeers says what is known of the other replicas: how many bookings a second they make, and how late this one knows
// of them. of is how many replicas there are with this one, and number, from 0, is this one's place in an order of them
// that is the same for all. 0 of: there are no others. Call it a few times a second.
func (r *Router) SetPeers(rate float64, staleness time.Duration, number, of int) {
	r.peers.number.Store(int64(number))
	r.peers.of.Store(int64(of))
	r.peers.late.Store(int64(staleness))
	peers := scoring.Peers{Rate: rate, Staleness: staleness}
	if of > 1 && number >= 0 && number < of {
		peers.Share = r.share(number, of)
	}
	r.book.SetPeers(peers)
}

// share returns the workers that a replica prefers, see scoring.Peers. Replicas number workers differently, so that the
// order is by name; each replica gets its part of each model's workers and of each role.
func (r *Router) share(number, of int) []bool {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	order := make([]*pool.Worker, len(snapshot.Workers))
	highest := kvblock.Worker(0)
	for i := range snapshot.Workers {
		order[i] = &snapshot.Workers[i]
		highest = max(highest, order[i].Worker)
	}
	slices.SortFunc(order, func(a, b *pool.Worker) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Role, b.Role), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.Rank, b.Rank))
	})
	share := make([]bool, highest+1)
	for i := number; i < len(order); i += of {
		share[order[i].Worker] = true
	}
	return share
}
