package scoring

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// oracle is a simple load book: a list of requests, from which each call computes all loads.
type oracle struct {
	model    PrefillModel
	requests map[int]*oracleRequest
	prefills map[kvblock.Worker]*oraclePrefills
	weights  map[oracleBlock]float64 // of blocks whose weight is not 1
}

type oracleBlock struct {
	worker kvblock.Worker
	hash   kvblock.SequenceHash
}

// oraclePrefills are the prefills of a worker, oldest first.
type oraclePrefills struct {
	waiting []int
	since   time.Time
}

type oracleRequest struct {
	worker        kvblock.Worker
	prefillTokens int
	blockSize     int
	chains        [][]kvblock.SequenceHash
	hashes        map[kvblock.SequenceHash]bool
	ownBlocks     int
	ownWeight     float64
	outputBlocks  int
	outputWeight  float64
	expires       time.Time // zero: never
}

func newOracle(model PrefillModel) *oracle {
	return &oracle{
		model:    model,
		requests: map[int]*oracleRequest{},
		prefills: map[kvblock.Worker]*oraclePrefills{},
		weights:  map[oracleBlock]float64{},
	}
}

func (o *oracle) load(w kvblock.Worker) Load {
	load, blocks, tokens := o.weigh(w)
	load.ActiveBlocks, load.ActiveTokens = int(math.Round(blocks)), int(math.Round(tokens))
	return load
}

// plain returns the oracle without generated tokens.
func (o *oracle) plain() *oracle {
	plain := newOracle(PrefillModel{})
	for name, r := range o.requests {
		plain.requests[name] = &oracleRequest{
			worker:    r.worker,
			blockSize: r.blockSize,
			hashes:    r.hashes,
			ownBlocks: r.ownBlocks,
			ownWeight: 1,
		}
	}
	return plain
}

// weigh computes a worker's load; blocks and tokens may be fractions.
func (o *oracle) weigh(w kvblock.Worker) (load Load, blocks, tokens float64) {
	sizes := map[kvblock.SequenceHash]int{}
	for _, r := range o.requests {
		if r.worker != w {
			continue
		}
		load.Requests++
		load.PrefillTokens += r.prefillTokens
		own := float64(r.ownBlocks)*r.ownWeight + r.outputWeight
		blocks += own
		tokens += own * float64(r.blockSize)
		for h := range r.hashes {
			sizes[h] = r.blockSize
		}
	}
	for h, size := range sizes {
		weight := o.weight(w, h)
		blocks += weight
		tokens += weight * float64(size)
	}
	if p := o.prefills[w]; o.model.Linear && p != nil && load.PrefillTokens > 0 {
		done := int(o.model.TokensPerSecond * time.Since(p.since).Seconds())
		load.PrefillTokens = max(load.PrefillTokens-done, 0)
	}
	return load, blocks, tokens
}

func (o *oracle) weight(w kvblock.Worker, h kvblock.SequenceHash) float64 {
	if weight, ok := o.weights[oracleBlock{w, h}]; ok {
		return weight
	}
	return 1
}

// holders returns how many requests of the worker hold the block.
func (o *oracle) holders(w kvblock.Worker, h kvblock.SequenceHash) (n int) {
	for _, r := range o.requests {
		if r.worker == w && r.hashes[h] {
			n++
		}
	}
	return n
}

func (o *oracle) output(name, n int, left float64) {
	r := o.requests[name]
	r.outputBlocks += n
	r.outputWeight += float64(n)
	if left == NotKnown {
		return
	}
	r.outputWeight, r.ownWeight = left*float64(r.outputBlocks), left
	for _, chain := range r.chains {
		for i := len(chain) - 1; i >= 0 && o.holders(r.worker, chain[i]) == 1; i-- {
			o.weights[oracleBlock{r.worker, chain[i]}] = left
		}
	}
}

