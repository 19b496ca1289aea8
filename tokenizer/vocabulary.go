package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"unsafe"

	"kvepp/kvblock"
)

// vocabulary finds a whole piece of text among the model's tokens. Most pieces are up to 16 bytes, and are compared as
// one or two words in open-addressing tables; longer ones are in a map.
type vocabulary struct {
	short  []shortEntry // up to 8 bytes
	middle []middleEntry
	long   map[string]longEntry
}

type shortEntry struct {
	text   uint64
	id     kvblock.Token
	size   uint8 // in bytes; 0 marks a free slot
	direct bool
}

type middleEntry struct {
	low, high uint64
	id        kvblock.Token
	size      uint8
	direct    bool
}

type longEntry struct {
	id     kvblock.Token
	direct bool
}

// vocabularyToken is a token, its bytes, and whether a piece with these bytes is exactly this token.
type vocabularyToken struct {
	text   string
	id     kvblock.Token
	direct bool
}

// mix and mix2 hash one and two words by multiplication; the constants are odd numbers without structure.
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

// hashText hashes a text longer than 8 bytes, or shorter and then slower.
func hashText(s string) uint64 {
	h := uint64(len(s)) * 0x9E3779B97F4A7C15
	for i := 0; i < len(s); i += 8 {
		h = mix2(h, load64(s, i, min(8, len(s)-i)))
	}
	return h
}

// tableSize returns a power of two that leaves at least half of the table free.
func tableSize(entries int) int { return max(16, 1<<bits.Len(uint(2*entries))) }

// newVocabulary indexes tokens by their bytes. It keeps no text.
func newVocabulary(tokens []vocabularyToken) *vocabulary {
	short, middle := 0, 0
	for i := range tokens {
		switch n := len(tokens[i].text); {
		case n <= 8:
			short++
		case n <= 16:
			middle++
		}
	}
	v := &vocabulary{
		short:  make([]shortEntry, tableSize(short)),
		middle: make([]middleEntry, tableSize(middle)),
		long:   map[string]longEntry{},
	}
	for _, token := range tokens {
		n := len(token.text)
		switch {
		case n == 0:
		case n <= 8:
			word := load64(token.text, 0, n)
			h := v.shortSlot(word, n)
			for v.short[h].size != 0 {
				h = (h + 1) & uint64(len(v.short)-1)
			}
			v.short[h] = shortEntry{word, token.id, uint8(n), token.direct}
		case n <= 16:
			low, high := load128(token.text, 0, n)
			h := v.middleSlot(low, high, n)
			for v.middle[h].size != 0 {
				h = (h + 1) & uint64(len(v.middle)-1)
			}
			v.middle[h] = middleEntry{low, high, token.id, uint8(n), token.direct}
		default:
			v.long[strings.Clone(token.text)] = longEntry{token.id, token.direct}
		}
	}
	return v
}

func (v *vocabulary) shortSlot(word uint64, n int) uint64 {
	return mix(word+uint64(n)) & uint64(len(v.short)-1)
}

func (v *vocabulary) middleSlot(low, high uint64, n int) uint64 {
	return mix2(low, high+uint64(n)) & uint64(len(v.middle)-1)
}

// findWords returns the token whose n bytes, at most 16, are those of load128, if a piece with these bytes is exactly that
// token.
func (v *vocabulary) findWords(low, high uint64, n int) (kvblock.Token, bool) {
	if n <= 8 {
		for h := v.shortSlot(low, n); ; h = (h + 1) & uint64(len(v.short)-1) {
			e := &v.short[h]
			if e.text == low && int(e.size) == n {
				return e.id, e.direct
			}
			if e.size == 0 {
				return 0, false
			}
		}
	}
	for h := v.middleSlot(low, high, n); ; h = (h + 1) & uint64(len(v.middle)-1) {
		e := &v.middle[h]
		if e.low == low && e.high == high && int(e.size) == n {
			return e.id, e.direct
		}
		if e.size == 0 {
			return 0, false
		}
	}
}

// runeTable maps characters to tokens: pages of 256, of which only those exist that hold something. The zero value is empty.
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

// pairTable finds how early the merge of two neighbouring tokens was learnt, and what they become. What decides is looked
// up far more often than the rest, so a slot is one word: left id, right id, rank.
type pairTable struct {
	slots []uint64
	into  []kvblock.Token // by rank
}

const (
	// idBits and rankBits fill a slot: ids below a million, up to 16 million merges.
	idBits   = 20
	rankBits = 64 - 2*idBits
	// noRank is the rank of a pair that does not merge.
	noRank uint32 = 1<<rankBits - 1
	// maxID leaves the highest id free, so that no pair looks like a free slot.
	maxID = 1<<idBits - 2
	// freeSlot marks a free slot.
	freeSlot = ^uint64(0)
)

// pairKey is the upper part of a slot.
func pairKey(left, right kvblock.Token) uint64 {
	return uint64(left)<<(idBits+rankBits) | uint64(right)<<rankBits
}

// newPairTable indexes merges. A merge's rank is its place, and of two merges of one pair the later counts, as in Hugging
// Face tokenizers; or, byToken, its rank is the id of what it makes, as in tiktoken.
func newPairTable(merges []merge, byToken bool) pairTable {
	ranks := len(merges)
	if byToken {
		for _, m := range merges {
			ranks = max(ranks, int(m.into)+1)
		}
	}
	t := pairTable{slots: make([]uint64, tableSize(len(merges)*3/4)), into: make([]kvblock.Token, ranks)}
	for i := range t.slots {
		t.slots[i] = freeSlot
	}
	mask := uint64(len(t.slots) - 1)
	for rank, m := range merges {
		if byToken {
			rank = int(m.into)
		}
		t.into[rank] = m.into
		key := pairKey(m.left, m.right)
		h := mix(key) & mask
		for t.slots[h] != freeSlot && t.slots[h]>>rankBits != key>>rankBits {
			h = (h + 1) & mask
		}
		t.slots[h] = key | uint64(rank)
	}
	return t
}

// get returns the rank of a pair, whose key has the given hash, mix(key); noRank if it does not merge.
func (t *pairTable) get(key, hash uint64) uint32 {
	mask := uint64(len(t.slots) - 1)
	for h := hash & mask; ; h = (h + 1) & mask {
		slot := t.slots[h]
		if (slot^key)>>rankBits == 0 {
			return uint32(slot) & noRank
		}
		if slot == freeSlot {
			return noRank
		}
	}
}
