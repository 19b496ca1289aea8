package kvblock

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"math/rand/v2"

	"github.com/zeebo/xxh3"
)

// Operation is one change to the set of blocks that a worker holds, or a report of an event that changed nothing. Kind
// says which of the other fields are valid.
type Operation struct {
	Kind    OperationKind
	Stored  Stored
	Removed Removed

	Event  EventKind // the kind of the event that caused the operation
	Reason string    // of OpDropped: one of the Drop constants

	// BlockSize is in tokens. When Reason is DropBlockSize, it is the event's. When Kind is OpCleared, it is the
	// worker's new block size, because the earlier blocks were prompt tails of a smaller size; 0 means unchanged.
	BlockSize uint32
}

// OperationKind is the kind of an Operation.
type OperationKind uint8

// The kinds of operations. The zero value is not a valid kind.
const (
	OpStored OperationKind = iota + 1
	OpRemoved
	OpCleared
	OpDropped
)

// Reasons for dropping an event or its remainder; they are values of a metric label. Those up to DropUnlearnedGroup are
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
	DropShortTokens   = "short_token_ids"      // fewer tokens than the blocks need; the complete blocks are kept
	DropDuplicateHash = "duplicate_block_hash" // a hash occurs twice in one store, or equals its parent
	// media in a form that kvepp cannot hash; the blocks before them are kept
	DropMediaInfos     = "unsupported_block_mm_infos"
	DropNamespacesFull = "cache_namespaces_full"  // maxNamespaced is reached
	DropUnnamedAdapter = "unnamed_adapter"        // an adapter's number without its name, from old engines with LoRA
	DropLocalSalted    = "unsalted_tokens_hashes" // the publisher's own local hashes, for a salted prompt
	// a hybrid model's prompt tail, shorter than a block, or its removal
	DropPromptTail = "prompt_tail"
	// a store in a tier below the device in blocks of another size than the device's, which says nothing about these
	DropTierBlockSize = "tier_block_size"
	// a window's, chunk's or state's block that full attention does not store in the same batch, so that its tokens are
	// not known
	DropUnplaced = "unplaced_block"
)

// DropReasons are all reasons except DropIgnored, whose events say nothing about blocks.
var DropReasons = []string{
	DropUnsupportedOwner, DropUnknownOwner, DropNonLocal, DropUnknownMedium,
	DropNonMainAttention, DropUnknownKind, DropNonMainGroup, DropUnlearnedGroup,
	DropAmbiguousNamespace, DropBlockSize, DropShortTokens, DropDuplicateHash,
	DropMediaInfos, DropNamespacesFull, DropUnnamedAdapter, DropLocalSalted, DropPromptTail,
	DropTierBlockSize, DropUnplaced,
}

// maxNamespaced bounds the blocks of one worker whose cache namespace is remembered. A device holds far fewer.
const maxNamespaced = 1 << 22

// Normalizer turns one worker's events into operations, as Dynamo's normaliser does. It drops events that are not about
// main-attention blocks of this worker, and hashes the tokens of the others. It remembers what later events leave out
// (the kind of each group, the cache namespace of each block), so it must see every event, in order.
//
// Not implemented: rewriting image placeholder tokens to pad values. Blocks with media are hashed with the media hashes
// behind the tokens, so they match only requests that are hashed in the same way.
//
// A Normalizer belongs to one worker. One goroutine may use it at a time. Package kvblock keeps no reference to it.
//
// Source: dynamo-kv-router 1.6.1, zmq_wire.
type Normalizer struct {
	traits         Traits
	unmarked       bool // salts are not marked with saltPrefix
	groups         map[uint32]specKind
	mainGroup      uint32 // the group of full attention whose blocks count, if hasMain
	hasMain        bool
	namespaces     namespaceTable
	namespaceLimit int // of len(namespaces)

	uncertainSize bool   // traits.BlockSize may be the size of a prompt's tail
	finestOther   uint32 // the smallest block size of the groups other than full attention; 0 if no such group is known
	tails         map[EngineHash]promptTail
	tailLimit     int // of len(tails)

	classes     [MaxClasses]classState // of traits.Classes
	classGroups map[uint32]classGroup

	*buffers // the batch's, during Normalize; otherwise nil
}

