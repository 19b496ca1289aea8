package kvblock

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"
)

// hash16 and hashPair must equal the library for every seed and content.
func TestXXH3EqualsLibrary(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	seeds := []uint64{0, 1, hashSeed, 1 << 63, 1<<64 - 1}
	for range 200 {
		seeds = append(seeds, rng.Uint64())
	}
	tokens := make([]Token, 4*16+5) // with an incomplete block at the end
	for _, seed := range seeds {
		for i := range tokens {
			switch rng.IntN(8) {
			case 0:
				tokens[i] = 0
			case 1:
				tokens[i] = 1<<32 - 1
			default:
				tokens[i] = Token(rng.Uint32())
			}
		}
		got := make([]LocalHash, len(tokens)/16)
		hash16(got, tokens, seed)
		for i, h := range got {
			if want := xxh3.HashSeed(appendTokens(nil, tokens[16*i:16*(i+1)]), seed); uint64(h) != want {
				t.Fatalf("block %d, seed %d: %d, want %d", i, seed, h, want)
			}
		}
		a, b := seed, rng.Uint64()
		raw := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, a), b)
		if got, want := hashPair(a, b), xxh3.HashSeed(raw, hashSeed); got != want {
			t.Fatalf("pair %d, %d: %d, want %d", a, b, got, want)
		}
	}
}
