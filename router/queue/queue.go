// Package queue decides which of the requests that wait for a worker goes next, and has them wait.
//
// It owns policy classes, the order within each, the sharing of turns between classes by deficit round robin, the
// limits above which requests are refused, the parser of Dynamo's policy file, and the waiting room of `kvepp serve`
// and `kvepp select`. It never chooses a worker: a room's owner does, and says whether a worker is ready for a request.
//
// Concurrency: a Room is safe for concurrent use. A Queue has no goroutine, lock or clock; its owner locks it. A
// Profile is immutable.
//
// Source: dynamo-kv-router 1.6.1, scheduling: policy_config and policy_queue.
package queue

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
)

// Policy is the order within a class. In every policy a higher strict priority goes first, and of two equal requests
// the earlier one.
type Policy string

// The policies. A request's jump is how far its priority lifts it, at least 0.
const (
	FCFS Policy = "fcfs" // first come, first served: a jump of 1 counts as one second of waiting
	LCFS Policy = "lcfs" // last come, first served; for comparisons, in Dynamo as well
	WSPT Policy = "wspt" // shortest work first: uncached tokens, divided by 1 + jump
	EDF  Policy = "edf"  // the earliest deadline first, then requests without one
)

// Valid reports whether p is one of the policies.
func (p Policy) Valid() bool { return slices.Contains(policies, string(p)) }

// policies are all of them.
var policies = []string{string(FCFS), string(WSPT), string(EDF), string(LCFS)}

// score returns what the class is sorted by, highest first.
func (p Policy) score(r *Request) float64 {
	jump := max(r.Jump, 0)
	if math.IsNaN(jump) {
		jump = 0
	}
	arrival := max(r.Arrival, 0)
	switch p {
	case LCFS:
		return jump + arrival
	case WSPT:
		return (1 + jump) / float64(r.Cost())
	case EDF:
		if r.Deadline == 0 {
			return math.Inf(-1)
		}
		return -r.Deadline
	}
	return jump - arrival
}

// Any is the lane of requests that any worker may take.
const Any = -1

// Request is what the queue needs to know of a request.
type Request struct {
	Class        int // of the profile: Profile.Class
	Lane         int // the one worker that may take it; Any: all may
	Tokens       int // of its prompt
	CachedTokens int // the most of them that a worker has cached; counts at most as Tokens

	Arrival        float64 // seconds since a moment that is the same for all requests
	Jump           float64 // priority; below 0 counts as 0
	StrictPriority uint32
	Deadline       float64 // of its first token, like Arrival; 0: none
	Tenant         Tenant  // who sent it; see Entry.SetTenant

	// Only Bands read these.
	Priority int
	Bytes    int // of its body
}

// Cost returns the tokens that a turn is charged for, at least 1, so that every request takes part in turns.
func (r *Request) Cost() int { return max(r.Tokens-r.cached(), 1) }

func (r *Request) cached() int { return min(r.CachedTokens, r.Tokens) }

// Item is a request that waits, or has waited.
type Item[T any] struct {
	Request
	Value T

	score    float64
	sequence uint64
	lane     *lane[T]
	flow     *flow[T] // in lane
	index    int      // in flow; -1: it no longer waits
}

// before reports whether a goes before b, both of one class.
func (a *Item[T]) before(b *Item[T]) bool {
	switch {
	case a.Priority != b.Priority:
		return a.Priority > b.Priority
	case a.StrictPriority != b.StrictPriority:
		return a.StrictPriority > b.StrictPriority
	case a.flow.tenant.served != b.flow.tenant.served:
		return a.flow.tenant.served < b.flow.tenant.served
	case a.score != b.score:
		return a.score > b.score
	}
	return a.sequence < b.sequence
}

// Load is the sum of what waits in one class.
type Load struct{ Requests, Tokens, CachedTokens int }

// ErrFull says that the queue is at its bound.
var ErrFull = errors.New("the queue is full")

// LimitError says that a class is at one of its limits.
type LimitError struct {
	Class          string
	Kind           string // requests, raw_isl_tokens or cached_tokens
	Current, Limit int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("policy class %q: the queue holds %d %s, and its limit is %d",
		e.Class, e.Current, e.Kind, e.Limit)
}

