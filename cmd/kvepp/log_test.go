package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// pipeStderr gives kvepp a small pipe as its standard error, and returns the pipe. Only the test can read it.
func pipeStderr(t *testing.T, r *running) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stderr")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDWR, 0) // read and write, so that neither side waits to open it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close() })
	const setSize = 1031 // F_SETPIPE_SZ
	raw, err := pipe.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if _, _, e := syscall.Syscall(syscall.SYS_FCNTL, fd, setSize, 4096); e != 0 {
			t.Error(e)
		}
	}); err != nil {
		t.Fatal(err)
	}
	r.wrapper = []string{"/bin/sh", "-c", `exec "$0" "$@" 2>` + path}
	return pipe
}

// logLines returns kvepp_log_lines_total of an outcome.
func (r *running) logLines(outcome string) (int, error) {
	text, err := r.metrics()
	if err != nil {
		return 0, err
	}
	_, value, _ := strings.Cut(text, "\nkvepp_log_lines_total{outcome=\""+outcome+"\"} ")
	value, _, _ = strings.Cut(value, "\n")
	n, err := strconv.ParseFloat(value, 64)
	return int(n), err
}

// TestLogWithoutReader: if no process reads the log, kvepp still serves requests and exits.
func TestLogWithoutReader(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	pipeStderr(t, r)
	r.start("--log-level=debug")
	r.awaitReady()
	for range 200 {
		r.awaitEndpoint("10.0.0.1:8000")
	}
	if text, err := r.metrics(); err != nil ||
		!strings.Contains(text, "\nkvepp_log_lines_total{outcome=\"dropped\"} 0\n") {
		t.Errorf("the metrics lack the log's lines, or count dropped ones although there was room: %v", err)
	}
	r.Signal(syscall.SIGTERM)
	r.awaitExit("without a reader of its log")
}

// TestErrorWithoutReader: a kvepp that cannot start exits even if no process reads its standard error.
func TestErrorWithoutReader(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	pipe := pipeStderr(t, r)
	pipe.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	if _, err := pipe.Write(make([]byte, 8192)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	r.writeEndpoints("endpoints: none\n")
	r.start()
	r.awaitExit("with an invalid endpoints file")
}

// TestLogReaderGone: kvepp serves requests, and counts the lost lines, after the reader of its log has exited.
func TestLogReaderGone(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"/bin/sh", "-c", `"$0" "$@" 2>&1 | true`}
	r.start("--log-level=debug")
	r.awaitReady()
	r.eventually("lost lines to be counted", func() error {
		r.awaitEndpoint("10.0.0.1:8000")
		if n, err := r.logLines("failed"); err != nil || n < 3 {
			return fmt.Errorf("%d lines failed: %v", n, err)
		}
		return nil
	})
}
