package main

import (
	"errors"
	"fmt"
	"log/slog"
	"math"

	"github.com/spf13/pflag"

	"kvepp/indexer"
)

// webHosts are the names that requests may give in their header Host, where they come over loopback.
type webHosts struct{ names []string }

func (o *webHosts) add(f *pflag.FlagSet) {
	f.StringSliceVar(
		&o.names,
		"allowed-hosts",
		nil,
		"`NAMES`, separated by commas, that HTTP requests over loopback may have in their header Host, beside "+
			"localhost and loopback addresses. Other names are refused, since a page in a browser could have made "+
			"its own name lead here",
	)
}

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
