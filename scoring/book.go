package scoring

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
)

const (
	// NominalBlockSize is the block size, in tokens, for pricing if no candidate's block size is known.
	NominalBlockSize = 16

	// MaxWorkers bounds the worker numbers that the book accepts, and so its memory.
	MaxWorkers = 1 << 16

	// MaxBlockSize is the largest block size accepted, in tokens.
	MaxBlockSize = kvblock.MaxBlockSize

	// MaxISLTokens is the longest prompt accepted, in tokens. Sums over many requests then stay far from overflow.
	MaxISLTokens = 1 << 32

	maxOverlapBlocks = 1<<32 - 1 // all bits below one, so that an or of numbers is above it if one of them is
)

var (
	// ErrNoCandidates says that the list of candidates is empty.
	ErrNoCandidates = errors.New("scoring: no candidates")

	// ErrDuplicateRequest says that a request with the same ID is active.
	ErrDuplicateRequest = errors.New("scoring: a request with this ID is already active")

	// ErrChanged says that the book is not at the version Request.IfVersion any more.
	ErrChanged = errors.New("scoring: other requests were booked after the loads were read")
)

// Request is what is the same for all candidates. A batch of prompts for one worker is one request.
type Request struct {
	// ID names the request. Two active requests cannot have the same ID. Empty: unnamed, and never a duplicate.
	ID string

	// Model is what the candidates serve. Workers of one model are compared with each other, and what the policy Time
	// learns from one never counts for other models. Empty: not known. A client must not be able to name new ones.
	Model string

	// ISLTokens is the number of prompt tokens, over all prompts of the request. Without a tokenizer it is an estimate.
	ISLTokens int

	// Expires ends the booking after ActiveSequences.Expiry. It is for callers that may not learn of the request's end.
	Expires bool

	// DryRun chooses but books nothing.
	DryRun bool

	// Ago is how long the worker has had the request already. A booking that expires must have 0.
	Ago time.Duration

	// IfVersion is the version of the book by whose loads the caller picked the candidates. If the book has another
	// version now, nothing is booked: ErrChanged. 0, the usual: any version will do.
	IfVersion Version

	// Terms, if not nil, must have the length of the candidates. It receives the terms of each one's cost at the time
	// of the choice: Config.Cost of them is the cost. nil, the usual, costs nothing.
	Terms []Terms
}

// Prompt is a request's prompt cut into blocks of one block size. Candidates of the same block size share one Prompt,
// which is then processed once. It is read during the call only.
type Prompt struct {
	// BlockSize is in tokens; 0: not known.
	BlockSize int

	// Chains has, for each prompt of the request, the sequence hashes of its full blocks in order. nil: the hashes are
	// not known. It is ignored if BlockSize is 0.
	Chains [][]kvblock.SequenceHash
}

// Candidate is a worker that may take the request.
//
// A candidate without hashes is priced by load alone: the request counts there as ISLTokens / BlockSize blocks that no
// other request shares. If the block size is unknown too, it is the smallest one known among the candidates, else
// NominalBlockSize. The worker's present load counts by its tokens, independent of its block size.
type Candidate struct {
	Worker kvblock.Worker // below MaxWorkers
	Prompt *Prompt        // nil: nothing is known of blocks

	// The worker's cached blocks of the prompt, as in Terms; 0 if unknown.
	DeviceBlocks int
	HostBlocks   int
	DiskBlocks   int
	SharedBlocks int

	// KVBlocks is how many blocks the worker's device has room for; 0: unknown. The policy Time reads it.
	KVBlocks int

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

	// CachedTokens is how much of the prompt the worker is expected to have cached. PrefillTokens is the rest, booked
	// until MarkPrefillCompleted; 0 if prefill is not tracked.
	CachedTokens  int
	PrefillTokens int

	// ActiveBlocks is how many blocks the request adds to the worker's; 0 after a DryRun.
	ActiveBlocks int

	// UnitTokens is the block size, in tokens, in which all costs of this selection are expressed: the smallest one
	// known among the candidates.
	UnitTokens int

	// Version is the book's version after this booking, for Request.IfVersion of a booking that must follow it
	// directly. After a DryRun, it is that of the loads behind the costs.
	Version Version
}

// Load is the load of a worker by its active requests.
type Load struct {
	Requests      int
	PrefillTokens int // yet to be prefilled
	ActiveBlocks  int // distinct blocks held; a shared block counts once
	ActiveTokens  int // the tokens of ActiveBlocks
}