func (o *oracle) completePrefill(name int) {
	r := o.requests[name]
	p := o.prefills[r.worker]
	if r.prefillTokens == 0 {
		return
	}
	if i := slices.Index(p.waiting, name); i == 0 {
		p.since = time.Now()
	} else if o.model.TokensPerSecond > 0 {
		p.since = p.since.Add(time.Duration(float64(r.prefillTokens) / o.model.TokensPerSecond * float64(time.Second)))
		if p.since.After(time.Now()) {
			p.since = time.Now()
		}
	}
	p.waiting = slices.DeleteFunc(p.waiting, func(n int) bool { return n == name })
	r.prefillTokens = 0
}

func (o *oracle) end(name int) {
	o.completePrefill(name)
	r := o.requests[name]
	delete(o.requests, name)
	for h := range r.hashes {
		if o.holders(r.worker, h) == 0 {
			delete(o.weights, oracleBlock{r.worker, h})
		}
	}
}

// add books the request and returns how many blocks it adds to its worker.
func (o *oracle) add(name int, req Request, c Candidate, cfg *Config, unit int) int {
	r := &oracleRequest{worker: c.Worker, blockSize: unit, ownWeight: 1, hashes: map[kvblock.SequenceHash]bool{}}
	chains := 0
	known := c.Prompt != nil && c.Prompt.BlockSize > 0 && c.Prompt.Chains != nil
	if c.Prompt != nil && c.Prompt.BlockSize > 0 {
		r.blockSize = c.Prompt.BlockSize
	}
	if known {
		r.chains = c.Prompt.Chains
		for _, chain := range c.Prompt.Chains {
			chains += len(chain)
			for _, h := range chain {
				r.hashes[h] = true
			}
		}
	}
	switch {
	case !known:
		r.ownBlocks = req.ISLTokens / r.blockSize
	case !cfg.AssumeKVReuse:
		r.ownBlocks, r.chains, r.hashes = chains, nil, nil
	}
	if cfg.TrackPrefillTokens {
		r.prefillTokens = max(req.ISLTokens-c.DeviceBlocks*r.blockSize, 0)
	}
	before := o.plain().load(c.Worker).ActiveBlocks
	o.requests[name] = r
	added := o.plain().load(c.Worker).ActiveBlocks - before
	if name >= 0 && r.prefillTokens > 0 {
		p := o.prefills[c.Worker]
		if p == nil {
			p = &oraclePrefills{}
			o.prefills[c.Worker] = p
		}
		if len(p.waiting) == 0 {
			p.since = time.Now()
		}
		p.waiting = append(p.waiting, name)
	}
	return added
}

func (o *oracle) cost(req Request, c Candidate, cfg *Config, unit int) float64 {
	load, _, tokens := o.weigh(c.Worker)
	added := o.add(-1, req, c, cfg, unit)
	blockSize := o.requests[-1].blockSize
	delete(o.requests, -1)
	held := tokens / float64(blockSize)
	if plain := o.plain().load(c.Worker).ActiveTokens; tokens != float64(plain) {
		held = math.Round(held)
	}
	return cfg.Cost(&Terms{
		BlockSize: blockSize, ISLTokens: req.ISLTokens, DeviceBlocks: c.DeviceBlocks,
		PrefillTokens: load.PrefillTokens, ActiveRequests: load.Requests, UnitTokens: unit,
		DecodeBlocks: held + float64(added),
	})
}

// Random histories: after every step all costs and loads equal the oracle's, and at the end the book is empty. Prompts
// are paths through a small tree, so that requests share prefixes of every length.
func TestHistoriesEqualOracle(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { history(t, rand.New(rand.NewPCG(seed, 0))) })
		})
	}
}

