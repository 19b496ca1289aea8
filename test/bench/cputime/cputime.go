// Package cputime measures CPU time in ns, which other programs on the machine disturb little. It keeps no state and is
// safe for concurrent use.
package cputime

import "syscall"

// Process returns the CPU time of this process so far: all threads, the kernel's part, garbage collection and C
// libraries.
func Process() float64 { return of(syscall.RUSAGE_SELF) }

// Thread returns the CPU time of the calling thread, for goroutines that are locked to their thread.
func Thread() float64 {
	const rusageThread = 1 // RUSAGE_THREAD of Linux, which package syscall lacks
	return of(rusageThread)
}

func of(who int) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		panic(err) // only for an invalid argument
	}
	return float64(u.Utime.Nano() + u.Stime.Nano())
}

// Cost returns the CPU time that one call of Process adds to a measurement.
var Cost = func() float64 {
	const n = 10_000
	start := Process()
	for range n {
		Process()
	}
	return (Process() - start) / (n + 1)
}()
