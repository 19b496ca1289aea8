package zmqsub

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// The bounds of what one peer may send.
const (
	maxMessageParts = 16       // frames of a message; the protocols have four at most
	maxMessageBytes = 16 << 20 // bytes of a message, its frames together
	maxCommandBytes = 4 << 10  // bytes of a ZMTP command; libzmq keeps the peer's properties from the handshake
)

// The bounds of the bytes that wait for the receiver. A connection above fullBytes is not read until some were taken.
// While those of all connections together are above allFullBytes, each one has smallFullBytes; above allCutBytes, a
// connection ends if its incomplete message has more than smallCutBytes.
const (
	fullBytes      = 32 << 20
	allFullBytes   = 64 << 20
	allCutBytes    = 128 << 20
	smallFullBytes = 256 << 10
	smallCutBytes  = 1 << 20
)

// leastPiece is the least capacity of a piece of the queue, so that small messages share one.
const leastPiece = 4 << 10

// A relay stands between a peer and libzmq. libzmq speaks the protocol with the peer: greeting, handshake, subscription
// or request, heartbeats. The messages of the peer stay in the relay, as they came, until the receiver takes them:
// libzmq would hold a message of endless frames in memory until its last one, and 64 bytes for a frame of two.
//
// libzmq connects to the relay through a Unix socket of this process.
type relay struct {
	far  net.Conn      // to the peer
	near *net.UnixConn // to libzmq
	all  *atomic.Int64 // bytes in the queues of all relays

	silence time.Duration // how long the peer may send nothing

	ready   chan struct{} // has a token when messages may have come
	greeted chan struct{} // closed when libzmq has finished the handshake
	ended   chan struct{} // closed at the end of the connection; all its messages are in queue
	done    sync.WaitGroup

	mu       sync.Mutex // guards what follows
	room     sync.Cond  // signals that messages were taken, or closed
	queue    [][]byte   // whole messages, in pieces
	latest   []byte     // the messages after those
	whole    int        // bytes of latest that are whole messages
	waiting  int        // bytes of queue, latest and taken
	closed   bool
	exceeded error // the bound that the peer exceeded

	// Only the receiver uses these.
	taken []byte   // a piece; its messages are valid until the next one is taken
	rest  []byte   // the part of taken that was not received
	view  [][]byte // the latest message
}

// startRelay begins to serve a peer and the connection of libzmq that comes to the listener, and closes the listener.
// A message may have at most mostBytes.
func (h *Hub) startRelay(far net.Conn, listener *net.UnixListener, mostBytes int64) (*relay, error) {
	near, err := acceptOwn(listener)
	if err = errors.Join(err, listener.Close()); err != nil {
		far.Close()
		return nil, err
	}
	r := &relay{far: far, near: near, all: &h.waiting, silence: h.timing.heartbeatTimeout,
		ready: make(chan struct{}, 1), greeted: make(chan struct{}), ended: make(chan struct{})}
	r.room.L = &r.mu
	r.done.Go(func() { r.down(frames{most: uint64(mostBytes)}) })
	r.done.Go(r.up)
	return r, nil
}

// acceptOwn accepts a connection of this process; others cannot speak in its name.
func acceptOwn(listener *net.UnixListener) (*net.UnixConn, error) {
	if err := listener.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	for {
		conn, err := listener.AcceptUnix()
		if err != nil {
			return nil, err
		}
		var peer *syscall.Ucred
		raw, err := conn.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) {
				peer, _ = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
			})
		}
		if err == nil && peer != nil && int(peer.Pid) == os.Getpid() {
			return conn, nil
		}
		conn.Close()
	}
}

// close ends the connection, and waits for the relay's goroutines.
func (r *relay) close() {
	r.far.Close()
	r.near.Close()
	r.mu.Lock()
	r.closed = true
	r.room.Signal()
	r.mu.Unlock()
	r.done.Wait()
	r.all.Add(-int64(r.waiting))
}

// cut returns the bound that the peer exceeded; nil: none.
func (r *relay) cut() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.exceeded
}

