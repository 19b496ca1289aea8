//go:build !amd64 || race

package indexer

import "sync/atomic"

// put writes a word that lookups may be reading: they see it before what is put later.
func put(word *uint64, value uint64) { atomic.StoreUint64(word, value) }

// putNow is put of what may be put again before anybody looks.
func putNow(word *uint64, value uint64) { atomic.StoreUint64(word, value) }
