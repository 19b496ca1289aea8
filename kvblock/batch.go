package kvblock

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
)

// EventKind is the kind of change that an engine announces.
type EventKind uint8

// The kinds of events. The zero value is not a valid kind.
const (
	BlockStored EventKind = iota + 1
	BlockRemoved
	AllBlocksCleared
	Ignored // a placeholder that Dynamo's own publishers send
)

// String returns the event's tag on the wire.
func (k EventKind) String() string {
	switch k {
	case BlockStored:
		return "BlockStored"
	case BlockRemoved:
		return "BlockRemoved"
	case AllBlocksCleared:
		return "AllBlocksCleared"
	case Ignored:
		return "Ignored"
	}
	return "unknown"
}

// Batch is one message of an engine's KV event publisher, decoded but not interpreted. The zero value is empty.
//
// Byte slices alias the payload given to DecodeBatch. Other slices are buffers of the Batch: the next DecodeBatch
// overwrites them, and they never shrink. Events may share Tokens. Use a Batch before the payload or the Batch changes.
// One goroutine may use a Batch at a time.
type Batch struct {
	Timestamp float64 // seconds since 1970
	HasRank   bool    // whether the batch names its data-parallel rank, which then overrides the subscription's
	Rank      uint32
	Events    []Event

	UnknownTags int // events skipped because their tag is unknown
	UnknownKeys int // map keys and surplus array elements skipped

	hashes []EngineHash
	tokens []Token
	local  []LocalHash

	// during DecodeBatch
	latest  tokenList // the latest list of token ids
	removal removal   // the latest one

	buffers buffers
}

// Event is one event as the engine sent it. Fields that its kind does not have are zero.
type Event struct {
	Kind EventKind

	Hashes    []EngineHash // the blocks, in prompt order for BlockStored
	HasParent bool         // whether Hashes[0] has a predecessor, Parent
	Parent    EngineHash
	Tokens    []Token // of the blocks, in order; with Bigram, one more token (see HashOptions.EAGLE)
	Bigram    bool    // whether token ids arrived as overlapping pairs
	BlockSize uint32  // in tokens

	Medium    []byte // "GPU", "CPU", ...; nil if absent or empty
	LoRAName  []byte // nil if absent
	HasLoRAID bool   // whether the event names an adapter by a number, which only its engine can interpret
	CacheSalt []byte // nil if absent
	ExtraKeys []byte // one msgpack array; it has an array or nil for each block; nil if absent
	HasGroup  bool   // whether the event names its KV cache group
	Group     uint32
	SpecKind  []byte // the group's kind of attention; nil if absent
	Window    uint32 // the group's attention window in tokens; 0 if it has none
	Locality  []byte // "LOCAL", "REMOTE"; nil if absent
	Ownership []byte // the owner of the block if it is not the engine; nil if absent
	// Media says that blocks hold media described in a form that kvepp cannot hash: block_mm_infos, mm_keys, or a text
	// among the token ids.
	Media      bool
	MediaBlock int // the first such block, if Media; math.MaxInt for a text among the token ids: Tokens end before it

	// Lookahead are the tokens behind the last block that its hash also covers. Engines with draft models hash each
	// block together with the tokens behind it. Empty: a block's hash covers only the block.
	Lookahead []Token

	// Local are the blocks' local hashes, from publishers that send them instead of token ids (TensorRT-LLM's). They
	// cover adapter and media, but no cache salt.
	Local []LocalHash
}

// The message size alone does not bound the memory of decoding: an event of 15 bytes takes 500 bytes of memory, and a
// hash of one byte takes eight, and eight more as an operation. An engine sends one step in a batch, and removes blocks
// one by one.
const (
	maxEvents = 1 << 17
	maxHashes = 1 << 20
)

