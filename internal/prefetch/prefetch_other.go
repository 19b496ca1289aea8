//go:build !amd64 && !arm64

// Package prefetch does nothing here; see prefetch.go.
package prefetch

// Words does nothing.
func Words(*uintptr, int) {}
