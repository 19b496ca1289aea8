package indexer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// oracle is the index as one would write it down first: maps, no locks, no cleverness.
type oracle struct {
	max    int
	names  map[kvblock.Worker]map[kvblock.EngineHash]kvblock.SequenceHash
	n      int
	events Stats
}

func newOracle(maxEntries int) *oracle {
	return &oracle{max: maxEntries, names: map[kvblock.Worker]map[kvblock.EngineHash]kvblock.SequenceHash{}}
}

func (o *oracle) stored(w kvblock.Worker, e kvblock.Stored) error {
	if o.names[w] == nil {
		o.names[w] = map[kvblock.EngineHash]kvblock.SequenceHash{}
	}
	prev, ok := o.names[w][e.Parent]
	if e.HasParent && !ok {
		o.events.ParentNotFound++
		return ErrParentNotFound
	}
	for i, b := range e.Blocks {
		if i == 0 && !e.HasParent {
			prev = kvblock.FirstSequenceHash(b.Local)
		} else {
			prev = kvblock.NextSequenceHash(prev, b.Local)
		}
		if _, named := o.names[w][b.Engine]; !named {
			if o.n == o.max {
				o.events.Refused += uint64(len(e.Blocks) - i)
				return ErrFull
			}
			o.n++
		}
		o.names[w][b.Engine] = prev
	}
	return nil
}

func (o *oracle) removed(w kvblock.Worker, hashes []kvblock.EngineHash) (unknown int) {
	for _, h := range hashes {
		if _, ok := o.names[w][h]; !ok {
			unknown++
			continue
		}
		delete(o.names[w], h)
		o.n--
	}
	o.events.UnknownRemoved += uint64(unknown)
	return unknown
}

func (o *oracle) cleared(w kvblock.Worker) {
	o.n -= len(o.names[w])
	delete(o.names, w)
}

func (o *oracle) find(chain []kvblock.SequenceHash) map[kvblock.Worker]int {
	found := map[kvblock.Worker]int{}
	for w := range o.names {
		held := map[kvblock.SequenceHash]bool{}
		for _, s := range o.names[w] {
			held[s] = true
		}
		n := 0
		for n < len(chain) && held[chain[n]] {
			n++
		}
		if n > 0 {
			found[w] = n
		}
	}
	return found
}

func (o *oracle) blocks() int {
	all := map[kvblock.SequenceHash]bool{}
	for _, names := range o.names {
		for _, s := range names {
			all[s] = true
		}
	}
	return len(all)
}

// scoresOf renders an answer as a map, checking that its two forms agree.
func scoresOf(t *testing.T, s *OverlapScores) map[kvblock.Worker]int {
	t.Helper()
	found := map[kvblock.Worker]int{}
	for _, o := range s.Overlaps() {
		if _, twice := found[o.Worker]; twice || o.Blocks < 1 || s.Blocks(o.Worker) != o.Blocks {
			t.Errorf("worker %d: %d blocks listed (before: %v), Blocks says %d", o.Worker, o.Blocks, twice, s.Blocks(o.Worker))
		}
		found[o.Worker] = o.Blocks
	}
	for w := range s.depth {
		if s.Blocks(kvblock.Worker(w)) != found[kvblock.Worker(w)] {
			t.Errorf("worker %d: Blocks says %d, %d listed", w, s.Blocks(kvblock.Worker(w)), found[kvblock.Worker(w)])
		}
	}
	return found
}

