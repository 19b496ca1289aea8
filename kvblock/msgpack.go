package kvblock

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrMalformed is wrapped by every error of DecodeBatch.
var ErrMalformed = errors.New("kvblock: malformed event batch")

// maxDepth bounds the nesting of skipped msgpack values. Engines nest at most five levels.
const maxDepth = 32

// scanner reads msgpack values from b, which it never changes. It checks every length against the remaining bytes
// before anything is allocated: an array of n elements takes at least n bytes, a map of n pairs at least 2n.
//
// It keeps the first error, which moves it to the end of b, so that all later reads fail and return zeros.
type scanner struct {
	b   []byte
	p   int // position of the next unread byte
	err error
	at  int // position of the error
}

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err, s.at = fmt.Errorf("%w: byte %d: %s", ErrMalformed, s.p, fmt.Sprintf(format, args...)), s.p
	}
	s.p = len(s.b)
}

// end fails unless all of b was read, and returns the error.
func (s *scanner) end(what string) error {
	if s.p != len(s.b) {
		s.fail("%d bytes after the %s", len(s.b)-s.p, what)
	}
	return s.err
}

// kind is the family of a msgpack value.
type kind uint8

const (
	kindNil kind = iota
	kindBool
	kindInt
	kindFloat
	kindString
	kindBytes
	kindArray
	kindMap
	kindExt
	kindInvalid // a reserved first byte, or the end of input
)

func (k kind) String() string {
	return [...]string{"nil", "bool", "integer", "float", "string", "bytes", "array", "map", "extension", "invalid"}[k]
}

// peek returns the kind of the next value without reading it.
func (s *scanner) peek() kind {
	if s.p >= len(s.b) {
		return kindInvalid
	}
	return kindOfByte[s.b[s.p]]
}

// kindOfByte maps the first byte of a value to its kind.
var kindOfByte = func() (kinds [256]kind) {
	for c := range kinds {
		switch {
		case c <= 0x7f || c >= 0xe0:
			kinds[c] = kindInt
		case c <= 0x8f:
			kinds[c] = kindMap
		case c <= 0x9f:
			kinds[c] = kindArray
		case c <= 0xbf:
			kinds[c] = kindString
		}
	}
	copy(kinds[0xc0:], []kind{
		kindNil, kindInvalid, kindBool, kindBool, kindBytes, kindBytes, kindBytes, kindExt,
		kindExt, kindExt, kindFloat, kindFloat, kindInt, kindInt, kindInt, kindInt,
		kindInt, kindInt, kindInt, kindInt, kindExt, kindExt, kindExt, kindExt,
		kindExt, kindString, kindString, kindString, kindArray, kindArray, kindMap, kindMap,
	})
	return kinds
}()

// want fails unless the next value is of kind k, and reports whether it is.
func (s *scanner) want(k kind, what string) bool {
	if s.peek() == k {
		return true
	}
	s.wrongKind(k, what)
	return false
}

// wrongKind is the failure of want. It is a function of its own so that the compiler can inline want.
func (s *scanner) wrongKind(k kind, what string) {
	if s.p >= len(s.b) {
		s.fail("%s: input ends", what)
	} else {
		s.fail("%s: %v, want %v", what, s.peek(), k)
	}
}

// take consumes n bytes. It returns nil if there are fewer.
func (s *scanner) take(n int) []byte {
	if n > len(s.b)-s.p {
		s.fail("%d bytes wanted, %d left", n, len(s.b)-s.p)
		return nil
	}
	b := s.b[s.p : s.p+n : s.p+n]
	s.p += n
	return b
}

// bigEndian consumes n bytes (1, 2, 4 or 8) as an unsigned number.
func (s *scanner) bigEndian(n int) uint64 {
	b := s.take(n)
	switch len(b) {
	case 8:
		return binary.BigEndian.Uint64(b)
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 1:
		return uint64(b[0])
	}
	return 0
}

// skipNil consumes a nil if it is next, and reports whether it was.
func (s *scanner) skipNil() bool {
	if s.p < len(s.b) && s.b[s.p] == 0xc0 {
		s.p++
		return true
	}
	return false
}

// repeats reports whether the next n bytes are those at begin. They mostly differ early: the first eight bytes decide
// then, without a call.
func (s *scanner) repeats(begin, n int) bool {
	rest := s.b[s.p:]
	if len(rest) < n || n >= 8 && binary.LittleEndian.Uint64(rest) != binary.LittleEndian.Uint64(s.b[begin:]) {
		return false
	}
	return bytes.Equal(rest[:n], s.b[begin:begin+n])
}

