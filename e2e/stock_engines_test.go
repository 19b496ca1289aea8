package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// stockFlags are the flags of kvepp for which stock-engines.yaml is written.
var stockFlags = []string{"--router-kv-events=false", "--engine=vllm", "--fallback-endpoints=2"}

// received is one attempt of a request as an endpoint received it.
type received struct {
	at   string // the endpoint's address
	body []byte
}

// scripted are endpoints that record every attempt. The first attempt of each request ends as its header x-first says:
// a status, "wait" for ever, "reset" before the response, "cut" after the client has the first event of a stream.
// Without the header every attempt is answered 200.
type scripted struct {
	addresses []string
	cut       chan struct{} // the client has the first event

	mu       sync.Mutex
	attempts map[string][]received // by x-number
}

func startScripted(t *testing.T, n int) *scripted {
	t.Helper()
	s := &scripted{cut: make(chan struct{}), attempts: map[string][]received{}}
	for range n {
		var address string
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/health" {
				return
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return // the request was reset
			}
			number, first := r.Header.Get("x-number"), r.Header.Get("x-first")
			s.mu.Lock()
			s.attempts[number] = append(s.attempts[number], received{address, body})
			again := len(s.attempts[number]) > 1 && r.Header.Get("x-always") == ""
			s.mu.Unlock()
			status, _ := strconv.Atoi(first)
			switch {
			case first == "" || again:
				fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
			case first == "wait":
				<-r.Context().Done()
			case first == "reset":
				panic(http.ErrAbortHandler)
			case first == "cut":
				w.Header().Set("content-type", "text/event-stream")
				fmt.Fprint(w, "data: {}\n\n")
				http.NewResponseController(w).Flush()
				select {
				case <-s.cut:
				case <-r.Context().Done():
				}
				panic(http.ErrAbortHandler)
			default:
				w.Header().Set("content-type", "application/json")
				w.WriteHeader(status)
				fmt.Fprintf(w, `{"object":"error","message":"of the engine","code":%d}`, status)
			}
		}))
		server.Start()
		t.Cleanup(server.Close)
		address = server.Listener.Addr().String()
		s.addresses = append(s.addresses, address)
	}
	return s
}

// of returns the attempts of a request.
func (s *scripted) of(number string) []received {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.attempts[number])
}

// scriptedRequest is a request for scripted endpoints.
type scriptedRequest struct {
	path     string
	body     []byte
	first    string
	always   bool // every attempt ends like the first
	trailers bool
	length   bool // the request has a content-length
}

