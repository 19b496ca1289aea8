package prompt

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/internal/boundedfile"
	"kvepp/kvblock"
)

// copyModel copies a tiny model to a temporary folder, with some files replaced ("" removes one).
func copyModel(t testing.TB, name string, replaced map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files, err := os.ReadDir(filepath.Join(modelsDir, name))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(filepath.Join(modelsDir, name, file.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file.Name()), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for file, content := range replaced {
		if content == "" {
			err = os.Remove(filepath.Join(dir, file))
		} else if err = os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o755); err == nil {
			err = os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLoadErrors(t *testing.T) {
	for name, c := range map[string]struct {
		replaced map[string]string
		want     []string
	}{
		"no tokenizer": {map[string]string{"tokenizer.json": ""}, []string{"tokenizer.json", "no such file"}},
		"tokenizer cut": {map[string]string{"tokenizer.json": `{"model":`},
			[]string{"tokenizer.json", "unexpected end"}},
		"tokenizer empty":  {map[string]string{"tokenizer.json": `{}`}, []string{"tokenizer.json", "model"}},
		"config cut":       {map[string]string{"tokenizer_config.json": `{`}, []string{"tokenizer_config.json"}},
		"config of a list": {map[string]string{"tokenizer_config.json": `[]`}, []string{"tokenizer_config.json"}},
		"bos of a wrong type": {map[string]string{"tokenizer_config.json": `{"bos_token":{"x":1}}`},
			[]string{"bos_token", "neither a string nor an object"}},
		"split special tokens": {map[string]string{"tokenizer_config.json": `{"split_special_tokens":true}`},
			[]string{"split_special_tokens"}},
		"bad template": {map[string]string{"chat_template.jinja": `{{ x|nosuch }}`},
			[]string{"chat_template.jinja", "default:1", `unknown filter "nosuch"`}},
		"template of a number": {map[string]string{"tokenizer_config.json": `{"chat_template":7}`},
			[]string{"tokenizer_config.json: chat_template"}},
	} {
		_, err := Load(copyModel(t, "tiny-bytelevel", c.replaced), Options{})
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want ...%s...", name, err, want)
			}
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no folder: got %v", err)
	}
}

func TestLoadTemplates(t *testing.T) {
	const config = "tokenizer_config.json"
	for name, c := range map[string]struct {
		replaced map[string]string
		plain    string
		tools    string
	}{
		"file beats config": {map[string]string{"chat_template.jinja": "file", config: `{"chat_template":"config"}`},
			"file", "file"},
		"config": {map[string]string{"chat_template.jinja": "", config: `{"chat_template":"config"}`},
			"config", "config"},
		"named": {map[string]string{"chat_template.jinja": "",
			config: `{"chat_template":[{"name":"default","template":"plain"},
			{"name":"tool_use","template":"tools"},{"name":"rag","template":"{% broken"}]}`}, "plain", "tools"},
		"older file": {map[string]string{"chat_template.jinja": "", config: `{}`,
			"chat_template.json": `{"chat_template":"older"}`}, "older", "older"},
		"special names": {map[string]string{"chat_template.jinja": "{{ eos_token }}{{ bos_token }}",
			config: `{"eos_token":{"content":"<|im_end|>"},"bos_token":null}`}, "<|im_end|>", "<|im_end|>"},
	} {
		m, err := Load(copyModel(t, "tiny-bytelevel", c.replaced), Options{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for tools, want := range map[string]string{"": c.plain,
			`,"tools":[{"type":"function","function":{"name":"f"}}]`: c.tools} {
			got, err := m.renderChat(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}]`+tools))
			if err != nil || got != want {
				t.Errorf("%s: got %q, %v; want %q", name, got, err, want)
			}
		}
	}
	m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": ""}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Tokenize(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}]`)); !errors.Is(
		err,
		ErrNoChatTemplate,
	) {
		t.Errorf("got %v, want ErrNoChatTemplate", err)
	}
	m, err = Load(
		copyModel(t, "tiny-bytelevel", map[string]string{"tokenizer_config.json": "", "chat_template.jinja": ""}),
		Options{},
	)
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := m.Encode("hello", true); err != nil || len(ids) == 0 {
		t.Errorf("without a configuration: %v, %v", ids, err)
	}
}

// TestLargeFile: a file above the limit of a folder's files is an error.
func TestLargeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, maxConfigFile+1); err != nil {
		t.Fatal(err)
	}
	if _, err := boundedfile.Read(path, maxConfigFile); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("a large file: %v", err)
	}
}

// TestLoadTiktoken loads a folder that has a tiktoken.model and no tokenizer.json.
func TestLoadTiktoken(t *testing.T) {
	var model strings.Builder
	for b := range 256 {
		fmt.Fprintf(&model, "%s %d\n", base64.StdEncoding.EncodeToString([]byte{byte(b)}), b)
	}
	dir := t.TempDir()
	for name, content := range map[string]string{
		tiktokenFile:        model.String(),
		tokenizerConfigFile: `{"tokenizer_class":"TikTokenTokenizer"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := Load(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ids, err := m.Encode("a<|reserved_token_257|>", true)
	if want := []kvblock.Token{'a', 257}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("got %v, %v; want %v", ids, err, want)
	}
}
