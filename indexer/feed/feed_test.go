package feed

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/indexer"
	"kvepp/internal/loglimit"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// engine publishes KV events over a real XPUB socket: a PUB socket that also receives subscriptions.
type engine struct {
	t      *testing.T
	socket *zmq.Socket
	port   int
	seq    uint64
}

// newEngine binds a publisher to a port; 0 chooses one.
func newEngine(t *testing.T, port int) *engine {
	t.Helper()
	socket, err := zmq.NewSocket(zmq.XPUB)
	if err != nil {
		t.Fatal(err)
	}
	socket.SetLinger(0)
	socket.SetSndhwm(0)
	e := &engine{t: t, socket: socket, port: port}
	bind := "tcp://127.0.0.1:*"
	if port != 0 {
		bind = fmt.Sprintf("tcp://127.0.0.1:%d", port)
	}
	// libzmq closes an old socket on this port in the background
	eventually(t, "bind", func() bool { return socket.Bind(bind) == nil })
	address, err := socket.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(address, "tcp://127.0.0.1:%d", &e.port); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	return e
}

// subscribed and unsubscribed report whether the publisher has heard of a subscription, or of its end, since the last
// call. Wait for the end before a test ends: if a publisher closes while it sends to a subscriber that leaves, libzmq
// may abort (zeromq/libzmq#3442). Wait for the subscription before that: without it the end may never come.
func (e *engine) subscribed() bool   { return e.hears(1) }
func (e *engine) unsubscribed() bool { return e.hears(0) }

// hears reports whether a next frame has come to the publisher, and begins with a byte.
func (e *engine) hears(begin byte) bool {
	frame, err := e.socket.RecvBytes(zmq.DONTWAIT)
	return err == nil && len(frame) > 0 && frame[0] == begin
}

func (e *engine) address() string { return fmt.Sprintf("tcp://127.0.0.1:%d", e.port) }

// publish sends a batch of events, with the next number.
func (e *engine) publish(rank int, events ...[]any) {
	e.t.Helper()
	batch := kvblocktest.Append(nil, []any{1.5, events, rank})
	if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, e.seq), batch); err != nil {
		e.t.Fatal(err)
	}
	e.seq++
}

func stored(hash uint64, parent any, blockSize int, tokens ...int) []any {
	return []any{"BlockStored", []any{hash}, parent, anys(tokens), blockSize, nil, "GPU", nil, nil}
}

func removed(hash uint64) []any { return []any{"BlockRemoved", []any{hash}, "GPU"} }

func anys[T any](s []T) []any {
	var l []any
	for _, v := range s {
		l = append(l, any(v))
	}
	return l
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("did not see %s", what)
		}
	}
}

// fixture is a Feed with its pool, index and metrics.
type fixture struct {
	*Feed
	t     *testing.T
	pool  *pool.Pool
	index *indexer.Index
	m     *metrics.Metrics
}

// newFixture returns a fixture whose Feed logs to lines, from level info.
func newFixture(t *testing.T, lines io.Writer) *fixture { return newFixtureWith(t, Config{}, lines) }

func newFixtureWith(t *testing.T, config Config, lines io.Writer) *fixture {
	log := slog.New(slog.NewTextHandler(lines, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &fixture{t: t, pool: pool.New(log), index: index, m: metrics.New()}
	if h.Feed, err = New(config, h.pool, index, h.m, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	h.pool.Watch(h.Feed)
	return h
}

func (h *fixture) connected(n int) {
	h.t.Helper()
	eventually(
		h.t,
		fmt.Sprintf("%d subscriptions connected", n),
		func() bool { on, off := h.Subscriptions(); return on == n && off == 0 },
	)
}

// applied waits until the pool's only worker has applied all that e published. A block is in the index before the pool
// knows what the same message says of the engine, and a message is counted before both.
func (h *fixture) applied(e *engine) {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("message %d applied", e.seq-1), func() bool {
		h.mu.Lock()
		s := h.subscriptions[h.worker()]
		h.mu.Unlock()
		s.applying.Lock()
		defer s.applying.Unlock()
		return s.position.Next == e.seq
	})
}

// match returns how many blocks of tokens the pool's only worker holds.
func (h *fixture) match(blockSize int, tokens ...kvblock.Token) int {
	s := h.pool.Acquire()
	defer s.Release()
	chain := kvblock.AppendSequenceHashes(
		nil,
		kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: blockSize}),
	)
	var scores indexer.OverlapScores
	h.index.FindMatches(chain, &scores)
	return scores.Blocks(s.Workers[0].Worker)
}

