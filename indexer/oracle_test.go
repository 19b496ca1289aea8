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
	workers map[kvblock.Worker]*oracleWorker
	events  Stats
}

type oracleWorker struct {
	names   [tiers]map[kvblock.EngineHash]*oracleName
	held    [tiers]map[kvblock.SequenceHash]int // names of each block
	orphans []*oracleOrphan                     // in order of arrival
}

type oracleName struct {
	seq    kvblock.SequenceHash
	copies int
}

type oracleOrphan struct {
	e    kvblock.Stored
	gone map[int]bool // by block
}

func newOracle() *oracle { return &oracle{workers: map[kvblock.Worker]*oracleWorker{}} }

// parent finds the block that the worker calls so, in any tier.
func (o *oracleWorker) parent(e *kvblock.Stored) (kvblock.SequenceHash, bool) {
	if n := o.names[e.Tier][e.Parent]; n != nil {
		return n.seq, true
	}
	for _, names := range o.names {
		if n := names[e.Parent]; n != nil {
			return n.seq, true
		}
	}
	return 0, false
}

// drop takes one name from a block.
func (o *oracleWorker) drop(tier kvblock.Tier, seq kvblock.SequenceHash) {
	if o.held[tier][seq]--; o.held[tier][seq] == 0 {
		delete(o.held[tier], seq)
	}
}

// orphanNamed returns the store and place where a block waits under this name.
func (o *oracleWorker) orphanNamed(tier kvblock.Tier, e kvblock.EngineHash) (*oracleOrphan, int) {
	for _, s := range o.orphans {
		for i, b := range s.e.Blocks {
			if s.e.Tier == tier && b.Engine == e && !s.gone[i] {
				return s, i
			}
		}
	}
	return nil, 0
}

func (o *oracle) stored(w kvblock.Worker, e kvblock.Stored) error {
	if len(e.Blocks) == 0 {
		return nil
	}
	ow := o.workers[w]
	if ow == nil {
		ow = &oracleWorker{}
		for i := range ow.names {
			ow.names[i], ow.held[i] = map[kvblock.EngineHash]*oracleName{}, map[kvblock.SequenceHash]int{}
		}
		o.workers[w] = ow
	}
	prev, ok := ow.parent(&e)
	if e.HasParent && !ok {
		s := &oracleOrphan{e: e, gone: map[int]bool{}}
		for i, b := range e.Blocks {
			other, _ := ow.orphanNamed(e.Tier, b.Engine)
			s.gone[i] = other != nil ||
				slices.ContainsFunc(e.Blocks[:i], func(a kvblock.StoredBlock) bool { return a.Engine == b.Engine })
		}
		ow.orphans = append(ow.orphans, s)
		o.events.Orphaned++
		return ErrOrphaned
	}
	o.name(ow, e, prev, nil)
	// Apply the orphans whose parents are stored now, until there are none.
	for again := true; again; {
		again = false
		for i, s := range ow.orphans {
			if prev, ok := ow.parent(&s.e); ok {
				ow.orphans = slices.Delete(ow.orphans, i, i+1)
				o.name(ow, s.e, prev, s.gone)
				o.events.Joined++
				again = true
				break
			}
		}
	}
	return nil
}

// name gives the blocks of e their names. Blocks that waited do so only if they are not gone, and their name is not
// taken.
func (o *oracle) name(ow *oracleWorker, e kvblock.Stored, prev kvblock.SequenceHash, gone map[int]bool) {
	names := ow.names[e.Tier]
	for i, b := range e.Blocks {
		if i == 0 && !e.HasParent {
			prev = kvblock.FirstSequenceHash(b.Local)
		} else {
			prev = kvblock.NextSequenceHash(prev, b.Local)
		}
		switch n := names[b.Engine]; {
		case gone != nil && (gone[i] || n != nil && n.seq != prev):
		case n != nil && n.seq == prev:
			n.copies++
			o.events.Duplicates++
		default:
			if n != nil {
				ow.drop(e.Tier, n.seq)
			}
			names[b.Engine] = &oracleName{seq: prev}
			ow.held[e.Tier][prev]++
		}
	}
}

func (o *oracle) removed(w kvblock.Worker, tier kvblock.Tier, hashes []kvblock.EngineHash) (unknown int) {
	for _, h := range hashes {
		ow := o.workers[w]
		if ow == nil {
			unknown++
			continue
		}
		if s, i := ow.orphanNamed(tier, h); s != nil {
			s.gone[i] = true
		} else if n := ow.names[tier][h]; n == nil {
			unknown++
		} else if n.copies > 0 {
			n.copies--
		} else {
			delete(ow.names[tier], h)
			ow.drop(tier, n.seq)
		}
	}
	o.events.UnknownRemoved += uint64(unknown)
	return unknown
}