func (q *scriptedRequest) send(ctx context.Context, client *http.Client, url, number string) (*stack.Response, error) {
	var body io.Reader = bytes.NewReader(q.body)
	if !q.length {
		body = io.MultiReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", url+q.path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("content-type", "application/json")
	req.Header.Set("x-number", number)
	if q.first != "" {
		req.Header.Set("x-first", q.first)
	}
	if q.always {
		req.Header.Set("x-always", "yes")
	}
	if q.trailers {
		req.Trailer = http.Header{"X-Sum": {"1"}}
	}
	return stack.Do(client, req)
}

// completion returns a completion's body of about size bytes.
func completion(size int) []byte {
	return fmt.Appendf(nil, `{"model":%q,"prompt":"%s"}`, stack.Model, bytes.Repeat([]byte("brass "), size/6+1))
}

// TestTrailersAndRetries: Envoy 1.39 and 1.40 send the body of a request with trailers twice if a retry_policy applies.
// With stock-engines.yaml the body arrives once, and requests without trailers are retried with either client protocol.
func TestTrailersAndRetries(t *testing.T) { bothEnvoys(t, trailersAndRetries) }

func trailersAndRetries(t *testing.T, envoyTools string) {
	endpoints := startScripted(t, 3)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: endpoints.addresses, EnvoyTools: envoyTools, Manifest: "stock-engines.yaml",
			KveppFlags: stockFlags},
	)
	// A retry_policy for all requests.
	everywhere, err := s.StartEnvoyOf(t.Context(), "stock-engines.yaml", func(config any) {
		host := stack.At(
			config,
			"static_resources",
			"listeners",
			0,
			"filter_chains",
			0,
			"filters",
			0,
			"typed_config",
			"route_config",
			"virtual_hosts",
			0,
		)
		policy := stack.At(host, "routes", 0, "route", "retry_policy")
		host.(map[string]any)["routes"] = []any{map[string]any{"match": map[string]any{"prefix": "/"},
			"route": map[string]any{"cluster": "pool", "timeout": "0s", "retry_policy": policy}}}
	})
	if err != nil {
		t.Fatal(err)
	}
	clients := stormClients(t)
	number := 0
	// kvepp reads the body of the first, and decides about the second by its headers.
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		for _, size := range []int{100, 300_000} {
			for _, length := range []bool{false, true} {
				for _, c := range []struct {
					envoy           *stack.Envoy
					http2, trailers bool
					first           string
					attempts, times int // how often the request arrives, and its body in each attempt
				}{
					{everywhere, true, true, "", 1, 2}, // Envoy's defect; without it, one route is enough
					{s.Envoy, true, true, "", 1, 1},
					{s.Envoy, false, true, "", 1, 1},
					{s.Envoy, true, true, "503", 1, 1},
					{s.Envoy, true, false, "503", 2, 1},
					{s.Envoy, false, false, "503", 2, 1},
				} {
					number++
					q := &scriptedRequest{
						path:     path,
						body:     completion(size),
						first:    c.first,
						trailers: c.trailers,
						length:   length && !c.trailers,
					}
					id := strconv.Itoa(number)
					what := fmt.Sprintf(
						"%s, HTTP/2 %v, trailers %v, %d bytes, length %v, first %q",
						path,
						c.http2,
						c.trailers,
						len(q.body),
						q.length,
						c.first,
					)
					attempts := c.attempts
					if path == "/v1/embeddings" && c.http2 {
						attempts = 1 // kvepp cannot know that no trailers follow
					}
					a, err := q.send(t.Context(), clients[c.http2], c.envoy.URL, id)
					want := http.StatusOK
					if attempts == 1 && c.first == "503" {
						want = http.StatusServiceUnavailable
					}
					if err != nil || a.Status != want {
						t.Errorf("%s: %v %+v, want %d", what, err, a, want)
						continue
					}
					got := endpoints.of(id)
					if len(got) != attempts {
						t.Errorf("%s: %d attempts, want %d", what, len(got), attempts)
					}
					for i, r := range got {
						if !bytes.Equal(r.body, bytes.Repeat(q.body, c.times)) {
							t.Errorf(
								"%s: attempt %d: %d bytes, want the body %d times",
								what,
								i+1,
								len(r.body),
								c.times,
							)
						}
						if i > 0 && r.at == got[i-1].at {
							t.Errorf("%s: attempt %d went to the same endpoint", what, i+1)
						}
					}
				}
			}
		}
	}
	allFreed(t, s)
}

// TestRetriedOutcomes: stock-engines.yaml sends a request to another endpoint after a 503 and after a connection that
// ended before the response began. It passes any other response to the client. Bodies above Envoy's default buffer are
// retried too; those above request_body_buffer_limit are sent once.
func TestRetriedOutcomes(t *testing.T) {
	endpoints := startScripted(t, 3)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: endpoints.addresses, Manifest: "stock-engines.yaml", KveppFlags: stockFlags},
	)
	clients := stormClients(t)
	for i, c := range []struct {
		first    string
		size     int
		status   int
		attempts int
	}{
		{"503", 100, 200, 2},
		{"reset", 100, 200, 2},
		{"503", 6 << 20, 200, 2},
		{"reset", 30 << 20, 200, 2},
		{"429", 100, 429, 1},
		{"500", 100, 500, 1},
		{"400", 100, 400, 1},
		{"", 100, 200, 1},
		{"503", 33 << 20, 503, 1},
	} {
		for _, http2 := range []bool{false, true} {
			id := fmt.Sprintf("%d-%v", i, http2)
			q := &scriptedRequest{path: "/v1/completions", body: completion(c.size), first: c.first, length: true}
			what := fmt.Sprintf("first %q, %d bytes, HTTP/2 %v", c.first, c.size, http2)
			a, err := q.send(t.Context(), clients[http2], s.Envoy.URL, id)
			if err != nil || a.Status != c.status {
				t.Errorf("%s: %v %+v, want %d", what, err, a, c.status)
				continue
			}
			got := endpoints.of(id)
			if len(got) != c.attempts {
				t.Errorf("%s: %d attempts, want %d", what, len(got), c.attempts)
			}
			for _, r := range got {
				if !bytes.Equal(r.body, q.body) {
					t.Errorf("%s: %d bytes arrived", what, len(r.body))
				}
			}
			if c.status >= 400 && !strings.Contains(a.Body, "of the engine") {
				t.Errorf("%s: the client did not get the engine's response: %s", what, a.Body)
			}
		}
	}
	allFreed(t, s)
}

