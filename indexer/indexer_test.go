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

func newIndex(t testing.TB, maxEntries int) *Index {
	t.Helper()
	x, err := New(Config{MaxEntries: maxEntries})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// chainOf is a prompt of its own for every id.
func chainOf(id uint64, n int) (local []kvblock.LocalHash, chain []kvblock.SequenceHash) {
	r := rand.New(rand.NewPCG(id, 7))
	for range n {
		local = append(local, kvblock.LocalHash(r.Uint64()))
	}
	return local, kvblock.AppendSequenceHashes(nil, local)
}

// stores is the store of blocks [from, to) of a prompt under engine hashes base+i.
func stores(base kvblock.EngineHash, local []kvblock.LocalHash, from, to int) kvblock.Stored {
	e := kvblock.Stored{HasParent: from > 0, Parent: base + kvblock.EngineHash(from-1)}
	for i := from; i < to; i++ {
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: base + kvblock.EngineHash(i), Local: local[i]})
	}
	return e
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

// wantMatches checks the answer for a prompt: pairs of worker and blocks.
func wantMatches(t *testing.T, x *Index, chain []kvblock.SequenceHash, want map[kvblock.Worker]int) {
	t.Helper()
	var s OverlapScores
	x.FindMatches(chain, &s)
	if got := scoresOf(t, &s); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

type matches = map[kvblock.Worker]int

func TestLeadingBlocks(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 100)
	wantMatches(t, x, chain, matches{})
	mustStore(t, x, 3, stores(1000, local, 0, 70))
	mustStore(t, x, 5, stores(2000, local, 0, 7))
	wantMatches(t, x, chain, matches{3: 70, 5: 7})
	wantMatches(t, x, chain[:5], matches{3: 5, 5: 5})
	wantMatches(t, x, nil, matches{})
	wantMatches(t, x, chain[1:], matches{3: 69, 5: 6}) // a sequence hash is where it is, whatever came before in the query
	_, other := chainOf(2, 10)
	wantMatches(t, x, other, matches{})
	wantMatches(t, x, slices.Concat(chain[:9], other), matches{3: 9, 5: 7})
}

