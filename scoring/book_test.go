package scoring

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

func defaults() *Config {
	cfg := DefaultConfig()
	return &cfg
}

// chain returns n sequence hashes that are unique to the name.
func chain(name, n int) []kvblock.SequenceHash {
	hashes := make([]kvblock.SequenceHash, n)
	for i := range hashes {
		hashes[i] = kvblock.SequenceHash(name)<<32 | kvblock.SequenceHash(i)
	}
	return hashes
}

func prompt(blockSize int, chains ...[]kvblock.SequenceHash) *Prompt {
	return &Prompt{BlockSize: blockSize, Chains: chains}
}

func workers(n int, p *Prompt) []Candidate {
	candidates := make([]Candidate, n)
	for i := range candidates {
		candidates[i] = Candidate{Worker: kvblock.Worker(i), Prompt: p}
	}
	return candidates
}

func mustAdd(t *testing.T, a *ActiveSequences, req Request, c Candidate) Booking {
	t.Helper()
	b, err := a.AddRequest(req, c, defaults())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func wantLoad(t *testing.T, a *ActiveSequences, w kvblock.Worker, want Load) {
	t.Helper()
	if got := a.Load(w); got != want {
		t.Errorf("worker %d carries %+v, want %+v", w, got, want)
	}
}

func TestLifecycle(t *testing.T) {
	a := NewActiveSequences()
	p := prompt(16, chain(1, 6))
	costs := make([]float64, 2)
	candidates := workers(2, p)
	candidates[1].DeviceBlocks = 4

	sel, b, err := a.SelectAndAdd(Request{ISLTokens: 100}, candidates, defaults(), nil, costs)
	if err != nil {
		t.Fatal(err)
	}
	// 100 tokens are 6.25 blocks to prefill, 4 of them cached on worker 1, and 6 full decode blocks.
	if want := (Selection{Index: 1, Worker: 1, Cost: 8.25, CachedTokens: 64, PrefillTokens: 36, ActiveBlocks: 6,
		UnitTokens: 16, Version: 2}); sel != want {
		t.Errorf("selected %+v, want %+v", sel, want)
	}
	if want := []float64{12.25, 8.25}; !slices.Equal(costs, want) {
		t.Errorf("costs %v, want %v", costs, want)
	}
	wantLoad(t, a, 1, Load{Requests: 1, PrefillTokens: 36, ActiveBlocks: 6, ActiveTokens: 96})
	b.MarkPrefillCompleted()
	b.MarkPrefillCompleted()
	wantLoad(t, a, 1, Load{Requests: 1, ActiveBlocks: 6, ActiveTokens: 96})
	b.Free()
	wantLoad(t, a, 1, Load{})
	b.Free()
	b.MarkPrefillCompleted()
	wantLoad(t, a, 1, Load{})
	if a.Len() != 0 {
		t.Errorf("%d requests are active, want none", a.Len())
	}
}

func TestZeroBookingIsHarmless(t *testing.T) {
	var b Booking
	b.MarkPrefillCompleted()
	b.Free()
}

// The book reuses a slot at once. The old request's Booking must not affect the new request.
func TestStaleBookingLeavesTheNextRequestAlone(t *testing.T) {
	a := NewActiveSequences()
	c := Candidate{Worker: 3, Prompt: prompt(4, chain(1, 2))}
	old := mustAdd(t, a, Request{ISLTokens: 8}, c)
	old.Free()
	mustAdd(t, a, Request{ISLTokens: 8}, c)
	want := Load{Requests: 1, PrefillTokens: 8, ActiveBlocks: 2, ActiveTokens: 8}
	old.MarkPrefillCompleted()
	old.Free()
	wantLoad(t, a, 3, want)

	// The same if the worker was forgotten and another worker has its number.
	late := mustAdd(t, a, Request{ISLTokens: 8}, c)
	a.Forget(3)
	wantLoad(t, a, 3, Load{})
	mustAdd(t, a, Request{ISLTokens: 8}, c)
	late.Free()
	wantLoad(t, a, 3, want)
}

func TestForgetOnlyTheWorker(t *testing.T) {
	a := NewActiveSequences()
	p := prompt(4, chain(1, 3))
	for _, c := range workers(3, p) {
		mustAdd(t, a, Request{ISLTokens: 13}, c)
	}
	a.Forget(1)
	a.Forget(1)
	a.Forget(1000)
	held := Load{Requests: 1, PrefillTokens: 13, ActiveBlocks: 3, ActiveTokens: 12}
	if got, want := a.Loads(nil), []Load{held, {}, held}; !slices.Equal(got, want) {
		t.Errorf("loads %+v, want %+v", got, want)
	}
}

func TestDuplicateRequest(t *testing.T) {
	a := NewActiveSequences()
	req := Request{ID: "r1", ISLTokens: 8}
	candidates := workers(2, prompt(4, chain(1, 2)))
	b := mustAdd(t, a, req, candidates[0])
	if _, _, err := a.SelectAndAdd(req, candidates, defaults(), nil, nil); !errors.Is(err, ErrDuplicateRequest) {
		t.Errorf("error %v, want ErrDuplicateRequest", err)
	}
	if _, err := a.AddRequest(req, candidates[1], defaults()); !errors.Is(err, ErrDuplicateRequest) {
		t.Errorf("error %v, want ErrDuplicateRequest", err)
	}
	if a.Len() != 1 {
		t.Errorf("%d requests are active, want 1", a.Len())
	}
	b.Free()
	if _, _, err := a.SelectAndAdd(req, candidates, defaults(), nil, nil); err != nil {
		t.Errorf("the ID of a request that ended is refused: %v", err)
	}
	// Requests without an ID are never duplicates.
	mustAdd(t, a, Request{}, candidates[0])
	mustAdd(t, a, Request{}, candidates[0])
}

func TestNamed(t *testing.T) {
	a := NewActiveSequences()
	if _, ok := a.Named("r1"); ok {
		t.Error("the zero booking was accepted")
	}
	mustAdd(t, a, Request{ID: "r1", ISLTokens: 8}, Candidate{Worker: 2, Prompt: prompt(4, chain(1, 2))})
	b, ok := a.Named("r1")
	if !ok {
		t.Error("r1 has no booking")
	}
	b.MarkPrefillCompleted()
	b.AddOutputBlocks(1, NotKnown)
	wantLoad(t, a, 2, Load{Requests: 1, ActiveBlocks: 3, ActiveTokens: 12})
	b.Free()
	if _, ok := a.Named("r1"); ok {
		t.Error("r1 has ended")
	}
	wantEmpty(t, a)
}

// PotentialLoads equals the load after the request is booked. It books nothing, and a duplicate ID does not matter.
func TestPotentialLoads(t *testing.T) {
	a := NewActiveSequences()
	cfg := defaults()
	candidates := workers(3, prompt(16, chain(1, 6)))
	candidates[1].DeviceBlocks = 4
	req := Request{ID: "r1", ISLTokens: 100}
	mustAdd(t, a, req, candidates[1])
	mustAdd(t, a, Request{ISLTokens: 40}, Candidate{Worker: 2})
	potential, err := a.PotentialLoads(req, candidates, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := a.Loads(nil)
	if want := []PotentialLoad{
		{Load{}, 0, 100, 6},
		{Load{1, 36, 6, 96}, 64, 72, 6},
		{Load{1, 40, 2, 32}, 0, 140, 8},
	}; !slices.Equal(potential, want) {
		t.Errorf("potential loads %+v, want %+v", potential, want)
	}
	for i, c := range candidates {
		mustAdd(t, a, Request{ISLTokens: 100}, c)
		if load := a.Load(c.Worker); potential[i].Load != before[i] ||
			load.PrefillTokens != potential[i].PotentialPrefillTokens ||
			load.ActiveBlocks != potential[i].PotentialActiveBlocks {
			t.Errorf("worker %d: %+v, booked %+v", i, potential[i], load)
		}
	}
	if _, err := a.PotentialLoads(req, nil, cfg, nil); !errors.Is(err, ErrNoCandidates) {
		t.Errorf("error %v, want ErrNoCandidates", err)
	}
	cfg.TrackPrefillTokens = false
	if p, err := a.PotentialLoads(req, candidates[:1], cfg, nil); err != nil || p[0].PotentialPrefillTokens != 100 {
		t.Errorf("untracked: %+v, %v", p, err)
	}
	for _, c := range candidates {
		a.Forget(c.Worker)
	}
	wantEmpty(t, a)
}

// Only bookings with Request.Expires expire, each at its own time.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewActiveSequences()
		a.Expiry = 300 * time.Second
		c := Candidate{Worker: 1, Prompt: prompt(4, chain(1, 2))}
		live := mustAdd(t, a, Request{ISLTokens: 8}, c)
		mustAdd(t, a, Request{ID: "old", ISLTokens: 8, Expires: true}, c)
		ended := mustAdd(t, a, Request{ID: "ended", ISLTokens: 8, Expires: true}, c)
		<-time.After(100 * time.Second) // of the bubble, which does not wait
		young := mustAdd(t, a, Request{ID: "young", ISLTokens: 8, Expires: true}, c)
		ended.Free()
		<-time.After(200*time.Second - 1) // of the bubble, which does not wait
		wantLoad(t, a, 1, Load{Requests: 3, PrefillTokens: 24, ActiveBlocks: 2, ActiveTokens: 8})
		<-time.After(1) // of the bubble, which does not wait
		wantLoad(t, a, 1, Load{Requests: 2, PrefillTokens: 16, ActiveBlocks: 2, ActiveTokens: 8})
		if _, ok := a.Named("old"); ok || a.Expired() != 1 {
			t.Errorf("old is there: %v; %d expired", ok, a.Expired())
		}
		mustAdd(t, a, Request{ID: "old", ISLTokens: 8, Expires: true}, c) // the name is free
		<-time.After(time.Hour)                                           // of the bubble, which does not wait
		young.Free()
		if a.Len() != 1 || a.Expired() != 3 {
			t.Errorf("%d requests are active, %d have expired", a.Len(), a.Expired())
		}
		live.Free()
		wantEmpty(t, a)
	})
}

