//go:build !amd64 && !arm64

// Package prefetch does nothing here; see prefetch.go.
package prefetch

import "unsafe"

// Words does nothing.
func Words(*uintptr, int) {}

// Lines does nothing.
func Lines(unsafe.Pointer, int) {}
