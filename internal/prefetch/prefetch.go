//go:build amd64 || arm64

// Package prefetch asks the processor for memory before it is needed, for which Go has no statement.
//
// It owns one instruction a processor, and never waits, fails or changes anything: where it has none for a processor it
// does nothing. Any goroutine may call it.
package prefetch

import "unsafe"

// Words asks the processor to bring the memory at count addresses near, and does not wait. Addresses need not be valid.
//
//go:noescape
func Words(addresses *uintptr, count int)

// Lines does the same with count lines of 64 bytes from address on.
//
//go:noescape
func Lines(address unsafe.Pointer, count int)
