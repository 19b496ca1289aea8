package main

import (
	"log/slog"
	"math"
	"os"
	"path"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

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
// memory limit. Code that depends on the limit calls debug.SetMemoryLimit(-1) afterwards. system is the root of the
// file system.
func limitMemory(system string, m *metrics.Metrics, log *slog.Logger) {
	source, container := noLimit, containerMemory(system)
	switch {
	case os.Getenv("GOMEMLIMIT") != "": // the runtime has read it; "off" is respected too
		source = limitFromEnvironment
	case container > 0:
		source = limitFromContainer
		debug.SetMemoryLimit(goShare(container))
	}
	limit := debug.SetMemoryLimit(-1)
	if limit == math.MaxInt64 {
		limit = 0
	}
	m.GaugeFunc(
		metrics.MemoryLimit,
		metrics.MemoryLimitHelp,
		prometheus.Labels{"source": source},
		func() float64 { return float64(limit) },
	)
	log.Info(
		"resources",
		"memory_limit_bytes",
		limit,
		"memory_limit_from",
		source,
		"container_bytes",
		container,
		"processors",
		runtime.GOMAXPROCS(0),
	)
}

// goShare returns Go's part of a container's memory: seven eighths. The rest is for memory that the runtime does not
// count: the program, libzmq's buffers, C stacks.
func goShare(container int64) int64 { return container - container/8 }

// containerMemory returns the smallest memory limit, in bytes, of the process's cgroup and its ancestors; 0 if none has
// a limit.
//
// Source: proc(5), cgroups(7); Linux's cgroup-v2 and cgroup-v1/memory documentation. With version 1, a container sees
// the host's path of its cgroup in /proc/self/cgroup, but its own cgroup is mounted at the root, so the search upwards
// ends there.
func containerMemory(system string) int64 {
	text, err := os.ReadFile(path.Join(system, "proc/self/cgroup"))
	if err != nil {
		return 0
	}
	least := int64(0)
	for line := range strings.Lines(string(text)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(part) < 3 {
			continue
		}
		mount, file := "sys/fs/cgroup", "memory.max"
		if part[1] != "" { // version 1: each controller has its own tree
			if mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"; !strings.Contains(
				","+part[1]+",",
				",memory,",
			) {
				continue
			}
		}
		for at := path.Clean("/" + part[2]); ; at = path.Dir(at) {
			if n := limitIn(path.Join(system, mount, at, file)); n > 0 && (least == 0 || n < least) {
				least = n
			}
			if at == "/" {
				break
			}
		}
	}
	return least
}

// unlimited is the least value that means no limit in version 1, which reports the greatest multiple of a page.
const unlimited = 1 << 60

// limitIn reads a limit. It returns 0 for no limit ("max" in version 2) and for a missing file.
func limitIn(file string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n >= unlimited || n < 0 {
		return 0
	}
	return n
}

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
