package zmqsub

import (
	"fmt"
	"os"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// source is a socket that one goroutine reads, waiting through Go's network poller on the descriptor by which libzmq
// signals (ZMQ_FD). A zmq socket may move between threads as long as one at a time uses it with a full memory barrier in
// between, which a goroutine's move between threads is. The simpler zmq_poll was rejected: each call looks at every
// socket, so that a thousand quiet subscriptions would make the busy ones slow.
type source struct {
	socket *zmq.Socket
	signal *os.File
	conn   syscall.RawConn
	frames [][]byte // of the last message
}

// maxFrames is how many frames of a message are kept: no message in the protocol has more than four.
const maxFrames = 5

func newSource(ctx *zmq.Context, kind zmq.Type) (*source, error) {
	soc, err := ctx.NewSocket(kind)
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new %v socket: %w", kind, err)
	}
	s := &source{socket: soc}
	fd, err := soc.GetFd()
	if err == nil {
		// A duplicate, because libzmq closes its own with the socket, and os.File closes this one.
		syscall.ForkLock.RLock()
		fd, err = syscall.Dup(fd)
		if err == nil {
			syscall.CloseOnExec(fd)
		}
		syscall.ForkLock.RUnlock()
	}
	if err == nil {
		s.signal = os.NewFile(uintptr(fd), "zmq "+kind.String())
		s.conn, err = s.signal.SyscallConn()
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("zmqsub: watch a %v socket: %w", kind, err)
	}
	return s, nil
}

// close may be called only when nobody reads.
func (s *source) close() {
	if s.signal != nil {
		s.signal.Close()
	}
	s.socket.Close()
}

// read calls drain now and whenever something may have arrived, until drain returns true. drain must receive until
// nothing is left before it returns false: the descriptor signals only what came after that.
//
// It returns os.ErrDeadlineExceeded when the deadline passed or wake was called; other errors mean that the socket cannot
// be watched any more.
func (s *source) read(drain func() (done bool)) error {
	return s.conn.Read(func(uintptr) bool { return drain() })
}

// setDeadline bounds the reads to come; the zero time lifts the bound, and with it the effect of a wake.
func (s *source) setDeadline(t time.Time) error { return s.signal.SetReadDeadline(t) }

// wake makes a read that waits, or the next, return os.ErrDeadlineExceeded. It may be called from any goroutine.
func (s *source) wake() {
	// The only error is that the source is closed, and then nobody reads.
	_ = s.signal.SetReadDeadline(time.Unix(1, 0))
}

// receive takes the next message off the queue without waiting; ok is false if there is none. Frames beyond maxFrames are
// dropped. The frames are valid until the next call.
func (s *source) receive() (frames [][]byte, ok bool, err error) {
	s.frames = s.frames[:0]
	for {
		// The frames of a message arrive together: only the first can be missing.
		frame, err := s.socket.RecvBytes(zmq.DONTWAIT)
		if err != nil {
			if zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) {
				return nil, false, nil
			}
			return nil, false, err
		}
		if len(s.frames) < maxFrames {
			s.frames = append(s.frames, frame)
		}
		more, err := s.socket.GetRcvmore()
		if err != nil {
			return nil, false, err
		}
		if !more {
			return s.frames, true, nil
		}
	}
}
