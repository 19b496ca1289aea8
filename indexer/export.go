package indexer

import "kvepp/internal/metrics"

// Export exports what the index holds and did.
func (x *Index) Export(m *metrics.Metrics) {
	metrics.Gauge(m, metrics.IndexBlocks, func() int { return x.Stats().Entries })
	metrics.Gauge(m, metrics.IndexBytes, func() int { return x.Stats().Used })
	metrics.Gauge(m, metrics.IndexPredicted, func() int { return x.Stats().Predicted })
	metrics.Gauge(m, metrics.IndexMaxBytes, func() int { return x.Stats().MaxBytes })
	metrics.Flag(m, metrics.IndexAtBound, x.AtBound)
	metrics.Counters(m, metrics.IndexOutcomes, "outcome", func() map[string]uint64 {
		s := x.Stats()
		return map[string]uint64{"duplicate": s.Duplicates, "evicted": s.Evicted, "joined": s.Joined,
			"expired": s.Expired, "pruned": s.Pruned, "parent_not_found": s.ParentNotFound}
	})
}
