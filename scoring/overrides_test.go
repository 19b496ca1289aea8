package scoring

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"testing"
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
		var decoded, set Overrides
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
		for name, o := range map[string]*Overrides{"decoded": &decoded, "set by key": &set} {
			if err := o.Check(); err != nil {
				t.Errorf("%s, %s: %v", c.overrides, name, err)
			}
			if got := o.Apply(DefaultConfig()); got != want {
				t.Errorf("%s, %s:\ngot  %+v\nwant %+v", c.overrides, name, got, want)
			}
		}
	}
}

// TestOverrideKeys: every field has a key that Set knows, and a limit if it is a number.
func TestOverrideKeys(t *testing.T) {
	for f := range reflect.TypeFor[Overrides]().Fields() {
		key := f.Tag.Get("json")
		var o Overrides
		if f.Type == reflect.TypeFor[*bool]() {
			if err := o.Set(key, true); err != nil || o == (Overrides{}) {
				t.Errorf("%s: %v", key, err)
			}
			continue
		}
		limit := 1e9
		if key == "shared_cache_multiplier" {
			limit = 1
		}
		for _, n := range []float64{0, limit, -1, math.Nextafter(limit, 2e9), math.Inf(1), math.NaN()} {
			var o Overrides
			if err := o.Set(key, n); err != nil || reflect.ValueOf(o).FieldByIndex(f.Index).IsNil() {
				t.Fatalf("%s: %v", key, err)
			}
			err := o.Check()
			if allowed := n >= 0 && n <= limit; (err == nil) != allowed {
				t.Errorf("%s = %v: %v", key, n, err)
			}
		}
	}
}

// TestOverrideErrors: the error names the key and says what is allowed.
func TestOverrideErrors(t *testing.T) {
	for _, c := range []struct {
		key   string
		value any
		want  OverrideError
		text  string
	}{
		{"router_temperature", "0", OverrideError{"router_temperature", "a number from 0 to 1000000000", true},
			"router_temperature must be a number from 0 to 1000000000"},
		{"shared_cache_multiplier", true, OverrideError{"shared_cache_multiplier", "a number from 0 to 1", true},
			"shared_cache_multiplier must be a number from 0 to 1"},
		{"assume_kv_reuse", 1.0, OverrideError{"assume_kv_reuse", "true or false", true},
			"assume_kv_reuse must be true or false"},
		{"temperature", 1.0, OverrideError{Key: "temperature"}, "temperature is not a router setting; the settings " +
			"are overlap_score_credit, prefill_load_scale, router_temperature, shared_cache_multiplier, " +
			"overlap_score_weight, assume_kv_reuse, track_prefill_tokens"},
	} {
		var o Overrides
		var refused *OverrideError
		if err := o.Set(c.key, c.value); !errors.As(err, &refused) || *refused != c.want || err.Error() != c.text {
			t.Errorf("%s = %v: %v", c.key, c.value, err)
		}
		if o != (Overrides{}) {
			t.Errorf("%s = %v was set", c.key, c.value)
		}
	}
}
