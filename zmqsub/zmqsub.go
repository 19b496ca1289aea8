// Package zmqsub subscribes to one ZMQ publisher and says what arrived, in order, and what did not.
//
// It owns the sockets, the reconnecting, the numbering of messages (gaps and restarts of the publisher), and the replay of
// what was missed, for publishers that speak vLLM's KV-event protocol: frames topic, number, payload. It never looks into
// a payload, and never guesses: what it could not recover it reports.
//
// Concurrency: everything is safe for concurrent use. A subscription calls its [Handler] from one goroutine at a time;
// thousands of subscriptions share a few OS threads, because each waits through Go's network poller, not in a thread.
//
// It needs libzmq, version 4.2 or later.
package zmqsub

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// ErrClosed says that the hub was closed.
var ErrClosed = errors.New("zmqsub: the hub is closed")

// Handler is told what happens on one subscription. Its methods are called one at a time, never after Close of the
// subscription returned; they must not call Close themselves. While one runs, messages wait in the socket's queue.
type Handler interface {
	// Message delivers a message. Within one life of the publisher seq only grows, and grows by one except after Gap.
	// topic and payload are valid during the call only; topic is nil where a replay does not tell it.
	Message(seq uint64, topic, payload []byte)

	// Gap says that the messages expected to got-1 are lost. Message with seq got is called next.
	Gap(expected, got uint64)

	// Restart says that the publisher began anew, or repeats itself: whatever follows has nothing to do with what was
	// delivered before.
	Restart()

	// Malformed says that something arrived that is not in the protocol, and was ignored.
	Malformed(err error)

	// Connected and Disconnected follow the connection and alternate, Connected first. They come from observing the
	// socket, so that messages may arrive a little before Connected or after Disconnected.
	Connected()
	Disconnected()
}

// Config says what to subscribe to.
type Config struct {
	// Endpoint is the publisher's address, as libzmq writes it: "tcp://10.0.0.7:5557", "tcp://[fd00::7]:5557".
	Endpoint string

	// ReplayEndpoint is the address where the publisher answers requests for past messages. Empty: it does not, and
	// every gap is reported. With one, past messages are asked for on each connect and on each gap.
	ReplayEndpoint string

	// Topic is the prefix of the topics wanted. Empty: all.
	Topic string

	// Publisher is the id that messages name between topic and number, where the protocol has such a frame (Dynamo's event
	// plane: 8 bytes, big-endian). Messages of another publisher are Malformed: its address went to somebody else. Empty:
	// messages have no such frame.
	Publisher []byte

	// ReplayTimeout bounds one replay; then what is still missing is reported as a gap. 0 means 10 seconds.
	ReplayTimeout time.Duration

	// MaxMessageBytes bounds one frame; the connection to a publisher that sends a longer one is dropped and made anew.
	// 0 means 64 MiB.
	MaxMessageBytes int64
}

const (
	defaultReplayTimeout   = 10 * time.Second
	defaultMaxMessageBytes = 64 << 20

	// Source: the options that dynamo-kv-router 1.6.1 sets on its subscriptions.
	receiveHighWaterMark = 100_000
	reconnectInterval    = 100 * time.Millisecond
	reconnectIntervalMax = 5 * time.Second
	heartbeatInterval    = 5 * time.Second
	heartbeatTimeout     = 15 * time.Second
	heartbeatTTL         = 15 * time.Second

	// reviveAfter is how long after the end of a connection libzmq has to say that it will try again. It says so at once,
	// or never: after a protocol error, such as a frame that is too long or a peer that is no ZMQ socket at all, it gives
	// the endpoint up, and the connection must be made anew.
	reviveAfter = 2 * time.Second

	// handshakeTimeout is how long a peer may take to show that it is a ZMQ socket.
	handshakeTimeout = 5 * time.Second

	// A subscription needs four sockets at most: its own, the two ends of its monitor, and one for a replay. libzmq
	// allots eight bytes for each that there may be.
	maxSockets = 1 << 16

	ioThreads = 2
)

// Hub is what subscriptions share: one libzmq context with its I/O threads. Make one with [NewHub].
type Hub struct {
	ctx *zmq.Context

	mu            sync.Mutex // guards what follows
	closed        bool
	subscriptions map[*Subscription]bool
	monitors      uint64 // names given to monitors
}

// NewHub returns a hub without subscriptions. Close it to release its threads.
func NewHub() (*Hub, error) {
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new context: %w", err)
	}
	if err := errors.Join(ctx.SetIoThreads(ioThreads), ctx.SetMaxSockets(maxSockets), ctx.SetBlocky(false)); err != nil {
		return nil, fmt.Errorf("zmqsub: context options: %w", errors.Join(err, ctx.Term()))
	}
	return &Hub{ctx: ctx, subscriptions: map[*Subscription]bool{}}, nil
}

// Close closes all subscriptions, and returns when no callback will come any more.
func (h *Hub) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	subscriptions := h.subscriptions
	h.subscriptions = nil
	h.mu.Unlock()
	for s := range subscriptions {
		s.stop()
	}
	for s := range subscriptions {
		s.done.Wait()
	}
	return h.ctx.Term()
}

