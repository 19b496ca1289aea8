package feed

import (
	"errors"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// seeded is a house whose only worker holds two blocks by a dump that has the messages before next in it, and whose own
// events are on hold.
func seeded(t *testing.T, e *engine, at Position) *house {
	t.Helper()
	h := newHouse(t)
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

func (h *house) worker() kvblock.Worker {
	s := h.pool.Acquire()
	defer s.Release()
	return s.Workers[0].Worker
}

// TestSeed goes on from a dump. The publisher's batches bear the time 1.5.
func TestSeed(t *testing.T) {
	both := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8}
	all := append(both, 9, 9, 9, 9)
	for _, c := range []struct {
		name  string
		at    Position
		first uint64 // number of the first message that arrives
		// blocks of both held after three messages: one that stores [2] again, one that removes it, one that stores [3]
		// after it
		want int
	}{
		{"the dump has the first two messages in it", Position{Known: true, Next: 7, Timestamp: 1.5}, 5, 3},
		{"the dump has none of them in it: [2] was stored twice, and removed once",
			Position{Known: true, Next: 5, Timestamp: 1.5}, 5, 3},
		{"a message is missing between", Position{Known: true, Next: 4, Timestamp: 1.5}, 5, 0},
		{"the messages are another process's", Position{Known: true, Next: 7, Timestamp: 1.25}, 5, 0},
		{"the dump does not say", Position{}, 5, 1},
		{"it does not, and the messages are all there ever were", Position{}, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, 0)
			h := seeded(t, e, c.at)
			if got := h.match(4, both...); got != 2 {
				t.Fatalf("%d blocks by the dump, want 2", got)
			}
			e.seq = c.first
			eventually(t, "the publisher heard", func() bool { return e.subscribed() })
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
			h.Dump(h.worker(), func(says Position, _ kvblock.Stored) bool { at = says; return true })
			if want := (Position{Known: true, Next: c.first + 4, Timestamp: 1.5}); at != want {
				t.Errorf("position %+v, want %+v", at, want)
			}
		})
	}
}

// TestSeedIsRefused where nothing would correct it.
func TestSeedIsRefused(t *testing.T) {
	store := kvblock.Stored{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: local(1, 2, 3, 4)}}}
	h := newHouse(t)
	h.Hold()
	if err := h.Seed(5, Position{}, store); !errors.Is(err, ErrNotSubscribed) {
		t.Errorf("a worker that is not there: %v", err)
	}
	h.pool.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000", KVEvents: "tcp://127.0.0.1:9", BlockSize: 4}})
	if err := h.Seed(h.worker(), Position{}, store); !errors.Is(err, ErrNotSubscribed) {
		t.Errorf("a worker whose socket is not connected: %v", err)
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
		t.Errorf("a worker whose own events came: %v", err)
	}
}

// TestSeedEndsWithItsConnection: the next one may be to another process.
func TestSeedEndsWithItsConnection(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{Known: true, Next: 7, Timestamp: 1.5})
	e.socket.Close()
	eventually(t, "emptied", func() bool { return h.match(4, 1, 2, 3, 4) == 0 })
}

// TestLeavingWhileOnHold must not wait for the release.
func TestLeavingWhileOnHold(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{})
	eventually(t, "the publisher heard", func() bool { return e.subscribed() })
	for range 10 {
		e.publish(0)
	}
	h.pool.Update(nil)
	if on, off := h.Subscriptions(); on+off != 0 {
		t.Errorf("%d connected, %d connecting after the worker left", on, off)
	}
}

// TestCloseWhileOnHold must not wait for a release that nobody will give.
func TestCloseWhileOnHold(t *testing.T) {
	e := newEngine(t, 0)
	h := seeded(t, e, Position{})
	eventually(t, "the publisher heard", func() bool { return e.subscribed() })
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
		t.Fatal("it hangs")
	}
	h.Release() // harmless
}
