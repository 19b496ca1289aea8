package router

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/router/session"
)

// newHealthHouse returns a house that ejects endpoints after three failures.
func newHealthHouse(t testing.TB, edit func(*Config), endpoints ...pool.Endpoint) *house {
	h := newHouse(t)
	cfg := h.cfg
	cfg.Keep, cfg.FirstByte = 100, 30*time.Second
	cfg.Eject = eject.New(
		eject.Config{On: true, ConsecutiveFailures: 3, FailurePercent: 50, MaxPercent: 50, Time: time.Second},
		h.log,
	)
	if edit != nil {
		edit(&cfg)
	}
	h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
	h.pool.Watch(cfg.Eject)
	if cfg.Sessions != nil {
		h.pool.Watch(forgetting{cfg.Sessions.Forget})
	}
	h.pool.Update(endpoints)
	return h
}

// succeed ends a request with a complete response.
func succeed(r *Route) {
	r.Responding("", true)
	r.Heard()
	r.Free()
	r.Ended(Response{Status: "200", Complete: true, CachedTokens: -1})
}

// refused ends a request that found no connection.
func refused(r *Route) {
	r.Responding(eject.Refused, true)
	r.Free()
	r.Ended(Response{Status: "503", Complete: true, CachedTokens: -1})
}

// breakDown makes requests to an endpoint fail until it is ejected. Other endpoints answer.
func (h *house) breakDown(name string) {
	h.t.Helper()
	for range 100 {
		r := h.route(completion("m", tokens(rand.IntN(1<<20), 8)))
		if r.Name == name {
			refused(r)
		} else {
			succeed(r)
		}
		if ejected, _ := h.cfg.Eject.Counts(); ejected > 0 &&
			slices.ContainsFunc(
				h.cfg.Eject.Endpoints(),
				func(e eject.Health) bool { return e.Name == name && e.Ejected },
			) {
			return
		}
	}
	h.t.Fatalf("%s is not ejected", name)
}

// TestEjectedEndpointGetsNoRequests: an ejected endpoint gets no requests, even if it has their prompts cached; the
// decision says so. After the ejection time it gets one request as a trial, even if other workers have its prompt
// cached. The response to the trial readmits the endpoint.
func TestEjectedEndpointGetsNoRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, nil, workers(3)...)
		prompt := completion("m", tokens(0, 40))
		h.warm("w1", 0, tokens(0, 40), blocksOfFour)
		h.warm("w0", 0, tokens(1000, 40), blocksOfFour)
		h.breakDown("w1")
		for range 20 {
			r := h.route(prompt)
			if r.Name == "w1" || !slices.Equal(r.Ejected, []string{"w1"}) || r.EjectedAdmitted || r.Trial {
				t.Fatalf("%+v", r.Decision)
			}
			defer r.Free()
		}
		if record := h.Records(1, Query{})[0]; !slices.Equal(record.Ejected, []string{"w1"}) {
			t.Errorf("record %+v", record)
		}
		<-time.After(time.Second)
		trial := h.route(completion("m", tokens(1000, 40))) // w0 has all of it
		if trial.Name != "w1" || !trial.Trial {
			t.Fatalf("the trial: %+v", trial.Decision)
		}
		if r := h.route(prompt); r.Name == "w1" {
			t.Errorf("a second request during the trial: %+v", r.Decision)
		} else {
			r.Free()
		}
		succeed(trial)
		r := h.route(prompt)
		if r.Name != "w1" || len(r.Ejected) > 0 || r.PredictedCachedTokens != 40 {
			t.Errorf("after the trial: %+v", r.Decision) // its blocks stayed in the index
		}
		r.Free()
	})
}

// TestAllEjected: if all endpoints are ejected, all are candidates.
func TestAllEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, nil, workers(2)...)
		h.breakDown("w0")
		h.breakDown("w1")
		seen := map[string]bool{}
		for range 40 {
			r := h.route(completion("m", tokens(rand.IntN(1<<20), 8)))
			if seen[r.Name] = true; !r.EjectedAdmitted || len(r.Ejected) != 2 || r.Trial {
				t.Fatalf("%+v", r.Decision)
			}
			r.Free()
		}
		if len(seen) != 2 {
			t.Errorf("only %v serve", seen)
		}
	})
}

// TestEjectionMovesSessions: soft and hard sessions both move.
func TestEjectionMovesSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, func(c *Config) { c.Sessions = session.NewTable(session.Config{TTL: minute}) },
			workers(2)...)
		req := completion("m", tokens(0, 40))
		first := h.route(of("s", req))
		succeed(first)
		h.breakDown(first.Name)
		r := h.route(of("s", req))
		if r.Name == first.Name || r.Session != session.Moved {
			t.Errorf("%s, session %s", r.Name, r.Session)
		}
		succeed(r)
	})
}