// checkInvariants compares the index's inside with itself and with the oracle.
func checkInvariants(t *testing.T, x *Index, o *oracle) {
	t.Helper()
	got, want := x.Stats(), o.events
	want.Entries, want.Blocks = o.n, o.blocks()
	got.Bytes = 0
	if got != want {
		t.Errorf("Stats:\n got %+v\nwant %+v", got, want)
	}
	live, runs := 0, map[run]uint64{}
	for i := range x.table.segments {
		seg := &x.table.segments[i]
		slots := seg.slots.Load()
		if slots == nil {
			if seg.live != 0 || seg.gone != 0 {
				t.Errorf("segment %d: no slots, %d live, %d gone", i, seg.live, seg.gone)
			}
			continue
		}
		n, gone := 0, 0
		for _, slot := range *slots {
			switch slot {
			case slotEmpty:
			case slotGone:
				gone++
			default:
				n++
				h, _ := x.arena.load(ref(slot))
				if at, ok := x.table.find(&x.arena, kvblock.SequenceHash(h)); !ok || at != ref(slot) {
					t.Errorf("block %x at %d: found at %d, %v", h, ref(slot), at, ok)
				}
				r, j := x.runOf(ref(slot))
				runs[r] |= 1 << j
			}
		}
		if n != seg.live || gone != seg.gone {
			t.Errorf("segment %d: %d live, %d gone; says %d, %d", i, n, gone, seg.live, seg.gone)
		}
		live += n
	}
	if live != x.blocks {
		t.Errorf("%d blocks in the table, says %d", live, x.blocks)
	}
	used := [2]int{}
	for _, in := range x.arena.info {
		used[0] += int(in.used)
	}
	for r, found := range runs {
		words := x.arena.record(r)
		if n := x.runLen(r); found != ones(n) || words[0]>>32&1 != 0 || x.union(r) != ones(n) {
			t.Errorf("run %d of %d: blocks %b in the table, %b held, version %d", r, n, found, x.union(r), words[0]>>32)
		}
		used[1]++
		if words[1]&manyHolders == 0 {
			continue
		}
		used[1]++
		h := holdersOf(x.arena.record(ref(words[1])))
		n := 0
		for _, w := range h.bits {
			for ; w != 0; w &= w - 1 {
				n++
			}
		}
		if n != h.full || n+len(h.list)/2 < 2 {
			t.Errorf("run %d: %d in the bitset, says %d, %d in the list", r, n, h.full, len(h.list)/2)
		}
	}
	if used[0] != used[1] {
		t.Errorf("%d records in use, %d known", used[0], used[1])
	}
	for w, names := range o.names {
		if n := x.WorkerEntries(w); n != len(names) {
			t.Errorf("worker %d: %d entries, want %d", w, n, len(names))
		}
	}
}

// play drives an index and the oracle with what the bytes of script say, comparing answers all along.
type play struct {
	t      *testing.T
	x      *Index
	o      *oracle
	script []byte
	// workers is how many there are; the highest number is far off, as after many reuses.
	workers []kvblock.Worker
	scores  OverlapScores
}

func (p *play) next(n int) int {
	if len(p.script) < 2 {
		p.script = nil
		return 0
	}
	v := int(p.script[0])<<8 | int(p.script[1])
	p.script = p.script[2:]
	return v % n
}

// prompt is the local hashes of one of few prompts, which share beginnings: prompts 4k to 4k+3 part at block 20, 40, ...
func prompt(which, blocks int) []kvblock.LocalHash {
	local := make([]kvblock.LocalHash, blocks)
	for i := range local {
		branch := 0
		for part := range which % 4 {
			if i >= 20*(part+1) {
				branch = which%4*100 + part + 1
			}
		}
		local[i] = kvblock.LocalHash(uint64(which/4+1)*1000003 + uint64(branch)*10007 + uint64(i) + 1)
	}
	return local
}

const (
	prompts      = 12
	promptBlocks = 150
)

// engineHash is worker w's name for block i of a prompt, given its sequence hash: mostly one and the same, sometimes another.
func engineHash(w kvblock.Worker, seq kvblock.SequenceHash, copy int) kvblock.EngineHash {
	return kvblock.EngineHash(uint64(seq)>>3 + uint64(w)*7 + uint64(copy))
}

