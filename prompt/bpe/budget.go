package bpe

import (
	"context"

	"kvepp/kvblock"
)

// idBytes is the size of an id in memory.
const idBytes = 4

// Budget bounds an encoding in time and memory. The zero Budget bounds nothing. A Budget serves one goroutine.
type Budget struct {
	ctx  context.Context
	room int // bytes that the ids may take; 0: no limit
	// total is the length of the whole text in bytes. before is the length of the text that was encoded before the
	// current stretch. A normalizer changes lengths, so both serve only to estimate the number of ids.
	total, before int
	err           error // why the encoding stopped; nil while it runs
}

// NewBudget returns a budget for ids of at most room bytes, four bytes an id; 0 means no limit. The encoding stops soon
// after ctx ends.
func NewBudget(ctx context.Context, room int) Budget { return Budget{ctx: ctx, room: room} }

// NewIDs returns an empty slice with room for the ids of total bytes of text. likely is their probable number.
// Use it before several calls of AppendOrdinary.
func (b *Budget) NewIDs(total, likely int) []kvblock.Token {
	b.total = total
	if b.room > 0 {
		likely = min(likely, b.room/(2*idBytes))
	}
	return make([]kvblock.Token, 0, likely)
}

// take subtracts ids that the caller keeps while it encodes further texts.
func (b *Budget) take(ids []kvblock.Token) {
	if b.room > 0 {
		b.room = max(b.room-idBytes*cap(ids), 1)
	}
}

// stopped reports whether the encoding must stop. The encoder calls it once for every few thousand bytes of text.
func (b *Budget) stopped() bool {
	if b.err == nil && b.ctx != nil {
		b.err = b.ctx.Err()
	}
	return b.err != nil
}

// grow returns out with room for n more ids; the first of them begins near byte at of the current stretch. To copy
// seldom and to waste little, a new slice gets the estimated size of all ids of the text. If the budget does not
// suffice, grow returns out unchanged and stops the encoding.
func (b *Budget) grow(out []kvblock.Token, n, at int) []kvblock.Token {
	if cap(out)-len(out) >= n {
		return out
	}
	done := min(b.before+at, b.total)
	most := len(out) + n + b.total - done   // as a rule, a byte is at most one id
	size := len(out) + n + (b.total-done)/3 // English has about four bytes an id
	if done > 0 {
		size = min(most, int(float64(len(out)+n)/float64(done)*float64(b.total)*1.125))
	}
	size = max(size, len(out)+n, cap(out)+cap(out)/4)
	if left := b.room/idBytes - cap(out); b.room > 0 && size > left {
		if size = left; size < len(out)+n {
			b.err = ErrMemory
			return out
		}
	}
	longer := make([]kvblock.Token, len(out), size)
	copy(longer, out)
	return longer
}

// add appends the id of an added token, which begins at byte at of the current stretch.
func (b *Budget) add(out []kvblock.Token, id kvblock.Token, at int) []kvblock.Token {
	if len(out) == cap(out) {
		if out = b.grow(out, 1, at); len(out) == cap(out) {
			return out
		}
	}
	return append(out, id)
}

// addAll appends ids.
func (b *Budget) addAll(out, ids []kvblock.Token) []kvblock.Token {
	if out = b.grow(out, len(ids), 0); b.err != nil {
		return out
	}
	return append(out, ids...)
}
