package bpe

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"kvepp/kvblock"
)

const modelsDir = "../../test/models"

var modelNames = []string{"tiny-bytelevel", "tiny-sentencepiece"}

// goldenString is a text and the ids that Hugging Face tokenizers makes of it. See test/models/train.py.
type goldenString struct {
	Text        string
	IDs         []kvblock.Token
	WithSpecial []kvblock.Token // nil: equal to IDs
}

func readModelFile(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, name))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func loadEncoder(t testing.TB, name string) *Encoder {
	t.Helper()
	e, err := ParseTokenizerJSON(readModelFile(t, filepath.Join(name, "tokenizer.json")))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// addTokens returns a tokenizer.json with further added tokens.
func addTokens(t testing.TB, tokenizerJSON []byte, contents ...string) []byte {
	t.Helper()
	var file map[string]json.RawMessage
	var added []json.RawMessage
	err := errors.Join(json.Unmarshal(tokenizerJSON, &file), json.Unmarshal(file["added_tokens"], &added))
	if err != nil {
		t.Fatal(err)
	}
	for i, content := range contents {
		added = append(added, fmt.Appendf(
			nil,
			`{"id":%d,"content":%q,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,`+
				`"special":true}`,
			3079+i,
			content,
		))
	}
	if file["added_tokens"], err = json.Marshal(added); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func loadGoldens(t testing.TB, name string) []goldenString {
	t.Helper()
	var g struct{ Strings []goldenString }
	if err := json.Unmarshal(readModelFile(t, filepath.Join("testdata", name+".json")), &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Strings) < 200 {
		t.Fatalf("only %d strings", len(g.Strings))
	}
	return g.Strings
}

func TestStringsAgainstHuggingFace(t *testing.T) {
	for _, name := range modelNames {
		t.Run(name, func(t *testing.T) {
			e, goldens := loadEncoder(t, name), loadGoldens(t, name)
			for _, pass := range []string{"cold caches", "warm caches"} {
				for _, want := range goldens {
					ids, err := e.Encode(&Budget{}, want.Text, false)
					if err != nil || !slices.Equal(ids, want.IDs) {
						t.Errorf("%s: %q\n got %v, %v\nwant %v", pass, want.Text, ids, err, want.IDs)
					}
					if want.WithSpecial == nil {
						want.WithSpecial = want.IDs
					}
					ids, err = e.Encode(&Budget{}, want.Text, true)
					if err != nil || !slices.Equal(ids, want.WithSpecial) {
						t.Errorf(
							"%s, special tokens: %q\n got %v, %v\nwant %v",
							pass,
							want.Text,
							ids,
							err,
							want.WithSpecial,
						)
					}
				}
			}
		})
	}
}

// TestConcurrentEncode encodes on several goroutines, which fill the same caches.
func TestConcurrentEncode(t *testing.T) {
	for _, name := range modelNames {
		e, goldens := loadEncoder(t, name), loadGoldens(t, name)
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for i := range goldens {
					want := goldens[(i+worker*50)%len(goldens)]
					if ids, err := e.Encode(&Budget{}, want.Text, false); err != nil || !slices.Equal(ids, want.IDs) {
						t.Errorf("%s: %q: got %v, %v", name, want.Text, ids, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}
