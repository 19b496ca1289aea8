package enginemetrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/pool"
)

// engines is an HTTP transport that serves the metrics pages of a pool without a network.
type engines struct {
	mu       sync.Mutex
	page     map[string]func(*http.Request) (string, error) // by host; absent: no listener
	requests map[string][]time.Time
	booked   map[kvblock.Worker]int
	log      logtest.Log
}

func (e *engines) RoundTrip(r *http.Request) (*http.Response, error) {
	e.mu.Lock()
	response := e.page[r.URL.Host]
	e.requests[r.URL.Host] = append(e.requests[r.URL.Host], time.Now())
	e.mu.Unlock()
	if response == nil {
		return nil, errors.New("connection refused")
	}
	text, err := response(r)
	if err != nil {
		return nil, err
	}
	status := http.StatusOK
	if text == "" {
		status = http.StatusNotFound
	}
	return &http.Response{
		StatusCode: status,
		Status:     fmt.Sprint(status),
		Body:       io.NopCloser(strings.NewReader(text)),
		Request:    r,
	}, nil
}

// setPage makes the engine at a host answer with this page from now on.
func (e *engines) setPage(host, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.page[host] = func(*http.Request) (string, error) { return text, nil }
}

func (e *engines) times(host string) []time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests[host]
}

// book sets how many requests kvepp has sent to a worker.
func (e *engines) book(w kvblock.Worker, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.booked[w] = n
}

func busyPage(run, wait int, used float64) string {
	return fmt.Sprintf(
		"vllm:num_requests_running{engine=\"0\"} %d\nvllm:num_requests_waiting{engine=\"0\"} "+
			"%d\nvllm:kv_cache_usage_perc{engine=\"0\"} %v\n",
		run,
		wait,
		used,
	)
}

// start runs gauges over a pool of endpoints, until the test ends. It is for use in a synctest bubble.
func start(t *testing.T, cfg Config, endpoints ...pool.Endpoint) (*Gauges, *engines, *pool.Pool) {
	t.Helper()
	e := &engines{
		page:     map[string]func(*http.Request) (string, error){},
		requests: map[string][]time.Time{},
		booked:   map[kvblock.Worker]int{},
	}
	log := slog.New(slog.NewTextHandler(&e.log, nil))
	p := pool.New(slog.New(slog.DiscardHandler))
	if cfg.Interval == 0 {
		cfg.Interval = 5 * time.Second
	}
	if cfg.Path == "" {
		cfg.Scheme, cfg.Path = "http", "/metrics"
	}
	cfg.Booked = func(w kvblock.Worker) int {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.booked[w]
	}
	g := New(cfg, p, log)
	g.client.Transport = e
	p.Watch(g)
	p.Update(endpoints)
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { g.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	return g, e, p
}

// endpoints returns n of them, e0:80 and so on.
func endpoints(n int) (all []pool.Endpoint) {
	for i := range n {
		all = append(
			all,
			pool.Endpoint{Name: fmt.Sprintf("e%d", i), Address: fmt.Sprintf("e%d:80", i), InstanceID: uint64(i)},
		)
	}
	return all
}

// follow makes the targets those of the pool's workers.
func follow(g *Gauges) {
	s := g.pool.Acquire()
	defer s.Release()
	g.follow(s)
}

// advance lets time pass in the bubble.
func advance(d time.Duration) {
	timer := time.NewTimer(d)
	<-timer.C
	synctest.Wait()
}

// readings returns how many reads had an outcome.
func readings(g *Gauges, outcome string) uint64 {
	n, known := g.readings()[outcome]
	if !known {
		panic("no outcome " + outcome)
	}
	return n
}

func wantLoad(t *testing.T, g *Gauges, w kvblock.Worker, want Load) {
	t.Helper()
	if got := g.Of(w); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("worker %d: %+v, want %+v", w, got, want)
	}
}

var unknown = Load{math.NaN(), math.NaN(), math.NaN()}

