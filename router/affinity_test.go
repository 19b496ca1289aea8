package router

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

const minute = time.Minute

// newSessionHouse is newHouse with session affinity.
func newSessionHouse(t testing.TB, cfg session.Config, endpoints ...pool.Endpoint) *house {
	h := newHouse(t, endpoints...)
	h.cfg.Sessions = session.NewTable(cfg)
	h.pool.Watch(forgetting{h.cfg.Sessions.Forget})
	return h
}

// forgetting is a pool watcher that only handles workers that leave.
type forgetting struct{ forget func(kvblock.Worker) }

func (forgetting) WorkerJoined(pool.Worker)      {}
func (f forgetting) WorkerLeft(w kvblock.Worker) { f.forget(w) }

// of returns req as a request of a session.
func of(session string, req *Request) *Request {
	r := *req
	r.Hints.Session = session
	return &r
}

// control returns a request with session_control.
func control(fields string, req *Request) *Request {
	return with(req, `"nvext":{"session_control":{`+fields+`}}`)
}

// A session stays with its worker even if another worker is cheaper. Requests of other sessions do not.
func TestSessionStaysWithItsWorker(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(3)...)
	req := completion("m", tokens(0, 40))
	first := h.route(of("s", req))
	if first.Session != session.New {
		t.Errorf("the first request's session is %q", first.Session)
	}
	for i := range 5 { // none of them ends, so the worker's cost rises
		r := h.route(of("s", req))
		if r.Name != first.Name || r.Session != session.Kept {
			t.Fatalf("request %d: to %s, session %s; want %s, kept", i, r.Name, r.Session, first.Name)
		}
	}
	for _, other := range []*Request{req, of("s2", req), of("s", completion("unread", tokens(0, 40)))} {
		if r, err := h.Route(t.Context(), other); err == nil && r.Name == first.Name {
			t.Errorf("a request of another session went to the busy worker too")
		}
	}
	if n := h.cfg.Sessions.Active(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}

// A session expires when no request of it arrives within the TTL, counted from the end of the latest request.
func TestSessionExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newSessionHouse(t, session.Config{TTL: minute}, workers(2)...)
		req := of("s", completion("m", tokens(0, 40)))
		r := h.route(req)
		<-time.After(5 * minute) // the response takes long
		if again := h.route(req); again.Session != session.Kept {
			t.Errorf("while a request runs, the session is %s", again.Session)
		} else {
			again.Free()
		}
		<-time.After(5 * minute)
		r.Free()
		r.Free() // only the first call counts
		for range 3 {
			<-time.After(minute - time.Nanosecond)
			r = h.route(req)
			r.Free()
			if r.Session != session.Kept {
				t.Errorf("within the time the session is %s", r.Session)
			}
		}
		<-time.After(minute)
		if r = h.route(req); r.Session != session.New {
			t.Errorf("after the time the session is %s", r.Session)
		}
		r.Free()
		<-time.After(minute)
		if n, stats := h.cfg.Sessions.Active(), h.cfg.Sessions.Stats(); n != 0 || stats.Expired != 2 || stats.New != 2 {
			t.Errorf("%d sessions, %+v", n, stats)
		}
	})
}

func TestSessionEnds(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(2)...)
	req := of("s", completion("m", tokens(0, 40)))
	final := *req
	final.Hints.SessionFinal = true
	for name, last := range map[string]*Request{"final": &final, "close": control(`"session_id":"s","action":"close"`,
		completion("m", tokens(0, 40)))} {
		one := h.route(req)
		ending := h.route(last)
		if ending.Session != session.Kept || ending.Name != one.Name {
			t.Errorf("%s: the last request's session is %s", name, ending.Session)
		}
		if n := h.cfg.Sessions.Active(); n != 1 {
			t.Errorf("%s: %d sessions before its end", name, n)
		}
		ending.Free()
		if n := h.cfg.Sessions.Active(); n != 0 {
			t.Errorf("%s: %d sessions after its end", name, n)
		}
		two := h.route(req)
		if two.Session != session.New {
			t.Errorf("%s: the next request's session is %s", name, two.Session)
		}
		one.Free() // releases only its own lease
		if n := h.cfg.Sessions.Active(); n != 1 {
			t.Errorf("%s: %d sessions, want the new one", name, n)
		}
		two.Free()
		h.route(last).Free()
	}
}

