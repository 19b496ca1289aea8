// Package pool keeps the current set of endpoints as an immutable snapshot that anybody may read without a lock.
//
// It owns the worker numbers (kvblock.Worker), what is known about each worker (instance id, rank, block size, role),
// and the static file source. It never routes, never talks to an engine, and never calls anybody while it holds its
// lock.
//
// Concurrency: everything is safe from any goroutine. Watchers are called one at a time, in the order they were added.
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

// Endpoint is one address that Envoy can send a request to, and what is known of the engine behind it. It stands for
// DataParallelSize workers, one for each rank.
type Endpoint struct {
	Name string // unique in the pool; a pod's name in Kubernetes
	// host:port as Envoy dials it; several endpoints may share one (a shared frontend). A prefill worker's may be empty
	Address string
	// Namespace is Dynamo's, as discovery says it; empty: not known. The prefill and the decode worker of a request are
	// of one namespace.
	Namespace string

	InstanceID            uint64 // Dynamo's id of the worker process
	Role                  Role
	DataParallelStartRank uint32
	DataParallelSize      uint32 // 0 means 1
	// RankByAddress says that the address is one rank's own, and that who listens there knows of no others: a request
	// must not name one.
	RankByAddress bool

	KVEvents string // ZMQ address of rank DataParallelStartRank; rank r is at its port + (r - start). Empty: no events
	KVReplay string // ZMQ address of the replay socket, numbered alike. Empty: no replay
	KVTopic  string // subscription prefix; empty means everything
	// URL of the engine's own metrics page. Empty: it is made from Address, see package pool/enginemetrics
	Metrics string
	// EventChannels are where Dynamo's event plane carries the KV events, at most one for each rank, ordered by rank.
	// They matter only when KVEvents is empty.
	EventChannels []EventChannel
	// LoadChannels are where the event plane carries the loads of the workers of the endpoint's Dynamo path: of all of
	// them, since only the messages say whose they are. Their Rank means nothing, and over NATS they have no Publisher.
	LoadChannels []EventChannel

	BlockSize           int      // tokens per KV block; 0: not known yet
	TotalKVBlocks       int      // device blocks per rank; 0: not known
	MaxNumBatchedTokens int      // prefill tokens per engine step; 0: not known
	Model               string   // the model served; empty: whatever the request names
	DeviceType          string   // CPU for one without an accelerator; empty: not known
	Taints              []string // sorted, each once, in a snapshot
	Transfer            Transfer // of a prefill worker
	// OtherTokenizer says that the worker's tokenizer or template is known to be another than kvepp's, so that its
	// blocks cannot be matched with prompts: it is routed to by load only.
	OtherTokenizer bool
	// SameTokenizer says that all of them are known to be kvepp's.
	SameTokenizer bool
	EAGLE         bool // blocks are hashed over windows of BlockSize+1 tokens
	// CordonedBy is the source of endpoints that asks for no new requests to this one. Empty: none asks.
	CordonedBy CordonSource
}

// CordonSource is where the wish comes from that an endpoint gets no new requests. People read it.
type CordonSource string

// The sources of endpoints that can cordon them.
const (
	CordonedByFile CordonSource = "endpoints file"
	CordonedByPod  CordonSource = "Pod annotation"
)

// Transfer says which decode workers should go on with the prompts of a prefill worker: those that its blocks reach
// soonest. The zero value says nothing.
type Transfer struct {
	Taint    string  // which these decode workers have
	Required bool    // no others will do
	Weight   float32 // else how much they are preferred, as in a request's preferred taints
}

// EventChannel is where Dynamo's event plane carries what one publisher sends: the KV events of one rank of one worker
// process, for one. The zero value is none.
type EventChannel struct {
	Rank      uint32
	Publisher uint64 // id that the messages name
	ZMQ       string // address of the publisher's socket; empty: over NATS
	Subject   string // over NATS; several publishers share one
}

// Transport is "zmq" or "nats".
func (c EventChannel) Transport() string {
	if c.ZMQ != "" {
		return "zmq"
	}
	return "nats"
}

// Worker is one rank of one endpoint: one KV cache.
type Worker struct {
	kvblock.Worker
	*Endpoint
	Rank uint32

	// BlockSize is the endpoint's, else what the engine announced. 0: not known yet; hide nothing behind it.
	BlockSize int
	// EAGLE says that blocks are hashed over windows of BlockSize+1 tokens: the endpoint's, until the worker's own
	// events say otherwise.
	EAGLE bool
	// UpperBound says that the worker may hold less of a prompt than its events announce, see kvblock.Traits.
	UpperBound bool
	// Silent says that the worker has served requests and sent no event of the blocks that they made.
	Silent bool
	// Announced is the block size of the worker's own events when it differs from BlockSize, else 0. Such a worker's
	// blocks cannot be matched: it is routed to by load only.
	Announced int
}

