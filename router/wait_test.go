package router

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/router/queue"
)

// newQueueHouse returns a house where requests wait while every worker has a prompt to prefill.
func newQueueHouse(t testing.TB, policy queue.Policy, endpoints ...pool.Endpoint) *house {
	t.Helper()
	return withProfiles(t, (*queue.File)(nil).Profiles(queue.Single(policy, set(0.0))), endpoints...)
}

func withProfiles(t testing.TB, p *queue.Profiles, endpoints ...pool.Endpoint) *house {
	t.Helper()
	h := newHouse(t, endpoints...)
	cfg := h.cfg
	cfg.Queue = &queue.RoomConfig{Profiles: p, Bound: 1 << 16}
	h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
	return h
}

// arrivals routes requests, each in its own goroutine.
type arrivals struct {
	h  *house
	mu sync.Mutex
	// went has the names of routed requests, and "name: error" of refused ones, in the order in which their goroutines
	// returned. Of requests that are routed at the same instant, that order is random.
	went []string
	by   map[string]*Route // running requests
}

// send routes a request in the bubble, and returns when it has been routed or waits.
func (a *arrivals) send(ctx context.Context, name string, req *Request) {
	go func() {
		r, err := a.h.Route(ctx, req)
		a.mu.Lock()
		defer a.mu.Unlock()
		if err != nil {
			a.went = append(a.went, name+": "+err.Error())
			return
		}
		a.went = append(a.went, name)
		a.by[name] = r
	}()
	synctest.Wait()
}

// prefilled ends the prefill of a running request, and returns when all goroutines are idle.
func (a *arrivals) prefilled(name string) {
	a.route(name).MarkPrefillCompleted()
	synctest.Wait()
}

// route returns a running request.
func (a *arrivals) route(name string) *Route {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.by[name]
}

// allWaiting returns how many requests wait, of all policy classes.
func (h *house) allWaiting() int {
	if h.room == nil {
		return 0
	}
	return h.room.Waiting()
}

// wantTurnFree fails the test unless nothing is booked and a request gets the turn at once.
func (h *house) wantTurnFree() {
	h.t.Helper()
	if n := h.book.Len(); n != 0 {
		h.t.Errorf("%d requests are still booked", n)
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	r, err := h.Route(ctx, completion("m", tokens(0, 40)))
	if err != nil {
		h.t.Errorf("the turn is still taken: %v", err)
		return
	}
	r.Free()
}

func (a *arrivals) order() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.went, " ")
}

func arriveAt(h *house) *arrivals { return &arrivals{h: h, by: map[string]*Route{}} }

// A request waits exactly while every worker is busy, and then goes to the best worker. No later request overtakes it.
func TestRequestsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(2), 100)...)
		a := arriveAt(h)
		for i, name := range []string{"b", "a", "c", "d"} {
			a.send(t.Context(), name, completion("m", tokens(1000*i, 40)))
		}
		if a.order() != "b a" || h.allWaiting() != 2 || h.Waiting("default") != 2 || h.Waiting("other") != 0 {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		<-time.After(time.Second)
		h.warm(a.route("b").Name, 0, tokens(2000, 20), blocksOfFour) // not cached yet when c arrived
		a.prefilled("b")
		if a.order() != "b a c" || a.route("c").Name != a.route("b").Name || a.route("c").PredictedCachedTokens != 20 ||
			a.route("c").Waited == 0 ||
			a.route("a").Waited != 0 {
			t.Fatalf("went: %s, c to %+v", a.order(), a.route("c").Decision)
		}
		if a.send(t.Context(), "e", completion("m", tokens(9000, 40))); a.order() != "b a c" {
			t.Fatalf("went: %s", a.order())
		}
		a.route("a").Free()
		synctest.Wait()
		if a.order() != "b a c d" {
			t.Fatalf("went: %s", a.order())
		}
		a.prefilled("d")
		if a.order() != "b a c d e" || h.allWaiting() != 0 {
			t.Fatalf("went: %s", a.order())
		}
		if waits := h.waited(); waits != 3 {
			t.Errorf("%v waits were observed, want those of c, d and e", waits)
		}
	})
}

func maxed(endpoints []pool.Endpoint, tokens int) []pool.Endpoint {
	for i := range endpoints {
		endpoints[i].MaxNumBatchedTokens = tokens
	}
	return endpoints
}