// integer reads an integer. It returns its 64 bits in two's complement, and whether it is negative.
func (s *scanner) integer(what string) (v uint64, negative bool) {
	if !s.want(kindInt, what) {
		return 0, false
	}
	c := s.b[s.p]
	s.p++
	switch {
	case c <= 0x7f:
		return uint64(c), false
	case c >= 0xe0:
		return uint64(int64(int8(c))), true
	case c <= 0xcf: // unsigned, 1 << (c-0xcc) bytes
		return s.bigEndian(1 << (c - 0xcc)), false
	}
	size := 1 << (c - 0xd0) // signed
	shift := 64 - 8*size
	v = uint64(int64(s.bigEndian(size)<<shift) >> shift)
	return v, int64(v) < 0
}

// uint32 reads a number from 0 to 2^32-1.
func (s *scanner) uint32(what string) uint32 {
	at := s.p
	v, negative := s.integer(what)
	if negative || v > math.MaxUint32 {
		s.p = at
		s.fail("%s: number out of range", what)
		return 0
	}
	return uint32(v)
}

// count reads a number from 0 to 2^64-1.
func (s *scanner) count(what string) uint64 {
	v, negative := s.integer(what)
	if negative {
		s.fail("%s: negative", what)
	}
	return v
}

// text reads a string. The result aliases the input; it is nil only on an error.
func (s *scanner) text(what string) []byte {
	if b := s.b[s.p:]; len(b) > 0 && b[0]&0xe0 == 0xa0 && int(b[0]&0x1f) < len(b) { // the usual encoding
		n := 1 + int(b[0]&0x1f)
		s.p += n
		return b[1:n:n]
	}
	if !s.want(kindString, what) {
		return nil
	}
	c := s.b[s.p]
	s.p++
	if c <= 0xbf {
		return s.take(int(c & 0x1f))
	}
	return s.sized(1 << (c - 0xd9))
}

// bytes reads a byte string. The result aliases the input; it is nil only on an error.
func (s *scanner) bytes(what string) []byte {
	if !s.want(kindBytes, what) {
		return nil
	}
	c := s.b[s.p]
	s.p++
	return s.sized(1 << (c - 0xc4))
}

// sized consumes a length of n bytes, and then as many bytes as that length says.
func (s *scanner) sized(n int) []byte {
	return s.take(int(s.bigEndian(n))) // at most 2^32-1; take checks it
}

// array reads an array's header and returns its length; 0 on an error.
func (s *scanner) array(what string) int {
	if b := s.b[s.p:]; len(b) > 0 && b[0]&0xf0 == 0x90 && int(b[0]&0x0f) < len(b) { // the usual encoding
		s.p++
		return int(b[0] & 0x0f)
	} else if len(b) >= 3 && b[0] == 0xdc && int(binary.BigEndian.Uint16(b[1:])) <= len(b)-3 {
		s.p += 3
		return int(binary.BigEndian.Uint16(b[1:]))
	}
	return s.header(kindArray, 0xdc, 1, what)
}

// dict reads a map's header and returns its number of pairs; 0 on an error.
func (s *scanner) dict(what string) int { return s.header(kindMap, 0xde, 2, what) }

// header reads the header of an array or map, whose length follows the first byte from wide on. It checks that as many
// elements of at least size bytes each fit into the remaining bytes.
func (s *scanner) header(k kind, wide byte, size int, what string) int {
	if !s.want(k, what) {
		return 0
	}
	c := s.b[s.p]
	s.p++
	n := uint64(c & 0x0f)
	if c >= wide {
		n = s.bigEndian(2 << (c - wide))
	}
	if n > uint64((len(s.b)-s.p)/size) {
		s.fail("%s: %d elements announced, %d bytes left", what, n, len(s.b)-s.p)
		return 0
	}
	return int(n)
}

// float reads a float or an integer.
func (s *scanner) float(what string) float64 {
	if s.peek() == kindInt {
		v, negative := s.integer(what)
		if negative {
			return float64(int64(v))
		}
		return float64(v)
	}
	if !s.want(kindFloat, what) {
		return 0
	}
	double := s.b[s.p] == 0xcb
	s.p++
	if double {
		return math.Float64frombits(s.bigEndian(8))
	}
	return float64(math.Float32frombits(uint32(s.bigEndian(4))))
}

// skip consumes one value of any kind.
func (s *scanner) skip() { s.skipNested(0) }