func (o *oracle) cleared(w kvblock.Worker) { delete(o.workers, w) }

// overlap is an answer for one worker: blocks on the device, and behind them in each lower tier.
type overlap [tiers]int

func (o *oracle) find(chain []kvblock.SequenceHash) map[kvblock.Worker]overlap {
	answer := map[kvblock.Worker]overlap{}
	for w, ow := range o.workers {
		var found overlap
		n := 0
		for tier, held := range ow.held {
			for n < len(chain) && held[chain[n]] > 0 {
				n++
				found[tier]++
			}
		}
		if n > 0 {
			answer[w] = found
		}
	}
	return answer
}

// count sets what Stats has to say about the oracle's content.
func (o *oracle) count() Stats {
	s := o.events
	for tier := range tiers {
		all := map[kvblock.SequenceHash]bool{}
		for _, ow := range o.workers {
			s.Entries += len(ow.names[tier])
			for seq := range ow.held[tier] {
				all[seq] = true
			}
		}
		s.Blocks += len(all)
	}
	for _, ow := range o.workers {
		for _, a := range ow.orphans {
			for i := range a.e.Blocks {
				if !a.gone[i] {
					s.OrphanBlocks++
				}
			}
		}
	}
	return s
}

// scoresOf renders an answer as a map, checking that its forms agree.
func scoresOf(t *testing.T, s *OverlapScores) map[kvblock.Worker]overlap {
	t.Helper()
	answer := map[kvblock.Worker]overlap{}
	for o := range s.Overlaps() {
		e := s.Extension(o.Worker)
		if _, twice := answer[o.Worker]; twice || o.Blocks+e.Total() < 1 || s.Blocks(o.Worker) != o.Blocks {
			t.Errorf(
				"worker %d: %d blocks and %+v listed (before: %v), Blocks says %d",
				o.Worker,
				o.Blocks,
				e,
				twice,
				s.Blocks(o.Worker),
			)
		}
		answer[o.Worker] = overlap{o.Blocks, e.Host, e.Disk, e.External}
	}
	for w := range max(len(s.device.known)*64, len(s.lower)) {
		w := kvblock.Worker(w)
		e := s.Extension(w)
		if got := (overlap{s.Blocks(w), e.Host, e.Disk, e.External}); got != answer[w] {
			t.Errorf("worker %d: %v by number, %v listed", w, got, answer[w])
		}
	}
	return answer
}

// checkInvariants compares the index's inside with itself and with the oracle.
func checkInvariants(t *testing.T, x *Index, o *oracle) {
	t.Helper()
	got, want := x.Stats(), o.count()
	got.Bytes, got.Used, got.MaxBytes = 0, 0, 0
	if got != want {
		t.Errorf("Stats:\n got %+v\nwant %+v", got, want)
	}
	for i := range x.tiers {
		checkTier(t, &x.tiers[i])
	}
	for w, ow := range o.workers {
		n := 0
		for _, names := range ow.names {
			n += len(names)
		}
		if got := x.WorkerEntries(w); got != n {
			t.Errorf("worker %d: %d entries, want %d", w, got, n)
		}
		for tier := range tiers {
			if n > 0 && x.workersOf(w).held[tier].blocks != len(ow.held[tier]) {
				t.Errorf(
					"worker %d: %d blocks in tier %d, want %d",
					w,
					x.workersOf(w).held[tier].blocks,
					tier,
					len(ow.held[tier]),
				)
			}
		}
	}
}

// checkTable compares a table with what it should have.
func checkTable(t *testing.T, x *tier, of *seqTable, want map[ref]uint64) {
	t.Helper()
	live := 0
	for i := range of.segments {
		seg := &of.segments[i]
		slots := of.slots[i].Load()
		if slots == nil {
			if seg.live != 0 || seg.deleted != 0 {
				t.Errorf("segment %d: no slots, %d live, %d gone", i, seg.live, seg.deleted)
			}
			continue
		}
		n, gone := 0, 0
		for _, slot := range *slots {
			switch slot {
			case slotEmpty:
			case slotDeleted:
				gone++
			default:
				n++
				if _, ok := want[ref(slot)]; !ok {
					t.Errorf("something at %d, where nothing should be", ref(slot))
				}
			}
		}
		if n != seg.live || gone != seg.deleted {
			t.Errorf("segment %d: %d live, %d gone; says %d, %d", i, n, gone, seg.live, seg.deleted)
		}
		live += n
	}
	if live != len(want) {
		t.Errorf("%d in a table, want %d", live, len(want))
	}
	for r, by := range want {
		if at, ok := of.find(&x.arena, kvblock.SequenceHash(by)); !ok || at != r {
			t.Errorf("block %x at %d: found at %d, %v", by, r, at, ok)
		}
	}
}

