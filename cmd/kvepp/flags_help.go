package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/serve/client"
)

// helpWidth is the number of columns of help, and helpColumn the one at which the text of a flag begins.
const (
	helpWidth  = 100
	helpColumn = 30
)

// Keys of annotations of flags.
const (
	inSection   = "section"     // its heading in help and in docs/configuration.md
	hasValues   = "values"      // all values that it takes, or beginnings of values
	inVariables = "environment" // its variables: kvepp's name, and Dynamo's if there is one
	setBy       = "source"      // where its value came from; absent for defaults
)

// sectionOtherNames has the flags that only set another flag, sectionCompat those that kvepp refuses or ignores.
const (
	sectionOtherNames = "Other names"
	sectionCompat     = "Flags of other routers"
)

// section puts the flags that have no section yet into one.
func section(f *pflag.FlagSet, title string) {
	f.VisitAll(func(flag *pflag.Flag) {
		if annotation(flag, inSection) == "" {
			annotate(flag, inSection, title)
		}
	})
}

// values names all values of a flag.
func values(f *pflag.FlagSet, flag string, all ...string) {
	annotate(f.Lookup(flag), hasValues, all...)
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

// A flagSection is a heading and its flags.
type flagSection struct {
	title string
	flags []*pflag.Flag
}

// sectionsOf returns the flags of a command that are not hidden, in the order of their declaration.
func sectionsOf(f *pflag.FlagSet) (sections []flagSection) {
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		title := annotation(flag, inSection)
		at := slices.IndexFunc(sections, func(s flagSection) bool { return s.title == title })
		if at < 0 {
			at, sections = len(sections), append(sections, flagSection{title: title})
		}
		sections[at].flags = append(sections[at].flags, flag)
	})
	return sections
}

// essential are the flags that `kvepp serve --help` shows.
var essential = []struct {
	title string
	flags []string
}{
	{"Workers", []string{"endpoints", "pool-name", "dynamo-discovery"}},
	{"Models", []string{"model", "engine", "tokenizer-url"}},
	{"Routing", []string{"router-mode", "router-kv-events", "router-queue-threshold"}},
	{"Addresses", []string{"grpc-port", "secure-serving", "metrics-port", "admin-address"}},
	{"Operation", []string{"config", "log-level"}},
}

const serveHelp = `kvepp serve is an endpoint picker for Envoy: for each LLM request it chooses the worker that costs
least, by the cached prefix and the load of each worker. It runs until SIGTERM.

Usage:       kvepp serve --endpoints FILE --model NAME=DIR [flags]
Example:     kvepp serve --endpoints endpoints.yaml --model qwen=/models/qwen
Test it:     kvepp check --endpoints endpoints.yaml --model qwen=/models/qwen
`

const serveHelpEnd = `
All flags:   kvepp serve --help-all; the same as a page: docs/configuration.md
Settings:    kvepp serve --print-config [flags] prints each value and where it came from
Precedence:  flag, variable KVEPP_<FLAG>, --config FILE, Dynamo's variable, default
`

// serveHelpBrief writes what `kvepp serve --help` shows.
func serveHelpBrief(out io.Writer, f *pflag.FlagSet) {
	fmt.Fprint(out, serveHelp)
	for _, s := range essential {
		fmt.Fprintf(out, "\n%s\n", s.title)
		for _, name := range s.flags {
			flag := f.Lookup(name)
			writeFlag(out, flag, firstSentence(meaning(flag))+shownDefault(flag))
		}
	}
	fmt.Fprint(out, serveHelpEnd)
}

const serveHelpAll = `kvepp serve is an endpoint picker for Envoy. These are all its flags; "kvepp serve --help" ` +
	`shows the
fifteen that matter first.

Precedence:  flag, variable KVEPP_<FLAG> (KVEPP_GRPC_PORT), --config FILE (grpc-port: 9002),
             Dynamo's variable (in brackets where there is one), default
Turn off:    --FLAG=false
`

// serveHelpFull writes what `kvepp serve --help-all` shows.
func serveHelpFull(out io.Writer, f *pflag.FlagSet) {
	fmt.Fprint(out, serveHelpAll)
	writeSections(out, f)
}

// sectionCheck has the flags of kvepp check that kvepp serve does not have.
const sectionCheck = "Flags of kvepp check"

// showHelp writes the help of a command, whose flags are f. asked is the error of parsing, errHelpAll for all flags.
func showHelp(out io.Writer, f *pflag.FlagSet, asked error) {
	all := errors.Is(asked, errHelpAll)
	switch command := strings.TrimPrefix(f.Name(), "kvepp "); {
	case command == "serve" && all:
		serveHelpFull(out, f)
	case command == "serve":
		serveHelpBrief(out, f)
	case command == "check" && !all:
		fmt.Fprint(out, checkHelp)
		for _, s := range sectionsOf(f) {
			if s.title == sectionCheck {
				writeFlags(out, s)
			}
		}
	default:
		fmt.Fprint(out, cmp.Or(helpTexts[command], client.Help[command]))
		writeSections(out, f)
	}
}

