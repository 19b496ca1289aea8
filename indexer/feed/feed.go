// Package feed keeps the index equal to the engines' caches: it subscribes to the KV events of every worker in the pool
// and applies them to the index.
//
// It owns the subscriptions and the state that turns each worker's events into index operations. If events of a worker
// were lost, or its engine restarted, feed clears that worker's blocks; later events add blocks again. It never routes.
//
// Concurrency: a Feed is a pool.Watcher and safe for concurrent use. Each worker's events are applied by one goroutine
// at a time, in order.
package feed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/requestplane"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// Feed applies the KV events of a pool's workers to an index. Create it with New.
type Feed struct {
	pool    *pool.Pool
	config  Config
	index   *indexer.Index
	metrics *metrics.Metrics
	log     *slog.Logger
	hub     *zmqsub.Hub
	nats    natsPlane
	brokers brokerPlane
	threads chan struct{} // semaphore of batches that are being applied; nil: no limit

	ctx       context.Context // of questions to workers
	cancel    func()
	questions chan struct{}       // semaphore of questions
	plane     *requestplane.Plane // nil: workers are not asked
	timing    questionTiming

	decodings sync.Pool // of *decoding

	released chan struct{} // closed unless events are on hold
	never    chan struct{} // closed
	release  sync.Once

	mu            sync.Mutex
	subscriptions map[kvblock.Worker]subscription     // guarded by mu
	silence       map[kvblock.Worker]*silenceDetector // guarded by mu
	connected     atomic.Int64
	silent        atomic.Int64

	lines loglimit.Limiter // limits all log lines that publishers can cause
}

// Publishers can cause log lines at any rate. Lines of one kind are limited for each worker, and all lines together.
const (
	workerLines   = 5 // of one kind at once; then one per interval
	allLines      = 100
	linesInterval = 10 * time.Second
)

// Config configures a Feed.
type Config struct {
	// NATSServer is the URL of the NATS server, such as nats://host:4222. It may contain a user and a password.
	NATSServer string
	// Threads is how many workers' events are decoded and applied at once, so that a flood of events leaves CPU for
	// requests. 0: no limit.
	Threads int
	// CallbackAddress is where Dynamo's workers connect with what they hold, see requestplane.Config.Callback. Empty:
	// they are not asked.
	CallbackAddress string
	// ask asks a Dynamo worker, see requestplane.Plane.Ask; nil: it cannot be asked. Tests replace it.
	ask func(ctx context.Context, endpoint string, body []byte, limit int64) (parts [][]byte, err error)
	// Engine is the workers' engine, for a hint in the log: vllm, sglang, trtllm or dynamo. Empty: not known.
	Engine string
	// Adapter, if not nil, is called with each LoRA adapter that a store of w's own blocks names, and with "" when w's
	// blocks are cleared or w leaves. It may be called repeatedly with the same one.
	Adapter func(w kvblock.Worker, name string)
	// UnmarkedSalts says that cache salts in events are the clients', see kvblock.Normalizer.UnmarkedSalts.
	UnmarkedSalts bool
	// Layers returns what config.json says about a model's layers. nil: nothing is known of any model.
	Layers func(model string) Layers
	// Connection, if not nil, is called when the subscription to a worker's own event socket connects or disconnects,
	// in order and without a lock; it must return soon. It is not called for subscriptions over NATS, whose connection
	// is not to the engine, and not when the subscription ends because the worker leaves.
	Connection func(w kvblock.Worker, connected bool)
}

// Layers describe a model's layers besides those of full attention, as its config.json does. The zero value means
// unknown.
type Layers struct {
	Known   bool
	Windows []int // of layers with a sliding window, in tokens
	Chunk   int   // of layers that attend to a chunk, in tokens; 0: there are none. Events do not tell it
	State   bool  // some keep a state
	// Other says that some of the layers are not full attention's, even if Known is not set.
	Other bool
}

// subscription is one worker's subscription, with the subscriber that applies its events.
type subscription struct {
	leave func() // ends it; after leave returned, no event is applied
	*subscriber
}

