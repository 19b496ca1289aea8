package feed

import (
	"errors"
	"io"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// seeded returns a fixture whose only worker has two blocks from a dump at that position, and whose own events are on
// hold.
func seeded(t *testing.T, e *engine, at Position) *fixture {
	t.Helper()
	h := newFixture(t, io.Discard)
	h.Hold()
	h.update(e, 4)
	h.connected(1)
	for _, s := range []kvblock.Stored{
		{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: local(1, 2, 3, 4)}}},
		{HasParent: true, Parent: 1, Blocks: []kvblock.StoredBlock{{Engine: 2, Local: local(5, 6, 7, 8)}}},
	} {
		if err := h.Seed(h.worker(), at, s); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func local(tokens ...kvblock.Token) kvblock.LocalHash {
	return kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: len(tokens)})[0]
}

func (h *fixture) worker() kvblock.Worker {
	s := h.pool.Acquire()
	defer s.Release()
	return s.Workers[0].Worker
}

// TestSeed applies events after a dump. The publisher's batches have the timestamp 1.5.
func TestSeed(t *testing.T) {
	both := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8}
	all := append(both, 9, 9, 9, 9)
	for _, c := range []struct {
		name  string
		at    Position
		first uint64 // number of the first message that arrives
		// Matching blocks after three messages: one stores [2] again, one removes it, one stores [3] after it.
		want int
	}{
		{"the dump includes the first two messages", Position{Known: true, Next: 7, Timestamp: 1.5}, 5, 3},
		{"the dump includes no message: [2] was stored twice and removed once",
			Position{Known: true, Next: 5, Timestamp: 1.5}, 5, 3},
		{"a message is missing between", Position{Known: true, Next: 4, Timestamp: 1.5}, 5, 0},
		{"another process sent the messages", Position{Known: true, Next: 7, Timestamp: 1.25}, 5, 0},
		{"the dump has no position", Position{}, 5, 1},
		{"the dump has no position, and the messages begin with the first one", Position{}, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, 0)
			h := seeded(t, e, c.at)
			if got := h.match(4, both...); got != 2 {
				t.Fatalf("%d blocks from the dump, want 2", got)
			}
			e.seq = c.first
			eventually(t, "the subscription", func() bool { return e.subscribed() })
			e.publish(0, stored(2, uint64(1), 4, 5, 6, 7, 8))
			e.publish(0, removed(2))
			e.publish(0, stored(3, uint64(2), 4, 9, 9, 9, 9))
			h.Release()
			e.publish(0, stored(100, nil, 4, 100, 100, 100, 100)) // the end
			eventually(t, "the last message", func() bool { return h.match(4, 100, 100, 100, 100) == 1 })
			if got := h.match(4, all...); got != c.want {
				t.Errorf("%d blocks, want %d", got, c.want)
			}
			var at Position
			h.Dump(h.worker(), func(from *Source, _ kvblock.Stored) bool { at = from.Position; return true })
			if want := (Position{Known: true, Next: c.first + 4, Timestamp: 1.5}); at != want {
				t.Errorf("position %+v, want %+v", at, want)
			}
		})
	}
}