func TestRefused(t *testing.T) {
	good := Candidate{Prompt: prompt(4, chain(1, 2))}
	with := func(change func(*Candidate)) []Candidate {
		c := good
		change(&c)
		return []Candidate{good, c}
	}
	for _, test := range []struct {
		name       string
		isl        int
		candidates []Candidate
		costs      []float64
		want       string
	}{
		{"no candidates", 8, nil, nil, "no candidates"},
		{"negative prompt", -1, []Candidate{good}, nil, "-1 prompt tokens"},
		{"endless prompt", math.MaxInt, []Candidate{good}, nil, "prompt tokens, but must be"},
		{"worker number", 8, with(func(c *Candidate) { c.Worker = math.MaxUint32 }), nil,
			"candidate 1: worker number 4294967295"},
		{"negative block size", 8, with(func(c *Candidate) { c.Prompt = prompt(-4) }), nil,
			"candidate 1: block size -4"},
		{"huge block size", 8, with(func(c *Candidate) { c.Prompt = prompt(math.MaxInt) }), nil,
			"candidate 1: block size"},
		{"negative overlap", 8, with(func(c *Candidate) { c.DiskBlocks = -2 }), nil, "-2 disk"},
		{"huge overlap", 8, with(func(c *Candidate) { c.DeviceBlocks = math.MaxInt }), nil,
			"overlap of 9223372036854775807 device"},
		{"multiplier", 8, with(func(c *Candidate) { c.CostMultiplier = math.NaN() }), nil,
			"candidate 1: cost multiplier NaN"},
		{"too little room", 8, []Candidate{good, good}, make([]float64, 1), "room for 1 costs and 0 terms, but 2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := NewActiveSequences()
			_, _, err := a.SelectAndAdd(Request{ISLTokens: test.isl}, test.candidates, defaults(), nil, test.costs)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			wantEmpty(t, a)
		})
	}
}

