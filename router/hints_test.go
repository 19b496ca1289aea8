package router

import (
	"errors"
	"fmt"
	"testing"

	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/scoring"
)

// counted returns a metric's value by its name and labels, as in name{a="b",c="d"}; -1 if there is no such series.
func (h *house) counted(series string) float64 {
	h.t.Helper()
	for _, s := range metricstest.Read(h.t, h.metrics.Registry) {
		if s.String() == series {
			return s.Value
		}
	}
	return -1
}

// A tenant acts as a cache salt if the endpoints are Dynamo's frontends. It takes precedence over the body's salt.
func TestTenantIsTheCacheSaltOfDynamosFrontends(t *testing.T) {
	h := newHouse(t, workers(3)...)
	ids := tokens(0, 40)
	h.warm("w0", 0, ids, blocksOfFour)
	h.warm("w1", 0, ids, kvblock.HashOptions{BlockSize: 4, CacheNamespace: "t"})
	h.warm("w2", 0, ids, kvblock.HashOptions{BlockSize: 4, CacheNamespace: "s"})
	req := completion("m", ids)
	salted := completion("m", ids)
	salted.Body = append(salted.Body[:len(salted.Body)-1], `,"cache_salt":"s","nvext":{"cache_salt":""}}`...)
	for _, c := range []struct {
		salts, ignore bool
		tenant        string
		req           *Request
		want          string
	}{
		{false, false, "", req, "w0"},
		{false, false, "t", req, "w0"}, // a stock engine does not know the tenant
		{true, false, "", req, "w0"},
		{true, false, "t", req, "w1"},
		{true, false, "t", salted, "w1"},
		{true, false, "", salted, "w2"},
		{true, true, "t", req, "w0"}, // removed from the request
		{true, true, "t", salted, "w2"},
	} {
		h.cfg.Frontends, h.cfg.IgnoreHints = c.salts, c.ignore
		r := *c.req
		r.Hints = body.Hints{Tenant: c.tenant}
		route := h.route(&r)
		if route.Name != c.want || route.PredictedCachedTokens != 40 {
			t.Errorf("%+v: %s with %d cached tokens, want %s", c, route.Name, route.PredictedCachedTokens, c.want)
		}
		route.Free()
	}
}

func TestIgnoredHintsAreCounted(t *testing.T) {
	h := newHouse(t, workers(1)...)
	for _, hint := range body.HintNames {
		for _, cause := range []string{"malformed", "disabled"} {
			if n := h.counted(fmt.Sprintf(`kvepp_hints_ignored_total{cause=%q,hint=%q}`, cause, hint)); n != 0 {
				t.Errorf("%s %s starts at %v, want 0", hint, cause, n)
			}
		}
	}
	var headers body.HeaderHints
	headers.Add("x-dynamo-request-priority", "high")
	headers.Add("x-tenant-id", "t")
	req := completion("m", tokens(0, 8))
	req.Hints = headers.Hints()
	req.Body = append(req.Body[:len(req.Body)-1], `,"nvext":{"agent_hints":{"osl":-1,"strict_priority":1}}}`...)
	h.route(req)
	h.cfg.IgnoreHints = true
	h.route(req)
	for series, want := range map[string]float64{
		`cause="malformed",hint="priority"`: 1, `cause="malformed",hint="osl"`: 1, `cause="malformed",hint="tenant"`: 0,
		`cause="unheard",hint="tenant"`:    1,
		`cause="disabled",hint="priority"`: 1, `cause="disabled",hint="osl"`: 1, `cause="disabled",hint="tenant"`: 1,
		`cause="disabled",hint="strict_priority"`: 1, `cause="disabled",hint="session"`: 0,
	} {
		if n := h.counted("kvepp_hints_ignored_total{" + series + "}"); n != want {
			t.Errorf("%s: %v, want %v", series, n, want)
		}
	}
}

