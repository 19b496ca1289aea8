package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// publicTracking is the tracking hash that needs no key. Source: dynamo-kv-router 1.6.1.
const publicTracking = "public-xxh3-v1"

// A compatFlag is a flag of another router that kvepp declares for command lines and environments written for that
// router. It changes nothing in kvepp: kvepp refuses it, ignores it with a warning, or accepts it silently because
// kvepp always does what the flag asks for.
type compatFlag struct {
	commands  []string // the kvepp commands that have the flag
	from      origin
	name      string
	byDefault any // false, "", 0 or 0.0; also the type of the flag's values
	help      string

	// A flag counts as set if its value is not the default; with whenGiven, if it is given at all.
	whenGiven bool
	refused   string // what the error says if the flag is set; "": the flag is not refused
	ignored   string // what the warning says if the flag is set; "": there is no warning

	check func(value string) error // nil: every value of the type is valid
}

// origin is the program that has a compatFlag. Dynamo's programs have --no-NAME beside each boolean flag.
type origin int

const (
	ofDynamo origin = iota
	ofGAIE          // the endpoint picker of the Gateway API Inference Extension, and llm-d's
)

var (
	onServe = []string{"serve"}
	onBoth  = []string{"serve", "select"}
	onHTTP  = []string{"indexer", "select"}
)

const (
	jetStream = "kvepp does not read KV events from JetStream: it asks the engines for past events at their kvReplay " +
		"address (docs/endpoints-file.md); leave out --router-durable-kv-events, --router-snapshot-threshold and " +
		"--router-reset-states"
	conditionalDisagg = "where there are prefill workers kvepp names one for every request, because Dynamo's " +
		"frontends in direct mode answer 500 to one without; leave out --router-conditional-disagg and " +
		"--router-conditional-disagg-config (an aggregated worker still serves a request alone where that costs less)"
	noTrackingKey = "kvepp has no tracking hash with a key; leave them out: --router-tracking-key-file and " +
		"--router-tracking-key-id"
	noPluginConfig = "kvepp reads no EndpointPickerConfig; leave it out. In place of scorers it has Dynamo's cost " +
		"function (--router-kv-overlap-score-credit and others), in place of flow control --router-queue-threshold " +
		"and --router-policy-config"
	noMetricsTLS  = "kvepp serves metrics without TLS; leave it out, and guard metrics with --metrics-token-file"
	noReplicaSync = "kvepp select does not share loads with other replicas; leave it out"
)

// compatFlags are all flags whose only effect is to be refused or ignored. Sources: ai-dynamo 1.6.1, kv_router_args and
// ais_perf_args; GAIE v1.6.0; llm-d-router 0.10.
var compatFlags = []compatFlag{
	// KV events in JetStream, and an index in another process.
	{commands: onServe, from: ofDynamo, name: "router-durable-kv-events", byDefault: false,
		help: "refused: kvepp does not read KV events from JetStream", refused: jetStream},
	{commands: onServe, from: ofDynamo, name: "router-snapshot-threshold", byDefault: 0, whenGiven: true,
		help: "`MESSAGES`; refused: belongs to JetStream", refused: jetStream},
	{commands: onServe, from: ofDynamo, name: "router-reset-states", byDefault: false,
		help: "refused: belongs to JetStream", refused: jetStream},
	{commands: onServe, from: ofDynamo, name: "use-remote-indexer", byDefault: false,
		help:    "refused: kvepp does not query another process's index",
		refused: "kvepp keeps its own index and does not query another process's; leave this flag out"},
	{commands: onServe, from: ofDynamo, name: "serve-indexer", byDefault: false,
		help:    "no effect: the index answers at --admin-address",
		ignored: "the index answers at --admin-address"},

	// A cache that workers share.
	{commands: onServe, from: ofDynamo, name: "shared-cache-type", byDefault: "none",
		help: "`TYPE`: none. kvepp refuses hicache: it does not query a cache that workers share (SGLang's HiCache " +
			"in Mooncake). It knows blocks in a worker's host memory, on its disk and in external storage from KV " +
			"events",
		refused: "kvepp does not query a cache that workers share; it knows blocks in host memory, on disk and in " +
			"external storage where the engine's events name them. Leave the flag out"},
	{commands: onServe, from: ofDynamo, name: "shared-cache-multiplier", byDefault: 0.0, whenGiven: true,
		help: "worth of a block that only a shared cache holds, 0 to 1; no effect, because kvepp queries none. A " +
			"request's shared_cache_multiplier has no effect either",
		ignored: "kvepp does not query a shared cache",
		check: func(value string) error {
			if x, err := strconv.ParseFloat(value, 64); err != nil || !(x >= 0 && x <= 1) {
				return fmt.Errorf("--shared-cache-multiplier %s: must be from 0 to 1", value)
			}
			return nil
		}},

	// Disaggregation.
	{commands: onServe, from: ofDynamo, name: "router-conditional-disagg", byDefault: false,
		help: "refused: where there are prefill workers, every request gets one. Dynamo's frontends in direct mode " +
			"answer 500 to a request without one",
		refused: conditionalDisagg},
	{commands: onServe, from: ofDynamo, name: "router-conditional-disagg-config", byDefault: "",
		help: "`JSON`; refused, as --router-conditional-disagg", refused: conditionalDisagg},

	// What replicas tell each other.
	{commands: onServe, from: ofDynamo, name: "router-replica-sync", byDefault: false,
		help:    "no effect: replicas of kvepp share their load by --replica-peers or --replica-service",
		ignored: "replicas of kvepp share their load and sessions by --replica-peers or --replica-service"},
	{commands: onServe, from: ofDynamo, name: "enable-session-prefix-index", byDefault: false,
		help:    "no effect: an index that decides nothing in Dynamo either",
		ignored: "kvepp has no index of sessions' prefixes; Dynamo has one, and decides nothing by it"},
	{commands: onBoth, from: ofDynamo, name: "router-tracking-hash", byDefault: publicTracking,
		help: "`HASH` that identifies blocks in bookings; only the default",
		refused: "must be " + publicTracking +
			"; kvepp sends its bookings to no other process, so no key needs to hide them"},
	{commands: onBoth, from: ofDynamo, name: "router-tracking-key-file", byDefault: "",
		help: "`FILE`; refused: belongs to another hash", refused: noTrackingKey},
	{commands: onBoth, from: ofDynamo, name: "router-tracking-key-id", byDefault: "",
		help: "`ID`; refused: belongs to another hash", refused: noTrackingKey},
	{commands: onHTTP, from: ofDynamo, name: "threads", byDefault: 4,
		help: "no effect; accepted for command lines written for Dynamo's program. kvepp applies each worker's " +
			"events beside the others'"},

	// Flags of the endpoint pickers of the Gateway API Inference Extension and of llm-d.
	{commands: onServe, from: ofGAIE, name: "enable-cert-reload", byDefault: true,
		help: "accepted: kvepp always reads certificates again when they change"},
	{commands: onServe, from: ofGAIE, name: "health-checking", byDefault: true,
		help: "accepted: both ports always answer gRPC health checks"},
	{commands: onServe, from: ofGAIE, name: "grpc-max-recv-msg-size", byDefault: 0,
		help: "accepted: a message may have as many `BYTES` as --max-parse-bytes needs"},
	{commands: onServe, from: ofGAIE, name: "emit-endpoint-scores", byDefault: false,
		help: "refused: --decision-headers shows every candidate's cost",
		refused: "kvepp shows costs in response headers (--decision-headers), at /debug/decisions and in spans, not " +
			"in metadata; leave it out"},
}

