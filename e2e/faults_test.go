package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// fault is one way in which an engine fails while it serves.
type fault struct {
	name  string
	begin func(t *testing.T, e *stack.Engine)
	end   func(t *testing.T, e *stack.Engine) // nil: the fault does not end
	// unanswered: requests to the engine hang, and are lost when their client gives up.
	noResponse bool
	// retried: Envoy may send such a request again.
	retried bool
}

func mode(mode string) func(*testing.T, *stack.Engine) {
	return func(t *testing.T, e *stack.Engine) {
		if err := e.Fault(context.Background(), mode); err != nil {
			t.Error(err)
		}
	}
}

func signal(sig syscall.Signal) func(*testing.T, *stack.Engine) {
	return func(_ *testing.T, e *stack.Engine) { e.Signal(sig) }
}

var faultsOfEngines = []fault{
	{name: "killed", begin: signal(syscall.SIGKILL), retried: true},
	{name: "stopped", begin: signal(syscall.SIGSTOP), end: signal(syscall.SIGCONT), noResponse: true},
	{name: "answers 503", begin: mode("503"), end: mode(""), retried: true},
	{name: "resets after the headers", begin: mode("reset"), end: mode("")},
}

// traffic is a client's requests, eight at a time. Prompts of a conversation share a prefix.
type traffic struct {
	s     *stack.Stack
	total int
	at    int // number of the request before which the fault begins
	begin func()

	mu       sync.Mutex
	lost     []string       // how each request without a complete response ended
	inFlight int            // requests that were running when the fault began
	served   map[string]int // complete responses after the fault, by engine
}

// patience is how long a client waits for a response: longer than any engine here takes, and shorter than a stopped one
// would.
const patience = 12 * time.Second

func (f *traffic) run(ctx context.Context) {
	f.served = map[string]int{}
	var (
		next    atomic.Int64
		running atomic.Int64
		broken  atomic.Bool
		wait    sync.WaitGroup
		once    sync.Once
		client  = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}
	)
	for range 8 {
		wait.Go(func() {
			for {
				n := int(next.Add(1))
				if n > f.total || ctx.Err() != nil {
					return
				}
				if n == f.at {
					once.Do(func() {
						f.mu.Lock()
						f.inFlight = int(running.Load())
						f.mu.Unlock()
						f.begin()
						broken.Store(true)
					})
				}
				within, cancel := context.WithTimeout(ctx, patience)
				after := broken.Load()
				running.Add(1)
				question := fmt.Sprintf("Conversation %d. %s", n%24, strings.Repeat("Say more about this. ", 20+n/24))
				a, err := stack.Chat(
					within,
					client,
					f.s.Envoy.URL,
					nil,
					[]stack.Message{{Role: "user", Content: question}},
					n%2 == 0,
					nil,
				)
				running.Add(-1)
				cancel()
				f.mu.Lock()
				switch {
				case err != nil:
					f.lost = append(f.lost, err.Error())
				case a.Status != http.StatusOK || !a.Finished:
					f.lost = append(f.lost, fmt.Sprintf("%d from %s: %.60q", a.Status, a.Worker, a.Body))
				case after:
					f.served[a.Header.Get("x-engine")]++
				}
				f.mu.Unlock()
			}
		})
	}
	wait.Wait()
}

// report logs the result of the run, and returns kvepp's metrics and their number of ejections.
func (f *traffic) report(t *testing.T) (m map[string]float64, ejections float64) {
	t.Helper()
	m, ejections = countEjections(t, f.s)
	t.Logf(
		"%d of %d requests lost, %d were running at the fault, %v ejections; served after it: %v",
		len(f.lost),
		f.total,
		f.inFlight,
		ejections,
		f.served,
	)
	slices.Sort(f.lost)
	for i, how := range slices.Compact(slices.Clone(f.lost)) {
		if i < 10 {
			t.Log("  ", how)
		}
	}
	return m, ejections
}

