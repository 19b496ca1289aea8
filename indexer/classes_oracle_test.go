package indexer

import (
	"math/rand/v2"
	"sync"
	"testing"

	"kvepp/kvblock"
)

// accepts says by its definition whether a class accepts the first end tokens of a prompt. held says whether the block
// of the class that ends there is held, and limit where the block that EAGLE drops may end.
func accepts(c kvblock.Class, h *Hybrid, held func(end int) bool, end, limit int) bool {
	size := int(c.BlockSize)
	first := 0 // token that the class needs
	switch c.Kind {
	case kvblock.ClassState:
		first = end - 1
	case kvblock.ClassWindow:
		first = max(end-(int(c.Window)-1), 0)
		if h.Drop&kvblock.EAGLEDropWindows != 0 {
			if end += size; end > limit {
				return false
			}
		}
	case kvblock.ClassChunk:
		first = end / h.Chunk * h.Chunk
	}
	for at := 0; at < end; at += size {
		if at+size > first && !held(at+size) {
			return false
		}
	}
	return true
}

// reusable says by its definition how many blocks of a prompt a worker can reuse.
func (o *oracleWorker) reusable(p *Prompt, h *Hybrid) int {
	full := 0
	for full < len(p.Chain) && o.held[kvblock.TierDevice][p.Chain[full]] > 0 {
		full++
	}
	classes := h.Classes[:h.Classes.Len()]
	limit := p.Tokens - 1
	if len(classes) > 0 {
		unit := h.BlockSize // the GCD of the sizes in randomHybrid is the smallest one
		for _, c := range classes {
			unit = min(unit, int(c.BlockSize))
		}
		limit = p.Tokens / unit * unit
	}
search:
	for n := min(full, (p.Tokens-1)/h.BlockSize); n > 0; n-- {
		end := n * h.BlockSize
		if h.Drop&kvblock.EAGLEDropFull != 0 && (n+1 > full || end+h.BlockSize > limit) {
			continue
		}
		for i, c := range classes {
			held := func(end int) bool {
				whole, part := end/h.BlockSize, end%h.BlockSize
				if part == 0 {
					return whole <= len(p.Chain) && o.held[kvblock.ClassTier(i)][p.Chain[whole-1]] > 0
				}
				seq, ok := partOf(p.Chain, p.IDs, whole, part)
				return ok && o.held[kvblock.ClassTier(i)][seq] > 0
			}
			if end%int(c.BlockSize) != 0 || !accepts(c, h, held, end, limit) {
				continue search
			}
		}
		return n
	}
	return 0
}

// partOf returns the sequence hash of the first tokens of block i.
func partOf(chain []kvblock.SequenceHash, ids []kvblock.Token, i, part int) (kvblock.SequenceHash, bool) {
	if len(ids) < 16*i+part {
		return 0, false
	}
	local := kvblock.AppendLocalHashes(nil, ids[16*i:16*i+part], kvblock.HashOptions{BlockSize: part})[0]
	if i == 0 {
		return kvblock.FirstSequenceHash(local), true
	}
	return kvblock.NextSequenceHash(chain[i-1], local), true
}

func randomHybrid(r *rand.Rand) *Hybrid {
	h := &Hybrid{BlockSize: 16, Chunk: 16 * (12 << r.IntN(3)), Drop: kvblock.EAGLEDrop(r.IntN(4) * r.IntN(2))}
	for i := range 1 + r.IntN(kvblock.MaxClasses) {
		c := kvblock.Class{Kind: kvblock.ClassKind(1 + r.IntN(3)), BlockSize: 16 * uint32(1+r.IntN(3))}
		switch c.Kind {
		case kvblock.ClassWindow:
			c.Window = 1 + uint32(r.IntN(300))
			if r.IntN(2) == 0 {
				c.BlockSize = 16 >> r.IntN(3)
			}
		case kvblock.ClassChunk:
			c.BlockSize = 16 << r.IntN(2)
		}
		h.Classes[i] = c
	}
	return h
}

// hasParts returns the number of classes with smaller blocks than full attention.
func hasParts(h *Hybrid) (n int) {
	for _, c := range h.Classes[:h.Classes.Len()] {
		if int(c.BlockSize) < h.BlockSize {
			n++
		}
	}
	return n
}

