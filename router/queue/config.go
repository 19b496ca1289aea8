package queue

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/internal/suggest"
)

// Config is what an operator chooses: when requests wait, and in which order.
type Config struct {
	Threshold  *float64 // nil: requests do not wait unless PolicyFile says so
	Policy     string   // a Policy
	PolicyFile string
	Timeout    time.Duration // 0: until the client leaves
	Hold       time.Duration // how long requests wait while there is no worker; 0: they do not
	Bands      *Bands        // in place of Threshold, Policy and PolicyFile; nil: none
	Size       int           // how many requests may wait for the workers of one model
	Instance   string        // of worker_selection in PolicyFile; "": the file's

	File       *File    // what PolicyFile holds; Read sets it; nil without one
	Overridden []string // a line for each flag that was given, and that PolicyFile sets otherwise
}

// maxQueued is how many requests wait for the workers of one model at most, each with its body in memory.
const maxQueued = 65536

// AddFlags declares the flags, and sets what has none.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	flags.Float(fs, &c.Threshold, "router-queue-threshold",
		"a request waits while every candidate has more prompt tokens waiting than `N` times its engine's tokens per "+
			"step. None, the default: never; also never if a candidate's tokens per step are not known "+
			"(maxNumBatchedTokens, or the model card's)")
	flags.Choice(fs, &c.Policy, "router-queue-policy", string(FCFS),
		"which waiting request goes next, `POLICY`: fcfs (the earliest, priorities counted as seconds), wspt (the "+
			"least prefill, weighted by priority), edf (the earliest deadline, by x-llm-d-slo-ttft-ms; one that "+
			"cannot be met is refused at once), or lcfs (the latest; for comparisons)", policies...)
	fs.StringVar(&c.PolicyFile, "router-policy-config", "",
		"YAML `FILE` of Dynamo's router policy, not of flags (--config): when requests of each policy class wait, in "+
			"which order, how many, and how the classes take turns; and the weights of its worker_selection. kvepp "+
			"serve reads it again when it changes. Its sections router and worker_selection take precedence over "+
			"flags")
	fs.DurationVar(&c.Timeout, "router-queue-timeout", 30*time.Second,
		"how long a request waits before it is refused; 0: as long as its client waits. Dynamo has no such limit")
	c.Size = maxQueued
	flags.Inherit(fs, "router-queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD",
		"router-queue-policy", "DYN_ROUTER_QUEUE_POLICY", "router-policy-config", "DYN_ROUTER_POLICY_CONFIG")
}

// AddHoldFlag declares the flag that has requests wait for the first worker.
func (c *Config) AddHoldFlag(fs *pflag.FlagSet) {
	fs.DurationVar(&c.Hold, "hold-when-empty", 0,
		"how long a request waits while no endpoint that may take it is in the pool, for example 60s: while engines "+
			"scale from zero. After that, and at once with 0, kvepp refuses it")
}

// AddInstanceFlag declares the flag that names an instance of the policy file's worker_selection.
func (c *Config) AddInstanceFlag(fs *pflag.FlagSet) {
	fs.StringVar(&c.Instance, "router-worker-selection-policy", "",
		"instance `NAME` of worker_selection in --router-policy-config whose weights apply, in place of those that "+
			"the file selects; default: only the flags' weights")
	flags.Inherit(fs, "router-worker-selection-policy", "DYN_ROUTER_WORKER_SELECTION_POLICY")
}

// SettingKeys are the keys under router in a policy file. Each sets a flag. Source: dynamo-kv-router 1.6.1,
// scheduling::policy_config.
var SettingKeys = strings.Fields(`disk_cache_hit_weight enable_session_prefix_index host_cache_hit_weight
	router_approximate_cache_policy router_assume_kv_reuse router_event_threads router_predicted_ttl_secs
	router_prefill_load_model router_replica_sync router_track_active_blocks router_track_output_blocks
	router_track_prefill_tokens router_tracking_hash router_tracking_key_file router_tracking_key_id router_ttl_secs
	serve_indexer shared_cache_type use_kv_events use_remote_indexer`)

// ParameterKeys are the parameters of Dynamo's policy of costs in a policy file. Each sets a flag; one that is absent
// leaves the flag as it is. Source: ai-dynamo 1.6.1, type dynamo-default-cost-fn, by its errors, and by the costs that
// a frontend logs.
var ParameterKeys = strings.Fields(`decode_active_request_weight disk_cache_hit_weight host_cache_hit_weight
	overlap_score_credit overlap_score_credit_decay prefill_load_scale router_temperature shared_cache_multiplier`)

// turnedOff are the values that mean for each of Dynamo's settings without a flag what kvepp does.
var turnedOff = []string{"false", "None", "none", "", "public-xxh3-v1"}

// FlagOf returns the flag that a key of a policy file sets; nil: fs has none.
func FlagOf(fs *pflag.FlagSet, key string) *pflag.Flag {
	name := strings.ReplaceAll(key, "_", "-")
	for _, beginning := range []string{"", "router-", "router-kv-"} {
		if flag := fs.Lookup(beginning + name); flag != nil {
			return flag
		}
	}
	return fs.Lookup("router-" + strings.TrimPrefix(name, "use-"))
}

