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
		if err := b.decodeMap(s); err != nil {
			return err
		}
	} else if err := b.decodeArray(s); err != nil {
		return err
	}
	if s.p != len(payload) {
		return s.fail("%d bytes after the batch", len(payload)-s.p)
	}
	b.latest, b.removal = tokenList{}, removal{}
	return nil
}

// decodeArray reads [ts, events, data_parallel_rank]. Old SGLang sends no rank.
func (b *Batch) decodeArray(s *scanner) error {
	n, err := s.array("batch")
	if err != nil {
		return err
	}
	if n < 2 {
		return s.fail("batch of %d elements, want at least 2", n)
	}
	if b.Timestamp, err = s.float("ts"); err != nil {
		return err
	}
	if err := b.decodeEvents(s); err != nil {
		return err
	}
	if n == 2 {
		return nil
	}
	if err := b.decodeRank(s); err != nil {
		return err
	}
	return b.skipSurplus(s, n-3)
}

// decodeMap reads {"ts", "events", "data_parallel_rank"}.
func (b *Batch) decodeMap(s *scanner) error {
	n, err := s.dict("batch")
	if err != nil {
		return err
	}
	found := false
	for range n {
		key, err := s.text("batch key")
		if err != nil {
			return err
		}
		switch string(key) {
		case "ts":
			b.Timestamp, err = s.float("ts")
		case "events":
			if found {
				return s.fail("events twice")
			}
			found = true
			err = b.decodeEvents(s)
		case "data_parallel_rank":
			err = b.decodeRank(s)
		default:
			b.UnknownKeys++
			err = s.skip()
		}
		if err != nil {
			return err
		}
	}
	if !found {
		return s.fail("batch without events")
	}
	return nil
}

func (b *Batch) decodeRank(s *scanner) (err error) {
	if s.skipNil() {
		return nil
	}
	b.HasRank = true
	b.Rank, err = s.uint32("data_parallel_rank")
	return err
}

func (b *Batch) skipSurplus(s *scanner, n int) error {
	for range n {
		b.UnknownKeys++
		if err := s.skip(); err != nil {
			return err
		}
	}
	return nil
}

