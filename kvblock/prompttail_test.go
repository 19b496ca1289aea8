package kvblock

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// grouped is a store of consecutive blocks in a KV cache group, as vLLM sends it. parent 0 means no parent.
func grouped(group int, kind string, blockSize, parent int, hashes ...any) pairs {
	e := pairs{
		"type",
		"BlockStored",
		"block_hashes",
		hashes,
		"token_ids",
		ints(1, blockSize*len(hashes)),
		"block_size",
		blockSize,
		"medium",
		"GPU",
		"group_idx",
		group,
		"kv_cache_spec_kind",
		kind,
	}
	if parent != 0 {
		e = append(e, "parent_block_hash", parent)
	}
	return e
}

func full(blockSize, parent int, hashes ...any) pairs {
	return grouped(1, "full_attention", blockSize, parent, hashes...)
}

func window(blockSize int, hashes ...any) pairs {
	return grouped(0, "sliding_window", blockSize, 0, hashes...)
}

// removeFrom is a removal as vLLM sends it: with the group, without a kind.
func removeFrom(group int, hashes ...any) pairs {
	return pairs{"type", "BlockRemoved", "block_hashes", hashes, "medium", "GPU", "group_idx", group}
}

// summary renders operations with only the hashes of their blocks.
func summary(ops []Operation) string {
	var all []string
	for _, op := range ops {
		switch op.Kind {
		case OpStored:
			var hashes []EngineHash
			for _, b := range op.Stored.Blocks {
				hashes = append(hashes, b.Engine)
			}
			all = append(all, fmt.Sprint("stored ", hashes))
		case OpRemoved:
			all = append(all, fmt.Sprint("removed ", op.Removed.Hashes))
		case OpCleared:
			all = append(all, fmt.Sprint("cleared ", op.BlockSize))
		case OpDropped:
			all = append(all, fmt.Sprint("dropped ", op.Reason, " ", op.BlockSize))
		}
	}
	return strings.Join(all, ", ")
}

// normalizeEach gives each event to the normalizer as a batch of its own and returns a summary of the operations.
func normalizeEach(t testing.TB, n *Normalizer, events ...any) string {
	t.Helper()
	var all []string
	var b Batch
	for _, e := range events {
		if err := DecodeBatch(batchOf(e), &b); err != nil {
			t.Fatal(err)
		}
		all = append(all, summary(n.Normalize(&b, nil)))
	}
	return strings.Join(all, "; ")
}

const (
	tailDropped = "dropped prompt_tail 0"
	tail2       = "dropped block_size_mismatch 2"
	otherGroup  = "dropped non_main_attention_kind 0"
)