// count reads a counter.
func (h *fixture) count(kind, outcome string) float64 {
	h.t.Helper()
	return metricstest.Read(h.t, h.m.Registry).Of("kvepp_events_total", "kind="+kind, "outcome="+outcome).Value()
}

func (h *fixture) update(e *engine, blockSize int) {
	h.pool.Update(
		[]pool.Endpoint{
			{Name: "a", Address: "10.0.0.1:8000", InstanceID: 1, KVEvents: e.address(), BlockSize: blockSize},
		},
	)
}

func TestEventsReachTheIndex(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 0)
	h.connected(1)
	// The subscription reaches the publisher a moment after the connection. Messages sent before are lost.
	eventually(
		t,
		"a first store",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
	)
	h.applied(e)
	s := h.pool.Acquire()
	if got := s.Workers[0].BlockSize; got != 4 {
		t.Errorf("block size %d, want the events' 4", got)
	}
	s.Release()
	e.publish(0, stored(2, uint64(1), 4, 5, 6, 7, 8), stored(3, uint64(2), 4, 9, 10, 11, 12))
	all := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	eventually(t, "three blocks", func() bool { return h.match(4, all...) == 3 })
	e.publish(0, removed(2))
	eventually(t, "the block in the middle gone", func() bool { return h.match(4, all...) == 1 })
	e.publish(0, stored(2, uint64(1), 4, 5, 6, 7, 8))
	eventually(t, "the block in the middle back", func() bool { return h.match(4, all...) == 3 })
	e.publish(0, []any{"AllBlocksCleared"})
	eventually(t, "no block", func() bool { return h.match(4, all...) == 0 })
	e.publish(0, stored(9, uint64(8), 4, 1, 1, 1, 1))
	eventually(t, "an orphan counted", func() bool { return h.count("stored", "orphaned") == 1 })
	e.publish(3, stored(1, nil, 4, 1, 2, 3, 4))
	eventually(t, "another rank's batch counted", func() bool { return h.count("batch", "other_rank") == 1 })
	if h.match(4, 1, 2, 3, 4) != 0 {
		t.Error("another rank's blocks count as this worker's")
	}
}

// A gap, a message that cannot be decoded, and a restart clear the worker's blocks.
func TestLossClearsTheWorker(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	fill := func() {
		t.Helper()
		eventually(
			t,
			"a block",
			func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
		)
	}
	fill()
	gaps := h.count("subscription", "gap") // the first message may have been one
	e.seq += 5
	e.publish(0)
	eventually(
		t,
		"blocks cleared after a gap",
		func() bool { return h.match(4, 1, 2, 3, 4) == 0 && h.count("subscription", "gap") == gaps+1 },
	)

	fill()
	if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, e.seq), []byte{0xff}); err != nil {
		t.Fatal(err)
	}
	e.seq++
	eventually(
		t,
		"blocks cleared after a batch that cannot be decoded",
		func() bool { return h.match(4, 1, 2, 3, 4) == 0 && h.count("batch", "malformed") == 1 },
	)

	fill()
	e.socket.Close()
	e = newEngine(t, e.port)
	h.connected(1)
	eventually(t, "blocks cleared after a restart", func() bool { e.publish(0); return h.match(4, 1, 2, 3, 4) == 0 })
	fill()

	// Another block size than the configured one: nothing is stored, and the pool gets a report.
	e.publish(0, stored(7, nil, 8, 1, 2, 3, 4, 5, 6, 7, 8))
	eventually(t, "the other block size reported", func() bool {
		s := h.pool.Acquire()
		defer s.Release()
		return s.Workers[0].Announced == 8 && h.count("stored", kvblock.DropBlockSize) == 1
	})
}

