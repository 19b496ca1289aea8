// Package feed keeps the index true to what the engines hold: it subscribes to the KV events of every worker in the
// pool and applies them.
//
// It owns the subscriptions, the state that turns each worker's events into index operations, and the rule that what is
// in doubt is dropped: a worker whose events were lost, or whose engine began anew, holds nothing until it says so
// again. It never routes.
//
// Concurrency: a Feed is a pool.Watcher and safe from any goroutine. Each worker's events are applied by one goroutine
// at a time, in order.
package feed

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// Feed keeps an index true. Create it with New.
type Feed struct {
	pool    *pool.Pool
	config  Config
	index   *indexer.Index
	metrics *metrics.Metrics
	log     *slog.Logger
	hub     *zmqsub.Hub
	nats    natsPlane
	threads chan struct{} // holds one for each batch being applied; nil: any number may be

	decodings sync.Pool // of *decoding

	released chan struct{} // closed unless events are on hold
	never    chan struct{} // closed
	release  sync.Once

	mu            sync.Mutex
	subscriptions map[kvblock.Worker]subscription // guarded by mu
	hearings      map[kvblock.Worker]*hearing     // guarded by mu
	connected     atomic.Int64
	silent        atomic.Int64

	lines loglimit.Limiter // within which the lines are that publishers can cause
}

// Publishers can cause log lines at any rate, so that each worker's of a kind are limited, and all of them together.
const (
	workerLines   = 5 // of one kind at once; then one in each interval
	allLines      = 100
	linesInterval = 10 * time.Second
)

// Config says where Dynamo's event plane is, for workers whose engine's own socket is not known.
type Config struct {
	// EventPlane is "zmq", "nats", or empty: whichever a worker's discovery names.
	EventPlane string
	// NATSServer is the URL of the NATS server, such as nats://host:4222. It may hold a user and a password.
	NATSServer string
	// Threads is how many workers' events are decoded and applied at once, so that a flood of events leaves processors
	// to requests. 0: any number.
	Threads int
	// Engine is what the workers run, for a hint in the log: vllm, sglang, trtllm or dynamo. Empty: not known.
	Engine string
	// Adapter is told of LoRA adapters that stores name, again and again. nil: nobody is.
	Adapter func(w kvblock.Worker, name string)
	// Connection is told when the subscription to a worker's own event socket connects and disconnects, in order and
	// without a lock; it must return soon. It is not told of subscriptions over NATS, where the connection is not to
	// the engine, nor that the subscription ends because the worker leaves. nil: no calls.
	Connection func(w kvblock.Worker, connected bool)
}

// subscription is one worker's, with what applies its events.
type subscription struct {
	leave func() // ends it; when it returns, no event will be applied any more
	*subscriber
}

// New returns a feed without subscriptions; it gets them as a watcher of p.
func New(config Config, p *pool.Pool, index *indexer.Index, m *metrics.Metrics, log *slog.Logger) (*Feed, error) {
	hub, err := zmqsub.NewHub()
	if err != nil {
		return nil, fmt.Errorf("feed: %w", err)
	}
	var threads chan struct{}
	if config.Threads > 0 {
		threads = make(chan struct{}, config.Threads)
	}
	showCounted(m)
	never := make(chan struct{})
	close(never)
	return &Feed{
		lines:         loglimit.Limiter{Burst: allLines, Interval: linesInterval / 10},
		released:      never,
		never:         never,
		threads:       threads,
		pool:          p,
		config:        config,
		index:         index,
		metrics:       m,
		log:           log,
		hub:           hub,
		subscriptions: map[kvblock.Worker]subscription{},
		hearings:      map[kvblock.Worker]*hearing{},
		decodings:     sync.Pool{New: func() any { return new(decoding) }},
		nats:          natsPlane{server: config.NATSServer, log: log, subjects: map[string]*subject{}},
	}, nil
}

// decoding is what one message is decoded into. Subscriptions share a few: of thousands most are silent at any time,
// and each would keep room for the longest prompt that it was ever told of.
type decoding struct {
	batch      kvblock.Batch
	operations []kvblock.Operation
	plane      kvblock.PlaneBatch
}

// enter waits until a batch may be applied; leave lets the next one in.
func (f *Feed) enter() {
	if f.threads != nil {
		f.threads <- struct{}{}
	}
}

func (f *Feed) leave() {
	if f.threads != nil {
		<-f.threads
	}
}

// Close ends all subscriptions. The index stays as it is.
func (f *Feed) Close() error {
	f.Release() // a callback that waits would be waited for
	f.nats.close()
	return f.hub.Close()
}

