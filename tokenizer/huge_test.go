package tokenizer

import (
	"testing"
	"unsafe"
)

// TestHugeSlice makes tables of all sizes: zeros, as many as asked for, and the large ones where a huge page begins.
func TestHugeSlice(t *testing.T) {
	for _, n := range []int{0, 1, 1000, hugePage / 8, hugePage/8 + 1, 3*hugePage/8 - 1} {
		table := hugeSlice[uint64](n)
		if len(table) != n || cap(table) != n {
			t.Fatalf("%d: got %d of %d", n, len(table), cap(table))
		}
		if n >= hugePage/8 && uintptr(unsafe.Pointer(&table[0]))%hugePage != 0 {
			t.Errorf("%d: begins at %p", n, &table[0])
		}
		for i := range table {
			if table[i] != 0 {
				t.Fatalf("%d: %d at %d", n, table[i], i)
			}
			table[i] = uint64(i)
		}
	}
}
