package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/router/admission"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// Config is one variant of a replay.
type Config struct {
	// Workers is how many engines there are, and Engine what each is.
	Workers int
	Engine  EngineConfig
	// Speeds scale Engine.Speed worker by worker, in turn. nil: all workers are equal.
	Speeds []float64
	// Own, if not nil, has for each worker what differs from Engine.
	Own []Own
	// PrefillWorkers is how many of the engines, the first ones, only compute prompts. The others then only decode, and
	// fetch a prompt's blocks in TransferMS milliseconds for each token that they do not hold. 0: every engine does
	// both. Disaggregation says for which prompts a decode worker works alone.
	PrefillWorkers int
	TransferMS     float64
	Disaggregation scoring.Disaggregation
	// Scoring and Prefill configure the cost function and the load book.
	Scoring scoring.Config
	Prefill scoring.PrefillModel
	// Policy, if set, is one of PolicyNames instead of Scoring's policy.
	Policy string
	// Queue says when requests wait. nil: none does.
	Queue *queue.Profile
	// QueueBound is how many requests may wait, and QueueTimeout for how long; 0: without limit of time.
	QueueBound   int
	QueueTimeout time.Duration
	// Admission, if set, holds conversations back while the workers' caches have no room. QueueBound and QueueTimeout
	// apply to them as well.
	Admission *admission.Config
	// Busy says which workers get no requests because of their load.
	Busy Thresholds
	// SessionTTL is how long a session stays bound to its worker after its last request. 0: sessions are not bound.
	// With SessionSoft a session moves while its worker is above a threshold; else its requests are refused then.
	SessionTTL  time.Duration
	SessionSoft bool
	// EventLag is the time from the end of an engine's step until the index knows its KV events.
	EventLag time.Duration
	// DeliveryDelay is the most time from the choice of a worker until its engine has the request. Each request takes a
	// random part of it.
	DeliveryDelay time.Duration
	// ArrivalSpeed divides the times of the trace: arrivals, and delays between turns. 1: as recorded.
	ArrivalSpeed float64
	// ArrivalJitter is the most time by which a request arrives later than in the trace. Each takes a random part of
	// it, which depends on Seed and its place in the trace alone.
	ArrivalJitter time.Duration
	// Replicas is how many routers share the engines; 0: one. Each request arrives at one of them, drawn at random.
	// They know of each other's bookings and sessions after ReplicaDelay, or with Unshared never.
	Replicas     int
	ReplicaDelay time.Duration
	Unshared     bool
	// Seed makes ties, and modes that draw, repeatable.
	Seed uint64
	// Decided, if set, is called when a request has ended. The Decision is valid during the call.
	Decided func(*Decision)
}

// Own is what is particular to a worker. Zero values are as in Config.Engine.
type Own struct {
	Name                     string
	ID                       WorkerID // in recordings
	Blocks, MaxBatchedTokens int
}

// Thresholds are loads above which a worker is no candidate, as in package router. nil: none.
type Thresholds struct {
	ActiveDecodeBlocks      *float64 // share of the worker's KV blocks that active requests hold
	ActivePrefillTokens     *uint64
	ActivePrefillTokensFrac *float64 // in multiples of what the engine computes in a step
}

func (t *Thresholds) none() bool {
	return t.ActiveDecodeBlocks == nil && t.ActivePrefillTokens == nil && t.ActivePrefillTokensFrac == nil
}

// Limits of what one replay takes.
const (
	maxWorkers = 1024
	maxBlocks  = 1 << 24
	maxStep    = 30 * 24 * 3600 * 1000.0 // milliseconds
	// maxOpen and maxOpenBlocks bound the requests that were read and have not ended, and the hashes of their blocks:
	// 512 MiB.
	maxOpen       = 1 << 20
	maxOpenBlocks = 1 << 25
	// maxSpan bounds the virtual time of arrivals, so that sums of times stay in range.
	maxSpan = 10 * 365 * 24 * time.Hour
	// maxRequests bounds the results that are kept for percentiles, 16 bytes each.
	maxRequests = 1 << 26
)

