// Package llmd lets kvepp start where the endpoint picker of llm-d starts, with only the image changed: it translates
// that picker's arguments and its EndpointPickerConfig into arguments of `kvepp serve`, and into the few settings that
// no flag of kvepp has.
//
// It owns what each flag, plugin type and key of llm-d's picker means here, in tables ([Flags], [Plugins]). It never
// decides: what it cannot express in kvepp's settings it ignores with a note, or refuses. The rest of kvepp does not
// know of it; only cmd/kvepp calls it, at the start. Its functions are not safe for concurrent use.
//
// Source: llm-d-router v0.9.0, v0.10.0 and v0.11.0, and main up to November 2026.
package llmd

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/pool"
	"kvepp/router/queue"
	"kvepp/scoring"
	"kvepp/serve/models"
)

// Verdict says how near kvepp comes to what a flag or a plugin does in llm-d's picker.
type Verdict string

// The verdicts. Ignored is only for preferences among endpoints that may all be chosen, and for what kvepp always does.
const (
	Maps         Verdict = "maps to"
	Approximated Verdict = "approximated"
	Ignored      Verdict = "ignored"
	Refused      Verdict = "refused"
)

// Seat is what the arguments of llm-d's picker mean for kvepp.
type Seat struct {
	Args  []string // of `kvepp serve`
	Notes []string // what was given and has no effect, or another one: a line each
	Rows  []Row    // what the parts of the configuration mean
	Settings

	own     []string // arguments that follow from the configuration: the command line takes precedence
	metrics []string // of --engine-metrics
	file    string   // of --config-file
	text    string   // of --config-text
	gates   []string // of --feature-gates
	alpha   bool     // --allow-experimental-plugins
	strict  bool     // --config-strict
}

// Settings are those that no flag of kvepp serve has.
type Settings struct {
	NoTraces     bool     // export no spans
	CipherSuites []uint16 // of TLS up to 1.2; nil: Go's
	Compat       string   // --metrics-compat, see Twins

	// Events follows KV events. The command line's --router-kv-events takes precedence over the configuration.
	Events bool
	// EstimateTokens takes 4 bytes of a prompt as a token where no token ids are known.
	EstimateTokens bool
	// Others says who knows token ids, without Scheme and TLS, which are those of engines' metrics.
	Others models.Others

	// EngineCA, EngineCertificate and EngineKey are PEM files for https connections to the engines: authorities, and
	// what kvepp shows. Empty: the system's, and nothing.
	EngineCA, EngineCertificate, EngineKey string

	// RoleOf returns the role of a Pod with these labels, and whether it is an endpoint. nil: as kvepp reads roles
	// itself.
	RoleOf func(labels map[string]string) (pool.Role, bool)
	// NoPrefill uses no prefill worker. Else Disaggregation says which prompts have one.
	NoPrefill      bool
	Disaggregation scoring.Disaggregation

	Conventions extproc.Conventions

	// Bands are those of flowControl. nil: it is off.
	Bands *queue.Bands

	// EndpointsFile is the file of --endpoints, in llm-d's format. Empty: it has kvepp's, or there is none.
	EndpointsFile string
}

// Command is what the seat is called in messages.
const Command = "kvepp in the place of llm-d's picker"