// TestReadings: each page is read about every five seconds. Its values expire after three times that.
func TestReadings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, e, p := start(t, Config{}, endpoints(3)...)
		wantLoad(t, g, 0, unknown)
		if u := g.Usage(nil); len(u) > 0 && u[0] != 0 {
			t.Errorf("usage %v before the first read", u)
		}
		for i := range 3 {
			e.setPage(fmt.Sprintf("e%d:80", i), busyPage(i, 10*i, float64(i)/4))
		}
		advance(5500 * time.Millisecond)
		for i := range 3 {
			wantLoad(t, g, kvblock.Worker(i), Load{float64(i), float64(10 * i), float64(i) / 4})
		}
		if got := fmt.Sprint(g.Usage([]float64{7})); got != "[7 0 0.25 0.5]" {
			t.Errorf("usage %v", got)
		}
		advance(time.Minute)
		gaps := map[time.Duration]bool{}
		for i := range 3 {
			asked := e.times(fmt.Sprintf("e%d:80", i))
			if len(asked) < 11 || len(asked) > 16 {
				t.Errorf("read %d times in 65 s", len(asked))
			}
			for k := 1; k < len(asked); k++ {
				gap := asked[k].Sub(asked[k-1])
				if gaps[gap] = true; gap < 4500*time.Millisecond || gap > 5700*time.Millisecond {
					t.Errorf("%v between two readings", gap)
				}
			}
		}
		if len(gaps) < 5 {
			t.Errorf("the time between reads has no jitter: %v", gaps)
		}
		if g.Known() != 3 ||
			readings(g, "ok") != uint64(len(e.times("e0:80"))+len(e.times("e1:80"))+len(e.times("e2:80"))) {
			t.Errorf("%d known, %d readings", g.Known(), readings(g, "ok"))
		}
		e.mu.Lock()
		delete(e.page, "e2:80")
		e.mu.Unlock()
		advance(9 * time.Second)
		wantLoad(t, g, 2, Load{2, 20, 0.5}) // values stay valid while two reads fail
		advance(12 * time.Second)
		wantLoad(t, g, 2, unknown)
		if got := fmt.Sprint(g.Usage(nil)); got != "[0 0.25 0]" {
			t.Errorf("usage %v, and worker 2's is stale", got)
		}
		if g.Known() != 2 {
			t.Errorf("%d known", g.Known())
		}
		e.setPage("e2:80", busyPage(7, 7, 0.75))
		advance(time.Minute)
		wantLoad(t, g, 2, Load{7, 7, 0.75})

		// The next worker with the number of one that left does not get its values.
		p.Update(endpoints(2))
		wantLoad(t, g, 2, unknown)
		p.Update(append(endpoints(2), pool.Endpoint{Name: "new", Address: "new:80"}))
		advance(7 * time.Second)
		wantLoad(t, g, 2, unknown)
		e.setPage("new:80", busyPage(1, 1, 0.25))
		advance(12 * time.Second) // backoff: its page failed before
		wantLoad(t, g, 2, Load{1, 1, 0.25})
		wantLoad(t, g, 0, Load{0, 0, 0})
	})
}

// TestLateResponseOfAWorkerThatLeft: if a worker leaves while its page is read, the result does not count for the next
// worker with its number.
func TestLateResponseOfAWorkerThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, e, p := start(t, Config{}, endpoints(1)...)
		e.mu.Lock()
		e.page["e0:80"] = func(r *http.Request) (string, error) {
			advance(4 * time.Second)
			return busyPage(9, 9, 1), nil
		}
		e.mu.Unlock()
		for len(e.times("e0:80")) == 0 {
			advance(100 * time.Millisecond)
		}
		p.Update(nil)
		p.Update([]pool.Endpoint{{Name: "new", Address: "new:80"}})
		advance(4500 * time.Millisecond)
		if readings(g, "ok") != 1 {
			t.Fatal("the read did not end")
		}
		wantLoad(t, g, 0, unknown)
		wantLoad(t, g, 1, unknown)
	})
}

// TestSlotsOfAPageThatIsReadTwice: a page that is read again before its earlier read has ended, because the pool
// changed, frees both slots.
func TestSlotsOfAPageThatIsReadTwice(t *testing.T) {
	p := pool.New(slog.New(slog.DiscardHandler))
	g := New(
		Config{Interval: time.Second, Scheme: "http", Path: "/metrics", Booked: func(kvblock.Worker) int { return 0 }},
		p,
		slog.New(slog.DiscardHandler),
	)
	due := time.Now().Add(time.Hour)
	for range 2 {
		p.Update(append(endpoints(1), pool.Endpoint{Name: due.String(), Address: "other:80"}))
		follow(g)
		first := g.takeDue(due)
		due = due.Add(time.Hour)
		p.Update(endpoints(1))
		follow(g)
		second := g.takeDue(due)
		due = due.Add(time.Hour)
		if len(first) != 2 || len(second) != 1 || g.reading[0]+g.reading[1] != 3 {
			t.Fatalf("%d, then %d pages are read, in %v slots", len(first), len(second), g.reading)
		}
		for _, page := range append(first, second...) {
			g.finishRead(page, nil, ok, PageResponds, make([]int, 1))
		}
		if g.reading != [2]int{} {
			t.Fatalf("%v slots are in use although no page is read", g.reading)
		}
		due = due.Add(time.Hour)
	}
}

