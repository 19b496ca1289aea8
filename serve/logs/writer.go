package logs

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// maxPendingLog is how many bytes of a log may wait to be written: about ten thousand lines.
const maxPendingLog = 4 << 20

// Writer writes log lines in the background, so that a slow disk or reader delays no request. Lines that do not fit
// into its buffer are dropped and counted. Create it with Start.
type Writer struct {
	out     io.Writer
	prepare func() error // called before each write; may be nil; may replace out
	// called with the error when writing begins to fail, and with nil when it succeeds again; may be nil
	failed func(err error)
	notice func(lost int) []byte // returns the line that reports dropped lines; may be nil

	wake chan struct{} // lines are pending, or the log is closed
	done chan struct{} // closed when all lines are written

	mu      sync.Mutex
	pending []byte // guarded by mu; whole lines
	lost    int    // lines that were dropped after pending; guarded by mu
	closed  bool   // guarded by mu

	written, dropped, lostByError atomic.Int64 // lines

	// Owned by the goroutine that writes.
	broken  bool // the last line was written incompletely
	failing bool // the last attempt failed
}

// Start returns a Writer to out.
func Start(out io.Writer) *Writer { return (&Writer{out: out}).start() }

func (w *Writer) start() *Writer {
	w.wake, w.done = make(chan struct{}, 1), make(chan struct{})
	go w.run()
	return w
}

// Write takes one line. It never blocks on the log's reader, and never fails.
func (w *Writer) Write(line []byte) (int, error) {
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
	} else {
		w.wakeWriter()
	}
	return len(line), nil
}

func (w *Writer) wakeWriter() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run writes pending lines until the log is closed.
func (w *Writer) run() {
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
func (w *Writer) flush(lines []byte) {
	var n int
	var err error
	if w.prepare != nil {
		err = w.prepare()
	}
	if err == nil && w.broken {
		_, err := w.out.Write([]byte{'\n'})
		w.broken = err != nil
	}
	if err == nil {
		n, err = w.out.Write(lines)
	}
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

// Close writes the pending lines, within a time, and reports whether all were written. A blocked reader does not keep
// kvepp from exiting.
func (w *Writer) Close(within time.Duration) bool {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wakeWriter()
	select {
	case <-w.done:
		return true
	case <-time.After(within):
		return false
	}
}

// counts returns the counts of lines by outcome.
func (w *Writer) counts() map[string]int64 {
	return map[string]int64{"written": w.written.Load(), "dropped": w.dropped.Load(), "failed": w.lostByError.Load()}
}
