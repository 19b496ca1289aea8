package main

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
	"kvepp/scoring"
)

// scheduling is what says how a worker is chosen and what a running request counts for.
type scheduling struct {
	mode            string
	inheritedDirect bool // the environment said DYN_ROUTER_MODE=direct

	loadAware    bool
	trackOutput  bool
	prefillModel string
	prefillSpeed float64

	sharedCache           string
	sharedCacheMultiplier float64 // NaN when not given
	replicaSync           bool
	serveIndexer          bool
	sessionPrefixes       bool

	tracking
	conditionalDisagg           bool // refused when set, as is the next
	conditionalDisaggConfig     string
	prefillPolicy, decodePolicy string
}

// add declares the flags, over s and c, with the defaults in them.
func (s *scheduling) add(f *pflag.FlagSet, c *scoring.Config) {
	d := scoring.DefaultConfig()
	f.StringVar(
		&s.mode,
		"router-mode",
		d.Mode.String(),
		"how a worker is chosen: `MODE` kv (cached blocks and load), round-robin, random, power-of-two (of two at "+
			"random the one with fewer requests), least-loaded (the fewest requests), device-aware-weighted, or "+
			"direct (the worker that the request names, with --allow-client-pinning). All but kv read no prompts: "+
			"nothing is tokenized, and no KV events are wanted. DYN_ROUTER_MODE=direct, which is meant for the "+
			"frontends behind kvepp, changes nothing",
	)
	f.IntVar(
		&c.CUDAToCPURatio,
		"encoder-cuda-to-cpu-ratio",
		d.CUDAToCPURatio,
		"with device-aware-weighted, how many times the requests of a worker on a CPU (deviceType: cpu) one with an "+
			"accelerator is given",
	)
	f.BoolVar(
		&s.loadAware,
		"load-aware",
		false,
		"choose by load alone, and count every request's blocks in full: sets --router-kv-overlap-score-credit 0, "+
			"--no-router-kv-events, --no-router-assume-kv-reuse, and the tracking of active blocks and prefill "+
			"tokens. Dynamo's preset",
	)
	f.StringVar(
		&s.sharedCache,
		"shared-cache-type",
		"none",
		"`TYPE`: none; hicache is refused: kvepp asks no cache that workers share (SGLang's HiCache in Mooncake). "+
			"Blocks in a worker's host memory, on its disk and in external storage are known from its KV events",
	)
	f.Float64Var(
		&s.sharedCacheMultiplier,
		"shared-cache-multiplier",
		math.NaN(),
		"worth of a block that only such a cache holds, 0 to 1; without effect, as none is asked; nor has a "+
			"request's shared_cache_multiplier any",
	)
	f.Lookup("shared-cache-multiplier").DefValue = "0" // NaN means not given, which help does not say
	f.BoolVar(
		&s.trackOutput,
		"router-track-output-blocks",
		false,
		"also count the blocks of answers while they are generated; where the request says how long its answer will "+
			"be (nvext.agent_hints.osl), what it alone holds counts for less the nearer the end is",
	)
	f.StringVar(
		&s.prefillModel,
		"router-prefill-load-model",
		"none",
		"`MODEL`, how waiting prompts count while they are prefilled: none (in full until the first of the answer "+
			"shows), or linear (less by what the worker has done since, at --router-prefill-tokens-per-second). aic "+
			"and ais, Dynamo's models, are taken for linear; their --aic-* and --ais-* flags are accepted and not used",
	)
	f.Float64Var(
		&s.prefillSpeed,
		"router-prefill-tokens-per-second",
		0,
		"how many prompt `TOKENS` a worker prefills in a second. 0: learned, for each worker, from the times to the "+
			"first of its answers, once 20 were seen. Without linear only the prefill load of requests with stream: "+
			"false ends by it",
	)
	f.BoolVar(&s.replicaSync, "router-replica-sync", false, "without effect: load books are not shared between kvepps")
	f.BoolVar(&s.serveIndexer, "serve-indexer", false, "without effect: the index answers at --admin-address")
	f.BoolVar(
		&s.sessionPrefixes,
		"enable-session-prefix-index",
		false,
		"without effect: an index that in Dynamo too decides nothing",
	)
	f.BoolVar(
		&s.conditionalDisagg,
		"router-conditional-disagg",
		false,
		"refused: where there are prefill workers every request has one, without which Dynamo's frontends in direct "+
			"mode answer 500",
	)
	f.StringVar(&s.conditionalDisaggConfig, "router-conditional-disagg-config", "", "`JSON`; refused likewise")
	f.StringVar(
		&s.prefillPolicy,
		"router-prefill-policy",
		"default",
		"`NAME` of what chooses prefill workers; no other than the default, since kvepp loads no policies of others",
	)
	f.StringVar(&s.decodePolicy, "router-decode-policy", "default", "`NAME` of what chooses decode workers; likewise")
	s.tracking.add(f)
	for _, model := range []string{"aic", "ais"} {
		for _, name := range performanceModel {
			f.String(model+"-"+name, "", "accepted, and not used: see --router-prefill-load-model")
			f.Lookup(model + "-" + name).Hidden = true
		}
	}
}

