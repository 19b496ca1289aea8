package enginemetrics

import (
	"log/slog"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// BenchmarkUsage measures the cost for a decision among 1,000 workers with a busy threshold on KV blocks.
func BenchmarkUsage(b *testing.B) {
	g := New(
		Config{Interval: time.Hour, Booked: func(kvblock.Worker) int { return 0 }},
		pool.New(slog.New(slog.DiscardHandler)),
		slog.New(slog.DiscardHandler),
	)
	for i := range 1000 {
		g.storeValues(kvblock.Worker(i), values{1, 1, 0.5}, time.Now())
	}
	var dst []float64
	b.ReportAllocs()
	for b.Loop() {
		dst = g.Usage(dst[:0])
	}
	if len(dst) != 1000 || dst[999] != 0.5 {
		b.Fatal("Usage has not the stored values")
	}
}
