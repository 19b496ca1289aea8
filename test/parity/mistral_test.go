package parity

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

var mistralChats = flag.Int("mistral-chats", 200, "chats to compare for each of Mistral's tokenizers")

// TestMistral compares the ids of chats, responses, messages and completions for Mistral's own tokenizer, in each of
// its versions, with those of vLLM's own code over mistral-common. The requests are generated, with tools, tool calls,
// results, reasoning, images, messages to continue, and texts full of special tokens. Each is encoded with a cold and
// with a warm cache.
func TestMistral(t *testing.T) {
	if testing.Short() {
		t.Log("make parity runs mistral-common")
		return
	}
	versions := compared(t, prompt.VLLM)
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			compareMistral(t, version)
		})
	}
}

// compareMistral compares with one version of vLLM. The newest one writes the golden file.
func compareMistral(t *testing.T, version string) {
	all := prompt.Versions(prompt.VLLM)
	newest := version == all[len(all)-1]
	chats := *mistralChats
	if !newest { // whose code for these models is the same, but not that around it
		chats /= 4
	}
	python, sources := oracle(t, prompt.VLLM, version)
	folders := t.TempDir()
	cmd := exec.Command(python, "mistral.py", sources, folders, strconv.Itoa(max(chats, *requests/6)))
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "PYTHONPATH="+environment(t, "KVEPP_VLLM_MISTRAL"))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	const path = "../../prompt/testdata/mistral.jsonl"
	var golden bytes.Buffer
	scores := map[string]*mistralScore{}
	models := map[string]*prompt.Model{}
	reasons := map[string]int{}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var a mistralResult
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(a.Folder, "bytes-") {
			line, err := json.Marshal(map[string]any{"folder": a.Folder, "body": a.Body, "text": a.Text,
				"media": a.Media, "error": a.Error})
			if err != nil {
				t.Fatal(err)
			}
			golden.Write(append(line, '\n'))
		}
		m := models[a.Folder]
		if m == nil {
			options := prompt.Options{Version: version}
			if m, err = prompt.Load(filepath.Join(folders, a.Folder), options); err != nil {
				t.Fatal(err)
			}
			models[a.Folder], scores[a.Folder] = m, &mistralScore{}
		}
		for range 2 {
			scores[a.Folder].add(t, m, &a, reasons)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	switch now, err := os.ReadFile(path); {
	case !newest:
	case *rewrite:
		if err := os.WriteFile(path, golden.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	case err != nil || !bytes.Equal(now, golden.Bytes()):
		t.Errorf("%s differs from vLLM's answers (%v): run this test with -rewrite", path, err)
	}
	for reason, n := range reasons {
		t.Logf("%d not known here: %s", n, reason)
	}
	for folder, s := range scores {
		t.Logf("%s %s: %d equal (%d with media), %d refused by both, %d refused by vLLM alone, %d not known here, "+
			"%d differ", version, folder, s.equal, s.media, s.refused, s.onlyByIt, s.unknown, s.wrong)
		count(s.equal+s.wrong, 0, s.wrong)
		if strings.HasPrefix(folder, "bytes-") {
			continue
		}
		if s.equal < 2*(s.refused+s.onlyByIt) || 100*s.unknown > s.equal || 50*s.onlyByIt > s.equal {
			t.Errorf("%s: too few results are equal for a conclusion", folder)
		}
	}
	if len(scores) < 19 {
		t.Errorf("only %d tokenizers", len(scores))
	}
}

// mistralResult is a line that mistral.py prints.
type mistralResult struct {
	Folder string
	Body   json.RawMessage
	IDs    []kvblock.Token
	Text   string
	Media  bool
	Error  string
}

// mistralScore counts the results of comparisons.
type mistralScore struct{ equal, media, refused, onlyByIt, unknown, wrong int }

// add compares a prompt of m with a response. reasons counts why prompts are not known.
func (s *mistralScore) add(t *testing.T, m *prompt.Model, a *mistralResult, reasons map[string]int) {
	t.Helper()
	input, err := mistralPrompt(t, m, a.Body)
	switch {
	case a.Error != "" && err != nil:
		s.refused++
	case a.Error != "": // vLLM checks more of what has no tokens
		s.onlyByIt++
	case prompt.IsUnknown(err):
		s.unknown++
		reasons[err.Error()]++
	case err == nil && slices.Equal(input.IDs[:input.Certain], a.IDs) &&
		a.Media == (input.Certain < len(input.IDs)):
		s.equal++
		if a.Media {
			s.media++
		}
	default:
		if s.wrong++; s.wrong <= 3 {
			t.Errorf("%s: %s\n got %v, %v\nwant %v", a.Folder, a.Body, input, err, a.IDs)
		}
	}
}

// mistralPrompt returns the only prompt of a body, whose fields say which API it is for.
func mistralPrompt(t *testing.T, m *prompt.Model, payload []byte) (prompt.Prompt, error) {
	t.Helper()
	var named struct {
		Prompt, Input json.RawMessage
		MaxTokens     int `json:"max_tokens"`
	}
	if err := json.Unmarshal(payload, &named); err != nil {
		return prompt.Prompt{}, err
	}
	path := "/v1/chat/completions"
	switch {
	case named.Prompt != nil:
		path = "/v1/completions"
	case named.Input != nil:
		path = "/v1/responses"
	case named.MaxTokens > 0:
		path = "/v1/messages"
	}
	request, err := body.ParseRequest(path, payload)
	if err != nil {
		return prompt.Prompt{}, err
	}
	prompts, err := m.Tokenize(t.Context(), request)
	if err != nil {
		return prompt.Prompt{}, err
	}
	return prompts[0], nil
}
