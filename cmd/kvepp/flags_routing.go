package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/internal/suggest"
	"kvepp/router"
	"kvepp/router/admission"
	"kvepp/router/queue"
	"kvepp/scoring"
)

// checkWeights returns an error for the first weight of the cost function that is negative, infinite or not a number.
// weight is that of the deprecated flag, nil when not given.
func checkWeights(c *scoring.Config, weight *float64) error {
	d, older := scoring.DefaultConfig(), 0.0
	if weight != nil {
		older = *weight
	}
	for _, w := range []struct {
		flag          string
		value, normal float64
	}{
		{"router-kv-overlap-score-weight", older, 1},
		{"router-kv-overlap-score-credit", c.OverlapScoreCredit, d.OverlapScoreCredit},
		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay, d.OverlapScoreCreditDecay},
		{"router-prefill-load-scale", c.PrefillLoadScale, d.PrefillLoadScale},
		{"router-decode-active-request-weight", c.DecodeActiveRequestWeight, d.DecodeActiveRequestWeight},
		{"router-kv-usage-weight", c.KVUsageWeight, d.KVUsageWeight},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight, d.HostCacheHitWeight},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight, d.DiskCacheHitWeight},
		{"router-temperature", c.Temperature, d.Temperature},
	} {
		if !(w.value >= 0) || math.IsInf(w.value, 0) {
			return fmt.Errorf(
				"--%s %v: must be a finite number of at least 0, for example %v",
				w.flag,
				w.value,
				w.normal,
			)
		}
	}
	return c.Validate()
}

// dynamosWeights are the flags of weights that only the policy dynamo reads.
var dynamosWeights = []string{
	"router-kv-overlap-score-weight", "router-kv-overlap-score-credit", "router-kv-overlap-score-credit-decay",
	"router-prefill-load-scale", "router-decode-active-request-weight", "router-kv-usage-weight",
}

// dynamosFlags are the flags that are meant for Dynamo's cost: they set a weight of it, select it by name, or have its
// unit.
var dynamosFlags = append([]string{"load-aware", "router-temperature", "router-worker-selection-policy"},
	dynamosWeights...)

// selectPolicy sets --router-policy to dynamo if it is not given and another setting is meant for Dynamo's cost.
func (o *options) selectPolicy() {
	if o.given("router-policy") {
		return
	}
	selectDynamo := func(because string) {
		_ = flags.Imply(o.flags, because, func() error {
			o.scheduling.policy = scoring.Dynamo.String()
			return nil
		})
	}
	if o.scheduling.mode != scoring.KV.String() { // prices no worker
		selectDynamo("--router-mode")
	}
	if o.busy.policies != nil && o.busy.policies.Selection != nil {
		selectDynamo("worker_selection in --router-policy-config")
	}
	for _, flag := range dynamosFlags {
		off := slices.Contains([]string{"", "0", "false"}, o.flags.Lookup(flag).Value.String())
		weight := slices.Contains(dynamosWeights, flag)
		if o.given(flag) && (weight || !off) {
			selectDynamo("--" + flag)
		}
	}
}

// checkPolicy returns an error if the policy time is beside a setting that it does not read.
func checkPolicy(c *scoring.Config, given func(flag string) bool) error {
	if c.Policy != scoring.Time {
		return nil
	}
	if c.Mode != scoring.KV {
		return fmt.Errorf("--router-policy time prices workers in --router-mode kv only, not %v: leave out one of "+
			"the two",
			c.Mode)
	}
	for _, flag := range dynamosWeights {
		if given(flag) {
			name := "--" + flag
			if env := dynamoEnv[flag]; env != "" {
				name += " or " + env
			}
			return fmt.Errorf("%s is a weight of Dynamo's cost, which --router-policy time does not read: leave out "+
				"one "+
				"of the two", name)
		}
	}
	return nil
}