// TestPinnedToEjected: a request that is pinned to an ejected endpoint goes there.
func TestPinnedToEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, func(c *Config) { c.Pinning = true }, workers(2)...)
		h.breakDown("w0")
		r := h.route(with(completion("m", tokens(0, 8)), `"nvext":{"backend_instance_id":100}`))
		if r.Name != "w0" || r.Trial {
			t.Errorf("%+v", r.Decision)
		}
		succeed(r)
	})
}

// TestPrefillWorkerIsEjected: a failure counts for both legs. Only the broken prefill worker is ejected, because the
// others also have successes.
func TestPrefillWorkerIsEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := workers(5)
		es[0].Role, es[1].Role = pool.Prefill, pool.Prefill
		for i := 2; i < 5; i++ {
			es[i].Role = pool.Decode
		}
		h := newHealthHouse(t, nil, es...)
		for range 200 {
			r := h.route(completion("m", tokens(rand.IntN(1<<20), 8)))
			if r.Prefill.Name == "w1" {
				refused(r)
			} else {
				succeed(r)
			}
			<-time.After(100 * time.Millisecond)
		}
		served := 0
		for range 20 {
			r := h.route(completion("m", tokens(rand.IntN(1<<20), 8)))
			if r.Prefill.Name == "w0" {
				served++
			}
			if r.Prefill.Name == "w1" {
				refused(r)
			} else {
				succeed(r)
			}
		}
		if served < 19 { // one may be a trial
			t.Errorf("%d of 20 requests went to the prefill worker that works", served)
		}
	})
}

// TestFirstByte: if the headers of a streamed response take too long, that is a failure; for a response in one piece it
// is not. Late responses leave no booking.
func TestFirstByte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, nil, workers(1)...)
		send := func(stream bool) *Route {
			r := h.route(with(completion("m", tokens(0, 8)), fmt.Sprintf(`"stream":%v`, stream)))
			r.Sent()
			return r
		}
		var whole, streams []*Route
		for range 5 {
			whole = append(whole, send(false))
		}
		<-time.After(time.Minute)
		if ejected, _ := h.cfg.Eject.Counts(); ejected != 0 {
			t.Error("answers in one piece took their time")
		}
		for range 3 {
			streams = append(streams, send(true))
		}
		<-time.After(29 * time.Second)
		if ejected, _ := h.cfg.Eject.Counts(); ejected != 0 {
			t.Error("ejected too soon")
		}
		<-time.After(time.Second)
		synctest.Wait()
		if ejected, _ := h.cfg.Eject.Counts(); ejected != 1 {
			t.Error("not ejected after three streams without headers")
		}
		for _, r := range append(whole, streams...) {
			succeed(r)
		}
		if h.book.Len() != 0 {
			t.Errorf("%d booked", h.book.Len())
		}
	})
}

// TestResponsesThatBreakOff: after three responses that broke off for no known cause, an endpoint gets no requests. The
// access log says whether client or endpoint ended them, before or after the stream ends.
func TestResponsesThatBreakOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, nil, workers(2)...)
		h.warm("w0", 0, tokens(0, 40), blocksOfFour)
		breakOff := func() string {
			r := h.route(completion("m", tokens(0, 40)))
			if r.Name != "w0" {
				t.Fatalf("to %s", r.Name)
			}
			r.Responding("", true)
			r.Heard()
			r.Free()
			r.Ended(Response{Status: "200", Explained: true, CachedTokens: -1})
			return r.Token
		}
		expect := func(name, when string) {
			t.Helper()
			r := h.route(completion("m", tokens(0, 40)))
			if r.Name != name {
				t.Errorf("%s: to %s", when, r.Name)
			}
			r.Free()
			r.Ended(Response{CachedTokens: -1})
		}
		first, second, third := breakOff(), breakOff(), breakOff()
		expect("w1", "three responses broke off")
		h.BrokenOff(first, "") // the client closed the connection
		expect("w0", "one of three is explained")
		h.BrokenOff(second, "")
		h.BrokenOff(third, "")
		h.BrokenOff("nonsense", eject.Reset)
		for range 3 {
			breakOff()
		}
		<-time.After(explainedWithin + time.Millisecond)
		synctest.Wait()
		expect("w0", "no report in time")
		for range 3 {
			r := h.route(completion("m", tokens(0, 40)))
			h.BrokenOff(r.Token, eject.Reset) // before the stream ends
			r.Responding("", true)
			r.Free()
			r.Ended(Response{Status: "200", Explained: true, CachedTokens: -1})
		}
		expect("w1", "the endpoint broke three responses off")
		if ejected, _ := h.cfg.Eject.Counts(); ejected != 1 {
			t.Errorf("%d ejected", ejected)
		}
	})
}

