package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
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
		h.cfg.Adapters.Seen(0, strings.Repeat("x", pool.MaxAdapterName+1), func() string { asked++; return "m" })
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
	for i := range 6 * pool.MaxAdapters {
		seen(0, fmt.Sprint("adapter ", i))
	}
	seen(1, "late")
	if r := h.route(completion("late", tokens(0, 16))); r.Name == "w0" {
		t.Error("went to the wrong model")
	}
	if n := h.cfg.Adapters.Len(); n < pool.MaxAdapters || n > pool.MaxAdapters+3 {
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

// TestWithoutPath: a request of a proxy that does not say the path is routed by its tokens all the same.
func TestWithoutPath(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.warm("w1", 0, tokens(0, 16), kvblock.HashOptions{BlockSize: 4})
	req := completion("m", tokens(0, 16))
	req.Path = ""
	if r := h.route(req); r.Name != "w1" || r.PredictedCachedTokens != 16 || r.Reason != ReasonKV {
		t.Errorf("routed to %s with %d cached tokens, %s", r.Name, r.PredictedCachedTokens, r.Reason)
	}
}

// TestAdaptersWhereTheyAre: candidates are the workers that have an adapter, those with room first; one that no worker
// has goes to a worker with room, and stays there.
func TestAdaptersWhereTheyAre(t *testing.T) {
	es := workers(4)
	es[3].Model = "" // a worker of any model; its engine says nothing of adapters
	h := newHouse(t, es...)
	a := NewAdapters(map[string]string{"new": "m", "second": "m", "third": "m"})
	h.cfg.Adapters = a
	list := func(w kvblock.Worker, most int, active string, listed ...string) {
		says := pool.Adapters{Listed: map[string]string{}, Active: strings.Fields(active), Most: most}
		for _, name := range listed {
			says.Listed[name] = "base"
		}
		a.List(w, says, func(string) string { return "m" })
	}
	routes := func(name string) string {
		t.Helper()
		went := map[string]bool{}
		for range 8 {
			r, err := h.Route(t.Context(), completion(name, tokens(0, 16)))
			if err != nil {
				return err.Error()
			}
			defer r.Free()
			went[r.Name] = true
		}
		return strings.Join(slices.Sorted(maps.Keys(went)), " ")
	}
	want := func(what, name, want string) {
		t.Helper()
		if got := routes(name); !strings.Contains(got, want) || want == "" {
			t.Errorf("%s: %q goes to %s, want %s", what, name, got, want)
		}
	}
	want("no engine names any", "new", "w0 w1 w2 w3")
	list(0, 0, "", "sql", "both")
	list(1, 2, "", "both")
	want("listed by one", "sql", "w0")
	want("listed by two", "both", "w0 w1")
	want("a model", "m", "w0 w1 w2 w3")
	list(1, 2, "x y", "both")
	want("one without room", "both", "w0")
	list(1, 2, "both y", "both")
	want("it has room for its own", "both", "w0 w1")
	list(1, 2, "x y", "only")
	want("without room, alone", "only", "w1")
	list(2, 0, "active")
	want("only active", "sql", "w0")

	list(0, 1, "x")
	list(1, 1, "")
	list(2, 1, "x")
	if want("loads", "new", "w1"); a.Loads() != 1 {
		t.Errorf("%d loads", a.Loads())
	}
	if got := routes("second") + routes("second"); a.Loads() != 2 || len(got) != 4 || got[:2] != got[2:] {
		t.Errorf("without room the second goes to %s, %d loads", got, a.Loads())
	}
	list(1, 1, "x") // the engine has not loaded it yet
	if want("stays", "new", "w1"); a.Loads() != 2 {
		t.Errorf("%d loads", a.Loads())
	}
	list(2, 1, "", "new")
	want("listed elsewhere", "new", "w2")
	list(2, 1, "")
	want("no longer", "new", "w1")
	a.Left(1)
	if want("the worker left", "new", "w2"); a.Loads() != 3 {
		t.Errorf("%d loads", a.Loads())
	}
	for w := range kvblock.Worker(3) {
		a.Left(w)
		a.Left(w)
	}
	if len(a.placed)+len(a.seen) > 0 {
		t.Errorf("%v and %v are left", a.placed, a.seen)
	}
	want("no engine names any more", "new", "w0 w1 w2 w3")

	// Other workers do not load it while those that have it get no requests.
	list(0, 0, "", "sql")
	h.cfg.Thresholds = Thresholds{ActivePrefillTokens: new(uint64)}
	h.Router = New(h.cfg, h.pool, h.index, h.book, h.metrics, h.log)
	busy := h.route(completion("sql", tokens(0, 400)))
	defer busy.Free()
	want("its worker is overloaded", "sql", ErrOverloaded.Error())
}

// TestAdapterNamesAreBounded: neither clients nor engines fill the table of places.
func TestAdapterNamesAreBounded(t *testing.T) {
	a := NewAdapters(nil)
	a.List(0, pool.Adapters{Most: 1}, nil)
	for i := range 2 * maxPlaced {
		a.place(placement{adapter: fmt.Sprint("adapter ", i)}, 0)
	}
	if len(a.placed) != maxPlaced || a.Loads() != 2*maxPlaced {
		t.Errorf("%d places, %d loads", len(a.placed), a.Loads())
	}
	h := newHouse(t, workers(2)...)
	h.cfg.Engine, h.cfg.Adapters = prompt.SGLang, NewAdapters(nil)
	h.cfg.Adapters.List(0, pool.Adapters{Most: 1}, nil)
	h.route(&Request{Path: "/v1/completions", Body: []byte(`{"model":"m:made up","prompt":[1,2,3,4]}`)}).Free()
	if len(h.cfg.Adapters.placed) > 0 {
		t.Error("a client's name has a place")
	}
}

// TestAdaptersOfPrefillWorkers: each of the two workers of a request has the adapter, or loads it.
func TestAdaptersOfPrefillWorkers(t *testing.T) {
	es := workers(4)
	es[0].Role, es[1].Role, es[2].Role, es[3].Role = pool.Prefill, pool.Prefill, pool.Decode, pool.Decode
	h := newHouse(t, es...)
	h.cfg.Adapters = NewAdapters(map[string]string{"sql": "m"})
	own := func(string) string { return "m" }
	h.cfg.Adapters.List(1, pool.Adapters{Most: 1}, own)
	h.cfg.Adapters.List(3, pool.Adapters{Listed: map[string]string{"sql": "m"}}, own)
	for range 6 {
		r := h.route(completion("sql", tokens(0, 16)))
		defer r.Free()
		if r.Name != "w3" || r.Prefill.Name != "w1" || h.cfg.Adapters.Loads() != 1 {
			t.Errorf("went to %s and %s, %d loads", r.Prefill.Name, r.Name, h.cfg.Adapters.Loads())
		}
	}
	h.cfg.Adapters.List(2, pool.Adapters{Most: 1}, own)
	h.cfg.Adapters.List(3, pool.Adapters{Most: 1}, own)
	went := map[string]bool{}
	for range 20 {
		r := h.route(completion("sql", tokens(0, 16)))
		defer r.Free()
		went[r.Name] = true
	}
	if len(went) != 1 || h.cfg.Adapters.Loads() != 2 {
		t.Errorf("no decode worker has it: went to %v, %d loads", went, h.cfg.Adapters.Loads())
	}
}

// TestGenerate: token ids of the engines' own /generate are exact without a tokenizer, and need no model.
func TestGenerate(t *testing.T) {
	for path, field := range map[string]string{"/inference/v1/generate": "token_ids", "/generate": "input_ids"} {
		h := newHouse(t, workers(2)...)
		h.warm("w1", 0, tokens(0, 16), blocksOfFour)
		ids, err := json.Marshal(tokens(0, 16))
		if err != nil {
			t.Fatal(err)
		}
		r := h.route(&Request{Path: path, Body: fmt.Appendf(nil, `{%q:%s}`, field, ids)})
		if r.Name != "w1" || r.Reason != ReasonKV || r.PredictedCachedTokens != 16 {
			t.Errorf("%s: %+v", path, r.Decision)
		}
		r.Free()
	}
	h := newHouse(t, workers(1)...)
	r := h.route(&Request{Path: "/generate", Body: []byte(`{"inputs":"of another server"}`)})
	if r.Reason != ReasonUnknownAPI {
		t.Errorf("%+v", r.Decision)
	}
	r.Free()
}
