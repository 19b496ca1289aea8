package bpe

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// Most pieces of a text are words that occurred recently. For these the encoder does two steps, cutWords and
// lookUpWords, and little else. For amd64, both are in assembly (bpe_amd64.s), which takes half as many
// instructions. Tests compare it with the functions here.

// piece is a piece of text.
type piece struct {
	low, key uint64 // see pieceKey
	hash     uint64 // mix2(low, key); hashText for an other of more than maxShort bytes
	start    uint32
	size     uint32
}

// text returns the piece's text, in s.
func (p *piece) text(s string) string { return s[p.start : p.start+p.size] }

// high returns the bytes from the ninth to the sixteenth of a piece of at most maxShort bytes, which lies in s.
func (p *piece) high(s string) uint64 {
	if p.size == maxShort {
		return load64(s, int(p.start)+8, 8)
	}
	return p.key & (1<<56 - 1)
}

// equals reports whether two pieces of s have the same text. Their hashes are those of texts.
func (p *piece) equals(q *piece, s string) bool {
	return p.hash == q.hash && p.size == q.size && p.low == q.low && p.key == q.key &&
		(p.size <= maxWord || p.text(s) == q.text(s))
}

const (
	// maxShort is the longest piece that is looked up by two machine words, in bytes.
	maxShort = 16
	// maxWord is the size of the longest word, in bytes; wordIDs is its largest number of ids.
	maxWord = 15
	wordIDs = 3

	wordSetBits = 14
)

// word is a piece of at most maxWord bytes that has at most wordIDs ids. Two words are a cache line.
type word struct {
	low, key uint64                     // see pieceKey; 0 in a free entry
	ids      [wordIDs + 1]kvblock.Token // the last element is the number of ids
}

// wordSets has the last two words of each hash.
type wordSets [1 << wordSetBits][2]word

// set returns the words that a piece may be.
func (t *wordSets) set(hash uint64) *[2]word { return &t[hash>>(64-wordSetBits)] }

// store stores the ids of a piece of at most maxWord bytes, in place of the older word with the same hash.
func (t *wordSets) store(p *piece, ids [wordIDs + 1]kvblock.Token) {
	set := t.set(p.hash)
	if set[0].low != p.low || set[0].key != p.key {
		set[1] = set[0]
		set[0] = word{p.low, p.key, ids}
	}
}

// pieceKey returns the second eight of the first 16 bytes of a piece, with the piece's size in the highest byte. Two
// pieces of at most maxWord bytes are equal if their first eight bytes and their keys are. Other pieces, of at most 255
// bytes, have other keys: the highest byte is larger than maxWord.
func pieceKey(high uint64, size uint) uint64 { return high | uint64(size)<<56 }

// pieceHash returns the hash of a piece of at most maxShort bytes.
func pieceHash(low, high uint64, size int) uint64 { return mix2(low, pieceKey(high, uint(size))) }

// pieceMask makes 16 bytes from the start of a piece of a certain size its low and its key: it keeps the piece's own
// bits and adds the size.
type pieceMask struct{ keepLow, keepHigh, addLow, addHigh uint64 }

// pieceMasks are the masks by size.
var pieceMasks = func() (masks [windowSize + 1]pieceMask) {
	for n := range masks {
		bytes := uint(min(n, maxShort))
		masks[n] = pieceMask{
			keepLow:  1<<(8*min(bytes, 8)) - 1,
			keepHigh: 1<<(8*max(bytes, 8)-64) - 1,
			addHigh:  pieceKey(0, uint(n)),
		}
	}
	return masks
}()

// cutWordsPortable is cutWords for processors without assembly here.
func cutWordsPortable(
	text *[windowSize + maxShort]byte, starts uint64, size int, start uint32, to *[windowSize]piece, words *wordSets,
) int {
	var addresses [windowSize]uintptr
	count := 0
	for starts != 0 {
		from := bits.TrailingZeros64(starts) % windowSize
		starts &= starts - 1
		n := min(bits.TrailingZeros64(starts), size) - from
		mask := &pieceMasks[n]
		low := binary.LittleEndian.Uint64(text[from:from+8])&mask.keepLow | mask.addLow
		key := binary.LittleEndian.Uint64(text[from+8:from+16])&mask.keepHigh | mask.addHigh
		hash := mix2(low, key)
		p := &to[count%windowSize] // field by field: a literal is first put together elsewhere
		p.low, p.key, p.hash = low, key, hash
		p.start, p.size = start+uint32(from), uint32(n)
		addresses[count%windowSize] = uintptr(unsafe.Pointer(words.set(hash)))
		count++
	}
	prefetch.Words(&addresses[0], count)
	return count
}

// lookUpWordsPortable is lookUpWords for processors without assembly here.
func lookUpWordsPortable(
	pieces []piece, words *wordSets, ids *[idsOfFresh]kvblock.Token, unknown *[maxPieces]unknownPiece,
) (count, missing int) {
	for k := range pieces {
		p := &pieces[k]
		set := words.set(p.hash)
		w := &set[0]
		if set[1].low == p.low && set[1].key == p.key {
			w = &set[1]
		}
		if w.low != p.low || w.key != p.key {
			unknown[missing] = unknownPiece{uint32(k), uint32(count)}
			missing++
			count++
			continue
		}
		copy(ids[count:], w.ids[:wordIDs])
		count += int(w.ids[wordIDs])
	}
	return count, missing
}
