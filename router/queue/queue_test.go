package queue

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func set[T any](v T) *T { return &v }

// oracle is a simple, slow queue: one list, which every operation scans.
type oracle struct {
	profile *Profile
	waiting []*entry
	deficit []int
	cursor  int
	carry   int
}

type entry struct {
	Request
	id    int
	score float64
}

func newOracle(p *Profile) *oracle {
	return &oracle{profile: p, deficit: make([]int, len(p.Classes)), carry: -1}
}

func (o *oracle) load(class int) (l Load) {
	for _, e := range o.waiting {
		if e.Class == class {
			l.Requests++
			l.Tokens += e.Tokens
			l.CachedTokens += min(e.CachedTokens, e.Tokens)
		}
	}
	return l
}

func (o *oracle) push(r Request, workers, id int) bool {
	c, l := &o.profile.Classes[r.Class], o.load(r.Class)
	for current, each := range map[*int]*int{&l.Requests: c.MaxRequests, &l.Tokens: c.MaxTokens,
		&l.CachedTokens: c.MaxCachedTokens} {
		if each != nil && *current >= *each*workers {
			return false
		}
	}
	work := float64(max(1, r.Tokens-min(r.CachedTokens, r.Tokens)))
	e := &entry{Request: r, id: id}
	switch c.Policy {
	case FCFS:
		e.score = max(r.Jump, 0) - r.Arrival
	case EDF:
		e.score = math.Inf(-1)
		if r.Deadline > 0 {
			e.score = -r.Deadline
		}
	case WSPT:
		e.score = (1 + max(r.Jump, 0)) / work
	}
	o.waiting = append(o.waiting, e)
	return true
}

// first returns the next request of a class: the best of the lanes' first requests for which a worker is ready.
func (o *oracle) first(class int, ready func(lane int) bool) *entry {
	lanes := map[int]*entry{}
	better := func(a, b *entry) bool {
		if a.StrictPriority != b.StrictPriority {
			return a.StrictPriority > b.StrictPriority
		}
		return a.score > b.score || a.score == b.score && a.id < b.id
	}
	for _, e := range o.waiting {
		if e.Class == class && (lanes[e.Lane] == nil || better(e, lanes[e.Lane])) {
			lanes[e.Lane] = e
		}
	}
	var best *entry
	for _, e := range lanes {
		if ready(e.Lane) && (best == nil || better(e, best)) {
			best = e
		}
	}
	return best
}

func (o *oracle) pop(ready func(lane int) bool) *entry {
	work := func(e *entry) int { return max(1, e.Tokens-min(e.CachedTokens, e.Tokens)) }
	take := func(e *entry) *entry {
		o.remove(e.id)
		if o.deficit[e.Class] -= work(e); o.load(e.Class).Requests == 0 {
			o.deficit[e.Class] = 0
		}
		o.cursor = (e.Class + 1) % len(o.deficit)
		if o.deficit[e.Class] > 0 {
			o.carry = e.Class
		}
		return e
	}
	carry := o.carry
	o.carry = -1
	if carry >= 0 {
		if e := o.first(carry, ready); e != nil && work(e) <= o.deficit[carry] {
			return take(e)
		}
	}
	// Round after round, one quantum at a time.
	for turn := 0; ; turn++ {
		any := false
		for i := range o.deficit {
			class := (o.cursor + i) % len(o.deficit)
			e := o.first(class, ready)
			if e == nil {
				continue
			}
			any = true
			if turn == 0 {
				if work(e) <= o.deficit[class] {
					return take(e)
				}
				o.deficit[class] += o.profile.Classes[class].Quantum
				if work(e) <= o.deficit[class] {
					return take(e)
				}
			}
		}
		if !any {
			return nil
		}
		if turn == 0 {
			continue
		}
		// Later rounds are complete: every class earns its quantum before any class spends.
		for class := range o.deficit {
			if o.first(class, ready) != nil {
				o.deficit[class] += o.profile.Classes[class].Quantum
			}
		}
		for i := range o.deficit {
			class := (o.cursor + i) % len(o.deficit)
			if e := o.first(class, ready); e != nil && work(e) <= o.deficit[class] {
				return take(e)
			}
		}
	}
}

