// Package overrides has the settings of the router that a request may change for itself.
package overrides

import (
	"fmt"
	"strings"
)

// Overrides are settings of scoring.Config that a request changes for itself. A nil field leaves the setting unchanged.
// The JSON keys are those of Dynamo.
//
// The two APIs that take them fill this type, call Check and hand it to scoring. They differ in one point:
// `kvepp serve` (nvext, see prompt/body) refuses a key that no setting has, and `kvepp select` ignores it, as Dynamo's
// selection service does.
//
// Source: dynamo-kv-router 1.6.1, RouterConfigOverride.
type Overrides struct {
	OverlapScoreCredit    *float64 `json:"overlap_score_credit"`
	PrefillLoadScale      *float64 `json:"prefill_load_scale"`
	RouterTemperature     *float64 `json:"router_temperature"`
	SharedCacheMultiplier *float64 `json:"shared_cache_multiplier"`
	AssumeKVReuse         *bool    `json:"assume_kv_reuse"`
	TrackPrefillTokens    *bool    `json:"track_prefill_tokens"`
	// OverlapScoreWeight is deprecated: it sets the load scale, and 0 also sets the overlap credit to 0. It takes
	// precedence over the fields of these settings.
	OverlapScoreWeight *float64 `json:"overlap_score_weight"`
}

// Max is the largest number of an override. Dynamo accepts any finite number; kvepp's costs must be finite too.
// SharedCacheMultiplier is at most 1, as in Dynamo.
const Max = 1e9

// OverlapScoreWeightKey is the JSON key of the deprecated Overrides.OverlapScoreWeight.
const OverlapScoreWeightKey = "overlap_score_weight"

// numberOverrides are the numbers among the overrides.
var numberOverrides = []struct {
	key   string
	limit float64
	field func(*Overrides) **float64
}{
	{"overlap_score_credit", Max, func(o *Overrides) **float64 { return &o.OverlapScoreCredit }},
	{"prefill_load_scale", Max, func(o *Overrides) **float64 { return &o.PrefillLoadScale }},
	{"router_temperature", Max, func(o *Overrides) **float64 { return &o.RouterTemperature }},
	{"shared_cache_multiplier", 1, func(o *Overrides) **float64 { return &o.SharedCacheMultiplier }},
	{OverlapScoreWeightKey, Max, func(o *Overrides) **float64 { return &o.OverlapScoreWeight }},
}

// boolOverrides are the other overrides.
var boolOverrides = []struct {
	key   string
	field func(*Overrides) **bool
}{
	{"assume_kv_reuse", func(o *Overrides) **bool { return &o.AssumeKVReuse }},
	{"track_prefill_tokens", func(o *Overrides) **bool { return &o.TrackPrefillTokens }},
}

// Error says which override is refused, and why.
type Error struct {
	Key       string
	Want      string // such as "a number from 0 to 1"; empty: no setting has this key
	WrongType bool
}

func (e *Error) Error() string {
	if e.Want != "" {
		return fmt.Sprintf("%s must be %s", e.Key, e.Want)
	}
	var keys []string
	for _, x := range numberOverrides {
		keys = append(keys, x.key)
	}
	for _, x := range boolOverrides {
		keys = append(keys, x.key)
	}
	return fmt.Sprintf("%s is not a router setting; the settings are %s", e.Key, strings.Join(keys, ", "))
}

func numberUpTo(limit float64) string { return fmt.Sprintf("a number from 0 to %.0f", limit) }

// Set sets the override with a JSON key. value is a float64 or a bool. If the override is of another type, or if no
// override has the key, Set returns an *Error. Set does not check the limits; see Check.
func (o *Overrides) Set(key string, value any) error {
	for _, x := range numberOverrides {
		if x.key == key {
			n, ok := value.(float64)
			if !ok {
				return &Error{Key: key, Want: numberUpTo(x.limit), WrongType: true}
			}
			*x.field(o) = &n
			return nil
		}
	}
	for _, x := range boolOverrides {
		if x.key == key {
			b, ok := value.(bool)
			if !ok {
				return &Error{Key: key, Want: "true or false", WrongType: true}
			}
			*x.field(o) = &b
			return nil
		}
	}
	return &Error{Key: key}
}

// Check returns an *Error for the first number outside its limits.
func (o *Overrides) Check() error {
	for _, x := range numberOverrides {
		if n := *x.field(o); n != nil && !(*n >= 0 && *n <= x.limit) { // written so that NaN fails too
			return &Error{Key: x.key, Want: numberUpTo(x.limit)}
		}
	}
	return nil
}

// SetsDynamosWeights reports whether o sets a weight that only the policy Dynamo reads.
func (o *Overrides) SetsDynamosWeights() bool {
	return o.OverlapScoreCredit != nil || o.PrefillLoadScale != nil || o.OverlapScoreWeight != nil ||
		o.SharedCacheMultiplier != nil
}
