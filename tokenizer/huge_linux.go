package tokenizer

import "syscall"

// adviseHuge asks for huge pages. Where the kernel does not give any, nothing is lost but time.
func adviseHuge(memory []byte) { _ = syscall.Madvise(memory, syscall.MADV_HUGEPAGE) }
