package chattemplate

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// isSpace is str.isspace, which is also what strip() strips and what \s matches.
func isSpace(r rune) bool {
	switch {
	case r <= ' ':
		return r == ' ' || r >= '\t' && r <= '\r' || r >= 0x1C && r <= 0x1F
	case r < 0x80:
		return false
	}
	return unicode.Is(unicode.White_Space, r)
}

// isCased and isCaseIgnorable are Unicode's properties of those names, which decide the form of a final sigma.
func isCased(r rune) bool {
	return unicode.In(r, unicode.Lu, unicode.Ll, unicode.Lt, unicode.Other_Lowercase, unicode.Other_Uppercase)
}

func isCaseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) ||
		strings.ContainsRune(
			"'.:\u00B7\u0387\u055F\u05F4\u2018\u2019\u2024\u2027\uFE13\uFE52\uFE55\uFF07\uFF0E\uFF1A",
			r,
		)
}

const (
	capitalSigma = '\u03A3'
	finalSigma   = '\u03C2'
)

// lower is str.lower.
func (x *execution) lower(s string) (string, error) {
	if err := x.read(len(s)); err != nil {
		return "", err
	}
	if isASCII(s) {
		return strings.ToLower(s), x.alloc(len(s))
	}
	w, err := x.rewrite(s)
	if err != nil {
		return "", err
	}
	for i, r := range s {
		if err := w.at(i); err != nil {
			return "", err
		}
		if err := w.writeLower(s, i, r); err != nil {
			return "", err
		}
	}
	return w.done()
}

// writeLower writes the lower case of the character r at s[i].
func (w *rewriting) writeLower(s string, i int, r rune) error {
	switch r {
	case 0x130: // I with a dot: Go drops the dot
		w.WriteString("i\u0307")
	case capitalSigma:
		ends, err := w.meter.x.endsWord(s, i)
		if err != nil {
			return err
		}
		if ends {
			r = finalSigma
		} else {
			r = unicode.ToLower(r)
		}
		w.WriteRune(r)
	default:
		w.WriteRune(unicode.ToLower(r))
	}
	return nil
}

// endsWord reports whether a cased letter is before s[i] and none after it.
func (x *execution) endsWord(s string, i int) (bool, error) {
	// The characters next to s[i] that case ignores are passed over, a step each.
	before, after := s[:i], s[i:]
	_, size := utf8.DecodeRuneInString(after)
	after = after[size:]
	for {
		r, n := utf8.DecodeLastRuneInString(before)
		if n == 0 || !isCaseIgnorable(r) {
			if n == 0 || !isCased(r) {
				return false, nil
			}
			break
		}
		before = before[:len(before)-n]
		if err := x.step(1); err != nil {
			return false, err
		}
	}
	for {
		r, n := utf8.DecodeRuneInString(after)
		if n == 0 || !isCaseIgnorable(r) {
			return n == 0 || !isCased(r), nil
		}
		after = after[n:]
		if err := x.step(1); err != nil {
			return false, err
		}
	}
}

// upper is str.upper.
func (x *execution) upper(s string) (string, error) {
	if err := x.read(len(s)); err != nil {
		return "", err
	}
	if isASCII(s) {
		return strings.ToUpper(s), x.alloc(len(s))
	}
	w, err := x.rewrite(s)
	if err != nil {
		return "", err
	}
	for i, r := range s {
		if err := w.at(i); err != nil {
			return "", err
		}
		w.writeUpper(r)
	}
	return w.done()
}

func (w *rewriting) writeUpper(r rune) {
	if wide, ok := wideCase[r]; ok {
		w.WriteString(wide.upper)
	} else {
		w.WriteRune(unicode.ToUpper(r))
	}
}

func (w *rewriting) writeTitle(r rune) {
	if wide, ok := wideCase[r]; ok {
		w.WriteString(wide.title)
	} else {
		w.WriteRune(unicode.ToTitle(r))
	}
}

// capitalize is str.capitalize: the first character in title case, the others in lower case.
func (x *execution) capitalize(s string) (string, error) {
	first := true
	return x.recase(s, func(w *rewriting, i int, r rune) error {
		if first {
			w.writeTitle(r)
			first = false
			return nil
		}
		return w.writeLower(s, i, r)
	})
}

// recase rewrites each character of s.
func (x *execution) recase(s string, write func(w *rewriting, i int, r rune) error) (string, error) {
	w, err := x.rewrite(s)
	if err != nil {
		return "", err
	}
	for i, r := range s {
		if err := w.at(i); err != nil {
			return "", err
		}
		if err := write(w, i, r); err != nil {
			return "", err
		}
	}
	return w.done()
}

// title is str.title: each letter that follows none in title case.
func (x *execution) title(s string) (string, error) {
	after := false
	return x.recase(s, func(w *rewriting, i int, r rune) error {
		within := after
		after = isCased(r)
		if !within {
			w.writeTitle(r)
			return nil
		}
		return w.writeLower(s, i, r)
	})
}

// swapcase is str.swapcase.
func (x *execution) swapcase(s string) (string, error) {
	return x.recase(s, func(w *rewriting, i int, r rune) error {
		switch {
		case unicode.IsUpper(r):
			return w.writeLower(s, i, r)
		case unicode.IsLower(r):
			w.writeUpper(r)
		default:
			w.WriteRune(r)
		}
		return nil
	})
}

// isCase is str.islower or str.isupper: something cased, and nothing of the other case.
func (x *execution) isCase(s string, this, other *unicode.RangeTable) (bool, error) {
	found := false
	count := x.meter(s)
	for i, r := range s {
		if err := count.at(i); err != nil {
			return false, err
		}
		if unicode.Is(other, r) || unicode.Is(unicode.Lt, r) {
			return false, nil
		}
		found = found || unicode.Is(this, r)
	}
	return found, nil
}

