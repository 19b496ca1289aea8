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

// ModelFiles holds the checksums of the files that determine a model's prompts, in the form of model cards: "blake3:"
// and 64 hexadecimal digits of the whole file's hash. An empty checksum means that the file is absent or not named.
// Source: dynamo-llm 1.6.1, model_card and common::checked_file.
type ModelFiles struct {
	Tokenizer       string // tokenizer.json, else tiktoken.model or the only *.tiktoken
	TokenizerConfig string // tokenizer_config.json
	ChatTemplate    string // chat_template.jinja, else chat_template.json; or the worker's custom template
}

const blake3Prefix = "blake3:"

// checkedFile is a file in a card: {"path", "checksum", "size"}, or {"is_custom", "file": {...}} around that.
type checkedFile struct {
	Checksum string       `json:"checksum"`
	File     *checkedFile `json:"file"`
}

// checksum returns the checksum of one of a card's files, which is the value of its kind, as in
// {"hf_tokenizer_json": {...}}. It returns "" for another form or algorithm.
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

// ReadModelFiles computes the checksums of the files in a model's folder. If chatTemplate is not empty, it is the path
// of the template that replaces the folder's.
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
			sum, err := checksumOf(path)
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

func checksumOf(path string) (string, error) {
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

// Mismatch is a file that differs between a worker and kvepp.
type Mismatch struct {
	Endpoint string // name
	File     string
	Own      string // kvepp's checksum; "" without such a file
	Worker   string // the model card's checksum; "" if it names no file
}

// Compare compares the files in model cards with own, which is by model name, and returns those that differ. It sets
// pool.Endpoint.OtherTokenizer if one differs, and pool.Endpoint.SameTokenizer if the card names the tokenizer and its
// configuration and no file differs. It ignores models that own does not have, and files that the card does not name.
// Exception: a card that names the tokenizer's configuration also names the template if there is one.
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
