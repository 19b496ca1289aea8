package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestCompletion: kvepp offers what the shells' scripts, which are cobra's own, ask it for; and shells can read them.
func TestCompletion(t *testing.T) {
	for _, c := range []struct {
		line string   // the last word is the one to complete
		want []string // some of the offers
		kind string   // what else the script offers: :0 files, :4 nothing, :16 folders
	}{
		{"", []string{"serve", "check", "completion"}, ":4"},
		{"env", []string{"envoy"}, ":4"},
		{"envoy --engine-", []string{"--engine-ca", "--engine-tls"}, ":4"},
		{"envoy --engine ", []string{"vllm", "dynamo"}, ":4"},
		{"se", []string{"serve", "select"}, ":4"},
		{"serve --grpc-", []string{"--grpc-port", "--grpc-health-port"}, ":4"},
		{"serve --help", []string{"--help", "--help-all"}, ":4"},
		{"check --pro", []string{"--probe"}, ":4"},
		{"serve --router-mode ", []string{"kv", "round-robin", "direct"}, ":4"},
		{"serve --router-mode=r", []string{"round-robin", "random"}, ":4"},
		{"serve --engine vllm --log-format j", []string{"json"}, ":4"},
		{"select --router-queue-policy ", []string{"fcfs", "wspt"}, ":4"},
		{"serve --endpoints com", nil, ":0"},
		{"tokenize --model-path test", nil, ":16"},
		{"completion ", []string{"bash", "fish", "zsh"}, ":4"},
		{"serve --config-f", nil, ":4"}, // --config-file is refused, so it is not offered
		{"serve --router-replica-s", nil, ":4"},
	} {
		status, stdout, _ := runWith(nil, append([]string{"__complete"}, strings.Split(c.line, " ")...)...)
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		var offers []string
		for _, line := range lines[:len(lines)-1] {
			offer, _, _ := strings.Cut(line, "\t")
			offers = append(offers, offer)
		}
		for _, want := range c.want {
			if !slices.Contains(offers, want) {
				t.Errorf("%q: kvepp offers %q, want %q among them", c.line, offers, want)
			}
		}
		if status != 0 || c.want == nil && len(offers) > 0 || lines[len(lines)-1] != c.kind {
			t.Errorf("%q: status %d, %q, %s; want %s", c.line, status, offers, lines[len(lines)-1], c.kind)
		}
	}
	for _, shell := range []string{"bash", "fish", "zsh"} {
		t.Run(shell, func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil {
				t.Skipf("%v; install it: test/tools/install.sh shells (make test does so if it may)", err)
			}
			status, script, stderr := runWith(nil, "completion", shell)
			path := filepath.Join(t.TempDir(), "_kvepp")
			if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
				t.Fatal(err)
			}
			if status != 0 || stderr != "" || !strings.Contains(script, "__complete") {
				t.Fatalf("status %d, %s, %q", status, stderr, script)
			}
			if out, err := exec.Command(shell, "-n", path).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		})
	}
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}, {"completion", "bash", "zsh"}} {
		if status, stdout, stderr := runWith(nil, args...); status != 2 || stdout != "" ||
			!strings.Contains(stderr, "must be bash, zsh or fish") {
			t.Errorf("%v: status %d, %q", args, status, stderr)
		}
	}
}