// Version numbers the states of the book: each booking makes a new one. It is never 0.
type Version uint64

// ActiveSequences is the load book: which requests are active on which worker, their tokens to prefill, and the
// distinct KV blocks that they hold. Make one with [NewActiveSequences].
//
// It is safe for concurrent use; every method is one atomic step. Its memory grows with the active requests, which the
// caller that admits them bounds, and with their blocks: see MaxBytes.
//
// Source: dynamo-kv-router 1.6.1, sequences.
type ActiveSequences struct {
	// Expiry is how long a booking with Request.Expires lasts. 0: without end. Set it before the first call.
	Expiry time.Duration
	// Prefill configures how prompts count while they are prefilled. Set it before the first call.
	Prefill PrefillModel
	// MaxBytes bounds the memory in bytes of the blocks that active requests hold, without copies. A request beyond it
	// is booked by the number of blocks that it adds to its worker: they count as ones that no other request shares.
	// 0: no bound. Set it before the first call.
	MaxBytes int
	// Clock is the time since some moment, and never runs backwards. nil: the machine's monotonic clock. It is for
	// replays in virtual time. Set it before the first call.
	Clock func() time.Duration

	epoch     time.Time         // the book's clock counts from here
	mu        sync.Mutex        // guards everything below
	version   Version           // grows with every booking that is added to a worker
	loads     []Load            // indexed by worker; without the corrections in adjusted and prefills
	prefills  []prefills        // indexed by worker
	adjusted  []adjustment      // indexed by worker
	bookings  []booking         // bookings[0] is unused, so that 0 can mean none
	free      []uint32          // unused indices of bookings
	byID      map[string]uint32 // named requests -> index in bookings
	expiring  order             // bookings that expire, oldest first
	expired   uint64
	blocks    activeBlocks
	held      atomic.Int64 // blocks.held after the latest booking or end of one
	flattened atomic.Uint64
	learned   learned
	numbered  uint64        // bookings of this book so far; numbers of bookings
	observer  func(*Change) // nil: none
	change    Change        // scratch memory of the observer's argument
	copied    []copiedLoad  // indexed by worker: the part of loads that other books' bookings brought
	copies    int           // bookings of all Copies
	origins   int           // Copies
	stale     bool          // copies are not priced, see SetPeersStaleness
	// indexed by worker, for RoundRobin: number of the worker's last turn; 0: none
	turns []uint64
	turn  uint64 // number of the latest turn

	// Scratch memory of SelectAndAdd.
	now      time.Duration // of the call
	fleet    *fleet        // of Request.Model
	average  prices        // of its average worker
	walker   walker
	variants []variant
	added    []int // indexed like the candidates: blocks that the request would add
	costs    []float64
}

// booking is one active request. It is unused if its generation is even.
type booking struct {
	generation    uint64
	id            string
	worker        kvblock.Worker
	since         time.Duration // when it was made
	first         time.Duration // when its first token came; 0: not yet
	atOnce        bool          // when it was made, no other prefill waited and the worker had room for its blocks
	blockSize     int           // tokens
	prefillTokens int           // 0 once completed
	fetched       int           // tokens whose blocks a decode worker fetches from here
	// the runs that its chains end with: it holds these and all runs before them
	leaves     []uint32
	ownBlocks  int // blocks of the prompt that no other request shares
	output     output
	prefilling links // links among the worker's bookings with prefillTokens
	expiring   links // links among the bookings that expire
	expires    bool
	number     uint64  // of this book, or of the one that it was copied from
	copied     *copied // nil: the booking is this book's own
}

// variant is one distinct Prompt among the candidates. Its chains end with the runs walker.leaves[from:to].
type variant struct {
	prompt   *Prompt
	from, to int
	distinct int // blocks
}

// NewActiveSequences returns an empty book.
func NewActiveSequences() *ActiveSequences {
	return &ActiveSequences{
		epoch:    time.Now(),
		version:  1,
		bookings: make([]booking, 1),
		byID:     map[string]uint32{},
		blocks:   newActiveBlocks(),
		fleet:    &noFleet,
	}
}

// Booking is one request's place in the book. It is a small value that may be copied and used from any goroutine. After
// its request has ended it has no effect, also if the place is reused. The zero value belongs to no request.
type Booking struct {
	book       *ActiveSequences
	index      uint32
	generation uint64
}

