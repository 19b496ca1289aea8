package router

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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

// fleet is several replicas over one worker, which takes one prompt at a time. Each hears of the others' bookings late.
type fleet struct {
	t       *testing.T
	houses  []*house
	waiting []*arrivals
	known   string // what replicas know of each other's queues: nothing, ages, classes
	running []*Route
	rested  time.Duration // how often
}

const fleetLate = 2 * time.Millisecond

// newFleet returns a fleet whose worker is busy. It is for use in a bubble.
func newFleet(t *testing.T, replicas int, known string, profiles *queue.Profiles) *fleet {
	f := fleetOf(t, replicas, func() *house { return withProfiles(t, profiles, maxed(workers(1), 100)...) })
	f.known = known
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
						copies[to][from].Apply(next)
						to.PeersBooked(next)
						to.PeersReleased()
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
	for i, h := range f.houses {
		h.SetPeers(fleetLate, i, replicas)
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
	waits := make([]Waits, len(f.houses))
	for i, h := range f.houses {
		if waits[i], _ = h.Waits(); f.known == "ages" {
			waits[i].Classes = nil
		}
	}
	for _, h := range f.houses {
		if f.known != "nothing" {
			h.SetPeersWaits(waits)
		}
	}
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

// Four replicas with waiting requests hear of one release at once, and of each other's bookings late. One request goes
// for each release, as with one replica; in the end all went. If they know who has waited longest, the requests go in
// the order in which they came, over all replicas.
func TestReplicasThatWakeTogether(t *testing.T) {
	for _, known := range []string{"nothing", "ages", "classes"} {
		t.Run("known="+known, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const replicas, each = 4, 5
				f := newFleet(t, replicas, known, (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, set(0.0))))
				for j := range each {
					for i := range replicas {
						f.send(i, fmt.Sprint(j), "")
					}
				}
				for n := range replicas * each {
					went := f.release()
					if len(went) != 1 {
						t.Fatalf("release %d let %q go", n, went)
					}
					if want := fmt.Sprint(n%replicas, " ", n/replicas); known != "nothing" && went[0] != want {
						t.Fatalf("release %d let %q go, want %q", n, went, want)
					}
				}
			})
		})
	}
}

const twoClasses = `
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
- {name: interactive, policy_family: all, cache_bucket: any, quantum: 3000, prefill_busy_threshold: 0}
- {name: batch, quantum: 1000, prefill_busy_threshold: 0}
`

// One replica has a long queue of old requests of class batch, the other gets requests of class interactive. If they
// know only since when the oldest request waits, the first one's queue starves the other's class until it is empty.
// With classes, both get their turns, as from one queue, by the classes' quanta.
func TestNoQueueStarvesAnothersClass(t *testing.T) {
	for known, wanted := range map[string][2]int{"ages": {0, 0}, "classes": {20, 37}} {
		t.Run("known="+known, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				profiles, err := queue.ParseFile([]byte(twoClasses))
				if err != nil {
					t.Fatal(err)
				}
				f := newFleet(t, 2, known, profiles.Profiles(nil))
				const all = 40
				for j := range all {
					f.send(0, fmt.Sprint("batch", j), "batch")
				}
				for j := range all {
					f.send(1, fmt.Sprint("interactive", j), "interactive")
				}
				interactive, next := 0, [2]int{}
				for n := range all {
					went := f.release()
					if len(went) != 1 {
						t.Fatalf("release %d let %q go", n, went)
					}
					i := int(went[0][0] - '0')
					if want := fmt.Sprint(i, " ", [2]string{"batch", "interactive"}[i], next[i]); went[0] != want {
						t.Fatalf("release %d let %q go, want %q: the oldest of its class", n, went, want)
					}
					next[i]++
					interactive += i
				}
				if interactive < wanted[0] || interactive > wanted[1] {
					t.Errorf("%d of %d releases let an interactive request go, want %d to %d", interactive, all,
						wanted[0], wanted[1])
				}
			})
		})
	}
}

