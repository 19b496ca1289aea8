package indexer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"kvepp/kvblock"
)

func newIndex(t testing.TB) *Index {
	t.Helper()
	x, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// chainOf returns a prompt that differs for each id.
func chainOf(id uint64, n int) (local []kvblock.LocalHash, chain []kvblock.SequenceHash) {
	r := rand.New(rand.NewPCG(id, 7))
	for range n {
		local = append(local, kvblock.LocalHash(r.Uint64()))
	}
	return local, kvblock.AppendSequenceHashes(nil, local)
}

// stores returns the store of blocks [from, to) of a prompt, with engine hashes base+i.
func stores(base kvblock.EngineHash, local []kvblock.LocalHash, from, to int) kvblock.Stored {
	e := kvblock.Stored{HasParent: from > 0, Parent: base + kvblock.EngineHash(from-1)}
	for i := from; i < to; i++ {
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: base + kvblock.EngineHash(i), Local: local[i]})
	}
	return e
}

// A run is extended in place for one of its holders, both if the holders are in the bitset and if their numbers are too
// high for it.
func TestExtendForOneHolder(t *testing.T) {
	for _, first := range []kvblock.Worker{0, 4000} {
		x := newIndex(t)
		local, chain := chainOf(1, 40)
		want := map[kvblock.Worker]int{}
		for w := first; w < first+8; w++ {
			mustStore(t, x, w, stores(1000, local, 0, 20))
			want[w] = 20
		}
		device := &x.tiers[kvblock.TierDevice]
		at, _ := device.names.find(&device.arena, 1000)
		for _, longer := range []struct {
			w  kvblock.Worker
			to int
		}{{first + 3, 25}, {first + 3, 30}, {first + 5, 27}, {first + 5, 35}, {first + 3, 36}} {
			mustStore(t, x, longer.w, stores(1000, local, want[longer.w], longer.to))
			want[longer.w] = longer.to
			wantMatches(t, x, chain, want)
			checkTier(t, device)
		}
		if unknown := x.Removed(first+5, removes(1000, 18, 35)); unknown != 0 {
			t.Errorf("%d of the removed blocks are unknown", unknown)
		}
		want[first+5] = 18
		wantMatches(t, x, chain, want)
		checkTier(t, device)
		if now, _ := device.names.find(&device.arena, 1000); now != at {
			t.Errorf("from worker %d on: the run was moved", first)
		}
	}
}

func removes(base kvblock.EngineHash, from, to int) kvblock.Removed {
	e := kvblock.Removed{}
	for i := from; i < to; i++ {
		e.Hashes = append(e.Hashes, base+kvblock.EngineHash(i))
	}
	return e
}

func mustStore(t testing.TB, x *Index, w kvblock.Worker, e kvblock.Stored) {
	t.Helper()
	if err := x.Stored(w, e); err != nil {
		t.Fatal(err)
	}
}

// wantMatches checks the response for a prompt: the number of blocks of each worker.
func wantMatches(t *testing.T, x *Index, chain []kvblock.SequenceHash, device map[kvblock.Worker]int) {
	t.Helper()
	want := map[kvblock.Worker]overlap{}
	for w, n := range device {
		want[w] = overlap{n}
	}
	wantFound(t, x, chain, want)
}

func wantFound(t *testing.T, x *Index, chain []kvblock.SequenceHash, want map[kvblock.Worker]overlap) {
	t.Helper()
	var s OverlapScores
	x.FindMatches(chain, &s)
	if got := scoresOf(t, &s); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

type matches = map[kvblock.Worker]int

func TestLeadingBlocks(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 100)
	wantMatches(t, x, chain, matches{})
	mustStore(t, x, 3, stores(1000, local, 0, 70))
	mustStore(t, x, 5, stores(2000, local, 0, 7))
	wantMatches(t, x, chain, matches{3: 70, 5: 7})
	wantMatches(t, x, chain[:5], matches{3: 5, 5: 5})
	wantMatches(t, x, nil, matches{})
	_, other := chainOf(2, 10)
	wantMatches(t, x, other, matches{})
	wantMatches(t, x, slices.Concat(chain[:9], other), matches{3: 9, 5: 7})
}

