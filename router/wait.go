package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"kvepp/pool"
	"kvepp/router/queue"
	"kvepp/scoring"
)

var (
	// ErrQueueFull says that every worker is busy, and that the queue, or the request's policy class in it, has reached
	// its limit.
	ErrQueueFull = errors.New("every worker is busy, and too many requests are waiting already; try again later")
	// ErrShed says that every worker is busy, and that the request's objective has a priority below 0.
	ErrShed = errors.New("every worker is busy, and requests of this objective do not wait; try again later")
	// ErrQueueTimeout says that no worker became ready for the request within queue.RoomConfig.Timeout.
	ErrQueueTimeout = errors.New("no worker was ready for this request in time; try again later")
)

// How often waiting requests are looked at although no load was released. With a linear prefill model, workers become
// ready as time passes.
const (
	tick       = time.Second
	tickLinear = 100 * time.Millisecond
)

// waitingRequest is what the waiting room keeps of a request.
type waitingRequest struct {
	req    *Request
	prompt *prepared
}

// newRoom returns the waiting room of all models: a worker that reports no model serves them all.
func (r *Router) newRoom() *queue.Room[waitingRequest] {
	interval := tick
	if r.book.Prefill.Linear {
		interval = tickLinear
	}
	return queue.NewRoom(r.cfg.Queue, &roomJudge{router: r}, interval)
}

// decide waits for the request's turn and chooses for it. The turn comes at once unless every worker that may take the
// request is busy or others wait before it. waited is the time in a line.
//
// Errors: choose's; ErrQueueFull; ErrQueueTimeout; ErrShed; ctx's own.
func (r *Router) decide(
	ctx context.Context,
	sc *scratch,
	req *Request,
	p *prepared,
) (route *Route, waited time.Duration, err error) {
	snapshot := r.pool.Acquire()
	defer func() { snapshot.Release() }()
	if r.room == nil {
		route, err = r.choose(sc, snapshot, req, p)
		return route, 0, err
	}
	entry, err := r.entry(sc, snapshot, req, p)
	if err != nil {
		return nil, 0, err
	}
	held := *p // a copy, so that p stays on the stack of requests that never wait
	w, err := r.room.Enter(entry, waitingRequest{req, &held})
	if w != nil {
		snapshot.Release() // do not hold it while waiting: it keeps the numbers of workers that left
		waited, err = await(ctx, r, sc, r.room, w)
		snapshot = r.pool.Acquire()
		r.rematch(sc)
	}
	if err != nil {
		return nil, waited, r.queueError(entry.Line, err)
	}
	defer r.room.Pass() // also after an error or a panic
	route, err = r.choose(sc, snapshot, req, p)
	return route, waited, err
}

// await waits for the turn in a room. waited is the time in a line, which it also reports.
func await[T any](
	ctx context.Context,
	r *Router,
	sc *scratch,
	room *queue.Room[T],
	w *queue.Waiter[T],
) (waited time.Duration, err error) {
	from := time.Now()
	err = room.Await(ctx, w)
	if w.InLine() {
		waited = time.Since(from)
		r.metrics.QueueWait(waited)
		sc.span.Phase(spanQueue, from, from.Add(waited))
	}
	return waited, err
}

// queueError returns the router's error for one of the waiting room, and counts limits of policy classes.
func (r *Router) queueError(line string, err error) error {
	limit := (*queue.LimitError)(nil)
	switch {
	case errors.As(err, &limit):
		r.cfg.Metrics.Backpressure(lineLabel(line), limit.Class, limit.Kind)
		return fmt.Errorf("%w: %w", ErrQueueFull, err)
	case errors.Is(err, queue.ErrFull):
		return fmt.Errorf("%w: %w", ErrQueueFull, err)
	case errors.Is(err, queue.ErrWouldWait):
		return ErrShed
	case errors.Is(err, queue.ErrTimeout):
		return ErrQueueTimeout
	}
	return err
}

// entry describes a request for the waiting room.
func (r *Router) entry(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared) (queue.Entry, error) {
	t := r.exclusiveTarget(p)
	if err := r.gather(&sc.gathered, snapshot, req, p, t, nil); err != nil {
		return queue.Entry{}, err
	}
	e := queue.Entry{
		Line:       r.lineName(&sc.gathered, p.model),
		Workers:    prompterEndpoints(snapshot, p.model),
		MayNotWait: p.priority < 0,
		Request: queue.Request{
			Lane:           queue.Any,
			Tokens:         p.isl,
			CachedTokens:   r.bestCached(sc, p),
			Jump:           jump(p),
			StrictPriority: p.hints.StrictPriority,
		},
	}
	e.Profile, _ = r.cfg.Queue.Profiles.Of(e.Line)
	e.Class = e.Profile.Class(p.hints.PolicyClass, max(e.Tokens-e.CachedTokens, 0))
	if p.pins.Given() || t.bound && len(sc.prompters()) == 1 {
		e.Lane = int(sc.prompters()[0].Worker)
	}
	return e, nil
}

// lineLabel returns a line as a metric's label.
func lineLabel(line string) string { return cmp.Or(line, otherModels) }

// lineName returns the model's name if the operator or a worker gave it, else "": all other names share one line, so
// that clients cannot create lines.
func (r *Router) lineName(g *gathered, model string) string {
	own := false
	if r.cfg.Queue != nil {
		_, own = r.cfg.Queue.Profiles.Of(model)
	}
	if own || r.cfg.names(model) || g.prompters()[0].Model == model {
		return strings.Clone(model) // the room keeps its lines
	}
	return ""
}

// jump is how far a request's priority lifts it in its class. Source: dynamo-llm 1.6.1, preprocessor.
func jump(p *prepared) float64 {
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
func (r *Router) bestCached(sc *scratch, p *prepared) (most int) {
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

// roomJudge tells the waiting room which requests can go. The room's lock guards it.
type roomJudge struct {
	router   *Router
	sc       *scratch       // from Begin to End, as the next
	snapshot *pool.Snapshot // the current workers
}

func (j *roomJudge) Begin() {
	j.sc, j.snapshot = j.router.takeScratch(nil), j.router.pool.Acquire()
	j.sc.loads = j.router.book.Loads(j.sc.loads[:0])
}

func (j *roomJudge) End() {
	j.snapshot.Release()
	j.router.putScratch(j.sc)
	j.sc, j.snapshot = nil, nil
}

// Busy reports whether every worker that may compute the prompt is busy. Busy thresholds play no part here: they are
// compared when it is the request's turn.
func (j *roomJudge) Busy(c *queue.Class, w waitingRequest) bool {
	if !c.Waits() {
		return false
	}
	r, sc := j.router, j.sc
	t := r.exclusiveTarget(w.prompt)
	if r.gather(&sc.gathered, j.snapshot, w.req, w.prompt, t, nil) != nil {
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

// Waiting returns how many requests wait in a policy class, over all models; 0 without a queue.
func (r *Router) Waiting(class string) (n int) {
	if r.room == nil {
		return 0
	}
	for _, l := range r.room.Loads() {
		if l.Class == class {
			n += l.Requests
		}
	}
	return n
}