// A worker whose event address changes is another worker: the old one's blocks and subscription end.
func TestAddressChanges(t *testing.T) {
	h := newFixture(t, io.Discard)
	h.pool.Watch(forgetful{h.index})
	old, now := newEngine(t, 0), newEngine(t, 0)
	h.update(old, 4)
	h.connected(1)
	eventually(
		t,
		"a block",
		func() bool { old.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
	)
	h.update(now, 4)
	if h.match(4, 1, 2, 3, 4) != 0 || h.index.Stats().Entries != 0 {
		t.Errorf("%d entries are left of the old address", h.index.Stats().Entries)
	}
	h.connected(1)
	eventually(
		t,
		"the other engine's block",
		func() bool { now.publish(0, stored(1, nil, 4, 5, 6, 7, 8)); return h.match(4, 5, 6, 7, 8) == 1 },
	)
	if h.match(4, 1, 2, 3, 4) != 0 {
		t.Error("events of the old address still count")
	}
	eventually(t, "the subscriber gone", old.unsubscribed)
}

// forgetful makes the index forget workers that leave, as kvepp does.
type forgetful struct{ index *indexer.Index }

func (forgetful) WorkerJoined(pool.Worker)      {}
func (f forgetful) WorkerLeft(w kvblock.Worker) { f.index.Forget(w) }

// The feed skips and counts unusable stores by cause, and unknown events and fields.
func TestCauses(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	eventually(
		t,
		"a block",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
	)
	window := stored(2, nil, 4, 1, 1, 1, 1)
	window = append(window, 1, "sliding_window", 128, nil)
	e.publish(0, window, []any{"BlockMoved", 1}, []any{"AllBlocksCleared", nil, "new"}, stored(3, nil, 4, 5, 6, 7, 8))
	eventually(t, "a block after all that", func() bool { return h.match(4, 5, 6, 7, 8) == 1 })
	for _, c := range []struct{ kind, outcome string }{{"stored", kvblock.DropUnplaced}, {"unknown", "skipped"},
		{"unknown", "skipped_field"}} {
		if got := h.count(c.kind, c.outcome); got != 1 {
			t.Errorf("%s %s: %v, want 1", c.kind, c.outcome, got)
		}
	}
	eventually(t, "the sliding window of the model in the pool", func() bool {
		s := h.pool.Acquire()
		defer s.Release()
		return s.Workers[0].UpperBound
	})
}

// A worker of a hybrid model counts as many blocks as all its layers can reuse. A model's chunk comes from Config.
func TestHybrid(t *testing.T) {
	h := newFixture(t, io.Discard)
	h.Feed.config.Layers = func(string) Layers { return Layers{Chunk: 8} }
	e := newEngine(t, 0)
	h.update(e, 0)
	h.connected(1)
	prompt := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	tokens := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	of := func(group int, kind string, window any, hashes ...any) []any {
		return []any{"BlockStored", hashes, nil, anys(tokens), 4, nil, "GPU", nil, nil, group, kind, window, nil}
	}
	gone := func(group int, hash uint64) []any { return append(removed(hash), group) }
	all := []any{101, 102, 103, 104}
	eventually(t, "the window's blocks", func() bool {
		e.publish(0, []any{"AllBlocksCleared"}, of(0, "sliding_window", 5, all...),
			of(1, "sliding_window", 5, 102, 103, 104), of(3, "chunked_local_attention", nil, all...),
			of(2, "full_attention", nil, all...))
		return h.match(4, prompt...) == 4
	})
	eventually(t, "two classes in the pool, which gets them after the index has the blocks", func() bool {
		s := h.pool.Acquire()
		defer s.Release()
		w := s.Workers[0]
		return !w.UpperBound && w.Classes != nil && w.Classes.Len() == 2
	})
	e.publish(0, gone(0, 104))
	eventually(t, "a shorter prefix", func() bool { return h.match(4, prompt...) == 3 })
	e.publish(0, gone(3, 103))
	eventually(t, "a prefix up to the chunk", func() bool { return h.match(4, prompt...) == 2 })
	e.publish(0, gone(1, 102))
	eventually(t, "no prefix", func() bool { return h.match(4, prompt...) == 0 })
}

// An endpoint's eagleDrop makes the prefix one block shorter, also for a model with full attention alone.
func TestEAGLEDrop(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.pool.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000", KVEvents: e.address(), BlockSize: 4,
		EAGLEDrop: kvblock.EAGLEDropFull}})
	h.connected(1)
	eventually(t, "a prefix without its last block", func() bool {
		e.publish(0, []any{"BlockStored", []any{1, 2}, nil, anys([]int{1, 2, 3, 4, 5, 6, 7, 8}), 4, nil, "GPU"})
		return h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 1
	})
	lookahead := kvblocktest.Pairs{"type", "BlockStored", "block_hashes", []any{1}, "token_ids", []any{1, 2, 3, 4},
		"block_size", 4, "lookahead_token_ids", []any{[]any{5}}}
	e.publish(0, []any{"AllBlocksCleared"})
	batch := kvblocktest.Append(nil, []any{1.5, []any{lookahead}, 0})
	if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, e.seq), batch); err != nil {
		t.Fatal(err)
	}
	e.seq++
	var scores indexer.OverlapScores
	o := kvblock.HashOptions{BlockSize: 4, EAGLE: true}
	chain := kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, []kvblock.Token{1, 2, 3, 4, 5}, o))
	eventually(t, "a block that an engine with lookahead does not drop", func() bool {
		h.index.FindMatches(chain, &scores)
		return scores.Blocks(h.worker()) == 1
	})
}

