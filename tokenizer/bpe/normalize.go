package bpe

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites a stretch of text before it is cut into pieces: steps in order.
type normalizer []normalizerStep

// normalizerStep is one of: a normalization form; a prefix; a replacement; a rewriting of characters; stripping.
type normalizerStep struct {
	form     norm.Form
	isForm   bool
	prefix   string   // put before text that is not empty
	old, new string   // every old becomes new, when old is not empty
	pattern  *pattern // every match becomes new
	// character rewrites one character at a time: it appends what r becomes.
	character   func(to []byte, r rune) []byte
	left, right bool // white space is stripped from there
}

// A text may become so much longer, in a normalizer's steps and then in those of pre-tokenizers: what models need is
// three times, for a text of spaces alone.
const (
	maxGrowth     = 4
	maxGrowthBase = 64 << 10 // bytes in addition
)

// errGrowth says that a text grew beyond that.
var errGrowth = fmt.Errorf(
	"tokenizer: a text grows to more than %d times its length in the tokenizer's normalizer or pre-tokenizer",
	maxGrowth,
)

// apply returns the normalized text, which may alias s or the scratch. It fails where the pattern of a step does, where
// the text grows beyond maxGrowth, and where the encoding is halted.
func (n normalizer) apply(s string, sc *scratch) (string, error) {
	most := maxGrowth*len(s) + maxGrowthBase
	// Two buffers take turns, so that a step never writes over the text that it reads.
	turn := 0
	for i := range n {
		step := &n[i]
		buf := sc.text[turn][:0]
		switch {
		case step.isForm:
			var err error
			if s, err = sc.normalForm(step.form, s, most); err != nil {
				return "", err
			}
			continue
		case s == "":
			continue
		case step.prefix != "":
			buf = append(buf, step.prefix...)
			buf = append(buf, s...)
		case step.old != "":
			if !strings.Contains(s, step.old) {
				continue
			}
			for {
				at := strings.Index(s, step.old)
				if at < 0 {
					break
				}
				buf = append(buf, s[:at]...)
				buf = append(buf, step.new...)
				s = s[at+len(step.old):]
				if len(buf) > most {
					return "", errGrowth
				}
			}
			buf = append(buf, s...)
		case step.pattern != nil:
			done := 0
			if err := step.pattern.matches(s, sc, func(start, end int) {
				buf = append(buf, s[done:start]...)
				if len(buf) <= most {
					buf = append(buf, step.new...)
				}
				done = end
			}); err != nil {
				return "", err
			}
			buf = append(buf, s[done:]...)
		case step.character != nil:
			for _, r := range s {
				buf = step.character(buf, r)
			}
		default:
			if step.left {
				s = s[skip(s, 0, len(s), classSpace):]
			}
			if step.right {
				s = s[:trimSpaceLeft(s, 0, len(s))]
			}
			continue
		}
		sc.text[turn] = buf
		if len(buf) > most {
			return "", errGrowth
		}
		if sc.budget.stopped() {
			return "", sc.budget.err
		}
		turn = 1 - turn
		s = unsafe.String(unsafe.SliceData(buf), len(buf))
	}
	return s, nil
}

// keepsStart reports whether the first character of a text is at the same place in normalized text, as far as Hugging
// Face tokenizers remembers.
func (n normalizer) keepsStart() bool {
	for _, step := range n {
		if !step.isForm {
			return false
		}
	}
	return true
}

// keeps reports whether text is in the forms to which the normalizer brings it. Other steps are not looked at.
func (n normalizer) keeps(text string) bool {
	for i := range n {
		if n[i].isForm && !n[i].form.IsNormalString(text) {
			return false
		}
	}
	return true
}

// formStretch is how many bytes are normalized at once.
const formStretch = 64 << 10