// Validate reports the first value that is out of range.
func (c *Config) Validate() error {
	switch e := &c.Engine; {
	case c.Workers < 1 || c.Workers > maxWorkers:
		return fmt.Errorf("%d workers: must be 1 to %d", c.Workers, maxWorkers)
	case len(c.Own) != 0 && len(c.Own) != c.Workers:
		return fmt.Errorf("%d workers, and what is particular to %d", c.Workers, len(c.Own))
	case e.BlockSize < 1 || e.BlockSize > kvblock.MaxBlockSize:
		return fmt.Errorf("a block size of %d tokens: must be 1 to %d", e.BlockSize, kvblock.MaxBlockSize)
	case e.MaxSequences < 1:
		return errors.New("a step must take at least one sequence")
	case !(c.ArrivalSpeed >= 1e-6 && c.ArrivalSpeed <= 1e6):
		return fmt.Errorf("a speed of %v: must be 1e-6 to 1e6", c.ArrivalSpeed)
	case c.Replicas < 0 || c.Replicas > maxReplicas:
		return fmt.Errorf("%d replicas: must be 1 to %d", c.Replicas, maxReplicas)
	case c.Replicas > 1 && (c.Policy != "" || c.Admission != nil):
		return errors.New("several replicas: only with the policies of kvepp serve, and without admission")
	case c.ReplicaDelay < 0 || c.ReplicaDelay > maxSpan:
		return errors.New("the replicas' delay must be 0 to ten years")
	case c.EventLag < 0 || c.DeliveryDelay < 0 || c.ArrivalJitter < 0 || c.QueueTimeout < 0 || c.SessionTTL < 0 ||
		max(c.EventLag, c.DeliveryDelay, c.ArrivalJitter) > maxSpan:
		return errors.New("times must be at least 0, and those of events, deliveries and arrivals at most ten years")
	}
	if c.Policy != "" && !slices.Contains(PolicyNames(), c.Policy) {
		return fmt.Errorf("policy %q is not known", c.Policy)
	}
	for w := range c.Workers {
		e := c.engine(w)
		if err := e.validate(); err != nil {
			return err
		}
	}
	if c.Admission != nil {
		if err := c.Admission.Validate(); err != nil {
			return err
		}
	}
	return cmp.Or(c.validateRoles(), c.Scoring.Validate())
}

// engine returns what a worker is.
func (c *Config) engine(w int) EngineConfig {
	e := c.Engine
	if len(c.Speeds) > 0 {
		e.Speed *= c.Speeds[w%len(c.Speeds)]
	}
	if len(c.Own) > 0 {
		e.Blocks = cmp.Or(c.Own[w].Blocks, e.Blocks)
		e.MaxBatchedTokens = cmp.Or(c.Own[w].MaxBatchedTokens, e.MaxBatchedTokens)
	}
	return e
}

// flight is a request from its arrival to its end.
type flight struct {
	*Request
	sequence
	via     *replica
	arrived time.Duration
	sent    time.Duration
	worker  int
	booking scoring.Booking
	// the prompt on the prefill worker, until that has computed it; nil: there is none
	first     *sequence
	prefiller int
	prefill   scoring.Booking
	refused   bool // while it was chosen for
	lease     session.Lease
	overlap   int  // blocks that the index counted for the chosen worker
	possible  int  // prompt tokens that one cache of infinite size would have
	alone     bool // no other request without a first token was on the worker; only with Config.Policy
	item      *queue.Item[*flight]
	waitsIn   *queue.Queue[*flight] // that item is in
	expires   time.Duration         // when it has waited there for too long
	turn      *admission.Turn       // nil: without admission, or the prompt has no full block
	number    int                   // of the arrival, from 1
	options   []Candidate           // only with Config.Decided
}