// SelectAndAdd prices every candidate, chooses one and books the request on it, in one atomic step: of two concurrent
// requests, the second sees the load of the first.
//
// If costs is not nil it must have the length of candidates. It receives the cost of each candidate; one with a NaN or
// infinite cost cannot be chosen. In a mode other than KV it receives each candidate's active requests. cfg must have
// passed [Config.Validate]. rng is used only while the book is locked, so callers of one book can share it; nil means
// math/rand/v2's global source. Nothing passed in is kept.
//
// Errors, which book nothing: ErrNoCandidates, ErrDuplicateRequest, ErrNoFiniteCost, ErrChanged, and a description of a
// number that is out of range.
func (a *ActiveSequences) SelectAndAdd(
	req Request, candidates []Candidate, cfg *Config, rng *rand.Rand, costs []float64,
) (Selection, Booking, error) {
	if costs != nil && len(costs) != len(candidates) || req.Terms != nil && len(req.Terms) != len(candidates) {
		return Selection{}, Booking{}, fmt.Errorf("scoring: room for %d costs and %d terms, but %d candidates",
			len(costs), len(req.Terms), len(candidates))
	}
	all, err := look(req, candidates)
	if err != nil {
		return Selection{}, Booking{}, err
	}
	a.lock()
	defer a.mu.Unlock()
	if req.IfVersion != 0 && req.IfVersion != a.version {
		return Selection{}, Booking{}, ErrChanged
	}
	if err := a.open(req, candidates, cfg, &all); err != nil {
		return Selection{}, Booking{}, err
	}
	if costs == nil {
		costs = grown(&a.costs, len(candidates))
	}
	if cfg.Mode == KV || req.Terms != nil {
		a.price(req, candidates, cfg, all.unit, costs)
	}
	var i int
	if cfg.Mode != KV {
		i = a.chooseByMode(candidates, cfg, rng)
		for j := range candidates {
			costs[j] = float64(a.requests(&candidates[j]))
		}
	} else if i, err = cfg.choose(costs, rng); err != nil {
		a.closeWalks()
		return Selection{}, Booking{}, err
	}
	var sel Selection
	var b Booking
	if req.DryRun {
		sel, _ = a.selection(req, candidates, i, cfg, all.unit)
		a.closeWalks()
	} else {
		sel, b = a.add(req, candidates, i, cfg, all.unit)
		if cfg.Mode == RoundRobin {
			a.turn++
			a.turns[sel.Worker] = a.turn
		}
	}
	sel.Cost, sel.Version = costs[i], a.version
	return sel, b, nil
}

// AddRequest books a request on a worker that the caller has chosen.
//
// Errors, which book nothing: ErrDuplicateRequest, and a description of a number that is out of range.
func (a *ActiveSequences) AddRequest(req Request, c Candidate, cfg *Config) (Booking, error) {
	candidates := []Candidate{c}
	all, err := look(req, candidates)
	if err != nil {
		return Booking{}, err
	}
	a.lock()
	defer a.mu.Unlock()
	if err := a.open(req, candidates, cfg, &all); err != nil {
		return Booking{}, err
	}
	_, b := a.add(req, candidates, 0, cfg, all.unit)
	return b, nil
}

// Named returns the booking of the active request with this ID.
func (a *ActiveSequences) Named(id string) (Booking, bool) {
	a.lock()
	defer a.mu.Unlock()
	index, ok := a.byID[id]
	if !ok {
		return Booking{}, false
	}
	b := &a.bookings[index]
	return Booking{a, index, b.generation}, true
}

// MarkPrefillCompleted takes the request's prompt tokens off the worker's prefill load. Call it when the first content
// of the response comes: the time since the booking is learned, see PrefillModel. The request still holds its blocks.
// Only the first call of this and ReleasePrefill has an effect, and none after Free or Forget.
func (b Booking) MarkPrefillCompleted() {
	b.do(func(a *ActiveSequences) { a.endPrefill(b.index, PrefillDone) })
}

// ReleasePrefill is MarkPrefillCompleted for a prefill that ended at an unknown time.
func (b Booking) ReleasePrefill() {
	b.do(func(a *ActiveSequences) { a.endPrefill(b.index, PrefillReleased) })
}

