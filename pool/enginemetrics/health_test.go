package enginemetrics

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// pageStates records the calls of Config.Health.
type pageStates struct {
	mu    sync.Mutex
	calls []stateAt
}

type stateAt struct {
	worker kvblock.Worker
	state  PageState
	at     time.Time
}

func (p *pageStates) record(w kvblock.Worker, s PageState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, stateAt{w, s, time.Now()})
}

// of returns the calls for a worker.
func (p *pageStates) of(w kvblock.Worker) (calls []stateAt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.calls {
		if c.worker == w {
			calls = append(calls, c)
		}
	}
	return calls
}

// latest returns the last state of a worker, and since when it has had it.
func (p *pageStates) latest(w kvblock.Worker) (s PageState, since time.Time) {
	for _, c := range p.of(w) {
		if c.state != s {
			s, since = c.state, c.at
		}
	}
	return s, since
}

func (p *pageStates) want(t *testing.T, w kvblock.Worker, want PageState) {
	t.Helper()
	if got, _ := p.latest(w); got != want {
		t.Errorf("worker %d: the page's state is %v, want %v", w, got, want)
	}
}

// refuse makes the host of a page refuse connections from now on.
func (e *engines) refuse(host string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.page[host] = func(*http.Request) (string, error) {
		return "", &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
}

// hang makes the server at a host accept requests without a response from now on. When release is closed, it answers
// the waiting requests.
func (e *engines) hang(host string, release <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.page[host] = func(r *http.Request) (string, error) {
		select {
		case <-release:
			return busyPage(1, 1, 0.5), nil
		case <-r.Context().Done():
			return "", r.Context().Err()
		}
	}
}

// waitForRead lets time pass until a page is read again, and returns when the read began.
func waitForRead(e *engines, host string) time.Time {
	for n := len(e.times(host)); len(e.times(host)) == n; {
		advance(10 * time.Millisecond)
	}
	return e.times(host)[len(e.times(host))-1]
}

// TestSilentPage: a page that answered before becomes silent SilentAfter after the start of the first read without a
// response, for any interval and timeout. It answers again when the engine continues.
func TestSilentPage(t *testing.T) {
	for _, c := range []struct{ interval, silentAfter, want time.Duration }{
		{5 * time.Second, 0, 5 * time.Second},
		{time.Second, 0, 5 * time.Second},
		{30 * time.Second, 0, 5 * time.Second},
		{5 * time.Second, 2 * time.Second, 2 * time.Second},
		{time.Second, 12 * time.Second, 12 * time.Second},
	} {
		t.Run(fmt.Sprint(c.interval, c.silentAfter), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var states pageStates
				_, e, _ := start(
					t,
					Config{Interval: c.interval, SilentAfter: c.silentAfter, Health: states.record},
					endpoints(2)...)
				e.setPage("e0:80", busyPage(1, 1, 0.5))
				e.setPage("e1:80", busyPage(1, 1, 0.5))
				advance(c.interval + time.Second)
				states.want(t, 0, PageResponds)
				e.hang("e0:80", nil)
				began := waitForRead(e, "e0:80")
				advance(c.want - 200*time.Millisecond)
				states.want(t, 0, PageResponds)
				advance(400 * time.Millisecond)
				states.want(t, 0, PageSilent)
				if _, at := states.latest(0); at.Sub(began) < c.want {
					t.Errorf("silent %v after the read began, want %v", at.Sub(began), c.want)
				}
				advance(time.Minute)
				states.want(t, 0, PageSilent)
				e.setPage("e0:80", busyPage(1, 1, 0.5))
				advance(c.interval*11/10 + max(defaultSilentAfter, c.silentAfter))
				states.want(t, 0, PageResponds)
				if calls := states.of(1); slices.ContainsFunc(
					calls,
					func(s stateAt) bool { return s.state != PageResponds },
				) ||
					len(calls) < int(time.Minute/c.interval) {
					t.Errorf("the other page answered every time: %v", calls)
				}
			})
		})
	}
}

// TestStoppedEngineGoesOn: when a stopped engine continues while a read waits for its response, it answers that read,
// and the page's state changes at that moment.
func TestStoppedEngineGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, _ := start(t, Config{Health: states.record}, endpoints(1)...)
		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(6 * time.Second)
		release := make(chan struct{})
		e.hang("e0:80", release)
		advance(13 * time.Second)
		states.want(t, 0, PageSilent)
		waitForRead(e, "e0:80") // between two reads, which the jitter can separate by half a second, none waits
		close(release)
		advance(10 * time.Millisecond)
		states.want(t, 0, PageResponds)
	})
}

