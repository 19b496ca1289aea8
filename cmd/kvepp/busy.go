package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
	"kvepp/queue"
	"kvepp/router"
)

// busy is what `kvepp serve` can be told of workers that have enough to do: when they are left out, and when requests
// wait for them.
type busy struct {
	thresholds     router.Thresholds
	retryAfter     uint16
	overloadStatus int

	queueThreshold *float64 // nil: requests do not wait
	queuePolicy    string
	policyConfig   string // file
	queueSize      int
	queueTimeout   time.Duration

	policies *queue.File // what policyConfig holds; nil without one
}

// add declares the flags.
func (b *busy) add(f *pflag.FlagSet) {
	f.Var(
		optional(&b.thresholds.ActiveDecodeBlocks, "float", parseFloat),
		"active-decode-blocks-threshold",
		"an endpoint is overloaded, and in every router mode no candidate, while active requests hold more than this "+
			"`PART` (0 to 1) of its KV blocks; while all are, requests are refused at once. None: whatever they "+
			"hold. /busy_threshold at --admin-address changes it for one model",
	)
	addAlias(f, "busy-threshold", "active-decode-blocks-threshold", "")
	f.Var(
		optional(&b.thresholds.ActivePrefillTokens, "uint", parseUint),
		"active-prefill-tokens-threshold",
		"the same while more than this many prompt `TOKENS` wait to be prefilled. None: however many",
	)
	f.Var(
		optional(&b.thresholds.ActivePrefillTokensFrac, "float", parseFloat),
		"active-prefill-tokens-threshold-frac",
		"the same in `MULTIPLES` of the tokens that the engine takes in one step (maxNumBatchedTokens, or the model "+
			"card's); without effect where that is not known",
	)
	f.Uint16Var(
		&b.retryAfter,
		"shed-retry-after",
		1,
		"`SECONDS` in the Retry-After header of requests that are refused because of load; 0: no header",
	)
	f.IntVar(
		&b.overloadStatus,
		"overload-status-code",
		429,
		"their HTTP `STATUS`: 429, 503, or 529, which is the default of Dynamo's frontend",
	)
	b.addQueue(f)
}

// addQueue declares those that say how requests wait.
func (b *busy) addQueue(f *pflag.FlagSet) {
	f.Var(
		optional(&b.queueThreshold, "float", parseFloat),
		"router-queue-threshold",
		"requests wait while on every worker that may take them more prompt tokens wait to be prefilled than this "+
			"`MULTIPLE` of the tokens that its engine takes in one step (maxNumBatchedTokens, or the model card's; "+
			"where that is not known they do not wait). None, the default: never; earlier Dynamo versions had 2.0 "+
			"and 4.0",
	)
	f.StringVar(
		&b.queuePolicy,
		"router-queue-policy",
		"fcfs",
		"who goes next, `POLICY`: fcfs (who came first, priorities counted as seconds), wspt (who has least to "+
			"prefill, for its priority), or lcfs (who came last; for comparisons)",
	)
	f.StringVar(
		&b.policyConfig,
		"router-policy-config",
		"",
		"YAML `FILE` with policy classes: when requests of each wait, in which order, how many, and how the classes "+
			"take turns; in Dynamo's format (README, \"When workers have enough to do\"). Read at start. What it "+
			"says under router goes before flags",
	)
	f.DurationVar(
		&b.queueTimeout,
		"router-queue-timeout",
		30*time.Second,
		"how long a request waits before it is refused; 0: as long as its client does. Dynamo has no such limit",
	)
	f.IntVar(
		&b.queueSize,
		"router-queue-size",
		65536,
		"at most this many requests, `N`, wait for the workers of one model, each with its body in memory; beyond, "+
			"they are refused",
	)
}

// settingFlags maps what a policy file may say under router to the flag that says the same. Source: dynamo-kv-router
// 1.6.1, scheduling::policy_config.
var settingFlags = map[string]string{
	"host_cache_hit_weight":           "router-host-cache-hit-weight",
	"disk_cache_hit_weight":           "router-disk-cache-hit-weight",
	"use_kv_events":                   "router-kv-events",
	"router_replica_sync":             "router-replica-sync",
	"router_track_active_blocks":      "router-track-active-blocks",
	"router_track_output_blocks":      "router-track-output-blocks",
	"router_assume_kv_reuse":          "router-assume-kv-reuse",
	"router_track_prefill_tokens":     "router-track-prefill-tokens",
	"router_prefill_load_model":       "router-prefill-load-model",
	"router_ttl_secs":                 "router-ttl-secs",
	"router_approximate_cache_policy": "router-approximate-cache-policy",
	"router_event_threads":            "router-event-threads",
	"use_remote_indexer":              "use-remote-indexer",
	"serve_indexer":                   "serve-indexer",
	"shared_cache_type":               "shared-cache-type",
	"router_predicted_ttl_secs":       "router-predicted-ttl-secs",
	"router_tracking_hash":            "router-tracking-hash",
	"router_tracking_key_file":        "router-tracking-key-file",
	"router_tracking_key_id":          "router-tracking-key-id",
	"enable_session_prefix_index":     "enable-session-prefix-index",
}

