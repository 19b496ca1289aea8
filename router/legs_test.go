package router

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/scoring"
)

// disaggregated returns p prefill and d decode workers, named p0 and d0, with blocks of four tokens.
func disaggregated(p, d int) []pool.Endpoint {
	var es []pool.Endpoint
	for i := range p {
		es = append(es, pool.Endpoint{Name: fmt.Sprintf("p%d", i), InstanceID: uint64(200 + i), Role: pool.Prefill,
			BlockSize: 4, KVEvents: "tcp://10.0.1.1:5557", Model: "m"})
	}
	for i := range d {
		es = append(
			es,
			pool.Endpoint{
				Name:       fmt.Sprintf("d%d", i),
				Address:    fmt.Sprintf("10.0.2.%d:8000", i+1),
				InstanceID: uint64(300 + i),
				Role:       pool.Decode,
				BlockSize:  4,
				Model:      "m",
			},
		)
	}
	return es
}

func (h *house) load(name string) scoring.Load {
	s := h.pool.Acquire()
	defer s.Release()
	for _, w := range s.Workers {
		if w.Name == name {
			return h.book.Load(w.Worker)
		}
	}
	return scoring.Load{}
}

// TestTwoLegs: the prefill leg goes to the worker with the prompt's blocks, the decode leg to the least loaded one.
// Each is booked for its own part.
func TestTwoLegs(t *testing.T) {
	h := newHouse(t, disaggregated(3, 2)...)
	var served []kvblock.Worker
	h.cfg.PromptComputed = func(w kvblock.Worker, _, _ int) { served = append(served, w) }
	h.warm("p1", 0, tokens(0, 32), blocksOfFour)
	h.warm("d0", 0, tokens(0, 40), blocksOfFour) // must not count: it only decodes
	r := h.route(completion("m", tokens(0, 42)))
	x := r.Prefill
	if x == nil || x.Name != "p1" || x.InstanceID != 201 || r.Name[0] != 'd' || r.Address == "" ||
		r.PredictedCachedTokens != 32 ||
		r.Reason != ReasonKV {
		t.Fatalf("decision: %+v, prefill %+v", r.Decision, x)
	}
	// Prefill: 10.5 blocks less the overlap, without decode blocks. Decode: 10 blocks.
	prefill := scoring.Terms{BlockSize: 4, ISLTokens: 42, UnitTokens: 4}
	warm := prefill
	warm.DeviceBlocks = 8
	if want := []Cost{{"p0", 0, 10.5, prefill, 0}, {"p1", 0, 2.5, warm, 8}, {"p2", 0, 10.5, prefill, 0}}; !slices.Equal(
		x.Costs,
		want,
	) ||
		x.Chosen != 1 {
		t.Errorf("prefill costs %+v, want %+v", x.Costs, want)
	}
	decode := scoring.Terms{BlockSize: 4, ISLTokens: 42, DecodeBlocks: 10, UnitTokens: 4}
	if want := []Cost{{"d0", 0, 10, decode, 0}, {"d1", 0, 10, decode, 0}}; !slices.Equal(r.Costs, want) ||
		r.Costs[r.Chosen].Name != r.Name {
		t.Errorf("decode costs %+v, want %+v", r.Costs, want)
	}
	if got, want := h.load("p1"), (scoring.Load{Requests: 1, PrefillTokens: 10}); got != want {
		t.Errorf("prefill load %+v, want %+v", got, want)
	}
	if got, want := h.load(r.Name), (scoring.Load{Requests: 1, ActiveBlocks: 10, ActiveTokens: 40}); got != want {
		t.Errorf("decode load %+v, want %+v", got, want)
	}
	// A second request shares no blocks with the first on its decode worker: there, kvepp does not assume KV reuse.
	again := h.route(completion("m", tokens(0, 42)))
	if again.Name == r.Name || again.Costs[0].Cost+again.Costs[1].Cost != 30 {
		t.Errorf("the second went to %s as well, costs %+v", again.Name, again.Costs)
	}
	again.Free()
	r.MarkPrefillCompleted()
	r.MarkPrefillCompleted()
	if got := h.load("p1"); got != (scoring.Load{}) {
		t.Errorf("after the first byte the prefill worker has %+v", got)
	}
	if got := h.load(r.Name); got.ActiveBlocks != 10 || got.Requests != 1 {
		t.Errorf("and the decode worker %+v", got)
	}
	s := h.pool.Acquire()
	defer s.Release()
	if len(served) != 1 || s.Workers[1].Worker != served[0] {
		t.Errorf("served: %v, want the prefill worker", served)
	}
	r.Free()
	r.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestLegsAreCounted: requests are counted by role. The series exist from the start.
func TestLegsAreCounted(t *testing.T) {
	h := newHouse(t, disaggregated(1, 1)...)
	count := func(unpaired, aggregated, pairs float64) {
		t.Helper()
		for series, want := range map[string]float64{"kvepp_unpaired_requests_total": unpaired,
			`kvepp_selections_total{role="aggregated"}`: aggregated,
			`kvepp_selections_total{role="prefill"}`:    pairs, `kvepp_selections_total{role="decode"}`: pairs} {
			if n := h.counted(series); n != want {
				t.Errorf("%s is %v, want %v", series, n, want)
			}
		}
	}
	count(0, 0, 0)
	h.route(completion("m", tokens(0, 8))).Free()
	count(0, 0, 1)
	h.pool.Update(disaggregated(0, 1))
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 8))); err == nil {
		t.Error("routed without a prefill worker")
	}
	h.pool.Update(workers(1))
	h.route(completion("m", tokens(0, 8))).Free()
	count(1, 1, 1)
}

