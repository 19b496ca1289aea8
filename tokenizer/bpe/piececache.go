package bpe

import "kvepp/kvblock"

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

func shortPieceSlot(low, high uint64, size uint32) uint32 {
	return uint32(mix2(low, high+uint64(size)) % shortPieceSlots)
}

// holds reports whether the entry is that of the piece.
func (e *shortPiece) holds(p *piece) bool {
	return e.low == p.low && e.high == p.high && uint32(e.size) == p.size
}

// store replaces the entry by a piece and its ids, if the ids fit.
func (e *shortPiece) store(p *piece, ids []kvblock.Token) {
	if len(ids) <= len(e.ids) {
		e.low, e.high, e.size = p.low, p.high, uint16(p.size)
		e.count = uint16(copy(e.ids[:], ids))
	}
}

// appendShort appends the ids of a piece of at most maxShort bytes that is not a token by itself.
func (b *bpeModel) appendShort(out []kvblock.Token, s string, p *piece, sc *scratch) []kvblock.Token {
	e := &sc.cache.short[p.slot]
	if e.holds(p) {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.encode(out, s, int(p.start), int(p.start+p.size), sc)
	e.store(p, out[before:])
	return out
}

// appendLong appends the ids of a piece of more than maxShort bytes.
func (b *bpeModel) appendLong(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	n := j - i
	if id, ok := b.vocabulary.long[s[i:j]]; ok {
		return append(out, id)
	}
	if n > maxLongPiece {
		return b.encode(out, s, i, j, sc)
	}
	e := &sc.cache.long[hashText(s[i:j])%longPieceSlots]
	if int(e.size) == n && string(e.text[:n]) == s[i:j] {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.encode(out, s, i, j, sc)
	if len(out)-before <= maxLongPieceIDs {
		e.size = uint8(copy(e.text[:], s[i:j]))
		e.count = uint8(copy(e.ids[:], out[before:]))
	}
	return out
}
