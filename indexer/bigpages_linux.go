package indexer

import (
	"sync"
	"syscall"
	"unsafe"
)

// asked is which big pages the kernel was asked for. Go's heap keeps its addresses for good, so once is enough.
var asked struct {
	sync.Mutex
	pages map[uintptr]bool // by address / bigPage
}

// wantBigPages asks the kernel for big pages where size bytes of Go's heap lie, and with them what lies around. It is a
// wish: nothing that memory holds changes, and the kernel may have none, or give none to anybody. What the index gives back to the
// heap may count as resident until something else in the process uses it.
func wantBigPages(at unsafe.Pointer, size int) {
	const madvHugePage = 14 // MADV_HUGEPAGE
	asked.Lock()
	defer asked.Unlock()
	if asked.pages == nil {
		asked.pages = map[uintptr]bool{}
	}
	for n := uintptr(at) / bigPage; n <= (uintptr(at)+uintptr(size)-1)/bigPage; n++ {
		if !asked.pages[n] {
			asked.pages[n] = true
			_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, n*bigPage, bigPage, madvHugePage)
		}
	}
}