// fillClasses stores random stretches of a prompt in the classes of w. Most random prefixes have gaps in the classes.
func (p *driver) fillClasses(r *rand.Rand, w kvblock.Worker, h *Hybrid, which int, chain []kvblock.SequenceHash,
	ids []kvblock.Token) {
	for i := range h.Classes.Len() {
		for range r.IntN(4) {
			from := r.IntN(len(chain))
			to := min(from+1+r.IntN(90), len(chain))
			p.fill(w, kvblock.ClassTier(i), which, from, to)
			size := int(h.Classes[i].BlockSize)
			for part := size; part < 16; part += size {
				if r.IntN(5) > 0 {
					p.fillParts(w, kvblock.ClassTier(i), chain, ids, from, to, part)
				}
			}
		}
	}
}

// The counts for workers of hybrid models are those of the definition, for random blocks in all tiers.
func TestClassesOracle(t *testing.T) {
	cuts, counts, bounds, parts, drops := 0, 0, 0, 0, 0
	seeds := uint64(12)
	if testing.Short() {
		seeds = 2
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		p := newDriver(t, 5, 0, 9, randomScript(seed, 20_000))
		p.plain = true
		p.run(false)
		for round := range 300 {
			chain := kvblock.AppendSequenceHashes(nil, prompt(round%prompts, promptBlocks))
			chain = chain[:1+r.IntN(len(chain))]
			hybrids := map[kvblock.Worker]*Hybrid{}
			tokens := 16*len(chain) + r.IntN(16)
			ids := make([]kvblock.Token, tokens)
			for i := range ids {
				ids[i] = kvblock.Token(i + round%prompts)
			}
			for _, w := range p.workers {
				hybrids[w] = randomHybrid(r)
				p.fillClasses(r, w, hybrids[w], round%prompts, chain, ids)
				p.fill(w, kvblock.TierDevice, round%prompts, 0, r.IntN(len(chain)+1))
				p.x.SetHybrid(w, hybrids[w])
			}
			find := &Prompt{Chain: chain, Tokens: tokens, IDs: ids, Options: kvblock.HashOptions{BlockSize: 16}}
			p.x.FindPrompt(find, &p.scores)
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
					want = ow.reusable(find, hybrids[w])
				}
				if got != want || cut.Held != full[0] || cut.Blocks > full[0]-got ||
					(cut.Kind != 0) != (cut.Blocks > 0) {
					t.Fatalf("seed %d, %d blocks, worker %d, %+v: %d, want %d; %+v",
						seed, len(chain), w, hybrids[w], got, want, cut)
				}
				cuts, counts = cuts+min(cut.Blocks, 1), counts+min(got, 1)
				parts += min(got, hasParts(hybrids[w]), 1)
				drops += min(got, int(hybrids[w].Drop), 1)
			}
			find.IDs = nil // without them, only full attention counts where a class has smaller blocks
			p.x.FindPrompt(find, &p.scores)
			for _, w := range p.workers {
				if p.scores.Blocks(w) > 0 && hasParts(hybrids[w]) > 0 && !p.scores.Cut(w).UpperBound {
					t.Fatalf("seed %d: worker %d, %+v: not an upper bound", seed, w, hybrids[w])
				}
				p.x.SetHybrid(w, nil)
			}
			if p.x.hybrids.Load() != nil {
				t.Fatal("hybrids that are no more")
			}
		}
		checkInvariants(t, p.x, p.o)
	}
	t.Logf("%d cuts, %d counts, %d of them with small blocks and %d with dropped ones, %d upper bounds",
		cuts, counts, parts, drops, bounds)
	few := 20 * int(seeds)
	if cuts < 4*few || counts < 4*few || bounds < few/2 || parts < few || drops < few {
		t.Error("too few of them")
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

// fillParts stores the first tokens of blocks from to to of a prompt in a tier, for blocks whose parent w holds there
// or on its device.
func (p *driver) fillParts(w kvblock.Worker, tier kvblock.Tier, chain []kvblock.SequenceHash, ids []kvblock.Token,
	from, to, part int) {
	ow := p.o.workers[w]
	for i := from; i < to; i++ {
		e := kvblock.Stored{Tier: tier}
		if i > 0 {
			e.HasParent, e.Parent = true, engineHash(w, chain[i-1], 0)
			if ow == nil || ow.held[tier][chain[i-1]] == 0 {
				continue
			}
		}
		local := kvblock.AppendLocalHashes(nil, ids[16*i:16*i+part], kvblock.HashOptions{BlockSize: part})[0]
		seq, _ := partOf(chain, ids, i, part)
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: engineHash(w, seq, 0), Local: local})
		p.send(w, kvblock.Operation{Kind: kvblock.OpStored, Stored: e})
	}
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
				x.FindPrompt(&Prompt{Chain: chain, Tokens: 16*n + 1}, &s)
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
