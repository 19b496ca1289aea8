package zmqsub

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// rawPeer is a publisher or a replay socket that the test writes byte by byte, in ZMTP 3.1 or not.
type rawPeer struct {
	endpoint    string
	connections atomic.Int64
}

// greeting is the greeting of ZMTP 3.1 with the NULL mechanism. ready returns a READY command with the properties.
var greeting = slices.Concat(
	[]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1},
	append([]byte("NULL"), make([]byte, 16)...),
	make([]byte, 32),
)

func ready(properties []byte) []byte {
	return command(append([]byte("\x05READY"), properties...))
}

func command(body []byte) []byte { return frame(4, body) }

// frame returns one frame on the wire. Flags: 1 more, 4 command. It adds the flag of a long frame.
func frame(flags byte, body []byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags | 2}, uint64(len(body))), body...)
}

func property(name, value string) []byte {
	p := append([]byte{byte(len(name))}, name...)
	return append(binary.BigEndian.AppendUint32(p, uint32(len(value))), value...)
}

// rawMessage returns a whole message of the protocol.
func rawMessage(seq uint64, payload []byte) []byte {
	return slices.Concat(frame(1, nil), frame(1, binary.BigEndian.AppendUint64(nil, seq)), frame(0, payload))
}

// serveRaw calls talk for each connection, after a handshake as a socket of type kind; none if kind is empty. talk ends
// when a write fails. The peer ends with the test.
func serveRaw(t testing.TB, kind string, talk func(conn net.Conn)) *rawPeer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &rawPeer{endpoint: "tcp://" + listener.Addr().String()}
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			p.connections.Add(1)
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
			wg.Go(func() {
				defer conn.Close()
				if kind != "" && !shakeHands(conn, kind) {
					return
				}
				talk(conn)
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return p
}

// shakeHands also waits for the first frame after the handshake: a subscription, or a request.
func shakeHands(conn net.Conn, kind string) bool {
	if _, err := conn.Write(append(slices.Clone(greeting), ready(property("Socket-Type", kind))...)); err != nil {
		return false
	}
	in := bufio.NewReader(conn)
	if _, err := io.ReadFull(in, make([]byte, 64)); err != nil {
		return false
	}
	for range 2 { // READY, and the frame
		if _, err := readFrame(in); err != nil {
			return false
		}
	}
	go io.Copy(io.Discard, in) // heartbeats; it ends with conn
	return true
}

func readFrame(in *bufio.Reader) ([]byte, error) {
	flags, err := in.ReadByte()
	if err != nil {
		return nil, err
	}
	head := make([]byte, 1)
	if flags&2 != 0 {
		head = make([]byte, 8)
	}
	if _, err := io.ReadFull(in, head); err != nil {
		return nil, err
	}
	size := uint64(0)
	for _, b := range head {
		size = size<<8 | uint64(b)
	}
	body := make([]byte, size)
	_, err = io.ReadFull(in, body)
	return body, err
}

// residentBytes returns the resident memory of this process, libzmq's included.
func residentBytes(t testing.TB) int64 {
	t.Helper()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Error(err) // not Fatal: memoryWatch samples from a goroutine of its own
		return 0
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(statm), &size, &resident); err != nil {
		t.Error(err)
	}
	return resident * int64(os.Getpagesize())
}

// memoryWatch samples the memory of this process until the test ends.
type memoryWatch struct {
	before int64
	peak   atomic.Int64
}

func watchMemory(t testing.TB) *memoryWatch {
	debug.FreeOSMemory()
	w := &memoryWatch{before: residentBytes(t)}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			w.look(t)
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	})
	t.Cleanup(func() { close(stop); wg.Wait() })
	return w
}

// look takes a sample and returns the largest growth so far, in bytes.
func (w *memoryWatch) look(t testing.TB) int64 {
	for now := residentBytes(t) - w.before; ; {
		peak := w.peak.Load()
		if now <= peak {
			return peak
		}
		if w.peak.CompareAndSwap(peak, now) {
			return now
		}
	}
}