// KVEventsAddress returns the ZMQ address of this rank's events, "" when the endpoint has none.
func (w *Worker) KVEventsAddress() string {
	return offsetPort(w.KVEvents, w.Rank-w.DataParallelStartRank)
}

// KVReplayAddress returns the ZMQ address of this rank's replay socket, "" when the endpoint has none.
func (w *Worker) KVReplayAddress() string {
	return offsetPort(w.KVReplay, w.Rank-w.DataParallelStartRank)
}

// EventChannel returns where the event plane carries this rank's events; false when nowhere, or when the engine's own
// socket is known, which says the same sooner and can be asked for what was missed.
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

// Announces reports whether the worker's KV events can be heard of anywhere.
func (w *Worker) Announces() bool {
	_, channel := w.EventChannel()
	return channel || w.KVEvents != ""
}

// UnknownBatchedTokens stands for MaxNumBatchedTokens where it is not known: so many that no part of them is ever
// exceeded.
//
// Source: dynamo-llm 1.6.1, discovery::worker_monitor; dynamo-kv-router 1.6.1, scheduling::queue.
const UnknownBatchedTokens = 10_000_000

// BatchedTokens is how many prefill tokens the endpoint's engine takes in one step.
func (e *Endpoint) BatchedTokens() int {
	if e.MaxNumBatchedTokens > 0 {
		return e.MaxNumBatchedTokens
	}
	return UnknownBatchedTokens
}

// String names a worker in logs: endpoint and rank.
func (w *Worker) String() string { return fmt.Sprintf("%s/%d", w.Name, w.Rank) }

// identity is what makes a worker the same KV cache, cut into the same blocks, across two updates; the rest of an
// endpoint may change under it.
type identity struct {
	name, address, events, replay, topic string
	instance                             uint64
	rank                                 uint32
	blockSize                            int
	eagle                                bool
	channel                              EventChannel
}

func (w *Worker) identity() identity {
	channel, _ := w.EventChannel()
	return identity{w.Name, w.Address, w.KVEventsAddress(), w.KVReplayAddress(), w.KVTopic, w.InstanceID, w.Rank,
		w.Endpoint.BlockSize, w.Endpoint.EAGLE, channel}
}

// Snapshot is the pool at one moment. It never changes.
type Snapshot struct {
	// Workers is ordered by endpoint as the source gave them, then by rank.
	Workers []Worker

	readers atomic.Int64
}

// Release ends one Acquire. The snapshot must not be used afterwards.
func (s *Snapshot) Release() { s.readers.Add(-1) }

// Watcher is told of workers that join and leave, after the snapshot that says so is published.
type Watcher interface {
	// WorkerJoined starts whatever is kept for a worker.
	WorkerJoined(Worker)
	// WorkerLeft forgets a worker. When it returns, nothing of the worker may remain and nothing may come of it later.
	// It is called at once when the worker leaves, and again before its number goes to somebody else, because a
	// decision that was under way may have booked on it in between: a second call must be harmless.
	WorkerLeft(kvblock.Worker)
}

// Pool is the current set of endpoints. Create it with New.
type Pool struct {
	current atomic.Pointer[Snapshot]

	// update serialises Update and with it the calls to watchers. It guards these:
	update   sync.Mutex
	watchers []Watcher
	onCordon func(endpoint string, by CordonSource) // nil: nothing is called
	leaving  []kvblock.Worker
	free     []kvblock.Worker
	next     kvblock.Worker

	// publishing serialises changes of current. It is apart from update because WorkerLeft waits for an engine's last
	// event to be applied, and that event may be the one that reports a block size.
	publishing sync.Mutex
	old        []*Snapshot // superseded, perhaps still read; guarded by publishing

	log *slog.Logger
}

// New returns an empty pool.
func New(log *slog.Logger) *Pool {
	p := &Pool{log: log}
	p.current.Store(&Snapshot{})
	return p
}

// Watch adds a watcher. Add all of them before the first Update: earlier workers are not announced again.
func (p *Pool) Watch(w Watcher) {
	p.update.Lock()
	defer p.update.Unlock()
	p.watchers = append(p.watchers, w)
}

// OnCordon sets the function that Update calls when Endpoint.CordonedBy of an endpoint changes that stays in the pool.
// Watchers learn from WorkerJoined that an endpoint is cordoned when it joins. Set the function before the first
// Update.
func (p *Pool) OnCordon(f func(endpoint string, by CordonSource)) {
	p.update.Lock()
	defer p.update.Unlock()
	p.onCordon = f
}

