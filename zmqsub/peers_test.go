package zmqsub

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// publisher is an XPUB socket: a PUB socket that also receives subscriptions, so that a test can wait for them.
type publisher struct {
	t        *testing.T
	ctx      *zmq.Context
	socket   *zmq.Socket
	endpoint string
}

// publish binds a publisher. If endpoint is empty, it chooses a free port on 127.0.0.1.
func publish(t *testing.T, endpoint string) *publisher {
	t.Helper()
	if endpoint == "" {
		endpoint = "tcp://127.0.0.1:*"
	}
	p := &publisher{t: t}
	var err error
	if p.ctx, err = zmq.NewContext(); err != nil {
		t.Fatal(err)
	}
	if p.socket, err = p.ctx.NewSocket(zmq.XPUB); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(p.socket.SetXpubVerboser(1), p.socket.SetLinger(0), p.socket.SetSndhwm(0), p.socket.SetIpv6(true),
		p.socket.SetRcvtimeo(patience), p.socket.Bind(endpoint))
	if err != nil {
		t.Fatal(err)
	}
	if p.endpoint, err = p.socket.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// close closes the publisher and waits until its port is free.
func (p *publisher) close() {
	p.socket.Close()
	p.ctx.Term()
}

// subscribed waits for n subscriptions to arrive.
func (p *publisher) subscribed(n int) {
	p.t.Helper()
	p.arrived(n, 1)
}

// unsubscribed waits for n subscriptions to end. If a publisher is closed in the middle of sending, while a subscriber
// leaves, libzmq may abort the process (zeromq/libzmq#3442). Call it first if a subscriber leaves in traffic.
func (p *publisher) unsubscribed(n int) {
	p.t.Helper()
	p.arrived(n, 0)
}

// arrived waits for n frames that begin with the byte first.
func (p *publisher) arrived(n int, first byte) {
	p.t.Helper()
	for arrived := 0; arrived < n; {
		frame, err := p.socket.RecvBytes(0)
		if err != nil {
			p.t.Fatalf("%d of %d subscriptions changed: %v", arrived, n, err)
		}
		if len(frame) > 0 && frame[0] == first {
			arrived++
		}
	}
}

func (p *publisher) send(topic string, seq uint64, payload string) {
	p.t.Helper()
	p.sendFrames(topic, binary.BigEndian.AppendUint64(nil, seq), payload)
}

func (p *publisher) sendFrames(frames ...any) {
	p.t.Helper()
	if _, err := p.socket.SendMessage(frames...); err != nil {
		p.t.Fatal(err)
	}
}

// replayer is a ROUTER socket that answers requests for past messages.
type replayer struct {
	endpoint string
	asked    chan uint64
}

// offerReplay answers each request with the messages that answer returns, each without its empty first frame. If they
// lack the end message, the response has no end.
func offerReplay(t *testing.T, response func(from uint64) [][]any) *replayer {
	t.Helper()
	return offerReplayAt(t, "tcp://127.0.0.1:*", response)
}

func offerReplayAt(t *testing.T, endpoint string, response func(from uint64) [][]any) *replayer {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	router, err := ctx.NewSocket(zmq.ROUTER)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(router.SetLinger(0), router.SetRcvtimeo(10*time.Millisecond),
		router.Bind(endpoint)); err != nil {
		t.Fatal(err)
	}
	r := &replayer{asked: make(chan uint64, 100)}
	if r.endpoint, err = router.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		defer router.Close()
		for !stop.Load() {
			frames, err := router.RecvMessageBytes(0)
			if err != nil {
				continue // timeout
			}
			if len(frames) != 3 || len(frames[1]) != 0 || len(frames[2]) != 8 {
				t.Errorf("replay request %q, want an empty frame and one of 8 bytes", frames[1:])
				continue
			}
			from := binary.BigEndian.Uint64(frames[2])
			r.asked <- from
			for _, reply := range response(from) {
				if _, err := router.SendMessage(append([]any{frames[0], ""}, reply...)...); err != nil {
					t.Error(err)
				}
			}
		}
	})
	t.Cleanup(func() {
		stop.Store(true)
		wg.Wait()
		ctx.Term()
	})
	return r
}

var endNumber = binary.BigEndian.AppendUint64(nil, math.MaxUint64)

// threeFrames returns a response as vLLM up to 0.19 and SGLang send it, fourFrames one as vLLM from 0.26 does: messages
// from..to-1 with payload pN, then the end.
func threeFrames(from, to uint64) (replies [][]any) {
	for seq := from; seq < to; seq++ {
		replies = append(replies, []any{binary.BigEndian.AppendUint64(nil, seq), fmt.Sprintf("p%d", seq)})
	}
	return append(replies, []any{endNumber, ""})
}

func fourFrames(from, to uint64) (replies [][]any) {
	for seq := from; seq < to; seq++ {
		replies = append(replies, []any{"kv", binary.BigEndian.AppendUint64(nil, seq), fmt.Sprintf("p%d", seq)})
	}
	return append(replies, []any{"", endNumber, ""})
}

// reserve binds a port without listening on it: connections to it are refused, and no other process gets it before
// free.
func reserve(t *testing.T) (endpoint string, free func()) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	free = sync.OnceFunc(func() { syscall.Close(fd) })
	t.Cleanup(free)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	address, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("tcp://127.0.0.1:%d", address.(*syscall.SockaddrInet4).Port), free
}

// proxy forwards each connection to one address.
type proxy struct {
	address string
	mu      sync.Mutex // guards frozen and conns
	frozen  map[net.Conn]bool
	conns   []net.Conn
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{address: listener.Addr().String(), frozen: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	pass := func(from, to net.Conn) {
		buf := make([]byte, 4096)
		for {
			n, err := from.Read(buf)
			p.mu.Lock()
			frozen := p.frozen[from]
			p.mu.Unlock()
			if err != nil {
				if !frozen { // a frozen connection does not report its end
					to.Close()
				}
				return
			}
			if frozen {
				continue
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			wg.Go(func() { pass(in, out) })
			wg.Go(func() { pass(out, in) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		p.mu.Lock()
		clear(p.frozen)
		for _, c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		wg.Wait()
	})
	return p
}

// cut ends the current connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
}

// freeze stops forwarding on the current connections and leaves them open.
func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		p.frozen[c] = true
	}
}