// TestOnlyCandidateIsCounted: for each leg, and only if it had no choice.
func TestOnlyCandidateIsCounted(t *testing.T) {
	h := newHouse(t, disaggregated(1, 2)...)
	h.route(completion("m", tokens(0, 8))).Free()
	if n := h.counted("kvepp_only_candidate_total"); n != 1 {
		t.Errorf("one prefill and two decode workers: %v legs without a choice, want 1", n)
	}
	h.pool.Update(workers(2))
	h.route(completion("m", tokens(0, 8))).Free()
	h.pool.Update(workers(1))
	h.route(completion("m", tokens(0, 8))).Free()
	if n := h.counted("kvepp_only_candidate_total"); n != 2 {
		t.Errorf("then two workers, then one: %v in all, want 2", n)
	}
}

// TestTwoLegsEndBeforeTheFirstByte: a client that leaves early leaves no load on either worker.
func TestTwoLegsEndBeforeTheFirstByte(t *testing.T) {
	h := newHouse(t, disaggregated(1, 1)...)
	r := h.route(completion("m", tokens(0, 42)))
	if h.book.Len() != 2 {
		t.Fatalf("%d booked, want both legs", h.book.Len())
	}
	r.Free()
	if h.book.Len() != 0 || h.load("p0") != (scoring.Load{}) || h.load("d0") != (scoring.Load{}) {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestBurstSpreadsOverBothLegs: on each leg, choice and booking are one step.
func TestBurstSpreadsOverBothLegs(t *testing.T) {
	h := newHouse(t, disaggregated(3, 4)...)
	var wait sync.WaitGroup
	routes := make([]*Route, 600)
	for i := range routes {
		wait.Go(func() { routes[i] = h.route(completion("m", tokens(0, 64))) })
	}
	wait.Wait()
	count := map[string]int{}
	for _, r := range routes {
		count[r.Name]++
		count[r.Prefill.Name]++
	}
	for name, want := range map[string]int{"p0": 200, "p1": 200, "p2": 200, "d0": 150, "d1": 150, "d2": 150,
		"d3": 150} {
		if n := count[name]; n < want-1 || n > want+1 {
			t.Errorf("requests per worker: %v", count)
			break
		}
	}
	h.end(routes)
}

// TestNoPrefillWorker: without a prefill worker kvepp refuses the request with a reason; a direct frontend would answer
// 500.
func TestNoPrefillWorker(t *testing.T) {
	h := newHouse(t, disaggregated(0, 2)...)
	request := completion("m", tokens(0, 16))
	if _, err := h.Route(t.Context(), request); !errors.Is(err, ErrNoPrefill) {
		t.Errorf("no prefill worker: %v", err)
	}
	for _, nothing := range []*Request{{Path: "/v1/models", BodylessReason: ReasonNoBody},
		{Path: "/v1/embeddings", Body: []byte(`{"model":"m"}`)}} {
		if r := h.route(nothing); r.Name[0] != 'd' || r.Prefill != nil {
			t.Errorf("%s has nothing to prefill: %+v", nothing.Path, r.Decision)
		} else {
			r.Free()
		}
	}
	other := disaggregated(1, 0)
	other[0].Model = "another"
	h.pool.Update(append(disaggregated(0, 2), other...))
	if _, err := h.Route(t.Context(), request); !errors.Is(err, ErrNoPrefill) {
		t.Errorf("a prefill worker of another model: %v", err)
	}
	h.pool.Update(disaggregated(2, 0))
	if _, err := h.Route(t.Context(), request); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("prefill workers alone: %v", err)
	}
	h.pool.Update([]pool.Endpoint{{Name: "e", Address: "10.0.0.1:1", Role: pool.Encode, Model: "m"}})
	if _, err := h.Route(t.Context(), request); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("an encode worker alone: %v", err)
	}
	h.pool.Update(append(disaggregated(0, 1), workers(1)...))
	if r := h.route(request); r.Name != "w0" || r.Prefill != nil {
		t.Errorf("with an aggregated worker beside: %+v", r.Decision)
	} else {
		r.Free()
	}
	if h.book.Len() != 0 {
		t.Errorf("%d refused requests are booked", h.book.Len())
	}
}