// Queue holds the requests that wait. Make one with New.
//
// Push and Remove take logarithmic time, beside a look at the lane's tenants. Pop also looks at the first request of
// every tenant in every lane: one lane for each class, and one for each worker that the class has pinned requests for.
type Queue[T any] struct {
	classes  []class[T]
	cursor   int // the class that is asked first
	carry    int // the class whose turn continues; -1: none
	sequence uint64
	length   int
	bound    int
	heads    []*Item[T] // indexed like classes; scratch memory of Pop

	nameless tenant // of requests whose tenant is not known, or does not count
	bands    *Bands // nil: none
	byBand   map[int]*bandLoad
	all      bandLoad
}

type class[T any] struct {
	*Class
	shared  lane[T]          // of requests that any worker may take
	pinned  map[int]*lane[T] // by worker; none of them is empty
	load    Load
	deficit int // tokens that the class may still spend in this round
	ledger  ledger
}

// New returns an empty queue of the profile's classes, for at most bound requests.
func New[T any](p *Profile, bound int) *Queue[T] {
	q := &Queue[T]{
		classes: make([]class[T], len(p.Classes)),
		carry:   -1,
		bound:   bound,
		heads:   make([]*Item[T], len(p.Classes)),
		bands:   p.Bands,
		byBand:  map[int]*bandLoad{},
	}
	for i := range q.classes {
		q.classes[i] = class[T]{Class: &p.Classes[i], pinned: map[int]*lane[T]{}}
	}
	return q
}

// Len returns how many requests wait.
func (q *Queue[T]) Len() int { return q.length }

// Load returns what waits in a class.
func (q *Queue[T]) Load(class int) Load { return q.classes[class].load }

// Push adds a request. The class's limits are for each of workers. They are compared with what waits already, so the
// request that crosses a limit is still accepted. Push refuses requests of a class that [Class.Rejects]: the caller
// sends them on or refuses them at once, depending on whether a worker is ready.
//
// Errors: ErrFull, *LimitError.
func (q *Queue[T]) Push(r Request, workers int, value T) (*Item[T], error) {
	c := &q.classes[r.Class]
	if q.length >= q.bound {
		return nil, ErrFull
	}
	if err := q.Limited(r.Class, workers); err != nil {
		return nil, err
	}
	score := c.Policy.score(&r)
	if q.bands != nil {
		var err error
		if score, err = q.bands.admit(q.bands.load(q.byBand, r.Priority), &q.all, &r); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFull, err)
		}
	}
	item := &Item[T]{Request: r, Value: value, score: score, sequence: q.sequence}
	q.sequence++
	item.lane = &c.shared
	if r.Lane != Any {
		if c.pinned[r.Lane] == nil {
			c.pinned[r.Lane] = &lane[T]{}
		}
		item.lane = c.pinned[r.Lane]
	}
	who := &q.nameless
	if r.Tenant != 0 {
		who = q.ledgerOf(&r).of(r.Tenant)
	}
	who.enter()
	item.lane.push(item, who)
	q.length++
	c.load.Requests++
	c.load.Tokens += r.Tokens
	c.load.CachedTokens += r.cached()
	return item, nil
}

// Limited returns the first limit that a class has reached, as a *LimitError; nil: none.
func (q *Queue[T]) Limited(class, workers int) error {
	c := &q.classes[class]
	for _, l := range []struct {
		kind    string
		current int
		each    *int
	}{{"requests", c.load.Requests, c.MaxRequests}, {"raw_isl_tokens", c.load.Tokens, c.MaxTokens},
		{"cached_tokens", c.load.CachedTokens, c.MaxCachedTokens}} {
		if l.each == nil {
			continue
		}
		limit := math.MaxInt
		if *l.each == 0 || workers < math.MaxInt / *l.each {
			limit = *l.each * workers
		}
		if l.current >= limit {
			return &LimitError{Class: c.Name, Kind: l.kind, Current: l.current, Limit: limit}
		}
	}
	return nil
}

// Times are what the workers need for prompts, in seconds.
type Times struct {
	Soonest float64 // until one of them would begin with a further prompt
	Own     float64 // that one of them takes for a token
	All     float64 // that all of them together take for a token
}

