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
	broken bool // State panics

	mu   sync.Mutex
	busy bool
	away bool // there is no worker
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

func (g *gate) State(_ *Class, _ string) State {
	if g.broken {
		panic("a defect")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.away:
		return Away
	case g.busy:
		return Busy
	}
	return Ready
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
		if got, want := g.room.Loads(), []ClassLoad{{"", "default", false, Load{2, 2, 0}}}; !slices.Equal(got, want) {
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

// TestRoomYields: a request leaves a free worker to another replica whose tenant was served less, until that replica
// has taken it, says that none waits any more, or has not taken it in time. Then it leaves no worker to it again, until
// that replica speaks.
func TestRoomYields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		g.room.cfg.Bound = 10
		a, b := g.entry(0), g.entry(0)
		a.Tenant, b.Tenant = 1, 2
		g.want(g.visit(t.Context(), a), nil)
		flood := []<-chan error{g.visit(t.Context(), b), g.visit(t.Context(), b), g.visit(t.Context(), b)}
		g.room.Heard(2, 1000, true, false)
		g.room.Heard(1, 0, false, true)
		if !g.room.Waits(2) || g.room.Waits(1) {
			t.Error("who waits here")
		}
		g.release()
		<-time.After(yieldFor / 2)
		g.wantWaiting(flood[0])
		g.set(true) // the other replica has it
		<-time.After(10 * yieldFor)
		g.wantWaiting(flood[0])
		g.release()
		<-time.After(yieldFor - 1)
		synctest.Wait()
		g.wantWaiting(flood[0])
		<-time.After(2)
		synctest.Wait()
		g.want(flood[0], nil) // the other replica has ended
		g.release()
		g.want(flood[1], nil)
		g.room.Heard(1, 0, false, true)
		g.release()
		g.wantWaiting(flood[2])
		g.room.Heard(1, 1, true, false)
		g.room.Released()
		synctest.Wait()
		g.want(flood[2], nil)
	})
}

// TestRoomClock: a wall clock that jumps changes nothing, because the room's times are those of the monotonic clock.
func TestRoomClock(t *testing.T) {
	g := newGate(t)
	g.set(true)
	w, err := g.room.Enter(g.entry(0), "")
	if err != nil {
		t.Fatal(err)
	}
	for name, at := range map[string]time.Time{"the room began": g.room.began, "a request entered": w.entered} {
		if at == at.Round(0) {
			t.Errorf("by the wall clock: when %s", name)
		}
	}
	g.room.leave(w)
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

// TestRoomFollowsItsProfile: requests that wait are ordered and limited by a new profile of the same classes.
func TestRoomFollowsItsProfile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		g.room.cfg.Bound = 10
		a, b, c := g.visit(t.Context(), g.entry(0)), g.visit(t.Context(), g.entry(0)), g.visit(t.Context(), g.entry(0))
		g.want(a, nil)
		limit := 1
		next := &Profile{Classes: []Class{{Name: "default", Policy: WSPT, Quantum: 1, MaxRequests: &limit}}}
		late := g.entry(0)
		late.Profile = next
		d := g.visit(t.Context(), late)
		g.wantWaiting(b)
		for _, refused := range []<-chan error{c, d} {
			var limited *LimitError
			if err := <-refused; !errors.As(err, &limited) {
				t.Errorf("a request above the new limit got %v", err)
			}
		}
		if g.room.Waiting() != 1 {
			t.Errorf("%d wait", g.room.Waiting())
		}
		g.release()
		g.want(b, nil)
	})
}
