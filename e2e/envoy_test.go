package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"kvepp/test/harness/parts"
	"kvepp/test/harness/stack"
)

// seen is a request as an upstream received it.
type seen struct {
	header  http.Header
	trailer http.Header
	digest  [32]byte
	size    int
	length  int64 // content-length; -1: none
}

// upstream is a server that records the last request.
func upstream(t *testing.T) (address string, last func() seen) {
	var (
		mu sync.Mutex
		s  seen
	)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		s = seen{r.Header.Clone(), r.Trailer.Clone(), sha256.Sum256(body), len(body), r.ContentLength}
		mu.Unlock()
		w.Header().Set("content-type", "application/json")
		fmt.Fprint(w, `{"choices":[{"text":"ok"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), func() seen { mu.Lock(); defer mu.Unlock(); return s }
}

// TestManifestsAreValid lets both versions of Envoy validate the unchanged files, and what `kvepp envoy` prints.
func TestManifestsAreValid(t *testing.T) {
	files, err := filepath.Glob("../manifests/envoy/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	certificates := t.TempDir()
	newAuthority(t).issue(t, certificates, 1, "envoy")
	endpoints := filepath.Join(certificates, "endpoints")
	if err := os.WriteFile(endpoints, []byte("endpoints:\n- {name: a, address: 'a.example:8000'}\n"+
		"- {name: b, address: '[::1]:8000'}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i, flags := range [][]string{
		{"--engine=dynamo", "--envoy-admin-port=0"},
		{"--engine=vllm", "--engine-tls", "--kvepp-address=kvepp.example:9002"},
		{"--engine=sglang", "--secure-serving=false", "--engine-tls",
			"--engine-ca=" + filepath.Join(certificates, "ca.crt")},
		{"--shadow"},
	} {
		text, err := exec.CommandContext(t.Context(), "../bin/kvepp",
			append([]string{"envoy", "--endpoints", endpoints}, flags...)...).Output()
		if err != nil {
			t.Fatalf("kvepp envoy %v: %v", flags, err)
		}
		file := filepath.Join(certificates, fmt.Sprintf("printed-%d.yaml", i))
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if edited := bytes.ReplaceAll(text, []byte(stack.ManifestCertificates), []byte(certificates)); !bytes.Equal(
			edited,
			text,
		) {
			file = filepath.Join(certificates, filepath.Base(file))
			if err := os.WriteFile(file, edited, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := parts.EnvoysAccept(t.Context(), file); err != nil {
			t.Error(err)
		}
	}
}

// TestOriginalDestination tests the other Envoy configuration: Envoy has no endpoints, and kvepp names the address. The
// upstream is a plain server, so that the test sees what arrives.
func TestOriginalDestination(t *testing.T) {
	nothingLeft(t, main)
	envoy, err := main.StartEnvoy(t.Context(), "original-dst.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	// First with the real workers.
	a := warm(t, envoy.URL, conversation(t.Name(), 2), true, nil)
	if a.CachedTokens == 0 {
		t.Errorf("%+v", a)
	}
	// Then with the server.
	address, last := upstream(t)
	alone(t, address)
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()
	for version, client := range map[string]*http.Client{"HTTP/1.1": http.DefaultClient, "HTTP/2.0": {Transport: h2}} {
		for _, size := range []int{0, 1, 62000, 300 << 10, 3 << 20, 40 << 20} { // the last is above --max-parse-bytes
			body := append([]byte(`{"model":"m","prompt":"`), bytes.Repeat([]byte("0123456789abcdef"), size/16)...)
			body = append(body, `","x":1.0e+2, "x":null}`...)
			req, err := http.NewRequestWithContext(
				t.Context(),
				"POST",
				envoy.URL+"/v1/completions",
				bytes.NewReader(body),
			)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset",
				"x-gateway-destination-endpoint-served",
				"x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id", "x-dynamo-dp-rank",
				"x-dynamo-prefill-dp-rank", "x-worker-instance-id",
				"x-prefill-instance-id", "x-dp-rank", "x-data-parallel-rank", "x-prefill-dp-rank",
				"x-prefiller-host-port", "x-dynamo-routing-mode"} {
				req.Header.Set(name, "127.0.0.1:9")
			}
			if version == "HTTP/2.0" {
				req.ContentLength, req.Trailer = -1, http.Header{"X-Sum": {"1"}}
			}
			a, err := stack.Do(client, req)
			if err != nil || a.Status != http.StatusOK {
				t.Fatalf("%s, %d bytes: %v %+v", version, len(body), err, a)
			}
			got := last()
			if got.size != len(body) || got.digest != sha256.Sum256(body) {
				t.Errorf("%s: %d bytes arrived as %d different ones", version, len(body), got.size)
			}
			want := map[string]string{
				"X-Gateway-Destination-Endpoint": address,
				"X-Dynamo-Worker-Instance-Id":    "18446744073709551615",
				"X-Worker-Instance-Id":           "18446744073709551615",
				"X-Dynamo-Dp-Rank":               "3",
				"X-Dp-Rank":                      "3",
				"X-Data-Parallel-Rank":           "3",
			}
			for name, values := range got.header {
				if w, ours := want[name]; ours && (len(values) != 1 || values[0] != w) {
					t.Errorf("%s: %s: %q, want %q", version, name, values, w)
				} else if !ours && (strings.HasPrefix(name, "X-Gateway-") || strings.HasPrefix(name, "X-Dynamo-") ||
					strings.Contains(name, "Prefill")) {
					t.Errorf("%s: the client's %s: %q arrived", version, name, values)
				}
				delete(want, name)
			}
			if len(want) > 0 {
				t.Errorf("%s: did not arrive upstream: %v", version, want)
			}
		}
	}
}

