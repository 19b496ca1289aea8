// Package eject takes failing endpoints out of routing and brings them back: passive health checks, also known as
// outlier detection. It also holds operators' cordons.
//
// It owns the health of each endpoint: recent failures, ejections, the trial request that may end an ejection, and
// cordons. It sends no request, reads no page and chooses no worker. The router reports how requests ended, package
// pool/enginemetrics what the metrics page does, and package indexer/feed whether the event subscription holds. The
// router leaves out the workers that [View] excludes.
//
// The unit is the pool's endpoint, which is one engine process: its data-parallel ranks are ejected together. Endpoints
// behind one address (a shared frontend) are separate, each by its own name.
//
//	          failures in a row, failure share, page refused or silent
//	in  ───────────────────────────────────────────────────────────►  ejected
//	▲                                                                  │ the ejection time is over,
//	│ content of a response                                             ▼ and the metrics page does not say otherwise
//	└──────────────────────────────────────────────────────────────  trial: one request
//	                                     a failure: ejected, for twice as long
//
// The index keeps the blocks of an ejected endpoint: a failing process keeps its memory.
//
// Concurrency: everything is safe for concurrent use. View is read without a lock.
package eject

import (
	"cmp"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
)

// MaxTime bounds how long an ejection lasts.
const MaxTime = 60 * time.Second

// The window in which FailurePercent counts, and the fewest requests in it for a verdict.
const (
	window      = 10 // seconds
	minRequests = 10
)

// SilentAfter is how long an endpoint may leave a read of its metrics page unanswered before it is ejected, if no byte
// of any response comes from it meanwhile.
const SilentAfter = 5 * time.Second

// Cause says why a request, or an endpoint, failed. It is a metric's label.
type Cause string

// The causes. The first group are failures of requests.
const (
	Refused     Cause = "refused"    // no connection to the endpoint
	Reset       Cause = "reset"      // the connection ended before the response was complete
	ServerError Cause = "status_5xx" // 500, 502, 503 or 504 from the engine, or from a proxy that gives no details
	FirstByte   Cause = "first_byte" // no response headers in time
	Timeout     Cause = "timeout"    // the proxy gave up waiting for a response
	Retried     Cause = "retried"    // the proxy tried another endpoint after this one

	FailureShare Cause = "failure_percent" // Config.FailurePercent
	// the metrics page, on the endpoint's own port, refuses connections
	MetricsRefused Cause = "metrics_refused"
	MetricsSilent  Cause = "metrics_silent" // neither the metrics page nor anything else of the endpoint answers
	// the metrics page, on another port, refuses connections, and the event socket has closed
	ProcessGone Cause = "process_gone"
)

// Causes are all causes of ejections.
var Causes = []Cause{
	Refused,
	Reset,
	ServerError,
	FirstByte,
	Timeout,
	Retried,
	FailureShare,
	MetricsRefused,
	MetricsSilent,
	ProcessGone,
}

// advice says for each cause what it means and where to look.
var advice = map[Cause]string{
	Refused:     "it refuses connections: is the engine up, and is the endpoint's address right?",
	Reset:       "it broke connections off before responses were complete: see the engine's log",
	ServerError: "it answered 500, 502, 503 or 504: see the engine's log",
	FirstByte: "it sent no response headers within --eject-first-byte: see whether the engine hangs or is " +
		"overloaded",
	Timeout: "the proxy gave up waiting for it: see whether the engine hangs, or the proxy's timeout is too " +
		"short",
	Retried: "the proxy tried another endpoint after it, because it refused the connection, broke it off, or " +
		"answered 503: see the engine's log",
	FailureShare:   "more than --eject-failure-percent of its requests failed in 10 s: see the engine's log",
	MetricsRefused: "its metrics page refuses connections: is the engine up, and is the endpoint's address right?",
	MetricsSilent: "neither its metrics page nor any of its responses has brought a byte for 5 s: see whether the " +
		"engine hangs",
	ProcessGone: "its metrics page refuses connections, and its KV events have ended: is the engine up?",
}

// Standing says whether an endpoint gets requests.
type Standing int