// Free ends the request and takes its load off the worker. Only the first call has an effect, and none after Forget.
func (b Booking) Free() {
	b.do(func(a *ActiveSequences) { a.end(b.index) })
}

// do runs step with the book locked, if the request is still active.
func (b Booking) do(step func(*ActiveSequences)) {
	if b.book == nil {
		return
	}
	b.book.lock()
	defer b.book.mu.Unlock()
	if b.book.bookings[b.index].generation == b.generation {
		step(b.book)
	}
}

// Forget ends all requests of a worker, so that its number can be given to another. Earlier bookings have no effect any
// more. The worker must no longer be a candidate.
func (a *ActiveSequences) Forget(w kvblock.Worker) {
	a.lock()
	defer a.mu.Unlock()
	// Workers leave rarely: a pass over all requests is cheaper than a list for each worker, kept at every request.
	for i := range a.bookings {
		if b := &a.bookings[i]; b.active() && b.worker == w {
			a.end(uint32(i))
		}
	}
	if int(w) < len(a.turns) {
		a.turns[w] = 0
	}
	a.learned.forget(w)
	if int(w) < len(a.prefills) {
		a.prefills[w] = prefills{}
	}
}

// Load returns the load of one worker.
func (a *ActiveSequences) Load(w kvblock.Worker) Load {
	a.lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.loads) {
		return Load{}
	}
	return a.load(w, a.clock())
}

// Loads appends to dst a snapshot of all loads, indexed by worker. Workers beyond its end have no load.
func (a *ActiveSequences) Loads(dst []Load) []Load {
	dst, _ = a.LoadsAndVersion(dst)
	return dst
}

// LoadsAndVersion is Loads, with the book's version for Request.IfVersion.
func (a *ActiveSequences) LoadsAndVersion(dst []Load) ([]Load, Version) {
	a.lock()
	defer a.mu.Unlock()
	now := a.clock()
	for w := range a.loads {
		dst = append(dst, a.load(kvblock.Worker(w), now))
	}
	return dst, a.version
}

// load returns the load of worker w with all corrections.
func (a *ActiveSequences) load(w kvblock.Worker, now time.Duration) Load {
	load := a.loads[w]
	load.PrefillTokens = a.waiting(w, now)
	if s := &a.adjusted[w]; *s != (adjustment{}) {
		load.ActiveBlocks = int(math.Round(float64(load.ActiveBlocks) + s.blocks))
		load.ActiveTokens = int(math.Round(float64(load.ActiveTokens) + s.tokens))
	}
	return load
}

// PotentialLoad is a worker's load now and with a further request.
type PotentialLoad struct {
	Load
	// CachedTokens is how much of the prompt the worker is expected to have cached.
	CachedTokens int
	// PotentialPrefillTokens is the prefill load with what the worker would have to prefill of the prompt.
	PotentialPrefillTokens int
	// PotentialActiveBlocks is the number of active blocks with those that the request would add, in blocks of the
	// candidate's size.
	PotentialActiveBlocks int
}

// PotentialLoads appends to dst the PotentialLoad of each candidate. Nothing is booked, and the request's ID does not
// matter.
//
// Errors: as of SelectAndAdd.
func (a *ActiveSequences) PotentialLoads(
	req Request, candidates []Candidate, cfg *Config, dst []PotentialLoad,
) ([]PotentialLoad, error) {
	all, err := look(req, candidates)
	if err != nil {
		return dst, err
	}
	req.ID = ""
	a.lock()
	defer a.mu.Unlock()
	if err := a.open(req, candidates, cfg, &all); err != nil {
		return dst, err
	}
	defer a.closeWalks()
	t := a.common(req, candidates, cfg, all.unit)
	for i := range candidates {
		c := &candidates[i]
		a.terms(&t, cfg, c, a.added[i])
		p := PotentialLoad{
			Load:                  a.load(c.Worker, a.now),
			CachedTokens:          cfg.CachedTokens(&t),
			PotentialActiveBlocks: int(math.Round(t.DecodeBlocks)),
		}
		p.PotentialPrefillTokens = p.PrefillTokens
		if cfg.TrackPrefillTokens {
			p.PotentialPrefillTokens += req.ISLTokens - p.CachedTokens
		}
		dst = append(dst, p)
	}
	return dst, nil
}