// Two workers call the same blocks by different names, and neither's events touch the other. In Dynamo's tree the second
// worker's blocks could not be extended or removed.
func TestEngineHashesArePerWorker(t *testing.T) {
	x := newIndex(t, 0)
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

// In Dynamo's tree block 4 would be lost with block 2, and stay lost when 2 comes back.
func TestRemovedInTheMiddleAndStoredAgain(t *testing.T) {
	for _, others := range []int{0, 1, 5} {
		x := newIndex(t, 0)
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

// A store repeated is one store, as an engine that reports everything again means it.
func TestStoredTwiceRemovedOnce(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 5)
	mustStore(t, x, 1, stores(1, local, 0, 5))
	mustStore(t, x, 1, stores(1, local, 0, 5))
	if s := x.Stats(); s.Entries != 5 || s.Blocks != 5 {
		t.Errorf("got %+v", s)
	}
	x.Removed(1, removes(1, 4, 5))
	wantMatches(t, x, chain, matches{1: 4})
}

// Two names of one block, as of two physical copies, keep it until both are gone.
func TestTwinNames(t *testing.T) {
	x := newIndex(t, 0)
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
	x := newIndex(t, 0)
	local, chain := chainOf(1, 5)
	other, otherChain := chainOf(2, 5)
	mustStore(t, x, 1, stores(1, local, 0, 5))
	mustStore(t, x, 1, stores(3, other, 0, 5)) // 3, 4, 5 named blocks of the first prompt
	wantMatches(t, x, chain, matches{1: 2})
	wantMatches(t, x, otherChain, matches{1: 5})
}

func TestParentNotFound(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 5)
	mustStore(t, x, 1, stores(1, local, 0, 3))
	for _, w := range []kvblock.Worker{1, 2} {
		if err := x.Stored(w, stores(500, local, 3, 5)); !errors.Is(err, ErrParentNotFound) {
			t.Errorf("worker %d: got %v", w, err)
		}
	}
	wantMatches(t, x, chain, matches{1: 3})
	if s := x.Stats(); s.ParentNotFound != 2 || s.Entries != 3 {
		t.Errorf("got %+v", s)
	}
}

func TestLowerTiersAreNoDeviceBlocks(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 5)
	e := stores(1, local, 0, 5)
	e.Tier = kvblock.TierHostPinned
	if err := x.Stored(1, e); !errors.Is(err, ErrTier) {
		t.Errorf("got %v", err)
	}
	wantMatches(t, x, chain, matches{})
	e.Tier = kvblock.TierDevice
	mustStore(t, x, 1, e)
	if n := x.Removed(1, kvblock.Removed{Hashes: []kvblock.EngineHash{1, 99}, Tier: kvblock.TierDisk}); n != 0 {
		t.Errorf("%d unknown", n)
	}
	wantMatches(t, x, chain, matches{1: 5})
	if s := x.Stats(); s.LowerTier != 2 || s.UnknownRemoved != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestClearedAndForgotten(t *testing.T) {
	x := newIndex(t, 0)
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
	if err := x.Stored(2, stores(1, local, 10, 20)); !errors.Is(err, ErrParentNotFound) {
		t.Errorf("got %v", err)
	}
	if n := x.Removed(2, removes(1, 0, 4)); n != 4 {
		t.Errorf("%d unknown, want 4", n)
	}
	mustStore(t, x, 2, stores(1, local, 0, 4)) // the number's next holder
	wantMatches(t, x, chain, matches{0: 300, 2: 4})
}

func TestFull(t *testing.T) {
	x := newIndex(t, 10)
	local, chain := chainOf(1, 20)
	mustStore(t, x, 1, stores(1, local, 0, 7))
	if err := x.Stored(2, stores(1, local, 0, 7)); !errors.Is(err, ErrFull) {
		t.Errorf("got %v", err)
	}
	wantMatches(t, x, chain, matches{1: 7, 2: 3})
	mustStore(t, x, 1, stores(1, local, 0, 7)) // nothing new
	if s := x.Stats(); s.Entries != 10 || s.Refused != 4 {
		t.Errorf("got %+v", s)
	}
	x.Removed(1, removes(1, 5, 7))
	mustStore(t, x, 2, stores(1, local, 3, 5))
	wantMatches(t, x, chain, matches{1: 5, 2: 5})
}

func TestRefusals(t *testing.T) {
	for _, n := range []int{-1, 1<<28 + 1} {
		if _, err := New(Config{MaxEntries: n}); err == nil {
			t.Errorf("MaxEntries %d accepted", n)
		}
	}
	x := newIndex(t, 0)
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
		t.Error("entries of nobody")
	}
	if err := x.Stored(1, kvblock.Stored{}); err != nil {
		t.Errorf("an empty store: %v", err)
	}
}

// Every form that holders and candidates can take: one, a list, a bitset, and all steps between, over a prompt long enough
// for several runs.
func TestManyWorkersDropOut(t *testing.T) {
	const n = 400
	local, chain := chainOf(1, n)
	for _, order := range []string{"longest first", "shortest first", "shuffled"} {
		x, o := newIndex(t, 0), newOracle(1<<30)
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
		wantMatches(t, x, chain, o.find(chain))
		checkInvariants(t, x, o)
		for w := range lengths { // and from the end again, unevenly
			e := removes(1, w%n, n)
			x.Removed(kvblock.Worker(w), e)
			o.removed(kvblock.Worker(w), e.Hashes)
		}
		wantMatches(t, x, chain, o.find(chain))
		checkInvariants(t, x, o)
	}
}

