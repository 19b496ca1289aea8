package router

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/pool"
	"kvepp/queue"
	"kvepp/scoring"
)

// What one replica's router books, another's predicts: the next request with the same prompt goes to the same worker,
// although neither has events.
func TestPeersRoutesArePredicted(t *testing.T) {
	endpoints := workers(4)
	for i := range endpoints {
		endpoints[i].KVEvents = ""
	}
	first, second := newHouse(t, endpoints...), newHouse(t, endpoints...)
	second.cfg.Predict = Predict{TTL: time.Minute, Alone: true}
	var changes []scoring.Change
	first.book.Observe(func(c *scoring.Change) {
		x := *c
		x.Chains = slices.Clone(c.Chains)
		changes = append(changes, x)
	})
	a := first.route(completion("m", tokens(0, 42)))
	a.Free()
	second.PeersBooked(changes)
	b := second.route(completion("m", tokens(0, 42)))
	b.Free()
	if b.Name != a.Name || b.PredictedCachedTokens != 40 {
		t.Errorf("routed to %s with %d cached tokens, the other replica to %s", b.Name, b.PredictedCachedTokens, a.Name)
	}
	changes[0].BlockSize, changes[0].Chains[0][0] = 16, 1
	second.PeersBooked(changes) // a block size that the worker does not have
	second.cfg.Predict = Predict{}
	second.PeersBooked(changes)
	second.PeersReleased()
}

// The shares of the replicas have each worker once, of each model and role about equally many, by name: the numbers of
// workers differ from replica to replica.
func TestSharesOfReplicas(t *testing.T) {
	endpoints := append(workers(8), disaggregated(4, 4)...)
	reversed := slices.Clone(endpoints)
	slices.Reverse(reversed)
	houses := []*house{newHouse(t, endpoints...), newHouse(t, reversed...), newHouse(t, endpoints[3:]...),
		newHouse(t, endpoints...)}
	houses[2].pool.Update(endpoints)
	owners, counts := map[string]int{}, map[string]int{}
	for number, h := range houses {
		h.SetPeers(10, time.Millisecond, number, len(houses))
		share := h.share(number, len(houses))
		s := h.pool.Acquire()
		for i := range s.Workers {
			if w := &s.Workers[i]; share[w.Worker] {
				owners[w.Name]++
				counts[string(w.Role)+string(rune('0'+number))]++
			}
		}
		s.Release()
	}
	for _, e := range endpoints {
		if owners[e.Name] != 1 {
			t.Errorf("%s is in %d shares", e.Name, owners[e.Name])
		}
	}
	for number := range houses {
		for role, want := range map[pool.Role]int{pool.Aggregated: 2, pool.Prefill: 1, pool.Decode: 1} {
			if n := counts[string(role)+string(rune('0'+number))]; n != want {
				t.Errorf("replica %d has %d workers of role %q, want %d", number, n, role, want)
			}
		}
	}
}

// Four replicas with waiting requests hear of one release at once, and of each other's bookings late. One request goes
// for each release, as with one replica; in the end all went, and each replica got its turns. If they know who has
// waited longest, the requests go in the order in which they came, over all replicas.
func TestReplicasThatWakeTogether(t *testing.T) {
	for _, known := range []bool{false, true} {
		t.Run(fmt.Sprintf("known=%v", known), func(t *testing.T) { replicasWakeTogether(t, known) })
	}
}

