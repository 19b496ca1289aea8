package kvblock

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"reflect"
	"strconv"
	"testing"
)

// golden is a batch that testdata/goldens.py encoded, and what it means. Fields that are not there are zero.
type golden struct {
	Name        string        `json:"name"`
	Hex         string        `json:"hex"`
	Rank        *uint32       `json:"rank"`
	Events      []goldenEvent `json:"events"`
	UnknownTags int           `json:"unknown_tags"`
	UnknownKeys int           `json:"unknown_keys"`
}

type goldenEvent struct {
	Kind       string   `json:"kind"`
	Hashes     []string `json:"hashes"` // in decimal: JSON numbers do not hold them
	Parent     string   `json:"parent"`
	Tokens     []Token  `json:"tokens"`
	BlockSize  uint32   `json:"block_size"`
	Bigram     bool     `json:"bigram"`
	Medium     string   `json:"medium"`
	LoRAName   string   `json:"lora_name"`
	LoRAID     bool     `json:"lora_id"`
	CacheSalt  string   `json:"cache_salt"`
	ExtraKeys  string   `json:"extra_keys"` // hexadecimal
	Group      *uint32  `json:"group"`
	SpecKind   string   `json:"spec_kind"`
	Locality   string   `json:"locality"`
	Ownership  string   `json:"ownership"`
	MediaInfos bool     `json:"media_infos"`
	Lookahead  []Token  `json:"lookahead"`
	Local      []string `json:"local"`
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

// Every layout of every engine, encoded by msgspec.
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

// goldenOf writes down what was decoded as goldens.py writes down what it means.
func goldenOf(e *Event) goldenEvent {
	g := goldenEvent{Kind: e.Kind.String(), BlockSize: e.BlockSize, Bigram: e.Bigram, Medium: string(e.Medium), LoRAName: string(e.LoRAName),
		LoRAID: e.HasLoRAID, CacheSalt: string(e.CacheSalt), ExtraKeys: hex.EncodeToString(e.ExtraKeys), SpecKind: string(e.SpecKind),
		Locality: string(e.Locality), Ownership: string(e.Ownership), MediaInfos: e.MediaInfos}
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
