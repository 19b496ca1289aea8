package kvblock

import (
	"encoding/binary"
	"math/bits"
)

// XXH3-64 for the common inputs: a block of 16, 32 or 64 tokens, and the 16 bytes of one step of a sequence hash. A
// library inspects the length and mixes the seed into its secret at every call; this code does both once for a prompt.
// The library hashes all other inputs, and the tests compare this code with it.
//
// Source: the xxHash specification 0.2.0, XXH3, for inputs of 9 to 16, 17 to 128 and more than 240 bytes. The names are
// the specification's.

const (
	prime32n1 = 0x9e3779b1
	prime32n2 = 0x85ebca77
	prime32n3 = 0xc2b2ae3d
	prime64n1 = 0x9e3779b185ebca87
	prime64n2 = 0xc2b2ae3d27d4eb4f
	prime64n3 = 0x165667b19e3779f9
	prime64n4 = 0x85ebca77c2b2ae63
	prime64n5 = 0x27d4eb2f165667c5
	primeMX1  = 0x165667919e3779f9
)

// defaultSecret is the specification's default secret, as little-endian words.
var defaultSecret = [24]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
	0x2172ffcc7dd05a82,
	0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471,
	0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea,
	0xeb6313faffa081c5,
	0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45,
	0x7e404bbbcafbd7af,
}

// secret is the default secret combined with a seed.
type secret struct {
	words [24]uint64
	last  [8]uint64 // the words for the last stripe of an input, from byte 121 on
	merge [8]uint64 // the words that finish a long input, from byte 11 on
}

func newSecret(seed uint64) (s secret) {
	var raw [8 * len(s.words)]byte
	for i, w := range defaultSecret {
		if i%2 == 0 {
			w += seed
		} else {
			w -= seed
		}
		s.words[i] = w
		binary.LittleEndian.PutUint64(raw[8*i:], w)
	}
	for i := range s.last {
		s.last[i] = binary.LittleEndian.Uint64(raw[121+8*i:])
		s.merge[i] = binary.LittleEndian.Uint64(raw[11+8*i:])
	}
	return s
}

// plainSecret is the secret for the seed without adapter and namespace.
var plainSecret = newSecret(hashSeed)

// hashTokens sets dst[i] to the hash of block i. blockSize is 16, 32 or 64.
func hashTokens(dst []LocalHash, tokens []Token, blockSize int, seed uint64) {
	s := &plainSecret
	if seed != hashSeed {
		salted := newSecret(seed)
		s = &salted
	}
	switch blockSize {
	case 16:
		s.hashOneStripe(dst, tokens)
	case 32:
		s.hashTwoStripes(dst, tokens)
	case 64:
		s.hashFourStripes(dst, tokens)
	}
}

// stripe is 64 bytes of input.
type stripe [16]Token

// lane returns bytes 8i to 8i+7 as a little-endian word. On a little-endian machine that is one load.
func (p *stripe) lane(i int) uint64 { return uint64(p[2*i]) | uint64(p[2*i+1])<<32 }

// fold multiplies to 128 bits and combines the two halves.
func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= primeMX1
	return h ^ h>>32
}

// hashOneStripe is hashTokens for blocks of 16 tokens.
func (s *secret) hashOneStripe(dst []LocalHash, tokens []Token) {
	length := uint64(64)
	w := &s.words
	for i := range dst {
		block := tokens[16*i:]
		p := (*stripe)(block)
		h := length * prime64n1
		h += fold(p.lane(0)^w[0], p.lane(1)^w[1])
		h += fold(p.lane(2)^w[4], p.lane(3)^w[5])
		h += fold(p.lane(4)^w[6], p.lane(5)^w[7])
		h += fold(p.lane(6)^w[2], p.lane(7)^w[3])
		dst[i] = LocalHash(avalanche(h))
	}
}

// hashTwoStripes is hashTokens for blocks of 32 tokens.
func (s *secret) hashTwoStripes(dst []LocalHash, tokens []Token) {
	length := uint64(128)
	w := &s.words
	for i := range dst {
		block := tokens[32*i:]
		p, q := (*stripe)(block), (*stripe)(block[16:])
		h := length * prime64n1
		h += fold(p.lane(0)^w[0], p.lane(1)^w[1])
		h += fold(p.lane(2)^w[4], p.lane(3)^w[5])
		h += fold(p.lane(4)^w[8], p.lane(5)^w[9])
		h += fold(p.lane(6)^w[12], p.lane(7)^w[13])
		h += fold(q.lane(0)^w[14], q.lane(1)^w[15])
		h += fold(q.lane(2)^w[10], q.lane(3)^w[11])
		h += fold(q.lane(4)^w[6], q.lane(5)^w[7])
		h += fold(q.lane(6)^w[2], q.lane(7)^w[3])
		dst[i] = LocalHash(avalanche(h))
	}
}

