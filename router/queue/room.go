package queue

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

var (
	// ErrTimeout says that no worker became ready for the request within RoomConfig.Timeout.
	ErrTimeout = errors.New("no worker was ready in time")
	// ErrAway says that none of the workers that may take the request was in the pool within RoomConfig.Hold.
	ErrAway = errors.New("none came while it waited")
	// ErrWouldWait says that every worker is busy, and that the request may not wait.
	ErrWouldWait = errors.New("every worker is busy, and the request may not wait")
	// ErrEnding says that the process ends while the request waits.
	ErrEnding = errors.New("the endpoint picker is shutting down, and this request still waited; try again")
)

// RoomConfig configures how requests wait while every worker that may compute their prompts is busy, or there is none.
type RoomConfig struct {
	// Profiles define when a worker is busy, which request goes next, and how many may wait.
	Profiles *Profiles
	// Bound is how many requests may wait in one line; at least 1.
	Bound int
	// Timeout bounds how long a request waits while every worker is busy. 0: until its client leaves.
	Timeout time.Duration
	// Hold bounds how long a request waits while there is no worker. 0: it does not wait for that.
	Hold time.Duration
}

// State says whether a request can go.
type State int

// The states of a request.
const (
	Ready State = iota // a worker is ready for it; or it would fail: it gets its turn, and fails then
	Busy               // every worker that may take it is busy, as its class defines busy
	Away               // there is no worker that may take it
)

// Judge says which requests can go. It belongs to one Room, which calls it with the room's lock held: one look at a
// time. A Judge must not call the room. If State panics, the request gets its turn.
type Judge[T any] interface {
	// Begin reads the loads. State answers by them until End.
	Begin()
	State(c *Class, value T) State
	End()
}

// Room is a waiting room. It gives requests the turn one at a time: the holder of the turn chooses a worker, books the
// request there, and passes the turn on. So every decision sees all earlier bookings, and no lock is held while it is
// made. A request gets the turn at once unless every worker that may take it is busy, or other requests go before it.
//
// A request calls Enter, then Await unless it has the turn already, and then Pass:
//
//	w, err := room.Enter(entry, value)
//	if err == nil && w != nil {
//		err = room.Await(ctx, w)
//	}
//	if err != nil {
//		return err // it does not have the turn
//	}
//	defer room.Pass() // also after a panic
//	... choose and book ...
//
// Code that ends a booking calls Released.
//
// Requests enter and leave concurrently, under the room's lock, and load is released concurrently. A release cannot be
// missed:
//
//  1. The holder of the turn looks for the next request: the Judge reads the loads.
//  2. A request ends and releases its load. Its goroutine finds the turn taken, and sets stale.
//  3. The holder finds no request that can go by the loads of 1. It sees stale, and looks again instead of giving up
//     the turn.
//
// While no request waits, 2 sets nothing. Therefore the lock is taken before 1: otherwise a request that enters between
// the two would be judged by loads from before the release.
type Room[T any] struct {
	cfg   *RoomConfig
	judge Judge[T]
	every time.Duration // between two looks while requests wait
	began time.Time

	waiting atomic.Int64  // requests in all lines; changed under mu
	ending  chan struct{} // closed by RefuseWaiting
	end     func()

	mu      sync.Mutex // guards all below, the lines, and the judge
	byName  map[string]*line[T]
	lines   []*line[T]   // the same, in the order in which they were made
	next    int          // index in lines of the one that is asked first
	turns   uint64       // how many were given to requests in lines
	direct  []*Waiter[T] // requests that wait for the turn only and stand in no line, in order of arrival
	taken   bool         // some request has the turn
	stale   bool         // load was released after the last look began
	ticking bool
}

// line holds the requests that wait for the same workers: those of one model.
type line[T any] struct {
	name    string
	profile *Profile
	*Queue[*Waiter[T]]
	away  bool      // when last seen, there were no workers, and not only busy ones
	since time.Time // when away changed
	// yielding is since when a free worker is left to another replica; zero: none is.
	yielding time.Time
}

// yieldFor bounds how long a free worker is left to another replica. That one hears of the worker, looks at its queue
// and is heard of within 12 ms, on busy machines later: then both would send it a request.
const yieldFor = 50 * time.Millisecond