// costFlags declares the knobs of the cost function over c, with the defaults in it. weight is that of the deprecated
// flag, which goes before two of them; nil when not given.
func costFlags(f *pflag.FlagSet, c *scoring.Config, weight **float64) {
	d := scoring.DefaultConfig()
	f.Float64Var(
		&c.OverlapScoreCredit,
		"router-kv-overlap-score-credit",
		d.OverlapScoreCredit,
		"value of a cached block, in blocks that need no prefill. 0: routing ignores caches",
	)
	f.Float64Var(
		&c.OverlapScoreCreditDecay,
		"router-kv-overlap-score-credit-decay",
		d.OverlapScoreCreditDecay,
		"how much the credit shrinks on workers with more waiting prefill than the least busy one. 0: not at all",
	)
	f.Float64Var(
		&c.HostCacheHitWeight,
		"router-host-cache-hit-weight",
		d.HostCacheHitWeight,
		"value of a cached block in the worker's host memory; --router-kv-overlap-score-credit is the value on its "+
			"device",
	)
	f.Float64Var(
		&c.DiskCacheHitWeight,
		"router-disk-cache-hit-weight",
		d.DiskCacheHitWeight,
		"value of a cached block on disk or in external storage",
	)
	f.Float64Var(
		&c.PrefillLoadScale,
		"router-prefill-load-scale",
		d.PrefillLoadScale,
		"weight of blocks to prefill relative to blocks held for decoding; higher favours time to first token",
	)
	flags.Float(
		f,
		weight,
		"router-kv-overlap-score-weight",
		"deprecated name of earlier Dynamo versions: sets --router-prefill-load-scale, and 0 also sets the credit to 0",
	)
	f.Float64Var(
		&c.DecodeActiveRequestWeight,
		"router-decode-active-request-weight",
		d.DecodeActiveRequestWeight,
		"cost of each request active on a worker, in blocks",
	)
	f.Float64Var(
		&c.KVUsageWeight,
		"router-kv-usage-weight",
		d.KVUsageWeight,
		"cost, in blocks, of a worker whose KV blocks are all held by active requests; in proportion if they hold a "+
			"part of them. 0: none. Without effect on workers whose number of blocks (totalKvBlocks, model card) is "+
			"not known",
	)
	f.Float64Var(
		&c.Temperature,
		"router-temperature",
		d.Temperature,
		"0: the cheapest worker, ties at random. Above 0: a softmax over costs; higher spreads requests more evenly",
	)
	f.BoolVar(
		&c.TrackActiveBlocks,
		"router-track-active-blocks",
		d.TrackActiveBlocks,
		"count the blocks that active requests hold",
	)
	f.BoolVar(
		&c.TrackPrefillTokens,
		"router-track-prefill-tokens",
		d.TrackPrefillTokens,
		"count the prompt tokens that workers have yet to prefill",
	)
	f.BoolVar(
		&c.AssumeKVReuse,
		"router-assume-kv-reuse",
		d.AssumeKVReuse,
		"count a block once if several requests of one worker share it",
	)
	negatable(f, "router-track-active-blocks", "router-track-prefill-tokens", "router-assume-kv-reuse")
}

// scheduling are the flags of `kvepp serve` that say how kvepp chooses a worker, and what a running request counts for.
type scheduling struct {
	mode            string
	policy          string
	inheritedDirect bool // the environment had DYN_ROUTER_MODE=direct

	loadAware    bool
	trackOutput  bool
	prefillModel string
	prefillSpeed float64 // tokens a second

}