// Two workers have different engine hashes for the same blocks, and the events of one do not affect the other. In
// Dynamo's tree the second worker's blocks could not be extended or removed.
func TestEngineHashesArePerWorker(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 6)
	mustStore(t, x, 1, stores(101, local, 0, 3))
	mustStore(t, x, 2, stores(201, local, 0, 3))
	mustStore(t, x, 2, stores(201, local, 3, 6))
	wantMatches(t, x, chain, matches{1: 3, 2: 6})
	if n := x.Removed(2, kvblock.Removed{Hashes: []kvblock.EngineHash{202}}); n != 0 {
		t.Errorf("%d unknown", n)
	}
	if n := x.Removed(1, kvblock.Removed{Hashes: []kvblock.EngineHash{201, 202}}); n != 2 {
		t.Errorf("%d unknown, want 2", n)
	}
	wantMatches(t, x, chain, matches{1: 3, 2: 1})
}

// In Dynamo's tree block 4 would be lost with block 2, and still be lost after block 2 is stored again.
func TestRemovedInTheMiddleAndStoredAgain(t *testing.T) {
	for _, others := range []int{0, 1, 5} {
		x := newIndex(t)
		local, chain := chainOf(1, 40)
		want := matches{}
		for w := range others {
			mustStore(t, x, kvblock.Worker(w+2), stores(5000, local, 0, 40))
			want[kvblock.Worker(w+2)] = 40
		}
		mustStore(t, x, 1, stores(1, local, 0, 40))
		x.Removed(1, removes(1, 17, 19))
		want[1] = 17
		wantMatches(t, x, chain, want)
		mustStore(t, x, 1, stores(1, local, 17, 18))
		want[1] = 18
		wantMatches(t, x, chain, want)
		mustStore(t, x, 1, stores(1, local, 18, 19))
		want[1] = 40
		wantMatches(t, x, chain, want)
	}
}

// Engines announce each physical copy of a block, and the removal of each copy.
func TestCopiesAreCounted(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 5)
	mustStore(t, x, 1, stores(1, local, 0, 5))
	mustStore(t, x, 1, stores(1, local, 3, 5))
	mustStore(t, x, 1, stores(1, local, 4, 5))
	if s := x.Stats(); s.Entries != 5 || s.Blocks != 5 || s.Duplicates != 3 {
		t.Errorf("got %+v", s)
	}
	for _, want := range []int{5, 5, 4} {
		if n := x.Removed(1, removes(1, 4, 5)); n != 0 {
			t.Errorf("%d unknown", n)
		}
		wantMatches(t, x, chain, matches{1: want})
	}
	if n := x.Removed(1, removes(1, 4, 5)); n != 1 {
		t.Errorf("%d unknown, want 1", n)
	}
}

// A block with two engine hashes is held until both are removed.
func TestTwinNames(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 5)
	for base := kvblock.EngineHash(100); base <= 300; base += 100 {
		mustStore(t, x, 1, stores(base, local, 0, 5))
	}
	if s := x.Stats(); s.Entries != 15 || s.Blocks != 5 || x.WorkerEntries(1) != 15 {
		t.Errorf("got %+v", s)
	}
	for i, want := range []int{5, 5, 2} {
		x.Removed(1, removes(kvblock.EngineHash(100*(i+1)), 2, 5))
		wantMatches(t, x, chain, matches{1: want})
	}
}

func TestEngineHashUsedAgain(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 5)
	other, otherChain := chainOf(2, 5)
	mustStore(t, x, 1, stores(1, local, 0, 5))
	mustStore(t, x, 1, stores(3, other, 0, 5)) // engine hashes 3, 4 and 5 named blocks of the first prompt
	wantMatches(t, x, chain, matches{1: 2})
	wantMatches(t, x, otherChain, matches{1: 5})
}

