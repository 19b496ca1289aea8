package tokenizer

import "unsafe"

// The tables of a large vocabulary take megabytes and are read at random, so that with the usual pages of 4 KiB the
// processor looks up where a page is as often as what is in it. On pages of 2 MiB it does not have to.
const hugePage = 2 << 20

// hugeSlice returns n zeros of a type without pointers, which lie on huge pages where the system has them: a table of
// at least one begins where one does. What lies before it is never touched, and so takes no memory.
func hugeSlice[T any](n int) []T {
	var zero T
	size := n * int(unsafe.Sizeof(zero))
	if size < hugePage {
		return make([]T, n)
	}
	room := make([]byte, size+hugePage)
	room = room[-uintptr(unsafe.Pointer(unsafe.SliceData(room)))%hugePage:]
	adviseHuge(room[:size&^(hugePage-1)])
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(room))), n)
}