// memoryBound is the number of bytes by which one publisher may make the process grow: waiting messages and the
// incomplete one. The race detector uses memory too, so make test also runs these tests without it.
const memoryBound = raceFactor * 200 << 20

// A message of endless frames: libzmq limits whole messages and single frames only, and kept 7.6 GB of such a message
// after 12 s. The relay ends the connection, and not that of another publisher.
func TestMemoryOfEndlessParts(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, size := range []int{0, 1, 100, 1 << 20} {
		t.Run(fmt.Sprint("bytes=", size), func(t *testing.T) {
			h := newHub(t)
			h.timing.cutPause, h.timing.cutPauseMax = 10*time.Millisecond, 40*time.Millisecond
			honest := publish(t, "")
			good := newRecorder()
			if _, err := h.Subscribe(Config{Endpoint: honest.endpoint}, good); err != nil {
				t.Fatal(err)
			}
			honest.subscribed(1)
			memory := watchMemory(t)
			part := frame(1, make([]byte, size))
			flood := bytes.Repeat(part, max(1, 64<<10/len(part)))
			bad := serveRaw(t, "PUB", func(conn net.Conn) {
				if _, err := conn.Write(rawMessage(0, []byte("x"))); err != nil {
					return
				}
				for memory.look(t) < 2*memoryBound { // a failing test must not take the machine down
					if _, err := conn.Write(flood); err != nil {
						return
					}
				}
			})
			r := newRecorder()
			if _, err := h.Subscribe(Config{Endpoint: bad.endpoint}, r); err != nil {
				t.Fatal(err)
			}
			want := "cut: zmqsub: a message of more than 16 frames"
			seq := uint64(0)
			r.until(t, "five ends of the connection", func() bool {
				honest.send("", seq, "")
				seq++
				if grown := memory.look(t); grown > memoryBound {
					t.Fatalf("memory grew by %d MB", grown>>20)
				}
				select {
				case r.changed <- struct{}{}:
				default:
				}
				return r.count(want) >= 5
			})
			good.until(t, "all messages of the other", func() bool { return len(good.all()) >= int(seq) })
			for i, report := range good.all() {
				if report != fmt.Sprintf("%d :", i) {
					t.Fatalf("the other publisher's report %d is %q", i, report)
				}
			}
			t.Logf("memory grew by %d MB", memory.look(t)>>20)
		})
	}
}

