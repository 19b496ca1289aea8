package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/pool"
	"kvepp/queue"
	"kvepp/scoring"
)

var (
	// ErrQueueFull says that every worker is busy, and that the queue, or the request's policy class in it, has reached
	// its limit.
	ErrQueueFull = errors.New("every worker is busy, and too many requests are waiting already; try again later")
	// ErrShed says that every worker is busy, and that the request's objective has a priority below 0.
	ErrShed = errors.New("every worker is busy, and requests of this objective do not wait; try again later")
	// ErrQueueTimeout says that no worker became ready for the request within Queue.Timeout.
	ErrQueueTimeout = errors.New("no worker was ready for this request in time; try again later")
)

// Queue configures how requests wait while every worker that may compute their prompts is busy.
type Queue struct {
	// Profiles define when a worker is busy, which request goes next, and how many may wait.
	Profiles *queue.Profiles
	// Bound is how many requests may wait for the workers of one model; at least 1.
	Bound int
	// Timeout bounds how long a request waits. 0: until its client leaves.
	Timeout time.Duration
}

// How often waiting requests are looked at although no load was released: workers join, and bookings expire. With a
// linear prefill model, workers become ready as time passes.
const (
	tick       = time.Second
	tickLinear = 100 * time.Millisecond
)

// turnstile lets requests be decided one at a time, in the queue's order. With a queue every request passes through it,
// so that all get their turn.
//
// The holder of the turn reads the loads and picks the request that goes next. It hands the turn to that request, which
// books a worker and picks again. So every decision sees all earlier bookings, and no lock is held while it is made.
//
// Two things happen concurrently: requests are added and leave, under mu; and load is released. A release cannot be
// missed:
//
//  1. The holder of the turn reads the loads.
//  2. A request ends and releases its load. Its goroutine finds the turn taken, and sets stale.
//  3. The holder finds no request that can go by the loads of 1. It sees stale, and goes back to 1 instead of giving up
//     the turn.
//
// While no request waits, 2 sets nothing. Therefore mu is locked before 1: otherwise a request that is added between
// the two would be judged by loads from before the release.
//
// `kvepp select` has another waiting room, internal/api/selector/waiting.go, over the same package queue. There the
// goroutine that releases load decides for the selections that wait, under the lock of their group's line. Here a
// request is decided by its own goroutine and without a lock, because its decision is longer: it matches, retries, and
// may book two legs. To join the two would change when select answers, or add a lock here.
type turnstile struct {
	length atomic.Int64 // requests in all lines; changed under mu

	mu      sync.Mutex // guards all below, and the lines
	byModel map[string]*line
	lines   []*line   // the same, in the order in which they were made
	next    int       // index in lines of the one that is asked first
	turns   uint64    // how many were given to requests in lines
	direct  []*waiter // requests that wait for the turn only and stand in no line, in order of arrival
	taken   bool      // some request has the turn
	stale   bool      // load was released after the holder of the turn read the loads
	ticking bool

	began time.Time
}

// line is the queue of one model's workers.
type line struct {
	model   string // a label's
	profile *queue.Profile
	*queue.Queue[*waiter]
}

// waiter is a request in the turnstile.
type waiter struct {
	req     *Request
	prompt  *prompt
	line    *line
	item    *queue.Item[*waiter] // in line; nil: it is one of turnstile.direct
	class   int                  // of the line's profile
	after   uint64               // without item: once there were this many turns, it goes before requests in lines
	workers int                  // how many have its model
	turn    chan struct{}        // receives the turn; with err, only the news of it
	err     error                // why the request is refused; set before turn receives
}

func newTurnstile() *turnstile { return &turnstile{byModel: map[string]*line{}, began: time.Now()} }

// decide waits for the request's turn and chooses for it. The turn comes at once unless every worker that may take the
// request is busy or others wait before it. waited is the time in a line.
//
// Errors: choose's; ErrQueueFull; ErrQueueTimeout; ErrShed; ctx's own.
func (r *Router) decide(
	ctx context.Context,
	sc *scratch,
	req *Request,
	p *prompt,
) (route *Route, waited time.Duration, err error) {
	snapshot := r.pool.Acquire()
	if r.turnstile == nil {
		defer snapshot.Release()
		route, err = r.choose(sc, snapshot, req, p)
		return route, 0, err
	}
	w, err := r.enter(sc, snapshot, req, p)
	if err != nil {
		snapshot.Release()
		return nil, 0, err
	}
	select {
	case <-w.turn:
	default:
		snapshot.Release() // do not hold it while waiting: it keeps the numbers of workers that left
		from := time.Now()
		err = r.await(ctx, w)
		if w.item != nil {
			waited = time.Since(from)
			r.metrics.QueueWait(waited)
			sc.span.Phase(spanQueue, from, from.Add(waited))
		}
		if err != nil {
			return nil, waited, err
		}
		snapshot = r.pool.Acquire()
		r.rematch(sc)
	}
	defer snapshot.Release()
	if err := w.err; err != nil {
		return nil, waited, err
	}
	defer r.advance() // also after an error or a panic
	route, err = r.choose(sc, snapshot, req, p)
	return route, waited, err
}

