package router

import (
	"context"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router/session"
)

// Explanation is what Route would decide now.
type Explanation struct {
	// Record is the decision with all costs. Refused, and Record.Error, say why the request would get no worker; nil:
	// it would get one.
	Record  *Record
	Refused error
	// WouldWait says that the request would wait in the queue first, because every worker that may compute the prompt
	// is busy. The decision is then the one that it would get if it did not wait.
	WouldWait bool
	// Computes is the chosen worker that computes the prompt; its zero value if Refused is set.
	Computes pool.Worker
}

// newRehearsal returns a router that decides as r does, from the same pool, index, book, sessions and thresholds, and
// changes none of them. What its code counts goes into metrics that nothing exports.
func (r *Router) newRehearsal() *Router {
	cfg := r.cfg
	cfg.Explain, cfg.Keep = true, 0
	cfg.Metrics, cfg.Picker, cfg.Recorder, cfg.Ladder, cfg.PromptComputed = nil, nil, nil, nil, nil
	cfg.Admission = nil
	dry := &Router{cfg: cfg, pool: r.pool, index: r.index, book: r.book, metrics: metrics.New(), log: r.log,
		slots: r.slots, thresholds: r.thresholds, policy: r.policy, inBody: r.inBody, modelUse: newModelUse(nil),
		dry: true}
	dry.scratches.New = func() any { return new(scratch) }
	return dry
}

// Explain decides a request as Route would now, by the same code, and books nothing: loads, sessions, trials,
// predictions, records and metrics stay as they are. If an engine tokenizes the model's requests, it is asked, as for
// any request. The admission of conversations is not judged.
//
// Errors: *body.Error for a body that is not a request; ctx's own. Every other refusal is in the Explanation.
func (r *Router) Explain(ctx context.Context, req *Request) (*Explanation, error) {
	dry := r.rehearsal()
	p, err := dry.prepare(ctx, req, nil)
	defer p.releaseMemory()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	p.affinity = dry.cfg.affinityOf(&p)
	sc := dry.takeScratch(nil)
	defer dry.putScratch(sc)
	dry.chooseVersion(sc, &p)
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	out := new(Explanation)
	if r.room != nil {
		out.WouldWait = dry.wouldWait(sc, snapshot, req, &p)
		sc.variants = sc.variants[:0]
	}
	route, err := dry.choose(sc, snapshot, req, &p)
	out.Record, out.Refused = recordOf(&sc.gathered, req, &p, route, 0, err), err
	if err == nil {
		out.Computes = route.computes
	}
	return out, nil
}

// wouldWait, of a rehearsal, reports whether every worker that may compute the prompt is busy for the request's policy
// class.
func (r *Router) wouldWait(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared) bool {
	entry, err := r.entry(sc, snapshot, req, p)
	if err != nil {
		return false // it is refused
	}
	class := &entry.Profile.Classes[entry.Class]
	if !class.Waits() {
		return false
	}
	sc.loads = r.book.Loads(sc.loads[:0])
	candidates := sc.prompters()
	for i := range candidates {
		if x := &candidates[i]; !class.Busy(loadOf(sc.loads, x).PrefillTokens, x.BatchedTokens()) {
			return false
		}
	}
	return true
}

// wouldBe returns what a decided request would do to its session, whose target is t.
func wouldBe(t target, route *Route) session.Outcome {
	switch {
	case !t.bound:
		return session.New
	case t.worker == route.destination:
		return session.Kept
	}
	return session.Moved
}
