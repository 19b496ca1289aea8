package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/metrics"
)

// maxPendingLog is how many bytes of the access log may wait to be written: some ten thousand lines.
const maxPendingLog = 4 << 20

// accessLog writes lines in the background, so that a slow disk or reader delays no request: lines for which there is no room are dropped and
// counted. Any goroutine may write.
type accessLog struct {
	path string // empty: standard output
	log  *slog.Logger
	wake chan struct{} // lines are pending, or it is closed
	done chan struct{} // closed when all is written

	mu      sync.Mutex
	pending []byte // guarded by mu; whole lines
	closed  bool   // guarded by mu

	written, dropped, failed atomic.Int64 // lines

	// Of the goroutine that writes.
	out     io.Writer
	file    *os.File  // out, if it is a file of its own
	looked  time.Time // for a file that took the place of file
	broken  bool      // the last line was written in part
	failing bool      // the last attempt failed
}

// openAccessLog opens what --access-log names: a file, to which lines are appended, or "-" for standard output.
func openAccessLog(path string, log *slog.Logger) (*accessLog, error) {
	a := &accessLog{log: log, out: os.Stdout}
	if path == "-" {
		signal.Ignore(syscall.SIGPIPE) // which would end kvepp when the reader of standard output goes away
	} else {
		file, err := openToAppend(path)
		if err != nil {
			return nil, fmt.Errorf("--access-log: %w; give a file in a folder that kvepp may write to, or - for standard output", err)
		}
		a.path, a.file, a.out = path, file, file
	}
	a.start()
	return a, nil
}

func openToAppend(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
}

func (a *accessLog) start() {
	a.wake, a.done, a.looked = make(chan struct{}, 1), make(chan struct{}), time.Now()
	go a.run()
}

// Write takes one line. It never blocks on the log's reader, and never fails.
func (a *accessLog) Write(line []byte) (int, error) {
	a.mu.Lock()
	full := a.closed || len(a.pending)+len(line) > maxPendingLog
	if !full {
		a.pending = append(a.pending, line...)
	}
	a.mu.Unlock()
	if full {
		a.dropped.Add(1)
		return len(line), nil
	}
	select {
	case a.wake <- struct{}{}:
	default:
	}
	return len(line), nil
}

// run writes what is pending until the log is closed.
func (a *accessLog) run() {
	defer close(a.done)
	var lines []byte
	for range a.wake {
		a.mu.Lock()
		lines, a.pending = a.pending, lines[:0]
		closed := a.closed
		a.mu.Unlock()
		if len(lines) > 0 {
			a.flush(lines)
		}
		if closed {
			return
		}
	}
}

// flush writes lines, and counts those that could not be written.
func (a *accessLog) flush(lines []byte) {
	a.reopen()
	if a.broken {
		_, err := a.out.Write([]byte{'\n'})
		a.broken = err != nil
	}
	n, err := a.out.Write(lines)
	if n > 0 {
		a.broken = lines[n-1] != '\n'
	}
	lost := bytes.Count(lines[n:], []byte{'\n'})
	a.failed.Add(int64(lost))
	a.written.Add(int64(bytes.Count(lines, []byte{'\n'}) - lost))
	if err != nil && !a.failing {
		a.log.Error("the access log cannot be written; its lines are lost until it can be", "error", err)
	}
	if err == nil && a.failing {
		a.log.Info("the access log is written again")
	}
	a.failing = err != nil
}

// reopen opens the file anew where a program that rotates logs has moved it away. It looks at most once a second.
func (a *accessLog) reopen() {
	if a.file == nil || time.Since(a.looked) < time.Second {
		return
	}
	a.looked = time.Now()
	ours, err := a.file.Stat()
	there, missing := os.Stat(a.path)
	if err == nil && missing == nil && os.SameFile(ours, there) {
		return
	}
	file, err := openToAppend(a.path)
	if err != nil { // lines go on into the file that was moved
		return
	}
	a.file.Close()
	a.file, a.out, a.broken = file, file, false
}

// Close writes what is pending, within a time: a reader that stands still does not keep kvepp from ending.
func (a *accessLog) Close(within time.Duration) {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
	select {
	case <-a.done:
		if a.file != nil {
			a.file.Close()
		}
	case <-time.After(within):
		a.log.Warn("the last lines of the access log are lost: its reader does not take them")
	}
}

// show exports what the log counts.
func (a *accessLog) show(m *metrics.Metrics) {
	for outcome, count := range map[string]*atomic.Int64{"written": &a.written, "dropped": &a.dropped, "failed": &a.failed} {
		m.CounterSource(metrics.AccessLogLines, metrics.AccessLogLinesHelp, prometheus.Labels{"outcome": outcome}, func() float64 { return float64(count.Load()) })
	}
}

// logAccess opens the access log that the flags ask for, and returns what writes its lines, and what closes it; nil without one.
func (o *options) logAccess(m *metrics.Metrics, log *slog.Logger) (*slog.Logger, func(), error) {
	if o.accessLog == "" {
		return nil, func() {}, nil
	}
	a, err := openAccessLog(o.accessLog, log)
	if err != nil {
		return nil, nil, err
	}
	a.show(m)
	return slog.New(o.handler(a, slog.LevelInfo)), func() { a.Close(2 * time.Second) }, nil
}
