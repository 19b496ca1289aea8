// Package logs has the log of the process and the access log. No line delays a request: a Writer writes in the
// background, and drops and counts lines that their reader does not take.
//
// Concurrency: Writers and loggers are safe for concurrent use; the methods of Config are for the start.
package logs

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
)

// Config are the settings of the logs.
type Config struct {
	Level, Format string
	Access        string // file of the access log, or "-"; empty: none

	lines *Writer // of the process's log
}

// AddFlags declares the flags of the process's log. debug says, in brackets, what the level debug adds.
func (c *Config) AddFlags(fs *pflag.FlagSet, debug string) {
	fs.StringVar(&c.Level, "log-level", "info", "`LEVEL` of the log: debug"+debug+", info, warn or error")
	flags.Values(fs, "log-level", "debug", "info", "warn", "error")
	flags.Choice(fs, &c.Format, "log-format", "text", "`FORMAT` of the log: text or json", "text", "json")
}

// AddAccessFlags declares the flags of the access log.
func (c *Config) AddAccessFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Access, "access-log", "",
		"`FILE` to which kvepp appends a line for each request when it has ended, in the format of --log-format; - is "+
			"standard output. Empty: none. If the file was moved away, kvepp creates it again")
}

// Validate checks the flags.
func (c *Config) Validate() error {
	if new(slog.LevelVar).UnmarshalText([]byte(c.Level)) != nil {
		return flags.OneOf("log-level", c.Level, "debug", "info", "warn", "error")
	}
	return nil
}

// LogTo sets the writer of the process's log. The flags must have been checked.
func (c *Config) LogTo(lines *Writer) {
	c.lines = lines
	lines.notice = func(lost int) []byte {
		var line bytes.Buffer
		r := slog.NewRecord(time.Now(), slog.LevelWarn,
			"lines of this log were dropped here: its reader did not take them", 0)
		r.Add("lines", lost)
		// a buffer accepts every write; the line is written at any log level
		_ = c.handler(&line, slog.LevelWarn).Handle(context.Background(), r)
		return line.Bytes()
	}
}

// Logger creates the process's logger, makes it the default for libraries, and exports the counts of its lines.
func (c *Config) Logger(m *metrics.Metrics) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level))
	log := slog.New(c.handler(c.lines, level))
	slog.SetDefault(log)
	metrics.Counters(m, metrics.LogLines, "outcome", func() map[string]int64 {
		lines := c.lines.counts()
		lines["suppressed"] = loglimit.Suppressed()
		return lines
	})
	return log
}

// handler returns a log handler for lines of at least a level, in the chosen format.
func (c *Config) handler(to io.Writer, level slog.Level) slog.Handler {
	h := &slog.HandlerOptions{Level: level, ReplaceAttr: durationInSeconds}
	if c.Format == "json" {
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
