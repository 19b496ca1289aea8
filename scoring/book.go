package scoring

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync"

	"kvepp/kvblock"
)

const (
	// NominalBlockSize is the block, in tokens, in which requests are priced while no candidate's block size is known.
	NominalBlockSize = 16

	// MaxWorkers bounds the worker numbers that the book accepts, and so its memory.
	MaxWorkers = 1 << 16

	// MaxBlockSize is the largest block size accepted, in tokens.
	MaxBlockSize = kvblock.MaxBlockSize

	// MaxISLTokens is the longest prompt accepted, in tokens; sums over many requests then stay far from overflow.
	MaxISLTokens = 1 << 32

	maxOverlapBlocks = 1 << 32
)

var (
	// ErrNoCandidates says that a request came with an empty list of candidates.
	ErrNoCandidates = errors.New("scoring: no candidates")

	// ErrDuplicateRequest says that a request with the same ID is active already.
	ErrDuplicateRequest = errors.New("scoring: a request with this ID is already active")
)

// Request is what all candidates have in common. A batch of prompts that one worker is to answer is one request.
type Request struct {
	// ID names the request; two active requests cannot have the same. Empty: unnamed, and never a duplicate.
	ID string

	// ISLTokens is the number of prompt tokens, over all prompts of the request. An estimate does where there is no
	// tokenizer.
	ISLTokens int

	// Terms, if not nil, must have the length of the candidates, and receives what each one's cost was made of, as it was
	// when the choice was made: Config.Cost of it is the cost. Nil, the usual, costs nothing.
	Terms []Terms
}

// Prompt is a request's prompt cut into the blocks of one block size. Candidates of the same block size point to the same
// Prompt: the work is done once for each. It is read during the call only.
type Prompt struct {
	// BlockSize is in tokens; 0 means not known.
	BlockSize int

	// Chains has, for each prompt of the request, the sequence hashes of its full blocks in order. Nil means that the
	// hashes are not known. It is ignored if BlockSize is 0.
	Chains [][]kvblock.SequenceHash
}

// Candidate is a worker that may serve the request.
//
// A candidate without hashes is priced by load alone: the request counts there as ISLTokens / BlockSize blocks of its
// own, shared with nobody. If the block size is unknown too, blocks are counted in the size of the smallest one known
// among the candidates, else in NominalBlockSize. What is on the worker already counts by its tokens, whatever blocks it
// came in.
type Candidate struct {
	Worker kvblock.Worker // below MaxWorkers
	Prompt *Prompt        // nil: nothing is known of blocks

	// What the worker has cached of the prompt, as in Terms; 0 if unknown.
	DeviceBlocks int
	HostBlocks   int
	DiskBlocks   int
	SharedBlocks int

	// CostMultiplier scales the cost, as preferred taints do. 0 means 1.
	CostMultiplier float64

	// CPU says that the worker runs without an accelerator. Only DeviceAwareWeighted reads it.
	CPU bool
}

// Selection is the outcome of a choice.
type Selection struct {
	Index  int            // of the chosen one in the candidates
	Worker kvblock.Worker // the chosen one
	Cost   float64        // its cost

	// CachedTokens is how much of the prompt the worker is expected to find in its caches; PrefillTokens is the rest,
	// booked until MarkPrefillCompleted (0 if prefill is not tracked).
	CachedTokens  int
	PrefillTokens int

	// ActiveBlocks is how many blocks the request added to the worker's.
	ActiveBlocks int

	// UnitTokens is the block, in tokens, in which all costs of this selection are expressed: the smallest block size
	// known among the candidates.
	UnitTokens int
}

// Load is what a worker carries for its active requests.
type Load struct {
	Requests      int
	PrefillTokens int // yet to be prefilled
	ActiveBlocks  int // distinct blocks held, each counted once however many requests share it
	ActiveTokens  int // the same in tokens
}