// The standings.
const (
	In       Standing = iota
	Trial             // ejected, and the next request is the trial: see [Tracker.Claim]
	Ejected           // no requests, unless every endpoint of the model is ejected
	Cordoned          // no requests, because of an operator's cordon
)

// bucket counts the requests of one second.
type bucket struct {
	second          int64
	requests, fails int
}

// Endpoint is the health of one endpoint. The Tracker's mutex guards its fields, except lastByte.
type Endpoint struct {
	name, model string
	address     string           // host:port; "": it has none
	workers     []kvblock.Worker // its ranks; empty: it has left the pool
	lastByte    atomic.Int64     // when a response last brought a byte, Unix time in nanoseconds; 0: never

	consecutive int // failures since the last complete response
	// responses that broke off, while it is unknown whether the client or the endpoint did it
	unexplained int
	suspected   bool // what the view says of suspect
	buckets     [window]bucket

	ejected   bool
	down      bool // by its metrics page: no trial until the page answers
	share     bool // ejected for its failure share alone
	cause     Cause
	until     time.Time // a trial is allowed from then on
	lasted    time.Duration
	ejections int // in a row
	returned  time.Time
	trial     uint64 // number of the running trial; 0: none
	// number of the latest trial without response headers in time, whose response may still come; 0: none
	overdue  uint64
	page     enginemetrics.PageState
	cut      bool              // its event subscription broke and has not come back
	recheck  *time.Timer       // judges a silent page again; nil: no page was silent while responses brought bytes
	cordon   Cordon            // the operator's, set over the admin address
	declared pool.CordonSource // the pool's
}

// cordoned reports whether anything cordons the endpoint. The caller holds the Tracker's mutex.
func (e *Endpoint) cordoned() bool { return e.cordon != "" || e.declared != "" }

// Tracker holds the health of all endpoints. Create it with New.
type Tracker struct {
	cfg Config
	log *slog.Logger

	view atomic.Pointer[View] // nil: every endpoint is in

	mu      sync.Mutex // guards all below, and the fields of every Endpoint but lastByte
	byName  map[string]*Endpoint
	byRank  []*Endpoint // indexed by worker number; nil: none has it
	cordons map[string]storedCordon
	trials  uint64
}

// New returns a tracker without endpoints. Register it as a watcher of the pool before the pool's first update.
func New(cfg Config, log *slog.Logger) *Tracker {
	return &Tracker{cfg: cfg, log: log, byName: map[string]*Endpoint{}, cordons: map[string]storedCordon{}}
}

// View says which endpoints take no requests. It is immutable. A nil View excludes none.
type View struct {
	byRank []*exclusion // indexed by worker number; nil, or beyond its end: not excluded
}

type exclusion struct {
	cordoned, down, trial, suspect bool
	until                          time.Time
}

// Ejects reports whether failures have any effect.
func (t *Tracker) Ejects() bool { return t != nil && t.cfg.On }

// View returns the current view.
func (t *Tracker) View() *View {
	if t == nil {
		return nil
	}
	return t.view.Load()
}

// Of returns the standing of a worker at a time.
func (v *View) Of(w kvblock.Worker, now time.Time) Standing {
	if v == nil || int(w) >= len(v.byRank) || v.byRank[w] == nil {
		return In
	}
	switch x := v.byRank[w]; {
	case x.cordoned:
		return Cordoned
	case x.down, x.trial, x.suspect, now.Before(x.until):
		return Ejected
	}
	return Trial
}

// publish replaces the view by one of the current state. The caller holds t.mu.
func (t *Tracker) publish() {
	var next *View
	for _, e := range t.byName {
		if e.suspected = t.suspect(e); !e.ejected && !e.cordoned() && !e.suspected {
			continue
		}
		if next == nil {
			next = &View{byRank: make([]*exclusion, len(t.byRank))}
		}
		x := &exclusion{cordoned: e.cordoned(), down: e.down, trial: e.trial != 0, suspect: !e.ejected, until: e.until}
		for _, w := range e.workers {
			next.byRank[w] = x
		}
	}
	t.view.Store(next)
}

