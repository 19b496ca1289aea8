//go:build !amd64 || race

package indexer

import "sync/atomic"

// publishWord writes a word that lookups may be reading: they see it before what is put later.
func publishWord(word *uint64, value uint64) { atomic.StoreUint64(word, value) }

// publishWordNow is put of what may be put again before anybody looks.
func publishWordNow(word *uint64, value uint64) { atomic.StoreUint64(word, value) }
