package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/test/bench/cputime"
)

// result has the costs of one phase.
type result struct {
	StoreNS  float64 `json:"store_ns"`
	Stored   int     `json:"stored"`
	RemoveNS float64 `json:"remove_ns"`
	Removed  int     `json:"removed"`
	FindNS   float64 `json:"find_ns"`  // FindMatches
	ChainNS  float64 `json:"chain_ns"` // computing the sequence hashes that FindMatches takes
	Queries  int     `json:"queries"`
	Queried  int     `json:"queried"` // blocks in the queries
	GCNS     float64 `json:"gc_ns"`   // garbage collection, part of AllNS
	AllNS    float64 `json:"all_ns"`  // the whole process
	Digest   string  `json:"digest"`  // of all responses
	digest   uint64
}

// mixed is the finisher of splitmix64.
func mixed(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// digest is equal for equal responses, in any order of the workers.
func digest(scores *indexer.OverlapScores) (sum uint64) {
	for o := range scores.Overlaps() {
		sum += mixed(uint64(o.Worker+1)<<32 | uint64(o.Blocks))
	}
	return sum
}

func newIndex() (*indexer.Index, error) { return indexer.New(indexer.Config{MaxBytes: 16 << 30}) }

// replay runs a whole workload on a new index, and returns the costs of each phase.
func replay(path string) (map[int]*result, error) {
	w, err := openWorkload(path)
	if err != nil {
		return nil, err
	}
	defer w.close()
	x, err := newIndex()
	if err != nil {
		return nil, err
	}
	r := &replayer{
		index: x, workers: int(w.words[1]), phases: map[int]*result{}, events: make([]kvblock.Operation, 0, eventBatch),
		messages: make([]message, 0, eventBatch),
		blocks:   make([]kvblock.StoredBlock, 0, 2*eventBatch), hashes: make([]kvblock.EngineHash, 0, 2*eventBatch),
	}
	debug.FreeOSMemory() // also collects garbage, so that the run does not pay for earlier garbage
	var op operation
	for {
		err := w.next(&op)
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if err := r.step(&op); err != nil {
			return nil, err
		}
	}
	if err := r.enter(phases); err != nil {
		return nil, err
	}
	delete(r.phases, phases)
	for _, p := range r.phases {
		p.Digest = fmt.Sprintf("%016x", p.digest)
	}
	runtime.KeepAlive(x)
	return r.phases, nil
}

// Consecutive events of one worker and kind come to kvepp in one message of at most messageEvents events, because
// engines send the changes of one step together. An event of at least longBlocks blocks, which is a prompt's, comes
// alone.
const (
	messageEvents = 64
	longBlocks    = 64
)

// The events and queries that are timed together: events of up to eventBatch blocks, which take long enough for the
// clock and fit the caches, as events do that were just decoded; and queryBatch queries, as with Dynamo's index.
const (
	eventBatch = 16_384
	queryBatch = 4096
)

// replayer applies operations and measures their time. Consecutive operations of one kind are timed together.
type replayer struct {
	index   *indexer.Index
	workers int // of the workload
	phases  map[int]*result
	id      int
	now     *result

	entered   float64
	gcEntered float64

	kind     uint8 // of the waiting events: opStore or opRemove
	events   []kvblock.Operation
	messages []message             // of these events
	blocks   []kvblock.StoredBlock // copied for these events
	hashes   []kvblock.EngineHash  // copied for these events

	window  int // operations in this window of phaseMixed
	queries [][]kvblock.LocalHash
	chains  [][]kvblock.SequenceHash
	memory  []kvblock.SequenceHash
	scores  indexer.OverlapScores
}

func (r *replayer) step(op *operation) error {
	switch op.kind {
	case opPhase:
		return r.enter(op.phase)
	case opClass:
		for w := range r.workers {
			r.index.SetHybrid(kvblock.Worker(w), &op.hybrid)
		}
	case opQuery:
		if r.id != phaseMixed {
			if err := r.apply(); err != nil {
				return err
			}
		}
		r.queries = append(r.queries, op.query)
		if r.id != phaseMixed && len(r.queries) == queryBatch {
			r.respond()
		}
	default:
		if r.id != phaseMixed && len(r.queries) > 0 {
			r.respond()
		}
		if op.kind != r.kind || len(r.blocks)+len(r.hashes) >= eventBatch {
			if err := r.apply(); err != nil {
				return err
			}
			r.kind = op.kind
		}
		blocks := len(op.store.Blocks)
		if op.kind == opRemove {
			blocks = len(op.remove.Hashes)
		}
		if last := len(r.messages) - 1; last >= 0 && !r.messages[last].alone && r.messages[last].worker == op.worker &&
			r.messages[last].events < messageEvents && blocks < longBlocks {
			r.messages[last].events++
		} else {
			r.messages = append(r.messages, message{worker: op.worker, events: 1, alone: blocks >= longBlocks})
		}
		if op.kind == opRemove {
			from := len(r.hashes)
			r.hashes = append(r.hashes, op.remove.Hashes...)
			op.remove.Hashes = r.hashes[from:]
			r.events = append(r.events, kvblock.Operation{Kind: kvblock.OpRemoved, Removed: op.remove})
			r.now.Removed += blocks
		} else {
			from := len(r.blocks)
			r.blocks = append(r.blocks, op.store.Blocks...)
			op.store.Blocks = r.blocks[from:]
			r.events = append(r.events, kvblock.Operation{Kind: kvblock.OpStored, Stored: op.store})
			r.now.Stored += blocks
		}
	}
	if r.id == phaseMixed {
		if r.window++; r.window == mixedWindow {
			if err := r.apply(); err != nil {
				return err
			}
			r.respond()
			r.window = 0
		}
	}
	return nil
}

// enter ends a phase and begins another.
func (r *replayer) enter(id int) error {
	if err := r.apply(); err != nil {
		return err
	}
	r.respond()
	all, gc := cputime.Process(), gcTime()
	if r.now != nil {
		r.now.AllNS, r.now.GCNS = all-r.entered, gc-r.gcEntered
	}
	r.now = &result{}
	r.id, r.phases[id], r.entered, r.gcEntered, r.window = id, r.now, all, gc, 0
	return nil
}

// message describes events of one kind that a worker sends together.
type message struct {
	worker kvblock.Worker
	events int
	alone  bool // whether no other event may be in it
}

// apply applies the waiting events, and adds their cost to the phase.
func (r *replayer) apply() error {
	if len(r.events) == 0 {
		return nil
	}
	var failed error
	events, start := r.events, cputime.Process()
	for _, m := range r.messages {
		for ops := events[:m.events]; len(ops) > 0; {
			n, applied := r.index.Apply(m.worker, ops, false)
			ops = ops[n:]
			if applied.Unknown > 0 {
				failed = fmt.Errorf("%d removed blocks were not held", applied.Unknown)
			}
			if len(applied.Failed) > 0 {
				failed = errors.Join(applied.Failed...)
			}
		}
		events = events[m.events:]
	}
	took := cputime.Process() - start - cputime.Cost
	if r.kind == opStore {
		r.now.StoreNS += took
	} else {
		r.now.RemoveNS += took
	}
	r.events, r.messages, r.blocks, r.hashes = r.events[:0], r.messages[:0], r.blocks[:0], r.hashes[:0]
	return failed
}

// respond answers the waiting queries, first for the time, then again for the digest.
func (r *replayer) respond() {
	if len(r.queries) == 0 {
		return
	}
	n := 0
	for _, q := range r.queries {
		n += len(q)
	}
	if cap(r.memory) < n {
		r.memory = make([]kvblock.SequenceHash, 0, 2*n)
	}
	memory := r.memory[:0]
	r.chains = r.chains[:0]
	at := cputime.Process()
	for _, q := range r.queries {
		from := len(memory)
		memory = kvblock.AppendSequenceHashes(memory, q)
		r.chains = append(r.chains, memory[from:])
	}
	hashed := cputime.Process()
	for _, c := range r.chains {
		r.index.FindMatches(c, &r.scores)
	}
	found := cputime.Process()
	r.now.ChainNS += hashed - at - cputime.Cost
	r.now.FindNS += found - hashed - cputime.Cost
	r.now.Queries += len(r.queries)
	r.now.Queried += n
	for _, c := range r.chains {
		r.index.FindMatches(c, &r.scores)
		r.now.digest += digest(&r.scores)
	}
	r.queries = r.queries[:0]
}

// footprint is the memory of an index.
type footprint struct {
	Entries  int     `json:"entries"`
	Live     float64 `json:"live"`     // growth of the live heap, in bytes
	Resident float64 `json:"resident"` // growth of the resident memory, in bytes
}

// memory loads a workload and returns the memory that the index takes.
func memory(path string) (*footprint, error) {
	w, err := openWorkload(path)
	if err != nil {
		return nil, err
	}
	defer w.close()
	live, resident, err := inUse()
	if err != nil {
		return nil, err
	}
	x, err := newIndex()
	if err != nil {
		return nil, err
	}
	if err := load(w, x); err != nil {
		return nil, err
	}
	f := &footprint{Entries: x.Stats().Entries}
	if f.Live, f.Resident, err = inUse(); err != nil {
		return nil, err
	}
	f.Live -= live
	f.Resident -= resident
	runtime.KeepAlive(x)
	return f, nil
}

// load applies the events of a workload's first phase.
func load(w *workload, x *indexer.Index) error {
	var op operation
	for {
		if err := w.next(&op); err != nil {
			return err
		}
		switch op.kind {
		case opStore:
			if err := x.Stored(op.worker, op.store); err != nil {
				return err
			}
		case opPhase:
			if op.phase != phaseLoad {
				return nil
			}
		}
	}
}

// inUse returns the live bytes of Go's heap, and the resident bytes that no file backs.
func inUse() (live, resident float64, err error) {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, 0, err
	}
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	var kib float64
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		return 0, 0, fmt.Errorf("RssAnon in /proc/self/status: %w", err)
	}
	return float64(m.HeapAlloc), kib * 1024, nil
}

// gcTime returns the CPU time of garbage collection so far, in ns.
func gcTime() float64 {
	sample := []metrics.Sample{
		{Name: "/cpu/classes/gc/total:cpu-seconds"},
		{Name: "/cpu/classes/gc/mark/idle:cpu-seconds"},
	}
	metrics.Read(sample)
	return 1e9 * (sample[0].Value.Float64() - sample[1].Value.Float64())
}
