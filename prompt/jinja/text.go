package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// IsSpace is Python's str.isspace for one character. It also decides what strip() removes and \s matches.
func IsSpace(r rune) bool {
	switch {
	case r <= ' ':
		return r == ' ' || r >= '\t' && r <= '\r' || r >= 0x1C && r <= 0x1F
	case r < 0x80:
		return false
	}
	return unicode.Is(unicode.White_Space, r)
}

// isCased and isCaseIgnorable are the Unicode properties of these names. They decide the form of a final sigma.
func isCased(r rune) bool {
	return unicode.In(r, unicode.Lu, unicode.Ll, unicode.Lt, unicode.Other_Lowercase, unicode.Other_Uppercase)
}

func isCaseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) ||
		strings.ContainsRune("'.:\u00B7\u0387\u055F\u05F4\u2018\u2019\u2024\u2027\uFE13\uFE52\uFE55\uFF07\uFF0E\uFF1A",
			r)
}

const (
	capitalSigma = '\u03A3'
	finalSigma   = '\u03C2'
)

// lower is str.lower.
func (x *execution) lower(s string) string {
	x.chargeBytes(len(s))
	if isASCII(s) {
		x.alloc(len(s))
		return strings.ToLower(s)
	}
	return x.recase(s, func(w *rewriter, i int, r rune) { w.writeLower(s, i, r) })
}

// writeLower writes the lower case of the character r at s[i].
func (w *rewriter) writeLower(s string, i int, r rune) {
	switch r {
	case 0x130: // capital I with a dot: Go omits the dot
		w.WriteString("i\u0307")
	case capitalSigma:
		if w.meter.x.endsWord(s, i) {
			w.WriteRune(finalSigma)
		} else {
			w.WriteRune(unicode.ToLower(r))
		}
	default:
		w.WriteRune(unicode.ToLower(r))
	}
}

// endsWord reports whether a cased letter precedes s[i] and none follows it. Characters next to s[i] that case ignores
// are skipped, one step each.
func (x *execution) endsWord(s string, i int) bool {
	before, after := s[:i], s[i:]
	_, size := utf8.DecodeRuneInString(after)
	after = after[size:]
	for {
		r, n := utf8.DecodeLastRuneInString(before)
		if n == 0 || !isCaseIgnorable(r) {
			if n == 0 || !isCased(r) {
				return false
			}
			break
		}
		before = before[:len(before)-n]
		x.step(1)
	}
	for {
		r, n := utf8.DecodeRuneInString(after)
		if n == 0 || !isCaseIgnorable(r) {
			return n == 0 || !isCased(r)
		}
		after = after[n:]
		x.step(1)
	}
}

// upper is str.upper.
func (x *execution) upper(s string) string {
	x.chargeBytes(len(s))
	if isASCII(s) {
		x.alloc(len(s))
		return strings.ToUpper(s)
	}
	return x.recase(s, func(w *rewriter, _ int, r rune) { w.writeUpper(r) })
}

func (w *rewriter) writeUpper(r rune) {
	if wide, ok := specialCasing[r]; ok {
		w.WriteString(wide.upper)
	} else {
		w.WriteRune(unicode.ToUpper(r))
	}
}

func (w *rewriter) writeTitle(r rune) {
	if wide, ok := specialCasing[r]; ok {
		w.WriteString(wide.title)
	} else {
		w.WriteRune(unicode.ToTitle(r))
	}
}

// capitalize is str.capitalize: the first character in title case, the others in lower case.
func (x *execution) capitalize(s string) string {
	first := true
	return x.recase(s, func(w *rewriter, i int, r rune) {
		if first {
			w.writeTitle(r)
			first = false
		} else {
			w.writeLower(s, i, r)
		}
	})
}

// recase rewrites s character by character.
func (x *execution) recase(s string, write func(w *rewriter, i int, r rune)) string {
	w := x.rewrite(s)
	for i, r := range s {
		w.at(i)
		write(w, i, r)
	}
	return w.done()
}

// title is str.title: each letter that does not follow a letter in title case.
func (x *execution) title(s string) string {
	after := false
	return x.recase(s, func(w *rewriter, i int, r rune) {
		within := after
		after = isCased(r)
		if within {
			w.writeLower(s, i, r)
		} else {
			w.writeTitle(r)
		}
	})
}