// TestStockPrefill: a stock decode worker serves the whole request unless a prefill worker has an address.
func TestStockPrefill(t *testing.T) {
	es := disaggregated(2, 1)
	h := newHouse(t, es...)
	h.cfg.StockPrefill = true
	h.warm("d0", 0, tokens(0, 16), blocksOfFour)
	r := h.route(completion("m", tokens(0, 16)))
	if r.Name != "d0" || r.Prefill != nil || r.PredictedCachedTokens != 16 {
		t.Errorf("no prefill worker has an address: %+v, prefill %+v", r.Decision, r.Prefill)
	}
	r.Free()
	es[1].Address = "10.0.1.1:8000"
	h.pool.Update(es)
	r = h.route(completion("m", tokens(0, 16)))
	if r.Name != "d0" || r.Prefill == nil || r.Prefill.Address != "10.0.1.1:8000" {
		t.Errorf("one has: %+v, prefill %+v", r.Decision, r.Prefill)
	}
	r.Free()
}

// TestDisaggregate: a decode worker works alone on a short prompt, and on one that it mostly holds, also because it
// served the prompt before.
func TestDisaggregate(t *testing.T) {
	es := disaggregated(1, 2)
	es[0].Address = "10.0.1.1:8000"
	h := newHouse(t, es...)
	h.cfg.StockPrefill, h.cfg.Disaggregation = true, scoring.Disaggregation{On: true, Policy: scoring.ISLBounding,
		EffISL: 8, EffISLRatio: math.Inf(1), LeastPrompt: 12}
	h.cfg.Predict = Predict{TTL: time.Minute, Alone: true}
	for _, c := range []struct {
		prompt  []kvblock.Token
		prefill bool
		why     string
	}{
		{tokens(0, 11), false, "short"},
		{tokens(100, 140), true, "new"},
		{tokens(100, 144), false, "4 new tokens"},
		{tokens(100, 160), true, "20 new tokens"},
	} {
		r := h.route(completion("m", c.prompt))
		if (r.Prefill != nil) != c.prefill || r.Name[0] != 'd' {
			t.Errorf("%s: %+v, prefill %+v", c.why, r.Decision, r.Prefill)
		}
		r.Free()
	}
	h.cfg.NoPrefill = true
	r := h.route(completion("m", tokens(200, 240)))
	if r.Prefill != nil || r.Name[0] != 'd' {
		t.Errorf("no prefill worker may be used: %+v", r.Decision)
	}
	r.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestPairs: both workers of a request are of one Dynamo namespace and one model, because a direct frontend knows only
// those.
func TestPairs(t *testing.T) {
	es := disaggregated(4, 6)
	for i := range es {
		es[i].Namespace = []string{"blue", "green"}[i%2]
		es[i].Model = []string{"m", "other"}[i/2%2]
	}
	es[9].Namespace = "red"                 // d5: no worker prefills for it
	es[1].KVEvents, es[1].BlockSize = "", 0 // a worker without events and block size
	h := newHouse(t, es...)
	of := map[string]pool.Endpoint{}
	for _, e := range es {
		of[e.Name] = e
	}
	seen := map[string]bool{}
	for i := range 200 {
		request := completion("m", tokens(i, 16))
		if i%2 == 0 { // a worker without a model
			request = &Request{Path: "/v1/chat/completions", BodylessReason: ReasonBodyMode}
		}
		r := h.route(request)
		p, d := of[r.Prefill.Name], of[r.Name]
		if p.Namespace != d.Namespace || p.Model != d.Model || i%2 == 1 && p.Model != "m" {
			t.Fatalf("%s (%s, %s) prefills for %s (%s, %s)", p.Name, p.Namespace, p.Model, d.Name, d.Namespace, d.Model)
		}
		seen[p.Name], seen[d.Name] = true, true
	}
	if len(seen) != 9 || seen["d5"] {
		t.Errorf("chosen: %v, want all but d5", seen)
	}
}

// TestTransfer: the decode worker is in the prefill worker's zone if the card requires it. If the card prefers it, the
// zone lowers the cost.
func TestTransfer(t *testing.T) {
	const here, there = "dynamo.topology/zone=here", "dynamo.topology/zone=there"
	es := disaggregated(2, 4)
	es[2].Taints, es[3].Taints, es[4].Taints = []string{here, "x"}, []string{"x", here}, []string{there}
	es[0].Transfer = pool.Transfer{Taint: here, Required: true}
	es[1].Transfer = pool.Transfer{Taint: there, Weight: 0.5}
	h := newHouse(t, es...)
	h.warm("p0", 0, tokens(0, 40), blocksOfFour)
	h.warm("p1", 0, tokens(500, 40), blocksOfFour)
	for range 8 {
		r := h.route(completion("m", tokens(0, 40)))
		if r.Prefill.Name != "p0" || len(r.Costs) != 2 || r.Name != "d0" && r.Name != "d1" {
			t.Errorf("prefilled by %s, decoded by %s of %+v", r.Prefill.Name, r.Name, r.Costs)
		}
		r.Free()
		r = h.route(completion("m", tokens(500, 40)))
		near := 10 * math.Exp(-math.Tanh(0.5))
		if r.Prefill.Name != "p1" || r.Name != "d2" || len(r.Costs) != 4 || r.Costs[0].Cost != 10 ||
			r.Costs[2].Cost != near {
			t.Errorf("prefilled by %s, decoded by %s of %+v", r.Prefill.Name, r.Name, r.Costs)
		}
		r.Free()
	}
	// The request's own preferences count as well. Its required taints hold for both workers.
	req := completion("m", tokens(500, 40))
	req.Body = append(req.Body[:len(req.Body)-1], `,"nvext":{"routing_constraints":{"preferred_taints":{"x":2}}}}`...)
	r := h.route(req)
	if r.Costs[0].Cost != 10*math.Exp(-math.Tanh(2)) || r.Name == "d2" {
		t.Errorf("%s of %+v", r.Name, r.Costs)
	}
	r.Free()
	// A prefill worker whose zone has no decode worker is no candidate, even with the whole prompt cached.
	h.pool.Update([]pool.Endpoint{es[0], es[1], es[4], es[5]})
	r = h.route(completion("m", tokens(0, 40)))
	if r.Prefill.Name != "p1" || len(r.Prefill.Costs) != 1 {
		t.Errorf("prefilled by %s of %+v", r.Prefill.Name, r.Prefill.Costs)
	}
	r.Free()
	h.pool.Update([]pool.Endpoint{es[0], es[4]})
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 40))); !errors.Is(err, ErrNoPrefill) {
		t.Errorf("no decode worker in the prefill worker's zone: %v", err)
	}
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestOneOrTwo: if a model has aggregated workers and pairs, a request goes to the cheaper of the two.
func TestOneOrTwo(t *testing.T) {
	h := newHouse(t, append(disaggregated(1, 1), workers(1)...)...)
	request := func() *Request { return completion("m", tokens(0, 40)) }
	h.warm("p0", 0, tokens(0, 20), blocksOfFour)
	pair := h.route(request()) // 5+10 against 10+10
	if pair.Prefill == nil || pair.Name != "d0" || h.book.Len() != 2 {
		t.Errorf("a warm prefill worker: %+v, %d booked", pair.Decision, h.book.Len())
	}
	alone := h.route(request()) // 5+5+20 against 20
	if alone.Prefill != nil || alone.Name != "w0" || h.book.Len() != 3 {
		t.Errorf("a busy pair: %+v, %d booked", alone.Decision, h.book.Len())
	}
	pair.Free()
	alone.Free()
	h.warm("w0", 0, tokens(0, 20), blocksOfFour)
	even := h.route(request())
	if even.Prefill != nil {
		t.Errorf("at the same cost one worker is better than two: %+v", even.Decision)
	}
	even.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestOneOrTwoByMode: in a mode without costs, aggregated workers and pairs get requests in proportion to their
// destinations.
func TestOneOrTwoByMode(t *testing.T) {
	h := newHouse(t, append(disaggregated(1, 1), workers(3)...)...)
	h.cfg.Scoring.Mode = scoring.RoundRobin
	count := map[string]int{}
	for range 4000 {
		r := h.route(completion("m", tokens(0, 40)))
		count[r.Name]++
		if (r.Prefill != nil) != (r.Name == "d0") {
			t.Fatalf("%+v", r.Decision)
		}
		r.Free()
	}
	for _, name := range []string{"d0", "w0", "w1", "w2"} {
		if n := count[name]; n < 800 || n > 1200 { // more than six standard deviations off
			t.Errorf("requests per worker: %v, want 1000 each", count)
			break
		}
	}
}

// TestBusyLegs: a leg's workers above a busy threshold are no candidates, and a refusal gives that reason.
func TestBusyLegs(t *testing.T) {
	h := newHouse(t, disaggregated(2, 2)...)
	limit := uint64(40)
	h.thresholds.start(Thresholds{ActivePrefillTokens: &limit})
	names := map[string]bool{}
	for range 2 {
		r := h.route(completion("m", tokens(0, 41)))
		defer r.Free()
		names[r.Prefill.Name] = true
	}
	if len(names) != 2 {
		t.Errorf("prefill workers: %v", names)
	}
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 41))); !errors.Is(err, ErrOverloaded) {
		t.Errorf("both prefill workers are busy: %v", err)
	}
}