// ActiveSequences is the load book: which requests are active on which worker, the prompt tokens that each has yet to
// prefill and the distinct KV blocks that each holds. Make one with [NewActiveSequences].
//
// It is safe for concurrent use; every method is one atomic step. Its memory follows the number of active requests
// and their blocks, and stays at the size of the busiest moment; whoever admits requests bounds both.
//
// Source: dynamo-kv-router 1.6.1, sequences.
type ActiveSequences struct {
	mu       sync.Mutex // guards everything below
	loads    []Load     // indexed by worker
	bookings []booking
	free     []uint32          // indices in bookings that are unused
	byID     map[string]uint32 // named requests -> index in bookings
	blocks   activeBlocks
	turns    []uint64 // indexed by worker, of those that RoundRobin has seen: number of the last turn, 0 for none
	turn     uint64   // number of the last turn of all

	// Scratch memory of SelectAndAdd.
	walker   walker
	variants []variant
	added    []int // indexed like the candidates: blocks that the request would add to the worker
	costs    []float64
}

// booking is one active request; it is unused if its generation is even.
type booking struct {
	generation    uint64
	id            string
	worker        kvblock.Worker
	prefillTokens int      // 0 once completed
	leaves        []uint32 // the runs with which its chains end in activeBlocks: it holds these and all before them
	ownBlocks     int      // further blocks, shared with nobody
	ownBlockSize  int
}

// variant is one distinct Prompt among the candidates: its chains end with the runs walker.leaves[from:to].
type variant struct {
	prompt   *Prompt
	from, to int
	distinct int // blocks
}

// NewActiveSequences returns an empty book.
func NewActiveSequences() *ActiveSequences {
	return &ActiveSequences{byID: map[string]uint32{}, blocks: newActiveBlocks()}
}

// Booking is one request's place in the book. It is a small value that may be copied and used from any goroutine; it
// never affects another request, whatever became of its own. The zero value belongs to no request.
type Booking struct {
	book       *ActiveSequences
	index      uint32
	generation uint64
}

// SelectAndAdd prices every candidate, chooses one and books the request on it, in one step: of two requests that arrive
// together, the second sees the first's load.
//
// If costs is not nil it must have the length of candidates, and receives the cost of each (NaN or infinite: that one
// could not be chosen). In a mode other than KV there are no costs, and it receives each one's active requests. Nil costs are not reported. cfg must have passed [Config.Validate]. rng is used only while the
// book is locked, so that the callers of one book can share one; nil means math/rand/v2's global source. Nothing passed
// in is kept.
//
// Errors, which book nothing: ErrNoCandidates, ErrDuplicateRequest, ErrNoFiniteCost, and a description of any number
// that is out of range.
func (a *ActiveSequences) SelectAndAdd(req Request, candidates []Candidate, cfg *Config, rng *rand.Rand, costs []float64) (Selection, Booking, error) {
	if costs != nil && len(costs) != len(candidates) {
		return Selection{}, Booking{}, fmt.Errorf("scoring: room for %d costs, but %d candidates", len(costs), len(candidates))
	}
	if req.Terms != nil && len(req.Terms) != len(candidates) {
		return Selection{}, Booking{}, fmt.Errorf("scoring: room for %d terms, but %d candidates", len(req.Terms), len(candidates))
	}
	all, err := look(req, candidates, cfg)
	if err != nil {
		return Selection{}, Booking{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.open(req, candidates, cfg, &all); err != nil {
		return Selection{}, Booking{}, err
	}
	if costs == nil {
		costs = grown(&a.costs, len(candidates))
	}
	var i int
	switch {
	case cfg.Mode != KV:
		i = a.chooseByMode(candidates, cfg, rng)
		for j := range candidates {
			costs[j] = float64(a.requests(&candidates[j]))
		}
	case all.alike:
		i, err = a.chooseAlike(req, candidates, cfg, all.unit, rng, costs)
	default:
		a.price(req, candidates, cfg, all.unit, costs)
		i, err = Choose(costs, cfg.Temperature, rng)
	}
	if err != nil {
		a.closeWalks()
		return Selection{}, Booking{}, err
	}
	if req.Terms != nil {
		a.explain(req, candidates, cfg, &all)
	}
	sel, b := a.add(req, candidates, i, cfg, all.unit)
	sel.Cost = costs[i]
	return sel, b, nil
}

// AddRequest books a request on a worker that was chosen elsewhere, whatever it costs.
//
// Errors, which book nothing: ErrDuplicateRequest, and a description of any number that is out of range.
func (a *ActiveSequences) AddRequest(req Request, c Candidate, cfg *Config) (Booking, error) {
	candidates := []Candidate{c}
	all, err := look(req, candidates, cfg)
	if err != nil {
		return Booking{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.open(req, candidates, cfg, &all); err != nil {
		return Booking{}, err
	}
	_, b := a.add(req, candidates, 0, cfg, all.unit)
	return b, nil
}

// MarkPrefillCompleted takes the request's prompt tokens off the worker's prefill load; it goes on holding its blocks.
// Only the first call has an effect, and none after Free or after the worker was forgotten.
func (b Booking) MarkPrefillCompleted() {
	if b.book == nil {
		return
	}
	b.book.mu.Lock()
	defer b.book.mu.Unlock()
	if b.book.bookings[b.index].generation == b.generation {
		b.book.completePrefill(b.index)
	}
}

// Free ends the request: all that it added to the worker's load is taken off. Only the first call has an effect, and
// none after the worker was forgotten.
func (b Booking) Free() {
	if b.book == nil {
		return
	}
	b.book.mu.Lock()
	defer b.book.mu.Unlock()
	if b.book.bookings[b.index].generation == b.generation {
		b.book.end(b.index)
	}
}

// Forget ends all requests of a worker, so that its number can be given to another. Bookings made before have no effect
// any more. The caller must have stopped offering the worker as a candidate.
func (a *ActiveSequences) Forget(w kvblock.Worker) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// Workers leave rarely: a pass over all requests is cheaper than a list for each worker, kept at every request.
	for i := range a.bookings {
		if b := &a.bookings[i]; b.active() && b.worker == w {
			a.end(uint32(i))
		}
	}
	a.forgetTurn(w)
}

// Load returns what one worker carries.
func (a *ActiveSequences) Load(w kvblock.Worker) Load {
	a.mu.Lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.loads) {
		return Load{}
	}
	return a.loads[w]
}

// Loads appends to dst a snapshot of all loads, indexed by worker; a worker numbered beyond it carries nothing.
func (a *ActiveSequences) Loads(dst []Load) []Load {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append(dst, a.loads...)
}

// Len returns the number of active requests.
func (a *ActiveSequences) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.bookings) - len(a.free)
}