// normalForm normalizes s one stretch at a time. Each stretch ends where no character joins it with the next.
// The text may become most bytes long.
func (sc *scratch) normalForm(form norm.Form, s string, most int) (string, error) {
	if isNormal(form, s) {
		return s, nil
	}
	out := make([]byte, 0, len(s)+len(s)/8)
	for s != "" {
		if sc.budget.stopped() {
			return "", sc.budget.err
		}
		n := min(formStretch, len(s))
		for n < len(s) {
			if utf8.RuneStart(s[n]) {
				if p := form.PropertiesString(s[n:]); p.BoundaryBefore() {
					break
				}
			}
			if n++; n%formStretch == 0 && sc.budget.stopped() {
				return "", sc.budget.err
			}
		}
		out = append(out, normalForm(form, s[:n])...)
		if len(out) > most {
			return "", errGrowth
		}
		s = s[n:]
	}
	return alias(out), nil
}

// normalForm is a normalization form of the Unicode that Hugging Face tokenizers 0.23.3 knows, which is older than
// Go's: text is normalized between the characters that it does not know, as nothing reorders or composes across them.
// (Text that is normal for Go is normal for the older tables: leaving marks out of a sequence in order leaves it in
// order.)
func normalForm(form norm.Form, s string) string {
	if isNormal(form, s) {
		return s
	}
	out := make([]byte, 0, len(s))
	start := 0
	for i, r := range s {
		if r < newerCharacters[0][0] || !isNewer(r) {
			continue
		}
		out = append(out, knownForm(form, s[start:i])...)
		start = i + utf8.RuneLen(r)
		out = append(out, s[i:start]...)
	}
	return string(append(out, knownForm(form, s[start:])...))
}

// isNormal is form.IsNormalString, but passes over what is normal in every text: ASCII, and for NFC all before the
// combining characters. What is left is looked at in stretches from the character before it to an ASCII character, with
// which nothing before it joins.
func isNormal(form norm.Form, s string) bool {
	const (
		highBits = 0x8080808080808080
		stretch  = 256 // bytes at least, for each call costs something
	)
	lowest := byte(utf8.RuneSelf)
	if form == norm.NFC {
		lowest = 0xCC // what U+0300 begins with
	}
	text := unsafe.Slice(unsafe.StringData(s), len(s))
	before := 0 // where the character before i begins
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case i+8 <= len(s) && binary.LittleEndian.Uint64(text[i:])&highBits == 0:
			before = i + 7
			i += 8
		case c < utf8.RuneSelf:
			before = i
			i++
		case c < lowest:
			before = i
			i += 2
		default:
			end := min(i+stretch, len(s))
			for end < len(s) && s[end] >= utf8.RuneSelf {
				end++
			}
			if !form.IsNormalString(s[before:end]) {
				return false
			}
			before, i = end, end
		}
	}
	return true
}

// graphemeJoiner is what package norm puts into runs of more than 30 marks, for the sake of streams. No other
// normalizer does.
const graphemeJoiner = "\u034f"

func knownForm(form norm.Form, s string) string {
	out := form.String(s)
	if strings.Contains(out, graphemeJoiner) && strings.Count(out, graphemeJoiner) != strings.Count(s, graphemeJoiner) {
		return formByDefinition(form, s)
	}
	return out
}

// combining is a character of a text that is normalized.
type combining struct {
	r     rune
	class uint8 // canonical combining class; 0: a starter
}

// sortMarks puts marks in the order of their classes, and leaves those of a class in the order that they have.
func sortMarks(marks []combining) {
	if slices.IsSortedFunc(marks, func(a, b combining) int { return int(a.class) - int(b.class) }) {
		return
	}
	var places [257]int // of the next mark of a class
	for _, m := range marks {
		places[int(m.class)+1]++
	}
	for class := range 256 {
		places[class+1] += places[class]
	}
	for _, m := range slices.Clone(marks) {
		marks[places[m.class]] = m
		places[m.class]++
	}
}

