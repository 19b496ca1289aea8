package kvblock

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
)

// describe renders each operation as one line, the form of the tests' expectations.
func describe(ops []Operation) []string {
	lines := []string{}
	for _, op := range ops {
		switch op.Kind {
		case OpStored:
			parent := "root"
			if op.Stored.HasParent {
				parent = fmt.Sprint(op.Stored.Parent)
			}
			var blocks []string
			for _, b := range op.Stored.Blocks {
				blocks = append(blocks, fmt.Sprintf("%d=%d", b.Engine, b.Local))
			}
			lines = append(
				lines,
				fmt.Sprintf("stored %v after %s: %s", op.Stored.Tier, parent, strings.Join(blocks, " ")),
			)
		case OpRemoved:
			lines = append(lines, fmt.Sprintf("removed %v: %d", op.Removed.Tier, op.Removed.Hashes))
		case OpCleared:
			lines = append(lines, "cleared")
		case OpDropped:
			lines = append(lines, fmt.Sprintf("dropped %v: %s", op.Event, op.Reason))
		}
	}
	return lines
}

// store is a store of the tokens 1..4 under hash, as a map with additional fields.
func store(hash int, more ...any) pairs {
	return append(
		pairs{"type", "BlockStored", "block_hashes", []any{hash}, "token_ids", ints(1, 4), "block_size", 4},
		more...)
}

func remove(hash int, more ...any) pairs {
	return append(pairs{"type", "BlockRemoved", "block_hashes", []any{hash}}, more...)
}

const (
	plain1  = "14643705804678351452" // local hash of the tokens 1..4
	tenant1 = "5738685477468498325"  // in the namespace tenant-a
)

// salted is the line of a store of the tokens 1..4 without a parent.
func salted(hash int, o HashOptions) string {
	o.BlockSize = 4
	return fmt.Sprintf("stored device after root: %d=%d", hash, localOf(1, 4, o))
}