// A store of full attention with a smaller block size is a prompt's tail; the normalizer ignores it and its removals. A
// store that cannot be a tail is still reported as another block size.
func TestPromptTails(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int // the configured block size, 0 if unknown
		events []any
		want   string
	}{
		{"between ordinary stores", 4, []any{full(4, 0, 1, 2), full(2, 2, 3), full(4, 2, 4), removeFrom(1, 3),
			removeFrom(1, 2)},
			"stored [1 2]; " + tailDropped + "; stored [4]; " + tailDropped + "; removed [2]"},
		{"in two physical blocks", 4, []any{full(2, 0, 3), full(2, 0, 3), removeFrom(1, 3), removeFrom(1, 3),
			removeFrom(1, 3)},
			strings.Repeat(tailDropped+"; ", 4) + "removed [3]"},
		{"removed with blocks", 4, []any{full(4, 0, 1, 2), full(2, 2, 3), removeFrom(1, 1, 3, 2)}, "stored [1 2]; " +
			tailDropped + "; removed [1 2], " + tailDropped},
		{"forgotten with all blocks", 4, []any{full(2, 0, 3), pairs{"type", "AllBlocksCleared"}, removeFrom(1, 3)},
			tailDropped + "; cleared 0; removed [3]"},
		{"of latent attention", 4, []any{grouped(1, "mla_attention", 2, 0, 3)}, tailDropped},
		{"on the host", 4, []any{append(full(2, 0, 3), "medium", "CPU")}, otherTier},
		{"a tail's hash as a block's", 4, []any{full(2, 0, 3), full(4, 0, 3), removeFrom(1, 3)},
			tailDropped + "; stored [3]; removed [3]"},

		{"two small blocks in a store", 4, []any{full(2, 0, 3, 4)}, tail2},
		{"two small blocks in a row", 4, []any{full(2, 0, 3), full(2, 3, 4), full(2, 0, 5)}, tailDropped + "; " +
			tail2 + "; " + tailDropped},
		{"three and then four in a row", 8, []any{full(2, 0, 3), full(2, 3, 4), full(2, 4, 5), full(2, 5, 6)},
			strings.Repeat(tailDropped+"; ", 3) + tail2},
		{"a larger block", 4, []any{full(8, 0, 3)}, "dropped block_size_mismatch 8"},
		{"a size that does not divide the block's", 4, []any{full(3, 0, 3)}, "dropped block_size_mismatch 3"},
		{"a block size of 0", 4, []any{pairs{"type", "BlockStored", "block_hashes", []any{3}, "token_ids", ints(1, 2),
			"block_size", 0, "group_idx", 1,
			"kv_cache_spec_kind", "full_attention"}}, "dropped block_size_mismatch 0"},
		{"an engine that sends no kinds",
			4, []any{pairs{"type", "BlockStored", "block_hashes", []any{3}, "token_ids", ints(1, 2), "block_size", 2}},
			tail2},
		{"an engine that sends no groups", 4,
			[]any{pairs{"type", "BlockStored", "block_hashes", []any{3}, "token_ids", ints(1, 2), "block_size", 2,
				"kv_cache_spec_kind", "full_attention"}}, tail2},

		// The block size is learned from the events.
		{"after an ordinary store", 0, []any{window(2, 9), full(4, 0, 1, 2), full(2, 2, 3), removeFrom(1, 3)},
			otherGroup + "; stored [1 2]; " + tailDropped + "; " + tailDropped},
		{"before any ordinary store", 0, []any{window(2, 9), full(2, 0, 3), full(4, 0, 1), full(2, 1, 5),
			full(4, 1, 6)},
			otherGroup + "; stored [3]; cleared 4, stored [1]; " + tailDropped + "; stored [6]"},
		{"blocks as fine as the other groups'", 0, []any{window(2, 9), full(2, 0, 1), full(2, 1, 2, 3), full(2, 3, 4),
			full(4, 4, 5)},
			otherGroup + "; stored [1]; stored [2 3]; stored [4]; dropped block_size_mismatch 4"},
		{"blocks coarser than another group's", 0, []any{window(2, 9), full(4, 0, 1), full(8, 1, 2)},
			otherGroup + "; stored [1]; dropped block_size_mismatch 8"},
		{"the very first event", 0, []any{full(2, 0, 3), full(4, 0, 1), full(2, 1, 5), removeFrom(1, 5)},
			"stored [3]; cleared 4, stored [1]; " + tailDropped + "; " + tailDropped},
		{"no other groups", 0, []any{full(2, 0, 1, 2), full(4, 2, 3)}, "stored [1 2]; dropped block_size_mismatch 4"},
		{"a tail below a tail", 0, []any{window(1, 9), window(2, 9), full(1, 0, 3), full(4, 0, 1), full(1, 1, 5)},
			otherGroup + "; " + otherGroup + "; stored [3]; cleared 4, stored [1]; " + tailDropped},
	} {
		if got := normalizeEach(t, NewNormalizer(c.size), c.events...); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
}

// In a batch, the events of the other groups may follow a tail.
func TestPromptTailBeforeTheOtherGroups(t *testing.T) {
	n := NewNormalizer(0)
	var b Batch
	if err := DecodeBatch(batchOf(grouped(0, "full_attention", 2, 0, 3), grouped(1, "sliding_window", 2, 0, 3)),
		&b); err != nil {
		t.Fatal(err)
	}
	if got, want := summary(n.Normalize(&b, nil)), "stored [3], "+otherGroup; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got, want := normalizeEach(t, n, grouped(0, "full_attention", 4, 0, 1)), "cleared 4, stored [1]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Reset keeps the block size and whether it is uncertain, because a tail may be the first store after a gap.
func TestResetKeepsTheBlockSize(t *testing.T) {
	n := NewNormalizer(0)
	normalizeEach(t, n, window(2, 9), full(4, 0, 1, 2), full(2, 2, 3))
	n.Reset()
	if got, want := normalizeEach(t, n, full(2, 2, 3), full(4, 2, 4), removeFrom(1, 3)), tailDropped+"; stored [4]; "+
		tailDropped; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	n = NewNormalizer(0)
	normalizeEach(t, n, window(2, 9), full(2, 0, 3))
	n.Reset()
	if got, want := normalizeEach(t, n, full(2, 0, 3), full(4, 0, 1)),
		"stored [3]; cleared 4, stored [1]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if n.Traits().UpperBound {
		t.Error("Reset kept UpperBound")
	}
}

