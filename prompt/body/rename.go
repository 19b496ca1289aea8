package body

import (
	"bytes"
	"encoding/json"
)

// Renamer replaces the served model's name with the name that the client requested, in the members "model" of a
// response, in any chunking. It works on bytes, so that it handles JSON and event streams alike. Members of that name
// and value deeper in a response (an argument of a tool call in Anthropic's API) are renamed too. Not safe for
// concurrent use.
type Renamer struct {
	served []byte // quoted as JSON, like asked
	asked  []byte
	held   []byte // a possible beginning of such a member, held back from the output
}

// modelKey begins a member to rename. Between it and the value there are a colon and at most maxGap white-space bytes.
const (
	modelKey = `"model"`
	maxGap   = 16
)

// maxName is the longest name that is put into responses, in bytes. A response may contain the model's name thousands
// of times.
const maxName = 1 << 10

// NewRenamer returns a Renamer for a response of the model served. If the client's name is longer than 1 KiB, the
// response stays unchanged.
func NewRenamer(served, asked string) *Renamer {
	if len(asked) > maxName {
		asked = served
	}
	return &Renamer{served: plainJSON(served), asked: plainJSON(asked)}
}

// Next takes a piece of the response and returns the bytes to send on, bytes held back before included. It holds back a
// member that the next piece may complete, unless last is set. The result may alias the piece. The piece is not
// changed.
func (r *Renamer) Next(piece []byte, last bool) []byte {
	if len(r.held) > 0 {
		piece = append(r.held, piece...)
		r.held = nil
	}
	var out []byte // nil until something is renamed
	done := 0      // bytes of piece that are in out
	for at := 0; ; {
		n := bytes.Index(piece[at:], []byte(modelKey))
		if n < 0 {
			if keep := partialSuffix(piece[at:], modelKey); keep > 0 && !last {
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

// Rest returns the bytes held back, if a response ended without a last piece.
func (r *Renamer) Rest() []byte { return r.Next(nil, true) }

// hold holds back the end of a piece.
func (r *Renamer) hold(piece *[]byte, from int) {
	r.held = append([]byte(nil), (*piece)[from:]...)
	*piece = (*piece)[:from]
}

// value looks for the colon and the served model's name from at on. whole means that b is long enough to decide.
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

// partialSuffix returns the length of the longest proper prefix of text that b ends with.
func partialSuffix(b []byte, text string) int {
	for n := min(len(b), len(text)-1); n > 0; n-- {
		if string(b[len(b)-n:]) == text[:n] {
			return n
		}
	}
	return 0
}

// plainJSON returns a text as JSON with no needless escapes, as engines write it.
func plainJSON(text string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(text) // cannot fail for a string
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
