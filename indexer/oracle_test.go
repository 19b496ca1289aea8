package indexer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// oracle is a simple index for comparison: maps, and no locks.
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

// parent returns the block that e.Parent names for the worker, in any tier.
func (o *oracleWorker) parent(e *kvblock.Stored) (kvblock.SequenceHash, bool) {
	if n := o.names[e.Tier][e.Parent]; n != nil {
		return n.seq, true
	}
	for _, names := range o.names[:memoryTiers] {
		if n := names[e.Parent]; n != nil {
			return n.seq, true
		}
	}
	return 0, false
}

// drop removes one name from a block.
func (o *oracleWorker) drop(tier kvblock.Tier, seq kvblock.SequenceHash) {
	if o.held[tier][seq]--; o.held[tier][seq] == 0 {
		delete(o.held[tier], seq)
	}
}

// orphanNamed returns the orphan that has a waiting block with this name, and the block's index.
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

// name gives the blocks of e their names. Of an orphan, it skips blocks that are gone or whose name is taken.
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

// overlap is the response for one worker: blocks on the device, and in each lower tier behind them.
type overlap [memoryTiers]int

func (o *oracle) find(chain []kvblock.SequenceHash) map[kvblock.Worker]overlap {
	response := map[kvblock.Worker]overlap{}
	for w, ow := range o.workers {
		var found overlap
		n := 0
		for tier, held := range ow.held[:memoryTiers] {
			for n < len(chain) && held[chain[n]] > 0 {
				n++
				found[tier]++
			}
		}
		if n > 0 {
			response[w] = found
		}
	}
	return response
}

// count sets the fields of Stats that describe the oracle's content.
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

// scoresOf returns a response as a map. It checks that all methods of OverlapScores agree.
func scoresOf(t *testing.T, s *OverlapScores) map[kvblock.Worker]overlap {
	t.Helper()
	response := map[kvblock.Worker]overlap{}
	for o := range s.Overlaps() {
		e := s.Extension(o.Worker)
		if _, twice := response[o.Worker]; twice || o.Blocks+e.Total() < 1 || s.Blocks(o.Worker) != o.Blocks {
			t.Errorf(
				"worker %d: %d blocks and %+v listed (before: %v), Blocks says %d",
				o.Worker,
				o.Blocks,
				e,
				twice,
				s.Blocks(o.Worker),
			)
		}
		response[o.Worker] = overlap{o.Blocks, e.Host, e.Disk, e.External}
	}
	for w := range max(len(s.device.known)*64, len(s.lower)) {
		w := kvblock.Worker(w)
		e := s.Extension(w)
		if got := (overlap{s.Blocks(w), e.Host, e.Disk, e.External}); got != response[w] {
			t.Errorf("worker %d: %v by number, %v listed", w, got, response[w])
		}
	}
	return response
}

// checkInvariants checks each tier, and compares the index with the oracle.
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

// checkTier reports the errors of tier.check.
func checkTier(t *testing.T, x *tier) {
	t.Helper()
	if err := x.check(); err != nil {
		t.Error(err)
	}
}

// firstRun returns the run with the lowest address.
func firstRun(x *tier) (first run) {
	x.arena.eachRun(func(r run) bool {
		first = r
		return false
	})
	return first
}

func TestCheckReportsDamage(t *testing.T) {
	damages := map[string]func(*tier){
		"count of blocks": func(x *tier) { x.blocks++ },
		"odd version":     func(x *tier) { beginWrite(x.arena.record(firstRun(x))) },
		"block in no table": func(x *tier) {
			r := firstRun(x)
			x.removeStart(x.seqAt(r+runHeader), r+runHeader)
		},
		"block without a holder": func(x *tier) { x.arena.record(firstRun(x))[2] = 0 },
		"name of another block":  func(x *tier) { x.arena.storedOf(firstRun(x))[runHeader].Engine++ },
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			x, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			e := kvblock.Stored{Blocks: []kvblock.StoredBlock{{Engine: 10, Local: 1}, {Engine: 20, Local: 2}}}
			if err := x.Stored(1, e); err != nil {
				t.Fatal(err)
			}
			device := &x.tiers[kvblock.TierDevice]
			checkTier(t, device)
			damage(device)
			if device.check() == nil {
				t.Error("check reports nothing")
			}
		})
	}
}

// driver applies the operations that the bytes of script encode to an index and to the oracle, and compares all
// responses.
type driver struct {
	t      *testing.T
	x      *Index
	o      *oracle
	script []byte
	// workers is the number of workers. The highest worker number is far above the others.
	workers []kvblock.Worker
	// batch has operations of one worker that are applied together.
	batch  []kvblock.Operation
	sender kvblock.Worker
	// plain: no engine hash names two blocks, neither in two tiers nor one after the other.
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

// prompt returns the local hashes of one of a few prompts. Prompts 4k to 4k+3 share a beginning, and part at block 20,
// 40, ...
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

// engineHash returns worker w's name for block i of a prompt with this sequence hash: mostly the same name, sometimes
// another. Two of three workers agree on names. A name of the third worker sometimes names another block for them.
func engineHash(w kvblock.Worker, seq kvblock.SequenceHash, copy int) kvblock.EngineHash {
	if w%3 == 2 {
		return kvblock.EngineHash(uint64(seq)>>3%5000 + uint64(copy))
	}
	return kvblock.EngineHash(uint64(seq)>>3 + uint64(copy))
}

// send applies an operation, in one batch with earlier or later ones.
func (p *driver) send(w kvblock.Worker, op kvblock.Operation) {
	if w != p.sender {
		p.apply()
	}
	p.sender, p.batch = w, append(p.batch, op)
	if p.next(4) == 0 {
		p.apply()
	}
}

// apply applies the waiting operations, and compares the outcome of each.
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
		again, zero := from+p.next(200), from+p.next(1000) // blocks with special names, if the store has that many
		for i := from; i < to; i++ {
			name := engineHash(w, seqs[i], copyOf)
			if i == again && !p.plain { // an engine hash that named another block before
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

// run runs the script to its end. Then, if leave is set, all workers leave.
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

// first is the second lowest worker number, and apart the difference between numbers. Neighbours share a group or a
// word of the bitset; if few holders have high numbers, there is no bitset.
func newDriver(t *testing.T, workers, first, apart int, script []byte) *driver {
	x, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range x.tiers {
		// the same script always gives the same run
		x.tiers[i].starts.seed, x.tiers[i].bySeq.seed, x.tiers[i].names.seed = 3, 1, 2
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
	f.Add([]byte("0")) // only blocks without a name
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 1<<12 {
			script = script[:1<<12]
		}
		newDriver(t, 6, 0, 1, script).run(true)
	})
}