// TestRetryLimits: stock-engines.yaml retries a request at each endpoint that kvepp named and at no other, for any
// number of concurrent requests.
func TestRetryLimits(t *testing.T) {
	endpoints := startScripted(t, 4)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: endpoints.addresses, Manifest: "stock-engines.yaml", KveppFlags: stockFlags},
	)
	client := stormClients(t)[false]
	for known := 4; known > 0; known-- {
		var file strings.Builder
		file.WriteString("endpoints:\n")
		for i, address := range endpoints.addresses[:known] {
			fmt.Fprintf(&file, "- {name: server-%d, address: %q}\n", i, address)
		}
		if err := s.ReplaceEndpoints(file.String()); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			if n := metric(t, s, "kvepp_workers"); n != float64(known) {
				return fmt.Errorf("kvepp has %v workers", n)
			}
			return nil
		})
		for i := range 4 {
			id := fmt.Sprintf("known %d, request %d", known, i)
			q := &scriptedRequest{path: "/v1/completions", body: completion(100), first: "503", always: true}
			a, err := q.send(t.Context(), client, s.Envoy.URL, id)
			if err != nil || a.Status != http.StatusServiceUnavailable || !strings.Contains(a.Body, "of the engine") {
				t.Errorf("%s: %v %+v", id, err, a)
			}
			asked := map[string]bool{}
			for _, r := range endpoints.of(id) {
				asked[r.at] = true
				if !slices.Contains(endpoints.addresses[:known], r.at) {
					t.Errorf("%s: sent to %s, which is not an endpoint of kvepp", id, r.at)
				}
			}
			if want := min(known, 3); len(asked) != want || len(endpoints.of(id)) != want {
				t.Errorf("%s: sent %d times, to %d endpoints, want %d", id, len(endpoints.of(id)), len(asked), want)
			}
		}
	}
	if err := s.WriteEndpoints(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_workers"); n != 4 {
			return fmt.Errorf("kvepp has %v workers", n)
		}
		return nil
	})
	var wait sync.WaitGroup
	for i := range 200 {
		wait.Go(func() {
			q := &scriptedRequest{path: "/v1/completions", body: completion(100), first: []string{"503", "reset"}[i%2]}
			if a, err := q.send(t.Context(), client, s.Envoy.URL, fmt.Sprintf("burst %d", i)); err != nil ||
				a.Status != http.StatusOK {
				t.Errorf("request %d of a burst: %v %+v", i, err, a)
			}
		})
	}
	wait.Wait()
	allFreed(t, s)
}