// Room returns an error if the workers in the pool are more than this process can subscribe to; it says what to raise.
func (f *Feed) Room() error {
	s := f.pool.Acquire()
	defer s.Release()
	if err := f.hub.Room(len(s.Workers)); err != nil {
		return fmt.Errorf("feed: %d workers: %w", len(s.Workers), err)
	}
	return nil
}

// Subscriptions returns how many subscriptions are connected, and how many are not.
func (f *Feed) Subscriptions() (connected, connecting int) {
	f.mu.Lock()
	all := len(f.subscriptions)
	f.mu.Unlock()
	connected = int(f.connected.Load())
	return connected, max(all-connected, 0)
}

// WorkerJoined subscribes to a worker's events. A worker without an event address is never subscribed to, and one whose
// address cannot be used is logged; both are routed to without knowledge of their caches.
func (f *Feed) WorkerJoined(w pool.Worker) {
	if c, ok := w.EventChannel(); ok {
		f.joinPlane(w, c)
		return
	}
	if w.KVEvents == "" {
		f.log.Warn(
			"a worker has no kvEvents address: what it has cached is not known. Give it one (kvEvents in the "+
				"endpoints file, --kv-events-port for Pods), "+
				"or start kvepp with --no-router-kv-events to have caches guessed from where requests went",
			"worker",
			w.String(),
		)
		return
	}
	s := f.subscriber(w)
	s.connection = f.config.Connection
	running, err := f.hub.Subscribe(
		zmqsub.Config{
			Endpoint:       w.KVEventsAddress(),
			ReplayEndpoint: w.KVReplayAddress(),
			Topic:          w.KVTopic,
			Hold:           s.hold,
		},
		s,
	)
	f.joined(s, running.Close, err)
}

// subscriber returns what applies a worker's events.
func (f *Feed) subscriber(w pool.Worker) *subscriber {
	s := &subscriber{
		left:      make(chan struct{}),
		hold:      f.released,
		feed:      f,
		worker:    w.Worker,
		rank:      w.Rank,
		name:      w.String(),
		blockSize: w.BlockSize,
		hearing:   f.listen(w),
		link:      f.follow(w),
	}
	for _, l := range []*loglimit.Limiter{&s.gaps, &s.restarts, &s.cuts, &s.corrections} {
		l.Burst, l.Interval, l.Within = workerLines, linesInterval, &f.lines
	}
	f.mu.Lock()
	f.hearings[w.Worker] = s.hearing
	f.mu.Unlock()
	s.reset()
	return s
}

// joined keeps a subscription, or reports why there is none.
func (f *Feed) joined(s *subscriber, leave func(), err error) {
	if err != nil {
		f.metrics.Event("subscription", "failed", 1)
		f.log.Error(
			"cannot subscribe to a worker's KV events; what it has cached is not known",
			"worker",
			s.name,
			"error",
			err,
		)
		return
	}
	f.mu.Lock()
	f.subscriptions[s.worker] = subscription{leave, s}
	f.mu.Unlock()
	s.link.begin()
}

// WorkerLeft ends a worker's subscription. When it returns, none of its events will be applied any more.
func (f *Feed) WorkerLeft(w kvblock.Worker) {
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	h := f.hearings[w]
	delete(f.subscriptions, w)
	delete(f.hearings, w)
	f.mu.Unlock()
	if h.leave() {
		f.silent.Add(-1)
	}
	if !ok {
		return
	}
	close(s.left)
	s.link.leave()
	s.leave()
	if s.online { // no callback is left that could say so
		f.connected.Add(-1)
	}
}

// subscriber applies one worker's events. zmqsub calls it from one goroutine at a time.
type subscriber struct {
	feed      *Feed
	worker    kvblock.Worker
	rank      uint32
	name      string
	blockSize int // as the pool knew it when the worker joined; 0: to be learned
	hearing   *hearing
	link      *link         // of the subscription, for log and metrics
	lastEvent atomic.Int64  // when an operation was last applied, in nanoseconds since 1970; 0: never
	left      chan struct{} // closed when the worker leaves
	hold      chan struct{} // its events wait until it is closed

	connection func(w kvblock.Worker, connected bool) // Config.Connection, or nil

	applying   sync.Mutex // held while a message is applied, or anything else done about it; guards what follows
	position   Position   // how far messages were applied, or what the seed says
	begun      bool       // whether any was
	seeded     bool       // what the worker holds, or some of it, is from a dump
	unnumbered bool       // and a message may tell again what that has in it
	normalizer *kvblock.Normalizer
	announced  int            // the last block size reported to the pool
	traits     kvblock.Traits // the last ones reported to the pool
	adapter    string         // the last one told of
	otherRank  bool           // said already that batches name another rank
	malformed  bool           // said already that something cannot be decoded
	online     bool           // between Connected and Disconnected

	gaps, restarts, cuts loglimit.Limiter // of log lines

	// corrections limits how often the pool is told of another block size or other traits, for each change is a log
	// line and a snapshot. What is not told now is told with a later event.
	corrections loglimit.Limiter
}

