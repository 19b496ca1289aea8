//go:build !linux

package hugepage

import "unsafe"

func advise(unsafe.Pointer, int) {}

func populate(unsafe.Pointer, int) {}
