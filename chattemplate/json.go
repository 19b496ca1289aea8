package chattemplate

import (
	"encoding/binary"
	"fmt"
	"math/big"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

const (
	// MaxJSONDepth is how deep arrays and objects may nest.
	MaxJSONDepth = 500

	// maxIntDigits is the longest integer Python's json reads (sys.int_info.default_max_str_digits).
	maxIntDigits = 4300
)

// SyntaxError says why a body is not JSON.
type SyntaxError struct {
	// Offset is the byte at which reading failed, from 0; the body's length when it ended too early.
	Offset int
	// Reason completes the sentence "invalid JSON at byte 12: ...".
	Reason string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Reason)
}

// ParseJSON reads one JSON value (RFC 8259) in a single pass, keeping the order of keys and the difference between
// integers and floats, which a template can print. It is strict: no trailing text, no invalid UTF-8, no lone
// surrogates, no numbers that Go's float64 cannot hold. Of duplicate keys the last value wins, at the first one's
// place, as in Python. Integers beyond int64 are kept exactly.
//
// Strings without escapes alias body: body must not be modified while any value from it is in use, and stays in memory
// as long. Strings with escapes share memory too. Every error is a *SyntaxError.
func ParseJSON(body []byte) (any, error) {
	return parseJSON(body, nil)
}

// ParseJSONAround reads as strictly as ParseJSON, but leaves long strings with escapes as they are written if they are, at any
// depth, in a field of the outermost object for whose key left reports true: for those who do not read what they say.
func ParseJSONAround(body []byte, left func(key string) bool) (any, error) {
	return parseJSON(body, left)
}

func parseJSON(body []byte, left func(key string) bool) (any, error) {
	p := jsonParser{text: unsafe.String(unsafe.SliceData(body), len(body)), open: make([]any, 0, 64), left: left}
	if !utf8.Valid(body) {
		return nil, &SyntaxError{Offset: firstInvalidUTF8(p.text), Reason: "not valid UTF-8"}
	}
	v, err := p.value()
	if err != nil {
		return nil, err
	}
	p.skipSpace()
	if p.pos != len(p.text) {
		return nil, p.fail("unexpected text after the value")
	}
	return v, nil
}

func firstInvalidUTF8(s string) int {
	for i, r := range s {
		if r == utf8.RuneError {
			if _, size := utf8.DecodeRuneInString(s[i:]); size == 1 {
				return i
			}
		}
	}
	return len(s)
}

type jsonParser struct {
	text  string
	pos   int
	depth int
	// open holds the keys and values of the objects, and the items of the lists, that have not ended: the innermost last.
	open []any
	// decoded is what is left of the memory for strings with escapes; see room.
	decoded []byte
	// left says whose strings may stay as they are written, and asWritten that such a field is being read.
	left      func(key string) bool
	asWritten bool
}

func (p *jsonParser) fail(reason string) error { return p.failAt(p.pos, reason) }

func (p *jsonParser) failAt(pos int, reason string) error {
	if pos >= len(p.text) {
		return &SyntaxError{Offset: len(p.text), Reason: "unexpected end"}
	}
	return &SyntaxError{Offset: pos, Reason: reason}
}

func (p *jsonParser) skipSpace() {
	for p.pos < len(p.text) {
		switch p.text[p.pos] {
		case ' ', '\n', '\t', '\r':
			p.pos++
		default:
			return
		}
	}
}

// accept skips white space and then the byte c if it is next.
func (p *jsonParser) accept(c byte) bool {
	p.skipSpace()
	if p.pos < len(p.text) && p.text[p.pos] == c {
		p.pos++
		return true
	}
	return false
}

func (p *jsonParser) value() (any, error) {
	p.skipSpace()
	if p.pos >= len(p.text) {
		return nil, p.fail("")
	}
	switch c := p.text[p.pos]; {
	case c == '"':
		text, err := p.stringValue()
		return boxed(text), err
	case c == '{':
		return p.object()
	case c == '[':
		return p.array()
	case c == '-' || isDigit(c):
		return p.number()
	case c == 't':
		return true, p.literal("true")
	case c == 'f':
		return false, p.literal("false")
	case c == 'n':
		return nil, p.literal("null")
	}
	return nil, p.fail("expected a value")
}

func (p *jsonParser) literal(word string) error {
	if len(p.text)-p.pos < len(word) || p.text[p.pos:p.pos+len(word)] != word {
		return p.fail("expected " + word)
	}
	p.pos += len(word)
	return nil
}

func (p *jsonParser) enter() error {
	if p.depth++; p.depth > MaxJSONDepth {
		return p.fail(fmt.Sprintf("nested deeper than %d", MaxJSONDepth))
	}
	p.pos++
	return nil
}