// buffers are scratch memory of Normalize. They belong to a Batch and not to a Normalizer: each of thousands of workers
// has a Normalizer, but there is a Batch only for each message being read.
type buffers struct {
	blocks []StoredBlock
	local  []LocalHash
	media  [][]uint64
	seen   hashSet
	window []Token

	passing     []int                 // events of groups other than full attention, by index, since the last clear
	mains       []mainStore           // full attention's stores on the device since the last clear, in order
	places      map[EngineHash]placed // of the blocks in mains, if placed
	placed      bool
	droppedMain bool // since the last clear, a store of full attention or a part of one was dropped
}

// Traits describe how a worker cuts prompts into blocks, as its events show. A lookup for the worker must cut prompts
// in the same way.
type Traits struct {
	// BlockSize is in tokens; 0 while it is unknown.
	BlockSize int
	// EAGLE says that blocks are hashed over windows that are one token wider; see HashOptions.
	EAGLE bool
	// UpperBound says that the worker may hold less of a prompt than its announced blocks. Either the model has layers
	// that attend to a window or keep a state, and their events do not say which blocks they hold; or blocks depend on
	// more than one token behind them, and EAGLE covers only one.
	UpperBound bool
	// Window is the widest attention window of the model's layers that have one, in tokens; 0: none is known.
	Window int
	// Classes are the layer groups beside full attention. A class's blocks are in tier ClassTier of its index.
	Classes Classes
}

// NewNormalizer returns a Normalizer for a worker with this block size, in tokens. A size below 1 means unknown: the
// worker's first store that passes the filter sets it.
func NewNormalizer(blockSize int) *Normalizer {
	return &Normalizer{
		traits:         Traits{BlockSize: max(blockSize, 0)},
		groups:         map[uint32]specKind{},
		namespaces:     namespaceTable{},
		namespaceLimit: maxNamespaced,
		tailLimit:      maxPromptTails,
	}
}

// Traits returns the traits as far as they are known.
func (n *Normalizer) Traits() Traits { return n.traits }

// UnmarkedSalts says that the worker's cache salts are the clients' own: neither Dynamo nor kvepp marks them. Call it
// before the first event.
func (n *Normalizer) UnmarkedSalts() { n.unmarked = true }

// Reset forgets all state except the block size. The block size stays because the next store may be a prompt's tail,
// which would set a wrong one.
func (n *Normalizer) Reset() {
	*n = Normalizer{
		traits:         Traits{BlockSize: n.traits.BlockSize},
		groups:         map[uint32]specKind{},
		namespaces:     namespaceTable{},
		namespaceLimit: n.namespaceLimit,
		uncertainSize:  n.uncertainSize,
		finestOther:    n.finestOther,
		tailLimit:      n.tailLimit,
		unmarked:       n.unmarked,
	}
}

// Normalize appends the operations of b's events to ops, in order. Most events yield one operation. A store with an
// invalid block in the middle yields two: the valid blocks, and the reason for dropping the rest. An event without
// blocks yields none.
//
// The slices of the operations belong to b: its next DecodeBatch or Normalize overwrites them.
func (n *Normalizer) Normalize(b *Batch, ops []Operation) []Operation {
	n.buffers = &b.buffers
	n.blocks, n.passing, n.mains, n.droppedMain = n.blocks[:0], n.passing[:0], n.mains[:0], false
	if n.traits.BlockSize == 0 {
		n.noteOtherGroups(b)
	}
	for i := range b.Events {
		e := &b.Events[i]
		tier, ns, reason := n.filter(e)
		if reason == passing {
			n.passing = append(n.passing, i)
			continue
		}
		if reason != "" {
			n.droppedMain = n.droppedMain || e.Kind == BlockStored && tier == TierDevice
			ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: reason})
			continue
		}
		switch e.Kind {
		case BlockStored:
			ops = n.appendStored(b, i, tier, ns, ops)
		case BlockRemoved:
			hashes := e.Hashes
			if len(n.tails) > 0 && tier == TierDevice {
				hashes = n.removeTails(hashes)
			}
			if len(hashes) > 0 {
				ops = append(ops,
					Operation{Kind: OpRemoved, Event: e.Kind, Removed: Removed{Hashes: hashes, Tier: tier}})
			}
			if len(hashes) < len(e.Hashes) {
				ops = append(ops, Operation{Kind: OpDropped, Event: e.Kind, Reason: DropPromptTail})
			}
		case AllBlocksCleared:
			ops = n.appendClasses(b, ops)
			n.clearClasses()
			ops = append(ops, Operation{Kind: OpCleared, Event: e.Kind})
			n.mains, n.droppedMain = n.mains[:0], false
		}
	}
	if len(n.passing) > 0 {
		ops = n.appendClasses(b, ops)
	}
	n.buffers = nil
	return ops
}

