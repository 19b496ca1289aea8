package kvblock

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"math/rand/v2"

	"github.com/zeebo/xxh3"
)

// Operation is one change to the set of blocks a worker holds, or the report of an event that made none. Kind says
// which of the other fields counts.
type Operation struct {
	Kind    OperationKind
	Stored  Stored
	Removed Removed

	Event  EventKind // of the event behind the operation
	Reason string    // why it was dropped: one of the Drop constants

	// BlockSize is in tokens. When Reason is DropBlockSize, it is the event's own. When Kind is OpCleared, it is the
	// worker's from now on, because the blocks so far were prompt tails of a smaller size; 0: it stays.
	BlockSize uint32
}

// OperationKind tells the operations apart.
type OperationKind uint8

// The kinds of operations. The zero value is none of them.
const (
	OpStored OperationKind = iota + 1
	OpRemoved
	OpCleared
	OpDropped
)

// Reasons for dropping an event or the rest of one, fit for a metric's label. Those up to DropUnlearnedGroup are
// Dynamo's.
const (
	DropIgnored            = "ignored_event"
	DropUnsupportedOwner   = "unsupported_ownership"
	DropUnknownOwner       = "unknown_ownership"
	DropNonLocal           = "non_local_locality"
	DropUnknownMedium      = "unknown_medium"
	DropNonMainAttention   = "non_main_attention_kind"
	DropUnknownKind        = "unknown_kind"
	DropNonMainGroup       = "non_main_attention_group"
	DropUnlearnedGroup     = "unlearned_group_idx"
	DropAmbiguousNamespace = "ambiguous_cache_namespace"

	DropBlockSize     = "block_size_mismatch"  // the event's block size is not the worker's
	DropShortTokens   = "short_token_ids"      // fewer tokens than the blocks need; blocks before that are kept
	DropDuplicateHash = "duplicate_block_hash" // a hash twice in one store, or equal to its parent
	// media told in a way that we cannot hash; blocks before them are kept
	DropMediaInfos     = "unsupported_block_mm_infos"
	DropNamespacesFull = "cache_namespaces_full"  // maxNamespaced is reached
	DropUnnamedAdapter = "unnamed_adapter"        // an adapter's number without its name: old engines, with LoRA
	DropLocalSalted    = "unsalted_tokens_hashes" // local hashes made by the publisher, for a salted prompt
	// a hybrid model's prompt tail, shorter than a block; or its removal
	DropPromptTail = "prompt_tail"
)

// DropReasons are all of them but DropIgnored, which is that of events that say nothing of blocks.
var DropReasons = []string{
	DropUnsupportedOwner, DropUnknownOwner, DropNonLocal, DropUnknownMedium,
	DropNonMainAttention, DropUnknownKind, DropNonMainGroup, DropUnlearnedGroup,
	DropAmbiguousNamespace, DropBlockSize, DropShortTokens, DropDuplicateHash,
	DropMediaInfos, DropNamespacesFull, DropUnnamedAdapter, DropLocalSalted, DropPromptTail,
}

// maxNamespaced bounds the blocks of one worker whose cache namespace is remembered, and so the names too. A device
// holds far fewer.
const maxNamespaced = 1 << 22

// Normalizer turns one worker's events into operations, as Dynamo's normaliser does: it drops what is no main-attention
// block of this worker, and hashes the tokens of what is. It remembers what later events leave out (which group is of
// which kind, which block belongs to which cache namespace), so give it every event, in order.
//
// Not done yet: rewriting image placeholder tokens to pad values. Blocks with media are hashed with the media hashes
// behind the tokens, so they match only requests hashed the same way.
//
// A Normalizer belongs to one worker and one goroutine at a time; it is a value of its caller, package kvblock keeps
// none.
//
// Source: dynamo-kv-router 1.6.1, zmq_wire.
type Normalizer struct {
	traits     Traits
	groups     map[uint32]specKind
	namespaces namespaceTable
	limit      int // of len(namespaces)

	uncertainSize bool   // traits.BlockSize may be that of a prompt's tail
	finestOther   uint32 // the smallest block size of a group beside full attention; 0: no such group is known
	tails         map[EngineHash]promptTail
	tailLimit     int // of len(tails)

	*buffers // the batch's, while it is normalized; else nil
}

