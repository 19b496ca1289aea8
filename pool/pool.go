// Package pool keeps the current set of endpoints as an immutable snapshot, which any goroutine may read without a
// lock.
//
// It owns the worker numbers (kvblock.Worker), the properties of each worker (instance id, rank, block size, role), and
// the endpoints file. It never routes and never talks to an engine.
//
// Concurrency: everything is safe from any goroutine. Update and Change call the watchers one at a time, in the order
// in which they were added, and hold a lock meanwhile: a watcher must not call Update, Change or Watch.
package pool

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"kvepp/kvblock"
)

// Role says which phase of a request an endpoint serves.
type Role string

// The roles of Dynamo's workers. The zero value of Endpoint.Role means Aggregated.
const (
	Aggregated Role = "aggregated"
	Prefill    Role = "prefill"
	Decode     Role = "decode"
	Encode     Role = "encode" // turns images into embeddings; never routed to
)

// CPU is the DeviceType of an endpoint without an accelerator, as Dynamo's workers announce theirs.
const CPU = "cpu"

// Endpoint is one address that Envoy can send a request to, with the properties of the engine behind it. It has
// DataParallelSize workers, one for each rank.
type Endpoint struct {
	Name string // unique in the pool; a pod's name in Kubernetes
	// Address is the host:port that Envoy dials. Several endpoints may share one (a shared frontend). It may be empty
	// for a prefill worker.
	Address string
	// Namespace is Dynamo's namespace from discovery; empty: unknown. The prefill and the decode worker of a request
	// must have the same one.
	Namespace string

	InstanceID            uint64 // Dynamo's id of the worker process
	Role                  Role
	DataParallelStartRank uint32
	DataParallelSize      uint32 // 0 means 1
	// RankByAddress says that the address serves only one rank, whose server does not know other ranks. Requests must
	// not name a rank.
	RankByAddress bool

	KVEvents string // ZMQ address of rank DataParallelStartRank; rank r is at port + (r - start). Empty: no events
	KVReplay string // ZMQ address of the replay socket, with ports like KVEvents. Empty: no replay
	KVTopic  string // subscription prefix; empty: all topics
	// Metrics is the URL of the engine's metrics page. If it is empty, package pool/enginemetrics derives it from
	// Address.
	Metrics string
	// EventChannels are the channels of KV events on Dynamo's event plane, at most one for each rank, ordered by rank.
	// They are used only if KVEvents is empty.
	EventChannels []EventChannel
	// LoadChannels are the channels on which all workers of the endpoint's Dynamo path publish their loads; each
	// message names its worker. Rank is unused, and over NATS there is no Publisher.
	LoadChannels []EventChannel

	BlockSize           int      // tokens per KV block; 0: not known yet
	TotalKVBlocks       int      // device blocks per rank; 0: unknown
	MaxNumBatchedTokens int      // prefill tokens per engine step; 0: unknown
	Model               string   // the model served; empty: every model
	EngineVersion       string   // of the engine, as it prints it; empty: not known
	DeviceType          string   // CPU without an accelerator; empty: unknown
	Taints              []string // sorted and unique in a snapshot
	Transfer            Transfer // of a prefill worker
	// OtherTokenizer says that the worker's tokenizer or template is known to differ from kvepp's. Its blocks cannot be
	// matched with prompts, so kvepp routes to it by load only.
	OtherTokenizer bool
	// SameTokenizer says that tokenizer and template are known to equal kvepp's.
	SameTokenizer bool
	EAGLE         bool // blocks are hashed over windows of BlockSize+1 tokens
	// EAGLEDrop says for which layers the engine drops the last cached block. It has no effect while EAGLE is set.
	EAGLEDrop kvblock.EAGLEDrop
	// CordonedBy is the source of endpoints that cordons this one: it gets no new requests. Empty: not cordoned.
	CordonedBy CordonSource
}

// CordonSource names the source of endpoints that cordons an endpoint. Logs and the admin API show it.
type CordonSource string

// The sources of endpoints that can cordon them.
const (
	CordonedByFile CordonSource = "endpoints file"
	CordonedByPod  CordonSource = "Pod annotation"
)