func (o *oracle) remove(id int) bool {
	n := len(o.waiting)
	var class int
	o.waiting = slices.DeleteFunc(o.waiting, func(e *entry) bool {
		if e.id == id {
			class = e.Class
		}
		return e.id == id
	})
	if len(o.waiting) < n && o.load(class).Requests == 0 {
		o.deficit[class] = 0
	}
	return len(o.waiting) < n
}

// With random arrivals, departures and turns, the queue and the oracle give the same requests in the same order.
func TestQueueIsTheOracle(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 7))
		p := &Profile{}
		for i := range 1 + rng.IntN(4) {
			c := Class{
				Name:    fmt.Sprint("c", i),
				Policy:  []Policy{FCFS, EDF, WSPT}[rng.IntN(3)],
				Quantum: 1 + rng.IntN(40),
			}
			for _, limit := range []**int{&c.MaxRequests, &c.MaxTokens, &c.MaxCachedTokens} {
				if rng.IntN(4) == 0 {
					*limit = set(rng.IntN(60))
				}
			}
			p.Classes = append(p.Classes, c)
		}
		q, o := New[int](p, 1<<16), newOracle(p)
		items := map[int]*Item[int]{}
		blocked := map[int]bool{}
		for step := range 400 {
			switch rng.IntN(8) {
			case 0, 1, 2, 3:
				r := Request{
					Class:        rng.IntN(len(p.Classes)),
					Lane:         Any,
					Tokens:       rng.IntN(50),
					CachedTokens: rng.IntN(60),
					Arrival: float64(
						step / 3,
					),
					Jump:           float64(rng.IntN(12) - 3),
					Deadline:       float64(max(rng.IntN(12)-3, 0)),
					StrictPriority: uint32(rng.IntN(3) / 2),
				}
				if rng.IntN(3) == 0 {
					r.Lane = rng.IntN(3)
				}
				workers := 1 + rng.IntN(3)
				item, err := q.Push(r, workers, step)
				if pushed := o.push(r, workers, step); pushed != (err == nil) {
					t.Fatalf("seed %d, step %d: %v, the oracle took it: %v", seed, step, err, pushed)
				}
				if err == nil {
					items[step] = item
				}
			case 4:
				for id, item := range items {
					if got, want := q.Remove(item), o.remove(id); got != want {
						t.Fatalf("seed %d, step %d: removed %v, want %v", seed, step, got, want)
					}
					delete(items, id)
					break
				}
			case 5:
				blocked[rng.IntN(4)-1] = rng.IntN(2) == 0
			default:
				ready := func(lane int) bool { return !blocked[lane] }
				got, want := q.Pop(func(_ *Class, i *Item[int]) bool { return ready(i.Lane) }), o.pop(ready)
				if (got == nil) != (want == nil) || got != nil && got.Value != want.id {
					t.Fatalf("seed %d, step %d: popped %+v, want %+v", seed, step, got, want)
				}
				if got != nil {
					delete(items, got.Value)
					if q.Remove(got) {
						t.Fatal("removed what was popped")
					}
				}
			}
			waiting := 0
			for i := range p.Classes {
				if got, want := q.Load(i), o.load(i); got != want {
					t.Fatalf("seed %d, step %d: class %d holds %+v, want %+v", seed, step, i, got, want)
				}
				waiting += q.Load(i).Requests
			}
			if q.Len() != waiting || q.Len() != len(items) {
				t.Fatalf("seed %d, step %d: %d wait, want %d", seed, step, q.Len(), waiting)
			}
		}
	}
}