// checkNames compares a tier's table of names with what it should have.
func checkNames(t *testing.T, x *tier, want map[ref]kvblock.EngineHash) {
	t.Helper()
	names := &x.names
	live, pages := 0, 0
	for at := 0; at < len(names.dir); {
		page := names.dir[at]
		pages++
		n, gone := 0, 0
		for i := range page.lines {
			for j, slot := range &page.lines[i] {
				switch slot {
				case slotEmpty:
					continue
				case slotDeleted:
					gone++
				default:
					if n++; want[ref(slot)] == 0 {
						t.Errorf("a name at %d, where none should be", ref(slot))
					}
				}
				if j > 0 && page.lines[i][j-1] == slotEmpty {
					t.Errorf("line %d has a gap before slot %d", i, j)
				}
			}
		}
		if n != page.live || gone != page.deleted || n+gone > maxNameSlots {
			t.Errorf("page at %d: %d names and %d gone; says %d, %d", at, n, gone, page.live, page.deleted)
		}
		live += n
		for range 1 << (names.bits - page.depth) {
			if names.dir[at] != page {
				t.Errorf("place %d of %d is not its neighbours'", at, len(names.dir))
			}
			at++
		}
	}
	if live != len(want) || pages != names.pages || live == 0 && pages > 0 {
		t.Errorf("%d names, want %d; %d pages, says %d", live, len(want), pages, names.pages)
	}
	for r, e := range want {
		if at, ok := x.names.find(&x.arena, e); !ok || at != r {
			t.Errorf("block called %x at %d: found at %d, %v", e, r, at, ok)
		}
	}
}

// checkTier compares a tier's inside with itself.
func checkTier(t *testing.T, x *tier) {
	t.Helper()
	blocks := 0
	names := map[ref]kvblock.EngineHash{}
	// what each should have: the address, what it is found by
	tables := map[*seqTable]map[ref]uint64{&x.starts: {}, &x.bySeq: {}}
	x.arena.eachRun(func(r run) bool {
		words, stored := x.arena.record(r), x.arena.storedOf(r)
		tables[&x.starts][r+runHeader] = words[runHeader]
		for at := runHeader; at < runHeader+x.runLen(r); at++ {
			if x.indexedBlocks(r)>>(at-runHeader)&1 != 0 {
				tables[&x.bySeq][r+ref(at)] = words[at]
			}
			if stored != nil && stored[at].Engine != 0 {
				names[r+ref(at)] = stored[at].Engine
			}
		}
		blocks += x.runLen(r)
		return true
	})
	for table, want := range tables {
		checkTable(t, x, table, want)
	}
	checkNames(t, x, names)
	if blocks != x.blocks {
		t.Errorf("%d blocks in all runs, says %d", blocks, x.blocks)
	}
	used := [2]int{}
	for _, in := range x.arena.info {
		used[0] += int(in.used)
	}
	first, starts := make(rootFilter, len(x.rootFilter)), startFilter{counts: make([]uint8, len(x.startFilter.counts))}
	x.arena.eachRun(func(r run) bool {
		words := x.arena.record(r)
		if n := x.runLen(r); words[0]>>32&1 != 0 || x.union(r) != ones(n) {
			t.Errorf("run %d of %d: blocks %b held, version %d", r, n, x.union(r), words[0]>>32)
		}
		if x.rootFilter != nil && !headOf(x.arena.storedOf(r)).hasParent {
			first.add(kvblock.SequenceHash(words[runHeader]), x.starts.seed, 1)
		}
		starts.count(x.starts.tag(kvblock.SequenceHash(words[runHeader])))
		starts.n++
		used[1]++
		if words[1]&manyHolders == 0 {
			return true
		}
		used[1]++
		var h holders
		h.open(x.arena.record(ref(words[1])))
		n := 0
		for _, w := range h.bits {
			for ; w != 0; w &= w - 1 {
				n++
			}
		}
		if n != h.full || h.count() < 2 {
			t.Errorf("run %d: %d in the bitset, says %d, %d holders", r, n, h.full, h.count())
		}
		for g := h.groups; len(g) > 0; g = g[groupWords:] {
			if other := h.group(kvblock.Worker(64 * g[0])); &other[0] != &g[0] {
				t.Errorf("run %d has two groups %d", r, g[0])
			}
		}
		h.eachGrouped(func(w kvblock.Worker, lead int) {
			if lead == 0 || lead > x.runLen(r) || h.holdsAll(w) || h.find(w) >= 0 {
				t.Errorf(
					"run %d of %d: worker %d is in a group for %d; in the bitset too: %v; in the list: %d",
					r,
					x.runLen(r),
					w,
					lead,
					h.holdsAll(w),
					h.find(w),
				)
			}
		})
		return true
	})
	if used[0] != used[1] {
		t.Errorf("%d records in use, %d known", used[0], used[1])
	}
	if !slices.Equal(first, x.rootFilter) || !slices.Equal(starts.counts, x.startFilter.counts) ||
		starts.n != x.startFilter.n {
		t.Error("a filter of first blocks, of prompts or of runs, is off")
	}
	if got := int64(x.arena.used() + x.tableBytes()); got != x.usedBytes.Load() || x.arena.bytes() < x.arena.used() ||
		x.nonEmpty.Load() != (x.blocks > 0) {
		t.Errorf(
			"%d bytes in use of %d, says %d; %d blocks, busy %v",
			got,
			x.arena.bytes(),
			x.usedBytes.Load(),
			x.blocks,
			x.nonEmpty.Load(),
		)
	}
}

