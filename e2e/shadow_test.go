package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// TestShadow: with a filter in observability mode, requests over HTTP/1.1 and HTTP/2, broken streams, large bodies and
// trailers are answered as without it, all are counted, and nothing stays booked.
func TestShadow(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Blocks: 16384, Speedup: 20, FrontendMode: "round-robin",
		Manifest: "shadow.yaml", KveppFlags: []string{"--shadow"}})
	nothingLeft(t, s)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	two := &http.Client{Transport: &http.Transport{Protocols: protocols}}
	send := func(client *http.Client, ctx context.Context, i int) error {
		text, model := fmt.Sprintf("%d %s", i%20, strings.Repeat("word ", 200)), stack.Model
		large := i%50 == 7
		if large { // the frontend would take minutes to tokenize it on a busy machine: it does not have this model
			text, model = strings.Repeat("x", 20<<20), "unknown"
		}
		body := fmt.Sprintf(`{"model":%q,"max_tokens":4,"stream":%v,"messages":[{"role":"user","content":%q}]}`,
			model, i%2 == 0, text)
		answer, err := postInPieces(ctx, client, s.URL()+"/v1/chat/completions", []byte(body), i%5 == 0)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if _, err = io.Copy(io.Discard, answer.Body); err == nil && answer.StatusCode != http.StatusOK && !large {
			err = fmt.Errorf("request %d: status %d", i, answer.StatusCode)
		}
		return err
	}
	const n = 200
	var all sync.WaitGroup
	slots := make(chan bool, 8)
	for i := range n {
		slots <- true
		all.Go(func() {
			defer func() { <-slots }()
			client := http.DefaultClient
			if i%3 == 0 {
				client = two
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			breaks := i%10 == 3
			if breaks {
				time.AfterFunc(20*time.Millisecond, cancel)
			}
			if err := send(client, ctx, i); err != nil && !breaks {
				t.Errorf("request %d: %v", i, err)
			}
		})
	}
	all.Wait()
	eventually(t, func() error {
		m, err := s.Metrics(t.Context())
		if err != nil {
			return err
		}
		counted := judgedOf(m)
		// A client may break off before Envoy shows its request.
		if counted < n*9/10 || counted > n || m["kvepp_active_requests"] != 0 || m["kvepp_streams"] != 0 {
			return fmt.Errorf("%v of %d requests are counted, %v booked, %v streams", counted, n,
				m["kvepp_active_requests"], m["kvepp_streams"])
		}
		return nil
	})
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range m {
		if strings.HasPrefix(name, "kvepp_shadow") {
			t.Log(name, value)
		}
	}
	if equal, other := m[`kvepp_shadow_requests_total{outcome="equal"}`],
		m[`kvepp_shadow_requests_total{outcome="other"}`]; equal == 0 || other == 0 || equal+other < n/2 {
		t.Errorf("%v equal choices, %v others", equal, other)
	}
}

// judgedOf is how many requests kvepp in shadow has counted.
func judgedOf(m map[string]float64) (n float64) {
	for name, value := range m {
		if strings.HasPrefix(name, "kvepp_shadow_requests_total") && !strings.Contains(name, "no_response_body") {
			n += value
		}
	}
	return n
}

// echoing is a server whose response follows from the request, in pieces that are sent apart.
func echoing(t *testing.T) (address string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client broke off
		}
		w.Header().Set("content-type", "text/event-stream")
		for piece := range bytes.Lines(echoed(body)) {
			w.Write(piece) //nolint:errcheck // the client may have broken off
			w.(http.Flusher).Flush()
		}
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// echoed is the response of echoing.
func echoed(body []byte) []byte {
	sum := sha256.Sum256(body)
	return fmt.Appendf(nil, "data: {\"choices\":[{\"text\":\"%x\"}]}\n\ndata: {\"usage\":{\"prompt_tokens\":%d,"+
		"\"completion_tokens\":1}}\n\ndata: [DONE]\n\n", sum, len(body)/8)
}

