package tracing

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/tracing/tracingtest"
	"kvepp/internal/useragent"
)

// environment sets OpenTelemetry's variables for the test, and clears all others that the machine may have.
func environment(t *testing.T, variables map[string]string) {
	for _, name := range []string{"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT",
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
		"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER",
		"OTEL_TRACES_SAMPLER_ARG"} {
		t.Setenv(name, "")
	}
	for name, value := range variables {
		t.Setenv(name, value)
	}
}

func start(t *testing.T) (*Tracer, *logtest.Log) {
	t.Helper()
	log := &logtest.Log{}
	tracer, err := New(t.Context(), "1.2.3", slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return tracer, log
}

func TestConfigured(t *testing.T) {
	for _, c := range []struct {
		variables map[string]string
		protocol  string // empty: the environment asks for no spans
		says      string // part of the error
	}{
		{nil, "", ""},
		{map[string]string{"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "", ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "grpc", ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, "grpc", ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, "grpc", ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
			"http/protobuf", ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
			"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc", ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, "", ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, "", ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "zipkin"}, "",
			"set it to otlp, or to none"},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
			"", "grpc or http/protobuf"},
	} {
		environment(t, c.variables)
		wanted, protocol, err := configured()
		if wanted != (c.protocol != "") || protocol != c.protocol || (err == nil) != (c.says == "") ||
			err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v, %q, %v", c.variables, wanted, protocol, err)
		}
	}
}

// TestSpans: recorded spans arrive below the caller's span, over both protocols.
func TestSpans(t *testing.T) {
	for _, protocol := range []string{"grpc", "http/protobuf"} {
		c := tracingtest.Start(t, protocol)
		environment(
			t,
			map[string]string{
				"OTEL_EXPORTER_OTLP_ENDPOINT": c.Endpoint,
				"OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
				"OTEL_SERVICE_NAME":           "picker-7",
			},
		)
		tracer, _ := start(t)
		caller := Context{"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1,other=2"}
		if !caller.Valid() {
			t.Error("the specification's own example cannot be read")
		}
		s := tracer.Request("request", caller)
		next := s.Context()
		if trace, rest, _ := strings.Cut(strings.TrimPrefix(next.Traceparent, "00-"),
			"-"); trace != "0af7651916cd43dd8448eb211c80319c" ||
			strings.HasPrefix(rest, "b7ad6b7169203331") ||
			!strings.HasSuffix(rest, "-01") ||
			next.Tracestate != "vendor=1,other=2" {
			t.Errorf("upstream is told %+v", next)
		}
		at := time.Now()
		child := s.Child("child", at)
		child.Phase(
			"phase",
			at,
			at.Add(time.Millisecond),
			Int("n", 7),
			Text("long", strings.Repeat("x", 1000)),
			Text("odd", "a\xffb"),
		)
		child.End()
		s.Fail("no_endpoints")
		s.End()
		if err := tracer.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		by := map[string]tracingtest.Span{}
		for _, span := range c.Spans() {
			by[span.Name] = span
			if span.Service != "picker-7" || span.Trace != "0af7651916cd43dd8448eb211c80319c" {
				t.Errorf("%s: %+v", protocol, span)
			}
		}
		request, phase := by["request"], by["phase"]
		if len(by) != 3 || request.Parent != "b7ad6b7169203331" || !request.Server || request.Error != "no_endpoints" ||
			by["child"].Parent != request.ID || phase.Parent != by["child"].ID ||
			phase.End.Sub(phase.Start) != time.Millisecond ||
			phase.Attributes["n"] != "7" || len(phase.Attributes["long"]) != maxText ||
			phase.Attributes["odd"] != "a\uFFFDb" {
			t.Errorf("%s: %+v", protocol, by)
		}
		if exported, failed := tracer.Spans(); exported != 3 || failed != 0 {
			t.Errorf("%s: %d spans exported, %d failed", protocol, exported, failed)
		}
	}
}

// TestAgent: the collector sees kvepp's name and version in User-Agent and in the resource, over both protocols.
// Headers of the environment arrive as well; over HTTP they may contain another User-Agent.
func TestAgent(t *testing.T) {
	useragent.Set("v1.2.3")
	t.Cleanup(func() { useragent.Set("") })
	const all, traces = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
	for _, c := range []struct {
		protocol  string
		variables map[string]string
		agent     string            // a prefix
		header    map[string]string // by names in lower case; empty: absent
	}{
		{"grpc", nil, "kvepp/1.2.3 OTel OTLP Exporter Go/", nil},
		{"grpc", map[string]string{all: "x-team=a%20b"}, "kvepp/1.2.3 OTel OTLP Exporter Go/",
			map[string]string{"x-team": "a b"}},
		{"http/protobuf", nil, "kvepp/1.2.3 OTel OTLP Exporter Go/", nil},
		{"http/protobuf", map[string]string{all: "x-team=a%20b, X-Key = k=,wrong,w%zz=1,x-bad=%zz"},
			"kvepp/1.2.3 OTel OTLP Exporter Go/", map[string]string{"x-team": "a b", "x-key": "k=", "x-bad": ""}},
		{"http/protobuf", map[string]string{all: "x-team=a", traces: "x-key=k"},
			"kvepp/1.2.3 OTel OTLP Exporter Go/", map[string]string{"x-team": "", "x-key": "k"}},
		{"http/protobuf", map[string]string{all: "user-agent=ours"}, "ours", nil},
	} {
		collector := tracingtest.Start(t, c.protocol)
		environment(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": collector.Endpoint,
			"OTEL_EXPORTER_OTLP_PROTOCOL": c.protocol, all: c.variables[all], traces: c.variables[traces]})
		tracer, _ := start(t)
		tracer.Request("request", Context{}).End()
		if err := tracer.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		spans := collector.Spans()
		if len(spans) != 1 {
			t.Fatalf("%s %v: spans %+v", c.protocol, c.variables, spans)
		}
		got := spans[0]
		if got.Service != "kvepp" || got.Version != "1.2.3" || !strings.HasPrefix(got.Header["user-agent"], c.agent) {
			t.Errorf("%s %v: service %q, version %q, header %v", c.protocol, c.variables, got.Service, got.Version,
				got.Header)
		}
		for name, value := range c.header {
			if got.Header[name] != value {
				t.Errorf("%s %v: header %s is %q", c.protocol, c.variables, name, got.Header[name])
			}
		}
	}
}

