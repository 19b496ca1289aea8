package router

import (
	"io"
	"log/slog"
	"slices"
	"testing"

	"kvepp/internal/tracing"
	"kvepp/internal/tracing/tracingtest"
)

// TestSpansOfDecisions: each step of a decision has a span with its result, and nothing of the prompt.
func TestSpansOfDecisions(t *testing.T) {
	c := tracingtest.Start(t, "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	tracer, err := tracing.New(t.Context(), "", slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t, workers(2)...)
	h.warm("w1", 0, tokens(0, 12), blocksOfFour)
	req := completion("m", tokens(0, 22))
	req.Trace = tracer.Request("request", tracing.Context{})
	h.route(req).Free()
	req.Trace.End()
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := map[string]map[string]string{
		"gateway.request_orchestration": {
			"kvepp.endpoint":                "w1",
			"kvepp.endpoint.address":        "10.0.0.2:8000",
			"kvepp.worker":                  "101/0",
			"kvepp.reason":                  "kv",
			"kvepp.prompt_tokens":           "22",
			"kvepp.predicted_cached_tokens": "12",
			"kvepp.overlap_blocks":          "3",
			"gen_ai.request.model":          "m",
		},
		"kvepp.parse":    {},
		"kvepp.tokenize": {"kvepp.prompts": "1", "kvepp.reason": "kv"},
		"kvepp.hash":     {"kvepp.block_size": "4", "kvepp.blocks": "5"},
		"kvepp.lookup":   {"kvepp.blocks": "5", "kvepp.best_overlap_blocks": "3"},
		"kvepp.choose": {
			"kvepp.candidates":     "2",
			"kvepp.endpoint":       "w1",
			"kvepp.worker":         "101/0",
			"kvepp.overlap_blocks": "3",
		},
	}
	var order []string
	for _, s := range c.Spans() {
		if s.Name == "request" {
			continue
		}
		order = append(order, s.Name)
		for key, value := range want[s.Name] {
			if s.Attributes[key] != value {
				t.Errorf("%s: %s is %q, want %q", s.Name, key, s.Attributes[key], value)
			}
		}
	}
	if !slices.Equal(
		order,
		[]string{
			"kvepp.parse",
			"kvepp.tokenize",
			"kvepp.hash",
			"kvepp.lookup",
			"kvepp.choose",
			"gateway.request_orchestration",
		},
	) {
		t.Errorf("told were %q", order)
	}
}

// BenchmarkSpans measures a decision with its request's span, exported or not.
func BenchmarkSpans(b *testing.B) {
	c := tracingtest.Start(b, "grpc")
	b.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint)
	tracer, err := tracing.New(b.Context(), "", slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		b.Fatal(err)
	}
	defer tracer.Close(b.Context())
	for name, t := range map[string]*tracing.Tracer{"off": nil, "on": tracer} {
		b.Run(name, func(b *testing.B) {
			h := newHouse(b, workers(8)...)
			h.cfg.Explain = false
			req := completion("m", tokens(0, 64))
			b.ReportAllocs()
			for b.Loop() {
				req.Trace = t.Request("request", tracing.Context{})
				h.route(req).Free()
				req.Trace.End()
			}
		})
	}
}

// TestTraceOfRecord: a kept decision has the id of its exported trace.
func TestTraceOfRecord(t *testing.T) {
	c := tracingtest.Start(t, "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	h, _ := keeping(t, 9, workers(1)...)
	for sampler, exported := range map[string]bool{"always_on": true, "always_off": false} {
		t.Setenv("OTEL_TRACES_SAMPLER", sampler)
		tracer, err := tracing.New(t.Context(), "", slog.New(slog.NewTextHandler(io.Discard, nil)))
		if err != nil {
			t.Fatal(err)
		}
		req := completion("m", tokens(0, 8))
		req.Trace = tracer.Request("request", tracing.Context{})
		h.route(req).Free()
		want := ""
		if exported {
			want = req.Trace.Context().Traceparent[3:35] // version, trace id, parent id, flags
		}
		if got := h.Records(1, Query{})[0].TraceID; got != want {
			t.Errorf("%s: trace id %q, want %q", sampler, got, want)
		}
		if err := tracer.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	h.route(completion("m", tokens(0, 8))).Free()
	if got := h.Records(1, Query{})[0].TraceID; got != "" {
		t.Errorf("without a tracer: %q", got)
	}
}
