package kvblock

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"
)

// testdata/engine-hashes.jsonl has hashes of vLLM 0.32.0's own code, of a block of these tokens behind one of the same
// tokens with this salt.
func TestEngineHashes(t *testing.T) {
	f, err := os.Open("testdata/engine-hashes.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines, n := json.NewDecoder(f), 0
	for lines.More() {
		var v struct {
			Algorithm  string
			Seed, Salt *string
			Tokens     []Token
			Long       bool // 40 tokens from 1000 on, 20 times
			Hash       string
		}
		if err := lines.Decode(&v); err != nil {
			t.Fatal(err)
		}
		for i := range 800 {
			if v.Long {
				v.Tokens = append(v.Tokens, Token(1000+i%40))
			}
		}
		var seeds []string
		if v.Seed != nil {
			seeds = []string{*v.Seed}
		}
		h, err := NewEngineHashes(seeds)
		if err != nil {
			t.Fatal(err)
		}
		at := 2 * len(seeds)
		if v.Algorithm == "sha256_cbor" {
			at++
		}
		var salt []byte
		if v.Salt != nil {
			salt = []byte(*v.Salt)
		}
		s := &h.schemes[at]
		first, buf := s.next(nil, &s.root, v.Tokens, salt)
		second, _ := s.next(buf, &first, v.Tokens, nil)
		if got := fmt.Sprintf("%016x", uint64(second.announced())); got != v.Hash {
			t.Errorf("%s, seed %v, salt %v, %d tokens: %s, want %s",
				v.Algorithm, seeds, salt, len(v.Tokens), got, v.Hash)
		}
		n++
	}
	if n != 120 {
		t.Errorf("%d hashes", n)
	}
}

func TestHashSeedsRefused(t *testing.T) {
	for _, seeds := range [][]string{slices.Repeat([]string{"1"}, 17), {"-1"}, {"4294967296"}, {"x"}, {""}} {
		if _, err := NewEngineHashes(seeds); err == nil {
			t.Errorf("%q are accepted", seeds)
		}
	}
	if h, err := NewEngineHashes([]string{"default", "random", "7", "7"}); err != nil || len(h.schemes) != 6 {
		t.Errorf("%v, %+v", err, h)
	}
}