func TestNoFiniteCostBooksNothing(t *testing.T) {
	a := NewActiveSequences()
	cfg := DefaultConfig()
	cfg.PrefillLoadScale = math.NaN() // as if Validate had not been called
	costs := make([]float64, 2)
	_, _, err := a.SelectAndAdd(Request{ISLTokens: 8}, workers(2, prompt(4, chain(1, 2))), &cfg, nil, costs)
	if !errors.Is(err, ErrNoFiniteCost) {
		t.Errorf("error %v, want ErrNoFiniteCost", err)
	}
	wantEmpty(t, a)
}

// wantEmpty checks that the book is empty, its internal tables included.
func wantEmpty(t *testing.T, a *ActiveSequences) {
	t.Helper()
	for w, load := range a.Loads(nil) {
		if load != (Load{}) {
			t.Errorf("worker %d still carries %+v", w, load)
		}
	}
	if n := a.Len(); n != 0 {
		t.Errorf("%d requests are still active", n)
	}
	if n := a.blocks.copied() + a.blocks.held(); n != 0 || a.blocks.keeping < 0 || a.blocks.keeping > maxKept {
		t.Errorf("%d bytes of blocks are held, and %d kept", n, a.blocks.keeping)
	}
	if a.expiring != (order{}) || len(a.blocks.weights) != 0 {
		t.Errorf("still known: expiring %v, %d weights", a.expiring, len(a.blocks.weights))
	}
	for w := range a.prefills {
		if a.prefills[w].waiting != (order{}) || a.adjusted[w] != (adjustment{}) {
			t.Errorf("worker %d: still waiting %v, weighs %v", w, a.prefills[w].waiting, a.adjusted[w])
		}
	}
	if len(a.byID) != 0 {
		t.Errorf("%d request IDs are still taken", len(a.byID))
	}
	if len(a.blocks.byFirst) != 0 || len(a.blocks.free) != len(a.blocks.runs)-1 {
		t.Errorf(
			"%d runs are still known, %d of %d free",
			len(a.blocks.byFirst),
			len(a.blocks.free),
			len(a.blocks.runs)-1,
		)
	}
	if sets := len(a.blocks.sets)/a.blocks.setWords - 1; len(a.blocks.extra) != 0 || len(a.blocks.freeSets) != sets {
		t.Errorf("%d shared counts left, %d of %d sets free", len(a.blocks.extra), len(a.blocks.freeSets), sets)
	}
	for i, word := range a.blocks.sets {
		if word != 0 {
			t.Errorf("word %d of the free sets is %#x", i, word)
		}
	}
}