// DecodeBatch decodes one message payload into b, replacing what it held.
//
// It reads the encodings of vLLM from 0.11 on, SGLang, TensorRT-LLM and Dynamo's mocker: batches as array or map,
// events as tagged array or map. It skips and counts events with an unknown tag; Dynamo drops the whole batch for one
// unknown tag. A parent hash of integer 0 means no parent: simulators in llm-d's style encode it so.
//
// Errors wrap ErrMalformed; the contents of b are then meaningless.
//
// Sources: vLLM 0.11 to 0.33 and SGLang 0.5.21, kv_events; dynamo-kv-router 1.6.1, zmq_wire.
func DecodeBatch(payload []byte, b *Batch) error {
	// An assignment of a whole Batch would take longer than the rest of a short batch's header.
	b.Timestamp, b.HasRank, b.Rank, b.UnknownTags, b.UnknownKeys, b.latest = 0, false, 0, 0, 0, tokenList{}
	b.Events, b.hashes, b.tokens, b.local = b.Events[:0], b.hashes[:0], b.tokens[:0], b.local[:0]
	b.removal = removal{}
	s := &scanner{b: payload}
	if s.peek() == kindMap {
		b.decodeMap(s)
	} else {
		b.decodeArray(s)
	}
	b.latest, b.removal = tokenList{}, removal{}
	return s.end("batch")
}

// decodeArray reads [ts, events, data_parallel_rank]. Old SGLang sends no rank.
func (b *Batch) decodeArray(s *scanner) {
	n := s.array("batch")
	if n < 2 {
		s.fail("batch of %d elements, want at least 2", n)
	}
	b.Timestamp = s.float("ts")
	b.decodeEvents(s)
	if n > 2 {
		b.decodeRank(s)
		b.skipSurplus(s, n-3)
	}
}

// decodeMap reads {"ts", "events", "data_parallel_rank"}.
func (b *Batch) decodeMap(s *scanner) {
	found := false
	for range s.dict("batch") {
		switch string(s.text("batch key")) {
		case "ts":
			b.Timestamp = s.float("ts")
		case "events":
			if found {
				s.fail("events twice")
			}
			found = true
			b.decodeEvents(s)
		case "data_parallel_rank":
			b.decodeRank(s)
		default:
			b.skipSurplus(s, 1)
		}
	}
	if !found {
		s.fail("batch without events")
	}
}

func (b *Batch) decodeRank(s *scanner) {
	if !s.skipNil() {
		b.HasRank, b.Rank = true, s.uint32("data_parallel_rank")
	}
}

func (b *Batch) skipSurplus(s *scanner, n int) {
	for range n {
		b.UnknownKeys++
		s.skip()
	}
}

func (b *Batch) decodeEvents(s *scanner) {
	n := s.array("events")
	if n > maxEvents {
		s.fail("%d events, want at most %d", n, maxEvents)
	}
	for ; n > 0 && s.err == nil; n-- {
		if b.repeatRemoval(s) {
			continue
		}
		// Events grows one at a time: an Event is far larger than the few bytes that announce one.
		b.Events = append(b.Events, Event{})
		e := &b.Events[len(b.Events)-1]
		begin, unknownKeys := s.p, b.UnknownKeys
		if s.peek() == kindMap {
			b.decodeEventMap(s, e)
		} else {
			b.decodeEventArray(s, e)
		}
		if e.Kind == 0 {
			b.UnknownTags++
			b.Events = b.Events[:len(b.Events)-1]
		}
		if e.Kind == BlockRemoved && b.removal.hash > begin && b.UnknownKeys == unknownKeys {
			b.removal.event, b.removal.begin, b.removal.end = len(b.Events)-1, begin, s.p
		}
	}
}

// removal is where a removal of one block is in the payload. Engines send one for each block, and many differ in the
// hash alone. The zero value is none.
type removal struct {
	event      int // of Batch.Events
	begin, end int // end is 0 until the event has been read
	hash       int // where its eight bytes are
}