// TestSubsetBindsDestinations: the proxy's subset restricts decode workers only: the proxy sends nothing to prefill
// workers.
func TestSubsetBindsDestinations(t *testing.T) {
	h := newHouse(t, disaggregated(1, 3)...)
	request := completion("m", tokens(0, 16))
	request.Allowed = func(address string) bool { return address == "10.0.2.2:8000" }
	r := h.route(request)
	if r.Name != "d1" || r.Prefill == nil {
		t.Errorf("decision: %+v", r.Decision)
	}
	r.Free()
}

// TestPredictedPrefill: without events, the index predicts the prompt's blocks for the prefill worker.
func TestPredictedPrefill(t *testing.T) {
	es := disaggregated(3, 3)
	for i := range es {
		es[i].KVEvents = ""
	}
	h := newHouse(t, es...)
	h.cfg.Predict = Predict{TTL: 1e9, Alone: true}
	first := h.route(completion("m", tokens(0, 40)))
	first.MarkPrefillCompleted()
	again := h.route(completion("m", tokens(0, 40)))
	if again.Prefill.Name != first.Prefill.Name || again.PredictedCachedTokens != 40 || again.Name == first.Name ||
		again.Reason != ReasonApproximate {
		t.Errorf("%+v, prefill %+v, after %s with %s", again.Decision, again.Prefill, first.Name, first.Prefill.Name)
	}
	first.Free()
	again.Free()
}