// driver drives an index and the oracle with what the bytes of script say, comparing answers all along.
type driver struct {
	t      *testing.T
	x      *Index
	o      *oracle
	script []byte
	// workers is how many there are; the highest number is far off, as after many reuses.
	workers []kvblock.Worker
	// batch is operations of one of them that are to be applied together.
	batch  []kvblock.Operation
	sender kvblock.Worker
	// plain says that no engine hash names two blocks, in two tiers or one after the other.
	plain  bool
	scores OverlapScores
}

func (p *driver) next(n int) int {
	if len(p.script) < 2 {
		p.script = nil
		return 0
	}
	v := int(p.script[0])<<8 | int(p.script[1])
	p.script = p.script[2:]
	return v % n
}

// prompt is the local hashes of one of few prompts, which share beginnings: prompts 4k to 4k+3 part at block 20, 40,
// ...
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

// engineHash is worker w's name for block i of a prompt, given its sequence hash: mostly one and the same, sometimes
// another. Two workers of three agree on names; those of the third mean other blocks to them, now and then.
func engineHash(w kvblock.Worker, seq kvblock.SequenceHash, copy int) kvblock.EngineHash {
	if w%3 == 2 {
		return kvblock.EngineHash(uint64(seq)>>3%5000 + uint64(copy))
	}
	return kvblock.EngineHash(uint64(seq)>>3 + uint64(copy))
}

// send applies an operation, together with those before it or those to come.
func (p *driver) send(w kvblock.Worker, op kvblock.Operation) {
	if w != p.sender {
		p.apply()
	}
	p.sender, p.batch = w, append(p.batch, op)
	if p.next(4) == 0 {
		p.apply()
	}
}

