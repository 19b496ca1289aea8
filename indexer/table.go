package indexer

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvepp/kvblock"
)

// table finds the address of a block by its sequence hash: open addressing with linear probing, in 256
// segments that grow and shrink on their own, so that no growth takes long. A tier has several, of different blocks (tier.go).
//
// A slot is one word, the hash's tag above the block's address. Only slots are here; the hash itself lies at that address.
// Readers need no lock, by this protocol of the writers (guarded by tier.mu): the hash is at the address before a slot
// says so, and when a block moves or goes, its slot changes first. So a reader who finds something else at the address
// than the slot promised looks at the slot again: if it has not changed, the tags were equal by chance.
type table struct {
	seed     uint64
	sparse   bool // half empty or more, so that searches in vain are short
	bigPages bool // whether memory is asked for in big pages
	size     int  // bytes of all slots
	segments [1 << segmentBits]segment
}

const (
	segmentBits = 8
	minSlots    = 16

	slotEmpty = 0
	slotGone  = 1 // as an address it would lie in a record's header, where no block is
)

type segment struct {
	slots atomic.Pointer[[]uint64] // 2^n of them, never full; nil while there is no block
	live  int                      // blocks
	gone  int                      // slots with slotGone
}

// mix spreads a hash over 64 bits, differently for every seed: engines and clients choose what is hashed, and must not be
// able to choose who collides.
func mix(h, seed uint64) uint64 {
	hi, lo := bits.Mul64(h^seed, 0x9e3779b97f4a7c15)
	hi ^= lo
	return hi ^ hi>>32*0xff51afd7ed558ccd
}

// find returns the address of the block with hash h. It is safe beside writers.
func (t *table) find(a *arena, h kvblock.SequenceHash) (ref, bool) {
	m := mix(uint64(h), t.seed)
	seg := &t.segments[m>>(64-segmentBits)]
	tag := uint32(m)
again:
	slots := seg.slots.Load()
	if slots == nil {
		return 0, false
	}
	mask := uint32(len(*slots) - 1)
	for i := tag & mask; ; i = (i + 1) & mask {
		slot := atomic.LoadUint64(&(*slots)[i])
		if slot == slotEmpty {
			return 0, false
		}
		if uint32(slot>>32) != tag || slot == slotGone {
			continue
		}
		r := ref(slot)
		if at, ok := a.load(r); ok && at == uint64(h) {
			return r, true
		}
		if atomic.LoadUint64(&(*slots)[i]) != slot || seg.slots.Load() != slots {
			goto again // moved meanwhile
		}
	}
}

// findRun returns the run whose first block has hash h, nil if there is none. It is safe beside writers, and for a table of
// starts.
func (t *table) findRun(a *arena, h kvblock.SequenceHash) []uint64 {
	m := mix(uint64(h), t.seed)
	seg := &t.segments[m>>(64-segmentBits)]
	tag := uint32(m)
again:
	slots := seg.slots.Load()
	if slots == nil {
		return nil
	}
	mask := uint32(len(*slots) - 1)
	for i := tag & mask; ; i = (i + 1) & mask {
		slot := atomic.LoadUint64(&(*slots)[i])
		if slot == slotEmpty {
			return nil
		}
		if uint32(slot>>32) != tag || slot == slotGone {
			continue
		}
		if words, first := a.around(ref(slot)); words != nil && first == 0 && atomic.LoadUint64(&words[runHeader]) == uint64(h) {
			return words
		}
		if atomic.LoadUint64(&(*slots)[i]) != slot || seg.slots.Load() != slots {
			goto again // moved meanwhile
		}
	}
}

// near returns the address of memory where the search for a hash begins, to be prefetched; 0 if there is none. It is safe
// beside writers.
func (t *table) near(h uint64) uintptr {
	m := mix(h, t.seed)
	slots := t.segments[m>>(64-segmentBits)].slots.Load()
	if slots == nil {
		return 0
	}
	return uintptr(unsafe.Pointer(&(*slots)[uint32(m)&uint32(len(*slots)-1)]))
}

