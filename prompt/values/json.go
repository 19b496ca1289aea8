package values

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

const (
	// MaxJSONDepth is the maximum nesting of arrays and objects.
	MaxJSONDepth = 500

	// MaxSkippedDepth is the same for fields that JSONReader skips, if Python is set. Python's own limit is 1,000, and
	// higher in later versions.
	MaxSkippedDepth = 1000

	// MaxIntDigits is the longest integer that Python's json accepts (sys.int_info.default_max_str_digits).
	MaxIntDigits = 4300
)

// SyntaxError says why a text is not valid JSON.
type SyntaxError struct {
	// Offset is the byte at which reading failed, from 0; the length of the text if it ended too early.
	Offset int
	// Reason completes the sentence "invalid JSON at byte 12: ...".
	Reason string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Reason)
}

// ParseJSON reads one JSON value (RFC 8259) in a single pass. It keeps the order of keys and the difference between
// integers and floats, because a template can print both. It is strict: no trailing text, no invalid UTF-8, no lone
// surrogates, no numbers beyond float64. Of duplicate keys the last value wins, at the position of the first, as in
// Python. Integers beyond int64 are exact.
//
// Strings without escapes alias body. body must not be modified while a value from it is in use, and is kept in memory
// as long. Strings with escapes share memory too. Every error is a *SyntaxError.
func ParseJSON(body []byte) (any, error) {
	v, _, err := JSONReader{}.Parse(body)
	return v, err
}

// ErrTooManyValues says that the values of a JSON text take more memory than JSONReader.Allowance.
var ErrTooManyValues = errors.New("values: the values of the JSON text take too much memory")

// ErrPythonJSON says that JSONReader.Python is set and that Python may read the text: it is UTF-16 or UTF-32, has a
// lone surrogate where a string is decoded, nests deeper than MaxJSONDepth or MaxSkippedDepth, or has token ids that
// are booleans or texts. No values exist for these.
var ErrPythonJSON = errors.New("values: JSON that Python may read: not UTF-8, a lone surrogate, or deep nesting")

// JSONField says how to read the value of a field of an object. Its bits can be combined.
type JSONField uint8

const (
	// JSONSkip checks the value and omits the field.
	JSONSkip JSONField = 1 << iota
	// JSONAsWritten does not decode strings of at least 256 bytes with escapes, at any depth.
	JSONAsWritten
	// JSONTokenIDs reads each list that is empty or begins with a number as a *TokenIDs, at any depth.
	JSONTokenIDs
	// JSONFields also asks about the fields of the object that is the value.
	JSONFields
)

// TokenIDs is a JSON list of token ids: integers from 0 to 2^32-1.
type TokenIDs struct {
	IDs []uint32 // never nil; empty if Bad is not -1
	Bad int      // index of the first item that is not a token id, or -1
}

// noTokenIDs is the value of every empty list.
var noTokenIDs = &TokenIDs{IDs: []uint32{}, Bad: -1}

// JSONReader reads JSON as strictly as ParseJSON, but can omit fields and bound the memory of the values.
type JSONReader struct {
	// Field says how to read a field of the outermost object (parent is ""), or of the object in the field parent of
	// the outermost object. It is asked about the latter only if it returned JSONFields for parent. 0 reads like
	// ParseJSON. A nil Field means 0.
	Field func(parent, key string) JSONField
	// Allowance is the most memory that the values may take, in bytes. 0: unlimited.
	Allowance int
	// Python reads what servers in Python accept, too: a byte order mark, NaN, Infinity, numbers beyond float64 as
	// infinite, lone surrogates in what is skipped, token ids such as 1.0.
	//
	// Sources: Python 3.12, json.loads and json.decoder; pydantic 2.12, the conversion of float to int.
	Python bool
}

// byteOrderMark is that of UTF-8.
const byteOrderMark = "\ufeff"

