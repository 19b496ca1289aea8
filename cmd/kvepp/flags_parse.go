package main

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
	"kvepp/serve/client"
)

// parseArgs reads the arguments into f. Its errors say what to write instead.
func parseArgs(f *pflag.FlagSet, args []string) error {
	err := f.Parse(args)
	var (
		unknown *pflag.NotExistError
		absent  *pflag.ValueRequiredError
		invalid *pflag.InvalidValueError
	)
	switch {
	case errors.As(err, &unknown):
		return unknownFlag(f, unknown)
	case errors.As(err, &absent):
		name, _ := pflag.UnquoteUsage(absent.GetFlag())
		return fmt.Errorf(
			"--%s needs a value: --%s %s",
			absent.GetSpecifiedName(),
			absent.GetSpecifiedName(),
			strings.ToUpper(name),
		)
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), takes(invalid.GetFlag()))
	case err != nil:
		return err
	case f.Lookup(helpAllFlag).Changed:
		return errHelpAll
	}
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Changed {
			annotate(flag, setBy, "flag")
		}
	})
	return nil
}

// unknownFlag returns an error that suggests the flag that was probably meant.
func unknownFlag(f *pflag.FlagSet, err *pflag.NotExistError) error {
	name, dashes := err.GetSpecifiedName(), "--"
	if short := err.GetSpecifiedShortnames(); short != "" {
		name, _, _ = strings.Cut(short, "=")
		dashes = "-"
	}
	if f.Lookup(name) != nil { // written with one dash
		return fmt.Errorf("unknown flag -%s: flags begin with two dashes, --%s", name, name)
	}
	if err := absentFlag(name); err != nil {
		return err
	}
	if others := commandsWith(name); len(others) > 0 {
		return fmt.Errorf(
			"unknown flag %s%s: it is a flag of kvepp %s",
			dashes,
			name,
			strings.Join(others, " and kvepp "),
		)
	}
	var known []string
	f.VisitAll(func(flag *pflag.Flag) { known = append(known, flag.Name) })
	return fmt.Errorf("unknown flag %s%s%s", dashes, name, suggest.DidYouMean(name, "--", known))
}

// takes describes the values that a flag takes, with an example.
func takes(flag *pflag.Flag) string {
	example := func(otherwise string) string {
		switch flag.DefValue {
		case "", "0", "0s", "[]":
			return otherwise
		}
		return flag.DefValue
	}
	switch flag.Value.Type() {
	case "bool":
		return "must be true or false"
	case "duration":
		good := example("2s")
		if strings.HasSuffix(good, "m0s") { // Go prints 5m as 5m0s
			good = strings.TrimSuffix(good, "0s")
		}
		return "must be a duration with a unit (ms, s, m or h), for example " + good
	case "uint16":
		return "must be a whole number from 0 to 65535, for example " + example("9002")
	case "int", "int64":
		return "must be a whole number, for example " + example("16")
	case "uint32", "uint64":
		return "must be a whole number of at least 0, for example " + example("16")
	case "float64":
		return "must be a number, for example " + example("0.5")
	case "uint":
		return "must be a whole number of at least 0, for example 4096, or None"
	case "float":
		return "must be a number, for example 0.5, or None"
	case (negated{}).Type():
		return "must be true or false"
	case "intSlice":
		return "must be whole numbers separated by commas, for example 8000,8001"
	}
	return "must be a list separated by commas, for example a,b"
}

// durations returns an error for the first flag whose duration is negative, or 0 where 0 is not allowed.
func durations(flags ...durationFlag) error {
	for _, f := range flags {
		switch {
		case f.value < 0 && f.zero:
			return fmt.Errorf("--%s %v: may not be negative; give a duration such as 2s, or 0", f.name, f.value)
		case f.value < 0 || f.value == 0 && !f.zero:
			return fmt.Errorf("--%s %v: must be above 0, for example 2s", f.name, f.value)
		}
	}
	return nil
}

// durationFlag is a duration flag and its value. zero says whether 0 is allowed.
type durationFlag struct {
	name  string
	value time.Duration
	zero  bool
}