// What config.json says about layers and the events do not, or the other way round, is a warning, once.
func TestLayersDiffer(t *testing.T) {
	for _, c := range []struct {
		layers Layers
		says   string
	}{
		{Layers{}, ""},
		{Layers{Known: true, Windows: []int{64}}, ""},
		{Layers{Known: true, Windows: []int{128}}, "windows: 64 tokens in the events, 128 tokens in config.json"},
		{Layers{Known: true, State: true}, "windows: 64 tokens in the events, none in config.json; layers with a " +
			"state: none in the events, some in config.json"},
		{Layers{Known: true, Windows: []int{64}, Chunk: 8}, "chunked layers: none in the events, some in config.json"},
	} {
		var lines lockedBuffer
		h := newFixture(t, &lines)
		h.Feed.config.Layers = func(string) Layers { return c.layers }
		e := newEngine(t, 0)
		h.update(e, 4)
		h.connected(1)
		eventually(t, "two blocks", func() bool {
			for _, hash := range []int{1, 2} {
				e.publish(0,
					append(stored(uint64(hash), nil, 4, hash, 2, 3, 4), 0, "sliding_window", 64, nil),
					append(stored(uint64(hash), nil, 4, hash, 2, 3, 4), 1, "full_attention", nil, nil))
			}
			return h.match(4, 2, 2, 3, 4) == 1
		})
		h.applied(e)
		text := lines.String()
		if n := strings.Count(text, "differ about the model's layers"); n != min(len(c.says), 1) ||
			!strings.Contains(text, c.says) {
			t.Errorf("%+v: %d warnings: %s", c.layers, n, text)
		}
	}
}

// lockedBuffer is a buffer that log lines are written to from several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A hybrid model's prompt tails neither change the worker's block size nor make it load-only, even after a gap, which
// clears the state of the groups. The first ordinary store corrects tails before it.
func TestPromptTails(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 0)
	h.connected(1)
	of := func(group int, kind string, event []any) []any { return append(event, group, kind, nil, nil) }
	full := func(event []any) []any { return of(1, "full_attention", event) }
	gone := func(hash uint64) []any { return append(removed(hash), 1) }
	worker := func() pool.Worker {
		s := h.pool.Acquire()
		defer s.Release()
		return s.Workers[0]
	}
	tail := full(stored(21, nil, 2, 5, 6))
	eventually(t, "a tail that counts as a block", func() bool {
		e.publish(0, of(0, "sliding_window", stored(21, nil, 2, 5, 6)), tail)
		return h.match(2, 5, 6) == 1
	})
	e.publish(0, full(stored(1, nil, 4, 1, 2, 3, 4)))
	eventually(
		t,
		"the block size corrected",
		func() bool { return h.match(4, 1, 2, 3, 4) == 1 && worker().BlockSize == 4 },
	)
	if h.match(2, 5, 6) != 0 {
		t.Error("a tail still counts as a block")
	}
	gaps := h.count("subscription", "gap")
	e.seq++
	e.publish(0, tail, full(stored(1, nil, 4, 1, 2, 3, 4)), full(stored(2, uint64(1), 4, 5, 6, 7, 8)), gone(21))
	eventually(t, "a gap, and then two blocks", func() bool {
		return h.count("subscription", "gap") == gaps+1 && h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 2
	})
	e.publish(0, gone(2))
	eventually(t, "one block", func() bool { return h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 1 })
	if w := worker(); w.BlockSize != 4 || w.Announced != 0 || h.count("stored", kvblock.DropBlockSize) != 0 {
		t.Errorf("block size %d, announced %d", w.BlockSize, w.Announced)
	}
	if h.count("stored", kvblock.DropPromptTail) != 1 || h.count("removed", kvblock.DropPromptTail) != 1 ||
		h.count("removed", "unknown_block") != 0 {
		t.Errorf(
			"%v tails and %v removals of tails counted",
			h.count("stored", kvblock.DropPromptTail),
			h.count("removed", kvblock.DropPromptTail),
		)
	}
	e.publish(0, full(append([]any{"BlockStored", []any{7, 8}, nil, []any{1, 2, 3, 4}, 2}, nil, "GPU", nil, nil)))
	eventually(t, "a report of smaller blocks", func() bool { return worker().Announced == 2 })
}