// With no memory left the index refuses blocks and may forget some, but claims nothing that is not so; and everything comes
// back when the workers leave.
func TestArenaExhausted(t *testing.T) {
	x, all := newIndex(t, 0), newOracle(1<<30)
	x.arena.maxPages = 9
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
			all.removed(w, e.Hashes)
		case 3:
			x.FindMatches(chain, &s)
			for w, n := range scoresOf(t, &s) {
				held := map[kvblock.SequenceHash]bool{}
				for _, seq := range all.names[w] {
					held[seq] = true
				}
				for i := range n {
					if !held[chain[i]] {
						t.Fatalf("step %d: worker %d does not hold block %d of %d", step, w, i, n)
					}
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
	for _, in := range x.arena.info {
		if in.used != 0 {
			t.Errorf("page with %d records", in.used)
		}
	}
	local, chain := chainOf(1, 100)
	mustStore(t, x, 1, stores(1, local, 0, 100))
	wantMatches(t, x, chain, matches{1: 100})
}

// Workers come, fill up, lose blocks and leave, for many rounds; memory is that of one round.
func TestMemoryComesBack(t *testing.T) {
	x := newIndex(t, 0)
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

// bounds is what a writer says about how much of a prompt its worker holds: version << 32 | at least << 16 | at most.
type bounds struct {
	atomic.Uint64
	version uint64 // the writer's
}

func (b *bounds) say(lo, hi int) {
	b.version++
	b.Store(b.version<<32 | uint64(lo)<<16 | uint64(hi))
}

// Readers beside writers get answers that lie between what was true before and after. Writers of several workers store,
// remove, clear and leave on prompts that share beginnings, so that runs move and split under the readers.
func TestReadersBesideWriters(t *testing.T) {
	const (
		workers = 4
		blocks  = 200
		ops     = 1500
	)
	x := newIndex(t, 0)
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
				if err := x.Stored(w, e); err != nil {
					t.Errorf("worker %d: %v", w, err)
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
					x.Removed(w, removes(1, m, n))
					b.say(m, m)
					n = m
				case op < 10 && n > 1: // a hole, and filled again
					m := r.IntN(n)
					b.say(m, n)
					x.Removed(w, removes(1, m, m+1))
					b.say(m, m)
					b.say(m, n)
					store(stores(1, local, m, m+1))
					b.say(n, n)
				case op == 10: // the other prompt, under other names; the first is held as far as they agree
					b.say(n, max(n, 90))
					store(stores(1000, other, 0, blocks))
					b.say(max(n, 90), max(n, 90))
					b.say(n, max(n, 90))
					x.Removed(w, removes(1000, 0, blocks))
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
						continue // more than one change: what was said in between is not known here
					}
					lo := min(before[w]>>16&0xffff, after>>16&0xffff)
					hi := max(before[w]&0xffff, after&0xffff)
					if n := uint64(s.Blocks(kvblock.Worker(w))); n < lo || n > hi {
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

// A reader that meets nothing but changes ends up asking under the lock.
func TestFindMatchesUnderTheLock(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 30)
	mustStore(t, x, 1, stores(1, local, 0, 30))
	x.mu.Lock()
	at, ok := x.table.find(&x.arena, chain[0])
	if !ok {
		t.Fatal("block 0 not found")
	}
	r, _ := x.runOf(at)
	words := x.arena.record(r)
	begin(words)
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
	end(words, 30)
	x.mu.Unlock()
	if n := <-got; n != 30 {
		t.Errorf("got %d, want 30", n)
	}
}

func TestFindMatchesDoesNotAllocate(t *testing.T) {
	x := newIndex(t, 0)
	local, chain := chainOf(1, 200)
	for w := range kvblock.Worker(100) {
		mustStore(t, x, w, stores(1, local, 0, 101+int(w)))
	}
	var s OverlapScores
	x.FindMatches(chain, &s)
	if n := testing.AllocsPerRun(100, func() { x.FindMatches(chain, &s) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
