package router

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/pool"
)

// rejections returns how many requests were refused, by cause.
func (h *house) rejections() map[string]float64 {
	h.t.Helper()
	values := map[string]float64{}
	for _, s := range metricstest.Read(h.t, h.metrics.Registry).Of("kvepp_rejections_total") {
		values[strings.TrimPrefix(s.Labels[0], "cause=")] = s.Value
	}
	return values
}

func set[T any](v T) *T { return &v }

// A worker above any threshold is no candidate until its load falls below it.
func TestOverloadedWorkersAreNoCandidates(t *testing.T) {
	for _, c := range []struct {
		name   string
		limits Thresholds
		// index of the first of 4 requests (100 tokens, 25 blocks) that finds both workers overloaded; 0: none
		overloads int
	}{
		{"none", Thresholds{}, 0},
		{"prefill tokens", Thresholds{ActivePrefillTokens: set[uint64](99)}, 3},
		{"prefill tokens, not exceeded", Thresholds{ActivePrefillTokens: set[uint64](200)}, 0},
		{"no prefill at all", Thresholds{ActivePrefillTokens: set[uint64](0)}, 3},
		{"part of a step", Thresholds{ActivePrefillTokensFrac: set(0.5)}, 3},
		{"one step", Thresholds{ActivePrefillTokensFrac: set(1.0)}, 0},
		{"blocks", Thresholds{ActiveDecodeBlocks: set(0.5)}, 3},
		{"all blocks", Thresholds{ActiveDecodeBlocks: set(1.0)}, 0},
		{"one of several", Thresholds{ActiveDecodeBlocks: set(1.0), ActivePrefillTokens: set[uint64](1000),
			ActivePrefillTokensFrac: set(0.3)}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			endpoints := workers(2)
			for i := range endpoints {
				endpoints[i].MaxNumBatchedTokens, endpoints[i].TotalKVBlocks = 150, 40
			}
			if c.name == "blocks" { // their engines say it
				endpoints[0].TotalKVBlocks, endpoints[1].TotalKVBlocks = 0, 0
			}
			h := newHouse(t, endpoints...)
			for w := range kvblock.Worker(2) {
				h.pool.ReportCache(w, 8, 20)
			}
			h.thresholds.start(c.limits)
			var routes []*Route
			for i := 1; i <= 4; i++ {
				r, err := h.Route(context.Background(), completion("m", tokens(1000*i, 100)))
				if refused := err != nil; refused != (c.overloads > 0 && i >= c.overloads) ||
					refused && !errors.Is(err, ErrOverloaded) {
					t.Fatalf("request %d: %v", i, err)
				}
				if r != nil {
					routes = append(routes, r)
				}
				if c.overloads == 0 && i == 2 {
					break // one on each worker
				}
			}
			over := 0
			if c.overloads > 0 {
				over = 2
			}
			if n := h.Overloaded(); n != over {
				t.Errorf("%d workers are overloaded, want %d", n, over)
			}
			for _, r := range routes {
				r.Free()
			}
			if h.Overloaded() != 0 {
				t.Error("idle workers are overloaded")
			}
			h.route(completion("m", tokens(0, 100))).Free()
		})
	}
}

// The larger of the engine's reported KV usage and the book's block count decides whether a worker is overloaded.
func TestOverloadedByTheEnginesAccount(t *testing.T) {
	var said []float64
	asked := 0
	endpoints := workers(3)
	endpoints[1].DataParallelSize = 2 // workers 1 and 2
	endpoints[2].TotalKVBlocks = 40   // worker 3; the others' total is unknown
	h := newHouse(t, endpoints...)
	h.cfg.KVUsage = func(dst []float64) []float64 {
		asked++
		return append(dst, said...)
	}
	over := func(usage ...float64) int {
		t.Helper()
		said = usage
		return h.Overloaded()
	}
	h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](1 << 40)})
	if over(1, 1, 1, 1) != 0 || asked != 0 {
		t.Errorf("asked %d times, though no threshold is one of blocks", asked)
	}
	h.SetThresholds("m", Thresholds{ActiveDecodeBlocks: set(0.5)})
	for _, c := range []struct {
		usage []float64
		over  int
	}{{nil, 0}, {[]float64{0.5, 0, 0, 0}, 0}, {[]float64{0.51}, 1}, {[]float64{0, 1, 0}, 0},
		{[]float64{0, 1, 0.75, 1}, 3}, {[]float64{0.6, 0.6, 0.6, 0.6}, 4}} {
		if n := over(c.usage...); n != c.over {
			t.Errorf("%v: %d workers are overloaded, want %d", c.usage, n, c.over)
		}
	}
	said = []float64{1, 1, 1, 0}
	r := h.route(completion("m", tokens(0, 100))) // 25 of worker 3's 40 blocks
	if r.Name != "w2" {
		t.Errorf("the request went to %s", r.Name)
	}
	if _, err := h.Route(context.Background(), completion("m", tokens(1000, 100))); !errors.Is(err, ErrOverloaded) {
		t.Errorf("with the last worker overloaded by the book: %v", err)
	}
	if n := over(0, 0, 0, 0.1); n != 1 {
		t.Errorf("%d workers are overloaded: what the engine knows less does not count", n)
	}
	r.Free()
	if n := over(); n != 0 {
		t.Errorf("%d workers are overloaded", n)
	}
}

