package zmqsub

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is far longer than any step of these tests takes. A test that waits so long has failed.
const patience = 30 * time.Second

// recorder is a Handler that records its calls.
type recorder struct {
	mu      sync.Mutex
	reports []string // "3 a:payload", "gap 1-3", "restart", "malformed: ...", "connected", "disconnected"
	changed chan struct{}
	running atomic.Int32
}

func newRecorder() *recorder { return &recorder{changed: make(chan struct{}, 1)} }

func (r *recorder) add(report string) {
	if r.running.Add(1) != 1 {
		report += " (while another callback was running)"
	}
	defer r.running.Add(-1)
	r.mu.Lock()
	r.reports = append(r.reports, report)
	r.mu.Unlock()
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *recorder) Message(seq uint64, topic, payload []byte) {
	r.add(fmt.Sprintf("%d %s:%s", seq, topic, payload))
}
func (r *recorder) Gap(expected, got uint64)       { r.add(fmt.Sprintf("gap %d-%d", expected, got)) }
func (r *recorder) Restart()                       { r.add("restart") }
func (r *recorder) Replayed(outcome Replay, _ int) { r.add(string(outcome)) }
func (r *recorder) Malformed(err error)            { r.add("malformed: " + err.Error()) }
func (r *recorder) Cut(err error)                  { r.add("cut: " + err.Error()) }
func (r *recorder) Connected()                     { r.add("connected") }
func (r *recorder) Disconnected()                  { r.add("disconnected") }

// all returns the reports so far, without those about replays and those about the connection, whose place among the
// others is not fixed.
func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(
		slices.Clone(r.reports),
		func(s string) bool { return s == "connected" || s == "disconnected" || strings.HasPrefix(s, "replay") },
	)
}

func (r *recorder) count(report string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, s := range r.reports {
		if s == report {
			n++
		}
	}
	return n
}

// until waits for a condition on the reports.
func (r *recorder) until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for !condition() {
		select {
		case <-r.changed:
		case <-deadline:
			r.mu.Lock()
			defer r.mu.Unlock()
			t.Fatalf("did not see %s; reported: %q", what, r.reports)
		}
	}
}

// want waits for exactly these reports.
func (r *recorder) want(t *testing.T, reports ...string) {
	t.Helper()
	r.until(t, fmt.Sprintf("%q", reports), func() bool { return len(r.all()) >= len(reports) })
	if got := r.all(); !slices.Equal(got, reports) {
		t.Fatalf("reported %q, want %q", got, reports)
	}
}

