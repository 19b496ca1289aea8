package hugepage

import (
	"testing"
	"unsafe"
)

// TestSlice checks the length, zero contents and alignment of slices below, at and above one huge page.
func TestSlice(t *testing.T) {
	for _, n := range []int{0, 1, 1000, Size / 8, Size/8 + 1, 3*Size/8 - 1} {
		s := Slice[uint64](n)
		if len(s) != n || cap(s) != n {
			t.Fatalf("Slice(%d): length %d, capacity %d", n, len(s), cap(s))
		}
		if n >= Size/8 && uintptr(unsafe.Pointer(&s[0]))%Size != 0 {
			t.Errorf("Slice(%d) begins at %p, which is not a multiple of %d", n, &s[0], Size)
		}
		for i := range s {
			if s[i] != 0 {
				t.Fatalf("Slice(%d): element %d is %d, want 0", n, i, s[i])
			}
			s[i] = uint64(i)
		}
	}
}
