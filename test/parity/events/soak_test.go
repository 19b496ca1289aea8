package parity

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

var soakFor = flag.Duration("soak", 5*time.Minute, "how long TestSoak runs")

// TestSoak lets engines' publishers store, remove and clear at random. They are killed, lose messages, and join late.
// It compares the index with their blocks: equal where everything can be replayed, elsewhere never more, and equal
// after each has cleared and restarted.
func TestSoak(t *testing.T) {
	s := &soak{t: t, fixture: newFixture(t), end: time.Now().Add(*soakFor)}
	var workers []*soaked
	for i, steps := range []int{100_000, 100_000, 6, 0} {
		for _, engine := range []string{"vllm", "sglang"} {
			w := &soaked{
				soak:      s,
				publisher: newPublisher(t, engine, sourcesOf(t), steps),
				name:      fmt.Sprintf("%s-%d", engine, i),
				exact:     steps > 1000,
				rng:       rand.New(rand.NewPCG(uint64(i), uint64(len(engine)))),
			}
			w.birth()
			workers = append(workers, w)
		}
	}
	var wg sync.WaitGroup
	for _, w := range workers {
		w.join(true)
		wg.Go(w.run)
	}
	wg.Wait()
	if t.Failed() {
		for _, outcome := range []string{"gap", "restart", "malformed", "replayed", "replay_timed_out",
			"replay_unreachable", "replay_skipped"} {
			t.Logf("%s: %d", outcome, s.count(outcome))
		}
		return
	}
	entries := 0
	for _, w := range workers {
		w.settle()
		entries += len(w.held)
	}
	gaps, restarts, replays := s.count("gap"), s.count("restart"), s.count("replayed")
	t.Logf(
		"soak of %v: %d batches published, %d live messages dropped, %d publishers killed, %d late joins; %d replays, "+
			"%d rebuilds (%d after a loss that no replay filled, %d after a restart), %d comparisons; index equal to "+
			"oracle, %d blocks",
		*soakFor,
		s.batches.Load(),
		s.drops.Load(),
		s.kills.Load(),
		s.joins.Load(),
		replays,
		gaps+restarts,
		gaps,
		restarts,
		s.compared.Load(),
		entries,
	)
	for what, n := range map[string]int{"drops": int(s.drops.Load()), "kills": int(s.kills.Load()),
		"late joins": int(s.joins.Load()),
		"replays":    replays, "losses": gaps, "restarts": restarts, "blocks": entries} {
		if n == 0 {
			t.Errorf("no %s", what)
		}
	}
	if *soakFor >= 5*time.Minute && s.kills.Load() < 50 {
		t.Errorf("%d kills, want at least 50", s.kills.Load())
	}
}

type soak struct {
	*fixture
	t    *testing.T
	end  time.Time
	mu   sync.Mutex // guards endpoints; held while the pool changes
	ends []pool.Endpoint
	drops, kills, joins, batches,
	compared atomic.Int64
}

// soaked is one worker with the blocks that its engine has.
type soaked struct {
	soak *soak
	*publisher
	name  string
	exact bool // everything can be replayed
	rng   *rand.Rand

	nextHash  int
	nextToken int
	all       []*block // of this epoch
	held      map[int]*block
}

// block is a block that the engine stored at some time in this epoch.
type block struct {
	hash   int
	parent *block // nil: a prompt's first
	tokens []kvblock.Token
}

// prompt returns the tokens from the prompt's beginning to the block's end.
func (b *block) prompt() []kvblock.Token {
	if b.parent == nil {
		return b.tokens
	}
	return append(slices.Clip(b.parent.prompt()), b.tokens...)
}

// leading returns how many leading blocks of b's prompt the engine has.
func (w *soaked) leading(b *block) int {
	var chain []*block
	for at := b; at != nil; at = at.parent {
		chain = append(chain, at)
	}
	slices.Reverse(chain)
	for i, at := range chain {
		if w.held[at.hash] == nil {
			return i
		}
	}
	return len(chain)
}

// birth begins the engine's next epoch, which shares no block with the previous one.
func (w *soaked) birth() {
	w.all, w.held = nil, map[int]*block{}
	w.nextHash, w.nextToken = 1, w.nextToken+1000
}

// join adds the worker to the pool or removes it.
func (w *soaked) join(in bool) {
	s := w.soak
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends = slices.DeleteFunc(s.ends, func(e pool.Endpoint) bool { return e.Name == w.name })
	if in {
		s.ends = append(s.ends, w.endpoint(w.name))
	}
	s.pool.Update(slices.Clone(s.ends))
}

func (w *soaked) run() {
	tick := time.NewTicker(4 * time.Millisecond) // many batches in an epoch, but fewer than the machine can send
	defer tick.Stop()
	for time.Now().Before(w.soak.end) && !w.t.Failed() {
		<-tick.C
		switch n := w.rng.IntN(4000); {
		case n < 2:
			w.kill()
			w.soak.kills.Add(1)
			w.birth()
			w.start()
			for range w.rng.IntN(100) { // sometimes more than in the epoch before, until kvepp connects
				w.batch(0.04)
			}
		case n < 6:
			w.soak.joins.Add(1)
			w.join(false)
			for range w.rng.IntN(20) {
				w.batch(0)
			}
			w.join(true)
		case n < 60:
			w.compare()
		default:
			w.batch(0.04)
		}
	}
}