// with returns a request with more fields in its body.
func with(req *Request, fields string) *Request {
	r := *req
	r.Body = append(append([]byte{}, req.Body[:len(req.Body)-1]...), ","+fields+"}"...)
	return &r
}

// An override affects only its own request.
func TestOverridesArePerRequest(t *testing.T) {
	h := newHouse(t, workers(2)...)
	ids := tokens(0, 40)
	h.warm("w0", 0, ids[:20], blocksOfFour)
	busy := h.route(completion("m", ids)) // to w0, which holds half of the prompt
	if busy.Name != "w0" {
		t.Fatalf("routed to %s", busy.Name)
	}
	h.cfg.Explain = true
	plain := completion("m", ids)
	for _, c := range []struct {
		fields      string
		w0          float64 // cost
		temperature float64
	}{
		// Prefill: 5 blocks of the earlier request and 10 of this one, less 5 cached. Decode: 10 blocks, which both
		// requests share.
		{`"temperature":2`, 10 + 10, 0},
		{`"nvext":{"router_config_override":{"overlap_score_credit":0}}`, 15 + 10, 0},
		{`"nvext":{"router_config_override":{"prefill_load_scale":3}}`, 3*10 + 10, 0},
		{`"nvext":{"agent_hints":{"kv_overlap_score_weight":3}}`, 3*10 + 10, 0},
		{`"nvext":{"router_config_override":{"assume_kv_reuse":false}}`, 10 + 20, 0},
		{`"nvext":{"router_config_override":{"track_prefill_tokens":false}}`, 10, 0},
		{`"nvext":{"router_config_override":{"router_temperature":0.25}}`, 10 + 10, 0.25},
		{`"nvext":{}`, 10 + 10, 0},
	} {
		before := h.book.Load(0)
		r := h.route(with(plain, c.fields))
		if got := r.Costs[0].Cost; got != c.w0 || r.Weights.Temperature != c.temperature {
			t.Errorf(
				"%s: w0 costs %v at temperature %v, want %v at %v",
				c.fields,
				got,
				r.Weights.Temperature,
				c.w0,
				c.temperature,
			)
		}
		r.Free()
		if after := h.book.Load(0); after != before {
			t.Errorf("%s: left %+v, want %+v", c.fields, after, before)
		}
	}
	h.cfg.Scoring.Policy = scoring.Time
	for _, c := range []struct {
		fields string
		policy scoring.Policy
	}{
		{`"nvext":{}`, scoring.Time},
		{`"nvext":{"router_config_override":{"router_temperature":0.25}}`, scoring.Time},
		{`"nvext":{"router_config_override":{"prefill_load_scale":3}}`, scoring.Dynamo},
		{`"nvext":{"agent_hints":{"kv_overlap_score_weight":3}}`, scoring.Dynamo},
	} {
		r := h.route(with(plain, c.fields))
		if r.Weights.Policy != c.policy || (PaceOf(&r.Costs[0].Terms) != nil) != (c.policy == scoring.Time) {
			t.Errorf("%s: priced by %v with terms %+v, want %v", c.fields, r.Weights.Policy, r.Costs[0].Terms, c.policy)
		}
		r.Free()
	}
	h.cfg.Scoring.Policy = scoring.Dynamo
	h.cfg.IgnoreHints = true
	if r := h.route(with(plain, `"nvext":{"router_config_override":{"prefill_load_scale":3}}`)); r.Costs[0].Cost != 20 {
		t.Errorf("an ignored override changed the cost to %v", r.Costs[0].Cost)
	}
	if n := h.counted(`kvepp_hints_ignored_total{cause="disabled",hint="override"}`); n != 1 {
		t.Errorf("counted %v ignored overrides, want 1", n)
	}
}