func newHub(t testing.TB) *Hub {
	t.Helper()
	h, err := NewHub()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func subscribe(t *testing.T, config Config) (*recorder, *Subscription) {
	t.Helper()
	r := newRecorder()
	s, err := newHub(t).Subscribe(config, r)
	if err != nil {
		t.Fatal(err)
	}
	return r, s
}

func TestOrder(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	var want []string
	for seq := range uint64(2000) {
		p.send("kv", seq, "x")
		want = append(want, fmt.Sprintf("%d kv:x", seq))
	}
	r.want(t, want...)
	r.until(t, "one connect", func() bool { return r.count("connected") == 1 })
}

func TestGap(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	for _, seq := range []uint64{5, 6, 9} {
		p.send("", seq, "")
	}
	r.want(t, "gap 0-5", "5 :", "6 :", "gap 7-9", "9 :")
}

func TestRestart(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	p.send("", 0, "old")
	p.send("", 1, "old")
	r.want(t, "0 :old", "1 :old")
	p.close()
	r.want(t, "0 :old", "1 :old", "restart") // before the next publisher sends anything

	q := publish(t, p.endpoint)
	q.subscribed(1)
	q.send("", 0, "new")
	q.send("", 1, "new")
	r.want(t, "0 :old", "1 :old", "restart", "0 :new", "1 :new")
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
}

// A lost connection ends the epoch at once if there are no replays, even if the publisher goes on.
func TestLostConnection(t *testing.T) {
	p := publish(t, "")
	proxy := newProxy(t, strings.TrimPrefix(p.endpoint, "tcp://"))
	r, _ := subscribe(t, Config{Endpoint: "tcp://" + proxy.address})
	p.subscribed(1)
	proxy.cut() // nothing was delivered, so that nothing ends
	p.subscribed(1)
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
	p.send("", 0, "a")
	r.want(t, "0 :a")
	proxy.cut()
	r.want(t, "0 :a", "restart")
	p.subscribed(1)
	r.until(t, "the third connect", func() bool { return r.count("connected") == 3 })
	p.send("", 1, "b")
	r.want(t, "0 :a", "restart", "gap 0-1", "1 :b")
}

// The publisher ends, and one with the next numbers starts. It may be another one.
func TestReconnect(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	p.send("", 0, "")
	r.want(t, "0 :")
	p.close()
	q := publish(t, p.endpoint)
	q.subscribed(1)
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
	q.send("", 1, "")
	q.send("", 3, "")
	r.want(t, "0 :", "restart", "gap 0-1", "1 :", "gap 2-3", "3 :")
}

// A publisher whose messages carry its id needs no replay after a reconnect.
func TestReconnectToTheSame(t *testing.T) {
	p := publish(t, "")
	proxy := newProxy(t, strings.TrimPrefix(p.endpoint, "tcp://"))
	r, _ := subscribe(t, Config{Endpoint: "tcp://" + proxy.address, Publisher: []byte("me")})
	p.subscribed(1)
	p.sendFrames("", "me", binary.BigEndian.AppendUint64(nil, 0), "a")
	r.want(t, "0 :a")
	proxy.cut()
	r.until(t, "the disconnect", func() bool { return r.count("disconnected") == 1 })
	p.subscribed(1)
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
	p.sendFrames("", "me", binary.BigEndian.AppendUint64(nil, 1), "b")
	p.sendFrames("", "you", binary.BigEndian.AppendUint64(nil, 2), "c")
	r.want(t, "0 :a", "1 :b", "malformed: zmqsub: live message of publisher 796f75, want 6d65")
}

func TestPublisherComesLater(t *testing.T) {
	first := publish(t, "")
	first.close() // leaves a free port
	r, _ := subscribe(t, Config{Endpoint: first.endpoint})
	p := publish(t, first.endpoint)
	p.subscribed(1)
	p.send("", 0, "")
	r.want(t, "0 :")
}

func TestTopic(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, Topic: "kv@a"})
	p.subscribed(1)
	p.send("kv@b", 0, "")
	p.send("kv@a", 0, "")
	p.send("", 1, "")
	p.send("kv@a@model", 1, "")
	r.want(t, "0 kv@a:", "1 kv@a@model:")
}

func TestMalformed(t *testing.T) {
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	p.send("", 0, "")
	p.sendFrames("alone")
	p.sendFrames("", "1234567", "x")
	p.sendFrames("", "", "")
	p.sendFrames("", "12345678", "x", "y")
	p.sendFrames("1", "2", "3", "4", "5", "6", "7", "8")
	p.send("", 1, "")
	r.want(t, "0 :",
		"malformed: zmqsub: live message of 1 frames, want 3",
		"malformed: zmqsub: live message with a number of 7 bytes, want 8",
		"malformed: zmqsub: live message with a number of 0 bytes, want 8",
		"malformed: zmqsub: live message of 4 frames, want 3",
		"malformed: zmqsub: live message of 8 frames, want 3",
		"1 :")
}

// A message above the limit ends the connection and not the process. The next message shows the gap.
func TestMessageTooLong(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, MaxMessageBytes: 1000})
	p.subscribed(1)
	p.send("", 0, "")
	p.send("", 1, strings.Repeat("x", 1001))
	r.until(t, "the disconnect", func() bool { return r.count("disconnected") == 1 })
	p.subscribed(1)
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
	p.send("", 2, "")
	r.want(t, "0 :", "cut: zmqsub: a message of more than 1000 bytes", "gap 0-2", "2 :")
}

