package feed

import (
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

const (
	instance  = 12510495253119935035
	publisher = 8286763004618594
)

// dict encodes a map from alternating keys and values.
func dict(pairs ...any) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0xde}, uint16(len(pairs)/2))
	for _, v := range pairs {
		if raw, ok := v.([]byte); ok {
			b = append(b, raw...)
		} else {
			b = append(b, kvblocktest.Append(nil, v)...)
		}
	}
	return b
}

// envelope returns an event plane message with one event.
func envelope(seq uint64, publisher, instance uint64, rank int, data []byte) []byte {
	event := dict("worker_id", instance, "storage_tier", "device", "residency_domain", "worker",
		"event", dict("event_id", int(seq)+1, "data", data, "dp_rank", rank))
	payload := append([]byte{0x91}, event...)
	binary16 := append(binary.BigEndian.AppendUint16([]byte{0xc5}, uint16(len(payload))), payload...)
	return dict(
		"publisher_id",
		publisher,
		"sequence",
		seq,
		"published_at",
		1,
		"topic",
		"kv-events",
		"payload",
		binary16,
	)
}

// planeStored returns the store of one block of four tokens in the event plane's form: with its local hash.
func planeStored(engine uint64, parent any, tokens ...kvblock.Token) []byte {
	local := kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: len(tokens)})[0]
	blocks := append([]byte{0x91}, dict("block_hash", engine, "tokens_hash", uint64(local), "mm_extra_info", nil)...)
	return dict("stored", dict("parent_hash", parent, "start_position", nil, "blocks", blocks))
}

func (h *fixture) plane(c pool.EventChannel) {
	h.pool.Update(
		[]pool.Endpoint{
			{
				Name:          "a",
				Address:       "10.0.0.1:8000",
				InstanceID:    instance,
				BlockSize:     4,
				EventChannels: []pool.EventChannel{c},
			},
		},
	)
}

// The event plane has full attention's blocks alone, so that the overlap of a hybrid model's worker is an upper bound.
func TestEventPlaneOfAHybrid(t *testing.T) {
	for _, other := range []bool{false, true} {
		var lines lockedBuffer
		h := newFixtureWith(t, Config{Layers: func(string) Layers { return Layers{Other: other} }}, &lines)
		e := newEngine(t, 0)
		h.plane(pool.EventChannel{Publisher: publisher, ZMQ: e.address()})
		h.connected(1)
		upper := func() bool {
			s := h.pool.Acquire()
			defer s.Release()
			return s.Workers[0].UpperBound
		}
		eventually(t, "a first store", func() bool {
			message := envelope(e.seq, publisher, instance, 0, planeStored(1, nil, 1, 2, 3, 4))
			frame := append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(message))), message...)
			if _, err := e.socket.SendMessage("kv-events", binary.BigEndian.AppendUint64(nil, publisher),
				binary.BigEndian.AppendUint64(nil, e.seq), frame); err != nil {
				t.Fatal(err)
			}
			e.seq++
			return h.match(4, 1, 2, 3, 4) == 1 && (upper() || !other)
		})
		want := 0
		if other {
			want = 1
		}
		says := strings.Count(lines.String(), "Dynamo's event plane has only full attention's blocks")
		if upper() != other || says != want {
			t.Errorf("other layers %v: upper bound %v, %d warnings", other, upper(), says)
		}
	}
}

// TestEventPlaneOverZMQ publishes as a Dynamo worker's own socket does.
func TestEventPlaneOverZMQ(t *testing.T) {
	h := newFixture(t, io.Discard)
	e := newEngine(t, 0)
	h.plane(pool.EventChannel{Publisher: publisher, ZMQ: e.address()})
	h.connected(1)
	send := func(from uint64, data []byte) {
		t.Helper()
		message := envelope(e.seq, from, instance, 0, data)
		frame := append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(message))), message...)
		if _, err := e.socket.SendMessage("kv-events", binary.BigEndian.AppendUint64(nil, from),
			binary.BigEndian.AppendUint64(nil, e.seq), frame); err != nil {
			t.Fatal(err)
		}
		e.seq++
	}
	eventually(t, "a first store", func() bool {
		send(publisher, planeStored(1, nil, 1, 2, 3, 4))
		return h.match(4, 1, 2, 3, 4) == 1
	})
	send(publisher, planeStored(2, uint64(1), 5, 6, 7, 8))
	eventually(t, "two blocks", func() bool { return h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 2 })
	gaps := h.count("subscription", "gap")
	e.seq++
	send(publisher, planeStored(3, nil, 9, 9, 9, 9))
	eventually(t, "blocks cleared after a gap", func() bool {
		return h.match(4, 1, 2, 3, 4) == 0 &&
			h.match(4, 9, 9, 9, 9) == 1
	})
	if got := h.count("subscription", "gap"); got != gaps+1 {
		t.Errorf("%v gaps, want %v", got, gaps+1)
	}
	send(publisher+1, planeStored(1, nil, 1, 2, 3, 4)) // another process took the port
	eventually(
		t,
		"blocks cleared after a message of another publisher",
		func() bool { return h.match(4, 9, 9, 9, 9) == 0 && h.count("batch", "malformed") == 1 },
	)
}