// repeatRemoval reads an event that differs from the latest removal in the hash alone. It reports whether there is one.
func (b *Batch) repeatRemoval(s *scanner) bool {
	l := &b.removal
	size, at := l.end-l.begin, len(b.hashes)
	if l.end == 0 || size > len(s.b)-s.p || at == maxHashes {
		return false
	}
	was, now, hash := s.b[l.begin:l.end], s.b[s.p:s.p+size], l.hash-l.begin
	if string(now[:hash]) != string(was[:hash]) || string(now[hash+8:]) != string(was[hash+8:]) {
		return false
	}
	b.hashes = append(b.hashes, EngineHash(binary.BigEndian.Uint64(now[hash:])))
	b.Events = append(b.Events, b.Events[l.event])
	b.Events[len(b.Events)-1].Hashes = b.hashes[at : at+1 : at+1]
	s.p += size
	return true
}

// field is a field of an event. The order matters: the fields from fieldHashes to fieldExtraKeys are a positional
// BlockStored, and those from fieldGroup to fieldOwnership are the trailing fields.
type field uint8

const (
	fieldUnknown field = iota
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldSpecKind
	fieldSlidingWindow
	fieldLocality
	fieldOwnership
	fieldCacheSalt
	fieldSessionID
	fieldLookahead
	fieldMediaInfos
	fieldMediaKeys
	fieldLocal
)

// fieldNames are the keys of the fields in an event sent as a map.
var fieldNames = [...]string{
	fieldHashes:        "block_hashes",
	fieldParent:        "parent_block_hash",
	fieldTokens:        "token_ids",
	fieldBlockSize:     "block_size",
	fieldLoRAID:        "lora_id",
	fieldMedium:        "medium",
	fieldLoRAName:      "lora_name",
	fieldExtraKeys:     "extra_keys",
	fieldGroup:         "group_idx",
	fieldSpecKind:      "kv_cache_spec_kind",
	fieldSlidingWindow: "kv_cache_spec_sliding_window",
	fieldLocality:      "locality",
	fieldOwnership:     "ownership",
	fieldCacheSalt:     "cache_salt",
	fieldSessionID:     "session_id",
	fieldLookahead:     "lookahead_token_ids",
	fieldMediaInfos:    "block_mm_infos",
	fieldMediaKeys:     "mm_keys",
	fieldLocal:         "tokens_hashes",
}

// fieldOf returns the field with this key, or fieldUnknown.
func fieldOf(name []byte) field {
	switch string(name) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpecKind
	case "kv_cache_spec_sliding_window":
		return fieldSlidingWindow
	case "locality":
		return fieldLocality
	case "ownership":
		return fieldOwnership
	case "cache_salt":
		return fieldCacheSalt
	case "session_id":
		return fieldSessionID
	case "lookahead_token_ids":
		return fieldLookahead
	case "block_mm_infos":
		return fieldMediaInfos
	case "mm_keys":
		return fieldMediaKeys
	case "tokens_hashes":
		return fieldLocal
	}
	return fieldUnknown
}

// kindOf returns the event kind with this tag, or 0.
func kindOf(tag []byte) EventKind {
	switch string(tag) {
	case "BlockStored":
		return BlockStored
	case "BlockRemoved":
		return BlockRemoved
	case "AllBlocksCleared":
		return AllBlocksCleared
	case "Ignored":
		return Ignored
	}
	return 0
}

