package indexer

import (
	"math/bits"
	"sync/atomic"

	"kvepp/kvblock"
)

// classScores has what a lookup has read of the classes' tiers, and scratch memory of classSweep.
type classScores struct {
	blocks   int // of the prompt
	workers  int // words of their bitsets
	layers   []classLayer
	used     int // layers of this prompt
	segments []classSegment
	words    []uint64 // of the segments

	todo  []uint64                    // a bit for each n with a set in sets
	sets  []uint64                    // by number of blocks n: workers whose next prefix is n blocks long
	whole [64]int                     // by worker: blocks of the longest prefix that full attention accepts
	lost  [64][kvblock.MaxClasses]int // by worker and class, if there are several: tokens that it cut
}

// begin prepares c for a prompt of this many blocks, and workers of this many words.
func (c *classScores) begin(blocks, words int) {
	c.blocks, c.workers, c.used = blocks, words, 0
	c.segments, c.words = c.segments[:0], c.words[:0]
	c.todo, c.sets = grow(c.todo, blocks/64+1), grow(c.sets, blocks+1)
}

// add adds workers to the set of those whose next prefix is n blocks long.
func (c *classScores) add(n int, set uint64) {
	c.todo[n/64] |= 1 << (n % 64)
	c.sets[n] |= set
}

// classLayer has the blocks of one class that end this many tokens behind the beginning of a block of full attention.
type classLayer struct {
	class  int
	part   int      // 0: at its end
	loaded []uint64 // a bit for each block of full attention: the index was asked
	held   []uint64 // a bit for each: a worker holds it
	at     []uint32 // for those: which of classScores.segments
}

// layer returns the layer of a class and part.
func (c *classScores) layer(class, part int) *classLayer {
	for i := range c.layers[:c.used] {
		if l := &c.layers[i]; l.class == class && l.part == part {
			return l
		}
	}
	if c.used == len(c.layers) {
		c.layers = append(c.layers, classLayer{})
	}
	l := &c.layers[c.used]
	c.used++
	words := c.blocks/64 + 1
	l.class, l.part = class, part
	l.loaded, l.held = grow(l.loaded, words), grow(l.held, words)
	clear(l.loaded[:words])
	clear(l.held[:words])
	if more := c.blocks + 1 - len(l.at); more > 0 {
		l.at = append(l.at, make([]uint32, more)...)
	}
	return l
}

// segment returns the segment with block i of the prompt, nil if no worker holds the block.
func (l *classLayer) segment(c *classSweep, i int) *classSegment {
	if l.loaded[i/64]>>(i%64)&1 == 0 {
		l.load(c, i/64, 1<<(i%64))
	}
	if l.held[i/64]>>(i%64)&1 == 0 {
		return nil
	}
	return &c.scratch.segments[l.at[i]]
}

// lastHeld returns 1 + the last block before end that a worker in set holds; 0: none.
func (l *classLayer) lastHeld(c *classSweep, end int, set uint64) int {
	for end > 0 {
		j := (end - 1) / 64
		want := ones(end - 64*j)
		if want&^l.loaded[j] != 0 {
			l.load(c, j, want)
		}
		have := l.held[j] & want
		if have == 0 {
			end = 64 * j
			continue
		}
		i := 64*j + bits.Len64(have) - 1
		s := &c.scratch.segments[l.at[i]]
		if last := s.lastHeld(c, i, set); last > 0 {
			return last
		}
		end = s.from
	}
	return 0
}

// load asks the index who holds the blocks in want, of the 64 from block 64 * j on.
func (l *classLayer) load(c *classSweep, j int, want uint64) {
	want &^= l.loaded[j]
	l.loaded[j] |= want
	t := &c.x.tiers[kvblock.ClassTier(l.class)]
	if l.part == 0 {
		if want &= ones(min(len(c.p.Chain)-64*j, 64)); want != 0 {
			first := bits.TrailingZeros64(want)
			seqs := c.p.Chain[64*j+first : 64*j+bits.Len64(want)]
			want &= t.lookupFilter.mayContain(seqs, t.bySeq.seed) << first
		}
	} else if !t.nonEmpty.Load() {
		return
	}
	retries, locked := maxRetries, false
	for want != 0 {
		i := bits.Len64(want) - 1
		bit := uint64(1) << i
		seq, known := l.hash(c, 64*j+i)
		at, found := ref(0), false
		if known {
			at, found = t.bySeq.find(&t.arena, seq)
		}
		if !found {
			want &^= bit
			continue
		}
		from, ok := l.read(c.scratch, t, at, seq, 64*j+i)
		if !ok {
			if retries--; retries == 0 && !locked {
				t.mu.Lock() // excludes writers
				locked = true
			}
			continue
		}
		want &= ones(max(from-64*j, 0))
	}
	if locked {
		t.mu.Unlock()
	}
}