// WorkerJoined begins to follow a worker.
func (t *Tracker) WorkerJoined(w pool.Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byName[w.Name]
	if e == nil {
		e = &Endpoint{name: w.Name, model: w.Model, address: w.Address, cordon: t.cordons[w.Name].as}
		t.byName[w.Name] = e
	}
	was := e.cordoned() && len(e.workers) > 0
	e.declared = w.CordonedBy
	t.logCordon(e, was, false)
	e.workers = append(e.workers, w.Worker)
	if n := int(w.Worker) + 1; n > len(t.byRank) {
		t.byRank = append(t.byRank, make([]*Endpoint, n-len(t.byRank))...)
	}
	t.byRank[w.Worker] = e
	t.publish()
}

// WorkerLeft forgets a worker, and its endpoint with the last of its workers. A cordon stays with the name.
func (t *Tracker) WorkerLeft(w kvblock.Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.of(w)
	if e == nil {
		return
	}
	t.byRank[w] = nil
	e.workers = slices.DeleteFunc(e.workers, func(x kvblock.Worker) bool { return x == w })
	if len(e.workers) == 0 {
		delete(t.byName, e.name)
	}
	t.publish()
}

// Of returns the endpoint of a worker; nil if there is none, and for a nil tracker. Callers keep it to report how a
// request ended, because the worker's number may be reused by then.
func (t *Tracker) Of(w kvblock.Worker) *Endpoint {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.of(w)
}

// of is Of. The caller holds t.mu.
func (t *Tracker) of(w kvblock.Worker) *Endpoint {
	if int(w) < len(t.byRank) {
		return t.byRank[w]
	}
	return nil
}

// Claim begins the trial of a worker's endpoint and returns its number. ok is false if the endpoint's state has changed
// or another request has claimed the trial: then the caller must choose again.
func (t *Tracker) Claim(w kvblock.Worker) (trial uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.of(w)
	if e == nil || !e.ejected || e.down || e.trial != 0 || e.cordoned() || time.Now().Before(e.until) {
		return 0, false
	}
	t.trials++
	e.trial = t.trials
	t.publish()
	t.log.Debug("an ejected endpoint gets a trial request", "endpoint", e.name)
	return e.trial, true
}

// Abandon ends a trial without a result, because its client went away. The next request may be the next trial.
func (t *Tracker) Abandon(e *Endpoint, trial uint64) {
	if e == nil || trial == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.trial == trial {
		e.trial = 0
		t.publish()
	}
}

// Heard notes that a response just brought a byte from the endpoint.
func (e *Endpoint) Heard() {
	if e != nil {
		e.lastByte.Store(time.Now().UnixNano())
	}
}

// Works notes that a trial has brought content: the endpoint is no longer ejected.
func (t *Tracker) Works(e *Endpoint, trial uint64) {
	if e == nil || trial == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.works(e, trial)
}

// works is Works. The caller holds t.mu.
func (t *Tracker) works(e *Endpoint, trial uint64) {
	if !e.ejected || e.trial != trial && e.overdue != trial {
		return
	}
	e.ejected, e.down, e.share, e.trial, e.overdue, e.consecutive, e.returned = false, false, false, 0, 0, 0, time.Now()
	clear(e.buckets[:])
	t.publish()
	t.log.Info("an ejected endpoint takes requests again",
		"endpoint", e.name, "why", "a trial request was answered", "was_ejected_for", e.cause)
}

// Succeeded notes a complete response that is no failure. trial is the number of the request's trial; 0: none.
func (t *Tracker) Succeeded(e *Endpoint, trial uint64) {
	if e == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	e.count(now, false)
	e.consecutive = 0
	t.review(e)
	if trial != 0 {
		t.works(e, trial)
	}
	// After an endpoint has been back for as long as it was ejected, its next ejection is short again.
	if !e.ejected && e.ejections > 0 && now.Sub(e.returned) >= e.lasted {
		e.ejections = 0
	}
}

// suspect reports whether e would be ejected if all unexplained responses were failures. Then it gets no requests until
// they are explained. The caller holds t.mu.
func (t *Tracker) suspect(e *Endpoint) bool {
	return e.unexplained > 0 && e.consecutive+e.unexplained >= t.cfg.ConsecutiveFailures
}

// review publishes whether e is suspect, if that has changed and e has not left the pool. The caller holds t.mu.
func (t *Tracker) review(e *Endpoint) {
	if len(e.workers) > 0 && t.suspect(e) != e.suspected {
		t.publish()
	}
}

