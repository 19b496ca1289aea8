package router

import (
	"slices"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

func TestServedByAnother(t *testing.T) {
	h := newHouse(
		t,
		append(
			workers(2),
			pool.Endpoint{Name: "v6", Address: "[fd00::7]:8000", InstanceID: 7, BlockSize: 4, Model: "m"},
			pool.Endpoint{Name: "named", Address: "worker.example:8000", InstanceID: 8, BlockSize: 4, Model: "m"},
		)...)
	var served []string
	h.cfg.PromptComputed = func(number kvblock.Worker, _, _ int) {
		s := h.pool.Acquire()
		defer s.Release()
		for _, w := range s.Workers {
			if w.Worker == number {
				served = append(served, w.Name)
			}
		}
	}
	at := func(address string) *Route {
		req := completion("m", tokens(0, 42))
		req.Allowed = func(a string) bool { return a == address }
		return h.route(req)
	}
	for _, c := range []struct{ chosen, served, outcome, carries string }{
		{"10.0.0.1:8000", "10.0.0.1:8000", ServedByChosen, "w0"},
		{"10.0.0.1:8000", "10.0.0.2:8000", ServedByOther, "w1"},
		{"[fd00::7]:8000", "[fd00:0:0::7]:8000", ServedByChosen, "v6"},
		{"10.0.0.1:8000", "[fd00:0:0::7]:8000", ServedByOther, "v6"},
		{"10.0.0.1:8000", "10.0.0.9:8000", ServedByUnknown, ""},
		{"10.0.0.1:8000", "nonsense", ServedByUnknown, ""},
		{"worker.example:8000", "10.9.9.9:8000", ServedByUnknown, "named"}, // the name may resolve to it
	} {
		served = nil
		r := at(c.chosen)
		want := h.load(r.Name)
		if got := h.Reconcile(r, c.served, 0); got != c.outcome {
			t.Errorf("%+v: %s", c, got)
		}
		for _, name := range []string{"w0", "w1", "v6", "named"} {
			expect := scoring.Load{}
			if name == c.carries {
				expect = want
			}
			if got := h.load(name); got != expect {
				t.Errorf("%+v: %s carries %+v, want %+v", c, name, got, expect)
			}
		}
		if same := c.outcome == ServedByChosen || c.carries == "named"; r.Compares() != same {
			t.Errorf("%+v: the prediction is compared with what the engine reports: %v", c, r.Compares())
		}
		r.MarkPrefillCompleted()
		if c.carries == "" && served != nil || c.carries != "" && !slices.Equal(served, []string{c.carries}) {
			t.Errorf("%+v: %q are believed to have computed the prompt", c, served)
		}
		r.Free()
		if h.book.Len() != 0 {
			t.Fatalf("%+v: %d bookings are left", c, h.book.Len())
		}
	}
}

// With two legs the proxy reaches the decode worker.
func TestServedByAnotherDecodeWorker(t *testing.T) {
	es := workers(3)
	es[0].Role, es[1].Role, es[2].Role = pool.Prefill, pool.Decode, pool.Decode
	h := newHouse(t, es...)
	r := h.route(completion("m", tokens(0, 42)))
	prefill := h.load("w0")
	other := map[string]string{"w1": "w2", "w2": "w1"}[r.Name]
	if got := h.Reconcile(r, map[string]string{"w1": "10.0.0.2:8000", "w2": "10.0.0.3:8000"}[other],
		0); got != ServedByOther {
		t.Error(got)
	}
	if h.load(r.Name) != (scoring.Load{}) || h.load(other).ActiveBlocks != 10 || h.load("w0") != prefill {
		t.Errorf(
			"%s carries %+v, %s %+v, the prefill worker %+v",
			r.Name,
			h.load(r.Name),
			other,
			h.load(other),
			h.load("w0"),
		)
	}
	r.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d bookings are left", h.book.Len())
	}
}

func TestFallbacks(t *testing.T) {
	es := workers(4)
	es[3].DataParallelStartRank = 1 // differs from the rank in the header
	es = append(es, pool.Endpoint{Name: "same", Address: es[1].Address, InstanceID: 9, BlockSize: 4, Model: "m"})
	h := newHouse(t, es...)
	h.warm("w0", 0, tokens(0, 40), kvblock.HashOptions{BlockSize: 4})
	h.warm("w2", 0, tokens(0, 20), kvblock.HashOptions{BlockSize: 4})
	if r := h.route(completion("m", tokens(0, 42))); r.Fallbacks != nil {
		t.Errorf("fallbacks %q without the setting", r.Fallbacks)
	} else {
		r.Free()
	}
	for n, want := range [][]string{nil, {"10.0.0.3:8000"}, {"10.0.0.3:8000", "10.0.0.2:8000"},
		{"10.0.0.3:8000", "10.0.0.2:8000"}} {
		h.cfg.Fallbacks = n
		r := h.route(completion("m", tokens(0, 42)))
		if r.Name != "w0" || !slices.Equal(r.Fallbacks, want) {
			t.Errorf("%d: %s, then %q, want %q", n, r.Name, r.Fallbacks, want)
		}
		r.Free()
	}
	req := completion("m", tokens(0, 42))
	req.Allowed = func(a string) bool { return a != "10.0.0.3:8000" } // by the subset hint
	if r := h.route(req); !slices.Equal(r.Fallbacks, []string{"10.0.0.2:8000"}) {
		t.Errorf("%q", r.Fallbacks)
	}
}