// maxCompared bounds how many waiting requests an arrival is compared with one by one.
const maxCompared = 1024

// Ahead says what a request with a deadline has to wait for, by what it and others wait for now: the seconds until one
// of the workers can begin with it, behind the requests of its class with earlier deadlines. held is the seconds until
// the last request begins that would be late because of it, 0 without one; those that are late anyway do not count. now
// is like Request.Arrival.
func (q *Queue[T]) Ahead(r *Request, now float64, t Times) (begins, held float64) {
	quanta, own := 0, &q.classes[r.Class]
	for i := range q.classes {
		if c := &q.classes[i]; c == own || c.load.Requests > 0 {
			quanta += c.Quantum
		}
	}
	t.All *= float64(quanta) / float64(own.Quantum) // its share of the turns
	var waiting []*Item[T]
	for _, l := range append(slices.Collect(maps.Values(own.pinned)), &own.shared) {
		for _, f := range l.flows { // one: EDF knows no tenants
			for _, item := range f.items {
				if item.Deadline > 0 {
					waiting = append(waiting, item)
				}
			}
		}
	}
	many := len(waiting) > maxCompared
	if !many {
		slices.SortFunc(waiting, func(a, b *Item[T]) int { return cmp.Compare(a.Deadline, b.Deadline) })
	}
	begins = t.Soonest
	next, delay := t.Soonest, t.All*float64(r.Cost())
	for _, item := range waiting {
		left := item.Deadline - now - next - t.Own*float64(item.Cost())
		if !many && item.Deadline > r.Deadline && left >= 0 && left < delay {
			held = next
		}
		next += t.All * float64(item.Cost())
		if item.Deadline <= r.Deadline {
			begins += t.All * float64(item.Cost())
		}
	}
	return begins, held
}

// Remove removes a request; false if it does not wait any more.
func (q *Queue[T]) Remove(item *Item[T]) bool {
	return q.remove(item, false)
}

// remove removes a request that has its turn, or leaves without it.
func (q *Queue[T]) remove(item *Item[T], taken bool) bool {
	if item.index < 0 {
		return false
	}
	if q.bands != nil {
		q.bands.leave(q.byBand[item.Priority], &q.all, &item.Request)
	}
	c := &q.classes[item.Class]
	item.flow.tenant.leave(item.Cost(), taken)
	item.lane.remove(item)
	if item.lane == c.pinned[item.Lane] && len(item.lane.flows) == 0 {
		delete(c.pinned, item.Lane)
	}
	q.length--
	c.load.Requests--
	c.load.Tokens -= item.Tokens
	c.load.CachedTokens -= item.cached()
	if c.load.Requests == 0 {
		c.deficit = 0
	}
	return true
}

// Pop removes and returns the request that goes next; nil: none. ready says whether a worker is ready for a request
// that is the first of its lane. Pop may call it several times for the same request.
//
// Classes share turns by deficit round robin: in each round a class may spend its quantum, in tokens of work, and what
// it has left from earlier rounds while more of its requests wait.
func (q *Queue[T]) Pop(ready func(*Class, *Item[T]) bool) *Item[T] {
	carried := q.carry
	q.carry = -1
	if q.length == 0 {
		return nil
	}
	clear(q.heads)
	if carried >= 0 {
		q.heads[carried] = q.classes[carried].head(ready)
		if q.affordable(carried) {
			return q.take(carried)
		}
	}
	some := false
	for offset := range q.classes {
		i := (q.cursor + offset) % len(q.classes)
		c := &q.classes[i]
		if i != carried {
			q.heads[i] = c.head(ready)
		}
		if q.heads[i] == nil {
			continue
		}
		if some = true; q.affordable(i) { // with its rest, before it earns more
			return q.take(i)
		}
		if c.earn(1); q.affordable(i) {
			return q.take(i)
		}
	}
	if !some {
		return nil
	}
	// No class can pay after one round. Skip to the first round after which one can.
	rounds := math.MaxInt
	for i, head := range q.heads {
		if c := &q.classes[i]; head != nil {
			rounds = min(rounds, (head.Cost()-c.deficit+c.Quantum-1)/c.Quantum)
		}
	}
	for i, head := range q.heads {
		if head != nil {
			q.classes[i].earn(rounds)
		}
	}
	for offset := range q.classes {
		if i := (q.cursor + offset) % len(q.classes); q.affordable(i) {
			return q.take(i)
		}
	}
	return nil
}

