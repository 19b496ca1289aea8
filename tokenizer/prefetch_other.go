//go:build !amd64 && !arm64

package tokenizer

// prefetch does nothing; see prefetch.go.
func prefetch(*uintptr, int) {}