// oneOf returns an error unless value is one of the known values of the flag.
func oneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	last := len(known) - 1
	return fmt.Errorf(
		"--%s %q: must be %s or %s%s",
		flag,
		value,
		strings.Join(known[:last], ", "),
		known[last],
		suggest.DidYouMean(value, "", known),
	)
}

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
			func() *pflag.FlagSet { return fetchFlags(new(fetchOptions)) }},
		{"replay", "predict what a setting of the router does to recorded or synthetic traffic", replayPrefix,
			func() *pflag.FlagSet { return replayFlags(new(replayOptions)) }},
		{"envoy", "print an Envoy configuration for an endpoints file", "",
			func() *pflag.FlagSet { return envoyFlags(new(envoyOptions)) }},
		{"size", "print the CPU, memory and replicas that a load needs", sizePrefix,
			func() *pflag.FlagSet { return sizeFlags(new(sizeOptions)) }},
		{"workers", "list the endpoints of a running kvepp, and how many requests run on each", "",
			clientCommand("workers")},
		{"cordon", "send an endpoint no new requests", "", clientCommand("cordon")},
		{"drain", "cordon an endpoint, and wait until no request runs on it", "", clientCommand("drain")},
		{"uncordon", "send an endpoint requests again", "", clientCommand("uncordon")},
		{"decisions", "show the latest decisions of a running kvepp, or follow them", "",
			clientCommand("decisions")},
		{"top", "show the workers and the latest requests of a running kvepp in the terminal", "",
			clientCommand("top")},
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
	"KVEPP_BENCH_OUT", "KVEPP_BENCH_REPLICAS",
	"KVEPP_CACHE", "KVEPP_CHARTS", "KVEPP_CRDS", "KVEPP_ENGINES", "KVEPP_ENGINE_VERSIONS", "KVEPP_IMAGE_ENVOY",
	"KVEPP_KIND", "KVEPP_KIND_CONFIG", "KVEPP_KIND_IMAGE", "KVEPP_KUBE", "KVEPP_MANIFEST_TOOLS",
	"KVEPP_MODELS", "KVEPP_ORACLES", "KVEPP_PARITY", "KVEPP_PORTS_OF_ANOTHER", "KVEPP_RELEASE",
	"KVEPP_RELEASE_AGAIN", "KVEPP_ROOTFS", "KVEPP_TEMPLATES", "KVEPP_TIMES", "KVEPP_TOOLS", "KVEPP_VLLM",
	"KVEPP_VLLM_MEDIA", "KVEPP_VLLM_MISTRAL",
}

// checkEnvironment returns an error that names each variable KVEPP_* in environ (NAME=VALUE each) that belongs to no
// flag of any command, to report misspelt settings. It ignores empty variables, and those that Kubernetes sets for
// Services.
func checkEnvironment(environ []string) error {
	values := map[string]string{}
	var ours []string
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if values[name] = value; value != "" && strings.HasPrefix(name, "KVEPP_") {
			ours = append(ours, name)
		}
	}
	getenv := func(name string) string { return values[name] }
	known, negations := slices.Clone(toolVariables), map[string]string{}
	for _, c := range commands {
		if c.flags == nil {
			continue
		}
		c.flags().VisitAll(func(flag *pflag.Flag) {
			name := kveppEnv(c.prefix + flag.Name)
			switch positive, isNegation := strings.CutPrefix(flag.Name, "no-"); {
			case !flag.Hidden:
				known = append(known, name)
			case isNegation:
				negations[name] = kveppEnv(c.prefix + positive)
			}
		})
	}
	slices.Sort(known)
	slices.Sort(ours)
	var errs []error
	for _, name := range slices.Compact(ours) {
		if _, found := slices.BinarySearch(known, name); found || isServiceVariable(name, getenv) {
			continue
		}
		if positive := negations[name]; positive != "" {
			errs = append(errs, fmt.Errorf("unknown environment variable %s: write %s=false", name, positive))
			continue
		}
		flag := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, "KVEPP_"), "_", "-"))
		if err := absentFlag(strings.TrimPrefix(flag, selectPrefix)); err != nil {
			errs = append(errs, fmt.Errorf("unknown environment variable %s: %w", name, err))
			continue
		}
		nearest := suggest.DidYouMean(strings.TrimPrefix(name, "KVEPP_"), "KVEPP_", withoutPrefix(known))
		if nearest == "" {
			nearest = ": no flag of kvepp has this name; correct or unset it"
		}
		errs = append(errs, fmt.Errorf("unknown environment variable %s%s", name, nearest))
	}
	return errors.Join(errs...)
}

// withoutPrefix returns the names without KVEPP_: the common prefix would make all names look similar.
func withoutPrefix(names []string) []string {
	short := make([]string, len(names))
	for i, name := range names {
		short[i] = strings.TrimPrefix(name, "KVEPP_")
	}
	return short
}