// TestResponsesOfAnyKind: an HTTP error is a response, and such pages are read in every interval. A page that never
// answered is read with backoff, and never becomes silent.
func TestResponsesOfAnyKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, _ := start(t, Config{Health: states.record}, endpoints(4)...)
		e.setPage("e0:80", "") // 404
		e.setPage("e1:80", "up 1\n")
		e.hang("e2:80", nil)
		advance(2 * time.Minute)
		states.want(t, 0, PageResponds)
		states.want(t, 1, PageResponds)
		states.want(t, 2, PageUnknown)
		states.want(t, 3, PageUnknown) // an error other than a refusal
		for w := range kvblock.Worker(2) {
			if n := len(states.of(w)); n < 20 {
				t.Errorf("worker %d: %d calls in two minutes", w, n)
			}
		}
		for _, host := range []string{"e2:80", "e3:80"} {
			if n := len(e.times(host)); n > 9 {
				t.Errorf("%s never answered and was read %d times in two minutes", host, n)
			}
		}
		e.refuse("e0:80")
		advance(6 * time.Second)
		states.want(t, 0, PageRefused)
	})
}

// TestRefusedPage: a refusal counts for the worker's address only if the page has the same host and port. A page that
// refuses is read in every interval, so that kvepp notices an engine that returns.
func TestRefusedPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, _ := start(
			t,
			Config{Health: states.record},
			pool.Endpoint{Name: "a", Address: "h:80"},
			pool.Endpoint{
				Name:    "b",
				Address: "h:81",
				Metrics: "http://h:9/metrics",
			},
			pool.Endpoint{Name: "c", Address: "h:82", DataParallelSize: 2},
		)
		for _, host := range []string{"h:80", "h:9", "h:82"} {
			e.refuse(host)
		}
		advance(6 * time.Second)
		for w, want := range []PageState{PageRefused, PageRefusedElsewhere, PageRefused, PageRefused} {
			states.want(t, kvblock.Worker(w), want)
		}
		advance(10 * time.Minute)
		if n := len(states.of(0)); n < 100 {
			t.Errorf("a refused page was read %d times in ten minutes", n)
		}
		e.setPage("h:80", busyPage(1, 1, 0.5))
		advance(5600 * time.Millisecond)
		states.want(t, 0, PageResponds)
		states.want(t, 1, PageRefusedElsewhere)
	})
}

func TestSameServer(t *testing.T) {
	for _, c := range []struct {
		page, address string
		want          bool
	}{
		{"http://h:80/metrics", "h:80", true},
		{"http://H:80/metrics", "h:80", true},
		{"http://h/metrics", "h:80", true},
		{"https://h/metrics", "h:443", true},
		{"https://h/metrics", "h:80", false},
		{"http://h:81/metrics", "h:80", false},
		{"http://g:80/metrics", "h:80", false},
		{"http://[::1]:80/metrics", "[0:0::1]:80", true},
		{"http://[::1]:80/metrics", "[::2]:80", false},
		{"http://[::ffff:10.0.0.1]:80/", "10.0.0.1:80", true},
		{"http://h:80/metrics", "", false},
	} {
		if got := sameServer(c.page, c.address); got != c.want {
			t.Errorf("%s and %q: %v, want %v", c.page, c.address, got, c.want)
		}
	}
}

// TestReadNow: ReadNow reads a page at once, at most once in 200 ms, and then a few more times, because a dying engine
// may close its page some time after its events. Reads then return to the interval.
func TestReadNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		g, e, _ := start(t, Config{Interval: 30 * time.Second, Health: states.record}, endpoints(2)...)
		g.ReadNow(7) // unknown: nothing happens
		for _, host := range []string{"e0:80", "e1:80"} {
			e.setPage(host, busyPage(1, 1, 0.5))
		}
		advance(31 * time.Second)
		waitForRead(e, "e0:80")
		advance(time.Second)
		e.refuse("e0:80")
		g.ReadNow(0)
		advance(time.Millisecond)
		states.want(t, 0, PageRefused)
		states.want(t, 1, PageResponds)

		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(time.Second)
		n := len(e.times("e0:80"))
		for range 100 { // in one second
			g.ReadNow(0)
			advance(10 * time.Millisecond)
		}
		if reads := len(e.times("e0:80")) - n; reads < 4 || reads > 6 {
			t.Errorf("%d reads in a second of calls", reads)
		}
		states.want(t, 0, PageResponds)
		advance(100 * time.Millisecond)
		e.refuse("e0:80") // its page dies after its events
		advance(time.Second)
		states.want(t, 0, PageRefused)

		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(2 * time.Minute)
		n = len(e.times("e0:80"))
		advance(2 * time.Minute)
		if reads := len(e.times("e0:80")) - n; reads < 3 || reads > 5 {
			t.Errorf("%d reads in two minutes afterwards", reads)
		}
	})
}

