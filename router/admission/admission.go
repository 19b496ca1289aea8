// Package admission holds conversations back while the workers' KV caches have no room for them.
//
// If more conversations run than the caches hold, they evict each other's blocks: each turn computes its whole prompt
// again, whichever worker it goes to. With admission, some conversations wait, and those that run keep their blocks.
//
// A conversation is a prompt and the later prompts that continue it: a prompt continues an earlier one if it begins
// with that one's full blocks. No session id is needed. A conversation that has a turn running, or had one a short time
// ago, is admitted, and its turns never wait here. Another one is admitted when a worker has room for it:
//
//	tokens that active requests hold + chance of return * tokens of idle conversations + need <= fill * capacity
//
// The chance of return, and the time for which an idle conversation counts, are learned. Until they are known, idle
// conversations do not count, so no request waits for them.
//
// What holding back protects are cached blocks. So it ends while less than a fifth of the tokens of about the last 200
// prompts are found in a cache: most of the work is then to compute new tokens, which no wait spares.
//
// The package owns the table of conversations. It chooses no worker and has no goroutine; the caller has requests wait.
//
// Concurrency: everything is safe for concurrent use.
package admission

import (
	"container/list"
	"math"
	"slices"
	"sync"
	"time"

	"kvepp/kvblock"
)

// DefaultFill is the usual Config.Fill. The rest is for the growth of admitted conversations.
const DefaultFill = 0.9

// DefaultMax is the usual Config.Max.
const DefaultMax = 65536

// What the learned numbers are until there are samples, and their bounds.
const (
	enoughSamples = 20 // idle times that ended, of each kind of number; and prompts
	// defaultOutput is the length of a response, in tokens, until one has ended.
	defaultOutput = 100
	// idlePauses is for how many mean pauses an idle conversation counts. Of pauses whose length is exponentially
	// distributed, 95 % are shorter.
	idlePauses = 3
	firstIdle  = 30 * time.Second
	leastIdle  = 5 * time.Second
	mostIdle   = 5 * time.Minute
	endBits    = 18
	// keep is the weight that earlier samples keep with each further one: about the last 200 count.
	keep = 0.995
	// leastCached is the least share of prompt tokens that must be found in a cache for holding back to go on.
	leastCached = 0.2
)

// Controller knows the conversations. Make one with New.
type Controller struct {
	cfg   Config
	began time.Time

	mu sync.Mutex // guards all below, and the fields of conversations and turns
	// byEnd finds a conversation by the sequence hash of the last full block of its latest prompt.
	byEnd map[kvblock.SequenceHash]*conversation
	// ends counts the conversations in byEnd by a few bits of their hash, so that most blocks of a prompt need no look
	// into the map. A count of 255 stays.
	ends [1 << endBits]uint8
	// idle lists admitted conversations without a running turn, lapsed those that are not admitted any more. Each is in
	// the order of the end of their last turn, the oldest first.
	idle, lapsed list.List
	idleTokens   []int // of idle conversations, indexed by worker
	running      int   // conversations with a running turn

	outputs          []mean  // tokens, indexed by worker: one engine's reports say nothing about others
	median           int     // of outputs, as outputOr found it; 0: one of them has changed since
	pause            mean    // seconds from the end of a turn to the next one
	prompts          int     // so far
	tokens, cached   float64 // of prompts; weighted by keep
	returned, lapses float64 // idle conversations that were continued in time, or not; weighted by keep
}

// conversation is the latest prompt of a conversation and its response.
type conversation struct {
	end     kvblock.SequenceHash
	worker  kvblock.Worker
	shared  int // tokens of its first prompt that were cached on the worker before
	own     int // tokens that it left in the worker's cache and does not share; while it is idle
	running int // turns
	ended   time.Duration
	place   *list.Element // in idle or lapsed; nil while a turn runs, and after it was dropped
	idle    bool          // it is in Controller.idle
	paused  bool          // no turn came since ended
}

// mean is a mean of all samples at first, later of about the last 100.
type mean struct{ samples, value float64 }

func (m *mean) add(x float64) {
	m.samples = min(m.samples+1, 100)
	m.value += (x - m.value) / m.samples
}

// Stats describes a Controller.
type Stats struct {
	// Conversations by state: with a running turn, idle and admitted, and idle for too long.
	Running, Idle, Lapsed int
	// Return is the chance, 0..1, that an idle conversation goes on; 0 until it is known. IdleFor is for how long an
	// idle conversation counts.
	Return  float64
	IdleFor time.Duration
}

