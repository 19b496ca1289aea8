package extproc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/extproc/extproctest"
	"kvepp/indexer"
	"kvepp/internal/logtest"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// bench is a server with a pool of two endpoints and without tokenizers: every decision is by load.
type bench struct {
	*extproctest.Envoy
	server  *Server
	book    *scoring.ActiveSequences
	pool    *pool.Pool
	index   *indexer.Index
	router  *router.Router
	metrics *metrics.Metrics
	log     *slog.Logger
}

var benchEndpoints = []pool.Endpoint{
	{Name: "a", Address: "10.0.0.1:8000", InstanceID: 1, Model: "m"},
	{Name: "b", Address: "10.0.0.2:8000", InstanceID: 2, Model: "m"},
}

func newBench(t testing.TB, cfg Config) *bench {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	b := &bench{book: scoring.NewActiveSequences(), pool: pool.New(log), metrics: metrics.New(), log: log}
	b.pool.Update(benchEndpoints)
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	b.index = index
	b.router = router.New(
		router.Config{Scoring: scoring.DefaultConfig(), Picker: b.metrics.NewPicker()},
		b.pool,
		index,
		b.book,
		b.metrics,
		log,
	)
	b.server = NewServer(cfg, b.router, b.metrics, log)
	b.Envoy = extproctest.Serve(t, b.server)
	return b
}

// eject makes the server eject endpoints that fail, for a millisecond at first.
func (b *bench) eject(t testing.TB) *eject.Tracker {
	t.Helper()
	tracker := eject.New(
		eject.Config{On: true, ConsecutiveFailures: 2, FailurePercent: 50, MaxPercent: 50, Time: time.Millisecond},
		b.log,
	)
	b.pool.Update(nil)
	b.pool.Watch(tracker)
	b.pool.Update(benchEndpoints)
	b.router = router.New(
		router.Config{Scoring: scoring.DefaultConfig(), Fallbacks: 1, Eject: tracker, FirstByte: time.Hour},
		b.pool,
		b.index,
		b.book,
		b.metrics,
		b.log,
	)
	b.server = NewServer(b.server.cfg, b.router, b.metrics, b.log)
	return tracker
}

// idle waits until no booking is left.
func (b *bench) idle(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); b.book.Len() > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%d bookings are left", b.book.Len())
		}
		<-time.After(time.Millisecond)
	}
}

// counted waits until the sum of a metric's series that have this label value is n. For histograms it adds up their
// counts.
func (b *bench) counted(t *testing.T, n float64, metric, label string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; <-time.After(time.Millisecond) {
		got := 0.0
		for _, s := range metricstest.Read(t, b.metrics.Registry).Of(metric) {
			if slices.ContainsFunc(s.Labels, func(l string) bool { return strings.HasSuffix(l, "="+label) }) {
				got += s.Count
			}
		}
		if got == n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s of %s is %v, want %v", metric, label, got, n)
		}
	}
}

// If a body turns out to be too large after its first part was forwarded, kvepp refuses the request. This is one error,
// and no endpoint's failure.
func TestRefusedAfterItWasSent(t *testing.T) {
	b := newBench(t, Config{MaxParseBytes: 10, MaxBodyBytes: 100})
	out, err := b.Do(
		t.Context(),
		&extproctest.Request{
			Header:   chat,
			Body:     [][]byte{make([]byte, 50), make([]byte, 51), nil},
			Upstream: response("x"),
		},
	)
	if out.Immediate.GetStatus().GetCode() != 413 { // in place of a piece of the body, which is an error to this Envoy
		t.Fatal(err, out.Immediate)
	}
	b.idle(t)
	b.counted(t, 1, "inference_objective_request_duration_seconds", "m")
	b.counted(t, 0, "inference_objective_running_requests", "m")
	b.counted(t, 1, "inference_objective_request_error_total", metrics.CodeBadRequest)
	b.counted(t, 0, "inference_objective_request_error_total", "m")
}

