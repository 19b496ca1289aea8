//go:build !amd64

package bpe

import "kvepp/kvblock"

// readWindow classifies the bytes of a window.
func readWindow(text *[windowSize]byte, w *window) { readWindowLanes(text, w) }

// cutWords cuts a part of a text into pieces: size bytes, from byte start of the text. text begins with these bytes.
// The pieces begin at the bits of starts; the lowest bit is the first byte, and all are below size. cutWords returns
// the number of pieces, and prefetches the words that they may be.
func cutWords(
	text *[windowSize + maxShort]byte, starts uint64, size int, start uint32, to *[windowSize]piece, words *wordSets,
) int {
	return cutWordsPortable(text, starts, size, start, to, words)
}

// lookUpWords puts the ids of pieces that are words into ids, and the others into unknown. Each of these gets one id,
// which is not valid. It returns the number of ids and of unknown pieces.
func lookUpWords(
	pieces []piece, words *wordSets, ids *[idsOfFresh]kvblock.Token, unknown *[maxPieces]unknownPiece,
) (count, missing int) {
	return lookUpWordsPortable(pieces, words, ids, unknown)
}