// serviceSuffix is what Kubernetes appends to the name of a Service in environment variables of containers. Source:
// kubernetes, pkg/kubelet/envvars.
var serviceSuffix = regexp.MustCompile(
	`^_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`,
)

// serviceURL matches the value of NAME_PORT: the address of the Service.
var serviceURL = regexp.MustCompile(`^(tcp|udp|sctp)://.+:[0-9]+$`)

// isServiceVariable reports whether Kubernetes set a variable for a Service whose name begins with kvepp. A Service
// kvepp sets KVEPP_SERVICE_HOST, KVEPP_SERVICE_PORT, KVEPP_PORT and KVEPP_PORT_9002_TCP; a Service kvepp-epp sets
// KVEPP_EPP_SERVICE_HOST. Kubernetes sets all variables of a Service together, so SERVICE_HOST distinguishes them from
// a misspelt setting.
func isServiceVariable(name string, getenv func(string) string) bool {
	for i := range name {
		if name[i] == '_' && serviceSuffix.MatchString(name[i:]) && getenv(name[:i]+"_SERVICE_HOST") != "" &&
			getenv(name[:i]+"_SERVICE_PORT") != "" {
			return true
		}
	}
	return false
}

// isServiceURL reports whether a flag's variable holds the address of a Service instead of a setting: a Service
// kvepp-metrics sets KVEPP_METRICS_PORT, which is also the variable of --metrics-port.
func isServiceURL(name, value string, getenv func(string) string) bool {
	return serviceURL.MatchString(value) && isServiceVariable(name, getenv)
}

// dynamoEnv maps flags to the environment variables of the same settings of Dynamo's router. Some differ from the flag
// in capitals. Source: dynamo-kv-router 1.6.1, scheduling configuration; kv_router_args.
var dynamoEnv = map[string]string{
	"kv-cache-block-size":                  "DYN_KV_CACHE_BLOCK_SIZE",
	"model-name":                           "DYN_MODEL_NAME",
	"secure-serving":                       "DYN_SECURE_SERVING",
	"metrics-port":                         "DYN_EPP_METRICS_PORT",
	"dynamo-namespace":                     "DYN_NAMESPACE",
	"event-plane":                          "DYN_EVENT_PLANE",
	"nats-server":                          "NATS_SERVER",
	"router-kv-events":                     "DYN_ROUTER_USE_KV_EVENTS",
	"router-ttl-secs":                      "DYN_ROUTER_TTL_SECS",
	"router-max-tree-size":                 "DYN_ROUTER_MAX_TREE_SIZE",
	"router-prune-target-ratio":            "DYN_ROUTER_PRUNE_TARGET_RATIO",
	"router-approximate-cache-policy":      "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
	"router-predicted-ttl-secs":            "DYN_ROUTER_PREDICTED_TTL_SECS",
	"router-event-threads":                 "DYN_ROUTER_EVENT_THREADS",
	"router-durable-kv-events":             "DYN_ROUTER_DURABLE_KV_EVENTS",
	"router-snapshot-threshold":            "DYN_ROUTER_SNAPSHOT_THRESHOLD",
	"router-reset-states":                  "DYN_ROUTER_RESET_STATES",
	"use-remote-indexer":                   "DYN_USE_REMOTE_INDEXER",
	"router-mode":                          "DYN_ROUTER_MODE",
	"router-min-initial-workers":           "DYN_ROUTER_MIN_INITIAL_WORKERS",
	"encoder-cuda-to-cpu-ratio":            "DYN_ENCODER_CUDA_TO_CPU_RATIO",
	"load-aware":                           "DYN_ROUTER_LOAD_AWARE",
	"router-host-cache-hit-weight":         "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
	"router-disk-cache-hit-weight":         "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
	"shared-cache-type":                    "DYN_SHARED_CACHE_TYPE",
	"shared-cache-multiplier":              "DYN_SHARED_CACHE_MULTIPLIER",
	"router-track-output-blocks":           "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
	"router-prefill-load-model":            "DYN_ROUTER_PREFILL_LOAD_MODEL",
	"router-replica-sync":                  "DYN_ROUTER_REPLICA_SYNC",
	"serve-indexer":                        "DYN_SERVE_INDEXER",
	"enable-session-prefix-index":          "DYN_ENABLE_SESSION_PREFIX_INDEX",
	"router-conditional-disagg":            "DYN_ROUTER_CONDITIONAL_DISAGG",
	"router-conditional-disagg-config":     "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
	"router-worker-selection-policy":       "DYN_ROUTER_WORKER_SELECTION_POLICY",
	"router-prefill-policy":                "DYN_ROUTER_PREFILL_POLICY",
	"router-decode-policy":                 "DYN_ROUTER_DECODE_POLICY",
	"router-tracking-hash":                 "DYN_ROUTER_TRACKING_HASH",
	"router-tracking-key-file":             "DYN_ROUTER_TRACKING_KEY_FILE",
	"router-tracking-key-id":               "DYN_ROUTER_TRACKING_KEY_ID",
	"kv-overlap-score-weight":              "DYN_OVERLAP_SCORE_WEIGHT",
	"system-port":                          "DYN_SYSTEM_PORT",
	"router-kv-overlap-score-credit":       "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
	"router-kv-overlap-score-credit-decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
	"router-kv-overlap-score-weight":       "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
	"router-prefill-load-scale":            "DYN_ROUTER_PREFILL_LOAD_SCALE",
	"router-decode-active-request-weight":  "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
	"router-temperature":                   "DYN_ROUTER_TEMPERATURE",
	"router-session-affinity-ttl-secs":     "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
	"router-session-affinity-mode":         "DYN_ROUTER_SESSION_AFFINITY_MODE",
	"router-track-active-blocks":           "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
	"router-track-prefill-tokens":          "DYN_ROUTER_TRACK_PREFILL_TOKENS",
	"router-assume-kv-reuse":               "DYN_ROUTER_ASSUME_KV_REUSE",
	"active-request-expiry-secs":           "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
	"active-decode-blocks-threshold":       "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
	"active-prefill-tokens-threshold":      "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
	"active-prefill-tokens-threshold-frac": "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
	"router-queue-threshold":               "DYN_ROUTER_QUEUE_THRESHOLD",
	"router-queue-policy":                  "DYN_ROUTER_QUEUE_POLICY",
	"router-policy-config":                 "DYN_ROUTER_POLICY_CONFIG",
	"shed-retry-after":                     "DYN_EPP_SHED_RETRY_AFTER_SECS",
	"overload-status-code":                 "DYN_HTTP_OVERLOAD_STATUS_CODE",
	"pool-name":                            "DYN_EPP_INFERENCE_POOL_NAME",
	"pool-namespace":                       "POD_NAMESPACE",
	"kv-events-port":                       "DYN_EPP_KV_EVENT_PORT",
	"kv-replay-port":                       "DYN_EPP_KV_EVENT_REPLAY_PORT",
}

