package parity

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
	"kvepp/tokenizer"
)

// TestHarmony compares the ids of gpt-oss chats and responses with those of vLLM's own code with oss-harmony, which has
// the vocabulary built in. The requests are generated, with tools, tool calls, reasoning and texts full of special
// tokens. Each is encoded with a cold and with a warm cache.
func TestHarmony(t *testing.T) {
	if testing.Short() {
		t.Log("the texts that vLLM wrote are compared in package tokenizer; the ids in make test-long")
		return
	}
	home := environment(t, "KVEPP_ENGINES")
	folders := strings.Fields(environment(t, "KVEPP_MODELS"))
	i := slices.IndexFunc(
		folders,
		func(folder string) bool { return strings.HasPrefix(filepath.Base(folder), "gptoss") },
	)
	if i < 0 {
		t.Fatalf("gpt-oss is not among %v", folders)
	}
	model, err := tokenizer.Load(gptOSS(t, folders[i]), tokenizer.Options{Engine: tokenizer.VLLM})
	if err != nil {
		t.Fatal(err)
	}
	day := time.Now().Format(time.DateOnly)
	cmd := exec.Command(
		filepath.Join(home, "vllm", "bin/python"),
		"harmony.py",
		filepath.Join(home, "sources"),
		day,
		"3000",
	)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	equal, refused, unknown, wrong := 0, 0, 0, 0
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var answer struct {
			Body  json.RawMessage
			IDs   []kvblock.Token
			Error string
		}
		if err := json.Unmarshal(lines.Bytes(), &answer); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			ids, err := tokenizeChat(model, answer.Body)
			switch {
			case answer.Error != "" && err != nil:
				refused++
			case answer.Error == "" && tokenizer.IsUnknown(err):
				unknown++
			case answer.Error == "" && err == nil && slices.Equal(ids, answer.IDs):
				equal++
			default:
				wrong++
				t.Errorf("%s\n got %v, %v\nwant %v %s", answer.Body, ids, err, answer.IDs, answer.Error)
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	if time.Now().Format(time.DateOnly) != day {
		t.Fatal("the date changed during the test, and it is part of each prompt: run it again")
	}
	t.Logf(
		"gpt-oss through harmony: %d chats equal, %d refused by both, %d not known here, %d differ",
		equal,
		refused,
		unknown,
		wrong,
	)
	if equal < 5000 || unknown > 0 {
		t.Errorf("only %d were compared, %d not known here", equal, unknown)
	}
	count(equal+wrong, 0, wrong)
}

// gptOSS makes a model folder of a tokenizer's folder: it adds a config.json with the model type.
func gptOSS(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if err := os.Symlink(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type":"gpt_oss"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func tokenizeChat(model *tokenizer.Model, body []byte) ([]kvblock.Token, error) {
	var named struct {
		Input     json.RawMessage
		MaxTokens int `json:"max_tokens"`
	}
	if err := json.Unmarshal(body, &named); err != nil {
		return nil, err
	}
	path := "/v1/chat/completions"
	switch {
	case named.Input != nil:
		path = "/v1/responses"
	case named.MaxTokens > 0:
		path = "/v1/messages"
	}
	request, err := apibody.ParseRequest(path, body)
	if err != nil {
		return nil, err
	}
	prompts, err := model.Tokenize(context.Background(), request)
	if err != nil {
		return nil, err
	}
	return prompts[0].IDs, nil
}
