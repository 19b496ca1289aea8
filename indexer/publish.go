//go:build !amd64 || race

package indexer

import "sync/atomic"

// publishWord writes a word that lookups may read at the same time. They see it before any word that is published
// later.
func publishWord(word *uint64, value uint64) { atomic.StoreUint64(word, value) }

// publishWordNow is publishWord for a word that may be written again before a lookup reads it.
func publishWordNow(word *uint64, value uint64) { atomic.StoreUint64(word, value) }
