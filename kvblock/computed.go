package kvblock

import (
	"math"
	"slices"
	"unsafe"
)

// A model without full attention has only layer groups that keep a part of a prompt. No store of full attention in the
// batch then says which blocks a group's store lists. The engine hashes do: kvepp computes those of all blocks of the
// stretch (enginehash.go), and finds the listed ones among them. For the first block of a stretch it needs the whole
// digest of the block before it. Events have only eight bytes of that. So it remembers the digests of the blocks that
// the worker holds, and of the last blocks of the latest stretches, behind which a running request goes on.
//
// Which seed and serialisation the engine uses shows when the hashes that one of them yields are those in the events.

// maxRecentDigests is how many last blocks of stretches a Normalizer remembers, besides held blocks: at least one for
// each request that an engine runs at once.
const maxRecentDigests = 1 << 11

// The engine's way of hashing counts as unknown after this many stores at the beginning of a prompt that list no
// computed hash, or after that many that list no block at all and so say nothing until the stretch behind them comes.
// Prompts with a salt that is not in their events are among both.
const (
	maxForeignStores = 8
	maxEmptyStores   = 256
)

// maxIdentified bounds the blocks of a store by which the engine's way of hashing is found, because each way is tried.
const maxIdentified = 1 << 12

// DigestBytes is about the memory of a digest that is remembered, in bytes.
const DigestBytes = 112

// computedHashes is a Normalizer's state for a worker without full attention.
type computedHashes struct {
	of      *EngineHashes // nil: hashes are not computed
	scheme  int8          // index in of.schemes, if known
	known   bool
	unknown bool // no scheme is the engine's
	foreign int  // stores at the beginning of a prompt without a computed hash, while no scheme is known
	empty   int  // and those without a block

	digests map[EngineHash]blockDigest
	recent  []EngineHash // a ring of maxRecentDigests
	oldest  int          // its oldest one, once it is full
}

// blockDigest is a block whose digest is remembered.
type blockDigest struct {
	digest digest
	seq    SequenceHash
	salt   uint64 // of its prompt's local hashes
	depth  uint32 // blocks before it in the prompt
	copies uint16 // physical blocks of all groups that the worker holds
	recent uint8  // its number in the ring
	scheme int8
}

// stretch has the blocks of a store's tokens, as computed.
type stretch struct {
	ok        bool
	hasParent bool
	parent    EngineHash
	tokens    []Token // whose they are

	scheme  int8
	salt    uint64
	depth   uint32 // of its first block
	before  SequenceHash
	blocks  []StoredBlock
	seqs    []SequenceHash
	digests []digest
}

// ComputeHashes makes n compute engine hashes in these ways for a model without full attention. Call it before the
// first event.
func (n *Normalizer) ComputeHashes(h *EngineHashes) { n.computed.of = h }

// HashesUnknown reports whether the engine computes its block hashes in none of the ways that n knows, so that n cannot
// tell which blocks a model without full attention stores.
func (n *Normalizer) HashesUnknown() bool { return n.computed.unknown }

// Digests returns how many digests n remembers. They are those of held blocks, and at most a few thousand others.
func (n *Normalizer) Digests() int { return len(n.computed.digests) }

// MaxOtherDigests is how many digests of blocks that the worker does not hold a Normalizer remembers.
const MaxOtherDigests = maxRecentDigests

// KeepDigests forgets the digests of the blocks that the index does not hold any more, as held says. Stores behind them
// are then not placed, like those behind an evicted block of full attention.
func (n *Normalizer) KeepDigests(held func(EngineHash) bool) {
	for h, d := range n.computed.digests {
		if d.copies > 0 && !held(h) {
			d.copies = 0
			n.computed.put(h, d)
		}
	}
}

// clear forgets all digests.
func (c *computedHashes) clear() { c.digests, c.recent, c.oldest = nil, nil, 0 }

// put notes d, which may be none any more.
func (c *computedHashes) put(h EngineHash, d blockDigest) {
	if d.copies == 0 && d.recent == 0 {
		delete(c.digests, h)
		return
	}
	if c.digests == nil {
		c.digests = map[EngineHash]blockDigest{}
	}
	c.digests[h] = d
}

// remember keeps d as one of the recent ones.
func (c *computedHashes) remember(h EngineHash, d blockDigest) {
	if old, ok := c.digests[h]; ok {
		d.copies, d.recent = old.copies, old.recent
	}
	if d.recent == math.MaxUint8 {
		return // it stays for long enough
	}
	d.recent++
	c.put(h, d)
	if len(c.recent) < maxRecentDigests {
		c.recent = append(c.recent, h)
		return
	}
	old := c.recent[c.oldest]
	c.recent[c.oldest] = h
	c.oldest = (c.oldest + 1) % maxRecentDigests
	if o, ok := c.digests[old]; ok && o.recent > 0 {
		o.recent--
		c.put(old, o)
	}
}