// Read reads the policy file, if there is one, and sets the flags of fs that the file has keys for. The flags that
// others stand for must be set before, because the file takes precedence over them. absent says why there is no flag
// of a name.
func (c *Config) Read(fs *pflag.FlagSet, absent flags.Elsewhere) error {
	if c.PolicyFile == "" {
		if _, err := (*Selection)(nil).Parameters(c.Instance); err != nil {
			return fmt.Errorf("--router-worker-selection-policy: %w", err)
		}
		return nil
	}
	text, err := boundedfile.Read(c.PolicyFile, flags.MaxFileBytes)
	if err != nil {
		return fmt.Errorf("--router-policy-config: %w", err)
	}
	fail := func(err error) error { return fmt.Errorf("--router-policy-config %s: %w", c.PolicyFile, err) }
	if c.File, err = ParseFile(text); err != nil {
		return fail(err)
	}
	parameters, err := c.File.Selection.Parameters(c.Instance)
	if err != nil {
		return fail(err)
	}
	for _, part := range []struct {
		settings []Setting
		what     string
		keys     []string
	}{
		{c.File.Router, "router", SettingKeys},
		{parameters, "the parameters of dynamo-default-cost-fn", ParameterKeys},
	} {
		for _, s := range part.settings {
			if err := c.set(fs, s, part.what, part.keys, absent); err != nil {
				return fail(fmt.Errorf("line %d: %w", s.Line, err))
			}
		}
	}
	return nil
}

// set sets the flag of a key in the part of the policy file that is named what.
func (c *Config) set(fs *pflag.FlagSet, s Setting, what string, keys []string,
	absent flags.Elsewhere,
) error {
	if !slices.Contains(keys, s.Key) {
		return fmt.Errorf("%q is not a key of %s, which has: %s%s", s.Key, what, strings.Join(keys, ", "),
			suggest.DidYouMean(s.Key, "", keys))
	}
	flag := FlagOf(fs, s.Key)
	if flag == nil {
		why := absent(strings.ReplaceAll(s.Key, "_", "-"))
		switch {
		case slices.Contains(turnedOff, s.Value):
			return nil
		case why != nil:
			return fmt.Errorf("%s %q: %w", s.Key, s.Value, why)
		}
		return fmt.Errorf("%s: %s has no flag for it; leave this key out", s.Key, fs.Name())
	}
	var (
		err           error
		before, given = flag.Value.String(), flag.Changed
	)
	if s.Value == "None" {
		flag.Changed, err = false, flag.Value.Set(flag.DefValue)
	} else {
		err = fs.Set(flag.Name, s.Value)
	}
	if given && flag.Value.String() != before {
		c.Overridden = append(c.Overridden, fmt.Sprintf("--%s: %s in --router-policy-config, line %d, takes precedence",
			flag.Name, s.Key, s.Line))
	}
	flags.Implied(flag, "--router-policy-config")
	if err != nil {
		return fmt.Errorf("%s %q: %s", s.Key, s.Value, flags.Takes(flag, s.Value))
	}
	return nil
}

// Validate returns an error for the first setting that is out of range.
func (c *Config) Validate() error {
	if t := c.Threshold; t != nil && !(*t >= 0 && *t <= math.MaxFloat64) { // also what is not a number
		return fmt.Errorf("--router-queue-threshold %v: must be a finite number of at least 0, for example 2, or None",
			*t)
	}
	if c.Bands != nil && (c.Threshold != nil || c.PolicyFile != "") {
		return errors.New("flowControl of EndpointPickerConfig says when requests wait: leave out " +
			"--router-queue-threshold and --router-policy-config, or the feature gate")
	}
	return cmp.Or(flags.NotNegative("router-queue-timeout", c.Timeout), flags.NotNegative("hold-when-empty", c.Hold))
}

// Room returns how requests wait; nil: never.
func (c *Config) Room() *RoomConfig {
	if b := c.Bands; b != nil {
		return &RoomConfig{Profiles: &Profiles{others: b.Profile()}, Bound: c.Size, Hold: b.MaxWait}
	}
	profiles := c.File.Profiles(Single(Policy(c.Policy), c.Threshold))
	if !profiles.Waits() && c.Hold == 0 {
		return nil
	}
	return &RoomConfig{Profiles: profiles, Bound: c.Size, Timeout: c.Timeout, Hold: c.Hold}
}

// AddUnused adds the flags that have no effect. held says that requests wait for the admission of conversations.
func (c *Config) AddUnused(unused *flags.Unused, held bool) {
	unused.Lines = append(unused.Lines, c.Overridden...)
	waits := c.Hold > 0 || c.File.Profiles(Single("", c.Threshold)).Waits()
	switch {
	case c.Bands != nil:
		unused.Add("flowControl of EndpointPickerConfig says this", "router-queue-policy", "router-queue-timeout",
			"hold-when-empty")
	case !waits && held:
		unused.Add("requests that wait for admission go in the order of arrival: neither --router-queue-threshold nor "+
			"--router-policy-config makes others wait", "router-queue-policy")
	case !waits:
		unused.Add("no request ever waits: none of --router-queue-threshold, --router-policy-config and "+
			"--hold-when-empty says when", "router-queue-policy", "router-queue-timeout")
	case c.File != nil && c.File.HasRoot():
		unused.Add("the policy classes of --router-policy-config say this", "router-queue-threshold",
			"router-queue-policy")
	}
}