// New returns a Controller without conversations. cfg must have passed [Config.Validate].
func New(cfg Config) *Controller {
	if cfg.Max == 0 {
		cfg.Max = DefaultMax
	}
	return &Controller{cfg: cfg, began: time.Now(), byEnd: map[kvblock.SequenceHash]*conversation{}}
}

func (c *Controller) now() time.Duration {
	if c.cfg.Clock != nil {
		return c.cfg.Clock()
	}
	return time.Since(c.began)
}

// Turn is one request of a conversation.
type Turn struct {
	c            *Controller
	conversation *conversation // nil: a new one
	end          kvblock.SequenceHash
	tokens       int
	cached       int
	started      bool
}

// Arrive returns the turn of a request whose prompt has these full blocks, at least one, and this many tokens. cached
// is the most of them that a worker has cached.
func (c *Controller) Arrive(chain []kvblock.SequenceHash, tokens, cached int) *Turn {
	t := &Turn{c: c, end: chain[len(chain)-1], tokens: tokens, cached: min(cached, tokens)}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	c.lapse(now)
	for i := len(chain) - 1; i >= 0 && t.conversation == nil; i-- {
		if *c.count(chain[i]) > 0 {
			t.conversation = c.byEnd[chain[i]]
		}
	}
	c.prompts++
	c.tokens, c.cached = keep*c.tokens+float64(tokens), keep*c.cached+float64(t.cached)
	if v := t.conversation; v != nil && v.paused {
		v.paused = false
		c.pause.add((now - v.ended).Seconds())
		if v.idle {
			c.returned = keep*c.returned + 1
			c.lapses *= keep
		}
	}
	return t
}

// Continues reports whether the turn's conversation is admitted, so that the turn need not wait.
func (t *Turn) Continues() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	return t.continues()
}

func (t *Turn) continues() bool {
	v := t.conversation
	return v != nil && (v.running > 0 || v.idle)
}

// Fits reports whether the conversation is admitted, or a worker has room for it, or holding back protects too little.
// The worker's KV cache takes capacity tokens; 0: not known, and there is room. Its active requests are this many and
// hold this many tokens. A worker without requests always has room, so that a conversation larger than any room is
// admitted in the end.
func (t *Turn) Fits(w kvblock.Worker, capacity, requests, held int) bool {
	if capacity <= 0 || requests == 0 {
		return true
	}
	c := t.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.continues() || c.prompts >= enoughSamples && c.cached < leastCached*c.tokens {
		return true
	}
	c.lapse(c.now())
	taken := float64(held + t.tokens - t.cached + c.outputOr(w, 0))
	if int(w) < len(c.idleTokens) {
		taken += c.chanceOfReturn() * float64(c.idleTokens[w])
	}
	return taken <= c.cfg.Fill*float64(capacity)
}

// Start notes that the turn was sent to a worker, which has this many tokens of its prompt cached. That admits the
// conversation. End must follow.
func (t *Turn) Start(w kvblock.Worker, cached int) {
	c := t.c
	c.mu.Lock()
	defer c.mu.Unlock()
	v := t.conversation
	if v == nil {
		v = &conversation{shared: min(cached, t.tokens)}
		t.conversation = v
	} else {
		c.drop(v)
	}
	if other := c.byEnd[t.end]; other != nil && other != v { // the same prompt was sent at once
		c.drop(other)
	}
	v.end, v.worker = t.end, w
	c.byEnd[v.end] = v
	if n := c.count(v.end); *n < math.MaxUint8 {
		*n++
	}
	if v.running++; v.running == 1 {
		c.running++
	}
	t.started = true
}

// End notes that the turn is over, after a response of this many tokens; 0: not known. Only the first call counts, and
// only after Start.
func (t *Turn) End(output int) {
	c := t.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if !t.started {
		return
	}
	t.started = false
	v := t.conversation
	if output > 0 {
		if more := int(v.worker) + 1 - len(c.outputs); more > 0 {
			c.outputs = append(c.outputs, make([]mean, more)...)
		}
		c.outputs[v.worker].add(float64(output))
		c.median = 0
	}
	v.own = max(t.tokens+c.outputOr(v.worker, output)-v.shared, 0)
	if v.running--; v.running > 0 {
		return
	}
	if c.running--; c.byEnd[v.end] != v {
		return // another conversation with the same prompt is in its place
	}
	c.makeRoom()
	v.ended, v.paused, v.idle = c.now(), true, true
	v.place = c.idle.PushBack(v)
	*c.tokensOf(v.worker) += v.own
}

