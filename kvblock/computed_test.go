package kvblock

import (
	"slices"
	"strings"
	"testing"
)

// windowEngine announces blocks of 4 tokens as vLLM does for a model without full attention.
type windowEngine struct {
	t      *testing.T
	scheme hashScheme
	n      *Normalizer
	b      Batch
	ops    []Operation
}

func newWindowEngine(t *testing.T, seed string, known ...string) *windowEngine {
	t.Helper()
	own, err := NewEngineHashes([]string{seed})
	if err != nil {
		t.Fatal(err)
	}
	hashes, err := NewEngineHashes(known)
	if err != nil {
		t.Fatal(err)
	}
	e := &windowEngine{t: t, scheme: own.schemes[len(own.schemes)-1], n: NewNormalizer(0)}
	e.n.ComputeHashes(hashes)
	return e
}

// tokensOf are n tokens of a prompt.
func tokensOf(prompt, n int) (tokens []Token) {
	for i := range n {
		tokens = append(tokens, Token(1000*prompt+i))
	}
	return tokens
}

// hashes returns the announced hashes of a prompt's blocks.
func (e *windowEngine) hashes(tokens []Token, salt string) (all []uint64) {
	before, key := e.scheme.root, []byte(salt)
	for i := 0; i+4 <= len(tokens); i += 4 {
		before, _ = e.scheme.next(nil, &before, tokens[i:i+4], key)
		all, key = append(all, uint64(before.announced())), nil
	}
	return all
}

// stored is a store of blocks [from, end) of a prompt that lists those in kept.
func (e *windowEngine) stored(tokens []Token, from, end int, kept []int, salt string, more ...any) pairs {
	all := e.hashes(tokens, salt)
	hashes, keys := []any{}, []any{}
	for _, i := range kept {
		hashes = append(hashes, all[i])
		if i == 0 && salt != "" {
			keys = append(keys, []any{salt})
		} else {
			keys = append(keys, nil)
		}
	}
	var ids []any
	for _, t := range tokens[4*from : 4*end] {
		ids = append(ids, int(t))
	}
	p := pairs{"type", "BlockStored", "block_hashes", hashes, "token_ids", ids, "block_size", 4, "extra_keys", keys,
		"group_idx", 0, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 9}
	if from > 0 {
		p = append(p, "parent_block_hash", all[from-1])
	}
	return append(p, more...)
}

func (e *windowEngine) send(events ...any) []string {
	e.t.Helper()
	if err := DecodeBatch(batchOf(events...), &e.b); err != nil {
		e.t.Fatal(err)
	}
	e.ops = e.n.Normalize(&e.b, e.ops[:0])
	return describe(e.ops)
}

// want checks that the operations are stores of these stretches of a prompt alone, at their places.
func (e *windowEngine) want(tokens []Token, salt string, stretches ...[2]int) {
	e.t.Helper()
	o := HashOptions{BlockSize: 4, CacheNamespace: salt}
	local := AppendLocalHashes(nil, tokens, o)
	seqs := AppendSequenceHashes(nil, local)
	all := e.hashes(tokens, salt)
	if len(e.ops) != len(stretches) {
		e.t.Fatalf("%q, want stores of %d", describe(e.ops), stretches)
	}
	for i, s := range stretches {
		op := e.ops[i].Stored
		if op.Place == nil || len(op.Blocks) != s[1]-s[0] || op.Place.Depth != s[0] || op.HasParent != (s[0] > 0) ||
			op.HasParent && (op.Place.Before != seqs[s[0]-1] || uint64(op.Parent) != all[s[0]-1]) {
			e.t.Fatalf("%+v, want blocks %d", op, s)
		}
		for j, b := range op.Blocks {
			if b != (StoredBlock{EngineHash(all[s[0]+j]), local[s[0]+j]}) {
				e.t.Fatalf("block %d is %+v", s[0]+j, b)
			}
		}
	}
}

