package scoring

import (
	"encoding/json"
	"errors"
	"testing"

	"kvepp/internal/overrides"
)

// TestOverridesApply: each override changes its own setting only. The deprecated weight takes precedence.
func TestOverridesApply(t *testing.T) {
	for _, c := range []struct {
		overrides string
		change    func(*Config)
	}{
		{`{}`, func(*Config) {}},
		{`{"overlap_score_credit":1.5}`, func(c *Config) { c.OverlapScoreCredit = 1.5 }},
		{`{"prefill_load_scale":0}`, func(c *Config) { c.PrefillLoadScale = 0 }},
		{`{"router_temperature":0.5}`, func(c *Config) { c.Temperature = 0.5 }},
		{`{"shared_cache_multiplier":1}`, func(c *Config) { c.SharedCacheMultiplier = 1 }},
		{`{"assume_kv_reuse":false}`, func(c *Config) { c.AssumeKVReuse = false }},
		{`{"track_prefill_tokens":false}`, func(c *Config) { c.TrackPrefillTokens = false }},
		{`{"overlap_score_weight":2.5}`, func(c *Config) { c.PrefillLoadScale = 2.5 }},
		{`{"overlap_score_weight":0}`, func(c *Config) { c.PrefillLoadScale, c.OverlapScoreCredit = 0, 0 }},
		{`{"overlap_score_weight":2,"overlap_score_credit":0.5,"prefill_load_scale":3}`,
			func(c *Config) { c.PrefillLoadScale, c.OverlapScoreCredit = 2, 0.5 }},
		{`{"overlap_score_weight":0,"overlap_score_credit":0.5,"prefill_load_scale":3}`,
			func(c *Config) { c.PrefillLoadScale, c.OverlapScoreCredit = 0, 0 }},
	} {
		var decoded, set overrides.Overrides
		var fields map[string]any
		if err := errors.Join(
			json.Unmarshal([]byte(c.overrides), &decoded),
			json.Unmarshal([]byte(c.overrides), &fields),
		); err != nil {
			t.Fatal(err)
		}
		for key, value := range fields {
			if err := set.Set(key, value); err != nil {
				t.Error(err)
			}
		}
		want := DefaultConfig()
		c.change(&want)
		for name, o := range map[string]*overrides.Overrides{"decoded": &decoded, "set by key": &set} {
			if err := o.Check(); err != nil {
				t.Errorf("%s, %s: %v", c.overrides, name, err)
			}
			if got := DefaultConfig().With(o); got != want {
				t.Errorf("%s, %s:\ngot  %+v\nwant %+v", c.overrides, name, got, want)
			}
		}
	}
}