// Parse reads one JSON value. taken is the approximate memory of the values, in bytes. Errors: *SyntaxError,
// ErrTooManyValues, ErrPythonJSON.
func (r JSONReader) Parse(body []byte) (v any, taken int, err error) {
	p := jsonParser{text: unsafe.String(unsafe.SliceData(body), len(body)), ask: r.Field}
	if p.allowance = r.Allowance; p.allowance <= 0 {
		p.allowance = math.MaxInt
	}
	if p.python = r.Python; p.python {
		if len(body) > 1 && (body[0] == 0 || body[1] == 0 || body[0] >= 0xfe && body[1] >= 0xfe) { // UTF-16, UTF-32
			return nil, 0, ErrPythonJSON
		}
		if strings.HasPrefix(p.text, byteOrderMark) {
			p.pos = len(byteOrderMark)
		}
	}
	if !utf8.Valid(body) {
		if p.python && onlySurrogates(p.text) {
			return nil, 0, ErrPythonJSON
		}
		return nil, 0, &SyntaxError{Offset: firstInvalidUTF8(p.text), Reason: "not valid UTF-8"}
	}
	defer func() {
		if cause := recover(); cause != nil {
			failed, ok := cause.(failure)
			if !ok {
				panic(cause)
			}
			v, taken, err = nil, p.taken, failed.err
		}
	}()
	v = p.value()
	p.skipSpace()
	if p.pos != len(p.text) {
		panic(p.fail("unexpected text after the value"))
	}
	return v, p.taken, nil
}

// failure is the panic that ends the reading of a text. Parse recovers it.
type failure struct{ err error }

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

// onlySurrogates reports whether all that is invalid in s are surrogates encoded as if they were characters.
func onlySurrogates(s string) bool {
	for s != "" {
		s = s[firstInvalidUTF8(s):]
		if len(s) > 2 && s[0] == 0xed && s[1]&0xe0 == 0xa0 && s[2]&0xc0 == 0x80 {
			s = s[3:]
		} else if s != "" {
			return false
		}
	}
	return true
}

type jsonParser struct {
	text   string
	pos    int
	depth  int
	python bool // JSONReader.Python
	jsonMemory
	// open is the stack of the unfinished objects and lists, innermost last: their keys and values, and items. Of a
	// long list it holds only the latest items.
	open []any
	// ask is JSONReader.Field. field is its response for the outermost field being read, and parent is that field's
	// key.
	ask    func(parent, key string) JSONField
	field  JSONField
	parent string
}

func (p *jsonParser) fail(reason string) failure { return p.failAt(p.pos, reason) }

