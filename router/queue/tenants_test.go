package queue

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// shared is a queue of one class, or of llm-d's bands, whose tenants are named by their numbers.
type shared struct {
	*Queue[string]
	t *testing.T
}

func (q shared) push(tenant Tenant, name string, tokens int) *Item[string] {
	q.t.Helper()
	item, err := q.Push(Request{Lane: Any, Tenant: tenant, Tokens: tokens}, 1, name)
	if err != nil {
		q.t.Fatal(err)
	}
	return item
}

// pop returns the names of the next n requests.
func (q shared) pop(n int) string {
	var went []string
	for range n {
		if item := q.Pop(always[string]); item != nil {
			went = append(went, item.Value)
		}
	}
	return strings.Join(went, " ")
}

func (q shared) want(went string) {
	q.t.Helper()
	if got := q.pop(len(strings.Fields(went))); got != went {
		q.t.Fatalf("went: %s, want %s", got, went)
	}
}

// TestTenants: the least served goes next, by tokens and not by requests; a charge for a response counts; who was away
// saves nothing up; requests without a tenant are one; who leaves without a turn is not charged.
func TestTenants(t *testing.T) {
	for _, p := range []*Profile{Single(FCFS, nil), (&Bands{Default: Band{Fair: true}}).Profile()} {
		q := shared{New[string](p, 100), t}
		for range 5 {
			q.Remove(q.push(1, "gone", 100))
		}
		q.push(2, "b1", 100)
		q.push(2, "b2", 100)
		q.push(1, "a1", 50)
		q.push(1, "a2", 50)
		q.push(1, "a3", 50)
		q.want("b1 a1 a2 b2 a3") // 100 each, the earlier first: then 200 and 150
		q.push(3, "c1", 10)      // comes in as served as a, which went last
		q.push(1, "a4", 10)
		q.push(2, "b3", 10)
		q.want("c1 a4 b3") // 100, 150, 200
		q.push(1, "a5", 10)
		q.push(2, "b4", 10)
		q.Charge(1, 1000)
		q.Charge(99, 1000) // who is not known
		q.want("b4 a5")
		q.push(0, "n1", 1)
		q.push(0, "n2", 1)
		q.want("n1 n2")
		if n := q.Tenants(); n != 3 {
			t.Errorf("%d tenants are known, want 3", n)
		}
	}
}

// TestElsewhere: a request leaves a worker to another replica while a tenant that was served much less waits there: as
// that one says it. What a tenant was charged there counts here, and an idle one saves up no more than here.
func TestElsewhere(t *testing.T) {
	for _, p := range []*Profile{Single(FCFS, nil), (&Bands{Default: Band{Fair: true}}).Profile()} {
		q := shared{New[string](p, 1000), t}
		q.push(1, "a", 100)
		q.pop(1)
		for range 10 * meanOf {
			q.push(2, "b", 100)
			q.pop(1)
		}
		first := q.push(2, "b", 100)
		want := func(yields bool, when string) {
			t.Helper()
			if first.Yields() != yields {
				t.Fatalf("%s: yields is %v", when, !yields)
			}
		}
		want(false, "none waits elsewhere")
		q.Heard(99, 0, false, true)
		want(false, "who waits is not known")
		q.Heard(1, 0, false, true)
		want(true, "another one waits")
		q.Heard(1, burst*100-50, true, true)
		want(false, "it was served nearly as much")
		q.Heard(2, 1000, false, false)
		want(true, "the own tenant was served elsewhere")
		first.Forget()
		want(false, "that is forgotten")
		q.Heard(1, 0, false, true)
		want(true, "it is said again")
		q.Heard(1, 0, false, false)
		want(false, "it does not wait any more")
		q.Heard(2, 100_000, true, false)
		q.Heard(2, 0, true, false) // a turn by which idle tenants are lifted
		q.Heard(1, 0, false, true)
		q.Heard(1, burst*100-50, true, true)
		want(false, "an idle one had saved up no more")
		if !q.Waits(2) || q.Waits(1) || q.Waits(99) {
			t.Error("who waits here")
		}
	}
}

// TestBurst: a tenant that was idle goes first for about as many requests as it may save up, and shares after that.
func TestBurst(t *testing.T) {
	q := shared{New[string](Single(FCFS, nil), 1000), t}
	q.push(1, "a", 100)
	q.push(2, "b", 100)
	q.pop(2)
	for range 100 {
		q.push(2, "b", 100)
		q.pop(1)
	}
	for range 50 {
		q.push(2, "b", 100)
		q.push(1, "a", 100)
	}
	if before, _, _ := strings.Cut(q.pop(50), "b a b"); strings.Count(before, "a") < burst/2 ||
		strings.Count(before, "a") > 2*burst {
		t.Errorf("went before it shared: %s", before)
	}
}

