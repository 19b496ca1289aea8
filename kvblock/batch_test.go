package kvblock

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock/kvblocktest"
)

// The payloads marked msgspec were encoded by Python's msgspec from the engines' own event classes.
const (
	golden011     = "93cb3ff80000000000009197ab426c6f636b53746f726564926fccdec098010203040506070804c0a347505500"
	golden019     = "93cb3ff80000000000009199ab426c6f636b53746f726564926fccdec098010203040506070804c0a3475055c0c000"
	goldenRemoved = "93cb3ff80000000000009293ac426c6f636b52656d6f766564916fa347505591b0416c6c426c6f636b73436c6561726" +
		"56401"
	golden026 = "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573916fb170617" +
		"2656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d" +
		"656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f6361636" +
		"8655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
	goldenCleared = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
	goldenNoRank  = "93cb3ff800000000000090c0"

	// Captured from a simulator in llm-d's style: root parent 0, token ids beyond any vocabulary.
	capturedSimulator = "93cb41dac057cf639cd39199ab426c6f636b53746f72656491cf0de66a85e491536bcf0000000000000000dc001" +
		"0ceaf229474cecbeeee94ceca70ac9dce6f71162ace580d2e0eced5c35ffdceaf229474ce0e518c3dcedfe1c78bce64bd38f2ce0bf5" +
		"5262ceaf229474cecbeeee94ceca70ac9dce6f71162ace580d2e0e10c0a3475055c0c000"
)

func mustHex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

type (
	pairs = kvblocktest.Pairs
	raw   = kvblocktest.Raw
)

func pack(b []byte, v any) []byte { return kvblocktest.Append(b, v) }

// batchOf packs events into a batch payload.
func batchOf(events ...any) []byte { return pack(nil, []any{1.5, events, 0}) }

func ints(from, to int) []any {
	var l []any
	for ; from <= to; from++ {
		l = append(l, from)
	}
	return l
}

