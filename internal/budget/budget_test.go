package budget

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"kvepp/internal/apibody"
)

// TestWaitersComeInTurn: the memory goes to whoever waited longest, small wishes do not pass a large one, and one that
// leaves makes room.
func TestWaitersComeInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Share{limit: 100}
		if !s.TryTake(60) || s.TryTake(41) || !s.TryTake(10) {
			t.Fatal("what fits is not what was taken")
		}
		var order []int
		ctx, leave := context.WithCancel(t.Context())
		take := func(ctx context.Context, n int) {
			go func() {
				if s.Take(ctx, n) == nil {
					order = append(order, n)
				}
			}()
			synctest.Wait()
		}
		take(ctx, 90)
		take(t.Context(), 20)
		take(t.Context(), 1000)
		take(t.Context(), 5)
		if s.TryTake(1) || len(order) > 0 {
			t.Fatalf("%v went past one that waits", order)
		}
		leave()
		synctest.Wait()
		if len(order) != 1 || order[0] != 20 || s.Used() != 90 {
			t.Fatalf("when the first left: %v, %d bytes", order, s.Used())
		}
		s.Give(90) // 1000 is more than there is: it gets all of it, alone
		synctest.Wait()
		if len(order) != 2 || order[1] != 1000 {
			t.Fatalf("%v", order)
		}
		s.Give(1000)
		synctest.Wait()
		if len(order) != 3 || s.Used() != 5 {
			t.Fatalf("%v, %d bytes", order, s.Used())
		}
	})
}

// TestManyTakersStayWithin: under any interleaving no more is taken than there is, all get what they want, and nothing
// is left.
func TestManyTakersStayWithin(t *testing.T) {
	const limit = 1000
	s := &Share{limit: limit}
	var taken, most atomic.Int64
	var all sync.WaitGroup
	for i := range 32 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for range 300 {
				n := 1 + rng.IntN(limit)
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(4) == 0 {
					go cancel()
				}
				if s.Take(ctx, n) == nil {
					now := taken.Add(int64(n))
					for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
					}
					taken.Add(int64(-n))
					s.Give(n)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if most.Load() > limit || s.Used() != 0 || s.waiting.Load() != 0 {
		t.Errorf(
			"%d bytes were taken at once of %d; %d are left, %d wait",
			most.Load(),
			limit,
			s.Used(),
			s.waiting.Load(),
		)
	}
}

// TestShares: the parts make up the whole, the largest body can be read, and large bodies leave room for others.
func TestShares(t *testing.T) {
	const limit = 448 << 20
	b := New(limit)
	if all := b.Held.limit + b.large.limit + b.small.limit; all != limit {
		t.Errorf("the shares are %d bytes of %d", all, limit)
	}
	n := MaxBody(limit)
	if cost := int64(apibody.ReadCost(n)); n < 32<<20 || cost > b.large.limit+b.large.limit/100 {
		t.Errorf("a body of %d bytes may be read, which costs %d of %d", n, cost, b.large.limit)
	}
	if MaxBody(ForBody(32<<20)) != 32<<20 {
		t.Error("a budget for a body is not for it")
	}
	if b.ReadShare(LargeBody) != &b.small || b.ReadShare(LargeBody+1) != &b.large {
		t.Error("a body is read in another share than its own")
	}
	held := 0
	for b.HoldBody(0, 30<<20) {
		held++
	}
	b.Held.Give(30 << 20)
	for range 35 { // others still fit
		if !b.HoldBody(0, LargeBody) {
			t.Error("large bodies take all the room")
		}
	}
	if held != 3 || b.HoldBody(LargeBody, 1) || !b.HoldBody(LargeBody-1, 1) {
		t.Errorf("%d large bodies fit", held)
	}
	unlimited := New(0)
	if !unlimited.HoldBody(0, 1<<40) || !unlimited.ReadShare(1<<30).TryTake(1<<40) || unlimited.Used() != 2<<40 {
		t.Error("without a limit something is refused")
	}
}
