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
	// ErrEnding says that kvepp ends while the request waits.
	ErrEnding = queue.ErrEnding
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

// holds reports whether requests wait while there is no worker for them.
func (c *Config) holds() bool { return c.Queue != nil && c.Queue.Hold > 0 }

// queues reports whether requests wait while every worker is busy.
func (c *Config) queues() bool { return c.Queue != nil && c.Queue.Profiles.Waits() }

// away reports whether gather's error is one that ends when workers come, and the request waits for them. A request
// that asks for a worker, a subset or taints does not wait: it would stand before requests that others can take.
func (r *Router) away(s *pool.Snapshot, req *Request, p *prepared, err error) bool {
	if err == nil || !r.cfg.holds() || req.Allowed != nil || p.pins.Given() || len(p.constraints.Required) > 0 {
		return false
	}
	if errors.Is(err, ErrUnknownModel) { // also a model that only clients name, and an adapter that no worker has
		return r.knows(p.model) && prompterEndpoints(s, p.model) == 0
	}
	return errors.Is(err, ErrNoEndpoints) || errors.Is(err, ErrNoPrefill) || errors.Is(err, ErrCordoned)
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
// Errors: choose's; *LateError; ErrQueueFull; ErrQueueTimeout; ErrShed; ctx's own.
func (r *Router) decide(ctx context.Context, sc *scratch, req *Request,
	p *prepared) (route *Route, waited time.Duration, err error) {
	snapshot := r.pool.Acquire()
	defer func() { snapshot.Release() }()
	if r.room == nil || !r.cfg.queues() && r.room.Waiting() == 0 {
		if route, err = r.choose(sc, snapshot, req, p); !r.away(snapshot, req, p, err) {
			return route, 0, err
		}
	}
	entry, err := r.entry(sc, snapshot, req, p)
	if err == nil {
		err = r.inTime(sc, &entry, p)
	}
	if err != nil {
		return nil, 0, err
	}
	held := *p // a copy, so that p stays on the stack of requests that never wait
	w, err := r.room.Enter(entry, waitingRequest{req, &held})
	if w != nil {
		r.tellTenant(entry.Tenant, 0, false)
		snapshot.Release() // do not hold it while waiting: it keeps the numbers of workers that left
		waited, err = await(ctx, r, sc, r.room, w)
		snapshot = r.pool.Acquire()
		r.rematch(sc)
	}
	if err != nil {
		if w != nil {
			r.tellTenant(entry.Tenant, 0, false)
		}
		return nil, waited, r.queueError(entry.Line, r.nameAway(sc, req, p, err))
	}
	defer r.room.Pass() // also after an error or a panic
	if route, err = r.choose(sc, snapshot, req, p); err == nil {
		route.tenant, route.charged = entry.Tenant, entry.Cost()
	}
	r.tellTenant(entry.Tenant, entry.Cost(), true)
	return route, waited, err
}

// tellTenant tells the other replicas what a tenant was charged here, for a request's turn or beside it, and whether
// requests of it wait.
func (r *Router) tellTenant(t queue.Tenant, tokens int, turn bool) {
	if r.cfg.Charged != nil && t != 0 {
		r.cfg.Charged(uint64(t), tokens, turn, r.room.Waits(t))
	}
}

// HeardTenant takes what another replica said by Config.Charged.
func (r *Router) HeardTenant(t uint64, tokens int, turn, waits bool) {
	if r.room != nil {
		r.room.Heard(queue.Tenant(t), tokens, turn, waits)
	}
}

// chargeResponse charges the request's tenant for the response, and for prompt tokens that it was not charged for
// because they were taken to be cached, or the other way round.
func (r *Router) chargeResponse(route *Route, a *Response) {
	if route.tenant == 0 {
		return
	}
	tokens := max(a.Tokens, 0)
	if a.PromptTokens > 0 && a.CachedTokens >= 0 {
		tokens += a.PromptTokens - a.CachedTokens - route.charged
	}
	r.room.Charge(route.tenant, tokens)
	if tokens > 0 {
		r.tellTenant(route.tenant, tokens, false)
	}
}

// nameAway adds to queue.ErrAway the reason why no worker came for a request. It is never ErrUnknownModel: the model is
// known.
func (r *Router) nameAway(sc *scratch, req *Request, p *prepared, err error) error {
	if !errors.Is(err, queue.ErrAway) {
		return err
	}
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	why := r.gather(&sc.gathered, snapshot, req, p, target{}, nil)
	if why == nil || errors.Is(why, ErrUnknownModel) {
		why = ErrNoEndpoints
	}
	return fmt.Errorf("%w (%w)", why, err)
}

// await waits for the turn in a room. waited is the time in a line, which it also reports.
func await[T any](ctx context.Context, r *Router, sc *scratch, room *queue.Room[T],
	w *queue.Waiter[T]) (waited time.Duration, err error) {
	from := time.Now()
	err = room.Await(ctx, w)
	if w.InLine() {
		waited = time.Since(from)
		r.metrics.QueueWait(waited)
		sc.span.Phase(spanQueue, from, from.Add(waited))
	}
	return waited, err
}

// RefuseWaiting refuses with ErrEnding what waits in queues, and what would wait from now on. For a process that ends.
func (r *Router) RefuseWaiting() {
	r.room.RefuseWaiting()
	r.admissions.RefuseWaiting()
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

// entry describes a request for the waiting room. Any priority may wait for the first worker.
func (r *Router) entry(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared) (queue.Entry, error) {
	t := r.cfg.exclusiveTarget(p)
	err := r.gather(&sc.gathered, snapshot, req, p, t, nil)
	away := r.away(snapshot, req, p, err)
	if err != nil && !away {
		return queue.Entry{}, err
	}
	e := queue.Entry{
		Line:       r.lineName(&sc.gathered, p.model),
		Workers:    max(prompterEndpoints(snapshot, p.model), 1),
		MayNotWait: p.priority < 0 && !away,
		Request: queue.Request{
			Lane:           queue.Any,
			Tokens:         p.isl,
			Jump:           jump(p),
			StrictPriority: p.hints.StrictPriority,
		},
	}
	if !away {
		e.CachedTokens = r.bestCached(sc, p)
	}
	e.Profile, _ = r.currentPolicy().Queues.Of(e.Line)
	e.Class = e.Profile.Class(p.hints.PolicyClass, max(e.Tokens-e.CachedTokens, 0))
	if e.Within = wanted(&e, p); e.Within > 0 && !req.Received.IsZero() {
		e.Within -= time.Since(req.Received)
	}
	if e.Profile.Bands != nil {
		e.Priority, e.Bytes, e.MayNotWait = int(p.priority), len(req.Body), false
		e.Jump, e.StrictPriority = 0, 0
	}
	sender := p.hints.Fairness
	if r.cfg.TenantHeader != "" {
		sender = p.hints.Sender
	}
	e.SetTenant(sender)
	if !away && (p.pins.Given() || t.bound && len(sc.prompters()) == 1) {
		e.Lane = int(sc.prompters()[0].Worker)
	}
	return e, nil
}

// wanted returns how long after its arrival a request wants its first token; 0: at any time.
func wanted(e *queue.Entry, p *prepared) time.Duration {
	return cmp.Or(p.hints.FirstToken, e.Profile.Classes[e.Class].Deadline)
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
	of := g.prompters()
	if own || r.knows(model) || len(of) > 0 && of[0].Model == model {
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
		most = max(most, sc.cachedOn(p, &candidates[i]))
	}
	return most
}

// cachedOn returns the tokens of the prompt that a candidate has cached. The caller has called match.
func (sc *scratch) cachedOn(p *prepared, w *pool.Worker) int {
	v := sc.variantOf(w)
	if p.tokens == nil || v == nil {
		return 0
	}
	o := v.overlapOf(w.Worker)
	return sc.pricing.CachedTokens(&scoring.Terms{BlockSize: w.BlockSize, ISLTokens: p.isl,
		DeviceBlocks: int(o.device), HostBlocks: int(o.host), DiskBlocks: int(o.disk)})
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

// State says whether every worker that may compute the prompt is busy. Busy thresholds play no part here: they are
// compared when it is the request's turn.
func (j *roomJudge) State(c *queue.Class, w waitingRequest) queue.State {
	r, sc := j.router, j.sc
	if !c.Waits() && !r.cfg.holds() {
		return queue.Ready
	}
	err := r.gather(&sc.gathered, j.snapshot, w.req, w.prompt, r.cfg.exclusiveTarget(w.prompt), nil)
	switch {
	case r.away(j.snapshot, w.req, w.prompt, err):
		return queue.Away
	case err != nil || !c.Waits():
		return queue.Ready // with an error it gets its turn, and choose returns the error
	}
	candidates := sc.prompters()
	if c.Gate != nil {
		if saturation(c.Gate, sc.loads, candidates) >= c.Gate.Ceiling {
			return queue.Busy
		}
		return queue.Ready
	}
	for i := range candidates {
		if x := &candidates[i]; !c.Busy(loadOf(sc.loads, x).PrefillTokens, x.BatchedTokens()) {
			return queue.Ready
		}
	}
	return queue.Busy
}

// saturation returns the workers' mean saturation by the load book; 1 without any.
func saturation(g *queue.Gate, loads []scoring.Load, workers []pool.Worker) (sum float64) {
	for i := range workers {
		w := &workers[i]
		l, usage := loadOf(loads, w), 0.0
		if w.TotalKVBlocks > 0 {
			usage = float64(l.ActiveBlocks) / float64(w.TotalKVBlocks)
		}
		steps := 0.0
		if most := w.BatchedTokens(); most > 0 {
			steps = float64(l.PrefillTokens) / float64(most)
		}
		sum += g.Saturation(l.Requests, l.ActiveTokens, steps, usage)
	}
	return max(sum, 1-float64(len(workers))) / float64(max(len(workers), 1))
}

// Waiting returns how many requests of a policy class wait for a worker that is not busy, over all models.
func (r *Router) Waiting(class string) int {
	return r.waiting(func(l *queue.ClassLoad) bool { return l.Class == class && !l.Away })
}

// waiting returns how many requests wait in such classes of lines; 0 without a queue.
func (r *Router) waiting(such func(*queue.ClassLoad) bool) (n int) {
	if r.room == nil {
		return 0
	}
	for _, l := range r.room.Loads() {
		if such(&l) {
			n += l.Requests
		}
	}
	return n
}
