package main

import (
	"fmt"
	"math/rand/v2"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/scoring"
	"kvepp/test/bench/cputime"
)

const promptTokens = 8192

type hashed struct {
	Local    float64 `json:"local_ns"` // per block
	Sequence float64 `json:"sequence_ns"`
	Digest   string  `json:"digest"`
}

// hash measures the CPU time of hashing the blocks of a prompt of 8,192 tokens, and of the chain over them.
func hash(blockSize int) (*hashed, error) {
	const times = 4000
	tokens := make([]kvblock.Token, promptTokens)
	for i := range tokens {
		tokens[i] = kvblock.Token(uint32(i) * 2654435761 % 151936) // as in index-rs
	}
	o := kvblock.HashOptions{BlockSize: blockSize}
	var local []kvblock.LocalHash
	var seq []kvblock.SequenceHash
	start := cputime.Process()
	for range times {
		local = kvblock.AppendLocalHashes(local[:0], tokens, o)
	}
	between := cputime.Process()
	for range times {
		seq = kvblock.AppendSequenceHashes(seq[:0], local)
	}
	end := cputime.Process()
	var sum uint64
	for i := range local {
		sum += uint64(local[i]) ^ uint64(seq[i])
	}
	blocks := float64(times * len(local))
	return &hashed{
		Local:    (between - start) / blocks,
		Sequence: (end - between) / blocks,
		Digest:   fmt.Sprintf("%016x", sum),
	}, nil
}

// desk is the state for decisions: an index and a load book in use.
type desk struct {
	index      *indexer.Index
	book       *scoring.ActiveSequences
	cfg        scoring.Config
	prompts    [][]kvblock.Token
	blockSize  int
	candidates []scoring.Candidate
	costs      []float64
	active     []scoring.Booking
	next       int // the next prompt, modulo their number
	booked     int // requests so far: the next one replaces the oldest in active
	local      []kvblock.LocalHash
	seq        []kvblock.SequenceHash
	scores     indexer.OverlapScores
	chains     [][]kvblock.SequenceHash
	prompt     scoring.Prompt
}

// newDesk creates 512 prompts of 8,192 tokens. An eighth of each is one of four system prompts, which all workers have;
// half of it is an earlier turn, which two have; the rest is new.
func newDesk(workers, blockSize int) (*desk, error) {
	x, err := indexer.New(indexer.Config{})
	if err != nil {
		return nil, err
	}
	d := &desk{
		index: x, book: scoring.NewActiveSequences(), cfg: scoring.DefaultConfig(), blockSize: blockSize,
		candidates: make(
			[]scoring.Candidate,
			workers,
		), costs: make([]float64, workers), active: make([]scoring.Booking, 512),
		chains: make([][]kvblock.SequenceHash, 1),
	}
	rng := rand.New(rand.NewPCG(5, 5))
	tokens := func(n int) []kvblock.Token {
		t := make([]kvblock.Token, n)
		for i := range t {
			t[i] = kvblock.Token(rng.Uint32N(128_000))
		}
		return t
	}
	hold := func(w int, tokens []kvblock.Token) error {
		var e kvblock.Stored
		for _, local := range kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: blockSize}) {
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: kvblock.EngineHash(rng.Uint64()), Local: local})
		}
		return x.Stored(kvblock.Worker(w), e)
	}
	var systems [4][]kvblock.Token
	for i := range systems {
		systems[i] = tokens(promptTokens / 8)
		for w := range workers {
			if err := hold(w, systems[i]); err != nil {
				return nil, err
			}
		}
	}
	for i := range 512 {
		p := append(append([]kvblock.Token(nil), systems[i%len(systems)]...), tokens(promptTokens*7/8)...)
		for range 2 {
			if err := hold(rng.IntN(workers), p[:promptTokens*5/8]); err != nil {
				return nil, err
			}
		}
		d.prompts = append(d.prompts, p)
	}
	return d, nil
}

