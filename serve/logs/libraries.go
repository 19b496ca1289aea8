package logs

import (
	"io"
	"log"
	"log/slog"
	"os"
	"strings"

	"google.golang.org/grpc/grpclog"

	"kvepp/internal/loglimit"
)

// init sends gRPC's log to slog's default logger. Only errors are logged, unless GRPC_GO_LOG_SEVERITY_LEVEL asks for
// more, as in gRPC itself.
func init() {
	// gRPC writes a message to the writer of its own severity and to those of lower severity.
	severity := strings.ToLower(os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL"))
	if severity != "info" && severity != "warning" {
		severity = "error"
	}
	to := map[string]io.Writer{"info": io.Discard, "warning": io.Discard, "error": io.Discard}
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

// HTTPErrors returns the logger for an HTTP server. Its lines are rate-limited, because clients can cause them.
func HTTPErrors() *log.Logger { return log.New(new(httpLines), "", 0) }

type httpLines struct{ limit loglimit.Limiter }

func (h *httpLines) Write(line []byte) (int, error) {
	h.limit.Log(slog.Default(), slog.LevelWarn, strings.TrimSpace(string(line)), "from", "net/http")
	return len(line), nil
}
