package enginemetrics

import (
	"log/slog"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// What a decision pays, of 1,000 workers, while a busy threshold is one of KV blocks.
func BenchmarkUsage(b *testing.B) {
	g := New(
		Config{Interval: time.Hour, Booked: func(kvblock.Worker) int { return 0 }},
		pool.New(slog.New(slog.DiscardHandler)),
		slog.New(slog.DiscardHandler),
	)
	for i := range 1000 {
		g.tell(kvblock.Worker(i), told{1, 1, 0.5}, time.Now())
	}
	var dst []float64
	b.ReportAllocs()
	for b.Loop() {
		dst = g.Usage(dst[:0])
	}
	if len(dst) != 1000 || dst[999] != 0.5 {
		b.Fatal("not told")
	}
}