// add declares the flags, over s and c, with the defaults in them.
func (s *scheduling) add(f *pflag.FlagSet, c *scoring.Config) {
	d := scoring.DefaultConfig()
	f.StringVar(&s.mode, "router-mode", d.Mode.String(),
		"how kvepp chooses a worker, `MODE`: kv (by cached blocks and load), round-robin, random, power-of-two (the "+
			"less loaded of two random workers), least-loaded, device-aware-weighted or direct (the worker that the "+
			"request names). Only kv reads prompts and KV events; direct needs --allow-client-pinning. kvepp ignores "+
			"DYN_ROUTER_MODE=direct, which is meant for the frontends behind it")
	values(f, "router-mode", scoring.ModeNames()...)
	f.StringVar(&s.policy, "router-policy", scoring.Time.String(),
		"how the mode kv prices workers, `POLICY`: time (by the time that a choice costs the request and those on the "+
			"worker, at speeds that kvepp learns) or dynamo (in blocks, as Dynamo does). Without this flag, a weight "+
			"of Dynamo's cost, a temperature, --load-aware or another mode selects dynamo. With time, these weights "+
			"are refused, and --router-temperature is in milliseconds")
	values(f, "router-policy", scoring.PolicyNames()...)
	f.BoolVar(&s.loadAware, "load-aware", false,
		"Dynamo's preset: choose by load alone, and count every request's blocks in full. It sets "+
			"--router-kv-overlap-score-credit 0, --no-router-kv-events, --no-router-assume-kv-reuse, and the tracking "+
			"of active blocks and prefill tokens")
	f.BoolVar(&s.trackOutput, "router-track-output-blocks", false,
		"also count the blocks of responses while they are generated. If the request gives its expected length "+
			"(nvext.agent_hints.osl), blocks that it alone holds count less the nearer its end is")
	s.addPrefill(f)
	negatable(f, "load-aware", "router-track-output-blocks")
}

// addPrefill declares the flags of waiting prompts.
func (s *scheduling) addPrefill(f *pflag.FlagSet) {
	f.StringVar(&s.prefillModel, "router-prefill-load-model", "none",
		"`MODEL`, how waiting prompts count during their prefill: none (in full until the first token), or linear "+
			"(less by what the worker has prefilled since, at --router-prefill-tokens-per-second). kvepp treats aic "+
			"and ais, Dynamo's models, as linear, and refuses their --aic-* and --ais-* flags")
	values(f, "router-prefill-load-model", "none", "linear", "aic", "ais")
	f.Float64Var(&s.prefillSpeed, "router-prefill-tokens-per-second", 0,
		"how many prompt `TOKENS` a worker prefills in a second. 0: learned for each worker from the time to first "+
			"token, after 20 responses. Without linear it only ends the prefill load of requests with stream: false")
}

// prefill returns how waiting prompts count.
func (s *scheduling) prefill() scoring.PrefillModel {
	return scoring.PrefillModel{Linear: s.prefillModel != "none", TokensPerSecond: s.prefillSpeed}
}

// unused adds the settings that have no effect.
func (s *scheduling) unused(unused *unusedFlags) {
	if s.inheritedDirect {
		unused.lines = append(
			unused.lines,
			"DYN_ROUTER_MODE=direct: sets how Dynamo's frontends run behind kvepp; kvepp itself chooses by "+
				"--router-mode "+s.mode,
		)
	}
	if s.prefillModel == "aic" || s.prefillModel == "ais" {
		unused.lines = append(
			unused.lines,
			"--router-prefill-load-model "+s.prefillModel+
				": treated as linear, at the speed of --router-prefill-tokens-per-second, or a learned one",
		)
	}
}

// inherited is getenv without Dynamo's router mode direct. A pod has it in its environment for the frontend; it does
// not say how the endpoint picker of that frontend chooses.
func (s *scheduling) inherited(getenv func(string) string) func(string) string {
	return func(name string) string {
		value := getenv(name)
		if name == dynamoEnv["router-mode"] && value == scoring.Direct.String() {
			s.inheritedDirect = true
			return ""
		}
		if name == dynamoEnv["system-port"] && value == "-1" {
			return "0" // no port: Dynamo writes -1, kvepp 0
		}
		return value
	}
}

// applyPresets sets the flags that another flag stands for.
func (s *scheduling) applyPresets(c *scoring.Config, kvEvents *bool) {
	if s.loadAware {
		c.OverlapScoreCredit, *kvEvents = 0, false
		c.TrackActiveBlocks, c.TrackPrefillTokens, c.AssumeKVReuse = true, true, false
	}
}

