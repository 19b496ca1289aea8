// Package flags declares a command's flags with kinds of values that pflag lacks, and reads them from the command line,
// the environment and a file of settings, in this precedence. Its errors name the flag and say what to write instead;
// help and the effective settings follow from the declarations.
//
// A package with settings declares them in `func (c *Config) AddFlags(fs *pflag.FlagSet)`, and checks what several say
// together in `func (c *Config) Validate() error`. This package knows no flag of kvepp by name. Its functions are for
// the start of a program: they are not safe for concurrent use.
package flags

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
)

// HelpAll is the flag that asks for help with all flags. Parsing then returns ErrHelpAll, which is a pflag.ErrHelp.
const HelpAll = "help-all"

// ErrHelpAll is what parsing returns for --help-all.
var ErrHelpAll = fmt.Errorf("all flags: %w", pflag.ErrHelp)

// Keys of annotations of flags.
const (
	inSection   = "section"     // its heading in help
	hasValues   = "values"      // all values that it takes, or beginnings of values
	inherits    = "inherits"    // its variable besides the program's own
	inVariables = "environment" // its variables, after NameVariables
	setBy       = "source"      // where its value came from; absent for defaults
)

// New returns the flag set of a command, such as "kvepp serve". Help lists the flags in the order of their declaration.
func New(command string) *pflag.FlagSet {
	fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
	fs.SortFlags = false
	fs.SetOutput(io.Discard) // the caller prints errors, once
	fs.Bool(HelpAll, false, "show help with all flags")
	fs.Lookup(HelpAll).Hidden = true
	return fs
}

// Section puts the flags that have no section yet into one.
func Section(fs *pflag.FlagSet, title string) {
	fs.VisitAll(func(flag *pflag.Flag) {
		if SectionOf(flag) == "" {
			annotate(flag, inSection, title)
		}
	})
}

// SectionOf returns the section of a flag; "" if it has none yet.
func SectionOf(flag *pflag.Flag) string { return annotation(flag, inSection) }

// Inherit names the variable from which a flag takes its value if nothing else sets it: pairs are flags and variables
// in turn.
func Inherit(fs *pflag.FlagSet, pairs ...string) {
	for pair := range slices.Chunk(pairs, 2) {
		annotate(fs.Lookup(pair[0]), inherits, pair[1])
	}
}

// ValuesOf returns all values of a flag, or beginnings of values; nil: they are not known.
func ValuesOf(flag *pflag.Flag) []string { return flag.Annotations[hasValues] }

// Values names the values of a flag, or their beginnings, which completion offers.
func Values(fs *pflag.FlagSet, name string, all ...string) {
	annotate(fs.Lookup(name), hasValues, all...)
}

func annotate(flag *pflag.Flag, key string, values ...string) {
	if flag.Annotations == nil {
		flag.Annotations = map[string][]string{}
	}
	flag.Annotations[key] = values
}

