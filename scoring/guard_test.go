package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// late are peers whose bookings this book knows after 20 ms.
func late(rate float64, share ...bool) Peers {
	return Peers{Rate: rate, Staleness: 20 * time.Millisecond, Share: share}
}

// withLoads returns a book whose workers hold these blocks of 16 tokens, and that has seen bookings of 10 such blocks.
func withLoads(t *testing.T, p Peers, blocks ...int) *ActiveSequences {
	t.Helper()
	a := NewActiveSequences()
	for w, n := range blocks {
		c := Candidate{Worker: workers(w+1, nil)[w].Worker, Prompt: prompt(16, chain(100+w, n))}
		mustAdd(t, a, Request{ISLTokens: 16 * n}, c).ReleasePrefill()
	}
	a.SetPeers(p)
	a.guard.prefill.value, a.guard.active.value = 0, 160
	return a
}

// draws returns how often each candidate is chosen.
func draws(t *testing.T, a *ActiveSequences, cfg *Config, candidates []Candidate, n int) []float64 {
	t.Helper()
	rng, counts := rand.New(rand.NewPCG(1, 1)), make([]float64, len(candidates))
	for range n {
		sel, _, err := a.SelectAndAdd(Request{ISLTokens: 16, DryRun: true}, candidates, cfg, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts[sel.Index] += 1 / float64(n)
	}
	return counts
}

// 100 bookings a second known after 20 ms are 2 unknown ones of 10 blocks. They fill workers with 0, 4, 8 and 50 blocks
// up to the level (20+0+4+8)/3, and each is drawn in proportion to what is poured on it.
func TestTheGuardDrawsByWaterFilling(t *testing.T) {
	a := withLoads(t, late(100), 0, 4, 8, 50)
	got := draws(t, a, defaults(), workers(4, prompt(16, chain(1, 1))), 20_000)
	level := 32.0 / 3
	for i, held := range []float64{0, 4, 8} {
		if want := (level - held) / 20; math.Abs(got[i]-want) > 0.02 {
			t.Errorf("candidate %d is drawn in %.3f of the choices, want %.3f", i, got[i], want)
		}
	}
	if got[3] != 0 {
		t.Errorf("the loaded worker is drawn in %.3f of the choices", got[3])
	}
}

// A worker of the own share is chosen if it costs little more than the cheapest, here 2 unknown bookings over 4
// workers: 1 + 2*2/4 bookings of 10 blocks.
func TestTheGuardPrefersTheOwnShare(t *testing.T) {
	for _, c := range []struct {
		held int
		own  bool
	}{{0, true}, {15, true}, {20, true}, {21, false}, {50, false}} {
		a := withLoads(t, late(100, false, true), 0, c.held, 60, 60)
		got := draws(t, a, defaults(), workers(4, prompt(16, chain(1, 1))), 200)
		if (got[1] > 0.999) != c.own {
			t.Errorf("with %d blocks more, the own worker is chosen in %.2f of the choices", c.held, got[1])
		}
	}
}

// The unknown bookings are those that came between the time of their booking and the time when they are known, counted
// for each own choice. What snapshots bring, and what is later than copies may be, does not count.
func TestTheGuardCountsUnknownBookings(t *testing.T) {
	a, now := NewActiveSequences(), time.Duration(0)
	a.Clock = func() time.Duration { return now }
	a.SetPeers(Peers{Rate: 1e-6, Staleness: 2 * time.Millisecond})
	peer, number := a.NewCopies(false), uint64(0)
	choose := func(ms int) {
		now = time.Duration(ms) * time.Millisecond
		if _, _, err := a.SelectAndAdd(Request{ISLTokens: 16}, workers(4, nil), defaults(), nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	hear := func(ms, age int) {
		now = time.Duration(ms) * time.Millisecond
		number++
		if n, _ := peer.Apply([]Change{{Kind: Booked, Number: number, Worker: 1, BlockSize: 16, Blocks: 1,
			Age: time.Duration(age) * time.Millisecond}}); n != 1 {
			t.Fatal("not applied")
		}
	}
	want := func(made, missed float64) {
		t.Helper()
		if u := &a.guard.unknown; math.Abs(u.made-made) > 1e-9 || math.Abs(u.missed-missed) > 1e-9 {
			t.Errorf("%v choices did not know %v bookings, want %v and %v", u.made, u.missed, made, missed)
		}
	}
	choose(100)
	hear(101, 0) // booked at 99, because copies are 2 ms late
	want(1, 1)
	hear(102, 0) // booked at the same time
	want(1, 1.5)
	hear(103, 0)
	want(1, 1.5)
	hear(110, 11) // the peer says that it is older
	want(1, 2.5)
	hear(360, 261) // this one has waited somewhere
	peer.BeginSnapshot()
	hear(111, 12)
	peer.EndSnapshot()
	want(1, 2.5)
	choose(120)
	want(1+fade, 2.5*fade)
	for i := range 30 {
		choose(200 + i)
	}
	made, missed := a.guard.unknown.made, a.guard.unknown.missed
	hear(230, 200) // 31 choices since; the book knows the latest 16
	want(made, missed+16)
	for range 8 * mostMissed { // a peer floods
		hear(230, 2)
	}
	if got := a.guard.unknown.missed; got <= missed+16 || got > missed+16+2*mostMissed {
		t.Errorf("%v bookings missed, %v before", got, missed+16)
	}
	if got, want := a.guard.unseen(), a.guard.unknown.missed/made; got != want {
		t.Errorf("%v bookings are expected to be unknown, want %v", got, want)
	}
	a.SetPeers(Peers{Rate: 1000, Staleness: 2 * time.Millisecond})
	if got := a.guard.unseen(); got != 2 {
		t.Errorf("%v bookings are expected to be unknown, want 2", got)
	}
	a.guard.unknown = unknown{made: 4.9, missed: 40}
	if got := a.guard.unseen(); got != 2 {
		t.Errorf("after 4 choices, %v bookings are expected to be unknown, want 2", got)
	}
}

// Three requests that arrive at one moment at three replicas go to different workers. If bookings are known soon, those
// of the replicas that others precede settle and are made again. Otherwise each replica counts what its choices did not
// know, and prefers its own share. All would choose the cheapest worker otherwise.
func TestRequestsOfOneMomentGoApart(t *testing.T) {
	for _, c := range []struct {
		staleness      time.Duration
		heeds, settles bool // the callers heed Settle; requests settle
		least          int  // of 50 rounds
	}{
		{time.Millisecond, true, true, 50},
		{2 * time.Millisecond, true, true, 50},
		{5 * time.Millisecond, true, false, 45},
		{time.Millisecond, false, false, 45},
	} {
		m := newMoment(t, c.staleness)
		m.heeds = c.heeds
		apart := 0
		for round := range 60 {
			workers, settled := m.play(round)
			if settled != c.settles {
				t.Fatalf("staleness %v: in round %d requests settle: %v", c.staleness, round, settled)
			}
			if round >= 10 && workers == len(m.replicas) {
				apart++
			}
		}
		if apart < c.least {
			t.Errorf("staleness %v, heeded %v: in %d of 50 rounds the requests went to different workers, want %d",
				c.staleness, c.heeds, apart, c.least)
		}
	}
}

// moment is three replicas with three workers, at which requests arrive at one moment.
type moment struct {
	*testing.T
	now       time.Duration
	staleness time.Duration
	heeds     bool // Request.Settles
	rng       *rand.Rand
	replicas  []*replica
}

func newMoment(t *testing.T, staleness time.Duration) *moment {
	m := &moment{T: t, staleness: staleness, rng: rand.New(rand.NewPCG(4, 4)), replicas: newReplicas(3)}
	for i, r := range m.replicas {
		r.book.Clock = func() time.Duration { return m.now }
		share := make([]bool, len(m.replicas))
		share[i] = true
		r.book.SetPeers(Peers{Rate: 0.2, Staleness: staleness, Share: share})
	}
	for w := range len(m.replicas) - 1 {
		c := Candidate{Worker: workers(3, nil)[w+1].Worker, Prompt: prompt(16, chain(100+w, 2))}
		mustAdd(t, m.replicas[0].book, Request{ISLTokens: 32}, c).ReleasePrefill()
	}
	m.tell()
	return m
}

// tell has all books hear what they have not heard.
func (m *moment) tell() {
	for of := range m.replicas {
		for i, r := range m.replicas {
			if i != of {
				r.catchUp(m.T, m.replicas, of, math.MaxInt)
			}
		}
	}
}

// play has a request arrive at each replica, and end. It returns to how many workers they went, and whether they
// settled.
func (m *moment) play(round int) (different int, settled bool) {
	m.now = time.Duration(round) * 10 * time.Second
	var bookings [3]Booking
	var chosen [3]int
	choose := func(r, again int) {
		prompt := prompt(16, chain(1000*round+r, 8+m.rng.IntN(4)))
		request := Request{ISLTokens: 160, Settles: m.heeds, Again: again}
		sel, b, err := m.replicas[r].book.SelectAndAdd(request, workers(3, prompt), defaults(), m.rng, nil)
		if err != nil {
			m.Fatal(err)
		}
		bookings[r], chosen[r], settled = b, sel.Index, sel.Settle > 0
		if settled && sel.Settle < m.staleness {
			m.Fatalf("a request settles for %v, but bookings are known %v late", sel.Settle, m.staleness)
		}
	}
	for r := range m.replicas {
		choose(r, 0)
	}
	for again, made := true, 1; again; made++ {
		m.now += m.staleness
		m.tell()
		again = false
		for r, b := range bookings {
			if settled && b.Overtaken() {
				if again = true; r == 0 {
					m.Fatal("the booking of the first replica was overtaken")
				}
				b.Free()
				choose(r, made)
			}
		}
	}
	m.now += time.Second
	for _, b := range bookings {
		b.Free()
	}
	m.tell()
	slices.Sort(chosen[:])
	return len(slices.Compact(chosen[:])), settled
}

// A request settles only if unknown bookings of its moment can change its choice.
func TestSettle(t *testing.T) {
	const wait = 3 * time.Millisecond
	for name, c := range map[string]struct {
		second int // blocks that the second of two workers holds more
		again  int
		change func(*guard, *Config) // of the usual case, in which a request settles
		want   time.Duration
	}{
		"requests come together":           {5, 0, nil, wait},
		"not known yet":                    {5, 0, func(g *guard, _ *Config) { g.unknown = unknown{} }, wait},
		"they do not":                      {5, 0, func(g *guard, _ *Config) { g.unknown.missed = 0 }, 0},
		"they come at once by chance":      {5, 0, func(g *guard, _ *Config) { g.Rate = 100 }, 0},
		"too many come together":           {5, 0, func(g *guard, _ *Config) { g.unknown.missed = 300 }, 0},
		"the second worker costs far more": {100, 0, nil, 0},
		"it does, after a choice":          {100, 1, nil, wait},
		"it was chosen for often enough":   {5, 3, nil, 0},
		"no peers":                         {5, 1, func(g *guard, _ *Config) { g.Rate = 0 }, 0},
		"bookings are known late":          {5, 1, func(g *guard, _ *Config) { g.Staleness *= 2 }, 0},
		"copies are not priced":            {5, 1, func(g *guard, _ *Config) { g.stale = true }, 0},
		"a booking costs nothing":          {5, 0, func(g *guard, _ *Config) { g.active.value = 0 }, 0},
		"a booking costs 100 ms": {5, 0, func(g *guard, c *Config) {
			c.Policy, g.prefill.value = Time, 1000
		}, wait},
		"a booking costs 5 ms": {5, 0, func(g *guard, c *Config) {
			c.Policy, g.prefill.value = Time, 50
		}, 0},
		"a booking costs 100 ms, and is known soon": {5, 0, func(g *guard, c *Config) {
			c.Policy, g.prefill.value, g.Staleness = Time, 1000, 100*time.Microsecond
		}, 2 * time.Millisecond},
		"a booking costs 1 ms, and is known soon": {5, 0, func(g *guard, c *Config) {
			c.Policy, g.prefill.value, g.Staleness, g.unknown.missed = Time, 10, 100*time.Microsecond, 104.5
		}, time.Millisecond}, // what one unknown booking costs
		"this replica precedes all others": {5, 0, func(g *guard, _ *Config) { g.First = true }, 0},
		"cheap workers are likely":         {5, 1, func(_ *guard, c *Config) { c.Temperature = 1 }, 0},
		"a worker is drawn":                {5, 1, func(_ *guard, c *Config) { c.Mode = Random }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, cfg := withLoads(t, Peers{Rate: 2, Staleness: 2 * time.Millisecond}, 0, c.second), defaults()
			a.guard.unknown = unknown{made: 100, missed: 30}
			if c.change != nil {
				c.change(&a.guard, cfg)
			}
			request := Request{ISLTokens: 128, Settles: true, Again: c.again}
			candidates := workers(2, prompt(16, chain(1, 8)))
			request.DryRun = true
			if sel, _, err := a.SelectAndAdd(request, candidates, cfg, nil, nil); err != nil || sel.Settle != 0 {
				t.Errorf("not booked, it settles for %v (%v)", sel.Settle, err)
			}
			request.DryRun = false
			sel, _, err := a.SelectAndAdd(request, candidates, cfg, nil, nil)
			if settle := sel.Settle.Round(10 * time.Microsecond); err != nil || settle != c.want {
				t.Errorf("settles for %v, want %v (%v)", settle, c.want, err)
			}
			if sel, _, err := a.SelectAndAdd(request, candidates[:1], cfg, nil, nil); err != nil || sel.Settle != 0 {
				t.Errorf("with one worker, it settles for %v (%v)", sel.Settle, err)
			}
			request.Settles = false
			if sel, _, err := a.SelectAndAdd(request, candidates, cfg, nil, nil); err != nil || sel.Settle != 0 {
				t.Errorf("without Settles, it settles for %v (%v)", sel.Settle, err)
			}
		})
	}
}

// The first replica takes the cheapest worker, and not one of its own share, where the requests of others settle.
func TestFirstTakesTheCheapest(t *testing.T) {
	for _, settles := range []bool{true, false} {
		peers := Peers{Rate: 2, Staleness: 2 * time.Millisecond, Share: []bool{false, true}, First: true}
		a := withLoads(t, peers, 0, 5)
		a.guard.unknown = unknown{made: 100, missed: 30}
		request := Request{ISLTokens: 128, Settles: settles}
		sel, _, err := a.SelectAndAdd(request, workers(2, prompt(16, chain(1, 8))), defaults(), nil, nil)
		if cheapest := sel.Worker == 0; err != nil || cheapest != settles || sel.Settle != 0 {
			t.Errorf("requests settle: %v; chose worker %d, settles for %v (%v)", settles, sel.Worker, sel.Settle, err)
		}
	}
}

// A booking is overtaken by one that a preceding replica makes at the same worker after it, and by no other.
func TestOvertaken(t *testing.T) {
	a := NewActiveSequences()
	first, second := a.NewCopies(true), a.NewCopies(false)
	booked := func(number uint64, worker kvblock.Worker) []Change {
		return []Change{{Kind: Booked, Number: number, Worker: worker, BlockSize: 16, PrefillTokens: 10}}
	}
	first.Apply(booked(1, 0))
	b := mustAdd(t, a, Request{ISLTokens: 100}, Candidate{Worker: 0, Prompt: prompt(16, chain(5, 6))})
	for _, c := range []struct {
		what string
		do   func()
		want bool
	}{
		{"one that was known", func() {}, false},
		{"an own one", func() {
			mustAdd(t, a, Request{ISLTokens: 100}, Candidate{Worker: 0, Prompt: prompt(16, chain(6, 6))})
		}, false},
		{"one of a replica that comes later", func() { second.Apply(booked(1, 0)) }, false},
		{"one at another worker", func() { first.Apply(booked(2, 1)) }, false},
		{"the end of one", func() { first.Apply([]Change{{Kind: Freed, Number: 1}}) }, false},
		{"one in a snapshot", func() {
			first.BeginSnapshot()
			first.Apply(booked(2, 0))
			first.EndSnapshot()
		}, false},
		{"one of a preceding replica", func() { first.Apply(booked(3, 0)) }, true},
		{"one that has ended since", func() { first.Apply([]Change{{Kind: Freed, Number: 3}}) }, true},
	} {
		if c.do(); b.Overtaken() != c.want {
			t.Errorf("after %s: overtaken: %v", c.what, !c.want)
		}
	}
	b.Free()
	if b.Overtaken() || (Booking{}).Overtaken() {
		t.Error("a request that has ended is overtaken")
	}
}

// By time, a booking costs the next one its prefill, with the constant part of a step.
func TestTheGuardCountsAPrefillStep(t *testing.T) {
	a, cfg := NewActiveSequences(), byTime()
	a.guard.prefill.value = 1000
	a.fleet = &fleet{usual: pace{prefill: line{slope: 1e-4, constant: 0.02}}}
	if got := a.bookingCost(cfg, 16); math.Abs(got-120) > 1e-9 {
		t.Errorf("a booking of 1,000 tokens costs %v ms, want 20 + 100", got)
	}
	cfg.TrackPrefillTokens = false
	if got := a.bookingCost(cfg, 16); got != 0 {
		t.Errorf("a booking on a decode worker costs %v ms, want 0", got)
	}
}

// However late the others' bookings are known, a worker that has more of the prompt cached is not passed over.
func TestTheGuardGivesNoHitAway(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		cfg := defaults()
		cfg.Policy = policy
		for _, cached := range []int{1, 8} {
			a := withLoads(t, late(10_000, true, true, true, false), 0, 0, 0, 0)
			candidates := workers(4, prompt(16, chain(1, 8)))
			candidates[3].DeviceBlocks = cached
			rng := rand.New(rand.NewPCG(2, 2))
			for range 200 {
				req := Request{ISLTokens: 128, DryRun: true}
				sel, _, err := a.SelectAndAdd(req, candidates, cfg, rng, nil)
				if err != nil || sel.Index != 3 {
					t.Fatalf("policy %v: chose %+v (%v), though worker 3 has %d blocks", policy, sel, err, cached)
				}
			}
		}
	}
}

// Without peers, and with peers whose bookings are known at once, choices are the same to the last bit.
func TestTheGuardIsOffWithoutPeers(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		synctest.Test(t, func(t *testing.T) {
			cfg := defaults()
			cfg.Policy = policy
			var logs [4][]Selection
			for k, p := range []Peers{{}, {Rate: 1000}, {Rate: math.NaN(), Staleness: time.Millisecond}, {Rate: 0.1,
				Staleness: time.Millisecond, Share: make([]bool, 16)}} {
				a, rng := NewActiveSequences(), rand.New(rand.NewPCG(3, 3))
				a.SetPeers(p)
				for i := range 300 {
					candidates := workers(16, prompt(16, chain(i%7, i%20)))
					sel, b, err := a.SelectAndAdd(Request{ISLTokens: 16 * (i % 20)}, candidates, cfg, rng, nil)
					if err != nil {
						t.Fatal(err)
					}
					sel.Settle = 0
					if i%3 > 0 {
						b.Free()
					}
					logs[k] = append(logs[k], sel)
				}
				if !slices.Equal(logs[k], logs[0]) {
					t.Errorf("policy %v: peers %+v change choices", policy, p)
				}
			}
		})
	}
}