// formByDefinition normalizes as Unicode's annex 15 says: decompose, put marks in order, compose.
func formByDefinition(form norm.Form, s string) string {
	decomposition, composes := norm.NFD, form == norm.NFC || form == norm.NFKC
	if form == norm.NFKC || form == norm.NFKD {
		decomposition = norm.NFKD
	}
	var all []combining
	for _, r := range s {
		for _, part := range decomposition.String(string(r)) { // one character, so that its marks are few
			all = append(all, combining{part, norm.NFD.PropertiesString(string(part)).CCC()})
		}
	}
	for i := 0; i < len(all); i++ {
		end := i
		for end < len(all) && all[end].class != 0 {
			end++
		}
		if end-i > 1 {
			sortMarks(all[i:end])
		}
		i = end
	}
	if composes {
		starter, kept := -1, 0
		var last uint8 // class of the last character that was kept after the starter
		for _, m := range all {
			if starter >= 0 && (kept == starter+1 || last != 0 && last < m.class) {
				pair := string(all[starter].r) + string(m.r)
				if joined := norm.NFC.String(pair); utf8.RuneCountInString(joined) == 1 {
					all[starter].r, _ = utf8.DecodeRuneInString(joined)
					continue
				}
			}
			all[kept] = m
			if m.class == 0 {
				starter = kept
			}
			last = m.class
			kept++
		}
		all = all[:kept]
	}
	var b strings.Builder
	for _, m := range all {
		b.WriteRune(m.r)
	}
	return b.String()
}

func isNewer(r rune) bool {
	for _, known := range newerCharacters {
		if r <= known[1] {
			return r >= known[0]
		}
	}
	return false
}

// newerCharacters are the characters that Go treats otherwise than Hugging Face's, as ranges, ascending: found by
// comparing the two over every character alone and among marks.
var newerCharacters = [...][2]rune{
	{0x07FD, 0x07FD}, {0x0898, 0x089F}, {0x08CA, 0x08D3}, {0x09FE, 0x09FE}, {0x0C3C, 0x0C3C}, {0x0D3B, 0x0D3C},
	{0x0EBA, 0x0EBA}, {0x1715, 0x1715}, {0x1ABF, 0x1ACE}, {0x1DF6, 0x1DFA}, {0x32FF, 0x32FF}, {0xA7F2, 0xA7F4},
	{0xA82C, 0xA82C}, {0xAB69, 0xAB69}, {0x10781, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}, {0x10D24, 0x10D27},
	{
		0x10EAB,
		0x10EAC,
	}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B},
	{
		0x1145E,
		0x1145E,
	}, {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
	{
		0x119E0,
		0x119E0,
	}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45},
	{
		0x11D97,
		0x11D97,
	}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E030, 0x1E06D}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
	{0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9},
}

// stripAccent is StripAccents.
func stripAccent(to []byte, r rune) []byte {
	if classOfRune(r)&classAccent != 0 {
		return to
	}
	return utf8.AppendRune(to, r)
}

// lowerCase is Lowercase: each character alone, so that a final sigma is like any other.
func lowerCase(to []byte, r rune) []byte {
	switch {
	case r < utf8.RuneSelf:
		return append(to, lowerASCII(byte(r)))
	case r == 0x130: // İ
		return append(to, "i\u0307"...)
	}
	low, high := 0, len(lowerRuns)
	for low < high {
		if middle := (low + high) / 2; lowerRuns[middle][1] < r {
			low = middle + 1
		} else {
			high = middle
		}
	}
	if low < len(lowerRuns) && r >= lowerRuns[low][0] {
		if run := lowerRuns[low]; run[2] == 0 || (r-run[0])%run[2] == 0 {
			r += run[3]
		}
	}
	return utf8.AppendRune(to, r)
}

// nmt is Nmt: some control characters go, and what looks like white space becomes a space.
func nmt(to []byte, r rune) []byte {
	switch {
	case r >= 0x01 && r <= 0x08, r == 0x0B, r >= 0x0E && r <= 0x1F, r == 0x7F, r == 0x8F, r == 0x9F:
		return to
	case r == 0x09,
		r == 0x0A,
		r == 0x0C,
		r == 0x0D,
		r == 0x1680,
		r >= 0x200B && r <= 0x200F,
		r == 0x2028,
		r == 0x2029,
		r == 0x2581,
		r == 0xFEFF,
		r == 0xFFFD:
		return append(to, ' ')
	}
	return utf8.AppendRune(to, r)
}