// Forget notes that a worker has left the pool, or has lost its cache. Its idle conversations are not admitted any
// more.
func (c *Controller) Forget(w kvblock.Worker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if int(w) < len(c.outputs) {
		c.outputs[w], c.median = mean{}, 0
	}
	for place := c.idle.Front(); place != nil; {
		v := place.Value.(*conversation)
		place = place.Next()
		if v.worker == w {
			c.unlist(v)
			v.place = c.lapsed.PushBack(v)
		}
	}
}

// Stats returns the present numbers.
func (c *Controller) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lapse(c.now())
	return Stats{
		Running: c.running,
		Idle:    c.idle.Len(),
		Lapsed:  c.lapsed.Len(),
		Return:  c.chanceOfReturn(),
		IdleFor: c.idleFor(),
	}
}

// outputOr returns the length of a response. If it is 0: the mean of the worker's, or of the median worker.
func (c *Controller) outputOr(w kvblock.Worker, tokens int) int {
	if tokens > 0 {
		return tokens
	}
	if int(w) < len(c.outputs) && c.outputs[w].samples > 0 {
		return int(c.outputs[w].value)
	}
	if c.median == 0 {
		var means []float64
		for _, m := range c.outputs {
			if m.samples > 0 {
				means = append(means, m.value)
			}
		}
		slices.Sort(means)
		if c.median = defaultOutput; len(means) > 0 {
			c.median = int(means[(len(means)-1)/2])
		}
	}
	return c.median
}

// idleFor returns for how long an idle conversation counts.
func (c *Controller) idleFor() time.Duration {
	if c.pause.samples < enoughSamples {
		return firstIdle
	}
	return min(max(time.Duration(idlePauses*c.pause.value*float64(time.Second)), leastIdle), mostIdle)
}

// chanceOfReturn returns the share of idle conversations that go on in time, 0..1.
func (c *Controller) chanceOfReturn() float64 {
	if all := c.returned + c.lapses; all >= enoughSamples {
		return c.returned / all
	}
	return 0
}

// lapse ends the admission of conversations that were idle for too long. The caller holds c.mu.
func (c *Controller) lapse(now time.Duration) {
	for limit := c.idleFor(); ; {
		oldest := c.idle.Front()
		if oldest == nil {
			return
		}
		v := oldest.Value.(*conversation)
		if now-v.ended <= limit {
			return
		}
		c.unlist(v)
		v.place = c.lapsed.PushBack(v)
		c.lapses = keep*c.lapses + 1
		c.returned *= keep
	}
}

// unlist takes v out of the list that it is in, if any. The caller holds c.mu.
func (c *Controller) unlist(v *conversation) {
	if v.place == nil {
		return
	}
	if v.idle {
		c.idle.Remove(v.place)
		*c.tokensOf(v.worker) -= v.own
	} else {
		c.lapsed.Remove(v.place)
	}
	v.place, v.idle = nil, false
}

// drop removes a conversation from the table. Its running turns may end later. The caller holds c.mu.
func (c *Controller) drop(v *conversation) {
	c.unlist(v)
	if c.byEnd[v.end] == v {
		delete(c.byEnd, v.end)
		if n := c.count(v.end); *n < math.MaxUint8 {
			*n--
		}
	}
}

// count returns the counter of a block's hash in c.ends. The caller holds c.mu.
func (c *Controller) count(end kvblock.SequenceHash) *uint8 {
	return &c.ends[uint64(end)*0x9e3779b97f4a7c15>>(64-endBits)]
}

// makeRoom drops the conversations that were idle longest, until one more is within Config.Max. The caller holds c.mu.
func (c *Controller) makeRoom() {
	for c.idle.Len()+c.lapsed.Len() >= c.cfg.Max { // the running requests bound the others
		oldest := c.lapsed.Front()
		if oldest == nil {
			oldest = c.idle.Front()
		}
		c.drop(oldest.Value.(*conversation))
	}
}

// tokensOf returns the counter of a worker's idle tokens. The caller holds c.mu.
func (c *Controller) tokensOf(w kvblock.Worker) *int {
	if more := int(w) + 1 - len(c.idleTokens); more > 0 {
		c.idleTokens = append(c.idleTokens, make([]int, more)...)
	}
	return &c.idleTokens[w]
}
