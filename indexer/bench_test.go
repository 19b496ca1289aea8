package indexer

import (
	"compress/gzip"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"kvepp/kvblock"
)

// BenchmarkFindMatches looks up a prompt of 512 blocks: a whole match, a half match, or none, for all workers.
func BenchmarkFindMatches(b *testing.B) {
	for _, shape := range []string{"flat", "turns", "stagger"} {
		for _, workers := range []int{8, 64, 512} {
			x := newIndex(b)
			const prompts = 16
			var chains [][]kvblock.SequenceHash
			for id := range uint64(prompts) {
				local, chain := chainOf(id, 512)
				chains = append(chains, chain)
				for w := range workers {
					base := kvblock.EngineHash(id<<20 | 1)
					n := 512
					switch shape {
					case "turns": // 16 stores; every other worker stores a branch of its own
						if w%2 == 1 {
							n = 32 * (1 + w/2%16)
						}
						for at := 0; at < n; at += 32 {
							mustStore(b, x, kvblock.Worker(w), stores(base, local, at, at+32))
						}
						own, _ := chainOf(id<<32|uint64(w), 512)
						copy(own, local[:n])
						mustStore(b, x, kvblock.Worker(w), stores(base, own, n, min(512, n+32)))
						continue
					case "stagger": // each worker holds a little more than the one before it
						n = max(1, 512*(w+1)/workers)
					}
					mustStore(b, x, kvblock.Worker(w), stores(base, local, 0, n))
				}
			}
			_, none := chainOf(1<<40, 512)
			half := func(c []kvblock.SequenceHash) []kvblock.SequenceHash {
				return append(append([]kvblock.SequenceHash{}, c[:256]...), none[256:]...)
			}
			for _, match := range []int{100, 50, 0} {
				var queries [][]kvblock.SequenceHash
				for _, c := range chains {
					switch match {
					case 50:
						c = half(c)
					case 0:
						c = none
					}
					queries = append(queries, c)
				}
				b.Run(fmt.Sprintf("%s/workers%d/match%d", shape, workers, match), func(b *testing.B) {
					var s OverlapScores
					i := 0
					for b.Loop() {
						x.FindMatches(queries[i], &s)
						if i++; i == len(queries) {
							i = 0
						}
					}
				})
			}
		}
	}
}

// BenchmarkFindHybrid looks up prompts of 8,192 tokens that all 64 workers hold in full attention's blocks of 16: as
// models with full attention alone, and as hybrid models that hold what the prompt's end needs, or only what its first
// quarter needs.
func BenchmarkFindHybrid(b *testing.B) {
	window := func(n uint32) *Hybrid {
		return &Hybrid{BlockSize: 16, Classes: kvblock.Classes{{Kind: kvblock.ClassWindow, Window: n, BlockSize: 16}}}
	}
	state := &Hybrid{BlockSize: 16, Classes: kvblock.Classes{{Kind: kvblock.ClassState, BlockSize: 16}}}
	for _, c := range []struct {
		name string
		h    *Hybrid
		need int // blocks that the class holds before a place that it accepts
	}{{"full", nil, 0}, {"window128", window(128), 8}, {"window1024", window(1024), 64}, {"state", state, 1}} {
		for _, end := range []int{512, 128} {
			if c.h == nil && end < 512 {
				continue
			}
			x := newIndex(b)
			var chains [][]kvblock.SequenceHash
			for id := range uint64(16) {
				local, chain := chainOf(id, 512)
				chains = append(chains, chain)
				for w := range kvblock.Worker(64) {
					x.SetHybrid(w, c.h)
					mustStore(b, x, w, stores(kvblock.EngineHash(id<<20|1), local, 0, 512))
					if c.h != nil {
						e := stores(kvblock.EngineHash(id<<20|1), local, end-c.need, end)
						e.Tier = kvblock.ClassTier(0)
						mustStore(b, x, w, e)
					}
				}
			}
			b.Run(fmt.Sprintf("%s/end%d", c.name, end), func(b *testing.B) {
				var s OverlapScores
				i := 0
				for b.Loop() {
					x.FindPrompt(&Prompt{Chain: chains[i], Tokens: 512*16 + 1}, &s)
					if s.Blocks(63) != end {
						b.Fatal(s.Blocks(63))
					}
					i = (i + 1) % len(chains)
				}
			})
		}
	}
}

