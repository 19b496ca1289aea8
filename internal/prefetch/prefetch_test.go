package prefetch

import (
	"testing"
	"unsafe"
)

// TestInvalidAddresses checks that a prefetch of an invalid address does not fault.
func TestInvalidAddresses(t *testing.T) {
	addresses := []uintptr{0, 1, 1 << 20, ^uintptr(0)}
	for n := range len(addresses) + 1 {
		Words(&addresses[0], n)
	}
	Words(nil, 0)
	for _, n := range []int{-1, 0, 1, 1000} { // far beyond the end of addresses
		Lines(unsafe.Pointer(&addresses[0]), n)
	}
	Lines(nil, 1)
}
