//go:build !amd64 && !arm64

package prefetch

import "unsafe"

// Words does nothing on this processor.
func Words(*uintptr, int) {}

// Lines does nothing on this processor.
func Lines(unsafe.Pointer, int) {}
