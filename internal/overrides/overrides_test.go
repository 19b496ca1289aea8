package overrides

import (
	"errors"
	"math"
	"reflect"
	"testing"
)

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
		want  Error
		text  string
	}{
		{"router_temperature", "0", Error{"router_temperature", "a number from 0 to 1000000000", true},
			"router_temperature must be a number from 0 to 1000000000"},
		{"shared_cache_multiplier", true, Error{"shared_cache_multiplier", "a number from 0 to 1", true},
			"shared_cache_multiplier must be a number from 0 to 1"},
		{"assume_kv_reuse", 1.0, Error{"assume_kv_reuse", "true or false", true},
			"assume_kv_reuse must be true or false"},
		{"temperature", 1.0, Error{Key: "temperature"}, "temperature is not a router setting; the settings " +
			"are overlap_score_credit, prefill_load_scale, router_temperature, shared_cache_multiplier, " +
			"overlap_score_weight, assume_kv_reuse, track_prefill_tokens"},
	} {
		var o Overrides
		var refused *Error
		if err := o.Set(c.key, c.value); !errors.As(err, &refused) || *refused != c.want || err.Error() != c.text {
			t.Errorf("%s = %v: %v", c.key, c.value, err)
		}
		if o != (Overrides{}) {
			t.Errorf("%s = %v was set", c.key, c.value)
		}
	}
}