// check checks the flags, and sets the mode in c. With pinning, requests may name their worker.
func (s *scheduling) check(c *scoring.Config, pinning bool) error {
	mode, err := scoring.ParseMode(s.mode)
	switch {
	case err != nil:
		return oneOf("router-mode", s.mode, scoring.ModeNames()...)
	case mode == scoring.Direct && !pinning:
		return errors.New(
			"--router-mode direct sends each request to the worker that it names, and needs --allow-client-pinning, " +
				"without --ignore-client-hints. (Dynamo's frontends behind kvepp run in direct mode, because kvepp " +
				"chooses for them: give that flag to the frontends, not to kvepp)",
		)
	}
	c.Mode = mode
	if c.Policy, err = scoring.ParsePolicy(s.policy); err != nil {
		return oneOf("router-policy", s.policy, scoring.PolicyNames()...)
	}
	if s.trackOutput && !c.TrackActiveBlocks {
		return errors.New(
			"--router-track-output-blocks needs the active blocks that --no-router-track-active-blocks leaves out: " +
				"give one of the two",
		)
	}
	return s.checkPrefill(c)
}

// checkPrefill checks the flags of waiting prompts.
func (s *scheduling) checkPrefill(c *scoring.Config) error {
	switch {
	case !slices.Contains([]string{"none", "linear", "aic", "ais"}, s.prefillModel):
		return fmt.Errorf(
			"--router-prefill-load-model %q: must be none or linear (aic and ais are treated as linear)%s",
			s.prefillModel,
			suggest.DidYouMean(s.prefillModel, "", []string{"none", "linear"}),
		)
	case s.prefillModel != "none" && !c.TrackPrefillTokens:
		return errors.New(
			"--router-prefill-load-model needs the prompt tokens that --no-router-track-prefill-tokens leaves out: " +
				"give one of the two",
		)
	}
	if err := s.prefill().Validate(); err != nil {
		return fmt.Errorf("--router-prefill-tokens-per-second: %w", err)
	}
	return nil
}

// busy holds the flags for overload: when busy workers are no candidates, and when requests wait in the queue.
type busy struct {
	thresholds     router.Thresholds
	retryAfter     uint16
	overloadStatus int

	queueThreshold *float64 // nil: requests do not wait
	queuePolicy    string
	policyConfig   string // file
	queueTimeout   time.Duration

	admissionMode string // noAdmission or byWorkingSet

	policies   *queue.File // what policyConfig holds; nil without one
	instance   string
	overridden []string // a line for each flag that was given, and that policyConfig sets otherwise
}

// Values of --router-admission.
const (
	noAdmission  = "none"
	byWorkingSet = "working-set"
)

// add declares the flags.
func (b *busy) add(f *pflag.FlagSet) {
	b.addThresholds(f)
	f.Lookup("active-decode-blocks-threshold").Usage += ". /busy_threshold at --admin-address changes it for one model"
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
		"HTTP `STATUS` of requests that are refused because of load: 429, 503, or 529 (the default of Dynamo's "+
			"frontend)",
	)
	values(f, "overload-status-code", "429", "503", "529")
	b.addQueue(f)
	b.addInstances(f)
}

// addThresholds declares the busy thresholds.
func (b *busy) addThresholds(f *pflag.FlagSet) {
	flags.Float(
		f,
		&b.thresholds.ActiveDecodeBlocks,
		"active-decode-blocks-threshold",
		"an endpoint is overloaded while active requests hold more than this `FRACTION` (0 to 1) of its KV blocks. "+
			"It is then no candidate; if all are overloaded, kvepp refuses requests at once. None: no limit",
	)
	flags.Uint(
		f,
		&b.thresholds.ActivePrefillTokens,
		"active-prefill-tokens-threshold",
		"an endpoint is overloaded while more than this many prompt `TOKENS` wait to be prefilled. None: no limit",
	)
	flags.Float(
		f,
		&b.thresholds.ActivePrefillTokensFrac,
		"active-prefill-tokens-threshold-frac",
		"the same limit in `MULTIPLES` of the tokens that the engine takes in one step (maxNumBatchedTokens, or the "+
			"model card's); without effect if that number is not known",
	)
}

