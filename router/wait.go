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
	// ErrQueueFull says that every worker is busy, and that the queue, or the request's policy class in it, holds as
	// much as it may.
	ErrQueueFull = errors.New("every worker is busy, and too many requests are waiting already; try again later")
	// ErrShed says that every worker is busy, and that the request's objective has a priority below 0.
	ErrShed = errors.New("every worker is busy, and requests of this objective do not wait; try again later")
	// ErrQueueTimeout says that no worker was ready for the request within the time that requests may wait.
	ErrQueueTimeout = errors.New("no worker was ready for this request in time; try again later")
)

// Queue says how requests wait while every worker that may compute their prompts is busy.
type Queue struct {
	// Profiles say which worker is busy, which request goes next, and how many may wait.
	Profiles *queue.Profiles
	// Bound is the most requests that wait for the workers of one model; at least 1.
	Bound int
	// Timeout is how long a request waits at most. 0: as long as its client does.
	Timeout time.Duration
}

// How often waiting requests are looked at although nothing was released: workers join, and bookings that nobody holds
// end. Prompts that shrink with time make workers ready all the time.
const (
	tick       = time.Second
	tickLinear = 100 * time.Millisecond
)

// waits is the requests that wait, those that are about to be chosen for among them. With a queue every request comes
// through here, so that all have their turn.
//
// Whoever has the turn looks at the loads, decides who goes next, and gives the turn to that request, which books a
// worker and looks again: so every decision sees the bookings of all before it, and no lock is held while it is made.
// Two things may happen at any time beside: requests are added and leave, under mu; and load is released. The latter
// cannot be missed:
//
//  1. the holder of the turn looks at the loads,
//  2. a request ends, and its load is released; its goroutine finds the turn taken, and sets again,
//  3. the holder finds nobody ready by the loads of 1, sees again, and goes back to 1 instead of giving up the turn.
//
// While nobody waits 2 sets nothing, so that 1 must not come before the lines are locked: a request that was added
// between the two would be judged by loads from before the release.
type waits struct {
	length atomic.Int64 // of all lines; changed under mu

	mu      sync.Mutex // guards all below, and the lines
	byModel map[string]*line
	lines   []*line   // the same, in the order in which they came to be
	next    int       // in lines, who is asked first
	turns   uint64    // how many were given to requests in lines
	direct  []*waiter // that stand in no line, as they came; they want the turn only
	taken   bool      // somebody has the turn
	again   bool      // load was released since the holder of the turn looked at the loads
	ticking bool

	began time.Time
}

// line is the queue of one model's workers.
type line struct {
	model   string // a label's
	profile *queue.Profile
	*queue.Queue[*waiter]
}

// waiter is a request in a line, or on its way past it.
type waiter struct {
	req     *Request
	prompt  *prompt
	line    *line
	item    *queue.Item[*waiter] // in line; nil: it is one of waits.direct
	class   int                  // of the line's profile
	after   uint64               // without item: the turns after which it need not let others go before it
	workers int                  // that serve its model
	turn    chan struct{}        // receives the turn; with err, only that
	err     error                // set before turn receives: why the request is turned away
}

func newWaits() *waits { return &waits{byModel: map[string]*line{}, began: time.Now()} }

