package kvblock

import (
	"fmt"
	"strings"
)

// A hybrid model has layers that do not keep the whole prompt: they attend to a window or a chunk of it, or keep a
// state. vLLM announces such layers in groups of their own. Groups of the same kind, window and block size are a class:
// the engine reuses a block of the class only if all its groups hold the block.
//
// A group's store lists only the blocks that the group keeps, but carries the token ids of the whole stretch. So it
// does not say which tokens a block has. The batch's store of full attention does: it names the same blocks by the same
// engine hashes.
//
// Source: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator) and kv_cache_utils.py, vLLM 0.32 and 0.33.

// ClassKind is the part of a prompt that the layers of a class keep.
type ClassKind uint8

// The kinds of classes. The zero value is no class.
const (
	ClassWindow ClassKind = iota + 1 // the last Window tokens
	ClassState                       // a state behind some blocks
	ClassChunk                       // the tokens since the last multiple of the chunk
)

// String returns the kind's name in metrics and decisions: window, state or chunk.
func (k ClassKind) String() string {
	switch k {
	case ClassWindow:
		return "window"
	case ClassState:
		return "state"
	case ClassChunk:
		return "chunk"
	}
	return "none"
}

// Class describes layer groups that an engine looks up together. The zero value is no class.
type Class struct {
	Kind      ClassKind
	Window    uint32 // in tokens; only ClassWindow has one
	BlockSize uint32 // in tokens; a multiple of full attention's
}

// String returns for example "window of 128 tokens in blocks of 16".
func (c Class) String() string {
	if c.Kind == ClassWindow {
		return fmt.Sprintf("window of %d tokens in blocks of %d", c.Window, c.BlockSize)
	}
	return fmt.Sprintf("%v in blocks of %d", c.Kind, c.BlockSize)
}

// MaxClasses is the maximum number of classes of a worker. Models have one or two.
const MaxClasses = 3

// Classes are the classes of a worker. The first zero value ends the list.
type Classes [MaxClasses]Class

// Len returns the number of classes.
func (c *Classes) Len() int {
	for i := range c {
		if c[i].Kind == 0 {
			return i
		}
	}
	return len(c)
}

// String returns the classes, separated by commas; "" if there are none.
func (c *Classes) String() string {
	var b strings.Builder
	for i, class := range c[:c.Len()] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(class.String())
	}
	return b.String()
}

// ClassTier returns the tier with the blocks of class i, 0 <= i < MaxClasses. It is a place in the device's memory, as
// TierDevice is, for layers other than full attention's.
func ClassTier(i int) Tier { return TierExternal + 1 + Tier(i) }

// kindOfClass returns the kind of class of a group, 0 if kvepp cannot tell which blocks the group needs.
func kindOfClass(e *Event) ClassKind {
	switch string(e.SpecKind) {
	case "sliding_window", "sliding_window_mla":
		if e.Window > 0 {
			return ClassWindow
		}
	case "mamba":
		return ClassState
	case "chunked_local_attention":
		return ClassChunk
	}
	return 0
}

// Bounds of what a Normalizer remembers of classes. Beyond them the worker's overlap is an upper bound.
const (
	maxClassGroups = 16 // groups of one class
	maxClassCopies = 255
	maxClassBlocks = 1 << 22 // blocks of one class with several groups
)

// classGroup is a group's place among the classes.
type classGroup struct{ class, member uint8 }

// classState is what a Normalizer remembers of one class.
type classState struct {
	groups uint8
	stored bool // a group has stored a block
	// copies counts the physical blocks of each group, by engine hash. A class of one group does not use it, because
	// the index counts copies.
	copies map[EngineHash]*[maxClassGroups]uint8
}

// complete reports whether all groups hold a block.
func (c *classState) complete(copies *[maxClassGroups]uint8) bool {
	for _, n := range copies[:c.groups] {
		if n == 0 {
			return false
		}
	}
	return true
}

// placed is the place of a block in the operations of its batch.
type placed struct{ op, block int }

// giveUpClasses makes the worker's overlap an upper bound: from now on only full attention's blocks count.
func (n *Normalizer) giveUpClasses() {
	n.traits.UpperBound, n.traits.Classes = true, Classes{}
	n.classes, n.classGroups = [MaxClasses]classState{}, nil
}

// clearClasses forgets the blocks of all classes.
func (n *Normalizer) clearClasses() {
	for i := range n.classes {
		n.classes[i].copies = nil
	}
}

// appendClasses appends the operations of the events in n.passing, those of groups other than full attention.
// ops[from:] are those of full attention's events in the same batch.
func (n *Normalizer) appendClasses(b *Batch, ops []Operation, from int) []Operation {
	defer func() { n.passing = n.passing[:0] }()
	for _, i := range n.passing {
		e := &b.Events[i]
		if n.traits.UpperBound {
			break
		}
		if e.Kind == BlockStored && n.learnClass(e) {
			// The blocks stored so far count as held, although this group does not hold them.
			ops = append(ops, Operation{Kind: OpCleared, Event: BlockStored})
			from, n.droppedMain = len(ops), true
			n.clearClasses()
		}
	}
	for _, c := range n.traits.Classes[:n.traits.Classes.Len()] {
		if size := n.traits.BlockSize; size > 0 && int(c.BlockSize)%size != 0 {
			n.giveUpClasses()
			break
		}
	}
	n.placeBlocks(ops, from)
	end := len(ops)
	for _, i := range n.passing {
		e := &b.Events[i]
		g, known := n.classGroups[e.Group]
		switch {
		case n.traits.UpperBound && e.Kind == BlockStored:
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropNonMainAttention})
		case !known:
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropNonMainGroup})
		case e.Kind == BlockStored:
			ops = n.appendClassStore(e, g, ops, ops[from:end])
		default:
			ops = n.appendClassRemoval(e, g, ops)
		}
	}
	return ops
}

