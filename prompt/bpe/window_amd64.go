package bpe

// readWindow classifies the bytes of a window. Every amd64 processor has the instructions (SSE2) that it uses.
//
//go:noescape
func readWindow(text *[windowSize]byte, w *window)
