//go:build !linux

package tokenizer

// adviseHuge does nothing where the system's advice is not known.
func adviseHuge([]byte) {}
