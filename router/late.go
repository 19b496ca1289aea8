package router

import (
	"fmt"
	"math"
	"time"

	"kvepp/router/queue"
)

// LateError says that no worker can compute a request's first token by its deadline, or only if others miss theirs.
type LateError struct {
	Within time.Duration // what was left until the deadline
	Retry  time.Duration // after this time the same request could meet it, if nothing else comes; 0: never
}

func (e *LateError) Error() string {
	return fmt.Sprintf("no worker can begin the response within %v, the request's deadline; try again later",
		e.Within.Round(time.Millisecond))
}

// noises is how many mean errors of learned times a request is expected to need beyond them.
const noises = 2

// inTime returns a *LateError for a request whose deadline cannot be met by the load book and the learned times of the
// workers, which compute prompts one after the other. While the times of a worker are not known it returns nil. It is
// for classes of the order EDF; llm-d's bands refuse nothing for a deadline.
func (r *Router) inTime(sc *scratch, e *queue.Entry, p *prepared) error {
	c := &e.Profile.Classes[e.Class]
	if c.Policy != queue.EDF || !c.Waits() || e.Within == 0 || e.Profile.Bands != nil {
		return nil
	}
	sc.loads = r.book.Loads(sc.loads[:0])
	t, own, alone, all := queue.Times{Soonest: math.Inf(1)}, math.Inf(1), math.Inf(1), 0.0
	for i := range sc.prompters() {
		w := &sc.prompters()[i]
		pace := r.book.Pace(w.Worker)
		if !pace.Learned {
			return nil
		}
		waits := pace.SecondsPerToken * float64(loadOf(sc.loads, w).PrefillTokens)
		if waits > 0 {
			waits += pace.StepSeconds
		}
		needs := pace.StepSeconds + pace.SecondsPerToken*float64(max(p.isl-sc.cachedOn(p, w), 1)) +
			noises*pace.Noise
		if alone = min(alone, needs); waits+needs < t.Soonest+own {
			t.Soonest, own, t.Own = waits, needs, pace.SecondsPerToken
		}
		all += 1 / pace.SecondsPerToken
	}
	if t.All = 1 / all; all == 0 {
		return nil // no worker: it waits for the first one
	}
	begins, held := r.room.Ahead(e, t)
	retry := max(begins+own-e.Within.Seconds(), held)
	switch {
	case retry <= 0:
		return nil
	case alone > wanted(e, p).Seconds():
		retry = 0
	}
	return &LateError{e.Within, time.Duration(retry * float64(time.Second))}
}