// Acquire returns the current snapshot. The caller releases it: a worker's number goes to somebody else only when
// everybody who could still mean the old holder has let go.
func (p *Pool) Acquire() *Snapshot {
	for {
		s := p.current.Load()
		s.readers.Add(1)
		// Had the snapshot been replaced between the load and the add, Update may have seen no reader and reused a
		// number.
		if p.current.Load() == s {
			return s
		}
		s.Release()
	}
}

// Update makes endpoints the pool's content. A worker that was there before, with the same name, address, instance id,
// rank, event sockets and block size, keeps its number and what its engine announced; the others join or leave.
//
// Endpoints must have unique names; New's callers get them from ParseFile, which refuses others.
func (p *Pool) Update(endpoints []Endpoint) {
	p.update.Lock()
	defer p.update.Unlock()
	p.reclaim()

	p.publishing.Lock()
	before := p.current.Load().Workers
	joined, left, recordoned := p.put(nil, before, endpoints)
	p.publishing.Unlock()
	p.announce(joined, left, recordoned)
}

// Change removes the endpoints of some names from the pool, and adds others. An endpoint that is removed and added
// takes its place among the last, and its workers stay as they do in Update. What is added must have no other name of
// the pool. Where nothing is removed, this takes no time for the endpoints that are there.
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
		var last *Endpoint // the endpoint of the workers before, whose names were compared
		gone := false
		for i := range all {
			if w := &all[i]; w.Endpoint != last {
				last, gone = w.Endpoint, isRemoved(w.Name)
			}
			if gone {
				removed = append(removed, all[i])
			} else {
				kept = append(kept, all[i])
			}
		}
	}
	// Without removals the new workers come behind those of the current snapshot in its own memory, of which no reader
	// sees more than was there. Nobody else has written there: a snapshot is followed once.
	joined, left, recordoned := p.put(kept, removed, add)
	p.publishing.Unlock()
	p.announce(joined, left, recordoned)
}

// announce tells the watchers what put returned. The caller holds p.update.
func (p *Pool) announce(joined, left []Worker, recordoned []*Endpoint) {
	if p.onCordon != nil {
		for _, e := range recordoned {
			p.onCordon(e.Name, e.CordonedBy)
		}
	}
	for _, w := range left {
		p.log.Info("worker left", "worker", w.String(), "instance", w.InstanceID)
		for _, o := range p.watchers {
			o.WorkerLeft(w.Worker)
		}
		p.leaving = append(p.leaving, w.Worker)
	}
	for _, w := range joined {
		p.log.Info(
			"worker joined",
			"worker",
			w.String(),
			"instance",
			w.InstanceID,
			"address",
			w.Address,
			"role",
			w.Role,
		)
		for _, o := range p.watchers {
			o.WorkerJoined(w)
		}
	}
}