// addQueue declares the flags of the queue.
func (b *busy) addQueue(f *pflag.FlagSet) {
	flags.Float(
		f,
		&b.queueThreshold,
		"router-queue-threshold",
		"a request waits while every candidate has more prompt tokens waiting than `N` times its engine's tokens per "+
			"step. None, the default: never; also never if a candidate's tokens per step are not known "+
			"(maxNumBatchedTokens, or the model card's)",
	)
	f.StringVar(
		&b.queuePolicy,
		"router-queue-policy",
		"fcfs",
		"which waiting request goes next, `POLICY`: fcfs (the earliest, priorities counted as seconds), wspt (the "+
			"least prefill, weighted by priority), or lcfs (the latest; for comparisons)",
	)
	values(f, "router-queue-policy", "fcfs", "wspt", "lcfs")
	f.StringVar(
		&b.policyConfig,
		"router-policy-config",
		"",
		"YAML `FILE` of Dynamo's router policy, not of flags (--config): when requests of each policy class wait, in "+
			"which order, how many, and how the classes take turns; and the weights of its worker_selection. Read at "+
			"start only. Its sections router and worker_selection take precedence over flags",
	)
	f.DurationVar(
		&b.queueTimeout,
		"router-queue-timeout",
		30*time.Second,
		"how long a request waits before it is refused; 0: as long as its client waits. Dynamo has no such limit",
	)
}

// addInstances declares the flags that name instances of the policy file's worker_selection.
func (b *busy) addInstances(f *pflag.FlagSet) {
	f.StringVar(
		&b.instance,
		"router-worker-selection-policy",
		"",
		"instance `NAME` of worker_selection in --router-policy-config whose weights apply, in place of those that "+
			"the file selects; default: only the flags' weights",
	)
}

// addAdmission declares the flags that hold conversations back.
func (b *busy) addAdmission(f *pflag.FlagSet) {
	f.StringVar(
		&b.admissionMode,
		"router-admission",
		noAdmission,
		"whether new conversations wait while the workers' KV caches are full of others that continue, `MODE`: none, "+
			"or working-set. kvepp refuses a request that has waited for --router-queue-timeout. Without effect on "+
			"workers whose number of KV blocks is not known (totalKvBlocks, model card)",
	)
	values(f, "router-admission", noAdmission, byWorkingSet)
}

// settingFlags maps each key under router in a policy file to the flag that it sets, or to an absent flag. Source:
// dynamo-kv-router 1.6.1, scheduling::policy_config.
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

// turnedOff are the values that mean for each of Dynamo's settings without a flag what kvepp does.
var turnedOff = []string{"false", "None", "none", "", "public-xxh3-v1"}

// parameterFlags maps each parameter of Dynamo's policy of costs in a policy file to the flag that it sets. A parameter
// that is absent leaves the flag as it is. Source: ai-dynamo 1.6.1, type dynamo-default-cost-fn, by its errors, and by
// the costs that a frontend logs.
var parameterFlags = map[string]string{
	"overlap_score_credit":         "router-kv-overlap-score-credit",
	"overlap_score_credit_decay":   "router-kv-overlap-score-credit-decay",
	"prefill_load_scale":           "router-prefill-load-scale",
	"decode_active_request_weight": "router-decode-active-request-weight",
	"host_cache_hit_weight":        "router-host-cache-hit-weight",
	"disk_cache_hit_weight":        "router-disk-cache-hit-weight",
	"shared_cache_multiplier":      "shared-cache-multiplier",
	"router_temperature":           "router-temperature",
}

