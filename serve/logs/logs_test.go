package logs

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/grpclog"

	"kvepp/internal/metrics"
)

// TestDroppedLinesAreReported: a line in the log's format reports dropped lines at their place, at any log level.
func TestDroppedLinesAreReported(t *testing.T) {
	reader, writer := io.Pipe()
	o := Config{Level: "error", Format: "json"}
	w := Start(writer)
	o.LogTo(w)
	m := metrics.New()
	log := o.Logger(m)
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
		HTTPErrors().Print("http: panic serving x\nstack")
	}
	if text := logged.String(); strings.Count(text, `level=ERROR msg="a 1 is ERROR: 2" from=grpc`) != 5 ||
		!strings.Contains(text, `level=WARN msg="http: panic serving x\nstack" from=net/http`) {
		t.Error(text)
	}
}

// TestLoggedDurations: in both formats a duration is a number of seconds, under a key with the suffix _seconds.
func TestLoggedDurations(t *testing.T) {
	for format, want := range map[string]string{
		"json": `"msg":"m","took_seconds":0.0015,"n":3,"group":{"waited_seconds":90}}`,
		"text": "msg=m took_seconds=0.0015 n=3 group.waited_seconds=90",
	} {
		var out bytes.Buffer
		o := Config{Level: "info", Format: format}
		slog.New(o.handler(&out, slog.LevelInfo)).Info("m", "took", 1500*time.Microsecond, "n", 3,
			slog.Group("group", "waited", 90*time.Second))
		if got := out.String(); !strings.HasSuffix(got, want+"\n") {
			t.Errorf("%s: %q, want it to end with %q", format, got, want)
		}
	}
}
