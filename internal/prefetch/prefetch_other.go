//go:build !amd64 && !arm64

package prefetch // which does nothing here

import "unsafe"

// Words does nothing.
func Words(*uintptr, int) {}

// Lines does nothing.
func Lines(unsafe.Pointer, int) {}