// Len returns the number of the book's own active requests, without copies.
func (a *ActiveSequences) Len() int {
	a.lock()
	defer a.mu.Unlock()
	return len(a.bookings) - 1 - len(a.free) - a.copies
}

// Expired returns how many bookings have ended by Expiry so far.
func (a *ActiveSequences) Expired() uint64 {
	a.lock()
	defer a.mu.Unlock()
	return a.expired
}

// lock locks the book and ends expired bookings, so that no method sees one.
func (a *ActiveSequences) lock() {
	a.mu.Lock()
	if a.expiring.first == 0 {
		return
	}
	for now := a.clock(); a.expiring.first != 0 && now-a.bookings[a.expiring.first].since >= a.Expiry; {
		a.end(a.expiring.first)
		a.expired++
	}
}

// clock returns the time since the book was made.
func (a *ActiveSequences) clock() time.Duration {
	if a.Clock != nil {
		return a.Clock()
	}
	return time.Since(a.epoch)
}

// overview is a summary of all candidates.
type overview struct {
	top  kvblock.Worker // highest worker number
	unit int            // block size that costs are expressed in: the smallest one, in tokens
}

// look checks and summarizes the candidates. It names the first number that is out of range.
func look(req Request, candidates []Candidate) (overview, error) {
	if len(candidates) == 0 {
		return overview{}, ErrNoCandidates
	}
	if req.ISLTokens < 0 || req.ISLTokens > MaxISLTokens {
		return overview{}, fmt.Errorf("scoring: %d prompt tokens, but must be 0 to %d", req.ISLTokens, MaxISLTokens)
	}
	all := overview{unit: MaxBlockSize + 1}
	for i := range candidates {
		c := &candidates[i]
		if c.Worker >= MaxWorkers {
			return all, fmt.Errorf("scoring: candidate %d: worker number %d, but must be below %d", i, c.Worker,
				MaxWorkers)
		}
		all.top = max(all.top, c.Worker)
		if p := c.Prompt; p != nil && p.BlockSize != 0 {
			if p.BlockSize < 0 || p.BlockSize > MaxBlockSize {
				return all, fmt.Errorf("scoring: candidate %d: block size %d, but must be 0 to %d tokens", i,
					p.BlockSize, MaxBlockSize)
			}
			all.unit = min(all.unit, p.BlockSize)
		}
		// A negative number makes the unsigned maximum huge.
		if uint64(c.DeviceBlocks|c.HostBlocks|c.DiskBlocks|c.SharedBlocks) > maxOverlapBlocks {
			return all, fmt.Errorf("scoring: candidate %d: overlap of %d device, %d host, %d disk and %d shared "+
				"blocks, but each must be 0 to %d", i, c.DeviceBlocks, c.HostBlocks, c.DiskBlocks, c.SharedBlocks,
				maxOverlapBlocks)
		}
		if !(c.CostMultiplier >= 0 && c.CostMultiplier <= math.MaxFloat64) {
			return all, fmt.Errorf("scoring: candidate %d: cost multiplier %v, but must be finite and at least 0", i,
				c.CostMultiplier)
		}
	}
	if all.unit > MaxBlockSize {
		all.unit = NominalBlockSize
	}
	return all, nil
}

// open begins a request. It walks each distinct prompt once and sets a.variants and a.added. The caller must then call
// add or closeWalks.
func (a *ActiveSequences) open(req Request, candidates []Candidate, cfg *Config, all *overview) error {
	if req.ID != "" {
		if _, ok := a.byID[req.ID]; ok {
			return fmt.Errorf("%w: %q", ErrDuplicateRequest, req.ID)
		}
	}
	a.fit(int(all.top) + 1)
	a.now, a.fleet = a.clock(), a.learned.fleetOf(req.Model)
	a.variants, a.walker.leaves, a.walker.made = a.variants[:0], a.walker.leaves[:0], a.walker.made[:0]
	added := grown(&a.added, len(candidates))
	for i := range candidates {
		p := candidates[i].Prompt
		switch {
		case len(a.variants) > 0 && a.variants[len(a.variants)-1].prompt == p: // the usual: walked already
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
			distinct, held := a.walk(p), a.walker.held
			for j := i; j < len(candidates); j++ { // all candidates of this prompt, while walker.held is this prompt's
				if c := &candidates[j]; c.Prompt == p {
					added[j] = distinct - int(held[c.Worker])
				}
			}
		}
	}
	return nil
}