// A body above MaxParseBytes is logged once, with its size and the flag.
func TestTooLargeToReadIsLogged(t *testing.T) {
	b := newBench(t, Config{MaxParseBytes: 10})
	var log logtest.Log
	b.server.log = slog.New(slog.NewTextHandler(&log, nil))
	header := maps.Clone(chat)
	header[":path"] += "?key=secret"
	for range 3 {
		if out, err := b.Do(t.Context(), &extproctest.Request{Header: header, Body: [][]byte{make([]byte, 50), nil},
			Upstream: response("x")}); err != nil {
			t.Fatal(err, out)
		}
	}
	b.counted(t, 3, "kvepp_decisions_total", string(router.ReasonBodyTooLarge))
	if log.Count("is larger than --max-parse-bytes") != 1 ||
		log.Count("path=/v1/chat/completions body_bytes=50 max_parse_bytes=10") != 1 ||
		log.Count("secret") != 0 {
		t.Error(log.String())
	}
}

// A body mode in which kvepp cannot wait for the body is logged once, with the right setting.
func TestBodyModeIsLogged(t *testing.T) {
	b := newBench(t, Config{})
	var log logtest.Log
	b.server.log = slog.New(slog.NewTextHandler(&log, nil))
	for range 3 {
		b.server.note(
			(&stream{}).learnModes(
				&extprocv3.ProcessingRequest{
					ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_STREAMED},
				},
			),
		)
	}
	if log.Count("request_body_mode STREAMED") != 1 || log.Count("Set request_body_mode: FULL_DUPLEX_STREAMED") != 1 {
		t.Error(log.String())
	}
}