// Simulation replays a trace against engines in virtual time. It drives the real index, load book, cost function, queue
// and sessions. It belongs to one goroutine.
type Simulation struct {
	cfg     Config
	now     time.Duration
	events  minimum[event]
	planned uint64
	engines []*engine
	largest int         // blocks of the engine with the most
	lagging [][]stepped // by worker: KV events that the index does not know yet
	index   *indexer.Index
	// at least one
	replicas []*replica
	draws    *rand.Rand // of the replica at that a request arrives
	lateness *rand.Rand // of arrivals
	// of ties between prefill workers, and between decode workers beside one
	pairDraws *rand.Rand
	// conversations, and the requests that wait for their admission; nil: without
	admission *admission.Controller
	held      *queue.Queue[*flight]
	rng       *rand.Rand
	report    *Report
	policy    policy // nil: the book chooses
	view      view   // of policy
	starting  []int  // requests without a first token, by worker; only with a policy

	read       int           // requests
	first      time.Duration // arrival of the first one, in the trace's time
	last       time.Duration // and of the latest
	openCount  int           // requests that were read and have not ended
	openBlocks int

	scores     indexer.OverlapScores
	candidates []scoring.Candidate
	terms      []scoring.Terms
	costs      []float64
	loads      []scoring.Load
	unknown    uint64                   // numbers the blocks of responses that the trace does not tell
	waitingFor map[string][]*flight     // later turns of sessions whose turn before has not ended
	open       map[string]int           // turns of sessions that have arrived or wait, and have not ended
	ended      map[string]time.Duration // when the latest turn of a session ended
	seen       map[kvblock.SequenceHash]struct{}
	failed     error
}

// Run replays a trace. It reads requests as virtual time reaches them, so a trace must be in order of arrival. progress
// is called about every 10,000 requests; nil: not called.
func Run(ctx context.Context, cfg Config, next func() (*Request, error), progress func(requests int)) (*Report, error) {
	s, err := newSimulation(cfg)
	if err != nil {
		return nil, err
	}
	steps := 0
	for {
		// Arrivals are read until the latest one lies behind the next event.
		for err == nil && (len(s.events) == 0 || s.events[0].at >= s.scaled(s.last-s.first)) {
			if err = s.pull(ctx, next, progress); err != nil && !errors.Is(err, io.EOF) {
				return nil, err
			}
		}
		if len(s.events) == 0 {
			break
		}
		e := s.events.pop()
		s.now = e.at
		s.happen(&e)
		if s.failed != nil {
			return nil, s.failed
		}
		if steps++; steps%10000 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	s.report.finish(s)
	return s.report, nil
}

func newSimulation(cfg Config) (*Simulation, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Policy == Recorded { // nothing that kvepp would have done
		cfg.Queue, cfg.Admission, cfg.Busy, cfg.SessionTTL = nil, nil, Thresholds{}, 0
	}
	s := &Simulation{
		cfg:        cfg,
		rng:        rand.New(rand.NewPCG(cfg.Seed, 0x6b76657070)),
		pairDraws:  rand.New(rand.NewPCG(cfg.Seed, 0x70616972)),
		lateness:   rand.New(rand.NewPCG(cfg.Seed, 0x6c617465)),
		report:     newReport(cfg.Workers),
		lagging:    make([][]stepped, cfg.Workers),
		starting:   make([]int, cfg.Workers),
		waitingFor: map[string][]*flight{},
		open:       map[string]int{},
		ended:      map[string]time.Duration{},
		seen:       map[kvblock.SequenceHash]struct{}{},
	}
	var err error
	s.newReplicas()
	s.index, err = indexer.New(indexer.Config{MaxBytes: 64 << 30})
	if err != nil {
		return nil, err
	}
	s.policy = newPolicy(cfg.Policy, cfg.Workers)
	if cfg.Admission != nil {
		c := *cfg.Admission
		c.Clock = func() time.Duration { return s.now }
		s.admission = admission.New(c)
		s.held = queue.New[*flight](queue.Single(queue.FCFS, nil), max(cfg.QueueBound, 1))
	}
	for w := range cfg.Workers {
		e := newEngine(cfg.engine(w))
		s.engines, s.largest = append(s.engines, e), max(s.largest, e.cfg.Blocks)
	}
	return s, nil
}

// pull reads one request and plans its arrival.
func (s *Simulation) pull(ctx context.Context, next func() (*Request, error), progress func(requests int)) error {
	q, err := next()
	if err != nil {
		return err
	}
	if s.read++; s.read > maxRequests {
		return fmt.Errorf("more than %d requests: replay the trace in parts", maxRequests)
	}
	if q.Delay < 0 {
		if s.read == 1 {
			s.first, s.last = q.At, q.At
		}
		if q.At < s.last {
			return fmt.Errorf("request %d arrives at %v, before the one ahead of it at %v: sort the trace by time",
				s.read, q.At, s.last)
		}
		s.last = q.At
	} else if q.Served != nil { // the turn before it may end that much earlier than in the recording
		s.last = max(s.last, q.At-longestRequest)
	}
	if float64(max(q.At-s.first, q.Delay))/s.cfg.ArrivalSpeed > float64(maxSpan) {
		return fmt.Errorf("request %d arrives more than ten years after the first, or after the turn before it", s.read)
	}
	if s.read%10000 == 0 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if progress != nil {
			progress(s.read)
		}
	}
	return s.add(q)
}