// fit makes room for workers numbered below n.
func (a *ActiveSequences) fit(n int) {
	if n <= len(a.loads) {
		return
	}
	a.loads = append(a.loads, make([]Load, n-len(a.loads))...)
	a.copied = append(a.copied, make([]copiedLoad, n-len(a.copied))...)
	a.prefills = append(a.prefills, make([]prefills, n-len(a.prefills))...)
	a.learned.fit(n)
	a.adjusted = append(a.adjusted, make([]adjustment, n-len(a.adjusted))...)
	a.walker.held = append(a.walker.held, make([]int32, n-len(a.walker.held))...)
	a.blocks.fit(n)
}

// walk adds p to a.variants, sets walker.held for it and returns its number of distinct blocks.
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

// closeWalks ends what open began: it removes runs that walks made and no request holds.
func (a *ActiveSequences) closeWalks() {
	for _, id := range a.walker.made {
		a.blocks.removeUnheld(id)
	}
}

// price sets costs[i], and req.Terms[i] if there is room, for each candidate i, between open and add. If copies are not
// priced, the terms lose what copies brought.
func (a *ActiveSequences) price(req Request, candidates []Candidate, cfg *Config, unit int, costs []float64) {
	t := a.common(req, candidates, cfg, unit)
	peers := a.stale || req.Terms != nil && a.copies > 0
	for i := range candidates {
		c := &candidates[i]
		a.terms(&t, cfg, c, a.added[i])
		if peers {
			t.Peers = a.peerTerms(&t, c)
			if a.stale {
				t = t.WithoutPeers()
			}
		}
		if costs[i] = cfg.Cost(&t); req.Terms != nil {
			req.Terms[i] = t
		}
	}
}

// common returns the terms that are the same for all candidates.
func (a *ActiveSequences) common(req Request, candidates []Candidate, cfg *Config, unit int) Terms {
	t := Terms{ISLTokens: req.ISLTokens, UnitTokens: unit}
	if cfg.Policy == Time {
		a.average = a.fleet.common()
		t.Time = TimeTerms{OutputTokens: a.fleet.outputTokens(), LifeSeconds: a.fleet.usual.life.value}
	}
	if cfg.OverlapScoreCreditDecay != 0 {
		t.LeastPrefillTokens = math.MaxInt
		for i := range candidates {
			t.LeastPrefillTokens = min(t.LeastPrefillTokens, a.waiting(candidates[i].Worker, a.now))
		}
	}
	return t
}

// terms adds to t, which common made, the terms of one candidate. added is how many blocks the request would add there.
func (a *ActiveSequences) terms(t *Terms, cfg *Config, c *Candidate, added int) {
	load := &a.loads[c.Worker]
	c.overlap(t, t.UnitTokens)
	t.PrefillTokens = a.waiting(c.Worker, a.now)
	held := float64(load.ActiveTokens) / float64(t.BlockSize)
	t.DecodeBlocks = held + float64(added)
	if s := &a.adjusted[c.Worker]; s.tokens != 0 {
		t.DecodeBlocks = math.Round((float64(load.ActiveTokens)+s.tokens)/float64(t.BlockSize)) + float64(added)
	}
	t.ActiveRequests = load.Requests
	t.KVBlocks = c.KVBlocks
	t.CostMultiplier = c.CostMultiplier
	if cfg.Policy == Time {
		p, x := &a.learned.prices[c.Worker], &t.Time
		x.HeldBlocks, x.DecodingRequests = held, load.Requests-int(p.prefilling)
		x.SecondsPerToken, x.StepSeconds, x.GapPerToken = p.or(&a.average)
		x.SlowerPerToken = float64(p.slowerPerToken)
		x.ActivePromptBlocks = 0
		if p.prefilling > 0 {
			if v := a.variantOf(c.Prompt); v != nil {
				x.ActivePromptBlocks = v.distinct - added
			}
		}
	}
}

// blockSize returns the candidate's block size, or the unit if it is unknown.
func (c *Candidate) blockSize(unit int) int {
	if c.Prompt == nil || c.Prompt.BlockSize == 0 {
		return unit
	}
	return c.Prompt.BlockSize
}

// overlap sets the terms that the candidate itself has.
func (c *Candidate) overlap(t *Terms, unit int) {
	t.BlockSize = c.blockSize(unit)
	t.DeviceBlocks, t.HostBlocks, t.DiskBlocks, t.SharedBlocks = c.DeviceBlocks, c.HostBlocks, c.DiskBlocks,
		c.SharedBlocks
}

