package parity

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/test/harness/parts"
)

// oracleCommand is a call of oracle.py.
func oracleCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(
		filepath.Join(environment(t, "KVEPP_ORACLES"), "bin/python"),
		append([]string{"oracle.py"}, args...)...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=true", "TRANSFORMERS_VERBOSITY=error")
	cmd.Stderr = os.Stderr
	return cmd
}

func environment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf(
			"%s is not set: run `make test` or `make test-long`, which fetch what these tests need and set it",
			name,
		)
	}
	return value
}

// realModel is a folder with a real tokenizer.json, and the file from which it was converted, if the original can be
// compared.
type realModel struct{ Folder, Native string }

func (m realModel) name() string { return filepath.Base(m.Folder) }

// models returns the folders in the lines of KVEPP_MODELS and, without -short, those in the package mistral-common.
func models(t *testing.T) []realModel {
	t.Helper()
	var all []realModel
	for _, folder := range strings.Fields(environment(t, "KVEPP_MODELS")) {
		all = append(all, realModel{Folder: folder})
	}
	if testing.Short() {
		return all
	}
	out, err := oracleCommand(t, "mistral", t.TempDir()).Output()
	if err != nil {
		t.Fatalf("oracle.py mistral: %v", err)
	}
	for line := range bytes.Lines(out) {
		var m realModel
		if err := json.Unmarshal(line, &m); err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	if len(all) < 17 {
		t.Fatalf("only %d models: %v", len(all), all)
	}
	return all
}

// response is the original's result for a text.
type response struct {
	Text    string
	IDs     []kvblock.Token
	Special []kvblock.Token // with special tokens; nil: equal to IDs
	Panic   bool            // the original panics
}

// TestRealFiles encodes texts with each real tokenizer file, with cold and with warm caches, and compares with Hugging
// Face tokenizers (and mistral-common).
func TestRealFiles(t *testing.T) {
	texts, random := 1500, 1000
	switch {
	case testing.Short():
		texts, random = 300, 300
	case *full:
		texts, random = 3000, 20_000
	}
	for _, m := range models(t) {
		t.Run(m.name(), func(t *testing.T) {
			args := []string{"encode", m.Folder, strconv.Itoa(texts), strconv.Itoa(random)}
			options := prompt.Options{Engine: prompt.Dynamo} // which takes the file as it is; see TestFolders
			if m.Native != "" {
				args, options = append(args, m.Native), prompt.Options{}
			}
			model, err := prompt.Load(m.Folder, options)
			if err != nil {
				t.Fatal(err)
			}
			compare(t, model, oracleCommand(t, args...), texts+random)
		})
	}
}

// TestFamilies does so with generated tokenizer files: the configurations of many model families and every component,
// with vocabularies trained for the test.
func TestFamilies(t *testing.T) {
	texts, random := 300, 700
	switch {
	case testing.Short():
		texts, random = 30, 70
	case *full:
		texts, random = 1000, 2000
	}
	out, err := oracleCommand(t, "families", t.TempDir()).Output()
	if err != nil {
		t.Fatalf("oracle.py families: %v", err)
	}
	configurations := 0
	for line := range bytes.Lines(out) {
		var m realModel
		if err := json.Unmarshal(line, &m); err != nil {
			t.Fatal(err)
		}
		configurations++
		t.Run(m.name(), func(t *testing.T) {
			t.Parallel()
			model, err := prompt.Load(m.Folder, prompt.Options{})
			if err != nil {
				t.Fatal(err)
			}
			compare(
				t,
				model,
				oracleCommand(t, "encode", m.Folder, strconv.Itoa(texts), strconv.Itoa(random)),
				texts+random,
			)
		})
	}
	if configurations < 100 {
		t.Errorf("only %d configurations", configurations)
	}
}

// compare runs a command that prints responses, and compares the model with them; want is their number.
func compare(t *testing.T, model *prompt.Model, cmd *exec.Cmd, want int) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	compared, tokens, wrong, panics := 0, 0, 0, 0
	check := func(a response, special bool, want []kvblock.Token, caches string) {
		got, err := model.Encode(a.Text, special)
		if err != nil { // searches have a time limit, which a machine that stops the test for that long exceeds
			got, err = model.Encode(a.Text, special)
		}
		if err == nil && slices.Equal(got, want) {
			return
		}
		if wrong++; wrong <= 10 {
			t.Errorf("%s caches, special tokens %v: %+q\n got %v, %v\nwant %v", caches, special, a.Text, got, err, want)
		}
	}
	lines := bufio.NewReaderSize(out, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		var a response
		if err := json.Unmarshal(line, &a); err != nil {
			t.Fatal(err)
		}
		if a.Panic {
			panics++
			continue
		}
		withSpecial := a.Special
		if withSpecial == nil {
			withSpecial = a.IDs
		}
		check(a, false, a.IDs, "cold")
		check(a, true, withSpecial, "warm")
		compared++
		tokens += len(a.IDs)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	if compared+panics != want || panics > want/2 {
		t.Errorf("%d texts and %d on which the original panics, of %d", compared, panics, want)
	}
	count(compared, tokens, wrong)
	t.Logf(
		"%d texts, %d tokens, %d differences (%d texts on which the original panics)",
		compared,
		tokens,
		wrong,
		panics,
	)
}

// totals counts all comparisons of this run.
var totals struct {
	sync.Mutex
	texts, tokens, wrong int
}

func count(texts, tokens, wrong int) {
	totals.Lock()
	defer totals.Unlock()
	totals.texts, totals.tokens, totals.wrong = totals.texts+texts, totals.tokens+tokens, totals.wrong+wrong
}

func TestMain(m *testing.M) {
	code := parts.Run(m, "parity", "KVEPP_ORACLES", "KVEPP_VLLM")
	if totals.texts > 0 {
		fmt.Printf("parity with the Python originals: %d texts, %d tokens, %d differences\n",
			totals.texts, totals.tokens, totals.wrong)
	}
	os.Exit(code)
}
