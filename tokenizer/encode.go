package tokenizer

import (
	"fmt"
	"math/bits"
	"unicode/utf8"

	"kvepp/kvblock"
)

// maxText is the longest text that is encoded, in bytes: positions inside are 32-bit.
const maxText = 1 << 30

// borrow returns a scratch, which giveBack takes back. As many are kept as can be in use without waiting.
func (e *encoder) borrow() *scratch {
	select {
	case sc := <-e.idle:
		return sc
	default:
		return newScratch()
	}
}

func (e *encoder) giveBack(sc *scratch) {
	sc.trim()
	select {
	case e.idle <- sc:
	default:
	}
}

// append appends the ids of text. cache may be nil. w bounds the work, and says how it ended.
func (e *encoder) append(
	w work,
	out []kvblock.Token,
	text string,
	special bool,
	cache *segmentCache,
) ([]kvblock.Token, error) {
	if len(text) > maxText {
		return out, fmt.Errorf("tokenizer: text of %d bytes is too long", len(text))
	}
	if !utf8.ValidString(text) {
		return out, ErrInvalidUTF8
	}
	if e.kimiLimits && !withinKimiLimits(text) {
		return out, fmt.Errorf(
			"tokenizer: this model's tokenizer cuts a text of %d bytes, or a long run in it, in a way that is not "+
				"reproduced here",
			len(text),
		)
	}
	sc := e.borrow()
	sc.work = w
	sc.searched = 0
	sc.work.total = len(text)
	before := len(out)
	if special {
		out = append(out, e.prefix...)
	}
	var err error
	for cuts := e.boundaries.cuts(text); err == nil; {
		start, end, token := cuts.next()
		sc.work.before = start
		if end > start {
			out, err = e.appendSegment(out, text[start:end], start == 0, sc, cache)
		}
		if token == nil || err != nil {
			break
		}
		out = sc.work.add(out, token.id, end-start)
	}
	if err == nil {
		err = sc.work.err
	}
	sc.work = work{} // which holds a request
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
func (e *encoder) appendSegment(
	out []kvblock.Token,
	text string,
	first bool,
	sc *scratch,
	cache *segmentCache,
) ([]kvblock.Token, error) {
	if len(text) < minSegment || first && e.firstDiffers {
		cache = nil
	}
	var key segmentKey
	if cache != nil {
		var known bool
		if out, key, known = cache.get(out, text, &sc.work); known {
			return out, sc.work.err
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
	if sc.work.err != nil {
		return out, sc.work.err
	}
	if cache != nil {
		cache.put(key, text, out[before:])
	}
	return out, nil
}

// appendNormalized appends the ids of text without boundaries, for a model without a spacing.
func (e *encoder) appendNormalized(out []kvblock.Token, text string, first bool, sc *scratch) ([]kvblock.Token, error) {
	for cuts := e.addedRaw.cuts(text); ; {
		start, end, token := cuts.next()
		if end > start {
			var err error
			if out, err = e.appendStretch(out, text[start:end], first && start == 0, sc); err != nil {
				return out, err
			}
		}
		if token == nil || sc.work.err != nil {
			return out, nil
		}
		out = sc.work.add(out, token.id, start)
	}
}

// appendStretch appends the ids of text without raw added tokens, for a model without a spacing.
func (e *encoder) appendStretch(out []kvblock.Token, text string, first bool, sc *scratch) ([]kvblock.Token, error) {
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
		if token == nil || sc.work.err != nil {
			return out, nil
		}
		out = sc.work.add(out, token.id, start)
	}
}

// appendPieces cuts s[i:end] into pieces and appends their ids.
func (e *encoder) appendPieces(
	out []kvblock.Token,
	s string,
	i, end int,
	first bool,
	sc *scratch,
) ([]kvblock.Token, error) {
	switch {
	case e.scan != nil || e.deepSeek:
		out = e.appendCut(out, s, i, end, sc)
	case len(e.stages) > 0:
		// What each stage rewrites counts.
		sc.rewriteRoom = len(e.stages)*maxGrowth*(end-i) + maxGrowthBase
		return e.appendStages(out, 0, s[i:end], first, sc)
	default:
		out = e.appendUncut(out, s, i, end, sc)
	}
	return out, nil
}

// appendCut is appendPieces for expressions that have a scanner.
func (e *encoder) appendCut(out []kvblock.Token, s string, i, end int, sc *scratch) []kvblock.Token {
	part := i
	for i < end && sc.work.err == nil {
		if e.windows != nil && s[i] < 0x80 && i+1 < end && s[i+1] < 0x80 {
			starts, size := e.windows.starts(s, i, end)
			if i+size < end {
				size = bits.Len64(starts) - 1
			}
			if size > 0 {
				out = e.bpe.addAll(out, s, i, size, starts, sc)
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
		out = e.bpe.add(out, s, i, j, sc)
		i = j
	}
	return e.bpe.flush(out, s, sc)
}

// EngineRuns returns how many texts (pieces, where patterns follow one another) went through the general engine for
// patterns, which is exact but an order of magnitude slower, since the model was loaded. It is 0 for models whose
// pattern has a scanner of its own; see GeneralPattern.
func (m *Model) EngineRuns() int64 { return m.encoder.engineRuns.Load() }

// GeneralPattern reports whether the model's pre-tokenizer needs the general engine, for its caller to say so once.
func (m *Model) GeneralPattern() bool {
	for i := range m.encoder.stages {
		if m.encoder.stages[i].engine {
			return true
		}
	}
	return false
}