// Translate reads the arguments of llm-d's picker. Flags of kvepp serve, which serve declares, pass unchanged, unless
// llm-d has the same name with another meaning. Arguments that are no flags are ignored, as there.
//
// Errors: flags.ErrHelpAll or pflag.ErrHelp if help is asked for; else what cannot be followed, and why.
func Translate(args []string, serve *pflag.FlagSet) (*Seat, error) {
	type occurrence struct{ name, value string }
	var all []occurrence
	fs, of := flags.New(Command), map[string]*Flag{}
	declare := func(name, noValue string) {
		if fs.Lookup(name) != nil {
			return
		}
		short := name
		if len(name) > 1 {
			short = ""
		}
		fs.FuncP(name, short, "", func(value string) error { all = append(all, occurrence{name, value}); return nil })
		fs.Lookup(name).NoOptDefVal = noValue
	}
	for i := range Flags {
		of[Flags[i].Name] = &Flags[i]
		declare(Flags[i].Name, map[bool]string{true: "true"}[Flags[i].kind == "bool"])
	}
	serve.VisitAll(func(own *pflag.Flag) { declare(own.Name, own.NoOptDefVal) })
	if err := flags.ParseArgs(fs, args, func(string) error { return nil }); err != nil {
		return nil, err
	}
	s := &Seat{Settings: Settings{Compat: compatLLMD,
		Conventions: extproc.Conventions{ModelHeaders: modelHeaders, PickerHeaders: pickerHeaders}}}
	for i, o := range all {
		isLast := !slices.ContainsFunc(all[i+1:], func(later occurrence) bool { return later.name == o.name })
		if f := of[o.name]; f == nil {
			s.Args = append(s.Args, "--"+o.name+"="+o.value)
		} else if isLast {
			if err := s.obey(f, o.value); err != nil {
				return nil, fmt.Errorf("--%s %q: %w", o.name, o.value, err)
			}
		}
	}
	for _, extra := range fs.Args() {
		if extra != "" {
			s.note("argument %.100q: llm-d's picker ignores arguments that are no flags, and so does kvepp", extra)
		}
	}
	if err := s.readConfig(); err != nil {
		return nil, err
	}
	if len(s.metrics) > 0 {
		s.own = append(s.own, "--engine-metrics="+strings.Join(s.metrics, ","))
	}
	s.Args = slices.Concat(s.own, s.Args)
	if slices.ContainsFunc(s.Args, func(arg string) bool {
		value, found := strings.CutPrefix(arg, "--secure-serving=")
		return found && !isTrue(value)
	}) {
		s.drop("--secure-serving=false: no TLS", "cert-path", "tls-min-version")
	}
	return s, nil
}

// drop removes arguments that llm-d's picker ignores, and notes why.
func (s *Seat) drop(why string, names ...string) {
	s.Args = slices.DeleteFunc(s.Args, func(arg string) bool {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if slices.Contains(names, name) {
			s.note("%s is ignored: %s", arg, why)
			return true
		}
		return false
	})
}

// readConfig follows the configuration that the flags name.
func (s *Seat) readConfig() error {
	text, flag := s.text, "--config-text"
	switch {
	case s.file != "" && s.text != "":
		return errors.New("--config-file and --config-text: give one of the two")
	case s.file != "":
		flag = "--config-file " + s.file
		raw, err := boundedfile.Read(s.file, maxConfigBytes)
		if err != nil {
			return fmt.Errorf("--config-file: %w", err)
		}
		text = string(raw)
	}
	c, err := read(text, s.gates, s.alpha)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	s.Events = slices.Contains(s.Args, "--router-kv-events=true")
	t := c.means(s.Settings)
	var errs []error
	for _, row := range t.rows {
		s.Rows = append(s.Rows, *row)
		s.own = append(s.own, row.Settings...)
		if row.Verdict == Refused || s.strict && row.Verdict != Maps {
			errs = append(errs, errors.New(strings.TrimSuffix(Table([]Row{*row}), "\n")))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%s: %w", flag, errors.Join(errs...))
	}
	s.Settings, s.Notes = t.settings, append(s.Notes, c.notes...)
	if s.EndpointsFile != "" {
		s.drop("the configuration discovers endpoints in a file, not in Kubernetes", "pool-name", "pool-namespace",
			"pool-group", "endpoint-selector", "endpoint-target-ports", "metrics-endpoint-auth",
			"ha-enable-leader-election")
	}
	return nil
}

// Explain returns what the parts of a configuration file mean here, and an error if llm-d's picker would refuse the
// file or kvepp does.
func Explain(file string) ([]Row, error) {
	s := &Seat{alpha: true, file: file}
	err := s.readConfig()
	return s.Rows, err
}

func (s *Seat) note(format string, args ...any) {
	s.Notes = append(s.Notes, fmt.Sprintf(format, args...))
}

// modelHeaders are those with which a client replaces its request's model; the first has precedence. pickerHeaders are
// the others that are for the picker alone.
//
// Source: llm-d-router v0.11, pkg/epp/metadata.
var (
	modelHeaders  = []string{"x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"}
	pickerHeaders = []string{"x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id",
		"x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-video-fps",
		"x-llm-d-video-duration-seconds", "x-llm-d-video-resolution"}
)