// overview is what one look at all candidates tells.
type overview struct {
	top  kvblock.Worker // highest number
	unit int            // of cost: the smallest block size, in tokens

	// alike says that chooseAlike can choose among the candidates: they differ in their numbers, device blocks and loads alone,
	// share one Prompt with hashes and a block size that is a power of two, and the configuration is plain.
	alike bool
}

// look passes over the candidates once, and again only if something may be out of range.
func look(req Request, candidates []Candidate, cfg *Config) (overview, error) {
	if len(candidates) == 0 {
		return overview{}, ErrNoCandidates
	}
	if req.ISLTokens < 0 || req.ISLTokens > MaxISLTokens {
		return overview{}, fmt.Errorf("scoring: %d prompt tokens, but must be 0 to %d", req.ISLTokens, MaxISLTokens)
	}
	all := overview{unit: MaxBlockSize + 1, alike: true}
	first := candidates[0].Prompt
	prompt := first
	if prompt != nil && prompt.BlockSize > 0 {
		all.unit = prompt.BlockSize
	}
	var device, lower, multipliers uint64 // all bits of all candidates; a negative number has the highest
	for i := range candidates {
		c := &candidates[i]
		all.top = max(all.top, c.Worker)
		device |= uint64(c.DeviceBlocks)
		lower |= uint64(c.HostBlocks) | uint64(c.DiskBlocks) | uint64(c.SharedBlocks)
		multipliers |= math.Float64bits(c.CostMultiplier)
		if c.Prompt != prompt {
			all.alike = false
			if prompt = c.Prompt; prompt != nil && prompt.BlockSize > 0 {
				all.unit = min(all.unit, prompt.BlockSize)
			}
		}
	}
	if all.top >= MaxWorkers || device|lower >= maxOverlapBlocks || multipliers != 0 || !all.alike || first != nil && uint(first.BlockSize) > MaxBlockSize {
		if err := check(candidates); err != nil {
			return overview{}, err
		}
	}
	all.alike = all.alike && lower == 0 && multipliers == 0 && cfg.plain() &&
		first != nil && first.Chains != nil && bits.OnesCount(uint(first.BlockSize)) == 1
	if all.unit > MaxBlockSize {
		all.unit = NominalBlockSize
	}
	return all, nil
}

