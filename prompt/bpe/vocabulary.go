package bpe

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"unsafe"

	"kvepp/kvblock"
)

// vocabulary maps a whole piece of text to its token. Most pieces have up to 16 bytes. These are compared as one or two
// machine words in open-addressing tables. Longer pieces are in a map.
type vocabulary struct {
	short  []shortEntry // up to 8 bytes
	middle []middleEntry
	long   map[string]kvblock.Token
	tables [2]table // of short and middle
}

// table says where the search for a piece begins, without a branch on the piece's size, which is hard to predict.
type table struct {
	address uintptr // of the first entry; short or middle keeps it alive
	mask    uint32  // of the hash
	entry   uint32  // size of an entry in bytes
}

type shortEntry struct {
	text uint64
	id   kvblock.Token
	size uint32 // in bytes; 0 marks a free slot
}

type middleEntry struct {
	low, high uint64
	id        kvblock.Token
	size      uint32
}

// vocabularyToken is a token, its bytes, and whether a piece with these bytes is exactly this token.
type vocabularyToken struct {
	text   string
	id     kvblock.Token
	direct bool
}

// mix and mix2 hash one and two words by multiplication. The constants are odd numbers without structure.
func mix(a uint64) uint64 { return mix2(a, 0x9E3779B97F4A7C15^0x8BB84B93962EACC9) }

func mix2(a, b uint64) uint64 {
	high, low := bits.Mul64(a^0x2D358DCCAA6C78A5, b^0x8BB84B93962EACC9)
	return high ^ low
}

// load64 returns the n bytes (0 to 8) of s from i as a little-endian number.
func load64(s string, i, n int) uint64 {
	if i+8 <= len(s) {
		return binary.LittleEndian.Uint64(unsafe.Slice(unsafe.StringData(s), len(s))[i:i+8]) & (1<<(8*uint(n)) - 1)
	}
	var b [8]byte
	copy(b[:], s[i:i+n])
	return binary.LittleEndian.Uint64(b[:])
}

// load128 returns the n bytes (0 to 16) of s from i as two little-endian numbers.
func load128(s string, i, n int) (low, high uint64) {
	if n <= 8 {
		return load64(s, i, n), 0
	}
	return load64(s, i, 8), load64(s, i+8, n-8)
}

// hashText hashes a text. It is fastest above 8 bytes.
func hashText(s string) uint64 {
	h := uint64(len(s)) * 0x9E3779B97F4A7C15
	for i := 0; i < len(s); i += 8 {
		h = mix2(h, load64(s, i, min(8, len(s)-i)))
	}
	return h
}

// tableSize returns a power of two that leaves at least half of the table free.
func tableSize(entries int) int { return max(16, 1<<bits.Len(uint(2*entries))) }

// newVocabulary indexes the direct tokens by their bytes. It keeps no reference to a text.
func newVocabulary(tokens []vocabularyToken) *vocabulary {
	short, middle := 0, 0
	for i := range tokens {
		switch n := len(tokens[i].text); {
		case !tokens[i].direct:
		case n <= 8:
			short++
		case n <= maxShort:
			middle++
		}
	}
	v := &vocabulary{
		short:  make([]shortEntry, tableSize(short)),
		middle: make([]middleEntry, tableSize(middle)),
		long:   map[string]kvblock.Token{},
	}
	v.tables = [2]table{
		{uintptr(unsafe.Pointer(&v.short[0])), uint32(len(v.short)-1) &^ 3, uint32(unsafe.Sizeof(shortEntry{}))},
		{uintptr(unsafe.Pointer(&v.middle[0])), uint32(len(v.middle) - 1), uint32(unsafe.Sizeof(middleEntry{}))},
	}
	for _, token := range tokens {
		n := len(token.text)
		switch {
		case n == 0 || !token.direct:
		case n <= 8:
			text := load64(token.text, 0, n)
			h := v.shortSlot(text, uint32(n))
			for v.short[h].size != 0 {
				h = v.nextShort(h)
			}
			v.short[h] = shortEntry{text, token.id, uint32(n)}
		case n <= maxShort:
			low, high := load128(token.text, 0, n)
			h := v.middleSlot(low, high, uint32(n))
			for v.middle[h].size != 0 {
				h = v.nextMiddle(h)
			}
			v.middle[h] = middleEntry{low, high, token.id, uint32(n)}
		default:
			v.long[strings.Clone(token.text)] = token.id
		}
	}
	return v
}

// shortSlot and middleSlot return where the search for a text of the given bytes and size begins: at the start of a
// cache line, so that most searches read one line.
func (v *vocabulary) shortSlot(text uint64, size uint32) uint32 {
	return uint32(pieceHash(text, 0, int(size))) & v.tables[0].mask
}

func (v *vocabulary) middleSlot(low, high uint64, size uint32) uint32 {
	return uint32(pieceHash(low, high, int(size))) & v.tables[1].mask
}

func (v *vocabulary) nextShort(slot uint32) uint32 { return (slot + 1) & uint32(len(v.short)-1) }

func (v *vocabulary) nextMiddle(slot uint32) uint32 { return (slot + 1) & uint32(len(v.middle)-1) }

// findShort returns the token of a piece of up to 8 bytes, if it has one. slot is its shortSlot.
func (v *vocabulary) findShort(slot uint32, text uint64, size uint32) (kvblock.Token, bool) {
	for {
		e := &v.short[slot]
		if e.text == text && e.size == size {
			return e.id, true
		}
		if e.size == 0 {
			return 0, false
		}
		slot = v.nextShort(slot)
	}
}

// findMiddle is findShort for 9 to 16 bytes.
func (v *vocabulary) findMiddle(slot uint32, low, high uint64, size uint32) (kvblock.Token, bool) {
	for {
		e := &v.middle[slot]
		if e.low == low && e.high == high && e.size == size {
			return e.id, true
		}
		if e.size == 0 {
			return 0, false
		}
		slot = v.nextMiddle(slot)
	}
}

// runeTable maps characters to tokens, in pages of 256. Only pages with tokens exist. The zero value is empty.
type runeTable struct {
	pages [(maxRune + 1) / pageSize]*[pageSize]kvblock.Token // id+1; 0: none
}

func (t *runeTable) set(r rune, id kvblock.Token) {
	page := &t.pages[r/pageSize]
	if *page == nil {
		*page = new([pageSize]kvblock.Token)
	}
	(*page)[r%pageSize] = id + 1
}

func (t *runeTable) get(r rune) (kvblock.Token, bool) {
	page := t.pages[r/pageSize]
	if page == nil {
		return 0, false
	}
	id := page[r%pageSize]
	return id - 1, id != 0
}
