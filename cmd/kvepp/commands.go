package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/manifests/envoy"
	"kvepp/prompt/fetch"
	"kvepp/prompt/tokenize"
	"kvepp/replay/report"
	"kvepp/serve/check"
	"kvepp/serve/client"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/dynamo/selector"
)

// A command is a subcommand of kvepp.
type command struct {
	name    string
	summary string
	prefix  string                // of the flags' names in environment variables
	flags   func() *pflag.FlagSet // nil: the command has no flags and reads no environment
}

// commands are the subcommands, in the order of help. The functions of flags use it, so init fills it.
var commands []command

func init() {
	commands = []command{
		{"serve", "run the endpoint picker", "", func() *pflag.FlagSet { return serveFlags(new(options)) }},
		{"check", "test the engines' setup once; print each problem and its fix", "",
			func() *pflag.FlagSet { return checkFlags(new(checkOptions)) }},
		{"tokenize", "print a request's prompt, token ids and block hashes", "",
			func() *pflag.FlagSet { return tokenizeFlags(new(tokenizeOptions)) }},
		{"fetch", "download tokenizers from a model hub, without weights", fetchPrefix,
			func() *pflag.FlagSet { return fetchFlags(new(fetch.Config)) }},
		{"replay", "predict what a setting of the router does to recorded or synthetic traffic", replayPrefix,
			func() *pflag.FlagSet { return replayFlags(new(replayOptions)) }},
		{"envoy", "print an Envoy configuration for an endpoints file", "",
			func() *pflag.FlagSet { return envoyFlags(new(envoy.Config)) }},
		{"workers", "list the endpoints of a running kvepp, and how many requests run on each", "",
			clientCommand("workers")},
		{"cordon", "send an endpoint no new requests", "", clientCommand("cordon")},
		{"drain", "cordon an endpoint, and wait until no request runs on it", "", clientCommand("drain")},
		{"uncordon", "send an endpoint requests again", "", clientCommand("uncordon")},
		{"decisions", "show the latest decisions of a running kvepp, or follow them", "",
			clientCommand("decisions")},
		{"explain", "show which worker a running kvepp would choose for a request, and the cost of each", "",
			clientCommand("explain")},
		{"ladder", "show where a running kvepp's prompts lose cached tokens, and why", "", clientCommand("ladder")},
		{"indexer", "run the index alone, in place of python -m dynamo.indexer", indexerPrefix,
			func() *pflag.FlagSet { return indexerFlags(new(indexerOptions)) }},
		{"select", "run choosing and booking alone, in place of python -m dynamo.select_service", selectPrefix,
			func() *pflag.FlagSet { return selectFlags(new(selectOptions)) }},
		{"completion", "print a completion script for bash, zsh or fish", "", nil},
		{"version", "print what was built", "", nil},
		{"help", "print this help", "", nil},
	}
}

// clientCommand returns the flags of a command that talks to a running kvepp.
func clientCommand(command string) func() *pflag.FlagSet {
	return func() *pflag.FlagSet { return clientFlags(&client.Config{Command: command}) }
}

func commandNames() []string {
	var names []string
	for _, c := range commands {
		names = append(names, c.name)
	}
	return names
}

// commandsWith returns the commands that have a flag.
func commandsWith(flag string) (names []string) {
	for _, c := range commands {
		if c.flags != nil && c.flags().Lookup(flag) != nil {
			names = append(names, c.name)
		}
	}
	return names
}

// toolVariables are the variables of the Makefile, the scripts and the tests. A shell that builds and runs kvepp may
// have set them.
var toolVariables = []string{
	"KVEPP_AIGW", "KVEPP_BENCH_OUT", "KVEPP_BENCH_REPLICAS",
	"KVEPP_CACHE", "KVEPP_CHARTS", "KVEPP_CRDS", "KVEPP_ENGINES", "KVEPP_ENGINE_VERSIONS", "KVEPP_IMAGE_ENVOY",
	"KVEPP_KIND", "KVEPP_KIND_CONFIG", "KVEPP_KIND_IMAGE", "KVEPP_KUBE", "KVEPP_MANIFEST_TOOLS",
	"KVEPP_MODELS", "KVEPP_ORACLES", "KVEPP_PARITY", "KVEPP_PORTS_OF_ANOTHER", "KVEPP_RELEASE",
	"KVEPP_RELEASE_AGAIN", "KVEPP_ROOTFS", "KVEPP_TEMPLATES", "KVEPP_TIMES", "KVEPP_TOOLS", "KVEPP_VLLM",
	"KVEPP_VLLM_MEDIA", "KVEPP_VLLM_MISTRAL",
}

// checkEnvironment returns an error that names each variable KVEPP_* in environ (NAME=VALUE each) that belongs to no
// flag of any command.
func checkEnvironment(environ []string) error {
	return flags.UnknownVariables(environ, allFlags(), toolVariables, func(flag string) error {
		return absentFlag(strings.TrimPrefix(flag, selectPrefix))
	})
}

// allFlags returns the flags of every command.
func allFlags() (sets []flags.Prefixed) {
	for _, c := range commands {
		if c.flags != nil {
			sets = append(sets, flags.Prefixed{FlagSet: c.flags(), Prefix: c.prefix})
		}
	}
	return sets
}