func (s *Simulation) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) / s.cfg.ArrivalSpeed)
}

// add plans the arrival of a request.
func (s *Simulation) add(q *Request) error {
	s.openCount++
	s.openBlocks += len(q.Chain)
	if s.openCount > maxOpen || s.openBlocks > maxOpenBlocks {
		return fmt.Errorf("request %d: %d requests with %d blocks arrived and have not ended at %v: more arrives than "+
			"the engines serve; set more --workers, or a --speed below 1", s.read, s.openCount, s.openBlocks, s.now)
	}
	q.late = time.Duration(s.lateness.Float64() * float64(s.cfg.ArrivalJitter))
	f := &flight{Request: q}
	at := s.scaled(q.At - s.first)
	if q.Session != "" {
		s.open[q.Session]++
		if q.Delay >= 0 && s.open[q.Session] > 1 {
			s.waitingFor[q.Session] = append(s.waitingFor[q.Session], f)
			return nil
		}
		if q.Delay >= 0 { // the turn before has ended
			at = s.ended[q.Session] + s.scaled(q.Delay)
		}
	}
	q.ready, q.read = max(q.ready, at, s.now), true
	if q.waits == 0 {
		s.planArrival(q.ready, f)
	}
	return nil
}

// planArrival plans the arrival of a request that could arrive at a time.
func (s *Simulation) planArrival(at time.Duration, f *flight) {
	s.at(at+f.late, event{what: arrival, of: f})
}

// release lets those requests go that waited for a request to be sent, or to end.
func (s *Simulation) release(q *Request, dispatch bool) {
	for _, d := range q.dependents {
		if d.dispatch != dispatch {
			continue
		}
		d.ready = max(d.ready, s.now+s.scaled(d.delay))
		if d.waits--; d.waits == 0 && d.Request.read {
			s.planArrival(d.ready, &flight{Request: d.Request})
		}
	}
}

// arrive is a request's arrival: it is chosen for, or waits.
func (s *Simulation) arrive(f *flight) {
	f.arrived, f.via = s.now, s.via()
	s.release(f.Request, true)
	if blocksOf(f.Prompt+f.Output, s.cfg.Engine.BlockSize) > s.largest {
		s.report.TooLarge++
		s.end(f)
		return
	}
	s.report.arrived(s, f)
	if !s.holds(f) {
		s.enqueue(f)
	}
}

// enqueue sends a request on, or has it wait while every worker is busy.
func (s *Simulation) enqueue(f *flight) {
	if f.via.queue == nil {
		s.send(f)
		return
	}
	cached := s.mostCached(f)
	class := s.cfg.Queue.Class(f.Class, f.Prompt-cached)
	lane := queue.Any
	if w, bound := s.boundTo(f); bound && !s.cfg.SessionSoft {
		lane = w
	}
	s.loads = f.via.book.Loads(s.loads[:0])
	if f.Priority < 0 && s.busy(&s.cfg.Queue.Classes[class], f) { // such requests never wait
		s.refuse(f, RefusedQueue)
		return
	}
	s.wait(f.via.queue, f, queue.Request{
		Class:          class,
		Lane:           lane,
		Tokens:         f.Prompt,
		CachedTokens:   cached,
		Jump:           f.Priority,
		StrictPriority: f.StrictPriority,
	})
	s.serveQueue(f.via)
}

// wait adds a request to a queue, or refuses it.
func (s *Simulation) wait(in *queue.Queue[*flight], f *flight, r queue.Request) {
	r.Arrival = s.now.Seconds()
	item, err := in.Push(r, s.cfg.Workers, f)
	if err != nil {
		s.refuse(f, RefusedQueue)
		return
	}
	f.item, f.waitsIn = item, in
	if s.cfg.QueueTimeout > 0 {
		f.expires = s.now + s.cfg.QueueTimeout
		s.at(f.expires, event{what: timeout, of: f})
	}
}

