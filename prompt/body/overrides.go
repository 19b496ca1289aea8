package body

import (
	"errors"
	"fmt"
	"math"
	"math/big"

	"kvepp/internal/overrides"
	"kvepp/prompt/values"
)

// overrideKey is the path of the overrides in a body.
const overrideKey = "nvext.router_config_override"

// readOverrides reads the router settings that a request changes for itself in nvext: router_config_override, else the
// weight in agent_hints. Any mistake in them is an *Error, because no other component reports it. OpenAI's field
// temperature is not among them, because it controls sampling.
//
// Source: dynamo-kv-router 1.6.1 accepts router_config_override in function calls and not in HTTP bodies.
// agent_hints.kv_overlap_score_weight is a field of HTTP bodies in an earlier Dynamo.
func readOverrides(nvext *values.Dict) (o overrides.Overrides, err error) {
	weightPath := overrideKey + "." + overrides.OverlapScoreWeightKey
	refused := func(err error) *Error {
		var override *overrides.Error
		errors.As(err, &override)
		path := overrideKey + "." + override.Key
		if override.Key == overrides.OverlapScoreWeightKey {
			path = weightPath
		}
		override.Key = "'" + path + "'"
		e := &Error{Code: CodeInvalidValue, Param: path, Message: override.Error() + "."}
		if override.WrongType {
			e.Code = CodeInvalidType
		}
		return e
	}
	set := func(key string, v any) error {
		if n, ok := number(v); ok {
			v = n
		}
		return o.Set(key, v)
	}
	switch v, _ := nvext.Get("router_config_override"); object := v.(type) {
	case nil:
	case *values.Dict:
		for key, v := range object.All() {
			if v == nil {
				continue
			}
			if err := set(fmt.Sprint(key), v); err != nil {
				return overrides.Overrides{}, refused(err)
			}
		}
	default:
		return o, wrongType(overrideKey, "an object")
	}
	if hints, ok := field[*values.Dict](nvext, "agent_hints"); ok && o.OverlapScoreWeight == nil {
		if v, _ := hints.Get("kv_overlap_score_weight"); v != nil {
			weightPath = "nvext.agent_hints.kv_overlap_score_weight"
			if err := set(overrides.OverlapScoreWeightKey, v); err != nil {
				return overrides.Overrides{}, refused(err)
			}
		}
	}
	if err := o.Check(); err != nil {
		return overrides.Overrides{}, refused(err)
	}
	return o, nil
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
func readPins(nvext *values.Dict) (p Pins) {
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
