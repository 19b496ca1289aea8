package feed

import (
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// engine publishes KV events over a real socket: an XPUB, which is a PUB that is told who subscribes and leaves.
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
	// the old one's socket closes behind its back
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

// subscribed reports whether a subscriber has come since it was asked last.
func (e *engine) subscribed() bool {
	frame, err := e.socket.RecvBytes(zmq.DONTWAIT)
	return err == nil && len(frame) > 0 && frame[0] == 1
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
			t.Fatalf("never: %s", what)
		}
	}
}

type house struct {
	*Feed
	t     *testing.T
	pool  *pool.Pool
	index *indexer.Index
	m     *metrics.Metrics
}

func newHouse(t *testing.T) *house {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, pool: pool.New(log), index: index, m: metrics.New()}
	if h.Feed, err = New(Config{}, h.pool, index, h.m, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	h.pool.Watch(h.Feed)
	return h
}

func (h *house) connected(n int) {
	h.t.Helper()
	eventually(
		h.t,
		fmt.Sprintf("%d subscriptions connected", n),
		func() bool { on, off := h.Subscriptions(); return on == n && off == 0 },
	)
}

// match returns how many blocks of tokens the pool's only worker holds.
func (h *house) match(blockSize int, tokens ...kvblock.Token) int {
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
func (h *house) count(kind, outcome string) float64 {
	h.t.Helper()
	return metricstest.Read(h.t, h.m.Registry).Of("kvepp_events_total", "kind="+kind, "outcome="+outcome).Value()
}

func (h *house) update(e *engine, blockSize int) {
	h.pool.Update(
		[]pool.Endpoint{
			{Name: "a", Address: "10.0.0.1:8000", InstanceID: 1, KVEvents: e.address(), BlockSize: blockSize},
		},
	)
}

func TestEventsReachTheIndex(t *testing.T) {
	h := newHouse(t)
	e := newEngine(t, 0)
	h.update(e, 0)
	h.connected(1)
	// The subscription itself reaches the publisher a moment after the connection: the first message that arrives may
	// be any, and the ones before it are lost.
	eventually(
		t,
		"a first store",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.match(4, 1, 2, 3, 4) == 1 },
	)
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
	eventually(t, "an orphan counted", func() bool { return h.count("stored", "kept_aside") == 1 })
	e.publish(3, stored(1, nil, 4, 1, 2, 3, 4))
	eventually(t, "another rank's batch counted", func() bool { return h.count("batch", "other_rank") == 1 })
	if h.match(4, 1, 2, 3, 4) != 0 {
		t.Error("another rank's blocks were taken for this one's")
	}
}

// TestDoubtEmptiesTheWorker: lost messages, what cannot be read, and a restart.
func TestDoubtEmptiesTheWorker(t *testing.T) {
	h := newHouse(t)
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
		"emptied after a gap",
		func() bool { return h.match(4, 1, 2, 3, 4) == 0 && h.count("subscription", "gap") == gaps+1 },
	)

	fill()
	if _, err := e.socket.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, e.seq), []byte{0xff}); err != nil {
		t.Fatal(err)
	}
	e.seq++
	eventually(
		t,
		"emptied after a batch that cannot be read",
		func() bool { return h.match(4, 1, 2, 3, 4) == 0 && h.count("batch", "malformed") == 1 },
	)

	fill()
	e.socket.Close()
	e = newEngine(t, e.port)
	h.connected(1)
	eventually(t, "emptied after a restart", func() bool { e.publish(0); return h.match(4, 1, 2, 3, 4) == 0 })
	fill()

	// A block size that is not the configured one: nothing is stored, and the pool knows.
	e.publish(0, stored(7, nil, 8, 1, 2, 3, 4, 5, 6, 7, 8))
	eventually(t, "the other block size reported", func() bool {
		s := h.pool.Acquire()
		defer s.Release()
		return s.Workers[0].Announced == 8 && h.count("stored", kvblock.DropBlockSize) == 1
	})
}

