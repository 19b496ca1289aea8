package zmqsub

/*
#cgo pkg-config: libzmq
#cgo noescape zmqsub_receive
#cgo nocallback zmqsub_receive
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>

// How many frames of a message are kept (no message in the protocols has more than four), and how many messages one call
// takes from a socket.
enum { ZMQSUB_FRAMES = 5, ZMQSUB_MESSAGES = 8 };

typedef struct {
	void *data;
	size_t size;
} zmqsub_frame;

typedef struct {
	int frames; // at most ZMQSUB_FRAMES; those beyond are dropped
	zmqsub_frame frame[ZMQSUB_FRAMES];
	zmq_msg_t msg[ZMQSUB_FRAMES];
} zmqsub_message;

typedef struct {
	int messages;
	zmqsub_message message[ZMQSUB_MESSAGES];
} zmqsub_batch;

static void zmqsub_release(zmqsub_message *m) {
	for (int i = 0; i < m->frames; i++)
		zmq_msg_close(&m->msg[i]);
	m->frames = 0;
}

// Lets go of what b holds and takes from the socket what is there, as far as b goes. Returns 0, or the error number when
// nothing was taken. One crossing between Go and C for up to 8 messages, and no copy of their bytes, are what this file
// is for: through a binding that crosses for each frame and copies it, receiving costs twice the CPU.
static int zmqsub_receive(void *socket, zmqsub_batch *b) {
	for (int i = 0; i < b->messages; i++)
		zmqsub_release(&b->message[i]);
	b->messages = 0;
	while (b->messages < ZMQSUB_MESSAGES) {
		zmqsub_message *m = &b->message[b->messages];
		int more = 1;
		m->frames = 0;
		while (more) {
			zmq_msg_t surplus;
			int keep = m->frames < ZMQSUB_FRAMES;
			zmq_msg_t *msg = keep ? &m->msg[m->frames] : &surplus;
			zmq_msg_init(msg);
			int error;
			do // a signal must not look like the end of what is there
				error = zmq_msg_recv(msg, socket, ZMQ_DONTWAIT) < 0 ? zmq_errno() : 0;
			while (error == EINTR);
			if (error) {
				zmq_msg_close(msg);
				zmqsub_release(m); // the frames of a message arrive together: only the first can be missing
				return b->messages > 0 ? 0 : error;
			}
			more = zmq_msg_more(msg);
			if (keep) {
				m->frame[m->frames].data = zmq_msg_data(msg);
				m->frame[m->frames].size = zmq_msg_size(msg);
				m->frames++;
			} else {
				zmq_msg_close(msg);
			}
		}
		b->messages++;
	}
	return 0;
}

static void zmqsub_free(zmqsub_batch *b) {
	if (!b)
		return;
	for (int i = 0; i < b->messages; i++)
		zmqsub_release(&b->message[i]);
	free(b);
}

// These return 0 or the error number, which Go would otherwise read in another call. Each is called again when a signal
// interrupted it before it did anything: Go's scheduler sends signals all the time.
#define ZMQSUB_DO(call) int error; do error = (call) < 0 ? zmq_errno() : 0; while (error == EINTR); return error

static int zmqsub_set_int(void *s, int option, int value) { ZMQSUB_DO(zmq_setsockopt(s, option, &value, sizeof value)); }
static int zmqsub_set_int64(void *s, int option, int64_t value) { ZMQSUB_DO(zmq_setsockopt(s, option, &value, sizeof value)); }
static int zmqsub_set_bytes(void *s, int option, const void *p, size_t n) { ZMQSUB_DO(zmq_setsockopt(s, option, p, n)); }
static int zmqsub_fd(void *s, int *fd) { size_t n = sizeof *fd; ZMQSUB_DO(zmq_getsockopt(s, ZMQ_FD, fd, &n)); }
static int zmqsub_connect(void *s, const char *endpoint) { ZMQSUB_DO(zmq_connect(s, endpoint)); }
static int zmqsub_disconnect(void *s, const char *endpoint) { ZMQSUB_DO(zmq_disconnect(s, endpoint)); }
static int zmqsub_monitor(void *s, const char *endpoint, int events) { ZMQSUB_DO(zmq_socket_monitor(s, endpoint, events)); }
static int zmqsub_send(void *s, const void *p, size_t n, int flags) { ZMQSUB_DO(zmq_send(s, p, n, flags | ZMQ_DONTWAIT)); }
static void *zmqsub_socket(void *ctx, int kind, int *error) { void *s = zmq_socket(ctx, kind); *error = s ? 0 : zmq_errno(); return s; }

// An empty frame and one more, at once or not at all: a socket that is ready for the first is ready for both.
static int zmqsub_request(void *s, const void *p, size_t n) {
	int error = zmqsub_send(s, "", 0, ZMQ_SNDMORE);
	return error ? error : zmqsub_send(s, p, n, 0);
}
*/
import "C"

