package scoring

import (
	"fmt"
	"math"
	"slices"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// Set sets the mode that has a name.
func (m *Mode) Set(name string) (err error) {
	*m, err = ParseMode(name)
	return err
}

// Type is for help.
func (*Mode) Type() string { return "string" }

// Set sets the policy that has a name.
func (p *Policy) Set(name string) (err error) {
	*p, err = ParsePolicy(name)
	return err
}

// Type is for help.
func (*Policy) Type() string { return "string" }

// AddFlags declares the flags of mode and policy, and those of AddWeightFlags. c has their defaults then.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	*c = DefaultConfig()
	c.Policy = Time
	fs.Var(&c.Mode, "router-mode",
		"how kvepp chooses a worker, `MODE`: kv (by cached blocks and load), round-robin, random, power-of-two (the "+
			"less loaded of two random workers), least-loaded, device-aware-weighted or direct (the worker that the "+
			"request names). Only kv reads prompts and KV events; direct needs --allow-client-pinning. kvepp ignores "+
			"DYN_ROUTER_MODE=direct, which is meant for the frontends behind it")
	flags.Values(fs, "router-mode", ModeNames()...)
	fs.Var(&c.Policy, "router-policy",
		"how the mode kv prices workers, `POLICY`: time (by the time that a choice costs the request and those on the "+
			"worker, at speeds that kvepp learns) or dynamo (in blocks, as Dynamo does). Without this flag, a weight "+
			"of Dynamo's cost, a temperature, --load-aware or another mode selects dynamo. With time, these weights "+
			"are refused, and --router-temperature is in milliseconds")
	flags.Values(fs, "router-policy", PolicyNames()...)
	flags.Inherit(fs, "router-mode", "DYN_ROUTER_MODE")
	c.addWeights(fs)
}

// AddWeightFlags declares the flags of the cost function. c has their defaults then.
func (c *Config) AddWeightFlags(fs *pflag.FlagSet) {
	*c = DefaultConfig()
	c.addWeights(fs)
}

func (c *Config) addWeights(fs *pflag.FlagSet) {
	fs.Float64Var(&c.OverlapScoreCredit, "router-kv-overlap-score-credit", c.OverlapScoreCredit,
		"value of a cached block, in blocks that need no prefill. 0: routing ignores caches")
	fs.Float64Var(&c.OverlapScoreCreditDecay, "router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay,
		"how much the credit shrinks on workers with more waiting prefill than the least busy one. 0: not at all")
	fs.Float64Var(&c.HostCacheHitWeight, "router-host-cache-hit-weight", c.HostCacheHitWeight,
		"value of a cached block in the worker's host memory; --router-kv-overlap-score-credit is the value on its "+
			"device")
	fs.Float64Var(&c.DiskCacheHitWeight, "router-disk-cache-hit-weight", c.DiskCacheHitWeight,
		"value of a cached block on disk or in external storage")
	fs.Float64Var(&c.PrefillLoadScale, "router-prefill-load-scale", c.PrefillLoadScale,
		"weight of blocks to prefill relative to blocks held for decoding; higher favours time to first token")
	fs.Float64Var(&c.DecodeActiveRequestWeight, "router-decode-active-request-weight", c.DecodeActiveRequestWeight,
		"cost of each request active on a worker, in blocks")
	fs.Float64Var(&c.Temperature, "router-temperature", c.Temperature,
		"0: the cheapest worker, ties at random. Above 0: a softmax over costs; higher spreads requests more evenly")
	fs.BoolVar(&c.TrackActiveBlocks, "router-track-active-blocks", c.TrackActiveBlocks,
		"count the blocks that active requests hold")
	fs.BoolVar(&c.TrackPrefillTokens, "router-track-prefill-tokens", c.TrackPrefillTokens,
		"count the prompt tokens that workers have yet to prefill")
	fs.BoolVar(&c.AssumeKVReuse, "router-assume-kv-reuse", c.AssumeKVReuse,
		"count a block once if several requests of one worker share it")
	flags.Negatable(fs, "router-track-active-blocks", "router-track-prefill-tokens", "router-assume-kv-reuse")
	flags.Inherit(fs, "router-kv-overlap-score-credit", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
		"router-kv-overlap-score-credit-decay", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
		"router-host-cache-hit-weight", "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
		"router-disk-cache-hit-weight", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
		"router-prefill-load-scale", "DYN_ROUTER_PREFILL_LOAD_SCALE",
		"router-decode-active-request-weight", "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
		"router-temperature", "DYN_ROUTER_TEMPERATURE",
		"router-track-active-blocks", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
		"router-track-prefill-tokens", "DYN_ROUTER_TRACK_PREFILL_TOKENS",
		"router-assume-kv-reuse", "DYN_ROUTER_ASSUME_KV_REUSE")
}

// DynamoWeights are the flags of weights that only the policy Dynamo reads.
var DynamoWeights = []string{
	"router-kv-overlap-score-credit", "router-kv-overlap-score-credit-decay", "router-prefill-load-scale",
	"router-decode-active-request-weight",
}

