package replay

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/queue"
	"kvepp/scoring"
)

// Config is one variant of a replay.
type Config struct {
	// Workers is how many engines there are, and Engine what each is.
	Workers int
	Engine  EngineConfig
	// Speeds scale Engine.Speed worker by worker, in turn. nil: all workers are equal.
	Speeds []float64
	// Scoring and Prefill configure the cost function and the load book.
	Scoring scoring.Config
	Prefill scoring.PrefillModel
	// Policy, if set, is another project's policy, one of PolicyNames, instead of Scoring's.
	Policy string
	// Queue says when requests wait. nil: none does.
	Queue *queue.Profile
	// QueueBound is how many requests may wait, and QueueTimeout for how long; 0: without limit of time.
	QueueBound   int
	QueueTimeout time.Duration
	// EventLag is the time from the end of an engine's step until the index knows its KV events.
	EventLag time.Duration
	// ArrivalSpeed divides the times of the trace: arrivals, and delays between turns. 1: as recorded.
	ArrivalSpeed float64
	// Seed makes ties, and modes that draw, repeatable.
	Seed uint64
}

// Validate reports the first value that is out of range.
func (c *Config) Validate() error {
	switch e := &c.Engine; {
	case c.Workers < 1 || c.Workers > maxWorkers:
		return fmt.Errorf("%d workers: must be 1 to %d", c.Workers, maxWorkers)
	case e.Blocks < 1 || e.Blocks > maxBlocks:
		return fmt.Errorf("%d KV blocks for each worker: must be 1 to %d", e.Blocks, maxBlocks)
	case e.BlockSize < 1 || e.BlockSize > kvblock.MaxBlockSize:
		return fmt.Errorf("a block size of %d tokens: must be 1 to %d", e.BlockSize, kvblock.MaxBlockSize)
	case e.MaxSequences < 1 || e.MaxBatchedTokens < 1:
		return errors.New("a step must take at least one sequence and one token")
	case !(e.Speed > 0) || !(c.ArrivalSpeed > 0):
		return errors.New("speeds must be above 0")
	case c.EventLag < 0 || c.QueueTimeout < 0:
		return errors.New("times must be at least 0")
	}
	if c.Policy != "" && !slices.Contains(PolicyNames(), c.Policy) {
		return fmt.Errorf("policy %q is not known", c.Policy)
	}
	for _, s := range c.Speeds {
		if !(s > 0) {
			return errors.New("speeds must be above 0")
		}
	}
	return c.Scoring.Validate()
}

const (
	maxWorkers = 1024
	maxBlocks  = 1 << 24
)

// flight is a request from its arrival to its end.
type flight struct {
	*Request
	sequence
	arrived time.Duration
	sent    time.Duration
	worker  int
	booking scoring.Booking
	overlap int  // blocks that the index counted for the chosen worker
	alone   bool // no other request without a first token was on the worker; only with Config.Policy
	item    *queue.Item[*flight]
}

// Simulation replays a trace against engines in virtual time. It drives the real index, load book, cost function and
// queue. It belongs to one goroutine.
type Simulation struct {
	cfg     Config
	now     time.Duration
	events  timeline
	engines []*engine
	index   *indexer.Index
	book    *scoring.ActiveSequences
	queue   *queue.Queue[*flight]
	rng     *rand.Rand
	report  *Report
	policy  policy // nil: the book chooses
	view    view   // of policy

	scores     indexer.OverlapScores
	candidates []scoring.Candidate
	loads      []scoring.Load
	unknown    uint64                   // numbers the blocks of answers that the trace does not tell
	waitingFor map[string][]*flight     // later turns of sessions whose turn before has not ended
	open       map[string]int           // turns of sessions that have arrived or wait, and have not ended
	ended      map[string]time.Duration // when the latest turn of a session ended
	seen       map[kvblock.SequenceHash]struct{}
	failed     error
}