// buffers are what Normalize fills. They are a Batch's and not a Normalizer's, because there is a Normalizer for each
// of thousands of workers, and a Batch for each message that is read just now.
type buffers struct {
	blocks []StoredBlock
	local  []LocalHash
	media  [][]uint64
	seen   hashSet
	window []Token
}

// Traits are what a worker's events say about its blocks as such. Whoever asks the index about the worker must cut
// prompts the same way.
type Traits struct {
	// BlockSize is in tokens, 0 while it is not known.
	BlockSize int
	// EAGLE says that blocks are hashed over windows one token wider, see HashOptions.
	EAGLE bool
	// UpperBound says that the worker may hold less of a prompt than its announced blocks: layers of the model attend
	// to a window, or keep a state, whose blocks come and go on their own; or blocks depend on more tokens behind them
	// than the one that EAGLE stands for.
	UpperBound bool
}

// NewNormalizer returns a Normalizer for a worker with this block size, in tokens. Below 1 it is not known yet, and is
// taken from the worker's first store that passes the filter.
func NewNormalizer(blockSize int) *Normalizer {
	return &Normalizer{
		traits:     Traits{BlockSize: max(blockSize, 0)},
		groups:     map[uint32]specKind{},
		namespaces: namespaceTable{},
		limit:      maxNamespaced,
		tailLimit:  maxPromptTails,
	}
}

// Traits returns what is known by now.
func (n *Normalizer) Traits() Traits { return n.traits }

// Reset forgets what the events told, except the block size: the next store may be a prompt's tail, which would tell a
// wrong one.
func (n *Normalizer) Reset() {
	*n = Normalizer{
		traits:        Traits{BlockSize: n.traits.BlockSize},
		groups:        map[uint32]specKind{},
		namespaces:    namespaceTable{},
		limit:         n.limit,
		uncertainSize: n.uncertainSize,
		finestOther:   n.finestOther,
		tailLimit:     n.tailLimit,
	}
}

// Normalize appends the operations of b's events to ops, in order. Most events make one; a store that turns bad in the
// middle makes two, what was good and why the rest was dropped; an event without blocks makes none.
//
// The operations' slices belong to b: use them before its next DecodeBatch or Normalize.
func (n *Normalizer) Normalize(b *Batch, ops []Operation) []Operation {
	n.buffers = &b.buffers
	n.blocks = n.blocks[:0]
	if n.traits.BlockSize == 0 {
		n.noteOtherGroups(b)
	}
	for i := range b.Events {
		e := &b.Events[i]
		tier, ns, reason := n.filter(e)
		if reason != "" {
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: reason})
			continue
		}
		switch e.Kind {
		case BlockStored:
			ops = n.stored(e, tier, ns, ops)
		case BlockRemoved:
			hashes := e.Hashes
			if len(n.tails) > 0 && tier == TierDevice {
				hashes = n.removeTails(hashes)
			}
			if len(hashes) > 0 {
				ops = append(
					ops,
					Operation{Kind: OpRemoved, Event: e.Kind, Removed: Removed{Hashes: hashes, Tier: tier}},
				)
			}
			if len(hashes) < len(e.Hashes) {
				ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropPromptTail})
			}
		case AllBlocksCleared:
			ops = append(ops, Operation{Kind: OpCleared, Event: e.Kind})
		}
	}
	n.buffers = nil
	return ops
}

// specKind is a kind of attention, as far as it matters here.
type specKind uint8

