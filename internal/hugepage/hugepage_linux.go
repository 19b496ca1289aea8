package hugepage

import (
	"sync"
	"syscall"
	"unsafe"
)

// advised records the huge pages that the kernel was asked for. Go's heap never unmaps addresses, so asking once is
// enough.
var advised struct {
	sync.Mutex
	pages map[uintptr]bool // by address / Size; guarded by Mutex
}

// advise asks the kernel for huge pages for size bytes at this address, rounded outwards to whole huge pages.
func advise(at unsafe.Pointer, size int) {
	advised.Lock()
	defer advised.Unlock()
	if advised.pages == nil {
		advised.pages = map[uintptr]bool{}
	}
	for n := uintptr(at) / Size; n <= (uintptr(at)+uintptr(size)-1)/Size; n++ {
		if !advised.pages[n] {
			advised.pages[n] = true
			_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, n*Size, Size, syscall.MADV_HUGEPAGE)
		}
	}
}

// populate makes size bytes at this address resident. Kernels before Linux 5.14 refuse, and then memory becomes
// resident at its first use.
func populate(at unsafe.Pointer, size int) {
	const madvPopulateWrite = 23 // MADV_POPULATE_WRITE, which package syscall does not have
	before := uintptr(at) % uintptr(syscall.Getpagesize())
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, uintptr(at)-before, uintptr(size)+before, madvPopulateWrite)
}