// history plays a random history on the book and on the oracle. It is one function: a single switch over the steps.
func history(t *testing.T, rng *rand.Rand) {
	numbers := []kvblock.Worker{0, 1, 2, 3, 63, 64, 130, 200}[:2+rng.IntN(7)]
	blockSizes := []int{4, 4, 4, 16, 0}
	cfgs := []*Config{defaults(), defaults(), defaults()}
	cfgs[1].DecodeActiveRequestWeight = 0.5
	cfgs[1].Temperature = 0.3
	cfgs[2].AssumeKVReuse = rng.IntN(2) == 0
	cfgs[2].TrackPrefillTokens = rng.IntN(2) == 0

	a := NewActiveSequences()
	a.Expiry = 5 * time.Second
	if rng.IntN(2) == 0 {
		a.blocks.least = 4 // so that the table of runs is released again and again
	}
	switch rng.IntN(3) {
	case 0:
		a.Prefill.Linear = true // the speed stays unknown, because no prefill is timed
	case 1:
		a.Prefill = PrefillModel{Linear: true, TokensPerSecond: 64}
	}
	o := newOracle(a.Prefill)
	bookings := map[int]Booking{}
	ended := []Booking{{}}
	pick := func() (int, bool) {
		for name := range len(bookings) * 3 {
			if _, ok := bookings[name]; ok && rng.IntN(3) == 0 {
				return name, true
			}
		}
		for name := range bookings {
			return name, true
		}
		return 0, false
	}
	end := func(name int) {
		ended = append(ended, bookings[name])
		delete(bookings, name)
		o.end(name)
	}
	for step := range 400 {
		if rng.IntN(4) == 0 {
			<-time.After(time.Duration(rng.IntN(8)) * time.Second / 4) // of the bubble, which does not wait
			for name, r := range o.requests {
				if !r.expires.IsZero() && !r.expires.After(time.Now()) {
					end(name)
				}
			}
		}
		switch op := rng.IntN(24); {
		case op < 9:
			req := Request{ISLTokens: rng.IntN(200), Expires: rng.IntN(3) == 0}
			if rng.IntN(2) == 0 {
				req.ID = fmt.Sprint(step)
			}
			cfg := cfgs[rng.IntN(len(cfgs))]
			variants := map[int]*Prompt{}
			paths := randomPaths(rng)
			var candidates []Candidate
			unit := 0
			for _, w := range numbers {
				if rng.IntN(4) == 0 {
					continue
				}
				c := Candidate{Worker: w, DeviceBlocks: rng.IntN(5)}
				// A worker's block size does not change, but may be unknown at first.
				if size := blockSizes[int(w)%len(blockSizes)]; size > 0 {
					if variants[size] == nil || rng.IntN(5) == 0 {
						variants[size] = &Prompt{BlockSize: size, Chains: paths.hashes(size)}
					}
					if c.Prompt = variants[size]; unit == 0 || size < unit {
						unit = size
					}
				}
				candidates = append(candidates, c)
			}
			if len(candidates) == 0 {
				continue
			}
			if unit == 0 {
				unit = NominalBlockSize
			}
			costs := make([]float64, len(candidates))
			sel, b, err := a.SelectAndAdd(req, candidates, cfg, rng, costs)
			if err != nil {
				t.Fatal(err)
			}
			for i, c := range candidates {
				if want := o.cost(req, c, cfg, unit); costs[i] != want {
					t.Fatalf("step %d: candidate %d costs %v, want %v", step, i, costs[i], want)
				}
				if cfg.Temperature == 0 && costs[i] < sel.Cost {
					t.Fatalf("step %d: chose cost %v of %v", step, sel.Cost, costs)
				}
			}
			if c := candidates[sel.Index]; c.Worker != sel.Worker || costs[sel.Index] != sel.Cost {
				t.Fatalf("step %d: selection %+v is not candidate %+v at cost %v", step, sel, c, costs[sel.Index])
			}
			bookings[step] = b
			if want := o.add(step, req, candidates[sel.Index], cfg, unit); sel.ActiveBlocks != want {
				t.Fatalf("step %d: %d blocks added, want %d", step, sel.ActiveBlocks, want)
			}
			if req.Expires {
				o.requests[step].expires = time.Now().Add(a.Expiry)
			}
			if want := o.requests[step].prefillTokens; sel.PrefillTokens != want {
				t.Fatalf("step %d: %d prefill tokens booked, want %d", step, sel.PrefillTokens, want)
			}
		case op < 13:
			if name, ok := pick(); ok {
				bookings[name].ReleasePrefill()
				o.completePrefill(name)
			}
		case op < 18:
			if name, ok := pick(); ok {
				bookings[name].Free()
				end(name)
			}
		case op < 19:
			stale := ended[rng.IntN(len(ended))]
			stale.MarkPrefillCompleted()
			stale.AddOutputBlocks(1, 0)
			stale.Free()
		case op < 23:
			if name, ok := pick(); ok {
				// eighths, which add up without rounding errors, 0..1; or NotKnown
				n, left := 1+rng.IntN(2), float64(rng.IntN(10)-1)/8
				if left < 0 {
					left = NotKnown
				}
				bookings[name].AddOutputBlocks(n, left)
				o.output(name, n, left)
			}
		default:
			w := numbers[rng.IntN(len(numbers))]
			a.Forget(w)
			for name, r := range o.requests {
				if r.worker == w {
					end(name)
				}
			}
		}
		for _, w := range numbers {
			if got, want := a.Load(w), o.load(w); got != want {
				t.Fatalf("step %d: worker %d carries %+v, want %+v", step, w, got, want)
			}
		}
		if a.Len() != len(bookings) {
			t.Fatalf("step %d: %d requests, want %d", step, a.Len(), len(bookings))
		}
	}
	for _, b := range bookings {
		b.Free()
	}
	wantEmpty(t, a)
}

