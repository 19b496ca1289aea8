package router

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/router/queue"
)

// newHoldHouse returns a house where requests wait for a minute while there is no worker, and, with a threshold, for
// ten seconds while every worker is busy.
func newHoldHouse(t testing.TB, threshold *float64, endpoints ...pool.Endpoint) *house {
	t.Helper()
	h := newHouse(t, endpoints...)
	cfg := h.cfg
	cfg.Queue = &queue.RoomConfig{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, threshold)),
		Bound: 3, Timeout: 10 * time.Second, Hold: time.Minute}
	h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
	h.pool.OnLeave(h.book.Forget)
	h.pool.Watch(h.Router)
	h.Export()
	return h
}

// wantHeld fails the test unless so many requests wait for a worker, by the gauge as well.
func (h *house) wantHeld(n int) {
	h.t.Helper()
	all := metricstest.Read(h.t, h.metrics.Registry).Of("kvepp_held_requests")
	if len(all) != 1 || h.Held() != n || all.Value() != float64(n) {
		h.t.Errorf("%d requests are held, the gauge says %v, want %d", h.Held(), all, n)
	}
}

// TestHoldWhenEmpty: with an empty pool requests wait in order, at most as many as may wait in a line, and go as soon
// as a worker comes; while there are workers, nothing takes a turn.
func TestHoldWhenEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHoldHouse(t, nil)
		h.wantHeld(0)
		a := arriveAt(h)
		for i, name := range []string{"a", "b", "c", "d"} {
			a.send(t.Context(), name, completion("m", tokens(1000*i, 40)))
		}
		if want := "d: " + ErrQueueFull.Error(); !strings.HasPrefix(a.order(), want) {
			t.Errorf("went: %s, want %s", a.order(), want)
		}
		h.wantHeld(3)
		<-time.After(50 * time.Second)
		h.pool.Update(workers(1))
		<-time.After(2 * peersLookWithin)
		synctest.Wait()
		if got := strings.Fields(a.order()); len(a.by) != 3 || h.allWaiting() != 0 {
			t.Errorf("went: %v", got)
		}
		if wait := a.route("a").Waited; wait < 50*time.Second || wait > 51*time.Second {
			t.Errorf("a waited %v", wait)
		}
		h.wantHeld(0)
		a.send(t.Context(), "e", completion("m", tokens(9000, 40)))
		if a.route("e") == nil || a.route("e").Waited != 0 {
			t.Errorf("e: %+v", a.route("e"))
		}
	})
}

// TestHoldEnds: a request that no worker came for gets the reason; one whose client goes leaves the line.
func TestHoldEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHoldHouse(t, nil)
		a := arriveAt(h)
		ctx, cancel := context.WithCancel(t.Context())
		a.send(ctx, "gone", completion("m", tokens(0, 40)))
		a.send(t.Context(), "late", completion("m", tokens(0, 40)))
		cancel()
		synctest.Wait()
		h.wantHeld(1)
		<-time.After(time.Minute - time.Second)
		h.wantHeld(1)
		<-time.After(2 * time.Second)
		h.wantHeld(0)
		_, err := h.Route(t.Context(), completion("m", tokens(0, 40)))
		if !errors.Is(err, ErrNoEndpoints) || !errors.Is(err, queue.ErrAway) {
			t.Errorf("refused with %v", err)
		}
		if n := h.rejections()["hold_timeout"]; n != 2 {
			t.Errorf("%v refusals are counted, want 2", n)
		}
	})
}

// TestWaitingIsRefused: when kvepp ends, requests that wait are refused, and so are those that would wait later.
func TestWaitingIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHoldHouse(t, set(0.0), maxed(workers(1), 100)...)
		a := arriveAt(h)
		for i, name := range []string{"runs", "waits"} {
			a.send(t.Context(), name, completion("m", tokens(1000*i, 40)))
		}
		h.RefuseWaiting()
		synctest.Wait()
		a.send(t.Context(), "late", completion("m", tokens(2000, 40)))
		want := fmt.Sprintf("runs waits: %v late: %v", ErrEnding, ErrEnding)
		if a.order() != want || h.allWaiting() != 0 || h.rejections()["shutting_down"] != 2 {
			t.Errorf("went: %s, counted %v", a.order(), h.rejections())
		}
		a.prefilled("runs")
		a.send(t.Context(), "free", completion("m", tokens(3000, 40)))
		if a.route("free") == nil {
			t.Errorf("went: %s", a.order())
		}
	})
}

// TestHoldTimes: the time begins again when the last worker goes and when the first one comes.
func TestHoldTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHoldHouse(t, set(0.0), maxed(workers(1), 100)...)
		a := arriveAt(h)
		a.send(t.Context(), "runs", completion("m", tokens(0, 40)))
		a.send(t.Context(), "waits", completion("m", tokens(1000, 40)))
		<-time.After(9 * time.Second)
		h.wantHeld(0)
		h.pool.Update(nil)
		<-time.After(30 * time.Second) // busy for 9 s, and then away
		h.wantHeld(1)
		h.pool.Update(maxed(workers(1), 100))
		<-time.After(time.Second)
		synctest.Wait()
		if a.route("waits") == nil {
			t.Fatalf("went: %s", a.order()) // the worker that came back is another one, without load
		}
		a.send(t.Context(), "busy", completion("m", tokens(2000, 40)))
		<-time.After(11 * time.Second)
		if want := "busy: " + ErrQueueTimeout.Error(); !strings.HasSuffix(a.order(), want) {
			t.Errorf("went: %s, want %s", a.order(), want)
		}
	})
}

// TestHoldIsForWorkersThatMayCome: requests that no new worker of their model would help are refused at once, and so is
// a model that only the client names.
func TestHoldIsForWorkersThatMayCome(t *testing.T) {
	pinned := completion("m", tokens(0, 40))
	pinned.Body = []byte(strings.Replace(string(pinned.Body), `"model"`,
		`"nvext":{"backend_instance_id":7,"dp_rank":0},"model"`, 1))
	subset := completion("m", tokens(0, 40))
	subset.Allowed = func(string) bool { return false }
	for i, c := range []struct {
		endpoints []pool.Endpoint
		req       *Request
		want      error
	}{
		{nil, subset, ErrNoEndpoints},
		{workers(1), subset, ErrNoEndpoints},
		{workers(1), completion("other", tokens(0, 40)), ErrUnknownModel},
		{nil, pinned, ErrNoEndpoints},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			h := newHoldHouse(t, nil, c.endpoints...)
			h.cfg.Pinning = true
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := h.Route(ctx, c.req); !errors.Is(err, c.want) || errors.Is(err, queue.ErrAway) {
				t.Errorf("refused with %v, want %v at once", err, c.want)
			}
		})
	}
}
