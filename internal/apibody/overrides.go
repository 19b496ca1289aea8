package apibody

import (
	"fmt"
	"math"
	"math/big"

	"kvepp/chattemplate"
)

// Overrides are router settings that a request changes for itself, in nvext.router_config_override. A nil field leaves
// the setting unchanged. OpenAI's field temperature is not among them, because it controls sampling.
//
// Source: dynamo-kv-router 1.6.1, RouterConfigOverride, which Dynamo accepts in function calls and not in HTTP bodies.
// agent_hints.kv_overlap_score_weight is a field of HTTP bodies in an earlier Dynamo.
type Overrides struct {
	OverlapScoreCredit    *float64
	PrefillLoadScale      *float64
	RouterTemperature     *float64
	SharedCacheMultiplier *float64
	AssumeKVReuse         *bool
	TrackPrefillTokens    *bool
}

// overrideKey is the path of the overrides in a body.
const overrideKey = "nvext.router_config_override"

// maxSetting keeps costs finite. Dynamo accepts any finite number.
const maxSetting = 1e9

// readOverrides reads the overrides in nvext. Any mistake in them is an *Error, because no other component reports it.
func readOverrides(nvext *chattemplate.Dict) (o Overrides, err error) {
	weight := func(key string, v any) error {
		n, err := setting(key, v, maxSetting)
		if n != nil {
			if o.PrefillLoadScale = n; *n == 0 {
				o.OverlapScoreCredit = n
			}
		}
		return err
	}
	switch v, _ := nvext.Get("router_config_override"); object := v.(type) {
	case nil:
	case *chattemplate.Dict:
		var overlapWeight any
		for key, v := range object.All() {
			if v == nil {
				continue
			}
			path := fmt.Sprintf("%s.%v", overrideKey, key)
			switch key {
			case "overlap_score_credit":
				o.OverlapScoreCredit, err = setting(path, v, maxSetting)
			case "prefill_load_scale":
				o.PrefillLoadScale, err = setting(path, v, maxSetting)
			case "router_temperature":
				o.RouterTemperature, err = setting(path, v, maxSetting)
			case "shared_cache_multiplier":
				o.SharedCacheMultiplier, err = setting(path, v, 1)
			case "assume_kv_reuse":
				o.AssumeKVReuse, err = boolSetting(path, v)
			case "track_prefill_tokens":
				o.TrackPrefillTokens, err = boolSetting(path, v)
			case "overlap_score_weight": // deprecated; takes precedence over the two settings that it sets
				overlapWeight = v
			default:
				err = &Error{Code: CodeInvalidValue, Param: path,
					Message: fmt.Sprintf("'%s' is not a router setting; the settings are overlap_score_credit, "+
						"prefill_load_scale, router_temperature, shared_cache_multiplier, assume_kv_reuse, "+
						"track_prefill_tokens and overlap_score_weight.", path)}
			}
			if err != nil {
				return Overrides{}, err
			}
		}
		if overlapWeight != nil {
			return o, weight(overrideKey+".overlap_score_weight", overlapWeight)
		}
	default:
		return o, wrongType(overrideKey, "an object")
	}
	if hints, ok := field[*chattemplate.Dict](nvext, "agent_hints"); ok {
		if v, _ := hints.Get("kv_overlap_score_weight"); v != nil {
			return o, weight("nvext.agent_hints.kv_overlap_score_weight", v)
		}
	}
	return o, nil
}

func setting(path string, v any, most float64) (*float64, error) {
	n, ok := number(v)
	if ok && n >= 0 && n <= most {
		return &n, nil
	}
	want := fmt.Sprintf("a number from 0 to %.0f", most)
	if !ok {
		return nil, wrongType(path, want)
	}
	return nil, &Error{Code: CodeInvalidValue, Param: path, Message: fmt.Sprintf("'%s' must be %s.", path, want)}
}

func boolSetting(path string, v any) (*bool, error) {
	b, ok := v.(bool)
	if !ok {
		return nil, wrongType(path, "true or false")
	}
	return &b, nil
}

// Pins are the workers that a request selects in nvext. The zero value selects none.
//
// Source: dynamo-llm 1.6.1, session_affinity: which fields count in which phase.
type Pins struct {
	// Worker is decode_worker_id, else backend_instance_id, with dp_rank: the worker that answers the request.
	Worker Pin
	// Prefill is prefill_worker_id with prefill_dp_rank: the worker that prefills, if that is another one.
	Prefill Pin
	// Err is the mistake in these fields; nil if there is none.
	Err *Error
}

// Given reports whether the request has any of these fields, valid or not.
func (p *Pins) Given() bool { return p.Worker.Key != "" || p.Prefill.Key != "" || p.Err != nil }

// Pin is one selected worker.
type Pin struct {
	Key        string // the field that selects it; empty: no worker is selected
	InstanceID uint64
	Rank       uint32
	HasRank    bool // whether one rank of the worker is selected
}

// readPins reads the workers that nvext selects.
func readPins(nvext *chattemplate.Dict) (p Pins) {
	instance := func(key string) (id uint64, ok bool) {
		switch v, _ := nvext.Get(key); x := v.(type) {
		case nil:
			return 0, false
		case int64:
			id, ok = uint64(x), x >= 0
		case *big.Int:
			id, ok = x.Uint64(), x.IsUint64()
		}
		if !ok && p.Err == nil {
			p.Err = wrongType("nvext."+key, "a worker's instance id: an integer from 0 to 18446744073709551615")
		}
		return id, ok
	}
	rank := func(key string, pin *Pin) {
		v, _ := nvext.Get(key)
		if v == nil {
			return
		}
		n, ok := v.(int64)
		switch {
		case p.Err != nil:
		case !ok || n < 0 || n > math.MaxUint32:
			p.Err = wrongType("nvext."+key, "a data-parallel rank: an integer from 0 to 4294967295")
		case pin.Key == "":
			p.Err = &Error{
				Code:    CodeInvalidValue,
				Param:   "nvext." + key,
				Message: fmt.Sprintf("'nvext.%s' needs the instance id of the worker that the rank belongs to.", key),
			}
		default:
			pin.Rank, pin.HasRank = uint32(n), true
		}
	}
	for _, key := range []string{"decode_worker_id", "backend_instance_id"} {
		if id, ok := instance(key); ok && p.Worker.Key == "" {
			p.Worker = Pin{Key: "nvext." + key, InstanceID: id}
		}
	}
	if id, ok := instance("prefill_worker_id"); ok {
		p.Prefill = Pin{Key: "nvext.prefill_worker_id", InstanceID: id}
	}
	rank("dp_rank", &p.Worker)
	rank("prefill_dp_rank", &p.Prefill)
	return p
}