// At first a server that is no ZMQ socket answers, as when another process has the port for a while.
func TestPeerIsNotZMQ(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	responded := make(chan struct{}, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\nthis is not the socket you are looking for"))
			io.ReadFull(conn, make([]byte, 10)) // the beginning of a greeting
			conn.Close()
			select {
			case responded <- struct{}{}:
			default:
			}
		}
	})
	r, _ := subscribe(t, Config{Endpoint: "tcp://" + listener.Addr().String()})
	<-responded
	listener.Close()
	wg.Wait()
	p := publish(t, "tcp://"+listener.Addr().String())
	p.subscribed(1)
	p.send("", 0, "")
	r.until(t, "the message", func() bool { return r.count("0 :") == 1 })
	if r.count("cut: zmqsub: the peer does not speak ZMTP 3, the protocol of ZeroMQ sockets") == 0 {
		t.Errorf("the other peer was not reported: %q", r.all())
	}
}

func TestIPv6(t *testing.T) {
	// A machine without IPv6 cannot connect there, but must still accept the endpoint.
	if listener, err := net.Listen("tcp", "[::1]:0"); err != nil {
		_, s := subscribe(t, Config{Endpoint: "tcp://[::1]:5557"})
		s.Close()
		return
	} else if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	p := publish(t, "tcp://[::1]:*")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint})
	p.subscribed(1)
	p.send("", 0, "six")
	r.want(t, "0 :six")
}

// listener is a Handler that waits for a number of messages in a row. The publisher sends that many first, and more
// later. On a machine that is too busy for handshakes and heartbeats a connection may end, before or after Connected.
// Its messages are lost, and the listener waits for as many later ones.
type listener struct {
	until, row int
	next       uint64
	ended      bool // a connection ended
	done       chan struct{}
	wrong      string // final when done is closed
}

func (l *listener) Message(seq uint64, _, _ []byte) {
	if l.row == l.until {
		return
	}
	lostFirst := l.ended || seq >= uint64(l.until)
	if l.row > 0 && seq != l.next || l.row == 0 && seq != 0 && !lostFirst {
		l.wrong = fmt.Sprintf("message %d, want %d", seq, l.next)
	}
	l.next = seq + 1
	if l.row++; l.row == l.until {
		close(l.done)
	}
}

// lost notes that messages were lost; the next ones count from the start.
func (l *listener) lost(how string) {
	switch {
	case l.row == l.until:
	case l.ended:
		l.row = 0
	default:
		l.wrong = how
	}
}

func (l *listener) Gap(expected, got uint64) {
	if expected > 0 || got < uint64(l.until) {
		l.lost(fmt.Sprintf("gap %d-%d", expected, got))
	}
}
func (l *listener) Restart()             { l.lost("restart") }
func (l *listener) Replayed(Replay, int) {}
func (l *listener) Malformed(err error)  { l.lost(err.Error()) }
func (l *listener) Cut(error)            {}
func (l *listener) Connected()           {}
func (l *listener) Disconnected()        { l.ended = true }

func TestManySubscriptionsFewThreads(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const n, messages = 4000, 3
	h := newHub(t)
	if err := h.Room(n); err != nil {
		t.Fatal(err)
	}
	endpoints, more, _ := publishers(t, n, messages, 10, 0)
	threads := pprof.Lookup("threadcreate").Count()
	listeners := make([]*listener, n)
	for i := range listeners {
		listeners[i] = &listener{until: messages, done: make(chan struct{})}
		if _, err := h.Subscribe(Config{Endpoint: endpoints[i]}, listeners[i]); err != nil {
			t.Fatal(err)
		}
	}
	late, again := time.After(4*patience), time.NewTicker(patience/5)
	defer again.Stop()
	for i, l := range listeners {
		for heard := false; !heard; {
			select {
			case <-l.done:
				heard = true
			case <-again.C: // for listeners whose connection ended
				fmt.Fprintln(more)
			case <-late:
				t.Fatalf("subscription %d of %d did not get its messages", i, n)
			}
		}
		if l.wrong != "" {
			t.Errorf("subscription %d: %s", i, l.wrong)
		}
	}
	// libzmq's threads and some of Go's scheduler; their number must not depend on that of the subscriptions.
	if made, most := pprof.Lookup("threadcreate").Count()-threads, 2*runtime.GOMAXPROCS(0)+60; made > most {
		t.Errorf("%d threads were made for %d subscriptions, want at most %d", made, n, most)
	}
}