// specKind is a class of attention kinds, as far as kvepp distinguishes them.
type specKind uint8

const (
	specMain       specKind = iota + 1 // its blocks cover the prompt from the start, as prefix overlap needs
	specTransient                      // known; its blocks are evicted while those of specMain stay
	specIrrelevant                     // known; irrelevant to prefix overlap
	specUnknown
)

func specKindOf(name []byte) specKind {
	switch string(name) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return specMain
	case "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention":
		return specTransient
	case "encoder_only_attention", "cross_attention":
		return specIrrelevant
	}
	return specUnknown
}

// tierOf returns the tier of a medium in the engines' terms.
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

// filter decides whether e changes what the worker holds. It returns the tier, and the namespace of a store's blocks. A
// reason other than "" drops the event. The order of the rules is Dynamo's and is observable: an event that a rule
// drops does not change the state that later rules keep.
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
	if tier != TierDevice && e.Kind == BlockStored && len(e.Hashes) > 0 {
		switch {
		case n.traits.BlockSize == 0 || uint64(e.BlockSize) != uint64(n.traits.BlockSize):
			return tier, ns, DropTierBlockSize
		case len(e.Tokens) == 0 && e.Local == nil:
			return tier, ns, DropShortTokens
		}
	}
	if tier == TierDisk || tier == TierExternal {
		// These events carry neither group nor namespace, and must not change what is known of them.
		return tier, n.namespaceOf(e, tier), ""
	}
	if reason := n.filterGroup(e, tier); reason != "" {
		return tier, ns, reason
	}
	switch e.Kind {
	case BlockStored:
		ns, reason = n.resolveNamespace(e, tier)
	case BlockRemoved:
		for _, h := range e.Hashes {
			n.namespaces.remove(h, tier)
		}
	case AllBlocksCleared:
		clear(n.namespaces)
		clear(n.tails)
	}
	return tier, ns, reason
}

// passing is the reason of filter for an event that appendClasses handles.
const passing = "passing"

func (n *Normalizer) filterGroup(e *Event, tier Tier) (reason string) {
	if e.SpecKind != nil {
		k := specKindOf(e.SpecKind)
		if e.Kind == BlockStored && e.HasGroup && (len(n.groups) < maxGroups || n.groups[e.Group] != 0) {
			n.groups[e.Group] = k
		}
		switch k {
		case specMain:
			return n.filterMain(e, tier)
		case specTransient:
			n.traits.Window = max(n.traits.Window, int(e.Window))
			switch {
			case n.traits.UpperBound || tier != TierDevice:
			case !e.HasGroup:
				n.giveUpClasses()
			default:
				return passing
			}
			return DropNonMainAttention
		case specIrrelevant:
			return DropNonMainAttention
		}
		return DropUnknownKind
	}
	if !e.HasGroup {
		return ""
	}
	switch n.groups[e.Group] {
	case specMain:
		return n.filterMain(e, tier)
	case specTransient:
		if e.Kind == BlockRemoved && tier == TierDevice && !n.traits.UpperBound {
			return passing
		}
		return DropNonMainGroup
	case specIrrelevant:
		return DropNonMainGroup
	case specUnknown:
		return DropUnknownKind
	}
	if e.Group == 0 && (!n.hasMain || n.mainGroup == 0) {
		return ""
	}
	return DropUnlearnedGroup
}