// check names the first number that is out of range.
func check(candidates []Candidate) error {
	for i := range candidates {
		c := &candidates[i]
		if c.Worker >= MaxWorkers {
			return fmt.Errorf("scoring: candidate %d: worker number %d, but must be below %d", i, c.Worker, MaxWorkers)
		}
		if c.Prompt != nil && (c.Prompt.BlockSize < 0 || c.Prompt.BlockSize > MaxBlockSize) {
			return fmt.Errorf("scoring: candidate %d: block size %d, but must be 0 to %d tokens", i, c.Prompt.BlockSize, MaxBlockSize)
		}
		// One comparison serves four numbers: a negative one makes the unsigned maximum huge.
		if max(uint64(c.DeviceBlocks), uint64(c.HostBlocks), uint64(c.DiskBlocks), uint64(c.SharedBlocks)) > maxOverlapBlocks {
			return fmt.Errorf("scoring: candidate %d: overlap of %d device, %d host, %d disk and %d shared blocks, but each must be 0 to %d",
				i, c.DeviceBlocks, c.HostBlocks, c.DiskBlocks, c.SharedBlocks, maxOverlapBlocks)
		}
		if !(c.CostMultiplier >= 0) || math.IsInf(c.CostMultiplier, 0) {
			return fmt.Errorf("scoring: candidate %d: cost multiplier %v, but must be a finite number of at least 0", i, c.CostMultiplier)
		}
	}
	return nil
}

// open begins a request: it walks each distinct prompt once, and sets a.variants and, unless the candidates are alike,
// a.added. It must be followed by add or closeWalks.
func (a *ActiveSequences) open(req Request, candidates []Candidate, cfg *Config, all *overview) error {
	if req.ID != "" {
		if _, ok := a.byID[req.ID]; ok {
			return fmt.Errorf("%w: %q", ErrDuplicateRequest, req.ID)
		}
	}
	if n := int(all.top) + 1; n > len(a.loads) {
		a.loads = append(a.loads, make([]Load, n-len(a.loads))...)
		a.walker.held = append(a.walker.held, make([]int32, n-len(a.walker.held))...)
		a.blocks.fit(n)
	}

	a.variants, a.walker.leaves, a.walker.made = a.variants[:0], a.walker.leaves[:0], a.walker.made[:0]
	if all.alike {
		a.walk(candidates[0].Prompt)
		return nil
	}
	added := grown(&a.added, len(candidates))
	for i := range candidates {
		p := candidates[i].Prompt
		switch {
		case !cfg.TrackActiveBlocks:
			added[i] = 0
		case p == nil || p.BlockSize == 0 || p.Chains == nil:
			added[i] = req.ISLTokens / candidates[i].blockSize(all.unit)
		case !cfg.AssumeKVReuse:
			added[i] = 0
			for _, chain := range p.Chains {
				added[i] += len(chain)
			}
		case a.variantOf(p) == nil:
			distinct := a.walk(p)
			for j := i; j < len(candidates); j++ { // for all of this prompt, while held is this prompt's
				if c := &candidates[j]; c.Prompt == p {
					added[j] = distinct - int(a.walker.held[c.Worker])
				}
			}
		}
	}
	return nil
}

// walk makes p a variant, sets walker.held for it, and returns how many distinct blocks it has.
func (a *ActiveSequences) walk(p *Prompt) int {
	from := len(a.walker.leaves)
	distinct := a.blocks.walk(&a.walker, p)
	a.variants = append(a.variants, variant{p, from, len(a.walker.leaves), distinct})
	return distinct
}

func (a *ActiveSequences) variantOf(p *Prompt) *variant {
	for i := range a.variants {
		if a.variants[i].prompt == p {
			return &a.variants[i]
		}
	}
	return nil
}

// closeWalks ends what open began: entries that it made and that the request does not hold go away.
func (a *ActiveSequences) closeWalks() {
	for _, id := range a.walker.made {
		a.blocks.removeUnheld(id)
	}
}