// The relay ends connections that exceed any other bound or break the protocol.
func TestCut(t *testing.T) {
	many := bytes.Repeat(property("a", ""), 1<<20)
	for _, test := range []struct {
		name, want string
		handshake  string
		talk       func(conn net.Conn)
	}{
		{"a message of frames that are too long together", "cut: zmqsub: a message of more than 16777216 bytes", "PUB",
			func(conn net.Conn) {
				conn.Write(frame(1, make([]byte, 12<<20)))
				conn.Write(frame(1, make([]byte, 5<<20)))
			}},
		{"a frame header with too great a length", "cut: zmqsub: a message of more than 16777216 bytes", "PUB",
			func(conn net.Conn) {
				conn.Write([]byte{3, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			}},
		{"a frame header with a length above 63 bits", "cut: zmqsub: a message of more than 16777216 bytes", "PUB",
			func(conn net.Conn) {
				conn.Write([]byte{3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			}},
		{"a handshake of many properties",
			"cut: zmqsub: a ZMTP command that is longer than 4096 bytes, or continues in another frame", "",
			func(conn net.Conn) {
				conn.Write(append(slices.Clone(greeting), ready(append(property("Socket-Type", "PUB"), many...))...))
			}},
		{"a command of several frames", "cut: zmqsub: a ZMTP command that is longer than 4096 bytes, or continues in " +
			"another frame", "PUB", func(conn net.Conn) {
			conn.Write(frame(5, []byte("\x04PING\x00\x00")))
		}},
		{"commands between endless frames", "cut: zmqsub: a message of more than 16 frames", "PUB",
			func(conn net.Conn) {
				conn.Write(bytes.Repeat(slices.Concat(frame(1, []byte("x")), command([]byte("\x04PING\x00\x00"))), 100))
			}},
		{"ZMTP 1", "cut: zmqsub: the peer does not speak ZMTP 3, the protocol of ZeroMQ sockets", "",
			func(conn net.Conn) {
				conn.Write([]byte{1, 0, 1, 1})
			}},
		{"ZMTP 2", "cut: zmqsub: the peer does not speak ZMTP 3, the protocol of ZeroMQ sockets", "",
			func(conn net.Conn) {
				conn.Write([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 1, 0, 0})
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := serveRaw(t, test.handshake, func(conn net.Conn) {
				test.talk(conn)
				io.Copy(io.Discard, conn)
			})
			h := newHub(t)
			h.timing.cutPause, h.timing.cutPauseMax = 10*time.Millisecond, 40*time.Millisecond
			r := newRecorder()
			if _, err := h.Subscribe(Config{Endpoint: p.endpoint}, r); err != nil {
				t.Fatal(err)
			}
			r.until(t, "two ends of the connection", func() bool { return r.count(test.want) >= 2 })
		})
	}
}

// The largest accepted message, in pieces, and one with the largest accepted number of frames.
func TestGreatestMessage(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	payload := bytes.Repeat([]byte("x"), maxMessageBytes-8)
	next := make(chan struct{})
	p := serveRaw(t, "PUB", func(conn net.Conn) {
		for rest := rawMessage(0, payload); len(rest) > 0; {
			n := min(len(rest), 100_000)
			if _, err := conn.Write(rest[:n]); err != nil {
				return
			}
			rest = rest[n:]
		}
		conn.Write(append(bytes.Repeat(frame(1, []byte("y")), 15), frame(0, nil)...))
		conn.Write(rawMessage(1, nil))
		<-next
	})
	defer close(next)
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	r.want(t, "0 :"+string(payload), "malformed: zmqsub: live message of 16 frames, want 3", "1 :")
}

// The pause grows each time that the relay ends the connection.
func TestPausesGrow(t *testing.T) {
	p := serveRaw(t, "", func(conn net.Conn) { conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) })
	h := newHub(t)
	h.timing.cutPause, h.timing.cutPauseMax = time.Millisecond, 128*time.Millisecond
	began := time.Now()
	r := newRecorder()
	if _, err := h.Subscribe(Config{Endpoint: p.endpoint}, r); err != nil {
		t.Fatal(err)
	}
	// 1+2+4+...+128 ms, and 128 for each after that.
	r.until(t, "twelve cuts", func() bool { return len(r.all()) >= 12 })
	if passed := time.Since(began); passed < (255+3*128)*time.Millisecond {
		t.Errorf("twelve connections within %v", passed)
	}
	if n := p.connections.Load(); n > int64(len(r.all()))+1 {
		t.Errorf("%d connections for %d cuts: libzmq connects by itself", n, len(r.all()))
	}
}

// flooder serves one connection: it sends messages with payloads of size bytes, numbered from 0, until it has sent most
// bytes or the connection ends. It sends from a single buffer, so that tests of memory do not measure the flooder's
// garbage.
func flooder(t *testing.T, size int, most int64) (p *rawPeer, sent *atomic.Int64) {
	sent = new(atomic.Int64)
	m := rawMessage(0, make([]byte, size))
	batch := bytes.Repeat(m, max(1, 32<<10/len(m)))
	return serveRaw(t, "PUB", func(conn net.Conn) {
		for seq := uint64(0); sent.Load() < most; {
			for rest := batch; len(rest) > 0; rest = rest[len(m):] {
				binary.BigEndian.PutUint64(rest[4:], seq) // after the empty topic's frame and this frame's header
				seq++
			}
			if _, err := conn.Write(batch); err != nil {
				return
			}
			sent.Add(int64(len(batch)))
		}
		io.Copy(io.Discard, conn)
	}), sent
}

// stalls waits until a count stops growing, and returns it.
func stalls(t *testing.T, count *atomic.Int64) int64 {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for last, same, deadline := int64(-1), 0, time.After(patience); ; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("kvepp still reads from the publisher")
		}
		now := count.Load()
		if same++; now != last || now == 0 {
			last, same = now, 0
		}
		if same == 10 {
			return now
		}
	}
}

// The bytes of waiting whole messages are bounded: kvepp stops reading from a publisher of large messages while they
// are on hold or wait for a replay. It loses none.
func TestMemoryOfBacklog(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, size := range []int{10, 5000, 15 << 20} {
		t.Run(fmt.Sprint("bytes=", size), func(t *testing.T) {
			const most = 250 << 20
			p, sent := flooder(t, size, most)
			memory := watchMemory(t)
			hold := make(chan struct{})
			c := &checker{count: most/int64(len(rawMessage(0, make([]byte, size)))) + 1, done: make(chan struct{})}
			if size < 100 {
				c.count = 500_000
			}
			if _, err := newHub(t).Subscribe(Config{Endpoint: p.endpoint, Hold: hold}, c); err != nil {
				t.Fatal(err)
			}
			if n := stalls(t, sent); n >= most {
				t.Errorf("kvepp read all %d MB", n>>20)
			}
			if grown := memory.look(t); grown > memoryBound {
				t.Errorf("memory grew by %d MB", grown>>20)
			}
			close(hold)
			select {
			case <-c.done:
			case <-time.After(2 * patience):
				t.Fatalf("no message came after the first %d (%d bytes sent)", c.next.Load(), sent.Load())
			}
			if c.wrong != "" {
				t.Error(c.wrong)
			}
			if grown := memory.look(t); grown > memoryBound {
				t.Errorf("memory grew by %d MB", grown>>20)
			}
			t.Logf("memory grew by %d MB", memory.look(t)>>20)
		})
	}
}

// checker is a Handler that wants count messages in order.
type checker struct {
	count int64
	next  atomic.Int64
	done  chan struct{}
	wrong string
}

func (c *checker) Message(seq uint64, _, payload []byte) {
	next := c.next.Add(1)
	if seq != uint64(next)-1 && c.wrong == "" {
		c.wrong = fmt.Sprintf("message %d, want %d", seq, next-1)
	}
	if next == c.count {
		close(c.done)
	}
}
func (c *checker) Gap(expected, got uint64)       { c.wrong = fmt.Sprintf("gap %d-%d", expected, got) }
func (c *checker) Restart()                       { c.wrong = "restart" }
func (c *checker) Cut(err error)                  { c.wrong = err.Error() }
func (c *checker) Malformed(err error)            { c.wrong = err.Error() }
func (c *checker) Replayed(outcome Replay, _ int) {}
func (c *checker) Connected()                     {}
func (c *checker) Disconnected()                  {}

// If a handler does not return, kvepp stops reading at the bound, and loses nothing.
func TestMemoryOfSlowHandler(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	memory := watchMemory(t)
	p, sent := flooder(t, 1<<20, 3*memoryBound)
	slow := &slowHandler{recorder: newRecorder(), hold: make(chan struct{}), until: 100, done: make(chan struct{})}
	release := sync.OnceFunc(func() { close(slow.hold) })
	defer release()
	if _, err := newHub(t).Subscribe(Config{Endpoint: p.endpoint}, slow); err != nil {
		t.Fatal(err)
	}
	if n := stalls(t, sent); n > memoryBound {
		t.Errorf("kvepp read %d MB", n>>20)
	}
	if grown := memory.look(t); grown > memoryBound {
		t.Errorf("memory grew by %d MB", grown>>20)
	}
	release()
	select {
	case <-slow.done:
	case <-time.After(patience):
		t.Fatal("the later messages do not come")
	}
	if slow.wrong != "" || slow.lost > 0 {
		t.Errorf("%q; %d messages lost", slow.wrong, slow.lost)
	}
	t.Logf("memory grew by %d MB", memory.look(t)>>20)
}

// Memory is bounded during a replay too: that of live messages, which wait, and that of replayed ones.
func TestMemoryOfReplay(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Run("live messages", func(t *testing.T) {
		memory := watchMemory(t)
		p, sent := flooder(t, 1<<20, 400<<20)
		silent := serveRaw(t, "ROUTER", func(conn net.Conn) { io.Copy(io.Discard, conn) })
		r := newRecorder()
		if _, err := newHub(t).Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: silent.endpoint,
			ReplayTimeout: time.Hour}, r); err != nil {
			t.Fatal(err)
		}
		stalls(t, sent)
		if grown := memory.look(t); grown > memoryBound || len(r.all()) > 0 {
			t.Errorf("memory grew by %d MB; %q", grown>>20, r.all())
		}
	})
	t.Run("a message of endless frames", func(t *testing.T) {
		memory := watchMemory(t)
		p := publish(t, "")
		flood := bytes.Repeat(frame(1, nil), 32<<10)
		bad := serveRaw(t, "ROUTER", func(conn net.Conn) {
			for memory.look(t) < 2*memoryBound {
				if _, err := conn.Write(flood); err != nil {
					return
				}
			}
		})
		r, _ := subscribe(
			t,
			Config{Endpoint: p.endpoint, ReplayEndpoint: bad.endpoint, ReplayTimeout: 2 * time.Second},
		)
		p.subscribed(1)
		r.until(t, "the replay's end", func() bool { return r.count(string(ReplayTimedOut)) > 0 })
		p.send("", 0, "")
		r.want(t, "0 :")
		if grown := memory.look(t); grown > memoryBound {
			t.Errorf("memory grew by %d MB", grown>>20)
		}
	})
	t.Run("a response without an end", func(t *testing.T) {
		memory := watchMemory(t)
		p := publish(t, "")
		bad := serveRaw(t, "ROUTER", func(conn net.Conn) {
			for seq := uint64(0); memory.look(t) < 2*memoryBound; seq++ {
				if _, err := conn.Write(append(frame(1, nil),
					rawMessage(seq, make([]byte, 1<<20))[2:]...)); err != nil {
					return
				}
			}
		})
		r := &responses{recorder: newRecorder()}
		if _, err := newHub(t).Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: bad.endpoint,
			ReplayTimeout: 2 * time.Second}, r); err != nil {
			t.Fatal(err)
		}
		p.subscribed(1)
		r.until(t, "the replay's end", func() bool { return r.count(string(ReplayTimedOut)) > 0 })
		if grown := memory.look(t); grown > memoryBound {
			t.Errorf("memory grew by %d MB", grown>>20)
		}
	})
}

