package zmqsub

/*
#cgo pkg-config: libzmq
#cgo noescape zmqsub_receive
#cgo nocallback zmqsub_receive
#include <errno.h>
#include "guard.h"
#include "libzmq.h"
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"syscall"
	"unsafe"

	zmq "github.com/pebbe/zmq4"
)

// The guard's bounds; guard.h explains them.
const (
	maxMessageParts = 16
	maxMessageBytes = 16 << 20
	maxCommandBytes = 4 << 10
	fullBytes       = 32 << 20
	cutBytes        = 128 << 20
	allFullBytes    = 128 << 20
	allCutBytes     = 256 << 20
)

// This does not compile if a bound differs from the guard's.
var _ = [1]struct{}{}[maxMessageParts^C.ZMQSUB_MESSAGE_PARTS|maxMessageBytes^C.ZMQSUB_MESSAGE_BYTES|
	maxCommandBytes^C.ZMQSUB_COMMAND_BYTES|
	fullBytes^C.ZMQSUB_FULL|cutBytes^C.ZMQSUB_CUT|allFullBytes^C.ZMQSUB_ALL_FULL|allCutBytes^C.ZMQSUB_ALL_CUT]

// maxFrames is how many frames of a message are kept.
const maxFrames = C.ZMQSUB_FRAMES

// observedEvents tell the state of a connection, and whether libzmq tries again.
const observedEvents = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED |
	zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL |
	zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

// newContext returns a libzmq context with threads I/O threads and at most this many sockets.
func newContext(threads, sockets int) (*zmq.Context, error) {
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(ctx.SetIoThreads(threads), ctx.SetMaxSockets(sockets), ctx.SetBlocky(false)); err != nil {
		return nil, errors.Join(err, ctx.Term())
	}
	handle, err := libzmqPointer(ctx, "ctx")
	if err != nil {
		return nil, errors.Join(err, ctx.Term())
	}
	C.zmqsub_copy(handle) // a libzmq that does not know the option works too, slower
	return ctx, nil
}

// libzmqPointer reads libzmq's own pointer out of the binding's Context or Socket. No function of the binding returns
// it: Socket.String prints it, for sockets without an identity only, and Context has nothing. The field is looked up by
// name and kind, so that a binding that changes gives an error and not a wrong pointer.
func libzmqPointer(of any, field string) (unsafe.Pointer, error) {
	v := reflect.ValueOf(of).Elem().FieldByName(field)
	if v.Kind() != reflect.UnsafePointer {
		return nil, fmt.Errorf("zmqsub: %T of the zmq4 binding has no pointer field %q; adapt libzmqPointer", of, field)
	}
	return v.UnsafePointer(), nil
}

// trim returns memory that libzmq has freed to the system, where the C library keeps it. It takes a millisecond for a
// thousand sockets.
func trim() { C.zmqsub_trim() }

// socket is one libzmq socket. One goroutine at a time may use it. It may move between OS threads only across a full
// memory barrier; a goroutine that moves between threads passes one.
type socket struct {
	*zmq.Socket
	handle unsafe.Pointer  // libzmq's socket; nil after close
	batch  *C.zmqsub_batch // nil: the queue was empty at the last look
	next   int             // index in batch of the next message to return
	view   [maxFrames][]byte

	account *C.zmqsub_account // of the publisher's address; nil: not known yet
	literal bool              // the endpoint is an IP address and a port, so the account is known
	most    int               // the configured high-water mark, in messages; a power of two
	mark    int               // the current high-water mark; less than most after large messages waited
	taken   int               // messages taken since mark was set
}

func newSocket(ctx *zmq.Context, kind zmq.Type) (*socket, error) {
	s, err := ctx.NewSocket(kind)
	if err != nil {
		return nil, err
	}
	handle, err := libzmqPointer(s, "soc")
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &socket{Socket: s, handle: handle}, nil
}

func (s *socket) close() {
	C.zmqsub_free(s.batch)
	s.handle = nil
	s.Socket.Close()
}

// receive takes the next message off the queue without waiting; ok is false if there is none. It drops frames beyond
// maxFrames. The frames are libzmq's memory, valid until the next call.
func (s *socket) receive() (frames [][]byte, ok bool, err error) {
	if !s.buffered() {
		s.next = 0
		if number := C.zmqsub_receive(s.handle, &s.batch, &s.account); number != 0 {
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

// restrain lowers the high-water mark while the waiting messages take too many bytes. waiting is their number, or 0 if
// they do not. receive calls it for each batch. A caller that does not receive for long must call it too: libzmq's mark
// counts messages, and the next ones may be of any size.
//
// libzmq's I/O thread stops reading when the mark is reached. It continues only when the receiver reports how many
// messages it has taken, which it does at each multiple of half the mark. The mark that the I/O thread uses lags behind
// the receiver's. A wrong change can therefore leave the I/O thread waiting for a report that never comes. Two rules
// exclude that:
//
//   - The mark is lowered to 2, and only while a message waits: taking that message is reported, because half the mark
//     is 1.
//   - Marks are powers of two. The mark is doubled only when as many messages as the old mark were taken since the last
//     change. Between two reports there is then one doubling at most, and the messages that the old mark lets in
//     contain a multiple of both halves.
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

// lowMark is the high-water mark, in messages, while the waiting messages take too many bytes.
const lowMark = 2

// tooMuch returns the number of waiting messages if they take too many bytes, else 0.
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

// countForEndpoint makes the socket's messages count for the endpoint's address, if that is an IP address. Call it
// before the socket connects.
func (s *socket) countForEndpoint(endpoint string) {
	address, err := netip.ParseAddrPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		return // a host name, which libzmq resolves for each connection, or another transport
	}
	ip := address.Addr().As16()
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], address.Port())
	s.account, s.literal = C.zmqsub_account_at((*C.uchar)(&ip[0]), (*C.uchar)(&port[0])), true
}

// countFor makes the socket's messages count for the address of the connection with this descriptor. If the endpoint is
// an IP address, it does nothing.
//
// For a host name this can be wrong for a short time: if the connection has ended and another one has its descriptor
// already, messages count for that one's address until the next connection of this socket. Its bounds are then those of
// another publisher, which may be cut off, and connects again after a pause.
func (s *socket) countFor(fd int) {
	if !s.literal {
		s.account = C.zmqsub_account_of(C.int(fd))
	}
}

// guarded reports whether libzmq reads its connections through the guard. Call it after a handshake: the guard has then
// seen at least that connection's greeting.
func guarded() bool { return C.zmqsub_greetings() > 0 }

// connections returns the number of connections that all sockets made so far.
func connections() uint64 { return uint64(C.zmqsub_connections()) }

// cutAfter returns the number of the latest connection to the publisher's address that the guard ended, and why, if
// that number is greater than seen; else seen and nil.
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
			"zmqsub: a ZMTP command that is longer than %d bytes, or continues in another frame",
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

// unmonitor ends the observation. Call it before the observer is closed: libzmq's I/O thread waits for its observer,
// and one that is gone blocks it for ever.
func (s *socket) unmonitor() { _ = s.Monitor("", 0) }

// buffered reports whether the next message was taken off the queue already.
func (s *socket) buffered() bool { return s.batch != nil && s.next < int(s.batch.messages) }

// request sends an empty frame and p without waiting. A socket that accepts the first frame accepts both. The error is
// EAGAIN while there is no connection.
func (s *socket) request(p []byte) error {
	_, err := s.SendMessageDontwait("", p)
	if err != nil && zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) {
		return syscall.EAGAIN
	}
	return err
}

// configure sets the options that all connections share.
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

// onlyConnected prevents messages from being queued before there is a connection.
func (s *socket) onlyConnected() error { return s.SetImmediate(true) }