// Entry describes a request that enters a Room. The room sets Request.Arrival.
type Entry struct {
	Request
	Line    string   // requests for the same workers share a line
	Profile *Profile // of the line's model; Request.Class is one of its classes
	Workers int      // how many the limits of the class are multiplied by
	// Within is the time until the deadline of its first token; 0: none.
	Within     time.Duration
	MayNotWait bool // refuse the request with ErrWouldWait if every worker is busy
}

// Waiter is a request in a Room.
type Waiter[T any] struct {
	value      T
	line       *line[T]
	item       *Item[*Waiter[T]] // in line; nil: it is one of Room.direct
	class      int               // of the line's profile
	workers    int
	mayNotWait bool
	entered    time.Time
	timeout    time.Duration // while every worker is busy; 0: none
	after      uint64        // without item: once there were this many turns, it goes before requests in lines
	turn       chan struct{} // receives the turn; with refused, only the news of it
	refused    error         // set before turn receives
}

// InLine reports whether the request stands, or stood, in a line. A request that may not wait stands in none.
func (w *Waiter[T]) InLine() bool { return w.item != nil }

// NewRoom returns an empty room. While requests wait, the room looks at them after each interval, even if no load is
// released: workers join, and bookings expire.
func NewRoom[T any](cfg *RoomConfig, judge Judge[T], interval time.Duration) *Room[T] {
	m := &Room[T]{cfg: cfg, judge: judge, every: interval, began: time.Now(), byName: map[string]*line[T]{},
		ending: make(chan struct{})}
	m.end = sync.OnceFunc(func() { close(m.ending) })
	return m
}

// Enter adds a request to its line. If the turn is free, the request that goes next gets it. A nil Waiter without an
// error: that is this request, and the caller has the turn.
//
// A request that may not wait, because of its class or Entry.MayNotWait, enters no line and takes no room there. It is
// judged as soon as no earlier request is ready.
//
// Errors: ErrFull; *LimitError; ErrWouldWait.
//
// Source: dynamo-kv-router 1.6.1, scheduling: queue.
func (m *Room[T]) Enter(e Entry, value T) (*Waiter[T], error) {
	e.Arrival = time.Since(m.began).Seconds()
	if e.Within != 0 {
		e.Deadline = e.Arrival + e.Within.Seconds()
	}
	w := &Waiter[T]{
		value:      value,
		class:      e.Class,
		workers:    e.Workers,
		mayNotWait: e.MayNotWait,
		entered:    time.Now(),
		timeout:    m.cfg.Timeout,
		turn:       make(chan struct{}, 1),
	}
	if b := e.Profile.Bands; b != nil {
		w.timeout = b.of(e.Priority).Timeout
	}
	free, err := m.add(w, &e)
	if err != nil {
		return nil, err
	}
	if free {
		m.Pass()
	}
	select {
	case <-w.turn:
		return nil, w.refused
	default:
		return w, nil
	}
}

// Ahead is [Queue.Ahead] for a request that is about to enter.
func (m *Room[T]) Ahead(e *Entry, t Times) (begins, held float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.byName[e.Line]
	if l == nil || l.profile != e.Profile {
		return t.Soonest, 0
	}
	r, now := e.Request, time.Since(m.began).Seconds()
	r.Deadline = now + e.Within.Seconds()
	return l.Ahead(&r, now, t)
}

// add adds a request to its line, or to those that stand in none. free: the turn was free, and the caller has it now.
func (m *Room[T]) add(w *Waiter[T], e *Entry) (free bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.byName[e.Line]
	if l == nil {
		l = &line[T]{name: e.Line, profile: e.Profile, Queue: New[*Waiter[T]](e.Profile, m.cfg.Bound)}
		m.byName[e.Line] = l
		m.lines = append(m.lines, l)
	}
	if l.profile != e.Profile {
		m.reorder(l, e.Profile)
	}
	w.line = l
	if w.mayNotWait || l.profile.Classes[w.class].Rejects() {
		w.after = m.turns + uint64(m.waiting.Load())
		m.direct = append(m.direct, w)
	} else {
		if w.item, err = l.Push(e.Request, w.workers, w); err != nil {
			return false, err
		}
		m.waiting.Add(1)
	}
	free = !m.taken
	m.taken = true // a worker may be free for the new one
	return free, nil
}