// Copies that are too late count as load and are not priced: costs are those of a book without them. The terms say so.
func TestStaleCopiesAreNotPriced(t *testing.T) {
	for _, policy := range []Policy{Dynamo, Time} {
		cfg := defaults()
		cfg.Policy = policy
		own, both := NewActiveSequences(), NewActiveSequences()
		for _, a := range []*ActiveSequences{own, both} {
			mustAdd(t, a, Request{ISLTokens: 100}, Candidate{Worker: 1, Prompt: prompt(16, chain(5, 6))})
		}
		peer := both.NewCopies(false)
		peer.Apply([]Change{
			{Kind: Booked, Number: 1, Worker: 0, BlockSize: 16, PrefillTokens: 700, Blocks: 50},
			{Kind: Booked, Number: 2, Worker: 0, BlockSize: 16, Blocks: 30},
			{Kind: Booked, Number: 3, Worker: 1, BlockSize: 16, PrefillTokens: 100, Blocks: 3},
		})
		price := func(a *ActiveSequences) ([]float64, []Terms) {
			costs, terms := make([]float64, 3), make([]Terms, 3)
			req := Request{ISLTokens: 64, DryRun: true, Terms: terms}
			if _, _, err := a.SelectAndAdd(req, workers(3, prompt(16, chain(1, 4))), cfg, nil, costs); err != nil {
				t.Fatal(err)
			}
			for i := range terms {
				if cost := cfg.Cost(&terms[i]); cost != costs[i] {
					t.Errorf("policy %v: the terms %+v cost %v, not %v", policy, terms[i], cost, costs[i])
				}
			}
			return costs, terms
		}
		want, _ := price(own)
		fresh, terms := price(both)
		for i := range terms {
			alone := terms[i].WithoutPeers()
			if cost := cfg.Cost(&alone); math.Abs(cost-want[i]) > 1e-9 || terms[i].Peers.Requests != []int{2, 1, 0}[i] {
				t.Errorf("policy %v: candidate %d costs %v without %+v, want %v",
					policy, i, cost, terms[i].Peers, want[i])
			}
		}
		if fresh[0] <= want[0] || fresh[1] <= want[1] || fresh[2] != want[2] {
			t.Errorf("policy %v: costs %v with copies, %v without", policy, fresh, want)
		}
		for _, c := range []struct {
			late  time.Duration
			stale bool
		}{{250 * time.Millisecond, false}, {251 * time.Millisecond, true}, {201 * time.Millisecond, true},
			{200 * time.Millisecond, false}, {time.Hour, true}} {
			both.SetPeers(Peers{Rate: 0.01, Staleness: c.late})
			if both.PeersStale() != c.stale {
				t.Errorf("%v late: stale %v", c.late, both.PeersStale())
			}
		}
		stale, _ := price(both)
		for i := range stale {
			if math.Abs(stale[i]-want[i]) > 1e-9 {
				t.Errorf("policy %v: stale copies change the cost of %d from %v to %v", policy, i, want[i], stale[i])
			}
		}
		if load := both.Load(0); load.Requests != 2 || load.PrefillTokens != 700 {
			t.Errorf("the load is %+v", load)
		}
	}
}