// Transfer restricts the decode workers for the prompts of a prefill worker to those with the fastest transfer of its
// blocks. The zero value restricts nothing.
type Transfer struct {
	Taint    string  // of these decode workers
	Required bool    // only these decode workers are candidates
	Weight   float32 // if not Required: their preference, as in a request's preferred taints
}

// EventChannel is the channel of one publisher on Dynamo's event plane, for example for the KV events of one rank of a
// worker process. The zero value is no channel.
type EventChannel struct {
	Rank      uint32
	Publisher uint64 // id in the messages
	ZMQ       string // address of the publisher's socket; empty: NATS
	// Brokers are the addresses of ZMQ brokers, separated by semicolons: each passes on the messages of all publishers.
	// Empty: none.
	Brokers string
	Subject string // of NATS or of messages of brokers; several publishers share one
	// FirstTokens says that a channel among Endpoint.LoadChannels has notes of requests' first tokens instead of loads.
	FirstTokens bool
	// Query is where the publisher's worker says which blocks it holds, HOST:PORT/PATH on Dynamo's TCP request plane.
	// Empty: nowhere.
	Query string
}

// Transport returns "zmq" or "nats".
func (c EventChannel) Transport() string {
	if c.ZMQ != "" || c.Brokers != "" {
		return "zmq"
	}
	return "nats"
}

// Worker is one rank of one endpoint: one KV cache.
type Worker struct {
	kvblock.Worker
	*Endpoint
	Rank uint32

	// BlockSize is the endpoint's block size, else the one that the engine announced, else the one on its metrics page.
	// 0: not known yet.
	BlockSize int
	// TotalKVBlocks is the endpoint's number of device blocks, else the one on the engine's metrics page. 0: not known.
	TotalKVBlocks int
	// EAGLE says that blocks are hashed over windows of BlockSize+1 tokens. It is the endpoint's value until the
	// worker's own events differ.
	EAGLE bool
	// UpperBound says that the worker may hold less of a prompt than its events announce, see kvblock.Traits.
	UpperBound bool
	// Classes are the layer groups beside full attention that its events announce; nil: none. They do not change.
	Classes *kvblock.Classes
	// Silent says that the worker has served requests but sent no event for their blocks.
	Silent bool
	// Announced is the block size of the worker's own events if it differs from BlockSize, else 0. If it is not 0, the
	// worker's blocks cannot be matched, and kvepp routes to it by load only.
	Announced int
	page      cache // what the engine's metrics page said last
	ofPage    bool  // BlockSize is the page's
}

// cache is the size of a KV cache. The zero value: not known.
type cache struct{ blockSize, blocks int }

// KVEventsAddress returns the ZMQ address of this rank's events, or "".
func (w *Worker) KVEventsAddress() string {
	return offsetPort(w.KVEvents, w.Rank-w.DataParallelStartRank)
}

// KVReplayAddress returns the ZMQ address of this rank's replay socket, or "".
func (w *Worker) KVReplayAddress() string {
	return offsetPort(w.KVReplay, w.Rank-w.DataParallelStartRank)
}

// EventChannel returns the event plane's channel for this rank's events. It returns false if there is none, or if the
// engine's own socket is known: that one is faster and can replay missed events.
func (w *Worker) EventChannel() (EventChannel, bool) {
	if w.KVEvents != "" {
		return EventChannel{}, false
	}
	for _, c := range w.EventChannels {
		if c.Rank == w.Rank {
			return c, true
		}
	}
	return EventChannel{}, false
}

// Announces reports whether there is a socket or a channel for the worker's KV events.
func (w *Worker) Announces() bool {
	_, channel := w.EventChannel()
	return channel || w.KVEvents != ""
}

// UnknownBatchedTokens replaces an unknown MaxNumBatchedTokens. It is so large that no fraction of it is ever exceeded.
//
// Source: dynamo-llm 1.6.1, discovery::worker_monitor; dynamo-kv-router 1.6.1, scheduling::queue.
const UnknownBatchedTokens = 10_000_000

