package replay

import (
	"math/rand/v2"
	"testing"
	"time"

	"kvepp/kvblock"
)

// TestEngineKeepsItsBooks runs random requests through engines that are far too small, and compares the KV events with
// the cache, and the counts of blocks with the requests.
func TestEngineKeepsItsBooks(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		cfg := DefaultEngineConfig()
		cfg.Blocks, cfg.BlockSize = 8+rng.IntN(60), 4
		cfg.MaxSequences, cfg.MaxBatchedTokens = 1+rng.IntN(6), 1+rng.IntN(40)
		e := newEngine(cfg)
		known := map[kvblock.SequenceHash]bool{} // by the events
		now, left := time.Duration(0), 0
		for range 60 {
			s := &sequence{prompt: 1 + rng.IntN(3*cfg.Blocks), output: 1 + rng.IntN(cfg.Blocks)}
			for i := range (s.prompt + s.output) / cfg.BlockSize { // few different prompts, so that many share blocks
				s.chain = append(s.chain, kvblock.SequenceHash(rng.IntN(2)<<20+i))
				s.locals = append(s.locals, 0)
			}
			if blocksOf(s.prompt+s.output, cfg.BlockSize) > cfg.Blocks {
				continue
			}
			e.submit(s)
			left++
		}
		for step := 0; left > 0; step++ {
			if step > 100000 {
				t.Fatalf("seed %d: %d requests do not end", seed, left)
			}
			parts, took := e.begin()
			if len(parts) == 0 || took <= 0 {
				t.Fatalf("seed %d: the engine stops with %d requests", seed, left)
			}
			now += took
			_, complete, changes := e.end(parts, now)
			left -= len(complete)
			for _, s := range complete {
				if s.generated != s.output || s.firstToken <= 0 || s.lastToken != now {
					t.Fatalf("seed %d: ended as %+v", seed, s)
				}
			}
			for _, c := range changes {
				if known[c.hash] == !c.removed {
					t.Fatalf("seed %d: event %+v about a block with known=%v", seed, c, known[c.hash])
				}
				known[c.hash] = !c.removed
			}
			checkBooks(t, e, known)
		}
		if e.private != 0 || e.active != 0 {
			t.Fatalf("seed %d: %d private and %d active blocks without requests", seed, e.private, e.active)
		}
	}
}

// checkBooks compares an engine's counts with its blocks, and its cache with what its events said.
func checkBooks(t *testing.T, e *engine, known map[kvblock.SequenceHash]bool) {
	t.Helper()
	references, private, active := map[*cachedBlock]int{}, 0, 0
	for _, s := range e.running {
		for _, b := range s.blocks {
			if b == nil {
				private++
			} else {
				references[b]++
			}
		}
	}
	for hash, b := range e.cached {
		if b.references != references[b] || (b.unused == nil) != (b.references > 0) || !known[hash] {
			t.Fatalf("block %d: %d references of %d, unused %v, known %v",
				hash, b.references, references[b], b.unused, known[hash])
		}
		if b.references > 0 {
			active++
		}
	}
	for hash, is := range known {
		if is && e.cached[hash] == nil {
			t.Fatalf("block %d is known and not cached", hash)
		}
	}
	if private != e.private || active != e.active || private+active+e.unused.Len() > e.cfg.Blocks {
		t.Fatalf("%d private blocks of %d, %d active of %d, %d unused", e.private, private, e.active, active,
			e.unused.Len())
	}
}