// hash and find prepare a decision about the next prompt; pick makes it.
func (d *desk) hash() {
	d.local = kvblock.AppendLocalHashes(
		d.local[:0],
		d.prompts[d.next%len(d.prompts)],
		kvblock.HashOptions{BlockSize: d.blockSize},
	)
	d.next++
	d.seq = kvblock.AppendSequenceHashes(d.seq[:0], d.local)
}

func (d *desk) find() {
	d.index.FindMatches(d.seq, &d.scores)
	d.chains[0] = d.seq
	d.prompt = scoring.Prompt{BlockSize: d.blockSize, Chains: d.chains}
	for i := range d.candidates {
		d.candidates[i] = scoring.Candidate{
			Worker:       kvblock.Worker(i),
			Prompt:       &d.prompt,
			DeviceBlocks: d.scores.Blocks(kvblock.Worker(i)),
		}
	}
}

func (d *desk) pick(rng *rand.Rand) error {
	_, booking, err := d.book.SelectAndAdd(scoring.Request{ISLTokens: promptTokens}, d.candidates, &d.cfg, rng, d.costs)
	d.active[d.booked%len(d.active)] = booking
	d.booked++
	return err
}

// free ends the oldest requests, so that there is room for n more.
func (d *desk) free(n int) {
	for i := range n {
		d.active[(d.booked+i)%len(d.active)].Free()
	}
}

type chosen struct {
	Select float64 `json:"select_ns"` // CPU time; choose: per worker; decide: per decision
	Hash   float64 `json:"hash_ns"`
	Find   float64 `json:"find_ns"`
}

// choose measures the cost of one more worker in a selection: the difference between many and few workers, divided by
// the difference of their numbers. The fixed cost of a selection (it walks and books the prompt's blocks) is part of
// decide. The same candidates are used several times, as in the measurement of Dynamo's selection.
func choose(workers int) (*chosen, error) {
	const few, batch, batches = 64, 16, 200
	if workers <= few {
		return nil, fmt.Errorf("%d workers, but must be more than %d", workers, few)
	}
	var whole [2]float64
	for i, n := range []int{few, workers} {
		d, err := newDesk(n, 64)
		if err != nil {
			return nil, err
		}
		rng := rand.New(rand.NewPCG(1, 2))
		for k := range batches {
			d.hash()
			d.find()
			for j := range d.candidates {
				d.candidates[j].DeviceBlocks = j % 32 // as in index-rs
			}
			d.free(batch)
			start := cputime.Process()
			for range batch {
				if err := d.pick(rng); err != nil {
					return nil, err
				}
			}
			if k >= batches/4 {
				whole[i] += (cputime.Process() - start - cputime.Cost) / (batch * batches * 3 / 4)
			}
		}
	}
	return &chosen{Select: (whole[1] - whole[0]) / float64(workers-few)}, nil
}

// decide measures the CPU time of whole decisions among 64 workers.
func decide(blockSize int) (*chosen, error) { return decisions(64, blockSize) }

func decisions(workers, blockSize int) (*chosen, error) {
	const batch, batches = 4, 300
	d, err := newDesk(workers, blockSize)
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(1, 2))
	one := func() error {
		d.hash()
		d.find()
		return d.pick(rng)
	}
	for range 2 * len(d.active) {
		d.free(1)
		if err := one(); err != nil {
			return nil, err
		}
	}
	var c chosen
	for range batches {
		// The parts are timed in separate passes over different prompts, because the clock costs as much as a part. A
		// prompt's tokens were written just before its decision, so they are in the cache; its blocks in the index are
		// not.
		from := d.next
		for range 3 * batch {
			d.hash()
		}
		d.next = from
		d.free(batch)
		start := cputime.Process()
		for range batch {
			d.hash()
		}
		hashed := cputime.Process()
		for range batch {
			d.hash()
			d.find()
		}
		found := cputime.Process()
		for range batch {
			if err := one(); err != nil {
				return nil, err
			}
		}
		all := cputime.Process()
		hash, find, whole := hashed-start-cputime.Cost, found-hashed-cputime.Cost, all-found-cputime.Cost
		c.Hash += hash / (batch * batches)
		c.Find += (find - hash) / (batch * batches)
		c.Select += (whole - find) / (batch * batches)
	}
	return &c, nil
}
