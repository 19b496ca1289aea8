package budget

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"kvepp/prompt/body"
)

// TestWaitersComeInTurn: memory goes to the waiter that waited longest, small requests do not overtake a large one, and
// a waiter that leaves unblocks those behind it.
func TestWaitersComeInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Share{limit: 100}
		if !s.TryTake(60) || s.TryTake(41) || !s.TryTake(10) {
			t.Fatal("TryTake(60), TryTake(41), TryTake(10) of 100: want true, false, true")
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
			t.Fatalf("%v overtook a waiter", order)
		}
		leave()
		synctest.Wait()
		if len(order) != 1 || order[0] != 20 || s.Used() != 90 {
			t.Fatalf("after the first waiter left: served %v, %d bytes used", order, s.Used())
		}
		s.Give(90) // 1000 exceeds the share, so this waiter gets all of it alone
		synctest.Wait()
		if len(order) != 2 || order[1] != 1000 {
			t.Fatalf("served %v, want 1000 next", order)
		}
		s.Give(1000)
		synctest.Wait()
		if len(order) != 3 || s.Used() != 5 {
			t.Fatalf("served %v, %d bytes used", order, s.Used())
		}
	})
}

// TestManyTakersStayWithin: under any interleaving, the share is never exceeded, all takers are served, and no bytes
// stay taken.
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
			"%d bytes of %d were taken at once; %d still taken, %d waiting",
			most.Load(),
			limit,
			s.Used(),
			s.waiting.Load(),
		)
	}
}

// TestShares: the shares add up to the limit, the largest body can be read, and large bodies leave room for others.
func TestShares(t *testing.T) {
	const limit = 448 << 20
	b := New(limit)
	if all := b.Held.limit + b.large.limit + b.small.limit; all != limit {
		t.Errorf("the shares add up to %d bytes of %d", all, limit)
	}
	n := MaxBody(limit)
	if cost := int64(body.ReadCost(n)); n < 32<<20 || cost > b.large.limit+b.large.limit/100 {
		t.Errorf("MaxBody is %d bytes; reading it costs %d of %d bytes", n, cost, b.large.limit)
	}
	if MaxBody(ForBody(32<<20)) != 32<<20 {
		t.Error("MaxBody(ForBody(n)) is not n")
	}
	if b.ReadShare(LargeBody) != &b.small || b.ReadShare(LargeBody+1) != &b.large {
		t.Error("ReadShare returned the wrong share")
	}
	held := 0
	for b.HoldBody(0, 30<<20) {
		held++
	}
	b.Held.Give(30 << 20)
	for range 35 { // others still fit
		if !b.HoldBody(0, LargeBody) {
			t.Error("large bodies leave no room for others")
		}
	}
	if held != 3 || b.HoldBody(LargeBody, 1) || !b.HoldBody(LargeBody-1, 1) {
		t.Errorf("%d large bodies fit, want 3", held)
	}
	unlimited := New(0)
	if !unlimited.HoldBody(0, 1<<40) || !unlimited.ReadShare(1<<30).TryTake(1<<40) || unlimited.Used() != 2<<40 {
		t.Error("an unlimited budget refused a request")
	}
}
