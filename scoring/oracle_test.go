package scoring

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// oracle is the load book in its plainest form: a list of requests, everything else counted anew when asked for.
type oracle struct {
	requests map[int]*oracleRequest
}

type oracleRequest struct {
	worker        kvblock.Worker
	prefillTokens int
	blockSize     int
	hashes        map[kvblock.SequenceHash]bool
	ownBlocks     int
}

func (o *oracle) load(w kvblock.Worker) Load {
	var load Load
	tokens := map[kvblock.SequenceHash]int{}
	for _, r := range o.requests {
		if r.worker != w {
			continue
		}
		load.Requests++
		load.PrefillTokens += r.prefillTokens
		load.ActiveBlocks += r.ownBlocks
		load.ActiveTokens += r.ownBlocks * r.blockSize
		for h := range r.hashes {
			tokens[h] = r.blockSize
		}
	}
	load.ActiveBlocks += len(tokens)
	for _, n := range tokens {
		load.ActiveTokens += n
	}
	return load
}

// add books the request and returns how many blocks that adds to its worker.
func (o *oracle) add(name int, req Request, c Candidate, cfg *Config, unit int) int {
	r := &oracleRequest{worker: c.Worker, blockSize: unit, hashes: map[kvblock.SequenceHash]bool{}}
	chains := 0
	known := c.Prompt != nil && c.Prompt.BlockSize > 0 && c.Prompt.Chains != nil
	if c.Prompt != nil && c.Prompt.BlockSize > 0 {
		r.blockSize = c.Prompt.BlockSize
	}
	if known {
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
		r.ownBlocks, r.hashes = chains, nil
	}
	if cfg.TrackPrefillTokens {
		r.prefillTokens = max(req.ISLTokens-c.DeviceBlocks*r.blockSize, 0)
	}
	before := o.load(c.Worker).ActiveBlocks
	o.requests[name] = r
	return o.load(c.Worker).ActiveBlocks - before
}

func (o *oracle) cost(req Request, c Candidate, cfg *Config, unit int) float64 {
	load := o.load(c.Worker)
	added := o.add(-1, req, c, cfg, unit)
	blockSize := o.requests[-1].blockSize
	delete(o.requests, -1)
	return cfg.Cost(&Terms{
		BlockSize: blockSize, ISLTokens: req.ISLTokens, DeviceBlocks: c.DeviceBlocks,
		PrefillTokens: load.PrefillTokens, ActiveRequests: load.Requests, UnitTokens: unit,
		DecodeBlocks: float64(load.ActiveTokens)/float64(blockSize) + float64(added),
	})
}

// Random histories: at every step all costs and all loads equal the oracle's, and at the end nothing is left. Prompts are
// paths through a small tree, so that they share prefixes of every length, among requests and within one.
func TestHistoriesEqualOracle(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			history(t, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

func history(t *testing.T, rng *rand.Rand) {
	numbers := []kvblock.Worker{0, 1, 2, 3, 63, 64, 130, 200}[:2+rng.IntN(7)]
	blockSizes := []int{4, 4, 4, 16, 0}
	cfgs := []*Config{defaults(), defaults(), defaults()}
	cfgs[1].DecodeActiveRequestWeight = 0.5
	cfgs[1].Temperature = 0.3
	cfgs[2].AssumeKVReuse = rng.IntN(2) == 0
	cfgs[2].TrackPrefillTokens = rng.IntN(2) == 0

	a := NewActiveSequences()
	o := &oracle{requests: map[int]*oracleRequest{}}
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
		delete(o.requests, name)
	}
	for step := range 400 {
		switch op := rng.IntN(20); {
		case op < 9:
			req := Request{ISLTokens: rng.IntN(200)}
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
				// A worker has one block size for as long as it lives; that it may not be known yet is part of it.
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
			if want := o.requests[step].prefillTokens; sel.PrefillTokens != want {
				t.Fatalf("step %d: %d prefill tokens booked, want %d", step, sel.PrefillTokens, want)
			}
		case op < 13:
			if name, ok := pick(); ok {
				bookings[name].MarkPrefillCompleted()
				o.requests[name].prefillTokens = 0
			}
		case op < 18:
			if name, ok := pick(); ok {
				bookings[name].Free()
				end(name)
			}
		case op < 19:
			stale := ended[rng.IntN(len(ended))]
			stale.MarkPrefillCompleted()
			stale.Free()
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

// hashes numbers the nodes of the tree, apart for each block size.
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
