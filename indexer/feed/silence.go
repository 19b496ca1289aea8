package feed

import (
	"sync"
	"sync/atomic"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// Events are off by default in every engine, and a ZMQ subscription to a wrong port or through a firewall never reports
// that it is not connected. Each of these looks like an empty cache. Therefore a worker counts as silent if it has
// prefilled silenceRequests prompts of at least a full block and sent no event within silenceTime.
const (
	silenceRequests = 10
	silenceTime     = time.Minute

	// assumedBlockSize, in tokens, is used for a worker whose block size is not known: larger than engines' defaults.
	assumedBlockSize = 256
)

// silenceDetector detects whether one worker is silent. Its methods are safe for concurrent use. On nil, the detector
// of a worker that sends no events, they do nothing.
type silenceDetector struct {
	changed func(silent bool) // called one at a time; not after leave

	eventSeen atomic.Bool // an event came since the subscription began, or since the latest disconnect

	mu      sync.Mutex // guards what follows
	prompts int        // prefilled since the detector began or the worker disconnected
	first   time.Time  // time of the first of prompts
	timer   *time.Timer
	silent  bool
	left    bool
}

// request counts a prefilled prompt.
func (d *silenceDetector) request() {
	if d == nil || d.eventSeen.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch d.prompts++; {
	case d.left || d.prompts > silenceRequests:
	case d.prompts == 1:
		d.first = time.Now()
	case d.prompts == silenceRequests:
		d.timer = time.AfterFunc(max(0, silenceTime-time.Since(d.first)), d.expired)
	}
}

// expired runs when silenceTime is over.
func (d *silenceDetector) expired() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.eventSeen.Load() && !d.left && d.prompts >= silenceRequests && !d.silent {
		d.silent = true
		d.changed(true)
	}
}

// event notes that the worker sent an event.
func (d *silenceDetector) event() {
	if d == nil || d.eventSeen.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.eventSeen.Store(true)
	if d.silent && !d.left {
		d.silent = false
		d.changed(false)
	}
}

// disconnected notes that the publisher of the events so far is gone.
func (d *silenceDetector) disconnected() {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.eventSeen.Store(false)
	if !d.silent {
		d.prompts = 0
	}
}

// leave ends the detector, and returns whether the worker was silent.
func (d *silenceDetector) leave() bool {
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left = true
	if d.timer != nil {
		d.timer.Stop()
	}
	was := d.silent
	d.silent = false
	return was
}

// newSilenceDetector returns a detector for a worker; nil for a decode worker, which sends no events.
func (f *Feed) newSilenceDetector(w pool.Worker) *silenceDetector {
	if w.Role == pool.Decode {
		return nil
	}
	return &silenceDetector{changed: func(silent bool) {
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

// withoutEvents describes, for the log, how kvepp routes to a silent worker.
func (f *Feed) withoutEvents(w kvblock.Worker) string {
	s := f.pool.Acquire()
	defer s.Release()
	switch x := s.Worker(w); {
	case x == nil:
		return "it has left"
	case x.OtherTokenizer:
		return "kvepp routes to it by load"
	case x.BlockSize == 0:
		return "its block size is also unknown, so kvepp routes to it by load (reason no_block_size). " +
			"With blockSize in the endpoints file or --kv-cache-block-size kvepp predicts its cache from the " +
			"requests sent to it"
	}
	return "kvepp predicts its cache from the requests sent to it"
}

// engineFlag returns the setting that makes an engine publish events.
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

// PromptComputed notes that w has prefilled a prompt of this many tokens. blockSize is w's block size, 0 if it is not
// known.
func (f *Feed) PromptComputed(w kvblock.Worker, tokens, blockSize int) {
	if blockSize == 0 {
		blockSize = assumedBlockSize
	}
	if tokens <= blockSize { // the block of the last token is not full before the next token
		return
	}
	f.mu.Lock()
	d := f.silence[w]
	f.mu.Unlock()
	d.request()
}

// Silent returns the number of workers that have served requests and sent no event.
func (f *Feed) Silent() int { return int(f.silent.Load()) }
