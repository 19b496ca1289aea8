package router

import (
	"errors"
	"math"
	"strings"
	"testing"

	"kvepp/pool"
)

// constrained returns a request of 10 blocks with these routing constraints.
func constrained(constraints string) *Request {
	req := completion("m", tokens(0, 40))
	req.Body = append(req.Body[:len(req.Body)-1], `,"nvext":{"routing_constraints":`+constraints+`}}`...)
	return req
}

func TestRequiredTaints(t *testing.T) {
	es := workers(3)
	es[0].Taints = []string{"z", "gpu", "a", "gpu"}
	es[1].Taints = []string{"gpu"}
	h := newHouse(t, es...)
	for range 8 {
		r := h.route(constrained(`{"required_taints":["gpu","z"]}`))
		if r.Name != "w0" || len(r.Costs) != 1 {
			t.Errorf("decision: %+v", r.Decision)
		}
		defer r.Free()
	}
	r := h.route(constrained(`{"required_taints":[]}`)) // not to the busy worker
	defer r.Free()
	if len(r.Costs) != 3 || r.Name == "w0" {
		t.Errorf("nothing required: %+v", r.Decision)
	}
	if _, err := h.Route(t.Context(), constrained(`{"required_taints":["gpu","absent"]}`)); !errors.Is(
		err,
		ErrConstraints,
	) ||
		!strings.Contains(err.Error(), "absent") {
		t.Errorf("no endpoint has them: %v", err)
	}
	req := constrained(`{"required_taints":["gpu","absent"]}`)
	req.Body = []byte(strings.Replace(string(req.Body), `"m"`, `"other"`, 1))
	if _, err := h.Route(t.Context(), req); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("of a model without endpoints: %v", err)
	}
	h.cfg.IgnoreHints = true
	if r := h.route(constrained(`{"required_taints":["absent"]}`)); len(r.Costs) != 3 {
		t.Errorf("hints are ignored: %+v", r.Decision)
	} else {
		r.Free()
	}
	if n := h.counted(`kvepp_hints_ignored_total{cause="disabled",hint="routing_constraints"}`); n != 1 {
		t.Errorf("counted %v ignored constraints, want 1", n)
	}
}

func TestPreferredTaints(t *testing.T) {
	es := workers(3)
	es[0].Taints, es[1].Taints = []string{"near", "gpu"}, []string{"far"}
	h := newHouse(t, es...)
	r := h.route(constrained(`{"preferred_taints":{"near":0.25,"gpu":0.5,"far":-1}}`))
	defer r.Free()
	for i, sum := range []float64{0.75, -1, 0} {
		if c, want := &r.Costs[i], 20*math.Exp(-math.Tanh(sum)); c.Cost != want || c.Terms.CostMultiplier != want/20 {
			t.Errorf("%s costs %v, multiplied by %v, want %v", c.Name, c.Cost, c.Terms.CostMultiplier, want)
		}
	}
	if r.Name != "w0" {
		t.Errorf("decision: %+v", r.Decision)
	}
}

// TestTaintsOfBothLegs: constraints hold for both workers of a request.
func TestTaintsOfBothLegs(t *testing.T) {
	es := disaggregated(2, 2)
	es[1].Taints, es[2].Taints, es[3].Taints = []string{"gpu"}, []string{"gpu"}, []string{"slow"}
	h := newHouse(t, es...)
	for range 4 {
		r := h.route(constrained(`{"required_taints":["gpu"]}`))
		if r.Name != "d0" || r.Prefill.Name != "p1" {
			t.Errorf("%s, prefilled by %s", r.Name, r.Prefill.Name)
		}
		r.Free()
		r = h.route(constrained(`{"preferred_taints":{"gpu":1,"slow":2}}`))
		if r.Name != "d1" || r.Prefill.Name != "p1" {
			t.Errorf("%s, prefilled by %s", r.Name, r.Prefill.Name)
		}
		r.Free()
	}
	for _, taint := range []string{"slow", "absent"} {
		if _, err := h.Route(t.Context(), constrained(`{"required_taints":["`+taint+`"]}`)); !errors.Is(
			err,
			ErrConstraints,
		) {
			t.Errorf("%s: %v", taint, err)
		}
	}
	h.pool.Update([]pool.Endpoint{es[2]})
	if _, err := h.Route(t.Context(), constrained(`{"required_taints":["gpu"]}`)); !errors.Is(err, ErrNoPrefill) {
		t.Errorf("no prefill worker at all: %v", err)
	}
}