const (
	specMain    specKind = iota + 1 // its blocks cover the prompt from the start, as overlap needs
	specPassing                     // known, and not so: they are let go while those of specMain stay
	specAside                       // known, and of no matter to overlap
	specUnknown
)

func specKindOf(name []byte) specKind {
	switch string(name) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return specMain
	case "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention":
		return specPassing
	case "encoder_only_attention", "cross_attention":
		return specAside
	}
	return specUnknown
}

// tierOf returns the tier of a medium as engines name it.
func tierOf(medium []byte) (Tier, bool) {
	switch string(medium) {
	case "", "GPU", "DEVICE":
		return TierDevice, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return TierHostPinned, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE":
		return TierDisk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return TierExternal, true
	}
	return 0, false
}

// filter decides whether e changes what the worker holds, in which tier, and in which namespace a store's blocks are. A
// reason other than "" drops it. The order of the rules is Dynamo's and shows: a rule that drops keeps the later ones
// from learning.
func (n *Normalizer) filter(e *Event) (tier Tier, ns namespace, reason string) {
	if e.Ownership != nil {
		if string(e.Ownership) == "kvcr" {
			return tier, ns, DropUnsupportedOwner
		}
		return tier, ns, DropUnknownOwner
	}
	if e.Kind == Ignored {
		return tier, ns, DropIgnored
	}
	if e.Locality != nil && string(e.Locality) != "LOCAL" {
		return tier, ns, DropNonLocal
	}
	tier, ok := tierOf(e.Medium)
	if !ok {
		return tier, ns, DropUnknownMedium
	}
	if tier == TierDisk || tier == TierExternal {
		// These events carry neither group nor namespace, and must not teach us any.
		return tier, announcedNamespace(e), ""
	}
	if reason := n.filterGroup(e); reason != "" {
		return tier, ns, reason
	}
	switch e.Kind {
	case BlockStored:
		ns, reason = n.namespaceStore(e)
	case BlockRemoved:
		for _, h := range e.Hashes {
			n.namespaces.remove(h)
		}
	case AllBlocksCleared:
		clear(n.namespaces)
		clear(n.tails)
	}
	return tier, ns, reason
}

func (n *Normalizer) filterGroup(e *Event) (reason string) {
	if e.SpecKind != nil {
		k := specKindOf(e.SpecKind)
		if e.Kind == BlockStored && e.HasGroup && (len(n.groups) < maxGroups || n.groups[e.Group] != 0) {
			n.groups[e.Group] = k
		}
		switch k {
		case specMain:
			return ""
		case specPassing:
			n.traits.UpperBound = true
			return DropNonMainAttention
		case specAside:
			return DropNonMainAttention
		}
		return DropUnknownKind
	}
	if !e.HasGroup {
		return ""
	}
	switch n.groups[e.Group] {
	case specMain:
		return ""
	case specPassing, specAside:
		return DropNonMainGroup
	case specUnknown:
		return DropUnknownKind
	}
	if e.Group == 0 {
		return ""
	}
	return DropUnlearnedGroup
}

// maxGroups bounds the groups learned; real models have a handful.
const maxGroups = 1024

// namespaceStore settles the cache namespace of a store, and remembers it for the store's blocks.
//
// A listener that joins in the middle of a chain cannot tell a salted parent from a plain one, and takes it as plain,
// as Dynamo does.
func (n *Normalizer) namespaceStore(e *Event) (ns namespace, reason string) {
	ns = announcedNamespace(e)
	if !ns.salted && e.HasParent {
		ns = n.namespaces[e.Parent]
	}
	if ns.ambiguous {
		return ns, DropAmbiguousNamespace
	}
	if ns.salted && len(n.namespaces)+len(e.Hashes) > n.limit {
		return ns, DropNamespacesFull
	}
	if ns.salted || len(n.namespaces) > 0 {
		for _, h := range e.Hashes {
			n.namespaces.add(h, ns)
		}
	}
	return ns, ""
}