// reorder gives a line another profile, with the same classes. Requests that its limits do not admit are refused. The
// caller holds mu.
func (m *Room[T]) reorder(l *line[T], p *Profile) {
	before := l.Queue
	l.profile, l.Queue = p, New[*Waiter[T]](p, m.cfg.Bound)
	for {
		item := before.Pop(func(*Class, *Item[*Waiter[T]]) bool { return true })
		if item == nil {
			return
		}
		w := item.Value
		if w.item, w.refused = l.Push(item.Request, w.workers, w); w.refused != nil {
			w.item = item // it stood in the line
			m.waiting.Add(-1)
			w.turn <- struct{}{}
		}
	}
}

// Await waits for the turn. With an error the request has left the room and does not have the turn.
//
// Errors: *LimitError; ErrWouldWait; ErrTimeout; ErrAway; ErrEnding; ctx's own.
func (m *Room[T]) Await(ctx context.Context, w *Waiter[T]) error {
	m.keepTicking()
	var late <-chan time.Time
	timer := time.NewTimer(m.shortest(w))
	defer timer.Stop()
	if w.timeout > 0 || m.cfg.Hold > 0 {
		late = timer.C
	}
	var err error
	for err == nil {
		select {
		case <-w.turn:
			return w.refused
		case <-ctx.Done():
			err = ctx.Err()
		case <-m.ending:
			err = ErrEnding
		case <-late:
			var left time.Duration
			if left, err = m.left(w); err == nil {
				timer.Reset(min(left, m.shortest(w)))
			}
		}
	}
	if m.leave(w) {
		return err
	}
	<-w.turn // it has come meanwhile
	if errors.Is(err, ErrTimeout) || errors.Is(err, ErrAway) {
		return w.refused
	}
	if w.refused == nil {
		m.Pass() // the client has gone, or the process ends
	}
	return err
}

// RefuseWaiting refuses with ErrEnding what waits, and what would wait from now on. For a process that ends. A nil Room
// does nothing.
func (m *Room[T]) RefuseWaiting() {
	if m != nil {
		m.end()
	}
}

// shortest returns the shorter of the two times that a request may wait, or the only one.
func (m *Room[T]) shortest(w *Waiter[T]) time.Duration {
	if w.timeout == 0 || m.cfg.Hold == 0 {
		return max(w.timeout, m.cfg.Hold)
	}
	return min(w.timeout, m.cfg.Hold)
}

// left returns how long w may still wait, or the error if it may not. The time begins again when the last worker leaves
// and when the first one comes, but in all a request waits for the longer of the two times at most.
func (m *Room[T]) left(w *Waiter[T]) (time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	limit, err := w.timeout, ErrTimeout
	if w.line.away {
		limit, err = m.cfg.Hold, ErrAway
	}
	if limit == 0 {
		return m.shortest(w), nil
	}
	left := limit - time.Since(w.entered)
	if w.line.since.After(w.entered) {
		left = limit - time.Since(w.line.since)
	}
	if w.timeout > 0 && m.cfg.Hold > 0 {
		left = min(left, max(w.timeout, m.cfg.Hold)-time.Since(w.entered))
	}
	if left > 0 {
		return left, nil
	}
	return 0, err
}

// leave removes a request that waits; false if its turn has come already.
func (m *Room[T]) leave(w *Waiter[T]) bool {
	m.mu.Lock()
	if w.item == nil {
		defer m.mu.Unlock()
		i := slices.Index(m.direct, w)
		if i >= 0 {
			m.direct = slices.Delete(m.direct, i, i+1)
		}
		return i >= 0
	}
	left := w.line.Remove(w.item)
	if left {
		m.waiting.Add(-1)
	}
	m.mu.Unlock()
	if left {
		m.Released() // a request behind it may be able to go
	}
	return left
}

// Released notes that load was released. If a request can go now, it gets the turn.
func (m *Room[T]) Released() {
	if m.waiting.Load() == 0 {
		return
	}
	m.mu.Lock()
	free := !m.taken
	m.taken, m.stale = true, !free
	m.mu.Unlock()
	if free {
		m.Pass()
	}
}

// Pass gives the caller's turn to the request that goes next. Without one the turn is free.
func (m *Room[T]) Pass() {
	for {
		w, again := m.look()
		if w != nil {
			refused := w.refused != nil // read before w has its turn and may go on
			if w.turn <- struct{}{}; !refused {
				return
			}
		} else if !again {
			return
		}
	}
}

