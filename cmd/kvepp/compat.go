package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

const (
	seeDynamo = " (docs/migration/dynamo.md)"
	seeLLMD   = " (docs/migration/llm-d.md)"

	jetStream = "kvepp does not read KV events from JetStream: it asks the engines for past events at their kvReplay " +
		"address (docs/endpoints-file.md); leave it out" + seeDynamo
	overlapWeight = "write --router-prefill-load-scale in its place; for 0 also --router-kv-overlap-score-credit 0" +
		seeDynamo
	trackingKey = "kvepp sends its bookings to no other process, so no key needs to hide them; leave it out" +
		seeDynamo
	pluginConfig = "kvepp serve has its own flags; start kvepp without a command, or as /app/epp, to give it the " +
		"flags and the EndpointPickerConfig of llm-d's picker" + seeLLMD
	metricsTLS = "kvepp serves metrics without TLS; leave it out, and guard metrics with --metrics-token-file" +
		seeLLMD
	replicaSync = "kvepp select does not share loads with other replicas; leave it out"
)

// absentFlags are flags of other routers and of earlier versions that kvepp does not have, with what to do. Sources:
// ai-dynamo 1.6.1, kv_router_args; GAIE v1.6.0; llm-d-router 0.10.
var absentFlags = map[string]string{
	"router-durable-kv-events":  jetStream,
	"durable-kv-events":         jetStream,
	"router-snapshot-threshold": jetStream,
	"router-reset-states":       jetStream,
	"use-remote-indexer":        "kvepp does not query another process's index; leave it out" + seeDynamo,
	"shared-cache-type": "kvepp does not query a cache that workers share; it knows blocks in host memory, on disk " +
		"and in external storage where the engine's events name them. Leave it out" + seeDynamo,
	"router-tracking-hash":           trackingKey,
	"router-tracking-key-file":       trackingKey,
	"router-tracking-key-id":         trackingKey,
	"router-kv-overlap-score-weight": overlapWeight,

	"kv-overlap-score-weight": overlapWeight,
	"kv-events":               "write --router-kv-events",
	"track-active-blocks":     "write --router-track-active-blocks",
	"track-output-blocks":     "write --router-track-output-blocks",
	"assume-kv-reuse":         "write --router-assume-kv-reuse",
	"router-block-size":       "write --kv-cache-block-size",
	"system-port":             "write --metrics-port",
	"busy-threshold":          "write --active-decode-blocks-threshold",

	"chat-template-content-format":        `write --engine-args "--chat-template-content-format FORMAT"`,
	"trust-request-chat-template":         `write --engine-args "--trust-request-chat-template"`,
	"exclude-tools-when-tool-choice-none": `write --engine-args "--exclude-tools-when-tool-choice-none"`,
	"reasoning-effort-map":                `write --engine-args "--reasoning-effort-map 'JSON'"`,
	"anthropic-disabled-thinking-effort":  `write --engine-args "--anthropic-disabled-thinking-effort EFFORT"`,
	"tokenizer-mode":                      `write --engine-args "--tokenizer-mode MODE"`,
	"hf-chat-template-name":               `write --engine-args "--hf-chat-template-name NAME"`,
	"total-queued-requests-metric":        "write --engine-metrics queued=NAME",
	"total-running-requests-metric":       "write --engine-metrics running=NAME",
	"kv-cache-usage-percentage-metric":    "write --engine-metrics usage=NAME",
	"pod-ip-family":                       "write --dns-lookup-family v4_only or v6_only",
	"router-kv-usage-weight":              "--router-policy time prices load; leave it out",

	"model-path":            "write --model NAME=DIR",
	"model-name":            "write --model NAME=DIR",
	"router-prefill-policy": "kvepp has one set of weights: give --router-worker-selection-policy",
	"router-decode-policy":  "kvepp has one set of weights: give --router-worker-selection-policy",
	"pass-session-headers":  "Dynamo's frontends get no session headers, by which they would replace kvepp's choice",
	"keep-legacy-nvext":     "kvepp works with Dynamo's frontends from 1.6.1 on, which refuse these fields",
	"disable-endpoint-subset-filter": "kvepp follows the subset of endpoints that the proxy names; let the proxy " +
		"name none" + seeLLMD,

	"config-file":            pluginConfig,
	"config-text":            pluginConfig,
	"metrics-cert-dir":       metricsTLS,
	"metrics-client-ca-file": metricsTLS,
	"emit-endpoint-scores": "kvepp shows costs in response headers (--decision-headers), at /debug/decisions and in " +
		"spans, not in metadata; leave it out" + seeLLMD,

	"replica-sync-port":  replicaSync,
	"replica-sync-peers": replicaSync,
	"indexer-peers": "workers of kvepp select register after its start; give them a replay_endpoint, at which kvepp " +
		"reads what they hold; leave it out",
}

// absentFlag returns an error if a name, with or without no-, is that of an absent flag.
func absentFlag(name string) error {
	if why := absentFlags[strings.TrimPrefix(name, "no-")]; why != "" {
		return errors.New(why)
	}
	return nil
}