func TestNormalize(t *testing.T) {
	mark := "0123456789abcdef" + strings.Repeat("0", 48)
	native := strings.Repeat("0123456789abcdef", 4)
	clearAll := pairs{"type", "AllBlocksCleared"}
	for _, c := range []struct {
		name   string
		events []any
		want   []string
	}{
		{"two blocks", []any{[]any{"BlockStored", []any{111, 222}, nil, ints(1, 8), 4}},
			[]string{"stored device after root: 111=14643705804678351452 222=16777012769546811212"}},
		{"with a parent", []any{store(5, "parent_block_hash", 4)}, []string{"stored device after 4: 5=" + plain1}},
		{"removed and cleared", []any{remove(5), clearAll}, []string{"removed device: [5]", "cleared"}},
		{"events without blocks", []any{pairs{"type", "BlockRemoved", "block_hashes", []any{}},
			[]any{"BlockStored", []any{}, nil, []any{}, 4}}, []string{}},
		{"adapter", []any{store(5, "lora_name", "my-lora")},
			[]string{"stored device after root: 5=15671544057904749233"}},
		{"adapter and namespace", []any{store(5, "lora_name", "my-lora", "cache_salt", "tenant-a")},
			[]string{"stored device after root: 5=6157910915076630503"}},
		{"eagle", []any{[]any{"BlockStored", []any{5, 6}, nil, []any{[]any{1, 2}, []any{2, 3}, []any{3, 4}, []any{4, 5},
			[]any{5, 6}, []any{6, 7}, []any{7, 8}, []any{8, 9}}, 4}},
			[]string{"stored device after root: 5=1914873892905420881 6=1929047464662796003"}},
		{"tiers", []any{store(1, "medium", "GPU"), store(2, "medium", "CPU_TIER1"), store(3, "medium", "STORAGE"),
			remove(4, "medium", "SHARED"), store(5, "medium", "FS")},
			[]string{"stored device after root: 1=" + plain1, "stored host_pinned after root: 2=" + plain1,
				"stored disk after root: 3=" + plain1,
				"removed external: [4]", "dropped BlockStored: unknown_medium"}},
		{"ownership is checked first", []any{store(1, "ownership", "kvcr"), pairs{"type", "Ignored", "ownership", "?"},
			pairs{"type", "Ignored"}},
			[]string{"dropped BlockStored: unsupported_ownership", "dropped Ignored: unknown_ownership",
				"dropped Ignored: ignored_event"}},
		{"locality", []any{store(1, "locality", "LOCAL"), remove(1, "locality", "REMOTE"),
			store(1, "locality", "MOON", "medium", "FS")},
			[]string{"stored device after root: 1=" + plain1, "dropped BlockRemoved: non_local_locality",
				"dropped BlockStored: non_local_locality"}},
		{"groups are learned from stores", []any{
			store(1, "group_idx", 0), store(2, "group_idx", 1),
			remove(2, "group_idx", 1, "kv_cache_spec_kind", "full_attention"), store(3, "group_idx", 1),
			store(4, "group_idx", 1, "kv_cache_spec_kind", "mla_attention"), store(5, "group_idx", 1),
			remove(5, "group_idx", 1),
			store(6, "group_idx", 2, "kv_cache_spec_kind", "sliding_window"), remove(6, "group_idx", 2),
			store(7, "group_idx", 0, "kv_cache_spec_kind", "novel"), store(8, "group_idx", 0),
			store(9, "group_idx", 3, "kv_cache_spec_kind", "sink_full_attention", "medium", "DISK"),
			store(9, "group_idx", 3)},
			[]string{"stored device after root: 1=" + plain1, "dropped BlockStored: unlearned_group_idx",
				"removed device: [2]", "dropped BlockStored: unlearned_group_idx",
				"stored device after root: 4=" + plain1, "stored device after root: 5=" + plain1, "removed device: [5]",
				"dropped BlockStored: unknown_kind", "dropped BlockStored: unknown_kind",
				"stored disk after root: 9=" + plain1, "dropped BlockStored: unlearned_group_idx",
				"dropped BlockStored: non_main_attention_kind", "dropped BlockRemoved: non_main_attention_group"}},
		{"a child inherits its parent's namespace", []any{
			store(1, "cache_salt", "tenant-a"), store(2, "parent_block_hash", 1), store(3, "parent_block_hash", 2),
			store(4, "parent_block_hash", 9), store(5, "parent_block_hash", 3, "cache_salt", "")},
			[]string{"stored device after root: 1=" + tenant1, "stored device after 1: 2=" + tenant1,
				"stored device after 2: 3=" + tenant1,
				"stored device after 9: 4=" + plain1, "stored device after 3: 5=" + tenant1}},
		{"a removal and a clear forget the namespace", []any{
			store(1, "cache_salt", "tenant-a"), remove(1), store(2, "parent_block_hash", 1),
			store(1, "cache_salt", "tenant-a"), clearAll, store(2, "parent_block_hash", 1)},
			[]string{"stored device after root: 1=" + tenant1, "removed device: [1]", "stored device after 1: 2=" +
				plain1,
				"stored device after root: 1=" + tenant1, "cleared", "stored device after 1: 2=" + plain1}},
		{"one hash in two namespaces", []any{
			store(1, "cache_salt", "tenant-a"), store(1, "cache_salt", "tenant-b"), store(2, "parent_block_hash", 1),
			remove(1), store(2, "parent_block_hash", 1),
			store(2, "parent_block_hash", 1, "cache_salt", "tenant-a")},
			[]string{"stored device after root: 1=" + tenant1, "stored device after root: 1=" +
				fmt.Sprint(localOf(1, 4, HashOptions{BlockSize: 4, CacheNamespace: "tenant-b"})),
				"dropped BlockStored: ambiguous_cache_namespace", "removed device: [1]",
				"dropped BlockStored: ambiguous_cache_namespace",
				"stored device after 1: 2=" + tenant1}},
		{"one hash with and without namespace", []any{store(1, "cache_salt", "tenant-a"), store(1),
			store(2, "parent_block_hash", 1)},
			[]string{"stored device after root: 1=" + tenant1, "stored device after root: 1=" + plain1,
				"dropped BlockStored: ambiguous_cache_namespace"}},
		{"namespace in extra keys", []any{
			store(1, "extra_keys", []any{[]any{7, "dynamo-cache-salt:tenant-a"}}),
			store(2, "extra_keys", []any{[]any{"tenant-a"}}),
			store(3, "lora_name", "dynamo-cache-salt:tenant-a", "extra_keys",
				[]any{[]any{"dynamo-cache-salt:tenant-a"}}),
			store(4, "extra_keys", []any{nil, []any{"dynamo-cache-salt:tenant-a"}}),
			store(5, "medium", "DISK", "extra_keys", []any{[]any{"dynamo-cache-salt:tenant-a"}})},
			[]string{"stored device after root: 1=" + tenant1, "stored device after root: 2=" + tenant1,
				"stored device after root: 3=" +
					fmt.Sprint(localOf(1, 4, HashOptions{BlockSize: 4, LoRAName: "dynamo-cache-salt:tenant-a"})),
				"stored device after root: 4=" + plain1, "stored disk after root: 5=" + tenant1}},
		{"stock vLLM's namespace", []any{
			store(1, "lora_name", "tenant-a", "extra_keys", []any{[]any{"tenant-a", []any{native, 2}, "tenant-a"}}),
			store(2, "extra_keys", []any{[]any{native, "tenant-a", []byte("digest")}}),
			store(3, "parent_block_hash", 2),
			store(4, "parent_block_hash", 9, "extra_keys", []any{[]any{"an old image's name"}}),
			store(5, "parent_block_hash", 9, "lora_name", "my-lora", "extra_keys", []any{[]any{"my-lora"}})},
			[]string{"stored device after root: 1=" +
				fmt.Sprint(localOf(1, 4, HashOptions{BlockSize: 4, LoRAName: "tenant-a", CacheNamespace: "tenant-a",
					MediaHashes: [][]uint64{{0x0123456789abcdef}}})),
				"stored device after root: 2=" +
					fmt.Sprint(localOf(1, 4, HashOptions{BlockSize: 4, CacheNamespace: "tenant-a",
						MediaHashes: [][]uint64{{0x0123456789abcdef, xxh3.HashString("digest")}}})),
				"stored device after 2: 3=" + tenant1,
				"stored device after 9: 4=" +
					fmt.Sprint(localOf(1,
						4, HashOptions{BlockSize: 4,
							MediaHashes: [][]uint64{{xxh3.HashString("an old image's name")}}})),
				"stored device after 9: 5=" +
					fmt.Sprint(localOf(1, 4, HashOptions{BlockSize: 4, LoRAName: "my-lora"}))}},
		{"salts that look like something else", []any{
			store(1, "extra_keys", []any{[]any{native}}),
			store(2, "extra_keys", []any{[]any{strings.ToUpper(native)}}),
			store(3, "lora_name", "sql", "extra_keys", []any{[]any{"sql", native}}),
			store(4, "extra_keys", []any{[]any{[]any{native, 2}, mark}}),
			store(5, "extra_keys", []any{[]any{"dynamo-cache-salt:"}}),
			store(6, "lora_name", native, "extra_keys", []any{[]any{native}}),
			store(7, "parent_block_hash", 1, "extra_keys", []any{nil}),
			store(8, "parent_block_hash", 9, "extra_keys", []any{[]any{native}})},
			[]string{salted(1, HashOptions{CacheNamespace: native}),
				salted(2, HashOptions{CacheNamespace: strings.ToUpper(native)}),
				salted(3, HashOptions{CacheNamespace: native, LoRAName: "sql"}),
				salted(4, HashOptions{CacheNamespace: mark, MediaHashes: [][]uint64{{0x0123456789abcdef}}}),
				salted(5, HashOptions{CacheNamespace: "dynamo-cache-salt:"}),
				salted(6, HashOptions{LoRAName: native}),
				strings.Replace(salted(7, HashOptions{CacheNamespace: native}), "root", "1", 1),
				strings.Replace(salted(8, HashOptions{MediaHashes: [][]uint64{{0x0123456789abcdef}}}), "root", "9",
					1)}},
		{"an adapter without a name", []any{store(1, "lora_id", 1), store(2, "lora_id", 0), store(3, "lora_id", nil),
			store(4, "lora_id", 1, "lora_name", "my-lora")},
			[]string{"dropped BlockStored: unnamed_adapter", "stored device after root: 2=" + plain1,
				"stored device after root: 3=" + plain1,
				"stored device after root: 4=15671544057904749233"}},
		{"lookahead tokens", []any{
			pairs{"type", "BlockStored", "block_hashes", []any{5, 6}, "token_ids", ints(1, 8), "block_size", 4,
				"lookahead_token_ids", []any{[]any{5}, []any{9}}},
			pairs{"type", "BlockStored", "lookahead_token_ids", []any{[]any{5}, []any{9}}, "block_hashes", []any{5, 6},
				"token_ids", ints(1, 5), "block_size", 4}},
			[]string{"stored device after root: 5=1914873892905420881 6=1929047464662796003",
				"stored device after root: 5=1914873892905420881", "dropped BlockStored: short_token_ids"}},
		{"local hashes instead of tokens", []any{
			pairs{"type", "BlockStored", "block_hashes", []any{5, 6}, "tokens_hashes", []any{-1, 7}, "block_size", 4,
				"block_mm_infos", []any{nil, pairs{}}},
			pairs{"type", "BlockStored", "block_hashes", []any{7}, "parent_block_hash", 6, "tokens_hashes",
				[]any{1, 2, 3}, "block_size", 4},
			pairs{"type", "BlockStored", "block_hashes", []any{7}, "tokens_hashes", []any{1}, "block_size", 4,
				"cache_salt", "tenant-a"},
			pairs{"type", "BlockStored", "block_hashes", []any{7}, "tokens_hashes", []any{1}, "block_size", 8}},
			[]string{"stored device after root: 5=18446744073709551615 6=7", "stored device after 6: 7=1",
				"dropped BlockStored: unsalted_tokens_hashes", "dropped BlockStored: block_size_mismatch"}},
		{"media", []any{
			[]any{"BlockStored", []any{1, 2, 3}, nil, ints(1, 12), 4, nil, nil, nil,
				[]any{nil, []any{[]any{mark, 2}}, nil}},
			[]any{"BlockStored", []any{1, 2, 3}, nil, ints(1, 12), 4, nil, nil, nil,
				[]any{nil, []any{native, mark, 5}, 6, []any{mark}}},
			[]any{"BlockStored", []any{1}, nil, ints(1, 4), 4, nil, nil, nil,
				[]any{[]any{native, []any{mark}, []any{3, 4}, "0123456789abcde_" + strings.Repeat("0", 48)}}},
			[]any{"BlockStored", []any{1}, nil, ints(1, 4), 4, nil, nil, nil, nil, []any{pairs{"mm_objects", []any{}}}},
			[]any{"BlockStored", []any{1, 2, 3}, nil, ints(1, 12), 4, nil, nil, nil, nil,
				[]any{nil, pairs{"mm_objects", []any{}}, nil}},
			pairs{"type", "BlockStored", "block_hashes", []any{1, 2, 3}, "token_ids", ints(1, 12), "block_size", 4,
				"mm_keys", []any{[]any{}, []any{}, []any{pairs{"type", "mm_key"}}}},
			pairs{"type", "BlockStored", "block_hashes", []any{1, 2, 3}, "token_ids",
				append(ints(1, 7), "ab", 9, 10, 11, 12), "block_size", 4}},
			[]string{"stored device after root: 1=14643705804678351452 2=209020911815014387 3=483935686894639516",
				"stored device after root: 1=14643705804678351452 2=" +
					fmt.Sprint(localOf(5,
						8, HashOptions{BlockSize: 4,
							MediaHashes: [][]uint64{{0x0123456789abcdef, 0x0123456789abcdef}}})) +
					" 3=483935686894639516",
				"stored device after root: 1=" +
					fmt.Sprint(localOf(1,
						4, HashOptions{BlockSize: 4, CacheNamespace: "0123456789abcde_" + strings.Repeat("0", 48),
							MediaHashes: [][]uint64{{0x0123456789abcdef}}})),
				"dropped BlockStored: unsupported_block_mm_infos",
				"stored device after root: 1=14643705804678351452", "dropped BlockStored: unsupported_block_mm_infos",
				"stored device after root: 1=14643705804678351452 2=16777012769546811212",
				"dropped BlockStored: unsupported_block_mm_infos",
				"stored device after root: 1=14643705804678351452", "dropped BlockStored: unsupported_block_mm_infos"}},
		{"the same hash twice", []any{[]any{"BlockStored", []any{1, 1}, nil, ints(1, 8), 4},
			store(3, "parent_block_hash", 3),
			[]any{"BlockStored", append(ints(1, 9), 4), nil, ints(1, 40), 4}},
			[]string{"dropped BlockStored: duplicate_block_hash", "dropped BlockStored: duplicate_block_hash",
				"dropped BlockStored: duplicate_block_hash"}},
		{"another block size", []any{[]any{"BlockStored", []any{1}, nil, ints(1, 8), 8},
			[]any{"BlockStored", []any{1}, nil, ints(1, 8), 0}},
			[]string{"dropped BlockStored: block_size_mismatch", "dropped BlockStored: block_size_mismatch"}},
		{"too few tokens", []any{[]any{"BlockStored", []any{1, 2}, nil, ints(1, 7), 4},
			[]any{"BlockStored", []any{1}, nil, ints(1, 3), 4}},
			[]string{"stored device after root: 1=" + plain1, "dropped BlockStored: short_token_ids",
				"dropped BlockStored: short_token_ids"}},
		{"too many tokens", []any{[]any{"BlockStored", []any{1}, nil, ints(1, 9), 4}},
			[]string{"stored device after root: 1=" + plain1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Batch
			if err := DecodeBatch(batchOf(c.events...), &b); err != nil {
				t.Fatal(err)
			}
			if got := describe(NewNormalizer(4).Normalize(&b, nil)); !slices.Equal(got, c.want) {
				t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(c.want, "\n  "))
			}
		})
	}
}

