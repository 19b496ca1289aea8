package scoring

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/kvblock"
)

// Disaggregation says for which prompts a decode worker works alone although there are prefill workers. The zero value:
// for none. JSON keys are Dynamo's, except the last two.
//
// Source: dynamo-kv-router 1.6.1, conditional_disagg; the field LeastPrompt: llm-d-router v0.11,
// prefix-based-pd-decider.
type Disaggregation struct {
	On     bool   `json:"-"`
	Policy string `json:"policy"` // one of the constants below

	// A decode worker that has to compute fewer tokens of a prompt than EffISL, and less than this share of the prompt,
	// computes them: of ISLBounding and ISLOrLoad.
	EffISL      int     `json:"eff_isl_threshold"`
	EffISLRatio float64 `json:"eff_isl_ratio_threshold"`
	// PrefillBusy is above how many steps of waiting tokens a prefill worker is busy: of PrefillLoad and ISLOrLoad.
	PrefillBusy *float64 `json:"prefill_busy_threshold"`
	// DecodeBusy is above which share of its KV blocks a decode worker computes no prompt. nil: none.
	DecodeBusy *float64 `json:"decode_busy_threshold"`
	// TransferMS is how long a decode worker takes to fetch a token's blocks, in milliseconds, until that is learned:
	// of ByCost.
	TransferMS float64 `json:"pd_transfer_ms_per_token"`
	// Via is how a decode worker is told to work alone: ViaSidecar or ViaNvext. Empty: ViaSidecar.
	Via string `json:"via"`
	// LeastPrompt is how many tokens a prompt has at least that a prefill worker computes.
	LeastPrompt int `json:"-"`

	config string            // of the flag
	single map[string]string // values of the keys that have a variable of their own
}

// The policies. The first three are Dynamo's.
const (
	ISLBounding = "isl_bounding" // what is to compute is short
	PrefillLoad = "prefill_load" // the prefill worker is busy
	ISLOrLoad   = "isl_or_load"  // either
	ByCost      = "cost"         // the decode worker takes less time, by learned speeds
	Never       = "never"        // to compare with: no prompt has a prefill worker
)

// Values of Disaggregation.Via.
const (
	ViaSidecar = "sidecar" // llm-d's, before the decode engine, is told no prefill worker
	ViaNvext   = "nvext"   // Dynamo's frontend in KV mode is told the decode worker in the body
)

// PrefillLeg returns the pricing of prefill workers: an engine that only prefills holds no blocks for decoding.
//
// Source: dynamo-llm 1.6.1, discovery: the configuration of a decode endpoint's prefill router.
func (c Config) PrefillLeg() Config {
	c.TrackActiveBlocks = false
	return c
}

// DecodeLeg returns the pricing of decode workers beside a prefill worker: by load alone, because every request's
// blocks come from there. With conditional, decode workers may work alone, and with the policy Dynamo those that hold
// blocks of the prompt are cheaper.
//
// Source: dynamo-llm 1.6.1, kv_router::prefill_router: the configuration of a disaggregated request's decode
// part.
func (c Config) DecodeLeg(conditional bool) Config {
	if c.AssumeKVReuse, c.TrackPrefillTokens, c.DecodeRole = false, false, conditional; !conditional {
		c.OverlapScoreCredit = 0
	}
	return c
}

// BypassOutcome says whether a decode worker works alone, or why not.
type BypassOutcome string

// The outcomes.
const (
	Bypassed      BypassOutcome = "bypassed"
	BypassISL     BypassOutcome = "isl"            // too many tokens to compute
	BypassRatio   BypassOutcome = "ratio"          // too large a share of the prompt to compute
	PrefillCalm   BypassOutcome = "prefill_calm"   // the prefill worker is not busy
	PairCheaper   BypassOutcome = "cost"           // a prefill worker is faster
	DecodeBusy    BypassOutcome = "decode_busy"    // the decode worker holds too many blocks
	DecodeUnknown BypassOutcome = "decode_unknown" // how many it has is not known
	NoPrefill     BypassOutcome = "no_prefill"     // alone: there is no prefill worker
	PrefillLost   BypassOutcome = "prefill_lost"   // alone: the prefill workers are ejected, cordoned or overloaded
)

// BypassOutcomes are all of them.
var BypassOutcomes = []BypassOutcome{Bypassed, BypassISL, BypassRatio, PrefillCalm, PairCheaper, DecodeBusy,
	DecodeUnknown, NoPrefill, PrefillLost}

// Alone is what a decode worker would have to do to work alone on a prompt.
type Alone struct {
	Prompt, Cached int // tokens; Cached on the decode worker, weighted by tier
	Blocks         int // that its active requests would hold
	KVBlocks       int // that it has room for; 0: not known
	Cost           float64
	// PrefillBusy reports whether the prefill worker that would be chosen has more tokens waiting than so many steps
	// take. PairCost returns the cost of a prefill worker and a decode worker.
	PrefillBusy func(steps float64) bool
	PairCost    func() float64
}