// countEjections returns kvepp's metrics and their sum of ejections, and logs the causes.
func countEjections(t *testing.T, s *stack.Stack) (m map[string]float64, ejections float64) {
	t.Helper()
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range m {
		if strings.HasPrefix(name, "kvepp_ejections_total{") {
			if ejections += v; v > 0 {
				t.Logf("%s %v", name, v)
			}
		}
	}
	return m, ejections
}

// TestEnginesGoBad: one of three stock engines fails under traffic. Without retries at most three requests are lost, in
// addition to running ones and trials. With the configuration for stock engines none is lost that Envoy may retry. The
// engine gets requests again when it recovers.
func TestEnginesGoBad(t *testing.T) {
	for _, manifest := range []string{"override-host.yaml", "stock-engines.yaml"} {
		for _, f := range faultsOfEngines {
			t.Run(f.name+", "+manifest, func(t *testing.T) { engineGoesBad(t, f, manifest) })
		}
	}
}

func engineGoesBad(t *testing.T, f fault, manifest string) {
	engines := standIns(t, 3, "-token-time=2ms")
	flags := []string{"--engine=vllm", "--eject-first-byte=2s", "--refresh-metrics-interval=1s"}
	if manifest == "stock-engines.yaml" {
		flags = append(flags, "--fallback-endpoints=2")
	}
	s := start(t, stack.Config{Workers: -1, Engines: engines, Manifest: manifest, KveppFlags: flags})
	bad := engines[1]
	// A page that never answered cannot become silent. Each is read once a second, so seven reads are two of each.
	eventually(t, func() error {
		m, err := s.Metrics(t.Context())
		reads := 0.0
		for name, v := range m {
			if strings.HasPrefix(name, "kvepp_engine_readings_total{") {
				reads += v
			}
		}
		if err == nil && reads < 7 {
			err = fmt.Errorf("kvepp has read %v metrics pages, want 7", reads)
		}
		return err
	})
	load := traffic{s: s, total: 1000, at: 300, begin: func() { f.begin(t, bad) }}
	load.run(t.Context())

	m, ejections := load.report(t)
	allowed := 3 + load.inFlight + int(ejections)
	if manifest == "stock-engines.yaml" && f.retried {
		allowed = 0
		if f.name == "killed" { // requests whose response had begun cannot be retried
			allowed = load.inFlight
		}
	}
	if len(load.lost) > allowed {
		t.Errorf("%d requests lost, want at most %d", len(load.lost), allowed)
	}
	if ejections == 0 || m["kvepp_ejected_workers"] != 1 {
		t.Errorf("%v ejections, %v workers ejected", ejections, m["kvepp_ejected_workers"])
	}
	log, err := s.Log()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(
		log,
		`level=WARN msg="endpoint ejected: it gets no requests until a trial request succeeds" endpoint=`+bad.Name,
	) {
		t.Error("no warning names the engine")
	}
	if f.end == nil {
		return
	}
	f.end(t, bad)
	eventually(t, func() error { // trials need requests
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL,
			nil,
			[]stack.Message{{Role: "user", Content: fmt.Sprint("And now? ", time.Now())}},
			true,
			nil,
		)
		if err == nil && a.Status == http.StatusOK && a.Header.Get("x-engine") == bad.Name {
			return nil
		}
		return fmt.Errorf("%v, %+v", err, a)
	})
	if ejected := metric(t, s, "kvepp_ejected_workers"); ejected != 0 {
		t.Errorf("%v workers are still ejected", ejected)
	}
}

// TestTwoOfThreeDead: the third engine serves all requests.
func TestTwoOfThreeDead(t *testing.T) {
	engines := standIns(t, 3, "-token-time=2ms")
	s := start(t, stack.Config{Workers: -1, Engines: engines, KveppFlags: []string{"--engine=vllm"}})
	load := traffic{s: s, total: 300, at: 100, begin: func() {
		engines[0].Signal(syscall.SIGKILL)
		engines[2].Signal(syscall.SIGKILL)
	}}
	load.run(t.Context())
	t.Logf(
		"%d of %d requests lost, %d were running; served after: %v",
		len(load.lost),
		load.total,
		load.inFlight,
		load.served,
	)
	if allowed := 2*3 + load.inFlight; len(load.lost) > allowed {
		t.Errorf("%d requests lost, want at most %d: %q", len(load.lost), allowed, load.lost)
	}
	if ejected := metric(t, s, "kvepp_ejected_workers"); ejected != 2 {
		t.Errorf("the metric has %v ejected workers", ejected)
	}
}