// waited returns how many waits the metric counts.
func (h *house) waited() float64 {
	h.t.Helper()
	return metricstest.Read(h.t, h.metrics.Registry).Of("kvepp_queue_wait_seconds").Count()
}

// TestOrderOfWaiting: the policy determines which request goes next.
func TestOrderOfWaiting(t *testing.T) {
	for _, c := range []struct {
		policy queue.Policy
		want   string
	}{
		// Strict priorities go first. A priority of 5 counts as 5 seconds of waiting; one request arrives per second.
		{queue.FCFS, "first strict urgent long short sensitive"},
		{queue.WSPT, "first strict urgent short sensitive long"},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newQueueHouse(t, c.policy, maxed(workers(1), 100)...)
			a := arriveAt(h)
			for i, x := range []struct {
				name   string
				tokens int
				hints  string
			}{
				{"first", 10, `{}`},
				{"long", 400, `{}`},
				{"short", 20, `{"priority":-3,"latency_sensitivity":99}`},
				{"sensitive", 40, `{"latency_sensitivity":0.5}`},
				{"urgent", 100, `{"priority":5}`},
				{"strict", 900, `{"strict_priority":1}`},
			} {
				req := completion("m", tokens(1000*i, x.tokens))
				req.Body = append(req.Body[:len(req.Body)-1], `,"nvext":{"agent_hints":`+x.hints+`}}`...)
				a.send(t.Context(), x.name, req)
				<-time.After(time.Second) // of the bubble's time
			}
			for range 6 {
				went := strings.Fields(a.order())
				a.prefilled(went[len(went)-1])
			}
			if got := a.order(); got != c.want {
				t.Errorf("%s: %s, want %s", c.policy, got, c.want)
			}
		})
	}
}

func TestLeavingTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
		h.cfg.Queue.Timeout = 10 * time.Second
		a := arriveAt(h)
		ctx, gone := context.WithCancel(t.Context())
		a.send(t.Context(), "a", completion("m", tokens(0, 40)))
		a.send(ctx, "b", completion("m", tokens(0, 40)))
		a.send(t.Context(), "c", completion("m", tokens(0, 40)))
		gone()
		synctest.Wait()
		if h.allWaiting() != 1 || a.order() != "a b: context canceled" {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		<-time.After(11 * time.Second)
		if want := "a b: context canceled c: " + ErrQueueTimeout.Error(); h.allWaiting() != 0 || a.order() != want {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		if got := h.rejections(); got["queue_timeout"] != 1 || got["queue_full"] != 0 {
			t.Errorf("rejections %v", got)
		}
		a.route("a").Free()
		if h.book.Len() != 0 {
			t.Errorf("%d booked", h.book.Len())
		}
	})
}

// Each model has its own line. No request waits for workers of another model. A request that leaves is removed from its
// own line.
func TestLinesOfModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := queue.ParseFile([]byte(classes))
		if err != nil {
			t.Fatal(err)
		}
		endpoints := maxed(workers(2), 100)
		endpoints[0].Model, endpoints[1].Model = "other", "m"
		h := withProfiles(t, f.Profiles(nil), endpoints...)
		a := arriveAt(h)
		a.send(t.Context(), "a", completion("other", tokens(0, 1040)))
		ctx, gone := context.WithCancel(t.Context())
		a.send(ctx, "b", completion("other", tokens(0, 1040)))
		a.send(t.Context(), "c", completion("m", tokens(0, 40)))
		ctxM, goneM := context.WithCancel(t.Context())
		a.send(ctxM, "d", completion("m", tokens(0, 40)))
		a.send(t.Context(), "e", completion("m", tokens(0, 40)))
		if h.Waiting("lenient") != 1 || h.Waiting("short") != 2 || h.allWaiting() != 3 {
			t.Fatalf("went: %s; %d and %d wait", a.order(), h.Waiting("lenient"), h.Waiting("short"))
		}
		goneM()
		synctest.Wait()
		if h.Waiting("lenient") != 1 || h.Waiting("short") != 1 {
			t.Fatalf("went: %s; %d and %d wait", a.order(), h.Waiting("lenient"), h.Waiting("short"))
		}
		gone()
		synctest.Wait()
		a.prefilled("c")
		if want := "a c d: context canceled b: context canceled e"; a.order() != want || h.allWaiting() != 0 {
			t.Errorf("went: %s, want %s", a.order(), want)
		}
	})
}

