package indexer

import (
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// nameTable finds the address of a block by its own name: open addressing with linear probing, in segments, as table does it.
// Writers alone use it, so that nothing needs an order.
//
// A slot is one word as in table, the name's tag above the block's address; the name itself lies beside the run (arena.storedOf).
type nameTable struct {
	seed     uint64
	bigPages bool // whether memory is asked for in big pages
	size     int  // bytes of all slots
	segments [1 << segmentBits]nameSegment
}

type nameSegment struct {
	slots []uint64 // 2^n of them, a quarter or more slotEmpty; nil while there is no name
	live  int      // names
	gone  int      // slots with slotGone
}

// mix returns the bits of a name by which it is looked for.
func (t *nameTable) mix(e kvblock.EngineHash) uint64 { return mix(uint64(e), t.seed) }

func (t *nameTable) segment(m uint64) *nameSegment { return &t.segments[m>>(64-segmentBits)] }

// near returns the address of memory where the search for a name begins, to be prefetched; 0 if there is none.
func (t *nameTable) near(m uint64) uintptr {
	slots := t.segment(m).slots
	if len(slots) == 0 {
		return 0
	}
	return uintptr(unsafe.Pointer(&slots[int(uint32(m))&(len(slots)-1)]))
}

// find returns the address of the block whose name is e.
func (t *nameTable) find(a *arena, e kvblock.EngineHash) (ref, bool) {
	m := t.mix(e)
	slots := t.segment(m).slots
	if len(slots) == 0 || e == 0 {
		return 0, false
	}
	for i := int(uint32(m)); ; i++ {
		slot := slots[i&(len(slots)-1)]
		if slot == slotEmpty {
			return 0, false
		}
		if uint32(slot>>32) == uint32(m) && slot != slotGone && a.nameAt(ref(slot)) == e {
			return ref(slot), true
		}
	}
}

// guess returns the address of the block whose name e probably is, without looking there; 0 if there is none. No block may be there.
func (t *nameTable) guess(e kvblock.EngineHash) ref {
	m := t.mix(e)
	slots := t.segment(m).slots
	if len(slots) == 0 {
		return 0
	}
	for i := int(uint32(m)); ; i++ {
		slot := slots[i&(len(slots)-1)]
		if slot == slotEmpty || uint32(slot>>32) == uint32(m) {
			return ref(slot)
		}
	}
}

// insert adds the block at r by the name e, which is not 0; m is mix(e). It reports whether that is free.
func (t *nameTable) insert(a *arena, e kvblock.EngineHash, m uint64, r ref) bool {
	seg := t.segment(m)
	if (seg.live+seg.gone+1)*4 > len(seg.slots)*3 {
		t.resize(seg, seg.live+1)
	}
	slots := seg.slots
	var into *uint64 // the first slot with slotGone
	for i := int(uint32(m)); ; i++ {
		slot := &slots[i&(len(slots)-1)]
		if *slot == slotEmpty {
			if into != nil {
				slot = into
				seg.gone--
			}
			*slot = m<<32 | uint64(r)
			seg.live++
			return true
		}
		if *slot == slotGone {
			if into == nil {
				into = slot
			}
			continue
		}
		if uint32(*slot>>32) == uint32(m) && a.nameAt(ref(*slot)) == e {
			return false
		}
	}
}

// move changes the address of the block whose name is e from one place to another.
func (t *nameTable) move(e kvblock.EngineHash, from, to ref) {
	m := t.mix(e)
	slots := t.segment(m).slots
	slots[slotOf(slots, m, from)] = m<<32 | uint64(to)
}

// remove takes away the block at r, whose name is e.
func (t *nameTable) remove(e kvblock.EngineHash, r ref) {
	m := t.mix(e)
	seg := t.segment(m)
	slots, mask := seg.slots, uint32(len(seg.slots)-1)
	gap := slotOf(slots, m, r)
	seg.live--
	if slots[(gap+1)&mask] != slotEmpty { // closing the gap would take longer
		slots[gap] = slotGone
		seg.gone++
	} else { // nobody probes past here any more
		slots[gap] = slotEmpty
		for i := (gap - 1) & mask; slots[i] == slotGone; i = (i - 1) & mask {
			slots[i] = slotEmpty
			seg.gone--
		}
	}
	if len(slots) > minSlots && seg.live*10 < len(slots) || seg.live == 0 {
		t.resize(seg, seg.live)
	}
}

// resize makes room for live names and as many again before the next time, without slotGone.
func (t *nameTable) resize(seg *nameSegment, live int) {
	old := seg.slots
	t.size -= 8 * len(old)
	seg.slots, seg.gone = nil, 0
	if live == 0 {
		return
	}
	slots := make([]uint64, max(minSlots, 1<<bits.Len(uint(live+live/2))))
	t.size += 8 * len(slots)
	if t.bigPages {
		wantBigPages(unsafe.Pointer(&slots[0]), 8*len(slots))
	}
	for _, slot := range old {
		if slot != slotEmpty && slot != slotGone {
			i := int(slot >> 32)
			for slots[i&(len(slots)-1)] != slotEmpty {
				i++
			}
			slots[i&(len(slots)-1)] = slot
		}
	}
	seg.slots = slots
}