// stored converts a store that passed the filter.
func (n *Normalizer) stored(e *Event, tier Tier, ns namespace, ops []Operation) []Operation {
	drop := func(reason string) []Operation {
		return append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: reason})
	}
	if len(e.Hashes) == 0 {
		return ops
	}
	if n.duplicate(e) {
		return drop(DropDuplicateHash)
	}
	if tier == TierDevice && n.learnBlockSize(e) {
		ops = append(ops, Operation{Kind: OpCleared, Event: BlockStored, BlockSize: e.BlockSize})
	}
	if n.traits.BlockSize == 0 || uint64(e.BlockSize) != uint64(n.traits.BlockSize) {
		if n.isPromptTail(e, tier) {
			return drop(DropPromptTail)
		}
		return append(
			ops,
			Operation{Kind: OpDropped, Event: BlockStored, Reason: DropBlockSize, BlockSize: e.BlockSize},
		)
	}
	if len(n.tails) > 0 {
		for _, h := range e.Hashes {
			delete(n.tails, h) // no engine uses a hash for both; if one does, the block's removal must not be ignored
		}
	}
	if e.HasLoRAID && len(e.LoRAName) == 0 && e.Local == nil {
		return drop(DropUnnamedAdapter)
	}
	if e.Local != nil {
		if ns.salted {
			return drop(DropLocalSalted)
		}
		n.local = append(n.local[:0], e.Local[:min(len(e.Local), len(e.Hashes))]...)
	} else {
		n.hash(e, tier, ns)
		if e.Media {
			n.local = n.local[:min(len(n.local), e.MediaBlock)]
		}
	}
	if len(n.local) > 0 {
		at := len(n.blocks)
		for i, l := range n.local {
			n.blocks = append(n.blocks, StoredBlock{Engine: e.Hashes[i], Local: l})
		}
		ops = append(ops, Operation{Kind: OpStored, Event: BlockStored, Stored: Stored{
			HasParent: e.HasParent, Parent: e.Parent, Blocks: n.blocks[at:len(n.blocks):len(n.blocks)], Tier: tier,
		}})
	}
	if len(n.local) < len(e.Hashes) {
		if e.Media {
			return drop(DropMediaInfos)
		}
		return drop(DropShortTokens)
	}
	return ops
}

// hash makes the local hashes of a store's blocks, as many as its tokens are enough for.
func (n *Normalizer) hash(e *Event, tier Tier, ns namespace) {
	size := n.traits.BlockSize
	o := HashOptions{BlockSize: size, EAGLE: e.Bigram || len(e.Lookahead) > 0, MediaHashes: n.mediaHashes(e)}
	if tier == TierDevice {
		n.traits.EAGLE = o.EAGLE
		n.traits.UpperBound = n.traits.UpperBound || len(e.Lookahead) > 1
	}
	salt := o.Salt()
	if len(e.LoRAName) > 0 {
		salt += xxh3.Hash(e.LoRAName) // as HashOptions.Salt does
	}
	if ns.salted {
		salt += ns.salt
	}
	window := len(e.Hashes) * size // cannot overflow: both come from 32 bits
	tokens := e.Tokens[:min(len(e.Tokens), window)]
	switch {
	case e.Bigram:
		tokens = e.Tokens[:min(len(e.Tokens), window+1)]
	case o.EAGLE && len(tokens) == window:
		n.window = append(append(n.window[:0], tokens...), e.Lookahead[0])
		tokens = n.window
	}
	n.local = appendSalted(n.local[:0], tokens, o, salt)
}

// duplicate reports whether a hash occurs twice in e, its parent included.
func (n *Normalizer) duplicate(e *Event) bool {
	if len(e.Hashes) == 1 {
		return e.HasParent && e.Parent == e.Hashes[0]
	}
	seen := &n.seen
	if len(e.Hashes) > 1<<12 {
		seen = new(hashSet) // too large to be kept for events that will hardly ever be so long
	}
	seen.begin(len(e.Hashes) + 1)
	if e.HasParent {
		seen.add(e.Parent)
	}
	for _, h := range e.Hashes {
		if !seen.add(h) {
			return true
		}
	}
	return false
}

