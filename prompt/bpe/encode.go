package bpe

import (
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"unicode/utf8"

	"kvepp/kvblock"
)

var (
	// ErrMemory says that the ids take more memory than the Budget has.
	ErrMemory = errors.New("bpe: the request's messages, text or token ids take too much memory for its bytes")
	// ErrInvalidUTF8 says that the text is not valid UTF-8.
	ErrInvalidUTF8 = errors.New("bpe: text is not valid UTF-8")
)

// maxText is the longest text that is encoded, in bytes: positions inside are 32-bit.
const maxText = 1 << 30

// borrow returns a scratch; giveBack takes it back. The encoder keeps as many as can be in use at the same time.
func (e *Encoder) borrow() *scratch {
	select {
	case sc := <-e.idle:
		return sc
	default:
		return newScratch()
	}
}

func (e *Encoder) giveBack(sc *scratch) {
	sc.budget = Budget{} // the budget refers to a request
	sc.trim()
	select {
	case e.idle <- sc:
	default:
	}
}

// Encode returns the ids of a text. special puts the model's own tokens around it, such as <s>. The ids count in the
// budget.
//
// Errors: ErrInvalidUTF8, ErrMemory, the error of the budget's context, and errors for texts that this package does not
// encode: longer than 1 GiB, or too hard for the model's pattern.
func (e *Encoder) Encode(b *Budget, text string, special bool) ([]kvblock.Token, error) {
	likely := len(text)/3 + 16
	if b.room > 0 {
		likely = min(likely, b.room/(2*idBytes))
	}
	ids, err := e.append(*b, make([]kvblock.Token, 0, likely), text, special, e.segments)
	b.take(ids)
	return ids, err
}

// AppendEncode is Encode without a budget that appends to ids and returns the longer slice. On an error it returns ids
// unchanged.
func (e *Encoder) AppendEncode(ids []kvblock.Token, text string, special bool) ([]kvblock.Token, error) {
	return e.append(Budget{}, ids, text, special, e.segments)
}

// AppendOrdinary appends the ids of a text in which it recognises no added token. A text without any has the same ids
// as in AppendEncode, so the two share their cache. Errors are those of Encode.
func (e *Encoder) AppendOrdinary(b *Budget, out []kvblock.Token, text string) ([]kvblock.Token, error) {
	if len(text) > maxText || !utf8.ValidString(text) {
		return out, ErrInvalidUTF8
	}
	sc := e.borrow()
	defer e.giveBack(sc)
	sc.budget = *b
	sc.searched = 0
	b.before += len(text)
	remembered := len(text) >= minSegment && e.segments != nil
	var key segmentKey
	if remembered {
		var known bool
		if out, key, known = e.segments.get(out, text, &sc.budget); known {
			return out, sc.budget.err
		}
	}
	before := len(out)
	longer, err := e.appendPieces(out, text, 0, len(text), false, sc)
	if err == nil {
		err = sc.budget.err
	}
	if err != nil {
		return out, err
	}
	if remembered {
		e.segments.put(key, text, longer[before:])
	}
	return longer, nil
}

// append appends the ids of text. b bounds the work. cache may be nil. On an error append returns out unchanged.
func (e *Encoder) append(
	b Budget, out []kvblock.Token, text string, special bool, cache *segmentCache,
) ([]kvblock.Token, error) {
	if len(text) > maxText {
		return out, fmt.Errorf("bpe: text of %d bytes is too long", len(text))
	}
	if !utf8.ValidString(text) {
		return out, ErrInvalidUTF8
	}
	if e.cutAt != "" && strings.Contains(text, e.cutAt) {
		return out, fmt.Errorf("bpe: the model's tokenizer makes two texts of one at %q", e.cutAt)
	}
	if e.kimiLimits && !withinKimiLimits(text) {
		return out, fmt.Errorf(
			"bpe: this model's tokenizer cuts a text of %d bytes, or a long run in it, in a way that is not "+
				"reproduced here", len(text))
	}
	sc := e.borrow()
	sc.budget = b
	sc.searched = 0
	sc.budget.total = len(text)
	before := len(out)
	if special {
		out = append(out, e.prefix...)
	}
	var err error
	for cuts := e.boundaries.cuts(text); err == nil; {
		start, end, token := cuts.next()
		sc.budget.before = start
		if end > start {
			out, err = e.appendSegment(out, text[start:end], start == 0, sc, cache)
		}
		if token == nil || err != nil {
			break
		}
		out = sc.budget.add(out, token.id, end-start)
	}
	if err == nil {
		err = sc.budget.err
	}
	e.giveBack(sc)
	if err != nil {
		return out[:before], err
	}
	if special {
		out = append(out, e.suffix...)
	}
	return out, nil
}

