package feed

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// A publisher whose every message is wrong does not fill the log.
func TestLinesOfPublishersAreLimited(t *testing.T) {
	const messages = 3000
	for name, batch := range map[string]func(i int) (seq uint64, payload []byte){
		"block sizes": func(i int) (uint64, []byte) {
			size := 1 + i%60
			return uint64(i), kvblocktest.Append(nil,
				[]any{1.5, [][]any{stored(uint64(i), nil, size, slices.Repeat([]int{1}, size)...)}, 0})
		},
		"sequence jumps": func(i int) (uint64, []byte) {
			return uint64(i%2*1_000_000 + 3*i),
				kvblocktest.Append(nil, []any{1.5, [][]any{stored(uint64(i), nil, 4, 1, 2, 3, 4)}, 0})
		},
		"traits": func(i int) (uint64, []byte) {
			tokens := []any{1, 2, 3, 4}
			if i%2 == 1 {
				tokens = []any{[]any{1, 2}, []any{2, 3}, []any{3, 4}, []any{4, 5}}
			}
			return uint64(i), kvblocktest.Append(nil,
				[]any{1.5, [][]any{{"BlockStored", []any{uint64(i)}, nil, tokens, 4, nil, "GPU", nil, nil}}, 0})
		},
		"malformed": func(i int) (uint64, []byte) { return uint64(i), []byte{0xc1} },
		"ranks": func(i int) (uint64, []byte) {
			return uint64(i), kvblocktest.Append(nil, []any{1.5, [][]any{}, i})
		},
	} {
		t.Run(name, func(t *testing.T) {
			lines := new(logtest.Log)
			h := newFixture(t, lines)
			e := newEngine(t, 0)
			h.pool.Update([]pool.Endpoint{{Name: "w", Model: "m", KVEvents: e.address()}})
			eventually(t, "a subscription", e.subscribed)
			for i := range messages {
				seq, payload := batch(i)
				if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, seq),
					payload); err != nil {
					t.Fatal(err)
				}
			}
			last := kvblocktest.Append(nil, []any{1.5, [][]any{stored(1<<40, nil, 4, 1, 2, 3, 4)}, 0})
			if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, 1<<50), last); err != nil {
				t.Fatal(err)
			}
			eventually(t, "all messages", func() bool {
				h.mu.Lock()
				sub, ok := h.subscriptions[0]
				h.mu.Unlock()
				if !ok {
					return false
				}
				sub.applying.Lock()
				defer sub.applying.Unlock()
				return sub.position.Next == 1<<50+1
			})
			if n := lines.Count("\n"); n > 30 {
				t.Errorf("%d log lines for %d messages, such as %.600s", n, messages, lines.String())
			}
		})
	}
}

var (
	hostileTime = flag.Duration("hostile", 2*time.Second, "how long hostile publishers send")
	hostileSeed = flag.Uint64("hostile-seed", 7, "seed of the hostile publishers' random messages")
)

// hostileMessage returns the payload of a random, often wrong message, and changes *seq to its number.
func hostileMessage(r *rand.Rand, seq *uint64) []byte {
	switch r.IntN(12) {
	case 0:
		*seq = r.Uint64() >> r.IntN(64)
	case 1:
		*seq -= uint64(r.IntN(3))
	default:
		*seq++
	}
	hash := func() uint64 { return r.Uint64N(1000) << (8 * r.IntN(4)) }
	var events []any
	for range 1 + r.IntN(4)*r.IntN(10) {
		size := []int{4, 4, 4, 4, 1, 16, 0, -1, 1 << 30}[r.IntN(9)]
		var tokens, hashes []any
		for range r.IntN(4) {
			hashes = append(hashes, hash())
			for range max(min(size, 16), 1) - r.IntN(20)/19 {
				tokens = append(tokens, []any{r.IntN(1 << 20), r.Uint64(), -1, "x", nil}[min(r.IntN(200), 4)*r.IntN(2)])
			}
		}
		var parent any
		if r.IntN(2) == 0 {
			parent = hash()
		}
		switch kind := r.IntN(20); {
		case kind < 12:
			events = append(
				events,
				[]any{
					"BlockStored",
					hashes,
					parent,
					tokens,
					size,
					nil,
					[]any{"GPU", "CPU", "x", 3}[r.IntN(400)/100*r.IntN(2)],
					nil,
					nil,
				},
			)
		case kind < 17:
			events = append(events, []any{"BlockRemoved", hashes, "GPU"})
		case kind < 18:
			events = append(events, []any{"AllBlocksCleared"})
		case kind < 19:
			events = append(events, []any{"Unknown", hashes})
		default: // a flood of one event
			many := make([]any, r.IntN(5000))
			for i := range many {
				many[i] = uint64(i)
			}
			events = append(events, []any{"BlockRemoved", many, "GPU"})
		}
	}
	payload := kvblocktest.Append(nil, []any{1.5, events, []int{0, 0, 0, 0, 7}[r.IntN(5)]})
	switch r.IntN(20) {
	case 0:
		payload = payload[:r.IntN(len(payload))]
	case 1:
		payload[r.IntN(len(payload))] ^= byte(1 + r.IntN(255))
	case 2:
		payload = bytes.Repeat([]byte{0x91}, r.IntN(100_000))
	}
	return payload
}