func (p *jsonParser) object() (any, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	if p.accept('}') {
		p.depth--
		return &Dict{}, nil
	}
	first := len(p.open)
	var d *Dict // nil while the object is small
	for {
		p.skipSpace()
		if p.pos >= len(p.text) || p.text[p.pos] != '"' {
			return nil, p.fail("expected a key in double quotes")
		}
		key, err := p.string()
		if err != nil {
			return nil, err
		}
		if !p.accept(':') {
			return nil, p.fail("expected ':' after the key")
		}
		if p.depth == 1 && p.left != nil {
			p.asWritten = p.left(key)
		}
		v, err := p.value()
		if err != nil {
			return nil, err
		}
		if d == nil && len(p.open)-first == 2*smallDict {
			d = p.close(first)
		}
		if d != nil {
			d.Set(key, v)
		} else {
			p.set(first, key, v)
		}
		if p.accept(',') {
			continue
		}
		if !p.accept('}') {
			return nil, p.fail("expected ',' or '}'")
		}
		p.depth--
		if d == nil {
			d = p.close(first)
		}
		return d, nil
	}
}

// set puts a value under a key of the object whose keys and values are p.open[first:].
func (p *jsonParser) set(first int, key string, v any) {
	for i := first; i < len(p.open); i += 2 {
		if p.open[i] == key {
			p.open[i+1] = v
			return
		}
	}
	p.open = append(p.open, boxed(key), v)
}

// close returns the object whose keys and values are p.open[first:], and takes them away.
func (p *jsonParser) close(first int) *Dict {
	n := (len(p.open) - first) / 2
	both := make([]any, 2*n)
	d := &Dict{keys: both[:n:n], values: both[n:]}
	for i := range n {
		d.keys[i], d.values[i] = p.open[first+2*i], p.open[first+2*i+1]
	}
	p.open = p.open[:first]
	return d
}

