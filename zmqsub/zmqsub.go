// Package zmqsub subscribes to one ZMQ publisher. It delivers the publisher's messages in order and reports those that
// are lost.
//
// It owns the sockets, reconnecting, the numbering of messages (gaps and restarts of the publisher), and the replay of
// missed messages, for publishers that speak vLLM's KV-event protocol: frames topic, number, payload. It never reads a
// payload and never guesses: it reports every message that it could not recover.
//
// An epoch of a publisher lasts from one of its starts to the next. Numbers begin again with each epoch.
//
// Concurrency: everything is safe for concurrent use. A subscription calls its [Handler] from one goroutine at a time.
// Thousands of subscriptions share a few OS threads, because each waits through Go's network poller, not in a thread.
//
// libzmq speaks the protocol with a publisher: handshake, subscription, requests, heartbeats. The publisher's messages
// do not pass libzmq, which would hold a message of any size. They wait in zmqsub, which bounds the frames and bytes of
// a message and the bytes that wait (relay.go).
//
// It needs libzmq, version 4.2 or later.
package zmqsub

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// ErrClosed means that the hub was closed.
var ErrClosed = errors.New("zmqsub: the hub is closed")

// Handler receives the events of one subscription. The subscription calls its methods one at a time, and none after
// Close of the subscription returned. They must not call Close. While one runs, messages wait.
type Handler interface {
	// Message delivers a message. Within an epoch seq only grows, and grows by one except after Gap. topic and payload
	// are valid during the call only; topic is nil if a replay does not contain it.
	Message(seq uint64, topic, payload []byte)

	// Gap reports that the messages expected to got-1 are lost. The next call is Message with seq got.
	Gap(expected, got uint64)

	// Restart reports a new epoch: the publisher restarted, it repeated a number, or the connection ended and no replay
	// can show, or has shown on the next one, that the publisher is the same. Later messages are unrelated to those
	// delivered before.
	Restart()

	// Replayed reports the outcome of a request for past messages, after the Message calls for them.
	Replayed(outcome Replay, messages int)

	// Malformed reports a message that breaks the protocol. It was ignored.
	Malformed(err error)

	// Cut reports that zmqsub ended the connection because the publisher exceeded a bound; err says which. Waiting
	// messages are lost, and the next message begins a new epoch, without a call of Restart. Cut follows Disconnected.
	// zmqsub connects again after a pause.
	Cut(err error)

	// Connected and Disconnected follow the connection and alternate, Connected first. The messages of a connection
	// come between them, except those that a Cut loses.
	Connected()
	Disconnected()
}

// Config describes a subscription.
type Config struct {
	// Endpoint is the publisher's address, as libzmq writes it: "tcp://10.0.0.7:5557", "tcp://[fd00::7]:5557".
	Endpoint string

	// ReplayEndpoint is the address where the publisher answers requests for past messages. zmqsub asks on each connect
	// and on each gap. Empty: there is none, and every gap is reported.
	ReplayEndpoint string

	// Topic is the prefix of the wanted topics. Empty: all.
	Topic string

	// Publisher is the id that messages have between topic and number, if the protocol has such a frame (Dynamo's event
	// plane: 8 bytes, big-endian). A message with another id is Malformed: another publisher has the address now.
	// Empty: messages have no such frame.
	Publisher []byte

	// Many says that several publishers send over the address, whose ids of 8 bytes messages have in the place of
	// Publisher. zmqsub then delivers all messages without a look at their numbers, with the publisher's id as topic.
	// It calls neither Gap nor Restart.
	Many bool

	// ReplayTimeout bounds one replay. After it, the messages that are still missing are reported as a gap. 0 means 10
	// seconds.
	ReplayTimeout time.Duration

	// MaxMessageBytes bounds a message, its frames together. If a publisher sends a longer one, zmqsub ends the
	// connection; see Handler.Cut. 0 means 16 MiB, the greatest value.
	MaxMessageBytes int64

	// Hold, if not nil, delays messages and reports about them until it is closed. Connected and Disconnected are
	// called meanwhile.
	Hold <-chan struct{}
}