// Without a TTL the table keeps only sessions that requests open (session_control), each for the time that its request
// gives.
func TestSessionControl(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newSessionHouse(t, session.Config{}, workers(2)...)
		req := completion("m", tokens(0, 40))
		said := func(r *Request) string {
			route := h.route(r)
			route.Free()
			return route.Session
		}
		turn := control(`"session_id":"s"`, req)
		for _, c := range []struct {
			name string
			wait time.Duration
			req  *Request
			want string
		}{
			{"a header opens nothing", 0, of("s", req), ""},
			{"nor does a turn", 0, turn, ""},
			{"open", 0, control(`"session_id":"s","action":"open","timeout":60`, req), session.New},
			{"turn", 59 * time.Second, turn, session.Kept},
			{"header", 59 * time.Second, of("s", req), session.Kept},
			{"late", 60 * time.Second, turn, ""},
			{"bind", 0, control(`"session_id":"s","action":"bind"`, req), session.New},
			{"bind again", 299 * time.Second, control(`"session_id":"s","action":"bind","timeout":10`, req),
				session.Kept},
			{"late for the new time", 10 * time.Second, turn, ""},
			{"open once more", 0, control(`"session_id":"s","action":"open"`, req), session.New},
			{"close", 0, control(`"session_id":"s","action":"close"`, req), session.Kept},
			{"closed", 0, turn, ""},
			{"close what is not open", 0, control(`"session_id":"s","action":"close"`, req), ""},
		} {
			<-time.After(c.wait)
			if got := said(c.req); got != c.want {
				t.Fatalf("%s: the session is %q, want %q", c.name, got, c.want)
			}
		}
		h.cfg.IgnoreHints = true
		if got := said(control(`"session_id":"s","action":"open"`, req)); got != "" {
			t.Errorf("ignored, and yet the session is %q", got)
		}
	})
}

// The children of one session share a worker, which may differ from their parent's. The end of one child does not end
// the others.
func TestChildrenAreKeptTogether(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(4)...)
	req := completion("m", tokens(0, 40))
	child := func(id string) *Request {
		r := of(id, req)
		r.Hints.ParentSession = "s"
		return r
	}
	parent, a, b := h.route(of("s", req)), h.route(child("a")), h.route(child("b"))
	if a.Name == parent.Name || b.Name != a.Name || a.Session != session.New || b.Session != session.Kept {
		t.Errorf("parent on %s, children on %s (%s) and %s (%s)", parent.Name, a.Name, a.Session, b.Name, b.Session)
	}
	last := child("a")
	last.Hints.SessionFinal = true
	h.route(last).Free()
	if r := h.route(child("c")); r.Session != session.Kept || r.Name != a.Name {
		t.Errorf("a third child on %s (%s)", r.Name, r.Session)
	}
}

