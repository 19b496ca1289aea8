package body

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// TestOverrides: scoring tests what the overrides do.
func TestOverrides(t *testing.T) {
	for _, c := range []struct{ nvext, want string }{
		{`{}`, ""},
		{`{"router_config_override":null}`, ""},
		{`{"router_config_override":{"router_temperature":null}}`, ""},
		{`{"router_config_override":{"overlap_score_credit":1.5,"prefill_load_scale":0,"router_temperature":0.5,` +
			`"shared_cache_multiplier":1,
			"assume_kv_reuse":false,"track_prefill_tokens":true}}`,
			"credit=1.5 scale=0 temperature=0.5 shared=1 reuse=false prefill=true"},
		{`{"router_config_override":{"overlap_score_weight":2,"prefill_load_scale":3}}`, "scale=3 weight=2"},
		{`{"router_config_override":{"overlap_score_weight":0},"agent_hints":{"kv_overlap_score_weight":2}}`,
			"weight=0"},
		{`{"router_config_override":{"prefill_load_scale":3},"agent_hints":{"kv_overlap_score_weight":2}}`,
			"scale=3 weight=2"},
		{`{"agent_hints":{"kv_overlap_score_weight":2}}`, "weight=2"},
		{`{"temperature":2}`, ""},
	} {
		r, err := ParseRequest(
			"/v1/completions",
			[]byte(`{"model":"m","prompt":"x","temperature":1.5,"nvext":`+c.nvext+`}`),
		)
		if err != nil {
			t.Errorf("%s: %v", c.nvext, err)
			continue
		}
		var s []string
		o := &r.Overrides
		for _, x := range []struct {
			name string
			v    *float64
		}{{"credit", o.OverlapScoreCredit}, {"scale", o.PrefillLoadScale}, {"temperature", o.RouterTemperature},
			{"shared", o.SharedCacheMultiplier}, {"weight", o.OverlapScoreWeight}} {
			if x.v != nil {
				s = append(s, fmt.Sprintf("%s=%v", x.name, *x.v))
			}
		}
		if o.AssumeKVReuse != nil {
			s = append(s, fmt.Sprint("reuse=", *o.AssumeKVReuse))
		}
		if o.TrackPrefillTokens != nil {
			s = append(s, fmt.Sprint("prefill=", *o.TrackPrefillTokens))
		}
		if got := strings.Join(s, " "); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.nvext, got, c.want)
		}
	}
}

func TestBadOverridesNameTheirKey(t *testing.T) {
	for _, c := range []struct{ nvext, code, param string }{
		{`{"router_config_override":[]}`, CodeInvalidType, "nvext.router_config_override"},
		{`{"router_config_override":{"router_temperature":-0.1}}`, CodeInvalidValue,
			"nvext.router_config_override.router_temperature"},
		{`{"router_config_override":{"router_temperature":"0"}}`, CodeInvalidType,
			"nvext.router_config_override.router_temperature"},
		{`{"router_config_override":{"prefill_load_scale":1e300}}`, CodeInvalidValue,
			"nvext.router_config_override.prefill_load_scale"},
		{`{"router_config_override":{"overlap_score_credit":true}}`, CodeInvalidType,
			"nvext.router_config_override.overlap_score_credit"},
		{`{"router_config_override":{"overlap_score_weight":-1}}`, CodeInvalidValue,
			"nvext.router_config_override.overlap_score_weight"},
		{`{"router_config_override":{"shared_cache_multiplier":1.1}}`, CodeInvalidValue,
			"nvext.router_config_override.shared_cache_multiplier"},
		{`{"router_config_override":{"assume_kv_reuse":1}}`, CodeInvalidType,
			"nvext.router_config_override.assume_kv_reuse"},
		{`{"router_config_override":{"track_prefill_tokens":"no"}}`, CodeInvalidType,
			"nvext.router_config_override.track_prefill_tokens"},
		{`{"router_config_override":{"temperature":1}}`, CodeInvalidValue, "nvext.router_config_override.temperature"},
		{`{"agent_hints":{"kv_overlap_score_weight":-2}}`, CodeInvalidValue,
			"nvext.agent_hints.kv_overlap_score_weight"},
	} {
		_, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":"x","nvext":`+c.nvext+`}`))
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || e.Param != c.param || !strings.Contains(e.Message, c.param) {
			t.Errorf("%s: got %#v; want %s of %s", c.nvext, err, c.code, c.param)
		}
	}
}

func TestPins(t *testing.T) {
	for _, c := range []struct{ nvext, want string }{
		{`{}`, "worker - prefill -"},
		{`{"backend_instance_id":null,"dp_rank":null}`, "worker - prefill -"},
		{`{"backend_instance_id":7}`, "worker nvext.backend_instance_id=7 prefill -"},
		{`{"backend_instance_id":7,"decode_worker_id":18446744073709551615,"dp_rank":4294967295}`,
			"worker nvext.decode_worker_id=18446744073709551615/4294967295 prefill -"},
		{`{"backend_instance_id":7,"prefill_worker_id":8,"dp_rank":1,"prefill_dp_rank":2}`,
			"worker nvext.backend_instance_id=7/1 prefill nvext.prefill_worker_id=8/2"},
		{`{"backend_instance_id":-1}`, "error nvext.backend_instance_id"},
		{`{"backend_instance_id":7,"decode_worker_id":"7"}`, "error nvext.decode_worker_id"},
		{`{"decode_worker_id":18446744073709551616}`, "error nvext.decode_worker_id"},
		{`{"backend_instance_id":7,"dp_rank":4294967296}`, "error nvext.dp_rank"},
		{`{"dp_rank":0}`, "error nvext.dp_rank"},
		{`{"backend_instance_id":7,"prefill_dp_rank":0}`, "error nvext.prefill_dp_rank"},
	} {
		r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":"x","nvext":`+c.nvext+`}`))
		if err != nil {
			t.Errorf("%s: %v", c.nvext, err)
			continue
		}
		show := func(p Pin) string {
			switch {
			case p.Key == "":
				return "-"
			case p.HasRank:
				return fmt.Sprintf("%s=%d/%d", p.Key, p.InstanceID, p.Rank)
			}
			return fmt.Sprintf("%s=%d", p.Key, p.InstanceID)
		}
		got := "worker " + show(r.Pins.Worker) + " prefill " + show(r.Pins.Prefill)
		if r.Pins.Err != nil {
			got = "error " + r.Pins.Err.Param
		}
		if got != c.want || r.Pins.Given() != (c.want != "worker - prefill -") {
			t.Errorf("%s:\ngot  %s\nwant %s", c.nvext, got, c.want)
		}
	}
}
