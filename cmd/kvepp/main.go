// Command kvepp is a KV-cache-aware endpoint picker for Envoy and the Gateway API.
package main

import (
	"errors"
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

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
)

const help = `kvepp sends each LLM request to the worker that already holds its prefix in the KV cache.

It is an external processor for Envoy (endpoint-picker protocol): it tokenizes and hashes the prompt as the engine
will, looks up which worker holds which blocks, prices every worker with Dynamo's cost function, and answers with the
endpoint and worker headers.

Usage:
  kvepp serve --endpoints FILE --model NAME=DIR [flags]   run the endpoint picker
  kvepp serve --help                                      all flags, each with its environment variables
  kvepp check --endpoints FILE --model NAME=DIR [flags]   tests the engines' setup; prints each problem and its fix
  kvepp tokenize --model-path DIR < body.json             a request's prompt, token ids and block hashes
  kvepp indexer --port 8090                               the index alone, in place of python -m dynamo.indexer
  kvepp select --port 8092                                choosing and booking alone, in place of python -m dynamo.select_service
  kvepp workers                                           the endpoints of a running kvepp: whether they get requests, how many run
  kvepp drain NAME                                        no new requests for an endpoint, and wait until its running ones have ended
  kvepp cordon NAME, kvepp uncordon NAME                  no new requests; requests again
  kvepp fetch --hub URL --to DIR FOLDER=REPOSITORY        tokenizers from a model hub, without weights
  kvepp version                                           what was built

A first run:
  kvepp serve --endpoints endpoints.yaml --model qwen=/models/qwen

endpoints.yaml:
  endpoints:
  - name: worker-0
    address: 10.0.0.7:8000             # what Envoy dials
    kvEvents: tcp://10.0.0.7:5557      # the engine's KV events (vLLM: --kv-events-config)
`

const serveHelp = `kvepp serve runs the endpoint picker.

Flags, with their environment variables. Precedence: flag, KVEPP_<FLAG>, Dynamo's variable.
`

func main() { os.Exit(start(os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ())) }

// commandNames are the commands that a user may have meant by a mistyped one.
var commandNames = []string{
	"serve",
	"check",
	"tokenize",
	"indexer",
	"select",
	"fetch",
	"workers",
	"cordon",
	"drain",
	"uncordon",
	"version",
	"help",
}

// start is main with its surroundings given: environ are entries of the form NAME=VALUE. It returns the exit status, as
// run does.
func start(args []string, stdin io.Reader, stdout, stderr io.Writer, environ []string) int {
	// the command reads the environment
	reads := len(args) > 0 && slices.ContainsFunc(commands, func(c command) bool { return c.name == args[0] })
	if reads && !slices.Contains(args, "--help") && !slices.Contains(args, "-h") {
		if err := checkEnvironment(environ); err != nil {
			fmt.Fprintf(
				stderr,
				"kvepp %s: %v\n\"kvepp %s --help\" lists the flags with their environment variables.\n",
				args[0],
				err,
				args[0],
			)
			return 2
		}
	}
	return run(args, stdin, stdout, stderr, func(name string) string {
		for _, entry := range slices.Backward(environ) {
			if value, found := strings.CutPrefix(entry, name+"="); found {
				return value
			}
		}
		return ""
	})
}

// run is main with its surroundings given. It returns the exit status: 0, 1 for a failure, 2 for wrong usage.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, help)
		return 2
	}
	switch args[0] {
	case "serve":
		return daemon("serve", serveHelp, serveFlags, parseServe, serve, args[1:], stdout, stderr, getenv)
	case "check":
		return checkWorkers(args[1:], stdout, stderr, getenv)
	case "tokenize":
		return tokenize(args[1:], stdin, stdout, stderr, getenv)
	case "fetch":
		return fetch(args[1:], stdout, stderr, getenv)
	case "workers", "cordon", "drain", "uncordon":
		return runAdmin(args[0], args[1:], stdout, stderr, getenv)
	case "indexer":
		return daemon("indexer", indexerHelp, indexerFlags, parseIndexer, runIndexer, args[1:], stdout, stderr, getenv)
	case "select":
		return daemon("select", selectHelp, selectFlags, parseSelect, runSelect, args[1:], stdout, stderr, getenv)
	case "version", "--version":
		fmt.Fprintln(stdout, version())
		return 0
	case "help", "--help", "-h":
		fmt.Fprint(stdout, help)
		return 0
	}
	fmt.Fprintf(
		stderr,
		"kvepp: unknown command %q%s\n\"kvepp help\" lists the commands.\n",
		args[0],
		suggest.DidYouMean(args[0], "", commandNames),
	)
	return 2
}

// daemon runs a command that serves until a signal ends it. It parses the options O from arguments and environment;
// flags declares them for help. It returns the exit status.
func daemon[O any](
	name, help string,
	flags func(*O) *pflag.FlagSet,
	parse func(*O, []string, func(string) string) error,
	run func(*O) error,
	args []string,
	stdout, stderr io.Writer,
	getenv func(string) string,
) int {
	var o O
	switch err := parse(&o, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		fmt.Fprint(stdout, help, flags(new(O)).FlagUsagesWrapped(120))
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp %s: %v\n\"kvepp %s --help\" lists the flags.\n", name, err, name)
		return 2
	}
	signal.Ignore(syscall.SIGPIPE) // SIGPIPE would end kvepp when the reader of its log closes
	lines := &lineWriter{out: stderr}
	lines.start()
	defer lines.Close(2 * time.Second) // also where run panics
	any(&o).(interface{ logTo(*lineWriter) }).logTo(lines)
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
