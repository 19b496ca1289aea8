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
// wish: nothing that memory holds changes, and the kernel may have none, or give none to anybody. What the index gives
// back to the heap may count as resident until something else in the process uses it.
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

// back has the kernel give size bytes of Go's heap their memory, all of which are about to be used: in big pages if it
// has any, and at once, where it would be interrupted for every page. An old kernel does less.
func back(at unsafe.Pointer, size int) {
	if size < minBack {
		return
	}
	wantBigPages(at, size)
	const madvPopulateWrite = 23 // MADV_POPULATE_WRITE, from Linux 5.14 on
	before := uintptr(at) % uintptr(syscall.Getpagesize())
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, uintptr(at)-before, uintptr(size)+before, madvPopulateWrite)
}
