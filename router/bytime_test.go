package router

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// These tests show that the policy Time composes with what narrows or weighs the candidates. Without it each of them
// would choose another worker, or none.

// byTime makes a house price by time. Its workers all have the pace that is assumed at first: 0.1 ms for each prompt
// token.
func (h *house) byTime() *house {
	h.cfg.Scoring.Policy = scoring.Time
	return h
}

// wantRoutes routes a request several times and frees it, and fails unless each goes to this worker by time.
func (h *house) wantRoutes(why, worker string, req *Request) {
	h.t.Helper()
	for range 6 {
		r := h.route(req)
		if r.Name != worker || r.Weights.Policy != scoring.Time {
			h.t.Errorf("%s: %s by %v, want %s by time; costs %+v", why, r.Name, r.Weights.Policy, worker, r.Costs)
		}
		r.Free()
	}
}

func wantCost(t *testing.T, why string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*math.Abs(want) {
		t.Errorf("%s: costs %v ms, want %v", why, got, want)
	}
}

func TestTimeWithTiersAndTaints(t *testing.T) {
	es := workers(3)
	es[1].Taints, es[2].Taints = []string{"far"}, []string{"near"}
	h := newHouse(t, es...).byTime()
	ids := tokens(0, 40)
	h.warm("w0", 0, ids[:20], blocksOfFour)
	e := kvblock.Stored{Tier: kvblock.TierHostPinned}
	for i, l := range kvblock.AppendLocalHashes(nil, ids[:36], blocksOfFour) {
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: kvblock.EngineHash(i + 1), Local: l})
	}
	if err := h.index.Stored(1, e); err != nil {
		t.Fatal(err)
	}
	h.wantRoutes("9 blocks in host memory beat 5 on the device", "w1", completion("m", ids))
	r := h.route(completion("m", ids))
	wantCost(t, "20 tokens on the device", r.Costs[0].Cost, 0.1*20)
	wantCost(t, "36 in host memory", r.Costs[1].Cost, 0.1*(40-0.75*36))
	wantCost(t, "nothing", r.Costs[2].Cost, 0.1*40)
	r.Free()
	h.wantRoutes("a required taint", "w2", constrained(`{"required_taints":["near"]}`))
	h.wantRoutes("a preferred taint outweighs the cache", "w2", constrained(`{"preferred_taints":{"near":2,"far":-2}}`))
	r = h.route(constrained(`{"preferred_taints":{"near":2}}`))
	wantCost(t, "a preferred taint", r.Costs[2].Cost, 4*math.Exp(-math.Tanh(2)))
	r.Free()
}

func TestTimeWithSessionsPinsAndAdapters(t *testing.T) {
	h := newSessionHouse(t, session.Config{TTL: minute}, workers(3)...).byTime()
	h.cfg.Pinning = true
	h.cfg.Adapters = NewAdapters(map[string]string{"sql": "m"})
	req := completion("m", tokens(0, 40))
	first := h.route(of("s", req))
	first.Free()
	other := "w0"
	if first.Name == other {
		other = "w1"
	}
	h.warm(other, 0, tokens(0, 40), blocksOfFour)
	h.wantRoutes("without a session", other, req)
	h.wantRoutes("a session stays where nothing is cached", first.Name, of("s", req))
	h.wantRoutes("a pin to where nothing is cached", "w2", with(req, `"nvext":{"backend_instance_id":102}`))
	h.warm("w2", 0, tokens(0, 40), kvblock.HashOptions{BlockSize: 4, LoRAName: "sql"})
	h.wantRoutes("an adapter's own blocks", "w2", completion("sql", tokens(0, 40)))
}

func TestTimeWithThresholdsAndQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := maxed(workers(2), 100)
		h := newHouse(t, endpoints...).byTime()
		h.warm("w1", 0, tokens(0, 400), blocksOfFour)
		h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](30)})
		fill := h.route(completion("m", tokens(0, 440))) // 40 tokens are computed
		if fill.Name != "w1" {
			t.Fatalf("to %s, where nothing is cached", fill.Name)
		}
		h.wantRoutes("the warm worker is overloaded", "w0", completion("m", tokens(0, 400)))
		fill.Free()
		h.wantRoutes("and no more", "w1", completion("m", tokens(0, 400)))

		h = newQueueHouse(t, queue.FCFS, endpoints...).byTime()
		h.warm("w1", 0, tokens(5000, 40), blocksOfFour)
		a := arriveAt(h)
		for i, name := range []string{"a", "b"} {
			a.send(t.Context(), name, completion("m", tokens(1000*i, 40)))
		}
		a.send(t.Context(), "waits", completion("m", tokens(5000, 44)))
		if n := h.allWaiting(); n != 1 || a.order() != "a b" {
			t.Fatalf("%d wait after %s, want 1", n, a.order())
		}
		for _, name := range []string{"a", "b"} {
			if a.route(name).Name == "w1" {
				a.prefilled(name)
			}
		}
		if r := a.route("waits"); r == nil || r.Name != "w1" || r.Weights.Policy != scoring.Time {
			t.Errorf("the waiting request: %+v", r)
		}
		for _, r := range a.by {
			r.Free()
		}
	})
}

// TestTimeWithTemperature: temperature is in milliseconds of the cost, by flag and by request.
func TestTimeWithTemperature(t *testing.T) {
	h := newHouse(t, workers(2)...).byTime()
	h.warm("w1", 0, tokens(0, 4000), blocksOfFour) // 400 ms cheaper
	drawn := func(req *Request) (cold int) {
		for range 400 {
			r := h.route(req)
			if r.Name == "w0" {
				cold++
			}
			r.Free()
		}
		return cold
	}
	req := completion("m", tokens(0, 4000))
	if n := drawn(with(req, `"nvext":{"router_config_override":{"router_temperature":10}}`)); n != 0 {
		t.Errorf("10 ms: %d of 400 to the worker that costs 400 ms more", n)
	}
	h.cfg.Scoring.Temperature = 400 // 1 / (1 + e) of 400 are 108
	if n := drawn(req); n < 70 || n > 150 {
		t.Errorf("400 ms: %d of 400 to the worker that costs 400 ms more, want about 108", n)
	}
}