import (
	"errors"
	"syscall"
	"time"
	"unsafe"
)

// maxFrames is how many frames of a message are kept.
const maxFrames = C.ZMQSUB_FRAMES

type socketKind C.int

const (
	kindSub    socketKind = C.ZMQ_SUB
	kindPair   socketKind = C.ZMQ_PAIR
	kindDealer socketKind = C.ZMQ_DEALER
)

func (k socketKind) String() string {
	return map[socketKind]string{kindSub: "SUB", kindPair: "PAIR", kindDealer: "DEALER"}[k]
}

// The events of a connection that a monitor tells.
const (
	eventConnected          = C.ZMQ_EVENT_CONNECTED
	eventConnectRetried     = C.ZMQ_EVENT_CONNECT_RETRIED
	eventHandshakeSucceeded = C.ZMQ_EVENT_HANDSHAKE_SUCCEEDED

	// observedEvents are those that tell the state of a connection, and whether libzmq goes on trying.
	observedEvents = eventConnected | eventConnectRetried | C.ZMQ_EVENT_DISCONNECTED | eventHandshakeSucceeded |
		C.ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | C.ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | C.ZMQ_EVENT_HANDSHAKE_FAILED_AUTH
)

// failure turns libzmq's error number into an error, nil for 0.
func failure(number C.int) error {
	switch number {
	case 0:
		return nil
	case C.EAGAIN:
		return syscall.EAGAIN
	}
	return errors.New(C.GoString(C.zmq_strerror(number)))
}

// zmqContext is libzmq's context: its I/O threads and sockets.
type zmqContext struct{ p unsafe.Pointer }

func newContext(threads, sockets int) (*zmqContext, error) {
	p, err := C.zmq_ctx_new()
	if p == nil {
		return nil, err
	}
	for option, value := range map[C.int]C.int{C.ZMQ_IO_THREADS: C.int(threads), C.ZMQ_MAX_SOCKETS: C.int(sockets), C.ZMQ_BLOCKY: 0} {
		if C.zmq_ctx_set(p, option, value) != 0 {
			err := failure(C.zmq_errno())
			C.zmq_ctx_term(p)
			return nil, err
		}
	}
	return &zmqContext{p}, nil
}