func localOf(from, to Token, o HashOptions) LocalHash {
	return AppendLocalHashes(nil, countingTokens(from, to), o)[0]
}

// If neither Dynamo nor kvepp marks an engine's salts, a client's salt may still look like a marked one.
func TestUnmarkedSalts(t *testing.T) {
	const text = "dynamo-cache-salt:tenant-a"
	n := NewNormalizer(4)
	n.UnmarkedSalts()
	n.Reset()
	var b Batch
	if err := DecodeBatch(batchOf(store(1, "extra_keys", []any{[]any{text}}),
		store(2, "parent_block_hash", 9, "extra_keys", []any{[]any{text}})), &b); err != nil {
		t.Fatal(err)
	}
	want := []string{salted(1, HashOptions{CacheNamespace: text}), strings.Replace(
		salted(2, HashOptions{MediaHashes: [][]uint64{{xxh3.HashString(text)}}}), "root", "9", 1)}
	if got := describe(n.Normalize(&b, nil)); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// If the block size is not configured, the worker's first main-attention store on the device sets it.
func TestNormalizerAdoptsBlockSize(t *testing.T) {
	n := NewNormalizer(0)
	var b Batch
	for _, step := range []struct {
		event any
		want  string
		size  int
	}{
		{store(1, "kv_cache_spec_kind", "mamba"), "dropped BlockStored: non_main_attention_kind", 0},
		{store(1, "medium", "DISK"), "dropped BlockStored: tier_block_size", 0},
		{[]any{"BlockStored", []any{1}, nil, ints(1, 4), 1 << 30}, "dropped BlockStored: block_size_mismatch", 0},
		{store(1), "stored device after root: 1=" + plain1, 4},
		{[]any{"BlockStored", []any{1}, nil, ints(1, 8), 8}, "dropped BlockStored: block_size_mismatch", 4},
		{store(1, "medium", "DISK"), "stored disk after root: 1=" + plain1, 4},
	} {
		if err := DecodeBatch(batchOf(step.event), &b); err != nil {
			t.Fatal(err)
		}
		if got := describe(n.Normalize(&b, nil)); !slices.Equal(got, []string{step.want}) ||
			n.Traits().BlockSize != step.size {
			t.Errorf("got %q, block size %d; want %q, %d", got, n.Traits().BlockSize, step.want, step.size)
		}
	}
}

func TestNormalizeCapturedSimulator(t *testing.T) {
	var b Batch
	if err := DecodeBatch(mustHex(capturedSimulator), &b); err != nil {
		t.Fatal(err)
	}
	ops := NewNormalizer(0).Normalize(&b, nil)
	if len(ops) != 1 || ops[0].Kind != OpStored || ops[0].Stored.HasParent || len(ops[0].Stored.Blocks) != 1 {
		t.Fatalf("got %q", describe(ops))
	}
	block := ops[0].Stored.Blocks[0]
	want := AppendLocalHashes(nil, b.Events[0].Tokens, HashOptions{BlockSize: 16})
	if block.Engine != 1001605090434437995 || block.Local != want[0] {
		t.Errorf("got %+v, want local hash %d", block, want[0])
	}
}

// The table of namespaces is bounded; a store beyond the bound is dropped with a reason.
func TestNormalizerNamespaceBound(t *testing.T) {
	n := NewNormalizer(4)
	n.namespaceLimit = 2
	var b Batch
	if err := DecodeBatch(batchOf(store(1, "cache_salt", "tenant-a"), store(2, "parent_block_hash", 1),
		store(3, "parent_block_hash", 2),
		store(4), remove(1), store(3, "parent_block_hash", 2)), &b); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"stored device after root: 1=" + tenant1,
		"stored device after 1: 2=" + tenant1,
		"dropped BlockStored: cache_namespaces_full",
		"stored device after root: 4=" + plain1,
		"removed device: [1]",
		"stored device after 2: 3=" + tenant1,
	}
	if got := describe(n.Normalize(&b, nil)); !slices.Equal(got, want) {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// Traits that follow from a worker's events.
func TestNormalizerTraits(t *testing.T) {
	bigrams := pairs{
		"type",
		"BlockStored",
		"block_hashes",
		[]any{1},
		"token_ids",
		[]any{[]any{1, 2}, []any{2, 3}, []any{3, 4}, []any{4, 5}},
		"block_size",
		4,
	}
	for _, c := range []struct {
		name   string
		events []any
		want   Traits
	}{
		{"plain", []any{store(1)}, Traits{BlockSize: 4}},
		{"pairs", []any{bigrams}, Traits{BlockSize: 4, EAGLE: true}},
		{"single tokens after pairs", []any{bigrams, store(1)}, Traits{BlockSize: 4}},
		{"one token ahead", []any{store(1, "lookahead_token_ids", []any{[]any{5}})}, Traits{BlockSize: 4, EAGLE: true}},
		{"two tokens ahead", []any{store(1, "lookahead_token_ids", []any{[]any{5, 6}})},
			Traits{BlockSize: 4, EAGLE: true, UpperBound: true}},
		{"a window beside full attention", []any{store(1, "group_idx", 0, "kv_cache_spec_kind", "full_attention"),
			store(2, "group_idx", 1, "kv_cache_spec_kind", "sliding_window")},
			Traits{BlockSize: 4, UpperBound: true}},
		{"two windows", []any{
			store(2, "group_idx", 1, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 128),
			store(3, "group_idx", 2, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 64)},
			Traits{UpperBound: true, Window: 128}},
		{"a window that is no number", []any{
			store(2, "group_idx", 1, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", "all")},
			Traits{UpperBound: true}},
		{"cross attention", []any{store(1), store(2, "group_idx", 1, "kv_cache_spec_kind", "cross_attention")},
			Traits{BlockSize: 4}},
		{"on disk", []any{store(1), pairs{"type", "BlockStored", "block_hashes", []any{2}, "token_ids", ints(1, 4),
			"block_size", 4, "medium", "DISK", "lookahead_token_ids", []any{[]any{5}}}},
			Traits{BlockSize: 4}},
	} {
		var b Batch
		if err := DecodeBatch(batchOf(c.events...), &b); err != nil {
			t.Fatal(err)
		}
		n := NewNormalizer(0)
		if n.Normalize(&b, nil); n.Traits() != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, n.Traits(), c.want)
		}
	}
}
