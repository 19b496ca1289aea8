package main

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/test/bench/cputime"
)

// readers has a loaded index, the queries, and the operations of the writer.
type readers struct {
	index   *indexer.Index
	chains  [][]kvblock.SequenceHash
	workers []kvblock.Worker // of stores[i] and removes[i]
	stores  []kvblock.Stored // of phaseMixed
	removes []kvblock.Removed
}

// readFor is the minimum time of a measurement. The result is the CPU time of the readers' threads.
const readFor = 700 * time.Millisecond

// openReaders loads a workload, and keeps it mapped.
func openReaders(path string) (*readers, error) {
	w, err := openWorkload(path)
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
	r := &readers{index: x}
	w.rewind()
	var op operation
	for phase := 0; ; {
		if err := w.next(&op); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		switch {
		case op.kind == opPhase:
			phase = op.phase
		case op.kind == opQuery && phase == phaseFind:
			r.chains = append(r.chains, kvblock.AppendSequenceHashes(nil, op.query))
		case op.kind == opStore && phase == phaseMixed:
			var remove kvblock.Removed
			for _, b := range op.store.Blocks {
				remove.Hashes = append(remove.Hashes, b.Engine)
			}
			r.workers = append(r.workers, op.worker)
			r.stores = append(r.stores, op.store)
			r.removes = append(r.removes, remove)
		}
	}
	if len(r.chains) == 0 || len(r.stores) == 0 {
		return nil, fmt.Errorf("%s has no queries, or no stores among queries", path)
	}
	return r, nil
}

type readResponse struct {
	FindNS float64 `json:"find_ns"` // CPU time of a query, mean over the threads
	Rate   float64 `json:"rate"`    // of the writer, in blocks a second
}

// read measures the CPU time of a query with this many reading threads.
func (r *readers) read(threads int) (*readResponse, error) {
	var stop atomic.Bool
	timer := time.AfterFunc(readFor, func() { stop.Store(true) })
	defer timer.Stop()
	var all sync.WaitGroup
	took := make([]float64, threads)
	for i := range took {
		all.Go(func() { took[i] = r.find(i*7919, &stop) })
	}
	all.Wait()
	a := &readResponse{}
	for _, t := range took {
		a.FindNS += t / float64(threads)
	}
	return a, nil
}

// find runs queries until stop is set, and returns the CPU time of a query in ns.
func (r *readers) find(from int, stop *atomic.Bool) float64 {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var scores indexer.OverlapScores
	n, start := 0, cputime.Thread()
	for ; !stop.Load(); n++ {
		r.index.FindMatches(r.chains[(from+n)%len(r.chains)], &scores)
	}
	return (cputime.Thread() - start) / float64(n)
}

// besideWriter is read with one thread, while another writes.
func (r *readers) besideWriter(rate float64) (*readResponse, error) {
	var stop atomic.Bool
	done := make(chan float64)
	go func() { done <- r.find(0, &stop) }()
	a, err := r.write(rate)
	stop.Store(true)
	a.FindNS = <-done
	return a, err
}

// write applies at most rate blocks a second: it stores the blocks of phaseMixed, removes them, and repeats.
func (r *readers) write(rate float64) (*readResponse, error) {
	blocks := 0
	for start := time.Now(); ; {
		for i := range 2 * len(r.stores) {
			if i < len(r.stores) {
				if err := r.index.Stored(r.workers[i], r.stores[i]); err != nil {
					return &readResponse{}, err
				}
				blocks += len(r.stores[i].Blocks)
			} else {
				j := 2*len(r.stores) - 1 - i
				r.index.Removed(r.workers[j], r.removes[j])
				blocks += len(r.removes[j].Hashes)
			}
			if i%64 != 0 {
				continue
			}
			if early := time.Duration(float64(blocks)/rate*1e9) - time.Since(start); early > 100*time.Microsecond {
				time.Sleep(early)
			}
		}
		if took := time.Since(start); took > readFor {
			return &readResponse{Rate: float64(blocks) / took.Seconds()}, nil
		}
	}
}
