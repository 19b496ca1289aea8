package replica

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"os"
	"time"

	"golang.org/x/time/rate"

	"kvepp/kvblock"
	"kvepp/router/session"
	"kvepp/scoring"
)

const (
	// flushEvery is how long changes are collected under constant load. After a pause, flushBurst changes go at once:
	// requests that come together shall know of each other soon.
	flushEvery = 4 * time.Millisecond
	flushBurst = 32

	maxQueued    = 16 << 20        // bytes that wait for a peer; beyond them it is disconnected
	queuedCost   = 64              // bytes that a message takes besides
	stalledAfter = 2 * time.Second // a peer that takes nothing for so long is disconnected
	silentAfter  = 10 * time.Second
	handshakeIn  = 3 * time.Second
	dumpWithin   = 5 * time.Minute // for a peer to read the index
	maxPeers     = 256
	maxSaid      = 1024
	keptHashes   = 1 << 20 // of pending, whose memory is kept
)

// pending are changes that no peer was told yet.
type pending struct {
	book     []scoring.Change
	hashes   []kvblock.SequenceHash
	chains   [][]kvblock.SequenceHash
	sessions []session.Event
}

func (p *pending) clear() {
	if cap(p.hashes) > keptHashes {
		*p = pending{}
		return
	}
	p.book, p.hashes, p.chains, p.sessions = p.book[:0], p.hashes[:0], p.chains[:0], p.sessions[:0]
}

// observe takes a change of the book, under the book's lock.
func (n *Node) observe(c *scoring.Change) {
	n.mu.Lock()
	p := &n.pending
	kept := *c
	if len(c.Chains) > 0 {
		first := len(p.chains)
		for _, chain := range c.Chains {
			from := len(p.hashes)
			p.hashes = append(p.hashes, chain...)
			p.chains = append(p.chains, p.hashes[from:len(p.hashes):len(p.hashes)])
		}
		kept.Chains = p.chains[first:len(p.chains):len(p.chains)]
	}
	p.book = append(p.book, kept)
	n.mu.Unlock()
	token(n.wake)
}

// observeSession takes an event of a session, under the lock of its table.
func (n *Node) observeSession(e session.Event) {
	n.mu.Lock()
	n.pending.sessions = append(n.pending.sessions, e)
	n.mu.Unlock()
	token(n.wake)
}

// token puts a token into a channel that has room for one.
func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pump tells changes as they come.
func (n *Node) pump() {
	for pace := rate.NewLimiter(rate.Every(flushEvery), flushBurst); ; {
		select {
		case <-n.ctx.Done():
			return
		case <-n.wake:
		}
		if pace.Wait(n.ctx) != nil {
			return
		}
		n.tell()
	}
}

// tell encodes what is new, once for all readers, which share the memory.
func (n *Node) tell() {
	n.telling.Lock()
	defer n.telling.Unlock()
	n.mu.Lock()
	n.pending, n.spare = n.spare, n.pending
	n.mu.Unlock()
	n.own.refresh(n.config.Pool) // after the swap, so that it knows the workers of all changes that have not left
	defer n.spare.clear()
	if len(n.readers) == 0 {
		return
	}
	var e encoder
	for i := range n.spare.book {
		e.change(n, &n.spare.book[i])
	}
	for i := range n.spare.sessions {
		e.session(n, &n.spare.sessions[i])
	}
	e.lessons(n, false)
	for _, message := range e.messages {
		framed(message)
		for _, r := range n.readers {
			r.add(message, n.maxQueued)
		}
	}
}

// encoder encodes changes into messages of about messageBytes.
type encoder struct{ messages [][]byte }

// message returns the message that the next change is appended to.
func (e *encoder) message() *[]byte {
	if n := len(e.messages); n == 0 || len(e.messages[n-1]) >= messageBytes {
		e.messages = append(e.messages, begin(typeChanges))
	}
	return &e.messages[len(e.messages)-1]
}

// change adds a change of the book. A change about a worker that left is none: its requests have ended.
func (e *encoder) change(n *Node, c *scoring.Change) {
	w, known := n.own.byNumber[c.Worker]
	if known || c.Kind != scoring.Booked && c.Kind != scoring.Moved {
		m := e.message()
		*m = appendChange(*m, c, w)
	}
}