// TestEnginesThatDoNotRespond: engines that do not answer do not delay the reads of others, and are read with backoff.
func TestEnginesThatDoNotRespond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const all, hanging = 400, 200
		g, e, _ := start(t, Config{}, endpoints(all)...)
		for i := range all {
			host := fmt.Sprintf("e%d:80", i)
			if i < hanging {
				e.mu.Lock()
				e.page[host] = func(r *http.Request) (string, error) {
					<-r.Context().Done()
					return "", r.Context().Err()
				}
				e.mu.Unlock()
				continue
			}
			e.setPage(host, busyPage(1, 1, 0.5))
		}
		advance(3 * time.Minute)
		if g.Known() != all-hanging {
			t.Fatalf("%d workers are known, of %d that answer", g.Known(), all-hanging)
		}
		began := time.Now()
		advance(time.Minute)
		for i := hanging; i < all; i++ {
			asked, n := e.times(fmt.Sprintf("e%d:80", i)), 0
			for _, at := range asked {
				if at.After(began) {
					n++
				}
			}
			if n < 10 {
				t.Errorf("e%d answers, and was read %d times in a minute", i, n)
			}
		}
		if n := len(e.times("e0:80")); n < 2 || n > 9 {
			t.Errorf("an engine that does not answer was asked %d times in four minutes", n)
		}
		if readings(g, "timeout") < hanging || readings(g, "unreachable") != 0 {
			t.Errorf("%d timeouts, %d unreachable", readings(g, "timeout"), readings(g, "unreachable"))
		}
		if n := e.log.Count("outcome=timeout"); n != 1 {
			t.Errorf("%d log lines about engines that do not answer, want one", n)
		}
	})
}

// TestPagesThatCannotBeRead: each kind of failure is counted, and logged the first time.
func TestPagesThatCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, e, _ := start(t, Config{}, endpoints(9)...)
		for i := range 3 {
			// 404
			e.setPage(fmt.Sprintf("e%d:80", i), "")
			// a page of another program
			e.setPage(fmt.Sprintf("e%d:80", 3+i), "up 1\nother 2\n")
			// endless
			e.setPage(fmt.Sprintf("e%d:80", 6+i),
				strings.Repeat("#"+strings.Repeat("-", 1022)+"\n", maxPageBytes/1024+1))
		}
		advance(2 * time.Minute)
		for _, outcome := range []string{"refused", "without", "too_large"} {
			if n := readings(g, outcome); n < 9 || n > 24 {
				t.Errorf("%s: %d readings of three pages in two minutes", outcome, n)
			}
			if n := e.log.Count("outcome=" + outcome); n != 1 {
				t.Errorf("%s: %d log lines", outcome, n)
			}
		}
		if g.Known() != 0 || len(g.readings()) != 8 {
			t.Errorf("%d known, readings %v", g.Known(), g.readings())
		}
		e.setPage("e0:80", busyPage(1, 2, 0.5)) // the engine exports its metrics now
		advance(70 * time.Second)
		wantLoad(t, g, 0, Load{1, 2, 0.5})
	})
}

