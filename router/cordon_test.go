package router

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/router/queue"
	"kvepp/router/session"
)

// newCordonHouse is newHealthHouse with the pool's cordons connected to the tracker.
func newCordonHouse(t testing.TB, edit func(*Config), endpoints ...pool.Endpoint) *house {
	t.Helper()
	h := newHealthHouse(t, edit)
	h.pool.OnCordon(h.cfg.Eject.PoolCordon)
	h.pool.Update(endpoints)
	return h
}

func (h *house) cordon(name string, c eject.Cordon) {
	h.t.Helper()
	if err := h.cfg.Eject.SetCordon(name, c); err != nil {
		h.t.Fatal(err)
	}
}

// TestCordonedEndpointsGetNothing: for each source of a cordon, the endpoint is neither candidate nor fallback. Its
// running requests stay booked and its blocks stay indexed. The decision names the endpoint.
func TestCordonedEndpointsGetNothing(t *testing.T) {
	for _, by := range []string{"operator", "pool"} {
		t.Run(by, func(t *testing.T) {
			es := workers(4)
			h := newCordonHouse(t, func(c *Config) { c.Fallbacks = 3 }, es...)
			var log logtest.Log
			h.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			set := func(c eject.Cordon) {
				if by == "operator" {
					h.cordon("w0", c)
					return
				}
				if es[0].CordonedBy = ""; c != "" {
					es[0].CordonedBy = pool.CordonedByFile
				}
				h.pool.Update(es)
			}
			h.warm("w0", 0, tokens(0, 40), blocksOfFour)
			req := completion("m", tokens(0, 42))
			running := h.route(req)
			if running.Name != "w0" || running.Cordoned != nil {
				t.Fatalf("decision: %+v", running.Decision)
			}
			set(eject.Draining)
			for range 8 {
				r := h.route(req)
				if r.Name == "w0" || len(r.Costs) != 3 || len(r.Fallbacks) != 2 ||
					slices.Contains(r.Fallbacks, es[0].Address) ||
					!slices.Equal(r.Cordoned, []string{"w0"}) {
					t.Errorf("decision: %+v", r.Decision)
				}
				r.Free()
			}
			if !strings.Contains(log.String(), "cordoned=[w0]") {
				t.Errorf("the debug log does not name it: %s", log.String())
			}
			if n := h.load("w0").Requests; n != 1 {
				t.Errorf("%d requests run on the cordoned endpoint, want 1", n)
			}
			running.Free()
			set("")
			if r := h.route(req); r.Name != "w0" || r.PredictedCachedTokens != 40 || r.Cordoned != nil {
				t.Errorf("uncordoned: %+v", r.Decision)
			}
		})
	}
}

// TestSessionsLeaveCordonedEndpoints: hard and soft sessions both leave.
func TestSessionsLeaveCordonedEndpoints(t *testing.T) {
	for _, soft := range []bool{false, true} {
		h := newCordonHouse(
			t,
			func(c *Config) { c.Sessions = session.NewTable(session.Config{TTL: minute, Soft: soft}) },
			workers(3)...)
		req := of("s", completion("m", tokens(0, 40)))
		first := h.route(req) // runs on
		h.cordon(first.Name, eject.NoNewRequests)
		second := h.route(req)
		if second.Name == first.Name || second.Session != session.Moved {
			t.Errorf("soft %v: to %s, session %s", soft, second.Name, second.Session)
		}
		h.cordon(first.Name, "")
		if third := h.route(req); third.Name != second.Name || third.Session != session.Kept {
			t.Errorf(
				"soft %v: after the cordon to %s, session %s; want %s",
				soft,
				third.Name,
				third.Session,
				second.Name,
			)
		}
	}
}

// TestAllCordoned: a request that only cordoned endpoints may take is refused, and its record names these endpoints.
func TestAllCordoned(t *testing.T) {
	es := workers(2)
	h := newCordonHouse(t, func(c *Config) { c.Pinning = true }, es...)
	h.cordon("w0", eject.NoNewRequests)
	req := completion("m", tokens(0, 40))
	if _, err := h.Route(t.Context(), with(req, `"nvext":{"backend_instance_id":100}`)); !errors.Is(err, ErrCordoned) {
		t.Errorf("pinned to a cordoned endpoint: %v", err)
	}
	if r := h.route(with(req, `"nvext":{"backend_instance_id":101}`)); r.Name != "w1" {
		t.Errorf("pinned to the other: %+v", r.Decision)
	}
	h.breakDown("w1")
	if r := h.route(req); r.Name != "w1" || !r.EjectedAdmitted {
		t.Errorf("the only endpoint that is not cordoned is ejected, and serves all the same: %+v", r.Decision)
	}
	es[1].CordonedBy = pool.CordonedByPod
	h.pool.Update(es)
	_, err := h.Route(t.Context(), req)
	if !errors.Is(err, ErrCordoned) {
		t.Errorf("all are cordoned: %v", err)
	}
	if last := h.Records(1, Query{})[0]; !slices.Equal(last.Cordoned, []string{"w0", "w1"}) || last.Error == "" {
		t.Errorf("record: %+v", last)
	}
	if _, err := h.Route(t.Context(), completion("other", tokens(0, 40))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("of another model: %v", err)
	}
}