// A worker that joins is found although no load is released. When a worker leaves, requests that only it could take are
// refused.
func TestQueueSeesThePoolChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := maxed(workers(3), 100)
		h := newQueueHouse(t, queue.FCFS, endpoints[:2]...)
		a := arriveAt(h)
		a.send(t.Context(), "a", completion("m", tokens(0, 40)))
		a.send(t.Context(), "b", completion("m", tokens(0, 40)))
		pinned := completion("m", tokens(0, 40))
		pinned.Allowed = func(address string) bool { return address == endpoints[0].Address }
		a.send(t.Context(), "pinned", pinned)
		a.send(t.Context(), "c", completion("m", tokens(0, 40)))
		h.pool.Update(endpoints[1:])
		<-time.After(2 * tick)
		synctest.Wait()
		if got := a.order(); len(a.went) != 4 || !slices.Contains(a.went, "pinned: "+ErrNoEndpoints.Error()) ||
			a.route("c") == nil ||
			a.route("c").Name != "w2" {
			t.Errorf("went: %s", got)
		}
	})
}

// A request that is pinned to a worker waits for that worker only, and other requests do not wait for the pinned one.
func TestPinnedRequestsWaitForTheirWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(2), 100)...)
		h.cfg.Pinning = true
		pin := func(id uint64) *Request {
			return &Request{
				Path: "/v1/completions",
				Body: fmt.Appendf(nil, `{"model":"m","prompt":[1,2,3,4,5],"nvext":{"backend_instance_id":%d}}`, id),
			}
		}
		a := arriveAt(h)
		a.send(t.Context(), "a", pin(100))
		a.send(t.Context(), "b", pin(100))
		a.send(t.Context(), "c", completion("m", tokens(0, 40))) // the other worker is idle
		a.send(t.Context(), "d", completion("m", tokens(0, 40)))
		a.send(t.Context(), "e", pin(101))
		if a.order() != "a c" {
			t.Fatalf("went: %s", a.order())
		}
		a.prefilled("c") // b is older, but pinned to the other worker
		if a.order() != "a c d" {
			t.Fatalf("went: %s", a.order())
		}
		a.prefilled("a")
		a.prefilled("d")
		if a.order() != "a c d b e" || a.route("b").InstanceID != 100 || a.route("e").InstanceID != 101 {
			t.Fatalf("went: %s", a.order())
		}
	})
}

const classes = `
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: short}, {min_tokens: 100, bucket: long}]
policy_classes:
- {name: short, policy_family: all, cache_bucket: short, quantum: 1000, prefill_busy_threshold: 0, ` +
	`request_queue_limit_per_worker: 2}
- {name: long, policy_family: all, cache_bucket: long, quantum: 1, prefill_busy_threshold: 50, ` +
	`raw_isl_token_queue_limit_per_worker: 0}
- {name: always, quantum: 1}
models:
  other:
    default_policy_family: f
    uncached_isl_buckets: [{min_tokens: 0, bucket: b}]
    policy_classes: [{name: lenient, policy_family: f, cache_bucket: b, quantum: 1, prefill_busy_threshold: 1000}]
`

// TestPolicyClasses: each class has its own busy threshold and its own limits.
func TestPolicyClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := queue.ParseFile([]byte(classes))
		if err != nil {
			t.Fatal(err)
		}
		endpoints := maxed(workers(1), 100)
		endpoints[0].Model = "" // it serves all
		h := withProfiles(t, f.Profiles(queue.Single(queue.FCFS, nil)), endpoints...)
		a := arriveAt(h)
		a.send(t.Context(), "a", completion("m", tokens(0, 40)))     // short, an idle worker
		a.send(t.Context(), "b", completion("m", tokens(1000, 120))) // long: 40 tokens are not too many
		a.send(t.Context(), "c", completion("m", tokens(2000, 120))) // 160 are
		for _, name := range []string{"d", "e", "f"} {
			a.send(t.Context(), name, completion("m", tokens(0, 40)))
		}
		always := completion("m", tokens(3000, 40))
		always.Hints.PolicyClass = "always"
		a.send(t.Context(), "g", always)
		a.send(t.Context(), "h", completion("other", tokens(3000, 40)))
		want := []string{"a", "b",
			"c: " + ErrQueueFull.Error() +
				`: policy class "long": the queue holds 0 raw_isl_tokens, and its limit is 0`,
			"f: " + ErrQueueFull.Error() + `: policy class "short": the queue holds 2 requests, and its limit is 2`,
			"g", "h"}
		if !slices.Equal(a.went, want) {
			t.Fatalf("went: %q, want %q", a.went, want)
		}
		if got := h.rejections(); got["queue_limit"] != 2 {
			t.Errorf("rejections %v", got)
		}
		if h.Waiting("short") != 2 || h.Waiting("long") != 0 || h.Waiting("lenient") != 0 {
			t.Errorf("%d short ones wait", h.Waiting("short"))
		}
		for _, name := range []string{"a", "b", "g", "h"} {
			a.route(name).Free()
		}
		synctest.Wait()
		if a.prefilled("d"); !slices.Equal(a.went, append(want, "d", "e")) {
			t.Errorf("went: %q", a.went)
		}
	})
}

