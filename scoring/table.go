package scoring

import "math/rand/v2"

// table maps 64-bit keys to non-zero numbers. It is a flat hash table with linear probing: it has no pointers for the
// garbage collector, allocates only when it grows, and a probe in cache costs a quarter of a Go map's. Its memory stays
// at its maximum so far. The zero value is an empty table.
type table struct {
	slots []tableSlot // length 0 or a power of two
	used  int
	shift uint   // 64 - log2(len(slots))
	seed  uint64 // odd; random, so that clients cannot send colliding keys
}

// tableSlot is empty if value is 0.
type tableSlot struct {
	key   uint64
	value uint32
}

func (t *table) home(key uint64) int { return int((key * t.seed) >> t.shift) }

// find returns the address of the key's value, or nil. The address is valid until the next insert or remove.
func (t *table) find(key uint64) *uint32 {
	if t.used == 0 {
		return nil
	}
	mask := len(t.slots) - 1
	for i := t.home(key); ; i = (i + 1) & mask {
		switch s := &t.slots[i]; {
		case s.value == 0:
			return nil
		case s.key == key:
			return &s.value
		}
	}
}

// insert returns the address of the key's value, which is 0 for a new key. The caller must set it at once.
func (t *table) insert(key uint64) *uint32 {
	if 2*(t.used+1) > len(t.slots) {
		t.grow()
	}
	mask := len(t.slots) - 1
	for i := t.home(key); ; i = (i + 1) & mask {
		switch s := &t.slots[i]; {
		case s.value == 0:
			s.key = key
			t.used++
			return &s.value
		case s.key == key:
			return &s.value
		}
	}
}

// remove removes the key, if it is there.
func (t *table) remove(key uint64) {
	if t.used == 0 {
		return
	}
	mask := len(t.slots) - 1
	hole := t.home(key)
	for ; t.slots[hole].key != key || t.slots[hole].value == 0; hole = (hole + 1) & mask {
		if t.slots[hole].value == 0 {
			return
		}
	}
	// Close the hole: a later entry moves into it unless that would put it before its home.
	for i := (hole + 1) & mask; t.slots[i].value != 0; i = (i + 1) & mask {
		if home := t.home(t.slots[i].key); (i-home)&mask >= (i-hole)&mask {
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = tableSlot{}
	t.used--
}

func (t *table) grow() {
	old := t.slots
	t.slots = make([]tableSlot, max(64, 2*len(old)))
	t.shift = 64
	for n := len(t.slots); n > 1; n /= 2 {
		t.shift--
	}
	if t.seed == 0 {
		t.seed = rand.Uint64() | 1
	}
	t.used = 0
	for _, s := range old {
		if s.value != 0 {
			*t.insert(s.key) = s.value
		}
	}
}