// BrokenOff notes a response that broke off. A call of Explained must follow once it is known who broke it off.
func (t *Tracker) BrokenOff(e *Endpoint) { t.changeUnexplained(e, 1) }

// Explained ends one BrokenOff. If it was a failure, the caller has called Failed before.
func (t *Tracker) Explained(e *Endpoint) { t.changeUnexplained(e, -1) }

func (t *Tracker) changeUnexplained(e *Endpoint, by int) {
	if e == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e.unexplained = max(e.unexplained+by, 0)
	t.review(e)
}

// Failed notes a failure of a request.
func (t *Tracker) Failed(e *Endpoint, trial uint64, cause Cause) {
	if e == nil || !t.cfg.On {
		return
	}
	if read := t.failed(e, trial, cause); read != nil && t.cfg.ReadPage != nil {
		t.cfg.ReadPage(*read)
	}
}

// failed is Failed, and returns the worker whose page should be read; nil: none.
func (t *Tracker) failed(e *Endpoint, trial uint64, cause Cause) (read *kvblock.Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(e.workers) == 0 {
		return nil // it has left the pool
	}
	now := time.Now()
	e.count(now, true)
	e.consecutive++
	switch {
	case e.ejected && (trial == 0 || e.trial != trial):
		return nil // of a request that began before the ejection
	case e.ejected: // the trial
		if cause == FirstByte {
			e.overdue = trial
		}
		t.eject(e, cause, now)
	case e.consecutive >= t.cfg.ConsecutiveFailures, e.cut && cause == Refused:
		t.eject(e, cause, now)
	case e.aboveShare(now, t.cfg.FailurePercent) && t.mayEjectForShare(e):
		t.eject(e, FailureShare, now)
	}
	t.review(e)
	first := e.workers[0]
	return &first
}

// count adds a request to the window.
func (e *Endpoint) count(now time.Time, failed bool) {
	second := now.Unix()
	b := &e.buckets[second%window]
	if b.second != second {
		*b = bucket{second: second}
	}
	if b.requests++; failed {
		b.fails++
	}
}

// aboveShare reports whether the window has enough requests and more than percent of them failed.
func (e *Endpoint) aboveShare(now time.Time, percent int) bool {
	requests, fails := 0, 0
	for i := range e.buckets {
		if b := &e.buckets[i]; now.Unix()-b.second < window {
			requests += b.requests
			fails += b.fails
		}
	}
	return requests >= minRequests && fails*100 > percent*requests
}

// mayEjectForShare reports whether one more endpoint of e's model may be ejected for its failure share alone. The
// caller holds t.mu.
func (t *Tracker) mayEjectForShare(e *Endpoint) bool {
	all, out := 0, 1
	for _, other := range t.byName {
		if other.model != e.model {
			continue
		}
		all++
		if other.ejected && other.share {
			out++
		}
	}
	return out*100 <= all*t.cfg.MaxPercent
}

// eject ejects e, each time in a row for longer. The caller holds t.mu.
func (t *Tracker) eject(e *Endpoint, cause Cause, now time.Time) {
	e.lasted = max(t.cfg.Time, min(t.cfg.Time<<min(e.ejections, 16), MaxTime))
	e.ejections++
	e.ejected, e.share, e.cause, e.trial, e.until = true, cause == FailureShare, cause, 0, now.Add(e.lasted)
	t.publish()
	if t.cfg.Ejected != nil {
		t.cfg.Ejected(cause)
	}
	next := any(e.lasted.String())
	if e.down {
		next = "when its metrics page answers"
	}
	t.log.Warn("endpoint ejected: it gets no requests until a trial request succeeds", "endpoint", e.name, "address",
		e.address, "cause", cause, "advice", advice[cause], "failures_in_a_row", e.consecutive, "ejections_in_a_row",
		e.ejections, "next_trial_in", next)
}

// PageRead notes the outcome of a read of a worker's metrics page. Call it at least when the outcome changes.
func (t *Tracker) PageRead(w kvblock.Worker, page enginemetrics.PageState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.of(w)
	if e == nil {
		return
	}
	e.page = page
	t.judge(e)
}

