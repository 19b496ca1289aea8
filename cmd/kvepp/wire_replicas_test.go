package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/scoring/replica"
	"kvepp/scoring/replica/link"
	"kvepp/test/harness/process"
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

// sharing starts n kvepps in this process whose flags make them replicas of each other.
func sharing(t *testing.T, n int, endpoints string, flags ...string) (all []*served) {
	t.Helper()
	first, err := process.Ports(n)
	if err != nil {
		t.Fatal(err)
	}
	var peers []string
	for i := range n {
		peers = append(peers, fmt.Sprintf("127.0.0.1:%d", first+i))
	}
	for i := range n {
		all = append(all, serveHere(t, endpoints, append([]string{"--bind-address=127.0.0.1",
			fmt.Sprintf("--replica-port=%d", first+i), "--replica-peers=" + strings.Join(peers, ","),
			"--warmup-timeout=10ms"}, flags...)...))
	}
	return all
}

// awaitThat waits for a condition.
func awaitThat(t *testing.T, what string, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := process.Until(ctx, condition); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// TestStaleness: how late copies are is the mean of the live peers by the bookings that came since, and the book leaves
// copies out of the costs when they are too late.
func TestStaleness(t *testing.T) {
	booked := map[uint64]uint64{}
	peers := []replica.Peer{
		{Identity: replica.Identity{Origin: 1}, State: replica.Live, Staleness: 100 * time.Millisecond, Booked: 7},
		{Identity: replica.Identity{Origin: 2}, State: replica.Live, Staleness: 500 * time.Millisecond, Booked: 9},
		{Identity: replica.Identity{Origin: 3}, State: replica.Suspect, Staleness: time.Hour, Booked: 9},
	}
	for _, step := range []struct {
		more [3]uint64
		want time.Duration
	}{
		{[3]uint64{}, 0}, // no peer was known before
		{[3]uint64{}, 300 * time.Millisecond},
		{[3]uint64{3, 1, 50}, 200 * time.Millisecond},
		{[3]uint64{0, 10, 50}, 500 * time.Millisecond},
	} {
		for i := range peers {
			peers[i].Booked += step.more[i]
		}
		if got := staleness(peers, booked).Round(time.Millisecond); got != step.want {
			t.Errorf("after %v bookings the copies are %v late, want %v", step.more, got, step.want)
		}
	}
	s := sharing(t, 1, threeWorkers)[0]
	for _, late := range []time.Duration{300 * time.Millisecond, time.Millisecond} {
		awaitThat(t, "the book to know how late copies are", func() error { // the replica itself tells it now and then
			s.replicas.tellRouter(late)
			if got := s.book.PeersStale(); got != (late > 250*time.Millisecond) {
				return fmt.Errorf("%v late: stale %v", late, got)
			}
			return nil
		})
	}
}

// TestSharedBooksPredict: in approximate mode, a replica assumes that a worker holds what a peer sent there.
func TestSharedBooksPredict(t *testing.T) {
	all := sharing(t, 2, threeWorkers, "--router-kv-events=false")
	next := 0
	awaitThat(t, "a peer's request to be predicted", func() error {
		next += 100
		request := tokensRequest("", tokenIDs(next, 42), "")
		route := all[0].route(request)
		route.Free()
		<-time.After(20 * time.Millisecond)
		e, err := all[1].router.Explain(t.Context(), request)
		if err == nil && (e.Record.Name != route.Name || e.Record.PredictedCachedTokens != 40) {
			err = fmt.Errorf("the peer's request went to %s; this one would go to %s with %d tokens cached", route.Name,
				e.Record.Name, e.Record.PredictedCachedTokens)
		}
		return err
	})
}

// TestSharedBooksHold: a request waits while a peer's request keeps the only worker busy, and goes after its end.
func TestSharedBooksHold(t *testing.T) {
	all := sharing(t, 2, "endpoints:\n- {name: a, address: '10.0.0.1:8000', model: m, blockSize: 4, "+
		"maxNumBatchedTokens: 100}\n", "--router-queue-threshold=0")
	for _, s := range all {
		awaitThat(t, "the replicas to know each other", func() error {
			if n := len(s.replicas.node.Peers()); n != 1 {
				return fmt.Errorf("%d peers", n)
			}
			return nil
		})
	}
	first := all[0].route(tokensRequest("", tokenIDs(1, 400), ""))
	awaitThat(t, "the peer's copy", func() error {
		if all[1].book.Load(0).PrefillTokens == 0 {
			return errors.New("it has no tokens to prefill")
		}
		return nil
	})
	went := make(chan *router.Route, 1)
	go func() {
		r, err := all[1].router.Route(t.Context(), tokensRequest("", tokenIDs(1000, 400), ""))
		if err != nil {
			t.Error(err)
		}
		went <- r
	}()
	awaitThat(t, "the request to wait, and the other replica to hear of it", func() error {
		all[0].replicas.waits.mu.Lock()
		defer all[0].replicas.waits.mu.Unlock()
		for _, w := range all[0].replicas.waits.peers {
			if all[1].router.Waiting("default") == 1 && len(w.Classes) == 1 {
				return nil
			}
		}
		return fmt.Errorf("%d wait; heard of %v", all[1].router.Waiting("default"), all[0].replicas.waits.peers)
	})
	select {
	case <-went:
		t.Error("the request went while the worker was busy")
	default:
	}
	first.MarkPrefillCompleted()
	(<-went).Free()
	first.Free()
}

// TestPeersReleaseWakes: a change that a peer sent wakes a request that waits here, long before the regular look.
func TestPeersReleaseWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pool.New(slog.New(slog.DiscardHandler))
		p.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000", Model: "m", MaxNumBatchedTokens: 100}})
		index, err := indexer.New(indexer.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var o options
		if err := parseServe(&o, []string{"--endpoints=none", "--router-queue-threshold=0"},
			func(string) string { return "" }); err != nil {
			t.Fatal(err)
		}
		m, book := metrics.New(), scoring.NewActiveSequences()
		r := &replicas{pool: p, book: book, sessions: session.NewTable(session.Config{}),
			copies: map[uint64]*scoring.Copies{}}
		to := router.New(router.Config{Scoring: o.scoring, Queue: o.queue.Room(),
			Metrics: m.NewRouter(metrics.Identity{}), Picker: m.NewPicker()}, p, index, book, m,
			slog.New(slog.DiscardHandler))
		r.routedBy(to)
		r.theirs.refresh(p)
		apply := func(e replica.Entry) {
			r.apply(&replica.Effect{Kind: replica.Apply, Origin: 7, Entries: []replica.Entry{e}})
		}
		for number, release := range []func(){
			func() { apply(replica.Entry{Kind: replica.PrefillDone, Number: 1}) },
			func() { apply(replica.Entry{Kind: replica.Freed, Number: 2}) },
			func() { r.apply(&replica.Effect{Kind: replica.FreeAll, Origin: 7}) },
		} {
			apply(replica.Entry{Kind: replica.Booked, Number: uint64(number + 1), Worker: replica.Worker{Name: "a"},
				BlockSize: 16, PrefillTokens: 400})
			went := make(chan *router.Route, 1)
			go func() {
				route, err := to.Route(t.Context(), tokensRequest("", tokenIDs(1, 42), ""))
				if err != nil {
					t.Error(err)
				}
				went <- route
			}()
			<-time.After(1300 * time.Millisecond) // the regular looks are each second
			if n := to.Waiting("default"); n != 1 {
				t.Fatalf("%d requests wait for booking %d of the peer, with a load of %+v", n, number+1, book.Load(0))
			}
			release()
			<-time.After(200 * time.Millisecond)
			if n := to.Waiting("default"); n != 0 {
				t.Errorf("release %d woke none", number)
			}
			(<-went).Free()
		}
	})
}

