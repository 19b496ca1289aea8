package kvblock

// A hybrid model keeps groups of layers whose blocks differ in size. Where full attention's blocks are not the finest,
// vLLM also announces a prompt's tail, which ends inside such a block: a store of one hash with a smaller block size,
// in full attention's own group. No lookup of kvepp's can use it, because blocks of the worker's size never end there.
// It must not be taken for a worker that changed its block size either.
//
// Source: vllm/v1/core/single_type_kv_cache_manager.py (FullAttentionManager._cache_partial_tail_block), vLLM 0.32 and
// 0.33.

// maxPromptTails bounds the prompt tails of one worker that are remembered. At the bound, further tails are still
// ignored, but their removals are passed on, and count as those of unknown blocks.
const maxPromptTails = 1 << 16

// promptTail is a tail that the worker holds.
type promptTail struct {
	copies uint32 // physical blocks with the tail's hash: each has its own store and removal
	depth  uint32 // how many stores of this block size follow each other up to this one, as far as is known; at least 1
}

// isPromptTail reports whether a store, whose block size is not the worker's, is a prompt's tail, and remembers it.
//
// Tails end at multiples of their size that are no multiples of the worker's. So among as many consecutive small blocks
// as fit into one of the worker's, one cannot be a tail: then the engine's blocks really are small.
func (n *Normalizer) isPromptTail(e *Event, tier Tier) bool {
	size := uint32(n.traits.BlockSize)
	if tier != TierDevice || !possibleTail(e) || e.BlockSize >= size || size%e.BlockSize != 0 {
		return false
	}
	hash := e.Hashes[0]
	tail := n.tails[hash]
	if tail.depth == 0 {
		tail.depth = 1
		if e.HasParent {
			tail.depth += n.tails[e.Parent].depth
		}
	}
	if tail.depth >= size/e.BlockSize {
		return false
	}
	tail.copies++
	if tail.copies > 1 || len(n.tails) < n.tailLimit {
		if n.tails == nil {
			n.tails = map[EngineHash]promptTail{}
		}
		n.tails[hash] = tail
	}
	return true
}

// possibleTail reports whether a store has the shape of a prompt's tail: one block of full attention, in a group.
func possibleTail(e *Event) bool {
	return len(e.Hashes) == 1 && e.HasGroup && e.BlockSize > 0 && e.SpecKind != nil &&
		specKindOf(e.SpecKind) == specMain
}

// removeTails takes the hashes of tails out of a removal and returns the others, in the same memory.
func (n *Normalizer) removeTails(hashes []EngineHash) []EngineHash {
	kept := hashes[:0]
	for _, h := range hashes {
		switch tail, is := n.tails[h]; {
		case !is:
			kept = append(kept, h)
		case tail.copies > 1:
			tail.copies--
			n.tails[h] = tail
		default:
			delete(n.tails, h)
		}
	}
	return kept
}

// learnBlockSize takes the block size of a store for the worker's, if none is known or the known one is uncertain, and
// reports whether blocks were stored in another size before, which then were prompt tails.
//
// The size is uncertain while the store that told it may itself have been a tail: the prompts before it were shorter
// than one block. A store of two blocks ends the doubt, because tails have one; so does a larger store, because nothing
// but a tail is smaller.
func (n *Normalizer) learnBlockSize(e *Event) (changed bool) {
	if e.BlockSize < 1 || e.BlockSize > MaxBlockSize {
		return false
	}
	size := int(e.BlockSize)
	switch known := n.traits.BlockSize; {
	case known == 0:
	case !n.uncertainSize:
		return false
	case known == size:
		n.uncertainSize = len(e.Hashes) == 1
		return false
	case size < known && possibleTail(e) && known%size == 0:
		return false // isPromptTail decides
	default:
		changed = true
	}
	n.traits.BlockSize = size
	n.uncertainSize = possibleTail(e) && e.BlockSize <= n.finestOther
	return changed
}

// noteOtherGroups notes the block sizes of the groups beside full attention in a batch. Their events may come after a
// tail's.
func (n *Normalizer) noteOtherGroups(b *Batch) {
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind == BlockStored && e.HasGroup && e.SpecKind != nil && specKindOf(e.SpecKind) == specPassing &&
			e.BlockSize > 0 &&
			(n.finestOther == 0 || e.BlockSize < n.finestOther) {
			n.finestOther = e.BlockSize
		}
	}
}