func (p *jsonParser) failAt(pos int, reason string) failure {
	if pos >= len(p.text) {
		return failure{&SyntaxError{Offset: len(p.text), Reason: "unexpected end"}}
	}
	return failure{&SyntaxError{Offset: pos, Reason: reason}}
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

// accept skips white space. If the next byte is c, it skips c too and returns true.
func (p *jsonParser) accept(c byte) bool {
	p.skipSpace()
	if p.pos < len(p.text) && p.text[p.pos] == c {
		p.pos++
		return true
	}
	return false
}

func (p *jsonParser) value() any {
	p.skipSpace()
	if p.pos >= len(p.text) {
		panic(p.fail(""))
	}
	switch c := p.text[p.pos]; {
	case c == '"':
		return p.box(p.stringValue())
	case c == '{':
		return p.object()
	case c == '[':
		return p.array()
	case p.atNumber(c):
		return p.number()
	case c == 't':
		p.literal("true")
		return true
	case c == 'f':
		p.literal("false")
		return false
	case c == 'n':
		p.literal("null")
		return nil
	}
	if f, ok := p.notFinite(); ok {
		p.take(numberBytes)
		return f
	}
	panic(p.fail("expected a value"))
}

// atNumber reports whether a number begins at the position, whose byte is c.
func (p *jsonParser) atNumber(c byte) bool {
	return isDigit(c) || c == '-' && !(p.python && strings.HasPrefix(p.text[p.pos:], "-I"))
}

// notFinite reads a word of Python's for a number that is not finite.
func (p *jsonParser) notFinite() (f float64, ok bool) {
	for i, word := range [...]string{"NaN", "Infinity", "-Infinity"} {
		if p.python && strings.HasPrefix(p.text[p.pos:], word) {
			p.pos += len(word)
			return [...]float64{math.NaN(), math.Inf(1), math.Inf(-1)}[i], true
		}
	}
	return 0, false
}

func (p *jsonParser) literal(word string) {
	if len(p.text)-p.pos < len(word) || p.text[p.pos:p.pos+len(word)] != word {
		panic(p.fail("expected " + word))
	}
	p.pos += len(word)
}

// enter enters an array or an object. most is how deep it may be.
func (p *jsonParser) enter(most int) {
	if p.depth++; p.depth > most && p.python {
		panic(failure{ErrPythonJSON})
	} else if p.depth > MaxJSONDepth && !p.python {
		panic(p.fail(fmt.Sprintf("nested deeper than %d", MaxJSONDepth)))
	}
	p.pos++
}

func (p *jsonParser) object() any {
	p.enter(MaxJSONDepth)
	if p.accept('}') {
		p.depth--
		return p.newDict(nil, nil)
	}
	first := len(p.open)
	var d *Dict // nil while the object is small
	for {
		key := p.key()
		skip := false
		if p.ask != nil {
			switch {
			case p.depth == 1:
				p.field, p.parent = p.ask("", key), key
				skip = p.field&JSONSkip != 0
			case p.depth == 2 && p.field&JSONFields != 0:
				field := p.ask(p.parent, key)
				p.field = JSONFields | field
				skip = field&JSONSkip != 0
			}
		}
		if skip {
			p.skip()
		} else {
			v := p.value()
			if d == nil && len(p.open)-first == 2*smallDict {
				d = p.close(first)
			}
			if d == nil {
				p.set(first, key, v)
			} else {
				p.setLarge(d, key, v)
			}
		}
		if p.accept(',') {
			continue
		}
		if !p.accept('}') {
			panic(p.fail("expected ',' or '}'"))
		}
		p.depth--
		if d == nil {
			return p.close(first)
		}
		return d
	}
}

// key reads a key of an object and the colon behind it.
func (p *jsonParser) key() string {
	p.skipSpace()
	if p.pos >= len(p.text) || p.text[p.pos] != '"' {
		panic(p.fail("expected a key in double quotes"))
	}
	key := p.string()
	if !p.accept(':') {
		panic(p.fail("expected ':' after the key"))
	}
	return key
}

// push pushes a value onto the stack.
func (p *jsonParser) push(v any) {
	if len(p.open) == cap(p.open) {
		size := max(8, 2*cap(p.open))
		p.take(size * anyBytes)
		p.open = append(make([]any, 0, size), p.open...)
	}
	p.open = append(p.open, v)
}

// set sets a key of the object whose keys and values are p.open[first:].
func (p *jsonParser) set(first int, key string, v any) {
	for i := first; i < len(p.open); i += 2 {
		if p.open[i] == key {
			p.open[i+1] = v
			return
		}
	}
	p.push(p.box(key))
	p.push(v)
}

// setLarge sets a key of an object that has an index or is about to get one.
func (p *jsonParser) setLarge(d *Dict, key string, v any) {
	if i := d.findString(key); i >= 0 {
		d.values[i] = v
		return
	}
	k := p.box(key)
	if n := len(d.keys); n == cap(d.keys) || n == cap(d.values) {
		n += max(smallDict, n/2)
		p.take(2*n*anyBytes + indexBytes(n))
		d.keys, d.values = append(make([]any, 0, n), d.keys...), append(make([]any, 0, n), d.values...)
	}
	d.append(k, v)
}

// close pops the object whose keys and values are p.open[first:], and returns it.
func (p *jsonParser) close(first int) *Dict {
	n := (len(p.open) - first) / 2
	keys := p.sharedKeys(p.open[first:])
	values := p.anys(n)
	for i := range values {
		values[i] = p.open[first+2*i+1]
	}
	p.open = p.open[:first]
	return p.newDict(keys, values)
}

// longList is the most items of one list on the stack.
const longList = 512

func (p *jsonParser) array() any {
	if p.field&JSONTokenIDs != 0 {
		if ids := p.tokenIDs(); ids != nil {
			return ids
		}
	}
	p.enter(MaxJSONDepth)
	if p.accept(']') {
		p.depth--
		return p.newList(nil)
	}
	first := len(p.open)
	var chunks [][]any // earlier items of a long list, moved off the stack
	for {
		v := p.value()
		if len(p.open)-first == longList {
			p.take(longList * anyBytes)
			chunks = append(chunks, slices.Clone(p.open[first:]))
			p.open = p.open[:first]
		}
		p.push(v)
		if p.accept(',') {
			continue
		}
		if !p.accept(']') {
			panic(p.fail("expected ',' or ']'"))
		}
		p.depth--
		items := p.anys(len(chunks)*longList + len(p.open) - first)
		to := items
		for i, chunk := range chunks {
			to = to[copy(to, chunk):]
			chunks[i] = nil
		}
		copy(to, p.open[first:])
		p.open = p.open[:first]
		return p.newList(items)
	}
}

// tokenIDs reads a list that is empty or begins with a number. It returns nil for another list.
func (p *jsonParser) tokenIDs() *TokenIDs {
	start := p.pos
	p.enter(MaxJSONDepth)
	p.skipSpace()
	switch {
	case p.accept(']'):
		p.depth--
		return noTokenIDs
	case p.pos < len(p.text) && (isDigit(p.text[p.pos]) || p.text[p.pos] == '-'):
	case p.atPythonID("tf"):
		panic(failure{ErrPythonJSON})
	default:
		p.pos = start
		p.depth--
		return nil
	}
	// If the list contains only numbers, its items are counted first, so that the ids take no more memory than needed.
	l := &TokenIDs{IDs: noTokenIDs.IDs, Bad: -1}
	room := 0
	for i := p.pos; i < len(p.text); i++ {
		c := p.text[i]
		if c == ',' {
			room++
		} else if c == ']' {
			room++
			break
		} else if c > ' ' && !isDigit(c) && c != '-' && !(p.python && strings.IndexByte(".eE+", c) >= 0) {
			room = 0
			break
		}
	}
	p.take(listBytes + 4*room)
	l.IDs = make([]uint32, 0, room)
	for i := 0; ; i++ {
		id, ok := p.tokenID()
		if l.Bad < 0 && !ok {
			l.Bad = i
			l.IDs = noTokenIDs.IDs
		}
		if l.Bad < 0 && room > 0 {
			l.IDs = append(l.IDs, id)
		}
		if p.accept(',') {
			continue
		}
		if !p.accept(']') {
			panic(p.fail("expected ',' or ']'"))
		}
		p.depth--
		return l
	}
}

// atPythonID reports whether the value at the position begins with one of these bytes and pydantic may take it for a
// token id: a boolean, or a number in quotes behind other ids.
func (p *jsonParser) atPythonID(begins string) bool {
	return p.python && p.pos < len(p.text) && strings.IndexByte(begins, p.text[p.pos]) >= 0
}

// tokenID reads an item of a list of token ids, and reports whether it is a token id. Other items are checked and
// skipped.
func (p *jsonParser) tokenID() (id uint32, ok bool) {
	p.skipSpace()
	start := p.pos
	if start >= len(p.text) || !p.atNumber(p.text[start]) {
		if p.atPythonID("tf\"") {
			panic(failure{ErrPythonJSON})
		}
		p.skip()
		return 0, false
	}
	integer := p.scanNumber()
	literal := p.text[start:p.pos]
	if !integer {
		f := p.float(start)
		whole := p.python && f == math.Trunc(f) && f >= 0 && f <= math.MaxUint32
		return uint32(max(f, 0)), whole
	}
	if literal == "-0" {
		return 0, true
	}
	if literal[0] == '-' || len(literal) > 10 {
		p.checkInteger(start)
		return 0, false
	}
	n := uint64(0)
	for i := range len(literal) {
		n = 10*n + uint64(literal[i]-'0')
	}
	return uint32(n), n <= math.MaxUint32
}

// skip checks a value without storing it.
func (p *jsonParser) skip() {
	p.skipSpace()
	if p.pos >= len(p.text) {
		panic(p.fail(""))
	}
	switch c := p.text[p.pos]; {
	case c == '"':
		p.skipString()
	case c == '{' || c == '[':
		p.skipItems(c)
	case p.atNumber(c):
		start := p.pos
		if p.scanNumber() {
			p.checkInteger(start)
		} else {
			p.float(start)
		}
	case c == 't':
		p.literal("true")
	case c == 'f':
		p.literal("false")
	case c == 'n':
		p.literal("null")
	default:
		if _, ok := p.notFinite(); !ok {
			panic(p.fail("expected a value"))
		}
	}
}

// skipItems checks an object or a list.
func (p *jsonParser) skipItems(open byte) {
	p.enter(MaxSkippedDepth)
	end, expected := byte('}'), "expected ',' or '}'"
	if open == '[' {
		end, expected = ']', "expected ',' or ']'"
	}
	if p.accept(end) {
		p.depth--
		return
	}
	for {
		if open == '{' {
			p.skipSpace()
			if p.pos >= len(p.text) || p.text[p.pos] != '"' {
				panic(p.fail("expected a key in double quotes"))
			}
			p.skipString()
			if !p.accept(':') {
				panic(p.fail("expected ':' after the key"))
			}
		}
		p.skip()
		if p.accept(',') {
			continue
		}
		if !p.accept(end) {
			panic(p.fail(expected))
		}
		p.depth--
		return
	}
}

// skipString checks a string.
func (p *jsonParser) skipString() {
	p.pos = p.stringEnd(p.pos+1) + 1
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

// scanNumber skips a number, and reports whether it has neither a point nor an exponent.
func (p *jsonParser) scanNumber() (integer bool) {
	if p.text[p.pos] == '-' {
		p.pos++
	}
	first := p.pos
	if !p.digits() {
		panic(p.fail("expected a digit"))
	}
	if p.text[first] == '0' && p.pos > first+1 {
		panic(p.failAt(first+1, "a number must not start with 0"))
	}
	integer = true
	if p.pos < len(p.text) && p.text[p.pos] == '.' {
		integer = false
		p.pos++
		if !p.digits() {
			panic(p.fail("expected a digit after '.'"))
		}
	}
	if p.pos < len(p.text) && p.text[p.pos]|0x20 == 'e' {
		integer = false
		p.pos++
		if p.pos < len(p.text) && (p.text[p.pos] == '+' || p.text[p.pos] == '-') {
			p.pos++
		}
		if !p.digits() {
			panic(p.fail("expected a digit in the exponent"))
		}
	}
	return integer
}

// checkInteger checks, and float returns, the number in p.text[start:p.pos].
func (p *jsonParser) checkInteger(start int) {
	digits := p.pos - start
	if p.text[start] == '-' {
		digits--
	}
	if digits > MaxIntDigits {
		panic(p.failAt(start, "number too long"))
	}
}

func (p *jsonParser) float(start int) float64 {
	f, err := strconv.ParseFloat(p.text[start:p.pos], 64)
	if err != nil && !p.python { // to Python it is infinite
		panic(p.failAt(start, "number out of range"))
	}
	return f
}

func (p *jsonParser) number() any {
	start := p.pos
	integer := p.scanNumber()
	literal := p.text[start:p.pos]
	if !integer {
		f := p.float(start)
		p.take(numberBytes)
		return f
	}
	if n, err := strconv.ParseInt(literal, 10, 64); err == nil {
		if uint64(n) < 256 { // Go does not allocate for these
			return n
		}
		p.take(numberBytes)
		return n
	}
	p.checkInteger(start)
	p.take(bigIntBytes + len(literal))
	return bigInt(literal)
}

// bigInt returns the value of an integer literal. It allocates only the result. Literals are short (MaxIntDigits).
func bigInt(literal string) *big.Int {
	digits := strings.TrimPrefix(literal, "-")
	words := make([]big.Word, 0, len(digits)*10/3/bits.UintSize+2) // a digit is less than 10/3 bits
	for len(digits) > 0 {
		n := min(len(digits), 9)
		carry, factor := uint(0), uint(1)
		for _, c := range []byte(digits[:n]) {
			carry = carry*10 + uint(c-'0')
			factor *= 10
		}
		digits = digits[n:]
		for i, word := range words {
			high, low := bits.Mul(uint(word), factor)
			sum, over := bits.Add(low, carry, 0)
			words[i], carry = big.Word(sum), high+over
		}
		if carry > 0 {
			words = append(words, big.Word(carry))
		}
	}
	n := new(big.Int).SetBits(words)
	if literal[0] == '-' {
		n.Neg(n)
	}
	return n
}

func (p *jsonParser) string() string {
	start := p.pos + 1
	end := plainEnd(p.text, start)
	if end < len(p.text) && p.text[end] == '"' {
		p.pos = end + 1
		return p.text[start:end]
	}
	return p.decode(start, end)
}

// longString is the length from which JSONAsWritten leaves a string undecoded. Shorter ones may be names.
const longString = 256

// stringValue reads a string that is not a key.
func (p *jsonParser) stringValue() string {
	if p.field&JSONAsWritten == 0 {
		return p.string()
	}
	start := p.pos + 1
	end := p.stringEnd(start)
	if end-start < longString {
		return p.string()
	}
	p.pos = end + 1
	return p.text[start:end]
}

// stringEnd checks the string that begins at i, and returns the position of its closing quote.
func (p *jsonParser) stringEnd(i int) (end int) {
	for s := p.text; ; {
		i = plainEnd(s, i)
		switch {
		case i == len(s):
			panic(p.failAt(i, ""))
		case s[i] < 0x20:
			panic(p.failAt(i, "control character in a string"))
		case s[i] == '"':
			return i
		case i+1 < len(s) && shortEscapes[s[i+1]] != 0:
			i += 2
		default:
			size, _, reason := unescape(s[i:])
			if size == 0 && !(p.python && reason == loneSurrogate) {
				panic(p.failAt(i, reason))
			}
			i += max(size, len(`\u0000`))
		}
	}
}

const (
	eachByte = 0x0101010101010101
	highBits = 0x8080808080808080
)

// special finds the first of eight bytes that a string cannot contain unescaped: a quote, a backslash or a control
// character. The lowest set bit of the result is the high bit of that byte; 0 means none. Higher bits are undefined.
func special(w uint64) uint64 {
	quote, slash := w^(eachByte*'"'), w^(eachByte*'\\')
	return ((quote-eachByte)&^quote | (slash-eachByte)&^slash | (w-eachByte*0x20)&^w) & highBits
}

// load8 returns the eight bytes at s[i:], the first in the lowest bits. They must exist.
func load8(s string, i int) uint64 {
	return binary.LittleEndian.Uint64(unsafe.Slice(unsafe.StringData(s[i:i+8]), 8))
}

// plainEnd returns the position at or after i of the first byte that a string cannot contain unescaped, or len(s).
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

// decode returns the string that begins at start. The text up to end is plain; the byte at end is not.
func (p *jsonParser) decode(start, end int) string {
	s := p.text
	dst := p.room(end - start)
	n := copy(dst, s[start:end])
	for i := end; ; {
		if n+16 > len(dst) { // at most once for a body: later strings use the rest of this buffer
			size := n + len(s) - i + 16
			p.take(size)
			longer := make([]byte, size)
			copy(longer, dst[:n])
			dst = longer
		}
		// Copy eight bytes in any case, but advance only past the plain ones.
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
				panic(p.failAt(i, ""))
			}
		}
		switch s[i] {
		case '"':
			p.pos = i + 1
			p.decoded = dst[n:]
			return unsafe.String(unsafe.SliceData(dst), n)
		case '\\':
			if i+1 < len(s) && shortEscapes[s[i+1]] != 0 {
				dst[n] = shortEscapes[s[i+1]]
				n++
				i += 2
				continue
			}
			size, r, reason := unescape(s[i:])
			switch {
			case size == 0 && p.python && reason == loneSurrogate:
				panic(failure{ErrPythonJSON}) // it has no form in UTF-8
			case size == 0:
				panic(p.failAt(i, reason))
			}
			n += utf8.EncodeRune(dst[n:], r)
			i += size
		default:
			panic(p.failAt(i, "control character in a string"))
		}
	}
}

const (
	// decodedChunk is the size of a buffer that strings with escapes share, in bytes. A longer string has its own.
	decodedChunk = 64 << 10
	// decodedLeast is the least free space with which a string still uses the current buffer.
	decodedLeast = 1 << 10
)

// room returns memory for a string that has an escape after this many plain bytes.
func (p *jsonParser) room(plain int) []byte {
	left := len(p.text) - p.pos
	if need := min(left, max(plain, decodedLeast)) + 16; len(p.decoded) < need {
		size := max(need, min(left+16, decodedChunk))
		p.take(size)
		p.decoded = make([]byte, size)
	}
	return p.decoded
}

// shortEscapes maps the byte after a backslash to the byte that the escape stands for; 0 for other bytes.
var shortEscapes = [256]byte{'n': '\n', 't': '\t', 'r': '\r', 'b': '\b', 'f': '\f', '"': '"', '\\': '\\', '/': '/'}

const loneSurrogate = "lone surrogate"

// unescape decodes the escape sequence at the start of s, which is not one of shortEscapes. It returns the length of
// the sequence, or 0 and the reason why it is invalid.
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
	return 0, 0, loneSurrogate
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
