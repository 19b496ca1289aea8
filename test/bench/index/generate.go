package main

import (
	"bufio"
	"cmp"
	"container/list"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"

	"kvepp/kvblock"
)

// generate writes a workload file. The same arguments give the same file.
func generate(args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("generate", flag.ContinueOnError)
	flags.SetOutput(stderr)
	kind := flags.String("kind", "tree", "tree, trace, micro or hybrid")
	out := flags.String("o", "", "the file")
	users := flags.Int("users", 9300, "tree: users; each has about 100 blocks")
	requests := flags.Int("requests", 20_000, "trace: requests")
	cache := flags.Int("cache", 16_384, "trace: blocks that a worker holds")
	shape := flags.String("shape", "flat", "micro: flat, turns or stagger")
	class := flags.String("class", "none", "hybrid: none, window128, window1024 or state")
	queries := flags.Int("queries", 0, "of each phase that has nothing else; 0: tree 20,000, micro and hybrid 4,096")
	entries := flags.Int("entries", 1<<22, "micro and hybrid: blocks stored, all workers together")
	workers := flags.Int("workers", 64, "workers")
	seed := flags.Uint64("seed", 42, "of everything random")
	if err := flags.Parse(args); err != nil {
		return err
	}
	f, err := os.Create(*out)
	if err != nil {
		return err
	}
	defer f.Close()
	g := &generator{out: bufio.NewWriterSize(f, 1<<20), rng: rand.New(rand.NewPCG(*seed, 0))}
	g.word(workloadMagic)
	g.word(uint64(*workers))
	switch {
	case *kind == "tree":
		g.tree(*workers, *users, cmp.Or(*queries, 20_000))
	case *kind == "trace":
		g.trace(*workers, *requests, *cache)
	case *kind == "micro" && *shape == "flat":
		g.micro(*workers, *entries, cmp.Or(*queries, 4096), g.flat)
	case *kind == "micro" && *shape == "turns":
		g.micro(*workers, *entries, cmp.Or(*queries, 4096), g.turns)
	case *kind == "micro" && *shape == "stagger":
		g.micro(*workers, *entries, cmp.Or(*queries, 4096), g.stagger)
	case *kind == "hybrid" && hybridClasses[*class] != nil:
		g.hybrid(*workers, *entries, cmp.Or(*queries, 4096), hybridClasses[*class])
	default:
		return fmt.Errorf("no workload is called %s %s", *kind, *shape)
	}
	g.word(opEnd)
	fmt.Fprintf(
		stderr,
		"%s: %d blocks stored, %d removed, %d queries of %.0f blocks\n",
		*out,
		g.stored,
		g.removed,
		g.queries,
		float64(g.queried)/float64(max(g.queries, 1)),
	)
	return errors.Join(g.out.Flush(), f.Close())
}

type generator struct {
	out *bufio.Writer
	rng *rand.Rand

	class int // of the blocks that are stored and removed

	stored, removed, queries, queried int
}

// word writes one word. An error stays in out until it is flushed.
func (g *generator) word(w uint64) {
	var raw [8]byte
	binary.NativeEndian.PutUint64(raw[:], w)
	_, _ = g.out.Write(raw[:])
}

func (g *generator) phase(id int) { g.word(opPhase | uint64(id)<<32) }

// chain has the hashes of a prompt's blocks.
type chain struct {
	local []kvblock.LocalHash
	seq   []kvblock.SequenceHash
}

// grow returns c with n more blocks of random contents. The result shares the blocks of c.
func (g *generator) grow(c chain, n int) chain {
	c.local, c.seq = c.local[:len(c.local):len(c.local)], c.seq[:len(c.seq):len(c.seq)]
	for range n {
		local := kvblock.LocalHash(g.rng.Uint64())
		seq := kvblock.FirstSequenceHash(local)
		if len(c.seq) > 0 {
			seq = kvblock.NextSequenceHash(c.seq[len(c.seq)-1], local)
		}
		c.local, c.seq = append(c.local, local), append(c.seq, seq)
	}
	return c
}

// to returns the first n blocks.
func (c chain) to(n int) chain { return chain{c.local[:n], c.seq[:n]} }