// readPolicies reads the policy file, if there is one, and sets the flags of f that the file has keys for. The flags
// that others stand for must be set before, because the file takes precedence over them.
func (b *busy) readPolicies(f *pflag.FlagSet) error {
	if b.policyConfig == "" {
		_, err := (*queue.Selection)(nil).Parameters(b.instance)
		if err != nil {
			return fmt.Errorf("--router-worker-selection-policy: %w", err)
		}
		return nil
	}
	text, err := boundedfile.Read(b.policyConfig, maxSettingsBytes)
	if err != nil {
		return fmt.Errorf("--router-policy-config: %w", err)
	}
	if b.policies, err = queue.ParseFile(text); err != nil {
		return fmt.Errorf("--router-policy-config %s: %w", b.policyConfig, err)
	}
	parameters, err := b.policies.Selection.Parameters(b.instance)
	if err != nil {
		return fmt.Errorf("--router-policy-config %s: %w", b.policyConfig, err)
	}
	for _, part := range []struct {
		settings []queue.Setting
		what     string
		flags    map[string]string
	}{
		{b.policies.Router, "router", settingFlags},
		{parameters, "the parameters of dynamo-default-cost-fn", parameterFlags},
	} {
		for _, s := range part.settings {
			if err := b.set(f, s, part.what, part.flags); err != nil {
				return fmt.Errorf("--router-policy-config %s: line %d: %w", b.policyConfig, s.Line, err)
			}
		}
	}
	return nil
}

// set sets the flag of a key in the part of the policy file that is named what.
func (b *busy) set(f *pflag.FlagSet, s queue.Setting, what string, names map[string]string) error {
	name, known := names[s.Key]
	if !known {
		keys := slices.Sorted(maps.Keys(names))
		return fmt.Errorf(
			"%q is not a key of %s, which has: %s%s",
			s.Key,
			what,
			strings.Join(keys, ", "),
			suggest.DidYouMean(s.Key, "", keys),
		)
	}
	flag := f.Lookup(name)
	switch why := absentFlag(name); {
	case flag == nil && slices.Contains(turnedOff, s.Value):
		return nil
	case flag == nil && why != nil:
		return fmt.Errorf("%s %q: %w", s.Key, s.Value, why)
	case flag == nil:
		return fmt.Errorf("%s: %s has no --%s; leave this key out", s.Key, f.Name(), name)
	}
	var (
		err           error
		before, given = flag.Value.String(), flag.Changed
	)
	if s.Value == "None" {
		flag.Changed, err = false, flag.Value.Set(flag.DefValue)
	} else {
		err = f.Set(name, s.Value)
	}
	if given && flag.Value.String() != before {
		b.overridden = append(b.overridden, fmt.Sprintf("--%s: %s in --router-policy-config, line %d, takes precedence",
			name, s.Key, s.Line))
	}
	flags.Implied(flag, "--router-policy-config")
	if err != nil {
		return fmt.Errorf("%s %q: %s", s.Key, s.Value, flags.Takes(flag, s.Value))
	}
	return nil
}

// check checks these flags.
func (b *busy) check() error {
	if err := b.checkThresholds(); err != nil {
		return err
	}
	if b.overloadStatus != 429 && b.overloadStatus != 503 && b.overloadStatus != 529 {
		return fmt.Errorf("--overload-status-code %d: must be 429, 503 or 529", b.overloadStatus)
	}
	return b.checkQueue()
}

// checkThresholds checks the busy thresholds.
func (b *busy) checkThresholds() error {
	if err := b.thresholds.Validate(); err != nil {
		flag, says, _ := strings.Cut(err.Error(), " ")
		return fmt.Errorf("--%s %s", strings.ReplaceAll(flag, "_", "-"), says)
	}
	return nil
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
	}
	if err := durations(durationFlag{"router-queue-timeout", b.queueTimeout, true}); err != nil {
		return err
	}
	return oneOf("router-queue-policy", b.queuePolicy, "fcfs", "wspt", "lcfs")
}

// maxQueued is how many requests wait for the workers of one model at most, each with its body in memory.
const maxQueued = 65536

