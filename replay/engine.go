package replay

import (
	"container/list"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvepp/kvblock"
)

// EngineConfig describes one worker of the model engine.
type EngineConfig struct {
	// Blocks is the number of KV blocks on the device, at least 1.
	Blocks int
	// BlockSize is in tokens, at least 1.
	BlockSize int
	// MaxSequences is how many requests one step computes at most, at least 1.
	MaxSequences int
	// MaxBatchedTokens is how many tokens one step computes at most, at least 1. Longer prompts are computed in chunks.
	MaxBatchedTokens int
	// Prefill gives the milliseconds that a step takes for its new prompt tokens, and Decode those for the responses
	// that it continues, by the share of the KV cache, 0..1, that these responses' requests hold.
	Prefill, Decode Curve
	// Speed divides both times. 1: as the curves say.
	Speed float64
}

// Curve is a polynomial of degree 2 in milliseconds: c[0] + c[1]*x + c[2]*x*x.
type Curve [3]float64

func (c Curve) at(x float64) float64 { return c[0] + x*(c[1]+x*c[2]) }

// DefaultEngineConfig returns the engine that Dynamo's offline replay models unless it is told otherwise.
//
// Source: aisimulate-core 0.13.0, of Dynamo 1.6.1's wheels: mocker defaults and polynomial timing.
func DefaultEngineConfig() EngineConfig {
	return EngineConfig{
		Blocks:           16384,
		BlockSize:        64,
		MaxSequences:     256,
		MaxBatchedTokens: 8192,
		Prefill:          Curve{16.50142, 1.518344e-02, 4.209989e-07},
		Decode:           Curve{5.74, 54.01, -25.74},
		Speed:            1,
	}
}

// validate reports the first value that is out of range.
func (c *EngineConfig) validate() error {
	switch {
	case c.Blocks < 1 || c.Blocks > maxBlocks:
		return fmt.Errorf("%d KV blocks: must be 1 to %d", c.Blocks, maxBlocks)
	case c.MaxBatchedTokens < 1:
		return errors.New("a step must take at least one token")
	case !(c.Speed >= 1e-3 && c.Speed <= 1e6):
		return fmt.Errorf("an engine's speed of %v: must be 1e-3 to 1e6", c.Speed)
	}
	for _, curve := range []struct {
		name string
		Curve
		to float64
	}{{"prefill", c.Prefill, float64(c.MaxBatchedTokens)}, {"decode", c.Decode, 1}} {
		bend := min(max(-curve.Curve[1]/(2*curve.Curve[2]), 0), curve.to) // NaN of a line fails no comparison below
		for _, x := range []float64{0, bend, curve.to} {
			if ms := curve.at(x); ms < 0 {
				return fmt.Errorf("the %s curve gives %v ms at %v: must be at least 0", curve.name, ms, x)
			}
		}
	}
	return nil
}

// minDecode is the least time, in milliseconds, of a step that continues responses.
const minDecode = 1

// decode returns the milliseconds of a step for the responses that it continues, without Speed. held is how many tokens
// their requests hold.
func (c *EngineConfig) decode(held int) float64 {
	return max(c.Decode.at(min(1, float64(held)/float64(c.Blocks*c.BlockSize))), minDecode)
}

// sequence is a request on its engine.
type sequence struct {
	request *flight
	// chain has the sequence hashes of the full blocks of the prompt and the response, and locals their local hashes.
	chain          []kvblock.SequenceHash
	locals         []kvblock.LocalHash
	prompt, output int // tokens; output is at least 1
	// blocks has, for each KV block that the sequence holds, the cached block, or nil for one that only this sequence
	// can use: not full yet, or a copy of a cached one.
	blocks []*cachedBlock
	// computed is how many of the tokens have their KV computed. Of the response, generated tokens exist.
	computed, generated int
	admitted            bool
	fetched             bool // the prompt's blocks come from a prefill worker
	cached              int  // prompt tokens found in the cache at the first admission
	firstToken          time.Duration
	lastToken           time.Duration
	preemptions         int
}

func (s *sequence) known() int { return s.prompt + s.generated }

// cachedBlock is a full block that requests can find by its hash.
type cachedBlock struct {
	hash       kvblock.SequenceHash
	references int
	unused     *list.Element // of engine.unused, while references is 0
}

// change is a KV event: a block that became findable, or an evicted one.
type change struct {
	hash    kvblock.SequenceHash
	local   kvblock.LocalHash    // of a stored block
	parent  kvblock.SequenceHash // of a stored block that is not the first
	first   bool                 // a stored block is the first of its prompt
	removed bool
}

