package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// cpu is CPU time since the machine's start.
type cpu struct {
	at        time.Time
	busy, all float64 // ticks of all cores
	own       float64 // ticks of this process and those that it started
}

// cpuTime reads the CPU time so far.
func cpuTime() (t cpu) {
	t.at = time.Now()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line)[1:] {
		n, _ := strconv.ParseFloat(field, 64)
		if i >= 8 { // user time includes guest time
			break
		}
		t.all += n
		if i != 3 && i != 4 { // idle and iowait
			t.busy += n
		}
	}
	t.own = ownTicks()
	return t
}

// ownTicks returns the CPU time of this process and its descendants that run now.
func ownTicks() (ticks float64) {
	parents, used := map[int]int{}, map[int]float64{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		_, rest, _ := strings.Cut(string(text), ") ") // a name may contain spaces
		fields := strings.Fields(rest)
		if len(fields) < 13 {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		parents[pid], _ = strconv.Atoi(fields[1])
		user, _ := strconv.ParseFloat(fields[11], 64)
		system, _ := strconv.ParseFloat(fields[12], 64)
		used[pid] = user + system
	}
	for pid, n := range used {
		for p := pid; p > 0; p = parents[p] {
			if p == os.Getpid() {
				ticks += n
				break
			}
		}
	}
	return ticks
}

// ticksOf returns the CPU time of one process; 0: it does not run.
func ticksOf(pid int) float64 {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat") // without one there is no time
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return user + system
}

// ticksPerSecond is the unit of /proc, which Linux fixes for programs.
const ticksPerSecond = 100

// busyShares returns the shares of the machine's cores that all programs, and those of this bench, used between two
// times, 0 to 1.
func busyShares(from, to cpu) (all, own float64) {
	seconds := max(to.at.Sub(from.at).Seconds(), 1e-3) * float64(runtime.NumCPU())
	return (to.busy - from.busy) / max(to.all-from.all, 1), (to.own - from.own) / ticksPerSecond / seconds
}
