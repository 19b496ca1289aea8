package bpe

import (
	"math/bits"
	"math/rand/v2"
	"testing"
)

// TestReadWindow compares this processor's readWindow with the portable one, and both with the classes of single bytes:
// each byte at each place, and random windows. All bytes before the first that is other must have the same classes.
func TestReadWindow(t *testing.T) {
	check := func(text *[windowSize]byte) {
		t.Helper()
		got := window{letter: 1 << 63, upper: 5, other: 7} // readWindow sets all words
		readWindow(text, &got)
		var portable window
		readWindowLanes(text, &portable)
		var want window
		for i, b := range text {
			bit := uint64(1) << i
			lower := b | 0x20
			for _, class := range []struct {
				bits *uint64
				in   bool
			}{
				{&want.letter, lower >= 'a' && lower <= 'z'},
				{&want.upper, b >= 'A' && b <= 'Z'},
				{&want.number, b >= '0' && b <= '9'},
				{&want.space, b == ' ' || b >= '\t' && b <= '\r'},
				{&want.newline, b == '\n' || b == '\r'},
				{&want.blank, b == ' '},
				{&want.other, b >= 0x7F || b < ' ' && (b < '\t' || b > '\r')},
			} {
				if class.in {
					*class.bits |= bit
				}
			}
		}
		valid := ^uint64(0)
		if want.other != 0 {
			valid = 1<<bits.TrailingZeros64(want.other) - 1
		}
		keep := func(w window) window {
			return window{
				letter: w.letter & valid, upper: w.upper & valid, number: w.number & valid, space: w.space & valid,
				newline: w.newline & valid, blank: w.blank & valid, other: w.other,
			}
		}
		if keep(got) != keep(want) || keep(portable) != keep(want) {
			t.Fatalf(
				"%q\nreadWindow       %x\nreadWindowLanes  %x\nwant             %x",
				text[:],
				keep(got),
				keep(portable),
				keep(want),
			)
		}
	}
	for b := range 256 {
		for place := range windowSize {
			var text [windowSize]byte
			for i := range text {
				text[i] = 'x'
			}
			text[place] = byte(b)
			check(&text)
		}
	}
	rng := rand.New(rand.NewPCG(7, 8))
	for range 2000 {
		var text [windowSize]byte
		limit := []int{0x80, 0x80, 256}[rng.IntN(3)]
		for i := range text {
			text[i] = byte(rng.IntN(limit))
			if limit == 0x80 && rng.IntN(4) != 0 {
				text[i] = byte(' ' + rng.IntN(0x5F))
			}
		}
		check(&text)
	}
}