func (p *play) step() {
	w := p.workers[p.next(len(p.workers))]
	local := prompt(p.next(prompts), promptBlocks)
	seqs := kvblock.AppendSequenceHashes(nil, local)
	from := p.next(promptBlocks)
	to := min(promptBlocks, from+1+p.next(70))
	copyOf := 0
	if p.next(8) == 0 {
		copyOf = 1
	}
	switch op := p.next(16); {
	case op < 8: // store
		if op < 4 {
			from = 0
		}
		e := kvblock.Stored{}
		if from > 0 {
			e.HasParent, e.Parent = true, engineHash(w, seqs[from-1], p.next(2)*copyOf)
		}
		again, zero := from+p.next(200), from+p.next(1000) // blocks with odd names, if the store has that many
		for i := from; i < to; i++ {
			name := engineHash(w, seqs[i], copyOf)
			if i == again { // an engine hash used again for something else
				name = engineHash(w, seqs[p.next(promptBlocks)], 0)
			}
			if i == zero {
				name = 0
			}
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: name, Local: local[i]})
		}
		got, want := p.x.Stored(w, e), p.o.stored(w, e)
		if got != want {
			p.t.Fatalf("Stored(%d, %d blocks): %v, want %v", w, len(e.Blocks), got, want)
		}
	case op < 13: // remove, from the tail, the head or anywhere
		e := kvblock.Removed{}
		for i := from; i < to; i++ {
			if op == 12 && i%5 != from%3 {
				continue
			}
			e.Hashes = append(e.Hashes, engineHash(w, seqs[i], copyOf))
		}
		if op%2 == 0 {
			slices.Reverse(e.Hashes)
		}
		if got, want := p.x.Removed(w, e), p.o.removed(w, e.Hashes); got != want {
			p.t.Fatalf("Removed(%d, %d hashes): %d unknown, want %d", w, len(e.Hashes), got, want)
		}
	case op == 13 && copyOf == 1:
		p.x.Cleared(w)
		p.o.cleared(w)
	case op == 14 && copyOf == 1:
		p.x.Forget(w)
		p.o.cleared(w)
	default:
		p.x.FindMatches(seqs[:to], &p.scores)
		if got, want := scoresOf(p.t, &p.scores), p.o.find(seqs[:to]); fmt.Sprint(got) != fmt.Sprint(want) {
			p.t.Fatalf("prompt of %d blocks:\n got %v\nwant %v", to, got, want)
		}
	}
}

func (p *play) run() {
	for step := 0; len(p.script) > 0 && !p.t.Failed(); step++ {
		p.step()
		if step%50 == 0 {
			checkInvariants(p.t, p.x, p.o)
		}
	}
	checkInvariants(p.t, p.x, p.o)
	for which := range prompts {
		seqs := kvblock.AppendSequenceHashes(nil, prompt(which, promptBlocks))
		p.x.FindMatches(seqs, &p.scores)
		if got, want := scoresOf(p.t, &p.scores), p.o.find(seqs); fmt.Sprint(got) != fmt.Sprint(want) {
			p.t.Fatalf("prompt %d:\n got %v\nwant %v", which, got, want)
		}
	}
	for _, w := range p.workers {
		p.x.Forget(w)
		p.o.cleared(w)
	}
	checkInvariants(p.t, p.x, p.o)
}

func newPlay(t *testing.T, maxEntries, workers int, script []byte) *play {
	x, err := New(Config{MaxEntries: maxEntries})
	if err != nil {
		t.Fatal(err)
	}
	x.table.seed = 1 // the same script, the same play
	p := &play{t: t, x: x, o: newOracle(maxEntries), script: script, workers: []kvblock.Worker{3000}}
	for w := range workers - 1 {
		p.workers = append(p.workers, kvblock.Worker(w*9))
	}
	return p
}

func randomScript(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	script := make([]byte, n)
	for i := range script {
		script[i] = byte(r.Uint32())
	}
	return script
}

func TestAgainstOracle(t *testing.T) {
	for _, c := range []struct{ max, workers int }{{1 << 20, 2}, {1 << 20, 5}, {1 << 20, 40}, {600, 5}} {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("max%d/workers%d/seed%d", c.max, c.workers, seed), func(t *testing.T) {
				newPlay(t, c.max, c.workers, randomScript(seed, 20_000)).run()
			})
		}
	}
}

func FuzzIndex(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(randomScript(seed, 600))
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 1<<12 {
			script = script[:1<<12]
		}
		newPlay(t, 3000, 6, script).run()
	})
}
