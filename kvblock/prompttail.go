package kvblock

// The layer groups of a hybrid model have blocks of different sizes. Where full attention's blocks are not the
// smallest, vLLM also announces a prompt's tail, which ends inside such a block: a store of one hash with a smaller
// block size, in full attention's own group. No lookup of kvepp can use it, because blocks of the worker's size never
// end there. Nor does it mean that the worker changed its block size.
//
// Source: vllm/v1/core/single_type_kv_cache_manager.py (FullAttentionManager._cache_partial_tail_block), vLLM 0.32 and
// 0.33.

// maxPromptTails bounds the prompt tails remembered for one worker. At the bound, the normalizer still ignores further
// tails, but passes on their removals, which then count as removals of unknown blocks.
const maxPromptTails = 1 << 16

// promptTail is a tail that the worker holds.
type promptTail struct {
	copies uint32 // physical blocks with the tail's hash; each has its own store and removal
	depth  uint32 // known consecutive stores of this block size that end with this one; at least 1
}

// isPromptTail reports whether a store on the device with a block size other than the worker's is a prompt's tail, and
// remembers it.
//
// Tails end at multiples of their size that are not multiples of the worker's. So of as many consecutive small blocks
// as fit into one block of the worker's size, at least one is not a tail: the engine's blocks really are small.
func (n *Normalizer) isPromptTail(e *Event) bool {
	size := uint32(n.traits.BlockSize)
	if !possibleTail(e) || e.BlockSize >= size || size%e.BlockSize != 0 {
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

// removeTails removes the hashes of tails from a removal. It returns the other hashes in the same memory.
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

// learnBlockSize takes the block size of a store as the worker's if none is known or the known one is uncertain. It
// reports whether earlier blocks were stored in another size. Those blocks were prompt tails.
//
// The size is uncertain while the store that set it may itself have been a tail, because the earlier prompts were
// shorter than one block, or because kvepp joined late. A tail is not larger than the other groups' smallest blocks, if
// these are known. A store of two blocks makes it certain, because a tail is one block. A larger store does too,
// because only tails are smaller.
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
	n.uncertainSize = possibleTail(e) && (n.finestOther == 0 || e.BlockSize <= n.finestOther)
	return changed
}

// noteOtherGroups records the block sizes in a batch of the groups other than full attention. Their events may come
// after a tail's.
func (n *Normalizer) noteOtherGroups(b *Batch) {
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind == BlockStored && e.HasGroup && e.SpecKind != nil && specKindOf(e.SpecKind) == specTransient &&
			e.BlockSize > 0 &&
			(n.finestOther == 0 || e.BlockSize < n.finestOther) {
			n.finestOther = e.BlockSize
		}
	}
}