// paths are the prompts of one request, each a walk from the root of a binary tree.
type paths [][]int

func randomPaths(rng *rand.Rand) paths {
	p := make(paths, 1+rng.IntN(3))
	for i := range p {
		for range rng.IntN(8) {
			p[i] = append(p[i], rng.IntN(2))
		}
	}
	return p
}

// hashes numbers the nodes of the tree, differently for each block size.
func (p paths) hashes(blockSize int) [][]kvblock.SequenceHash {
	chains := make([][]kvblock.SequenceHash, len(p))
	for i, path := range p {
		node := kvblock.SequenceHash(1)
		for _, turn := range path {
			node = 2*node + kvblock.SequenceHash(turn)
			chains[i] = append(chains[i], node<<8|kvblock.SequenceHash(blockSize))
		}
	}
	return chains
}

// Several goroutines play random histories on one book. At the end no load is left.
func TestHistoriesTogetherLeaveNothing(t *testing.T) {
	a := NewActiveSequences()
	a.Expiry = time.Millisecond
	a.Prefill.Linear = true
	var together sync.WaitGroup
	for goroutine := range uint64(4) {
		together.Go(func() {
			rng := rand.New(rand.NewPCG(goroutine, 1))
			var mine []Booking
			for range 3000 {
				cfg := inMode(Mode(rng.IntN(int(DeviceAwareWeighted) + 1)))
				cfg.AssumeKVReuse = rng.IntN(4) > 0
				req := Request{ISLTokens: rng.IntN(200), Expires: rng.IntN(8) == 0}
				if req.Expires {
					req.ID = fmt.Sprint(rng.IntN(50))
				}
				candidates := workers(8, &Prompt{BlockSize: 4, Chains: randomPaths(rng).hashes(4)})
				_, b, err := a.SelectAndAdd(req, candidates, cfg, nil, nil)
				switch {
				case err == nil:
					mine = append(mine, b)
				case !errors.Is(err, ErrDuplicateRequest):
					t.Error(err)
				}
				for range rng.IntN(4) {
					if len(mine) == 0 {
						break
					}
					i := rng.IntN(len(mine))
					switch rng.IntN(5) {
					case 0:
						mine[i].MarkPrefillCompleted()
					case 1:
						mine[i].ReleasePrefill()
					case 2:
						mine[i].AddOutputBlocks(1, rng.Float64())
					case 3:
						mine[i].Free()
						mine = append(mine[:i], mine[i+1:]...)
					case 4:
						if rng.IntN(50) == 0 {
							a.Forget(kvblock.Worker(rng.IntN(8)))
						}
						for _, load := range a.Loads(nil) {
							if load.Requests < 0 || load.PrefillTokens < 0 || load.ActiveBlocks < 0 ||
								load.ActiveTokens < 0 {
								t.Errorf("a worker carries %+v", load)
							}
						}
					}
				}
			}
			for _, b := range mine {
				b.Free()
			}
		})
	}
	together.Wait()
	// bookings expire after a millisecond
	for deadline := time.Now().Add(30 * time.Second); a.Len() > 0 && time.Now().Before(deadline); {
		<-time.After(time.Millisecond)
	}
	wantEmpty(t, a)
}
