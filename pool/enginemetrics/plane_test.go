package enginemetrics

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// loadFrame is a message as a worker sends it: an envelope around the load of one rank. If used is below 0, the
// message has no usage.
func loadFrame(publisher, seq, instance uint64, rank byte, used int) []byte {
	text := func(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) }
	number := func(b []byte, n uint64) []byte { return binary.BigEndian.AppendUint64(append(b, 0xcf), n) }
	load := number(text([]byte{0x83}, "worker_id"), instance)
	load = append(text(load, "dp_rank"), rank)
	if load = text(load, "kv_used_blocks"); used < 0 {
		load = append(load, 0xc0)
	} else {
		load = number(load, uint64(used))
	}
	envelope := number(text([]byte{0x84}, "publisher_id"), publisher)
	envelope = number(text(envelope, "sequence"), seq)
	envelope = text(text(envelope, "topic"), "kv_metrics")
	envelope = append(append(text(envelope, "payload"), 0xc4, byte(len(load))), load...)
	return append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(envelope))), envelope...)
}

// publisher is a worker process that publishes its load on the event plane.
type publisher struct {
	t      *testing.T
	id     uint64
	seq    uint64
	socket *zmq.Socket
	at     string
}

func newPublisher(t *testing.T, id uint64) *publisher {
	t.Helper()
	socket, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	socket.SetLinger(0)
	if err := socket.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, err := socket.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	return &publisher{t: t, id: id, socket: socket, at: at}
}

func (p *publisher) send(frame []byte) {
	p.t.Helper()
	if _, err := p.socket.SendMessage(loadTopic, binary.BigEndian.AppendUint64(nil, p.id),
		binary.BigEndian.AppendUint64(nil, p.seq), frame); err != nil {
		p.t.Fatal(err)
	}
	p.seq++
}

func (p *publisher) channel() pool.EventChannel {
	return pool.EventChannel{Publisher: p.id, ZMQ: p.at}
}

// TestLoadsOnTheEventPlane: the loads of workers without a page come from the event plane, from any publisher of their
// path.
func TestLoadsOnTheEventPlane(t *testing.T) {
	one, two := newPublisher(t, 11), newPublisher(t, 22)
	loads := []pool.EventChannel{one.channel(), two.channel()}
	endpoints := []pool.Endpoint{
		{Name: "a", Address: "f:80", InstanceID: 1, DataParallelSize: 2, TotalKVBlocks: 100, LoadChannels: loads},
		{Name: "b", Address: "f:80", InstanceID: 2, TotalKVBlocks: 200, LoadChannels: loads},
		{Name: "of unknown size", Address: "f:80", InstanceID: 3, LoadChannels: loads},
	}
	p := pool.New(slog.New(slog.DiscardHandler))
	g := New(
		Config{
			Interval:  time.Second,
			Stale:     time.Hour,
			Scheme:    "http",
			Path:      "/metrics",
			Frontends: true,
			Booked:    func(kvblock.Worker) int { return 0 },
		},
		p,
		slog.New(slog.DiscardHandler),
	)
	p.Watch(g)
	p.Update(endpoints)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Run(ctx)
	}()
	usage := func() string { return fmt.Sprint(append(g.Usage(nil), make([]float64, 4)...)[:4]) }
	until := func(want string, send func()) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); usage() != want; <-time.After(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("usage %s, want %s", usage(), want)
			}
			send()
		}
	}
	until("[0.5 0 0.25 0]", func() {
		one.send(loadFrame(11, one.seq, 1, 0, 50))
		two.send(loadFrame(22, two.seq, 2, 0, 50))
		two.send(loadFrame(22, two.seq, 3, 0, 50))
	})
	wantLoad(t, g, 0, Load{math.NaN(), math.NaN(), 0.5})
	one.send(loadFrame(11, one.seq, 1, 0, -1)) // without usage: the earlier value stays
	one.send(loadFrame(11, one.seq, 9, 0, 50)) // of an unknown worker
	one.send([]byte("no load"))
	one.seq += 5 // lost messages do not matter
	until("[0.5 1 0.25 0]", func() { one.send(loadFrame(11, one.seq, 1, 1, 1000)) })
	if readings(g, "malformed") == 0 {
		t.Error("an invalid message was not counted")
	}

	// A worker's own page takes precedence. Messages about a worker that left are ignored.
	endpoints[1].Metrics = "http://127.0.0.1:1/metrics"
	p.Update(endpoints[:2])
	for deadline := time.Now().Add(30 * time.Second); readings(g,
		"unreachable") == 0; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("its page is not read")
		}
	}
	until("[0.75 1 0.25 0]", func() {
		one.send(loadFrame(11, one.seq, 1, 0, 75))
		two.send(loadFrame(22, two.seq, 2, 0, 100))
	})
	until("[0.75 0.5 0.25 0]", func() {
		two.send(loadFrame(22, two.seq, 2, 0, 100))
		one.send(loadFrame(11, one.seq, 1, 1, 50))
	})
	p.Update(nil)
	if got := usage(); got != "[0 0 0 0]" {
		t.Errorf("usage %s of an unknown worker", got)
	}
	stop()
	<-done
}

