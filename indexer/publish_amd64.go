//go:build !race

package indexer

// publishWord writes a word that lookups may be reading: they see it before what is put later. This processor promises
// that of plain writes, and nothing more is needed; an atomic one would wait, every time, until all that was asked of
// memory before has come. The compiler neither tears writes of a word nor moves them past each other.
func publishWord(word *uint64, value uint64) { *word = value }

// publishWordNow is put of what may be put again before anybody looks: the compiler may leave out a write that another
// follows, but not one that it does not see.
//
//go:noinline
func publishWordNow(word *uint64, value uint64) { *word = value }