// If a session's worker is overloaded: in hard mode the request is refused, in soft mode the session moves. The load of
// other workers does not matter.
func TestSessionOnAnOverloadedWorker(t *testing.T) {
	for _, soft := range []bool{false, true} {
		h := newSessionHouse(t, session.Config{TTL: minute, Soft: soft}, workers(2)...)
		h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](50)})
		req := of("s", completion("m", tokens(0, 40)))
		first := h.route(req)
		h.route(req) // 80 tokens wait
		r, err := h.Route(t.Context(), req)
		switch {
		case soft && (err != nil || r.Name == first.Name || r.Session != session.Moved):
			t.Errorf("soft: %v, %+v", err, r)
		case soft:
			first.Free() // the old worker is idle again, but the session has moved
			if again := h.route(req); again.Name != r.Name || again.Session != session.Kept {
				t.Errorf("soft: the next request went to %s (%s), want %s", again.Name, again.Session, r.Name)
			}
		case !errors.Is(err, ErrOverloaded):
			t.Errorf("hard: %v, want %v", err, ErrOverloaded)
		default:
			if other := h.route(of("s2", completion("m", tokens(0, 40)))); other.Name == first.Name {
				t.Error("hard: another session on the overloaded worker")
			}
			first.Free()
			if again := h.route(req); again.Name != first.Name || again.Session != session.Kept {
				t.Errorf("hard: afterwards to %s (%s)", again.Name, again.Session)
			}
		}
	}
}

// If a session's worker left the pool, the session starts again. If the proxy's subset excludes its worker, the session
// moves. If a request is pinned to another worker, the session moves there.
func TestSessionWithoutItsWorker(t *testing.T) {
	es := workers(3)
	h := newSessionHouse(t, session.Config{TTL: minute}, es...)
	req := of("s", completion("m", tokens(0, 40)))
	first := h.route(req)
	elsewhere := *req
	elsewhere.Allowed = func(address string) bool { return address != first.Address }
	moved := h.route(&elsewhere)
	if moved.Name == first.Name || moved.Session != session.Moved {
		t.Errorf("outside the subset: to %s, %s", moved.Name, moved.Session)
	}
	if r := h.route(req); r.Name != moved.Name || r.Session != session.Kept {
		t.Errorf("after it moved: to %s, %s", r.Name, r.Session)
	}
	h.cfg.Pinning = true
	if r := h.route(with(req, fmt.Sprintf(`"nvext":{"backend_instance_id":%d}`,
		first.InstanceID))); r.Name != first.Name ||
		r.Session != session.Moved {
		t.Errorf("pinned to %s: to %s, %s", first.Name, r.Name, r.Session)
	}
	if r := h.route(req); r.Name != first.Name || r.Session != session.Kept {
		t.Errorf("after it was pinned: to %s, %s", r.Name, r.Session)
	}
	h.pool.Update(slices.DeleteFunc(es, func(e pool.Endpoint) bool { return e.Name == first.Name }))
	if n, stats := h.cfg.Sessions.Active(), h.cfg.Sessions.Stats(); n != 0 || stats.WorkerLeft != 1 {
		t.Errorf("the worker left: %d sessions, %+v", n, stats)
	}
	first.Free()
	if r := h.route(req); r.Name == first.Name || r.Session != session.New {
		t.Errorf("after its worker left: to %s, %s", r.Name, r.Session)
	}
}

// All requests of a session go to one worker, also if many arrive at once.
func TestSessionRace(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(8)...)
	for session := range 20 {
		var all sync.WaitGroup
		routes := make([]*Route, 16)
		for i := range routes {
			all.Go(func() {
				routes[i], _ = h.Route(t.Context(), of(fmt.Sprint(session), completion("m", tokens(i, 40))))
			})
		}
		all.Wait()
		for i, r := range routes {
			if r == nil || r.Name != routes[0].Name {
				t.Fatalf("session %d: request %d went to %+v, the first to %s", session, i, r, routes[0].Name)
			}
			r.Free()
		}
	}
	stats := h.cfg.Sessions.Stats()
	if h.book.Len() != 0 || stats.New != 20 || stats.Kept != 20*15 || stats.Moved != 0 {
		t.Errorf("%d bookings left, %+v", h.book.Len(), stats)
	}
}