// absentVariables returns an error for each of Dynamo's variables that asks for what kvepp does not have. A process
// often inherits such variables.
func absentVariables(getenv func(string) string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(absentFlags)) {
		if !strings.HasSuffix(absentFlags[name], seeDynamo) {
			continue
		}
		variable := "DYN_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		if value := getenv(variable); !slices.Contains([]string{"", "0", "false", "none", "[]"}, value) {
			errs = append(errs, fmt.Errorf("environment variable %s %q: %s", variable, value, absentFlags[name]))
		}
	}
	return errors.Join(errs...)
}

// retiredValues and retiredSwitches are flags that earlier versions of kvepp had, with what holds in their place: they
// had no effect, or their default is now what always holds. kvepp accepts them with a warning in this release.
var (
	retiredValues = map[string]string{
		"shared-cache-multiplier":     "kvepp does not query a shared cache",
		"grpc-max-recv-msg-size":      "a message may have as many bytes as --max-parse-bytes needs",
		"zap-encoder":                 "give --log-format json or text",
		"router-max-tree-size":        "in approximate mode --index-max-bytes bounds the assumed blocks",
		"router-prune-target-ratio":   "in approximate mode kvepp forgets a fifth of the blocks at the limit",
		"router-event-threads":        "kvepp applies the KV events of 4 workers at once",
		"ladder-max-bytes":            "the hit-rate ladder has 16 MiB",
		"debug-decisions":             "kvepp keeps the latest 1000 decisions",
		"estimated-bytes-per-token":   "4 bytes count as a token where kvepp does not tokenize",
		"router-admission-fill":       "--router-admission working-set fills nine tenths of a KV cache",
		"router-queue-size":           "65536 requests may wait for one model; policy classes bound fewer",
		"encoder-cuda-to-cpu-ratio":   "a worker with an accelerator counts as 8 on a CPU",
		"eject-consecutive-failures":  "kvepp ejects an endpoint after 3 failures in a row",
		"eject-failure-percent":       "an endpoint is ejected if half of its requests failed in 10 s",
		"eject-max-percent":           "a share of failures ejects at most half of the endpoints",
		"eject-time":                  "an ejected endpoint waits 1 s for its first trial request",
		"replica-timeout":             "a replica is dead after 3 s of silence",
		"record-files":                "--record has at most 4 files",
		"record-max-bytes":            "the files of --record take at most 1 GiB",
		"shed-retry-after":            "Retry-After is 1",
		"router-id":                   "metrics have the id that Dynamo computes from the host's name",
		"dynamo-component":            "metrics have dynamo_component=\"backend\"",
		"metrics-staleness-threshold": "an engine's metrics count for three times --refresh-metrics-interval",
		"unknown-engine-version":      "an untested version follows the newest tested one before it",
		"tokenizer-url-timeout":       "a request waits 500 ms for --tokenizer-url",
		"model-load-timeout":          "the start waits 30 s for tokenizers",
		"record-hashes":               "--record writes keyed hashes",
		"event-plane":                 "discovery names each worker's event plane",
		"vllm-hash-seeds":             "of models whose layers all have windows kvepp knows no cached blocks",
		"v":                           "give --log-level debug for what --v 4 showed",
	}
	retiredSwitches = map[string]string{
		"serve-indexer":               "the index answers at --admin-address",
		"router-replica-sync":         "replicas of kvepp share by --replica-peers or --replica-service",
		"enable-session-prefix-index": "kvepp has no index of sessions' prefixes; Dynamo decides nothing by it either",
		"header-aliases":              "the worker headers' older names are always set",
		"enable-pprof":                "profiles are always shown at --admin-address",
		"tracing":                     "set OTEL_SDK_DISABLED=true to send no spans",
		"enable-cert-reload":          "kvepp always reads certificates again when they change",
		"health-checking":             "both ports always answer gRPC health checks",
	}
)

func init() {
	for _, model := range []string{"aic-", "ais-"} {
		for _, name := range []string{"perf-config", "backend", "system", "backend-version", "tp-size", "model-path",
			"moe-tp-size", "moe-ep-size", "attention-dp-size", "nextn", "nextn-accept-rates", "mtp-seed"} {
			retiredValues[model+name] = "belongs to a model of Dynamo that kvepp does not run: it treats " +
				"--router-prefill-load-model aic and ais as linear" + seeDynamo
		}
	}
}

// addRetired declares the retired flags of `kvepp serve`.
func addRetired(f *pflag.FlagSet) {
	for _, name := range slices.Sorted(maps.Keys(retiredValues)) {
		flags.Retire(f, name, false)
	}
	for _, name := range slices.Sorted(maps.Keys(retiredSwitches)) {
		flags.Retire(f, name, true)
	}
}

// givenRetired returns a line for each retired flag that was given.
func givenRetired(f *pflag.FlagSet) (lines []string) {
	for _, all := range []map[string]string{retiredValues, retiredSwitches} {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			if flag := f.Lookup(name); flag != nil && flag.Changed {
				lines = append(lines, fmt.Sprintf("--%s no longer exists, and the next release refuses it: %s", name,
					all[name]))
			}
		}
	}
	return lines
}
