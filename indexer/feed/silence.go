package feed

import (
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// Events are off by default in every engine, and a ZMQ subscription to a wrong port, or through a firewall, connects to
// nothing without a word: all of that looks like an empty cache. So a worker is called silent that has served this many
// requests of a full block and sent no event within this time.
const (
	silenceRequests = 10
	silenceTime     = time.Minute

	// fullBlock stands for the block size of a worker whose own is not known, in tokens: larger than engines' defaults.
	fullBlock = 256
)

// hearing tells whether one worker is silent. Its methods are safe for concurrent use, and harmless on nil: a worker of
// which no events are expected.
type hearing struct {
	changed func(silent bool) // called one at a time; not after leave

	heard atomic.Bool // an event came since the subscription began, or since the last one came after a disconnect

	mu     sync.Mutex // guards what follows
	served int
	first  time.Time // when the first of served was
	timer  *time.Timer
	silent bool
	left   bool
}

// request counts a request that was served.
func (h *hearing) request() {
	if h == nil || h.heard.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch h.served++; {
	case h.left || h.served > silenceRequests:
	case h.served == 1:
		h.first = time.Now()
	case h.served == silenceRequests:
		h.timer = time.AfterFunc(max(0, silenceTime-time.Since(h.first)), h.judge)
	}
}

// judge runs when the time is over.
func (h *hearing) judge() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.heard.Load() && !h.left && h.served >= silenceRequests && !h.silent {
		h.silent = true
		h.changed(true)
	}
}

// event says that the worker sent one.
func (h *hearing) event() {
	if h == nil || h.heard.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard.Store(true)
	if h.silent && !h.left {
		h.silent = false
		h.changed(false)
	}
}

// again begins anew, because the publisher of the events so far is gone.
func (h *hearing) again() {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard.Store(false)
	if !h.silent {
		h.served = 0
	}
}

// leave ends it, and returns whether the worker was silent.
func (h *hearing) leave() bool {
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.left = true
	if h.timer != nil {
		h.timer.Stop()
	}
	was := h.silent
	h.silent = false
	return was
}

// listen returns the hearing of a worker; nil for one that sends no events, as workers that only decode do not.
func (f *Feed) listen(w pool.Worker) *hearing {
	if w.Role == pool.Decode {
		return nil
	}
	return &hearing{changed: func(silent bool) {
		f.pool.ReportSilent(w.Worker, silent)
		if !silent {
			f.silent.Add(-1)
			f.log.Info("a worker that was silent sends KV events", "worker", w.String())
			return
		}
		f.silent.Add(1)
		f.log.Warn("a worker has served requests and sent no KV event: "+f.withoutEvents(w.Worker)+". "+
			"Is its kvEvents address right, are its engine's KV events on, and is prefix caching on?", "worker",
			w.String(), "events", f.eventsAddress(&w),
			"requests", silenceRequests, "within", silenceTime, "engine_flag", engineFlag(f.config.Engine))
	}}
}

// withoutEvents says by what a silent worker is routed to.
func (f *Feed) withoutEvents(w kvblock.Worker) string {
	s := f.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		switch x := &s.Workers[i]; {
		case x.Worker != w:
		case x.OtherTokenizer:
			return "it is routed to by load"
		case x.BlockSize == 0:
			return "its block size is not known either, so it is routed to by load (reason no_block_size). " +
				"With blockSize in the endpoints file or --kv-cache-block-size its cache is guessed from the " +
				"requests it was sent"
		default:
			return "what it has cached is guessed from the requests it was sent"
		}
	}
	return "it has left" // meanwhile
}

// engineFlag is what turns the events of an engine on.
func engineFlag(engine string) string {
	switch engine {
	case "vllm":
		return `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'`
	case "sglang":
		return `--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557"}'`
	case "trtllm":
		return "kv_cache_config: {enable_block_reuse: true, event_buffer_max_size: 1024}, and a process that " +
			"publishes the engine's KV events over ZMQ"
	}
	return "--kv-events-config (dynamo.vllm, dynamo.sglang) or --publish-events-and-metrics (dynamo.trtllm)"
}

// Served counts a request of so many prompt tokens that w has computed the prompt of. blockSize is w's, 0 if it is not
// known.
func (f *Feed) Served(w kvblock.Worker, tokens, blockSize int) {
	if blockSize == 0 {
		blockSize = fullBlock
	}
	if tokens <= blockSize { // the last token's block is not full before the next
		return
	}
	f.mu.Lock()
	h := f.hearings[w]
	f.mu.Unlock()
	h.request()
}

// Silent returns how many workers have served requests and sent no event.
func (f *Feed) Silent() int { return int(f.silent.Load()) }