// New returns a feed without subscriptions. Register it as a watcher of p to add them.
func New(config Config, p *pool.Pool, index *indexer.Index, m *metrics.Metrics, log *slog.Logger) (*Feed, error) {
	hub, err := zmqsub.NewHub()
	if err != nil {
		return nil, fmt.Errorf("feed: %w", err)
	}
	var plane *requestplane.Plane
	if config.CallbackAddress != "" {
		plane, err = requestplane.New(requestplane.Config{Callback: config.CallbackAddress,
			TLS: requestplane.TLSFromEnv()})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("feed: Dynamo's request plane: %w", err), hub.Close())
		}
		config.ask = plane.Ask
	}
	var threads chan struct{}
	if config.Threads > 0 {
		threads = make(chan struct{}, config.Threads)
	}
	initCounted(m)
	never := make(chan struct{})
	close(never)
	ctx, cancel := context.WithCancel(context.Background())
	return &Feed{
		ctx:           ctx,
		cancel:        cancel,
		questions:     make(chan struct{}, maxQuestions),
		timing:        defaultQuestionTiming,
		plane:         plane,
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
		silence:       map[kvblock.Worker]*silenceDetector{},
		decodings:     sync.Pool{New: func() any { return new(decoding) }},
		nats:          natsPlane{server: config.NATSServer, log: log, subjects: map[string]*subject{}},
	}, nil
}

// decoding holds the buffers for decoding one message. Subscriptions share a few: most of thousands are silent at any
// time, and each would keep memory for its longest prompt.
type decoding struct {
	batch      kvblock.Batch
	operations []kvblock.Operation
	plane      kvblock.PlaneBatch
}

// enter waits until a batch may be applied; leave admits the next one.
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
	f.cancel()
	f.Release() // closing the hub waits for callbacks, which may wait for Release
	f.nats.close()
	err := f.hub.Close()
	if f.plane != nil {
		err = errors.Join(err, f.plane.Close())
	}
	f.mu.Lock()
	all := slices.Collect(maps.Values(f.subscriptions))
	f.mu.Unlock()
	for _, s := range all {
		s.waitIdle()
	}
	return err
}

// waitIdle waits until no message and no response is being applied.
func (s *subscriber) waitIdle() {
	s.applying.Lock()
	defer s.applying.Unlock()
}

// Room returns an error if the pool has more workers than this process can subscribe to. It says which limit to raise.
func (f *Feed) Room() error {
	s := f.pool.Acquire()
	defer s.Release()
	if err := f.hub.Room(len(s.Workers)); err != nil {
		return fmt.Errorf("feed: %d workers: %w", len(s.Workers), err)
	}
	return nil
}

// Export exports what f, which may be nil, is subscribed to.
func Export(m *metrics.Metrics, f *Feed) {
	metrics.Gauges(m, metrics.Subscriptions, "state", func() map[string]int {
		connected, connecting := f.Subscriptions()
		return map[string]int{"connected": connected, "connecting": connecting}
	})
	if f != nil {
		metrics.Gauge(m, metrics.SilentWorkers, f.Silent)
	}
}

// Subscriptions returns the number of subscriptions that are connected, and of those that are not.
func (f *Feed) Subscriptions() (connected, connecting int) {
	if f == nil {
		return 0, 0
	}
	f.mu.Lock()
	all := len(f.subscriptions)
	f.mu.Unlock()
	connected = int(f.connected.Load())
	return connected, max(all-connected, 0)
}

