package prefetch

import (
	"testing"
	"unsafe"
)

// Whatever the addresses are, nothing happens to whoever asks.
func TestPrefetch(t *testing.T) {
	addresses := []uintptr{0, 1, 1 << 20, ^uintptr(0)}
	for n := range len(addresses) + 1 {
		Words(&addresses[0], n)
	}
	Words(nil, 0)
	for _, n := range []int{-1, 0, 1, 1000} { // far beyond what is there
		Lines(unsafe.Pointer(&addresses[0]), n)
	}
	Lines(nil, 1)
}
