package tokenizer

import (
	"encoding/binary"
	"hash/maphash"
	"math/bits"

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

// mix and mix2 hash one and two words by multiplication; the constants are odd numbers without structure.
func mix(a uint64) uint64 { return mix2(a, 0x9E3779B97F4A7C15^0x8BB84B93962EACC9) }

func mix2(a, b uint64) uint64 {
	high, low := bits.Mul64(a^0x2D358DCCAA6C78A5, b^0x8BB84B93962EACC9)
	return high ^ low
}

// load64 returns the n bytes (0 to 8) of s from i as a little-endian number.
func load64(s string, i, n int) uint64 {
	var b [8]byte
	if i+8 <= len(s) {
		copy(b[:], s[i:i+8])
		return binary.LittleEndian.Uint64(b[:]) & (1<<(8*uint(n)) - 1)
	}
	copy(b[:], s[i:i+n])
	return binary.LittleEndian.Uint64(b[:])
}

// tableSize returns a power of two that leaves at least half of the table free.
func tableSize(entries int) int { return max(16, 1<<bits.Len(uint(2*entries))) }

// newVocabulary indexes tokens by their bytes. direct says that a piece with these bytes is exactly this token.
func newVocabulary(tokens map[string]longEntry) *vocabulary {
	short, middle := 0, 0
	for text := range tokens {
		switch {
		case len(text) <= 8:
			short++
		case len(text) <= 16:
			middle++
		}
	}
	v := &vocabulary{
		short:  make([]shortEntry, tableSize(short)),
		middle: make([]middleEntry, tableSize(middle)),
		long:   map[string]longEntry{},
	}
	for text, token := range tokens {
		n := len(text)
		switch {
		case n == 0:
		case n <= 8:
			word := load64(text, 0, n)
			h := v.shortSlot(word, n)
			for v.short[h].size != 0 {
				h = (h + 1) & uint64(len(v.short)-1)
			}
			v.short[h] = shortEntry{word, token.id, uint8(n), token.direct}
		case n <= 16:
			low, high := load64(text, 0, 8), load64(text, 8, n-8)
			h := v.middleSlot(low, high, n)
			for v.middle[h].size != 0 {
				h = (h + 1) & uint64(len(v.middle)-1)
			}
			v.middle[h] = middleEntry{low, high, token.id, uint8(n), token.direct}
		default:
			v.long[text] = token
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

// find returns the token whose bytes are s[i:j], if a piece with these bytes is exactly that token.
func (v *vocabulary) find(s string, i, j int) (kvblock.Token, bool) {
	n := j - i
	switch {
	case n <= 8:
		word := load64(s, i, n)
		for h := v.shortSlot(word, n); ; h = (h + 1) & uint64(len(v.short)-1) {
			e := &v.short[h]
			if e.size == 0 {
				return 0, false
			}
			if e.text == word && int(e.size) == n {
				return e.id, e.direct
			}
		}
	case n <= 16:
		low, high := load64(s, i, 8), load64(s, i+8, n-8)
		for h := v.middleSlot(low, high, n); ; h = (h + 1) & uint64(len(v.middle)-1) {
			e := &v.middle[h]
			if e.size == 0 {
				return 0, false
			}
			if e.low == low && e.high == high && int(e.size) == n {
				return e.id, e.direct
			}
		}
	}
	e := v.long[s[i:j]]
	return e.id, e.direct
}

// pairTable finds what two neighbouring tokens merge into, and how early the merge was learnt.
type pairTable []pairEntry

type pairEntry struct {
	pair uint64 // left id in the high half
	rank uint32
	into kvblock.Token
}

// noPair marks a free slot; no two ids make it, because ids are below 2^31.
const noPair = ^uint64(0)

// noRank is the rank of a pair that does not merge.
const noRank = ^uint32(0)

func newPairTable(merges int) pairTable {
	t := make(pairTable, tableSize(merges))
	for i := range t {
		t[i].pair = noPair
	}
	return t
}

// set adds a merge. Of two entries for one pair the later wins, as in Hugging Face tokenizers.
func (t pairTable) set(left, right, into kvblock.Token, rank uint32) {
	pair := uint64(left)<<32 | uint64(right)
	h := mix(pair) & uint64(len(t)-1)
	for t[h].pair != noPair && t[h].pair != pair {
		h = (h + 1) & uint64(len(t)-1)
	}
	t[h] = pairEntry{pair, rank, into}
}

// get returns the rank of a pair and what it merges into; noRank if it does not merge.
func (t pairTable) get(left, right kvblock.Token) (uint32, kvblock.Token) {
	pair := uint64(left)<<32 | uint64(right)
	for h := mix(pair) & uint64(len(t)-1); ; h = (h + 1) & uint64(len(t)-1) {
		e := &t[h]
		if e.pair == pair {
			return e.rank, e.into
		}
		if e.pair == noPair {
			return noRank, 0
		}
	}
}

// hashRange hashes s[i:j]. The seed keeps clients from choosing which words share a slot.
func hashRange(seed maphash.Seed, s string, i, j int) uint64 { return maphash.String(seed, s[i:j]) }
