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

// Where the memory limit of Go's runtime comes from, as the log and a metric say.
const (
	limitOfEnvironment = "environment" // GOMEMLIMIT
	limitOfContainer   = "container"   // a share of what its cgroup may have
	limitOfNobody      = "none"
)

// limitMemory has Go's runtime stay within the container's memory, unless GOMEMLIMIT is set: without a limit the
// collector lets the heap double, and the kernel kills what grows beyond. Go counts the processors of a container by
// itself, but no memory. What depends on the limit asks debug.SetMemoryLimit afterwards. system is the root of the file
// system.
func limitMemory(system string, m *metrics.Metrics, log *slog.Logger) {
	source, container := limitOfNobody, containerMemory(system)
	switch {
	case os.Getenv("GOMEMLIMIT") != "": // which the runtime has read; "off" is a wish too
		source = limitOfEnvironment
	case container > 0:
		source = limitOfContainer
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

// goShare is how much of a container's memory Go may have: seven eighths. The rest is for what its runtime does not
// count: the program, libzmq's buffers, stacks of C.
func goShare(container int64) int64 { return container - container/8 }

// containerMemory returns how many bytes the process may have by its cgroup and those above it, the least of all; 0 if
// none says.
//
// Source: proc(5), cgroups(7); Linux's cgroup-v2 and cgroup-v1/memory documentation. A container of version 1 sees the
// path of its cgroup on the host in /proc/self/cgroup, and its own cgroup mounted at the root: there the way up ends.
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
		if part[1] != "" { // version 1, where each controller has a tree
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

// unlimited is where version 1 begins to mean no limit: it says the greatest multiple of a page.
const unlimited = 1 << 60

// limitIn reads a limit; 0 for none, which version 2 calls max, and for a file that is not there.
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

// collectorFloor is how many bytes are at least allocated between two garbage collections.
const collectorFloor = 64 << 20

// restrainCollector returns what is to be kept alive so that a small heap is not collected dozens of times a second:
// the collector counts this memory as in use, and the system gives none for what is never touched. nil where GOMEMLIMIT
// leaves no room for it.
func restrainCollector() []byte {
	if debug.SetMemoryLimit(-1) < 16*collectorFloor {
		return nil
	}
	return make([]byte, collectorFloor)
}