// spreadByDefinition is spread in several passes, as its comment says it, with the part of each cost computed in one
// way for all candidates. held has the blocks of each candidate's prompt that its worker holds.
func spreadByDefinition(
	a *ActiveSequences, candidates []Candidate, cfg *Config, unit, i int, rng *rand.Rand, costs []float64, held []int,
) int {
	unseen, each := a.guard.Rate*a.guard.Staleness.Seconds(), a.bookingCost(cfg, unit)
	if u := &a.guard.unknown; u.made >= 5 && u.missed/u.made > unseen {
		unseen = u.missed / u.made
	}
	if unseen < leastUnseen || a.guard.stale || !(each > 0) || len(candidates) == 1 {
		return i
	}
	part := func(j int) float64 {
		c := &candidates[j]
		size := float64(c.blockSize(unit))
		credit := cfg.OverlapScoreCredit*float64(c.DeviceBlocks) + cfg.HostCacheHitWeight*float64(c.HostBlocks) +
			cfg.DiskCacheHitWeight*float64(c.DiskBlocks) + cfg.SharedCacheMultiplier*float64(c.SharedBlocks)
		if cfg.Policy == Time {
			if a.learned.prices[c.Worker].prefilling > 0 {
				credit = max(credit, float64(held[j]))
			}
			return -credit * size
		}
		return (float64(len(c.Prompt.Chains[0])-held[j]) - cfg.PrefillLoadScale*credit) * size
	}
	limit, chosen := costs[i]+min(shareLead*math.Sqrt(unseen), 1+2*unseen/float64(len(candidates)))*each, -1
	for j, cost := range costs {
		w := int(candidates[j].Worker)
		if w < len(a.guard.Share) && a.guard.Share[w] && part(j) <= part(i) &&
			(cost < limit || cost == limit && chosen < 0) {
			limit, chosen = cost, j
		}
	}
	if chosen >= 0 {
		return chosen
	}
	var near []int
	for j, cost := range costs {
		if cost < costs[i]+unseen*each && part(j) <= part(i) {
			near = append(near, j)
		}
	}
	if len(near) < 2 {
		return i
	}
	level := 0.0
	for {
		level = 0
		for _, j := range near {
			level += costs[j]
		}
		level = (unseen*each + level) / float64(len(near))
		kept := slices.DeleteFunc(slices.Clone(near), func(j int) bool { return !(costs[j] < level) })
		if len(kept) == len(near) || len(kept) == 0 {
			break
		}
		near = kept
	}
	rest := rng.Float64() * (unseen * each)
	for _, j := range near {
		if rest -= level - costs[j]; rest < 0 {
			return j
		}
	}
	return i
}

