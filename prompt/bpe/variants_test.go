package bpe

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvepp/kvblock"
)

// variants are tokenizer.json files, each as a base and its differences, with the ids that Hugging Face tokenizers
// gives texts. See testdata/variants_gen.py.
type variants struct {
	Bases    map[string]map[string]json.RawMessage
	Variants []struct {
		Name      string
		Base      string
		Overrides map[string]json.RawMessage
		Cases     []struct {
			Text string
			IDs  []kvblock.Token
		}
	}
}

func loadVariants(t testing.TB) variants {
	t.Helper()
	raw, err := os.ReadFile("testdata/variants.json")
	if err != nil {
		t.Fatal(err)
	}
	var v variants
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// override returns the tokenizer.json base with the overrides. They replace whole components, but single fields of the
// model.
func (v *variants) override(t testing.TB, base string, overrides map[string]json.RawMessage) []byte {
	t.Helper()
	file := maps.Clone(v.Bases[base])
	for key, value := range overrides {
		if key == "model" {
			var model, changes map[string]json.RawMessage
			if err := json.Unmarshal(v.Bases[base]["model"], &model); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(value, &changes); err != nil {
				t.Fatal(err)
			}
			maps.Copy(model, changes)
			var err error
			if value, err = json.Marshal(model); err != nil {
				t.Fatal(err)
			}
		}
		file[key] = value
	}
	raw, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestVariantsAgainstHuggingFace(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	v := loadVariants(t)
	if len(v.Variants) < 100 {
		t.Fatalf("only %d variants", len(v.Variants))
	}
	for _, variant := range v.Variants {
		t.Run(variant.Name, func(t *testing.T) {
			e, err := ParseTokenizerJSON(v.override(t, variant.Base, variant.Overrides))
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range variant.Cases {
				if ids, err := e.append(Budget{}, nil, c.Text, true, nil); err != nil || !slices.Equal(ids, c.IDs) {
					t.Errorf("%q\n got %v, %v\nwant %v", c.Text, ids, err, c.IDs)
				}
			}
		})
	}
}

// TestGeneralEngine counts the texts that the general pattern engine splits, and checks that it stops at its time limit
// on a text of exponential cost.
func TestGeneralEngine(t *testing.T) {
	v := loadVariants(t)
	load := func(pattern string) *Encoder {
		raw := v.override(
			t,
			"bytes",
			map[string]json.RawMessage{"pre_tokenizer": json.RawMessage(`{"type":"Sequence","pretokenizers":[
			{"type":"Split","pattern":{"Regex":` + strconv.Quote(pattern) + `},"behavior":"Isolated","invert":false},
			{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}`)},
		)
		e, err := ParseTokenizerJSON(raw)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	e := load(regexQwen)
	if _, err := e.Encode(&Budget{}, "some text", false); err != nil || e.GeneralPattern() {
		t.Errorf("a pattern with a scanner: %v, %v", err, e.GeneralPattern())
	}
	e = load(`[a-z]+|.`)
	if _, err := e.Encode(&Budget{}, "some text", false); err != nil || !e.GeneralPattern() {
		t.Errorf("another pattern: %v, %v", err, e.GeneralPattern())
	}
	e = load(`(?:aa|a)*b|.`)
	before := []kvblock.Token{1, 2}
	ids, err := e.AppendEncode(before, strings.Repeat("a", 200), false)
	if !errors.Is(err, errMatch) || !slices.Equal(ids, before) {
		t.Errorf("a hostile text: %v, %v", ids, err)
	}
}
