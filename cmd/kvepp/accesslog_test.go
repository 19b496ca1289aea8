package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

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