// A thousand equal concurrent requests spread evenly over idle workers, because choice and booking are one step.
func TestBurstSpreads(t *testing.T) {
	const requests, n = 1000, 8
	a := NewActiveSequences()
	cfg := defaults()
	candidates := workers(n, prompt(16, chain(1, 32)))
	rng := rand.New(rand.NewPCG(1, 1)) // shared by all callers, under the book's lock
	start := make(chan struct{})
	bookings := make([]Booking, requests)
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			<-start
			var err error
			if _, bookings[i], err = a.SelectAndAdd(Request{ISLTokens: 512}, candidates, cfg, rng, nil); err != nil {
				t.Error(err)
			}
		})
	}
	close(start)
	wg.Wait()
	least, most := requests, 0
	for _, load := range a.Loads(nil) {
		least, most = min(least, load.Requests), max(most, load.Requests)
		if load.ActiveBlocks != 32 {
			t.Errorf("%d equal requests hold %d blocks, want 32", load.Requests, load.ActiveBlocks)
		}
	}
	if most-least > 1 {
		t.Errorf("requests per worker range from %d to %d", least, most)
	}
	for _, b := range bookings {
		wg.Go(b.MarkPrefillCompleted)
		wg.Go(b.Free)
		wg.Go(b.Free)
	}
	wg.Wait()
	wantEmpty(t, a)
}

func TestSharedPrefixCountsOnce(t *testing.T) {
	a := NewActiveSequences()
	shared := chain(1, 4)
	first := append(slices.Clone(shared), chain(2, 2)...)
	second := append(slices.Clone(shared), chain(3, 3)...)
	one := mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, first)})
	two := mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, second)})
	wantLoad(t, a, 0, Load{Requests: 2, ActiveBlocks: 9, ActiveTokens: 144})
	one.Free()
	wantLoad(t, a, 0, Load{Requests: 1, ActiveBlocks: 7, ActiveTokens: 112})
	two.Free()
	wantEmpty(t, a)
}

