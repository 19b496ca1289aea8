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

// normalizer rewrites text before the pre-tokenizer cuts it. It is a list of steps.
type normalizer []normalizerStep

// normalizerStep is one of: a normalization form, a prefix, a replacement, a rewriting of characters, or stripping.
type normalizerStep struct {
	form     norm.Form
	isForm   bool
	prefix   string   // put before text that is not empty
	old, new string   // every old becomes new, when old is not empty
	pattern  *pattern // every match becomes new
	// character rewrites one character: it appends the new text of r.
	character   func(to []byte, r rune) []byte
	left, right bool // strip white space there
}

// A text may grow to maxGrowth times its length plus maxGrowthBase bytes in the normalizer, and again in the
// pre-tokenizer. Models need a factor of three, for a text of spaces alone.
const (
	maxGrowth     = 4
	maxGrowthBase = 64 << 10
)

// errGrowth says that a text grew beyond these limits.
var errGrowth = fmt.Errorf(
	"bpe: a text grows to more than %d times its length in the tokenizer's normalizer or pre-tokenizer",
	maxGrowth,
)

// apply returns the normalized text, which may alias s or the scratch. Errors: errMatch, errGrowth, the budget's error.
func (n normalizer) apply(s string, sc *scratch) (string, error) {
	most := maxGrowth*len(s) + maxGrowthBase
	// Two buffers alternate, so that a step never overwrites the text that it reads.
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

// keepsStart reports whether Hugging Face tokenizers still knows, after normalization, which character was the text's
// first.
func (n normalizer) keepsStart() bool {
	for _, step := range n {
		if !step.isForm {
			return false
		}
	}
	return true
}

// keeps reports whether text is in the normalizer's normalization forms. It ignores the other steps.
func (n normalizer) keeps(text string) bool {
	for i := range n {
		if n[i].isForm && !n[i].form.IsNormalString(text) {
			return false
		}
	}
	return true
}

// formStretch is the number of bytes that are normalized at once.
const formStretch = 64 << 10

// normalForm normalizes s in stretches. Each stretch ends where no character combines with the next stretch. A result
// of more than most bytes is errGrowth.
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

// normalForm normalizes like Hugging Face tokenizers 0.23.3, whose Unicode is older than Go's. It normalizes the text
// between the characters that the older Unicode does not know, because nothing reorders or composes across these. (Text
// that is normal for Go is also normal for the older tables: a sequence of ordered marks stays ordered without some.)
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

// isNormal returns form.IsNormalString(s), faster. It skips characters that are normal in every text: ASCII, and for
// NFC all characters below the combining ones, most Chinese ones (U+4000 to U+9FFF), and dashes and quotes (U+2010 to
// U+203F). It passes the rest to form.IsNormalString in stretches. A stretch begins with the character before, and ends
// at the next ASCII character, which never combines with an earlier one.
func isNormal(form norm.Form, s string) bool {
	const (
		highBits = 0x8080808080808080
		stretch  = 256 // bytes at least, because each call has a fixed cost
	)
	lowest := byte(utf8.RuneSelf)
	if form == norm.NFC {
		lowest = 0xCC // the first byte of U+0300
	}
	text := unsafe.Slice(unsafe.StringData(s), len(s))
	before := 0 // where the character before i begins
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case i+32 <= len(s) && (binary.LittleEndian.Uint64(text[i:])|binary.LittleEndian.Uint64(text[i+8:])|
			binary.LittleEndian.Uint64(text[i+16:])|binary.LittleEndian.Uint64(text[i+24:]))&highBits == 0:
			before = i + 31
			i += 32
		case i+8 <= len(s) && binary.LittleEndian.Uint64(text[i:])&highBits == 0:
			before = i + 7
			i += 8
		case c < utf8.RuneSelf:
			before = i
			i++
		case c < lowest:
			before = i
			i += 2
		case form == norm.NFC && (c >= 0xE4 && c <= 0xE9 || c == 0xE2 && s[i+1] == 0x80 && s[i+2] >= 0x90):
			before = i
			i += 3
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

// graphemeJoiner is the character that package norm inserts into runs of more than 30 marks, for streams. No other
// normalizer does that.
const graphemeJoiner = "\u034f"

// knownForm normalizes a text without newer characters.
func knownForm(form norm.Form, s string) string {
	out := form.String(s)
	if strings.Contains(out, graphemeJoiner) && strings.Count(out, graphemeJoiner) != strings.Count(s, graphemeJoiner) {
		return formByDefinition(form, s)
	}
	return out
}

// combining is a character and its class.
type combining struct {
	r     rune
	class uint8 // canonical combining class; 0: a starter
}

// sortMarks sorts marks by their classes. It is stable and takes linear time.
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

// formByDefinition normalizes by the definition in Unicode's annex 15: decompose, sort marks, compose.
func formByDefinition(form norm.Form, s string) string {
	decomposition, composes := norm.NFD, form == norm.NFC || form == norm.NFKC
	if form == norm.NFKC || form == norm.NFKD {
		decomposition = norm.NFKD
	}
	var all []combining
	for _, r := range s {
		for _, part := range decomposition.String(string(r)) { // one character has few marks
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
		var last uint8 // the class of the last character after the starter that did not compose with it
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

// isNewer reports whether a character is in newerCharacters.
func isNewer(r rune) bool {
	for _, known := range newerCharacters {
		if r <= known[1] {
			return r >= known[0]
		}
	}
	return false
}

// newerCharacters are ranges of the characters that Go normalizes otherwise than Hugging Face tokenizers, in ascending
// order. They were found by comparing the two for every character, alone and among marks.
var newerCharacters = [...][2]rune{
	{0x07FD, 0x07FD}, {0x0898, 0x089F}, {0x08CA, 0x08D3}, {0x09FE, 0x09FE}, {0x0C3C, 0x0C3C}, {0x0D3B, 0x0D3C},
	{0x0EBA, 0x0EBA}, {0x1715, 0x1715}, {0x1ABF, 0x1ACE}, {0x1DF6, 0x1DFA}, {0x32FF, 0x32FF}, {0xA7F2, 0xA7F4},
	{0xA82C, 0xA82C}, {0xAB69, 0xAB69}, {0x10781, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}, {0x10D24, 0x10D27},
	{0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
	{0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11938, 0x11938},
	{0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
	{0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
	{0x16FF0, 0x16FF1}, {0x1E030, 0x1E06D}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE},
	{0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9},
}

// stripAccent does StripAccents for one character.
func stripAccent(to []byte, r rune) []byte {
	if classOfRune(r)&classAccent != 0 {
		return to
	}
	return utf8.AppendRune(to, r)
}

// lowerCase does Lowercase for one character. Like Hugging Face's, it ignores the neighbours, so it does not treat a
// final sigma specially.
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

// nmt does Nmt for one character: it drops some control characters, and replaces others and white space by a space.
func nmt(to []byte, r rune) []byte {
	switch {
	case r >= 0x01 && r <= 0x08, r == 0x0B, r >= 0x0E && r <= 0x1F, r == 0x7F, r == 0x8F, r == 0x9F:
		return to
	case r == 0x09, r == 0x0A, r == 0x0C, r == 0x0D, r == 0x1680, r >= 0x200B && r <= 0x200F,
		r == 0x2028, r == 0x2029, r == 0x2581, r == 0xFEFF, r == 0xFFFD:
		return append(to, ' ')
	}
	return utf8.AppendRune(to, r)
}
