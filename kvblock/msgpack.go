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
type scanner struct {
	b []byte
	p int // position of the next unread byte
}

func (s *scanner) fail(format string, args ...any) error {
	return fmt.Errorf("%w: byte %d: %s", ErrMalformed, s.p, fmt.Sprintf(format, args...))
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

// want returns an error unless the next value is of kind k.
func (s *scanner) want(k kind, what string) error {
	if s.peek() == k {
		return nil
	}
	return s.kindError(k, what)
}

// kindError is the error of want. It is a function of its own so that the compiler can inline want.
func (s *scanner) kindError(k kind, what string) error {
	if s.p >= len(s.b) {
		return s.fail("%s: input ends", what)
	}
	return s.fail("%s: %v, want %v", what, s.peek(), k)
}

// take consumes n bytes.
func (s *scanner) take(n int) ([]byte, error) {
	if n > len(s.b)-s.p {
		return nil, s.fail("%d bytes wanted, %d left", n, len(s.b)-s.p)
	}
	b := s.b[s.p : s.p+n : s.p+n]
	s.p += n
	return b, nil
}

// bigEndian consumes n bytes (1, 2, 4 or 8) as an unsigned number.
func (s *scanner) bigEndian(n int) (uint64, error) {
	b, err := s.take(n)
	if err != nil {
		return 0, err
	}
	switch n {
	case 8:
		return binary.BigEndian.Uint64(b), nil
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), nil
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), nil
	default:
		return uint64(b[0]), nil
	}
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
func (s *scanner) integer(what string) (v uint64, negative bool, err error) {
	if err := s.want(kindInt, what); err != nil {
		return 0, false, err
	}
	c := s.b[s.p]
	s.p++
	switch {
	case c <= 0x7f:
		return uint64(c), false, nil
	case c >= 0xe0:
		return uint64(int64(int8(c))), true, nil
	case c <= 0xcf: // unsigned, 1 << (c-0xcc) bytes
		v, err = s.bigEndian(1 << (c - 0xcc))
		return v, false, err
	default: // signed
		size := 1 << (c - 0xd0)
		v, err = s.bigEndian(size)
		shift := 64 - 8*size
		v = uint64(int64(v<<shift) >> shift)
		return v, int64(v) < 0, err
	}
}

// uint32 reads a number from 0 to 2^32-1.
func (s *scanner) uint32(what string) (uint32, error) {
	at := s.p
	v, negative, err := s.integer(what)
	if err != nil {
		return 0, err
	}
	if negative || v > math.MaxUint32 {
		s.p = at
		return 0, s.fail("%s: number out of range", what)
	}
	return uint32(v), nil
}

// text reads a string. The result aliases the input and is not nil.
func (s *scanner) text(what string) ([]byte, error) {
	if b := s.b[s.p:]; len(b) > 0 && b[0]&0xe0 == 0xa0 && int(b[0]&0x1f) < len(b) { // the usual encoding
		n := 1 + int(b[0]&0x1f)
		s.p += n
		return b[1:n:n], nil
	}
	if err := s.want(kindString, what); err != nil {
		return nil, err
	}
	c := s.b[s.p]
	s.p++
	if c <= 0xbf {
		return s.take(int(c & 0x1f))
	}
	return s.sized(1 << (c - 0xd9))
}

// bytes reads a byte string. The result aliases the input and is not nil.
func (s *scanner) bytes(what string) ([]byte, error) {
	if err := s.want(kindBytes, what); err != nil {
		return nil, err
	}
	c := s.b[s.p]
	s.p++
	return s.sized(1 << (c - 0xc4))
}

// sized consumes a length of n bytes, and then as many bytes as that length says.
func (s *scanner) sized(n int) ([]byte, error) {
	size, err := s.bigEndian(n)
	if err != nil {
		return nil, err
	}
	return s.take(int(size)) // at most 2^32-1; take checks it
}

// array reads an array's header and returns its length.
func (s *scanner) array(what string) (int, error) {
	if b := s.b[s.p:]; len(b) > 0 && b[0]&0xf0 == 0x90 && int(b[0]&0x0f) < len(b) { // the usual encoding
		s.p++
		return int(b[0] & 0x0f), nil
	} else if len(b) >= 3 && b[0] == 0xdc && int(binary.BigEndian.Uint16(b[1:])) <= len(b)-3 {
		s.p += 3
		return int(binary.BigEndian.Uint16(b[1:])), nil
	}
	if err := s.want(kindArray, what); err != nil {
		return 0, err
	}
	c := s.b[s.p]
	s.p++
	n := uint64(c & 0x0f)
	if c >= 0xdc {
		var err error
		if n, err = s.bigEndian(2 << (c - 0xdc)); err != nil {
			return 0, err
		}
	}
	return s.length(n, 1, what)
}

// dict reads a map's header and returns its number of pairs.
func (s *scanner) dict(what string) (int, error) {
	if err := s.want(kindMap, what); err != nil {
		return 0, err
	}
	c := s.b[s.p]
	s.p++
	n := uint64(c & 0x0f)
	if c >= 0xde {
		var err error
		if n, err = s.bigEndian(2 << (c - 0xde)); err != nil {
			return 0, err
		}
	}
	return s.length(n, 2, what)
}

