package session

import (
	"math/rand/v2"
	"testing"
	"time"

	"kvepp/kvblock"
)

// clock is a clock that tests move.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

// shared is one of several tables that share sessions, with the events that it told.
type shared struct {
	*Table
	told []Event
	read []int // by table: how many of its events were applied
}

func newShared(n int, c *clock, cfg Config) []*shared {
	cfg.Clock = c.read
	all := make([]*shared, n)
	for i := range all {
		s := &shared{Table: NewTable(cfg), read: make([]int, n)}
		s.Observe(func(e Event) { s.told = append(s.told, e) })
		all[i] = s
	}
	return all
}

// catchUp applies up to n further events of another table.
func (s *shared) catchUp(all []*shared, of, n int) {
	for ; n > 0 && s.read[of] < len(all[of].told); n-- {
		s.Apply(all[of].told[s.read[of]])
		s.read[of]++
	}
}

func catchUpAll(all []*shared) {
	for i, s := range all {
		for of := range all {
			if of != i {
				s.catchUp(all, of, 1<<30)
			}
		}
	}
}

// use holds a session where it is bound, or binds it to w.
func (s *shared) use(t *testing.T, key Key, w kvblock.Worker) Lease {
	t.Helper()
	was, bound := s.Find(key)
	if bound {
		w = was
	}
	lease, outcome := s.Hold(key, was, bound, w, 0)
	if outcome == "" {
		t.Fatal("not held")
	}
	return lease
}

func wantAt(t *testing.T, s *shared, key Key, want kvblock.Worker) {
	t.Helper()
	if w, bound := s.Find(key); !bound || w != want {
		t.Errorf("bound to %d (%v), want %d", w, bound, want)
	}
}

// Two tables bind a session at once: each may end with the other's binding. The session's next request binds it
// everywhere, whichever table makes it.
func TestTwoThatBindAtOnceAgreeLater(t *testing.T) {
	all := newShared(2, &clock{time.Unix(1, 0)}, Config{TTL: time.Minute})
	key := Key{1}
	first, second := all[0].use(t, key, 1), all[1].use(t, key, 2)
	catchUpAll(all)
	wantAt(t, all[0], key, 2)
	wantAt(t, all[1], key, 1)
	first.Release(false)
	second.Release(false)
	catchUpAll(all)
	all[0].use(t, key, 9)
	catchUpAll(all)
	for _, s := range all {
		wantAt(t, s, key, 2)
	}
	if a, b := all[0].Stats().MovedByPeers, all[1].Stats().MovedByPeers; a != 1 || b != 2 {
		t.Errorf("%d and %d moved", a, b)
	}
	all[1].Hold(key, 2, true, 3, 0)
	catchUpAll(all)
	for _, s := range all {
		wantAt(t, s, key, 3)
	}
}

// A session that another table uses stays alive, also while a request of it runs for longer than the TTL.
func TestAUseElsewhereKeepsASession(t *testing.T) {
	c := &clock{time.Unix(1, 0)}
	all := newShared(3, c, Config{TTL: 4 * time.Second})
	key := Key{1}
	all[0].use(t, key, 1).Release(false)
	for range 10 {
		catchUpAll(all)
		c.now = c.now.Add(3 * time.Second)
		all[2].use(t, key, 9).Release(false)
	}
	lease := all[1].use(t, key, 9)
	for range 10 {
		c.now = c.now.Add(time.Second)
		all[1].Refresh()
		catchUpAll(all)
	}
	for _, s := range all {
		wantAt(t, s, key, 1)
	}
	lease.Release(false)
	catchUpAll(all)
	c.now = c.now.Add(4 * time.Second)
	for i, s := range all {
		if n := s.Active(); n != 0 {
			t.Errorf("table %d still has %d", i, n)
		}
	}
}

// The end of an earlier request does not open a session that ended; a new binding opens it.
func TestAnEndIsNotUndone(t *testing.T) {
	all := newShared(3, &clock{time.Unix(1, 0)}, Config{TTL: time.Minute})
	key := Key{1}
	all[0].use(t, key, 1).Release(false)
	catchUpAll(all)
	late := all[2].use(t, key, 1)
	catchUpAll(all)
	all[0].use(t, key, 1).Release(true)
	late.Release(false) // the others hear of it after the end
	all[1].catchUp(all, 0, 1<<30)
	catchUpAll(all)
	for i, s := range all {
		if _, bound := s.Find(key); bound {
			t.Errorf("table %d still has it", i)
		}
	}
	all[1].use(t, key, 2)
	catchUpAll(all)
	for _, s := range all {
		wantAt(t, s, key, 2)
	}
}

