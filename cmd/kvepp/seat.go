package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/pool"
	"kvepp/serve/llmd"
	"kvepp/serve/secrets"
)

// The image has kvepp under two further names, by which others' manifests call it.
const (
	seatCommand  = "epp"   // /app/epp is llm-d's picker, as KServe starts it
	sleepCommand = "sleep" // /bin/sleep is KServe's preStop hook
)

// arguments returns the arguments of a process, the command first: argv are its name and its arguments. llm-d's charts
// give flags without a command.
func arguments(argv []string) []string {
	if len(argv) == 0 {
		return nil
	}
	args := argv[1:]
	switch name := filepath.Base(argv[0]); {
	case name == seatCommand || name == sleepCommand:
		return append([]string{name}, args...)
	case len(args) > 0 && strings.HasPrefix(args[0], "-") && !isHelp(args[0]) && args[0] != "--version":
		return append([]string{seatCommand}, args...)
	}
	return args
}

// takeSeat runs `kvepp serve` as the arguments of llm-d's picker say. It returns the exit status.
func takeSeat(args, environ []string, stdout, stderr io.Writer, getenv func(string) string) int {
	seat, err := llmd.Translate(args, serveFlags(new(options)))
	if errors.Is(err, pflag.ErrHelp) {
		fmt.Fprint(stdout, llmd.Help())
		return 0
	}
	if err == nil {
		err = checkEnvironment(environ)
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n%s\n", llmd.Command, err, seatHint)
		return 2
	}
	parse := func(o *options, args []string, getenv func(string) string) error {
		o.seat = seat
		return parseServe(o, args, getenv)
	}
	return daemon("serve", serveFlags, parse, serve, seat.Args, stdout, stderr, getenv)
}

const seatHint = `"kvepp epp --help" lists the flags; docs/migration/llm-d.md has the rest.`

// sleep waits as the program sleep does: args are one number of seconds, or with the unit s, m or h. It returns the
// exit status.
func sleep(args []string, stderr io.Writer) int {
	if len(args) == 1 {
		d, err := time.ParseDuration(args[0])
		if err != nil {
			d, err = time.ParseDuration(args[0] + "s")
		}
		if err == nil && d >= 0 {
			time.Sleep(d)
			return 0
		}
	}
	fmt.Fprintf(stderr, "sleep: %q: give one time, such as 15 (seconds)\n", args)
	return 2
}

// sit applies the settings of llm-d's picker that no flag has.
func (o *options) sit() (err error) {
	if o.seat == nil {
		return nil
	}
	if o.gauges.TLS, err = secrets.Trust(o.seat.EngineCA, o.seat.EngineCertificate, o.seat.EngineKey); err != nil {
		return fmt.Errorf("metrics-data-source: %w", err)
	}
	o.gauges.TLS.InsecureSkipVerify = o.gauges.SkipVerify
	o.transport.Suites = o.seat.CipherSuites
	o.noTraces = o.seat.NoTraces
	o.routing.EstimateTokens, o.routing.LabelServed = o.seat.EstimateTokens, true
	if !o.routing.Disaggregation.On { // no flag says it
		o.routing.NoPrefill, o.routing.Disaggregation = o.seat.NoPrefill, o.seat.Disaggregation
	}
	// then decode workers take requests alone
	o.proxy.PrefillerHeader = o.proxy.PrefillerHeader || o.seat.NoPrefill
	o.sources.Kube.RoleOf = o.seat.RoleOf
	o.proxy.Conventions = o.seat.Conventions
	o.proxy.TokenNamespace = o.sources.Kube.Namespace
	if o.seat.EndpointsFile != "" {
		o.sources.Parse = o.discovered()
	}
	o.queue.Bands = o.seat.Bands
	o.models.Others = o.seat.Others
	o.models.Others.Scheme, o.models.Others.TLS = o.gauges.Scheme, o.gauges.TLS
	return nil
}

// discovered returns what reads a file of llm-d's file discovery. It logs the entries that it skips once.
func (o *options) discovered() func(text []byte) ([]pool.Entry, error) {
	var logged []string
	return func(text []byte) ([]pool.Entry, error) {
		file, skipped, err := llmd.Endpoints(text, o.seat.RoleOf)
		if err != nil {
			return nil, err
		}
		if len(skipped) > 0 && !slices.Equal(skipped, logged) {
			slog.Warn("kvepp skips entries of the endpoints file", "entries", strings.Join(skipped, "; "))
		}
		logged = skipped
		return pool.ParseFile(file)
	}
}

// logSeat logs what the arguments of llm-d's picker mean here.
func (o *options) logSeat(log *slog.Logger) {
	if o.seat == nil {
		return
	}
	log.Info("kvepp was started as llm-d's picker", "means", strings.Join(o.seat.Args, " "))
	for _, row := range o.seat.Rows {
		log.Info("of llm-d's configuration", "name", row.Name, "type", row.Type, "verdict", row.Verdict,
			"settings", strings.Join(row.Settings, " "), "says", row.Says)
	}
	for _, line := range o.seat.Notes {
		log.Warn("of llm-d's picker", "note", line)
	}
}

// explainConfig prints what an EndpointPickerConfig means here. It returns the exit status: 1 if kvepp refuses it.
func explainConfig(file string, stdout, stderr io.Writer) int {
	rows, err := llmd.Explain(file)
	fmt.Fprint(stdout, llmd.Table(rows))
	if err != nil {
		fmt.Fprintf(stderr, "kvepp check: %v\n", err)
		return 1
	}
	return 0
}