func mustOrphan(t *testing.T, x *Index, w kvblock.Worker, e kvblock.Stored) {
	t.Helper()
	if err := x.Stored(w, e); !errors.Is(err, ErrOrphaned) {
		t.Fatalf("got %v, want %v", err, ErrOrphaned)
	}
}

// Orphans count once their parents are stored, except blocks that were removed meanwhile.
func TestStoresBeforeTheirParents(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 50)
	mustOrphan(t, x, 1, stores(1, local, 30, 50))
	mustOrphan(t, x, 1, stores(1, local, 20, 30))
	mustOrphan(t, x, 2, stores(1, local, 20, 30))
	mustOrphan(t, x, 1, stores(1, local, 10, 20))
	if n := x.Removed(1, removes(1, 40, 41)); n != 0 {
		t.Errorf("%d unknown", n)
	}
	wantMatches(t, x, chain, matches{})
	if s := x.Stats(); s.Entries != 0 || s.OrphanBlocks != 49 || s.Orphaned != 4 {
		t.Errorf("got %+v", s)
	}
	mustStore(t, x, 1, stores(1, local, 0, 10))
	wantMatches(t, x, chain, matches{1: 40}) // another worker's blocks are not parents
	if s := x.Stats(); s.Entries != 49 || s.OrphanBlocks != 10 || s.Joined != 3 {
		t.Errorf("got %+v", s)
	}
	mustStore(t, x, 1, stores(1, local, 40, 41)) // the blocks behind it were still held
	wantMatches(t, x, chain, matches{1: 50})
	x.Cleared(2)
	if s := x.Stats(); s.OrphanBlocks != 0 {
		t.Errorf("got %+v", s)
	}
}

// Orphans are bounded: the oldest are dropped first.
func TestOrphanBounds(t *testing.T) {
	x := newIndex(t)
	long, _ := chainOf(1, maxOrphanBlocks+2)
	if err := x.Stored(1, stores(1, long, 1, maxOrphanBlocks+2)); !errors.Is(err, ErrParentNotFound) {
		t.Errorf("got %v", err)
	}
	const extra = 10
	for id := range uint64(maxOrphans + extra) {
		local, _ := chainOf(id, 3)
		mustOrphan(t, x, 1, stores(kvblock.EngineHash(10*id+1), local, 1, 3))
	}
	if s := x.Stats(); s.OrphanBlocks != 2*maxOrphans || s.ParentNotFound != 1+extra {
		t.Errorf("got %+v", s)
	}
	for id := range uint64(maxOrphans + extra) {
		local, chain := chainOf(id, 3)
		mustStore(t, x, 1, stores(kvblock.EngineHash(10*id+1), local, 0, 1))
		if id < extra {
			wantMatches(t, x, chain, matches{1: 1})
		} else {
			wantMatches(t, x, chain, matches{1: 3})
		}
	}
	if s := x.Stats(); s.OrphanBlocks != 0 || s.Joined != maxOrphans {
		t.Errorf("got %+v", s)
	}
	mustOrphan(t, x, 1, stores(1<<40, long, 1, maxOrphanBlocks+1)) // the maximum number of blocks
	mustOrphan(t, x, 1, stores(1<<50, long, 1, 2))
	if s := x.Stats(); s.OrphanBlocks != 1 {
		t.Errorf("got %+v", s)
	}
}

func inTier(tier kvblock.Tier, e kvblock.Stored) kvblock.Stored {
	e.Tier = tier
	return e
}

