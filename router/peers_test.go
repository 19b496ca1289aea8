package router

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/router/queue"
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
	second.PeersChanged(changes)
	b := second.route(completion("m", tokens(0, 42)))
	b.Free()
	if b.Name != a.Name || b.PredictedCachedTokens != 40 {
		t.Errorf("routed to %s with %d cached tokens, the other replica to %s", b.Name, b.PredictedCachedTokens, a.Name)
	}
	changes[0].BlockSize, changes[0].Chains[0][0] = 16, 1
	second.PeersChanged(changes) // a block size that the worker does not have
	second.cfg.Predict = Predict{}
	second.PeersChanged(changes)
	second.PeersChanged(nil)
}

// fleet is several replicas over one worker, which takes one prompt at a time. Each hears of the others' bookings late.
type fleet struct {
	t       *testing.T
	houses  []*house
	waiting []*arrivals
	running []*Route
	rested  time.Duration // how often
}

const fleetLate = 2 * time.Millisecond

// newFleet returns a fleet whose worker is busy. It is for use in a bubble.
func newFleet(t *testing.T, replicas int, profiles *queue.Profiles) *fleet {
	f := fleetOf(t, replicas, func() *house { return withProfiles(t, profiles, maxed(workers(1), 100)...) })
	for _, h := range f.houses {
		f.waiting = append(f.waiting, arriveAt(h))
	}
	first, err := f.houses[0].Route(t.Context(), completion("m", tokens(0, 400)))
	if err != nil {
		t.Fatal(err)
	}
	f.running = []*Route{first}
	f.rest()
	return f
}

// fleetOf returns a fleet. It is for use in a bubble.
func fleetOf(t *testing.T, replicas int, replica func() *house) *fleet {
	f := &fleet{t: t}
	copies := map[*house]map[*house]*scoring.Copies{}
	for range replicas {
		h := replica()
		f.houses, copies[h] = append(f.houses, h), map[*house]*scoring.Copies{}
	}
	for _, from := range f.houses {
		var delivery sync.Mutex
		told := make(chan scoring.Change, 1000)
		from.book.Observe(func(c *scoring.Change) {
			x := *c
			x.Chains = nil
			told <- x
			time.AfterFunc(fleetLate, func() {
				delivery.Lock() // one change after the other
				defer delivery.Unlock()
				next := []scoring.Change{<-told}
				for _, to := range f.houses {
					if to != from {
						copies[to][from].Apply(slices.Clone(next))
						to.PeersChanged(next)
					}
				}
			})
		})
		for _, to := range f.houses {
			if to != from {
				copies[to][from] = to.book.NewCopies()
			}
		}
	}
	return f
}

// rest waits until nothing happens any more but the regular looks. These come at other moments than what follows.
func (f *fleet) rest() {
	f.rested++
	<-time.After(time.Duration(10*len(f.houses))*fleetLate + f.rested*7*time.Microsecond)
}

// send sends a request of a class to a replica, where it waits.
func (f *fleet) send(replica int, name, class string) {
	req := completion("m", tokens(1000+100*len(name)+replica, 400))
	req.Body = append([]byte(`{"stream":true,`), req.Body[1:]...) // no estimate ends its prefill
	req.Hints.PolicyClass = class
	f.waiting[replica].send(f.t.Context(), name, req)
	f.rest()
}

// release ends what the worker computes. It returns the names of the requests that have gone since: with their
// replica, where they were sent.
func (f *fleet) release() (went []string) {
	for _, r := range f.running {
		r.MarkPrefillCompleted()
	}
	f.running = nil
	f.rest()
	for i, a := range f.waiting {
		a.mu.Lock()
		for name, r := range a.by {
			went = append(went, fmt.Sprint(i, " ", name))
			f.running = append(f.running, r)
			delete(a.by, name)
		}
		a.mu.Unlock()
	}
	return went
}

// Four replicas with waiting requests hear of one release at once, and of each other's bookings late. Each release lets
// a request go, and hardly more than one; in the end all went.
func TestReplicasThatWakeTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const replicas, each = 4, 5
		f := newFleet(t, replicas, (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, set(0.0))))
		for j := range each {
			for i := range replicas {
				f.send(i, fmt.Sprint(j), "")
			}
		}
		releases := 0
		for all := 0; all < replicas*each; releases++ {
			went := f.release()
			if all += len(went); len(went) == 0 {
				t.Fatalf("release %d let none go", releases)
			}
		}
		if releases < replicas*each/2 {
			t.Errorf("%d releases let %d requests go", releases, replicas*each)
		}
	})
}