// hashSet is a set of hashes that is made anew for each event, without being cleared. The zero value is ready for
// begin.
type hashSet struct {
	slots []hashSlot // length 0 or a power of two, at most half of them used
	round uint64     // a slot of another round is empty
	seed  uint64     // odd; random, so that no engine can send hashes that collide
	shift int        // 64 - log2(len(slots))
}

type hashSlot struct {
	hash  EngineHash
	round uint64
}

// begin empties the set and makes room for so many hashes.
func (s *hashSet) begin(room int) {
	if 2*room > len(s.slots) {
		size := bits.Len(uint(2*room - 1))
		s.slots, s.shift = make([]hashSlot, 1<<size), 64-size
		s.seed = rand.Uint64() | 1
	}
	s.round++
}

// add reports whether the hash is new, and adds it.
func (s *hashSet) add(h EngineHash) bool {
	mask := len(s.slots) - 1
	for i := int(uint64(h) * s.seed >> s.shift); ; i++ {
		switch slot := &s.slots[i&mask]; {
		case slot.round != s.round:
			*slot = hashSlot{h, s.round}
			return true
		case slot.hash == h:
			return false
		}
	}
}

// saltPrefix marks the cache namespaces that Dynamo's vLLM worker passes through the engine. Source: dynamo-kv-router
// 1.6.1, zmq_wire (extra_keys).
const saltPrefix = "dynamo-cache-salt:"

// announcedNamespace returns the cache namespace that a store itself names: in a field of its own, or else in the extra
// keys of its first block.
func announcedNamespace(e *Event) namespace {
	name := e.CacheSalt
	if len(name) == 0 {
		name = namespaceInExtraKeys(e)
	}
	if len(name) == 0 {
		return namespace{}
	}
	return namespace{salted: true, salt: xxh3.HashSeed(name, namespaceSeed)}
}

// namespaceInExtraKeys returns the cache namespace in a store's extra keys, nil if there is none. A block's keys are,
// in this order: the adapter's name; what stands for each of its media, as [identifier, offset] or (before vLLM 0.19)
// an identifier; in a prompt's first block the cache salt; digests of embeddings, as bytes. Dynamo's worker marks its
// salts. Stock vLLM does not, so that its salt is the text that is nothing else. A salt may be spelled like the
// adapter, whose name is therefore skipped once.
//
// Source: vllm/v1/core/kv_cache_utils.py (generate_block_hash_extra_keys).
func namespaceInExtraKeys(e *Event) (name []byte) {
	lora := e.LoRAName
	eachExtraKey(e.ExtraKeys, func(block int, item []byte) bool {
		if block > 0 {
			return false
		}
		text := textOf(item)
		switch rest, marked := bytes.CutPrefix(text, []byte(saltPrefix)); {
		case len(text) == 0:
		case len(lora) > 0 && bytes.Equal(text, lora):
			lora = nil
		case marked && len(rest) > 0:
			name = rest
			return false
		case !e.HasParent && !isDigest(text):
			name = text
		}
		return true
	})
	return name
}

// textOf returns an extra key that is a text, nil for another.
func textOf(item []byte) []byte {
	s := scanner{b: item}
	if s.peek() != kindString {
		return nil
	}
	text, _ := s.text("extra key") // it was read before
	return text
}

