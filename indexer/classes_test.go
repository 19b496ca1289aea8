package indexer

import (
	"bufio"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"kvepp/kvblock"
)

// vector is a line of testdata/hybrid-vectors.jsonl.gz: the beginning of a case, a batch of events, or a prompt with
// the number of tokens that the engine then had cached. vLLM 0.33.0's own scheduler made them, with few blocks, so that
// blocks were evicted.
type vector struct {
	Case   string
	Chunk  int
	EAGLE  []int `json:"eagle_groups"`
	Batch  string
	Prompt []kvblock.Token
	Cached int
}

// The index predicts what vLLM reuses of each prompt.
func TestHybridVectors(t *testing.T) {
	f, err := os.Open("testdata/hybrid-vectors.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var of vector // the beginning of the current case
	var x *Index
	var n *kvblock.Normalizer
	var b kvblock.Batch
	var scores OverlapScores
	right, all := map[string]int{}, map[string]int{}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var v vector
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		switch {
		case v.Case != "":
			of, n = v, kvblock.NewNormalizer(0)
			if x, err = New(Config{}); err != nil {
				t.Fatal(err)
			}
		case v.Batch != "":
			payload, err := hex.DecodeString(v.Batch)
			if err != nil {
				t.Fatal(err)
			}
			if err := kvblock.DecodeBatch(payload, &b); err != nil {
				t.Fatal(err)
			}
			for ops := n.Normalize(&b, nil); len(ops) > 0; {
				did, a := x.Apply(3, ops, false)
				if did == 0 {
					if ops[0].Kind != kvblock.OpDropped || ops[0].Reason == kvblock.DropUnplaced {
						t.Errorf("%s: %+v", of.Case, ops[0])
					}
					did = 1
				} else if len(a.Failed) > 0 || a.Unknown > 0 {
					t.Errorf("%s: %+v", of.Case, a)
				}
				ops = ops[did:]
			}
		default:
			all[of.Case]++
			traits := n.Traits()
			blocks := 0
			if size := traits.BlockSize; size > 0 {
				p := Prompt{Tokens: len(v.Prompt), IDs: v.Prompt, Options: kvblock.HashOptions{BlockSize: size}}
				p.Chain = kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, v.Prompt, p.Options))
				h := Hybrid{Classes: traits.Classes, BlockSize: size, Chunk: of.Chunk}
				if len(of.EAGLE) > 0 {
					h.Drop = kvblock.EAGLEDropFull // its group is in the vectors' only case
				}
				x.SetHybrid(3, &h)
				x.FindPrompt(&p, &scores)
				blocks = scores.Blocks(3)
			}
			if blocks*traits.BlockSize == v.Cached {
				right[of.Case]++
			} else {
				t.Errorf("%s: a prompt of %d tokens: %d cached, the engine had %d",
					of.Case, len(v.Prompt), blocks*traits.BlockSize, v.Cached)
			}
			if traits.UpperBound || scores.Cut(3).UpperBound {
				t.Errorf("%s: an upper bound", of.Case)
			}
		}
	}
	if lines.Err() != nil || len(all) != 9 { // of 60 prompts each
		t.Fatalf("%d cases, %v", len(all), lines.Err())
	}
	for name, n := range all {
		t.Logf("%s: %d of %d", name, right[name], n)
	}
}
