package bpe

import (
	"strings"
	"unicode/utf8"
	"unsafe"

	"kvepp/kvblock"
)

// stage is one pre-tokenizer. It rewrites a piece of text and then cuts it into smaller pieces, which the next stage
// gets. Most models need no stages: see Encoder.scan.
type stage struct {
	rewrite  func(to []byte, s string, first bool) []byte // appends the new text; nil if the stage does not rewrite
	find     func(s string, sc *scratch, found func(start, end int)) error
	behavior behavior
	invert   bool     // the text between matches takes the place of the matches
	whole    bool     // the stage does not cut
	general  bool     // find uses the general engine
	spacing  *spacing // the rule if the stage only marks spaces, else nil
	onSpace  bool     // the stage changes nothing in a text without spaces
}

// behavior says which pieces a stage makes of its matches.
type behavior string

// Source: Hugging Face tokenizers, SplitDelimiterBehavior.
const (
	removed            behavior = "Removed"
	isolated           behavior = "Isolated"
	mergedWithPrevious behavior = "MergedWithPrevious"
	mergedWithNext     behavior = "MergedWithNext"
	contiguous         behavior = "Contiguous"
)

// span is a part of a piece: a match, or the text between matches.
type span struct {
	start, end int
	match      bool
}

// cut calls piece for each piece that the stage makes of s, in order and as soon as the piece is known.
func (st *stage) cut(s string, sc *scratch, piece func(start, end int)) error {
	var held span // the next span may join it
	holding, previous := false, false
	release := func() {
		if held.end > held.start {
			piece(held.start, held.end)
		}
		holding = false
	}
	next := func(p span) {
		joins, holds := false, false // p joins the held span; p is held then
		switch st.behavior {
		case isolated:
		case removed:
			if p.match {
				return
			}
		case contiguous:
			joins, holds = p.match == previous, true
		case mergedWithPrevious:
			joins, holds = p.match && !previous, true
		case mergedWithNext:
			joins, holds = !p.match, p.match
		}
		previous = p.match
		switch {
		case holding && joins:
			p.start = held.start
		case holding:
			release()
		}
		if held, holding = p, true; !holds {
			release()
		}
	}
	done := 0
	err := st.find(s, sc, func(start, end int) {
		if start > done {
			next(span{done, start, st.invert})
		}
		next(span{start, end, !st.invert})
		done = end
	})
	if err != nil {
		return err
	}
	if done < len(s) {
		next(span{done, len(s), st.invert})
	}
	if holding {
		release()
	}
	return nil
}

// appendStages runs the stages from number k on the piece s, and appends the ids of the resulting pieces. first says
// that s stands at the beginning of the whole text.
func (e *Encoder) appendStages(out []kvblock.Token, k int, s string, first bool, sc *scratch) ([]kvblock.Token, error) {
	if k == len(e.stages) {
		return e.appendUncut(out, s, 0, len(s), sc), nil
	}
	st := &e.stages[k]
	if st.rewrite != nil {
		for len(sc.rewritten) <= k {
			sc.rewritten = append(sc.rewritten, nil)
		}
		buf := st.rewrite(sc.rewritten[k][:0], s, first)
		sc.rewritten[k] = buf
		if sc.rewriteRoom -= len(buf); sc.rewriteRoom < 0 {
			return out, errGrowth
		}
		s = unsafe.String(unsafe.SliceData(buf), len(buf))
	}
	if st.whole {
		return e.appendStages(out, k+1, s, first, sc)
	}
	pieces := 0
	err := st.cut(s, sc, func(start, end int) {
		if pieces++; pieces%1024 == 0 && sc.budget.stopped() || sc.budget.err != nil {
			return
		}
		var err error
		if out, err = e.appendStages(out, k+1, s[start:end], first && start == 0, sc); err != nil {
			sc.budget.err = err
		}
	})
	if err == nil {
		err = sc.budget.err
	}
	return out, err
}

// findClass finds each character of a class.
func findClass(bits class) func(s string, sc *scratch, found func(start, end int)) error {
	return func(s string, _ *scratch, found func(start, end int)) error {
		for i := 0; i < len(s); {
			c, n := classAt(s, i)
			if c&bits != 0 {
				found(i, i+n)
			}
			i += n
		}
		return nil
	}
}

// findText finds each occurrence of a text, which must not be empty.
func findText(text string) func(s string, sc *scratch, found func(start, end int)) error {
	return func(s string, _ *scratch, found func(start, end int)) error {
		for i := 0; ; {
			n := strings.Index(s[i:], text)
			if n < 0 {
				return nil
			}
			found(i+n, i+n+len(text))
			i += n + len(text)
		}
	}
}

// findScanned finds the matches of a scanner, which cover the whole text.
func findScanned(scan scanner) func(s string, sc *scratch, found func(start, end int)) error {
	return func(s string, _ *scratch, found func(start, end int)) error {
		for i := 0; i < len(s); {
			j := scan(s, i, len(s))
			found(i, j)
			i = j
		}
		return nil
	}
}

// findWords finds the pieces that Whitespace keeps: \w+|[^\w\s]+ in Rust's regex.
func findWords(s string, _ *scratch, found func(start, end int)) error {
	for i := 0; i < len(s); {
		c, n := classAt(s, i)
		end := i + n
		switch {
		case c&classWord != 0:
			end = skip(s, end, len(s), classWord)
			found(i, end)
		case c&classSpace == 0:
			end = skipNot(s, end, len(s), classWord|classSpace)
			found(i, end)
		}
		i = end
	}
	return nil
}

// metaspace replaces spaces by a marker. It puts a marker before a text without one if scheme says so.
func metaspace(marker string, scheme string) func(to []byte, s string, first bool) []byte {
	return func(to []byte, s string, first bool) []byte {
		prepend := scheme == "always" || scheme == "first" && first
		if prepend && !strings.HasPrefix(s, " ") && !strings.HasPrefix(s, marker) {
			to = append(to, marker...)
		}
		for {
			n := strings.IndexByte(s, ' ')
			if n < 0 {
				return append(to, s...)
			}
			to = append(to, s[:n]...)
			to = append(to, marker...)
			s = s[n+1:]
		}
	}
}

// prefixSpace puts a space before a text that does not begin with one.
func prefixSpace(to []byte, s string, _ bool) []byte {
	if !strings.HasPrefix(s, " ") {
		to = append(to, ' ')
	}
	return append(to, s...)
}

// printableBytes replaces each byte by the character that ByteLevel writes for it.
func printableBytes(to []byte, s string, _ bool) []byte {
	for i := range len(s) {
		to = utf8.AppendRune(to, runeOfByte[s[i]])
	}
	return to
}

// runeOfByte has the character that ByteLevel writes for each byte: printable bytes stand for themselves, and the
// others are U+0100 and up, in order. bytesOfRunes is the inverse: the byte plus one, or 0 if the character stands for
// no byte.
var runeOfByte, bytesOfRunes = func() (runes [256]rune, bytes [0x180]uint16) {
	others := rune(0x100)
	for b := range rune(256) {
		if b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE {
			runes[b] = b
		} else {
			runes[b] = others
			others++
		}
		bytes[runes[b]] = uint16(b) + 1
	}
	return runes, bytes
}()

// byteOfRune returns the byte that ByteLevel writes as r.
func byteOfRune(r rune) (byte, bool) {
	if int(r) >= len(bytesOfRunes) {
		return 0, false
	}
	return byte(bytesOfRunes[r] - 1), bytesOfRunes[r] != 0
}