// At the bound, further tails are ignored but not remembered, so their removals are passed on.
func TestPromptTailBound(t *testing.T) {
	n := NewNormalizer(4)
	n.tailLimit = 2
	got := normalizeEach(
		t,
		n,
		full(2, 0, 1),
		full(2, 0, 2),
		full(2, 0, 3),
		full(2, 0, 2),
		removeFrom(1, 3),
		removeFrom(1, 2),
		removeFrom(1, 2),
		full(2, 0, 3),
		removeFrom(1, 3),
	)
	want := strings.Repeat(tailDropped+"; ", 4) + "removed [3]; " + strings.Repeat(tailDropped+"; ", 3) + tailDropped
	if got != want || len(n.tails) != 1 {
		t.Errorf("%d tails remembered; got\n%s\nwant\n%s", len(n.tails), got, want)
	}
	if maxPromptTails*32 > 4<<20 {
		t.Error("the tails of one worker can take more than 4 MiB")
	}
}

// Random prompts of a model whose full attention has blocks of four of the smallest unit, with the order and form of
// vLLM's events. The operations must leave exactly the full blocks, and every tail must be ignored.
func TestRandomPromptTails(t *testing.T) {
	const unit, ratio = 2, 4
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := NewNormalizer([]int{0, unit * ratio}[seed%2])
		held, stored, tails := map[int]bool{}, map[EngineHash]bool{}, map[int]bool{}
		hash := func(prompt, units int) int { return 1 + prompt*100 + units } // of the boundary behind this many units
		for range 60 {
			var events []any
			for h := range held {
				if r.IntN(8) == 0 {
					events = append(events, removeFrom(1, h))
					delete(held, h)
				}
			}
			for h := range tails {
				if r.IntN(4) == 0 {
					events = append(events, removeFrom(1, h))
					delete(tails, h)
				}
			}
			prompt, units := r.IntN(20), 1+r.IntN(30)
			events = append(events, window(unit, hash(prompt, units)))
			from, to := 0, units/ratio*ratio
			for from < to && held[hash(prompt, from+ratio)] {
				from += ratio
			}
			if from < to &&
				!slices.ContainsFunc(span(from, to, ratio), func(u int) bool { return held[hash(prompt, u)] }) {
				var hashes []any
				for _, u := range span(from, to, ratio) {
					hashes = append(hashes, hash(prompt, u))
					held[hash(prompt, u)] = true
				}
				parent := 0
				if from > 0 {
					parent = hash(prompt, from)
				}
				events = append(events, full(unit*ratio, parent, hashes...))
			}
			if units%ratio != 0 && !tails[hash(prompt, units)] {
				parent := 0
				if units > 1 {
					parent = hash(prompt, units-1)
				}
				events = append(events, full(unit, parent, hash(prompt, units)))
				tails[hash(prompt, units)] = true
			}
			var b Batch
			if err := DecodeBatch(batchOf(events...), &b); err != nil {
				t.Fatal(err)
			}
			for _, op := range n.Normalize(&b, nil) {
				switch {
				case op.Kind == OpStored:
					for _, block := range op.Stored.Blocks {
						stored[block.Engine] = true
					}
				case op.Kind == OpRemoved:
					for _, h := range op.Removed.Hashes {
						delete(stored, h)
					}
				case op.Kind == OpCleared:
					clear(stored)
				case op.Reason == DropBlockSize:
					t.Fatalf("seed %d: a tail was taken for another block size", seed)
				}
			}
		}
		if n.Traits().BlockSize != unit*ratio {
			t.Fatalf("seed %d: block size %d", seed, n.Traits().BlockSize)
		}
		for h := range held {
			if !stored[EngineHash(h)] {
				t.Fatalf("seed %d: block %d is held but not stored", seed, h)
			}
		}
		if len(stored) != len(held) {
			t.Fatalf("seed %d: %d blocks stored, %d held", seed, len(stored), len(held))
		}
	}
}

// span returns the boundaries after from, up to and including to.
func span(from, to, step int) (all []int) {
	for u := from + step; u <= to; u += step {
		all = append(all, u)
	}
	return all
}

