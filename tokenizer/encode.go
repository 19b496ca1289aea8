package tokenizer

import (
	"fmt"
	"sync"
	"unicode/utf8"

	"kvepp/kvblock"
)

// maxText is the longest text that is encoded, in bytes: positions inside are 32-bit.
const maxText = 1 << 30

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// append appends the ids of text. cache may be nil.
func (e *encoder) append(out []kvblock.Token, text string, special bool, cache *segmentCache) ([]kvblock.Token, error) {
	if len(text) > maxText {
		return out, fmt.Errorf("tokenizer: text of %d bytes is too long", len(text))
	}
	if !utf8.ValidString(text) {
		return out, ErrInvalidUTF8
	}
	sc := scratches.Get().(*scratch)
	if special {
		out = append(out, e.prefix...)
	}
	e.addedRaw.split(text, func(start, end int) {
		segment := text[start:end]
		if cache == nil || len(segment) < minSegment {
			out = e.appendSegment(out, segment, sc)
			return
		}
		var known bool
		if out, known = cache.get(out, segment); !known {
			before := len(out)
			out = e.appendSegment(out, segment, sc)
			cache.put(segment, out[before:])
		}
	}, func(id kvblock.Token) {
		out = append(out, id)
	})
	if special {
		out = append(out, e.suffix...)
	}
	if sc.reusable() {
		scratches.Put(sc)
	}
	return out, nil
}

// appendSegment appends the ids of text without raw added tokens. They depend on this text alone.
func (e *encoder) appendSegment(out []kvblock.Token, text string, sc *scratch) []kvblock.Token {
	text = e.normalizer.apply(text, sc)
	e.addedNormalized.split(text, func(start, end int) {
		out = e.appendPieces(out, text, start, end, sc)
	}, func(id kvblock.Token) {
		out = append(out, id)
	})
	return out
}

// appendPieces cuts s[i:end] into pieces and appends their ids.
func (e *encoder) appendPieces(out []kvblock.Token, s string, i, end int, sc *scratch) []kvblock.Token {
	switch {
	case e.scan != nil:
		for i < end {
			j := e.scan(s, i, end)
			out = e.bpe.appendPiece(out, s, i, j, sc)
			i = j
		}
	case e.deepSeek:
		scanDeepSeek(s, i, end, func(start, stop int) {
			out = e.bpe.appendPiece(out, s, start, stop, sc)
		})
	case e.bpe.marker != nil:
		for i < end {
			j := e.bpe.marker.next(s, i, end)
			out = e.bpe.appendPiece(out, s, i, j, sc)
			i = j
		}
	default:
		out = e.bpe.appendPiece(out, s, i, end, sc)
	}
	return out
}