// kveppEnv is kvepp's own name for a flag's environment variable.
func kveppEnv(flag string) string {
	return "KVEPP_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// newFlags returns the flag set of a command. Help lists the flags in the order of their declaration.
func newFlags(command string) *pflag.FlagSet {
	f := pflag.NewFlagSet(command, pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(io.Discard) // the caller prints errors, once
	f.Bool(helpAllFlag, false, "")
	f.Lookup(helpAllFlag).Hidden = true
	return f
}

// helpAllFlag asks for help with all flags. errHelpAll is what parsing then returns; it is a pflag.ErrHelp.
const helpAllFlag = "help-all"

var errHelpAll = fmt.Errorf("all flags: %w", pflag.ErrHelp)

// negatable declares --no-X for each flag --X, as Dynamo does.
func negatable(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f.VarPF(negated{f.Lookup(name)}, "no-"+name, "", "the same as --"+name+"=false").NoOptDefVal = "true"
	}
}

// documentEnvironment records the names of each flag's environment variables. prefix precedes the flag's name in a
// variable.
func documentEnvironment(f *pflag.FlagSet, prefix string) {
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.Type() == (negated{}).Type() {
			flag.Hidden = true
		}
		if flag.Hidden {
			return
		}
		variables := []string{kveppEnv(prefix + flag.Name)}
		if dyn := dynamoName(prefix, flag.Name); dyn != "" {
			variables = append(variables, dyn)
		}
		annotate(flag, inVariables, variables...)
	})
}