// BatchedTokens returns MaxNumBatchedTokens, or UnknownBatchedTokens.
func (e *Endpoint) BatchedTokens() int {
	if e.MaxNumBatchedTokens > 0 {
		return e.MaxNumBatchedTokens
	}
	return UnknownBatchedTokens
}

// String returns NAME/RANK, as logs name a worker.
func (w *Worker) String() string { return fmt.Sprintf("%s/%d", w.Name, w.Rank) }

// identity holds the properties that identify a KV cache and its blocks. A worker keeps its number over an update only
// if they are equal; other properties of the endpoint may change.
type identity struct {
	name, address, events, replay, topic string
	instance                             uint64
	rank                                 uint32
	blockSize                            int
	eagle                                bool
	eagleDrop                            kvblock.EAGLEDrop
	channel                              EventChannel
}

func (w *Worker) identity() identity {
	channel, _ := w.EventChannel()
	return identity{w.Name, w.Address, w.KVEventsAddress(), w.KVReplayAddress(), w.KVTopic, w.InstanceID, w.Rank,
		w.Endpoint.BlockSize, w.Endpoint.EAGLE, w.EAGLEDrop, channel}
}

// is reports whether id still identifies w. A source may declare a property after the worker's events gave it, because
// Dynamo's frontends know a worker before its model. If both values are equal, it is still the same KV cache. A source
// may also stop declaring a block size, because the worker's model card expired. The worker then keeps its size, unless
// its events contradict it.
func (w *Worker) is(id identity) bool {
	own := w.identity()
	switch {
	case own.blockSize == 0 && id.blockSize == w.BlockSize:
		own.blockSize = w.BlockSize
	case id.blockSize == 0 && w.Announced == 0:
		id.blockSize = own.blockSize
	}
	if !own.eagle && id.eagle == w.EAGLE {
		own.eagle = w.EAGLE
	}
	return own == id
}

// differences names the properties in which another identity of the worker differs.
func (id identity) differences(other identity) (names []string) {
	for _, property := range []struct {
		name    string
		differs bool
	}{
		{"address", id.address != other.address},
		{"instance", id.instance != other.instance},
		{"KV events", id.events != other.events || id.topic != other.topic || id.channel != other.channel},
		{"KV replay", id.replay != other.replay},
		{"block size", id.blockSize != other.blockSize},
		{"EAGLE", id.eagle != other.eagle},
	} {
		if property.differs {
			names = append(names, property.name)
		}
	}
	return names
}

// Snapshot is the pool at one moment. It never changes.
type Snapshot struct {
	// Workers is in the order of the source's endpoints, then by rank.
	Workers []Worker

	readers atomic.Int64
}

// Release ends one Acquire. The snapshot must not be used afterwards.
func (s *Snapshot) Release() { s.readers.Add(-1) }

// Worker returns the worker with a number; nil if it is not in the pool.
func (s *Snapshot) Worker(w kvblock.Worker) *Worker {
	for i := range s.Workers {
		if x := &s.Workers[i]; x.Worker == w {
			return x
		}
	}
	return nil
}

// Watcher receives the workers that join and leave, after the new snapshot is published.
type Watcher interface {
	// WorkerJoined starts to keep state for a worker.
	WorkerJoined(Worker)
	// WorkerLeft removes all state of a worker. After it returns, no state may remain or be created later. The pool
	// calls it when the worker leaves, and again before the number is reused, because a concurrent decision may have
	// booked on the worker in between. The second call must be harmless.
	WorkerLeft(kvblock.Worker)
}

// Pool is the current set of endpoints. Create it with New.
type Pool struct {
	current atomic.Pointer[Snapshot]

	// update serialises Update and Change, with their calls to watchers. It guards the fields below, up to next.
	update   sync.Mutex
	watchers []Watcher
	onCordon func(endpoint string, by CordonSource) // nil: nothing is called
	leaving  []kvblock.Worker
	free     []kvblock.Worker
	next     kvblock.Worker

	// publishing serialises changes of current. It is not the lock update, because WorkerLeft waits until an engine's
	// last event is applied, and that event may report a block size.
	publishing sync.Mutex
	old        []*Snapshot // superseded snapshots that may have readers; guarded by publishing

	log *slog.Logger
}