// TestCordonedPrefillWorkers: prompts go to the other prefill workers. If there are none, the request is refused.
func TestCordonedPrefillWorkers(t *testing.T) {
	h := newCordonHouse(t, nil, disaggregated(2, 2)...)
	h.warm("p0", 0, tokens(0, 40), blocksOfFour)
	h.cordon("p0", eject.NoNewRequests)
	h.cordon("d1", eject.NoNewRequests)
	r := h.route(completion("m", tokens(0, 42)))
	if r.Prefill == nil || r.Prefill.Name != "p1" || r.Name != "d0" || !slices.Equal(r.Cordoned, []string{"p0", "d1"}) {
		t.Errorf("decision: %+v, prefill %+v", r.Decision, r.Prefill)
	}
	h.cordon("p1", eject.NoNewRequests)
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 42))); !errors.Is(err, ErrCordoned) {
		t.Errorf("all prefill workers are cordoned: %v", err)
	}
}

// TestCordonDuringChoice: if an endpoint is cordoned between the choice and the booking, the choice is repeated. So a
// cordoned endpoint without bookings gets none later.
func TestCordonDuringChoice(t *testing.T) {
	for _, endpoints := range [][]pool.Endpoint{workers(2), disaggregated(2, 2)} {
		h := newCordonHouse(t, nil, endpoints...)
		first := endpoints[0].Name
		h.warm(first, 0, tokens(0, 40), blocksOfFour)
		req := completion("m", tokens(0, 42))
		asked := 0
		req.Allowed = func(string) bool { // called while candidates are gathered
			if asked++; asked == 1 {
				h.cordon(first, eject.Draining)
			}
			return true
		}
		r := h.route(req)
		computes := r.Name
		if r.Prefill != nil {
			computes = r.Prefill.Name
		}
		if computes == first || h.load(first).Requests != 0 || !slices.Equal(r.Cordoned, []string{first}) {
			t.Errorf("%s was cordoned meanwhile: %+v, prefill %+v", first, r.Decision, r.Prefill)
		}
		r.Free()
		if h.book.Len() != 0 {
			t.Errorf("%d bookings are left", h.book.Len())
		}
	}
}

// TestCordonWhileWaiting: when an endpoint is cordoned, requests that wait for it go elsewhere, or are refused if no
// other endpoint may take them.
func TestCordonWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newCordonHouse(t, func(c *Config) {
			c.Queue = &queue.RoomConfig{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, set(0.0))),
				Bound: 100}
			c.Sessions, c.Pinning = session.NewTable(session.Config{TTL: time.Hour}), true
		}, maxed(workers(2), 100)...)
		a := arriveAt(h)
		turn := of("s", completion("m", tokens(0, 40)))
		a.send(t.Context(), "first", turn)
		bound := a.route("first").Name
		other := map[string]string{"w0": "w1", "w1": "w0"}[bound]
		pin := map[string]string{"w0": "100", "w1": "101"}[bound]
		a.send(t.Context(), "busy", completion("m", tokens(1000, 40)))
		a.send(
			t.Context(),
			"pinned",
			with(completion("m", tokens(2000, 40)), `"nvext":{"backend_instance_id":`+pin+`}`),
		)
		a.send(t.Context(), "turn", turn)
		if a.order() != "first busy" || a.route("busy").Name != other || h.allWaiting() != 2 {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		h.cordon(bound, eject.Draining)
		<-time.After(2 * tick) // no other event wakes the room
		synctest.Wait()
		if want := "first busy pinned: " + ErrCordoned.Error(); a.order() != want || h.allWaiting() != 1 {
			t.Fatalf("went: %s; want %s; %d wait", a.order(), want, h.allWaiting())
		}
		a.prefilled("busy")
		if r := a.route("turn"); r == nil || r.Name != other || r.Session != session.Moved {
			t.Fatalf("went: %s; the session's turn: %+v", a.order(), r)
		}
		a.send(t.Context(), "late", completion("m", tokens(3000, 40)))
		h.cordon(other, eject.NoNewRequests)
		<-time.After(2 * tick)
		synctest.Wait()
		if want := " late: " + ErrCordoned.Error(); !strings.HasSuffix(a.order(), want) || h.allWaiting() != 0 {
			t.Errorf("went: %s; want%s; %d wait", a.order(), want, h.allWaiting())
		}
	})
}