// WorkerJoined subscribes to a worker's events. If the worker has no event address, or one that cannot be used, it logs
// that; kvepp then routes to the worker without knowledge of its cache.
func (f *Feed) WorkerJoined(w pool.Worker) {
	if c, ok := w.EventChannel(); ok {
		f.joinPlane(w, c)
		return
	}
	if w.KVEvents == "" {
		f.log.Warn(
			"a worker has no kvEvents address, so kvepp does not know its cache. Give it one (kvEvents in the "+
				"endpoints file, --kv-events-port for Pods), "+
				"or start kvepp with --no-router-kv-events, which predicts caches from the requests sent to workers",
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

// subscriber returns a subscriber for a worker.
func (f *Feed) subscriber(w pool.Worker) *subscriber {
	s := &subscriber{
		left:      make(chan struct{}),
		hold:      f.released,
		feed:      f,
		worker:    w.Worker,
		rank:      w.Rank,
		name:      w.String(),
		blockSize: w.BlockSize,
		eagleDrop: w.EAGLEDrop,
		silence:   f.newSilenceDetector(w),
		link:      f.newLink(w),
	}
	if f.config.Layers != nil {
		s.layers = f.config.Layers(w.Model)
	}
	for _, l := range []*loglimit.Limiter{&s.gaps, &s.restarts, &s.cuts, &s.corrections} {
		l.Burst, l.Interval, l.Within = workerLines, linesInterval, &f.lines
	}
	f.mu.Lock()
	f.silence[w.Worker] = s.silence
	f.mu.Unlock()
	s.reset()
	return s
}

// joined keeps a subscription, or reports why there is none.
func (f *Feed) joined(s *subscriber, leave func(), err error) {
	if err != nil {
		f.metrics.Event("subscription", "failed", 1)
		f.log.Error("cannot subscribe to a worker's KV events, so kvepp does not know its cache",
			"worker", s.name, "error", err)
		return
	}
	f.mu.Lock()
	f.subscriptions[s.worker] = subscription{leave, s}
	f.mu.Unlock()
	s.link.begin()
}

// WorkerLeft ends a worker's subscription. After it returned, none of its events is applied.
func (f *Feed) WorkerLeft(w kvblock.Worker) {
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	d := f.silence[w]
	delete(f.subscriptions, w)
	delete(f.silence, w)
	f.mu.Unlock()
	if d.leave() {
		f.silent.Add(-1)
	}
	if !ok {
		return
	}
	close(s.left)
	s.link.leave()
	s.leave()
	s.forgetAdapters()
	if s.online { // Disconnected is not called any more
		f.connected.Add(-1)
	}
}

// subscriber applies one worker's events. zmqsub calls it from one goroutine at a time.
type subscriber struct {
	feed      *Feed
	worker    kvblock.Worker
	rank      uint32
	name      string
	blockSize int // in the pool when the worker joined; 0: learned from its events
	eagleDrop kvblock.EAGLEDrop
	layers    Layers
	silence   *silenceDetector
	link      *link         // state of the connection, for log and metrics
	lastEvent atomic.Int64  // when an operation was last applied, in nanoseconds since 1970; 0: never
	left      chan struct{} // closed when the worker leaves
	hold      chan struct{} // events wait until it is closed

	connection func(w kvblock.Worker, connected bool) // Config.Connection, or nil
	cleared    func()                                 // called when empty cleared the worker's blocks; may be nil

	applying   sync.Mutex // held while a message or a report is handled; guards what follows
	position   Position   // how far messages were applied; before the first one, the seed's position
	begun      bool       // a message was applied
	seeded     bool       // some of the worker's blocks are from a dump
	grouped    bool       // the dump has the blocks of classes
	dumpSize   int        // full attention's block size in the dump, 0 if there is none
	compared   bool       // layers were compared with events
	unnumbered bool       // the dump had no position: a message may repeat stores that it includes
	normalizer *kvblock.Normalizer
	announced  int            // the last block size reported to the pool
	tails      bool           // announced is the size of prompt tails: the next report corrects it
	traits     kvblock.Traits // the last traits reported to the pool
	hybrid     indexer.Hybrid // the worker's classes as the index knows them; without classes: none
	adapter    string         // the last adapter passed to Config.Adapter
	otherRank  bool           // already logged that batches name another rank
	malformed  bool           // already logged that a message cannot be decoded
	online     bool           // between Connected and Disconnected

	gaps, restarts, cuts loglimit.Limiter // of log lines

	// corrections limits reports of block sizes and traits to the pool, because each change is a log line and a
	// snapshot. A report that is held back follows with a later event.
	corrections loglimit.Limiter
}

// reset forgets what was learned from the events so far, except the block size.
func (s *subscriber) reset() {
	if s.normalizer == nil {
		s.normalizer = kvblock.NewNormalizer(s.blockSize)
		if s.feed.config.UnmarkedSalts {
			s.normalizer.UnmarkedSalts()
		}
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
		// If these blocks counted as this rank's, requests would go to the wrong cache.
		f.metrics.Event("batch", "other_rank", 1)
		if !s.otherRank {
			s.otherRank = true
			f.log.Error("a worker's KV events name another data-parallel rank, so kvepp ignores them; correct "+
				"dataParallelStartRank or kvEvents", "worker", s.name, "announced_rank", batch.Rank)
		}
		return
	}
	f.metrics.Event("unknown", "skipped", batch.UnknownTags)
	f.metrics.Event("unknown", "skipped_field", batch.UnknownKeys)
	d.operations = s.normalizer.Normalize(batch, d.operations[:0])
	s.setClasses(s.normalizer.Traits())
	stores := s.apply(d.operations)
	if stores {
		s.compareLayers()
		s.reportAdapters(batch)
		s.reportTraits(s.normalizer.Traits())
	}
}

// apply applies a message's operations in order. It counts them together, because one update of a metric costs as much
// as decoding an event. It returns whether one of them was a store.
func (s *subscriber) apply(ops []kvblock.Operation) (stores bool) {
	f := s.feed
	stored, removed, unknown := 0, 0, 0
	if len(ops) > 0 {
		s.lastEvent.Store(time.Now().UnixNano())
	}
	for len(ops) > 0 {
		s.silence.event()
		op, n := &ops[0], 1
		switch op.Kind {
		case kvblock.OpStored, kvblock.OpRemoved:
			var a indexer.Applied
			n, a = f.index.Apply(s.worker, ops, s.unnumbered) // stores that the dump includes must not count twice
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
			s.forgetAdapters()
			f.metrics.Event("cleared", "applied", 1)
			s.tails = s.tails || op.BlockSize != 0
			s.report(int(op.BlockSize))
		case kvblock.OpDropped:
			f.metrics.Event(kinds[op.Event], op.Reason, 1)
			if op.Reason == kvblock.DropBlockSize {
				s.report(int(op.BlockSize))
			}
			if op.Reason == kvblock.DropUnlearnedGroup && op.Event == kvblock.BlockRemoved && s.seeded {
				s.empty() // the dump does not name groups, so this may be the removal of a block from it
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

// reportTraits reports the traits of the engine's blocks to the pool, if they changed.
func (s *subscriber) reportTraits(now kvblock.Traits) {
	// a new normalizer has not seen these yet
	now.UpperBound, now.Window = now.UpperBound || s.traits.UpperBound, max(now.Window, s.traits.Window)
	if now.UpperBound {
		now.Classes = kvblock.Classes{}
	} else if now.Classes.Len() == 0 {
		now.Classes = s.traits.Classes
	}
	if now != s.traits && s.correct() {
		s.traits = now
		s.feed.pool.ReportTraits(s.worker, now)
	}
}

// reportAdapters calls Config.Adapter for the adapters of the worker's own blocks that the batch names, except the one
// reported last.
func (s *subscriber) reportAdapters(batch *kvblock.Batch) {
	if s.feed.config.Adapter == nil {
		return
	}
	for i := range batch.Events {
		switch e := &batch.Events[i]; {
		case e.Kind == kvblock.AllBlocksCleared:
			s.forgetAdapters()
		case len(e.LoRAName) == 0 || e.Ownership != nil || e.Locality != nil && string(e.Locality) != "LOCAL":
		case string(e.LoRAName) != s.adapter:
			s.adapter = string(e.LoRAName)
			s.feed.config.Adapter(s.worker, s.adapter)
		}
	}
}

// forgetAdapters takes back the adapters that were reported.
func (s *subscriber) forgetAdapters() {
	if s.adapter != "" {
		s.adapter = ""
		s.feed.config.Adapter(s.worker, "")
	}
}

// report reports the engine's block size to the pool, if it changed.
func (s *subscriber) report(blockSize int) {
	if blockSize > 0 && blockSize != s.announced && s.correct() {
		s.announced = blockSize
		if s.tails {
			s.tails = false
			s.feed.pool.CorrectBlockSize(s.worker, blockSize)
		} else {
			s.feed.pool.ReportBlockSize(s.worker, blockSize)
		}
	}
}

// correct returns whether a change may be reported to the pool now.
func (s *subscriber) correct() bool {
	_, ok := s.corrections.Allow()
	return ok
}

func outcome(err error) string {
	switch {
	case errors.Is(err, indexer.ErrOrphaned):
		return "orphaned"
	case errors.Is(err, indexer.ErrParentNotFound):
		return "parent_block_not_found"
	case errors.Is(err, indexer.ErrFull):
		return "index_full"
	}
	return "refused"
}

// Gap clears the worker's blocks: the lost messages may contain removals, and a block that only the index has is worse
// than one that only the engine has.
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
	s.gaps.Log(s.feed.log, slog.LevelWarn,
		"KV events were lost: kvepp clears the worker's blocks until the engine announces them again", "worker", s.name,
		"expected", expected, "got", got)
	s.empty()
}

// Restart clears the worker's blocks: a new engine process has none of the old one's. Without a replay, a lost
// connection may mean one.
func (s *subscriber) Restart() {
	if !s.begin() {
		return
	}
	defer s.end()
	s.restart()
}

func (s *subscriber) restart() {
	s.feed.metrics.Event("subscription", "restart", 1)
	s.restarts.Log(s.feed.log, slog.LevelInfo,
		"the publisher of KV events restarted, or its connection was lost and no replay shows that it is the same: "+
			"kvepp clears the worker's blocks", "worker", s.name)
	s.empty()
}

// empty clears the worker's blocks and forgets all state that depends on them.
func (s *subscriber) empty() {
	s.feed.index.Cleared(s.worker)
	s.forgetAdapters()
	s.unseed()
	s.reset()
	if s.cleared != nil {
		s.cleared()
	}
}

// Replayed counts the outcome of a replay.
func (s *subscriber) Replayed(outcome zmqsub.Replay, messages int) {
	s.feed.metrics.Event("subscription", string(outcome), 1)
	s.feed.metrics.Event("batch", "replayed", messages)
}

// Malformed clears the worker's blocks, because the message may contain removals.
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
			"cannot read a message on a KV event socket: kvepp clears the worker's blocks; logged once for each worker",
			"worker", s.name, "error", err)
	}
	s.empty()
}

// Cut clears the worker's blocks: waiting messages of the connection are lost, and the publisher is not trustworthy.
func (s *subscriber) Cut(err error) {
	if !s.begin() {
		return
	}
	defer s.end()
	s.feed.metrics.Event("subscription", "cut", 1)
	s.cuts.Log(
		s.feed.log,
		slog.LevelError,
		"kvepp ended the connection to a worker's KV events, because the data on it exceeded a bound or broke the "+
			"protocol. kvepp clears the worker's blocks, and connects again after a pause that grows each time. "+
			"Is this the address of the engine's KV events?",
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

// Disconnected counts the subscription as not connected. If no message of this connection has confirmed the seed, it
// clears the worker's blocks: the next connection may be to another process.
func (s *subscriber) Disconnected() {
	if s.connection != nil {
		s.connection(s.worker, false)
	}
	s.applying.Lock()
	defer s.applying.Unlock()
	s.online = false
	s.feed.connected.Add(-1)
	s.link.down()
	s.silence.disconnected()
	if s.seeded && !s.begun {
		s.empty()
	}
}
