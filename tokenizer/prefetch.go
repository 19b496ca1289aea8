//go:build amd64 || arm64

package tokenizer

// prefetch asks the processor to bring the memory at count addresses near, and does not wait. Go has no statement for that.
//
//go:noescape
func prefetch(addresses *uintptr, count int)
