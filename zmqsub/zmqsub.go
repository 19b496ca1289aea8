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
// The memory that a publisher can make libzmq hold is bounded: the frames and bytes of a message, and the bytes that
// wait (guard.c). If a publisher exceeds a bound, zmqsub ends the connection.
//
// It needs libzmq, version 4.2 or later.
package zmqsub

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// ErrClosed means that the hub was closed.
var ErrClosed = errors.New("zmqsub: the hub is closed")

// Handler receives the events of one subscription. The subscription calls its methods one at a time, and none after
// Close of the subscription returned. They must not call Close. While one runs, messages wait in the socket's queue.
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

	// Connected and Disconnected follow the connection and alternate, Connected first. They come from observing the
	// socket, so messages of a connection may come after its Disconnected.
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

	// ReplayTimeout bounds one replay. After it, the messages that are still missing are reported as a gap. 0 means 10
	// seconds.
	ReplayTimeout time.Duration

	// MaxMessageBytes bounds one frame. If a publisher sends a longer one, zmqsub drops the connection and connects
	// again. 0 means 16 MiB, the greatest value; a message of several frames has that bound in any case.
	MaxMessageBytes int64

	// Hold, if not nil, delays messages and reports about them until it is closed. Connected and Disconnected are
	// called meanwhile.
	Hold <-chan struct{}
}

const (
	defaultReplayTimeout = 10 * time.Second

	// A subscription needs at most four sockets: its own, the two ends of its monitor, and one for a replay. libzmq
	// allocates eight bytes for each possible socket.
	maxSockets = 1 << 16

	ioThreads = 2

	// descriptorsEach is the number of file descriptors of a subscription: one for the signals of each of its three
	// sockets, and its connection. A replay needs two more; at most maxReplays run at once.
	descriptorsEach = 4
	maxReplays      = 256
	// The rest of the process (its listeners' connections and files) keeps an eighth of all descriptors, but at least
	// minOtherDescriptors and at most maxOtherDescriptors.
	minOtherDescriptors = 256
	maxOtherDescriptors = 8192

	// MaxSubscriptions is the number of subscriptions for which libzmq has sockets.
	MaxSubscriptions = (maxSockets - maxReplays) / 3
)

// timing holds the durations for which libzmq and this package wait, and the length of the receive queue.
type timing struct {
	// highWaterMark is the length of the queue in messages, a power of two. If it is full, libzmq stops reading, and
	// the publisher may drop messages.
	highWaterMark int

	connect, reconnect, reconnectMax time.Duration

	// handshake is how long a peer may take to show that it is a ZMQ socket.
	handshake time.Duration

	// libzmq drops a connection on which nothing came for heartbeatTimeout: the peer may be gone without closing it.
	heartbeat, heartbeatTimeout time.Duration

	// revive is how long libzmq may take, after the end of a connection, to report that it will try again. It reports
	// that at once or never: after a protocol error, such as a frame that is too long or a peer that is no ZMQ socket,
	// it gives up the endpoint, and zmqsub must connect again.
	revive time.Duration

	// replayConnect is how long a replay socket may take to connect; replayIdle how long the next message of an answer
	// may take; replayPause how long zmqsub waits after the first failure.
	replayConnect, replayIdle, replayPause time.Duration

	// secondReplay is how long after a connection zmqsub asks once more. A message that was sent after the first
	// replay, and before the subscription reached the publisher, would otherwise stay missing until the next one comes.
	secondReplay time.Duration

	// cutPause is how long zmqsub waits before it connects again to a publisher that exceeded a bound. The pause
	// doubles each time, up to cutPauseMax. A connection that lasts longer than cutPauseMax resets it.
	cutPause, cutPauseMax time.Duration

	// watch is how often zmqsub checks the bytes that wait while it does not receive.
	watch time.Duration

	// emptyReplayCost is what a replay without messages adds to the debt; see chargeReplay.
	emptyReplayCost time.Duration

	// catchUp is how long a message may still come on the live connection after a replay delivered it.
	catchUp time.Duration

	// trim is how often free memory goes back to the system. Thousands of queues that were long at once, as when all
	// publishers replay, leave a quarter of the process's memory unused.
	trim time.Duration
}

