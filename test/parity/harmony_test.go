package parity

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// TestHarmony compares the ids of requests for gpt-oss with those of the engines' own code with oss-harmony: all APIs
// of vLLM, and Responses of SGLang, whose other APIs use the template. The requests are generated, with tools, tool
// calls, reasoning and texts full of special tokens. Each is encoded with a cold and with a warm cache.
func TestHarmony(t *testing.T) {
	if testing.Short() {
		t.Log("the texts that vLLM wrote are compared in package tokenizer; the ids in make test-long")
		return
	}
	folders := strings.Fields(environment(t, "KVEPP_MODELS"))
	i := slices.IndexFunc(
		folders,
		func(folder string) bool { return strings.HasPrefix(filepath.Base(folder), "gptoss") },
	)
	if i < 0 {
		t.Fatalf("gpt-oss is not among %v", folders)
	}
	folder := gptOSS(t, folders[i])
	vocabulary := tiktokenFolder(t, folder)
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			count := 600
			if all := prompt.Versions(engine); engine == prompt.VLLM && version == all[len(all)-1] {
				count = 3000
				if sampled() {
					count = 1000
				}
			}
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				model, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version})
				if err != nil {
					t.Fatal(err)
				}
				compareHarmony(t, model, engine, version, vocabulary, max(count, *requests))
			})
		}
	}
}

// compareHarmony compares generated requests: n chats and two thirds as many requests to the other APIs on vLLM, n to
// Responses on SGLang.
func compareHarmony(
	t *testing.T,
	model *prompt.Model,
	engine prompt.Engine,
	version, vocabulary string,
	n int,
) {
	python, sources := oracle(t, engine, version)
	day := time.Now().Format(time.DateOnly)
	cmd := exec.Command(python, "harmony.py", string(engine), sources, day, strconv.Itoa(n))
	cmd.Env = append(os.Environ(), "TIKTOKEN_ENCODINGS_BASE="+vocabulary, "TRANSFORMERS_VERBOSITY=error")
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
		var response struct {
			Body  json.RawMessage
			IDs   []kvblock.Token
			Error string
		}
		if err := json.Unmarshal(lines.Bytes(), &response); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			ids, err := tokenizeChat(model, response.Body)
			switch {
			// What SGLang refuses needs no ids. kvepp knows what vLLM refuses.
			case response.Error != "" && (err != nil || engine == prompt.SGLang):
				refused++
			case response.Error == "" && prompt.IsUnknown(err):
				unknown++
			case response.Error == "" && err == nil && slices.Equal(ids, response.IDs):
				equal++
			default:
				if wrong++; wrong <= 10 {
					t.Errorf("%s\n got %v, %v\nwant %v %s", response.Body, ids, err, response.IDs, response.Error)
				}
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
		"gpt-oss through harmony, %s %s: %d requests equal, %d refused, %d not known here, %d differ",
		engine,
		version,
		equal,
		refused,
		unknown,
		wrong,
	)
	if equal < 3*n/2 || wrong > 0 || unknown > equal/50 {
		t.Errorf("only %d were compared, %d not known here, %d differ", equal, unknown, wrong)
	}
	count(equal+wrong, 0, wrong)
}

// tiktokenFolder returns a folder with the file that oss-harmony 0.0.4 would fetch, made of a tokenizer.json with the
// same vocabulary. oss-harmony checks the file's hash. Newer ones have the vocabulary built in.
func tiktokenFolder(t *testing.T, folder string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Model struct{ Vocab map[string]int }
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	bytesOf := map[rune]byte{} // GPT-2's characters for bytes
	other := rune(256)
	for b := range 256 {
		printed := b > ' ' && b < 0x7f || b > 0xa0 && b != 0xad
		if printed {
			bytesOf[rune(b)] = byte(b)
			continue
		}
		bytesOf[other] = byte(b)
		other++
	}
	pieces := make([]string, len(file.Model.Vocab))
	for piece, id := range file.Model.Vocab {
		var raw []byte
		for _, c := range piece {
			raw = append(raw, bytesOf[c])
		}
		pieces[id] = base64.StdEncoding.EncodeToString(raw) + " " + strconv.Itoa(id) + "\n"
	}
	to := t.TempDir()
	text := strings.Join(pieces, "")
	if err := os.WriteFile(filepath.Join(to, "o200k_base.tiktoken"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// gptOSS makes a model folder of a tokenizer's folder: it adds a config.json with the model type.
func gptOSS(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		path, err := filepath.Abs(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type":"gpt_oss"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func tokenizeChat(model *prompt.Model, payload []byte) ([]kvblock.Token, error) {
	var named struct {
		Input     json.RawMessage
		MaxTokens int `json:"max_tokens"`
	}
	if err := json.Unmarshal(payload, &named); err != nil {
		return nil, err
	}
	path := "/v1/chat/completions"
	switch {
	case named.Input != nil:
		path = "/v1/responses"
	case named.MaxTokens > 0:
		path = "/v1/messages"
	}
	request, err := body.ParseRequest(path, payload)
	if err != nil {
		return nil, err
	}
	prompts, err := model.Tokenize(context.Background(), request)
	if err != nil {
		return nil, err
	}
	return prompts[0].IDs, nil
}