// decide chooses for a request when it is its turn, which it is at once unless every worker that may take it is busy,
// or others wait before it. Waited is how long it was not. The variants in d are the request's own.
//
// Errors: choose's; ErrQueueFull; ErrQueueTimeout; ErrShed; ctx's own.
func (r *Router) decide(
	ctx context.Context,
	d *decision,
	req *Request,
	p *prompt,
) (route *Route, waited time.Duration, err error) {
	snapshot := r.pool.Acquire()
	if r.waits == nil {
		defer snapshot.Release()
		route, err = r.choose(d, snapshot, req, p)
		return route, 0, err
	}
	w, err := r.enter(d, snapshot, req, p)
	if err != nil {
		snapshot.Release()
		return nil, 0, err
	}
	select {
	case <-w.turn:
	default:
		snapshot.Release() // a worker's number is not given away while a snapshot is held
		from := time.Now()
		err = r.await(ctx, w)
		if w.item != nil {
			waited = time.Since(from)
			r.metrics.QueueWait(waited)
			d.span.Phase(spanQueue, from, from.Add(waited))
		}
		if err != nil {
			return nil, waited, err
		}
		snapshot = r.pool.Acquire()
		r.lookAgain(d)
	}
	defer snapshot.Release()
	if err := w.err; err != nil {
		return nil, waited, err
	}
	defer r.advance() // whatever becomes of the choice
	route, err = r.choose(d, snapshot, req, p)
	return route, waited, err
}