// elsewhere returns why a command does not have a flag; nil if no other command has it either.
func elsewhere(name string) error {
	if why := absentFlag(name); why != nil {
		return why
	}
	if others := commandsWith(name); len(others) > 0 {
		return fmt.Errorf("it is a flag of kvepp %s", strings.Join(others, " and kvepp "))
	}
	return nil
}

// parseArgs reads the arguments into f.
func parseArgs(f *pflag.FlagSet, args []string) error { return flags.ParseArgs(f, args, elsewhere) }

// parse reads arguments, environment and the file at path.
func parse(f *pflag.FlagSet, args []string, path *string, getenv func(string) string) error {
	return flags.Parse(f, args, path, getenv, elsewhere)
}

// settingsFile are the flags about files of settings. serve, check, indexer and select have them.
type settingsFile struct {
	flags.File
	flags  *pflag.FlagSet // of the command
	unread []string       // variables that are set, and are other commands'
}

// reads notes the flags of the command, which getenv gives values.
func (s *settingsFile) reads(f *pflag.FlagSet, getenv func(string) string) {
	s.flags, s.unread = f, flags.Unread(f, allFlags(), getenv)
}

// printsConfig writes the effective settings to out if --print-config asks for it, and reports whether it did.
func (s *settingsFile) printsConfig(out io.Writer) bool {
	if s.Print {
		flags.WriteSettings(out, s.flags)
	}
	return s.Print
}

// logStart logs the command and its version, and the settings that differ from their defaults: one line each.
func (s *settingsFile) logStart(command string, log *slog.Logger) {
	b := readBuild()
	log.Info("kvepp starts", "command", command, "version", b.version, "commit", b.commit, "go", runtime.Version())
	if changed := flags.Changed(s.flags); len(changed) > 0 {
		log.Info("settings that differ from their defaults", changed...)
	} else {
		log.Info("all settings have their defaults")
	}
	if len(s.unread) > 0 {
		log.Warn("environment variables of other commands are set, and have no effect on this one",
			"variables", strings.Join(s.unread, ","))
	}
}

// declared returns the flags of a command, which add declares. prefix is part of the names of their environment
// variables.
func declared(name, prefix string, add ...func(*pflag.FlagSet)) *pflag.FlagSet {
	f := flags.New("kvepp " + name)
	for _, add := range add {
		add(f)
	}
	flags.Section(f, "Flags of kvepp "+name)
	flags.NameVariables(f, prefix)
	return f
}

// parseOnce reads arguments and environment of a command that has no file of settings.
func parseOnce(f *pflag.FlagSet, args []string, getenv func(string) string) error {
	if err := parseArgs(f, args); err != nil {
		return err
	}
	return flags.FromEnvironment(f, getenv)
}

// What the error of a wrong use points to.
const (
	helpHint    = `--help" shows how to use it`
	helpAllHint = `--help-all" lists the flags`
)

// notRun writes why a command with these flags does not run: help if err asks for it, else the error and the hint. It
// returns the exit status.
func notRun(f *pflag.FlagSet, err error, hint string, stdout, stderr io.Writer) int {
	if errors.Is(err, pflag.ErrHelp) {
		showHelp(stdout, f, err)
		return 0
	}
	fmt.Fprintf(stderr, "%s: %v\n\"%s %s.\n", f.Name(), err, f.Name(), hint)
	return 2
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

const serveHelpAll = `kvepp serve is an endpoint picker for Envoy. These are all its flags; "kvepp serve --help" ` +
	`shows the
fifteen that matter first.

Precedence:  flag, variable KVEPP_<FLAG> (KVEPP_GRPC_PORT), --config FILE (grpc-port: 9002),
             Dynamo's variable (in brackets where there is one), default
Turn off:    --FLAG=false
`

// sectionCheck has the flags of kvepp check that kvepp serve does not have.
const sectionCheck = "Flags of kvepp check"

// showHelp writes the help of a command, whose flags are f. asked is the error of parsing, flags.ErrHelpAll for all
// flags.
func showHelp(out io.Writer, f *pflag.FlagSet, asked error) {
	all := errors.Is(asked, flags.ErrHelpAll)
	command := strings.TrimPrefix(f.Name(), "kvepp ")
	switch {
	case command == "serve" && !all:
		fmt.Fprint(out, serveHelp)
		for _, s := range essential {
			group := flags.Group{Title: s.title}
			for _, name := range s.flags {
				group.Flags = append(group.Flags, f.Lookup(name))
			}
			group.WriteBrief(out)
		}
		fmt.Fprint(out, serveHelpEnd)
		return
	case command == "serve":
		fmt.Fprint(out, serveHelpAll)
	default:
		fmt.Fprint(out, cmp.Or(helpTexts[command], client.Help[command]))
	}
	for _, s := range flags.Sections(f) {
		switch {
		case command == "check" && !all && s.Title != sectionCheck:
		default:
			s.WriteHelp(out)
		}
	}
}

// helpTexts are the beginnings of help.
var helpTexts = map[string]string{
	"check":    check.Help,
	"tokenize": tokenize.Help,
	"indexer":  indexerapi.Help,
	"select":   selector.Help,
	"fetch":    fetch.Help,
	"replay":   report.Help,
	"envoy":    envoy.Help,
}