// decodeEventArray reads one event in the positional encoding:
//
//	["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
//		extra_keys, trailing...]
//	["BlockRemoved", block_hashes, medium, trailing...]
//	["AllBlocksCleared", ownership]
//
// Older engines send fewer elements: a store ends after block_size or later, a removal after its hashes or later.
// SGLang sends a map {"cache_salt": ...} where vLLM sends lora_name.
func (b *Batch) decodeEventArray(s *scanner, e *Event) {
	n := s.array("event")
	if n == 0 {
		s.fail("event without a tag")
		return
	}
	e.Kind = kindOf(s.text("event tag"))
	n--
	switch e.Kind {
	case BlockStored:
		if n < 4 {
			s.fail("BlockStored of %d fields, want at least 4", n)
		}
		for f := fieldHashes; f <= fieldExtraKeys && n > 0; f++ {
			n--
			if f == fieldLoRAName && s.peek() == kindMap {
				b.decodeSalt(s, e)
			} else {
				b.decodeField(s, e, f)
			}
		}
		b.decodeTrailing(s, e, n)
	case BlockRemoved:
		if n < 1 {
			s.fail("BlockRemoved without hashes")
		}
		b.decodeField(s, e, fieldHashes)
		if n > 1 {
			b.decodeField(s, e, fieldMedium)
			b.decodeTrailing(s, e, n-2)
		}
	case AllBlocksCleared:
		if n > 0 {
			b.decodeField(s, e, fieldOwnership)
			b.skipSurplus(s, n-1)
		}
	default:
		for range n {
			s.skip()
		}
	}
}

// decodeSalt reads the map with the cache salt in SGLang's positional events.
func (b *Batch) decodeSalt(s *scanner, e *Event) {
	for range s.dict("cache salt") {
		if string(s.text("key")) == "cache_salt" {
			b.decodeField(s, e, fieldCacheSalt)
		} else {
			b.skipSurplus(s, 1)
		}
	}
}

// maxTrailing is the number of trailing fields that have a meaning.
const maxTrailing = 5

// decodeTrailing reads the n fields behind those that all engines share.
//
// If there are at least four and their types fit, they are group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window,
// locality and ownership. Otherwise the type of a field identifies it, as engines sent them for a while: the first
// unsigned integer is group_idx, the second is the sliding window, a string is the kind, an array is block_mm_infos.
//
// Removals never have a kind. If two or three trailing fields of a removal contain a text that is not a kind, they are
// group_idx, locality and ownership. Dynamo takes that text for an unknown kind and drops the removal.
//
// Source: dynamo-kv-router 1.6.1, zmq_wire (deserialize).
func (b *Batch) decodeTrailing(s *scanner, e *Event, n int) {
	if e.Kind == BlockRemoved && 2 <= n && n <= 3 && removalIsFixed(*s, n) {
		for _, f := range []field{fieldGroup, fieldLocality, fieldOwnership}[:n] {
			b.decodeField(s, e, f)
		}
		return
	}
	surplus := 0
	if n > maxTrailing {
		surplus, n = n-maxTrailing, maxTrailing
	}
	fixed := trailingIsFixed(*s, n)
	for i := range n {
		k := s.peek()
		switch {
		case fixed:
			b.decodeField(s, e, fieldGroup+field(i))
		case k == kindInt && e.HasGroup:
			b.decodeField(s, e, fieldSlidingWindow)
		case k == kindInt:
			b.decodeField(s, e, fieldGroup)
		case k == kindString:
			b.decodeField(s, e, fieldSpecKind)
		case k == kindArray:
			b.decodeField(s, e, fieldMediaInfos)
		default:
			s.skip()
		}
	}
	b.skipSurplus(s, surplus)
}

// trailingIsFixed reports whether the next n fields have the types of the fixed layout. It reads a copy of the scanner.
func trailingIsFixed(s scanner, n int) bool {
	if n < 4 {
		return false
	}
	for _, want := range []kind{kindInt, kindString, kindInt, kindString, kindString}[:n] {
		if k := s.peek(); k != want && k != kindNil {
			return false
		}
		s.skip()
	}
	return true
}

// removalIsFixed reports whether the next n fields of a removal are group_idx, locality and ownership.
func removalIsFixed(s scanner, n int) bool {
	for i, want := range []kind{kindInt, kindString, kindString}[:n] {
		k := s.peek()
		if k != want && k != kindNil {
			return false
		}
		if i == 1 && k == kindString {
			if specKindOf(s.text("trailing field")) != specUnknown {
				return false
			}
		} else {
			s.skip()
		}
	}
	return true
}

