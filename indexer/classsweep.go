package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// applyClasses replaces the counts of workers of hybrid models by what they can reuse.
func (x *Index) applyClasses(hybrids *hybridTable, p *Prompt, s *OverlapScores) {
	known := s.device.known
	s.classes.begin(len(p.Chain), len(known))
	s.cutKnown = grow(s.cutKnown, len(known))
	for j, word := range hybrids.words[:min(len(hybrids.words), len(known))] {
		had := known[j]
		for i := range word {
			g := &word[i]
			if members := g.members & had; members != 0 {
				w := classSweep{x: x, p: p, s: s, scratch: &s.classes, h: g.h, word: j}
				w.run(members)
			}
		}
	}
}

// classSweep looks a prompt up for up to 64 workers with the same classes, numbers 64 * word and up. A set of them is a
// word of bits.
//
// A worker begins with the longest prefix that its full attention accepts. The sweep takes the longest prefix, with all
// workers that are at it, and asks each class. The workers that a class accepts stay, the others go to a shorter
// prefix: the longest that the class may accept for any of them. So a prefix is visited once, and a block is looked at
// for all workers together.
//
// Lengths and positions are in tokens if nothing else is said. Blocks are full attention's.
type classSweep struct {
	x       *Index
	p       *Prompt
	s       *OverlapScores
	scratch *classScores
	h       *hybrid
	word    int

	most  int // blocks of the longest prefix that is shorter than the prompt
	limit int // where the block that EAGLE drops may end at most
	align int // a prefix is a multiple of so many blocks
}

// run replaces the counts of these workers.
func (c *classSweep) run(members uint64) {
	size, scratch := c.h.BlockSize, c.scratch
	c.limit = max(c.p.Tokens-1, 0)
	c.most, c.align = min(c.limit/size, len(c.p.Chain)), c.h.align/size
	if c.h.classes > 0 { // the engine has more than one group
		c.limit = c.p.Tokens / c.h.unit * c.h.unit
	}
	known := !c.h.Incomplete && c.h.chunkKnown && (!c.h.parts || c.p.IDs != nil)
	if n := 64*c.word + 64 - len(c.s.cuts); n > 0 {
		c.s.cuts = append(c.s.cuts, make([]Cut, n)...)
	}
	cuts := (*[64]Cut)(c.s.cuts[64*c.word:])
	if c.h.classes > 1 {
		scratch.lost = [64][kvblock.MaxClasses]int{}
	}
	held, whole, deepest := 0, 0, 0
	for rest := members; rest != 0; {
		n, same := c.s.device.alike(64*c.word+bits.TrailingZeros64(rest), rest)
		rest &^= same
		if n == 0 {
			continue
		}
		c.s.cutKnown[c.word] |= same
		if n != held {
			held, whole = n, c.longest(n)
			deepest = max(deepest, whole)
		}
		for each := same; each != 0; each &= each - 1 {
			b := bits.TrailingZeros64(each)
			cuts[b], scratch.whole[b] = Cut{Held: n}, whole
		}
		if !known || len(c.s.extended) > 0 {
			same = c.upperBounds(known, same)
		}
		if same != 0 {
			scratch.add(whole, same)
		}
	}
	for k := deepest / 64; k >= 0; k-- {
		for scratch.todo[k] != 0 {
			n := 64*k + bits.Len64(scratch.todo[k]) - 1
			set := scratch.sets[n]
			scratch.todo[k] &^= 1 << (n % 64)
			scratch.sets[n] = 0
			c.try(n, set)
		}
	}
}

// upperBounds marks those of these workers for which full attention's blocks count, because their classes are not known
// or lower tiers extend the prefix. It returns the others.
func (c *classSweep) upperBounds(known bool, set uint64) uint64 {
	for rest := set; rest != 0; rest &= rest - 1 {
		w := 64*c.word + bits.TrailingZeros64(rest)
		if !known || c.s.Extension(kvblock.Worker(w)).Total() > 0 {
			c.s.cuts[w].UpperBound = true
			set &^= 1 << (w % 64)
		}
	}
	return set
}

// longest returns the number of blocks of the longest prefix that full attention accepts, if it holds this many.
func (c *classSweep) longest(blocks int) int {
	if c.h.Drop&kvblock.EAGLEDropFull != 0 {
		blocks = max(min(blocks, c.limit/c.h.BlockSize)-1, 0)
	}
	if blocks = min(blocks, c.most); c.align > 1 {
		blocks -= blocks % c.align
	}
	return blocks
}

// try records the workers in set that can reuse n blocks, and adds the others to the sets of shorter prefixes.
func (c *classSweep) try(n int, set uint64) {
	end := n * c.h.BlockSize
	for i := 0; i < c.h.classes && n > 0; i++ {
		accepted, shorter := c.accept(end, i, set)
		if accepted == set {
			continue
		}
		shorter -= shorter % c.h.align
		for rest := set &^ accepted; c.h.classes > 1 && rest != 0; rest &= rest - 1 {
			c.scratch.lost[bits.TrailingZeros64(rest)][i] += end - shorter
		}
		c.scratch.add(shorter/c.h.BlockSize, set&^accepted)
		if set = accepted; set == 0 {
			return
		}
	}
	c.record(n, set)
}

