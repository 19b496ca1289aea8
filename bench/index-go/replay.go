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

	"kvepp/bench/cputime"
	"kvepp/indexer"
	"kvepp/kvblock"
)

// result is what one phase took.
type result struct {
	StoreNS  float64 `json:"store_ns"`
	Stored   int     `json:"stored"`
	RemoveNS float64 `json:"remove_ns"`
	Removed  int     `json:"removed"`
	FindNS   float64 `json:"find_ns"`  // FindMatches
	ChainNS  float64 `json:"chain_ns"` // making the sequence hashes that it takes
	Queries  int     `json:"queries"`
	Queried  int     `json:"queried"` // blocks
	GCNS     float64 `json:"gc_ns"`   // of all this, collecting garbage
	AllNS    float64 `json:"all_ns"`  // the whole process
	Digest   string  `json:"digest"`  // of all answers
	digest   uint64
}

// mixed is the finisher of splitmix64.
func mixed(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// digest is equal for equal answers, in whatever order they list the workers.
func digest(scores *indexer.OverlapScores) (sum uint64) {
	for o := range scores.Overlaps() {
		sum += mixed(uint64(o.Worker+1)<<32 | uint64(o.Blocks))
	}
	return sum
}

func newIndex() (*indexer.Index, error) { return indexer.New(indexer.Config{MaxBytes: 16 << 30}) }

// replay runs a whole workload on a new index, and answers what each of its phases took.
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
	debug.FreeOSMemory() // and collects, so that no earlier run's garbage is this one's
	r := &replayer{index: x, phases: map[int]*result{}}
	var op operation
	for {
		err := w.next(&op)
		if err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		if err := r.step(&op); err != nil {
			return nil, err
		}
	}
	r.enter(phases)
	delete(r.phases, phases)
	for _, p := range r.phases {
		p.Digest = fmt.Sprintf("%016x", p.digest)
	}
	runtime.KeepAlive(x)
	return r.phases, nil
}

// Events that follow each other, of one worker and kind, come to kvepp in one message, at most messageEvents of them, as engines send
// what one step of theirs changed. One of longBlocks, a prompt's, comes alone.
const (
	messageEvents = 64
	longBlocks    = 64
)

// queryBatch is how many queries are timed together at most.
const queryBatch = 4096

// replayer applies operations and keeps the time. Runs of operations of one kind are timed as a whole.
type replayer struct {
	index  *indexer.Index
	phases map[int]*result
	id     int
	now    *result

	timing    uint8 // opStore or opRemove while a run of such is timed
	since     float64
	entered   float64
	gcEntered float64

	message []kvblock.Operation // events of one kind that the worker sends together
	worker  kvblock.Worker
	failed  error

	window  int // operations in this window of phaseMixed
	queries [][]kvblock.LocalHash
	chains  [][]kvblock.SequenceHash
	memory  []kvblock.SequenceHash
	scores  indexer.OverlapScores
}

func (r *replayer) step(op *operation) error {
	switch op.kind {
	case opPhase:
		r.enter(op.phase)
		return nil
	case opQuery:
		if r.id != phaseMixed {
			r.stop()
		}
		r.queries = append(r.queries, op.query)
		if r.id != phaseMixed && len(r.queries) == queryBatch {
			r.answer()
		}
	default:
		if r.id != phaseMixed && len(r.queries) > 0 {
			r.answer()
		}
		if r.timing != op.kind {
			r.stop()
			r.timing, r.since = op.kind, cputime.Process()
		}
		blocks := len(op.store.Blocks)
		if op.kind == opRemove {
			blocks = len(op.remove.Hashes)
		}
		if len(r.message) == messageEvents || len(r.message) > 0 && (op.worker != r.worker || blocks >= longBlocks) {
			r.apply()
		}
		r.worker = op.worker
		if op.kind == opRemove {
			r.message = append(r.message, kvblock.Operation{Kind: kvblock.OpRemoved, Removed: op.remove})
			r.now.Removed += blocks
		} else {
			r.message = append(r.message, kvblock.Operation{Kind: kvblock.OpStored, Stored: op.store})
			r.now.Stored += blocks
		}
		if blocks >= longBlocks {
			r.apply()
		}
	}
	if r.failed != nil {
		return r.failed
	}
	if r.id == phaseMixed {
		if r.window++; r.window == mixedWindow {
			r.stop()
			r.answer()
			r.window = 0
		}
	}
	return nil
}

// enter ends a phase and begins another.
func (r *replayer) enter(id int) {
	r.stop()
	r.answer()
	all, gc := cputime.Process(), gcTime()
	if r.now != nil {
		r.now.AllNS, r.now.GCNS = all-r.entered, gc-r.gcEntered
	}
	r.now = &result{}
	r.id, r.phases[id], r.entered, r.gcEntered, r.window = id, r.now, all, gc, 0
}

// apply applies the events that wait.
func (r *replayer) apply() {
	for ops := r.message; len(ops) > 0; {
		n, applied := r.index.Apply(r.worker, ops, false)
		ops = ops[n:]
		if applied.Unknown > 0 {
			r.failed = fmt.Errorf("%d removed blocks were not held", applied.Unknown)
		}
		if len(applied.Failed) > 0 {
			r.failed = errors.Join(applied.Failed...)
		}
	}
	r.message = r.message[:0]
}

// stop ends the run of stores or removals that is timed.
func (r *replayer) stop() {
	r.apply()
	if r.timing == opEnd {
		return
	}
	took := cputime.Process() - r.since - cputime.Cost
	if r.timing == opStore {
		r.now.StoreNS += took
	} else {
		r.now.RemoveNS += took
	}
	r.timing = opEnd
}

// answer answers the queries that wait: once for time, and once more for the digest.
func (r *replayer) answer() {
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

// footprint is what an index takes.
type footprint struct {
	Entries  int     `json:"entries"`
	Live     float64 `json:"live"`     // bytes of the heap in use, growth
	Resident float64 `json:"resident"` // bytes in RAM, growth
}

// memory loads a workload and answers what that took.
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

// inUse returns the bytes alive in Go's heap, and the bytes in RAM that no file backs.
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

// gcTime is the CPU time that garbage collections took so far, in ns.
func gcTime() float64 {
	sample := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}, {Name: "/cpu/classes/gc/mark/idle:cpu-seconds"}}
	metrics.Read(sample)
	return 1e9 * (sample[0].Value.Float64() - sample[1].Value.Float64())
}
