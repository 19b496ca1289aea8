package bpe

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// TestSizesOfWords: assembly and the pages of memory depend on these sizes.
func TestSizesOfWords(t *testing.T) {
	for what, sizes := range map[string][2]uintptr{
		"piece":        {unsafe.Sizeof(piece{}), 32},
		"pieceMask":    {unsafe.Sizeof(pieceMask{}), 32},
		"word":         {unsafe.Sizeof(word{}), 32},
		"unknownPiece": {unsafe.Sizeof(unknownPiece{}), 8},
		"pieceCache":   {unsafe.Sizeof(pieceCache{}), hugepage.Size},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s has %d bytes, want %d", what, sizes[0], sizes[1])
		}
	}
}

// TestCutWords compares cutWords with the portable one and with the pieces themselves, for random texts and cuts.
func TestCutWords(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	words := new(wordSets)
	for range 5000 {
		var text [windowSize + maxShort]byte
		for i := range text {
			text[i] = byte(rng.Uint32())
		}
		size := 1 + rng.IntN(windowSize)
		starts := rng.Uint64()
		for range rng.IntN(5) {
			starts &= rng.Uint64()
		}
		starts = (starts | 1) & (^uint64(0) >> uint(windowSize-size))
		var got, portable [windowSize]piece
		count := cutWords(&text, starts, size, 1000, &got, words)
		again := cutWordsPortable(&text, starts, size, 1000, &portable, words)
		if count != bits.OnesCount64(starts) || count != again || got != portable {
			t.Fatalf("%q, starts %x, size %d:\ncutWords         %d %x\ncutWordsPortable %d %x",
				text[:], starts, size, count, got[:count], again, portable[:again])
		}
		end := size
		for k := count - 1; k >= 0; k-- {
			from := bits.Len64(starts) - 1
			starts &^= 1 << from
			n := end - from
			low, high := load128(string(text[:]), from, min(n, maxShort))
			p := &got[k]
			if p.start != 1000+uint32(from) || p.size != uint32(n) || p.low != low ||
				p.key != pieceKey(high, uint(n)) || p.hash != mix2(p.low, p.key) {
				t.Fatalf("%q from %d, %d bytes: %x", text[:], from, n, *p)
			}
			end = from
		}
	}
}

// TestLookUpWords compares lookUpWords with the portable one and with a map, while words come and go. A few words have
// the same hash, so that they displace each other.
func TestLookUpWords(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	words := new(wordSets)
	stored := map[[2]uint64][wordIDs + 1]kvblock.Token{}
	known := 0
	for range 2000 {
		pieces := make([]piece, rng.IntN(maxPieces+1))
		for k := range pieces {
			p := &pieces[k]
			n := 1 + rng.IntN(20)
			p.low, p.key, p.size = uint64(rng.IntN(3)), pieceKey(uint64(rng.IntN(3)), uint(n)), uint32(n)
			p.hash = uint64(rng.IntN(40)) << (64 - wordSetBits)
			p.low |= p.hash >> 8 // as if the hash came from it
		}
		var ids, portableIDs [idsOfFresh]kvblock.Token
		var unknown, portableUnknown [maxPieces]unknownPiece
		count, missing := lookUpWords(pieces, words, &ids, &unknown)
		count2, missing2 := lookUpWordsPortable(pieces, words, &portableIDs, &portableUnknown)
		for _, u := range unknown[:missing] {
			ids[u.at], portableIDs[u.at] = 0, 0 // not valid
		}
		if count != count2 || missing != missing2 || !slices.Equal(ids[:count], portableIDs[:count]) ||
			!slices.Equal(unknown[:missing], portableUnknown[:missing]) {
			t.Fatalf("lookUpWords: %d ids, %d unknown; portable: %d, %d", count, missing, count2, missing2)
		}
		at, next := 0, 0
		for k := range pieces {
			p := &pieces[k]
			if next < missing && unknown[next].piece == uint32(k) {
				if unknown[next].at != uint32(at) {
					t.Fatalf("unknown piece %d has id %d, want %d", k, unknown[next].at, at)
				}
				next++
				at++
				continue
			}
			known++
			want, ok := stored[[2]uint64{p.low, p.key}]
			n := int(want[wordIDs])
			if !ok || !slices.Equal(ids[at:at+n], want[:n]) {
				t.Fatalf("piece %x has ids %d, want %d", *p, ids[at:at+n], want)
			}
			at += n
		}
		if at != count || next != missing {
			t.Fatalf("%d ids and %d unknown pieces, want %d and %d", count, missing, at, next)
		}
		for _, u := range unknown[:missing] {
			p := &pieces[u.piece]
			if p.size > maxWord || rng.IntN(3) == 0 {
				continue
			}
			word := [wordIDs + 1]kvblock.Token{kvblock.Token(rng.IntN(9)), 7, 8, kvblock.Token(1 + rng.IntN(wordIDs))}
			if old, ok := stored[[2]uint64{p.low, p.key}]; ok {
				word = old
			}
			words.store(p, word)
			stored[[2]uint64{p.low, p.key}] = word
		}
	}
	if known < 1000 {
		t.Fatalf("only %d pieces were known", known)
	}
}
