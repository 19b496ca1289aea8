package kvblock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unsafe"
)

// A hybrid model has layers that do not keep the whole prompt: they attend to a window or a chunk of it, or keep a
// state. vLLM announces such layers in groups of their own. Groups of the same kind, window and block size are a class:
// the engine reuses a block of the class only if all its groups hold the block.
//
// A group's store lists only the blocks that the group keeps, but carries the token ids of the whole stretch. So it
// does not say which tokens a block has. The batch's store of full attention does: it names the same blocks by the same
// engine hashes. Where a class has smaller blocks than full attention,
// every second or fourth of them has such a name.
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

// maxParts is how many blocks of a class one of full attention's may have. Models have up to 4.
const maxParts = 16

// fits reports whether the class's blocks can be placed among full attention's, which have this many tokens.
func (c Class) fits(size int) bool {
	own := int(c.BlockSize)
	return own%size == 0 || size%own == 0 && size/own <= maxParts
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

// EAGLEDrop says for which layers an engine that drafts with EAGLE or MTP drops the last cached block, because the
// draft model needs what is computed for it. vLLM 0.32 does so, and 0.33 with KV connectors; otherwise 0.33 hashes a
// block together with the tokens behind it (Event.Lookahead). Events do not tell it. The zero value drops nothing.
//
// Source: vllm/v1/core/single_type_kv_cache_manager.py (drop_eagle_block), vLLM 0.32 and 0.33.
type EAGLEDrop uint8

// The layers of an EAGLEDrop. States drop nothing, and chunks cannot.
const (
	EAGLEDropFull    EAGLEDrop = 1 << iota // full attention
	EAGLEDropWindows                       // classes of kind ClassWindow
)

// EAGLEDropNames are the texts of ParseEAGLEDrop.
var EAGLEDropNames = []string{"none", "full", "windows", "all"}

// ParseEAGLEDrop returns the drop with this name: none, full, windows, or all for both. "" means none. It reports
// whether there is one.
func ParseEAGLEDrop(name string) (d EAGLEDrop, ok bool) {
	i := slices.Index(EAGLEDropNames, name)
	return EAGLEDrop(max(i, 0)), i >= 0 || name == ""
}

// ClassTier returns the tier with the blocks of class i, 0 <= i < MaxClasses. It is a place in the device's memory, as
// TierDevice is, for layers other than full attention's.
func ClassTier(i int) Tier { return TierExternal + 1 + Tier(i) }

// Group is a layer group that a worker's events name.
type Group struct {
	Number uint32
	Class  Class // the zero value for full attention
}

// Groups returns the groups that the Normalizer knows, those of full attention first, then class by class. ok is false
// if the blocks of classes are not known.
func (n *Normalizer) Groups() (groups []Group, ok bool) {
	for number, kind := range n.groups {
		if kind == specMain && (!n.hasMain || number == n.mainGroup) {
			groups = append(groups, Group{Number: number})
		}
	}
	slices.SortFunc(groups, func(a, b Group) int { return cmp.Compare(a.Number, b.Number) })
	for i := range n.traits.Classes.Len() {
		at := len(groups)
		groups = append(groups, make([]Group, n.classes[i].groups)...)
		for number, g := range n.classGroups {
			if int(g.class) == i {
				groups[at+int(g.member)] = Group{number, n.traits.Classes[i]}
			}
		}
	}
	return groups, !n.traits.UpperBound
}

// LoadGroups takes over groups as another Normalizer of the same worker returned them, before the first event.
func (n *Normalizer) LoadGroups(groups []Group) {
	for _, g := range groups {
		if len(n.groups) >= maxGroups {
			return
		}
		if g.Class == (Class{}) {
			n.groups[g.Number] = specMain
			if !n.hasMain {
				n.mainGroup, n.hasMain = g.Number, true
			}
			continue
		}
		n.groups[g.Number] = specTransient
		n.traits.Window = max(n.traits.Window, int(g.Class.Window))
		n.learnGroup(g.Number, g.Class)
	}
}

// LoadBlocks notes that all groups of class i hold these blocks, besides what their events say.
func (n *Normalizer) LoadBlocks(i int, blocks []StoredBlock) {
	class := &n.classes[i]
	class.stored = class.stored || len(blocks) > 0
	for _, b := range blocks {
		for member := range int(class.groups) {
			if copies := class.copies[b.Engine]; copies != nil && copies[member] > 0 {
				continue
			}
			if _, ok := class.add(b.Engine, member); !ok {
				n.giveUpClasses()
				return
			}
		}
	}
}

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

// mainStore is a store of full attention on the device.
type mainStore struct {
	op, event int    // indexes of the operation and of the event
	salt      uint64 // of its local hashes; meaningless if the event has hashes of its own
}

// placed is the place of a block: block is its index in the store mains[main].
type placed struct{ main, block int }

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
// n.mains are full attention's stores in the same batch.
func (n *Normalizer) appendClasses(b *Batch, ops []Operation) []Operation {
	defer func() { n.passing = n.passing[:0] }()
	for _, i := range n.passing {
		e := &b.Events[i]
		if n.traits.UpperBound {
			break
		}
		if e.Kind == BlockStored && n.learnClass(e) {
			// The blocks stored so far count as held, although this group does not hold them.
			ops = append(ops, Operation{Kind: OpCleared, Event: BlockStored})
			n.mains, n.droppedMain = n.mains[:0], true
			n.clearClasses()
		}
	}
	n.fitClasses()
	n.placed = false
	for _, i := range n.passing {
		e := &b.Events[i]
		g, known := n.classGroups[e.Group]
		switch {
		case n.traits.UpperBound && e.Kind == BlockStored:
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropNonMainAttention})
		case !known:
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropNonMainGroup})
		case e.Kind != BlockStored:
			ops = n.appendClassRemoval(e, g, ops)
		case int(n.traits.Classes[g.class].BlockSize) < n.traits.BlockSize:
			ops = n.appendPartStore(b, e, g, ops)
		default:
			ops = n.appendClassStore(b, e, g, ops)
		}
	}
	return ops
}

