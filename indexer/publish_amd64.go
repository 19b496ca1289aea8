//go:build !race

package indexer

// publishWord writes a word that lookups may read at the same time. They see it before any word that is published
// later. Plain writes are ordered on amd64, so an atomic write is not needed: it would wait for all outstanding loads.
// The compiler neither tears nor reorders writes of a word.
func publishWord(word *uint64, value uint64) { *word = value }

// publishWordNow is publishWord for a word that may be written again before a lookup reads it. It is not inlined,
// because the compiler may omit a write that another one follows.
//
//go:noinline
func publishWordNow(word *uint64, value uint64) { *word = value }
