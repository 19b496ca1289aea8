package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/grpclog"

	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/router/record"
)

// logStart logs the command and its version, and the settings that differ from their defaults: one line each.
func (o *logging) logStart(command string, log *slog.Logger) {
	b := readBuild()
	log.Info("kvepp starts", "command", command, "version", b.version, "commit", b.commit, "go", runtime.Version())
	if len(o.settings) == 0 {
		log.Info("all settings have their defaults")
		return
	}
	log.Info("settings that differ from their defaults", o.settings...)
}

// logTo sets the writer of the process's log. The flags must have been checked.
func (o *logging) logTo(lines *lineWriter) {
	o.lines = lines
	lines.notice = func(lost int) []byte {
		var line bytes.Buffer
		r := slog.NewRecord(
			time.Now(),
			slog.LevelWarn,
			"lines of this log were dropped here: its reader did not take them",
			0,
		)
		r.Add("lines", lost)
		// a buffer accepts every write; the line is written at any log level
		_ = o.handler(&line, slog.LevelWarn).Handle(context.Background(), r)
		return line.Bytes()
	}
}

// logger creates the process's logger, makes it the default for libraries, and exports the counts of its lines.
func (o *logging) logger(m *metrics.Metrics) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(o.logLevel))
	log := slog.New(o.handler(o.lines, level))
	slog.SetDefault(log)
	o.lines.export(m, metrics.LogLines, metrics.LogLinesHelp)
	m.CounterFunc(
		metrics.LogLines,
		metrics.LogLinesHelp,
		prometheus.Labels{"outcome": "suppressed"},
		func() float64 { return float64(loglimit.Suppressed()) },
	)
	return log
}

// init sends gRPC's log to slog's default logger. Only errors are logged, unless GRPC_GO_LOG_SEVERITY_LEVEL asks for
// more, as in gRPC itself.
func init() {
	// gRPC writes a message to the writer of its own severity and to those of lower severity.
	to := map[string]io.Writer{}
	severity := strings.ToLower(os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL"))
	if severity != "info" && severity != "warning" {
		severity = "error"
	}
	for _, s := range []string{"info", "warning", "error"} {
		to[s] = io.Discard
	}
	to[severity] = new(grpcLines)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(to["info"], to["warning"], to["error"]))
}

// grpcLines logs the lines that gRPC writes. Each has its severity at the start.
type grpcLines struct{ limit loglimit.Limiter }

func (g *grpcLines) Write(line []byte) (int, error) {
	text, level := string(line), slog.LevelError
	if parts := strings.SplitN(text, " ", 4); len(parts) == 4 { // date, time, severity
		text = parts[3]
		switch parts[2] {
		case "INFO:":
			level = slog.LevelInfo
		case "WARNING:":
			level = slog.LevelWarn
		}
	}
	g.limit.Log(slog.Default(), level, strings.TrimSpace(text), "from", "grpc")
	return len(line), nil
}

// httpErrors returns the logger for an HTTP server. Its lines are rate-limited, because clients can cause them.
func httpErrors() *log.Logger { return log.New(new(httpLines), "", 0) }

type httpLines struct{ limit loglimit.Limiter }

func (h *httpLines) Write(line []byte) (int, error) {
	h.limit.Log(slog.Default(), slog.LevelWarn, strings.TrimSpace(string(line)), "from", "net/http")
	return len(line), nil
}

// maxPendingLog is how many bytes of a log may wait to be written: about ten thousand lines.
const maxPendingLog = 4 << 20

// lineWriter writes log lines in the background, so that a slow disk or reader delays no request. Lines that do not fit
// into its buffer are dropped and counted. Set its fields, then call start. Write is safe for concurrent use.
type lineWriter struct {
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
	w.wakeWriter()
	return len(line), nil
}

