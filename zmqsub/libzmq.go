package zmqsub

/*
#cgo pkg-config: libzmq
#cgo noescape zmqsub_receive
#cgo nocallback zmqsub_receive
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>
#include "guard.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

// How many frames of a message are kept (no message in the protocols has more than four), and how many messages one
// call takes from a socket.
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
	uint64_t full; // not 0: so many messages wait, and they are so large that the socket should let less in
	zmqsub_message message[ZMQSUB_MESSAGES];
} zmqsub_batch;

static void zmqsub_release(zmqsub_message *m) {
	for (int i = 0; i < m->frames; i++)
		zmq_msg_close(&m->msg[i]);
	m->frames = 0;
}

// Lets go of what the batch holds and takes from the socket what is there, as far as a batch goes. Returns 0, or the
// error number when nothing was taken: then there is no batch any more, because thousands of sockets are silent most of
// the time. One crossing between Go and C for up to 8 messages, and no copy of their bytes to Go, are what this file is
// for: through a binding that crosses for each frame and copies it, receiving costs twice the CPU.
//
// What is taken goes off *account, which the first message tells if it is not known.
static int zmqsub_receive(void *socket, zmqsub_batch **held, zmqsub_account **account) {
	zmqsub_batch *b = *held;
	zmqsub_amount came = {0}, took = {0};
	if (*account)
		came = zmqsub_came(*account);
	if (!b) {
		if (!(b = malloc(sizeof *b)))
			return ENOMEM;
		b->messages = 0;
		*held = b;
	}
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
				if (b->messages > 0)
					goto out;
				if (*account)
					zmqsub_took_all(*account, came); // and what libzmq left out, which was for another topic
				free(b);
				*held = NULL;
				return error;
			}
			more = zmq_msg_more(msg);
			took.bytes += zmq_msg_size(msg) + ZMQSUB_FRAME_COST;
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
out:
	if (!*account)
		*account = zmqsub_account_of(zmq_msg_get(&b->message[0].msg[0], ZMQ_SRCFD));
	b->full = 0;
	if (*account) {
		took.messages = b->messages;
		zmqsub_took(*account, took);
		b->full = zmqsub_too_much(*account);
	}
	return 0;
}

// Has libzmq copy messages out of the 8 KiB that it reads at a time. By default they keep these, and as much again for
// counting how many do, and the next ones are read into new memory: where messages wait for a moment, that costs more
// than the copy. libzmq takes the option since 4.3, but shows its name, ZMQ_ZERO_COPY_RECV, only to who asks for
// drafts.
static int zmqsub_copy(void *context) { return zmq_ctx_set(context, 10, 0); }

static void zmqsub_trim(void) {
#ifdef __GLIBC__
	malloc_trim(0);
#endif
}

static void zmqsub_free(zmqsub_batch *b) {
	if (!b)
		return;
	for (int i = 0; i < b->messages; i++)
		zmqsub_release(&b->message[i]);
	free(b);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	zmq "github.com/pebbe/zmq4"
)

// The guard's bounds, which guard.h explains.
const (
	maxMessageParts = 16
	maxMessageBytes = 16 << 20
	maxCommandBytes = 4 << 10
	fullBytes       = 32 << 20
	cutBytes        = 128 << 20
	allFullBytes    = 128 << 20
	allCutBytes     = 256 << 20
)

// It does not compile where they are others than the guard's.
var _ = [1]struct{}{}[maxMessageParts^C.ZMQSUB_MESSAGE_PARTS|maxMessageBytes^C.ZMQSUB_MESSAGE_BYTES|maxCommandBytes^C.ZMQSUB_COMMAND_BYTES|
	fullBytes^C.ZMQSUB_FULL|cutBytes^C.ZMQSUB_CUT|allFullBytes^C.ZMQSUB_ALL_FULL|allCutBytes^C.ZMQSUB_ALL_CUT]

// maxFrames is how many frames of a message are kept.
const maxFrames = C.ZMQSUB_FRAMES

// observedEvents are those that tell the state of a connection, and whether libzmq goes on trying.
const observedEvents = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED |
	zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

// newContext makes libzmq's context: its I/O threads and sockets.
func newContext(threads, sockets int) (*zmq.Context, error) {
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(ctx.SetIoThreads(threads), ctx.SetMaxSockets(sockets), ctx.SetBlocky(false)); err != nil {
		return nil, errors.Join(err, ctx.Term())
	}
	C.zmqsub_copy(contextHandle(ctx)) // a libzmq that does not know it goes on as it would
	return ctx, nil
}

// contextHandle is what libzmq calls the context; see socket.handle.
func contextHandle(ctx *zmq.Context) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(ctx)) }

// trim gives memory that libzmq has freed back to the system, where the C library keeps it. It takes a millisecond for
// a thousand sockets.
func trim() { C.zmqsub_trim() }

// socket is one of libzmq's. One goroutine at a time may use it; it may move between OS threads as long as a full
// memory barrier lies in between, which a goroutine's move between threads is.
type socket struct {
	*zmq.Socket
	batch *C.zmqsub_batch // nil: nothing was there when looked at last
	next  int             // the next message of batch to give out
	view  [maxFrames][]byte

	account *C.zmqsub_account // of the publisher; nil: not known yet
	most    int               // the configured high-water mark, in messages; a power of two
	mark    int               // the high-water mark that is set; less than most after large messages waited
	taken   int               // messages taken since mark was set
}

func newSocket(ctx *zmq.Context, kind zmq.Type) (*socket, error) {
	s, err := ctx.NewSocket(kind)
	if err != nil {
		return nil, err
	}
	return &socket{Socket: s}, nil
}

func (s *socket) close() {
	C.zmqsub_free(s.batch)
	s.Socket.Close()
}

// handle is what libzmq calls the socket. The binding tells nobody, but keeps it in its first field; a test holds it to
// that.
func (s *socket) handle() unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s.Socket)) }

// receive takes the next message off the queue without waiting; ok is false if there is none. Frames beyond maxFrames
// are dropped. The frames are libzmq's memory, valid until the next call.
func (s *socket) receive() (frames [][]byte, ok bool, err error) {
	if !s.buffered() {
		s.next = 0
		if number := C.zmqsub_receive(s.handle(), &s.batch, &s.account); number != 0 {
			if number == C.EAGAIN {
				return nil, false, nil
			}
			return nil, false, zmq.Errno(number)
		}
		s.taken += int(s.batch.messages)
		s.restrain(int(s.batch.full))
	}
	m := &s.batch.message[s.next]
	s.next++
	n := int(m.frames)
	for i := range n {
		s.view[i] = unsafe.Slice((*byte)(m.frame[i].data), int(m.frame[i].size))
	}
	return s.view[:n], true, nil
}

// restrain lowers the high-water mark while the messages that wait take too many bytes; waiting is their number, and 0
// means that they do not. receive calls it for each batch. A caller that does not receive for long must call it too:
// libzmq's mark counts messages, and the next ones may be of any size.
//
// libzmq's I/O thread stops reading when the mark is reached. It goes on only when the receiver reports how many
// messages it has taken, which it does at each multiple of half the mark. The mark that the I/O thread uses lags behind
// the receiver's. A careless change can therefore leave the I/O thread waiting for a report that never comes. Two rules
// exclude it:
//
//   - The mark is lowered to 2, and only while a message waits: taking that message is reported, because half the mark is 1.
//   - Marks are powers of two. The mark is doubled only when as many messages as the old mark were taken since the last change. Between
//     two reports there is then one doubling at most, and the messages that the old mark lets in contain a multiple of both halves.
func (s *socket) restrain(waiting int) {
	switch {
	case waiting > 0 && s.mark > lowMark:
		if events, err := s.GetEvents(); err == nil && events&zmq.POLLIN != 0 {
			s.setMark(lowMark)
		}
	case waiting == 0 && s.mark < s.most && s.taken >= s.mark:
		s.setMark(2 * s.mark)
	}
}

// lowMark is the high-water mark, in messages, while the messages that wait take too many bytes.
const lowMark = 2

// tooMuch returns how many messages wait if they take too many bytes, else 0.
func (s *socket) tooMuch() int {
	if s.account == nil {
		return 0
	}
	return int(C.zmqsub_too_much(s.account))
}

func (s *socket) setMark(messages int) {
	if s.SetRcvhwm(messages) == nil {
		s.mark, s.taken = messages, 0
	}
}

// connection is one connection of a socket, as the guard knows it.
type connection struct {
	fd     int
	number C.uint64_t
}

// connectionOf returns the connection that has a descriptor. What the socket's messages take counts for its address
// from now on.
func (s *socket) connectionOf(fd int) connection {
	s.account = C.zmqsub_account_of(C.int(fd))
	return connection{fd, C.zmqsub_connection(C.int(fd))}
}

// guarded says whether the guard has seen the connection's greeting. It has when the handshake is over, unless libzmq
// does not read through it.
func (c connection) guarded() bool { return C.zmqsub_greeted(C.int(c.fd), c.number) != 0 }

// connections returns how many connections were made so far, by all sockets.
func connections() uint64 { return uint64(C.zmqsub_connections()) }

// cutAfter returns why the guard ended a connection to the publisher's address, if it was made after the first so many
// of all; and its number.
func (s *socket) cutAfter(seen uint64) (number uint64, why error) {
	if s.account == nil {
		return seen, nil
	}
	var reason C.enum_zmqsub_cut
	if number = uint64(C.zmqsub_latest_cut(s.account, &reason)); number <= seen {
		return seen, nil
	}
	return number, cutError(reason)
}

func cutError(reason C.enum_zmqsub_cut) error {
	switch reason {
	case C.ZMQSUB_CUT_PARTS:
		return fmt.Errorf("zmqsub: a message of more than %d frames", maxMessageParts)
	case C.ZMQSUB_CUT_BYTES:
		return fmt.Errorf("zmqsub: a message of more than %d bytes", maxMessageBytes)
	case C.ZMQSUB_CUT_COMMAND:
		return fmt.Errorf(
			"zmqsub: a ZMTP command that is longer than %d bytes, or goes on in another frame",
			maxCommandBytes,
		)
	case C.ZMQSUB_CUT_GREETING:
		return errors.New("zmqsub: the peer does not speak ZMTP 3, the protocol of ZeroMQ sockets")
	case C.ZMQSUB_CUT_BACKLOG:
		return fmt.Errorf(
			"zmqsub: more than %d bytes of messages wait, or more than %d from all publishers",
			cutBytes,
			allCutBytes,
		)
	}
	return nil
}

// unmonitor ends the observation. While somebody observes, libzmq waits for them: an observer that is closed before
// stops the I/O thread for good.
func (s *socket) unmonitor() { _ = s.Monitor("", 0) }

// buffered says whether the next message was taken off the queue already.
func (s *socket) buffered() bool { return s.batch != nil && s.next < int(s.batch.messages) }

// request sends an empty frame and p, at once or not at all: a socket that is ready for the first is ready for both.
// The error is EAGAIN while there is no connection.
func (s *socket) request(p []byte) error {
	_, err := s.SendMessageDontwait("", p)
	if err != nil && zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) {
		return syscall.EAGAIN
	}
	return err
}

// configure sets the options of every connection.
func (s *socket) configure(c *Config, t *timing) error {
	s.most, s.mark = t.highWaterMark, t.highWaterMark
	return errors.Join(
		s.SetLinger(0),
		s.SetIpv6(true),
		s.SetRcvhwm(t.highWaterMark),
		s.SetTcpKeepalive(1),
		s.SetReconnectIvl(t.reconnect),
		s.SetReconnectIvlMax(t.reconnectMax),
		s.SetHandshakeIvl(t.handshake),
		s.SetHeartbeatIvl(t.heartbeat),
		s.SetHeartbeatTimeout(t.heartbeatTimeout),
		s.SetHeartbeatTtl(t.heartbeatTimeout),
		s.SetConnectTimeout(t.connect),
		s.SetMaxmsgsize(c.MaxMessageBytes),
	)
}

// onlyConnected keeps messages from being queued for a connection that is not there yet.
func (s *socket) onlyConnected() error { return s.SetImmediate(true) }