// Most values are the options that dynamo-kv-router 1.6.1 sets on its subscriptions.
var defaultTiming = timing{
	highWaterMark: 1 << 17,
	connect:       5 * time.Second, reconnect: 100 * time.Millisecond, reconnectMax: 5 * time.Second,
	handshake: 5 * time.Second,
	heartbeat: 5 * time.Second, heartbeatTimeout: 15 * time.Second,
	revive:        2 * time.Second,
	replayConnect: time.Second, replayIdle: 500 * time.Millisecond, replayPause: 30 * time.Second,
	secondReplay: time.Second, emptyReplayCost: time.Second, catchUp: 10 * time.Second,
	cutPause: time.Second, cutPauseMax: time.Minute,
	watch: 20 * time.Millisecond,
	trim:  time.Minute,
}

// Hub holds what all subscriptions share: one libzmq context with its I/O threads. Create it with [NewHub].
type Hub struct {
	ctx     *zmq.Context
	poller  *poller
	timing  timing
	replays chan struct{} // a token for each replay that runs
	room    int           // number of subscriptions that fit the limits of this process
	ended   chan struct{} // closed by Close

	mu            sync.Mutex // guards what follows
	closed        bool
	subscriptions map[*Subscription]bool
	monitors      uint64 // number of monitors so far, for their names
}

// NewHub returns a hub without subscriptions. Close it to release its threads.
func NewHub() (*Hub, error) {
	ctx, err := newContext(ioThreads, maxSockets)
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new context: %w", err)
	}
	h := &Hub{
		ctx:           ctx,
		timing:        defaultTiming,
		replays:       make(chan struct{}, maxReplays),
		subscriptions: map[*Subscription]bool{},
		ended:         make(chan struct{}),
	}
	if h.poller, err = newPoller(); err == nil {
		h.room, err = room()
	}
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new hub: %w", errors.Join(err, ctx.Term()))
	}
	go h.trim()
	return h, nil
}

// trim returns free memory to the system periodically, until the hub is closed.
func (h *Hub) trim() {
	tick := time.NewTicker(h.timing.trim)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			trim()
		case <-h.ended:
			return
		}
	}
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
	return int(min((files-others-2*maxReplays)/descriptorsEach, MaxSubscriptions)), nil
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
			"(ulimit -n, LimitNOFILE= of systemd, the container's nofile limit)",
		n,
		Descriptors(n),
		max(h.room, 0),
	)
}

// Descriptors returns the number of file descriptors that a process with n subscriptions needs, with those for
// listeners, connections and files.
func Descriptors(n int) int {
	subscribed := n*descriptorsEach + 2*maxReplays
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
	close(h.ended)
	subscriptions := h.subscriptions
	h.subscriptions = nil
	h.mu.Unlock()
	for s := range subscriptions {
		s.end()
	}
	for s := range subscriptions {
		<-s.done
	}
	h.poller.close()
	return h.ctx.Term()
}

// Subscription is one running subscription.
type Subscription struct {
	hub     *Hub
	config  Config
	handler Handler

	stop chan struct{} // closed to end run
	once sync.Once     // closes stop
	done chan struct{} // closed when run has ended

	// Only run's goroutine uses the fields below.
	live          *source  // the SUB socket
	monitor       *source  // observes live
	unhandled     []change // events of the live connection that were read and not handled
	seenCut       uint64   // connections up to this number have no cut that was not seen
	connected     bool
	since         time.Time     // when the latest connection began
	cut           bool          // libzmq has no endpoint to connect to until revive fires
	cutPause      time.Duration // the pause after the next cut
	revive        *time.Timer   // runs until libzmq reports that it will try again
	sequence      sequence
	noReplayUntil time.Time
	pause         time.Duration // the pause after the next replay that fails
	replayed      time.Time     // when the latest replay ended
	replayDebt    time.Duration // see chargeReplay
	again         *time.Timer   // fires when the next replay is due
}