// TestShadowFails: while kvepp is stopped again and again, killed, away and started again, every request in shadow is
// answered as by the server, also large ones, with trailers, and over HTTP/2; Envoy holds little for a kvepp that does
// not read; afterwards kvepp judges requests again, and counts none as running.
func TestShadowFails(t *testing.T) {
	s := start(t, stack.Config{Workers: -1, Servers: []string{echoing(t), echoing(t)}, Manifest: "shadow.yaml",
		KveppFlags: []string{"--shadow", "--engine=vllm", "--router-kv-events=false"}})
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	clients := []*http.Client{http.DefaultClient, {Transport: &http.Transport{Protocols: protocols}}}
	var ended, killAt atomic.Int64 // requests; after how many of them kvepp is killed
	load := func(phase string, n int, size func(i int) int) {
		t.Log(phase)
		var all sync.WaitGroup
		for worker := range 8 {
			all.Go(func() {
				for i := worker; i < n; i += 8 {
					if err := sendEchoed(t, clients[i%2], s.URL(), i, size(i)); err != nil {
						t.Errorf("%s: request %d: %v", phase, i, err)
					}
					if ended.Add(1) == killAt.Load() {
						s.KillKvepp()
					}
				}
			})
		}
		all.Wait()
	}
	mixed := func(i int) int {
		if i%100 == 50 {
			return 20 << 20
		}
		return 200 + i%7*3000
	}
	load("kvepp runs", 100, mixed)

	stop, done := make(chan bool), make(chan bool)
	go func() { // a kvepp that stops at every other request is slow
		defer close(done)
		for signal := syscall.SIGSTOP; ; signal = syscall.SIGSTOP + syscall.SIGCONT - signal {
			if err := syscall.Kill(s.KveppPID(), signal); err != nil {
				t.Error(err)
			}
			for before := ended.Load(); ended.Load() < before+2; {
				select {
				case <-stop:
					if err := syscall.Kill(s.KveppPID(), syscall.SIGCONT); err != nil {
						t.Error(err)
					}
					return
				case <-time.After(time.Millisecond):
				}
			}
		}
	}()
	load("kvepp is slow", 200, mixed)
	close(stop)
	<-done

	if err := syscall.Kill(s.KveppPID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	load("kvepp is stopped", 100, mixed)
	eventually(t, func() error { return s.Envoy.SeesKvepp(t.Context(), false) })
	before := allocated(t, s)
	load("kvepp was found stopped", 400, func(int) int { return 250_000 })
	if more := allocated(t, s) - before; more > 25e6 {
		t.Errorf("Envoy took %d bytes for 100 MB that a stopped kvepp did not read", more)
	}
	if err := syscall.Kill(s.KveppPID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return s.Envoy.SeesKvepp(t.Context(), true) })

	killAt.Store(ended.Load() + 50)
	load("kvepp is killed", 200, mixed)
	load("kvepp is away", 100, mixed)
	if err := s.StartKvepp(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return s.Envoy.SeesKvepp(t.Context(), true) })
	load("kvepp runs again", 100, mixed)
	eventually(t, func() error {
		m, err := s.Metrics(t.Context())
		if err != nil {
			return err
		}
		if n := judgedOf(m); n == 0 || m["kvepp_active_requests"] != 0 || m["kvepp_streams"] != 0 {
			return fmt.Errorf("%v requests are counted, %v booked, %v streams", n, m["kvepp_active_requests"],
				m["kvepp_streams"])
		}
		return nil
	})
}

// postInPieces posts a body whose length the headers do not tell, with trailers or without.
func postInPieces(ctx context.Context, client *http.Client, url string, body []byte, trailers bool) (*http.Response,
	error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.NopCloser(bytes.NewReader(body)))
	if err != nil {
		return nil, err
	}
	req.Header.Set("content-type", "application/json")
	if trailers {
		req.Trailer = http.Header{"X-Checksum": {"none"}}
	}
	return client.Do(req)
}

// sendEchoed sends a request of about so many bytes, with trailers if i says so, or breaks it off.
func sendEchoed(t *testing.T, client *http.Client, url string, i, size int) error {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	body := fmt.Appendf(nil, `{"model":%q,"prompt":"%d %s"}`, stack.Model, i, strings.Repeat("x", size))
	answer, err := postInPieces(ctx, client, url+"/v1/completions", body, i%5 == 0)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if i%10 == 3 {
		return nil // the client breaks off
	}
	got, err := io.ReadAll(answer.Body)
	if err == nil && (answer.StatusCode != http.StatusOK || !bytes.Equal(got, echoed(body))) {
		err = fmt.Errorf("status %d: %.200q", answer.StatusCode, got)
	}
	return err
}

// allocated returns the bytes that Envoy has allocated.
func allocated(t *testing.T, s *stack.Stack) int {
	t.Helper()
	stats, err := s.Envoy.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(stats["server.memory_allocated"])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestShadowMistakes: with real Envoy, each mistake in the filter or in the list of endpoints is counted by its reason,
// and kvepp's log says what to change.
func TestShadowMistakes(t *testing.T) {
	for _, c := range []struct {
		outcome, advice string
		edit            func(filter map[string]any)
	}{
		{"no_address", "add upstream.address to the response_attributes",
			func(f map[string]any) { delete(f, "response_attributes") }},
		{"not_observed", "set observability_mode: true", func(f map[string]any) { delete(f, "observability_mode") }},
		{"no_request_body", "set request_body_mode: STREAMED",
			func(f map[string]any) { f["processing_mode"].(map[string]any)["request_body_mode"] = "NONE" }},
		{"no_response_body", "set response_body_mode: STREAMED",
			func(f map[string]any) { f["processing_mode"].(map[string]any)["response_body_mode"] = "NONE" }},
		{"unknown_endpoint", "list the same IP:port in the endpoints", nil},
	} {
		t.Run(c.outcome, func(t *testing.T) {
			s := start(t, stack.Config{Workers: -1, Servers: []string{echoing(t)}, Manifest: "shadow.yaml",
				KveppFlags: []string{"--shadow", "--engine=vllm", "--router-kv-events=false"},
				EditEnvoy: func(config any) {
					if c.edit != nil {
						c.edit(stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
							"typed_config", "http_filters", 0, "typed_config").(map[string]any))
					}
				}})
			nothingLeft(t, s)
			if c.edit == nil {
				other := "endpoints: [{name: other, address: '127.0.0.1:1'}]\n"
				if err := s.ReplaceEndpoints(other); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, func() error {
				if err := sendEchoed(t, http.DefaultClient, s.URL(), 1, 100); err != nil {
					t.Error(err)
				}
				log, err := s.Log()
				if err != nil {
					return err
				}
				m, err := s.Metrics(t.Context())
				if err == nil && (m[`kvepp_shadow_requests_total{outcome="`+c.outcome+`"}`] == 0 ||
					!strings.Contains(log, c.advice)) {
					err = fmt.Errorf("not counted as %s, or the log has no %q:\n%s", c.outcome, c.advice, log)
				}
				return err
			})
		})
	}
}