// Stores in lower tiers in another block size, such as LMCache's chunks, neither teach the worker's block size nor
// contradict it, and their removals do not touch the device's blocks.
func TestLowerTiersInAnotherBlockSize(t *testing.T) {
	for _, configured := range []int{0, 4} {
		h := newFixture(t, io.Discard)
		e := newEngine(t, 0)
		h.update(e, configured)
		h.connected(1)
		in := func(medium string, event []any) []any { event[6] = medium; return event }
		chunk := in("CPU", stored(91, nil, 8, 1, 2, 3, 4, 5, 6, 7, 8))
		eventually(t, "a chunk counted before the device's blocks", func() bool {
			e.publish(0, chunk)
			return h.count("stored", kvblock.DropTierBlockSize) > 0
		})
		h.applied(e)
		e.publish(0, stored(1, nil, 4, 1, 2, 3, 4), stored(2, uint64(1), 4, 5, 6, 7, 8))
		e.publish(0, chunk, in("STORAGE", stored(92, uint64(91), 8, 1, 2, 3, 4, 5, 6, 7, 8)),
			in("CPU", stored(2, nil, 16)), in("CPU", stored(2, nil, 4)),
			[]any{"BlockRemoved", []any{2, 91}, "CPU"}, []any{"BlockRemoved", []any{92}, "STORAGE"})
		h.applied(e)
		if got := h.match(4, 1, 2, 3, 4, 5, 6, 7, 8); got != 2 {
			t.Errorf("configured %d: %d blocks, want 2", configured, got)
		}
		s := h.pool.Acquire()
		if w := s.Workers[0]; w.BlockSize != 4 || w.Announced != 0 || w.UpperBound {
			t.Errorf("configured %d: block size %d, announced %d, upper bound %v", configured, w.BlockSize,
				w.Announced, w.UpperBound)
		}
		s.Release()
		if h.count("stored", kvblock.DropBlockSize) != 0 || h.count("stored", kvblock.DropShortTokens) != 1 ||
			h.count("removed", "unknown_block") != 3 {
			t.Errorf("configured %d: %v mismatches, %v without tokens, %v removals of unknown blocks", configured,
				h.count("stored", kvblock.DropBlockSize), h.count("stored", kvblock.DropShortTokens),
				h.count("removed", "unknown_block"))
		}
	}
}

// If the correction of a prompt tail's size is held back, a later report is still a correction.
func TestCorrectionHeldBack(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 0)
	h.connected(1)
	full := func(event []any) []any { return append(event, 1, "full_attention", nil, nil) }
	eventually(t, "a tail that counts as a block", func() bool {
		e.publish(0, full(stored(21, nil, 2, 5, 6)))
		return h.match(2, 5, 6) == 1
	})
	h.applied(e)
	h.mu.Lock()
	s := h.subscriptions[h.worker()].subscriber
	h.mu.Unlock()
	s.applying.Lock()
	for s.correct() {
		continue
	}
	s.applying.Unlock()
	e.publish(0, full(stored(1, nil, 4, 1, 2, 3, 4)))
	h.applied(e)
	s.applying.Lock()
	s.corrections = loglimit.Limiter{Burst: 1, Interval: time.Hour}
	s.applying.Unlock()
	e.publish(0, full(stored(2, uint64(1), 4, 5, 6, 7, 8)))
	h.applied(e)
	p := h.pool.Acquire()
	defer p.Release()
	if w := p.Workers[0]; w.BlockSize != 4 || w.Announced != 0 {
		t.Errorf("block size %d, announced %d; want 4 and 0", w.BlockSize, w.Announced)
	}
}