func (w *lineWriter) wakeWriter() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run writes pending lines until the log is closed.
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
func (w *lineWriter) Close(within time.Duration) bool {
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

// export exports the counts of lines.
func (w *lineWriter) export(m *metrics.Metrics, name, help string) {
	for outcome, count := range map[string]*atomic.Int64{"written": &w.written, "dropped": &w.dropped,
		"failed": &w.lostByError} {
		m.CounterFunc(
			name,
			help,
			prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count.Load()) },
		)
	}
}

// accessLog writes lines in the background, to standard output or to a file. A log rotation program may move the file
// away.
type accessLog struct {
	lineWriter
	path string
	log  *slog.Logger

	// Owned by the goroutine that writes.
	file            *os.File  // nil: standard output
	rotationChecked time.Time // latest check whether path was rotated
}

// openAccessLog opens the target of --access-log: a file, to which it appends, or "-" for standard output.
func openAccessLog(path string, log *slog.Logger) (*accessLog, error) {
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
	case !a.lineWriter.Close(within):
		a.log.Warn("the last lines of the access log are lost: its reader does not take them")
	case a.file != nil:
		a.file.Close()
	}
}

// logAccess opens the access log of the flags. It returns the logger for its lines, nil without an access log, and a
// function that closes it.
func (o *options) logAccess(m *metrics.Metrics, log *slog.Logger) (*slog.Logger, func(), error) {
	if o.accessLog == "" {
		return nil, func() {}, nil
	}
	a, err := openAccessLog(o.accessLog, log)
	if err != nil {
		return nil, nil, err
	}
	a.export(m, metrics.AccessLogLines, metrics.AccessLogLinesHelp)
	return slog.New(o.handler(a, slog.LevelInfo)), func() { a.Close(2 * time.Second) }, nil
}

// dedupLog logs each problem of the pool once when it begins, and again if it ended in between. It remembers the
// problems of the two latest updates only. Not safe for concurrent use.
type dedupLog struct {
	log         *slog.Logger
	limit       loglimit.Limiter
	before, now map[string]bool
}

func newDedupLog(log *slog.Logger) *dedupLog {
	return &dedupLog{log: log, limit: loglimit.Limiter{Burst: 100}, now: map[string]bool{}}
}

// warn reports a problem that the update found.
func (d *dedupLog) warn(text string) {
	if !d.before[text] && !d.now[text] {
		d.limit.Log(d.log, slog.LevelWarn, text)
	}
	d.now[text] = true
}

// begin starts an update. Problems that the update does not report have ended.
func (d *dedupLog) begin() { d.before, d.now = d.now, map[string]bool{} }

// handler returns a log handler for lines of at least a level, in the chosen format.
func (o *logging) handler(to io.Writer, level slog.Level) slog.Handler {
	h := &slog.HandlerOptions{Level: level, ReplaceAttr: durationInSeconds}
	if o.logFormat == "json" {
		return slog.NewJSONHandler(to, h)
	}
	return slog.NewTextHandler(to, h)
}

// durationInSeconds writes durations as seconds, under a key that names the unit: in JSON, slog writes nanoseconds
// without a unit.
func durationInSeconds(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	return a
}

// newTracer creates the tracer that OpenTelemetry's environment variables ask for; nil if they ask for none, or if
// tracing is off.
func (o *options) newTracer(ctx context.Context, m *metrics.Metrics, log *slog.Logger) (*tracing.Tracer, error) {
	if !o.tracing {
		return nil, nil
	}
	t, err := tracing.New(ctx, version(), log)
	if err != nil || t == nil {
		return nil, err
	}
	for outcome, count := range map[string]func() int64{
		"exported": func() int64 { n, _ := t.Spans(); return n },
		"failed":   func() int64 { _, n := t.Spans(); return n },
	} {
		m.CounterFunc(
			metrics.TraceSpans,
			metrics.TraceSpansHelp,
			prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count()) },
		)
	}
	return t, nil
}

// closeTracer sends the last spans, for at most 5 s.
func closeTracer(t *tracing.Tracer, log *slog.Logger) {
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := t.Close(last); err != nil {
		log.Warn("the last spans of requests are lost", "error", err)
	}
}