// hash returns the sequence hash of the layer's block in block i of the prompt; false if it cannot be known.
func (l *classLayer) hash(c *classSweep, i int) (kvblock.SequenceHash, bool) {
	if l.part == 0 {
		return c.p.Chain[i], true
	}
	local, ok := kvblock.PartHash(c.p.IDs, c.p.Options, i, l.part)
	switch {
	case !ok || i > len(c.p.Chain):
		return 0, false
	case i == 0:
		return kvblock.FirstSequenceHash(local), true
	}
	return kvblock.NextSequenceHash(c.p.Chain[i-1], local), true
}

// read adds the segment that ends with block i of the prompt, which is the block seq at address at of t, and returns
// its first block. It reports false if a writer interfered.
func (l *classLayer) read(c *classScores, t *tier, at ref, seq kvblock.SequenceHash, i int) (from int, ok bool) {
	run, first := t.arena.runAround(at)
	if run == nil {
		return 0, false
	}
	version := atomic.LoadUint64(&run[0])
	n := length(version)
	if version>>32&1 != 0 || first < 0 || first >= n || runHeader+n > len(run) ||
		atomic.LoadUint64(&run[runHeader+first]) != uint64(seq) {
		return 0, false
	}
	s := classSegment{from: i, shift: first, words: len(c.words)}
	if l.part == 0 { // the blocks before it in the run are the prompt's
		s.from, s.shift = max(i-first, 0), max(first-i, 0)
	}
	who := atomic.LoadUint64(&run[1])
	if who&manyHolders == 0 {
		s.list = 1
		c.words = append(c.words, uint64(uint32(who)&(maxWorkers-1)), atomic.LoadUint64(&run[2]))
	} else {
		bitset, groups, list := holderParts(t.arena.record(ref(who)))
		if bitset == nil {
			return 0, false
		}
		bitset = bitset[:min(len(bitset), c.workers)]
		s.bitset, s.groups, s.list = len(bitset), len(groups)/groupWords, len(list)/2
		for _, part := range [][]uint64{bitset, groups, list} {
			for k := range part {
				c.words = append(c.words, atomic.LoadUint64(&part[k]))
			}
		}
	}
	if atomic.LoadUint64(&run[0]) != version {
		c.words = c.words[:s.words]
		return 0, false
	}
	for k := s.from; k <= i; k++ {
		l.at[k] = uint32(len(c.segments))
		l.loaded[k/64] |= 1 << (k % 64)
		l.held[k/64] |= 1 << (k % 64)
	}
	c.segments = append(c.segments, s)
	return s.from, true
}

// classSegment has the holders of consecutive blocks of a prompt, which are in one run of a class's tier.
type classSegment struct {
	from  int // the first block
	shift int // its place in the run, so in masks
	words int // where in classScores.words a copy of the holders begins: bitset, groups, and list (holders.go)

	bitset int // words
	groups int
	list   int // pairs
}

// holding returns the workers in set that hold the blocks [from, end), which are in the segment, and 1 + the last of
// these blocks that one of the others does not hold; 0: there are no others.
func (s *classSegment) holding(c *classSweep, from, end int, set uint64) (all uint64, missing int) {
	words := c.scratch.words[s.words:]
	if c.word < s.bitset {
		if all = words[c.word] & set; all == set {
			return set, 0
		}
	}
	rest := set &^ all
	need := ones(end-from) << (from - s.from + s.shift)
	add := func(bit, mask uint64) {
		rest &^= bit
		if lack := need &^ mask; lack == 0 {
			all |= bit
		} else {
			missing = max(missing, s.from-s.shift+bits.Len64(lack))
		}
	}
	s.eachPartial(words, c.word, rest, add)
	if rest != 0 {
		missing = end
	}
	return all, missing
}

// lastHeld returns 1 + the last block of the segment, up to block i, that a worker in set holds; 0: none.
func (s *classSegment) lastHeld(c *classSweep, i int, set uint64) (last int) {
	words := c.scratch.words[s.words:]
	if c.word < s.bitset && words[c.word]&set != 0 {
		return i + 1
	}
	upTo := ones(i-s.from+1) << s.shift
	s.eachPartial(words, c.word, set, func(_, mask uint64) {
		if mask &= upTo; mask != 0 {
			last = max(last, s.from-s.shift+bits.Len64(mask))
		}
	})
	return last
}

// eachPartial calls f with each worker in set that is in the groups or in the list, as a bit, and its mask.
func (s *classSegment) eachPartial(words []uint64, word int, set uint64, f func(bit, mask uint64)) {
	words = words[s.bitset:]
	for range s.groups {
		if words[0] == uint64(word) {
			for members := words[1] & set; members != 0; members &= members - 1 {
				b := bits.TrailingZeros64(members)
				lead := int(uint8(words[2+b/8] >> (b % 8 * 8)))
				f(1<<b, ones(min(lead, maxRun)))
			}
		}
		words = words[groupWords:]
	}
	for range s.list {
		if words[0]/64 == uint64(word) {
			if bit := uint64(1) << (words[0] % 64); set&bit != 0 {
				f(bit, words[1])
			}
		}
		words = words[2:]
	}
}