// helpTexts are the beginnings of help.
var helpTexts = map[string]string{
	"check":    checkHelp,
	"tokenize": tokenizeHelp,
	"indexer":  indexerHelp,
	"select":   selectHelp,
	"fetch":    fetchHelp,
	"replay":   replayHelp,
	"envoy":    envoyHelp,
	"size":     sizeHelp,
}

// writeSections writes the flags of a command, by section. Flags that are refused or ignored are a list of names.
func writeSections(out io.Writer, f *pflag.FlagSet) {
	for _, s := range sectionsOf(f) {
		if s.title == sectionCompat {
			writeCompatFlags(out, s)
		} else {
			writeFlags(out, s)
		}
	}
}

// writeFlags writes a section.
func writeFlags(out io.Writer, s flagSection) {
	fmt.Fprintf(out, "\n%s\n", s.title)
	for _, flag := range s.flags {
		text := meaning(flag) + shownDefault(flag)
		if variables := flag.Annotations[inVariables]; len(variables) > dynamoVariable {
			text += " [" + variables[dynamoVariable] + "]"
		}
		writeFlag(out, flag, text)
	}
}

// writeCompatFlags writes the names of compatFlags, by what kvepp does with them.
func writeCompatFlags(out io.Writer, s flagSection) {
	var refused, ignored []string
	for _, flag := range s.flags {
		if c := compatFlagNamed(flag.Name); c.refused != "" {
			refused = append(refused, "--"+c.name)
		} else {
			ignored = append(ignored, "--"+c.name)
		}
	}
	fmt.Fprintf(out, "\n%s\n", s.title)
	for _, list := range []struct {
		what  string
		names []string
	}{
		{"Refused; the error says why, and what to do instead:", refused},
		{"Accepted without effect:", ignored},
	} {
		if len(list.names) > 0 {
			fmt.Fprintf(out, "  %s\n", list.what)
			for _, line := range wrap(strings.Join(list.names, " "), helpWidth-4) {
				fmt.Fprintf(out, "    %s\n", line)
			}
		}
	}
}

// writeFlag writes a flag with its text beside it, or below it if its name is long.
func writeFlag(out io.Writer, flag *pflag.Flag, text string) {
	head := "  " + spelled(flag)
	if len(head) > helpColumn-2 {
		fmt.Fprintln(out, head)
		head = ""
	}
	for _, line := range wrap(text, helpWidth-helpColumn) {
		fmt.Fprintf(out, "%-*s%s\n", helpColumn, head, line)
		head = ""
	}
}

// spelled returns a flag as it is written, with a word for its value: --grpc-port PORT.
func spelled(flag *pflag.Flag) string {
	if word := valueWord(flag); word != "" {
		return "--" + flag.Name + " " + word
	}
	return "--" + flag.Name
}

// valueWord returns the word for a flag's value; "" for a flag that is true or false.
func valueWord(flag *pflag.Flag) string {
	word, _ := pflag.UnquoteUsage(flag)
	switch word {
	case "int", "uint", "uint16", "float":
		return "NUMBER"
	case "string":
		return "TEXT"
	}
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' && !strings.Contains(word, ":") {
			return r - 'a' + 'A'
		}
		return r
	}, word)
}

// meaning returns the help of a flag.
func meaning(flag *pflag.Flag) string {
	_, usage := pflag.UnquoteUsage(flag)
	return usage
}

// firstSentence returns a text up to the end of its first sentence, without the period.
func firstSentence(text string) string {
	first, _, _ := strings.Cut(text, ". ")
	return first
}

// shownDefault returns the default of a flag as help shows it, in brackets; "" where the help says what an absent value
// means.
func shownDefault(flag *pflag.Flag) string {
	if value := defaultOf(flag); value != "" && value != "0" && value != "false" && value != "0s" {
		return " (default " + value + ")"
	}
	return ""
}

// defaultOf returns the default of a flag; "" if it has none.
func defaultOf(flag *pflag.Flag) string {
	switch value := flag.DefValue; {
	case value == "[]" || flag.Name == "router-kv-overlap-score-weight":
		return ""
	case flag.Value.Type() == "duration":
		return shortDuration(value)
	default:
		return value
	}
}

// shortDuration returns a duration as people write it: Go prints 5m as 5m0s.
func shortDuration(d string) string {
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(d, zero) {
			d = d[:len(d)-2]
		}
	}
	return d
}

// wrap breaks a text into lines of at most width columns, between words.
func wrap(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) <= width:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	return append(lines, line)
}
