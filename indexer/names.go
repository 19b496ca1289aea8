package indexer

import (
	"math/bits"

	"kvepp/kvblock"
)

// names maps the engine hashes of one worker to the blocks they name: open addressing with linear probing, free of
// pointers. The zero value is empty.
type names struct {
	seed  uint64
	slots []name
	n     int // entries, the zero hash included

	hasZero bool // an engine hash of 0 marks empty slots, so that one, if used, is kept here
	zero    kvblock.SequenceHash
}

type name struct {
	engine kvblock.EngineHash
	block  kvblock.SequenceHash
}

// The table grows by 2/5 beyond a load of 4/5 and shrinks to half below 1/4: memory per entry matters more here than the
// last nanosecond.
const minNames = 16

// home is where the search for e starts. Not a power of two, so that the table can grow by less than double.
func (t *names) home(e kvblock.EngineHash) int {
	hi, _ := bits.Mul64(mix(uint64(e), t.seed), uint64(len(t.slots)))
	return int(hi)
}

func (t *names) next(i int) int {
	if i++; i == len(t.slots) {
		return 0
	}
	return i
}

// touch reads where each of the blocks' names would be, so that the processor waits for all of that memory at once and not
// for one name after the other. What it returns means nothing.
func (t *names) touch(blocks []kvblock.StoredBlock) (sum kvblock.EngineHash) {
	if len(t.slots) == 0 {
		return 0
	}
	for _, b := range blocks {
		sum += t.slots[t.home(b.Engine)].engine
	}
	return sum
}

// get returns the block that e names.
func (t *names) get(e kvblock.EngineHash) (kvblock.SequenceHash, bool) {
	if e == 0 {
		return t.zero, t.hasZero
	}
	if len(t.slots) == 0 {
		return 0, false
	}
	for i := t.home(e); t.slots[i].engine != 0; i = t.next(i) {
		if t.slots[i].engine == e {
			return t.slots[i].block, true
		}
	}
	return 0, false
}

// put makes e name block, and returns the block it named before.
func (t *names) put(e kvblock.EngineHash, block kvblock.SequenceHash) (old kvblock.SequenceHash, named bool) {
	if e == 0 {
		old, named = t.zero, t.hasZero
		t.zero, t.hasZero = block, true
		if !named {
			t.n++
		}
		return old, named
	}
	if (t.n+1)*5 > len(t.slots)*4 {
		t.resize(max(minNames, len(t.slots)*7/5))
	}
	i := t.home(e)
	for t.slots[i].engine != 0 {
		if t.slots[i].engine == e {
			old, t.slots[i].block = t.slots[i].block, block
			return old, true
		}
		i = t.next(i)
	}
	t.slots[i] = name{e, block}
	t.n++
	return 0, false
}

// remove forgets e, and returns the block it named.
func (t *names) remove(e kvblock.EngineHash) (block kvblock.SequenceHash, named bool) {
	if e == 0 {
		block, named = t.zero, t.hasZero
		t.zero, t.hasZero = 0, false
		if named {
			t.n--
		}
		return block, named
	}
	if len(t.slots) == 0 {
		return 0, false
	}
	i := t.home(e)
	for t.slots[i].engine != e {
		if t.slots[i].engine == 0 {
			return 0, false
		}
		i = t.next(i)
	}
	block = t.slots[i].block
	t.n--
	// Close the gap: an entry behind it moves up unless its home lies behind the gap.
	for j := t.next(i); t.slots[j].engine != 0; j = t.next(j) {
		home := t.home(t.slots[j].engine)
		if i <= j && (home <= i || home > j) || i > j && home <= i && home > j {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = name{}
	if len(t.slots) > minNames && t.n*4 < len(t.slots) {
		t.resize(max(minNames, len(t.slots)/2))
	}
	return block, true
}

// each calls f with every entry. f must not change t.
func (t *names) each(f func(name)) {
	for _, e := range t.slots {
		if e.engine != 0 {
			f(e)
		}
	}
	if t.hasZero {
		f(name{0, t.zero})
	}
}

func (t *names) resize(size int) {
	old := t.slots
	t.slots = make([]name, size)
	for _, e := range old {
		if e.engine == 0 {
			continue
		}
		i := t.home(e.engine)
		for t.slots[i].engine != 0 {
			i = t.next(i)
		}
		t.slots[i] = e
	}
}

// bytes returns the memory of the slots.
func (t *names) bytes() int { return 16 * len(t.slots) }