const (
	defaultReplayTimeout = 10 * time.Second

	ioThreads = 2

	// descriptorsEach is the number of file descriptors of a connection: that to the peer, the two ends of the relay's
	// to libzmq, and one for the socket's signals. A replay needs as many; at most maxReplays run at once.
	descriptorsEach = 4
	maxReplays      = 128
	// The rest of the process (its listeners' connections and files) keeps an eighth of all descriptors, but at least
	// minOtherDescriptors and at most maxOtherDescriptors.
	minOtherDescriptors = 256
	maxOtherDescriptors = 8192

	// MaxSubscriptions is the number of subscriptions for which libzmq has sockets.
	MaxSubscriptions = 21_760
)

// timing holds the durations for which libzmq and this package wait.
type timing struct {
	// connect is how long a connection may take; reconnect the pause before the next one, which doubles up to
	// reconnectMax while none comes about.
	connect, reconnect, reconnectMax time.Duration

	// handshake is how long a peer may take to show that it is a ZMQ socket.
	handshake time.Duration

	// A connection ends on which nothing came for heartbeatTimeout: the peer may be gone without closing it.
	heartbeat, heartbeatTimeout time.Duration

	// replayConnect is how long a replay socket may take to connect; replayIdle how long the next message of a response
	// may take; replayPause how long zmqsub waits after the first failure.
	replayConnect, replayIdle, replayPause time.Duration

	// secondReplay is how long after a connection zmqsub asks once more. A message that was sent after the first
	// replay, and before the subscription reached the publisher, would otherwise stay missing until the next one comes.
	secondReplay time.Duration

	// cutPause is how long zmqsub waits before it connects again to a publisher that exceeded a bound. The pause
	// doubles each time, up to cutPauseMax. A connection that lasts longer than cutPauseMax resets it.
	cutPause, cutPauseMax time.Duration

	// emptyReplayCost is what a replay without messages adds to the debt; see chargeReplay.
	emptyReplayCost time.Duration

	// catchUp is how long a message may still come on the live connection after a replay delivered it.
	catchUp time.Duration
}

// Most values are the options that dynamo-kv-router 1.6.1 sets on its subscriptions.
var defaultTiming = timing{
	connect: 5 * time.Second, reconnect: 100 * time.Millisecond, reconnectMax: 5 * time.Second,
	handshake: 5 * time.Second,
	heartbeat: 5 * time.Second, heartbeatTimeout: 15 * time.Second,
	replayConnect: time.Second, replayIdle: 500 * time.Millisecond, replayPause: 30 * time.Second,
	secondReplay: time.Second, emptyReplayCost: time.Second, catchUp: 10 * time.Second,
	cutPause: time.Second, cutPauseMax: time.Minute,
}

// Hub holds what all subscriptions share: one libzmq context with its I/O threads. Create it with [NewHub].
type Hub struct {
	ctx     *zmq.Context
	timing  timing
	replays chan struct{} // a token for each replay that runs
	room    int           // number of subscriptions that fit the limits of this process
	waiting atomic.Int64  // bytes in the queues of all relays
	calls   sync.Mutex    // held while sockets open and close: each such call of libzmq at once takes an OS thread

	mu            sync.Mutex // guards what follows
	closed        bool
	subscriptions map[*Subscription]bool
}

// NewHub returns a hub without subscriptions. Close it to release its threads.
func NewHub() (*Hub, error) {
	ctx, err := newContext(ioThreads, MaxSubscriptions+maxReplays)
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new context: %w", err)
	}
	h := &Hub{
		ctx:           ctx,
		timing:        defaultTiming,
		replays:       make(chan struct{}, maxReplays),
		subscriptions: map[*Subscription]bool{},
	}
	if h.room, err = room(); err != nil {
		return nil, fmt.Errorf("zmqsub: new hub: %w", errors.Join(err, ctx.Term()))
	}
	return h, nil
}

// room returns the number of subscriptions that fit this process. The Go runtime has already raised the soft limit on
// file descriptors to the hard limit.
func room() (int, error) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	files := int64(min(limit.Cur, math.MaxInt32))
	others := max(minOtherDescriptors, min(files/8, maxOtherDescriptors))
	return int(min((files-others-descriptorsEach*maxReplays)/descriptorsEach, MaxSubscriptions)), nil
}