func TestComputedHashes(t *testing.T) {
	a, b := tokensOf(1, 40), tokensOf(2, 40)
	t.Run("stretches with gaps", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.send(e.stored(a, 0, 5, []int{0, 1, 4}, ""), e.stored(a, 5, 9, []int{5, 8}, ""))
		e.want(a, "", [2]int{0, 2}, [2]int{4, 5}, [2]int{5, 6}, [2]int{8, 9})
		traits := e.n.Traits()
		if !traits.WithoutFull || traits.UpperBound || traits.BlockSize != 4 ||
			traits.Classes != (Classes{{Kind: ClassWindow, Window: 9, BlockSize: 4}}) {
			t.Errorf("%+v", traits)
		}
		if _, ok := e.n.Groups(); ok {
			t.Error("its groups are enough for another replica")
		}
	})
	t.Run("another seed, seen by a parent alone", func(t *testing.T) {
		e := newWindowEngine(t, "17", "3", "17")
		e.send(e.stored(a, 0, 5, nil, ""))
		e.want(a, "")
		e.send(e.stored(a, 5, 7, []int{6}, ""))
		e.want(a, "", [2]int{6, 7})
		e.send(e.stored(b, 0, 1, []int{0}, ""))
		e.want(b, "", [2]int{0, 1})
	})
	t.Run("a seed that kvepp does not know", func(t *testing.T) {
		e := newWindowEngine(t, "17", "3")
		for i := range maxForeignStores {
			if e.n.HashesUnknown() || e.n.Traits().UpperBound {
				t.Fatalf("unknown after %d stores", i)
			}
			got := e.send(e.stored(a, 0, 2, []int{0, 1}, ""))
			if want := slices.Repeat([]string{"dropped BlockStored: unplaced_block"}, 2); !slices.Equal(got, want) {
				t.Fatalf("%q", got)
			}
		}
		if traits := e.n.Traits(); !e.n.HashesUnknown() || !traits.UpperBound || traits.WithoutFull {
			t.Errorf("%+v", traits)
		}
		if e.n.Digests() > 0 {
			t.Errorf("%d digests", e.n.Digests())
		}
		e.n.Reset() // as for a new process, whose seed may be another one
		if e.n.HashesUnknown() || e.n.Traits().UpperBound {
			t.Error("still unknown after a reset")
		}
	})
	t.Run("stores without blocks and a seed that kvepp does not know", func(t *testing.T) {
		e := newWindowEngine(t, "17", "3")
		for range maxEmptyStores {
			if e.n.HashesUnknown() {
				t.Fatal("unknown too early")
			}
			e.send(e.stored(a, 0, 5, nil, ""))
			e.send(e.stored(a, 5, 6, []int{5}, "")) // its parent may be older than the subscription
		}
		if !e.n.HashesUnknown() || e.n.Digests() > 0 {
			t.Errorf("%+v, %d digests", e.n.Traits(), e.n.Digests())
		}
	})
	t.Run("salts", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.send(e.stored(a, 0, 3, []int{0, 2}, "tenant"))
		e.want(a, "tenant", [2]int{0, 1}, [2]int{2, 3})
		e.send(e.stored(a, 3, 4, []int{3}, "tenant"))
		e.want(a, "tenant", [2]int{3, 4})
		got := e.send(e.stored(b, 0, 3, []int{2}, "tenant")) // the events do not have this salt
		if !slices.Equal(got, []string{"dropped BlockStored: unplaced_block"}) {
			t.Errorf("%q", got)
		}
		digest := strings.Repeat("0a", 32)
		e.send(e.stored(b, 0, 1, []int{0}, digest))
		e.want(b, digest, [2]int{0, 1}) // a salt that looks like a medium
		if e.n.Traits().UpperBound {
			t.Error("an upper bound")
		}
	})
	t.Run("adapters and media", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.send(e.stored(a, 0, 1, []int{0}, ""))
		for _, more := range [][]any{{"lora_name", "sql"}, {"lora_id", 3},
			{"extra_keys", []any{[]any{[]any{"image", 1}}}}, {"extra_keys", []any{[]any{"a", "b"}}}} {
			if got := e.send(e.stored(b, 0, 1, []int{0}, "", more...)); !slices.Equal(got,
				[]string{"dropped BlockStored: unplaced_block"}) {
				t.Errorf("%v: %q", more, got)
			}
		}
	})
	t.Run("tokens behind blocks", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.send(e.stored(a, 0, 1, []int{0}, "", "lookahead_token_ids", []any{[]any{7}}))
		if traits := e.n.Traits(); !traits.UpperBound || traits.WithoutFull {
			t.Errorf("%+v", traits)
		}
	})
	t.Run("blocks of two sizes", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.send(e.stored(a, 0, 1, []int{0}, ""), e.stored(a, 0, 1, []int{0}, "", "group_idx", 1, "block_size", 8))
		if traits := e.n.Traits(); !traits.UpperBound || traits.WithoutFull {
			t.Errorf("%+v", traits)
		}
	})
	t.Run("without the option", func(t *testing.T) {
		e := newWindowEngine(t, "default")
		e.n.ComputeHashes(nil)
		if got := e.send(e.stored(a, 0, 1, []int{0}, "")); !slices.Equal(got,
			[]string{"dropped BlockStored: unplaced_block"}) || !e.n.Traits().UpperBound {
			t.Errorf("%q, %+v", got, e.n.Traits())
		}
	})
}

