package scoring

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"kvepp/kvblock"
)

// clone returns a change that outlives its call.
func clone(ch *Change) Change {
	c := *ch
	c.Chains = nil
	for _, chain := range ch.Chains {
		c.Chains = append(c.Chains, slices.Clone(chain))
	}
	return c
}

// replica is a book of one of several replicas, with the log of its changes and copies of the others' bookings.
type replica struct {
	book   *ActiveSequences
	mu     sync.Mutex // guards log
	log    []Change
	copies []*Copies // by replica; nil: its own
	read   []int     // by replica: how much of its log was applied
}

func newReplicas(n int) []*replica {
	all := make([]*replica, n)
	for i := range all {
		r := &replica{book: NewActiveSequences(), copies: make([]*Copies, n), read: make([]int, n)}
		r.book.Observe(func(ch *Change) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.log = append(r.log, clone(ch))
		})
		for j := range n {
			if j != i {
				r.copies[j] = r.book.NewCopies()
			}
		}
		all[i] = r
	}
	return all
}

// catchUp applies up to n further changes of another replica's log.
func (r *replica) catchUp(t *testing.T, all []*replica, of, n int) {
	t.Helper()
	all[of].mu.Lock()
	log := all[of].log[r.read[of]:]
	all[of].mu.Unlock()
	log = log[:min(n, len(log))]
	r.copies[of].Apply(slices.Clone(log))
	r.read[of] += len(log)
}

// rejoin takes a snapshot of another replica in place of the rest of its log.
func (r *replica) rejoin(all []*replica, of int) {
	c := r.copies[of]
	c.BeginSnapshot()
	all[of].mu.Lock()
	r.read[of] = len(all[of].log)
	all[of].mu.Unlock()
	for place, more := 0, true; more; {
		var state []Change
		place, more = all[of].book.Snapshot(place, func(ch *Change) bool {
			state = append(state, clone(ch))
			return len(state) < 5
		})
		c.Apply(state)
	}
	c.EndSnapshot()
}

// twin is a booking of a replica, and the same one made locally in a book that has all of them.
type twin struct {
	mine, local Booking
	of          int
	worker      kvblock.Worker
	size        int
}

// Replicas book, change and end requests at random, and apply each other's changes late, or from a snapshot. Whenever
// all have caught up, each has the loads of one book in which all requests were booked locally.
func TestCopiesEqualLocalBookings(t *testing.T) {
	for seed := range uint64(16) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { copiesHistory(t, rand.New(rand.NewPCG(seed, 5))) })
	}
}

func copiesHistory(t *testing.T, rng *rand.Rand) {
	atOnce := rng.IntN(2) == 0
	all, local := newReplicas(3), NewActiveSequences()
	var active []*twin
	catchUp := func() {
		for i, r := range all {
			for of := range all {
				if of != i {
					r.catchUp(t, all, of, 1<<30)
				}
			}
		}
	}
	compare := func(step int) {
		catchUp()
		want := local.Loads(nil)
		for i, r := range all {
			for w := range want {
				if got := r.book.Load(kvblock.Worker(w)); got != want[w] {
					t.Fatalf("step %d: replica %d: worker %d carries %+v, want %+v", step, i, w, got, want[w])
				}
			}
		}
	}
	for step := range 500 {
		switch op := rng.IntN(24); {
		case op < 8:
			x := &twin{of: rng.IntN(len(all)), worker: kvblock.Worker(rng.IntN(4)), size: 4}
			cfg := defaults()
			cfg.AssumeKVReuse = rng.IntN(4) > 0
			cfg.TrackPrefillTokens = rng.IntN(4) > 0
			c := Candidate{Worker: x.worker, DeviceBlocks: rng.IntN(5)}
			if rng.IntN(5) > 0 {
				c.Prompt = &Prompt{BlockSize: x.size, Chains: randomPaths(rng).hashes(x.size)}
			}
			req := Request{ISLTokens: rng.IntN(200)}
			var err, localErr error
			x.mine, err = all[x.of].book.AddRequest(req, c, cfg)
			x.local, localErr = local.AddRequest(req, c, cfg)
			if err != nil || localErr != nil {
				t.Fatal(err, localErr)
			}
			active = append(active, x)
		case len(active) == 0:
		case op < 18:
			i := rng.IntN(len(active))
			x := active[i]
			switch {
			case op < 10:
				x.mine.MarkPrefillCompleted()
				x.local.MarkPrefillCompleted()
			case op < 11:
				x.mine.ReleasePrefill()
				x.local.ReleasePrefill()
			case op < 13:
				x.worker = kvblock.Worker(rng.IntN(4))
				size := []int{x.size, x.size, 8}[rng.IntN(3)]
				x.mine.MoveTo(x.worker, size)
				x.local.MoveTo(x.worker, size)
			default:
				x.mine.Free()
				x.local.Free()
				active = slices.Delete(active, i, i+1)
			}
		case op < 19 && rng.IntN(4) == 0: // a worker leaves, and replicas learn it one after the other
			w := kvblock.Worker(rng.IntN(4))
			catchUp() // then the number may be reused
			local.Forget(w)
			for _, r := range all {
				r.book.Forget(w)
			}
			active = slices.DeleteFunc(active, func(x *twin) bool { return x.worker == w })
		case op < 22 && !atOnce:
			i, of := rng.IntN(len(all)), rng.IntN(len(all))
			if i != of && rng.IntN(4) == 0 {
				all[i].rejoin(all, of)
			} else if i != of {
				all[i].catchUp(t, all, of, rng.IntN(20))
			}
		}
		if atOnce {
			compare(step)
		}
	}
	compare(-1)
	endCopies(t, all, active)
}

