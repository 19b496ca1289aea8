package indexer

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// After a request, its prompt counts as held by the worker until the prediction expires.
func TestPredictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newIndex(t)
		_, chain := chainOf(1, 100)
		_, other := chainOf(2, 100)
		forked := slices.Concat(chain[:40], other[40:])
		x.Predict(1, chain, Lifetime{TTL: 2 * time.Second})
		wantMatches(t, x, chain, matches{1: 100})
		wantMatches(t, x, forked, matches{1: 40})
		x.Predict(2, forked, Lifetime{TTL: 2 * time.Second})
		wantMatches(t, x, chain, matches{1: 100, 2: 40})

		<-time.After(1500 * time.Millisecond)                    // synctest time
		x.Predict(1, chain[:10], Lifetime{TTL: 2 * time.Second}) // renews these
		<-time.After(time.Second)                                // synctest time
		wantMatches(t, x, chain, matches{1: 10})
		if s := x.Stats(); s.Predicted != 10 || s.Expired != 190 {
			t.Errorf("got %+v", s)
		}
		<-time.After(1100 * time.Millisecond) // synctest time
		wantMatches(t, x, chain, matches{})
		if s := x.Stats(); s.Predicted != 0 || s.Expired != 200 || x.predictions.tier.blocks != 0 {
			t.Errorf("got %+v", s)
		}
	})
}

// Stored and predicted blocks are not added: the larger count is used, and lower tiers continue there.
func TestPredictionsBesideEvents(t *testing.T) {
	x := newIndex(t)
	local, chain := chainOf(1, 100)
	mustStore(t, x, 1, stores(1, local, 0, 30))
	mustStore(t, x, 1, inTier(kvblock.TierHostPinned, stores(1, local, 0, 60)))
	mustStore(t, x, 2, stores(1, local, 0, 30))
	mustStore(t, x, 4, inTier(kvblock.TierDisk, stores(1, local, 0, 5)))
	for w, n := range []int{0, 50, 20, 10} {
		x.Predict(kvblock.Worker(w), chain[:n], Lifetime{TTL: time.Hour})
	}
	want := map[kvblock.Worker]overlap{1: {50, 10, 0, 0}, 2: {30, 0, 0, 0}, 3: {10, 0, 0, 0}, 4: {0, 0, 5, 0}}
	wantFound(t, x, chain, want)
	x.Removed(1, removes(1, 0, 30)) // a removal does not end a prediction
	wantFound(t, x, chain, want)
	x.Cleared(1) // Cleared does
	x.Forget(3)
	delete(want, 1)
	delete(want, 3)
	wantFound(t, x, chain, want)
	x.Predict(maxWorkers, chain, Lifetime{TTL: time.Hour})
	if s := x.Stats(); s.Predicted != 20 {
		t.Errorf("got %+v", s)
	}
	var s OverlapScores
	x.FindMatches(chain, &s)
	if n := testing.AllocsPerRun(100, func() { x.FindMatches(chain, &s) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func TestPredictionRefusals(t *testing.T) {
	for _, c := range []Config{{MaxPredicted: -1}, {MaxPredicted: 1 << 31}, {PruneTarget: -0.1}, {PruneTarget: 1.1}} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v accepted", c)
		}
	}
}

// predictionOracle is a simple version of predictions, for comparison.
type predictionOracle struct {
	max, target int
	blocks      []predictedBlock
	life        map[kvblock.Worker]Lifetime
	order       int
	swept       time.Duration
}

type predictedBlock struct {
	worker  kvblock.Worker
	seq     kvblock.SequenceHash
	touched time.Duration // in ticks
	order   int
}

func (o *predictionOracle) expire(now time.Duration) {
	if now == o.swept {
		return
	}
	o.swept = now
	o.blocks = slices.DeleteFunc(o.blocks, func(b predictedBlock) bool {
		life := o.life[b.worker]
		return life.Blocks == 0 && now-b.touched > (life.TTL+tickLength-1)/tickLength
	})
}

func (o *predictionOracle) predict(w kvblock.Worker, chain []kvblock.SequenceHash, life Lifetime, now time.Duration) {
	o.expire(now)
	o.life[w] = life
	for _, seq := range slices.Backward(chain) {
		o.blocks = slices.DeleteFunc(o.blocks, func(b predictedBlock) bool { return b.worker == w && b.seq == seq })
		o.order++
		o.blocks = append(o.blocks, predictedBlock{w, seq, now, o.order})
	}
	slices.SortFunc(o.blocks, func(a, b predictedBlock) int { return cmp.Compare(a.order, b.order) })
	own := 0
	for _, b := range o.blocks {
		if b.worker == w {
			own++
		}
	}
	o.blocks = slices.DeleteFunc(o.blocks, func(b predictedBlock) bool {
		if life.Blocks > 0 && b.worker == w && own > life.Blocks {
			own--
			return true
		}
		return false
	})
	if len(o.blocks) > o.max {
		o.blocks = slices.Clone(o.blocks[len(o.blocks)-o.target:])
	}
}

func (o *predictionOracle) find(chain []kvblock.SequenceHash) map[kvblock.Worker]overlap {
	held := map[predictedBlock]bool{}
	for _, b := range o.blocks {
		held[predictedBlock{worker: b.worker, seq: b.seq}] = true
	}
	found := map[kvblock.Worker]overlap{}
	for w := range o.life {
		n := 0
		for n < len(chain) && held[predictedBlock{worker: w, seq: chain[n]}] {
			n++
		}
		if n > 0 {
			found[w] = overlap{n}
		}
	}
	return found
}

func TestPredictionsAgainstOracle(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for seed := range uint64(4) {
		for _, lru := range []bool{false, true} {
			t.Run(fmt.Sprintf("seed%d/lru=%v", seed, lru), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { playPredictions(t, seed, lru) })
			})
		}
	}
}

