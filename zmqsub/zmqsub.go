// Package zmqsub subscribes to one ZMQ publisher and says what arrived, in order, and what did not.
//
// It owns the sockets, the reconnecting, the numbering of messages (gaps and restarts of the publisher), and the replay
// of what was missed, for publishers that speak vLLM's KV-event protocol: frames topic, number, payload. It never looks
// into a payload, and never guesses: what it could not recover it reports.
//
// Concurrency: everything is safe for concurrent use. A subscription calls its [Handler] from one goroutine at a time;
// thousands of subscriptions share a few OS threads, because each waits through Go's network poller, not in a thread.
//
// What a publisher can make libzmq hold is bounded: the frames and bytes of a message, and the bytes that wait
// (guard.c). Beyond, its connection is ended.
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

	// Restart says that the publisher began anew, repeats itself, or may be another, because the connection was made
	// anew and no replay showed that it is the same: whatever follows has nothing to do with what was delivered before.
	Restart()

	// Replayed says how asking for past messages went, and how many came. It follows their Message calls.
	Replayed(outcome Replay, messages int)

	// Malformed says that something arrived that is not in the protocol, and was ignored.
	Malformed(err error)

	// Cut says that the connection was ended because what came on it is beyond a bound; err says which. What waited is
	// lost, and the next message begins anew, as after Restart. It follows Disconnected, and the connection is made
	// again after a pause.
	Cut(err error)

	// Connected and Disconnected follow the connection and alternate, Connected first. They come from observing the
	// socket, so that messages of a connection may come after its Disconnected.
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

	// Publisher is the id that messages name between topic and number, where the protocol has such a frame (Dynamo's
	// event plane: 8 bytes, big-endian). Messages of another publisher are Malformed: its address went to somebody
	// else. Empty: messages have no such frame.
	Publisher []byte

	// ReplayTimeout bounds one replay; then what is still missing is reported as a gap. 0 means 10 seconds.
	ReplayTimeout time.Duration

	// MaxMessageBytes bounds one frame; the connection to a publisher that sends a longer one is dropped and made anew.
	// 0 means 16 MiB, which bounds a message of several frames too, and is the greatest value.
	MaxMessageBytes int64

	// Hold, if not nil, holds messages and reports about them until it is closed; Connected and Disconnected are told
	// meanwhile.
	Hold <-chan struct{}
}

const (
	defaultReplayTimeout = 10 * time.Second

	// A subscription needs four sockets at most: its own, the two ends of its monitor, and one for a replay. libzmq
	// allots eight bytes for each that there may be.
	maxSockets = 1 << 16

	ioThreads = 2

	// descriptorsEach is how many file descriptors a subscription needs: one by which each of its three sockets
	// signals, and its connection. A replay, which only maxReplays may run at once, needs two more.
	descriptorsEach = 4
	maxReplays      = 256
	// descriptorsElse is the least that is left for the rest of the process: its listeners' connections, which have a
	// share of what there is, and files. Where there are many it is an eighth of all, at most descriptorsElseMost.
	descriptorsElse     = 256
	descriptorsElseMost = 8192
)

// timing is how long libzmq and this package wait, and how much may wait.
type timing struct {
	// messages in the queue, a power of two; beyond, libzmq leaves them with the publisher, which may drop some
	highWaterMark int

	connect, reconnect, reconnectMax time.Duration

	// handshake is how long a peer may take to show that it is a ZMQ socket.
	handshake time.Duration

	// A connection without a sign of life for heartbeatTimeout is given up: the peer may have vanished without a word.
	heartbeat, heartbeatTimeout time.Duration

	// revive is how long after the end of a connection libzmq has to say that it will try again. It says so at once, or
	// never: after a protocol error, such as a frame that is too long or a peer that is no ZMQ socket at all, it gives
	// the endpoint up, and the connection must be made anew.
	revive time.Duration

	// replayConnect is how long a replay socket has to be connected; replayIdle how long the next message of an answer
	// may take; replayPause how long one that failed is left alone, at first.
	replayConnect, replayIdle, replayPause time.Duration

	// lookAgain is how long after a connection the publisher is asked once more: a message that it sent after the first
	// replay, and before the subscription reached it, would not be missed before the next one comes.
	lookAgain time.Duration

	// cutPause is how long a publisher that was cut off is left alone; twice as long each time, up to cutPauseMax. A
	// connection that lasts longer than that begins anew.
	cutPause, cutPauseMax time.Duration

	// watch is how often what waits is looked at while nothing is received.
	watch time.Duration

	// replayAgain is what a replay that brought nothing adds to the debt, see chargeReplay.
	replayAgain time.Duration

	// catchUp is how long messages may be on their way to the live connection after a replay brought them.
	catchUp time.Duration

	// trim is how often memory goes back to the system: thousands of queues that were long at once, as when all
	// publishers replay, leave a quarter of the process's memory unused.
	trim time.Duration
}

// Source of most: the options that dynamo-kv-router 1.6.1 sets on its subscriptions.
var defaultTiming = timing{
	highWaterMark: 1 << 17,
	connect:       5 * time.Second, reconnect: 100 * time.Millisecond, reconnectMax: 5 * time.Second,
	handshake: 5 * time.Second,
	heartbeat: 5 * time.Second, heartbeatTimeout: 15 * time.Second,
	revive:        2 * time.Second,
	replayConnect: time.Second, replayIdle: 500 * time.Millisecond, replayPause: 30 * time.Second,
	lookAgain: time.Second, replayAgain: time.Second, catchUp: 10 * time.Second,
	cutPause: time.Second, cutPauseMax: time.Minute,
	watch: 20 * time.Millisecond,
	trim:  time.Minute,
}

