package router

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/router/modelrewrite"
)

// kvepp learns an adapter from an engine's events. Its base model is that of the worker that sent them.
func TestAdaptersAreLearnedFromEvents(t *testing.T) {
	es := workers(2)
	es[1].Model = ""
	h := newHouse(t, es...)
	h.cfg.Adapters = NewAdapters(map[string]string{"named": "m"})
	h.cfg.StrictModel = true
	h.warm("w0", 0, tokens(0, 16), kvblock.HashOptions{BlockSize: 4, LoRAName: "sql"})
	if _, err := h.Route(t.Context(), completion("sql", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("before it is known: %v", err)
	}
	asked := 0
	for range 3 {
		h.cfg.Adapters.Seen(0, "sql", func() string { asked++; return "m" })
		h.cfg.Adapters.Seen(0, "named", func() string { asked++; return "other" })
		h.cfg.Adapters.Seen(0, strings.Repeat("x", maxAdapterName+1), func() string { asked++; return "m" })
		h.cfg.Adapters.Seen(0, "whose", func() string { asked++; return "" })
	}
	if asked != 2 || h.cfg.Adapters.Len() != 2 {
		t.Errorf("asked %d times for a model, %d adapters", asked, h.cfg.Adapters.Len())
	}
	if r := h.route(completion("sql", tokens(0, 16))); r.Name != "w0" || r.PredictedCachedTokens != 16 ||
		r.Reason != ReasonKV {
		t.Errorf("routed to %s with %d cached tokens, %s", r.Name, r.PredictedCachedTokens, r.Reason)
	}
	if _, err := h.Route(t.Context(), completion("whose", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("an adapter of an unknown model: %v", err)
	}
	var none *Adapters
	if none.of("sql", nil) != "" {
		t.Error("an adapter of a table that is not there")
	}
}

// One engine cannot take another model's requests: its events say only what it holds itself.
func TestAdaptersOfHostileEngines(t *testing.T) {
	es := workers(3)
	es[0].Model, es[1].Model, es[2].Model = "theirs", "ours", "ours"
	h := newHouse(t, es...)
	h.cfg.Adapters = NewAdapters(map[string]string{"named": "ours"})
	h.cfg.Models = map[string]*prompt.Model{"m": nil}
	h.cfg.StrictModel = true
	seen := func(w kvblock.Worker, name string) {
		h.cfg.Adapters.Seen(w, name, func() string { return es[w].Model })
	}
	for _, name := range []string{"ours", "theirs", "m", "named"} { // "m" is a model of the operator
		seen(0, name)
	}
	if r := h.route(completion("ours", tokens(0, 16))); r.Name == "w0" {
		t.Error("a served model's requests go to an engine that names it as its adapter")
	}
	if r := h.route(completion("named", tokens(0, 16))); r.Name == "w0" {
		t.Error("the operator's adapter goes to an engine of another model")
	}
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("a model of the operator without workers: %v", err)
	}
	h.cfg.Rewrites = rewrites(t, modelrewrite.Rule{Name: "alias", Models: []string{"public"},
		Targets: []modelrewrite.Target{{Model: "ours"}}})
	seen(0, "public")
	if r := h.route(completion("public", tokens(0, 16))); r.Name == "w0" {
		t.Error("an alias of a served model goes to an engine that names it as its adapter")
	}
	h.cfg.Rewrites = nil
	h.cfg.Adapters.Forget(0)
	// An adapter that workers of two models name is that of the model with most of them.
	seen(0, "sql")
	if r := h.route(completion("sql", tokens(0, 16))); r.Name != "w0" {
		t.Errorf("the only worker that named it: went to %s", r.Name)
	}
	seen(1, "sql")
	seen(2, "sql")
	if r := h.route(completion("sql", tokens(0, 16))); r.Name == "w0" {
		t.Error("two of three workers are of the other model")
	}
	// An engine that names thousands fills only its own share.
	for i := range 6 * maxWorkerAdapters {
		seen(0, fmt.Sprint("adapter ", i))
	}
	seen(1, "late")
	if r := h.route(completion("late", tokens(0, 16))); r.Name == "w0" {
		t.Error("went to the wrong model")
	}
	if n := h.cfg.Adapters.Len(); n < maxWorkerAdapters || n > maxWorkerAdapters+3 {
		t.Errorf("%d adapters", n)
	}
	for range 2 {
		h.cfg.Adapters.Forget(0)
	}
	if n := h.cfg.Adapters.Len(); n != 3 { // named, sql, late
		t.Errorf("%d adapters after the engine left, want 3", n)
	}
	h.cfg.Adapters.Forget(1)
	h.cfg.Adapters.Forget(2)
	if _, err := h.Route(t.Context(), completion("sql", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("an adapter of workers that left: %v", err)
	}
	if len(h.cfg.Adapters.seen)+len(h.cfg.Adapters.worker) != 0 {
		t.Errorf("%v and %v are left", h.cfg.Adapters.seen, h.cfg.Adapters.worker)
	}
}

// A model without endpoints of its own goes to the workers that report no model, unless StrictModel forbids that.
func TestUnknownModels(t *testing.T) {
	es := workers(3)
	es[1].Model, es[2].Model = "", "other"
	for _, c := range []struct {
		strict bool
		model  string
		want   string // workers that may serve it
	}{
		{false, "m", "w0 w1"},
		{false, "other", "w1 w2"},
		{false, "unserved", "w1"},
		{true, "m", "w0"}, // neither --model nor w1 names it
		{true, "other", "w2"},
		{true, "unserved", ""},
	} {
		h := newHouse(t, es...)
		h.cfg.StrictModel, h.cfg.Explain = c.strict, true
		r, err := h.Route(t.Context(), completion(c.model, tokens(0, 16)))
		var got []string
		if err == nil {
			for _, candidate := range r.Costs {
				got = append(got, candidate.Name)
			}
		}
		if strings.Join(got, " ") != c.want || err != nil && !errors.Is(err, ErrUnknownModel) {
			t.Errorf("strict %v, %q: %v, %v; want %q", c.strict, c.model, got, err, c.want)
		}
	}
	h := newHouse(t, es[1])
	h.cfg.StrictModel = true
	if r := h.route(&Request{Path: "/v1/models", BodylessReason: ReasonNoBody}); r.Name != "w1" {
		t.Errorf("a request that names no model went to %s", r.Name)
	}
}