func playPredictions(t *testing.T, seed uint64, lru bool) {
	const most = 800
	x, err := New(Config{MaxPredicted: most, PruneTarget: 0.7})
	if err != nil {
		t.Fatal(err)
	}
	o := &predictionOracle{max: most, target: most * 7 / 10, life: map[kvblock.Worker]Lifetime{}}
	begin := time.Now()
	r := rand.New(rand.NewPCG(seed, 3))
	var s OverlapScores
	for range 1500 {
		w := kvblock.Worker(r.IntN(5) * 40)
		chain := kvblock.AppendSequenceHashes(nil, prompt(r.IntN(prompts), 1+r.IntN(promptBlocks)))
		now := time.Since(begin) / tickLength
		switch op := r.IntN(20); {
		case op < 10:
			life := Lifetime{TTL: time.Duration(r.IntN(3)+1) * time.Second}
			if lru && w%80 == 0 {
				life = Lifetime{Blocks: 100 + r.IntN(100)}
			}
			x.Predict(w, chain, life)
			o.predict(w, chain, life, now)
		case op == 10:
			x.Cleared(w)
			o.blocks = slices.DeleteFunc(o.blocks, func(b predictedBlock) bool { return b.worker == w })
		case op < 15:
			<-time.After(time.Duration(r.IntN(400)) * time.Millisecond) // synctest time
		default:
			x.FindMatches(chain, &s)
			if s := x.Stats(); s.Predicted > 0 || len(o.blocks) > 0 {
				o.expire(now)
			}
			if got, want := scoresOf(t, &s), o.find(chain); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("got %v, want %v", got, want)
			}
		}
		if s := x.Stats(); s.Predicted > most {
			t.Fatalf("got %+v", s)
		}
	}
	checkTier(t, &x.predictions.tier)
	got := x.Stats()
	if got.Expired == 0 || got.Pruned == 0 {
		t.Errorf("got %+v", got)
	}
	for w := range o.life {
		x.Forget(w)
	}
	if x.Stats().Predicted != 0 || x.predictions.tier.blocks != 0 || len(x.predictions.workers) != 0 {
		t.Errorf("got %+v", x.Stats())
	}
}