// up carries libzmq's bytes to the peer: a greeting, a READY command, and after the handshake a subscription or a
// request.
func (r *relay) up() {
	defer r.far.Close()
	f := frames{most: maxMessageBytes}
	for buf := make([]byte, 256); ; {
		n, err := r.near.Read(buf)
		if err != nil {
			return
		}
		if f.count < 2 { // before the peer can respond, whose response may end the connection
			if _, _, _ = f.split(buf[:n], nil, nil); f.count >= 2 {
				close(r.greeted)
			}
		}
		if _, err = r.far.Write(buf[:n]); err != nil {
			return
		}
	}
}

// down carries the peer's greeting and commands to libzmq, and its messages to the queue.
func (r *relay) down(f frames) {
	defer close(r.ended)
	defer r.far.Close()
	defer r.near.Close()
	var commands []byte
	last := time.Now()
	for {
		// A peer that lives answers libzmq's heartbeats at least.
		_ = r.far.SetReadDeadline(time.Now().Add(r.silence))
		buf, n, err := readPooled(r.far.(syscall.Conn))
		if err != nil {
			return
		}
		commands, err = r.add(&f, buf[:n], commands[:0])
		chunks.Put(buf)
		if err == nil && len(commands) > 0 {
			_, err = r.near.Write(commands)
		}
		if err != nil {
			return
		}
		// In dense traffic, wake-ups are most of the cost.
		if now := time.Now(); n < len(buf) && now.Sub(last) < 2*coalesceDelay {
			time.Sleep(coalesceDelay)
		}
		last = time.Now()
	}
}

// add appends the messages in p to the queue, and all else to commands. Then it waits while too much waits.
func (r *relay) add(f *frames, p, commands []byte) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.grow(f, len(p))
	before := len(r.latest)
	r.latest, commands, r.exceeded = f.split(p, r.latest, commands)
	r.whole = len(r.latest) - f.begun
	came := len(r.latest) - before
	r.waiting += came
	if all := r.all.Add(int64(came)); all > allCutBytes && f.begun > smallCutBytes && r.exceeded == nil {
		r.exceeded = fmt.Errorf("zmqsub: a message of more than %d bytes, while more than %d of all publishers wait",
			smallCutBytes, allCutBytes)
	}
	if r.whole > 0 {
		r.signal()
	}
	// The receiver cannot take the beginning of a message.
	for r.exceeded == nil && !r.closed && r.waiting > f.begun && r.waiting > r.bound() {
		r.room.Wait()
	}
	return commands, r.exceeded
}

// grow makes room for n bytes in latest. If it has whole messages, they go to the queue as they are.
func (r *relay) grow(f *frames, n int) {
	if cap(r.latest)-len(r.latest) >= n {
		return
	}
	have := len(r.latest)
	if r.whole > 0 {
		r.queue = append(r.queue, r.latest[:r.whole])
		r.latest, r.whole, have = r.latest[r.whole:], 0, 0
	}
	// An incomplete message doubles its room, but not beyond what it may still bring.
	next := make([]byte, 0, len(r.latest)+max(n, leastPiece, min(have, int(f.most-f.bytes+f.left))))
	r.latest = append(next, r.latest...)
}

// bound returns how many bytes may wait.
func (r *relay) bound() int {
	if r.all.Load() > allFullBytes {
		return smallFullBytes
	}
	return fullBytes
}

// signal puts a token into ready.
func (r *relay) signal() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// receive takes the next message without waiting; ok is false if there is none. The frames are valid until the next
// call. Who gets a token of ready must receive until there is none, or call signal.
func (r *relay) receive() (message [][]byte, ok bool) {
	if len(r.rest) == 0 && !r.take() {
		return nil, false
	}
	r.view = r.view[:0]
	for more := true; more; {
		flags, size, p := r.rest[0], int(r.rest[1]), r.rest[2:]
		if flags&flagLong != 0 {
			size, p = int(binary.BigEndian.Uint64(r.rest[1:])), r.rest[9:]
		}
		r.view = append(r.view, p[:size:size])
		more, r.rest = flags&flagMore != 0, p[size:]
	}
	return r.view, true
}

// take takes the next whole messages off the queue, and returns whether there are any. If not, it frees the memory,
// because of thousands of connections most are silent.
func (r *relay) take() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.Add(-int64(len(r.taken)))
	r.waiting -= len(r.taken)
	r.room.Signal()
	switch spare := r.taken[:0]; {
	case len(r.queue) > 0:
		r.taken, r.queue = r.queue[0], r.queue[1:]
	case r.whole > 0:
		r.taken, r.latest, r.whole = r.latest[:r.whole], append(spare, r.latest[r.whole:]...), 0
	default:
		r.taken = nil
		if len(r.latest) == 0 {
			r.latest = nil
		}
	}
	r.rest = r.taken
	return len(r.taken) > 0
}