// endCopies ends all bookings: half of the replicas' by the death of their owners, the others by their logs.
func endCopies(t *testing.T, all []*replica, active []*twin) {
	t.Helper()
	for i, r := range all {
		own, dead := 0, (i+1)%len(all)
		for _, x := range active {
			if x.of == i {
				own++
			}
		}
		if n := r.book.Len(); n != own {
			t.Errorf("replica %d has %d own bookings, want %d", i, n, own)
		}
		n := r.copies[dead].Len()
		if freed := r.copies[dead].FreeAll(); freed != n || r.copies[dead].Len() != 0 {
			t.Errorf("freed %d of %d copies, %d are left", freed, n, r.copies[dead].Len())
		}
	}
	for _, x := range active {
		x.mine.Free()
	}
	for i, r := range all {
		for of := range all {
			if of != i {
				r.catchUp(t, all, of, 1<<30)
			}
		}
		wantEmpty(t, r.book)
		wantNoCopies(t, r.book)
	}
}

func wantNoCopies(t *testing.T, a *ActiveSequences) {
	t.Helper()
	for w := range a.copied {
		if load := a.copied[w]; load != (copiedLoad{}) {
			t.Errorf("worker %d: copies still bring %+v", w, load)
		}
	}
	if a.copies != 0 {
		t.Errorf("%d copies are left", a.copies)
	}
}

// A snapshot is taken while the owner's book changes: with the changes since its beginning it is the present state.
func TestSnapshotWhileTheBookChanges(t *testing.T) {
	all := newReplicas(2)
	owner, reader := all[0], all[1]
	var changing sync.WaitGroup
	started := make(chan struct{})
	var last []Booking
	changing.Go(func() {
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range 3000 {
			if len(last) > 300 {
				n := rng.IntN(len(last))
				last[n].MoveTo(kvblock.Worker(rng.IntN(4)), 4)
				n = rng.IntN(len(last))
				last[n].MarkPrefillCompleted()
				last[n].Free()
				last = slices.Delete(last, n, n+1)
			}
			c := Candidate{Worker: kvblock.Worker(rng.IntN(4)),
				Prompt: &Prompt{BlockSize: 4, Chains: randomPaths(rng).hashes(4)}}
			last = append(last, mustAdd(t, owner.book, Request{ISLTokens: 1 + rng.IntN(100)}, c))
			if i == 400 {
				close(started)
			}
		}
	})
	<-started
	for range 8 {
		reader.rejoin(all, 0)
	}
	changing.Wait()
	reader.catchUp(t, all, 0, 1<<30)
	if got, want := reader.book.Loads(nil), owner.book.Loads(nil); !slices.Equal(got, want) {
		t.Errorf("loads are %+v, want %+v", got, want)
	}
	if n := reader.copies[0].Len(); n != len(last) {
		t.Errorf("%d copies, want %d", n, len(last))
	}
}

// What a peer says out of range changes nothing. Beyond the bound of blocks, copies keep only numbers.
func TestCopiesAreBounded(t *testing.T) {
	a := NewActiveSequences()
	c := a.NewCopies()
	good := Change{Kind: Booked, Number: 1, BlockSize: 16, PrefillTokens: 20,
		Chains: [][]kvblock.SequenceHash{chain(1, 3)}}
	bad := []Change{{}, {Kind: 99, Number: 1}, {Kind: Freed, Number: 2}}
	for _, change := range []func(*Change){
		func(ch *Change) { ch.Worker = MaxWorkers },
		func(ch *Change) { ch.BlockSize = 0 },
		func(ch *Change) { ch.BlockSize = MaxBlockSize + 1 },
		func(ch *Change) { ch.PrefillTokens = -1 },
		func(ch *Change) { ch.PrefillTokens = MaxISLTokens + 1 },
		func(ch *Change) { ch.Blocks = -1 },
		func(ch *Change) { ch.Blocks = maxCopiedTokens },
	} {
		ch := good
		change(&ch)
		bad = append(bad, ch)
	}
	had := func(changes []Change) (applied int) {
		c.Apply(changes)
		for _, ch := range changes {
			if ch.Kind != 0 {
				applied++
			}
		}
		return applied
	}
	if n := had(bad); n != 0 {
		t.Errorf("%d applied", n)
	}
	version := a.version
	if n := had([]Change{good, good}); n != 2 || c.Len() != 1 || a.version == version {
		t.Errorf("%d applied, version %d after %d", n, a.version, version)
	}
	a.origins = MaxCopies / 2 // two copies and 2 KiB of each
	flat := good
	flat.Number, flat.Age, flat.Chains = 2, -time.Hour, [][]kvblock.SequenceHash{chain(1, 200)}
	added, limited := c.Apply([]Change{flat, flat})
	if added != 1 || limited != 2 || a.Load(0).ActiveBlocks != 203 || len(a.bookings[2].leaves) != 0 {
		t.Errorf("%d added, %d limited, %+v", added, limited, a.Load(0))
	}
	flat.Number = 3
	if added, limited := c.Apply([]Change{flat}); added != 0 || limited != 1 || c.Len() != 2 {
		t.Error("copied beyond the bound")
	}
	if c.FreeAll(); c.bytes != 0 {
		t.Errorf("%d bytes are left", c.bytes)
	}
	wantEmpty(t, a)
	wantNoCopies(t, a)
}