// New returns an empty pool.
func New(log *slog.Logger) *Pool {
	p := &Pool{log: log}
	p.current.Store(&Snapshot{})
	return p
}

// Watch adds a watcher. Call it before the first Update: a watcher does not receive earlier workers.
func (p *Pool) Watch(w Watcher) {
	p.update.Lock()
	defer p.update.Unlock()
	p.watchers = append(p.watchers, w)
}

// OnLeave makes forget the watcher of workers that left.
func (p *Pool) OnLeave(forget func(kvblock.Worker)) { p.Watch(leaves(forget)) }

type leaves func(kvblock.Worker)

func (leaves) WorkerJoined(Worker)                {}
func (forget leaves) WorkerLeft(w kvblock.Worker) { forget(w) }

// OnCordon sets a function that is called when Endpoint.CordonedBy changes for an endpoint that stays in the pool. For
// endpoints that join, WorkerJoined has the value. Call OnCordon before the first Update.
func (p *Pool) OnCordon(f func(endpoint string, by CordonSource)) {
	p.update.Lock()
	defer p.update.Unlock()
	p.onCordon = f
}

// Acquire returns the current snapshot. The caller must release it: a worker's number is reused only after all
// snapshots with the old worker are released.
func (p *Pool) Acquire() *Snapshot {
	for {
		s := p.current.Load()
		s.readers.Add(1)
		// If the snapshot was replaced between the load and the add, Update may have seen no reader and reused a
		// number.
		if p.current.Load() == s {
			return s
		}
		s.Release()
	}
}

// Update replaces the pool's endpoints. A worker with the same name, address, instance id, rank, event sockets and
// block size as before keeps its number and what its engine announced. The others join or leave.
//
// Endpoints must have unique names, as ParseFile ensures.
func (p *Pool) Update(endpoints []Endpoint) {
	p.update.Lock()
	defer p.update.Unlock()
	p.reclaim()

	p.publishing.Lock()
	before := p.current.Load().Workers
	joined, left, recordoned := p.replace(nil, before, endpoints)
	p.publishing.Unlock()
	p.announce(joined, left, recordoned)
}

// Change removes endpoints by name, and adds others. An endpoint in both lists moves to the end, and its workers stay
// as in Update. An added endpoint must not have the name of one that stays. Without removals, the cost does not depend
// on the size of the pool.
func (p *Pool) Change(remove []string, add []Endpoint) {
	p.update.Lock()
	defer p.update.Unlock()
	p.reclaim()

	p.publishing.Lock()
	kept, removed := p.current.Load().Workers, []Worker(nil)
	if len(remove) > 0 {
		isRemoved := func(name string) bool { return slices.Contains(remove, name) }
		if len(remove) > 8 {
			names := make(map[string]bool, len(remove))
			for _, name := range remove {
				names[name] = true
			}
			isRemoved = func(name string) bool { return names[name] }
		}
		all := kept
		kept = make([]Worker, 0, len(all)+len(add))
		var last *Endpoint // of the previous worker; lastRemoved is its result
		lastRemoved := false
		for i := range all {
			if w := &all[i]; w.Endpoint != last {
				last, lastRemoved = w.Endpoint, isRemoved(w.Name)
			}
			if lastRemoved {
				removed = append(removed, all[i])
			} else {
				kept = append(kept, all[i])
			}
		}
	}
	// Without removals, replace appends to the array of the current snapshot. Readers do not see beyond its length, and
	// each snapshot has only one successor.
	joined, left, recordoned := p.replace(kept, removed, add)
	p.publishing.Unlock()
	p.announce(joined, left, recordoned)
}