// TestSampling: if the caller's trace is not sampled, neither the request nor its children are exported.
func TestSampling(t *testing.T) {
	c := tracingtest.Start(t, "grpc")
	for _, variables := range []map[string]string{{}, {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}} {
		variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = c.Endpoint
		environment(t, variables)
		tracer, _ := start(t)
		caller := Context{Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
		if variables["OTEL_TRACES_SAMPLER"] != "" {
			caller = Context{}
		}
		s := tracer.Request("request", caller)
		if child := s.Child("child", time.Now()); child != nil {
			t.Error("work would be done without a collector")
		}
		s.Phase("phase", time.Now(), time.Now())
		if next := s.Context(); !next.Valid() || !strings.HasSuffix(next.Traceparent, "-00") {
			t.Errorf("upstream is told %+v", next)
		}
		s.End()
		if err := tracer.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if spans := c.Spans(); len(spans) != 0 {
		t.Errorf("%+v", spans)
	}
}

// TestWrongVariables: invalid environment variables are reported, and do not keep kvepp from starting.
func TestWrongVariables(t *testing.T) {
	c := tracingtest.Start(t, "grpc")
	for _, variables := range []map[string]string{{"OTEL_TRACES_SAMPLER": "now_and_then"},
		{"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
		{"OTEL_RESOURCE_ATTRIBUTES": "no pair"}} {
		variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = c.Endpoint
		environment(t, variables)
		tracer, log := start(t)
		if !strings.Contains(log.String(), "level=WARN") {
			t.Errorf("%v: the log says %q", variables, log)
		}
		if err := tracer.Close(t.Context()); err != nil {
			t.Error(err)
		}
		t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "")
	}
}

// TestCollectorRefuses: lost spans are counted and logged once. Later spans are not lost.
func TestCollectorRefuses(t *testing.T) {
	c := tracingtest.Start(t, "grpc")
	environment(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.Endpoint})
	tracer, log := start(t)
	for i := range 4 {
		c.Refuse.Store(i < 3)
		tracer.Request("request", Context{}).End()
		if err := tracer.provider.ForceFlush(t.Context()); (err == nil) != (i == 3) {
			t.Errorf("span %d: %v", i, err)
		}
	}
	if exported, failed := tracer.Spans(); exported != 1 || failed != 3 {
		t.Errorf("%d spans exported, %d failed", exported, failed)
	}
	if text := log.String(); strings.Count(text, "cannot be reached") != 1 ||
		strings.Count(text, "takes spans again") != 1 {
		t.Errorf("the log says\n%s", text)
	}
	if err := tracer.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestWithoutTracer: without a tracer nothing is recorded and nothing is allocated.
func TestWithoutTracer(t *testing.T) {
	environment(t, nil)
	tracer, log := start(t)
	if tracer != nil || log.String() != "" {
		t.Fatal(tracer, log)
	}
	at := time.Now()
	if n := testing.AllocsPerRun(100, func() {
		s := tracer.Request("request", Context{})
		child := s.Child("child", at)
		child.Phase("phase", at, at)
		child.End()
		s.Fail("x")
		if s.Context() != (Context{}) {
			t.Error("a context without a span")
		}
		s.End()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if err := tracer.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestContext(t *testing.T) {
	for parent, valid := range map[string]bool{
		"":  false,
		"x": false,
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01":  true,
		"00-00000000000000000000000000000000-b7ad6b7169203331-01":  false,
		"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01":  false,
		"01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-": true, // a later version may have more fields
	} {
		if got := (Context{Traceparent: parent}).Valid(); got != valid {
			t.Errorf("%q: %v", parent, got)
		}
	}
	var c Context
	c.Add(Traceparent, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	c.Add(Tracestate, "a=1")
	c.Add(Tracestate, "b=2")
	if !c.Valid() || c.Tracestate != "a=1,b=2" {
		t.Errorf("%+v", c)
	}
	c.Add(Traceparent, "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-01")
	if c.Valid() {
		t.Error("of two callers one was chosen")
	}
}
