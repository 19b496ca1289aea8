package bpe

import (
	"unsafe"

	"kvepp/kvblock"
)

// pieceCache remembers the ids of pieces that are not a token by themselves. Pieces repeat, and the tables of a large
// vocabulary do not fit into a processor's caches. The cache consists of direct-mapped tables without pointers, and
// each scratch has its own: a lookup takes no lock, allocates nothing and stays near the core. It takes about 1 MiB.
type pieceCache struct {
	short [shortPieceSlots]shortPiece
	long  [longPieceSlots]longPiece
}

const (
	shortPieceSlots = 1 << 13
	longPieceSlots  = 1 << 11
	// maxLongPiece is the size of the longest piece in the cache, in bytes; maxLongPieceIDs is its largest number of
	// ids.
	maxLongPiece    = 60
	maxLongPieceIDs = 15
)

// shortPiece is a piece of at most maxShort bytes.
type shortPiece struct {
	low, high uint64
	ids       [11]kvblock.Token
	size      uint16 // in bytes; 0: a free slot
	count     uint16 // of ids
}

// longPiece is a piece of more than maxShort and at most maxLongPiece bytes.
type longPiece struct {
	ids   [maxLongPieceIDs]kvblock.Token
	text  [maxLongPiece]byte
	size  uint8 // in bytes; 0: a free slot
	count uint8 // of ids
}

// place finds the slot of a piece of s in the cache, if the cache keeps pieces of its size, and returns its address.
func (c *pieceCache) place(p *piece, s string) uintptr {
	switch {
	case p.size <= maxShort:
		p.slot = uint32(mix2(p.low, p.high+uint64(p.size)) % shortPieceSlots)
		return uintptr(unsafe.Pointer(&c.short[p.slot]))
	case p.size <= maxLongPiece:
		p.slot = uint32(hashText(p.text(s)) % longPieceSlots)
		return uintptr(unsafe.Pointer(&c.long[p.slot]))
	}
	return 0
}

// find returns the ids of a piece of s, and whether the cache has them. They are valid until store. place must have
// been called.
func (c *pieceCache) find(p *piece, s string) (ids []kvblock.Token, found bool) {
	if p.size <= maxShort {
		e := &c.short[p.slot]
		found = e.low == p.low && e.high == p.high && uint32(e.size) == p.size
		return e.ids[:e.count], found
	}
	if p.size > maxLongPiece {
		return nil, false
	}
	e := &c.long[p.slot]
	found = uint32(e.size) == p.size && string(e.text[:p.size]) == p.text(s)
	return e.ids[:e.count], found
}

// store replaces the entry in the slot of a piece of s, if the piece and its ids fit. place must have been called.
func (c *pieceCache) store(p *piece, s string, ids []kvblock.Token) {
	if p.size <= maxShort {
		if e := &c.short[p.slot]; len(ids) <= len(e.ids) {
			e.low, e.high, e.size = p.low, p.high, uint16(p.size)
			e.count = uint16(copy(e.ids[:], ids))
		}
	} else if p.size <= maxLongPiece {
		if e := &c.long[p.slot]; len(ids) <= len(e.ids) {
			e.size = uint8(copy(e.text[:], p.text(s)))
			e.count = uint8(copy(e.ids[:], ids))
		}
	}
}