// Each tier extends what the tiers above it hold, for each worker. A gap ends the extension.
func TestLowerTiersExtendTheDevice(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 200)
	host := func(e kvblock.Stored) kvblock.Stored { return inTier(kvblock.TierHostPinned, e) }
	disk := func(e kvblock.Stored) kvblock.Stored { return inTier(kvblock.TierDisk, e) }
	external := func(e kvblock.Stored) kvblock.Stored { return inTier(kvblock.TierExternal, e) }
	mustStore(t, x, 1, stores(1, local, 0, 50))
	mustStore(t, x, 1, host(stores(1, local, 0, 90))) // 40 of them behind the device's
	mustStore(t, x, 1, disk(stores(1, local, 90, 100)))
	mustStore(t, x, 1, external(stores(1, local, 100, 101)))
	mustStore(t, x, 2, stores(1, local, 0, 120))
	mustStore(t, x, 2, disk(stores(1, local, 110, 200))) // directly behind the device, without blocks in host memory
	mustStore(t, x, 3, host(stores(1, local, 0, 10)))    // nothing on the device
	mustOrphan(t, x, 4, host(stores(1, local, 10, 20)))
	mustStore(t, x, 5, stores(1, local, 0, 60))
	mustStore(t, x, 5, disk(stores(1, local, 60, 70))) // behind a hole:
	x.Removed(5, removes(1, 30, 31))
	want := map[kvblock.Worker]overlap{1: {50, 40, 10, 1}, 2: {120, 0, 80, 0}, 3: {0, 10, 0, 0}, 5: {30, 0, 0, 0}}
	check := func(chain []kvblock.SequenceHash) {
		t.Helper()
		var s OverlapScores
		for range 2 { // the second time into used memory
			x.FindMatches(chain, &s)
			if got := scoresOf(t, &s); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
	}
	check(chain)
	want = map[kvblock.Worker]overlap{1: {50, 10, 0, 0}, 2: {60, 0, 0, 0}, 3: {0, 10, 0, 0}, 5: {30, 0, 0, 0}}
	check(chain[:60])
	// The blocks in host memory are removed, so those on disk no longer continue the device's.
	x.Removed(1, kvblock.Removed{Tier: kvblock.TierHostPinned, Hashes: removes(1, 60, 61).Hashes})
	want = map[kvblock.Worker]overlap{1: {50, 10, 0, 0}, 2: {120, 0, 80, 0}, 3: {0, 10, 0, 0}, 5: {30, 0, 0, 0}}
	check(chain)
	x.Cleared(1) // in all tiers
	delete(want, 1)
	check(chain)
}

func TestClearedAndForgotten(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 300)
	for w := range kvblock.Worker(3) {
		mustStore(t, x, w, stores(1, local, 0, 300))
		mustStore(t, x, w, stores(1000, local, 0, 10))
	}
	x.Cleared(1)
	x.Forget(2)
	x.Forget(7)
	x.Cleared(7)
	wantMatches(t, x, chain, matches{0: 300})
	if x.WorkerEntries(1) != 0 || x.WorkerEntries(2) != 0 || x.WorkerEntries(7) != 0 {
		t.Error("entries left")
	}
	mustOrphan(t, x, 2, stores(1, local, 10, 20))
	if n := x.Removed(2, removes(1, 0, 4)); n != 4 {
		t.Errorf("%d unknown, want 4", n)
	}
	mustStore(t, x, 2, stores(1, local, 0, 4)) // the next worker with this number
	wantMatches(t, x, chain, matches{0: 300, 2: 4})
}

func TestRefusals(t *testing.T) {
	if _, err := New(Config{MaxBytes: -1}); err == nil {
		t.Error("a negative bound accepted")
	}
	x := newIndex(t)
	local, _ := chainOf(1, 5)
	if err := x.Stored(maxWorkers, stores(1, local, 0, 5)); !errors.Is(err, ErrWorker) {
		t.Errorf("got %v", err)
	}
	if n := x.Removed(maxWorkers, removes(1, 0, 5)); n != 5 {
		t.Errorf("%d unknown, want 5", n)
	}
	x.Cleared(maxWorkers)
	x.Forget(maxWorkers)
	if x.WorkerEntries(maxWorkers) != 0 {
		t.Error("an unknown worker has entries")
	}
	for _, e := range []kvblock.Stored{{}, {HasParent: true, Parent: 7}} {
		if err := x.Stored(1, e); err != nil {
			t.Errorf("an empty store: %v", err)
		}
	}
	if err := x.Stored(1, inTier(9, stores(1, local, 0, 5))); !errors.Is(err, ErrTier) {
		t.Errorf("got %v", err)
	}
	if n := x.Removed(1, kvblock.Removed{Tier: 9, Hashes: []kvblock.EngineHash{1}}); n != 1 {
		t.Errorf("%d unknown, want 1", n)
	}
}