func TestBatchOfPromptsSharesAmongItself(t *testing.T) {
	a := NewActiveSequences()
	shared := chain(1, 4)
	p := prompt(
		16,
		append(slices.Clone(shared), chain(2, 2)...),
		append(slices.Clone(shared), chain(3, 3)...),
		shared,
		nil,
	)
	sel, b, err := a.SelectAndAdd(Request{}, workers(1, p), defaults(), nil, nil)
	if err != nil || sel.ActiveBlocks != 9 || sel.Cost != 9 {
		t.Errorf("%d blocks, cost %v, %v; want 9, 9, no error", sel.ActiveBlocks, sel.Cost, err)
	}
	b.Free()
	wantEmpty(t, a)
}

func TestWithoutReuseEveryRequestPays(t *testing.T) {
	a := NewActiveSequences()
	cfg := DefaultConfig()
	cfg.AssumeKVReuse = false
	candidates := workers(1, prompt(16, chain(1, 5), chain(1, 5)))
	for i := range 2 {
		sel, _, err := a.SelectAndAdd(Request{}, candidates, &cfg, nil, nil)
		if want := float64(10 * (i + 1)); err != nil || sel.ActiveBlocks != 10 || sel.Cost != want {
			t.Errorf("%d blocks, cost %v, %v; want 10, %v, no error", sel.ActiveBlocks, sel.Cost, err, want)
		}
	}
	wantLoad(t, a, 0, Load{Requests: 2, ActiveBlocks: 20, ActiveTokens: 320})
	a.Forget(0)
	wantEmpty(t, a)
}

func TestUntracked(t *testing.T) {
	a := NewActiveSequences()
	cfg := DefaultConfig()
	cfg.TrackActiveBlocks, cfg.TrackPrefillTokens = false, false
	if _, err := a.AddRequest(Request{ISLTokens: 100}, Candidate{Prompt: prompt(16, chain(1, 6))}, &cfg); err != nil {
		t.Fatal(err)
	}
	wantLoad(t, a, 0, Load{Requests: 1})
}

// Requests without hashes, without a block size, and with both: the same work costs the same, and the load of one kind
// counts for the others.
func TestLoadOnly(t *testing.T) {
	a := NewActiveSequences()
	costs := make([]float64, 3)
	candidates := []Candidate{
		{Worker: 0},
		{Worker: 1, Prompt: &Prompt{BlockSize: 64}},
		{Worker: 2, Prompt: prompt(32, chain(1, 20))},
	}
	sel, _, err := a.SelectAndAdd(Request{ISLTokens: 640}, candidates, defaults(), nil, costs)
	if err != nil || sel.UnitTokens != 32 || !slices.Equal(costs, []float64{40, 40, 40}) {
		t.Errorf("costs %v in blocks of %d, %v; want 40 each in blocks of 32", costs, sel.UnitTokens, err)
	}
	for _, c := range candidates {
		a.Forget(c.Worker)
	}

	// A request booked without hashes holds 640 tokens, with any block size of its worker.
	b := mustAdd(t, a, Request{ISLTokens: 640}, Candidate{Worker: 0})
	wantLoad(t, a, 0, Load{Requests: 1, PrefillTokens: 640, ActiveBlocks: 40, ActiveTokens: 640})
	b.MarkPrefillCompleted()
	again := prompt(64, chain(2, 1))
	if _, _, err := a.SelectAndAdd(Request{ISLTokens: 64}, workers(2, again), defaults(), nil, costs[:2]); err != nil {
		t.Fatal(err)
	}
	if want := []float64{12, 2}; !slices.Equal(costs[:2], want) {
		t.Errorf("costs %v, want %v", costs[:2], want)
	}
	a.Forget(0)
	a.Forget(1)
	wantEmpty(t, a)
}