// Subscription is one running subscription.
type Subscription struct {
	hub     *Hub
	config  Config
	handler Handler

	live    *source // the SUB socket; receive's
	monitor *source // observes live; observe's
	done    sync.WaitGroup

	calls  sync.Mutex // held while the handler runs
	closed atomic.Bool
	resync atomic.Bool // the connection is new: ask for what was missed
	revive atomic.Bool // libzmq gave the endpoint up: connect anew

	replayMu sync.Mutex // guards replay
	replay   *source    // the DEALER socket, while there is one; receive's

	sequence sequence // receive's
}

// Subscribe starts a subscription. It returns at once; the publisher need not be there yet, and may come and go.
//
// Errors: ErrClosed; a description of an endpoint that libzmq cannot read; running out of file descriptors.
func (h *Hub) Subscribe(config Config, handler Handler) (*Subscription, error) {
	if config.ReplayTimeout == 0 {
		config.ReplayTimeout = defaultReplayTimeout
	}
	if config.MaxMessageBytes == 0 {
		config.MaxMessageBytes = defaultMaxMessageBytes
	}
	if config.ReplayTimeout < 0 || config.MaxMessageBytes < 0 {
		return nil, fmt.Errorf("zmqsub: replay timeout %v and message limit %d must not be negative", config.ReplayTimeout, config.MaxMessageBytes)
	}

	// The lock is held throughout, so that Close cannot end the context meanwhile; nothing here waits.
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if config.ReplayEndpoint != "" {
		// The socket for a replay is made when it is needed; a wrong endpoint should be known now.
		probe, err := h.connect(zmq.DEALER, config.ReplayEndpoint, &config, nil)
		if err != nil {
			return nil, err
		}
		probe.close()
	}
	s := &Subscription{hub: h, config: config, handler: handler, sequence: sequence{replays: config.ReplayEndpoint != ""}}
	h.monitors++
	address := fmt.Sprintf("inproc://monitor-%d", h.monitors)
	var err error
	s.live, err = h.connect(zmq.SUB, config.Endpoint, &config, func(live *zmq.Socket) error {
		// Observed from before it connects, so that no change of state is missed.
		if err := live.Monitor(address, observedEvents); err != nil {
			return err
		}
		if s.monitor, err = newSource(h.ctx, zmq.PAIR); err != nil {
			return err
		}
		return errors.Join(s.monitor.socket.Connect(address), live.SetSubscribe(config.Topic))
	})
	if err != nil {
		if s.monitor != nil {
			s.monitor.close()
		}
		return nil, err
	}
	h.subscriptions[s] = true
	s.done.Go(s.receive)
	s.done.Go(s.observe)
	return s, nil
}

// Close ends the subscription, and returns when no callback will come any more. Only the first call has an effect.
func (s *Subscription) Close() {
	s.stop()
	s.done.Wait()
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	delete(s.hub.subscriptions, s)
}

// stop makes both goroutines end soon.
func (s *Subscription) stop() {
	s.closed.Store(true)
	s.live.wake()
	s.monitor.wake()
	s.replayMu.Lock()
	defer s.replayMu.Unlock()
	if s.replay != nil {
		s.replay.wake()
	}
}

// connect makes a socket with the options of every connection, lets prepare add to it, and connects it.
func (h *Hub) connect(kind zmq.Type, endpoint string, config *Config, prepare func(*zmq.Socket) error) (*source, error) {
	if err := checkEndpoint(endpoint); err != nil {
		return nil, err
	}
	src, err := newSource(h.ctx, kind)
	if err != nil {
		return nil, err
	}
	soc := src.socket
	err = errors.Join(
		soc.SetLinger(0),
		soc.SetIpv6(true),
		soc.SetRcvhwm(receiveHighWaterMark),
		soc.SetReconnectIvl(reconnectInterval),
		soc.SetReconnectIvlMax(reconnectIntervalMax),
		soc.SetHandshakeIvl(handshakeTimeout),
		soc.SetTcpKeepalive(1),
		soc.SetHeartbeatIvl(heartbeatInterval),
		soc.SetHeartbeatTimeout(heartbeatTimeout),
		soc.SetHeartbeatTtl(heartbeatTTL),
		soc.SetMaxmsgsize(config.MaxMessageBytes),
	)
	if err == nil && prepare != nil {
		err = prepare(soc)
	}
	if err != nil {
		src.close()
		return nil, fmt.Errorf("zmqsub: prepare a %v socket: %w", kind, err)
	}
	if err := soc.Connect(endpoint); err != nil {
		src.close()
		return nil, fmt.Errorf("zmqsub: connect to %q: %w", endpoint, err)
	}
	return src, nil
}

// checkEndpoint refuses what libzmq would take without a word but never connect.
func checkEndpoint(endpoint string) error {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	switch {
	case endpoint == "":
		return errors.New("zmqsub: no endpoint")
	case strings.IndexByte(endpoint, 0) >= 0:
		return fmt.Errorf("zmqsub: endpoint %q contains a zero byte", endpoint)
	case !isTCP:
		return nil
	case strings.HasPrefix(address, "*"):
		return fmt.Errorf("zmqsub: %q is an address to bind; connecting needs the publisher's host", endpoint)
	}
	port := address[strings.LastIndexByte(address, ':')+1:]
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("zmqsub: endpoint %q must end in a port from 1 to 65535", endpoint)
	}
	return nil
}