func TestPinning(t *testing.T) {
	es := workers(3)
	es[1].DataParallelSize = 2
	es[2].Model = "other"
	h := newHouse(t, es...)
	req := completion("m", tokens(0, 40))
	h.cfg.Pinning = true
	for pin, want := range map[string]string{
		`"backend_instance_id":100`:                                    "w0/0",
		`"backend_instance_id":101,"dp_rank":1`:                        "w1/1",
		`"backend_instance_id":100,"decode_worker_id":101,"dp_rank":0`: "w1/0",
	} {
		for range 8 {
			if r := h.route(with(req, `"nvext":{`+pin+`}`)); fmt.Sprintf("%s/%d", r.Name, r.Rank) != want {
				t.Fatalf("%s: routed to %s/%d", pin, r.Name, r.Rank)
			}
		}
	}
	for pin, key := range map[string]string{
		`"backend_instance_id":99`:              "nvext.backend_instance_id",
		`"decode_worker_id":102`:                "nvext.decode_worker_id", // serves another model
		`"backend_instance_id":100,"dp_rank":1`: "nvext.backend_instance_id",
		`"dp_rank":1`:                           "nvext.dp_rank",
		`"backend_instance_id":"100"`:           "nvext.backend_instance_id",
	} {
		_, err := h.Route(t.Context(), with(req, `"nvext":{`+pin+`}`))
		var e *body.Error
		if !errors.As(err, &e) || e.Param != key {
			t.Errorf("%s: %v, want an error of %s", pin, err, key)
		}
	}
	// If pinning is not allowed, pins are ignored and counted, invalid ones too.
	h.cfg.Pinning = false
	for _, pin := range []string{`"backend_instance_id":99`, `"dp_rank":-1`} {
		h.route(with(req, `"nvext":{`+pin+`}`))
	}
	if n := h.counted(`kvepp_hints_ignored_total{cause="not_allowed",hint="pin"}`); n != 2 {
		t.Errorf("counted %v pins that are not allowed, want 2", n)
	}
	h.cfg.Pinning, h.cfg.IgnoreHints = true, true
	h.route(with(req, `"nvext":{"backend_instance_id":99}`))
	if n := h.counted(`kvepp_hints_ignored_total{cause="disabled",hint="pin"}`); n != 1 {
		t.Errorf("counted %v ignored pins, want 1", n)
	}
}

func TestPinningOfTwoLegs(t *testing.T) {
	h := newHouse(t, disaggregated(3, 3)...)
	h.cfg.Pinning = true
	req := completion("m", tokens(0, 40))
	for pin, want := range map[string][2]string{
		`"decode_worker_id":301`:  {"", "d1"},
		`"prefill_worker_id":202`: {"p2", ""},
		`"prefill_worker_id":200,"prefill_dp_rank":0,"decode_worker_id":302`:    {"p0", "d2"},
		`"backend_instance_id":300,"dp_rank":0,"prefill_worker_id":201`:         {"p1", "d0"},
		`"decode_worker_id":302,"backend_instance_id":1,"prefill_dp_rank":null`: {"", "d2"},
	} {
		for range 6 {
			r := h.route(with(req, `"nvext":{`+pin+`}`))
			if want[0] != "" && r.Prefill.Name != want[0] || want[1] != "" && r.Name != want[1] {
				t.Fatalf("%s: %s and %s, want %q", pin, r.Prefill.Name, r.Name, want)
			}
		}
	}
	for pin, key := range map[string]string{
		`"prefill_worker_id":300`:                     "nvext.prefill_worker_id", // decodes
		`"decode_worker_id":200`:                      "nvext.decode_worker_id",  // prefills
		`"backend_instance_id":200`:                   "nvext.backend_instance_id",
		`"prefill_worker_id":201,"prefill_dp_rank":1`: "nvext.prefill_worker_id",
	} {
		_, err := h.Route(t.Context(), with(req, `"nvext":{`+pin+`}`))
		var e *body.Error
		if !errors.As(err, &e) || e.Param != key {
			t.Errorf("%s: %v, want an error of %s", pin, err, key)
		}
	}
}