// batch publishes a few random events.
func (w *soaked) batch(drop float64) {
	var events []event
	for range 1 + w.rng.IntN(3) {
		switch n := w.rng.IntN(100); {
		case n < 60 || len(w.held) == 0:
			events = append(events, w.storeSome())
		case n < 99:
			events = append(events, w.removeOne())
		default:
			events = append(events, cleared)
			clear(w.held)
			w.all = nil
		}
	}
	lost := w.rng.Float64() < drop
	if lost {
		w.soak.drops.Add(1)
	}
	w.soak.batches.Add(1)
	w.publish(lost, events...)
}

// storeSome stores a few blocks: new ones after a stored one or at a prompt's beginning, or one that was removed.
func (w *soaked) storeSome() event {
	if len(w.all) > 0 && w.rng.IntN(4) == 0 {
		b := w.all[w.rng.IntN(len(w.all))]
		if w.held[b.hash] == nil && (b.parent == nil || w.held[b.parent.hash] != nil) {
			w.held[b.hash] = b
			return w.storeOf(b)
		}
	}
	var parent *block
	if len(w.all) > 0 && w.rng.IntN(3) > 0 {
		if b := w.all[w.rng.IntN(len(w.all))]; w.held[b.hash] != nil {
			parent = b
		}
	}
	var fresh []*block
	for range 1 + w.rng.IntN(4) {
		b := &block{hash: w.nextHash, parent: parent, tokens: tokens(w.nextToken, blockSize)}
		w.nextHash++
		w.nextToken += blockSize
		w.all = append(w.all, b)
		w.held[b.hash] = b
		fresh = append(fresh, b)
		parent = b
	}
	return w.storeOf(fresh...)
}

// storeOf announces consecutive blocks.
func (w *soaked) storeOf(blocks ...*block) event {
	var hashes []any
	var ids []kvblock.Token
	for _, b := range blocks {
		hashes = append(hashes, b.hash)
		ids = append(ids, b.tokens...)
	}
	var parent any
	if p := blocks[0].parent; p != nil {
		parent = p.hash
	}
	return w.publisher.store(hashes, parent, ids)
}

func (w *soaked) removeOne() event {
	for _, b := range w.all[w.rng.IntN(len(w.all)):] {
		if w.held[b.hash] != nil {
			delete(w.held, b.hash)
			return removed(b.hash)
		}
	}
	return removed(0) // of an unknown block
}

// compare waits until all published batches were applied, and compares the index with the worker's blocks.
func (w *soaked) compare() {
	last := w.mark()
	seen := func() bool { return w.soak.match(w.name, last.tokens, kvblock.HashOptions{}) == 1 }
	for deadline := time.Now().Add(time.Minute); !seen(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Errorf("%s: a store was never applied", w.name)
			return
		}
		if !w.exact { // batches sent before the connection are lost
			last = w.mark()
		}
	}
	w.soak.compared.Add(1)
	equal := func() bool {
		for _, b := range w.all {
			if w.soak.match(w.name, b.prompt(), kvblock.HashOptions{}) != w.leading(b) {
				return false
			}
		}
		return true
	}
	if w.exact {
		for deadline := time.Now().Add(time.Minute); !equal(); <-time.After(2 * time.Millisecond) {
			if time.Now().After(deadline) {
				break
			}
		}
	}
	for _, b := range w.all {
		got, want := w.soak.match(w.name, b.prompt(), kvblock.HashOptions{}), w.leading(b)
		if got > want || w.exact && got != want {
			w.t.Errorf(
				"%s: the index has %d leading blocks, the worker %d (exact: %v)",
				w.name,
				got,
				want,
				w.exact,
			)
			return
		}
	}
}

// mark publishes the first block of a prompt, which serves only to see that it was applied.
func (w *soaked) mark() *block {
	b := &block{hash: w.nextHash, tokens: tokens(w.nextToken, blockSize)}
	w.nextHash++
	w.nextToken += blockSize
	w.all = append(w.all, b)
	w.held[b.hash] = b
	w.publish(false, w.storeOf(b))
	w.soak.batches.Add(1)
	return b
}

// settle makes a worker whose lost messages cannot be replayed restart, and compares the index with it.
func (w *soaked) settle() {
	if !w.exact {
		w.compare() // kvepp is connected
		w.exact = true
		w.publish(false, cleared)
		clear(w.held)
		w.all = nil
		// A replay may be late, and the shortest buffer has 6 batches. kvepp applies each round before the next one.
		for range 20 {
			w.batch(0)
			w.batch(0)
			w.compare()
		}
	}
	w.compare()
}