// A dump of a hybrid model has its layer groups and the blocks of its classes: what the next replica predicts, and what
// later removals do to it, is what the first one would.
func TestSeedOfAHybrid(t *testing.T) {
	of := func(group int, kind string, window any, hashes ...any) []any {
		return []any{"BlockStored", hashes, nil, anys([]int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}), 4, nil, "GPU", nil,
			nil, group, kind, window, nil}
	}
	prompt := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	first, e := newFixture(t, io.Discard), newEngine(t, 0)
	first.update(e, 4)
	first.connected(1)
	eventually(t, "the blocks", func() bool {
		e.publish(0, []any{"AllBlocksCleared"}, of(0, "sliding_window", 5, 102, 103),
			of(1, "sliding_window", 5, 102, 103), of(2, "full_attention", nil, 101, 102, 103))
		return first.match(4, prompt...) == 3
	})
	for _, c := range []struct {
		name     string
		complete bool
		want     int // blocks after a removal by group 1
	}{{"complete", true, 2}, {"incomplete", false, 3}} {
		t.Run(c.name, func(t *testing.T) {
			h, own := newFixture(t, io.Discard), newEngine(t, 0)
			h.Hold()
			h.update(own, 0)
			h.connected(1)
			stores := 0
			first.Dump(first.worker(), func(from *Source, s kvblock.Stored) bool {
				if !from.Complete || len(from.Groups) != 3 || !from.Position.Known {
					t.Errorf("%+v", from)
				}
				if stores++; stores == 1 {
					if err := h.SeedGroups(h.worker(), from.Groups, 4, c.complete); err != nil {
						t.Error(err)
					}
					own.seq = from.Position.Next
				}
				err := h.Seed(h.worker(), from.Position, s)
				if wrong := s.Tier > kvblock.TierExternal && !c.complete; (err != nil) != wrong {
					t.Errorf("%+v: %v", s, err)
				}
				return true
			})
			h.Release()
			if got := h.match(4, prompt...); got != 3 {
				t.Errorf("%d blocks from the dump, want 3", got)
			}
			eventually(t, "the subscription", func() bool { return own.subscribed() })
			own.publish(0, append(removed(103), 1))
			own.publish(0, of(2, "full_attention", nil, 201)) // the end: group 2 is known
			h.applied(own)
			if got := h.match(4, prompt...); got != c.want {
				t.Errorf("%d blocks after a removal, want %d", got, c.want)
			}
			s := h.pool.Acquire()
			defer s.Release()
			if w := s.Workers[0]; w.Classes == nil || w.Classes.Len() != 1 {
				t.Errorf("classes %v", w.Classes)
			}
		})
	}
}

// TestSeedIsRefused if no events would correct the dump.
func TestSeedIsRefused(t *testing.T) {
	store := kvblock.Stored{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: local(1, 2, 3, 4)}}}
	h := newFixture(t, io.Discard)
	h.Hold()
	if err := h.Seed(5, Position{}, store); !errors.Is(err, ErrNotSubscribed) {
		t.Errorf("unknown worker: error %v, want ErrNotSubscribed", err)
	}
	h.pool.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000", KVEvents: "tcp://127.0.0.1:9", BlockSize: 4}})
	if err := h.Seed(h.worker(), Position{}, store); !errors.Is(err, ErrNotSubscribed) {
		t.Errorf("worker that is not connected: error %v, want ErrNotSubscribed", err)
	}
	h.Release()
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	eventually(
		t,
		"a first store",
		func() bool { e.publish(0, stored(9, nil, 4, 9, 9, 9, 9)); return h.match(4, 9, 9, 9, 9) == 1 },
	)
	if err := h.Seed(h.worker(), Position{}, store); !errors.Is(err, ErrBegun) {
		t.Errorf("worker whose own events came: error %v, want ErrBegun", err)
	}
}

// The end of the connection clears the seed: the next connection may be to another process.
func TestSeedEndsWithItsConnection(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{Known: true, Next: 7, Timestamp: 1.5})
	e.socket.Close()
	eventually(t, "no block", func() bool { return h.match(4, 1, 2, 3, 4) == 0 })
}

// A worker that leaves during Hold must not wait for Release.
func TestLeavingWhileOnHold(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{})
	eventually(t, "the subscription", func() bool { return e.subscribed() })
	for range 10 {
		e.publish(0)
	}
	h.pool.Update(nil)
	if on, off := h.Subscriptions(); on+off != 0 {
		t.Errorf("%d connected, %d connecting after the worker left", on, off)
	}
}

// Close during Hold must not wait for Release.
func TestCloseWhileOnHold(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{})
	eventually(t, "the subscription", func() bool { return e.subscribed() })
	for range 10 {
		e.publish(0)
	}
	closed := make(chan error, 1)
	go func() { closed <- h.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Close did not return")
	}
	h.Release() // harmless
}