var decodeCases = []struct {
	name    string
	payload []byte
	want    Batch
}{
	{"vLLM 0.11", mustHex(golden011), Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
		{
			Kind:      BlockStored,
			Hashes:    []EngineHash{111, 222},
			Tokens:    countingTokens(1, 8),
			BlockSize: 4,
			Medium:    []byte("GPU"),
		},
	}}},
	{"vLLM 0.19", mustHex(golden019), Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
		{
			Kind:      BlockStored,
			Hashes:    []EngineHash{111, 222},
			Tokens:    countingTokens(1, 8),
			BlockSize: 4,
			Medium:    []byte("GPU"),
		},
	}}},
	{"removed and cleared", mustHex(goldenRemoved), Batch{Timestamp: 1.5, HasRank: true, Rank: 1, Events: []Event{
		{Kind: BlockRemoved, Hashes: []EngineHash{111}, Medium: []byte("GPU")},
		{Kind: AllBlocksCleared},
	}}},
	{"vLLM 0.26 map", mustHex(golden026), Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
		{
			Kind:      BlockStored,
			Hashes:    []EngineHash{111},
			Tokens:    countingTokens(1, 4),
			BlockSize: 4,
			Medium:    []byte("GPU"),
			ExtraKeys: []byte{0x91, 0xc0},
			HasGroup:  true,
			SpecKind:  []byte("full_attention"),
		},
	}}},
	{
		"cleared map",
		mustHex(goldenCleared),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{{Kind: AllBlocksCleared}}},
	},
	{"no rank", mustHex(goldenNoRank), Batch{Timestamp: 1.5, Events: []Event{}}},
	{
		"captured simulator, parent 0",
		mustHex(capturedSimulator),
		Batch{Timestamp: 1795252029.5564468, HasRank: true, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{1001605090434437995},
				BlockSize: 16,
				Medium:    []byte("GPU"),
				Tokens: []Token{
					2938279028, 3421433492, 3396381853, 1869682218, 1477258766, 3586351101, 2938279028, 240225341,
					3756115851, 1690122482, 200626786, 2938279028, 3421433492, 3396381853, 1869682218, 1477258766},
			},
		}},
	},
	{"old SGLang, two elements", pack(nil, []any{1.5, []any{[]any{"AllBlocksCleared"}}}),
		Batch{Timestamp: 1.5, Events: []Event{{Kind: AllBlocksCleared}}}},
	{
		"batch as map",
		pack(
			nil,
			pairs{
				"events",
				[]any{pairs{"type", "AllBlocksCleared"}},
				"ts",
				2,
				"new",
				pairs{1, []any{2.5, true, []byte{1}}},
				"data_parallel_rank",
				3,
			},
		),
		Batch{Timestamp: 2, HasRank: true, Rank: 3, UnknownKeys: 1, Events: []Event{{Kind: AllBlocksCleared}}},
	},
	{
		"surplus of a batch",
		pack(nil, []any{1.5, []any{}, nil, "later"}),
		Batch{Timestamp: 1.5, Events: []Event{}, UnknownKeys: 1},
	},
	{
		"signed hashes and digests",
		batchOf([]any{"BlockRemoved", []any{-1, uint64(1 << 63), append(make([]byte, 24), 1, 2, 3, 4, 5, 6, 7, 8), 5}}),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{Kind: BlockRemoved, Hashes: []EngineHash{math.MaxUint64, 1 << 63, 0x0102030405060708, 5}}}},
	},
	{
		"short stores",
		batchOf(
			[]any{"BlockStored", []any{7}, 6, ints(1, 2), 2},
			[]any{"BlockStored", []any{8}, append(make([]byte, 7), 0), ints(1, 2), 2},
		),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				HasParent: true,
				Parent:    6,
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
			},
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{8},
				HasParent: true,
				Parent:    0,
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
			}}},
	},
	{"bigrams", batchOf([]any{"BlockStored", []any{7}, nil, []any{[]any{1, 2}, []any{2, 3}, []any{3, 4}}, 3}),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{Kind: BlockStored, Hashes: []EngineHash{7}, Tokens: countingTokens(1, 4), Bigram: true, BlockSize: 3}}}},
	{
		"token widths",
		batchOf(
			[]any{
				"BlockStored",
				[]any{7},
				nil,
				[]any{127, 200, 65535, 1 << 31, raw{0xd0, 5}, uint64(9), raw{0xd2, 0, 1, 0, 0}},
				7,
			},
		),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				Tokens:    []Token{127, 200, 65535, 1 << 31, 5, 9, 65536},
				BlockSize: 7,
			}}},
	},
	{
		"SGLang salt in place of the adapter",
		batchOf(
			[]any{"BlockStored", []any{7}, nil, ints(1, 2), 2, nil, "GPU", pairs{"cache_salt", "tenant-a", "x", 1}},
		),
		Batch{Timestamp: 1.5, HasRank: true, UnknownKeys: 1, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
				Medium:    []byte("GPU"),
				CacheSalt: []byte("tenant-a"),
			}}},
	},
	{"fixed trailing fields", batchOf(
		[]any{
			"BlockStored",
			[]any{7},
			nil,
			ints(1, 2),
			2,
			nil,
			"",
			"my-lora",
			nil,
			1,
			"mamba",
			nil,
			"REMOTE",
			"kvcr",
			"later",
		},
		[]any{"BlockRemoved", []any{7}, nil, nil, nil, 128, "LOCAL"},
	),
		Batch{Timestamp: 1.5, HasRank: true, UnknownKeys: 1, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
				LoRAName:  []byte("my-lora"),
				HasGroup:  true,
				Group:     1,
				SpecKind:  []byte("mamba"),
				Locality:  []byte("REMOTE"),
				Ownership: []byte("kvcr"),
			},
			{Kind: BlockRemoved, Hashes: []EngineHash{7}, Window: 128, Locality: []byte("LOCAL")}}}},
	{"legacy trailing fields, identified by type", batchOf(
		[]any{"BlockStored", []any{7}, nil, ints(1, 2), 2, nil, "GPU", nil, nil, "full_attention", 3, 128},
		[]any{
			"BlockStored",
			[]any{7},
			nil,
			ints(1, 2),
			2,
			nil,
			"GPU",
			nil,
			nil,
			[]any{nil, pairs{"mm_objects", []any{}}},
			3,
			128,
			"mamba",
		},
		[]any{"BlockStored", []any{7}, nil, ints(1, 2), 2, nil, "GPU", nil, nil, []any{nil}},
		[]any{"BlockRemoved", []any{7}, "GPU", 5},
	),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
				Medium:    []byte("GPU"),
				HasGroup:  true,
				Group:     3,
				SpecKind:  []byte("full_attention"),
				Window:    128,
			},
			{
				Kind:       BlockStored,
				Hashes:     []EngineHash{7},
				Tokens:     countingTokens(1, 2),
				BlockSize:  2,
				Medium:     []byte("GPU"),
				HasGroup:   true,
				Group:      3,
				SpecKind:   []byte("mamba"),
				Window:     128,
				Media:      true,
				MediaBlock: 1,
			},
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{7},
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
				Medium:    []byte("GPU"),
			},
			{Kind: BlockRemoved, Hashes: []EngineHash{7}, Medium: []byte("GPU"), HasGroup: true, Group: 5}}}},
	{"map with the additions of vLLM 0.33 and SGLang", batchOf(pairs{
		"block_size", 2, "type", "BlockStored", "block_hashes", []any{-2}, "parent_block_hash", 9, "token_ids",
		ints(1, 2),
		"lora_name", "my-lora", "cache_salt", "s", "locality", "LOCAL", "ownership", nil, "session_id", "x",
		"lookahead_token_ids", []any{[]any{1}}, "kv_cache_spec_sliding_window", 4096,
		"block_mm_infos", []any{nil}, "brand_new", []any{pairs{"a", 1}}}),
		Batch{Timestamp: 1.5, HasRank: true, UnknownKeys: 1, Events: []Event{
			{
				Kind:      BlockStored,
				Hashes:    []EngineHash{math.MaxUint64 - 1},
				HasParent: true,
				Parent:    9,
				Tokens:    countingTokens(1, 2),
				BlockSize: 2,
				LoRAName: []byte(
					"my-lora",
				),
				CacheSalt: []byte("s"),
				Window:    4096,
				Locality:  []byte("LOCAL"),
				Lookahead: []Token{1},
			}}}},
	{
		"token ids that events repeat, and some that begin alike",
		batchOf(
			pairs{"type", "BlockStored", "block_hashes", []any{1}, "token_ids", ints(1, 2), "block_size", 2},
			pairs{"type", "BlockStored", "block_hashes", []any{2}, "token_ids", ints(1, 2), "block_size", 2},
			pairs{"type", "BlockStored", "block_hashes", []any{3}, "token_ids", ints(1, 3), "block_size", 3},
			pairs{"type", "BlockStored", "block_hashes", []any{4}, "token_ids", ints(1, 2), "block_size", 2},
			pairs{"type", "BlockStored", "block_hashes", []any{5}, "block_size", 12,
				"token_ids", ints(1, 12)},
			pairs{"type", "BlockStored", "block_hashes", []any{6}, "block_size", 12,
				"token_ids", append(ints(1, 11), 77)},
			pairs{"type", "BlockStored", "block_hashes", []any{7}, "block_size", 12,
				"token_ids", append(ints(1, 11), 77)},
		),
		Batch{Timestamp: 1.5, HasRank: true, Events: []Event{
			{Kind: BlockStored, Hashes: []EngineHash{1}, Tokens: countingTokens(1, 2), BlockSize: 2},
			{Kind: BlockStored, Hashes: []EngineHash{2}, Tokens: countingTokens(1, 2), BlockSize: 2},
			{Kind: BlockStored, Hashes: []EngineHash{3}, Tokens: countingTokens(1, 3), BlockSize: 3},
			{Kind: BlockStored, Hashes: []EngineHash{4}, Tokens: countingTokens(1, 2), BlockSize: 2},
			{Kind: BlockStored, Hashes: []EngineHash{5}, Tokens: countingTokens(1, 12), BlockSize: 12},
			{Kind: BlockStored, Hashes: []EngineHash{6}, Tokens: append(countingTokens(1, 11), 77), BlockSize: 12},
			{Kind: BlockStored, Hashes: []EngineHash{7}, Tokens: append(countingTokens(1, 11), 77), BlockSize: 12},
		}},
	},
	{
		"removals that differ in the hash alone, and others",
		batchOf(
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1) << 60}, "medium", "GPU", "group_idx", 1},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 1}, "medium", "GPU", "group_idx", 1},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 2}, "medium", "GPU", "group_idx", 2},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 3}, "medium", "CPU", "group_idx", 2},
			pairs{"type", "BlockRemoved", "block_hashes", []any{4}, "medium", "CPU", "group_idx", 2},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 5, 6}, "medium", "CPU"},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 7, 8}, "medium", "CPU"},
			[]any{"BlockRemoved", []any{uint64(1)<<60 + 9}, "GPU"},
			[]any{"BlockRemoved", []any{uint64(1)<<60 + 10}, "GPU"},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 11}, "x", 1},
			pairs{"type", "BlockRemoved", "block_hashes", []any{uint64(1)<<60 + 12}, "x", 1},
		),
		Batch{Timestamp: 1.5, HasRank: true, UnknownKeys: 2, Events: []Event{
			{Kind: BlockRemoved, Hashes: []EngineHash{1 << 60}, Medium: []byte("GPU"), HasGroup: true, Group: 1},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 1}, Medium: []byte("GPU"), HasGroup: true, Group: 1},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 2}, Medium: []byte("GPU"), HasGroup: true, Group: 2},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 3}, Medium: []byte("CPU"), HasGroup: true, Group: 2},
			{Kind: BlockRemoved, Hashes: []EngineHash{4}, Medium: []byte("CPU"), HasGroup: true, Group: 2},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 5, 6}, Medium: []byte("CPU")},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 7, 8}, Medium: []byte("CPU")},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 9}, Medium: []byte("GPU")},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 10}, Medium: []byte("GPU")},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 11}},
			{Kind: BlockRemoved, Hashes: []EngineHash{1<<60 + 12}},
		}},
	},
	{
		"unknown and ignored tags",
		batchOf(
			[]any{"Later", 1, pairs{"a", nil}},
			pairs{"x", 1, "type", "Later"},
			pairs{"block_hashes", 3},
			[]any{"Ignored"},
			pairs{"type", "Ignored"},
		),
		Batch{Timestamp: 1.5, HasRank: true, UnknownTags: 3, Events: []Event{{Kind: Ignored}, {Kind: Ignored}}},
	},
	{"ownership of a clear", batchOf([]any{"AllBlocksCleared", "kvcr", 1}),
		Batch{
			Timestamp:   1.5,
			HasRank:     true,
			UnknownKeys: 1,
			Events:      []Event{{Kind: AllBlocksCleared, Ownership: []byte("kvcr")}},
		}},
}