// alone makes a server the only endpoint until the test ends.
func alone(t *testing.T, address string) {
	t.Helper()
	if err := main.ReplaceEndpoints(fmt.Sprintf(
		"endpoints:\n- {name: server, address: '%s', instanceId: 18446744073709551615, dataParallelStartRank: 3}\n",
		address)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := main.WriteEndpoints(main.Workers...); err != nil {
			t.Error(err)
		}
		if err := main.Settled(context.Background(), len(main.Workers)); err != nil {
			t.Error(err)
		}
	})
	eventually(t, func() error {
		if metric(t, main, "kvepp_workers") != 1 {
			return fmt.Errorf("kvepp has not read the endpoints file yet")
		}
		return nil
	})
}

// TestConversations: if each side waits for the other, as over a WebSocket or in a body that kvepp does not read, every
// piece arrives immediately.
func TestConversations(t *testing.T) {
	nothingLeft(t, main)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		if r.Header.Get("upgrade") != "" {
			conn, buffered, err := control.Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
			io.Copy(conn, buffered)
			return
		}
		control.EnableFullDuplex()
		w.WriteHeader(http.StatusOK)
		control.Flush()
		piece := make([]byte, 100)
		for {
			n, err := r.Body.Read(piece)
			w.Write(piece[:n])
			control.Flush()
			if err != nil {
				return
			}
		}
	}))
	t.Cleanup(server.Close)
	alone(t, server.Listener.Addr().String())
	envoy, err := main.StartEnvoy(t.Context(), "original-dst.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	echo := func(name string, to io.Writer, from io.Reader) {
		for _, said := range []string{"one", "two", strings.Repeat("three", 20_000)} {
			if _, err := io.WriteString(to, said); err != nil {
				t.Fatal(name, err)
			}
			heard := make([]byte, len(said))
			if _, err := io.ReadFull(from, heard); err != nil || string(heard) != said {
				t.Fatalf("%s: %d bytes came back changed, or not at all: %v", name, len(said), err)
			}
		}
	}

	conn, err := net.Dial("tcp", strings.TrimPrefix(envoy.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(
		conn,
		"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
	)
	from := bufio.NewReader(conn)
	resp, err := http.ReadResponse(from, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols ||
		resp.Header.Get("x-kvepp-reason") != "unknown_api" {
		t.Fatalf("a WebSocket: %v %+v", err, resp)
	}
	echo("a WebSocket", conn, from)
	conn.Close()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	body, say := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, "POST", envoy.URL+"/v1/files", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err = http.DefaultClient.Do(req)
	if err != nil || resp.Header.Get("x-kvepp-reason") != "unknown_api" {
		t.Fatalf("a body that kvepp does not read: %v %+v", err, resp)
	}
	defer resp.Body.Close()
	echo("a body that kvepp does not read", say, resp.Body)
	say.Close()
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%v, %q", err, rest)
	}
}

// TestBodyModes: an Envoy that sends a body whole after its headers were answered gets the exact decision with the
// response to the body. If Envoy would ignore it there, it gets a decision by load at the headers.
func TestBodyModes(t *testing.T) {
	nothingLeft(t, main)
	for _, mode := range []string{"BUFFERED", "BUFFERED_PARTIAL", "STREAMED", "NONE"} {
		envoy, err := main.StartEnvoy(t.Context(), "override-host.yaml", func(extProc map[string]any) {
			processing := map[string]any{"request_header_mode": "SEND", "response_header_mode": "SEND",
				"request_body_mode": mode, "response_body_mode": mode}
			if mode == "BUFFERED" { // as in gateways whose other filters need trailers
				processing["request_trailer_mode"], processing["response_trailer_mode"] = "SEND", "SEND"
			}
			extProc["processing_mode"] = processing
		})
		if err != nil {
			t.Fatal(mode, err)
		}
		whole := mode == "BUFFERED" || mode == "BUFFERED_PARTIAL"
		for _, stream := range []bool{false, true} {
			if whole {
				a := warm(t, envoy.URL, conversation(t.Name()+mode, 2), stream, nil)
				if a.CachedTokens == 0 {
					t.Errorf("%s: %+v", mode, a)
				}
				// kvepp removes its own keys from the body, and Envoy needs the right length.
				chat(
					t,
					envoy.URL,
					novel(),
					stream,
					map[string]any{
						"nvext": map[string]any{
							"session_control": map[string]any{"session_id": mode, "action": "open"},
						},
					},
				)
			} else if a := chat(t, envoy.URL, novel(), stream, nil); a.Reason != "body_mode" {
				t.Errorf("%s: reason %s", mode, a.Reason)
			}
		}
		// A body above Envoy's buffer: Envoy's own error, a truncated body, or no effect. (Envoy may read a little more
		// than its limit, so only a much longer body is certainly truncated.)
		words := 60_000
		if mode == "BUFFERED_PARTIAL" {
			words *= 4
		}
		long := []stack.Message{{Role: "user", Content: strings.Repeat("all work and no play ", words)}}
		a, err := stack.Chat(t.Context(), http.DefaultClient, envoy.URL, nil, long, false, nil)
		switch {
		case err != nil:
			t.Errorf("%s: %v", mode, err)
		case mode == "BUFFERED" && a.Status != http.StatusRequestEntityTooLarge:
			t.Errorf("%s: status %d", mode, a.Status)
		case mode == "BUFFERED_PARTIAL" && a.Reason != "body_cut":
			t.Errorf("%s: status %d, reason %q", mode, a.Status, a.Reason)
		}
		// Refused requests and requests without a body.
		if a, err := stack.Post(t.Context(), http.DefaultClient, envoy.URL+"/v1/chat/completions", nil,
			map[string]any{"model": 1}); err != nil ||
			whole && a.Status != http.StatusBadRequest {
			t.Errorf("%s: a bad request: %v %+v", mode, err, a)
		}
		if resp, err := http.Get(envoy.URL + "/v1/models"); err != nil || resp.StatusCode != http.StatusOK ||
			resp.Header.Get("x-kvepp-reason") != "no_body" {
			t.Errorf("%s: a GET: %v %+v", mode, err, resp)
		} else {
			resp.Body.Close()
		}
	}
}

// TestFallbackEndpoints: Envoy cannot reach the chosen endpoint and tries the next one in kvepp's list; the booking
// moves with the request.
func TestFallbackEndpoints(t *testing.T) {
	s := start(
		t,
		stack.Config{Workers: 1, Speedup: 20, KveppFlags: []string{"--engine=vllm", "--fallback-endpoints=1"}},
	)
	nothingLeft(t, s)
	// The worker, and an endpoint that Envoy's cluster does not have: without a list Envoy would choose any endpoint.
	// kvepp may choose both. It reads the other's metrics page: if that refused connections, kvepp would eject it.
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("%s %s reached an endpoint that is not in Envoy's cluster", r.Method, r.URL)
		}
		http.NotFound(w, r)
	}))
	defer away.Close()
	if err := s.ReplaceEndpoints(fmt.Sprintf("endpoints:\n%s- {name: away, address: %q, instanceId: 9}\n",
		s.Workers[0].Entry(), away.Listener.Addr())); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if metric(t, s, "kvepp_workers") != 2 {
			return fmt.Errorf("kvepp has not read the endpoints file yet")
		}
		return nil
	})
	eventually(t, func() error {
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), true, nil)
		if err != nil || a.Status == http.StatusServiceUnavailable {
			t.Fatalf("%v %+v", err, a)
		}
		m, err := s.Metrics(t.Context())
		if err != nil || m[`kvepp_served_total{outcome="unknown"}`] > 0 {
			t.Fatal(err, m)
		}
		if chosen, moved := m[`kvepp_served_total{outcome="as_chosen"}`],
			m[`kvepp_served_total{outcome="moved"}`]; chosen == 0 ||
			moved == 0 {
			return fmt.Errorf("%v requests were served as chosen, %v elsewhere", chosen, moved)
		}
		return nil
	})
}