// fitClasses checks the block sizes of the classes against full attention's.
func (n *Normalizer) fitClasses() {
	for _, c := range n.traits.Classes[:n.traits.Classes.Len()] {
		if size := n.traits.BlockSize; size > 0 && !c.fits(size) {
			n.giveUpClasses()
			return
		}
	}
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
	return n.learnGroup(e.Group, c)
}

// learnGroup is learnClass for a group of class c. A class without a kind or block size is none that can be tracked.
func (n *Normalizer) learnGroup(number uint32, c Class) (late bool) {
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
	n.classGroups[number] = classGroup{uint8(at), state.groups}
	state.groups++
	return late
}

// placeOf returns the place of a block in n.mains. The first call for a batch records the places of all blocks.
func (n *Normalizer) placeOf(ops []Operation, h EngineHash) (at placed, ok bool) {
	if n.placed {
		at, ok = n.places[h]
		return at, ok
	}
	n.placed = true
	if clear(n.places); n.places == nil {
		n.places = map[EngineHash]placed{}
	}
	for i := range n.mains {
		for j := range ops[n.mains[i].op].Stored.Blocks {
			n.places[ops[n.mains[i].op].Stored.Blocks[j].Engine] = placed{i, j}
		}
	}
	at, ok = n.places[h]
	return at, ok
}

// placeSearch finds the places of a store's blocks, which come in the order of the prompt.
type placeSearch struct {
	main  int // full attention's store of the same tokens; -1: there is none
	block int // the next one in it
}

// searchOf returns the search for the blocks of e, which is in b.
func (n *Normalizer) searchOf(b *Batch, e *Event) placeSearch {
	for i := range n.mains {
		full := &b.Events[n.mains[i].event]
		if len(full.Tokens) == len(e.Tokens) && unsafe.SliceData(full.Tokens) == unsafe.SliceData(e.Tokens) &&
			full.HasParent == e.HasParent && full.Parent == e.Parent && full.BlockSize == e.BlockSize {
			return placeSearch{main: i}
		}
	}
	return placeSearch{main: -1}
}

// next returns the place of a block behind the one before.
func (p *placeSearch) next(n *Normalizer, ops []Operation, h EngineHash) (placed, bool) {
	if p.main >= 0 {
		blocks := ops[n.mains[p.main].op].Stored.Blocks
		for i := p.block; i < len(blocks); i++ {
			if blocks[i].Engine == h {
				p.block = i + 1
				return placed{p.main, i}, true
			}
		}
		p.main = -1
	}
	return n.placeOf(ops, h)
}

