package router

import (
	"fmt"
	"hash/fnv"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/queue"
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
	waits      atomic.Pointer[[]Waits]

	mu      sync.Mutex
	rest    *time.Timer // looks at what is left; guarded by mu
	resting atomic.Bool // that look is planned
}

// Waits is what waits at one replica.
type Waits struct {
	Since   time.Time // when the request that has waited longest began to wait; zero: none waits
	Classes []ClassWait
}

// ClassWait is what waits in a policy class of a model.
type ClassWait struct {
	Class         uint64 // identifies model and class; the same at all replicas
	Since         time.Time
	Quantum, Cost int // in tokens: of the class, and of the work for its oldest request
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
// have booked. See placeOf for the order. The owner of the booking looks first, at its release, unless it comes later
// in this order. After all, each looks at what is left.
func (r *Router) PeersReleased() {
	if r.anyWaits() {
		p := r.place()
		r.lookAfter(time.Duration(p.before+1)*r.turn(), p)
	}
}

func (r *Router) anyWaits() bool {
	return r.room != nil && r.room.Waiting() > 0 || r.admissions != nil && r.admissions.Waiting() > 0
}

// turn is the time between the looks of two replicas.
func (r *Router) turn() time.Duration {
	return min(max(2*time.Duration(r.peers.late.Load()), leastTurn), mostTurn)
}

// place is when a replica looks after a release.
type place struct {
	before int    // how many replicas look before it
	seed   uint64 // of the order of classes
	known  bool   // it is known what waits elsewhere
	others bool   // requests wait elsewhere
	// byClass: the replica looks at the requests of one class, see firstClass; otherwise at all.
	byClass bool
}

// place returns this replica's place after the latest release.
func (r *Router) place() place {
	var waits []Waits
	if all := r.peers.waits.Load(); all != nil {
		waits = *all
	}
	return placeOf(waits, r.peers.released.Load(), int(r.peers.number.Load()), int(r.peers.of.Load()))
}

// placeOf returns the place of a replica. seed is the number of the booking that released load. All replicas compute
// the same places from the same numbers.
//
// An order of the classes in which requests wait anywhere is drawn from the seed: the chance of a class to be first is
// its quantum by the cost of its oldest request, as with the turns of one queue. A replica's class is the first one in
// which requests wait there. Of two replicas with the same class, the one whose oldest request of the class has waited
// longer looks first. Replicas where none waits come last, in an order that is drawn, too.
//
// If a replica does not tell its classes, the one whose oldest request of all has waited longest looks first.
func placeOf(waits []Waits, seed uint64, number, of int) place {
	p := place{before: turnOf(seed, number, of), seed: seed}
	if len(waits) != of || number >= of {
		return p
	}
	p.known, p.byClass = true, true
	holders := map[uint64]ClassWait{} // by class: what has waited longest
	for i := range waits {
		if !waits[i].Since.IsZero() {
			p.others = p.others || i != number
			p.byClass = p.byClass && len(waits[i].Classes) > 0
		}
		for _, c := range waits[i].Classes {
			if was, known := holders[c.Class]; !known || c.Since.Before(was.Since) {
				holders[c.Class] = c
			}
		}
	}
	p.byClass = p.byClass && p.others
	// firstOf returns a replica's class as its place in the order of classes, and since when its oldest request waits.
	firstOf := func(replica int) (at float64, since time.Time) {
		w := &waits[replica]
		if at = math.Inf(1); w.Since.IsZero() {
			return at, time.Time{}
		}
		if !p.byClass {
			return 0, w.Since
		}
		for _, c := range w.Classes {
			holder := holders[c.Class]
			if x := holder.drawn(seed); x < at {
				at, since = x, c.Since
			}
		}
		return at, since
	}
	at, since := firstOf(number)
	before := 0
	for i := range waits {
		if i == number {
			continue
		}
		other, otherSince := firstOf(i)
		earlier := other < at
		if other == at {
			switch c := otherSince.Compare(since); {
			case math.IsInf(at, 1):
				earlier = turnOf(seed, i, of) < p.before
			case c == 0:
				earlier = i < number
			default:
				earlier = c < 0
			}
		}
		if earlier {
			before++
		}
	}
	p.before = before
	return p
}

// drawn returns the place of a class in the order of classes: the first of exponentially distributed times. It is
// finite.
func (c *ClassWait) drawn(seed uint64) float64 {
	u := (float64(mix(seed, c.Class)>>11) + 0.5) / (1 << 53) // between 0 and 1
	return -math.Log(u) * float64(max(c.Cost, 1)) / float64(max(c.Quantum, 1))
}

// lookAfter looks at the requests that wait after a time, unless a look is planned already.
func (r *Router) lookAfter(d time.Duration, p place) {
	if r.peers.pending.Swap(true) {
		return
	}
	time.AfterFunc(d, func() {
		r.peers.pending.Store(false)
		r.look(p, time.Duration(r.peers.of.Load())*r.turn())
	})
}

// look looks at the requests that wait, as the replica's place says. rest is the time until each replica has had its
// turn.
func (r *Router) look(p place, rest time.Duration) {
	if !p.byClass {
		r.onRelease()
		return
	}
	r.lookAtFirstClass(p.seed)
	r.peers.mu.Lock()
	defer r.peers.mu.Unlock()
	r.peers.resting.Store(true)
	if r.peers.rest == nil {
		r.peers.rest = time.AfterFunc(rest, r.lookAtRest)
		return
	}
	r.peers.rest.Reset(rest) // later releases are shared out first
}

func (r *Router) lookAtRest() {
	r.peers.resting.Store(false)
	r.onRelease()
}

// ticked looks at the requests that wait in a room, unless a look is planned: it would come before this replica's turn.
func (r *Router) ticked(released func()) func() {
	return func() {
		if !r.peers.pending.Load() && !r.peers.resting.Load() {
			released()
		}
	}
}

// lookAtFirstClass looks at the requests of the class that is first in the order drawn from the seed, of those in which
// requests wait here.
func (r *Router) lookAtFirstClass(seed uint64) {
	first, chosen := math.Inf(1), queue.ClassWait{}
	held := false // for admission
	for i, room := range r.classWaits() {
		for _, w := range room {
			c := classWaitOf(i == 1, &w)
			if x := c.drawn(seed); x < first {
				first, chosen, held = x, w, i == 1
			}
		}
	}
	only := func(line string, c *queue.Class) bool { return line == chosen.Line && c.Name == chosen.Class }
	switch {
	case math.IsInf(first, 1): // they have gone
	case held:
		r.admissions.ReleasedFor(only)
	default:
		r.room.ReleasedFor(only)
	}
}

// classWaits returns what waits for a worker that is not busy, and what waits for admission.
func (r *Router) classWaits() (all [2][]queue.ClassWait) {
	if r.room != nil {
		all[0] = r.room.Waits(nil)
	}
	if r.admissions != nil {
		all[1] = r.admissions.Waits(nil)
	}
	return all
}

// classWaitOf returns what peers know of a class. held: its requests wait for admission.
func classWaitOf(held bool, w *queue.ClassWait) ClassWait {
	h := fnv.New64a()
	fmt.Fprintf(h, "%t\x00%s\x00%s", held, w.Line, w.Class)
	return ClassWait{Class: h.Sum64(), Since: w.Since, Quantum: w.Quantum, Cost: w.Cost}
}

// ownReleased looks at the requests that wait, after a booking of this replica released load. If another replica's
// requests come before its own, it looks later.
func (r *Router) ownReleased(booking uint64) {
	if r.peers.waits.Load() == nil {
		r.onRelease()
		return
	}
	r.peers.released.Store(booking)
	if !r.anyWaits() {
		return
	}
	late, turn := time.Duration(r.peers.late.Load()), r.turn()
	switch p := r.place(); {
	case !p.known || !p.others:
		r.onRelease()
	case p.before == 0:
		r.look(p, late+time.Duration(r.peers.of.Load()+1)*turn)
	default:
		r.lookAfter(late+time.Duration(p.before+1)*turn, p)
	}
}

// SetPeersWaits says what waits at each replica, by its number as of SetPeers: as all have been told it, this one's own
// part, too. nil: not known. waits must not change after the call.
func (r *Router) SetPeersWaits(waits []Waits) {
	if waits == nil {
		r.peers.waits.Store(nil)
		return
	}
	r.peers.waits.Store(&waits)
}

// Waits returns what waits here, and how many requests these are.
func (r *Router) Waits() (all Waits, requests int) {
	for i, room := range r.classWaits() {
		for _, w := range room {
			all.Classes = append(all.Classes, classWaitOf(i == 1, &w))
			if requests += w.Requests; all.Since.IsZero() || w.Since.Before(all.Since) {
				all.Since = w.Since
			}
		}
	}
	return all, requests
}

// turnOf returns the place of a replica, from 0, in the order in which all look after the release of a booking.
func turnOf(booking uint64, number, of int) (place int) {
	own := mix(booking, uint64(number))
	for replica := range of {
		if x := mix(booking, uint64(replica)); x < own || x == own && replica < number {
			place++
		}
	}
	return place
}

// mix returns a number that is as good as drawn from two others.
func mix(a, b uint64) uint64 {
	x := (a+1)*0x9e3779b97f4a7c15 ^ (b+1)*0xd6e8feb86659fd93
	x ^= x >> 32
	x *= 0x9fb21c651e98df25
	return x ^ x>>29
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

// SetPeers says how late this replica knows of the others' bookings. of is how many replicas there are with this one,
// and number, from 0, is this one's place in an order of them that is the same for all. 0 of: there are no others. Call
// it a few times a second.
func (r *Router) SetPeers(staleness time.Duration, number, of int) {
	r.peers.number.Store(int64(number))
	r.peers.of.Store(int64(of))
	r.peers.late.Store(int64(staleness))
	r.book.SetPeersStaleness(staleness)
}