// readPolicies reads the policy file, if there is one, and sets the flags of f that it has settings for.
func (b *busy) readPolicies(f *pflag.FlagSet) error {
	if b.policyConfig == "" {
		return nil
	}
	text, err := os.ReadFile(b.policyConfig)
	if err != nil {
		return fmt.Errorf("--router-policy-config: %w", err)
	}
	if b.policies, err = queue.ParseFile(text); err != nil {
		return fmt.Errorf("--router-policy-config %s: %w", b.policyConfig, err)
	}
	for _, s := range b.policies.Router {
		if err := set(f, s); err != nil {
			return fmt.Errorf("--router-policy-config %s: line %d: %w", b.policyConfig, s.Line, err)
		}
	}
	return nil
}

func set(f *pflag.FlagSet, s queue.Setting) error {
	name, known := settingFlags[s.Key]
	if !known {
		keys := slices.Sorted(maps.Keys(settingFlags))
		return fmt.Errorf(
			"%q is not a key of router, which has: %s%s",
			s.Key,
			strings.Join(keys, ", "),
			suggest.DidYouMean(s.Key, "", keys),
		)
	}
	flag := f.Lookup(name)
	if flag == nil {
		return fmt.Errorf("%s: %s has no --%s; leave this key out", s.Key, f.Name(), name)
	}
	var err error
	if s.Value == "None" {
		flag.Changed, err = false, flag.Value.Set(flag.DefValue)
	} else {
		err = f.Set(name, s.Value)
	}
	if err != nil {
		return fmt.Errorf("%s %q: %s", s.Key, s.Value, takes(flag))
	}
	return nil
}

// check checks these flags.
func (b *busy) check() error {
	if err := b.thresholds.Validate(); err != nil {
		flag, says, _ := strings.Cut(err.Error(), " ")
		return fmt.Errorf("--%s %s", strings.ReplaceAll(flag, "_", "-"), says)
	}
	if b.overloadStatus != 429 && b.overloadStatus != 503 && b.overloadStatus != 529 {
		return fmt.Errorf("--overload-status-code %d: must be 429, 503 or 529", b.overloadStatus)
	}
	return b.checkQueue()
}

// checkQueue checks those that say how requests wait.
func (b *busy) checkQueue() error {
	switch {
	case b.queueThreshold != nil && !(*b.queueThreshold >= 0 &&
		*b.queueThreshold <= math.MaxFloat64): // also what is not a number
		return fmt.Errorf(
			"--router-queue-threshold %v: must be a finite number of at least 0, for example 2, or None",
			*b.queueThreshold,
		)
	case b.queueSize < 1:
		return fmt.Errorf("--router-queue-size %d: must be at least 1, for example 65536", b.queueSize)
	}
	if err := durations(durationFlag{"router-queue-timeout", b.queueTimeout, true}); err != nil {
		return err
	}
	return oneOf("router-queue-policy", b.queuePolicy, "fcfs", "wspt", "lcfs")
}

// queue returns how requests wait; nil: never.
func (b *busy) queue() *router.Queue {
	profiles := b.policies.Profiles(queue.Single(queue.Policy(b.queuePolicy), b.queueThreshold))
	if !profiles.Waits() {
		return nil
	}
	return &router.Queue{Profiles: profiles, Bound: b.queueSize, Timeout: b.queueTimeout}
}

// countsTokens reports whether the numbers of tokens matter in every router mode.
func (b *busy) countsTokens() bool {
	return b.queue() != nil || b.thresholds.ActivePrefillTokens != nil || b.thresholds.ActivePrefillTokensFrac != nil
}

// unused says what was given and means nothing. tracked says that prompt tokens are counted.
func (b *busy) unused(idle *idle, tracked bool) {
	switch {
	case b.queue() == nil:
		idle.add(
			"no request ever waits: neither --router-queue-threshold nor --router-policy-config says when",
			"router-queue-policy",
			"router-queue-timeout",
			"router-queue-size",
		)
	case b.policies != nil && b.policies.HasRoot():
		idle.add(
			"the policy classes of --router-policy-config say this",
			"router-queue-threshold",
			"router-queue-policy",
		)
	}
	if !tracked {
		idle.add(
			"prompt tokens are not counted (--no-router-track-prefill-tokens)",
			"router-queue-threshold",
			"active-prefill-tokens-threshold",
			"active-prefill-tokens-threshold-frac",
		)
	}
}

// optionalValue is a flag that may be absent, or None, as Dynamo's documents write it.
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
func parseUint(s string) (uint64, error)   { return strconv.ParseUint(s, 10, 64) }