func TestDecodeBatch(t *testing.T) {
	var reused Batch
	for _, c := range decodeCases {
		t.Run(c.name, func(t *testing.T) {
			for _, b := range []*Batch{{}, &reused} {
				if err := DecodeBatch(c.payload, b); err != nil {
					t.Fatal(err)
				}
				got := *b
				got.hashes, got.tokens = nil, nil
				if len(got.Events) == 0 {
					got.Events = []Event{}
				}
				if !reflect.DeepEqual(got, c.want) {
					t.Errorf("got\n%+v\nwant\n%+v", got, c.want)
				}
			}
		})
	}
}

func TestDecodeBatchRefuses(t *testing.T) {
	deep := slices.Concat([]byte{0x94, 0, 0x90, 0xc0}, slices.Repeat([]byte{0x91}, 100), []byte{0})
	for _, c := range []struct {
		name    string
		payload []byte
		want    string // in the message
	}{
		{"empty input", nil, "input ends"},
		{"a number", []byte{1}, "batch: integer, want array"},
		{"one element", []byte{0x91, 0}, "batch of 1 elements"},
		{"events missing from a map", pack(nil, pairs{"ts", 1}), "without events"},
		{"events twice", pack(nil, pairs{"events", []any{}, "events", []any{}}), "events twice"},
		{"bytes after the end", append(mustHex(goldenNoRank), 0), "1 bytes after the batch"},
		{"a text timestamp", pack(nil, []any{"x", []any{}}), "ts: string, want float"},
		{"a rank below zero", pack(nil, []any{1, []any{}, -1}), "data_parallel_rank: number out of range"},
		{"4 G events", []byte{0x92, 0, 0xdd, 0xff, 0xff, 0xff, 0xff}, "4294967295 elements announced, 0 bytes left"},
		{"4 G hashes", batchOf(raw{0x92, 0xac, 'B', 'l', 'o', 'c', 'k', 'R', 'e', 'm', 'o', 'v', 'e', 'd', 0xdd, 0xff,
			0xff, 0xff, 0xff}), "elements announced"},
		{"4 G pairs", batchOf(raw{0xdf, 0xff, 0xff, 0xff, 0xff}), "elements announced"},
		{"a string of 4 GB", batchOf(raw{0x91, 0xdb, 0xff, 0xff, 0xff, 0xff}), "bytes wanted"},
		{"an extension of 4 GB", pack(nil, []any{1, []any{}, nil, raw{0xc9, 0xff, 0xff, 0xff, 0xff}}), "bytes wanted"},
		{"a reserved byte", pack(nil, []any{1, []any{}, nil, raw{0xc1}}), "no value"},
		{"deep nesting", deep, "nested deeper than 32"},
		{"an event that is text", batchOf("BlockStored"), "event: string, want array"},
		{"an event without a tag", batchOf([]any{}), "without a tag"},
		{"a tag that is a number", batchOf([]any{1}), "event tag: integer"},
		{"a short store", batchOf([]any{"BlockStored", []any{1}, nil, []any{}}), "BlockStored of 3 fields"},
		{"a short store map", batchOf(pairs{"type", "BlockStored", "block_hashes", []any{1}}),
			"BlockStored without token_ids"},
		{"a removal without hashes", batchOf([]any{"BlockRemoved"}), "without hashes"},
		{"a removal map without hashes", batchOf(pairs{"type", "BlockRemoved"}), "without block_hashes"},
		{"hashes twice", batchOf(pairs{"type", "BlockRemoved", "block_hashes", []any{1}, "block_hashes", []any{1}}),
			"block_hashes twice"},
		{"nil hashes", batchOf([]any{"BlockRemoved", nil}), "block_hashes: nil, want array"},
		{"a hash that is text", batchOf([]any{"BlockRemoved", []any{"x"}}), "block hash: string"},
		{"a hash of three bytes", batchOf([]any{"BlockRemoved", []any{[]byte{1, 2, 3}}}), "block hash of 3 bytes"},
		{"a token below zero", batchOf([]any{"BlockStored", []any{1}, nil, []any{-1}, 1}),
			"token id: number out of range"},
		{"a token beyond u32", batchOf([]any{"BlockStored", []any{1}, nil, []any{1 << 32}, 1}),
			"token id: number out of range"},
		{"tokens that are a text", batchOf([]any{"BlockStored", []any{1}, nil, "x", 1}),
			"token_ids: string, want array"},
		{"tokens and pairs mixed", batchOf([]any{"BlockStored", []any{1}, nil, []any{1, []any{1, 2}}, 1}),
			"token id: array"},
		{"pairs and tokens mixed", batchOf([]any{"BlockStored", []any{1}, nil, []any{[]any{1, 2}, 1}, 1}),
			"token pair: integer"},
		{"a token triple", batchOf([]any{"BlockStored", []any{1}, nil, []any{[]any{1, 2, 3}}, 1}), "token pair of 3"},
		{"extra keys that are a number", batchOf([]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, 4}),
			"extra_keys: integer"},
		{"a block size of text", batchOf([]any{"BlockStored", []any{1}, nil, []any{1}, "4"}), "block_size: string"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := DecodeBatch(c.payload, &Batch{})
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want ErrMalformed with %q", err, c.want)
			}
		})
	}
}