// A full table evicts the least recently used session for a new one, and idle sessions before running ones.
func TestSessionsAreBounded(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute, Max: 3}, workers(2)...)
	req := completion("m", tokens(0, 40))
	running := h.route(of("running", req))
	for _, s := range []string{"a", "b", "a", "c"} { // b was used longest ago
		h.route(of(s, req)).Free()
	}
	for s, want := range map[string]string{"running": session.Kept, "a": session.Kept, "c": session.Kept} {
		if r := h.route(of(s, req)); r.Session != want {
			t.Errorf("%s is %s, want %s", s, r.Session, want)
		}
	}
	if r := h.route(of("d", req)); r.Session != session.New { // now all are running
		t.Errorf("a new session is %s", r.Session)
	}
	running.Free()
	if n, stats := h.cfg.Sessions.Active(), h.cfg.Sessions.Stats(); n != 3 || stats.Evicted != 2 {
		t.Errorf("%d sessions, %+v", n, stats)
	}
	h.route(of(strings.Repeat("long", 1<<16), req)) // of any length
}

// A request of a hard session waits for its session's worker, even if another worker is ready; requests behind it do
// not wait for it. A request of a soft session goes to the ready worker.
//
// Source: dynamo-kv-router 1.6.1, scheduling::queue: a pin limits the workers that a request waits for, a preference
// does not.
func TestSessionsWaitForTheirWorker(t *testing.T) {
	for _, soft := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newQueueHouse(t, queue.FCFS, maxed(workers(2), 100)...)
			h.cfg.Sessions = session.NewTable(session.Config{TTL: minute, Soft: soft})
			req := completion("m", tokens(0, 40))
			a := arriveAt(h)
			a.send(t.Context(), "first", of("s", req))
			a.send(t.Context(), "second", of("s", req))
			a.send(t.Context(), "other", req)
			if soft {
				// A worker is ready, so no request waits. The session's worker may take it, so it stays.
				if a.order() != "first second other" || a.route("second").Name != a.route("first").Name ||
					a.route("other").Name == a.route("first").Name {
					t.Errorf("soft: went %s", a.order())
				}
				return
			}
			if a.order() != "first other" || a.route("other").Name == a.route("first").Name {
				t.Errorf("hard: went %s", a.order())
			}
			a.prefilled("first")
			if a.order() != "first other second" || a.route("second").Name != a.route("first").Name ||
				a.route("second").Session != session.Kept {
				t.Errorf("hard: went %s", a.order())
			}
		})
	}
}

// In disaggregated serving a session stays with its decode worker.
func TestSessionOfTwoLegs(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, disaggregated(2, 3)...)
	prefills := map[string]bool{}
	first := h.route(of("s", completion("m", tokens(0, 40))))
	for i := range 6 {
		r := h.route(of("s", completion("m", tokens(100*i, 40))))
		if r.Name != first.Name || r.Session != session.Kept {
			t.Errorf("request %d: decoded by %s (%s), the first by %s", i, r.Name, r.Session, first.Name)
		}
		prefills[r.Prefill.Name] = true
	}
	if len(prefills) != 2 {
		t.Errorf("all were prefilled by one: %v", prefills)
	}
}

// In every routing mode a session stays with its worker.
func TestSessionsInEveryMode(t *testing.T) {
	for _, mode := range []scoring.Mode{scoring.KV, scoring.RoundRobin, scoring.Random, scoring.PowerOfTwo,
		scoring.LeastLoaded, scoring.DeviceAwareWeighted} {
		h := newSessionHouse(t, session.Config{TTL: minute}, workers(4)...)
		h.cfg.Scoring.Mode = mode
		first := h.route(of("s", completion("m", tokens(0, 40))))
		for i := range 12 {
			if r := h.route(of("s", completion("m", tokens(i, 40)))); r.Name != first.Name ||
				r.Session != session.Kept {
				t.Errorf("%v: request %d went to %s (%s), the first to %s", mode, i, r.Name, r.Session, first.Name)
			}
		}
	}
}

