package router

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/prompt"
)

// AddFlags declares the flags, each in its section of help.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.addHints(fs)
	flags.Section(fs, "What clients may say")
	fs.BoolVar(&c.StrictModel, "strict-model", false,
		"answer 404 for a model that neither --model, --lora, --tokenizer-url, an endpoint nor KV events name. Off: "+
			"kvepp routes such requests by load to endpoints that do not say which model they serve")
	flags.Section(fs, "Models and prompts")
	fs.IntVar(&c.Fallbacks, "fallback-endpoints", 0,
		"name up to `N` further endpoints, the next cheapest, at which Envoy may retry the request "+
			"(manifests/envoy/stock-engines.yaml). Needs Envoy's override_host policy and a retry_policy; kvepp "+
			"names one endpoint to a proxy that does not show that it takes several. Not with Dynamo's frontends")
	fs.DurationVar(&c.PickTimeout, "pick-timeout", DefaultPickTimeout,
		"how long kvepp may take to find a prompt's token ids; after that it routes the request by load. Waiting in "+
			"the queue does not count")
	flags.Section(fs, "Limits of requests")
	fs.BoolVar(&c.TrackOutput, "router-track-output-blocks", false,
		"also count the blocks of responses while they are generated. If the request gives its expected length "+
			"(nvext.agent_hints.osl), blocks that it alone holds count less the nearer its end is")
	flags.Negatable(fs, "router-track-output-blocks")
	flags.Inherit(fs, "router-track-output-blocks", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS")
	flags.Section(fs, "How kvepp chooses")
	c.Thresholds.AddFlags(fs)
	fs.Lookup("active-decode-blocks-threshold").Usage += ". /busy_threshold at --admin-address changes it for one model"
	flags.Section(fs, "Overload and the queue")
}

func (c *Config) addHints(fs *pflag.FlagSet) {
	fs.BoolVar(&c.IgnoreHints, "ignore-client-hints", false,
		"ignore what clients say about the routing of their requests, in nvext and in headers: priorities, expected "+
			"lengths, sessions, tenants, overrides and pins. kvepp also removes Dynamo's own headers among these, and "+
			"leaves the body as it is")
	fs.BoolVar(&c.Pinning, "allow-client-pinning", false,
		"let requests name their worker, in nvext: backend_instance_id or decode_worker_id, with dp_rank; "+
			"prefill_worker_id, with prefill_dp_rank. Off: kvepp removes these from the body, and counts them")
	fs.BoolVar(&c.InjectTokens, "inject-token-data", false,
		"send a prompt's token ids to Dynamo's frontend (nvext.token_data), which then does not tokenize it again; a "+
			"body grows by about 6 bytes a token. Only for chats and completions with one text prompt and no "+
			"annotations, and for workers whose model cards name kvepp's tokenizer and template")
	fs.BoolVar(&c.TenantSalt, "tenant-cache-salt", false,
		"with --engine vllm: write the request's tenant (x-tenant-id), or else its cache namespace "+
			"(nvext.cache_salt, cache_salt), into the body as cache_salt, so that tenants share no cached blocks")
}

// AddFlags declares the flags.
func (t *Thresholds) AddFlags(fs *pflag.FlagSet) {
	flags.Float(fs, &t.ActiveDecodeBlocks, "active-decode-blocks-threshold",
		"an endpoint is overloaded while active requests hold more than this `FRACTION` (0 to 1) of its KV blocks. "+
			"It is then no candidate; if all are overloaded, kvepp refuses requests at once. None: no limit")
	flags.Uint(fs, &t.ActivePrefillTokens, "active-prefill-tokens-threshold",
		"an endpoint is overloaded while more than this many prompt `TOKENS` wait to be prefilled. None: no limit")
	flags.Float(fs, &t.ActivePrefillTokensFrac, "active-prefill-tokens-threshold-frac",
		"the same limit in `MULTIPLES` of the tokens that the engine takes in one step (maxNumBatchedTokens, or the "+
			"model card's); without effect if that number is not known")
	flags.Inherit(fs, "active-decode-blocks-threshold", "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
		"active-prefill-tokens-threshold", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
		"active-prefill-tokens-threshold-frac", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC")
}

// ReadTokens reports whether a threshold is a number of prompt tokens.
func (t *Thresholds) ReadTokens() bool {
	return t.ActivePrefillTokens != nil || t.ActivePrefillTokensFrac != nil
}

// MaxFallbacks keeps the header of a decision short.
const MaxFallbacks = 8

// DefaultPickTimeout is that of --pick-timeout.
const DefaultPickTimeout = 2 * time.Second

// Validate returns an error for the first setting that does not go with the others, or with the engine. Scoring and
// Engine must be set.
func (c *Config) Validate() error {
	switch {
	case c.TrackOutput && !c.Scoring.TrackActiveBlocks:
		return errors.New("--router-track-output-blocks needs the active blocks that --no-router-track-active-blocks " +
			"leaves out: give one of the two")
	case c.InjectTokens && c.Engine != prompt.Dynamo:
		return fmt.Errorf("--inject-token-data: only Dynamo's frontends take token ids beside a prompt, and --engine "+
			"is %s; leave it out", c.Engine)
	case c.TenantSalt && c.Engine != prompt.VLLM:
		return fmt.Errorf("--tenant-cache-salt is for stock vLLM, and --engine is %s; leave it out: Dynamo's "+
			"frontends follow x-tenant-id themselves", c.Engine)
	case c.TenantSalt && c.IgnoreHints:
		return errors.New("--tenant-cache-salt follows x-tenant-id, and --ignore-client-hints drops it; leave one of " +
			"them out")
	case c.Fallbacks > 0 && c.Engine == prompt.Dynamo:
		return errors.New("--fallback-endpoints: a frontend of Dynamo's serves for the worker that a header names, " +
			"so a retry at another frontend would still name the first worker; leave it out, or give --engine vllm, " +
			"sglang or trtllm if that is what the endpoints run")
	}
	return cmp.Or(flags.Between("fallback-endpoints", c.Fallbacks, 0, MaxFallbacks),
		flags.Positive("pick-timeout", c.PickTimeout))
}