// A payload that is cut short at any byte must fail, and never decode to a shorter batch.
func TestDecodeBatchTruncated(t *testing.T) {
	for _, c := range decodeCases {
		for n := range c.payload {
			if err := DecodeBatch(c.payload[:n], &Batch{}); !errors.Is(err, ErrMalformed) {
				t.Errorf("%s: first %d of %d bytes: %v", c.name, n, len(c.payload), err)
			}
		}
	}
}

// manyBlocks is a payload like that of a prefill: one store of n blocks.
func manyBlocks(n, blockSize int) []byte {
	var hashes, tokens []any
	for i := range n {
		hashes = append(hashes, uint64(i+1)*0x9e3779b97f4a7c15)
	}
	for i := range n * blockSize {
		tokens = append(tokens, int(uint32(i)*2654435761)%151936)
	}
	return batchOf(pairs{"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", nil, "token_ids", tokens,
		"block_size", blockSize, "lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys",
		slices.Repeat([]any{nil}, n), "group_idx", 0, "kv_cache_spec_kind", "full_attention"})
}

// decodeSteps is a payload like that of a decode step: n stores of one block and n/4 removals, positional.
func decodeSteps(n, blockSize int) []byte {
	var events []any
	for i := range n {
		var tokens []any
		for j := range blockSize {
			tokens = append(tokens, int(uint32(i*blockSize+j)*2654435761)%151936)
		}
		h := uint64(i+1) * 0x9e3779b97f4a7c15
		events = append(events, []any{"BlockStored", []any{h}, h + 1, tokens, blockSize, nil, "GPU", nil, nil})
		if i%4 == 0 {
			events = append(events, []any{"BlockRemoved", []any{h}, "GPU"})
		}
	}
	return batchOf(events...)
}

