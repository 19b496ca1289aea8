package bpe

import (
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// Most text is ASCII. For ASCII the encoder finds the starts of pieces for 64 bytes at a time. A window is one 64-bit
// word for each class of characters, with one bit for each byte. Bit operations then replace the scanner: letter &^
// (letter << 1) is "a letter after another class". A window begins at the start of a piece, so earlier text does not
// matter. The scanners of scan.go cut the rest, which depends on text behind the window or on characters beyond ASCII.
// Tests compare windows with them.

// windowRules are the differences between the expressions on ASCII text.
type windowRules struct {
	numbers      int // the most digits of a number: 1 or 3
	contractions contractionRule
	// cased: a word ends between a lower-case and an upper-case letter.
	cased bool
	// slashes that follow symbols and their newlines belong to the symbols.
	slashes bool
	// apart: numbers are cut out first, so the text before a number is cut like the end of a text.
	apart bool
}

type contractionRule uint8

const (
	noContractions   contractionRule = iota
	contractionPiece                 // 's is a piece
	contractionEnd                   // 's ends a word
)

// windows maps an expression to its rules. Other expressions use only their scanner. So does GPT-2's, which cuts spaces
// before numbers and newlines differently.
var windows = map[string]*windowRules{
	regexCL100K: {numbers: 3, contractions: contractionPiece},
	regexQwen:   {numbers: 1, contractions: contractionPiece},
	regexQwen35: {numbers: 1, contractions: contractionPiece},
	regexO200K:  {numbers: 3, contractions: contractionEnd, cased: true, slashes: true},
	regexTekken: {numbers: 1, cased: true, slashes: true},
}

var windowDeepSeek = &windowRules{numbers: 3, apart: true}

// windowSize is the number of bytes of a window.
const windowSize = 64

// window has a word for each class. The lowest bit stands for the first byte.
type window struct {
	letter  uint64
	upper   uint64 // the letters A to Z
	number  uint64
	space   uint64 // white space, newlines included
	newline uint64 // \r and \n
	blank   uint64 // the space itself
	other   uint64 // not ASCII, or control characters other than white space
}

// The lanes of a word are its bytes. The comparisons take values below 0x80 and return their result in each lane's
// highest bit.
const (
	lanes    = 0x0101010101010101
	highBits = 0x80 * lanes
)

// atLeast marks the lanes of a, all below 0x80, that are at least c.
func atLeast(a uint64, c byte) uint64 { return a + lanes*uint64(0x80-c) }

// equal marks the lanes of a, all below 0x80, that are c.
func equal(a uint64, c byte) uint64 { return highBits - (a ^ lanes*uint64(c)) }

// gather collects the marks of eight lanes in the highest byte. The multiplication moves each mark to its bit.
func gather(marks uint64) uint64 { return (marks & highBits) * 0x0002040810204081 &^ (1<<56 - 1) }

// readWindowLanes is readWindow for processors without assembly here. It classifies eight bytes at a time. At bytes
// that are other, and behind them, the other words have arbitrary bits.
func readWindowLanes(text *[windowSize]byte, w *window) {
	*w = window{}
	for k := 0; k < windowSize; k += 8 {
		raw := binary.LittleEndian.Uint64(text[k : k+8])
		a := raw &^ highBits
		small := a | lanes*0x20
		blanks := equal(a, ' ')
		spaces := atLeast(a, '\t')&^atLeast(a, '\r'+1) | blanks
		// Each step adds eight bits at the top, and moves the earlier ones down.
		w.letter = w.letter>>8 | gather(atLeast(small, 'a')&^atLeast(small, 'z'+1))
		w.upper = w.upper>>8 | gather(atLeast(a, 'A')&^atLeast(a, 'Z'+1))
		w.number = w.number>>8 | gather(atLeast(a, '0')&^atLeast(a, '9'+1))
		w.space = w.space>>8 | gather(spaces)
		w.newline = w.newline>>8 | gather(equal(a, '\n')|equal(a, '\r'))
		w.blank = w.blank>>8 | gather(blanks)
		w.other = w.other>>8 | gather(raw|atLeast(a, 0x7F)|^(atLeast(a, ' ')|spaces))
	}
}

// starts finds the starts of pieces in s[i:end]; a piece starts at s[i]. It returns a bit for each byte from i at which
// a piece starts, and the number of bytes for which this is certain. The last piece in them may continue behind them,
// unless they reach end. 0 means that nothing is certain.
func (r *windowRules) starts(s string, i, end int) (starts uint64, size int) {
	var text *[windowSize]byte
	if end-i >= windowSize {
		text = (*[windowSize]byte)(unsafe.Slice(unsafe.StringData(s), len(s))[i:end])
	} else {
		text = new([windowSize]byte) // the rest is zeros, which belong to no class
		copy(text[:], s[i:end])
	}
	var w window
	readWindow(text, &w)
	size = bits.TrailingZeros64(w.other)
	if size == 0 {
		return 0, 0
	}
	valid := ^uint64(0) >> uint(windowSize-size)
	letter, number, space, newline, blank := w.letter&valid, w.number&valid, w.space&valid, w.newline&valid,
		w.blank&valid
	symbol := valid &^ (letter | number | space)

	// Newlines after symbols belong to them: adding its first bit to a run of ones clears the run.
	absorbed := newline &^ (newline + newline&(symbol<<1))
	if r.slashes {
		slash := symbol & (absorbed << 1)
		for slash != 0 && text[bits.TrailingZeros64(slash)] != '/' {
			slash &= slash - 1
		}
		if slash != 0 {
			size = bits.TrailingZeros64(slash)
			valid = ^uint64(0) >> uint(windowSize-size)
			letter, number, space, newline, blank = letter&valid, number&valid, space&valid, newline&valid, blank&valid
			symbol, absorbed = symbol&valid, absorbed&valid
		}
	}
	last := uint64(1) << uint(size-1) // the last byte that is known
	atEnd := i+size == end

	// White space up to its last newline is a piece. The white space after it is another piece, except its last
	// character, which belongs to the following word or symbols, or is a piece itself.
	space &^= absorbed
	spaceStart := space &^ (space << 1)
	inLine := space &^ newline
	inLineEnd := inLine &^ (inLine >> 1) &^ (newline >> 1) &^ last
	if r.apart {
		inLineEnd &^= number >> 1
	}
	starts = spaceStart | inLineEnd
	if after := inLine & ((space & newline) << 1); after != 0 {
		if runEnds := (inLine + after) &^ inLine; runEnds&newline != 0 { // not the last newline; rare
			for rest := after; rest != 0; rest &= rest - 1 {
				first := rest & -rest
				if (inLine+first)&^inLine&newline != 0 {
					after &^= first
				}
			}
		}
		starts |= after
	}

	if r.numbers == 1 {
		starts |= number
	} else {
		third := number & (number << 1) & (number << 2) & (number << 3)
		for begin := number &^ (number << 1); begin != 0; begin = begin << 3 & third {
			starts |= begin
		}
	}

	// A space before symbols belongs to them. One symbol alone before a letter belongs to the word.
	symbolStart := symbol &^ (symbol << 1) &^ (blank << 1)
	alone := symbolStart &^ (symbol >> 1)
	starts |= symbolStart | letter&^((letter|inLine|alone)<<1)
	if r.cased {
		upper := letter & w.upper
		starts |= upper & ((letter &^ upper) << 1)
	}

	if quotes := alone & (letter >> 1); quotes != 0 && r.contractions != noContractions {
		starts = r.cutContractions(starts, quotes, letter, s, i, end)
	}

	if !atEnd {
		// The next byte may decide what the last byte begins, and the text after white space decides how it is cut.
		if space&last != 0 {
			starts &= 1<<uint(bits.Len64(spaceStart)) - 1
		} else {
			starts &^= last
		}
	}
	return starts, size
}

// cutContractions returns starts with the contractions cut. The bits of quotes are the places where one may begin: a
// single symbol before a letter.
func (r *windowRules) cutContractions(starts, quotes, letter uint64, s string, i, end int) uint64 {
	if r.contractions == contractionEnd {
		quotes &= letter << 1
	}
	cut := -1 // where the last contraction ended
	for ; quotes != 0; quotes &= quotes - 1 {
		quote := bits.TrailingZeros64(quotes)
		if r.contractions == contractionEnd && quote == cut {
			continue // the word before already has a contraction
		}
		j := contraction(s, i+quote, end)
		if j == 0 {
			continue
		}
		cut = j - i
		behind := ^uint64(0) << uint(cut) // none if the contraction reaches beyond the window
		if r.contractions == contractionEnd {
			starts &^= ^uint64(0) << uint(quote) &^ behind
		}
		starts |= letter & behind & -behind
	}
	return starts
}