// price sets costs[i] for each candidate i.
func (a *ActiveSequences) price(req Request, candidates []Candidate, cfg *Config, unit int, costs []float64) {
	t := a.common(req, candidates, cfg, unit)
	for i := range candidates {
		a.terms(&t, &candidates[i], a.added[i])
		costs[i] = cfg.Cost(&t)
	}
}

// explain sets req.Terms[i] for each candidate i, between open and add.
func (a *ActiveSequences) explain(req Request, candidates []Candidate, cfg *Config, all *overview) {
	t := a.common(req, candidates, cfg, all.unit)
	for i := range candidates {
		c := &candidates[i]
		added := 0
		if all.alike {
			added = a.variants[0].distinct - int(a.walker.held[c.Worker])
		} else {
			added = a.added[i]
		}
		a.terms(&t, c, added)
		req.Terms[i] = t
	}
}

// common returns the terms that all candidates have in common.
func (a *ActiveSequences) common(req Request, candidates []Candidate, cfg *Config, unit int) Terms {
	t := Terms{ISLTokens: req.ISLTokens, UnitTokens: unit}
	if cfg.OverlapScoreCreditDecay != 0 {
		t.LeastPrefillTokens = math.MaxInt
		for i := range candidates {
			t.LeastPrefillTokens = min(t.LeastPrefillTokens, a.loads[candidates[i].Worker].PrefillTokens)
		}
	}
	return t
}

// terms sets in t, which has common's, those of one candidate, to which the request would add so many blocks.
func (a *ActiveSequences) terms(t *Terms, c *Candidate, added int) {
	load := &a.loads[c.Worker]
	c.overlap(t, t.UnitTokens)
	t.PrefillTokens = load.PrefillTokens
	t.DecodeBlocks = float64(load.ActiveTokens)/float64(t.BlockSize) + float64(added)
	t.ActiveRequests = load.Requests
	t.CostMultiplier = c.CostMultiplier
}

// plain says that c tracks everything, and that Cost has no terms under it but those that chooseAlike adds up.
func (c *Config) plain() bool {
	return c.TrackPrefillTokens && c.TrackActiveBlocks && c.AssumeKVReuse && c.OverlapScoreCreditDecay == 0
}

// chooseAlike prices candidates that are alike and chooses one, in one pass, right after open. It does what Config.Cost
// does, in the same order, so that the costs are the same to the last bit: what it leaves out is zero, and to divide by a
// power of two is to multiply by its inverse.
func (a *ActiveSequences) chooseAlike(req Request, candidates []Candidate, cfg *Config, blockSize int, rng *rand.Rand, costs []float64) (int, error) {
	loads := a.loads
	held := a.walker.held[:len(loads)]
	costs = costs[:len(candidates)]
	distinct := int64(a.variants[0].distinct)
	isl, size := float64(req.ISLTokens), float64(blockSize)
	perToken := 1 / size
	credit, scale, weight := cfg.OverlapScoreCredit, cfg.PrefillLoadScale, cfg.DecodeActiveRequestWeight
	best := newLowest()
	if cfg.Temperature != 0 {
		best.cost = math.Inf(-1) // nothing is offered
	}
	for i := range candidates {
		c := &candidates[i]
		load := &loads[c.Worker]
		device := float64(c.DeviceBlocks)
		raw := isl
		if cached := float64(device * size); cached > isl {
			raw = cached
		}
		raw += float64(load.PrefillTokens)
		prefill := float64(raw*perToken) - float64(credit*device)
		if prefill < 0 {
			prefill = 0
		}
		decode := float64(float64(load.ActiveTokens)*perToken) + float64(distinct-int64(held[c.Worker]))
		cost := float64(scale*prefill) + decode + float64(weight*float64(load.Requests))
		costs[i] = cost
		if cost <= best.cost {
			best.offer(i, cost, rng)
		}
	}
	if cfg.Temperature != 0 {
		return draw(costs, cfg.Temperature, rng)
	}
	return best.choice()
}

// blockSize returns the candidate's block size, or the unit if it is unknown.
func (c *Candidate) blockSize(unit int) int {
	if c.Prompt == nil || c.Prompt.BlockSize == 0 {
		return unit
	}
	return c.Prompt.BlockSize
}