func (b *Batch) decodeEvents(s *scanner) error {
	n, err := s.array("events")
	if err != nil {
		return err
	}
	if n > maxEvents {
		return s.fail("%d events, want at most %d", n, maxEvents)
	}
	for range n {
		if b.repeatRemoval(s) {
			continue
		}
		// Events grows one at a time: an Event is far larger than the few bytes that announce one.
		b.Events = append(b.Events, Event{})
		e := &b.Events[len(b.Events)-1]
		begin, unknownKeys := s.p, b.UnknownKeys
		if s.peek() == kindMap {
			err = b.decodeEventMap(s, e)
		} else {
			err = b.decodeEventArray(s, e)
		}
		if err != nil {
			return err
		}
		if e.Kind == 0 {
			b.UnknownTags++
			b.Events = b.Events[:len(b.Events)-1]
		}
		if e.Kind == BlockRemoved && b.removal.hash > begin && b.UnknownKeys == unknownKeys {
			b.removal.event, b.removal.begin, b.removal.end = len(b.Events)-1, begin, s.p
		}
	}
	return nil
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
func (b *Batch) decodeEventArray(s *scanner, e *Event) error {
	n, err := s.array("event")
	if err != nil {
		return err
	}
	if n == 0 {
		return s.fail("event without a tag")
	}
	tag, err := s.text("event tag")
	if err != nil {
		return err
	}
	e.Kind = kindOf(tag)
	n--
	switch e.Kind {
	case BlockStored:
		if n < 4 {
			return s.fail("BlockStored of %d fields, want at least 4", n)
		}
		for f := fieldHashes; f <= fieldExtraKeys; f++ {
			if n == 0 {
				return nil
			}
			n--
			if f == fieldLoRAName && s.peek() == kindMap {
				err = b.decodeSalt(s, e)
			} else {
				err = b.decodeField(s, e, f)
			}
			if err != nil {
				return err
			}
		}
		return b.decodeTrailing(s, e, n)
	case BlockRemoved:
		if n < 1 {
			return s.fail("BlockRemoved without hashes")
		}
		if err := b.decodeField(s, e, fieldHashes); err != nil || n == 1 {
			return err
		}
		if err := b.decodeField(s, e, fieldMedium); err != nil {
			return err
		}
		return b.decodeTrailing(s, e, n-2)
	case AllBlocksCleared:
		if n == 0 {
			return nil
		}
		if err := b.decodeField(s, e, fieldOwnership); err != nil {
			return err
		}
		return b.skipSurplus(s, n-1)
	default:
		for range n {
			if err := s.skip(); err != nil {
				return err
			}
		}
		return nil
	}
}

// decodeSalt reads the map with the cache salt in SGLang's positional events.
func (b *Batch) decodeSalt(s *scanner, e *Event) error {
	n, err := s.dict("cache salt")
	if err != nil {
		return err
	}
	for range n {
		key, err := s.text("key")
		if err != nil {
			return err
		}
		if string(key) == "cache_salt" {
			err = b.decodeField(s, e, fieldCacheSalt)
		} else {
			b.UnknownKeys++
			err = s.skip()
		}
		if err != nil {
			return err
		}
	}
	return nil
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
func (b *Batch) decodeTrailing(s *scanner, e *Event, n int) error {
	if e.Kind == BlockRemoved && 2 <= n && n <= 3 {
		if fixed, err := removalIsFixed(*s, n); err != nil {
			return err
		} else if fixed {
			for _, f := range []field{fieldGroup, fieldLocality, fieldOwnership}[:n] {
				if err := b.decodeField(s, e, f); err != nil {
					return err
				}
			}
			return nil
		}
	}
	surplus := 0
	if n > maxTrailing {
		surplus, n = n-maxTrailing, maxTrailing
	}
	if fixed, err := trailingIsFixed(*s, n); err != nil {
		return err
	} else if fixed {
		for i := range n {
			if err := b.decodeField(s, e, fieldGroup+field(i)); err != nil {
				return err
			}
		}
		return b.skipSurplus(s, surplus)
	}
	for range n {
		var err error
		switch s.peek() {
		case kindInt:
			if e.HasGroup {
				err = b.decodeField(s, e, fieldSlidingWindow)
			} else {
				err = b.decodeField(s, e, fieldGroup)
			}
		case kindString:
			err = b.decodeField(s, e, fieldSpecKind)
		case kindArray:
			err = b.decodeField(s, e, fieldMediaInfos)
		default:
			err = s.skip()
		}
		if err != nil {
			return err
		}
	}
	return b.skipSurplus(s, surplus)
}

// trailingIsFixed reports whether the next n fields have the types of the fixed layout. It reads a copy of the scanner.
func trailingIsFixed(s scanner, n int) (bool, error) {
	if n < 4 {
		return false, nil
	}
	for _, want := range []kind{kindInt, kindString, kindInt, kindString, kindString}[:n] {
		if k := s.peek(); k != want && k != kindNil {
			return false, nil
		}
		if err := s.skip(); err != nil {
			return false, err
		}
	}
	return true, nil
}

// removalIsFixed reports whether the next n fields of a removal are group_idx, locality and ownership.
func removalIsFixed(s scanner, n int) (bool, error) {
	for i, want := range []kind{kindInt, kindString, kindString}[:n] {
		k := s.peek()
		if k != want && k != kindNil {
			return false, nil
		}
		if i == 1 && k == kindString {
			if text, err := s.text("trailing field"); err != nil || specKindOf(text) != specUnknown {
				return false, err
			}
		} else if err := s.skip(); err != nil {
			return false, err
		}
	}
	return true, nil
}

// decodeEventMap reads one event as a map with its tag under "type". The key "type" may have any position; engines put
// it first.
func (b *Batch) decodeEventMap(s *scanner, e *Event) error {
	n, err := s.dict("event")
	if err != nil {
		return err
	}
	start := s.p
	for i := range n { // find the type
		key, err := s.text("event key")
		if err != nil {
			return err
		}
		if string(key) == "type" {
			tag, err := s.text("event tag")
			if err != nil {
				return err
			}
			if e.Kind = kindOf(tag); i == 0 {
				start, n = s.p, n-1
			}
			break
		}
		if err := s.skip(); err != nil {
			return err
		}
	}
	s.p = start
	unknown := e.Kind == 0
	// Fields that may not occur twice: a second list would be appended to the same buffer as the first.
	const repeats = 1<<fieldHashes | 1<<fieldTokens | 1<<fieldLookahead | 1<<fieldLocal
	var seen uint32 // a bit for each field
	for range n {
		key, err := s.text("event key")
		if err != nil {
			return err
		}
		switch f := fieldOf(key); {
		case unknown || string(key) == "type":
			err = s.skip()
		case repeats>>f&1 != 0 && seen>>f&1 != 0:
			return s.fail("%s twice", fieldNames[f])
		default:
			seen |= 1 << f
			err = b.decodeField(s, e, f)
		}
		if err != nil {
			return err
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
		return s.fail("%v without %s", e.Kind, fieldNames[bits.TrailingZeros32(missing)])
	}
	return nil
}

// noteMedia records that this block holds media.
func (e *Event) noteMedia(block int) {
	if !e.Media || block < e.MediaBlock {
		e.MediaBlock = block
	}
	e.Media = true
}

// decodeField reads the value of one field into e. The positional and the map encoding both use it.
func (b *Batch) decodeField(s *scanner, e *Event, f field) error {
	switch {
	case f == fieldHashes:
		return b.decodeHashes(s, e)
	case f == fieldTokens:
		return b.decodeTokens(s, e)
	case s.skipNil(): // every other field may be nil, which means absent
		return nil
	}
	switch f {
	case fieldMediaInfos, fieldMediaKeys:
		return decodeMedia(s, e, f)
	case fieldLookahead:
		return b.decodeLookahead(s, e)
	case fieldLocal:
		return b.decodeLocal(s, e)
	case fieldSessionID:
		return s.skip() // known and unused
	case fieldUnknown:
		b.UnknownKeys++
		return s.skip()
	}
	return decodeScalar(s, e, f)
}

// decodeScalar reads a field that is one value, or that stays encoded.
func decodeScalar(s *scanner, e *Event, f field) (err error) {
	switch f {
	case fieldParent:
		integer := s.peek() == kindInt
		e.Parent, err = s.hash()
		e.HasParent = !integer || e.Parent != 0
	case fieldBlockSize:
		e.BlockSize, err = s.uint32(fieldNames[f])
	case fieldMedium:
		if e.Medium, err = s.text(fieldNames[f]); len(e.Medium) == 0 {
			e.Medium = nil
		}
	case fieldLoRAName:
		e.LoRAName, err = s.text(fieldNames[f])
	case fieldLoRAID:
		if s.peek() != kindInt {
			return s.skip()
		}
		var id uint64
		id, _, err = s.integer(fieldNames[f])
		e.HasLoRAID = id != 0
	case fieldCacheSalt:
		e.CacheSalt, err = s.text(fieldNames[f])
	case fieldExtraKeys:
		at := s.p
		if err := s.want(kindArray, fieldNames[f]); err != nil {
			return err
		}
		err = s.skip()
		e.ExtraKeys = s.b[at:s.p:s.p]
	case fieldGroup:
		e.HasGroup = true
		e.Group, err = s.uint32(fieldNames[f])
	case fieldSpecKind:
		e.SpecKind, err = s.text(fieldNames[f])
	case fieldSlidingWindow:
		if s.peek() != kindInt {
			return s.skip()
		}
		tokens, negative, err := s.integer(fieldNames[f])
		if err == nil && !negative {
			e.Window = uint32(min(tokens, math.MaxUint32))
		}
		return err
	case fieldLocality:
		e.Locality, err = s.text(fieldNames[f])
	case fieldOwnership:
		e.Ownership, err = s.text(fieldNames[f])
	}
	return err
}

func (b *Batch) decodeHashes(s *scanner, e *Event) error {
	n, err := s.array(fieldNames[fieldHashes])
	if err != nil {
		return err
	}
	at := len(b.hashes)
	if at+n > maxHashes {
		return s.fail("more than %d block hashes", maxHashes)
	}
	if e.Kind == BlockRemoved && n == 1 && s.b[s.p] == 0xcf {
		b.removal = removal{hash: s.p + 1}
	}
	b.hashes, err = s.hashes(b.hashes, n)
	e.Hashes = b.hashes[at:len(b.hashes):len(b.hashes)]
	return err
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
func (b *Batch) decodeTokens(s *scanner, e *Event) (err error) {
	at, begin := len(b.tokens), s.p
	if l := &b.latest; l.size > 0 && s.repeats(l.begin, l.size) {
		s.p += l.size
		e.Tokens, e.Bigram = b.tokens[l.first:l.end:l.end], l.bigram
		return nil
	}
	b.tokens, e.Bigram, err = s.tokens(b.tokens)
	e.Tokens = b.tokens[at:len(b.tokens):len(b.tokens)]
	if err == nil {
		b.latest = tokenList{at, len(b.tokens), begin, s.p - begin, e.Bigram}
		return nil
	}
	if s.p > begin && !e.Bigram && s.peek() == kindString {
		// TensorRT-LLM sends a digest where an image or another medium is. The tokens before it are text.
		e.noteMedia(math.MaxInt)
		s.p = begin
		err = s.skip()
	}
	return err
}

// decodeMedia reads a list with an element for each block. The element of a block without media is nil or an empty
// list.
func decodeMedia(s *scanner, e *Event, f field) error {
	n, err := s.array(fieldNames[f])
	if err != nil {
		return err
	}
	for i := range n {
		if s.skipNil() {
			continue
		}
		begin, hasMedia := s.p, true
		if s.peek() == kindArray {
			keys, err := s.array(fieldNames[f])
			if err != nil {
				return err
			}
			hasMedia = keys > 0
		}
		if hasMedia {
			e.noteMedia(i)
		}
		s.p = begin
		if err := s.skip(); err != nil {
			return err
		}
	}
	return nil
}

// decodeLookahead reads a list of tokens for each block and keeps the last list: the tokens of the next block repeat
// the others.
func (b *Batch) decodeLookahead(s *scanner, e *Event) error {
	n, err := s.array(fieldNames[fieldLookahead])
	if err != nil {
		return err
	}
	at := len(b.tokens)
	for range n {
		if b.tokens, _, err = s.tokens(b.tokens[:at]); err != nil {
			return err
		}
	}
	e.Lookahead = b.tokens[at:len(b.tokens):len(b.tokens)]
	return nil
}

func (b *Batch) decodeLocal(s *scanner, e *Event) error {
	n, err := s.array(fieldNames[fieldLocal])
	if err != nil {
		return err
	}
	at := len(b.local)
	if at+n > maxHashes {
		return s.fail("more than %d block hashes", maxHashes)
	}
	b.local = slices.Grow(b.local, n)
	for range n {
		h, err := s.hash()
		if err != nil {
			return err
		}
		b.local = append(b.local, LocalHash(h))
	}
	e.Local = b.local[at:len(b.local):len(b.local)]
	return nil
}
