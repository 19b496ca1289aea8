package dynamo

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"lukechampine.com/blake3"

	"kvepp/pool"
)

// ModelFiles are the checksums of the files that a model's prompts are made of, as model cards write them ("blake3:"
// and 64 hexadecimal digits of the whole file's hash). An empty one is of a file that is not there or not named.
// Source: dynamo-llm 1.6.1, model_card and common::checked_file.
type ModelFiles struct {
	Tokenizer       string // tokenizer.json, else tiktoken.model or the only *.tiktoken
	TokenizerConfig string // tokenizer_config.json
	ChatTemplate    string // chat_template.jinja, else chat_template.json; or a template given to the worker besides
}

const blake3Prefix = "blake3:"

// checkedFile is a file in a card: {"path", "checksum", "size"}, or that under "file" beside "is_custom".
type checkedFile struct {
	Checksum string       `json:"checksum"`
	File     *checkedFile `json:"file"`
}

// checksum reads the checksum of one of a card's files, which stands under the name of its kind, as in
// {"hf_tokenizer_json": {...}}. A file of another form or algorithm counts as not named.
func checksum(raw json.RawMessage) string {
	var kinds map[string]checkedFile
	if json.Unmarshal(raw, &kinds) != nil || len(kinds) != 1 {
		return ""
	}
	for _, file := range kinds {
		sum := file.Checksum
		if file.File != nil {
			sum = file.File.Checksum
		}
		digits, ok := strings.CutPrefix(sum, blake3Prefix)
		if _, err := hex.DecodeString(digits); ok && err == nil && len(digits) == 2*32 {
			return strings.ToLower(sum)
		}
	}
	return ""
}

// ReadModelFiles computes the checksums of a model's folder. chatTemplate is the template that is used in place of the
// folder's; "" means none.
func ReadModelFiles(dir, chatTemplate string) (ModelFiles, error) {
	var m ModelFiles
	tokenizers := []string{filepath.Join(dir, "tokenizer.json"), filepath.Join(dir, "tiktoken.model")}
	if others, err := filepath.Glob(filepath.Join(dir, "*.tiktoken")); err == nil && len(others) == 1 {
		tokenizers = append(tokenizers, others[0])
	}
	templates := []string{filepath.Join(dir, "chat_template.jinja"), filepath.Join(dir, "chat_template.json")}
	if chatTemplate != "" {
		templates = []string{chatTemplate}
	}
	for _, of := range []struct {
		sum   *string
		paths []string
	}{{&m.Tokenizer, tokenizers}, {&m.TokenizerConfig, []string{filepath.Join(dir, "tokenizer_config.json")}},
		{&m.ChatTemplate, templates}} {
		for _, path := range of.paths {
			sum, err := sumOf(path)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return ModelFiles{}, err
			}
			*of.sum = sum
			break
		}
	}
	return m, nil
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := blake3.New(32, nil)
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return blake3Prefix + hex.EncodeToString(h.Sum(nil)), nil
}

// Mismatch is a file of which a worker has another than kvepp.
type Mismatch struct {
	Endpoint string // name
	File     string
	Own      string // kvepp's checksum; "" without such a file
	Worker   string // the model card's; "" when it names none
}

// Compare marks the endpoints whose model card names other files than own has for their model
// (pool.Endpoint.OtherTokenizer), and says which files those are; and those whose card names the tokenizer and its
// configuration, with none that differs (pool.Endpoint.SameTokenizer). own is by model name. Nothing is said of models
// that own does not have, nor of files that the card does not name; but a card that names the tokenizer's configuration
// names a template's file as well if there is one.
func Compare(endpoints []pool.Endpoint, instances []Instance, own map[string]ModelFiles) []Mismatch {
	cards := make(map[uint64]*Card, len(instances))
	for _, in := range instances {
		if in.Card != nil {
			cards[in.InstanceID] = in.Card
		}
	}
	var all []Mismatch
	for i := range endpoints {
		e := &endpoints[i]
		card := cards[e.InstanceID]
		if card == nil {
			continue
		}
		model := e.Model
		if model == "" {
			model = card.Model
		}
		ours, ok := own[model]
		if !ok {
			continue
		}
		theirs := &card.Files
		for _, f := range []struct {
			file, own, worker string
			named             bool
		}{
			{"tokenizer.json", ours.Tokenizer, theirs.Tokenizer, theirs.Tokenizer != ""},
			{"tokenizer_config.json", ours.TokenizerConfig, theirs.TokenizerConfig, theirs.TokenizerConfig != ""},
			{"chat_template.jinja", ours.ChatTemplate, theirs.ChatTemplate, theirs.ChatTemplate != "" ||
				theirs.TokenizerConfig != ""},
		} {
			if f.named && f.own != f.worker {
				e.OtherTokenizer = true
				all = append(all, Mismatch{e.Name, f.file, f.own, f.worker})
			}
		}
		e.SameTokenizer = !e.OtherTokenizer && theirs.Tokenizer != "" && theirs.TokenizerConfig != ""
	}
	return all
}