func (s *Simulation) refuse(f *flight, why Outcome) {
	s.report.refused(s, f, why)
	s.end(f)
}

// busy reports whether every worker that may take a request is busy for its class, by s.loads.
func (s *Simulation) busy(c *queue.Class, f *flight) bool {
	only, bound := s.boundTo(f)
	bound = bound && !s.cfg.SessionSoft
	for w, e := range s.engines {
		if (!bound || w == only) &&
			(w >= len(s.loads) || !c.Busy(s.loads[w].PrefillTokens, e.cfg.MaxBatchedTokens)) {
			return false
		}
	}
	return c.Waits()
}

// serveQueue sends the requests of a replica on that a worker is ready for.
func (s *Simulation) serveQueue(r *replica) {
	if r.queue == nil {
		return
	}
	for r.queue.Len() > 0 {
		s.loads = r.book.Loads(s.loads[:0])
		item := r.queue.Pop(func(c *queue.Class, i *queue.Item[*flight]) bool { return !s.busy(c, i.Value) })
		if item == nil {
			return
		}
		item.Value.item = nil
		s.send(item.Value)
	}
}

// boundTo returns the worker that a request's session is bound to; false: it is to none.
func (s *Simulation) boundTo(f *flight) (worker int, bound bool) {
	if f.via.sessions == nil || f.Session == "" {
		return 0, false
	}
	w, bound := f.via.sessions.Find(session.KeyOf("", f.Session))
	return int(w), bound
}

// match looks up what each worker has of a prompt.
func (s *Simulation) match(f *flight) {
	s.index.FindMatches(f.Chain[:f.Prompt/s.cfg.Engine.BlockSize], &s.scores)
}

// gather makes s.candidates the workers of a role that may take a request. false: none may because of their load.
func (s *Simulation) gather(f *flight, prompt *scoring.Prompt, r role) bool {
	blocks := blocksOf(f.Prompt+f.Output, s.cfg.Engine.BlockSize)
	only, bound := s.boundTo(f)
	if !s.cfg.Busy.none() {
		s.loads = f.via.book.Loads(s.loads[:0])
	}
	s.candidates = s.candidates[:0]
	first, last := s.workers(r)
	for w := first; w < last; w++ {
		e := s.engines[w]
		if blocks > e.cfg.Blocks {
			continue
		}
		if !s.cfg.Busy.none() && w < len(s.loads) && s.cfg.Busy.exceeded(&s.loads[w], &e.cfg) {
			if bound && w == only && !s.cfg.SessionSoft {
				return false
			}
			continue
		}
		s.candidates = append(s.candidates, scoring.Candidate{
			Worker:       kvblock.Worker(w),
			Prompt:       prompt,
			DeviceBlocks: s.scores.Blocks(kvblock.Worker(w)),
			KVBlocks:     e.cfg.Blocks,
		})
	}
	if bound {
		own := func(c scoring.Candidate) bool { return int(c.Worker) == only }
		if i := slices.IndexFunc(s.candidates, own); i >= 0 {
			s.candidates = append(s.candidates[:0], s.candidates[i])
		}
	}
	return len(s.candidates) > 0
}

// exceeded reports whether a load is above any threshold.
func (t *Thresholds) exceeded(l *scoring.Load, e *EngineConfig) bool {
	return t.ActivePrefillTokens != nil && uint64(l.PrefillTokens) > *t.ActivePrefillTokens ||
		t.ActivePrefillTokensFrac != nil &&
			float64(l.PrefillTokens) > *t.ActivePrefillTokensFrac*float64(e.MaxBatchedTokens) ||
		t.ActiveDecodeBlocks != nil && float64(l.ActiveBlocks) > *t.ActiveDecodeBlocks*float64(e.Blocks)
}

