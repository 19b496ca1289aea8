package apibody

import (
	"bytes"
	"encoding/json"
)

// Renamer puts the model's name that a client asked for in place of the one that served it, in the members "model" of
// an answer, whatever pieces it comes in. It looks at bytes, so that it works on JSON and on events alike: a member of
// that name and value deeper in an answer (an argument of a tool's call in Anthropic's API) is renamed too. Not safe
// for concurrent use.
type Renamer struct {
	served []byte // as JSON
	asked  []byte
	held   []byte // what may be the beginning of such a member; not part of any piece
}

// modelKey begins what is looked for; between it and the value stand a colon and at most maxGap blanks.
const (
	modelKey = `"model"`
	maxGap   = 16
)

// maxName is the longest name that is put into answers, in bytes: an answer may have the model's name thousands of
// times.
const maxName = 1 << 10

// NewRenamer returns one for an answer of the model served. Where the client's name is longer than 1 KiB, answers stay
// as they are.
func NewRenamer(served, asked string) *Renamer {
	if len(asked) > maxName {
		asked = served
	}
	return &Renamer{served: plainJSON(served), asked: plainJSON(asked)}
}

// Next takes a piece of the answer and returns what of it, and of what was held back before, goes on. It keeps back the
// beginning of a member that the next piece may complete, unless this is the last. The result may be the piece itself;
// the piece is not changed.
func (r *Renamer) Next(piece []byte, last bool) []byte {
	if len(r.held) > 0 {
		piece = append(r.held, piece...)
		r.held = nil
	}
	var out []byte // nil: nothing was renamed so far
	done := 0      // bytes of piece that out has
	for at := 0; ; {
		n := bytes.Index(piece[at:], []byte(modelKey))
		if n < 0 {
			if keep := begins(piece[at:], modelKey); keep > 0 && !last {
				r.hold(&piece, len(piece)-keep)
			}
			break
		}
		at += n
		from, whole, matches := r.value(piece, at+len(modelKey))
		switch {
		case matches:
			out = append(append(out, piece[done:from]...), r.asked...)
			at = from + len(r.served)
			done = at
			continue
		case !whole && !last:
			r.hold(&piece, at)
		default:
			at += len(modelKey)
			continue
		}
		break
	}
	if out == nil {
		return piece
	}
	return append(out, piece[done:]...)
}

// Rest returns what was held back, where an answer ended without a last piece.
func (r *Renamer) Rest() []byte { return r.Next(nil, true) }

// hold keeps back the end of a piece.
func (r *Renamer) hold(piece *[]byte, from int) {
	r.held = append([]byte(nil), (*piece)[from:]...)
	*piece = (*piece)[:from]
}

// value looks for the colon and the served model's name. whole: it can be told whether they are there.
func (r *Renamer) value(b []byte, at int) (from int, whole, matches bool) {
	colon := false
	for gap := 0; at < len(b); at++ {
		switch c := b[at]; {
		case c == ' ' || c == '\t' || c == '\r' || c == '\n':
			if gap++; gap > maxGap {
				return 0, true, false
			}
		case c == ':' && !colon:
			colon = true
		case colon:
			n := min(len(b)-at, len(r.served))
			if !bytes.Equal(b[at:at+n], r.served[:n]) {
				return 0, true, false
			}
			return at, n == len(r.served), n == len(r.served)
		default:
			return 0, true, false
		}
	}
	return 0, false, false
}

// begins returns how many bytes at the end of b are the beginning of text, but not all of it.
func begins(b []byte, text string) int {
	for n := min(len(b), len(text)-1); n > 0; n-- {
		if string(b[len(b)-n:]) == text[:n] {
			return n
		}
	}
	return 0
}

// plainJSON returns a text as JSON in which no character is escaped that need not be, as engines write it.
func plainJSON(text string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(text) // of a string: never fails
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