// performanceModel are the flags of Dynamo's prefill load models, behind --aic- and --ais-. Source: ai-dynamo 1.6.1,
// ais_perf_args.
var performanceModel = []string{
	"perf-config",
	"backend",
	"system",
	"backend-version",
	"tp-size",
	"model-path",
	"moe-tp-size",
	"moe-ep-size",
	"attention-dp-size",
	"nextn",
	"nextn-accept-rates",
	"mtp-seed",
}

// prefill returns how waiting prompts count.
func (s *scheduling) prefill() scoring.PrefillModel {
	return scoring.PrefillModel{Linear: s.prefillModel != "none", TokensPerSecond: s.prefillSpeed}
}

// unused says what was given and means nothing.
func (s *scheduling) unused(idle *idle) {
	if s.inheritedDirect {
		idle.said = append(
			idle.said,
			"DYN_ROUTER_MODE=direct: says how Dynamo's frontends run behind kvepp, which chooses for them, by "+
				"--router-mode "+s.mode,
		)
	}
	if s.prefillModel == "aic" || s.prefillModel == "ais" {
		idle.said = append(
			idle.said,
			"--router-prefill-load-model "+s.prefillModel+
				": taken for linear, at the speed that --router-prefill-tokens-per-second says or that is learned",
		)
	}
	for _, model := range []string{"aic", "ais"} {
		for _, name := range performanceModel {
			idle.add("of a model that kvepp does not run, see --router-prefill-load-model", model+"-"+name)
		}
	}
	if !math.IsNaN(s.sharedCacheMultiplier) {
		idle.said = append(idle.said, "--shared-cache-multiplier: there is no shared cache that kvepp asks")
	}
	if s.replicaSync {
		idle.said = append(
			idle.said,
			"--router-replica-sync: load books are not shared between kvepps, each knows the requests that it routed",
		)
	}
	if s.serveIndexer {
		idle.said = append(idle.said, "--serve-indexer: the index answers at --admin-address")
	}
	if s.sessionPrefixes {
		idle.said = append(
			idle.said,
			"--enable-session-prefix-index: kvepp has no index of sessions' prefixes, by which in Dynamo too nothing "+
				"is decided",
		)
	}
}

// inherited is getenv without Dynamo's router mode direct: a pod's environment has it for the frontend, and says
// nothing of how the endpoint picker that the frontend relies on should choose.
func (s *scheduling) inherited(getenv func(string) string) func(string) string {
	return func(name string) string {
		value := getenv(name)
		if name == dynamoEnv["router-mode"] && value == scoring.Direct.String() {
			s.inheritedDirect = true
			return ""
		}
		if name == dynamoEnv["system-port"] && value == "-1" {
			return "0" // none, in either
		}
		return value
	}
}