// selection returns the Selection for candidates[i], without cost and blocks, and that candidate's block size.
func (a *ActiveSequences) selection(
	req Request, candidates []Candidate, i int, cfg *Config, unit int,
) (sel Selection, blockSize int) {
	c, t := &candidates[i], Terms{ISLTokens: req.ISLTokens}
	c.overlap(&t, unit)
	sel = Selection{Index: i, Worker: c.Worker, UnitTokens: unit, CachedTokens: cfg.CachedTokens(&t)}
	if cfg.TrackPrefillTokens {
		sel.PrefillTokens = req.ISLTokens - sel.CachedTokens
	}
	return sel, t.BlockSize
}

// add books on candidates[i] a request that open was called for.
func (a *ActiveSequences) add(req Request, candidates []Candidate, i int, cfg *Config, unit int) (Selection, Booking) {
	c := &candidates[i]
	if req.Model != "" && a.learned.fleets[c.Worker] != a.fleet {
		a.learned.join(c.Worker, req.Model)
	}
	a.version++
	sel, blockSize := a.selection(req, candidates, i, cfg, unit)
	index, b := a.newBooking()
	a.numbered++
	b.id, b.worker, b.since, b.blockSize, b.number = req.ID, c.Worker, a.now-req.Ago, blockSize, a.numbered
	b.fetched = 0
	if req.ID != "" {
		a.byID[req.ID] = index
	}

	load := &a.loads[c.Worker]
	load.Requests++
	if sel.PrefillTokens > 0 {
		a.beginPrefill(index, sel.PrefillTokens)
	}
	if b.expires = req.Expires && a.Expiry > 0; b.expires {
		a.expiring.push(a.bookings, index, expiringLinks)
	}
	var chains [][]kvblock.SequenceHash
	if v := a.variantOf(c.Prompt); v != nil {
		chains = v.prompt.Chains
		b.leaves = append(b.leaves[:0], a.walker.leaves[v.from:v.to]...)
		sel.ActiveBlocks = a.holdChains(b)
		a.blocks.bytes[byRequest] += 4 * len(b.leaves)
		if a.MaxBytes > 0 && a.blocks.held() > a.MaxBytes {
			chains = nil
			a.flatten(b, sel.ActiveBlocks)
		}
		a.held.Store(int64(a.blocks.held()))
	} else {
		b.ownBlocks = a.added[i]
		sel.ActiveBlocks = b.ownBlocks
		load.ActiveTokens += b.ownBlocks * b.blockSize
		load.ActiveBlocks += b.ownBlocks
	}
	// A prompt without room waits until others end, which says nothing about the worker's speed.
	b.atOnce = b.atOnce && (c.KVBlocks <= 0 || load.ActiveBlocks <= c.KVBlocks)
	a.closeWalks()
	a.tell(Booked, b, chains)
	return sel, Booking{a, index, b.generation}
}

// newBooking returns an unused booking, which is active from now on. The pointer is valid until the next newBooking.
func (a *ActiveSequences) newBooking() (uint32, *booking) {
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
	return index, b
}

// holdChains has a new booking hold the chains that end with its leaves. It returns how many blocks its worker did not
// hold before.
func (a *ActiveSequences) holdChains(b *booking) (blocks int) {
	load := &a.loads[b.worker]
	a.blocks.pass()
	for _, id := range b.leaves {
		for ; id != 0 && a.blocks.meet(id); id = a.blocks.runs[id].parent {
			if a.blocks.hold(id, b.worker) {
				r := &a.blocks.runs[id]
				blocks += len(r.hashes)
				load.ActiveTokens += len(r.hashes) * int(r.tokens)
			}
		}
	}
	load.ActiveBlocks += blocks
	return blocks
}

// flatten replaces the chains of a new booking by the number of blocks that its worker did not hold before.
func (a *ActiveSequences) flatten(b *booking, blocks int) {
	a.flattened.Add(1)
	a.releaseChains(b)
	a.dropLeaves(b)
	b.ownBlocks = blocks
	a.loads[b.worker].ActiveBlocks += blocks
	a.loads[b.worker].ActiveTokens += blocks * b.blockSize
}

