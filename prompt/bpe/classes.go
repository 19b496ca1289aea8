package bpe

import "slices"

//go:generate python3 unicode_gen.py

// class is a bit set of the character classes that pre-tokenizer patterns use.
type class uint16

const (
	classLetter      class = 1 << iota // \p{L}
	classNumber                        // \p{N}
	classSpace                         // \s
	classNewline                       // [\r\n]
	classUpper                         // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
	classLower                         // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
	classMark                          // \p{M}
	classSymbol                        // [\p{P}\p{S}]
	classASCII                         // [A-Za-z]
	classASCIIPunct                    // ASCII punctuation and symbols
	classCJK                           // DeepSeek's [一-龥぀-ゟ゠-ヿ]
	classWord                          // \w of Rust's regex
	classNumeric                       // Rust's is_numeric, which Digits cuts at
	classPunctuation                   // the characters that Punctuation cuts at
	classAccent                        // the characters that StripAccents removes
	classHan                           // \p{Han}
)

const (
	pageSize = 256
	maxRune  = 0x10FFFF
)

// The classes of all code points: asciiClass for one-byte characters, and pages of 256 code points for all. Equal pages
// are stored once.
var (
	asciiClass [0x80]class
	pageOf     [(maxRune + 1) / pageSize]uint16
	pages      [][pageSize]class
)

// categories returns the ranges of some general categories.
func categories(names ...string) []rune {
	var all []rune
	for _, name := range names {
		all = append(all, categoryRanges[name]...)
	}
	return all
}

func init() {
	letters := []string{"Lu", "Ll", "Lt", "Lm", "Lo"}
	marks := []string{"Mn", "Mc", "Me"}
	flat := make([]class, maxRune+1)
	for _, t := range []struct {
		ranges []rune
		bit    class
	}{
		{categories(letters...), classLetter},
		{categories("Nd", "Nl", "No"), classNumber},
		{spaceRanges, classSpace},
		{categories(slices.Concat([]string{"Lu", "Lt", "Lm", "Lo"}, marks)...), classUpper},
		{categories(slices.Concat([]string{"Ll", "Lm", "Lo"}, marks)...), classLower},
		{categories(marks...), classMark},
		{categories("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"), classSymbol},
		{wordRanges, classWord},
		{numericRanges, classNumeric},
		{punctuationRanges, classPunctuation},
		{accentRanges, classAccent},
		{scriptRanges["Han"], classHan},
		{[]rune{'\n', '\n', '\r', '\r'}, classNewline},
		{[]rune{'A', 'Z', 'a', 'z'}, classASCII},
		{[]rune{'!', '/', ':', '@', '[', '`', '{', '~'}, classASCIIPunct},
		{[]rune{0x3040, 0x30FF, 0x4E00, 0x9FA5}, classCJK},
	} {
		for i := 0; i < len(t.ranges); i += 2 {
			for r := t.ranges[i]; r <= t.ranges[i+1]; r++ {
				flat[r] |= t.bit
			}
		}
	}
	copy(asciiClass[:], flat)
	seen := map[[pageSize]class]uint16{}
	for p := range pageOf {
		page := [pageSize]class(flat[p*pageSize:])
		number, ok := seen[page]
		if !ok {
			number = uint16(len(pages))
			pages = append(pages, page)
			seen[page] = number
		}
		pageOf[p] = number
	}
}

// classOfRune returns the classes of one code point.
func classOfRune(r rune) class {
	return pages[pageOf[r/pageSize]][r%pageSize]
}

// classAt returns the classes and the byte length of the character at s[i]. s must be valid UTF-8 and i < len(s).
func classAt(s string, i int) (class, int) {
	if b := s[i]; b < 0x80 {
		return asciiClass[b], 1
	}
	return classAtWide(s, i)
}

// classAtWide is classAt for characters of more than one byte.
func classAtWide(s string, i int) (class, int) {
	b := s[i]
	var r uint32
	size := 0
	switch {
	case b < 0xE0:
		r = uint32(b&0x1F)<<6 | uint32(s[i+1]&0x3F)
		size = 2
	case b < 0xF0:
		r = uint32(b&0x0F)<<12 | uint32(s[i+1]&0x3F)<<6 | uint32(s[i+2]&0x3F)
		size = 3
	default:
		r = uint32(b&0x07)<<18 | uint32(s[i+1]&0x3F)<<12 | uint32(s[i+2]&0x3F)<<6 | uint32(s[i+3]&0x3F)
		size = 4
	}
	return pages[pageOf[r/pageSize]][r%pageSize], size
}