// responses counts messages only.
type responses struct{ *recorder }

func (*responses) Message(uint64, []byte, []byte) {}

// The waiting bytes of several publishers together are bounded.
func TestMemoryOfSeveralAttackers(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	memory := watchMemory(t)
	h := newHub(t)
	hold := make(chan struct{})
	defer close(hold)
	var sent atomic.Int64
	whole, endless := rawMessage(0, make([]byte, 1<<20)), bytes.Repeat(frame(1, nil), 32<<10)
	partial := slices.Concat(frame(1, nil), []byte{3, 0, 0, 0, 0, 0, 0xf0, 0, 0}, make([]byte, 15<<20))
	for i := range 60 {
		p := serveRaw(t, "PUB", func(conn net.Conn) {
			switch i % 3 {
			case 0: // whole messages
				for {
					if _, err := conn.Write(whole); err != nil {
						return
					}
					sent.Add(1)
				}
			case 1: // most of a message
				conn.Write(partial)
				io.Copy(io.Discard, conn)
			case 2:
				for {
					if _, err := conn.Write(endless); err != nil {
						return
					}
				}
			}
		})
		if _, err := h.Subscribe(Config{Endpoint: p.endpoint, Hold: hold}, newRecorder()); err != nil {
			t.Fatal(err)
		}
	}
	stalls(t, &sent)
	if grown := memory.look(t); grown > raceFactor*600<<20 {
		t.Errorf("memory grew by %d MB", grown>>20)
	}
	t.Logf("memory grew by %d MB", memory.look(t)>>20)
}