// TestBrokenReadIsRepeatedSoon: after a broken connection the page is read again soon, to learn whether the engine
// died.
func TestBrokenReadIsRepeatedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, _ := start(t, Config{Interval: 30 * time.Second, Health: states.record}, endpoints(1)...)
		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(31 * time.Second)
		states.want(t, 0, PageResponds)
		e.mu.Lock()
		e.page["e0:80"] = func(*http.Request) (string, error) {
			e.refuse("e0:80")
			return "", io.ErrUnexpectedEOF
		}
		e.mu.Unlock()
		waitForRead(e, "e0:80")
		states.want(t, 0, PageResponds)
		advance(500 * time.Millisecond)
		states.want(t, 0, PageRefused)
	})
}

// TestPageStateWhileThePoolChanges: changes of the pool do not delay the state silent.
func TestPageStateWhileThePoolChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, p := start(t, Config{Health: states.record}, endpoints(1)...)
		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(6 * time.Second)
		e.hang("e0:80", nil)
		began := waitForRead(e, "e0:80")
		for i := range 55 {
			p.Update(
				append(
					endpoints(1),
					pool.Endpoint{Name: fmt.Sprint("other", i), Address: fmt.Sprintf("other%d:80", i)},
				),
			)
			advance(100 * time.Millisecond)
		}
		states.want(t, 0, PageSilent)
		if _, at := states.latest(0); at.Sub(began) < 5*time.Second || at.Sub(began) > 5200*time.Millisecond {
			t.Errorf("silent %v after the read began", at.Sub(began))
		}
	})
}

// TestPageStateOfASuccessor: a worker at the address of one that left does not inherit the page's state, and Health
// gets no calls for workers that left.
func TestPageStateOfASuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, p := start(t, Config{Health: states.record}, endpoints(1)...)
		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(6 * time.Second)
		e.hang("e0:80", nil)
		waitForRead(e, "e0:80")
		advance(2 * time.Second)
		calls := len(states.of(0))
		p.Update([]pool.Endpoint{{Name: "successor", Address: "e0:80", InstanceID: 9}})
		advance(20 * time.Second)
		if n := len(states.of(0)); n != calls {
			t.Errorf("%d calls for a worker that left", n-calls)
		}
		states.want(t, 1, PageUnknown)
		e.setPage("e0:80", busyPage(1, 1, 0.5))
		advance(time.Minute) // its page was read with backoff
		states.want(t, 1, PageResponds)
	})
}

// TestSlowPage: a page that answers after more than an interval, but within SilentAfter, is not silent.
func TestSlowPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states pageStates
		_, e, _ := start(t, Config{Interval: time.Second, Health: states.record}, endpoints(1)...)
		e.mu.Lock()
		e.page["e0:80"] = func(r *http.Request) (string, error) {
			select {
			case <-time.After(4 * time.Second):
				return busyPage(1, 1, 0.5), nil
			case <-r.Context().Done():
				return "", r.Context().Err()
			}
		}
		e.mu.Unlock()
		advance(time.Minute)
		states.want(t, 0, PageResponds)
		if calls := states.of(0); len(calls) < 10 ||
			slices.ContainsFunc(calls, func(s stateAt) bool { return s.state != PageResponds }) {
			t.Errorf("the page answered every time: %v", calls)
		}
	})
}

// TestManyEnginesStop: if many engines stop at once, all their pages are silent within two intervals, and the other
// pages are still read in every interval.
func TestManyEnginesStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const all, stopped = 400, 200
		var states pageStates
		_, e, _ := start(t, Config{Health: states.record}, endpoints(all)...)
		for i := range all {
			e.setPage(fmt.Sprintf("e%d:80", i), busyPage(1, 1, 0.5))
		}
		advance(12 * time.Second)
		for i := range stopped {
			e.hang(fmt.Sprintf("e%d:80", i), nil)
		}
		stoppedAt := time.Now()
		advance(14 * time.Second)
		for i := range kvblock.Worker(all) {
			if i < stopped {
				states.want(t, i, PageSilent)
				continue
			}
			states.want(t, i, PageResponds)
			last := stoppedAt
			for _, c := range append(states.of(i), stateAt{at: time.Now()}) {
				if c.at.Before(last) {
					continue
				}
				if gap := c.at.Sub(last); gap > 7*time.Second {
					t.Errorf("worker %d: no read for %v", i, gap)
				}
				last = c.at
			}
		}
	})
}

