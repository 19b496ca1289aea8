package parity

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
)

// trtllm is a process with the publisher of Dynamo's worker for TensorRT-LLM, and an engine whose events the test
// sends.
type trtllm struct {
	*script
	way       string // "zmq": the publisher's own socket; "plane": Dynamo's event plane
	port      int
	discovery string // folder
	worker    uint64 // Dynamo's id
	marks     int    // blocks that serve only to see that events were applied
}

func newTRTLLM(t *testing.T, way string, ranks int) *trtllm {
	t.Helper()
	p := &trtllm{way: way, discovery: t.TempDir()}
	where := way
	if way == "zmq" {
		p.port = freePort(t)
		where = strconv.Itoa(p.port)
	}
	p.script = &script{
		t:    t,
		argv: []string{python(t), "trtllm.py", strconv.Itoa(ranks), strconv.Itoa(blockSize), where},
		env: []string{
			"DYN_FILE_KV=" + p.discovery,
			"DYN_TCP_RPC_HOST=127.0.0.1",
			"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1",
			"DYN_EVENT_PLANE_HOST=127.0.0.1",
			"DYN_LOG=warn",
		},
	}
	p.script.start()
	t.Cleanup(p.kill)
	id, ready := strings.CutPrefix(p.nextLine(), "ready ")
	var err error
	if p.worker, err = strconv.ParseUint(id, 10, 64); err != nil || !ready {
		t.Fatalf("the publisher printed %q", p.out.Text())
	}
	return p
}

// endpoint returns the worker's entry in the pool, named a.
func (p *trtllm) endpoint(ranks int) pool.Endpoint {
	p.t.Helper()
	e := pool.Endpoint{
		Name:             "a",
		Address:          "127.0.0.1:1",
		InstanceID:       p.worker,
		DataParallelSize: uint32(ranks),
		BlockSize:        blockSize,
	}
	if p.way == "zmq" {
		e.KVEvents = fmt.Sprintf("tcp://127.0.0.1:%d", p.port)
		return e
	}
	var latest atomic.Pointer[[]dynamo.Instance]
	dynamo.NewFileStore(
		p.discovery,
		slog.New(slog.DiscardHandler),
	).Watch(
		p.t.Context(),
		func(all []dynamo.Instance) { latest.Store(&all) },
	)
	eventually(p.t, "the worker and its publishers in discovery", func() bool {
		all := *latest.Load()
		return len(all) == 1 && len(all[0].Channels) == ranks
	})
	return dynamo.Join([]pool.Entry{{Endpoint: e}}, *latest.Load())[0]
}

// emit makes the engine emit events.
func (p *trtllm) emit(events ...event) {
	p.t.Helper()
	line, err := json.Marshal(events)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := fmt.Fprintln(p.in, string(line)); err != nil {
		p.t.Fatal(err)
	}
}

// globalWindow is the window size of layers with full attention.
const globalWindow = 4096

// of returns an event of TensorRT-LLM, with the global window and rank 0.
func of(data event) event {
	return event{"data": data, "window_size": globalWindow, "attention_dp_rank": 0}
}

// with returns the event with another value for a key.
func (e event) with(key string, value any) event {
	e[key] = value
	return e
}

func createdFor(window int) event {
	return of(event{"type": "created", "num_blocks_per_cache_level": []int{1000, 0}}).with("window_size", window)
}

// storedBehind returns a store of consecutive blocks; parent nil means none.
func storedBehind(parent any, blocks ...event) event {
	return of(event{"type": "stored", "parent_hash": parent, "blocks": blocks})
}

func removedBlocks(hashes ...uint64) event {
	return of(event{"type": "removed", "block_hashes": hashes})
}

// blockOf returns a block for storedBehind.
func blockOf(hash uint64, ids []kvblock.Token) event {
	var list []event
	for _, id := range ids {
		list = append(list, event{"type": "unique_token", "token_id": id, "token_extra_id": 0})
	}
	return event{
		"type":        "stored_block",
		"block_hash":  hash,
		"tokens":      list,
		"cache_level": 0,
		"priority":    35,
		"mm_keys":     []event{},
	}
}

