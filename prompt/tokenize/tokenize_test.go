package tokenize

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/prompt"
)

const tiny = "../../test/models/tiny-bytelevel"

// run runs the command, and returns its exit status.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var c Config
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(f)
	err := f.Parse(args)
	if err == nil {
		err = c.Validate(f.Args())
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	if !c.Run(prompt.Options{Engine: c.Engine}, stdin, stdout, stderr) {
		return 1
	}
	return 0
}

func runTokenize(t *testing.T, input string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(args, strings.NewReader(input), &out, &errs)
	return out.String(), errs.String(), status
}

// golden returns strings with the token ids that Python's tokenizers gives them for the tiny model.
func golden(t *testing.T) (strs []struct {
	Text string
	IDs  []uint32
}) {
	t.Helper()
	raw, err := os.ReadFile("../../test/models/testdata/tiny-bytelevel.json")
	if err != nil {
		t.Fatal(err)
	}
	var g struct {
		Strings []struct {
			Text string
			IDs  []uint32
		}
	}
	if err := json.Unmarshal(raw, &g); err != nil || len(g.Strings) < 100 {
		t.Fatal(len(g.Strings), err)
	}
	return g.Strings
}

func TestTokenizeText(t *testing.T) {
	var lines strings.Builder
	strs := golden(t)
	for _, s := range strs {
		line, err := json.Marshal(s.Text)
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(line, '\n'))
	}
	stdout, stderr, status := runTokenize(t, lines.String(), "--model-path", tiny, "--text", "--jsonl")
	if status != 0 {
		t.Fatal(stderr)
	}
	responses := strings.Split(strings.TrimSpace(stdout), "\n")
	if len(responses) != len(strs) {
		t.Fatalf("%d answers to %d lines", len(responses), len(strs))
	}
	for i, a := range responses {
		var got struct {
			Prompt   string   `json:"prompt"`
			TokenIDs []uint32 `json:"token_ids"`
			Certain  int      `json:"certain"`
		}
		if err := json.Unmarshal([]byte(a), &got); err != nil || got.Prompt != strs[i].Text ||
			!slices.Equal(got.TokenIDs, strs[i].IDs) ||
			got.Certain != len(got.TokenIDs) {
			t.Errorf("%q: %+v, want %v (%v)", strs[i].Text, got, strs[i].IDs, err)
		}
	}
}

func TestTokenizeBodies(t *testing.T) {
	chat := `{"model":"m","messages":[{"role":"user","content":"Hello there, how are you today? I am fine & <well>."}]}`
	stdout, stderr, status := runTokenize(t, chat, "--model-path", tiny, "--blocks", "--kv-cache-block-size", "4")
	var got tokenized
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || status != 0 {
		t.Fatal(err, stderr)
	}
	if !strings.Contains(got.Prompt, "fine & <well>") || !strings.Contains(stdout, "fine & <well>") {
		t.Errorf("prompt %q in %s", got.Prompt, stdout)
	}
	if n := len(got.TokenIDs) / 4; n < 2 || len(got.LocalHashes) != n || len(got.SequenceHashes) != n {
		t.Errorf(
			"%d ids in blocks of four: %d local hashes, %d sequence hashes",
			len(got.TokenIDs),
			len(got.LocalHashes),
			len(got.SequenceHashes),
		)
	}
	plain := got.SequenceHashes
	for _, salted := range [][]string{{"--lora", "a"}, {"--cache-salt", "a"}} {
		stdout, _, _ := runTokenize(
			t,
			chat,
			append(salted, "--model-path", tiny, "--blocks", "--kv-cache-block-size", "4")...)
		var s tokenized
		if err := json.Unmarshal([]byte(stdout), &s); err != nil || s.SequenceHashes[0] == plain[0] {
			t.Errorf("%v does not change the hashes: %v", salted, err)
		}
	}
	// For several prompts the response is an array. Token ids in the request are returned.
	stdout, stderr, status = runTokenize(t, `{"model":"m","prompt":[[1,2,3],[4]]}`, "--model-path", tiny)
	var batch []tokenized
	if err := json.Unmarshal([]byte(stdout), &batch); err != nil || status != 0 || len(batch) != 2 ||
		len(batch[0].TokenIDs) != 3 ||
		batch[1].TokenIDs[0] != 4 {
		t.Errorf("a batch: %v %s %s", err, stdout, stderr)
	}
}

func TestTokenizeContinuesAfterABadLine(t *testing.T) {
	in := `{"model":"m","prompt":"one"}` + "\n\nnot json\n" + `{"model":"m"}` + "\n" + `{"model":"m","prompt":"two"}`
	stdout, _, status := runTokenize(t, in, "--model-path", tiny, "--jsonl", "--api", "completions")
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if status != 1 || len(lines) != 4 || !strings.Contains(lines[0], `"token_ids"`) ||
		!strings.Contains(lines[1], `"error"`) ||
		!strings.Contains(lines[2], "'prompt'") ||
		!strings.Contains(lines[3], `"two"`) {
		t.Errorf("status %d: %s", status, stdout)
	}
}

// TestTokenizeRespondsToEachLine: with --jsonl a response can be read before the next line is written.
func TestTokenizeRespondsToEachLine(t *testing.T) {
	stdin, lines := io.Pipe()
	responses, stdout := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		ended <- run([]string{"--model-path", tiny, "--text", "--jsonl"}, stdin, stdout, io.Discard)
		stdout.Close()
	}()
	read := bufio.NewScanner(responses)
	for _, line := range []string{`"hello"`, `not JSON`, `"again"`} {
		if _, err := io.WriteString(lines, line+"\n"); err != nil {
			t.Fatal(err)
		}
		responded := make(chan bool, 1)
		go func() { responded <- read.Scan() }()
		select {
		case ok := <-responded:
			if !ok || !strings.HasPrefix(read.Text(), "{") {
				t.Fatalf("the response to %s is %q (%v)", line, read.Text(), read.Err())
			}
		case <-time.After(time.Minute):
			t.Fatalf("no response to %s while standard input is open", line)
		}
	}
	lines.Close()
	if status := <-ended; status != 1 {
		t.Errorf("status %d, want 1: one line was not JSON", status)
	}
}