// The guard's passes without branches choose what its definition chooses, and draw the same numbers, for candidates
// that are alike and for others.
func TestTheGuardEqualsItsDefinition(t *testing.T) {
	moved := map[string]int{}
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 6))
		a, n := NewActiveSequences(), 2+rng.IntN(40)
		cfg := defaults()
		cfg.Policy = []Policy{Dynamo, Time}[seed%2]
		cfg.OverlapScoreCredit = []float64{0, 0.7, 1}[rng.IntN(3)]
		share := make([]bool, rng.IntN(n+1))
		for w := range share {
			share[w] = rng.IntN(4) == 0
		}
		for i := range 6 * n {
			c := Candidate{Worker: workers(n, nil)[rng.IntN(n)].Worker, Prompt: prompt(16, chain(i%9, 1+rng.IntN(12)))}
			b := mustAdd(t, a, Request{ISLTokens: 16 * len(c.Prompt.Chains[0])}, c)
			if rng.IntN(3) > 0 {
				b.ReleasePrefill()
			}
		}
		a.SetPeers(late(math.Exp(rng.Float64()*12-3), share...))
		a.guard.prefill.value, a.guard.active.value = float64(rng.IntN(3)*40), float64(rng.IntN(200))
		a.guard.unknown = unknown{made: float64(rng.IntN(12)), missed: float64(rng.IntN(60) * rng.IntN(2))}
		for k := range 40 {
			alike := k%2 == 0
			candidates := workers(n, prompt(16, chain(k%11, 1+rng.IntN(12))))
			for j := range candidates {
				candidates[j].DeviceBlocks = rng.IntN(4) * rng.IntN(2)
				if !alike {
					candidates[j].HostBlocks = rng.IntN(3)
					if j%3 == 1 {
						candidates[j].Prompt = prompt(32, chain(k%11, 1+rng.IntN(6)))
					}
				}
			}
			req := Request{ISLTokens: 200}
			all, err := look(req, candidates, cfg)
			if err != nil || all.alike != alike {
				t.Fatal(all, err)
			}
			costs, held := make([]float64, n), make([]int, n)
			a.lock()
			if err := a.open(req, candidates, cfg, &all); err != nil {
				t.Fatal(err)
			}
			for j := range candidates {
				if held[j] = int(a.walker.held[candidates[j].Worker]); !alike {
					held[j] = len(candidates[j].Prompt.Chains[0]) - a.added[j]
				}
			}
			var i int
			switch {
			case !alike:
				a.price(req, candidates, cfg, all.unit, costs)
				i, err = Choose(costs, 0, rng)
			case cfg.Policy == Time:
				i, err = a.chooseAlikeByTime(req, candidates, cfg, all.unit, rng, costs)
			default:
				i, err = a.chooseAlike(req, candidates, cfg, all.unit, rng, costs)
			}
			one, other := rand.New(rand.NewPCG(seed, uint64(k))), rand.New(rand.NewPCG(seed, uint64(k)))
			got := a.spread(candidates, cfg, &all, i, one, costs)
			want := spreadByDefinition(a, candidates, cfg, all.unit, i, other, costs, held)
			a.closeWalks()
			a.mu.Unlock()
			if err != nil || got != want || one.Uint64() != other.Uint64() {
				t.Fatalf("seed %d, %d: chose %d (%v), want %d instead of %d: costs %v", seed, k, got, err, want, i,
					costs)
			}
			if got != i {
				moved[fmt.Sprintf("%v alike=%v", cfg.Policy, alike)]++
			}
		}
	}
	if len(moved) != 4 {
		t.Errorf("the guard chose another candidate for %v only: this shows little", moved)
	}
	t.Log(moved)
}