// engine models one worker in virtual time: continuous batching with first come, first served admission, chunked
// prefill, and a prefix cache with LRU eviction. Running requests come before waiting ones. A request that finds no
// memory preempts the youngest running one. A finished request's blocks become unused from its tail, so that tails are
// evicted first. Blocks are findable for later requests of the same step. KV events leave at the end of a step.
//
// Source: the scheduler of Dynamo 1.6.1's mocker (aisimulate-core 0.13.0), by its observed behaviour.
type engine struct {
	cfg     EngineConfig
	cached  map[kvblock.SequenceHash]*cachedBlock
	unused  *list.List // of *cachedBlock; the front is evicted first
	private int        // blocks that one sequence alone can use
	active  int        // cached blocks with references

	running, waiting []*sequence
	inStep           bool     // a step is planned or runs; set by the simulation, cleared by end
	parts            []part   // of the step that runs; set by the simulation
	changes          []change // since the last step ended

	computedPrompt int // tokens that were prefilled
	preemptions    int
	busy           time.Duration
}

func newEngine(cfg EngineConfig) *engine {
	return &engine{cfg: cfg, cached: map[kvblock.SequenceHash]*cachedBlock{}, unused: list.New()}
}

// available is how many blocks can be taken, free or by eviction.
func (e *engine) available() int { return e.cfg.Blocks - e.private - e.active }

// takePrivate takes n blocks for one sequence, and evicts unused ones for that. false: there are not enough.
func (e *engine) takePrivate(n int) bool {
	if e.available() < n {
		return false
	}
	for free := e.available() - e.unused.Len(); free < n; free++ {
		oldest := e.unused.Remove(e.unused.Front()).(*cachedBlock)
		delete(e.cached, oldest.hash)
		e.changes = append(e.changes, change{hash: oldest.hash, removed: true})
	}
	e.private += n
	return true
}

// findPrefix returns how many leading blocks of a sequence are cached. At least one token is left to compute.
func (e *engine) findPrefix(s *sequence) int {
	most := min((s.known()-1)/e.cfg.BlockSize, len(s.chain))
	for n, h := range s.chain[:most] {
		if e.cached[h] == nil {
			return n
		}
	}
	return most
}

func (e *engine) reference(b *cachedBlock) {
	if b.references == 0 {
		e.unused.Remove(b.unused)
		b.unused = nil
		e.active++
	}
	b.references++
}

// release gives up all blocks of a sequence, the last one first.
func (e *engine) release(s *sequence) {
	for _, b := range slices.Backward(s.blocks) {
		if b == nil {
			e.private--
			continue
		}
		b.references--
		if b.references == 0 {
			e.active--
			b.unused = e.unused.PushBack(b)
		}
	}
	s.blocks = s.blocks[:0]
}

// publish makes the full blocks of the tokens from..to findable.
func (e *engine) publish(s *sequence, from, to int) {
	size := e.cfg.BlockSize
	for i := from / size; i < min(to/size, len(s.blocks), len(s.chain)); i++ {
		if s.blocks[i] != nil || e.cached[s.chain[i]] != nil {
			continue // a copy of a cached block stays private
		}
		b := &cachedBlock{hash: s.chain[i], references: 1}
		e.cached[b.hash], s.blocks[i] = b, b
		e.private--
		e.active++
		c := change{hash: b.hash, local: s.locals[i], first: i == 0}
		if i > 0 {
			c.parent = s.chain[i-1]
		}
		e.changes = append(e.changes, c)
	}
}

// submit adds a request to those that wait.
func (e *engine) submit(s *sequence) { e.waiting = append(e.waiting, s) }

// part is what one step computes of a sequence.
type part struct {
	s      *sequence
	prompt int // tokens of the prompt
	tokens int
}

// step is one pass of the engine.
type step struct {
	parts     []part
	budget    int // tokens left
	newTokens int // prompt tokens, and tokens computed again after a preemption
	prefills  int
	preempted bool
}

// begin schedules the next step and returns its parts and how long it takes. No part: the engine is idle, or nothing
// fits.
func (e *engine) begin() ([]part, time.Duration) {
	st := step{budget: e.cfg.MaxBatchedTokens}
	for i := 0; i < len(e.running) && st.budget > 0; {
		s := e.running[i]
		if e.schedule(&st, s, min(s.known()-s.computed, st.budget)) {
			i++
		}
	}
	for !st.preempted && len(e.waiting) > 0 && len(e.running) < e.cfg.MaxSequences && st.budget > 0 {
		s := e.waiting[0]
		if !e.admit(s) {
			break
		}
		e.waiting = e.waiting[1:]
		e.running = append(e.running, s)
		if !e.schedule(&st, s, min(s.known()-s.computed, st.budget)) {
			break
		}
	}
	if len(st.parts) == 0 {
		return nil, 0
	}
	d := e.duration(&st)
	e.busy += d
	e.computedPrompt += st.newTokens
	return st.parts, d
}