// look removes and returns the request that goes next. Without one it gives the turn up, unless load was released
// meanwhile: then again is true.
func (m *Room[T]) look() (w *Waiter[T], again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken = false // a panic below must not block the others
	m.judge.Begin() // under mu: no request joined a line after this
	defer m.judge.End()
	if len(m.direct) > 0 && m.turns >= m.direct[0].after {
		return m.nextDirect(), false
	}
	for range m.lines {
		l, yields := m.lines[m.next], false
		m.next = (m.next + 1) % len(m.lines)
		item := l.Pop(func(c *Class, item *Item[*Waiter[T]]) bool {
			if m.state(c, item.Value) != Ready {
				return false
			}
			own := m.yields(l, item)
			yields = yields || own
			return !own
		})
		if !yields {
			l.yielding = time.Time{}
		}
		if item != nil {
			m.taken = true
			m.turns++
			m.waiting.Add(-1)
			return item.Value, false
		}
	}
	if len(m.direct) > 0 {
		return m.nextDirect(), false
	}
	m.taken, m.stale = m.stale, false
	return nil, m.taken
}

// yields reports whether a request for which a worker is ready leaves it to another replica for now. If the worker is
// still free after yieldFor, what was heard of the others does not hold any more. The caller holds mu.
func (m *Room[T]) yields(l *line[T], item *Item[*Waiter[T]]) bool {
	if !item.Yields() {
		return false
	}
	if l.yielding.IsZero() {
		l.yielding = time.Now()
		time.AfterFunc(yieldFor, m.Released)
	}
	if time.Since(l.yielding) < yieldFor {
		return true
	}
	item.Forget()
	return false
}

// nextDirect removes and returns the first of Room.direct, refused unless a worker is ready for it. The caller holds
// mu, and has seen that there is one.
func (m *Room[T]) nextDirect() *Waiter[T] {
	w := m.direct[0]
	switch m.state(&w.line.profile.Classes[w.class], w) {
	case Away:
		w.refused = ErrAway
	case Busy:
		w.refused = ErrWouldWait
		if !w.mayNotWait {
			w.refused = w.line.Limited(w.class, w.workers)
		}
	}
	m.direct = slices.Delete(m.direct, 0, 1)
	m.taken = true
	return w
}

// state returns the state of w, and notes whether its line has workers. A panic of the Judge counts as Ready: then w's
// own goroutine meets the defect, and not that of another request. The caller holds mu.
func (m *Room[T]) state(c *Class, w *Waiter[T]) (now State) {
	defer func() {
		if recover() != nil {
			now = Ready
		}
	}()
	now = m.judge.State(c, w.value)
	if away := now == Away; now != Ready && away != w.line.away {
		w.line.away, w.line.since = away, time.Now()
	}
	return now
}

// keepTicking starts the regular looks at the lines. They end when no request waits.
func (m *Room[T]) keepTicking() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ticking {
		return
	}
	m.ticking = true
	time.AfterFunc(m.every, func() {
		m.mu.Lock()
		m.ticking = false
		m.mu.Unlock()
		if m.waiting.Load() == 0 {
			return
		}
		m.Released()
		m.keepTicking()
	})
}

// Charge is [Queue.Charge] for a tenant of any line.
func (m *Room[T]) Charge(id Tenant, tokens int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		l.Charge(id, tokens)
	}
}

// Heard is [Queue.Heard] for a tenant of any line.
func (m *Room[T]) Heard(id Tenant, tokens int, turn, waits bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		l.Heard(id, tokens, turn, waits)
	}
}

// Waits is [Queue.Waits] for a tenant of any line.
func (m *Room[T]) Waits(id Tenant) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.lines, func(l *line[T]) bool { return l.Waits(id) })
}

// Tenants returns how many tenants the room knows.
func (m *Room[T]) Tenants() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		n += l.Tenants()
	}
	return n
}

// Waiting returns how many requests wait in lines.
func (m *Room[T]) Waiting() int { return int(m.waiting.Load()) }

// ClassLoad is what waits in one policy class of a line.
type ClassLoad struct {
	Line, Class string
	Away        bool // there is no worker for the line
	Load
}

// Loads returns what waits, by line and class. Lines appear with their first request, and stay.
func (m *Room[T]) Loads() (all []ClassLoad) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		for i := range l.profile.Classes {
			all = append(all, ClassLoad{l.name, l.profile.Classes[i].Name, l.away, l.Load(i)})
		}
	}
	return all
}