// promptTailBatches returns the batches of vLLM 0.33.0's own scheduler for a model with two windows of blocks of 16
// tokens, in groups 0 and 1, and full attention of blocks of 32 tokens, in group 2, under eviction.
func promptTailBatches(t testing.TB) (payloads [][]byte) {
	t.Helper()
	file, err := os.Open("testdata/vllm-0.33.0-prompt-tails.hex.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(unzipped)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		payloads = append(payloads, mustHex(lines.Text()))
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return payloads
}

// The operations of vLLM's own batches leave exactly the full blocks that vLLM holds in full attention's group.
func TestCapturedPromptTails(t *testing.T) {
	for _, size := range []int{0, 32} {
		n := NewNormalizer(size)
		held, stored := map[EngineHash]int{}, map[EngineHash]int{}
		stores, tails, removedTails := 0, 0, 0
		ofTail := map[EngineHash]bool{}
		var b Batch
		for i, payload := range promptTailBatches(t) {
			if err := DecodeBatch(payload, &b); err != nil {
				t.Fatal(err)
			}
			for _, e := range b.Events { // the oracle
				switch {
				case e.Group != 2:
				case e.Kind == BlockStored && e.BlockSize == 32:
					for _, h := range e.Hashes {
						held[h]++
					}
				case e.Kind == BlockStored:
					tails++
					ofTail[e.Hashes[0]] = true
				case e.Kind == BlockRemoved && !ofTail[e.Hashes[0]]:
					held[e.Hashes[0]]--
				case e.Kind == BlockRemoved:
					removedTails++
				}
			}
			for _, op := range n.Normalize(&b, nil) {
				switch {
				case op.Stored.Tier != TierDevice || op.Removed.Tier != TierDevice: // of the windows
				case op.Kind == OpStored:
					stores++
					for _, block := range op.Stored.Blocks {
						stored[block.Engine]++
					}
				case op.Kind == OpRemoved:
					for _, h := range op.Removed.Hashes {
						if stored[h]--; stored[h] < 0 {
							t.Fatalf("batch %d: block %d removed but not stored", i, h)
						}
					}
				case op.Kind == OpCleared || op.Reason == DropBlockSize:
					t.Fatalf("batch %d: %s", i, summary([]Operation{op}))
				}
			}
			for h := range held {
				if held[h] != stored[h] {
					t.Fatalf("batch %d: block %d held %d times, stored %d times", i, h, held[h], stored[h])
				}
			}
		}
		if stores < 20 || tails < 10 || removedTails < 5 || len(n.tails) > tails || n.Traits().BlockSize != 32 {
			t.Errorf(
				"%d stores, %d tails, %d of them removed, block size %d",
				stores,
				tails,
				removedTails,
				n.Traits().BlockSize,
			)
		}
	}
}

// FuzzNormalizeTails feeds many stores and removals of few hashes and sizes. For every input, memory stays bounded, the
// stored blocks have the announced block size, and only a clear changes that size.
func FuzzNormalizeTails(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3}, uint8(4))
	f.Add([]byte{0x12, 0x23, 0x51, 0x62, 0x13, 0x91, 0xa2, 0xff, 0x05}, uint8(0))
	f.Fuzz(func(t *testing.T, script []byte, size uint8) {
		n := NewNormalizer(int(size))
		n.tailLimit = 3
		known := n.Traits().BlockSize
		var b Batch
		for i := 0; i+2 < min(len(script), 3000); i += 3 {
			shape, hash, parent := script[i], int(script[i+1]%16)+1, int(script[i+2]%16)
			blockSize := []int{1, 2, 3, 4, 8}[shape>>2%8%5]
			var e pairs
			switch shape % 4 {
			case 0:
				e = removeFrom(1, hash)
			case 1:
				e = full(blockSize, parent, hash)
			case 2:
				e = full(blockSize, parent, hash, hash+100)
			default:
				e = window(blockSize, hash)
			}
			if err := DecodeBatch(batchOf(e), &b); err != nil {
				t.Fatal(err)
			}
			for _, op := range n.Normalize(&b, nil) {
				switch op.Kind {
				case OpCleared:
					known = int(op.BlockSize)
				case OpStored:
					if op.Stored.Tier != TierDevice {
						continue
					}
					if known == 0 {
						known = blockSize
					}
					if known != blockSize {
						t.Fatalf("stored blocks of %d tokens, the worker's have %d", blockSize, known)
					}
				}
			}
			if known != n.Traits().BlockSize || len(n.tails) > n.tailLimit {
				t.Fatalf("block size %d, want %d; %d tails", n.Traits().BlockSize, known, len(n.tails))
			}
		}
	})
}