// store writes that the worker now holds blocks [from, to) of c, in one event.
func (g *generator) store(worker int, c chain, from, to int) {
	if from >= to {
		return
	}
	g.word(opStore | uint64(worker)<<8 | uint64(g.class)<<24 | uint64(to-from)<<32)
	if from == 0 {
		g.word(0)
	} else {
		g.word(uint64(c.seq[from-1]))
	}
	for i := from; i < to; i++ {
		g.word(uint64(c.seq[i]))
		g.word(uint64(c.local[i]))
	}
	g.stored += to - from
}

// remove writes that the worker removed these blocks, batch of them in each event.
func (g *generator) remove(worker int, blocks []kvblock.SequenceHash, batch int) {
	for len(blocks) > 0 {
		n := min(batch, len(blocks))
		g.word(opRemove | uint64(worker)<<8 | uint64(g.class)<<24 | uint64(n)<<32)
		for _, seq := range blocks[:n] {
			g.word(uint64(seq))
		}
		g.removed += n
		blocks = blocks[n:]
	}
}

func (g *generator) query(c chain) {
	g.word(opQuery | uint64(len(c.local))<<32)
	for _, local := range c.local {
		g.word(uint64(local))
	}
	g.queries++
	g.queried += len(c.local)
}

// Parameters of tree: numbers of system prompts, of blocks of a system prompt, of blocks of a user before the first
// turn, and of blocks of a turn. A turn is stored as one event for the prompt and one for each block of the response.
const (
	treeSystems  = 16
	treeSystem   = 32
	treeUser     = 8
	treePrompt   = 6
	treeResponse = 2
	treeTurn     = treePrompt + treeResponse
	treeTurns    = 8
)

// tree writes chats. Users with a few system prompts take turns with a worker of their own, which changes now and then.
// The first phases load seven turns and query them. The eighth turn comes among queries. Then the last tenth of each
// user's blocks on a worker is removed, 8 blocks in each event, and another tenth in single blocks, as vLLM does.
func (g *generator) tree(workers, users, queries int) {
	systems := make([]chain, treeSystems)
	for i := range systems {
		systems[i] = g.grow(chain{}, treeSystem)
	}
	chains, homes := make([]chain, users), make([]int, users)
	for u := range chains {
		chains[u] = g.grow(systems[u%treeSystems], treeUser+treeTurns*treeTurn)
		homes[u] = g.rng.IntN(workers)
	}
	type place struct{ worker, user int }
	held := map[place]int{} // blocks of the user's chain
	var places []place
	hasSystem := map[place]bool{} // here user is a system prompt
	turn := func(u, t int) {
		worker, c := homes[u], chains[u]
		if g.rng.IntN(10) == 0 {
			worker = g.rng.IntN(workers)
		}
		if system := (place{worker, u % treeSystems}); !hasSystem[system] {
			hasSystem[system] = true
			g.store(worker, c, 0, treeSystem)
		}
		at := place{worker, u}
		from, known := held[at]
		if !known {
			from = treeSystem
			places = append(places, at)
		}
		prompt := treeSystem + treeUser + t*treeTurn + treePrompt
		g.store(worker, c, from, prompt)
		for i := prompt; i < prompt+treeResponse; i++ {
			g.store(worker, c, i, i+1)
		}
		held[at] = prompt + treeResponse
	}
	query := func() {
		switch x := g.rng.IntN(100); {
		case x < 85: // a user's next turn
			n := treeSystem + treeUser + (1+g.rng.IntN(treeTurns-1))*treeTurn
			g.query(g.grow(chains[g.rng.IntN(users)].to(n), treePrompt))
		case x < 95: // a new user
			g.query(g.grow(systems[g.rng.IntN(treeSystems)], treeUser+treePrompt))
		default: // a prompt without a known prefix
			g.query(g.grow(chain{}, treeSystem+treeUser+treePrompt))
		}
	}
	g.phase(phaseLoad)
	for t := range treeTurns - 1 {
		for _, u := range g.rng.Perm(users) {
			turn(u, t)
		}
	}
	g.phase(phaseFind)
	for range queries {
		query()
	}
	g.phase(phaseMixed)
	for _, u := range g.rng.Perm(users) {
		query()
		turn(u, treeTurns-1)
	}
	for _, r := range []struct{ phase, first, batch int }{{phaseRemove, 0, 8}, {phaseRemoveOnes, 5, 1}} {
		g.phase(r.phase)
		for i := r.first; i < len(places); i += 10 {
			own := chains[places[i].user].seq[treeSystem:held[places[i]]]
			g.remove(places[i].worker, reversed(own), r.batch)
		}
	}
}