// Run replays a trace. It reads requests as virtual time reaches them, so a trace must be in order of arrival. progress
// is called about every 10,000 requests; nil: not called.
func Run(ctx context.Context, cfg Config, next func() (*Request, error), progress func(requests int)) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Simulation{
		cfg:        cfg,
		rng:        rand.New(rand.NewPCG(cfg.Seed, 0x6b76657070)),
		report:     newReport(cfg.Workers),
		waitingFor: map[string][]*flight{},
		open:       map[string]int{},
		ended:      map[string]time.Duration{},
		seen:       map[kvblock.SequenceHash]struct{}{},
	}
	var err error
	s.book = scoring.NewActiveSequences()
	s.book.Prefill = cfg.Prefill
	s.book.Clock = func() time.Duration { return s.now }
	s.index, err = indexer.New(indexer.Config{MaxBytes: 64 << 30, OnRemoved: s.book.BlockRemoved})
	if err != nil {
		return nil, err
	}
	s.policy = newPolicy(cfg.Policy, cfg.Workers)
	if cfg.Queue != nil {
		s.queue = queue.New[*flight](cfg.Queue, max(cfg.QueueBound, 1))
	}
	for i := range cfg.Workers {
		c := cfg.Engine
		if len(cfg.Speeds) > 0 {
			c.Speed *= cfg.Speeds[i%len(cfg.Speeds)]
		}
		s.engines = append(s.engines, newEngine(c))
	}
	read, steps := 0, 0
	var last time.Duration
	pull := func() error {
		q, err := next()
		if err != nil {
			return err
		}
		if q.Delay < 0 {
			if q.At < last {
				return fmt.Errorf("request %d arrives at %v, before the one ahead of it at %v: sort the trace by time",
					read+1, q.At, last)
			}
			last = q.At
		}
		if read++; read%10000 == 0 {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if progress != nil {
				progress(read)
			}
		}
		return s.add(q)
	}
	for {
		// Arrivals are read until the earliest one lies behind the next event.
		for err == nil && (len(s.events.heap) == 0 || s.events.heap[0].at >= s.scaled(last)) {
			if err = pull(); err != nil && !errors.Is(err, io.EOF) {
				return nil, err
			}
		}
		if len(s.events.heap) == 0 {
			break
		}
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
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

func (s *Simulation) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) / s.cfg.ArrivalSpeed)
}

// add plans the arrival of a request.
func (s *Simulation) add(q *Request) error {
	blocks := blocksOf(q.Prompt+q.Output, s.cfg.Engine.BlockSize)
	if blocks > s.cfg.Engine.Blocks {
		s.report.TooLarge++
		return nil
	}
	f := &flight{Request: q}
	if q.Session == "" {
		s.at(s.scaled(q.At), func() { s.arrive(f) })
		return nil
	}
	s.open[q.Session]++
	if q.Delay >= 0 && s.open[q.Session] > 1 {
		s.waitingFor[q.Session] = append(s.waitingFor[q.Session], f)
		return nil
	}
	at := s.scaled(q.At)
	if q.Delay >= 0 { // the turn before has ended
		at = s.ended[q.Session] + s.scaled(q.Delay)
	}
	s.at(max(at, s.now), func() { s.arrive(f) })
	return nil
}

// arrive is a request's arrival: it is chosen for, or waits.
func (s *Simulation) arrive(f *flight) {
	f.arrived = s.now
	s.report.arrived(s, f)
	if s.queue == nil {
		s.send(f)
		return
	}
	s.match(f)
	most := 0
	for w := range s.engines {
		most = max(most, s.scores.Blocks(kvblock.Worker(w)))
	}
	cached := most * s.cfg.Engine.BlockSize
	class := s.cfg.Queue.Class(f.Class, f.Prompt-cached)
	item, err := s.queue.Push(queue.Request{
		Class:          class,
		Lane:           queue.Any,
		Tokens:         f.Prompt,
		CachedTokens:   cached,
		Arrival:        s.now.Seconds(),
		Jump:           f.Priority,
		StrictPriority: f.StrictPriority,
	}, s.cfg.Workers, f)
	if err != nil {
		s.refuse(f)
		return
	}
	f.item = item
	if s.cfg.QueueTimeout > 0 {
		s.at(s.now+s.cfg.QueueTimeout, func() {
			if f.item != nil && s.queue.Remove(f.item) {
				f.item = nil
				s.refuse(f)
			}
		})
	}
	s.serveQueue()
}

func (s *Simulation) refuse(f *flight) {
	s.report.Refused++
	s.turnEnded(f)
}

// serveQueue sends the requests on that a worker is ready for.
func (s *Simulation) serveQueue() {
	if s.queue == nil {
		return
	}
	for s.queue.Len() > 0 {
		s.loads = s.book.Loads(s.loads[:0])
		item := s.queue.Pop(func(c *queue.Class, _ *queue.Item[*flight]) bool {
			for w := range s.engines {
				if w >= len(s.loads) || !c.Busy(s.loads[w].PrefillTokens, s.cfg.Engine.MaxBatchedTokens) {
					return true
				}
			}
			return false
		})
		if item == nil {
			return
		}
		item.Value.item = nil
		s.send(item.Value)
	}
}

