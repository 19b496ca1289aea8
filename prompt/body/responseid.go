package body

import (
	"mime"
	"net/url"
	"strings"
)

// StoredResponse returns the id in the path of a stored response, /v1/responses/ID, also with /cancel or /input_items
// behind it. Empty: the path is none of these.
func StoredResponse(path string) string {
	path, _, _ = strings.Cut(path, "?")
	_, id, _ := strings.Cut(path, "/v1/responses/")
	id, _, _ = strings.Cut(id, "/")
	if plain, err := url.PathUnescape(id); err == nil {
		return plain
	}
	return id
}

const (
	maxResponseID = 256     // bytes of an id
	maxBeforeID   = 1 << 20 // bytes of a body that are read for it
)

// ResponseIDReader finds the id of a response of /v1/responses in its body, in any chunking: the key "id" of the JSON
// object, or of the object "response" in an event of a stream. It takes constant memory. Not safe for concurrent use.
type ResponseIDReader struct {
	depth    int // of the object that has the id
	nested   int
	read     int  // bytes
	inString bool // inside a string literal
	escaped  bool // in a string, after an odd number of backslashes
	wantsKey bool // the next string is a key
	isKey    bool // the string is one
	inside   bool // the object at depth is the response
	list     bool // at depth there is a list
	key      string
	text     []byte // of a string above or at depth, up to one byte more than an id may have
}

// NewResponseIDReader returns a reader for a response of the given content type.
func NewResponseIDReader(contentType string) *ResponseIDReader {
	if media, _, _ := mime.ParseMediaType(contentType); media == "text/event-stream" {
		return &ResponseIDReader{depth: 2}
	}
	return &ResponseIDReader{depth: 1, inside: true}
}

// Write takes the next bytes of the body. more: the id has not come yet. Empty: the response has none that is valid.
func (r *ResponseIDReader) Write(p []byte) (id string, more bool) {
	for _, c := range p {
		if r.read++; r.read > maxBeforeID {
			return "", false
		}
		switch {
		case r.inString && r.escaped:
			r.escaped = false
		case r.inString && c == '"':
			if r.inString = false; r.isKey {
				r.key = string(r.text)
			} else if r.nested == r.depth && r.inside && !r.list && r.key == "id" {
				if len(r.text) > maxResponseID {
					return "", false
				}
				return string(r.text), false
			}
		case r.inString:
			if r.escaped = c == '\\'; r.nested <= r.depth && len(r.text) <= maxResponseID {
				r.text = append(r.text, c)
			}
		case c == '"' && r.nested > 0: // outside of JSON a stream has no strings
			r.inString, r.isKey, r.text = true, r.wantsKey && r.nested <= r.depth, r.text[:0]
		default:
			r.punctuation(c)
		}
	}
	return "", true
}

// punctuation follows the structure of the JSON outside of strings.
func (r *ResponseIDReader) punctuation(c byte) {
	switch c {
	case '{', '[':
		if r.nested++; r.nested == r.depth {
			r.list, r.inside = c == '[', r.depth == 1 || r.key == "response"
		}
		r.wantsKey = c == '{'
	case '}', ']':
		r.nested--
	case ',':
		r.wantsKey = r.nested < r.depth || !r.list
	case ':':
		r.wantsKey = false
	}
}