// adapted returns the store with an adapter for its blocks.
func (e event) adapted(name string) event {
	e["data"].(event)["lora_name"] = name
	return e
}

// connected stores blocks until the index has one of them, which shows that kvepp is subscribed. It then removes them
// all.
func (p *trtllm) connected(h *fixture, rank int) {
	p.t.Helper()
	var hashes []uint64
	eventually(p.t, "a store of the engine's", func() bool {
		p.marks++
		hash := uint64(1_000_000 + p.marks)
		hashes = append(hashes, hash)
		p.emit(storedBehind(nil, blockOf(hash, tokens(1_000_000+4*p.marks, 4))).with("attention_dp_rank", rank))
		return h.index.Stats().Entries > 0
	})
	p.emit(removedBlocks(hashes...).with("attention_dp_rank", rank))
	p.settle(h, rank)
}

// settle waits until all events so far were applied: it stores a marker block, waits for it, and removes it.
func (p *trtllm) settle(h *fixture, rank int) {
	p.t.Helper()
	p.marks++
	hash, ids := uint64(1_000_000+p.marks), tokens(1_000_000+4*p.marks, 4)
	p.emit(storedBehind(nil, blockOf(hash, ids)).with("attention_dp_rank", rank))
	eventually(
		p.t,
		"a store of the engine's",
		func() bool { return h.matchOf("a", uint32(rank), ids, kvblock.HashOptions{}) == 1 },
	)
	p.emit(removedBlocks(hash).with("attention_dp_rank", rank))
	eventually(p.t, "its removal", func() bool { return h.matchOf("a", uint32(rank), ids, kvblock.HashOptions{}) == 0 })
}