func TestDecodeAndNormalizeDoNotAllocate(t *testing.T) {
	adapters := batchOf(
		pairs{
			"type",
			"BlockStored",
			"block_hashes",
			[]any{1, 2},
			"token_ids",
			ints(1, 32),
			"block_size",
			16,
			"lora_name",
			strings.Repeat("long", 20),
			"extra_keys",
			[]any{
				[]any{strings.Repeat("long", 20), []any{strings.Repeat("0a", 32), -3}, strings.Repeat("salt", 20)},
				[]any{strings.Repeat("long", 20)},
			},
		},
	)
	for name, payload := range map[string][]byte{"prefill": manyBlocks(64, 16), "decode": decodeSteps(32, 16),
		"adapters, salts, media": adapters} {
		var b Batch
		var ops []Operation
		n := NewNormalizer(16)
		run := func() {
			if err := DecodeBatch(payload, &b); err != nil {
				t.Fatal(err)
			}
			ops = n.Normalize(&b, ops[:0])
		}
		run()
		if a := testing.AllocsPerRun(50, run); a != 0 {
			t.Errorf("%s: %v allocations, want none", name, a)
		}
	}
}

func BenchmarkDecodeAndNormalize(b *testing.B) {
	for _, c := range []struct {
		name    string
		payload []byte
		size    int
		blocks  int
	}{
		{"prefill16_64blocks", manyBlocks(64, 16), 16, 64},
		{"prefill64_16blocks", manyBlocks(16, 64), 64, 16},
		{"decode16_32stores_8removes", decodeSteps(32, 16), 16, 40},
	} {
		b.Run(c.name, func(b *testing.B) {
			var batch Batch
			var ops []Operation
			n := NewNormalizer(c.size)
			for b.Loop() {
				if err := DecodeBatch(c.payload, &batch); err != nil {
					b.Fatal(err)
				}
				ops = n.Normalize(&batch, ops[:0])
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*c.blocks), "ns/block")
		})
	}
}