// announce passes the results of replace to the watchers. The caller holds p.update.
func (p *Pool) announce(joined, left []Worker, recordoned []*Endpoint) {
	if p.onCordon != nil {
		for _, e := range recordoned {
			p.onCordon(e.Name, e.CordonedBy)
		}
	}
	rejoins := make(map[string]identity)
	if len(left) > 0 {
		for _, w := range joined {
			rejoins[w.String()] = w.identity()
		}
	}
	for _, w := range left {
		about := []any{"worker", w.String(), "instance", w.InstanceID}
		if again, ok := rejoins[w.String()]; ok {
			about = append(about, "rejoins_with_another", w.identity().differences(again))
		}
		p.log.Info("worker left", about...)
		for _, o := range p.watchers {
			o.WorkerLeft(w.Worker)
		}
		p.leaving = append(p.leaving, w.Worker)
	}
	for _, w := range joined {
		p.log.Info("worker joined",
			"worker", w.String(), "instance", w.InstanceID, "address", w.Address, "role", w.Role)
		for _, o := range p.watchers {
			o.WorkerJoined(w)
		}
	}
}

// replace publishes a snapshot of the workers in kept and those of endpoints. A worker of endpoints that is in before
// stays. It returns the workers that joined, those of before that left, and the endpoints whose CordonedBy changed. The
// caller holds p.update and p.publishing.
func (p *Pool) replace(kept, before []Worker, endpoints []Endpoint) (joined, left []Worker, recordoned []*Endpoint) {
	known := earlierWorkers{workers: before, stayed: make([]bool, len(before))}
	after := &Snapshot{Workers: kept}
	tooMany := 0
	for i := range endpoints {
		e := endpoints[i]
		if e.Role == "" {
			e.Role = Aggregated
		}
		e.DataParallelSize = max(e.DataParallelSize, 1)
		// ParseFile bounds only the endpoints of the file, not those of discovery.
		if len(after.Workers)+int(e.DataParallelSize) > maxWorkers {
			tooMany++
			continue
		}
		if len(e.Taints) > 1 {
			e.Taints = slices.Compact(slices.Sorted(slices.Values(e.Taints)))
		}
		// Count from 0, because start + size may overflow.
		for i := range e.DataParallelSize {
			w := Worker{Endpoint: &e, Rank: e.DataParallelStartRank + i, BlockSize: e.BlockSize, EAGLE: e.EAGLE,
				TotalKVBlocks: e.TotalKVBlocks}
			if was := known.find(w.identity()); was != nil {
				w.Worker = was.Worker
				w.BlockSize, w.Announced = was.BlockSize, was.Announced
				w.EAGLE, w.UpperBound, w.Classes, w.Silent = was.EAGLE, was.UpperBound, was.Classes, was.Silent
				w.page, w.ofPage = was.page, was.ofPage && e.BlockSize == 0
				w.countBlocks()
				if was.CordonedBy != e.CordonedBy && (len(recordoned) == 0 || recordoned[len(recordoned)-1] != &e) {
					recordoned = append(recordoned, &e)
				}
			} else {
				w.Worker = p.number()
				joined = append(joined, w)
			}
			after.Workers = append(after.Workers, w)
		}
	}
	if tooMany > 0 {
		p.log.Error("too many workers: kvepp ignores the last endpoints; spread them over several kvepps",
			"ignored", tooMany, "workers", len(after.Workers), "most", maxWorkers)
	}
	p.publish(after)
	for i, w := range before {
		if !known.stayed[i] {
			left = append(left, w)
		}
	}
	return joined, left, recordoned
}

// earlierWorkers finds workers of an earlier snapshot. It is fast if they come in their earlier order. They usually do,
// because only a few of hundreds of workers leave or join.
type earlierWorkers struct {
	workers []Worker
	stayed  []bool         // by index of workers: find returned it
	next    int            // index after the worker that find returned last
	byName  map[string]int // index of an endpoint's first worker; nil: not built yet
}

// lookAhead is the number of workers after the last result that find compares before it builds the map.
const lookAhead = 4

// find returns the worker of an identity, or nil. It returns each worker once.
func (r *earlierWorkers) find(id identity) *Worker {
	for i := r.next; i < min(r.next+lookAhead, len(r.workers)); i++ {
		if !r.stayed[i] && r.workers[i].is(id) {
			return r.markFound(i)
		}
	}
	if r.byName == nil {
		r.byName = make(map[string]int, len(r.workers))
		for i := range r.workers {
			if i == 0 || r.workers[i].Name != r.workers[i-1].Name {
				r.byName[r.workers[i].Name] = i
			}
		}
	}
	if i, ok := r.byName[id.name]; ok {
		for ; i < len(r.workers) && r.workers[i].Name == id.name; i++ { // its ranks
			if !r.stayed[i] && r.workers[i].is(id) {
				return r.markFound(i)
			}
		}
	}
	return nil
}

