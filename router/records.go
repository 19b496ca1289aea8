package router

import (
	"cmp"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"kvepp/router/ladder"
)

// Outcome is what became of a request.
type Outcome struct {
	Status   string // HTTP status of the response; empty: there was none
	Complete bool   // the response's end was seen
	// TTFT is the time from the request's headers to the first content of a streamed response. ITL is the mean time
	// between its tokens. 0: not known.
	TTFT, ITL time.Duration
	Duration  time.Duration // from the request's headers to the end
	// PromptTokens and Tokens, of the response, are what the engine reports or kvepp counts; 0: not known.
	PromptTokens, Tokens int
	CachedTokens         int // as the engine reports; -1: it does not
	// Climb has the rungs of the hit-rate ladder. The zero value: there is no ladder.
	Climb ladder.Climb
}

// maxRecordBytes bounds the memory of the kept decisions, which grows with the number of candidates.
const maxRecordBytes = 32 << 20

// records keeps the latest decisions, and hands ended ones to followers.
type records struct {
	mu        sync.Mutex // guards all below
	ring      []*Record  // nil: none is kept
	next      int        // index in ring of the next record
	kept      int        // how many of the ring are set
	bytes     int        // about what they take
	running   int        // bytes of the records that routes keep until their requests end
	numbered  uint64     // records so far
	followers map[*Follower]struct{}
}

// add keeps a record, in place of the oldest ones.
func (r *records) add(record *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept == len(r.ring) {
		r.dropOldest()
	}
	r.numbered++
	record.slot, record.number = r.next, r.numbered
	r.ring[r.next] = record
	r.next = (r.next + 1) % len(r.ring)
	r.kept++
	for r.bytes += record.bytes(); r.bytes > maxRecordBytes && r.kept > 1; {
		r.dropOldest()
	}
}

func (r *records) dropOldest() {
	oldest := (r.next - r.kept + len(r.ring)) % len(r.ring)
	r.bytes -= r.ring[oldest].bytes()
	r.ring[oldest] = nil
	r.kept--
}

// bytes returns about how much memory a record takes.
func (r *Record) bytes() int {
	costs := len(r.Costs)
	if r.Prefill != nil {
		costs += len(r.Prefill.Costs)
	}
	return int(unsafe.Sizeof(*r)+unsafe.Sizeof(Outcome{})) + costs*int(unsafe.Sizeof(Cost{})) +
		8*cap(r.chain) + len(r.RequestID) + len(r.Path) + len(r.Model) + len(r.LoRA) + len(r.Error)
}

// keep has a route keep its record until its request ends. Beyond maxRecordBytes of all routes, the route keeps neither
// the record's costs nor its own.
func (r *records) keep(route *Route, record *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if route.record = record; r.running+record.bytes() > maxRecordBytes {
		thin := *record
		thin.dropCosts()
		thin.chain = nil
		route.record = &thin
		route.dropCosts()
	}
	route.kept = route.record.bytes()
	r.running += route.kept
}

// dropCosts releases the candidates' costs. Decisions share them, so their memory stays unchanged.
func (d *Decision) dropCosts() {
	d.Costs, d.Weights = nil, nil
	if d.Prefill != nil {
		x := *d.Prefill
		x.Costs, x.Weights = nil, nil
		d.Prefill = &x
	}
}

// change replaces a route's record by a changed copy, because records are immutable, and returns the copy; nil without
// a record. While the record is among the latest, the copy has the costs that the route may not keep.
func (r *records) change(route *Route, change func(*Record)) *Record {
	if route.record == nil {
		return nil
	}
	changed := *route.record
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&changed)
	whole := r.ring[changed.slot]
	switch {
	case whole == nil || whole.number != changed.number:
		whole = &changed
	case whole == route.record:
		whole = &changed
		r.ring[changed.slot] = whole
	default:
		copied := *whole
		change(&copied)
		whole = &copied
		r.ring[changed.slot] = whole
	}
	route.record = &changed
	return whole
}

// setServedBy stores the endpoint that answered a request in the request's record. The proxy reports it once.
func (r *records) setServedBy(route *Route) {
	if route.record != nil && route.record.ServedBy.Outcome == "" {
		r.change(route, func(record *Record) {
			record.ServedBy = route.ServedBy
			record.elsewhere = route.elsewhere
		})
	}
}

// end stores what became of a request in its record, and hands the record to the followers.
func (r *records) end(route *Route, o *Outcome) {
	if record := r.change(route, func(record *Record) { record.Outcome = o }); record != nil {
		r.publish(record)
		r.mu.Lock()
		r.running -= route.kept
		r.mu.Unlock()
	}
}