// TestStreamsAreLimited: a request above the limit gets a response with an explanation, even if Envoy forwards requests
// when kvepp fails.
func TestStreamsAreLimited(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers:    1,
			Speedup:    20,
			KveppFlags: []string{"--max-streams=5", "--max-buffered-bytes=1000000"},
		},
	)
	nothingLeft(t, s)
	open, err := s.StartEnvoy(
		t.Context(),
		"override-host.yaml",
		func(extProc map[string]any) { extProc["failure_mode_allow"] = true },
	)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(messages []stack.Message, code string) error {
		for _, e := range []*stack.Envoy{s.Envoy, open} {
			a, err := stack.Chat(t.Context(), http.DefaultClient, e.URL, nil, messages, false, nil)
			if err != nil || a.Status != http.StatusTooManyRequests || a.Header.Get("retry-after") != "1" ||
				a.Reason != code ||
				!strings.HasPrefix(a.Header.Get("content-type"), "application/json") ||
				!strings.Contains(a.Body, `"type":"overloaded_error"`) {
				return fmt.Errorf("%v %+v, want 429 and %s", err, a, code)
			}
		}
		return nil
	}
	var halves []net.Conn // clients that do not complete their bodies
	begin := func(length, sent int) {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.Envoy.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(
			conn,
			"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s",
			length,
			strings.Repeat("{", sent),
		)
		halves = append(halves, conn)
	}
	followed := func(streams, held float64) {
		eventually(t, func() error {
			if n, m := metric(t, s, "kvepp_streams"), metric(t, s, "kvepp_held_body_bytes"); n != streams || m < held ||
				streams == 0 && m != 0 {
				return fmt.Errorf("kvepp has %v open streams and holds %v bytes", n, m)
			}
			return nil
		})
	}
	for range 4 { // of 303,000 bytes for bodies
		begin(65_000, 64_000)
	}
	followed(4, 4*64_000)
	long := []stack.Message{{Role: "user", Content: strings.Repeat("all work and no play ", 3000)}}
	if err := refused(long, "too_many_bytes"); err != nil {
		t.Error(err)
	}
	begin(1000, 1)
	followed(5, 0)
	if err := refused(novel(), "too_many_requests"); err != nil {
		t.Error(err)
	}
	for _, conn := range halves {
		conn.Close()
	}
	followed(0, 0)
	chat(t, s.Envoy.URL, novel(), true, nil)
}