// match looks up what each worker has of a prompt.
func (s *Simulation) match(f *flight) {
	s.index.FindMatches(f.Chain[:f.Prompt/s.cfg.Engine.BlockSize], &s.scores)
}

// send chooses a worker, books the request on it, and hands it to the engine.
func (s *Simulation) send(f *flight) {
	s.match(f)
	size := s.cfg.Engine.BlockSize
	prompt := scoring.Prompt{BlockSize: size, Chains: [][]kvblock.SequenceHash{f.Chain[:f.Prompt/size]}}
	s.candidates = s.candidates[:0]
	for w := range s.engines {
		s.candidates = append(s.candidates, scoring.Candidate{
			Worker:       kvblock.Worker(w),
			Prompt:       &prompt,
			DeviceBlocks: s.scores.Blocks(kvblock.Worker(w)),
			KVBlocks:     s.cfg.Engine.Blocks,
		})
	}
	if s.policy != nil {
		w := s.policy.choose(s.look(f))
		s.candidates = s.candidates[w : w+1]
	}
	chosen, booking, err := s.book.SelectAndAdd(
		scoring.Request{ISLTokens: f.Prompt}, s.candidates, &s.cfg.Scoring, s.rng, nil)
	if err != nil {
		s.failed = err
		return
	}
	f.worker, f.booking, f.sent = int(s.candidates[chosen.Index].Worker), booking, s.now
	f.overlap = s.candidates[chosen.Index].DeviceBlocks
	s.sentByPolicy(f)
	f.sequence = sequence{request: f, prompt: f.Prompt, output: f.Output}
	f.chain, f.locals = s.withAnswer(f.Request)
	s.engines[f.worker].submit(&f.sequence)
	s.step(f.worker)
}

// withAnswer returns the hashes of a request's full blocks, with such as no other request has for an answer that the
// trace does not tell.
func (s *Simulation) withAnswer(q *Request) ([]kvblock.SequenceHash, []kvblock.LocalHash) {
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
	e := s.engines[w]
	if e.inStep {
		return
	}
	e.inStep = true
	s.at(s.now, func() {
		parts, took := e.begin()
		if len(parts) == 0 {
			e.inStep = false
			return
		}
		s.at(s.now+took, func() { s.endStep(w, parts) })
	})
}

func (s *Simulation) endStep(w int, parts []part) {
	first, complete, changes := s.engines[w].end(parts, s.now)
	if len(changes) > 0 {
		if s.cfg.EventLag == 0 {
			s.apply(w, changes)
		} else {
			s.at(s.now+s.cfg.EventLag, func() { s.apply(w, changes) })
		}
	}
	for _, q := range first {
		q.request.booking.MarkPrefillCompleted()
		s.startedByPolicy(q.request)
	}
	for _, q := range complete {
		f := q.request
		f.booking.LearnAnswer(f.Output)
		f.booking.Free()
		s.report.completed(s, f)
		s.turnEnded(f)
	}
	s.step(w)
	if len(first)+len(complete) > 0 {
		s.serveQueue()
	}
}

// turnEnded plans the next turn of a session.
func (s *Simulation) turnEnded(f *flight) {
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
		s.at(s.now+s.scaled(next.Delay), func() { s.arrive(next) })
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
func (s *Simulation) at(t time.Duration, do func()) {
	s.events.planned++
	heap.Push(&s.events, event{t, s.events.planned, do})
}

type event struct {
	at    time.Duration
	order uint64
	do    func()
}

// timeline is a heap of events.
type timeline struct {
	heap    []event
	planned uint64
}

func (t *timeline) Len() int { return len(t.heap) }
func (t *timeline) Less(i, j int) bool {
	a, b := &t.heap[i], &t.heap[j]
	return a.at < b.at || (a.at == b.at && a.order < b.order)
}
func (t *timeline) Swap(i, j int) { t.heap[i], t.heap[j] = t.heap[j], t.heap[i] }
func (t *timeline) Push(x any)    { t.heap = append(t.heap, x.(event)) }
func (t *timeline) Pop() any {
	last := len(t.heap) - 1
	e := t.heap[last]
	t.heap[last] = event{}
	t.heap = t.heap[:last]
	return e
}