// TestPastTheLine: a request of a class that may not wait enters no line: the line's bound and its turns do not apply.
func TestPastTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := queue.ParseFile([]byte(classes))
		if err != nil {
			t.Fatal(err)
		}
		h := withProfiles(t, f.Profiles(nil), maxed(workers(1), 100)...)
		h.cfg.Queue.Bound = 2
		a := arriveAt(h)
		for _, name := range []string{"a", "b", "c"} {
			a.send(t.Context(), name, completion("m", tokens(0, 40)))
		}
		// 40 tokens are not too many; and the line is full
		a.send(t.Context(), "long", completion("m", tokens(1000, 120)))
		if a.order() != "a long" || h.allWaiting() != 2 {
			t.Fatalf("went: %s; %d wait", a.order(), h.allWaiting())
		}
		a.route("long").Free()
		synctest.Wait()

		// A request of another line holds the turn while a ends and three requests arrive that may not wait. Then b
		// gets the turn first, because it arrived before them. Its 40 tokens leave the worker idle enough for the first
		// of the three, which leaves it busy for the last one. The one between them leaves before its turn.
		profile, _ := h.cfg.Queue.Profiles.Of("other")
		holder := waitingRequest{completion("other", tokens(0, 40)), &prepared{model: "other"}}
		entry := queue.Entry{Line: "other", Profile: profile, Workers: 1, Request: queue.Request{Lane: queue.Any}}
		if w, err := h.room.Enter(entry, holder); w != nil || err != nil {
			t.Fatalf("the holder waits or is refused: %v", err)
		}
		a.route("a").Free()
		a.send(t.Context(), "first", completion("m", tokens(2000, 120)))
		ctx, gone := context.WithCancel(t.Context())
		a.send(ctx, "gone", completion("m", tokens(4000, 120)))
		a.send(t.Context(), "second", completion("m", tokens(3000, 120)))
		gone()
		synctest.Wait()
		if a.order() != "a long gone: context canceled" || h.allWaiting() != 2 || h.Waiting("long") != 0 {
			t.Fatalf("went: %s; %d wait, %d of them long", a.order(), h.allWaiting(), h.Waiting("long"))
		}
		h.room.Pass()
		synctest.Wait()
		want := []string{"a", "long", "gone: context canceled", "b", "first",
			"second: " + ErrQueueFull.Error() +
				`: policy class "long": the queue holds 0 raw_isl_tokens, and its limit is 0`}
		slices.Sort(a.went[3:]) // these were routed at one instant; if b had not been first, it would still wait
		if !slices.Equal(a.went, want) || h.allWaiting() != 1 {
			t.Fatalf("went: %q, want %q; %d wait", a.went, want, h.allWaiting())
		}
		if waits := h.waited(); waits != 1 {
			t.Errorf("%v waits were observed, want b's", waits)
		}
		for _, name := range []string{"b", "first"} {
			a.route(name).Free()
		}
		synctest.Wait()
		a.route("c").Free()
		h.wantTurnFree()
	})
}