func (s *scanner) skipNested(depth int) {
	if depth > maxDepth {
		s.fail("nested deeper than %d", maxDepth)
	}
	n := 0
	switch k := s.peek(); k {
	case kindNil, kindBool:
		s.p++
	case kindInt:
		s.integer("integer")
	case kindFloat:
		s.float("float")
	case kindString:
		s.text("string")
	case kindBytes:
		s.bytes("bytes")
	case kindArray:
		n = s.array("array")
	case kindMap:
		n = 2 * s.dict("map")
	case kindExt:
		s.skipExt()
	default:
		s.fail("no value")
	}
	for ; n > 0 && s.err == nil; n-- {
		if !s.skipNil() { // the most usual element: extra keys of a block of text
			s.skipNested(depth + 1)
		}
	}
}

// skipExt consumes an extension: a length (from 0xd4 on, the first byte implies it), a type byte and the data.
func (s *scanner) skipExt() {
	c := s.b[s.p]
	s.p++
	size := uint64(1) << (c & 0x03)
	switch {
	case c == 0xd8:
		size = 16
	case c <= 0xc9:
		size = s.bigEndian(1 << (c - 0xc7))
	}
	s.take(int(size) + 1)
}

// tokens appends an array of token ids to dst. Engines that draft with EAGLE send pairs [t[i], t[i+1]] instead. The
// result is then the first token of each pair and the second of the last pair, and bigram is true. On an error the
// result holds the tokens read before it.
func (s *scanner) tokens(dst []Token) (_ []Token, bigram bool) {
	n := s.array("token_ids")
	if n == 0 || s.peek() != kindArray {
		return s.plainTokens(dst, n), false
	}
	for i := range n {
		if pair := s.array("token pair"); pair != 2 {
			s.fail("token pair of %d", pair)
		}
		first, second := s.uint32("token id"), s.uint32("token id")
		if s.err != nil {
			break
		}
		dst = append(dst, Token(first))
		if i == n-1 {
			dst = append(dst, Token(second))
		}
	}
	return dst, true
}

// plainTokens reads n numbers. Decoding spends most of its time here, so this function itself reads the encodings that
// engines use for token ids.
func (s *scanner) plainTokens(dst []Token, n int) []Token {
	dst = slices.Grow(dst, n)
	to := dst[len(dst) : len(dst)+n]
	b, p := s.b, s.p
	for i := range to {
		if len(b)-p >= 8 {
			// The branch predictor cannot foresee whether two bytes follow (0xcd) or four (0xce). So the code computes
			// the next position from the first byte alone, in parallel with the id.
			first, word := b[p], binary.BigEndian.Uint64(b[p:])
			if k := uint(first) - 0xcd; k <= 1 {
				to[i] = Token(word << 8 >> (48 - 16*k))
				p += int(3 + 2*k)
				continue
			}
			if first <= 0x7f {
				to[i] = Token(first)
				p++
				continue
			}
		}
		s.p = p
		if to[i] = Token(s.uint32("token id")); s.err != nil {
			return dst[:len(dst)+i]
		}
		p = s.p
	}
	s.p = p
	return dst[:len(dst)+n]
}

// hashes appends n block hashes to dst.
func (s *scanner) hashes(dst []EngineHash, n int) []EngineHash {
	dst = slices.Grow(dst, n)
	for range n {
		if b := s.b[s.p:]; len(b) >= 9 && b[0] == 0xcf { // the usual encoding
			dst = append(dst, EngineHash(binary.BigEndian.Uint64(b[1:])))
			s.p += 9
			continue
		}
		if dst = append(dst, s.hash()); s.err != nil {
			break
		}
	}
	return dst
}

// hash reads an engine hash: an integer of either sign, whose 64 bits are the hash, or a digest. vLLM sends the last 8
// bytes of the digest when it is configured to send integers.
func (s *scanner) hash() EngineHash {
	if b := s.b[s.p:]; len(b) >= 9 && b[0] == 0xcf { // the usual encoding
		s.p += 9
		return EngineHash(binary.BigEndian.Uint64(b[1:]))
	}
	if s.peek() != kindBytes {
		v, _ := s.integer("block hash")
		return EngineHash(v)
	}
	b := s.bytes("block hash")
	if len(b) < 8 {
		s.fail("block hash of %d bytes, want at least 8", len(b))
		return 0
	}
	return EngineHash(binary.BigEndian.Uint64(b[len(b)-8:]))
}