func (r *earlierWorkers) markFound(i int) *Worker {
	r.stayed[i], r.next = true, i+1
	return &r.workers[i]
}

// ReportBlockSize records the block size that a worker's own events announce. If the block size is unknown, it becomes
// the worker's. If it differs from the known one or is out of range, kvepp routes to the worker by load only, until
// both agree.
func (p *Pool) ReportBlockSize(w kvblock.Worker, announced int) {
	p.publishing.Lock()
	defer p.publishing.Unlock()
	before := p.current.Load()
	i := slices.IndexFunc(before.Workers, func(x Worker) bool { return x.Worker == w })
	if i < 0 {
		return // the worker has left
	}
	if x := &before.Workers[i]; x.BlockSize == announced && x.Announced == 0 && !x.ofPage || x.Announced == announced {
		return
	}
	after := &Snapshot{Workers: slices.Clone(before.Workers)}
	x := &after.Workers[i]
	switch {
	case (x.BlockSize == 0 || x.ofPage) && (announced < 1 || announced > kvblock.MaxBlockSize):
		x.Announced = announced
		p.log.Error("block size announced for a worker is out of range: this worker is routed to by load only",
			"worker", x.String(), "announced", announced)
	case x.BlockSize == 0 || x.ofPage:
		x.BlockSize, x.Announced, x.ofPage = announced, 0, false
		x.countBlocks()
		p.log.Info("block size taken from the engine's events", "worker", x.String(), "block_size", announced)
	case x.BlockSize == announced:
		x.Announced = 0
		p.log.Info("block size of the engine's events agrees again", "worker", x.String(), "block_size", announced)
	default:
		x.Announced = announced
		p.log.Error("block size differs from the engine's: this worker is routed to by load only; "+
			"correct --kv-cache-block-size, the endpoints file or the model card",
			"worker", x.String(), "configured", x.BlockSize, "announced", announced)
	}
	p.publish(after)
}

// CorrectBlockSize replaces a block size that came from stores of prompt tails, which are shorter than the engine's
// blocks. A configured block size stays.
func (p *Pool) CorrectBlockSize(w kvblock.Worker, announced int) {
	p.change(w, func(x *Worker) {
		if x.Endpoint.BlockSize != 0 || x.BlockSize == announced {
			return
		}
		p.log.Info("block size corrected: the stores so far were prompt tails, shorter than the engine's blocks",
			"worker", x.String(), "block_size", announced, "tail_size", x.BlockSize)
		x.BlockSize, x.Announced, x.ofPage = announced, 0, false
		x.countBlocks()
	})
}

// MaxCacheBlocks is more than a KV cache has.
const MaxCacheBlocks = 1 << 30

// ReportCache records how large a worker's KV cache is by its engine's metrics page: tokens per block, and blocks of
// the device. They count where neither the endpoint nor KV events say it. Sizes out of range are ignored. A difference
// from the endpoint's is logged once for each value of the page.
func (p *Pool) ReportCache(w kvblock.Worker, blockSize, blocks float64) {
	if !(blockSize >= 1 && blockSize <= kvblock.MaxBlockSize && blocks >= 1 && blocks <= MaxCacheBlocks) {
		return
	}
	said := cache{int(blockSize), int(blocks)}
	p.change(w, func(x *Worker) {
		if x.page == said {
			return
		}
		x.page = said
		if x.BlockSize == 0 && x.Announced == 0 || x.ofPage {
			x.BlockSize, x.ofPage = said.blockSize, true
		}
		x.countBlocks()
		if own := x.Endpoint.BlockSize; own != 0 && own != said.blockSize && x.Announces() {
			p.log.Warn("the configured block size differs from that on the engine's metrics page; kvepp uses the "+
				"configured one", "worker", x.String(), "configured", own, "engine", said.blockSize)
		}
		if own, engine := x.Endpoint.TotalKVBlocks, said.of(x.BlockSize); own != 0 && Differ(own, engine) {
			p.log.Warn("the configured number of KV blocks (endpoints file, Pod's annotation, model card) differs "+
				"from that on the engine's metrics page; kvepp uses the configured one", "worker", x.String(),
				"configured", own, "engine", engine, "block_size", x.BlockSize)
		}
	})
}

