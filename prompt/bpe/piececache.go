package bpe

import (
	"unsafe"

	"kvepp/kvblock"
)

// pieceCache remembers the ids of pieces. Pieces repeat, most of a text is a few thousand different ones, and the
// tables of a large vocabulary do not fit into a processor's caches. The cache consists of tables without pointers, and
// each scratch has its own: a lookup takes no lock, allocates nothing and stays near the core. It takes one huge page.
type pieceCache struct {
	words wordSets
	long  [longPieceSlots]longPiece // by hash: pieces that are neither tokens nor words
}

const (
	longPieceSlots = 1 << 13
	// maxLongPiece is the size of the longest piece in the cache, in bytes; maxLongPieceIDs is its largest number of
	// ids.
	maxLongPiece    = smallMergeSymbols
	maxLongPieceIDs = 15
)

// longPiece is a piece of at most maxLongPiece bytes that is not a token.
type longPiece struct {
	size  uint8 // in bytes; 0: a free slot
	count uint8 // of ids
	text  [maxLongPiece]byte
	ids   [maxLongPieceIDs]kvblock.Token
}

// storeToken stores the id of a piece that is a token.
func (c *pieceCache) storeToken(p *piece, id kvblock.Token) {
	if p.size <= maxWord {
		c.words.store(p, [wordIDs + 1]kvblock.Token{id, wordIDs: 1})
	}
}

// place completes the hash of a piece of s that is not a token, and returns the address of its slot in long.
func (c *pieceCache) place(p *piece, s string) uintptr {
	if p.size > maxLongPiece {
		return 0
	}
	if p.size > maxShort {
		p.hash = hashText(p.text(s))
	}
	return uintptr(unsafe.Pointer(&c.long[p.hash%longPieceSlots]))
}

// find returns the ids of a piece of s that is not a word, of at most maxLongPiece bytes, and whether the cache has
// them. They are valid until store. place must have been called.
func (c *pieceCache) find(p *piece, s string) (ids []kvblock.Token, found bool) {
	e := &c.long[p.hash%longPieceSlots]
	found = uint32(e.size) == p.size && string(e.text[:p.size]) == p.text(s)
	return e.ids[:e.count], found
}

// store stores the ids of a piece of s that is not a token, of at most maxLongPiece bytes, if they are not too many.
// place must have been called.
func (c *pieceCache) store(p *piece, s string, ids []kvblock.Token) {
	if p.size <= maxWord && len(ids) <= wordIDs {
		var word [wordIDs + 1]kvblock.Token
		word[wordIDs] = kvblock.Token(copy(word[:wordIDs], ids))
		c.words.store(p, word)
	} else if e := &c.long[p.hash%longPieceSlots]; len(ids) <= len(e.ids) {
		e.size = uint8(copy(e.text[:], p.text(s)))
		e.count = uint8(copy(e.ids[:], ids))
	}
}