// Random requests end in random order while workers leave. At the end nothing is booked and no session is held.
func TestHistoriesOfHintsEndEmpty(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 11))
			es := append(workers(3), disaggregated(2, 2)...)
			h := newSessionHouse(t, session.Config{TTL: minute, Max: 6, Soft: seed%2 == 0}, es...)
			h.cfg.Pinning = true
			if seed%3 == 0 {
				h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](100)})
			}
			var running []*Route
			refused := 0
			for range 300 {
				switch rng.IntN(5) {
				case 0, 1, 2:
					fields := []string{`"x":1`,
						fmt.Sprintf(
							`"session_control":{"session_id":"%d","action":%q}`,
							rng.IntN(9),
							[]string{"open", "bind", "close"}[rng.IntN(3)],
						),
						fmt.Sprintf(
							`"router_config_override":{"overlap_score_weight":%d,"router_temperature":%d,`+
								`"assume_kv_reuse":%v,"track_prefill_tokens":%v}`,
							rng.IntN(3),
							rng.IntN(2),
							rng.IntN(2) == 0,
							rng.IntN(2) == 0,
						),
						fmt.Sprintf(`"backend_instance_id":%d`, 100+rng.IntN(4)),
						fmt.Sprintf(`"decode_worker_id":%d,"prefill_worker_id":%d`, 300+rng.IntN(3), 200+rng.IntN(3)),
					}
					req := with(
						completion("m", tokens(rng.IntN(4), 8+rng.IntN(60))),
						`"nvext":{`+fields[rng.IntN(len(fields))]+`}`,
					)
					if rng.IntN(2) == 0 {
						req = of(fmt.Sprint(rng.IntN(9)), req)
						req.Hints.SessionFinal = rng.IntN(4) == 0
					}
					r, err := h.Route(t.Context(), req)
					var bad *body.Error
					switch {
					case err == nil:
						running = append(running, r)
					case errors.As(err, &bad), errors.Is(err, ErrOverloaded), errors.Is(err, ErrNoPrefill):
						refused++
					default:
						t.Fatalf("seed %d: %v", seed, err)
					}
				case 3:
					if len(running) > 0 {
						i := rng.IntN(len(running))
						if running[i].MarkPrefillCompleted(); rng.IntN(2) == 0 {
							running[i].Free()
							running = slices.Delete(running, i, i+1)
						}
					}
				case 4:
					if rng.IntN(10) == 0 { // one worker leaves, or all return
						h.pool.Update(es[:len(es)-rng.IntN(2)*2])
					}
				}
			}
			if len(running) == 0 || refused == 0 {
				t.Errorf(
					"seed %d: %d requests run, %d were refused: too few of one to test with",
					seed,
					len(running),
					refused,
				)
			}
			for _, r := range running {
				r.Free()
			}
			for w, load := range h.book.Loads(nil) {
				if load != (scoring.Load{}) {
					t.Errorf("seed %d: worker %d still carries %+v", seed, w, load)
				}
			}
			if n := h.cfg.Sessions.Active(); h.book.Len() != 0 || n > 6 {
				t.Errorf("seed %d: %d bookings, %d sessions", seed, h.book.Len(), n)
			}
			<-time.After(session.MaxTTL)
			if n := h.cfg.Sessions.Active(); n != 0 {
				t.Errorf("seed %d: %d sessions are held by no request", seed, n)
			}
		})
	}
}

// A session is kept also if the proxy's body mode does not let kvepp wait for the bodies.
func TestSessionWithoutBodies(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(3)...)
	req := &Request{Path: "/v1/chat/completions", BodylessReason: ReasonBodyMode, BodyBytes: 4096}
	first := h.route(of("s", req))
	for range 9 {
		if r := h.route(of("s", req)); r.Name != first.Name || r.Session != session.Kept || r.Reason != ReasonBodyMode {
			t.Fatalf("to %s, session %q, reason %s; want %s, kept", r.Name, r.Session, r.Reason, first.Name)
		}
	}
	if r := h.route(req); r.Name == first.Name {
		t.Error("one without a session should go where there is less load")
	}
}