// Judge applies the policy to a prompt.
func (d *Disaggregation) Judge(a *Alone) BypassOutcome {
	outcome := Bypassed
	switch d.Policy {
	case ISLBounding, ISLOrLoad:
		net := a.Prompt - min(a.Cached, a.Prompt)
		switch {
		case a.Prompt < d.LeastPrompt:
		case net >= d.EffISL:
			outcome = BypassISL
		case float64(net)/float64(max(a.Prompt, 1)) >= d.EffISLRatio:
			outcome = BypassRatio
		}
		if outcome != Bypassed && d.Policy == ISLOrLoad && a.PrefillBusy(*d.PrefillBusy) {
			outcome = Bypassed
		}
	case PrefillLoad:
		if !a.PrefillBusy(*d.PrefillBusy) {
			outcome = PrefillCalm
		}
	}
	switch {
	case outcome != Bypassed || d.Policy == Never:
	case d.DecodeBusy != nil && a.KVBlocks == 0:
		return DecodeUnknown
	case d.DecodeBusy != nil && float64(a.Blocks) > *d.DecodeBusy*float64(a.KVBlocks):
		return DecodeBusy
	case d.Policy == ByCost && a.PairCost() < pairShare*a.Cost:
		return PairCheaper
	}
	return outcome
}

// WaitsForPrefill reports whether a request waits while the prefill workers are busy, although decode workers are not.
func (d *Disaggregation) WaitsForPrefill() bool { return !d.On || d.Policy == ISLBounding }

const (
	disaggFlag       = "router-conditional-disagg"
	disaggConfigFlag = disaggFlag + "-config"
)

// disaggVariables are the keys that Dynamo also reads from variables of their own.
var disaggVariables = []string{"policy", "eff_isl_threshold", "eff_isl_ratio_threshold", "prefill_busy_threshold",
	"decode_busy_threshold"}

// disaggValue is the value of one of these keys.
type disaggValue struct {
	of  *Disaggregation
	key string
}

func (v disaggValue) Set(text string) error { v.of.single[v.key] = text; return nil }
func (v disaggValue) String() string {
	if v.of == nil {
		return ""
	}
	return v.of.single[v.key]
}
func (disaggValue) Type() string { return "string" }

// AddFlags declares the flags. The help has the first alone, which names the second.
func (d *Disaggregation) AddFlags(fs *pflag.FlagSet) {
	*d = Disaggregation{single: map[string]string{}}
	fs.BoolVar(&d.On, disaggFlag, false,
		"let a decode worker compute prompts that it mostly holds, or while prefill workers are busy. The policy "+
			"is in --"+disaggConfigFlag+" JSON, with Dynamo's keys and policies, and the policy cost "+
			"(docs/disaggregation.md). Needs --prefiller-header, or \"via\":\"nvext\" in the JSON")
	flags.Negatable(fs, disaggFlag)
	fs.StringVar(&d.config, disaggConfigFlag, "", "the policy of --"+disaggFlag+", as `JSON`")
	flags.Inherit(fs, disaggFlag, "DYN_ROUTER_CONDITIONAL_DISAGG",
		disaggConfigFlag, "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG")
	fs.Lookup(disaggConfigFlag).Hidden = true
	for _, key := range disaggVariables {
		name := disaggFlag + "-" + strings.ReplaceAll(key, "_", "-")
		fs.Var(disaggValue{d, key}, name, "")
		flags.Inherit(fs, name, "DYN_ROUTER_CONDITIONAL_DISAGG_"+strings.ToUpper(key))
		fs.Lookup(name).Hidden = true
	}
}

// Read sets the policy from the flags. queueThreshold is the limit above which requests wait for a prefill worker, the
// default of PrefillBusy; nil: none.
//
// Errors name the flag.
func (d *Disaggregation) Read(c *Config, queueThreshold *float64) error {
	if !d.On {
		if d.config != "" || len(d.single) > 0 {
			return errors.New("--" + disaggConfigFlag + " is the policy of --" + disaggFlag + ": give that flag too")
		}
		return nil
	}
	d.Policy, d.EffISL, d.EffISLRatio = ISLBounding, 2048, 0.7
	if queueThreshold != nil {
		d.PrefillBusy = new(float64) // JSON is read into it
		*d.PrefillBusy = *queueThreshold
	}
	for _, key := range disaggVariables {
		value, given := d.single[key]
		if key == "policy" {
			value = strconv.Quote(value)
		}
		if given {
			if err := d.set(fmt.Sprintf("{%q:%s}", key, value)); err != nil {
				return err
			}
		}
	}
	if d.config != "" {
		if err := d.set(d.config); err != nil {
			return err
		}
	}
	return d.validate(c)
}

// set sets what JSON has.
func (d *Disaggregation) set(text string) error {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(d)
	if err == nil {
		if _, end := decoder.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("text follows the JSON object")
		}
	}
	if err != nil {
		return fmt.Errorf("--%s %q: %w; for example {\"policy\":\"isl_bounding\",\"eff_isl_threshold\":2048}",
			disaggConfigFlag, text, err)
	}
	return nil
}