func (e *encoder) session(n *Node, s *session.Event) {
	if w, known := n.own.byNumber[s.Worker]; known || s.Kind != session.Bound {
		m := e.message()
		*m = appendSession(*m, s, w)
	}
}

// lessons adds what the book has learned of workers: what is new, or all.
func (e *encoder) lessons(n *Node, all bool) {
	n.config.Book.Lessons(all, func(w kvblock.Worker, values []float64) {
		if name, known := n.own.byNumber[w]; known {
			m := e.message()
			*m = appendLearned(*m, name, values)
		}
	})
}

// reader is a peer that reads what this process tells. Node.telling guards its fields from queue on.
type reader struct {
	origin uint64
	conn   net.Conn
	cancel context.CancelFunc // ends the connection
	wake   chan struct{}      // holds a token if there may be something to send
	done   chan struct{}      // closed at the end
	queue  [][]byte           // messages to send
	queued int                // bytes
	slow   bool               // too much waited
}

// add queues a message. The caller holds Node.telling.
func (r *reader) add(message []byte, most int) {
	if r.queued += len(message) + queuedCost; r.queued > most {
		r.slow, r.queue = true, nil
		r.cancel()
		return
	}
	r.queue = append(r.queue, message)
	token(r.wake)
}

// Serve serves peers at a listener until Close.
func (n *Node) Serve(at net.Listener) error {
	defer context.AfterFunc(n.ctx, func() { at.Close() })()
	for {
		conn, err := at.Accept()
		switch {
		case n.ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil:
			continue
		}
		n.running.Go(func() {
			defer conn.Close()
			defer context.AfterFunc(n.ctx, func() { conn.Close() })()
			n.serve(conn)
		})
	}
}

// serve serves one connection.
func (n *Node) serve(raw net.Conn) {
	_ = raw.SetDeadline(time.Now().Add(handshakeIn))
	conn, err := n.config.Security.handshake(n.ctx, raw, tls.Server)
	var peer greeting
	if err == nil {
		peer, err = receiveGreeting(conn)
	}
	own := greeting{Origin: n.origin, Name: n.config.Name}
	if err == nil {
		err = n.admit(&peer, conn)
	}
	if err == nil {
		own.Proof, err = n.config.Security.proof(conn, serverProof)
	}
	if err != nil {
		n.refuse(conn, raw.RemoteAddr(), ReasonOf(err))
		return
	}
	if c, ok := raw.(interface {
		Begin()
		End()
	}); ok { // connections that are in use make no room for others
		c.Begin()
		defer c.End()
	}
	switch {
	case peer.Index:
		n.serveIndex(conn, &own)
	case own.send(conn) == nil:
		n.serveReader(conn, peer.Origin)
	}
}

// admit returns why a peer is refused; nil: it is not.
func (n *Node) admit(peer *greeting, conn net.Conn) error {
	n.telling.Lock()
	defer n.telling.Unlock()
	switch {
	case peer.Origin == n.origin:
		return refused(Self)
	case !n.config.Security.proves(conn, clientProof, peer.Proof):
		return refused(BadToken)
	case peer.Group != n.config.Group:
		return refused(OtherGroup)
	case !peer.Index && n.readers[peer.Origin] == nil && len(n.readers) >= maxPeers:
		return refused(TooMany)
	}
	return nil
}

// refuse tells a peer why it is refused. conn is nil if the handshake failed.
func (n *Node) refuse(conn net.Conn, from net.Addr, why Reason) {
	if why == "" {
		return
	}
	n.telling.Lock()
	n.refusing("a peer that wants to read what this replica tells is refused", from, why)
	n.telling.Unlock()
	if conn != nil {
		_ = (&greeting{Refused: why}).send(conn)
	}
}

// serveReader tells a peer until its connection ends.
func (n *Node) serveReader(conn net.Conn, origin uint64) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { conn.Close() })
	r := &reader{origin: origin, conn: conn, cancel: cancel, wake: make(chan struct{}, 1), done: make(chan struct{})}
	n.telling.Lock()
	if former := n.readers[origin]; former != nil {
		former.cancel() // a peer reads once
	}
	n.readers[origin] = r
	n.telling.Unlock()
	n.running.Go(func() {
		defer cancel()
		n.hearPings(r)
	})
	err := n.tellReader(ctx, r)
	close(r.done)
	n.telling.Lock()
	defer n.telling.Unlock()
	if n.readers[origin] == r {
		delete(n.readers, origin)
	}
	if r.slow || errors.Is(err, os.ErrDeadlineExceeded) {
		n.refusing("a peer reads too slowly what this replica tells; it is disconnected", conn.RemoteAddr(), Stalled)
	}
}