// admit references the cached prefix of a waiting sequence. false: the whole sequence does not fit now.
func (e *engine) admit(s *sequence) bool {
	hit := e.findPrefix(s)
	active := 0
	for _, h := range s.chain[:hit] {
		if e.cached[h].references > 0 {
			active++
		}
	}
	if blocksOf(s.known(), e.cfg.BlockSize)-active > e.available() {
		return false
	}
	for _, h := range s.chain[:hit] {
		b := e.cached[h]
		e.reference(b)
		s.blocks = append(s.blocks, b)
	}
	s.computed = hit * e.cfg.BlockSize
	if !s.admitted {
		s.admitted, s.cached = true, s.computed
	}
	if s.fetched {
		e.fetch(s)
	}
	return true
}

// schedule adds n tokens of a running sequence to a step. If memory runs out it preempts the youngest running sequence,
// again if needed. false: that was s itself.
func (e *engine) schedule(st *step, s *sequence, n int) bool {
	if need := blocksOf(s.computed+n, e.cfg.BlockSize) - len(s.blocks); need > 0 {
		for !e.takePrivate(need) {
			youngest := e.running[len(e.running)-1]
			e.preempt(st, youngest)
			if youngest == s {
				return false
			}
		}
		s.blocks = append(s.blocks, make([]*cachedBlock, need)...)
	}
	before := s.computed
	s.computed += n
	e.publish(s, before, s.computed)
	p := part{s: s, prompt: min(s.prompt, s.computed) - min(s.prompt, before), tokens: n}
	if s.fetched { // the last token of the prompt is computed as one of the response
		p.prompt = 0
	}
	st.budget -= n
	if p.isPrefill() {
		st.prefills++
		st.newTokens += p.newTokens()
	}
	st.parts = append(st.parts, p)
	return true
}

// isPrefill reports whether a part computes more than the next token of a response.
func (p *part) isPrefill() bool { return p.prompt > 0 || p.tokens > 1 }

func (p *part) newTokens() int { return max(p.prompt, p.tokens-1) }

// preempt takes all blocks of a sequence. It waits first in line and begins anew, with what is still cached then.
func (e *engine) preempt(st *step, s *sequence) {
	st.preempted = true
	if i := slices.IndexFunc(st.parts, func(p part) bool { return p.s == s }); i >= 0 {
		p := st.parts[i]
		st.budget += p.tokens
		if p.isPrefill() {
			st.prefills--
			st.newTokens -= p.newTokens()
		}
		st.parts = slices.Delete(st.parts, i, i+1)
	}
	e.release(s)
	s.computed, s.fetched = 0, false
	s.preemptions++
	e.preemptions++
	e.running = slices.Delete(e.running, slices.Index(e.running, s), slices.Index(e.running, s)+1)
	e.waiting = slices.Insert(e.waiting, 0, s)
}

// duration is how long a step takes.
func (e *engine) duration(st *step) time.Duration {
	ms := 0.0
	if st.prefills > 0 {
		ms += e.cfg.Prefill.at(float64(st.newTokens))
	}
	decodes, held := 0, 0
	for _, p := range st.parts {
		s := p.s
		if s.computed >= s.known() && (s.generated > 0 || p.prompt == 0) {
			decodes++
			held += s.known()
		}
	}
	if decodes > 0 {
		ms += e.cfg.decode(held)
	}
	return time.Duration(min(ms/e.cfg.Speed, maxStep) * float64(time.Millisecond))
}

// end ends a step at a time. Each sequence whose known tokens are computed generates one more. end returns those with
// their first token, those that are complete, and the KV events, which the caller may keep until the next end.
func (e *engine) end(parts []part, now time.Duration) (first, complete []*sequence, changes []change) {
	e.inStep = false
	for _, p := range parts {
		s := p.s
		if s.computed < s.known() || len(s.blocks) == 0 {
			continue
		}
		s.generated++
		if s.generated == 1 {
			s.firstToken = now
			first = append(first, s)
		}
		s.lastToken = now
		if s.generated >= s.output {
			e.release(s)
			i := slices.Index(e.running, s)
			e.running = slices.Delete(e.running, i, i+1)
			complete = append(complete, s)
		}
	}
	changes, e.changes = e.changes, nil
	return first, complete, changes
}

func blocksOf(tokens, size int) int { return (tokens + size - 1) / size }
