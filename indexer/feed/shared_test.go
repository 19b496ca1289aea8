package feed

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

func contents(x *indexer.Index, w kvblock.Worker) []string {
	var all []string
	x.Dump(w, func(s kvblock.Stored) bool {
		parent := "root"
		if s.HasParent {
			parent = fmt.Sprint(true, s.Parent)
		}
		for _, b := range s.Blocks {
			all = append(all, fmt.Sprint(s.Tier, parent, b.Engine, b.Local))
			parent = fmt.Sprint(true, b.Engine)
		}
		return true
	})
	slices.Sort(all)
	return all
}

// Subscriptions share decoding buffers: no data of one message gets into another, and no bytes of a message are kept.
func TestDecodingsAreShared(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	h := newFixture(t, io.Discard)
	const workers = 8
	alone, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range kvblock.Worker(workers) {
		s := h.subscriber(pool.Worker{Endpoint: &pool.Endpoint{Name: fmt.Sprint("w", w)}, BlockSize: 4, Worker: w})
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 9))
			normalizer := kvblock.NewNormalizer(4)
			buffer := make([]byte, 0, 1<<20)
			for seq := range uint64(200) {
				payload := randomBatch(r, int(w))
				if r.IntN(40) == 0 {
					payload = payload[:r.IntN(len(payload))]
				}
				var batch kvblock.Batch
				if err := kvblock.DecodeBatch(payload, &batch); err != nil {
					alone.Cleared(w)
					normalizer = kvblock.NewNormalizer(4)
				} else {
					for _, op := range normalizer.Normalize(&batch, nil) {
						switch op.Kind {
						case kvblock.OpStored:
							_ = alone.Stored(w, op.Stored)
						case kvblock.OpRemoved:
							alone.Removed(w, op.Removed)
						case kvblock.OpCleared:
							alone.Cleared(w)
						}
					}
				}
				buffer = append(buffer[:0], payload...)
				s.Message(seq, nil, buffer)
				for i := range buffer {
					buffer[i] = 0xaa
				}
			}
		})
	}
	wg.Wait()
	total := 0
	for w := range kvblock.Worker(workers) {
		got, want := contents(h.index, w), contents(alone, w)
		if !slices.Equal(got, want) {
			t.Errorf("worker %d: %d blocks, want %d", w, len(got), len(want))
		}
		total += len(got)
	}
	a, b := h.index.Stats(), alone.Stats()
	a.Used, a.Bytes, b.Used, b.Bytes = 0, 0, 0, 0
	if a != b || total == 0 {
		t.Errorf("%d blocks\n%+v\n%+v", total, a, b)
	}
}

func randomBatch(r *rand.Rand, w int) []byte {
	var events []any
	for range 1 + r.IntN(20) {
		base := r.IntN(40)
		n := 1 + r.IntN(12)
		switch r.IntN(12) {
		case 0:
			if r.IntN(10) == 0 {
				events = append(events, []any{"AllBlocksCleared"})
			}
		case 1, 2, 3:
			var hashes []any
			for i := range n {
				hashes = append(hashes, 1+base*100+i)
			}
			events = append(events, []any{"BlockRemoved", hashes, []any{"GPU", "CPU"}[r.IntN(2)]})
		default:
			from := 0
			var parent any
			if r.IntN(2) == 0 {
				from = 1 + r.IntN(10)
				parent = 1 + base*100 + from - 1
			}
			var hashes, tokens []any
			for i := from; i < from+n; i++ {
				hashes = append(hashes, 1+base*100+i)
				for k := range 4 {
					tokens = append(tokens, base*1000+i*4+k+w)
				}
			}
			fields := kvblocktest.Pairs{
				"type",
				"BlockStored",
				"block_hashes",
				hashes,
				"parent_block_hash",
				parent,
				"token_ids",
				tokens,
				"block_size",
				4,
				"medium",
				[]any{"GPU", "GPU", "CPU"}[r.IntN(3)],
			}
			if base%5 == 1 {
				fields = append(fields, "lora_name", "adapter")
			}
			if base%5 == 2 && from == 0 {
				fields = append(fields, "cache_salt", fmt.Sprint("tenant", base))
			}
			switch r.IntN(8) {
			case 0:
				fields = append(fields, "extra_keys", []any{nil, []any{[]any{"picture", 3}}})
			case 1:
				fields = append(fields, "mm_keys", []any{[]any{}, []any{1}})
			case 2:
				fields = append(fields, "lookahead_token_ids", []any{[]any{7}})
			case 3:
				tokens = append(slices.Clone(tokens[:len(tokens)/2]), "digest")
				fields[7] = tokens
			}
			events = append(events, fields)
		}
	}
	return kvblocktest.Append(nil, []any{1.5, events, 0})
}