// enter adds a request to the line of its model. If the turn is free, it hands the turn to the request that goes next.
//
// A request that is refused where others would wait, by its class or its objective, enters no line and takes no room
// there. It is judged as soon as no earlier request is ready.
//
// Source: dynamo-kv-router 1.6.1, scheduling: queue.
func (r *Router) enter(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prompt) (*waiter, error) {
	t := r.exclusiveTarget(p)
	if err := r.gather(sc, snapshot, req, p, t, nil); err != nil {
		return nil, err
	}
	q := r.turnstile
	name := r.lineName(sc, p.model)
	profile, _ := r.cfg.Queue.Profiles.Of(name)
	entry := queue.Request{
		Lane:           queue.Any,
		Tokens:         p.isl,
		CachedTokens:   r.bestCached(sc, p),
		Arrival:        time.Since(q.began).Seconds(),
		Jump:           jump(p),
		StrictPriority: p.hints.StrictPriority,
	}
	entry.Class = profile.Class(p.hints.PolicyClass, max(entry.Tokens-entry.CachedTokens, 0))
	if p.pins.Given() || t.bound && len(sc.prompters()) == 1 {
		entry.Lane = int(sc.prompters()[0].Worker)
	}
	held := *p // a copy, so that p stays on the stack of requests that never wait
	w := &waiter{
		req:     req,
		prompt:  &held,
		class:   entry.Class,
		workers: prompterEndpoints(snapshot, p.model),
		turn:    make(chan struct{}, 1),
	}

	q.mu.Lock()
	l := q.byModel[name]
	if l == nil {
		l = &line{cmp.Or(name, otherModels), profile, queue.New[*waiter](profile, r.cfg.Queue.Bound)}
		q.byModel[name] = l
		q.lines = append(q.lines, l)
	}
	w.line = l
	if p.priority < 0 || profile.Classes[entry.Class].Rejects() {
		w.after = q.turns + uint64(q.length.Load())
		q.direct = append(q.direct, w)
	} else {
		item, err := l.Push(entry, w.workers, w)
		if err != nil {
			q.mu.Unlock()
			r.observeLimit(l, err)
			return nil, fmt.Errorf("%w: %w", ErrQueueFull, err)
		}
		w.item = item
		q.length.Add(1)
	}
	mine := !q.taken
	q.taken = true
	q.mu.Unlock()
	if mine {
		r.advance()
	}
	return w, nil
}

// lineName returns the model's name if the operator or a worker gave it, else "": all other names share one line, so
// that clients cannot create lines.
func (r *Router) lineName(sc *scratch, model string) string {
	if _, own := r.cfg.Queue.Profiles.Of(model); own || r.cfg.names(model) || sc.prompters()[0].Model == model {
		return model
	}
	return ""
}

// jump is how far a request's priority lifts it in its class. Source: dynamo-llm 1.6.1, preprocessor.
func jump(p *prompt) float64 {
	if p.hints.Priority != nil {
		return max(float64(*p.hints.Priority), 0)
	}
	return max(p.hints.LatencySensitivity, 0)
}

// prompterEndpoints counts the endpoints that compute prompts of a model.
func prompterEndpoints(s *pool.Snapshot, model string) (n int) {
	var last *pool.Endpoint
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Endpoint != last && w.Role != pool.Decode && w.Role != pool.Encode &&
			(model == "" || w.Model == "" || w.Model == model) {
			n++
		}
		last = w.Endpoint
	}
	return n
}

// bestCached returns the most tokens of the prompt that a candidate has cached.
func (r *Router) bestCached(sc *scratch, p *prompt) (most int) {
	if p.tokens == nil {
		return 0
	}
	candidates := sc.prompters()
	r.match(sc, candidates, p)
	for i := range candidates {
		w := &candidates[i]
		if v := sc.variantOf(w); v != nil {
			o := v.overlapOf(w.Worker)
			most = max(most, sc.pricing.CachedTokens(&scoring.Terms{BlockSize: w.BlockSize, ISLTokens: p.isl,
				DeviceBlocks: int(o.device), HostBlocks: int(o.host), DiskBlocks: int(o.disk)}))
		}
	}
	return most
}

// await waits for the turn. With an error the request has left the turnstile.
func (r *Router) await(ctx context.Context, w *waiter) (err error) {
	r.turnstile.keepTicking(r)
	var late <-chan time.Time
	if timeout := r.cfg.Queue.Timeout; timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-w.turn:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-late:
		err = ErrQueueTimeout
	}
	if r.leave(w) {
		return err
	}
	<-w.turn // it has come meanwhile
	if errors.Is(err, ErrQueueTimeout) {
		return nil
	}
	if w.err == nil {
		r.advance() // the client has gone: pass the turn on
	}
	return err
}

