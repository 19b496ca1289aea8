// Package apitest helps the tests of the HTTP APIs.
package apitest

import (
	"runtime"
	"testing"
)

// allocated returns how many bytes f allocates.
func allocated(f func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return float64(after.TotalAlloc - before.TotalAlloc)
}

// Linear calls a function for each number, in 8 parts of equal size. It fails the test if the last part allocates much
// more memory than the first.
func Linear(t *testing.T, part int, what string, do func(i int)) {
	t.Helper()
	var first, last float64
	for p := range 8 {
		bytes := allocated(func() {
			for i := range part {
				do(p*part + i)
			}
		})
		if last = bytes; p == 0 {
			first = bytes
		}
	}
	t.Logf("%s: %.0f bytes each at first, %.0f at last", what, first/float64(part), last/float64(part))
	if last > 3*first {
		t.Errorf("%s: %d take %.0f bytes at first, and %.0f with %d before them", what, part, first, last, 7*part)
	}
}