func reversed(seqs []kvblock.SequenceHash) []kvblock.SequenceHash {
	r := make([]kvblock.SequenceHash, 0, len(seqs))
	for i := len(seqs) - 1; i >= 0; i-- {
		r = append(r, seqs[i])
	}
	return r
}

// Parameters of trace.
const (
	traceUnit  = 8   // blocks in a unit of prompt lengths: 512 tokens, 64 in each block
	traceEvent = 128 // maximum blocks of a store: a prefill of 8,192 tokens
)

// trace writes requests like those of the conversation trace that was published with Mooncake. Prompts are long, and
// their lengths vary widely. Four in ten requests begin a conversation; the others continue a recent one. Each prompt
// shares its first unit with many others. Each request is a query, and then goes to the worker that has most of it
// cached (one in eight: to the least loaded worker). That worker evicts its least recently used blocks, a prompt's end
// first.
func (g *generator) trace(workers, requests, cacheBlocks int) {
	caches := make([]*lru, workers)
	load := make([]int, workers)
	for i := range caches {
		caches[i] = &lru{at: map[kvblock.SequenceHash]*list.Element{}}
	}
	systems := make([]chain, 8)
	for i := range systems {
		systems[i] = g.grow(chain{}, traceUnit)
	}
	units := func(median float64) int { return 1 + int(math.Min(median*math.Exp(g.rng.NormFloat64()), 200)) }
	var talks []chain
	g.phase(phaseMixed)
	for range requests {
		var c chain
		if len(talks) == 0 || g.rng.IntN(10) < 4 {
			c = g.grow(systems[g.rng.IntN(len(systems))], traceUnit*units(11))
			talks = append(talks, c)
		} else {
			i := len(talks) - 1 - int(math.Abs(g.rng.NormFloat64())*150)%len(talks)
			c = g.grow(talks[i], traceUnit*units(2))
			talks[i] = c
		}
		// No prompt is longer than half a cache, or a worker would drop what it is about to store.
		c = c.to(min(len(c.seq), cacheBlocks/2))
		g.query(c)
		best, most := 0, -1
		for worker, cache := range caches {
			if n := cache.leading(c); n > most || n == most && load[worker] < load[best] {
				best, most = worker, n
			}
		}
		if g.rng.IntN(8) == 0 {
			for worker := range caches {
				if load[worker] < load[best] {
					best = worker
				}
			}
		}
		cache := caches[best]
		from := cache.leading(c)
		load[best] += len(c.seq) - from
		for i := len(c.seq) - 1; i >= 0; i-- {
			cache.use(c.seq[i])
		}
		var out []kvblock.SequenceHash
		for cache.order.Len() > cacheBlocks {
			out = append(out, cache.evict())
		}
		g.remove(best, out, 8)
		for ; from < len(c.seq); from += traceEvent {
			g.store(best, c, from, min(from+traceEvent, len(c.seq)))
		}
	}
}

// lru is a worker's cache.
type lru struct {
	at    map[kvblock.SequenceHash]*list.Element
	order list.List // most recently used first
}

// leading returns how many leading blocks of c are cached.
func (l *lru) leading(c chain) int {
	for i, seq := range c.seq {
		if l.at[seq] == nil {
			return i
		}
	}
	return len(c.seq)
}

func (l *lru) use(seq kvblock.SequenceHash) {
	if e := l.at[seq]; e != nil {
		l.order.MoveToFront(e)
		return
	}
	l.at[seq] = l.order.PushFront(seq)
}

func (l *lru) evict() kvblock.SequenceHash {
	seq := l.order.Remove(l.order.Back()).(kvblock.SequenceHash)
	delete(l.at, seq)
	return seq
}

const microLength = 512 // blocks of a prompt