// product is what a lane adds to its own sum. A lane also adds itself to its neighbour's sum.
func product(lane, key uint64) uint64 {
	k := lane ^ key
	return k & 0xffffffff * (k >> 32)
}

// hashFourStripes is hashTokens for blocks of 64 tokens: a long input, but too short for the sums to be scrambled. It
// processes two lanes of all stripes at a time, not a stripe at a time, so that the values fit the registers.
func (s *secret) hashFourStripes(dst []LocalHash, tokens []Token) {
	length := uint64(256)
	w, z, m := &s.words, &s.last, &s.merge
	for i := range dst {
		block := tokens[64*i:]
		p, q, r, t := (*stripe)(block), (*stripe)(block[16:]), (*stripe)(block[32:]), (*stripe)(block[48:])
		h := length * prime64n1
		a := prime32n3 + p.lane(1) + q.lane(1) + r.lane(1) + t.lane(1) +
			product(p.lane(0), w[0]) + product(q.lane(0), w[1]) + product(r.lane(0), w[2]) + product(t.lane(0), z[0])
		b := prime64n1 + p.lane(0) + q.lane(0) + r.lane(0) + t.lane(0) +
			product(p.lane(1), w[1]) + product(q.lane(1), w[2]) + product(r.lane(1), w[3]) + product(t.lane(1), z[1])
		h += fold(a^m[0], b^m[1])
		a = prime64n2 + p.lane(3) + q.lane(3) + r.lane(3) + t.lane(3) +
			product(p.lane(2), w[2]) + product(q.lane(2), w[3]) + product(r.lane(2), w[4]) + product(t.lane(2), z[2])
		b = prime64n3 + p.lane(2) + q.lane(2) + r.lane(2) + t.lane(2) +
			product(p.lane(3), w[3]) + product(q.lane(3), w[4]) + product(r.lane(3), w[5]) + product(t.lane(3), z[3])
		h += fold(a^m[2], b^m[3])
		a = prime64n4 + p.lane(5) + q.lane(5) + r.lane(5) + t.lane(5) +
			product(p.lane(4), w[4]) + product(q.lane(4), w[5]) + product(r.lane(4), w[6]) + product(t.lane(4), z[4])
		b = prime32n2 + p.lane(4) + q.lane(4) + r.lane(4) + t.lane(4) +
			product(p.lane(5), w[5]) + product(q.lane(5), w[6]) + product(r.lane(5), w[7]) + product(t.lane(5), z[5])
		h += fold(a^m[4], b^m[5])
		a = prime64n5 + p.lane(7) + q.lane(7) + r.lane(7) + t.lane(7) +
			product(p.lane(6), w[6]) + product(q.lane(6), w[7]) + product(r.lane(6), w[8]) + product(t.lane(6), z[6])
		b = prime32n1 + p.lane(6) + q.lane(6) + r.lane(6) + t.lane(6) +
			product(p.lane(7), w[7]) + product(q.lane(7), w[8]) + product(r.lane(7), w[9]) + product(t.lane(7), z[7])
		h += fold(a^m[6], b^m[7])
		dst[i] = LocalHash(avalanche(h))
	}
}

// The constants that one step of a sequence hash combines with its words, from bytes 24 to 56 of the default secret.
// This seed is never salted.
const (
	chainLow  = (0x1f67b3b7a4a44072 ^ 0x78e5c0cc4ee679cb) + hashSeed
	chainHigh = (0x2172ffcc7dd05a82 ^ 0x8e2443f7744608b8) - hashSeed
)

// pairLength is the length of two words, in bytes. It is a variable because the compiler would add a constant last, on
// the critical path from one step to the next.
var pairLength uint64 = 16

// hashPair is the hash of two little-endian words.
func hashPair(a, b uint64) uint64 {
	a ^= chainLow
	b ^= chainHigh
	return avalanche(pairLength + bits.ReverseBytes64(a) + b + fold(a, b))
}
