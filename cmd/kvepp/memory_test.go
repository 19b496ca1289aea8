package main

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
)

func TestMemoryLimit(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(before) })
	small := memlimit.Limit(8 << 30)
	none := func() (uint64, error) { return 0, memlimit.ErrNoLimit }
	for _, c := range []struct {
		container   memlimit.Provider
		variable    string
		runtime     int64 // the limit that the runtime read from the variable
		want, index int64
		source      string
	}{
		{small, "", math.MaxInt64, 7 << 30, 7 << 29, limitFromContainer},
		{small, "6GiB", 6 << 30, 6 << 30, 3 << 30, limitFromEnvironment},
		{small, "off", math.MaxInt64, math.MaxInt64, 2 << 30, limitFromEnvironment},
		{none, "", math.MaxInt64, math.MaxInt64, 2 << 30, noLimit},
	} {
		t.Setenv("GOMEMLIMIT", c.variable)
		debug.SetMemoryLimit(c.runtime)
		m, log := metrics.New(), new(strings.Builder)
		limitMemory(c.container, m, slog.New(slog.NewTextHandler(log, nil)))
		got := debug.SetMemoryLimit(-1)
		if index := new(indexer.Config).Bytes(got); got != c.want || index != c.index {
			t.Errorf("GOMEMLIMIT=%q: limit %d, index %d, want %d and %d", c.variable, got, index, c.want, c.index)
		}
		if !strings.Contains(log.String(), "memory_limit_from="+c.source) {
			t.Errorf("GOMEMLIMIT=%q: %s", c.variable, log)
		}
		exported := metricstest.Read(t, m.Registry).Of(metrics.MemoryLimit.Name, "source="+c.source)
		if limit := exported.Value(); len(exported) != 1 ||
			limit != float64(c.want) && !(limit == 0 && c.want == math.MaxInt64) {
			t.Errorf("GOMEMLIMIT=%q: the metric is missing or wrong", c.variable)
		}
	}
}

// TestBufferedBytes: the memory for requests follows from Go's limit. Bodies that do not fit are not read.
func TestBufferedBytes(t *testing.T) {
	for _, c := range []struct {
		goLimit                  int64
		buffered, parsed         int // flags
		wantBuffered, wantParsed int
		refused                  string
	}{
		{goLimit: goShare(2 << 30), wantBuffered: 448 << 20, wantParsed: 32 << 20},
		{goLimit: math.MaxInt64, wantBuffered: 512 << 20, wantParsed: 32 << 20},
		{goLimit: 448 << 20, wantBuffered: 112 << 20, wantParsed: 8 << 20},
		{goLimit: 1 << 20, wantBuffered: 512 << 10, wantParsed: 37449},
		{goLimit: 448 << 20, buffered: 896 << 20, wantBuffered: 896 << 20, wantParsed: 32 << 20},
		{goLimit: 448 << 20, buffered: 896 << 20, parsed: 64 << 20, wantBuffered: 896 << 20, wantParsed: 64 << 20},
		{goLimit: math.MaxInt64, parsed: 1000, wantBuffered: 512 << 20, wantParsed: 1000},
		{goLimit: math.MaxInt64, parsed: 64 << 20,
			refused: "--max-buffered-bytes is 536870912, which is enough to read bodies of 38347922 bytes; lower the " +
				"first, or set --max-buffered-bytes 939524096"},
	} {
		p := &extproc.Config{MaxBufferedBytes: c.buffered, MaxParseBytes: c.parsed}
		buffered, parsed, err := p.Buffers(c.goLimit)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%+v: %v", c, err)
			}
		} else if err != nil || buffered != c.wantBuffered || parsed != c.wantParsed {
			t.Errorf("%+v: %d and %d, %v", c, buffered, parsed, err)
		}
	}
}

// TestRestrainCollector checks that the reserved memory takes no pages, even where the heap has used that memory
// before.
func TestRestrainCollector(t *testing.T) {
	used := make([]byte, 4*collectorFloor)
	for i := range used {
		used[i] = 1
	}
	runtime.KeepAlive(used)
	debug.FreeOSMemory()
	before := resident(t)
	reserved := restrainCollector()
	if reserved.Cap() < collectorFloor {
		t.Errorf("%d bytes are reserved, not %d", reserved.Cap(), collectorFloor)
	}
	if n := resident(t) - before; n > collectorFloor/2 {
		t.Errorf("the reserved memory takes %d bytes of pages", n)
	}
	runtime.KeepAlive(reserved)
}

// resident returns the resident memory of the process, in bytes.
func resident(t *testing.T) int {
	t.Helper()
	var total, pages int
	text, err := os.ReadFile("/proc/self/statm")
	if err == nil {
		_, err = fmt.Sscan(string(text), &total, &pages)
	}
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
