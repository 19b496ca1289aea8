package prefetch

import "testing"

// Whatever the addresses are, nothing happens to whoever asks.
func TestWords(t *testing.T) {
	addresses := []uintptr{0, 1, 1 << 20, ^uintptr(0)}
	for n := range len(addresses) + 1 {
		Words(&addresses[0], n)
	}
	Words(nil, 0)
}