// BenchmarkHybridEvents reads, normalises and applies the events that vLLM's scheduler sent for hybrid models, from an
// empty cache on; and those of a prompt of 8,192 tokens. decode only reads them.
func BenchmarkHybridEvents(b *testing.B) {
	for _, name := range []string{"gemma3", "gpt-oss", "llama4", "qwen3next", "prompt8k"} {
		batches := longPrompt()
		if name != "prompt8k" {
			batches = hybridBatches(b, name)
		}
		var batch kvblock.Batch
		run := func(b *testing.B, each func(payload []byte)) {
			bytes := 0
			for b.Loop() {
				bytes = 0
				for _, payload := range batches {
					if err := kvblock.DecodeBatch(payload, &batch); err != nil {
						b.Fatal(err)
					}
					each(payload)
					bytes += len(payload)
				}
			}
			b.SetBytes(int64(bytes))
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(batches)), "ns/batch")
		}
		b.Run(name+"/decode", func(b *testing.B) { run(b, func([]byte) {}) })
		b.Run(name+"/apply", func(b *testing.B) {
			x := newIndex(b)
			n := kvblock.NewNormalizer(0)
			var ops []kvblock.Operation
			run(b, func(payload []byte) {
				if &payload[0] == &batches[0][0] {
					x.Cleared(3)
					n.Reset()
				}
				ops = n.Normalize(&batch, ops[:0])
				for rest := ops; len(rest) > 0; {
					did, _ := x.Apply(3, rest, false)
					rest = rest[max(did, 1):]
				}
			})
		})
	}
}

// longPrompt returns the batches of a prompt of 8,192 tokens in four steps, as vLLM sends them for a model with five
// groups of a window of 1,024 tokens and one of full attention, in blocks of 16. At the end the windows' groups keep
// the last 64 blocks.
func longPrompt() (batches [][]byte) {
	const block, step, steps, groups = 16, 2048, 4, 6
	text := func(to []byte, s string) []byte { return append(append(to, 0xd9, byte(len(s))), s...) }
	list := func(to []byte, n int) []byte { return append(to, 0xdc, byte(n>>8), byte(n)) }
	number := func(to []byte, n uint64) []byte { return binary.BigEndian.AppendUint64(append(to, 0xcf), n) }
	hash := func(i int) uint64 { return mix(uint64(i+1), 1) }
	for s := range steps {
		b := list(append([]byte{0x93}, 0), groups)
		for group := range groups {
			kind, kept := "sliding_window", 0
			if s == steps-1 {
				kept = 64
			}
			if group == groups-1 {
				kind, kept = "full_attention", step/block
			}
			last := (s + 1) * step / block // behind the last block
			b = text(text(append(b, 0x88), "type"), "BlockStored")
			b = list(text(b, "block_hashes"), kept)
			for i := last - kept; i < last; i++ {
				b = number(b, hash(i))
			}
			b = text(b, "parent_block_hash")
			if s == 0 {
				b = append(b, 0xc0)
			} else {
				b = number(b, hash(last-step/block-1))
			}
			b = list(text(b, "token_ids"), step)
			for i := range step {
				b = binary.BigEndian.AppendUint32(append(b, 0xce), uint32(mix(uint64(s*step+i), 2)%262_144))
			}
			b = append(text(b, "block_size"), block)
			b = append(text(b, "group_idx"), byte(group))
			b = text(text(b, "kv_cache_spec_kind"), kind)
			b = append(text(b, "kv_cache_spec_sliding_window"), 0xcd, 1024>>8, 0)
		}
		batches = append(batches, append(b, 0xc0))
	}
	return batches
}

// hybridBatches returns the event batches of one case of testdata/hybrid-vectors.jsonl.gz.
func hybridBatches(b *testing.B, name string) (batches [][]byte) {
	f, err := os.Open("testdata/hybrid-vectors.jsonl.gz")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		b.Fatal(err)
	}
	lines, in := json.NewDecoder(z), false
	for lines.More() {
		var v struct {
			Case  string
			Batch string
		}
		if err := lines.Decode(&v); err != nil {
			b.Fatal(err)
		}
		if v.Case != "" {
			in = v.Case == name
		} else if in && v.Batch != "" {
			payload, err := hex.DecodeString(v.Batch)
			if err != nil {
				b.Fatal(err)
			}
			batches = append(batches, payload)
		}
	}
	if len(batches) == 0 {
		b.Fatalf("no batches of %s", name)
	}
	return batches
}