// validate returns an error for the first value that is out of range, or does not go with the cost function.
func (d *Disaggregation) validate(c *Config) error {
	wrong := func(key string, value any, must string) error {
		return fmt.Errorf("--%s: %s %v: must be %s", disaggConfigFlag, key, value, must)
	}
	policies := []string{ISLBounding, PrefillLoad, ISLOrLoad, ByCost, Never}
	switch {
	case !slices.Contains(policies, d.Policy):
		return wrong("policy", strconv.Quote(d.Policy), "one of "+strings.Join(policies, ", "))
	case d.EffISL < 0:
		return wrong("eff_isl_threshold", d.EffISL, "at least 0, for example 2048")
	case !(d.EffISLRatio >= 0 && d.EffISLRatio <= 1):
		return wrong("eff_isl_ratio_threshold", d.EffISLRatio, "0 to 1, for example 0.7")
	case !slices.Contains([]string{"", ViaSidecar, ViaNvext}, d.Via):
		return wrong("via", strconv.Quote(d.Via), ViaSidecar+" or "+ViaNvext)
	case (d.Policy == PrefillLoad || d.Policy == ISLOrLoad) && d.PrefillBusy == nil:
		return fmt.Errorf("--%s: the policy %s needs prefill_busy_threshold, or --router-queue-threshold, which is "+
			"its default", disaggConfigFlag, d.Policy)
	case d.Policy == ByCost && c.Policy != Time:
		return fmt.Errorf("--%s: the policy cost compares times, and workers are priced in blocks: leave out what "+
			"selects --router-policy dynamo", disaggConfigFlag)
	case c.Mode != KV:
		return fmt.Errorf("--%s works in --router-mode kv only, not %v: leave out one of the two", disaggFlag, c.Mode)
	}
	for key, value := range map[string]*float64{"prefill_busy_threshold": d.PrefillBusy,
		"decode_busy_threshold": d.DecodeBusy, "pd_transfer_ms_per_token": &d.TransferMS} {
		if value != nil && (!(*value >= 0) || math.IsInf(*value, 0)) {
			return wrong(key, *value, "a finite number of at least 0")
		}
	}
	return nil
}

// leastApart is the least part of the variance of fetched tokens that computed tokens do not explain.
const leastApart = 0.05

// transfer is a least-squares fit, which forgets, of first tokens of pairs:
//
//	seconds = a + b*computed tokens + c*fetched tokens
type transfer struct {
	samples                             int
	weight, x, z, y, xx, xz, zz, xy, zy float64 // weighted sums; x are computed tokens, z fetched ones, y seconds
}

func (t *transfer) add(x, z, y float64) {
	t.samples = min(t.samples+1, enough)
	t.weight = keep*t.weight + 1
	t.x, t.z, t.y = keep*t.x+x, keep*t.z+z, keep*t.y+y
	t.xx, t.xz, t.zz = keep*t.xx+x*x, keep*t.xz+x*z, keep*t.zz+z*z
	t.xy, t.zy = keep*t.xy+x*y, keep*t.zy+z*y
}

// fit returns c. false: the samples do not tell fetched tokens from computed ones, whose time then has both parts.
func (t *transfer) fit() (c float64, ok bool) {
	n := max(t.weight, 1)
	xx, xz, zz := t.xx-t.x*t.x/n, t.xz-t.x*t.z/n, t.zz-t.z*t.z/n
	det := xx*zz - xz*xz
	if t.samples < enough || det <= leastApart*xx*zz {
		return 0, false
	}
	return max((xx*(t.zy-t.z*t.y/n)-xz*(t.xy-t.x*t.y/n))/det, 0), true
}

// transferSeconds returns the time to fetch a token's blocks from the workers of a fleet.
func (a *ActiveSequences) transferSeconds(f *fleet) float64 {
	if c, ok := f.transfer.fit(); ok {
		return c
	}
	return a.Prefill.TransferSeconds
}

// TransferTime returns the expected time in which a decode worker fetches the blocks of so many tokens from a prefill
// worker, in seconds.
func (a *ActiveSequences) TransferTime(from kvblock.Worker, tokens int) float64 {
	a.lock()
	defer a.mu.Unlock()
	if int(from) >= len(a.learned.fleets) {
		return a.Prefill.TransferSeconds * float64(tokens)
	}
	return a.transferSeconds(a.learned.fleets[from]) * float64(tokens)
}

// Fetched notes that a decode worker fetches the blocks of so many tokens before the first token of the response. Call
// it for the booking on the prefill worker.
func (b Booking) Fetched(tokens int) {
	b.do(func(a *ActiveSequences) { a.bookings[b.index].fetched = tokens })
}

// transferred takes the transfer off the time that a prefill and it took together, and learns from that time.
func (a *ActiveSequences) transferred(b *booking, took time.Duration) time.Duration {
	if b.fetched == 0 || took.Seconds() > maxSampleSeconds {
		return took
	}
	f := a.learned.fleets[b.worker]
	f.transfer.add(float64(b.prefillTokens), float64(b.fetched), took.Seconds())
	return took - seconds(a.transferSeconds(f)*float64(b.fetched))
}
