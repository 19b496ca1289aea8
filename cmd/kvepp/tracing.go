package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
)

// tracer makes what tells of requests, as OpenTelemetry's environment variables say; nil if they say nothing, or are
// not to.
func (o *options) tracer(ctx context.Context, m *metrics.Metrics, log *slog.Logger) (*tracing.Tracer, error) {
	if !o.tracing {
		return nil, nil
	}
	t, err := tracing.New(ctx, version(), log)
	if err != nil || t == nil {
		return nil, err
	}
	for outcome, count := range map[string]func() int64{
		"exported": func() int64 { n, _ := t.Spans(); return n },
		"failed":   func() int64 { _, n := t.Spans(); return n },
	} {
		m.CounterSource(
			metrics.TraceSpans,
			metrics.TraceSpansHelp,
			prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count()) },
		)
	}
	return t, nil
}

// closeTracer sends the last spans, within the time that an exit may take.
func closeTracer(t *tracing.Tracer, log *slog.Logger) {
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := t.Close(last); err != nil {
		log.Warn("the last spans of requests are lost", "error", err)
	}
}
