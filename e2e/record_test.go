package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestRecordAndReplay: kvepp records the requests that pass through Envoy, and `kvepp replay` reads the file. The
// conversations share a prefix, and the replay finds it.
func TestRecordAndReplay(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	s := start(t, stack.Config{Workers: 2, Speedup: 20, KveppFlags: []string{"--record=" + file}})
	const secret = "Zyzzogeton"
	prefix := stack.Message{Role: "user", Content: secret + strings.Repeat(", the leafhopper", 60)}
	const requests = 6
	for i := range requests {
		messages := append([]stack.Message{prefix}, novel()...)
		chat(t, s.Envoy.URL, messages, i%2 == 0, nil)
	}
	eventually(t, func() error {
		text, err := os.ReadFile(file)
		if err == nil && strings.Count(string(text), "\n") < requests {
			err = fmt.Errorf("%d lines, want %d", strings.Count(string(text), "\n"), requests)
		}
		return err
	})
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), secret) {
		t.Errorf("a prompt is in the trace:\n%s", text)
	}
	if n := metric(t, s, `kvepp_recorded_requests_total{outcome="written"}`); n != requests {
		t.Errorf("the metric counts %v recorded requests, want %d", n, requests)
	}
	table, err := exec.CommandContext(t.Context(), "../bin/kvepp", "replay", file, "--format=kvepp",
		fmt.Sprint("--block-size=", stack.BlockSize), "--workers=1").Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, table)
	}
	var n, tokens int
	var possible float64
	if _, err := fmt.Sscanf(string(table[:strings.Index(string(table), " on average")]), "%d requests of %d tokens", &n,
		&tokens); err != nil || n != requests || tokens < 100 {
		t.Errorf("%v, %d requests of %d tokens in\n%s", err, n, tokens, table)
	}
	_, rest, _ := strings.Cut(string(table), "would have ")
	if _, err := fmt.Sscan(strings.Fields(rest)[0], &possible); err != nil || possible < 30 {
		t.Errorf("%v %% of the prompts are repeated, %v", possible, err)
	}
	// The recording has six requests, too few for a fit.
	repeated := exec.CommandContext(t.Context(), "../bin/kvepp", "replay", file, "--compare=recorded")
	if out, err := repeated.CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "a fit of the engines' speeds needs 10") {
		t.Errorf("%v\n%s", err, out)
	}
	for how, want := range map[string]string{"--compare=recorded": "recorded: 6", "--report": "6 requests on"} {
		repeated = exec.CommandContext(t.Context(), "../bin/kvepp", "replay", file, how, "--prefill-ms=16.5,0.015,0",
			"--decode-ms=5,50,0")
		if out, err := repeated.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%v\n%s", err, out)
		}
	}
}
