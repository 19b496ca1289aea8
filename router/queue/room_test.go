package queue

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// gate is a Judge of one worker, which is busy while a request is booked. Values are names of requests.
type gate struct {
	t      *testing.T
	room   *Room[string]
	looks  int
	broken bool // Busy panics

	mu   sync.Mutex
	busy bool
}

// newGate returns a Judge and its room.
func newGate(t *testing.T, classes ...Class) *gate {
	g := &gate{t: t}
	profile := &Profile{Classes: classes}
	if len(classes) == 0 {
		profile = Single(FCFS, nil)
	}
	cfg := &RoomConfig{Profiles: &Profiles{others: profile}, Bound: 2, Timeout: 10 * time.Second}
	g.room = NewRoom(cfg, g, time.Second)
	return g
}

func (g *gate) Begin() {
	if g.looks++; g.room.mu.TryLock() {
		g.room.mu.Unlock()
		g.t.Error("the loads are read without the room's lock")
	}
}
func (g *gate) End() {}

func (g *gate) Busy(_ *Class, _ string) bool {
	if g.broken {
		panic("a defect")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.busy
}

func (g *gate) set(busy bool) {
	g.mu.Lock()
	g.busy = busy
	g.mu.Unlock()
}

func (g *gate) entry(class int) Entry {
	return Entry{
		Profile: g.room.cfg.Profiles.others,
		Workers: 1,
		Request: Request{Class: class, Lane: Any, Tokens: 1},
	}
}

// visit enters, waits, decides and passes the turn on, in a goroutine. The channel receives nil once the worker is
// booked, or the error.
func (g *gate) visit(ctx context.Context, e Entry) <-chan error {
	done := make(chan error, 1)
	go func() {
		w, err := g.room.Enter(e, "")
		if err == nil && w != nil {
			err = g.room.Await(ctx, w)
		}
		if err == nil {
			g.set(true)
			g.room.Pass()
		}
		done <- err
	}()
	synctest.Wait()
	return done
}

// release ends a booking.
func (g *gate) release() {
	g.set(false)
	g.room.Released()
	synctest.Wait()
}

func (g *gate) want(done <-chan error, want error) {
	g.t.Helper()
	select {
	case err := <-done:
		if !errors.Is(err, want) {
			g.t.Errorf("a request got %v, want %v", err, want)
		}
	default:
		g.t.Errorf("a request still waits, want %v", want)
	}
}

func (g *gate) wantWaiting(done <-chan error) {
	g.t.Helper()
	select {
	case err := <-done:
		g.t.Errorf("a request does not wait: %v", err)
	default:
	}
}

func TestRoomGivesTurnsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		a, b, c := g.visit(t.Context(), g.entry(0)), g.visit(t.Context(), g.entry(0)), g.visit(t.Context(), g.entry(0))
		full := g.visit(t.Context(), g.entry(0))
		g.want(a, nil)
		g.want(full, ErrFull)
		if got, want := g.room.Loads(), []ClassLoad{{"", "default", Load{2, 2, 0}}}; !slices.Equal(got, want) {
			t.Errorf("waiting: %v, want %v", got, want)
		}
		g.wantWaiting(b)
		g.release()
		g.want(b, nil)
		g.wantWaiting(c)
		if g.room.Waiting() != 1 {
			t.Errorf("%d wait, want 1", g.room.Waiting())
		}
		g.release()
		g.want(c, nil)
	})
}

func TestRoomWithoutTheTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		none := 0
		g := newGate(t, Class{Name: "waits", Policy: FCFS, Quantum: 1},
			Class{Name: "rejects", Policy: FCFS, Quantum: 1, MaxRequests: &none})
		ctx, cancel := context.WithCancel(t.Context())
		sheds := g.entry(0)
		sheds.MayNotWait = true
		g.want(g.visit(ctx, g.entry(0)), nil)
		gone, late := g.visit(ctx, g.entry(0)), g.visit(t.Context(), g.entry(0))
		g.want(g.visit(t.Context(), sheds), ErrWouldWait)
		var limit *LimitError
		if err := <-g.visit(t.Context(), g.entry(1)); !errors.As(err, &limit) || limit.Class != "rejects" {
			t.Errorf("a class that rejects: %v", err)
		}
		cancel()
		synctest.Wait()
		g.want(gone, context.Canceled)
		g.wantWaiting(late)
		<-time.After(11 * time.Second)
		synctest.Wait()
		g.want(late, ErrTimeout)
		if g.room.Waiting() != 0 {
			t.Errorf("%d wait, want 0", g.room.Waiting())
		}
		g.release()
		g.want(g.visit(t.Context(), sheds), nil)
	})
}