// checkAdmission checks the flags that hold conversations back.
func (b *busy) checkAdmission() error {
	if err := oneOf("router-admission", b.admissionMode, noAdmission, byWorkingSet); err != nil {
		return err
	}
	return nil
}

// admission returns how conversations are held back; nil: they are not.
func (b *busy) admission() *admission.Config {
	if b.admissionMode != byWorkingSet {
		return nil
	}
	return &admission.Config{Fill: admission.DefaultFill}
}

// checkAdmission also refuses admission in a mode that does not know conversations.
func (o *options) checkAdmission() error {
	if err := o.busy.checkAdmission(); err != nil {
		return err
	}
	if o.busy.admission() != nil && o.scoring.Mode != scoring.KV {
		return fmt.Errorf("--router-admission %s knows conversations in --router-mode kv only, not %v: leave out one "+
			"of the two", byWorkingSet, o.scoring.Mode)
	}
	return nil
}

// newAdmission returns how the router holds conversations back; nil: it does not.
func (b *busy) newAdmission() *router.Admission {
	c := b.admission()
	if c == nil {
		return nil
	}
	return &router.Admission{Controller: admission.New(*c), Bound: maxQueued, Timeout: b.queueTimeout}
}

// queue returns how requests wait; nil: never.
func (b *busy) queue() *queue.RoomConfig {
	profiles := b.policies.Profiles(queue.Single(queue.Policy(b.queuePolicy), b.queueThreshold))
	if !profiles.Waits() {
		return nil
	}
	return &queue.RoomConfig{Profiles: profiles, Bound: maxQueued, Timeout: b.queueTimeout}
}

// countsTokens reports whether the numbers of tokens matter in every router mode.
func (b *busy) countsTokens() bool {
	return b.queue() != nil || b.thresholds.ActivePrefillTokens != nil || b.thresholds.ActivePrefillTokensFrac != nil
}

// unused says what was given and means nothing. tracked says that prompt tokens are counted.
func (b *busy) unused(unused *unusedFlags, tracked bool) {
	unused.lines = append(unused.lines, b.overridden...)
	switch {
	case b.queue() == nil && b.admission() != nil:
		unused.add(
			"requests that wait for admission go in the order of arrival: neither --router-queue-threshold nor "+
				"--router-policy-config makes others wait",
			"router-queue-policy",
		)
	case b.queue() == nil:
		unused.add(
			"no request ever waits: neither --router-queue-threshold nor --router-policy-config says when",
			"router-queue-policy",
			"router-queue-timeout",
		)
	case b.policies != nil && b.policies.HasRoot():
		unused.add(
			"the policy classes of --router-policy-config say this",
			"router-queue-threshold",
			"router-queue-policy",
		)
	}
	if !tracked {
		unused.add(
			"prompt tokens are not counted (--no-router-track-prefill-tokens)",
			"router-queue-threshold",
			"active-prefill-tokens-threshold",
			"active-prefill-tokens-threshold-frac",
		)
	}
}

// ejection holds the flags of outlier detection.
type ejection struct {
	on        bool
	firstByte time.Duration
}

// add declares the flags.
func (e *ejection) add(f *pflag.FlagSet) {
	f.BoolVar(
		&e.on,
		"eject",
		true,
		"eject endpoints that fail: they get no requests until a trial request succeeds. Failures are: no connection, "+
			"a reset, status 500, 502, 503 or 504, no headers within --eject-first-byte, and a metrics page that "+
			"refuses connections or stays silent for 5 s",
	)
	f.DurationVar(
		&e.firstByte,
		"eject-first-byte",
		30*time.Second,
		"how long the headers of a streamed response, or of a trial request's, may take. 0: no limit",
	)
}

// check checks these flags.
func (e *ejection) check() error { return flags.NotNegative("eject-first-byte", e.firstByte) }

// unused adds the flags that have no effect because endpoints are not ejected.
func (e *ejection) unused(unused *unusedFlags) {
	if !e.on {
		unused.add("with --eject=false no endpoint is ejected", "eject-first-byte")
	}
}
