package kvblock

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Operations of hybrid models' batches: full attention is group 9, windows are groups 0 and 1, states group 2.
func TestClasses(t *testing.T) {
	group := func(kind string, at, window, hash int, more ...any) pairs {
		p := append(pairs{"group_idx", at, "kv_cache_spec_kind", kind}, more...)
		if window > 0 {
			p = append(p, "kv_cache_spec_sliding_window", window)
		}
		return store(hash, p...)
	}
	full := func(hash int, more ...any) pairs { return group("full_attention", 9, 0, hash, more...) }
	window := func(at, hash int, more ...any) pairs { return group("sliding_window", at, 64, hash, more...) }
	state := func(hash int, more ...any) pairs { return group("mamba", 2, 0, hash, more...) }
	gone := func(at, hash int) pairs { return remove(hash, "group_idx", at) }
	clearAll := pairs{"type", "AllBlocksCleared"}
	hash := "=" + plain1
	device := "stored device after root: 1" + hash
	class := "stored device_class_0 after root: 1" + hash
	small := func(size int, hashes ...any) pairs {
		return pairs{"type", "BlockStored", "block_hashes", hashes, "token_ids", ints(1, 8), "block_size", size,
			"group_idx", 0, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 8}
	}
	partHash, _ := PartHash([]Token{1, 2, 3, 4}, HashOptions{BlockSize: 4}, 0, 2)
	part := fmt.Sprint("=", partHash)
	windows := Classes{{Kind: ClassWindow, Window: 64, BlockSize: 4}}
	for _, c := range []struct {
		name    string
		events  []any
		want    []string
		classes Classes
	}{
		{"one group", []any{window(0, 1), full(1), gone(0, 1), gone(9, 1)},
			[]string{device, "removed device: [1]", class, "removed device_class_0: [1]"}, windows},
		{"a block behind another", []any{window(0, 2, "parent_block_hash", 1), full(1),
			full(2, "parent_block_hash", 1)},
			[]string{device, "stored device after 1: 2" + hash, "stored device_class_0 after 1: 2" + hash}, windows},
		{"a block of two groups", []any{window(0, 1), window(1, 1), full(1), gone(0, 1), gone(1, 1)},
			[]string{device, class, "removed device_class_0: [1]"}, windows},
		{"copies in two groups", []any{window(0, 1), window(1, 1), window(1, 1), full(1), full(1), gone(1, 1),
			gone(1, 1), window(1, 1), gone(0, 1)},
			[]string{device, device, class, "removed device_class_0: [1]", class, "removed device_class_0: [1]"},
			windows},
		{"a window and a state", []any{state(1), window(0, 1), full(1), gone(2, 1)},
			[]string{device, class, "stored device_class_1 after root: 1" + hash, "removed device_class_0: [1]"},
			Classes{{Kind: ClassState, BlockSize: 4}, {Kind: ClassWindow, Window: 64, BlockSize: 4}}},
		{"a clear", []any{window(0, 1), window(1, 1), full(1), clearAll, window(1, 1), gone(0, 1), full(1)},
			[]string{device, class, "cleared", device}, windows},
		{"a removal of a group that stored nothing", []any{gone(0, 1), window(0, 1), full(1)},
			[]string{"removed device: [1]", device, class}, windows},
		{"on the host", []any{full(1), window(0, 1), window(0, 1, "medium", "CPU")},
			[]string{device, "dropped BlockStored: non_main_attention_kind", class}, windows},
		{"a block that full attention does not store", []any{full(1), window(0, 2), window(0, 1), gone(0, 1)},
			[]string{device, "dropped BlockStored: unplaced_block", "dropped BlockStored: non_main_attention_kind",
				"dropped BlockRemoved: non_main_attention_group"}, Classes{}},
		{"a block whose store by full attention is dropped", []any{full(1),
			full(2, "lora_id", 7), window(0, 2), window(0, 1)},
			[]string{device, "dropped BlockStored: unnamed_adapter", "dropped BlockStored: unplaced_block", class},
			windows},
		{"smaller blocks", []any{full(1), full(2, "parent_block_hash", 1), small(2, 101, 1, 102, 2), gone(0, 101)},
			[]string{device, "stored device after 1: 2" + hash, "stored device_class_0 after 1: 2" + hash,
				"stored device_class_0 after 1: 102" + part, class, "stored device_class_0 after root: 101" + part,
				"removed device_class_0: [101]"},
			Classes{{Kind: ClassWindow, Window: 8, BlockSize: 2}}},
		{"smaller blocks that no block of full attention follows", []any{full(1), small(2, 1, 103)},
			[]string{device, "dropped BlockStored: unplaced_block"}, Classes{}},
		{"more smaller blocks before a block than it has",
			[]any{full(2, "parent_block_hash", 9), small(2, 101, 102, 2)},
			[]string{"stored device after 9: 2" + hash, "stored device_class_0 after 9: 2" + hash,
				"stored device_class_0 after 9: 102" + part, "dropped BlockStored: unplaced_block"}, Classes{}},
		{"blocks that do not fit into full attention's", []any{full(1), small(3, 1)},
			[]string{device, "dropped BlockStored: non_main_attention_kind"}, Classes{}},
		{"a window of unknown size", []any{full(1), group("sliding_window", 0, 0, 1)},
			[]string{device, "dropped BlockStored: non_main_attention_kind"}, Classes{}},
		{"too many classes", []any{full(1), group("sliding_window", 0, 8, 1), group("sliding_window", 1, 9, 1),
			group("sliding_window", 2, 10, 1), group("sliding_window", 3, 11, 1)},
			[]string{device, "dropped BlockStored: non_main_attention_kind",
				"dropped BlockStored: non_main_attention_kind", "dropped BlockStored: non_main_attention_kind",
				"dropped BlockStored: non_main_attention_kind"}, Classes{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Batch
			if err := DecodeBatch(batchOf(c.events...), &b); err != nil {
				t.Fatal(err)
			}
			n := NewNormalizer(4)
			if got := describe(n.Normalize(&b, nil)); !slices.Equal(got, c.want) {
				t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(c.want, "\n  "))
			}
			traits := n.Traits()
			if traits.Classes != c.classes || traits.UpperBound != (c.classes == Classes{}) {
				t.Errorf("classes %v, upper bound %v", &traits.Classes, traits.UpperBound)
			}
		})
	}
}

// A group that appears after another group of its class has stored blocks clears the worker: the index counts these
// blocks as held by the class.
func TestLateGroup(t *testing.T) {
	n := NewNormalizer(4)
	var b Batch
	batch := func(events ...any) []string {
		t.Helper()
		if err := DecodeBatch(batchOf(events...), &b); err != nil {
			t.Fatal(err)
		}
		return describe(n.Normalize(&b, nil))
	}
	of := func(at, hash int, kind string) pairs {
		return store(hash, "group_idx", at, "kv_cache_spec_kind", kind, "kv_cache_spec_sliding_window", 64)
	}
	batch(of(0, 1, "sliding_window"), of(9, 1, "full_attention"))
	got := batch(of(0, 2, "sliding_window"), of(1, 2, "sliding_window"), of(9, 2, "full_attention"))
	if !slices.Contains(got, "cleared") {
		t.Errorf("got %q", got)
	}
	got = batch(of(0, 3, "sliding_window"), of(1, 3, "sliding_window"), of(9, 3, "full_attention"))
	want := []string{"stored device after root: 3=" + plain1, "stored device_class_0 after root: 3=" + plain1}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