// send chooses a worker, books the request on it and sends it to the engine.
func (s *Simulation) send(f *flight) {
	s.match(f)
	size := s.cfg.Engine.BlockSize
	prompt := scoring.Prompt{BlockSize: size, Chains: [][]kvblock.SequenceHash{f.Chain[:f.Prompt/size]}}
	if s.cfg.PrefillWorkers > 0 {
		s.sendToRoles(f, &prompt)
		return
	}
	if !s.gather(f, &prompt, all) {
		s.refuse(f, RefusedBusy)
		return
	}
	if s.policy != nil {
		w := s.policy.choose(s.look(f))
		s.candidates = append(s.candidates[:0], s.candidates[w])
	}
	request, costs := scoring.Request{ISLTokens: f.Prompt}, []float64(nil)
	if s.cfg.Decided != nil {
		s.terms = slices.Grow(s.terms[:0], len(s.candidates))[:len(s.candidates)]
		s.costs = slices.Grow(s.costs[:0], len(s.candidates))[:len(s.candidates)]
		request.Terms, costs = s.terms, s.costs
	}
	chosen, booking, err := f.via.book.SelectAndAdd(request, s.candidates, &s.cfg.Scoring, s.rng, costs)
	if err != nil {
		s.failed = err
		return
	}
	f.worker, f.booking = int(s.candidates[chosen.Index].Worker), booking
	f.overlap = s.candidates[chosen.Index].DeviceBlocks
	if s.cfg.Decided != nil {
		f.options = s.options(chosen.Index)
	}
	s.dispatch(f)
}

// dispatch sends a booked request to the engine.
func (s *Simulation) dispatch(f *flight) {
	f.sent = s.now
	if f.turn != nil {
		f.turn.Start(kvblock.Worker(f.worker), f.overlap*s.cfg.Engine.BlockSize)
	}
	if sessions := f.via.sessions; sessions != nil && f.Session != "" {
		key := session.KeyOf("", f.Session)
		was, bound := sessions.Find(key)
		f.lease, _ = sessions.Hold(key, was, bound, kvblock.Worker(f.worker), 0)
	}
	s.sentByPolicy(f)
	f.sequence = sequence{request: f, prompt: f.Prompt, output: f.Output}
	f.chain, f.locals = s.withOutput(f.Request)
	if f.first != nil {
		*f.first = f.sequence
		f.first.output = 1
	}
	if s.cfg.DeliveryDelay == 0 {
		s.deliver(f)
		return
	}
	delay := time.Duration(s.rng.Float64() * float64(s.cfg.DeliveryDelay))
	s.at(s.now+delay, event{what: delivery, of: f})
}

// deliver hands a request to the engine of its worker.
func (s *Simulation) deliver(f *flight) {
	w, q := f.worker, &f.sequence
	if f.first != nil {
		w, q = f.prefiller, f.first
	}
	s.engines[w].submit(q)
	s.step(w)
}

// withOutput returns the hashes of a request's full blocks, with such as no other request has for a response that the
// trace does not tell.
func (s *Simulation) withOutput(q *Request) ([]kvblock.SequenceHash, []kvblock.LocalHash) {
	n := (q.Prompt + q.Output) / s.cfg.Engine.BlockSize
	chain, locals := q.Chain, q.Locals
	for len(chain) < n {
		s.unknown++
		local := kvblock.LocalHash(s.unknown * 0x9e3779b97f4a7c15)
		if len(chain) == 0 {
			chain = append(chain, kvblock.FirstSequenceHash(local))
		} else {
			chain = append(chain, kvblock.NextSequenceHash(chain[len(chain)-1], local))
		}
		locals = append(locals, local)
	}
	return chain, locals
}

// step plans an engine's next step if it is between two. It begins after all that happens at this time, so that
// requests that arrive together are computed together.
func (s *Simulation) step(w int) {
	if e := s.engines[w]; !e.inStep {
		e.inStep = true
		s.at(s.now, event{what: stepBegins, worker: w})
	}
}

func (s *Simulation) beginStep(w int) {
	e := s.engines[w]
	took := time.Duration(0)
	if e.parts, took = e.begin(); len(e.parts) == 0 {
		e.inStep = false
		return
	}
	s.report.busy(w, s.now, took)
	s.at(s.now+took, event{what: stepEnds, worker: w})
}

// stepped is what a step changed in a worker's cache.
type stepped struct{ changes []change }