// TestPagesOfWorkers: a worker's page follows from its address, --model-server-metrics-port or Endpoint.Metrics. A
// rank's values are those with its number.
func TestPagesOfWorkers(t *testing.T) {
	two := "vllm:num_requests_running{engine=\"4\"} 1\nvllm:num_requests_running{engine=\"5\"} " +
		"2\nvllm:kv_cache_usage_perc{engine=\"4\"} 0.5\n"
	for _, c := range []struct {
		name string
		cfg  Config
		all  []pool.Endpoint
		page string // at
		at   string
		want []Load
	}{
		{"an address of IPv6", Config{}, []pool.Endpoint{{Name: "a", Address: "[::1]:80"}}, busyPage(1, 2, 0.5),
			"[::1]:80", []Load{{1, 2, 0.5}}},
		{"another port", Config{Port: 9090}, []pool.Endpoint{{Name: "a", Address: "[::1]:80"}}, busyPage(1, 2, 0.5),
			"[::1]:9090", []Load{{1, 2, 0.5}}},
		{"Endpoint.Metrics", Config{Port: 9090}, []pool.Endpoint{{Name: "a", Address: "h:80", Metrics: "http://h:7/m"}},
			busyPage(1, 2, 0.5), "h:7", []Load{{1, 2, 0.5}}},
		{"frontends", Config{Frontends: true}, []pool.Endpoint{{Name: "a", Address: "h:80"}}, busyPage(1, 2, 0.5),
			"h:80", []Load{unknown}},
		{"a frontend's worker", Config{Frontends: true},
			[]pool.Endpoint{{Name: "a", Address: "h:80", Metrics: "http://h:7/m"}}, busyPage(1, 2, 0.5), "h:7",
			[]Load{{1, 2, 0.5}}},
		{"a frontend beside each worker", Config{Frontends: true, Port: 7},
			[]pool.Endpoint{{Name: "a", Address: "h:80"}},
			busyPage(1, 2, 0.5), "h:7", []Load{{1, 2, 0.5}}},
		{"a prefill worker without an address", Config{}, []pool.Endpoint{{Name: "a", Role: pool.Prefill}},
			busyPage(1, 2, 0.5), "", []Load{unknown}},
		{"an encode worker", Config{}, []pool.Endpoint{{Name: "a", Address: "h:80", Role: pool.Encode}},
			busyPage(1, 2, 0.5), "h:80", []Load{unknown}},
		{"one worker of several ranks of its engine", Config{}, []pool.Endpoint{{Name: "a", Address: "h:80"}}, two,
			"h:80", []Load{{3, math.NaN(), 0.5}}},
		{"ranks of an endpoint", Config{},
			[]pool.Endpoint{{Name: "a", Address: "h:80", DataParallelStartRank: 4, DataParallelSize: 3}}, two, "h:80",
			[]Load{{1, math.NaN(), 0.5}, {2, math.NaN(), math.NaN()}, unknown}},
		{"ports of a pod", Config{Port: 9}, []pool.Endpoint{{Name: "a", Address: "h:80", DataParallelStartRank: 4},
			{Name: "b", Address: "h:81", DataParallelStartRank: 5}}, two, "h:9",
			[]Load{{1, math.NaN(), 0.5}, {2, math.NaN(), math.NaN()}}},
		{"two engines behind one address", Config{}, []pool.Endpoint{{Name: "a", Address: "h:80", InstanceID: 1},
			{Name: "b", Address: "h:80", InstanceID: 2}}, two, "h:80", []Load{unknown, unknown}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, e, _ := start(t, c.cfg, c.all...)
				e.setPage(c.at, c.page)
				advance(6 * time.Second)
				for i, want := range c.want {
					wantLoad(t, g, kvblock.Worker(i), want)
				}
			})
		})
	}
}

