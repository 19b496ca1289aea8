package main

import (
	"log/slog"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/replica"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/session"
)

// TestApplyEntries: a peer's entries, as a snapshot and as the log have them, give its bookings the load that they have
// at the peer: with generated blocks, their weight, and the end of a prefill.
func TestApplyEntries(t *testing.T) {
	p := pool.New(slog.New(slog.DiscardHandler))
	p.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000"}})
	r := &replicas{pool: p, book: scoring.NewActiveSequences(), sessions: session.NewTable(session.Config{}),
		copies: map[uint64]*scoring.Copies{}}
	r.theirs.refresh(p)
	chain := []kvblock.SequenceHash{1, 2, 3}
	worker := replica.Worker{Name: "a"}
	r.apply(&replica.Effect{Kind: replica.Apply, Origin: 7, Entries: []replica.Entry{
		{Kind: replica.Booked, Number: 1, Worker: worker, BlockSize: 16, PrefillTokens: 48, Blocks: 1,
			Chains: [][]kvblock.SequenceHash{chain}, Age: time.Second},
		{Kind: replica.PrefillDone, Number: 1},
		{Kind: replica.Output, Number: 1, Blocks: 6, Left: scoring.NotKnown},
		{Kind: replica.Booked, Number: 2, Worker: worker, BlockSize: 16, PrefillTokens: 32, Blocks: 2},
		{Kind: replica.Booked, Number: 3, Worker: replica.Worker{Name: "unknown"}, BlockSize: 16},
		{Kind: replica.Freed, Number: 3},
	}})
	want := scoring.Load{Requests: 2, PrefillTokens: 32, ActiveBlocks: 3 + 1 + 6 + 2, ActiveTokens: 12 * 16}
	number := r.theirs.byName[worker]
	if got := r.book.Load(number); got != want {
		t.Errorf("the load is %+v, want %+v", got, want)
	}
	want.ActiveBlocks, want.ActiveTokens = 6, 6*16 // the peers' part has no generated blocks
	if got := r.book.CopiedLoads(nil)[number]; got != want {
		t.Errorf("the copies bring %+v, want %+v", got, want)
	}
	r.apply(&replica.Effect{Kind: replica.FreeAll, Origin: 7})
	if got := r.book.CopiedLoads(nil)[number]; got != (scoring.Load{}) || len(r.copies) != 0 {
		t.Errorf("after its death the peer's copies bring %+v", got)
	}
}

// TestWaitsOfPeers: what peers tell of their queues reaches the router by their order, with their ages, as long as it
// holds. A peer of an older version tells no classes.
func TestWaitsOfPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		r := &replicas{waits: waits{own: router.Waits{Since: began}}, sessions: session.NewTable(session.Config{}),
			book: scoring.NewActiveSequences(), copies: map[uint64]*scoring.Copies{}}
		tell := func(origin uint64, e replica.Entry) {
			e.Kind = replica.Waits
			r.apply(&replica.Effect{Kind: replica.Apply, Origin: origin, Entries: []replica.Entry{e}})
		}
		classes := []replica.ClassWait{{Class: 5, Quantum: 10, Cost: 20, Age: time.Second}}
		tell(1, replica.Entry{Blocks: 3, Age: 2 * time.Second, Classes: classes})
		classes[0] = replica.ClassWait{} // its memory is used again
		tell(3, replica.Entry{Blocks: 1, Age: 4 * time.Second})
		check := func(when string, first, third router.Waits) {
			t.Helper()
			want := []router.Waits{first, {Since: began}, third}
			if got := r.waits.of([]uint64{1, 2, 3}, 1); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v, want %+v", when, got, want)
			}
		}
		one := router.Waits{Since: began.Add(-2 * time.Second), Classes: []router.ClassWait{{Class: 5,
			Since: began.Add(-time.Second), Quantum: 10, Cost: 20}}}
		three := router.Waits{Since: began.Add(-4 * time.Second)}
		check("told", one, three)
		tell(3, replica.Entry{})
		check("none waits at the third", one, router.Waits{})
		<-time.After(waitsHold)
		check("too long ago", router.Waits{}, router.Waits{})
		tell(1, replica.Entry{Blocks: 3, Age: waitsHold + 2*time.Second,
			Classes: []replica.ClassWait{{Class: 5, Quantum: 10, Cost: 20, Age: waitsHold + time.Second}}})
		check("told again", one, router.Waits{})
		r.apply(&replica.Effect{Kind: replica.FreeAll, Origin: 1})
		check("its replica died", router.Waits{}, router.Waits{})
	})
}