// TestClientsThatGoAway: an engine whose responses are broken off by clients is not ejected, for any number of them.
// The open stream of Envoy's access log does not keep kvepp from stopping.
func TestClientsThatGoAway(t *testing.T) {
	engines := standIns(t, 2, "-token-time=20ms")
	s := start(t, stack.Config{Workers: -1, Engines: engines, KveppFlags: []string{"--engine=vllm"}})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for n := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		body := fmt.Sprintf(
			`{"model": %q, "prompt": "%d: tell me a long story", "max_tokens": 1000, "stream": %v}`,
			stack.Model,
			n,
			n%4 > 0,
		)
		req, err := http.NewRequestWithContext(ctx, "POST", s.Envoy.URL+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("content-type", "application/json")
		if n%4 == 0 { // before the response begins
			gone := time.AfterFunc(100*time.Millisecond, cancel)
			if resp, err := client.Do(req); err == nil {
				t.Errorf("a response of 1000 tokens at once: %s", resp.Status)
			}
			gone.Stop()
		} else {
			resp, err := client.Do(req)
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Fatal(err, resp)
			}
			if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
			cancel()
			resp.Body.Close()
		}
		cancel()
	}
	allFreed(t, s)
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range m {
		if strings.HasPrefix(name, "kvepp_ejections_total{") && v > 0 {
			t.Errorf("%s %v", name, v)
		}
	}
	if err := s.DrainKvepp(t.Context()); err != nil {
		t.Fatal(err)
	}
	if log, err := s.Log(); err != nil || strings.Contains(log, "still running after --drain-timeout") {
		t.Errorf("kvepp did not stop before --drain-timeout (%v)", err)
	}
}

// TestMockersGoBad: the same with Dynamo's workers, each behind its own frontend or all behind one, where a failure
// counts for the worker that the headers named. Discovery removes a killed or stopped worker after ten seconds.
func TestMockersGoBad(t *testing.T) {
	for _, shared := range []bool{false, true} {
		for name, begin := range map[string]func(*stack.Worker){"killed": (*stack.Worker).Kill,
			"stopped": func(w *stack.Worker) { w.Signal(syscall.SIGSTOP) }} {
			t.Run(fmt.Sprintf("%s, shared frontend %v", name, shared), func(t *testing.T) {
				s := start(
					t,
					stack.Config{
						Workers:        3,
						SharedFrontend: shared,
						Pages:          3,
						Speedup:        20,
						KveppFlags:     []string{"--eject-first-byte=2s", "--refresh-metrics-interval=1s"},
					},
				)
				load := traffic{s: s, total: 1000, at: 300, begin: func() { begin(s.Workers[1]) }}
				load.run(t.Context())
				_, ejections := load.report(t)
				if allowed := 3 + load.inFlight + int(ejections); len(load.lost) > allowed {
					t.Errorf("%d requests lost, want at most %d", len(load.lost), allowed)
				}
				// A fast machine may serve all requests before three of the bad worker's have failed; then further
				// ones follow. A stopped worker may leave discovery before.
				eventually(t, func() error {
					m, ejections := countEjections(t, s)
					if left := name == "stopped" && m["kvepp_workers"] == 2; ejections > 0 || left {
						return nil
					}
					within, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					_, err := stack.Chat(within, http.DefaultClient, s.Envoy.URL, nil, novel(), false, nil)
					return fmt.Errorf("no ejection; the latest request: %v", err)
				})
			})
		}
	}
}