// Clients of the HTTP services send hashes. Repeated hashes, the same hashes with two block sizes, or with other
// parents must not unbalance the book. No request counts for more blocks than it sent.
func TestNonsensicalHashes(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	for range 300 {
		a := NewActiveSequences()
		cfg := defaults()
		var bookings []Booking
		sent := 0
		for range 1 + rng.IntN(12) {
			chains := make([][]kvblock.SequenceHash, 1+rng.IntN(3))
			for i := range chains {
				chains[i] = make([]kvblock.SequenceHash, rng.IntN(6))
				for j := range chains[i] {
					chains[i][j] = kvblock.SequenceHash(rng.IntN(4))
				}
				sent += len(chains[i])
			}
			_, b, err := a.SelectAndAdd(
				Request{ISLTokens: 12},
				workers(2, prompt(4<<rng.IntN(2), chains...)),
				cfg,
				rng,
				nil,
			)
			if err != nil {
				t.Fatal(err)
			}
			bookings = append(bookings, b)
			if held := a.Load(0).ActiveBlocks + a.Load(1).ActiveBlocks; held > sent {
				t.Fatalf("the workers hold %d blocks; %d hashes were sent", held, sent)
			}
		}
		if rng.IntN(2) == 0 {
			a.Forget(0)
			a.Forget(1)
		}
		rng.Shuffle(len(bookings), func(i, j int) { bookings[i], bookings[j] = bookings[j], bookings[i] })
		for _, b := range bookings {
			b.Free()
		}
		wantEmpty(t, a)
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	a := NewActiveSequences()
	cfg := defaults()
	rng := rand.New(rand.NewPCG(1, 1))
	req := Request{ID: "r", ISLTokens: 1024}
	small, large := prompt(16, chain(1, 64), chain(2, 3)), prompt(64, chain(3, 16))
	candidates := append(workers(8, small), workers(8, large)...)
	for i := range candidates {
		candidates[i].Worker = kvblock.Worker(i)
	}
	costs := make([]float64, len(candidates))
	mustAdd(t, a, Request{}, candidates[0])
	mustAdd(t, a, Request{}, candidates[1])
	for _, cfg.Policy = range []Policy{Dynamo, Time} {
		allocs := testing.AllocsPerRun(200, func() {
			_, b, err := a.SelectAndAdd(req, candidates, cfg, rng, costs)
			if err != nil {
				t.Fatal(err)
			}
			b.MarkPrefillCompleted()
			b.LearnOutput(10)
			b.Free()
		})
		if allocs != 0 {
			t.Errorf("%v: %v allocations for a request, want none", cfg.Policy, allocs)
		}
	}
}

// A choice with the version of earlier loads is refused.
func TestIfVersion(t *testing.T) {
	a := NewActiveSequences()
	cfg := DefaultConfig()
	candidates := []Candidate{{Worker: 0}, {Worker: 1}}
	_, at := a.LoadsAndVersion(nil)
	book := func(at Version) (Booking, error) {
		sel, b, err := a.SelectAndAdd(Request{ISLTokens: 8, IfVersion: at}, candidates, &cfg, nil, nil)
		if _, now := a.LoadsAndVersion(nil); err == nil && sel.Version != now {
			t.Errorf("the selection has version %d, the book %d", sel.Version, now)
		}
		return b, err
	}
	first, err := book(at)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := book(at); !errors.Is(err, ErrChanged) || a.Len() != 1 {
		t.Errorf("after another booking: %v, %d bookings", err, a.Len())
	}
	second, err := book(at + 1)
	if err != nil {
		t.Fatal(err)
	}
	second.Free() // a release does not change the version
	if _, now := a.LoadsAndVersion(nil); now != at+2 {
		t.Errorf("version %d, want %d", now, at+2)
	}
	third, err := book(at + 2)
	if err != nil {
		t.Fatal(err)
	}
	first.MoveTo(7, 0)
	if _, err := book(at + 3); !errors.Is(err, ErrChanged) {
		t.Errorf("after a booking moved: %v", err)
	}
	if _, err := book(0); err != nil {
		t.Error(err)
	}
	third.Free()
}