// appendClassStore appends the stores of the blocks of e that all groups of its class hold now, in stretches without a
// gap. Their size is full attention's or a multiple.
func (n *Normalizer) appendClassStore(b *Batch, e *Event, g classGroup, ops []Operation) []Operation {
	class := &n.classes[g.class]
	var last placed
	stretch := false // the last operation is a stretch that ends with the block at last
	class.stored = class.stored || len(e.Hashes) > 0
	search := n.searchOf(b, e)
	for _, h := range e.Hashes {
		if complete, ok := class.add(h, int(g.member)); !ok {
			n.giveUpClasses()
			return ops
		} else if !complete {
			stretch = false
			continue
		}
		at, ok := search.next(n, ops, h)
		if !ok {
			if ops, ok = n.appendUnplaced(ops); !ok {
				return ops
			}
			stretch = false
			continue
		}
		from := &ops[n.mains[at.main].op].Stored
		n.blocks = append(n.blocks, from.Blocks[at.block])
		if stretch && at == (placed{last.main, last.block + 1}) {
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

// appendUnplaced reports a block that no store of full attention in this batch has. It returns false if the overlap is
// an upper bound from now on. It is not if full attention's own store was dropped.
func (n *Normalizer) appendUnplaced(ops []Operation) ([]Operation, bool) {
	ops = append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: DropUnplaced})
	if !n.droppedMain {
		n.giveUpClasses()
	}
	return ops, n.droppedMain
}

// appendPartStore is appendClassStore for blocks that are smaller than full attention's. What a group keeps ends at the
// ends of full attention's blocks. So a block that full attention does not name lies right before one that it names,
// inside the same block of full attention or right behind the one before. It is stored behind that one, as the first
// part of full attention's block: prompts that go on differently behind it share it.
func (n *Normalizer) appendPartStore(b *Batch, e *Event, g classGroup, ops []Operation) []Operation {
	class, size := &n.classes[g.class], int(e.BlockSize)
	class.stored = class.stored || len(e.Hashes) > 0
	var at placed
	back := n.traits.BlockSize // tokens from the end of the block to the end of full attention's block at
	var media [][]uint64       // of the store at.main
	of := -1                   // the store that media belongs to
	for i := len(e.Hashes) - 1; i >= 0; i-- {
		h := e.Hashes[i]
		if found, ok := n.placeOf(ops, h); ok {
			at, back = found, 0
		} else {
			back += size
		}
		if complete, ok := class.add(h, int(g.member)); !ok {
			n.giveUpClasses()
			return ops
		} else if !complete {
			continue
		}
		placed := back < n.traits.BlockSize
		var block StoredBlock
		var from *Stored
		if placed {
			from = &ops[n.mains[at.main].op].Stored
			block = StoredBlock{Engine: h, Local: from.Blocks[at.block].Local}
		}
		if placed && back > 0 {
			main := &n.mains[at.main]
			full := &b.Events[main.event]
			if of != at.main {
				media, of = n.mediaHashes(full), at.main
			}
			o := HashOptions{BlockSize: n.traits.BlockSize, EAGLE: full.Bigram || len(full.Lookahead) > 0,
				MediaHashes: media}
			block.Local, placed = partHash(full.Tokens, o, at.block, o.BlockSize-back, main.salt)
			placed = placed && full.Local == nil
		}
		if !placed {
			var ok bool
			if ops, ok = n.appendUnplaced(ops); !ok {
				return ops
			}
			continue
		}
		n.blocks = append(n.blocks, block)
		s := Stored{HasParent: from.HasParent, Parent: from.Parent, Tier: ClassTier(int(g.class)),
			Blocks: n.blocks[len(n.blocks)-1:]}
		if at.block > 0 {
			s.HasParent, s.Parent = true, from.Blocks[at.block-1].Engine
		}
		ops = append(ops, Operation{Kind: OpStored, Event: BlockStored, Stored: s})
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

// add counts a physical block of one group, if the class has several. It reports whether the class's groups hold the
// block from now on, and false for ok if a bound is reached.
func (c *classState) add(h EngineHash, member int) (complete, ok bool) {
	if c.groups == 1 {
		return true, true
	}
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
