// Command kvepp is a KV-cache-aware endpoint picker for Envoy and the Gateway API.
package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/internal/suggest"
	"kvepp/internal/useragent"
	"kvepp/serve/logs"
)

const usage = `kvepp sends each LLM request to the worker that already holds its prefix in the KV cache. It is an
external processor for Envoy and an endpoint picker for the Gateway API.

Usage:       kvepp COMMAND [flags]
Example:     kvepp serve --endpoints endpoints.yaml --model qwen=/models/qwen

           endpoints.yaml:
             endpoints:
             - name: worker-0
               address: 10.0.0.7:8000           # what Envoy dials
               kvEvents: tcp://10.0.0.7:5557    # the engine's KV events (vLLM: --kv-events-config)

Commands
`

const usageEnd = `
Help:        kvepp COMMAND --help
`

// writeUsage writes what `kvepp help` shows.
func writeUsage(out io.Writer) {
	fmt.Fprint(out, usage)
	for _, c := range commands {
		fmt.Fprintf(out, "  %-12s%s\n", c.name, c.summary)
	}
	fmt.Fprint(out, usageEnd)
}

func main() { os.Exit(start(arguments(os.Args), os.Stdin, os.Stdout, os.Stderr, os.Environ())) }

// start is main with its surroundings given: environ are entries of the form NAME=VALUE. It returns the exit status, as
// run does.
func start(args []string, stdin io.Reader, stdout, stderr io.Writer, environ []string) int {
	built := readBuild()
	useragent.Set(built.version)
	metrics.SetVersion(built.version)
	// the command reads the environment
	reads := len(args) > 0 &&
		slices.ContainsFunc(commands, func(c command) bool { return c.name == args[0] && c.flags != nil })
	if reads && !slices.ContainsFunc(args, isHelp) {
		if err := checkEnvironment(environ); err != nil {
			fmt.Fprintf(
				stderr,
				"kvepp %s: %v\n\"kvepp %s --help-all\" lists the flags with their environment variables.\n",
				args[0],
				err,
				args[0],
			)
			return 2
		}
	}
	getenv := func(name string) string {
		for _, entry := range slices.Backward(environ) {
			if value, found := strings.CutPrefix(entry, name+"="); found {
				return value
			}
		}
		return ""
	}
	if len(args) > 0 {
		switch args[0] {
		case seatCommand:
			return takeSeat(args[1:], environ, stdout, stderr, getenv)
		case sleepCommand:
			return sleep(args[1:], stderr)
		}
	}
	return run(args, stdin, stdout, stderr, getenv)
}

// isHelp reports whether an argument asks for help.
func isHelp(arg string) bool { return arg == "--help" || arg == "-h" || arg == "--"+flags.HelpAll }

// run is main with its surroundings given. It returns the exit status: 0, 1 for a failure, 2 for wrong usage.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) (status int) {
	root := &cobra.Command{Use: "kvepp", DisableFlagParsing: true, Args: cobra.ArbitraryArgs}
	root.Run = func(_ *cobra.Command, args []string) {
		status = runOther(args, stdout, stderr)
	}
	// a shell asks for completions; else each command parses its flags itself
	completing := len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd)
	for _, c := range commands {
		sub := &cobra.Command{Use: c.name, Short: c.summary, DisableFlagParsing: !completing}
		sub.Run = func(_ *cobra.Command, args []string) {
			status = runCommand(root, c.name, args, stdin, stdout, stderr, getenv)
		}
		if root.AddCommand(sub); c.name == "help" {
			root.SetHelpCommand(sub)
		}
		if completing {
			offer(sub, c)
		}
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetArgs(append([]string{}, args...)) // nil would mean the arguments of the process
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.Execute(); err != nil {
		return 2
	}
	return status
}