// check sets in c what the flags say in words, and returns whether KV events are wanted, given that kvEvents says so.
// Pinning says that requests may name their worker.
func (s *scheduling) check(c *scoring.Config, kvEvents, pinning bool) (bool, error) {
	mode, err := scoring.ParseMode(s.mode)
	switch {
	case err != nil:
		return false, oneOf("router-mode", s.mode, scoring.ModeNames()...)
	case mode == scoring.Direct && !pinning:
		return false, errors.New(
			"--router-mode direct sends each request to the worker that it names, and needs --allow-client-pinning, " +
				"without --ignore-client-hints. (Dynamo's frontends run in direct mode behind kvepp, which chooses " +
				"for them: that is theirs to be told; leave it out here)",
		)
	}
	c.Mode = mode
	if s.loadAware {
		c.OverlapScoreCredit, kvEvents = 0, false
		c.TrackActiveBlocks, c.TrackPrefillTokens, c.AssumeKVReuse = true, true, false
	}
	switch {
	case s.sharedCache != "none":
		return false, fmt.Errorf(
			"--shared-cache-type %q: kvepp asks no cache that workers share; blocks in host memory, on disk and in "+
				"external storage are known where the engine's events name them. Leave the flag out",
			s.sharedCache,
		)
	case !math.IsNaN(s.sharedCacheMultiplier) && !(s.sharedCacheMultiplier >= 0 && s.sharedCacheMultiplier <= 1):
		return false, fmt.Errorf("--shared-cache-multiplier %v: must be from 0 to 1", s.sharedCacheMultiplier)
	case !slices.Contains([]string{"none", "linear", "aic", "ais"}, s.prefillModel):
		return false, fmt.Errorf(
			"--router-prefill-load-model %q: must be none or linear (aic and ais are taken for linear)%s",
			s.prefillModel,
			suggest.DidYouMean(s.prefillModel, "", []string{"none", "linear"}),
		)
	case s.prefillModel != "none" && !c.TrackPrefillTokens:
		return false, errors.New(
			"--router-prefill-load-model needs the prompt tokens that --no-router-track-prefill-tokens leaves out: " +
				"give one of the two",
		)
	case s.trackOutput && !c.TrackActiveBlocks:
		return false, errors.New(
			"--router-track-output-blocks needs the active blocks that --no-router-track-active-blocks leaves out: " +
				"give one of the two",
		)
	}
	if err := s.prefill().Validate(); err != nil {
		return false, fmt.Errorf("--router-prefill-tokens-per-second: %w", err)
	}
	return kvEvents, nil
}

// refused says which of Dynamo's settings that kvepp does not follow was changed.
func (s *scheduling) refused() error {
	switch {
	case s.conditionalDisagg || s.conditionalDisaggConfig != "":
		return errors.New(
			"--router-conditional-disagg: kvepp names a prefill worker for every request where there are prefill " +
				"workers, because Dynamo's frontends in direct mode answer 500 to one without; leave this flag and " +
				"--router-conditional-disagg-config out. (Aggregated workers beside the others do serve where that " +
				"costs less)",
		)
	case s.prefillPolicy != "default" || s.decodePolicy != "default":
		return errors.New(
			"--router-prefill-policy and --router-decode-policy must be default: kvepp chooses by Dynamo's built-in " +
				"policy and loads no other; leave them out",
		)
	}
	return s.tracking.check()
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
func (a alias) Type() string   { return a.of.Value.Type() }

// addAlias declares an older name of a flag, and what else help should say.
func addAlias(f *pflag.FlagSet, name, of, more string) {
	target := f.Lookup(of)
	f.VarPF(alias{target}, name, "", "older name of --"+of+more).NoOptDefVal = target.NoOptDefVal
	if target.Value.Type() == "bool" {
		f.VarPF(negated{f.Lookup(name)}, "no-"+name, "", "").NoOptDefVal = "true"
	}
}

// addAliases declares the older names of flags that other functions declared.
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