// appendSegment appends the ids of the text between two boundaries. They depend on this text alone, and, with
// e.firstDiffers, on whether it is the first of a prompt; so they are remembered, if cache is not nil.
func (e *Encoder) appendSegment(
	out []kvblock.Token, text string, first bool, sc *scratch, cache *segmentCache,
) ([]kvblock.Token, error) {
	if len(text) < minSegment || first && e.firstDiffers {
		cache = nil
	}
	var key segmentKey
	if cache != nil {
		var known bool
		if out, key, known = cache.get(out, text, &sc.budget); known {
			return out, sc.budget.err
		}
	}
	before := len(out)
	if e.spacing != nil {
		out = e.appendSpaced(out, text, first, sc)
	} else {
		var err error
		if out, err = e.appendNormalized(out, text, first, sc); err != nil {
			return out, err
		}
	}
	if sc.budget.err != nil {
		return out, sc.budget.err
	}
	if cache != nil {
		cache.put(key, text, out[before:])
	}
	return out, nil
}

// appendNormalized appends the ids of text without boundaries, for a model without a spacing.
func (e *Encoder) appendNormalized(out []kvblock.Token, text string, first bool, sc *scratch) ([]kvblock.Token, error) {
	for cuts := e.addedRaw.cuts(text); ; {
		start, end, token := cuts.next()
		if end > start {
			var err error
			if out, err = e.appendStretch(out, text[start:end], first && start == 0, sc); err != nil {
				return out, err
			}
		}
		if token == nil || sc.budget.err != nil {
			return out, nil
		}
		out = sc.budget.add(out, token.id, start)
	}
}

// appendStretch appends the ids of text without raw added tokens, for a model without a spacing.
func (e *Encoder) appendStretch(out []kvblock.Token, text string, first bool, sc *scratch) ([]kvblock.Token, error) {
	text, err := e.normalizer.apply(text, sc)
	if err != nil {
		return out, err
	}
	for cuts := e.addedNormalized.cuts(text); ; {
		start, end, token := cuts.next()
		if end > start {
			if out, err = e.appendPieces(out, text, start, end, first && start == 0, sc); err != nil {
				return out, err
			}
		}
		if token == nil || sc.budget.err != nil {
			return out, nil
		}
		out = sc.budget.add(out, token.id, start)
	}
}

// appendPieces cuts s[i:end] into pieces and appends their ids.
func (e *Encoder) appendPieces(
	out []kvblock.Token, s string, i, end int, first bool, sc *scratch,
) ([]kvblock.Token, error) {
	switch {
	case e.scan != nil || e.deepSeek:
		out = e.appendCut(out, s, i, end, sc)
	case len(e.stages) > 0:
		// The bound counts the bytes that every stage writes.
		sc.rewriteRoom = len(e.stages)*maxGrowth*(end-i) + maxGrowthBase
		return e.appendStages(out, 0, s[i:end], first, sc)
	default:
		out = e.appendUncut(out, s, i, end, sc)
	}
	return out, nil
}

// appendCut is appendPieces for expressions that have a scanner.
func (e *Encoder) appendCut(out []kvblock.Token, s string, i, end int, sc *scratch) []kvblock.Token {
	part := i
	for i < end && sc.budget.err == nil {
		if e.windows != nil && s[i] < 0x80 && i+1 < end && s[i+1] < 0x80 {
			starts, size := e.windows.starts(s, i, end)
			if i+size < end {
				size = bits.Len64(starts) - 1
			}
			if size > 0 {
				out = e.model.addAll(out, s, i, size, starts, sc)
				i += size
				continue
			}
		}
		j := 0
		if e.deepSeek {
			j, part = scanDeepSeek(s, i, end, part)
		} else {
			j = e.scan(s, i, end)
		}
		out = e.model.add(out, s, i, j, sc)
		i = j
	}
	return e.model.flush(out, s, sc)
}
