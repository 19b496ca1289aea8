package kvblock

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

// appendAs appends v in a random one of msgpack's encodings.
func appendAs(b []byte, v uint64, rng *rand.Rand) []byte {
	type way struct {
		max  uint64
		make func() []byte
	}
	ways := []way{
		{1<<7 - 1, func() []byte { return append(b, byte(v)) }},
		{1<<8 - 1, func() []byte { return append(b, 0xcc, byte(v)) }},
		{1<<16 - 1, func() []byte { return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v)) }},
		{1<<32 - 1, func() []byte { return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v)) }},
		{1<<64 - 1, func() []byte { return binary.BigEndian.AppendUint64(append(b, 0xcf), v) }},
		{1<<7 - 1, func() []byte { return append(b, 0xd0, byte(v)) }},
		{1<<15 - 1, func() []byte { return binary.BigEndian.AppendUint16(append(b, 0xd1), uint16(v)) }},
		{1<<31 - 1, func() []byte { return binary.BigEndian.AppendUint32(append(b, 0xd2), uint32(v)) }},
		{1<<63 - 1, func() []byte { return binary.BigEndian.AppendUint64(append(b, 0xd3), v) }},
	}
	ways = slices.DeleteFunc(ways, func(w way) bool { return v > w.max })
	return ways[rng.IntN(len(ways))].make()
}

// Numbers of every width and order, up to the last byte of the input, and inputs that end inside a number.
func TestNumbersInEveryWidth(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 3000 {
		n := rng.IntN(20)
		tokens := make([]Token, n)
		hashes := make([]EngineHash, n)
		tokenBytes := binary.BigEndian.AppendUint16([]byte{0xdc}, uint16(n))
		hashBytes := slices.Clone(tokenBytes)
		for i := range n {
			tokens[i] = Token(rng.Uint64() >> (32 + rng.IntN(32)))
			tokenBytes = appendAs(tokenBytes, uint64(tokens[i]), rng)
			hashes[i] = EngineHash(rng.Uint64() >> rng.IntN(64))
			hashBytes = appendAs(hashBytes, uint64(hashes[i]), rng)
		}
		s := &scanner{b: tokenBytes}
		got, bigram := s.tokens([]Token{7})
		if want := append([]Token{7}, tokens...); s.err != nil || bigram || !slices.Equal(got, want) ||
			s.p != len(tokenBytes) {
			t.Fatalf("%x: read %d to byte %d, %v; want %d", tokenBytes, got, s.p, s.err, want)
		}
		s = &scanner{b: hashBytes, p: 3}
		gotHashes := s.hashes(nil, n)
		if s.err != nil || !slices.Equal(gotHashes, hashes) || s.p != len(hashBytes) {
			t.Fatalf("%x: read %d to byte %d, %v; want %d", hashBytes, gotHashes, s.p, s.err, hashes)
		}
		if n == 0 {
			continue
		}
		s = &scanner{b: tokenBytes[:len(tokenBytes)-1]}
		if s.tokens(nil); !errors.Is(s.err, ErrMalformed) {
			t.Fatalf("%x without its last byte: %v", tokenBytes, s.err)
		}
	}
	for _, bad := range []string{"\x91\xff", "\x91\xd0\x80", "\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00",
		"\x91\xca\x00\x00\x00\x00", "\x92\xcd\x01\x01\xc0\x00\x00\x00\x00\x00\x00"} {
		s := &scanner{b: []byte(bad)}
		if got, _ := s.tokens(nil); !errors.Is(s.err, ErrMalformed) {
			t.Errorf("%x: read %d, %v; want ErrMalformed", bad, got, s.err)
		}
	}
}

// Compares hashSet, which finds hashes sent twice, with a map over many rounds of all sizes.
func TestHashSetEqualsMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	var s hashSet
	for range 2000 {
		n := rng.IntN(300)
		s.begin(n)
		seen := map[EngineHash]bool{}
		for range n {
			h := EngineHash(rng.IntN(200))
			if isNew := s.add(h); isNew == seen[h] {
				t.Fatalf("hash %d: add returned %v, but seen before is %v", h, isNew, seen[h])
			}
			seen[h] = true
		}
	}
}