// Hub is what subscriptions share: one libzmq context with its I/O threads. Make one with [NewHub].
type Hub struct {
	ctx     *zmq.Context
	poller  *poller
	timing  timing
	replays chan struct{} // a token for each replay that runs
	room    int           // how many subscriptions fit the limits of this process
	ended   chan struct{} // closed by Close

	mu            sync.Mutex // guards what follows
	closed        bool
	subscriptions map[*Subscription]bool
	monitors      uint64 // names given to monitors
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

// trim trims memory again and again until the hub is closed.
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

// room returns how many subscriptions fit this process. Go has raised the limit on its descriptors as far as it may.
func room() (int, error) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	files := int64(min(limit.Cur, math.MaxInt32))
	others := max(descriptorsElse, min(files/8, descriptorsElseMost))
	return int(min((files-others-2*maxReplays)/descriptorsEach, (maxSockets-maxReplays)/3)), nil
}

// Room returns an error if n subscriptions do not fit the limits of this process; it says how many descriptors are
// needed.
func (h *Hub) Room(n int) error {
	if n <= h.room {
		return nil
	}
	if n > (maxSockets-maxReplays)/3 {
		return fmt.Errorf(
			"zmqsub: %d subscriptions are more than libzmq has sockets for, %d",
			n,
			(maxSockets-maxReplays)/3,
		)
	}
	subscribed := n*descriptorsEach + 2*maxReplays
	others := max(descriptorsElse, min((subscribed+6)/7, descriptorsElseMost)) // an eighth of both together
	return fmt.Errorf(
		"zmqsub: %d subscriptions need %d file descriptors, and this process may have enough for %d: raise its limit "+
			"(ulimit -n, LimitNOFILE= of systemd, the container's nofile limit)",
		n,
		subscribed+others,
		max(h.room, 0),
	)
}

// Close closes all subscriptions, and returns when no callback will come any more.
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

	stop chan struct{} // closed to make run end
	once sync.Once     // of closing stop
	done chan struct{} // closed when run has ended

	// The rest is run's.
	live          *source    // the SUB socket
	monitor       *source    // observes live
	unhandled     []change   // events of the live connection that were read and not handled
	latest        connection // of which an event was read
	seenCut       uint64     // number of the latest connection whose cut was seen, or a lesser one
	connected     bool
	since         time.Time     // of the latest connection
	cut           bool          // libzmq has no endpoint to connect to, until revive
	cutPause      time.Duration // after the next cut
	revive        *time.Timer   // runs while libzmq has not said that it will try again
	sequence      sequence
	noReplayUntil time.Time
	pause         time.Duration // after the next replay that fails
	replayed      time.Time     // when the latest replay ended
	replayDebt    time.Duration // see chargeReplay
	again         *time.Timer   // a replay to come
}

// Subscribe starts a subscription. It returns at once; the publisher need not be there yet, and may come and go.
//
// Errors: ErrClosed; a description of an endpoint that libzmq cannot read; that of [Hub.Room].
func (h *Hub) Subscribe(config Config, handler Handler) (*Subscription, error) {
	if config.ReplayTimeout == 0 {
		config.ReplayTimeout = defaultReplayTimeout
	}
	if config.MaxMessageBytes == 0 {
		config.MaxMessageBytes = maxMessageBytes
	}
	if config.ReplayTimeout < 0 || config.MaxMessageBytes < 0 {
		return nil, fmt.Errorf(
			"zmqsub: replay timeout %v and message limit %d must not be negative",
			config.ReplayTimeout,
			config.MaxMessageBytes,
		)
	}

	if config.MaxMessageBytes > maxMessageBytes {
		return nil, fmt.Errorf("zmqsub: message limit %d must not be above %d", config.MaxMessageBytes, maxMessageBytes)
	}

	// The lock is held throughout, so that Close cannot end the context meanwhile; nothing here waits.
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if err := h.Room(len(h.subscriptions) + 1); err != nil {
		return nil, err
	}
	if config.ReplayEndpoint != "" {
		// The socket for a replay is made when it is needed; a wrong endpoint should be known now.
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
		// Observed from before it connects, so that no change of state is missed.
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
	s.revive, s.again, s.pause, s.cutPause = time.NewTimer(
		time.Hour,
	), time.NewTimer(
		time.Hour,
	), h.timing.replayPause, h.timing.cutPause
	s.revive.Stop()
	s.again.Stop()
	h.subscriptions[s] = true
	go func() {
		defer close(s.done)
		s.run()
	}()
	return s, nil
}

// Close ends the subscription, and returns when no callback will come any more. Only the first call has an effect.
func (s *Subscription) Close() {
	s.end()
	<-s.done
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	delete(s.hub.subscriptions, s)
}

// end makes run end soon.
func (s *Subscription) end() { s.once.Do(func() { close(s.stop) }) }

// connect makes a socket with the options of every connection, lets prepare add to it, and connects it.
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
	if err := src.Connect(endpoint); err != nil {
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