// Scores of dynamo-kv-router 1.6.1's policies, computed by hand.
func TestOrder(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		want   string
		of     []Request
	}{
		{FCFS, "abcd", []Request{{Arrival: 1}, {Arrival: 2}, {Arrival: 2}, {Arrival: 3}}},
		{FCFS, "cadb", []Request{{Arrival: 1}, {Arrival: 2}, {Arrival: 3, Jump: 2.5}, {Arrival: 3, Jump: 1.5}}},
		{FCFS, "cabd", []Request{{Arrival: 1}, {Arrival: 2, Jump: -9}, {Arrival: 3, StrictPriority: 1},
			{Arrival: 4, Jump: math.NaN()}}},
		{EDF, "dbca", []Request{{Deadline: 4}, {Deadline: 3}, {Deadline: 3}, {Deadline: 1}}},
		{EDF, "bac", []Request{{}, {Deadline: 9}, {Arrival: -9}}},
		{LCFS, "dbca", []Request{{Arrival: 1}, {Arrival: 2}, {Arrival: 2}, {Arrival: 3}}},
		{WSPT, "bcad", []Request{{Tokens: 100}, {Tokens: 10}, {Tokens: 100, Jump: 4}, {Tokens: 101}}},
		{WSPT, "cba", []Request{{Tokens: 100}, {Tokens: 1000, CachedTokens: 950},
			{Tokens: 1000, CachedTokens: 1 << 40}}},
		{WSPT, "bca", []Request{{Tokens: 1}, {Tokens: 900, StrictPriority: 2}, {Tokens: 1, StrictPriority: 1}}},
	} {
		q := New[string](Single(c.policy, nil), 10)
		for i, r := range c.of {
			r.Lane = Any
			if _, err := q.Push(r, 1, string(rune('a'+i))); err != nil {
				t.Fatal(err)
			}
		}
		got := ""
		for item := q.Pop(always[string]); item != nil; item = q.Pop(always[string]) {
			got += item.Value
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.policy, got, c.want)
		}
	}
}

func always[T any](*Class, *Item[T]) bool { return true }

// While both classes have requests, one with three times the quantum gets three times the tokens. An idle class does
// not accumulate deficit.
func TestClassesShareByQuantum(t *testing.T) {
	q := New[int](
		&Profile{Classes: []Class{{Name: "a", Policy: FCFS, Quantum: 300}, {Name: "b", Policy: FCFS, Quantum: 100}}},
		1<<16,
	)
	push := func(class, n int) {
		for range n {
			if _, err := q.Push(Request{Class: class, Lane: Any, Tokens: 50 + 150*class}, 1, class); err != nil {
				t.Fatal(err)
			}
		}
	}
	push(0, 500)
	for range 400 {
		q.Pop(always[int])
	}
	push(0, 4000)
	push(1, 4000)
	spent := [2]int{}
	for range 2000 {
		item := q.Pop(always[int])
		spent[item.Value] += item.Tokens
	}
	if ratio := float64(spent[0]) / float64(spent[1]); math.Abs(ratio-3) > 0.02 {
		t.Errorf("tokens %v: ratio %.3f, want 3", spent, ratio)
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		class Class
		r     Request
		taken int // by 3 workers
		kind  string
	}{
		{Class{}, Request{Tokens: 100}, 20, ""},
		{Class{MaxRequests: set(2)}, Request{}, 6, "requests"},
		// the request that crosses the limit is accepted
		{Class{MaxTokens: set(100)}, Request{Tokens: 70}, 5, "raw_isl_tokens"},
		{Class{MaxCachedTokens: set(10)}, Request{Tokens: 8, CachedTokens: 9}, 4, "cached_tokens"},
		{Class{MaxRequests: set(0)}, Request{}, 0, "requests"}, // whether or not a worker is ready
		{Class{MaxTokens: set(math.MaxInt)}, Request{Tokens: math.MaxInt / 30}, 20, ""},
	} {
		c.class.Name, c.class.Quantum, c.r.Lane = "k", 1, Any
		q := New[int](&Profile{Classes: []Class{c.class}}, 20)
		taken := 0
		var err error
		for err == nil {
			if _, err = q.Push(c.r, 3, 0); err == nil {
				taken++
			}
		}
		limit := (*LimitError)(nil)
		if taken != c.taken || (c.kind == "") != errors.Is(err, ErrFull) ||
			errors.As(err, &limit) && (limit.Kind != c.kind || limit.Class != "k") {
			t.Errorf("%+v: took %d, then %v; want %d and %s", c.class, taken, err, c.taken, c.kind)
		}
	}
}