// allRunes reports whether a string is not empty and all its characters satisfy kind.
func (x *execution) allRunes(s string, kind func(rune) bool) bool {
	count := x.meter(s)
	for i, r := range s {
		count.at(i)
		if !kind(r) {
			return false
		}
	}
	return s != ""
}

// isDigitRune is str.isdigit for one character: decimals, and circled, superscript and similar digits.
func isDigitRune(r rune) bool {
	if unicode.IsDigit(r) {
		return true
	}
	for _, d := range otherDigits {
		if r >= d[0] && r <= d[1] {
			return true
		}
	}
	return false
}

var otherDigits = [][2]rune{
	{0x00B2, 0x00B3}, {0x00B9, 0x00B9}, {0x1369, 0x1371}, {0x19DA, 0x19DA}, {0x2070, 0x2070}, {0x2074, 0x2079},
	{0x2080, 0x2089}, {0x2460, 0x2468}, {0x2474, 0x247C}, {0x2488, 0x2490}, {0x24EA, 0x24EA}, {0x24F5, 0x24FD},
	{0x24FF, 0x24FF}, {0x2776, 0x277E}, {0x2780, 0x2788}, {0x278A, 0x2792}, {0x10A40, 0x10A43}, {0x10E60, 0x10E68},
	{0x11052, 0x1105A}, {0x1F100, 0x1F10A},
}

// pieces collects items whose number is not known, such as the parts of a split text.
type pieces struct {
	x     *execution
	items []any
}

// add adds an item. It counts the memory when the list grows.
func (p *pieces) add(item any) {
	if len(p.items) == cap(p.items) {
		room := max(4, 2*len(p.items))
		p.x.chargeList(room)
		p.items = append(make([]any, 0, room), p.items...)
	}
	p.items = append(p.items, item)
}

func (p *pieces) list() *values.List { return &values.List{Items: p.items} }

// splitLines is str.splitlines.
func (x *execution) splitLines(s string, keepEnds bool) *values.List {
	lines := &pieces{x: x}
	count := x.meter(s)
	start := 0
	for i := 0; i < len(s); {
		count.at(i)
		r, n := utf8.DecodeRuneInString(s[i:])
		end := i
		i += n
		switch r {
		case '\n', '\v', '\f', 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029:
		case '\r':
			if i < len(s) && s[i] == '\n' {
				i++
			}
		default:
			continue
		}
		if keepEnds {
			end = i
		}
		lines.add(s[start:end])
		start = i
	}
	if start < len(s) {
		lines.add(s[start:])
	}
	return lines.list()
}

// trim is str.strip of the characters that satisfy in, at the left, the right, or both.
func (x *execution) trim(s string, in func(rune) bool, left, right bool) string {
	if left {
		n := x.leading(s, in)
		s = s[n:]
	}
	if right {
		n := x.trailing(s, in)
		s = s[:len(s)-n]
	}
	return s
}

// leading returns the number of bytes at the start of s whose characters satisfy in.
func (x *execution) leading(s string, in func(rune) bool) int {
	for i, r := range s {
		if i%charactersPerStep == charactersPerStep-1 {
			x.step(1)
		}
		if !in(r) {
			return i
		}
	}
	return len(s)
}

// trailing returns the number of bytes at the end of s whose characters satisfy in.
func (x *execution) trailing(s string, in func(rune) bool) int {
	for n := 0; ; {
		r, size := utf8.DecodeLastRuneInString(s[:len(s)-n])
		if size == 0 || !in(r) {
			return n
		}
		n += size
		if n%charactersPerStep < size {
			x.step(1)
		}
	}
}

func notSpace(r rune) bool { return !IsSpace(r) }

// splitSpace is str.split, or str.rsplit if fromRight, without a separator. A limit of 0 or more bounds the splits.
func (x *execution) splitSpace(s string, limit int, fromRight bool) *values.List {
	words := &pieces{x: x}
	next := x.leading
	if fromRight {
		next = x.trailing
	}
	rest := x.trim(s, IsSpace, !fromRight, fromRight)
	for ; rest != "" && limit != 0; limit-- {
		size := next(rest, notSpace)
		if size == len(rest) {
			break
		}
		word, others := rest[:size], rest[size:]
		if fromRight {
			word, others = rest[len(rest)-size:], rest[:len(rest)-size]
		}
		words.add(word)
		rest = x.trim(others, IsSpace, !fromRight, fromRight)
	}
	if rest != "" {
		words.add(rest)
	}
	if fromRight {
		slices.Reverse(words.items)
	}
	return words.list()
}

