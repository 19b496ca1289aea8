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
	"errors"
	"fmt"
	"math"
)

// Policy is the order within a class. In every policy a higher strict priority goes first, and of two equal requests
// the earlier one.
type Policy string

// The policies. A request's jump is how far its priority lifts it, at least 0.
const (
	FCFS Policy = "fcfs" // first come, first served: a jump of 1 counts as one second of waiting
	LCFS Policy = "lcfs" // last come, first served; for comparisons, in Dynamo as well
	WSPT Policy = "wspt" // shortest work first: uncached tokens, divided by 1 + jump
)

// Valid reports whether p is one of the policies.
func (p Policy) Valid() bool { return p == FCFS || p == LCFS || p == WSPT }

// score returns what the class is sorted by, highest first. arrival is in seconds.
func (p Policy) score(arrival, jump float64, cost int) float64 {
	jump = max(jump, 0)
	if math.IsNaN(jump) {
		jump = 0
	}
	arrival = max(arrival, 0)
	switch p {
	case LCFS:
		return jump + arrival
	case WSPT:
		return (1 + jump) / float64(cost)
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
}

// cost returns the tokens that a turn is charged for, at least 1, so that every request takes part in turns.
func (r *Request) cost() int { return max(r.Tokens-r.cached(), 1) }

func (r *Request) cached() int { return min(r.CachedTokens, r.Tokens) }

// Item is a request that waits, or has waited.
type Item[T any] struct {
	Request
	Value T

	score    float64
	sequence uint64
	lane     *lane[T]
	index    int // in lane; -1: it no longer waits
}

// before reports whether a goes before b, both of one class.
func (a *Item[T]) before(b *Item[T]) bool {
	switch {
	case a.StrictPriority != b.StrictPriority:
		return a.StrictPriority > b.StrictPriority
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
	return fmt.Sprintf(
		"policy class %q: the queue holds %d %s, and its limit is %d",
		e.Class,
		e.Current,
		e.Kind,
		e.Limit,
	)
}

// Queue holds the requests that wait. Make one with New.
//
// Push and Remove take logarithmic time. Pop also looks at the first request of every lane: one for each class, and one
// for each worker that the class has pinned requests for.
type Queue[T any] struct {
	classes  []class[T]
	cursor   int // the class that is asked first
	carry    int // the class whose turn continues; -1: none
	sequence uint64
	length   int
	bound    int
	heads    []*Item[T] // indexed like classes; scratch memory of Pop
}

type class[T any] struct {
	*Class
	shared  lane[T]          // of requests that any worker may take
	pinned  map[int]*lane[T] // by worker; none of them is empty
	load    Load
	deficit int // tokens that the class may still spend in this round
}

// New returns an empty queue of the profile's classes, for at most bound requests.
func New[T any](p *Profile, bound int) *Queue[T] {
	q := &Queue[T]{
		classes: make([]class[T], len(p.Classes)),
		carry:   -1,
		bound:   bound,
		heads:   make([]*Item[T], len(p.Classes)),
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
	item := &Item[T]{Request: r, Value: value, score: c.Policy.score(r.Arrival, r.Jump, r.cost()), sequence: q.sequence}
	q.sequence++
	item.lane = &c.shared
	if r.Lane != Any {
		if c.pinned[r.Lane] == nil {
			c.pinned[r.Lane] = &lane[T]{}
		}
		item.lane = c.pinned[r.Lane]
	}
	item.lane.push(item)
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

// Remove removes a request; false if it does not wait any more.
func (q *Queue[T]) Remove(item *Item[T]) bool {
	if item.index < 0 {
		return false
	}
	c := &q.classes[item.Class]
	item.lane.remove(item.index)
	item.index = -1
	if item.lane == c.pinned[item.Lane] && len(item.lane.items) == 0 {
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
			rounds = min(rounds, (head.cost()-c.deficit+c.Quantum-1)/c.Quantum)
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
	return q.heads[i] != nil && q.heads[i].cost() <= q.classes[i].deficit
}

func (q *Queue[T]) take(i int) *Item[T] {
	c, item := &q.classes[i], q.heads[i]
	q.cursor = (i + 1) % len(q.classes)
	c.deficit -= item.cost()
	q.Remove(item)
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
	if len(c.shared.items) > 0 && ready(c.Class, c.shared.items[0]) {
		best = c.shared.items[0]
	}
	for _, l := range c.pinned {
		if first := l.items[0]; (best == nil || first.before(best)) && ready(c.Class, first) {
			best = first
		}
	}
	return best
}

// lane is a heap: items[0] goes first.
type lane[T any] struct{ items []*Item[T] }

func (l *lane[T]) push(item *Item[T]) {
	l.items = append(l.items, item)
	item.index = len(l.items) - 1
	l.up(item.index)
}

func (l *lane[T]) remove(i int) {
	last := len(l.items) - 1
	l.items[i] = l.items[last]
	l.items[i].index = i
	l.items[last] = nil
	l.items = l.items[:last]
	if i < last && !l.up(i) {
		l.down(i)
	}
}

func (l *lane[T]) up(i int) (moved bool) {
	for i > 0 {
		parent := (i - 1) / 2
		if !l.items[i].before(l.items[parent]) {
			break
		}
		l.swap(i, parent)
		i, moved = parent, true
	}
	return moved
}

func (l *lane[T]) down(i int) {
	for {
		first := 2*i + 1
		if first >= len(l.items) {
			return
		}
		if second := first + 1; second < len(l.items) && l.items[second].before(l.items[first]) {
			first = second
		}
		if !l.items[first].before(l.items[i]) {
			return
		}
		l.swap(i, first)
		i = first
	}
}

func (l *lane[T]) swap(i, j int) {
	l.items[i], l.items[j] = l.items[j], l.items[i]
	l.items[i].index, l.items[j].index = i, j
}