// mediaHashes returns what tells e's blocks from blocks of the same tokens, beside adapter and namespace; nil if there
// is nothing: the hashes of their media, and digests of embeddings.
//
// The engine's own identifiers are hashed too, where Dynamo passes over them and takes such blocks for text.
func (n *Normalizer) mediaHashes(e *Event) [][]uint64 {
	if len(e.ExtraKeys) == 0 {
		return nil
	}
	for i := range n.media {
		n.media[i] = n.media[i][:0]
	}
	found, at := false, -1
	var lora []byte // the adapter's name, until it was seen among this block's keys
	eachExtraKey(e.ExtraKeys, func(block int, item []byte) bool {
		if block >= len(e.Hashes) {
			return false
		}
		if block != at {
			at, lora = block, e.LoRAName
		}
		h, ok := uint64(0), false
		s := scanner{b: item}
		switch s.peek() {
		case kindArray:
			if size, err := s.array("extra key"); err == nil && size == 2 {
				if id := textOf(item[s.p:]); len(id) > 0 {
					h, ok = mediaHash(id), true
				}
			}
		case kindBytes:
			digest, _ := s.bytes("extra key") // it was read before
			h, ok = xxh3.Hash(digest), true
		case kindString:
			text := textOf(item)
			switch {
			case len(lora) > 0 && bytes.Equal(text, lora):
				lora = nil
			case isDigest(text):
				h, ok = mediaHash(text), true
			case block == 0 && !e.HasParent, bytes.HasPrefix(text, []byte(saltPrefix)):
				// the cache salt
			case len(text) > 0:
				h, ok = mediaHash(text), true
			}
		}
		if ok {
			for len(n.media) <= block {
				n.media = append(n.media, nil)
			}
			n.media[block] = append(n.media[block], h)
			found = true
		}
		return true
	})
	if !found {
		return nil
	}
	return n.media
}

// mediaHash turns an identifier of an image or the like into a number. Dynamo's worker makes them of the number, 16
// hexadecimal digits and 48 zeros.
//
// Source: dynamo-kv-router 1.6.1 (hash_mm_identifier).
func mediaHash(id []byte) uint64 {
	if !isDigest(id) {
		return xxh3.Hash(id)
	}
	var b [8]byte
	_, _ = hex.Decode(b[:], id[:16]) // they are digits
	return binary.BigEndian.Uint64(b[:])
}

// isDigest says whether a text is 64 hexadecimal digits, as identifiers of media are unless the client chose them.
func isDigest(text []byte) bool {
	if len(text) != 64 {
		return false
	}
	for _, c := range text {
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F') {
			return false
		}
	}
	return true
}

// eachExtraKey calls yield with every item of every block's extra keys until it returns false. The array was checked
// when it was decoded; what does not look like extra keys is passed over.
func eachExtraKey(extraKeys []byte, yield func(block int, item []byte) bool) {
	if len(extraKeys) == 0 {
		return
	}
	s := scanner{b: extraKeys}
	blocks, err := s.array("extra_keys")
	if err != nil {
		return
	}
	for block := range blocks {
		if s.peek() != kindArray {
			if s.skip() != nil {
				return
			}
			continue
		}
		items, err := s.array("extra_keys")
		if err != nil {
			return
		}
		for range items {
			at := s.p
			if s.skip() != nil || !yield(block, s.b[at:s.p]) {
				return
			}
		}
	}
}

// namespaceTable remembers the cache namespace of each block of one worker that is in one, as the salt it adds: names
// can be long, and clients choose them. Plain blocks are not kept: almost all are plain.
type namespaceTable map[EngineHash]namespace

// namespace is what is known of one block's. The zero value is the plain one, which is in no table.
type namespace struct {
	salted    bool
	ambiguous bool // blocks of several namespaces, or plain ones, go by this hash
	salt      uint64
}

// add records that block h was stored in ns. If it is known to be in another, it is ambiguous from now on.
func (t namespaceTable) add(h EngineHash, ns namespace) {
	old, known := t[h]
	switch {
	case known && old != ns:
		t[h] = namespace{ambiguous: true}
	case !known && ns.salted:
		t[h] = ns
	}
}

// remove forgets block h, unless it is ambiguous: the other block of that hash may still be there.
func (t namespaceTable) remove(h EngineHash) {
	if !t[h].ambiguous {
		delete(t, h)
	}
}
