//go:build amd64 || arm64

// Package prefetch asks the processor to load memory into its caches before it is needed. Go has no statement for that.
//
// It owns one instruction for each processor, in assembly; on other processors it does nothing. A prefetch never waits,
// never fails and changes no value. Any goroutine may call it.
package prefetch

import "unsafe"

// Words prefetches the cache lines at count addresses. Addresses need not be valid.
//
//go:noescape
func Words(addresses *uintptr, count int)

// Lines prefetches count cache lines of 64 bytes from address on.
//
//go:noescape
func Lines(address unsafe.Pointer, count int)