// Query selects records. The zero value selects all.
type Query struct {
	RequestID, Worker, Model, Session string // empty: any. Worker is a name, or NAME/RANK
	Reason                            Reason
	Status                            string // of the response: "404", or "4xx" for all from 400 to 499
	Cold                              bool   // the chosen worker had none of the prompt cached
	Wrong                             bool   // the chosen worker reports another number of cached tokens than predicted
	// Slow is the least time to the first token, or in all if that is not known.
	Slow time.Duration
}

// selects reports whether the query selects a record.
func (q *Query) selects(r *Record) bool {
	o := r.Outcome
	switch {
	case q.RequestID != "" && r.RequestID != Clip(q.RequestID),
		q.Model != "" && r.Model != q.Model,
		q.Session != "" && r.Session != q.Session,
		q.Reason != "" && r.Reason != q.Reason,
		q.Worker != "" && !r.isOf(q.Worker),
		q.Cold && (r.Error != "" || r.PredictedCachedTokens > 0):
		return false
	case q.Status == "" && !q.Wrong && q.Slow == 0:
		return true
	case o == nil:
		return false
	case q.Wrong && (o.CachedTokens < 0 || o.CachedTokens == r.PredictedCachedTokens || r.elsewhere),
		q.Slow > 0 && cmp.Or(o.TTFT, o.Duration) < q.Slow:
		return false
	}
	hundreds, isClass := strings.CutSuffix(q.Status, "xx")
	return q.Status == "" || o.Status == q.Status ||
		isClass && len(o.Status) == 3 && strings.HasPrefix(o.Status, hundreds)
}

// isOf reports whether a worker computed the prompt or generated the response.
func (r *Record) isOf(worker string) bool {
	name, rank, _ := strings.Cut(worker, "/")
	is := func(n string, k uint32) bool {
		return n == name && (rank == "" || rank == strconv.FormatUint(uint64(k), 10))
	}
	return r.Error == "" && (is(r.Name, r.Rank) || r.Prefill != nil && is(r.Prefill.Name, r.Prefill.Rank))
}

// Records returns at most n of the latest decisions that a query selects, the newest first. Records do not change.
// Without Config.Keep there are none.
func (r *Router) Records(n int, q Query) []*Record {
	r.records.mu.Lock()
	defer r.records.mu.Unlock()
	var out []*Record
	size := len(r.records.ring)
	for i := 1; i <= r.records.kept && len(out) < n; i++ {
		if record := r.records.ring[(r.records.next-i+size)%size]; q.selects(record) {
			out = append(out, record)
		}
	}
	return out
}

const (
	// MaxFollowers is how many followers there may be at once.
	MaxFollowers = 16

	followerQueue = 256 // records that wait for one follower
)

// Follower gets each record when its request has ended.
type Follower struct {
	// C has the records that the query selects.
	C       <-chan *Record
	to      chan<- *Record
	query   Query
	pause   time.Duration // least time between two records; 0: none
	latest  time.Time     // when the latest record was sent; guarded by records.mu
	missed  int           // since the last call of Missed; guarded by records.mu
	records *records
}

// Follow returns a new follower; nil if there are MaxFollowers, or if no decisions are kept. It gets at most so many
// records a second, and misses the others; 0: no limit. Call Close at its end.
func (r *Router) Follow(q Query, perSecond int) *Follower {
	r.records.mu.Lock()
	defer r.records.mu.Unlock()
	if len(r.records.followers) >= MaxFollowers || len(r.records.ring) == 0 {
		return nil
	}
	c := make(chan *Record, followerQueue)
	f := &Follower{C: c, to: c, query: q, records: &r.records}
	if perSecond > 0 {
		f.pause = time.Second / time.Duration(perSecond)
	}
	if r.records.followers == nil {
		r.records.followers = map[*Follower]struct{}{}
	}
	r.records.followers[f] = struct{}{}
	return f
}

// Close ends the follower.
func (f *Follower) Close() {
	f.records.mu.Lock()
	defer f.records.mu.Unlock()
	delete(f.records.followers, f)
}

// Missed returns how many records the follower has not got since the last call, because its reader is too slow, or
// because they came faster than its limit.
func (f *Follower) Missed() (n int) {
	f.records.mu.Lock()
	defer f.records.mu.Unlock()
	n, f.missed = f.missed, 0
	return n
}

// publish hands the record of an ended request to the followers. It never waits.
func (r *records) publish(record *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for f := range r.followers {
		if !f.query.selects(record) {
			continue
		}
		if f.pause > 0 {
			now := time.Now()
			if now.Sub(f.latest) < f.pause {
				f.missed++
				continue
			}
			f.latest = now
		}
		select {
		case f.to <- record:
		default:
			f.missed++
		}
	}
}
