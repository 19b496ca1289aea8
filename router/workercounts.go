package router

import (
	"sync"
	"sync/atomic"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// workerCounts counts the ended requests of each worker. The zero value is empty.
type workerCounts struct {
	mu       sync.RWMutex
	byWorker []*workerCount // indexed by worker number; nil: no request yet; guarded by mu
}

// workerCount counts for one worker. Requests that end after their worker left count in one that is no longer reported.
type workerCount struct {
	all, errors, incomplete atomic.Uint64
	prompt, cached          atomic.Uint64 // tokens of requests whose prompt the worker computed
}

// WorkerTokens counts the prompt tokens of the ended requests whose prompts a worker computed.
type WorkerTokens struct {
	Prompt uint64
	Cached uint64 // as the engine reports, or else as kvepp predicted
}

// WorkerTokens returns the prompt tokens of a worker's ended requests.
func (r *Router) WorkerTokens(w kvblock.Worker) WorkerTokens {
	r.counts.mu.RLock()
	defer r.counts.mu.RUnlock()
	if int(w) >= len(r.counts.byWorker) || r.counts.byWorker[w] == nil {
		return WorkerTokens{}
	}
	c := r.counts.byWorker[w]
	return WorkerTokens{Prompt: c.prompt.Load(), Cached: c.cached.Load()}
}

// computed counts the prompt of a request that has ended. A failed request computed nothing.
func (c *workerCount) computed(a *Response, d *Decision) {
	if c == nil || a.Status != "200" {
		return
	}
	cached := a.CachedTokens
	if cached < 0 {
		cached = d.PredictedCachedTokens
	}
	prompt := max(a.PromptTokens, d.PromptTokens)
	c.prompt.Add(uint64(prompt))
	c.cached.Add(uint64(min(cached, prompt)))
}

// of returns the counts of a worker. The worker must be in a snapshot that the caller holds.
func (c *workerCounts) of(w kvblock.Worker) *workerCount {
	c.mu.RLock()
	var known *workerCount
	if int(w) < len(c.byWorker) {
		known = c.byWorker[w]
	}
	c.mu.RUnlock()
	if known != nil {
		return known
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := int(w) + 1; n > len(c.byWorker) {
		c.byWorker = append(c.byWorker, make([]*workerCount, n-len(c.byWorker))...)
	}
	if c.byWorker[w] == nil {
		c.byWorker[w] = new(workerCount)
	}
	return c.byWorker[w]
}

// ended counts a request. explained says that the proxy's access log will say who broke off an incomplete response;
// otherwise it counts as incomplete, although it may have been the client. A client that leaves before the response is
// no failure. A nil count counts nothing.
func (c *workerCount) ended(a *Response, explained bool) {
	if c == nil {
		return
	}
	c.all.Add(1)
	switch {
	case len(a.Status) == 3 && a.Status[0] == '5':
		c.errors.Add(1)
	case a.Status != "" && !a.Complete && !explained:
		c.incomplete.Add(1)
	}
}

// brokenOff counts a response that the worker broke off.
func (c *workerCount) brokenOff() {
	if c != nil {
		c.incomplete.Add(1)
	}
}

// WorkerRequests returns how many requests of a worker have ended.
func (r *Router) WorkerRequests(w kvblock.Worker) metrics.WorkerRequests {
	r.counts.mu.RLock()
	defer r.counts.mu.RUnlock()
	if int(w) >= len(r.counts.byWorker) || r.counts.byWorker[w] == nil {
		return metrics.WorkerRequests{}
	}
	c := r.counts.byWorker[w]
	return metrics.WorkerRequests{All: c.all.Load(), Errors: c.errors.Load(), Incomplete: c.incomplete.Load()}
}

// WorkerLoad returns what runs on a worker.
func (r *Router) WorkerLoad(w kvblock.Worker) scoring.Load { return r.book.Load(w) }

// WorkerJoined has requests that wait look for a worker.
func (r *Router) WorkerJoined(pool.Worker) { r.lookSoon() }

// WorkerLeft drops what is counted of a worker that left the pool. If it was the last, requests that wait have another
// reason for it.
func (r *Router) WorkerLeft(w kvblock.Worker) {
	r.lookSoon()
	r.counts.mu.Lock()
	defer r.counts.mu.Unlock()
	if int(w) < len(r.counts.byWorker) {
		r.counts.byWorker[w] = nil
	}
}