// If a subscription does not fit, the error says how many descriptors it needs.
func TestRoom(t *testing.T) {
	h := newHub(t)
	h.room = 1
	if _, err := h.Subscribe(Config{Endpoint: "tcp://127.0.0.1:5557"}, newRecorder()); err != nil {
		t.Fatal(err)
	}
	want := "zmqsub: 2 subscriptions need 776 file descriptors, and this process may have enough for 1: raise its " +
		"limit (ulimit -n, " +
		"LimitNOFILE= of systemd, the container's nofile limit)"
	if _, err := h.Subscribe(Config{Endpoint: "tcp://127.0.0.1:5557"}, newRecorder()); err == nil ||
		err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	if err := h.Room(100_000); err == nil || !strings.Contains(err.Error(), "too many: libzmq has sockets for") {
		t.Errorf("error %v for 100,000 subscriptions", err)
	}
}

// If the handler is too slow, the publisher drops messages. Exactly those are reported as gaps.
func TestSlowConsumer(t *testing.T) {
	const count = 100_000
	endpoints, in, out := publishers(t, 1, count, 1000, 1000)
	h := newHub(t)
	slow := &slowHandler{hold: make(chan struct{}), until: count, done: make(chan struct{})}
	if _, err := h.Subscribe(Config{Endpoint: endpoints[0]}, slow); err != nil {
		t.Fatal(err)
	}
	if !out.Scan() || out.Text() != "sent" {
		t.Fatalf("the publisher ended: %v", out.Err())
	}
	close(slow.hold)
	// One more message shows the gap at the end. While the queue is still full, it may be dropped too.
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		if _, err := fmt.Fprintln(in); err != nil {
			t.Fatal(err)
		}
		select {
		case <-slow.done:
			if slow.wrong != "" || slow.lost == 0 {
				t.Errorf("%q; %d of %d messages were lost, want some", slow.wrong, slow.lost, count)
			}
			return
		case <-tick.C:
		}
	}
}

// slowHandler blocks in its first message until hold is closed. It checks that each gap is reported exactly.
type slowHandler struct {
	*recorder
	hold, done chan struct{}
	until      uint64
	next, lost uint64
	wrong      string
}

func (h *slowHandler) Message(seq uint64, _, _ []byte) {
	<-h.hold
	if seq != h.next {
		h.wrong = fmt.Sprintf("message %d, want %d", seq, h.next)
	}
	h.next = seq + 1
	if seq >= h.until && h.done != nil {
		close(h.done)
		h.until = math.MaxUint64
	}
}

func (h *slowHandler) Gap(expected, got uint64) {
	if expected != h.next {
		h.wrong = fmt.Sprintf("gap from %d, want %d", expected, h.next)
	}
	h.next, h.lost = got, h.lost+got-expected
}
func (h *slowHandler) Connected()    {}
func (h *slowHandler) Disconnected() {}

// The peer vanishes without closing the connection, as a machine without power does.
func TestHalfOpen(t *testing.T) {
	p := publish(t, "")
	proxy := newProxy(t, strings.TrimPrefix(p.endpoint, "tcp://"))
	h := newHub(t)
	h.timing.heartbeat, h.timing.heartbeatTimeout = 50*time.Millisecond, 500*time.Millisecond
	r := newRecorder()
	if _, err := h.Subscribe(Config{Endpoint: "tcp://" + proxy.address}, r); err != nil {
		t.Fatal(err)
	}
	p.subscribed(1)
	p.send("", 0, "")
	r.want(t, "0 :")
	proxy.freeze()
	r.until(t, "the disconnect", func() bool { return r.count("disconnected") == 1 })
	p.subscribed(1) // by a new connection
	r.until(t, "the second connect", func() bool { return r.count("connected") == 2 })
	p.send("", 2, "")
	r.want(t, "0 :", "restart", "gap 0-2", "2 :")
}