// dynamoName returns Dynamo's environment variable for a flag; "" if there is none. Dynamo's selection service uses the
// variables of its router.
func dynamoName(prefix, flag string) string {
	if prefix == indexerPrefix {
		return ""
	}
	return dynamoEnv[flag]
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

func (n negated) String() string { return "" }

func (n negated) Type() string { return "negated" }

// fromEnvironment sets the flags that were not given on the command line from the environment. documentEnvironment must
// have named the variables.
func fromEnvironment(f *pflag.FlagSet, getenv func(string) string) error {
	return errors.Join(fromVariables(f, ownVariable, getenv), fromVariables(f, dynamoVariable, getenv))
}

// Indexes into the annotation inVariables.
const (
	ownVariable    = 0
	dynamoVariable = 1
)

// fromVariables sets the flags that have no value yet from one of their variables.
func fromVariables(f *pflag.FlagSet, which int, getenv func(string) string) error {
	var errs []error
	f.VisitAll(func(flag *pflag.Flag) {
		variables := flag.Annotations[inVariables]
		if len(variables) <= which || flag.Changed || aliased(flag).Changed {
			return
		}
		name := variables[which]
		value := getenv(name)
		if value == "" || isServiceURL(name, value, getenv) {
			return
		}
		values := []string{value}
		if flag.Value.Type() == "stringArray" {
			values = strings.Split(value, ",")
		}
		for _, v := range values {
			if err := flag.Value.Set(v); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s %q: %s", name, value, takes(flag)))
			}
		}
		flag.Changed = true
		annotate(aliased(flag), setBy, name)
	})
	return errors.Join(errs...)
}

// An alias is an older name of a flag.
type alias struct {
	of *pflag.Flag
}

func (a alias) Set(s string) error {
	if err := a.of.Value.Set(s); err != nil {
		return err
	}
	a.of.Changed = true
	return nil
}

func (a alias) String() string { return "" }

func (a alias) Type() string { return a.of.Value.Type() }

// aliased returns the flag that a flag is an older name of, or the flag itself.
func aliased(flag *pflag.Flag) *pflag.Flag {
	if a, ok := flag.Value.(alias); ok {
		return a.of
	}
	return flag
}

// addAlias declares an older name of a flag; more is added to its help.
func addAlias(f *pflag.FlagSet, name, of, more string) {
	target := f.Lookup(of)
	f.VarPF(alias{target}, name, "", "older name of --"+of+more).NoOptDefVal = target.NoOptDefVal
	if target.Value.Type() == "bool" {
		f.VarPF(negated{f.Lookup(name)}, "no-"+name, "", "").NoOptDefVal = "true"
	}
}

// addAliases declares the older names of flags that other functions have declared.
func addAliases(f *pflag.FlagSet) {
	addAlias(f, "kv-overlap-score-weight", "router-kv-overlap-score-weight", "")
	addAlias(f, "kv-events", "router-kv-events", "")
	addAlias(f, "durable-kv-events", "router-durable-kv-events", "")
	addAlias(f, "track-active-blocks", "router-track-active-blocks", "")
	addAlias(f, "track-output-blocks", "router-track-output-blocks", "")
	addAlias(f, "assume-kv-reuse", "router-assume-kv-reuse", "")
	addAlias(f, "router-block-size", "kv-cache-block-size", "")
	addAlias(f, "system-port", "metrics-port", ", by which Dynamo's components take it")
}

// optionalValue is a flag whose value may be absent, or None, as Dynamo's documents write it.
type optionalValue[T any] struct {
	value **T
	kind  string // for help
	parse func(string) (T, error)
}

func optional[T any](value **T, kind string, parse func(string) (T, error)) optionalValue[T] {
	return optionalValue[T]{value, kind, parse}
}

func (o optionalValue[T]) Set(s string) error {
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

func (o optionalValue[T]) String() string {
	if o.value == nil || *o.value == nil {
		return ""
	}
	return fmt.Sprint(**o.value)
}

func (o optionalValue[T]) Type() string { return o.kind }

func parseFloat(s string) (float64, error) { return strconv.ParseFloat(s, 64) }

func parseUint(s string) (uint64, error) { return strconv.ParseUint(s, 10, 64) }

// parse reads arguments, which must all be flags, and then sets the remaining flags from kvepp's variables, from the
// file at path (if it is not empty then), and from Dynamo's variables.
func parse(f *pflag.FlagSet, args []string, path *string, getenv func(string) string) error {
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
	err := fromVariables(f, ownVariable, getenv)
	if *path != "" {
		err = errors.Join(err, fromFile(f, *path))
	}
	return errors.Join(err, fromVariables(f, dynamoVariable, getenv))
}
