//go:build !amd64

package bpe

// readWindow classifies the bytes of a window.
func readWindow(text *[windowSize]byte, w *window) { readWindowLanes(text, w) }
