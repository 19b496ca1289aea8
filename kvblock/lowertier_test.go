package kvblock

import (
	"fmt"
	"strings"
	"testing"
)

// on returns a store as an engine announces it for another tier, in blocks of any size. parent 0 means no parent.
func on(medium string, size, parent, tokens int, hashes ...any) pairs {
	e := pairs{"type", "BlockStored", "block_hashes", hashes, "token_ids", ints(1, tokens), "block_size", size,
		"medium", medium}
	if parent != 0 {
		e = append(e, "parent_block_hash", parent)
	}
	return e
}

const otherTier = "dropped tier_block_size 0"

// A store in a lower tier says nothing about the size of the device's blocks. If it has another size, or no tokens, it
// is dropped and changes nothing that is known of the device's blocks.
func TestLowerTiersInAnotherBlockSize(t *testing.T) {
	gpu := on("GPU", 4, 0, 8, 1, 2)
	grouped := func(e pairs, kind string) pairs { return append(e, "group_idx", 0, "kv_cache_spec_kind", kind) }
	for _, size := range []int{0, 4} {
		for _, c := range []struct {
			name   string
			events []any
			want   string
		}{
			{"chunks of LMCache", []any{gpu, on("CPU", 256, 0, 256, 9001), on("CPU", 256, 9001, 256, 9002)},
				"stored [1 2]; " + otherTier + "; " + otherTier},
			{"a chunk first", []any{on("CPU", 256, 0, 256, 9001), gpu}, otherTier + "; stored [1 2]"},
			{"LMCache's last chunk", []any{gpu, on("CPU", 100, 9001, 100, 9002)}, "stored [1 2]; " + otherTier},
			{"a size of its own, no tokens", []any{gpu, on("CPU", 16, 0, 0, 2)}, "stored [1 2]; " + otherTier},
			{"a placeholder", []any{gpu, append(on("CPU", 0, 0, 0, 2), "group_idx", 0)}, "stored [1 2]; " + otherTier},
			{"the device's size, no tokens", []any{gpu, on("CPU", 4, 0, 0, 2)},
				"stored [1 2]; dropped short_token_ids 0"},
			{"a partial tail", []any{gpu, grouped(on("CPU", 2, 2, 2, 3), "full_attention")},
				"stored [1 2]; " + otherTier},
			{"a window's chunk", []any{gpu, grouped(on("CPU", 8, 0, 8, 3), "sliding_window")},
				"stored [1 2]; " + otherTier},
			{"storage", []any{gpu, on("STORAGE", 256, 0, 256, 9001)}, "stored [1 2]; " + otherTier},
			{"external", []any{on("EXTERNAL", 256, 0, 256, 9001), gpu}, otherTier + "; stored [1 2]"},
			{"its removal", []any{gpu, on("CPU", 16, 0, 0, 2), remove(2, "medium", "CPU"), on("GPU", 4, 2, 4, 3)},
				"stored [1 2]; " + otherTier + "; removed [2]; stored [3]"},
			{"the device's size", []any{gpu, on("CPU", 4, 0, 8, 1, 2)}, "stored [1 2]; stored [1 2]"},
			{"no hashes", []any{gpu, on("CPU", 256, 0, 256)}, "stored [1 2]; "},
		} {
			n := NewNormalizer(size)
			if got := normalizeEach(t, n, c.events...); got != c.want {
				t.Errorf("size %d, %s:\n got %s\nwant %s", size, c.name, got, c.want)
			}
			if got := n.Traits(); got != (Traits{BlockSize: 4}) {
				t.Errorf("size %d, %s: traits %+v", size, c.name, got)
			}
		}
	}
}