// TestShares: with ten tenants, one of them with five times the rate of each other, and 1.2 times what can be served,
// the nine wait for a few turns at most, and the tenth gets the rest.
func TestShares(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	q := shared{New[string](Single(WSPT, nil), 1<<16), t}
	const tokens = 1000
	served, waits, nine := map[Tenant]int{}, 0, 0
	credit := 0.0
	for turn := range 20_000 { // one request is served in each
		for credit += 1.2; credit >= 1; credit-- {
			if who := Tenant(1 + min(rng.IntN(14), 9)); who == 10 {
				q.push(who, "10", tokens/2+rng.IntN(tokens))
			} else {
				q.push(who, fmt.Sprint(int(who), " ", turn), tokens/2+rng.IntN(tokens))
			}
		}
		item := q.Pop(always[string])
		var who, at int
		if n, _ := fmt.Sscan(item.Value, &who, &at); n == 2 {
			waits, nine = waits+turn-at, nine+1
		}
		served[item.Tenant]++
	}
	if mean := float64(waits) / float64(nine); mean > 6 { // 2 if each came alone, and more than 1,000 by FCFS
		t.Errorf("requests of the nine waited %v turns", mean)
	}
	for who := Tenant(1); who < 10; who++ {
		if n := float64(served[who]) / 20_000 * 14 / 1.2; n < .9 || n > 1.1 {
			t.Errorf("tenant %d got %v of what it asked for", who, n)
		}
	}
}

// TestAMillionTenants: the memory for tenants is bounded, and none starves: neither a tenant that was there before nor
// those beyond the bound.
func TestAMillionTenants(t *testing.T) {
	q := shared{New[string](Single(FCFS, nil), 1<<16), t}
	last := 0
	for i := range 1_000_000 {
		e := Entry{Profile: Single(FCFS, nil)}
		e.SetTenant(fmt.Sprint("tenant ", i))
		q.push(e.Tenant, "", 1+i%500)
		if i%1000 == 0 {
			q.push(7777777, "old", 100)
		}
		for q.Len() > 2000 {
			if item := q.Pop(always[string]); item.Value == "old" {
				last = i
			}
		}
		if i-last > 20_000 {
			t.Fatalf("the old tenant waits since %d at %d", last, i)
		}
	}
	if n := q.Tenants(); n > maxTenants+sharedTenants {
		t.Errorf("%d tenants are kept", n)
	}
	for q.Len() > 0 {
		q.Pop(always[string])
	}
}

// TestTenantNames: tenants are the same in all replicas, and differ by name, model, class and priority. A name like
// another's hash, or like a place that tenants share, names neither.
func TestTenantNames(t *testing.T) {
	p := &Profile{Classes: []Class{{Name: "a"}, {Name: "ab"}, {Name: "edf", Policy: EDF}}}
	id := func(line string, class int, name string) Tenant {
		e := Entry{Line: line, Profile: p, Request: Request{Class: class}}
		e.SetTenant(name)
		return e.Tenant
	}
	seen := map[Tenant]bool{}
	first := id("m", 0, "x")
	for _, of := range []Tenant{first, id("m", 0, "y"), id("m", 1, "x"), id("m", 0, "bx"), id("ma", 0, "x"),
		id("", 0, ""), id("m", 0, fmt.Sprint(first)), id("m", 0, fmt.Sprintf("%x", uint64(first))), id("m", 0, "3")} {
		if of <= sharedTenants || seen[of] {
			t.Errorf("%d is a shared place, or another's", of)
		}
		seen[of] = true
	}
	if first != id("m", 0, "x") || first != 0x0 && id("m", 2, "x") != 0 {
		t.Errorf("%x: a tenant changes, or edf has tenants", first)
	}
	e := Entry{Profile: p, MayNotWait: true}
	if e.SetTenant("x"); e.Tenant != 0 {
		t.Error("a request that does not wait is charged")
	}
	bands := (&Bands{ByPriority: map[int]Band{1: {Fair: true}}}).Profile()
	e = Entry{Profile: bands}
	if e.SetTenant("x"); e.Tenant != 0 {
		t.Error("a band that is not shared has tenants")
	}
	e.Priority = 1
	if e.SetTenant("x"); e.Tenant == 0 {
		t.Error("a band that is shared has none")
	}
}
