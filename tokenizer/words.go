package tokenizer

import "kvepp/kvblock"

// Pieces repeat, and the tables of a large vocabulary do not fit into a processor's caches. So each scratch remembers
// what pieces became that are no token by themselves, in direct-mapped tables without pointers: a lookup takes no lock,
// allocates nothing, and stays near the core. Their sizes bound the memory: about a MiB for each encoding that runs at
// the same time.
const (
	pieceSlots = 1 << 13
	wordSlots  = 1 << 11
	// maxWord is the longest piece that is remembered, in bytes, and maxWordIDs the most ids.
	maxWord    = 60
	maxWordIDs = 15
)

// pieceEntry is a piece of up to maxShort bytes.
type pieceEntry struct {
	low, high uint64
	ids       [11]kvblock.Token
	size      uint16 // in bytes; 0: a free slot
	count     uint16 // of ids
}

// wordEntry is a longer piece.
type wordEntry struct {
	ids   [maxWordIDs]kvblock.Token
	text  [maxWord]byte
	size  uint8 // in bytes; 0: a free slot
	count uint8
}

func pieceSlot(low, high uint64, size uint32) uint32 {
	return uint32(mix2(low, high+uint64(size)) % pieceSlots)
}

// knows reports whether the entry is of a piece.
func (e *pieceEntry) knows(p *piece) bool {
	return e.low == p.low && e.high == p.high && uint32(e.size) == p.size
}

// learn makes the entry that of a piece, if it has room for its ids.
func (e *pieceEntry) learn(p *piece, ids []kvblock.Token) {
	if len(ids) <= len(e.ids) {
		e.low, e.high, e.size = p.low, p.high, uint16(p.size)
		e.count = uint16(copy(e.ids[:], ids))
	}
}

// appendShort appends the ids of a piece of at most maxShort bytes that is no token by itself.
func (b *bpe) appendShort(out []kvblock.Token, s string, p *piece, sc *scratch) []kvblock.Token {
	e := &sc.pieces[p.slot]
	if e.knows(p) {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.encode(out, s, int(p.start), int(p.start+p.size), sc)
	e.learn(p, out[before:])
	return out
}

// appendLong appends the ids of a piece that is longer than maxShort bytes.
func (b *bpe) appendLong(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	n := j - i
	if id, ok := b.vocabulary.long[s[i:j]]; ok {
		return append(out, id)
	}
	if n > maxWord {
		return b.encode(out, s, i, j, sc)
	}
	e := &sc.words[hashText(s[i:j])%wordSlots]
	if int(e.size) == n && string(e.text[:n]) == s[i:j] {
		return append(out, e.ids[:e.count]...)
	}
	before := len(out)
	out = b.encode(out, s, i, j, sc)
	if len(out)-before <= maxWordIDs {
		e.size = uint8(copy(e.text[:], s[i:j]))
		e.count = uint8(copy(e.ids[:], out[before:]))
	}
	return out
}