// Subscribe starts a subscription and returns at once. The publisher need not run yet, and may come and go.
//
// Errors: ErrClosed; an endpoint that libzmq cannot parse; a limit of config that is out of range; that of [Hub.Room].
func (h *Hub) Subscribe(config Config, handler Handler) (*Subscription, error) {
	if config.ReplayTimeout == 0 {
		config.ReplayTimeout = defaultReplayTimeout
	}
	if config.MaxMessageBytes == 0 {
		config.MaxMessageBytes = maxMessageBytes
	}
	if config.ReplayTimeout < 0 || config.MaxMessageBytes < 0 {
		return nil, fmt.Errorf(
			"zmqsub: replay timeout %v or message limit %d is negative; use 0 for the default",
			config.ReplayTimeout,
			config.MaxMessageBytes,
		)
	}

	if config.MaxMessageBytes > maxMessageBytes {
		return nil, fmt.Errorf("zmqsub: message limit %d must not be above %d", config.MaxMessageBytes, maxMessageBytes)
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
	if config.ReplayEndpoint != "" {
		// Each replay creates its own socket. Connect once now, to report a wrong endpoint early.
		probe, err := h.connect(zmq.DEALER, config.ReplayEndpoint, &config, (*source).onlyConnected)
		if err != nil {
			return nil, err
		}
		probe.close()
	}
	s := &Subscription{hub: h, config: config, handler: handler, stop: make(chan struct{}), done: make(chan struct{}),
		sequence: sequence{replays: config.ReplayEndpoint != ""}, seenCut: connections()}
	h.monitors++
	address := fmt.Sprintf("inproc://monitor-%d", h.monitors)
	var err error
	s.live, err = h.connect(zmq.SUB, config.Endpoint, &config, func(live *source) error {
		// The observation begins before the connection, so that no change of state is missed.
		if err := live.Monitor(address, observedEvents); err != nil {
			return err
		}
		if s.monitor, err = h.newSource(zmq.PAIR); err != nil {
			return err
		}
		return errors.Join(s.monitor.Connect(address), live.SetSubscribe(config.Topic))
	})
	if err != nil {
		if s.monitor != nil {
			s.monitor.close()
		}
		return nil, err
	}
	s.pause, s.cutPause = h.timing.replayPause, h.timing.cutPause
	s.revive, s.again = time.NewTimer(time.Hour), time.NewTimer(time.Hour)
	s.revive.Stop()
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

// end asks run to end.
func (s *Subscription) end() { s.once.Do(func() { close(s.stop) }) }

// connect creates a socket with the shared options, calls prepare for it, and connects it.
func (h *Hub) connect(kind zmq.Type, endpoint string, config *Config, prepare func(*source) error) (*source, error) {
	if err := checkEndpoint(endpoint); err != nil {
		return nil, err
	}
	src, err := h.newSource(kind)
	if err != nil {
		return nil, err
	}
	if err = src.configure(config, &h.timing); err == nil {
		err = prepare(src)
	}
	if err != nil {
		src.close()
		return nil, fmt.Errorf("zmqsub: prepare a %v socket: %w", kind, err)
	}
	src.countForEndpoint(endpoint)
	if err := src.Connect(endpoint); err != nil {
		src.close()
		return nil, fmt.Errorf("zmqsub: connect to %q: %w", endpoint, err)
	}
	return src, nil
}

// checkEndpoint rejects endpoints that libzmq would accept without an error but never connect to.
func checkEndpoint(endpoint string) error {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	switch {
	case endpoint == "":
		return errors.New("zmqsub: the endpoint is empty; want one such as tcp://10.0.0.7:5557")
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