// reset forgets what was learned from the events so far, except the block size.
func (s *subscriber) reset() {
	if s.normalizer == nil {
		s.normalizer = kvblock.NewNormalizer(s.blockSize)
		return
	}
	s.normalizer.Reset()
}

// Message decodes and applies one batch.
func (s *subscriber) Message(seq uint64, _, payload []byte) {
	if !s.begin() {
		return
	}
	defer s.end()
	f := s.feed
	f.enter()
	defer f.leave()
	d := f.decodings.Get().(*decoding)
	defer f.decodings.Put(d)
	batch := &d.batch
	if err := kvblock.DecodeBatch(payload, batch); err != nil {
		s.begun = true
		s.unreadable(fmt.Errorf("batch %d: %w", seq, err))
		return
	}
	if s.reached(seq, batch.Timestamp) {
		f.metrics.Event("batch", "in_dump", 1)
		return
	}
	f.metrics.Event("batch", "received", 1)
	if batch.HasRank && batch.Rank != s.rank {
		// Taking another rank's blocks for this one's would send requests to the wrong cache.
		f.metrics.Event("batch", "other_rank", 1)
		if !s.otherRank {
			s.otherRank = true
			f.log.Error(
				"a worker's KV events name another data-parallel rank, and are not used; correct "+
					"dataParallelStartRank or kvEvents",
				"worker",
				s.name,
				"announced_rank",
				batch.Rank,
			)
		}
		return
	}
	f.metrics.Event("unknown", "skipped", batch.UnknownTags)
	f.metrics.Event("unknown", "skipped_field", batch.UnknownKeys)
	d.operations = s.normalizer.Normalize(batch, d.operations[:0])
	if s.apply(d.operations) {
		s.reportAdapters(batch)
		s.reportTraits(s.normalizer.Traits())
	}
}

// apply applies a message's operations, in order, and counts them: one by one, a metric costs as much as decoding an
// event. It reports whether there was a store among them.
func (s *subscriber) apply(ops []kvblock.Operation) (stores bool) {
	f := s.feed
	stored, removed, unknown := 0, 0, 0
	if len(ops) > 0 {
		s.lastEvent.Store(time.Now().UnixNano())
	}
	for len(ops) > 0 {
		s.hearing.event()
		op, n := &ops[0], 1
		switch op.Kind {
		case kvblock.OpStored, kvblock.OpRemoved:
			var a indexer.Applied
			n, a = f.index.Apply(s.worker, ops, s.unnumbered) // what the dump has in it already must not count twice
			if a.Stored+len(a.Failed) > 0 {
				stores = true
				s.report(s.normalizer.Traits().BlockSize)
			}
			for _, err := range a.Failed {
				f.metrics.Event("stored", outcome(err), 1)
			}
			stored, removed, unknown = stored+a.Stored, removed+a.Removed, unknown+a.Unknown
		case kvblock.OpCleared:
			f.index.Cleared(s.worker)
			f.metrics.Event("cleared", "applied", 1)
			if op.BlockSize != 0 && s.correct() {
				s.announced = int(op.BlockSize)
				f.pool.CorrectBlockSize(s.worker, s.announced)
			}
		case kvblock.OpDropped:
			f.metrics.Event(kinds[op.Event], op.Reason, 1)
			if op.Reason == kvblock.DropBlockSize {
				s.report(int(op.BlockSize))
			}
			if op.Reason == kvblock.DropUnlearnedGroup && op.Event == kvblock.BlockRemoved && s.seeded {
				s.empty() // which group is which the dump does not say: this may be a block that it has
			}
		}
		ops = ops[n:]
	}
	f.metrics.Event("stored", "applied", stored)
	f.metrics.Event("removed", "applied", removed)
	f.metrics.Event("removed", "unknown_block", unknown)
	return stores
}

// kinds names the events for metrics.
var kinds = map[kvblock.EventKind]string{
	kvblock.BlockStored: "stored", kvblock.BlockRemoved: "removed", kvblock.AllBlocksCleared: "cleared",
	kvblock.Ignored: "ignored",
}

// reportTraits tells the pool what the engine's stores say about its blocks, beside their size, when it has changed.
func (s *subscriber) reportTraits(now kvblock.Traits) {
	now.UpperBound = now.UpperBound || s.traits.UpperBound // a new normalizer has yet to see it
	if now != s.traits && s.correct() {
		s.traits = now
		s.feed.pool.ReportTraits(s.worker, now.EAGLE, now.UpperBound)
	}
}