// Subscribed notes whether a worker's event subscription is connected.
func (t *Tracker) Subscribed(w kvblock.Worker, connected bool) {
	if t.subscribed(w, connected) && t.cfg.ReadPage != nil {
		t.cfg.ReadPage(w)
	}
}

// subscribed is Subscribed, and reports whether the worker's page should be read.
func (t *Tracker) subscribed(w kvblock.Worker, connected bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.of(w)
	if e == nil {
		return false
	}
	e.cut = !connected
	t.judge(e)
	return e.cut || e.down
}

// judge ejects or readmits e by its metrics page and its subscription. The caller holds t.mu.
func (t *Tracker) judge(e *Endpoint) {
	if !t.cfg.On {
		return
	}
	now := time.Now()
	var cause Cause
	switch {
	case e.page == enginemetrics.PageRefused:
		cause = MetricsRefused
	case e.page == enginemetrics.PageRefusedElsewhere && e.cut:
		cause = ProcessGone
	case e.page == enginemetrics.PageSilent:
		if left := SilentAfter - now.Sub(time.Unix(0, e.lastByte.Load())); left > 0 {
			t.judgeAfter(e, left)
		} else {
			cause = MetricsSilent
		}
	}
	switch {
	case cause != "" && !e.ejected:
		e.down = true
		t.eject(e, cause, now)
	case cause != "" && !e.down: // already ejected for failures; its page says that a trial would fail
		e.down, e.trial = true, 0
		t.publish()
	case cause == "" && e.down:
		e.down, e.until = false, now
		t.publish()
	}
}

// judgeAfter judges e again after a time. A page that stays silent is not reported again, so the end of the responses
// has to be found here. The caller holds t.mu.
func (t *Tracker) judgeAfter(e *Endpoint, after time.Duration) {
	if e.recheck != nil {
		e.recheck.Reset(after)
		return
	}
	e.recheck = time.AfterFunc(after, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if len(e.workers) > 0 {
			t.judge(e)
		}
	})
}

// Export exports how many workers are ejected and how many are cordoned.
func (t *Tracker) Export(m *metrics.Metrics) {
	metrics.Gauge(m, metrics.EjectedWorkers, func() int { ejected, _ := t.Counts(); return ejected })
	metrics.Gauge(m, metrics.CordonedWorkers, func() int { _, cordoned := t.Counts(); return cordoned })
}

// Counts returns how many workers are ejected, and how many are cordoned by an operator or the pool.
func (t *Tracker) Counts() (ejected, cordoned int) {
	if t == nil {
		return 0, 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.byName {
		if e.ejected {
			ejected += len(e.workers)
		}
		if e.cordoned() {
			cordoned += len(e.workers)
		}
	}
	return ejected, cordoned
}

// Health is the health of one endpoint, for people.
type Health struct {
	Name     string
	Model    string
	Workers  []kvblock.Worker  // empty: the name is cordoned, and no endpoint of the pool has it
	Cordon   Cordon            // the operator's
	Declared pool.CordonSource // the pool's
	Ejected  bool
	Cause    Cause         // of the latest ejection; empty: there was none
	Trial    time.Duration // until a trial is allowed; 0: now, or not by time
	Waits    string        // what else a trial waits for; empty: nothing
	InTrial  bool
	Fails    int // in a row
}

// Endpoints returns the health of all endpoints and the cordoned names that no endpoint has, sorted by name.
func (t *Tracker) Endpoints() []Health {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	all := make([]Health, 0, len(t.byName))
	for _, e := range t.byName {
		s := Health{
			Name:     e.name,
			Model:    e.model,
			Workers:  slices.Clone(e.workers),
			Cordon:   e.cordon,
			Declared: e.declared,
			Ejected:  e.ejected,
			Cause:    e.cause,
			InTrial:  e.trial != 0,
			Fails:    e.consecutive,
		}
		if e.ejected {
			s.Trial = max(e.until.Sub(now), 0)
			if e.down {
				s.Waits = "a response of its metrics page"
			}
		}
		all = append(all, s)
	}
	for name, c := range t.cordons {
		if t.byName[name] == nil {
			all = append(all, Health{Name: name, Cordon: c.as})
		}
	}
	slices.SortFunc(all, func(a, b Health) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