func (s *Simulation) endStep(w int) {
	e := s.engines[w]
	first, complete, changes := e.end(e.parts, s.now)
	if len(changes) > 0 {
		if s.cfg.EventLag == 0 {
			s.apply(w, changes)
		} else {
			s.lagging[w] = append(s.lagging[w], stepped{slices.Clone(changes)})
			s.at(s.now+s.cfg.EventLag, event{what: cacheChanges, worker: w})
		}
	}
	for _, q := range first {
		if q == q.request.first {
			continue
		}
		q.request.booking.MarkPrefillCompleted()
		q.request.prefill.MarkPrefillCompleted()
		q.request.prefill.Free()
		s.startedByPolicy(q.request)
	}
	for _, q := range complete {
		f := q.request
		if q == f.first {
			s.handOver(f)
			continue
		}
		f.booking.LearnOutput(f.Output)
		f.booking.Free()
		f.lease.Release(false)
		if f.turn != nil {
			f.turn.End(f.Output)
		}
		s.report.completed(s, f)
		s.end(f)
	}
	s.step(w)
	if len(complete) > 0 {
		s.admit()
	}
	if len(first)+len(complete) > 0 {
		for _, r := range s.replicas {
			s.serveQueue(r)
		}
	}
}

// end lets those go that waited for the end of a request: the next turn of its session, and its dependents.
func (s *Simulation) end(f *flight) {
	s.openCount--
	s.openBlocks -= len(f.Chain)
	s.release(f.Request, false)
	if f.Session == "" {
		return
	}
	s.ended[f.Session] = s.now
	if s.open[f.Session]--; s.open[f.Session] == 0 {
		delete(s.open, f.Session)
	}
	if waiting := s.waitingFor[f.Session]; len(waiting) > 0 {
		next := waiting[0]
		if len(waiting) == 1 {
			delete(s.waitingFor, f.Session)
		} else {
			s.waitingFor[f.Session] = waiting[1:]
		}
		s.planArrival(s.now+s.scaled(next.Delay), next)
	}
}

// apply applies a step's KV events to the index.
func (s *Simulation) apply(w int, changes []change) {
	worker := kvblock.Worker(w)
	for i := 0; i < len(changes); {
		c := changes[i]
		if c.removed {
			s.index.Removed(worker, kvblock.Removed{Hashes: []kvblock.EngineHash{kvblock.EngineHash(c.hash)}})
			i++
			continue
		}
		e := kvblock.Stored{HasParent: !c.first, Parent: kvblock.EngineHash(c.parent)}
		for last := c; ; {
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: kvblock.EngineHash(last.hash), Local: last.local})
			i++
			if i == len(changes) || changes[i].removed || changes[i].first || changes[i].parent != last.hash {
				break
			}
			last = changes[i]
		}
		if err := s.index.Stored(worker, e); err != nil && !errors.Is(err, indexer.ErrOrphaned) {
			s.failed = err
			return
		}
	}
}

// at plans an event. Events at the same time happen in the order in which they were planned.
func (s *Simulation) at(t time.Duration, e event) {
	if t < s.now {
		s.failed = errors.New("the trace goes on for more than 290 years")
		return
	}
	s.planned++
	e.at, e.order = t, s.planned
	s.events.push(e)
}

// event is something that happens at a time: to a request, or on a worker.
type event struct {
	at     time.Duration
	order  uint64
	of     *flight
	worker int
	what   happening
}

type happening uint8

const (
	arrival  happening = iota
	timeout            // of a request that waits
	delivery           // of a request to its engine
	stepBegins
	stepEnds
	cacheChanges // reach the index
	heard        // news of a replica, which event.worker numbers, reach the others
)

func (e event) before(o event) bool { return e.at < o.at || e.at == o.at && e.order < o.order }

func (s *Simulation) happen(e *event) {
	switch e.what {
	case arrival:
		s.arrive(e.of)
	case timeout:
		if f := e.of; f.item != nil && s.now >= f.expires && f.waitsIn.Remove(f.item) {
			f.item = nil
			s.refuse(f, RefusedQueue)
		}
	case delivery:
		s.deliver(e.of)
	case stepBegins:
		s.beginStep(e.worker)
	case stepEnds:
		s.endStep(e.worker)
	case heard:
		s.hear(e.worker)
	case cacheChanges:
		waiting := s.lagging[e.worker]
		s.apply(e.worker, waiting[0].changes)
		waiting[0].changes = nil
		s.lagging[e.worker] = waiting[1:]
	}
}