// While requests wait, the room looks at them although no load is released. Without them it does not.
func TestRoomLooksRegularly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		g.set(true)
		a := g.visit(t.Context(), g.entry(0))
		g.set(false)
		g.wantWaiting(a)
		<-time.After(2 * time.Second)
		synctest.Wait()
		g.want(a, nil)
		before := g.looks
		<-time.After(time.Minute)
		synctest.Wait()
		if g.looks != before {
			t.Errorf("%d looks while no request waited", g.looks-before)
		}
	})
}

// A request enters while the holder of the turn is about to look for the next one, just after the worker was released.
// No release follows. The holder must read the loads after it took the lock: by older loads the request would stay.
func TestRoomReleasedBeforeEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		w, err := g.room.Enter(g.entry(0), "holder")
		if w != nil || err != nil {
			t.Fatal(w, err)
		}
		g.set(true)
		g.set(false)
		g.room.Released() // no request waits: nothing is noted
		a := g.visit(t.Context(), g.entry(0))
		g.wantWaiting(a)
		g.room.Pass()
		synctest.Wait()
		g.want(a, nil)
	})
}

// The holder of the turn looks again if load was released while it looked.
func TestRoomReleasedDuringLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		g.set(true)
		a := g.visit(t.Context(), g.entry(0))
		g.room.mu.Lock()
		g.room.taken = true // a look goes on, and has read the loads
		g.room.mu.Unlock()
		g.release()
		g.wantWaiting(a)
		g.room.Pass()
		synctest.Wait()
		g.want(a, nil)
	})
}

// A request for which the judge panics gets its turn, and does not hold up others.
func TestRoomPanicOfTheJudge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		g.broken = true
		g.want(g.visit(t.Context(), g.entry(0)), nil)
		g.broken = false
		a := g.visit(t.Context(), g.entry(0))
		g.wantWaiting(a)
		g.release()
		g.want(a, nil)
	})
}

// TestWaits: the room says since when the oldest request of each class waits, by line, and forgets those that went or
// left.
func TestWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		began := time.Now()
		check := func(when string, want ...ClassWait) {
			t.Helper()
			got := g.room.Waits(nil)
			for i := range got {
				got[i].Since = began.Add(got[i].Since.Sub(began).Round(time.Millisecond))
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %+v wait, want %+v", when, got, want)
			}
		}
		waits := func(line string, class, requests int, after time.Duration, cost int) ClassWait {
			c := &g.entry(class).Profile.Classes[class]
			return ClassWait{line, c.Name, requests, began.Add(after), cost, c.Quantum}
		}
		check("at first")
		<-g.visit(t.Context(), g.entry(0))
		other := g.entry(0)
		other.Line, other.Tokens = "other", 70
		ctx, leave := context.WithCancel(t.Context())
		left := g.visit(ctx, other)
		<-time.After(time.Second)
		second := g.visit(t.Context(), g.entry(0))
		<-time.After(time.Second)
		other.Tokens = 50
		third := g.visit(t.Context(), other)
		line := g.entry(0).Line
		cost := max(g.entry(0).Tokens, 1)
		check("three wait", waits(line, 0, 1, time.Second, cost), waits("other", 0, 2, 0, 70))
		leave()
		<-left
		check("the first one has left", waits(line, 0, 1, time.Second, cost), waits("other", 0, 1, 2*time.Second, 50))
		g.release()
		<-second
		check("the second one has gone", waits("other", 0, 1, 2*time.Second, 50))
		g.release()
		<-third
		check("all have gone")
	})
}

// TestReleasedFor: a release for one class lets no other go, until the next release or arrival.
func TestReleasedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t, Class{Name: "a", Policy: FCFS, Quantum: 1}, Class{Name: "b", Policy: FCFS, Quantum: 1})
		g.room.cfg.Bound = 10
		only := func(class string) func(string, *Class) bool {
			return func(line string, c *Class) bool { return line == "" && c.Name == class }
		}
		g.want(g.visit(t.Context(), g.entry(0)), nil)
		a1, a2 := g.visit(t.Context(), g.entry(0)), g.visit(t.Context(), g.entry(0))
		b1, b2 := g.visit(t.Context(), g.entry(1)), g.visit(t.Context(), g.entry(1))
		releaseFor := func(class string) {
			g.set(false)
			g.room.ReleasedFor(only(class))
			synctest.Wait()
		}
		releaseFor("b")
		g.want(b1, nil)
		g.wantWaiting(a1)
		releaseFor("c")
		g.wantWaiting(a1)
		g.wantWaiting(b2)
		g.release() // no limit is left of the others
		g.want(a1, nil)
		g.wantWaiting(b2)
		releaseFor("c")
		b3 := g.visit(t.Context(), g.entry(1)) // the worker is free: an arrival is no release for class c alone
		g.want(b2, nil)
		g.wantWaiting(b3)
		g.wantWaiting(a2)
		for range 2 {
			g.release()
		}
		g.want(b3, nil)
		g.want(a2, nil)
	})
}