// A worker whose address changes is another worker: what the old one held is forgotten, and the old address not heard.
func TestAddressChanges(t *testing.T) {
	h := newHouse(t)
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
		t.Error("the old address is still heard")
	}
	// A publisher must not be closed while it sends to one that leaves: libzmq may abort (zeromq/libzmq#3442).
	eventually(t, "the subscriber gone", func() bool {
		frame, err := old.socket.RecvBytes(zmq.DONTWAIT)
		return err == nil && len(frame) > 0 && frame[0] == 0
	})
}

// forgetful makes the index forget workers that leave, as kvepp does.
type forgetful struct{ index *indexer.Index }

func (forgetful) WorkerJoined(pool.Worker)      {}
func (f forgetful) WorkerLeft(w kvblock.Worker) { f.index.Forget(w) }

// What cannot be used is left out and counted by cause, and what nobody knows is passed over and counted.
func TestCauses(t *testing.T) {
	h := newHouse(t)
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
	for _, c := range []struct{ kind, outcome string }{{"stored", kvblock.DropNonMainAttention}, {"unknown", "skipped"},
		{"unknown", "skipped_field"}} {
		if got := h.count(c.kind, c.outcome); got != 1 {
			t.Errorf("%s %s: %v, want 1", c.kind, c.outcome, got)
		}
	}
	s := h.pool.Acquire()
	defer s.Release()
	if !s.Workers[0].UpperBound {
		t.Error("a model with a sliding window is not known as one")
	}
}

// TestPromptTails: a hybrid model's prompt tails neither change the worker's block size nor make it load-only, also
// after a gap, where what is known of the groups is forgotten. Tails before the first ordinary store are corrected by
// it.
func TestPromptTails(t *testing.T) {
	h := newHouse(t)
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
	eventually(t, "a tail taken for a block", func() bool {
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
		t.Error("a tail is still taken for a block")
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
	eventually(t, "blocks that really are smaller reported", func() bool { return worker().Announced == 2 })
}

func TestWorkerThatLeavesIsNotHeard(t *testing.T) {
	h := newHouse(t)
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	h.pool.Update(nil)
	if on, off := h.Subscriptions(); on != 0 || off != 0 {
		t.Errorf("%d connected and %d connecting after the worker left", on, off)
	}
	// A publisher must not be closed while it sends to one that leaves: libzmq may abort (zeromq/libzmq#3442).
	eventually(t, "the subscriber gone", func() bool {
		frame, err := e.socket.RecvBytes(zmq.DONTWAIT)
		return err == nil && len(frame) > 0 && frame[0] == 0
	})
	before := h.count("batch", "received")
	for range 100 {
		e.publish(0)
	}
	if got := h.count("batch", "received"); got != before {
		t.Errorf("%v batches were received after the worker left", got-before)
	}
	// One without an address, and one whose address libzmq cannot use.
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

// TestAdaptersAreTold: whoever wants to know hears of each adapter that stores name.
func TestAdaptersAreTold(t *testing.T) {
	h := newHouse(t)
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
			t.Errorf("%d: told of %q, want %q", i, got, want)
		}
	}
	if len(told) != 0 {
		t.Errorf("told of %q too", <-told)
	}
}

// TestConnectionIsReported closes an engine's event socket and opens it again, the engine's own and that of the event
// plane. A worker that leaves causes no call.
func TestConnectionIsReported(t *testing.T) {
	for name, join := range map[string]func(*house, *engine){
		"engine":      func(h *house, e *engine) { h.update(e, 4) },
		"event plane": func(h *house, e *engine) { h.plane(pool.EventChannel{Publisher: publisher, ZMQ: e.address()}) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t)
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
					t.Fatalf("never: connected %v", connected)
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
			h.pool.Update(nil)
			// A publisher must not be closed while it sends to one that leaves: libzmq may abort (zeromq/libzmq#3442).
			eventually(t, "the subscriber gone", func() bool {
				frame, err := e.socket.RecvBytes(zmq.DONTWAIT)
				return err == nil && len(frame) > 0 && frame[0] == 0
			})
			if len(calls) != 0 {
				t.Errorf("%+v after the worker left", <-calls)
			}
		})
	}
}