// put publishes the snapshot of the workers in kept and those of endpoints, which may be among the workers before. It
// returns the workers that joined, those of before that left, and the endpoints whose CordonedBy changed. The caller
// holds p.update and p.publishing.
func (p *Pool) put(kept, before []Worker, endpoints []Endpoint) (joined, left []Worker, recordoned []*Endpoint) {
	known := remembered{workers: before, stayed: make([]bool, len(before))}
	after := &Snapshot{Workers: kept}
	tooMany := 0
	for i := range endpoints {
		e := endpoints[i]
		if e.Role == "" {
			e.Role = Aggregated
		}
		e.DataParallelSize = max(e.DataParallelSize, 1)
		// what discovery has was not counted with the endpoints file
		if len(after.Workers)+int(e.DataParallelSize) > maxWorkers {
			tooMany++
			continue
		}
		if len(e.Taints) > 1 {
			e.Taints = slices.Compact(slices.Sorted(slices.Values(e.Taints)))
		}
		// not up to the last rank: behind the highest number there is none to end at
		for i := range e.DataParallelSize {
			w := Worker{Endpoint: &e, Rank: e.DataParallelStartRank + i, BlockSize: e.BlockSize, EAGLE: e.EAGLE}
			if was := known.find(w.identity()); was != nil {
				w.Worker = was.Worker
				w.BlockSize, w.Announced = was.BlockSize, was.Announced
				w.EAGLE, w.UpperBound, w.Silent = was.EAGLE, was.UpperBound, was.Silent
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
		p.log.Error(
			"more workers than kvepp has numbers for: the last endpoints are left out; spread them over several kvepps",
			"left_out",
			tooMany,
			"workers",
			len(after.Workers),
			"most",
			maxWorkers,
		)
	}
	p.publish(after)
	for i, w := range before {
		if !known.stayed[i] {
			left = append(left, w)
		}
	}
	return joined, left, recordoned
}

// remembered finds the workers of an earlier snapshot again. Most come in the order in which they were: of hundreds one
// has left, or one has come in between.
type remembered struct {
	workers []Worker
	stayed  []bool         // of workers, by index: found
	next    int            // index behind the one found last
	byName  map[string]int // index of an endpoint's first worker
}

// near is how far ahead of the last worker found the next is looked for before all of them are put into a map.
const near = 4

// find returns the worker of an identity, each once; nil when there is none.
func (r *remembered) find(id identity) *Worker {
	for i := r.next; i < min(r.next+near, len(r.workers)); i++ {
		if !r.stayed[i] && r.workers[i].identity() == id {
			return r.found(i)
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
			if !r.stayed[i] && r.workers[i].identity() == id {
				return r.found(i)
			}
		}
	}
	return nil
}

func (r *remembered) found(i int) *Worker {
	r.stayed[i], r.next = true, i+1
	return &r.workers[i]
}

// ReportBlockSize records the block size that a worker's own events announce. The first one is adopted when nothing
// else said it; one that differs from what is known, or is none that can be believed, makes the worker load-only until
// they agree again.
func (p *Pool) ReportBlockSize(w kvblock.Worker, announced int) {
	p.publishing.Lock()
	defer p.publishing.Unlock()
	before := p.current.Load()
	i := slices.IndexFunc(before.Workers, func(x Worker) bool { return x.Worker == w })
	if i < 0 {
		return // it has left meanwhile
	}
	if x := &before.Workers[i]; x.BlockSize == announced && x.Announced == 0 || x.Announced == announced {
		return
	}
	after := &Snapshot{Workers: slices.Clone(before.Workers)}
	x := &after.Workers[i]
	switch {
	case x.BlockSize == 0 && (announced < 1 || announced > kvblock.MaxBlockSize):
		x.Announced = announced
		p.log.Error(
			"block size announced for a worker is out of range: this worker is routed to by load only",
			"worker",
			x.String(),
			"announced",
			announced,
		)
	case x.BlockSize == 0:
		x.BlockSize, x.Announced = announced, 0
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

// CorrectBlockSize replaces a block size that was taken from the worker's own events, because the stores in that size
// were prompt tails, shorter than the engine's blocks. A configured block size stays.
func (p *Pool) CorrectBlockSize(w kvblock.Worker, announced int) {
	p.change(w, func(x *Worker) {
		if x.Endpoint.BlockSize != 0 || x.BlockSize == announced {
			return
		}
		p.log.Info("block size corrected: the stores so far were prompt tails, shorter than the engine's blocks",
			"worker", x.String(), "block_size", announced, "tail_size", x.BlockSize)
		x.BlockSize, x.Announced = announced, 0
	})
}

// ReportTraits records what else a worker's own events say about its blocks.
func (p *Pool) ReportTraits(w kvblock.Worker, eagle, upperBound bool) {
	p.change(w, func(x *Worker) {
		if x.EAGLE != eagle {
			p.log.Info(
				"the engine's events say whether its blocks are EAGLE's, one token wider",
				"worker",
				x.String(),
				"eagle",
				eagle,
			)
		}
		if upperBound && !x.UpperBound {
			p.log.Info(
				"this worker's overlap is an upper bound: parts of its model keep less than its events announce",
				"worker",
				x.String(),
			)
		}
		x.EAGLE, x.UpperBound = eagle, upperBound
	})
}

// ReportSilent records whether a worker is silent.
func (p *Pool) ReportSilent(w kvblock.Worker, silent bool) {
	p.change(w, func(x *Worker) { x.Silent = silent })
}

// change publishes a snapshot in which w is as edit leaves it, unless it has left meanwhile.
func (p *Pool) change(w kvblock.Worker, edit func(*Worker)) {
	p.publishing.Lock()
	defer p.publishing.Unlock()
	before := p.current.Load()
	i := slices.IndexFunc(before.Workers, func(x Worker) bool { return x.Worker == w })
	if i < 0 {
		return
	}
	after := &Snapshot{Workers: slices.Clone(before.Workers)}
	if edit(&after.Workers[i]); after.Workers[i] != before.Workers[i] {
		p.publish(after)
	}
}

// publish replaces the snapshot. The caller holds p.publishing.
func (p *Pool) publish(s *Snapshot) {
	// a pool that is never updated, but learns the block sizes of thousands of workers, must not keep them all
	p.prune()
	p.old = append(p.old, p.current.Swap(s))
}

// prune lets go of superseded snapshots that nobody reads. The caller holds p.publishing.
func (p *Pool) prune() {
	p.old = slices.DeleteFunc(p.old, func(s *Snapshot) bool { return s.readers.Load() == 0 })
}

// reclaim frees the numbers of workers that left, once no reader of an older snapshot remains. The caller holds
// p.update.
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

// number returns a worker number that nobody holds. The caller holds p.update.
func (p *Pool) number() kvblock.Worker {
	if n := len(p.free); n > 0 {
		w := p.free[n-1]
		p.free = p.free[:n-1]
		return w
	}
	p.next++
	return p.next - 1
}