// TestStreamThatBegan: stock-engines.yaml does not retry a request whose response has begun; the client sees that the
// response broke off.
func TestStreamThatBegan(t *testing.T) {
	endpoints := startScripted(t, 3)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: endpoints.addresses, Manifest: "stock-engines.yaml", KveppFlags: stockFlags},
	)
	for http2, client := range stormClients(t) {
		req, err := http.NewRequestWithContext(
			t.Context(),
			"POST",
			s.Envoy.URL+"/v1/completions",
			bytes.NewReader(completion(100)),
		)
		if err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprint(http2)
		req.Header.Set("x-number", id)
		req.Header.Set("x-first", "cut")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		const event = "data: {}\n\n"
		first := make([]byte, len(event))
		if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != event {
			t.Fatalf("HTTP/2 %v: %v, %q", http2, err, first)
		}
		endpoints.cut <- struct{}{}
		if rest, err := io.ReadAll(resp.Body); err == nil || len(rest) > 0 {
			t.Errorf("HTTP/2 %v: the response ended normally, with %q", http2, rest)
		}
		if got := endpoints.of(id); len(got) != 1 {
			t.Errorf("HTTP/2 %v: %d attempts", http2, len(got))
		}
	}
	allFreed(t, s)
}

// stockEngine is a process of examples/engine.
type stockEngine struct {
	address string
	process *process.Process
}

// startStockEngines builds and starts stand-ins for vLLM with so much time for each token.
func startStockEngines(t *testing.T, n int, tokenTime time.Duration) (engines []*stockEngine, addresses []string) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "engine")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program,
		"../examples/engine").CombinedOutput(); err != nil {
		t.Fatalf("building the engine: %v\n%s", err, out)
	}
	for i := range n {
		ports := make([]int, 3)
		for k := range ports {
			var err error
			if ports[k], err = process.Ports(1); err != nil {
				t.Fatal(err)
			}
		}
		name := fmt.Sprintf("engine-%d", i)
		p, err := process.Start(
			dir,
			name,
			nil,
			program,
			"-name",
			name,
			"-model",
			"../test/models/tiny-bytelevel",
			"-served-model-name",
			stack.Model,
			"-port",
			strconv.Itoa(ports[0]),
			"-kv-events-port",
			strconv.Itoa(ports[1]),
			"-kv-replay-port",
			strconv.Itoa(ports[2]),
			"-token-time",
			tokenTime.String(),
		)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		e := &stockEngine{address: fmt.Sprintf("127.0.0.1:%d", ports[0]), process: p}
		eventually(t, process.Healthy("http://"+e.address))
		engines, addresses = append(engines, e), append(addresses, e.address)
	}
	return engines, addresses
}

// TestNoRequestLost: with stock-engines.yaml each of 1,000 requests, 8 at a time, gets its complete response, although
// one of three engines is killed, and later answers 503 to everything.
func TestNoRequestLost(t *testing.T) {
	engines, addresses := startStockEngines(t, 3, time.Millisecond)
	// Without ejection kvepp still chooses the engine, so that Envoy's retries alone must save the requests.
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    addresses,
			Manifest:   "stock-engines.yaml",
			KveppFlags: append(slices.Clone(stockFlags), "--eject=false"),
		},
	)
	const requests, killed, failing = 1000, 300, 600
	// Responses are not streamed: a stream that began before the kill cannot be complete.
	var next, unavailable atomic.Int32
	var once [2]sync.Once
	var served sync.Map
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() {
			for i := next.Add(1); i <= requests; i = next.Add(1) {
				if i >= killed {
					once[0].Do(engines[0].process.Kill)
				}
				if i >= failing {
					once[1].Do(func() {
						listener, err := net.Listen("tcp", engines[0].address)
						if err != nil {
							t.Error(err)
							return
						}
						server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
							unavailable.Add(1)
							w.WriteHeader(http.StatusServiceUnavailable)
						})}
						go server.Serve(listener)
						t.Cleanup(func() { server.Close() })
					})
				}
				a, err := stack.Chat(
					t.Context(),
					http.DefaultClient,
					s.Envoy.URL,
					nil,
					[]stack.Message{{Role: "user", Content: fmt.Sprintf("request %d", i)}},
					false,
					nil,
				)
				if err != nil || a.Status != http.StatusOK || a.CompletionTokens != 8 {
					t.Errorf("request %d: %v %+v", i, err, a)
					continue
				}
				served.Store(a.Header.Get("x-engine"), true)
			}
		})
	}
	wait.Wait()
	for i := range engines {
		if _, ok := served.Load(fmt.Sprintf("engine-%d", i)); !ok {
			t.Errorf("engine-%d answered no request", i)
		}
	}
	if unavailable.Load() == 0 {
		t.Error("the engine that answers 503 got no request")
	}
	if moved := metric(t, s, `kvepp_served_total{outcome="moved"}`); moved == 0 {
		t.Error("no request was served by another endpoint than kvepp chose")
	}
	allFreed(t, s)
}

