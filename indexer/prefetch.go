package indexer

import (
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// maxPrefetchNames bounds the engine hashes of a store or removal that prefetchBatch prefetches. Operations with more
// prefetch their engine hashes themselves (lookAhead, removeNames).
const maxPrefetchNames = 8

// prefetchBatch prefetches the memory that these operations of this tier read first. Without it each operation has two
// cache misses in a row: for the slots of its engine hashes, then for the parent or removed block that the slots point
// to.
func (t *tier) prefetchBatch(ops []kvblock.Operation) {
	near := t.addrs[:0]
	for i := range ops {
		op := &ops[i]
		if len(near) > len(t.addrs)-1-maxPrefetchNames {
			break
		}
		if op.Kind == kvblock.OpRemoved {
			for _, e := range op.Removed.Hashes[:min(len(op.Removed.Hashes), maxPrefetchNames)] {
				near = append(near, t.names.slotAddr(t.names.mix(e)))
			}
			continue
		}
		if op.Stored.HasParent {
			near = append(near, t.names.slotAddr(t.names.mix(op.Stored.Parent)))
		}
		if len(op.Stored.Blocks) <= maxPrefetchNames {
			for _, b := range op.Stored.Blocks {
				near = append(near, t.names.slotAddr(t.names.mix(b.Engine)))
			}
		}
	}
	prefetch.Words(unsafe.SliceData(near), len(near))

	if len(ops) == 1 {
		return // the second prefetch reads the slots; without other operations there is nothing to overlap
	}
	near = near[:0]
	latest := t.arena.nameAt(t.latest) // findNamed finds this one without a lookup
	for i := range ops {
		var e kvblock.EngineHash
		switch op := &ops[i]; {
		case op.Kind == kvblock.OpRemoved && len(op.Removed.Hashes) > 0:
			e = op.Removed.Hashes[0]
		case op.Kind == kvblock.OpStored:
			if op.Stored.HasParent && op.Stored.Parent != latest {
				e = op.Stored.Parent
			}
			if n := len(op.Stored.Blocks); n > 0 {
				latest = op.Stored.Blocks[n-1].Engine
			}
		}
		r := t.names.guess(e)
		p := t.arena.page(r)
		if r == 0 || p == nil || p.stored == nil {
			continue
		}
		at := int(r) & (pageWords - 1)
		start := at &^ p.last
		near = append(near, uintptr(unsafe.Pointer(&p.words[start])), uintptr(unsafe.Pointer(&p.words[at])),
			uintptr(unsafe.Pointer(&p.stored[start])), uintptr(unsafe.Pointer(&p.stored[at])))
	}
	prefetch.Words(unsafe.SliceData(near), len(near))
}
