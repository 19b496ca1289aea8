package tokenizer

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// variants are tokenizer.json files, as a base and what differs from it, with what Hugging Face tokenizers makes of texts
// by them. See testdata/variants_gen.py.
type variants struct {
	Base     map[string]json.RawMessage
	Variants []struct {
		Name      string
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

// override returns a tokenizer.json: the base with the overrides, of whose model only what differs is given.
func (v *variants) override(t testing.TB, overrides map[string]json.RawMessage) []byte {
	t.Helper()
	file := maps.Clone(v.Base)
	for key, value := range overrides {
		if key == "model" {
			var model, changes map[string]json.RawMessage
			if err := json.Unmarshal(v.Base["model"], &model); err != nil {
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
	v := loadVariants(t)
	if len(v.Variants) < 10 {
		t.Fatalf("only %d variants", len(v.Variants))
	}
	for _, variant := range v.Variants {
		t.Run(variant.Name, func(t *testing.T) {
			e, err := parseTokenizerJSON(v.override(t, variant.Overrides))
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range variant.Cases {
				if ids, err := e.append(nil, c.Text, true, nil); err != nil || !slices.Equal(ids, c.IDs) {
					t.Errorf("%q\n got %v, %v\nwant %v", c.Text, ids, err, c.IDs)
				}
			}
		})
	}
}
