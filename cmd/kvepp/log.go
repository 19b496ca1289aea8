package main

import (
	"bytes"
	"context"
	"io"
	"log"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/grpclog"

	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
)

// logTo sets what writes the lines of the process's log. The flags were checked.
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
		// whatever the level of the log; a buffer takes all
		_ = o.handler(&line, slog.LevelWarn).Handle(context.Background(), r)
		return line.Bytes()
	}
}

// logger makes the process's logger, to which libraries log as well, and exports what becomes of its lines.
func (o *logging) logger(m *metrics.Metrics) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(o.logLevel))
	log := slog.New(o.handler(o.lines, level))
	slog.SetDefault(log)
	o.lines.show(m, metrics.LogLines, metrics.LogLinesHelp)
	m.CounterSource(
		metrics.LogLines,
		metrics.LogLinesHelp,
		prometheus.Labels{"outcome": "suppressed"},
		func() float64 { return float64(loglimit.Suppressed()) },
	)
	return log
}

// init has gRPC log to slog's default logger: errors alone, or what GRPC_GO_LOG_SEVERITY_LEVEL says, as gRPC itself has
// it.
func init() {
	// Each of the three is written what is as severe as its name, or more.
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

// grpcLines logs the lines that gRPC writes, which begin with their severity.
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

// httpErrors returns the logger of an HTTP server, whose clients can cause its lines.
func httpErrors() *log.Logger { return log.New(new(httpLines), "", 0) }

type httpLines struct{ limit loglimit.Limiter }

func (h *httpLines) Write(line []byte) (int, error) {
	h.limit.Log(slog.Default(), slog.LevelWarn, strings.TrimSpace(string(line)), "from", "net/http")
	return len(line), nil
}
