package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"testing"

	"kvepp/serve/check"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// TestProtocol: kvepp check --protocol tells what each of Envoy's configurations does with a picker.
func TestProtocol(t *testing.T) {
	for manifest, wrong := range map[string]map[string]bool{
		"override-host.yaml": {},
		"original-dst.yaml":  {"served": true, "list": true},
	} {
		t.Run(manifest, func(t *testing.T) {
			port, err := process.Ports(2)
			if err != nil {
				t.Fatal(err)
			}
			at := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
			s := start(t, stack.Config{Workers: -1, Manifest: manifest, KveppFlags: []string{"--engine=vllm"},
				Servers: []string{at(port), at(port + 1)}})
			s.KillKvepp() // kvepp check answers in its place
			var failed *exec.ExitError
			args := append([]string{"check", "--protocol", "--json"}, checkFlags(t, s, s.Envoy)...)
			out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "../bin/kvepp", args...).Output()
			if err != nil && (!errors.As(err, &failed) || failed.ExitCode() != 1) {
				t.Fatalf("%v: %s", err, out)
			}
			found := 0
			for line := range bytes.Lines(out) {
				var f check.Finding
				if err := json.Unmarshal(line, &f); err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				found++
				t.Logf("%s: %s, %s", f.About, f.State, f.Says)
				if (f.State == check.Wrong) != wrong[f.About] {
					t.Errorf("%s: %s, %s", f.About, f.State, f.Says)
				}
			}
			if found != 15 {
				t.Errorf("%d findings", found)
			}
		})
	}
}
