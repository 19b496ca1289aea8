package indexer

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// seqTable maps sequence hashes to addresses of blocks: open addressing with linear probing, in 256 segments that grow
// and shrink independently, so that no growth takes long. A tier has two, starts and bySeq (tier.go).
//
// A slot is one word: the hash's tag above the block's address. The hash itself is in the arena at that address.
// Readers need no lock. Writers, which hold tier.mu, write the hash to the arena before its slot, and change the slot
// first when a block moves or is removed. A reader that finds another hash at the address reads the slot again. If the
// slot has not changed, the tags were equal by chance.
type seqTable struct {
	seed uint64
	// at least half empty, so that searches without a result are short
	sparse bool
	slots  [1 << segmentBits]atomic.Pointer[[]uint64] // of each segment: 2^n, never full; nil until it has a block

	_        memoryLine // separates what lookups read from what writers write
	size     int        // bytes of all slots
	spare    int        // of these, bytes of segments without a block
	segments [1 << segmentBits]segment
}

const (
	segmentBits = 8
	minSlots    = 16

	slotEmpty   = 0
	slotDeleted = 1 // no block's address: 1 is in a record's header
)

type segment struct {
	live    int // blocks
	deleted int // slots with slotDeleted
}

// mix spreads a hash over 64 bits, depending on seed. Engines and clients choose the hashed contents; without the seed
// they could cause collisions.
func mix(h, seed uint64) uint64 {
	hi, lo := bits.Mul64(h^seed, 0x9e3779b97f4a7c15)
	hi ^= lo
	return hi ^ hi>>32*0xff51afd7ed558ccd
}

// segmentOf returns the segment of a hash that mix maps to m.
func segmentOf(m uint64) uint64 { return m >> (64 - segmentBits) }

// find returns the address of the block with hash h. It is safe beside writers.
func (t *seqTable) find(a *arena, h kvblock.SequenceHash) (ref, bool) {
	m := mix(uint64(h), t.seed)
	of := &t.slots[segmentOf(m)]
	tag := uint32(m)
again:
	slots := of.Load()
	if slots == nil {
		return 0, false
	}
	mask := uint32(len(*slots) - 1)
	for i := tag & mask; ; i = (i + 1) & mask {
		slot := atomic.LoadUint64(&(*slots)[i])
		if slot == slotEmpty {
			return 0, false
		}
		if uint32(slot>>32) != tag || slot == slotDeleted {
			continue
		}
		r := ref(slot)
		if at, ok := a.load(r); ok && at == uint64(h) {
			return r, true
		}
		if atomic.LoadUint64(&(*slots)[i]) != slot || of.Load() != slots {
			goto again // moved meanwhile
		}
	}
}

// findRun returns the run whose first block has hash h, nil if there is none. t must be a table of starts. It is safe
// beside writers.
func (t *seqTable) findRun(a *arena, h kvblock.SequenceHash) []uint64 {
	m := mix(uint64(h), t.seed)
	of := &t.slots[segmentOf(m)]
	tag := uint32(m)
again:
	slots := of.Load()
	if slots == nil {
		return nil
	}
	mask := uint32(len(*slots) - 1)
	for i := tag & mask; ; i = (i + 1) & mask {
		slot := atomic.LoadUint64(&(*slots)[i])
		if slot == slotEmpty {
			return nil
		}
		if uint32(slot>>32) != tag || slot == slotDeleted {
			continue
		}
		if words, first := a.runAround(ref(slot)); words != nil && first == 0 &&
			atomic.LoadUint64(&words[runHeader]) == uint64(h) {
			return words
		}
		if atomic.LoadUint64(&(*slots)[i]) != slot || of.Load() != slots {
			goto again // moved meanwhile
		}
	}
}

// slotAddr returns the address of the first slot that a search for h reads, for prefetching; 0 if there is none. It is
// safe beside writers.
func (t *seqTable) slotAddr(h uint64) uintptr {
	m := mix(h, t.seed)
	slots := t.slots[segmentOf(m)].Load()
	if slots == nil {
		return 0
	}
	return uintptr(unsafe.Pointer(&(*slots)[uint32(m)&uint32(len(*slots)-1)]))
}

