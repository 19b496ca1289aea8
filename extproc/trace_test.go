package extproc

import (
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"kvepp/extproc/extproctest"
	"kvepp/internal/tracing"
	"kvepp/internal/tracing/tracingtest"
)

const (
	clients = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" // trace context of a client
	proxys  = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01" // and of a proxy's span
)

// with returns the headers of chat and these.
func with(more map[string]string) map[string]string {
	h := map[string]string{}
	for name, value := range chat {
		h[name] = value
	}
	for name, value := range more {
		h[name] = value
	}
	return h
}

// TestSpansOfRequests compares the spans of several streams. It is one function because they share a collector.
func TestSpansOfRequests(t *testing.T) {
	c := tracingtest.Start(t, "grpc")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10") // milliseconds
	tracer, err := tracing.New(t.Context(), "", slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, Config{Tracer: tracer})
	usage := `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,` +
		`"prompt_tokens_details":{"cached_tokens":4}}}` + "\n\n"
	ask := func(proxy string, header map[string]string, body string) *extproctest.Outcome {
		t.Helper()
		ctx := t.Context()
		if proxy != "" {
			ctx = metadata.NewOutgoingContext(ctx, metadata.Pairs("traceparent", proxy))
		}
		out, err := b.Do(
			ctx,
			&extproctest.Request{Header: header, Body: [][]byte{[]byte(body), nil}, Upstream: response(usage, "")},
		)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	// If the client sends a trace context, the upstream gets kvepp's span.
	out := ask(
		"",
		with(
			map[string]string{
				"traceparent":  clients,
				"tracestate":   "vendor=1",
				"x-request-id": "first",
				":path":        "/v1/chat/completions?key=secret",
			},
		),
		chatBody,
	)
	told := out.Routed.Set["traceparent"]
	if !strings.HasPrefix(told, "00-0af7651916cd43dd8448eb211c80319c-") || told == clients ||
		out.Routed.Set["tracestate"] != "vendor=1" {
		t.Errorf("the upstream gets %q, %q", told, out.Routed.Set["tracestate"])
	}
	// Without a valid trace context, kvepp begins a trace and removes the client's tracestate.
	out = ask(
		"",
		with(map[string]string{"traceparent": "nonsense", "tracestate": "vendor=1", "x-request-id": "second"}),
		chatBody,
	)
	if alone := out.Routed.Set["traceparent"]; !(tracing.Context{Traceparent: alone}).Valid() ||
		!slices.Contains(out.Routed.Removed, "tracestate") {
		t.Errorf("the upstream gets %q; removed: %q", alone, out.Routed.Removed)
	}
	// A proxy that traces sends its own trace context to the upstream.
	out = ask(proxys, with(map[string]string{"traceparent": clients, "x-request-id": "third"}), chatBody)
	if said, ok := out.Routed.Set["traceparent"]; ok || slices.Contains(out.Routed.Removed, "tracestate") {
		t.Errorf("kvepp adds %q to the proxy's trace context", said)
	}
	// A refused request.
	if out = ask("", with(map[string]string{"x-request-id": "fourth"}), `{"model":7}`); out.Immediate == nil {
		t.Fatal("a bad request was not refused")
	}
	// A span ends after its request, and a span that ends after Close is lost. So wait.
	for deadline := time.Now().Add(30 * time.Second); ended(c) < 4; {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests have ended", ended(c))
		}
		<-time.After(time.Millisecond)
	}
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	spans := c.Spans()
	request := map[string]tracingtest.Span{}
	for _, s := range spans {
		if s.Name == spanRequest {
			request[s.Attributes["kvepp.request_id"]] = s
		}
		if text := strings.Join([]string{s.Name, s.Attributes["url.path"]}, " "); strings.Contains(text, "secret") {
			t.Errorf("a span has the query: %+v", s)
		}
	}
	below := func(parent tracingtest.Span) (children []tracingtest.Span, names []string) {
		for _, s := range spans {
			if s.Parent == parent.ID && s.Trace == parent.Trace {
				children, names = append(children, s), append(names, s.Name)
				if s.Start.Before(parent.Start) || s.End.After(parent.End) {
					t.Errorf("%s is not within %s", s.Name, parent.Name)
				}
			}
		}
		return children, names
	}
	first := request["first"]
	if first.Parent != "b7ad6b7169203331" || !first.Server || first.Error != "" ||
		first.Attributes["http.response.status_code"] != "200" ||
		first.Attributes["gen_ai.usage.input_tokens"] != "9" ||
		first.Attributes["kvepp.reported_cached_tokens"] != "4" ||
		first.Attributes["url.path"] != "/v1/chat/completions" ||
		!strings.Contains(told, first.ID) {
		t.Errorf("%+v", first)
	}
	routes, names := below(first)
	if !slices.Equal(names, []string{"gateway.request_orchestration"}) {
		t.Fatalf("below the request: %q", names)
	}
	a := routes[0].Attributes
	if a["kvepp.endpoint"] != "a" && a["kvepp.endpoint"] != "b" || a["kvepp.reason"] != "no_tokenizer" ||
		a["gen_ai.request.model"] != "m" ||
		a["kvepp.overlap_blocks"] != "0" ||
		a["kvepp.worker"] != map[string]string{"a": "1/0", "b": "2/0"}[a["kvepp.endpoint"]] {
		t.Errorf("%+v", routes[0])
	}
	if _, names := below(routes[0]); !slices.Equal(names, []string{"kvepp.parse", "kvepp.tokenize", "kvepp.choose"}) {
		t.Errorf("below the decision: %q", names)
	}
	if s := request["second"]; s.Parent != "" {
		t.Errorf("unexpected spans: %+v", s)
	}
	if s := request["third"]; s.Trace != "4bf92f3577b34da6a3ce929d0e0e4736" || s.Parent != "00f067aa0ba902b7" {
		t.Errorf("not below the proxy's span: %+v", s)
	}
	if s := request["fourth"]; s.Attributes["http.response.status_code"] != "400" || s.Error == "" {
		t.Errorf("a refused request: %+v", s)
	}
}

// ended counts the requests whose spans have arrived.
func ended(c *tracingtest.Collector) (n int) {
	for _, s := range c.Spans() {
		if s.Name == spanRequest {
			n++
		}
	}
	return n
}