// What a peer tells may be of any kind and age.
func TestStrangeEvents(t *testing.T) {
	c := &clock{time.Unix(1, 0)}
	s := newShared(1, c, Config{TTL: time.Minute})[0]
	for _, e := range []Event{{}, {Kind: Ended + 1}, {Kind: Used}, {Kind: Ended}, {Kind: Bound, Age: time.Hour},
		{Kind: Bound, Age: 1 << 62, TTL: 1 << 62}} {
		s.Apply(e)
	}
	if n := s.Active(); n != 0 {
		t.Errorf("%d sessions", n)
	}
	s.Apply(Event{Kind: Bound, Worker: 3, TTL: -5, Age: -5})
	c.now = c.now.Add(30 * time.Second)
	s.use(t, Key{}, 3).Release(false)
	s.Apply(Event{Kind: Bound, Worker: 4, Age: 10 * time.Second}) // used here since
	wantAt(t, s, Key{}, 3)
}

// A table that joins knows all sessions from one snapshot, also those that the teller adopted, and the time for which
// they were not used. A full table keeps sessions that were used since.
func TestASnapshotOfSessions(t *testing.T) {
	c := &clock{time.Unix(1, 0)}
	all := newShared(2, c, Config{TTL: time.Minute, Max: 3})
	for i := range byte(3) {
		all[i%2].use(t, Key{i}, kvblock.Worker(i)).Release(false)
		c.now = c.now.Add(10 * time.Second)
		catchUpAll(all)
	}
	joiner := newShared(1, c, Config{TTL: time.Minute, Max: 3})[0]
	joiner.use(t, Key{9}, 9).Release(false)
	for _, e := range all[1].Snapshot() {
		joiner.Apply(e)
	}
	if _, bound := joiner.Find(Key{9}); !bound || joiner.Active() != 3 {
		t.Errorf("its own session is kept: %v, %d sessions", bound, joiner.Active())
	}
	wantAt(t, joiner, Key{1}, 1)
	wantAt(t, joiner, Key{2}, 2)
	c.now = c.now.Add(39 * time.Second)
	if _, bound := joiner.Find(Key{1}); !bound {
		t.Error("expired early")
	}
	if c.now = c.now.Add(time.Second); joiner.Active() != 2 {
		t.Errorf("%d sessions, want one expired", joiner.Active())
	}
}

// Three tables use the same few sessions at random, and hear each other late. When all was heard, the next request of a
// session binds it to the same worker everywhere.
func TestSharedSessionsAgree(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 3))
		c := &clock{time.Unix(1, 0)}
		all := newShared(3, c, Config{TTL: time.Hour})
		var leases []Lease
		for range 400 {
			c.now = c.now.Add(time.Millisecond)
			i, key := rng.IntN(3), Key{byte(rng.IntN(5))}
			switch rng.IntN(8) {
			case 0, 1:
				was, bound := all[i].Find(key)
				to := kvblock.Worker(rng.IntN(4))
				if lease, outcome := all[i].Hold(key, was, bound, to, 0); outcome != "" {
					leases = append(leases, lease)
				}
			case 2, 3:
				leases = append(leases, all[i].use(t, key, kvblock.Worker(rng.IntN(4))))
			case 4:
				if len(leases) > 0 {
					leases[0].Release(rng.IntN(8) == 0)
					leases = leases[1:]
				}
			default:
				if of := rng.IntN(3); of != i {
					all[i].catchUp(all, of, 1+rng.IntN(10))
				}
			}
		}
		catchUpAll(all)
		for k := range byte(5) {
			all[rng.IntN(3)].use(t, Key{k}, 1)
			catchUpAll(all)
			w, bound := all[0].Find(Key{k})
			for i, s := range all[1:] {
				if other, also := s.Find(Key{k}); also != bound || other != w {
					t.Fatalf("seed %d: session %d: %d (%v), but at table %d: %d (%v)",
						seed, k, w, bound, i+1, other, also)
				}
			}
		}
	}
}

// Stored responses are shared as sessions are, under keys that no session has; a binding stays where it was made first.
func TestResponsesAreShared(t *testing.T) {
	c := &clock{time.Unix(1, 0)}
	all := newShared(2, c, Config{TTL: time.Minute, Max: 10})
	key := ResponseKeyOf("resp_1")
	if other := KeyOf("m", "resp_1"); !key.IsResponse() || other.IsResponse() || key == ResponseKeyOf("resp_2") {
		t.Error("the keys of responses and sessions are not told apart")
	}
	all[0].Put(key, 1)
	catchUpAll(all)
	all[1].Put(key, 2)
	catchUpAll(all)
	for _, s := range all {
		wantAt(t, s, key, 1)
	}
	if len(all[1].told) != 0 || len(all[0].told) != 1 {
		t.Errorf("%d and %d events", len(all[0].told), len(all[1].told))
	}
	for i := range 100 {
		c.now = c.now.Add(time.Millisecond)
		all[0].Put(ResponseKeyOf(string(rune('a'+i))), 3)
		catchUpAll(all)
	}
	if a, b := all[0].Active(), all[1].Active(); a != 10 || b != 10 {
		t.Errorf("%d and %d responses, want 10", a, b)
	}
	all[1].Forget(3)
	if n := all[1].Active(); n != 0 {
		t.Errorf("%d responses of a worker that left", n)
	}
}