// TestPairAllocates: allocations do not grow with the candidates, except the list of costs.
func TestPairAllocates(t *testing.T) {
	allocations := func(n int) float64 {
		h := newHouse(t, append(disaggregated(n, n), workers(n)...)...)
		h.cfg.Explain = false
		s := h.pool.Acquire()
		defer s.Release()
		d, p := new(scratch), prepared{isl: 40, reason: ReasonNoTokenizer}
		route := func() {
			r, err := h.choose(d, s, &Request{}, &p)
			if err != nil {
				t.Fatal(err)
			}
			r.Free()
			d.booked = d.booked[:0]
		}
		for i := range s.Workers {
			h.counts.of(s.Workers[i].Worker) // allocates once for each worker
		}
		route()
		return testing.AllocsPerRun(20, route)
	}
	if few, many := allocations(4), allocations(200); many > few {
		t.Errorf("%v allocations with 200 workers of each role, %v with 4", many, few)
	}
}

// TestLegsComeAndGo: requests and workers of all roles come and go in random order. No load is left at the end.
func TestLegsComeAndGo(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	h := newHouse(t)
	h.pool.Watch(forget{h})
	all := append(disaggregated(3, 3), workers(1)...)
	var running []*Route
	pairs, refused := 0, 0
	for range 5000 {
		i := 0
		if len(running) > 0 {
			i = rng.IntN(len(running))
		}
		switch step := rng.IntN(10); {
		case step < 4:
			r, err := h.Route(t.Context(), completion("m", tokens(rng.IntN(3)*1000, 20+rng.IntN(40))))
			switch {
			case err == nil:
				running = append(running, r)
				if r.Prefill != nil {
					pairs++
				}
			case errors.Is(err, ErrNoPrefill) || errors.Is(err, ErrNoEndpoints):
				refused++
			default:
				t.Fatal(err)
			}
		case step == 4:
			var some []pool.Endpoint
			for _, e := range all {
				if rng.IntN(3) > 0 {
					some = append(some, e)
				}
			}
			h.pool.Update(some)
		case len(running) == 0:
		case step < 7:
			running[i].MarkPrefillCompleted()
		case step == 7:
			running[i].ReleasePrefill()
		default:
			running[i].Free()
			running = slices.Delete(running, i, i+1)
		}
	}
	for _, r := range running {
		r.Free()
	}
	if pairs < 100 || refused < 10 {
		t.Errorf("%d pairs and %d refusals: this shows little", pairs, refused)
	}
	h.idle()
}

// BenchmarkPair measures the choice of a prefill and a decode worker, among equally many of each, after tokenization.
func BenchmarkPair(b *testing.B) {
	h := newHouse(b, disaggregated(500, 500)...)
	h.cfg.Explain = false
	ids := tokens(0, 64)
	for i := range 500 {
		h.warm(fmt.Sprintf("p%d", i), 0, ids[:4+i%60/4*4], blocksOfFour)
	}
	d, s := new(scratch), h.pool.Acquire()
	defer s.Release()
	p := prepared{model: "m", tokens: []prompt.Prompt{{IDs: ids, Certain: len(ids)}}, isl: len(ids), reason: ReasonKV}
	b.ReportAllocs()
	for b.Loop() {
		r, err := h.choose(d, s, &Request{}, &p)
		if err != nil {
			b.Fatal(err)
		}
		r.Free()
		d.booked = d.booked[:0]
	}
}
