package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/grpclog"

	"kvepp/internal/metrics"
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

// TestDroppedLinesAreReported: a line in the log's format reports dropped lines at their place, at any log level.
func TestDroppedLinesAreReported(t *testing.T) {
	reader, writer := io.Pipe()
	o := logging{logLevel: "error", logFormat: "json"}
	w := &lineWriter{out: writer}
	w.start()
	o.logTo(w)
	m := metrics.New()
	log := o.logger(m)
	line := strings.Repeat("x", maxPendingLog/2)
	log.Error(line)
	begun := make([]byte, 1) // then the first line does not count as pending any more
	if _, err := io.ReadFull(reader, begun); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		log.Error(line)
	}
	all := make(chan []byte)
	go func() {
		text, _ := io.ReadAll(reader)
		all <- text
	}()
	if !w.Close(time.Minute) {
		t.Error("Close did not write all lines")
	}
	writer.Close()
	text := string(<-all)
	if n := strings.Count(text, line); n != 2 || w.dropped.Load() != 4 {
		t.Errorf("%d lines, %d dropped; want 2 and 4", n, w.dropped.Load())
	}
	_, after, _ := strings.Cut(text, line+"\"}\n{")
	_, after, _ = strings.Cut(after, line+"\"}\n")
	if !strings.Contains(
		after,
		`"level":"WARN","msg":"lines of this log were dropped here: its reader did not take them","lines":4}`,
	) ||
		strings.Count(after, "\n") != 1 {
		t.Errorf("after the last line: %.300q", after)
	}
}

// TestLibrariesLog: the log lines of gRPC and net/http go to slog, with a limit on lines of one kind.
func TestLibrariesLog(t *testing.T) {
	var logged bytes.Buffer
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
	defer slog.SetDefault(slog.New(slog.DiscardHandler)) // slog's original default would deadlock
	for range 100 {
		grpclog.Errorf("a %d is ERROR: 2", 1)
		httpErrors := httpErrors()
		httpErrors.Print("http: panic serving x\nstack")
	}
	if text := logged.String(); strings.Count(text, `level=ERROR msg="a 1 is ERROR: 2" from=grpc`) != 5 ||
		!strings.Contains(text, `level=WARN msg="http: panic serving x\nstack" from=net/http`) {
		t.Error(text)
	}
}