// decodeEventMap reads one event as a map with its tag under "type". The key "type" may have any position; engines put
// it first.
func (b *Batch) decodeEventMap(s *scanner, e *Event) {
	n := s.dict("event")
	start := s.p
	for i := range n { // find the type
		if string(s.text("event key")) == "type" {
			if e.Kind = kindOf(s.text("event tag")); i == 0 {
				start, n = s.p, n-1
			}
			break
		}
		s.skip()
	}
	if s.err != nil {
		return
	}
	s.p = start
	unknown := e.Kind == 0
	// Fields that may not occur twice: a second list would be appended to the same buffer as the first.
	const repeats = 1<<fieldHashes | 1<<fieldTokens | 1<<fieldLookahead | 1<<fieldLocal
	var seen uint32 // a bit for each field
	for range n {
		key := s.text("event key")
		switch f := fieldOf(key); {
		case unknown || string(key) == "type":
			s.skip()
		case repeats>>f&1 != 0 && seen>>f&1 != 0:
			s.fail("%s twice", fieldNames[f])
		default:
			seen |= 1 << f
			b.decodeField(s, e, f)
		}
	}
	var need uint32
	switch e.Kind {
	case BlockStored:
		need = 1<<fieldHashes | 1<<fieldTokens | 1<<fieldBlockSize
		if seen>>fieldLocal&1 != 0 {
			need &^= 1 << fieldTokens
		}
	case BlockRemoved:
		need = 1 << fieldHashes
	}
	if missing := need &^ seen; missing != 0 {
		s.fail("%v without %s", e.Kind, fieldNames[bits.TrailingZeros32(missing)])
	}
}

// noteMedia records that this block holds media.
func (e *Event) noteMedia(block int) {
	if !e.Media || block < e.MediaBlock {
		e.MediaBlock = block
	}
	e.Media = true
}

// decodeField reads the value of one field into e. The positional and the map encoding both use it.
func (b *Batch) decodeField(s *scanner, e *Event, f field) {
	switch {
	case f == fieldHashes:
		b.decodeHashes(s, e)
		return
	case f == fieldTokens:
		b.decodeTokens(s, e)
		return
	case s.skipNil(): // every other field may be nil, which means absent
		return
	}
	switch f {
	case fieldMediaInfos, fieldMediaKeys:
		decodeMedia(s, e, f)
	case fieldLookahead:
		b.decodeLookahead(s, e)
	case fieldLocal:
		b.decodeLocal(s, e)
	case fieldSessionID:
		s.skip() // known and unused
	case fieldUnknown:
		b.skipSurplus(s, 1)
	default:
		decodeScalar(s, e, f)
	}
}

// decodeScalar reads a field that is one value, or that stays encoded.
func decodeScalar(s *scanner, e *Event, f field) {
	switch f {
	case fieldParent:
		integer := s.peek() == kindInt
		e.Parent = s.hash()
		e.HasParent = !integer || e.Parent != 0
	case fieldBlockSize:
		e.BlockSize = s.uint32(fieldNames[f])
	case fieldMedium:
		if e.Medium = s.text(fieldNames[f]); len(e.Medium) == 0 {
			e.Medium = nil
		}
	case fieldLoRAName:
		e.LoRAName = s.text(fieldNames[f])
	case fieldLoRAID:
		if s.peek() != kindInt {
			s.skip()
			return
		}
		id, _ := s.integer(fieldNames[f])
		e.HasLoRAID = id != 0
	case fieldCacheSalt:
		e.CacheSalt = s.text(fieldNames[f])
	case fieldExtraKeys:
		at := s.p
		if s.want(kindArray, fieldNames[f]) {
			s.skip()
		}
		e.ExtraKeys = s.b[at:s.p:s.p]
	case fieldGroup:
		e.HasGroup, e.Group = true, s.uint32(fieldNames[f])
	case fieldSpecKind:
		e.SpecKind = s.text(fieldNames[f])
	case fieldSlidingWindow:
		if s.peek() != kindInt {
			s.skip()
		} else if tokens, negative := s.integer(fieldNames[f]); !negative {
			e.Window = uint32(min(tokens, math.MaxUint32))
		}
	case fieldLocality:
		e.Locality = s.text(fieldNames[f])
	case fieldOwnership:
		e.Ownership = s.text(fieldNames[f])
	}
}

