package logs

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"kvepp/internal/metrics"
	"kvepp/router/record"
)

// accessLog writes lines in the background, to standard output or to a file. A log rotation program may move the file
// away.
type accessLog struct {
	Writer
	path string
	log  *slog.Logger

	// Owned by the goroutine that writes.
	file            *os.File  // nil: standard output
	rotationChecked time.Time // latest check whether path was rotated
}

// OpenAccess opens the access log. It returns the logger for its lines, nil without an access log, and a function that
// closes it.
func (c *Config) OpenAccess(m *metrics.Metrics, log *slog.Logger) (lines *slog.Logger, closeLog func(), err error) {
	if c.Access == "" {
		return nil, func() {}, nil
	}
	a, err := openAccess(c.Access, log)
	if err != nil {
		return nil, nil, err
	}
	metrics.Counters(m, metrics.AccessLogLines, "outcome", a.counts)
	return slog.New(c.handler(a, slog.LevelInfo)), func() { a.Close(2 * time.Second) }, nil
}

// openAccess opens a file, to which it appends, or "-": standard output.
func openAccess(path string, log *slog.Logger) (*accessLog, error) {
	a := &accessLog{log: log, rotationChecked: time.Now()}
	if path == "-" {
		signal.Ignore(syscall.SIGPIPE) // it would end kvepp when the reader of standard output exits
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
	a.failed = a.logFailure
	a.start()
	return a, nil
}

func openToAppend(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
}

// logFailure logs that writing has begun to fail, or succeeds again.
func (a *accessLog) logFailure(err error) {
	if err != nil {
		a.log.Error("the access log cannot be written; its lines are lost until it can be", "error", err)
	} else {
		a.log.Info("the access log is written again")
	}
}

// reopen opens path again if a log rotation program has moved the file away, which it checks at most once a second, or
// if the file was removed. It creates a removed folder again. An error means that lines would be lost.
func (a *accessLog) reopen() error {
	ours, err := a.file.Stat()
	kept := err == nil && !record.Removed(ours)
	if kept && time.Since(a.rotationChecked) < time.Second {
		return nil
	}
	a.rotationChecked = time.Now()
	if current, err := os.Stat(a.path); kept && err == nil && os.SameFile(ours, current) {
		return nil
	}
	var file *os.File
	if err = os.MkdirAll(filepath.Dir(a.path), 0o750); err == nil {
		file, err = openToAppend(a.path)
	}
	switch {
	case err == nil:
		a.file.Close()
		a.file, a.out, a.broken = file, file, false
	case kept: // continue to write to the moved file
		return nil
	}
	return err
}

// Close writes the pending lines, within a time.
func (a *accessLog) Close(within time.Duration) {
	switch {
	case !a.Writer.Close(within):
		a.log.Warn("the last lines of the access log are lost: its reader does not take them")
	case a.file != nil:
		a.file.Close()
	}
}