// reportAdapters tells of the adapters that the batch names, but for the one that was named last.
func (s *subscriber) reportAdapters(batch *kvblock.Batch) {
	if s.feed.config.Adapter == nil {
		return
	}
	for i := range batch.Events {
		if name := batch.Events[i].LoRAName; len(name) > 0 && string(name) != s.adapter {
			s.adapter = string(name)
			s.feed.config.Adapter(s.worker, s.adapter)
		}
	}
}

// report tells the pool the block size that the engine announces, when it has changed.
func (s *subscriber) report(blockSize int) {
	if blockSize > 0 && blockSize != s.announced && s.correct() {
		s.announced = blockSize
		s.feed.pool.ReportBlockSize(s.worker, blockSize)
	}
}

// correct reports whether the pool may be told of a change now.
func (s *subscriber) correct() bool {
	_, ok := s.corrections.Allow()
	return ok
}

func outcome(err error) string {
	switch {
	case errors.Is(err, indexer.ErrKeptAside):
		return "kept_aside"
	case errors.Is(err, indexer.ErrParentNotFound):
		return "parent_block_not_found"
	case errors.Is(err, indexer.ErrFull):
		return "index_full"
	}
	return "refused"
}

// Gap empties the worker: of what was lost, a removal may be a part, and a block believed and not held is worse than
// one held and not believed.
func (s *subscriber) Gap(expected, got uint64) {
	if !s.begin() {
		return
	}
	defer s.end()
	s.gap(expected, got)
}

func (s *subscriber) gap(expected, got uint64) {
	if s.bridged(got) {
		return
	}
	s.feed.metrics.Event("subscription", "gap", 1)
	s.gaps.Log(
		s.feed.log,
		slog.LevelWarn,
		"KV events were lost: the worker's blocks are dropped until it announces them again",
		"worker",
		s.name,
		"expected",
		expected,
		"got",
		got,
	)
	s.empty()
}

// Restart empties the worker: a new engine process holds nothing of the old one's.
func (s *subscriber) Restart() {
	if !s.begin() {
		return
	}
	defer s.end()
	s.restart()
}

func (s *subscriber) restart() {
	s.feed.metrics.Event("subscription", "restart", 1)
	s.restarts.Log(
		s.feed.log,
		slog.LevelInfo,
		"the publisher of KV events began anew: the worker's blocks are dropped",
		"worker",
		s.name,
	)
	s.empty()
}

func (s *subscriber) empty() {
	s.feed.index.Cleared(s.worker)
	s.unseed()
	s.reset()
}

// Replayed counts how asking for past messages went.
func (s *subscriber) Replayed(outcome zmqsub.Replay, messages int) {
	s.feed.metrics.Event("subscription", string(outcome), 1)
	s.feed.metrics.Event("batch", "replayed", messages)
}

// Malformed empties the worker, because what cannot be read may have been a removal.
func (s *subscriber) Malformed(err error) {
	if !s.begin() {
		return
	}
	defer s.end()
	s.unreadable(err)
}

func (s *subscriber) unreadable(err error) {
	s.feed.metrics.Event("batch", "malformed", 1)
	if !s.malformed {
		s.malformed = true
		s.feed.log.Error(
			"a message on a KV event socket cannot be read: the worker's blocks are dropped; said once for each worker",
			"worker",
			s.name,
			"error",
			err,
		)
	}
	s.empty()
}

// Cut empties the worker: what else the connection brought is lost, and a publisher that goes beyond a bound is in
// doubt with all it said.
func (s *subscriber) Cut(err error) {
	if !s.begin() {
		return
	}
	defer s.end()
	s.feed.metrics.Event("subscription", "cut", 1)
	s.cuts.Log(
		s.feed.log,
		slog.LevelError,
		"kvepp ended the connection to a worker's KV events, because of what came on it: the worker's blocks are "+
			"dropped, and kvepp connects again after a pause that grows each time. Is the address that of the "+
			"engine's KV events?",
		"worker",
		s.name,
		"error",
		err,
	)
	s.empty()
}

// Connected counts the subscription as connected.
func (s *subscriber) Connected() {
	if s.connection != nil {
		s.connection(s.worker, true)
	}
	s.applying.Lock()
	defer s.applying.Unlock()
	s.online = true
	s.feed.connected.Add(1)
	s.link.up()
}

// Disconnected counts it as not connected. A seed that no message of this connection has confirmed is in doubt then:
// the next connection may be to another process.
func (s *subscriber) Disconnected() {
	if s.connection != nil {
		s.connection(s.worker, false)
	}
	s.applying.Lock()
	defer s.applying.Unlock()
	s.online = false
	s.feed.connected.Add(-1)
	s.link.down()
	s.hearing.again()
	if s.seeded && !s.begun {
		s.empty()
	}
}
