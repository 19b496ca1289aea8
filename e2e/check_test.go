package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// runCheck runs `kvepp check` and returns its exit status and output.
func runCheck(t *testing.T, flags ...string) (status int, table string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "../bin/kvepp", append([]string{"check", "--wait", "5s"}, flags...)...)
	var out, progress bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &progress
	begun := time.Now()
	if err := cmd.Run(); err != nil {
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
			t.Fatal(err)
		}
	}
	t.Logf(
		"kvepp check %s: status %d after %v\n%s%s",
		strings.Join(flags, " "),
		cmd.ProcessState.ExitCode(),
		time.Since(begun),
		&progress,
		&out,
	)
	return cmd.ProcessState.ExitCode(), out.String()
}

// TestCheck: `kvepp check` reports no problem with real frontends and mockers, and reports the most common mistakes.
func TestCheck(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Speedup: 20})
	flags := s.EndpointFlags()
	status, table := runCheck(t, append(flags, "--probe")...)
	if status != 0 || strings.Count(table, "announces blocks") != 2 ||
		strings.Count(table, "known to the frontend") != 2 ||
		strings.Count(table, "kvepp and the engine count") != 4 ||
		strings.Count(table, "the second time, as predicted") != 2 {
		t.Errorf("status %d with a correct setup", status)
	}
	if status, table := runCheck(t, flags...); status != 0 ||
		strings.Count(table, "no event has come yet")+strings.Count(table, "announces blocks") != 2 {
		t.Errorf("status %d without a probe", status)
	}
	if status, table := runCheck(t, append(flags, "--conversations=4")...); status != 0 ||
		strings.Count(table, "predictions are exact") != 2 {
		t.Errorf("status %d with conversations", status)
	}
	if status, table := runCheck(t, append(flags, "--gateway="+s.Envoy.URL, "--admin-address="+
		strings.TrimPrefix(s.Admin(), "http://"))...); status != 0 ||
		strings.Count(table, ", as kvepp chose") != 2 {
		t.Errorf("status %d through the gateway", status)
	}
	text, err := os.ReadFile(s.EndpointsFile())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, from, to, says string }{
		{"an event port where no process listens", "kvEvents: tcp://127.0.0.1:", "kvEvents: tcp://127.0.0.1:1 # was ",
			"no publisher answers at"},
		{"another block size", "  kvEvents:", "  blockSize: 32\n  kvEvents:", "no block would match"},
		{"an address where no process listens", "address: 127.0.0.1:", "address: 127.0.0.2:",
			"check that the engine is up"},
	} {
		wrong := strings.Replace(string(text), c.from, c.to, 1)
		if wrong == string(text) {
			t.Fatalf("%s: no %q in\n%s", c.name, c.from, text)
		}
		file := filepath.Join(t.TempDir(), "endpoints.yaml")
		if err := os.WriteFile(file, []byte(wrong), 0o600); err != nil {
			t.Fatal(err)
		}
		status, table := runCheck(t, append(flags, "--endpoints", file, "--probe")...)
		if status != 1 || !strings.Contains(table, c.says) {
			t.Errorf("%s: status %d, and %q does not occur", c.name, status, c.says)
		}
	}
	other := append([]string{}, flags...)
	for i, f := range other {
		if strings.HasPrefix(f, stack.Model+"=") {
			other[i] = "another" + strings.TrimPrefix(f, stack.Model)
		}
	}
	if status, table := runCheck(t, other...); status != 1 ||
		!strings.Contains(table, fmt.Sprintf("serves %s, which no --model names", stack.Model)) {
		t.Errorf("a model of another name: status %d", status)
	}
	if status, _ := runCheck(t, "--endpoints", filepath.Join(t.TempDir(), "none.yaml")); status != 2 {
		t.Errorf("no endpoints file: status %d", status)
	}
}

// TestCheckEventPlane: predictions use the events of Dynamo's event plane too.
func TestCheckEventPlane(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Speedup: 20, EventPlane: "zmq"})
	status, table := runCheck(t, append(s.EndpointFlags(), "--probe", "--conversations=2")...)
	if status != 0 || strings.Count(table, "the second time, as predicted") != 2 ||
		strings.Count(table, "100.0 %  ok") != 2 {
		t.Errorf("status %d", status)
	}
}

// TestCheckPrefillWorkers: a decode worker's responses do not show its own cached tokens, so they are not compared.
func TestCheckPrefillWorkers(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Prefill: 1, Speedup: 20})
	status, table := runCheck(t, append(s.EndpointFlags(), "--probe", "--conversations=2")...)
	if status != 1 || !strings.Contains(table, "none held: this is a decode worker") ||
		!strings.Contains(table, "no worker could hold one") {
		t.Errorf("status %d", status)
	}
	status, table = runCheck(
		t,
		append(
			s.EndpointFlags(),
			"--probe",
			"--gateway="+s.Envoy.URL,
			"--admin-address="+strings.TrimPrefix(s.Admin(), "http://"),
		)...)
	if status != 0 || strings.Count(table, ", as kvepp chose") != 1 {
		t.Errorf("through the gateway: status %d", status)
	}
}
