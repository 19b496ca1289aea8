package indexer

import (
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// maxPrefetchNames is how many names a store or a removal may have for them to be sent for together with those of the
// operations beside it. Where there are more, there is time for them later, if they are needed at all.
const maxPrefetchNames = 8

// prefetchBatch sends for the memory that operations of this tier will look at first. Each of them would wait twice:
// for the slots of its names, then for what lies where these say that the parent, or the removed block, is.
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
		return // it would only wait here
	}
	near = near[:0]
	latest := t.arena.nameAt(t.latest) // where that is need not be looked up
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
