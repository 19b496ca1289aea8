package router

import (
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/router/queue"
)

// newDeadlineHouse returns a house with two workers that are known to compute 1,000 tokens a second, in one class of
// the order EDF, whose requests have a deadline of a minute if they bring none. A worker is busy while a prompt waits.
func newDeadlineHouse(t *testing.T) *house {
	t.Helper()
	class := queue.Class{Name: "default", Policy: queue.EDF, Quantum: 1, BusyTokens: set(0), Deadline: time.Minute}
	p := &queue.Profile{Classes: []queue.Class{class}}
	h := withProfiles(t, (*queue.File)(nil).Profiles(p), maxed(workers(2), 100)...)
	for i := range 200 {
		isl := 100 + 37*i%400
		r := h.route(completion("m", tokens(1000*i, isl)))
		pass(1e-3 * float64(isl))
		r.MarkPrefillCompleted()
		r.Free()
	}
	for w := range 2 {
		s := h.pool.Acquire()
		pace := h.book.Pace(s.Workers[w].Worker)
		s.Release()
		if !pace.Learned || math.Abs(pace.SecondsPerToken-1e-3) > 1e-5 {
			t.Fatalf("worker %d: %+v", w, pace)
		}
	}
	return h
}

// due sends a request of so many tokens that wants its first token within a time.
func (a *arrivals) due(t *testing.T, name string, n int, within time.Duration) {
	t.Helper()
	a.mu.Lock()
	from := 1000 * (1000 + len(a.went) + a.h.allWaiting())
	a.mu.Unlock()
	req := completion("m", tokens(from, n))
	req.Hints.FirstToken, req.Received = within, time.Now()
	a.send(t.Context(), name, req)
}

// refused returns the error of a request that was refused because of its deadline.
func (h *house) refused(n int, within time.Duration) *LateError {
	h.t.Helper()
	req := completion("m", tokens(5_000_000, n))
	req.Hints.FirstToken, req.Received = within, time.Now()
	_, err := h.Route(h.t.Context(), req)
	var late *LateError
	if !errors.As(err, &late) {
		h.t.Fatalf("%d tokens within %v: %v, want a refusal", n, within, err)
	}
	return late
}

// TestDeadlinesThatCannotBeMet: a request is refused at once if the workers' loads, what waits before it and its own
// prompt take longer than its deadline by the learned times, or if it would make another one late. It is told when it
// could be met.
func TestDeadlinesThatCannotBeMet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newDeadlineHouse(t)
		a := arriveAt(h)
		// An idle worker takes 500 ms: that can never be met in 400, and can in 600.
		if late := h.refused(500, 400*time.Millisecond); late.Retry != 0 ||
			!strings.Contains(late.Error(), "400ms") {
			t.Errorf("%v, again after %v", late, late.Retry)
		}
		a.due(t, "a", 500, 600*time.Millisecond)
		a.due(t, "b", 500, 0) // the class's minute
		// Both workers have 500 tokens: 100 more are done after 600 ms.
		near := func(late *LateError, want time.Duration) {
			t.Helper()
			if d := late.Retry - want; d < -20*time.Millisecond || d > 50*time.Millisecond {
				t.Errorf("again after %v, want about %v", late.Retry, want)
			}
		}
		near(h.refused(100, 400*time.Millisecond), 200*time.Millisecond)
		a.due(t, "c", 200, 720*time.Millisecond) // waits, and is done after 700 ms
		// 100 tokens before it could be done after 600 ms, but c then only after 750. c goes after 500.
		near(h.refused(100, 650*time.Millisecond), 500*time.Millisecond)
		a.due(t, "d", 100, 2*time.Second)
		a.due(t, "e", 100, 750*time.Millisecond)
		if a.order() != "a b" || h.allWaiting() != 3 {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		if n := h.rejections()["deadline"]; n != 3 {
			t.Errorf("%v refusals are counted, want 3", n)
		}
		for _, name := range []string{"a", "b", "c", "e", "d"} {
			if a.route(name) == nil {
				t.Fatalf("went: %s", a.order())
			}
			a.prefilled(name)
			a.route(name).Free()
		}
		h.wantTurnFree()
	})
}

// TestDeadlinesWithoutTimes: while the workers' times are not known, in another order than EDF, and in bands, no
// request is refused for its deadline.
func TestDeadlinesWithoutTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bands := &queue.Bands{Default: queue.Band{Policy: queue.EDF}, Gate: queue.Gate{Requests: 1, Ceiling: 1}}
		for _, cfg := range []*queue.RoomConfig{
			{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.EDF, set(0.0)))},
			{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, set(0.0)))},
			(&queue.Config{Bands: bands}).Room(),
		} {
			known := newDeadlineHouse(t)
			cfg.Bound, cfg.Timeout = 10, time.Minute
			book := known.book
			if p, _ := cfg.Profiles.Of("m"); p.Bands == nil && p.Classes[0].Policy == queue.EDF {
				book = newHouse(t).book
			}
			c := known.cfg
			c.Queue = cfg
			h := &house{Router: New(c, known.pool, known.index, book, known.metrics, known.log), t: t,
				pool: known.pool, book: book}
			a := arriveAt(h)
			for _, name := range []string{"a", "b", "c"} {
				a.due(t, name, 500, time.Millisecond)
			}
			if a.order() != "a b" || h.allWaiting() != 1 {
				t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
			}
			a.route("a").Free()
			a.route("b").Free()
			synctest.Wait()
			a.route("c").Free()
		}
	})
}