// record notes that the workers in set can reuse n blocks.
func (c *classSweep) record(n int, set uint64) {
	cuts, device := (*[64]Cut)(c.s.cuts[64*c.word:]), &c.s.device
	changed := uint64(0)
	for rest := set; rest != 0; rest &= rest - 1 {
		b := bits.TrailingZeros64(rest)
		if cut := &cuts[b]; n != cut.Held {
			changed |= 1 << b
			if cut.Blocks = c.scratch.whole[b] - n; cut.Blocks > 0 {
				cut.Kind = c.mostLost(b)
			}
		}
	}
	if changed == 0 {
		return
	}
	device.recordWord(c.word, changed, n)
	if c.word >= len(c.s.predicted.known) {
		return
	}
	// Predictions are of full attention alone, and their blocks count as held.
	for rest := changed & c.s.predicted.known[c.word]; rest != 0; rest &= rest - 1 {
		b := bits.TrailingZeros64(rest)
		w, cut := 64*c.word+b, &cuts[b]
		if more := c.longest(min(c.s.predicted.depth(w), cut.Held)); more > n {
			device.record(kvblock.Worker(w), more)
			if cut.Blocks = c.scratch.whole[b] - more; cut.Blocks == 0 {
				cut.Kind = 0
			}
		}
	}
}

// mostLost returns the kind of the class that cut most of worker b.
func (c *classSweep) mostLost(b int) kvblock.ClassKind {
	most := 0
	for i := 1; i < c.h.classes; i++ {
		if c.scratch.lost[b][i] > c.scratch.lost[b][most] {
			most = i
		}
	}
	return c.h.Classes[most].Kind
}

// accept returns the workers in set for which class i accepts a prefix of n tokens, and a bound below n for the longest
// prefix that it may accept for any of the others.
func (c *classSweep) accept(n, i int, set uint64) (accepted uint64, shorter int) {
	class := &c.h.Classes[i]
	size := int(class.BlockSize)
	first, end := 0, n // the class needs the blocks that end behind first, up to end
	switch class.Kind {
	case kvblock.ClassState:
		first = n - size
	case kvblock.ClassWindow:
		first = max(n-(int(class.Window)-1+size-1)/size*size, 0)
		if c.h.Drop&kvblock.EAGLEDropWindows != 0 {
			if end += size; end > c.limit {
				return 0, max(c.limit-size, 0)
			}
		}
	case kvblock.ClassChunk:
		first = n / c.h.Chunk * c.h.Chunk
	}
	accepted, missing := c.holding(i, size, first, end, set)
	if missing == 0 {
		return set, n
	}
	// A longer prefix needs the missing block as well. The last block that a prefix needs must be held, unless the
	// prefix ends with a chunk and needs none.
	bound := missing - size
	held := c.lastHeld(i, size, bound, end-n, set&^accepted)
	if class.Kind == kvblock.ClassChunk {
		held = max(held, bound/c.h.Chunk*c.h.Chunk)
	}
	return accepted, min(max(held-(end-n), 0), n-1)
}

// holding returns the workers in set that hold all blocks of class i in (first, end], and the end of the last such
// block that one of the others does not hold; 0: there are no others. first and end are multiples of size, the class's
// block size.
func (c *classSweep) holding(i, size, first, end int, set uint64) (all uint64, missing int) {
	of := c.h.BlockSize
	for end > first && set != 0 {
		l := c.scratch.layer(i, end%of)
		at := (end - 1) / of // the block of full attention
		from, lost := at, at+1
		have := uint64(0)
		if s := l.segment(c, at); s != nil {
			if size == of {
				from = max(first/of, s.from)
			}
			have, lost = s.holding(c, from, at+1, set)
		}
		if have != set {
			if missing == 0 {
				missing = end - (at+1-lost)*of
			}
			set = have
		}
		end -= max(at-from, 0)*of + size
	}
	return set, missing
}

// minJump is from how many blocks on jump is faster than a look at each block.
const minJump = 4

// jump returns a bound for the prefixes of at most end blocks that a window of need blocks or more accepts for a worker
// in set. All prefixes of the last need blocks need the first of these. If no worker holds it, the bound is before it.
func (l *classLayer) jump(c *classSweep, end, need int, set uint64) int {
	for end > need {
		first := end - need
		if s := l.segment(c, first); s != nil && s.lastHeld(c, first, set) == first+1 {
			break
		}
		end = first
	}
	return end
}

// lastHeld returns the end of the last block of class i that ends at most at end, as far behind a block of full
// attention as past, and that a worker in set holds; 0: none.
func (c *classSweep) lastHeld(i, size, end, past int, set uint64) int {
	of := c.h.BlockSize
	part := past % of
	l := c.scratch.layer(i, part)
	if need := int(c.h.Classes[i].Window) / size; need > minJump && past == 0 && size == of {
		end = of * l.jump(c, end/of, need, set)
	}
	if size <= of {
		at := l.lastHeld(c, (end-part)/of+min(part, 1), set)
		if at > 0 && part > 0 {
			return (at-1)*of + part
		}
		return at * of
	}
	for ; end > 0; end -= size {
		if s := l.segment(c, end/of-1); s != nil && s.lastHeld(c, end/of-1, set) == end/of {
			return end
		}
	}
	return 0
}
