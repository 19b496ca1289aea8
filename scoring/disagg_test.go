package scoring

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/kvblock"
)

// read returns what flags and variables set.
func read(t *testing.T, args []string, c *Config, queue *float64) (*Disaggregation, error) {
	t.Helper()
	var d Disaggregation
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	d.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &d, d.Read(c, queue)
}

// TestConditionalVectors: the first ten are those of Dynamo's own tests.
func TestConditionalVectors(t *testing.T) {
	const block = 64
	for _, c := range []struct {
		policy         string
		ratio          float64
		prompt, blocks int
		busy           bool
		want           BypassOutcome
	}{
		{ISLBounding, .7, 1000, 14, false, Bypassed},
		{ISLBounding, .99, 100_000, 1000, false, BypassISL},
		{ISLBounding, .7, 200, 0, false, BypassRatio},
		{ISLBounding, .99, 2048, 0, false, BypassISL},
		{ISLBounding, .7, 0, 0, false, Bypassed},
		{ISLBounding, .7, 500, 10, false, Bypassed}, // more cached than the prompt has
		{ISLBounding, .99, 2100, 0, false, BypassISL},
		{PrefillLoad, .7, 100_000, 0, true, Bypassed},
		{PrefillLoad, .7, 10, 10, false, PrefillCalm},
		{ISLOrLoad, .7, 1000, 14, false, Bypassed},
		{ISLOrLoad, .7, 100_000, 0, true, Bypassed},
		{ISLOrLoad, .7, 100_000, 0, false, BypassISL},
		{ISLOrLoad, .7, 200, 0, false, BypassRatio},
		{Never, .7, 100_000, 0, false, Bypassed},
		{ByCost, .7, 10, 10, false, Bypassed},
		{ByCost, .7, 10, 10, true, PairCheaper},
	} {
		steps := 2.0
		d := Disaggregation{On: true, Policy: c.policy, EffISL: 2048, EffISLRatio: c.ratio, PrefillBusy: &steps}
		a := Alone{Prompt: c.prompt, Cached: c.blocks * block, Blocks: 50,
			PrefillBusy: func(s float64) bool { return c.busy && s == steps },
			Cost:        100,
			PairCost: func() float64 {
				if c.busy {
					return 79
				}
				return 81
			}}
		if got := d.Judge(&a); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
		half := 0.5
		d.DecodeBusy = &half
		for blocks, want := range map[int]BypassOutcome{0: DecodeUnknown, 99: DecodeBusy, 100: c.want} {
			a.KVBlocks = blocks
			if c.policy == Never || c.want != Bypassed && c.want != PairCheaper {
				want = c.want
			}
			if got := d.Judge(&a); got != want {
				t.Errorf("%+v with 50 of %d blocks: %s, want %s", c, blocks, got, want)
			}
		}
	}
	// 48 of 2100 tokens are cached: 2052 are not below 2048.
	d := Disaggregation{Policy: ISLBounding, EffISL: 2048, EffISLRatio: .99}
	if got := d.Judge(&Alone{Prompt: 2100, Cached: 48}); got != BypassISL {
		t.Errorf("48 of 2100 tokens cached: %s", got)
	}
}

