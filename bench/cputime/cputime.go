// Package cputime is the clock of the measurements here: CPU time in ns, which other programs on the machine disturb
// little. It keeps nothing, and any goroutine may ask.
package cputime

import "syscall"

// Process is what this process has taken so far: all threads, the kernel's part, the garbage collector's and C
// libraries'.
func Process() float64 { return of(syscall.RUSAGE_SELF) }

// Thread is what the calling thread has taken; for goroutines that are locked to theirs.
func Thread() float64 {
	const rusageThread = 1 // Linux's, which package syscall does not name
	return of(rusageThread)
}

func of(who int) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		panic(err) // only if who were none of Linux's
	}
	return float64(u.Utime.Nano() + u.Stime.Nano())
}

// Cost is what one Process adds to what it measures.
var Cost = func() float64 {
	const n = 10_000
	start := Process()
	for range n {
		Process()
	}
	return (Process() - start) / (n + 1)
}()