// While publishers send random messages, the index has exactly the blocks of another worker, and neither memory nor log
// grow with the messages.
func TestHostilePublishers(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	lines := new(logtest.Log)
	h := newFixture(t, lines)
	honest, hostile := newEngine(t, 0), []*engine{newEngine(t, 0), newEngine(t, 0), newEngine(t, 0)}
	endpoints := []pool.Endpoint{{Name: "honest", Model: "m", KVEvents: honest.address(), BlockSize: 4}}
	for i, e := range hostile {
		endpoints = append(
			endpoints,
			pool.Endpoint{
				Name:      fmt.Sprint("hostile", i),
				Model:     "m",
				KVEvents:  e.address(),
				BlockSize: []int{0, 4, 16}[i],
			},
		)
	}
	h.pool.Update(endpoints)
	for _, e := range append(hostile, honest) {
		eventually(t, "a subscription", e.subscribed)
	}
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	r := rand.New(rand.NewPCG(*hostileSeed, 0))
	held := map[kvblock.EngineHash]bool{}
	seqs, sent, rounds := make([]uint64, len(hostile)), 0, 0
	worker := kvblock.Worker(0)
	for end := time.Now().Add(*hostileTime); time.Now().Before(end); rounds++ {
		for range 200 {
			for i, e := range hostile {
				payload := hostileMessage(r, &seqs[i])
				if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, seqs[i]),
					payload); err != nil {
					t.Fatal(err)
				}
				sent++
			}
			name := kvblock.EngineHash(r.Uint64N(2000))
			if held[name] {
				delete(held, name)
				honest.publish(0, removed(uint64(name)))
			} else {
				held[name] = true
				honest.publish(0, stored(uint64(name), nil, 4, int(name), 2, 3, 4))
			}
		}
		eventually(t, "the honest worker's events", func() bool {
			h.mu.Lock()
			s := h.subscriptions[worker]
			h.mu.Unlock()
			s.applying.Lock()
			defer s.applying.Unlock()
			return s.position.Next == honest.seq
		})
		got := map[kvblock.EngineHash]bool{}
		h.index.Dump(worker, func(s kvblock.Stored) bool {
			for _, b := range s.Blocks {
				got[b.Engine] = true
			}
			return true
		})
		if !maps.Equal(got, held) {
			t.Fatalf(
				"seed %d, round %d: the index has %d blocks of the honest worker, want %d",
				*hostileSeed,
				rounds,
				len(got),
				len(held),
			)
		}
		runtime.ReadMemStats(&now)
		if grown := int64(now.HeapInuse) - int64(before.HeapInuse); grown > 256<<20 {
			t.Fatalf("seed %d, round %d: the heap grew by %d MB", *hostileSeed, rounds, grown>>20)
		}
	}
	seconds := int(hostileTime.Seconds()) + 1
	if n := lines.Count("\n"); n > 100+allLines+4*seconds {
		t.Errorf("%d lines for %d messages in %d s", n, sent, seconds)
	}
	t.Logf(
		"%d messages in %d rounds, %d lines, heap %d MB",
		sent,
		rounds,
		lines.Count("\n"),
		now.HeapInuse>>20,
	)
}
