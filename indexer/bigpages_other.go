//go:build !linux

package indexer

import "unsafe"

// wantBigPages does nothing here.
func wantBigPages(unsafe.Pointer, int) {}