// split is str.split, or str.rsplit if fromRight, with a separator. A limit of 0 or more bounds the splits.
func (x *execution) split(s, separator string, limit int, fromRight bool) *values.List {
	parts := &pieces{x: x}
	x.chargeBytes(len(s))
	find := strings.Index
	if fromRight {
		find = strings.LastIndex
	}
	for ; limit != 0; limit-- {
		at := find(s, separator)
		if at < 0 {
			break
		}
		part, others := s[:at], s[at+len(separator):]
		if fromRight {
			part, others = others, part
		}
		parts.add(part)
		s = others
	}
	parts.add(s)
	if fromRight {
		slices.Reverse(parts.items)
	}
	return parts.list()
}

// specialCasing holds the characters whose upper or title case is several characters, or differs from Go's. Source:
// Unicode's SpecialCasing, as Python applies it.
var specialCasing = map[rune]struct{ upper, title string }{
	0x00DF: {"SS", "Ss"}, 0x0149: {"\u02BCN", "\u02BCN"},
	0x01F0: {"J\u030C", "J\u030C"}, 0x0390: {"\u0399\u0308\u0301", "\u0399\u0308\u0301"},
	0x03B0: {"\u03A5\u0308\u0301", "\u03A5\u0308\u0301"}, 0x0587: {"\u0535\u0552", "\u0535\u0582"},
	0x1E96: {"H\u0331", "H\u0331"}, 0x1E97: {"T\u0308", "T\u0308"},
	0x1E98: {"W\u030A", "W\u030A"}, 0x1E99: {"Y\u030A", "Y\u030A"},
	0x1E9A: {"A\u02BE", "A\u02BE"}, 0x1F50: {"\u03A5\u0313", "\u03A5\u0313"},
	0x1F52: {"\u03A5\u0313\u0300", "\u03A5\u0313\u0300"}, 0x1F54: {"\u03A5\u0313\u0301", "\u03A5\u0313\u0301"},
	0x1F56: {"\u03A5\u0313\u0342", "\u03A5\u0313\u0342"}, 0x1F80: {"\u1F08\u0399", "\u1F88"},
	0x1F81: {"\u1F09\u0399", "\u1F89"}, 0x1F82: {"\u1F0A\u0399", "\u1F8A"},
	0x1F83: {"\u1F0B\u0399", "\u1F8B"}, 0x1F84: {"\u1F0C\u0399", "\u1F8C"},
	0x1F85: {"\u1F0D\u0399", "\u1F8D"}, 0x1F86: {"\u1F0E\u0399", "\u1F8E"},
	0x1F87: {"\u1F0F\u0399", "\u1F8F"}, 0x1F88: {"\u1F08\u0399", "\u1F88"},
	0x1F89: {"\u1F09\u0399", "\u1F89"}, 0x1F8A: {"\u1F0A\u0399", "\u1F8A"},
	0x1F8B: {"\u1F0B\u0399", "\u1F8B"}, 0x1F8C: {"\u1F0C\u0399", "\u1F8C"},
	0x1F8D: {"\u1F0D\u0399", "\u1F8D"}, 0x1F8E: {"\u1F0E\u0399", "\u1F8E"},
	0x1F8F: {"\u1F0F\u0399", "\u1F8F"}, 0x1F90: {"\u1F28\u0399", "\u1F98"},
	0x1F91: {"\u1F29\u0399", "\u1F99"}, 0x1F92: {"\u1F2A\u0399", "\u1F9A"},
	0x1F93: {"\u1F2B\u0399", "\u1F9B"}, 0x1F94: {"\u1F2C\u0399", "\u1F9C"},
	0x1F95: {"\u1F2D\u0399", "\u1F9D"}, 0x1F96: {"\u1F2E\u0399", "\u1F9E"},
	0x1F97: {"\u1F2F\u0399", "\u1F9F"}, 0x1F98: {"\u1F28\u0399", "\u1F98"},
	0x1F99: {"\u1F29\u0399", "\u1F99"}, 0x1F9A: {"\u1F2A\u0399", "\u1F9A"},
	0x1F9B: {"\u1F2B\u0399", "\u1F9B"}, 0x1F9C: {"\u1F2C\u0399", "\u1F9C"},
	0x1F9D: {"\u1F2D\u0399", "\u1F9D"}, 0x1F9E: {"\u1F2E\u0399", "\u1F9E"},
	0x1F9F: {"\u1F2F\u0399", "\u1F9F"}, 0x1FA0: {"\u1F68\u0399", "\u1FA8"},
	0x1FA1: {"\u1F69\u0399", "\u1FA9"}, 0x1FA2: {"\u1F6A\u0399", "\u1FAA"},
	0x1FA3: {"\u1F6B\u0399", "\u1FAB"}, 0x1FA4: {"\u1F6C\u0399", "\u1FAC"},
	0x1FA5: {"\u1F6D\u0399", "\u1FAD"}, 0x1FA6: {"\u1F6E\u0399", "\u1FAE"},
	0x1FA7: {"\u1F6F\u0399", "\u1FAF"}, 0x1FA8: {"\u1F68\u0399", "\u1FA8"},
	0x1FA9: {"\u1F69\u0399", "\u1FA9"}, 0x1FAA: {"\u1F6A\u0399", "\u1FAA"},
	0x1FAB: {"\u1F6B\u0399", "\u1FAB"}, 0x1FAC: {"\u1F6C\u0399", "\u1FAC"},
	0x1FAD: {"\u1F6D\u0399", "\u1FAD"}, 0x1FAE: {"\u1F6E\u0399", "\u1FAE"},
	0x1FAF: {"\u1F6F\u0399", "\u1FAF"}, 0x1FB2: {"\u1FBA\u0399", "\u1FBA\u0345"},
	0x1FB3: {"\u0391\u0399", "\u1FBC"}, 0x1FB4: {"\u0386\u0399", "\u0386\u0345"},
	0x1FB6: {"\u0391\u0342", "\u0391\u0342"}, 0x1FB7: {"\u0391\u0342\u0399", "\u0391\u0342\u0345"},
	0x1FBC: {"\u0391\u0399", "\u1FBC"}, 0x1FC2: {"\u1FCA\u0399", "\u1FCA\u0345"},
	0x1FC3: {"\u0397\u0399", "\u1FCC"}, 0x1FC4: {"\u0389\u0399", "\u0389\u0345"},
	0x1FC6: {"\u0397\u0342", "\u0397\u0342"}, 0x1FC7: {"\u0397\u0342\u0399", "\u0397\u0342\u0345"},
	0x1FCC: {"\u0397\u0399", "\u1FCC"}, 0x1FD2: {"\u0399\u0308\u0300", "\u0399\u0308\u0300"},
	0x1FD3: {"\u0399\u0308\u0301", "\u0399\u0308\u0301"}, 0x1FD6: {"\u0399\u0342", "\u0399\u0342"},
	0x1FD7: {"\u0399\u0308\u0342", "\u0399\u0308\u0342"}, 0x1FE2: {"\u03A5\u0308\u0300", "\u03A5\u0308\u0300"},
	0x1FE3: {"\u03A5\u0308\u0301", "\u03A5\u0308\u0301"}, 0x1FE4: {"\u03A1\u0313", "\u03A1\u0313"},
	0x1FE6: {"\u03A5\u0342", "\u03A5\u0342"}, 0x1FE7: {"\u03A5\u0308\u0342", "\u03A5\u0308\u0342"},
	0x1FF2: {"\u1FFA\u0399", "\u1FFA\u0345"}, 0x1FF3: {"\u03A9\u0399", "\u1FFC"},
	0x1FF4: {"\u038F\u0399", "\u038F\u0345"}, 0x1FF6: {"\u03A9\u0342", "\u03A9\u0342"},
	0x1FF7: {"\u03A9\u0342\u0399", "\u03A9\u0342\u0345"}, 0x1FFC: {"\u03A9\u0399", "\u1FFC"},
	0xFB00: {"FF", "Ff"}, 0xFB01: {"FI", "Fi"},
	0xFB02: {"FL", "Fl"}, 0xFB03: {"FFI", "Ffi"},
	0xFB04: {"FFL", "Ffl"}, 0xFB05: {"ST", "St"},
	0xFB06: {"ST", "St"}, 0xFB13: {"\u0544\u0546", "\u0544\u0576"},
	0xFB14: {"\u0544\u0535", "\u0544\u0565"}, 0xFB15: {"\u0544\u053B", "\u0544\u056B"},
	0xFB16: {"\u054E\u0546", "\u054E\u0576"}, 0xFB17: {"\u0544\u053D", "\u0544\u056D"},
}