var chat = map[string]string{":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "r"}

const chatBody = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`

func response(pieces ...string) func(*extproctest.Routed) extproctest.Response {
	r := extproctest.Response{Header: map[string]string{":status": "200", "content-type": "text/event-stream"}}
	for _, p := range pieces {
		r.Body = append(r.Body, []byte(p))
	}
	return func(*extproctest.Routed) extproctest.Response { return r }
}

func TestRequestIsRoutedAndRelayed(t *testing.T) {
	b := newBench(t, Config{})
	out, err := b.Do(
		t.Context(),
		&extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody[:10]), []byte(chatBody[10:]), nil},
			Upstream: func(r *extproctest.Routed) extproctest.Response {
				if b.book.Len() != 1 {
					t.Errorf("%d bookings while the request runs, want 1", b.book.Len())
				}
				return response("data: 1\n\n", "data: [DONE]\n\n", "")(r)
			}},
	)
	if err != nil || out.Immediate != nil {
		t.Fatal(out, err)
	}
	endpoint := out.Routed.Set[endpointHeader]
	worker := map[string]string{"10.0.0.1:8000": "1", "10.0.0.2:8000": "2"}[endpoint]
	if worker == "" || out.Routed.Set[workerHeader] != worker || out.Routed.Set["x-worker-instance-id"] != worker ||
		out.Routed.Set[rankHeader] != "0" {
		t.Errorf("headers %v do not name one worker", out.Routed.Set)
	}
	if md, _ := out.Metadata[endpointNamespace].(map[string]any); md[endpointHeader] != endpoint {
		t.Errorf("metadata %v, want the endpoint %s as in the header", out.Metadata, endpoint)
	}
	if string(out.Routed.Body) != chatBody || string(out.Body) != "data: 1\n\ndata: [DONE]\n\n" {
		t.Errorf("request %q and response %q were changed", out.Routed.Body, out.Body)
	}
	b.idle(t)
}

// TestDataParallelShapes: if all ranks share a port, a header names the rank. If each rank has its own port, there is
// no such header, because the engine would refuse the request.
func TestDataParallelShapes(t *testing.T) {
	b := newBench(t, Config{})
	ranks := []string{"x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"}
	for _, c := range []struct {
		endpoint pool.Endpoint
		named    string
	}{
		{pool.Endpoint{Name: "shared", Address: "10.0.0.1:8000", InstanceID: 1, Model: "m", DataParallelStartRank: 3},
			"3"},
		{pool.Endpoint{Name: "own", Address: "10.0.0.1:8003", InstanceID: 1, Model: "m", DataParallelStartRank: 3,
			RankByAddress: true}, ""},
	} {
		b.pool.Update([]pool.Endpoint{c.endpoint})
		claimed := map[string]string{":method": "POST", ":path": "/v1/chat/completions", "x-data-parallel-rank": "7"}
		out, err := b.Do(
			t.Context(),
			&extproctest.Request{
				Header:   claimed,
				Body:     [][]byte{[]byte(chatBody)},
				Upstream: response("data: [DONE]\n\n"),
			},
		)
		if err != nil || out.Immediate != nil || out.Routed.Set[endpointHeader] != c.endpoint.Address {
			t.Fatal(c.endpoint.Name, out, err)
		}
		for _, header := range ranks {
			value, set := out.Routed.Set[header]
			removed := slices.Contains(out.Removed, header)
			if set != (c.named != "") || value != c.named || removed == set {
				t.Errorf("%s: %s: %q, removed %v", c.endpoint.Name, header, value, removed)
			}
		}
		b.idle(t)
	}
}

// TestPrefillerHeader: for stock engines behind llm-d's routing sidecar, the header has the prefill worker's address,
// independent of the client's headers. The prefill worker's booking ends at the first byte of the response.
func TestPrefillerHeader(t *testing.T) {
	b := newBench(t, Config{PrefillerHeader: true})
	b.pool.Update([]pool.Endpoint{
		{Name: "p", Address: "10.0.0.1:8000", InstanceID: 1, Model: "m", Role: pool.Prefill},
		{Name: "d", Address: "10.0.0.2:8000", InstanceID: 2, Model: "m", Role: pool.Decode},
	})
	claimed := map[string]string{
		":method":                      "POST",
		":path":                        "/v1/chat/completions",
		"x-prefiller-host-port":        "10.9.9.9:1",
		"x-dynamo-prefill-instance-id": "9",
		"x-prefill-instance-id":        "9",
	}
	for _, gone := range []bool{false, true} {
		request := &extproctest.Request{
			Header: claimed,
			Body:   [][]byte{[]byte(chatBody)},
			Upstream: func(r *extproctest.Routed) extproctest.Response {
				for name, want := range map[string]string{endpointHeader: "10.0.0.2:8000", workerHeader: "2",
					prefillerHeader: "10.0.0.1:8000",
					prefillHeader:   "1", prefillRankHeader: "0", "x-prefill-instance-id": "1",
					"x-prefill-dp-rank": "0"} {
					if got := r.Set[name]; got != want {
						t.Errorf("%s: %s, want %s", name, got, want)
					}
				}
				if b.book.Len() != 2 {
					t.Errorf("%d bookings before the first byte, want one for each worker", b.book.Len())
				}
				return response("data: {}\n\n", "data: [DONE]\n\n")(r)
			},
		}
		if gone {
			request.Upstream = nil // the client goes away while the upstream thinks
		}
		if out, err := b.Do(t.Context(), request); err != nil || out.Immediate != nil {
			t.Fatal(out, err)
		}
		b.idle(t)
	}
	// This router has workers of Dynamo, which need a prefill worker.
	b.pool.Update([]pool.Endpoint{{Name: "d", Address: "10.0.0.2:8000", InstanceID: 2, Model: "m", Role: pool.Decode}})
	out, err := b.Do(t.Context(), &extproctest.Request{Header: claimed, Body: [][]byte{[]byte(chatBody)}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 503 ||
		!strings.Contains(string(out.Immediate.GetBody()), "no_prefill_worker") {
		t.Errorf("without a prefill worker: %v %v", out, err)
	}
}

func TestBookingEndsWithTheStream(t *testing.T) {
	b := newBench(t, Config{})
	// The client closes the connection before the response begins.
	if _, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}}); err != nil {
		t.Fatal(err)
	}
	b.idle(t)
	// The client closes the connection while kvepp waits for the rest of the body.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Do(ctx, &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}}); err == nil {
		t.Fatal("a cancelled request returned no error")
	}
	b.idle(t)
}

func TestManyStreams(t *testing.T) {
	b := newBench(t, Config{})
	large := bytes.Repeat([]byte(" "), 300_000)
	var wait sync.WaitGroup
	for i := range 100 {
		wait.Go(func() {
			r := &extproctest.Request{
				Header:   chat,
				Body:     [][]byte{[]byte(chatBody), large[:i*1000]},
				Trailers: i%3 == 0,
				Upstream: response("x", ""),
			}
			out, err := b.Do(t.Context(), r)
			if err != nil || out.Immediate != nil || len(out.Routed.Body) != len(chatBody)+i*1000 {
				t.Error(i, err, out.Immediate)
			}
		})
	}
	wait.Wait()
	b.idle(t)
}

func TestErrors(t *testing.T) {
	b := newBench(t, Config{})
	for _, c := range []struct {
		name, path, body string
		status           int
		says             string
	}{
		{"not JSON", "/v1/chat/completions", "{", 400, "invalid_json"},
		{"no model", "/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, 400, `"param":"model"`},
		{"no messages", "/v1/chat/completions", `{"model":"m"}`, 400, `"param":"messages"`},
		{"prompt of a wrong type", "/v1/completions", `{"model":"m","prompt":{}}`, 400, `"param":"prompt"`},
		{"a model without endpoints", "/v1/completions", `{"model":"other","prompt":"x"}`, 404, "model_not_found"},
	} {
		out, err := b.Do(
			t.Context(),
			&extproctest.Request{
				Header: map[string]string{":method": "POST", ":path": c.path},
				Body:   [][]byte{[]byte(c.body)},
			},
		)
		if err != nil {
			t.Fatal(c.name, err)
		}
		if out.Immediate == nil || int(out.Immediate.GetStatus().GetCode()) != c.status ||
			!strings.Contains(string(out.Immediate.GetBody()), c.says) ||
			out.Set["content-type"] != "application/json" {
			t.Errorf("%s: %v, want %d and %s", c.name, out.Immediate, c.status, c.says)
		}
	}
	b.pool.Update(nil)
	for _, header := range []map[string]string{chat, {":method": "GET", ":path": "/v1/models"}} {
		r := &extproctest.Request{Header: header}
		if header[":method"] == "POST" {
			r.Body = [][]byte{[]byte(chatBody)}
		}
		out, err := b.Do(t.Context(), r)
		if err != nil || out.Immediate.GetStatus().GetCode() != 503 {
			t.Errorf("%s without endpoints: %v %v, want 503", header[":path"], out, err)
		}
	}
	if b.book.Len() != 0 {
		t.Errorf("%d bookings of refused requests are left", b.book.Len())
	}
}

// TestOverload: if all endpoints are overloaded, kvepp refuses the request at once, with Retry-After.
func TestOverload(t *testing.T) {
	for _, c := range []struct {
		cfg    Config
		status int
		after  string
	}{
		{Config{}, 429, "1"},
		{Config{OverloadStatus: 529}, 529, "1"},
		{Config{OverloadStatus: 503}, 503, "1"},
	} {
		b := newBench(t, c.cfg)
		none := uint64(0)
		b.router.SetThresholds("m", router.Thresholds{ActivePrefillTokens: &none})
		for range 2 {
			if _, err := b.router.Route(t.Context(),
				&router.Request{Path: "/v1/chat/completions", Body: []byte(chatBody)}); err != nil {
				t.Fatal(err)
			}
		}
		out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}})
		if err != nil || out.Immediate == nil {
			t.Fatalf("%+v: not refused: %v %v", c.cfg, out, err)
		}
		if status := int(out.Immediate.GetStatus().GetCode()); status != c.status ||
			out.Set["retry-after"] != c.after ||
			!strings.Contains(string(out.Immediate.GetBody()), `"type":"overloaded_error"`) {
			t.Errorf(
				"%+v: status %d, retry-after %q, %s",
				c.cfg,
				status,
				out.Set["retry-after"],
				out.Immediate.GetBody(),
			)
		}
	}
}

func TestErrorsOfLoad(t *testing.T) {
	for err, code := range map[error]string{router.ErrOverloaded: "overloaded", router.ErrQueueFull: "queue_full",
		router.ErrQueueTimeout: "queue_timeout", router.ErrShed: "shed", router.ErrNoRoom: "no_room"} {
		cfg := Config{OverloadStatus: 503}
		if e := cfg.toHTTP(fmt.Errorf("because: %w", err)); e.status != 503 || e.code != code || e.retryAfter != 1 ||
			e.kind != overloadedError ||
			e.message == "" {
			t.Errorf("%v: %+v", err, e)
		}
	}
}

// TestRefusedForADeadline: the client is told after how many whole seconds its deadline could be met, or nothing if
// never.
func TestRefusedForADeadline(t *testing.T) {
	for retry, want := range map[time.Duration]int{0: 0, time.Millisecond: 1, 2500 * time.Millisecond: 3} {
		cfg := Config{OverloadStatus: 429}
		e := cfg.toHTTP(fmt.Errorf("because: %w", &router.LateError{Within: time.Second, Retry: retry}))
		if e.status != 429 || e.code != "deadline" || e.retryAfter != want || droppedReasons[e.code] == "" {
			t.Errorf("%v: %+v", retry, e)
		}
	}
}

func TestAnyPathIsRouted(t *testing.T) {
	b := newBench(t, Config{DecisionHeaders: true})
	for path, reason := range map[string]string{"/v1/embeddings": "unknown_api", "/v1/models": "no_body",
		"/v1/chat/completions?x=1": "no_tokenizer"} {
		r := &extproctest.Request{Header: map[string]string{":method": "POST", ":path": path}, Upstream: response("x")}
		if reason != "no_body" {
			r.Body = [][]byte{[]byte(chatBody)}
		}
		out, err := b.Do(t.Context(), r)
		if err != nil || out.Immediate != nil || out.Routed.Set[workerHeader] == "" {
			t.Errorf("%s: not routed: %v %v", path, out, err)
		} else if out.Set["x-kvepp-reason"] != reason {
			t.Errorf("%s: reason %q, want %q", path, out.Set["x-kvepp-reason"], reason)
		}
		if id := out.Routed.Set["x-request-id"]; len(id) != 36 {
			t.Errorf("%s: kvepp made no request id: %q", path, id)
		}
	}
	b.idle(t)
}

func TestValidStatus(t *testing.T) {
	for code := range 1000 {
		s := strconv.Itoa(code)
		if validStatus(s) && (code < 100 || code >= 600) {
			t.Errorf("%s counted as valid", s)
		}
	}
	for _, s := range []string{"200", "404", "429", "503"} {
		if !validStatus(s) {
			t.Errorf("%s counted as invalid", s)
		}
	}
	for _, s := range []string{"", "20", "2000", "abc", "999", "6xx"} {
		if validStatus(s) {
			t.Errorf("%q counted as valid", s)
		}
	}
}

// breaking is a log handler that panics at the line about the end of a request.
type breaking struct{ slog.Handler }

func (breaking) Enabled(context.Context, slog.Level) bool { return true }
func (breaking) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "request ended" {
		panic("a defect")
	}
	return nil
}

// A panic at the end of a stream ends only that stream.
func TestPanicAtTheEnd(t *testing.T) {
	b := newBench(t, Config{})
	b.server.log = slog.New(breaking{})
	for range 3 {
		_, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)},
			Upstream: response(
				"data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1,"+
					"\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n",
				"data: [DONE]\n\n",
				"",
			)})
		_ = err // whether the stream's own end is in order does not matter
		b.idle(t)
	}
	b.counted(t, 0, "inference_objective_running_requests", "m")
}