// term waits for the sockets to be closed.
func (c *zmqContext) term() error {
	for {
		n, err := C.zmq_ctx_term(c.p)
		if n == 0 {
			return nil
		}
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// socket is one of libzmq's. One goroutine at a time may use it; it may move between OS threads as long as a full memory
// barrier lies in between, which a goroutine's move between threads is.
type socket struct {
	p     unsafe.Pointer
	batch *C.zmqsub_batch // made when the first message is received
	next  int             // the next message of batch to give out
	view  [maxFrames][]byte
}

func newSocket(ctx *zmqContext, kind socketKind) (*socket, error) {
	var number C.int
	p := C.zmqsub_socket(ctx.p, C.int(kind), &number)
	if p == nil {
		return nil, failure(number)
	}
	return &socket{p: p}, nil
}

func (s *socket) close() {
	C.zmqsub_free(s.batch)
	C.zmq_close(s.p)
}

// receive takes the next message off the queue without waiting; ok is false if there is none. Frames beyond maxFrames are
// dropped. The frames are libzmq's memory, valid until the next call.
func (s *socket) receive() (frames [][]byte, ok bool, err error) {
	if s.batch == nil {
		s.batch = (*C.zmqsub_batch)(C.calloc(1, C.sizeof_zmqsub_batch))
	}
	if s.next == int(s.batch.messages) {
		s.next = 0
		if number := C.zmqsub_receive(s.p, s.batch); number != 0 {
			if number == C.EAGAIN {
				return nil, false, nil
			}
			return nil, false, failure(number)
		}
	}
	m := &s.batch.message[s.next]
	s.next++
	n := int(m.frames)
	for i := range n {
		s.view[i] = unsafe.Slice((*byte)(m.frame[i].data), int(m.frame[i].size))
	}
	return s.view[:n], true, nil
}

// unmonitor ends the observation. While somebody observes, libzmq waits for them: an observer that is closed before stops the
// I/O thread for good.
func (s *socket) unmonitor() { _ = failure(C.zmqsub_monitor(s.p, nil, 0)) }

// buffered says whether the next message was taken off the queue already.
func (s *socket) buffered() bool { return s.batch != nil && s.next < int(s.batch.messages) }

// request sends an empty frame and p. The error is EAGAIN while there is no connection.
func (s *socket) request(p []byte) error {
	return failure(C.zmqsub_request(s.p, unsafe.Pointer(unsafe.SliceData(p)), C.size_t(len(p))))
}

func (s *socket) fd() (int, error) {
	var fd C.int
	err := failure(C.zmqsub_fd(s.p, &fd))
	return int(fd), err
}

func (s *socket) setInt(option C.int, value int) error {
	return failure(C.zmqsub_set_int(s.p, option, C.int(value)))
}

func (s *socket) setMilliseconds(option C.int, d time.Duration) error {
	return s.setInt(option, int(d/time.Millisecond))
}

// subscribe asks for the topics with this prefix.
func (s *socket) subscribe(prefix string) error {
	return failure(C.zmqsub_set_bytes(s.p, C.ZMQ_SUBSCRIBE, unsafe.Pointer(unsafe.StringData(prefix)), C.size_t(len(prefix))))
}

// configure sets the options of every connection.
func (s *socket) configure(c *Config, t *timing) error {
	return errors.Join(
		s.setInt(C.ZMQ_LINGER, 0),
		s.setInt(C.ZMQ_IPV6, 1),
		s.setInt(C.ZMQ_RCVHWM, t.highWaterMark),
		s.setInt(C.ZMQ_TCP_KEEPALIVE, 1),
		s.setMilliseconds(C.ZMQ_RECONNECT_IVL, t.reconnect),
		s.setMilliseconds(C.ZMQ_RECONNECT_IVL_MAX, t.reconnectMax),
		s.setMilliseconds(C.ZMQ_HANDSHAKE_IVL, t.handshake),
		s.setMilliseconds(C.ZMQ_HEARTBEAT_IVL, t.heartbeat),
		s.setMilliseconds(C.ZMQ_HEARTBEAT_TIMEOUT, t.heartbeatTimeout),
		s.setMilliseconds(C.ZMQ_HEARTBEAT_TTL, t.heartbeatTimeout),
		s.setMilliseconds(C.ZMQ_CONNECT_TIMEOUT, t.connect),
		failure(C.zmqsub_set_int64(s.p, C.ZMQ_MAXMSGSIZE, C.int64_t(c.MaxMessageBytes))),
	)
}

// onlyConnected keeps messages from being queued for a connection that is not there yet.
func (s *socket) onlyConnected() error { return s.setInt(C.ZMQ_IMMEDIATE, 1) }

func (s *socket) connect(endpoint string) error {
	c := C.CString(endpoint)
	defer C.free(unsafe.Pointer(c))
	return failure(C.zmqsub_connect(s.p, c))
}

func (s *socket) disconnect(endpoint string) error {
	c := C.CString(endpoint)
	defer C.free(unsafe.Pointer(c))
	return failure(C.zmqsub_disconnect(s.p, c))
}

// monitor lets a PAIR that connects to endpoint observe the socket.
func (s *socket) monitor(endpoint string, events int) error {
	c := C.CString(endpoint)
	defer C.free(unsafe.Pointer(c))
	return failure(C.zmqsub_monitor(s.p, c, C.int(events)))
}