// micro writes prompts that all workers store, in the way of store, and queries that match whole, half, or not at all.
func (g *generator) micro(workers, entries, queries int, store func(prompt, worker, workers int, c chain)) {
	prompts := make([]chain, max(1, entries/microLength/workers))
	g.phase(phaseLoad)
	for p := range prompts {
		prompts[p] = g.grow(chain{}, microLength)
		for worker := range workers {
			store(p, worker, workers, prompts[p])
		}
	}
	for _, q := range []struct{ phase, matching int }{{phaseFull, microLength}, {phaseHalf, microLength / 2},
		{phaseNone, 0}} {
		g.phase(q.phase)
		for range queries {
			c := prompts[g.rng.IntN(len(prompts))]
			g.query(g.grow(c.to(q.matching), microLength-q.matching))
		}
	}
}

// flat: every worker stores the prompt in one event.
func (g *generator) flat(_, worker, _ int, c chain) { g.store(worker, c, 0, microLength) }

// turns: every worker stores the prompt in 16 events. After each event but the last, one worker also stores a short
// branch.
func (g *generator) turns(prompt, worker, workers int, c chain) {
	const turn, branch = microLength / 16, 4
	for t := range 16 {
		to := (t + 1) * turn
		g.store(worker, c, to-turn, to)
		if t < 15 && worker == (prompt+t)%workers {
			g.store(worker, g.grow(c.to(to), branch), to, to+branch)
		}
	}
}

// stagger: every worker stores a little more of the prompt than the one before it.
func (g *generator) stagger(_, worker, workers int, c chain) {
	g.store(worker, c, 0, (microLength*(worker+1)+workers-1)/workers)
}

// hybridClass is a class of layers beside full attention.
type hybridClass struct {
	kind   kvblock.ClassKind // 0: there are only layers with full attention
	window int               // in tokens
	need   int               // blocks that it needs before a place where a prompt may go on
}

var hybridClasses = map[string]*hybridClass{
	"none":       {},
	"window128":  {kvblock.ClassWindow, 128, 8},
	"window1024": {kvblock.ClassWindow, 1024, 64},
	"state":      {kvblock.ClassState, 0, 1},
}

// hybrid writes prompts of 8,192 tokens that all workers of a hybrid model store in two turns of half the length. Full
// attention holds all blocks, the class those that it needs at the end of each turn. Queries match the whole prompt,
// its first turn, and nothing. A fourth kind leaves the prompt an eighth before its end. Full attention holds what
// comes before, but the class does not hold its end, so that the engine can reuse only the first turn. Then the workers
// remove blocks.
func (g *generator) hybrid(workers, entries, queries int, class *hybridClass) {
	const turn = microLength / 2
	if class.kind != 0 {
		g.word(opClass | uint64(class.kind)<<8 | 1<<32)
		g.word(uint64(class.window))
	}
	prompts := make([]chain, max(1, entries/microLength/workers))
	ends := func(f func(worker int, c chain, from, to int), worker int, c chain, to int) {
		if class.kind != 0 {
			g.class = 1
			f(worker, c, to-class.need, to)
			g.class = 0
		}
	}
	g.phase(phaseLoad)
	for p := range prompts {
		prompts[p] = g.grow(chain{}, microLength)
		for worker := range workers {
			for to := turn; to <= microLength; to += turn {
				g.store(worker, prompts[p], to-turn, to)
				ends(g.store, worker, prompts[p], to)
			}
		}
	}
	for _, q := range []struct{ phase, matching int }{{phaseFull, microLength}, {phaseHalf, turn}, {phaseNone, 0},
		{phaseCut, microLength * 7 / 8}} {
		g.phase(q.phase)
		for range queries {
			c := prompts[g.rng.IntN(len(prompts))]
			g.query(g.grow(c.to(q.matching), microLength-q.matching))
		}
	}
	g.phase(phaseRemove)
	for _, c := range prompts[:(len(prompts)+3)/4] {
		for worker := range workers {
			remove := func(worker int, c chain, from, to int) { g.remove(worker, reversed(c.seq[from:to]), 8) }
			ends(remove, worker, c, microLength)
			g.remove(worker, reversed(c.seq[turn:]), 8)
		}
	}
}
