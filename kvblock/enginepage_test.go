package kvblock

import (
	"encoding/hex"
	"os"
	"regexp"
	"slices"
	"testing"
)

// TestPayloadOfEnginePage decodes the payload that docs/your-own-engine.md shows.
func TestPayloadOfEnginePage(t *testing.T) {
	page, err := os.ReadFile("../docs/your-own-engine.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := regexp.MustCompile("```payload\n([0-9a-f]+)\n```").FindSubmatch(page)
	if shown == nil {
		t.Fatal("the page shows no payload")
	}
	payload, err := hex.DecodeString(string(shown[1]))
	if err != nil {
		t.Fatal(err)
	}
	var b Batch
	if err := DecodeBatch(payload, &b); err != nil {
		t.Fatal(err)
	}
	if len(b.Events) != 1 || b.Timestamp != 1.5 || !b.HasRank || b.Rank != 0 {
		t.Fatalf("decoded %+v", b)
	}
	e := &b.Events[0]
	if e.Kind != BlockStored || !slices.Equal(e.Hashes, []EngineHash{111, 222}) || e.HasParent ||
		len(e.Tokens) != 8 || e.BlockSize != 4 || string(e.Medium) != "GPU" {
		t.Errorf("decoded event %+v", *e)
	}
	ops := NewNormalizer(0).Normalize(&b, nil)
	if len(ops) != 1 || ops[0].Kind != OpStored || len(ops[0].Stored.Blocks) != 2 {
		t.Errorf("operations %+v, want one store of two blocks", ops)
	}
}