// TestStoredResponsesAreShared: what a peer tells of stored responses and of sessions goes into the table of each, and
// a peer without either gets both.
func TestStoredResponsesAreShared(t *testing.T) {
	p := pool.New(slog.New(slog.DiscardHandler))
	p.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000"}})
	node := link.New(link.Config{Drain: func(func(*replica.Entry)) time.Duration { return 0 },
		Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(node.Close)
	r := &replicas{pool: p, book: scoring.NewActiveSequences(), node: node,
		sessions: session.NewTable(session.Config{TTL: time.Minute}),
		stored:   session.NewTable(session.Config{TTL: time.Hour}), copies: map[uint64]*scoring.Copies{}}
	r.theirs.refresh(p)
	response, conversation := session.ResponseKeyOf("resp_1"), session.KeyOf("m", "resp_1")
	r.apply(&replica.Effect{Kind: replica.Apply, Origin: 7, Entries: []replica.Entry{
		{Kind: replica.Bound, Key: response, Worker: replica.Worker{Name: "a"}, Version: 1, Writer: 7, TTL: time.Hour},
		{Kind: replica.Bound, Key: conversation, Worker: replica.Worker{Name: "a"}, Version: 1, Writer: 7},
	}})
	for _, c := range []struct {
		table *session.Table
		key   session.Key
	}{{r.stored, response}, {r.sessions, conversation}} {
		if _, known := c.table.Find(c.key); !known || c.table.Active() != 1 {
			t.Errorf("%v, %d are in the table, want one", known, c.table.Active())
		}
	}
	var told []session.Key
	for _, e := range r.snapshotSessions() {
		told = append(told, e.Key)
	}
	if len(told) != 2 || told[0] == told[1] {
		t.Errorf("a snapshot has %x", told)
	}
}