// All representations of holders and candidates (one, list, bitset) and the changes between them, over a prompt of
// several runs.
func TestManyWorkersDropOut(t *testing.T) {
	const n = 400
	local, chain := chainOf(1, n)
	for _, order := range []string{"longest first", "shortest first", "shuffled"} {
		x, o := newIndex(t), newOracle()
		lengths := rand.New(rand.NewPCG(1, 2)).Perm(n)
		switch order {
		case "longest first":
			slices.SortFunc(lengths, func(a, b int) int { return b - a })
		case "shortest first":
			slices.Sort(lengths)
		}
		for w, length := range lengths {
			e := stores(1, local, 0, length+1)
			mustStore(t, x, kvblock.Worker(w), e)
			if err := o.stored(kvblock.Worker(w), e); err != nil {
				t.Fatal(err)
			}
		}
		wantFound(t, x, chain, o.find(chain))
		checkInvariants(t, x, o)
		for w := range lengths { // and in reverse order, with uneven steps
			e := removes(1, w%n, n)
			x.Removed(kvblock.Worker(w), e)
			o.removed(kvblock.Worker(w), 0, e.Hashes)
		}
		wantFound(t, x, chain, o.find(chain))
		checkInvariants(t, x, o)
	}
}

// If the arena is exhausted, the index refuses blocks and may drop some, but counts no block that a worker does not
// hold. All memory is free again when the workers leave.
func TestArenaExhausted(t *testing.T) {
	x, all := newIndex(t), newOracle()
	x.tiers[0].arena.maxPages = 7
	r := rand.New(rand.NewPCG(3, 4))
	refused := 0
	var s OverlapScores
	for step := range 6000 {
		w := kvblock.Worker(r.IntN(60))
		id := uint64(r.IntN(400))
		local, chain := chainOf(id, 100)
		base := kvblock.EngineHash(id*1000 + 1)
		from, to := r.IntN(100), 1+r.IntN(100)
		switch step % 4 {
		case 0, 1:
			e := stores(base, local, 0, to)
			if err := x.Stored(w, e); err != nil {
				if !errors.Is(err, ErrFull) {
					t.Fatal(err)
				}
				refused++
			}
			if err := all.stored(w, e); err != nil {
				t.Fatal(err)
			}
		case 2:
			e := removes(base, min(from, to), to)
			x.Removed(w, e)
			all.removed(w, 0, e.Hashes)
		case 3:
			x.FindMatches(chain, &s)
			most := all.find(chain)
			for w, n := range scoresOf(t, &s) {
				if most := most[w]; n[0] > most[0] {
					t.Fatalf("step %d: worker %d does not hold %d blocks, but %d", step, w, n[0], most[0])
				}
			}
		}
	}
	if refused == 0 {
		t.Error("nothing refused")
	}
	for w := range kvblock.Worker(60) {
		x.Forget(w)
		all.cleared(w)
	}
	if got := x.Stats(); got.Entries != 0 || got.Blocks != 0 {
		t.Errorf("got %+v", got)
	}
	for _, in := range x.tiers[0].arena.info {
		if in.used != 0 {
			t.Errorf("page with %d records", in.used)
		}
	}
	local, chain := chainOf(1, 100)
	mustStore(t, x, 1, stores(1, local, 0, 100))
	wantMatches(t, x, chain, matches{1: 100})
}

