package pool

import (
	"sync"

	"kvepp/kvblock"
)

// AwaitFirst returns a channel that is closed when the pool has n endpoints that can serve requests. Prefill and encode
// workers do not count. Call it as Watch.
//
// Source: dynamo-llm 1.6.1, kv_router, which waits for the same number before it routes.
func (p *Pool) AwaitFirst(n int) <-chan struct{} {
	w := &first{pool: p, n: n, reached: make(chan struct{})}
	w.check()
	p.Watch(w)
	return w.reached
}

// first is the watcher of AwaitFirst.
type first struct {
	pool    *Pool
	n       int
	once    sync.Once
	reached chan struct{}
}

func (w *first) check() {
	select {
	case <-w.reached:
		return // without this, each of thousands of workers that join together would cause a scan of all
	default:
	}
	s := w.pool.Acquire()
	defer s.Release()
	found := 0
	var last *Endpoint
	for i := range s.Workers { // the ranks of an endpoint are adjacent
		if e := s.Workers[i].Endpoint; e != last && (e.Role == Aggregated || e.Role == Decode) {
			found++
			last = e
		}
	}
	if found >= w.n {
		w.once.Do(func() { close(w.reached) })
	}
}

func (w *first) WorkerJoined(Worker) { w.check() }

func (*first) WorkerLeft(kvblock.Worker) {}
