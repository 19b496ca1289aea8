package dynamo

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"kvepp/pool"
)

// TestCardsOfAMocker reads cards that Dynamo 1.6.1's mocker published for the models of test/models, and expects the
// same checksums of those folders. After a change of those models, take the cards from a mocker's discovery again.
func TestCardsOfAMocker(t *testing.T) {
	const models = "../../test/models/"
	inJSON := t.TempDir() // tiny-bytelevel with its template in chat_template.json
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		copyFile(t, filepath.Join(models, "tiny-bytelevel", name), filepath.Join(inJSON, name))
	}
	template, err := os.ReadFile(models + "tiny-bytelevel/chat_template.jinja")
	if err != nil {
		t.Fatal(err)
	}
	inObject, err := json.Marshal(string(template))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(inJSON, "chat_template.json"),
		[]byte(`{"chat_template": `+pythonJSON(inObject)+`}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		card, dir string
		sums      int
	}{
		{"card-template-in-jinja.json", models + "tiny-bytelevel", 3},
		{"card-template-in-json.json", inJSON, 3},
		{"card-template-in-config.json", models + "tiny-sentencepiece", 2},
	} {
		record, err := os.ReadFile("testdata/" + c.card)
		if err != nil {
			t.Fatal(err)
		}
		_, id, card, err := parseCard(record)
		if err != nil {
			t.Fatal(err)
		}
		own, err := ReadModelFiles(c.dir, "")
		if err != nil || own != card.Files {
			t.Errorf("%s:\n  the card %+v\nthe folder %+v, %v", c.card, card.Files, own, err)
		}
		named := 0
		for _, sum := range []string{own.Tokenizer, own.TokenizerConfig, own.ChatTemplate} {
			if sum != "" {
				named++
			}
		}
		if named != c.sums {
			t.Errorf("%s: %d checksums, want %d", c.card, named, c.sums)
		}
		endpoints := []pool.Endpoint{{Name: "w", Model: "tiny", InstanceID: id}}
		if got := Compare(endpoints, []Instance{{InstanceID: id, Card: card}},
			map[string]ModelFiles{"tiny": own}); got != nil ||
			endpoints[0].OtherTokenizer {
			t.Errorf("%s: %+v", c.card, got)
		}
	}
}

// pythonJSON replaces Go's escapes of characters by those characters, as Python's json writes them.
func pythonJSON(text []byte) string {
	return strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(string(text))
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestReadModelFiles(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Source: the BLAKE3 paper's test vectors, of no bytes; of "abc" as b3sum prints it.
	const empty = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
	const abc = "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
	expect := func(template string, want ModelFiles) {
		t.Helper()
		if got, err := ReadModelFiles(dir, template); err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	expect("", ModelFiles{})
	put("qwen.tiktoken", "")
	expect("", ModelFiles{Tokenizer: empty})
	put("tiktoken.model", "abc")
	put("chat_template.json", "")
	expect("", ModelFiles{Tokenizer: abc, ChatTemplate: empty})
	put("tokenizer.json", "")
	put("tokenizer_config.json", "abc")
	put("chat_template.jinja", "abc")
	expect("", ModelFiles{Tokenizer: empty, TokenizerConfig: abc, ChatTemplate: abc})
	put("mine", "")
	expect(filepath.Join(dir, "mine"), ModelFiles{Tokenizer: empty, TokenizerConfig: abc, ChatTemplate: empty})
	if err := os.Remove(filepath.Join(dir, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "tokenizer.json"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadModelFiles(dir, ""); err == nil {
		t.Error("no error for a folder instead of a file")
	}
}

func TestChecksum(t *testing.T) {
	const sum = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
	for raw, want := range map[string]string{
		`{"hf_tokenizer_json":{"path":"/x","checksum":"` + sum + `","size":1}}`:                    sum,
		`{"tik_token_model":{"path":"/x","checksum":"` + sum + `"}}`:                               sum,
		`{"hf_chat_template_json":{"is_custom":true,"file":{"path":"","checksum":"` + sum + `"}}}`: sum,
		`{"a":{"checksum":"sha256:` + sum[7:] + `"}}`:                                              "",
		`{"a":{"checksum":"` + sum[:70] + `"}}`:                                                    "",
		`{"a":{"checksum":"blake3:` + strings.Repeat("x", 64) + `"}}`:                              "",
		`{"a":{}}`: "", `{}`: "", `null`: "", `"gguf"`: "", `{"a":3}`: "", ``: "",
		`{"a":{"checksum":"` + sum + `"},"b":{"checksum":"` + sum + `"}}`: "",
	} {
		if got := checksum(json.RawMessage(raw)); got != want {
			t.Errorf("%s: %q, want %q", raw, got, want)
		}
	}
	// An unknown form of the files must not make the card invalid.
	if _, _, card, err := parseCard([]byte(
		`{"instance_id":1,"card_json":{"display_name":"m","tokenizer":"gguf","prompt_formatter":[],` +
			`"chat_template_file":7}}`)); err != nil ||
		card == nil ||
		card.Files != (ModelFiles{}) {
		t.Errorf("%+v, %v", card, err)
	}
}

func TestCompare(t *testing.T) {
	own := map[string]ModelFiles{"m": {"t", "c", "j"}, "no-template": {"t", "c", ""}}
	for _, c := range []struct {
		model  string
		theirs ModelFiles
		want   []Mismatch
	}{
		{"m", ModelFiles{"t", "c", "j"}, nil},
		{"m", ModelFiles{}, nil},
		{"m", ModelFiles{Tokenizer: "t"}, nil},
		{"other", ModelFiles{"x", "x", "x"}, nil},
		{"m", ModelFiles{"x", "c", "j"}, []Mismatch{{"w", "tokenizer.json", "t", "x"}}},
		{"m", ModelFiles{"", "x", "y"}, []Mismatch{{"w", "tokenizer_config.json", "c", "x"},
			{"w", "chat_template.jinja", "j", "y"}}},
		// the worker's folder has no such file
		{"m", ModelFiles{"t", "c", ""}, []Mismatch{{"w", "chat_template.jinja", "j", ""}}},
		{"no-template", ModelFiles{"t", "c", ""}, nil},
		{"no-template", ModelFiles{"t", "c", "j"}, []Mismatch{{"w", "chat_template.jinja", "", "j"}}},
	} {
		for _, named := range []string{c.model, ""} { // the endpoints file names the model, or only the card does
			endpoints := []pool.Endpoint{
				{Name: "w", Model: named, InstanceID: 7},
				{Name: "unknown", Model: "m", InstanceID: 8},
			}
			got := Compare(
				endpoints,
				[]Instance{{InstanceID: 7, Card: &Card{Model: c.model, Files: c.theirs}}, {InstanceID: 8}},
				own,
			)
			if same := c.model != "other" && c.want == nil && c.theirs.Tokenizer != "" &&
				c.theirs.TokenizerConfig != ""; endpoints[0].SameTokenizer != same ||
				endpoints[1].SameTokenizer {
				t.Errorf("%s %+v: %+v", c.model, c.theirs, endpoints)
			}
			if !reflect.DeepEqual(got, c.want) || endpoints[0].OtherTokenizer != (c.want != nil) ||
				endpoints[1].OtherTokenizer {
				t.Errorf("%s %+v: %+v, %+v", c.model, c.theirs, got, endpoints)
			}
		}
	}
}