// Workers join, store, lose blocks and leave for many rounds. The memory in use does not grow.
func TestMemoryIsReused(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	x := newIndex(t)
	var first, last int
	for round := range 8 {
		for w := range kvblock.Worker(4) {
			for id := range uint64(300) {
				local, _ := chainOf(uint64(round)<<20|id|uint64(w)%2<<16, 100)
				base := kvblock.EngineHash(id<<20 + 1)
				mustStore(t, x, w, stores(base, local, 0, 50))
				for i := 50; i < 100; i++ {
					mustStore(t, x, w, stores(base, local, i, i+1))
				}
				x.Removed(w, removes(base, 30, 31))
				x.Removed(w, removes(base, 80, 100))
			}
		}
		last = x.Stats().Bytes
		if round == 0 {
			first = last
		}
		for w := range kvblock.Worker(4) {
			if round%2 == 0 {
				x.Cleared(w)
			} else {
				x.Forget(w)
			}
		}
		if s := x.Stats(); s.Entries != 0 || s.Blocks != 0 || s.Bytes > first/4 {
			t.Fatalf("round %d: %+v left of %d bytes", round, s, first)
		}
	}
	if last > first*3/2 {
		t.Errorf("%d bytes in the last round, %d in the first", last, first)
	}
}

// bounds are a writer's bounds on the blocks of a prompt that its worker holds: version << 32 | minimum << 16 |
// maximum.
type bounds struct {
	atomic.Uint64
	version uint64 // the writer's
}

func (b *bounds) say(lo, hi int) {
	b.version++
	b.Store(b.version<<32 | uint64(lo)<<16 | uint64(hi))
}

// While writers change the index, each response is between the true counts before and after it. Writers of several
// workers store, remove, clear and leave, on prompts that share beginnings, so that runs move and split during lookups.
func TestReadersBesideWriters(t *testing.T) {
	for _, tier := range []kvblock.Tier{kvblock.TierDevice, kvblock.TierHostPinned} {
		t.Run(tier.String(), func(t *testing.T) { readBesideWriters(t, tier) })
	}
}

