package router

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"kvepp/internal/metrics/metricstest"
	"kvepp/prompt/body"
	"kvepp/router/modelrewrite"
	"kvepp/router/queue"
)

func rewrites(t *testing.T, rules ...modelrewrite.Rule) *modelrewrite.Rules {
	t.Helper()
	r := new(modelrewrite.Rules)
	if err := r.Set(rules); err != nil {
		t.Fatal(err)
	}
	return r
}

var toM = []modelrewrite.Target{{Model: "m"}}

// A rewritten request is tokenized, routed and forwarded with the other model. The decision gives both names.
func TestRewrittenModel(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.StrictModel = true
	h.warm("w1", 0, tokens(0, 16), blocksOfFour)
	if _, err := h.Route(t.Context(), completion("alias", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Fatalf("without a rule: %v", err)
	}
	h.cfg.Rewrites = rewrites(t, modelrewrite.Rule{Name: "first", Models: []string{"alias", "m"}, Targets: toM})
	r := h.route(completion("alias", tokens(0, 16)))
	if r.Name != "w1" || r.PredictedCachedTokens != 16 || r.Renamed == nil ||
		*r.Renamed != (Renamed{"alias", "m", "alias"}) {
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
	if counted := metricstest.Read(t, h.metrics.Registry).Of(
		"inference_extension_model_rewrite_decisions_total").Value(); counted != 2 {
		t.Errorf("%v rewrites are counted, want 2", counted)
	}
}

// A request without a priority of its own has that of its objective. If the objective's is below 0, the request is
// refused instead of waiting.
func TestObjectives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
		h.cfg.Objectives = new(Objectives)
		h.cfg.Objectives.Set(map[string]int32{"urgent": 10, "batch": -1})
		with := func(objective string, from int, headers ...string) *Request {
			r := completion("m", tokens(from, 40))
			var said body.HeaderHints
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
		if h.allWaiting() != 3 {
			t.Fatalf("%d wait", h.allWaiting())
		}
		for _, name := range []string{"a", "d", "c"} {
			a.prefilled(name)
		}
		if a.order() != "a d c b" {
			t.Errorf("went: %s", a.order())
		}
		h.cfg.IgnoreHints = true
		if r := h.follow(body.Hints{Objective: "batch"}); r.Objective != "" {
			t.Error("an objective is followed though clients' hints are not")
		}
	})
}

func TestRemoteSeesTheNameThatItKnows(t *testing.T) {
	req := completion("alias", tokens(0, 4))
	p := prepared{renamed: &Renamed{Requested: "alias", Upstream: "m"}, forward: []byte("changed")}
	if got := p.seen(req); string(got.Body) != "changed" || got.Path != req.Path ||
		!slices.Equal(completion("alias", tokens(0, 4)).Body, req.Body) {
		t.Errorf("%q, and the request's own is %q", got.Body, req.Body)
	}
	if p.renamed = nil; p.seen(req) != req {
		t.Error("another request though nothing changed")
	}
}
