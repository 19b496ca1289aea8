package router

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"kvepp/internal/apibody"
	"kvepp/router/queue"
)

func rewrites(t *testing.T, rules ...Rewrite) *Rewrites {
	t.Helper()
	w := new(Rewrites)
	if err := w.Set(rules); err != nil {
		t.Fatal(err)
	}
	return w
}

func to(models ...string) (targets []RewriteTarget) {
	for _, m := range models {
		targets = append(targets, RewriteTarget{Model: m})
	}
	return targets
}

// A rewritten request is routed, tokenized and sent as one for the other model, and both names are told.
func TestRewrittenModel(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.StrictModel = true
	h.warm("w1", 0, tokens(0, 16), blocksOfFour)
	if _, err := h.Route(t.Context(), completion("alias", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Fatalf("without a rule: %v", err)
	}
	h.cfg.Rewrites = rewrites(t, Rewrite{Name: "first", Models: []string{"alias", "m"}, Targets: to("m")})
	r := h.route(completion("alias", tokens(0, 16)))
	if r.Name != "w1" || r.PredictedCachedTokens != 16 || r.Renamed == nil || *r.Renamed != (Renamed{"alias", "m", "alias"}) {
		t.Errorf("routed to %s with %d cached tokens, renamed %v", r.Name, r.PredictedCachedTokens, r.Renamed)
	}
	var body struct{ Model string }
	if err := json.Unmarshal(r.Body, &body); err != nil || body.Model != "m" {
		t.Errorf("the endpoint gets %s (%v)", r.Body, err)
	}
	if r := h.route(completion("m", tokens(0, 16))); r.Renamed != nil || r.Body != nil {
		t.Errorf("a model that stays what it is: %v, body %s", r.Renamed, r.Body)
	}
	if _, err := h.Route(t.Context(), completion("other", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("a name that no rule has: %v", err)
	}
	families, err := h.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counted := 0.0
	for _, f := range families {
		if f.GetName() == "inference_extension_model_rewrite_decisions_total" {
			for _, m := range f.GetMetric() {
				counted += m.GetCounter().GetValue()
			}
		}
	}
	if counted != 2 {
		t.Errorf("%v rewrites are counted, want 2", counted)
	}
}

// An exact name goes before a rule for all, and the first of each kind holds.
func TestWhichRuleHolds(t *testing.T) {
	w := rewrites(t, Rewrite{Name: "a", Targets: to("all")}, Rewrite{Name: "b", Models: []string{"x"}, Targets: to("first")},
		Rewrite{Name: "c", Models: []string{"x", "y"}, Targets: to("second")}, Rewrite{Name: "d", Targets: to("never")})
	for model, want := range map[string]string{"x": "b first x", "y": "c second y", "z": "a all other"} {
		if rule, target := w.of(model); rule == nil || rule.Name+" "+target+" "+rule.label(model) != want {
			t.Errorf("%s: %v %s, want %s", model, rule, target, want)
		}
	}
	if rule, _ := new(Rewrites).of("x"); rule != nil {
		t.Errorf("without rules: %v", rule)
	}
	before, _ := w.of("x")
	for _, bad := range [][]Rewrite{{{Name: "n"}}, {{Name: "n", Targets: to("")}}, {{Name: "n", Models: []string{""}, Targets: to("m")}},
		{{Name: "n", Targets: []RewriteTarget{{"m", -1}}}}, {{Name: "n", Targets: []RewriteTarget{{"m", maxRewriteWeight + 1}}}}} {
		if err := w.Set(bad); err == nil || !strings.Contains(err.Error(), "n") {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if after, _ := w.of("x"); after != before {
		t.Error("refused rules took the place of the others")
	}
}

func TestRewriteWeights(t *testing.T) {
	for _, c := range []struct {
		weights []int
		want    []float64
	}{{[]int{0, 0, 0, 0}, []float64{.25, .25, .25, .25}}, {[]int{90, 9, 1}, []float64{.9, .09, .01}}, {[]int{0, 5}, []float64{0, 1}}} {
		rule := Rewrite{Name: "w", Models: []string{"x"}}
		for i, weight := range c.weights {
			rule.Targets = append(rule.Targets, RewriteTarget{Model: string(rune('a' + i)), Weight: weight})
		}
		w, drawn := rewrites(t, rule), make([]float64, len(c.weights))
		const draws = 20000
		for range draws {
			_, target := w.of("x")
			drawn[target[0]-'a']++
		}
		for i, want := range c.want { // five standard deviations of the widest are 0.018
			if got := drawn[i] / draws; got < want-.02 || got > want+.02 || want == 0 && got != 0 {
				t.Errorf("weights %v: %v of %s, want %v", c.weights, got, rule.Targets[i].Model, want)
			}
		}
	}
}

// A request has the priority of its objective where it says none itself. One below 0 is turned away instead of waiting.
func TestObjectives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
		h.cfg.Objectives = new(Objectives)
		h.cfg.Objectives.Set(map[string]int32{"urgent": 10, "batch": -1})
		with := func(objective string, from int, headers ...string) *Request {
			r := completion("m", tokens(from, 40))
			var said apibody.HeaderHints
			for _, h := range append(headers, "x-gateway-inference-objective="+objective) {
				name, value, _ := strings.Cut(h, "=")
				said.Add(name, value)
			}
			r.Hints = said.Hints()
			return r
		}
		if r, err := h.Route(t.Context(), with("batch", 0)); err != nil {
			t.Fatalf("while a worker is ready: %v", err)
		} else {
			r.Free()
		}
		a := arriveAt(h)
		a.send(t.Context(), "a", with("", 1000))
		a.send(t.Context(), "b", with("unheard of", 2000))
		a.send(t.Context(), "c", with("urgent", 3000))
		if _, err := h.Route(t.Context(), with("batch", 4000)); !errors.Is(err, ErrShed) {
			t.Fatalf("a request that may be turned away: %v", err)
		}
		a.send(t.Context(), "d", with("urgent", 5000, "x-dynamo-request-strict-priority=20"))
		if h.AllWaiting() != 3 {
			t.Fatalf("%d wait", h.AllWaiting())
		}
		for _, name := range []string{"a", "d", "c"} {
			a.prefilled(name)
		}
		if a.order() != "a d c b" {
			t.Errorf("went: %s", a.order())
		}
		h.cfg.IgnoreHints = true
		if r := h.follow(apibody.Hints{Objective: "batch"}); r.Objective != "" {
			t.Error("an objective is followed though clients' hints are not")
		}
	})
}

func TestRemoteSeesTheNameThatItKnows(t *testing.T) {
	req := completion("alias", tokens(0, 4))
	p := prompt{renamed: &Renamed{Asked: "alias", Served: "m"}, forward: []byte("changed")}
	if got := p.seen(req); string(got.Body) != "changed" || got.Path != req.Path || !slices.Equal(completion("alias", tokens(0, 4)).Body, req.Body) {
		t.Errorf("%q, and the request's own is %q", got.Body, req.Body)
	}
	if p.renamed = nil; p.seen(req) != req {
		t.Error("another request though nothing changed")
	}
}