// refusing counts that a peer is refused, and logs it once for each host and reason. The caller holds n.telling.
func (n *Node) refusing(text string, from net.Addr, why Reason) {
	n.counts.add(Refused, string(why))
	host, _, _ := net.SplitHostPort(from.String())
	if about := host + string(why); why != Self && !n.said[about] && len(n.said) < maxSaid {
		n.said[about] = true
		n.config.Log.Warn(text, "peer", from.String(), "reason", why, "fix", why.Fix())
	}
}

// hearPings queues a peer's pings for it, behind what waits, until its connection ends.
func (n *Node) hearPings(r *reader) {
	for message := []byte(nil); ; {
		_ = r.conn.SetReadDeadline(time.Now().Add(silentAfter))
		var err error
		if message, err = receive(r.conn, message, maxRequest); err != nil || message[0] != typePing {
			return
		}
		d := decoder{data: message[1:]}
		echo := framed(binary.AppendUvarint(begin(typePing), d.uint(math.MaxInt64, "time")))
		if d.end() != nil {
			return
		}
		n.telling.Lock()
		r.add(echo, n.maxQueued)
		n.telling.Unlock()
	}
}

// tellReader sends a peer a snapshot, and then what waits for it until ctx or this process ends.
func (n *Node) tellReader(ctx context.Context, r *reader) error {
	if err := n.tellSnapshot(r); err != nil {
		return err
	}
	for {
		n.telling.Lock()
		closing, message := n.closing, []byte(nil)
		if len(r.queue) > 0 {
			message, r.queue[0], r.queue = r.queue[0], nil, r.queue[1:]
			r.queued -= len(message) + queuedCost
		}
		n.telling.Unlock()
		switch {
		case message != nil:
			if err := n.sendTo(r, message); err != nil {
				return err
			}
		case closing:
			return n.sendTo(r, framed(begin(typeGoodbye)))
		default:
			select {
			case <-r.wake:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// sendTo sends a message to a peer.
func (n *Node) sendTo(r *reader, message []byte) error {
	n.counts.addN(Sent, "", len(message))
	return send(r.conn, stalledAfter, message)
}

// tellSnapshot sends all own bookings, what the book has learned, and all sessions. The changes that happen meanwhile
// are queued. It holds few of the bookings in memory at a time, and the book's lock for few of them.
func (n *Node) tellSnapshot(r *reader) error {
	for place, more := 0, true; more; {
		var e encoder
		n.telling.Lock()
		place, more = n.config.Book.Snapshot(place, func(c *scoring.Change) bool {
			e.change(n, c)
			return len(e.messages) < 2
		})
		if !more {
			e.lessons(n, true)
			for _, table := range n.tables() {
				for _, s := range table.Snapshot() {
					e.session(n, &s)
				}
			}
		}
		n.telling.Unlock()
		for _, message := range e.messages {
			if err := n.sendTo(r, framed(message)); err != nil {
				return err
			}
		}
	}
	return n.sendTo(r, framed(begin(typeSynced)))
}

// patient is a connection whose reads and writes may each take silentAfter.
type patient struct{ net.Conn }

func (c patient) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(silentAfter)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c patient) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(silentAfter)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// indexWriter sends a greeting, and then what is written.
type indexWriter struct {
	patient
	own *greeting // nil: it was sent
}

func (w *indexWriter) Write(p []byte) (int, error) {
	if own := w.own; own != nil {
		if w.own = nil; own.send(w.Conn) != nil {
			return 0, net.ErrClosed
		}
	}
	return w.patient.Write(p)
}

// serveIndex sends this process's index to a peer, after a greeting.
func (n *Node) serveIndex(conn net.Conn, own *greeting) {
	// A peer that does not read must not keep the index from others.
	ctx, cancel := context.WithTimeout(n.ctx, dumpWithin)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if n.config.Dump == nil || errors.Is(n.config.Dump(ctx, &indexWriter{patient{conn}, own}), ErrBusy) {
		_ = (&greeting{Refused: Busy}).send(conn)
	}
}