// BenchmarkFindMatchesBesideWriter runs one reader beside one writer that stores and removes as fast as it can.
func BenchmarkFindMatchesBesideWriter(b *testing.B) {
	x := newIndex(b)
	local, chain := chainOf(1, 512)
	for w := range kvblock.Worker(64) {
		mustStore(b, x, w, stores(1, local, 0, 512))
	}
	stop, stopped := make(chan bool), make(chan int)
	go func() {
		own, _ := chainOf(2, 512)
		copy(own, local[:256])
		n := 0
		for {
			select {
			case <-stop:
				stopped <- n
				return
			default:
			}
			for at := 0; at < 512; at += 32 {
				if x.Stored(100, stores(1, own, at, at+32)) != nil {
					stopped <- -1
					return
				}
			}
			x.Removed(100, removes(1, 0, 512))
			n += 1024
		}
	}()
	var s OverlapScores
	for b.Loop() {
		x.FindMatches(chain, &s)
	}
	close(stop)
	b.ReportMetric(float64(<-stopped)/b.Elapsed().Seconds()/1e6, "Mblocks/s-written")
}

// BenchmarkApply stores and removes the blocks of 64 workers with 16,384 each, half of them in prompts that 8 workers
// share.
func BenchmarkApply(b *testing.B) {
	const (
		workers = 64
		perW    = 16384
		blocks  = 64
	)
	type event struct {
		w kvblock.Worker
		s kvblock.Stored
		r []kvblock.Removed // of 8, from the tail
		o []kvblock.Removed // of 1
	}
	var events []event
	r := rand.New(rand.NewPCG(1, 1))
	for w := range workers {
		for p := range perW / blocks {
			id := uint64(w)<<32 | uint64(p)
			if p%2 == 0 {
				id = uint64(w/8)<<32 | uint64(p)
			}
			local, _ := chainOf(id, blocks)
			e := event{w: kvblock.Worker(w)}
			for i := range local {
				e.s.Blocks = append(
					e.s.Blocks,
					kvblock.StoredBlock{Engine: kvblock.EngineHash(r.Uint64()), Local: local[i]},
				)
			}
			for at := blocks; at > 0; at -= 8 {
				rm := kvblock.Removed{}
				for i := at - 1; i >= at-8; i-- {
					rm.Hashes = append(rm.Hashes, e.s.Blocks[i].Engine)
					e.o = append(e.o, kvblock.Removed{Hashes: []kvblock.EngineHash{e.s.Blocks[i].Engine}})
				}
				e.r = append(e.r, rm)
			}
			events = append(events, e)
		}
	}
	r.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	for _, c := range []string{"store64", "store1", "remove8", "remove1"} {
		b.Run(c, func(b *testing.B) {
			var bytes int
			for b.Loop() {
				b.StopTimer()
				x := newIndex(b)
				store := func(one bool) {
					for i := range events {
						e := &events[i]
						if !one {
							mustStore(b, x, e.w, e.s)
							continue
						}
						for j := range e.s.Blocks {
							s := kvblock.Stored{HasParent: j > 0, Blocks: e.s.Blocks[j : j+1]}
							if j > 0 {
								s.Parent = e.s.Blocks[j-1].Engine
							}
							mustStore(b, x, e.w, s)
						}
					}
				}
				if c == "store64" || c == "store1" {
					b.StartTimer()
					store(c == "store1")
					b.StopTimer()
					bytes = x.Stats().Bytes
				} else {
					store(false)
					b.StartTimer()
					for i := range events {
						e := &events[i]
						rs := e.r
						if c == "remove1" {
							rs = e.o
						}
						for _, r := range rs {
							x.Removed(e.w, r)
						}
					}
					b.StopTimer()
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*workers*perW), "ns/block")
			if bytes > 0 {
				b.ReportMetric(float64(bytes)/(workers*perW), "B/entry")
			}
		})
	}
}