// Each model's line has a bound. Busy thresholds do not make requests wait.
func TestFullAndOverloaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
		h.cfg.Queue.Bound = 1
		a := arriveAt(h)
		for _, name := range []string{"a", "b", "c"} {
			a.send(t.Context(), name, completion("m", tokens(0, 40)))
		}
		if want := []string{"a", "c: " + ErrQueueFull.Error() + ": the queue is full"}; !slices.Equal(a.went, want) {
			t.Fatalf("went: %q, want %q", a.went, want)
		}
		h.SetThresholds("m", Thresholds{ActiveDecodeBlocks: set(0.0), ActivePrefillTokens: set[uint64](0)})
		a.prefilled("a")
		a.send(t.Context(), "d", completion("m", tokens(0, 40)))
		if got := h.rejections(); a.order() == "" || got["queue_full"] != 1 || got["overloaded"] != 0 ||
			h.allWaiting() != 1 {
			t.Errorf("went: %q, rejections %v: d waits behind b, which fits", a.went, got)
		}
	})
}

// TestQueueUnderLoad: with random interleavings, every request is routed or leaves, no worker has two prompts to
// prefill, and nothing is left at the end.
func TestQueueUnderLoad(t *testing.T) {
	endpoints := maxed(workers(4), 100)
	h := newQueueHouse(t, queue.WSPT, endpoints...)
	var running [8]atomic.Int32 // by instance
	var left, routed atomic.Int32
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for range 150 {
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(4) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(200))*time.Microsecond, cancel)
				}
				r, err := h.Route(ctx, completion("m", tokens(rng.IntN(1<<20), 8+rng.IntN(80))))
				cancel()
				if errors.Is(err, context.Canceled) {
					left.Add(1)
					continue
				} else if err != nil {
					t.Error(err)
					return
				}
				routed.Add(1)
				if n := running[r.InstanceID-100].Add(1); n > 1 {
					t.Errorf("%d prompts are with %s", n, r.Name)
				}
				for range rng.IntN(100) {
					runtime.Gosched()
				}
				running[r.InstanceID-100].Add(-1)
				// The prefill ends only now: a worker without a prompt but with many blocks may cost more than one with
				// a short prompt.
				r.Free()
			}
		})
	}
	all.Wait()
	if h.allWaiting() != 0 || h.book.Len() != 0 || routed.Load() == 0 {
		t.Errorf("%d wait, %d booked, %d routed, %d left", h.allWaiting(), h.book.Len(), routed.Load(), left.Load())
	}
	h.wantTurnFree()
}

// Without a queue, routing allocates nothing for it.
func TestNoQueueNoCost(t *testing.T) {
	h := newHouse(t, workers(4)...)
	req := &Request{Path: "/v1/models", BodylessReason: ReasonNoBody}
	without := testing.AllocsPerRun(100, func() { h.route(req).Free() })
	q := newQueueHouse(t, queue.FCFS, workers(4)...)
	with := testing.AllocsPerRun(100, func() { q.route(req).Free() })
	if without >= with || h.room != nil {
		t.Errorf("%v allocations without a queue, %v with one", without, with)
	}
	if h.allWaiting() != 0 || h.Waiting("default") != 0 {
		t.Error("a request waits where none may")
	}
}

// A class's limits are multiplied by the endpoints of its model that compute prompts. Endpoints that only decode or
// encode do not count.
func TestLimitsCountWhoComputesPrompts(t *testing.T) {
	es := workers(6)
	es[1].Role, es[2].Role, es[3].Role, es[4].Model = pool.Prefill, pool.Decode, pool.Encode, "other"
	es[5].Model, es[5].DataParallelSize = "", 4
	h := newHouse(t, es...)
	s := h.pool.Acquire()
	defer s.Release()
	for model, want := range map[string]int{"m": 3, "other": 2, "": 4} {
		if n := prompterEndpoints(s, model); n != want {
			t.Errorf("%q: %d endpoints, want %d", model, n, want)
		}
	}
}

// BenchmarkTurn measures a request from its arrival at the waiting room to the release of its load. With one worker,
// requests of 16 goroutines wait for each other; with 64 workers, each request gets its turn at once.
func BenchmarkTurn(b *testing.B) {
	for _, n := range []int{1, 64} {
		b.Run(fmt.Sprintf("%d-workers", n), func(b *testing.B) {
			h := newQueueHouse(b, queue.FCFS, maxed(workers(n), 100)...)
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				req := &Request{Path: "/v1/models", BodylessReason: ReasonNoBody, BodyBytes: 400}
				for p.Next() {
					h.route(req).Free()
				}
			})
		})
	}
}
