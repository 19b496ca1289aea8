package router

import (
	"fmt"
	"strings"
	"testing"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

// counted returns a metric's value by its name and labels, as in name{a="b",c="d"}; -1 if there is no such series.
func (h *house) counted(series string) float64 {
	h.t.Helper()
	families, err := h.metrics.Registry.Gather()
	if err != nil {
		h.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName()
			if labels != nil {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			if name == series {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return -1
}

// A tenant is a cache salt where the endpoint makes it one, and it goes before the body's.
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
		{false, false, "t", req, "w0"}, // a stock engine does not know of it
		{true, false, "", req, "w0"},
		{true, false, "t", req, "w1"},
		{true, false, "t", salted, "w1"},
		{true, false, "", salted, "w2"},
		{true, true, "t", req, "w0"}, // taken off the request
		{true, true, "t", salted, "w2"},
	} {
		h.cfg.TenantSalts, h.cfg.IgnoreHints = c.salts, c.ignore
		r := *c.req
		r.Hints = apibody.Hints{Tenant: c.tenant}
		route := h.route(&r)
		if route.Name != c.want || route.PredictedCachedTokens != 40 {
			t.Errorf("%+v: %s with %d cached tokens, want %s", c, route.Name, route.PredictedCachedTokens, c.want)
		}
		route.Free()
	}
}

func TestIgnoredHintsAreCounted(t *testing.T) {
	h := newHouse(t, workers(1)...)
	for _, hint := range apibody.HintNames {
		for _, cause := range []string{"malformed", "disabled"} {
			if n := h.counted(fmt.Sprintf(`kvepp_hints_ignored_total{cause=%q,hint=%q}`, cause, hint)); n != 0 {
				t.Errorf("%s %s starts at %v, want 0", hint, cause, n)
			}
		}
	}
	var headers apibody.HeaderHints
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
		`cause="disabled",hint="priority"`: 1, `cause="disabled",hint="osl"`: 1, `cause="disabled",hint="tenant"`: 1,
		`cause="disabled",hint="strict_priority"`: 1, `cause="disabled",hint="session"`: 0,
	} {
		if n := h.counted("kvepp_hints_ignored_total{" + series + "}"); n != want {
			t.Errorf("%s: %v, want %v", series, n, want)
		}
	}
}
