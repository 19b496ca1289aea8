package tokenizer

import (
	"context"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// work is what bounds one encoding, and how far it is.
type work struct {
	ctx  context.Context
	room int // bytes that the ids may take; 0: any number
	// total is the length of the whole text, and before that of what was encoded before the stretch that is being
	// encoded, in bytes. Text that a normalizer rewrote has another length: they serve to foretell how many ids there
	// will be.
	total, before int
	err           error // why the encoding stops, once it does
}

// workFor returns the work of encoding what a request became: a text of so many bytes, which counts in what the request
// may take, or pieces of its body.
func workFor(ctx context.Context, request *apibody.Request, textBytes int) work {
	w := work{ctx: ctx}
	if request.RemainingCost != 0 { // it was parsed
		w.room = max(request.RemainingCost-textBytes-textBytes/4, 1)
	}
	return w
}

// take counts ids that are kept while others are made.
func (w *work) take(ids []kvblock.Token) {
	if w.room > 0 {
		w.room = max(w.room-idBytes*cap(ids), 1)
	}
}

// halted reports whether the encoding stops. It is asked once for each few thousand bytes of text.
func (w *work) halted() bool {
	if w.err == nil && w.ctx != nil {
		w.err = w.ctx.Err()
	}
	return w.err != nil
}

// grow returns out with room for n more ids, of which the first begins at about a byte of the stretch that is being
// encoded. Where it needs more memory it foretells how much all of the text needs, so that ids are copied seldom and
// little room is left over. Without the memory it returns out, and the encoding stops.
func (w *work) grow(out []kvblock.Token, n, at int) []kvblock.Token {
	if cap(out)-len(out) >= n {
		return out
	}
	done := min(w.before+at, w.total)
	most := len(out) + n + w.total - done   // a byte is one id at most, as a rule
	size := len(out) + n + (w.total-done)/3 // English has some four bytes an id
	if done > 0 {
		size = min(most, int(float64(len(out)+n)/float64(done)*float64(w.total)*1.125))
	}
	size = max(size, len(out)+n, cap(out)+cap(out)/4)
	if left := w.room/idBytes - cap(out); w.room > 0 && size > left {
		if size = left; size < len(out)+n {
			w.err = ErrMemory
			return out
		}
	}
	longer := make([]kvblock.Token, len(out), size)
	copy(longer, out)
	return longer
}

// idBytes is what an id takes.
const idBytes = 4

// add appends the id of an added token, of which the stretch has n bytes before it.
func (w *work) add(out []kvblock.Token, id kvblock.Token, n int) []kvblock.Token {
	if len(out) == cap(out) {
		if out = w.grow(out, 1, n); len(out) == cap(out) {
			return out
		}
	}
	return append(out, id)
}

// addAll appends ids that are known.
func (w *work) addAll(out, ids []kvblock.Token) []kvblock.Token {
	if out = w.grow(out, len(ids), 0); w.err != nil {
		return out
	}
	return append(out, ids...)
}

// encode returns the ids of a text; see Encode. What they take counts in w.
func (m *Model) encode(w *work, text string, special bool) ([]kvblock.Token, error) {
	likely := len(text)/3 + 16
	if w.room > 0 {
		likely = min(likely, w.room/(2*idBytes))
	}
	ids, err := m.encoder.append(*w, make([]kvblock.Token, 0, likely), text, special, m.segments)
	w.take(ids)
	return ids, err
}
