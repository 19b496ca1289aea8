package kvblock

import "math/bits"

// XXH3-64 for the smallest inputs: a block of 16 tokens, and the 16 bytes of one step of a sequence hash. A library
// inspects the length and mixes the seed into its secret at every call, which takes as long as the hash; this code does
// both once for a prompt. The library hashes all other inputs, and the tests compare this code with it.
//
// Source: the xxHash specification 0.2.0, XXH3, for inputs of 9 to 16 and 17 to 128 bytes.

const (
	prime64n1 = 0x9e3779b185ebca87
	primeMX1  = 0x165667919e3779f9
)

// secret is the start of the specification's default secret, as little-endian words.
var secret = [8]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
	0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
}

// hash16 sets dst[i] to the hash of the i-th 16 tokens.
func hash16(dst []LocalHash, tokens []Token, seed uint64) {
	w := secret
	for i := 0; i < len(w); i += 2 {
		w[i] += seed
		w[i+1] -= seed
	}
	length := uint64(64) // a variable, as pairLength
	for i := range dst {
		p := (*[16]Token)(tokens[16*i:])
		h := length * prime64n1
		h += fold(lane(p, 0)^w[0], lane(p, 1)^w[1])
		h += fold(lane(p, 2)^w[4], lane(p, 3)^w[5])
		h += fold(lane(p, 4)^w[6], lane(p, 5)^w[7])
		h += fold(lane(p, 6)^w[2], lane(p, 7)^w[3])
		dst[i] = LocalHash(avalanche(h))
	}
}

// lane returns bytes 8i to 8i+7 as a little-endian word. On a little-endian machine that is one load.
func lane(p *[16]Token, i int) uint64 { return uint64(p[2*i]) | uint64(p[2*i+1])<<32 }

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