// TestStallOfKvepp: a stall of kvepp itself does not count as silence of the engines.
func TestStallOfKvepp(t *testing.T) {
	var states pageStates
	p := pool.New(slog.New(slog.DiscardHandler))
	g := New(
		Config{
			Interval: 5 * time.Second,
			Scheme:   "http",
			Path:     "/metrics",
			Health:   states.record,
			Booked:   func(kvblock.Worker) int { return 0 },
		},
		p,
		slog.New(slog.DiscardHandler),
	)
	p.Update(endpoints(1))
	follow(g)
	now := time.Now().Add(time.Minute)
	taken := g.takeDue(now)
	g.finishRead(taken[0], nil, ok, PageResponds, make([]int, 1))
	g.checkReads(now)
	now = now.Add(100 * time.Millisecond)
	taken[0].due = now
	if taken = g.takeDue(now); len(taken) != 1 {
		t.Fatal("the page is not due")
	}
	g.checkReads(now)
	g.checkReads(now.Add(20 * time.Second)) // a stall
	g.report()
	states.want(t, 0, PageResponds)
	for d := 20 * time.Second; d <= 25*time.Second; d += 100 * time.Millisecond {
		g.report()
		states.want(t, 0, PageResponds)
		g.checkReads(now.Add(d))
	}
	g.report()
	states.want(t, 0, PageSilent)
}

// TestPageStatesOverHTTP uses real sockets: a server that closes its port, a listener that accepts and does not answer,
// and a server that returns.
func TestPageStatesOverHTTP(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	var stopped atomic.Bool
	release := make(chan struct{})
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if stopped.Load() && strings.HasPrefix(r.URL.Path, "/stops") {
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		io.WriteString(w, busyPage(1, 2, 0.5))
	})
	dies, stops, untrusted := httptest.NewServer(handler), httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer stops.Close()
	defer untrusted.Close()
	untrusted.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	address := strings.TrimPrefix(dies.URL, "http://")
	var states pageStates
	p := pool.New(slog.New(slog.DiscardHandler))
	g := New(
		Config{
			Interval:    100 * time.Millisecond,
			SilentAfter: 2 * time.Second,
			Scheme:      "http",
			Path:        "/metrics",
			Health:      states.record,
			Booked:      func(kvblock.Worker) int { return 0 },
		},
		p,
		slog.New(slog.DiscardHandler),
	)
	p.Watch(g)
	p.Update(
		[]pool.Endpoint{
			{Name: "dies", Address: address},
			{Name: "beside", Address: "127.0.0.1:1", Metrics: dies.URL + "/beside"},
			{
				Name:    "stops",
				Address: "127.0.0.1:1",
				Metrics: stops.URL + "/stops",
			},
			{Name: "untrusted", Address: "127.0.0.1:1", Metrics: untrusted.URL},
		},
	)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { g.Run(ctx) })
	defer running.Wait()
	defer cancel()
	eventually := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !holds(); <-time.After(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	has := func(w kvblock.Worker, want PageState) bool {
		state, _ := states.latest(w)
		return state == want
	}
	eventually("all pages answer", func() bool {
		return has(0, PageResponds) && has(1, PageResponds) && has(2, PageResponds) && has(3, PageResponds)
	})
	dies.CloseClientConnections()
	dies.Close()
	g.ReadNow(0)
	eventually("the closed port refuses", func() bool { return has(0, PageRefused) && has(1, PageRefusedElsewhere) })
	stopped.Store(true)
	eventually("the stopped server is silent", func() bool { return has(2, PageSilent) })
	stopped.Store(false)
	close(release)
	eventually("it goes on", func() bool { return has(2, PageResponds) })
	var listener net.Listener
	eventually("the port is free", func() (bound bool) {
		var err error
		listener, err = net.Listen("tcp", address)
		return err == nil
	})
	again := &httptest.Server{Listener: listener, Config: &http.Server{Handler: handler}}
	again.Start()
	defer again.Close()
	eventually("the server returns", func() bool { return has(0, PageResponds) && has(1, PageResponds) })
	eventually("a certificate that cannot be checked is a response", func() bool { return has(3, PageResponds) })
}