// TestKveppDies: without kvepp, an Envoy that fails closed answers 503, and one that fails open forwards the request.
// Both call the new kvepp when it passes their health check.
func TestKveppDies(t *testing.T) {
	// Without this, a random delay before a change of health would affect the test.
	s := start(t, stack.Config{Workers: 1, Speedup: 20, EditEnvoy: checkFast})
	open, err := s.StartEnvoy(
		t.Context(),
		"override-host.yaml",
		func(extProc map[string]any) { extProc["failure_mode_allow"] = true },
	)
	if err != nil {
		t.Fatal(err)
	}
	messages := novel()
	for _, e := range []*stack.Envoy{s.Envoy, open} {
		chat(t, e.URL, messages, false, nil)
	}
	s.KillKvepp()
	for _, e := range []*stack.Envoy{s.Envoy, open} {
		eventually(t, func() error { return e.SeesKvepp(t.Context(), false) })
	}
	a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, messages, false, nil)
	if err != nil || a.Status != http.StatusServiceUnavailable {
		t.Errorf("failing closed: %v %+v, want 503", err, a)
	}
	// The request reaches a frontend that requires a worker in the headers, and there is none: 400 is the frontend's
	// own response. A client that names the worker itself gets the same: Envoy strips its headers even now.
	id, err := s.Workers[0].InstanceID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a, err = stack.Chat(
		t.Context(),
		http.DefaultClient,
		open.URL,
		http.Header{"X-Dynamo-Worker-Instance-Id": {id}},
		messages,
		false,
		nil,
	)
	if err != nil || a.Status != http.StatusBadRequest || !strings.Contains(a.Body, "Invalid request") {
		t.Errorf("failing open: %v %+v, want the frontend's 400", err, a)
	}
	if err := s.StartKvepp(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*stack.Envoy{s.Envoy, open} {
		eventually(t, func() error { return e.SeesKvepp(t.Context(), true) })
	}
	if err := s.Settled(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	// The new kvepp has learned the worker's blocks by replay.
	if a := chat(t, s.Envoy.URL, messages, false, nil); a.CachedTokens == 0 ||
		a.CachedTokens != expect(a.KveppCached, a.PromptTokens) {
		t.Errorf("after a restart of kvepp: predicted %d, reported %d", a.KveppCached, a.CachedTokens)
	}
	nothingLeft(t, s)
}

// TestSharedFrontendAndRanks: workers with two data-parallel ranks behind one frontend, with the other kind of
// tokenizer.
func TestSharedFrontendAndRanks(t *testing.T) {
	s := start(
		t,
		stack.Config{Workers: 2, Ranks: 2, SharedFrontend: true, Speedup: 20, Model: "test/models/tiny-sentencepiece"},
	)
	nothingLeft(t, s)
	extra := map[string]any{"nvext": map[string]any{"extra_fields": []string{"worker_id"}}}
	used := map[string]bool{}
	for i := range 40 {
		messages := novel()
		if i%10 != 0 { // ties between cold workers are broken at random
			used[chat(t, s.Envoy.URL, messages, false, nil).Worker] = true
			continue
		}
		a := warm(t, s.Envoy.URL, messages, i%20 == 0, extra)
		used[a.Worker] = true
		rank := a.Worker[len(a.Worker)-1:]
		if !strings.Contains(a.Body, `"decode_dp_rank":`+rank) {
			t.Errorf("kvepp chose %s, the frontend used another rank: %.400s", a.Worker, a.Body)
		}
	}
	if len(used) != 4 {
		t.Errorf("only %v of four ranks were used", used)
	}
}

func TestHealth(t *testing.T) {
	plain, secure := main.HealthAddresses()
	for address, creds := range map[string]credentials.TransportCredentials{
		plain:  insecure.NewCredentials(),
		secure: credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})} {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		client := healthv1.NewHealthClient(conn)
		for _, service := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor",
			"inference-extension"} {
			r, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			if err != nil || r.Status != healthv1.HealthCheckResponse_SERVING {
				t.Errorf("%s %q: %v %v", address, service, r, err)
			}
		}
		if _, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "other"}); status.Code(
			err,
		) != codes.NotFound {
			t.Errorf("%s: an unknown service: %v", address, err)
		}
		watch, err := client.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "readiness"})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := watch.Recv(); err != nil || r.Status != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("%s: watch: %v %v", address, r, err)
		}
	}
}