// annotation returns the first value of an annotation; "" if there is none.
func annotation(flag *pflag.Flag, key string) string {
	if values := flag.Annotations[key]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// choice is a text that is one of a few.
type choice struct {
	value *string
	known []string
	empty bool // "" is allowed
}

func (c choice) Set(s string) error {
	if !slices.Contains(c.known, s) && (s != "" || !c.empty) {
		return errors.New("unknown value")
	}
	*c.value = s
	return nil
}

func (c choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

func (choice) Type() string { return "string" }

// Choice declares a flag whose value is one of known, or empty if the default is.
func Choice(fs *pflag.FlagSet, to *string, name, byDefault, usage string, known ...string) {
	*to = byDefault
	fs.Var(choice{to, known, byDefault == ""}, name, usage)
	Values(fs, name, known...)
}

// optional is a number that may be absent, which is written None.
type optional[T any] struct {
	value **T
	kind  string
	parse func(string) (T, error)
}

func (o optional[T]) Set(s string) error {
	if s == "None" || s == "none" {
		*o.value = nil
		return nil
	}
	v, err := o.parse(s)
	if err != nil {
		return errors.New("must be a number, or None")
	}
	*o.value = &v
	return nil
}

func (o optional[T]) String() string {
	if o.value == nil || *o.value == nil {
		return ""
	}
	return fmt.Sprint(**o.value)
}

func (o optional[T]) Type() string { return o.kind }

// Float declares a number that may be absent (nil); absent is written None.
func Float(fs *pflag.FlagSet, to **float64, name, usage string) {
	fs.Var(optional[float64]{to, "float", func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }}, name,
		usage)
}

// Uint declares a whole number that may be absent (nil); absent is written None.
func Uint(fs *pflag.FlagSet, to **uint64, name, usage string) {
	fs.Var(optional[uint64]{to, "uint", func(s string) (uint64, error) { return strconv.ParseUint(s, 10, 64) }}, name,
		usage)
}

// negated is the flag --no-X of a boolean flag --X.
type negated struct{ flag *pflag.Flag }

func (n negated) Set(s string) error {
	switch s {
	case "true":
		s = "false"
	case "false":
		s = "true"
	}
	n.flag.Changed = true
	return n.flag.Value.Set(s)
}

func (negated) String() string { return "" }
func (negated) Type() string   { return "negated" }

// Negatable declares --no-X for each boolean flag --X.
func Negatable(fs *pflag.FlagSet, names ...string) {
	for _, name := range names {
		flag := fs.VarPF(negated{fs.Lookup(name)}, "no-"+name, "", "the same as --"+name+"=false")
		flag.NoOptDefVal, flag.Hidden = "true", true
	}
}

// retired is a flag that nothing reads any more.
type retired struct{}

func (retired) Set(string) error { return nil }
func (retired) String() string   { return "" }
func (retired) Type() string     { return "retired" }

// Retire declares a flag that is accepted and changes nothing; a switch needs no value. Help does not list it.
func Retire(fs *pflag.FlagSet, name string, isSwitch bool) {
	flag := fs.VarPF(retired{}, name, "", "")
	if flag.Hidden = true; isSwitch {
		flag.NoOptDefVal = "true"
	}
}

func isRetired(flag *pflag.Flag) bool { return flag.Value == retired{} }

// OneOf returns an error unless the value of a flag is one of the known ones.
func OneOf(name, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return fmt.Errorf("--%s %q: %s", name, value, mustBeOneOf(value, known))
}

func mustBeOneOf(value string, known []string) string {
	last := len(known) - 1
	return fmt.Sprintf("must be %s or %s%s", strings.Join(known[:last], ", "), known[last],
		suggest.DidYouMean(value, "", known))
}

// Between returns an error unless the value of a flag is from least to most.
func Between[T int | int64 | uint32 | float64 | time.Duration](name string, value, least, most T) error {
	if value >= least && value <= most { // false for what is not a number
		return nil
	}
	return fmt.Errorf("--%s %v: must be from %v to %v", name, value, least, most)
}

// NotNegative returns an error if the duration of a flag is negative.
func NotNegative(name string, value time.Duration) error {
	if value >= 0 {
		return nil
	}
	return fmt.Errorf("--%s %v: may not be negative; give a duration such as 2s, or 0", name, value)
}

// Positive returns an error unless the duration of a flag is above 0.
func Positive(name string, value time.Duration) error {
	if value > 0 {
		return nil
	}
	return fmt.Errorf("--%s %v: must be above 0, for example 2s", name, value)
}

// either is a choice between two words.
type either struct {
	value   *bool
	no, yes string
}

func (e either) Set(s string) error {
	if s != e.no && s != e.yes {
		return errors.New("unknown value")
	}
	*e.value = s == e.yes
	return nil
}

func (e either) String() string {
	if e.value != nil && *e.value {
		return e.yes
	}
	return e.no
}

func (either) Type() string { return "string" }

// Either declares a flag with two values: no, the default, and yes.
func Either(fs *pflag.FlagSet, to *bool, name, no, yes, usage string) {
	fs.Var(either{to, no, yes}, name, usage)
	Values(fs, name, no, yes)
}

// seconds is a duration that is written as a number of seconds.
type seconds struct {
	value *time.Duration
	whole bool
}

func (s seconds) Set(text string) error {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(n) || s.whole && n != math.Trunc(n) {
		return errors.New("must be a number")
	}
	n = max(-maxSeconds, min(n, maxSeconds))
	*s.value = time.Duration(n * float64(time.Second))
	return nil
}

// maxSeconds is near the longest time.Duration.
const maxSeconds = 9e9

func (s seconds) String() string {
	if s.value == nil {
		return ""
	}
	return strconv.FormatFloat(s.value.Seconds(), 'f', -1, 64)
}

func (s seconds) Type() string {
	if s.whole {
		return "int"
	}
	return "float64"
}

// Seconds declares a duration that is written as a number of seconds; with whole, as a whole number.
func Seconds(fs *pflag.FlagSet, to *time.Duration, name string, byDefault time.Duration, whole bool, usage string) {
	*to = byDefault
	fs.Var(seconds{to, whole}, name, usage)
}

// Unused collects flags that were given and have no effect beside others.
type Unused struct {
	Set   *pflag.FlagSet
	Lines []string // one for each flag: its name and why it has no effect
}

// Add adds those of the flags that were given.
func (u *Unused) Add(why string, names ...string) {
	for _, name := range names {
		if u.Set.Changed(name) {
			u.Lines = append(u.Lines, "--"+name+": "+why)
		}
	}
}