func replicasWakeTogether(t *testing.T, known bool) {
	synctest.Test(t, func(t *testing.T) {
		const replicas, each, late = 4, 5, 2 * time.Millisecond
		var houses []*house
		copies := map[*house]map[*house]*scoring.Copies{}
		for range replicas {
			h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
			houses, copies[h] = append(houses, h), map[*house]*scoring.Copies{}
		}
		for _, from := range houses {
			var delivery sync.Mutex
			told := make(chan scoring.Change, 1000)
			from.book.Observe(func(c *scoring.Change) {
				x := *c
				x.Chains = nil
				told <- x
				time.AfterFunc(late, func() {
					delivery.Lock() // one change after the other
					defer delivery.Unlock()
					next := []scoring.Change{<-told}
					for _, to := range houses {
						if to != from {
							copies[to][from].Apply(next)
							to.PeersBooked(next)
							to.PeersReleased()
						}
					}
				})
			})
			for _, to := range houses {
				if to != from {
					copies[to][from] = to.book.NewCopies()
				}
			}
		}
		var waiting []*arrivals
		for i, h := range houses {
			h.SetPeers(10, late, i, replicas)
			waiting = append(waiting, arriveAt(h))
		}
		first, err := houses[0].Route(t.Context(), completion("m", tokens(0, 400)))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(10 * late)
		for j := range each {
			for i, a := range waiting {
				a.send(t.Context(), fmt.Sprint(j), completion("m", tokens(1000*(i+1)+100*j, 400)))
				<-time.After(10 * late)
			}
		}
		publish := func() {
			waits := make([]time.Time, replicas)
			for i, h := range houses {
				waits[i], _ = h.Oldest()
			}
			for _, h := range houses {
				if known {
					h.SetPeersWaits(waits)
				}
			}
		}
		running := func() (n int) {
			for _, a := range waiting {
				a.mu.Lock()
				n += len(a.by)
				a.mu.Unlock()
			}
			return n
		}
		if n := running(); n != 0 {
			t.Fatalf("%d went while the worker was busy", n)
		}
		release, went := func() { first.MarkPrefillCompleted() }, 0
		for went < replicas*each {
			publish()
			release()
			<-time.After(20 * late)
			n := running()
			if n != went+1 {
				t.Fatalf("%d went at once, after %d", n-went, went)
			}
			if a := waiting[went%replicas]; known {
				a.mu.Lock()
				oldest := a.by[fmt.Sprint(went/replicas)]
				a.mu.Unlock()
				if oldest == nil {
					t.Fatalf("after %d requests another one went than the oldest", went)
				}
			}
			went = n
			release = func() {
				for _, a := range waiting {
					a.mu.Lock()
					routes := slices.Collect(maps.Values(a.by))
					a.mu.Unlock()
					for _, r := range routes {
						r.MarkPrefillCompleted()
					}
				}
			}
		}
	})
}

// The replica whose oldest request has waited longest looks first; without such requests the order is drawn. What one
// replica computes agrees with what the others compute.
func TestOldestLooksFirst(t *testing.T) {
	now := time.Now()
	ago := func(seconds int) time.Time { return now.Add(-time.Duration(seconds) * time.Second) }
	for _, x := range []struct {
		waits []time.Time
		want  []int // places; -1: drawn, after these
	}{
		{[]time.Time{ago(1), ago(3), ago(2)}, []int{2, 0, 1}},
		{[]time.Time{ago(1), ago(1), ago(1)}, []int{0, 1, 2}},
		{[]time.Time{{}, ago(1), {}}, []int{-1, 0, -1}},
		{[]time.Time{{}, {}, {}}, []int{-1, -1, -1}},
	} {
		for booking := range uint64(20) {
			seen := map[int]bool{}
			for number, want := range x.want {
				r := &Router{}
				r.peers.number.Store(int64(number))
				r.peers.of.Store(int64(len(x.waits)))
				r.peers.released.Store(booking)
				r.SetPeersWaits(x.waits)
				place, older := r.place()
				if want >= 0 && (place != want || older != (want > 0)) || seen[place] || place >= len(x.waits) {
					t.Errorf("%v: replica %d has place %d, older %v, want %d", x.waits, number, place, older, want)
				}
				seen[place] = true
			}
		}
	}
	r := &Router{}
	r.peers.of.Store(3)
	r.SetPeersWaits([]time.Time{ago(1)}) // of another number of replicas
	if _, older := r.place(); older {
		t.Error("times of other replicas count")
	}
}

// The order in which replicas look is a permutation, and each is first equally often.
func TestTurnsOfReplicas(t *testing.T) {
	firsts := make([]int, 5)
	for booking := range uint64(5000) {
		seen := make([]bool, 5)
		for number := range 5 {
			place := turnOf(booking, number, 5)
			if seen[place] {
				t.Fatalf("booking %d: two replicas have place %d", booking, place)
			}
			if seen[place] = true; place == 0 {
				firsts[number]++
			}
		}
	}
	for number, n := range firsts {
		if n < 900 || n > 1100 {
			t.Errorf("replica %d is first %d of 5000 times", number, n)
		}
	}
	if turnOf(1, 0, 0) != 0 {
		t.Error("without peers there is no order")
	}
}
