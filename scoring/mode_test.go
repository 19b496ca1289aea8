package scoring

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"kvepp/kvblock"
)

func inMode(m Mode) *Config {
	cfg := DefaultConfig()
	cfg.Mode = m
	return &cfg
}

// take selects and books n times, without freeing, and returns the chosen workers in order.
func take(
	t *testing.T,
	a *ActiveSequences,
	cfg *Config,
	rng *rand.Rand,
	n int,
	candidates []Candidate,
) (chosen []kvblock.Worker, bookings []Booking) {
	t.Helper()
	for range n {
		sel, b, err := a.SelectAndAdd(Request{ISLTokens: 64}, candidates, cfg, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		chosen, bookings = append(chosen, sel.Worker), append(bookings, b)
	}
	return chosen, bookings
}

func requestsOf(a *ActiveSequences) (requests []int) {
	for _, load := range a.Loads(nil) {
		requests = append(requests, load.Requests)
	}
	return requests
}

func TestModeNames(t *testing.T) {
	for m := KV; m <= DeviceAwareWeighted; m++ {
		if got, err := ParseMode(m.String()); err != nil || got != m {
			t.Errorf("%v: %v, %v", m, got, err)
		}
		cfg := inMode(m)
		if err := cfg.Validate(); err != nil {
			t.Errorf("%v: %v", m, err)
		}
	}
	if _, err := ParseMode("KV"); err == nil {
		t.Error("KV is no mode's name")
	}
	if cfg := inMode(99); cfg.Validate() == nil || cfg.Mode.String() == "" {
		t.Error("mode 99 is valid")
	}
}

// In each mode the request is booked on the chosen worker, and Free removes the whole booking.
func TestEveryModeBooks(t *testing.T) {
	for m := KV; m <= DeviceAwareWeighted; m++ {
		a := NewActiveSequences()
		candidates := workers(5, prompt(16, chain(1, 4)))
		candidates[3].CPU = true
		chosen, bookings := take(t, a, inMode(m), rand.New(rand.NewPCG(1, 1)), 40, candidates)
		want := make([]int, 5)
		for _, w := range chosen {
			want[w]++
		}
		if got := requestsOf(a); !slices.Equal(got, want) {
			t.Errorf("%v: requests %v, want %v", m, got, want)
		}
		for w, load := range a.Loads(nil) {
			if load.Requests > 0 && (load.ActiveBlocks != 4 || load.PrefillTokens != 64*load.Requests) {
				t.Errorf("%v: worker %d carries %+v", m, w, load)
			}
		}
		for _, b := range bookings {
			b.Free()
		}
		wantEmpty(t, a)
	}
}

// Round robin ignores loads. It keeps its order also if the candidates change from request to request, and if a worker
// joins later.
func TestRoundRobin(t *testing.T) {
	a := NewActiveSequences()
	cfg := inMode(RoundRobin)
	all := workers(4, nil)
	mustAdd(t, a, Request{ISLTokens: 1 << 20}, all[1])
	got, _ := take(t, a, cfg, nil, 6, all[:3])
	if want := []kvblock.Worker{0, 1, 2, 0, 1, 2}; !slices.Equal(got, want) {
		t.Errorf("turns %v, want %v", got, want)
	}
	got, _ = take(t, a, cfg, nil, 5, all)
	if want := []kvblock.Worker{3, 0, 1, 2, 3}; !slices.Equal(got, want) {
		t.Errorf("with a worker that joined: %v, want %v", got, want)
	}
	// Two models in turn. Each has two workers.
	for range 3 {
		one, _ := take(t, a, cfg, nil, 1, all[:2])
		other, _ := take(t, a, cfg, nil, 1, all[2:])
		next, _ := take(t, a, cfg, nil, 1, all[:2])
		after, _ := take(t, a, cfg, nil, 1, all[2:])
		if one[0] == next[0] || other[0] == after[0] {
			t.Fatalf("of two workers one has all the turns: %v %v, %v %v", one, next, other, after)
		}
	}
	a.Forget(2)
	for range 2 { // a dry run does not take a turn
		if sel, _, err := a.SelectAndAdd(Request{DryRun: true}, all, cfg, nil, nil); err != nil || sel.Worker != 2 {
			t.Errorf("worker %d would be next, %v; want 2", sel.Worker, err)
		}
	}
	if got, _ = take(t, a, cfg, nil, 1, all); got[0] != 2 {
		t.Errorf("a new worker with the number of one that left: worker %d has the first turn, want 2", got[0])
	}
}

func TestRandomIsEven(t *testing.T) {
	a := NewActiveSequences()
	take(t, a, inMode(Random), rand.New(rand.NewPCG(5, 6)), 40_000, workers(4, nil))
	chiSquare := 0.0
	for _, n := range requestsOf(a) {
		chiSquare += float64((n-10_000)*(n-10_000)) / 10_000
	}
	if chiSquare > 16.27 { // 99.9 %
		t.Errorf("requests %v, chi-square %.1f", requestsOf(a), chiSquare)
	}
}

// The mode draws two workers and takes the one with fewer requests: the busiest of three is never chosen, and the
// differences stay small.
func TestPowerOfTwo(t *testing.T) {
	a := NewActiveSequences()
	cfg, rng := inMode(PowerOfTwo), rand.New(rand.NewPCG(1, 2))
	candidates := workers(3, nil)
	for range 50 {
		mustAdd(t, a, Request{}, candidates[1])
	}
	if chosen, _ := take(t, a, cfg, rng, 40, candidates); slices.Contains(chosen, 1) {
		t.Errorf("the busiest was chosen: %v", requestsOf(a))
	}
	a.Forget(1)
	take(t, a, cfg, rng, 1000, candidates)
	if r := requestsOf(a); slices.Max(r)-slices.Min(r) > 20 {
		t.Errorf("requests %v lie far apart", r)
	}
	if chosen, _ := take(t, a, cfg, rng, 1, candidates[2:]); chosen[0] != 2 {
		t.Errorf("of one worker: %v", chosen)
	}
}

// Only the number of requests counts, not the size of prompts. Ties are broken at random.
func TestLeastLoaded(t *testing.T) {
	for _, mode := range []Mode{LeastLoaded, Direct} {
		a := NewActiveSequences()
		candidates := workers(3, nil)
		mustAdd(t, a, Request{ISLTokens: 1 << 20}, candidates[0])
		mustAdd(t, a, Request{}, candidates[1])
		mustAdd(t, a, Request{}, candidates[1])
		chosen, _ := take(t, a, inMode(mode), rand.New(rand.NewPCG(1, 2)), 3, candidates)
		if chosen[0] != 2 || !slices.Contains(chosen[1:], 0) || !slices.Contains(chosen[1:], 2) {
			t.Errorf("%v: chose %v, want 2, then 0 and 2", mode, chosen)
		}
	}
}

func TestLeastLoadedBurst(t *testing.T) {
	a := NewActiveSequences()
	cfg, candidates := inMode(LeastLoaded), workers(8, nil)
	var wg sync.WaitGroup
	for range 1000 {
		wg.Go(func() {
			if _, _, err := a.SelectAndAdd(Request{ISLTokens: 9}, candidates, cfg, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for w, n := range requestsOf(a) {
		if n != 125 {
			t.Errorf("worker %d has %d requests of 1,000 over 8", w, n)
		}
	}
}

// With a ratio of 4, two CPUs get a quarter of the requests of two accelerators. The counts follow from cpu <
// accelerator*2/(4*2): the first four requests go to accelerators, then every fifth to a CPU.
func TestDeviceAwareWeighted(t *testing.T) {
	a := NewActiveSequences()
	cfg := inMode(DeviceAwareWeighted)
	cfg.CUDAToCPURatio = 4
	candidates := workers(4, nil)
	candidates[1].CPU, candidates[3].CPU = true, true
	chosen, _ := take(t, a, cfg, rand.New(rand.NewPCG(1, 2)), 20, candidates)
	for i, w := range chosen {
		if onCPU := candidates[w].CPU; onCPU != (i%5 == 4) {
			t.Errorf("request %d went to worker %d of %v", i, w, chosen)
		}
	}
	if r := requestsOf(a); r[0] != 8 || r[2] != 8 || r[1] != 2 || r[3] != 2 {
		t.Errorf("requests %v, want 8 2 8 2", r)
	}
	// With one kind of worker the mode is least-loaded.
	for _, cpu := range []bool{true, false} {
		a := NewActiveSequences()
		candidates := workers(3, nil)
		for i := range candidates {
			candidates[i].CPU = cpu
		}
		take(t, a, cfg, nil, 9, candidates)
		if r := requestsOf(a); !slices.Equal(r, []int{3, 3, 3}) {
			t.Errorf("CPU %v: requests %v", cpu, r)
		}
	}
}
