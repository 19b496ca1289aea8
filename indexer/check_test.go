package indexer

import (
	"errors"
	"fmt"
	"slices"

	"kvepp/kvblock"
)

// check compares the records, tables, filters and counts of a tier with each other, and returns all differences. The
// caller holds tier.mu, or is the only user of the index. check reads the whole tier. With the build tag invariants,
// tier.unlock calls it.
func (t *tier) check() error {
	c := checker{
		tier:   t,
		starts: map[ref]uint64{},
		bySeq:  map[ref]uint64{},
		names:  map[ref]kvblock.EngineHash{},
	}
	c.countRuns()
	c.table("starts", &t.starts, c.starts)
	c.table("bySeq", &t.bySeq, c.bySeq)
	c.nameTable()
	c.filters()
	c.sizes()
	return errors.Join(c.errs...)
}

// checker is the state of one check: what the tables must contain according to the runs, and what differs.
type checker struct {
	tier          *tier
	starts, bySeq map[ref]uint64 // addresses of blocks and their sequence hashes
	names         map[ref]kvblock.EngineHash
	blocks        int // in all runs
	records       int // runs and holders' records
	errs          []error
}

func (c *checker) errorf(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// countRuns checks each run, and notes what the tables must contain.
func (c *checker) countRuns() {
	t := c.tier
	// Without memory for a holders' record, a writer leaves masks that are too long, and blocks without a holder.
	exhausted := len(t.arena.info) >= int(t.arena.maxPages)
	t.arena.eachRun(func(r run) bool {
		words, stored, n := t.arena.record(r), t.arena.storedOf(r), t.runLen(r)
		c.starts[r+runHeader] = words[runHeader]
		for at := runHeader; at < runHeader+n; at++ {
			if t.indexedBlocks(r)>>(at-runHeader)&1 != 0 {
				c.bySeq[r+ref(at)] = words[at]
			}
			if stored != nil && stored[at].Engine != 0 {
				c.names[r+ref(at)] = stored[at].Engine
			}
		}
		c.blocks += n
		c.records++
		if words[0]>>32&1 != 0 {
			c.errorf("run %d: its version %d is odd, but no write is in progress", r, words[0]>>32)
		}
		if held := t.union(r) & ones(n); held != ones(n) && !exhausted {
			c.errorf("run %d of %d blocks: only the blocks %b have a holder", r, n, held)
		}
		if words[1]&manyHolders != 0 {
			c.records++
			if !exhausted {
				c.holders(r, n, ref(words[1]))
			}
		}
		return true
	})
}

// holders checks the holders' record at this address, of run r with n blocks.
func (c *checker) holders(r run, n int, at ref) {
	var h holders
	h.open(c.tier.arena.record(at))
	full := 0
	for _, word := range h.bits {
		for ; word != 0; word &= word - 1 {
			full++
		}
	}
	if full != h.full || h.count() < 2 {
		c.errorf("run %d: %d workers in the bitset, counted as %d; %d holders", r, full, h.full, h.count())
	}
	for g := h.groups; len(g) > 0; g = g[groupWords:] {
		if other := h.group(kvblock.Worker(64 * g[0])); &other[0] != &g[0] {
			c.errorf("run %d has group %d twice", r, g[0])
		}
	}
	h.eachGrouped(func(w kvblock.Worker, lead int) {
		if lead == 0 || lead > n || h.holdsAll(w) || h.find(w) >= 0 {
			c.errorf("run %d of %d blocks: worker %d holds %d in a group; in the bitset: %v; in the list: %d",
				r, n, w, lead, h.holdsAll(w), h.find(w))
		}
	})
}

// table checks that a table contains these blocks and no others.
func (c *checker) table(name string, of *seqTable, want map[ref]uint64) {
	total, size, spare := 0, 0, 0
	for i := range of.segments {
		seg := &of.segments[i]
		live, deleted := 0, 0
		if slots := of.slots[i].Load(); slots != nil {
			size += 8 * len(*slots)
			if seg.live == 0 {
				spare += 8 * len(*slots)
			}
			for _, slot := range *slots {
				switch slot {
				case slotEmpty:
				case slotDeleted:
					deleted++
				default:
					live++
					if _, ok := want[ref(slot)]; !ok {
						c.errorf("%s has a block at %d, where there is none", name, ref(slot))
					}
				}
			}
		}
		if live != seg.live || deleted != seg.deleted {
			c.errorf("%s, segment %d: %d live and %d deleted slots, counted as %d and %d",
				name, i, live, deleted, seg.live, seg.deleted)
		}
		total += live
	}
	if size != of.size || spare != of.spare {
		c.errorf("%s has %d bytes, %d in empty segments, counted as %d and %d", name, size, spare, of.size, of.spare)
	}
	if total != len(want) {
		c.errorf("%s has %d blocks, want %d", name, total, len(want))
	}
	for r, seq := range want {
		if at, ok := of.find(&c.tier.arena, kvblock.SequenceHash(seq)); !ok || at != r {
			c.errorf("%s: block %x at %d: found at %d, %v", name, seq, r, at, ok)
		}
	}
}

// nameTable checks that the table of names contains the blocks' own names and no others.
func (c *checker) nameTable() {
	names := &c.tier.names
	total, pages := 0, 0
	for at := 0; at < len(names.dir); {
		page := names.dir[at]
		pages++
		live, deleted := 0, 0
		for i := range page.lines {
			for j, slot := range &page.lines[i] {
				switch slot {
				case slotEmpty:
					continue
				case slotDeleted:
					deleted++
				default:
					if live++; c.names[ref(slot)] == 0 {
						c.errorf("names has a block at %d, where there is none with a name", ref(slot))
					}
				}
				if j > 0 && page.lines[i][j-1] == slotEmpty {
					c.errorf("names, line %d: an empty slot before slot %d", i, j)
				}
			}
		}
		if live != page.live || deleted != page.deleted || live+deleted > maxNameSlots {
			c.errorf("names, page at %d: %d live and %d deleted slots, counted as %d and %d, at most %d together",
				at, live, deleted, page.live, page.deleted, maxNameSlots)
		}
		total += live
		for range 1 << (names.bits - page.depth) {
			if names.dir[at] != page {
				c.errorf("names: directory entry %d of %d differs from its neighbours", at, len(names.dir))
			}
			at++
		}
	}
	if total != len(c.names) || pages != names.pages || total == 0 && pages > 1 {
		c.errorf("names has %d blocks, want %d; %d pages, counted as %d", total, len(c.names), pages, names.pages)
	}
	for r, e := range c.names {
		if at, ok := names.find(&c.tier.arena, e); !ok || at != r {
			c.errorf("names: block %x at %d: found at %d, %v", e, r, at, ok)
		}
	}
}

// filters compares the counting filters with filters of the runs that there are.
func (c *checker) filters() {
	t := c.tier
	roots, starts := make(rootFilter, len(t.rootFilter)), startFilter{counts: make([]uint8, len(t.startFilter.counts))}
	for at, seq := range c.starts {
		if t.rootFilter != nil && !headOf(t.arena.storedOf(at-runHeader)).hasParent {
			roots.add(kvblock.SequenceHash(seq), t.starts.seed, 1)
		}
		if len(starts.counts) > 0 {
			starts.count(t.starts.tag(kvblock.SequenceHash(seq)))
		}
		starts.n++
	}
	if !slices.Equal(roots, t.rootFilter) {
		c.errorf("rootFilter differs from the first blocks of prompts")
	}
	equal := slices.EqualFunc(starts.counts, t.startFilter.counts, func(want, got uint8) bool {
		return got == want || got == fullCount // remove leaves a full counter
	})
	if !equal || starts.n != t.startFilter.n {
		c.errorf("startFilter differs from the first blocks of runs: %d, counted as %d", starts.n, t.startFilter.n)
	}
	c.lookupFilter()
}

// lookupFilter compares the filter of lookups with a filter of the blocks that there are.
func (c *checker) lookupFilter() {
	f := c.tier.lookupFilter
	if f == nil {
		return
	}
	got, want := f.counts.Load(), []uint64(nil)
	if got != nil {
		want = make([]uint64, len(*got))
		for _, seq := range c.bySeq {
			countIn(want, kvblock.SequenceHash(seq), c.tier.bySeq.seed)
		}
	}
	for i := range want {
		for shift := 0; shift < 64; shift += 4 {
			is, wanted := (*got)[i]>>shift&fullLookup, want[i]>>shift&fullLookup
			if is != wanted && is != fullLookup {
				c.errorf("lookupFilter, word %d: %x, want %x", i, (*got)[i], want[i])
			}
		}
	}
	if f.n != len(c.bySeq) || f.n > 0 && got == nil {
		c.errorf("lookupFilter counts %d blocks, want %d", f.n, len(c.bySeq))
	}
}

// sizes checks the tier's counts of blocks, records and bytes.
func (c *checker) sizes() {
	t := c.tier
	if c.blocks != t.blocks || t.nonEmpty.Load() != (t.blocks > 0) {
		c.errorf("%d blocks in all runs, counted as %d; nonEmpty: %v", c.blocks, t.blocks, t.nonEmpty.Load())
	}
	used := 0
	for _, info := range t.arena.info {
		used += int(info.used)
	}
	if used != c.records {
		c.errorf("%d records in use, but runs and holders are %d", used, c.records)
	}
	got := int64(t.arena.used() + t.tableBytes() - t.spareTables())
	if got != t.usedBytes.Load() || t.arena.bytes() < t.arena.used() {
		c.errorf("%d bytes in use, counted as %d; the arena has %d bytes, %d in use",
			got, t.usedBytes.Load(), t.arena.bytes(), t.arena.used())
	}
}