// remove discounts a physical block of each hash.
func (c *computedHashes) remove(hashes []EngineHash) {
	for _, h := range hashes {
		if d, ok := c.digests[h]; ok && d.copies > 0 {
			d.copies--
			c.put(h, d)
		}
	}
}

// identify notes that the engine computes its hashes in this way.
func (c *computedHashes) identify(scheme int8) {
	if c.known {
		return
	}
	c.known, c.scheme = true, scheme
	for h, d := range c.digests {
		if d.scheme != scheme {
			delete(c.digests, h)
		}
	}
}

// withoutFull reports whether the worker's model counts as one without full attention: it announces other groups, and
// none of full attention so far. It notes that it does.
func (n *Normalizer) withoutFull() bool {
	if n.traits.WithoutFull || n.computed.of == nil || n.computed.unknown || n.traits.UpperBound {
		return n.traits.WithoutFull
	}
	if len(n.mains) > 0 || n.droppedMain {
		return false
	}
	for _, k := range n.groups {
		if k == specMain {
			return false
		}
	}
	n.traits.WithoutFull = true
	return true
}

// endWithoutFull notes a store of full attention in a worker that counted as one without it: its groups had not all
// stored blocks. It appends the removal of all blocks.
func (n *Normalizer) endWithoutFull(e *Event, ops []Operation) []Operation {
	n.finestOther = uint32(n.traits.BlockSize)
	n.traits.WithoutFull, n.traits.BlockSize = false, 0
	n.traits.Classes, n.classes, n.classGroups = Classes{}, [MaxClasses]classState{}, nil
	n.computed = computedHashes{of: n.computed.of}
	return append(ops, Operation{Kind: OpCleared, Event: BlockStored, BlockSize: e.BlockSize})
}

// fitComputed checks the block sizes of a worker without full attention, which must be equal, and takes them as the
// worker's.
func (n *Normalizer) fitComputed(ops []Operation) []Operation {
	for _, c := range n.traits.Classes[:n.traits.Classes.Len()] {
		size := int(c.BlockSize)
		switch {
		case n.traits.BlockSize == 0 && size <= maxComputedBlock:
			n.traits.BlockSize = size
		case n.traits.BlockSize != size:
			n.giveUpClasses()
			return append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: DropBlockSize,
				BlockSize: c.BlockSize})
		}
	}
	return ops
}

// appendComputedStore appends the stores of the blocks of e that all groups of its class hold now, in stretches without
// a gap.
func (n *Normalizer) appendComputedStore(e *Event, g classGroup, ops []Operation) []Operation {
	class := &n.classes[g.class]
	class.stored = class.stored || len(e.Hashes) > 0
	if len(e.Lookahead) > 0 || e.Bigram || e.Local != nil {
		n.giveUpClasses() // hashes of more than the block, or tokens that are not known
		return append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: DropNonMainAttention})
	}
	if !n.computeStretch(e) {
		if n.computed.unknown {
			n.giveUpClasses()
		}
		for range e.Hashes {
			ops = append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: DropUnplaced})
		}
		return ops
	}
	x := &n.stretch
	if last := len(x.blocks) - 1; last >= 0 {
		n.computed.remember(x.blocks[last].Engine, x.digestOf(last))
	}
	at, previous := 0, -2 // the block, and the last one of the latest operation
	for _, h := range e.Hashes {
		for x.blocks[at].Engine != h {
			at++ // computeStretch has found it
		}
		d := x.digestOf(at)
		if old, ok := n.computed.digests[h]; ok {
			d = old
		}
		complete, ok := class.add(h, int(g.member))
		if !ok || d.copies == math.MaxUint16 {
			n.giveUpClasses()
			return ops
		}
		d.copies++
		n.computed.put(h, d)
		if !complete {
			previous = -2
			continue
		}
		if at == previous+1 {
			s := &ops[len(ops)-1].Stored
			s.Blocks = x.blocks[at-len(s.Blocks) : at+1]
		} else {
			s := Stored{HasParent: x.hasParent, Parent: x.parent, Tier: ClassTier(int(g.class)),
				Blocks: x.blocks[at : at+1]}
			place := Place{Before: x.before, Depth: int(x.depth) + at}
			if at > 0 {
				s.HasParent, s.Parent, place.Before = true, x.blocks[at-1].Engine, x.seqs[at-1]
			}
			n.stretchPlaces = append(n.stretchPlaces, place)
			s.Place = &n.stretchPlaces[len(n.stretchPlaces)-1]
			ops = append(ops, Operation{Kind: OpStored, Event: BlockStored, Stored: s})
		}
		previous = at
	}
	return ops
}

// digestOf returns what is remembered of block i.
func (x *stretch) digestOf(i int) blockDigest {
	return blockDigest{digest: x.digests[i], seq: x.seqs[i], salt: x.salt, depth: x.depth + uint32(i), scheme: x.scheme}
}

