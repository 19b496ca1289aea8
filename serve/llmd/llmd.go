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
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
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
	config  struct{ file, text string }
	gates   []string // of --feature-gates
	alpha   bool     // --allow-experimental-plugins
	strict  bool     // --config-strict
}

// Settings are those that no flag of kvepp serve has.
type Settings struct {
	NoTraces     bool     // export no spans
	CipherSuites []uint16 // of TLS up to 1.2; nil: Go's
	Compat       string   // --metrics-compat, see Twins

	// EstimateTokens takes 4 bytes of a prompt as a token where no token ids are known.
	EstimateTokens bool
	// AskEngines asks the pool's own engines for token ids. TokenizerURL, if it is not empty, is a server that knows
	// those of every served model; it has TokenizerTimeout to answer, and knows the model as TokenizerModel (empty: by
	// its own name).
	AskEngines       bool
	TokenizerURL     string
	TokenizerModel   string
	TokenizerTimeout time.Duration

	// Stages says whether a Pod with these labels may prefill, and whether it may decode; with neither it is no
	// endpoint. nil: as kvepp reads roles itself.
	Stages func(labels map[string]string) (prefill, decode bool)
	// NoPrefill uses no prefill worker. Else Disaggregate says which prompts have one: those of at least Prompt tokens
	// with at least NonCached tokens that the decode worker does not hold. 0: each prompt.
	NoPrefill    bool
	Disaggregate struct{ Prompt, NonCached int }
	// PrimaryPort sends requests to this port of the chosen endpoint's host, which forwards them to the endpoint. 0:
	// requests go to the endpoint.
	PrimaryPort int

	// SessionHeaders name a request's session, beside those that kvepp knows.
	SessionHeaders []string
	// SessionTokenHeader names the endpoint of a response, and requests with it return there. Empty: none. If
	// SessionTokenSoft is set they go elsewhere while that endpoint is overloaded.
	SessionTokenHeader string
	SessionTokenSoft   bool

	EndpointScores bool // --emit-endpoint-scores

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
	var all []given
	fs := flags.New(Command)
	for i := range Flags {
		f := &Flags[i]
		flag := fs.VarPF(occurrence{f.Name, &all}, f.Name, f.short, f.Says)
		if f.kind == boolean {
			flag.NoOptDefVal = "true"
		}
	}
	serve.VisitAll(func(own *pflag.Flag) {
		if fs.Lookup(own.Name) == nil {
			flag := fs.VarPF(occurrence{own.Name, &all}, own.Name, "", "")
			flag.NoOptDefVal = own.NoOptDefVal
		}
	})
	if err := flags.ParseArgs(fs, args, func(string) error { return nil }); err != nil {
		return nil, err
	}
	s := &Seat{Settings: Settings{Compat: compatLLMD}}
	for i, g := range all {
		switch f := flagNamed(g.name); {
		case f == nil:
			s.Args = append(s.Args, "--"+g.name+"="+g.value)
		case slices.ContainsFunc(all[i+1:], func(later given) bool { return later.name == g.name }):
			// the last one counts
		default:
			if err := f.follow(s, g.value); err != nil {
				return nil, fmt.Errorf("--%s %q: %w", g.name, g.value, err)
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
	if i := slices.IndexFunc(s.Args, isPlaintext); i >= 0 {
		s.drop("--secure-serving=false: no TLS", "cert-path", "tls-min-version")
	}
	return s, nil
}

func isPlaintext(arg string) bool {
	value, found := strings.CutPrefix(arg, "--secure-serving=")
	yes, err := strconv.ParseBool(value)
	return found && err == nil && !yes
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
	if s.config.file != "" && s.config.text != "" {
		return errors.New("--config-file and --config-text: give one of the two")
	}
	text, flag := s.config.text, "--config-text"
	if s.config.file != "" {
		flag = "--config-file " + s.config.file
		raw, err := boundedfile.Read(s.config.file, maxConfigBytes)
		if err != nil {
			return fmt.Errorf("--config-file: %w", err)
		}
		text = string(raw)
	}
	c, err := read(text, s.gates, s.alpha)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	t := c.means(s.Settings)
	for _, row := range t.rows {
		s.Rows = append(s.Rows, *row)
		s.own = append(s.own, row.Settings...)
	}
	if err := refusals(s.Rows, s.strict); err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	s.Settings, s.Notes = t.settings, append(s.Notes, c.notes...)
	if s.EndpointsFile != "" {
		s.drop("the configuration discovers endpoints in a file, not in Kubernetes", "pool-name", "pool-namespace",
			"pool-group", "endpoint-selector", "endpoint-target-ports", "metrics-endpoint-auth",
			"ha-enable-leader-election")
	}
	return nil
}

// refusals returns an error that names each refused part; with strict, also those that are approximated or ignored.
func refusals(rows []Row, strict bool) error {
	var errs []error
	for _, row := range rows {
		if row.Verdict == Refused || strict && row.Verdict != Maps {
			errs = append(errs, errors.New(strings.TrimSuffix(Table([]Row{row}), "\n")))
		}
	}
	return errors.Join(errs...)
}

// Explain returns what the parts of a configuration file mean here, and an error if llm-d's picker would refuse the
// file or kvepp does.
func Explain(file string) ([]Row, error) {
	s := &Seat{alpha: true}
	s.config.file = file
	err := s.readConfig()
	return s.Rows, err
}

func (s *Seat) note(format string, args ...any) {
	s.Notes = append(s.Notes, fmt.Sprintf(format, args...))
}

// set adds an argument of kvepp serve.
func (s *Seat) set(flag, value string) { s.Args = append(s.Args, "--"+flag+"="+value) }

// given is one occurrence of a flag.
type given struct{ name, value string }

// occurrence collects the occurrences of a flag, in the order of the command line.
type occurrence struct {
	name string
	to   *[]given
}

func (o occurrence) Set(value string) error { *o.to = append(*o.to, given{o.name, value}); return nil }
func (occurrence) String() string           { return "" }
func (occurrence) Type() string             { return "string" }