// A worker whose full attention stores its first block later is a hybrid one, and not one without full attention.
func TestLateFullAttention(t *testing.T) {
	e := newWindowEngine(t, "default")
	a := tokensOf(1, 16)
	e.send(e.stored(a, 0, 2, []int{0, 1}, ""))
	if !e.n.Traits().WithoutFull {
		t.Fatalf("%+v", e.n.Traits())
	}
	full := e.stored(a, 0, 2, []int{0, 1}, "", "group_idx", 1, "kv_cache_spec_kind", "full_attention")
	e.send(e.stored(a, 0, 2, []int{1}, ""), full)
	traits := e.n.Traits()
	if len(e.ops) != 3 || e.ops[0].Kind != OpCleared || e.ops[0].BlockSize != 4 || e.ops[1].Stored.Tier != TierDevice ||
		e.ops[2].Stored.Tier != ClassTier(0) || e.ops[2].Stored.Place != nil {
		t.Errorf("%q", describe(e.ops))
	}
	if traits.WithoutFull || traits.UpperBound || traits.BlockSize != 4 || traits.Classes.Len() != 1 ||
		e.n.Digests() > 0 {
		t.Errorf("%+v, %d digests", traits, e.n.Digests())
	}
	e.send(e.stored(a, 2, 3, []int{2}, "")) // full attention is known now
	if e.n.Traits().WithoutFull {
		t.Error("without full attention again")
	}
}

// The digests are those of held blocks and of recent stretches.
func TestDigestsAreBounded(t *testing.T) {
	e := newWindowEngine(t, "default")
	a := tokensOf(1, 16)
	all := e.hashes(a, "")
	e.send(e.stored(a, 0, 2, []int{0, 1}, ""), e.stored(a, 0, 2, []int{0}, ""))
	if e.n.Digests() != 2 {
		t.Fatalf("%d digests", e.n.Digests())
	}
	gone := pairs{"type", "BlockRemoved", "block_hashes", []any{all[0]}, "group_idx", 0}
	e.send(gone) // one of two copies
	if e.n.Digests() != 2 {
		t.Fatalf("%d digests", e.n.Digests())
	}
	e.send(gone)
	if e.n.Digests() != 1 { // that of the stretch's last block
		t.Fatalf("%d digests", e.n.Digests())
	}
	e.n.KeepDigests(func(EngineHash) bool { return false })
	e.send(e.stored(a, 2, 3, []int{2}, "")) // behind the last block of a recent stretch
	e.want(a, "", [2]int{2, 3})
	for i := range maxRecentDigests + 500 {
		p := tokensOf(2+i, 4)
		e.send(e.stored(p, 0, 1, nil, ""))
	}
	if n := e.n.Digests(); n > maxRecentDigests+1 { // and that of block 2
		t.Fatalf("%d digests", n)
	}
	if got := e.send(e.stored(a, 2, 3, []int{2}, "")); !slices.Equal(got,
		[]string{"dropped BlockStored: unplaced_block"}) {
		t.Errorf("behind a block whose digest was dropped: %q", got)
	}
	e.send(pairs{"type", "AllBlocksCleared"})
	if e.n.Digests() != 0 {
		t.Errorf("%d digests after a clear", e.n.Digests())
	}
}

// FuzzComputedHashes sends stores and removals of a few prompts, right and wrong ones.
func FuzzComputedHashes(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 9, 200, 17, 33, 250, 8, 5, 77})
	f.Fuzz(func(t *testing.T, script []byte) {
		e := newWindowEngine(t, "default", "5")
		held := map[EngineHash]int{}
		for i := 0; i+3 < len(script); i += 4 {
			tokens := tokensOf(int(script[i]%4), 32)
			from, end := int(script[i+1]%8), 1+int(script[i+1]/8%8)
			var kept []int
			for j := from; j < end; j++ {
				if script[i+2]>>j&1 != 0 {
					kept = append(kept, j)
				}
			}
			salt := []string{"", "s"}[script[i+3]&1]
			var event pairs
			switch {
			case script[i+3] < 40:
				event = pairs{"type", "BlockRemoved", "block_hashes", []any{e.hashes(tokens, salt)[from]},
					"group_idx", 0}
			case script[i+3] < 42:
				event = pairs{"type", "AllBlocksCleared"}
			case script[i+3] < 60:
				event = e.stored(tokens, min(from, end), end, kept, salt, "group_idx", 1)
			case script[i+3] < 64:
				event = store(int(script[i+1]), "group_idx", 0, "kv_cache_spec_kind", "sliding_window",
					"kv_cache_spec_sliding_window", 9)
			default:
				event = e.stored(tokens, min(from, end), end, kept, salt)
			}
			e.send(event)
			for _, op := range e.ops {
				switch op.Kind {
				case OpCleared:
					clear(held)
				case OpStored:
					if op.Stored.Place == nil || len(op.Stored.Blocks) == 0 {
						t.Fatalf("%+v", op.Stored)
					}
					for _, b := range op.Stored.Blocks {
						held[b.Engine]++
					}
				}
			}
		}
		if e.n.Digests() > len(held)+maxRecentDigests {
			t.Fatalf("%d digests, %d blocks were stored", e.n.Digests(), len(held))
		}
	})
}