// TestEventPlaneOverNATS passes messages to a subject's two workers as natssub does. The end-to-end tests use a real
// server.
func TestEventPlaneOverNATS(t *testing.T) {
	h := newFixture(t, io.Discard)
	h.plane(pool.EventChannel{})
	s := h.pool.Acquire()
	worker := s.Workers[0]
	s.Release()
	applies := &planeSubscriber{subscriber: h.Feed.subscriber(worker), instance: instance}
	j := &subject{name: "s", workers: map[uint64]*natsChannel{publisher: {planeSubscriber: applies}}}
	send := j.message

	send(envelope(0, publisher, instance, 0, planeStored(1, nil, 1, 2, 3, 4)))
	send(envelope(1, publisher, instance, 0, planeStored(2, uint64(1), 5, 6, 7, 8)))
	// of a worker that is not in the pool
	send(envelope(7, publisher+1, instance+1, 0, kvblocktest.Append(nil, "cleared")))
	send(envelope(2, publisher, instance, 1, kvblocktest.Append(nil, "cleared"))) // of another rank
	if got := h.match(4, 1, 2, 3, 4, 5, 6, 7, 8); got != 2 {
		t.Errorf("%d blocks, want 2", got)
	}
	if got := h.count("batch", "other_rank"); got != 1 {
		t.Errorf("%v events of other ranks, want 1", got)
	}
	send(envelope(5, publisher, instance, 0, planeStored(3, nil, 9, 9, 9, 9)))
	if h.match(4, 1, 2, 3, 4) != 0 || h.match(4, 9, 9, 9, 9) != 1 || h.count("subscription", "gap") != 1 {
		t.Error("a gap did not clear the worker's blocks, or the message after it was lost")
	}
	send(envelope(0, publisher, instance, 0, planeStored(1, nil, 1, 2, 3, 4)))
	if h.match(4, 9, 9, 9, 9) != 0 || h.match(4, 1, 2, 3, 4) != 1 || h.count("subscription", "restart") != 1 {
		t.Error("a restart did not clear the worker's blocks, or the message after it was lost")
	}
	send([]byte{0xff})
	if h.match(4, 1, 2, 3, 4) != 0 || h.count("batch", "malformed") != 1 {
		t.Error("a malformed message did not clear the blocks of its subject's workers")
	}
}

// TestNATSServerMayComeLater subscribes at an address without a server, and leaves again.
func TestNATSServerMayComeLater(t *testing.T) {
	h := newFixture(t, io.Discard)
	h.nats.server = "nats://127.0.0.1:9"
	h.plane(pool.EventChannel{Publisher: publisher, Subject: "namespace.a.kv-events"})
	if on, off := h.Subscriptions(); on != 0 || off != 1 {
		t.Errorf("%d connected, %d connecting; want 0, 1", on, off)
	}
	h.pool.Update(nil)
	if on, off := h.Subscriptions(); on+off != 0 || len(h.nats.subjects) != 0 {
		t.Errorf("%d subscriptions and %d subjects after the worker left", on+off, len(h.nats.subjects))
	}
	h.nats.server = "nats://%zz"
	h.nats.close()
	h.nats.conn = nil
	h.plane(pool.EventChannel{Publisher: publisher, Subject: "namespace.a.kv-events"})
	if got := h.count("subscription", "failed"); got != 1 {
		t.Errorf("%v failed subscriptions with an invalid server URL, want 1", got)
	}
}