func TestWorkerLeftEndsEvents(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	eventually(t, "the subscription at the publisher", e.subscribed)
	h.pool.Update(nil)
	if on, off := h.Subscriptions(); on != 0 || off != 0 {
		t.Errorf("%d connected and %d connecting after the worker left", on, off)
	}
	eventually(t, "the subscriber gone", e.unsubscribed)
	before := h.count("batch", "received")
	for range 100 {
		e.publish(0)
	}
	if got := h.count("batch", "received"); got != before {
		t.Errorf("%v batches were received after the worker left", got-before)
	}
	// A worker without an address, and one whose address libzmq cannot use.
	h.pool.Update(
		[]pool.Endpoint{
			{Name: "silent", Address: "10.0.0.1:8000"},
			{Name: "bad", Address: "10.0.0.1:8000", KVEvents: "tcp://*:1"},
		},
	)
	if on, off := h.Subscriptions(); on != 0 || off != 0 || h.count("subscription", "failed") != 1 {
		t.Errorf("%d connected, %d connecting, %v failed", on, off, h.count("subscription", "failed"))
	}
}

// Config.Adapter is called for each adapter that stores name.
func TestAdapterCalls(t *testing.T) {
	h := newFixture(t, io.Discard)
	told := make(chan string, 1000)
	h.config.Adapter = func(w kvblock.Worker, name string) { told <- name }
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	of := func(name string, hash uint64) []any {
		event := stored(hash, nil, 4, 1, 2, 3, 4)
		event[7] = name
		return event
	}
	eventually(
		t,
		"a first store",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
	)
	e.publish(0, of("sql", 2), of("sql", 3), of("chat", 4))
	e.publish(0, of("chat", 5))
	e.publish(0, of("sql", 6))
	for i, want := range []string{"sql", "chat", "sql"} {
		if got := <-told; got != want {
			t.Errorf("call %d: adapter %q, want %q", i, got, want)
		}
	}
	// Blocks of other engines name no adapter of this one. A clear, lost events and leaving take the names back.
	remote := of("remote", 7)
	for len(remote) < 13 {
		remote = append(remote, nil)
	}
	remote[12] = "REMOTE"
	e.publish(0, remote, of("gone", 8), []any{"AllBlocksCleared"}, of("kept", 9))
	e.publish(0, []any{"AllBlocksCleared"})
	e.publish(0, of("kept", 10))
	e.seq++
	e.publish(0, of("kept", 11))
	for i, want := range []string{"", "gone", "", "kept", "", "kept", "", "kept"} {
		if got := <-told; got != want {
			t.Errorf("call %d after the first: adapter %q, want %q", i, got, want)
		}
	}
	h.pool.Update(nil)
	if got := <-told; got != "" || len(told) != 0 {
		t.Errorf("adapter %q after the worker left, %d more calls", got, len(told))
	}
	eventually(t, "the subscriber gone", e.unsubscribed)
}

// Config.Connection is called when an event socket closes and opens again, the engine's own or that of the event plane.
// A worker that leaves causes no call.
func TestConnectionCalls(t *testing.T) {
	for name, join := range map[string]func(*fixture, *engine){
		"engine": func(h *fixture, e *engine) { h.update(e, 4) },
		"event plane": func(h *fixture, e *engine) {
			h.plane(pool.EventChannel{Publisher: publisher,
				ZMQ: e.address()})
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newFixture(t, io.Discard)
			type call struct {
				worker    kvblock.Worker
				connected bool
			}
			calls := make(chan call, 100)
			h.config.Connection = func(w kvblock.Worker, connected bool) {
				h.Subscriptions() // would deadlock under the feed's lock
				calls <- call{w, connected}
			}
			want := func(connected bool) {
				t.Helper()
				select {
				case got := <-calls:
					if got != (call{0, connected}) {
						t.Fatalf("%+v, want worker 0, connected %v", got, connected)
					}
				case <-time.After(time.Minute):
					t.Fatalf("no call with connected %v", connected)
				}
			}
			e := newEngine(t, 0)
			join(h, e)
			want(true)
			eventually(t, "the subscription at the publisher", e.subscribed)
			e.socket.Close()
			want(false)
			e = newEngine(t, e.port)
			want(true)
			eventually(t, "the new subscription at the publisher", e.subscribed)
			h.pool.Update(nil)
			eventually(t, "the subscriber gone", e.unsubscribed)
			if len(calls) != 0 {
				t.Errorf("%+v after the worker left", <-calls)
			}
		})
	}
}
