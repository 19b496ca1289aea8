package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
)

// TestAccessLogNeverBlocks: while the log has no reader, kvepp keeps lines up to a bound, and drops and counts further
// lines. When there is a reader, kvepp writes the lines that it kept.
func TestAccessLogNeverBlocks(t *testing.T) {
	reader, writer := io.Pipe()
	m := metrics.New()
	a := &accessLog{log: slog.New(slog.DiscardHandler), lineWriter: lineWriter{out: writer}}
	a.start()
	a.export(m, metrics.AccessLogLines, metrics.AccessLogLinesHelp)
	const writers, each = 8, 2000
	line := strings.Repeat("x", 999) + "\n" // 16 MB in all
	taken := make(chan bool)
	go func() {
		var wait sync.WaitGroup
		for range writers {
			wait.Go(func() {
				for range each {
					if n, err := io.WriteString(a, line); n != len(line) || err != nil {
						t.Errorf("%d, %v", n, err)
					}
				}
			})
		}
		wait.Wait()
		close(taken)
	}()
	select {
	case <-taken:
	case <-time.After(time.Minute):
		t.Fatal("Write blocks without a reader")
	}
	read := make(chan []byte)
	go func() {
		all, _ := io.ReadAll(reader)
		read <- all
	}()
	a.Close(time.Minute)
	writer.Close()
	all := <-read
	counted := func(outcome string) int {
		return int(metricstest.Read(t, m.Registry).Of(metrics.AccessLogLines, "outcome="+outcome).Value())
	}
	written, dropped := counted("written"), counted("dropped")
	if written+dropped != writers*each || dropped == 0 || written < maxPendingLog/len(line) ||
		written > 2*maxPendingLog/len(line)+1 {
		t.Errorf("%d written and %d dropped of %d", written, dropped, writers*each)
	}
	if string(all) != strings.Repeat(line, written) {
		t.Errorf("the reader got %d bytes, which are not %d lines", len(all), written)
	}
	io.WriteString(a, line) // from a stream that ends after the log was closed
	if n := counted("dropped"); n != dropped+1 {
		t.Errorf("a line after Close: %d are dropped, want %d", n, dropped+1)
	}
}

// TestAccessLogWithoutReader: a reader that never reads does not keep kvepp from exiting.
func TestAccessLogWithoutReader(t *testing.T) {
	_, writer := io.Pipe()
	var logged logtest.Log
	a := &accessLog{log: slog.New(slog.NewTextHandler(&logged, nil)), lineWriter: lineWriter{out: writer}}
	a.start()
	io.WriteString(a, "line\n")
	a.Close(10 * time.Millisecond)
	if logged.Count("last lines of the access log are lost") != 1 {
		t.Errorf("logged %q", &logged)
	}
}

// limitedWriter writes room bytes, and then fails until room is raised.
type limitedWriter struct {
	room int
	bytes.Buffer
}

func (p *limitedWriter) Write(b []byte) (int, error) {
	n := min(p.room, len(b))
	p.room -= n
	p.Buffer.Write(b[:n])
	if n < len(b) {
		return n, errors.New("no space left on device")
	}
	return n, nil
}

// TestAccessLogOnFullDisk: lost lines are counted and reported once. After an incomplete line, the next one starts on a
// new line.
func TestAccessLogOnFullDisk(t *testing.T) {
	var logged logtest.Log
	disk := &limitedWriter{room: 7}
	a := &accessLog{log: slog.New(slog.NewTextHandler(&logged, nil)), lineWriter: lineWriter{out: disk}}
	a.failed = a.logFailure
	a.flush([]byte("one\ntwo\nthree\n"))
	a.flush([]byte("four\n"))
	disk.room = 1 << 20
	a.flush([]byte("five\n"))
	if got := disk.String(); got != "one\ntwo\nfive\n" {
		t.Errorf("written: %q", got)
	}
	if a.written.Load() != 2 || a.lostByError.Load() != 3 {
		t.Errorf("%d written and %d failed, want 2 and 3", a.written.Load(), a.lostByError.Load())
	}
	if logged.Count("level=ERROR") != 1 || logged.Count("level=INFO") != 1 {
		t.Errorf("logged %s", &logged)
	}
}