func FuzzDecodeBatch(f *testing.F) {
	for _, c := range decodeCases {
		f.Add(c.payload)
	}
	for _, payload := range captured(f) {
		f.Add(payload)
	}
	for _, g := range goldens(f) {
		f.Add(mustHex(g.Hex))
	}
	f.Add(manyBlocks(3, 4))
	f.Add(decodeSteps(3, 4))
	f.Fuzz(func(t *testing.T, payload []byte) {
		var b, again Batch
		err := DecodeBatch(payload, &b)
		if err != nil && !errors.Is(err, ErrMalformed) {
			t.Fatalf("error does not wrap ErrMalformed: %v", err)
		}
		if cap(b.hashes) > 64+2*len(payload) || cap(b.tokens) > 64+2*len(payload) {
			t.Fatalf("buffers of %d hashes and %d tokens for %d bytes", cap(b.hashes), cap(b.tokens), len(payload))
		}
		if err != nil {
			return
		}
		if err := DecodeBatch(payload, &again); err != nil || !reflect.DeepEqual(b.Events, again.Events) {
			t.Fatalf("the second decoding differs: %v", err)
		}
		n := NewNormalizer(0)
		for _, op := range n.Normalize(&b, nil) {
			switch {
			case op.Kind == OpDropped && op.Reason == "", op.Kind != OpDropped && op.Reason != "":
				t.Fatalf("operation %d with reason %q", op.Kind, op.Reason)
			case op.Kind == OpStored && len(op.Stored.Blocks) == 0, op.Kind == OpRemoved && len(op.Removed.Hashes) == 0:
				t.Fatalf("operation %d without blocks", op.Kind)
			}
		}
	})
}

