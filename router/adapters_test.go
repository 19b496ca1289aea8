package router

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"kvepp/kvblock"
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
		h.cfg.Adapters.Seen("sql", func() string { asked++; return "m" })
		h.cfg.Adapters.Seen("named", func() string { asked++; return "other" })
		h.cfg.Adapters.Seen(strings.Repeat("x", maxAdapterName+1), func() string { asked++; return "m" })
		h.cfg.Adapters.Seen("whose", func() string { asked++; return "" })
	}
	if asked != 2 || h.cfg.Adapters.Len() != 3 {
		t.Errorf("asked %d times for a model, %d adapters", asked, h.cfg.Adapters.Len())
	}
	if r := h.route(completion("sql", tokens(0, 16))); r.Name != "w0" || r.PredictedCachedTokens != 16 ||
		r.Reason != ReasonKV {
		t.Errorf("routed to %s with %d cached tokens, %s", r.Name, r.PredictedCachedTokens, r.Reason)
	}
	if _, err := h.Route(t.Context(), completion("whose", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("an adapter of an unknown model: %v", err)
	}
	for i := range maxSeenAdapters + 10 {
		h.cfg.Adapters.Seen(fmt.Sprint(i), func() string { return "m" })
	}
	if n := h.cfg.Adapters.Len(); n != 1+maxSeenAdapters {
		t.Errorf("%d adapters, want %d at most", n, 1+maxSeenAdapters)
	}
	var none *Adapters
	if none.of("sql") != "" {
		t.Error("an adapter of a table that is not there")
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