// Differ reports whether two numbers of KV blocks differ by more than the engines' own rounding, 2 %.
func Differ(a, b int) bool { return 50*max(a-b, b-a) > max(a, b) }

// countBlocks sets TotalKVBlocks.
func (w *Worker) countBlocks() {
	if w.TotalKVBlocks = w.Endpoint.TotalKVBlocks; w.TotalKVBlocks == 0 {
		w.TotalKVBlocks = w.page.of(w.BlockSize)
	}
}

// of returns how many blocks of another size a cache has room for; 0 if a size is not known.
func (c cache) of(blockSize int) int {
	if blockSize == 0 {
		return 0
	}
	return c.blocks * c.blockSize / blockSize
}

// ReportTraits records properties of the blocks in a worker's own events. It does not use t.BlockSize, which
// ReportBlockSize records.
func (p *Pool) ReportTraits(w kvblock.Worker, t kvblock.Traits) {
	p.change(w, func(x *Worker) {
		if x.EAGLE != t.EAGLE {
			p.log.Info("EAGLE taken from the engine's events (blocks hashed over one more token)",
				"worker", x.String(), "eagle", t.EAGLE)
		}
		if t.UpperBound && !x.UpperBound {
			p.log.Info("this worker's overlap is an upper bound: parts of its model keep less than its events announce",
				"worker", x.String(), "window_tokens", t.Window)
		}
		x.EAGLE, x.UpperBound = t.EAGLE, t.UpperBound
		if t.Classes.Len() == 0 {
			x.Classes = nil
		} else if x.Classes == nil || *x.Classes != t.Classes {
			p.log.Info("this worker's model is a hybrid one", "worker", x.String(), "classes", t.Classes.String())
			x.Classes = &t.Classes
		}
	})
}

// ReportSilent sets Worker.Silent.
func (p *Pool) ReportSilent(w kvblock.Worker, silent bool) {
	p.change(w, func(x *Worker) { x.Silent = silent })
}

// change publishes a snapshot in which edit has changed w. It does nothing if w has left.
func (p *Pool) change(w kvblock.Worker, edit func(*Worker)) {
	p.publishing.Lock()
	defer p.publishing.Unlock()
	before := p.current.Load()
	i := slices.IndexFunc(before.Workers, func(x Worker) bool { return x.Worker == w })
	if i < 0 {
		return
	}
	x := before.Workers[i]
	if edit(&x); x != before.Workers[i] {
		after := &Snapshot{Workers: slices.Clone(before.Workers)}
		after.Workers[i] = x
		p.publish(after)
	}
}

// publish replaces the snapshot. The caller holds p.publishing.
func (p *Pool) publish(s *Snapshot) {
	// Prune here too: reports of thousands of workers without an Update must not keep all snapshots.
	p.prune()
	p.old = append(p.old, p.current.Swap(s))
}

// prune drops superseded snapshots without readers. The caller holds p.publishing.
func (p *Pool) prune() {
	p.old = slices.DeleteFunc(p.old, func(s *Snapshot) bool { return s.readers.Load() == 0 })
}

// reclaim frees the numbers of workers that left, if no older snapshot has a reader. The caller holds p.update.
func (p *Pool) reclaim() {
	p.publishing.Lock()
	p.prune()
	read := len(p.old) > 0
	p.publishing.Unlock()
	if read {
		return
	}
	for _, w := range p.leaving {
		for _, o := range p.watchers {
			o.WorkerLeft(w)
		}
	}
	p.free = append(p.free, p.leaving...)
	p.leaving = p.leaving[:0]
}

// number returns an unused worker number. The caller holds p.update.
func (p *Pool) number() kvblock.Worker {
	if n := len(p.free); n > 0 {
		w := p.free[n-1]
		p.free = p.free[:n-1]
		return w
	}
	p.next++
	return p.next - 1
}