// Close returns while messages arrive, and no callback follows it.
func TestCloseDuringTraffic(t *testing.T) {
	p := publish(t, "")
	h := newHub(t)
	const n = 10
	var closed [n]atomic.Bool
	var late atomic.Int32
	subscriptions := make([]*Subscription, n)
	recorders := make([]*recorder, n)
	for i := range subscriptions {
		recorders[i] = newRecorder()
		var err error
		subscriptions[i], err = h.Subscribe(
			Config{Endpoint: p.endpoint},
			&lateWatcher{recorder: recorders[i], closed: &closed[i], late: &late},
		)
		if err != nil {
			t.Fatal(err)
		}
	}
	p.subscribed(n)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for seq := uint64(0); !stop.Load(); seq++ {
			p.send("", seq, "x")
			runtime.Gosched()
		}
	})
	for i, s := range subscriptions {
		recorders[i].until(t, "traffic", func() bool { return len(recorders[i].all()) > 10 })
		wg.Go(func() {
			s.Close()
			closed[i].Store(true)
			s.Close()
		})
	}
	// The other subscriptions are closed, and the traffic continues.
	finished := make(chan struct{})
	go func() {
		for i := range closed {
			for !closed[i].Load() {
				runtime.Gosched()
			}
		}
		close(finished)
	}()
	select {
	case <-finished:
	case <-time.After(patience):
		t.Error("Close did not return")
	}
	stop.Store(true)
	wg.Wait()
	p.unsubscribed(n)
	if n := late.Load(); n != 0 {
		t.Errorf("%d callbacks came after Close", n)
	}
}

type lateWatcher struct {
	*recorder
	closed *atomic.Bool
	late   *atomic.Int32
}

func (w *lateWatcher) Message(seq uint64, topic, payload []byte) {
	w.recorder.Message(seq, topic, payload)
	if w.closed.Load() {
		w.late.Add(1)
	}
}

// Subscriptions that end while they connect do not disturb others that share their I/O threads.
func TestCloseWhileConnecting(t *testing.T) {
	refused, _ := reserve(t)
	p := publish(t, "")
	h := newHub(t)
	for range 200 {
		s, err := h.Subscribe(Config{Endpoint: refused}, newRecorder())
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	for range 2 * ioThreads {
		r := newRecorder()
		if _, err := h.Subscribe(Config{Endpoint: p.endpoint}, r); err != nil {
			t.Fatal(err)
		}
		r.until(t, "the connection", func() bool { return r.count("connected") == 1 })
	}
}

func TestHubClose(t *testing.T) {
	before := openFiles(t)
	h, err := NewHub()
	if err != nil {
		t.Fatal(err)
	}
	p := publish(t, "")
	for range 5 {
		if _, err := h.Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: "tcp://127.0.0.1:1"},
			newRecorder()); err != nil {
			t.Fatal(err)
		}
	}
	p.subscribed(5)
	for range 2 {
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Subscribe(Config{Endpoint: p.endpoint}, newRecorder()); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v, want ErrClosed", err)
	}
	p.close()
	// Go's network poller opens a few when it is first used.
	if after := openFiles(t); after > before+4 {
		t.Errorf("%d files are open, %d were before", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	n := 0
	for fd := range 4096 {
		if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0); errno == 0 {
			n++
		}
	}
	return n
}

func TestRefusedEndpoints(t *testing.T) {
	h := newHub(t)
	before := openFiles(t)
	for _, config := range []Config{
		{},
		{Endpoint: "tcp://*:5557"},
		{Endpoint: "127.0.0.1:5557"},
		{Endpoint: "tcp://127.0.0.1"},
		{Endpoint: "tcp://127.0.0.1:99999"},
		{Endpoint: "tcp://127.0.0.1:0"},
		{Endpoint: "tcp://127.0.0.1:http"},
		{Endpoint: "carrier-pigeon://127.0.0.1:5557"},
		{Endpoint: "tcp://127.0.0.1:5557\x00"},
		{Endpoint: "tcp://127.0.0.1:5557", ReplayEndpoint: "tcp://127.0.0.1"},
		{Endpoint: "tcp://127.0.0.1:5557", ReplayTimeout: -1},
		{Endpoint: "tcp://127.0.0.1:5557", MaxMessageBytes: -1},
	} {
		s, err := h.Subscribe(config, newRecorder())
		if err == nil {
			t.Errorf("%+v is accepted", config)
			s.Close()
		} else if !strings.HasPrefix(err.Error(), "zmqsub: ") {
			t.Errorf("%+v: error %q does not begin with the package's name", config, err)
		}
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if after := openFiles(t); after > before {
		t.Errorf("%d files are open, %d were before", after, before)
	}
}
