package main

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"kvepp/internal/metrics"
)

// accessLog writes lines in the background, to standard output or to a file that a program which rotates logs may move
// away.
type accessLog struct {
	lineWriter
	path string
	log  *slog.Logger

	// Of the goroutine that writes.
	file   *os.File  // nil: standard output
	looked time.Time // for a file that took the place of file
}

// openAccessLog opens what --access-log names: a file, to which lines are appended, or "-" for standard output.
func openAccessLog(path string, log *slog.Logger) (*accessLog, error) {
	a := &accessLog{log: log, looked: time.Now()}
	if path == "-" {
		signal.Ignore(syscall.SIGPIPE) // which would end kvepp when the reader of standard output goes away
		a.out = os.Stdout
	} else {
		file, err := openToAppend(path)
		if err != nil {
			return nil, fmt.Errorf("--access-log: %w; give a file in a folder that kvepp may write to, or - for "+
				"standard output", err)
		}
		a.path, a.file, a.out = path, file, file
		a.prepare = a.reopen
	}
	a.failed = a.tell
	a.start()
	return a, nil
}

func openToAppend(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
}

// tell logs that writing begins to fail, or succeeds again.
func (a *accessLog) tell(err error) {
	if err != nil {
		a.log.Error("the access log cannot be written; its lines are lost until it can be", "error", err)
	} else {
		a.log.Info("the access log is written again")
	}
}

// reopen opens the file anew where a program that rotates logs has moved it away. It looks at most once a second.
func (a *accessLog) reopen() {
	if time.Since(a.looked) < time.Second {
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

// Close writes what is pending, within a time.
func (a *accessLog) Close(within time.Duration) {
	switch {
	case !a.lineWriter.Close(within):
		a.log.Warn("the last lines of the access log are lost: its reader does not take them")
	case a.file != nil:
		a.file.Close()
	}
}

// logAccess opens the access log that the flags ask for, and returns what writes its lines, and what closes it; nil
// without one.
func (o *options) logAccess(m *metrics.Metrics, log *slog.Logger) (*slog.Logger, func(), error) {
	if o.accessLog == "" {
		return nil, func() {}, nil
	}
	a, err := openAccessLog(o.accessLog, log)
	if err != nil {
		return nil, nil, err
	}
	a.show(m, metrics.AccessLogLines, metrics.AccessLogLinesHelp)
	return slog.New(o.handler(a, slog.LevelInfo)), func() { a.Close(2 * time.Second) }, nil
}