// TestTimeOfTwoLegs: the prefill leg is priced by the prompt's prefill, the decode leg by what the workers hold. Both
// learn from the same response: the prefill worker its speed, the decode worker its gap.
func TestTimeOfTwoLegs(t *testing.T) { synctest.Test(t, timeOfTwoLegs) }

func timeOfTwoLegs(t *testing.T) {
	h := newHouse(t, disaggregated(2, 2)...).byTime()
	h.cfg.Pinning = true // so that all workers get enough requests
	rng := rand.New(rand.NewPCG(3, 4))
	perToken := map[string]float64{"p0": 1e-3, "p1": 2e-4}
	const gapPerToken = 1e-5
	for i := range 200 {
		isl := 40 + rng.IntN(400)
		pins := fmt.Sprintf(`"nvext":{"prefill_worker_id":%d,"decode_worker_id":%d}`, 200+i%2, 300+i/2%2)
		r := h.route(with(completion("m", tokens(1000*i, isl)), pins))
		pass(perToken[r.Prefill.Name] * float64(isl))
		r.MarkPrefillCompleted()
		held := float64(h.load(r.Name).ActiveTokens)
		pass(99 * (0.01 + gapPerToken*held))
		r.booking.LearnOutput(100)
		r.Free()
	}
	s := h.pool.Acquire()
	defer s.Release()
	for _, w := range s.Workers {
		pace := h.book.Pace(w.Worker)
		if want := perToken[w.Name]; want > 0 && math.Abs(pace.SecondsPerToken-want) > want/20 {
			t.Errorf("%s: %v s for each prompt token, want %v", w.Name, pace.SecondsPerToken, want)
		}
		if w.Name[0] == 'd' && math.Abs(pace.GapPerToken-gapPerToken) > gapPerToken/10 {
			t.Errorf("%s: the gap grows by %v s for each held token, want %v", w.Name, pace.GapPerToken, gapPerToken)
		}
	}
	// The slow prefill worker has 300 of 400 tokens, and is dearer with them than one with 100 would be at its speed;
	// the fast one without any is cheaper.
	h.warm("p0", 0, tokens(0, 300), blocksOfFour)
	h.warm("d0", 0, tokens(0, 400), blocksOfFour) // must not count: it only decodes
	first := h.route(completion("m", tokens(0, 400)))
	if first.Prefill.Name != "p1" {
		t.Errorf("prefill on %s, costs %+v; p1 computes 400 tokens in 80 ms, and p0 100 in 100",
			first.Prefill.Name, first.Prefill.Costs)
	}
	first.MarkPrefillCompleted()
	for i := range 4 {
		r := h.route(completion("m", tokens(1000*i, 400)))
		if r.Name == first.Name {
			t.Errorf("decode on %s, which holds a prompt, costs %+v", r.Name, r.Costs)
		}
		r.Free()
	}
	first.Free()
}

// pass lets seconds of the bubble pass.
func pass(seconds float64) { <-time.After(time.Duration(seconds * float64(time.Second))) }

// TestTimeSurvives: no capacity, no gauges, clocks that stand or jump, and workers that leave and come back give finite
// costs and routes.
func TestTimeSurvives(t *testing.T) {
	endpoints := workers(2) // neither TotalKVBlocks nor a metrics page
	h := newHouse(t, endpoints...).byTime()
	now := time.Duration(0)
	h.book.Clock = func() time.Duration { return now }
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range 300 {
		if i == 100 || i == 200 { // w1 restarts, under another instance id
			h.pool.Update(endpoints[:1])
			endpoints[1].InstanceID++
			h.pool.Update(endpoints)
		}
		r, err := h.Route(t.Context(), completion("m", tokens(100*i, 40+rng.IntN(40))))
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		for _, c := range r.Costs {
			if math.IsNaN(c.Cost) || math.IsInf(c.Cost, 0) || c.Cost < 0 {
				t.Fatalf("request %d: %s costs %v: %+v", i, c.Name, c.Cost, c.Terms)
			}
		}
		switch i % 4 { // else the clock stands
		case 1:
			now += time.Duration(rng.Int64N(int64(time.Second)))
		case 2:
			now -= time.Duration(rng.Int64N(int64(time.Minute)))
		case 3:
			now += time.Duration(rng.Int64N(int64(100 * time.Hour)))
		}
		r.MarkPrefillCompleted()
		r.booking.LearnOutput(rng.IntN(3))
		r.Free()
	}
	if n := h.book.Len(); n != 0 {
		t.Errorf("%d requests are still booked", n)
	}
}

// TestTimeRefusesWrongOverrides: bodies that name weights of Dynamo's cost wrongly are refused as with the policy
// Dynamo.
func TestTimeRefusesWrongOverrides(t *testing.T) {
	for _, policy := range []scoring.Policy{scoring.Dynamo, scoring.Time} {
		h := newHouse(t, workers(1)...)
		h.cfg.Scoring.Policy = policy
		_, err := h.Route(t.Context(), with(completion("m", tokens(0, 40)),
			`"nvext":{"router_config_override":{"prefill_load_scale":-3}}`))
		if err == nil || !strings.Contains(fmt.Sprint(err), "prefill_load_scale") || errors.Is(err, ErrOverloaded) {
			t.Errorf("%v: %v", policy, err)
		}
	}
}