// learnClass notes the class of a store's group. It reports whether the class already has blocks without this group.
func (n *Normalizer) learnClass(e *Event) (late bool) {
	if _, known := n.classGroups[e.Group]; known {
		return false
	}
	c := Class{Kind: kindOfClass(e), BlockSize: e.BlockSize}
	if c.Kind == ClassWindow {
		c.Window = e.Window
	}
	at := 0
	for at < MaxClasses && n.traits.Classes[at] != c && n.traits.Classes[at].Kind != 0 {
		at++
	}
	if c.Kind == 0 || c.BlockSize == 0 || at == MaxClasses || n.classes[at].groups == maxClassGroups {
		n.giveUpClasses()
		return false
	}
	n.traits.Classes[at] = c
	state := &n.classes[at]
	late = state.groups > 0 && state.stored
	if n.classGroups == nil {
		n.classGroups = map[uint32]classGroup{}
	}
	n.classGroups[e.Group] = classGroup{uint8(at), state.groups}
	state.groups++
	return late
}

// placeBlocks records where the blocks of full attention's stores are in ops[from:].
func (n *Normalizer) placeBlocks(ops []Operation, from int) {
	clear(n.places)
	if n.traits.UpperBound {
		return
	}
	if n.places == nil {
		n.places = map[EngineHash]placed{}
	}
	for i := from; i < len(ops); i++ {
		if ops[i].Kind == OpCleared {
			clear(n.places)
		}
		if s := &ops[i].Stored; ops[i].Kind == OpStored && s.Tier == TierDevice {
			for j := range s.Blocks {
				n.places[s.Blocks[j].Engine] = placed{i - from, j}
			}
		}
	}
}

// appendClassStore appends the stores of the blocks of e that all groups of its class hold now, in stretches without a
// gap. main are the operations of full attention in this batch, in which n.places has the blocks.
func (n *Normalizer) appendClassStore(e *Event, g classGroup, ops, main []Operation) []Operation {
	class := &n.classes[g.class]
	var last placed
	stretch := false // the last operation is a stretch that ends with the block at last
	class.stored = class.stored || len(e.Hashes) > 0
	for _, h := range e.Hashes {
		if class.groups > 1 {
			if complete, ok := class.add(h, int(g.member)); !ok {
				n.giveUpClasses()
				return ops
			} else if !complete {
				stretch = false
				continue
			}
		}
		at, ok := n.places[h]
		if !ok {
			ops = append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: DropUnplaced})
			if !n.droppedMain {
				n.giveUpClasses()
				return ops
			}
			stretch = false
			continue
		}
		from := &main[at.op].Stored
		n.blocks = append(n.blocks, from.Blocks[at.block])
		if stretch && at == (placed{last.op, last.block + 1}) {
			s := &ops[len(ops)-1].Stored
			s.Blocks = n.blocks[len(n.blocks)-len(s.Blocks)-1:]
		} else {
			s := Stored{HasParent: from.HasParent, Parent: from.Parent, Tier: ClassTier(int(g.class)),
				Blocks: n.blocks[len(n.blocks)-1:]}
			if at.block > 0 {
				s.HasParent, s.Parent = true, from.Blocks[at.block-1].Engine
			}
			ops = append(ops, Operation{Kind: OpStored, Event: BlockStored, Stored: s})
		}
		stretch, last = true, at
	}
	return ops
}

// appendClassRemoval appends the removal of those blocks of e that all groups of its class held until now.
func (n *Normalizer) appendClassRemoval(e *Event, g classGroup, ops []Operation) []Operation {
	class, hashes := &n.classes[g.class], e.Hashes
	if class.groups > 1 {
		hashes = hashes[:0]
		for _, h := range e.Hashes {
			if class.remove(h, int(g.member)) {
				hashes = append(hashes, h)
			}
		}
	}
	if len(hashes) == 0 {
		return ops
	}
	r := Removed{Hashes: hashes, Tier: ClassTier(int(g.class))}
	return append(ops, Operation{Kind: OpRemoved, Event: BlockRemoved, Removed: r})
}

// add counts a physical block of one group. It reports whether the class's groups hold the block from now on, and
// false for ok if a bound is reached.
func (c *classState) add(h EngineHash, member int) (complete, ok bool) {
	copies := c.copies[h]
	if copies == nil {
		if len(c.copies) >= maxClassBlocks {
			return false, false
		}
		if c.copies == nil {
			c.copies = map[EngineHash]*[maxClassGroups]uint8{}
		}
		copies = new([maxClassGroups]uint8)
		c.copies[h] = copies
	}
	if copies[member] == maxClassCopies {
		return false, false
	}
	copies[member]++
	return copies[member] == 1 && c.complete(copies), true
}

// remove discounts a physical block of one group. It reports whether the class's groups held the block until now.
func (c *classState) remove(h EngineHash, member int) (held bool) {
	copies := c.copies[h]
	if copies == nil || copies[member] == 0 {
		return false
	}
	held = copies[member] == 1 && c.complete(copies)
	copies[member]--
	if *copies == [maxClassGroups]uint8{} {
		delete(c.copies, h)
	}
	return held
}