// enter puts a request into the line of its model, and gives it the turn if that is free and nobody goes before it. A
// request of a class, or an objective, that is turned away where others wait stands in no line, so that it takes no
// part in the turns of the others, nor any room: it is judged, and may choose, as soon as nobody is ready of those who
// were there before.
//
// Source: dynamo-kv-router 1.6.1, scheduling: queue.
func (r *Router) enter(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt) (*waiter, error) {
	t := r.waitsFor(p)
	if err := r.gather(d, snapshot, req, p, &t, nil); err != nil {
		return nil, err
	}
	q := r.waits
	name := r.lineName(d, p.model)
	profile, _ := r.cfg.Queue.Profiles.Of(name)
	entry := queue.Request{
		Lane:           queue.Any,
		Tokens:         p.isl,
		CachedTokens:   r.bestCached(d, p),
		Arrival:        time.Since(q.began).Seconds(),
		Jump:           jump(p),
		StrictPriority: p.hints.StrictPriority,
	}
	entry.Class = profile.Class(p.hints.PolicyClass, max(entry.Tokens-entry.CachedTokens, 0))
	if p.pins.Given() || t.bound && len(d.prompters()) == 1 {
		entry.Lane = int(d.prompters()[0].Worker)
	}
	held := *p // p itself stays where it is, for requests that never wait
	w := &waiter{
		req:     req,
		prompt:  &held,
		class:   entry.Class,
		workers: serving(snapshot, p.model),
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

// lineName returns the model's name if an operator gave it, else "": what clients make up shares one line.
func (r *Router) lineName(d *decision, model string) string {
	if _, own := r.cfg.Queue.Profiles.Of(model); own || r.cfg.names(model) || d.prompters()[0].Model == model {
		return model
	}
	return ""
}

// jump is how far a request's priority lifts it. Source: dynamo-llm 1.6.1, preprocessor.
func jump(p *prompt) float64 {
	if p.hints.Priority != nil {
		return max(float64(*p.hints.Priority), 0)
	}
	return max(p.hints.LatencySensitivity, 0)
}

// serving counts the endpoints that compute prompts of a model.
func serving(s *pool.Snapshot, model string) (n int) {
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

// prompters returns the candidates that compute prompts. There is one at least after gather without an error.
func (d *decision) prompters() []pool.Worker {
	if len(d.decode.workers) == 0 {
		return d.aggregated.workers
	}
	if len(d.aggregated.workers) == 0 {
		return d.prefill.workers
	}
	d.both = append(append(d.both[:0], d.aggregated.workers...), d.prefill.workers...)
	return d.both
}

// bestCached returns how many tokens of the prompt the candidate has cached that has most.
func (r *Router) bestCached(d *decision, p *prompt) (most int) {
	if p.tokens == nil {
		return 0
	}
	candidates := d.prompters()
	r.match(d, candidates, p)
	for i := range candidates {
		w := &candidates[i]
		if v := d.variantOf(w); v != nil {
			o := v.overlapOf(w.Worker)
			most = max(most, d.aggregated.cfg.CachedTokens(&scoring.Terms{BlockSize: w.BlockSize, ISLTokens: p.isl,
				DeviceBlocks: int(o.device), HostBlocks: int(o.host), DiskBlocks: int(o.disk)}))
		}
	}
	return most
}

// await waits for the turn. With an error the request is gone from where it stood.
func (r *Router) await(ctx context.Context, w *waiter) (err error) {
	r.waits.keepTicking(r)
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
	<-w.turn // it came meanwhile
	if errors.Is(err, ErrQueueTimeout) {
		return nil
	}
	if w.err == nil {
		r.advance() // nobody is there to use it
	}
	return err
}

// leave takes a request away from where it stands; false if it is not there any more.
func (r *Router) leave(w *waiter) bool {
	q := r.waits
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
		r.released() // it may have stood before one for whom a worker is ready
	}
	return left
}

// released says that there is less load somewhere than before.
func (r *Router) released() {
	q := r.waits
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	mine := !q.taken
	q.taken, q.again = true, !mine
	q.mu.Unlock()
	if mine {
		r.advance()
	}
}

// advance gives the turn, which the caller has, to the request that goes next, or up if there is none.
func (r *Router) advance() {
	d := r.scratch.Get().(*decision)
	defer r.scratch.Put(d)
	for {
		w, more := r.nextWaiter(d)
		if w != nil {
			turned := w.err != nil // not to be read once w has its turn
			if w.turn <- struct{}{}; !turned {
				return
			}
		} else if !more {
			return
		}
	}
}

// nextWaiter takes out who goes next. Without one the turn is given up, unless load was released meanwhile: more.
func (r *Router) nextWaiter(d *decision) (w *waiter, more bool) {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	q := r.waits
	q.mu.Lock()
	defer q.mu.Unlock()
	d.loads = r.book.Loads(d.loads[:0]) // under mu: nobody who is in a line came after them
	q.taken = false                     // should what follows panic, the others go on
	if len(q.direct) > 0 && q.turns >= q.direct[0].after {
		return r.nextDirect(d, snapshot), false
	}
	ready := func(c *queue.Class, item *queue.Item[*waiter]) bool { return !r.allBusy(d, snapshot, c, item.Value) }
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
		return r.nextDirect(d, snapshot), false
	}
	q.taken, q.again = q.again, false
	return nil, q.taken
}

// nextDirect takes out the first of those that stand in no line, with an error unless a worker is ready for it. The
// caller holds waits.mu, and there is one.
func (r *Router) nextDirect(d *decision, snapshot *pool.Snapshot) *waiter {
	q := r.waits
	w := q.direct[0]
	if r.allBusy(d, snapshot, &w.line.profile.Classes[w.class], w) {
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

// allBusy reports whether every worker that may compute the prompt is busy, by the loads in d. Whether they are
// overloaded is another matter, for when it is the request's turn.
func (r *Router) allBusy(d *decision, snapshot *pool.Snapshot, c *queue.Class, w *waiter) bool {
	if !c.Waits() {
		return false
	}
	t := r.waitsFor(w.prompt)
	if r.gather(d, snapshot, w.req, w.prompt, &t, nil) != nil {
		return false // its turn is there to say what is wrong
	}
	candidates := d.prompters()
	for i := range candidates {
		if x := &candidates[i]; !c.Busy(loadOf(d.loads, x).PrefillTokens, x.BatchedTokens()) {
			return false
		}
	}
	return true
}

// keepTicking has the lines looked at from time to time while requests wait.
func (q *waits) keepTicking(r *Router) {
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
	if r.waits == nil {
		return 0
	}
	r.waits.mu.Lock()
	defer r.waits.mu.Unlock()
	for _, l := range r.waits.lines {
		for i := range l.profile.Classes {
			if l.profile.Classes[i].Name == class {
				n += l.Load(i).Requests
			}
		}
	}
	return n
}