// computeStretch sets n.stretch to the blocks of e's tokens. It reports false if they cannot be computed: the block
// before them is not known, or they are of an adapter or have media; or if e lists another block.
func (n *Normalizer) computeStretch(e *Event) bool {
	x, c := &n.stretch, &n.computed
	if x.hasParent == e.HasParent && x.parent == e.Parent && len(e.Tokens) > 0 && len(x.tokens) == len(e.Tokens) &&
		unsafe.SliceData(x.tokens) == unsafe.SliceData(e.Tokens) { // another group's store of the same stretch
		return x.ok && x.lists(e.Hashes)
	}
	x.ok, x.hasParent, x.parent, x.tokens = false, e.HasParent, e.Parent, e.Tokens
	salt, ok := n.placeStretch(e)
	if !ok {
		return false
	}
	if c.known {
		before := &c.of.schemes[c.scheme].root
		if parent := c.digests[e.Parent].digest; e.HasParent {
			before = &parent
		}
		n.hashStretch(c.scheme, before, e.Tokens, salt)
		x.ok = true // its last block may be the next stretch's parent, and e may list none
		return x.lists(e.Hashes)
	}
	if len(n.local) > maxIdentified {
		return false
	}
	for i := range c.of.schemes {
		n.hashStretch(int8(i), &c.of.schemes[i].root, e.Tokens, salt)
		if last := len(x.blocks) - 1; last >= 0 && len(e.Hashes) == 0 {
			c.remember(x.blocks[last].Engine, x.digestOf(last)) // the next stretch's parent shows which scheme is right
		} else if len(e.Hashes) > 0 && x.lists(e.Hashes) {
			c.identify(int8(i))
			x.ok = true
			return true
		}
	}
	if len(e.Hashes) > 0 {
		c.foreign++
	} else {
		c.empty++
	}
	c.unknown = c.foreign >= maxForeignStores || c.empty >= maxEmptyStores
	return false
}

// placeStretch sets what n.stretch has besides the engine hashes, and n.local to its local hashes. It returns the cache
// salt of a prompt's first block; false if the stretch cannot be computed.
func (n *Normalizer) placeStretch(e *Event) (salt []byte, ok bool) {
	x, c := &n.stretch, &n.computed
	if e.HasLoRAID || len(e.LoRAName) > 0 || e.Media || int(e.BlockSize) != n.traits.BlockSize {
		return nil, false
	}
	x.before, x.depth, x.salt = 0, 0, hashSeed
	if e.HasParent {
		d, known := c.digests[e.Parent]
		if !known {
			return nil, false
		}
		c.identify(d.scheme) // its hash was computed before it was in an event
		x.before, x.depth, x.salt = d.seq, d.depth+1, d.salt
	}
	salt, plain := saltOf(e)
	if !plain || len(salt) > 0 && e.HasParent {
		return nil, false
	}
	if len(salt) > 0 {
		x.salt += n.announcedNamespace(e).salt
	}
	n.local = appendSalted(n.local[:0], e.Tokens, HashOptions{BlockSize: n.traits.BlockSize}, x.salt)
	x.seqs = x.seqs[:0]
	for i, l := range n.local {
		switch {
		case i > 0:
			x.seqs = append(x.seqs, NextSequenceHash(x.seqs[i-1], l))
		case e.HasParent:
			x.seqs = append(x.seqs, NextSequenceHash(x.before, l))
		default:
			x.seqs = append(x.seqs, FirstSequenceHash(l))
		}
	}
	return salt, true
}

// hashStretch sets the digests and blocks of n.stretch, whose local hashes are in n.local.
func (n *Normalizer) hashStretch(scheme int8, before *digest, tokens []Token, salt []byte) {
	x, size := &n.stretch, n.traits.BlockSize
	x.scheme, x.digests = scheme, slices.Grow(x.digests[:0], len(n.local))
	x.blocks = make([]StoredBlock, 0, len(n.local)) // operations refer to those of an earlier stretch
	for i, l := range n.local {
		var d digest
		d, n.serialised = n.computed.of.schemes[scheme].next(n.serialised, before, tokens[i*size:(i+1)*size], salt)
		x.digests = append(x.digests, d)
		x.blocks = append(x.blocks, StoredBlock{Engine: d.announced(), Local: l})
		before, salt = &x.digests[i], nil
	}
}

// lists reports whether all these hashes are blocks of x, in their order.
func (x *stretch) lists(hashes []EngineHash) bool {
	at := 0
	for _, h := range hashes {
		for at < len(x.blocks) && x.blocks[at].Engine != h {
			at++
		}
		if at == len(x.blocks) {
			return false
		}
		at++
	}
	return true
}

// saltOf returns the cache salt in a store's extra keys; nil if there is none. plain is false if they have more than
// the salt of a prompt's first block.
func saltOf(e *Event) (salt []byte, plain bool) {
	plain = true
	items := 0
	eachExtraKey(e.ExtraKeys, func(block int, item []byte) bool {
		items++
		salt = textOf(item)
		plain = block == 0 && items == 1 && len(salt) > 0
		return plain
	})
	if len(e.CacheSalt) > 0 {
		return nil, false // vLLM sends none
	}
	return salt, plain
}