// Over NATS all workers of a path share a subject. The end-to-end tests have a real server; here there is none.
func TestLoadsOverNATS(t *testing.T) {
	subject := []pool.EventChannel{{Subject: "namespace.a.kv_metrics"}}
	endpoints := []pool.Endpoint{
		{Name: "a", Address: "f:80", InstanceID: 1, TotalKVBlocks: 100, LoadChannels: subject},
		{Name: "b", Address: "f:80", InstanceID: 2, TotalKVBlocks: 100, LoadChannels: subject},
	}
	for _, c := range []struct {
		server string
		want   int // subscriptions
	}{{"nats://127.0.0.1:9", 1}, {"", 0}, {"nats://%zz", 0}} {
		p := pool.New(slog.New(slog.DiscardHandler))
		g := New(
			Config{Interval: time.Second, Stale: time.Hour, Frontends: true, NATSServer: c.server},
			p,
			slog.New(slog.DiscardHandler),
		)
		p.Watch(g)
		p.Update(endpoints)
		follow(g)
		if len(g.channels) != c.want {
			t.Errorf("%q: %d subscriptions, want %d", c.server, len(g.channels), c.want)
		}
		l := &loads{Gauges: g, from: subject[0].Subject}
		const framing = 5 // only messages from a publisher's own socket have it
		l.envelope(loadFrame(11, 0, 2, 0, 25)[framing:])
		l.envelope(loadFrame(12, 0, 1, 0, 50)[framing:])
		l.envelope(loadFrame(12, 1, 3, 0, 50)[framing:]) // of an unknown worker
		l.envelope([]byte("no load"))
		if got := fmt.Sprint(g.Usage(nil)); got != "[0.5 0.25]" {
			t.Errorf("%q: usage %s", c.server, got)
		}
		if readings(g, "ok") != 2 || readings(g, "malformed") != 1 {
			t.Errorf("%q: %v", c.server, g.readings())
		}
		p.Update(nil)
		follow(g)
		if len(g.channels) != 0 {
			t.Errorf("%q: %d subscriptions after the workers left", c.server, len(g.channels))
		}
		g.closeChannels()
	}
}

// TestFirstTokensOnTheEventPlane: notes of first tokens are passed on, from workers with pages and of unknown size too,
// at the worker's own socket and over each of two brokers. A message that cannot be read is counted.
func TestFirstTokensOnTheEventPlane(t *testing.T) {
	one, two := newPublisher(t, 11), newPublisher(t, 11)
	c := one.channel()
	c.FirstTokens = true
	firstTokens(t, one, c, firstTopic)
	const subject = "namespace.n.component.c.endpoint.e." + firstTopic
	for _, up := range []*publisher{one, two} {
		firstTokens(t, up, pool.EventChannel{Brokers: one.at + ";" + two.at, Subject: subject, FirstTokens: true},
			subject)
	}
}

func firstTokens(t *testing.T, one *publisher, c pool.EventChannel, topic string) {
	t.Helper()
	p := pool.New(slog.New(slog.DiscardHandler))
	noted := make(chan string, 1000)
	g := New(Config{Interval: time.Second, Scheme: "http", Path: "/metrics", Frontends: true,
		Booked:     func(kvblock.Worker) int { return 0 },
		FirstToken: func(id []byte) { noted <- string(id) }}, p, slog.New(slog.DiscardHandler))
	p.Watch(g)
	p.Update([]pool.Endpoint{{Name: "a", Address: "f:80", InstanceID: 1, LoadChannels: []pool.EventChannel{c}}})
	go g.Run(t.Context())
	frame := kvblocktest.Append(nil, kvblocktest.Pairs{"publisher_id", 11, "sequence", 0, "payload",
		kvblocktest.Append(nil, kvblocktest.Pairs{"request_id", "r1", "data", "MarkPrefillCompleted"})})
	frame = append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(frame))), frame...)
	send := func(frame []byte) {
		if _, err := one.socket.SendMessage(topic, binary.BigEndian.AppendUint64(nil, one.id),
			binary.BigEndian.AppendUint64(nil, one.seq), frame); err != nil {
			t.Fatal(err)
		}
		one.seq++
	}
	for deadline := time.Now().Add(30 * time.Second); len(noted) == 0 || readings(g, "malformed") == 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%d notes, %v malformed", len(noted), readings(g, "malformed"))
		}
		send(frame)
		send([]byte("no note"))
		<-time.After(10 * time.Millisecond)
	}
	if id := <-noted; id != "r1" {
		t.Errorf("noted %q", id)
	}
}