// filterMain is filterGroup for an event of full attention. An engine with several such groups reuses a block that all
// of them hold. The blocks of the first one count, in its block size, and the overlap is an upper bound.
//
// Source: vllm/v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator), vLLM 0.33.
func (n *Normalizer) filterMain(e *Event, tier Tier) (reason string) {
	if !e.HasGroup {
		return ""
	}
	if size := uint32(n.traits.BlockSize); !n.hasMain && e.Kind == BlockStored && tier == TierDevice &&
		(size == 0 || e.BlockSize == size) {
		n.mainGroup, n.hasMain = e.Group, true
	}
	if !n.hasMain || e.Group == n.mainGroup {
		return ""
	}
	if !n.traits.UpperBound {
		n.giveUpClasses()
	}
	return DropNonMainGroup
}

// maxGroups bounds the remembered groups. Real models have a handful.
const maxGroups = 1024

// resolveNamespace determines the cache namespace of a store, and remembers it for the store's blocks.
//
// A subscriber that joins in the middle of a chain does not know whether the parent is salted. It assumes that it is
// not, as Dynamo does.
func (n *Normalizer) resolveNamespace(e *Event, tier Tier) (ns namespace, reason string) {
	ns = n.namespaceOf(e, tier)
	if ns.ambiguous {
		return ns, DropAmbiguousNamespace
	}
	if ns.salted && len(n.namespaces)+len(e.Hashes) > n.namespaceLimit {
		return ns, DropNamespacesFull
	}
	if ns.salted || len(n.namespaces) > 0 {
		for _, h := range e.Hashes {
			n.namespaces.add(h, ns, tier)
		}
	}
	return ns, ""
}

// namespaceOf returns the cache namespace of a store: the one that it names, else that of its parent. vLLM's offloading
// leaves salts out of its stores in lower tiers. These have the namespace that the same hash has on the device.
func (n *Normalizer) namespaceOf(e *Event, tier Tier) namespace {
	ns := n.announcedNamespace(e)
	if !ns.salted && tier != TierDevice && len(e.Hashes) > 0 {
		ns = n.namespaces[e.Hashes[0]]
	}
	if !ns.salted && !ns.ambiguous && e.HasParent {
		ns = n.namespaces[e.Parent]
	}
	ns.tiers = 0
	return ns
}