// TestConditionalFlags: the keys are Dynamo's, the JSON takes precedence over single variables, and mistakes are named.
func TestConditionalFlags(t *testing.T) {
	dynamo, byTime, two := DefaultConfig(), DefaultConfig(), 2.0
	byTime.Policy = Time
	const on, config = "--router-conditional-disagg", "--router-conditional-disagg-config="
	d, err := read(t, []string{on, "--router-conditional-disagg-policy=isl_or_load",
		"--router-conditional-disagg-eff-isl-threshold=7", "--router-conditional-disagg-decode-busy-threshold=0.5",
		config + `{"eff_isl_threshold":9,"prefill_busy_threshold":3}`}, &dynamo, &two)
	if err != nil || d.Policy != ISLOrLoad || d.EffISL != 9 || d.EffISLRatio != .7 || *d.DecodeBusy != .5 ||
		*d.PrefillBusy != 3 || two != 2 {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err = read(t, []string{on}, &dynamo, nil); err != nil || d.Policy != ISLBounding || d.EffISL != 2048 ||
		d.EffISLRatio != .7 || d.PrefillBusy != nil {
		t.Errorf("defaults: %+v, %v", d, err)
	}
	if d, err = read(t, []string{on, config + `{"policy":"prefill_load"}`}, &dynamo, &two); err != nil ||
		*d.PrefillBusy != 2 {
		t.Errorf("the queue's threshold: %+v, %v", d, err)
	}
	if _, err = read(t, []string{on, config + `{"policy":"cost","pd_transfer_ms_per_token":0.1}`}, &byTime,
		nil); err != nil {
		t.Error(err)
	}
	if d, err = read(t, []string{on + "=false"}, &dynamo, nil); err != nil || d.On {
		t.Errorf("off: %+v, %v", d, err)
	}
	random := DefaultConfig()
	random.Mode = Random
	for _, c := range []struct {
		args []string
		cfg  Config
		want string
	}{
		{[]string{config + "{}"}, dynamo, "give that flag too"},
		{[]string{"--router-conditional-disagg-policy=isl_bounding"}, dynamo, "give that flag too"},
		{[]string{on, config + `{"polic":"cost"}`}, dynamo, `unknown field "polic"`},
		{[]string{on, config + `{} {}`}, dynamo, "text follows"},
		{[]string{on, config + `{}` + strings.Repeat(" ", 2000) + `{}`}, dynamo, "text follows"},
		{[]string{on, config + `[1]`}, dynamo, "cannot unmarshal"},
		{[]string{on, config + `{"eff_isl_threshold":1.5}`}, dynamo, "cannot unmarshal"},
		{[]string{on, config + `{"policy":"other"}`}, dynamo, "one of isl_bounding"},
		{[]string{on, config + `{"eff_isl_threshold":-1}`}, dynamo, "at least 0"},
		{[]string{on, config + `{"eff_isl_ratio_threshold":1.01}`}, dynamo, "0 to 1"},
		{[]string{on, config + `{"prefill_busy_threshold":-1}`}, dynamo, "prefill_busy_threshold -1"},
		{[]string{on, config + `{"decode_busy_threshold":-1}`}, dynamo, "decode_busy_threshold -1"},
		{[]string{on, config + `{"pd_transfer_ms_per_token":-1}`}, dynamo, "pd_transfer_ms_per_token -1"},
		{[]string{on, config + `{"policy":"prefill_load"}`}, dynamo, "--router-queue-threshold"},
		{[]string{on, config + `{"policy":"isl_or_load"}`}, dynamo, "--router-queue-threshold"},
		{[]string{on, config + `{"policy":"cost"}`}, dynamo, "compares times"},
		{[]string{on, config + `{"via":"header"}`}, dynamo, "sidecar"},
		{[]string{on, "--router-conditional-disagg-eff-isl-threshold=many"}, dynamo, "invalid character"},
		{[]string{on}, random, "--router-mode kv only"},
	} {
		if _, err := read(t, c.args, &c.cfg, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.args, err, c.want)
		}
	}
}

// TestTransferIsLearned: first tokens of pairs teach how long the decode workers take to fetch blocks, and the prefill
// worker's speed stays its own.
func TestTransferIsLearned(t *testing.T) {
	now := time.Duration(0)
	book := NewActiveSequences()
	book.Clock = func() time.Duration { return now }
	book.Prefill.TransferSeconds = 5e-6
	cfg := DefaultConfig()
	cfg.Policy = Time
	if got := book.TransferTime(0, 1000); got != 5e-3 {
		t.Errorf("before any pair %v s for 1000 tokens, want what is configured", got)
	}
	// A prefill takes 10 ms and 0.1 ms for each token, a transfer 0.04 ms. Half of each prompt is cached by the prefill
	// worker, or nothing.
	for i := range 600 {
		tokens, cached := 1000+100*(i%10), 0
		if i/2%2 == 0 {
			cached = tokens / 2
		}
		c := []Candidate{{Worker: kvblock.Worker(i % 2), Prompt: &Prompt{BlockSize: 1}, DeviceBlocks: cached}}
		leg := cfg.PrefillLeg()
		_, b, err := book.SelectAndAdd(Request{ISLTokens: tokens}, c, &leg, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.Fetched(tokens)
		now += 10*time.Millisecond + time.Duration(tokens-cached)*100*time.Microsecond +
			time.Duration(tokens)*40*time.Microsecond
		b.MarkPrefillCompleted()
		b.Free()
		now += time.Second
	}
	if got := book.TransferTime(0, 1000); math.Abs(got-0.04) > 0.01 {
		t.Errorf("a transfer of 1000 tokens takes %v s, want 0.04", got)
	}
	if p := book.Pace(0); math.Abs(p.SecondsPerToken-1e-4) > 2e-5 {
		t.Errorf("the prefill worker takes %v s for a token, want 0.0001", p.SecondsPerToken)
	}
}