// length checks that n elements of at least size bytes each fit into the remaining bytes.
func (s *scanner) length(n uint64, size int, what string) (int, error) {
	if n > uint64((len(s.b)-s.p)/size) {
		return 0, s.fail("%s: %d elements announced, %d bytes left", what, n, len(s.b)-s.p)
	}
	return int(n), nil
}

// float reads a float or an integer.
func (s *scanner) float(what string) (float64, error) {
	if s.peek() == kindInt {
		v, negative, err := s.integer(what)
		if negative {
			return float64(int64(v)), err
		}
		return float64(v), err
	}
	if err := s.want(kindFloat, what); err != nil {
		return 0, err
	}
	double := s.b[s.p] == 0xcb
	s.p++
	if double {
		v, err := s.bigEndian(8)
		return math.Float64frombits(v), err
	}
	v, err := s.bigEndian(4)
	return float64(math.Float32frombits(uint32(v))), err
}

// skip consumes one value of any kind.
func (s *scanner) skip() error { return s.skipNested(0) }

func (s *scanner) skipNested(depth int) error {
	if depth > maxDepth {
		return s.fail("nested deeper than %d", maxDepth)
	}
	var n int
	var err error
	switch k := s.peek(); k {
	case kindNil, kindBool:
		s.p++
	case kindInt:
		_, _, err = s.integer("integer")
	case kindFloat:
		_, err = s.float("float")
	case kindString:
		_, err = s.text("string")
	case kindBytes:
		_, err = s.bytes("bytes")
	case kindArray:
		n, err = s.array("array")
	case kindMap:
		n, err = s.dict("map")
		n *= 2
	case kindExt:
		err = s.skipExt()
	default:
		return s.fail("no value")
	}
	if err != nil {
		return err
	}
	for range n {
		if s.skipNil() { // the most usual element: extra keys of a block of text
			continue
		}
		if err := s.skipNested(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

// skipExt consumes an extension: a length (from 0xd4 on, the first byte implies it), a type byte and the data.
func (s *scanner) skipExt() error {
	c := s.b[s.p]
	s.p++
	size := uint64(1) << (c & 0x03)
	switch {
	case c == 0xd8:
		size = 16
	case c <= 0xc9:
		var err error
		if size, err = s.bigEndian(1 << (c - 0xc7)); err != nil {
			return err
		}
	}
	_, err := s.take(int(size) + 1)
	return err
}

// tokens appends an array of token ids to dst. Engines that draft with EAGLE send pairs [t[i], t[i+1]] instead. The
// result is then the first token of each pair and the second of the last pair, and bigram is true. On an error the
// result holds the tokens read before it.
func (s *scanner) tokens(dst []Token) (_ []Token, bigram bool, err error) {
	n, err := s.array("token_ids")
	if err != nil {
		return dst, false, err
	}
	bigram = n > 0 && s.peek() == kindArray
	if !bigram {
		dst, err = s.plainTokens(dst, n)
		return dst, false, err
	}
	for i := range n {
		if pair, err := s.array("token pair"); err != nil {
			return dst, true, err
		} else if pair != 2 {
			return dst, true, s.fail("token pair of %d", pair)
		}
		first, err := s.uint32("token id")
		if err != nil {
			return dst, true, err
		}
		second, err := s.uint32("token id")
		if err != nil {
			return dst, true, err
		}
		dst = append(dst, Token(first))
		if i == n-1 {
			dst = append(dst, Token(second))
		}
	}
	return dst, bigram, nil
}

// plainTokens reads n numbers. Decoding spends most of its time here, so this function itself reads the encodings that
// engines use for token ids.
func (s *scanner) plainTokens(dst []Token, n int) ([]Token, error) {
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
		t, err := s.uint32("token id")
		if err != nil {
			return dst[:len(dst)+i], err
		}
		to[i] = Token(t)
		p = s.p
	}
	s.p = p
	return dst[:len(dst)+n], nil
}

// hashes reads n block hashes.
func (s *scanner) hashes(dst []EngineHash, n int) ([]EngineHash, error) {
	dst = slices.Grow(dst, n)
	for range n {
		if b := s.b[s.p:]; len(b) >= 9 && b[0] == 0xcf { // the usual encoding
			dst = append(dst, EngineHash(binary.BigEndian.Uint64(b[1:])))
			s.p += 9
			continue
		}
		h, err := s.hash()
		if err != nil {
			return dst, err
		}
		dst = append(dst, h)
	}
	return dst, nil
}

// hash reads an engine hash: an integer of either sign, whose 64 bits are the hash, or a digest. vLLM sends the last 8
// bytes of the digest when it is configured to send integers.
func (s *scanner) hash() (EngineHash, error) {
	if b := s.b[s.p:]; len(b) >= 9 && b[0] == 0xcf { // the usual encoding
		s.p += 9
		return EngineHash(binary.BigEndian.Uint64(b[1:])), nil
	}
	if s.peek() != kindBytes {
		v, _, err := s.integer("block hash")
		return EngineHash(v), err
	}
	b, err := s.bytes("block hash")
	if err != nil {
		return 0, err
	}
	if len(b) < 8 {
		return 0, s.fail("block hash of %d bytes, want at least 8", len(b))
	}
	return EngineHash(binary.BigEndian.Uint64(b[len(b)-8:])), nil
}