// insert adds a block that is not in the table.
func (t *table) insert(h kvblock.SequenceHash, r ref) {
	seg, m := t.room(uint64(h))
	slots := *seg.slots.Load()
	mask := uint32(len(slots) - 1)
	for i := uint32(m) & mask; ; i = (i + 1) & mask {
		if slot := slots[i]; slot == slotEmpty || slot == slotGone { // only writers write slots, and we are the writer
			seg.take(&slots[i], m, r)
			return
		}
	}
}

// room returns the segment of a hash, with room for one more, and the mixed hash.
func (t *table) room(h uint64) (seg *segment, m uint64) {
	m = mix(h, t.seed)
	seg = &t.segments[m>>(64-segmentBits)]
	if slots := seg.slots.Load(); slots == nil || (seg.live+seg.gone+1)*4 > len(*slots)*(3-b2i(t.sparse)) {
		t.rebuild(seg, seg.live+1)
	}
	return seg, m
}

// take puts r into a slot that is empty or slotGone.
func (seg *segment) take(slot *uint64, m uint64, r ref) {
	if *slot == slotGone {
		seg.gone--
	}
	put(slot, m<<32|uint64(r))
	seg.live++
}

// move changes the address of a block from one place to another.
func (t *table) move(h kvblock.SequenceHash, from, to ref) {
	m := mix(uint64(h), t.seed)
	slots := *t.segments[m>>(64-segmentBits)].slots.Load()
	i := slotOf(slots, m, from)
	put(&slots[i], m<<32|uint64(to))
}

// remove takes away a block.
func (t *table) remove(h kvblock.SequenceHash, r ref) {
	m := mix(uint64(h), t.seed)
	seg := &t.segments[m>>(64-segmentBits)]
	slots := *seg.slots.Load()
	mask := uint32(len(slots) - 1)
	i := slotOf(slots, m, r)
	seg.live--
	if slots[(i+1)&mask] != slotEmpty {
		put(&slots[i], slotGone)
		seg.gone++
	} else { // nobody probes past here any more
		put(&slots[i], slotEmpty)
		for i = (i - 1) & mask; slots[i] == slotGone; i = (i - 1) & mask {
			put(&slots[i], slotEmpty)
			seg.gone--
		}
	}
	if len(slots) > minSlots && seg.live*10 < len(slots) || seg.live == 0 {
		t.rebuild(seg, seg.live)
	}
}

// slotOf returns the place of the slot that says r. It is there.
func slotOf(slots []uint64, m uint64, r ref) uint32 {
	mask := uint32(len(slots) - 1)
	want := m<<32 | uint64(r)
	i := uint32(m) & mask
	for slots[i] != want {
		i = (i + 1) & mask
	}
	return i
}

// rebuild makes room for live blocks and as many again before the next one, without slotGone. Readers of the old slots
// find what was true until now.
func (t *table) rebuild(seg *segment, live int) {
	if old := seg.slots.Load(); old != nil {
		t.size -= 8 * len(*old)
	}
	if live == 0 {
		seg.slots.Store(nil)
		seg.gone = 0
		return
	}
	slots := make([]uint64, max(minSlots, 1<<bits.Len(uint(live+live/2+b2i(t.sparse)*live/2))))
	t.size += 8 * len(slots)
	if t.bigPages {
		wantBigPages(unsafe.Pointer(&slots[0]), 8*len(slots))
	}
	mask := uint32(len(slots) - 1)
	if old := seg.slots.Load(); old != nil {
		for _, slot := range *old {
			if slot == slotEmpty || slot == slotGone {
				continue
			}
			i := uint32(slot>>32) & mask
			for slots[i] != slotEmpty {
				i = (i + 1) & mask
			}
			slots[i] = slot
		}
	}
	seg.gone = 0
	seg.slots.Store(&slots)
}