// vLLM's offloading announces blocks in lower tiers without their salt. Such a store has the namespace of the device's
// block of the same hash, and neither it nor its removal changes what is known of that block.
func TestNamespacesInLowerTiers(t *testing.T) {
	salted := append(on("GPU", 4, 0, 4, 1), "extra_keys", []any{[]any{"tenant-a"}})
	child := func(tier string, hash, parent int) string {
		return fmt.Sprintf("stored %s after %d: %d=%s", tier, parent, hash, tenant1)
	}
	first := "stored device after root: 1=" + tenant1
	for _, c := range []struct {
		name   string
		events []any
		want   []string
	}{
		{"another size without tokens", []any{salted, on("CPU", 16, 0, 0, 1), on("GPU", 4, 1, 4, 2)},
			[]string{first, "dropped BlockStored: tier_block_size", child("device", 2, 1)}},
		{"the device's size without tokens", []any{salted, on("CPU", 4, 0, 0, 1), on("GPU", 4, 1, 4, 2)},
			[]string{first, "dropped BlockStored: short_token_ids", child("device", 2, 1)}},
		{"with tokens, without the salt", []any{salted, on("CPU", 4, 0, 4, 1), on("GPU", 4, 1, 4, 2)},
			[]string{first, "stored host_pinned after root: 1=" + tenant1, child("device", 2, 1)}},
		{"on disk", []any{salted, on("STORAGE", 4, 0, 4, 1), on("STORAGE", 4, 1, 4, 2)},
			[]string{first, "stored disk after root: 1=" + tenant1, child("disk", 2, 1)}},
		{"removed from the host", []any{salted, on("CPU", 4, 0, 4, 1), remove(1, "medium", "CPU"),
			on("GPU", 4, 1, 4, 2)},
			[]string{first, "stored host_pinned after root: 1=" + tenant1, "removed host_pinned: [1]",
				child("device", 2, 1)}},
		{"removed from the device", []any{salted, on("CPU", 4, 0, 4, 1), remove(1), on("CPU", 4, 1, 4, 2)},
			[]string{first, "stored host_pinned after root: 1=" + tenant1, "removed device: [1]",
				child("host_pinned", 2, 1)}},
		{"removed from both", []any{salted, on("CPU", 4, 0, 4, 1), remove(1), remove(1, "medium", "CPU"),
			on("GPU", 4, 1, 4, 2)},
			[]string{first, "stored host_pinned after root: 1=" + tenant1, "removed device: [1]",
				"removed host_pinned: [1]", "stored device after 1: 2=" + plain1}},
		{"a plain block beside salted ones", []any{salted, on("GPU", 4, 0, 4, 7), on("CPU", 4, 0, 4, 7)},
			[]string{first, "stored device after root: 7=" + plain1, "stored host_pinned after root: 7=" + plain1}},
	} {
		n, b := NewNormalizer(4), Batch{}
		var got []string
		for _, e := range c.events {
			if err := DecodeBatch(batchOf(e), &b); err != nil {
				t.Fatal(err)
			}
			got = append(got, describe(n.Normalize(&b, nil))...)
		}
		if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
			t.Errorf("%s: got\n  %s\nwant\n  %s", c.name, strings.Join(got, "\n  "), strings.Join(c.want, "\n  "))
		}
	}
}

// A model with several groups of full attention reuses a block that all of them hold. Only the first one's blocks
// count, so the overlap is an upper bound.
func TestSeveralFullAttentionGroups(t *testing.T) {
	of := func(group, size, parent int, hashes ...any) pairs {
		return grouped(group, "full_attention", size, parent, hashes...)
	}
	const other = "dropped non_main_attention_group 0"
	for _, c := range []struct {
		name   string
		size   int
		events []any
		want   string
		learns int
	}{
		{"of equal size", 0, []any{of(0, 4, 0, 1, 2), of(1, 4, 0, 1, 2), removeFrom(1, 2), removeFrom(0, 1)},
			"stored [1 2]; " + other + "; " + other + "; removed [1]", 4},
		{"of different size", 0, []any{of(0, 4, 0, 1, 2), of(1, 8, 0, 2), of(0, 4, 2, 3)},
			"stored [1 2]; " + other + "; stored [3]", 4},
		{"of different size, the second one's configured", 8, []any{of(0, 4, 0, 1), of(1, 8, 0, 2), of(0, 4, 2, 3, 4)},
			tailDropped + "; stored [2]; " + other, 8},
		{"latent attention too", 0, []any{of(0, 4, 0, 1), grouped(2, "mla_attention", 4, 0, 1)},
			"stored [1]; " + other, 4},
		{"in host memory", 0, []any{of(0, 4, 0, 1), of(1, 4, 0, 1), append(of(1, 4, 0, 1), "medium", "CPU"),
			append(of(0, 4, 0, 1), "medium", "CPU")},
			"stored [1]; " + other + "; " + other + "; stored [1]", 4},
	} {
		n := NewNormalizer(c.size)
		if got := normalizeEach(t, n, c.events...); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
		if got := n.Traits(); !got.UpperBound || got.BlockSize != c.learns {
			t.Errorf("%s: traits %+v, want an upper bound and blocks of %d", c.name, got, c.learns)
		}
	}
	n := NewNormalizer(0)
	normalizeEach(t, n, of(3, 4, 0, 1), window(4, 9))
	groups, _ := n.Groups()
	again := NewNormalizer(4)
	again.LoadGroups(groups)
	if got, want := normalizeEach(t, again, of(5, 4, 0, 1), removeFrom(3, 1)), other+"; removed [1]"; got != want {
		t.Errorf("after a dump: %s, want %s", got, want)
	}
}