// chunks has buffers of relays that read.
var chunks = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// readPooled waits for bytes, and reads them into a buffer of chunks, which the caller puts back. A silent connection
// has no buffer.
func readPooled(conn syscall.Conn) (buf *[64 << 10]byte, n int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	var read error
	err = raw.Read(func(fd uintptr) (done bool) {
		buf = chunks.Get().(*[64 << 10]byte)
		for {
			if n, read = syscall.Read(int(fd), buf[:]); read != syscall.EINTR {
				break
			}
		}
		if n <= 0 {
			chunks.Put(buf)
		}
		return read != syscall.EAGAIN
	})
	if err = errors.Join(err, read); err == nil && n == 0 {
		err = net.ErrClosed
	}
	return buf, n, err
}

// frames follows one direction of a ZMTP connection: a greeting, then frames of a byte of flags, a length of one or
// eight bytes, and content. Source: ZMTP 3.1, https://rfc.zeromq.org/spec/37/.
type frames struct {
	most     uint64  // bytes that a message may have
	greeting int     // bytes of the greeting so far
	header   [9]byte // of the current frame
	got      int     // bytes of header so far
	left     uint64  // bytes of the current frame yet to come
	count    int     // frames so far
	parts    int     // those of the current message
	bytes    uint64  // their content
	begun    int     // bytes of the incomplete message so far, with headers
}

const greetingBytes = 64

// The flags of a frame.
const (
	flagMore = 1 << iota
	flagLong
	flagCommand
)

// split follows the next bytes. It appends those of messages to messages, the others to commands, and each header when
// it is complete. It returns an error if they exceed a bound or are not ZMTP 3.
func (f *frames) split(p, messages, commands []byte) (m, c []byte, err error) {
	for ; f.greeting < greetingBytes && len(p) > 0; f.greeting++ {
		// The signature and the version. Versions before 3 have another frame format.
		b := p[0]
		if f.greeting == 0 && b != 0xff || f.greeting == 9 && b&1 == 0 || f.greeting == 10 && b < 3 {
			return messages, commands, errNotZMTP
		}
		p, commands = p[1:], append(commands, b)
	}
	for len(p) > 0 {
		part := p[:min(f.left, uint64(len(p)))]
		if f.left > 0 {
			p, f.left = p[len(part):], f.left-uint64(len(part))
		} else {
			f.header[f.got] = p[0]
			f.got++
			p = p[1:]
			if f.got < 2 || f.header[0]&flagLong != 0 && f.got < len(f.header) {
				continue
			}
			if err := f.begin(); err != nil {
				return messages, commands, err
			}
			part = f.header[:f.got]
		}
		if f.header[0]&flagCommand != 0 { // it may come between the frames of a message
			commands = append(commands, part...)
		} else {
			messages = append(messages, part...)
			f.begun += len(part)
		}
		if f.left == 0 {
			f.got = 0
			if f.header[0]&(flagMore|flagCommand) == 0 {
				f.parts, f.bytes, f.begun = 0, 0, 0
			}
		}
	}
	return messages, commands, nil
}

var errNotZMTP = errors.New("zmqsub: the peer does not speak ZMTP 3, the protocol of ZeroMQ sockets")

// begin checks the complete header of a frame.
func (f *frames) begin() error {
	f.left = 0
	for _, b := range f.header[1:f.got] {
		f.left = f.left<<8 | uint64(b)
	}
	f.count++
	if f.header[0]&flagCommand != 0 {
		if f.left > maxCommandBytes || f.header[0]&flagMore != 0 {
			return fmt.Errorf("zmqsub: a ZMTP command that is longer than %d bytes, or continues in another frame",
				maxCommandBytes)
		}
		return nil
	}
	switch f.parts++; {
	case f.count == 1: // a message before the handshake
		return errNotZMTP
	case f.parts > maxMessageParts:
		return fmt.Errorf("zmqsub: a message of more than %d frames", maxMessageParts)
	case f.left > f.most || f.bytes+f.left > f.most:
		return fmt.Errorf("zmqsub: a message of more than %d bytes", f.most)
	}
	f.bytes += f.left
	return nil
}