func (p *jsonParser) array() (any, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	if p.accept(']') {
		p.depth--
		return &List{}, nil
	}
	first := len(p.open)
	for {
		v, err := p.value()
		if err != nil {
			return nil, err
		}
		p.open = append(p.open, v)
		if p.accept(',') {
			continue
		}
		if !p.accept(']') {
			return nil, p.fail("expected ',' or ']'")
		}
		p.depth--
		l := &List{Items: slices.Clone(p.open[first:])}
		p.open = p.open[:first]
		return l, nil
	}
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// digits skips digits and reports whether there was one.
func (p *jsonParser) digits() bool {
	start := p.pos
	for p.pos < len(p.text) && isDigit(p.text[p.pos]) {
		p.pos++
	}
	return p.pos > start
}

func (p *jsonParser) number() (any, error) {
	start := p.pos
	if p.text[p.pos] == '-' {
		p.pos++
	}
	first := p.pos
	if !p.digits() {
		return nil, p.fail("expected a digit")
	}
	if p.text[first] == '0' && p.pos > first+1 {
		return nil, p.failAt(first+1, "a number must not start with 0")
	}
	integer := true
	if p.pos < len(p.text) && p.text[p.pos] == '.' {
		integer = false
		p.pos++
		if !p.digits() {
			return nil, p.fail("expected a digit after '.'")
		}
	}
	if p.pos < len(p.text) && p.text[p.pos]|0x20 == 'e' {
		integer = false
		p.pos++
		if p.pos < len(p.text) && (p.text[p.pos] == '+' || p.text[p.pos] == '-') {
			p.pos++
		}
		if !p.digits() {
			return nil, p.fail("expected a digit in the exponent")
		}
	}
	literal := p.text[start:p.pos]
	if !integer {
		f, err := strconv.ParseFloat(literal, 64)
		if err != nil {
			return nil, p.failAt(start, "number out of range")
		}
		return f, nil
	}
	if n, err := strconv.ParseInt(literal, 10, 64); err == nil {
		return n, nil
	}
	if p.pos-first > maxIntDigits {
		return nil, p.failAt(start, "number too long")
	}
	n, ok := new(big.Int).SetString(literal, 10)
	if !ok {
		return nil, p.failAt(start, "expected a number")
	}
	return n, nil
}

func (p *jsonParser) string() (string, error) {
	start := p.pos + 1
	end := plainEnd(p.text, start)
	if end < len(p.text) && p.text[end] == '"' {
		p.pos = end + 1
		return p.text[start:end], nil
	}
	return p.decode(start, end)
}

// longString is from how many bytes on a string may stay as it is written. Shorter ones may name something.
const longString = 256

// stringValue reads a string that is no key.
func (p *jsonParser) stringValue() (string, error) {
	if !p.asWritten {
		return p.string()
	}
	s, start := p.text, p.pos+1
	for i := start; ; {
		i = plainEnd(s, i)
		switch {
		case i == len(s) || s[i] < 0x20:
			return p.decode(start, i) // which says what is wrong
		case s[i] == '"':
			if i-start < longString {
				return p.string()
			}
			p.pos = i + 1
			return s[start:i], nil
		case i+1 < len(s) && shortEscapes[s[i+1]] != 0:
			i += 2
		default:
			size, _, reason := unescape(s[i:])
			if size == 0 {
				return "", p.failAt(i, reason)
			}
			i += size
		}
	}
}

const (
	eachByte = 0x0101010101010101
	highBits = 0x8080808080808080
)

// special marks, of eight bytes of a text, the first that a string cannot hold as is: a quote, a backslash or a control
// character. Its lowest bit that is set is the high bit of that byte; 0 means none. Higher bits mean nothing.
func special(w uint64) uint64 {
	quote, slash := w^(eachByte*'"'), w^(eachByte*'\\')
	return ((quote-eachByte)&^quote | (slash-eachByte)&^slash | (w-eachByte*0x20)&^w) & highBits
}

// load8 returns the eight bytes from s[i] on, which must be there, the first in the lowest bits.
func load8(s string, i int) uint64 {
	return binary.LittleEndian.Uint64(unsafe.Slice(unsafe.StringData(s[i:i+8]), 8))
}

// plainEnd returns the position at or after i of the first byte that a string cannot hold as is; the text's length if
// there is none.
func plainEnd(s string, i int) int {
	for ; i+16 <= len(s); i += 16 {
		if hit := special(load8(s, i)); hit != 0 {
			return i + bits.TrailingZeros64(hit)/8
		}
		if hit := special(load8(s, i+8)); hit != 0 {
			return i + 8 + bits.TrailingZeros64(hit)/8
		}
	}
	for ; i < len(s); i++ {
		if c := s[i]; c == '"' || c == '\\' || c < 0x20 {
			return i
		}
	}
	return i
}

// decode returns the string that begins at start, of which the text up to end is plain and the byte there is not.
func (p *jsonParser) decode(start, end int) (string, error) {
	s := p.text
	dst := p.room(end - start)
	n := copy(dst, s[start:end])
	for i := end; ; {
		if n+16 > len(dst) { // at most once for a body: what is left of this serves all strings that follow
			dst = slices.Grow(dst[:n], len(s)-i+16)
			dst = dst[:cap(dst)]
		}
		// Eight bytes are copied whatever they are, and count as far as they are plain.
		if i+8 <= len(s) {
			w := load8(s, i)
			binary.LittleEndian.PutUint64(dst[n:], w)
			plain := bits.TrailingZeros64(special(w)) / 8
			n += plain
			i += plain
			if plain == 8 {
				continue
			}
		} else {
			plain := plainEnd(s, i) - i
			n += copy(dst[n:], s[i:i+plain])
			i += plain
			if i == len(s) {
				return "", p.failAt(i, "")
			}
		}
		switch s[i] {
		case '"':
			p.pos = i + 1
			p.decoded = dst[n:]
			return unsafe.String(unsafe.SliceData(dst), n), nil
		case '\\':
			if i+1 < len(s) && shortEscapes[s[i+1]] != 0 {
				dst[n] = shortEscapes[s[i+1]]
				n++
				i += 2
				continue
			}
			size, r, reason := unescape(s[i:])
			if size == 0 {
				return "", p.failAt(i, reason)
			}
			n += utf8.EncodeRune(dst[n:], r)
			i += size
		default:
			return "", p.failAt(i, "control character in a string")
		}
	}
}

const (
	// decodedChunk is the memory that strings with escapes share, at most, in bytes. A longer one has its own.
	decodedChunk = 64 << 10
	// decodedLeast is how little of it is left to the next string, which otherwise begins a new one.
	decodedLeast = 1 << 10
)

// room returns memory for a string that has an escape after plain bytes.
func (p *jsonParser) room(plain int) []byte {
	left := len(p.text) - p.pos
	if need := min(left, max(plain, decodedLeast)) + 16; len(p.decoded) < need {
		p.decoded = make([]byte, max(need, min(left+16, decodedChunk)))
	}
	return p.decoded
}

// shortEscapes are the escapes of one byte after the backslash, and what they stand for; 0 for bytes that are none.
var shortEscapes = [256]byte{'n': '\n', 't': '\t', 'r': '\r', 'b': '\b', 'f': '\f', '"': '"', '\\': '\\', '/': '/'}

// unescape decodes the escape sequence s starts with, which is none of shortEscapes. It returns its length, or 0 and the
// reason when it is not one.
func unescape(s string) (size int, r rune, reason string) {
	switch {
	case len(s) < 2:
		return 0, 0, "unfinished escape"
	case s[1] != 'u':
		return 0, 0, "unknown escape"
	}
	high, ok := hex4(s[2:])
	if !ok {
		return 0, 0, `expected four hexadecimal digits after \u`
	}
	if !utf16.IsSurrogate(high) {
		return 6, high, ""
	}
	if len(s) >= 12 && s[6] == '\\' && s[7] == 'u' {
		if low, ok := hex4(s[8:]); ok {
			if r := utf16.DecodeRune(high, low); r != utf8.RuneError {
				return 12, r, ""
			}
		}
	}
	return 0, 0, "lone surrogate"
}

func hex4(s string) (rune, bool) {
	if len(s) < 4 {
		return 0, false
	}
	n := rune(0)
	for i := range 4 {
		c := s[i]
		switch {
		case isDigit(c):
			n = n<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			n = n<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return n, true
}