// leave removes a request that waits; false if its turn has come already.
func (r *Router) leave(w *waiter) bool {
	q := r.turnstile
	q.mu.Lock()
	if w.item == nil {
		defer q.mu.Unlock()
		i := slices.Index(q.direct, w)
		if i >= 0 {
			q.direct = slices.Delete(q.direct, i, i+1)
		}
		return i >= 0
	}
	left := w.line.Remove(w.item)
	if left {
		q.length.Add(-1)
	}
	q.mu.Unlock()
	if left {
		r.released() // a request behind it may be able to go
	}
	return left
}

// released notes that load was released.
func (r *Router) released() {
	q := r.turnstile
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	mine := !q.taken
	q.taken, q.stale = true, !mine
	q.mu.Unlock()
	if mine {
		r.advance()
	}
}

// advance passes the caller's turn on to the request that goes next. Without one it gives the turn up.
func (r *Router) advance() {
	sc := r.takeScratch(nil)
	defer r.putScratch(sc)
	for {
		w, more := r.nextWaiter(sc)
		if w != nil {
			refused := w.err != nil // read before w has its turn and may go on
			if w.turn <- struct{}{}; !refused {
				return
			}
		} else if !more {
			return
		}
	}
}

// nextWaiter removes and returns the request that goes next. Without one it gives the turn up, unless load was released
// meanwhile: then more is true.
func (r *Router) nextWaiter(sc *scratch) (w *waiter, more bool) {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	q := r.turnstile
	q.mu.Lock()
	defer q.mu.Unlock()
	sc.loads = r.book.Loads(sc.loads[:0]) // under mu: no request joined a line after this
	q.taken = false                       // a panic below must not block the others
	if len(q.direct) > 0 && q.turns >= q.direct[0].after {
		return r.nextDirect(sc, snapshot), false
	}
	ready := func(c *queue.Class, item *queue.Item[*waiter]) bool { return !r.allBusy(sc, snapshot, c, item.Value) }
	for range q.lines {
		l := q.lines[q.next]
		q.next = (q.next + 1) % len(q.lines)
		if item := l.Pop(ready); item != nil {
			q.taken = true
			q.turns++
			q.length.Add(-1)
			return item.Value, false
		}
	}
	if len(q.direct) > 0 {
		return r.nextDirect(sc, snapshot), false
	}
	q.taken, q.stale = q.stale, false
	return nil, q.taken
}

// nextDirect removes and returns the first of turnstile.direct, with an error unless a worker is ready for it. The
// caller holds turnstile.mu, and has seen that there is one.
func (r *Router) nextDirect(sc *scratch, snapshot *pool.Snapshot) *waiter {
	q := r.turnstile
	w := q.direct[0]
	if r.allBusy(sc, snapshot, &w.line.profile.Classes[w.class], w) {
		if w.err = ErrShed; w.prompt.priority >= 0 {
			err := w.line.Limited(w.class, w.workers)
			r.observeLimit(w.line, err)
			w.err = fmt.Errorf("%w: %w", ErrQueueFull, err)
		}
	}
	q.direct = slices.Delete(q.direct, 0, 1)
	q.taken = true
	return w
}

// allBusy reports whether every worker that may compute the prompt is busy, by sc.loads. Busy thresholds play no part
// here: they are compared when it is the request's turn.
func (r *Router) allBusy(sc *scratch, snapshot *pool.Snapshot, c *queue.Class, w *waiter) bool {
	if !c.Waits() {
		return false
	}
	t := r.exclusiveTarget(w.prompt)
	if r.gather(sc, snapshot, w.req, w.prompt, t, nil) != nil {
		return false // it gets its turn, and choose returns the error
	}
	candidates := sc.prompters()
	for i := range candidates {
		if x := &candidates[i]; !c.Busy(loadOf(sc.loads, x).PrefillTokens, x.BatchedTokens()) {
			return false
		}
	}
	return true
}

// keepTicking has the lines looked at regularly while requests wait.
func (q *turnstile) keepTicking(r *Router) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ticking {
		return
	}
	q.ticking = true
	every := tick
	if r.book.Prefill.Linear {
		every = tickLinear
	}
	time.AfterFunc(every, func() {
		q.mu.Lock()
		q.ticking = false
		q.mu.Unlock()
		if q.length.Load() > 0 {
			r.released()
			q.keepTicking(r)
		}
	})
}

// Waiting returns how many requests wait in a policy class, over all models; 0 without a queue.
func (r *Router) Waiting(class string) (n int) {
	if r.turnstile == nil {
		return 0
	}
	r.turnstile.mu.Lock()
	defer r.turnstile.mu.Unlock()
	for _, l := range r.turnstile.lines {
		for i := range l.profile.Classes {
			if l.profile.Classes[i].Name == class {
				n += l.Load(i).Requests
			}
		}
	}
	return n
}