// apply applies the operations that wait, and compares what came of each.
func (p *driver) apply() {
	for len(p.batch) > 0 && !p.t.Failed() {
		n, got := p.x.Apply(p.sender, p.batch, false)
		if n < 1 {
			p.t.Fatal("Apply applies nothing")
		}
		var want Applied
		for _, op := range p.batch[:n] {
			if op.Kind == kvblock.OpRemoved {
				want.Removed++
				want.Unknown += p.o.removed(p.sender, op.Removed.Tier, op.Removed.Hashes)
			} else if err := p.o.stored(p.sender, op.Stored); err != nil {
				want.Failed = append(want.Failed, err)
			} else {
				want.Stored++
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			p.t.Fatalf("Apply(%d, %d operations): %v, want %v", p.sender, n, got, want)
		}
		p.batch = p.batch[n:]
	}
	p.batch = nil
}

func (p *driver) step() {
	w := p.workers[p.next(len(p.workers))]
	if len(p.batch) > 0 && p.next(4) > 0 {
		w = p.sender
	}
	local := prompt(p.next(prompts), promptBlocks)
	seqs := kvblock.AppendSequenceHashes(nil, local)
	from := p.next(promptBlocks)
	to := min(promptBlocks, from+1+p.next(70))
	copyOf := 0
	if p.next(8) == 0 {
		copyOf = 1
	}
	tier := kvblock.TierDevice
	if p.next(3) == 0 {
		tier = kvblock.Tier(p.next(tiers))
	}
	switch op := p.next(16); {
	case op < 8: // store
		if op < 4 {
			from = 0
		}
		e := kvblock.Stored{Tier: tier}
		if from > 0 {
			e.HasParent, e.Parent = true, engineHash(w, seqs[from-1], p.next(2)*copyOf)
		}
		again, zero := from+p.next(200), from+p.next(1000) // blocks with odd names, if the store has that many
		for i := from; i < to; i++ {
			name := engineHash(w, seqs[i], copyOf)
			if i == again && !p.plain { // an engine hash used again for something else
				name = engineHash(w, seqs[p.next(promptBlocks)], 0)
			}
			if i == zero && !p.plain {
				name = 0
			}
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: name, Local: local[i]})
		}
		p.send(w, kvblock.Operation{Kind: kvblock.OpStored, Stored: e})
	case op < 13: // remove, from the tail, the head or anywhere
		e := kvblock.Removed{Tier: tier}
		for i := from; i < to; i++ {
			if op == 12 && i%5 != from%3 {
				continue
			}
			e.Hashes = append(e.Hashes, engineHash(w, seqs[i], copyOf))
		}
		if op%2 == 0 {
			slices.Reverse(e.Hashes)
		}
		p.send(w, kvblock.Operation{Kind: kvblock.OpRemoved, Removed: e})
	case op == 13 && copyOf == 1:
		p.apply()
		p.x.Cleared(w)
		p.o.cleared(w)
	case op == 14 && copyOf == 1:
		p.apply()
		p.x.Forget(w)
		p.o.cleared(w)
	default:
		p.apply()
		p.x.FindMatches(seqs[:to], &p.scores)
		if got, want := scoresOf(p.t, &p.scores), p.o.find(seqs[:to]); fmt.Sprint(got) != fmt.Sprint(want) {
			p.t.Fatalf("prompt of %d blocks:\n got %v\nwant %v", to, got, want)
		}
	}
}

// run plays the script to its end, and then, if leave says so, lets all workers leave.
func (p *driver) run(leave bool) {
	for step := 0; len(p.script) > 0 && !p.t.Failed(); step++ {
		p.step()
		if step%1000 == 0 {
			p.apply()
			checkInvariants(p.t, p.x, p.o)
		}
	}
	p.apply()
	checkInvariants(p.t, p.x, p.o)
	for which := range prompts {
		seqs := kvblock.AppendSequenceHashes(nil, prompt(which, promptBlocks))
		p.x.FindMatches(seqs, &p.scores)
		if got, want := scoresOf(p.t, &p.scores), p.o.find(seqs); fmt.Sprint(got) != fmt.Sprint(want) {
			p.t.Fatalf("prompt %d:\n got %v\nwant %v", which, got, want)
		}
	}
	if !leave {
		return
	}
	for _, w := range p.workers {
		p.x.Forget(w)
		p.o.cleared(w)
	}
	checkInvariants(p.t, p.x, p.o)
}

// first is the lowest of the workers' numbers but one, and apart how far they are from each other: neighbours are kept
// together, and high ones have no bit each where they are few.
func newDriver(t *testing.T, workers, first, apart int, script []byte) *driver {
	x, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range x.tiers {
		x.tiers[i].starts.seed, x.tiers[i].bySeq.seed, x.tiers[i].names.seed = 3, 1, 2 // the same script, the same play
	}
	p := &driver{t: t, x: x, o: newOracle(), script: script, workers: []kvblock.Worker{3000}}
	for w := range workers - 1 {
		p.workers = append(p.workers, kvblock.Worker(first+w*apart))
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
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, workers := range []int{2, 5, 40} {
		for seed := range uint64(4) {
			first, apart := 0, 1+int(seed)%2*8
			if seed == 2 {
				first = 4000
			}
			t.Run(fmt.Sprintf("workers%d/seed%d", workers, seed), func(t *testing.T) {
				newDriver(t, workers, first, apart, randomScript(seed, 60_000)).run(true)
			})
		}
	}
}

func FuzzIndex(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(randomScript(seed, 600))
	}
	f.Add([]byte("0")) // blocks without a name, and no others
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 1<<12 {
			script = script[:1<<12]
		}
		newDriver(t, 6, 0, 1, script).run(true)
	})
}