// affordable reports whether the class has a ready request and enough deficit for it.
func (q *Queue[T]) affordable(i int) bool {
	return q.heads[i] != nil && q.heads[i].Cost() <= q.classes[i].deficit
}

func (q *Queue[T]) take(i int) *Item[T] {
	c, item := &q.classes[i], q.heads[i]
	q.cursor = (i + 1) % len(q.classes)
	c.deficit -= item.Cost()
	q.remove(item, true)
	if c.deficit > 0 {
		q.carry = i
	}
	clear(q.heads) // keep no request from the garbage collector
	return item
}

// maxDeficit keeps sums in range. No request costs as much.
const maxDeficit = math.MaxInt / 4

// earn adds the quantum this many times.
func (c *class[T]) earn(rounds int) {
	if rounds > (maxDeficit-c.deficit)/c.Quantum {
		c.deficit = maxDeficit
		return
	}
	c.deficit += rounds * c.Quantum
}

// head returns the first of the class's ready requests. A request that is not ready blocks its lane.
func (c *class[T]) head(ready func(*Class, *Item[T]) bool) *Item[T] {
	var best *Item[T]
	if first := c.shared.first(); first != nil && ready(c.Class, first) {
		best = first
	}
	for _, l := range c.pinned {
		if first := l.first(); (best == nil || first.before(best)) && ready(c.Class, first) {
			best = first
		}
	}
	return best
}

// lane holds the requests of a class that the same workers may take.
type lane[T any] struct{ flows []*flow[T] } // none of them is empty

// flow holds those of one tenant. It is a heap: items[0] goes first.
type flow[T any] struct {
	tenant *tenant
	items  []*Item[T]
}

// first returns the request that goes first; nil: there is none.
func (l *lane[T]) first() (best *Item[T]) {
	for _, f := range l.flows {
		if best == nil || f.items[0].before(best) {
			best = f.items[0]
		}
	}
	return best
}

func (l *lane[T]) push(item *Item[T], of *tenant) {
	i := slices.IndexFunc(l.flows, func(f *flow[T]) bool { return f.tenant == of })
	if i < 0 {
		i = len(l.flows)
		l.flows = append(l.flows, &flow[T]{tenant: of})
	}
	f := l.flows[i]
	item.flow, item.index = f, len(f.items)
	f.items = append(f.items, item)
	f.up(item.index)
}

func (l *lane[T]) remove(item *Item[T]) {
	f := item.flow
	f.remove(item.index)
	if item.index = -1; len(f.items) == 0 {
		i, last := slices.Index(l.flows, f), len(l.flows)-1
		l.flows[i], l.flows[last] = l.flows[last], nil
		l.flows = l.flows[:last]
	}
}

func (f *flow[T]) remove(i int) {
	last := len(f.items) - 1
	f.items[i] = f.items[last]
	f.items[i].index = i
	f.items[last] = nil
	f.items = f.items[:last]
	if i < last && !f.up(i) {
		f.down(i)
	}
}

func (f *flow[T]) up(i int) (moved bool) {
	for i > 0 {
		parent := (i - 1) / 2
		if !f.items[i].before(f.items[parent]) {
			break
		}
		f.swap(i, parent)
		i, moved = parent, true
	}
	return moved
}

func (f *flow[T]) down(i int) {
	for {
		first := 2*i + 1
		if first >= len(f.items) {
			return
		}
		if second := first + 1; second < len(f.items) && f.items[second].before(f.items[first]) {
			first = second
		}
		if !f.items[first].before(f.items[i]) {
			return
		}
		f.swap(i, first)
		i = first
	}
}

func (f *flow[T]) swap(i, j int) {
	f.items[i], f.items[j] = f.items[j], f.items[i]
	f.items[i].index, f.items[j].index = i, j
}