// runOther runs kvepp with arguments that do not begin with a command.
func runOther(args []string, stdout, stderr io.Writer) int {
	switch {
	case len(args) == 0:
		writeUsage(stderr)
		return 2
	case args[0] == "--version":
		fmt.Fprintln(stdout, version())
		return 0
	case isHelp(args[0]):
		writeUsage(stdout)
		return 0
	}
	fmt.Fprintf(stderr, "kvepp: unknown command %q%s\n\"kvepp help\" lists the commands.\n", args[0],
		suggest.DidYouMean(args[0], "", commandNames()))
	return 2
}

// runCommand runs one of commands. It returns the exit status.
func runCommand(root *cobra.Command, name string, args []string, stdin io.Reader, stdout, stderr io.Writer,
	getenv func(string) string,
) int {
	switch name {
	case "serve":
		return daemon("serve", serveFlags, parseServe, serve, args, stdout, stderr, getenv)
	case "check":
		return checkWorkers(args, stdout, stderr, getenv)
	case "tokenize":
		return runTokenizer(args, stdin, stdout, stderr, getenv)
	case "replay":
		return replayTraces(args, stdout, stderr, getenv)
	case "fetch":
		return runFetch(args, stdout, stderr, getenv)
	case "workers", "cordon", "drain", "uncordon", "ladder", "decisions", "explain":
		return runClient(name, args, stdin, stdout, stderr, getenv)
	case "envoy":
		return printEnvoy(args, stdout, stderr, getenv)
	case "indexer":
		return daemon("indexer", indexerFlags, parseIndexer, runIndexer, args, stdout, stderr, getenv)
	case "select":
		return daemon("select", selectFlags, parseSelect, runSelect, args, stdout, stderr, getenv)
	case "completion":
		return complete(root, args, stdout, stderr)
	case "version":
		fmt.Fprintln(stdout, version())
	default: // help
		writeUsage(stdout)
	}
	return 0
}

// daemon runs a command that serves until a signal ends it. It parses the options O from arguments and environment;
// declare declares them for help. It returns the exit status.
func daemon[O any](
	name string,
	declare func(*O) *pflag.FlagSet,
	parse func(*O, []string, func(string) string) error,
	run func(*O) error,
	args []string,
	stdout, stderr io.Writer,
	getenv func(string) string,
) int {
	var o O
	if err := parse(&o, args, getenv); err != nil {
		return notRun(declare(new(O)), err, helpAllHint, stdout, stderr)
	}
	if any(&o).(interface{ printsConfig(io.Writer) bool }).printsConfig(stdout) {
		return 0
	}
	signal.Ignore(syscall.SIGPIPE) // SIGPIPE would end kvepp when the reader of its log closes
	lines := logs.Start(stderr)
	defer lines.Close(2 * time.Second) // also where run panics
	any(&o).(interface{ LogTo(*logs.Writer) }).LogTo(lines)
	if err := run(&o); err != nil {
		fmt.Fprintf(lines, "kvepp %s: %v\n", name, err)
		return 1
	}
	return 0
}

// version says what was built, from the information Go puts into the binary.
func version() string {
	b := readBuild()
	return fmt.Sprintf(
		"kvepp %s commit %s %s %s/%s",
		b.version,
		b.commit,
		runtime.Version(),
		runtime.GOOS,
		runtime.GOARCH,
	)
}

// commit is set by the linker (-X main.commit=...): builds in containers and in git worktrees record none themselves.
var commit string

// release is the version of a release, set by the linker in the same way. Empty: this is none.
var release string

// build is what Go recorded when it built this binary. A field is "unknown" where Go recorded nothing.
type build struct {
	version string // of the module
	commit  string // git revision, with "-modified" behind it if the sources differed from that commit
}

// readBuild returns the build information of this binary.
func readBuild() build {
	b := build{version: "unknown", commit: "unknown"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.version = info.Main.Version
	}
	if release != "" {
		b.version = "v" + release
	}
	modified := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.commit = s.Value
		case "vcs.modified":
			modified = s.Value == "true"
		}
	}
	if modified {
		b.commit += "-modified"
	}
	if commit != "" {
		b.commit = commit
	}
	return b
}