// TestTRTLLM runs the publisher of Dynamo's 1.6.1 worker for TensorRT-LLM, which converts the engine's own events to
// those of vLLM's workers or of Dynamo's event plane. The index then equals the engine's cache.
func TestTRTLLM(t *testing.T) {
	for _, way := range []string{"zmq", "plane"} {
		t.Run(way, func(t *testing.T) {
			const ranks = 2
			h, p := newFixture(t), newTRTLLM(t, way, ranks)
			heard := ranks
			if way == "zmq" {
				heard = 1 // all ranks share the publisher's socket, and kvepp applies one of them
			}
			p.emit(
				createdFor(64),
				createdFor(globalWindow),
				createdFor(64).with("attention_dp_rank", 1),
				createdFor(globalWindow).with("attention_dp_rank", 1),
			)
			h.pool.Update([]pool.Endpoint{p.endpoint(heard)})
			for rank := range heard {
				p.connected(h, rank)
			}
			plain := kvblock.HashOptions{}
			holds := func(what string, want int, ids []kvblock.Token, o kvblock.HashOptions) {
				t.Helper()
				if got := h.match("a", ids, o); got != want {
					t.Errorf("%s: %d blocks, want %d", what, got, want)
				}
			}
			prompt := tokens(0, 12)

			// Hashes are unsigned 64-bit numbers. The last block is not full; when it is full, it has another hash.
			const first, second, third, partial = 1<<63 + 5, 7, 1<<64 - 1, 9
			p.emit(
				storedBehind(
					nil,
					blockOf(first, prompt[:4]),
					blockOf(second, prompt[4:8]),
					blockOf(partial, prompt[8:10]),
				),
			)
			p.settle(h, 0)
			holds("two full blocks", 2, prompt, plain)
			p.emit(removedBlocks(partial), storedBehind(uint64(second), blockOf(third, prompt[8:])))
			p.settle(h, 0)
			holds("and a third", 3, prompt, plain)

			// Layers with a sliding window announce their blocks with the same hashes.
			p.emit(
				storedBehind(nil, blockOf(50, tokens(500, 4))).with("window_size", 64),
				removedBlocks(second).with("window_size", 64),
				storedBehind(
					nil,
					blockOf(partial, tokens(700, 3)),
				),
				of(event{"type": "updated", "block_hash": uint64(first)}),
			)
			p.settle(h, 0)
			holds("after events of a window", 3, prompt, plain)
			holds("a window's block", 0, tokens(500, 4), plain)

			p.emit(removedBlocks(third, second))
			p.settle(h, 0)
			holds("after a removal", 1, prompt, plain)
			p.emit(storedBehind(uint64(first), blockOf(second, prompt[4:8]), blockOf(third, prompt[8:])))
			p.settle(h, 0)
			holds("stored again", 3, prompt, plain)

			// Adapters and tenants.
			sql, salted := kvblock.HashOptions{LoRAName: "sql"}, kvblock.HashOptions{CacheNamespace: "tenant-a"}
			both := kvblock.HashOptions{LoRAName: "sql", CacheNamespace: "tenant-a"}
			tenant := func(name string, b event) event { return b.with("cache_salt", name) }
			p.emit(
				storedBehind(nil, blockOf(20, prompt[:4])).adapted("sql"),
				storedBehind(
					nil,
					tenant("tenant-a", blockOf(30, prompt[:4])),
					tenant("tenant-a", blockOf(31, prompt[4:8])),
				),
				storedBehind(31, tenant("tenant-a", blockOf(32, prompt[8:]))),
				storedBehind(
					nil,
					tenant("tenant-a", blockOf(40, prompt[:4])),
					tenant("tenant-a", blockOf(41, prompt[4:8])),
				).adapted(
					"sql",
				),
				storedBehind(
					nil,
					tenant("tenant-a", blockOf(60, tokens(600, 4))),
					tenant("tenant-b", blockOf(61, tokens(604, 4))),
				),
			)
			p.settle(h, 0)
			holds("an adapter's", 1, prompt, sql)
			holds("a tenant's", 3, prompt, salted)
			holds("a tenant's with the adapter", 2, prompt, both)
			holds("those of neither", 3, prompt, plain)
			holds("one of two tenants at once", 0, tokens(600, 4), salted)

			// An image after a block of text: the blocks before the image match.
			image := event{"type": "mm_key", "hash": strings.Repeat("ab", 32), "start_offset": 0}
			p.emit(
				storedBehind(
					nil,
					blockOf(70, tokens(800, 4)),
					blockOf(71, tokens(804, 4)).with("mm_keys", []event{image}),
					blockOf(72, tokens(808, 4)),
				),
			)
			p.settle(h, 0)
			holds("before an image", 1, tokens(800, 12), plain)

			want := 3 + 1 + 3 + 2 + 1
			if way == "plane" {
				want += 2 // Dynamo hashes them with the image, so no request matches them
			}
			if got := h.index.Stats().Entries; got != want {
				t.Errorf("the index has %d blocks, want %d", got, want)
			}

			// Events of the other rank.
			other := storedBehind(nil, blockOf(first, tokens(900, 4))).with("attention_dp_rank", 1)
			if way == "zmq" {
				p.emit(other)
				p.settle(h, 0)
				if h.happened("batch", "other_rank") == 0 {
					t.Error("a batch of another rank was not counted")
				}
			} else {
				p.emit(other)
				p.settle(h, 1)
				if got := h.matchOf("a", 1, tokens(900, 4), plain); got != 1 {
					t.Errorf("rank 1 has %d blocks, want 1", got)
				}
			}
			holds("the other rank's", 0, tokens(900, 4), plain)
			holds("in the end", 3, prompt, plain)
			if n := h.count("gap") + h.count("restart") + h.happened("batch", "malformed"); n > ranks {
				t.Errorf("%d losses; only the first message of each rank may show one", n)
			}
		})
	}
}
