package bpe

import (
	"slices"
	"strings"
)

// CertainPrefix finds a place to cut a text so that no text behind the cut can change the ids before it: behind an
// added token, or between two words. It serves the text before an image. The engine replaces the image by tokens that
// only it knows, and the last token before the image may join them.
type CertainPrefix struct {
	boundaries, raw *addedTokens // the encoder's
	longest         int          // bytes of the longest of them
	letters         string       // behind which text is cut before a space and another letter: see cutsBehind
}

// NewCertainPrefix returns the CertainPrefix of an encoder.
func NewCertainPrefix(e *Encoder) *CertainPrefix {
	c := &CertainPrefix{boundaries: e.boundaries, raw: e.addedRaw, letters: e.cutsBehind()}
	for _, token := range slices.Concat(e.boundaries.all(), e.addedRaw.all()) {
		c.longest = max(c.longest, len(token.content))
	}
	return c
}

// End returns the length of a prefix of text[:place] whose ids do not depend on the text from place on: for every text
// t, the ids of text[:place]+t begin with those of text[:end].
func (c *CertainPrefix) End(text string, place int) int {
	open, end := c.open(text, place), 0
	behind := func(token *addedToken, at int) {
		if at <= open && (at < place || !token.singleWord) { // else the following text can decide against the token
			end = max(end, at)
		}
	}
	for cuts := c.boundaries.cuts(text[:place]); ; {
		start, stop, token := cuts.next()
		for within := c.raw.cuts(text[start:stop]); ; {
			_, _, token := within.next()
			if token == nil {
				break
			}
			behind(token, start+within.from)
		}
		if token == nil {
			break
		}
		behind(token, cuts.from)
	}
	for i := place - 2; i > end && c.letters != ""; i-- {
		if text[i] == ' ' && isASCIILetter(text[i+1]) && strings.IndexByte(c.letters, text[i-1]) >= 0 {
			return i
		}
	}
	return end
}

// open returns the first position in text[:end] at which an added token that reaches beyond end may begin; end if there
// is none.
func (c *CertainPrefix) open(text string, end int) int {
	for i := max(0, end-c.longest+1); i < end; i++ {
		if c.boundaries.reaches(text[i:end]) || c.raw.reaches(text[i:end]) {
			return i
		}
	}
	return end
}

// cutsBehind returns the ASCII letters behind which text is always cut before a space and another such letter: no added
// token holds these, no normalization moves them, and every scanner begins a piece with that space; or, without a
// pre-tokenizer, no merge joins the two.
func (e *Encoder) cutsBehind() string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	scans, space := e.scan != nil || e.deepSeek, ""
	if e.spacing != nil {
		space = " "
	}
	for i := range e.normalizer {
		switch step := &e.normalizer[i]; {
		case step.isForm || step.prefix != "" || e.spacing != nil:
		case step.replacesSpace() && !scans:
			space = spaceMarker
		default:
			return ""
		}
	}
	for i := range e.stages {
		if e.spacing == nil && (space == "" || !e.stages[i].onSpace) {
			return ""
		}
	}
	for _, token := range slices.Concat(e.boundaries.all(), e.addedRaw.all(), e.addedNormalized.all()) {
		if joinsWords(token.content, " ") || space != "" && joinsWords(token.content, space) {
			return ""
		}
	}
	switch {
	case scans:
		return letters
	case space == "" || e.model.joins == nil:
		return ""
	}
	return strings.Map(func(letter rune) rune {
		if pair := string(letter) + space; e.model.joins.next(pair, 0, len(pair)) > 1 {
			return -1
		}
		return letter
	}, letters)
}

// joinsWords reports whether s holds an ASCII letter with a space behind it.
func joinsWords(s, space string) bool {
	for i := 1; i < len(s); i++ {
		if isASCIILetter(s[i-1]) && strings.HasPrefix(s[i:], space) {
			return true
		}
	}
	return false
}

func isASCIILetter(b byte) bool { return 'a' <= b|0x20 && b|0x20 <= 'z' }

// all returns the tokens.
func (t *addedTokens) all() []addedToken {
	if t == nil {
		return nil
	}
	return t.tokens
}

// reaches reports whether s, which is not empty, is a proper prefix of a token.
func (t *addedTokens) reaches(s string) bool {
	if t == nil {
		return false
	}
	node := t.root[s[0]]
	for i := 1; i < len(s) && node != 0; i++ {
		node = t.step(node, s[i])
	}
	return node != 0 && t.nodes[node].more > 0
}