// Room returns an error if n subscriptions do not fit the limits of this process. The error says how many file
// descriptors they need.
func (h *Hub) Room(n int) error {
	if n <= h.room {
		return nil
	}
	if n > MaxSubscriptions {
		return fmt.Errorf("zmqsub: %d subscriptions are too many: libzmq has sockets for %d", n, MaxSubscriptions)
	}
	return fmt.Errorf(
		"zmqsub: %d subscriptions need %d file descriptors, and this process may have enough for %d: raise its limit "+
			"(ulimit -n, LimitNOFILE= of systemd, the container's nofile limit)", n, Descriptors(n), max(h.room, 0))
}

// Descriptors returns the number of file descriptors that a process with n subscriptions needs, with those for
// listeners, connections and files.
func Descriptors(n int) int {
	subscribed := (n + maxReplays) * descriptorsEach
	// The others have an eighth of both together.
	return subscribed + max(minOtherDescriptors, min((subscribed+6)/7, maxOtherDescriptors))
}

// Close closes all subscriptions. After it returned, no handler is called.
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
		s.end()
	}
	for s := range subscriptions {
		<-s.done
	}
	return h.ctx.Term()
}

// Subscription is one running subscription.
type Subscription struct {
	hub     *Hub
	config  Config
	handler Handler

	stop context.Context    // ends run
	end  context.CancelFunc // of stop
	done chan struct{}      // closed when run has ended

	// Only run's goroutine uses the fields below.
	live          *source       // the SUB socket of the latest connection
	cutPause      time.Duration // the pause after the next cut
	sequence      sequence
	noReplayUntil time.Time
	pause         time.Duration // the pause after the next replay that fails
	replayed      time.Time     // when the latest replay ended
	replayDebt    time.Duration // see chargeReplay
	again         *time.Timer   // fires when the next replay is due
}

// Subscribe starts a subscription and returns at once. The publisher need not run yet, and may come and go.
//
// Errors: ErrClosed; an endpoint that is not an address to connect to; a limit of config that is out of range; that of
// [Hub.Room].
func (h *Hub) Subscribe(config Config, handler Handler) (*Subscription, error) {
	if config.ReplayTimeout == 0 {
		config.ReplayTimeout = defaultReplayTimeout
	}
	if config.MaxMessageBytes == 0 {
		config.MaxMessageBytes = maxMessageBytes
	}
	if config.ReplayTimeout < 0 || config.MaxMessageBytes < 0 {
		return nil, fmt.Errorf("zmqsub: replay timeout %v or message limit %d is negative; use 0 for the default",
			config.ReplayTimeout, config.MaxMessageBytes)
	}

	if config.MaxMessageBytes > maxMessageBytes {
		return nil, fmt.Errorf("zmqsub: message limit %d must not be above %d", config.MaxMessageBytes, maxMessageBytes)
	}

	_, _, err := dialable(config.Endpoint)
	if config.ReplayEndpoint != "" && err == nil {
		_, _, err = dialable(config.ReplayEndpoint)
	}
	if err != nil {
		return nil, err
	}

	// The lock is held to the end, so that Close cannot end the context meanwhile. Nothing here waits.
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if err := h.Room(len(h.subscriptions) + 1); err != nil {
		return nil, err
	}
	s := &Subscription{hub: h, config: config, handler: handler, done: make(chan struct{}),
		sequence: sequence{replays: config.ReplayEndpoint != ""}}
	s.stop, s.end = context.WithCancel(context.Background())
	s.pause, s.cutPause = h.timing.replayPause, h.timing.cutPause
	s.again = time.NewTimer(time.Hour)
	s.again.Stop()
	h.subscriptions[s] = true
	go func() {
		defer close(s.done)
		s.run()
	}()
	return s, nil
}

// Close ends the subscription. After it returned, its handler is not called. Only the first call has an effect.
func (s *Subscription) Close() {
	s.end()
	<-s.done
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	delete(s.hub.subscriptions, s)
}
