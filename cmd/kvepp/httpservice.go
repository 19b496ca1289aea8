package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/internal/metrics"
)

// httpService is what "kvepp indexer" and "kvepp select" can both be told: programs that serve HTTP alone, each in the
// place of one of Dynamo's.
type httpService struct {
	host    string
	port    uint16
	threads int
	hosts   webHosts
	indexMemory
	logging
}

// add declares where the program listens; dynamos is the name of the one that it stands in for.
func (o *httpService) add(f *pflag.FlagSet, port uint16, dynamos string) {
	f.StringVar(&o.host, "host", "0.0.0.0", "`ADDRESS` to listen on")
	f.Uint16Var(&o.port, "port", port, "`PORT` to listen on")
	o.hosts.add(f)
	f.IntVar(
		&o.threads,
		"threads",
		4,
		"taken for the sake of command lines written for "+dynamos+
			", and without effect: each worker's events are applied beside the others'",
	)
}

func (o *httpService) check() error {
	if o.port == 0 {
		return errors.New("--port 0: must be from 1 to 65535")
	}
	if err := o.logging.check(); err != nil {
		return err
	}
	return o.indexMemory.check()
}

// serve answers requests with h until ctx ends, and lets those under way end. what is what they are for.
func (o *httpService) serve(
	ctx context.Context,
	what string,
	h http.Handler,
	m *metrics.Metrics,
	log *slog.Logger,
) error {
	server := webServer(h, &o.hosts)
	l, err := listenAt("port", net.JoinHostPort(o.host, strconv.Itoa(int(o.port))))
	if err != nil {
		return err
	}
	log.Info("listening", "for", what, "address", l.Addr().String(), "tls", "off")
	failed := make(chan error, 1)
	go func() { failed <- serveWeb(server, l, "http", m) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("kvepp stops: running requests have 5 s to end")
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(last)
}

// indexMemory bounds the index.
type indexMemory struct{ indexMaxBytes int64 }

// minIndexBytes is the least memory in which an index is of any use.
const minIndexBytes = 1 << 20

func (o *indexMemory) add(f *pflag.FlagSet) {
	f.Int64Var(
		&o.indexMaxBytes,
		"index-max-bytes",
		0,
		"memory of the index, in `BYTES`; at the bound the deepest blocks of the largest worker are forgotten, and "+
			"counted. 0: half of GOMEMLIMIT, which is 7/8 of the container's memory unless the environment sets it; "+
			"2 GiB without either",
	)
}

func (o *indexMemory) check() error {
	if o.indexMaxBytes < 0 || o.indexMaxBytes > 0 && o.indexMaxBytes < minIndexBytes {
		return fmt.Errorf(
			"--index-max-bytes %d: must be at least %d (0: half of GOMEMLIMIT or of 7/8 of the container's memory, "+
				"else 2 GiB)",
			o.indexMaxBytes,
			minIndexBytes,
		)
	}
	return nil
}

// indexBytes returns the bound on the index's memory, given the limit that Go was set, math.MaxInt64 for none.
func (o *indexMemory) indexBytes(goLimit int64) int64 {
	switch {
	case o.indexMaxBytes > 0:
		return o.indexMaxBytes
	case goLimit == math.MaxInt64:
		return indexer.DefaultMaxBytes
	}
	return max(goLimit/2, minIndexBytes)
}

// logging says what is logged, and how.
type logging struct {
	logLevel, logFormat string

	lines    *lineWriter // of the process's log
	settings []any       // see changedSettings
}

// add declares the flags; debug is what that level shows beside, in brackets.
func (o *logging) add(f *pflag.FlagSet, debug string) {
	f.StringVar(&o.logLevel, "log-level", "info", "`LEVEL`: debug"+debug+", info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "`FORMAT`: text or json")
}

// check says what is wrong with them.
func (o *logging) check() error {
	var level slog.Level
	if level.UnmarshalText([]byte(o.logLevel)) != nil {
		return oneOf("log-level", o.logLevel, "debug", "info", "warn", "error")
	}
	return oneOf("log-format", o.logFormat, "text", "json")
}

// handler returns what writes log lines of at least a level to a writer, in the chosen format.
func (o *logging) handler(to io.Writer, level slog.Level) slog.Handler {
	h := &slog.HandlerOptions{Level: level, ReplaceAttr: durationInSeconds}
	if o.logFormat == "json" {
		return slog.NewJSONHandler(to, h)
	}
	return slog.NewTextHandler(to, h)
}

// durationInSeconds writes durations as numbers of seconds under a key that says so: slog writes bare nanoseconds as
// JSON.
func durationInSeconds(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	return a
}

// parse reads arguments, which are all flags, then what they leave unset from the environment, where prefix stands
// before names.
func parse(f *pflag.FlagSet, prefix string, args []string, getenv func(string) string) error {
	if err := parseArgs(f, args); err != nil {
		return err
	}
	switch {
	case f.NArg() == 0:
	case f.Arg(0) == "true" || f.Arg(0) == "false":
		return fmt.Errorf(
			"unexpected argument %q: write the value of a flag that is true or false behind an equals sign, --FLAG=%s",
			f.Arg(0),
			f.Arg(0),
		)
	default:
		return fmt.Errorf("unexpected argument %q: every flag begins with --", f.Arg(0))
	}
	return fromEnvironment(f, prefix, getenv)
}
