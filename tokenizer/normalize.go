package tokenizer

import (
	"strings"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites a stretch of text before it is cut into pieces: steps in order.
type normalizer []normalizerStep

// normalizerStep is one of: NFC; a prefix; a replacement.
type normalizerStep struct {
	nfc      bool
	prefix   string // put before text that is not empty
	old, new string // every old becomes new, when old is not empty
}

// apply returns the normalized text, which may alias s or the scratch.
func (n normalizer) apply(s string, sc *scratch) string {
	for i, step := range n {
		switch {
		case step.nfc:
			s = nfc(s)
		case s == "":
		case step.prefix != "":
			// Two buffers take turns, so that a step never writes over the text that it reads.
			buf := append(sc.text[i%2][:0], step.prefix...)
			buf = append(buf, s...)
			sc.text[i%2] = buf
			s = unsafe.String(unsafe.SliceData(buf), len(buf))
		case step.old != "" && strings.Contains(s, step.old):
			buf := sc.text[i%2][:0]
			for {
				before, after, found := strings.Cut(s, step.old)
				buf = append(buf, before...)
				if !found {
					break
				}
				buf = append(buf, step.new...)
				s = after
			}
			sc.text[i%2] = buf
			s = unsafe.String(unsafe.SliceData(buf), len(buf))
		}
	}
	return s
}

// removes reports whether normalized text never contains the given text.
func (n normalizer) removes(text string) bool {
	gone := false
	for _, step := range n {
		switch {
		case step.old == text && !strings.Contains(step.new, text):
			gone = true
		case strings.Contains(step.prefix, text), strings.Contains(step.new, text), step.nfc:
			gone = false
		}
	}
	return gone
}

// nfc is normalization form C of the Unicode that Hugging Face tokenizers 0.23.3 knows, which is older than Go's: text is
// normalized between the characters that it does not know, as nothing reorders or composes across them. (Text that is
// normal for Go is normal for the older tables: leaving marks out of a sequence in order leaves it in order.)
func nfc(s string) string {
	if norm.NFC.IsNormalString(s) {
		return s
	}
	out := make([]byte, 0, len(s))
	start := 0
	for i, r := range s {
		if r < unknownToNFC[0][0] || !isUnknownToNFC(r) {
			continue
		}
		out = append(out, norm.NFC.String(s[start:i])...) // not AppendString, which would compose with what is there
		start = i + utf8.RuneLen(r)
		out = append(out, s[i:start]...)
	}
	return string(append(out, norm.NFC.String(s[start:])...))
}

func isUnknownToNFC(r rune) bool {
	for _, known := range unknownToNFC {
		if r <= known[1] {
			return r >= known[0]
		}
	}
	return false
}

// unknownToNFC are the characters that Go's NFC treats otherwise than Hugging Face's, as ranges, ascending: found by
// comparing the two over every character alone and among marks.
var unknownToNFC = [...][2]rune{
	{0x07FD, 0x07FD}, {0x0898, 0x089F}, {0x08CA, 0x08D3}, {0x09FE, 0x09FE}, {0x0C3C, 0x0C3C}, {0x0D3B, 0x0D3C},
	{0x0EBA, 0x0EBA}, {0x1715, 0x1715}, {0x1ABF, 0x1ACE}, {0x1DF6, 0x1DFA}, {0xA82C, 0xA82C}, {0x10D24, 0x10D27},
	{0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
	{0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11938, 0x11938},
	{0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
	{0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
	{0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF},
	{0x1E4EC, 0x1E4EF},
}