func readBesideWriters(t *testing.T, tier kvblock.Tier) {
	const (
		workers = 4
		blocks  = 200
		ops     = 1500
	)
	x := newIndex(t)
	// Prompts 0 and 1 part at block 90.
	local, chain := chainOf(1, blocks)
	other, _ := chainOf(2, blocks)
	copy(other, local[:90])
	otherChain := kvblock.AppendSequenceHashes(nil, other)
	var held [workers]bounds // of the first prompt

	var writers, readers sync.WaitGroup
	var done atomic.Bool
	for w := range kvblock.Worker(workers) {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 5))
			b, n := &held[w], 0
			store := func(e kvblock.Stored) {
				if err := x.Stored(w, inTier(tier, e)); err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
			}
			remove := func(e kvblock.Removed) {
				e.Tier = tier
				if n := x.Removed(w, e); n > 0 {
					t.Errorf("worker %d: %d unknown", w, n)
				}
			}
			for range ops {
				switch op := r.IntN(12); {
				case op < 5 && n < blocks: // grow
					m := min(blocks, n+1+r.IntN(30))
					b.say(n, m)
					store(stores(1, local, n, m))
					b.say(m, m)
					n = m
				case op < 8 && n > 0: // shrink
					m := n - 1 - r.IntN(min(n, 30))
					b.say(m, n)
					remove(removes(1, m, n))
					b.say(m, m)
					n = m
				case op < 10 && n > 1: // a hole, which is then filled
					m := r.IntN(n)
					b.say(m, n)
					remove(removes(1, m, m+1))
					b.say(m, m)
					b.say(m, n)
					store(stores(1, local, m, m+1))
					b.say(n, n)
				case op == 10: // the other prompt, with other engine hashes; the common blocks of the first stay
					b.say(n, max(n, 90))
					store(stores(1000, other, 0, blocks))
					b.say(max(n, 90), max(n, 90))
					b.say(n, max(n, 90))
					remove(removes(1000, 0, blocks))
					b.say(n, n)
				case op == 11:
					b.say(0, n)
					if r.IntN(2) == 0 {
						x.Forget(w)
					} else {
						x.Cleared(w)
					}
					b.say(0, 0)
					n = 0
				}
			}
		})
	}
	var checked, exact atomic.Int64
	for range 2 {
		readers.Go(func() {
			var s OverlapScores
			for !done.Load() {
				var before [workers]uint64
				for w := range before {
					before[w] = held[w].Load()
				}
				x.FindMatches(chain, &s)
				for w := range before {
					after := held[w].Load()
					if after>>32-before[w]>>32 > 1 {
						continue // more than one change: the bounds between them are unknown
					}
					lo := min(before[w]>>16&0xffff, after>>16&0xffff)
					hi := max(before[w]&0xffff, after&0xffff)
					if n := uint64(s.Blocks(kvblock.Worker(w)) + s.Extension(kvblock.Worker(w)).Host); n < lo ||
						n > hi {
						t.Errorf("worker %d: %d blocks, held at least %d, at most %d", w, n, lo, hi)
					}
					checked.Add(1)
					if lo == hi {
						exact.Add(1)
					}
				}
				x.FindMatches(otherChain, &s)
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	if checked.Load() == 0 || exact.Load() == 0 {
		t.Errorf("%d answers checked, %d of them exactly", checked.Load(), exact.Load())
	}
	t.Logf("%d answers checked, %d of them exactly", checked.Load(), exact.Load())
}

// A lookup whose reads are all spoiled takes the lock.
func TestFindMatchesUnderTheLock(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 30)
	mustStore(t, x, 1, stores(1, local, 0, 30))
	tier := &x.tiers[0]
	tier.mu.Lock()
	at, ok := tier.starts.find(&tier.arena, chain[0])
	if !ok {
		t.Fatal("block 0 not found")
	}
	r, _ := tier.runOf(at)
	words := tier.arena.record(r)
	beginWrite(words)
	got := make(chan int)
	go func() {
		var s OverlapScores
		x.FindMatches(chain, &s)
		got <- s.Blocks(1)
	}()
	select {
	case n := <-got:
		t.Errorf("answer %d in the middle of a change", n)
	default:
	}
	endWrite(words, 30)
	tier.mu.Unlock()
	if n := <-got; n != 30 {
		t.Errorf("got %d, want 30", n)
	}
}

func TestFindMatchesDoesNotAllocate(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 200)
	for w := range kvblock.Worker(100) {
		mustStore(t, x, w, stores(1, local, 0, 101+int(w)))
	}
	var s OverlapScores
	x.FindMatches(chain, &s)
	if n := testing.AllocsPerRun(100, func() { x.FindMatches(chain, &s) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
	for w := range kvblock.Worker(50) {
		mustStore(t, x, w, inTier(kvblock.TierHostPinned, stores(1, local, 0, 90+2*int(w))))
		mustStore(t, x, w, inTier(kvblock.TierDisk, stores(1, local, 0, 180)))
	}
	x.FindMatches(chain, &s)
	if n := testing.AllocsPerRun(100, func() { x.FindMatches(chain, &s) }); n != 0 || len(s.extended) == 0 {
		t.Errorf("%v allocations with lower tiers, want none", n)
	}
}

// A run is split where the prompts of workers part, so that they hold all of the part that they share.
func TestCutWhereWorkersPart(t *testing.T) {
	x := newIndex(t)
	tier := &x.tiers[0]
	local, chain := chainOf(1, 50)
	mustStore(t, x, 1, stores(1, local, 0, 50))
	want := matches{1: 50}
	for w := kvblock.Worker(2); w < 10; w++ {
		own, _ := chainOf(uint64(w), 50)
		copy(own, local[:32])
		mustStore(t, x, w, stores(1, local, 0, 32))
		if words := tier.starts.findRun(&tier.arena, chain[0]); length(words[0]) != 50 && int(w) < 2+minEnding {
			t.Errorf("cut to %d blocks before worker %d parts", length(words[0]), w)
		}
		after := stores(kvblock.EngineHash(1000*int(w)), own, 32, 50)
		after.HasParent, after.Parent = true, 1+31
		mustStore(t, x, w, after)
		want[w] = 32
		wantMatches(t, x, chain, want)
	}
	words := tier.starts.findRun(&tier.arena, chain[0])
	if got := length(words[0]); got != 32 {
		t.Errorf("a run of %d blocks, want 32", got)
	}
	var h holders
	if h.open(tier.arena.record(ref(words[1]))); len(h.bits) != 1 || h.full != 9 || h.count() != 9 {
		t.Errorf("%d in the bitset of %d words, %d holders; want 9, 1 and 9", h.full, len(h.bits), h.count())
	}
	if tier.allIndexed.Load() || tier.bySeq.size > 0 {
		t.Error("all blocks are in bySeq")
	}
	checkTier(t, tier)
}

// bySeq has the blocks that must be found by sequence hash: single blocks if a worker has aliases for them, and all
// blocks once a worker may have a parent in another tier.
func TestBlocksBySequenceHash(t *testing.T) {
	for _, c := range []struct {
		what string
		base kvblock.EngineHash // the second worker's engine hash of block 0
		tier kvblock.Tier       // where the second worker has the first blocks
	}{
		{"aliases", 500, kvblock.TierDevice},
		{"lower tier", 1, kvblock.TierDisk},
	} {
		t.Run(c.what, func(t *testing.T) {
			x := newIndex(t)
			tier := &x.tiers[0]
			local, chain := chainOf(1, 100)
			mustStore(t, x, 1, stores(1, local, 0, 100))
			if tier.allIndexed.Load() || tier.bySeq.size > 0 {
				t.Error("bySeq has blocks before it is needed")
			}
			mustStore(t, x, 2, inTier(c.tier, stores(c.base, local, 0, 50)))
			mustStore(t, x, 2, stores(c.base, local, 50, 100)) // on the device, behind a block in the middle of a run
			if tier.allIndexed.Load() != (c.tier != kvblock.TierDevice) || tier.bySeq.size == 0 || tier.blocks != 100 {
				t.Errorf("%d blocks, want 100; allIndexed: %v", tier.blocks, tier.allIndexed.Load())
			}
			if c.tier != kvblock.TierDevice {
				mustStore(t, x, 2, stores(c.base, local, 0, 50))
			}
			wantMatches(t, x, chain, matches{1: 100, 2: 100})
			checkTier(t, tier)
		})
	}
}

// A run's follower stays correct when that run moves. Where prompts part, there is no single follower.
func TestFollowers(t *testing.T) {
	x := newIndex(t)
	tier := &x.tiers[kvblock.TierDevice]
	local, chain := chainOf(1, maxRun+40)
	runAt := func(i int) run {
		t.Helper()
		at, ok := tier.names.find(&tier.arena, kvblock.EngineHash(1000+i))
		if !ok {
			t.Fatalf("no block has the name %d", 1000+i)
		}
		r, _ := tier.runOf(at)
		return r
	}
	mustStore(t, x, 1, stores(1000, local, 0, maxRun+3))
	first, second := runAt(0), runAt(maxRun)
	if got := follower(tier.arena.record(first)[1]); got != second || second == first {
		t.Errorf("run %d is followed by %d, not %d", first, got, second)
	}
	mustStore(t, x, 1, stores(1000, local, maxRun+3, maxRun+40))
	moved := runAt(maxRun)
	if got := follower(tier.arena.record(first)[1]); got != moved || moved == second {
		t.Errorf("run %d is followed by %d, which moved from %d to %d", first, got, second, moved)
	}
	wantMatches(t, x, chain, matches{1: len(chain)})

	other, _ := chainOf(2, 10)
	other = append(slices.Clone(local[:maxRun]), other...)
	mustStore(t, x, 2, stores(1000, other, 0, maxRun))
	e := stores(5000, other, maxRun, len(other))
	e.Parent = 1000 + maxRun - 1
	mustStore(t, x, 2, e)
	if word := tier.arena.record(first)[1]; word&followerBits != manyFollowers {
		t.Errorf("prompts part behind run %d, which is followed by %d", first, follower(word))
	}
	wantMatches(t, x, chain, matches{1: len(chain), 2: maxRun})
	wantMatches(t, x, kvblock.AppendSequenceHashes(nil, other), matches{1: maxRun, 2: len(other)})
	checkTier(t, tier)
}