// TestBrokenResponsesAreBounded: access log entries without a matching request take bounded memory.
func TestBrokenResponsesAreBounded(t *testing.T) {
	h := newHealthHouse(t, nil, workers(1)...)
	for i := range 3 * maxBroken {
		h.BrokenOff(fmt.Sprint("token ", i), eject.Reset)
	}
	if n := len(h.broken.byToken); n > maxBroken {
		t.Errorf("%d entries are kept", n)
	}
}

// TestRetriesAreFailures: each endpoint that the proxy tried before the serving one counts as failed. An endpoint that
// the proxy did not try does not.
func TestRetriesAreFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, func(c *Config) { c.Fallbacks = 2 }, workers(3)...)
		fails := func() (all []int) {
			for _, e := range h.cfg.Eject.Endpoints() {
				all = append(all, e.Fails)
			}
			return all
		}
		for _, c := range []struct {
			serves, attempts int // serves: index in the chosen endpoint and its fallbacks
			failed           int // how many of the first ones failed
		}{{0, 1, 0}, {1, 2, 1}, {2, 3, 2}, {1, 0, 1}, {2, 0, 2}, {2, 1, 0}, {2, 2, 1}} {
			r := h.route(completion("m", tokens(0, 8)))
			order := append([]string{r.Address}, r.Fallbacks...)
			h.Reconcile(r, order[c.serves], c.attempts)
			sum := 0
			for _, n := range fails() {
				sum += n
			}
			if sum != c.failed {
				t.Errorf("%+v: failures %v", c, fails())
			}
			succeed(r)
			for range 3 { // clears the failures of all
				for _, e := range h.cfg.Eject.Endpoints() {
					h.cfg.Eject.Succeeded(h.cfg.Eject.Of(e.Workers[0]), 0)
				}
			}
		}
	})
}

// TestFallbacksAfterEjection: ejected endpoints come last among the fallbacks.
func TestFallbacksAfterEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, func(c *Config) { c.Fallbacks = 2 }, workers(3)...)
		h.breakDown("w1")
		r := h.route(completion("m", tokens(0, 8)))
		if len(r.Fallbacks) != 2 || r.Fallbacks[1] != "10.0.0.2:8000" {
			t.Errorf("%s, fallbacks %v", r.Name, r.Fallbacks)
		}
		r.Free()
	})
}

// TestProxysOwnResponse: a response of the proxy itself is neither a failure nor a success of the endpoint.
func TestProxysOwnResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealthHouse(t, nil, workers(1)...)
		for range 9 {
			r := h.route(completion("m", tokens(0, 8)))
			r.Responding("", false)
			r.Free()
			r.Ended(Response{Status: "503", Complete: true, CachedTokens: -1})
		}
		if e := h.cfg.Eject.Endpoints()[0]; e.Ejected || e.Fails != 0 {
			t.Errorf("%+v", e)
		}
		h.breakDown("w0")
		<-time.After(time.Second)
		for range 2 { // an inconclusive trial is repeated
			trial := h.route(completion("m", tokens(0, 8)))
			if !trial.Trial {
				t.Error("no trial")
			}
			trial.Responding("", false)
			trial.Free()
			trial.Ended(Response{Status: "503", Complete: true, CachedTokens: -1})
		}
	})
}

// BenchmarkHealth measures a request from its choice to its end, among 64 endpoints: without ejection, with ejection
// and all healthy, and with one ejected.
func BenchmarkHealth(b *testing.B) {
	for _, c := range []struct {
		name    string
		off     bool
		ejected int
	}{{"off", true, 0}, {"well", false, 0}, {"ejected=1", false, 1}} {
		b.Run(c.name, func(b *testing.B) {
			h := newHealthHouse(b, func(cfg *Config) {
				cfg.Keep, cfg.Explain = 0, false
				cfg.Eject = eject.New(
					eject.Config{
						On:                  !c.off,
						ConsecutiveFailures: 1,
						FailurePercent:      50,
						MaxPercent:          50,
						Time:                time.Minute,
					},
					slog.New(slog.DiscardHandler),
				)
			}, workers(64)...)
			for w := range c.ejected {
				h.cfg.Eject.Failed(h.cfg.Eject.Of(kvblock.Worker(w)), 0, eject.Refused)
			}
			req := with(completion("m", tokens(0, 200)), `"stream":true`)
			b.ReportAllocs()
			for b.Loop() {
				r, err := h.Route(b.Context(), req)
				if err != nil {
					b.Fatal(err)
				}
				r.Sent()
				succeed(r)
			}
		})
	}
}
