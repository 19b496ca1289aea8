package parity

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"kvepp/prompt"
)

// TestSGLangHybrids compares kvepp's knowledge of hybrid models with SGLang's own code, for every architecture and
// model type in its sources. kvepp may call a nested text model a hybrid where SGLang does not read its wrapper; the
// opposite is an error.
func TestSGLangHybrids(t *testing.T) {
	if testing.Short() {
		t.Log("make test-long runs SGLang's code")
		return
	}
	folder := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		raw, err := os.ReadFile(filepath.Join("../../test/models/tiny-bytelevel", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, name), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	engines := environment(t, "KVEPP_ENGINES")
	cmd := exec.Command(filepath.Join(engines, "sglang/bin/python"), "hybrids.py", filepath.Join(engines, "sources"))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	all, hybrids, nested := 0, 0, 0
	for lines := bufio.NewScanner(out); lines.Scan(); all++ {
		var response struct {
			Config json.RawMessage
			Hybrid bool
		}
		if err := json.Unmarshal(lines.Bytes(), &response); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "config.json"), response.Config, 0o644); err != nil {
			t.Fatal(err)
		}
		m, err := prompt.Load(folder, prompt.Options{Engine: prompt.SGLang})
		if err != nil {
			t.Fatal(err)
		}
		got := m.OverlapIsUpperBound()
		var outer struct {
			Type string `json:"model_type"`
		}
		if err := json.Unmarshal(response.Config, &outer); err != nil {
			t.Fatal(err)
		}
		switch {
		case got == response.Hybrid:
		case got && outer.Type == "another":
			nested++
		default:
			t.Errorf("%s: hybrid is %v, want SGLang's %v", response.Config, got, response.Hybrid)
		}
		if response.Hybrid {
			hybrids++
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf(
		"%d configurations, %d of hybrids, %d of text models in wrappers that SGLang does not look into",
		all,
		hybrids,
		nested,
	)
	if all < 500 || hybrids < 150 {
		t.Errorf("only %d configurations, %d of hybrids", all, hybrids)
	}
}
