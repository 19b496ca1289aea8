package dynamo

import (
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"kvepp/internal/logtest"
)

// TestLargeRecords: records of a terabyte are skipped with a log line, and take no memory.
func TestLargeRecords(t *testing.T) {
	dir := t.TempDir()
	buckets := []string{"instances", "mdc", "event_channels", "event_sources"}
	for _, bucket := range buckets {
		file := filepath.Join(dir, "v1", bucket, "ns%2Ftopic%2Fkv-events%2Fa")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(file, 1<<40); err != nil {
			t.Fatal(err)
		}
	}
	var logged logtest.Log
	store := NewFileStore(dir, slog.New(slog.NewTextHandler(&logged, nil)))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	found := store.scan(time.Now())
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; len(found) > 0 || took > 128<<20 ||
		logged.Count("larger than") != len(buckets) {
		t.Errorf("found %v, %d bytes allocated, logged %s", found, took, &logged)
	}
}
