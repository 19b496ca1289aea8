package kvblock

import "slices"

// EventKind says what an engine announces.
type EventKind uint8

// The kinds of events. The zero value is none of them.
const (
	BlockStored EventKind = iota + 1
	BlockRemoved
	AllBlocksCleared
	Ignored // sent by Dynamo's own publishers as a placeholder
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
// Slices of bytes alias the payload given to DecodeBatch, the others are buffers of the Batch that its next DecodeBatch
// overwrites: use a Batch before either changes. It belongs to one goroutine at a time.
type Batch struct {
	Timestamp float64 // seconds since 1970
	HasRank   bool    // whether the batch names its data-parallel rank; it then overrides the subscription's
	Rank      uint32
	Events    []Event

	UnknownTags int // events skipped because nobody here knows their tag
	UnknownKeys int // map keys and surplus array elements skipped

	hashes []EngineHash
	tokens []Token
}

// Event is one event as the engine sent it. Fields that its kind does not have are zero.
type Event struct {
	Kind EventKind

	Hashes    []EngineHash // the blocks, in prompt order for BlockStored
	HasParent bool         // whether Hashes[0] has a predecessor
	Parent    EngineHash
	Tokens    []Token // of the blocks, in order; with Bigram one more, see HashOptions.EAGLE
	Bigram    bool    // whether token ids came as overlapping pairs
	BlockSize uint32  // tokens a block

	Medium     []byte // "GPU", ...; nil if absent or empty
	LoRAName   []byte // nil if absent
	CacheSalt  []byte // nil if absent
	ExtraKeys  []byte // one msgpack array with an array or nil for each block; nil if absent
	HasGroup   bool   // whether the event names its KV cache group
	Group      uint32
	SpecKind   []byte // the group's kind of attention; nil if absent
	Locality   []byte // "LOCAL", "REMOTE"; nil if absent
	Ownership  []byte // who keeps the block if not the engine; nil if absent
	MediaInfos bool   // whether block_mm_infos says something about any block
}

// DecodeBatch decodes one message payload into b, replacing what it held.
//
// It reads the encodings of vLLM from 0.11 on, SGLang and TensorRT-LLM: batches as array or map, events as tagged array or
// map. Unlike Dynamo, which loses a whole batch to one unknown tag, it skips events it does not know and counts them. A
// parent hash of integer 0 means no parent: simulators in llm-d's style encode it so.
//
// Errors wrap ErrMalformed; the contents of b are then meaningless.
//
// Sources: vLLM 0.11 to 0.33 and SGLang 0.5.21, kv_events; dynamo-kv-router 1.6.1, zmq_wire.
func DecodeBatch(payload []byte, b *Batch) error {
	*b = Batch{Events: b.Events[:0], hashes: b.hashes[:0], tokens: b.tokens[:0]}
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
	return nil
}

// decodeArray reads [ts, events, data_parallel_rank]; the rank is missing from old SGLang.
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
	if s.null() {
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
	for range n {
		// Not grown by n at once: an Event is far larger than the few bytes that announce one.
		b.Events = append(b.Events, Event{})
		e := &b.Events[len(b.Events)-1]
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
	}
	return nil
}

// kindOf returns the kind with this tag, 0 for none.
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
//	["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys, trailing...]
//	["BlockRemoved", block_hashes, medium, trailing...]
//	["AllBlocksCleared", ownership]
//
// Older engines end anywhere from block_size, or the hashes of a removal, on. Where vLLM has lora_name, SGLang has a map {"cache_salt": ...}.
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
		for _, key := range []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"} {
			if n == 0 {
				return nil
			}
			n--
			if key == "lora_name" && s.peek() == kindMap {
				err = b.decodeSalt(s, e)
			} else {
				err = b.decodeField(s, e, key)
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
		if err := b.decodeField(s, e, "block_hashes"); err != nil || n == 1 {
			return err
		}
		if err := b.decodeField(s, e, "medium"); err != nil {
			return err
		}
		return b.decodeTrailing(s, e, n-2)
	case AllBlocksCleared:
		if n == 0 {
			return nil
		}
		if err := b.decodeField(s, e, "ownership"); err != nil {
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

// decodeSalt reads the map in which SGLang's positional events carry a cache salt.
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
			err = b.decodeField(s, e, "cache_salt")
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

// maxTrailing is how many trailing fields have a meaning.
const maxTrailing = 5

// decodeTrailing reads the n fields behind the ones that every engine agrees on.
//
// With at least four of them whose types fit, they are group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window,
// locality and ownership. Otherwise each is told by its type, as engines sent them for a while: the first unsigned integer
// is group_idx, the second the sliding window, a string the kind, an array block_mm_infos.
//
// Source: dynamo-kv-router 1.6.1, zmq_wire (deserialize).
func (b *Batch) decodeTrailing(s *scanner, e *Event, n int) error {
	surplus := 0
	if n > maxTrailing {
		surplus, n = n-maxTrailing, maxTrailing
	}
	if fixed, err := trailingIsFixed(*s, n); err != nil {
		return err
	} else if fixed {
		for _, key := range []string{"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership"}[:n] {
			if err := b.decodeField(s, e, key); err != nil {
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
				err = b.decodeField(s, e, "kv_cache_spec_sliding_window")
			} else {
				err = b.decodeField(s, e, "group_idx")
			}
		case kindString:
			err = b.decodeField(s, e, "kv_cache_spec_kind")
		case kindArray:
			err = b.decodeField(s, e, "block_mm_infos")
		default:
			err = s.skip()
		}
		if err != nil {
			return err
		}
	}
	return b.skipSurplus(s, surplus)
}

// trailingIsFixed looks ahead, on a scanner of its own, whether n trailing fields have the types of the fixed layout.
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

// decodeEventMap reads one event as a map whose "type" is its tag. The type may come at any place: engines put it first.
func (b *Batch) decodeEventMap(s *scanner, e *Event) error {
	n, err := s.dict("event")
	if err != nil {
		return err
	}
	start := s.p
	for range n { // find the type
		key, err := s.text("event key")
		if err != nil {
			return err
		}
		if string(key) == "type" {
			tag, err := s.text("event tag")
			if err != nil {
				return err
			}
			e.Kind = kindOf(tag)
			break
		}
		if err := s.skip(); err != nil {
			return err
		}
	}
	s.p = start
	unknown := e.Kind == 0
	var hashes, tokens, size bool
	for range n {
		key, err := s.text("event key")
		if err != nil {
			return err
		}
		switch k := string(key); {
		case unknown || k == "type":
			err = s.skip()
		case k == "block_hashes" && hashes, k == "token_ids" && tokens:
			return s.fail("%s twice", k)
		default:
			hashes = hashes || k == "block_hashes"
			tokens = tokens || k == "token_ids"
			size = size || k == "block_size"
			err = b.decodeField(s, e, k)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case e.Kind == BlockStored && !(hashes && tokens && size):
		return s.fail("BlockStored without block_hashes, token_ids or block_size")
	case e.Kind == BlockRemoved && !hashes:
		return s.fail("BlockRemoved without block_hashes")
	}
	return nil
}

// decodeField reads the value of one named field into e. It is where both encodings meet.
func (b *Batch) decodeField(s *scanner, e *Event, key string) (err error) {
	switch key {
	case "block_hashes":
		n, err := s.array(key)
		if err != nil {
			return err
		}
		at := len(b.hashes)
		b.hashes = slices.Grow(b.hashes, n)
		for range n {
			h, err := s.hash()
			if err != nil {
				return err
			}
			b.hashes = append(b.hashes, h)
		}
		e.Hashes = b.hashes[at:len(b.hashes):len(b.hashes)]
		return nil
	case "token_ids":
		at := len(b.tokens)
		b.tokens, e.Bigram, err = s.tokens(b.tokens)
		e.Tokens = b.tokens[at:len(b.tokens):len(b.tokens)]
		return err
	}
	if s.null() { // every other field may be nil, which is as good as absent
		return nil
	}
	switch key {
	case "parent_block_hash":
		integer := s.peek() == kindInt
		e.Parent, err = s.hash()
		e.HasParent = !integer || e.Parent != 0
	case "block_size":
		e.BlockSize, err = s.uint32(key)
	case "medium":
		if e.Medium, err = s.text(key); len(e.Medium) == 0 {
			e.Medium = nil
		}
	case "lora_name":
		e.LoRAName, err = s.text(key)
	case "cache_salt":
		e.CacheSalt, err = s.text(key)
	case "extra_keys":
		at := s.p
		if err := s.want(kindArray, key); err != nil {
			return err
		}
		err = s.skip()
		e.ExtraKeys = s.b[at:s.p:s.p]
	case "group_idx":
		e.HasGroup = true
		e.Group, err = s.uint32(key)
	case "kv_cache_spec_kind":
		e.SpecKind, err = s.text(key)
	case "locality":
		e.Locality, err = s.text(key)
	case "ownership":
		e.Ownership, err = s.text(key)
	case "block_mm_infos":
		var n int
		if n, err = s.array(key); err != nil {
			return err
		}
		for range n {
			if s.null() {
				continue
			}
			e.MediaInfos = true
			if err := s.skip(); err != nil {
				return err
			}
		}
	case "lora_id", "kv_cache_spec_sliding_window", "session_id", "lookahead_token_ids":
		err = s.skip() // known, and nothing here depends on them
	default:
		b.UnknownKeys++
		err = s.skip()
	}
	return err
}