// insert adds a block that is not in the table.
func (t *seqTable) insert(h kvblock.SequenceHash, r ref) {
	m := mix(uint64(h), t.seed)
	at := segmentOf(m)
	seg := &t.segments[at]
	if slots := t.slots[at].Load(); slots == nil || (seg.live+seg.deleted+1)*4 > len(*slots)*(3-b2i(t.sparse)) {
		t.rebuild(at, seg.live+1)
	} else if seg.live == 0 {
		t.spare -= 8 * minSlots
	}
	slots := *t.slots[at].Load()
	mask := uint32(len(slots) - 1)
	i := uint32(m) & mask
	for slots[i] != slotEmpty && slots[i] != slotDeleted { // plain reads: the caller is the only writer
		i = (i + 1) & mask
	}
	seg.deleted -= b2i(slots[i] == slotDeleted)
	publishWord(&slots[i], m<<32|uint64(r))
	seg.live++
}

// move changes the address of a block.
func (t *seqTable) move(h kvblock.SequenceHash, from, to ref) {
	m := mix(uint64(h), t.seed)
	slots := *t.slots[segmentOf(m)].Load()
	i := slotOf(slots, m, from)
	publishWord(&slots[i], m<<32|uint64(to))
}

// remove removes a block that is in the table.
func (t *seqTable) remove(h kvblock.SequenceHash, r ref) {
	m := mix(uint64(h), t.seed)
	at := segmentOf(m)
	seg := &t.segments[at]
	slots := *t.slots[at].Load()
	mask := uint32(len(slots) - 1)
	i := slotOf(slots, m, r)
	seg.live--
	if slots[(i+1)&mask] != slotEmpty {
		publishWord(&slots[i], slotDeleted)
		seg.deleted++
	} else { // no search needs to continue behind this slot
		publishWord(&slots[i], slotEmpty)
		for i = (i - 1) & mask; slots[i] == slotDeleted; i = (i - 1) & mask {
			publishWord(&slots[i], slotEmpty)
			seg.deleted--
		}
	}
	if len(slots) > minSlots && seg.live*10 < len(slots) {
		t.rebuild(at, seg.live)
	}
	if seg.live == 0 {
		t.spare += 8 * minSlots
	}
}

// tag returns the tag of a block with hash h.
func (t *seqTable) tag(h kvblock.SequenceHash) uint32 { return uint32(mix(uint64(h), t.seed)) }

// eachTag calls f with the tag of every block.
func (t *seqTable) eachTag(f func(tag uint32)) {
	for i := range t.slots {
		if slots := t.slots[i].Load(); slots != nil {
			for _, slot := range *slots {
				if slot != slotEmpty && slot != slotDeleted {
					f(uint32(slot >> 32))
				}
			}
		}
	}
}

// eachBlock calls f with the address of every block.
func (t *seqTable) eachBlock(f func(ref)) {
	for i := range t.slots {
		if slots := t.slots[i].Load(); slots != nil {
			for _, slot := range *slots {
				if slot != slotEmpty && slot != slotDeleted {
					f(ref(slot))
				}
			}
		}
	}
}

// slotOf returns the index of the slot with address r, which must be in the table.
func slotOf(slots []uint64, m uint64, r ref) uint32 {
	mask := uint32(len(slots) - 1)
	want := m<<32 | uint64(r)
	i := uint32(m) & mask
	for slots[i] != want {
		i = (i + 1) & mask
	}
	return i
}

// rebuild gives a segment new slots with room for live blocks and more, without deleted slots. Readers of the old slots
// see the state before the change.
func (t *seqTable) rebuild(segment uint64, live int) {
	at, seg := &t.slots[segment], &t.segments[segment]
	if old := at.Load(); old != nil {
		t.size -= 8 * len(*old)
	}
	slots := make([]uint64, max(minSlots, 1<<bits.Len(uint(live+live/2+b2i(t.sparse)*live/2))))
	t.size += 8 * len(slots)
	hugepage.Populate(unsafe.Pointer(&slots[0]), 8*len(slots))
	mask := uint32(len(slots) - 1)
	if old := at.Load(); old != nil {
		for _, slot := range *old {
			if slot == slotEmpty || slot == slotDeleted {
				continue
			}
			i := uint32(slot>>32) & mask
			for slots[i] != slotEmpty {
				i = (i + 1) & mask
			}
			slots[i] = slot
		}
	}
	seg.deleted = 0
	at.Store(&slots)
}