// Decoding memory is bounded for every content of a 16 MiB message, also where few bytes announce large structures.
func TestDecodingIsBounded(t *testing.T) {
	const message = 16 << 20
	fill := func(one []byte) []byte { return bytes.Repeat(one, message/len(one)-2) }
	count := func(n int) []byte { return binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n)) }
	batch := func(events []byte) []byte { return append(append([]byte{0x93, 0x00}, events...), 0xc0) }
	cleared, removed := []byte("\x91\xb0AllBlocksCleared"), []byte("\x92\xacBlockRemoved\x90")
	for name, payload := range map[string][]byte{
		"cleared": batch(append(count(message/len(cleared)-2), fill(cleared)...)),
		"removed": batch(append(count(message/len(removed)-2), fill(removed)...)),
		"hashes": batch(slices.Concat([]byte{0x91, 0x92, 0xac}, []byte("BlockRemoved"), count(message-2),
			fill([]byte{1}))),
		"unknown": batch(append(count(message/2-2), fill([]byte{0x91, 0xa0})...)),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var b Batch
		err := DecodeBatch(payload, &b)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 10*message {
			t.Errorf("%s: %d MB taken for a message of %d MB; %d events, error %v",
				name, took>>20, message>>20, len(b.Events), err)
		}
		if name != "unknown" && !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
