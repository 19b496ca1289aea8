package zmqsub

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	zmq "github.com/pebbe/zmq4"
)

// source is a socket that needs no thread to wait for messages: ready has a token when one may have arrived.
type source struct {
	*socket
	poller *poller
	fd     int
	ready  chan struct{}
}

func (h *Hub) newSource(kind zmq.Type) (*source, error) {
	soc, err := newSocket(h.ctx, kind)
	if err != nil {
		return nil, fmt.Errorf("zmqsub: new %v socket: %w", kind, err)
	}
	s := &source{socket: soc, poller: h.poller, ready: make(chan struct{}, 1)}
	if s.fd, err = soc.GetFd(); err == nil {
		err = h.poller.add(s)
	}
	if err != nil {
		soc.close()
		return nil, fmt.Errorf("zmqsub: watch a %v socket: %w", kind, err)
	}
	s.signal() // libzmq signals only after a receive that found nothing
	return s, nil
}

// close must not run while another goroutine uses the source.
func (s *source) close() {
	s.poller.remove(s)
	s.socket.close()
}

// bound limits the bytes of the waiting messages. Call it periodically while no receive runs.
func (s *source) bound() {
	if waiting := s.tooMuch(); waiting > 0 {
		s.restrain(waiting)
		s.signal() // restrain may have consumed libzmq's signal
	}
}

// signal puts a token into ready.
func (s *source) signal() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// poller watches the descriptors with which libzmq signals (ZMQ_FD). All are in one epoll set, and Go's network poller
// watches that set. Thousands of sockets thus need one goroutine, no thread, and no further descriptors.
//
// A descriptor signals once for all messages that arrived since the queue was empty. The receiver of a token must
// therefore receive until the queue is empty, or put the token back.
//
// Two simpler ways were rejected: zmq_poll checks every socket on each call, so that a thousand quiet subscriptions
// would slow down the busy ones; and an os.File for each socket costs a duplicate of its descriptor.
type poller struct {
	file *os.File
	conn syscall.RawConn
	done chan struct{}

	mu      sync.Mutex
	sources map[int32]*source // by descriptor; guarded by mu
}

func newPoller() (*poller, error) {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err := syscall.SetNonblock(fd, true); err != nil { // os.NewFile polls only non-blocking descriptors
		syscall.Close(fd)
		return nil, err
	}
	p := &poller{file: os.NewFile(uintptr(fd), "zmqsub epoll"), done: make(chan struct{}), sources: map[int32]*source{}}
	if p.conn, err = p.file.SyscallConn(); err != nil {
		p.file.Close()
		return nil, err
	}
	go p.run(fd)
	return p, nil
}

// close stops the poller. The sources must be closed before.
func (p *poller) close() {
	p.file.Close()
	<-p.done
}

// epollET is EPOLLET as the unsigned number that EpollEvent wants.
const epollET = 1 << 31

func (p *poller) add(s *source) error {
	p.mu.Lock()
	p.sources[int32(s.fd)] = s
	p.mu.Unlock()
	var add error
	err := p.conn.Control(func(fd uintptr) {
		event := syscall.EpollEvent{Events: syscall.EPOLLIN | epollET, Fd: int32(s.fd)}
		add = syscall.EpollCtl(int(fd), syscall.EPOLL_CTL_ADD, s.fd, &event)
	})
	if err == nil {
		err = add
	}
	if err != nil {
		p.forget(s)
	}
	return err
}

func (p *poller) remove(s *source) {
	p.forget(s)
	// The only errors are that the set is closed or that the descriptor is not in it. Both are fine.
	_ = p.conn.Control(func(fd uintptr) { _ = syscall.EpollCtl(int(fd), syscall.EPOLL_CTL_DEL, s.fd, nil) })
}

func (p *poller) forget(s *source) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sources, int32(s.fd))
}

// run hands out tokens until the set is closed. If a descriptor was closed and reused by another source, that source
// may get a token without a message.
func (p *poller) run(fd int) {
	defer close(p.done)
	var events [128]syscall.EpollEvent
	_ = p.conn.Read(func(uintptr) (done bool) {
		for {
			n, err := syscall.EpollWait(fd, events[:], 0)
			if err == syscall.EINTR {
				continue
			}
			if err != nil {
				return true
			}
			p.mu.Lock()
			for _, e := range events[:n] {
				if s := p.sources[e.Fd]; s != nil {
					s.signal()
				}
			}
			p.mu.Unlock()
			if n < len(events) {
				return false
			}
		}
	})
}