// dropLeaves empties a booking's list of leaves, and releases its memory unless it is small.
func (a *ActiveSequences) dropLeaves(b *booking) {
	a.blocks.bytes[b.origin()] -= 4 * len(b.leaves)
	if b.leaves = b.leaves[:0]; cap(b.leaves) > keptLeaves {
		b.leaves = nil
	}
}

// HeldBytes returns about the memory that MaxBytes bounds.
func (a *ActiveSequences) HeldBytes() int { return int(a.held.Load()) }

// Export exports how many requests are booked.
func (a *ActiveSequences) Export(m *metrics.Metrics) {
	metrics.Gauge(m, metrics.ActiveRequests, a.Len)
	metrics.Counter(m, metrics.Flattened, a.Flattened)
}

// Flattened returns how many requests were booked without their chains so far, because of MaxBytes.
func (a *ActiveSequences) Flattened() uint64 { return a.flattened.Load() }

// origin says whose runs a booking makes.
func (b *booking) origin() origin {
	if b.copied != nil {
		return byCopy
	}
	return byRequest
}

// active reports whether the booking is in use.
func (b *booking) active() bool { return b.generation%2 == 1 }

// end removes an active booking from the book.
func (a *ActiveSequences) end(index uint32) {
	b := &a.bookings[index]
	a.tell(Freed, b, nil)
	a.drop(index)
	if b.copied != nil {
		a.endCopy(b)
	}
	if b.expires {
		a.expiring.remove(a.bookings, index, expiringLinks)
	}
	if b.id != "" {
		delete(a.byID, b.id)
	}
	a.held.Store(int64(a.blocks.held()))
	*b = booking{generation: b.generation + 1, leaves: b.leaves}
	a.free = append(a.free, index)
	a.blocks.shrink()
}

// carry adds to the load of a booking's worker what the booking is to hold, which is that of a Booked.
func (a *ActiveSequences) carry(index uint32, holds *Change) {
	b := &a.bookings[index]
	load := &a.loads[b.worker]
	load.Requests++
	if holds.PrefillTokens > 0 {
		a.beginPrefill(index, holds.PrefillTokens)
	}
	a.walker.made, a.blocks.origin = a.walker.made[:0], b.origin()
	for _, chain := range holds.Chains {
		var leaf uint32
		leaf, a.walker.made = a.blocks.descend(chain, uint32(b.blockSize), a.walker.made)
		if leaf != 0 {
			b.leaves = append(b.leaves, leaf)
		}
	}
	a.holdChains(b)
	a.closeWalks()
	a.blocks.bytes[b.origin()] += 4 * len(b.leaves)
	a.blocks.origin = byRequest
	b.ownBlocks = holds.Blocks
	load.ActiveBlocks += b.ownBlocks
	load.ActiveTokens += b.ownBlocks * b.blockSize
}

// drop takes off its worker's load what a booking holds.
func (a *ActiveSequences) drop(index uint32) {
	a.completePrefill(index, false)
	b := &a.bookings[index]
	load := &a.loads[b.worker]
	load.Requests--
	load.ActiveBlocks -= b.ownBlocks
	load.ActiveTokens -= b.ownBlocks * b.blockSize
	a.endOutput(b)
	a.releaseChains(b)
	if load.Requests == 0 {
		a.dropAdjustment(b.worker)
	}
	a.dropLeaves(b)
}

// releaseChains takes the chains of a booking off its worker.
func (a *ActiveSequences) releaseChains(b *booking) {
	load := &a.loads[b.worker]
	a.blocks.pass()
	for _, id := range b.leaves {
		for id != 0 && a.blocks.meet(id) {
			r := &a.blocks.runs[id]
			blocks, tokens, parent := len(r.hashes), int(r.tokens), r.parent
			if a.blocks.release(id, b.worker) {
				load.ActiveBlocks -= blocks
				load.ActiveTokens -= blocks * tokens
				a.endWeight(id, b.worker, blocks, tokens)
			}
			id = parent
		}
	}
}

// keptLeaves bounds the lists whose memory an unused booking keeps for the next request.
const keptLeaves = 64

// grown returns *scratch with length n, reallocated if needed. Its content is undefined.
func grown[T any](scratch *[]T, n int) []T {
	if cap(*scratch) < n {
		*scratch = make([]T, n, 2*n)
	}
	*scratch = (*scratch)[:n]
	return *scratch
}
