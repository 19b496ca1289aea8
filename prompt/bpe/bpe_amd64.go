package bpe

import "kvepp/kvblock"

// readWindow classifies the bytes of a window. Every amd64 processor has the instructions (SSE2) that it uses.
//
//go:noescape
func readWindow(text *[windowSize]byte, w *window)

// cutWords cuts a part of a text into pieces: size bytes, from byte start of the text. text begins with these bytes.
// The pieces begin at the bits of starts; the lowest bit is the first byte, and all are below size. cutWords returns
// the number of pieces, and prefetches the words that they may be.
//
//go:noescape
func cutWords(
	text *[windowSize + maxShort]byte, starts uint64, size int, start uint32, to *[windowSize]piece, words *wordSets,
) int

// lookUpWords puts the ids of pieces that are words into ids, and the others into unknown. Each of these gets one id,
// which is not valid. It returns the number of ids and of unknown pieces.
func lookUpWords(
	pieces []piece, words *wordSets, ids *[idsOfFresh]kvblock.Token, unknown *[maxPieces]unknownPiece,
) (count, missing int) {
	if len(pieces) == 0 {
		return 0, 0
	}
	return lookUpWordsSSE2(&pieces[0], len(pieces), words, ids, unknown)
}

//go:noescape
func lookUpWordsSSE2(
	pieces *piece, n int, words *wordSets, ids *[idsOfFresh]kvblock.Token, unknown *[maxPieces]unknownPiece,
) (count, missing int)
