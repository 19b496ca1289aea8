package logs

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
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
	a := &accessLog{log: slog.New(slog.DiscardHandler), Writer: Writer{out: writer}}
	a.start()
	metrics.Counters(m, metrics.AccessLogLines, "outcome", a.counts)
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
		return int(metricstest.Read(t, m.Registry).Of(metrics.AccessLogLines.Name, "outcome="+outcome).Value())
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
	a := &accessLog{log: slog.New(slog.NewTextHandler(&logged, nil)), Writer: Writer{out: writer}}
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
	a := &accessLog{log: slog.New(slog.NewTextHandler(&logged, nil)), Writer: Writer{out: disk}}
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