// accessLines returns the lines of a file.
func accessLines(file string) (lines []map[string]any, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			return nil, fmt.Errorf("%w in %q", err, line)
		}
		lines = append(lines, fields)
	}
	return lines, nil
}

// TestAccessLogFile: kvepp appends lines to an existing file, creates the file again after it was moved away, and
// writes pending lines before it exits.
func TestAccessLogFile(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	file := filepath.Join(t.TempDir(), "access.log")
	if err := os.WriteFile(file, []byte("{\"before\":true}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.start("--access-log="+file, "--log-format=json")
	r.awaitReady()
	r.awaitEndpoint("10.0.0.1:8000")
	r.eventually("the log line of a request", func() error {
		lines, err := accessLines(file)
		if err == nil && (len(lines) < 2 || lines[0]["before"] != true) {
			err = fmt.Errorf("%v", lines)
		}
		return err
	})
	if err := os.Rename(file, file+".1"); err != nil {
		t.Fatal(err)
	}
	r.eventually("a new file", func() error {
		r.awaitEndpoint("10.0.0.1:8000")
		lines, err := accessLines(file)
		if err == nil && len(lines) == 0 {
			err = errors.New("it is empty")
		}
		return err
	})
	const last = 50
	for range last {
		r.awaitEndpoint("10.0.0.1:8000")
	}
	r.Signal(syscall.SIGTERM)
	r.awaitExit("after a signal")
	before, err := accessLines(file + ".1")
	if err != nil {
		t.Fatal(err)
	}
	after, err := accessLines(file)
	if err != nil || len(after) <= last || len(before) < 2 {
		t.Fatalf("%d and %d lines: %v", len(before), len(after), err)
	}
	line := after[len(after)-1]
	if line["worker"] != "a" || line["address"] != "10.0.0.1:8000" || line["status"] != 200.0 ||
		line["reason"] != "no_body" ||
		len(fmt.Sprint(line["request_id"])) != 36 {
		t.Errorf("the last log line is %v", line)
	}
	if d, ok := line["duration_seconds"].(float64); !ok || d <= 0 || d > 60 {
		t.Errorf("duration_seconds is %v", line["duration_seconds"])
	}
}

// TestAccessLogThatCannotBeOpened: the error names the flag.
func TestAccessLogThatCannotBeOpened(t *testing.T) {
	file := filepath.Join(t.TempDir(), "none", "access.log")
	var stderr bytes.Buffer
	code := start(
		[]string{"serve", "--endpoints=x", "--log-level=error", "--access-log=" + file},
		nil,
		io.Discard,
		&stderr,
		nil,
	)
	want := "kvepp serve: --access-log: open " + file +
		": no such file or directory; give a file in a folder that kvepp may write to, or - for standard output\n"
	if code != 1 || stderr.String() != want {
		t.Errorf("status %d, %q; want 1 and %q", code, stderr.String(), want)
	}
}

// TestAccessLogReaderGone: kvepp serves requests, and counts the lost lines, after the reader of standard output has
// exited.
func TestAccessLogReaderGone(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"/bin/sh", "-c", `"$0" "$@" | true`}
	r.start("--access-log=-")
	r.awaitReady()
	r.eventually("lost lines to be counted", func() error {
		r.awaitEndpoint("10.0.0.1:8000")
		text, err := r.metrics()
		if err != nil {
			return err
		}
		_, value, _ := strings.Cut(text, "\nkvepp_access_log_lines_total{outcome=\"failed\"} ")
		value, _, _ = strings.Cut(value, "\n")
		if n, err := strconv.Atoi(value); err != nil || n < 3 {
			return fmt.Errorf("%q failed", value)
		}
		return nil
	})
}
