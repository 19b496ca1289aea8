package indexer

import (
	"math/rand/v2"
	"sync"
	"testing"

	"kvepp/kvblock"
)

// accepts says by its definition whether a class accepts the first n blocks of a prompt.
func accepts(c kvblock.Class, h *Hybrid, held func(block int) bool, n int) bool {
	size, end := int(c.BlockSize), n*h.BlockSize // in tokens
	first := 0                                   // token that the class needs
	switch c.Kind {
	case kvblock.ClassState:
		first = end - 1
	case kvblock.ClassWindow:
		first = max(end-(int(c.Window)-1), 0)
	case kvblock.ClassChunk:
		first = end / h.Chunk * h.Chunk
	}
	for at := 0; at < end; at += size {
		if at+size > first && !held((at+size)/h.BlockSize-1) {
			return false
		}
	}
	return true
}

// reusable says by its definition how many blocks of a prompt a worker can reuse.
func (o *oracleWorker) reusable(chain []kvblock.SequenceHash, h *Hybrid, tokens int) int {
	full := 0
	for full < len(chain) && o.held[kvblock.TierDevice][chain[full]] > 0 {
		full++
	}
search:
	for n := min(full, (tokens-1)/h.BlockSize); n > 0; n-- {
		for i, c := range h.Classes[:h.Classes.Len()] {
			held := func(block int) bool { return o.held[kvblock.ClassTier(i)][chain[block]] > 0 }
			if n*h.BlockSize%int(c.BlockSize) != 0 || !accepts(c, h, held, n) {
				continue search
			}
		}
		return n
	}
	return 0
}

func randomHybrid(r *rand.Rand) *Hybrid {
	h := &Hybrid{BlockSize: 16, Chunk: 16 * (12 << r.IntN(3))}
	for i := range 1 + r.IntN(kvblock.MaxClasses) {
		c := kvblock.Class{Kind: kvblock.ClassKind(1 + r.IntN(3)), BlockSize: 16 * uint32(1+r.IntN(3))}
		switch c.Kind {
		case kvblock.ClassWindow:
			c.Window = 1 + uint32(r.IntN(300))
		case kvblock.ClassChunk:
			c.BlockSize = 16 << r.IntN(2)
		}
		h.Classes[i] = c
	}
	return h
}

// The counts for workers of hybrid models are those of the definition, for random blocks in all tiers.
func TestClassesOracle(t *testing.T) {
	cuts, counts, bounds := 0, 0, 0
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 1))
		p := newDriver(t, 5, 0, 9, randomScript(seed, 20_000))
		p.plain = true
		p.run(false)
		for round := range 300 {
			chain := kvblock.AppendSequenceHashes(nil, prompt(round%prompts, promptBlocks))
			chain = chain[:1+r.IntN(len(chain))]
			hybrids := map[kvblock.Worker]*Hybrid{}
			for _, w := range p.workers {
				hybrids[w] = randomHybrid(r)
				// Most random prefixes have gaps in the classes.
				for i := range hybrids[w].Classes.Len() {
					for range r.IntN(4) {
						from := r.IntN(len(chain))
						p.fill(w, kvblock.ClassTier(i), round%prompts, from, min(from+1+r.IntN(90), len(chain)))
					}
				}
				p.fill(w, kvblock.TierDevice, round%prompts, 0, r.IntN(len(chain)+1))
				p.x.SetHybrid(w, hybrids[w])
			}
			tokens := 16*len(chain) + r.IntN(16)
			p.x.FindPrompt(chain, tokens, &p.scores)
			for _, w := range p.workers {
				ow := p.o.workers[w]
				if ow == nil {
					continue
				}
				full := p.o.find(chain)[w]
				got, cut := p.scores.Blocks(w), p.scores.Cut(w)
				if bound := full[0] > 0 && full[1]+full[2]+full[3] > 0; bound != cut.UpperBound {
					t.Fatalf("seed %d: worker %d holds %v: %+v", seed, w, full, cut)
				}
				want := full[0]
				if cut.UpperBound {
					bounds++
				} else {
					want = ow.reusable(chain, hybrids[w], tokens)
				}
				if got != want || cut.Held != full[0] || cut.Blocks > full[0]-got ||
					(cut.Kind != 0) != (cut.Blocks > 0) {
					t.Fatalf("seed %d, %d blocks, worker %d, %+v: %d, want %d; %+v",
						seed, len(chain), w, hybrids[w], got, want, cut)
				}
				cuts, counts = cuts+min(cut.Blocks, 1), counts+min(got, 1)
			}
			for _, w := range p.workers {
				p.x.SetHybrid(w, nil)
			}
			if p.x.hybrids.Load() != nil {
				t.Fatal("hybrids that are no more")
			}
		}
		checkInvariants(t, p.x, p.o)
	}
	if cuts < 1000 || counts < 1000 || bounds < 100 {
		t.Errorf("only %d cuts, %d counts and %d upper bounds", cuts, counts, bounds)
	}
}

// fill stores blocks from to to of a prompt in a tier.
func (p *driver) fill(w kvblock.Worker, tier kvblock.Tier, which, from, to int) {
	if from >= to {
		return
	}
	local := prompt(which, promptBlocks)
	seqs := kvblock.AppendSequenceHashes(nil, local)
	e := kvblock.Stored{Tier: tier}
	if from > 0 {
		e.HasParent, e.Parent = true, engineHash(w, seqs[from-1], 0)
	}
	for i := from; i < to; i++ {
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: engineHash(w, seqs[i], 0), Local: local[i]})
	}
	p.send(w, kvblock.Operation{Kind: kvblock.OpStored, Stored: e})
	p.apply()
}

// Lookups of workers of hybrid models while writers change their blocks: a count never exceeds what was ever held, and
// a worker whose blocks do not change keeps its count.
func TestClassesConcurrent(t *testing.T) {
	x, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	const n = 200
	local, chain := chainOf(1, n)
	window := &Hybrid{BlockSize: 16, Classes: kvblock.Classes{{Kind: kvblock.ClassWindow, Window: 129, BlockSize: 16}}}
	put := func(w kvblock.Worker, tier kvblock.Tier, from, to int) {
		e := stores(0, local, from, to)
		e.Tier = tier
		mustStore(t, x, w, e)
	}
	const steady = 7
	want := Cut{Held: n, Blocks: 100, Kind: kvblock.ClassWindow}
	for w := range kvblock.Worker(8) {
		x.SetHybrid(w, window)
		put(w, kvblock.TierDevice, 0, n)
		put(w, kvblock.ClassTier(0), 0, 100)
	}
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for w := range kvblock.Worker(4) {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			for range 2000 {
				from := r.IntN(n - 20)
				if r.IntN(2) == 0 {
					put(w, kvblock.ClassTier(0), from, from+1+r.IntN(20))
				} else {
					e := removes(0, from, from+1+r.IntN(20))
					e.Tier = kvblock.ClassTier(0)
					x.Removed(w, e)
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			var s OverlapScores
			for {
				select {
				case <-done:
					return
				default:
				}
				x.FindPrompt(chain, 16*n+1, &s)
				for w := kvblock.Worker(4); w <= steady; w++ {
					if got := s.Blocks(w); got != 100 || s.Cut(w) != want {
						t.Errorf("%d blocks, %+v", got, s.Cut(w))
						return
					}
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
}