// absentFlags are flags of other routers that kvepp does not declare, with what the error says. None has a variable in
// Dynamo, and no value of them asks for what kvepp does. Sources: as for compatFlags.
var absentFlags = map[string]string{
	"config-file":            noPluginConfig,
	"config-text":            noPluginConfig,
	"metrics-cert-dir":       noMetricsTLS,
	"metrics-client-ca-file": noMetricsTLS,
	"replica-sync-port":      noReplicaSync,
	"replica-sync-peers":     noReplicaSync,
	"indexer-peers": "workers of kvepp select register after its start; give them a replay_endpoint, at which kvepp " +
		"reads what they hold; leave it out",
}

// absentFlag returns an error if a name is that of an absent flag, or of the performance models aic and ais of Dynamo.
func absentFlag(name string) error {
	why := absentFlags[name]
	if strings.HasPrefix(name, "aic-") || strings.HasPrefix(name, "ais-") {
		why = "belongs to a model of Dynamo that kvepp does not run; leave it out. --router-prefill-load-model aic " +
			"and ais are treated as linear (docs/migration/dynamo.md)"
	}
	if why == "" {
		return nil
	}
	return errors.New(why)
}

// addCompatFlags declares the compatFlags of a command.
func addCompatFlags(f *pflag.FlagSet, command string) {
	for _, c := range compatFlagsOf(command) {
		switch value := c.byDefault.(type) {
		case bool:
			f.Bool(c.name, value, c.help)
			if c.from == ofDynamo {
				negatable(f, c.name)
			}
		case string:
			f.String(c.name, value, c.help)
		case int:
			f.Int(c.name, value, c.help)
		case float64:
			f.Float64(c.name, value, c.help)
		}
	}
	section(f, flags.OtherRouters)
}

func compatFlagsOf(command string) (found []compatFlag) {
	for _, c := range compatFlags {
		for _, name := range c.commands {
			if name == command {
				found = append(found, c)
			}
		}
	}
	return found
}

// compatFlagNamed returns the compatFlag of a name, which must exist.
func compatFlagNamed(name string) *compatFlag {
	return &compatFlags[slices.IndexFunc(compatFlags, func(c compatFlag) bool { return c.name == name })]
}

// isSet reports whether the flag counts as set in f.
func (c *compatFlag) isSet(f *pflag.FlagSet) bool {
	flag := f.Lookup(c.name)
	return flag.Value.String() != flag.DefValue || c.whenGiven && flag.Changed
}

// checkCompatFlags returns an error for the first compatFlag of a command that is set in f and that kvepp refuses.
func checkCompatFlags(f *pflag.FlagSet, command string) error {
	for _, c := range compatFlagsOf(command) {
		if !c.isSet(f) {
			continue
		}
		value := f.Lookup(c.name).Value.String()
		if c.check != nil {
			if err := c.check(value); err != nil {
				return err
			}
		}
		if c.refused == "" {
			continue
		}
		if byDefault, ok := c.byDefault.(string); ok && byDefault != "" { // the value is a word, not a file or a text
			return fmt.Errorf("--%s %q: %s", c.name, value, c.refused)
		}
		return fmt.Errorf("--%s: %s", c.name, c.refused)
	}
	return nil
}

// ignoredCompatFlags returns a line for each compatFlag of a command that is set in f and that kvepp ignores.
func ignoredCompatFlags(f *pflag.FlagSet, command string) (lines []string) {
	for _, c := range compatFlagsOf(command) {
		if c.ignored != "" && c.isSet(f) {
			lines = append(lines, "--"+c.name+": "+c.ignored)
		}
	}
	return lines
}
