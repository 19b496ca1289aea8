package zmqsub

import (
	"encoding/binary"
	"flag"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

var (
	hostileTime = flag.Duration("hostile", 2*time.Second, "how long hostile publishers send")
	hostileSeed = flag.Uint64("hostile-seed", 7, "seed of the hostile publishers' random messages")
)

// deaf is a Handler that ignores every call.
type deaf struct{}

func (deaf) Message(uint64, []byte, []byte) {}
func (deaf) Gap(uint64, uint64)             {}
func (deaf) Restart()                       {}
func (deaf) Replayed(Replay, int)           {}
func (deaf) Malformed(error)                {}
func (deaf) Cut(error)                      {}
func (deaf) Connected()                     {}
func (deaf) Disconnected()                  {}

var zeros = make([]byte, 8<<20)

// hostileStream writes one random connection: a greeting, commands and frames, most of them valid, in random pieces.
func hostileStream(r *rand.Rand, conn io.Writer) {
	write := func(p []byte) bool {
		for len(p) > 0 {
			n := len(p)
			if r.IntN(4) == 0 {
				n = 1 + r.IntN(n)
			}
			if _, err := conn.Write(p[:n]); err != nil {
				return false
			}
			p = p[n:]
		}
		return true
	}
	garbage := func(n int) []byte {
		p := make([]byte, n)
		for i := range min(n, 1000) {
			p[i] = byte(r.Uint32())
		}
		return p
	}
	hello := append([]byte(nil), greeting...)
	switch r.IntN(10) {
	case 0:
		hello[r.IntN(len(hello))] ^= 1 << r.IntN(8)
	case 1:
		hello = garbage(1 + r.IntN(100))
	}
	properties := property("Socket-Type", []string{"PUB", "PUB", "PUB", "XPUB", "ROUTER", "x"}[r.IntN(6)])
	for range r.IntN(5) * r.IntN(100) {
		properties = append(properties, property(string(garbage(r.IntN(5))), string(garbage(r.IntN(20))))...)
	}
	if !write(hello) || !write(ready(properties)) {
		return
	}
	seq := uint64(0)
	style := r.IntN(4)
	for range 1 + r.IntN(5000) {
		var p []byte
		switch kind := r.IntN(20); {
		case style == 0: // a message without end
			p = frame(1, garbage(r.IntN(4)))
		case kind < 10:
			p = rawMessage(seq, garbage([]int{0, 1, 100, 5000}[r.IntN(4)]))
			seq++
		case kind < 12: // any number of frames
			for range r.IntN(20) {
				p = append(p, frame(1, garbage(r.IntN(300)))...)
			}
			p = append(p, frame(0, nil)...)
		case kind < 14:
			p = command(append([]byte{4}, "PING\x00\x00context"[:r.IntN(14)]...))
		case kind < 15:
			p = command(garbage(r.IntN(6000)))
		case kind < 16: // reserved flags
			p = frame(byte(r.Uint32())&^2, garbage(r.IntN(100)))
		case kind < 17: // a header with any length, and little content
			p = append(
				[]byte{2 | byte(r.IntN(2)), 0, 0, 0, 0, byte(r.IntN(2)), byte(r.IntN(256)), 0, 0},
				garbage(r.IntN(1000))...)
		case kind < 18:
			seq = r.Uint64() >> r.IntN(64)
		case kind < 19:
			n := r.IntN(8) << (10 + r.IntN(11))
			if !write(rawMessage(seq, nil)[:12]) || !write(binary.BigEndian.AppendUint64([]byte{2}, uint64(n))) ||
				!write(zeros[:n]) {
				return
			}
		default:
			p = garbage(r.IntN(3))
		}
		if !write(p) {
			return
		}
	}
}

// While publishers write random streams, memory stays bounded, and all messages of another publisher arrive.
func TestHostileStreams(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	h := newHub(t)
	h.timing.cutPause, h.timing.cutPauseMax = time.Millisecond, 16*time.Millisecond
	h.timing.reconnect, h.timing.reconnectMax = time.Millisecond, 16*time.Millisecond
	honest := publish(t, "")
	good := &checker{count: -1, done: make(chan struct{})}
	if _, err := h.Subscribe(Config{Endpoint: honest.endpoint}, good); err != nil {
		t.Fatal(err)
	}
	honest.subscribed(1)
	memory := watchMemory(t)
	var connections atomic.Uint64
	var stopping atomic.Bool
	for range 4 {
		p := serveRaw(t, "", func(conn net.Conn) {
			go io.Copy(io.Discard, conn) // it ends with conn
			n := connections.Add(1)
			if !stopping.Load() {
				hostileStream(rand.New(rand.NewPCG(*hostileSeed, n)), conn)
			}
		})
		replays := serveRaw(t, "", func(conn net.Conn) {
			go io.Copy(io.Discard, conn)
			n := connections.Add(1)
			if !stopping.Load() {
				hostileStream(rand.New(rand.NewPCG(*hostileSeed+1, n)), conn)
			}
		})
		for _, config := range []Config{{Endpoint: p.endpoint}, {Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint,
			ReplayTimeout: 50 * time.Millisecond}} {
			if _, err := h.Subscribe(config, deaf{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	sent := uint64(0)
	for end := time.Now().Add(*hostileTime); time.Now().Before(end); {
		for range 10 {
			honest.send("", sent, "x")
			sent++
		}
		<-tick.C
		if grown := memory.look(t); grown > 600<<20 {
			t.Fatalf("seed %d: memory grew by %d MB after %d connections", *hostileSeed, grown>>20, connections.Load())
		}
	}
	stopping.Store(true)
	for deadline := time.After(patience); good.next.Load() < int64(sent); {
		select {
		case <-deadline:
			t.Fatalf("seed %d: %d of %d messages of the honest publisher came", *hostileSeed, good.next.Load(), sent)
		case <-tick.C:
		}
	}
	if good.wrong != "" {
		t.Errorf("seed %d: the honest publisher: %s", *hostileSeed, good.wrong)
	}
	t.Logf("%d connections, %d honest messages, memory grew by %d MB", connections.Load(), sent, memory.look(t)>>20)
}