// TestUnseenLoad: an engine that has more requests for a minute than kvepp sent it is in alarm; shorter differences are
// not. The first alarm is logged.
func TestUnseenLoad(t *testing.T) {
	const line = "load bypasses kvepp"
	synctest.Test(t, func(t *testing.T) {
		g, e, p := start(t, Config{}, endpoints(3)...)
		quiet := func(when string) {
			t.Helper()
			if g.Unseen() != 0 || e.log.Count(line) != 0 {
				t.Errorf("%s: %d workers, %d lines", when, g.Unseen(), e.log.Count(line))
			}
		}
		for i := range 3 {
			e.setPage(fmt.Sprintf("e%d:80", i), busyPage(10, 5, 0.5))
			e.book(kvblock.Worker(i), 15)
		}
		advance(2 * time.Minute)
		quiet("all are booked")
		e.book(0, 11) // four more, but less than 1.5 times as many
		advance(2 * time.Minute)
		quiet("a few more")
		e.book(0, 1)
		advance(40 * time.Second)
		quiet("for 40 seconds")
		e.book(0, 15)
		advance(7 * time.Second)
		e.book(0, 1)
		advance(40 * time.Second)
		quiet("with a pause")
		advance(40 * time.Second)
		if g.Unseen() != 1 || e.log.Count(line) != 1 || e.log.Count("worker=e0/0") != 1 {
			t.Errorf("%d workers, log %s", g.Unseen(), e.log.String())
		}
		e.book(1, 0)
		advance(80 * time.Second)
		if g.Unseen() != 2 || e.log.Count(line) != 1 {
			t.Errorf("a second worker: %d workers, %d lines", g.Unseen(), e.log.Count(line))
		}
		e.book(0, 15)
		advance(7 * time.Second)
		if g.Unseen() != 1 {
			t.Errorf("one alarm has ended: %d workers", g.Unseen())
		}
		p.Update(endpoints(1))
		if g.Unseen() != 0 {
			t.Errorf("the other worker left: %d workers", g.Unseen())
		}
		e.book(0, 0)
		advance(80 * time.Second)
		if g.Unseen() != 1 || e.log.Count(line) != 2 {
			t.Errorf("a new alarm: %d workers, %d lines", g.Unseen(), e.log.Count(line))
		}
		e.mu.Lock()
		delete(e.page, "e0:80")
		e.mu.Unlock()
		advance(20 * time.Second)
		if g.Unseen() != 0 {
			t.Errorf("without values: %d workers", g.Unseen())
		}
		e.setPage("e0:80", busyPage(10, 5, 0.5))
		for g.Known() == 0 {
			advance(time.Second)
		}
		advance(40 * time.Second)
		if g.Unseen() != 0 {
			t.Errorf("40 seconds after that: %d workers", g.Unseen())
		}
		advance(40 * time.Second)
		if g.Unseen() != 1 || e.log.Count(line) != 3 {
			t.Errorf("80 seconds after that: %d workers, %d lines", g.Unseen(), e.log.Count(line))
		}
	})
}

// TestOverHTTP: over real connections, each page keeps one connection, and redirects are not followed.
func TestOverHTTP(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	var mu sync.Mutex
	connections, asked := map[string]bool{}, 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		connections[r.RemoteAddr] = true
		if asked++; r.URL.Path != "/metrics" || r.Header.Get("Accept-Encoding") != "" {
			http.Redirect(w, r, "/metrics", http.StatusFound)
			return
		}
		io.WriteString(w, busyPage(1, 2, 0.5))
	}))
	defer server.Close()
	secure := httptest.NewTLSServer(server.Config.Handler)
	defer secure.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	p := pool.New(slog.New(slog.DiscardHandler))
	g := New(
		Config{
			Interval:   100 * time.Millisecond,
			Stale:      time.Minute,
			Scheme:     "http",
			Path:       "/metrics",
			SkipVerify: true,
			Booked:     func(kvblock.Worker) int { return 0 },
		},
		p,
		slog.New(slog.DiscardHandler),
	)
	p.Update(
		[]pool.Endpoint{
			{Name: "a", Address: host},
			{Name: "b", Address: host, Metrics: server.URL + "/elsewhere"},
			{Name: "c", Address: host, Metrics: secure.URL + "/metrics"},
		},
	)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx)
	}()
	for deadline := time.Now().Add(30 * time.Second); readings(g, "ok") < 20 || readings(g, "refused") == 0 ||
		g.Known() < 2; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d readings, %d refused, %d known", readings(g, "ok"), readings(g, "refused"), g.Known())
		}
	}
	stop()
	<-done
	mu.Lock()
	defer mu.Unlock()
	wantLoad(t, g, 0, Load{1, 2, 0.5})
	wantLoad(t, g, 1, unknown)
	wantLoad(t, g, 2, Load{1, 2, 0.5})
	// three suffice, but each read that times out on a loaded machine costs one more
	if len(connections) > asked/2 {
		t.Errorf("%d connections for %d readings of three pages", len(connections), asked)
	}
}

// TestPagesSizeCaches: what pages say of KV caches reaches the pool's workers, each rank's for its worker.
func TestPagesSizeCaches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := endpoints(2)
		all[1].DataParallelSize = 2
		_, e, p := start(t, Config{}, all...)
		e.setPage("e0:80", `vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1`+"\n")
		e.setPage("e1:80", `vllm:cache_config_info{block_size="16",num_gpu_blocks="30",engine="0"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="40",engine="1"} 1
`)
		advance(6 * time.Second)
		s := p.Acquire()
		defer s.Release()
		for i, want := range []int{100, 30, 40} {
			if w := s.Workers[i]; w.TotalKVBlocks != want || w.BlockSize != 16 {
				t.Errorf("%s: %d blocks of %d", w.String(), w.TotalKVBlocks, w.BlockSize)
			}
		}
	})
}