// TestStockEnginesByName: the configuration of the chart's Envoy, which finds engines and kvepp by names of Services,
// retries like stock-engines.yaml, with the Envoy of the chart's image. Here the names are the local host's.
func TestStockEnginesByName(t *testing.T) {
	endpoints := startScripted(t, 3)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    endpoints.addresses,
			EnvoyTools: imageEnvoy(t),
			Manifest:   "../chart/envoy/stock-engines.yaml",
			KveppFlags: stockFlags,
			EditEnvoy: func(config any) {
				for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
					if kind := stack.At(c, "type"); kind != "STRICT_DNS" {
						t.Errorf("cluster %v has type %v", stack.At(c, "name"), kind)
					}
					byLocalName(c)
				}
			},
		},
	)
	client := stormClients(t)[false]
	for i, first := range []string{"", "503", "reset"} {
		id := strconv.Itoa(i)
		q := &scriptedRequest{path: "/v1/completions", body: completion(100), first: first}
		a, err := q.send(t.Context(), client, s.Envoy.URL, id)
		if err != nil || a.Status != http.StatusOK {
			t.Errorf("first %q: %v %+v", first, err, a)
		}
		got := endpoints.of(id)
		if want := 1 + min(len(first), 1); len(got) != want || want == 2 && got[0].at == got[1].at {
			t.Errorf("first %q: sent to %v, want %d endpoints", first, got, want)
		}
	}
	if chosen, unknown := metric(t, s, `kvepp_served_total{outcome="as_chosen"}`),
		metric(t, s, `kvepp_served_total{outcome="unknown"}`); chosen != 1 ||
		unknown != 0 {
		t.Errorf("%v requests were served as chosen, %v by unknown endpoints", chosen, unknown)
	}
	allFreed(t, s)
}

// TestStoppedEngine: a stopped engine accepts connections and never answers. With a per_try_timeout, which
// stock-engines.yaml leaves to the operator, another engine answers its requests.
func TestStoppedEngine(t *testing.T) {
	engines, addresses := startStockEngines(t, 2, time.Millisecond)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    addresses,
			Manifest:   "stock-engines.yaml",
			KveppFlags: stockFlags,
			EditEnvoy: func(config any) {
				routes := stack.At(
					config,
					"static_resources",
					"listeners",
					0,
					"filter_chains",
					0,
					"filters",
					0,
					"typed_config",
					"route_config",
					"virtual_hosts",
					0,
					"routes",
				)
				for _, r := range routes.([]any) {
					if policy, ok := stack.At(r, "route", "retry_policy").(map[string]any); ok {
						policy["per_try_timeout"] = "10s" // longer than a response may take on a busy machine
					}
				}
			},
		},
	)
	engines[0].process.Signal(syscall.SIGSTOP)
	var wait sync.WaitGroup
	for i := range 16 {
		wait.Go(func() {
			a, err := stack.Chat(
				t.Context(),
				http.DefaultClient,
				s.Envoy.URL,
				nil,
				[]stack.Message{{Role: "user", Content: fmt.Sprintf("request %d", i)}},
				i%2 == 0,
				nil,
			)
			if err != nil || a.Status != http.StatusOK || a.Header.Get("x-engine") != "engine-1" ||
				a.CompletionTokens != 8 {
				t.Errorf("request %d: %v %+v", i, err, a)
			}
		})
	}
	wait.Wait()
	if moved := metric(t, s, `kvepp_served_total{outcome="moved"}`); moved == 0 {
		t.Error("no request was sent to the stopped engine first")
	}
	allFreed(t, s)
}
