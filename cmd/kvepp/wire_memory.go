package main

import (
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"kvepp/internal/metrics"
)

// Sources of the Go runtime's memory limit, as the log and a metric name them.
const (
	limitFromEnvironment = "environment" // GOMEMLIMIT
	limitFromContainer   = "container"   // a share of the cgroup's limit
	noLimit              = "none"
)

// limitMemory keeps the Go runtime within the container's memory, unless GOMEMLIMIT is set. Without a limit the
// collector lets the heap double, and the kernel kills the process. Go reads the container's CPU limit, but not its
// memory limit. Code that depends on the limit calls debug.SetMemoryLimit(-1) afterwards.
func limitMemory(container memlimit.Provider, m *metrics.Metrics, log *slog.Logger) {
	source := noLimit
	bytes, err := container()
	if err != nil { // no limit, or no cgroup
		bytes = 0
	}
	switch {
	case os.Getenv("GOMEMLIMIT") != "": // the runtime has read it; "off" is respected too
		source = limitFromEnvironment
	case bytes > 0:
		source = limitFromContainer
		debug.SetMemoryLimit(goShare(int64(bytes)))
	}
	limit := debug.SetMemoryLimit(-1)
	if limit == math.MaxInt64 {
		limit = 0
	}
	metrics.Gauge(m, metrics.MemoryLimit, func() int64 { return limit }, "source", source)
	log.Info(
		"resources",
		"memory_limit_bytes",
		limit,
		"memory_limit_from",
		source,
		"container_bytes",
		bytes,
		"processors",
		runtime.GOMAXPROCS(0),
	)
}

// goShare returns Go's part of a container's memory: seven eighths. The rest is for memory that the runtime does not
// count: the program, libzmq's buffers, C stacks.
func goShare(container int64) int64 { return container - container/8 }

// collectorFloor is the minimum number of bytes allocated between two garbage collections.
const collectorFloor = 64 << 20

// restrainCollector returns memory that the caller keeps alive, so that a small heap is not collected dozens of times a
// second. The collector counts this memory as in use; the system does not back it with pages because nothing touches
// it. A strings.Builder reserves it, since make clears memory that the heap has used before, and so touches it. It
// returns nil if GOMEMLIMIT leaves no room for it.
func restrainCollector() *strings.Builder {
	if debug.SetMemoryLimit(-1) < 16*collectorFloor {
		return nil
	}
	reserved := new(strings.Builder)
	reserved.Grow(collectorFloor)
	return reserved
}