func TestLimited(t *testing.T) {
	q := New[int](&Profile{Classes: []Class{{Name: "a", Quantum: 1, MaxTokens: set(0)}, {Name: "b", Quantum: 1}}}, 20)
	limit := (*LimitError)(nil)
	if err := q.Limited(0, 3); !errors.As(err, &limit) || *limit != (LimitError{"a", "raw_isl_tokens", 0, 0}) {
		t.Error(err)
	}
	if err := q.Limited(1, 3); err != nil {
		t.Error(err)
	}
}

// Requests of enormous cost and quanta neither overflow nor starve.
func TestExtremes(t *testing.T) {
	q := New[int](&Profile{Classes: []Class{{Name: "a", Quantum: maxNumber}, {Name: "b", Quantum: 1}}}, 100)
	for i := range 40 {
		if _, err := q.Push(Request{Class: i % 2, Lane: Any, Tokens: 1 << 40, Jump: math.Inf(1), Arrival: float64(i)},
			1, i); err != nil {
			t.Fatal(err)
		}
	}
	for left := 40; left > 0; left-- {
		if q.Pop(always[int]) == nil {
			t.Fatalf("nothing popped, %d left", left)
		}
	}
	if q.Pop(always[int]) != nil {
		t.Error("popped from an empty queue")
	}
}

func BenchmarkPushPop(b *testing.B) {
	p := &Profile{Classes: []Class{{Name: "a", Policy: WSPT, Quantum: 100}, {Name: "b", Policy: FCFS, Quantum: 10}}}
	q := New[int](p, 1<<20)
	for i := range 1 << 15 {
		q.Push(Request{Class: i % 2, Lane: Any, Tokens: i * 7919 % 1000, Arrival: float64(i)}, 1, i)
	}
	for i := 0; b.Loop(); i++ {
		q.Push(Request{Class: i % 2, Lane: Any, Tokens: i * 104729 % 1000, Arrival: float64(i)}, 1, i)
		q.Pop(always[int])
	}
}

// TestAhead: what has an earlier deadline goes before a request, at the class's share of the turns. The last of those
// that it would make late says when it could go; not those that are late anyway, and not where too many wait.
func TestAhead(t *testing.T) {
	times := Times{Soonest: 1, Own: .01, All: .005}
	near := func(x, want float64) bool { return math.Abs(x-want) < 1e-9 }
	p := &Profile{Classes: []Class{{Policy: EDF, Quantum: 1}, {Policy: FCFS, Quantum: 3}}}
	q := New[int](p, 1<<16)
	push := func(class, lane, tokens int, deadline float64) {
		t.Helper()
		if _, err := q.Push(Request{Class: class, Lane: lane, Tokens: tokens, Deadline: deadline}, 1, 0); err != nil {
			t.Fatal(err)
		}
	}
	want := func(deadline, begins, held float64) {
		t.Helper()
		r := Request{Tokens: 100, Deadline: deadline}
		if b, h := q.Ahead(&r, 10, times); !near(b, begins) || !near(h, held) {
			t.Errorf("deadline %v: begins after %v, held %v; want %v and %v", deadline, b, h, begins, held)
		}
	}
	want(12, 1, 0)
	push(0, Any, 100, 15)  // begins after 1, ends after 2
	push(0, 3, 100, 12.75) // before it, behind the next: begins after 1.5 and ends after 2.5, or late with 100 more
	push(0, Any, 100, 0)
	push(0, Any, 100, 11) // late anyway
	want(12, 1.5, 1.5)
	want(20, 2.5, 0)
	q = New[int](p, 1<<16)
	push(0, 3, 100, 12.25)
	push(0, Any, 100, 20)
	want(12, 1, 1)
	push(1, Any, 100, 0) // the other class has three quarters of the turns
	want(30, 5, 0)
	want(12.1, 1, 1)
	for range maxCompared {
		push(0, Any, 1, 40)
	}
	want(12.1, 1, 0)
}
