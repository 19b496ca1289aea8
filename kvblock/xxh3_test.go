package kvblock

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"
)

// hashTokens and hashPair must equal the library for every size, seed and content.
func TestXXH3EqualsLibrary(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	seeds := []uint64{0, 1, hashSeed, 1 << 63, 1<<64 - 1}
	for range 200 {
		seeds = append(seeds, rng.Uint64())
	}
	tokens := make([]Token, 4*64+5) // with an incomplete block at the end
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
		for _, size := range []int{16, 32, 64} {
			got := make([]LocalHash, len(tokens)/size)
			hashTokens(got, tokens, size, seed)
			for i, h := range got {
				if want := xxh3.HashSeed(appendTokens(nil, tokens[i*size:(i+1)*size]), seed); uint64(h) != want {
					t.Fatalf("block %d of %d tokens, seed %d: %d, want %d", i, size, seed, h, want)
				}
			}
		}
		a, b := seed, rng.Uint64()
		raw := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, a), b)
		if got, want := hashPair(a, b), xxh3.HashSeed(raw, hashSeed); got != want {
			t.Fatalf("pair %d, %d: %d, want %d", a, b, got, want)
		}
	}
}
