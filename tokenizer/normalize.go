package tokenizer

import (
	"strings"
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
			if !norm.NFC.IsNormalString(s) {
				s = norm.NFC.String(s)
			}
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
