package main

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/metrics"
)

// maxPendingLog is how many bytes of a log may wait to be written: some ten thousand lines.
const maxPendingLog = 4 << 20

// lineWriter writes the lines of a log in the background, so that a slow disk or reader delays no request: lines for
// which there is no room are dropped and counted. Set its fields, then call start. Any goroutine may write.
type lineWriter struct {
	out     io.Writer
	prepare func() // called before each write; nil: nothing. It may replace out
	// called when writing begins to fail, and with nil when it succeeds again; nil: nothing
	failed func(err error)
	notice func(lost int) []byte // the line that tells of dropped lines once writing goes on; nil: none

	wake chan struct{} // lines are pending, or it is closed
	done chan struct{} // closed when all is written

	mu      sync.Mutex
	pending []byte // guarded by mu; whole lines
	lost    int    // lines that were dropped after pending; guarded by mu
	closed  bool   // guarded by mu

	written, dropped, lostByError atomic.Int64 // lines

	// Of the goroutine that writes.
	broken  bool // the last line was written in part
	failing bool // the last attempt failed
}

func (w *lineWriter) start() {
	w.wake, w.done = make(chan struct{}, 1), make(chan struct{})
	go w.run()
}

// Write takes one line. It never blocks on the log's reader, and never fails.
func (w *lineWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	full := w.closed || len(w.pending)+len(line) > maxPendingLog
	if full {
		w.lost++
	} else {
		w.pending = append(w.pending, line...)
	}
	w.mu.Unlock()
	if full {
		w.dropped.Add(1)
		return len(line), nil
	}
	w.rouse()
	return len(line), nil
}

func (w *lineWriter) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run writes what is pending until the log is closed.
func (w *lineWriter) run() {
	defer close(w.done)
	var lines []byte
	for range w.wake {
		w.mu.Lock()
		lines, w.pending = w.pending, lines[:0]
		lost, closed := w.lost, w.closed
		w.lost = 0
		w.mu.Unlock()
		if len(lines) > 0 {
			w.flush(lines)
		}
		if lost > 0 && w.notice != nil {
			w.flush(w.notice(lost))
		}
		if closed {
			return
		}
	}
}

// flush writes lines, and counts those that could not be written.
func (w *lineWriter) flush(lines []byte) {
	if w.prepare != nil {
		w.prepare()
	}
	if w.broken {
		_, err := w.out.Write([]byte{'\n'})
		w.broken = err != nil
	}
	n, err := w.out.Write(lines)
	if n > 0 {
		w.broken = lines[n-1] != '\n'
	}
	lost := bytes.Count(lines[n:], []byte{'\n'})
	w.lostByError.Add(int64(lost))
	w.written.Add(int64(bytes.Count(lines, []byte{'\n'}) - lost))
	if (err != nil) != w.failing && w.failed != nil {
		w.failed(err)
	}
	w.failing = err != nil
}

// Close writes what is pending, within a time, and reports whether all was: a reader that stands still does not keep
// kvepp from ending.
func (w *lineWriter) Close(within time.Duration) bool {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.rouse()
	select {
	case <-w.done:
		return true
	case <-time.After(within):
		return false
	}
}

// show exports what the log counts.
func (w *lineWriter) show(m *metrics.Metrics, name, help string) {
	for outcome, count := range map[string]*atomic.Int64{"written": &w.written, "dropped": &w.dropped,
		"failed": &w.lostByError} {
		m.CounterSource(
			name,
			help,
			prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count.Load()) },
		)
	}
}
