package main

import (
	"io"
	"log/slog"
	"slices"
	"testing"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/internal/service"
	"kvepp/pool"
)

// What --index-max-bytes promises to count is there to be read.
func TestIndexerGauges(t *testing.T) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{MaxBytes: minIndexBytes, KeepLocalHashes: true})
	if err != nil {
		t.Fatal(err)
	}
	m, workers := metrics.New(), pool.New(log)
	events, err := feed.New(feed.Config{}, workers, index, m, log)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	indexerGauges(m, service.NewRegistry(workers, index, events, log), events, index)
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		if f.GetName() == metrics.IndexMaxBytes && f.GetMetric()[0].GetGauge().GetValue() != minIndexBytes {
			t.Errorf("%v", f)
		}
	}
	for _, want := range []string{metrics.IndexerModels, metrics.IndexerWorkers, metrics.IndexerListeners, metrics.IndexBlocks, metrics.IndexBytes,
		metrics.IndexMaxBytes, metrics.IndexAtBound, metrics.IndexOutcomes} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is missing", want)
		}
	}
}