// Random requests of two classes arrive at three replicas, while the worker serves them one by one. For each release
// one request goes, it is the oldest of its class anywhere, and in the end none waits.
func TestHistoriesOfQueues(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			profiles, err := queue.ParseFile([]byte(twoClasses))
			if err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(seed, 22))
			const replicas = 3
			f := newFleet(t, replicas, "classes", profiles.Profiles(nil))
			left := map[string][]string{} // by class, in order of arrival
			sent, went := 0, 0
			for step := 0; step < 60 || went < sent; step++ {
				if step < 60 && rng.IntN(5) < 3 {
					class, replica := []string{"interactive", "batch"}[rng.IntN(2)], rng.IntN(replicas)
					sent++
					f.send(replica, fmt.Sprint(class, sent), class)
					left[class] = append(left[class], fmt.Sprint(replica, " ", class, sent))
					continue
				}
				if went == sent {
					continue // the worker stays busy, so that no arrival goes at once
				}
				got := f.release()
				if went++; len(got) != 1 {
					t.Fatalf("seed %d, step %d: %q went, of %v", seed, step, got, left)
				}
				class := strings.TrimRight(got[0][2:], "0123456789")
				if got[0] != left[class][0] {
					t.Fatalf("seed %d, step %d: %q went before %q", seed, step, got, left[class][0])
				}
				left[class] = left[class][1:]
			}
		})
	}
}

// The replica whose oldest request has waited longest looks first; without such requests the order is drawn. What one
// replica computes agrees with what the others compute.
func TestOldestLooksFirst(t *testing.T) {
	now := time.Now()
	ago := func(seconds int, classes ...ClassWait) Waits {
		return Waits{now.Add(-time.Duration(seconds) * time.Second), classes}
	}
	class := func(id uint64, seconds int) ClassWait {
		return ClassWait{Class: id, Since: now.Add(-time.Duration(seconds) * time.Second), Quantum: 1, Cost: 1}
	}
	for _, x := range []struct {
		waits   []Waits
		want    []int // places; -1: drawn, after these
		byClass bool
	}{
		{[]Waits{ago(1), ago(3), ago(2)}, []int{2, 0, 1}, false},
		{[]Waits{ago(1), ago(1), ago(1)}, []int{0, 1, 2}, false},
		{[]Waits{{}, ago(1), {}}, []int{-1, 0, -1}, false},
		{[]Waits{{}, {}, {}}, []int{-1, -1, -1}, false},
		{[]Waits{ago(1, class(7, 1)), ago(3, class(7, 3)), ago(2, class(7, 2))}, []int{2, 0, 1}, true},
		// The third one does not tell its classes.
		{[]Waits{ago(1, class(7, 1)), ago(3, class(8, 3)), ago(2)}, []int{2, 0, 1}, false},
		// The order of the two classes is drawn, and in each the older one is first.
		{[]Waits{ago(9, class(7, 1), class(8, 9)), ago(3, class(7, 3)), {}}, nil, true},
	} {
		firsts := map[int]int{}
		for booking := range uint64(200) {
			seen := map[int]bool{}
			for number := range x.waits {
				p := placeOf(x.waits, booking, number, len(x.waits))
				if x.want != nil && x.want[number] >= 0 && p.before != x.want[number] || seen[p.before] ||
					p.before >= len(x.waits) || !p.known ||
					p.byClass != (x.byClass && p.others) {
					t.Errorf("%v: replica %d has place %+v, want %v", x.waits, number, p, x.want)
				}
				if seen[p.before] = true; p.before == 0 {
					firsts[number]++
				}
			}
		}
		if x.want == nil && (firsts[0] < 70 || firsts[1] < 70 || firsts[2] > 0) {
			t.Errorf("%v: replicas are first %v times", x.waits, firsts)
		}
	}
	if p := placeOf([]Waits{ago(1)}, 1, 0, 3); p.known {
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