// all reports whether a string is not empty and every character is of a kind.
func (x *execution) all(s string, kind func(rune) bool) (bool, error) {
	count := x.meter(s)
	for i, r := range s {
		if err := count.at(i); err != nil {
			return false, err
		}
		if !kind(r) {
			return false, nil
		}
	}
	return s != "", nil
}

// isDigitRune is str.isdigit for one character: decimals, and digits in circles, superscripts and the like.
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

// pieces collects the parts of a text that is split.
type pieces struct {
	x     *execution
	items []any
}

// add adds a part. Their memory is counted when there is room to be made for more.
func (p *pieces) add(s string) error {
	if len(p.items) == cap(p.items) {
		room := max(4, 2*len(p.items))
		if err := p.x.items(room); err != nil {
			return err
		}
		p.items = append(make([]any, 0, room), p.items...)
	}
	p.items = append(p.items, s)
	return nil
}

func (p *pieces) list() *List { return &List{Items: p.items} }

// splitLines is str.splitlines.
func (x *execution) splitLines(s string, keepEnds bool) (*List, error) {
	lines := &pieces{x: x}
	count := x.meter(s)
	start := 0
	for i := 0; i < len(s); {
		if err := count.at(i); err != nil {
			return nil, err
		}
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
		if err := lines.add(s[start:end]); err != nil {
			return nil, err
		}
		start = i
	}
	if start < len(s) {
		if err := lines.add(s[start:]); err != nil {
			return nil, err
		}
	}
	return lines.list(), nil
}

// trim is str.strip of the characters that in reports true for, at the left, the right, or both.
func (x *execution) trim(s string, in func(rune) bool, left, right bool) (string, error) {
	if left {
		n, err := x.leading(s, in)
		if err != nil {
			return "", err
		}
		s = s[n:]
	}
	if right {
		n, err := x.trailing(s, in)
		if err != nil {
			return "", err
		}
		s = s[:len(s)-n]
	}
	return s, nil
}

// leading returns how many bytes at the beginning of s are characters that in reports true for.
func (x *execution) leading(s string, in func(rune) bool) (int, error) {
	for i, r := range s {
		if i%charactersPerStep == charactersPerStep-1 {
			if err := x.step(1); err != nil {
				return 0, err
			}
		}
		if !in(r) {
			return i, nil
		}
	}
	return len(s), nil
}

// trailing returns how many bytes at the end of s are characters that in reports true for.
func (x *execution) trailing(s string, in func(rune) bool) (int, error) {
	for n := 0; ; {
		r, size := utf8.DecodeLastRuneInString(s[:len(s)-n])
		if size == 0 || !in(r) {
			return n, nil
		}
		n += size
		if n%charactersPerStep < size {
			if err := x.step(1); err != nil {
				return 0, err
			}
		}
	}
}

func notSpace(r rune) bool { return !isSpace(r) }

// splitSpace is str.split without a separator: at most limit splits, if limit is not negative.
func (x *execution) splitSpace(s string, limit int) (*List, error) {
	words := &pieces{x: x}
	rest, err := x.trim(s, isSpace, true, false)
	for ; err == nil && rest != "" && limit != 0; limit-- {
		var end int
		if end, err = x.leading(rest, notSpace); err != nil || end == len(rest) {
			break
		}
		if err = words.add(rest[:end]); err != nil {
			break
		}
		rest, err = x.trim(rest[end:], isSpace, true, false)
	}
	if err == nil && limit < 0 {
		rest, err = x.trim(rest, isSpace, false, true)
	}
	if err == nil && rest != "" {
		err = words.add(rest)
	}
	return words.list(), err
}

// rsplitSpace is str.rsplit without a separator.
func (x *execution) rsplitSpace(s string, limit int) (*List, error) {
	words := &pieces{x: x} // last first
	rest, err := x.trim(s, isSpace, false, true)
	for ; err == nil && rest != "" && limit != 0; limit-- {
		var size int
		if size, err = x.trailing(rest, notSpace); err != nil || size == len(rest) {
			break
		}
		if err = words.add(rest[len(rest)-size:]); err != nil {
			break
		}
		rest, err = x.trim(rest[:len(rest)-size], isSpace, false, true)
	}
	if err == nil && rest != "" {
		err = words.add(rest)
	}
	slices.Reverse(words.items)
	return words.list(), err
}

// split is str.split with a separator: at most limit splits, if limit is not negative.
func (x *execution) split(s, separator string, limit int) (*List, error) {
	parts := &pieces{x: x}
	if err := x.read(len(s)); err != nil {
		return nil, err
	}
	for ; limit != 0; limit-- {
		at := strings.Index(s, separator)
		if at < 0 {
			break
		}
		if err := parts.add(s[:at]); err != nil {
			return nil, err
		}
		s = s[at+len(separator):]
	}
	err := parts.add(s)
	return parts.list(), err
}

// rsplit is str.rsplit with a separator and a limit.
func (x *execution) rsplit(s, separator string, limit int) (*List, error) {
	parts := &pieces{x: x}
	if err := x.read(len(s)); err != nil {
		return nil, err
	}
	for ; limit != 0; limit-- {
		at := strings.LastIndex(s, separator)
		if at < 0 {
			break
		}
		if err := parts.add(s[at+len(separator):]); err != nil {
			return nil, err
		}
		s = s[:at]
	}
	err := parts.add(s)
	slices.Reverse(parts.items)
	return parts.list(), err
}

// wideCase holds the characters whose upper or title case is not one character, or not the one that Go gives.
// Source: Unicode's SpecialCasing, as Python has it.
var wideCase = map[rune]struct{ upper, title string }{
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