// appendStored appends the operations of event i of b, a store that passed the filter.
func (n *Normalizer) appendStored(b *Batch, i int, tier Tier, ns namespace, ops []Operation) []Operation {
	e := &b.Events[i]
	drop := func(reason string) []Operation {
		n.droppedMain = n.droppedMain || tier == TierDevice
		return append(ops, Operation{Kind: OpDropped, Event: BlockStored, Reason: reason})
	}
	if len(e.Hashes) == 0 {
		return ops
	}
	if n.duplicate(e) {
		return drop(DropDuplicateHash)
	}
	if tier == TierDevice && n.learnBlockSize(e) {
		n.clearClasses()
		n.mains = n.mains[:0]
		ops = append(ops, Operation{Kind: OpCleared, Event: BlockStored, BlockSize: e.BlockSize})
	}
	if n.traits.BlockSize == 0 || uint64(e.BlockSize) != uint64(n.traits.BlockSize) {
		if n.isPromptTail(e) {
			return drop(DropPromptTail)
		}
		n.droppedMain = true
		return append(ops,
			Operation{Kind: OpDropped, Event: BlockStored, Reason: DropBlockSize, BlockSize: e.BlockSize})
	}
	if len(n.tails) > 0 {
		for _, h := range e.Hashes {
			delete(n.tails, h) // if an engine reuses a tail's hash for a block, the block's removal must count
		}
	}
	if e.HasLoRAID && len(e.LoRAName) == 0 && e.Local == nil {
		return drop(DropUnnamedAdapter)
	}
	salt := uint64(0)
	if e.Local != nil {
		if ns.salted {
			return drop(DropLocalSalted)
		}
		n.local = append(n.local[:0], e.Local[:min(len(e.Local), len(e.Hashes))]...)
	} else {
		salt = n.hashBlocks(e, tier, ns)
		if e.Media {
			n.local = n.local[:min(len(n.local), e.MediaBlock)]
		}
	}
	if len(n.local) > 0 {
		if tier == TierDevice {
			n.mains = append(n.mains, mainStore{op: len(ops), event: i, salt: salt})
		}
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

// hashBlocks computes the local hashes of a store's blocks into n.local, as many as there are tokens for. It returns
// the salt of these hashes.
func (n *Normalizer) hashBlocks(e *Event, tier Tier, ns namespace) (salt uint64) {
	size := n.traits.BlockSize
	o := HashOptions{BlockSize: size, EAGLE: e.Bigram || len(e.Lookahead) > 0, MediaHashes: n.mediaHashes(e)}
	if tier == TierDevice {
		n.traits.EAGLE = o.EAGLE
		if len(e.Lookahead) > 1 {
			n.giveUpClasses()
		}
	}
	salt = o.Salt()
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
	return salt
}

// duplicate reports whether e contains a hash twice; its parent counts.
func (n *Normalizer) duplicate(e *Event) bool {
	if len(e.Hashes) == 1 {
		return e.HasParent && e.Parent == e.Hashes[0]
	}
	seen := &n.seen
	if len(e.Hashes) > 1<<12 {
		seen = new(hashSet) // events are rarely so long; do not keep this much memory
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

// hashSet is a set of hashes that starts empty for each event without clearing its memory. The zero value is ready for
// begin.
type hashSet struct {
	slots []hashSlot // length 0 or a power of two, at most half of them used
	round uint64     // a slot with another round is empty
	seed  uint64     // odd and random, so that an engine cannot send colliding hashes
	shift int        // 64 - log2(len(slots))
}

type hashSlot struct {
	hash  EngineHash
	round uint64
}

// begin empties the set and makes room for this many hashes.
func (s *hashSet) begin(room int) {
	if 2*room > len(s.slots) {
		size := bits.Len(uint(2*room - 1))
		s.slots, s.shift = make([]hashSlot, 1<<size), 64-size
		s.seed = rand.Uint64() | 1
	}
	s.round++
}

// add adds the hash and reports whether it is new.
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

// announcedNamespace returns the cache namespace that a store names, either in its own field or in the extra keys of
// its first block.
func (n *Normalizer) announcedNamespace(e *Event) namespace {
	name := e.CacheSalt
	if len(name) == 0 {
		name = n.saltInExtraKeys(e)
		if rest, marked := bytes.CutPrefix(name, []byte(saltPrefix)); marked && len(rest) > 0 && !n.unmarked {
			name = rest
		}
	}
	if len(name) == 0 {
		return namespace{}
	}
	return namespace{salted: true, salt: xxh3.HashSeed(name, namespaceSeed)}
}

// saltInExtraKeys returns the cache salt in a store's extra keys, as they write it, or nil. The keys of a block are, in
// this order: the adapter's name; for each medium [identifier, offset], or an identifier before vLLM 0.19; the cache
// salt, in a prompt's first block; digests of embeddings, as bytes. So the salt is the first block's last text besides
// the adapter's name. A salt may be equal to that name, so only the first such text is skipped. The block's only medium
// before vLLM 0.19 counts as a salt too: no request has it, so that the prediction is short and never too long.
//
// Dynamo's worker marks its salts with saltPrefix. Dynamo also reads a marked salt behind an unknown parent.
//
// Source: vllm/v1/core/kv_cache_utils.py (generate_block_hash_extra_keys, to_event_extra_keys).
func (n *Normalizer) saltInExtraKeys(e *Event) (salt []byte) {
	lora := e.LoRAName
	eachExtraKey(e.ExtraKeys, func(block int, item []byte) bool {
		if block > 0 {
			return false
		}
		text := textOf(item)
		switch marked := !n.unmarked && bytes.HasPrefix(text, []byte(saltPrefix)); {
		case len(text) == 0:
		case len(lora) > 0 && bytes.Equal(text, lora):
			lora = nil
		case marked || !e.HasParent:
			salt = text
		}
		return true
	})
	return salt
}

// textOf returns an extra key that is a text, or nil.
func textOf(item []byte) []byte {
	s := scanner{b: item}
	if s.peek() != kindString {
		return nil
	}
	return s.text("extra key")
}

// mediaHashes returns for each block the hashes of its media and digests of embeddings. They distinguish e's blocks
// from other blocks with the same tokens, adapter and namespace. It returns nil if there are none.
//
// It also hashes the engine's own identifiers. Dynamo ignores them and treats such blocks as text.
func (n *Normalizer) mediaHashes(e *Event) [][]uint64 {
	if len(e.ExtraKeys) == 0 {
		return nil
	}
	for i := range n.media {
		n.media[i] = n.media[i][:0]
	}
	salt := n.saltInExtraKeys(e)
	found, at := false, -1
	var lora []byte // the adapter's name, until it occurred among this block's keys
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
			if s.array("extra key") == 2 {
				if id := textOf(item[s.p:]); len(id) > 0 {
					h, ok = mediaHash(id), true
				}
			}
		case kindBytes:
			h, ok = xxh3.Hash(s.bytes("extra key")), true
		case kindString:
			text := textOf(item)
			switch {
			case len(lora) > 0 && bytes.Equal(text, lora):
				lora = nil
			case block == 0 && len(salt) > 0 && len(text) > 0 && &text[0] == &salt[0]:
				// the cache salt itself, not a text that is equal to it
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

// mediaHash turns an identifier of an image or another medium into a number. Dynamo's worker writes the number as 16
// hexadecimal digits and appends 48 zeros.
//
// Source: dynamo-kv-router 1.6.1 (hash_mm_identifier).
func mediaHash(id []byte) uint64 {
	if !isDigest(id) {
		return xxh3.Hash(id)
	}
	var b [8]byte
	_, _ = hex.Decode(b[:], id[:16]) // isDigest has checked the digits
	return binary.BigEndian.Uint64(b[:])
}

// isDigest reports whether a text is 64 hexadecimal digits, the form of media identifiers that the client did not
// choose.
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

// eachExtraKey calls yield with every item of every block's extra keys until it returns false. DecodeBatch has checked
// the array. Elements that are not extra keys are skipped.
func eachExtraKey(extraKeys []byte, yield func(block int, item []byte) bool) {
	if len(extraKeys) == 0 {
		return
	}
	s := scanner{b: extraKeys}
	for block := range s.array("extra_keys") {
		if s.peek() != kindArray {
			s.skip()
			continue
		}
		for range s.array("extra_keys") {
			at := s.p
			if s.skip(); s.err != nil || !yield(block, s.b[at:s.p]) {
				return
			}
		}
	}
}

// namespaceTable remembers the cache namespace of each block of one worker that has one. It stores the salt instead of
// the name, because clients choose the names and they can be long. Plain blocks, the great majority, are not stored.
type namespaceTable map[EngineHash]namespace

// namespace is the cache namespace of one block. The zero value is the plain namespace, which the table does not store.
type namespace struct {
	salted    bool
	ambiguous bool  // blocks of different namespaces have this hash
	tiers     uint8 // in a table: a bit for each tier that holds the block; otherwise 0
	salt      uint64
}

// add records that block h was stored in ns in a tier. If h is already known in another namespace, it becomes
// ambiguous.
func (t namespaceTable) add(h EngineHash, ns namespace, tier Tier) {
	old, known := t[h]
	tiers := old.tiers | 1<<tier
	old.tiers = 0
	switch {
	case known && old != ns:
		t[h] = namespace{ambiguous: true}
	case ns.salted:
		ns.tiers = tiers
		t[h] = ns
	}
}

// remove forgets block h once no tier holds it, unless it is ambiguous: the other block with that hash may still be
// there.
func (t namespaceTable) remove(h EngineHash, tier Tier) {
	ns, known := t[h]
	if !known || ns.ambiguous {
		return
	}
	if ns.tiers &^= 1 << tier; ns.tiers == 0 {
		delete(t, h)
	} else {
		t[h] = ns
	}
}
