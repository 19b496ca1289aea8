package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"kvepp/internal/loglimit"
	"kvepp/kvblock"
	"kvepp/router/admission"
	"kvepp/router/queue"
)

// ErrNoRoom says that the request begins a conversation, or goes on with one that paused for long, and that within the
// time or the length of the line no worker's KV cache had room for it beside the conversations that go on.
var ErrNoRoom = errors.New("the workers' KV caches are full of conversations that go on; try again later")

// Admission holds conversations back while the workers' KV caches have no room for them.
type Admission struct {
	*admission.Controller
	// Bound is how many requests may wait for one model's workers, at least 1, and Timeout for how long; 0: until their
	// clients leave.
	Bound   int
	Timeout time.Duration

	unsized loglimit.Limiter // of log lines about workers that it has no effect on
}

// heldRequest is what the waiting room of the admission keeps of a request.
type heldRequest struct {
	req    *Request
	prompt *prepared
	turn   *admission.Turn
}

// heldProfile orders the requests that wait for admission. When one is admitted, admissionJudge says.
var heldProfile = queue.Single(queue.FCFS, nil)

// newAdmissionRoom returns the waiting room of requests that wait for admission.
func (r *Router) newAdmissionRoom() *queue.Room[heldRequest] {
	cfg := &queue.RoomConfig{Profiles: (*queue.File)(nil).Profiles(heldProfile), Bound: r.cfg.Admission.Bound,
		Timeout: r.cfg.Admission.Timeout}
	if r.cfg.Queue != nil {
		cfg.Hold = r.cfg.Queue.Hold
	}
	return queue.NewRoom(cfg, &admissionJudge{roomJudge{router: r}}, tick)
}

// admitAndDecide is decide for a request that may have to wait for admission first. Requests that wait are admitted one
// after the other: the next one is judged by loads with this one's booking.
//
// Errors: decide's; ErrNoRoom.
func (r *Router) admitAndDecide(ctx context.Context, sc *scratch, req *Request,
	p *prepared) (route *Route, waited time.Duration, err error) {
	turn := r.turnOf(sc, req, p)
	if turn != nil && !turn.Continues() {
		return r.waitAndDecide(ctx, sc, req, p, turn)
	}
	route, waited, err = r.decide(ctx, sc, req, p)
	if err == nil && turn != nil {
		route.startTurn(turn)
	}
	return route, waited, err
}

// turnOf returns the request's turn in its conversation; nil if admission does not apply to it. The caller has not
// gathered candidates yet.
func (r *Router) turnOf(sc *scratch, req *Request, p *prepared) *admission.Turn {
	if r.cfg.Admission == nil || p.pins.Given() || !p.reason.exact() || len(p.tokens) != 1 {
		return nil
	}
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	if r.gather(&sc.gathered, snapshot, req, p, r.cfg.exclusiveTarget(p), nil) != nil {
		return nil // decide returns the error
	}
	cached := r.bestCached(sc, p)
	var chain []kvblock.SequenceHash // in the smallest blocks, so that it does not depend on the candidates' order
	smallest := 0
	for i := range sc.variants {
		if v := &sc.variants[i]; smallest == 0 || v.blockSize < smallest {
			smallest, chain = v.blockSize, v.prompts[0].Chain
		}
	}
	if len(chain) == 0 {
		return nil
	}
	return r.cfg.Admission.Arrive(chain, p.isl, cached)
}

// waitAndDecide waits until a worker has room for the conversation, and decides.
func (r *Router) waitAndDecide(ctx context.Context, sc *scratch, req *Request, p *prepared,
	turn *admission.Turn) (route *Route, waited time.Duration, err error) {
	held := *p // a copy, so that p stays on the stack of requests that never wait
	w, err := r.admissions.Enter(queue.Entry{
		Line:       r.lineName(&sc.gathered, p.model),
		Profile:    heldProfile,
		Workers:    1,
		MayNotWait: p.priority < 0,
		Request: queue.Request{
			Lane:           queue.Any,
			Tokens:         p.isl,
			Jump:           jump(p),
			StrictPriority: p.hints.StrictPriority,
		},
	}, heldRequest{req, &held, turn})
	if w != nil {
		waited, err = await(ctx, r, sc, r.admissions, w)
		r.rematch(sc)
	}
	if errors.Is(err, queue.ErrTimeout) || errors.Is(err, queue.ErrFull) || errors.Is(err, queue.ErrWouldWait) {
		err = fmt.Errorf("%w (%w)", ErrNoRoom, err)
	}
	if err != nil {
		return nil, waited, r.nameAway(sc, req, p, err)
	}
	defer r.admissions.Pass() // also after an error or a panic
	route, queued, err := r.decide(ctx, sc, req, p)
	if err == nil {
		route.startTurn(turn) // before the next one is judged
	}
	return route, waited + queued, err
}

// startTurn notes that the conversation's turn was booked.
func (r *Route) startTurn(turn *admission.Turn) {
	turn.Start(r.computes.Worker, r.PredictedCachedTokens)
	r.turn = turn
}

// admissionJudge tells the waiting room of the admission which requests can go. The room's lock guards it.
type admissionJudge struct{ roomJudge }

// State says whether no worker that may compute the prompt has room for the conversation.
func (j *admissionJudge) State(_ *queue.Class, h heldRequest) queue.State {
	r, sc := j.router, j.sc
	err := r.gather(&sc.gathered, j.snapshot, h.req, h.prompt, r.cfg.exclusiveTarget(h.prompt), nil)
	switch {
	case r.away(j.snapshot, h.req, h.prompt, err):
		return queue.Away // with the turn it would hold up the others
	case err != nil:
		return queue.Ready // it gets its turn, and choose returns the error
	}
	candidates := sc.prompters()
	for i := range candidates {
		x := &candidates[i]
		load := loadOf(sc.loads, x)
		if x.TotalKVBlocks == 0 {
			r.cfg.Admission.unsized.Log(r.log, slog.LevelWarn, "--router-admission has no effect on this worker, "+
				"because kvepp does not know its number of KV blocks: its engine's metrics page does not say it; set "+
				"totalKvBlocks in the endpoints file, or the Pod's annotation kvepp/total-kv-blocks",
				"worker", x.String())
		}
		if h.turn.Fits(x.Worker, x.TotalKVBlocks*x.BlockSize, load.Requests, load.ActiveTokens) {
			return queue.Ready
		}
	}
	return queue.Busy
}

// Held returns how many requests wait for admission, or for the first worker.
func (r *Router) Held() (n int) {
	if r.admissions != nil {
		n = r.admissions.Waiting()
	}
	return n + r.waiting(func(l *queue.ClassLoad) bool { return l.Away })
}