// Unknown values never make a worker overloaded. An endpoint with an idle rank beside a busy one is not overloaded.
func TestNotOverloaded(t *testing.T) {
	limits := Thresholds{ActiveDecodeBlocks: set(0.0), ActivePrefillTokensFrac: set(0.001)}
	h := newHouse(t, workers(1)...)
	h.thresholds.start(limits)
	for i := range 3 {
		h.route(completion("m", tokens(1000*i, 100)))
	}
	ranks := workers(1)
	ranks[0].DataParallelSize, ranks[0].TotalKVBlocks, ranks[0].MaxNumBatchedTokens = 2, 100, 100
	h = newHouse(t, ranks...)
	h.thresholds.start(limits)
	h.route(completion("m", tokens(0, 100)))
	if h.Overloaded() != 0 {
		t.Error("overloaded, though one rank is idle")
	}
	h.route(completion("m", tokens(1000, 100)))
	if _, err := h.Route(context.Background(), completion("m", tokens(2000, 100))); !errors.Is(err, ErrOverloaded) ||
		h.Overloaded() != 2 {
		t.Errorf("both ranks are busy: %v, %d overloaded", err, h.Overloaded())
	}
	if got := h.rejections(); len(got) != len(rejections) || got["overloaded"] != 1 {
		t.Errorf("kvepp_rejections_total: %v", got)
	}
}

// Only endpoints that may take the request count for overload. Each model has thresholds of its own.
func TestThresholdsOfModels(t *testing.T) {
	endpoints := workers(2)
	endpoints[1].Model = "other"
	h := newHouse(t, endpoints...)
	if _, ok := h.SetThresholds("unserved", Thresholds{ActivePrefillTokens: set[uint64](1)}); ok {
		t.Error("thresholds for a model without endpoints")
	}
	if got := h.Models(); len(got) != 2 || got[0] != "m" || got[1] != "other" {
		t.Errorf("models %v", got)
	}
	h.SetThresholds("m", Thresholds{ActivePrefillTokens: set[uint64](7)})
	now, ok := h.SetThresholds("m", Thresholds{ActiveDecodeBlocks: set(0.5)})
	if !ok || *now.ActivePrefillTokens != 7 || *now.ActiveDecodeBlocks != 0.5 || now.ActivePrefillTokensFrac != nil {
		t.Errorf("%+v", now)
	}
	if other := h.Thresholds("other"); !other.None() {
		t.Errorf("%+v for another model", other)
	}
	first := h.route(completion("m", tokens(0, 100)))
	if _, err := h.Route(context.Background(), completion("m", tokens(0, 100))); !errors.Is(err, ErrOverloaded) {
		t.Error(err)
	}
	only := completion("m", tokens(0, 100))
	only.Allowed = func(address string) bool { return address == endpoints[1].Address }
	if _, err := h.Route(context.Background(), only); !errors.Is(err, ErrUnknownModel) {
		t.Error(err)
	}
	for range 3 {
		h.route(completion("other", tokens(0, 100)))
	}
	first.MarkPrefillCompleted()
	h.route(completion("m", tokens(0, 100)))
}

// Thresholds add no allocations, once the scratch memory has grown to the number of workers.
func TestThresholdsDoNotAllocate(t *testing.T) {
	h := newHouse(t, workers(50)...)
	s := h.pool.Acquire()
	defer s.Release()
	d, p := new(scratch), prepared{reason: ReasonNoBody} // own scratch: under -race a sync.Pool drops items at random
	count := func() float64 {
		return testing.AllocsPerRun(50, func() {
			r, err := h.choose(d, s, &Request{}, &p)
			if err != nil {
				t.Fatal(err)
			}
			r.Free()
		})
	}
	count()
	before := count()
	h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](1 << 40)})
	count()
	if after := count(); after > before {
		t.Errorf("%v allocations, %v without thresholds", after, before)
	}
}

// TestBurstAtAThreshold: a burst of concurrent requests does not pass the thresholds: as many are accepted as of
// sequential requests.
func TestBurstAtAThreshold(t *testing.T) {
	for name, endpoints := range map[string][]pool.Endpoint{"aggregated": workers(3),
		"prefill and decode": disaggregated(3, 2)} {
		h := newHouse(t, endpoints...)
		h.thresholds.start(Thresholds{ActivePrefillTokens: set[uint64](1000)})
		// requests of 100 tokens on a worker: the last one finds the load at the threshold, not above it
		const each = 11
		for round := range 20 {
			routes := make(chan *Route, 200)
			var burst sync.WaitGroup
			start := make(chan struct{})
			for range cap(routes) {
				body := completion("m", tokens(rand.IntN(1<<30), 100))
				burst.Go(func() {
					<-start
					if r, err := h.Route(t.Context(), body); err == nil {
						routes <- r
					} else if !errors.Is(err, ErrOverloaded) {
						t.Error(err)
					}
				})
			}
			close(start)
			burst.Wait()
			close(routes)
			if n := len(routes); n != 3*each {
				t.Errorf("%s, round %d: %d requests were let in, want %d", name, round, n, 3*each)
			}
			for r := range routes {
				r.Free()
			}
		}
		if n := h.book.Len(); n != 0 {
			t.Errorf("%s: %d bookings are left", name, n)
		}
	}
}