func (b *Batch) decodeHashes(s *scanner, e *Event) {
	n, at := s.array(fieldNames[fieldHashes]), len(b.hashes)
	if at+n > maxHashes {
		s.fail("more than %d block hashes", maxHashes)
		return
	}
	if e.Kind == BlockRemoved && n == 1 && s.b[s.p] == 0xcf {
		b.removal = removal{hash: s.p + 1}
	}
	b.hashes = s.hashes(b.hashes, n)
	e.Hashes = b.hashes[at:len(b.hashes):len(b.hashes)]
}

// tokenList is where a list of token ids is: in Batch.tokens, and its encoding in the payload. It has no pointers,
// because each store of a batch writes one. The zero value is none.
type tokenList struct {
	first, end  int // of Batch.tokens
	begin, size int // of the payload
	bigram      bool
}

// decodeTokens reads token ids. Each layer group of a hybrid model repeats those of the group before, in the same
// encoding, which is then not decoded again: no encoding is the beginning of another one.
func (b *Batch) decodeTokens(s *scanner, e *Event) {
	at, begin := len(b.tokens), s.p
	if l := &b.latest; l.size > 0 && s.repeats(l.begin, l.size) {
		s.p += l.size
		e.Tokens, e.Bigram = b.tokens[l.first:l.end:l.end], l.bigram
		return
	}
	sound := s.err == nil
	b.tokens, e.Bigram = s.tokens(b.tokens)
	e.Tokens = b.tokens[at:len(b.tokens):len(b.tokens)]
	if s.err == nil {
		b.latest = tokenList{at, len(b.tokens), begin, s.p - begin, e.Bigram}
	} else if sound && s.at > begin && s.at < len(s.b) && !e.Bigram && kindOfByte[s.b[s.at]] == kindString {
		// TensorRT-LLM sends a digest where an image or another medium is. The tokens before it are text.
		e.noteMedia(math.MaxInt)
		s.p, s.err = begin, nil
		s.skip()
	}
}

// decodeMedia reads a list with an element for each block. The element of a block without media is nil or an empty
// list.
func decodeMedia(s *scanner, e *Event, f field) {
	for i := range s.array(fieldNames[f]) {
		if s.skipNil() {
			continue
		}
		if element := *s; s.peek() != kindArray || element.array(fieldNames[f]) > 0 {
			e.noteMedia(i)
		}
		s.skip()
	}
}

// decodeLookahead reads a list of tokens for each block and keeps the last list: the tokens of the next block repeat
// the others.
func (b *Batch) decodeLookahead(s *scanner, e *Event) {
	at := len(b.tokens)
	for range s.array(fieldNames[fieldLookahead]) {
		b.tokens, _ = s.tokens(b.tokens[:at])
	}
	e.Lookahead = b.tokens[at:len(b.tokens):len(b.tokens)]
}

func (b *Batch) decodeLocal(s *scanner, e *Event) {
	n, at := s.array(fieldNames[fieldLocal]), len(b.local)
	if at+n > maxHashes {
		s.fail("more than %d block hashes", maxHashes)
		return
	}
	b.local = slices.Grow(b.local, n)
	for range n {
		b.local = append(b.local, LocalHash(s.hash()))
	}
	e.Local = b.local[at:len(b.local):len(b.local)]
}