// overlap sets what t has of the candidate itself.
func (c *Candidate) overlap(t *Terms, unit int) {
	t.BlockSize = c.blockSize(unit)
	t.DeviceBlocks, t.HostBlocks, t.DiskBlocks, t.SharedBlocks = c.DeviceBlocks, c.HostBlocks, c.DiskBlocks, c.SharedBlocks
}

// add books a request for which open was called on candidates[i].
func (a *ActiveSequences) add(req Request, candidates []Candidate, i int, cfg *Config, unit int) (Selection, Booking) {
	c := &candidates[i]
	t := Terms{ISLTokens: req.ISLTokens}
	c.overlap(&t, unit)
	sel := Selection{Index: i, Worker: c.Worker, UnitTokens: unit, CachedTokens: cfg.CachedTokens(&t)}
	if cfg.TrackPrefillTokens {
		sel.PrefillTokens = req.ISLTokens - sel.CachedTokens
	}

	var index uint32
	if n := len(a.free); n > 0 {
		index = a.free[n-1]
		a.free = a.free[:n-1]
	} else {
		index = uint32(len(a.bookings))
		a.bookings = append(a.bookings, booking{})
	}
	b := &a.bookings[index]
	b.generation++
	b.id, b.worker, b.prefillTokens = req.ID, c.Worker, sel.PrefillTokens
	if req.ID != "" {
		a.byID[req.ID] = index
	}

	load := &a.loads[c.Worker]
	load.Requests++
	load.PrefillTokens += sel.PrefillTokens
	if v := a.variantOf(c.Prompt); v != nil {
		b.leaves = append(b.leaves[:0], a.walker.leaves[v.from:v.to]...)
		a.blocks.pass()
		for _, id := range b.leaves {
			for ; id != 0 && a.blocks.meet(id); id = a.blocks.runs[id].parent {
				if a.blocks.hold(id, c.Worker) {
					r := &a.blocks.runs[id]
					sel.ActiveBlocks += len(r.hashes)
					load.ActiveTokens += len(r.hashes) * int(r.tokens)
				}
			}
		}
	} else {
		b.ownBlocks, b.ownBlockSize = a.added[i], t.BlockSize
		sel.ActiveBlocks = b.ownBlocks
		load.ActiveTokens += b.ownBlocks * b.ownBlockSize
	}
	load.ActiveBlocks += sel.ActiveBlocks
	a.closeWalks()
	return sel, Booking{book: a, index: index, generation: b.generation}
}

func (a *ActiveSequences) completePrefill(index uint32) {
	b := &a.bookings[index]
	a.loads[b.worker].PrefillTokens -= b.prefillTokens
	b.prefillTokens = 0
}

// active says whether the booking is in use.
func (b *booking) active() bool { return b.generation%2 == 1 }

// end takes an active booking out of the book.
func (a *ActiveSequences) end(index uint32) {
	a.completePrefill(index)
	b := &a.bookings[index]
	load := &a.loads[b.worker]
	load.Requests--
	load.ActiveBlocks -= b.ownBlocks
	load.ActiveTokens -= b.ownBlocks * b.ownBlockSize
	a.blocks.pass()
	for _, id := range b.leaves {
		for id != 0 && a.blocks.meet(id) {
			r := &a.blocks.runs[id]
			blocks, tokens, parent := len(r.hashes), int(r.tokens), r.parent
			if a.blocks.release(id, b.worker) {
				load.ActiveBlocks -= blocks
				load.ActiveTokens -= blocks * tokens
			}
			id = parent
		}
	}
	if b.id != "" {
		delete(a.byID, b.id)
	}
	b.id, b.ownBlocks, b.ownBlockSize = "", 0, 0
	b.generation++
	if cap(b.leaves) > keptBlocks {
		b.leaves = nil
	}
	b.leaves = b.leaves[:0]
	a.free = append(a.free, index)
}

// keptBlocks is the longest list whose memory an unused booking or run keeps for the next request.
const keptBlocks = 4096

// grown returns *scratch with length n, reallocated if need be; its content is undefined.
func grown[T any](scratch *[]T, n int) []T {
	if cap(*scratch) < n {
		*scratch = make([]T, n, 2*n)
	}
	*scratch = (*scratch)[:n]
	return *scratch
}