// ValidateFlags returns what Validate does, and an error if the policy Time is beside a setting that it does not read.
func (c *Config) ValidateFlags(fs *pflag.FlagSet) error {
	if err := c.Validate(); err != nil || c.Policy != Time {
		return err
	}
	if c.Mode != KV {
		return fmt.Errorf("--router-policy time prices workers in --router-mode kv only, not %v: leave out one of "+
			"the two", c.Mode)
	}
	for _, name := range DynamoWeights {
		if !fs.Changed(name) {
			continue
		}
		names := "--" + name
		if variables := flags.VariablesOf(fs.Lookup(name)); len(variables) > 1 {
			names += " or " + variables[1]
		}
		return fmt.Errorf("%s is a weight of Dynamo's cost, which --router-policy time does not read: leave out one "+
			"of the two", names)
	}
	return nil
}

// Validate reports the first weight that is negative, infinite or NaN, and an unknown mode.
func (c *Config) Validate() error {
	d := DefaultConfig()
	for _, w := range []struct {
		flag          string
		value, normal float64
	}{
		{"router-kv-overlap-score-credit", c.OverlapScoreCredit, d.OverlapScoreCredit},
		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay, d.OverlapScoreCreditDecay},
		{"router-prefill-load-scale", c.PrefillLoadScale, d.PrefillLoadScale},
		{"router-decode-active-request-weight", c.DecodeActiveRequestWeight, d.DecodeActiveRequestWeight},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight, d.HostCacheHitWeight},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight, d.DiskCacheHitWeight},
		{"shared-cache-multiplier", c.SharedCacheMultiplier, d.SharedCacheMultiplier},
		{"router-temperature", c.Temperature, d.Temperature},
	} {
		if !(w.value >= 0) || math.IsInf(w.value, 0) { // also NaN
			return fmt.Errorf("--%s %v: must be a finite number of at least 0, for example %v", w.flag, w.value,
				w.normal)
		}
	}
	switch {
	case int(c.Mode) >= len(modeNames):
		return fmt.Errorf("scoring: unknown mode %d", c.Mode)
	case int(c.Policy) >= len(policyNames):
		return fmt.Errorf("scoring: unknown policy %d", c.Policy)
	case c.Mode == DeviceAwareWeighted && (c.CUDAToCPURatio < 1 || c.CUDAToCPURatio > maxCUDAToCPURatio):
		return fmt.Errorf("scoring: ratio of accelerator to CPU is %d, but must be 1 to %d", c.CUDAToCPURatio,
			maxCUDAToCPURatio)
	}
	return nil
}

// prefillName is the value of --router-prefill-load-model.
type prefillName struct {
	linear *bool
	name   *string
}

func (p prefillName) Set(name string) error {
	if !slices.Contains(prefillNames, name) {
		return fmt.Errorf("unknown model %q", name)
	}
	*p.linear, *p.name = name != "none", name
	return nil
}

func (p prefillName) String() string {
	if p.name == nil {
		return ""
	}
	return *p.name
}

func (prefillName) Type() string { return "string" }

var prefillNames = []string{"none", "linear", "aic", "ais"}

// AddFlags declares the flags.
func (m *PrefillModel) AddFlags(fs *pflag.FlagSet) {
	name := "none"
	fs.Var(prefillName{&m.Linear, &name}, "router-prefill-load-model",
		"`MODEL`, how waiting prompts count during their prefill: none (in full until the first token), or linear "+
			"(less by what the worker has prefilled since, at --router-prefill-tokens-per-second). kvepp treats aic "+
			"and ais, Dynamo's models, as linear, and refuses their --aic-* and --ais-* flags")
	flags.Values(fs, "router-prefill-load-model", prefillNames...)
	fs.Float64Var(&m.TokensPerSecond, "router-prefill-tokens-per-second", 0,
		"how many prompt `TOKENS` a worker prefills in a second. 0: learned for each worker from the time to first "+
			"token, after 5 requests that waited for no other. Without linear it only ends the prefill load of "+
			"requests with stream: false")
	flags.Inherit(fs, "router-prefill-load-model", "DYN_ROUTER_PREFILL_LOAD_MODEL")
}

// Validate reports a speed that is negative, infinite or NaN, and a model without the prompts that c counts.
func (m PrefillModel) Validate(c *Config) error {
	if m.Linear && !c.TrackPrefillTokens {
		return fmt.Errorf("--router-prefill-load-model needs the prompt tokens that --no-router-track-prefill-tokens " +
			"leaves out: give one of the two")
	}
	if !(m.TokensPerSecond >= 0) || math.IsInf(m.TokensPerSecond, 0) {
		return fmt.Errorf("--router-prefill-tokens-per-second %v: must be a finite number of at least 0",
			m.TokensPerSecond)
	}
	return nil
}
