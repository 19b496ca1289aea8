package feed

import (
	"encoding/binary"
	"io"
	"testing"

	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// TestBrokers: two brokers pass on the messages of a worker and of a stranger. Each counts once, one broker may go, and
// what one of them lost the other one brings.
func TestBrokers(t *testing.T) {
	h := newFixture(t, io.Discard)
	a, b := newEngine(t, 0), newEngine(t, 0)
	const subject = "namespace.n.component.backend.endpoint.generate.kv-events"
	h.plane(pool.EventChannel{Publisher: publisher, Brokers: a.address() + ";" + b.address(), Subject: subject})
	for _, e := range []*engine{a, b} {
		eventually(t, "a subscription at each broker", e.subscribed)
	}
	h.connected(1)
	var seq uint64
	send := func(from uint64, data []byte, over ...*engine) {
		t.Helper()
		message := envelope(seq, from, instance, 0, data)
		frame := append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(message))), message...)
		for _, e := range over {
			if _, err := e.socket.SendMessage(subject, binary.BigEndian.AppendUint64(nil, from),
				binary.BigEndian.AppendUint64(nil, seq), frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(publisher, planeStored(1, nil, 1, 2, 3, 4), a, b)
	seq++
	send(publisher, planeStored(2, uint64(1), 5, 6, 7, 8), a, b)
	send(publisher+1, kvblocktest.Append(nil, "cleared"), a, b)
	eventually(t, "two blocks", func() bool { return h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 2 })
	seq++
	send(publisher, planeRemoved(2), b) // a lost it
	eventually(t, "one block", func() bool { return h.match(4, 1, 2, 3, 4, 5, 6, 7, 8) == 1 })
	if _, err := b.socket.SendMessage(subject, "x"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a malformed message", func() bool { return h.count("batch", "malformed") == 1 })
	a.socket.Close()
	seq++
	send(publisher, planeStored(3, nil, 9, 9, 9, 9), b)
	eventually(t, "a block after one broker went", func() bool { return h.match(4, 9, 9, 9, 9) == 1 })
	if h.match(4, 1, 2, 3, 4) != 1 || h.count("subscription", "gap")+h.count("subscription", "restart") != 0 {
		t.Error("blocks were cleared")
	}
	b.socket.Close()
	eventually(t, "no connection", func() bool { on, _ := h.Subscriptions(); return on == 0 })
	h.pool.Update(nil)
	if len(h.brokers.groups) != 0 {
		t.Errorf("%d subscriptions after the worker left", len(h.brokers.groups))
	}
}
