package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvepp/prompt/fetch/fetchtest"
	"kvepp/test/harness/process"
)

// noEnvironment is an environment without variables.
func noEnvironment(string) string { return "" }

func TestFetch(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	var failures atomic.Int64
	url := fetchtest.Hub(t, map[string]string{
		"tokenizer.json": "{}", "tokenizer_config.json": "[]", "chat_template.jinja": "{{ x }}",
		"additional_chat_templates/rag.jinja": "{{ y }}",
		"encoding/encoding_dsv4.py":           "efforts", "encoding/README.md": "words",
		"model-00001-of-00002.safetensors": "weights", "model.safetensors.index.json": "weights",
		"pytorch_model.bin": "weights",
		"README.md":         "words", "../../escaped.json": "bad", "sub/tokenizer.json": "another",
	}, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "Bearer s3cr3t" {
			http.Error(w, "who?", http.StatusUnauthorized)
			return true
		}
		if strings.HasSuffix(r.URL.Path, "tokenizer.json") && failures.Add(1) == 1 {
			http.Error(w, "busy", http.StatusServiceUnavailable)
			return true
		}
		return false
	})
	to, token := t.TempDir(), filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("s3cr3t\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, stderr bytes.Buffer
	args := []string{"--hub=" + url, "--to=" + to, "--token-file=" + token, "qwen=org/model"}
	if status := runFetch(args, &out, &stderr, noEnvironment); status != 0 {
		t.Fatal(status, stderr.String())
	}
	if out.String() != "qwen: org/model at c0ffee, 5 files, 0.0 MB\n" {
		t.Errorf("printed %q", out.String())
	}
	want := map[string]string{
		"qwen/tokenizer.json":                      "{}",
		"qwen/tokenizer_config.json":               "[]",
		"qwen/chat_template.jinja":                 "{{ x }}",
		"qwen/additional_chat_templates/rag.jinja": "{{ y }}",
		"qwen/encoding/encoding_dsv4.py":           "efforts",
		"qwen/model-00001-of-00002.safetensors":    "",
	}
	if got := fetchtest.Tree(t, to); !maps.Equal(got, want) {
		t.Errorf("fetched %v, want %v", got, want)
	}
	if !strings.Contains(stderr.String(), "503 Service Unavailable; again in 1s") ||
		strings.Contains(stderr.String(), "s3cr3t") {
		t.Errorf("stderr %q", stderr.String())
	}
	if err := os.WriteFile(token, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if status := runFetch(args, &out, &stderr, noEnvironment); status != 2 ||
		!strings.Contains(stderr.String(), "the file is empty") {
		t.Errorf("status %d, %s", status, stderr.String())
	}
}

// fetchProcess starts kvepp fetch as a process, below a wrapper. It returns the process and its output.
func fetchProcess(t *testing.T, folder, hub, wrapper string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/sh", "-c", wrapper+`exec "$0" "$@"`, self, "fetch", "--hub="+hub, "--to="+folder,
		"--optional", ".=org/model")
	var out bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), asProgram+"=1"), &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, &out
}

// TestFetchInterrupted: a signal in the middle of the second file leaves the folder as it was, and the status says so,
// also with --optional.
func TestFetchInterrupted(t *testing.T) {
	for _, signal := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		half, end := make(chan struct{}), make(chan struct{})
		defer close(end)
		hub := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new", "vocab.json": "new"},
			func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, "/vocab.json") {
					return false
				}
				fmt.Fprint(w, "n")
				w.(http.Flusher).Flush()
				close(half)
				<-end
				return true
			})
		folder, before := t.TempDir(), map[string]string{"tokenizer.json": "old", "vocab.json": "old"}
		fetchtest.Fill(t, folder, before)
		cmd, out := fetchProcess(t, folder, hub, "")
		<-half
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := process.Until(ctx, func() error {
			if files := fetchtest.Tree(t, folder); len(files) != 4 {
				return fmt.Errorf("want both parts: %v", files)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("%v: %v, %q", signal, err, out)
		}
		if got := fetchtest.Tree(t, folder); !maps.Equal(got, before) {
			t.Errorf("%v: files %v, want %v", signal, got, before)
		}
	}
}

// TestFetchOnFullDisk: a disk that takes no more bytes (here: a limit on the size of files) ends the fetch at once,
// leaves the folder as it was, and no part.
func TestFetchOnFullDisk(t *testing.T) {
	hub := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new", "vocab.json": strings.Repeat("x", 4<<20)}, nil)
	folder, before := t.TempDir(), map[string]string{"tokenizer.json": "old", "vocab.json": "old"}
	fetchtest.Fill(t, folder, before)
	cmd, out := fetchProcess(t, folder, hub, "ulimit -f 1024; ")
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "file too large") ||
		strings.Contains(out.String(), "again in") {
		t.Errorf("%v, %q", err, out)
	}
	if got := fetchtest.Tree(t, folder); !maps.Equal(got, before) {
		t.Errorf("files %d, want %v", len(got), before)
	}
}
